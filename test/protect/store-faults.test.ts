import t, { type Test } from 'tap'
import { scopeOf } from '../../src/core/chain.ts'
import type { CompletedResponse, IdempotencyRecord, RecordId } from '../../src/core/record.ts'
import { Settler } from '../../src/protect/settler.ts'
import { encodeDraft } from '../../src/store/record/codec.ts'
import { orThrow, Records } from '../../src/store/records.ts'
import { CorruptRecord, OutOfPhase } from '../../src/store/register.ts'
import { worker } from '../reconcile/harness.ts'
import {
  BROKEN,
  type Fault,
  Gate,
  HOUR,
  idle,
  LEASE,
  NOT_SENT,
  pair,
  type Replica,
  refused,
  replica,
  route,
  SECOND,
  type Sent,
  Stream,
  TTL,
  until,
} from './harness.ts'

const BYPASS = { route: route({ onStoreUnavailable: 'bypass', statusHeader: true }) }
const RETRY = { route: route({ onLeaseExpired: 'retry' }) }
const UNAVAILABLE = 'idempotency_store_unavailable'
const ok = (one: { status: number | null; replayed: boolean }) => one.status === 201 && !one.replayed

/** Leaves a record in `failed_retryable`, so that the next claim is a takeover. */
async function released(a: Replica, over: Sent = {}): Promise<void> {
  a.script.push(NOT_SENT)
  await a.get(over)
}

/** Two replies are lost, so that the request is refused and its claim has to be withdrawn. */
async function refusedClaim(t: Test, a: Replica, op: 'put' | 'swap', ...faults: Fault[]): Promise<void> {
  a.store.fails(op, ...faults)
  t.match(await a.get(), { code: UNAVAILABLE, retryAfter: 1 })
  t.equal(a.ports.settler.size, 1)
}

/** Decides an `unknown` record as an operator's command or a sweeper (`lapsed`) does. A completed resolution removes the owner's token. */
async function resolve(a: Replica, outcome: 'retryable' | 'completed' | 'lapsed'): Promise<void> {
  const { record } = orThrow(await a.records.get(a.id))
  if (record === null) throw new Error('no record')
  const result: CompletedResponse = { kept: false, why: 'outcome_only', status: 200, location: null }
  const unknown = { state: 'unknown', leaseExpired: true, status: null, reconciliation: null } as const
  const draft = {
    retryable: { ...record, state: 'failed_retryable' } as const,
    lapsed: { ...record, ...unknown },
    completed: { ...record, state: 'completed', result, token: Buffer.alloc(16) } as const,
  }[outcome]
  const on = { version: record.version }
  const done = await a.store.inner.swap(a.id, on, encodeDraft(draft), { dueIn: TTL, dropIn: TTL }, false)
  if (!done.done) throw new Error('not resolved')
}

void t.test('L05 a claim whose reply was lost is recognised by its token and executes', async (t) => {
  for (const fault of ['lost', 'dropped', 'late'] as const)
    for (const op of ['put', 'swap'] as const) {
      const a = replica(t)
      if (op === 'swap') await released(a)
      a.store.fails(op, fault)
      const { n } = a
      const first = await a.get()
      t.ok(ok(first), `${op} ${fault}: no self-409`)
      await a.store.arrive()
      t.match(await a.get(), { bytes: first.bytes, replayed: true })
      t.equal(a.n, n + 1)
      t.same(a.said('claimed'), ['created', ...(op === 'swap' ? ['failed_retry'] : []), 'replay'])
      const fence = Number(a.asked.at(-1)?.headers[3])
      t.match(await a.store.read(a.id), { state: 'completed', attempts: op === 'swap' ? 2 : 1, fence })
    }
})

void t.test('L05 a claim is recognised even after a sweeper has marked it unknown', async (t) => {
  const a = replica(t)
  const sweeper = worker(t, a.store, route())
  a.store.fails('put', 'lost')
  // Found by the simulation (seed 1744): the reply took longer than the lease, and the key stayed unknown.
  const reply = async (): Promise<void> => {
    a.store.now += LEASE
    await sweeper.round()
    t.match(await a.store.read(a.id), { state: 'unknown' })
  }
  a.store.before('put', reply, { nth: 2, by: a })
  const first = await a.get()
  t.ok(ok(first))
  t.match(await a.get(), { bytes: first.bytes, replayed: true })
  t.equal(a.n, 1)
})

void t.test('L05 a claim gives a broken connection time to come back', async (t) => {
  for (const downs of [1, 2, 3]) {
    const a = replica(t)
    a.store.fails('put', 'lost', ...Array.from({ length: downs }, () => 'down' as const))
    t.ok(ok(await a.get()), `after ${downs}`)
    t.same([a.n, a.ports.settler.size], [1, 0])
  }
  const long = {
    route: route({ fingerprint: { ...route().fingerprint, body: 'json' } }),
    headers: ['Content-Type', 'application/json'],
    body: JSON.stringify('x'.repeat(200_000)),
  }
  for (const [op, sent] of [
    ['put', {}],
    ['get', long],
  ] as const) {
    const a = replica(t)
    let isBack = false
    const pause = async (time: number) => {
      await idle()
      isBack ||= time > 0
    }
    Object.assign(a.ports, { pause })
    a.store.fails(op, 'dropped')
    a.store.fault = () => (isBack ? null : 'down')
    t.ok(ok(await a.get(sent)), op)
    t.equal(a.n, 1)
  }
})

void t.test('§3.4 a claim lost twice is withdrawn, a retry executes, whatever arrives when', async (t) => {
  const faults: readonly Fault[] = ['lost', 'dropped', 'late']
  for (const op of ['put', 'swap'] as const)
    for (const first of faults)
      for (const second of [...faults, 'down'] as const)
        for (const arrives of ['before', 'after'] as const)
          for (const elsewhere of [false, true]) {
            const title = `${op} ${first}, then ${second}, late ones arrive ${arrives} the withdrawal`
            const { a, b } = pair(t)
            if (op === 'swap') await released(a)
            const { n } = a
            a.store.fails(op, first)
            // A takeover that was applied shows itself to the next put: that reply gets lost too.
            if (op === 'swap' && first === 'lost') a.store.fails('put', null)
            // A store that is down is asked again while the connection may come back.
            const times = second === 'down' ? 4 : 1
            await refusedClaim(t, a, first === 'lost' ? 'put' : op, ...Array<Fault>(times).fill(second))
            t.equal(a.n, n, 'nothing executed')
            if (arrives === 'before') await a.store.arrive()
            t.ok(await a.ports.settler.flush())
            await a.store.arrive()
            t.equal((await a.store.read(a.id))?.state, 'failed_retryable', `${title}: freed`)
            const retry = await (elsewhere ? b : a).get()
            t.ok(ok(retry), `${title}: the retry executes`)
            await a.store.arrive()
            t.match(await a.get(), { replayed: true, bytes: retry.bytes })
            t.equal(a.n + b.n, n + 1)
            t.notOk(a.said('completed').includes('stale'))
            t.notOk(a.said('completed').includes('recovered'), 'an absent record was no loss')
          }
})

void t.test('W05 a claim that no replica has is withdrawn before its 503; a retry executes', async (t) => {
  for (const op of ['put', 'swap'] as const)
    for (const onStoreUnavailable of ['reject', 'bypass'] as const)
      for (const elsewhere of [false, true]) {
        const title = `${op}, ${onStoreUnavailable}, ${elsewhere ? 'elsewhere' : 'here'}`
        const { a, b } = pair(t)
        const sent = { route: route({ onStoreUnavailable }) }
        if (op === 'swap') await released(a)
        const { n } = a
        a.store.fails(op, 'unreplicated')
        const refusal = { code: UNAVAILABLE, retryAfter: 1, detail: /^the claim did not reach/ }
        t.match(await a.get(sent), refusal, title)
        t.equal(a.n, n, 'nothing executed, even on a bypass route')
        t.equal(a.ports.settler.size, 0)
        t.equal((await a.store.read(a.id))?.state, 'failed_retryable', 'the client may retry at once')
        const retry = await (elsewhere ? b : a).get(sent)
        t.ok(ok(retry), `${title}: the retry executes`)
        t.match(await a.get(sent), { replayed: true, bytes: retry.bytes })
        t.equal(a.n + b.n, n + 1)
        t.notOk(a.said('completed').includes('deferred'))
      }
})

void t.test('W05 a withdrawal that the store does not take is kept, and a retry executes', async (t) => {
  for (const fault of ['down', 'lost'] as const) {
    const a = replica(t)
    a.store.fails('swap', fault)
    await refusedClaim(t, a, 'put', 'unreplicated')
    t.ok(ok(await a.get()))
    t.equal(a.n, 1)
  }
})

void t.test('§3.4 a retry withdraws the lost claim itself if the timer has not', async (t) => {
  const a = replica(t)
  await refusedClaim(t, a, 'put', 'dropped', 'lost')
  t.ok(ok(await a.get()))
  t.equal(a.ports.settler.size, 0)
})

void t.test('§3.4 a late claim that arrives during its withdrawal is freed too', async (t) => {
  const a = replica(t)
  await released(a)
  await refusedClaim(t, a, 'swap', 'late', 'late')
  // The withdrawal has looked and found the old record; then the claim arrives; then it writes.
  a.store.before('swap', () => a.store.arrive(), { nth: 2 })
  t.ok(await a.ports.settler.flush())
  t.equal((await a.store.read(a.id))?.state, 'failed_retryable')
  t.ok(ok(await a.get()))
})

void t.test('§3.4 a record that vanishes during a withdrawal stays claimable', async (t) => {
  const a = replica(t)
  await released(a)
  await refusedClaim(t, a, 'swap', 'late', 'dropped')
  a.store.before('swap', () => a.store.loses(), { nth: 2 })
  t.ok(await a.ports.settler.flush())
  t.same(a.said('completed'), ['released', 'deferred', 'released'])
  await a.store.arrive()
  t.equal(await a.store.read(a.id), null)
  t.ok(ok(await a.get()))
})

void t.test('§2 a withdrawal leaves what it found, so an earlier late outcome is accepted', async (t) => {
  for (const earlier of ['lapsed', 'written down', 'resolved'] as const) {
    const { a, b, store } = pair(t)
    const run = await a.working(RETRY)
    store.now += LEASE
    if (earlier === 'resolved') await resolve(a, 'retryable')
    if (earlier === 'written down') await resolve(a, 'lapsed')
    store.fails('swap', 'late', 'late')
    t.equal((await b.get(RETRY)).code, UNAVAILABLE)
    const before = await store.read(a.id)
    t.ok(await b.ports.settler.flush())
    const after = await store.read(a.id)
    t.same({ ...after, version: 0, updatedAt: 0 }, { ...before, version: 0, updatedAt: 0 })
    await store.arrive()
    const { bytes } = await run.end()
    t.same(a.said('completed'), ['stored'])
    t.match(await b.get(RETRY), { bytes, replayed: true })
    t.equal(a.n + b.n, 1)
  }
})

void t.test('§3.4 several lost claims of one key are all withdrawn', async (t) => {
  const a = replica(t)
  a.store.fails('put', 'late', 'late', 'dropped', 'dropped')
  for (const { code } of await Promise.all([a.get(), a.get()])) t.equal(code, UNAVAILABLE)
  t.equal(a.ports.settler.size, 2)
  await a.store.arrive()
  t.equal((await a.store.read(a.id))?.state, 'in_progress', 'the first claim is in the store')
  t.ok(await a.ports.settler.flush())
  t.equal((await a.store.read(a.id))?.state, 'failed_retryable')
  t.ok(ok(await a.get()))
})

void t.test('§3.4 a duplicate’s lost claim does not affect the outcome held meanwhile', async (t) => {
  const a = replica(t)
  const run = await a.working()
  // The duplicate's claim is on its way while the owner finishes and the store goes down.
  const wire = new Gate()
  a.store.gate = async ({ op }) => (op === 'put' ? wire.pass() : undefined)
  a.store.fault = ({ op }) => (op === 'put' ? 'dropped' : 'down')
  const duplicate = a.get()
  await wire.reached
  const { bytes } = await run.end()
  t.same(a.said('completed'), ['deferred'])
  wire.open()
  t.match(await duplicate, { bytes, replayed: true }, 'answered from what this replica holds')
  a.store.gate = null
  t.match(await a.get(), { bytes, replayed: true })
  t.ok(await a.storeIsBack())
  t.match(await a.get(), { bytes, replayed: true })
  t.match(await a.store.read(a.id), { state: 'completed' })
  t.same([a.n, a.bytes.held], [1, 0])
})

void t.test('§3.4 a pending withdrawal of another payload does not make a retry misuse', async (t) => {
  const a = replica(t)
  const { bytes } = await a.get({ body: 'A' })
  a.store.fault = () => 'dropped'
  t.equal((await a.get({ body: 'B' })).code, UNAVAILABLE)
  a.store.fault = () => 'down'
  await refused(t, a, { body: 'A' }, UNAVAILABLE, { status: 503 })
  a.store.fault = () => null
  t.match(await a.get({ body: 'A' }), { bytes, replayed: true })
  t.equal(a.n, 1)
})

void t.test('R01 R03 R08 a store that is down or full at the claim: 503, and nothing executes', async (t) => {
  for (const fault of ['down', 'full'] as const) {
    const a = replica(t)
    a.store.fault = () => fault
    const detail = /^the store does not answer; nothing was executed for this request$/
    const { instance } = await refused(t, a, {}, UNAVAILABLE, { status: 503, retryAfter: 1, detail })
    t.equal(instance, a.id)
    t.equal(a.trace.outcome, 'store_unavailable')
    t.same(a.said('claimed'), ['error'])
    t.equal(a.ports.settler.size, 0)
    a.store.fault = () => null
    t.ok(ok(await a.get()))
  }
})

void t.test('R02 bypass: a request is forwarded, marked, and settled once the store is back', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'down'
  const first = await a.get(BYPASS)
  t.match(first, { status: 201, proxyHeaders: ['Idempotency-Status', 'bypassed'] })
  t.match(a.trace, { outcome: 'bypassed', after: 'completed', fence: null })
  t.same(a.said('claimed'), ['error'])
  t.same(a.said('completed'), ['deferred'])
  t.ok(a.bytes.held > 0, 'its body is held')
  t.match(await a.get(BYPASS), { bytes: first.bytes, replayed: true }, 'answered from the held outcome')
  await refused(t, a, { ...BYPASS, body: 'other' }, 'idempotency_key_reused')
  a.store.fault = () => null
  await until(() => a.ports.settler.size === 0)
  t.same(a.said('completed'), ['deferred', 'stored'], 'of itself')
  t.match(await a.get(BYPASS), { bytes: first.bytes, replayed: true })
  t.same([a.n, a.bytes.held], [1, 0])
})

void t.test('R02 bypass: simultaneous requests with one key execute once on one replica', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'down'
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded()))
  const all = Array.from({ length: 20 }, () => a.get(BYPASS))
  await gate.reached
  await idle()
  t.equal((await a.get({ ...BYPASS, body: 'other' })).code, 'idempotency_key_reused')
  const busy = { code: 'idempotency_key_in_progress', retryAfter: 30 }
  t.match(await a.get(BYPASS), busy, 'a whole number, even without a store')
  gate.open()
  const answers = await Promise.all(all)
  t.equal(a.n, 1)
  t.equal(answers.filter(ok).length, 1)
  t.equal(answers.filter(({ code }) => code === busy.code).length, 19)
})

void t.test('R02 bypass: retries find a run without a claim, even once the store is back', async (t) => {
  for (const before of ['nothing', 'not executed'] as const) {
    const a = replica(t)
    a.store.fault = () => 'down'
    if (before === 'not executed') await released(a, BYPASS)
    const { n } = a
    const run = await a.working(BYPASS)
    a.store.fault = () => null
    await refused(t, a, {}, 'idempotency_key_in_progress')
    await refused(t, a, { body: 'other' }, 'idempotency_key_reused')
    const { bytes } = await run.end()
    t.ok(await a.ports.settler.flush())
    t.match(await a.get(), { bytes, replayed: true })
    t.equal(a.n, n + 1)
  }
})

void t.test('R02 bypass: a retry finds a run that has its claim though the store went down', async (t) => {
  const a = replica(t)
  const run = await a.working(BYPASS)
  a.store.fault = () => 'down'
  await refused(t, a, BYPASS, 'idempotency_key_in_progress')
  await refused(t, a, { ...BYPASS, body: 'other' }, 'idempotency_key_reused')
  const { bytes } = await run.end()
  t.match(await a.get(BYPASS), { bytes, replayed: true })
  t.equal(a.n, 1)
})

void t.test('L09 a replica whose lapsed run was taken over replays the newer answer', async (t) => {
  const { a, b } = pair(t)
  const run = await a.working(RETRY, () => a.responded(201, 'late'))
  a.store.now += LEASE
  const retry = await b.get(RETRY)
  t.ok(ok(retry), 'lapsed')
  t.equal(b.events.filter(([name]) => name === 'leaseExpired').length, 1)
  await run.end()
  t.match(await a.get(RETRY), { bytes: retry.bytes, replayed: true })
})

void t.test('R02 bypass: after a lost claim the outcome is written as that claim’s', async (t) => {
  for (const op of ['put', 'swap'] as const)
    for (const fault of ['lost', 'dropped', 'late'] as const)
      for (const arrives of ['before', 'after'] as const) {
        const a = replica(t)
        if (op === 'swap') await released(a, BYPASS)
        const { n } = a
        let broken = false
        a.store.fault = (call) => {
          if (call.op !== op && !broken) return null
          const now: Fault = broken ? 'down' : fault
          broken = true
          return now
        }
        const first = await a.get(BYPASS)
        const bypassed = { status: 201, proxyHeaders: ['Idempotency-Status', 'bypassed'] }
        t.match(first, bypassed, `${op} ${fault} ${arrives}`)
        t.equal(a.trace.fence, null, 'without a fence from the store there is none')
        t.equal(a.asked.at(-1)?.headers[3], '0')
        t.equal(a.said('completed').at(-1), 'deferred')
        a.store.fault = () => null
        if (arrives === 'before') await a.store.arrive()
        t.ok(await a.ports.settler.flush())
        await a.store.arrive()
        t.match(await a.get(BYPASS), { bytes: first.bytes, replayed: true })
        t.match(await a.store.read(a.id), { state: 'completed', attempts: op === 'swap' ? 2 : 1 })
        t.same([a.n, a.bytes.held, a.said('completed').at(-1)], [n + 1, 0, 'stored'])
      }
})

void t.test('R02 bypass: the outcome is written over a record that says “not executed”', async (t) => {
  for (const [reply, state] of [
    [BROKEN, 'unknown'],
    [NOT_SENT, 'failed_retryable'],
    [null, 'completed'],
  ] as const) {
    const a = replica(t)
    await released(a, BYPASS)
    const { fence } = (await a.store.read(a.id)) as IdempotencyRecord
    a.store.fault = () => 'down'
    a.script.push(reply ?? a.responded())
    await a.get(BYPASS)
    t.ok(await a.storeIsBack())
    const grows = state === 'failed_retryable' ? 0 : 1
    t.match(await a.store.read(a.id), { state, fence: fence + grows })
    t.notOk(a.said('completed').includes('stale'))
    t.equal(a.bytes.held, 0)
  }
})

void t.test('R02 bypass: an outcome that loses a race for the record looks again', async (t) => {
  for (const race of ['arrives', 'moves', 'taken'] as const) {
    const { a, b } = pair(t)
    await released(a, BYPASS)
    a.store.fails('swap', 'late', 'down', 'down', 'down', 'down')
    const first = await a.get(BYPASS)
    t.ok(ok(first))
    const happens = {
      arrives: () => a.store.arrive(),
      moves: () => resolve(a, 'retryable'),
      taken: () => b.get({ body: '{"amount":1}', ...BYPASS }),
    }
    a.store.before('swap', happens[race], { nth: 2 })
    t.ok(await a.ports.settler.flush())
    t.equal((await a.store.read(a.id))?.state, 'completed')
    if (race === 'taken') t.equal(a.said('completed').at(-1), 'stale', 'a newer attempt exists')
    else t.match(await b.get(BYPASS), { bytes: first.bytes, replayed: true })
    t.equal(a.bytes.held, 0)
  }
})

void t.test('R02 bypass: an outcome does not change another attempt’s record', async (t) => {
  for (const [reply, counted] of [
    [null, 'stale'],
    [BROKEN, 'stale'],
    [NOT_SENT, 'deferred'],
  ] as const) {
    const { a, b, store } = pair(t)
    const first = await b.get()
    store.fault = () => 'down'
    a.script.push(reply ?? a.responded(200, 'another'))
    await a.get(BYPASS)
    const before = await store.dump()
    t.ok(await a.storeIsBack())
    t.same(await store.dump(), before)
    t.equal(a.said('completed').at(-1), counted)
    t.equal((await a.get(BYPASS)).bytes, first.bytes)
    t.equal(a.bytes.held, 0)
  }
})

void t.test('R02 bypass: the lost claim of a duplicate does not keep out the outcome', async (t) => {
  const a = replica(t)
  // The duplicate's claim is on its way when the other one begins without a claim.
  const wire = a.store.hold('put')
  const duplicate = a.get(BYPASS)
  await wire.reached
  a.store.fault = () => 'down'
  const run = await a.working(BYPASS)
  a.store.fails('put', 'dropped', 'late')
  wire.open()
  t.equal((await duplicate).code, 'idempotency_key_in_progress')
  t.equal(a.ports.settler.size, 1)
  a.store.fault = () => null
  await a.store.arrive()
  t.match(await a.store.read(a.id), { state: 'in_progress' }, 'the claim of the one answered 409')
  const { bytes } = await run.end()
  t.ok(await a.storeIsBack())
  t.match(await a.get(BYPASS), { bytes, replayed: true })
  t.equal(a.n, 1)
})

void t.test('R02 X02 bypass: nothing executes for a client that has left', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'dropped'
  t.equal((await a.get({ ...BYPASS, gone: () => true })).code, UNAVAILABLE)
  t.equal(a.n, 0)
  t.equal(a.ports.settler.size, 1, 'its lost claim is withdrawn')
})

void t.test('W09 bypass: nothing executes while the phase of a migration is not known', async (t) => {
  const a = replica(t)
  a.store.fault = () => new OutOfPhase('the phase of the others is not known', false)
  await refused(t, a, BYPASS, UNAVAILABLE)
  t.equal(a.ports.settler.size, 0)
})

void t.test('§3 after an unstored not-executed outcome only a bypass route executes', async (t) => {
  const a = replica(t)
  a.downAtEnd(() => NOT_SENT)
  t.equal((await a.get()).code, 'upstream_unreachable')
  t.same(a.said('completed'), ['deferred'])
  await refused(t, a, {}, UNAVAILABLE, { retryAfter: 1 })
  await refused(t, a, { body: 'other' }, 'idempotency_key_reused')
  a.store.fault = ({ op }) => (op === 'swap' ? 'down' : null)
  await refused(t, a, {}, UNAVAILABLE, { retryAfter: 1 }, 'nothing runs')
  a.store.fault = () => 'down'
  const first = await a.get(BYPASS)
  t.ok(ok(first))
  t.equal(a.trace.outcome, 'bypassed')
  t.match(await a.get(BYPASS), { bytes: first.bytes, replayed: true })
  t.ok(await a.storeIsBack())
  t.match(await a.get(), { bytes: first.bytes, replayed: true })
  t.same([a.n, a.bytes.held], [2, 0])
})

void t.test('R04 R05 if the store dies before the completion, no retry executes', async (t) => {
  for (const fault of ['down', 'lost', 'dropped', 'late'] as const) {
    const { a, b, store } = pair(t)
    store.fails('swap', fault)
    a.downAtEnd()
    const first = await a.get({ route: route({ statusHeader: true }) })
    t.match(first, { status: 201, proxyHeaders: ['Idempotency-Status', 'executed'] })
    t.equal(a.trace.outcome, 'executed')
    t.same(a.said('completed'), ['deferred'])
    t.match(await a.get(), { bytes: first.bytes, replayed: true }, 'this replica holds it')
    t.equal((await b.get()).code, UNAVAILABLE)
    store.fault = () => null
    const other = await b.get()
    t.ok(other.replayed || other.code === 'idempotency_key_in_progress')
    await store.arrive()
    t.ok(await a.ports.settler.flush())
    t.same(a.said('completed'), ['deferred', 'stored'], `${fault}: a duplicate completion is idempotent`)
    t.match(await b.get(), { bytes: first.bytes, replayed: true })
    t.same([a.n + b.n, a.bytes.held], [1, 0])
    const record = await store.read(a.id)
    await store.arrive()
    t.same(await store.read(a.id), record)
  }
})

void t.test('R04 unknown and not-executed outcomes survive a store that is down at their end', async (t) => {
  for (const [reply, state, code] of [
    [BROKEN, 'unknown', 'idempotency_outcome_unknown'],
    [NOT_SENT, 'failed_retryable', UNAVAILABLE],
  ] as const)
    for (const fault of ['down', 'lost'] as const) {
      const a = replica(t)
      a.store.fails('swap', fault)
      a.downAtEnd(() => reply)
      t.equal((await a.get()).status, 502)
      await refused(t, a, {}, code, { retryAfter: 1 })
      t.ok(await a.storeIsBack())
      t.equal((await a.store.read(a.id))?.state, state)
    }
})

void t.test('R05 an outcome is retried even after the ttl; its retention begins when stored', async (t) => {
  const a = replica(t)
  const short = { route: route({ ttl: SECOND, ttlFailed: SECOND }) }
  a.downAtEnd()
  const { bytes } = await a.get(short)
  // Long after the ttl, by both clocks.
  a.store.now += HOUR
  const { now } = performance
  t.intercept(performance, 'now', { value: () => now.call(performance) + HOUR })
  t.notOk(await a.ports.settler.flush())
  t.match(await a.get(short), { replayed: true, bytes })
  t.ok(await a.storeIsBack())
  t.match(await a.get(short), { replayed: true, bytes })
  t.equal(a.n, 1)
  a.store.now += SECOND
  t.equal(await a.store.read(a.id), null, 'from when the store took it')
})

void t.test('R05 an outcome that fails with a bug is given up and reported', async (t) => {
  const a = replica(t)
  a.downAtEnd(undefined, new RangeError('a bug'))
  t.equal((await a.get()).status, 201)
  t.equal(a.ports.settler.size, 1)
  t.ok(await a.ports.settler.flush())
  t.equal(a.troubles().at(-1), 'an outcome could not be stored and is lost')
  t.equal(a.bytes.held, 0)
})

void t.test('R05 an outcome that the store never takes does not hold up the others', async (t) => {
  const a = replica(t)
  const defer = async (...keys: string[]): Promise<void> => {
    for (const key of keys) {
      a.downAtEnd(() => a.responded(201, key))
      await a.get({ key })
      a.store.fault = () => null
    }
  }
  await defer('first', 'second', 'third')
  const [poison] = [...a.store.ids]
  t.equal(a.ports.settler.size, 3)
  a.store.fault = ({ id }) => (id === poison ? 'dropped' : null)
  t.notOk(await a.ports.settler.flush())
  t.notOk(await a.ports.settler.flush())
  t.equal(a.ports.settler.size, 1)
  await defer('fourth', 'fifth')
  a.store.fault = ({ id, op }) => (id === poison && op === 'swap' ? 'full' : null)
  t.notOk(await a.ports.settler.flush())
  t.equal(a.ports.settler.size, 1, 'nor does one that the store has no room for')
  t.ok(await a.storeIsBack())
  for (const key of ['first', 'second', 'third']) t.ok((await a.get({ key })).bytes?.includes(key))
  t.equal(a.bytes.held, 0)
})

void t.test('R05 an outcome is written once, however many retries ask for it', async (t) => {
  const a = replica(t)
  a.downAtEnd(() => NOT_SENT)
  await a.get()
  a.store.fault = () => null
  const retries = await Promise.all([a.get(), a.get(), a.get(), a.ports.settler.flush()])
  t.ok(retries[3])
  t.equal(a.n, 2)
  t.same(a.said('completed'), ['deferred', 'released', 'stored'])
})

void t.test('§3 a full store keeps an outcome without its body; else it is held whole', async (t) => {
  const a = replica(t)
  a.store.fails('swap', 'full')
  const first = await a.get({ route: route({ statusHeader: true }) })
  t.match(first, { status: 201, bytes: /p1/ }, 'never answered overloaded')
  t.equal(first.proxyHeaders[2], 'Idempotency-Expires')
  t.same(a.said('completed'), ['too_large'])
  await refused(t, a, {}, 'idempotency_response_unavailable', { original: { status: 201 } })
  t.equal(a.bytes.held, 0)
  for (const second of ['full', new Error('a bug')] as const) {
    const b = replica(t)
    b.store.fails('swap', 'full', second)
    const { bytes } = await b.get()
    t.match(await b.get(), { bytes, replayed: true }, 'held whole, whatever else goes wrong')
    t.ok(await b.ports.settler.flush())
    t.match(await b.get(), { bytes, replayed: true }, 'room again: nothing was thrown away')
    t.equal(b.bytes.held, 0)
  }
})

void t.test('L11 an outcome whose record is gone is written again, unless claimed since', async (t) => {
  for (const then of ['nothing', 'a claim', 'a lost reply'] as const) {
    const { a, b, store } = pair(t)
    a.script.push(async () => {
      await store.loses()
      if (then === 'a lost reply') store.fails('put', 'lost')
      // Absent when the outcome looks, claimed by somebody else before it is written.
      if (then === 'a claim') store.before('put', () => b.get())
      return a.responded(201, 'of the first')
    })
    const { bytes } = await a.get()
    if (then === 'a claim') {
      t.same(a.said('completed'), ['stale'])
      t.notOk((await b.get()).bytes?.includes('of the first'))
      continue
    }
    t.ok(await a.ports.settler.flush())
    if (then === 'nothing') {
      t.same(a.said('completed'), ['recovered'])
      t.match(a.troubles(), [/lost the record of a running request; its outcome was written again/])
    }
    t.equal((await store.read(a.id))?.fence, a.traces[0]?.fence)
    t.match(await b.get(), { bytes, replayed: true })
    t.equal(b.n, 0)
  }
})

void t.test('O03 O04 L09 a late outcome overrides a retryable resolution, not a completed one', async (t) => {
  for (const resolution of ['retryable', 'completed'] as const)
    for (const settleFault of [null, 'down'] as const) {
      const a = replica(t)
      const run = await a.working()
      a.store.now += LEASE
      await refused(t, a, {}, 'idempotency_outcome_unknown')
      await resolve(a, resolution)
      const before = await a.store.dump()
      a.store.fails('swap', settleFault)
      const own = await run.end()
      t.match(own, { status: 201, bytes: /p1/ }, 'its client gets its answer')
      t.ok(await a.ports.settler.flush())
      t.equal(a.bytes.held, 0)
      if (resolution === 'retryable') {
        t.equal(a.said('completed').at(-1), 'stored', 'a late proof beats “not executed”')
        t.match(await a.get(), { bytes: own.bytes, replayed: true })
      } else {
        t.equal(a.said('completed').at(-1), 'stale')
        t.same(await a.store.dump(), before)
        await refused(t, a, {}, 'idempotency_response_unavailable')
      }
      t.equal(a.n, 1)
    }
})

void t.test('O03 a retry that claimed after the resolution wins over the late outcome', async (t) => {
  const { a, b } = pair(t)
  const run = await a.working({}, () => a.responded(201, 'late'))
  a.store.now += LEASE
  await resolve(a, 'retryable')
  const retry = await b.get()
  t.ok(ok(retry))
  await run.end()
  t.same(a.said('completed'), ['stale'])
  t.match(await a.get(), { bytes: retry.bytes, replayed: true })
})

void t.test('§2 an outcome does not overwrite a record that cannot be read', async (t) => {
  const a = replica(t)
  a.script.push(async () => {
    const { bytes } = await a.store.inner.get(a.id)
    const broken = Buffer.from(bytes as Buffer)
    broken[2] = 9
    await a.store.loses()
    await a.store.inner.put(a.id, broken, { dueIn: HOUR, dropIn: TTL })
    return a.responded()
  })
  t.equal((await a.get()).status, 201)
  t.same(a.troubles(), ['the stored record cannot be read; it is left as it is'])
  t.equal((await a.store.inner.get(a.id)).bytes?.[2], 9)
  await refused(t, a, {}, UNAVAILABLE)
  t.equal(a.bytes.held, 0)
})

void t.test('a claim that others keep winning is given up, and a later retry executes', async (t) => {
  const { a, b, store } = pair(t)
  await released(a)
  let moved = 0
  store.gate = async ({ op }) => {
    if (op !== 'swap') return
    moved++
    await resolve(a, 'retryable')
  }
  t.equal((await b.get()).code, UNAVAILABLE)
  t.ok(moved > 1)
  t.equal(b.ports.settler.size, 0)
  store.gate = null
  t.ok(ok(await b.get()))
})

void t.test('a record that vanishes under a takeover is claimed as new', async (t) => {
  const a = replica(t)
  await released(a)
  a.store.before('swap', () => a.store.loses())
  t.ok(ok(await a.get()))
  t.same(a.said('claimed'), ['created', 'created'])
  t.equal(a.trace.before, 'absent')
  t.match(await a.store.read(a.id), { attempts: 1 })
})

void t.test('a record past its retention is claimed anew, even if the store still returns it', async (t) => {
  const { a, b: behind, store } = pair(t)
  await a.get()
  const { claim } = behind.records
  let shown = 0
  behind.records.claim = async (id: RecordId, ...rest) => {
    if (shown++ > 0) return claim.call(behind.records, id, ...rest)
    const { record } = orThrow(await a.records.get(id))
    if (record === null) throw new Error('no record')
    store.now += TTL
    return { kind: 'exists', now: store.now, record }
  }
  t.ok(ok(await behind.get()))
  t.equal(shown, 2)
})

void t.test('X02 a client that leaves before its claim executes nothing, and frees its key', async (t) => {
  for (const fault of [null, 'down'] as const) {
    const a = replica(t)
    a.store.fails('swap', fault)
    t.match(await a.get({ gone: () => true }), { status: null, code: null })
    t.match(a.trace, { outcome: null, before: 'absent', after: 'failed_retryable', status: null })
    t.equal(a.n, 0)
    t.ok(await a.ports.settler.flush())
    t.equal((await a.store.read(a.id))?.state, 'failed_retryable')
    t.ok(ok(await a.get()))
    t.equal(a.bytes.held, 0)
  }
})

void t.test('a bug is thrown, leaves nothing behind, and is logged with what is known', async (t) => {
  const bug = new TypeError('a bug')
  const of = {
    store: (a: Replica) => void (a.store.fault = () => bug),
    forwarding: (a: Replica) => void a.script.push(bug),
    bypassing: (a: Replica) => {
      a.store.fault = () => 'down'
      a.script.push(bug)
    },
    settling: (a: Replica) => void (a.ports.settler.settle = () => Promise.reject(bug)),
  }
  for (const [where, before, after, fence, n] of [
    ['store', null, null, null, 0],
    ['forwarding', 'absent', 'unknown', Number, 1],
    ['bypassing', null, 'unknown', null, 1],
    ['settling', 'absent', 'in_progress', Number, 1],
  ] as const) {
    const a = replica(t)
    of[where](a)
    await t.rejects(a.send(where === 'bypassing' ? BYPASS : {}), { message: 'a bug' })
    t.match(a.traces.at(-1), { outcome: null, before, after, fence }, where)
    t.equal(a.n, n)
    t.same([a.ports.running.size, a.ports.leases.size, a.ports.inFlight.count], [0, 0, 0], where)
    if (where !== 'settling') t.equal(a.bytes.held, 0, where)
    if (where !== 'forwarding') continue
    t.match(await a.store.read(a.id), { state: 'unknown', status: null })
    await refused(t, a, {}, 'idempotency_outcome_unknown')
  }
})

void t.test('a store may answer synchronously, and throw so: then the outcome is held', async (t) => {
  const a = replica(t)
  const records = new Records(a.store.inner)
  Object.assign(a.ports, { records, settler: new Settler(records, a.ports.observer, null) })
  const { bytes } = await a.get()
  t.match(await a.get(), { status: 201, bytes, replayed: true })
  t.same([a.n, a.bytes.held], [1, 0])
  const b = replica(t)
  const swap = (): never => {
    throw new TypeError('a bug')
  }
  const settler = new Settler(new Records({ ...b.store.inner, swap }), b.ports.observer, null)
  Object.assign(b.ports, { settler })
  t.equal((await b.get()).status, 201)
  t.equal(settler.size, 1)
  await settler.close()
  t.equal(b.bytes.held, 0)
})

void t.test('a stream under bypass is settled at its end', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'down'
  const stream = new Stream()
  a.script.push(stream.reply())
  t.match(await a.get(BYPASS), { status: 200, proxyHeaders: ['Idempotency-Status', 'bypassed'] })
  t.equal((await a.get(BYPASS)).code, 'idempotency_key_in_progress')
  stream.end('complete')
  await until(() => a.ports.settler.size === 1)
  t.ok(await a.storeIsBack())
  await refused(t, a, BYPASS, 'idempotency_response_unavailable')
})

void t.test('L11 a retry executes nothing if the store lost the record of a run here', async (t) => {
  for (const fault of [null, 'down'] as const) {
    const a = replica(t)
    const run = await a.working()
    await a.store.loses()
    a.store.fails('swap', fault)
    a.store.gate = ({ op }) => (op === 'swap' ? idle() : Promise.resolve())
    t.match(await a.get(), { code: 'idempotency_key_in_progress', status: 409 })
    const state = fault === null ? 'in_progress' : 'unknown'
    t.match(await a.store.read(a.id), { state }, 'its claim is over before it is answered')
    t.equal((await a.get({ body: 'other' })).code, 'idempotency_key_reused')
    t.ok(ok(await run.end()))
    t.equal(a.n, 1, 'executed once')
    if (fault === null) t.match(await a.get(), { replayed: true })
    else t.equal((await a.get()).code, 'idempotency_outcome_unknown', 'nobody executes it')
    t.ok(a.said('trouble').length > 0)
  }
})

void t.test('a retry executes nothing if a lost record cannot be given back', async (t) => {
  const a = replica(t)
  const run = await a.working()
  await a.store.loses()
  a.store.fault = ({ op }) => (op === 'swap' ? new CorruptRecord('unreadable') : null)
  t.equal((await a.get()).code, 'idempotency_key_in_progress')
  await a.store.loses()
  a.store.fault = ({ op }) => (op === 'swap' ? new TypeError('a bug') : null)
  await t.rejects(a.get(), { message: 'a bug' })
  a.store.fault = () => null
  await run.end()
  t.equal(a.n, 1)
})

void t.test('a replay without room is refused, and one with room gives it back', async (t) => {
  const a = replica(t)
  const { bytes } = await a.get()
  t.ok(a.budget.take(1024 * 1024))
  t.match(await a.get(), { code: 'overloaded', status: 503, retryAfter: 1, instance: a.id })
  t.match(a.trace, { outcome: 'overloaded', before: 'completed', after: 'completed' })
  a.budget.give(1024 * 1024)
  t.match(await a.get(), { replayed: true, bytes })
  t.same([a.budget.held, a.n], [0, 1])
})

void t.test('V04 a refusal without a claim tells no proxy in front that a retry is recognised', async (t) => {
  for (const down of [true, false]) {
    const a = replica(t)
    a.store.fault = () => (down ? 'down' : null)
    a.script.push(BROKEN)
    const scope = down ? 'none' : scopeOf(BYPASS.route)
    t.match(await a.get(BYPASS), { code: 'upstream_failed', scope })
    const impatient = { ...BYPASS.route, respondWithin: 1 }
    const slow = await a.working({ route: impatient, key: 'other-0123456789abcdef' })
    t.match(await slow.answer, { code: 'upstream_slow', scope })
    t.strictSame(a.trace.fence, down ? null : a.store.now)
    slow.open()
  }
})
