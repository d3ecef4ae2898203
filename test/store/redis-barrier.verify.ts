import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import type { Wait } from '../../src/store/redis/keys.ts'
import { RedisServer } from '../support/redis.ts'
import { RedisCluster } from '../support/redis-cluster.ts'
import { SentinelGroup } from '../support/redis-sentinel.ts'
import { bytesOf, newId, newToken, SPANS, until } from './fixtures.ts'
import {
  claiming as claim,
  takesClaims as claims,
  idIn,
  KEYS as keys,
  open as openStore,
  PATIENT,
  redisContract,
} from './redis-fixtures.ts'

/* `store.wait` with real replicas. What a master may answer: redis-barrier.test.ts. */

t.setTimeout(300_000)

const UNREPLICATED = { name: 'Unreplicated', maybeApplied: true }

/** By default the wait has a `timeout` for rounds that replicas answer: no test waits that long. */
const open = (t: Test, url: string, wait: Partial<Wait>) =>
  openStore(t, url, { wait: { replicas: 1, disk: 'none', timeout: PATIENT, ...wait } })

/** A master with `count` replicas. */
async function replicated(t: Test, count = 1) {
  const master = await RedisServer.start({ args: ['--repl-diskless-sync-delay', '0'] })
  t.teardown(() => master[Symbol.asyncDispose]())
  const replicas: RedisServer[] = []
  for (let n = 0; n < count; n++) replicas.push(await replicaOf(t, master))
  return { master, replicas, replica: replicas[0] as RedisServer }
}

async function replicaOf(t: Test, master: RedisServer): Promise<RedisServer> {
  const before = await connected(master)
  const replica = await RedisServer.start({ args: ['--replicaof', '127.0.0.1', String(master.port)] })
  t.teardown(() => replica[Symbol.asyncDispose]())
  await until(async () => (await connected(master)) > before)
  return replica
}

/** Its replicas, as `WAIT` counts them. */
async function connected(master: RedisServer): Promise<number> {
  return Number(await master.command('WAIT', 9, 1))
}

const contract = await replicated(t)
const [knowsWaitAof] = (await contract.master.command('COMMAND', 'INFO', 'waitaof')) as unknown[]
/** Redis 7.2 or later, or Valkey: REDIS_SERVER can name another server than the system's. */
const hasWaitAof = knowsWaitAof !== null
redisContract(t, 'redis with store.wait', contract.master.url, () => contract.master.command('FLUSHALL'), {
  wait: { replicas: 1, disk: 'none', timeout: PATIENT },
})

void t.test('W05 a claim that no replica has is rejected; nothing else waits for replicas', async (t) => {
  const { master, replica } = await replicated(t)
  const patient = await open(t, master.url, {})
  const { store, waited } = await open(t, master.url, { timeout: 50 })
  const [before, id] = [newId(), newId()]
  const [owner, token] = [newToken(), newToken()]
  t.ok((await patient.store.put(before, claim(owner), SPANS)).done)
  replica.pause()
  await t.rejects(async () => store.put(id, claim(token), SPANS), {
    ...UNREPLICATED,
    message: 'store.wait is not satisfied: 0 of 1 replicas had it within 50 ms',
  })
  t.ok((await store.get(id)).bytes, 'it exists, and has to be withdrawn')
  for (const [one, by, state] of [
    [before, owner, 'completed'],
    [id, token, 'failed_retryable'],
  ] as const)
    t.ok(
      (await store.swap(one, { token: by, states: ['in_progress'] }, bytesOf(state, by), SPANS, false)).done,
    )
  t.strictSame(waited, [false])
  replica.resume()
  t.ok(await claims(patient.store)())
})

void t.test('R06 through Sentinel: a failover loses no claim that was granted', async (t) => {
  await using group = await SentinelGroup.start()
  const before = (await group.master()) as RedisServer
  const replicas = group.servers.filter((server) => server !== before)
  const patient = await open(t, group.url, {})
  const { store } = await open(t, group.url, { timeout: 50 })
  const kept = newId()
  t.ok((await patient.store.put(kept, claim(), SPANS)).done)
  // The replicas are cut off: what the master writes now will be lost.
  for (const replica of replicas) await replica.command('CONFIG', 'SET', 'masteruser', 'nobody')
  for (const replica of replicas) await replica.command('CONFIG', 'SET', 'masterauth', 'x')
  await before.command('CLIENT', 'KILL', 'TYPE', 'replica')
  const lost = newId()
  await t.rejects(async () => store.put(lost, claim(), SPANS), UNREPLICATED)
  await group.impatient()
  before.pause()
  for (const replica of replicas) await replica.command('CONFIG', 'SET', 'masterauth', '')
  for (const replica of replicas) await replica.command('CONFIG', 'SET', 'masteruser', '')
  await until(claims(patient.store))
  t.ok((await patient.store.get(kept)).bytes)
  t.match(await patient.store.put(lost, claim(), SPANS), { done: true }, 'lost, and never executed')
  before.resume()
})

const starting = RedisCluster.start({ replicas: 1 })
t.teardown(async () => (await starting)[Symbol.asyncDispose]())

void t.test('in a cluster claims wait for the replicas of their own master', async (t) => {
  const cluster = await starting
  const patient = await open(t, cluster.url, {})
  const { store, waited } = await open(t, cluster.url, { timeout: 50 })
  const all = await open(t, cluster.url, { replicas: 'all' })
  await Promise.all(Array.from({ length: 300 }, async () => patient.store.put(newId(), claim(), SPANS)))
  t.ok(patient.waited.every(Boolean))
  t.ok(await claims(all.store)())
  const [first] = cluster.masters
  const replica = cluster.members[cluster.masters.length]
  replica?.server.pause()
  const ids = Array.from({ length: 100 }, newId)
  const owners = await Promise.all(
    ids.map(async (id) => cluster.ownerOf(await cluster.slotOf(keys.record(id)))),
  )
  // Only what is to be rejected waits for a time.
  const results = await Promise.allSettled(
    ids.map(async (id, n) => (owners[n] === first ? store : patient.store).put(id, claim(), SPANS)),
  )
  for (const [n, result] of results.entries())
    t.equal(result.status, owners[n] === first ? 'rejected' : 'fulfilled')
  t.ok(patient.waited.every(Boolean) && !waited.includes(true) && waited.length > 0)
  replica?.server.resume()
  // A replica that is down is still known.
  const dead = await open(t, cluster.url, { replicas: 'all', timeout: 50 })
  await replica?.server.kill()
  await until(async () => String(await first?.server.command('ROLE')).endsWith(','))
  const id = ids[owners.indexOf(first as never)] as RecordId
  await t.rejects(async () => dead.store.put(idIn(keys.shardOf(id)), claim(), SPANS), {
    ...UNREPLICATED,
    message: 'store.wait is not satisfied: 0 of 1 replicas had it within 50 ms',
  })
})

void t.test(
  'claims wait for real disks',
  { skip: hasWaitAof ? false : 'WAITAOF: Redis 7.2 or later' },
  async (t) => {
    const { master, replica } = await replicated(t)
    for (const wait of [
      { replicas: 'none', disk: 'local' },
      { disk: 'local' },
      { disk: 'replicas' },
    ] as const) {
      const { store } = await open(t, master.url, wait)
      t.ok(await claims(store)(), JSON.stringify(wait))
    }
    const hasty = { timeout: 50 }
    const both = await open(t, master.url, { disk: 'replicas', ...hasty })
    const local = await open(t, master.url, { replicas: 'none', disk: 'local', ...hasty })
    await replica.command('CONFIG', 'SET', 'appendonly', 'no')
    await t.rejects(async () => both.store.put(newId(), claim(), SPANS), {
      ...UNREPLICATED,
      message: 'store.wait is not satisfied: 0 of 1 replicas had it within 50 ms',
    })
    await until(claims(local.store))
    await master.command('CONFIG', 'SET', 'appendonly', 'no')
    await t.rejects(async () => local.store.put(newId(), claim(), SPANS), {
      ...UNREPLICATED,
      message: /appendonly is disabled/,
    })
  },
)
