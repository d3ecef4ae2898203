import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import type { OutcomeDraft, PendingOutcome } from '../../src/core/settle.ts'
import type { Execution } from '../../src/protect/request.ts'
import { spoolRoom } from '../../src/protect/settler.ts'
import { CorruptRecord } from '../../src/store/register.ts'
import type { KeptOutcome, Outbox } from '../../src/store/spool/outbox.ts'
import { draft, newId, newToken, response, SPANS } from '../store/fixtures.ts'
import {
  BROKEN,
  Gate,
  hurried,
  idle,
  LEASE,
  NOT_SENT,
  overdue,
  type Replica,
  replica,
  route,
  SECOND,
  type Sent,
  TTL,
} from './harness.ts'

const MiB = 1024 ** 2
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

const KEPT: KeptOutcome = { done: Promise.resolve('kept' as const), drop: () => {} }

/** Gives a replica outcomes that an earlier process left. */
function restore(a: Replica, all: readonly PendingOutcome[], kept = KEPT): void {
  a.ports.settler.restore(
    all.map((unsettled) => ({ unsettled, kept })),
    (bytes) => a.bytes.take(bytes),
  )
}

/** Executes, and finds the store failing when the outcome is there. */
async function deferred(a: Replica, over: Sent = {}): Promise<RecordId> {
  let id = '' as RecordId
  a.script.push(({ headers }) => {
    id = headers[5] as RecordId
    a.store.fault = () => 'down'
    return a.responded()
  })
  await a.get(over)
  a.store.fault = () => null
  return id
}

void t.test('R05 pauses between retries grow, and begin anew once all is stored', async (t) => {
  for (const [fault, most] of [
    ['full', 5 * SECOND],
    ['down', SECOND / 2],
  ] as const) {
    const a = replica(t)
    const pauses = hurried(t)
    a.store.fault = () => (pauses.length < 10 ? fault : null)
    for (const round of ['first', 'second']) {
      pauses.length = 0
      restore(a, [pending('unknown')])
      while (a.ports.settler.size > 0) await new Promise((next) => setImmediate(next))
      const [first = 0] = pauses
      t.ok(first <= 200, `${fault}, ${round}: the first retry comes soon`)
      t.ok(
        pauses.every((pause, n) => n === 0 || pause === Math.min(2 * (pauses[n - 1] ?? 0), most)),
        `${fault}, ${round}: ${pauses.join(' ')}`,
      )
      t.equal(pauses.at(-1), most)
    }
  }
})

void t.test('Y21 what is held is written as soon as the store is back, and pauses begin anew', async (t) => {
  const a = replica(t)
  const { settler } = a.ports
  settler.storeIsBack()
  t.equal(a.store.calls, 0, 'nothing is held')
  const { setTimeout: real } = globalThis
  const pauses: number[] = []
  // A retry that is due later never comes.
  t.intercept(globalThis, 'setTimeout', {
    value: (call: () => void, time: number) => {
      pauses.push(time)
      return real(() => pauses.length < 5 && call(), 0)
    },
  })
  a.store.fault = () => 'full'
  restore(a, [pending('completed')])
  while (pauses.length < 5) await new Promise((next) => setImmediate(next))
  t.ok((pauses.at(-1) ?? 0) > SECOND)
  settler.storeIsBack()
  while (pauses.length < 6) await new Promise((next) => setImmediate(next))
  t.equal(pauses.at(-1), 200, 'it was not back yet')
  a.store.fault = () => null
  settler.storeIsBack()
  while (settler.size > 0) await new Promise((next) => setImmediate(next))
  t.equal(pauses.length, 6)
})

void t.test('§2 of several held outcomes of a record, an answer comes first, then unknown', async (t) => {
  const id = newId()
  for (const [order, state] of [
    [['failed_retryable', 'unknown', 'completed'], 'completed'],
    [['completed', 'unknown'], 'completed'],
    [['failed_retryable', 'unknown'], 'unknown'],
    [['unknown', 'failed_retryable'], 'unknown'],
    [['failed_retryable'], 'failed_retryable'],
    [[], undefined],
  ] as const) {
    const a = replica(t)
    restore(
      a,
      order.map((one) => pending(one, { id })),
    )
    restore(a, [pending('failed_retryable', { id, withdrawn: true, claimed: false })])
    t.equal(a.ports.settler.held(id)?.state, state, order.join(', '))
    t.ok(a.ports.settler.holds(id))
    await a.ports.settler.close()
    t.notOk(a.ports.settler.holds(id))
  }
})

void t.test('R05 a record’s own outcome is written though others cannot be', async (t) => {
  const a = replica(t)
  const { settler } = a.ports
  const [one, other] = [await deferred(a, { key: 'one' }), await deferred(a, { key: 'other' })]
  a.store.fault = ({ id }) => (id === other ? 'down' : null)
  t.equal(await settler.flush(one), true)
  t.notOk(settler.holds(one))
  t.equal(await settler.flush(other), false)
  t.match(await a.get({ key: 'one' }), { status: 201, replayed: true })
})

void t.test('R05 a store that is down is asked for one outcome at a time, each in its turn', async (t) => {
  const a = replica(t)
  const all = [pending('unknown'), pending('completed'), pending('unknown')]
  restore(a, all)
  const asked: unknown[] = []
  a.store.fault = ({ id }) => {
    asked.push(id)
    return 'down'
  }
  for (let n = 0; n < 4; n++) t.equal(await a.ports.settler.flush(), false)
  t.same(
    asked,
    [0, 1, 2, 0].map((n) => all[n]?.id),
  )
})

void t.test('§3.4 a withdrawn claim says why in its record', async (t) => {
  for (const [fault, why] of [
    ['lost', 'its reply was lost'],
    ['unreplicated', 'its replicas did not have it'],
  ] as const) {
    const a = replica(t)
    a.store.next.push({ op: 'put', fault })
    if (fault === 'lost') a.store.next.push({ op: 'put', fault: 'dropped' })
    t.equal((await a.get()).code, 'idempotency_store_unavailable')
    t.ok(await a.ports.settler.flush())
    const lastError = `the claim was withdrawn: ${why}`
    t.match(await a.store.read(a.id), { state: 'failed_retryable', lastError })
  }
})

void t.test('R02 bypass: a late takeover is refused once its request proves not sent', async (t) => {
  for (const lapsed of [false, true]) {
    const a = replica(t)
    const policy = route({ onStoreUnavailable: 'bypass', onLeaseExpired: 'retry' })
    if (lapsed) {
      const silent = replica(t, { store: a.store, forward: () => new Promise(() => {}) })
      void silent.send({ route: policy })
      await idle()
      a.store.now += LEASE
    } else {
      a.script.push(NOT_SENT)
      await a.get({ route: policy })
    }
    a.store.fails('swap', 'late')
    a.store.fault = ({ op }) => (op === 'swap' ? 'dropped' : null)
    a.script.push(NOT_SENT)
    t.equal((await a.get({ route: policy })).code, 'upstream_unreachable')
    const before = await a.store.read(a.id)
    t.ok(await a.storeIsBack())
    await a.store.arrive()
    t.match(await a.store.read(a.id), { state: before?.state, fence: before?.fence, attempts: 1 })
    t.equal(a.said('completed').at(-1), 'released')
    t.match(await a.get({ route: policy }), { status: 201, replayed: false }, 'a retry executes')
  }
})

void t.test('§3.4 a withdrawal is kept while the store does not answer, whatever it was asked', async (t) => {
  // It finds the record that the takeover expected, and rewrites it.
  for (const at of [1, 2]) {
    const a = replica(t)
    a.script.push(NOT_SENT)
    await a.get()
    a.store.fails('swap', 'late', 'dropped')
    t.equal((await a.get()).code, 'idempotency_store_unavailable')
    let calls = 0
    a.store.fault = () => (++calls === at ? 'down' : null)
    t.equal(await a.ports.settler.flush(), false, `call ${at}`)
    t.ok(await a.ports.settler.flush())
    await a.store.arrive()
    t.equal((await a.store.read(a.id))?.state, 'failed_retryable')
  }
})

void t.test('§3 an outcome without a body waits for room in the store, too', async (t) => {
  for (const state of ['unknown', 'failed_retryable'] as const) {
    const a = replica(t)
    const one = pending(state, { claimed: false })
    restore(a, [one])
    a.store.fault = () => 'full'
    t.notOk(await a.ports.settler.flush(), state)
    t.ok(await a.storeIsBack())
    t.match(await a.store.read(one.id), { state })
    t.same(a.troubles(), [])
  }
})

/** The execution of a request whose upstream works. */
async function under(t: Test, a: Replica, over: Sent = {}): Promise<{ readonly execution: Execution }> {
  const run = await a.working(over, () => BROKEN)
  const execution = a.ports.running.get(a.id)
  if (execution === undefined) throw new Error('nothing runs')
  t.teardown(() => run.open())
  return { execution }
}

/** Counts how often the bytes of a body are given back. */
function counting() {
  const released = { times: 0, release: () => void released.times++ }
  return released
}

const ANSWER = { kind: 'completed', result: response() } as const
const NOTHING = { kind: 'not_executed', reason: 'refused' } as const
const UNCERTAIN = { kind: 'unknown', reason: 'reset', status: null } as const

void t.test('§2 §13 an outcome is stored, counted and left for those who wait', async (t) => {
  const without = (why: 'too_large' | 'outcome_only') =>
    ({ kind: 'completed', result: { kept: false, why, status: 200, location: null } }) as const
  for (const [outcome, state, counted] of [
    [ANSWER, 'completed', 'stored'],
    [without('outcome_only'), 'completed', 'stored'],
    [without('too_large'), 'completed', 'too_large'],
    [NOTHING, 'failed_retryable', 'released'],
    [UNCERTAIN, 'unknown', 'unknown'],
  ] as const)
    for (const store of ['up', 'down', 'empty', 'unreadable'] as const) {
      const a = replica(t)
      const { execution } = await under(t, a)
      const bytes = counting()
      if (store === 'down') a.store.fault = () => 'down'
      if (store === 'empty') await a.store.restore(a.id, null)
      if (store === 'unreadable') a.store.fault = () => new CorruptRecord('x')
      const settled = await a.ports.settler.settle(execution, outcome, bytes.release)
      const name = `${state}, the store is ${store}`
      const isStored = store === 'up' || store === 'empty'
      const expiresAt = isStored && state === 'completed' ? a.store.now + TTL : null
      t.match(settled, { kind: 'settled', state, expiresAt, recorded: null }, name)
      const isLeft = store === 'down' || (isStored && state !== 'unknown')
      t.equal(settled.left?.state ?? null, isLeft ? state : null, name)
      const word = { up: counted, down: 'deferred', empty: 'recovered', unreadable: undefined }[store]
      t.equal(a.said('completed').at(-1), word, name)
      t.equal(bytes.times, store === 'down' ? 0 : 1, name)
      t.equal(a.troubles().length, store === 'up' ? 0 : 1, name)
      t.equal(a.ports.settler.size, store === 'down' ? 1 : 0)
      if (isStored) t.match(await a.store.read(a.id), { state, fence: execution.attempt.fence })
    }
})

/** A spool under the test's control. */
function spool() {
  const disk = Promise.withResolvers<Awaited<KeptOutcome['done']>>()
  const said = { kept: 0, dropped: 0 }
  const outbox = {
    keep: () => {
      said.kept++
      return { done: disk.promise, drop: () => void said.dropped++ }
    },
  } as unknown as Outbox
  return { outbox, disk, said }
}

void t.test('§7 an outcome is told once it is on disk, and dropped from it once it is stored', async (t) => {
  // Until then nothing but the test tries to store it again.
  overdue(t, 100)
  const { outbox, disk, said } = spool()
  const a = replica(t, { outbox })
  const { settler } = a.ports
  const { execution } = await under(t, a)
  t.equal(settler.onDisk(a.id), null)
  a.store.fails('swap', 'down')
  const told: string[] = []
  const settling = Promise.resolve(settler.settle(execution, ANSWER, () => {})).then(() => told.push('owner'))
  await idle()
  const waiting = Promise.resolve(settler.onDisk(a.id)).then(() => told.push('retry'))
  await idle()
  t.same(told, [])
  disk.resolve('kept')
  await Promise.all([settling, waiting])
  t.equal(settler.onDisk(a.id), null, 'nothing to wait for any more')
  t.equal(a.troubles().length, 1, 'the store did not take it')
  t.same(said, { kept: 1, dropped: 0 })
  t.ok(await settler.flush())
  t.same(said, { kept: 1, dropped: 1 })
})

void t.test('§7 an outcome that the disk does not take is told after 500 ms, and reported', async (t) => {
  for (const end of ['full', 'hanging'] as const) {
    const { outbox, disk } = spool()
    const a = replica(t, { outbox })
    const { execution } = await under(t, a)
    a.store.fault = () => 'down'
    if (end === 'full') disk.resolve(new Error('full'))
    const pauses = hurried(t)
    await a.ports.settler.settle(execution, ANSWER, () => {})
    t.ok(pauses.includes(500))
    t.match(a.events.at(-1), [
      'trouble',
      'an outcome could not be spooled; it is held in memory only',
      { error: end === 'full' ? 'Error: full' : /500 ms/ },
    ])
  }
})

void t.test('close tells what is on disk from what is lost, and keeps nothing', async (t) => {
  for (const [end, told] of [
    ['kept', 'an outcome could not be stored; it is kept on disk for the next start'],
    [new Error('full'), 'an outcome could not be stored and is lost'],
    [null, 'an outcome could not be stored and is lost'],
  ] as const) {
    const { outbox, disk, said } = spool()
    const a = replica(t, end === null ? {} : { outbox })
    const { settler } = a.ports
    const { execution } = await under(t, a)
    a.store.fault = () => 'down'
    if (end !== null) disk.resolve(end)
    const bytes = counting()
    await settler.settle(execution, ANSWER, bytes.release)
    const wire = new Gate()
    a.store.gate = () => wire.pass()
    const flushing = settler.flush()
    await wire.reached
    await settler.close()
    t.equal(a.troubles().at(-1), told)
    t.equal(settler.size, 0)
    t.equal(bytes.times, 1)
    if (end === null) a.store.fault = () => null
    wire.open()
    t.equal(await flushing, true)
    t.notOk(settler.holds(a.id), 'what was being written is not held again')
    t.equal(bytes.times, 1)
    t.same(said.dropped, 0, 'the next process finds it')
  }
})

void t.test('R05 an outcome is given up when its claim would be dropped, and not before', async (t) => {
  for (const [usefulFor, isLost] of [
    [60_000, false],
    [-1, true],
  ] as const) {
    const a = replica(t)
    const { settler } = a.ports
    let dropped = 0
    restore(a, [pending('completed', { usefulFor })], { ...KEPT, drop: () => void dropped++ })
    t.ok(a.bytes.held > 0, 'its body counts')
    restore(a, [pending('unknown', { usefulFor: 60_000 })])
    a.store.fault = () => 'down'
    t.notOk(await settler.flush())
    t.equal(settler.size, isLost ? 1 : 2)
    t.equal(a.bytes.held === 0, isLost)
    t.equal(dropped, isLost ? 1 : 0)
    t.same(a.troubles(), isLost ? ['an outcome could not be stored and is lost'] : [])
  }
})

void t.test('R05 several outcomes of a record are written in order, each once', async (t) => {
  const a = replica(t)
  const { settler } = a.ports
  const id = newId()
  restore(a, [
    pending('failed_retryable', { id, claimed: false }),
    pending('completed', { id, claimed: false }),
  ])
  t.equal(settler.size, 2)
  const all = await Promise.all([settler.flush(), settler.flush(id), settler.flush()])
  t.same(all, [true, true, true])
  t.same(a.said('completed'), ['released', 'stored'])
  t.match(await a.store.read(id), { state: 'completed' })
  t.equal(settler.size, 0)
  t.same(a.troubles(), [], 'without a claim nothing was lost')
})

void t.test('R02 bypass: an outcome is held if the store fails as it overwrites what it found', async (t) => {
  for (const [fault, held] of [
    ['down', true],
    [new CorruptRecord('x'), false],
  ] as const)
    for (const reply of [null, NOT_SENT] as const) {
      const a = replica(t)
      a.script.push(NOT_SENT)
      await a.get({ route: BYPASS })
      // The takeover is lost; its outcome will find the record as it was.
      a.store.fault = ({ op }) => (op === 'swap' ? 'dropped' : null)
      if (reply !== null) a.script.push(reply)
      t.equal((await a.get({ route: BYPASS })).status, reply === null ? 201 : 502)
      let swaps = 0
      a.store.fault = ({ op }) => (op === 'swap' && ++swaps === 2 ? fault : null)
      const troubles = a.troubles().length
      t.equal(await a.ports.settler.flush(), !held)
      t.equal(a.troubles().length, held ? troubles : troubles + 1)
      if (held) t.ok(await a.ports.settler.flush())
      t.equal(a.bytes.held, 0)
    }
})

void t.test('R02 bypass: what was executed is not executed again, however it is compared', async (t) => {
  const { fingerprint } = route()
  const under = (over: Partial<typeof fingerprint>) =>
    route({ onStoreUnavailable: 'bypass', fingerprint: { ...fingerprint, ...over } })
  const headers = ['Content-Type', 'application/json', 'X-Amount', '1']
  const sent = { headers, body: '{"amount":1}' }
  for (const [name, policy, over, isSame] of [
    ['the same bytes', BYPASS, {}, true],
    ['the same value', BYPASS, { body: '{ "amount": 1 }' }, true],
    ['another value', BYPASS, { body: '{"amount":2}' }, false],
    ['the same bytes under another recipe', under({ body: 'raw' }), {}, true],
    ['another value under another recipe', under({ body: 'raw' }), { body: '{"amount":2}' }, false],
    ['a recipe with another header', under({ headers: ['x-amount'] }), {}, true],
  ] as const) {
    const a = replica(t)
    a.script.push(NOT_SENT)
    await a.get({ ...sent, route: BYPASS })
    a.store.fault = () => 'down'
    const first = await a.get({ ...sent, ...over, route: policy })
    t.equal(first.status, 201, name)
    t.ok(await a.storeIsBack())
    t.equal(a.said('completed').at(-1), isSame ? 'stored' : 'stale', name)
    const retry = await a.get({ ...sent, ...over, route: policy })
    t.match(retry, isSame ? { bytes: first.bytes, replayed: true } : { code: 'idempotency_key_reused' }, name)
    t.equal(a.n, 2, name)
  }
})

void t.test('R02 X02 bypass: nothing executes with too many unsettled outcomes', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'down'
  const { settler } = a.ports
  t.equal((await a.get({ route: BYPASS, key: 'before' })).status, 201)
  const one = pending('failed_retryable')
  for (let n = 0; !settler.full; n++) restore(a, [{ ...one, id: String(n) as RecordId }])
  t.equal(settler.size, 10_000)
  // docs/operations.md, "Bounds".
  t.equal(spoolRoom(MiB), 2 * (MiB + settler.size * 1024))
  t.equal((await a.get({ route: BYPASS, key: 'one more' })).code, 'idempotency_store_unavailable')
  t.equal(a.n, 1)
})

void t.test('R02 the last thousand outcomes held here are remembered for slow claims', async (t) => {
  const a = replica(t)
  const { settler } = a.ports
  const all = Array.from({ length: 1001 }, () => pending('completed', { claimed: false }))
  const since = performance.now()
  restore(a, all)
  t.ok(await settler.flush())
  const found = all.filter(({ id }) => settler.held(id, since) !== null)
  t.equal(found.length, 1000)
  t.equal(settler.held((all[1000] as PendingOutcome).id, performance.now() + 1), null, 'an earlier claim')
  const claimed = pending('completed')
  restore(a, [claimed])
  t.ok(await settler.flush())
  t.equal(settler.held(claimed.id, since), null, 'its record answers, with the body')

  const without = { kept: false, why: 'outcome_only', status: 201, location: null } as const
  const bare = pending('completed', { claimed: false }, { result: without })
  restore(a, [bare])
  t.ok(await settler.flush())
  t.match(settler.held(bare.id, since), { state: 'completed', result: without })
  t.notOk(a.troubles().includes('an outcome could not be stored and is lost'))

  const other = pending('completed', { claimed: false })
  restore(a, [other])
  const instant = performance.now()
  t.intercept(performance, 'now', { value: () => instant })
  t.ok(await settler.flush())
  t.ok(settler.held(other.id, instant), 'a claim of that very instant')
})
