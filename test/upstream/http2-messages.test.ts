/** HTTP/2 to the upstream: requests and answers of every form. */
import { once } from 'node:events'
import { createSecureServer, createServer, type ServerHttp2Session, type ServerHttp2Stream } from 'node:http2'
import type { AddressInfo } from 'node:net'
import { Readable } from 'node:stream'
import { createServer as createTls, type Server, type TLSSocket } from 'node:tls'
import t, { type Test } from 'tap'
import type { Dispatcher } from 'undici'
import { Budget } from '../../src/runtime/limits.ts'
import { forwarder } from '../../src/upstream/forward.ts'
import type { Upstream } from '../../src/upstream/pool.ts'
import type { Forward } from '../../src/upstream/port.ts'
import { certificate } from '../support/certificates.ts'
import {
  ACK,
  END_HEADERS,
  END_STREAM,
  fields,
  frame,
  frameUpstream,
  HEADERS,
  SETTINGS,
} from '../support/frames.ts'
import { data, forwarding, head, ok, opened, proofOf, REQUEST, saying } from './http2-support.ts'
import { Asked, opened as openedFor, until } from './support.ts'

interface Node2 {
  readonly url: string
  readonly sessions: ServerHttp2Session[]
}

/** Node's own server. */
async function nodeUpstream(
  t: Test,
  serve: (
    stream: ServerHttp2Stream,
    headers: Readonly<Record<string, unknown>>,
    raw: readonly string[],
  ) => unknown,
): Promise<Node2> {
  const sessions: ServerHttp2Session[] = []
  const server = createServer()
  server.on('session', (session) => void sessions.push(session.on('error', () => {})))
  server.on('stream', (stream, headers, _flags, raw) => {
    stream.on('error', () => {})
    serve(stream, headers, raw)
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => {
    for (const session of sessions) session.destroy()
    server.close()
  })
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, sessions }
}

async function bodyOf(stream: ServerHttp2Stream): Promise<Buffer> {
  const chunks: Buffer[] = []
  for await (const chunk of stream) chunks.push(chunk as Buffer)
  return Buffer.concat(chunks)
}

void t.test('P01 lines and bodies of any size arrive as they are, and answers too', async (t) => {
  const seen: { raw: readonly string[]; body: Buffer }[] = []
  const { url } = await nodeUpstream(t, async (stream, _headers, raw) => {
    const body = await bodyOf(stream)
    seen.push({ raw, body })
    stream.respond(
      [
        ':status',
        '201',
        'set-cookie',
        'a=1',
        'x-latin',
        'caf\xe9',
        'set-cookie',
        'b=2',
        'x-empty',
        '',
      ] as never,
      { waitForTrailers: true },
    )
    stream.once('wantTrailers', () => stream.sendTrailers({ 'x-sum': '7', 'x-twice': ['a', 'b'] }))
    stream.end(body)
  })
  const forward = await forwarding(t, url)
  for (const size of [0, 2, 65_536, 5 * 1024 * 1024]) {
    const body = Buffer.alloc(size, 'x')
    let isTaken = false
    const result = await forward({
      ...REQUEST,
      headers: [
        'Host',
        'a.test:8',
        'X-A',
        '1',
        'Cookie',
        'a=b',
        'x-a',
        '2',
        'cookie',
        'c=d',
        'TE',
        'trailers',
      ],
      body,
      onTaken: () => {
        isTaken = true
      },
    })
    t.equal(isTaken, true)
    if (result.proof !== 'responded') throw new Error(result.proof)
    const { status, reason, headers, trailers, body: answered } = result.response
    t.strictSame([status, reason], [201, ''])
    t.equal(headers.slice(0, 8).join(), 'set-cookie,a=1,x-latin,caf\xe9,set-cookie,b=2,x-empty,')
    t.strictSame(trailers, ['x-sum', '7', 'x-twice', 'a', 'x-twice', 'b'])
    t.equal(answered.equals(body), true)
    t.equal(seen.at(-1)?.body.equals(body), true)
    const pseudo = ':method,POST,:scheme,http,:authority,a.test:8,:path,/p'
    const lines = 'x-a,1,cookie,a=b,x-a,2,cookie,c=d,te,trailers'
    t.equal(seen.at(-1)?.raw.join(), `${pseudo},${lines},content-length,${size}`)
  }
})

void t.test(
  'P01 a streamed body arrives, announced or not; one that breaks off resets its stream',
  async (t) => {
    const seen: unknown[] = []
    const { url } = await nodeUpstream(t, async (stream, headers) => {
      try {
        const { length } = await bodyOf(stream)
        seen.push([headers['content-length'], length, stream.rstCode])
        if (!stream.closed) stream.respond({ ':status': 200 }, { endStream: true })
      } catch {
        seen.push('reset')
      }
    })
    const { dispatcher } = await opened(t, url)
    const chunks = Array.from({ length: 40 }, () => Buffer.alloc(50_000))
    for (const headers of [[], ['Content-Length', '2000000']])
      t.equal(
        await new Asked(dispatcher, { method: 'POST', headers, body: Readable.from(chunks) }).end,
        '200 ',
      )
    t.strictSame(seen.splice(0), [
      [undefined, 2_000_000, 0],
      ['2000000', 2_000_000, 0],
    ])
    const broken = Readable.from([chunks[0]]) as Readable & { length?: number }
    const short = new Asked(dispatcher, {
      method: 'POST',
      headers: ['Content-Length', '60000'],
      body: broken,
    })
    t.match(await short.end, /^broken/)
    const failing = new Readable({ read() {} })
    failing.push(Buffer.from('a'))
    const asked = new Asked(dispatcher, { method: 'POST', body: failing })
    await until(() => asked.controller !== null)
    failing.destroy(new Error('gone'))
    t.equal(await asked.end, 'broken: gone')
    t.equal(await new Asked(dispatcher).end, '200 ', 'on the same connection')
  },
)

void t.test('§15.14 answers without a body, and interim ones', async (t) => {
  const { url } = await nodeUpstream(t, (stream, headers) => {
    const [, status = '', end = ''] = String(headers[':path']).split('/')
    stream.resume()
    stream.additionalHeaders({ ':status': 103, link: '</a>' })
    const length = headers[':method'] === 'HEAD' ? { 'content-length': 7 } : {}
    stream.respond({ ':status': Number(status), ...length }, { endStream: end === '' })
    if (end !== '') stream.end(end)
  })
  const forward = await forwarding(t, url)
  for (const [method, target, body] of [
    ['HEAD', '/200', ''],
    ['GET', '/204', ''],
    ['GET', '/304', ''],
    ['POST', '/205', ''],
    ['POST', '/200', ''],
    ['POST', '/422/no', 'no'],
  ] as const) {
    const result = await forward({ ...REQUEST, method, target, body: Buffer.alloc(0) })
    t.match(result, { proof: 'responded', response: { status: Number(target.slice(1, 4)) } }, target)
    t.equal(result.proof === 'responded' && result.response.body.toString(), body)
  }
})

void t.test('§15.14 content of a 205 is not read', async (t) => {
  const upstream = await saying(t, (stream) => [head(stream, [[':status', '205']]), data(stream, 'x')])
  t.equal(await proofOf(t, upstream), '205 ')
  class Leaving extends Asked {
    override onResponseStart(controller: Dispatcher.DispatchController): void {
      controller.abort(new Error('the client was answered'))
    }
  }
  const { dispatcher } = await opened(t, upstream.url)
  t.equal(await new Leaving(dispatcher).end, 'broken: the client was answered')
  t.equal(await new Asked(dispatcher).end, '205 ', 'on the same connection')
})

void t.test('§10 a head over limits.responseHead is refused, with its reason', async (t) => {
  const upstream = await saying(t, (stream) => {
    const lines = Array.from({ length: 8 }, (_, n) => [`x${n}`, 'x'.repeat(9000)] as const)
    const block = fields([[':status', '200'], ...lines])
    const parts = [0, 16_000, 32_000, 48_000, 64_000].map((at) => block.subarray(at, at + 16_000))
    return parts.map((part, n) => frame(n === 0 ? HEADERS : 9, n === 4 ? END_HEADERS : 0, stream, part))
  })
  const forward = await forwarding(t, upstream.url)
  t.match(await forward(REQUEST), {
    proof: 'unknown',
    isRefused: true,
    reason: /over limits\.responseHead \(65536 bytes\)/,
  })
})

void t.test('U01 a request that HTTP/2 does not carry is not sent', async (t) => {
  const upstream = await saying(t, (stream) => [ok(stream, END_STREAM)])
  const { dispatcher } = await opened(t, upstream.url)
  for (const wrong of [
    { path: '*' },
    { path: '/a b' },
    { method: 'CONNECT' },
    { headers: ['Connection', 'x'] },
    { headers: ['Transfer-Encoding', 'chunked'] },
    { headers: ['Host', 'a b'] },
    { headers: ['Host', 'a/b'] },
    { headers: [':path', '/other'] },
    { headers: ['X', 'a\nb'] },
  ])
    t.match(await new Asked(dispatcher, wrong).end, /^not sent: invalid/, JSON.stringify(wrong))
  t.equal(upstream.requests, 0)
  for (const dropped of ['TE', 'HTTP2-Settings', 'Proxy-Connection'])
    t.equal(await new Asked(dispatcher, { headers: [dropped, 'x'] }).end, '200 ')
  const huge = Array.from({ length: 20 }, (_, n) => [`x${n}`, 'x'.repeat(9000)]).flat()
  const forward = await forwarding(t, upstream.url)
  t.match(await forward({ ...REQUEST, headers: huge }), { proof: 'not_sent' })
  t.equal(upstream.requests, 3)
})

void t.test('L01 a slow reader of one answer delays no other on the connection', async (t) => {
  const size = 3 * 1024 * 1024
  const { url, sessions } = await nodeUpstream(t, (stream, headers) => {
    stream.respond({ ':status': 200 })
    stream.end(Buffer.alloc(headers[':path'] === '/slow' ? size : 2, 'x'))
  })
  const { dispatcher } = await opened(t, url)
  class Paused extends Asked {
    readonly begun = Promise.withResolvers<void>()
    override onResponseStart(controller: Dispatcher.DispatchController, status: number): void {
      super.onResponseStart(controller, status)
      controller.pause()
      this.begun.resolve()
    }
  }
  const slow = new Paused(dispatcher, { path: '/slow' })
  await slow.begun.promise
  for (let n = 0; n < 20; n++) t.equal(await new Asked(dispatcher).end, '200 xx')
  t.equal(slow.text, '200 ')
  slow.controller?.resume()
  t.equal((await slow.end).length, '200 '.length + size)
  t.equal(sessions.length, 1)
})

void t.test('U02 an upstream that takes no more of a body is not waited for without end', async (t) => {
  const upstream = await frameUpstream(t, { request() {} })
  const forward = await forwarding(t, upstream.url, { timeout: 200 })
  const body = Buffer.alloc(1_000_000)
  t.match(await forward({ ...REQUEST, body }), { proof: 'unknown', timedOut: true })
  t.equal(upstream.requests, 0, 'its window of 64 KiB is full')
})

void t.test('an upstream that answers without taking the body keeps no stream', async (t) => {
  const upstream = await frameUpstream(t, {
    request() {},
    head: (socket, stream) => socket.write(Buffer.concat([ok(stream), data(stream, 'no', END_STREAM)])),
    other(socket, one) {
      if (one.type === SETTINGS && one.flags !== ACK)
        socket.write(Buffer.concat([frame(SETTINGS, 0, 0, ONE_STREAM), frame(SETTINGS, ACK, 0)]))
    },
  })
  const forward = await forwarding(t, upstream.url, { connections: 1 })
  const body = Buffer.alloc(1_000_000)
  for (const which of ['first', 'next'])
    t.match(
      await forward({ ...REQUEST, body }),
      { proof: 'responded', response: { body: Buffer.from('no') } },
      which,
    )
})

/** SETTINGS_MAX_CONCURRENT_STREAMS: 1 */
const ONE_STREAM = Buffer.from([0, 3, 0, 0, 0, 1])

void t.test('an answer that comes before the rest of the body ends the exchange', async (t) => {
  const { url, sessions } = await nodeUpstream(t, (stream) => {
    stream.respond({ ':status': 413 })
    stream.end('no')
  })
  const { dispatcher } = await opened(t, url)
  const body = new Readable({ read() {} })
  body.push(Buffer.alloc(10))
  t.equal(await new Asked(dispatcher, { method: 'POST', body }).end, '413 no')
  t.equal(await new Asked(dispatcher, { method: 'POST', body: Buffer.alloc(1_000_000) }).end, '413 no')
  t.equal(await new Asked(dispatcher).end, '413 no')
  t.equal(sessions.length, 1)
})

void t.test(
  '§15.15 an idle connection is kept for upstream.keepAlive, and closing waits for what runs',
  async (t) => {
    const waiting: (() => void)[] = []
    const { url, sessions } = await nodeUpstream(t, (stream) => {
      waiting.push(() => {
        stream.respond({ ':status': 200 })
        stream.end('ok')
      })
    })
    const upstream = await openedFor(url, { http2: true, keepAlive: 50 })
    const ask = async (): Promise<Asked> => {
      const asked = new Asked(upstream.dispatcher)
      await until(() => waiting.length > 0)
      return asked
    }
    const first = await ask()
    waiting.shift()?.()
    t.equal(await first.end, '200 ok')
    const [session] = sessions
    if (session?.closed === false) await once(session, 'close')
    const second = await ask()
    t.equal(sessions.length, 2)
    const closed = upstream.dispatcher.close()
    t.match(await new Asked(upstream.dispatcher).end, /^not sent/)
    waiting.shift()?.()
    t.equal(await second.end, '200 ok')
    await closed
    await upstream.close()
  },
)

void t.test(
  'U02 what runs when the proxy closes its connections is unknown, what waits was not sent',
  async (t) => {
    const { url, sessions } = await nodeUpstream(t, () => {})
    const upstream = await openedFor(url, { http2: true })
    const asked = new Asked(upstream.dispatcher)
    await until(() => asked.controller !== null && sessions.length > 0)
    const waiting = new Asked(upstream.dispatcher)
    await upstream.close()
    t.match(await asked.end, /^broken: the proxy has closed/)
    t.match(await waiting.end, /^not sent: the proxy has closed/)
  },
)

void t.test('U01 over TLS the upstream chooses HTTP/2 (ALPN), or nothing is sent', async (t) => {
  using cert = certificate('IP:127.0.0.1')
  const resumed: boolean[] = []
  const over = async (
    server: Server,
  ): Promise<{ readonly forward: Forward; readonly upstream: Upstream }> => {
    server.on('secureConnection', (socket: TLSSocket) => resumed.push(socket.isSessionReused()))
    server.listen(0, '127.0.0.1')
    await once(server, 'listening')
    t.teardown(() => server.close())
    const tls = { ca: cert.certFile, cert: null, key: null, servername: null }
    const url = `https://127.0.0.1:${(server.address() as AddressInfo).port}`
    const upstream = await opened(t, url, { tls, keepAlive: 60_000 })
    const budget = new Budget(1000)
    const limits = { timeout: () => 10_000, idleTimeout: 10_000, budget }
    return { forward: forwarder(upstream.dispatcher, limits), upstream }
  }
  const server = createSecureServer({ cert: cert.cert, key: cert.key })
  server.on('stream', (stream) => stream.respond({ ':status': 204 }, { endStream: true }))
  const { forward, upstream } = await over(server)
  for (let n = 0; n < 2; n++) t.match(await forward(REQUEST), { proof: 'responded' })
  t.equal(resumed.length, 1)
  upstream.renew({ ca: cert.cert })
  t.match(await forward(REQUEST), { proof: 'responded' })
  t.strictSame(resumed, [false, false], 'after new certificates a new connection')
  for (const protocols of [{ ALPNProtocols: ['http/1.1'] }, {}]) {
    const older = await over(createTls({ cert: cert.cert, key: cert.key, ...protocols }))
    t.match(await older.forward(REQUEST), { proof: 'not_sent', reason: /ALPN|application.protocol/i })
  }
})
