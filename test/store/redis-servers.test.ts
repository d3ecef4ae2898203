import type { Socket } from 'node:net'
import t, { type Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import type { RedisConnection } from '../../src/store/redis-connection.ts'
import { type Servers, serversOf } from '../../src/store/redis-servers.ts'
import type { RespReply } from '../../src/store/resp.ts'
import { fake, greeting } from '../support/fake-redis.ts'
import { newId, until } from './fixtures.ts'

/* What one server, Sentinels and a cluster have in common and what not, from servers that say what the test wants. */

const PATIENT: Millis = 10_000
const bulk = (text: string) => `$${text.length}\r\n${text}\r\n`
const array = (...words: string[]) => `*${words.length}\r\n${words.map(bulk).join('')}`
const same = (reply: RespReply) => reply

type Says = Record<string, string>

async function serverOf(t: Test, more: Says = {}) {
  const says: Says = {
    role: `*3\r\n${bulk('master')}:0\r\n*0\r\n`,
    info: bulk('run_id:0a\r\n'),
    get: '+here\r\n',
    time: '+now\r\n',
    ...more,
  }
  const asked: string[] = []
  const subscribers: Socket[] = []
  const server = await fake(
    t,
    greeting((command, socket) => {
      const [name = '', first = ''] = command
      asked.push(command.join(' '))
      if (name === 'subscribe' || name === 'ssubscribe') {
        subscribers.push(socket)
        return says[name] ?? `*3\r\n${bulk(name)}${bulk(first)}:1\r\n`
      }
      return says[`${name} ${first}`] ?? says[name] ?? '+OK\r\n'
    }),
  )
  return { says, asked, subscribers, name: `127.0.0.1:${server.port}`, ...server }
}

type Server = Awaited<ReturnType<typeof serverOf>>

function sentinelOf(t: Test, master: { readonly port: number }) {
  return serverOf(t, {
    'sentinel master': array('name', 'pay', 'config-epoch', '1'),
    'sentinel get-master-addr-by-name': array('127.0.0.1', String(master.port)),
    'sentinel replicas': array('one', 'two'),
  })
}

function open(t: Test, url: string, more: { grace?: Millis } = {}) {
  const events: string[] = []
  const counts = { servers: 0 }
  const servers = serversOf(
    { url, timeoutMs: PATIENT, onEvent: (kind, detail) => void events.push(`${kind}: ${detail}`), ...more },
    {
      onServers: () => void counts.servers++,
      shards: [0, 7],
      shardOf: () => 0,
      channelOf: (id) => `c:${id}`,
    },
  )
  t.teardown(() => servers.close())
  return { servers, events, counts }
}

const get = (servers: Servers, key = '{00}') => servers.commands.ask<RespReply>('get', [key], same)
const isLeft = ({ readableEnded, destroyed }: Socket) => readableEnded || destroyed
const subscriptions = ({ asked }: Server) =>
  asked.filter((command) => command.startsWith('ssubscribe')).length

/** Closes them while their servers keep their sides open. */
async function closes(t: Test, servers: Servers, all: readonly Server[]) {
  const sockets = all.flatMap((server) => server.sockets)
  for (const socket of sockets) socket.allowHalfOpen = true
  const began = performance.now()
  await servers.close()
  t.ok(performance.now() - began >= 200, 'close waits for the end')
  await until(() => sockets.every(isLeft))
}

void t.test('one server has all shards, and no replicas that anything promotes', async (t) => {
  const one = await serverOf(t)
  const { servers, events, counts } = open(t, one.url)
  await servers.open()
  t.strictSame([events, counts.servers], [[`connected: ${one.name}`], 1])
  t.strictSame(one.asked, [], 'without a grace, nor its role, nothing is asked for')
  t.equal(servers.isCluster, false)
  t.equal(servers.topology(), null)
  t.equal(await get(servers), 'here')
  t.equal(await servers.askAnyone('time', same), 'now')
  const [part, ...more] = await servers.parts()
  t.strictSame([part?.name, part?.shards, more], ['', [0, 7], []])
  t.strictSame(servers.known(), await servers.parts())
  t.equal(part?.server, servers.commands)
  const view = await servers.view(7)
  t.strictSame([view.id, view.servers.length], ['', 1])
  t.equal(view.servers[0], servers.commands)
  t.equal(await servers.replicasOf(part?.server as RedisConnection), 0)
  await closes(t, servers, [one])
})

void t.test('with a grace, the identity of the server is read', async (t) => {
  const one = await serverOf(t)
  await open(t, one.url, { grace: 5000 }).servers.open()
  t.strictSame(one.asked, ['info server'])
})

void t.test('watchers subscribe again when the server may be another', async (t) => {
  const one = await serverOf(t)
  const { servers, counts } = open(t, one.url)
  await servers.open()
  const id = newId()
  let told = 0
  await servers.watch(id, () => void told++)
  t.strictSame([subscriptions(one), told], [1, 0])
  one.subscribers[0]?.write(array('smessage', `c:${id}`, ''))
  await until(() => told === 1)
  one.sockets[0]?.destroy()
  await until(() => subscriptions(one) === 2)
  t.equal(counts.servers, 2)
  await closes(t, servers, [one])
})

void t.test('a subscription that one server refuses is told: no other has the record', async (t) => {
  const one = await serverOf(t, { ssubscribe: '-NOPERM no\r\n' })
  const { servers, events } = open(t, one.url)
  await servers.open()
  await servers.watch(newId(), () => {})
  t.strictSame(events.slice(1), [
    'error: subscribing is refused, so waiting requests poll the store: Redis refuses: NOPERM no',
  ])
})

void t.test('the master that Sentinels name is the server, and is left for another', async (t) => {
  const [a, b] = [await serverOf(t), await serverOf(t, { get: '+there\r\n' })]
  const sentinel = await sentinelOf(t, a)
  const { servers, events } = open(t, `redis+sentinel://${sentinel.name}/pay`)
  await servers.open()
  t.strictSame(a.asked, ['role'])
  t.equal(await get(servers), 'here')
  t.equal(servers.isCluster, false)
  t.equal(
    servers.topology(),
    `of 1 Sentinels 1 answered; the latest configuration (epoch 1) names ${a.name} as the master "pay"`,
  )
  t.equal(await servers.replicasOf(servers.known()[0]?.server as RedisConnection), 2)
  t.ok(sentinel.asked.includes('sentinel replicas pay'))
  await until(() => sentinel.subscribers.length === 1)
  sentinel.says['sentinel get-master-addr-by-name'] = array('127.0.0.1', String(b.port))
  sentinel.subscribers[0]?.write(
    array('message', '+switch-master', `pay 127.0.0.1 ${a.port} 127.0.0.1 ${b.port}`),
  )
  await until(() => events.includes(`connected: ${b.name}`))
  t.equal(await get(servers), 'there')
  await closes(t, servers, [b, sentinel])
})

void t.test('a name that no Sentinel knows is a mistake, and nothing is asked again', async (t) => {
  const sentinel = await serverOf(t, { sentinel: '-ERR No such master with that name\r\n' })
  sentinel.says['sentinel get-master-addr-by-name'] = '*-1\r\n'
  const { servers } = open(t, `redis+sentinel://${sentinel.name}/pay`)
  await t.rejects(servers.open(), {
    name: 'StoreUnavailable',
    message: /^store.url: no Sentinel of .* knows/,
  })
  const { length } = sentinel.sockets
  // Longer than until the first attempt to reconnect.
  await new Promise((later) => setTimeout(later, 150))
  t.equal(sentinel.sockets.length, length)
  t.notOk(sentinel.asked.some((command) => command.startsWith('subscribe')))
})

void t.test('Sentinels that are down, or a master that is, may come later', async (t) => {
  const down = open(t, 'redis+sentinel://127.0.0.1:1/pay')
  await down.servers.open()
  t.match(down.events, [/^error: no Sentinel names the master "pay"/])
  const sentinel = await sentinelOf(t, { port: 1 })
  const { servers, events } = open(t, `redis+sentinel://${sentinel.name}/pay`)
  await servers.open()
  t.match(events, [/^error: .*ECONNREFUSED/])
  const master = await serverOf(t)
  sentinel.says['sentinel get-master-addr-by-name'] = array('127.0.0.1', String(master.port))
  await until(() => events.includes(`connected: ${master.name}`))
})

void t.test('in a cluster, each master has its shards, and knows its replicas', async (t) => {
  const [a, b] = [await serverOf(t), await serverOf(t, { get: '+there\r\n', time: '+b\r\n' })]
  const range = (first: number, last: number, { port }: Server) =>
    `*3\r\n:${first}\r\n:${last}\r\n*2\r\n${bulk('127.0.0.1')}:${port}\r\n`
  a.says['cluster slots'] = `*2\r\n${range(0, 8191, a)}${range(8192, 16_383, b)}`
  b.says['cluster slots'] = a.says['cluster slots']
  a.says['cluster nodes'] = bulk('x 127.0.0.1:1@1 myself,master - 0 0 1 connected\ny 127.0.0.1:2@2 slave x 0')
  const { servers, counts } = open(t, `redis+cluster://${a.name}`)
  await servers.open()
  t.equal(servers.isCluster, true)
  t.match(servers.topology(), /^2 masters share 256 shards/)
  t.equal(counts.servers, 3, 'a map, and two that are ready')
  t.strictSame([await get(servers), await get(servers, '{02}')], ['there', 'here'])
  t.match(await servers.askAnyone('time', same), /^(now|b)$/)
  const parts = await servers.parts()
  t.strictSame(new Set(parts.map(({ name }) => name)), new Set([a.name, b.name]))
  t.equal(servers.known().length, 2)
  t.equal((await servers.view(0)).servers.length, 1)
  t.equal((await servers.view(null)).servers.length, 2)
  const ofA = parts.find(({ name }) => name === a.name)?.server as RedisConnection
  t.equal(await servers.replicasOf(ofA), 1)

  // The shard of every record is 0 here, and has moved.
  const id: RecordId = newId()
  await servers.watch(id, () => {})
  t.strictSame([subscriptions(a), subscriptions(b)], [0, 1])
  b.says['get'] = `-MOVED 13254 ${a.name}\r\n`
  const before = counts.servers
  t.equal(await get(servers), 'here')
  t.ok(counts.servers > before)
  await until(() => subscriptions(a) === 1)
  b.says['get'] = '+there\r\n'
  await closes(t, servers, [a, b])
})

void t.test('a subscription that a node refuses for another follows the record', async (t) => {
  const [a, b] = [await serverOf(t), await serverOf(t)]
  a.says['cluster slots'] = `*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n${bulk('127.0.0.1')}:${a.port}\r\n`
  b.says['cluster slots'] = a.says['cluster slots']
  a.says['ssubscribe'] = `-MOVED 13254 ${b.name}\r\n`
  const { servers, events } = open(t, `redis+cluster://${a.name}`)
  await servers.open()
  await servers.watch(newId(), () => {})
  await until(() => subscriptions(b) === 1)
  t.notOk(events.some((event) => event.startsWith('error')))
})
