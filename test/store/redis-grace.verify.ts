import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import type { RedisOptions } from '../../src/store/redis/keys.ts'
import { RedisServer } from '../support/redis.ts'
import { RedisCluster } from '../support/redis-cluster.ts'
import { SentinelGroup } from '../support/redis-sentinel.ts'
import { relay } from '../support/relay.ts'
import { claim, newId, until } from './fixtures.ts'
import { GRACE, heldBy as held } from './grace.ts'
import { answers, KEYS, open as openStore, replacedBy as promoted, sibling } from './redis-fixtures.ts'

/* The grace after real failovers. Its rules: redis-grace.test.ts. */

t.setTimeout(300_000)

const open = (t: Test, url: string, { grace = GRACE }: Partial<RedisOptions> = {}) =>
  openStore(t, url, { grace })

type Opened = Awaited<ReturnType<typeof open>>

/** Claims keys until one is granted: a grace ends once a claim was held. Returns the results, without immediate repeats. */
async function claimed({ store, advance }: Opened, idOf: () => RecordId = newId): Promise<readonly string[]> {
  const found: string[] = []
  await until(async () => {
    const kind = await claim(store, idOf()).then(
      () => 'granted',
      (error: Error) => error.name,
    )
    if (kind === 'InGrace') advance(GRACE)
    if (found.at(-1) !== kind) found.push(kind)
    return kind === 'granted'
  })
  return found
}

void t.test('W01 after a Sentinel failover both proxies notice, and claims are held', async (t) => {
  await using group = await SentinelGroup.start()
  const [a, b] = [await open(t, group.url), await open(t, group.url)]
  t.same(await claimed(a), ['granted'], 'a new store holds nothing')
  const id = newId()
  await claim(a.store, id)
  await until(() => a.epochs.length === 1 && b.epochs.length === 1)
  await group.impatient()
  await (await group.master())?.kill()
  await until(() => a.epochs.length === 2 && b.epochs.length === 2)
  t.ok([a, b].every(({ epochs }) => epochs[1]?.concerns(id)))
  t.match(await claim(a.store, id), { done: false }, 'an existing record answers')
  t.match(await claim(b.store, newId(), 'again'), { done: true })
  const found = await claimed(b)
  t.ok(found.includes('InGrace'))
})

void t.test('W01 in a cluster, a promotion or a moved slot holds only its own shards', async (t) => {
  await using cluster = await RedisCluster.start({ masters: 3, replicas: 1, nodeTimeout: 5000 })
  const opened = await open(t, cluster.url)
  const { epochs } = opened
  /** An id of a shard that the nth master has. */
  const idOf = async (nth: number): Promise<RecordId> => {
    for (;;) {
      const id = newId()
      if ((await cluster.ownerOf(await cluster.slotOf(KEYS.record(id)))) === cluster.masters[nth]) return id
    }
  }
  const ids = [await idOf(0), await idOf(1), await idOf(2)] as const
  for (const id of ids) t.equal((await claimed(opened, () => sibling(id))).at(-1), 'granted')
  await until(() => epochs.length >= 3)
  const slot = await cluster.slotOf(KEYS.record(ids[0]))
  for (const step of await cluster.move(slot, cluster.masters[2] as (typeof cluster.masters)[0])) await step()
  t.ok((await claimed(opened, () => sibling(ids[0]))).includes('InGrace'), 'a needless pause of that shard')

  const before = epochs.length
  await cluster.members[4]?.server.command('CLUSTER', 'FAILOVER')
  const concerned = (id: RecordId) => epochs.slice(before).some(({ concerns }) => concerns(id))
  // The command begins the failover, and does not wait for it.
  await until(async () => (await claimed(opened, () => sibling(ids[1]))).includes('InGrace'))
  await until(() => concerned(ids[1]))
  t.equal((await claimed(opened, () => sibling(ids[2]))).at(-1), 'granted', 'other shards are served')
})

void t.test('W01 a server that is back with an older snapshot begins a grace', async (t) => {
  await using own = await RedisServer.start({ args: ['--appendonly', 'no', '--save', ''] })
  const { store, epochs, advance } = await open(t, own.url)
  const id = newId()
  t.match(await claim(store, sibling(id)), { done: true })
  await until(() => epochs.length === 1)
  await own.command('SAVE')
  await claim(store, id)
  await own.kill()
  await own.start()
  await until(answers(store))
  await held(store, id)
  await until(() => epochs.length > 1)
  t.ok(epochs.at(-1)?.concerns(id))
  advance(GRACE)
  t.match(await claim(store), { done: true })
})

void t.test('a master that has become a replica is left even if nothing is written', async (t) => {
  await using own = await RedisServer.start()
  await using between = await relay(own.port)
  const { epochs } = await open(t, `redis://127.0.0.1:${between.port}`, { grace: 200 })
  await until(() => epochs.length === 1)
  let connections = 0
  between.onCommand = (bytes) => void (connections += bytes.includes('setname') ? 1 : 0)
  await own.command('REPLICAOF', '127.0.0.1', '1')
  await until(() => connections > 0)
})

void t.test('a replica refuses a claim instead of holding it', async (t) => {
  await using own = await RedisServer.start()
  await promoted(own)
  const { store } = await open(t, own.url)
  await held(store)
  await own.command('FLUSHALL')
  await own.command('REPLICAOF', '127.0.0.1', '1')
  await t.rejects(claim(store), /READONLY|not connected/)
})
