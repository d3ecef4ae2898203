import type { Socket } from 'node:net'
import t, { type Test } from 'tap'
import { replicationText } from '../../src/store/redis/barrier.ts'
import { type Wait } from '../../src/store/redis/keys.ts'
import type { Store } from '../../src/store/register.ts'
import {
  array,
  bulk,
  DONE,
  int,
  isLeft,
  LAST_SLOT,
  master,
  NULL,
  OK,
  type Says,
  scripted,
  slots,
  words,
} from '../support/fake-redis.ts'
import { frozenClock } from '../support/frozen-clock.ts'
import { relay } from '../support/relay.ts'
import { bytesOf, claim, newId, newToken, SPANS, settling, until } from './fixtures.ts'
import { claiming, idIn, KEYS, NOT_APPLIED, open } from './redis-fixtures.ts'

/* `store.wait`: what a master may answer, from one that says what the test wants. Real replicas: redis-barrier.verify.ts. */

const UNREPLICATED = { name: 'Unreplicated', maybeApplied: true }
const unsatisfied = (why: string) => ({ ...UNREPLICATED, message: `store.wait is not satisfied: ${why}` })
const WAIT: Wait = { replicas: 1, disk: 'none', timeout: 100 }
const disks = (local: number, replicas: number) => array(int(local), int(replicas))

async function waiting(t: Test, wait: Partial<Wait> = {}, says: Says = {}, timeoutMs = 10_000) {
  const server = await scripted(t, says)
  const opened = await open(t, server.url, { wait: { ...WAIT, ...wait }, timeoutMs })
  /** What was asked for the claims, on the second connection. */
  const asked = () =>
    server.commands.flatMap(([name = '', ...args]) =>
      /^(set|wait)/.test(name) ? [[name, ...args].join(' ')] : [],
    )
  return { server, asked, ...opened }
}

const marker = (shard: number) => `set ${KEYS.marker(shard)} 1 PX 60000`

void t.test('W05 a claim waits for a marker that follows it; nothing else waits', async (t) => {
  const { server, store, asked, waited } = await waiting(t)
  const [id, token] = [idIn(7), newToken()]
  t.match(await store.put(id, claiming(token), SPANS), { done: true })
  t.strictSame(asked(), [marker(7), 'wait 1 100'])
  await store.put(id, claiming(token), SPANS, 'fresh')
  await store.swap(idIn(8), { version: 1 }, claiming(token), SPANS, true)
  t.strictSame(asked().slice(4), [marker(8), 'wait 1 100'])
  t.strictSame(waited, [true, true, true])
  await store.put(id, claiming(token), SPANS, 'again')
  await store.put(id, bytesOf('completed', token), SPANS)
  await store.swap(id, { version: 1 }, claiming(token), SPANS, false)
  await store.swap(id, { version: 1 }, bytesOf('unknown', token), SPANS, true)
  t.equal(waited.length, 3)
  t.equal(server.sockets.length, 2, 'over one other connection')
})

void t.test('W05 a claim that is recognised as one’s own waits again; another’s does not', async (t) => {
  // ASCII: a scripted server answers in text.
  const token = Buffer.alloc(16, 'x')
  const { server, store, waited } = await waiting(t)
  for (const [state, owner] of [
    ['in_progress', token],
    ['unknown', token],
    ['completed', token],
    ['in_progress', Buffer.alloc(16, 'y')],
  ] as const) {
    const stored = bytesOf(state, owner).toString()
    server.says['put'] = [int(0), int(1), bulk(stored)]
    server.asked.splice(0)
    const own = claiming(token)
    const put = store.put(newId(), own, SPANS)
    await until(() => server.asked.includes('put'))
    // The store may reuse it.
    own.fill(0)
    t.match(await put, { done: false })
  }
  server.says['swap'] = [int(0), int(1), NULL]
  t.match(await store.swap(newId(), { version: 1 }, claiming(token), SPANS, true), { bytes: null })
  t.strictSame(waited, [true, true])
})

void t.test('W05 claims wait for as many replicas and disks as are required', async (t) => {
  const disk = 'the server’s disk did not have it within 100 ms'
  const cases: [Partial<Wait>, question: string[], Says, trouble: string | null][] = [
    [{ replicas: 2 }, ['wait 2 100'], { wait: int(1) }, '1 of 2 replicas had it within 100 ms'],
    [{ replicas: 'none', disk: 'local' }, ['waitaof 1 0 100'], { waitaof: disks(1, 0) }, null],
    [{ replicas: 'none', disk: 'local' }, ['waitaof 1 0 100'], { waitaof: disks(0, 9) }, disk],
    [{ disk: 'local' }, ['wait 1 100', 'waitaof 1 0 100'], { waitaof: disks(1, 0) }, null],
    [
      { replicas: 4, disk: 'local' },
      ['wait 4 100', 'waitaof 1 0 100'],
      { waitaof: disks(1, 0) },
      '1 of 4 replicas had it within 100 ms',
    ],
    [{ replicas: 2, disk: 'replicas' }, ['waitaof 1 2 100'], { waitaof: disks(1, 2) }, null],
    [
      { replicas: 2, disk: 'replicas' },
      ['waitaof 1 2 100'],
      { waitaof: disks(1, 1) },
      '1 of 2 replicas had it within 100 ms',
    ],
    [{ replicas: 2, disk: 'replicas' }, ['waitaof 1 2 100'], { waitaof: disks(0, 2) }, disk],
  ]
  for (const [wait, question, says, trouble] of cases) {
    const { server, store, asked, waited } = await waiting(t, wait, { waitaof: disks(1, 1) })
    Object.assign(server.says, says)
    server.commands.splice(0)
    if (trouble === null) t.match(await claim(store), { done: true })
    else await t.rejects(claim(store), unsatisfied(trouble))
    t.strictSame(asked().slice(1), question)
    t.strictSame(waited, [trouble === null])
  }
})

void t.test('a marker that is refused fails only the claims of its shard', async (t) => {
  const { server, store, asked } = await waiting(t, {}, { set: null, wait: null })
  // So that one round has all of them: they wait for the first one's.
  const first = claim(store, idIn(9))
  await until(() => asked().length === 2)
  const claims = [1, 2, 1].map((shard) => claim(store, idIn(shard)))
  await until(() => server.asked.filter((name) => name === 'put').length === 4)
  await store.ping()
  server.says['set'] = ([, key]) => (key === KEYS.marker(1) ? '-TRYAGAIN moving\r\n' : OK)
  server.says['wait'] = int(1)
  server.write(OK + int(1))
  const refused = { reason: unsatisfied('Redis refuses: TRYAGAIN moving') }
  t.match(await Promise.allSettled([first, ...claims]), [
    { status: 'fulfilled' },
    refused,
    { status: 'fulfilled' },
    refused,
  ])
  server.says['wait'] = '-ERR no\r\n'
  for (const one of await Promise.allSettled([claim(store, idIn(2)), claim(store, idIn(3))]))
    t.match(one, { reason: { ...UNREPLICATED, message: /ERR no/ } }, 'any other refusal fails all')
})

void t.test('a reply of another form is no acknowledgement', async (t) => {
  const slave = array(bulk('slave'), int(0), array(int(0)))
  const cases: [Partial<Wait>, Says, RegExp?][] = [
    [{}, { wait: OK }],
    [{}, { set: '+QUEUED\r\n' }],
    [{}, { set: '-OOM command not allowed\r\n' }, /Redis is full/],
    [{ disk: 'local' }, { waitaof: int(1) }],
    [{ disk: 'local' }, { waitaof: array(int(1)) }],
    [{ disk: 'local' }, { waitaof: array(int(1), '+x\r\n') }],
    [{ replicas: 'all' }, { role: int(1) }],
    [{ replicas: 'all' }, { role: slave }],
    [{ replicas: 'all' }, { role: array(bulk('master'), int(0), int(1)) }],
  ]
  for (const [wait, says, message = /replies do not match|not connected/] of cases) {
    const { server, store } = await waiting(t, wait, { waitaof: disks(1, 1) })
    Object.assign(server.says, says)
    const claims = [claim(store, idIn(1)), claim(store, idIn(2))]
    for (const one of await Promise.allSettled(claims)) t.match(one, { reason: { ...UNREPLICATED, message } })
  }
})

void t.test('a round takes as long as its waits, and no longer', async (t) => {
  const clock = frozenClock(t)
  const { server, store, asked } = await waiting(t, { timeout: 200 }, { wait: null }, 60)
  const claiming = claim(store)
  const isOver = settling(claiming)
  await clock.until(() => asked().length === 2)
  await clock.pass(400)
  t.notOk(isOver())
  server.write(int(1))
  await claiming
  const late = t.rejects(claim(store), { ...UNREPLICATED, message: /timed out/ })
  await clock.until(() => asked().length === 4)
  await clock.pass(460)
  await late
})

void t.test('R06 another process than that of the claim acknowledges nothing', async (t) => {
  const runIds = ['abc', 'def', '', 'abc']
  const { server, store, asked, waited } = await waiting(
    t,
    {},
    { 'info server': () => bulk(`run_id:${runIds.shift()}\r\n`) },
  )
  for (const why of ['another', 'one without a name'])
    await t.rejects(
      claim(store),
      {
        ...UNREPLICATED,
        message:
          /a second connection to 127.0.0.1:\d+ reaches a different process from the one that takes the claims/,
      },
      why,
    )
  t.strictSame(asked(), [])
  t.match(await claim(store), { done: true }, 'the next claim tries again')
  server.says['info server'] = '-NOPERM info\r\n'
  server.sockets.at(-1)?.destroy()
  await until(() => server.sockets.at(-1)?.destroyed === true)
  await until(() =>
    claim(store).then(
      () => false,
      (error) => /reaches a different process/.test((error as Error).message),
    ),
  )
  t.match(waited.slice(0, 3), [false, false, true])
  const unnamed = await waiting(t, {}, { 'info server': '-NOPERM info\r\n' })
  await t.rejects(claim(unnamed.store), unsatisfied('INFO does not say which process takes the claims'))
})

void t.test('a second connection that is refused, or ends, is opened again for the next claim', async (t) => {
  const server = await scripted(t)
  await using front = await relay(server.port)
  const { store } = await open(t, `redis://127.0.0.1:${front.port}`, { wait: WAIT })
  front.accept = false
  await t.rejects(claim(store), {
    ...UNREPLICATED,
    message: /^store\.wait is not satisfied: Redis is not connected: /,
  })
  front.accept = true
  t.match(await claim(store), { done: true })
  server.says['wait'] = null
  const claiming = claim(store)
  await until(() => server.asked.filter((name) => name === 'wait').length === 2)
  server.says['wait'] = int(1)
  server.sockets.at(-1)?.destroy()
  await t.rejects(claiming, { ...UNREPLICATED, message: /Connection is closed/ })
  const { length } = server.sockets
  t.match(await claim(store), { done: true })
  t.equal(server.sockets.length, length + 1)
})

void t.test('W05 a claim whose connection ends while it waits is rejected', async (t) => {
  const { server, store, waited, events } = await waiting(t, {}, { wait: null })
  const [first] = server.sockets
  const claiming = claim(store)
  await until(() => server.asked.includes('wait'))
  const second = server.sockets.at(-1)
  first?.destroy()
  await until(() => events.length >= 2)
  second?.write(int(1))
  await t.rejects(claiming, unsatisfied('the connection of the claim has ended'))
  server.says['wait'] = int(1)
  await until(() =>
    claim(store).then(
      ({ done }) => done,
      () => false,
    ),
  )
  t.strictSame([waited[0], waited.at(-1)], [false, true])
  await until(() => isLeft({ sockets: [second as NonNullable<typeof second>] }))
  // It ends before the second one is there.
  const early = await waiting(t)
  const { sockets, says } = early.server
  let greeting: Socket | undefined
  says['info server'] = (_, socket) => {
    greeting = socket
    return null
  }
  const rejected = t.rejects(claim(early.store), unsatisfied('the connection of the claim has ended'))
  await until(() => greeting !== undefined)
  const other = greeting
  sockets[0]?.destroy()
  await until(() => early.events.length === 2)
  other?.write(bulk('run_id:abc'))
  await rejected
})

void t.test('a claim whose reply comes while the store closes connects to nothing', async (t) => {
  const { server, store } = await waiting(t, {}, { put: null })
  const rejected = t.rejects(claim(store), UNREPLICATED)
  await until(() => server.asked.includes('put'))
  const closed = store.close()
  const [done = '', now = '', ...stamps] = DONE
  server.write(array(now, done, ...stamps, int(1)))
  await Promise.all([rejected, closed])
  t.equal(server.sockets.length, 1)
})

void t.test('all replicas are those that are connected or may be promoted, one at least', async (t) => {
  const clock = frozenClock(t)
  let has = 3
  let asks = 0
  let nodes: string | null = ''
  const replicas = (count: number) =>
    bulk(['a 1 myself,master - 0', ...Array.from({ length: count }, (_, n) => `${n} 1 slave a 0`)].join('\n'))
  const { server, store } = await (async () => {
    const server = await scripted(t, {
      wait: ([, count]) => int(Math.min(Number(count), has)),
      role: master(1),
      'cluster nodes': () => {
        asks++
        return nodes
      },
    })
    server.says['cluster slots'] = slots([0, LAST_SLOT, server.port])
    return {
      server,
      ...(await open(t, server.cluster, { wait: { ...WAIT, replicas: 'all' }, timeoutMs: 60_000 })),
    }
  })()
  const waits = () => server.commands.flatMap(([name, count]) => (name === 'wait' ? [Number(count)] : []))
  nodes = '-ERR nobody knows\r\n'
  await t.rejects(claim(store), { ...UNREPLICATED, message: /nobody knows/ })
  nodes = replicas(3)
  server.commands.splice(0)
  await claim(store)
  t.strictSame(waits(), [3])
  nodes = '-ERR nobody knows\r\n'
  asks = 0
  await claim(store)
  t.equal(asks, 0, 'it is known for a second')
  await clock.pass(1001)
  await claim(store)
  t.strictSame([asks, waits().at(-1)], [1, 3], 'and for longer if it cannot be read')
  has = 2
  await t.rejects(claim(store), { message: /: 2 of 3 replicas had it/ })
  nodes = replicas(0)
  for (const [connected, result] of [
    [2, null],
    [4, /: 2 of 4 replicas had it/],
    [0, null],
  ] as const) {
    server.says['role'] = master(connected)
    await clock.pass(1001)
    if (result === null) t.match(await claim(store), { done: true })
    else await t.rejects(claim(store), { message: result })
  }
  has = 0
  await t.rejects(claim(store), { message: /: 0 of 1 replicas had it/ })
})

void t.test('through Sentinel, all replicas are those that the Sentinels know', async (t) => {
  const says: Says = { wait: ([, count]) => int(Math.min(Number(count), 1)) }
  const server = await scripted(t, says)
  const sentinelOf = (...replicas: string[]) =>
    scripted(t, {
      'sentinel master': words('name', 'pay', 'config-epoch', '1'),
      'sentinel get-master-addr-by-name': words('127.0.0.1', String(server.port)),
      'sentinel replicas': words(...replicas),
    })
  const [most, fewer] = [await sentinelOf('one', 'two'), await sentinelOf('one')]
  const wait = { ...WAIT, replicas: 'all' } as const
  const url = `redis+sentinel://127.0.0.1:${most.port},127.0.0.1:${fewer.port}/pay`
  const { store } = await open(t, url, { wait })
  await t.rejects(claim(store), unsatisfied('1 of 2 replicas had it within 100 ms'))
  most.says['sentinel replicas'] = OK
  fewer.says['sentinel replicas'] = OK
  const other = await open(t, url, { wait })
  await t.rejects(claim(other.store), { ...UNREPLICATED, message: /replies do not match/ })
  const alone = await open(t, server.url, { wait })
  t.match(await claim(alone.store), { done: true }, 'nothing promotes the replicas of one server')
})

void t.test('the traits say why claims are refused, and no claim has waited', async (t) => {
  const { server, store, waited } = await waiting(t)
  const refusals = async (of: Store) => (await of.traits()).refusals
  t.strictSame(await refusals(store), [])
  server.says['wait'] = int(0)
  t.strictSame(await refusals(store), [
    'store.wait is not satisfied: 0 of 1 replicas had it within 100 ms: claims are answered 503.',
  ])
  t.strictSame(waited, [])
  await store.close()
  await until(() => isLeft(server))
})

void t.test('only a server that can wait for disks is used for that', async (t) => {
  const cases: [Wait['disk'], string, RegExp | null][] = [
    ['local', disks(0, 0), null],
    ['none', '-ERR unknown command\r\n', null],
    ['local', OK, null],
    [
      'local',
      '-ERR Unknown command\r\n',
      /^store.wait.disk: found local, and the server has no WAITAOF; allowed: Redis 7.2 or later, or Valkey, or disk: none$/,
    ],
    [
      'replicas',
      '-ERR appendonly is disabled\r\n',
      /^store.wait.disk: found replicas, and appendonly is off on the server; allowed: appendonly yes, or disk: none$/,
    ],
    [
      'local',
      '-NOPERM no\r\n',
      /and the server refuses WAITAOF \(NOPERM no\); allowed: a user with \+waitaof, or disk: none$/,
    ],
  ]
  for (const [disk, waitaof, message] of cases)
    for (const kind of ['url', 'cluster'] as const) {
      const server = await scripted(t, { waitaof })
      const opening = open(t, server[kind], { wait: { ...WAIT, disk } })
      if (message === null) {
        await opening
        continue
      }
      await t.rejects(opening, { ...NOT_APPLIED, message })
      await until(() => isLeft(server))
    }
  for (const url of ['redis://127.0.0.1:1', 'redis+cluster://127.0.0.1:1']) {
    const { store } = await open(t, url, { wait: { ...WAIT, disk: 'local' } })
    await t.rejects(claim(store), NOT_APPLIED, 'one that is down is opened')
  }
})

void t.test('replicationText says what claims wait for', async (t) => {
  for (const [wait, whom] of [
    [{}, '1 replica'],
    [{ replicas: 'all' }, 'every known replica'],
    [{ replicas: 2, disk: 'local' }, '2 replicas and the server’s disk'],
    [{ replicas: 'none', disk: 'local' }, 'the server’s disk'],
    [{ disk: 'replicas' }, 'the disks of the server and of 1 replica'],
  ] as const)
    t.equal(replicationText({ ...WAIT, ...wait }), `claims wait for ${whom}, up to 100 ms`)
})
