import { linesOf } from '../core/headers.ts'
import { readCaller } from '../core/identity.ts'
import { refuse } from './answers.ts'
import type { Ports } from './ports.ts'
import type { Answer, ProtectedRequest, Trace } from './request.ts'

/** Who calls, or why nobody can say (contract §5). */
export type Caller =
  | { readonly kind: 'caller'; readonly parts: readonly (string | null)[] }
  | UnidentifiedCaller

export interface UnidentifiedCaller {
  readonly kind: 'unidentified'
  readonly detail: string
  /** For the log; null: the detail says it all. */
  readonly cause: string | null
  /** 503: it may be known in a moment. */
  readonly status: 400 | 401 | 503
}

/** Tells who calls by what the route's scope counts; tokens are verified. */
export async function identifyCaller(
  { verifyToken }: Pick<Ports, 'verifyToken'>,
  { route: { scope }, headers }: ProtectedRequest,
): Promise<Caller> {
  if (scope.jwt === null) return asCaller(readCaller(headers, scope, null))
  const verified = await verifyToken(scope.jwt, headers)
  switch (verified.kind) {
    case 'claims':
      return asCaller(readCaller(headers, scope, verified.claims))
    case 'refused':
      return { kind: 'unidentified', detail: verified.detail, cause: null, status: 401 }
    case 'unavailable': {
      const detail = `who calls cannot be verified now: ${verified.detail}; nothing was executed`
      return { kind: 'unidentified', detail, cause: null, status: 503 }
    }
    case 'absent': {
      // Another scheme's credential is one all the same: its callers must not share the keys of those without any.
      const other = linesOf(headers, 'authorization').some((line) => line.trim() !== '')
      const detail = 'Authorization carries no bearer token, which is what tells callers apart here'
      return other
        ? { kind: 'unidentified', detail, cause: null, status: 401 }
        : asCaller(readCaller(headers, scope, null))
    }
  }
}

/** One name for all parts of a caller; null: nobody knows who calls, or everybody is the same caller. */
export function callerName(caller: Caller): string | null {
  if (caller.kind === 'unidentified' || caller.parts.every((part) => part === null)) return null
  return caller.parts.join('\0')
}

function asCaller(reading: ReturnType<typeof readCaller>): Caller {
  return reading.kind === 'caller' ? reading : { ...reading, kind: 'unidentified' }
}

export function refuseCaller(trace: Trace, { detail, cause, status }: UnidentifiedCaller): Answer {
  trace.cause = cause
  const again = status === 503 ? ({ retryAfter: 1, retry: 'same-key' } as const) : {}
  return refuse(trace, 'caller_missing', 'idempotency_caller_missing', detail, { status, ...again })
}
