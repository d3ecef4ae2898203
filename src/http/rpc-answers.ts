import { contentType, RESPONSE_HEADER } from '../core/headers.ts'
import { problemLine, type Refusal, type RefusalCode } from '../core/refusal.ts'
import { RPC_CODES, type RpcCode } from '../core/rpc/codes.ts'
import { detailMessage, detailName, type RpcDetail, statusMessage } from '../core/rpc/details.ts'
import { type RpcProtocol, rpcOf } from '../core/rpc/protocol.ts'
import { connectName } from '../core/rpc/status.ts'
import type { TrafficRequest } from './request.ts'

/** A refusal as an HTTP answer. */
export interface RefusalAnswer {
  readonly status: number
  /** Including `Content-Length`. */
  readonly headers: string[]
  readonly body: Buffer
}

/** The code of a refusal, in place of its status (docs/guides/grpc.md). */
const CODES: Readonly<Record<RefusalCode, RpcCode>> = {
  idempotency_key_missing: 'INVALID_ARGUMENT',
  idempotency_key_invalid: 'INVALID_ARGUMENT',
  idempotency_caller_missing: 'UNAUTHENTICATED',
  idempotency_key_reused: 'INVALID_ARGUMENT',
  idempotency_key_in_progress: 'ABORTED',
  idempotency_outcome_unknown: 'UNKNOWN',
  idempotency_response_unavailable: 'ALREADY_EXISTS',
  idempotency_key_expired: 'FAILED_PRECONDITION',
  idempotency_store_unavailable: 'UNAVAILABLE',
  replay_forbidden: 'PERMISSION_DENIED',
  replay_unauthorized_yet: 'UNAVAILABLE',
  rate_limited: 'RESOURCE_EXHAUSTED',
  request_too_large: 'RESOURCE_EXHAUSTED',
  upstream_unreachable: 'UNAVAILABLE',
  upstream_failed: 'UNKNOWN',
  upstream_timeout: 'UNKNOWN',
  upstream_slow: 'DEADLINE_EXCEEDED',
  request_timeout: 'UNAVAILABLE',
  overloaded: 'UNAVAILABLE',
  route_not_found: 'UNIMPLEMENTED',
  loop_detected: 'INTERNAL',
  request_malformed: 'INVALID_ARGUMENT',
}

/** By status, where a refusal has several. */
const BY_STATUS: Partial<Readonly<Record<RefusalCode, Readonly<Record<number, RpcCode>>>>> = {
  idempotency_caller_missing: { 400: 'INVALID_ARGUMENT', 503: 'UNAVAILABLE' },
  replay_forbidden: { 401: 'UNAUTHENTICATED' },
  request_malformed: { 501: 'UNIMPLEMENTED' },
}

export function rpcCodeFor({ code, status }: Pick<Refusal, 'code' | 'status'>): RpcCode {
  return BY_STATUS[code]?.[status] ?? CODES[code]
}

/** Refusals of what the client sent, by the part that is wrong. */
const FIELDS: Partial<Readonly<Record<RefusalCode, string>>> = {
  idempotency_key_missing: 'idempotency-key',
  idempotency_key_invalid: 'idempotency-key',
  idempotency_key_reused: 'idempotency-key',
}

/** `google.rpc.ErrorInfo.domain` of all refusals. */
const DOMAIN = 'idempotency-proxy'

function detailsOf(refused: Refusal): RpcDetail[] {
  const { code, detail, retry, retryAfter, instance, original } = refused
  const field = FIELDS[code]
  const metadata = {
    retry,
    ...(instance === null ? {} : { record: instance }),
    ...(original === null ? {} : { originalStatus: String(original.status) }),
  }
  return [
    { type: 'ErrorInfo', reason: code.toUpperCase(), domain: DOMAIN, metadata },
    ...(field === undefined ? [] : [{ type: 'BadRequest', field, description: detail } as const]),
    ...(retryAfter === null ? [] : [{ type: 'RetryInfo', seconds: retryAfter } as const]),
  ]
}

/** The refusal of a call, in its protocol; null: the request is not a call. */
export function rpcRefusal({ rawHeaders, arrival }: TrafficRequest, refused: Refusal): RefusalAnswer | null {
  const way = arrival?.way
  const match = way !== undefined && 'route' in way && way.route !== null ? way.route.match : {}
  const protocol = rpcOf(match, rawHeaders)
  if (protocol === null) return null
  const own = [RESPONSE_HEADER.retry, refused.retry, RESPONSE_HEADER.problem, problemLine(refused)]
  if (refused.retryAfter !== null) own.push('Retry-After-Ms', String(refused.retryAfter * 1000))
  return protocol === 'connect'
    ? connectError(refused, own)
    : trailersOnly(protocol, contentType(rawHeaders).essence, refused, own)
}

/** Head and status in one (gRPC over HTTP/2, *Trailers-Only*). The body is empty. */
function trailersOnly(
  protocol: RpcProtocol,
  type: string,
  refused: Refusal,
  own: readonly string[],
): RefusalAnswer {
  const code = RPC_CODES.indexOf(rpcCodeFor(refused))
  const status = statusMessage(code, refused.detail, detailsOf(refused))
  const headers = [
    'Content-Type',
    type,
    'Grpc-Status',
    String(code),
    'Grpc-Message',
    percentEncoded(refused.detail),
  ]
  headers.push('Grpc-Status-Details-Bin', unpadded(status), ...own)
  // Makes the client's retry policy wait, or give up (gRFC A6).
  if (refused.retry !== 'same-key') headers.push('Grpc-Retry-Pushback-Ms', '-1')
  else if (refused.retryAfter !== null)
    headers.push('Grpc-Retry-Pushback-Ms', String(refused.retryAfter * 1000))
  if (protocol !== 'grpc') headers.push('Content-Length', '0')
  return { status: 200, headers, body: Buffer.alloc(0) }
}

/** Connect's HTTP statuses for the codes of refusals. */
const CONNECT_STATUSES: Partial<Readonly<Record<RpcCode, number>>> = {
  INVALID_ARGUMENT: 400,
  FAILED_PRECONDITION: 400,
  UNAUTHENTICATED: 401,
  PERMISSION_DENIED: 403,
  ALREADY_EXISTS: 409,
  ABORTED: 409,
  RESOURCE_EXHAUSTED: 429,
  UNIMPLEMENTED: 501,
  UNAVAILABLE: 503,
  DEADLINE_EXCEEDED: 504,
}

function connectError(refused: Refusal, own: readonly string[]): RefusalAnswer {
  const code = rpcCodeFor(refused)
  const details = detailsOf(refused).map((one) => ({
    type: detailName(one),
    value: unpadded(detailMessage(one)),
  }))
  const body = Buffer.from(JSON.stringify({ code: connectName(code), message: refused.detail, details }))
  const headers = ['Content-Type', 'application/json', 'Cache-Control', 'no-store', ...own]
  if (refused.retryAfter !== null) headers.push('Retry-After', String(refused.retryAfter))
  headers.push('Content-Length', String(body.length))
  return { status: CONNECT_STATUSES[code] ?? 500, headers, body }
}

function unpadded(bytes: Buffer): string {
  return bytes.toString('base64').replace(/=+$/, '')
}

/** The encoding of `grpc-message`: UTF-8, with `%` and everything but printable ASCII escaped. */
function percentEncoded(text: string): string {
  return Buffer.from(text)
    .toString('latin1')
    .replace(
      /[^\x20-\x24\x26-\x7e]/g,
      (byte) => `%${byte.charCodeAt(0).toString(16).toUpperCase().padStart(2, '0')}`,
    )
}
