import type { RecordId } from '../core/record.ts'
import type { RecordView } from './schemas.ts'

interface ProblemRow {
  readonly status: number
  readonly title: string
}

/** Every refusal of the admin API, by its code. */
export const PROBLEMS = {
  invalid_request: { status: 400, title: 'The request cannot be read' },
  unauthorized: { status: 401, title: 'A bearer token is needed' },
  origin_not_allowed: { status: 403, title: 'The request comes from another origin' },
  not_found: { status: 404, title: 'There is nothing here' },
  record_not_found: { status: 404, title: 'There is no such record' },
  method_not_allowed: { status: 405, title: 'The method is not allowed here' },
  not_unknown: { status: 409, title: 'The outcome is not unknown' },
  still_running: { status: 409, title: 'The request is still running' },
  outcome_held: { status: 409, title: 'The outcome is known here, and not stored yet' },
  version_mismatch: { status: 412, title: 'The record has another version' },
  body_too_large: { status: 413, title: 'The body is too large' },
  unsupported_media_type: { status: 415, title: 'The body must be JSON' },
  host_not_allowed: { status: 421, title: 'The request is for another host' },
  version_required: { status: 428, title: 'The version that is decided about is needed' },
  internal_error: { status: 500, title: 'Something is broken here' },
  record_unreadable: { status: 500, title: 'The stored record cannot be read' },
  store_unavailable: { status: 503, title: 'The store is unavailable' },
  audit_unavailable: { status: 503, title: 'The audit log cannot be written' },
} as const satisfies Record<string, ProblemRow>

export type ProblemCode = keyof typeof PROBLEMS

export interface AdminAnswer {
  readonly status: number
  readonly headers: Readonly<Record<string, string>>
  readonly body: object | null
}

export function ok(body: object, headers: AdminAnswer['headers'] = {}): AdminAnswer {
  return { status: 200, headers, body }
}

export const NO_CONTENT: AdminAnswer = { status: 204, headers: {}, body: null }

/** problem+json (RFC 9457). `record`: what the decision met. */
export function problem(
  code: ProblemCode,
  detail: string,
  more: {
    readonly instance?: RecordId
    readonly record?: RecordView
    readonly headers?: AdminAnswer['headers']
  } = {},
): AdminAnswer {
  const { status, title } = PROBLEMS[code]
  const { headers = {}, ...members } = more
  return {
    status,
    headers: { 'content-type': 'application/problem+json', ...headers },
    body: { type: `urn:idempotency-proxy:${code}`, title, status, detail, code, ...members },
  }
}
