import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { RedisCluster } from '../support/redis-cluster.ts'
import { bytesOf, HOUR, newToken, SPANS, until } from './fixtures.ts'
import { claiming as claim, idIn, KEYS, NOT_APPLIED, NOTE, open, redisContract } from './redis-fixtures.ts'

/* Real clusters. What their nodes may answer: redis-cluster.test.ts. */

t.setTimeout(300_000)

const cluster = await RedisCluster.start()
t.teardown(() => cluster[Symbol.asyncDispose]())
redisContract(t, 'redis cluster', cluster.url, () => cluster.command('FLUSHALL'))

void t.test('R10 W06 moving a slot by hand costs a request at most one retry per step', async (t) => {
  const [{ store }, { store: peer }] = [await open(t, cluster.url), await open(t, cluster.url)]
  const shard = 7
  const slot = await cluster.slotOf(KEYS.indexes[KEYS.shardOf(idIn(shard))] as string)
  let told = 0
  const token = newToken()
  const own = { token, states: ['in_progress'] } as const
  type Step = (id: RecordId) => Promise<boolean>
  const steps: Step[] = [
    async (id) => (await store.put(id, bytesOf('in_progress', token), SPANS)).done,
    async (id) => {
      told = 0
      await store.watch(id, () => void told++)
      return true
    },
    async (id) => (await store.renew([{ id, token, ...SPANS }]))[0] === true,
    (id) => store.history.append(id, [NOTE]),
    async (id) => (await peer.swap(id, own, bytesOf('completed', token), SPANS, false)).done,
    async (id) => (await store.get(id)).bytes?.[3] === 2,
  ]
  /** How often a step of the request failed because of the move. */
  let refused = 0
  for (let gap = 0; gap < steps.length; gap++)
    for (let moved = 1; moved <= 6; moved++) {
      // The shard holds another record, or is empty.
      await cluster.command('FLUSHALL')
      if (moved % 2) await store.put(idIn(shard), claim(), SPANS)
      const from = await cluster.ownerOf(slot)
      const to = cluster.masters[(cluster.masters.indexOf(from) + 1) % 3] as typeof from
      await to.server.command('SCRIPT', 'FLUSH')
      const id = idIn(shard)
      for (const step of steps.slice(0, gap)) t.ok(await step(id))
      const moves = await cluster.move(slot, to)
      for (const move of moves.slice(0, moved)) await move()
      const [step, ...rest] = steps.slice(gap) as [Step, ...Step[]]
      const [first] = await Promise.allSettled([step(id)])
      if (first.status === 'rejected') {
        refused++
        t.match(first.reason, { ...NOT_APPLIED, message: /TRYAGAIN/ }, `${gap} ${moved}`)
      } else t.ok(first.value, `${gap} ${moved}`)
      for (const move of moves.slice(moved)) await move()
      if (first.status === 'rejected') t.ok(await step(id), `${gap} ${moved} again`)
      for (const step of rest) t.ok(await step(id), `${gap} ${moved}`)
      if (gap > 0) await until(() => told > 0)
      t.equal((await cluster.ownerOf(slot)).id, to.id)
      t.equal(await to.server.command('CLUSTER', 'COUNTKEYSINSLOT', slot), moved % 2 ? 4 : 2)
    }
  t.ok(refused > 0, `${refused} of 36`)
})

void t.test('list reads an index whose slot is moving; due reads it or fails with TRYAGAIN', async (t) => {
  const { store } = await open(t, cluster.url)
  await cluster.command('FLUSHALL')
  const id = idIn(9)
  await store.put(id, bytesOf('unknown', newToken()), { dueIn: 0, dropIn: HOUR })
  const slot = await cluster.slotOf(KEYS.indexes[KEYS.shardOf(id)] as string)
  const from = await cluster.ownerOf(slot)
  const to = cluster.masters.find(({ id }) => id !== from.id) as typeof from
  for (const move of await cluster.move(slot, to)) {
    await move()
    t.same((await store.list('unresolved', null, 10)).ids, [id])
    const [due] = await Promise.allSettled([store.due(10)])
    if (due.status === 'fulfilled') t.same(due.value, [id])
    else t.match(due.reason, { ...NOT_APPLIED, message: /TRYAGAIN/ })
  }
  t.same(await store.due(10), [id])
})
