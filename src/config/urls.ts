import { isIP } from 'node:net'
import { normalisePath } from '../core/route.ts'
import { byParser, byReader, byTest, parsed, refused, type Scalar } from './units.ts'

/** `port` 0: any free one. `host` without brackets. */
export interface Address {
  readonly host: string
  readonly port: number
}

const HOST_NAME = /^(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*$/

/** A name or an IPv4 address. Digits and dots only: a mistyped address, not a name. */
function isHost(host: string): boolean {
  return isIP(host) === 4 || (host.length <= 253 && HOST_NAME.test(host) && !/^[\d.]+$/.test(host))
}

export function isLoopback(host: string): boolean {
  return host === 'localhost' || host === '::1' || (isIP(host) === 4 && host.startsWith('127.'))
}

function readAddress(text: string): Address | null {
  const [, bracketed, plain, digits = ''] = /^(?:\[([^\]]*)\]|([^:[\]]*)):(\d{1,5})$/.exec(text) ?? []
  const port = Number(digits)
  const host = bracketed ?? plain ?? ''
  const valid = bracketed === undefined ? isHost(host) : isIP(host) === 6
  return valid && digits !== '' && port <= 65_535 ? { host, port } : null
}

export function formatAddress({ host, port }: Address): string {
  return `${host.includes(':') ? `[${host}]` : host}:${port}`
}

export const address = byReader(
  'host:port with a port of 0 to 65535 (0: any free one), IPv6 in brackets, such as 127.0.0.1:8080, [::1]:8080',
  '^([^:\\[\\]]+|\\[[0-9A-Fa-f:.]+\\]):[0-9]{1,5}$',
  readAddress,
  formatAddress,
)

export const hostName = byTest('the name of a host', '.', isHost)

/** As a `Host` line has it, without the port. */
export const hostLine = byReader(
  'the name of a host or its address without a port, IPv6 in brackets',
  '^([^:\\[\\]/]+|\\[[0-9A-Fa-f:.]+\\])$',
  (text) => {
    const bracketed = /^\[([^\]]*)\]$/.exec(text)?.[1]
    const valid = bracketed === undefined ? isHost(text) : isIP(bracketed) === 6
    return valid ? text.toLowerCase() : null
  },
)

export const cidr = byReader(
  'a CIDR, such as 10.0.0.0/8 or fd00::/8, or one address',
  '^[0-9A-Fa-f:.]+(/[0-9]{1,3})?$',
  (text) => {
    const [, ip = '', prefix] = /^([^/]+)(?:\/(\d{1,3}))?$/.exec(text) ?? []
    const bits = { 0: -1, 4: 32, 6: 128 }[isIP(ip)] ?? -1
    return Number(prefix ?? 0) <= bits ? `${ip}/${prefix ?? bits}` : null
  },
)

const UPSTREAM = 'http://host:port, https://host:port or unix:/absolute/path'

/** An origin, or a socket. Nothing else: every request goes to the target that its client sent. */
export const upstreamUrl: Scalar<string> = byParser(
  UPSTREAM,
  '^(https?://[^/?#@]+/?|unix:/[^/].*)$',
  (text) => {
    if (text.startsWith('unix:'))
      return /^unix:\/(?!\/)[^\0]+$/.test(text) ? parsed(text) : refused(text, UPSTREAM)
    const url = /^https?:\/\//i.test(text) ? URL.parse(text) : null
    if (url === null || url.port === '0') return refused(text, UPSTREAM)
    if (url.username !== '' || url.password !== '')
      return refused(text, `${UPSTREAM}, without credentials: clients send their own`)
    if (/[?#]/.test(text))
      return refused(text, `${UPSTREAM}, without a query or a fragment: targets are forwarded as received`)
    if (url.pathname !== '/')
      return refused(text, `${UPSTREAM}, without a path: targets are forwarded as received`)
    return parsed(url.origin)
  },
)

const STORE = 'memory:, sqlite:<path>, redis://host:port/db or rediss://host:port/db'
/** In the contract, but not in this version. */
const PLANNED_STORE = /^(?:redis\+sentinel|redis\+cluster|postgres(?:ql)?|dynamodb|tiered):/i

export const storeUrl: Scalar<string> = byParser(
  STORE,
  '^(memory:$|sqlite:(?!//|:memory:$).|rediss?://[^/?#]+(/[0-9]{0,5})?$)',
  (text) => {
    const planned = PLANNED_STORE.exec(text)?.[0]
    // The scheme says enough, and the rest may hold a password.
    if (planned !== undefined) {
      const message = `\`store.url: ${planned}\` is not implemented in this version; allowed: ${STORE}`
      return { ok: false, message }
    }
    if (text === 'memory:') return parsed(text)
    if (text === 'sqlite::memory:')
      return refused(text, `${STORE}; memory: is the store that lasts as long as the process`)
    if (/^sqlite:(?!\/\/)[^\0]+$/.test(text)) return parsed(text)
    const url = /^rediss?:\/\/[^/]/.test(text) ? URL.parse(text) : null
    if (url === null || url.hostname === '' || url.port === '0' || !/^(\/\d{0,5})?$/.test(url.pathname))
      return refused(text, STORE)
    // The Redis client takes options from a query: one could turn on the resending of commands.
    return /[?#]/.test(text) ? refused(text, `${STORE}, without a query or a fragment`) : parsed(text)
  },
)

/** Whether other machines, and so other services, can have the same store. */
export function isSharedStore(url: string): boolean {
  return !/^(memory|sqlite):/.test(url)
}

/** Prefix of the `type` of problem responses. */
export const problemBase = byTest(
  'an absolute URI that ends in /, :, # or =, since the code is appended, such as https://docs.example.com/problems/',
  '^[A-Za-z][A-Za-z0-9+.-]*:.*[/:#=]$',
  (text) =>
    /^[a-z][a-z0-9+.-]*:[!-~]*[/:#=]$/i.test(text) &&
    !/["<>\\^`{|}]/.test(text) &&
    (!/^https?:/i.test(text) || (/^https?:\/\/[^/]/i.test(text) && URL.canParse(text))),
)

/** A key set decides who a caller is: nobody may change it in transit. */
export const jwksUrl = byReader(
  'the https:// URL of a JWK Set (http:// only on loopback), without credentials or a fragment',
  '^(https://|http://(localhost|127\\.|\\[::1\\]))[^/?#@]*([/?][^#]*)?$',
  (text) => {
    const url = /^https?:\/\/[^/]/i.test(text) && !/[#\s]/.test(text) ? URL.parse(text) : null
    if (url === null || url.port === '0' || url.username !== '' || url.password !== '') return null
    const local = isLoopback(url.hostname.replace(/^\[|\]$/g, ''))
    return url.protocol === 'https:' || local ? url.href : null
  },
)

const PATH_CHARACTERS = /^\/(?:[A-Za-z0-9\-._~!$&'()+,;=:@/]|%[0-9A-Fa-f]{2})*$/

/** A path that the proxy serves itself, compared with normalised ones. */
export const ownPath = byTest(
  'one exact path, such as /v1/status, in its normal form: no dot segments, no //, no trailing slash, no needless percent-encoding, no query',
  '^(/[^/:*?#][^/*?#]*)+$',
  (text) =>
    PATH_CHARACTERS.test(text) && !text.includes('/:') && text !== '/' && normalisePath(text) === text,
)

/** A route's path. */
export const routePath = byTest(
  'a path: /exact, /with/:name, or /below/* (`*` only at the end); other characters percent-encoded, no query',
  '^(?=/)(/(:[A-Za-z_][A-Za-z0-9_]*|[^:*?#\\s/][^*?#\\s/]*)?)*(/\\*)?$',
  (text) =>
    text.startsWith('/') &&
    text
      .split('/')
      .slice(1)
      .every((segment, i, { length }) => {
        if (segment === '*') return i === length - 1
        if (segment.startsWith(':')) return /^:[A-Za-z_][A-Za-z0-9_]*$/.test(segment)
        return /^(?:[A-Za-z0-9\-._~!$&'()+,;=:@]|%[0-9A-Fa-f]{2})*$/.test(segment)
      }),
)

const TARGET =
  'a path that begins with one /, such as /v1/me or /v1/me?brief=1; other characters percent-encoded, no fragment'
const TARGET_PATTERN = '^/([^/#][^#]*)?$'

/** The target of a request that the proxy makes itself: origin form (RFC 9112 §3.2.1). */
export const probeTarget = byTest(TARGET, TARGET_PATTERN, (text) => {
  const [path = '', ...query] = text.split('?')
  // A query is anything that a request line can carry.
  return (
    PATH_CHARACTERS.test(path) &&
    !path.startsWith('//') &&
    /^[!-~]*$/.test(query.join('?')) &&
    !text.includes('#')
  )
})

/** The same, with places for the key and the id of a record. */
export const questionTarget = byTest(
  `${TARGET}; {key}, {record} and {:name}, a segment of the route's path, are replaced in it`,
  TARGET_PATTERN,
  (text) => {
    const example = text.replaceAll(/\{(?:key|record|:[A-Za-z_][A-Za-z0-9_]*)\}/g, 'x')
    return !/[{}]/.test(example) && probeTarget.parse(example).ok
  },
)

/** Whether a connection to `host` on this machine reaches the listener, as far as names tell. */
export function reaches(host: string, listener: Address): boolean {
  const listening = canonical(listener.host.includes(':') ? `[${listener.host}]` : listener.host)
  const called = canonical(host)
  const covered = LOOPBACKS[listening] ?? []
  return (
    called === listening || covered.includes(called) || (called.startsWith('127.') && covered.includes('127'))
  )
}

/** Names of this machine that a listener covers, besides its own. `127`: all of 127.0.0.0/8. */
const LOOPBACKS: Readonly<Record<string, readonly string[]>> = {
  '0.0.0.0': ['localhost', '127'],
  '[::]': ['localhost', '127', '[::1]', '0.0.0.0'],
  localhost: ['127.0.0.1', '[::1]', '0.0.0.0', '[::]'],
  '127.0.0.1': ['localhost', '0.0.0.0'],
  '[::1]': ['localhost', '[::]'],
}

/** As WHATWG's URL writes a host; IPv4 within IPv6 as IPv4, names without the root's dot. */
function canonical(host: string): string {
  const name = (URL.parse(`http://${host}`)?.hostname ?? host).replace(/\.$/, '')
  const [, high = '', low = ''] = /^\[::ffff:([0-9a-f]{1,4}):([0-9a-f]{1,4})\]$/.exec(name) ?? []
  if (high === '') return name.endsWith('.localhost') ? 'localhost' : name
  const bits = [Number.parseInt(high, 16), Number.parseInt(low, 16)]
  return bits.flatMap((part) => [part >> 8, part & 255]).join('.')
}
