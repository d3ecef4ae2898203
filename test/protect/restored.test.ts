import t, { type Test } from 'tap'
import { type Completed, type CompletedResponse, type InProgress } from '../../src/core/record.ts'
import { completionTerms, resolvedDraft } from '../../src/core/settle.ts'
import { decodeRecord, encodeDraft } from '../../src/store/record/codec.ts'
import { orThrow } from '../../src/store/records.ts'
import { RecordLocked } from '../../src/store/register.ts'
import { type Forwarded } from '../../src/upstream/port.ts'
import {
  BROKEN,
  Gate,
  HOUR,
  LEASE,
  NOT_SENT,
  type Replica,
  refused,
  replica,
  route,
  Stream,
  seen,
  TTL,
} from './harness.ts'

const RETRY = { route: route({ onLeaseExpired: 'retry' }) }
const BYPASS = { route: route({ onStoreUnavailable: 'bypass' }) }
const GIVEN_BACK =
  'the store lost a claim of this replica; the retry that claimed the record executes nothing'
const WRITTEN_AGAIN = 'the store had lost the record of a running request; its outcome was written again'

/** Every end of an attempt, and the state in which it leaves the record. */
const ENDS = {
  completed: (a: Replica) => a.responded(201, 'second'),
  unknown: () => BROKEN,
  failed_retryable: () => NOT_SENT,
} as const satisfies Record<string, (a: Replica) => Forwarded>

async function bytesOf(a: Replica): Promise<Buffer> {
  const { bytes } = await a.store.inner.get(a.id)
  if (bytes === null) throw new Error('no record')
  return bytes
}

/** Starts a second attempt, then restores the record to how the first one left it. */
async function restoredUnder(t: Test, outcome: (a: Replica) => Forwarded = ENDS.completed) {
  const a = replica(t)
  a.script.push(a.responded(429))
  await a.get()
  const snapshot = await bytesOf(a)
  t.equal(decodeRecord(snapshot).state, 'failed_retryable')
  const run = await a.working({}, () => outcome(a))
  await a.store.restore(a.id, snapshot)
  t.equal(a.n, 2)
  return { a, run, snapshot }
}

void t.test('§2 after a restored snapshot a retry executes nothing and gives the record back', async (t) => {
  const { a, run } = await restoredUnder(t)
  for (const _ of [1, 2]) t.match(await a.get(), { code: 'idempotency_key_in_progress' })
  t.equal(a.n, 2)
  t.same(a.troubles(), [GIVEN_BACK], 'the second retry finds it given back')
  await refused(t, a, { body: '{"amount":2}' }, 'idempotency_key_reused', { status: 422 })
  const { fence } = decodeRecord(await bytesOf(a))
  const { bytes } = await run.end()
  t.match(await a.get(), { replayed: true, bytes })
  t.match(decodeRecord(await bytesOf(a)), { fence, attempts: 2 })
  t.equal(a.n, 2)
})

void t.test('§2 a run’s outcome overwrites the older attempt in a restored snapshot', async (t) => {
  for (const [state, outcome] of Object.entries(ENDS)) {
    const { a, run, snapshot } = await restoredUnder(t, outcome)
    await run.end()
    const fence = decodeRecord(snapshot).fence + 1
    t.match(decodeRecord(await bytesOf(a)), { state, fence, attempts: 2 }, 'the fence does not go back')
    t.same(a.said('completed'), ['released', 'recovered'])
    t.same(a.troubles(), [WRITTEN_AGAIN])
  }
})

void t.test('§2 a deferred outcome overwrites a snapshot restored meanwhile', async (t) => {
  const { a, run, snapshot } = await restoredUnder(t)
  a.store.fault = () => 'down'
  const { bytes } = await run.end()
  await a.store.restore(a.id, snapshot)
  t.match(await a.get(), { replayed: true, bytes }, 'this replica knows')
  a.store.fault = () => null
  await a.ports.settler.flush()
  const b = replica(t, { store: a.store })
  t.match(await b.get(), { replayed: true, bytes })
  t.equal(a.n + b.n, 2)
})

void t.test('§2 an outcome without an answer neither ends another’s claim nor frees its key', async (t) => {
  for (const late of [NOT_SENT, BROKEN])
    for (const lost of ['a snapshot', 'a failover'] as const)
      for (const end of ['completed', 'unknown'] as const) {
        const name = `${late.proof}, ${lost}, the other ${end}`
        const first = replica(t)
        const { store } = first
        const [a, b, c] = [0, 1, 2].map(() => replica(t, { store })) as [Replica, Replica, Replica]
        first.script.push(first.responded(429))
        await first.get()
        const snapshot = lost === 'a snapshot' ? await bytesOf(first) : null
        a.script.push(a.responded(429))
        await a.get()
        const run = await a.working({}, () => late)
        await store.restore(first.id, snapshot)
        // The promoted server has not seen the last writes, and its clock is behind.
        if (snapshot === null) store.now -= 2000
        const other = await b.working({}, () => ENDS[end](b))
        if (end === 'unknown') await other.end()
        const before = await bytesOf(first)
        await run.end()
        t.same(await bytesOf(first), before, name)
        t.equal(a.said('completed').at(-1), 'stale', name)
        const found = end === 'unknown' ? 'outcome_unknown' : 'key_in_progress'
        t.match(await c.get(), { code: `idempotency_${found}` }, name)
        await other.end()
        t.equal(c.n, 0, name)
        if (end === 'completed') t.match(await c.get(), { replayed: true, bytes: /second/ }, name)
      }
})

void t.test('§2 an outcome is stale if another replica claims the restored record first', async (t) => {
  const { a, run, snapshot } = await restoredUnder(t)
  const b = replica(t, { store: a.store })
  // The first swap of the outcome finds the older attempt.
  a.store.before('swap', () => b.get(), { nth: 2, by: a })
  await run.end()
  t.equal(b.n, 1, 'the other replica did not know of the run')
  t.same(a.said('completed'), ['released', 'stale'], 'a newer attempt exists')
  t.not(decodeRecord(snapshot).fence, decodeRecord(await bytesOf(a)).fence)
})

void t.test('§2 a completed record in a restored snapshot stands', async (t) => {
  const a = replica(t)
  await a.get()
  const snapshot = await bytesOf(a)
  await a.store.loses()
  a.store.now += 1
  const run = await a.working({}, () => a.responded(201, 'second'))
  await a.store.restore(a.id, snapshot)
  t.match(await a.get(), { replayed: true, bytes: /p1/ })
  await run.end()
  t.same(a.said('completed'), ['stored', 'stale'])
})

void t.test('V08 under retry, too, nothing executes what still runs here on a lapsed lease', async (t) => {
  const a = replica(t)
  const run = await a.working(RETRY)
  a.store.now += LEASE
  t.match(await a.get(RETRY), { code: 'idempotency_key_in_progress' })
  t.match(await a.store.read(a.id), { state: 'in_progress', attempts: 1 }, 'the run has a lease again')
  const { bytes } = await run.end()
  t.match(await a.get(RETRY), { replayed: true, bytes })
  t.equal(a.n, 1)
  t.same(a.said('completed'), ['stored'])
})

void t.test('§2 a not_executed decision does not let a retry execute what still runs here', async (t) => {
  const a = replica(t)
  const run = await a.working()
  a.store.now += LEASE
  const { record } = orThrow(await a.records.get(a.id))
  if (record === null) throw new Error('no record')
  const draft = resolvedDraft(record, { kind: 'not_executed', reason: 'an operator' })
  await a.records.replace(a.id, record.version, draft, { dueIn: HOUR, dropIn: HOUR })
  t.match(await a.get(), { code: 'idempotency_key_in_progress' })
  await run.end()
  t.match(await a.get(), { replayed: true })
  t.equal(a.n, 1)
})

void t.test('§2 a retry that claims over a restored snapshot follows the outcome of the run', async (t) => {
  for (const end of ['completed', 'failed_retryable'] as const) {
    const { a, run } = await restoredUnder(t, ENDS[end])
    // The reply to the claim is lost; before it is tried again, the run ends and its outcome is refused.
    const asked = new Gate()
    let swaps = 0
    a.store.gate = async ({ op }) => {
      if (op === 'swap') swaps++
      if (op === 'put' && swaps === 1) await asked.pass()
    }
    a.store.fails('swap', 'lost')
    const retry = a.get()
    await asked.reached
    const { bytes } = await run.end()
    t.same(a.said('completed'), ['released', 'stale'])
    asked.open()
    if (end === 'completed') {
      t.match(await retry, { replayed: true, bytes }, 'the first answer')
      t.match(await a.get(), { replayed: true, bytes })
    } else t.match(await retry, { status: 201, replayed: false }, 'nothing was done, so the retry executes')
    t.equal(a.n, end === 'completed' ? 2 : 3)
  }
})

void t.test('§2 a run that ends does not make its replica forget the next one', async (t) => {
  const { a, run, snapshot } = await restoredUnder(t, ENDS.failed_retryable)
  const outcome = a.store.hold('swap')
  run.open()
  await outcome.reached
  const retry = await a.working({}, () => a.responded(201, 'third'))
  outcome.open()
  await run.answer
  await a.store.restore(a.id, snapshot)
  t.match(await a.get(), { code: 'idempotency_key_in_progress' })
  const { bytes } = await retry.end()
  t.match(await a.get(), { replayed: true, bytes })
  t.equal(a.n, 3)
})

void t.test('§2 a run that ends while its record is given back keeps its outcome', async (t) => {
  for (const how of ['before', 'after'] as const) {
    const { a, run } = await restoredUnder(t)
    const back = a.store.hold('swap', { nth: 2 })
    const retry = a.get()
    await back.reached
    if (how === 'before') {
      // Its outcome finds the retry's claim and is refused.
      await run.end()
      t.same(a.said('completed'), ['released', 'stale'])
      back.open()
      t.match(await retry, { code: 'idempotency_key_in_progress' }, 'as it was at the claim')
    } else {
      // Its outcome is on its way when the record has just been given back.
      const outcome = a.store.hold('swap')
      run.open()
      await outcome.reached
      back.open()
      await retry
      outcome.open()
      await run.answer
    }
    t.match(await a.get(), { replayed: true, bytes: /second/ })
    t.equal(a.n, 2)
  }
})

void t.test('§2 a run keeps its outcome if its record vanishes again while it is given back', async (t) => {
  const { a, run } = await restoredUnder(t)
  a.store.before('swap', () => a.store.loses(), { nth: 2 })
  t.match(await a.get(), { code: 'idempotency_key_in_progress' })
  const { bytes } = await run.end()
  t.match(await a.get(), { replayed: true, bytes })
  t.equal(a.n, 2)
})

void t.test('§2 bypass: a claim that succeeds beside a run without one executes nothing', async (t) => {
  const a = replica(t)
  const asked = a.store.hold('put')
  const retry = a.get(BYPASS)
  await asked.reached
  a.store.fault = () => 'down'
  const run = await a.working(BYPASS)
  a.store.fault = () => null
  asked.open()
  t.match(await retry, { code: 'idempotency_key_in_progress' })
  const { bytes } = await run.end()
  await a.ports.settler.flush()
  t.match(await a.get(), { replayed: true, bytes })
  t.equal(a.n, 1)
})

void t.test('§2 bypass: a claim that fails after a run without one executes nothing', async (t) => {
  const a = replica(t)
  const asked = a.store.hold('put')
  const slow = a.get(BYPASS)
  await asked.reached
  a.store.fault = () => 'down'
  for (const key of ['key-0123456789abcdef', 'other-0123456789abcdef']) await a.get({ ...BYPASS, key })
  t.ok(await a.storeIsBack())
  a.store.fault = () => 'down'
  asked.open()
  t.match(await slow, { code: 'idempotency_response_unavailable', original: { status: 201 } })
  t.equal(a.n, 2)
})

void t.test('§2 bypass: a claim that succeeds after a run without one executes nothing', async (t) => {
  for (const [state, end] of Object.entries(ENDS))
    for (const [op, isBack, isThere] of [
      ['put', true, false],
      ['put', true, true],
      ['put', false, false],
      ['swap', true, false],
    ] as const) {
      const a = replica(t)
      if (op === 'swap') {
        a.script.push(NOT_SENT)
        await a.get(BYPASS)
      }
      let asked = new Gate()
      const { put } = a.store.inner
      if (isThere)
        a.store.inner.put = async (...call) => {
          a.store.inner.put = put
          const reply = await put(...call)
          await asked.pass()
          return reply
        }
      else asked = a.store.hold(op)
      const slow = a.get(BYPASS)
      await asked.reached
      if (op === 'put' && !isThere) {
        a.store.fault = () => 'down'
        a.script.push(NOT_SENT)
        await a.get(BYPASS)
        a.store.fault = () => null
        t.ok(await a.ports.settler.flush(), 'an earlier one did nothing')
      }
      const { n } = a
      // The store is unreachable for a moment, and the request on its way to it, or its reply, takes longer than that.
      a.store.fault = () => 'down'
      a.script.push(end(a))
      const first = await a.get(BYPASS)
      let calls = 0
      a.store.fault = () => (isBack || calls++ === 0 ? null : 'down')
      if (isThere) t.ok(await a.ports.settler.flush(), 'refused because of the claim')
      asked.open()
      const answer = await slow
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
})

/** Contract §7: an upstream that shares the database finished the record itself (§9); the live client gets the recorded answer. */

const RECORDED: CompletedResponse = {
  kept: true,
  response: {
    status: 201,
    reason: 'Created',
    headers: ['Secret', 's', 'X', '1'],
    body: Buffer.from('recorded'),
    trailers: [],
  },
}
const NOT_KEPT: CompletedResponse = { kept: false, why: 'outcome_only', status: 202, location: '/p/1' }

/** What `idempotency.complete` does, in a store of this process. */
async function complete({ store, id }: Replica, result: CompletedResponse): Promise<void> {
  const { bytes } = await store.inner.get(id)
  if (bytes === null) throw new Error('no record')
  const { version, updatedAt: _u, dropAt: _d, leaseUntil: _l, ...claimed } = decodeRecord(bytes) as InProgress
  const own = { ...claimed, state: 'completed', result } as const
  await store.inner.swap(id, { version }, encodeDraft(own), { dueIn: TTL, dropIn: TTL }, false)
}

type Made = (one: Replica) => Forwarded

const ends: Record<string, Made> = {
  'with another answer': (one) => one.responded(202, 'live'),
  'with another body': (one) => one.responded(201, 'live'),
  'with an answer that would free the key': (one) => one.responded(503, 'busy'),
  'with an answer that would be unknown': (one) => one.responded(502),
  'with a declared not-applied': (one) => one.responded(500, 'no', { declaredOutcome: 'not-applied' }),
  'with a broken connection': () => ({
    proof: 'unknown',
    reason: 'the connection broke',
    timedOut: false,
    status: null,
  }),
  'with a timeout': () => ({ proof: 'unknown', reason: 'timed out', timedOut: true, status: null }),
}

for (const [name, made] of Object.entries(ends)) {
  void t.test(`clients get the answer the upstream recorded, even if it then ends ${name}`, async (t) => {
    const one = replica(t)
    const policy = route({ statusHeader: true, excludeHeaders: new Set(['secret']) })
    one.script.push(async () => {
      await complete(one, RECORDED)
      return made(one)
    })
    const answer = await one.send({ route: policy })
    t.equal(one.budget.held, 'recorded'.length, 'until it is sent')
    const first = seen(answer)
    const bytes = JSON.stringify([201, 'Created', ['X', '1'], 'recorded', []])
    t.match(first, { status: 201, replayed: false, bytes })
    t.match(first.proxyHeaders, ['Idempotency-Status', 'executed', 'Idempotency-Expires'])
    t.match(await one.get({ route: policy }), { status: 201, replayed: true, bytes })
    t.equal(one.n, 1)
    t.match(one.traces[0], { outcome: 'executed', before: 'absent', after: 'completed' })
    t.same(one.said('completed'), ['stored'])
    t.same(one.troubles(), [])
    t.same([one.bytes.held, one.budget.held], [0, 0], 'nothing is held')
  })

  void t.test(`retries get response_unavailable if it recorded no answer and ends ${name}`, async (t) => {
    const one = replica(t)
    one.script.push(async () => {
      await complete(one, NOT_KEPT)
      return made(one)
    })
    const first = await one.get()
    if (name === 'with another answer')
      t.match(first, { status: 202, bytes: /live/ }, 'the only answer there is')
    else
      t.match(first, {
        code: 'idempotency_response_unavailable',
        status: 409,
        original: { status: 202, location: '/p/1' },
      })
    await refused(t, one, {}, 'idempotency_response_unavailable', { original: { status: 202 } })
    t.equal(one.bytes.held, 0)
  })
}

void t.test('the first client gets the streamed answer, retries get the recorded one', async (t) => {
  const one = replica(t)
  const stream = new Stream()
  one.script.push(async () => {
    await complete(one, RECORDED)
    return { proof: 'live', why: 'streamed', live: stream }
  })
  t.match(await one.get(), { live: stream })
  stream.end('broken')
  await stream.done
  t.match(await one.get(), { status: 201, replayed: true })
  t.same(one.said('completed'), ['stored'])
})

void t.test('the client gets the recorded answer even with a full budget', async (t) => {
  const one = replica(t)
  one.script.push(async () => {
    await complete(one, RECORDED)
    one.budget.hold(1024 * 1024)
    return BROKEN
  })
  t.match(await one.get(), { status: 201, replayed: false })
})

void t.test('of a locked record the client gets the live answer, and retries the recorded one', async (t) => {
  const one = replica(t)
  one.store.fault = ({ op }) => (op === 'swap' ? new RecordLocked('somebody has it') : null)
  const live = await one.get()
  t.match(live, { status: 201 })
  t.equal((await one.get()).bytes, live.bytes, 'retries here get the same')
  t.same(one.said('completed'), ['deferred'])
  await complete(one, RECORDED)
  t.ok(await one.storeIsBack())
  t.match(await one.get(), { status: 201, replayed: true, bytes: /recorded/ })
  t.equal(one.n, 1)
})

void t.test('a locked record does not keep other outcomes from the store', async (t) => {
  const one = replica(t)
  let locked = true
  one.store.fault = ({ op, id }) =>
    op === 'swap' && (locked || id === one.id) ? new RecordLocked('somebody has it') : null
  await one.get()
  await one.get({ key: 'key-another-0123456789' })
  t.equal(one.ports.settler.size, 2)
  locked = false
  t.notOk(await one.ports.settler.flush())
  t.equal(one.ports.settler.size, 1)
})

void t.test('the route’s completion terms are in records that an upstream may complete, only', async (t) => {
  const terms = `${TTL} 60000 5 ${5 * 1024 * 1024}`
  const policy = route({ ttlFailed: 60_000, tombstone: 5 })
  t.equal(completionTerms(policy), terms)
  t.equal(completionTerms(route({ keep: 'outcome' })), `${TTL} ${TTL} 0 0`)
  const one = replica(t)
  one.script.push(async () => {
    t.match(await one.store.read(one.id), { state: 'in_progress', completion: terms })
    return NOT_SENT
  })
  await one.get({ route: policy })
  t.match(await one.store.read(one.id), { state: 'failed_retryable', completion: terms })
  one.script.push(BROKEN)
  await one.get({ route: policy })
  t.match(await one.store.read(one.id), { state: 'unknown', completion: terms })
  const other = replica(t)
  await other.get({ route: policy })
  t.notOk('completion' in ((await other.store.read(other.id)) as Completed))
  const quiet = replica(t)
  quiet.script.push(async () => {
    t.notOk('completion' in ((await quiet.store.read(quiet.id)) as InProgress))
    return quiet.responded()
  })
  await quiet.get({ route: route({ key: { ...policy.key, forwardFence: false } }) })
})
