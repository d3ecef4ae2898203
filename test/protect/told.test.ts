import t from 'tap'
import type { IdempotencyRecord } from '../../src/core/record.ts'
import { orThrow } from '../../src/store/records.ts'
import { asking } from '../reconcile/harness.ts'
import { Gate, LEASE, replica, route, Store, UPSTREAM } from './harness.ts'

void t.test('V07 a record notes which upstream was told, and what', async (t) => {
  const a = replica(t)
  await a.get({ route: asking() })
  t.match(orThrow(await a.records.get(a.id)).record, { told: ['key', 'record'], toldTo: UPSTREAM })
})

void t.test('V07 a route with scope.host keeps nothing that a status query could use', async (t) => {
  const { scope } = route()
  const a = replica(t)
  await a.get({ route: asking({}, { scope: { ...scope, host: true } }) })
  const { record } = orThrow(await a.records.get(a.id))
  t.match(record, { state: 'completed', key: null })
  t.notOk(record !== null && ('told' in record || 'toldTo' in record || 'lease' in record))
})

void t.test('V07 after a silent attempt a record notes only what both attempts told', async (t) => {
  for (const silent of [true, false]) {
    const store = new Store()
    const [a, b] = [replica(t, { store }), replica(t, { store })]
    const gate = new Gate()
    a.script.push(silent ? gate.before(() => a.responded()) : { proof: 'not_sent', reason: 'refused' })
    const first = a.send()
    if (silent) await gate.reached
    else await first
    t.match(await store.read(a.id), { told: ['record'] }, 'its route does not ask by the key')
    store.now += LEASE
    await b.get({ route: asking({}, { onLeaseExpired: 'retry' }) })
    t.equal(b.n, 1)
    const told = silent ? ['record'] : ['key', 'record']
    t.same(((await store.read(a.id)) as IdempotencyRecord).told, told)
    gate.open()
    await first
  }
})
