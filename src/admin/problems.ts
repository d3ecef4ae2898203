import type { TSchema } from 'typebox'
import { Value } from 'typebox/value'
import type { RecordId } from '../core/record.ts'

export const PROBLEMS = {
  invalid_request: { status: 400, title: 'The request is invalid' },
  unauthorized: { status: 401, title: 'A bearer token is required' },
  origin_not_allowed: { status: 403, title: 'The request comes from another origin' },
  not_found: { status: 404, title: 'Not found' },
  record_not_found: { status: 404, title: 'There is no such record' },
  method_not_allowed: { status: 405, title: 'The method is not allowed here' },
  not_unknown: { status: 409, title: 'The outcome is not unknown' },
  still_running: { status: 409, title: 'The request is still running' },
  outcome_held: { status: 409, title: 'This replica knows the outcome but has not stored it yet' },
  version_mismatch: { status: 412, title: 'The record has another version' },
  body_too_large: { status: 413, title: 'The body is too large' },
  unsupported_media_type: { status: 415, title: 'The body must be JSON' },
  host_not_allowed: { status: 421, title: 'The request is for another host' },
  version_required: { status: 428, title: 'If-Match with the version of the record is required' },
  internal_error: { status: 500, title: 'Internal error' },
  record_unreadable: { status: 500, title: 'The stored record cannot be read' },
  store_unavailable: { status: 503, title: 'The store is unavailable' },
  audit_unavailable: { status: 503, title: 'The audit log cannot be written' },
} as const satisfies Record<string, { readonly status: number; readonly title: string }>

export type ProblemCode = keyof typeof PROBLEMS

interface ProblemMembers {
  readonly instance?: RecordId
  /** The record as it is now. */
  readonly record?: object
  /** The version of a record that cannot be read. */
  readonly version?: number
}

/** A refusal, answered as problem+json (RFC 9457). */
export class AdminProblem extends Error {
  readonly code: ProblemCode
  readonly members: ProblemMembers
  readonly headers: Readonly<Record<string, string>>

  constructor(
    code: ProblemCode,
    detail: string,
    { headers = {}, ...members }: ProblemMembers & { headers?: AdminProblem['headers'] } = {},
  ) {
    super(detail)
    this.code = code
    this.members = members
    this.headers = headers
  }

  get body() {
    const { status, title } = PROBLEMS[this.code]
    const { code, message: detail, members } = this
    return { type: `urn:idempotency-proxy:${code}`, title, status, detail, code, ...members }
  }
}

export function invalid(detail: string): AdminProblem {
  return new AdminProblem('invalid_request', detail)
}

/** Why `body` does not match its schema: member names, never values. Null: it does. */
export function schemaMismatch(schema: TSchema, body: unknown): string | null {
  if (Value.Check(schema, body)) return null
  const [error] = Value.Errors(schema, body)
  const example =
    error?.instancePath === '/response/headers' ? ', such as [["Content-Type","application/json"]]' : ''
  return `${error?.instancePath || 'the body'}: ${error?.message ?? 'not as described'}${example}`
}
