import t from 'tap'
import type { ReconcilePolicy } from '../../src/core/policy.ts'
import type { RecordId } from '../../src/core/record.ts'
import { Control } from '../../src/reconcile/control.ts'
import { memoryStore } from '../../src/store/memory.ts'
import { Records } from '../../src/store/records.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import { UPSTREAM } from '../protect/harness.ts'
import { draft, newId, newToken, response, SPANS } from '../store/fixtures.ts'
import { asking, RECONCILE } from './harness.ts'

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
      const told = { key, told: ['key'] as const, toldTo: UPSTREAM, route: ROUTE.name, ...over }
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
      const found = self.knows.has(key)
      return {
        proof: 'responded',
        declaredOutcome: null,
        response: {
          status: found ? 200 : 404,
          reason: '',
          headers: ['Content-Type', 'application/json'],
          body: Buffer.from(found ? `{"key":"${key}","payment":{}}` : '{}'),
          trailers: [],
        },
        release: () => {},
      }
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
  await one.completes('k1', { toldTo: 'another' })
  await one.completes('k2', { route: 'another' })
  await one.completes('k3', { told: undefined })
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
