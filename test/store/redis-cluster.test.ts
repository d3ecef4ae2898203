import type { Socket } from 'node:net'
import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { replicasIn } from '../../src/store/redis/cluster.ts'
import { PartlyUnavailable, type Store } from '../../src/store/register.ts'
import {
  array,
  bulk,
  int,
  isLeft,
  LAST_SLOT,
  NULL,
  OK,
  type Scripted,
  scripted,
  slots,
  words,
} from '../support/fake-redis.ts'
import { frozenClock } from '../support/frozen-clock.ts'
import { claim, newId, settling, until } from './fixtures.ts'
import { answers, idIn, KEYS, NOT_APPLIED, NOTE, open } from './redis-fixtures.ts'

/* What the nodes of a cluster may answer, from some that say what the test wants. Real ones: redis-cluster.verify.ts. */

/** The slots of the first four shards: 13254, 9191, 4996 and 933. */
const [UPPER, LOWER] = [0, 3]
const get = (store: Store, shard: number) => store.get(idIn(shard))
const found = (now: number) => [int(now), NULL]

function setMap(nodes: readonly Scripted[], map: string): void {
  for (const node of nodes) node.says['cluster slots'] = map
}

const maps = (...nodes: readonly Scripted[]) =>
  nodes.flatMap(({ asked }) => asked).filter((name) => name === 'cluster').length

/** Scripts and the permissions that they have needed. */
const ran = ({ asked }: Scripted) => asked.filter((name) => /^(get|asking)/.test(name))

/** Two masters, the first of which has the lower half of the slots; `get` tells them apart. */
async function halves(t: Test, options: Parameters<typeof open>[2] = {}) {
  const [a, b] = [await scripted(t, { get: found(1) }), await scripted(t, { get: found(2) })]
  const map = slots([0, 8191, a.port], [8192, LAST_SLOT, b.port])
  setMap([a, b], map)
  return { a, b, map, ...(await open(t, a.cluster, options)) }
}

void t.test('each shard belongs to the master of its slot', async (t) => {
  const { a, b, store, events } = await halves(t)
  t.strictSame(events.toSorted(), [a, b].map(({ name }) => `connected: ${name}`).toSorted())
  for (const [shard, master] of [
    [0, 2],
    [1, 2],
    [2, 1],
    [3, 1],
    [255, 2],
  ] as const)
    t.equal((await get(store, shard)).now, master)
  t.equal(
    (await store.traits()).topology,
    `2 masters share 256 shards of records: ${b.name} has 126, ${a.name} has 130; the largest share is 1.02 times the mean`,
  )
  // Ranges contain their ends, and come in any order.
  setMap([a, b], slots([93, 16_261, b.port], [92, 92, a.port], [16_262, LAST_SLOT, a.port], [0, 91, b.port]))
  await store.traits()
  const there = await Promise.all(
    Array.from({ length: 256 }, async (_, shard) => (await get(store, shard)).now),
  )
  t.strictSame(
    there.flatMap((now, shard) => (now === 1 ? [shard] : [])),
    [68, 143],
  )
  // What a node does not know is where it was.
  setMap([a, b], slots([0, 8191, b.port]))
  t.match((await store.traits()).topology, /^2 masters/)
  setMap([a, b], '*0\r\n')
  t.match((await store.traits()).topology, /^2 masters/)
})

void t.test('notes of one turn are a command for each shard', async (t) => {
  const { a, b, store } = await halves(t)
  for (const node of [a, b]) node.says['note'] = [int(1)]
  const done = [UPPER, LOWER].map((shard) => store.history.append(idIn(shard), [NOTE]))
  t.strictSame(await Promise.all(done), [true, true])
  t.strictSame([a.asked.at(-1), b.asked.at(-1)], ['note', 'note'])
})

void t.test('a slot that has moved is asked for where it is, and the map is read again', async (t) => {
  const clock = frozenClock(t)
  const { a, b, store } = await halves(t)
  a.says['get'] = `-MOVED 933 127.0.0.1:${b.port}\r\n`
  const before = maps(a, b)
  for (let n = 0; n < 2; n++) t.equal((await get(store, LOWER)).now, 2)
  t.strictSame([ran(a), ran(b)], [['get'], ['get', 'get']], 'it is not asked again')
  a.says['get'] = found(1)
  t.equal((await get(store, 2)).now, 1, 'other slots are where they were')
  setMap([a, b], slots([0, LAST_SLOT, b.port]))
  await clock.passUntil(() => maps(a, b) > before)
  await clock.until(() => isLeft(a))
  t.equal((await get(store, 2)).now, 2, 'a master without slots is left')
  setMap([b], slots([0, 8191, a.port], [8192, LAST_SLOT, b.port]))
  await store.traits()
  await clock.until(async () => (await get(store, LOWER).catch(() => null))?.now === 1)
})

void t.test('a slot that is moving is asked for with permission, and stays in the map', async (t) => {
  const { a, b, store } = await halves(t)
  a.says['get'] = `-ASK 933 127.0.0.1:${b.port}\r\n`
  t.equal((await get(store, LOWER)).now, 2)
  t.strictSame(ran(b), ['asking', 'get in full'])
  a.says['get'] = found(1)
  t.equal((await get(store, LOWER)).now, 1)
  // A reply that is shifted by one is not believed there either.
  a.says['get'] = `-ASK 933 127.0.0.1:${b.port}\r\n`
  Object.assign(b.says, { asking: ':1\r\n', get: '+OK\r\n' })
  await t.rejects(get(store, LOWER), { name: 'StoreUnavailable', maybeApplied: true })
})

void t.test('a node that omits its name is at the host that was asked', async (t) => {
  const node = await scripted(t)
  for (const host of [NULL, bulk(''), bulk('?')]) {
    node.says['cluster slots'] = array(array(int(0), int(LAST_SLOT), array(host, int(node.port))))
    const { store } = await open(t, node.cluster)
    for (const empty of ['', '?']) {
      let asked = 0
      node.says['get'] = () => (asked++ === 0 ? `-MOVED 933 ${empty}:${node.port}\r\n` : found(1))
      t.equal((await get(store, LOWER)).now, 1)
    }
    t.match((await store.traits()).topology, `${node.name} has 256`)
  }
})

void t.test('a command is redirected three times, then fails as not applied', async (t) => {
  const { a, b, store } = await halves(t)
  let left = 3
  const redirect = () => (left-- > 0 ? `-ASK 933 127.0.0.1:${left % 2 ? a.port : b.port}\r\n` : found(7))
  a.says['get'] = b.says['get'] = redirect
  t.equal((await get(store, LOWER)).now, 7)
  left = 4
  await t.rejects(get(store, LOWER), { ...NOT_APPLIED, message: /Redis refuses: ASK 933/ })
})

void t.test('a command takes no longer than its time, however late it is redirected', async (t) => {
  const clock = frozenClock(t)
  const { a, b, store } = await halves(t, { timeoutMs: 200 })
  Object.assign(a.says, { get: null })
  Object.assign(b.says, { get: null })
  const failed = async (
    asked: Promise<unknown>,
    time: number,
    error: typeof NOT_APPLIED & { message: RegExp },
  ) => {
    const failing = t.rejects(asked, error)
    const isOver = settling(failing)
    await clock.pass(time - 1)
    t.notOk(isOver())
    await clock.pass(1)
    await failing
  }
  const late = get(store, LOWER)
  await clock.until(() => ran(a).length === 1)
  await clock.pass(150)
  for (const socket of a.sockets) socket.write(`-MOVED 933 127.0.0.1:${b.port}\r\n`)
  await clock.until(() => ran(b).length === 1)
  await failed(late, 50, { name: 'StoreUnavailable', maybeApplied: true, message: /timed out/ })
  // Nothing is sent to a port that accepts, and does not greet.
  const silent = await scripted(t, { ping: null, client: null })
  a.says['get'] = `-MOVED 4996 127.0.0.1:${silent.port}\r\n`
  const parts = [
    [0, 4995, a.port],
    [4996, 4996, silent.port],
    [4997, 8191, a.port],
  ] as const
  setMap([a, b], slots(...parts, [8192, LAST_SLOT, b.port]))
  const refused = get(store, 2)
  await clock.until(() => silent.sockets.length === 1)
  await failed(refused, 200, { ...NOT_APPLIED, message: /MOVED/ })
  t.strictSame(silent.asked, [])
})

void t.test('a master that was unknown is connected to before it is asked', async (t) => {
  const { a, b, store } = await halves(t)
  const fresh = await scripted(t, { get: found(9) })
  const map = slots([0, 8191, a.port], [8192, 9999, fresh.port], [10_000, LAST_SLOT, b.port])
  a.says['get'] = `-MOVED 933 localhost:${fresh.port}\r\n`
  setMap([a, b, fresh], map)
  const both = await Promise.all([get(store, LOWER), get(store, LOWER)])
  t.strictSame(
    both.map(({ now }) => now),
    [9, 9],
  )
  const topology = async () => (await store.traits().catch(() => null))?.topology
  await until(async () => (await topology())?.startsWith('3 masters') === true)
  setMap([a, b, fresh], slots([0, LAST_SLOT, fresh.port]).replace(bulk('127.0.0.1'), bulk('localhost')))
  await until(async () => (await topology())?.includes(`localhost:${fresh.port} has 256`) === true)
  t.pass('a node is where the map says')
})

void t.test('errors are as they are, partly unavailable where another master is up', async (t) => {
  const { a, store } = await halves(t)
  const failing = async (reply: string) => {
    a.says['get'] = `-${reply}\r\n`
    return get(store, LOWER).then(
      () => null,
      (error: unknown) => error,
    )
  }
  const error = await failing('TRYAGAIN')
  t.ok(error instanceof PartlyUnavailable)
  t.match(error, { ...NOT_APPLIED, message: 'Redis refuses: TRYAGAIN' })
  t.match(await failing('OOM full'), { name: 'StoreFull' })
  t.match(await failing('WRONGTYPE'), { name: 'CorruptRecord' })
  a.says['put'] = [2, 100, 90, 40].map(int)
  await t.rejects(claim(store, idIn(LOWER)), { name: 'InGrace', left: 40 })
  t.equal((await get(store, UPPER)).now, 2)
  const alone = await scripted(t, { get: '-TRYAGAIN\r\n' })
  const single = await open(t, alone.cluster)
  const refused = await get(single.store, LOWER).catch((error: unknown) => error)
  t.match(refused, { ...NOT_APPLIED, message: 'Redis refuses: TRYAGAIN' })
  t.notOk(refused instanceof PartlyUnavailable)
})

void t.test('while a master is down, the others answer for all, and the traits say so', async (t) => {
  const { a, b, store, events } = await halves(t, { grace: 0 })
  for (const [down, up, shard, name] of [
    [a, b, LOWER, 'b'],
    [b, a, UPPER, 'a'],
  ] as const) {
    up.says['time'] = words(name === 'b' ? '2' : '1', '0')
    down.says['ping'] = '-LOADING data\r\n'
    down.hangUp()
    await until(() => events.includes(`error: ${down.name}: Redis refuses: LOADING data`))
    t.equal(await store.ping(), name === 'b' ? 2000 : 1000)
    await t.rejects(get(store, shard), {
      ...NOT_APPLIED,
      message: 'Redis is not connected: Redis refuses: LOADING data',
    })
    t.strictSame((await store.traits()).refusals, ['1 of 2 masters of the cluster do not answer.'])
    await t.rejects(store.list('unresolved', null, 10), NOT_APPLIED, 'an incomplete list would be a lie')
    down.says['ping'] = '+PONG\r\n'
    await until(async () => (await get(store, shard).catch(() => null)) !== null)
  }
  const alone = await scripted(t)
  const single = await open(t, alone.cluster)
  alone.says['ping'] = '-LOADING data\r\n'
  alone.hangUp()
  await until(() => single.events.length >= 3)
  await t.rejects(single.store.ping(), NOT_APPLIED)
})

void t.test('every node is greeted as the URL says, and its errors have its name', async (t) => {
  const [a, b] = [await scripted(t), await scripted(t, { ping: '-LOADING data\r\n' })]
  setMap([a, b], slots([0, 8191, a.port], [8192, LAST_SLOT, b.port]))
  const { events } = await open(t, a.cluster.replace('//', '//app:secret@'))
  for (const { commands } of [a, b]) t.strictSame(commands[0], ['auth', 'app', 'secret'])
  t.strictSame(events.toSorted(), [`connected: ${a.name}`, `error: ${b.name}: Redis refuses: LOADING data`])
})

void t.test('only servers that are no whole cluster are a mistake', async (t) => {
  const plain = await scripted(t, { 'cluster slots': '-ERR This instance has cluster support disabled\r\n' })
  const part = await scripted(t)
  part.says['cluster slots'] = slots([0, 99, part.port], [200, LAST_SLOT, part.port])
  const urlOf = (...nodes: { readonly port: number }[]) =>
    `redis+cluster://${nodes.map(({ port }) => `127.0.0.1:${port}`).join(',')}`
  const mistake =
    /^store.url: no node .* 127.0.0.1:\d+: .*; allowed: nodes of a cluster that covers all slots$/
  for (const [url, message] of [
    [urlOf(plain), /cluster support disabled/],
    [urlOf(part), /: 100 of 16384 slots belong to no node;/],
    [urlOf(plain, part), mistake],
  ] as const)
    await t.rejects(open(t, url), { ...NOT_APPLIED, message })
  const down = await open(t, urlOf(part, { port: 1 }))
  t.match(down.events, [/^error: no node of the cluster answers: .*100 of 16384/])
  t.match((await open(t, 'redis+cluster://[::1]:1')).events, [/: \[::1\]:1: /])
  const whole = await scripted(t)
  t.match(await claim((await open(t, urlOf(plain, part, whole))).store), { done: true })
})

void t.test('a malformed map is refused', async (t) => {
  const place = array(bulk('h'), int(1))
  for (const map of [
    '+OK\r\n',
    array(int(1)),
    array(array(int(0), int(1))),
    array(array('+0\r\n', int(1), place)),
    array(array(int(0), '+1\r\n', place)),
    array(array(int(0), int(1), int(1))),
    array(array(int(0), int(LAST_SLOT), bulk('ab'))),
    array(array(int(0), int(1), words('h'))),
  ]) {
    const node = await scripted(t, { 'cluster slots': map })
    const { store } = await open(t, node.cluster)
    await t.rejects(store.ping(), {
      ...NOT_APPLIED,
      message: /no node of the cluster answers: .*replies do not match/,
    })
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
  t.equal(replicasIn(nodes.join('\n')), 2)
  t.equal(replicasIn(`${nodes[4]}\n${nodes[0]}\n`), 0)
})

void t.test('the map is read while a master is lost or the cluster down, and no longer', async (t) => {
  const clock = frozenClock(t)
  const { a, b, store } = await halves(t)
  const rests = async (time: number) => {
    const before = maps(a, b)
    await clock.pass(time)
    for (let n = 0; n < 10; n++) await clock.settled()
    return maps(a, b) === before
  }
  t.ok(await rests(10_000))
  // It accepts connections, and does not answer.
  Object.assign(b.says, { ping: null, client: null })
  b.hangUp()
  await clock.until(() => isLeft(b))
  const before = maps(a, b)
  await clock.passUntil(() => maps(a, b) >= before + 3)
  Object.assign(b.says, { ping: '+PONG\r\n', client: OK })
  b.hangUp()
  let isBack = false
  void clock
    .until(async () => (await get(store, UPPER).catch(() => null)) !== null)
    .then(() => {
      isBack = true
    })
  await clock.passUntil(() => isBack)
  await rests(3000)
  t.ok(await rests(10_000), 'each is connected')
  const refused = async (reply: string) => {
    a.says['get'] = `-${reply}\r\n`
    await t.rejects(get(store, LOWER), { ...NOT_APPLIED, message: `Redis refuses: ${reply}` })
  }
  await refused('ERR CLUSTERDOWN')
  t.ok(await rests(3000))
  await refused('CLUSTERDOWN The cluster is down')
  t.notOk(await rests(300))
  t.ok(await rests(10_000))
})

void t.test('what keeps the map from being read is told once, and it is read again', async (t) => {
  const clock = frozenClock(t)
  const node = await scripted(t, { 'cluster slots': '-NOPERM no\r\n' })
  const { store, events } = await open(t, `${node.cluster},127.0.0.1:1`)
  const why = /no node of the cluster answers: 127.0.0.1:\d+: Redis refuses: NOPERM no; 127.0.0.1:1: /
  for (const ask of [
    (): unknown => get(store, 0),
    () => claim(store),
    store.ping,
    store.traits,
    () => store.due(10),
    () => store.list('all', null, 10),
    () => store.list('unresolved', null, 10),
  ])
    await t.rejects(async () => ask(), { ...NOT_APPLIED, message: why })
  let told = 0
  await store.watch(newId(), () => void told++)
  for (let n = 0; n < 5; n++) {
    const before = maps(node)
    await clock.passUntil(() => maps(node) > before)
  }
  t.match(events, [why])
  node.says['cluster slots'] = slots([0, LAST_SLOT, node.port])
  await clock.passUntil(() => told > 0)
  t.strictSame(events.slice(1), [`connected: ${node.name}`], 'a watcher is told once its server is known')
  await store.close()
  await t.rejects(get(store, 0), { ...NOT_APPLIED, message: 'Redis is not connected: closed' })
})

void t.test('if no master answers, replicas and other known nodes are asked for the map', async (t) => {
  const [a, b, replica] = [await scripted(t), await scripted(t), await scripted(t, { get: found(3) })]
  setMap([a, b], slots([0, 8191, a.port, replica.port], [8192, LAST_SLOT, b.port]))
  const { store, events } = await open(t, a.cluster)
  t.equal(replica.sockets.length, 0)
  for (const node of [a, b]) {
    node.says['ping'] = '-LOADING\r\n'
    node.hangUp()
  }
  setMap([replica], slots([0, LAST_SLOT, replica.port]))
  await until(() => events.includes(`connected: ${replica.name}`))
  t.equal((await get(store, LOWER)).now, 3)
})

void t.test('a store that is closed while the map is read takes none, and reads none', async (t) => {
  const clock = frozenClock(t)
  for (const isAnswered of [true, false]) {
    const { a, b, store, events } = await halves(t)
    let asking: Socket | undefined
    for (const node of [a, b])
      node.says['cluster slots'] = (_, socket) => {
        asking = socket
        return null
      }
    const reading = store.traits().catch(() => null)
    await clock.until(() => maps(a, b) === 2)
    const closed = store.close()
    const other = await scripted(t)
    if (isAnswered) asking?.write(slots([0, LAST_SLOT, other.port]))
    await Promise.all([reading, closed])
    await clock.pass(10_000)
    t.strictSame([other.sockets.length, maps(a, b)], [0, 2])
    t.notOk(events.some((event) => event.startsWith('error')))
  }
})

void t.test('a list visits one master after the other, and begins again when slots have moved', async (t) => {
  const { a, b, map, store } = await halves(t)
  const ids = [newId(), newId()] as const
  const scanned: string[] = []
  const scan = (node: Scripted, id: RecordId) => {
    node.says['scan'] = ([, cursor = '']) => {
      scanned.push(`${node.port} ${cursor}`)
      return array(bulk('0'), words(KEYS.record(id)))
    }
  }
  scan(a, ids[0])
  scan(b, ids[1])
  // Servers come in the order of their names.
  const [one, two] = [a.port, b.port].toSorted((x, y) => (`${x}` < `${y}` ? -1 : 1))
  const first = await store.list('all', null, 10)
  t.match(first.next, /^[0-9a-f]{8}\.1\.0$/)
  const second = await store.list('all', first.next, 10)
  t.equal(second.next, null)
  t.strictSame([...first.ids, ...second.ids].toSorted(), ids.toSorted())
  t.strictSame(scanned.splice(0), [`${one} 0`, `${two} 0`])
  await t.rejects(store.list('all', `${first.next?.slice(0, 8)}.2.0`, 10), RangeError)
  await store.list('all', 'ffffffff.1.7', 10)
  t.strictSame(scanned.splice(0), [`${one} 0`], 'a cursor of other servers')
  // Shard 0 is in the upper half, shard 2 in the lower.
  for (const beginning of ['AAAAAAAA', 'AgAAAAAA'])
    t.equal((await store.list({ beginning }, null, 10)).next, null)
  t.strictSame(scanned.splice(0), [`${b.port} 0`, `${a.port} 0`])
  // Not all masters learn of a move at once.
  b.says['cluster slots'] = slots([0, 4996, b.port], [4997, LAST_SLOT, b.port])
  const { next } = await store.list({ beginning: 'AgAAAAAA' }, null, 10)
  t.match(next, /\.1\.0$/)
  b.says['cluster slots'] = map
  await store.list('all', null, 10)
  // Slots that move meanwhile.
  let scans = 0
  for (const node of [a, b])
    node.says['scan'] = () => {
      scans++
      setMap([a, b], slots([0, 7999, a.port], [8000, LAST_SLOT, b.port]))
      return array(bulk('0'), '*0\r\n')
    }
  t.match((await store.list('all', first.next, 10)).next, /^[0-9a-f]{8}\.0\.0$/)
  t.equal(scans, 1)
  setMap([a, b], '*0\r\n')
  await t.rejects(store.list('all', null, 10), { ...NOT_APPLIED, message: /^Redis is not connected/ })
})

void t.test('watchers follow their records to other masters', async (t) => {
  const clock = frozenClock(t)
  const { a, b, store, events } = await halves(t)
  const told = [0, 0]
  const ids = [idIn(UPPER), idIn(LOWER)] as const
  for (const [n, id] of ids.entries()) await store.watch(id, () => void (told[n] = (told[n] as number) + 1))
  const subscribed = (node: Scripted) =>
    node.commands.filter(([name]) => name === 'ssubscribe').map(([, channel]) => channel)
  t.strictSame([subscribed(a), subscribed(b)], [[KEYS.channel(ids[1])], [KEYS.channel(ids[0])]])
  setMap([a, b], slots([0, LAST_SLOT, a.port]))
  await store.traits()
  await clock.until(() => told[0] === 1)
  await clock.until(() => isLeft(b))
  t.strictSame([subscribed(a).at(-1), told], [KEYS.channel(ids[0]), [1, 0]])
  // A refusal that names another master is followed; one that says that the cluster is down, once it is not.
  a.says['ssubscribe'] = `-MOVED 933 127.0.0.1:${b.port}\r\n`
  setMap([a, b], slots([0, 8191, b.port], [8192, LAST_SLOT, a.port]))
  const moved = idIn(LOWER)
  let news = 0
  await store.watch(moved, () => void news++)
  await clock.until(() => subscribed(b).includes(KEYS.channel(moved)))
  await clock.until(() => news === 1)
  b.says['ssubscribe'] = '-CLUSTERDOWN The cluster is down\r\n'
  const late = idIn(LOWER)
  let later = 0
  await store.watch(late, () => void later++)
  b.says['ssubscribe'] = ([kind = '', channel = '']) => array(bulk(kind), bulk(channel), int(1))
  await clock.passUntil(() => later === 1)
  t.notOk(events.some((event) => event.startsWith('error')))
  b.says['ssubscribe'] = '-NOPERM no\r\n'
  await store.watch(idIn(LOWER), () => {})
  t.match(events.at(-1), /^error: subscribing is refused.*NOPERM no$/)
  t.ok(await answers(store)())
})
