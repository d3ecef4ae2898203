import type { RawHeaders } from '../core/headers.ts'
import { type Outcome, type StoredResponse, withoutBody } from '../core/record.ts'
import { keptResult, lostResponse, outcomeOf, replayable } from '../core/settle.ts'
import { meaningOf } from '../protect/meaning.ts'
import type { ShadowVerdict } from '../protect/outcomes.ts'
import type { ProtectedRequest } from '../protect/request.ts'
import { shared } from '../runtime/limits.ts'
import type { TappedExchange } from '../upstream/port.ts'

/** What the upstream did with a request that shadow mode watches. */
export interface Observed {
  readonly outcome: Outcome
  /** The response as it would be replayed; null: incomplete. */
  readonly response: StoredResponse | null
  /** Its header lines, as they reached the client. */
  readonly headers: RawHeaders
  /** Releases the memory of the body; idempotent. */
  readonly release: () => void
  /** What `enforce` would have answered instead of the upstream. */
  readonly failed: ShadowVerdict | null
  /** Why the response is incomplete; null: it is complete. */
  readonly cause: string | null
}

/** Observes the exchange to its end. The caller must call `release`. */
export async function observeExchange(
  request: Pick<ProtectedRequest, 'route' | 'headers' | 'protocol'>,
  upstream: TappedExchange,
): Promise<Observed> {
  const { route } = request
  const nothing = { response: null, headers: [], release: () => {} }
  const failed = (outcome: Outcome, verdict: ShadowVerdict, cause: string): Observed => ({
    ...nothing,
    outcome,
    failed: verdict,
    cause,
  })
  const result = await upstream.ended
  switch (result.proof) {
    case 'not_sent': {
      const { reason } = result
      return failed({ kind: 'not_executed', reason }, 'upstream_unreachable', reason)
    }
    case 'unknown': {
      const { reason, status } = result
      return failed(lostResponse(route, reason, status), 'upstream_failed', reason)
    }
    case 'live': {
      const { live, why } = result
      live.drain()
      if ((await live.done) !== 'complete') {
        const brokenOff = `the response broke off: ${live.brokenBy}`
        return failed(lostResponse(route, brokenOff, live.status), 'upstream_failed', brokenOff)
      }
      const outcome = outcomeOf(route, request, live, live.declaredOutcome, withoutBody(live, why))
      return { ...nothing, headers: live.headers, outcome, failed: null, cause: null }
    }
    case 'responded': {
      const { response, declaredOutcome } = result
      return {
        outcome: await meaningOf(route, request, response, declaredOutcome, keptResult(route, response)),
        response: replayable(route, response),
        headers: response.headers,
        release: shared(result.release)(),
        failed: null,
        cause: null,
      }
    }
  }
}

/** Stops observing: drops what was buffered, and ignores the rest. */
export async function ignoreExchange(upstream: TappedExchange): Promise<void> {
  upstream.ignore()
  const result = await upstream.ended
  if (result.proof === 'responded') result.release()
  if (result.proof === 'live') result.live.drain()
}
