import { once } from 'node:events'
import { type AddressInfo, createServer } from 'node:net'
import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { array, bulk, fake, int, isLeft, OK, scripted, words } from '../support/fake-redis.ts'
import { frozenClock } from '../support/frozen-clock.ts'
import { emptyRedis, freePort } from '../support/redis.ts'
import { bytesOf, newId, newToken, SPANS, until } from './fixtures.ts'
import { end, KEYS, open, watch } from './redis-fixtures.ts'

/* Watchers of records, on a real server and on one that says what the test wants. Outages of real ones: redis-faults.verify.ts. */

const server = await emptyRedis(t)

async function connections(): Promise<number> {
  const list = String(await server.command('CLIENT', 'LIST'))
  return list.split('name=idempotency-proxy').length - 1
}

async function channels(): Promise<string[]> {
  return ((await server.command('PUBSUB', 'SHARDCHANNELS')) as string[]).toSorted()
}

void t.test('watchers share one connection, and one subscription per record', async (t) => {
  const { store } = await open(t, server.url)
  await until(async () => (await connections()) === 1)
  t.pass('no second connection before somebody watches')
  const [a, b] = [newId(), newId()]
  const watchers = await Promise.all([a, a, a, b].map((id) => watch(store, id)))
  t.same(await channels(), [KEYS.channel(a), KEYS.channel(b)].toSorted())
  for (const { stop } of watchers.slice(1)) stop()
  await until(async () => (await channels()).length === 1)
  t.same(await channels(), [KEYS.channel(a)])
  watchers[0]?.stop()
  await until(async () => (await channels()).length === 0)
  let last = await watch(store, a)
  // Watched again while its last watcher leaves.
  for (let n = 0; n < 20; n++) {
    const next = watch(store, a)
    last.stop()
    last = await next
    if (n % 2) {
      last.stop()
      last = await watch(store, a)
    }
  }
  await end(store, a)
  await until(() => last.told === 1)
  t.same(await channels(), [KEYS.channel(a)])
  t.equal(await connections(), 2, 'the connection stays open')
  await store.close()
  await until(async () => (await connections()) === 0)
})

void t.test('after its connection is killed, every watcher is notified once', async (t) => {
  const [{ store, events }, peer] = [await open(t, server.url), await open(t, server.url)]
  const watchers = await Promise.all(Array.from({ length: 20 }, () => watch(store)))
  for (let n = 1; n <= 2; n++) {
    t.equal(await server.command('CLIENT', 'KILL', 'TYPE', 'pubsub'), 1)
    await until(() => watchers.every(({ told }) => told === n))
  }
  const id = newId()
  const watcher = await watch(store, id)
  await end(peer.store, id)
  await until(() => watcher.told === 1)
  t.ok(watchers.every(({ told }) => told === 2))
  t.equal(events.length, 1, 'operations noticed nothing')
})

void t.test('when operations reconnect, perhaps to another server, watching reconnects too', async (t) => {
  const { store, events } = await open(t, server.url)
  const id = newId()
  const watcher = await watch(store, id)
  await server.command('CLIENT', 'KILL', 'TYPE', 'normal')
  await until(() => watcher.told === 1)
  t.equal(events.at(-1), `connected: 127.0.0.1:${server.port}`)
  await end(store, id)
  await until(() => watcher.told === 2)
})

void t.test('without channel rights, writes work and watches stay silent, reported once', async (t) => {
  const grant = (...rights: string[]) => server.command('ACL', 'SETUSER', 'app', ...rights)
  await grant('on', '>secret', '~idempotency:pay:*', '+@all', 'resetchannels')
  const { store, events } = await open(t, `redis://app:secret@127.0.0.1:${server.port}`)
  const told = () => events.filter((event) => event.includes('subscribing is refused'))
  const [id, other] = [newId(), newId()]
  const watchers = [await watch(store, id), await watch(store, other)]
  await end(store, id)
  await end(store, id)
  const put = await store.put(other, bytesOf('completed', newToken()), SPANS)
  t.ok(await store.remove(other, put.now))
  t.match(told(), [/^error: .*so waiting requests poll the store: .*NOPERM/])
  watchers[0]?.stop()
  t.ok(watchers.every((watcher) => watcher.told === 0))

  await grant('-spublish', '-ssubscribe', '-sunsubscribe')
  await end(store, id)
  const silent = await watch(store)
  silent.stop()
  t.equal(told().length, 1)

  await grant('+@all', '&idempotency:pay:*')
  const third = newId()
  const watcher = await watch(store, third)
  await end(store, third)
  await until(() => watcher.told === 1)
  await grant('resetchannels')
  await until(() => told().length === 2)
})

const message = (id: RecordId) => words('smessage', KEYS.channel(id), '')
const ended = (id: RecordId) => array(bulk('sunsubscribe'), bulk(KEYS.channel(id)), int(0))

async function watched(t: Test, ...ids: RecordId[]) {
  const server = await scripted(t)
  const opened = await open(t, server.url)
  const watchers = []
  for (const id of ids) watchers.push(await watch(opened.store, id))
  return { server, ...opened, watchers }
}

void t.test('what is for no watcher is ignored; nonsense ends the connection and all are told', async (t) => {
  const [a, b] = [newId(), newId()]
  const { server, store, events, watchers } = await watched(t, a, b)
  const [first, second] = watchers
  const told = () => [first?.told, second?.told]
  server.write(message(newId()) + message(a) + message(a))
  await until(() => first?.told === 2)
  t.strictSame(told(), [2, 0])
  t.equal(server.sockets.length, 2)
  for (const [n, nonsense] of ['*1\r\n:1\r\n', OK, array(bulk('ssubscribe'), bulk('x'), int(1))].entries()) {
    server.write(nonsense)
    await until(() => first?.told === 3 + n && second?.told === 1 + n)
  }
  t.equal(server.sockets.length, 5)
  t.strictSame(events, [`connected: ${server.name}`], 'the other connection tells of that server')
  // A slot that has left its server, which ends the subscription: any may be gone.
  server.write(ended(a))
  await until(() => first?.told === 6 && second?.told === 4)
  t.strictSame([server.sockets.length, server.asked.at(-1)], [6, 'ssubscribe'])
  first?.stop()
  await until(() => server.asked.at(-1) === 'sunsubscribe')
  server.write(message(a) + message(b))
  await until(() => second?.told === 5)
  t.strictSame(told(), [6, 5])
  t.ok(await store.ping())
})

void t.test('another answer to a subscription, or to its end, belongs to another command', async (t) => {
  const { server, store, watchers } = await watched(t, newId())
  const [a] = watchers
  const usual = server.says['ssubscribe'] as string
  server.says['ssubscribe'] = OK
  const watching = watch(store)
  await until(() => server.sockets.length >= 3)
  server.says['ssubscribe'] = usual
  const b = await watching
  await until(() => b.told > 0 && (a?.told ?? 0) > 0)
  const { length } = server.sockets
  server.says['sunsubscribe'] = OK
  b.stop()
  await until(() => server.sockets.length > length)
})

void t.test('a subscription without an answer is waited for no longer than a command', async (t) => {
  const clock = frozenClock(t)
  const server = await scripted(t, { ssubscribe: null })
  const { store } = await open(t, server.url, { timeoutMs: 100 })
  let isOver = false
  const watching = watch(store).then((watcher) => {
    isOver = true
    return watcher
  })
  await clock.until(() => server.asked.length === 1)
  await clock.pass(99)
  t.notOk(isOver)
  await clock.pass(1)
  const watcher = await watching
  server.says['ssubscribe'] = ([kind = '', channel = '']) => array(bulk(kind), bulk(channel), int(1))
  await clock.passUntil(() => watcher.told > 0)
  t.equal(server.sockets.length, 3, 'and made on a new connection')
})

void t.test('a watch waits neither for a server that is down nor for one that hangs', async (t) => {
  const clock = frozenClock(t)
  const down = await open(t, `redis://127.0.0.1:${await freePort()}`)
  const watchers = [await watch(down.store), await watch(down.store)]
  watchers[1]?.stop()
  await down.store.close()
  await watch(down.store)
  // TCP is accepted, and the TLS handshake never answered.
  const hanging = createServer(() => {}).listen(0, '127.0.0.1')
  await once(hanging, 'listening')
  t.teardown(() => hanging.close())
  const opening = open(t, `rediss://127.0.0.1:${(hanging.address() as AddressInfo).port}`, {
    timeoutMs: 300,
  })
  await clock.pass(2000)
  const { store } = await opening
  const watching = watch(store)
  await clock.pass(300)
  ;(await watching).stop()
})

void t.test('close ends the connections, and whoever waits for a subscription', async (t) => {
  const { server, store } = await watched(t, newId())
  server.says['ssubscribe'] = null
  const waiting = watch(store)
  await until(() => server.asked.length === 2)
  await store.close()
  await waiting
  await until(() => isLeft(server))
  const late = await watch(store)
  late.stop()
  t.equal(server.sockets.length, 2)
})

void t.test('between two attempts to connect a watch waits for neither', async (t) => {
  const clock = frozenClock(t)
  let isUp = true
  const { url, sockets } = await fake(t, ([name = '', channel = ''], socket) => {
    if (!isUp) socket.destroy()
    if (name === 'ssubscribe') return array(bulk(name), bulk(channel), int(1))
    return name === 'ping' ? '+PONG\r\n' : OK
  })
  const { store } = await open(t, url)
  const early = await watch(store)
  isUp = false
  for (const socket of sockets) socket.destroy()
  await clock.passUntil(() => sockets.length >= 6)
  const late = await watch(store)
  isUp = true
  await clock.passUntil(() => early.told > 0 && late.told > 0)
  t.pass('both are told when it is back')
})
