import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
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
import { proxyProcess, type TestProxy } from '../support/proxy.ts'
import { post, rawRequest, readAnswer } from '../support/raw.ts'
import { emptyRedis } from '../support/redis.ts'
import { relay } from '../support/relay.ts'
import { replicas } from '../support/replicas.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

const redis = await emptyRedis(t)

const ALICE = ['Authorization: Bearer alice']
const BIG = 24 * 1024 * 1024
/** Far more than the kernel buffers for a connection. */
const ROOM = 'limits: { response: 32MiB, buffered: 64MiB }'

/** Answers `/gated…` when the gate opens, `/stream` and `/download` in part before it opens, `/big` with 24 MiB, others at once. */
async function world(t: Test) {
  const work = gate()
  const parts: Record<string, readonly [Record<string, string>, string, string]> = {
    '/stream': [{ 'content-type': 'text/event-stream' }, 'data: first\n\n', 'data: last\n\n'],
    '/download': [{ 'content-length': '10' }, 'first', 'later'],
  }
  const upstream = await upstreamStub(async ({ target }, response) => {
    const [head, first, last] = parts[target] ?? []
    if (first !== undefined) {
      response.writeHead(200, head).write(first)
      await work.opened
      response.end(last)
      return
    }
    if (target.startsWith('/gated')) await work.opened
    response.writeHead(201).end(target === '/big' ? Buffer.alloc(BIG, 'x') : `done ${target}`)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const yaml = (more: string, store = redis.url) =>
    `upstream: { url: "${upstream.url}" }\nstore: { url: "${store}", timeout: 10s }\n${more}`
  const start = async (more = '', store?: string): Promise<TestProxy> =>
    (await replicas(t, 1, yaml(more, store)))[0] as TestProxy
  return { upstream, work, yaml, start }
}

/** A request that the test can give up. */
function dial(t: Test, { port }: TestProxy, path: string, cut = 0): Socket {
  const socket = connect(port, '127.0.0.1').on('error', () => {})
  t.teardown(() => socket.destroy())
  const bytes = post(path, newKey(), '{"amount":1}', ALICE)
  socket.write(bytes.slice(0, bytes.length - cut))
  return socket
}

function some(socket: Socket): Promise<unknown> {
  return new Promise((resolve) => socket.once('data', resolve))
}

/** Resolves once the proxy has handled earlier events of its sockets. */
async function turned({ adminUrl }: TestProxy): Promise<void> {
  for (let n = 0; n < 3; n++) await (await fetch(`${adminUrl}/livez`)).text()
}

/** Resolves when new connections are refused. */
function refused({ port }: TestProxy): Promise<void> {
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

async function state(): Promise<number> {
  return stateOf((await onlyRecord(redis)).bytes)
}

t.test('X01 clients may leave at any point: nothing stays behind, and what was sent is stored', async (t) => {
  const { upstream, work, start } = await world(t)
  const proxy = await start('limits: { response: 1MiB }')
  const leave = async (path: string, cut: number, when: (socket: Socket) => unknown): Promise<void> => {
    const socket = dial(t, proxy, path, cut)
    await when(socket)
    socket.destroy()
    await turned(proxy)
  }
  await leave('/pay', 5, () => until(async () => (await proxy.metric('idempotency_buffered_bytes')) > 0))
  await leave('/gated', 0, () => upstream.arrived(1))
  await leave('/stream', 0, some)
  await leave('/big', 0, some)
  await leave('/pay', 0, () => {})
  t.ok((await proxy.metric('idempotency_in_flight')) >= 2, 'requests that were sent go on')
  work.open()
  await until(async () => (await proxy.metric('idempotency_in_flight')) === 0)
  await until(async () => (await proxy.metric('idempotency_buffered_bytes')) === 0)
  const records = [...(await redisSnapshot(redis))].filter(([key]) => key.includes(':r:'))
  t.ok(records.length >= 3)
  for (const [, value] of records)
    t.ok([STATE.completed, STATE.failed_retryable].includes(value.charCodeAt(3) as 2 | 3))
})

t.test('X04 SIGTERM: readiness fails at once; calls in flight finish and are stored; exit 0', async (t) => {
  const { upstream, work, yaml, start } = await world(t)
  await using proxy = await proxyProcess(configFile(tempDir(t), yaml('')))
  const key = newKey()
  const asked = send(proxy, key, { path: '/gated' })
  await upstream.arrived(1)
  t.equal((await fetch(`${proxy.adminUrl}/readyz`)).status, 200)
  proxy.kill('SIGTERM')
  await proxy.logged(({ msg }) => msg === 'draining')
  const ready = await fetch(`${proxy.adminUrl}/readyz`)
  t.equal(ready.status, 503)
  t.match(await ready.json(), { draining: true })
  t.equal((await fetch(`${proxy.adminUrl}/livez`)).status, 200)
  await refused(proxy)
  // Further signals change nothing.
  proxy.kill('SIGTERM')
  proxy.kill('SIGINT')
  await proxy.logged(({ msg, signal }) => msg === 'stopping' && signal === 'SIGINT')
  work.open()
  const reply = await asked
  t.strictSame([reply.status, reply.body], [201, 'done /gated'])
  t.equal(reply.headers.get('connection'), 'close')
  t.equal(await proxy.exited, 0)
  t.equal(await state(), STATE.completed)
  t.ok((await send(await start(), key, { path: '/gated' })).replayed)
  t.equal(upstream.seen.length, 1)
})

void t.test('X04 O10 requests are still served for drain.delay, on new connections too', async (t) => {
  const { yaml } = await world(t)
  await using proxy = await proxyProcess(configFile(tempDir(t), yaml('drain: { delay: 10m }')))
  proxy.kill('SIGTERM')
  await proxy.logged(({ msg }) => msg === 'draining')
  const statuses = ['/readyz', '/livez', '/startupz'].map(
    async (path) => (await fetch(`${proxy.adminUrl}${path}`)).status,
  )
  t.strictSame(await Promise.all(statuses), [503, 200, 200])
  t.equal((await readAnswer(dial(t, proxy, '/pay'))).status, 201)
})

/** What a drain waits for: each is begun, outlasts the start of the drain, and reaches its end. */
const WAITED_FOR: Readonly<
  Record<
    string,
    { readonly path: string; readonly leaves: boolean; readonly method?: string; readonly text?: string }
  >
> = {
  'a call whose client left': { path: '/gated', leaves: true },
  'a running stream': { path: '/stream', leaves: false, text: 'data: first\n\ndata: last\n\n' },
  'a stream whose client left': { path: '/stream', leaves: true },
  'a pass-through response': { path: '/download', leaves: false, method: 'GET', text: 'firstlater' },
}

for (const [what, { path, leaves, method = 'POST', text }] of Object.entries(WAITED_FOR))
  void t.test(`X04 a drain lets ${what} reach its end, and it is recorded`, async (t) => {
    const { upstream, work, start } = await world(t)
    const proxy = await start()
    const leaving = new AbortController()
    const headers = { authorization: 'Bearer alice', 'idempotency-key': newKey() }
    const asked = fetch(proxy.url + path, { method, headers, signal: leaving.signal })
    await upstream.arrived(1)
    if (path !== '/gated') await asked
    if (leaves) {
      leaving.abort()
      await asked.catch(() => {})
      await turned(proxy)
    }
    const drained = proxy.drain()
    await refused(proxy)
    if (method === 'POST') t.equal(await state(), STATE.in_progress)
    work.open()
    if (text !== undefined) t.equal(await (await asked).text(), text)
    await drained
    if (method === 'POST') t.equal(await state(), STATE.completed)
    t.equal(upstream.seen.length, 1)
  })

void t.test('X04 a response that a client is still reading is not cut off', async (t) => {
  const { start } = await world(t)
  const proxy = await start(ROOM, 'memory:')
  const parts: Buffer[] = []
  const begun = gate()
  const socket = dial(t, proxy, '/big')
  socket.on('data', (chunk: Buffer) => {
    parts.push(chunk)
    if (parts.length > 1) return
    socket.pause()
    begun.open()
  })
  const ended = new Promise((resolve) => socket.once('end', resolve))
  await begun.opened
  await proxy.logged(({ msg }) => msg === 'request')
  const drained = proxy.drain()
  await refused(proxy)
  socket.resume()
  await ended
  const bytes = Buffer.concat(parts)
  t.equal(bytes.length - bytes.indexOf('\r\n\r\n') - 4, BIG)
  await drained
})

t.test('Y19 a drain serves the connections accepted last, also those that only the kernel has', async (t) => {
  const { start } = await world(t)
  const proxy = await start('', 'memory:')
  const dialled = (): Socket => {
    const socket = connect(proxy.port, '127.0.0.1')
    t.teardown(() => socket.destroy())
    return socket
  }
  const bytes = (): string => post('/pay', newKey(), '{"amount":1}', ALICE)
  const [silent, half] = [dialled(), dialled()]
  await Promise.all([silent, half].map((socket) => once(socket, 'connect')))
  const begun = bytes()
  half.write(begun.slice(0, 40))
  t.equal((await rawRequest(proxy.port, bytes())).status, 201, 'by now its beginning was read')
  const drained = proxy.drain()
  const last = Array.from({ length: 40 }, dialled)
  for (const socket of last) socket.write(bytes())
  const answers = Promise.all([...last, silent, half].map(readAnswer))
  await refused(proxy)
  half.write(begun.slice(40))
  silent.write(bytes())
  for (const { status } of await answers) t.equal(status, 201)
  await drained
})

void t.test(
  'Y19 a drain serves or refuses the connections that come while the process is at other work',
  async (t) => {
    const { start } = await world(t)
    const proxy = await start('', 'memory:')
    const last: Promise<unknown>[] = []
    let turns = 0
    // In each turn of the event loop, after it was seen who had come. In most turns nobody does.
    const work = (socket: Socket): void => {
      for (const until = performance.now() + 0.3; performance.now() < until; );
      if (++turns % 10 === 0)
        last.push(
          readAnswer(dial(t, proxy, '/pay')).then(
            ({ status }) => String(status),
            ({ code }: NodeJS.ErrnoException) => code,
          ),
        )
      if (turns < 100) socket.write('x')
      else socket.end()
    }
    const own = createServer((socket) => socket.on('data', () => work(socket))).listen(0)
    await once(own, 'listening')
    const other: Socket = connect((own.address() as AddressInfo).port).on('data', () => work(other))
    await once(other, 'connect')
    const drained = proxy.drain()
    other.write('x')
    await once(other, 'close')
    own.close()
    const got = await Promise.all(last)
    t.equal(got.length, 10)
    t.same(
      got.filter((how) => how !== '201' && how !== 'ECONNREFUSED'),
      [],
    )
    await drained
  },
)

void t.test('X04 idle and silent connections are closed; a WebSocket does not hold the drain', async (t) => {
  const { upstream, start } = await world(t)
  const sockets = new WebSocketServer({ server: upstream.server })
  t.teardown(() => sockets.close())
  const proxy = await start()
  const idle = dial(t, proxy, '/pay')
  t.equal((await readAnswer(idle)).status, 201)
  const silent = [proxy.port, Number(new URL(proxy.adminUrl).port)].map((port) =>
    connect(port, '127.0.0.1').on('error', () => {}),
  )
  const tunnel = new WebSocket(proxy.url.replace('http:', 'ws:'))
  tunnel.on('error', () => {})
  t.teardown(() => tunnel.terminate())
  await new Promise((resolve) => tunnel.once('open', resolve))
  const closed = [idle, ...silent].map(
    (socket) => new Promise((resolve) => socket.resume().once('close', resolve)),
  )
  const cut = new Promise((resolve) => tunnel.once('close', resolve))
  await proxy.drain()
  await Promise.all([...closed, cut])
  t.pass('ended')
})

for (const path of ['/gated', '/stream'])
  void t.test(`X05 past drain.timeout a request in flight is marked unknown: ${path}`, async (t) => {
    const { upstream, start } = await world(t)
    const proxy = await start('drain: { timeout: 10ms }')
    const key = newKey()
    const headers = { authorization: 'Bearer alice', 'content-type': 'application/json' }
    const asked = fetch(proxy.url + path, {
      method: 'POST',
      headers: { ...headers, 'idempotency-key': key },
      body: '{"amount":1}',
    }).then((answer) => answer.text())
    const failed = t.rejects(asked, 'its client sees no clean end')
    await upstream.arrived(1)
    await proxy.drain()
    await failed
    t.equal(await state(), STATE.unknown)
    const other = await start()
    const before = await redisSnapshot(redis)
    const retry = await send(other, key, { path })
    t.strictSame([retry.status, retry.code], [409, 'idempotency_outcome_unknown'], 'without waiting a lease')
    t.strictSame(await redisSnapshot(redis), before)
    t.equal(upstream.seen.length, 1)
  })

for (const isBack of [true, false])
  void t.test(
    isBack
      ? 'X04 a drain writes outcomes that the store had refused'
      : 'X05 a store that stays down past drain.timeout: the lost outcome is logged as an error',
    async (t) => {
      const { upstream, work, start } = await world(t)
      await using wire = await relay(redis.port)
      const proxy = await start(isBack ? '' : 'drain: { timeout: 10ms }', `redis://127.0.0.1:${wire.port}`)
      const key = newKey()
      const asked = send(proxy, key, { path: '/gated' })
      await upstream.arrived(1)
      wire.accept = false
      wire.cut()
      await proxy.logged(({ msg }) => /store (disconnected|error)/.test(String(msg)))
      work.open()
      t.equal((await asked).status, 201)
      await proxy.logged(({ msg }) => /did not accept an outcome/.test(String(msg)))
      t.equal(await state(), STATE.in_progress)
      const drained = proxy.drain()
      t.match(await proxy.logged(({ msg }) => msg === 'draining'), { unsettled: 1 })
      wire.accept = isBack
      await drained
      if (!isBack)
        return void t.match(await proxy.logged(({ msg }) => /is lost/.test(String(msg))), { level: 50 })
      t.equal(await state(), STATE.completed)
      t.ok((await send(await start(), key, { path: '/gated' })).replayed)
      t.equal(upstream.seen.length, 1)
    },
  )
