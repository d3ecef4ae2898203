import { allRoutes, call, Refused } from './api.js'
import { byId, make, show, write } from './dom.js'

const RECORD_ID = /^[A-Za-z0-9_-]{43}$/

/** A member of `scope.caller`; `source`: the sender of a CloudEvent. @typedef {{ kind: string, name: string }} CallerField */

/** @param {(id: string) => void} go opens the record */
export function prepareSearch(go) {
  const find = byId('find', HTMLInputElement)
  find.addEventListener('input', () => {
    write(byId('search-problem'), '')
    unfold(find.value.trim() !== '' && !RECORD_ID.test(find.value.trim()))
  })
  byId('route').addEventListener('change', fit)
  byId('search').addEventListener('submit', (event) => {
    event.preventDefault()
    void search(go)
  })
}

export function emptySearch() {
  byId('search', HTMLFormElement).reset()
  byId('callers').replaceChildren()
  unfold(false)
  write(byId('search-problem'), '')
}

/** Looks the input up as an id, or else as a key. @param {(id: string) => void} go */
async function search(go) {
  const text = byId('find', HTMLInputElement).value.trim()
  if (text === '') return
  const problem = byId('search-problem')
  write(problem, '')
  try {
    const record =
      RECORD_ID.test(text) && byId('subject').hidden
        ? await call('GET', `v1/records/${text}`)
        : await lookUp(text)
    forget()
    go(record.id)
  } catch (error) {
    if (!(error instanceof Refused)) throw error
    if (error.code === 'record_not_found' && byId('subject').hidden) {
      // A key may look like an id.
      unfold(true)
      write(problem, 'No record has this id. If it is a key, fill in the fields below.')
    } else if (error.code === 'record_not_found')
      write(
        problem,
        'No record: this caller has not used this key for this request, or the record has expired.',
      )
    else write(problem, error.message)
  }
}

/** A claim of digits may be a number or a string: two different callers. @param {string} key */
async function lookUp(key) {
  const [asText, asWritten] = [subject(key, (value) => value), subject(key, literal)]
  try {
    return await call('POST', 'v1/records/lookup', { body: asText })
  } catch (error) {
    const same = JSON.stringify(asText) === JSON.stringify(asWritten)
    if (same || !(error instanceof Refused) || error.code !== 'record_not_found') throw error
    return await call('POST', 'v1/records/lookup', { body: asWritten })
  }
}

/** @param {string} value */
function literal(value) {
  return /^(?:-?\d{1,16}|true|false)$/.test(value) ? JSON.parse(value.replace(/^(-?)0+(?=\d)/, '$1')) : value
}

/** @typedef {string | number | boolean} Claim */

/** @param {string} key @param {(value: string) => Claim} read reads a claim */
function subject(key, read) {
  const fields = ['route', 'method', 'path'].map((id) => [id, valueOf(id)])
  /** @type {Record<string, Claim>} */
  const caller = {}
  for (const [n, { kind, name }] of callerFields().entries()) {
    const value = byId(`caller-${n}`, HTMLInputElement).value
    if (value === '') continue
    if (kind === 'cookie')
      caller['cookie'] = [caller['cookie'], `${name}=${value}`]
        .filter((line) => line !== undefined)
        .join('; ')
    else caller[name] = kind === 'jwt' ? read(value) : value
  }
  return { key, caller, ...Object.fromEntries(fields.filter(([, value]) => value !== '')) }
}

/** @param {string} id */
function valueOf(id) {
  const field = byId(id)
  return field instanceof HTMLInputElement || field instanceof HTMLSelectElement ? field.value.trim() : ''
}

/** Credentials stay on the page no longer than needed. */
function forget() {
  for (const input of byId('callers').querySelectorAll('input')) input.value = ''
  byId('find', HTMLInputElement).value = ''
  unfold(false)
}

/** @param {boolean} shown */
function unfold(shown) {
  if (shown && byId('subject').hidden) fit()
  show(byId('subject'), shown)
}

function chosen() {
  return allRoutes().find(({ name }) => name === valueOf('route')) ?? null
}

/** Shows the fields of the chosen route's scope. */
function fit() {
  const route = chosen()
  const methods = route?.match?.methods ?? ['POST', 'PATCH', 'PUT', 'DELETE']
  byId('method').replaceChildren(...methods.map((one) => make('option', { value: one }, one)))
  const path = byId('path', HTMLInputElement)
  const pattern = route?.match?.path ?? ''
  const literal = pattern !== '' && !/\/:|\/\*$/.test(pattern)
  path.placeholder = pattern === '' ? '/v1/payments' : pattern
  path.value = literal ? pattern : ''
  const off = { autocomplete: 'off', autocapitalize: 'none', spellcheck: 'false' }
  const inputs = callerFields().map(({ kind, name }, n) => {
    const id = `caller-${n}`
    const type = kind === 'jwt' || kind === 'tls' || kind === 'source' ? 'text' : 'password'
    const label = make('label', { for: id }, `${LABELS[kind] ?? kind} ${name}`)
    return make('div', { class: 'wide' }, label, make('input', { id, type, ...off }))
  })
  byId('callers').replaceChildren(...inputs)
}

/** @type {Readonly<Record<string, string>>} */
const LABELS = {
  cookie: 'Caller’s cookie',
  header: 'Caller’s header',
  jwt: 'Caller’s token claim',
  source: 'Header',
}

/** @returns {CallerField[]} */
function callerFields() {
  const route = chosen() ?? allRoutes().at(-1)
  const { caller = 'none' } = route?.scope ?? {}
  const fields = (caller === 'none' ? [] : caller).map((source) => {
    const [, kind = '', name = ''] = /^(\w+):(.*)$/.exec(source) ?? []
    return { kind, name }
  })
  return route?.key.from.includes('header:ce-id')
    ? [...fields, { kind: 'source', name: 'ce-source' }]
    : fields
}

/** @param {string} id of a select @param {string} first label of the empty choice */
export function fillRoutes(id, first) {
  const select = byId(id, HTMLSelectElement)
  const chosen = select.value
  select.replaceChildren(
    make('option', { value: '' }, first),
    ...allRoutes().map(({ name }) => make('option', { value: name }, name)),
  )
  select.value = allRoutes().some(({ name }) => name === chosen) ? chosen : ''
}
