import { hash } from 'node:crypto'
import type { StoredResponse } from './record.ts'

/**
 * Lines that differ between two answers to the same request whatever the upstream did: its clock, its timing, the name it
 * gives to this one exchange; and framing. Documented in docs/shadow.md.
 */
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

/** As much of an answer as it takes to compare it with another one: its body need not be held for it. */
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
