import t, { type Test } from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { resolvedDraft } from '../../src/core/settle.ts'
import { decodeRecord } from '../../src/store/codec.ts'
import { orThrow } from '../../src/store/records.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import { Gate, HOUR, LEASE, type Replica, refused, replica, route, seen } from './harness.ts'

const RETRY = route({ onLeaseExpired: 'retry' })
const GIVEN_BACK =
  'the store lost a claim of this replica; the retry that claimed the record executes nothing'
const WRITTEN_AGAIN = 'the store had lost the record of a running request; its outcome was written again'

async function bytesOf(a: Replica): Promise<Buffer> {
  const { bytes } = await a.store.inner.get(a.id)
  if (bytes === null) throw new Error('no record')
  return bytes
}

/** Starts a second attempt, then restores the record to how the first one left it. */
async function restoredUnder(
  t: Test,
  policy: RoutePolicy = route(),
  outcome: (a: Replica) => Forwarded = (a) => a.responded(201, 'second'),
) {
  const a = replica(t)
  a.script.push(a.responded(429))
  await a.get({ route: policy })
  const snapshot = await bytesOf(a)
  t.equal(decodeRecord(snapshot).state, 'failed_retryable')
  const gate = new Gate()
  a.script.push(gate.before(() => outcome(a)))
  const running = a.send({ route: policy })
  await gate.reached
  await a.store.restore(a.id, snapshot)
  t.equal(a.n, 2)
  return { a, gate, running, snapshot }
}

void t.test(
  '§2 a retry on the running replica executes nothing after a snapshot is restored, and gives the record back',
  async (t) => {
    const { a, gate, running } = await restoredUnder(t)
    t.match(await a.get(), { code: 'idempotency_key_in_progress' })
    t.match(await a.get(), { code: 'idempotency_key_in_progress' })
    t.equal(a.n, 2)
    t.same(a.troubles(), [GIVEN_BACK], 'the second retry finds it given back')
    t.match(await refused(t, a, { body: '{"amount":2}' }, 'idempotency_key_reused'), { status: 422 })
    const there = decodeRecord(await bytesOf(a))
    gate.open()
    const own = seen(await running)
    t.match(await a.get(), { replayed: true, bytes: own.bytes })
    t.match(await bytesOf(a).then(decodeRecord), { fence: there.fence, attempts: 2 })
    t.equal(a.n, 2)
  },
)

void t.test('§2 a run’s outcome overwrites the older attempt in a restored snapshot', async (t) => {
  const outcomes = {
    completed: (a: Replica) => a.responded(201, 'second'),
    unknown: () => ({ proof: 'unknown', reason: 'reset', timedOut: false, status: null }) as const,
    failed_retryable: () => ({ proof: 'not_sent', reason: 'refused' }) as const,
  }
  for (const [state, outcome] of Object.entries(outcomes)) {
    const { a, gate, running, snapshot } = await restoredUnder(t, route(), outcome)
    const { fence } = decodeRecord(snapshot)
    gate.open()
    await running
    const record = decodeRecord(await bytesOf(a))
    t.match(record, { state, fence: fence + 1, attempts: 2 }, 'the fence does not go back')
    t.same(a.said('completed'), ['released', 'recovered'])
    t.same(a.troubles(), [WRITTEN_AGAIN])
  }
})

void t.test('§2 a deferred outcome overwrites a snapshot restored meanwhile', async (t) => {
  const { a, gate, running, snapshot } = await restoredUnder(t)
  a.store.fault = () => 'down'
  gate.open()
  const own = seen(await running)
  await a.store.restore(a.id, snapshot)
  t.match(await a.get(), { replayed: true, bytes: own.bytes }, 'this replica knows')
  a.store.fault = () => null
  await a.ports.settler.flush()
  const b = replica(t, { store: a.store })
  t.match(await b.get(), { replayed: true, bytes: own.bytes })
  t.equal(a.n + b.n, 2)
})

const NO_ANSWER = {
  'not sent': { proof: 'not_sent', reason: 'refused' },
  'not known': { proof: 'unknown', reason: 'reset', timedOut: false, status: null },
} as const

void t.test(
  '§2 an outcome without an answer does not end another attempt’s claim or free its key',
  async (t) => {
    for (const [what, outcome] of Object.entries(NO_ANSWER))
      for (const lost of ['a snapshot', 'a failover'] as const)
        for (const [end, other] of [
          ['completed', (b: Replica) => b.responded(201, 'second')],
          ['unknown', () => NO_ANSWER['not known']],
        ] as const) {
          const name = `${what}, ${lost}, the other ${end}`
          const first = replica(t)
          const { store } = first
          const [a, b, c] = [0, 1, 2].map(() => replica(t, { store })) as [Replica, Replica, Replica]
          first.script.push(first.responded(429))
          await first.get()
          const snapshot = lost === 'a snapshot' ? await bytesOf(first) : null
          a.script.push(a.responded(429))
          await a.get()
          const [late, running] = [new Gate(), new Gate()]
          a.script.push(late.before(() => outcome))
          const sent = a.send()
          await late.reached
          await store.restore(first.id, snapshot)
          // The promoted server has not seen the last writes, and its clock is behind.
          if (snapshot === null) store.now -= 2000
          b.script.push(running.before(() => other(b)))
          const executing = b.send()
          await running.reached
          if (end === 'unknown') {
            running.open()
            await executing
          }
          const before = await bytesOf(first)
          late.open()
          await sent
          t.same(await bytesOf(first), before, name)
          t.equal(a.said('completed').at(-1), 'stale', name)
          const state = end === 'unknown' ? 'unknown' : 'in_progress'
          t.match(
            await c.get(),
            { code: end === 'unknown' ? 'idempotency_outcome_unknown' : /in_progress/ },
            name,
          )
          t.match(decodeRecord(await bytesOf(first)), { state }, name)
          running.open()
          await executing
          t.equal(c.n, 0, name)
          if (end === 'completed') t.match(await c.get(), { replayed: true, bytes: /second/ }, name)
        }
  },
)

void t.test('§2 an outcome is stale if another replica claims the restored record first', async (t) => {
  const { a, gate, running, snapshot } = await restoredUnder(t)
  const b = replica(t, { store: a.store })
  let moved = false
  a.store.gate = async ({ op, by }) => {
    if (op !== 'swap' || by !== a || moved) return
    // Before the second swap of the outcome, which found the older attempt.
    moved = true
    a.store.gate = async (call) => {
      if (call.op !== 'swap' || call.by !== a) return
      a.store.gate = null
      await b.get()
    }
  }
  gate.open()
  await running
  t.equal(b.n, 1, 'the other replica did not know of the run')
  t.same(a.said('completed'), ['released', 'stale'], 'a newer attempt exists')
  t.not(decodeRecord(snapshot).fence, decodeRecord(await bytesOf(a)).fence)
})

void t.test('§2 a completed record in a restored snapshot stands', async (t) => {
  const a = replica(t)
  await a.get()
  const snapshot = await bytesOf(a)
  await a.store.restore(a.id, null)
  a.store.now += 1
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded(201, 'second')))
  const running = a.send()
  await gate.reached
  await a.store.restore(a.id, snapshot)
  t.match(await a.get(), { replayed: true, bytes: /p1/ })
  gate.open()
  await running
  t.same(a.said('completed'), ['stored', 'stale'])
})

void t.test(
  'V08 onLeaseExpired retry: a lapsed lease does not let a retry execute what still runs here',
  async (t) => {
    const a = replica(t)
    const gate = new Gate()
    a.script.push(gate.before(() => a.responded()))
    const running = a.send({ route: RETRY })
    await gate.reached
    a.store.now += LEASE
    t.match(await a.get({ route: RETRY }), { code: 'idempotency_key_in_progress' })
    t.match(await a.store.read(a.id), { state: 'in_progress', attempts: 1 }, 'the run has a lease again')
    gate.open()
    const own = seen(await running)
    t.match(await a.get({ route: RETRY }), { replayed: true, bytes: own.bytes })
    t.equal(a.n, 1)
    t.same(a.said('completed'), ['stored'])
  },
)

void t.test('§2 a not_executed decision does not let a retry execute what still runs here', async (t) => {
  const a = replica(t)
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded()))
  const running = a.send()
  await gate.reached
  a.store.now += LEASE
  const found = orThrow(await a.records.get(a.id))
  if (found.record === null) throw new Error('no record')
  const draft = resolvedDraft(found.record, { kind: 'not_executed', reason: 'an operator' })
  await a.records.replace(a.id, found.record.version, draft, { dueIn: HOUR, dropIn: HOUR })
  t.match(await a.get(), { code: 'idempotency_key_in_progress' })
  gate.open()
  await running
  t.match(await a.get(), { replayed: true })
  t.equal(a.n, 1)
})

for (const end of ['completed', 'not executed'] as const)
  void t.test(
    `§2 a retry that claims over a restored snapshot follows the outcome of the run (${end})`,
    async (t) => {
      const { a, gate, running } = await restoredUnder(t, route(), () =>
        end === 'completed' ? a.responded(201, 'second') : { proof: 'not_sent', reason: 'refused' },
      )
      // The reply to the claim is lost; before it is tried again, the run ends and its outcome is refused.
      const asked = new Gate()
      let swaps = 0
      a.store.gate = async ({ op }) => {
        if (op === 'swap') swaps++
        if (op === 'put' && swaps === 1) await asked.pass()
      }
      a.store.next.push({ op: 'swap', fault: 'lost' })
      const retry = a.send()
      await asked.reached
      gate.open()
      const own = seen(await running)
      t.same(a.said('completed'), ['released', 'stale'])
      asked.open()
      const answer = seen(await retry)
      if (end === 'completed') {
        t.match(answer, { replayed: true, bytes: own.bytes }, 'the first answer')
        t.match(await a.get(), { replayed: true, bytes: own.bytes })
        t.equal(a.n, 2)
      } else {
        t.match(answer, { status: 201, replayed: false }, 'nothing was done, so the retry executes')
        t.equal(a.n, 3)
      }
    },
  )

/** Holds the next outcome on its way to the store. */
function beforeOutcome(a: Replica): Gate {
  const outcome = new Gate()
  a.store.gate = async ({ op }) => {
    if (op !== 'swap') return
    a.store.gate = null
    await outcome.pass()
  }
  return outcome
}

void t.test('§2 a run that ends does not make its replica forget the next one', async (t) => {
  const { a, gate, running, snapshot } = await restoredUnder(t, route(), () => NO_ANSWER['not sent'])
  const outcome = beforeOutcome(a)
  gate.open()
  await outcome.reached
  const next = new Gate()
  a.script.push(next.before(() => a.responded(201, 'third')))
  const retry = a.send()
  await next.reached
  outcome.open()
  await running
  await a.store.restore(a.id, snapshot)
  t.match(await a.get(), { code: 'idempotency_key_in_progress' })
  next.open()
  const own = seen(await retry)
  t.match(await a.get(), { replayed: true, bytes: own.bytes })
  t.equal(a.n, 3)
})

void t.test('§2 a run that ends while its record is given back keeps its outcome', async (t) => {
  for (const how of ['before', 'after'] as const) {
    const { a, gate, running } = await restoredUnder(t)
    const back = new Gate()
    let swaps = 0
    a.store.gate = async ({ op }) => {
      if (op === 'swap' && ++swaps === 2) await back.pass()
    }
    const retry = a.send()
    await back.reached
    if (how === 'before') {
      // Its outcome finds the retry's claim and is refused.
      gate.open()
      await running
      t.same(a.said('completed'), ['released', 'stale'])
      back.open()
      t.match(seen(await retry), { code: 'idempotency_key_in_progress' }, 'as it was at the claim')
    } else {
      // Its outcome is on its way when the record has just been given back.
      const outcome = beforeOutcome(a)
      gate.open()
      await outcome.reached
      back.open()
      await retry
      outcome.open()
      await running
    }
    t.match(await a.get(), { replayed: true, bytes: /second/ })
    t.equal(a.n, 2)
  }
})

void t.test('§2 a run keeps its outcome if its record vanishes again while it is given back', async (t) => {
  const { a, gate, running } = await restoredUnder(t)
  let swaps = 0
  a.store.gate = async ({ op }) => {
    if (op === 'swap' && ++swaps === 2) await a.store.restore(a.id, null)
  }
  t.match(await a.get(), { code: 'idempotency_key_in_progress' })
  gate.open()
  const own = seen(await running)
  t.match(await a.get(), { replayed: true, bytes: own.bytes })
  t.equal(a.n, 2)
})

void t.test('§2 bypass: a claim that succeeds beside a run without one executes nothing', async (t) => {
  const bypass = route({ onStoreUnavailable: 'bypass' })
  const a = replica(t)
  const asked = new Gate()
  let first = true
  a.store.gate = async ({ op }) => {
    if (op !== 'put' || !first) return
    first = false
    await asked.pass()
  }
  const retry = a.send({ route: bypass })
  await asked.reached
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded()))
  a.store.fault = () => 'down'
  const running = a.send({ route: bypass })
  await gate.reached
  a.store.fault = () => null
  asked.open()
  t.match(seen(await retry), { code: 'idempotency_key_in_progress' })
  gate.open()
  const own = seen(await running)
  await a.ports.settler.flush()
  t.match(await a.get(), { replayed: true, bytes: own.bytes })
  t.equal(a.n, 1)
})

void t.test(
  '§2 bypass: a claim that fails after a run without one was stored executes nothing',
  async (t) => {
    const bypass = { route: route({ onStoreUnavailable: 'bypass' }) }
    const a = replica(t)
    const asked = new Gate()
    a.store.gate = async () => {
      a.store.gate = null
      await asked.pass()
    }
    const slow = a.send(bypass)
    await asked.reached
    a.store.fault = () => 'down'
    for (const key of ['key-0123456789abcdef', 'other-0123456789abcdef']) await a.get({ ...bypass, key })
    a.store.fault = () => null
    t.ok(await a.ports.settler.flush())
    a.store.fault = () => 'down'
    asked.open()
    t.match(seen(await slow), { code: 'idempotency_response_unavailable', original: { status: 201 } })
    t.equal(a.n, 2)
  },
)

void t.test(
  '§2 bypass: a claim that succeeds after a run without one has ended executes nothing',
  async (t) => {
    const bypass = { route: route({ onStoreUnavailable: 'bypass' }) }
    const ends = {
      completed: (a: Replica) => a.responded(),
      unknown: () => NO_ANSWER['not known'],
      failed_retryable: () => NO_ANSWER['not sent'],
    }
    for (const [state, end] of Object.entries(ends))
      for (const [op, isBack, isThere] of [
        ['put', true, false],
        ['put', true, true],
        ['put', false, false],
        ['swap', true, false],
      ] as const) {
        const a = replica(t)
        if (op === 'swap') {
          a.script.push(NO_ANSWER['not sent'])
          await a.get(bypass)
        }
        const asked = new Gate()
        const { put } = a.store.inner
        if (isThere)
          a.store.inner.put = async (...call) => {
            a.store.inner.put = put
            const reply = await put(...call)
            await asked.pass()
            return reply
          }
        else
          a.store.gate = async (call) => {
            if (call.op !== op) return
            a.store.gate = null
            await asked.pass()
          }
        const slow = a.send(bypass)
        await asked.reached
        if (op === 'put' && !isThere) {
          a.store.fault = () => 'down'
          a.script.push(NO_ANSWER['not sent'])
          await a.get(bypass)
          a.store.fault = () => null
          t.ok(await a.ports.settler.flush(), 'an earlier one did nothing')
        }
        const { n } = a
        // The store is unreachable for a moment, and the request on its way to it, or its reply, takes longer than that.
        a.store.fault = () => 'down'
        a.script.push(end(a))
        const first = await a.get(bypass)
        let calls = 0
        a.store.fault = () => (isBack || calls++ === 0 ? null : 'down')
        if (isThere) t.ok(await a.ports.settler.flush(), 'refused because of the claim')
        asked.open()
        const answer = seen(await slow)
        a.store.fault = () => null
        const name = `${op}, ${state}`
        if (state === 'completed' && isThere) t.match(answer, { original: { status: 201 } }, name)
        else if (state === 'completed') t.match(answer, { replayed: true, bytes: first.bytes }, name)
        if (state === 'unknown') t.match(answer, { code: 'idempotency_outcome_unknown' }, name)
        if (state === 'failed_retryable') t.match(answer, { status: 201, replayed: false }, name)
        t.equal(a.n, n + (state === 'failed_retryable' ? 2 : 1), name)
        t.ok(await a.ports.settler.flush())
        t.equal(a.bytes.held, 0)
        t.match(await a.store.read(a.id), { state: state === 'unknown' ? 'unknown' : 'completed' }, name)
      }
  },
)
