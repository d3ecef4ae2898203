import type { StoredResponse } from '../core/record.ts'

/** One request to the upstream, sent at most once. */
export interface UpstreamRequest {
  readonly method: string
  /** Origin form, as the client sent it. */
  readonly target: string
  /** Flat name–value list, without framing. */
  readonly headers: readonly string[]
  readonly body: Buffer
  /** Bytes of a response body that may be kept; more is passed through live. */
  readonly responseLimit: number
  /** Asked right before the first byte leaves; false: it must not leave any more. */
  readonly mayBegin?: () => boolean
}

/** What the exchange proved (contract §7). Only `not_sent` says that nothing was done. */
export type Forwarded =
  | {
      readonly proof: 'responded'
      readonly response: StoredResponse
      /** The upstream's own word on the outcome (`Idempotency-Outcome`), taken off the headers. */
      readonly declaredOutcome: string | null
      /** Gives back the room that the body takes. */
      readonly release: () => void
    }
  | {
      readonly proof: 'live'
      readonly why: 'streamed' | 'too_large' | 'no_room'
      readonly live: LiveResponse
      readonly declaredOutcome: string | null
    }
  | { readonly proof: 'not_sent'; readonly reason: string }
  | {
      readonly proof: 'unknown'
      readonly reason: string
      readonly timedOut: boolean
      readonly status: number | null
    }

/** An answer that leaves while it arrives. Exactly one of `attach`, `drain` and `abandon` is called. */
export interface LiveResponse {
  readonly status: number
  readonly reason: string
  readonly headers: readonly string[]
  attach(sink: LiveSink): void
  /** Nobody reads: the upstream is heard to its end all the same. */
  drain(): void
  /** Nobody reads, and the rest is not wanted: the connection is given up. Instead of `attach` and `drain`. */
  abandon(): void
  /** Settles when the upstream's answer has ended; never rejects. */
  readonly done: Promise<'complete' | 'broken'>
}

export interface LiveSink {
  /** False: full; call the live response's `resume` given to `start` once there is room. */
  write(chunk: Buffer): boolean
  end(trailers: readonly string[]): void
  /** The upstream broke: the client must not see a clean end. */
  abort(): void
  /** Called once, first. */
  start(resume: () => void): void
}

export type Forward = (request: UpstreamRequest) => Promise<Forwarded>

/** An exchange that somebody else conducts, overheard. */
export interface TappedExchange {
  /** What it proved; never rejects. */
  readonly ended: Promise<Forwarded>
  /** Nothing more is heard. */
  readonly over: boolean
  /** Lets go of what was heard, and of what is still to come; {@link ended} settles at once. */
  ignore(): void
}
