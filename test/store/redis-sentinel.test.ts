import t, { type Test } from 'tap'
import {
  array,
  bulk,
  isLeft,
  master,
  type Says,
  type Scripted,
  scripted,
  words,
} from '../support/fake-redis.ts'
import { frozenClock } from '../support/frozen-clock.ts'
import { claim, settling, until } from './fixtures.ts'
import { NOT_APPLIED, open } from './redis-fixtures.ts'

/* What Sentinels may answer, from servers that say what the test wants. Real ones: redis-sentinel.verify.ts. */

const UNKNOWN = '-ERR No such master with that name\r\n'
const configuration = (epoch: number | string) => words('name', 'pay', 'config-epoch', String(epoch))
const place = (port: number) => words('127.0.0.1', String(port))

/** A Sentinel that knows the master since failover `epoch`, unless told otherwise. */
async function sentinelOf(t: Test, of: { readonly port: number }, epoch = 1, more: Says = {}) {
  const sentinel = await scripted(t, {
    'sentinel master': configuration(epoch),
    'sentinel get-master-addr-by-name': place(of.port),
    'sentinel replicas': words(),
    ...more,
  })
  return {
    ...sentinel,
    /** From now on it names this master. */
    names({ port }: { readonly port: number }, epoch: number) {
      sentinel.says['sentinel master'] = configuration(epoch)
      sentinel.says['sentinel get-master-addr-by-name'] = place(port)
    },
    queries: () => sentinel.asked.length,
  }
}

const urlOf = (...sentinels: readonly { readonly port: number }[]) =>
  `redis+sentinel://${sentinels.map(({ port }) => `127.0.0.1:${port}`).join(',')}/pay`

void t.test('the latest configuration names the master', async (t) => {
  const servers = [await scripted(t), await scripted(t), await scripted(t)] as const
  const sentinels = await Promise.all(
    [1, 30, 4].map((epoch, n) => sentinelOf(t, servers[n] as Scripted, epoch)),
  )
  const { store, events } = await open(t, urlOf(...sentinels))
  t.strictSame(events, [`connected: ${servers[1].name}`])
  t.match(await claim(store), { done: true })
  t.strictSame([servers[0].asked, servers[1].asked], [[], ['put']])
})

void t.test('once one has answered, the others are waited for a quarter of a second', async (t) => {
  const clock = frozenClock(t)
  const servers = [await scripted(t), await scripted(t)] as const
  const first = await sentinelOf(t, servers[0], 1)
  const late = await sentinelOf(t, servers[1], 2, { 'sentinel get-master-addr-by-name': null })
  const silent = await sentinelOf(t, servers[0], 3, { 'sentinel get-master-addr-by-name': null })
  const opening = open(t, urlOf(first, late, silent, { port: 1 }))
  const isOpen = settling(opening)
  await clock.until(() => [first, late, silent].every(({ queries }) => queries() === 2))
  late.write(place(servers[1].port))
  await clock.until(() => clock.timers() > 0)
  // Until the answers have been read.
  for (let n = 0; n < 20; n++) await clock.pass(12)
  t.notOk(isOpen())
  await clock.passUntil(isOpen)
  t.equal((await opening).events.at(-1), `connected: ${servers[1].name}`)
})

void t.test('if all have answered, nobody is waited for', async (t) => {
  frozenClock(t)
  const server = await scripted(t)
  const { events } = await open(t, urlOf(await sentinelOf(t, server), await sentinelOf(t, server)))
  t.strictSame(events, [`connected: ${server.name}`])
})

void t.test('only a name that nobody knows, or servers of another kind, are a mistake', async (t) => {
  const server = await scripted(t)
  const saying = (query: string | null, named: string | null = query) =>
    sentinelOf(t, server, 1, {
      ...(query === null ? {} : { 'sentinel master': query }),
      ...(named === null ? {} : { 'sentinel get-master-addr-by-name': named }),
    })
  const unknown = await saying(UNKNOWN, '*-1\r\n')
  const half = await saying(null, '*-1\r\n')
  const other = await saying(UNKNOWN, null)
  const plain = await saying("-ERR unknown command 'sentinel', with args\r\n")
  const refuses = await saying('-NOPERM no\r\n')
  const nobodyKnows =
    /^store.url: no Sentinel names the master "pay": .*No such master.*; allowed: a name listed by/
  const noSentinel = /^store.url: no Sentinel .*unknown command.*; allowed: the addresses of Sentinels/
  for (const [sentinels, message] of [
    [[unknown], nobodyKnows],
    [[half], nobodyKnows],
    [[other], nobodyKnows],
    [[unknown, half, other], nobodyKnows],
    [[plain], noSentinel],
  ] as const)
    await t.rejects(open(t, urlOf(...sentinels)), { ...NOT_APPLIED, message })
  t.ok(
    unknown.asked.every((name) => name === 'sentinel'),
    'nothing else',
  )
  const { length } = unknown.sockets
  for (const sentinels of [
    [refuses],
    [{ port: 1 }],
    [unknown, { port: 1 }],
    [plain, { port: 1 }],
    [plain, unknown],
  ]) {
    const { store, events } = await open(t, urlOf(...sentinels))
    const why = /no Sentinel names the master "pay": 127.0.0.1:\d+: /
    t.match(events, [why])
    await t.rejects(store.ping(), { ...NOT_APPLIED, message: why })
    await store.close()
  }
  t.ok(unknown.sockets.length <= length + 2 * 2, 'nor asks again after a mistake')
  const known = await sentinelOf(t, server)
  t.strictSame((await open(t, urlOf(unknown, plain, known))).events, [`connected: ${server.name}`])
})

void t.test('a malformed answer names no master', async (t) => {
  const server = await scripted(t)
  const malformed: Says[] = [
    { 'sentinel master': words('config-epoch', '1', 'more') },
    { 'sentinel master': words('config-epoch', 'x') },
    { 'sentinel master': '+OK\r\n' },
    { 'sentinel master': words('name', 'pay') },
    { 'sentinel get-master-addr-by-name': '+OK\r\n' },
    { 'sentinel get-master-addr-by-name': words('10.0.0.1') },
    { 'sentinel get-master-addr-by-name': words('', '7001') },
  ]
  for (const more of malformed) {
    const { store } = await open(t, urlOf(await sentinelOf(t, server, 1, more)))
    await t.rejects(store.ping(), { ...NOT_APPLIED, message: /replies do not match/ })
  }
})

void t.test('a server that is no master is not used, whatever the Sentinels say', async (t) => {
  const server = await scripted(t)
  const sentinel = await sentinelOf(t, server)
  for (const [role, why] of [
    [array(bulk('slave')), 'its ROLE is slave'],
    ['+OK\r\n', 'replies do not match'],
    ['-NOPERM role\r\n', 'NOPERM role'],
  ] as const) {
    server.says['role'] = role
    const { store, events } = await open(t, urlOf(sentinel))
    t.equal(events.length, 1)
    await t.rejects(store.ping(), { ...NOT_APPLIED, message: new RegExp(`not connected: .*${why}`) })
    server.says['role'] = master()
    await until(() => events.at(-1) === `connected: ${server.name}`)
  }
})

void t.test('Sentinels that are down, or a master that is, may come later', async (t) => {
  const sentinel = await sentinelOf(t, { port: 1 })
  const { events } = await open(t, urlOf(sentinel))
  t.match(events, [/^error: .*ECONNREFUSED/])
  const server = await scripted(t)
  sentinel.names(server, 2)
  await until(() => events.at(-1) === `connected: ${server.name}`)
})

void t.test('a switch of its master is followed, though the old one still answers', async (t) => {
  const clock = frozenClock(t)
  const [a, b, old] = [await scripted(t), await scripted(t), await scripted(t)]
  const [stale, fresh] = [await sentinelOf(t, old, 3), await sentinelOf(t, a, 4)]
  const { store, events } = await open(t, urlOf(stale, fresh))
  const asked = async (...sentinels: (typeof fresh)[]) => {
    const before = sentinels.map(({ queries }) => queries())
    await clock.passUntil(() => sentinels.every(({ queries }, n) => queries() >= (before[n] as number) + 4))
  }
  await asked(stale, fresh)
  fresh.says['sentinel master'] = '-NOPERM no\r\n'
  await asked(stale)
  await store.ping()
  t.strictSame(events, [`connected: ${a.name}`], 'who slept through a failover is not believed')
  for (const sentinel of [stale, fresh]) sentinel.names(b, 5)
  await clock.passUntil(() => events.at(-1) === `connected: ${b.name}`)
  t.match(await claim(store), { done: true })
  t.strictSame([a.asked.includes('put'), b.asked.includes('put'), old.sockets.length], [false, true, 0])
})

void t.test('with a grace, Sentinels are asked as often as servers are', async (t) => {
  const clock = frozenClock(t)
  for (const [grace, every] of [
    [1000, 250],
    [0, 500],
  ] as const) {
    const sentinel = await sentinelOf(t, await scripted(t), 0)
    const { store } = await open(t, urlOf(sentinel), { grace })
    const before = sentinel.queries()
    await clock.pass(every - 1)
    t.equal(sentinel.queries(), before)
    await clock.pass(1)
    await clock.until(() => sentinel.queries() > before)
    await store.close()
    await clock.until(() => isLeft(sentinel))
    const after = sentinel.queries()
    await clock.pass(10 * every)
    t.equal(sentinel.queries(), after)
  }
})
