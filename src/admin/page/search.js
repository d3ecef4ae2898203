import { allRoutes, call, Refused } from './api.js'
import { byId, make, show, write } from './dom.js'

const RECORD_ID = /^[A-Za-z0-9_-]{43}$/

/** @typedef {{ label: string, claim: boolean, secret: boolean, put: (caller: Record<string, string | number | boolean>, value: string | number | boolean) => void }} CallerField */

/** @param {(id: string) => void} go shows the record of that id */
export function openSearch(go) {
  const form = byId('search', HTMLFormElement)
  const find = byId('find', HTMLInputElement)
  form.reset()
  unfold(false)
  write(byId('search-problem'), '')
  find.addEventListener('input', () => {
    write(byId('search-problem'), '')
    unfold(find.value.trim() !== '' && !RECORD_ID.test(find.value.trim()))
  })
  byId('route').addEventListener('change', fit)
  form.addEventListener('submit', (event) => {
    event.preventDefault()
    void search(go)
  })
}

/** Asks by id, or by key where it is none. @param {(id: string) => void} go */
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
      write(problem, 'There is no record of that id. If it is a key, say whose it is.')
    } else if (error.code === 'record_not_found')
      write(
        problem,
        'No record: this caller has not used this key for this request here, or the record has expired.',
      )
    else write(problem, error.message)
  }
}

/** A claim that reads like a number may be one, or a string of digits: another caller. @param {string} key */
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
  const { route, method, path } = Object.fromEntries(
    ['route', 'method', 'path'].map((id) => [id, valueOf(id)]),
  )
  /** @type {Record<string, Claim>} */
  const caller = {}
  for (const [n, field] of callerFields().entries()) {
    const value = byId(`caller-${n}`, HTMLInputElement).value
    if (value !== '') field.put(caller, field.claim ? read(value) : value)
  }
  return {
    key,
    caller,
    ...(route === '' ? {} : { route }),
    ...(method === '' ? {} : { method }),
    ...(path === '' ? {} : { path }),
  }
}

/** @param {string} id */
function valueOf(id) {
  const field = byId(id)
  return field instanceof HTMLInputElement || field instanceof HTMLSelectElement ? field.value.trim() : ''
}

/** What a caller sent stays on the page no longer than it is needed. */
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

/** Asks for what the chosen route tells callers and requests apart by. */
function fit() {
  const route = chosen()
  const methods = route?.match?.methods ?? ['POST', 'PATCH', 'PUT', 'DELETE']
  byId('method').replaceChildren(...methods.map((one) => make('option', { value: one }, one)))
  const path = byId('path', HTMLInputElement)
  const pattern = route?.match?.path ?? ''
  const literal = pattern !== '' && !/\/:|\/\*$/.test(pattern)
  path.placeholder = pattern === '' ? '/v1/payments' : pattern
  path.value = literal ? pattern : ''
  byId('callers').replaceChildren(
    ...callerFields().map(({ label, secret }, n) =>
      make(
        'div',
        { class: 'wide' },
        make('label', { for: `caller-${n}` }, label),
        make('input', {
          id: `caller-${n}`,
          type: secret ? 'password' : 'text',
          autocomplete: 'off',
          autocapitalize: 'none',
          spellcheck: 'false',
        }),
      ),
    ),
  )
}

/** @returns {CallerField[]} */
function callerFields() {
  const route = chosen() ?? allRoutes().at(-1)
  /** @type {CallerField[]} */
  const fields = []
  const { caller = 'none' } = route?.scope ?? {}
  for (const source of caller === 'none' ? [] : caller) {
    const [, kind = '', name = ''] = /^(\w+):(.*)$/.exec(source) ?? []
    if (kind === 'cookie') {
      /** @type {CallerField['put']} */
      const put = (caller, value) => {
        caller['cookie'] = [
          ...(caller['cookie'] === undefined ? [] : [caller['cookie']]),
          `${name}=${value}`,
        ].join('; ')
      }
      fields.push({ label: `Caller’s cookie ${name}`, claim: false, secret: true, put })
    } else {
      const label = kind === 'jwt' ? `Caller: the token’s claim ${name}` : `Caller’s header ${name}`
      fields.push({
        label,
        claim: kind === 'jwt',
        secret: kind !== 'jwt',
        put: (caller, value) => void (caller[name] = value),
      })
    }
  }
  if (route?.key.from.includes('header:ce-id'))
    fields.push({
      label: 'Header ce-source',
      claim: false,
      secret: false,
      put: (caller, value) => void (caller['ce-source'] = value),
    })
  return fields
}

/** @param {string} id of a select @param {string} first what the empty choice is called */
export function fillRoutes(id, first) {
  const select = byId(id, HTMLSelectElement)
  const chosen = select.value
  select.replaceChildren(
    make('option', { value: '' }, first),
    ...allRoutes().map(({ name }) => make('option', { value: name }, name)),
  )
  select.value = allRoutes().some(({ name }) => name === chosen) ? chosen : ''
}
