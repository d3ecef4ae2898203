import { createServer } from 'node:http'
import { connect } from 'node:net'
import { Duplex } from 'node:stream'
import { setImmediate as turn } from 'node:timers/promises'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import t from 'tap'
import { metricIs, proxyBefore } from '../support/exchange.ts'
import { post, readAnswer } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

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

void t.test(
  'P18 Node’s parser gives each piece of a body memory of its own, which may be freed',
  async (t) => {
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
  },
)

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
