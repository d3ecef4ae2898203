import type { Socket } from 'node:net'
import type { Test } from 'tap'
import { Budget } from '../../src/runtime/limits.ts'
import { forwarder } from '../../src/upstream/forward.ts'
import type { Forward, Forwarded, LiveSink, UpstreamRequest } from '../../src/upstream/port.ts'
import { answering, scriptedPeer } from '../support/exchange.ts'
import { faulty } from '../support/faulty.ts'
import { wholeRequest } from '../support/upstream.ts'
import { onBoth, opened, until } from './support.ts'

interface Rig extends AsyncDisposable {
  readonly forward: Forward
  /** … with less patience, on the same connections. */
  impatient(patience: { timeout?: () => number; idleTimeout?: number }): Forward
  readonly budget: Budget
}

async function rig(url: string, room = 1_000_000): Promise<Rig> {
  const upstream = await opened(url)
  const budget = new Budget(room)
  const patience = { timeout: () => 10_000, idleTimeout: 10_000, budget }
  return {
    forward: forwarder(upstream.dispatcher, patience),
    impatient: (less) => forwarder(upstream.dispatcher, { ...patience, ...less }),
    budget,
    [Symbol.asyncDispose]: () => upstream.close(),
  }
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

onBoth('U01 a request given up while it waits for a connection is never sent', async (t) => {
  let held: Socket | undefined
  await using peer = await scriptedPeer((socket) => {
    held = socket
  })
  await using one = await rig(peer.url)
  const first = one.forward(REQUEST)
  await until(() => peer.requests.length > 0)
  held?.write('HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 2\r\n\r\n')
  const live = liveOf(t, await first)
  t.match(await one.impatient({ timeout: () => 50 })({ ...REQUEST, target: '/waiting' }), {
    proof: 'not_sent',
    reason: '50 ms',
  })
  live.live.drain()
  held?.write('ok')
  t.equal(await live.live.done, 'complete')
  // The connection is free: a request given up would be sent before this one.
  const last = one.forward({ ...REQUEST, target: '/last' })
  await until(() => peer.requests.length === 2)
  held?.write('HTTP/1.1 204 No\r\n\r\n')
  t.match(await last, { proof: 'responded' })
  t.same(
    peer.requests.map((request) => request.split(' ')[1]),
    ['/p', '/last'],
  )
})

onBoth('U01 an invalid request is not sent', async (t) => {
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

/** Reads a whole request first. */
function reads(then: (socket: Socket) => void): (socket: Socket) => void {
  return (socket) => void wholeRequest(socket).then(() => then(socket))
}
function says(bytes: string, end = false): (socket: Socket) => void {
  return reads((socket) => {
    socket.write(bytes, 'latin1')
    if (end) socket.end()
  })
}

/** What an upstream does to a request leaves its outcome unknown; it was sent once, and the next request is answered. */
async function leavesUnknown(
  t: Test,
  what: string,
  commits: (socket: Socket) => void,
  expected: Partial<Forwarded & { proof: 'unknown' }> = { timedOut: false },
  patience: { timeout?: () => number; idleTimeout?: number } = {},
): Promise<void> {
  await using peer = await faulty(commits)
  await using one = await rig(peer.url)
  t.match(await one.impatient(patience)(REQUEST), { proof: 'unknown', ...expected }, what)
  t.equal(one.budget.held, 0)
  t.ok(peer.requests.length <= 1, 'sent once')
  const next = await one.forward({ ...REQUEST, target: '/next' })
  t.match(next, { proof: 'responded', response: { status: 201 } }, `after ${what}`)
}

onBoth('U03 a peer that reads the request and then closes or resets leaves it unknown', async (t) => {
  for (const how of ['end', 'destroy', 'resetAndDestroy'] as const) {
    const leaves = reads((socket) => void socket[how]())
    await leavesUnknown(t, how, leaves)
  }
  await leavesUnknown(t, 'a reset at once', (socket) => socket.once('data', () => socket.resetAndDestroy()))
})

onBoth('U04 U07 an answer without a final head in time is timed out, and unknown', async (t) => {
  const interim = ['HTTP/1.1 100 Continue\r\n\r\n', 'HTTP/1.1 199 Odd\r\nX: 1\r\n\r\n']
  for (const bytes of ['', 'HTTP/1.1 201 Cre', ...interim])
    await leavesUnknown(t, bytes, says(bytes), { timedOut: true, status: null }, { timeout: () => 100 })
})

onBoth('U04 U05 a body that trickles too long, or stalls, is timed out, and unknown', async (t) => {
  let timer: NodeJS.Timeout | undefined
  const trickles = reads((socket) => {
    socket.write('HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n')
    timer = setInterval(() => socket.write('1\r\nx\r\n'), 10)
  })
  await leavesUnknown(t, 'a trickle', trickles, { timedOut: true }, { timeout: () => 200 })
  clearInterval(timer)
  for (const head of ['Content-Length: 10\r\n\r\nabc', 'Transfer-Encoding: chunked\r\n\r\n5\r\nab']) {
    const stalls = says(`HTTP/1.1 201 Created\r\n${head}`)
    await leavesUnknown(t, head, stalls, { timedOut: true }, { idleTimeout: 100 })
  }
})

onBoth('U05 a cut body leaves it unknown, with its status noted', async (t) => {
  const cut = { status: 201, timedOut: false }
  for (const part of ['abc', ''])
    await leavesUnknown(t, part, says(`HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\n${part}`, true), cut)
  for (const part of ['5\r\nab', '2\r\nab\r\n', '2\r\nab\r\n0\r\nX-T: 1\r\n']) {
    const bytes = `HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n${part}`
    await leavesUnknown(t, part, says(bytes, true), cut)
  }
  const head = 'HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\nabc'
  const resets = reads((socket) => void socket.write(head, () => socket.resetAndDestroy()))
  await leavesUnknown(t, 'a reset', resets)
})

onBoth('U06 a close-delimited answer is complete', async (t) => {
  for (const version of ['1.1', '1.0']) {
    await using peer = await faulty(says(`HTTP/${version} 201 Created\r\nX: 1\r\n\r\nwhole`, true))
    await using one = await rig(peer.url)
    const whole = { status: 201, body: Buffer.from('whole') }
    t.match(await one.forward(REQUEST), { proof: 'responded', response: whole })
    t.match(await one.forward(REQUEST), { proof: 'responded', response: { body: Buffer.from('ok') } })
  }
})

onBoth('U07 a malformed answer leaves it unknown', async (t) => {
  const ok = (rest: string) => `HTTP/1.1 200 OK\r\n${rest}`
  const chunks = ['zz\r\nok\r\n0\r\n\r\n', '2\r\nokk\r\n0\r\n\r\n', 'ffffffffffffffffff\r\nok']
  for (const bytes of [
    'garbage\r\n\r\n',
    'garbage without an end',
    ...['HTTP/3.7 200', 'ICY 200', 'HTTP/1.1 20x'].map((status) => `${status} OK\r\n\r\n`),
    'HTTP/1.1 1000 OK\r\nContent-Length: 0\r\n\r\n',
    'HTTP/1.1 099 OK\r\nContent-Length: 2\r\n\r\nok',
    'HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n\r\n\r\nx',
    'HTTP/1.1 199 OK\r\nContent-Length: 2\r\n\r\nok\r\n\r\n',
    ...['X Y: 1', 'X: a\0b', 'X: a\x01b'].map((line) => ok(`${line}\r\nContent-Length: 0\r\n\r\n`)),
    ...['no colon', 'Content-Length: nine', 'Content-Length: -1'].map((line) => ok(`${line}\r\n\r\n`)),
    ok('Content-Length: 2\r\nContent-Length: 3\r\n\r\nokk'),
    ...chunks.map((chunk) => ok(`Transfer-Encoding: chunked\r\n\r\n${chunk}`)),
    'HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nraw',
    `HTTP/1.1 200 OK\r\n${`X-Fill: ${'f'.repeat(1000)}\r\n`.repeat(66)}Content-Length: 0\r\n\r\n`,
  ])
    await leavesUnknown(t, JSON.stringify(bytes.slice(0, 60)), says(bytes))
})

onBoth('P19 a kept body releases its bytes once, however often it is asked to', async (t) => {
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

onBoth('P19 a kept body counts until it is released, an oversize one does not', async (t) => {
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
  await using small = await rig(peer.url, 999)
  t.equal(liveOf(t, await small.forward(REQUEST)).why, 'no_room')
  t.equal(small.budget.held, 0)
})

onBoth('P21 a live answer waits for its reader, stops without room, and goes on', async (t) => {
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
  await until(() => sink.text === 'one')
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

onBoth('U05 a live answer that breaks is aborted, whenever its reader attaches', async (t) => {
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

onBoth('P21 a live answer that was complete before its reader attached still ends', async (t) => {
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

onBoth('an abandoned answer gives up its connection, and the next request gets another', async (t) => {
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

onBoth('a request that may no longer begin is not sent, and proved so', async (t) => {
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

onBoth('P23 only a TLS upstream has a Host of its own, from its url', async (t) => {
  for (const [url, host] of [
    ['http://127.0.0.1:3000', null],
    ['https://api.test:8443', 'api.test:8443'],
    ['https://api.test', 'api.test'],
    ['unix:/run/app.sock', null],
  ] as const) {
    const upstream = await opened(url)
    t.equal(upstream.host, host, url)
    await upstream.close()
  }
})

onBoth('P15 what an upstream declares twice, and not alike, it does not declare', async (t) => {
  const declared = async (head: readonly string[], trailers: readonly string[] = []) => {
    const lines = (values: readonly string[]) =>
      values.map((value) => `Idempotency-Outcome: ${value}\r\n`).join('')
    await using peer = await answering(
      `HTTP/1.1 500 No\r\n${lines(head)}Transfer-Encoding: chunked\r\n\r\n0\r\n${lines(trailers)}\r\n`,
    )
    await using one = await rig(peer.url)
    const result = await one.forward(REQUEST)
    return result.proof === 'responded' ? result.declaredOutcome : result.proof
  }
  t.equal(await declared(['Not-Applied', 'not-applied']), 'not-applied')
  t.equal(await declared(['applied'], ['not-applied']), 'not-applied', 'the last word')
  t.not(await declared(['not-applied', 'applied']), 'not-applied')
  t.not(await declared(['not-applied'], ['not-applied', 'applied']), 'not-applied')
})
