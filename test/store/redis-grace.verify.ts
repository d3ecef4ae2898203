import t, { type Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import { openRedisStore, RedisKeys } from '../../src/store/redis.ts'
import type { NewEpoch, Store } from '../../src/store/register.ts'
import { RedisCluster } from '../support/redis-cluster.ts'
import { SentinelGroup } from '../support/redis-sentinel.ts'
import { bytesOf, newId, newToken, SPANS, until } from './fixtures.ts'

t.setTimeout(300_000)

const KEYS = new RedisKeys('pay')
const GRACE: Millis = 2000

async function open(t: Test, url: string): Promise<{ readonly store: Store; readonly epochs: NewEpoch[] }> {
  const epochs: NewEpoch[] = []
  const store = await openRedisStore({
    url,
    service: 'pay',
    timeoutMs: 1000,
    grace: GRACE,
    onEvent: () => {},
    onNewEpoch: (epoch) => void epochs.push(epoch),
  })
  t.teardown(() => store.close())
  return { store, epochs }
}

/** Claims keys until one is granted. Returns the results of the attempts, without immediate repeats. */
async function claimed(store: Store, idOf: () => RecordId = newId): Promise<readonly string[]> {
  const found: string[] = []
  await until(async () => {
    const kind = await Promise.resolve(store.put(idOf(), bytesOf('in_progress', newToken()), SPANS)).then(
      () => 'granted',
      (error: Error) => error.name,
    )
    if (found.at(-1) !== kind) found.push(kind)
    return kind === 'granted'
  })
  return found
}

void t.test('W01 after a Sentinel failover both proxies notice, and claims are held', async (t) => {
  await using group = await SentinelGroup.start()
  const [a, b] = [await open(t, group.url), await open(t, group.url)]
  t.same(await claimed(a.store), ['granted'], 'a new store holds nothing')
  const id = newId()
  await a.store.put(id, bytesOf('in_progress', newToken()), SPANS)
  await until(() => a.epochs.length === 1 && b.epochs.length === 1)
  await group.impatient()
  await (await group.master())?.kill()
  await until(() => a.epochs.length === 2 && b.epochs.length === 2)
  t.ok([a, b].every(({ epochs }) => epochs[1]?.concerns(id)))
  t.match(
    await a.store.put(id, bytesOf('in_progress', newToken()), SPANS),
    { done: false },
    'an existing record answers',
  )
  t.match(await b.store.put(newId(), bytesOf('in_progress', newToken()), SPANS, 'again'), { done: true })
  const found = await claimed(b.store)
  t.ok(found.includes('InGrace'))
})

void t.test('W01 in a cluster, a promotion or a moved slot holds only its own shards', async (t) => {
  await using cluster = await RedisCluster.start({ masters: 3, replicas: 1, nodeTimeout: 5000 })
  const { store, epochs } = await open(t, cluster.url)
  /** An id of a shard that the nth master has. */
  const idOf = async (nth: number): Promise<RecordId> => {
    for (;;) {
      const id = newId()
      if ((await cluster.ownerOf(await cluster.slotOf(KEYS.record(id)))) === cluster.masters[nth]) return id
    }
  }
  const ids = [await idOf(0), await idOf(1), await idOf(2)] as const
  const sibling = (id: RecordId) => () => `${id.slice(0, 2)}${newId().slice(2)}` as RecordId
  for (const id of ids) t.equal((await claimed(store, sibling(id))).at(-1), 'granted')
  await until(() => epochs.length >= 3)
  const slot = await cluster.slotOf(KEYS.record(ids[0]))
  for (const step of await cluster.move(slot, cluster.masters[2] as (typeof cluster.masters)[0])) await step()
  t.ok((await claimed(store, sibling(ids[0]))).includes('InGrace'), 'a needless pause of that shard')

  const before = epochs.length
  await cluster.members[4]?.server.command('CLUSTER', 'FAILOVER')
  const concerned = (id: RecordId) => epochs.slice(before).some(({ concerns }) => concerns(id))
  await until(() => concerned(ids[1]))
  t.equal((await claimed(store, sibling(ids[2]))).at(-1), 'granted', 'other shards are served')
  t.ok((await claimed(store, sibling(ids[1]))).includes('InGrace'))
})
