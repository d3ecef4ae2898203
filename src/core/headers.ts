/** Header lines as they came: flat name–value list (Node's `rawHeaders`). */
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

const OWN_ON_RESPONSES: ReadonlySet<string> = new Set(
  Object.values(RESPONSE_HEADER).map((name) => name.toLowerCase()),
)

/** Whether a response that somebody writes for the proxy to send must leave the line to the proxy. `name` in lower case. */
export function isOwnOnResponses(name: string): boolean {
  return OWN_ON_RESPONSES.has(name)
}

/**
 * Whether no upstream may send the line to a client. Its other lines pass unless this proxy sets the same: the upstream may be
 * another such proxy, and then it is the one that decides (docs/adr/0037).
 */
export function isNeverUpstreams(name: string): boolean {
  return name === 'idempotent-replayed'
}

/** The values of every line called `name` (lower case), in order. */
export function linesOf(headers: RawHeaders, name: string): string[] {
  const values: string[] = []
  for (let i = 0; i + 1 < headers.length; i += 2) {
    const field = headers[i] as string
    if (field.length === name.length && field.toLowerCase() === name) values.push(headers[i + 1] as string)
  }
  return values
}

export function firstOf(headers: RawHeaders, name: string): string | null {
  return linesOf(headers, name)[0] ?? null
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

/**
 * Fields for whoever reads the content, which no `Connection` may name (RFC 9110 §7.6.1). Taken off, they would make the
 * upstream hear another request, or the client another answer, than this proxy recorded.
 */
const END_TO_END =
  /^(?:(?:accept|access-control|ce|content|idempotency|idempotent|if|repeatability|sec|x-forwarded)-.*|accept|age|allow|api-key|authorization|baggage|cache-control|cdn-loop|cookie|date|etag|expires|forwarded|host|last-modified|link|location|origin|prefer|range|referer|retry-after|server|set-cookie|traceparent|tracestate|user-agent|vary|via|www-authenticate|x-api-key|x-http-method-override|x-real-ip|x-request-id)$/

/**
 * The names that must not cross this hop: the fixed ones and those that `Connection` lists, but for fields that belong to
 * the content and `counted` ones.
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

/** The name as CGI, WSGI and PHP hand it to an application: whatever is no letter and no digit is one character there. */
export function foldedName(name: string): string {
  return /[^a-z0-9-]/.test(name) ? name.replaceAll(/[^a-z0-9]/g, '-') : name
}

/** The lines for which `keep` (called with the lower-case name) says yes. */
export function filterLines(headers: RawHeaders, keep: (name: string) => boolean): string[] {
  const kept: string[] = []
  for (let i = 0; i + 1 < headers.length; i += 2) {
    const name = headers[i] as string
    if (keep(name.toLowerCase())) kept.push(name, headers[i + 1] as string)
  }
  return kept
}

interface Range {
  readonly type: string
  /** 0 to 1. */
  readonly quality: number
}

/**
 * Whether the client names text/html and likes it better than JSON (RFC 9110 §12.5.1). Browsers that open a page do; what
 * takes anything does not.
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

/** Null: the type is not named. */
function best(ranges: readonly Range[], type: string): number | null {
  const named = ranges.filter((range) => range.type === type)
  return named.length === 0 ? null : Math.max(...named.map(({ quality }) => quality))
}

/** None where the quality is no number of RFC 9110 §12.4.2. */
function rangeOf(text: string): Range[] {
  const [type = '', ...parameters] = text.split(';').map((part) => part.trim().toLowerCase())
  const weight = parameters.find((parameter) => parameter.startsWith('q='))
  if (weight === undefined) return [{ type, quality: 1 }]
  return /^q=(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)$/.test(weight)
    ? [{ type, quality: Number(weight.slice(2)) }]
    : []
}
