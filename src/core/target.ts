/** A request target (RFC 9112 §3.2) taken apart. */
export interface Target {
  /** What the upstream gets: as sent, in origin form. */
  readonly origin: string
  /** Path as sent, without the query. */
  readonly rawPath: string
  /** Normalised path: what routes match and what identifies the record (contract §10). */
  readonly path: string
  /** Without the `?`; empty where there is none. */
  readonly query: string
}

/** Where `wellKnown: true` tells clients how keys are treated (RFC 8615). */
export const WELL_KNOWN = '/.well-known/idempotency'

/**
 * Takes a target apart. `null`: neither origin form nor an absolute http(s) URI, or one with a fragment, which no target
 * has and on whose end servers disagree.
 */
export function parseTarget(target: string): Target | null {
  if (target.includes('#')) return null
  let origin = target
  if (!origin.startsWith('/')) {
    // Absolute form is for proxies; what follows the authority is matched and forwarded, or it would dodge every route.
    const absolute = /^https?:\/\/[^/?]*/i.exec(origin)
    if (absolute === null) return null
    origin = origin.slice(absolute[0].length)
    if (!origin.startsWith('/')) origin = `/${origin}`
  }
  const mark = origin.indexOf('?')
  const rawPath = mark < 0 ? origin : origin.slice(0, mark)
  const query = mark < 0 ? '' : origin.slice(mark + 1)
  return { origin, rawPath, path: normalisePath(rawPath), query }
}

/** Already normal: the common case costs one scan. A dot after a slash may begin a dot segment. */
const NORMAL = /^(?:\/(?!\.)[A-Za-z0-9\-._~!$&'()*+,;=:@]+)+$/

/**
 * One spelling for every path that a server may take for the same: duplicate slashes, dot segments and a trailing slash
 * go, needless percent-encoding is undone. A backslash is a slash, as the URL standard of browsers and Node reads it. `%2F`
 * (and `%5C`, `%25`) stay data.
 */
export function normalisePath(rawPath: string): string {
  if (NORMAL.test(rawPath)) return rawPath
  const out: string[] = []
  for (const raw of rawPath.split(/[/\\]/)) {
    const segment = normaliseSegment(raw)
    if (segment === '..') out.pop()
    else if (segment !== '' && segment !== '.') out.push(segment)
  }
  return `/${out.join('/')}`
}

function normaliseSegment(segment: string): string {
  let out = ''
  for (let i = 0; i < segment.length; i++) {
    const char = segment[i] as string
    if (char !== '%') {
      out += isPathChar(char) ? char : percent(char)
      continue
    }
    const hex = segment.slice(i + 1, i + 3)
    if (!/^[0-9A-Fa-f]{2}$/.test(hex)) {
      out += '%25'
      continue
    }
    const decoded = String.fromCharCode(Number.parseInt(hex, 16))
    out += isPathChar(decoded) ? decoded : `%${hex.toUpperCase()}`
    i += 2
  }
  return out
}

/** RFC 3986 `pchar`, unencoded. */
function isPathChar(char: string): boolean {
  return /^[A-Za-z0-9\-._~!$&'()*+,;=:@]$/.test(char)
}

function percent(char: string): string {
  return `%${(char.charCodeAt(0) & 0xff).toString(16).toUpperCase().padStart(2, '0')}`
}
