import { writeFileSync } from 'node:fs'
import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { reconnectDelay } from '../../src/store/reconnect.ts'
import type { Wait } from '../../src/store/redis/keys.ts'
import { RedisKeys, SHARDS } from '../../src/store/redis/keys.ts'
import { redisTraits, together } from '../../src/store/redis/traits.ts'
import * as parsing from '../../src/store/redis/url.ts'
import type { StoreTraits } from '../../src/store/register.ts'
import { tempDir } from './fixtures.ts'

/* What the Redis store computes without a server: keys, addresses, and what a server says about itself. */

const KEYS = new RedisKeys('pay.eu')
/** The digest that begins with this byte. */
const idOf = (first: number, rest = 0xaf) =>
  Buffer.from([first, ...Array.from({ length: 31 }, () => rest)]).toString('base64url') as RecordId

void t.test('the layout of keys is fixed for good', async (t) => {
  const id = idOf(0xaf)
  const own = 'idempotency:pay.eu:{af}:'
  t.equal(KEYS.record(id), `${own}r:${id}`)
  t.equal(KEYS.channel(id), `${own}c:${id}`)
  t.equal(KEYS.bucket(id), `${own}n:${id}`)
  t.equal(KEYS.indexes[0xaf], `${own}u`)
  t.equal(KEYS.epochs[0xaf], `${own}e`)
  t.equal(KEYS.marker(0xaf), `${own}w`)
  t.equal(KEYS.globOf(id.slice(0, 8)), `${own}r:${id.slice(0, 8)}*`)
  t.equal(KEYS.glob, 'idempotency:pay.eu:*:r:*')
})

void t.test('the shard of an id is its first byte', async (t) => {
  const bytes = Array.from({ length: 256 }, (_, n) => n)
  t.strictSame(SHARDS, bytes)
  for (const rest of [0x00, 0xff])
    t.strictSame(
      bytes.map((n) => KEYS.shardOf(idOf(n, rest))),
      bytes,
    )
  t.equal(KEYS.indexes[7], 'idempotency:pay.eu:{07}:u')
})

void t.test('only the key of a record is taken for one', async (t) => {
  const id = idOf(1)
  t.equal(KEYS.idOf(KEYS.record(id)), id)
  for (const other of [
    KEYS.record(id).replace(':r:', ':h:'),
    KEYS.indexes[KEYS.shardOf(id)] as string,
    KEYS.record(id).replace('{01}', '{02}'),
    new RedisKeys('pay').record(id),
    `x${KEYS.record(id)}`,
    `${KEYS.record(id)}x`,
    KEYS.record(id.slice(1) as RecordId),
    `idempotency:pay.eu:{00}:r:${'*'.repeat(43)}`,
    id,
    '',
  ])
    t.equal(KEYS.idOf(other), null, other)
})

/** The files are not read again here: test/store/tls-files.test.ts. */
function unread(_kind: 'error', problem: string): never {
  throw new Error(problem)
}
const redisUrl = (url: string) => parsing.redisUrl(url, unread)
/** The options of a TLS connection, in place of the function that gives them. */
const asked = <A extends { readonly tls?: () => object }>({ tls, ...rest }: A) =>
  tls === undefined ? rest : { ...rest, tls: tls() }

const OPEN = { username: '', password: '', db: 0 }

void t.test('the URL of a server gives host, port, credentials, database and TLS', async (t) => {
  const of = (url: string) => {
    const { kind, hosts, login } = redisUrl(url)
    t.equal(kind, 'server')
    return { hosts, ...asked(login) }
  }
  t.strictSame(of('redis://cache'), { hosts: [{ host: 'cache', port: 6379 }], ...OPEN })
  t.strictSame(of('redis://:s%40@10.0.0.1:1/'), {
    hosts: [{ host: '10.0.0.1', port: 1 }],
    ...OPEN,
    password: 's@',
  })
  t.strictSame(of('redis://:a@b:c@h').password, 'a@b:c')
  t.strictSame(of('rediss://h:1/2?other=a@b').hosts[0]?.host, 'h')
  t.strictSame(of('rediss://h?other=a@b').hosts[0]?.host, 'h')
  t.strictSame(of('rediss://u%40x:p%2F@[::1]:7000/14'), {
    hosts: [{ host: '::1', port: 7000 }],
    username: 'u@x',
    password: 'p/',
    db: 14,
    tls: {},
  })
})

void t.test('the URL of Sentinels gives them, the master, and how each is greeted', async (t) => {
  t.strictSame(redisUrl('redis+sentinel://h1,h2:1,[::1]:22,[::2]/a.b-c_d'), {
    kind: 'sentinel',
    hosts: [
      { host: 'h1', port: 26_379 },
      { host: 'h2', port: 1 },
      { host: '::1', port: 22 },
      { host: '::2', port: 26_379 },
    ],
    login: OPEN,
    sentinel: { master: 'a.b-c_d', login: OPEN },
  })
  const greeted = (url: string) => {
    const { login, sentinel } = redisUrl(url)
    return [asked(login), asked(sentinel.login)]
  }
  t.strictSame(
    greeted('redis+sentinel://:p%2F@h/m/3'),
    [
      { username: '', password: 'p/', db: 3 },
      { username: '', password: 'p/', db: 0 },
    ],
    'a password without a user is theirs, too',
  )
  t.strictSame(greeted('redis+sentinel://u%40:p@h/m/'), [{ username: 'u@', password: 'p', db: 0 }, OPEN])
  t.strictSame(greeted('rediss+sentinel://:p@h/m?sentinelUsername=s&sentinelPassword=x%26y'), [
    { username: '', password: 'p', db: 0, tls: {} },
    { username: 's', password: 'x&y', db: 0, tls: {} },
  ])
})

void t.test('the URL of a cluster gives some of its nodes', async (t) => {
  t.match(redisUrl('redis+cluster://h1:7000,h2'), {
    kind: 'cluster',
    hosts: [
      { host: 'h1', port: 7000 },
      { host: 'h2', port: 6379 },
    ],
    login: OPEN,
  })
  const cluster = redisUrl('rediss+cluster://u:p%40@[::1]:7001/0')
  t.match(cluster, { kind: 'cluster', hosts: [{ host: '::1', port: 7001 }] })
  t.strictSame(asked(cluster.login), { username: 'u', password: 'p@', db: 0, tls: {} })
})

void t.test('TLS uses the files that a URL names', async (t) => {
  using folder = tempDir()
  const [ca, cert, key] = ['ca', 'cert', 'key'].map((name) => {
    writeFileSync(`${folder.path}/${name}`, name)
    return `${folder.path}/${name}`
  })
  const all = `cacert=${ca}&cert=${cert}&key=${key}`
  const tls = { ca: Buffer.from('ca'), cert: Buffer.from('cert'), key: Buffer.from('key') }
  for (const url of [`rediss://h?${all}`, `rediss+cluster://h?${all}`, `rediss+sentinel://h/m?${all}`]) {
    const { login, sentinel } = redisUrl(url)
    t.strictSame([login.tls?.(), sentinel.login.tls?.()], [tls, tls])
  }
  t.strictSame(redisUrl(`rediss://h?key=${key}`).login.tls?.(), { key: tls.key })
  t.throws(() => redisUrl(`rediss://h?cert=${cert}.no`), {
    name: 'StoreUnavailable',
    maybeApplied: false,
    message: /^store.url: cert cannot be read: ENOENT/,
  })
})

void t.test('attempts to connect are ever further apart, up to half a second', async (t) => {
  t.strictSame([1, 2, 3, 4, 5, 6, 50].map(reconnectDelay), [50, 100, 200, 400, 500, 500, 500])
})

const MIB = 2 ** 20
const WAIT: Wait = { replicas: 1, disk: 'none', timeout: 100 }

/** What a sound server says about itself, unless told otherwise; `null`: it does not say. */
function info(more: Readonly<Record<string, string | number | null>> = {}): string {
  const fields = {
    redis_version: '7.2.4',
    redis_mode: 'standalone',
    run_id: '0123456789abcdef',
    role: 'master',
    cluster_enabled: 0,
    aof_enabled: 1,
    maxmemory_policy: 'noeviction',
    maxmemory: 0,
    connected_slaves: 0,
    ...more,
  }
  const lines = Object.entries(fields).flatMap(([name, value]) =>
    value === null ? [] : [`${name}:${value}`],
  )
  return `# Server\r\n${lines.join('\r\n')}\r\n`
}

const traits = (more: Readonly<Record<string, string | number | null>> = {}, wait: Wait | null = null) =>
  redisTraits(info(more), false, wait)

void t.test('a sound server has nothing to find fault with', async (t) => {
  t.strictSame(traits(), {
    durable: true,
    evicts: false,
    forgets:
      'Claims wait for no replica (store.wait): a failover, or a crash of the host, loses the last ones.',
    hasIdentity: true,
    findings: [],
    refusals: [],
    replication: 'claims wait for no replica (store.wait); no replica is connected',
  })
  t.equal(traits({ run_id: null }).hasIdentity, false)
})

void t.test('a server that may not be asked promises nothing', async (t) => {
  const denied = redisTraits(null, false, null)
  t.match(denied, {
    durable: null,
    evicts: null,
    forgets: /^Claims wait for no replica/,
    hasIdentity: false,
    findings: [/may not run INFO.*routes with profile strict answer 503.*store.acceptRisk: true/],
    refusals: [],
  })
  t.notOk('replication' in denied || 'room' in denied)
  t.match(redisTraits(null, false, { ...WAIT, replicas: 'none' }).forgets, null)
  t.equal(redisTraits(null, false, WAIT).forgets, null)
})

void t.test('a server that no key can be claimed on is refused', async (t) => {
  const refusals = (more: Readonly<Record<string, string | number | null>>, isCluster = false) =>
    redisTraits(info(more), isCluster, null).refusals
  t.match(refusals({ redis_version: '6.2.14' }), [/^Redis 6\.2\.14 is too old/])
  t.strictSame(refusals({ redis_version: '7.0.0' }), [])
  t.strictSame(refusals({ redis_version: '10.0.0' }), [])
  t.strictSame(refusals({ redis_version: null }), [])
  t.match(refusals({ redis_mode: 'sentinel' }), [/^The server is a Sentinel/])
  t.match(refusals({ role: 'slave' }), [/^The server is a read-only replica/])
  t.match(refusals({ cluster_enabled: 1 }), [/^The server is a node of a cluster/])
  t.strictSame(refusals({ cluster_enabled: 1 }, true), [])
})

void t.test('what a server loses is found', async (t) => {
  t.match(traits({ aof_enabled: 0 }), { durable: false, findings: [/^appendonly is off/] })
  t.match(traits({ aof_enabled: null }), {
    durable: null,
    findings: [/^INFO does not say whether appendonly is on/],
  })
  t.match(traits({ maxmemory_policy: 'allkeys-lru' }), {
    evicts: true,
    findings: [/^maxmemory-policy is allkeys-lru, not noeviction/],
  })
  for (const silent of [null, ''])
    t.match(traits({ maxmemory_policy: silent }), {
      evicts: null,
      findings: [/^INFO does not say what maxmemory-policy is, .*acceptRisk/],
    })
  t.equal(traits({ maxmemory_policy: null }).findings.length, 1)
})

void t.test('claims that wait for every replica survive a failover', async (t) => {
  const forgets = (replicas: Wait['replicas'], connected: number) =>
    traits({ connected_slaves: connected }, { ...WAIT, replicas }).forgets
  t.equal(forgets('all', 5), null)
  t.equal(forgets(1, 0), null)
  t.equal(forgets(1, 1), null)
  t.match(forgets(1, 2), /^Claims wait for 1 of 2 replicas \(store.wait\): a failover to another one/)
  t.equal(forgets('none', 0), null)
  t.match(forgets('none', 1), /^Claims wait for 0 of 1 replicas/)
})

void t.test('the number of replicas is told, and whether a master that is cut off stops', async (t) => {
  const told = (more: Readonly<Record<string, string | number | null>>) => traits(more).replication
  const none = 'claims wait for no replica (store.wait); '
  const risk = ', and min-replicas-to-write is 0: a master that is cut off keeps accepting claims'
  t.equal(told({ connected_slaves: null }), `${none}no replica is connected`)
  t.equal(told({ connected_slaves: 1 }), `${none}1 replica is connected${risk}`)
  t.equal(told({ connected_slaves: 2 }), `${none}2 replicas are connected${risk}`)
  t.equal(told({ connected_slaves: 2, min_slaves_good_slaves: 2 }), `${none}2 replicas are connected`)
  t.equal(traits({}, WAIT).replication, 'claims wait for 1 replica, up to 100 ms; no replica is connected')
})

void t.test('a server is nearly full above nine tenths', async (t) => {
  const of = (used: number, most: number) => traits({ used_memory: used * MIB, maxmemory: most * MIB })
  const said = (used: number, most: number) => {
    const { findings, room } = of(used, most)
    return { findings, room }
  }
  t.strictSame(said(90, 100), { findings: [], room: '90 MiB of 100 MiB are used' })
  t.strictSame(said(90.9, 100), {
    findings: ['The server uses 90 % of maxmemory: once it is full, new keys are answered 503.'],
    room: '91 MiB of 100 MiB are used',
  })
  t.strictSame(said(7, 0), {
    findings: [],
    room: '7 MiB are used; maxmemory is not set, so the machine runs out of memory first',
  })
  t.notOk('room' in of(0, 100))
  t.notOk('room' in traits())
  t.strictSame(said(1 / MIB, 1 / MIB), {
    findings: ['The server uses 100 % of maxmemory: once it is full, new keys are answered 503.'],
    room: '0 MiB of 0 MiB are used',
  })
})

void t.test('several servers promise what the weakest does, and name who is at fault', async (t) => {
  const named = (name: string, over: Partial<StoreTraits> = {}) => ({ name, ...traits(), ...over })
  const [a, b, c] = [named('a:1'), named('b:1', { room: 'little' }), named('c:1')]
  t.strictSame(together([a, { ...b, room: undefined as never }, c], 0), traits())
  t.match(together([a, { ...b, refusals: ['no'], findings: ['hm'] }, { ...c, findings: ['hm'] }], 0), {
    findings: ['b:1, c:1: hm'],
    refusals: ['b:1: no'],
    room: 'b:1: little',
    replication: a.replication,
  })
  t.equal(
    together([a, b, { ...c, replication: 'other' }], 0)
      .replication?.split('; ')
      .at(-1),
    'c:1: other',
  )
  t.match(together([a, b], 1), { refusals: ['1 of 3 masters of the cluster do not answer.'] })
  const alone = named('', { findings: ['hm'], refusals: ['no'], room: 'little' })
  const { findings, refusals, room } = together([alone], 0)
  t.strictSame({ findings, refusals, room }, { findings: ['hm'], refusals: ['no'], room: 'little' })
  t.equal(together([named('a:1', { room: 'x' }), named('b:1', { room: 'y' })], 0).room, 'a:1: x; b:1: y')
  const two = ['a:1', 'b:1'].map((name) => named(name, { room: 'x' }))
  t.equal(together([...two, c], 0).room, 'a:1, b:1: x')
  const bare = together([{ name: 'a:1', ...redisTraits(null, true, null) }], 0)
  t.notOk('replication' in bare || 'room' in bare)
})
