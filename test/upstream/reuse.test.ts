/** When a connection to the upstream is used again, and how long it is kept for that (contract §15). */
import { once } from 'node:events'
import { createServer } from 'node:http'
import type { AddressInfo, Socket } from 'node:net'
import t, { type Test } from 'tap'
import { Habits } from '../../src/upstream/habits.ts'
import type { Upstream } from '../../src/upstream/pool.ts'
import { proxyBefore, scriptedPeer, values } from '../support/exchange.ts'
import { get, post, rawRequest } from '../support/raw.ts'
import { Asked, opened as openedFor } from './support.ts'

const OK = 'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok'
const BARE = 'HTTP/1.1 204 No Content\r\n\r\n'
const KEPT = { keepAlive: 60_000 }

async function opened(t: Test, url: string, more: Parameters<typeof openedFor>[1] = KEPT): Promise<Upstream> {
  const upstream = await openedFor(url, more)
  t.teardown(() => upstream.close())
  return upstream
}

async function closed(socket: Socket | undefined): Promise<void> {
  if (socket?.closed === false) await once(socket, 'close')
}

void t.test('Y22 late bytes of an answer without a body are not the next answer', async (t) => {
  const chunked = ['Transfer-Encoding: chunked\r\n', '2\r\nno\r\n0\r\n\r\n'] as const
  const counted = ['Content-Length: 38\r\n', 'HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n'] as const
  for (const status of [204, 205, 304])
    for (const [line, late] of [chunked, counted]) {
      await using peer = await scriptedPeer((socket, _request, n) => {
        if (n > 1) return void socket.write(OK)
        socket.write(`HTTP/1.1 ${status} x\r\n${line}\r\n`)
        setImmediate(() => setImmediate(() => socket.write(late)))
      })
      await using proxy = await proxyBefore(peer, { upstream: 'connections: 1, keepAlive: 60s' })
      const [first, second] = [
        await rawRequest(proxy.port, post('/p', 'a', '{}')),
        await rawRequest(proxy.port, post('/p', 'b', '{}')),
      ]
      t.strictSame(
        [first.status, first.body.length, second.status, second.body.toString()],
        [status, 0, 200, 'ok'],
      )
      const replay = await rawRequest(proxy.port, post('/p', 'a', '{}'))
      t.strictSame([replay.status, values(replay, 'idempotent-replayed')], [status, ['true']])
      t.equal(peer.requests.length, 2)
      t.equal(peer.sockets.length, 2)
    }
  // HEAD is not protected.
  for (const [line, late] of [chunked, counted]) {
    await using peer = await scriptedPeer((socket, request) => {
      if (!request.startsWith('HEAD')) return void socket.write(OK)
      socket.write(`HTTP/1.1 200 x\r\n${line}\r\n`)
      setImmediate(() => setImmediate(() => socket.write(late)))
    })
    const { dispatcher } = await opened(t, peer.url)
    t.equal(await new Asked(dispatcher, { method: 'HEAD' }).end, '200 ')
    t.equal(await new Asked(dispatcher).end, '200 ok')
    t.equal(peer.sockets.length, 2)
  }
})

void t.test('§15.26 after a first unasked byte, only an explicit end keeps a connection', async (t) => {
  for (const unasked of ['behind the answer', 'in a segment of its own', 'before the answer']) {
    await using peer = await scriptedPeer((socket, request) => {
      const target = request.split(' ')[1]
      const answer = target === '/bare' ? BARE : OK
      if (target !== '/odd') return void socket.write(answer)
      if (unasked === 'behind the answer') return void socket.write(`${OK}\r\n`)
      socket.write(answer)
      setImmediate(() => setImmediate(() => socket.write(OK)))
    })
    const { dispatcher } = await opened(t, peer.url, { ...KEPT, connections: 2 })
    const ask = (target: string): Promise<string> => new Asked(dispatcher, { path: target }).end
    const sockets = (): number => peer.sockets.filter((socket) => !socket.closed).length
    if (unasked === 'before the answer') {
      // Between two answers: it may belong to either, and only its own connection ends.
      await using other = await scriptedPeer(
        (socket, _request, n) => void socket.write(n === 1 ? `\r\n${OK}` : OK),
      )
      const { dispatcher: own } = await opened(t, other.url)
      for (let n = 0; n < 3; n++) t.equal(await new Asked(own).end, '200 ok')
      t.equal(other.sockets.length, 2)
      continue
    }
    for (let n = 0; n < 3; n++) t.equal(await ask('/bare'), '204 ')
    t.equal(peer.sockets.length, 1, 'its status ends it')
    // Two at a time: one of them is idle after a bare answer when the byte comes on the other.
    const both = [ask('/bare'), ask('/odd')]
    t.strictSame(await Promise.all(both), ['204 ', '200 ok'])
    for (const socket of peer.sockets) await closed(socket)
    t.equal(sockets(), 0, 'neither is used again')
    const before = peer.sockets.length
    for (let n = 0; n < 3; n++) t.equal(await ask('/counted'), '200 ok')
    t.equal(peer.sockets.length, before + 1, 'kept where the end is explicit')
    for (let n = 0; n < 3; n++) t.equal(await ask('/bare'), '204 ')
    t.equal(peer.sockets.length, before + 3, 'and nowhere else')
  }
})

void t.test('§15.26 the pools of one upstream share what was seen of it', async (t) => {
  await using peer = await scriptedPeer(
    (socket, request) => void socket.write(request.startsWith('GET /odd') ? `${OK}x` : BARE),
  )
  await using proxy = await proxyBefore(peer, { upstream: 'connections: 1, keepAlive: 60s' })
  t.equal((await rawRequest(proxy.port, get('/odd'))).status, 200)
  for (const key of ['a', 'b']) t.equal((await rawRequest(proxy.port, post('/p', key, '{}'))).status, 204)
  t.equal(peer.sockets.length, 3)
})

t.test('§15.15 an idle connection is kept for keepAlive, or half of what is announced', async (t) => {
  for (const [keepAlive, line, isKept] of [
    [60_000, 'X: y', true],
    [60_000, 'Keep-Alive: max=5, timeout = 120', true],
    [60_000, 'Keep-Alive: timeout=0', false],
    [0, 'X: y', false],
    [0, 'Keep-Alive: timeout=5', false],
  ] as const) {
    await using peer = await scriptedPeer(
      (socket) => void socket.write(`HTTP/1.1 200 OK\r\n${line}\r\nContent-Length: 2\r\n\r\nok`),
    )
    const { dispatcher } = await opened(t, peer.url, { keepAlive })
    for (let i = 0; i < 2; i++) t.equal(await new Asked(dispatcher).end, '200 ok')
    t.equal(peer.sockets.length, isKept ? 1 : 2, `${keepAlive}, ${line}`)
  }
  for (const [keepAlive, line] of [
    [60_000, 'Keep-Alive: timeout=1'],
    [500, 'Keep-Alive: timeout=60'],
    [500, 'X: y'],
  ] as const) {
    await using peer = await scriptedPeer(
      (socket) => void socket.write(`HTTP/1.1 200 OK\r\n${line}\r\nContent-Length: 2\r\n\r\nok`),
    )
    const { dispatcher } = await opened(t, peer.url, { keepAlive })
    t.equal(await new Asked(dispatcher).end, '200 ok')
    const since = performance.now()
    await closed(peer.sockets[0])
    t.ok(performance.now() - since > 300, `${line}: not at once`)
  }
})

void t.test('§15.15 half of the shortest idle time that the upstream allowed, for ten minutes', (t) => {
  const now = performance.now
  let clock = 0
  performance.now = () => clock
  t.teardown(() => {
    performance.now = now
  })
  const habits = new Habits(1000)
  t.equal(habits.keepFor(null), 1000)
  habits.closedAfter(19)
  t.equal(habits.keepFor(null), 1000, 'a restart')
  habits.closedAfter(4000)
  t.equal(habits.keepFor(null), 1000)
  habits.closedAfter(800)
  t.equal(habits.keepFor(null), 400)
  habits.closedAfter(900)
  t.equal(habits.keepFor(null), 400)
  t.equal(habits.keepFor('timeout=60'), 400)
  clock = 599_999
  t.equal(habits.keepFor(null), 400)
  clock = 600_000
  t.equal(habits.keepFor(null), 1000)
  habits.closedAfter(900)
  t.equal(habits.keepFor(null), 450)
  t.end()
})

void t.test('§15.15 an upstream that closes idle connections is forestalled from then on', async (t) => {
  for (const how of ['end', 'resetAndDestroy'] as const) {
    await using peer = await scriptedPeer((socket, _request, n) => {
      socket.write(OK)
      if (n === 1) setTimeout(() => socket[how](), 40)
    })
    const { dispatcher } = await opened(t, peer.url)
    t.equal(await new Asked(dispatcher).end, '200 ok')
    await closed(peer.sockets[0])
    // Without an end from here, the proxy would keep it for a minute.
    for (let n = 1; n <= 2; n++) {
      t.equal(await new Asked(dispatcher).end, '200 ok')
      await closed(peer.sockets[n])
    }
    t.equal(peer.sockets.length, 3)
  }
})

void t.test('§15.15 a kept connection that ends instead of answering teaches the same', async (t) => {
  await using peer = await scriptedPeer(
    (socket, _request, n) => void (n === 2 ? socket.end() : socket.write(OK)),
  )
  const { dispatcher } = await opened(t, peer.url)
  t.equal(await new Asked(dispatcher).end, '200 ok')
  await new Promise((resolve) => setTimeout(resolve, 40))
  t.equal(await new Asked(dispatcher).end, 'broken: the upstream closed the connection', 'sent once')
  t.equal(await new Asked(dispatcher).end, '200 ok')
  await closed(peer.sockets[1])
  t.equal(peer.requests.length, 3)
})

void t.test('§15.15 a connection past its time is not used, even if no timer could run', async (t) => {
  await using peer = await scriptedPeer((socket) => void socket.write(OK))
  const { dispatcher } = await opened(t, peer.url, { keepAlive: 50 })
  t.equal(await new Asked(dispatcher).end, '200 ok')
  await new Promise((resolve) => setImmediate(() => setImmediate(resolve)))
  const since = performance.now()
  while (performance.now() - since < 60);
  t.equal(await new Asked(dispatcher).end, '200 ok')
  t.equal(peer.sockets.length, 2)
})

t.test('Y14 an upstream that closes idle connections after 2 s, asked every 2 s: no 502', async (t) => {
  const server = createServer((request, response) => {
    // Unannounced.
    response.setHeader('Connection', 'keep-alive')
    request.resume().on('end', () => response.writeHead(201).end('ok'))
  })
  server.keepAliveTimeout = 2000
  server.keepAliveTimeoutBuffer = 0
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  await using proxy = await proxyBefore({ url: `http://127.0.0.1:${port}` })
  const statuses = await Promise.all(
    Array.from({ length: 21 }, async (_, n) => {
      const ask = async (key: string) =>
        (await rawRequest(proxy.port, post('/p', `${key}-${n}`, '{}'))).status
      const first = await ask('first')
      await new Promise((resolve) => setTimeout(resolve, 1900 + 10 * n))
      return [first, await ask('second')]
    }),
  )
  t.strictSame(new Set(statuses.flat()), new Set([201]))
  server.closeAllConnections()
  server.close()
})
