/** Header lines as they came: flat name–value list (Node's `rawHeaders`). */
export type RawHeaders = readonly string[]

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

/** The names that must not cross this hop: the fixed ones and those that `Connection` lists. */
export function hopByHop(headers: RawHeaders): ReadonlySet<string> {
  const lines = linesOf(headers, 'connection')
  if (lines.every((line) => /^(?:keep-alive|close)$/i.test(line))) return HOP_BY_HOP
  const listed = lines.flatMap((line) => line.split(',')).map((name) => name.trim().toLowerCase())
  return new Set([...HOP_BY_HOP, ...listed])
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
