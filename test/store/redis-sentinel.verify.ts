import t from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { freePort, RedisServer } from '../support/redis.ts'
import { MASTER, SentinelGroup } from '../support/redis-sentinel.ts'
import { relay } from '../support/relay.ts'
import { bytesOf, claim, newId, newToken, SPANS, until } from './fixtures.ts'
import { NOT_APPLIED, open, redisContract, takesClaims as writes } from './redis-fixtures.ts'

/* Real Sentinels. What they may answer: redis-sentinel.test.ts. */

t.setTimeout(300_000)

/** Until a command to a paused master is given up. */
const FAST: Millis = 300

const group = await SentinelGroup.start()
t.teardown(() => group[Symbol.asyncDispose]())
redisContract(t, 'redis through Sentinel', group.url, async () => (await group.master())?.command('FLUSHALL'))

void t.test('operations and watchers follow an operator’s failover', async (t) => {
  const { store, events } = await open(t, group.url)
  const { store: peer, events: theirs } = await open(t, group.url)
  const before = await group.master()
  t.equal(
    (await store.traits()).topology,
    `of 3 Sentinels 3 answered; the latest configuration (epoch 0) names 127.0.0.1:${before?.port} as the master "${MASTER}"`,
  )
  const id = newId()
  let told = 0
  await store.watch(id, () => void told++)
  t.ok((await claim(store, id)).done)
  await group.failover()
  await until(async () => {
    const now = await group.master()
    return now !== undefined && now !== before
  })
  const after = await group.master()
  // The old master may answer until a Sentinel is asked again.
  for (const one of [events, theirs]) await until(() => one.at(-1) === `connected: 127.0.0.1:${after?.port}`)
  await until(() => told > 0)
  t.ok((await store.get(id)).bytes, 'the replicated record is there')
  const { bytes } = await store.get(id)
  const seen = told
  await until(writes(peer))
  const version = (bytes as Buffer).readUIntBE(4, 6)
  t.ok((await peer.swap(id, { version }, bytesOf('unknown', newToken()), SPANS, false)).done)
  await until(() => told > seen)
})

for (const [what, end] of [
  ['killed', (server: RedisServer) => server.kill()],
  ['paused', async (server: RedisServer) => server.pause()],
] as const)
  void t.test(`a ${what} master is replaced by the one that the Sentinels promote`, async (t) => {
    await using group = await SentinelGroup.start()
    const { store, events } = await open(t, group.url, { timeoutMs: FAST })
    const id = newId()
    t.ok((await claim(store, id)).done)
    const before = (await group.master()) as RedisServer
    await before.command('WAIT', 2, 0)
    await group.impatient()
    await end(before)
    await until(writes(store))
    // The other Sentinels hear of it a little later.
    await until(async () => ![undefined, before].includes(await group.master()))
    const after = await group.master()
    t.equal(events.at(-1), `connected: 127.0.0.1:${after?.port}`)
    t.ok((await store.get(id)).bytes)
    if (what === 'paused') before.resume()
    else await before.start()
    t.ok((await store.get(id)).bytes, 'the old master is not asked')
  })

void t.test('one Sentinel is enough: one that is down and one that hangs are not waited for', async (t) => {
  await using group = await SentinelGroup.start()
  await group.sentinels[0]?.stop()
  group.sentinels[1]?.pause()
  const { store } = await open(t, group.url)
  t.ok(await writes(store)())
  await group.servers[0]?.command('CLIENT', 'KILL', 'TYPE', 'normal')
  await until(writes(store))
  group.sentinels[1]?.resume()
})

const hostsOf = (servers: readonly { readonly port: number }[]) =>
  servers.map(({ port }) => `127.0.0.1:${port}`).join(',')

void t.test('a missed switch is noticed once a Sentinel can be heard again', async (t) => {
  await using group = await SentinelGroup.start()
  const before = (await group.master()) as RedisServer
  // The Sentinels cannot make it a replica: it goes on taking writes.
  await before.command('ACL', 'SETUSER', 'default', '-multi', '-slaveof', '-replicaof', '-client|kill')
  const relays = await Promise.all(group.sentinels.map(({ port }) => relay(port)))
  t.teardown(() => Promise.all(relays.map((one) => one[Symbol.asyncDispose]())))
  const { store, events } = await open(t, `redis+sentinel://${hostsOf(relays)}/${MASTER}`)
  for (const one of relays) {
    one.accept = false
    one.cut()
  }
  await group.impatient()
  before.pause()
  // Until every Sentinel has switched.
  for (const one of group.sentinels)
    await until(
      async () => !String(await one.command('SENTINEL', 'MASTER', MASTER)).includes(`,${before.port},`),
    )
  before.resume()
  t.ok(await writes(store)(), 'the store has not heard of it')
  t.equal(events.length, 1)
  for (const one of relays) one.accept = true
  const after = await group.master()
  await until(() => events.at(-1) === `connected: 127.0.0.1:${after?.port}`)
  t.ok(await writes(store)())
  t.match(await before.command('ROLE'), ['master'], 'the old master would still have taken the write')
})

void t.test('a Sentinel that slept through a failover does not win by answering first', async (t) => {
  await using old = await RedisServer.start()
  await using next = await RedisServer.start()
  const sentinelOf = ({ port }: RedisServer, epoch: number) =>
    RedisServer.start({
      sentinel: [
        `sentinel monitor ${MASTER} 127.0.0.1 ${port} 1`,
        `sentinel config-epoch ${MASTER} ${epoch}`,
      ],
    })
  await using stale = await sentinelOf(old, 3)
  await using fresh = await sentinelOf(next, 4)
  await using first = await relay(stale.port)
  await using second = await relay(fresh.port)
  second.holdReplies = true
  first.onReply = (bytes) => {
    if (String(bytes).includes(String(old.port))) setImmediate(() => second.release())
  }
  const { store, events } = await open(t, `redis+sentinel://${hostsOf([first, second])}/${MASTER}`)
  t.strictSame(events, [`connected: 127.0.0.1:${next.port}`])
  t.ok(await writes(store)())
  t.equal(
    (await store.traits()).topology,
    `of 2 Sentinels 2 answered; the latest configuration (epoch 4) names 127.0.0.1:${next.port} as the master "${MASTER}"`,
  )
  // Its connection comes back, and its news is old.
  first.cut()
  const listens = Promise.withResolvers<void>()
  first.onReply = (bytes) => void (String(bytes).includes(String(old.port)) && listens.resolve())
  await listens.promise
  t.ok(await writes(store)())
  t.equal(events.length, 1)
})

void t.test('an unknown master, absent Sentinels and a plain Redis each give a clear error', async (t) => {
  const wrong = group.url.replace(MASTER, 'paymnets')
  await t.rejects(open(t, wrong), {
    ...NOT_APPLIED,
    message:
      /^store\.url: no Sentinel of (127\.0\.0\.1:\d+(, )?){3} knows the master "paymnets"; allowed: a name listed by SENTINEL MASTERS$/,
  })
  const free = await freePort()
  const nobody = await open(t, `redis+sentinel://127.0.0.1:${free}/${MASTER}`)
  await t.rejects(nobody.store.ping(), {
    ...NOT_APPLIED,
    message: new RegExp(`no Sentinel names the master "${MASTER}": 127.0.0.1:${free}: .*ECONNREFUSED`),
  })
  const six = await open(t, `redis+sentinel://[::1]:${free}/${MASTER}`)
  await t.rejects(six.store.ping(), { message: new RegExp(`: \\[::1\\]:${free}: `) })
  const server = group.servers[0] as RedisServer
  await t.rejects(open(t, `redis+sentinel://127.0.0.1:${server.port}/${MASTER}`), {
    ...NOT_APPLIED,
    message: `store.url: no Sentinel at 127.0.0.1:${server.port}, but a Redis; allowed: the addresses of Sentinels, or redis:// for one server`,
  })
  const mixed = await open(t, `redis+sentinel://127.0.0.1:${server.port},127.0.0.1:${free}/${MASTER}`)
  await t.rejects(mixed.store.ping(), { ...NOT_APPLIED, message: /unknown command 'sentinel'/ })
  t.equal(mixed.events.length, 1)
  const [sentinel] = group.sentinels
  const alone = await open(t, String(sentinel?.url))
  const { refusals } = await alone.store.traits()
  t.ok(refusals.some((refusal) => refusal.startsWith('The server is a Sentinel, which holds no records')))
})

void t.test('servers and Sentinels can have different passwords, which no event shows', async (t) => {
  await using server = await RedisServer.start({ args: ['--requirepass', 'p@ss'] })
  const monitor = [`sentinel monitor ${MASTER} 127.0.0.1 ${server.port} 1`]
  await using unguarded = await RedisServer.start({ sentinel: monitor })
  await using alike = await RedisServer.start({ sentinel: [...monitor, 'requirepass p@ss'] })
  await using guarded = await RedisServer.start({
    sentinel: [...monitor, 'requirepass other', 'user eye on >s3n ~* &* +@all'],
  })
  const url = ({ port }: RedisServer, credentials: string, query = '') =>
    `redis+sentinel://${credentials}127.0.0.1:${port}/${MASTER}/0${query}`
  for (const right of [
    url(unguarded, ':p%40ss@'),
    url(unguarded, 'default:p%40ss@'),
    url(alike, ':p%40ss@'),
    url(guarded, ':p%40ss@', '?sentinelPassword=other'),
    url(guarded, 'default:p%40ss@', '?sentinelUsername=eye&sentinelPassword=s3n'),
  ]) {
    const { store } = await open(t, right)
    t.ok(await writes(store)(), right)
  }
  for (const [wrong, message] of [
    [url(unguarded, ''), /NOAUTH/],
    [url(alike, 'default:p%40ss@'), /no Sentinel names the master.*NOAUTH/],
    [url(guarded, ':p%40ss@'), /no Sentinel names the master.*WRONGPASS/],
  ] as const) {
    const { store, events } = await open(t, wrong)
    await t.rejects(store.ping(), { ...NOT_APPLIED, message })
    t.notMatch(JSON.stringify(events), /p@ss|\bother\b|s3n/)
  }
})
