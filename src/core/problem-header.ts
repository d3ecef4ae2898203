import { essence, isEncoded } from './body/content-type.ts'
import { linesOf, type RawHeaders } from './headers.ts'
import type { Refusal } from './refusal.ts'

/** What a proxy's own answer says to a proxy in front of it. */
export interface ProblemFacts {
  readonly code: unknown
  /** The id of its record; undefined: it has none. */
  readonly record: unknown
  /** By what it tells records apart (`scopeOf`); undefined: it does not say. */
  readonly scope: unknown
}

/** The value of `Idempotency-Problem`: a Dictionary of RFC 9651. It says the same on a problem and on a page for a browser. */
export function problemLine({ code, instance, scope }: Refusal): string {
  const record = instance === null ? '' : `, record="${instance}"`
  return `code=${code}${record}${scope === null ? '' : `, scope="${scope}"`}`
}

/**
 * The facts of an answer: those of `Idempotency-Problem`, else the members of a whole problem+json, which a proxy that speaks
 * only `Idempotency-Retry` may send. Null: they cannot be read, whoever changed them on the way.
 */
export function problemFacts(headers: RawHeaders, body: Buffer | null): ProblemFacts | null {
  const lines = linesOf(headers, 'idempotency-problem')
  if (lines.length > 0) return lines.length === 1 ? factsOfLine(lines[0] as string) : null
  if (body === null || isEncoded(headers) || essence(headers) !== 'application/problem+json') return null
  return factsOfBody(body)
}

/** One member: a key with a String or a Token, and what ends it. */
const MEMBER = /[ \t]*([a-z*][a-z0-9_.*-]*)=(?:"([^"\\]*)"|([A-Za-z*][\w*.:/-]*))[ \t]*(?:,|$)/y

/** Null: no such dictionary, or one that names a member twice, as where two lines were joined. */
function factsOfLine(line: string): ProblemFacts | null {
  const members = new Map<string, string>()
  for (MEMBER.lastIndex = 0; MEMBER.lastIndex < line.length; ) {
    const [, name, string, token] = MEMBER.exec(line) ?? []
    if (name === undefined || members.has(name)) return null
    members.set(name, (string ?? token) as string)
  }
  return { code: members.get('code'), record: members.get('record'), scope: members.get('scope') }
}

function factsOfBody(body: Buffer): ProblemFacts | null {
  try {
    const { code, instance, scope } = JSON.parse(body.toString()) ?? {}
    return { code, record: instance, scope }
  } catch {
    return null
  }
}
