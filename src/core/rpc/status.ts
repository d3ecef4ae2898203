import { isSuccess } from '../classify.ts'
import { isEncoded, linesOf, type RawHeaders } from '../headers.ts'
import type { Action, Profile } from '../policy.ts'
import { RPC_CODES, type RpcCode } from './codes.ts'
import { messagesIn, type RpcMessage } from './messages.ts'
import type { RpcProtocol } from './protocol.ts'

/** What each code means unless the profile says otherwise. */
const MEANINGS: Readonly<Record<RpcCode, Action>> = {
  OK: 'store',
  INVALID_ARGUMENT: 'store',
  NOT_FOUND: 'store',
  ALREADY_EXISTS: 'store',
  PERMISSION_DENIED: 'store',
  FAILED_PRECONDITION: 'store',
  OUT_OF_RANGE: 'store',
  UNIMPLEMENTED: 'store',
  // By definition, the client has to retry more than this call.
  ABORTED: 'store',
  UNAUTHENTICATED: 'release',
  RESOURCE_EXHAUSTED: 'release',
  // Libraries report a broken connection like this, too; only the transport can prove that nothing was sent.
  UNAVAILABLE: 'unknown',
  DEADLINE_EXCEEDED: 'unknown',
  CANCELLED: 'unknown',
  INTERNAL: 'unknown',
  UNKNOWN: 'unknown',
  DATA_LOSS: 'unknown',
}

/** Follows each profile's treatment of the corresponding 5xx statuses. */
const BY_PROFILE: Readonly<Record<Profile, Partial<Readonly<Record<RpcCode, Action>>>>> = {
  standard: {},
  // Libraries also report this when the answer of a finished handler is too large to send.
  strict: { RESOURCE_EXHAUSTED: 'unknown', UNIMPLEMENTED: 'unknown' },
  lenient: {
    UNAVAILABLE: 'release',
    DEADLINE_EXCEEDED: 'release',
    CANCELLED: 'release',
    INTERNAL: 'release',
    UNKNOWN: 'release',
    DATA_LOSS: 'release',
    UNIMPLEMENTED: 'release',
  },
  stripe: {
    UNAVAILABLE: 'store',
    DEADLINE_EXCEEDED: 'store',
    CANCELLED: 'store',
    INTERNAL: 'store',
    UNKNOWN: 'store',
    DATA_LOSS: 'store',
    ABORTED: 'release',
  },
}

/** The profile's action for an answer with that code (contract §7). `hasMessage`: a message preceded the code. */
export function rpcAction(profile: Profile, code: RpcCode, hasMessage = false): Action {
  const action = BY_PROFILE[profile][code] ?? MEANINGS[code]
  // A handler that has answered something has done something.
  return action === 'release' && hasMessage && profile !== 'lenient' ? 'unknown' : action
}

/** Whether there is a message, or a part of one, in an answer that has a code. */
export function hasMessage(
  protocol: RpcProtocol,
  { status, body }: Pick<RpcAnswer, 'status' | 'body'>,
): boolean {
  // With an error status, the body is a gateway's page or Connect's error document.
  if (!isSuccess(status)) return false
  if (body === undefined) return true
  return messagesIn(protocol, body, 1)?.every(({ isTrailers }) => isTrailers) !== true
}

/** An answer of the upstream; `body` and `trailers` are absent if they were not kept. */
export interface RpcAnswer {
  readonly status: number
  readonly headers: RawHeaders
  readonly body?: Buffer | undefined
  readonly trailers?: RawHeaders
}

/**
 * The code of an answer. `null`: the answer does not follow the protocol (perhaps a proxy's error), so its HTTP status decides.
 * `'none'`: the code is missing or ambiguous, or it is OK but the answer is truncated.
 */
export function rpcCodeOf(protocol: RpcProtocol, answer: RpcAnswer): RpcCode | 'none' | null {
  const { status, headers, body, trailers = [] } = answer
  if (protocol === 'connect') return status === 200 ? 'OK' : connectCode(headers, body)
  const messages = body === undefined ? [] : messagesIn(protocol, body)
  const atEnd = [...linesOf(trailers, 'grpc-status'), ...inFrames(protocol, messages)]
  const inHead = linesOf(headers, 'grpc-status')
  const [said, ...others] = new Set([...inHead, ...atEnd])
  if (said === undefined) return isSuccess(status) ? 'none' : null
  // A 200 has its `grpc-status` in the head only if it has no body: clients ignore one that precedes a message.
  const isEarly = atEnd.length === 0 && status === 200 && body?.length !== 0
  if (isEarly || others.length > 0) return 'none'
  // An unassigned number counts as UNKNOWN (gRPC, statuscodes).
  const code = /^\d{1,3}$/.test(said) ? (RPC_CODES[Number(said)] ?? 'UNKNOWN') : 'UNKNOWN'
  return code === 'OK' && messages === null ? 'none' : code
}

/** Every `grpc-status` in the trailer frames of gRPC-Web. */
function inFrames(protocol: RpcProtocol, messages: readonly RpcMessage[] | null): string[] {
  if (protocol === 'grpc' || !messages?.at(-1)?.isTrailers) return []
  return messages
    .filter(({ isTrailers, isCompressed }) => isTrailers && !isCompressed)
    .flatMap(({ bytes }) => [...bytes.toString('latin1').matchAll(/^grpc-status:[ \t]*(\d+)[ \t]*\r?$/gim)])
    .map(([, value = '']) => value)
}

/** Connect spells `canceled` with one l. */
export function connectName(code: RpcCode): string {
  return code === 'CANCELLED' ? 'canceled' : code.toLowerCase()
}

const CONNECT_CODES = new Map<unknown, RpcCode>(RPC_CODES.map((code) => [connectName(code), code]))

/** The `code` of Connect's error document. */
function connectCode(headers: RawHeaders, body: Buffer | undefined): RpcCode | null {
  if (body === undefined || isEncoded(headers)) return null
  try {
    const code = CONNECT_CODES.get((JSON.parse(body.toString()) as { code?: unknown } | null)?.code)
    return code === 'OK' ? null : (code ?? null)
  } catch {
    return null
  }
}
