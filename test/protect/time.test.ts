import t, { type Test } from 'tap'
import type { Phase } from '../../src/core/copies.ts'
import type { RecordId } from '../../src/core/record.ts'
import { Leases } from '../../src/protect/leases.ts'
import { migrating } from '../../src/store/moving/migrating.ts'
import type { Renewal } from '../../src/store/register.ts'
import {
  Gate,
  HOUR,
  idle,
  LEASE,
  NOT_SENT,
  refused,
  repeating,
  replica,
  route,
  SECOND,
  Store,
  Stream,
  until,
} from './harness.ts'

const TOKEN = Buffer.alloc(16, 1)
const [A, B] = ['a', 'b'] as [RecordId, RecordId]

/** Leases on a clock and a timer of the test; `reply`: of the store to each renewal, `true` for all unless it says otherwise. */
function renewing(
  t: Test,
  reply: () => boolean[] | null | Promise<boolean[]> = () => null,
  mayBegin?: () => boolean,
) {
  let now = HOUR
  t.intercept(performance, 'now', { value: () => now })
  const tick = repeating(t)
  const asked: (readonly Renewal[])[] = []
  const errors: string[] = []
  const leases = new Leases(
    async (items) => {
      asked.push(items)
      return (await reply()) ?? items.map(() => true)
    },
    (error) => void errors.push((error as Error).message),
    mayBegin,
  )
  t.teardown(() => leases.close())
  return {
    leases,
    asked,
    errors,
    /** Time passes, and the timer looks at what is due. */
    async passes(time: number): Promise<void> {
      now += time
      await tick()
    },
    /** An attempt whose claim was sent some time ago; whether it may begin. */
    holds: (id: RecordId, ago = 0, lease = LEASE) => leases.hold(id, TOKEN, lease, HOUR, now - ago),
  }
}

t.test('Y20 an attempt does not begin once its replica may not execute what it has claimed', async (t) => {
  let may = true
  const { holds } = renewing(t, undefined, () => may)
  const isSure = holds(A)
  t.ok(isSure())
  may = false
  t.notOk(isSure())
})

void t.test('each lease is renewed in one call with others once a third of it has passed', async (t) => {
  const { leases, asked, holds, passes } = renewing(t)
  for (const [id, ago] of [
    ['new', 0],
    ['early', LEASE / 3 - 1],
    ['due', LEASE / 3],
    ['late', (2 / 3) * LEASE],
    ['gone', (2 / 3) * LEASE],
  ] as [RecordId, number][])
    holds(id, ago)
  leases.release('gone' as RecordId, TOKEN)
  leases.release('due' as RecordId, Buffer.alloc(16, 2))
  leases.release('unknown' as RecordId, TOKEN)
  t.equal(leases.size, 4, 'only the owner can release')
  await passes(0)
  const renewals = ['due', 'late'].map((id) => ({ id, token: TOKEN, dueIn: LEASE, dropIn: HOUR }))
  t.same(asked.splice(0), [renewals])
  await passes(1)
  await passes(LEASE / 3 - 1)
  t.same(
    asked.map((items) => items.map(({ id }) => id).join()),
    ['early', 'due,new,late'],
    'and again after another third',
  )
  leases.close()
  t.equal(leases.size, 0)
  await passes(HOUR)
  t.equal(asked.length, 2, 'nothing after the end')
})

void t.test('a failed renewal is tried again at once, one call at a time, and reported once', async (t) => {
  const gate = new Gate()
  const { leases, asked, errors, holds, passes } = renewing(t, async () => {
    const { length } = asked
    if (length === 2) leases.release(B, TOKEN)
    if (length < 3) throw new Error(`down ${length}`)
    if (length === 3) await gate.pass()
    if (length === 4) throw new Error('down again')
    return [true]
  })
  holds(A, LEASE / 2)
  holds(B, LEASE / 2)
  for (let n = 0; n < 5; n++) await passes(1)
  t.equal(asked.length, 3, 'none while one is under way')
  t.same(errors, ['down 1'], 'once, until one succeeds')
  gate.open()
  await idle()
  await passes(LEASE / 3)
  await passes(1)
  t.same(errors, ['down 1', 'down again'])
  t.same(
    asked.map(({ length }) => length),
    [2, 2, 1, 1, 1],
  )
})

void t.test('an attempt may begin in the first two thirds of its lease, if it has not lost it', async (t) => {
  let still: boolean[] | Error = [true]
  const { holds, passes } = renewing(t, () => {
    if (still instanceof Error) throw still
    return still
  })
  t.equal(holds(A)(), true)
  t.equal(holds(A, (2 / 3) * LEASE - SECOND)(), true)
  t.equal(holds(A, (2 / 3) * LEASE)(), false, 'the claim is too old: this process may have been paused')
  for (const [reply, ago, expected, why] of [
    [[true], LEASE / 2, true, 'the store says it is still the owner'],
    [new Error('down'), LEASE / 2, true, 'nothing new is known'],
    [[false], LEASE / 2, false, 'the store says it is not any more'],
    [[], LEASE / 2, false, 'nor does it know of it'],
    [[true], LEASE, false, 'it fell silent, which a store rolled back since does not know'],
  ] as const) {
    still = reply instanceof Error ? reply : [...reply]
    const isSure = holds(A, ago)
    await passes(0)
    t.equal(isSure(), expected, why)
  }
  still = [true]
  const isSure = holds(A, LEASE / 2)
  await passes(0)
  still = new Error('down')
  await passes(0.6 * LEASE)
  t.equal(isSure(), true, 'in the first two thirds of its new lease')
  await passes(0.1 * LEASE)
  t.equal(isSure(), false)
})

void t.test('L06 a renewed run is in progress up to three times its lease, and executes once', async (t) => {
  const a = replica(t)
  const policy = { route: route({ lease: LEASE }) }
  const run = await a.working(policy)
  for (let i = 0; i < 9; i++) {
    a.store.now += LEASE / 3
    t.same(await a.renews(), [true])
    await refused(t, a, policy, 'idempotency_key_in_progress')
  }
  t.equal((await run.end()).status, 201)
  t.equal((await a.get(policy)).replayed, true)
  t.equal(a.n, 1)
})

/** Time passes by the clock of this process, so that the next renewal is due. */
function renewalDue(t: Test): void {
  const { now } = performance
  t.intercept(performance, 'now', { value: () => now.call(performance) + LEASE / 2 })
}

void t.test('L06 a run holds its lease until its outcome is about to be written', async (t) => {
  const tick = repeating(t)
  const a = replica(t)
  const run = await a.working()
  t.equal(a.ports.leases.size, 1)
  a.store.now += LEASE
  await refused(t, a, {}, 'idempotency_outcome_unknown')
  renewalDue(t)
  await tick()
  t.match(await a.store.read(a.id), { state: 'in_progress' }, 'its owner lives')
  let leases = -1
  a.store.before('swap', () => {
    leases = a.ports.leases.size
  })
  await run.end()
  t.equal(leases, 0)
})

void t.test('L06 after a failed renewal the record is unknown, and the owner’s outcome counts', async (t) => {
  const tick = repeating(t)
  const a = replica(t)
  const run = await a.working()
  a.store.fault = ({ op }) => (op === 'renew' ? 'down' : null)
  a.store.now += LEASE
  renewalDue(t)
  await tick()
  t.equal(a.renewalErrors.length, 1)
  await refused(t, a, {}, 'idempotency_outcome_unknown')
  const { bytes } = await run.end()
  t.match(await a.get(), { replayed: true, bytes })
  t.equal(a.n, 1)
})

for (const onLeaseExpired of ['unknown', 'retry'] as const)
  for (const [executes, retries] of [
    ['new', 'both'],
    ['both', 'new'],
  ] as const satisfies readonly (readonly [Phase, Phase])[])
    void t.test(`V07 ${onLeaseExpired}: an owner in ${executes} is not silent to ${retries}`, async (t) => {
      const [from, to] = [new Store(), new Store()]
      to.now -= HOUR
      const on = (phase: Phase) => ({
        store: phase === 'new' ? to : from,
        wire: (by: unknown) => migrating(from.wire(by), to.wire(by), phase),
      })
      const policy = { route: route({ onLeaseExpired }) }
      const [owner, other] = [replica(t, on(executes)), replica(t, on(retries))]
      const run = await owner.working(policy, () => owner.responded(201, 'late'))
      for (let n = 0; n < 6; n++) {
        t.match(await other.get(policy), { code: 'idempotency_key_in_progress' })
        for (const store of [from, to]) store.now += LEASE / 2
        t.same(await owner.renews(), [true])
      }
      const { bytes } = await run.end()
      t.match(await other.get(policy), { replayed: true, bytes })
      t.equal(owner.n + other.n, 1)
    })

const WITHIN = { route: route({ respondWithin: 1 }) }

void t.test('U13 respondWithin: 504 upstream_slow, the work goes on, a retry gets the result', async (t) => {
  const a = replica(t, { maxInFlight: 1 })
  const run = await a.working(WITHIN)
  t.match(await run.answer, { code: 'upstream_slow', status: 504, instance: a.id })
  t.match(a.trace, { outcome: 'upstream_slow', before: 'absent', after: 'in_progress', status: 504 })
  t.ok((a.trace.fence ?? 0) > 0)
  t.equal(a.ports.inFlight.count, 1, 'work that goes on counts')
  t.equal((await a.get({ key: 'another' })).code, 'overloaded')
  t.equal(a.ports.leases.size, 1)
  t.ok(a.bytes.held > 0, 'the body that may still be sent')
  run.open()
  await until(() => a.ports.inFlight.count === 0)
  t.equal(a.bytes.held, 0)
  t.match(await a.get(WITHIN), { status: 201, replayed: true })
  t.equal(a.n, 1)
  t.same(a.said('completed'), ['stored'])
})

void t.test('U13 respondWithin: a retry is in progress until the upstream times out', async (t) => {
  const a = replica(t)
  const timeout = { proof: 'unknown', reason: 'x', timedOut: true, status: null } as const
  const run = await a.working(WITHIN, () => timeout)
  t.equal((await run.answer).code, 'upstream_slow')
  await refused(t, a, {}, 'idempotency_key_in_progress')
  run.open()
  await until(() => a.ports.inFlight.count === 0)
  await refused(t, a, {}, 'idempotency_outcome_unknown')
  t.equal(a.n, 1)
})

void t.test('U13 respondWithin: a stream that begins too late is drained to its end', async (t) => {
  const a = replica(t)
  const stream = new Stream()
  const run = await a.working(WITHIN, () => stream.reply())
  t.equal((await run.answer).code, 'upstream_slow')
  run.open()
  await until(() => stream.drained === 1)
  t.equal(a.ports.inFlight.count, 1)
  stream.end('complete')
  await until(() => a.ports.inFlight.count === 0)
  await refused(t, a, {}, 'idempotency_response_unavailable')
})

void t.test('U13 respondWithin: an answer in time is passed on; a late bug is reported', async (t) => {
  const a = replica(t)
  const patient = { route: route({ respondWithin: HOUR }) }
  t.match(await a.get(patient), { status: 201, replayed: false })
  t.match(a.trace, { outcome: 'executed', after: 'completed' })
  a.script.push(new TypeError('a bug'))
  await t.rejects(a.send({ ...patient, key: 'bug' }), { message: 'a bug' })
  const late = await a.working({ ...WITHIN, key: 'late bug' }, () => {
    throw new TypeError('a late bug')
  })
  t.equal((await late.answer).code, 'upstream_slow')
  late.open()
  await until(() => a.ports.inFlight.count === 0)
  t.same(a.troubles(), ['internal error after the client was answered'])
  t.equal(a.bytes.held, 0)
})

void t.test('X01 a client that leaves while the upstream works changes nothing', async (t) => {
  const a = replica(t)
  let gone = false
  const run = await a.working({ gone: () => gone })
  gone = true
  // The writer finds the connection closed and releases the answer.
  const { bytes } = await run.end()
  t.match(await a.get(), { bytes, replayed: true })
  t.same([a.n, a.bytes.held], [1, 0])
})

void t.test('P25 nothing is claimed before the body is complete', async (t) => {
  const a = replica(t)
  const upload = Promise.withResolvers<void>()
  const first = a.get({ upload: upload.promise })
  await idle()
  t.equal(a.store.calls, 0)
  t.equal(a.ports.inFlight.count, 1)
  upload.resolve()
  t.equal((await first).status, 201)
})

void t.test('X03 the outcome is stored before the first byte of the answer leaves', async (t) => {
  const a = replica(t)
  const outcome = a.store.hold('swap')
  let answered = false
  const first = a.get().then(() => (answered = true))
  await outcome.reached
  await idle()
  t.notOk(answered)
  outcome.open()
  await first
  t.equal((await a.store.read(a.id))?.state, 'completed')
})

void t.test('the room of a kept body is given back once both client and store are done', async (t) => {
  for (const held of [false, true]) {
    const a = replica(t)
    const reply = () => a.responded(201, 'x'.repeat(1000))
    if (held) a.downAtEnd(reply)
    else a.script.push(reply)
    const answer = await a.send()
    if (answer.kind !== 'response') throw new Error('no response')
    t.equal(a.bytes.held, 1000)
    answer.release()
    answer.release()
    t.equal(a.bytes.held, held ? 1000 : 0)
    t.ok(await a.storeIsBack())
    t.equal(a.bytes.held, 0)
    answer.release()
    t.equal(a.bytes.held, 0)
  }
})

void t.test('an outcome that keeps no body holds no room while the store is down', async (t) => {
  for (const [status, policy] of [
    [429, route()],
    [500, route({ profile: 'strict' })],
    [201, route({ keep: 'outcome' })],
  ] as const) {
    const a = replica(t)
    a.downAtEnd(() => a.responded(status))
    t.equal((await a.get({ route: policy })).status, status)
    t.equal(a.ports.settler.size, 1)
    t.equal(a.bytes.held, 0)
  }
})

void t.test('F20 a changed recipe still replays an unchanged request; a secret keys ids', async (t) => {
  const store = new Store()
  const headers = ['Content-Type', 'application/json']
  const a = replica(t, { store })
  await a.get({ headers })
  await replica(t, { store, secret: Buffer.from('secret') }).get({ headers })
  t.equal(store.ids.size, 2)
  const recipe = route({ fingerprint: { ...route().fingerprint, body: 'raw' } })
  t.equal((await a.get({ headers, route: recipe })).replayed, true)
  await refused(t, a, { headers, route: recipe, body: '{ "amount":1}' }, 'idempotency_key_reused')
  t.equal((await a.get({ headers, body: '{ "amount":1}' })).replayed, true)
})

void t.test('an attempt that could not begin in time frees its key, and a retry executes', async (t) => {
  const a = replica(t)
  a.script.push(({ mayBegin }) => {
    t.equal(mayBegin?.(), true, 'just claimed')
    // As when a process wakes up after a long pause.
    const { now } = performance
    performance.now = () => now.call(performance) + LEASE
    try {
      return mayBegin?.() === false ? NOT_SENT : a.responded()
    } finally {
      performance.now = now
    }
  })
  t.match(await a.get(), { status: 502, code: 'upstream_unreachable' })
  t.equal((await a.store.read(a.id))?.state, 'failed_retryable')
  t.equal((await a.get()).status, 201)
})

void t.test('a bypassed request has no lease, so it may begin at any time', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'down'
  a.script.push(({ mayBegin }) => {
    t.not(mayBegin?.(), false)
    return a.responded()
  })
  t.equal((await a.get({ route: route({ onStoreUnavailable: 'bypass' }) })).status, 201)
})
