/** What undici's own pool (`http: node`) promises less than `http1.ts`, by name (docs/adr/0128). All else is tested on both. */
import type { Socket } from 'node:net'
import t, { type Test } from 'tap'
import type { Upstream } from '../../src/upstream/pool.ts'
import { answering, scriptedPeer } from '../support/exchange.ts'
import { tcpStub } from '../support/upstream.ts'
import { Asked, opened as openedFor, until } from './support.ts'

const OK = 'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok'

async function opened(t: Test, url: string, more = {}): Promise<Upstream> {
  const upstream = await openedFor(url, more, 'node')
  t.teardown(() => upstream.close())
  return upstream
}

void t.test('§15.14 it refuses more, and says so', async (t) => {
  for (const [what, bytes] of [
    ['bare LF', 'HTTP/1.1 200 OK\nContent-Length: 2\n\nok'],
    ['equal lengths', 'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok'],
    [
      'a coding beside a length',
      'HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n',
    ],
    [
      'blanks after a chunk’s size',
      'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2 \r\nok\r\n0\r\n\r\n',
    ],
  ] as const) {
    await using peer = await answering(bytes)
    const { dispatcher } = await opened(t, peer.url)
    t.match(await new Asked(dispatcher).end, /^broken: the response is malformed/, what)
  }
})

t.test('§15.14 malformed transfer codings are no coding: the answer ends with its connection', async (t) => {
  await using peer = await scriptedPeer((socket) => {
    socket.end('HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\n2\r\nok\r\n0\r\n\r\n')
  })
  const { dispatcher } = await opened(t, peer.url)
  t.equal(await new Asked(dispatcher).end, '200 2\r\nok\r\n0\r\n\r\n')
})

void t.test('§15.26 a byte that came unasked ends its own connection only', async (t) => {
  const sockets: Socket[] = []
  await using peer = await scriptedPeer((socket, _request, n) => {
    sockets.push(socket)
    if (n === 2) for (const each of sockets) each.write('HTTP/1.1 204 No Content\r\n\r\n')
  })
  const { dispatcher } = await opened(t, peer.url, { connections: 2, keepAlive: 60_000 })
  const both = [new Asked(dispatcher), new Asked(dispatcher)]
  for (const { end } of both) t.equal(await end, '204 ')
  sockets[0]?.write(OK)
  await until(() => sockets[0]?.closed === true)
  t.equal(sockets[1]?.closed, false, 'though nothing but its status ended the answer before')
})

void t.test('§15.15 it keeps a connection for all but 2 s of what is announced, not for half', async (t) => {
  await using peer = await answering(OK.replace('\r\n', '\r\nKeep-Alive: timeout=3\r\n'))
  const { dispatcher } = await opened(t, peer.url, { keepAlive: 60_000 })
  for (let n = 0; n < 2; n++) t.equal(await new Asked(dispatcher).end, '200 ok')
  t.equal(peer.sockets.length, 1)
})

t.test('U07 after an early answer the next request waits behind the rest of the one before', async (t) => {
  await using peer = await tcpStub((socket) => {
    socket.once('data', () => {
      socket.pause()
      socket.write(OK)
    })
  })
  const { dispatcher } = await opened(t, peer.url)
  const body = Buffer.alloc(16 * 1024 * 1024)
  t.equal(await new Asked(dispatcher, { method: 'POST', body }).end, '200 ok')
  const next = new Asked(dispatcher, { headersTimeout: 100 })
  t.match(await next.end, /^broken/)
  t.equal(peer.sockets.length, 1)
})

void t.test('it sends an absolute target, a Connection line and a length without a body', async (t) => {
  await using peer = await answering(OK)
  const { dispatcher } = await opened(t, peer.url)
  for (const odd of [
    { path: 'http://b/' },
    { headers: ['Connection', 'x'] },
    { headers: ['Content-Length', '1'] },
  ])
    t.equal(await new Asked(dispatcher, odd).end, '200 ok')
  t.equal(peer.requests.length, 3)
})
