import t from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { newReconciliation, type Unknown } from '../../src/core/record.ts'
import { outcomeSpans, resolvedDraft } from '../../src/core/settle.ts'
import { encodeDraft } from '../../src/store/record/codec.ts'
import { RecordLocked, StoreUnavailable } from '../../src/store/register.ts'
import {
  BROKEN,
  Gate,
  HOUR,
  LEASE,
  MINUTE,
  type Replica,
  refused,
  replica,
  route,
  SECOND,
  Store,
  Stream,
  seen,
  TTL,
  until,
} from '../protect/harness.ts'
import { draft, newId, newToken } from '../store/fixtures.ts'
import {
  AFTER,
  asking,
  broken,
  EVERY,
  KEY,
  STATUS_QUERY_TIMEOUT,
  silentOwner,
  stored,
  unknownIn,
  unresolved,
  worker,
} from './harness.ts'

const DAY = 24 * HOUR

/** The same as a request whose connection broke, under another key. */
async function breaks(owner: Replica, policy: RoutePolicy, key: string): Promise<void> {
  owner.script.push(BROKEN)
  await owner.get({ route: policy, key })
}

/** Records of no replica, due after that time. */
async function puts(
  store: Store,
  times: number,
  dueIn: number,
  state: 'unknown' | 'in_progress' = 'unknown',
) {
  for (let n = 0; n < times; n++) {
    const bytes = encodeDraft(draft(state, newToken(), { route: route().name, key: KEY }))
    await store.inner.put(newId(), bytes, { dueIn, dropIn: DAY })
  }
}

void t.test('a lapsed lease is written down once, as the unknown record it reads as', async (t) => {
  for (const policy of [route(), asking()]) {
    const store = new Store()
    const owner = replica(t, { store })
    const first = await owner.working({ route: policy }, () => owner.responded(201, 'late'))
    const workers = [worker(t, store, policy), worker(t, store, policy)]
    store.now += LEASE - 1
    await Promise.all(workers.map((one) => one.round()))
    t.equal((await stored(store)).state, 'in_progress', 'not before')
    store.now += 1
    const { dropAt } = await stored(store)
    await Promise.all(workers.map((one) => one.round()))
    const record = (await stored(store)) as Unknown
    t.match(record, {
      state: 'unknown',
      leaseExpired: true,
      dropAt,
      lastError: 'the owner fell silent: its lease expired',
      reconciliation: newReconciliation(store.now),
      nextLookAt: store.now + EVERY,
    })
    t.equal(workers.flatMap((one) => one.said('leaseExpired')).length, 1)
    t.same(
      workers.flatMap((one) => one.results),
      policy.reconcile === null ? [] : ['scheduled'],
    )
    await refused(t, owner, { route: policy }, 'idempotency_outcome_unknown', { retryAfter: 5 })
    await first.end()
    const retry = await owner.get({ route: policy })
    t.ok(retry.replayed, 'the owner’s own late outcome is accepted')
    t.match(retry.bytes, /late/)
  }
})

void t.test('a locked record stays due and does not hold up the others', async (t) => {
  const store = new Store()
  const owner = replica(t, { store })
  await broken(owner, route())
  const locked = owner.id
  await breaks(owner, route(), 'key-another-0123456789')
  store.now += LEASE
  t.equal((await store.inner.due(10)).length, 2)
  store.fault = ({ op, id }) => (op === 'swap' && id === locked ? new RecordLocked('somebody has it') : null)
  const one = worker(t, store, route())
  await one.round()
  t.same(await store.inner.due(10), [locked])
  store.fault = ({ op }) => (op === 'swap' ? new StoreUnavailable('down', false) : null)
  await t.rejects(one.round(), { name: 'StoreUnavailable' })
  t.same(one.told, [])
})

void t.test('a lease renewed after the index listed it has not lapsed', async (t) => {
  const store = new Store()
  const owner = replica(t, { store })
  const first = await owner.working({ route: route() })
  const { token } = await stored(store)
  store.now += LEASE
  store.fault = ({ op, id }) => {
    if (op === 'get' && id !== null) void store.inner.renew([{ id, token, dueIn: LEASE, dropIn: DAY }])
    return null
  }
  const one = worker(t, store, route())
  await one.round()
  t.equal((await stored(store)).state, 'in_progress')
  t.same(one.told, [])
  await first.end()
})

void t.test('a record without a status query is looked at less and less often', async (t) => {
  const store = new Store()
  const policy = route()
  const owner = replica(t, { store })
  await broken(owner, policy)
  const since = store.now
  const one = worker(t, store, policy)
  const { dropAt } = await stored(store)
  for (const [pause, next] of [
    [LEASE, LEASE],
    [LEASE, 2 * LEASE],
    [2 * LEASE, 4 * LEASE],
    [4 * LEASE, 8 * LEASE],
    [10 * HOUR, HOUR],
  ] as const) {
    await one.after(pause)
    const record = await unknownIn(store)
    t.match(record, { dropAt, lastError: 'reset', reconciliation: { since, asked: 0 } })
    t.equal(record.nextLookAt - store.now, next)
    t.same(await store.inner.due(10), [], 'the index is empty until then')
    t.equal(
      (await refused(t, owner, { route: policy }, 'idempotency_outcome_unknown')).retryAfter,
      next / SECOND,
      'Retry-After is the time to the next look',
    )
  }
  t.same(one.told, [])
  one.random = 0.5
  await one.after(HOUR)
  t.equal((await unknownIn(store)).nextLookAt - store.now, HOUR + 6 * MINUTE, 'looks are spread')
})

void t.test('O02 a request found completed is stored for the ttl, replays, wakes its waiters', async (t) => {
  const store = new Store()
  const policy = asking({}, { ttl: 2 * TTL, ttlFailed: TTL, tombstone: HOUR })
  const owner = replica(t, { store })
  await broken(owner, policy)
  await refused(t, owner, { route: policy }, 'idempotency_outcome_unknown', { retryAfter: 5 })
  const one = worker(t, store, policy)
  await one.round()
  t.equal(one.asked.length, 0, 'not before it is due')
  await one.after(EVERY)
  t.match(one.asked, [
    { method: 'GET', target: `/payments?key=${KEY}`, responseLimit: policy.limits.response },
  ])
  t.equal(one.asked[0]?.body.length, 0)
  t.match(await stored(store), {
    state: 'completed',
    key: KEY,
    token: Buffer.alloc(16),
    expiresAt: store.now + 2 * TTL,
    dropAt: store.now + 2 * TTL + HOUR,
  })
  t.same(one.results, ['scheduled', 'completed'])
  t.same(one.woken, [owner.id])
  const retry = await owner.get({ route: policy })
  t.equal(retry.bytes, JSON.stringify([201, '', ['Content-Type', 'application/json'], '{"id":"p1"}', []]))
  t.ok(retry.replayed)
  t.equal(owner.n, 1)
  t.equal((await owner.get({ route: policy, body: 'other' })).code, 'idempotency_key_reused')
})

void t.test('O02 a request found declined is completed too, for `ttlFailed`', async (t) => {
  const policy = asking({}, { ttlFailed: HOUR })
  const { store, owner, one } = await unresolved(t, policy)
  one.script.push(one.says(402, { key: KEY, declined: true }))
  await one.after(EVERY)
  t.match(await stored(store), { state: 'completed', expiresAt: store.now + HOUR })
  t.match(await owner.get({ route: policy }), { status: 402, replayed: true })
})

void t.test('O03 after two "not found" in a row, not before `after`, one retry executes', async (t) => {
  const policy = asking()
  const { store, owner, one } = await unresolved(t, policy)
  const claimed = store.now
  const states: [number, number, string][] = []
  while ((await stored(store)).state === 'unknown') {
    await one.next(one.says(404, {}))
    const record = await stored(store)
    const streak = record.state === 'unknown' ? (record.reconciliation?.notFound ?? -1) : 2
    states.push([(store.now - claimed) / SECOND, streak, record.state])
  }
  t.same(states, [
    [5, 0, 'unknown'],
    [15, 0, 'unknown'],
    [35, 0, 'unknown'],
    [60, 1, 'unknown'],
    [65, 2, 'failed_retryable'],
  ])
  t.same(one.results, ['scheduled', 'pending', 'pending', 'pending', 'pending', 'retryable'])
  t.match(await stored(store), { lastError: 'the upstream does not know of it', key: KEY })
  t.equal((await owner.get({ route: policy, body: 'other' })).code, 'idempotency_key_reused')
  const retries = await Promise.all(Array.from({ length: 10 }, () => owner.get({ route: policy })))
  t.equal(owner.n, 2, 'exactly one')
  t.equal(retries.filter(({ replayed, code }) => !replayed && code === null).length, 1)
})

void t.test('O03 "not found" frees nothing if the query does not find a completed request', async (t) => {
  const policy = asking({ after: 1 })
  const { store, owner, one } = await unresolved(t, policy)
  const twice = async (): Promise<void> => {
    for (let n = 0; n < 2; n++) {
      await one.next(one.says(404, {}))
    }
  }
  for (const [proof, answer] of [
    [{ kind: 'refuted' }, /neither is a completed request/],
    [{ kind: 'unanswered', why: 'status 500' }, /could not be tested on a completed request: status 500/],
  ] as const) {
    one.proof = proof
    await twice()
    t.match(await stored(store), { state: 'unknown', reconciliation: { notFound: 0, answer } })
    await refused(t, owner, { route: policy }, 'idempotency_outcome_unknown')
  }
  one.proof = { kind: 'proven' }
  await twice()
  t.equal((await stored(store)).state, 'failed_retryable')
  t.same(one.results, ['scheduled', 'pending', 'failed', 'pending', 'failed', 'pending', 'retryable'])
})

void t.test('O03 the owner’s late outcome wins if no retry has claimed the key', async (t) => {
  const policy = asking({ after: 1 })
  const { store, owner, run, one } = await silentOwner(t, policy)
  for (let n = 0; n < 2; n++) {
    await one.next(one.says(404, {}))
  }
  t.equal((await stored(store)).state, 'failed_retryable')
  t.match(await run.end(), { status: 201 })
  t.match(await owner.get({ route: policy }), { replayed: true })
  t.same([owner.n, owner.said('completed')], [1, ['stored']])
})

void t.test('a completed resolution is final: the late owner is stale, its client answered', async (t) => {
  const policy = asking()
  const { owner, run, one } = await silentOwner(t, policy)
  await one.after(EVERY)
  t.match((await run.end()).bytes, /late/)
  t.same(owner.said('completed'), ['stale'])
  t.match((await owner.get({ route: policy })).bytes, /p1/)
})

void t.test('the answer to a status query does not override a faster owner, operator or claim', async (t) => {
  const policy = asking()
  for (const who of ['owner', 'operator completes', 'operator frees', 'next attempt'] as const) {
    const { store, owner, run, one } = await silentOwner(t, policy)
    store.now += EVERY
    const { gate, round: asking } = await one.asking()
    if (who === 'owner') {
      await run.end()
    } else {
      const record = await unknownIn(store)
      const result = { kept: false, why: 'outcome_only', status: 200, location: null } as const
      const resolution =
        who === 'operator completes'
          ? ({ kind: 'completed', result } as const)
          : ({ kind: 'not_executed', reason: 'said so' } as const)
      const draft = encodeDraft(resolvedDraft(record, resolution))
      const { version } = record
      await store.inner.swap(owner.id, { version }, draft, outcomeSpans(resolution, policy), false)
      if (who === 'next attempt') t.equal((await replica(t, { store }).get({ route: policy })).status, 201)
    }
    const before = await store.dump()
    gate.open()
    await asking
    t.same(await store.dump(), before, `${who}: nothing is written`)
    t.same(one.results, ['scheduled'], 'and nothing counted')
    await run.end()
  }
})

void t.test('after `attempts` status queries a record is dead-lettered, and left alone', async (t) => {
  const policy = asking({ attempts: 4 })
  const { store, owner, one } = await unresolved(t, policy)
  const workers = [one, worker(t, store, policy)]
  for (const one of workers) one.otherwise = () => one.says(202, {})
  for (let n = 0; n < 4; n++) {
    store.now = (await unknownIn(store)).nextLookAt
    await Promise.all(workers.map((one) => one.round()))
  }
  const asked = (): number => workers.reduce((sum, one) => sum + one.asked.length, 0)
  t.equal(asked(), 4)
  t.match(await stored(store), {
    state: 'unknown',
    lastError: 'reset',
    nextLookAt: store.now + HOUR,
    reconciliation: { asked: 4, deadLettered: true, answer: 'status 202, still pending' },
  })
  t.same(workers.flatMap((one) => one.results.map(String)).toSorted(), [
    'dead_lettered',
    'pending',
    'pending',
    'pending',
    'scheduled',
  ])
  t.match(workers.flatMap((one) => one.said('trouble')).join(), 'dead-lettered')
  for (let n = 0; n < 5; n++) {
    store.now += HOUR
    await Promise.all(workers.map((one) => one.round()))
  }
  t.equal(asked(), 4)
  t.match(await stored(store), { state: 'unknown', reconciliation: { deadLettered: true } })
  await refused(t, owner, { route: policy }, 'idempotency_outcome_unknown')
})

void t.test('an owner’s late unknown outcome does not undo a dead letter', async (t) => {
  const store = new Store()
  const policy = asking({ attempts: 3 })
  const owner = replica(t, { store })
  const gate = new Gate()
  owner.script.push(
    gate.before(() => ({ proof: 'unknown', reason: 'no answer', timedOut: true, status: 500 })),
  )
  const first = owner.send({ route: policy })
  await gate.reached
  const one = worker(t, store, policy)
  await one.after(LEASE)
  for (let n = 0; n < 3; n++) {
    await one.next(one.says(202, {}))
  }
  const before = await unknownIn(store)
  t.equal(before.reconciliation?.deadLettered, true)
  // A look of the sweeper comes between the owner's read and its write.
  let swaps = 0
  store.gate = async ({ op }) => {
    if (op !== 'swap' || ++swaps !== 2) return
    const { bytes } = await store.inner.get(owner.id)
    const spans = { dueIn: HOUR, dropIn: before.dropAt - store.now }
    await store.inner.swap(owner.id, { version: before.version }, bytes as Buffer, spans, false)
  }
  gate.open()
  t.equal(seen(await first).code, 'upstream_timeout')
  const { reconciliation, nextLookAt, dropAt, leaseExpired, status, lastError } = await unknownIn(store)
  t.same(reconciliation, before.reconciliation, 'what was asked and answered')
  t.same([nextLookAt, dropAt], [before.nextLookAt, before.dropAt])
  t.same([leaseExpired, status, lastError], [false, 500, 'no answer'], 'and it says why')
  t.same([owner.said('completed'), swaps], [['unknown'], 4])
  store.gate = null
  await one.after(DAY)
  t.equal(one.asked.length, 3, 'asked no more')
})

void t.test('a configuration with fewer attempts dead-letters without another status query', async (t) => {
  const store = new Store()
  const owner = replica(t, { store })
  await broken(owner, asking())
  const before = worker(t, store, asking())
  before.script.push(before.says(202))
  store.now += EVERY
  await before.round()
  const one = worker(t, store, asking({ attempts: 1 }))
  await one.after(10 * MINUTE)
  t.equal(one.asked.length, 0)
  t.same(one.results, ['dead_lettered'])
})

void t.test('a dead letter counts although the reply of the store was lost', async (t) => {
  const store = new Store()
  await broken(replica(t, { store }), route())
  const one = worker(t, store, asking())
  store.fails('swap', 'lost')
  await one.after(LEASE)
  t.match(await stored(store), { reconciliation: { deadLettered: true } })
  await one.after(DAY)
  t.same([one.asked.length, one.results], [0, ['dead_lettered']])
})

void t.test('a record whose key was not kept is dead-lettered without a status query', async (t) => {
  const store = new Store()
  const owner = replica(t, { store })
  await broken(owner, route())
  t.equal((await stored(store)).key, null, 'it is not kept where nobody asks by it')
  const one = worker(t, store, asking())
  await one.after(LEASE)
  t.same([one.asked.length, one.results], [0, ['dead_lettered']])
  t.match(await stored(store), {
    reconciliation: { asked: 0, deadLettered: true, answer: /key was not stored/ },
  })
})

void t.test('a status query by {record} needs no key, and none is kept', async (t) => {
  const store = new Store()
  const policy = asking({
    request: { method: 'GET', path: '/by-record/{record}', headers: [] },
    identity: [{ pointer: '/record', value: '{record}' }],
  })
  const owner = replica(t, { store })
  await broken(owner, policy)
  t.equal((await stored(store)).key, null)
  const one = worker(t, store, policy)
  one.script.push(() => one.says(200, { record: owner.id, payment: 1 }))
  await one.after(EVERY)
  t.equal(one.asked[0]?.target, `/by-record/${owner.id}`)
  t.same(one.results, ['scheduled', 'completed'])
})

void t.test('an unusable answer counts as failed, and the record stays unknown', async (t) => {
  const policy = asking()
  const { store, one } = await unresolved(t, policy)
  const stream = new Stream(200)
  const answers = [
    [stream.reply('too_large'), 'status 200, which is longer than `limits.response`'],
    [new Stream(200).reply('streamed'), 'status 200, which is a stream'],
    [new Stream(200).reply('no_room'), 'status 200, which there is no room for'],
    [{ proof: 'unknown', reason: 'x', timedOut: true, status: null }, 'no complete answer came in time'],
    [{ proof: 'unknown', reason: 'x', timedOut: false, status: 200 }, 'the answer broke off'],
    [new Error('a bug'), 'internal error: Error: a bug'],
    [one.says(503), 'status 503, which says nothing'],
    [one.says(200, { key: 'another', payment: 1 }), "status 200, and /key is not this record's"],
    [one.says(200, { key: 'another', payment: 1 }), "status 200, and /key is not this record's"],
  ] as const
  for (const [said, answer] of answers) {
    await one.next(said)
    t.match(await stored(store), { state: 'unknown', reconciliation: { answer, notFound: 0 } })
  }
  t.same(
    one.results.slice(1),
    answers.map(() => 'failed'),
  )
  t.equal(await stream.done, 'broken', 'the rest of the answer is abandoned')
  t.same(one.said('trouble'), ['the answer to a status query is about another record'], 'reported once')
  t.match(await stored(store), { reconciliation: { asked: answers.length } })
})

void t.test('an answer that a full store refuses is asked for again, then kept without body', async (t) => {
  const policy = asking({ attempts: 2 })
  const { store, owner, one } = await unresolved(t, policy)
  for (const results of [['scheduled'], ['scheduled', 'completed']]) {
    store.fails('swap', null, 'full')
    await one.next()
    t.same(one.results, results)
  }
  t.equal(one.asked.length, 2)
  const unavailable = { code: 'idempotency_response_unavailable', original: { status: 201 } }
  t.match(await owner.get({ route: policy }), unavailable)
  t.equal(owner.n, 1)
})

void t.test('a key that the upstream got in quotes is asked about with and without them', async (t) => {
  const quoted = `"${KEY}"`
  const targets = [KEY, encodeURIComponent(quoted)].map((key) => `/payments?key=${key}`)
  const policy = asking()
  for (const knows of [true, false]) {
    const store = new Store()
    const owner = replica(t, { store })
    await breaks(owner, policy, quoted)
    const one = worker(t, store, policy)
    const ask = (status: 200 | 404, key: string) => one.next(one.says(status, { key, payment: { id: 'p1' } }))
    if (!knows) store.now += AFTER
    await ask(404, KEY)
    if (knows) await ask(200, quoted)
    else {
      for (const _ of [2, 3]) await ask(404, KEY)
      t.equal((await stored(store)).state, 'unknown', 'two without the quotes are not enough')
      await ask(404, KEY)
      t.equal((await stored(store)).state, 'failed_retryable')
    }
    const asked = one.asked.map(({ target }) => target)
    t.same(asked, knows ? targets : [...targets, ...targets])
    if (!knows) continue
    t.same(one.results, ['scheduled', 'pending', 'completed'])
    t.match(await owner.get({ route: policy }), { replayed: true }, 'either way, since it is one key')
    t.equal(owner.n, 1)
  }
})

void t.test('a status query that did not reach the upstream is not counted', async (t) => {
  const policy = asking({ attempts: 2 })
  const { store, one } = await unresolved(t, policy)
  for (let n = 0; n < 5; n++) {
    one.script.push({ proof: 'not_sent', reason: 'connect ECONNREFUSED 10.0.0.1:80' })
    await one.after(EVERY)
    t.match(await stored(store), {
      nextLookAt: store.now + EVERY,
      reconciliation: { asked: 0, answer: 'the upstream could not be reached' },
    })
  }
  await one.after(EVERY)
  t.same(one.results, ['scheduled', 'failed', 'failed', 'failed', 'failed', 'failed', 'completed'])
})

void t.test('while a status query is under way no other is sent, until its timeout', async (t) => {
  const policy = asking()
  const { store, one: lost } = await unresolved(t, policy)
  const other = worker(t, store, policy)
  store.now += EVERY
  const { gate, round } = await lost.asking()
  t.equal(lost.sweeper.pendingQueries, 1)
  t.equal((await unknownIn(store)).nextLookAt - store.now, STATUS_QUERY_TIMEOUT + 5 * SECOND)
  for (const [later, asked] of [
    [STATUS_QUERY_TIMEOUT, 0],
    [5 * SECOND, 1],
  ] as const) {
    store.now += later
    await Promise.all([lost.sweeper.sweep(), other.round()])
    t.equal(other.asked.length, asked)
  }
  t.same(other.results, ['completed'])
  gate.open()
  await round
  t.same(lost.results, ['scheduled'])
})

void t.test('the sweeper leaves its own replica’s records alone', async (t) => {
  const policy = asking()
  const { owner, one } = await unresolved(t, policy)
  one.isOwn = (id) => id === owner.id
  await one.after(EVERY)
  t.same([one.asked.length, one.told], [0, []])
  one.isOwn = () => false
  await one.round()
  t.same(one.results, ['scheduled', 'completed'])
})

void t.test('records of routes that are gone, off or in shadow mode are not asked about', async (t) => {
  for (const policies of [[], [asking({}, { mode: 'shadow' })], [asking({}, { mode: 'off' })]]) {
    const { store } = await unresolved(t, asking())
    const one = worker(t, store, ...policies)
    await one.after(EVERY)
    t.same([one.asked.length, one.told], [0, []])
    t.ok((await unknownIn(store)).nextLookAt > store.now)
  }
})

void t.test('`keep: outcome` keeps nothing of the answer', async (t) => {
  const policy = asking({}, { keep: 'outcome' })
  const { store, owner, one } = await unresolved(t, policy)
  await one.after(EVERY)
  const unavailable = { code: 'idempotency_response_unavailable', original: { status: 201 } }
  t.match(await owner.get({ route: policy }), unavailable)
  t.notMatch(Object.values(await store.dump()).join(), 'p1')
})

void t.test('a record about to be dropped unresolved is reported once, a day before', async (t) => {
  for (const policy of [
    route({ unresolvedTtl: 30 * DAY }),
    asking({ attempts: 2 }, { unresolvedTtl: 30 * DAY }),
  ]) {
    const { store, one } = await unresolved(t, policy)
    const workers = [one, worker(t, store, policy)]
    for (const one of workers) one.otherwise = () => one.says(202, {})
    const { dropAt } = await stored(store)
    const expiring = (): unknown[] => workers.flatMap((one) => one.said('expiring'))
    store.now = dropAt - DAY - 1
    await Promise.all(workers.map((one) => one.round()))
    t.same(expiring(), [])
    store.now = (await unknownIn(store)).nextLookAt
    t.equal(store.now, dropAt - DAY, 'looked at right then')
    for (let n = 0; n < 30; n++) {
      await Promise.all(workers.map((one) => one.round()))
      t.same(expiring(), [dropAt])
      store.now = Math.min((await unknownIn(store)).nextLookAt, dropAt - 1)
    }
    t.equal((await stored(store)).dropAt, dropAt, 'looks do not extend its life')
    store.now = dropAt
    await Promise.all(workers.map((one) => one.round()))
    t.same(await store.dump(), {})
  }
})

void t.test('that report does not disturb a status query under way', async (t) => {
  // A day, reported in its last tenth; and a span so short that it would be over before the answer.
  for (const unresolvedTtl of [DAY, MINUTE]) {
    const policy = asking({}, { unresolvedTtl })
    const { store, one } = await unresolved(t, policy)
    const other = worker(t, store, policy)
    const { dropAt } = await stored(store)
    store.now = dropAt - unresolvedTtl / 10 - 5
    const { gate, round } = await one.asking()
    t.same(one.said('expiring'), unresolvedTtl === DAY ? [] : [dropAt], 'reported before it is dropped')
    store.now += 5
    await other.round()
    gate.open()
    await round
    t.same([other.asked.length, other.told], [0, []])
    t.same(one.results, ['scheduled', 'completed'])
    t.equal((await stored(store)).state, 'completed')
  }
})

void t.test('records that wait for a slow upstream do not hold up others', async (t) => {
  const store = new Store()
  const policy = asking()
  await puts(store, 600, 1)
  await puts(store, 1, 2, 'in_progress')
  store.now += 10
  const one = worker(t, store, policy)
  const gate = new Gate()
  one.otherwise = () => gate.before(() => one.says(202))
  for (let n = 0; n < 4; n++) t.equal(await one.sweeper.sweep(), false, 'nothing more to do at once')
  t.equal(one.sweeper.pendingQueries, 600)
  t.equal(one.said('leaseExpired').length, 1, 'the lapsed lease behind them')
  gate.open()
  await one.sweeper.idle()
  t.equal(one.asked.length, 600, 'each once')
})

void t.test('at most 1024 status queries wait at a time', async (t) => {
  const store = new Store()
  await puts(store, 1100, 1)
  store.now += 10
  const one = worker(t, store, asking())
  const gate = new Gate()
  one.otherwise = () => gate.before(() => one.says(202))
  for (let n = 0; n < 7; n++) t.equal(await one.sweeper.sweep(), false)
  t.equal(one.sweeper.pendingQueries, 1024)
  gate.open()
  await one.sweeper.idle()
  await one.round()
  t.equal(one.asked.length, 1100)
})

void t.test('the first 1000 unreadable records are reported once, and do not hold up others', async (t) => {
  for (const many of [1, 1500]) {
    const { store, owner, one } = await unresolved(t, asking())
    const { bytes } = await store.inner.get(owner.id)
    const corrupt = Buffer.concat([bytes as Buffer, Buffer.from('x')])
    for (let n = 0; n < many; n++)
      await store.inner.put(`AA${n}` as typeof owner.id, corrupt, { dueIn: 0, dropIn: DAY })
    store.now += EVERY
    // Otherwise the next sweep would follow in 50 ms and find the same.
    for (let n = 0; n < 7; n++) t.equal(await one.sweeper.sweep(), false)
    await one.round()
    t.same(one.results, ['scheduled', 'completed'])
    const said = one.said('trouble')
    t.equal(said[0], 'an unresolved record cannot be read; it is left as it is')
    t.equal(said.length, Math.min(many, 1001))
    if (many > 1000) t.equal(said.at(-1), 'further unresolved records that cannot be read are not reported')
  }
})

void t.test('a bug over a record is reported once, and sweeps go on', async (t) => {
  const { one } = await unresolved(t, asking())
  one.isOwn = () => {
    throw new Error('a bug')
  }
  await one.after(EVERY)
  await one.round()
  t.same(one.said('trouble'), ['internal error over an unresolved record'])
})

void t.test('the sweeper runs on its own, survives failures of the store, and stops', async (t) => {
  const policy = asking()
  const { store, one } = await unresolved(t, policy)
  store.now += EVERY
  store.fails('due', 'down', new Error('a bug'))
  const gate = new Gate()
  one.script.push(gate.before(() => one.says(200)))
  // Its own timers keep no process alive.
  const alive = setInterval(() => {}, 1000)
  t.teardown(() => clearInterval(alive))
  one.sweeper.start()
  await gate.reached
  t.same(one.said('trouble'), ['internal error in the sweeper'])
  const stopped = one.sweeper.stop()
  let ended = false
  void stopped.then(() => (ended = true))
  store.now += HOUR
  t.notOk(ended, 'a status query under way is waited for')
  gate.open()
  await stopped
  t.equal(one.sweeper.pendingQueries, 0)
  t.same(one.results, ['scheduled', 'completed'])
  const { calls } = store
  await one.sweeper.sweep()
  one.sweeper.start()
  await one.sweeper.stop()
  t.equal(store.calls, calls + 2, 'it reads the clock and the index, and starts nothing more')
})

void t.test('a record deleted before its last answer comes is not dead-lettered', async (t) => {
  const policy = asking({ attempts: 1 })
  const { store, owner, one } = await unresolved(t, policy)
  one.script.push(async () => {
    const record = await unknownIn(store)
    await store.inner.remove(owner.id, record.version)
    return one.says(202)
  })
  await one.after(EVERY)
  t.same([one.results, one.said('trouble')], [['scheduled'], []])
  t.same(await store.dump(), {}, 'what was deleted stays deleted')
})

void t.test('status queries still waiting when the sweeper stops are not sent', async (t) => {
  const policy = asking()
  const store = new Store()
  const owner = replica(t, { store })
  for (let n = 0; n < 40; n++) await breaks(owner, policy, `key-of-record-number-${n}`)
  const one = worker(t, store, policy)
  const gate = new Gate()
  one.otherwise = () => gate.before(() => one.says(202))
  store.now += EVERY
  await one.sweeper.sweep()
  await until(() => one.asked.length === 16)
  t.equal(one.sweeper.pendingQueries, 40)
  const stopped = one.sweeper.stop()
  gate.open()
  await stopped
  t.equal(one.asked.length, 16)
})
