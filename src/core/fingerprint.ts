import { createHash, hash } from 'node:crypto'
import { formContent } from './form.ts'
import { linesOf, type RawHeaders } from './headers.ts'
import { frame } from './identity.ts'
import { at, canonical, canonicalText, parseLossless, pointerTokens, without } from './json.ts'
import { essence, isEncoded, mediaType, textOf } from './media.ts'
import { multipartContent } from './multipart.ts'
import type { FingerprintPolicy } from './policy.ts'
import type { Fingerprint } from './record.ts'

/** Part of every fingerprint and of every recipe: raised whenever the same request would hash otherwise. */
const ALGORITHM = 'fingerprint/2'

/** Beyond this `auto` takes the bytes as they are: canonical form costs 50 times as much as hashing (RESEARCH, Speed). */
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

/** Names algorithm, settings and counted headers: records of another recipe are compared by their raw digest (contract §5). */
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
  const settings = frame([ALGORITHM, JSON.stringify([body, ignore, only, headers, query])])
  return [hash('sha256', settings, 'base64url').slice(0, 16), ...headers].join(RECIPE_SEPARATOR)
}

/** In no header name (RFC 9110 §5.6.2). */
const RECIPE_SEPARATOR = ','

/** The headers that count under a recipe, this version's or another's. */
function headersOf(recipe: string): string[] {
  return recipe.split(RECIPE_SEPARATOR).slice(1)
}

/** What the operation is, whatever its spelling (contract §5). */
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

/** Up to here it is cheaper to copy what is hashed together: a hash made in pieces costs 3 µs more. */
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

interface BodyContent {
  /** The mode that was really used. */
  readonly mode: Exclude<FingerprintPolicy['body'], 'auto'>
  /** The media type as far as it counts. */
  readonly type: string
  /** What of the body counts. */
  readonly content: readonly (string | Buffer)[]
}

/** Whatever a mode cannot read without losing information counts as the bytes that were sent. */
function bodyContent({ headers, body }: RequestContent, policy: FingerprintPolicy): BodyContent {
  const wanted = policy.body === 'auto' ? autoMode(headers, body) : policy.body
  const mode = isEncoded(headers) && wanted !== 'none' ? 'raw' : wanted
  const type = mediaType(headers)
  const raw: BodyContent = { mode: 'raw', type, content: [body] }
  switch (mode) {
    case 'none':
      return { mode, type, content: [] }
    case 'raw':
      return raw
    case 'form': {
      // What is no form would lose information if it were read as one.
      const content = essence(headers) === FORM ? formContent(headers, body) : null
      return content === null ? raw : { mode, type, content: [content] }
    }
    case 'multipart': {
      const content = multipartContent(headers, body)
      return content === null ? raw : { mode, type: MULTIPART, content }
    }
    case 'json': {
      const content = jsonContent(headers, body, policy)
      return content === null ? raw : { mode, type, content: [content] }
    }
  }
}

const FORM = 'application/x-www-form-urlencoded'
const MULTIPART = 'multipart/form-data'

/** Forms and multiparts need no limit: at worst 10 ms and 6 ms for 1 MiB, where hashing alone takes 1 ms. */
function autoMode(headers: RawHeaders, body: Buffer): 'json' | 'form' | 'multipart' | 'raw' {
  const type = essence(headers)
  if (type === FORM) return 'form'
  if (type === MULTIPART) return 'multipart'
  const json = type === 'application/json' || type.endsWith('+json')
  return json && body.length <= AUTO_JSON_LIMIT ? 'json' : 'raw'
}

function jsonContent(headers: RawHeaders, body: Buffer, policy: FingerprintPolicy): string | null {
  const text = textOf(headers, body)
  if (text === null) return null
  if (policy.only.length === 0 && policy.ignore.length === 0) return canonicalText(text)
  let node = parseLossless(text)
  if (node === null) return null
  if (policy.only.length > 0) {
    const root = node
    return frame(
      policy.only.map((pointer) => {
        const found = at(root, pointerTokens(pointer))
        return found === null ? null : canonical(found)
      }),
    )
  }
  for (const pointer of policy.ignore) node = without(node, pointerTokens(pointer))
  return canonical(node)
}
