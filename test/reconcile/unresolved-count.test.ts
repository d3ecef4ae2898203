import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { UnresolvedCount, type UnresolvedCounts } from '../../src/reconcile/reconciler.ts'
import { encodeDraft } from '../../src/store/codec.ts'
import { Records } from '../../src/store/records.ts'
import { HOUR, LEASE, replica, route, Store } from '../protect/harness.ts'
import { draft, newId, newToken } from '../store/fixtures.ts'
import { asking, broken, unknownIn, worker } from './harness.ts'

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
