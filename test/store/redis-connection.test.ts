import dns from 'node:dns'
import { once } from 'node:events'
import { type AddressInfo, createServer, type Socket } from 'node:net'
import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { RedisConnection } from '../../src/store/redis/connection.ts'
import type { GetReply, Store } from '../../src/store/register.ts'
import { certificate } from '../support/certificates.ts'
import {
  type Answer,
  array,
  bulk,
  DONE,
  fake,
  int,
  isLeft,
  NULL,
  OK,
  type Says,
  scripted,
  words,
} from '../support/fake-redis.ts'
import { frozenClock } from '../support/frozen-clock.ts'
import { freePort } from '../support/redis.ts'
import { claim, newId, SPANS, until } from './fixtures.ts'
import { APPLIED, answers, claiming, NOT_APPLIED, open, PATIENT } from './redis-fixtures.ts'

/* What a caller of the store sees of its connection, with servers that say what the test wants. Real ones: redis-faults.verify.ts. */

const get = (store: Store, id: RecordId = newId()) => store.get(id)
const CLOSED = /Connection is closed/

void t.test('a greeting asks for what the URL and the configuration need, and no more', async (t) => {
  const named = [
    'client setname idempotency-proxy',
    'client SETINFO LIB-VER 6.0.0',
    'client SETINFO LIB-NAME ioredis',
  ]
  const last = [...named, 'ping']
  const cases: [credentials: string, path: string, grace: number, string[]][] = [
    ['', '', 0, last],
    [':secret@', '', 0, ['auth secret', ...last]],
    ['app:secret@', '', 0, ['auth app secret', ...last]],
    ['app@', '', 0, ['auth app ', ...last]],
    ['', '/1', 0, ['select 1', ...last]],
    ['', '', 5000, [...last, 'info server']],
  ]
  for (const [credentials, path, grace, commands] of cases) {
    const greeted: string[] = []
    const server = await fake(t, (command) => {
      greeted.push(command.join(' '))
      return command[0] === 'ping' ? '+PONG\r\n' : command[0] === 'info' ? bulk('run_id:0a') : OK
    })
    const { events } = await open(t, `${server.url.replace('//', `//${credentials}`)}${path}`, { grace })
    t.strictSame(events, [`connected: 127.0.0.1:${server.port}`])
    t.strictSame(greeted.slice(0, commands.length), commands)
  }
})

void t.test('a server that may be used is told from one that may not, and tried again', async (t) => {
  const cases: [says: Says, why: string | null][] = [
    [{ auth: '-ERR Client sent AUTH, but no password is set\r\n' }, null],
    [{ auth: '-ERR AUTH <password> called without any password configured for the default user.\r\n' }, null],
    [{ ping: '-NOPERM ping\r\n' }, null],
    [{ 'info server': '-NOPERM info\r\n' }, null],
    [{ client: '-NOPERM client\r\n' }, null],
    [{ auth: '-WRONGPASS no\r\n' }, 'Redis refuses: WRONGPASS no'],
    [{ auth: '-NOPERM auth\r\n' }, 'Redis refuses: NOPERM auth'],
    [{ select: '-ERR DB index is out of range\r\n' }, 'Redis refuses: ERR DB index is out of range'],
    [{ 'info server': '-ERR no\r\n' }, 'Redis refuses: ERR no'],
    ...['LOADING data', 'MASTERDOWN lost', 'BUSY script', 'NOAUTH'].map((refusal): [Says, string] => [
      { ping: `-${refusal}\r\n` },
      `Redis refuses: ${refusal}`,
    ]),
    ...['ping', 'info server'].map((one): [Says, string] => [
      { [one]: '+QUEUED\r\n' },
      'replies do not match their commands',
    ]),
  ]
  for (const [says, why] of cases) {
    const server = await scripted(t, says)
    const { store, events } = await open(t, `${server.url.replace('//', '//:secret@')}/1`, { grace: 500_000 })
    if (why === null) {
      t.strictSame(events, [`connected: ${server.name}`], JSON.stringify(says))
      t.match(await claim(store), { done: true })
      continue
    }
    t.strictSame(events, [`error: ${why}`], JSON.stringify(says))
    await t.rejects(get(store), { ...NOT_APPLIED, message: `Redis is not connected: ${why}` })
    for (const name of Object.keys(says)) server.says[name] = name === 'ping' ? '+PONG\r\n' : OK
    server.says['info server'] = bulk('run_id:0a')
    await until(answers(store))
  }
})

void t.test('why it is not connected is told once, and it is tried ever more slowly', async (t) => {
  const clock = frozenClock(t)
  const server = await scripted(t)
  const { store, events } = await open(t, server.url)
  const told = async (times: number, expected: string[]) => {
    const before = server.sockets.length
    await clock.passUntil(() => server.sockets.length >= before + times)
    t.strictSame(events.splice(0), expected)
  }
  t.equal(events.shift(), `connected: ${server.name}`)
  server.says['ping'] = '-LOADING data\r\n'
  server.hangUp()
  await clock.until(() => events.length === 1)
  await told(3, [`disconnected: ${server.name}`, 'error: Redis refuses: LOADING data'])
  server.says['ping'] = '-BUSY script\r\n'
  await told(2, ['error: Redis refuses: BUSY script'])
  await clock.settled()
  const before = server.sockets.length
  await clock.until(isLeft.bind(null, server))
  await clock.settled()
  await clock.pass(490)
  t.equal(server.sockets.length, before, 'not before half a second')
  server.says['ping'] = '+PONG\r\n'
  await clock.passUntil(() => events.length > 0)
  t.strictSame(events, [`connected: ${server.name}`])
  t.ok(await store.ping())
})

void t.test('a connection attempt that hangs times out, within half a grace', async (t) => {
  // TCP is accepted, and the TLS handshake never answered.
  const hanging = createServer(() => {}).listen(0, '127.0.0.1')
  await once(hanging, 'listening')
  t.teardown(() => hanging.close())
  const url = `rediss://127.0.0.1:${(hanging.address() as AddressInfo).port}`
  for (const options of [{ client: { connectTimeout: 50 } }, { grace: 100 }]) {
    const { store, events } = await open(t, url, options)
    t.strictSame(events, ['error: connect ETIMEDOUT'])
    await t.rejects(get(store), { ...NOT_APPLIED, message: 'Redis is not connected: connect ETIMEDOUT' })
    await store.close()
  }
})

void t.test('an address without a route is tried again like any other', async (t) => {
  const events: string[] = []
  const { promise: twice, resolve } = Promise.withResolvers<void>()
  let attempts = 0
  const connection = new RedisConnection(
    // Broadcast: connecting fails within the call.
    { place: { host: '255.255.255.255', port: 6379 }, login: { username: '', password: '', db: 0 } },
    { timeoutMs: PATIENT },
    {
      onEvent: (kind, detail) => void events.push(`${kind}: ${detail}`),
      onLost: () => ++attempts === 2 && resolve(),
    },
  )
  t.teardown(() => connection.close())
  await connection.open()
  // By a timer, in whose turn of the event loop nothing of ioredis's own listens yet.
  await twice
  t.match(events, [/^error: connect E/])
})

void t.test('a greeting without an answer times out', async (t) => {
  const clock = frozenClock(t)
  for (const silent of ['auth', 'client', 'ping']) {
    const server = await scripted(t, { [silent]: null })
    const url = server.url.replace('//', '//:secret@')
    let events: string[] = []
    const opening = open(t, url, { timeoutMs: 70 }).then((opened) => ({ events } = opened))
    await clock.until(() => clock.timers() > 0)
    await clock.pass(69)
    t.strictSame(events, [])
    await clock.passUntil(() => events.length > 0)
    await opening
    t.strictSame(events, ['error: no answer from Redis: Command timed out'])
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

void t.test('over TLS, only a server whose certificate is trusted is used', async (t) => {
  using own = certificate('IP:127.0.0.1')
  using stranger = certificate('IP:127.0.0.1')
  const answer: Answer = ([name]) => (name === 'time' ? words('1', '0') : name === 'ping' ? '+PONG\r\n' : OK)
  const { port } = await fake(t, answer, own)
  const trusting = ({ certFile }: { readonly certFile: string }) =>
    open(t, `rediss://127.0.0.1:${port}?cacert=${certFile}`)
  t.equal(await (await trusting(own)).store.ping(), 1000)
  // A key that nobody can read may be replaced.
  const unreadable = `rediss://127.0.0.1:${port}?cacert=${own.certFile}&cert=${own.certFile}&key=${own.certFile}`
  const { events } = await open(t, unreadable)
  t.match(events, [/^error: .*DECODER/])
  const other = await trusting(stranger)
  await t.rejects(other.store.ping(), { ...NOT_APPLIED, message: /self.signed certificate/ })
})

void t.test('R03 a command without an answer times out, and may have been applied', async (t) => {
  const clock = frozenClock(t)
  const server = await scripted(t)
  const { store, events } = await open(t, server.url, { timeoutMs: 100 })
  const asked = (...all: Promise<unknown>[]) => {
    const settled: PromiseSettledResult<unknown>[] = []
    for (const [n, one] of all.entries())
      void Promise.allSettled([one]).then(([result]) => {
        settled[n] = result
      })
    return settled
  }
  /** Asks that often, which nobody answers. */
  const silent = async (count: number) => {
    server.says['get'] = null
    const all: Promise<unknown>[] = []
    for (let n = 0; n < count; n++) {
      const before = server.asked.length
      all.push(get(store))
      await clock.until(() => server.asked.length > before)
    }
    const settled = asked(...all)
    await clock.pass(99)
    t.equal(settled.length, 0, 'not before its time')
    await clock.pass(1)
    for (const one of settled) t.match(one, { reason: { ...APPLIED, message: /^no answer from Redis: / } })
    t.equal(settled.length, count)
    server.says['get'] = [int(1), NULL]
  }
  const late = (first: number, ...numbers: number[]) =>
    server.write([first, ...numbers].map((n) => array(int(7), int(0), NULL, int(n))).join(''))
  await silent(4)
  late(1, 2, 3, 4)
  t.strictSame(await get(store), { now: 1, bytes: null }, 'not the late reply to another')
  await silent(4)
  late(6, 7, 8, 9)
  t.ok(await store.ping(), 'any reply shows that the connection is not silent')
  await silent(4)
  await silent(1)
  await clock.until(() => events.length === 2)
  t.strictSame(
    events,
    [`connected: ${server.name}`, `disconnected: ${server.name}`],
    'five in a row are silence',
  )
  await t.rejects(get(store), NOT_APPLIED)
  await clock.passUntil(() => events.length === 3)
  // One whose reply was overtaken.
  let held = 0
  server.says['get'] = () => (held++ < 64 ? [int(2), NULL] : null)
  // Two batches in one write.
  const [first, ...overtaken] = Array.from({ length: 65 }, () => get(store))
  t.strictSame(await first, { now: 2, bytes: null })
  const settled = asked(overtaken.at(-1) as Promise<unknown>, get(store))
  await clock.pass(100)
  await clock.until(() => settled.filter(Boolean).length === 2)
  t.match(settled, [{ reason: { ...APPLIED, message: /timed out/ } }, { reason: APPLIED }])
})

void t.test('a connection that has lost a reply to a plain command is left', async (t) => {
  const clock = frozenClock(t)
  const server = await scripted(t)
  const { store, events } = await open(t, server.url, { timeoutMs: 100 })
  const { time = OK } = server.says
  server.says['time'] = null
  for (let n = 0; n < 5; n++) {
    const before = server.asked.length
    const asked = t.rejects(store.ping(), APPLIED)
    await clock.until(() => server.asked.length > before)
    await clock.pass(100)
    await asked
    server.says['time'] = time
  }
  await clock.passUntil(() => events.length === 3)
  t.ok(await store.ping())
})

void t.test('a script that has timed out is not sent after all', async (t) => {
  const clock = frozenClock(t)
  const server = await scripted(t, { get: null })
  const { store } = await open(t, server.url, { timeoutMs: 100 })
  const asked = t.rejects(get(store), APPLIED)
  await clock.until(() => server.asked.length === 1)
  await clock.pass(100)
  await asked
  server.write('-NOSCRIPT none\r\n')
  for (let n = 0; n < 2; n++) t.ok(await store.ping())
  t.strictSame(server.asked, ['get', 'time', 'time'])
})

void t.test('a timeout that is noticed while the store closes changes nothing', async (t) => {
  const clock = frozenClock(t)
  const server = await scripted(t, { get: null })
  const { store } = await open(t, server.url, { timeoutMs: 100 })
  // A server that keeps its side open.
  for (const socket of server.sockets) Object.assign(socket, { allowHalfOpen: true })
  const asked = t.rejects(get(store), APPLIED)
  await clock.until(() => server.asked.length === 1)
  // Right after the command's timer, before what that one has scheduled.
  const closed = new Promise<void>((resolve) => setTimeout(() => resolve(store.close()), 100))
  await clock.pass(100)
  await clock.pass(250)
  await asked
  await closed
})

void t.test('R09 a script that the server does not know is sent whole, once', async (t) => {
  const server = await scripted(t)
  const { store } = await open(t, server.url)
  let isKnown = true
  server.says['get'] = ([word]) => (word === 'eval' && isKnown ? [int(1), NULL] : '-NOSCRIPT none\r\n')
  t.strictSame(await get(store), { now: 1, bytes: null })
  isKnown = false
  await t.rejects(get(store), { ...NOT_APPLIED, message: /refuses: NOSCRIPT/ })
  server.says['get'] = '-ERR no NOSCRIPT\r\n'
  await t.rejects(get(store), { ...NOT_APPLIED, message: 'Redis refuses: ERR no NOSCRIPT' })
  t.strictSame(server.asked, ['get', 'get in full', 'get', 'get in full', 'get'])
})

void t.test('what a server refuses was not applied, and some refusals mean more', async (t) => {
  const server = await scripted(t)
  const { store, events } = await open(t, server.url)
  for (const [reply, error] of [
    ...['MISCONF', 'LOADING', 'NOAUTH', 'NOPERM', 'CLUSTERDOWN', 'MOVED 1 h:1', 'ASK 1 h:1', 'TRYAGAIN'].map(
      (code) => [code, { ...NOT_APPLIED, message: `Redis refuses: ${code}` }] as const,
    ),
    ['ERR WRONGTYPE OOM', { ...NOT_APPLIED, message: 'Redis refuses: ERR WRONGTYPE OOM' }],
    ['WRONGTYPE of key', { name: 'CorruptRecord' }],
    ['OOM command not allowed', { name: 'StoreFull', maybeApplied: false }],
  ] as const) {
    server.says['get'] = `-${reply}\r\n`
    await t.rejects(get(store), error)
  }
  t.equal(events.length, 1)
  // It has become a replica: its name may lead to another server by now. Replies that are yet to come count.
  server.says['put'] = '-READONLY replica\r\n'
  t.match(await Promise.allSettled([claim(store), get(store), store.ping()]), [
    { reason: { ...NOT_APPLIED, message: /READONLY/ } },
    { reason: { ...NOT_APPLIED, message: /READONLY/ } },
    { value: 1000 },
  ])
  await until(() => events.length === 3)
  t.strictSame(events.slice(1), [`disconnected: ${server.name}`, `connected: ${server.name}`])
})

void t.test('a reply of another command is no reply, and ends the connection', async (t) => {
  const nonsense = [
    array(int(7), NULL, int(99)),
    '*0\r\n',
    ':1\r\n',
    OK,
    'HTTP/1.1 400 Bad Request\r\n\r\n',
    '$3\r\nabcdef',
  ]
  for (const reply of nonsense) {
    const server = await scripted(t, { get: reply })
    const { store, events } = await open(t, server.url)
    for (const one of await Promise.allSettled([get(store), get(store)]))
      t.match(one, { reason: APPLIED }, reply)
    server.says['get'] = [int(1), NULL]
    await until(answers(store))
    t.match(events, [/^connected/, /^error: /, /^connected/])
    t.strictSame(await get(store), { now: 1, bytes: null })
  }
})

void t.test('replies that nobody asked for, and parts of replies, end the connection', async (t) => {
  const server = await scripted(t)
  const { store, events } = await open(t, server.url)
  await get(store)
  server.write('+more\r\n')
  await until(() => events.length === 3)
  t.match(events[1], /^error: Command queue state error/)
  server.says['get'] = (_, socket) => {
    socket.end('*3\r\n:1\r\n$100\r\nabc')
    return null
  }
  await t.rejects(get(store), { ...APPLIED, message: CLOSED })
  await until(answers(store))
  for (const [reply, error] of [
    ['+PONG\r\n+more\r\n', 'error: Command queue state error'],
    ['+QUEUED\r\n', 'error: replies do not match their commands'],
  ] as const) {
    server.says['ping'] = reply
    events.splice(0)
    server.hangUp()
    await until(() => events.some((event) => event.startsWith(error)))
  }
})

void t.test('replies are matched by order, however many operations of a turn there are', async (t) => {
  const server = await scripted(t)
  server.says['throttle'] = ([, , , key = '']) => [int(Number(key.slice(-5)))]
  const { store } = await open(t, server.url)
  const rate = { count: 1, per: 1 }
  for (const count of [5, 64, 63, 1, 65, 300]) {
    const buckets = Array.from({ length: count }, (_, n) => newId().slice(5) + String(n).padStart(5, '0'))
    t.strictSame(
      await Promise.all(buckets.map((bucket) => store.limits.take(bucket, rate, 1))),
      buckets.map((_, n) => n),
    )
  }
})

void t.test('what is sent arrives as it was asked for, however slowly the server reads', async (t) => {
  const server = await scripted(t)
  const { store } = await open(t, server.url)
  const [socket] = server.sockets
  socket?.pause()
  const id = newId()
  // More than fits between the two.
  const large = store.put(id, Buffer.concat([claiming(), Buffer.alloc(16 * 1024 * 1024)]), SPANS)
  const ids = Array.from({ length: 20 }, newId)
  const asked: Promise<GetReply>[] = []
  for (const one of ids) {
    await new Promise(setImmediate)
    asked.push(get(store, one))
  }
  // Two of one turn take two pieces of memory.
  const texts = ['a', 'b'].map((letter) => letter.repeat(40_000) as RecordId)
  asked.push(...texts.map((text) => get(store, text)))
  await new Promise(setImmediate)
  socket?.resume()
  t.match(await large, { done: true })
  await Promise.all(asked)
  t.strictSame(
    server.commands.map((command) => command.find((part) => part.includes(':r:'))?.split(':r:')[1]),
    [id, ...ids, ...texts],
  )
})

void t.test('when the connection ends, only commands that were sent may have been applied', async (t) => {
  const server = await scripted(t, { get: null })
  const { store, events } = await open(t, server.url)
  const sent = get(store)
  await until(() => server.asked.length === 1)
  server.hangUp()
  await t.rejects(sent, { ...APPLIED, message: CLOSED })
  await until(() => events.at(-1)?.startsWith('connected') === true)
  t.strictSame(server.asked, ['get'], 'it is not sent again')
  // The server ends its side: what is asked before its end is noticed can no longer be written.
  server.says['get'] = (_, socket) => {
    socket.end(array(int(1), int(0), NULL, int(2)))
    return null
  }
  t.strictSame(await get(store), { now: 1, bytes: null })
  server.says['get'] = null
  const asked: Promise<unknown>[] = []
  while (events.length < 4) {
    asked.push(get(store).catch((error: unknown) => error))
    await new Promise(setImmediate)
  }
  const late = (await Promise.all(asked)) as { readonly maybeApplied: boolean }[]
  t.ok(late.some(({ maybeApplied }) => !maybeApplied))
})

void t.test('close sends what was asked before, nothing after, and tries nothing again', async (t) => {
  const server = await scripted(t, { put: null })
  const { store, events } = await open(t, server.url)
  const asked = t.rejects(claim(store), { ...APPLIED, message: CLOSED })
  const closed = store.close()
  await t.rejects(get(store), { ...NOT_APPLIED, message: 'Redis is not connected: closed' })
  await closed
  await asked
  t.strictSame(server.asked, ['put'])
  await store.close()
  const down = await open(t, `redis://127.0.0.1:${await freePort()}`)
  await down.store.close()
  await t.rejects(get(down.store), { ...NOT_APPLIED, message: /not connected: closed/ })
  t.equal(events.filter((event) => event.startsWith('connected')).length, 1)
})

void t.test('a claim that is held fails alone', async (t) => {
  const server = await scripted(t, { put: [2, 100, 90, 40].map(int) })
  const { store, events } = await open(t, server.url)
  t.match(await Promise.allSettled([claim(store), get(store)]), [
    { reason: { name: 'InGrace', now: 100, since: 90, left: 40, maybeApplied: false } },
    { value: { now: 100 } },
  ])
  t.equal(events.length, 1)
})

void t.test('a claim is sent the identity of the process that it reaches, always', async (t) => {
  const own = (socket: Socket) => server.sockets.indexOf(socket).toString(16).padStart(4, '0')
  let claims = 0
  const strange: string[] = []
  const server = await scripted(t, {
    'info server': (_, socket) => bulk(`# Server\r\nrun_id:${own(socket)}`),
    put: (command, socket) => {
      claims++
      if (command.at(-1) !== own(socket)) strange.push(`${command.at(-1)} to ${own(socket)}`)
      if (claims % 7 === 0) socket.destroy()
      return DONE
    },
  })
  const { store, events } = await open(t, server.url, { grace: 500_000 })
  while (events.filter((event) => event.startsWith('connected')).length < 5) {
    await Promise.allSettled(Array.from({ length: 3 }, () => claim(store)))
    await new Promise(setImmediate)
  }
  t.ok(claims > 0)
  t.strictSame(strange, [])
})

void t.test('options of store.redis reach ioredis, and announced addresses are translated', async (t) => {
  const server = await scripted(t)
  const names: unknown[] = []
  server.says['client'] = (command) => {
    names.push(command.slice(1))
    return OK
  }
  const { events } = await open(t, 'redis://10.0.0.1:6379', {
    client: {
      connectionName: 'payments',
      disableClientInfo: true,
      natMap: { '10.0.0.1:6379': { host: '127.0.0.1', port: server.port } },
    },
  })
  t.strictSame(events, ['connected: 10.0.0.1:6379'])
  t.strictSame(names, [['setname', 'payments']])
})
