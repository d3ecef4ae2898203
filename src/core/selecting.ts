import { hash } from 'node:crypto'
import type { RawHeaders } from './headers.ts'
import { frame, type Hmac, part } from './identity.ts'

const SUBJECTS = 'tenant organization org account workspace project company merchant customer user'.split(' ')

/**
 * Headers that select whom or what a request acts on, in lower case (contract §15): with another value it is another operation, unless
 * `fingerprint.headers` is `none`.
 */
export const SELECTING: ReadonlySet<string> = new Set([
  'stripe-account',
  'stripe-context',
  'paypal-auth-assertion',
  'x-goog-user-project',
  'openai-organization',
  'openai-project',
  ...SUBJECTS.flatMap((subject) => [`x-${subject}`, `x-${subject}-id`]),
])

/** The values of the lines for whose names `counts` returns true, sorted by name; null: there are none. */
function linesByName(
  headers: RawHeaders,
  counts: (field: string) => boolean,
): readonly (readonly [name: string, values: readonly string[]])[] | null {
  let found: Map<string, string[]> | null = null
  for (let i = 0; i + 1 < headers.length; i += 2) {
    const field = headers[i] as string
    if (!counts(field)) continue
    found ??= new Map()
    const name = field.toLowerCase()
    const values = found.get(name)
    if (values === undefined) found.set(name, [headers[i + 1] as string])
    else values.push(headers[i + 1] as string)
  }
  return found === null ? null : [...found].sort(([a], [b]) => (a < b ? -1 : 1))
}

/** The first letter rules out most names, without a lower-case copy. */
function isSelecting(field: string): boolean {
  return INITIALS.has(field.charCodeAt(0) | 0x20) && SELECTING.has(field.toLowerCase())
}

const INITIALS: ReadonlySet<number> = new Set([...SELECTING].map((name) => name.charCodeAt(0)))

/** The selecting lines of a request, framed; empty: it has none. */
export function selectingLines(headers: RawHeaders): string {
  const lines = linesByName(headers, isSelecting)
  return lines === null ? '' : frame(lines.map(([name, values]) => part(name) + frame(values)))
}

/**
 * Short digests of an operation's query, media type and each header that counts, so that a refusal can name the part that differs (contract
 * §15). Undefined: the usual ones, JSON without a query or such a header. `opaque`: the content coding of its body could not be undone.
 */
export function partsOf(
  query: string,
  mediaType: string,
  headers: RawHeaders,
  counted: readonly string[] | null,
  key: Hmac | null,
  opaque = false,
): string | undefined {
  const names = counted === null ? null : linesByName(headers, countedBy(counted))
  if (query === '' && mediaType === USUAL_TYPE && names === null && !opaque) return undefined
  const short = (text: string): string => {
    const digest = key === null ? hash('sha256', text, 'buffer') : key.of(hash('sha256', text, 'buffer'))
    return digest.toString('base64url', 0, DIGEST_BYTES)
  }
  const ofQuery = query === '' ? '' : short(query)
  const ofType = mediaType === USUAL_TYPE ? '' : short(mediaType)
  return [
    `${ofQuery}/${ofType}${opaque ? OPAQUE : ''}`,
    ...(names ?? []).map(([name, values]) => `${name}=${short(frame(values))}`),
  ].join(' ')
}

function countedBy(counted: readonly string[]): (field: string) => boolean {
  return counted.length === 0
    ? isSelecting
    : (field) => isSelecting(field) || counted.includes(field.toLowerCase())
}

const USUAL_TYPE = 'application/json'
const OPAQUE = '/opaque'

/** Whether only the bytes of that operation's body can be compared. */
export function isOpaque(parts: string | undefined): boolean {
  return parts?.split(' ', 1)[0]?.endsWith(OPAQUE) === true
}

/** Enough to distinguish two values of one client. */
const DIGEST_BYTES = 6

/** The parts in which two operations differ: `query`, `media type`, the names of headers; else it is the `body`. */
export function differingParts(one: string | undefined, other: string | undefined): readonly string[] {
  const [first, second] = [one, other].map((parts = '/') => {
    const [head = '', ...headers] = parts.split(' ')
    const [query = '', type = ''] = head.split('/')
    return new Map([
      ['query', query],
      ['media type', type],
      ...headers.map((line) => line.split('=', 2) as [string, string]),
    ])
  }) as [Map<string, string>, Map<string, string>]
  const names = new Set([...first.keys(), ...second.keys()])
  const differing = [...names].filter((name) => first.get(name) !== second.get(name))
  return differing.length === 0 ? ['body'] : differing
}
