/** Connections that end at moments left to chance, and one that is never made. */
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
import t from 'tap'
import { metricIs, problemOf, proxyBefore, scriptedPeer } from '../support/exchange.ts'
import { faulty, OK, poolWorks, REQUEST, seen, unknownNow } from '../support/faulty.ts'
import { post, type RawAnswer, rawRequest } from '../support/raw.ts'

void t.test('U01 a connection that is not made in time gets 502 and frees the key', async (t) => {
  const server = createServer(() => {}).listen({ port: 0, host: '127.0.0.1', backlog: 1 })
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  server.close()
  // A process that listens and never accepts: SIGSTOP keeps the kernel's queue full.
  const child = spawn(process.execPath, [
    '-e',
    `require('net').createServer().listen({port:${port},host:'127.0.0.1',backlog:1},()=>console.log('up'))`,
  ])
  await once(child.stdout, 'data')
  child.kill('SIGSTOP')
  const fillers = Array.from({ length: 8 }, () => connect(port, '127.0.0.1').on('error', () => {}))
  await Promise.race(fillers.map((socket) => once(socket, 'connect')))
  await new Promise((resolve) => setTimeout(resolve, 200))
  await using proxy = await proxyBefore(
    { url: `http://127.0.0.1:${port}` },
    { upstream: 'connectTimeout: 300ms' },
  )
  const problem = problemOf(await rawRequest(proxy.port, REQUEST))
  t.match(problem, { code: 'upstream_unreachable', status: 502 })
  t.equal(await proxy.metric('idempotency_completions_total{route="r",result="released"}'), 1)
  for (const socket of fillers) socket.destroy()
  child.kill('SIGKILL')
})

for (const [what, breaks] of [
  ['U01 a reset while connecting or right after', (socket: Socket) => void socket.resetAndDestroy()],
  ['U02 a connection closed at once', (socket: Socket) => void socket.destroy()],
] as const)
  void t.test(`${what} leads to at most one execution`, async (t) => {
    // Whether the request's first bytes were sent before the end came is a race; the answer tells which.
    await using peer = await faulty(breaks)
    await using proxy = await proxyBefore(peer)
    const { code } = problemOf(await rawRequest(proxy.port, REQUEST))
    if (code === 'upstream_unreachable') t.equal((await rawRequest(proxy.port, REQUEST)).status, 201)
    else {
      t.equal(code, 'upstream_failed')
      await unknownNow(t, proxy)
    }
    t.ok(seen(peer.requests) <= 1)
    await poolWorks(t, proxy)
  })

void t.test('U02 requests that race the close of a kept connection execute at most once', async (t) => {
  const requests = new Map<string, number>()
  await using peer = await scriptedPeer((socket, request) => {
    const key = /idempotency-key: (\S+)/i.exec(request)?.[1] as string
    requests.set(key, (requests.get(key) ?? 0) + 1)
    socket.write(OK)
    setImmediate(() => setImmediate(() => socket.end()))
  })
  await using proxy = await proxyBefore(peer, { upstream: 'connections: 1' })
  for (let i = 0; i < 200; i++) {
    const answer = await rawRequest(proxy.port, post('/p', `r-${i}`, '{}'))
    if (answer.status === 201) continue
    const { code } = problemOf(answer)
    const retry: RawAnswer = await rawRequest(proxy.port, post('/p', `r-${i}`, '{}'))
    if (code === 'upstream_unreachable') continue
    t.match(problemOf(retry), { code: 'idempotency_outcome_unknown' })
  }
  t.ok(
    [...requests.values()].every((n) => n === 1),
    'no key executed twice',
  )
  await metricIs(proxy, 'idempotency_buffered_bytes', 0)
})
