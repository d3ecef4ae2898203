import type { BreakerState } from '../store/breaker.ts'
import type { Logger } from './log.ts'
import type { Metrics } from './metrics.ts'

const GAUGE: Readonly<Record<BreakerState, number>> = { closed: 0, half_open: 1, open: 2 }

/** What the breaker of the store called `store` does → metrics, and a log line where the store goes or comes back. */
export function breakerObserver(store: string, metrics: Metrics, log: Logger): (state: BreakerState) => void {
  let down = false
  return (state) => {
    metrics.set('idempotency_breaker_state', { store }, GAUGE[state])
    // It closes because the store answered.
    if (state === 'closed') metrics.set('idempotency_store_up', { store }, 1)
    // Each probe that fails opens it anew; said once.
    if (state === 'open' && !down) log.error({ store }, 'the store does not answer: breaker open')
    if (state === 'closed') log.warn({ store }, 'the store answers again: breaker closed')
    if (state !== 'half_open') down = state === 'open'
  }
}
