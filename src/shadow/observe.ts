import type { Outcome, StoredResponse } from '../core/record.ts'
import { keptResult, outcomeOf, replayable, unknownBecause, withoutBody } from '../protect/classify.ts'
import type { ShadowVerdict } from '../protect/outcomes.ts'
import type { ProtectedRequest } from '../protect/request.ts'
import { shared } from '../runtime/limits.ts'
import type { TappedExchange } from '../upstream/port.ts'

/** What the upstream did with a request that shadow mode watched. */
export interface Observed {
  readonly outcome: Outcome
  /** As it would be replayed; null where it is not there whole. */
  readonly response: StoredResponse | null
  /** Gives back the room of its body; may be called again. */
  readonly release: () => void
  /** What the client would have got from `enforce` instead of an answer of the upstream. */
  readonly failed: ShadowVerdict | null
  /** Why the upstream gave no whole answer; null: it did. */
  readonly cause: string | null
}

/** Hears the exchange to its end. Whoever asks releases. */
export async function observeExchange(
  { route, headers }: Pick<ProtectedRequest, 'route' | 'headers'>,
  upstream: TappedExchange,
): Promise<Observed> {
  const result = await upstream.ended
  const nothing = { response: null, release: () => {} }
  switch (result.proof) {
    case 'not_sent':
      return {
        ...nothing,
        outcome: { kind: 'not_executed', reason: result.reason },
        failed: 'upstream_unreachable',
        cause: result.reason,
      }
    case 'unknown':
      return {
        ...nothing,
        outcome: unknownBecause(result.reason, result.status),
        failed: 'upstream_failed',
        cause: result.reason,
      }
    case 'live': {
      const { live, why, declaredOutcome } = result
      live.drain()
      const brokenOff = 'the upstream broke off its answer'
      return (await live.done) === 'complete'
        ? {
            ...nothing,
            outcome: outcomeOf(route, headers, live, declaredOutcome, withoutBody(live, why)),
            failed: null,
            cause: null,
          }
        : {
            ...nothing,
            outcome: unknownBecause(brokenOff, live.status),
            failed: 'upstream_failed',
            cause: brokenOff,
          }
    }
    case 'responded': {
      const { response, declaredOutcome } = result
      const outcome = outcomeOf(route, headers, response, declaredOutcome, keptResult(route, response))
      return {
        outcome,
        response: replayable(route, response),
        release: shared(result.release)(),
        failed: null,
        cause: null,
      }
    }
  }
}

/** Nobody asks how the exchange ends: what was heard of it, and what comes, is let go. */
export async function ignoreExchange(upstream: TappedExchange): Promise<void> {
  upstream.ignore()
  const result = await upstream.ended
  if (result.proof === 'responded') result.release()
  if (result.proof === 'live') result.live.drain()
}
