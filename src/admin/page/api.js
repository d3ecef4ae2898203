/** Calls the admin API with this tab's token, and holds the routes in force. */

const KEPT_AS = 'idempotency-proxy-token'
const TIMEOUT = 20_000

/** A failed call, with a message for the reader. `code` is the API's, or `unreachable`. */
export class Refused extends Error {
  /** @param {string} code @param {string} words */
  constructor(code, words) {
    super(words)
    this.code = code
  }
}

/** What the page knows better than the API. @type {Readonly<Record<string, string>>} */
const WORDS = {
  unauthorized: 'The proxy does not accept this token.',
  origin_not_allowed: 'The proxy sees this page as another origin. Open it at the proxy’s own address.',
  host_not_allowed: `The proxy does not accept the host “${location.host}”. Open the page by its IP address, or add the host to admin.hosts.`,
}

export function token() {
  return sessionStorage.getItem(KEPT_AS)
}

/** @param {string | null} value */
export function keepToken(value) {
  if (value === null) sessionStorage.removeItem(KEPT_AS)
  else sessionStorage.setItem(KEPT_AS, value)
}

/**
 * @param {'GET' | 'POST' | 'DELETE'} method
 * @param {string} path relative to the page
 * @param {{ body?: object, version?: number }} [what] `version` goes in `If-Match`
 * @returns {Promise<any>} the JSON of the answer; null where it has none
 * @throws {Refused}
 */
export async function call(method, path, { body, version } = {}) {
  const response = await send(path, {
    method,
    headers: {
      // Headers carry only bytes: tokens have no other characters.
      authorization: `Bearer ${(token() ?? '').replace(/[^\x20-\x7e\x80-\xff]/g, '?')}`,
      ...(body === undefined ? {} : { 'content-type': 'application/json' }),
      ...(version === undefined ? {} : { 'if-match': `"${version}"` }),
    },
    body: body === undefined ? null : JSON.stringify(body),
  })
  const text = await response.text().catch(() => '')
  let json = null
  try {
    json = text === '' ? null : JSON.parse(text)
  } catch {
    const message = `The response (${response.status}) is not from the admin API. Is another proxy in between?`
    throw new Refused('unreadable', message)
  }
  if (response.ok) return json
  const { code = 'unknown', title = 'The proxy refused', detail = response.status } = json ?? {}
  throw new Refused(code, WORDS[code] ?? `${title}: ${detail}.`)
}

/** Fetches a path that needs no token. @param {string} path */
export async function open(path) {
  const response = await send(path, {})
  return { status: response.status, text: await response.text() }
}

/** @param {string} path @param {RequestInit} init */
async function send(path, init) {
  try {
    const signal = AbortSignal.timeout(TIMEOUT)
    return await fetch(path, { ...init, cache: 'no-store', credentials: 'omit', signal })
  } catch {
    throw new Refused('unreachable', 'The proxy does not answer.')
  }
}

/** @typedef {import('./words.js').Route} Route */

/** @type {readonly Route[]} */
let routes = []
/** @type {Route | null} */
let fallback = null
let protectsUnmatched = false

/** Reads the routes of the configuration in force. */
export async function readRoutes() {
  const config = await call('GET', 'v1/config')
  routes = config.routes
  fallback = config.defaults
  protectsUnmatched = config.unmatched === 'protect'
}

/** A route that is no longer configured counts as `defaults`. @param {string} name */
export function routeOf(name) {
  return routes.find((route) => route.name === name) ?? fallback
}

/** @returns {Route[]} those a record may belong to */
export function allRoutes() {
  return [
    ...routes,
    ...(protectsUnmatched && fallback !== null ? [{ ...fallback, name: 'default', match: null }] : []),
  ]
}
