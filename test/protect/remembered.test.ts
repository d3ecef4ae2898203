import t from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { Gate, replica, route } from './harness.ts'

const LOST = { proof: 'unknown', reason: 'reset', timedOut: false, status: null } as const

void t.test('§6 a refusal says whether a retry will find the record', async (t) => {
  const derived = (bucket: number | null): RoutePolicy =>
    route({ key: { ...route().key, derive: { json: ['/amount'], form: [], headers: [], bucket } } })
  for (const [name, policy, key, running] of [
    ['a key', route(), 'key-0123456789abcdef', true],
    ['a derived key', derived(null), null, true],
    ['a key derived for a time span', derived(1000), null, false],
    ['a key the client sent', derived(1000), 'key-0123456789abcdef', true],
    ['bypass', route({ onStoreUnavailable: 'bypass' }), 'key-0123456789abcdef', false],
  ] as const) {
    const a = replica(t)
    const gate = new Gate()
    a.script.push(gate.before(() => LOST))
    const first = a.send({ route: policy, key })
    await gate.reached
    const busy = { kind: 'problem', refusal: { code: 'idempotency_key_in_progress', remembered: running } }
    t.match(await a.send({ route: policy, key }), busy, name)
    gate.open()
    const claimed = running || name === 'bypass'
    t.match(await first, { refusal: { code: 'upstream_failed', remembered: claimed } }, name)
  }
})

void t.test('§6 a refusal without a claim does not promise that a retry will find a record', async (t) => {
  const policy = route({ onStoreUnavailable: 'bypass' })
  const a = replica(t)
  a.store.fault = () => 'down'
  a.script.push(LOST)
  const refusal = { code: 'upstream_failed', scope: 'none', remembered: false }
  t.match(await a.send({ route: policy }), { refusal })
})
