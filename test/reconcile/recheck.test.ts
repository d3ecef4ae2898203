import t, { type Test } from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import type { Completed } from '../../src/core/record.ts'
import { Recheck } from '../../src/reconcile/control.ts'
import type { UpstreamRequest } from '../../src/upstream/port.ts'
import { BROKEN, Bytes, NOT_SENT, replica, route } from '../protect/harness.ts'
import { AFTER, asking, KEY, type Say, stored } from './harness.ts'

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
    script,
    asked,
    says: (status: number, body: unknown = { key: KEY, payment: { id: 'p1' } }): Say => {
      const text = Buffer.from(JSON.stringify(body))
      const headers = ['Content-Type', 'application/json']
      return {
        proof: 'responded',
        declaredOutcome: null,
        response: { status, reason: '', headers, body: text, trailers: [] },
        release: bytes.take(text.length),
      }
    },
    ask: async () => {
      const found = await recheck.ask(a.id, (await stored(a.store)) as Completed)
      t.same(await a.store.dump(), before, 'the record is unchanged')
      return found
    },
  }
}

void t.test('O05 a recheck asks as the reconciler does: path, credentials, pinned to the key', async (t) => {
  const { ask, script, says, asked } = await world(t)
  script.push(says(200))
  t.same(await ask(), { kind: 'agrees' })
  t.match(asked, [{ method: 'GET', target: `/payments?key=${KEY}` }])
  t.ok(asked[0]?.headers.join().includes('Authorization,Bearer own'))
  script.push(says(200, { key: 'another', payment: { id: 'p1' } }))
  t.match(await ask(), { kind: 'disagrees', why: /\/key/ })
  script.push(says(200, { key: KEY, payment: { id: 'p2' } }))
  t.match(await ask(), { kind: 'differs' })
  script.push(says(402))
  t.match(await ask(), { kind: 'disagrees', why: /402 where 201/ })
  script.push(says(202))
  t.match(await ask(), { kind: 'undecided' })
})

void t.test('O05 "not found" counts only twice in a row, as for an unknown record', async (t) => {
  const { ask, script, says, asked } = await world(t)
  script.push(says(404), says(404))
  t.match(await ask(), { kind: 'disagrees', why: /does not know/ })
  script.push(says(404), says(200))
  t.match(await ask(), { kind: 'agrees' })
  t.equal(asked.length, 4)
})

void t.test('O05 a recheck without an answer says why', async (t) => {
  const { ask, script } = await world(t)
  script.push(NOT_SENT)
  t.match(await ask(), { kind: 'not_asked', why: /could not be reached/ })
  script.push(BROKEN)
  t.match(await ask(), { kind: 'undecided', why: /broke/ })
  script.push(new Error('a bug'))
  t.match(await ask(), { kind: 'undecided', why: /a bug/ })
  for (const now of [null, route(), asking({}, { mode: 'shadow' })]) {
    const other = await world(t, asking(), now)
    t.equal(other.recheck.from('payments'), null)
    t.match(await other.ask(), { kind: 'not_asked', why: /reconcile/ })
    t.equal(other.asked.length, 0)
  }
  // Made before the route asked by its key.
  const older = await world(t, route(), asking())
  t.equal(older.recheck.from('payments'), AFTER)
  t.match(await older.ask(), { kind: 'not_asked', why: /key was not kept/ })
  t.equal(older.asked.length, 0)
})
