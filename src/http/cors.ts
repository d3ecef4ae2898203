import type { Config } from '../config/config.ts'
import { filterLines, firstOf, linesOf, type RawHeaders, RESPONSE_HEADER } from '../core/headers.ts'
import { policiesOf } from '../core/route.ts'

/** Lines of the proxy's own that scripts need (contract §15). */
const EXPOSED = [
  RESPONSE_HEADER.replayed,
  RESPONSE_HEADER.status,
  RESPONSE_HEADER.expires,
  RESPONSE_HEADER.retry,
  'Retry-After',
  'Location',
].join(', ')

/** The method that a CORS preflight asks for; null: the request is none. */
export function preflightFor(method: string, headers: RawHeaders): string | null {
  return method === 'OPTIONS' && firstOf(headers, 'origin') !== null
    ? firstOf(headers, 'access-control-request-method')
    : null
}

/** Marks answers for scripts of other origins, as @fastify/cors does (docs/adr/0119-cors-before-fastify.md). */
export class Cors {
  readonly #origins: ReadonlySet<string>
  readonly #credentials: boolean
  /** Null: those that the preflight asks for. */
  readonly #allowed: string | null

  constructor({ origins, credentials, headers }: NonNullable<Config['cors']>, config: Config) {
    this.#origins = new Set(origins)
    this.#credentials = credentials
    const keys = policiesOf(config).flatMap(({ key }) =>
      key.from.flatMap((source) => (source.kind === 'header' ? [source.name] : [])),
    )
    this.#allowed = headers.length === 0 ? null : [...new Set([...headers, ...keys])].join(', ')
  }

  /**
   * The lines of an answer, for the origin of this request: a replay's were made for the first one's. The upstream's own
   * `Access-Control-*` go, except that what it exposes stays exposed.
   */
  mark(lines: RawHeaders, request: RawHeaders): string[] {
    const marked = filterLines(lines, (name) => !name.startsWith('access-control-'))
    const isReadable = this.#allow(marked, request)
    if (isReadable)
      marked.push(
        'Access-Control-Expose-Headers',
        [...linesOf(lines, 'access-control-expose-headers'), EXPOSED].join(', '),
      )
    return marked
  }

  /** The lines of the answer to a preflight for that method. */
  preflight(method: string, request: RawHeaders): string[] {
    const lines: string[] = []
    if (!this.#allow(lines, request)) return lines
    lines.push('Access-Control-Allow-Methods', method)
    const allowed = this.#allowed ?? linesOf(request, 'access-control-request-headers').join(', ')
    if (allowed !== '') lines.push('Access-Control-Allow-Headers', allowed)
    return lines
  }

  /** Whether the request's origin may read the answer, which then says so. */
  #allow(lines: string[], request: RawHeaders): boolean {
    const isAny = this.#origins.has('*')
    if (!isAny && !variesByOrigin(lines)) lines.push('Vary', 'Origin')
    const origin = isAny ? '*' : firstOf(request, 'origin')
    if (origin === null || !this.#origins.has(origin)) return false
    lines.push('Access-Control-Allow-Origin', origin)
    if (this.#credentials) lines.push('Access-Control-Allow-Credentials', 'true')
    return true
  }
}

function variesByOrigin(lines: RawHeaders): boolean {
  const names = linesOf(lines, 'vary').join(',').split(',')
  return names.some((name) => /^\s*(?:\*|origin)\s*$/i.test(name))
}
