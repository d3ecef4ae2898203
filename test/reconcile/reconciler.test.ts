import t, { type Test } from 'tap'
import { type ReconcilePolicy, type RoutePolicy } from '../../src/core/policy.ts'
import { type Completed, type RecordId } from '../../src/core/record.ts'
import { Control, Recheck } from '../../src/reconcile/control.ts'
import { UnresolvedCount, type UnresolvedCounts } from '../../src/reconcile/reconciler.ts'
import { memoryStore } from '../../src/store/memory.ts'
import { encodeDraft } from '../../src/store/record/codec.ts'
import { Records } from '../../src/store/records.ts'
import { type Forwarded, type UpstreamRequest } from '../../src/upstream/port.ts'
import { BROKEN, Bytes, HOUR, LEASE, NOT_SENT, replica, route, Store, UPSTREAM } from '../protect/harness.ts'
import { draft, newId, newToken, response, SPANS } from '../store/fixtures.ts'
import {
  AFTER,
  asking,
  broken,
  KEY,
  RECONCILE,
  type Say,
  says,
  stored,
  unknownIn,
  worker,
} from './harness.ts'

const ROUTE = asking()
const MISTYPED: ReconcilePolicy = {
  ...RECONCILE,
  request: { ...RECONCILE.request, path: '/paymnets?key={key}' },
}

/** A store, an upstream that knows the keys of `knows`, and the control of a process that has just started. */
function begun() {
  const store = memoryStore({ clock: () => 1_000_000, maxBytes: 1e7 })
  const records = new Records(store)
  const self = {
    records,
    knows: new Set<string>(),
    asked: [] as string[],
    lists: 0,
    now: 0,
    said: [] as (readonly [string, string])[],
    /** A request completed by any process. */
    async completes(key: string, over: object = {}): Promise<RecordId> {
      const id = newId()
      const token = newToken()
      const told = { key, received: ['key'] as const, receivedBy: UPSTREAM, route: ROUTE.name, ...over }
      await records.claim(id, draft('in_progress', token, told), SPANS)
      const result = { ...response(), kept: false, why: 'outcome_only', status: 201, location: null } as const
      await records.settle(id, draft('completed', token, { ...told, result }), SPANS)
      return id
    },
    control: null as unknown as Control,
  }
  self.control = new Control({
    records,
    store: {
      list: (...asked) => {
        self.lists++
        return store.list(...asked)
      },
    },
    upstream: UPSTREAM,
    policyOf: () => ROUTE,
    forward: async ({ target }): Promise<Forwarded> => {
      self.asked.push(target)
      const key = /^\/payments\?key=(.*)$/.exec(target)?.[1] ?? ''
      const bytes = new Bytes()
      return self.knows.has(key) ? says(bytes, 200, { key, payment: {} }) : says(bytes, 404, {})
    },
    clock: () => self.now,
    pause: async () => {},
    say: (level, message) => void self.said.push([level, message]),
  })
  return self
}

void t.test('a process that has completed nothing asks about a completed record of the store', async (t) => {
  const one = begun()
  await one.completes('k1')
  t.same(await one.control.prove(ROUTE, MISTYPED), { kind: 'refuted' })
  t.match(one.said, [['error', /does not find requests that were completed/]])
  t.equal(one.lists, 1)
  t.same(await one.control.prove(ROUTE, MISTYPED), { kind: 'refuted' })
  t.equal(one.lists, 1, 'what was found is remembered')
  one.knows.add('k1')
  t.same(await one.control.prove(ROUTE, RECONCILE), { kind: 'proven' })
  const asked = one.asked.length
  t.same(await one.control.prove(ROUTE, RECONCILE), { kind: 'proven' })
  t.equal(one.asked.length, asked, 'what was proven is remembered')
})

void t.test('a record that another upstream, route or person completed proves nothing', async (t) => {
  const one = begun()
  await one.completes('k1', { receivedBy: 'another' })
  await one.completes('k2', { route: 'another' })
  await one.completes('k3', { received: undefined })
  t.same(await one.control.prove(ROUTE, RECONCILE), { kind: 'untested' })
  t.same(one.asked, [])
  await one.completes('k4')
  t.same(
    await one.control.prove(ROUTE, RECONCILE),
    { kind: 'untested' },
    'the store is not searched again at once',
  )
  t.equal(one.lists, 1)
  one.now = 10_000
  t.same(await one.control.prove(ROUTE, RECONCILE), { kind: 'refuted' })
  t.equal(one.lists, 2)
})

void t.test('the store is read page by page, until four records are found', async (t) => {
  const one = begun()
  for (let n = 0; n < 40; n++) await one.completes(`other-${n}`, { route: 'another' })
  for (let n = 0; n < 40; n++) await one.completes(`k${n}`)
  t.same(await one.control.prove(ROUTE, RECONCILE), { kind: 'refuted' })
  t.equal(one.asked.length, 4, 'four are asked about')
  t.ok(one.lists > 1 && one.lists <= 3)
})

void t.test('a process asks about the last four requests it completed, 15 s apart', async (t) => {
  const one = begun()
  for (let n = 0; n < 6; n++) {
    one.control.completed(ROUTE.name, await one.completes(`k${n}`))
    one.control.completed(ROUTE.name, await one.completes(`soon-${n}`))
    one.now += 15_000
  }
  await one.control.prove(ROUTE, RECONCILE)
  t.same(new Set(one.asked.map((target) => target.split('=')[1])), new Set(['k2', 'k3', 'k4', 'k5']))
  t.equal(one.lists, 0)
})

void t.test('simultaneous proofs, and repeated canary checks, ask the upstream once', async (t) => {
  const one = begun()
  await one.completes('k1')
  await Promise.all([one.control.prove(ROUTE, RECONCILE), one.control.prove(ROUTE, RECONCILE)])
  t.equal(one.asked.length, 1)
  t.same([...one.control.routes], [], 'not checked yet')
  await one.control.check([ROUTE])
  await one.control.check([ROUTE])
  t.same([...one.control.routes], [ROUTE.name])
  t.equal(one.asked.filter((target) => target.includes('canary-')).length, 1)
  await one.control.check([{ ...ROUTE, reconcile: null }])
  t.same([...one.control.routes], [], 'a reload has removed its status query')
  one.control.stop()
})

/** A completed record, and the recheck that asks about it. */
async function world(t: Test, policy: RoutePolicy = asking(), now: RoutePolicy | null = policy) {
  const a = replica(t)
  a.script.push(() => a.responded(201, '{"id":"p1"}'))
  await a.get({ route: policy })
  const bytes = new Bytes()
  const script: Say[] = []
  const asked: UpstreamRequest[] = []
  const recheck = new Recheck({
    policyOf: () => now,
    forward: async (request) => {
      asked.push(request)
      const next = script.shift()
      if (next === undefined) throw new Error('asked too often')
      if (next instanceof Error) throw next
      return typeof next === 'function' ? next(request) : next
    },
  })
  const before = await a.store.dump()
  t.teardown(() => {
    if (bytes.held !== 0) throw new Error(`${bytes.held} bytes are not given back`)
  })
  return {
    recheck,
    asked,
    says: (status: number, body?: unknown): Say => says(bytes, status, body),
    /** What the recheck finds, when the upstream says that. */
    ask: async (...said: readonly Say[]) => {
      script.push(...said)
      const found = await recheck.ask(a.id, (await stored(a.store)) as Completed)
      t.same(await a.store.dump(), before, 'the record is unchanged')
      return found
    },
  }
}

void t.test('O05 a recheck asks as the reconciler does: path, credentials, pinned to the key', async (t) => {
  const { ask, says, asked } = await world(t)
  t.same(await ask(says(200)), { kind: 'agrees' })
  t.match(asked, [{ method: 'GET', target: `/payments?key=${KEY}` }])
  t.ok(asked[0]?.headers.join().includes('Authorization,Bearer own'))
  t.match(await ask(says(200, { key: 'another', payment: { id: 'p1' } })), {
    kind: 'disagrees',
    why: /\/key/,
  })
  t.match(await ask(says(200, { key: KEY, payment: { id: 'p2' } })), { kind: 'differs' })
  t.match(await ask(says(402)), { kind: 'disagrees', why: /402 where 201/ })
  t.match(await ask(says(202)), { kind: 'undecided' })
})

void t.test('O05 "not found" counts only twice in a row, as for an unknown record', async (t) => {
  const { ask, says, asked } = await world(t)
  t.match(await ask(says(404), says(404)), { kind: 'disagrees', why: /does not know/ })
  t.match(await ask(says(404), says(200)), { kind: 'agrees' })
  t.equal(asked.length, 4)
})

void t.test('O05 a recheck without an answer says why', async (t) => {
  const { ask } = await world(t)
  t.match(await ask(NOT_SENT), { kind: 'not_asked', why: /could not be reached/ })
  t.match(await ask(BROKEN), { kind: 'undecided', why: /broke/ })
  t.match(await ask(new Error('a bug')), { kind: 'undecided', why: /a bug/ })
  for (const now of [null, route(), asking({}, { mode: 'shadow' })]) {
    const other = await world(t, asking(), now)
    t.equal(other.recheck.from('payments'), null)
    t.match(await other.ask(), { kind: 'not_asked', why: /reconcile/ })
    t.equal(other.asked.length, 0)
  }
  // Made before the route asked by its key.
  const older = await world(t, route(), asking())
  t.equal(older.recheck.from('payments'), AFTER)
  t.match(await older.ask(), { kind: 'not_asked', why: /key was not stored/ })
  t.equal(older.asked.length, 0)
})

void t.test('unknown and dead-lettered records are counted separately, others are not', async (t) => {
  const store = new Store()
  const wire = store.wire()
  const observer = { counted: () => {}, trouble: () => {} }
  const census = new UnresolvedCount({ records: new Records(wire), store: wire, observer })
  t.same(await census.count(), { unknown: 0, dead_lettered: 0 })
  const policy = asking({ attempts: 1 })
  const owner = replica(t, { store })
  await broken(owner, policy)
  t.same(await census.count(), { unknown: 1, dead_lettered: 0 })
  const one = worker(t, store, policy)
  one.script.push(one.says(202))
  store.now = (await unknownIn(store)).nextLookAt
  await one.round()
  t.same(await census.count(), { unknown: 0, dead_lettered: 1 })

  await owner.get({ route: policy, key: 'done-0123456789abcdef' })
  const spans = { dueIn: LEASE, dropIn: HOUR }
  for (let n = 0; n < 600; n++)
    await store.inner.put(newId(), encodeDraft(draft('unknown', newToken())), spans)
  await store.inner.put(newId(), encodeDraft(draft('in_progress', newToken())), spans)
  const corrupt = Buffer.concat([encodeDraft(draft('unknown', newToken())), Buffer.from('x')])
  await store.inner.put('AAcorrupt' as RecordId, corrupt, spans)
  t.same(await census.count(), { unknown: 600, dead_lettered: 1 })
  store.now += LEASE
  t.same(await census.count(), { unknown: 601, dead_lettered: 1 }, 'a lapsed lease reads as unknown')
})

void t.test('start counts; a store that is down leaves the last count', async (t) => {
  const store = new Store()
  await broken(replica(t, { store }), route())
  const told: UnresolvedCounts[] = []
  const errors: unknown[] = []
  const wire = store.wire()
  const observer = {
    counted: (counted: UnresolvedCounts) => void told.push(counted),
    trouble: (_: string, { error: message }: Readonly<Record<string, unknown>>) =>
      void errors.push({ message }),
  }
  const census = new UnresolvedCount({ records: new Records(wire), store: wire, observer })
  await census.start()
  store.fails('list', 'down')
  await census.start()
  t.same(told, [{ unknown: 1, dead_lettered: 0 }])
  store.fails('get', 'down')
  await census.start()
  t.equal(told.length, 1)
  store.fails('list', new Error('a bug'))
  await census.start()
  t.same(errors, [{ message: 'Error: a bug' }], 'reported, and the process goes on')
  census.stop()
  await census.start()
  t.equal(told.length, 2)
})
