import { isIPv4, isIPv6 as isScopedIPv6, SocketAddress } from 'node:net'
import { normalisePath } from '../core/route.ts'
import { byParser, byReader, byTest, parsed, refused, type Scalar, suggesting } from './units.ts'

/** `port` 0: any free one. `host` without brackets. */
export interface Address {
  readonly host: string
  readonly port: number
}

const HOST_NAME = /^(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*$/

/** Not a regular expression: compiling it would cost every start 5 to 10 ms. */
function isIPv6(text: string): boolean {
  if (!/^[\da-f:.]*$/i.test(text)) return isScopedIPv6(text)
  try {
    return new SocketAddress({ address: text, family: 'ipv6' }).family === 'ipv6'
  } catch {
    return false
  }
}

/** A name or an IPv4 address. Digits and dots only: a mistyped address, not a name. */
function isHost(host: string): boolean {
  return isIPv4(host) || (host.length <= 253 && HOST_NAME.test(host) && !/^[\d.]+$/.test(host))
}

export function isLoopback(host: string): boolean {
  return host === 'localhost' || host === '::1' || (isIPv4(host) && host.startsWith('127.'))
}

function readAddress(text: string): Address | null {
  const [, bracketed, plain, digits = ''] = /^(?:\[([^\]]*)\]|([^:[\]]*)):(\d{1,5})$/.exec(text) ?? []
  const port = Number(digits)
  const host = bracketed ?? plain ?? ''
  const valid = bracketed === undefined ? isHost(host) : isIPv6(host)
  return valid && digits !== '' && port <= 65_535 ? { host, port } : null
}

export function formatAddress({ host, port }: Address): string {
  return `${host.includes(':') ? `[${host}]` : host}:${port}`
}

export const address = suggesting(
  byReader(
    'host:port with a port of 0 to 65535 (0: any free one), IPv6 in brackets, such as 127.0.0.1:8080, [::1]:8080',
    '^([^:\\[\\]]+|\\[[0-9A-Fa-f:.]+\\]):[0-9]{1,5}$',
    readAddress,
    formatAddress,
  ),
  (text) => (/^:?\d{1,5}$/.test(text) ? `127.0.0.1:${text.replace(':', '')}` : null),
)

export const hostName = byTest('the name of a host', '.', isHost)

/** The form of a `Host` line, without the port. */
export const hostLine = byReader(
  'the name of a host or its address without a port, IPv6 in brackets',
  '^([^:\\[\\]/]+|\\[[0-9A-Fa-f:.]+\\])$',
  (text) => {
    const bracketed = /^\[([^\]]*)\]$/.exec(text)?.[1]
    const valid = bracketed === undefined ? isHost(text) : isIPv6(bracketed)
    return valid ? text.toLowerCase() : null
  },
)

export const cidr = byReader(
  'a CIDR, such as 10.0.0.0/8 or fd00::/8, or one address',
  '^[0-9A-Fa-f:.]+(/[0-9]{1,3})?$',
  (text) => {
    const [, ip = '', prefix] = /^([^/]+)(?:\/(\d{1,3}))?$/.exec(text) ?? []
    const bits = isIPv4(ip) ? 32 : isIPv6(ip) ? 128 : -1
    return Number(prefix ?? 0) <= bits ? `${ip}/${prefix ?? bits}` : null
  },
)

const UPSTREAM = 'http://host:port, https://host:port or unix:/absolute/path'

/** An origin, or a socket. Nothing else: every request goes to the target that its client sent. */
export const upstreamUrl: Scalar<string> = suggesting(
  byParser(UPSTREAM, '^(https?://[^/?#@]+/?|unix:/[^/].*)$', (text) => {
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
  }),
  (text) => (/^[a-z0-9.-]+:\d{1,5}$/i.test(text) ? `http://${text}` : null),
)

const STORE =
  'memory:, sqlite:<path>, redis://host:port/db, redis+sentinel://host:port,host:port/master/db, redis+cluster://host:port,host:port (with TLS rediss), postgres://user:password@host:port/database or dynamodb://table?region=name'
const STORE_PATTERN =
  '^(memory:$|sqlite:(?!//|:memory:$).|redis://[^/?#]+(/[0-9]{0,5})?$|rediss://[^/?#]+(/[0-9]{0,5})?(\\?[^#]+)?$|rediss?\\+sentinel://[^/?#]+/[A-Za-z0-9._-]+(/[0-9]{0,5})?(\\?[^#]+)?$|redis\\+cluster://[^/?#]+/?0?$|rediss\\+cluster://[^/?#]+/?0?(\\?[^#]+)?$|postgres(ql)?://[^/?#]+@[^/?#]+/[^/?#]+(\\?[^#]+)?$|dynamodb://[A-Za-z0-9_.-]{3,255}(\\?[^#]+)?$)'
const PRIMARY = `${STORE}, but not memory:, which loses its records`
const CACHE =
  'memory:, redis://host:port/db, redis+sentinel://host:port,host:port/master/db or redis+cluster://host:port,host:port (with TLS rediss)'

const ownStoreUrl: Scalar<string> = byParser(STORE, STORE_PATTERN, (text) => {
  if (text === 'memory:') return parsed(text)
  if (text === 'sqlite::memory:')
    return refused(text, `${STORE}; memory: is the store that lives as long as the process`)
  if (/^sqlite:(?!\/\/)[^\0]+$/.test(text)) return parsed(text)
  if (/^postgres(?:ql)?:/.test(text)) {
    const wrong = wrongInPostgres(text)
    return wrong === null ? parsed(text) : refused(text, wrong)
  }
  if (text.startsWith('dynamodb:')) {
    const wrong = wrongInDynamoDb(text)
    return wrong === null ? parsed(text) : refused(text, wrong)
  }
  if (/^rediss?\+(?:sentinel|cluster):/.test(text)) {
    const wrong = wrongInSeveral(text)
    return wrong === null ? parsed(text) : refused(text, wrong)
  }
  const url = /^rediss?:\/\/[^/]/.test(text) ? URL.parse(text) : null
  if (url === null || url.hostname === '' || url.port === '0' || !/^(\/\d{0,5})?$/.test(url.pathname))
    return refused(text, STORE)
  const wrong = text.includes('#') ? 'without a fragment' : wrongInTls(text, url.searchParams, [])
  return wrong === null ? parsed(text) : refused(text, `${STORE}, ${wrong}`)
})

/** `tiered:` names none itself: `store.primary` and `store.cache` do. */
export const storeUrl: Scalar<string> = byParser(
  `${STORE}; tiered: with store.primary.url and store.cache.url`,
  `^tiered:$|${STORE_PATTERN}`,
  (text) => (text === 'tiered:' ? parsed(text) : ownStoreUrl.parse(text)),
)

export const primaryUrl: Scalar<string> = byParser(PRIMARY, `(?!memory:)${STORE_PATTERN}`, (text) =>
  text === 'memory:' ? refused(text, PRIMARY) : ownStoreUrl.parse(text),
)

export const cacheUrl: Scalar<string> = byParser(CACHE, `(?=memory:|rediss?[:+])${STORE_PATTERN}`, (text) =>
  /^(?:memory|rediss?(?:\+\w+)?):/.test(text) ? ownStoreUrl.parse(text) : refused(text, CACHE),
)

const SENTINEL = 'redis+sentinel://user:password@host:port,host:port/master/db, rediss+sentinel:// with TLS'
const SENTINEL_OPTIONS = ['sentinelUsername', 'sentinelPassword']
const CLUSTER = 'redis+cluster://user:password@host:port,host:port, rediss+cluster:// with TLS'
const SEVERAL = /^[^:]*:\/\/(?:([^@/?#]*)@)?([^@/?#]*)([^?#]*)(?:\?([^#]+))?$/

/** What is allowed instead; null: it is fine. */
function wrongInSeveral(text: string): string | null {
  const isCluster = text.includes('+cluster')
  const allowed = isCluster ? CLUSTER : SENTINEL
  const [, user = '', hosts = '', path = '', query = ''] = SEVERAL.exec(text) ?? []
  if (hosts === '') return allowed
  if (!hosts.split(',').every(isServer))
    return `${allowed}, each a host:port with a port of 1 to 65535, IPv6 in brackets`
  if (!/^[^:]*(:[^:]*)?$/.test(user) || !user.split(':').every(isEncoded))
    return `${allowed}, other characters of user and password percent-encoded`
  if (isCluster && !/^\/?0?$/.test(path))
    return `${allowed}, without a database: a cluster has only database 0`
  if (!isCluster && !/^\/[A-Za-z0-9._-]+(\/\d{0,5})?$/.test(path))
    return `${allowed}, the master's name of letters, digits, ., - and _, the database a number`
  const wrong = wrongInTls(text, new URLSearchParams(query), isCluster ? [] : SENTINEL_OPTIONS)
  return wrong === null ? null : `${allowed}, ${wrong}`
}

/** Named like the options of `redis-cli`. */
const TLS_FILES = ['cacert', 'cert', 'key']

/** Checks the options of a Redis: its own, and with TLS the files for it. */
function wrongInTls(text: string, options: URLSearchParams, own: readonly string[]): string | null {
  const known = text.startsWith('rediss') ? [...own, ...TLS_FILES] : own
  if (known.length === 0) return text.includes('?') ? 'without a query' : null
  if (!areOptions(options, (name, value) => known.includes(name) && value !== ''))
    return `of the options ${known.join(', ')}, each at most once`
  return options.has('cert') === options.has('key') ? null : 'cert and key only together'
}

function isServer(text: string): boolean {
  const address = readAddress(/:\d+$/.test(text) ? text : `${text}:1`)
  return address !== null && address.port > 0
}

const SSL_MODES = ['disable', 'require', 'verify-ca', 'verify-full']
const SSL_FILES = ['sslrootcert', 'sslcert', 'sslkey']

/** What is allowed instead; null: it is fine. */
function wrongInPostgres(text: string): string | null {
  const url = /^postgres(?:ql)?:\/\/[^/]/.test(text) ? URL.parse(text) : null
  if (
    url === null ||
    url.hostname === '' ||
    url.hostname.includes('%') ||
    url.port === '0' ||
    url.hash !== ''
  )
    return STORE
  const names = [url.username, url.password, url.pathname.slice(1)]
  if (url.username === '' || !/^\/[^/]+$/.test(url.pathname) || !names.every(isEncoded))
    return `${STORE}, with a user and a database, other characters percent-encoded`
  const isOption = (name: string, value: string): boolean =>
    name === 'sslmode' ? SSL_MODES.includes(value) : SSL_FILES.includes(name) && value !== ''
  if (!areOptions(url.searchParams, isOption))
    return `${STORE}, of the options sslmode (${SSL_MODES.join(', ')}), ${SSL_FILES.join(', ')}, each at most once`
  const given = new Map(url.searchParams)
  const mode = given.get('sslmode') ?? 'disable'
  if (mode === 'require' && given.has('sslrootcert'))
    return `${STORE}, sslrootcert only with sslmode=verify-ca or verify-full: require checks no certificate`
  if (mode === 'verify-ca' && !given.has('sslrootcert'))
    return `${STORE}, sslmode=verify-ca only with sslrootcert: anybody can get a certificate of a public authority`
  if (mode === 'disable' && SSL_FILES.some((name) => given.has(name)))
    return `${STORE}, ${SSL_FILES.join(', ')} only with sslmode=require, verify-ca or verify-full`
  return given.has('sslcert') === given.has('sslkey') ? null : `${STORE}, sslcert and sslkey only together`
}

const DYNAMODB =
  'dynamodb://table?region=name, the table a name of 3 to 255 letters, digits, _, . and -, without credentials'
const DYNAMODB_OPTIONS = new Map<string, (value: string) => boolean>([
  ['region', (value) => /^[a-z]{2}(-[a-z0-9]+)+$/.test(value)],
  [
    'endpoint',
    (value) => {
      const url = /^https?:\/\/[^/]/.test(value) ? URL.parse(value) : null
      return url !== null && url.port !== '0' && url.href === `${url.origin}/`
    },
  ],
])

/** What is allowed instead; null: it is fine. */
function wrongInDynamoDb(text: string): string | null {
  const [, query = ''] = /^dynamodb:\/\/[A-Za-z0-9_.-]{3,255}(?:\?([^#]+))?$/.exec(text) ?? [null, null]
  if (query === null) return DYNAMODB
  const isOption = (name: string, value: string): boolean => DYNAMODB_OPTIONS.get(name)?.(value) === true
  return areOptions(new URLSearchParams(query), isOption)
    ? null
    : `${DYNAMODB}, of the options region, such as eu-central-1, and endpoint, an http:// or https:// origin, each at most once`
}

/** Whether all of a URL's options are valid, each given at most once. */
function areOptions(options: URLSearchParams, isValid: (name: string, value: string) => boolean): boolean {
  const names = [...options.keys()]
  return [...options].every(([name, value], n) => isValid(name, value) && names.indexOf(name) === n)
}

function isEncoded(text: string): boolean {
  try {
    return !decodeURIComponent(text).includes('\0')
  } catch {
    return false
  }
}

/** Whether other machines, and so other services, can use the same store. */
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

/** A key set decides who a caller is: it must not be changed in transit. */
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
  // A query may be anything that a request line can carry.
  return (
    PATH_CHARACTERS.test(path) &&
    !path.startsWith('//') &&
    /^[!-~]*$/.test(query.join('?')) &&
    !text.includes('#')
  )
})

/** The same, with placeholders for the key and the id of a record. */
export const queryTarget = byTest(
  `${TARGET}; {key}, {record} and {:name}, a segment of the route's path, are replaced in it`,
  TARGET_PATTERN,
  (text) => {
    const example = text.replaceAll(/\{(?:key|record|:[A-Za-z_][A-Za-z0-9_]*)\}/g, 'x')
    return !/[{}]/.test(example) && probeTarget.parse(example).ok
  },
)

/** Whether a connection to `host` on this machine reaches the listener, judging by names. */
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
