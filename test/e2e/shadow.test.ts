import { once } from 'node:events'
import { request as httpRequest, type IncomingMessage } from 'node:http'
import { join } from 'node:path'
import { gzipSync } from 'node:zlib'
import t, { type Test } from 'tap'
import { gate, newKey, send, tempDir } from '../support/e2e.ts'
import { metricIs } from '../support/exchange.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { post, rawRequest } from '../support/raw.ts'
import { emptyStore, KINDS } from '../support/replicas.ts'
import { counting, proxyOf, verdict } from '../support/shadow.ts'
import { type Seen } from '../support/upstream.ts'

t.setTimeout(200_000)

const MIB = 1024 * 1024

const sqlite = (t: Test): string => `sqlite:${join(tempDir(t), 'records.db')}`

for (const name of KINDS)
  t.test(`O06 ${name}: shadow forwards duplicates, N=2, counts verdicts; enforce takes over`, async (t) => {
    const store = await emptyStore(t, name)
    const upstream = await counting(t)
    const shadow = await proxyOf(t, upstream, store, 'mode: shadow, key: required')
    const [differs, same, misuse] = [newKey(), newKey(), newKey()]
    const first = await send(shadow, differs)
    const second = await send(shadow, differs)
    t.same([first.body, second.body], ['execution 1', 'execution 2'])
    t.equal(upstream.seen.length, 2, 'N=2')
    const kept = await send(shadow, same, { path: '/same' })
    await send(shadow, same, { path: '/same' })
    await send(shadow, misuse)
    t.equal((await send(shadow, misuse, { body: '{"amount":2}' })).status, 201)
    t.equal((await send(shadow, null)).status, 201, 'a missing key is not refused')
    t.equal(upstream.seen.length, 7)
    for (const reply of [first, second, kept]) t.notOk(reply.headers.has('idempotent-replayed'))
    await verdict(shadow, 'first', 3)
    await verdict(shadow, 'replay_differs')
    await verdict(shadow, 'replay_same')
    await verdict(shadow, 'misuse')
    await verdict(shadow, 'key_missing')
    t.equal(await shadow.metric('idempotency_requests_total{route="pay",outcome="passed"}'), 7)
    t.equal(await shadow.metric('idempotency_buffered_bytes'), 0)

    const lines = shadow.log.filter(({ msg }) => msg === 'shadow')
    t.equal(lines.length, 7, 'one line for each')
    const line = lines.find(({ verdict }) => verdict === 'replay_differs')
    t.match(line, { route: 'pay', record: /^[\w-]{12}$/, before: 'completed' })
    for (const key of [differs, same, misuse]) t.notOk(JSON.stringify(shadow.log).includes(key))
    if (name === 'memory') return

    await shadow.drain()
    const enforce = await proxyOf(t, upstream, store, 'key: required')
    const replay = await send(enforce, differs)
    t.match(replay, { status: 201, body: 'execution 1', replayed: true })
    t.equal(replay.headers.get('x-id'), first.headers.get('x-id'))
    t.equal(replay.headers.get('date'), first.headers.get('date'), 'the first response, its Date included')
    t.match(await send(enforce, same, { path: '/same' }), { body: kept.body, replayed: true })
    t.match(await send(enforce, misuse, { body: '{"amount":2}' }), { code: 'idempotency_key_reused' })
    t.equal(upstream.seen.length, 7, 'nothing is executed again')
  })

void t.test('shadow mode changes neither the request nor the response', async (t) => {
  const upstream = await counting(t, (_seen, response) => {
    response.writeHead(299, 'Strange', ['X-A', '1', 'x-a', '2', 'Idempotency-Outcome', 'applied'])
    response.end(Buffer.from([0, 255, 1]))
  })
  const key = '"a; b"'
  const ask = post('/pay?x=1', key, '{"a": 1}', ['X-Twice: 1', 'x-twice: 2', 'Idempotency-Fence: 9'])
  const answers = []
  for (const mode of ['off', 'shadow'] as const) {
    const route = `mode: ${mode}, key: { forward: none, forwardFence: true }`
    const proxy = await proxyOf(t, upstream, 'memory:', route)
    const { statusLine, headers, body } = await rawRequest(proxy.port, ask)
    const undated = headers.filter((_, i) => !/^date$/i.test(headers[i - (i % 2)] as string))
    answers.push([statusLine, undated, body])
  }
  t.same(answers[1], answers[0])
  const [off, shadow] = upstream.seen
  // Each proxy adds its own mark.
  const unmarked = (seen: Seen | undefined) => ({
    ...seen,
    headers: seen?.headers.filter((text) => !text.startsWith('idempotency-proxy; id=')),
  })
  t.same(unmarked(shadow), unmarked(off))
  t.ok(shadow?.headers.includes(key), 'the key is forwarded unchanged')
})

void t.test('shadow mode compares what a compressed body says', async (t) => {
  const upstream = await counting(t)
  const shadow = await proxyOf(t, upstream, 'memory:', 'mode: shadow')
  const key = newKey()
  const headers = { 'content-encoding': 'gzip' }
  for (const level of [1, 9]) {
    await send(shadow, key, { body: gzipSync('{"amount":1}', { level }), headers })
    await verdict(shadow, level === 1 ? 'first' : 'replay_differs')
  }
})

void t.test('shadow mode passes a stream on live, and records it as done', async (t) => {
  const work = gate()
  const upstream = await counting(t, async (_seen, response) => {
    response.writeHead(200, { 'content-type': 'text/event-stream' })
    response.write('data: 1\n\n')
    await work.opened
    response.end('data: 2\n\n')
  })
  const store = sqlite(t)
  const shadow = await proxyOf(t, upstream, store, 'mode: shadow')
  const key = newKey()
  const keyed = { method: 'POST', headers: { 'idempotency-key': key } }
  const sent = httpRequest(`${shadow.url}/events`, keyed).end()
  const [answer] = (await once(sent, 'response')) as [IncomingMessage]
  const [first] = (await once(answer, 'data')) as [Buffer]
  t.equal(first.toString(), 'data: 1\n\n')
  work.open()
  await once(answer.resume(), 'end')
  await verdict(shadow, 'first')
  await shadow.drain()
  const enforce = await proxyOf(t, upstream, store, '')
  const again = await fetch(`${enforce.url}/events`, keyed)
  t.match(await again.json(), { code: 'idempotency_response_unavailable', originalStatus: 200 })
  t.equal(upstream.seen.length, 1)
})

void t.test('shadow mode forwards bodies over the limits, and fingerprints others in full', async (t) => {
  const big = Buffer.alloc(8 * MIB, 'x')
  const upstream = await counting(t, ({ target }, response) => {
    if (target === '/big') response.end(big)
  })
  const store = sqlite(t)
  const shadow = await proxyOf(t, upstream, store, 'mode: shadow')
  const upload = async (proxy: TestProxy, key: string, body: Buffer, chunked: boolean): Promise<string> => {
    const headers = { 'idempotency-key': key, ...(chunked ? {} : { 'content-length': body.length }) }
    const sent = httpRequest(`${proxy.url}/up`, { method: 'POST', headers })
    for (let at = 0; at < body.length; at += 10_000)
      if (!sent.write(body.subarray(at, at + 10_000))) await once(sent, 'drain')
    sent.end()
    const [answer] = (await once(sent, 'response')) as [IncomingMessage]
    let text = ''
    for await (const chunk of answer) text += String(chunk)
    return text
  }
  for (const [i, chunked] of [false, true].entries()) {
    await upload(shadow, newKey(), big, chunked)
    t.ok(upstream.seen[i]?.body.equals(big))
  }
  await verdict(shadow, 'request_too_large', 2)

  const [small, down] = [newKey(), newKey()]
  const body = Buffer.from('0123456789'.repeat(90_000))
  await upload(shadow, small, body, true)
  t.equal((await send(shadow, down, { path: '/big' })).body.length, big.length)
  await verdict(shadow, 'first', 2)
  t.equal(await shadow.metric('idempotency_buffered_bytes'), 0)
  await shadow.drain()
  const enforce = await proxyOf(t, upstream, store, '')
  const same = await upload(enforce, small, body, false)
  t.equal(same, 'execution 3', 'the same body: the fingerprint covers all of it')
  const other = Buffer.from(body)
  other[899_999] = 0
  t.match(await upload(enforce, small, other, false), /idempotency_key_reused/)
  t.match(await send(enforce, down, { path: '/big' }), { code: 'idempotency_response_unavailable' })
  t.equal(upstream.seen.length, 4)
})

void t.test('a drain waits until shadow mode has recorded the outcome', async (t) => {
  const work = gate()
  const upstream = await counting(t, () => work.opened)
  const store = sqlite(t)
  const shadow = await proxyOf(t, upstream, store, 'mode: shadow')
  const key = newKey()
  const reply = send(shadow, key)
  await upstream.arrived(1)
  const drained = shadow.drain()
  await shadow.logged(({ msg }) => msg === 'draining')
  work.open()
  t.equal((await reply).body, 'execution 1')
  await drained
  const enforce = await proxyOf(t, upstream, store, '')
  t.match(await send(enforce, key), { body: 'execution 1', replayed: true })
})

void t.test('mode: shadow in defaults covers unmatched requests, also with keys in the body', async (t) => {
  const upstream = await counting(t)
  const text = (defaults: string) =>
    `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\ndefaults: { ${defaults} }`
  const proxy = await proxyInProcess(text('mode: shadow, key: { from: ["json:/id"] }'))
  t.teardown(() => proxy[Symbol.asyncDispose]())
  const total = (name: string): string => `idempotency_shadow_total{route="default",verdict="${name}"}`
  for (let i = 0; i < 2; i++)
    t.equal((await send(proxy, null, { body: '{"id":"m1"}' })).body, `execution ${i + 1}`)
  await metricIs(proxy, total('first'), 1)
  await metricIs(proxy, total('replay_differs'), 1)
  await send(proxy, null, { body: '{}' })
  await metricIs(proxy, total('passed'), 1)
})
