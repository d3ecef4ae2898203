import t, { type Test } from 'tap'
import type { Phase } from '../../src/core/copies.ts'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { migrating } from '../../src/store/moving/migrating.ts'
import { HOUR, LEASE, MINUTE, pair, replica, SECOND, Store } from '../protect/harness.ts'
import { AFTER, asking, broken, EVERY, stored, unknownIn, Worker, worker } from './harness.ts'

/** A replica whose own clock runs on while the store's steps; it has been running for an hour, and its upstream knows of nothing. */
function bystander(t: Test, store: Store, policy: RoutePolicy) {
  const one = worker(t, store, policy)
  one.otherwise = () => one.says(404)
  let own = HOUR
  one.monotonic = () => own
  one.clock.saw(store.now, own, own)
  return {
    one,
    /** Time passes, by both clocks, with a sweep every second. */
    async passes(time: number): Promise<void> {
      for (let seconds = 0; seconds < time; seconds += SECOND) {
        store.now += SECOND
        own += SECOND
        await one.round()
      }
    },
  }
}

void t.test('V08 a healthy owner keeps its record when the store’s clock steps; N is 1', async (t) => {
  const { a, b, store } = pair(t)
  const policy = asking({ after: MINUTE })
  const run = await a.working({ route: policy }, () => a.responded(201, 'late'))
  const { one, passes } = bystander(t, store, policy)
  await passes(5 * SECOND)
  store.now += 90 * SECOND
  t.match(await b.get({ route: policy }), { code: 'idempotency_outcome_unknown' }, 'as it reads')
  await passes(9 * SECOND)
  t.match(await stored(store), { state: 'unknown', leaseExpired: true })
  t.equal(one.asked.length, 1, 'asked, but not believed')
  t.same(await a.renews(), [true])
  t.match(await b.get({ route: policy }), { code: 'idempotency_key_in_progress' })
  for (let n = 0; n < 20; n++) {
    await passes(LEASE / 3)
    t.same(await a.renews(), [true])
  }
  t.equal(one.asked.length, 1)
  const { bytes } = await run.end()
  t.match(await b.get({ route: policy }), { replayed: true, bytes })
  t.equal(a.n + b.n, 1)
})

/** Before "not found" may free the key, `after` and a lease have to pass by the clock of the replica that asks. */
const WAITS = {
  'a step of the store’s clock does not use up the `after` of a cut-off owner': [MINUTE, LEASE, 2, 55],
  'with `after` below the lease, silence has to last for a lease': [2 * SECOND, LEASE, 1, 27],
  'a shorter lease does not shorten the silence that earlier claims need': [2 * SECOND, SECOND, 1, 27],
} as const
for (const [name, [after, lease, before, early]] of Object.entries(WAITS))
  void t.test(`V08 ${name}`, async (t) => {
    const store = new Store()
    const policy = asking({ after })
    await replica(t, { store }).working({ route: policy })
    const { one, passes } = bystander(t, store, { ...policy, lease })
    await passes(before * SECOND)
    store.now += HOUR
    await passes(early * SECOND)
    t.ok(one.asked.length > 1)
    const { reconciliation } = await unknownIn(store)
    t.match(reconciliation, { notFound: 0, answer: 'not found, too early to count' })
    await passes(30 * SECOND)
    t.match(await stored(store), { state: 'failed_retryable' }, 'now the time is over')
  })

void t.test('V08 a clock step between two status queries is not time between them', async (t) => {
  const store = new Store()
  const policy = asking({ after: MINUTE, every: 10 * SECOND })
  await broken(replica(t, { store }), policy)
  const { one, passes } = bystander(t, store, policy)
  for (let seconds = 0; ((await unknownIn(store)).reconciliation?.notFound ?? 0) === 0; seconds++) {
    if (seconds > 100) throw new Error('never counted')
    await passes(SECOND)
  }
  const { length } = one.asked
  store.now += HOUR
  await passes(SECOND)
  t.equal(one.asked.length, length + 1)
  t.match(await unknownIn(store), {
    reconciliation: { notFound: 1, answer: 'not found, too soon after the previous answer' },
  })
  await passes(20 * SECOND)
  t.match(await stored(store), { state: 'failed_retryable' })
})

void t.test('V08 neither time before the start nor a step back counts as time that has passed', async (t) => {
  for (const [before, step, early, late] of [
    [0, HOUR, 55, 30],
    [30, -90 * SECOND, 90, 90],
  ] as const) {
    const store = new Store()
    const policy = asking({ after: MINUTE })
    await broken(replica(t, { store }), policy)
    if (before === 0) store.now += step
    const { passes } = bystander(t, store, policy)
    await passes(before * SECOND)
    if (before > 0) store.now += step
    await passes(early * SECOND)
    t.match(await unknownIn(store), { reconciliation: { notFound: 0 } })
    await passes(late * SECOND)
    t.match(await stored(store), { state: 'failed_retryable' })
  }
})

void t.test('O02 without steps a record is resolved as soon as `after` and `every` allow', async (t) => {
  const store = new Store()
  const policy = asking({ after: AFTER })
  await broken(replica(t, { store }), policy)
  const { passes } = bystander(t, store, policy)
  await passes(AFTER + EVERY + SECOND)
  t.match(await stored(store), { state: 'failed_retryable' })
})

/** More than `after`. */
const APART = 2 * AFTER

/** One replica executes, one in the next phase of a migration asks. `ahead`: the new store's clock. */
for (const [executes, asks, ahead] of [
  ['both', 'new', APART],
  ['new', 'both', -APART],
] as const satisfies readonly (readonly [Phase, Phase, number])[])
  void t.test(`V08 ${executes} beside ${asks}: what two clocks differ by is not time passed`, async (t) => {
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
    one.otherwise = () => one.says(404)
    const a = replica(t, { store: claims, wire: on(executes) })
    await broken(a, policy)
    await passes(AFTER - 2 * SECOND)
    t.ok(one.asked.length > 1, 'it has asked')
    t.match(await stored(claims), { state: 'unknown' }, '"not found" does not count yet')
    t.match(await a.get({ route: policy }), { code: 'idempotency_outcome_unknown' })
    t.equal(a.n, 1)
    await passes(APART + 4 * EVERY)
    t.match(await a.get({ route: policy }), { status: 201 }, '`after` is over by both clocks')
  })
