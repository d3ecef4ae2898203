import type { RecordId } from './record.ts'

export type RetryAdvice = 'same-key' | 'new-key' | 'no'

interface RefusalRow {
  readonly status: number
  readonly title: string
  readonly retry: RetryAdvice
}

/** All answers that the proxy itself gives (contract §6). Statuses are defaults: routes may override them. */
export const REFUSALS = {
  idempotency_key_missing: { status: 400, title: 'Idempotency key is missing', retry: 'new-key' },
  idempotency_key_invalid: { status: 400, title: 'Idempotency key is invalid', retry: 'new-key' },
  idempotency_caller_missing: { status: 401, title: 'The caller is not identified', retry: 'no' },
  idempotency_key_reused: {
    status: 422,
    title: 'Idempotency key was used for another request',
    retry: 'new-key',
  },
  idempotency_key_in_progress: {
    status: 409,
    title: 'The first request is still running',
    retry: 'same-key',
  },
  idempotency_outcome_unknown: {
    status: 409,
    title: 'The outcome of the first request is unknown',
    retry: 'same-key',
  },
  idempotency_response_unavailable: {
    status: 409,
    title: 'Done, but the response was not kept',
    retry: 'no',
  },
  idempotency_key_expired: { status: 409, title: 'Idempotency key has expired', retry: 'no' },
  idempotency_store_unavailable: {
    status: 503,
    title: 'The idempotency store is unavailable',
    retry: 'same-key',
  },
  replay_forbidden: { status: 403, title: 'The caller may not see the stored answer', retry: 'no' },
  replay_unauthorized_yet: {
    status: 503,
    title: 'Whether the caller may see the stored answer is not known yet',
    retry: 'same-key',
  },
  rate_limited: { status: 429, title: 'Too many new keys', retry: 'same-key' },
  request_too_large: { status: 413, title: 'The request is too large', retry: 'no' },
  upstream_unreachable: { status: 502, title: 'The upstream could not be reached', retry: 'same-key' },
  upstream_failed: { status: 502, title: 'The upstream did not give a complete answer', retry: 'same-key' },
  upstream_timeout: { status: 504, title: 'The upstream did not answer in time', retry: 'same-key' },
  upstream_slow: { status: 504, title: 'The upstream is still working', retry: 'same-key' },
  request_timeout: { status: 408, title: 'The request did not arrive in time', retry: 'same-key' },
  overloaded: { status: 503, title: 'Too many requests are in flight', retry: 'same-key' },
  route_not_found: { status: 404, title: 'No route matches', retry: 'no' },
  loop_detected: { status: 508, title: 'The request has been through this proxy', retry: 'no' },
  request_malformed: { status: 400, title: 'The request is malformed', retry: 'no' },
} as const satisfies Record<string, RefusalRow>

export type RefusalCode = keyof typeof REFUSALS

/** One of the proxy's own answers, before it is written as problem+json. */
export interface Refusal {
  readonly code: RefusalCode
  readonly status: number
  readonly detail: string
  readonly retry: RetryAdvice
  /** Adds Stripe's member `error`: Stripe's clients treat JSON without it as a success. */
  readonly stripeError: boolean
  /** Whole seconds, at least 1. */
  readonly retryAfter: number | null
  readonly instance: RecordId | null
  /** The record's scope, for a proxy in front of this one (`scopeOf`). */
  readonly scope: string | null
  /** False: the outcome is not determined automatically; an operator has to decide. */
  readonly checking: boolean
  /** False: a retry may find no record, even if there is one now. */
  readonly remembered: boolean
  /** Status and location of the response that was not kept. */
  readonly original: { readonly status: number; readonly location: string | null } | null
}

export function refusal(
  code: RefusalCode,
  detail: string,
  more: Partial<Omit<Refusal, 'code' | 'detail'>> = {},
): Refusal {
  return {
    code,
    status: REFUSALS[code].status,
    retry: REFUSALS[code].retry,
    stripeError: false,
    detail,
    retryAfter: null,
    instance: null,
    scope: null,
    checking: true,
    remembered: true,
    original: null,
    ...more,
  }
}

/** A head that servers could read differently. */
export function malformed(status: 400 | 417 | 501 | 505, detail: string): Refusal {
  return refusal('request_malformed', detail, { status })
}

export function unmetExpectation(): Refusal {
  return malformed(417, 'an expectation other than 100-continue')
}

/** The body of RFC 9457, with the members of contract §6. */
export function problemBody(refused: Refusal, baseUrl: string): string {
  const { code, status, detail, retry, original } = refused
  return JSON.stringify({
    type: `${baseUrl}${code}`,
    title: REFUSALS[code].title,
    status,
    detail,
    instance: refused.instance ?? undefined,
    code,
    retry,
    scope: refused.scope ?? undefined,
    originalStatus: original?.status,
    location: original?.location ?? undefined,
    error: refused.stripeError ? stripeError(refused) : undefined,
  })
}

/** The shape of Stripe's API errors. */
function stripeError({ code, detail }: Refusal): object {
  const type = code.startsWith('idempotency_') ? 'idempotency_error' : 'api_error'
  return { type, code, message: detail }
}

/** The value of `Idempotency-Problem`: a Dictionary of RFC 9651. The same on a problem and on a browser page. */
export function problemLine({ code, instance, scope }: Refusal): string {
  const record = instance === null ? '' : `, record="${instance}"`
  return `code=${code}${record}${scope === null ? '' : `, scope="${scope}"`}`
}
