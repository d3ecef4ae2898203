import type { Socket } from 'node:net'
import t, { type Test } from 'tap'
import { metricIs, type Problem, type ProxyOptions, problemOf, proxyBefore } from '../support/exchange.ts'
import { faulty, OK, poolWorks, REQUEST, seen, unknownNow } from '../support/faulty.ts'
import { post, rawRequest } from '../support/raw.ts'
import { tcpStub, wholeRequest } from '../support/upstream.ts'

interface Fault {
  /** What the peer does with the first connection; later ones are answered. */
  readonly commits: (socket: Socket) => void
  readonly code: 'upstream_failed' | 'upstream_timeout' | 'upstream_unreachable'
  readonly options?: ProxyOptions
}

/** Checks the fault's answer, the record's state as a retry sees it, N and that the pool still works. */
async function shows(t: Test, fault: Fault): Promise<Problem> {
  await using peer = await faulty(fault.commits)
  await using proxy = await proxyBefore(peer, fault.options)
  const first = await rawRequest(proxy.port, REQUEST)
  const problem = problemOf(first)
  t.match(problem, {
    code: fault.code,
    status: fault.code === 'upstream_timeout' ? 504 : 502,
    retry: 'same-key',
  })
  await unknownNow(t, proxy)
  t.ok(seen(peer.requests) <= 1, `N=${seen(peer.requests)}`)
  await poolWorks(t, proxy)
  return problem
}

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

const FAST = { upstream: 'timeout: 400ms, idleTimeout: 5s' }

void t.test(
  'U03 a peer that reads the request and then closes or resets is a 502, and unknown',
  async (t) => {
    await shows(t, { commits: reads((socket) => socket.end()), code: 'upstream_failed' })
    await shows(t, { commits: reads((socket) => socket.destroy()), code: 'upstream_failed' })
    await shows(t, { commits: reads((socket) => socket.resetAndDestroy()), code: 'upstream_failed' })
    await shows(t, {
      commits: (socket) => socket.once('data', () => socket.resetAndDestroy()),
      code: 'upstream_failed',
    })
  },
)

void t.test('U04 an answer without a complete head in time is a 504, and unknown', async (t) => {
  await shows(t, { commits: reads(() => {}), code: 'upstream_timeout', options: FAST })
  await shows(t, { commits: says('HTTP/1.1 201 Cre'), code: 'upstream_timeout', options: FAST })
  await shows(t, { commits: says('HTTP/1.1 100 Continue\r\n\r\n'), code: 'upstream_timeout', options: FAST })
})

void t.test('U04 a body that trickles past the timeout of the call is a 504, and unknown', async (t) => {
  let timer: NodeJS.Timeout | undefined
  await shows(t, {
    commits: reads((socket) => {
      socket.write('HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n')
      timer = setInterval(() => socket.write('1\r\nx\r\n'), 20)
    }),
    code: 'upstream_timeout',
    options: FAST,
  })
  clearInterval(timer)
})

void t.test('U05 a stalled body is a 504 and unknown, with a length and chunked', async (t) => {
  const idle = { upstream: 'timeout: 20s, idleTimeout: 300ms' }
  for (const head of ['Content-Length: 10\r\n\r\nabc', 'Transfer-Encoding: chunked\r\n\r\n5\r\nab'])
    await shows(t, {
      commits: says(`HTTP/1.1 201 Created\r\n${head}`),
      code: 'upstream_timeout',
      options: idle,
    })
})

void t.test('U05 a cut body is a 502 and unknown, and none of it reaches the client', async (t) => {
  for (const rest of [
    'Content-Length: 10\r\n\r\nabc',
    'Content-Length: 10\r\n\r\n',
    'Transfer-Encoding: chunked\r\n\r\n5\r\nab',
    'Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n',
    'Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX-T: 1\r\n',
  ]) {
    const problem = await shows(t, {
      commits: says(`HTTP/1.1 201 Created\r\n${rest}`, true),
      code: 'upstream_failed',
    })
    t.notMatch(JSON.stringify(problem), /abc/)
  }
  await shows(t, {
    commits: reads((socket) => {
      socket.write('HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\nabc', () => socket.resetAndDestroy())
    }),
    code: 'upstream_failed',
  })
})

void t.test('U06 a close-delimited answer is complete', async (t) => {
  for (const version of ['1.1', '1.0']) {
    await using peer = await faulty(says(`HTTP/${version} 201 Created\r\nX: 1\r\n\r\nwhole`, true))
    await using proxy = await proxyBefore(peer)
    for (let i = 0; i < 2; i++) {
      const answer = await rawRequest(proxy.port, REQUEST)
      t.equal(answer.status, 201)
      t.equal(answer.body.toString(), 'whole')
    }
    t.equal(seen(peer.requests), 1, 'N=1')
    await poolWorks(t, proxy)
  }
})

void t.test('U07 a malformed answer is a 502, and unknown', async (t) => {
  for (const bytes of [
    'garbage\r\n\r\n',
    'garbage without an end',
    'HTTP/3.7 200 OK\r\n\r\n',
    'ICY 200 OK\r\n\r\n',
    'HTTP/1.1 20x OK\r\n\r\n',
    'HTTP/1.1 1000 OK\r\nContent-Length: 0\r\n\r\n',
    'HTTP/1.1 099 OK\r\nContent-Length: 2\r\n\r\nok',
    'HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n\r\n\r\nx',
    'HTTP/1.1 199 OK\r\nContent-Length: 2\r\n\r\nok\r\n\r\n',
    'HTTP/1.1 200 OK\r\nX Y: 1\r\nContent-Length: 0\r\n\r\n',
    'HTTP/1.1 200 OK\r\nno colon\r\n\r\n',
    'HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n',
    'HTTP/1.1 200 OK\r\nX: a\x01b\r\nContent-Length: 0\r\n\r\n',
    'HTTP/1.1 200 OK\r\nContent-Length: nine\r\n\r\n',
    'HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n',
    'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokk',
    'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n',
    'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n0\r\n\r\n',
    'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokk\r\n0\r\n\r\n',
    'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nok',
    'HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nraw',
    'HTTP/1.1 100 Continue\n\nHTTP/1.1 201 Created\r\nContent-Length: 21\r\n\r\nHTTP/1.1 200 OK\r\n\r\nxx',
    `HTTP/1.1 200 OK\r\n${`X-Fill: ${'f'.repeat(1000)}\r\n`.repeat(100)}Content-Length: 0\r\n\r\n`,
  ])
    await t.test(JSON.stringify(bytes.slice(0, 60)), (t) =>
      shows(t, { commits: says(bytes), code: 'upstream_failed', options: { upstream: 'timeout: 5s' } }),
    )
})

void t.test('U07 a 1xx status is not final: without another answer the call times out', async (t) => {
  await shows(t, {
    commits: says('HTTP/1.1 199 Odd\r\nX: 1\r\n\r\n'),
    code: 'upstream_timeout',
    options: FAST,
  })
})

void t.test(
  'U07 an answer that comes before the request was read is replayed, or the outcome unknown',
  async (t) => {
    await using early = await tcpStub((socket) => {
      socket.on('data', (chunk: Buffer) => {
        if (chunk.includes('HTTP/1.1\r\n')) socket.write(OK)
      })
    })
    await using proxy = await proxyBefore(early)
    const big = post('/p', 'k-1', JSON.stringify({ a: 'x'.repeat(900_000) }))
    const first = await rawRequest(proxy.port, big)
    const second = await rawRequest(proxy.port, big)
    // A complete answer counts if it came through; a broken one is unknown.
    if (first.status === 201) t.equal(second.body.toString(), 'ok')
    else t.match(problemOf(second), { code: 'idempotency_outcome_unknown' })
    await metricIs(proxy, 'idempotency_buffered_bytes', 0)
    t.equal((await rawRequest(proxy.port, post('/p', 'after', '{}'))).status, 201)
  },
)

void t.test('U07 a second answer to one request reaches nobody', async (t) => {
  await using peer = await faulty(says(`${OK}HTTP/1.1 500 Second\r\nContent-Length: 6\r\n\r\nsecond`))
  await using proxy = await proxyBefore(peer)
  const first = await rawRequest(proxy.port, REQUEST)
  t.equal(first.status, 201)
  const other = await rawRequest(proxy.port, post('/p', 'k-2', '{}'))
  t.notMatch(other.bytes.toString(), 'second')
  t.equal((await rawRequest(proxy.port, REQUEST)).body.toString(), 'ok')
  t.equal(seen(peer.requests), 1)
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})
