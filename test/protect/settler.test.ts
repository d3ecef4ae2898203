import t from 'tap'
import type { OutcomeDraft, PendingOutcome } from '../../src/core/settle.ts'
import { draft, newId, newToken, SPANS } from '../store/fixtures.ts'
import { replica, route, TTL } from './harness.ts'

const BYPASS = route({ onStoreUnavailable: 'bypass' })

/** An outcome that the store has not taken. */
function pending(
  state: OutcomeDraft['state'],
  over: Partial<PendingOutcome> = {},
  as: Partial<OutcomeDraft> = {},
): PendingOutcome {
  return {
    id: newId(),
    draft: draft(state, newToken(), as) as OutcomeDraft,
    spans: SPANS,
    claimed: true,
    withdrawn: false,
    over: null,
    onLeaseExpired: 'unknown',
    usefulFor: TTL,
    ...over,
  }
}

void t.test('R02 X02 bypass: nothing executes with too many unsettled outcomes', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'down'
  const { settler } = a.ports
  const kept = { done: Promise.resolve('kept' as const), drop: () => {} }
  t.equal((await a.get({ route: BYPASS, key: 'before' })).status, 201)
  while (!settler.full)
    settler.restore([{ unsettled: pending('failed_retryable'), kept }], () => () => {})
  t.equal((await a.get({ route: BYPASS, key: 'one more' })).code, 'idempotency_store_unavailable')
  t.equal(a.n, 1)
})
