import { setTimeout as wait } from 'node:timers/promises'
import t from 'tap'
import { script } from '../../src/store/redis-connection.ts'
import { Refused } from '../../src/store/redis-link.ts'
import { InGrace, PartlyUnavailable } from '../../src/store/register.ts'
import {
  ask,
  bulk,
  clusterOf,
  halves,
  key,
  LAST,
  nodeOf,
  openCluster,
  same,
  slots,
} from '../support/fake-cluster.ts'
import { until } from './fixtures.ts'

/* Which nodes of a cluster are connected to and asked: before there is a map, while some are down, and after close. */

const NOT_APPLIED = { name: 'StoreUnavailable', maybeApplied: false }
/** Longer than until the map is read again. */
const LATER = 350
const isLeft = ({ readableEnded, destroyed }: { readableEnded: boolean; destroyed: boolean }) =>
  readableEnded || destroyed

void t.test('before it has a map, it refuses commands and says why', async (t) => {
  const { cluster } = clusterOf(t, [{ port: 1 }])
  const opened = cluster.open()
  const refused = { ...NOT_APPLIED, message: 'Redis is not connected: connecting' }
  for (const one of [ask(cluster, 0), cluster.askAnyone('time', [], same)]) await t.rejects(one, refused)
  await opened
  const why = { ...NOT_APPLIED, message: /^Redis is not connected: no node of the cluster answers: 127/ }
  await t.rejects(ask(cluster, 0), why)
  await t.rejects(cluster.parts(), why)
  await t.rejects(cluster.view(null), why)
  await cluster.close()
  await t.rejects(ask(cluster, 0), { ...NOT_APPLIED, message: 'Redis is not connected: closed' })
})

void t.test('an error that only a person can fix closes the cluster', async (t) => {
  const part = await nodeOf(t)
  part.map = slots([1, LAST, part.port])
  const { cluster } = clusterOf(t, [part])
  await t.rejects(cluster.open(), { message: /: 1 of 16384 slots belong to no node;/ })
  await t.rejects(ask(cluster, 0), { ...NOT_APPLIED, message: 'Redis is not connected: closed' })
  await wait(LATER)
  t.equal(part.maps, 1)
})

void t.test('a cluster that was closed meanwhile takes no map, and reads none', async (t) => {
  const node = await nodeOf(t)
  node.map = null
  const { cluster, counts } = clusterOf(t, [node])
  const opened = cluster.open()
  await until(() => node.maps === 1)
  await cluster.close()
  node.sockets[0]?.write(slots([0, LAST, node.port]))
  await opened
  t.strictSame([cluster.known(), counts], [[], { ready: 0, maps: 0 }])
  t.equal(node.sockets.length, 1)

  const failing = await openCluster(t, [node, { port: 1 }], { timeoutMs: 50 })
  t.equal(node.maps, 2)
  await failing.cluster.close()
  const [a, b] = await halves(t)
  const { cluster: whole } = await openCluster(t, [a])
  for (const socket of [...a.sockets, ...b.sockets]) socket.allowHalfOpen = true
  const began = performance.now()
  await whole.close()
  t.ok(performance.now() - began >= 200, 'close waits for the end of each connection')
  await until(() => [...a.sockets, ...b.sockets].every(isLeft))
  const connections = [a, b].map(({ sockets }) => sockets.length)
  // Longer than the pause after a failure.
  await wait(2 * LATER)
  t.equal(node.maps, 2)
  t.strictSame(
    [a, b].map(({ sockets }) => sockets.length),
    connections,
  )
})

void t.test('every node is greeted as the URL says, and its errors have its name', async (t) => {
  const [a, b] = await halves(t)
  b.ping = '-LOADING data\r\n'
  const { events } = await openCluster(t, [a], { server: { username: 'app', password: 'secret' } })
  for (const { asked } of [a, b]) t.equal(asked[0], 'auth app secret')
  t.strictSame(events.toSorted(), [`connected: ${a.name}`, `error: ${b.name}: Redis refuses: LOADING data`])
})

void t.test('if the only master is down, a command for any node says so', async (t) => {
  const node = await nodeOf(t)
  node.map = slots([0, LAST, node.port])
  const { cluster, events } = await openCluster(t, [node])
  node.ping = '-LOADING data\r\n'
  for (const socket of node.sockets) socket.destroy()
  await until(() => events.includes(`error: ${node.name}: Redis refuses: LOADING data`))
  await t.rejects(cluster.askAnyone('time', [], same), {
    ...NOT_APPLIED,
    message: 'Redis is not connected: Redis refuses: LOADING data',
  })
})

void t.test('a master that was unknown is connected to before it is asked', async (t) => {
  const [a, b] = await halves(t)
  const fresh = await nodeOf(t, () => '+fresh\r\n')
  const { cluster, counts } = await openCluster(t, [a])
  fresh.map = a.map
  a.answer = () => `-MOVED 933 localhost:${fresh.port}\r\n`
  t.strictSame(await Promise.all([ask(cluster, 3), ask(cluster, 3)]), ['fresh', 'fresh'])
  t.equal(counts.maps, 2, 'both are told of one move')
  t.ok(
    cluster.known().some(({ name }) => name === `localhost:${fresh.port}`),
    'where it was said to be',
  )
  a.map = slots([0, 8191, a.port], [8192, 9999, fresh.port], [10_000, LAST, b.port])
  b.map = a.map
  fresh.map = a.map
  const { servers } = await cluster.view(null)
  t.equal(servers.length, 3)
  t.ok(servers.every(({ isReady }) => isReady))
})

void t.test('a script that has moved is known to its new master, or sent again', async (t) => {
  const [a, b] = await halves(t)
  const { cluster } = await openCluster(t, [a])
  const get = script('get')
  a.answer = () => `-MOVED 933 ${b.name}\r\n`
  b.answer = (command) => `*2\r\n:7\r\n:${command.at(-1)}\r\n`
  t.strictSame(await cluster.run(get, [1, key(3)], same), [7])
  t.strictSame(
    b.asked.map((command) => command.split(' ').filter((_, n) => n !== 1)),
    [['evalsha', '1', key(3), '1']],
    'with its own number alone',
  )
})

void t.test('a command takes no longer than its time, however late it is redirected', async (t) => {
  const [a, b] = await halves(t)
  const { cluster } = await openCluster(t, [a], { timeoutMs: 200 })
  a.answer = () => {
    setTimeout(() => {
      for (const socket of a.sockets) socket.write(`-MOVED 933 ${b.name}\r\n`)
    }, 150)
    return null
  }
  b.answer = () => null
  const order: string[] = []
  const asked = ask(cluster, 3).catch(() => void order.push('timed out'))
  // Before the time of a command that begins with the redirection.
  await Promise.all([asked, wait(275).then(() => void order.push('275 ms'))])
  t.strictSame(order, ['timed out', '275 ms'])
})

void t.test('a view names the master of the last slot of a range', async (t) => {
  const [a, b] = await halves(t)
  const { cluster } = await openCluster(t, [a])
  a.map = slots([0, 933, a.port], [934, LAST, b.port])
  b.map = a.map
  const { servers } = await cluster.view(3)
  t.strictSame(
    servers.map(({ leadsTo }) => leadsTo),
    [a.name],
  )
})

void t.test('a master that declines is not down', async (t) => {
  const [a] = await halves(t)
  const { cluster } = await openCluster(t, [a])
  const declined = new InGrace(1, 1, 1)
  await t.rejects(
    cluster.ask('get', [key(3)], () => {
      throw declined
    }),
    declined,
  )
  const error = await cluster
    .ask('get', [key(3)], () => {
      throw declined
    })
    .catch((error: unknown) => error)
  t.equal(error, declined)
  t.notOk(error instanceof PartlyUnavailable)
})

void t.test('only a node that says that the cluster is down makes it read the map', async (t) => {
  const [a, b] = await halves(t)
  // Shorter than until later: nothing is left of a refused command that could time out.
  const { cluster, counts } = await openCluster(t, [a], { timeoutMs: 200 })
  const maps = () => a.maps + b.maps
  const before = maps()
  const refused = async (reply: string) => {
    a.answer = () => `-${reply}\r\n`
    await t.rejects(ask(cluster, 3), { ...NOT_APPLIED, message: `Redis refuses: ${reply}` })
  }
  await refused('ERR CLUSTERDOWN')
  t.equal(cluster.isMoved(new Refused('NOPERM CLUSTERDOWN'), 3), false)
  await wait(LATER)
  t.equal(maps(), before)
  await refused('CLUSTERDOWN The cluster is down')
  await until(() => maps() === before + 1)
  // The map is the same.
  await until(() => counts.maps === 2)
  t.equal(cluster.isMoved(new Refused('CLUSTERDOWN The cluster is down'), 3), true)
  await until(() => maps() === before + 2)
  for (let n = 0; n < 3; n++) await cluster.parts()
  t.equal(counts.maps, 3, 'a map that is the same is told of only where it was read for a reason')
  a.map = slots([0, 932, a.port], [933, 933, b.port], [934, 8191, a.port], [8192, LAST, b.port])
  b.map = a.map
  await cluster.parts()
  t.equal(counts.maps, 4, 'and one in which a single shard has moved')
})

void t.test('the map is read again and again until every master is connected', async (t) => {
  const [a, b] = await halves(t)
  const { cluster, events } = await openCluster(t, [a])
  // It accepts connections, and does not answer.
  b.ping = null
  const before = a.maps
  events.length = 0
  for (const socket of b.sockets) socket.destroy()
  await until(() => a.maps >= before + 3)
  t.strictSame(events, [`disconnected: ${b.name}`], 'from those that are')
  t.ok(cluster.known().some(({ server }) => !server.isReady))
})

void t.test(
  'if no master answers, its replicas and others that were known are asked for the map',
  async (t) => {
    const [a, b, replica] = [await nodeOf(t), await nodeOf(t), await nodeOf(t)]
    a.map = slots([0, 8191, a.port, replica.port], [8192, LAST, b.port])
    const { cluster, events } = await openCluster(t, [a])
    t.strictSame([b.maps, replica.maps], [0, 0])
    replica.map = slots([0, 8191, replica.port], [8192, LAST, replica.port])
    for (const node of [a, b]) {
      node.ping = '-LOADING\r\n'
      for (const socket of node.sockets) socket.destroy()
    }
    await until(() => events.includes(`connected: ${replica.name}`))
    t.strictSame(
      cluster.known().map(({ name }) => name),
      [replica.name],
    )
    t.equal(await ask(cluster, 3), 'OK')
  },
)

void t.test('a master that has no slots any more is left, and connected to again when it has', async (t) => {
  const [a, b] = await halves(t)
  const { cluster } = await openCluster(t, [a])
  const both = a.map
  a.map = slots([0, LAST, a.port])
  b.map = a.map
  t.equal((await cluster.parts()).length, 1)
  await until(() => b.sockets.every(isLeft))
  t.equal((await cluster.view(null)).servers.length, 1)
  a.map = both
  b.map = both
  t.equal((await cluster.parts()).length, 2)
  await until(() => cluster.known().every(({ server }) => server.isReady))
  t.equal(await ask(cluster, 0), 'OK')
})

void t.test('ranges may come in any order, and leave out what a node does not know', async (t) => {
  const [a, b] = await halves(t)
  a.map = slots([8192, LAST, b.port], [0, 8191, a.port])
  const { cluster } = await openCluster(t, [a])
  const shards = async () =>
    Object.fromEntries((await cluster.parts()).map(({ name, shards }) => [name, shards.length]))
  t.strictSame(await shards(), { [a.name]: 130, [b.name]: 126 })
  a.map = slots([0, 8191, b.port])
  b.map = a.map
  t.strictSame(await shards(), { [b.name]: 256 }, 'the rest is where it was')
})

void t.test('a node is where the map says', async (t) => {
  const node = await nodeOf(t)
  node.map = slots([0, LAST, node.port]).replace(bulk('127.0.0.1'), bulk('localhost'))
  const { cluster } = await openCluster(t, [node])
  t.strictSame(
    cluster.known().map(({ name }) => name),
    [`localhost:${node.port}`],
  )
})

void t.test('a shard is in the first braces of a key', async (t) => {
  const [a, b] = await halves(t)
  const { cluster } = await openCluster(t, [a])
  await cluster.ask('get', ['own:{02}:{00}'], same)
  t.strictSame([a.asked.length, b.asked.length], [1, 0])
})
