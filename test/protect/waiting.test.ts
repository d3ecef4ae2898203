import { setImmediate as turn } from 'node:timers/promises'
import t, { type Test } from 'tap'
import { firstOf } from '../../src/core/headers.ts'
import { type IdempotencyRecord, type RecordId } from '../../src/core/record.ts'
import { heldRecord, type OutcomeDraft } from '../../src/core/settle.ts'
import { WaitingRoom } from '../../src/protect/waiting-room.ts'
import { orThrow, type ReadReply } from '../../src/store/records.ts'
import { CorruptRecord, InGrace, StoreUnavailable } from '../../src/store/register.ts'
import { draft, newToken } from '../store/fixtures.ts'
import {
  BROKEN,
  Gate,
  hurried,
  idle,
  LEASE,
  MINUTE,
  NOT_SENT,
  never,
  overdue,
  pair,
  type Replica,
  replica,
  route,
  SECOND,
  type Seen,
  type Sent,
  Store,
  type StoreCall,
} from './harness.ts'

const WAIT = route({ inFlight: { mode: 'wait', wait: MINUTE, status: 409 } })
const waiting = { route: WAIT }

async function until(holds: () => boolean): Promise<void> {
  while (!holds()) await turn()
}

/** A duplicate that has taken its seat. */
async function waits(a: Replica, over: Sent = {}) {
  const { size } = a.ports.waiters
  const held = a.get({ ...waiting, ...over })
  await until(() => a.ports.waiters.size === size + 1)
  return { held }
}

/** The store is looked at when there is news, and not every second at least. */
function onlyWhenTold(t: Test): void {
  overdue(t, 100, SECOND)
}

/** What the store is asked from now on. */
function listening(store: Store): string[] {
  const asked: string[] = []
  store.fault = ({ op }) => {
    asked.push(op)
    return null
  }
  return asked
}

void t.test('I02 waiting duplicates get the same answer without asking the store again', async (t) => {
  onlyWhenTold(t)
  const a = replica(t)
  const run = await a.working(waiting)
  const held = Array.from({ length: 50 }, () => a.get(waiting))
  await until(() => a.ports.waiters.size === 50)
  t.equal(a.watched, 50)
  const before = a.store.calls
  const first = await run.end()
  for (const duplicate of await Promise.all(held)) {
    t.equal(duplicate.bytes, first.bytes)
    t.equal(duplicate.replayed, true)
  }
  t.equal(a.n, 1)
  t.equal(a.store.calls, before + 1, 'only the completion')
  const waited = a.traces.filter((trace) => trace.outcome === 'waited')
  t.equal(waited.length, 50)
  t.match(waited[0], { before: 'completed', after: 'completed' })
  t.equal(a.said('prevented').length, 50)
  t.same(a.said('retryAge'), [], 'they came before it was done')
  t.equal((await a.get(waiting)).bytes, first.bytes)
  t.same(
    a.events.filter(([name]) => name === 'retryAge'),
    [['retryAge', 'payments', 0]],
  )
  t.equal(a.trace.outcome, 'replayed', 'there is nothing to wait for')
  t.equal(a.ports.waiters.size, 0)
  t.equal(a.watched, 0)
  t.equal(a.bytes.held, 0)
  t.equal(a.ports.budget.held, 0)
})

void t.test('P16 I02 a waiting duplicate gets the same expiry as the first request', async (t) => {
  const policy = { ...WAIT, statusHeader: true }
  const a = replica(t)
  const answer = await a.working({ route: policy })
  const { held } = await waits(a, { route: policy })
  answer.open()
  const expires = (proxyHeaders: readonly string[]) => firstOf(proxyHeaders, 'idempotency-expires') ?? ''
  const first = await answer.answer
  const second = await held
  t.match(expires(first.proxyHeaders), /^\d{4}-/)
  t.equal(expires(second.proxyHeaders), expires(first.proxyHeaders))
  t.match(second.proxyHeaders, ['Idempotent-Replayed', 'true', 'Idempotency-Status', 'replayed'])
})

void t.test('I03 a duplicate that waits too long is in progress, and the original unaffected', async (t) => {
  const a = replica(t)
  const run = await a.working(waiting)
  const brief = route({ inFlight: { mode: 'wait', wait: 20, status: 425 } })
  const late = await a.get({ route: brief })
  t.match(late, { status: 425, code: 'idempotency_key_in_progress', retryAfter: LEASE / SECOND })
  t.equal(a.trace.outcome, 'in_progress')
  t.match(await run.end(), { status: 201 })
  t.equal(a.n, 1)
})

void t.test('I04 a duplicate on another replica is woken by the completion', async (t) => {
  const { a, b, store } = pair(t)
  const run = await a.working(waiting)
  const { held } = await waits(b)
  // It looks at once; after that only the completion makes it look.
  await until(() => store.calls >= 3)
  run.open()
  t.equal((await held).bytes, (await run.answer).bytes)
  t.equal(b.trace.outcome, 'waited')
  t.equal(a.n + b.n, 1)
})

void t.test('I05 a client that leaves frees its seat; the original goes on', async (t) => {
  const a = replica(t)
  const run = await a.working(waiting)
  let left = false
  const leaving = Promise.withResolvers<void>()
  const held = a.get({ ...waiting, gone: () => left, leaving: leaving.promise })
  await until(() => a.ports.waiters.size === 1)
  left = true
  leaving.resolve()
  t.match(await held, { status: null, code: null })
  t.equal(a.ports.waiters.size, 0)
  t.match(await run.end(), { status: 201 })
  t.equal(a.n, 1)
})

void t.test('I05 a duplicate beyond limits.waiters is answered as in progress at once', async (t) => {
  const a = replica(t, { maxWaiters: 2 })
  const run = await a.working(waiting)
  const held = [a.get(waiting), a.get(waiting)]
  await until(() => a.ports.waiters.size === 2)
  t.match(await a.get(waiting), { status: 409, code: 'idempotency_key_in_progress' })
  await run.end()
  for (const one of held) t.equal((await one).replayed, true)
})

void t.test('§6 misuse does not wait', async (t) => {
  const a = replica(t)
  const run = await a.working(waiting)
  t.match(await a.get({ ...waiting, body: '{"amount":2}' }), { status: 422 })
  await run.end()
})

void t.test('§6 if the first request did nothing, one waiting duplicate takes over for all', async (t) => {
  for (const where of ['the same replica', 'another replica'] as const)
    await t.test(where, async (t) => {
      onlyWhenTold(t)
      const store = new Store()
      const a = replica(t, { store })
      const b = where === 'the same replica' ? a : replica(t, { store })
      const run = await a.working(waiting, () => NOT_SENT)
      const second = new Gate()
      b.script.push(second.before(() => b.responded(201, '{"second":true}')))
      const held = Array.from({ length: 10 }, () => b.get(waiting))
      await until(() => b.ports.waiters.size === 10)
      const asked = listening(store)
      t.match(await run.end(), { code: 'upstream_unreachable' })
      await second.reached
      t.equal(b.ports.waiters.size, 9, 'one executes')
      await idle()
      t.equal(asked.filter((op) => op === 'put').length, 1, 'and no other tries to')
      if (b === a) t.notOk(asked.includes('get'), 'nobody has to look')
      second.open()
      const answers = await Promise.all(held)
      t.equal(answers.filter(({ replayed }) => replayed).length, 9)
      const ended = (as: string) => b.traces.slice(-10).filter(({ outcome }) => outcome === as).length
      t.same([ended('executed'), ended('waited')], [1, 9])
      t.equal(new Set(answers.map(({ bytes }) => bytes)).size, 1)
      t.equal(where === 'the same replica' ? a.n : a.n + b.n, 2)
      t.equal(a.bytes.held + b.bytes.held, 0)
    })
})

void t.test('§6 if the takeover did nothing either, the other duplicates are in progress', async (t) => {
  const a = replica(t)
  const run = await a.working(waiting, () => NOT_SENT)
  const second = new Gate()
  a.script.push(second.before(() => ({ proof: 'not_sent', reason: 'refused again' })))
  const held = Array.from({ length: 5 }, () => a.get(waiting))
  await until(() => a.ports.waiters.size === 5)
  await run.end()
  await second.reached
  second.open()
  const codes = (await Promise.all(held)).map(({ code }) => code)
  t.equal(codes.filter((code) => code === 'idempotency_key_in_progress').length, 4)
  t.equal(codes.filter((code) => code === 'upstream_unreachable').length, 1)
  t.equal(a.n, 2)
})

void t.test('§6 the turn of a duplicate that cannot claim passes to the next', async (t) => {
  const a = replica(t)
  const run = await a.working(waiting, () => NOT_SENT)
  const held = [a.get(waiting), a.get(waiting)]
  await until(() => a.ports.waiters.size === 2)
  // Fails the claim of the first one that tries; nothing is applied.
  a.store.fails('put', 'down')
  await run.end()
  const answers = await Promise.all(held)
  t.strictSame(
    new Set(answers.map(({ code, status }) => code ?? status)),
    new Set([201, 'idempotency_store_unavailable']),
  )
  t.equal(a.n, 2)
})

void t.test('§6 a client that left before its turn does not take over', async (t) => {
  const a = replica(t)
  const run = await a.working(waiting, () => NOT_SENT)
  let left = false
  const gone = a.get({ ...waiting, gone: () => left })
  await until(() => a.ports.waiters.size === 1)
  const there = a.get(waiting)
  await until(() => a.ports.waiters.size === 2)
  left = true
  await run.end()
  t.match(await gone, { status: null })
  t.match(await there, { status: 201, replayed: false })
  t.equal(a.n, 2)
})

void t.test('§2 §6 waiting duplicates are told of an unknown outcome, and execute nothing', async (t) => {
  const a = replica(t)
  const run = await a.working(waiting, () => BROKEN)
  const held = [a.get(waiting), a.get(waiting)]
  await until(() => a.ports.waiters.size === 2)
  t.match(await run.end(), { code: 'upstream_failed' })
  for (const one of held)
    t.match(await one, { status: 409, code: 'idempotency_outcome_unknown', retryAfter: LEASE / SECOND })
  t.equal(a.n, 1)
})

void t.test('R04 a waiting duplicate gets the held answer if the store is down then', async (t) => {
  const a = replica(t)
  const run = await a.working(waiting)
  const { held } = await waits(a)
  a.store.fault = () => 'down'
  run.open()
  t.equal((await held).bytes, (await run.answer).bytes)
  a.store.fault = () => null
  t.equal(await a.ports.settler.flush(), true)
})

void t.test('§2 a waiting duplicate gets the newer answer, not the one of a stale owner', async (t) => {
  const { a, b, store } = pair(t)
  const retry = route({ ...WAIT, onLeaseExpired: 'retry' })
  const first = await a.working({ route: retry }, () => a.responded(201, 'stale'))
  const { held } = await waits(a, { route: retry })
  store.now += LEASE
  b.script.push(b.responded(201, 'newer'))
  t.match(await b.get({ route: retry }), { status: 201 })
  t.match((await first.end()).bytes, /stale/, 'its own client gets its answer')
  t.match((await held).bytes, /newer/)
  t.equal(a.said('completed').at(-1), 'stale')
})

void t.test('L08 waiting duplicates notice a lapsed lease: unknown, or one takes over', async (t) => {
  for (const onLeaseExpired of ['unknown', 'retry'] as const) {
    const store = new Store()
    const [dead, b] = [replica(t, { store }), replica(t, { store })]
    const policy = route({ ...WAIT, onLeaseExpired })
    const lost = await dead.working({ route: policy })
    const held = Array.from({ length: 20 }, () => b.get({ route: policy }))
    await until(() => b.ports.waiters.size === 20)
    store.now += LEASE
    const answers = await Promise.all(held)
    if (onLeaseExpired === 'unknown')
      for (const one of answers) t.match(one, { code: 'idempotency_outcome_unknown' })
    else t.equal(answers.filter(({ replayed }) => !replayed).length, 1)
    t.equal(b.n, onLeaseExpired === 'unknown' ? 0 : 1)
    await lost.end()
  }
})

void t.test('§2 waiting duplicates do not claim a record that vanished: the run answers', async (t) => {
  const { a, b, store } = pair(t)
  const run = await a.working(waiting)
  const held = [a.get(waiting), b.get(waiting)]
  await until(() => a.ports.waiters.size + b.ports.waiters.size === 2)
  const { record } = orThrow(await b.records.get(a.id))
  await store.inner.remove(a.id, record?.version ?? 0)
  const calls = store.calls
  a.ports.waiters.tell(a.id, null)
  await until(() => store.calls >= calls + 2)
  const first = await run.end()
  for (const one of held) t.equal((await one).bytes, first.bytes)
  t.equal(a.n + b.n, 1)
  t.equal(a.said('completed').at(-1), 'recovered')
})

void t.test('§2 a waiting duplicate gets 503 if the record can no longer be read', async (t) => {
  const store = new Store()
  const a = replica(t, { store })
  const run = await a.working(waiting)
  const { held } = await waits(a)
  store.fails('get', new CorruptRecord('x'))
  store.fails('put', new CorruptRecord('x'))
  a.ports.waiters.tell(a.id, null)
  t.match(await held, { status: 503, code: 'idempotency_store_unavailable' })
  await run.end()
})

void t.test('§11 waiting duplicates are answered as in progress when the proxy stops', async (t) => {
  const { a, b } = pair(t)
  const run = await a.working(waiting)
  const all = [await waits(a), await waits(b)]
  for (const { ports } of [a, b]) ports.waiters.close()
  for (const { held } of all) t.match(await held, { code: 'idempotency_key_in_progress' })
  t.match(await b.get(waiting), { code: 'idempotency_key_in_progress' }, 'no new duplicate gets a seat')
  await run.end()
})

void t.test('§6 a waiting duplicate does not claim a record whose retention has just ended', async (t) => {
  const a = replica(t)
  const brief = route({ ...WAIT, inFlight: { mode: 'wait', wait: 50, status: 409 } })
  const run = await a.working(waiting)
  const { held } = await waits(a, { route: brief })
  const { record } = orThrow(await a.records.get(a.id))
  const seat = a.ports.waiters
  if (record !== null) seat.tell(a.id, { ...record, dropAt: 0 })
  t.match(await held, { code: 'idempotency_key_in_progress' })
  t.equal(a.n, 1)
  await run.end()
})

void t.test('I03 Retry-After after a wait is what remains of the lease then', async (t) => {
  const isOver = overdue(t)
  const a = replica(t)
  const run = await a.working(waiting)
  const { held } = await waits(a)
  a.store.now += LEASE / 3
  const asked = listening(a.store)
  a.ports.waiters.tell(a.id, null)
  await idle()
  isOver()
  t.match(await held, { code: 'idempotency_key_in_progress', retryAfter: ((2 / 3) * LEASE) / SECOND })
  t.notOk(asked.includes('put'), 'it claims nothing')
  await run.end()
})

for (const where of ['this replica', 'another replica'] as const)
  for (const end of ['in time', 'too late', 'before the claim'] as const)
    void t.test(`§6 a waiting duplicate meets a request that took over on ${where} (${end})`, async (t) => {
      const store = new Store()
      let watches = 0
      const { watch } = store.inner
      store.inner.watch = (id, changed) => {
        watches++
        return watch(id, changed)
      }
      const a = replica(t, { store })
      const b = where === 'this replica' ? a : replica(t, { store })
      const run = await a.working(waiting, () => NOT_SENT)
      store.now += LEASE / 3
      const { held } = await waits(a)
      const second = new Gate()
      b.script.push(second.before(() => b.responded()))
      // Between the outcome and the claim of the duplicate that waits here, b claims.
      const taken: Promise<unknown>[] = []
      store.gate = async ({ op, by }) => {
        if (op === 'get' && end === 'too late') await never
        if (op !== 'put' || by !== a || taken.length > 0) return
        taken.push(b.get())
        await second.reached
        if (end !== 'before the claim') return
        second.open()
        await Promise.all(taken)
      }
      await run.end()
      await second.reached
      const asked = listening(store)
      if (end !== 'before the claim') {
        await until(() => asked.includes('put'))
        await idle()
        if (end === 'in time') second.open()
        else a.ports.waiters.close()
      }
      const got = await held
      if (end === 'too late')
        t.match(got, { code: 'idempotency_key_in_progress', retryAfter: LEASE / SECOND }, 'of its lease')
      else t.match(got, { status: 201, replayed: true })
      const isAwaited = where === 'another replica' && end !== 'before the claim'
      t.equal(watches, isAwaited ? 1 : 0, 'it is woken')
      second.open()
      await Promise.all(taken)
      t.equal(b === a ? a.n : a.n + b.n, 2)
    })

void t.test('I05 a client that has already left takes no seat', async (t) => {
  const a = replica(t)
  const run = await a.working(waiting)
  const answers: Seen[] = []
  void a.get({ ...waiting, gone: () => true }).then((one) => answers.push(one))
  await idle()
  t.match(answers, [{ status: null }], 'at once')
  t.equal(a.ports.waiters.size, 0)
  await run.end()
})

void t.test('§11 a draining replica keeps only the duplicates that wait for its own run', async (t) => {
  const { a, b } = pair(t)
  const run = await a.working(waiting)
  const [here, there] = [a.get(waiting), b.get(waiting)]
  await until(() => a.ports.waiters.size + b.ports.waiters.size === 2)
  a.ports.waiters.drain()
  b.ports.waiters.drain()
  t.match(await there, { code: 'idempotency_key_in_progress' })
  t.match(await b.get(waiting), { code: 'idempotency_key_in_progress' }, 'no new duplicate gets a seat')
  run.open()
  t.equal((await here).bytes, (await run.answer).bytes)
})

/** A store in its grace: it grants no claims until told to. */
class Held extends Store {
  isHeld = true
  left = 20
  readonly #since = this.now
  override fault = ({ op }: StoreCall) =>
    this.isHeld && (op === 'put' || op === 'swap') ? new InGrace(this.now, this.#since, this.left) : null
}

/** What each put that reaches the store says of its key: `fresh` is granted at once. */
function entriesOf({ inner }: Store): unknown[] {
  const { put } = inner
  const entries: unknown[] = []
  inner.put = (id, bytes, spans, entry) => {
    entries.push(entry)
    return put(id, bytes, spans, entry)
  }
  return entries
}

/** A key that was generated before `now`, but after a failover of 30 s ago. */
function bornAfterFailover({ now }: Store): string {
  const hex = (now - 1).toString(16).padStart(12, '0')
  return `${hex.slice(0, 8)}-${hex.slice(8)}-7abc-8def-0123456789ab`
}

void t.test('W01 W03 a request with a new key waits out the grace and then executes', async (t) => {
  const store = new Held()
  const entries = entriesOf(store)
  const a = replica(t, { store })
  const answer = a.get()
  await until(() => a.ports.waiters.size === 1)
  t.equal(a.n, 0)
  // Each time it asks, the grace may have been extended.
  await until(() => store.calls >= 3)
  store.isHeld = false
  t.match(await answer, { status: 201, replayed: false })
  t.equal(a.n, 1)
  t.equal(a.ports.waiters.size, 0)
  t.same(a.said('completed'), ['stored'])
  t.same(entries, ['claim'])
})

void t.test('W03 in the grace, requests beyond limits.waiters or on a draining proxy get 503', async (t) => {
  const store = new Held()
  store.left = 60_000
  const a = replica(t, { store, maxWaiters: 1 })
  const first = a.get({ key: 'first-0123456789abcdef' })
  await until(() => a.ports.waiters.size === 1)
  t.match(await a.get(), {
    status: 503,
    code: 'idempotency_store_unavailable',
    detail: /^the store may just have lost claims/,
  })
  t.equal(a.trace.outcome, 'store_unavailable')
  t.match(a.trace.cause, /may have lost claims/)
  a.ports.waiters.drain()
  t.match(await first, { status: 503 }, 'a draining proxy does not wait')
  t.match(await a.get({ key: 'third-0123456789abcdef' }), { status: 503 })
  t.equal(a.n, 0)
})

void t.test('W03 a client that leaves in the grace frees its place and executes nothing', async (t) => {
  const store = new Held()
  store.left = 60_000
  const a = replica(t, { store })
  let gone = false
  const { promise: leaving, resolve: leave } = Promise.withResolvers<void>()
  const answer = a.get({ gone: () => gone, leaving })
  await until(() => a.ports.waiters.size === 1)
  gone = true
  leave()
  t.equal((await answer).status, null)
  t.equal(a.ports.waiters.size, 0)
  const { calls } = store
  t.equal((await a.get({ gone: () => true })).status, null, 'a client that has already left takes no place')
  t.equal(store.calls, calls + 1, 'and does not ask again')
  t.equal(a.n, 0)
})

void t.test('W01 a bypass route waits in the grace instead of executing', async (t) => {
  const store = new Held()
  store.left = 60_000
  const a = replica(t, { store, maxWaiters: 1 })
  const policy = route({ onStoreUnavailable: 'bypass' })
  const first = a.get({ route: policy })
  await until(() => a.ports.waiters.size === 1)
  t.match(await a.get({ route: policy, key: 'other-0123456789abcdef' }), { status: 503 })
  t.equal(a.n, 0)
  a.ports.waiters.drain()
  t.match(await first, { status: 503 })
})

void t.test('W03 a key generated after the failover claims at once', async (t) => {
  const store = new Held()
  store.now += 60_000
  const entries = entriesOf(store)
  let asked = 0
  store.fault = ({ op }) =>
    op === 'put' && ++asked === 1 ? new InGrace(store.now, store.now - 30_000, 60_000) : null
  const a = replica(t, { store })
  t.match(await a.get({ key: bornAfterFailover(store) }), { status: 201 })
  t.same(entries, ['fresh'])
  t.equal(a.n, 1)
})

void t.test('W03 what was first sent after the failover claims at once, but no derived key', async (t) => {
  const store = new Held()
  store.left = 60_000
  const a = replica(t, { store, maxWaiters: 1 })
  const sent = (at: number) => ['Repeatability-First-Sent', new Date(at).toUTCString()]
  store.now += 60_000
  store.fault = ({ op, n }) =>
    op === 'put' && n % 4 === 2 ? new InGrace(store.now, store.now - 30_000, 60_000) : null
  t.match(await a.get({ headers: sent(store.now - 2000) }), { status: 201 })
  store.fault = ({ op }) => (op === 'put' ? new InGrace(store.now, store.now - 30_000, 60_000) : null)
  const { key } = route()
  const derive = { json: ['/amount'], form: [], headers: [], path: false, bucket: null }
  const policy = route({ key: { ...key, derive } })
  const derived = a.get({ key: null, route: policy, headers: sent(store.now - 2000) })
  await until(() => a.ports.waiters.size === 1)
  a.ports.waiters.drain()
  await derived
  t.equal(a.n, 1)
})

void t.test('W02 a takeover waits too, since the state that allows it may be out of date', async (t) => {
  for (const isBornSince of [false, true]) {
    const store = new Held()
    store.isHeld = false
    const key = isBornSince ? bornAfterFailover(store) : 'key-0123456789abcdef'
    const a = replica(t, { store })
    a.script.push(NOT_SENT)
    await a.get({ key })
    let held = true
    store.fault = ({ op }) => (op === 'swap' && held ? new InGrace(store.now, store.now - 30_000, 20) : null)
    let isOver = false
    const answer = a.get({ key }).finally(() => (isOver = true))
    await until(() => a.ports.waiters.size === 1 || isOver)
    t.equal(a.n, 1)
    held = false
    t.match(await answer, { status: 201 })
    t.equal(a.n, 2)
  }
})

void t.test('W01 a claim that the failover dropped is tried again under its token', async (t) => {
  const store = new Held()
  const a = replica(t, { store })
  const tokens = new Set<string>()
  a.onToken = (token) => void tokens.add(token.toString('hex'))
  store.fails('put', 'dropped')
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded()))
  const answer = a.get()
  await until(() => a.ports.waiters.size === 1)
  const waitsAt = performance.now()
  store.isHeld = false
  await gate.reached
  t.ok(
    (a.ports.running.get(a.id)?.requestedAt ?? waitsAt) < waitsAt,
    'its lease may have begun with the first try',
  )
  gate.open()
  t.match(await answer, { status: 201 })
  t.equal(tokens.size, 1)
  t.same([...new Set(store.wrote)], [...tokens])
})

void t.test('W01 the lease begins with the claim that succeeds, not before the grace', async (t) => {
  const store = new Held()
  const a = replica(t, { store })
  // The clock of this process moves only with each try.
  let tries = 0
  t.intercept(performance, 'now', { value: () => 1000 * (1 + tries) })
  store.gate = async ({ op }) => void (op === 'put' && tries++)
  const run = a.working()
  await until(() => tries >= 3)
  store.isHeld = false
  const { end } = await run
  t.equal(a.ports.running.get(a.id)?.requestedAt, 1000 * tries)
  await end()
})

/** What each `put` of a replica with such a wait finds is another grace. Returns how often the store was asked. */
async function heldThroughout(t: Test, over: Sent, holdAtMost = 60) {
  const store = new Held()
  const a: Replica = replica(t, { store, holdAtMost })
  const since = performance.now()
  const answers = await Promise.all([a.get(over), a.get(over)])
  const took = performance.now() - since
  for (const answer of answers) t.match(answer, { status: 503, code: 'idempotency_store_unavailable' })
  t.equal(a.n, 0)
  t.equal(a.ports.waiters.size, 0)
  t.ok(took >= holdAtMost, 'the request is held, not refused')
  return store.calls
}

t.test('Y21 graces that begin again and again hold a request for twice store.grace, then 503', async (t) => {
  // At 0, 20, 40 and 60 ms, each of the two requests; timers are early or late by a millisecond.
  t.ok((await heldThroughout(t, {})) < 2 * 8)
})

void t.test('Y21 requests that claim one after the other do not wait one after the other', async (t) => {
  const { limits } = route()
  const counted = route({ limits: { ...limits, newKeys: { count: 10, per: MINUTE } } })
  // The second asks once, after the first: a look, a unit of the rate, a claim, and the unit is given back.
  t.ok((await heldThroughout(t, { route: counted })) < 8 + 3 + 4)
})

t.test('Y21 a request that was held, waited for another and is held again has one such wait', async (t) => {
  const store = new Held()
  const [a, b] = [replica(t, { store, holdAtMost: MINUTE }), replica(t, { store })]
  // Held while the key is claimed elsewhere; then it waits for that, which comes to nothing.
  const held = a.get(waiting)
  await until(() => a.ports.waiters.size === 1)
  const instant = performance.now()
  t.intercept(performance, 'now', { value: () => instant + MINUTE })
  store.isHeld = false
  const run = await b.working({}, () => NOT_SENT)
  await until(() => a.ports.waiters.awaited.has(a.id))
  store.fault = ({ op, by }) => (by === a && op === 'swap' ? new InGrace(store.now, store.now, MINUTE) : null)
  await run.end()
  t.match(await held, { status: 503, code: 'idempotency_store_unavailable' })
  t.equal(a.n, 0)
})

void t.test('W01 a request whose grace is over each time it asks is refused in the end', async (t) => {
  const store = new Held()
  store.left = 1
  const a: Replica = replica(t, { store })
  t.match(await a.get(), { status: 503 })
  t.equal(a.ports.waiters.size, 0)
})

const ID = 'id' as RecordId
const ABSENT = { kind: 'read', now: 1, record: null } as const
const RECORD: IdempotencyRecord = heldRecord(draft('completed', newToken()) as OutcomeDraft)

/** Tells how many timers have begun since that would keep the process alive. */
function timersOf(t: Test): () => number {
  const live = new Set<NodeJS.Timeout>()
  const { setTimeout: begin, clearTimeout: end } = globalThis
  const value = (call: (...args: []) => void, time: number, ...args: []): NodeJS.Timeout => {
    const timer = begin(() => {
      live.delete(timer)
      call(...args)
    }, time)
    live.add(timer)
    return timer
  }
  t.intercept(globalThis, 'setTimeout', { value })
  t.intercept(globalThis, 'clearTimeout', {
    value: (timer: NodeJS.Timeout) => {
      live.delete(timer)
      end(timer)
    },
  })
  return () => [...live].filter((timer) => timer.hasRef()).length
}

/** A waiting room on a store under the test's control. */
function roomOf(t: Test, most = 10, looksItself = false) {
  if (!looksItself) onlyWhenTold(t)
  const it = {
    /** Every look at the store; answered by the test. */
    looks: [] as PromiseWithResolvers<ReadReply>[],
    watched: [] as RecordId[],
    stopped: 0,
    changed: (): void => {},
    began: Promise.withResolvers<void>(),
  }
  const waiters = new WaitingRoom(
    {
      get: () => {
        const look = Promise.withResolvers<ReadReply>()
        it.looks.push(look)
        return look.promise
      },
    },
    {
      watch: async (id, changed) => {
        it.watched.push(id)
        it.changed = changed
        await it.began.promise
        return () => it.stopped++
      },
    },
    most,
  )
  t.teardown(() => waiters.close())
  const enter = (local = false, id = ID) => {
    const seat = waiters.enter(id, local)
    if (seat === null) throw new Error('no seat')
    // The timer of a room with seats would go on during the next test.
    t.teardown(() => seat.leave())
    return seat
  }
  return { it, waiters, enter }
}

void t.test('the store is looked at every second at least, without a message too', async (t) => {
  const { setTimeout: real } = globalThis
  const pauses = hurried(t)
  const { it, enter } = roomOf(t, 10, true)
  const seat = enter(true)
  for (let n = 0; n < 8; n++) {
    await until(() => it.looks.length > n)
    it.looks[n]?.resolve(ABSENT)
  }
  await idle()
  const first = pauses[0] ?? 0
  t.ok(first <= 200, 'the first time soon')
  t.ok(pauses.every((pause, n) => pause === Math.min(first * 2 ** n, SECOND)))
  t.equal(pauses.at(-1), SECOND)
  seat.leave()
  await idle()
  const { length } = it.looks
  await new Promise((next) => real(next, 10))
  t.equal(it.looks.length, length, 'not once nobody waits')
})

void t.test('a look that fails tells nobody; one that throws: the record cannot be read', async (t) => {
  const { it, enter } = roomOf(t)
  const seat = enter()
  it.began.resolve()
  await until(() => it.looks.length === 1)
  const error = new StoreUnavailable('down', false)
  it.looks[0]?.resolve({ kind: 'unavailable', full: false, error })
  await idle()
  t.equal(it.looks.length, 1)
  t.equal(await seat.next(1), null)
  for (const throws of [true, false]) {
    it.changed()
    const look = it.looks.at(-1)
    if (throws) look?.reject(new Error('a bug'))
    else look?.resolve({ kind: 'corrupt', error: error as never })
    t.same(await seat.next(MINUTE), { kind: 'corrupt' })
  }
})

void t.test('a seat has news once, and ends with its time or when it is dismissed', async (t) => {
  const timers = timersOf(t)
  const { waiters, enter } = roomOf(t)
  const seat = enter(true)
  waiters.tell(ID, RECORD)
  t.match(await seat.next(0), { kind: 'record' }, 'what came before it asked')
  t.equal(await seat.next(0), null, 'once')
  t.equal(await seat.next(-1), null)
  const news = seat.next(MINUTE)
  await idle()
  waiters.tell(ID, RECORD)
  t.match(await news, { kind: 'record' })
  t.equal(timers(), 0, 'no timer is left')
  const dismissed = seat.next(MINUTE)
  seat.dismiss()
  t.equal(await dismissed, null)
  waiters.tell(ID, RECORD)
  t.equal(await seat.next(MINUTE), null, 'dismissed for good, whatever is told')
  t.equal(timers(), 0)
})

void t.test('limits.waiters counts seats of all records, and who waits for the store', async (t) => {
  const { it, waiters, enter } = roomOf(t, 1)
  const seat = enter()
  t.equal(waiters.enter('other' as RecordId, true), null)
  t.equal(await waiters.outlast(0, () => () => {}), false)
  waiters.resize(2)
  const other = enter()
  waiters.resize(1)
  t.equal(waiters.size, 2, 'seats already taken stay')
  other.leave()
  t.equal(waiters.enter(ID, false), null)
  seat.leave()
  it.began.resolve()
  await until(() => it.stopped === 1)
  t.equal(it.looks.length, 0)
  const waits = waiters.outlast(1, () => () => {})
  t.equal(waiters.enter(ID, true), null)
  t.equal(await waits, true)
  t.ok(waiters.enter(ID, true))
})
