/** The same client over TLS: what differs is the connection. */
import { once } from 'node:events'
import { type AddressInfo, createServer as createTcp, type Socket } from 'node:net'
import { createServer, type TLSSocket } from 'node:tls'
import t, { type Test } from 'tap'
import type { Dispatcher } from 'undici'
import type { Upstream } from '../../src/upstream/pool.ts'
import { certificate } from '../support/certificates.ts'
import { problemOf, proxyBefore } from '../support/exchange.ts'
import { post, rawRequest } from '../support/raw.ts'
import { wholeRequest } from '../support/upstream.ts'
import { Asked, onBoth, opened, until } from './support.ts'

const OK = 'HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok'
const cert = certificate('IP:127.0.0.1')
t.teardown(() => cert[Symbol.dispose]())

interface Peer {
  readonly url: string
  readonly requests: string[]
  readonly sockets: TLSSocket[]
  /** Whether each connection resumed a session. */
  readonly resumed: boolean[]
}

async function peerOf(t: Test, answer: (socket: Socket, n: number) => void): Promise<Peer> {
  const peer = { requests: [] as string[], sockets: [] as TLSSocket[], resumed: [] as boolean[] }
  const server = createServer({ cert: cert.cert, key: cert.key }, (socket) => {
    peer.sockets.push(socket.on('error', () => {}))
    peer.resumed.push(socket.isSessionReused())
    const next = (): void =>
      void wholeRequest(socket).then((request) => {
        peer.requests.push(request)
        answer(socket, peer.requests.length)
        next()
      })
    next()
  }).listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => {
    for (const socket of peer.sockets) socket.destroy()
    server.close()
  })
  return { ...peer, url: `https://127.0.0.1:${(server.address() as AddressInfo).port}` }
}

async function over(t: Test, { url }: Peer, keepAlive: number): Promise<Upstream> {
  const tls = { ca: cert.certFile, cert: null, key: null, servername: null }
  const upstream = await opened(url, { tls, keepAlive })
  t.teardown(() => upstream.close())
  return upstream
}

onBoth('§15.15 connections are kept, and the next one resumes their session', async (t) => {
  const peer = await peerOf(t, (socket) => void socket.write(OK))
  const { dispatcher } = await over(t, peer, 200)
  for (let n = 0; n < 3; n++) t.equal(await new Asked(dispatcher).end, '201 ok')
  t.equal(peer.sockets.length, 1)
  const [first] = peer.sockets
  if (first?.closed === false) await once(first, 'close')
  t.equal(await new Asked(dispatcher).end, '201 ok')
  t.strictSame(peer.resumed, [false, true])
})

onBoth(
  '§15.20 after a renewal no request begins on a former connection, nor resumes its session',
  async (t) => {
    let finish = (): void => {}
    const peer = await peerOf(t, (socket, n) => {
      if (n === 2) finish = () => void socket.write(OK)
      else socket.write(OK)
    })
    const upstream = await over(t, peer, 60_000)
    const renew = (): void => upstream.renew({ ca: Buffer.from(cert.cert) })
    t.equal(await new Asked(upstream.dispatcher).end, '201 ok')
    renew()
    const running = new Asked(upstream.dispatcher)
    await until(() => peer.requests.length === 2)
    renew()
    finish()
    t.equal(await running.end, '201 ok')
    t.equal(await new Asked(upstream.dispatcher).end, '201 ok')
    t.strictSame(peer.resumed, [false, false, false])
  },
)

void t.test('§15.14 §15.26 what is carried, refused and used again is the same', async (t) => {
  const answers = [
    `HTTP/1.1 201 Created\nX: ${'x'.repeat(40_000)}\nContent-Length: 2\n\nok`,
    'HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n',
    'HTTP/1.1 201 Created\r\n\r\n',
    `HTTP/1.1 201 Created\r\nX: ${'x'.repeat(70_000)}\r\n\r\n`,
    'HTTP/1.1 201 Created\r\nContent-Length: 9\r\n\r\nok',
  ]
  const peer = await peerOf(t, (socket, n) => {
    socket.write(answers[n - 1] ?? OK)
    if (n === 2) setImmediate(() => setImmediate(() => socket.write('0\r\n\r\n')))
    if (n === 3 || n === 5) socket.end('ok')
  })
  await using proxy = await proxyBefore(peer, { upstream: `keepAlive: 60s, tls: { ca: "${cert.certFile}" }` })
  const ask = (key: string) => rawRequest(proxy.port, post('/p', key, '{}'))
  t.equal(
    (await ask('1')).headers.some((value) => value.length === 40_000),
    true,
  )
  t.equal((await ask('2')).status, 204)
  t.equal((await ask('3')).body.toString(), 'ok', 'ended by its connection')
  t.match(problemOf(await ask('4')).detail, /the head of the response is over limits\.responseHead/)
  t.match(problemOf(await ask('5')).detail, /closed the connection/)
  for (const key of ['6', '7']) t.equal((await ask(key)).status, 201)
  t.strictSame([peer.requests.length, peer.sockets.length], [7, 6])
})

onBoth('a paused answer goes on where it was, and requests of any size arrive whole', async (t) => {
  const size = 3 * 1024 ** 2
  const peer = await peerOf(t, (socket) => {
    socket.write(`HTTP/1.1 200 OK\r\nContent-Length: ${size}\r\n\r\n`)
    socket.write('x'.repeat(size))
  })
  const { dispatcher } = await over(t, peer, 1000)
  for (const body of [null, Buffer.alloc(100, 'a'), Buffer.alloc(500_000, 'b')]) {
    class Slow extends Asked {
      override onResponseData(controller: Dispatcher.DispatchController, chunk: Buffer): void {
        super.onResponseData(controller, chunk)
        controller.pause()
        setImmediate(() => controller.resume())
      }
    }
    const text = await new Slow(dispatcher, { method: 'POST', body }).end
    t.equal(text.length, '200 '.length + size)
    t.equal(peer.requests.at(-1)?.endsWith(`\r\n\r\n${body?.toString() ?? ''}`), true)
  }
  t.equal(peer.sockets.length, 1)
})

onBoth('U01 without a handshake nothing was sent', async (t) => {
  for (const how of ['destroy', 'resetAndDestroy', 'end'] as const) {
    const server = createTcp((socket) => void socket.on('error', () => {})[how]()).listen(0, '127.0.0.1')
    await once(server, 'listening')
    const url = `https://127.0.0.1:${(server.address() as AddressInfo).port}`
    const { dispatcher } = await over(t, { url } as Peer, 1000)
    t.match(await new Asked(dispatcher).end, /^not sent/, how)
    server.close()
  }
})

onBoth('a name is resolved, told in the handshake and verified', async (t) => {
  using named = certificate('DNS:localhost')
  const told: unknown[] = []
  // Not on ::1, which the name may stand for first.
  const server = createServer({ cert: named.cert, key: named.key }, (socket) => {
    told.push(socket.servername)
    void wholeRequest(socket).then(() => socket.write(OK))
  }).listen(0, '127.0.0.1')
  await once(server, 'listening')
  const tls = { ca: named.certFile, cert: null, key: null, servername: null }
  const upstream = await opened(`https://localhost:${(server.address() as AddressInfo).port}`, { tls })
  t.teardown(() => upstream.close())
  t.equal(await new Asked(upstream.dispatcher).end, '201 ok')
  t.strictSame(told, ['localhost'])
  server.close()
})
