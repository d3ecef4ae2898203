import { createHash, hash } from 'node:crypto'
import { essence, isEncoded, mediaType } from './body/content.ts'
import { formContent, MULTIPART, multipartContent, URLENCODED } from './body/form.ts'
import { canonicalJson, canonicalValues } from './body/json.ts'
import { type Place, placeOf, placesOf } from './body/json-pointer.ts'
import { linesOf, type RawHeaders } from './headers.ts'
import { frame } from './identity.ts'
import type { FingerprintPolicy } from './policy.ts'
import type { Fingerprint, StoredResponse } from './record.ts'

/** Part of every fingerprint and recipe: raised whenever the same request would hash differently. */
const ALGORITHM = 'fingerprint/2'

/** Above this `auto` takes the bytes as they are: canonical form costs ten times as much as hashing. Bytes. */
const AUTO_JSON_LIMIT = 64 * 1024

/** A protected request, whole. */
export interface RequestContent {
  readonly method: string
  /** Normalised, or as sent where `match.exact` is set. */
  readonly path: string
  /** As sent, without the `?`. */
  readonly query: string
  /** As sent, query included. */
  readonly target: string
  readonly headers: RawHeaders
  readonly body: Buffer
}

/** Names algorithm, settings and counted headers; records of another recipe are compared by raw digest (contract §5). */
export function recipeOf(policy: FingerprintPolicy): string {
  let recipe = recipes.get(policy)
  if (recipe === undefined) {
    recipe = makeRecipe(policy)
    recipes.set(policy, recipe)
  }
  return recipe
}

const recipes = new WeakMap<FingerprintPolicy, string>()

function makeRecipe(policy: FingerprintPolicy): string {
  const { body, ignore, only, headers, query } = policy
  // These modes used to compare bodies of other kinds as bytes.
  const revised = body === 'json' || body === 'form' || body === 'multipart' ? ['by kind'] : []
  const settings = frame([ALGORITHM, JSON.stringify([body, ignore, only, headers, query]), ...revised])
  return [hash('sha256', settings, 'base64url').slice(0, 16), ...headers].join(RECIPE_SEPARATOR)
}

/** In no header name (RFC 9110 §5.6.2). */
const RECIPE_SEPARATOR = ','

/** The headers that count under a recipe, this version's or another's. */
function headersOf(recipe: string): string[] {
  return recipe.split(RECIPE_SEPARATOR).slice(1)
}

/** Identifies the operation, whatever its spelling (contract §5). */
export function fingerprintOf(request: RequestContent, policy: FingerprintPolicy): Fingerprint {
  const { mode, type, content } = bodyContent(request, policy)
  const headers = policy.headers.map((name) => frame(linesOf(request.headers, name)))
  const query = QUERY[policy.query](request.query)
  const head = frame([ALGORITHM, request.method, request.path, query, type, ...headers, mode])
  return sha256(head, content) as Fingerprint
}

/** The request as sent: equal only for equal bytes of target, body, media type and the headers that count under `recipe`. */
export function rawDigestOf(request: RequestContent, recipe: string): Buffer {
  const counted = ['content-type', 'content-encoding', ...headersOf(recipe)]
  const lines = counted.map((name) => frame(linesOf(request.headers, name)))
  return sha256(frame(['raw/1', request.method, request.target, ...lines]), [request.body])
}

/** Up to here head and body are joined: hashing in pieces costs 3 µs more. Bytes. */
const COPIED = 16 * 1024

/** Strings count as UTF-8. */
function sha256(head: string, content: readonly (string | Buffer)[]): Buffer {
  const [only = ''] = content
  if (content.length <= 1) {
    if (typeof only === 'string') return hash('sha256', head + only, 'buffer')
    if (only.length <= COPIED) return hash('sha256', Buffer.concat([Buffer.from(head), only]), 'buffer')
  }
  const digest = createHash('sha256').update(head)
  for (const piece of content) digest.update(piece)
  return digest.digest()
}

const QUERY: Record<FingerprintPolicy['query'], (query: string) => string> = {
  include: (query) => query,
  ignore: () => '',
  sorted: (query) => {
    const pairs = query.split('&').filter((pair) => pair !== '')
    const name = (pair: string) => pair.split('=', 1)[0] as string
    // Array.prototype.sort is stable: repeated names keep their order, which may mean something.
    return pairs.sort((a, b) => (name(a) < name(b) ? -1 : name(a) > name(b) ? 1 : 0)).join('&')
  },
}

type BodyMode = Exclude<FingerprintPolicy['body'], 'auto' | 'none'>

interface BodyContent {
  /** The mode that was really used. */
  readonly mode: BodyMode | 'none'
  /** The media type as far as it counts. */
  readonly type: string
  readonly content: readonly (string | Buffer)[]
}

/**
 * A body of another kind than the mode is for is compared as `auto` would: as bytes, no retry of a multipart form would equal
 * the first attempt. What cannot be read without losing information counts as the bytes that were sent.
 */
function bodyContent({ headers, body }: RequestContent, policy: FingerprintPolicy): BodyContent {
  const type = mediaType(headers)
  if (policy.body === 'none') return { mode: 'none', type, content: [] }
  const byType = autoMode(headers, body)
  const modes = policy.body === 'auto' || policy.body === byType ? [byType] : [policy.body, byType]
  if (policy.body !== 'raw' && !isEncoded(headers))
    for (const mode of modes) {
      const content = contentIn(mode, headers, body, policy)
      if (content !== null)
        return { mode, type: mode === 'multipart' ? MULTIPART : type, content: [content].flat() }
    }
  return { mode: 'raw', type, content: [body] }
}

/** What of the body counts in that mode; null: it cannot be read in it. */
function contentIn(
  mode: BodyMode,
  headers: RawHeaders,
  body: Buffer,
  policy: FingerprintPolicy,
): string | Buffer | readonly (string | Buffer)[] | null {
  switch (mode) {
    case 'raw':
      return null
    case 'form':
      return essence(headers) === URLENCODED ? formContent(headers, body) : null
    case 'multipart':
      return multipartContent(headers, body)
    case 'json':
      return jsonContent(body, policy)
  }
}

/** Forms and multiparts need no limit: at worst 10 ms and 6 ms for 1 MiB, where hashing alone takes 1 ms. */
function autoMode(headers: RawHeaders, body: Buffer): BodyMode {
  const type = essence(headers)
  if (type === URLENCODED) return 'form'
  if (type === MULTIPART) return 'multipart'
  const json = type === 'application/json' || type.endsWith('+json')
  return json && body.length <= AUTO_JSON_LIMIT ? 'json' : 'raw'
}

function jsonContent(body: Buffer, policy: FingerprintPolicy): string | Buffer | null {
  const { only, ignore } = policy
  if (only.length === 0 && ignore.length === 0) return canonicalJson(body)
  let places = placesByPolicy.get(policy)
  if (places === undefined) {
    places = placesOf(only.length > 0 ? only : ignore)
    placesByPolicy.set(policy, places)
  }
  if (only.length === 0) return canonicalJson(body, places)
  const values = canonicalValues(body, places)
  if (values === null) return null
  const root = places
  return frame(only.map((pointer) => values.get(placeOf(root, pointer))?.toString() ?? null))
}

const placesByPolicy = new WeakMap<FingerprintPolicy, Place>()

/** Headers that differ between any two responses: clock, timing, the name of the exchange, framing (docs/shadow.md). */
export const ALWAYS_DIFFERENT: ReadonlySet<string> = new Set([
  'age',
  'cf-ray',
  'content-length',
  'date',
  'request-id',
  'server-timing',
  'traceparent',
  'tracestate',
  'trailer',
  'x-amzn-requestid',
  'x-amzn-trace-id',
  'x-correlation-id',
  'x-envoy-upstream-service-time',
  'x-request-id',
  'x-response-time',
  'x-runtime',
  'x-trace-id',
])

/** What two responses are compared by, so that no body is held for it. */
export interface ResponseDigest {
  readonly status: number
  /** Name–value lines by lower-case name; lines of one name in their order (RFC 9110 §5.3). */
  readonly lines: string
  readonly digest: string
}

export function digestResponse({ status, headers, body }: StoredResponse): ResponseDigest {
  const lines: [string, string][] = []
  for (let i = 0; i + 1 < headers.length; i += 2) {
    const name = (headers[i] as string).toLowerCase()
    if (!ALWAYS_DIFFERENT.has(name)) lines.push([name, (headers[i + 1] as string).trim()])
  }
  lines.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0))
  return { status, lines: JSON.stringify(lines), digest: hash('sha256', body, 'base64url') }
}

export function sameResponse(one: ResponseDigest, other: ResponseDigest): boolean {
  return one.status === other.status && one.lines === other.lines && one.digest === other.digest
}
