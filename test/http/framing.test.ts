import { once } from 'node:events'
import { createServer } from 'node:http'
import { connect } from 'node:net'
import { Duplex } from 'node:stream'
import { setImmediate as turn } from 'node:timers/promises'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import t from 'tap'
import { linesOf } from '../../src/core/headers.ts'
import { metricIs, problemOf, proxyBefore, storeCalls, values } from '../support/exchange.ts'
import { http1Test } from '../support/http1-test.ts'
import { dial, everything, post, rawRequest, readAnswer } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

const stub = () => upstreamStub((_seen, response) => void response.writeHead(201, { 'X-A': '1' }).end('ok'))

http1Test('K16 bytes that no header may have get 400, N=0, and the process survives', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  const rest = 'Content-Length: 2\r\n\r\n{}'
  for (const line of [
    'Idempotency-Key: a\0b\r\n',
    'Idempotency-Key: a\r\n b\r\n',
    'Idempotency-Key : a\r\n',
    'Idempotency-Key: a\rX: b\r\n',
    'Idempotency-Key\r\n',
  ]) {
    const request = `POST /p HTTP/1.1\r\nHost: a\r\nConnection: close\r\n${line}${rest}`
    t.match(await everything(proxy.port, request), /^HTTP\/1.1 400 /, JSON.stringify(line))
  }
  t.equal((await rawRequest(proxy.port, post('/p', 'a\x01b', '{}'))).status, 400)
  t.equal(upstream.seen.length, 0)
  t.equal((await rawRequest(proxy.port, post('/p', 'k', '{}'))).status, 201)
})

http1Test('K17 a 20 kB key gets 431, N=0', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  t.match(await everything(proxy.port, post('/p', 'k'.repeat(20_000), '{}')), /^HTTP\/1.1 431 /)
  t.equal(upstream.seen.length, 0)
})

void t.test('P11 Expect: 100-continue is answered by the proxy; N=1', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  for (const path of ['/p', '/other']) {
    const client = dial(proxy.port, post(path, 'k', '{}', ['Expect: 100-continue']).slice(0, -2))
    const [interim] = (await once(client, 'data')) as [Buffer]
    t.match(interim.toString(), /^HTTP\/1.1 100 Continue\r\n\r\n$/)
    client.write('{}')
    t.equal((await readAnswer(client)).status, 201)
    client.destroy()
  }
  t.equal(upstream.seen.length, 2)
  t.same(linesOf(upstream.seen[0]?.headers ?? [], 'expect'), [])
  const tea = post('/p', 'k2', '{}', ['Expect: tea', 'Connection: close'])
  t.match(await everything(proxy.port, tea), /^HTTP\/1.1 417 /)
  t.equal(upstream.seen.length, 2)
})

http1Test('P11 the `100 Continue` of a pipelined request comes in its turn, not in its answer', async (t) => {
  const body = 'x'.repeat(20_000)
  await using upstream = await upstreamStub((seen, response) => {
    if (seen.target === '/slow') setTimeout(() => response.end('slow'), 200)
    else response.end(body)
  })
  await using proxy = await proxyBefore(upstream)
  for (const path of ['/p', '/other']) {
    const client = dial(
      proxy.port,
      `GET /slow HTTP/1.1\r\nHost: a\r\n\r\n${post(path, 'k', '{}', ['Expect: 100-continue'])}`,
    )
    t.equal((await readAnswer(client)).body.toString(), 'slow')
    const answer = await readAnswer(client)
    t.equal(answer.status, 200)
    t.ok(answer.body.toString() === body, path)
    client.destroy()
  }
  // A client that waits for it gets it in its turn.
  const client = connect(proxy.port, '127.0.0.1')
  const [before = '', after = ''] = post('/p', 'k2', '{}', ['Expect: 100-continue']).split('{}')
  client.write(`GET /slow HTTP/1.1\r\nHost: a\r\n\r\n${before}${after}`)
  t.equal((await readAnswer(client)).body.toString(), 'slow')
  const [interim] = (await once(client.resume(), 'data')) as [Buffer]
  t.match(interim.toString(), /^HTTP\/1.1 100 Continue\r\n\r\n$/)
  client.write('{}')
  t.ok((await readAnswer(client)).body.toString() === body)
  client.destroy()
})

t.test('P18 F17 F12 a body at the limit is accepted, one byte more gets 413, in each framing', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream, { more: 'limits: { request: 1KiB }' })
  const chunked = (key: string, body: string, piece: number): string => {
    let text = ''
    for (let at = 0; at < body.length; at += piece) {
      const part = body.slice(at, at + piece)
      text += `${part.length.toString(16)}\r\n${part}\r\n`
    }
    const head = post('/p', key, '').replace('Content-Length: 0', 'Transfer-Encoding: chunked')
    return `${head}${text}0\r\n\r\n`
  }
  for (const size of [1023, 1024]) {
    const body = 'x'.repeat(size)
    t.equal((await rawRequest(proxy.port, post('/p', `k-${size}`, body))).status, 201)
    for (const piece of [1, 100, size]) {
      const answer = await rawRequest(proxy.port, chunked(`k-${size}`, body, piece))
      t.same(values(answer, 'idempotent-replayed'), ['true'], 'the same payload')
    }
  }
  t.equal(upstream.seen.length, 2)
  t.equal(upstream.seen[1]?.body.length, 1024)
  const before = await storeCalls(proxy)
  const over = 'x'.repeat(1025)
  const refused = { code: 'request_too_large', status: 413, retry: 'no' }
  for (const request of [post('/p', 'k', over), chunked('k', over, 1025), chunked('k', over, 1)])
    t.match(problemOf(await rawRequest(proxy.port, request)), refused)
  // Refused before the body is sent.
  const announced = post('/p', 'k', '').replace('Content-Length: 0', 'Content-Length: 99999999999')
  t.equal((await rawRequest(proxy.port, announced)).status, 413)
  t.equal(await storeCalls(proxy), before, 'nothing recorded')
  t.equal(upstream.seen.length, 2, 'N=0')
  t.equal((await rawRequest(proxy.port, post('/p', 'k', '{}'))).status, 201, 'the key is fresh')
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})

http1Test('P23 an absolute-form target chooses no upstream and dodges no route', async (t) => {
  await using upstream = await stub()
  await using elsewhere = await stub()
  await using proxy = await proxyBefore(upstream)
  const others = [`http://127.0.0.1:${elsewhere.port}/p?x=1`, 'HTTPS://user@evil.test/p?x=1']
  for (const target of [...others, '/p?x=1', ...others, '/p?x=1'])
    t.equal((await rawRequest(proxy.port, post(target, 'k', '{}'))).status, 201)
  t.equal(elsewhere.seen.length, 0)
  const targets = () => upstream.seen.map((one) => one.target)
  t.same(targets(), ['/p?x=1'], 'one record')
  for (const target of ['ftp://a/p', 'p', '*', '?x', 'http:/p', '//'])
    await rawRequest(proxy.port, post(target, 'k2', '{}', ['Connection: close']))
  t.equal(elsewhere.seen.length, 0)
  t.same(targets().slice(1), ['//'])
})

http1Test('P23 two Host lines, or none, are refused', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  for (const path of ['/p', '/other'])
    t.equal((await rawRequest(proxy.port, post(path, 'k', '{}', ['Host: evil.test']))).status, 400)
  t.equal((await rawRequest(proxy.port, 'POST /p HTTP/1.1\r\nContent-Length: 0\r\n\r\n')).status, 400)
  t.equal(upstream.seen.length, 0)
})

http1Test('P24 every request of the smuggling set is refused, N=0', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  const inner = 'POST /p HTTP/1.1\r\nHost: a\r\nIdempotency-Key: smuggled\r\nContent-Length: 2\r\n\r\n{}'
  for (const path of ['/p', '/other'])
    for (const framing of [
      `Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n`,
      `Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n`,
      `Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}`,
      `Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}`,
      `Content-Length: 2, 2\r\n\r\n{}`,
      `Content-Length: +2\r\n\r\n{}`,
      `Content-Length: -2\r\n\r\n{}`,
      `Content-Length: 0x2\r\n\r\n{}`,
      `Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n`,
      `Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n`,
      `Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n`,
      `Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n`,
      `Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n`,
      `Transfer-Encoding: chunked\r\n\r\n1;x\nab\r\n0\r\n\r\n`,
      `Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n`,
      `Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n`,
      `Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n\r\n`,
    ]) {
      const head = `POST ${path} HTTP/1.1\r\nHost: a\r\nIdempotency-Key: outer\r\n`
      const got = await everything(proxy.port, `${head}${framing}${inner}`)
      // A body that turns out bad after its head was passed on cannot be answered 400 by a streaming proxy.
      if (path === '/p' || !framing.startsWith('Transfer-Encoding: chunked\r\n\r\n'))
        t.match(got, /^(?:HTTP\/1.1 400 |$)/, JSON.stringify(framing))
      t.notMatch(got, / 201 /)
    }
  t.equal(upstream.seen.length, 0)
  t.equal((await rawRequest(proxy.port, post('/p', 'outer', '{}'))).status, 201, 'nothing was claimed')
})

http1Test('P24 a line with a bare LF, an empty name or a tab in its name is refused', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  for (const line of ['X: a\n', ': x\r\n', 'X\tY: 1\r\n']) {
    const request = post('/p', 'k', '{}', ['Connection: close']).replace('Content-L', `${line}Content-L`)
    t.notMatch(await everything(proxy.port, request), / 201 /)
  }
  t.equal(upstream.seen.length, 0)
})

void t.test('P25 a slow upload gets 408 before any claim exists', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream, { more: 'limits: { upload: 300ms }' })
  const before = await storeCalls(proxy)
  const client = dial(proxy.port, post('/p', 'k', ' '.repeat(100)).slice(0, -99)).on('error', () => {})
  const trickle = setInterval(() => client.write(' '), 50)
  const answer = await readAnswer(client)
  t.match(problemOf(answer), { code: 'request_timeout', status: 408, retry: 'same-key' })
  t.same(values(answer, 'connection'), ['close'])
  client.resume()
  await once(client, 'close')
  clearInterval(trickle)
  t.equal(await storeCalls(proxy), before, 'no claim')
  t.equal(upstream.seen.length, 0)
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
  await metricIs(proxy, 'idempotency_in_flight', 0)
  t.equal((await rawRequest(proxy.port, post('/p', 'k', '{}'))).status, 201)
})

t.test('P26 an aborted upload claims nothing; a half-closed connection runs once at most', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  const before = await storeCalls(proxy)
  for (const end of ['destroy', 'reset', 'end'] as const) {
    const client = dial(proxy.port, post('/p', 'k', ' '.repeat(100)).slice(0, -92)).on('error', () => {})
    await metricIs(proxy, 'idempotency_in_flight', 1)
    if (end === 'destroy') client.destroy()
    else if (end === 'reset') client.resetAndDestroy()
    else client.end()
    client.resume()
    await metricIs(proxy, 'idempotency_in_flight', 0)
  }
  t.equal(await storeCalls(proxy), before)
  t.equal(upstream.seen.length, 0)
  const client = connect({ port: proxy.port, host: '127.0.0.1', allowHalfOpen: true })
  client.end(post('/p', 'k', '{}'))
  client.resume()
  await once(client, 'close')
  // Half-closed counts as gone; whether it had been sent by then or not, it runs once.
  await metricIs(proxy, 'idempotency_in_flight', 0)
  t.equal((await rawRequest(proxy.port, post('/p', 'k', '{}'))).status, 201)
  t.equal(upstream.seen.length, 1)
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})

t.test('K16 percent-encoded CR and LF in a key or target pass as they are and split nothing', async (t) => {
  await using upstream = await stub()
  await using proxy = await proxyBefore(upstream)
  const key = 'k%0d%0aX-Evil: 1'
  t.equal((await rawRequest(proxy.port, post('/p%0d%0aX:1?q=%0a', key, '{}'))).status, 201)
  t.same(linesOf(upstream.seen[0]?.headers ?? [], 'x-evil'), [])
  t.equal(upstream.seen[0]?.target, '/p%0d%0aX:1?q=%0a')
  t.match(await everything(proxy.port, 'POST /p\x00 HTTP/1.1\r\nHost: a\r\n\r\n'), /^(?:HTTP\/1.1 400|$)/)
  t.equal(upstream.seen.length, 1)
})

const ROUTES = [
  '{ name: guarded, match: { path: /guarded }, limits: { request: 100KiB } }',
  '{ name: watched, match: { path: /watched }, mode: shadow, limits: { request: 100KiB } }',
].join(', ')

/** Below, at and above what is held outside Node's stream. */
const SIZES = [0, 1, 1000, 64 * 1024 - 1, 64 * 1024, 64 * 1024 + 1]

void t.test('§3.3 a body arrives whole wherever its bytes are cut, with a length or in chunks', async (t) => {
  await using upstream = await upstreamStub(({ body }, response) => void response.writeHead(201).end(body))
  await using proxy = await proxyBefore(upstream, { routes: ROUTES })
  const client = connect(proxy.port, '127.0.0.1').setNoDelay()
  let n = 0
  for (const path of ['/guarded', '/watched', '/passed'])
    for (const size of SIZES)
      for (const chunked of [false, true])
        for (const cut of ['nowhere', 'behind the head', 'in the body']) {
          const body = 'x'.repeat(size)
          const whole = chunked ? inChunks(post(path, `k${++n}`, ''), body) : post(path, `k${++n}`, body)
          const head = whole.indexOf('\r\n\r\n') + 4
          const at = { nowhere: whole.length, 'behind the head': head, 'in the body': head + (size >> 1) }[
            cut
          ]
          const arrived = upstream.arrived(n)
          client.write(whole.slice(0, at))
          if (at !== whole.length) for (let i = 0; i < 5; i++) await turn()
          client.write(whole.slice(at))
          const what = `${path}, ${size} bytes${chunked ? ' in chunks' : ''}, cut ${cut}`
          await arrived
          const answer = await readAnswer(client)
          t.equal(answer.status, 201, what)
          t.equal(answer.body.length, size, what)
        }
  client.destroy()
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})

void t.test('V10 pipelined bodies, small and large, stay with their requests', async (t) => {
  await using upstream = await upstreamStub(({ body }, response) => void response.writeHead(201).end(body))
  await using proxy = await proxyBefore(upstream, { routes: ROUTES })
  const client = connect(proxy.port, '127.0.0.1')
  const bodies = Array.from({ length: 40 }, (_, n) => String(n).padEnd(n % 5 === 4 ? 70_000 : n * 100, 'x'))
  client.write(bodies.map((body, n) => post(n % 2 ? '/guarded' : '/passed', `p${n}`, body)).join(''))
  for (const body of bodies) {
    const answer = await readAnswer(client)
    t.strictSame([answer.status, answer.body.toString() === body], [201, true], body.slice(0, 2))
  }
  client.destroy()
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})

function inChunks(request: string, body: string): string {
  const head = request.replace(/Content-Length: \d+/i, 'Transfer-Encoding: chunked')
  return `${head}${body === '' ? '' : `${body.length.toString(16)}\r\n${body}\r\n`}0\r\n\r\n`
}

http1Test('P18 Node’s parser gives each piece of a body memory of its own, which may be freed', async (t) => {
  const { promise, resolve } = Promise.withResolvers<Buffer>()
  const server = createServer((request) => void request.once('data', resolve))
  const connection = new Duplex({ read() {}, write: (_chunk, _encoding, done) => done() })
  server.emit('connection', connection)
  const sent = Buffer.allocUnsafeSlow(20_000).fill('a')
  connection.push(`POST / HTTP/1.1\r\nHost: a\r\nContent-Length: ${sent.length}\r\n\r\n`)
  setImmediate(() => connection.push(sent))
  const piece = await promise
  t.not(piece.buffer, sent.buffer)
  t.equal(piece.buffer.byteLength, piece.length)
  connection.destroy()
})

void t.test('P18 a connection keeps nothing of a body whose first piece came with its head', async (t) => {
  await using upstream = await upstreamStub((_seen, response) => void response.writeHead(204).end())
  await using proxy = await proxyBefore(upstream, { routes: ROUTES })
  const clients = Array.from({ length: 32 }, () => connect(proxy.port, '127.0.0.1').setNoDelay())
  // More than fits in one read.
  const body = 'x'.repeat(80_000)
  const round = async (sent: string): Promise<void> => {
    for (const [n, client] of clients.entries()) {
      client.write(post('/guarded', `${sent.length}-${n}`, sent))
      t.equal((await readAnswer(client)).status, 204)
    }
    upstream.seen.length = 0
  }
  // Node's parser never sees this one.
  await round('x')
  const before = await externalBytes()
  await round(body)
  t.ok((await externalBytes()) - before < (clients.length * body.length) / 2)
  for (const client of clients) client.destroy()
})

/** Bytes outside V8's heap, after garbage collection. */
async function externalBytes(): Promise<number> {
  setFlagsFromString('--expose-gc')
  const gc = runInNewContext('gc') as () => void
  for (let i = 0; i < 3; i++) {
    gc()
    await turn()
  }
  return process.memoryUsage().arrayBuffers
}
