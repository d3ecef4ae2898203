import { createHash, hash } from 'node:crypto'
import { linesOf, type RawHeaders } from './headers.ts'
import { frame } from './identity.ts'
import { at, canonical, parseLossless, pointerTokens, without } from './json.ts'
import type { FingerprintPolicy } from './policy.ts'
import type { Fingerprint } from './record.ts'

/** Part of every fingerprint and of every recipe: raised whenever the same request would hash otherwise. */
const ALGORITHM = 'fingerprint/1'

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
  const [mode, content] = bodyContent(request, policy)
  const digest = createHash('sha256')
  const headers = policy.headers.map((name) => frame(linesOf(request.headers, name)))
  const query = QUERY[policy.query](request.query)
  digest.update(
    frame([ALGORITHM, request.method, request.path, query, mediaType(request.headers), ...headers, mode]),
  )
  digest.update(content)
  return digest.digest() as Fingerprint
}

/** The request as sent: equal only for equal bytes of target, body, media type and the headers that count under `recipe`. */
export function rawDigestOf(request: RequestContent, recipe: string): Buffer {
  const digest = createHash('sha256')
  const counted = ['content-type', 'content-encoding', ...headersOf(recipe)]
  const lines = counted.map((name) => frame(linesOf(request.headers, name)))
  digest.update(frame(['raw/1', request.method, request.target, ...lines]))
  return digest.update(request.body).digest()
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

/** type/subtype and parameters without charset, in lower case. */
export function mediaType(headers: RawHeaders): string {
  const lines = linesOf(headers, 'content-type')
  if (lines.length === 0) return ''
  return parameters(lines.join(', ').toLowerCase())
    .map((part) => part.trim())
    .filter((part) => part !== '' && !/^charset\s*=/.test(part))
    .join(';')
}

/** Splits at semicolons outside quoted strings. */
function parameters(value: string): string[] {
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

/** The mode that was really used, and what of the body counts in it. */
function bodyContent(request: RequestContent, policy: FingerprintPolicy): [string, string | Buffer] {
  const mode = policy.body === 'auto' ? autoMode(request) : policy.body
  switch (mode) {
    case 'none':
      return ['none', '']
    case 'raw':
      return ['raw', request.body]
    case 'json': {
      const content = isEncoded(request.headers) ? null : jsonContent(request.body, policy)
      return content === null ? ['raw', request.body] : ['json', content]
    }
  }
}

function autoMode(request: RequestContent): 'json' | 'raw' {
  const [type = ''] = mediaType(request.headers).split(';')
  const json = type === 'application/json' || type.endsWith('+json')
  return json && request.body.length <= AUTO_JSON_LIMIT ? 'json' : 'raw'
}

/** A compressed body counts as sent. */
function isEncoded(headers: RawHeaders): boolean {
  return linesOf(headers, 'content-encoding').some((line) => line.trim().toLowerCase() !== 'identity')
}

const UTF8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true })

function jsonContent(body: Buffer, policy: FingerprintPolicy): string | null {
  let text: string
  try {
    text = UTF8.decode(body)
  } catch {
    return null
  }
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
