import t from 'tap'
import { orThrow } from '../../src/store/records.ts'
import { asking } from '../reconcile/harness.ts'
import { replica, route, UPSTREAM } from './harness.ts'

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
  t.notOk(record !== null && ('told' in record || 'toldTo' in record))
})
