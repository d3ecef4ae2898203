import { type Parsed, parsed, refused } from './units.ts'

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

export const PROBLEM_BASE =
  'an absolute URI that ends in /, :, # or =, since the code is put after it, such as https://docs.example.com/problems/'

export function parseProblemBase(text: string): Parsed<string> {
  const valid = /^[a-z][a-z0-9+.-]*:[!-~]*[/:#=]$/i.test(text) && !/["<>\\^`{|}]/.test(text)
  const absolute =
    valid && (!/^https?:/i.test(text) || (/^https?:\/\/[^/]/i.test(text) && URL.canParse(text)))
  return absolute ? parsed(text) : refused(text, PROBLEM_BASE)
}
