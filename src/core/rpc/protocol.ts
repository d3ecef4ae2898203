import { contentType, firstOf, type RawHeaders } from '../headers.ts'
import type { RouteMatch } from '../policy.ts'
import type { Millis } from '../record.ts'

/*
 * Remote procedure calls whose answers have a status of their own: gRPC in its trailers, gRPC-Web in the last frame of its body (in base64
 * where it is text), Connect in a JSON document.
 */

export type RpcProtocol = 'grpc' | 'grpc-web' | 'grpc-web-text' | 'connect'

/** Media types of unary calls; `application/connect+json` and the like are streams. */
const CONNECT = new Set(['application/json', 'application/proto'])

/**
 * The protocol of a call; null: not a call. A Connect call looks like any other POST, so it is recognised only on gRPC routes, or by its
 * `Connect-Protocol-Version`.
 */
export function rpcOf({ grpc }: Pick<RouteMatch, 'grpc'>, headers: RawHeaders): RpcProtocol | null {
  const { essence } = contentType(headers)
  if (essence.startsWith('application/grpc')) return framedProtocol(essence.slice('application/grpc'.length))
  const isConnect = grpc != null || firstOf(headers, 'connect-protocol-version') !== null
  return isConnect && CONNECT.has(essence) ? 'connect' : null
}

/** `suffix`: what follows `application/grpc`; `+proto` and the like name the codec of the messages. */
function framedProtocol(suffix: string): RpcProtocol | null {
  const [variant = ''] = suffix.split('+', 1)
  switch (variant) {
    case '':
      return 'grpc'
    case '-web':
      return 'grpc-web'
    case '-web-text':
      return 'grpc-web-text'
    default:
      return null
  }
}

/** `package.Service/Method` of a request target. */
export function methodName(target: string): string {
  return target.slice(1).split('?', 1)[0] as string
}

/** The header with a call's deadline. */
export function deadlineHeader(protocol: RpcProtocol): string {
  return protocol === 'connect' ? 'connect-timeout-ms' : 'grpc-timeout'
}

const UNITS: Readonly<Record<string, Millis>> = {
  H: 3_600_000,
  M: 60_000,
  S: 1000,
  m: 1,
  u: 1e-3,
  n: 1e-6,
}

/** How long the client waits; null: not stated, or malformed. */
export function timeoutOf(protocol: RpcProtocol, headers: RawHeaders): Millis | null {
  const value = firstOf(headers, deadlineHeader(protocol)) ?? ''
  if (protocol === 'connect') return /^\d{1,10}$/.test(value) ? Number(value) : null
  const [, count, unit = ''] = /^(\d{1,8})([HMSmun])$/.exec(value) ?? []
  return count === undefined ? null : Number(count) * (UNITS[unit] as number)
}

/** The value of the {@link deadlineHeader} for the time left; at least a millisecond. */
export function timeoutText(protocol: RpcProtocol, left: Millis): string {
  const milliseconds = Math.max(1, Math.floor(left))
  if (protocol === 'connect') return String(Math.min(milliseconds, 9_999_999_999))
  return milliseconds < 1e8 ? `${milliseconds}m` : `${Math.min(Math.floor(milliseconds / 1000), 99_999_999)}S`
}
