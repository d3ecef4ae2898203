import { shared } from '../core/budget.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Outcome, StoredResponse } from '../core/record.ts'
import type { Overheard } from '../upstream/port.ts'
import type { Verdict } from './call.ts'
import { keptResult, outcomeOf, replayable, unknownBecause, withoutBody } from './outcome.ts'

/** What the upstream did with a request that shadow mode watched. */
export interface Heard {
  readonly outcome: Outcome
  /** As it would be replayed; null where it is not there whole. */
  readonly response: StoredResponse | null
  /** Gives back the room of its body; may be called again. */
  readonly release: () => void
  /** What the client would have got from `enforce` instead of an answer of the upstream. */
  readonly failed: Verdict | null
}

/** Hears the exchange to its end. Whoever asks releases. */
export async function hearOut(route: RoutePolicy, upstream: Overheard): Promise<Heard> {
  const result = await upstream.ended
  const nothing = { response: null, release: () => {} }
  switch (result.proof) {
    case 'not_sent':
      return {
        ...nothing,
        outcome: { kind: 'not_executed', reason: result.reason },
        failed: 'upstream_unreachable',
      }
    case 'unknown':
      return {
        ...nothing,
        outcome: unknownBecause(result.reason, result.status),
        failed: 'upstream_failed',
      }
    case 'live': {
      const { live, why, said } = result
      live.drain()
      return (await live.done) === 'complete'
        ? {
            ...nothing,
            outcome: outcomeOf(route, live.status, live.headers, said, withoutBody(live, why)),
            failed: null,
          }
        : {
            ...nothing,
            outcome: unknownBecause('the upstream broke off its answer', live.status),
            failed: 'upstream_failed',
          }
    }
    case 'responded': {
      const { response, said } = result
      const outcome = outcomeOf(route, response.status, response.headers, said, keptResult(route, response))
      return {
        outcome,
        response: replayable(route, response),
        release: shared(result.release)(),
        failed: null,
      }
    }
  }
}

/** Nobody asks how the exchange ends: what was heard of it, and what comes, is let go. */
export async function hearNothing(upstream: Overheard): Promise<void> {
  upstream.ignore()
  const result = await upstream.ended
  if (result.proof === 'responded') result.release()
  if (result.proof === 'live') result.live.drain()
}
