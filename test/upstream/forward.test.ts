import type { Socket } from 'node:net'
import t, { type Test } from 'tap'
import { Budget } from '../../src/runtime/limits.ts'
import { forwarder } from '../../src/upstream/forward.ts'
import { openUpstream } from '../../src/upstream/pool.ts'
import type { Forward, Forwarded, LiveSink, UpstreamRequest } from '../../src/upstream/port.ts'
import { answering, scriptedPeer } from '../support/exchange.ts'

interface Rig extends AsyncDisposable {
  readonly forward: Forward
  readonly budget: Budget
}

async function rig(url: string, timeout = 5000, room = 1_000_000): Promise<Rig> {
  const upstream = await openUpstream({
    url,
    connectTimeout: 1000,
    timeout,
    idleTimeout: 5000,
    connections: 1,
    tls: { ca: null, cert: null, key: null, servername: null },
  })
  const budget = new Budget(room)
  const forward = forwarder(upstream.client, { timeout, idleTimeout: 5000, budget })
  return { forward, budget, [Symbol.asyncDispose]: () => upstream.close() }
}

const REQUEST: UpstreamRequest = {
  method: 'POST',
  target: '/p',
  headers: ['Host', 'a.test', 'X-A', '1'],
  body: Buffer.from('{}'),
  responseLimit: 1000,
}

/** Collects a live answer; `room` says whether it can take more. */
class Sink implements LiveSink {
  text = ''
  how: 'open' | 'end' | 'abort' = 'open'
  trailers: readonly string[] = []
  room = true
  resume: () => void = () => {}
  start(resume: () => void): void {
    this.resume = resume
  }
  write(chunk: Buffer): boolean {
    this.text += chunk.toString('latin1')
    return this.room
  }
  end(trailers: readonly string[]): void {
    this.how = 'end'
    this.trailers = trailers
  }
  abort(): void {
    this.how = 'abort'
  }
}

function liveOf(t: Test, result: Forwarded): Extract<Forwarded, { proof: 'live' }> {
  if (result.proof !== 'live') {
    t.fail(result.proof)
    throw new Error(result.proof)
  }
  return result
}

void t.test('U01 a request given up while it waits for a connection is never sent', async (t) => {
  let held: Socket | undefined
  await using peer = await scriptedPeer((socket) => {
    held = socket
  })
  await using one = await rig(peer.url, 200)
  const first = one.forward(REQUEST)
  while (peer.requests.length === 0) await new Promise((resolve) => setTimeout(resolve, 5))
  held?.write('HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 2\r\n\r\n')
  const live = liveOf(t, await first)
  t.match(await one.forward({ ...REQUEST, target: '/waiting' }), { proof: 'not_sent', reason: '200 ms' })
  live.live.drain()
  held?.write('ok')
  t.equal(await live.live.done, 'complete')
  // The connection is free: a request given up would be sent before this one.
  const last = one.forward({ ...REQUEST, target: '/last' })
  while (peer.requests.length < 2) await new Promise((resolve) => setTimeout(resolve, 5))
  held?.write('HTTP/1.1 204 No\r\n\r\n')
  t.match(await last, { proof: 'responded' })
  t.same(
    peer.requests.map((request) => request.split(' ')[1]),
    ['/p', '/last'],
  )
})

void t.test('U01 an invalid request is not sent', async (t) => {
  await using peer = await answering('HTTP/1.1 204 No\r\n\r\n')
  await using one = await rig(peer.url)
  for (const wrong of [
    { target: '/a b' },
    { target: '/a\r\nX: 1' },
    { method: 'PO ST' },
    { headers: ['X Y', '1'] },
    { headers: ['X', 'a\r\nb'] },
  ])
    t.match(await one.forward({ ...REQUEST, ...wrong }), { proof: 'not_sent' }, JSON.stringify(wrong))
  t.equal(peer.requests.length, 0)
  t.match(await one.forward(REQUEST), { proof: 'responded' })
})

void t.test('U05 a cut answer is unknown with its status noted, and its budget is released', async (t) => {
  await using peer = await scriptedPeer(
    (socket) => void socket.end('HTTP/1.1 201 Created\r\nContent-Length: 9\r\n\r\nabc'),
  )
  await using one = await rig(peer.url)
  t.match(await one.forward(REQUEST), { proof: 'unknown', status: 201, timedOut: false })
  t.equal(one.budget.held, 0)
  await using silent = await scriptedPeer(() => {})
  await using other = await rig(silent.url, 100)
  t.match(await other.forward(REQUEST), { proof: 'unknown', status: null, timedOut: true })
})

void t.test('P19 a kept body releases its bytes once, however often it is asked to', async (t) => {
  await using peer = await answering('HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello')
  await using one = await rig(peer.url)
  const [first, second] = [await one.forward(REQUEST), await one.forward(REQUEST)]
  if (first.proof !== 'responded' || second.proof !== 'responded') throw new Error('no answer')
  t.equal(one.budget.held, 10)
  first.release()
  first.release()
  t.equal(one.budget.held, 5)
  second.release()
  t.equal(one.budget.held, 0)
})

void t.test('P19 a kept body counts until it is released, an oversize one does not', async (t) => {
  await using peer = await answering(
    `HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e8\r\n${'x'.repeat(1000)}\r\n0\r\n\r\n`,
  )
  await using one = await rig(peer.url)
  const kept = await one.forward(REQUEST)
  t.equal(one.budget.held, 1000)
  if (kept.proof === 'responded') kept.release()
  t.equal(one.budget.held, 0)
  const over = liveOf(t, await one.forward({ ...REQUEST, responseLimit: 999 }))
  t.equal(over.why, 'too_large')
  t.equal(one.budget.held, 0)
  const sink = new Sink()
  over.live.attach(sink)
  t.equal(await over.live.done, 'complete')
  t.equal(sink.text.length, 1000, 'what came before it was too large is not lost')
  await using small = await rig(peer.url, 5000, 999)
  t.equal(liveOf(t, await small.forward(REQUEST)).why, 'no_room')
  t.equal(small.budget.held, 0)
})

void t.test('P21 a live answer waits for its reader, stops without room, and goes on', async (t) => {
  let upstream: Socket | undefined
  await using peer = await scriptedPeer((socket) => {
    upstream = socket
    socket.write(
      'HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n',
    )
  })
  await using one = await rig(peer.url)
  const { live, why } = liveOf(t, await one.forward(REQUEST))
  t.equal(why, 'streamed')
  const sink = new Sink()
  sink.room = false
  live.attach(sink)
  while (sink.text !== 'one') await new Promise((resolve) => setTimeout(resolve, 5))
  upstream?.write(
    '3\r\ntwo\r\n0\r\nX-T: 1\r\nConnection: x\r\nTrailer: y\r\nIdempotent-Replayed: true\r\n\r\n',
  )
  t.equal(sink.how, 'open')
  sink.room = true
  sink.resume()
  t.equal(await live.done, 'complete')
  t.equal(sink.text, 'onetwo')
  t.equal(sink.how, 'end')
  t.same(sink.trailers, ['X-T', '1'], 'framing and hop-by-hop lines are not trailers')
})

void t.test('U05 a live answer that breaks is aborted, whenever its reader attaches', async (t) => {
  for (const late of [false, true]) {
    let upstream: Socket | undefined
    await using peer = await scriptedPeer((socket) => {
      upstream = socket
      socket.write('HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9\r\n\r\nabc')
    })
    await using one = await rig(peer.url)
    const { live } = liveOf(t, await one.forward(REQUEST))
    const sink = new Sink()
    if (!late) live.attach(sink)
    upstream?.destroy()
    t.equal(await live.done, 'broken')
    if (late) live.attach(sink)
    t.equal(sink.how, 'abort')
  }
})

void t.test('P21 a live answer that was complete before its reader attached still ends', async (t) => {
  await using peer = await answering(
    'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 3\r\n\r\nabc',
  )
  await using one = await rig(peer.url)
  const { live } = liveOf(t, await one.forward(REQUEST))
  await live.done
  const sink = new Sink()
  live.attach(sink)
  t.equal(sink.text, 'abc')
  t.equal(sink.how, 'end')
})

void t.test('an abandoned answer gives up its connection, and the next request gets another', async (t) => {
  const sockets: Socket[] = []
  await using peer = await scriptedPeer((socket, _, n) => {
    sockets.push(socket)
    socket.write(
      n === 1
        ? 'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: for ever\n\n'
        : 'HTTP/1.1 204 No Content\r\n\r\n',
    )
  })
  await using one = await rig(peer.url)
  const { live } = liveOf(t, await one.forward(REQUEST))
  live.abandon()
  t.equal(await live.done, 'broken')
  t.match(await one.forward(REQUEST), { proof: 'responded', response: { status: 204 } })
  t.equal(sockets.length, 2)
  t.equal(one.budget.held, 0)
})

void t.test('a request that may no longer begin is not sent, and proved so', async (t) => {
  await using peer = await answering('HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok')
  await using made = await rig(peer.url)
  let asked = 0
  const mayBegin = (): boolean => {
    asked++
    return false
  }
  t.match(await made.forward({ ...REQUEST, mayBegin }), { proof: 'not_sent', reason: /lease/ })
  t.equal(asked, 1)
  t.match(await made.forward({ ...REQUEST, target: '/q', mayBegin: () => true }), { proof: 'responded' })
  t.same(
    peer.requests.map((request) => request.split(' ')[1]),
    ['/q'],
  )
})
