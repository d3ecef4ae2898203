import type { Readable } from 'node:stream'
import type { Millis } from '../core/record.ts'

/** A request, written exactly once. */
export interface Outgoing {
  readonly method: string
  /** Origin form, as the client sent it. */
  readonly target: string
  /** Flat name–value list in latin1, without framing. */
  readonly headers: readonly string[]
  /** Null or empty: none. Only undici takes a stream. */
  readonly body: Buffer | Readable | null
  /** Called once the answer is complete and no socket holds any of the body. */
  readonly onTaken?: () => void
}

/** How long the transport waits. 0: forever, because the caller keeps time. */
export interface Patience {
  /** From the request to the head of its answer; an interim answer restarts it. */
  readonly head: Millis
  /** Between two bytes of the answer. */
  readonly idle: Millis
}

/**
 * One request and the receiver of its answer. {@link onBegin} is the witness: before it, no byte of the request has been handed to a
 * socket; after it, bytes may have been. Nothing is called after {@link onEnd} or {@link onError}.
 */
export interface Exchanging {
  readonly request: Outgoing
  readonly patience: Patience
  /** Called right before the first byte is sent, on a connected (and, with TLS, authenticated) socket. False: do not send. */
  onBegin(carrier: Carrier): boolean
  /** The head of the answer; interim ones (1xx) are not reported. Lines as received, flat, in latin1. */
  onHead(status: number, reason: string, lines: string[]): void
  /** The bytes are valid only during the call: copy what you keep. */
  onData(bytes: Buffer): void
  onEnd(trailers: string[]): void
  onError(error: Error): void
}

/** Carries an exchange that has begun. Calls for a finished one do nothing. */
export interface Carrier {
  /** Aborts it: {@link Exchanging.onError} is called at once. */
  abort(exchange: Exchanging, error: Error): void
  pause(exchange: Exchanging): void
  resume(exchange: Exchanging): void
}

/** Sends each exchange at most once: never again on another connection, whatever the method. */
export interface Transport {
  send(exchange: Exchanging): void
  /** Cancels an exchange that still waits for a connection: nothing more is called. */
  cancel(exchange: Exchanging): void
  /** Aborts everything in progress. Resolves when every connection is closed. */
  close(): Promise<void>
}

/** The upstream answered, but in a way that the proxy does not carry. The message says why, to clients too. */
export class AnswerRefused extends Error {}

export class AnswerTimeout extends Error {
  readonly code = 'ERR_UPSTREAM_TIMEOUT'
}

const TIMEOUT: ReadonlySet<string | undefined> = new Set([
  'ERR_UPSTREAM_TIMEOUT',
  'UND_ERR_HEADERS_TIMEOUT',
  'UND_ERR_BODY_TIMEOUT',
])

/** Whether the exchange ended because the answer did not arrive, or continue, in time. */
export function isTimeout({ code }: NodeJS.ErrnoException): boolean {
  return TIMEOUT.has(code)
}
