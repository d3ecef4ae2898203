import { connect, type Socket } from 'node:net'
import t, { type Test } from 'tap'
import { WebSocket, WebSocketServer } from 'ws'
import {
  configFile,
  gate,
  newKey,
  onlyRecord,
  redisSnapshot,
  STATE,
  send,
  stateOf,
  tempDir,
  until,
} from '../support/e2e.ts'
import { type ChildProxy, proxyInProcess, proxyProcess } from '../support/proxy.ts'
import { post, readAnswer } from '../support/raw.ts'
import { RedisServer } from '../support/redis.ts'
import { relay } from '../support/relay.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(600_000)

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())
t.beforeEach(async () => void (await redis.command('FLUSHALL')))

const ALICE = ['Authorization: Bearer alice']
const BIG = 24 * 1024 * 1024

/** Answers `/gated…` when the gate opens, `/stream` as an event stream that ends then, `/big` with 24 MiB, others at once. */
async function world(t: Test) {
  const work = gate()
  const upstream = await upstreamStub(async ({ target }, response) => {
    if (target === '/stream') {
      response.writeHead(200, { 'content-type': 'text/event-stream' }).write('data: first\n\n')
      await work.opened
      response.end('data: last\n\n')
      return
    }
    if (target === '/download') {
      response.writeHead(200, { 'content-length': '10' }).write('first')
      await work.opened
      response.end('later')
      return
    }
    if (target.startsWith('/gated')) await work.opened
    response.writeHead(201).end(target === '/big' ? Buffer.alloc(BIG, 'x') : `done ${target}`)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const start = async (more = '', store = redis.url): Promise<ChildProxy> => {
    const file = configFile(
      tempDir(t),
      `upstream: { url: "${upstream.url}" }\nstore: { url: "${store}" }\n${more}`,
    )
    const proxy = await proxyProcess(file)
    t.teardown(() => proxy[Symbol.asyncDispose]())
    return proxy
  }
  return { upstream, work, start }
}

function dial(t: Test, port: number): Socket {
  const socket = connect(port, '127.0.0.1').on('error', () => {})
  t.teardown(() => socket.destroy())
  return socket
}

/** Resolves once the proxy has handled earlier events of its sockets. */
async function turned({ adminUrl }: { readonly adminUrl: string }): Promise<void> {
  for (let n = 0; n < 3; n++) await (await fetch(`${adminUrl}/livez`)).text()
}

function draining(proxy: ChildProxy): Promise<unknown> {
  proxy.kill('SIGTERM')
  return proxy.logged(({ msg }) => msg === 'draining')
}

async function state(): Promise<number> {
  return stateOf((await onlyRecord(redis)).bytes)
}

void t.test('X01 a client that leaves after the request was sent changes nothing', async (t) => {
  const { upstream, work } = await world(t)
  await using proxy = await proxyInProcess(
    `upstream: { url: "${upstream.url}" }\nstore: { url: "${redis.url}" }`,
  )
  const key = newKey()
  const socket = dial(t, proxy.port)
  socket.write(post('/gated', key, '{"amount":1}', ALICE))
  await upstream.arrived(1)
  socket.destroy()
  await turned(proxy)
  work.open()
  const line = await proxy.logged(({ msg }) => msg === 'request')
  t.match(line, { outcome: 'executed', after: 'completed' })
  const retry = await send(proxy, key, { path: '/gated' })
  t.strictSame([retry.status, retry.replayed, retry.body], [201, true, 'done /gated'])
  t.equal(upstream.seen.length, 1)
})

void t.test('X02 when a client leaves during its claim, nothing is executed', async (t) => {
  const { upstream } = await world(t)
  await using wire = await relay(redis.port)
  await using proxy = await proxyInProcess(
    `upstream: { url: "${upstream.url}" }\nstore: { url: "redis://127.0.0.1:${wire.port}", timeout: 10s }`,
  )
  const key = newKey()
  const claimed = gate()
  wire.onCommand = (bytes) => {
    if (!bytes.includes('IP\x01\x01', 0, 'latin1')) return
    wire.passCommands = false
    claimed.open()
  }
  const socket = dial(t, proxy.port)
  socket.write(post('/pay', key, '{"amount":1}', ALICE))
  await claimed.opened
  wire.onCommand = () => {}
  socket.destroy()
  await turned(proxy)
  wire.release()
  await proxy.logged(({ msg }) => msg === 'request')
  t.equal(upstream.seen.length, 0)
  const retry = await send(proxy, key)
  t.strictSame([retry.status, retry.replayed], [201, false], 'a later retry is fresh')
  t.equal(upstream.seen.length, 1)
})

void t.test(
  'X01 clients that leave at any point leave nothing behind: no request in flight, no byte held',
  async (t) => {
    const { upstream, work } = await world(t)
    await using proxy = await proxyInProcess(
      `upstream: { url: "${upstream.url}" }\nstore: { url: "${redis.url}" }\nlimits: { response: 1MiB }`,
    )
    const leave = async (
      path: string,
      cut: number,
      when: (socket: Socket) => Promise<unknown>,
    ): Promise<void> => {
      const socket = dial(t, proxy.port)
      const bytes = post(path, newKey(), '{"amount":1}', ALICE)
      socket.write(bytes.slice(0, bytes.length - cut))
      await when(socket)
      socket.destroy()
      await turned(proxy)
    }
    const some = (socket: Socket): Promise<unknown> => new Promise((resolve) => socket.once('data', resolve))
    await leave('/pay', 5, async () =>
      until(async () => (await proxy.metric('idempotency_buffered_bytes')) > 0),
    )
    await leave('/gated', 0, () => upstream.arrived(1))
    await leave('/stream', 0, some)
    await leave('/big', 0, some)
    await leave('/pay', 0, async () => {})
    t.ok((await proxy.metric('idempotency_in_flight')) >= 2, 'requests that were sent go on')
    work.open()
    await until(async () => (await proxy.metric('idempotency_in_flight')) === 0)
    await until(async () => (await proxy.metric('idempotency_buffered_bytes')) === 0)
    const records = [...(await redisSnapshot(redis))].filter(([key]) => key.includes(':r:'))
    t.ok(records.length >= 3)
    for (const [, value] of records)
      t.ok([STATE.completed, STATE.failed_retryable].includes(value.charCodeAt(3) as 2 | 3))
  },
)

void t.test(
  'X04 SIGTERM: readiness fails at once, calls in flight finish and are stored, exit 0',
  async (t) => {
    const { upstream, work, start } = await world(t)
    const proxy = await start()
    const key = newKey()
    const asked = send(proxy, key, { path: '/gated' })
    await upstream.arrived(1)
    t.equal((await fetch(`${proxy.adminUrl}/readyz`)).status, 200)
    await draining(proxy)
    const ready = await fetch(`${proxy.adminUrl}/readyz`)
    t.equal(ready.status, 503)
    t.match(await ready.json(), { draining: true })
    t.equal((await fetch(`${proxy.adminUrl}/livez`)).status, 200)
    await refused(proxy)
    work.open()
    const reply = await asked
    t.strictSame([reply.status, reply.body], [201, 'done /gated'])
    t.equal(reply.headers.get('connection'), 'close')
    t.equal(await proxy.exited, 0)
    t.equal(await state(), STATE.completed)
    const other = await start()
    t.ok((await send(other, key, { path: '/gated' })).replayed)
    t.equal(upstream.seen.length, 1)
  },
)

/** Resolves when new connections are refused. */
function refused({ port }: ChildProxy): Promise<void> {
  return until(
    () =>
      new Promise<boolean>((resolve) => {
        const socket = connect(port, '127.0.0.1')
        socket.once('error', () => resolve(true))
        socket.once('connect', () => {
          socket.destroy()
          resolve(false)
        })
      }),
  )
}

void t.test('X04 requests are still served for drain.delay, on new connections too', async (t) => {
  const { work, start } = await world(t)
  const proxy = await start('drain: { delay: 6s }')
  await draining(proxy)
  t.equal((await fetch(`${proxy.adminUrl}/readyz`)).status, 503)
  const fresh = dial(t, proxy.port)
  fresh.write(post('/pay', newKey(), '{}', ALICE))
  t.equal((await readAnswer(fresh)).status, 201)
  await refused(proxy)
  work.open()
  t.equal(await proxy.exited, 0)
})

void t.test('X04 a second SIGTERM and a SIGINT change nothing', async (t) => {
  const { upstream, work, start } = await world(t)
  const proxy = await start()
  const asked = send(proxy, newKey(), { path: '/gated' })
  await upstream.arrived(1)
  await draining(proxy)
  proxy.kill('SIGTERM')
  proxy.kill('SIGINT')
  await proxy.logged(({ msg, signal }) => msg === 'stopping' && signal === 'SIGINT')
  work.open()
  t.equal((await asked).status, 201)
  t.equal(await proxy.exited, 0)
})

void t.test('X04 a drain waits for calls whose clients left, and stores them', async (t) => {
  const { upstream, work, start } = await world(t)
  const proxy = await start()
  const socket = dial(t, proxy.port)
  socket.write(post('/gated', newKey(), '{"amount":1}', ALICE))
  await upstream.arrived(1)
  socket.destroy()
  await turned(proxy)
  await draining(proxy)
  await refused(proxy)
  t.equal(await state(), STATE.in_progress)
  work.open()
  t.equal(await proxy.exited, 0)
  t.equal(await state(), STATE.completed)
})

void t.test('X04 a running stream reaches its end during a drain, and is recorded', async (t) => {
  const { upstream, work, start } = await world(t)
  const proxy = await start()
  const answer = await fetch(`${proxy.url}/stream`, {
    method: 'POST',
    headers: { authorization: 'Bearer alice', 'idempotency-key': newKey() },
  })
  await upstream.arrived(1)
  await draining(proxy)
  await refused(proxy)
  t.equal(await state(), STATE.in_progress)
  work.open()
  t.equal(await answer.text(), 'data: first\n\ndata: last\n\n')
  t.equal(await proxy.exited, 0)
  t.equal(await state(), STATE.completed)
})

void t.test('X04 a stream whose client left reaches its end during a drain, and is recorded', async (t) => {
  const { upstream, work, start } = await world(t)
  const proxy = await start()
  const socket = dial(t, proxy.port)
  socket.write(post('/stream', newKey(), '{}', ALICE))
  await new Promise((resolve) => socket.once('data', resolve))
  socket.destroy()
  await turned(proxy)
  await draining(proxy)
  await refused(proxy)
  work.open()
  t.equal(await proxy.exited, 0)
  t.equal(await state(), STATE.completed)
  t.equal(upstream.seen.length, 1)
})

void t.test('X04 a drain lets pass-through responses finish', async (t) => {
  const { upstream, work, start } = await world(t)
  const proxy = await start()
  const answer = await fetch(`${proxy.url}/download`)
  await upstream.arrived(1)
  await draining(proxy)
  await refused(proxy)
  work.open()
  t.equal(await answer.text(), 'firstlater')
  t.equal(await proxy.exited, 0)
})

void t.test('X04 a response that a client is still reading is not cut off', async (t) => {
  const { start } = await world(t)
  // Far more than the kernel buffers for a connection.
  const proxy = await start('limits: { response: 32MiB, buffered: 64MiB }', 'memory:')
  const socket = dial(t, proxy.port)
  const parts: Buffer[] = []
  const begun = gate()
  socket.on('data', (chunk: Buffer) => {
    parts.push(chunk)
    if (parts.length > 1) return
    socket.pause()
    begun.open()
  })
  const ended = new Promise((resolve) => socket.once('end', resolve))
  socket.write(post('/big', newKey(), '{}', ALICE))
  await begun.opened
  await proxy.logged(({ msg }) => msg === 'request')
  await draining(proxy)
  await refused(proxy)
  socket.resume()
  await ended
  const bytes = Buffer.concat(parts)
  t.equal(bytes.length - bytes.indexOf('\r\n\r\n') - 4, BIG)
  t.equal(await proxy.exited, 0)
})

void t.test(
  'X04 idle and silent connections are closed, and a WebSocket does not hold the drain',
  async (t) => {
    const { upstream, start } = await world(t)
    const sockets = new WebSocketServer({ server: upstream.server })
    t.teardown(() => sockets.close())
    const proxy = await start()
    const idle = dial(t, proxy.port)
    idle.write(post('/pay', newKey(), '{}', ALICE))
    t.equal((await readAnswer(idle)).status, 201)
    const silent = dial(t, proxy.port)
    const scraper = dial(t, Number(new URL(proxy.adminUrl).port))
    const tunnel = new WebSocket(proxy.url.replace('http:', 'ws:'))
    tunnel.on('error', () => {})
    t.teardown(() => tunnel.terminate())
    await new Promise((resolve) => tunnel.once('open', resolve))
    const closed = [idle, silent, scraper].map(
      (socket) => new Promise((resolve) => socket.resume().once('close', resolve)),
    )
    const cut = new Promise((resolve) => tunnel.once('close', resolve))
    await draining(proxy)
    t.equal(await proxy.exited, 0)
    await Promise.all([...closed, cut])
  },
)

void t.test('X05 past drain.timeout requests in flight are marked unknown, exit 0', async (t) => {
  const { upstream, start } = await world(t)
  const proxy = await start('drain: { timeout: 100ms }')
  const key = newKey()
  const asked = send(proxy, key, { path: '/gated' }).catch((error: unknown) => error)
  await upstream.arrived(1)
  await draining(proxy)
  t.equal(await proxy.exited, 0)
  await asked
  t.equal(await state(), STATE.unknown)
  const other = await start()
  const before = await redisSnapshot(redis)
  const retry = await send(other, key, { path: '/gated' })
  t.strictSame([retry.status, retry.code], [409, 'idempotency_outcome_unknown'], 'nobody waits for the lease')
  t.strictSame(await redisSnapshot(redis), before)
  t.equal(upstream.seen.length, 1)
})

void t.test(
  'X05 a live stream past drain.timeout is marked unknown, and its client sees no clean end',
  async (t) => {
    const { start } = await world(t)
    const proxy = await start('drain: { timeout: 100ms }')
    const key = newKey()
    const answer = await fetch(`${proxy.url}/stream`, {
      method: 'POST',
      headers: { authorization: 'Bearer alice', 'idempotency-key': key },
    })
    await draining(proxy)
    await t.rejects(answer.text())
    t.equal(await proxy.exited, 0)
    t.equal(await state(), STATE.unknown)
  },
)

void t.test('X04 a drain writes outcomes that the store had refused', async (t) => {
  const { upstream, work, start } = await world(t)
  await using wire = await relay(redis.port)
  const proxy = await start('', `redis://127.0.0.1:${wire.port}`)
  const key = newKey()
  const asked = send(proxy, key, { path: '/gated' })
  await upstream.arrived(1)
  wire.accept = false
  wire.cut()
  await proxy.logged(({ msg }) => /store (disconnected|error)/.test(String(msg)))
  work.open()
  t.equal((await asked).status, 201)
  await proxy.logged(({ msg }) => /did not take an outcome/.test(String(msg)))
  t.equal(await state(), STATE.in_progress)
  const line = await draining(proxy)
  t.match(line, { unsettled: 1 })
  wire.accept = true
  t.equal(await proxy.exited, 0)
  t.equal(await state(), STATE.completed)
  const other = await start()
  t.ok((await send(other, key, { path: '/gated' })).replayed)
  t.equal(upstream.seen.length, 1)
})

void t.test(
  'X05 a store that stays down past drain.timeout: the lost outcome is logged as an error, exit 0',
  async (t) => {
    const { upstream, work, start } = await world(t)
    await using wire = await relay(redis.port)
    const proxy = await start('drain: { timeout: 300ms }', `redis://127.0.0.1:${wire.port}`)
    const asked = send(proxy, newKey(), { path: '/gated' })
    await upstream.arrived(1)
    wire.accept = false
    wire.cut()
    await proxy.logged(({ msg }) => /store (disconnected|error)/.test(String(msg)))
    work.open()
    t.equal((await asked).status, 201)
    await proxy.logged(({ msg }) => /did not take an outcome/.test(String(msg)))
    proxy.kill('SIGTERM')
    t.match(await proxy.logged(({ msg }) => /is lost/.test(String(msg))), { level: 'error' })
    t.equal(await proxy.exited, 0)
  },
)

void t.test(
  'X07 an owner paused for two leases: its record reads unknown, then its late outcome counts',
  async (t) => {
    const { upstream, work, start } = await world(t)
    const [owner, other] = await Promise.all([
      start('defaults: { lease: 1s }'),
      start('defaults: { lease: 1s }'),
    ])
    const key = newKey()
    const asked = send(owner, key, { path: '/gated' })
    await upstream.arrived(1)
    owner.kill('SIGSTOP')
    const claimedAt = (await onlyRecord(redis)).bytes.readUIntBE(32, 6)
    await until(async () => Number(((await redis.command('TIME')) as string[])[0]) * 1000 > claimedAt + 2500)
    t.equal((await send(other, key, { path: '/gated' })).code, 'idempotency_outcome_unknown')
    owner.kill('SIGCONT')
    work.open()
    t.equal((await asked).body, 'done /gated')
    for (const replica of [owner, other]) {
      const retry = await send(replica, key, { path: '/gated' })
      t.strictSame([retry.replayed, retry.body], [true, 'done /gated'])
    }
    t.equal(upstream.seen.length, 1)
  },
)
