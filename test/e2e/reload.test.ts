import { once } from 'node:events'
import { renameSync, writeFileSync } from 'node:fs'
import { createServer, type RequestListener } from 'node:http'
import { createServer as createTls } from 'node:https'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import { setTimeout as wait } from 'node:timers/promises'
import { promisify } from 'node:util'
import t, { type Test } from 'tap'
import { adminYaml, ask } from '../support/admin.ts'
import { bank } from '../support/bank.ts'
import { certificate } from '../support/certificates.ts'
import { newKey, send, tempDir, until } from '../support/e2e.ts'
import { metricIs } from '../support/exchange.ts'
import { proxyProcess, type TestProxy } from '../support/proxy.ts'
import { emptyStore, heldUpstream, KINDS, refusalOf, replicas } from '../support/replicas.ts'
import { upstreamStub, valueOf } from '../support/upstream.ts'

t.setTimeout(600_000)

const RELOADED = 'the configuration was reloaded'
const SAME = 'the configuration was read again: nothing has changed'
const IDENTIFIES =
  'the configuration changes which record a request finds: restart, after ttl has passed; all of the previous one stays in force'
const RESTART = 'the configuration needs a restart; all of the previous one stays in force'
const INVALID = 'the configuration is invalid; the previous one stays in force'
const READ = [RELOADED, SAME, IDENTIFIES, RESTART, INVALID]
const SUCCESSFUL = 'idempotency_config_last_reload_successful'

interface Served {
  readonly proxy: TestProxy
  /** Returns the log line about it, which says `message`. */
  reload(yaml: string, message?: string): Promise<Record<string, unknown>>
}

/** A proxy in this process, with the admin API. */
async function served(t: Test, yaml: string): Promise<Served> {
  const admin = `${adminYaml(t)}\n`
  const [proxy] = (await replicas(t, 1, admin + yaml)) as [TestProxy]
  return {
    proxy,
    async reload(next, message = RELOADED) {
      await proxy.reload(admin + next)
      const line = proxy.log.findLast(({ msg }) => READ.includes(String(msg)))
      if (line?.['msg'] !== message) throw new Error(JSON.stringify(line))
      return line
    },
  }
}

function yamlOf(upstream: { readonly url: string }, rest: string, store = 'memory:'): string {
  return `service: pay\nupstream: { url: "${upstream.url}" }\nstore: { url: "${store}" }\n${rest}\n`
}

for (const kind of KINDS)
  void t.test(`O08 ${kind}: 12 reloads under load drop nothing and re-scope nothing`, async (t) => {
    const executed = new Map<string, number>()
    await using upstream = await upstreamStub((seen, response) => {
      const key = valueOf(seen, 'idempotency-key')
      executed.set(key, (executed.get(key) ?? 0) + 1)
      setTimeout(() => response.writeHead(201).end(`done ${key}`), Math.random() * 20)
    })
    const url = await emptyStore(t, kind)
    const yaml = (n: number): string =>
      yamlOf(
        upstream,
        `limits: { inFlight: ${1000 + n}, waiters: ${100 + n} }
defaults: { ttl: ${24 + n}h }
routes:
  - { name: pay, match: { path: /pay }, key: required, lease: ${30 + n}s, statusHeader: ${n % 2 === 0}, inFlight: ${n % 3 === 0 ? 'wait' : 'reject'} }
${n % 2 === 0 ? '  - { name: refunds, match: { path: /refunds } }' : ''}`,
        url,
      )
    const { proxy, reload } = await served(t, yaml(0))
    const first = new Map<string, string>()
    const wrong: unknown[] = []
    const load = { ended: false }
    const client = async (): Promise<void> => {
      while (!load.ended) {
        const again = [...first.keys()][Math.floor(Math.random() * first.size * 2)]
        const key = again ?? newKey()
        const { status, body, replayed } = await send(proxy, key).catch((error: unknown) => ({
          status: 0,
          body: String(error),
          replayed: false,
        }))
        if (status !== 201 || replayed !== first.has(key) || body !== (first.get(key) ?? body))
          wrong.push([key, status, body])
        first.set(key, body)
      }
    }
    const clients = Array.from({ length: 8 }, client)
    for (let n = 1; n <= 12; n++) {
      const before = first.size
      await until(() => first.size >= before + 6)
      await reload(yaml(n))
    }
    load.ended = true
    await Promise.all(clients)
    t.strictSame(wrong, [], 'no request is dropped, refused or answered differently')
    t.equal(await proxy.metric(SUCCESSFUL), 1)
    for (const [key, body] of first) t.match(await send(proxy, key), { body, replayed: true })
    t.strictSame(new Set(executed.values()), new Set([1]), 'each key was executed once')
    t.equal(executed.size, first.size)
  })

void t.test('O08 a request in progress keeps the policy that it started with', async (t) => {
  const upstream = await heldUpstream(t)
  const yaml = (rest: string): string =>
    yamlOf(upstream, `routes: [{ name: pay, match: { path: /pay }, ${rest} }]`)
  const { proxy, reload } = await served(t, yaml('statusHeader: true, outcomes: { "503": store }'))
  const key = newKey()
  const running = send(proxy, key)
  await upstream.arrived(1)
  const passing = send(proxy, null, { method: 'GET', path: '/other', body: null })
  await upstream.arrived(2)
  await reload(yaml('statusHeader: false, key: required, keep: outcome'))
  upstream.finish(2)
  t.match(await passing, { status: 201, body: 'execution 2' }, 'so do pass-through requests')
  const retry = await send(proxy, key)
  t.strictSame(refusalOf(retry), [409, 'idempotency_key_in_progress'], 'the new policy finds its record')
  const next = refusalOf(await send(proxy, null))
  t.strictSame(next, [400, 'idempotency_key_missing'], 'the next request gets the new policy')
  upstream.finish(1)
  const first = await running
  t.match(first, { status: 201, body: 'execution 1' })
  t.equal(first.headers.get('idempotency-status'), 'executed')
  const replay = await send(proxy, key)
  const kept = { status: 201, body: 'execution 1', replayed: true }
  t.match(replay, kept, 'its response was kept, as it started without keep: outcome')
  t.equal(replay.headers.get('idempotency-status'), null)
  const later = newKey()
  upstream.finish(3)
  t.equal((await send(proxy, later)).status, 201)
  t.equal((await send(proxy, later)).code, 'idempotency_response_unavailable')
  t.equal(upstream.seen.length, 3)
})

void t.test('changed limits take effect at once', async (t) => {
  const upstream = await heldUpstream(t)
  const yaml = (limits: string): string =>
    yamlOf(upstream, `limits: { ${limits} }\ndefaults: { inFlight: wait }`)
  const { proxy, reload } = await served(t, yaml('inFlight: 1, request: 100B, response: 1KiB'))
  const key = newKey()
  const running = send(proxy, key)
  await upstream.arrived(1)
  t.strictSame(refusalOf(await send(proxy, newKey(), { path: '/fast' })), [503, 'overloaded'])
  await reload(yaml('inFlight: 10, waiters: 1, request: 100B, response: 1KiB'))
  t.equal((await send(proxy, newKey(), { path: '/fast' })).status, 201)
  const waiting = send(proxy, key)
  await metricIs(proxy, 'idempotency_waiters', 1)
  t.equal((await send(proxy, key)).code, 'idempotency_key_in_progress', 'one may wait')
  await reload(yaml('inFlight: 10, waiters: 2, request: 100B, response: 1KiB'))
  const second = send(proxy, key)
  await metricIs(proxy, 'idempotency_waiters', 2)
  upstream.finish(1)
  for (const answer of await Promise.all([running, waiting, second])) t.equal(answer.status, 201)

  const body = JSON.stringify({ text: 'x'.repeat(400) })
  t.equal((await send(proxy, newKey(), { path: '/fast', body })).code, 'request_too_large')
  await reload(yaml('inFlight: 10, request: 1KiB, response: 1KiB'))
  t.equal((await send(proxy, newKey(), { path: '/fast', body })).status, 201)
  await reload(yaml('inFlight: 10, buffered: 1KiB, request: 1KiB, response: 1KiB'))
  const many = Array.from({ length: 6 }, () => send(proxy, newKey(), { path: '/held', body }))
  const refused = await Promise.any(
    many.map(async (one) => ((await one).code === 'overloaded' ? true : Promise.reject(new Error('served')))),
  )
  t.ok(refused, 'no room is left')
  for (let n = 1; n <= 20; n++) upstream.finish(n)
  await Promise.all(many)
})

void t.test('§15.19 upstream.timeout changes for the calls that begin from then on', async (t) => {
  const upstream = await heldUpstream(t)
  const yaml = (timeout: string): string =>
    yamlOf(
      { url: `${upstream.url}", timeout: "${timeout}` },
      'routes: [{ name: pay, match: { path: /pay }, ttl: 48h }]',
    )
  const { proxy, reload } = await served(t, yaml('60s'))
  const running = send(proxy, newKey())
  const passing = send(proxy, null, { method: 'GET', path: '/other', body: null })
  await upstream.arrived(2)
  const { changes } = await reload(yaml('50ms'))
  t.strictSame(changes, ['upstream.timeout: 60s → 50ms', 'drain.timeout: 65s → 5050ms'])
  t.strictSame(refusalOf(await send(proxy, newKey())), [504, 'upstream_timeout'])
  const passed = await send(proxy, null, { method: 'GET', path: '/other', body: null })
  t.strictSame(refusalOf(passed), [504, 'upstream_timeout'])
  upstream.finish(1)
  upstream.finish(2)
  t.equal((await running).status, 201, 'calls in progress keep theirs')
  t.equal((await passing).status, 201)
  await reload(yaml('60s'))
  const later = send(proxy, newKey())
  await upstream.arrived(5)
  upstream.finish(5)
  t.equal((await later).status, 201)
})

for (const scheme of ['http', 'https'] as const)
  void t.test(`§15.19 ${scheme}: upstream.connections changes at once and drops nothing`, async (t) => {
    using own = certificate('IP:127.0.0.1')
    const arrived: (() => void)[] = []
    const answer: RequestListener = (request, response) =>
      void request.resume().on('end', () => arrived.push(() => response.writeHead(201).end('done')))
    const server = (scheme === 'https' ? createTls(own, answer) : createServer(answer)).listen(0, '127.0.0.1')
    t.teardown(() => server.close().closeAllConnections())
    await once(server, 'listening')
    const connections = () => promisify(server.getConnections.bind(server))()
    const tls = scheme === 'https' ? `, tls: { ca: ${own.certFile} }` : ''
    const yaml = (most: number): string =>
      `service: pay\nupstream: { url: "${scheme}://127.0.0.1:${(server.address() as AddressInfo).port}"${tls}, connections: ${most} }\nstore: { url: "memory:" }\n`
    const { proxy, reload } = await served(t, yaml(1))
    const executing = Array.from({ length: 6 }, () => send(proxy, newKey()))
    await until(() => arrived.length === 1)
    await reload(yaml(3))
    await until(() => arrived.length === 3)
    t.equal(await connections(), 3, 'those that waited begin at once')
    await reload(yaml(2))
    const body = new Blob(['a', 'b']).stream()
    const streamed = fetch(`${proxy.url}/up`, { method: 'PUT', body, duplex: 'half' })
    for (let n = 0; n < 7; n++) {
      await until(() => arrived.length > n)
      arrived[n]?.()
    }
    for (const { status } of await Promise.all([...executing, streamed])) t.equal(status, 201)

    // One pool of two for protected requests, and one for the rest.
    await until(async () => (await connections()) <= 3)
    const more = Array.from({ length: 4 }, () => send(proxy, newKey()))

    await until(() => arrived.length === 9)
    await wait(50)
    t.equal(arrived.length, 9, 'no more than two at a time')
    for (let n = 7; n < 11; n++) {
      await until(() => arrived.length > n)
      arrived[n]?.()
    }
    for (const { status } of await Promise.all(more)) t.equal(status, 201)
  })

t.test('an invalid file changes nothing, is logged as by check, and shows in a metric', async (t) => {
  const upstream = await heldUpstream(t)
  const good = yamlOf(upstream, 'routes: [{ name: pay, match: { path: /fast }, key: required }]')
  const { proxy, reload } = await served(t, good)
  t.equal(await proxy.metric(SUCCESSFUL), 1)
  const { errors } = await reload(`${good}lmits: { inFlight: 1 }\ndefaults: { ttl: 1x }\n`, INVALID)
  t.match(errors, [
    'test.yaml:7:1: lmits: found the unknown property',
    'test.yaml:8:18: defaults.ttl: found "1x"',
  ])
  t.equal(await proxy.metric(SUCCESSFUL), 0)
  t.strictSame(refusalOf(await send(proxy, null, { path: '/fast' })), [400, 'idempotency_key_missing'])
  await reload('{{{', INVALID)
  t.equal(await proxy.metric(SUCCESSFUL), 0)
  await reload(good, SAME)
  t.equal(await proxy.metric(SUCCESSFUL), 1)
  t.notOk(proxy.log.some(({ msg }) => msg === RELOADED))
})

void t.test('§10 a reload that needs a restart says exactly why, and changes nothing at all', async (t) => {
  const upstream = await heldUpstream(t)
  const head = `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\n`
  const pay = '{ name: pay, match: { path: /fast }, key: required }'
  const { proxy, reload } = await served(t, `${head}routes: [${pay}]\n`)
  const key = newKey()
  t.equal((await send(proxy, key, { path: '/fast' })).status, 201)
  const inForce = (await ask(proxy, '/v1/config')).text

  const line = await reload(
    `upstream: { url: "http://127.0.0.1:9" }
service: payments
store: { url: "redis://:secret@127.0.0.1:1/0" }
limits: { inFlight: 1 }
routes: [{ name: pay, match: { path: /fast }, scope: { caller: "header:x-api-key" } }]
`,
    IDENTIFIES,
  )
  t.match(line, {
    level: 50,
    restart: [
      `upstream.url: ${upstream.url} → http://127.0.0.1:9`,
      'store.url: memory: → redis://***@127.0.0.1:1/0',
    ],
    identifies: [
      'service: default → payments',
      'routes[pay].scope.caller: ["header:authorization"] → ["header:x-api-key"]',
    ],
  })
  t.notMatch(JSON.stringify(proxy.log), /secret@/)
  t.equal(await proxy.metric(SUCCESSFUL), 0)
  t.equal((await ask(proxy, '/v1/config')).text, inForce, 'not even limits')
  t.ok((await send(proxy, key, { path: '/fast' })).replayed)
  t.equal((await send(proxy, null, { path: '/fast' })).code, 'idempotency_key_missing')

  await reload(`${head}routes: [${pay}]\nlimits: { inFlight: 77 }\n`)
  t.equal(await proxy.metric(SUCCESSFUL), 1)
  t.match((await ask(proxy, '/v1/config')).json, { limits: { inFlight: 77 } }, 'what is in force is shown')

  await reload(`${head}routes: [${pay}, { name: more, match: { path: /fast/more } }]\n`)
  const later = newKey()
  t.equal((await send(proxy, later, { path: '/fast/more' })).status, 201)
  const body = { key: later, caller: { authorization: 'Bearer alice' }, route: 'more', method: 'POST' }
  const { json } = await ask(proxy, '/v1/records/lookup', { method: 'POST', body })
  t.match(json, { route: 'more', state: 'completed' })
})

void t.test('§10 log.level changes without a restart, log.format does not', async (t) => {
  const upstream = await heldUpstream(t)
  const yaml = (log: string): string => yamlOf(upstream, `log: { ${log} }`)
  const { proxy, reload } = await served(t, yaml('level: info'))
  const changeTo = async (log: string, change: string) =>
    t.strictSame((await reload(yaml(log)))['changes'], [change])
  const requests = (): unknown[] => proxy.log.filter(({ msg }) => msg === 'request')
  await changeTo('level: warn', 'log.level: info → warn')
  t.equal((await send(proxy, newKey(), { path: '/fast' })).status, 201)
  await changeTo('level: debug', 'log.level: warn → debug')
  t.strictSame(requests(), [], 'a quieter level is in force once the log has said so')
  t.equal((await send(proxy, newKey(), { path: '/fast' })).status, 201)
  await proxy.logged(({ msg }) => msg === 'request')
  t.equal(requests().length, 1)
  await changeTo('level: silent', 'log.level: debug → silent')
  await changeTo('level: info', 'log.level: silent → info')

  const refused = await reload(yaml('level: trace, format: json'), RESTART)
  t.match(refused, { restart: ['log.format: auto → json'] })
})

t.test('a process reloads on SIGHUP, and when its file is replaced; flags and env stay', async (t) => {
  const upstream = await heldUpstream(t)
  const dir = tempDir(t)
  const file = join(dir, 'proxy.yaml')
  const yaml = (rest: string): string =>
    `listen: 127.0.0.1:0\n${adminYaml(t)}\nupstream: { url: "http://127.0.0.1:1" }\n${rest}`
  writeFileSync(file, yaml(''))
  await using proxy = await proxyProcess(file, ['--upstream', upstream.url, '--store', 'memory:'], {
    TTL: '48h',
  })
  const changes = (change: RegExp) =>
    proxy.logged(({ msg, changes }) => msg === RELOADED && change.test(String(changes)))
  // As an editor does, without a signal.
  const limited = yaml('limits: { inFlight: 2 }\n')
  renameSync(file, `${file}~`)
  writeFileSync(join(dir, 'new'), limited)
  renameSync(join(dir, 'new'), file)
  await changes(/limits.inFlight: \d+ → 2/)
  // Half-written states are not read.
  writeFileSync(file, '')
  writeFileSync(file, limited)
  proxy.kill('SIGHUP')
  await proxy.logged(({ msg }) => msg === SAME)
  t.notOk(proxy.log.some(({ msg }) => msg === INVALID))
  writeFileSync(file, yaml('defaults: { ttl: "${TTL}" }\n'))
  proxy.kill('SIGHUP')
  await changes(/defaults.ttl: 24h → 2d/)
  t.equal((await send(proxy, newKey(), { path: '/fast' })).status, 201)
})

void t.test('a reload turns shadow into enforce, which honours its records, and back', async (t) => {
  const upstream = await heldUpstream(t)
  const yaml = (mode: string): string =>
    yamlOf(upstream, `routes: [{ name: pay, match: { path: /fast }, mode: ${mode} }]`)
  const { proxy, reload } = await served(t, yaml('shadow'))
  const key = newKey()
  t.equal((await send(proxy, key, { path: '/fast' })).status, 201)
  await metricIs(proxy, 'idempotency_shadow_total{route="pay",verdict="first"}', 1)
  await reload(yaml('enforce'))
  t.match(await send(proxy, key, { path: '/fast' }), { replayed: true, body: 'execution 1' })
  const line = await reload(yaml('shadow'))
  t.strictSame(line['changes'], ['routes[pay].mode: enforce → shadow'])
  t.match(
    proxy.log.findLast(({ msg }) => msg === 'Route `pay`: mode shadow, so a retry executes again.'),
    { level: 40 },
    'the warning is repeated',
  )
  t.equal((await send(proxy, key, { path: '/fast' })).replayed, false)
  t.match(await reload(yaml('off'), IDENTIFIES), { identifies: ['routes[pay].mode: shadow → off'] })
})

void t.test('after a reload the reconciler queries as the new configuration says', async (t) => {
  const upstream = await bank(t)
  const yaml = (reconcile: string): string =>
    yamlOf(upstream, `routes: [{ name: pay, match: { path: /pay }, lease: 1s${reconcile} }]`)
  const { proxy, reload } = await served(t, yaml(''))
  const key = newKey()
  const first = await send(proxy, key)
  t.equal(first.code, 'upstream_failed')
  t.equal((await send(proxy, key)).code, 'idempotency_outcome_unknown')
  await reload(
    yaml(
      `, reconcile: { request: { path: "/payments?record={record}" }, identity: none, completed: { status: 200 }, after: 1ms, every: 1s }`,
    ),
  )
  await until(() => upstream.queries.length > 0)
  t.match(upstream.queries[0]?.target, /^\/payments\?record=/)
})
