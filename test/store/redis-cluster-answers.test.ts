import { setTimeout as wait } from 'node:timers/promises'
import t from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { replicasIn } from '../../src/store/redis-cluster.ts'
import { script } from '../../src/store/redis-connection.ts'
import { Refused } from '../../src/store/redis-link.ts'
import { PartlyUnavailable } from '../../src/store/register.ts'
import type { RespReply } from '../../src/store/resp.ts'
import {
  type Answer,
  ask,
  bulk,
  halves,
  key,
  LAST,
  nodeOf,
  openCluster as open,
  same,
  slots,
} from '../support/fake-cluster.ts'
import { fake } from '../support/fake-redis.ts'
import { until } from './fixtures.ts'

/* What the nodes of a cluster may answer, from some that say what the test wants. Real ones: redis-cluster.test.ts. */

const FAST: Millis = 100
const NOT_APPLIED = { name: 'StoreUnavailable', maybeApplied: false }

void t.test('each shard belongs to the master of its slot', async (t) => {
  const [a, b] = await halves(t)
  const { cluster, events, counts } = await open(t, [a])
  t.equal(counts.maps, 1)
  t.equal(counts.ready, 2)
  t.strictSame(events.toSorted(), [`connected: ${a.name}`, `connected: ${b.name}`].toSorted())
  const parts = Object.fromEntries(cluster.known().map(({ name, shards }) => [name, shards]))
  t.equal(parts[a.name]?.length, 130)
  t.equal(parts[b.name]?.length, 126)
  t.strictSame(parts[a.name]?.slice(0, 4), [2, 3, 6, 7])
  t.ok(cluster.known().every(({ server }) => server.isReady))
  for (const shard of [0, 1, 2, 3]) await ask(cluster, shard)
  const get = script('get')
  a.answer = b.answer = (command) => `*1\r\n:${command.at(-1)}\r\n`
  await cluster.run(get, [1, key(0)], same)
  await cluster.run(get, [1, key(255)], same)
  t.strictSame(a.asked, [`get ${key(2)}`, `get ${key(3)}`])
  t.strictSame(b.asked.slice(0, 2), [`get ${key(0)}`, `get ${key(1)}`])
  t.strictSame(
    b.asked.slice(2).map((command) => command.split(' ')[3]),
    [key(0), key(255)],
  )
  t.match(
    cluster.topology(),
    /^2 masters share 256 shards of records: 127.0.0.1:\d+ has 1\d\d, 127.0.0.1:\d+ has 1\d\d; the largest share is 1.02 times the mean$/,
  )
  t.not(cluster.targetOf(0), cluster.targetOf(2))
  t.equal(cluster.targetOf(0), cluster.targetOf(1))
})

void t.test('ranges contain their ends', async (t) => {
  const [a, b] = [await nodeOf(t), await nodeOf(t)]
  a.map = slots([0, 91, b.port], [92, 92, a.port], [93, 16_261, b.port], [16_262, LAST, a.port])
  const { cluster } = await open(t, [a])
  const parts = Object.fromEntries(cluster.known().map(({ name, shards }) => [name, shards]))
  t.strictSame(parts[a.name], [68, 143])
})

void t.test('a slot that has moved is asked for where it is, and the map is read again', async (t) => {
  const [a, b] = await halves(t)
  const { cluster, counts } = await open(t, [a])
  a.answer = ([name]) => (name === 'get' ? `-MOVED 933 127.0.0.1:${b.port}\r\n` : '+OK\r\n')
  b.answer = () => '+here\r\n'
  const before = cluster.targetOf(3)
  const [maps] = [a.maps + b.maps]
  t.equal(await ask(cluster, 3), 'here')
  t.equal(counts.maps, 2)
  t.not(cluster.targetOf(3), before)
  t.equal(cluster.targetOf(3), cluster.targetOf(0))
  t.equal(cluster.targetOf(2), before, 'the others are where they were')
  t.equal(await ask(cluster, 3), 'here')
  t.equal(a.asked.length, 1, 'it is not asked again')
  a.map = slots([0, LAST, b.port])
  b.map = a.map
  await until(() => a.maps + b.maps > maps)
  await until(() => counts.maps >= 3)
  t.equal(cluster.targetOf(2), cluster.targetOf(0))
  await until(() => a.sockets.every(({ readableEnded, destroyed }) => readableEnded || destroyed))
  t.equal(cluster.known().length, 1, 'a master without shards is left')
})

void t.test('a slot that is moving is asked for with permission, and stays in the map', async (t) => {
  const [a, b] = await halves(t)
  const { cluster, counts } = await open(t, [a])
  const get = script('get')
  a.answer = () => `-ASK 933 127.0.0.1:${b.port}\r\n`
  b.answer = (command) => (command[0] === 'eval' ? `*2\r\n:7\r\n:${command.at(-1)}\r\n` : '+OK\r\n')
  t.strictSame(await cluster.run(get, [1, key(3)], same), [7])
  t.equal(b.asked[0], 'asking')
  t.equal(b.asked[1], `eval ${get.source} 1 ${key(3)} 1`, 'whole, with its own number alone')
  t.equal(await ask(cluster, 3), 'OK')
  t.strictSame(b.asked.slice(2), ['asking', `get ${key(3)}`])
  t.equal(counts.maps, 1)
  t.not(cluster.targetOf(3), cluster.targetOf(0))
})

void t.test('a node that omits its name is at the host that was asked', async (t) => {
  const node = await nodeOf(t)
  for (const host of ['$-1\r\n', bulk(''), bulk('?')]) {
    node.map = `*1\r\n*3\r\n:0\r\n:${LAST}\r\n*2\r\n${host}:${node.port}\r\n`
    const { cluster } = await open(t, [node])
    t.strictSame(
      cluster.known().map(({ name }) => name),
      [node.name],
    )
    for (const empty of ['', '?']) {
      let asked = 0
      node.answer = () => (asked++ === 0 ? `-MOVED 933 ${empty}:${node.port}\r\n` : '+here\r\n')
      t.equal(await ask(cluster, 3), 'here')
    }
  }
})

void t.test('a command is redirected three times', async (t) => {
  const [a, b] = await halves(t)
  const { cluster } = await open(t, [a])
  let left = 3
  const redirect: Answer = ([name]) => {
    if (name === 'asking') return '+OK\r\n'
    return left-- > 0 ? `-ASK 933 127.0.0.1:${left % 2 ? a.port : b.port}\r\n` : '+here\r\n'
  }
  a.answer = redirect
  b.answer = redirect
  const times = () => [...a.asked, ...b.asked].filter((command) => command !== 'asking').length
  t.equal(await ask(cluster, 3), 'here')
  t.equal(times(), 4)
  left = 4
  await t.rejects(ask(cluster, 3), { ...NOT_APPLIED, message: /Redis refuses: ASK 933/ })
})

void t.test('a command takes no longer than its time where it is redirected to', async (t) => {
  const [a, b] = await halves(t)
  const { cluster } = await open(t, [a], { timeoutMs: FAST })
  a.answer = () => `-MOVED 933 127.0.0.1:${b.port}\r\n`
  b.answer = () => null
  const began = performance.now()
  await t.rejects(ask(cluster, 3), { name: 'StoreUnavailable', maybeApplied: true, message: /timed out/ })
  const took = performance.now() - began
  t.ok(took >= FAST - 2 && took < 10 * FAST, `after ${took} ms`)
  // Nothing is sent to a port that accepts, and does not greet.
  const silent = await fake(t, () => null)
  const [c] = await halves(t)
  c.answer = () => `-MOVED 933 127.0.0.1:${silent.port}\r\n`
  await t.rejects(ask((await open(t, [c], { timeoutMs: FAST })).cluster, 3), NOT_APPLIED)
})

void t.test('other errors are as they are, partly unavailable where another master is up', async (t) => {
  const [a, b] = await halves(t)
  const { cluster } = await open(t, [a])
  a.answer = () => '-TRYAGAIN\r\n'
  const error = await ask(cluster, 3).catch((error: unknown) => error)
  t.ok(error instanceof PartlyUnavailable)
  t.match(error, { ...NOT_APPLIED, message: 'Redis refuses: TRYAGAIN' })
  a.answer = () => '-OOM full\r\n'
  await t.rejects(ask(cluster, 3), { name: 'StoreFull' })
  a.answer = () => '-WRONGTYPE\r\n'
  await t.rejects(ask(cluster, 3), { name: 'CorruptRecord' })
  await t.rejects(
    cluster.ask('get', [key(0)], () => {
      throw new TypeError('bug')
    }),
    { name: 'TypeError' },
  )
  a.answer = () => '-TRYAGAIN\r\n'
  const alone = await nodeOf(t, () => '-TRYAGAIN\r\n')
  alone.map = slots([0, LAST, alone.port])
  const single = await open(t, [alone])
  const refused = await ask(single.cluster, 3).catch((error: unknown) => error)
  t.match(refused, { ...NOT_APPLIED, message: 'Redis refuses: TRYAGAIN' })
  t.notOk(refused instanceof PartlyUnavailable)
  b.answer = () => '+up\r\n'
  t.equal(await ask(cluster, 0), 'up')
})

void t.test('anybody is a master that is ready', async (t) => {
  const [a, b] = await halves(t)
  const { cluster } = await open(t, [a])
  a.answer = () => '+a\r\n'
  b.answer = () => '+b\r\n'
  const anyone = () => cluster.askAnyone<RespReply>('time', [], same)
  t.match(await anyone(), /^[ab]$/)
  for (const node of [a, b]) {
    const other = node === a ? b : a
    node.answer = () => null
    for (const socket of node.sockets) socket.destroy()
    await until(() => cluster.known().some(({ server, name }) => name === node.name && !server.isReady))
    t.equal(await anyone(), other === a ? 'a' : 'b')
    node.answer = () => (node === a ? '+a\r\n' : '+b\r\n')
    await until(() => cluster.known().every(({ server }) => server.isReady))
  }
})

void t.test('parts are read freshly, from one master after the other', async (t) => {
  const [a, b] = await halves(t)
  const { cluster } = await open(t, [a])
  const before = [a.maps, b.maps]
  for (let n = 0; n < 4; n++) t.equal((await cluster.parts()).length, 2)
  t.strictSame([a.maps - (before[0] as number), b.maps - (before[1] as number)], [2, 2])
  await Promise.all([cluster.parts(), cluster.parts()])
  t.equal(
    a.maps + b.maps,
    (before[0] as number) + (before[1] as number) + 5,
    'simultaneous ones share a look',
  )
  a.map = b.map = slots([0, LAST, a.port, b.port])
  t.strictSame(
    (await cluster.parts()).map(({ name }) => name),
    [a.name],
    'a replica has no part',
  )
  a.map = '*0\r\n'
  t.equal((await cluster.parts()).length, 1, 'an empty map says nothing')
})

void t.test('a view has every master that some master names', async (t) => {
  const [a, b] = await halves(t)
  const { cluster } = await open(t, [a])
  const names = async (shard: number | null) => {
    const { servers } = await cluster.view(shard)
    return servers.map(({ leadsTo }) => leadsTo)
  }
  const both = [a.name, b.name].toSorted()
  const { id } = await cluster.view(null)
  t.match(id, /^[0-9a-f]{8}$/)
  t.strictSame(await names(null), both)
  t.strictSame(await names(3), [a.name])
  t.strictSame(await names(0), [b.name])
  t.equal((await cluster.view(0)).id, id)
  b.map = slots([0, 932, a.port], [933, LAST, b.port])
  t.strictSame(await names(3), both, 'one of them knows more')
  t.strictSame(await names(0), [b.name])
  t.not((await cluster.view(null)).id, id)
  b.map = slots([0, 933, a.port], [934, LAST, b.port])
  t.strictSame(await names(3), [a.name])
  a.map = b.map = '*0\r\n'
  await t.rejects(cluster.view(null), { ...NOT_APPLIED, message: /^Redis is not connected/ })
})

void t.test('only servers that are no whole cluster are a mistake', async (t) => {
  const [plain, part] = [await nodeOf(t), await nodeOf(t)]
  plain.map = '-ERR This instance has cluster support disabled\r\n'
  part.map = slots([0, 99, part.port], [200, LAST, part.port])
  const mistake = {
    ...NOT_APPLIED,
    message: /^store.url: 127.0.0.1:\d+: .*; allowed: nodes of a cluster that covers all slots$/,
  }
  await t.rejects(open(t, [plain]), { ...mistake, message: /cluster support disabled/ })
  await t.rejects(open(t, [part]), { ...mistake, message: /: 100 of 16384 slots belong to no node;/ })
  await t.rejects(open(t, [plain, part]), mistake)
  const down = await open(t, [part, { port: 1 }])
  t.match(down.events, [/^error: no node of the cluster answers: .*100 of 16384/])
  const [a] = await halves(t)
  const { cluster } = await open(t, [plain, part, a])
  t.equal(cluster.known().length, 2)
})

void t.test('a malformed map is refused', async (t) => {
  for (const map of [
    '+OK\r\n',
    '*1\r\n:1\r\n',
    '*1\r\n*2\r\n:0\r\n:1\r\n',
    '*1\r\n*3\r\n+0\r\n:1\r\n*2\r\n$1\r\nh\r\n:1\r\n',
    '*1\r\n*3\r\n:0\r\n+1\r\n*2\r\n$1\r\nh\r\n:1\r\n',
    '*1\r\n*3\r\n:0\r\n:1\r\n:1\r\n',
    `*1\r\n*3\r\n:0\r\n:${LAST}\r\n$2\r\nab\r\n`,
    '*1\r\n*3\r\n:0\r\n:1\r\n*1\r\n$1\r\nh\r\n',
  ]) {
    const node = await nodeOf(t)
    node.map = map
    const { events } = await open(t, [node])
    t.match(events, [/no node of the cluster answers: .*replies do not match/], map)
  }
})

void t.test('replicas are counted by the master itself', async (t) => {
  const nodes = [
    'a 10.0.0.1:1@1 myself,master - 0 0 1 connected 0-16383',
    'b 10.0.0.2:1@1 slave a 0 0 1 connected',
    'c 10.0.0.3:1@1 slave,fail a 0 0 1 disconnected',
    'd 10.0.0.4:1@1 slave e 0 0 1 connected',
    'e 10.0.0.5:1@1 master - 0 0 1 connected',
  ]
  t.equal(replicasIn(Buffer.from(nodes.join('\n'))), 2)
  t.equal(replicasIn(Buffer.from(`${nodes[4]}\n${nodes[0]}\n`)), 0)
  for (const wrong of ['OK', Buffer.from(nodes.slice(1).join('\n'))])
    t.throws(() => replicasIn(wrong), { message: /replies do not match/ })
})

void t.test('a master that is lost makes it read the map until each is connected', async (t) => {
  const [a, b] = await halves(t)
  const { cluster, counts } = await open(t, [a])
  const maps = counts.maps
  const began = performance.now()
  for (const socket of b.sockets) socket.destroy()
  await until(() => counts.maps > maps)
  t.ok(performance.now() - began >= 240)
  await until(() => cluster.known().every(({ server }) => server.isReady))
  await wait(300)
  const read = a.maps + b.maps
  await wait(600)
  t.equal(a.maps + b.maps, read, 'and no longer')
})

void t.test('what keeps the map from being read is told once, and it is read ever more slowly', async (t) => {
  const node = await nodeOf(t)
  node.map = '-NOPERM no\r\n'
  const { cluster, events, counts } = await open(t, [node, { port: 1 }])
  const message =
    /^error: no node of the cluster answers: 127.0.0.1:\d+: Redis refuses: NOPERM no; 127.0.0.1:1: /
  t.match(events, [message])
  t.strictSame(cluster.known(), [])
  t.equal(cluster.targetOf(0), null)
  t.equal(cluster.isMoved(new Refused('MOVED 1 127.0.0.1:1'), 0), false)
  for (const refused of [
    ask(cluster, 0),
    cluster.run(script('get'), [1, key(0)], same),
    cluster.askAnyone('time', [], same),
  ])
    await t.rejects(refused, { ...NOT_APPLIED, message: /^Redis is not connected: no node of the cluster/ })
  await until(() => node.maps === 2)
  const began = performance.now()
  await until(() => node.maps === 3)
  const took = performance.now() - began
  t.ok(took > 700, `after ${took} ms`)
  t.equal(events.length, 1)
  node.map = slots([0, LAST, node.port])
  await until(() => counts.ready === 1)
  t.equal(counts.maps > 0, true)
  t.strictSame(events.slice(1), [`connected: ${node.name}`])
  // Soon again, not after a pause as after the failures.
  const maps = node.maps
  let isLate = false
  const timer = setTimeout(() => {
    isLate = true
  }, 1500)
  for (const socket of node.sockets) socket.destroy()
  await until(() => node.maps > maps)
  clearTimeout(timer)
  t.notOk(isLate)
  await cluster.close()
  await t.rejects(ask(cluster, 0), { ...NOT_APPLIED, message: /closed/ })
})

void t.test('a subscription is refused by a stale map, or for good', async (t) => {
  const [a, b] = await halves(t)
  const { cluster, counts } = await open(t, [a])
  const moved = new Refused(`MOVED 933 127.0.0.1:${b.port}`)
  t.equal(cluster.isMoved(new Refused('NOPERM'), 3), false)
  t.equal(counts.maps, 1)
  t.equal(cluster.isMoved(moved, 3), true)
  t.equal(cluster.targetOf(3), cluster.targetOf(0))
  t.equal(counts.maps, 2)
  await until(() => counts.maps >= 3)
  const maps = a.maps + b.maps
  t.equal(cluster.isMoved(new Refused('CLUSTERDOWN'), 3), true)
  await until(() => a.maps + b.maps > maps)
})
