import t from 'tap'
import type { Wait } from '../../src/store/redis-barrier.ts'
import { redisTraits, together } from '../../src/store/redis-traits.ts'
import type { StoreTraits } from '../../src/store/register.ts'

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
