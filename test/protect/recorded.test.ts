import t from 'tap'
import type { Completed, CompletedResponse, InProgress } from '../../src/core/record.ts'
import { completionTerms } from '../../src/core/settle.ts'
import { decodeRecord, encodeDraft } from '../../src/store/codec.ts'
import { RecordLocked } from '../../src/store/register.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import { BROKEN, NOT_SENT, type Replica, refused, replica, route, Stream, seen, TTL } from './harness.ts'

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
    t.match(await refused(t, one, {}, 'idempotency_response_unavailable'), { original: { status: 202 } })
    t.equal(one.bytes.held, 0)
  })
}

void t.test('the first client gets the streamed answer, retries get the recorded one', async (t) => {
  const one = replica(t)
  const stream = new Stream()
  one.script.push(async () => {
    await complete(one, RECORDED)
    return { proof: 'live', why: 'streamed', live: stream, declaredOutcome: null }
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
