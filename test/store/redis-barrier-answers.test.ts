import type { Socket } from 'node:net'
import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { type BarrierOptions, Barriers, replicationText, type Wait } from '../../src/store/redis-barrier.ts'
import { RedisConnection } from '../../src/store/redis-connection.ts'
import { RedisLink } from '../../src/store/redis-link.ts'
import { addressOf } from '../../src/store/redis-url.ts'
import type { WriteReply } from '../../src/store/register.ts'
import { fake, greeting } from '../support/fake-redis.ts'
import { bytesOf, newToken, until } from './fixtures.ts'

/* What a master may answer, from one that says what the test wants. Real ones: redis-barrier.test.ts. */

const PATIENT: Millis = 10_000
const UNREPLICATED = { name: 'Unreplicated', maybeApplied: true }
const DONE: WriteReply<null> = { done: true, now: 1, stamp: { version: 1, fence: 1, createdAt: 1 } }

const bulk = (text: string) => `$${text.length}\r\n${text}\r\n`
const role = (replicas: number) => `*3\r\n${bulk('master')}:0\r\n*${replicas}\r\n${':0\r\n'.repeat(replicas)}`

interface Says {
  set: string | null
  wait: string | null
  /** Replicas that answer a `WAIT`. */
  has: number | null
  waitaof: string
  role: string
  runIds: string[]
}

async function barrierOf(
  t: Test,
  waits: Partial<Wait>,
  more: Partial<Says> = {},
  { timeoutMs = PATIENT, replicasOf = async () => 0 }: Partial<BarrierOptions> = {},
) {
  const says: Says = {
    set: '+OK\r\n',
    wait: ':1\r\n',
    has: null,
    waitaof: '*2\r\n:1\r\n:1\r\n',
    role: role(1),
    runIds: [],
    ...more,
  }
  const asked: string[] = []
  const waiting: Socket[] = []
  const server = await fake(
    t,
    greeting((command, socket) => {
      const name = command[0] as string
      if (name === 'claim') {
        // Replies to commands that came together leave together.
        socket.cork()
        setImmediate(() => socket.uncork())
        return ':1\r\n'
      }
      if (name === 'time') return `*2\r\n${bulk('1')}${bulk('2')}`
      if (name === 'info' && command[1] === 'server')
        return bulk(`run_id:${says.runIds.shift() ?? 'abc'}\r\n`)
      asked.push(command.join(' '))
      if (name === 'wait' || name === 'set') waiting.push(socket)
      if (name === 'wait' && says.has !== null) return `:${Math.min(Number(command[1]), says.has)}\r\n`
      return says[name as 'set']
    }),
  )
  const waited: boolean[] = []
  const barriers = new Barriers({
    wait: { replicas: 1, disk: 'none', timeout: 100, ...waits },
    timeoutMs,
    markerOf: (shard) => `marker${shard}`,
    replicasOf,
    onWaited: (satisfied) => void waited.push(satisfied),
  })
  t.teardown(() => barriers.close())
  const connect = async () => {
    const { promise, resolve } = Promise.withResolvers<void>()
    const link = new RedisLink(addressOf(server.url), PATIENT, {
      onConnected: resolve,
      onError() {},
      onClosed() {},
    })
    await promise
    t.teardown(() => link.destroy())
    return link
  }
  const link = await connect()
  const claim = (
    shard = 0,
    by = link,
    reply: WriteReply<Buffer | null> = DONE,
    bytes = bytesOf('in_progress', newToken()),
  ) =>
    barriers.claim<Buffer | null>(
      shard,
      bytes,
      (read) => by.ask('claim', [], read),
      () => reply,
    )
  return { says, asked, waiting, waited, barriers, link, connect, claim, ...server }
}

void t.test('a claim waits for a marker that follows it', async (t) => {
  const { claim, asked, waited, sockets } = await barrierOf(t, {})
  t.equal(await claim(7), DONE)
  t.strictSame(asked, ['set marker7 1 PX 60000', 'wait 1 100'])
  t.strictSame(waited, [true])
  await claim(8)
  t.strictSame(asked.slice(2), ['set marker8 1 PX 60000', 'wait 1 100'])
  t.equal(sockets.length, 2, 'over one other connection')
})

void t.test('a claim that too few replicas have is not replicated', async (t) => {
  const { claim, asked, waited } = await barrierOf(t, { replicas: 2 })
  await t.rejects(claim(), {
    ...UNREPLICATED,
    message: 'store.wait is not satisfied: 1 of 2 replicas had it within 100 ms',
  })
  t.equal(asked[1], 'wait 2 100')
  t.strictSame(waited, [false])
})

void t.test('only a claim of its own waits, as it was written', async (t) => {
  const { claim, asked, link, waited } = await barrierOf(t, {})
  const found = (bytes: Buffer | null): WriteReply<Buffer | null> => ({ done: false, now: 1, bytes })
  const token = newToken()
  for (const other of [
    null,
    bytesOf('in_progress', newToken()),
    bytesOf('completed', token),
    bytesOf('failed_retryable', token),
  ])
    await claim(0, link, found(other), bytesOf('in_progress', token))
  t.strictSame(asked, [])
  t.strictSame(waited, [])
  for (const own of ['in_progress', 'unknown'] as const) {
    const bytes = bytesOf('in_progress', token)
    const claiming = claim(0, link, found(bytesOf(own, token)), bytes)
    // The store may reuse it.
    bytes.fill(0)
    await claiming
  }
  t.equal(asked.length, 4)
  t.strictSame(waited, [true, true])
})

void t.test('claims wait for disks, the server’s or those of replicas, too', async (t) => {
  const local = await barrierOf(t, { replicas: 'none', disk: 'local' })
  await local.claim()
  t.strictSame(local.asked, ['set marker0 1 PX 60000', 'waitaof 1 0 100'])
  local.says.waitaof = '*2\r\n:0\r\n:9\r\n'
  const message = 'store.wait is not satisfied: the server’s disk did not have it within 100 ms'
  await t.rejects(local.claim(), { ...UNREPLICATED, message })

  const both = await barrierOf(t, { disk: 'local' }, { waitaof: '*2\r\n:1\r\n:0\r\n' })
  await both.claim()
  t.strictSame(both.asked, ['set marker0 1 PX 60000', 'wait 1 100', 'waitaof 1 0 100'])

  const remote = await barrierOf(t, { replicas: 2, disk: 'replicas' }, { waitaof: '*2\r\n:1\r\n:2\r\n' })
  await remote.claim()
  t.strictSame(remote.asked, ['set marker0 1 PX 60000', 'waitaof 1 2 100'])
  remote.says.waitaof = '*2\r\n:1\r\n:1\r\n'
  await t.rejects(remote.claim(), { message: /: 1 of 2 replicas had it/ })
  remote.says.waitaof = '*2\r\n:0\r\n:2\r\n'
  await t.rejects(remote.claim(), { message })
})

void t.test('claims of one turn share a round, and later ones the next', async (t) => {
  const { claim, asked, says, waiting, waited } = await barrierOf(t, {})
  says.wait = null
  const first = [claim(1), claim(2), claim(3)]
  await until(() => asked.length === 2)
  const second = [claim(4), claim(5)]
  await wait(20)
  t.strictSame(asked, ['set marker1 1 PX 60000', 'wait 1 100'])
  says.wait = ':1\r\n'
  waiting[1]?.write(':1\r\n')
  await Promise.all([...first, ...second])
  t.strictSame(asked.slice(2), ['set marker4 1 PX 60000', 'wait 1 100'])
  t.strictSame(waited, [true, true, true, true, true])
})

void t.test('a marker that is refused fails only the claims of its shard', async (t) => {
  const { claim, says, asked, waiting } = await barrierOf(t, {}, { set: null, wait: null })
  const claims = [claim(1), claim(2), claim(1)]
  await until(() => waiting.length === 2)
  Object.assign(says, { set: '+OK\r\n', wait: ':1\r\n' })
  waiting[0]?.write('-TRYAGAIN moving\r\n:1\r\n')
  const results = await Promise.allSettled(claims)
  const refused = {
    reason: { ...UNREPLICATED, message: 'store.wait is not satisfied: Redis refuses: TRYAGAIN moving' },
  }
  t.match(results, [refused, { status: 'fulfilled' }, refused])
  t.equal(asked[2], 'set marker2 1 PX 60000')
  says.wait = '-ERR no\r\n'
  asked.length = 0
  for (const one of await Promise.allSettled([claim(1), claim(2)]))
    t.match(one, { reason: { ...UNREPLICATED, message: /ERR no/ } })
  t.equal(asked.length, 2, 'any other refusal fails all claims of a round')
})

void t.test('a marker that is not answered fails all claims of its round', async (t) => {
  const { claim, asked } = await barrierOf(t, { timeout: 20 }, { set: null, wait: null }, { timeoutMs: 60 })
  for (const one of await Promise.allSettled([claim(1), claim(2)]))
    t.match(one, { reason: { ...UNREPLICATED, message: /timed out/ } })
  t.strictSame(asked, ['set marker1 1 PX 60000', 'wait 1 20'])
})

void t.test('a marker whose reply is none fails all claims of its round, for that reason', async (t) => {
  const { claim } = await barrierOf(t, {}, { set: '+QUEUED\r\n' })
  const message = 'store.wait is not satisfied: no answer from Redis: replies do not match their commands'
  for (const one of await Promise.allSettled([claim(1), claim(2)]))
    t.match(one, { status: 'rejected', reason: { ...UNREPLICATED, message } })
})

void t.test('how many replicas there are is asked only where all are waited for', async (t) => {
  const replicasOf = () => Promise.reject(new Error('nobody knows'))
  const { claim, asked } = await barrierOf(t, { replicas: 1 }, {}, { replicasOf })
  await claim()
  t.strictSame(asked, ['set marker0 1 PX 60000', 'wait 1 100'])
})

void t.test('a reply of another form is no acknowledgement', async (t) => {
  const cases: [Partial<Wait>, Partial<Says>][] = [
    [{}, { wait: '+OK\r\n' }],
    [{}, { set: '+QUEUED\r\n' }],
    [{ disk: 'local' }, { waitaof: ':1\r\n' }],
    [{ disk: 'local' }, { waitaof: '*2\r\n:1\r\n+x\r\n' }],
    [{ disk: 'local' }, { waitaof: '*2\r\n+x\r\n:1\r\n' }],
    [{ replicas: 'all' }, { role: ':1\r\n' }],
    [{ replicas: 'all' }, { role: `*3\r\n${bulk('slave')}:0\r\n*1\r\n:0\r\n` }],
    [{ replicas: 'all' }, { role: `*3\r\n${bulk('master')}:0\r\n:1\r\n` }],
    [{ replicas: 'all' }, { role: '*3\r\n+master\r\n:0\r\n*1\r\n:0\r\n' }],
  ]
  for (const [waits, more] of cases) {
    const { claim } = await barrierOf(t, waits, more)
    await t.rejects(claim(), { ...UNREPLICATED, message: /replies do not match/ })
  }
})

void t.test('another process than that of the claim acknowledges nothing', async (t) => {
  const { claim, says, asked, sockets, waited } = await barrierOf(t, {}, { runIds: ['abc', 'def'] })
  await t.rejects(claim(), {
    ...UNREPLICATED,
    message:
      /a second connection to 127.0.0.1:\d+ reaches a different process from the one that takes the claims/,
  })
  t.strictSame(asked, [])
  await until(() => sockets[1]?.readableEnded === true || sockets[1]?.destroyed === true)
  says.runIds.push('', '')
  await t.rejects(claim(), { message: /reaches a different process/ }, 'or one without a name')
  await claim()
  t.equal(sockets.length, 4)
  t.strictSame(waited, [false, false, true])
})

void t.test('a second connection that ends is replaced for the next claim', async (t) => {
  const { claim, says, waiting, sockets, asked } = await barrierOf(t, {})
  says.wait = null
  const claiming = claim()
  await until(() => asked.length === 2)
  says.wait = ':1\r\n'
  waiting[0]?.destroy()
  await t.rejects(claiming, { ...UNREPLICATED, message: /Connection is closed/ })
  await wait(120)
  t.equal(sockets.length, 2, 'it does not connect by itself')
  await claim()
  t.equal(sockets.length, 3)
})

void t.test('a claim whose connection ends meanwhile is not replicated', async (t) => {
  const { claim, says, waiting, link, waited, asked, connect, sockets } = await barrierOf(t, {})
  says.wait = null
  const claiming = claim()
  await until(() => asked.length === 2)
  link.destroy()
  waiting[0]?.write(':1\r\n')
  await t.rejects(claiming, {
    ...UNREPLICATED,
    message: 'store.wait is not satisfied: the connection of the claim has ended',
  })
  t.strictSame(waited, [false])
  // The next connection of claims has one of its own, and the old one is closed.
  says.wait = ':1\r\n'
  const next = await connect()
  await claim(0, next)
  t.strictSame(waited, [false, true])
  await until(() => sockets[1]?.readableEnded === true || sockets[1]?.destroyed === true)
  await claim(0, next)
  t.equal(sockets.length, 4)
})

void t.test('a claim whose connection ends before the second one is there is not replicated', async (t) => {
  const { barriers, link, waited, asked, claim, connect } = await barrierOf(t, {})
  const claiming = barriers.claim(
    0,
    bytesOf('in_progress', newToken()),
    (read) => link.ask('claim', [], read),
    () => {
      setImmediate(() => link.destroy())
      return DONE
    },
  )
  await t.rejects(claiming, { ...UNREPLICATED, message: /Connection is closed/ })
  t.strictSame([asked, waited], [[], [false]])
  await claim(0, await connect())
})

void t.test('connections of claims that are open keep their second ones', async (t) => {
  const { claim, connect, sockets } = await barrierOf(t, {})
  const other = await connect()
  for (let n = 0; n < 2; n++) {
    await claim(0)
    await claim(0, other)
  }
  t.equal(sockets.length, 4)
})

void t.test('a round may take as long as its waits, beyond the time of a command', async (t) => {
  const { claim, says, waiting, asked } = await barrierOf(t, { timeout: 200 }, {}, { timeoutMs: 60 })
  says.wait = null
  const claiming = claim()
  await until(() => asked.length === 2)
  setTimeout(() => waiting[1]?.write(':1\r\n'), 300)
  await claiming
  const late = claim()
  await t.rejects(late, { ...UNREPLICATED, message: /timed out/ })
})

void t.test('a check says why claims are refused', async (t) => {
  const { barriers, says, url, waited, sockets, asked } = await barrierOf(t, {})
  const server = new RedisConnection({ find: () => addressOf(url) }, PATIENT, { onEvent() {}, onReady() {} })
  t.teardown(() => server.close())
  await server.open()
  const part = { name: '', server, shards: [3] }
  t.equal(await barriers.check(part), null)
  t.equal(asked[0], 'set marker3 1 PX 60000', 'in a shard of the server')
  says.wait = ':0\r\n'
  t.equal(
    await barriers.check(part),
    'store.wait is not satisfied: 0 of 1 replicas had it within 100 ms: claims are answered 503.',
  )
  t.strictSame(waited, [], 'no claim has waited')
  // It keeps its side open.
  for (const socket of sockets) socket.allowHalfOpen = true
  const began = performance.now()
  await barriers.close()
  t.ok(performance.now() - began >= 200, 'close waits for the end')
  await until(() => sockets.some((socket) => socket.readableEnded || socket.destroyed))
})

void t.test('only a server that can wait for disks is used for that', async (t) => {
  const cases: [Wait['disk'], string, RegExp | null][] = [
    ['local', '*2\r\n:0\r\n:0\r\n', null],
    ['none', '-ERR unknown command\r\n', null],
    [
      'local',
      '-ERR Unknown command\r\n',
      /^store.wait.disk: found local, and the server has no WAITAOF; allowed: Redis 7.2/,
    ],
    [
      'replicas',
      '-ERR appendonly is disabled\r\n',
      /^store.wait.disk: found replicas, and appendonly is off on the server/,
    ],
    ['local', '-NOPERM no\r\n', /and the server refuses WAITAOF \(NOPERM no\); allowed: .*, or disk: none$/],
    ['local', '+OK\r\n', null],
  ]
  for (const [disk, waitaof, message] of cases) {
    const { barriers, asked, url } = await barrierOf(t, { disk }, { waitaof })
    const server = new RedisConnection({ find: () => addressOf(url) }, PATIENT, {
      onEvent() {},
      onReady() {},
    })
    t.teardown(() => server.close())
    await server.open()
    const opening = barriers.open([{ name: '', server, shards: [0] }])
    if (message === null) await opening
    else await t.rejects(opening, { name: 'StoreUnavailable', maybeApplied: false, message })
    t.strictSame(asked, disk === 'none' ? [] : ['waitaof 1 0 1'])
  }
})

void t.test('replicationText says what claims wait for', async (t) => {
  const said = (wait: Partial<Wait>) => replicationText({ replicas: 1, disk: 'none', timeout: 100, ...wait })
  t.equal(said({}), 'claims wait for 1 replica, up to 100 ms')
  t.equal(said({ replicas: 'all' }), 'claims wait for every known replica, up to 100 ms')
  t.equal(
    said({ replicas: 2, disk: 'local' }),
    'claims wait for 2 replicas and the server’s disk, up to 100 ms',
  )
  t.equal(said({ replicas: 'none', disk: 'local' }), 'claims wait for the server’s disk, up to 100 ms')
  t.equal(
    said({ disk: 'replicas' }),
    'claims wait for the disks of the server and of 1 replica, up to 100 ms',
  )
})

void t.test('all replicas are those that are connected or may be promoted, one at least', async (t) => {
  let known = 3
  let asks = 0
  const replicasOf = async () => {
    asks++
    if (known < 0) throw new Error('nobody knows')
    return known
  }
  const { claim, asked, says } = await barrierOf(t, { replicas: 'all' }, { has: 3 }, { replicasOf })
  await claim()
  const waits = () => asked.filter((command) => command.startsWith('wait')).splice(0)
  t.strictSame(waits(), ['wait 1 100', 'wait 3 100'], 'a second round for those newly found')
  known = -1
  await claim()
  t.strictSame(waits().slice(2), ['wait 3 100'])
  t.equal(asks, 1, 'it is known for a second')
  await wait(1010)
  await claim()
  t.equal(asks, 2, 'and for longer if it cannot be read')
  t.strictSame(waits().slice(3), ['wait 3 100'])
  says.has = 2
  await t.rejects(claim(), { message: /: 2 of 3 replicas had it/ })
  known = 0
  says.role = role(2)
  await claim()
  says.role = role(4)
  await t.rejects(claim(), { message: /: 2 of 4 replicas had it/ })

  const none = await barrierOf(t, { replicas: 'all' }, { role: role(0), wait: ':0\r\n' })
  await t.rejects(none.claim(), { message: /: 0 of 1 replicas had it/ })
  known = -1
  const unknown = await barrierOf(t, { replicas: 'all' }, {}, { replicasOf })
  await t.rejects(unknown.claim(), { ...UNREPLICATED, message: /nobody knows/ })
  known = 1
  await unknown.claim()
})

void t.test('a source that does not answer is waited for no longer than a command', async (t) => {
  let answers = true
  const replicasOf = () => (answers ? Promise.resolve(1) : new Promise<number>(() => {}))
  const { claim } = await barrierOf(t, { replicas: 'all' }, {}, { replicasOf, timeoutMs: 60 })
  await claim()
  answers = false
  await wait(1010)
  const began = performance.now()
  await claim()
  const took = performance.now() - began
  t.ok(took >= 58 && took < 1000, `after ${took} ms`)
})
