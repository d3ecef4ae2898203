import { setImmediate as turn } from 'node:timers/promises'
import t from 'tap'
import { firstOf } from '../../src/core/headers.ts'
import { orThrow } from '../../src/store/records.ts'
import { CorruptRecord } from '../../src/store/register.ts'
import {
  BROKEN,
  Gate,
  idle,
  LEASE,
  MINUTE,
  NOT_SENT,
  never,
  pair,
  type Replica,
  replica,
  route,
  SECOND,
  type Seen,
  type Sent,
  Store,
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
    t.match(await one, {
      status: 409,
      code: 'idempotency_outcome_unknown',
      retryAfter: LEASE / SECOND,
    })
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
  const a = replica(t)
  const run = await a.working(waiting)
  const { held } = await waits(a)
  a.ports.waiters.close()
  t.match(await held, { code: 'idempotency_key_in_progress' })
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
  const a = replica(t)
  const run = await a.working(waiting)
  const brief = route({ inFlight: { mode: 'wait', wait: 50, status: 409 } })
  const { held } = await waits(a, { route: brief })
  a.store.now += LEASE / 3
  const asked = listening(a.store)
  a.ports.waiters.tell(a.id, null)
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
