import dns from 'node:dns'
import { once } from 'node:events'
import { type AddressInfo, createServer, type Socket } from 'node:net'
import { Redis } from 'ioredis'
import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { reconnectDelay } from '../../src/store/reconnect.ts'
import { type OnEvent, RedisConnection, script } from '../../src/store/redis-connection.ts'
import { RedisLink } from '../../src/store/redis-link.ts'
import { addressOf } from '../../src/store/redis-url.ts'
import { ReplyError, type RespArg, type RespReply } from '../../src/store/resp.ts'
import { fake, greeting } from '../support/fake-redis.ts'
import { freePort, RedisServer } from '../support/redis.ts'
import { until } from './fixtures.ts'

const PATIENT: Millis = 10_000
const FAST: Millis = 200
const APPLIED = { name: 'StoreUnavailable', maybeApplied: true }
const NOT_APPLIED = { name: 'StoreUnavailable', maybeApplied: false }
const same = (reply: RespReply) => reply
const raw = <T>(to: Pick<RedisConnection, 'ask'>, name: string, args: readonly RespArg[]) =>
  to.ask(name, args, (reply: never): T => reply)

function connectionTo(url: string, timeoutMs: Millis, onEvent: OnEvent): RedisConnection {
  return new RedisConnection({ find: () => addressOf(url) }, timeoutMs, { onEvent, onReady() {} })
}

async function open(t: Test, url: string, timeoutMs = PATIENT) {
  const events: string[] = []
  const onEvent = (kind: string, detail: string) => void events.push(`${kind}: ${detail}`)
  const connection = connectionTo(url, timeoutMs, onEvent)
  t.teardown(() => connection.close())
  await connection.open()
  return { connection, events }
}

const usable = (connection: RedisConnection) => () =>
  raw(connection, 'get', ['x']).then(
    () => true,
    () => false,
  )

void t.test('replies are the same as through ioredis, whatever the command', async (t) => {
  await using server = await RedisServer.start()
  const { connection } = await open(t, server.url)
  const other = new Redis(server.url, { protocol: 2 })
  t.teardown(() => other.disconnect())
  const all = Buffer.from(Array.from({ length: 256 }, (_, n) => n))
  const commands: (readonly [string, ...(string | number | Buffer)[]])[] = [
    ['set', 'a', all],
    ['get', 'a'],
    ['get', 'none'],
    ['set', 'large', Buffer.alloc(8 * 1024 * 1024, all)],
    ['get', 'large'],
    ['getrange', 'large', 0, 65_535],
    ['set', 'a', 'b', 'NX', 'GET'],
    ['incrby', 'n', -12],
    ['incrby', 'n', '1795000000000'],
    ['incrby', 'a', 'x'],
    ['no-such-command'],
    ['zadd', 'z', 1, 'one', 2, 'two'],
    ['zrangebyscore', 'z', '-inf', '+inf', 'WITHSCORES'],
    ['zrangebyscore', 'z', 9, 10],
    ['mget', 'a', 'none'],
    ['eval', "return {1, {2, 'three', {}}, false, redis.error_reply('ERR x')}", 0],
    ['eval', "return redis.status_reply('')", 0],
    ['scan', 0],
    ['lrange', 'none', 0, -1],
    ['rpush', 'l', ...Array.from({ length: 1000 }, (_, n) => `element ${n}`)],
    ['lrange', 'l', 0, -1],
  ]
  const plain = (reply: unknown): unknown => {
    if (reply instanceof ReplyError || reply instanceof Error) return `error: ${reply.message}`
    if (Buffer.isBuffer(reply)) return reply.toString('latin1')
    return Array.isArray(reply) ? reply.map(plain) : reply
  }
  for (let round = 0; round < 2; round++) {
    // One after the other, then all in one turn.
    const ask = (client: (name: string, args: (string | number | Buffer)[]) => Promise<unknown>) =>
      commands.reduce(async (before, [name, ...args]) => {
        const replies = await before
        return [...replies, await client(name, args).then(plain, plain)]
      }, Promise.resolve<unknown[]>([]))
    await server.command('FLUSHALL')
    const ours = await (round === 0
      ? ask((name, args) => raw(connection, name, args))
      : Promise.all(commands.map(([name, ...args]) => raw(connection, name, args).then(plain, plain))))
    await server.command('FLUSHALL')
    const theirs = await ask((name, args) => other.callBuffer(name, args))
    for (const [n, command] of commands.entries())
      t.equal(
        JSON.stringify(ours[n]).replace('Redis refuses: ', ''),
        JSON.stringify(theirs[n]).replace(/, with args beginning with[^"]*/, ''),
        `${command[0]} ${String(command[1]).slice(0, 20)}`,
      )
  }
})

void t.test('commands of one turn leave in one write, and replies are matched by order', async (t) => {
  let pieces = 0
  const { url, sockets } = await fake(
    t,
    greeting(([, arg = '']) => `$${arg.length}\r\n${arg}\r\n`),
  )
  const { connection } = await open(t, url)
  sockets[0]?.on('data', () => pieces++)
  const numbers = Array.from({ length: 500 }, (_, n) => String(n))
  const replies = await Promise.all(numbers.map((n) => raw(connection, 'echo', [n])))
  t.strictSame(replies.map(String), numbers)
  t.equal(pieces, 1)
  // By now the ring has wrapped around and grown.
  for (let n = 0; n < 300; n++) t.equal(String(await raw(connection, 'echo', [n])), String(n))
  const first = raw(connection, 'echo', ['first'])
  await new Promise(setImmediate)
  const more = await Promise.all([first, ...numbers.map((n) => raw(connection, 'echo', [n]))])
  t.strictSame(more.map(String), ['first', ...numbers])
})

void t.test('when the connection breaks, only sent commands may have been applied', async (t) => {
  const { url } = await fake(t, () => null)
  const { promise: connected, resolve: onConnected } = Promise.withResolvers<void>()
  const { promise: closed, resolve: onClosed } = Promise.withResolvers<void>()
  const link = new RedisLink(addressOf(url), PATIENT, { onConnected, onClosed, onError() {} })
  await connected
  const left = raw(link, 'set', ['a', 1])
  await new Promise(setImmediate)
  const kept = raw(link, 'set', ['b', 1])
  link.destroy()
  t.match(await Promise.allSettled([left, kept]), [{ reason: APPLIED }, { reason: NOT_APPLIED }])
  await closed
})

void t.test('close sends pending commands first, and nothing after them', async (t) => {
  const seen: string[] = []
  const { url } = await fake(
    t,
    greeting(([name = '']) => {
      seen.push(name)
      return null
    }),
  )
  const { connection } = await open(t, url)
  const asked = t.rejects(raw(connection, 'one', []), APPLIED)
  const closed = connection.close()
  await t.rejects(raw(connection, 'two', []), { ...NOT_APPLIED, message: /not connected: closed/ })
  await closed
  await asked
  t.strictSame(seen, ['one'])
  await connection.close()
})

void t.test('close interrupts a connect, a greeting and the pause before the next attempt', async (t) => {
  const silent = await fake(t, () => null)
  const events: string[] = []
  const onEvent = (kind: string, detail: string) => void events.push(`${kind}: ${detail}`)
  const start = (url: string) => {
    const connection = connectionTo(url, PATIENT, onEvent)
    return { connection, opened: connection.open() }
  }
  const early = start(silent.url)
  await early.connection.close()
  await early.opened
  const greeted = start(silent.url)
  await until(() => silent.sockets.some(({ bytesRead }) => bytesRead > 0))
  await greeted.connection.close()
  await greeted.opened
  const never = await open(t, 'redis://127.0.0.1:1')
  await never.connection.close()
  const connections = silent.sockets.length
  await new Promise((later) => setTimeout(later, 200))
  t.equal(silent.sockets.length, connections, 'there is no further attempt')
  t.notOk(events.some((event) => event.startsWith('connected')))
})

void t.test('after nonsense from a peer, commands in flight may have been applied', async (t) => {
  for (const nonsense of ['HTTP/1.1 400 Bad Request\r\n\r\n', '$3\r\nabcdef', ':1\r\n:2\r\n:3\r\n']) {
    let isMad = true
    const { url, sockets } = await fake(
      t,
      greeting(() => (isMad ? nonsense : ':1\r\n')),
    )
    const { connection, events } = await open(t, url)
    const results = await Promise.allSettled([
      raw(connection, 'a', []),
      raw(connection, 'b', []),
      raw(connection, 'c', []),
    ])
    // Replies that came in order before the nonsense count.
    t.ok(results.every((one) => one.status === 'fulfilled' || one.reason.maybeApplied === true))
    isMad = false
    await until(() => sockets.length === 2)
    await until(usable(connection))
    t.ok(events.some((event) => event.startsWith('error')))
  }
})

void t.test('a partial reply is not a reply', async (t) => {
  let part: string | null = '*2\r\n:1\r\n$100\r\nabc'
  const { url } = await fake(
    t,
    greeting((_, socket) => {
      if (part === null) return ':1\r\n'
      socket.end(part)
      part = null
      return null
    }),
  )
  const { connection } = await open(t, url)
  await t.rejects(raw(connection, 'get', ['a']), APPLIED)
  await until(usable(connection))
})

void t.test('a late reply is dropped; a command whose reply was overtaken ends the connection', async (t) => {
  const held: Socket[] = []
  let connections = 0
  const { url } = await fake(t, (command, socket) => {
    if (command[0] === 'client') connections++
    if (command[0] === 'hold') {
      held.push(socket)
      return null
    }
    return greeting(([, arg = '']) => `+${arg}\r\n`)(command, socket)
  })
  const { connection } = await open(t, url, FAST)
  await t.rejects(raw(connection, 'hold', []), { ...APPLIED, message: /timed out/ })
  held.pop()?.write('+late\r\n')
  t.equal(await raw(connection, 'echo', ['own']), 'own')
  t.equal(connections, 1)

  // A reply came after it was sent, but to another command.
  const [first, second] = [raw(connection, 'hold', []), raw(connection, 'hold', [])]
  await until(() => held.length === 2)
  held.pop()?.write('+first\r\n')
  t.equal(await first, 'first')
  await t.rejects(second, { ...APPLIED, message: /timed out/ })
  await until(() => connections === 2)
  await until(usable(connection))
})

void t.test('a busy event loop is not mistaken for a silent Redis', async (t) => {
  await using server = await RedisServer.start()
  const { connection } = await open(t, server.url, FAST)
  const asked = raw<Buffer>(connection, 'echo', ['here'])
  await new Promise(setImmediate)
  await new Promise(setImmediate)
  const until = performance.now() + 2 * FAST
  while (performance.now() < until);
  t.equal(String(await asked), 'here')
})

void t.test('a refused greeting is ignored, reported or retried, depending on the error', async (t) => {
  await using server = await RedisServer.start()
  const needless = await open(t, server.url.replace('//', '//:secret@'))
  t.strictSame(needless.events, [`connected: 127.0.0.1:${server.port}`], 'the server asks for no password')
  await server.command('ACL', 'SETUSER', 'app', 'on', '>secret', '~*', '+@all', '-ping', '-client')
  const noRights = await open(t, server.url.replace('//', '//app:secret@'))
  t.strictSame(noRights.events, [`connected: 127.0.0.1:${server.port}`], 'nothing that it needs is missing')
  await server.command('CONFIG', 'SET', 'requirepass', 'secret')
  const noPassword = await open(t, server.url)
  t.match(noPassword.events, [/^error: Redis refuses: NOAUTH/])
  await t.rejects(raw(noPassword.connection, 'get', ['a']), { ...NOT_APPLIED, message: /NOAUTH/ })

  for (const refused of [
    '-LOADING data\r\n',
    '-MASTERDOWN lost\r\n',
    '-BUSY script\r\n',
    '-DENIED mode\r\n',
  ]) {
    let isReady = false
    const { url } = await fake(t, (command, socket) => {
      if (isReady) return greeting(() => '+OK\r\n')(command, socket)
      return command[0] === 'ping' ? refused : '+OK\r\n'
    })
    const { connection, events } = await open(t, url)
    const message = new RegExp(refused.slice(1, 5))
    await t.rejects(raw(connection, 'get', ['a']), { ...NOT_APPLIED, message })
    isReady = true
    await until(usable(connection))
    t.match(events, [message, /^connected/], 'and it is retried')
  }
})

void t.test('a server that drops connections is reported once and retried ever more slowly', async (t) => {
  const { url, sockets } = await fake(t, (_, socket) => {
    socket.destroy()
    return null
  })
  const { connection, events } = await open(t, url)
  await until(() => sockets.length >= 4)
  await t.rejects(raw(connection, 'get', ['a']), { ...NOT_APPLIED, message: /not connected/ })
  t.equal(new Set(events).size, events.length)
  t.notOk(events.some((event) => event.startsWith('connected') || event.startsWith('disconnected')))
  t.strictSame([1, 2, 3, 6, 7, 50].map(reconnectDelay), [50, 100, 200, 500, 500, 500])
})

void t.test('a greeting without an answer times out like a command', async (t) => {
  const { url, sockets } = await fake(t, () => null)
  const { connection, events } = await open(t, url, FAST)
  t.match(events, [/timed out/])
  await t.rejects(raw(connection, 'get', ['a']), NOT_APPLIED)
  await until(() => sockets.length > 1)
})

void t.test('a connection attempt that hangs times out', async (t) => {
  // TCP is accepted, and the TLS handshake never answered.
  const server = createServer(() => {}).listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => server.close())
  const { connection, events } = await open(t, `rediss://127.0.0.1:${(server.address() as AddressInfo).port}`)
  t.strictSame(events, ['error: connect ETIMEDOUT'])
  await t.rejects(raw(connection, 'get', ['a']), { ...NOT_APPLIED, message: /ETIMEDOUT/ })
})

void t.test('with a grace, a connection attempt takes at most half of it', async (t) => {
  const server = createServer(() => {}).listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => server.close())
  const { port } = server.address() as AddressInfo
  const attempts = [0, 20].map((grace) => {
    const made = { count: 0 }
    const find = () => {
      made.count++
      return { host: '127.0.0.1', port, username: '', password: '', db: 0, tls: {} }
    }
    const connection = new RedisConnection({ find }, PATIENT, { onEvent() {}, onReady() {}, grace })
    t.teardown(() => connection.close())
    void connection.open()
    return made
  }) as [{ count: number }, { count: number }]
  await until(() => attempts[1].count === 4)
  t.ok(attempts[0].count < 4, 'others wait for two seconds')
})

void t.test('an error while reading a reply fails only its own command', async (t) => {
  await using server = await RedisServer.start()
  const { connection } = await open(t, server.url)
  const get = script('get')
  const wrong = connection.run(get, [1, 'a', 0], () => {
    throw new TypeError('bug')
  })
  const right = connection.run(get, [1, 'a', 0], same)
  await t.rejects(wrong, { name: 'TypeError' })
  t.match(await right, [Number, null])
  await t.rejects(raw(connection, 'evalsha', ['f'.repeat(40), 0]), { ...NOT_APPLIED, message: /NOSCRIPT/ })
})

void t.test('a script that is unknown to a server that is being left was not applied', async (t) => {
  const { url } = await fake(
    t,
    greeting(([name]) => (name === 'set' ? '-READONLY replica\r\n' : '-NOSCRIPT none\r\n')),
  )
  const { connection, events } = await open(t, url)
  const results = await Promise.allSettled([
    raw(connection, 'set', ['a', 1]),
    connection.run(script('get'), [1, 'a', 0], same),
  ])
  t.match(results, [
    { reason: { ...NOT_APPLIED, message: /READONLY/ } },
    { reason: { ...NOT_APPLIED, message: /NOSCRIPT/ } },
  ])
  await until(() => events.filter((event) => event.startsWith('connected')).length === 2)
})

void t.test('redirections of a cluster mean that nothing was applied', async (t) => {
  for (const error of ['MOVED 1 127.0.0.1:1', 'ASK 1 127.0.0.1:1', 'TRYAGAIN', 'CLUSTERDOWN']) {
    const { url } = await fake(
      t,
      greeting(() => `-${error}\r\n`),
    )
    const { connection } = await open(t, url)
    await t.rejects(raw(connection, 'get', ['a']), { ...NOT_APPLIED, message: new RegExp(error) })
  }
})

void t.test('when none of several addresses answers, the event has the error code', async (t) => {
  const { lookup } = dns
  t.teardown(() => (dns.lookup = lookup))
  const addresses = ['127.0.0.1', '127.0.0.2'].map((address) => ({ address, family: 4 }))
  dns.lookup = ((_name: string, _options: object, found: (error: null, all: object[]) => void) =>
    setImmediate(() => found(null, addresses))) as unknown as typeof lookup
  const { events } = await open(t, `redis://redis.test:${await freePort()}`)
  t.match(events, [/^error: .*ECONNREFUSED/])
})

void t.test('a timeout that is noticed while the connection closes changes nothing', async (t) => {
  const { url } = await fake(
    t,
    greeting(() => null),
  )
  const { connection } = await open(t, url, FAST)
  const asked = t.rejects(raw(connection, 'a', []), APPLIED)
  await new Promise(setImmediate)
  await new Promise(setImmediate)
  // As long as the command's timer: runs right after it, before what that one has scheduled.
  const closing = new Promise((later) => setTimeout(later, FAST)).then(() => connection.close())
  const busyUntil = performance.now() + 2 * FAST
  while (performance.now() < busyUntil);
  await closing
  await asked
})
