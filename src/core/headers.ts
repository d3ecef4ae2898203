/** Header lines as received: flat name–value list (Node's `rawHeaders`). */
export type RawHeaders = readonly string[]

/** A field name (RFC 9110 §5.6.2, `token`), as the source of an expression. */
export const TOKEN = "[!#$%&'*+.^_`|~0-9A-Za-z-]+"
const NAME = new RegExp(`^${TOKEN}$`)

export function isFieldName(text: string): boolean {
  return NAME.test(text)
}

/** Whether the text can stand in a header line, in latin1. */
export function isFieldValue(text: string): boolean {
  return /^[\t\x20-\x7e\x80-\xff]*$/.test(text)
}

/**
 * The field lines of a block that is known to be well-formed, flat; each begins with a CRLF. `at`: that of the first.
 */
export function fieldLines(block: string, at: number): string[] {
  const lines: string[] = []
  let from = at + 2
  let lineEnd: number
  do {
    const colon = block.indexOf(':', from)
    const found = block.indexOf('\r\n', colon)
    lineEnd = found < 0 ? block.length : found
    // Around the value there may be white space (RFC 9112 §5.1).
    let start = colon + 1
    let end = lineEnd
    while (start < end && isBlank(block.charCodeAt(start))) start++
    while (end > start && isBlank(block.charCodeAt(end - 1))) end--
    lines.push(block.slice(from, colon), block.slice(start, end))
    from = lineEnd + 2
  } while (lineEnd < block.length)
  return lines
}

function isBlank(code: number): boolean {
  return code === 0x20 || code === 0x09
}

/** The proxy's own header lines on requests to the upstream. */
export const REQUEST_HEADER = { fence: 'Idempotency-Fence', record: 'Idempotency-Record' } as const

/** The proxy's own header lines on responses, and `outcome`, by which an upstream tells the proxy what it did. */
export const RESPONSE_HEADER = {
  replayed: 'Idempotent-Replayed',
  status: 'Idempotency-Status',
  expires: 'Idempotency-Expires',
  derived: 'Idempotency-Key-Derived',
  retry: 'Idempotency-Retry',
  problem: 'Idempotency-Problem',
  outcome: 'Idempotency-Outcome',
} as const

/** `Idempotency-Status`, and until when the record answers; empty if the route sends neither. */
export function statusHeaders(
  status: string,
  route: { readonly statusHeader: boolean },
  expiresAt: number | null,
): string[] {
  if (!route.statusHeader) return []
  const lines: string[] = [RESPONSE_HEADER.status, status]
  if (expiresAt !== null && Number.isFinite(expiresAt))
    lines.push(RESPONSE_HEADER.expires, new Date(expiresAt).toISOString())
  return lines
}

const OWN_ON_RESPONSES: ReadonlySet<string> = new Set(
  Object.values(RESPONSE_HEADER).map((name) => name.toLowerCase()),
)

/** Whether only the proxy may set this line in a response supplied from outside. `name` in lower case. */
export function isOwnOnResponses(name: string): boolean {
  return OWN_ON_RESPONSES.has(name)
}

/**
 * Whether clients never receive this line from an upstream. Other own lines pass unless this proxy sets the same one: the upstream may be
 * another such proxy, and then it decides (docs/adr/0037).
 */
export function isNeverUpstreams(name: string): boolean {
  return name === 'idempotent-replayed'
}

/** The values of every line called `name` (lower case), in order. */
export function linesOf(headers: RawHeaders, name: string): readonly string[] {
  let values: string[] | null = null
  for (let i = 0; i + 1 < headers.length; i += 2) {
    const field = headers[i] as string
    if (field.length !== name.length || field.toLowerCase() !== name) continue
    const value = headers[i + 1] as string
    // A growing array over-allocates, and most names have one line.
    if (values === null) values = [value]
    else values.push(value)
  }
  return values ?? NO_LINES
}

const NO_LINES: readonly string[] = []

export function firstOf(headers: RawHeaders, name: string): string | null {
  for (let i = 0; i + 1 < headers.length; i += 2) {
    const field = headers[i] as string
    if (field.length === name.length && field.toLowerCase() === name) return headers[i + 1] as string
  }
  return null
}

/**
 * Fields that belong to one connection (RFC 9110 §7.6.1), never forwarded and never stored. `proxy-*` credentials
 * are for the next proxy, which is this one.
 */
export const HOP_BY_HOP: ReadonlySet<string> = new Set([
  'connection',
  'keep-alive',
  'proxy-authenticate',
  'proxy-authentication-info',
  'proxy-authorization',
  'proxy-connection',
  'te',
  'transfer-encoding',
  'upgrade',
  'http2-settings',
])

/** Lines about a connection, which HTTP/2 does not carry (RFC 9113 §8.2.2). */
export const OF_CONNECTION: ReadonlySet<string> = new Set([
  'connection',
  'http2-settings',
  'keep-alive',
  'proxy-connection',
  'te',
  'transfer-encoding',
  'upgrade',
])

/**
 * Fields about the content, which `Connection` must not name (RFC 9110 §7.6.1). Without them the upstream would receive a different request
 * from the one recorded, or the client a different response.
 */
const END_TO_END =
  /^(?:(?:accept|access-control|ce|content|idempotency|idempotent|if|repeatability|sec|x-forwarded)-.*|accept|age|allow|api-key|authorization|baggage|cache-control|cdn-loop|cookie|date|etag|expires|forwarded|host|last-modified|link|location|origin|prefer|range|referer|retry-after|server|set-cookie|traceparent|tracestate|user-agent|vary|via|www-authenticate|x-api-key|x-http-method-override|x-real-ip|x-request-id)$/

/**
 * The names that must not cross this hop: the fixed ones and those listed in `Connection`, except fields that describe the content and
 * `counted` ones.
 */
export function hopByHop(headers: RawHeaders, counted: ReadonlySet<string> = NONE): ReadonlySet<string> {
  const lines = linesOf(headers, 'connection')
  if (lines.every((line) => /^(?:keep-alive|close)$/i.test(line))) return HOP_BY_HOP
  const listed = lines
    .flatMap((line) => line.split(','))
    .map((name) => name.trim().toLowerCase())
    .filter((name) => !counted.has(name) && !END_TO_END.test(name))
  return new Set([...HOP_BY_HOP, ...listed])
}

const NONE: ReadonlySet<string> = new Set()

/** The name as CGI, WSGI and PHP pass it to applications: they do not distinguish characters other than letters and digits. */
export function foldedName(name: string): string {
  return /[^a-z0-9-]/.test(name) ? name.replaceAll(/[^a-z0-9]/g, '-') : name
}

/** The lines for which `keep` returns true; it gets the lower-case name. */
export function filterLines(headers: RawHeaders, keep: (name: string) => boolean): string[] {
  const kept: string[] = []
  for (let i = 0; i + 1 < headers.length; i += 2) {
    const name = headers[i] as string
    if (keep(name.toLowerCase())) kept.push(name, headers[i + 1] as string)
  }
  return kept
}

interface MediaRange {
  readonly type: string
  /** 0 to 1. */
  readonly quality: number
}

/**
 * Whether the client lists text/html and prefers it to JSON (RFC 9110 §12.5.1), as a browser does when it opens a page. A wildcard does not
 * count.
 */
export function prefersHtml(headers: RawHeaders): boolean {
  const lines = linesOf(headers, 'accept')
  if (!lines.some((line) => /text\/html/i.test(line))) return false
  const ranges = lines.flatMap((line) => line.split(',')).flatMap(rangeOf)
  const html = best(ranges, 'text/html') ?? 0
  const json = ['application/problem+json', 'application/json'].map(
    (type) => best(ranges, type) ?? best(ranges, 'application/*') ?? best(ranges, '*/*') ?? 0,
  )
  return html > Math.max(...json)
}

/** Null: not named. */
function best(ranges: readonly MediaRange[], type: string): number | null {
  const named = ranges.filter((range) => range.type === type)
  return named.length === 0 ? null : Math.max(...named.map(({ quality }) => quality))
}

/** Empty: an invalid quality (RFC 9110 §12.4.2). */
function rangeOf(text: string): MediaRange[] {
  const [type = '', ...parameters] = text.split(';').map((part) => part.trim().toLowerCase())
  const weight = parameters.find((parameter) => parameter.startsWith('q='))
  if (weight === undefined) return [{ type, quality: 1 }]
  return /^q=(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)$/.test(weight)
    ? [{ type, quality: Number(weight.slice(2)) }]
    : []
}

/** type/subtype, in lower case. */
export function essence(headers: RawHeaders): string {
  return contentType(headers).essence
}

/** False if a charset other than UTF-8 is named. */
export function isUtf8Named(headers: RawHeaders): boolean {
  return parametersOf(headers).every(
    (part) => !/^charset\s*=/i.test(part) || /^charset\s*=\s*("?)utf-?8\1$/i.test(part),
  )
}

/** The boundary of a `multipart/form-data` that every parser reads alike: one line, no other parameter. Else null. */
export function formDataBoundary(headers: RawHeaders): string | null {
  if (!isUtf8Named(headers)) return null
  const [type = '', ...parts] = parametersOf(headers)
  const others = parts.filter((part) => !/^charset\s*=/i.test(part))
  if (type.toLowerCase() !== 'multipart/form-data') return null
  const found = BOUNDARY.exec(others.join(';'))
  return found?.[1] ?? found?.[2] ?? null
}

/** RFC 2046's characters without the space; those outside a token (RFC 9110 §5.6.2) in quotes only. */
const BOUNDARY = /^boundary=(?:([\w'+.-]{1,70})|"([\w'()+,./:=?-]{1,70})")$/i

/** Whether the body has a content coding, so that it is compared as sent. */
export function isEncoded(headers: RawHeaders): boolean {
  return linesOf(headers, 'content-encoding').some((line) => line.trim().toLowerCase() !== 'identity')
}

function parametersOf(headers: RawHeaders): readonly string[] {
  return contentType(headers).parameters
}

/** `Content-Type`, read. */
export interface ContentType {
  /** Type and parameters, split at semicolons outside quoted strings and trimmed; at least one. */
  readonly parameters: readonly string[]
  /** type/subtype, in lower case. */
  readonly essence: string
  /** type/subtype and parameters without charset, in lower case but for a boundary's value (RFC 2046 §5.1.1). */
  readonly media: string
}

/** A cache of the latest values: most requests use one of a few. */
const PARSED = new Map<string, ContentType>()
const MAX_PARSED = 64

export function contentType(headers: RawHeaders): ContentType {
  const lines = linesOf(headers, 'content-type')
  const value = lines.length === 1 ? (lines[0] as string) : lines.join(', ')
  let parsed = PARSED.get(value)
  if (parsed === undefined) {
    if (PARSED.size === MAX_PARSED) PARSED.clear()
    parsed = parse(value)
    PARSED.set(value, parsed)
  }
  return parsed
}

function parse(value: string): ContentType {
  const parameters = splitAtSemicolons(value).map((part) => part.trim())
  const media = parameters
    .filter((part) => part !== '' && !/^charset\s*=/i.test(part))
    .map((part) => {
      const end = /^boundary\s*=/i.test(part) ? part.indexOf('=') : part.length
      return part.slice(0, end).toLowerCase() + part.slice(end)
    })
    .join(';')
  return { parameters, essence: (parameters[0] as string).toLowerCase(), media }
}

function splitAtSemicolons(value: string): string[] {
  if (!value.includes('"')) return value.split(';')
  const parts: string[] = []
  let quoted = false
  let start = 0
  for (let i = 0; i < value.length; i++) {
    if (quoted && value[i] === '\\') i++
    else if (value[i] === '"') quoted = !quoted
    else if (value[i] === ';' && !quoted) {
      parts.push(value.slice(start, i))
      start = i + 1
    }
  }
  return [...parts, value.slice(start)]
}
