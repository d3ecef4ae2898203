import { Redis } from 'ioredis'
import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { BATCH } from '../../src/store/redis/batch.ts'
import { ADMIT } from '../../src/store/redis/epochs.ts'
import { RedisKeys } from '../../src/store/redis/keys.ts'
import { openRedisStore } from '../../src/store/redis/store.ts'
import { RedisServer } from '../support/redis.ts'
import { bytesOf, HOUR, newId, newToken, SPANS } from './fixtures.ts'

/* The scripts that hold claims after a failover (docs/adr/0091), asked by proxies that have seen anything. */

const GRACE = 10 * HOUR
const OWN = 'a'.repeat(40)
const OTHER = 'b'.repeat(40)
const SHARD = 'idempotency:pay:{00}:'
const EPOCH = `${SHARD}e`
const SLACK = 5000

const server = await RedisServer.start()
const redis = new Redis(server.url, { protocol: 2 })
t.teardown(async () => {
  redis.disconnect()
  await server[Symbol.asyncDispose]()
})
t.beforeEach(async () => void (await redis.flushall()))

async function clock(): Promise<Millis> {
  const [seconds, micros] = (await redis.time()) as unknown as [string, string]
  return Number(seconds) * 1000 + Math.floor(Number(micros) / 1000)
}

interface Asked {
  readonly seen?: Millis
  readonly identity?: string
  readonly skew?: Millis
  readonly grace?: Millis
}

/** What a check returns: how long claims are held, and since when. */
async function check({ seen = 0, identity = OWN, skew = 0, grace = GRACE }: Asked = {}) {
  const reply = (await redis.call('EVAL', ADMIT.source, 1, EPOCH, grace, skew, seen, identity, 7)) as number[]
  return { left: reply[0] as number, since: reply[1] as number, number: reply[2] }
}

function packed(...numbers: readonly Millis[]): Buffer {
  const bytes = Buffer.alloc(6 * numbers.length)
  for (const [n, number] of numbers.entries()) bytes.writeIntBE(number, 6 * n, 6)
  return bytes
}

/** What a batch of one operation answers: the first of its result, the server's clock, the rest of its result. */
async function operate(
  id: string,
  letter: string,
  how: number,
  more: readonly Millis[],
  { seen = 0, identity = OWN, skew = 0, grace = GRACE }: Asked,
) {
  const head = Buffer.concat([Buffer.from(letter), Buffer.of(how), packed(HOUR, 2 * HOUR, seen, ...more)])
  const args = [packed(grace, skew, 2 ** 46), head, bytesOf('in_progress', newToken()), identity, 7]
  const reply = await redis.call('EVAL', BATCH.source, 1, `${SHARD}r:${id}`, ...args)
  const [now, first, ...rest] = (reply as number[]).slice(0, -1) as [number, number, ...number[]]
  if (first === 3) throw new Error(String(rest[0]))
  return [first, now, ...rest]
}

let ids = 0
/** What a claim returns: 1 and its stamps, or 2, now, since and how long. */
const claim = (entry: 0 | 1 | 2, asked: Asked = {}) => operate(`id${ids++}`, 'p', entry, [], asked)

/** The key of the epoch; its times as ages and distances from now. */
async function epoch() {
  const [identity, since, till] = ((await redis.get(EPOCH)) ?? '').split(' ')
  return { identity, since: Number(since), till: Number(till) }
}

const set = (identity: string, since: Millis, till: Millis) =>
  redis.set(EPOCH, `${identity} ${since} ${till}`)

/** Whether it is this long, but for the time that the test takes. */
function isAbout(t: Test, value: number | undefined, wanted: number, message?: string): void {
  t.ok(value !== undefined && value <= wanted && value > wanted - SLACK, `${message}: ${value} of ${wanted}`)
}

void t.test('without an identity there is no epoch', async (t) => {
  t.strictSame(await check({ identity: '', seen: 5 }), { left: 0, since: 0, number: 7 })
  t.equal((await claim(0, { identity: '', seen: 5 }))[0], 1)
  t.equal(await redis.exists(EPOCH), 0)
})

void t.test('a grace begins with another process, a lost key, or a clock that went back', async (t) => {
  const now = await clock()
  const cases: [string, () => Promise<unknown>, Millis][] = [
    ['another process', () => set(OTHER, now - 9, now - 9), 0],
    ['another process, that was seen', () => set(OTHER, now - 9, now - 9), now - 9],
    ['in its grace', () => set(OTHER, now - 9, now + HOUR), 0],
    ['a lost key', () => redis.del(EPOCH), now - 9],
    ['a key of another form', () => redis.set(EPOCH, 'of a later release'), now - 9],
    ['a clock that went back', () => set(OWN, now + HOUR, now + HOUR), now + HOUR],
    ['the proxy has been elsewhere since', () => set(OWN, now - 9, now - 5), now - 7],
  ]
  for (const [what, prepare, seen] of cases)
    for (const ask of ['check', 'claim'] as const) {
      await prepare()
      if (ask === 'check') {
        const { left, since } = await check({ seen })
        t.equal(left, GRACE, what)
        t.ok(since >= now)
      } else {
        const [kind, at, since, left] = await claim(0, { seen })
        t.strictSame([kind, since, left], [2, at, GRACE], what)
      }
      const { identity, since, till } = await epoch()
      t.equal(identity, OWN)
      t.ok(since >= now && since <= now + SLACK)
      t.equal(till, since + GRACE)
    }
})

void t.test('within a grace nothing begins anew', async (t) => {
  const now = await clock()
  for (const seen of [0, now - 9, now - 5, now - 20]) {
    await set(OWN, now - 9, now + HOUR)
    const { left, since } = await check({ seen })
    isAbout(t, left, HOUR, `seen ${seen - now}`)
    t.equal(since, now - 9)
    const [kind, , at, held] = await claim(0, { seen })
    t.strictSame([kind, at], [2, now - 9])
    isAbout(t, held, HOUR, 'a claim')
    t.strictSame(await epoch(), { identity: OWN, since: now - 9, till: now + HOUR })
  }
})

void t.test(
  'a proxy that knows better than a new store, or comes late, begins a grace for its claims',
  async (t) => {
    const now = await clock()
    // It was taken for a new one.
    for (const ask of [check, async (asked: Asked) => claim(0, asked)]) {
      await set(OWN, now - 9, now - 9)
      await ask({ seen: now - 20 })
      const { identity, since, till } = await epoch()
      t.strictSame([identity, since], [OWN, now - 9])
      t.ok(till >= now + GRACE && till <= now + GRACE + SLACK)
    }
    // Its grace is over.
    await set(OWN, now - 9, now - 5)
    t.equal((await claim(0, { seen: now - 20 }))[0], 1, 'a claim that is late proves nothing')
    t.strictSame(await epoch(), { identity: OWN, since: now - 9, till: now - 5 })
    const { left, since } = await check({ seen: now - 20 })
    t.strictSame([left, since], [GRACE, now - 9])
    const { till } = await epoch()
    t.ok(till >= now + GRACE && till <= now + GRACE + SLACK)
    // One that has seen it, or nothing, is not late.
    for (const seen of [0, now - 9]) {
      await set(OWN, now - 9, now - 5)
      t.strictSame(await check({ seen }), { left: 0, since: now - 9, number: 7 })
      t.strictSame(await epoch(), { identity: OWN, since: now - 9, till: now - 5 })
    }
  },
)

void t.test(
  'a claim that is written again extends a grace that is about to end, up to twice its length',
  async (t) => {
    const now = await clock()
    const grace = HOUR
    // The instants by the clock before each of them: what is about to end ends soon.
    const cases: [since: Millis, till: Millis, extended: boolean][] = [
      [-10, HOUR, false],
      [-HOUR + 50_000, 190, true],
      [-HOUR - 60_000, 190, true],
    ]
    for (const [began, ends, extended] of cases) {
      const before = await clock()
      const [since, till] = [before + began, before + ends]
      await set(OWN, since, till)
      const [kind, at = 0] = await claim(2, { seen: since, grace })
      t.equal(kind, 1, 'it is written in any case')
      t.strictSame(await epoch(), { identity: OWN, since, till: extended ? at + 200 : till })
    }
    // It ends a little later than now, and then never again.
    await set(OWN, now - 2 * HOUR + SLACK, now + SLACK)
    await claim(2, { seen: now - 2 * HOUR + SLACK, grace, skew: SLACK - 100 })
    t.equal((await epoch()).till, now + SLACK)
    await check({ seen: now - 2 * HOUR + SLACK, grace, skew: SLACK - 100 })
    t.equal((await epoch()).till, now + SLACK, 'nor by a check')
    await set(OWN, now - 10, now + SLACK)
    await check({ seen: now - 10, grace, skew: SLACK - 100 })
    t.equal((await epoch()).till, now + SLACK, 'nor by a check')
    for (const entry of [0, 1] as const) await claim(entry, { seen: now - 10, grace })
    t.equal((await epoch()).till, now + SLACK, 'other claims extend nothing')
    await set(OWN, now - 10, now - 10)
    await claim(2, { seen: now - 10, grace })
    t.equal((await epoch()).till, now - 10, 'without a grace there is none to extend')
  },
)

void t.test('a takeover is held as a claim is, and extends nothing', async (t) => {
  const now = await clock()
  const takeOver = async (
    { seen = 0, skew = 0 }: Asked = {},
    before = async (): Promise<unknown> => null,
  ) => {
    const id = `id${ids}`
    const [, , version = 0] = await claim(1, { identity: '' })
    await before()
    return operate(id, 's', 1, [version], { seen, skew })
  }
  await set(OTHER, now - 9, now - 9)
  const [kind, at, since, left] = await takeOver()
  t.strictSame([kind, since, left], [2, at, GRACE])
  const soon = (await clock()) + SLACK
  await set(OWN, now - 10, soon)
  t.equal((await takeOver({ seen: now - 10, skew: SLACK - 100 }))[0], 2)
  t.equal((await epoch()).till, soon)
  await set(OTHER, now - 9, now - 9)
  const cutOff = () => redis.config('SET', 'min-replicas-to-write', '1')
  await t.rejects(takeOver({}, cutOff), { message: /^NOREPLICAS/ })
  await redis.config('SET', 'min-replicas-to-write', '0')
})

void t.test('a check tells of each shard by itself', async (t) => {
  const now = await clock()
  await redis.mset('e1', `${OWN} ${now - 9} ${now - 9}`, 'e2', `${OTHER} ${now - 9} ${now - 9}`)
  const seen = [now - 9, now - 9, 0]
  const reply = (await redis.call(
    'EVAL',
    ADMIT.source,
    3,
    'e1',
    'e2',
    'e3',
    GRACE,
    0,
    ...seen,
    OWN,
    8,
  )) as number[]
  t.strictSame([reply[0], reply[1], reply[2], reply[4]], [0, now - 9, GRACE, 0])
  t.equal(reply[6], 8)
  t.equal(reply.length, 7)
  t.ok((reply[3] as number) >= now && (reply[5] as number) >= now)
  const skewed = await check({ skew: HOUR })
  t.ok(skewed.since >= now + HOUR && skewed.since <= now + HOUR + SLACK)
  t.equal((await claim(0, { skew: HOUR, seen: skewed.since }))[0], 1)
})

void t.test('an epoch that cannot be written holds nothing back without saying why', async (t) => {
  await redis.set('full', 'x')
  await redis.config('SET', 'maxmemory', '1')
  await set(OTHER, 1, 1).catch(() => {})
  t.equal((await claim(0, { seen: 5 }))[0], 2, 'a full store answers all the same')
  t.equal(await redis.exists(EPOCH), 0)
  await redis.config('SET', 'maxmemory', '0')
  for (const ask of [async (): Promise<unknown> => check({ seen: 5 }), async () => claim(0, { seen: 5 })]) {
    await redis.del(EPOCH)
    await redis.config('SET', 'min-replicas-to-write', '1')
    await t.rejects(ask(), { message: /^NOREPLICAS/ })
    await redis.config('SET', 'min-replicas-to-write', '0')
  }
  await redis.call('REPLICAOF', '127.0.0.1', '1')
  await t.rejects(check({ seen: 5 }), { message: /^READONLY/ })
  await redis.call('REPLICAOF', 'NO', 'ONE')
})

void t.test('rights that a check lacks are no failover, unless it has to write', async (t) => {
  await redis.call('ACL', 'SETUSER', 'app', 'on', '>pw', '~*', '&*', '+@all', '-persist')
  const app = new Redis(server.url.replace('//', '//app:pw@'), { protocol: 2 })
  t.teardown(() => app.disconnect())
  const asked = async () => (await app.call('EVAL', ADMIT.source, 1, EPOCH, GRACE, 0, 5, OWN, 7)) as number[]
  t.equal((await asked())[0], GRACE)
  await redis.call('ACL', 'SETUSER', 'app', '+persist', '-set')
  await redis.del(EPOCH)
  await t.rejects(asked(), { message: /NOPERM|can't run this command/ })
})

void t.test('a master that has become a replica says so even if there is nothing to write', async (t) => {
  const { since } = await check()
  await redis.call('REPLICAOF', '127.0.0.1', '1')
  await t.rejects(check({ seen: since }), { message: /^READONLY/ })
  await redis.call('REPLICAOF', 'NO', 'ONE')
  await redis.config('SET', 'min-replicas-to-write', '1')
  await t.rejects(check({ seen: since }), { message: /^NOREPLICAS/ })
  await redis.config('SET', 'min-replicas-to-write', '0')
  await redis.config('SET', 'maxmemory', '1')
  t.strictSame(await check({ seen: since }), { left: 0, since, number: 7 }, 'a full one is a master')
  await redis.config('SET', 'maxmemory', '0')
})

void t.test('the store asks them as these tests do', async (t) => {
  const store = await openRedisStore({
    url: server.url,
    service: 'pay',
    timeoutMs: 10_000,
    grace: GRACE,
    onEvent() {},
  })
  t.teardown(() => store.close())
  const id = newId()
  await store.put(id, bytesOf('in_progress', newToken()), SPANS)
  t.match(await redis.get(new RedisKeys('pay').epoch(id)), /^[0-9a-f]{40} \d+ \d+$/)
})
