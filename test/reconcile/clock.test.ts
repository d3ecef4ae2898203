import t, { type Test } from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { Gate, HOUR, LEASE, MINUTE, replica, SECOND, Store, seen } from '../protect/harness.ts'
import { AFTER, asking, broken, EVERY, stored, unknownIn, type Worker, worker } from './harness.ts'

/** A replica whose own clock runs on while the store's steps; it has been running for an hour. */
function bystander(t: Test, store: Store, policy: RoutePolicy) {
  const one = worker(t, store, policy)
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

function notFound(one: Worker, times: number): void {
  for (let n = 0; n < times; n++) one.script.push(() => one.says(404))
}

/** An owner whose upstream works for as long as the test wants. */
async function owner(t: Test, store: Store, policy: RoutePolicy) {
  const a = replica(t, { store })
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded(201, 'late')))
  const running = a.send({ route: policy })
  await gate.reached
  const [[, run] = []] = [...a.ports.running]
  if (run === undefined) throw new Error('nothing runs')
  const { token } = run.attempt
  return {
    a,
    gate,
    running,
    /** Renews as its process does every third of a lease. */
    renews: () => a.wire.renew([{ id: a.id, token, dueIn: LEASE, dropIn: HOUR }]),
  }
}

void t.test(
  'V08 a healthy owner keeps its record when the store’s clock steps by 90 s, and N is 1',
  async (t) => {
    const store = new Store()
    const policy = asking({ after: MINUTE })
    const { a, gate, running, renews } = await owner(t, store, policy)
    const { one, passes } = bystander(t, store, policy)
    notFound(one, 20)
    await passes(5 * SECOND)
    store.now += 90 * SECOND
    const b = replica(t, { store })
    t.match(
      await b.get({ route: policy }),
      { code: 'idempotency_outcome_unknown' },
      'as it reads for everybody',
    )
    await passes(9 * SECOND)
    t.match(await stored(store), { state: 'unknown', leaseExpired: true })
    t.equal(one.asked.length, 1, 'asked, but not believed')
    t.same(await renews(), [true])
    t.match(await b.get({ route: policy }), { code: 'idempotency_key_in_progress' })
    for (let n = 0; n < 20; n++) {
      await passes(LEASE / 3)
      t.same(await renews(), [true])
    }
    t.equal(one.asked.length, 1)
    gate.open()
    const own = seen(await running)
    t.match(await b.get({ route: policy }), { replayed: true, bytes: own.bytes })
    t.equal(a.n + b.n, 1)
  },
)

void t.test(
  'V08 a step of the store’s clock does not use up the `after` of an owner that is cut off',
  async (t) => {
    const store = new Store()
    const policy = asking({ after: MINUTE })
    await owner(t, store, policy)
    const { one, passes } = bystander(t, store, policy)
    notFound(one, 20)
    await passes(2 * SECOND)
    store.now += HOUR
    await passes(55 * SECOND)
    t.ok(one.asked.length > 1)
    t.match(await unknownIn(store), {
      reconciliation: { notFound: 0, answer: 'not found, too early to count' },
    })
    await passes(30 * SECOND)
    t.match(await stored(store), { state: 'failed_retryable' }, 'now `after` is over')
  },
)

void t.test('V08 with `after` below the lease, silence has to last for a lease', async (t) => {
  const store = new Store()
  const policy = asking({ after: 2 * SECOND })
  await owner(t, store, policy)
  const { one, passes } = bystander(t, store, policy)
  notFound(one, 20)
  await passes(SECOND)
  store.now += HOUR
  await passes(LEASE - 3 * SECOND)
  t.ok(one.asked.length > 1)
  t.match(await unknownIn(store), { reconciliation: { notFound: 0 } })
  await passes(LEASE)
  t.match(await stored(store), { state: 'failed_retryable' })
})

void t.test(
  'V08 a reload that shortens the lease does not shorten the silence that earlier claims need',
  async (t) => {
    const store = new Store()
    const policy = asking({ after: 2 * SECOND })
    await owner(t, store, policy)
    const { one, passes } = bystander(t, store, { ...policy, lease: SECOND })
    notFound(one, 40)
    await passes(SECOND)
    store.now += HOUR
    await passes(LEASE - 3 * SECOND)
    t.ok(one.asked.length > 1)
    t.match(await unknownIn(store), { reconciliation: { notFound: 0 } })
    await passes(LEASE)
    t.match(await stored(store), { state: 'failed_retryable' })
  },
)

void t.test('V08 a clock step between two status queries is not time between them', async (t) => {
  const store = new Store()
  const policy = asking({ after: MINUTE, every: 10 * SECOND })
  await broken(replica(t, { store }), policy)
  const { one, passes } = bystander(t, store, policy)
  notFound(one, 20)
  for (let seconds = 0; ((await unknownIn(store)).reconciliation?.notFound ?? 0) === 0; seconds++) {
    if (seconds > 100) throw new Error('never counted')
    await passes(SECOND)
  }
  const { length } = one.asked
  store.now += HOUR
  await passes(SECOND)
  t.equal(one.asked.length, length + 1)
  t.match(await unknownIn(store), {
    reconciliation: { notFound: 1, answer: 'not found, too soon after the one before' },
  })
  await passes(20 * SECOND)
  t.match(await stored(store), { state: 'failed_retryable' })
})

void t.test('V08 a replica that has just started has seen no time pass', async (t) => {
  const store = new Store()
  const policy = asking({ after: MINUTE })
  await broken(replica(t, { store }), policy)
  store.now += HOUR
  const { one, passes } = bystander(t, store, policy)
  notFound(one, 20)
  await passes(55 * SECOND)
  t.match(await unknownIn(store), { reconciliation: { notFound: 0 } })
  await passes(30 * SECOND)
  t.match(await stored(store), { state: 'failed_retryable' })
})

void t.test('V08 a step back only delays the resolution', async (t) => {
  const store = new Store()
  const policy = asking({ after: MINUTE })
  await broken(replica(t, { store }), policy)
  const { one, passes } = bystander(t, store, policy)
  notFound(one, 20)
  await passes(30 * SECOND)
  store.now -= 90 * SECOND
  await passes(90 * SECOND)
  t.match(await unknownIn(store), { reconciliation: { notFound: 0 } })
  await passes(90 * SECOND)
  t.match(await stored(store), { state: 'failed_retryable' })
})

void t.test(
  'O02 without clock steps a record is resolved as soon as `after` and `every` allow',
  async (t) => {
    const store = new Store()
    const policy = asking({ after: AFTER })
    await broken(replica(t, { store }), policy)
    const { one, passes } = bystander(t, store, policy)
    notFound(one, 20)
    await passes(AFTER + EVERY + SECOND)
    t.match(await stored(store), { state: 'failed_retryable' })
  },
)
