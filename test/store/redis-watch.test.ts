import { once } from 'node:events'
import { type AddressInfo, createServer, type Socket } from 'node:net'
import t, { type Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import { openRedisStore, RedisKeys } from '../../src/store/redis.ts'
import type { Store } from '../../src/store/register.ts'
import { freePort, RedisServer } from '../support/redis.ts'
import { relay } from '../support/relay.ts'
import { bytesOf, HOUR, newId, newToken, SPANS, until } from './fixtures.ts'

const KEYS = new RedisKeys('pay')

const FAST: Millis = 300
const PATIENT: Millis = 10_000

async function open(t: Test, url: string, timeoutMs = PATIENT) {
  const events: string[] = []
  const onEvent = (kind: string, detail: string) => void events.push(`${kind}: ${detail}`)
  const register = await openRedisStore({ url, service: 'pay', timeoutMs, onEvent })
  t.teardown(() => register.close())
  return { register, events }
}

/** A watcher that counts its notifications. */
async function watch(register: Store, id: RecordId) {
  const watcher = { told: 0, stop: () => {} }
  watcher.stop = await register.watch(id, () => void watcher.told++)
  return watcher
}

/** An end of an attempt, as another replica writes it. */
async function end(register: Store, id: RecordId): Promise<void> {
  const { bytes } = await register.get(id)
  const write = bytesOf('unknown', newToken())
  const reply =
    bytes === null
      ? await register.put(id, write, SPANS)
      : await register.swap(id, { version: bytes.readUIntBE(4, 6) }, write, SPANS, false)
  if (!reply.done) throw new Error('not written')
}

const answers = (register: Store) => () =>
  register.ping().then(
    () => true,
    () => false,
  )

async function connections(server: RedisServer): Promise<number> {
  const list = String(await server.command('CLIENT', 'LIST'))
  return list.split('name=idempotency-proxy').length - 1
}

async function channels(server: RedisServer): Promise<string[]> {
  return ((await server.command('PUBSUB', 'SHARDCHANNELS')) as string[]).toSorted()
}

void t.test('watchers share one connection, and one subscription per record', async (t) => {
  await using server = await RedisServer.start()
  const { register } = await open(t, server.url)
  t.equal(await connections(server), 1, 'no second connection before somebody watches')
  const [a, b] = [newId(), newId()]
  const watchers = await Promise.all([a, a, a, b].map((id) => watch(register, id)))
  t.equal(await connections(server), 2)
  t.same(await channels(server), [KEYS.channel(a), KEYS.channel(b)].toSorted())
  for (const { stop } of watchers.slice(1)) stop()
  await until(async () => (await channels(server)).length === 1)
  t.same(await channels(server), [KEYS.channel(a)])
  watchers[0]?.stop()
  await until(async () => (await channels(server)).length === 0)
  const again = await watch(register, a)
  t.equal(await connections(server), 2, 'the connection stays open')
  await end(register, a)
  await until(() => again.told === 1)
})

void t.test('a record that is watched again while its last watcher leaves stays subscribed', async (t) => {
  await using server = await RedisServer.start()
  const { register } = await open(t, server.url)
  const id = newId()
  let last = await watch(register, id)
  for (let n = 0; n < 50; n++) {
    const next = watch(register, id)
    last.stop()
    last = await next
    if (n % 2) {
      last.stop()
      last = await watch(register, id)
    }
  }
  await end(register, id)
  await until(() => last.told === 1)
  t.same(await channels(server), [KEYS.channel(id)])
})

void t.test('a channel follows the key layout and works in any database', async (t) => {
  const id = Buffer.alloc(32, 0xaf).toString('base64url') as RecordId
  t.equal(KEYS.channel(id), `idempotency:pay:{af}:c:${id}`)
  t.equal(KEYS.bucket(id), `idempotency:pay:{af}:n:${id}`)
  await using server = await RedisServer.start()
  const [one, two] = [await open(t, `${server.url}/3`), await open(t, `${server.url}/3`)]
  const watcher = await watch(one.register, id)
  await end(two.register, id)
  await until(() => watcher.told === 1)
})

void t.test('after its connection is killed, every watcher is notified once', async (t) => {
  await using server = await RedisServer.start()
  const [{ register, events }, peer] = [await open(t, server.url), await open(t, server.url)]
  const watchers = await Promise.all(Array.from({ length: 20 }, newId).map((id) => watch(register, id)))
  for (let n = 1; n <= 3; n++) {
    t.equal(await server.command('CLIENT', 'KILL', 'TYPE', 'pubsub'), 1)
    await until(() => watchers.every(({ told }) => told === n))
  }
  const id = newId()
  const watcher = await watch(register, id)
  await end(peer.register, id)
  await until(() => watcher.told === 1)
  t.ok(watchers.every(({ told }) => told === 3))
  t.equal(events.length, 1, 'operations noticed nothing')
})

void t.test('every watcher, even one added during an outage, is notified after it', async (t) => {
  await using server = await RedisServer.start()
  const { register } = await open(t, server.url)
  const [early, late] = [newId(), newId()]
  const first = await watch(register, early)
  await server.stop()
  const second = await watch(register, late)
  const third = await watch(register, early)
  t.same([first.told, second.told, third.told], [0, 0, 0])
  await server.start()
  await until(() => first.told === 1 && second.told === 1 && third.told === 1)
  await until(answers(register))
  await end(register, late)
  await until(() => second.told === 2)
})

void t.test('watching without a server does not throw, and works once there is one', async (t) => {
  await using server = await RedisServer.start()
  await server.stop()
  const { register } = await open(t, server.url)
  const id = newId()
  const watcher = await watch(register, id)
  const other = await watch(register, newId())
  other.stop()
  await server.start()
  await until(() => watcher.told === 1)
  await until(answers(register))
  await end(register, id)
  await until(() => watcher.told === 2)
  t.equal(other.told, 0)
  t.same(await channels(server), [KEYS.channel(id)])
})

for (const connected of [false, true])
  void t.test(
    `a server that hangs ${connected ? 'after the first watch' : 'from the first watch on'} blocks no watch`,
    async (t) => {
      await using server = await RedisServer.start()
      const { register } = await open(t, server.url, FAST)
      const [id, early] = [newId(), newId()]
      const before = connected ? [await watch(register, early)] : []
      server.pause()
      const begun = performance.now()
      const watchers = await Promise.all([watch(register, id), watch(register, id)])
      t.ok(performance.now() - begun < 10 * FAST)
      server.resume()
      // Not the earlier one: a server that is back just in time keeps its connection.
      await until(() => watchers.every(({ told }) => told > 0))
      await until(answers(register))
      const all = [...watchers, ...before]
      const told = all.map((watcher) => watcher.told)
      await end(register, id)
      await end(register, early)
      await until(() => all.every((watcher, n) => watcher.told > (told[n] as number)))
    },
  )

void t.test('a watch does not wait for the end of a connection attempt that hangs', async (t) => {
  // TCP is accepted, and the TLS handshake never answered.
  const sockets: Socket[] = []
  const silent = createServer((socket) => void sockets.push(socket.on('error', () => {}))).listen(
    0,
    '127.0.0.1',
  )
  await once(silent, 'listening')
  t.teardown(() => silent.close())
  const { port } = silent.address() as AddressInfo
  const { register } = await open(t, `rediss://127.0.0.1:${port}`, FAST)
  const before = sockets.length
  const watching = watch(register, newId())
  await until(() => sockets.length > before)
  const socket = sockets[before] as Socket
  let closed = false
  socket.on('close', () => (closed = true))
  socket.resume()
  const watcher = await watching
  t.notOk(closed, 'the attempt was still under way')
  watcher.stop()
})

void t.test('without channel rights, writes work and watches stay silent, reported once', async (t) => {
  await using server = await RedisServer.start()
  await server.command(
    'ACL',
    'SETUSER',
    'app',
    'on',
    '>secret',
    '~idempotency:pay:*',
    '+@all',
    'resetchannels',
  )
  const { register, events } = await open(t, `redis://app:secret@127.0.0.1:${server.port}`)
  const told = () => events.filter((event) => event.includes('subscribing is refused'))
  const [id, other] = [newId(), newId()]
  const watchers = [await watch(register, id), await watch(register, other)]
  await end(register, id)
  await end(register, id)
  const token = newToken()
  const put = await register.put(other, bytesOf('completed', token), SPANS)
  t.ok(put.done)
  t.ok(await register.remove(other, put.now))
  t.match(told(), [/^error: .*NOPERM/])
  watchers[0]?.stop()
  t.ok(watchers.every((watcher) => watcher.told === 0))

  await server.command('ACL', 'SETUSER', 'app', '-spublish', '-ssubscribe', '-sunsubscribe')
  await end(register, id)
  const silent = await watch(register, newId())
  silent.stop()
  t.equal(told().length, 1)

  await server.command('ACL', 'SETUSER', 'app', '+@all', '&idempotency:pay:*')
  const third = newId()
  const watcher = await watch(register, third)
  await end(register, third)
  await until(() => watcher.told === 1)
  await server.command('ACL', 'SETUSER', 'app', 'resetchannels')
  await until(() => told().length === 2)
})

void t.test('when operations reconnect, perhaps to another server, watching reconnects too', async (t) => {
  await using server = await RedisServer.start()
  const { register, events } = await open(t, server.url)
  const id = newId()
  const watcher = await watch(register, id)
  await server.command('CLIENT', 'KILL', 'TYPE', 'normal')
  await until(() => watcher.told === 1)
  t.equal(events.at(-1), `connected: 127.0.0.1:${server.port}`)
  await end(register, id)
  await until(() => watcher.told === 2)
})

void t.test('unsolicited messages are ignored; a malformed one ends the connection', async (t) => {
  await using server = await RedisServer.start()
  const gate = await relay(server.port)
  t.teardown(() => gate[Symbol.asyncDispose]())
  const [{ register }, peer] = [await open(t, `redis://127.0.0.1:${gate.port}`), await open(t, server.url)]
  const id = newId()
  const watcher = await watch(register, id)
  // On the connection that was opened last: that of the watchers.
  const say = (message: string) => gate.inject(message)
  say('*3\r\n$12\r\nsunsubscribe\r\n$1\r\nx\r\n:0\r\n*3\r\n$8\r\nsmessage\r\n$1\r\nx\r\n$0\r\n\r\n')
  await end(peer.register, id)
  await until(() => watcher.told === 1)
  const [first, second] = [await watch(register, newId()), newId()]
  first.stop()
  const again = await watch(register, second)
  await end(peer.register, second)
  await until(() => again.told === 1)
  t.equal(watcher.told, 1, 'the connection is the same')
  for (const nonsense of ['*1\r\n:1\r\n', ':1\r\n']) {
    const told = watcher.told
    const late = newId()
    say(nonsense)
    await until(() => watcher.told > told)
    const next = await watch(register, late)
    await end(peer.register, late)
    await until(() => next.told > 0)
  }
})

void t.test('watching recovers from a malformed reply to a subscribe or unsubscribe', async (t) => {
  await using server = await RedisServer.start()
  const gate = await relay(server.port)
  t.teardown(() => gate[Symbol.asyncDispose]())
  const { register } = await open(t, `redis://127.0.0.1:${gate.port}`)
  const [id, other] = [newId(), newId()]
  const watcher = await watch(register, id)
  for (const change of [() => watch(register, other), async () => watcher.stop()]) {
    const changing = change()
    gate.inject('+OK\r\n')
    await changing
    const next = newId()
    const after = await watch(register, next)
    await end(register, next)
    await until(() => after.told > 0)
  }
})

void t.test('close also closes the connection for watching', async (t) => {
  await using server = await RedisServer.start()
  const { register } = await open(t, server.url)
  const watcher = await watch(register, newId())
  const pending = watch(register, newId())
  await register.close()
  ;(await pending).stop()
  watcher.stop()
  const after = await watch(register, newId())
  after.stop()
  const never = await open(t, server.url)
  await never.register.close()
  ;(await watch(never.register, newId())).stop()
  await until(async () => (await connections(server)) === 0)
  const down = await open(t, `redis://127.0.0.1:${await freePort()}`)
  ;(await watch(down.register, newId())).stop()
  await down.register.close()
})

void t.test('a bucket expires when it is full again, or goes with the last unit given back', async (t) => {
  await using server = await RedisServer.start()
  const { register } = await open(t, server.url)
  const [id, short] = [newId(), newId()]
  const rate = { count: 10, per: 10 * HOUR }
  await register.limits.take(id, rate, 1)
  const expires = async () => Number(await server.command('PTTL', KEYS.bucket(id)))
  t.ok((await expires()) > 0 && (await expires()) <= HOUR)
  await register.limits.take(id, rate, 1)
  t.ok((await expires()) > HOUR && (await expires()) <= 2 * HOUR)
  await register.limits.take(id, rate, -1)
  t.ok((await expires()) > 0 && (await expires()) <= HOUR)
  await register.limits.take(id, rate, -1)
  t.equal(await server.command('EXISTS', KEYS.bucket(id)), 0)
  await register.limits.take(short, { count: 2, per: 100 }, 1)
  await until(async () => (await server.command('EXISTS', KEYS.bucket(short))) === 0)
  t.equal(await server.command('DBSIZE'), 0)

  await server.command('SET', KEYS.bucket(id), 'of a later release')
  t.equal(await register.limits.take(id, rate, 1), 0)
  await server.command('CONFIG', 'SET', 'maxmemory', '1')
  await t.rejects(register.limits.take(newId(), rate, 1), { name: 'StoreFull' })
  t.equal(await server.command('EXISTS', KEYS.record(id)), 0)
})
