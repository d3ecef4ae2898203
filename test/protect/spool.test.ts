import { readdirSync } from 'node:fs'
import t, { type Test } from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import {
  BROKEN,
  type Fault,
  HOUR,
  idle,
  LEASE,
  NOT_SENT,
  type Replica,
  refused,
  replica,
  route,
  type Seen,
  Store,
  TTL,
  until,
} from './harness.ts'
import { disk, folder, MiB, remains, type Spooling, spooling } from './processes.ts'

const BYPASS = route({ onStoreUnavailable: 'bypass' })

interface Killed {
  readonly store: Store
  /** What the client of the process that was killed saw. */
  readonly first: Seen
  readonly id: string
  readonly directory: string
  /** Starts a process on what the killed one left. */
  next(on?: Store): Promise<Spooling>
}

/** A process that claims, executes, finds the store failing when the outcome is there, and is killed. */
async function killed(
  t: Test,
  reply: (one: Replica) => Forwarded = (one) => one.responded(),
  {
    fault = 'down',
    policy = route(),
    store = new Store(),
  }: { fault?: Fault; policy?: RoutePolicy; store?: Store } = {},
): Promise<Killed> {
  const { replica: one, directory } = await spooling(t, store)
  one.downAtEnd(() => reply(one), fault)
  const first = await one.get({ route: policy })
  const left = remains(t, directory)
  one.close()
  return { store, first, id: one.id, directory: left, next: (on = store) => spooling(t, on, left) }
}

void t.test('R04 after a kill with the store down, the next process answers from the spool', async (t) => {
  for (const fault of ['down', 'dropped', 'lost', 'late', 'full'] as const) {
    const { store, first, next } = await killed(t, undefined, { fault })
    t.equal(first.status, 201)
    const { bytes } = first
    const { replica: b, outbox, directory } = await next()
    store.fault = () => 'down'
    t.match(await b.get(), { bytes, replayed: true }, fault)
    await refused(t, b, { body: 'other' }, 'idempotency_key_reused')
    t.equal(b.ports.settler.size, 1)
    t.equal(b.bytes.held, '{"id":"p1"}'.length, 'counted like any held body')
    store.fault = () => null
    await store.arrive()
    t.ok(await b.ports.settler.flush())
    t.equal((await store.read(b.id))?.state, 'completed')
    t.equal(b.bytes.held, 0)
    await outbox.close()
    t.same(readdirSync(directory), ['spool.lock'], 'nothing is left over')
    t.match(await replica(t, { store }).get(), { bytes, replayed: true }, 'any replica replays it')
    t.equal(b.n, 0)
  }
})

void t.test('R05 a spooled outcome is written with the token, fence and age of its claim', async (t) => {
  const { store, next } = await killed(t)
  store.now += 3 * LEASE
  const { replica: b } = await next()
  const [id] = store.ids
  if (id === undefined) throw new Error('no record')
  const { state, fence, token, createdAt, attempts } = (await store.read(id)) ?? {}
  t.equal(state, 'unknown', 'the lease has lapsed')
  t.ok(await b.storeIsBack())
  t.match(await store.read(id), { state: 'completed', fence, token, createdAt, attempts })
  t.same(b.said('completed'), ['stored'])
})

void t.test('R04 an outcome whose record the store lost is written again from the spool', async (t) => {
  const { first, next } = await killed(t)
  const { replica: b } = await next(new Store())
  t.ok(await b.ports.settler.flush())
  t.same(b.said('completed'), ['recovered'])
  t.match(await b.get(), { bytes: first.bytes, replayed: true })
  t.equal(b.n, 0)
})

void t.test('a spooled outcome is stale if a newer attempt exists', async (t) => {
  const retrying = { route: route({ onLeaseExpired: 'retry' }) }
  const { store, next, directory } = await killed(t, undefined, { policy: retrying.route })
  store.fault = () => null
  store.now += 2 * LEASE
  const other = replica(t, { store })
  other.script.push(() => other.responded(201, 'second'))
  const second = await other.get(retrying)
  t.notOk(second.replayed)
  const { replica: b, outbox } = await next()
  t.ok(await b.ports.settler.flush())
  t.same(b.said('completed'), ['stale'])
  t.match(await b.get(retrying), { bytes: second.bytes, replayed: true })
  await outbox.close()
  t.same(readdirSync(directory), ['spool.lock'])
})

void t.test('§7 the next process frees the key of what was not executed', async (t) => {
  const { first, next, store } = await killed(t, () => NOT_SENT)
  t.equal(first.code, 'upstream_unreachable')
  const { replica: b } = await next()
  // The guard learns of the record.
  t.equal((await b.get()).code, 'idempotency_store_unavailable')
  t.equal(b.n, 0)
  store.fault = () => null
  t.match(await b.get(), { status: 201, replayed: false })
  t.equal(b.n, 1)
})

void t.test('§7 an uncertain outcome is unknown to the next process too', async (t) => {
  const { first, next, store } = await killed(t, () => BROKEN)
  t.equal(first.code, 'upstream_failed')
  const { replica: b } = await next()
  await refused(t, b, {}, 'idempotency_outcome_unknown')
  t.ok(await b.storeIsBack())
  t.match(await store.read(b.id), { state: 'unknown', leaseExpired: false, lastError: 'reset' })
})

/** A process that is refused a claim, which it may have made, and stops. */
async function stopped(t: Test, store: Store): Promise<{ readonly a: Replica; readonly directory: string }> {
  const { replica: a, outbox, directory } = await spooling(t, store)
  t.equal((await a.get()).code, 'idempotency_store_unavailable')
  await until(() => readdirSync(directory).length > 1)
  await a.ports.settler.close()
  t.match(a.troubles().at(-1), /could not be stored; it is kept on disk for the next start/)
  await outbox.close()
  store.fault = () => null
  return { a, directory }
}

void t.test('§3 a spooled withdrawal frees the key in the next process', async (t) => {
  const store = new Store()
  store.fails('put', 'lost', 'dropped')
  store.fault = ({ op }) => (op === 'put' ? null : 'down')
  const { a, directory } = await stopped(t, store)
  t.equal((await store.read(a.id))?.state, 'in_progress')
  const b = await spooling(t, store, directory)
  t.equal(b.left.length, 1)
  t.equal(b.replica.ports.settler.held(a.id), null, 'it says nothing about the record')
  t.match(await b.replica.get(), { status: 201, replayed: false })
  t.equal(a.n + b.replica.n, 1)
})

void t.test('§3 the next process withdraws a late takeover, which is refused when it arrives', async (t) => {
  const store = new Store()
  const first = replica(t, { store })
  first.script.push(NOT_SENT)
  await first.get()
  store.fails('swap', 'late')
  store.fault = () => (store.next.length === 0 ? 'down' : null)
  const { a, directory } = await stopped(t, store)
  const before = await store.read(a.id)
  const { replica: b } = await spooling(t, store, directory)
  t.ok(await b.ports.settler.flush())
  await store.arrive()
  const { state, token } = before ?? {}
  t.match(await store.read(a.id), { state, token }, 'the claim that arrives now is refused')
  t.equal(state, 'failed_retryable')
})

void t.test('R02 bypass: the next process settles what was executed without a claim', async (t) => {
  for (const earlier of ['nothing', 'not executed'] as const) {
    const store = new Store()
    const { replica: a, directory } = await spooling(t, store)
    store.fault = () => 'down'
    if (earlier === 'not executed') {
      a.script.push(NOT_SENT)
      t.equal((await a.get({ route: BYPASS })).code, 'upstream_unreachable')
    }
    const { bytes, status } = await a.get({ route: BYPASS })
    t.equal(status, 201)
    a.close()
    const { replica: b, left } = await spooling(t, store, remains(t, directory))
    t.equal(left.length, earlier === 'nothing' ? 1 : 2)
    t.match(await b.get({ route: BYPASS }), { bytes, replayed: true })
    t.ok(await b.storeIsBack(), 'in order')
    t.match(await replica(t, { store }).get(), { bytes, replayed: true })
    t.equal(b.n, 0)
  }
})

void t.test('the next process settles a bypass over a lapsed claim as onLeaseExpired says', async (t) => {
  for (const onLeaseExpired of ['unknown', 'retry'] as const) {
    const policy = { route: route({ onStoreUnavailable: 'bypass', onLeaseExpired }) }
    const store = new Store()
    // A claim whose owner fell silent.
    const silent = await replica(t, { store }).working(policy)
    store.now += 2 * LEASE
    const { replica: a, directory } = await spooling(t, store)
    store.fault = () => 'down'
    const { bytes, status } = await a.get(policy)
    t.equal(status, 201)
    a.close()
    const { replica: b } = await spooling(t, store, remains(t, directory))
    t.ok(await b.storeIsBack())
    t.same(b.said('completed'), [onLeaseExpired === 'retry' ? 'stored' : 'stale'])
    if (onLeaseExpired === 'retry') t.match(await b.get(policy), { bytes, replayed: true })
    else t.equal((await b.get(policy)).code, 'idempotency_outcome_unknown')
    t.equal(b.n, 0)
    await silent.end()
  }
})

void t.test('the spool holds only what the store has not taken', async (t) => {
  const store = new Store()
  const { replica: a, directory } = await spooling(t, store)
  t.equal((await a.get()).status, 201)
  t.same(readdirSync(directory), ['spool.lock'])
  a.downAtEnd()
  await a.get({ key: 'another' })
  t.equal(readdirSync(directory).length, 2)
  t.ok(await a.storeIsBack())
  await until(() => readdirSync(directory).length === 1)
})

void t.test('a spooled outcome older than its record can be is dropped with a message', async (t) => {
  const { next, directory } = await killed(t, undefined, { policy: route({ unresolvedTtl: 1 }) })
  const { now } = Date
  t.intercept(Date, 'now', { value: () => now() + HOUR })
  const { left, said, outbox } = await next()
  t.same(left, [])
  t.same(said, ['outcomes in the spool have outlived their records; they are dropped'])
  await outbox.close()
  t.same(readdirSync(directory), ['spool.lock'])
})

void t.test('a clock set back does not keep a spooled outcome longer', async (t) => {
  const { next } = await killed(t)
  const { now } = Date
  t.intercept(Date, 'now', { value: () => now() - 30 * TTL })
  const { left, said } = await next()
  t.same(left, [30 * TTL])
  t.same(said, [])
})

void t.test('with a full spool an outcome is held in memory, reported, lost with the process', async (t) => {
  const { replica: a } = await spooling(t, new Store(), undefined, { maxBytes: 100 })
  a.downAtEnd()
  const { bytes, status } = await a.get()
  t.equal(status, 201)
  t.ok(a.troubles().includes('an outcome could not be spooled; it is held in memory only'))
  t.match(await a.get(), { bytes, replayed: true })
  await a.ports.settler.close()
  t.equal(a.troubles().at(-1), 'an outcome could not be stored and is lost')
})

void t.test('a spool has room for everything that memory may hold', async (t) => {
  const store = new Store()
  const { replica: a, directory } = await spooling(t, store)
  store.fault = () => 'down'
  for (let i = 0; i < 16; i++) {
    a.script.push(() => a.responded(201, 'x'.repeat(MiB / 16)))
    await a.get({ route: BYPASS, key: `k${i}` })
  }
  t.notOk(a.troubles().includes('an outcome could not be spooled; it is held in memory only'))
  const b = await spooling(t, store, remains(t, directory))
  t.equal(b.left.length, 16)
  t.equal(b.replica.bytes.held, MiB)
})

void t.test('a retry gets no outcome before it is on disk', async (t) => {
  // Found by the simulation (seed 7055262): the process died between the retry's answer and the disk.
  const { replica: a } = await spooling(t, new Store(), folder(t))
  const hang = Promise.withResolvers<void>()
  const reached = Promise.withResolvers<void>()
  disk.on = () => {
    reached.resolve()
    return hang.promise
  }
  t.teardown(() => {
    disk.on = null
  })
  // Only the disk ends the wait: not its 500 ms.
  t.intercept(globalThis, 'setTimeout', { value: () => ({ unref: () => {} }) })
  const told: Seen[] = []
  a.downAtEnd()
  const first = a.get()
  await reached.promise
  const retry = a.get().then((answer) => void told.push(answer))
  await idle()
  t.same(told, [])
  hang.resolve()
  const { bytes } = await first
  await retry
  t.match(told, [{ bytes, replayed: true }])
  t.ok(await a.storeIsBack())
})
