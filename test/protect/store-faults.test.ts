import t, { type Test } from 'tap'
import { scopeOf } from '../../src/core/chain.ts'
import type { CompletedResponse, IdempotencyRecord, RecordId } from '../../src/core/record.ts'
import { Settler } from '../../src/protect/settler.ts'
import { encodeDraft } from '../../src/store/codec.ts'
import { orThrow, Records } from '../../src/store/records.ts'
import { CorruptRecord, OutOfPhase } from '../../src/store/register.ts'
import { worker } from '../reconcile/harness.ts'
import {
  type Fault,
  Gate,
  HOUR,
  idle,
  LEASE,
  type Replica,
  refused,
  replica,
  route,
  SECOND,
  type Sent,
  Store,
  type StoreCall,
  Stream,
  seen,
  TTL,
  until,
} from './harness.ts'

const BYPASS = route({ onStoreUnavailable: 'bypass', statusHeader: true })
const ok = (one: { status: number | null; replayed: boolean }) => one.status === 201 && !one.replayed

/** Leaves a record in `failed_retryable`, so that the next claim is a takeover. */
async function released(a: Replica, over: Sent = {}): Promise<void> {
  a.script.push({ proof: 'not_sent', reason: 'refused' })
  await a.get(over)
}

void t.test('L05 a claim whose reply was lost is recognised by its token and executes', async (t) => {
  for (const fault of ['lost', 'dropped', 'late'] as const)
    for (const op of ['put', 'swap'] as const) {
      const a = replica(t)
      if (op === 'swap') await released(a)
      a.store.next.push({ op, fault })
      const { n } = a
      const first = await a.get()
      t.ok(ok(first), `${op} ${fault}: no self-409`)
      await a.store.arrive()
      t.match(await a.get(), { bytes: first.bytes, replayed: true })
      t.equal(a.n, n + 1)
      const expected = op === 'swap' ? ['created', 'failed_retry'] : ['created']
      t.same(a.said('claimed'), [...expected, 'replay'])
      t.match(await a.store.read(a.id), { state: 'completed', attempts: op === 'swap' ? 2 : 1 })
      t.equal(
        Number(a.asked.at(-1)?.headers[3]),
        (await a.store.read(a.id))?.fence,
        'the fence that was sent is the record’s',
      )
    }
})

void t.test('L05 a claim is recognised even after a sweeper has marked it unknown', async (t) => {
  const a = replica(t)
  const sweeper = worker(t, a.store, route())
  a.store.next.push({ op: 'put', fault: 'lost' })
  // Found by the simulation (seed 1744): the reply took longer than the lease, and the key stayed unknown.
  let puts = 0
  a.store.gate = async ({ op, by }) => {
    if (op !== 'put' || by === sweeper || ++puts !== 2) return
    a.store.now += LEASE
    await sweeper.round()
    t.match(await a.store.read(a.id), { state: 'unknown' })
  }
  const first = await a.get()
  t.ok(ok(first))
  t.equal(a.n, 1)
  t.match(await a.get(), { bytes: first.bytes, replayed: true })
})

void t.test(
  '§3.4 a claim lost twice is refused and withdrawn, and a retry executes, whatever arrives when',
  async (t) => {
    const faults: readonly Fault[] = ['lost', 'dropped', 'late']
    for (const op of ['put', 'swap'] as const)
      for (const first of faults)
        for (const second of [...faults, 'down'] as const)
          for (const arrives of ['before', 'after'] as const)
            for (const elsewhere of [false, true]) {
              const title = `${op} ${first}, then ${second}, late ones arrive ${arrives} the withdrawal`
              const a = replica(t)
              const b = replica(t, { store: a.store })
              if (op === 'swap') await released(a)
              const { n } = a
              a.store.next.push({ op, fault: first })
              // A takeover that was applied shows itself to the next put: that reply gets lost too.
              if (op === 'swap' && first === 'lost') a.store.next.push({ op: 'put', fault: null })
              // A store that is down is asked again while the connection may come back.
              for (let times = second === 'down' ? 4 : 1; times > 0; times--)
                a.store.next.push({ op: first === 'lost' ? 'put' : op, fault: second })
              const answer = await a.get()
              t.match(answer, { code: 'idempotency_store_unavailable', retryAfter: 1 }, title)
              t.equal(a.n, n, 'nothing executed')
              t.equal(a.ports.settler.size, 1)
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
  },
)

void t.test(
  'W05 a claim that no replica has is withdrawn before its 503, and the next retry executes',
  async (t) => {
    for (const op of ['put', 'swap'] as const)
      for (const onStoreUnavailable of ['reject', 'bypass'] as const)
        for (const elsewhere of [false, true]) {
          const title = `${op}, ${onStoreUnavailable}, ${elsewhere ? 'elsewhere' : 'here'}`
          const a = replica(t)
          const b = replica(t, { store: a.store })
          const policy = route({ onStoreUnavailable })
          if (op === 'swap') await released(a)
          const { n } = a
          a.store.next.push({ op, fault: 'unreplicated' })
          const answer = await a.get({ route: policy })
          t.match(
            answer,
            { code: 'idempotency_store_unavailable', retryAfter: 1, detail: /^the claim did not reach/ },
            title,
          )
          t.equal(a.n, n, 'nothing executed, even on a bypass route')
          t.equal(a.ports.settler.size, 0)
          t.equal((await a.store.read(a.id))?.state, 'failed_retryable', 'the client may retry at once')
          const retry = await (elsewhere ? b : a).get({ route: policy })
          t.ok(ok(retry), `${title}: the retry executes`)
          t.match(await a.get({ route: policy }), { replayed: true, bytes: retry.bytes })
          t.equal(a.n + b.n, n + 1)
          t.notOk(a.said('completed').includes('deferred'))
        }
  },
)

void t.test('W05 a withdrawal that the store does not take is kept, and a retry executes', async (t) => {
  for (const fault of ['down', 'lost'] as const) {
    const a = replica(t)
    a.store.next.push({ op: 'put', fault: 'unreplicated' }, { op: 'swap', fault })
    t.match(await a.get(), { code: 'idempotency_store_unavailable' })
    t.equal(a.ports.settler.size, 1)
    t.ok(ok(await a.get()))
    t.equal(a.n, 1)
  }
})

void t.test('L05 a claim whose connection broke is tried again once the connection is back', async (t) => {
  for (const downs of [1, 2, 3]) {
    const a = replica(t)
    a.store.next.push({ op: 'put', fault: 'lost' })
    for (let n = 0; n < downs; n++) a.store.next.push({ op: 'put', fault: 'down' })
    t.ok(ok(await a.get()), `after ${downs}`)
    t.equal(a.n, 1)
    t.equal(a.ports.settler.size, 0)
  }
})

void t.test('L05 a claim gives a broken connection time to come back', async (t) => {
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
    a.store.next.push({ op, fault: 'dropped' })
    a.store.fault = () => (isBack ? null : 'down')
    t.ok(ok(await a.get(sent)), op)
    t.equal(a.n, 1)
  }
})

void t.test('§3.4 a retry withdraws the lost claim itself if the timer has not', async (t) => {
  const a = replica(t)
  a.store.next.push({ op: 'put', fault: 'dropped' }, { op: 'put', fault: 'lost' })
  await refused409(t, a)
  t.ok(ok(await a.get()))
  t.equal(a.ports.settler.size, 0)
})

async function refused409(t: Test, a: Replica): Promise<void> {
  t.equal((await a.get()).code, 'idempotency_store_unavailable')
  t.equal(a.ports.settler.size, 1)
}

void t.test('§3.4 a late claim that arrives during its withdrawal is freed too', async (t) => {
  const a = replica(t)
  await released(a)
  a.store.next.push({ op: 'swap', fault: 'late' }, { op: 'swap', fault: 'late' })
  await refused409(t, a)
  // The withdrawal has looked and found the old record; then the claim arrives; then it writes.
  let swaps = 0
  a.store.gate = async ({ op }) => {
    if (op === 'swap' && ++swaps === 2) await a.store.arrive()
  }
  t.ok(await a.ports.settler.flush())
  t.ok(swaps >= 3)
  t.equal((await a.store.read(a.id))?.state, 'failed_retryable')
  t.ok(ok(await a.get()))
})

void t.test('§3.4 a record that vanishes during a withdrawal stays claimable', async (t) => {
  const a = replica(t)
  await released(a)
  a.store.next.push({ op: 'swap', fault: 'late' }, { op: 'swap', fault: 'dropped' })
  await refused409(t, a)
  let swaps = 0
  a.store.gate = async ({ op }) => {
    if (op === 'swap' && ++swaps === 2) await drop(a)
  }
  t.ok(await a.ports.settler.flush())
  t.same(a.said('completed'), ['released', 'deferred', 'released'])
  a.store.gate = null
  await a.store.arrive()
  t.equal(await a.store.read(a.id), null)
  t.ok(ok(await a.get()))
})

async function drop(a: Replica): Promise<void> {
  const record = await a.store.read(a.id)
  await a.store.inner.remove(a.id, record?.version ?? 0)
}

void t.test(
  '§2 a withdrawal leaves what it found, so the earlier attempt’s late outcome is accepted',
  async (t) => {
    for (const earlier of ['lapsed', 'written down', 'resolved'] as const) {
      const store = new Store()
      const [a, b] = [replica(t, { store }), replica(t, { store })]
      const policy = route({ onLeaseExpired: 'retry' })
      const gate = new Gate()
      a.script.push(gate.before(() => a.responded()))
      const working = a.send({ route: policy })
      await gate.reached
      store.now += LEASE
      if (earlier === 'resolved') await resolve(a, 'retryable')
      if (earlier === 'written down') await resolve(a, 'lapsed')
      store.next.push({ op: 'swap', fault: 'late' }, { op: 'swap', fault: 'late' })
      t.equal((await b.get({ route: policy })).code, 'idempotency_store_unavailable')
      const before = await store.read(a.id)
      t.ok(await b.ports.settler.flush())
      const after = await store.read(a.id)
      t.same({ ...after, version: 0, updatedAt: 0 }, { ...before, version: 0, updatedAt: 0 })
      await store.arrive()
      gate.open()
      const first = seen(await working)
      t.same(a.said('completed'), ['stored'])
      t.match(await b.get({ route: policy }), { bytes: first.bytes, replayed: true })
      t.equal(a.n + b.n, 1)
    }
  },
)

void t.test('§3.4 several lost claims of one key are all withdrawn', async (t) => {
  const a = replica(t)
  let puts = 0
  a.store.fault = ({ op }) =>
    op === 'put' ? ((['late', 'late', 'dropped', 'dropped'] as const)[puts++] ?? null) : null
  const both = await Promise.all([a.get(), a.get()])
  t.same(
    both.map((one) => one.code),
    ['idempotency_store_unavailable', 'idempotency_store_unavailable'],
  )
  t.equal(a.ports.settler.size, 2)
  await a.store.arrive()
  t.equal((await a.store.read(a.id))?.state, 'in_progress', 'the first claim is in the store')
  t.ok(await a.ports.settler.flush())
  t.equal((await a.store.read(a.id))?.state, 'failed_retryable')
  t.ok(ok(await a.get()))
})

void t.test('§3.4 a duplicate’s lost claim does not affect the outcome held meanwhile', async (t) => {
  const a = replica(t)
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded()))
  const working = a.send()
  await gate.reached
  // The duplicate's claim is on its way while the owner finishes and the store goes down.
  const wire = new Gate()
  a.store.gate = async ({ op }) => {
    if (op === 'put') await wire.pass()
  }
  a.store.fault = ({ op }) => (op === 'put' ? 'dropped' : 'down')
  const duplicate = a.send()
  await wire.reached
  gate.open()
  const first = seen(await working)
  t.same(a.said('completed'), ['deferred'])
  wire.open()
  t.match(
    seen(await duplicate),
    { bytes: first.bytes, replayed: true },
    'answered from what this replica holds',
  )
  a.store.gate = null
  t.match(await a.get(), { bytes: first.bytes, replayed: true })
  a.store.fault = () => null
  t.ok(await a.ports.settler.flush())
  t.match(await a.get(), { bytes: first.bytes, replayed: true })
  t.match(await a.store.read(a.id), { state: 'completed' })
  t.equal(a.n, 1)
  t.equal(a.bytes.held, 0)
})

void t.test('§3.4 a pending withdrawal of another payload does not make a retry misuse', async (t) => {
  const a = replica(t)
  const first = await a.get({ body: 'A' })
  a.store.fault = () => 'dropped'
  t.equal((await a.get({ body: 'B' })).code, 'idempotency_store_unavailable')
  a.store.fault = () => 'down'
  t.equal((await refused(t, a, { body: 'A' }, 'idempotency_store_unavailable')).status, 503)
  a.store.fault = () => null
  t.match(await a.get({ body: 'A' }), { bytes: first.bytes, replayed: true })
  t.equal(a.n, 1)
})

void t.test(
  'R01 R03 R08 a request gets 503 if the store is down or full at its claim, and nothing executes',
  async (t) => {
    for (const fault of ['down', 'full'] as const) {
      const a = replica(t)
      a.store.fault = () => fault
      t.match(await refused(t, a, {}, 'idempotency_store_unavailable'), {
        status: 503,
        retryAfter: 1,
        instance: a.id,
        detail: /^the store does not answer; nothing was executed for this request$/,
      })
      t.equal(a.trace.outcome, 'store_unavailable')
      t.same(a.said('claimed'), ['error'])
      t.equal(a.ports.settler.size, 0)
      a.store.fault = () => null
      t.ok(ok(await a.get()))
    }
  },
)

void t.test('an unexpected error of the store is thrown, and the bytes are released', async (t) => {
  const a = replica(t)
  a.store.fault = () => new TypeError('a bug')
  await t.rejects(a.send(), { message: 'a bug' })
  t.match(a.traces.at(-1), { outcome: null, before: null, after: null, fence: null })
  t.equal(a.bytes.held, 0)
  t.equal(a.ports.inFlight.count, 0)
  t.equal(a.n, 0)
})

void t.test(
  'R02 bypass: a request is forwarded, marked and counted as bypassed, and settled once the store is back',
  async (t) => {
    const a = replica(t)
    a.store.fault = () => 'down'
    const first = await a.get({ route: BYPASS })
    t.match(first, { status: 201, proxyHeaders: ['Idempotency-Status', 'bypassed'] })
    t.match(a.trace, { outcome: 'bypassed', after: 'completed', fence: null })
    t.same(a.said('claimed'), ['error'])
    t.same(a.said('completed'), ['deferred'])
    t.ok(a.bytes.held > 0, 'its body is held')
    t.match(
      await a.get({ route: BYPASS }),
      { bytes: first.bytes, replayed: true },
      'answered from the held outcome',
    )
    await refused(t, a, { route: BYPASS, body: 'other' }, 'idempotency_key_reused')
    a.store.fault = () => null
    await until(() => a.ports.settler.size === 0)
    t.same(a.said('completed'), ['deferred', 'stored'])
    t.match(await a.get({ route: BYPASS }), { bytes: first.bytes, replayed: true })
    t.equal(a.n, 1)
    t.equal(a.bytes.held, 0)
  },
)

void t.test('R02 bypass: simultaneous requests with one key execute once on one replica', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'down'
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded()))
  const all = Array.from({ length: 20 }, () => a.get({ route: BYPASS }))
  await gate.reached
  await idle()
  const other = await a.get({ route: BYPASS, body: 'other' })
  t.equal(other.code, 'idempotency_key_reused')
  const running = await a.get({ route: BYPASS })
  t.match(
    running,
    { code: 'idempotency_key_in_progress', retryAfter: 30 },
    'a whole number, even without a store',
  )
  gate.open()
  const answers = await Promise.all(all)
  t.equal(a.n, 1)
  t.equal(answers.filter(ok).length, 1)
  t.equal(answers.filter((one) => one.code === 'idempotency_key_in_progress').length, 19)
})

void t.test('R02 bypass: retries find a run without a claim, even once the store is back', async (t) => {
  for (const before of ['nothing', 'not executed'] as const) {
    const a = replica(t)
    a.store.fault = () => 'down'
    if (before === 'not executed') await released(a, { route: BYPASS })
    const { n } = a
    const gate = new Gate()
    a.script.push(gate.before(() => a.responded()))
    const working = a.send({ route: BYPASS })
    await gate.reached
    a.store.fault = () => null
    await refused(t, a, {}, 'idempotency_key_in_progress')
    await refused(t, a, { body: 'other' }, 'idempotency_key_reused')
    gate.open()
    const first = seen(await working)
    t.ok(await a.ports.settler.flush())
    t.match(await a.get(), { bytes: first.bytes, replayed: true })
    t.equal(a.n, n + 1)
  }
})

void t.test(
  'R02 bypass: a retry finds a run that has its claim although the store has gone down',
  async (t) => {
    const a = replica(t)
    const gate = new Gate()
    a.script.push(gate.before(() => a.responded()))
    const working = a.send({ route: BYPASS })
    await gate.reached
    a.store.fault = () => 'down'
    await refused(t, a, { route: BYPASS }, 'idempotency_key_in_progress')
    await refused(t, a, { route: BYPASS, body: 'other' }, 'idempotency_key_reused')
    gate.open()
    const first = seen(await working)
    t.match(await a.get({ route: BYPASS }), { bytes: first.bytes, replayed: true })
    t.equal(a.n, 1)
  },
)

void t.test('L09 a replica whose lapsed run was taken over replays the newer answer', async (t) => {
  const a = replica(t)
  const b = replica(t, { store: a.store })
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded(201, 'late')))
  const policy = route({ onLeaseExpired: 'retry' })
  const working = a.send({ route: policy })
  await gate.reached
  a.store.now += LEASE
  const retry = await b.get({ route: policy })
  t.ok(ok(retry), 'lapsed')
  t.equal(b.events.filter(([name]) => name === 'leaseExpired').length, 1)
  gate.open()
  seen(await working)
  t.match(await a.get({ route: policy }), { bytes: retry.bytes, replayed: true })
})

void t.test(
  'R02 bypass: after a lost claim the outcome is written as the outcome of that claim',
  async (t) => {
    for (const op of ['put', 'swap'] as const)
      for (const fault of ['lost', 'dropped', 'late'] as const)
        for (const arrives of ['before', 'after'] as const) {
          const a = replica(t)
          if (op === 'swap') await released(a, { route: BYPASS })
          const { n } = a
          let broken = false
          a.store.fault = (call) => {
            if (call.op !== op && !broken) return null
            const now: Fault = broken ? 'down' : fault
            broken = true
            return now
          }
          const first = await a.get({ route: BYPASS })
          t.match(
            first,
            { status: 201, proxyHeaders: ['Idempotency-Status', 'bypassed'] },
            `${op} ${fault} ${arrives}`,
          )
          t.equal(a.trace.fence, null, 'without a fence from the store there is none')
          t.equal(a.asked.at(-1)?.headers[3], '0')
          t.equal(a.said('completed').at(-1), 'deferred')
          a.store.fault = () => null
          if (arrives === 'before') await a.store.arrive()
          t.ok(await a.ports.settler.flush())
          await a.store.arrive()
          t.match(await a.get({ route: BYPASS }), { bytes: first.bytes, replayed: true })
          t.match(await a.store.read(a.id), { state: 'completed', attempts: op === 'swap' ? 2 : 1 })
          t.equal(a.n, n + 1)
          t.equal(a.bytes.held, 0)
          t.equal(a.said('completed').at(-1), 'stored')
        }
  },
)

void t.test('R02 bypass: the outcome is written over a record that says “not executed”', async (t) => {
  const rows = [
    [{ proof: 'unknown', reason: 'x', timedOut: false, status: null }, 'unknown'],
    [{ proof: 'not_sent', reason: 'x' }, 'failed_retryable'],
    [null, 'completed'],
  ] as const
  for (const [reply, state] of rows) {
    const a = replica(t)
    await released(a, { route: BYPASS })
    const { fence } = (await a.store.read(a.id)) as IdempotencyRecord
    a.store.fault = () => 'down'
    a.script.push(reply ?? a.responded())
    await a.get({ route: BYPASS })
    a.store.fault = () => null
    t.ok(await a.ports.settler.flush())
    const grows = state === 'failed_retryable' ? 0 : 1
    t.match(await a.store.read(a.id), { state, fence: fence + grows })
    t.notOk(a.said('completed').includes('stale'))
    t.equal(a.bytes.held, 0)
  }
})

void t.test('R02 bypass: an outcome that loses a race for the record looks again', async (t) => {
  for (const race of ['arrives', 'moves', 'taken'] as const) {
    const a = replica(t)
    const b = replica(t, { store: a.store })
    await released(a, { route: BYPASS })
    a.store.next.push({ op: 'swap', fault: 'late' })
    for (let n = 0; n < 4; n++) a.store.next.push({ op: 'swap', fault: 'down' })
    const first = await a.get({ route: BYPASS })
    t.ok(ok(first))
    let swaps = 0
    a.store.gate = async ({ op }) => {
      if (op !== 'swap' || ++swaps !== 2) return
      if (race === 'arrives') return a.store.arrive()
      if (race === 'moves') return resolve(a, 'retryable')
      await b.get({ body: '{"amount":1}', route: BYPASS })
    }
    t.ok(await a.ports.settler.flush())
    const record = await a.store.read(a.id)
    t.equal(record?.state, 'completed')
    if (race === 'taken') t.equal(a.said('completed').at(-1), 'stale', 'a newer attempt exists')
    else t.match(await b.get({ route: BYPASS }), { bytes: first.bytes, replayed: true })
    t.equal(a.bytes.held, 0)
  }
})

void t.test('R02 bypass: an outcome does not change another attempt’s record', async (t) => {
  const rows = [
    [null, 'stale'],
    [{ proof: 'unknown', reason: 'x', timedOut: false, status: null }, 'stale'],
    [{ proof: 'not_sent', reason: 'x' }, 'deferred'],
  ] as const
  for (const [reply, counted] of rows) {
    const store = new Store()
    const [a, b] = [replica(t, { store }), replica(t, { store })]
    const first = await b.get()
    store.fault = () => 'down'
    a.script.push(reply ?? a.responded(200, 'another'))
    await a.get({ route: BYPASS })
    store.fault = () => null
    const before = await store.dump()
    t.ok(await a.ports.settler.flush())
    t.same(await store.dump(), before)
    t.equal(a.said('completed').at(-1), counted)
    t.equal((await a.get({ route: BYPASS })).bytes, first.bytes)
    t.equal(a.bytes.held, 0)
  }
})

void t.test(
  'R02 bypass: the lost claim of a duplicate answered 409 does not keep the outcome from the store',
  async (t) => {
    const a = replica(t)
    // The duplicate's claim is on its way when the other one begins without a claim.
    const wire = new Gate()
    a.store.gate = async () => {
      a.store.gate = null
      await wire.pass()
    }
    const duplicate = a.send({ route: BYPASS })
    await wire.reached
    a.store.fault = () => 'down'
    const gate = new Gate()
    a.script.push(gate.before(() => a.responded()))
    const working = a.send({ route: BYPASS })
    await gate.reached
    a.store.next.push({ op: 'put', fault: 'dropped' }, { op: 'put', fault: 'late' })
    wire.open()
    t.equal(seen(await duplicate).code, 'idempotency_key_in_progress')
    t.equal(a.ports.settler.size, 1)
    a.store.fault = () => null
    await a.store.arrive()
    t.equal(
      (await a.store.read(a.id))?.state,
      'in_progress',
      'the claim of the request that was answered 409',
    )
    gate.open()
    const first = seen(await working)
    a.store.fault = () => null
    t.ok(await a.ports.settler.flush())
    t.match(await a.get({ route: BYPASS }), { bytes: first.bytes, replayed: true })
    t.equal(a.n, 1)
  },
)

void t.test('R02 X02 bypass: nothing executes for a client that has left', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'dropped'
  const gone = await a.get({ route: BYPASS, gone: () => true })
  t.equal(gone.code, 'idempotency_store_unavailable')
  t.equal(a.n, 0)
  t.equal(a.ports.settler.size, 1, 'its lost claim is withdrawn')
})

void t.test('W09 bypass: nothing executes while the phase of a migration is not known', async (t) => {
  const a = replica(t)
  a.store.fault = () => new OutOfPhase('the phase of the others is not known', false)
  await refused(t, a, { route: BYPASS }, 'idempotency_store_unavailable')
  t.equal(a.ports.settler.size, 0)
})

void t.test('§3 after an unstored not-executed outcome only a bypass route executes', async (t) => {
  const a = replica(t)
  a.script.push(() => {
    a.store.fault = () => 'down'
    return { proof: 'not_sent', reason: 'refused' }
  })
  t.equal((await a.get()).code, 'upstream_unreachable')
  t.same(a.said('completed'), ['deferred'])
  t.match(await refused(t, a, {}, 'idempotency_store_unavailable'), { retryAfter: 1 })
  await refused(t, a, { body: 'other' }, 'idempotency_key_reused')
  a.store.fault = ({ op }) => (op === 'swap' ? 'down' : null)
  t.match(await refused(t, a, {}, 'idempotency_store_unavailable'), { retryAfter: 1 }, 'nothing runs')
  a.store.fault = () => 'down'
  const first = await a.get({ route: BYPASS })
  t.ok(ok(first))
  t.equal(a.trace.outcome, 'bypassed')
  t.match(await a.get({ route: BYPASS }), { bytes: first.bytes, replayed: true })
  a.store.fault = () => null
  t.ok(await a.ports.settler.flush())
  t.match(await a.get(), { bytes: first.bytes, replayed: true })
  t.equal(a.n, 2)
  t.equal(a.bytes.held, 0)
})

void t.test(
  'R04 R05 if the store dies before the completion, the client is answered and no retry executes',
  async (t) => {
    for (const fault of ['down', 'lost', 'dropped', 'late'] as const) {
      const store = new Store()
      const [a, b] = [replica(t, { store }), replica(t, { store })]
      a.script.push(() => {
        let swapped = false
        store.fault = ({ op }) => {
          if (op === 'swap' && !swapped) {
            swapped = true
            return fault
          }
          return 'down'
        }
        return a.responded()
      })
      const first = await a.get({ route: route({ statusHeader: true }) })
      t.match(first, { status: 201, proxyHeaders: ['Idempotency-Status', 'executed'] })
      t.equal(a.trace.outcome, 'executed')
      t.same(a.said('completed'), ['deferred'])
      t.match(await a.get(), { bytes: first.bytes, replayed: true }, 'this replica holds it')
      t.equal((await b.get()).code, 'idempotency_store_unavailable')
      store.fault = () => null
      const other = await b.get()
      t.ok(other.replayed || other.code === 'idempotency_key_in_progress')
      await store.arrive()
      await until(() => a.ports.settler.size === 0)
      t.same(a.said('completed'), ['deferred', 'stored'], `${fault}: a duplicate completion is idempotent`)
      t.match(await b.get(), { bytes: first.bytes, replayed: true })
      t.equal(a.n + b.n, 1)
      t.equal(a.bytes.held, 0)
      const record = await store.read(a.id)
      await store.arrive()
      t.same(await store.read(a.id), record)
    }
  },
)

void t.test('R05 the write is retried until the store is back', async (t) => {
  const a = replica(t)
  a.script.push(() => {
    a.store.fault = () => 'down'
    return a.responded()
  })
  const first = await a.get()
  const { calls } = a.store
  await until(() => a.store.calls >= calls + 2)
  t.equal(a.ports.settler.size, 1)
  a.store.fault = () => null
  await until(() => a.ports.settler.size === 0)
  t.same(a.said('completed'), ['deferred', 'stored'])
  t.match(await a.get(), { bytes: first.bytes, replayed: true })
})

void t.test('R04 unknown and not-executed outcomes survive a store that is down at their end', async (t) => {
  const rows = [
    [
      { proof: 'unknown', reason: 'x', timedOut: false, status: null },
      'unknown',
      'idempotency_outcome_unknown',
    ],
    [{ proof: 'not_sent', reason: 'x' }, 'failed_retryable', 'idempotency_store_unavailable'],
  ] as const
  for (const [reply, state, code] of rows)
    for (const fault of ['down', 'lost'] as const) {
      const a = replica(t)
      a.script.push(() => {
        a.store.next.push({ op: 'swap', fault })
        a.store.fault = () => 'down'
        return reply
      })
      t.equal((await a.get()).status, 502)
      t.match(await refused(t, a, {}, code), { retryAfter: 1 })
      a.store.fault = () => null
      t.ok(await a.ports.settler.flush())
      t.equal((await a.store.read(a.id))?.state, state)
    }
})

void t.test(
  'R05 an outcome that cannot be stored is given up and reported when its claim would be dropped',
  async (t) => {
    const a = replica(t)
    a.script.push(() => {
      a.store.fault = () => 'down'
      return a.responded()
    })
    await a.get({ route: route({ unresolvedTtl: -1 }) })
    t.ok(a.bytes.held > 0)
    t.ok(await a.ports.settler.flush())
    t.equal(a.troubles().at(-1), 'an outcome could not be stored and is lost')
    t.equal(a.bytes.held, 0)
  },
)

void t.test(
  'R05 an outcome is retried even after the ttl, and its retention begins when it is stored',
  async (t) => {
    const brief = route({ ttl: -1 })
    const a = replica(t)
    a.store.fault = () => 'dropped'
    await a.get({ route: brief })
    a.store.fault = () => null
    a.script.push(() => {
      a.store.fault = () => 'down'
      return { proof: 'unknown', reason: 'x', timedOut: false, status: null }
    })
    await a.get({ route: brief, key: 'another' })
    a.store.fault = () => 'down'
    t.notOk(await a.ports.settler.flush())
    t.equal(a.ports.settler.size, 2)

    const b = replica(t)
    const short = route({ ttl: SECOND, ttlFailed: SECOND })
    b.script.push(() => {
      b.store.fault = () => 'down'
      return b.responded()
    })
    const first = await b.get({ route: short })
    // Long after the ttl, by both clocks.
    b.store.now += HOUR
    const { now } = performance
    performance.now = () => now.call(performance) + HOUR
    t.teardown(() => {
      performance.now = now
    })
    t.notOk(await b.ports.settler.flush())
    t.match(await b.get({ route: short }), { replayed: true, bytes: first.bytes })
    b.store.fault = () => null
    t.ok(await b.ports.settler.flush())
    t.match(await b.get({ route: short }), { replayed: true, bytes: first.bytes })
    t.equal(b.n, 1)
    b.store.now += SECOND
    t.equal(await b.store.read(b.id), null, 'from when the store took it')
  },
)

void t.test('R05 an outcome that fails with a bug is given up and reported', async (t) => {
  const a = replica(t)
  a.script.push(() => {
    a.store.fault = () => new RangeError('a bug')
    return a.responded()
  })
  t.equal((await a.get()).status, 201)
  t.equal(a.ports.settler.size, 1)
  t.ok(await a.ports.settler.flush())
  t.equal(a.troubles().at(-1), 'an outcome could not be stored and is lost')
  t.equal(a.bytes.held, 0)
})

void t.test('R05 an outcome that the store never takes does not hold up the others', async (t) => {
  const a = replica(t)
  for (const key of ['first', 'second', 'third']) {
    a.script.push(() => {
      a.store.fault = () => 'down'
      return a.responded(201, key)
    })
    await a.get({ key })
    a.store.fault = () => null
  }
  const [poison] = [...a.store.ids]
  t.equal(a.ports.settler.size, 3)
  a.store.fault = ({ id }) => (id === poison ? 'dropped' : null)
  t.notOk(await a.ports.settler.flush())
  t.notOk(await a.ports.settler.flush())
  t.equal(a.ports.settler.size, 1)
  for (const key of ['fourth', 'fifth']) {
    a.script.push(() => {
      a.store.fault = () => 'down'
      return a.responded(201, key)
    })
    await a.get({ key })
  }
  a.store.fault = ({ id, op }) => (id === poison && op === 'swap' ? 'full' : null)
  t.notOk(await a.ports.settler.flush())
  t.equal(a.ports.settler.size, 1, 'nor does one that the store has no room for')
  a.store.fault = () => null
  t.ok(await a.ports.settler.flush())
  t.same(
    await Promise.all(
      ['first', 'second', 'third'].map(async (key) => (await a.get({ key })).bytes?.includes(key)),
    ),
    [true, true, true],
  )
  t.equal(a.bytes.held, 0)
})

void t.test('R05 an outcome is written once, however many retries ask for it', async (t) => {
  const a = replica(t)
  a.script.push(() => {
    a.store.fault = () => 'down'
    return { proof: 'not_sent', reason: 'x' }
  })
  await a.get()
  a.store.fault = () => null
  const retries = await Promise.all([a.get(), a.get(), a.get(), a.ports.settler.flush()])
  t.ok(retries[3])
  t.equal(a.n, 2)
  t.same(a.said('completed'), ['deferred', 'released', 'stored'])
})

void t.test(
  '§3 a full store keeps an outcome without its body; if even that fails, it is held whole',
  async (t) => {
    const a = replica(t)
    a.script.push(() => {
      a.store.next.push({ op: 'swap', fault: 'full' })
      return a.responded(201)
    })
    const policy = route({ statusHeader: true })
    const first = await a.get({ route: policy })
    t.match(first, { status: 201, bytes: /p1/ }, 'never answered overloaded')
    t.equal(first.proxyHeaders[2], 'Idempotency-Expires')
    t.same(a.said('completed'), ['too_large'])
    t.match(await refused(t, a, {}, 'idempotency_response_unavailable'), { original: { status: 201 } })
    t.equal(a.bytes.held, 0)

    const b = replica(t)
    b.script.push(() => {
      b.store.fault = ({ op }) => (op === 'swap' ? 'full' : null)
      return b.responded(201)
    })
    const held = await b.get()
    t.match(await b.get(), { bytes: held.bytes, replayed: true }, 'not even that fits: held whole')
    b.store.fault = () => null
    t.ok(await b.ports.settler.flush())
    t.match(await b.get(), { bytes: held.bytes, replayed: true }, 'room again: nothing was thrown away')
    t.equal(b.bytes.held, 0)

    const c = replica(t)
    c.script.push(() => {
      c.store.next.push({ op: 'swap', fault: 'full' }, { op: 'swap', fault: new Error('a bug') })
      return c.responded(201)
    })
    const kept = await c.get()
    t.match(await c.get(), { bytes: kept.bytes, replayed: true }, 'held whole, whatever else goes wrong')
    t.ok(await c.ports.settler.flush())
    t.equal(c.bytes.held, 0)
  },
)

void t.test(
  'L11 an outcome whose record is gone is written again, counted and logged, unless claimed since',
  async (t) => {
    for (const claimedAgain of [false, true]) {
      const store = new Store()
      const [a, b] = [replica(t, { store }), replica(t, { store })]
      a.script.push(async () => {
        await drop(a)
        if (claimedAgain) {
          // Absent when the outcome looks, claimed by somebody else before it is written.
          let puts = 0
          store.gate = async ({ op }) => {
            if (op === 'put' && ++puts === 1) await b.get()
          }
        }
        return a.responded(201, 'of the first')
      })
      const first = await a.get()
      const record = await store.read(a.id)
      if (claimedAgain) {
        t.same(a.said('completed'), ['stale'])
        t.notOk((await b.get()).bytes?.includes('of the first'))
      } else {
        t.same(a.said('completed'), ['recovered'])
        t.same(a.troubles(), [
          'the store had lost the record of a running request; its outcome was written again',
        ])
        t.equal(record?.fence, a.traces[0]?.fence)
        t.match(await b.get(), { bytes: first.bytes, replayed: true })
        t.equal(b.n, 0)
      }
    }
    const c = replica(t)
    c.script.push(async () => {
      await drop(c)
      c.store.next.push({ op: 'put', fault: 'lost' })
      return c.responded()
    })
    const first = await c.get()
    t.ok(await c.ports.settler.flush())
    t.match(await c.get(), { bytes: first.bytes, replayed: true }, 'the same if its reply is lost')
  },
)

/** Decides an `unknown` record as an operator's command or a sweeper (`lapsed`) does. A completed resolution removes the owner's token. */
async function resolve(a: Replica, outcome: 'retryable' | 'completed' | 'lapsed'): Promise<void> {
  const { record } = orThrow(await a.records.get(a.id))
  if (record === null) throw new Error('no record')
  const spans = { dueIn: TTL, dropIn: TTL }
  const result: CompletedResponse = { kept: false, why: 'outcome_only', status: 200, location: null }
  const draft =
    outcome === 'retryable'
      ? ({ ...record, state: 'failed_retryable' } as const)
      : outcome === 'lapsed'
        ? ({ ...record, state: 'unknown', leaseExpired: true, status: null, reconciliation: null } as const)
        : ({ ...record, state: 'completed', result, token: Buffer.alloc(16) } as const)
  const done = await a.store.inner.swap(a.id, { version: record.version }, encodeDraft(draft), spans, false)
  if (!done.done) throw new Error('not resolved')
}

void t.test(
  'O03 O04 L09 a late outcome overrides a retryable resolution, but not a completed one',
  async (t) => {
    for (const resolution of ['retryable', 'completed'] as const)
      for (const settleFault of [null, 'down'] as const) {
        const a = replica(t)
        const gate = new Gate()
        a.script.push(gate.before(() => a.responded()))
        const working = a.send()
        await gate.reached
        a.store.now += LEASE
        await refused(t, a, {}, 'idempotency_outcome_unknown')
        await resolve(a, resolution)
        const before = await a.store.dump()
        if (settleFault !== null) a.store.next.push({ op: 'swap', fault: settleFault })
        gate.open()
        const own = seen(await working)
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
  },
)

void t.test('O03 a retry that claimed after the resolution wins over the late outcome', async (t) => {
  const a = replica(t)
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded(201, 'late')))
  const working = a.send()
  await gate.reached
  a.store.now += LEASE
  await resolve(a, 'retryable')
  const b = replica(t, { store: a.store })
  const retry = await b.get()
  t.ok(ok(retry))
  gate.open()
  seen(await working)
  t.same(a.said('completed'), ['stale'])
  t.match(await a.get(), { bytes: retry.bytes, replayed: true })
})

void t.test('§2 an outcome does not overwrite a record that cannot be read', async (t) => {
  const a = replica(t)
  let broken = Buffer.alloc(0)
  a.script.push(async () => {
    const { bytes } = await a.store.inner.get(a.id)
    broken = Buffer.from(bytes as Buffer)
    broken[2] = 9
    await drop(a)
    await a.store.inner.put(a.id, broken, { dueIn: HOUR, dropIn: TTL })
    return a.responded()
  })
  t.equal((await a.get()).status, 201)
  t.same(a.troubles(), ['the stored record cannot be read; it is left as it is'])
  t.equal((await a.store.inner.get(a.id)).bytes?.[2], 9)
  await refused(t, a, {}, 'idempotency_store_unavailable')
  t.equal(a.bytes.held, 0)
})

void t.test('a claim that others keep winning is given up, and a later retry executes', async (t) => {
  const store = new Store()
  const [a, b] = [replica(t, { store }), replica(t, { store })]
  await released(a)
  let moved = 0
  store.gate = async ({ op }: StoreCall) => {
    if (op === 'swap') {
      moved++
      await resolve(a, 'retryable')
    }
  }
  t.equal((await b.get()).code, 'idempotency_store_unavailable')
  t.ok(moved > 1)
  t.equal(b.ports.settler.size, 0)
  store.gate = null
  t.ok(ok(await b.get()))
})

void t.test('a record that vanishes under a takeover is claimed as new', async (t) => {
  const a = replica(t)
  await released(a)
  a.store.gate = async ({ op }) => {
    if (op !== 'swap') return
    a.store.gate = null
    await drop(a)
  }
  t.ok(ok(await a.get()))
  t.same(a.said('claimed'), ['created', 'created'])
  t.equal(a.trace.before, 'absent')
  t.match(await a.store.read(a.id), { attempts: 1 })
})

void t.test('a record past its retention is claimed anew, even if the store still returns it', async (t) => {
  const a = replica(t)
  await a.get()
  const wire = a.store.wire()
  let shown = 0
  const behind = replica(t, { store: a.store })
  const put = wire.put.bind(wire)
  behind.records.claim = async (id: RecordId, draft, spans) => {
    if (shown++ > 0)
      return new (Object.getPrototypeOf(behind.records).constructor)({ ...wire, put }).claim(id, draft, spans)
    const { record } = orThrow(await a.records.get(id))
    if (record === null) throw new Error('no record')
    a.store.now += TTL
    return { kind: 'exists', now: a.store.now, record }
  }
  t.ok(ok(await behind.get()))
  t.equal(shown, 2)
})

void t.test(
  'X02 a client that leaves before its claim succeeds executes nothing, and the claim is freed',
  async (t) => {
    for (const fault of [null, 'down'] as const) {
      const a = replica(t)
      if (fault !== null) a.store.next.push({ op: 'swap', fault })
      t.match(await a.get({ gone: () => true }), { status: null, code: null })
      t.match(a.trace, { outcome: null, before: 'absent', after: 'failed_retryable' })
      t.equal(a.trace.status, null)
      t.equal(a.n, 0)
      t.ok(await a.ports.settler.flush())
      t.equal((await a.store.read(a.id))?.state, 'failed_retryable')
      t.ok(ok(await a.get()))
      t.equal(a.bytes.held, 0)
    }
  },
)

void t.test('an unexpected error while forwarding is thrown, and the outcome is unknown', async (t) => {
  const a = replica(t)
  a.script.push(new TypeError('a bug'))
  await t.rejects(a.send(), { message: 'a bug' })
  t.match(await a.store.read(a.id), { state: 'unknown', status: null })
  t.match(a.traces.at(-1), { outcome: null, before: 'absent', after: 'unknown', fence: Number })
  await refused(t, a, {}, 'idempotency_outcome_unknown')
  t.equal(a.bytes.held, 0)
  t.equal(a.ports.running.size, 0)
  t.equal(a.ports.leases.size, 0)
})

void t.test('a bug after a bypass is reported without a fence', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'down'
  a.script.push(new TypeError('a bug'))
  await t.rejects(a.send({ route: BYPASS }), { message: 'a bug' })
  t.match(a.traces.at(-1), { outcome: null, before: null, after: 'unknown', fence: null })
  t.equal(a.ports.running.size, 0)
})

void t.test('a bug while the outcome is written still releases the attempt', async (t) => {
  const a = replica(t)
  a.ports.settler.settle = () => Promise.reject(new TypeError('a bug'))
  await t.rejects(a.send(), { message: 'a bug' })
  t.match(a.traces.at(-1), { outcome: null, before: 'absent', after: 'in_progress', fence: Number })
  t.equal(a.ports.running.size, 0)
  t.equal(a.ports.leases.size, 0)
  t.equal(a.ports.inFlight.count, 0)
})

void t.test('a request executes once and replays on a store that answers synchronously', async (t) => {
  const a = replica(t)
  const records = new Records(a.store.inner)
  Object.assign(a.ports, { records, settler: new Settler(records, a.ports.observer, null) })
  a.script.push(() => a.responded())
  const first = await a.get()
  t.equal(first.status, 201)
  t.match(await a.get(), { status: 201, bytes: first.bytes, replayed: true })
  t.equal(a.n, 1)
  t.equal(a.bytes.held, 0)
})

void t.test('an outcome is held if the store throws synchronously', async (t) => {
  const a = replica(t)
  const swap = (): never => {
    throw new TypeError('a bug')
  }
  const settler = new Settler(new Records({ ...a.store.inner, swap }), a.ports.observer, null)
  Object.assign(a.ports, { settler })
  a.script.push(() => a.responded())
  t.equal((await a.get()).status, 201)
  t.equal(settler.size, 1)
  await settler.close()
  t.equal(a.bytes.held, 0)
})

void t.test('close reports what is lost and releases the bytes without waiting for the store', async (t) => {
  for (const fault of [null, 'down'] as const) await closing(t, fault)
})

async function closing(t: Test, fault: Fault | null): Promise<void> {
  const a = replica(t)
  a.script.push(() => {
    a.store.fault = () => 'down'
    return a.responded()
  })
  await a.get()
  const wire = new Gate()
  a.store.gate = () => wire.pass()
  const flushing = a.ports.settler.flush()
  await wire.reached
  a.store.fault = () => fault
  await a.ports.settler.close()
  t.equal(a.troubles().at(-1), 'an outcome could not be stored and is lost')
  t.equal(a.bytes.held, 0)
  t.equal(a.ports.settler.size, 0)
  wire.open()
  t.ok(await flushing)
  t.equal(a.bytes.held, 0)
}

void t.test('a stream under bypass is settled at its end', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'down'
  const stream = new Stream()
  a.script.push(stream.reply())
  t.match(await a.get({ route: BYPASS }), { status: 200, proxyHeaders: ['Idempotency-Status', 'bypassed'] })
  await a.get({ route: BYPASS }).then((one) => t.equal(one.code, 'idempotency_key_in_progress'))
  stream.end('complete')
  await until(() => a.ports.settler.size === 1)
  a.store.fault = () => null
  t.ok(await a.ports.settler.flush())
  await refused(t, a, { route: BYPASS }, 'idempotency_response_unavailable')
})

void t.test(
  'L11 a retry executes nothing if the store lost the record of a run still in progress here',
  async (t) => {
    for (const fault of [null, 'down'] as const) {
      const a = replica(t)
      const gate = new Gate()
      a.script.push(gate.before(() => a.responded()))
      const first = a.send({})
      await gate.reached
      const lost = await a.store.read(a.id)
      t.ok(await a.store.inner.remove(a.id, lost?.version ?? 0))
      if (fault !== null) a.store.next.push({ op: 'swap', fault })
      a.store.gate = ({ op }) => (op === 'swap' ? idle() : Promise.resolve())
      const retry = await a.get()
      t.match(retry, { code: 'idempotency_key_in_progress', status: 409 })
      const state = fault === null ? 'in_progress' : 'unknown'
      t.match(await a.store.read(a.id), { state }, 'its claim is over before it is answered')
      t.equal((await a.get({ body: 'other' })).code, 'idempotency_key_reused')
      gate.open()
      t.ok(ok(seen(await first)))
      t.equal(a.n, 1, 'executed once')
      if (fault === null) t.match(await a.get(), { replayed: true })
      else t.equal((await a.get()).code, 'idempotency_outcome_unknown', 'nobody executes it')
      t.ok(a.said('trouble').length > 0)
    }
  },
)

void t.test('a retry executes nothing if a lost record cannot be given back', async (t) => {
  const a = replica(t)
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded()))
  const first = a.send({})
  await gate.reached
  const lost = await a.store.read(a.id)
  await a.store.inner.remove(a.id, lost?.version ?? 0)
  a.store.fault = ({ op }) => (op === 'swap' ? new CorruptRecord('unreadable') : null)
  t.equal((await a.get()).code, 'idempotency_key_in_progress')
  const claim = await a.store.read(a.id)
  await a.store.inner.remove(a.id, claim?.version ?? 0)
  a.store.fault = ({ op }) => (op === 'swap' ? new TypeError('a bug') : null)
  await t.rejects(a.get(), { message: 'a bug' })
  a.store.fault = () => null
  gate.open()
  await first
  t.equal(a.n, 1)
})

void t.test('a replay without room is refused, and one with room gives it back', async (t) => {
  const a = replica(t)
  const first = await a.get()
  t.ok(a.budget.take(1024 * 1024))
  t.match(await a.get(), { code: 'overloaded', status: 503, retryAfter: 1, instance: a.id })
  t.match(a.trace, { outcome: 'overloaded', before: 'completed', after: 'completed' })
  a.budget.give(1024 * 1024)
  t.match(await a.get(), { replayed: true, bytes: first.bytes })
  t.equal(a.budget.held, 0)
  t.equal(a.n, 1)
})

void t.test(
  'R02 F20 bypass: an unchanged request replays although the fingerprint recipe changed',
  async (t) => {
    const a = replica(t)
    await released(a, { route: BYPASS })
    const changed = route({
      onStoreUnavailable: 'bypass',
      fingerprint: { body: 'raw', ignore: [], only: [], headers: [], query: 'include' },
    })
    a.store.next.push({ op: 'put', fault: 'down' })
    const first = await a.get({ route: changed })
    t.ok(ok(first))
    t.ok(await a.ports.settler.flush())
    t.match(await a.get({ route: changed }), { bytes: first.bytes, replayed: true })
  },
)

void t.test(
  'V04 a refusal without a claim does not tell a proxy in front that a retry is recognised',
  async (t) => {
    for (const down of [true, false]) {
      const a = replica(t)
      a.store.fault = () => (down ? 'down' : null)
      a.script.push({ proof: 'unknown', reason: 'cut', timedOut: false, status: null })
      const scope = scopeOf(BYPASS)
      t.match(await a.get({ route: BYPASS }), { code: 'upstream_failed', scope: down ? 'none' : scope })
      const slow = new Gate()
      a.script.push(slow.before(() => a.responded()))
      const impatient = { ...BYPASS, respondWithin: 1 }
      const answer = await a.get({ route: impatient, key: 'other-0123456789abcdef' })
      t.match(answer, { code: 'upstream_slow', scope: down ? 'none' : scope })
      t.strictSame(a.trace.fence, down ? null : a.store.now)
      slow.open()
    }
  },
)
