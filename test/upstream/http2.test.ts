/** HTTP/2 to the upstream: what an exchange proves, whatever the upstream does on its stream or connection (docs/adr/0129). */
import { once } from 'node:events'
import type { Socket } from 'node:net'
import t from 'tap'
import { Budget } from '../../src/runtime/limits.ts'
import { forwarder } from '../../src/upstream/forward.ts'
import { answering } from '../support/exchange.ts'
import {
  ACK,
  answerConnection,
  CANCEL,
  END_HEADERS,
  END_STREAM,
  type FrameScript,
  frame,
  frameUpstream,
  goAway,
  HEADERS,
  INTERNAL_ERROR,
  NO_ERROR,
  PING,
  REFUSED_STREAM,
  reset,
  SETTINGS,
} from '../support/frames.ts'
import { tcpStub } from '../support/upstream.ts'
import {
  BLOCK,
  data,
  forwarding,
  head,
  ok,
  opened,
  proofOf,
  REQUEST,
  type Said,
  saying,
} from './http2-support.ts'
import { Asked, until } from './support.ts'

void t.test('U01 §7 a refused stream, and one above the last of a GOAWAY, were not processed', async (t) => {
  const table: Readonly<Record<string, Said>> = {
    REFUSED_STREAM: (stream) => [reset(stream, REFUSED_STREAM)],
    GOAWAY: () => [goAway(0, NO_ERROR)],
    'GOAWAY with an error': () => [goAway(0, INTERNAL_ERROR)],
    'two GOAWAYs, as of a server that shuts down': () => [goAway(2 ** 31 - 1, NO_ERROR), goAway(0, NO_ERROR)],
  }
  for (const [name, said] of Object.entries(table))
    for (const ends of [false, true])
      t.equal(await proofOf(t, await saying(t, said, ends)), 'not_sent', `${name}, ends: ${ends}`)
})

void t.test('U02 §7 everything else may have been processed', async (t) => {
  const table: Readonly<Record<string, Said>> = {
    'RST_STREAM, NO_ERROR': (stream) => [reset(stream, NO_ERROR)],
    'RST_STREAM, CANCEL': (stream) => [reset(stream, CANCEL)],
    'RST_STREAM, INTERNAL_ERROR': (stream) => [reset(stream, INTERNAL_ERROR)],
    'GOAWAY at its id, called REFUSED_STREAM': (stream) => [goAway(stream, REFUSED_STREAM)],
    'GOAWAY at its id with an error': (stream) => [goAway(stream, INTERNAL_ERROR)],
    'refused after the head': (stream) => [ok(stream), reset(stream, REFUSED_STREAM)],
    'refused after an interim answer': (stream) => [
      head(stream, [[':status', '103']]),
      reset(stream, REFUSED_STREAM),
    ],
    'GOAWAY below its id after the head': (stream) => [ok(stream), goAway(0, NO_ERROR)],
    'such a GOAWAY with an error': (stream) => [ok(stream), goAway(0, INTERNAL_ERROR)],
    'the same after some body': (stream) => [ok(stream), data(stream), goAway(0, INTERNAL_ERROR)],
    'an interim answer that ends the stream': (stream) => [head(stream, [[':status', '103']], END_STREAM)],
    'another protocol': (stream) => [head(stream, [[':status', '101']], END_STREAM)],
    'two heads': (stream) => [ok(stream), ok(stream, END_STREAM)],
    'a push': (stream) => [frame(5, END_HEADERS, stream, Buffer.from([0, 0, 0, 2]))],
    'trailers that are too large': (stream) => [
      ok(stream),
      frame(HEADERS, END_STREAM, stream, BLOCK.subarray(0, 16_000)),
      ...[16_000, 32_000, 48_000, 64_000].map((at) =>
        frame(9, at === 64_000 ? END_HEADERS : 0, stream, BLOCK.subarray(at, at + 16_000)),
      ),
    ],
    'no HTTP/2': () => [Buffer.from('HTTP/1.1 400 Bad Request\r\n\r\n')],
    'a body that is shorter than announced': (stream) => [
      head(stream, [
        [':status', '200'],
        ['content-length', '3'],
      ]),
      data(stream, 'ok', END_STREAM),
    ],
    'a line about the connection': (stream) => [
      head(
        stream,
        [
          [':status', '200'],
          ['connection', 'close'],
        ],
        END_STREAM,
      ),
    ],
  }
  for (const [name, said] of Object.entries(table))
    t.equal(await proofOf(t, await saying(t, said)), 'unknown', name)
  for (const [name, said] of Object.entries<Said>({
    nothing: () => [],
    'GOAWAY at its id': (stream) => [goAway(stream, NO_ERROR)],
    'a head': (stream) => [ok(stream)],
    'a part of the body': (stream) => [ok(stream), data(stream)],
  }))
    t.equal(await proofOf(t, await saying(t, said, true)), 'unknown', `${name}, then the end`)
})

void t.test('U03 §7 a body is whole only if the upstream itself ended it', async (t) => {
  for (const code of [NO_ERROR, CANCEL, INTERNAL_ERROR, REFUSED_STREAM]) {
    const part = await saying(t, (stream) => [ok(stream), data(stream), reset(stream, code)])
    t.equal(await proofOf(t, part), 'unknown', `reset by ${code} in the middle`)
    const whole = await saying(t, (stream) => [
      ok(stream),
      data(stream, 'ok', END_STREAM),
      reset(stream, code),
    ])
    t.equal(await proofOf(t, whole), '200 ok', `reset by ${code} behind it`)
  }
  for (const ends of [false, true]) {
    const whole = await saying(
      t,
      (stream) => [ok(stream), data(stream, 'ok', END_STREAM), goAway(stream, INTERNAL_ERROR)],
      ends,
    )
    t.equal(await proofOf(t, whole), '200 ok', 'a connection that ends behind it')
  }
})

const SMALL = Buffer.from([0, 3, 0, 0, 0, 0])

/** The settings that allow this many requests at one time (RFC 9113 §6.5.2). */
function allowing(most: number): Buffer {
  const payload = Buffer.from(SMALL)
  payload.writeUInt32BE(most, 2)
  return frame(SETTINGS, 0, 0, payload)
}

/** Answers the connection's frames, with these settings. */
const withSettings =
  (settings: Buffer): NonNullable<FrameScript['other']> =>
  (socket, one) =>
    one.type === SETTINGS && one.flags !== ACK
      ? void socket.write(Buffer.concat([settings, frame(SETTINGS, ACK, 0)]))
      : answerConnection(socket, one)

void t.test('U01 before the upstream has begun HTTP/2 no request is sent', async (t) => {
  const silent = await tcpStub(() => {})
  t.teardown(() => silent[Symbol.asyncDispose]())
  const older = await answering('HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n')
  t.teardown(() => older[Symbol.asyncDispose]())
  const ending = await tcpStub((socket) => void socket.end())
  t.teardown(() => ending[Symbol.asyncDispose]())
  for (const [{ url }, why] of [
    [silent, /no connection within 100 ms/],
    [older, /does not speak HTTP\/2/],
    [ending, /closed the connection/],
    [{ url: 'http://127.0.0.1:1' }, /ECONNREFUSED/],
  ] as const) {
    const forward = await forwarding(t, url, { connectTimeout: why.source.includes('100') ? 100 : 10_000 })
    const result = await forward(REQUEST)
    t.match(result, { proof: 'not_sent', reason: why })
  }
})

void t.test('§15.15 requests share a connection, up to what the upstream allows at one time', async (t) => {
  for (const [most, connections, sockets] of [
    [100, 5, 1],
    [1, 5, 3],
    [2, 1, 1],
  ] as const) {
    const waiting: (() => void)[] = []
    const upstream = await frameUpstream(t, {
      request: (socket, stream) => void waiting.push(() => socket.write(ok(stream, END_STREAM))),
      other: withSettings(allowing(most)),
    })
    const { dispatcher } = await opened(t, upstream.url, { connections, keepAlive: 60_000 })
    const asked = [0, 1, 2].map(() => new Asked(dispatcher))
    await until(() => waiting.length === Math.min(3, most * connections))
    t.equal(upstream.sockets.length, sockets, `${most} at one time`)
    for (const { end } of asked) {
      await until(() => waiting.length > 0)
      waiting.shift()?.()
      t.equal(await end, '200 ')
    }
    t.equal(upstream.sockets.length, sockets)
  }
})

void t.test(
  'U01 one that the upstream does not allow yet waits, and is not sent if its time is over',
  async (t) => {
    let socket: Socket | undefined
    const upstream = await frameUpstream(t, {
      request: (socket, stream) => void socket.write(ok(stream, END_STREAM)),
      other(its, one) {
        socket = its
        withSettings(allowing(0))(its, one)
      },
    })
    const { dispatcher } = await opened(t, upstream.url, { connections: 9 })
    const budget = new Budget(1000)
    const forward = forwarder(dispatcher, { timeout: () => 100, idleTimeout: 1000, budget })
    t.match(await forward(REQUEST), { proof: 'not_sent', reason: /no connection to the upstream was free/ })
    t.strictSame([upstream.requests, upstream.sockets.length], [0, 1])
    const patient = forwarder(dispatcher, { timeout: () => 10_000, idleTimeout: 1000, budget })(REQUEST)
    socket?.write(allowing(1))
    t.match(await patient, { proof: 'responded' })
  },
)

void t.test(
  '§15.15 after a GOAWAY the next request takes another connection, and those below it go on',
  async (t) => {
    let finish = (): void => {}
    const upstream = await frameUpstream(t, {
      request(socket, stream, n) {
        if (n > 1) return void socket.write(ok(stream, END_STREAM))
        socket.write(goAway(stream, NO_ERROR))
        finish = () => void socket.write(ok(stream, END_STREAM))
      },
    })
    const { dispatcher } = await opened(t, upstream.url, { connections: 1, keepAlive: 60_000 })
    const first = new Asked(dispatcher)
    await until(() => upstream.requests === 1)
    const second = new Asked(dispatcher)
    t.equal(await second.end, '200 ')
    t.equal(upstream.sockets.length, 2)
    finish()
    t.equal(await first.end, '200 ')
  },
)

void t.test('U03 a silent connection that answers no ping takes no further request', async (t) => {
  let pings = 0
  const upstream = await frameUpstream(t, {
    request(socket, stream, n) {
      if (n === 3) socket.write(ok(stream, END_STREAM))
    },
    other(socket, one) {
      if (one.type !== PING) answerConnection(socket, one)
      else if (one.flags !== ACK) pings++
    },
  })
  const { dispatcher } = await opened(t, upstream.url, { connectTimeout: 300, connections: 1 })
  const other = new Asked(dispatcher, { headersTimeout: 800 })
  await until(() => upstream.requests === 1)
  const silent = new Asked(dispatcher, { headersTimeout: 50 })
  t.match(await silent.end, /^broken: no head of an answer within 50 ms/)
  t.equal(await new Asked(dispatcher).end, '200 ')
  t.equal(upstream.sockets.length, 2)
  t.match(await other.end, /^broken: no head of an answer within 800 ms/)
  t.equal(pings, 1)
})

void t.test('a connection that answers its ping goes on', async (t) => {
  const upstream = await frameUpstream(t, {
    request(socket, stream, n) {
      if (n > 1) socket.write(ok(stream, END_STREAM))
    },
  })
  const { dispatcher } = await opened(t, upstream.url, { connections: 1, keepAlive: 60_000 })
  t.match(await new Asked(dispatcher, { headersTimeout: 50 }).end, /^broken/)
  t.equal(await new Asked(dispatcher).end, '200 ')
})

void t.test('U01 a head that is too large to send keeps no other request waiting', async (t) => {
  let finish = (): void => {}
  const upstream = await frameUpstream(t, {
    request(socket, stream, n) {
      if (n > 1) socket.write(ok(stream, END_STREAM))
      else finish = () => void socket.write(ok(stream, END_STREAM))
    },
  })
  const { dispatcher } = await opened(t, upstream.url, { connections: 1, keepAlive: 60_000 })
  const long = new Asked(dispatcher)
  await until(() => upstream.requests === 1)
  const huge = Array.from({ length: 20 }, (_, n) => [`x${n}`, 'x'.repeat(9000)]).flat()
  t.match(await new Asked(dispatcher, { headers: huge }).end, /^broken: the head of the request is larger/)
  t.equal(await new Asked(dispatcher).end, '200 ')
  finish()
  t.equal(await long.end, '200 ')
})

void t.test(
  'U01 a request waits on if the proxy itself ends the connection that is being made',
  async (t) => {
    let isReady = false
    let heard = 0
    const upstream = await frameUpstream(t, {
      request: (socket, stream) => void socket.write(ok(stream, END_STREAM)),
      other(socket, one) {
        heard++
        if (isReady) answerConnection(socket, one)
      },
    })
    const { dispatcher, renew } = await opened(t, upstream.url, { keepAlive: 60_000 })
    const asked = new Asked(dispatcher)
    await until(() => heard > 0)
    isReady = true
    renew({})
    t.equal(await asked.end, '200 ')
    t.equal(upstream.sockets.length, 2)
  },
)

void t.test('U01 an upstream that ends each connection at once is not asked without end', async (t) => {
  const upstream = await frameUpstream(t, {
    request() {},
    other(socket, one) {
      answerConnection(socket, one)
      if (one.type === SETTINGS && one.flags !== ACK) socket.end(goAway(0, NO_ERROR))
    },
  })
  const forward = await forwarding(t, upstream.url)
  t.match(await forward(REQUEST), { proof: 'not_sent', reason: 'the upstream closed the connection' })
  t.ok(upstream.sockets.length <= 2)
})

void t.test('§15.15 a connection that nobody uses any more is closed after upstream.keepAlive', async (t) => {
  let answer: (() => void) | undefined
  const upstream = await frameUpstream(t, {
    request() {},
    other(socket, one) {
      if (one.type === SETTINGS && one.flags !== ACK) answer = () => answerConnection(socket, one)
    },
  })
  const { dispatcher } = await opened(t, upstream.url, { keepAlive: 50 })
  const budget = new Budget(1000)
  const forward = forwarder(dispatcher, { timeout: () => 100, idleTimeout: 1000, budget })
  t.match(await forward(REQUEST), { proof: 'not_sent' })
  await until(() => answer !== undefined)
  const socket = upstream.sockets[0] as Socket
  const closed = once(socket, 'close')
  answer?.()
  await closed
  t.equal(upstream.requests, 0)
})
