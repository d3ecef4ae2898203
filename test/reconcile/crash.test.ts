import t from 'tap'
import { BROKEN, Gate, idle, LEASE, replica, Store } from '../protect/harness.ts'
import { asking, broken, stored, unknownIn, Worker, worker } from './harness.ts'

const FAULTS = ['down', 'full', 'lost', 'dropped', 'dead', 'dead_applied'] as const

/** The first replica fails at its n-th call of the store; the second takes over. */
async function failAt(
  n: number,
  fault: (typeof FAULTS)[number],
  say: 'done' | 'not_found',
): Promise<{ store: Store; calls: number; asked: number; state: string; reached: boolean }> {
  const policy = asking({ after: 1 })
  const store = new Store()
  const owner = replica(t, { store })
  const gate = new Gate()
  owner.script.push(gate.before(() => BROKEN))
  void owner.send({ route: policy })
  await gate.reached
  store.now += LEASE
  const first = new Worker(store, [policy])
  const second = worker(t, store, policy)
  for (const one of [first, second])
    one.otherwise = () => (say === 'done' ? one.says(200) : one.says(404, {}))
  let calls = 0
  let by: unknown = null
  store.fault = (call) => {
    if (by === null) by = call.by
    if (call.by !== by) return null
    return ++calls === n ? fault : null
  }
  for (let round = 0; round < 4; round++) {
    // If it died, this never returns.
    void first.sweeper.sweep().catch(() => {})
    await idle()
    const record = await stored(store)
    if (record.state !== 'unknown') break
    store.now = record.nextLookAt
  }
  const reached = calls >= n
  for (let round = 0; round < 6; round++) {
    await second.round()
    const record = await stored(store)
    if (record.state !== 'unknown') break
    store.now = (await unknownIn(store)).nextLookAt
  }
  const { state } = await stored(store)
  gate.open()
  await idle()
  return { store, calls, asked: first.asked.length + second.asked.length, state, reached }
}

for (const say of ['done', 'not_found'] as const)
  for (const fault of FAULTS)
    void t.test(`X05 ${say}: another replica resolves the record after ${fault} at any call`, async (t) => {
      let n = 1
      for (; n < 40; n++) {
        const { asked, state, reached } = await failAt(n, fault, say)
        t.equal(state, say === 'done' ? 'completed' : 'failed_retryable', `at call ${n}`)
        t.ok(asked <= (say === 'done' ? 2 : 4), `${asked} queries`)
        if (!reached) break
      }
      t.ok(n > (say === 'done' ? 6 : 9), `${n} calls`)
    })

void t.test('a status query counts as asked even if its replica dies', async (t) => {
  const policy = asking({ attempts: 2 })
  const store = new Store()
  await broken(replica(t, { store }), policy)
  const lost = new Worker(store, [policy])
  lost.script.push(() => new Promise(() => {}))
  const other = worker(t, store, policy)
  other.script.push(other.says(202))
  store.now = (await unknownIn(store)).nextLookAt
  await lost.sweeper.sweep()
  await idle()
  t.match(await stored(store), { reconciliation: { asked: 1, notFound: 0 } })
  for (let round = 0; round < 3; round++) {
    store.now = (await unknownIn(store)).nextLookAt
    await other.round()
  }
  t.same([lost.asked.length, other.asked.length, other.results], [1, 1, ['dead_lettered']])
})

void t.test('a lost answer breaks a streak of "not found"', async (t) => {
  const policy = asking({ after: 1 })
  const store = new Store()
  await broken(replica(t, { store }), policy)
  const lost = new Worker(store, [policy])
  const other = worker(t, store, policy)
  const next = async (one: Worker): Promise<void> => {
    store.now = (await unknownIn(store)).nextLookAt
    await one.sweeper.sweep()
    await idle()
  }
  other.otherwise = () => other.says(404, {})
  await next(other)
  t.match(await stored(store), { reconciliation: { asked: 1, notFound: 1 } })
  lost.script.push(() => new Promise(() => {}))
  await next(lost)
  await next(other)
  t.match(await stored(store), { state: 'unknown', reconciliation: { asked: 3, notFound: 1 } })
  await next(other)
  t.equal((await stored(store)).state, 'failed_retryable')
})
