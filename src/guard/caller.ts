import { linesOf } from '../core/headers.ts'
import { readCaller } from '../core/identity.ts'
import { refuse } from './answers.ts'
import type { Answer, Call, Trace } from './call.ts'
import type { Ports } from './ports.ts'

/** Who calls, or why nobody can say (contract §5). */
export type Caller = { readonly kind: 'caller'; readonly parts: readonly (string | null)[] } | Stranger

export interface Stranger {
  readonly kind: 'stranger'
  readonly detail: string
  /** 503: it may be known in a moment. */
  readonly status: 400 | 401 | 503
}

/** Tells who calls by what the route's scope counts; tokens are verified. */
export async function whoCalls(
  { verifyToken }: Pick<Ports, 'verifyToken'>,
  { route: { scope }, headers }: Call,
): Promise<Caller> {
  if (scope.jwt === null) return told(readCaller(headers, scope, null))
  const verified = await verifyToken(scope.jwt, headers)
  switch (verified.kind) {
    case 'claims':
      return told(readCaller(headers, scope, verified.claims))
    case 'refused':
      return { kind: 'stranger', detail: verified.detail, status: 401 }
    case 'unavailable': {
      const detail = `who calls cannot be verified now: ${verified.detail}; nothing was executed`
      return { kind: 'stranger', detail, status: 503 }
    }
    case 'absent': {
      // Another scheme's credential is one all the same: its callers must not share the keys of those without any.
      const other = linesOf(headers, 'authorization').some((line) => line.trim() !== '')
      const detail = 'Authorization carries no bearer token, which is what tells callers apart here'
      return other ? { kind: 'stranger', detail, status: 401 } : told(readCaller(headers, scope, null))
    }
  }
}

function told(reading: ReturnType<typeof readCaller>): Caller {
  return reading.kind === 'caller' ? reading : { ...reading, kind: 'stranger' }
}

export function refuseStranger(trace: Trace, { detail, status }: Stranger): Answer {
  const again = status === 503 ? ({ retryAfter: 1, retry: 'same-key' } as const) : {}
  return refuse(trace, 'caller_missing', 'idempotency_caller_missing', detail, { status, ...again })
}
