import { createHash, hash } from 'node:crypto'
import { formContent, MULTIPART, multipartContent, URLENCODED } from './body/form.ts'
import { JsonReading } from './body/json.ts'
import { nodeAt, type PointerNode, placesOf } from './body/json-pointer.ts'
import { SHORT_BODY } from './body/json-text.ts'
import type { RequestDigests } from './decide.ts'
import { type ContentType, contentType, isEncoded, linesOf, type RawHeaders } from './headers.ts'
import { frame, type Hmac, hmacOf, part } from './identity.ts'
import type { FingerprintPolicy } from './policy.ts'
import type { Fingerprint, IdempotencyRecord, Operation, StoredResponse } from './record.ts'
import { partsOf, selectingLines } from './selecting.ts'
import { atOnce, type Steps } from './steps.ts'

/** Part of every fingerprint and recipe. Raise it whenever the same request would hash differently. */
const ALGORITHM = 'fingerprint/2'

/** A body as it is read: without its content codings, and the header lines without `Content-Encoding`, where it could be decoded. */
export interface ReadableBody {
  readonly headers: RawHeaders
  readonly body: Buffer
}

/** A complete protected request. */
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

/** Names the algorithm, settings and counted headers. Records with another recipe are compared by raw digest (contract §5). */
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
  const counted = headers === null ? [] : [SELECTING_LINES, ...headers]
  return [hash('sha256', settings, 'base64url').slice(0, 16), ...counted].join(RECIPE_SEPARATOR)
}

/** Stands for all selecting headers in a recipe. No header has this name, so that a release that does not know it finds no lines. */
const SELECTING_LINES = '@'

/** Cannot occur in a header name (RFC 9110 §5.6.2). */
const RECIPE_SEPARATOR = ','

/** Prefix of the recipe of keyed digests (docs/adr/0084). No hash of settings contains it. */
const KEYED = 'keyed.'

/** The headers that count under a recipe, of this version or another. */
function headersOf(recipe: string): readonly string[] {
  const at = recipe.indexOf(RECIPE_SEPARATOR)
  return at < 0 ? NONE : recipe.slice(at + 1).split(RECIPE_SEPARATOR)
}

const NONE: readonly string[] = []

/** Whether a request has the same raw digest under both recipes. */
export function hashesAlike(recipe: string, other: string): boolean {
  return (
    recipe.startsWith(KEYED) === other.startsWith(KEYED) &&
    String(headersOf(recipe)) === String(headersOf(other))
  )
}

/**
 * The digests of an executed request of which only the record is left, for comparison with `found`. If they are no longer comparable, it
 * counts as the same request: nothing may be executed twice.
 */
export function digestsAfter(executed: Operation, found: IdempotencyRecord): RequestDigests {
  const { recipe, fingerprint } = executed
  const { rawDigest } = hashesAlike(found.recipe, recipe) ? executed : found
  return {
    recipe,
    fingerprint,
    rawDigest: executed.rawDigest,
    parts: executed.parts,
    rawDigestUnder: () => rawDigest,
  }
}

/** Identifies the operation, regardless of its spelling (contract §5). */
export function fingerprintOf(request: RequestContent, policy: FingerprintPolicy): Fingerprint {
  return shortFingerprint(request, policy) ?? atOnce(fingerprintSteps(request, policy))
}

/** For short JSON, as most bodies are: avoids generators, which cost a fifth of it. Null: not short JSON. */
function shortFingerprint(request: RequestContent, policy: FingerprintPolicy): Fingerprint | null {
  const { headers, body } = request
  const type = contentType(headers)
  if (body.length > SHORT_BODY || modesOf(request, type, policy) !== AUTO_MODES.json) return null
  const content = shortContent(body, policy)
  const head = headOf(request, policy, content === null ? 'raw' : 'json', type.media)
  return sha256(head, content ?? body) as Fingerprint
}

function* fingerprintSteps(request: RequestContent, policy: FingerprintPolicy): Steps<Fingerprint> {
  const { mode, type, content, free } = yield* bodyContent(request, policy)
  const head = headOf(request, policy, mode, type)
  // The text of a short body is in shared memory: the next one overwrites it.
  const isShort = request.body.length <= SHORT_BODY
  const digest = isShort ? sha256(head, content) : yield* longSha256(head, content)
  free?.()
  return digest as Fingerprint
}

/** Everything that counts except the body. */
function headOf(
  { method, path, query, headers }: RequestContent,
  policy: FingerprintPolicy,
  mode: BodyContent['mode'],
  type: string,
): string {
  const operation = part(method) + part(path) + part(QUERY[policy.query](query)) + part(type)
  if (policy.headers === null) return part(ALGORITHM) + operation + part(mode)
  const selecting = selectingLines(headers)
  // No mode begins with this text.
  const selected = selecting === '' ? '' : part(SELECTING_LINES + selecting)
  return part(ALGORITHM) + operation + linesFramed(headers, policy.headers) + selected + part(mode)
}

/** The request as sent: equal only for equal bytes of target, body, media type and the headers that count under `recipe`. */
export function rawDigestOf(request: RequestContent, recipe: string): Buffer {
  return sha256(rawHeadOf(request, recipe), request.body)
}

function rawHeadOf({ method, target, headers }: RequestContent, recipe: string): string {
  const lines = linesFramed(headers, OF_CONTENT) + linesFramed(headers, headersOf(recipe))
  return part('raw/1') + part(method) + part(target) + lines
}

const OF_CONTENT: readonly string[] = ['content-type', 'content-encoding']

/** Each name's lines. */
function linesFramed(headers: RawHeaders, names: readonly string[]): string {
  let framed = ''
  for (const name of names)
    framed += part(name === SELECTING_LINES ? selectingLines(headers) : frame(linesOf(headers, name)))
  return framed
}

/** The digests of a request. Those not computed in steps are computed when first read. */
export class Digests implements RequestDigests {
  readonly recipe: string
  /** The request as sent. */
  readonly #content: RequestContent
  /** The same, decoded if possible. */
  readonly #readable: RequestContent
  readonly #policy: FingerprintPolicy
  /** Null: digests are plain. */
  readonly #key: Hmac | null
  #plainRawDigest: Buffer | null = null
  #plainFingerprint: Fingerprint | null = null
  #rawDigest: Buffer | null = null
  #fingerprint: Fingerprint | null = null

  /** `secret`: the namespace's. */
  constructor(
    request: Omit<RequestContent, 'body'>,
    body: Buffer,
    policy: FingerprintPolicy,
    secret: Buffer | null,
    readable: ReadableBody = { headers: request.headers, body },
  ) {
    const { method, path, query, target, headers } = request
    this.#key = secret === null ? null : hmacOf(secret)
    this.recipe = secret === null ? recipeOf(policy) : KEYED + recipeOf(policy)
    this.#content = { method, path, query, target, headers, body }
    this.#readable =
      readable.body === body
        ? this.#content
        : { method, path, query, target, headers: readable.headers, body: readable.body }
    this.#policy = policy
  }

  /** Computing the fingerprint takes much longer than asking a store for a record with the same bytes. */
  get isLong(): boolean {
    const { body, headers } = this.#readable
    return (
      body.length > CLAIMED_AT_ONCE && modesOf(this.#readable, contentType(headers), this.#policy).length > 0
    )
  }

  /** Even the raw digest is slow enough to be computed in steps. */
  get takesSteps(): boolean {
    return this.#content.body.length > HASHED_AT_ONCE
  }

  /** Digests of its other parts ({@link partsOf}). */
  get parts(): string | undefined {
    const { query, headers } = this.#content
    const { essence, media } = contentType(headers)
    const type = essence === MULTIPART ? MULTIPART : media
    const opaque = this.#policy.body !== 'none' && isEncoded(this.#readable.headers)
    return partsOf(QUERY[this.#policy.query](query), type, headers, this.#policy.headers, this.#key, opaque)
  }

  /** Whether only the bytes of the body were compared: other bytes may mean the same, as in XML or an unknown coding. */
  get comparesBytes(): boolean {
    const { headers, body } = this.#readable
    if (this.#policy.body === 'none') return false
    if (isEncoded(headers)) return true
    return body.length > 0 && atOnce(bodyContent(this.#readable, this.#policy)).mode === 'raw'
  }

  get rawDigest(): Buffer {
    return (this.#rawDigest ??= this.#keyed(this.#plainRaw))
  }

  get fingerprint(): Fingerprint {
    return (this.#fingerprint ??= this.#keyed(this.#plain) as Fingerprint)
  }

  get #plainRaw(): Buffer {
    return (this.#plainRawDigest ??= rawDigestOf(this.#content, this.recipe))
  }

  get #plain(): Fingerprint {
    return (this.#plainFingerprint ??= fingerprintOf(this.#readable, this.#policy))
  }

  /** Computes the digests that the first store operation needs. */
  *begin(): Steps<void> {
    this.#plainRawDigest ??= yield* longSha256(rawHeadOf(this.#content, this.recipe), this.#content.body)
    if (!this.isLong) yield* this.finish()
  }

  /** Makes the fingerprint. */
  *finish(): Steps<void> {
    this.#plainFingerprint ??= yield* fingerprintSteps(this.#readable, this.#policy)
  }

  /** Whether the record's request had the same bytes, so that no fingerprint is needed. */
  isSameBytes({ recipe, rawDigest }: IdempotencyRecord): boolean {
    return rawDigest.equals(recipe === this.recipe ? this.rawDigest : this.rawDigestUnder(recipe))
  }

  rawDigestUnder(recipe: string): Buffer {
    const plain = rawDigestOf(this.#content, recipe)
    return recipe.startsWith(KEYED) ? this.#keyed(plain) : plain
  }

  /** For a record from before digests were keyed, or from before selecting headers counted if the request had none. */
  fingerprintUnder(recipe: string): Fingerprint | null {
    if (KEYED + recipe === this.recipe) return this.#plain
    const former = this.recipe.replace(`${RECIPE_SEPARATOR}${SELECTING_LINES}`, '')
    if (former === this.recipe || selectingLines(this.#content.headers) !== '') return null
    return recipe === former ? this.fingerprint : KEYED + recipe === former ? this.#plain : null
  }

  #keyed(digest: Buffer): Buffer {
    return this.#key === null ? digest : this.#key.of(digest)
  }
}

/** Up to this length parts are joined before hashing: hashing in pieces costs more. */
const JOINED = Buffer.alloc(16 * 1024)

/** Bytes. Reading JSON of this length costs several times as much as a store operation. */
const CLAIMED_AT_ONCE = 32 * 1024

/** Bytes that take a millisecond to hash if the processor has no instructions for it. */
const HASHED_AT_ONCE = 256 * 1024
/** A call to the hash costs as much as hashing this many bytes. */
const CALL = 256

/** {@link sha256} for long input. */
function* longSha256(head: string, content: Content): Steps<Buffer> {
  const digest = createHash('sha256').update(head)
  let left = HASHED_AT_ONCE
  for (const piece of [content].flat()) {
    const bytes = typeof piece === 'string' ? Buffer.from(piece) : piece
    for (let at = 0; at < bytes.length; at += HASHED_AT_ONCE) {
      const slice = bytes.subarray(at, at + HASHED_AT_ONCE)
      digest.update(slice)
      left -= slice.length + CALL
      if (left > 0) continue
      yield
      left = HASHED_AT_ONCE
    }
  }
  return digest.digest()
}

/** Strings count as UTF-8. */
function sha256(head: string, content: Content): Buffer {
  if (Array.isArray(content) || 3 * (head.length + content.length) > JOINED.length) {
    const digest = createHash('sha256').update(head)
    for (const piece of [content].flat()) digest.update(piece)
    return digest.digest()
  }
  let length = JOINED.write(head)
  length +=
    typeof content === 'string' ? JOINED.write(content, length) : (content as Buffer).copy(JOINED, length)
  // Node creates a string faster than an unpooled buffer.
  return Buffer.from(hash('sha256', JOINED.subarray(0, length), 'binary'), 'latin1')
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

type BodyMode = Exclude<FingerprintPolicy['body'], 'auto' | 'raw' | 'none'>

/** The hashed part of a body. */
type Content = string | Buffer | readonly (string | Buffer)[]

interface BodyContent {
  /** The mode that was actually used. */
  readonly mode: BodyMode | 'raw' | 'none'
  /** The part of the media type that counts. */
  readonly type: string
  readonly content: Content
  /** To be called once the content has been used. */
  readonly free?: () => void
}

/**
 * The modes to try before `raw`. A body of another type than the configured mode's is compared as under `auto`: compared as bytes, no retry
 * of a multipart form would equal the first attempt.
 */
function modesOf(
  { headers }: RequestContent,
  { essence }: ContentType,
  policy: FingerprintPolicy,
): readonly BodyMode[] {
  if (policy.body === 'none' || policy.body === 'raw' || isEncoded(headers)) return NO_MODES
  const byType = AUTO_MODES[autoMode(essence)]
  return policy.body === 'auto' || byType.includes(policy.body) ? byType : [policy.body, ...byType]
}

const NO_MODES: readonly BodyMode[] = []
const AUTO_MODES: Readonly<Record<BodyMode | 'raw', readonly BodyMode[]>> = {
  json: ['json'],
  form: ['form'],
  multipart: ['multipart'],
  raw: NO_MODES,
}

/** A body that cannot be parsed without losing information is compared as sent. */
function* bodyContent(request: RequestContent, policy: FingerprintPolicy): Steps<BodyContent> {
  const { headers, body } = request
  const type = contentType(headers)
  const { media } = type
  if (policy.body === 'none') return { mode: 'none', type: media, content: '' }
  for (const mode of modesOf(request, type, policy)) {
    if (mode === 'json') {
      const reading = readingOf(body, policy)
      while (!reading.step()) yield
      const content = jsonContent(reading, policy)
      if (content !== null) return { mode, type: media, content, free: () => reading.free() }
      reading.free()
      continue
    }
    const content = yield* mode === 'form' ? formContent(headers, body) : multipartContent(headers, body)
    if (content !== null) return { mode, type: mode === 'multipart' ? MULTIPART : media, content }
  }
  return { mode: 'raw', type: media, content: request.body }
}

/** Forms and multipart bodies need no limit: at worst they take 10 ms and 6 ms per MiB, where hashing alone takes 1 ms. */
function autoMode(type: string): BodyMode | 'raw' {
  if (type === URLENCODED) return 'form'
  if (type === MULTIPART) return 'multipart'
  return type === 'application/json' || type.endsWith('+json') ? 'json' : 'raw'
}

/** The canonical content of a short body. */
function shortContent(body: Buffer, policy: FingerprintPolicy): Content | null {
  const reading = readingOf(body, policy)
  reading.step()
  return jsonContent(reading, policy)
}

function readingOf(body: Buffer, policy: FingerprintPolicy): JsonReading {
  return new JsonReading(body, placesIn(policy), policy.only.length > 0)
}

/** To be called when all has been read. */
function jsonContent(reading: JsonReading, policy: FingerprintPolicy): Content | null {
  if (policy.only.length === 0) return reading.text
  const { values } = reading
  const root = placesIn(policy) as PointerNode
  return values && frame(policy.only.map((pointer) => values.get(nodeAt(root, pointer))?.toString() ?? null))
}

/** Null: the whole body counts. */
function placesIn(policy: FingerprintPolicy): PointerNode | null {
  const { only, ignore } = policy
  if (only.length === 0 && ignore.length === 0) return null
  let places = placesByPolicy.get(policy)
  if (places === undefined) {
    places = placesOf(only.length > 0 ? only : ignore)
    placesByPolicy.set(policy, places)
  }
  return places
}

const placesByPolicy = new WeakMap<FingerprintPolicy, PointerNode>()

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

/** The digests by which two responses are compared, so that no body need be kept. */
export interface ResponseDigest {
  readonly status: number
  /** Name–value lines by lower-case name; lines of one name in their order (RFC 9110 §5.3). */
  readonly lines: string
  readonly digest: string
}

export function digestResponse({ status, headers, trailers, body }: StoredResponse): ResponseDigest {
  const lines: [string, string][] = []
  for (let i = 0; i + 1 < headers.length; i += 2) {
    const name = (headers[i] as string).toLowerCase()
    if (!ALWAYS_DIFFERENT.has(name)) lines.push([name, (headers[i + 1] as string).trim()])
  }
  for (let i = 0; i + 1 < trailers.length; i += 2)
    lines.push([`trailer ${(trailers[i] as string).toLowerCase()}`, trailers[i + 1] as string])
  lines.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0))
  return { status, lines: JSON.stringify(lines), digest: hash('sha256', body, 'base64url') }
}

export function sameResponse(one: ResponseDigest, other: ResponseDigest): boolean {
  return one.status === other.status && one.lines === other.lines && one.digest === other.digest
}
