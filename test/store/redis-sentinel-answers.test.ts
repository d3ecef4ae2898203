import type { Socket } from 'node:net'
import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { Sentinels } from '../../src/store/redis-sentinel.ts'
import { fake, greeting } from '../support/fake-redis.ts'
import { until } from './fixtures.ts'

/* What Sentinels may answer, from servers that say what the test wants. Real ones: redis-sentinel.test.ts. */

const PATIENT: Millis = 10_000
const SERVER = { username: 'u', password: 'p', db: 3 }

const bulk = (text: string) => `$${text.length}\r\n${text}\r\n`
const array = (...words: string[]) => `*${words.length}\r\n${words.map(bulk).join('')}`
const master = (epoch: number) => array('name', 'pay', 'config-epoch', String(epoch))
const at = (port: number) => array('10.0.0.1', String(port))
const UNKNOWN = { master: '-ERR No such master with that name\r\n', place: '*-1\r\n' }

interface Says {
  master: string | null
  place: string | null
  replicas: string
  subscribed: string
}

/** A Sentinel that knows the master at `port` since failover `epoch`, unless told otherwise. */
async function sentinelAt(t: Test, epoch: number, port: number, more: Partial<Says> = {}) {
  const says: Says = {
    master: master(epoch),
    place: at(port),
    replicas: array(),
    subscribed: `*3\r\n${bulk('subscribe')}${bulk('+switch-master')}:1\r\n`,
    ...more,
  }
  const asked: string[] = []
  const subscribers: Socket[] = []
  const server = await fake(
    t,
    greeting((command, socket) => {
      asked.push(command.join(' '))
      if (command[0] === 'subscribe') {
        subscribers.push(socket)
        return says.subscribed
      }
      if (command[1] === 'master') return says.master
      return command[1] === 'replicas' ? says.replicas : says.place
    }),
  )
  const tell = (...words: string[]) => {
    for (const socket of subscribers) socket.write(array(...words))
  }
  return { says, asked, subscribers, tell, ...server }
}

function sentinelsOf(t: Test, servers: readonly { readonly port: number }[], timeoutMs = PATIENT) {
  const sentinels = servers.map(({ port }) => ({
    host: '127.0.0.1',
    port,
    username: '',
    password: '',
    db: 0,
  }))
  const found = new Sentinels({ kind: 'sentinel', sentinels, master: 'pay', server: SERVER }, timeoutMs)
  t.teardown(() => found.close())
  return found
}

/** The connection that follows the master. */
function followerAt(leadsTo: string) {
  const follower = {
    leadsTo,
    reconnects: 0,
    reconnect: () => {
      follower.reconnects++
    },
  }
  return follower
}

void t.test('the latest configuration names the master', async (t) => {
  const answers = [1, 30, 4].map((epoch) => sentinelAt(t, epoch, 7000 + epoch))
  const servers = await Promise.all(answers)
  const found = sentinelsOf(t, servers)
  t.equal(found.isMaster, true)
  t.strictSame(await found.find(), { host: '10.0.0.1', port: 7030, ...SERVER })
  t.equal(
    found.topology(),
    'of 3 Sentinels 3 answered; the latest configuration (epoch 30) names 10.0.0.1:7030 as the master "pay"',
  )
  t.strictSame(servers[0]?.asked, ['sentinel master pay', 'sentinel get-master-addr-by-name pay'])
  t.equal(found.misconfigured, null)
})

void t.test('others are waited for a little, whether they are late, silent or down', async (t) => {
  const first = await sentinelAt(t, 1, 7001)
  const late = await sentinelAt(t, 2, 7002)
  const silent = await sentinelAt(t, 3, 7003, { place: null })
  const found = sentinelsOf(t, [first, late, silent, { port: 1 }])
  const place = late.says.place as string
  late.says.place = null
  setTimeout(() => {
    for (const socket of late.sockets) socket.write(place)
  }, 120)
  const began = performance.now()
  t.equal((await found.find()).port, 7002)
  const took = performance.now() - began
  t.ok(took >= 240 && took < 2000, `after ${took} ms`)
  t.match(found.topology(), /^of 4 Sentinels 2 answered; the latest configuration \(epoch 2\)/)
})

void t.test('if all have answered, nobody is waited for', async (t) => {
  const found = sentinelsOf(t, [await sentinelAt(t, 1, 7001), await sentinelAt(t, 1, 7001)])
  const began = performance.now()
  await found.find()
  t.ok(performance.now() - began < 200)
})

void t.test('only a name that nobody knows, or servers of another kind, are a mistake', async (t) => {
  const unknown = await sentinelAt(t, 1, 7001, UNKNOWN)
  const half = await sentinelAt(t, 1, 7001, { place: UNKNOWN.place })
  const other = await sentinelAt(t, 1, 7001, { master: UNKNOWN.master })
  const redis = "-ERR unknown command 'sentinel', with args\r\n"
  const plain = await sentinelAt(t, 1, 7001, { master: redis, place: redis })
  const refuses = await sentinelAt(t, 1, 7001, { master: '-NOPERM no\r\n', place: '-NOPERM no\r\n' })
  const known = await sentinelAt(t, 1, 7001)
  for (const servers of [[unknown], [half], [other], [unknown, half, other]]) {
    const found = sentinelsOf(t, servers)
    const message = /^store.url: no Sentinel of 127.0.0.1:\d+.* knows the master "pay"; allowed: a name/
    await t.rejects(found.find(), { message, maybeApplied: false })
    t.match(found.misconfigured, { message })
  }
  await t.rejects(sentinelsOf(t, [unknown, half]).find(), {
    message: `store.url: no Sentinel of 127.0.0.1:${unknown.port}, 127.0.0.1:${half.port} knows the master "pay"; allowed: a name listed by SENTINEL MASTERS`,
  })
  const alone = sentinelsOf(t, [plain])
  const message = /^store.url: no Sentinel at 127.0.0.1:\d+, but a Redis; allowed: the addresses/
  await t.rejects(alone.find(), { message, maybeApplied: false })
  t.match(alone.misconfigured, { message })
  for (const servers of [
    [refuses],
    [{ port: 1 }],
    [unknown, { port: 1 }],
    [plain, { port: 1 }],
    [plain, unknown],
  ]) {
    const found = sentinelsOf(t, servers)
    await t.rejects(found.find(), {
      name: 'StoreUnavailable',
      maybeApplied: false,
      message: /^no Sentinel names the master "pay": 127.0.0.1:\d+: /,
    })
    t.equal(found.misconfigured, null)
  }
  const some = sentinelsOf(t, [unknown, plain, known])
  t.equal((await some.find()).port, 7001)
})

void t.test('a malformed answer names no master', async (t) => {
  const malformed: Partial<Says>[] = [
    { master: array('config-epoch', '1', 'more') },
    { master: array('config-epoch', 'x') },
    { master: '+OK\r\n' },
    { master: array('name', 'pay') },
    { place: '+OK\r\n' },
    { place: array('10.0.0.1') },
    { place: array('', '7001') },
  ]
  for (const more of malformed) {
    const found = sentinelsOf(t, [await sentinelAt(t, 1, 7001, more)])
    await t.rejects(found.find(), { name: 'StoreUnavailable', message: /replies do not match/ })
  }
})

void t.test('replicas are counted by the Sentinel that knows most of them', async (t) => {
  const servers = await Promise.all(
    [array('one'), array('one', 'two'), array()].map((replicas) => sentinelAt(t, 1, 7001, { replicas })),
  )
  t.equal(await sentinelsOf(t, servers).replicas(), 2)
  t.ok(servers[0]?.asked.includes('sentinel replicas pay'))
  const wrong = await sentinelAt(t, 1, 7001, { replicas: '+OK\r\n' })
  await t.rejects(sentinelsOf(t, [wrong]).replicas(), { message: /replies do not match/ })
})

void t.test('an announced switch of its master is followed', async (t) => {
  const server = await sentinelAt(t, 1, 7001)
  const found = sentinelsOf(t, [server])
  await found.find()
  const follower = followerAt('10.0.0.1:7001')
  found.watch(follower)
  await until(() => server.subscribers.length === 1 && server.asked.length === 5)
  t.ok(server.asked.includes('subscribe +switch-master'))
  server.tell('message', '+switch-master', 'other 10.0.0.1 7001 10.0.0.9 7009')
  server.tell('message', '+switch-master', 'pay 10.0.0.9 7009 10.0.0.1 7001')
  server.tell('pong', '+switch-master', 'pay 10.0.0.1 7001 10.0.0.9 7009')
  await wait(50)
  t.equal(follower.reconnects, 0, 'not another master’s, one that has happened, or another message')
  // The last of these is no message, so that its connection has ended.
  await until(() => server.subscribers.length === 2)
  server.subscribers.shift()
  await until(() => server.asked.length === 8)
  server.tell('message', '+switch-master', 'pay 10.0.0.1 7001 10.0.0.1 7002')
  await until(() => follower.reconnects === 1)
  server.tell('message', '+switch-master', 'pay 10.0.0.1 7001 10.0.0.2 7001')
  await until(() => follower.reconnects === 2)
})

void t.test('a switch that was missed is followed, and an old one is not', async (t) => {
  const [old, fresh] = [await sentinelAt(t, 3, 7003), await sentinelAt(t, 4, 7004)]
  const found = sentinelsOf(t, [old, fresh])
  t.equal((await found.find()).port, 7004)
  const follower = followerAt('10.0.0.1:7004')
  found.watch(follower)
  // For an answer it connects once more, and leaves when it has it.
  await until(() => [old, fresh].every(({ sockets }) => sockets[2]?.readableEnded || sockets[2]?.destroyed))
  await wait(30)
  t.equal(follower.reconnects, 0)
  for (const server of [old, fresh]) {
    const before = server.asked.length
    server.says.master = master(5)
    server.says.place = at(7005)
    const reconnects = follower.reconnects
    for (const socket of server.subscribers.splice(0)) socket.destroy()
    await until(() => server.asked.length === before + 3)
    await until(() => follower.reconnects === reconnects + 1)
  }
})

void t.test('a Sentinel that has seen no failover yet is followed, too', async (t) => {
  const server = await sentinelAt(t, 0, 7001)
  const found = sentinelsOf(t, [server])
  const follower = followerAt('10.0.0.1:7000')
  found.watch(follower)
  await until(() => follower.reconnects === 1)
})

void t.test('another answer than that to a subscription begins none', async (t) => {
  const server = await sentinelAt(t, 1, 7001, { subscribed: '+OK\r\n' })
  const found = sentinelsOf(t, [server])
  const follower = followerAt('10.0.0.1:1')
  found.watch(follower)
  await until(() => server.subscribers.length === 2)
  t.ok(server.asked.every((command) => command === 'subscribe +switch-master'))
  t.equal(follower.reconnects, 0)
})

void t.test('a switch announced while it asks makes it ask again', async (t) => {
  const server = await sentinelAt(t, 1, 7001)
  const found = sentinelsOf(t, [server])
  found.watch(followerAt('10.0.0.1:7001'))
  await until(() => server.asked.length === 3)
  await wait(30)
  server.says.place = null
  const finding = found.find()
  await until(() => server.asked.length === 5)
  server.tell('message', '+switch-master', 'pay 10.0.0.1 7001 10.0.0.1 7002')
  await wait(30)
  server.says.place = at(7002)
  for (const socket of server.sockets) if (!server.subscribers.includes(socket)) socket.write(at(7001))
  t.equal((await finding).port, 7002)
})

void t.test('without subscriptions it asks nothing more, and close ends them', async (t) => {
  const server = await sentinelAt(t, 1, 7001, { subscribed: '-NOPERM no\r\n' })
  const found = sentinelsOf(t, [server])
  const follower = followerAt('10.0.0.1:1')
  found.watch(follower)
  await until(() => server.subscribers.length === 1)
  await wait(30)
  t.equal(follower.reconnects, 0)
  t.strictSame(server.asked, ['subscribe +switch-master'])
  // It keeps its side open.
  for (const socket of server.sockets) socket.allowHalfOpen = true
  const began = performance.now()
  await found.close()
  t.ok(performance.now() - began >= 200, 'close waits for them')
  await until(() => server.sockets.every(({ destroyed, readableEnded }) => destroyed || readableEnded))
  const connections = server.sockets.length
  await wait(120)
  t.equal(server.sockets.length, connections)
})
