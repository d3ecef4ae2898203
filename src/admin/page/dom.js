/** Inserts text as text: the page never parses a string as markup. */

/**
 * The element with that id, which must be of that class.
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} [type]
 * @returns {T}
 */
export function byId(id, type) {
  const found = document.getElementById(id)
  if (!(found instanceof (type ?? HTMLElement))) throw new Error(`#${id} is not of the expected class`)
  return /** @type {T} */ (found)
}

/**
 * @param {string} tag
 * @param {Readonly<Record<string, string>>} [attributes]
 * @param {...(Node | string)} children
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value)
  element.append(...children)
  return element
}

/**
 * Writes the text only if it differs, so that nothing moves and no selection is lost.
 * @param {Element | null | undefined} element
 * @param {string} text
 */
export function write(element, text) {
  if (element && element.textContent !== text) element.textContent = text
}

/** @param {HTMLElement} element @param {boolean} shown */
export function show(element, shown) {
  if (element.hidden === shown) element.hidden = !shown
}

/** @param {string} text */
export function announce(text) {
  const toast = byId('toast')
  toast.textContent = text
  toast.classList.add('seen')
  clearTimeout(fading)
  fading = setTimeout(() => toast.classList.remove('seen'), 8000)
}
/** @type {ReturnType<typeof setTimeout> | undefined} */
let fading
