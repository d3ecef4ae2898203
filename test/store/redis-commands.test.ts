import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import { BODIES_FROM, SMALL_RECORD } from '../../src/store/codec.ts'
import { openRedisStore, RedisKeys, type RedisOptions } from '../../src/store/redis.ts'
import { admittingScript, script } from '../../src/store/redis-connection.ts'
import type { Page, Store } from '../../src/store/register.ts'
import { fake, greeting } from '../support/fake-redis.ts'
import { bytesOf, HOUR, newId, newToken, until } from './fixtures.ts'

/* Which commands the store sends, and what it makes of replies, from a server that says what the test wants. */

const KEYS = new RedisKeys('pay')
const SKEW = 5
const APPLIED = { name: 'StoreUnavailable', maybeApplied: true }

const bulk = (text: string) => `$${text.length}\r\n${text}\r\n`
const array = (...parts: string[]) => `*${parts.length}\r\n${parts.join('')}`
const words = (...texts: string[]) => array(...texts.map(bulk))
const int = (n: number) => `:${n}\r\n`

const FULL_TOO = '#!lua flags=allow-oom\n'
const SCRIPTS = new Map(
  Object.entries({
    put: admittingScript('put'),
    'put though full': admittingScript('put', FULL_TOO),
    swap: admittingScript('swap'),
    'swap though full': admittingScript('swap', FULL_TOO),
    admit: admittingScript('admit'),
    ...Object.fromEntries(
      ['get', 'renew', 'remove', 'due', 'throttle', 'note', 'notes'].map((name) => [name, script(name)]),
    ),
  }).map(([name, { head }]) => [String(head.bytes).split('\r\n')[3] as string, name]),
)

/** What follows of a script's reply, without its number. */
type Saying = string[] | string | ((args: readonly string[]) => string[] | string)
type Replies = Readonly<Record<string, Saying>>

/** A store on a server that answers as `replies` say, by the name of the script or command; `sent`: what it was asked. */
async function storeOf(
  t: Test,
  replies: Replies,
  options: Partial<RedisOptions> = {},
  kind: '' | '+cluster' = '',
) {
  const sent: string[][] = []
  const says: Record<string, Saying> = { ...replies }
  const { url, port, sockets } = await fake(
    t,
    greeting((command) => {
      const [name = '', hash = '', ...args] = command
      const own = name === 'evalsha' ? (SCRIPTS.get(hash) ?? 'unknown') : name
      // All slots are on this node.
      if (name === 'cluster') return array(array(int(0), int(16_383), array(bulk(''), int(port))))
      if (name === 'info' && hash === 'server') return bulk('run_id:abc\r\n')
      const number = name === 'evalsha' ? args.pop() : undefined
      if (own === 'admit') {
        const count = Number(args[0])
        const reply = (says[own] ?? [int(0), int(9)]) as string[]
        return array(...Array.from({ length: count }, () => reply).flat(), int(Number(number)))
      }
      sent.push(name === 'evalsha' ? [own, ...args] : command)
      const saying = says[own] ?? []
      const reply = typeof saying === 'function' ? saying(command) : saying
      return typeof reply === 'string' ? reply : array(...reply, int(Number(number)))
    }),
  )
  const store = await openRedisStore({
    url: url.replace(':', `${kind}:`),
    service: 'pay',
    timeoutMs: 10_000,
    onEvent() {},
    skew: () => SKEW,
    ...options,
  })
  t.teardown(() => store.close())
  return { store, sent, says, sockets }
}

const written = [int(1), int(100), int(101), int(102), int(103)]
const DONE = { done: true, now: 100, stamp: { version: 101, fence: 102, createdAt: 103 } }
const spans = { dueIn: 11, dropIn: 22 }

void t.test('a claim names record, index, epoch and its kind', async (t) => {
  const { store, sent } = await storeOf(t, { put: written })
  const id = newId()
  const bytes = bytesOf('completed', newToken())
  const common = ['3', KEYS.record(id), KEYS.index(id), KEYS.epoch(id), id, String(bytes), '11', '22', '5']
  t.strictSame(await store.put(id, bytes, spans), DONE)
  await store.put(id, bytes, spans, 'fresh')
  await store.put(id, bytes, spans, 'again')
  t.strictSame(sent, [
    ['put', ...common, '0', '0', '0', ''],
    ['put', ...common, '1', '0', '0', ''],
    ['put', ...common, '2', '0', '0', ''],
  ])
})

void t.test('a swap names its condition', async (t) => {
  const { store, sent, says } = await storeOf(t, { 'swap though full': written, swap: written })
  const id = newId()
  const token = Buffer.from('0123456789abcdef')
  const bytes = bytesOf('in_progress', token)
  const common = ['3', KEYS.record(id), KEYS.index(id), KEYS.epoch(id), id, String(bytes), '11', '22', '5']
  t.strictSame(await store.swap(id, { version: 77 }, bytes, spans, true), DONE)
  const states = ['in_progress', 'unknown'] as const
  await store.swap(id, { token, states }, bytes, spans, false)
  await store.swap(id, { token, states }, bytes, spans, false)
  const owner = ['0', '', String(token), '\x01\x04', '0', '0', '']
  t.strictSame(sent, [
    ['swap though full', ...common, '1', '77', '', '', '0', '0', ''],
    ['swap though full', ...common, ...owner],
    ['swap though full', ...common, ...owner],
  ])
  const sized = (length: number) => Buffer.concat([bytes, Buffer.alloc(length - bytes.length)])
  for (const length of [SMALL_RECORD, SMALL_RECORD + 1])
    await store.swap(id, { version: 1 }, sized(length), spans, false)
  t.strictSame(
    sent.slice(3).map(([name]) => name),
    ['swap though full', 'swap'],
    'only outcomes without a body fit a full store',
  )
  says['swap though full'] = [int(0), int(100), '$-1\r\n']
  t.strictSame(await store.swap(id, { version: 1 }, bytes, spans, false), {
    done: false,
    now: 100,
    bytes: null,
  })
  says['swap though full'] = [int(2), int(100), int(90), int(40)]
  await t.rejects(Promise.resolve(store.swap(id, { version: 1 }, bytes, spans, true)), {
    name: 'InGrace',
    now: 100,
    since: 90,
    left: 40,
    maybeApplied: false,
  })
})

void t.test('with a grace a claim says what is known of its server', async (t) => {
  const epochs: Millis[] = []
  const held: Millis[] = []
  const safe: Millis[] = []
  const { store, sent, says } = await storeOf(
    t,
    { put: written, 'put though full': written, swap: written, 'swap though full': written },
    {
      grace: HOUR,
      onNewEpoch: ({ left }) => epochs.push(left),
      onHeld: (left) => held.push(left),
      onSafe: (before) => safe.push(before),
    },
  )
  await until(() => held.length > 0)
  t.strictSame(epochs, [0])
  t.strictSame(safe, [Number.NEGATIVE_INFINITY], 'nothing is safe by the first look')
  const id = newId()
  const bytes = bytesOf('in_progress', newToken())
  const large = Buffer.concat([bytes, Buffer.alloc(SMALL_RECORD + 1 - bytes.length)])
  const just = Buffer.concat([bytes, Buffer.alloc(SMALL_RECORD - bytes.length)])
  const tails = () => sent.splice(0).map((command) => [command[0], ...command.slice(10)])
  await store.put(id, bytes, spans)
  await store.put(id, bytes, spans, 'again')
  await store.swap(id, { version: 1 }, bytes, spans, true)
  t.strictSame(tails(), [
    ['put', '0', String(HOUR), '9', 'abc'],
    ['put', '2', String(HOUR), '9', 'abc'],
    ['swap though full', '1', '1', '', '', String(HOUR), '9', 'abc'],
  ])
  says['admit'] = [int(40_000), int(10)]
  const again = await storeOf(
    t,
    { put: written, 'put though full': written, admit: says['admit'] },
    { grace: HOUR },
  )
  await until(async () => {
    await again.store.put(id, bytes, spans, 'again')
    return again.sent.at(-1)?.[0] === 'put though full'
  })
  again.sent.splice(0)
  for (const entry of ['claim', 'fresh', 'again'] as const) await again.store.put(id, bytes, spans, entry)
  await again.store.put(id, just, spans, 'again')
  await again.store.put(id, large, spans, 'again')
  t.strictSame(
    again.sent.map(([name]) => name),
    ['put', 'put', 'put though full', 'put though full', 'put'],
    'what was lost fits a full store, too, unless it is large',
  )
})

void t.test('only claims wait for replicas', async (t) => {
  const waited: boolean[] = []
  const { store, sent } = await storeOf(
    t,
    {
      put: written,
      'swap though full': written,
      info: bulk('run_id:abc\r\n'),
      set: '+OK\r\n',
      wait: ':1\r\n',
    },
    {
      wait: { replicas: 1, disk: 'none', timeout: 100 },
      onWaited: (satisfied) => waited.push(satisfied),
    },
  )
  const [id, token] = [newId(), newToken()]
  const claim = bytesOf('in_progress', token)
  await store.put(id, claim, spans)
  await store.put(id, claim, spans, 'fresh')
  await store.swap(id, { version: 1 }, claim, spans, true)
  t.strictSame(waited, [true, true, true])
  t.equal(sent.filter(([name]) => name === 'wait').length, 3)
  t.strictSame(sent.find(([name]) => name === 'set')?.slice(1, 2), [KEYS.marker(KEYS.shardOf(id))])
  await store.put(id, claim, spans, 'again')
  await store.put(id, bytesOf('completed', token), spans)
  await store.swap(id, { version: 1 }, claim, spans, false)
  await store.swap(id, { version: 1 }, bytesOf('unknown', token), spans, true)
  t.equal(waited.length, 3)
  await t.rejects(
    storeOf(
      t,
      { waitaof: '-ERR unknown command\r\n' },
      { wait: { replicas: 1, disk: 'local', timeout: 100 } },
    ),
    { message: /store.wait.disk/ },
  )
})

void t.test('a cluster is asked as a server is, each shard by itself where keys differ', async (t) => {
  const time = words('1795000000', '0')
  const { store, sent } = await storeOf(
    t,
    { time, zrangebyscore: '*0\r\n', info: bulk('cluster_enabled:1\r\nrole:master\r\n'), note: [int(1)] },
    {},
    '+cluster',
  )
  t.strictSame(await store.due(10), [])
  t.equal(sent.filter(([name]) => name === 'zrangebyscore').length, 256)
  const traits = await store.traits()
  t.strictSame(traits.refusals, [])
  t.match(traits.topology, /^1 masters share 256 shards/)
  t.match(traits.findings, [/^127.0.0.1:\d+: INFO does not say/, /^127.0.0.1:\d+: INFO/])
  sent.splice(0)
  let other = newId()
  const id = newId()
  while (KEYS.shardOf(other) === KEYS.shardOf(id)) other = newId()
  await Promise.all([store.history.append(id, []), store.history.append(other, [])])
  t.equal(sent.length, 2, 'notes of two shards are two commands')
  await t.rejects(
    storeOf(
      t,
      { waitaof: '-ERR unknown command\r\n' },
      { wait: { replicas: 1, disk: 'local', timeout: 9 } },
      '+cluster',
    ),
    { message: /store.wait.disk/ },
  )
  const down = await openRedisStore({
    url: 'redis+cluster://127.0.0.1:1',
    service: 'pay',
    timeoutMs: 100,
    onEvent() {},
    wait: { replicas: 1, disk: 'local', timeout: 9 },
  })
  t.equal(down.name, 'redis', 'one that is down is opened')
  await down.close()
})

void t.test('a list in a cluster visits one master after the other, or that of an id', async (t) => {
  const ids = [newId(), newId()]
  const asked: string[] = []
  const ports: number[] = []
  let info = bulk('role:master\r\n')
  const slots = { move: false, moved: false }
  const masters = await Promise.all(
    ['a', 'b'].map((name, n) =>
      fake(
        t,
        greeting((command) => {
          // The other one has the upper half of the slots.
          const nodes = ports.map((port) => array(bulk('127.0.0.1'), int(port))) as [string, string]
          const middle = slots.moved ? 8000 : 8192
          if (command[0] === 'cluster')
            return array(array(int(0), int(middle - 1), nodes[0]), array(int(middle), int(16_383), nodes[1]))
          if (command[0] === 'info') return name === 'a' ? bulk('role:master\r\n') : info
          asked.push([name, ...command.slice(0, 2)].join(' '))
          slots.moved = slots.move
          return array(bulk('0'), words(KEYS.record(ids[n] as RecordId)))
        }),
      ),
    ),
  )
  // Servers come in the order of their names.
  masters.sort((x, y) => (`${x.port}` < `${y.port}` ? -1 : 1))
  ports.push(...masters.map(({ port }) => port))
  const store = await openRedisStore({
    url: `redis+cluster://127.0.0.1:${ports[0]}`,
    service: 'pay',
    timeoutMs: 10_000,
    onEvent() {},
  })
  t.teardown(() => store.close())
  const first = await store.list('all', null, 10)
  t.match(first.next, /^[0-9a-f]{8}\.1\.0$/)
  const second = await store.list('all', first.next, 10)
  t.equal(second.next, null)
  t.strictSame([...first.ids, ...second.ids].toSorted(), ids.toSorted())
  t.equal(new Set(asked).size, 2)
  const view = first.next?.slice(0, 8)
  await t.rejects(store.list('all', `${view}.2.0`, 10), RangeError)
  asked.splice(0)
  await store.list('all', 'ffffffff.1.7', 10)
  t.match(asked[0], / scan 0$/, 'other servers than now: from the beginning')
  // Shard 0 is in the upper half, shard 2 in the lower.
  asked.splice(0)
  for (const beginning of ['AAAAAAAA', 'AgAAAAAA'])
    t.equal((await store.list({ beginning }, null, 10)).next, null)
  t.equal(asked.length, 2)
  t.not(asked[0], asked[1])
  slots.move = true
  const { next } = await store.list('all', first.next, 10)
  t.match(next, /^[0-9a-f]{8}\.0\.0$/, 'slots have moved meanwhile')
  t.not(next?.slice(0, 8), view)
  t.strictSame((await store.traits()).refusals, [])
  info = '-LOADING data\r\n'
  t.strictSame((await store.traits()).refusals, ['1 of 2 masters of the cluster do not answer.'])
})

void t.test('close ends connections and looks, and waits for their ends', async (t) => {
  const held: Millis[] = []
  const { store, sockets } = await storeOf(t, {}, { grace: 80, onHeld: (left) => held.push(left) })
  await until(() => held.length > 1)
  // It keeps its side open.
  for (const socket of sockets) socket.allowHalfOpen = true
  const began = performance.now()
  await store.close()
  t.ok(performance.now() - began >= 200)
  const looks = held.length
  await wait(60)
  t.equal(held.length, looks)
})

void t.test('traits are those of the servers that answer', async (t) => {
  const { store, says } = await storeOf(t, { info: bulk('role:master\r\nredis_version:6.2.0\r\n') })
  const { refusals, topology } = await store.traits()
  t.match(refusals, [/6.2.0 is too old/])
  t.equal(topology, undefined)
  says['info'] = '-NOPERM no\r\n'
  t.match(await store.traits(), { durable: null, findings: [/may not run INFO/], refusals: [] })
  says['info'] = '-LOADING data\r\n'
  await t.rejects(store.traits(), { message: /LOADING/ })
  const waits = await storeOf(
    t,
    { info: bulk('run_id:abc\r\nrole:master\r\n'), time: words('1', '2'), set: '+OK\r\n', wait: ':0\r\n' },
    { wait: { replicas: 1, disk: 'none', timeout: 9 } },
  )
  t.match((await waits.store.traits()).refusals, [
    /0 of 1 replicas had it within 9 ms: claims are answered 503/,
  ])
  waits.says['wait'] = ':1\r\n'
  t.strictSame((await waits.store.traits()).refusals, [])
})

void t.test('what one of several commands fails with is not what the others say', async (t) => {
  const [id, other] = [newId(), newId()]
  const token = newToken()
  const items = [id, other].map((id) => ({ id, token, ...spans }))
  const refusing = (args: readonly string[]) => (args.includes(other) ? '-ERR no\r\n' : [int(1)])
  const { store, says } = await storeOf(t, {
    renew: refusing,
    due: refusing,
    time: words('1', '0'),
    zrangebyscore: ([, index]) => (index === KEYS.indexes[0] ? words(id, '1', other, '2') : '*0\r\n'),
  })
  t.strictSame(await store.renew(items), [true, false], 'a lease that nobody renewed')
  t.strictSame(await store.due(10), [id])
  says['renew'] = says['due'] = '-ERR no\r\n'
  await t.rejects(store.renew(items), { message: /ERR no/ })
  await t.rejects(store.due(10), { message: /ERR no/ })
})

void t.test('time is the server’s, where no test travels', async (t) => {
  const { store } = await storeOf(t, { time: words('1795000000', '999999') }, { skew: undefined as never })
  t.equal(store.name, 'redis')
  t.equal(await store.ping(), 1_795_000_000_999)
})

void t.test('a store that cannot do what is configured leaves no connection', async (t) => {
  const { url, sockets } = await fake(
    t,
    greeting(() => '-ERR unknown command\r\n'),
  )
  const wait = { replicas: 1, disk: 'local', timeout: 9 } as const
  await t.rejects(openRedisStore({ url, service: 'pay', timeoutMs: 10_000, onEvent() {}, wait }), {
    message: /store.wait.disk/,
  })
  await until(() => sockets.every(({ readableEnded, destroyed }) => readableEnded || destroyed))
})

void t.test('reading, renewing, removing and limits', async (t) => {
  const { store, sent, says } = await storeOf(t, {
    get: [int(100), bulk('abc')],
    renew: [int(1)],
    remove: [int(0)],
    throttle: [int(7)],
    notes: [bulk('a 2 30 40 some text')],
  })
  const [id, other] = [newId(), newId()]
  t.strictSame(await store.get(id), { now: 100, bytes: Buffer.from('abc') })
  const token = Buffer.from('0123456789abcdef')
  t.strictSame(
    await store.renew([
      { id, token, ...spans },
      { id: other, token, dueIn: 1, dropIn: 2 },
    ]),
    [true, true],
  )
  t.equal(await store.remove(id, 3), false)
  says['remove'] = [int(1)]
  t.equal(await store.remove(id, 3), true)
  t.equal(await store.limits.take('bucket', { count: 3, per: 60 }, -1), 7)
  t.strictSame(await store.history.read(id), [{ tag: 'a', count: 2, first: 30, last: 40, text: 'some text' }])
  t.strictSame(sent, [
    ['get', '1', KEYS.record(id), '5'],
    ['renew', '2', KEYS.record(id), KEYS.index(id), id, String(token), '11', '22', '5'],
    ['renew', '2', KEYS.record(other), KEYS.index(other), other, String(token), '1', '2', '5'],
    ['remove', '3', KEYS.record(id), KEYS.index(id), KEYS.history(id), id, '3', '5'],
    ['remove', '3', KEYS.record(id), KEYS.index(id), KEYS.history(id), id, '3', '5'],
    ['throttle', '1', KEYS.bucket('bucket'), '3', '60', '-1', '5'],
    ['notes', '2', KEYS.record(id), KEYS.history(id), '5'],
  ])
})

void t.test('notes of one turn are one command', async (t) => {
  const { store, sent } = await storeOf(t, { note: [int(1), int(0), int(1)] })
  const ids = [newId(), newId(), newId()] as const
  const note = (text: string) => ({ tag: 'a', count: 2, firstAgo: 3.4, lastAgo: 1.6, text })
  const line = (text: string) => ['a', '2', '3', '2', text]
  t.strictSame(
    await Promise.all([
      store.history.append(ids[0], [note('x'), note('y')]),
      store.history.append(ids[1], []),
      store.history.append(ids[2], [note('z')]),
    ]),
    [true, false, true],
  )
  const keys = ids.flatMap((id) => [KEYS.record(id), KEYS.history(id)])
  t.strictSame(sent, [['note', '6', ...keys, '5', '2', ...line('x'), ...line('y'), '0', '1', ...line('z')]])
  await store.history.append(ids[0], [])
  t.strictSame(
    sent[1],
    ['note', '2', KEYS.record(ids[0]), KEYS.history(ids[0]), '5', '0'],
    'the next has its own',
  )
})

void t.test('what is due is what every index has, earliest first, and what still exists', async (t) => {
  const ids = Array.from({ length: 4 }, () => newId()) as [RecordId, RecordId, RecordId, RecordId]
  const time = words('1795000000', '123999')
  const { store, sent, says } = await storeOf(t, { time, due: [int(1)], zrangebyscore: '*0\r\n' })
  t.equal(await store.ping(), 1_795_000_000_123 + SKEW)
  sent.splice(0)
  t.strictSame(await store.due(10), [])
  const now = String(1_795_000_000_123 + SKEW)
  t.strictSame(sent.slice(0, 2), [
    ['time'],
    ['zrangebyscore', KEYS.indexes[0], '0', now, 'WITHSCORES', 'LIMIT', '0', '10'],
  ])
  t.equal(sent.length, 257)
  t.equal(sent[256]?.[1], KEYS.indexes[255])
  sent.splice(0)
  await store.due(1000, 'bodies')
  const [from, to] = [BODIES_FROM, BODIES_FROM + Number(now)].map(String)
  const most = sent[1]?.[7]
  t.strictSame(sent[1], ['zrangebyscore', KEYS.indexes[0], from, to, 'WITHSCORES', 'LIMIT', '0', most])
  t.ok(Number(most) < 1000, 'a share from each index')

  // As every index answers alike, each comes 256 times.
  says['zrangebyscore'] = words(ids[0], '30', ids[1], '10', ids[2], '20')
  sent.splice(0)
  t.strictSame(await store.due(300), [
    ...Array.from({ length: 256 }, () => ids[1]),
    ...Array.from({ length: 44 }, () => ids[2]),
  ])
  t.strictSame(sent.at(-1), ['due', '2', KEYS.record(ids[2]), KEYS.index(ids[2]), ids[2], '5'])
  says['due'] = [int(0)]
  t.strictSame(await store.due(300), [])
})

void t.test('a list of all scans, and says where it goes on', async (t) => {
  const [id, other] = [newId(), newId()]
  const strange = KEYS.record(id).replace('pay', 'pay.eu')
  const { store, sent, says } = await storeOf(t, {
    scan: array(bulk('17'), words(KEYS.record(id), KEYS.history(id), strange, KEYS.record(other))),
  })
  t.strictSame(await store.list('all', null, 10), { ids: [id, other], next: '17' })
  t.strictSame(sent[0], ['scan', '0', 'MATCH', KEYS.glob, 'COUNT', '10'])
  const beginning = id.slice(0, 8)
  t.strictSame((await store.list({ beginning }, '17', 10)).ids, [id])
  t.strictSame(sent[1], ['scan', '17', 'MATCH', KEYS.globOf(beginning), 'COUNT', '10'])
  says['scan'] = array(bulk('0'), '*0\r\n')
  t.strictSame(await store.list('all', '5', 10), { ids: [], next: null })
  await store.list('all', '12345678.0.5', 10)
  t.equal(sent.at(-1)?.[1], '0', 'a cursor of other servers begins again')
  await store.list('all', '9'.repeat(20), 10)
  for (const wrong of ['', 'x', '1x', 'x1', '9'.repeat(21), '1234567.0.5', '12345678.12345.5', '.0.5', '5.5'])
    await t.rejects(store.list('all', wrong, 10), RangeError, wrong)
})

void t.test('a list of the unresolved asks every index from the place of the cursor', async (t) => {
  const ids = [newId(), newId(), newId()].toSorted() as [RecordId, RecordId, RecordId]
  const { store, sent, says } = await storeOf(t, { zrangebyscore: '*0\r\n' })
  t.strictSame(await store.list('unresolved', null, 2), { ids: [], next: null })
  t.equal(sent.length, 256)
  const range = [`(${BODIES_FROM}`, 'WITHSCORES', 'LIMIT', '0', '2']
  t.strictSame(sent[0], ['zrangebyscore', KEYS.indexes[0], '0', ...range])
  says['zrangebyscore'] = words(ids[0], '30', ids[1], '30')
  sent.splice(0)
  // Each of them comes from every index.
  t.strictSame(await store.list('unresolved', null, 2), { ids: [ids[0], ids[0]], next: `30 ${ids[0]}` })
  t.equal(sent.length, 256)
  says['zrangebyscore'] = words(ids[2], '30')
  sent.splice(0)
  await store.list('unresolved', `30 ${ids[1]}`, 2)
  t.strictSame(sent[0]?.slice(2), ['30', ...range])
  t.equal(sent.length, 256, 'fewer than asked for are the last')
})

void t.test('a list of the unresolved goes on among many of one instant', async (t) => {
  const ids = Array.from({ length: 7 }, () => newId()).toSorted()
  const { store, sent } = await storeOf(t, {
    zrangebyscore: ([, index, from, , , , offset, count]) => {
      if (index !== KEYS.indexes[0] || Number(from) > 30) return '*0\r\n'
      const first = Number(offset)
      return words(...ids.slice(first, first + Number(count)).flatMap((id) => [id, '30']))
    },
  })
  const seen: string[] = []
  let cursor: string | null = null
  do {
    const page: Page = await store.list('unresolved', cursor, 2)
    seen.push(...page.ids)
    cursor = page.next
  } while (cursor !== null)
  t.strictSame(seen, ids)
  const offsets = sent.filter(([, index]) => index === KEYS.indexes[0]).map((command) => command[6])
  t.strictSame(offsets, ['0', '0', '2', '0', '2', '4', '0', '2', '4', '6'])
})

void t.test('a reply of another form belongs to another command', async (t) => {
  const texts = (...more: string[]) => words('1', '2', ...more)
  const cases: [(store: Store) => Promise<unknown>, string[]][] = [
    [
      (store) => store.ping(),
      [
        int(1),
        '+1 2\r\n',
        bulk('1'),
        words('1'),
        texts('3'),
        words('x', '2'),
        words('1', 'x'),
        array(int(1), bulk('2')),
        array(bulk('1'), int(2)),
        words('1 2', ''),
      ],
    ],
    [
      (store) => store.list('all', null, 1),
      [
        int(1),
        '$-1\r\n',
        words('0'),
        array(bulk('0'), int(1)),
        array(int(0), '*0\r\n'),
        array(bulk('0'), '*0\r\n', '*0\r\n'),
        array(bulk('0'), array(int(1))),
      ],
    ],
    [(store) => store.list('unresolved', null, 1), [int(1), words('a'), texts('3'), array(int(1), int(2))]],
    [(store) => store.traits(), [int(1), '*0\r\n', '+OK\r\n']],
  ]
  for (const [ask, replies] of cases)
    for (const reply of replies) {
      const { store, says } = await storeOf(t, {})
      for (const name of ['time', 'scan', 'zrangebyscore', 'info']) says[name] = reply
      await t.rejects(ask(store), { ...APPLIED, message: /replies do not match/ }, JSON.stringify(reply))
    }
})
