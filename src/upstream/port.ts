import type { StoredResponse } from '../core/record.ts'

/** One request to the upstream, sent at most once. */
export interface UpstreamRequest {
  readonly method: string
  /** Origin form, as the client sent it. */
  readonly target: string
  /** Flat name–value list, without framing. */
  readonly headers: readonly string[]
  readonly body: Buffer
  /** Largest response body that is buffered; more is streamed live. */
  readonly responseLimit: number
  /** Whether the answer is streamed as it arrives; `auto`, the default: by its media type (contract §7). */
  readonly stream?: 'auto' | 'always' | 'never'
  /** Called with each chunk of the answer; returns true if it is a stream after all. */
  readonly streams?: ((bytes: Buffer) => boolean) | undefined
  /** Also keeps a stream of at most `responseLimit` bytes: {@link LiveResponse.kept}. */
  readonly keepsStream?: boolean
  /** Called once the answer is complete and no socket holds any of the body. */
  readonly onTaken?: () => void
  /** Called right before the first byte is sent; false: do not send. */
  readonly mayBegin?: () => boolean
}

/** What the exchange proved (contract §7). Only `not_sent` proves that nothing was done. */
export type Forwarded =
  | {
      readonly proof: 'responded'
      readonly response: StoredResponse
      /** `Idempotency-Outcome`, removed from headers and trailers. */
      readonly declaredOutcome: string | null
      /** Returns the body's room to the budget. */
      readonly release: () => void
    }
  | {
      readonly proof: 'live'
      readonly why: 'streamed' | 'too_large' | 'no_room'
      readonly live: LiveResponse
    }
  | {
      readonly proof: 'not_sent'
      readonly reason: string
      /** It was sent, and the upstream has proved that it did not process it. */
      readonly isRefused?: boolean
    }
  | {
      readonly proof: 'unknown'
      readonly reason: string
      readonly timedOut: boolean
      /** An answer came and was refused; `reason` is also for clients. */
      readonly isRefused?: boolean
      readonly status: number | null
    }

/** An answer that is streamed. Exactly one of `attach`, `drain` and `abandon` is called. */
export interface LiveResponse {
  readonly status: number
  readonly reason: string
  readonly headers: readonly string[]
  attach(sink: LiveSink): void
  /** Reads the answer to its end and discards it. */
  drain(): void
  /** Discards the rest by closing the connection. */
  abandon(): void
  /** Settles when the upstream's answer has ended; never rejects. */
  readonly done: Promise<'complete' | 'broken'>
  /** Why it is broken; empty: it is not. */
  readonly brokenBy: string
  /** Empty until it is complete. */
  readonly trailers: readonly string[]
  /** Empty if none came; else it is not kept here. */
  readonly body?: Buffer | undefined
  /** `Idempotency-Outcome`, once it is complete. */
  readonly declaredOutcome: string | null
  /** Once complete: the whole answer, if the request asked for that and there was room; else null. */
  readonly kept: StoredResponse | null
  /** Frees the room of the kept copy. */
  release(): void
}

export interface LiveSink {
  /** False: full; call `resume` once there is room. */
  write(chunk: Buffer): boolean
  end(trailers: readonly string[]): void
  /** The upstream broke off: the client must not see a clean end. */
  abort(): void
  /** Called once, before the others. */
  start(resume: () => void): void
}

export type Forward = (request: UpstreamRequest) => Promise<Forwarded>

/** An observed exchange. */
export interface TappedExchange {
  /** What it proved; never rejects. */
  readonly ended: Promise<Forwarded>
  /** Nothing more is observed. */
  readonly over: boolean
  /** Discards everything observed and stops; {@link ended} settles at once. */
  ignore(): void
}
