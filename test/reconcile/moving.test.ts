import t from 'tap'
import type { Phase } from '../../src/core/copies.ts'
import { migrating } from '../../src/store/migrating.ts'
import { replica, SECOND, Store } from '../protect/harness.ts'
import { AFTER, asking, broken, EVERY, stored, Worker } from './harness.ts'

/** More than `after`. */
const APART = 2 * AFTER

/** One replica executes, one in the next phase of a migration asks. `ahead`: the new store's clock. */
for (const [executes, asks, ahead] of [
  ['both', 'new', APART],
  ['new', 'both', -APART],
] as const satisfies readonly (readonly [Phase, Phase, number])[])
  void t.test(
    `V08 ${executes} beside ${asks}: what the clocks of two stores differ by is not time since the claim`,
    async (t) => {
      const [from, to] = [new Store(), new Store()]
      to.now += ahead
      const on = (phase: Phase) => (by: unknown) => migrating(from.wire(by), to.wire(by), phase)
      const policy = asking()
      const [asked, claims] = asks === 'new' ? [to, from] : [from, to]
      const one = new Worker(Object.assign(new Store(), { wire: on(asks) }), [policy])
      t.teardown(() => one.sweeper.stop())
      let own = 0
      one.monotonic = () => own
      one.clock.saw(asked.now, own, own)
      const passes = async (time: number): Promise<void> => {
        for (let seconds = 0; seconds < time; seconds += SECOND) {
          for (const store of [from, to]) store.now += SECOND
          own += SECOND
          await one.round()
        }
      }
      await passes(2 * AFTER)
      for (let n = 0; n < 40; n++) one.script.push(() => one.says(404))
      const a = replica(t, { store: claims, wire: on(executes) })
      await broken(a, policy)
      await passes(AFTER - 2 * SECOND)
      t.ok(one.asked.length > 1, 'it has asked')
      t.match(await stored(claims), { state: 'unknown' }, '"not found" does not count yet')
      t.match(await a.get({ route: policy }), { code: 'idempotency_outcome_unknown' })
      t.equal(a.n, 1)
      await passes(APART + 4 * EVERY)
      t.match(await a.get({ route: policy }), { status: 201 }, '`after` is over by both clocks')
    },
  )
