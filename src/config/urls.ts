import { normalisePath } from '../core/route.ts'
import { isLoopback, type Parsed, parsed, refused } from './units.ts'

export const UPSTREAM = 'http://host:port, https://host:port or unix:/absolute/path'

/** An origin, or a socket. Nothing else: every request goes to the target that its client sent. */
export function parseUpstreamUrl(text: string): Parsed<string> {
  if (text.startsWith('unix:')) {
    return /^unix:\/(?!\/)[^\0]+$/.test(text) ? parsed(text) : refused(text, UPSTREAM)
  }
  const url = /^https?:\/\//i.test(text) ? URL.parse(text) : null
  if (url === null || url.port === '0') return refused(text, UPSTREAM)
  if (url.username !== '' || url.password !== '')
    return refused(text, `${UPSTREAM}, without credentials: clients send their own`)
  if (/[?#]/.test(text))
    return refused(text, `${UPSTREAM}, without a query or a fragment: targets are sent as they came`)
  if (url.pathname !== '/')
    return refused(text, `${UPSTREAM}, without a path: targets are sent upstream as they came`)
  return parsed(url.origin)
}

export const STORE = 'memory:, sqlite:<path>, redis://host:port/db or rediss://host:port/db'

export function parseStoreUrl(text: string): Parsed<string> {
  if (text === 'memory:') return parsed(text)
  if (text === 'sqlite::memory:')
    return refused(text, `${STORE}; memory: is the store that lasts as long as the process`)
  if (/^sqlite:(?!\/\/)[^\0]+$/.test(text)) return parsed(text)
  const url = /^rediss?:\/\/[^/]/.test(text) ? URL.parse(text) : null
  if (url === null || url.hostname === '' || url.port === '0' || !/^(\/\d{0,5})?$/.test(url.pathname))
    return refused(text, STORE)
  // The Redis client takes options from a query: one could turn on the resending of commands.
  if (/[?#]/.test(text)) return refused(text, `${STORE}, without a query or a fragment`)
  return parsed(text)
}

/** Whether other machines, and so other services, can have the same store. */
export function isSharedStore(url: string): boolean {
  return !/^(memory|sqlite):/.test(url)
}

export const PROBLEM_BASE =
  'an absolute URI that ends in /, :, # or =, since the code is put after it, such as https://docs.example.com/problems/'

export function parseProblemBase(text: string): Parsed<string> {
  const valid = /^[a-z][a-z0-9+.-]*:[!-~]*[/:#=]$/i.test(text) && !/["<>\\^`{|}]/.test(text)
  const absolute =
    valid && (!/^https?:/i.test(text) || (/^https?:\/\/[^/]/i.test(text) && URL.canParse(text)))
  return absolute ? parsed(text) : refused(text, PROBLEM_BASE)
}

export const JWKS =
  'the https:// URL of a JWK Set (http:// for a loopback host alone), without credentials and fragment'

/** What comes from there decides who a caller is: nobody on the way may change it. */
export function parseJwksUrl(text: string): Parsed<string> {
  const url = /^https?:\/\/[^/]/i.test(text) && !/[#\s]/.test(text) ? URL.parse(text) : null
  if (url === null || url.port === '0' || url.username !== '' || url.password !== '')
    return refused(text, JWKS)
  const local = isLoopback(url.hostname.replace(/^\[|\]$/g, ''))
  return url.protocol === 'https:' || local ? parsed(url.href) : refused(text, JWKS)
}

const PATH_CHARACTERS = /^\/(?:[A-Za-z0-9\-._~!$&'()+,;=:@/]|%[0-9A-Fa-f]{2})*$/
export const OWN_PATH =
  'one exact path, such as /v1/status, in its normal form: no dot segments, no //, no slash at the end, no needless percent-encoding, no query'

/** A path that the proxy answers itself. It is compared with normalised ones. */
export function parseOwnPath(text: string): Parsed<string> {
  const literal = PATH_CHARACTERS.test(text) && !text.includes('/:')
  const valid = literal && text !== '/' && normalisePath(text) === text
  return valid ? parsed(text) : refused(text, OWN_PATH)
}

export const PROBE_TARGET =
  'a path that begins with one /, such as /v1/me or /v1/me?brief=1; other characters percent-encoded, no fragment'

export const QUESTION_TARGET = `${PROBE_TARGET}; {key}, {record} and {:name}, a segment of the route's path, stand in it`

/** A target into which the key or the id of a record is put, percent-encoded. */
export function parseQuestionTarget(text: string): Parsed<string> {
  const example = text.replaceAll(/\{(?:key|record|:[A-Za-z_][A-Za-z0-9_]*)\}/g, 'x')
  return /[{}]/.test(example) || !parseProbeTarget(example).ok ? refused(text, QUESTION_TARGET) : parsed(text)
}

/** The target of a request of the proxy's own: origin form (RFC 9112 §3.2.1). */
export function parseProbeTarget(text: string): Parsed<string> {
  const [path = '', ...query] = text.split('?')
  const valid = PATH_CHARACTERS.test(path) && !path.startsWith('//')
  // A query is anything that a request line can carry.
  return valid && /^[!-~]*$/.test(query.join('?')) && !text.includes('#')
    ? parsed(text)
    : refused(text, PROBE_TARGET)
}
