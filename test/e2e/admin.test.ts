import { appendFileSync, statSync } from 'node:fs'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import { verifyAudit } from '../../src/observe/audit.ts'
import {
  type AdminReply,
  type Asking,
  adminYaml,
  ask,
  Exercised,
  fullOf,
  linesOf,
  recordOf,
  TOKEN,
} from '../support/admin.ts'
import { gate, newKey, send, tempDir, until } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { type RawAnswer, rawRequest } from '../support/raw.ts'
import { freePort, RedisServer } from '../support/redis.ts'
import { emptyStore, KINDS } from '../support/replicas.ts'
import { type UpstreamStub, upstreamStub } from '../support/upstream.ts'

t.setTimeout(240_000)

const exercised = new Exercised()
const NOBODY = 'A'.repeat(43)

interface World {
  readonly upstream: UpstreamStub
  readonly proxy: TestProxy
  readonly audit: string
  readonly finish: () => void
  /** Sends a request and checks the reply against the OpenAPI description. */
  readonly api: (path: string, asking?: Asking) => Promise<AdminReply>
  /** Makes a record `unknown` and returns its id. */
  readonly unknown: (key?: string, path?: string) => Promise<string>
}

/** `/break` drops the connection, `/gated` waits for `finish`, everything else succeeds. */
async function world(t: Test, store: string, more = ''): Promise<World> {
  const { opened, open } = gate()
  const upstream = await upstreamStub(async (seen, response) => {
    if (seen.target.startsWith('/break')) return void response.destroy()
    if (seen.target.startsWith('/gated')) await opened
    response.writeHead(201, { 'Set-Cookie': 'sid=secret', 'X-Made': '1' }).end('{"id":"stored-body"}')
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const audit = join(tempDir(t), 'audit.log')
  const proxy = await proxyInProcess(`${adminYaml(t)}
audit: { file: ${audit} }
upstream: { url: "${upstream.url}" }
store: { url: "${store}" }
routes:
  - { name: pay, match: { path: /pay } }
  - { name: break, match: { path: "/break/*" }, keep: response }
  - { name: gated, match: { path: /gated } }
${more}`)
  t.teardown(() => proxy.drain())
  t.teardown(open)
  exercised.read((await ask(proxy, '/v1/openapi.json')).json as never)
  const api = async (path: string, asking: Asking = {}): Promise<AdminReply> => {
    const reply = await ask(proxy, path, asking)
    exercised.hold(t, asking.method ?? 'GET', path.split('?')[0] as string, reply)
    return reply
  }
  const unknown = async (key = newKey(), path = '/break/a'): Promise<string> => {
    const broken = await send(proxy, key, { path })
    t.equal(broken.code, 'upstream_failed')
    return (JSON.parse(broken.body) as { instance: string }).instance
  }
  return { upstream, proxy, audit, finish: open, api, unknown }
}

/** What was read from a socket of the admin listener. */
function replyOf({ status, headers, body }: RawAnswer): AdminReply {
  const lines = headers.flatMap((name, i) => (i % 2 === 0 ? [[name, headers[i + 1] as string]] : []))
  const text = body.toString()
  const json = text === '' ? {} : JSON.parse(text)
  return { status, headers: new Headers(lines as [string, string][]), text, json, code: json.code ?? null }
}

/** Sends a request of which the test writes every line. */
async function askRaw(proxy: TestProxy, head: string, ...lines: readonly string[]): Promise<AdminReply> {
  const own = [`${head} HTTP/1.1`, `Authorization: Bearer ${TOKEN}`, ...lines]
  return replyOf(await rawRequest(Number(new URL(proxy.adminUrl).port), `${own.join('\r\n')}\r\n\r\n`))
}

const COMPLETED = { status: 200, headers: [['Content-Type', 'application/json']], body: '{"id":"by hand"}' }

for (const kind of KINDS)
  void t.test(`${kind}: operators list, look up, resolve and delete records, report outcomes`, async (t) => {
    const { upstream, proxy, audit, finish, api, unknown } = await world(t, await emptyStore(t, kind))
    const [a, b, c] = [newKey(), newKey(), newKey()]
    const first = await unknown(a)
    const second = await unknown(b, '/break/b')
    const done = newKey()
    t.equal((await send(proxy, done)).status, 201)
    t.ok((await send(proxy, done)).replayed)
    t.equal((await send(proxy, done, { body: '{"amount":2}' })).code, 'idempotency_key_reused')
    const running = send(proxy, c, { path: '/gated' })
    await upstream.arrived(4)

    // Lists.
    const states = async (query: string) => {
      const page = await api(`/v1/records${query}`)
      t.equal(page.status, 200)
      return (page.json['records'] as { state: string }[]).map(({ state }) => state).sort()
    }
    t.same(await states(''), ['completed', 'in_progress', 'unknown', 'unknown'])
    t.same(await states('?state=unknown'), ['unknown', 'unknown'])
    t.same(await states('?state=unknown,in_progress'), ['in_progress', 'unknown', 'unknown'])
    t.same(await states('?state=completed'), ['completed'])
    t.same(await states('?route=pay'), ['completed'])
    t.same(await states('?age=1h'), [])
    t.same(await states('?deadLettered=true'), [])
    t.same(await states('?state=unknown&deadLettered=false&age=0'), ['unknown', 'unknown'])
    const ids = new Set<string>()
    let cursor: string | null = null
    do {
      const page: AdminReply = await api(
        `/v1/records?state=unknown&limit=1${cursor === null ? '' : `&cursor=${cursor}`}`,
      )
      for (const { id } of page.json['records'] as { id: string }[]) ids.add(id)
      cursor = page.json['next'] as string | null
    } while (cursor !== null)
    t.same([...ids].sort(), [first, second].sort())

    // One record: the members that §12 names, and its history.
    const shown = await api(`/v1/records/${first}`)
    const asked = { route: 'break', method: 'POST', path: '/break/a' }
    t.match(shown.json, { id: first, state: 'unknown', attempts: 1, ...asked })
    t.equal(shown.headers.get('etag'), `"${recordOf(shown).version}"`)
    t.equal(shown.headers.get('cache-control'), 'no-store')
    t.equal(shown.json['response'], null)
    const look = async (body: object) => api('/v1/records/lookup', { method: 'POST', body })
    const caller = { authorization: 'Bearer alice' }
    const paid = await look({ key: done, caller, method: 'POST', path: '/pay' })
    t.match(paid.json, { state: 'completed', response: { status: 201, size: 20 } })
    t.notMatch(paid.text, /secret|stored-body/, 'neither the stored body nor a credential')
    t.notOk(paid.text.includes(done), 'no raw key')
    t.match(recordOf(paid).response?.headers, [
      ['Set-Cookie', '***'],
      ['X-Made', '1'],
    ])
    const { id } = recordOf(paid)
    for (const same of [{ key: `"${done}"`, path: '//pay/?x=1' }, { path: '//pay/?x=1' }, { route: 'pay' }])
      t.equal(recordOf(await look({ key: done, caller, method: 'POST', ...same })).id, id)
    for (const other of [{ caller: { authorization: 'Bearer bob' } }, {}])
      t.equal((await look({ key: done, method: 'POST', path: '/pay', ...other })).status, 404)
    await until(async () => fullOf(await api(`/v1/records/${id}`)).history.length >= 3)
    const { history } = fullOf(await api(`/v1/records/${id}`))
    t.match(history, [
      { event: 'executed', count: 1, detail: { status: 201, before: 'absent', after: 'completed' } },
      { event: 'replayed', count: 1, detail: { status: 201, replica: /:\d+$/ } },
      { event: 'misuse', count: 1, detail: { status: 422 } },
    ])

    // An operator decides.
    const at = (record: { version: number }) => ({ 'if-match': `"${record.version}"` })
    const resolve = (record: string, headers: Record<string, string>, body: object) =>
      api(`/v1/records/${record}/resolve`, { method: 'POST', headers, body })
    const completed = { outcome: 'completed', response: COMPLETED, reason: 'seen at the bank', by: 'ann' }
    t.equal((await resolve(first, {}, completed)).code, 'version_required')
    const stale = await resolve(first, { 'if-match': '"1"' }, completed)
    t.equal(stale.code, 'version_mismatch')
    t.match(stale.json, { instance: first, record: { state: 'unknown' } })
    const resolved = await resolve(first, at(recordOf(shown)), completed)
    t.equal(resolved.status, 200)
    const after = recordOf(await api(`/v1/records/${first}`))
    const more = { history: 0, reconciliation: 0, shadowed: 0, explanation: 0 }
    t.same({ ...after, ...more }, { ...resolved.json, ...more })
    t.equal(resolved.headers.get('etag'), `"${after.version}"`)
    const response = { status: 200, size: 16 }
    t.match(after, { state: 'completed', response, lastError: null, leaseUntil: null })
    const retried = await send(proxy, a, { path: '/break/a' })
    t.ok(retried.replayed)
    t.same([retried.status, retried.body], [200, '{"id":"by hand"}'])
    t.ok(retried.headers.get('date'))
    t.equal((await resolve(first, at(after), completed)).code, 'not_unknown', 'completed is final')
    const told = async () => fullOf(await api(`/v1/records/${first}`)).history
    await until(async () => (await told()).some(({ event }) => event === 'resolved'))

    // An outcome reported by key and caller.
    const outcome = (body: object) => api('/v1/outcomes', { method: 'POST', body })
    const subject = { route: 'break', key: b, caller, method: 'POST', path: '/break/b' }
    const gated = { ...subject, key: c, route: 'gated', path: '/gated' }
    t.equal((await outcome({ ...gated, outcome: 'retryable' })).code, 'not_unknown')
    t.equal((await outcome({ ...subject, key: newKey(), outcome: 'retryable' })).code, 'record_not_found')
    const reported = await outcome({ ...subject, outcome: 'retryable', reason: 'the bank knows nothing' })
    t.match(reported.json, { id: second, state: 'failed_retryable', lastError: /the bank knows nothing/ })
    const n = upstream.seen.length
    t.equal((await send(proxy, b, { path: '/break/b' })).code, 'upstream_failed')
    t.equal(upstream.seen.length, n + 1, 'the retry executed')

    // Deleting.
    const remove = (record: string, headers: Record<string, string>, body?: object) =>
      api(`/v1/records/${record}`, { method: 'DELETE', headers, body })
    const held = recordOf(await look({ key: c, caller, method: 'POST', path: '/gated' }))
    t.equal((await remove(held.id, at(held))).code, 'still_running')
    t.equal((await remove(id, {})).code, 'version_required')
    t.equal((await remove(id, { 'if-match': '"1"' })).code, 'version_mismatch')
    t.equal((await remove(id, at(recordOf(paid)), { reason: 'asked for' })).status, 204)
    t.equal((await api(`/v1/records/${id}`)).code, 'record_not_found')
    t.equal((await remove(id, at(recordOf(paid)))).code, 'record_not_found')
    t.equal((await resolve(id, at(recordOf(paid)), completed)).code, 'record_not_found')
    finish()
    t.equal((await running).status, 201)

    t.equal((await api('/v1/report?since=1h')).status, 200)

    // The audit log has every change, and no refused one.
    const lines = linesOf(audit)
    t.match(lines, [
      {
        what: 'resolve',
        record: first,
        who: { address: /127\.0\.0\.1/, by: 'ann' },
        before: { state: 'unknown', route: 'break' },
        after: { state: 'completed', status: 200, size: 16 },
        reason: 'seen at the bank',
      },
      { what: 'outcome', record: second, after: { state: 'failed_retryable' }, who: { by: null } },
      { what: 'delete', record: id, before: { state: 'completed' }, after: null, reason: 'asked for' },
    ])
    t.equal(lines.length, 3)
    t.match(await verifyAudit(audit), { ok: true, lines: 3, head: lines[2]?.['hash'] })
    t.equal(statSync(audit).mode & 0o777, 0o600)
    const logged = proxy.log.filter(({ msg }) => msg === 'audit').map(({ audit: line }) => line)
    t.same(logged, lines, 'the log has the same lines')
    t.notMatch(JSON.stringify([lines, proxy.log]), new RegExp(`${TOKEN}|${a}|${b}|alice`))
  })

void t.test('the API refuses malformed requests, and they change nothing', async (t) => {
  const { api, proxy, unknown, audit } = await world(t, 'memory:')
  const id = await unknown()
  const refused = async (path: string, asking: Asking = {}, code = 'invalid_request') =>
    t.equal((await api(path, asking)).code, code, `${path} ${JSON.stringify(asking.body)}`)
  const queries = 'state=lost state= age=1 limit=0 limit=1001 limit=x deadLettered=1 cursor=x order=age'
  for (const query of [...queries.split(' '), 'state=unknown&state=unknown'])
    await refused(`/v1/records?${query}`)
  for (const cursor of ['all no', 'unresolved 1 a'])
    await refused(`/v1/records?cursor=${Buffer.from(cursor).toString('base64url')}`)
  await refused('/v1/report?since=yesterday')
  const version = recordOf(await api(`/v1/records/${id}`)).version
  const headers = { 'if-match': `"${version}"` }
  const responses = [
    { ...COMPLETED, status: 199 },
    { ...COMPLETED, bodyBase64: 'AA==' },
    ...['%', 'c2Vjc', 'c2Vjcm', 'c2V='].map((bodyBase64) => ({ status: 200, bodyBase64 })),
    { status: 204, body: 'x' },
    ...[['a b', 'c'], ['a', 'b\r\nc: d'], ['a', 'ü\u0100'], ['a']].map((line) => ({
      status: 200,
      headers: [line],
    })),
  ]
  const typed = { ...headers, 'content-type': 'application/json' }
  for (const body of [
    '',
    '{',
    '[]',
    '"x"',
    { outcome: 'done' },
    { outcome: 'completed' },
    { outcome: 'retryable', response: COMPLETED },
    { outcome: 'retryable', surprise: 1 },
    { outcome: 'retryable', reason: '' },
    ...responses.map((response) => ({ outcome: 'completed', response })),
  ])
    await refused(`/v1/records/${id}/resolve`, { method: 'POST', headers: typed, body })
  const named = { key: 'a', method: 'POST', path: '/pay' }
  for (const body of [
    {},
    { ...named, key: '' },
    { ...named, key: 'ü' },
    { key: 'a', path: '/pay' },
    { key: 'a', method: 'POST' },
    { ...named, path: 'pay' },
    { ...named, method: 'GET' },
    { ...named, route: 'gone' },
    { ...named, route: 'gated' },
    { ...named, caller: { 'x y': 'a' } },
    { ...named, caller: { 'x-api-key': 'a' } },
  ])
    await refused('/v1/records/lookup', { method: 'POST', body })
  for (const body of [{ key: 'a', outcome: 'retryable' }, {}, { ...named, outcome: 'completed' }])
    await refused('/v1/outcomes', { method: 'POST', body })
  await refused(`/v1/records/${id}`, { method: 'DELETE', headers, body: { because: 1 } })
  for (const path of ['/v1/drain', '/v1/undrain'])
    await refused(path, { method: 'POST', body: { because: 1 } })
  t.equal(recordOf(await api(`/v1/records/${id}`)).version, version)
  t.equal((await fetch(`${proxy.adminUrl}/readyz`)).status, 200)
  t.same(linesOf(audit), [])

  // Bodies of the wrong media type, or too large.
  for (const { method, path: template, hasBody } of exercised.operations) {
    const path = template.replace('{id}', id)
    if (!hasBody) {
      if (method !== 'GET') t.fail(`${method} ${template} takes no body`)
      continue
    }
    const plain = { ...headers, 'content-type': 'text/plain' }
    await refused(path, { method, body: '{}', headers: plain }, 'unsupported_media_type')
    const large = ['Host: localhost', 'Content-Type: application/json', 'Content-Length: 8388609']
    const reply = await askRaw(proxy, `${method} ${path}`, ...large)
    t.equal(reply.status, 413)
    exercised.hold(t, method, path, reply)
  }
  const none = await ask(proxy, '/v1/records/lookup', { method: 'POST' })
  t.equal(none.code, 'invalid_request', 'a required body is missing')
})

void t.test('S10 the API refuses a missing or wrong token, a wrong Host, Origin or method', async (t) => {
  const { api, proxy, unknown, audit } = await world(t, 'memory:')
  const id = await unknown()
  const { host, port } = new URL(proxy.adminUrl)
  const own = async (method: string, path: string, name = host, ...lines: string[]): Promise<AdminReply> => {
    const reply = await askRaw(proxy, `${method} ${path}`, `Host: ${name}`, ...lines)
    exercised.hold(t, method, path, reply)
    return reply
  }
  t.equal(exercised.operations.length, 11)
  const hosts = ['evil.example', 'evil.example:80', `localhost.evil.example:${port}`, '10.0.0.1', 'a b']
  const origins = ['http://evil.example', 'null', 'http://127.0.0.1', `http://localhost:${port}`, 'file://']
  for (const { method, path: template } of exercised.operations) {
    const path = template.replace('{id}', id)
    for (const token of [null, '', 'wrong', `${TOKEN}x`, TOKEN.slice(1)]) {
      const reply = await api(path, { method, token })
      t.same([reply.status, reply.code], [401, 'unauthorized'])
      t.equal(reply.headers.get('www-authenticate'), 'Bearer')
    }
    for (const wrong of [...hosts, 'user@localhost']) {
      const { status, code } = await own(method, path, wrong)
      t.same([status, code], [421, 'host_not_allowed'], wrong)
    }
    for (const origin of [...origins, `http://${host}/`]) {
      const { status, code } = await own(method, path, host, `Origin: ${origin}`)
      t.same([status, code], [403, 'origin_not_allowed'], origin)
    }
  }
  for (const name of [`localhost:${port}`, 'LOCALHOST', '127.0.0.1', '[::1]:1', host])
    t.equal((await own('GET', '/v1/records', name)).status, 200, name)
  for (const origin of [`http://${host}`, `https://${host}`])
    t.equal((await own('GET', '/v1/records', host, `Origin: ${origin}`)).status, 200)
  t.equal((await api('/v1/records', { method: 'HEAD' })).text, '')
  for (const [method, path, allow] of [
    ['POST', '/v1/records', 'GET, HEAD'],
    ['PUT', `/v1/records/${id}`, 'GET, HEAD, DELETE'],
    ['GET', `/v1/records/${id}/resolve`, 'POST'],
    ['GET', '/v1/records/lookup', 'POST'],
    ['GET', '/v1/drain', 'POST'],
    ['OPTIONS', '/v1/outcomes', 'POST'],
  ] as const) {
    const reply = await own(method, path)
    t.same([reply.status, reply.code, reply.headers.get('allow')], [405, 'method_not_allowed', allow])
  }
  const others = '/v1 /v1/ /v1/records/ /v1/records/x /v1//records /V1/records /v1/reports'.split(' ')
  for (const path of [...others, `/v1/records/${id}/`, `/v1/records/${id}%20`])
    t.equal((await own('GET', path)).code, 'not_found', path)
  t.same(linesOf(audit), [])
  const traffic = await fetch(`${proxy.url}/v1/records`, { headers: { authorization: `Bearer ${TOKEN}` } })
  t.equal(traffic.headers.get('x-made'), '1', 'on the traffic port this path belongs to the upstream')
})

void t.test('without a token there is no API; admin.hosts replaces the loopback names', async (t) => {
  const upstream = await upstreamStub((_seen, response) => void response.end())
  t.teardown(() => upstream[Symbol.asyncDispose]())
  await using bare = await proxyInProcess(`upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }`)
  for (const { method, path } of exercised.operations)
    t.equal((await ask(bare, path.replace('{id}', NOBODY), { method })).code, 'not_found')
  t.equal((await fetch(`${bare.adminUrl}/livez`)).status, 200)
  await using named = await proxyInProcess(
    `${adminYaml(t, ', hosts: [Admin.internal]')}\nupstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }`,
  )
  const at = async (...hosts: string[]) =>
    (await askRaw(named, 'GET /v1/records', ...hosts.map((host) => `Host: ${host}`))).status
  t.equal(await at('admin.internal:9464'), 200)
  t.equal(await at('localhost'), 421)
  t.equal(await at('127.0.0.1'), 200, 'the address that the connection came to')
  t.equal(await at('admin.internal', 'admin.internal'), 421, 'two Host lines are refused')
})

void t.test('a change that the audit log cannot record is not made', async (t) => {
  const { api, proxy, unknown, audit } = await world(t, 'memory:')
  const key = newKey()
  const id = await unknown(key)
  const headers = { 'if-match': `"${recordOf(await api(`/v1/records/${id}`)).version}"` }
  appendFileSync(audit, 'somebody else\n')
  const body = { outcome: 'retryable' }
  const replies = [
    await api(`/v1/records/${id}/resolve`, { method: 'POST', headers, body }),
    await api(`/v1/records/${id}`, { method: 'DELETE', headers }),
    await api('/v1/outcomes', {
      method: 'POST',
      body: { ...body, key, caller: { authorization: 'Bearer alice' }, method: 'POST', path: '/break/a' },
    }),
    await api('/v1/drain', { method: 'POST' }),
    await api('/v1/undrain', { method: 'POST' }),
  ]
  for (const reply of replies) t.same([reply.status, reply.code], [503, 'audit_unavailable'])
  t.equal(recordOf(await api(`/v1/records/${id}`)).state, 'unknown')
  t.equal((await fetch(`${proxy.adminUrl}/readyz`)).status, 200)
})

void t.test('POST /v1/drain fails readiness, and traffic is still served', async (t) => {
  const { api, proxy, audit } = await world(t, 'memory:')
  t.same((await api('/v1/drain', { method: 'POST', body: { reason: 'a new node' } })).json, {
    draining: true,
  })
  t.equal((await fetch(`${proxy.adminUrl}/readyz`)).status, 503)
  t.equal((await send(proxy, newKey())).status, 201)
  t.match(linesOf(audit), [{ what: 'drain', record: null, reason: 'a new node' }])
})

void t.test('§15.22 POST /v1/undrain takes it back, unless the proxy has been told to stop', async (t) => {
  const { api, proxy, audit, unknown } = await world(t, 'memory:', 'drain: { delay: 2s }')
  await unknown()
  const ready = async () => (await fetch(`${proxy.adminUrl}/readyz`)).status
  await api('/v1/drain', { method: 'POST' })
  t.equal(await ready(), 503)
  t.same((await api('/v1/undrain', { method: 'POST', body: { reason: 'wrong node' } })).json, {
    draining: false,
  })
  t.equal(await ready(), 200)
  const [, undrained] = linesOf(audit)
  t.match(undrained, { what: 'undrain', after: { draining: false }, reason: 'wrong node' })
  const stopped = proxy.drain()
  t.same((await api('/v1/undrain', { method: 'POST' })).json, { draining: true })
  t.equal(await ready(), 503)
  await stopped
})

void t.test('K22 /v1/config shows the configuration in force without its secrets', async (t) => {
  const { api } = await world(t, `redis://:hunter2@127.0.0.1:${await freePort()}`)
  const { status, json, text } = await api('/v1/config')
  t.equal(status, 200)
  t.notMatch(text, new RegExp(`hunter2|${TOKEN}`))
  t.match(json, {
    admin: { tokenFile: '***', hosts: ['localhost', '127.0.0.1', '[::1]'] },
    store: { url: /^redis:\/\/\*\*\*@127\.0\.0\.1:\d+$/ },
    drain: { timeout: '65s' },
    routes: [{ name: 'pay', key: { from: ['header:idempotency-key'] } }],
  })
})

void t.test('unreadable history hides neither the record nor the readable lines', async (t) => {
  const server = await RedisServer.start()
  t.teardown(() => server[Symbol.asyncDispose]())
  const { api, unknown } = await world(t, server.url)
  const id = await unknown()
  const shown = async () => fullOf(await api(`/v1/records/${id}`))
  await until(async () => (await shown()).history.length > 0)
  const { history } = await shown()
  const [name = ''] = (await server.command('KEYS', `*:h:${id}`)) as string[]
  for (const line of ['garbage', 'a:b 1 2 3 {cut', 'a:b 1 1e99 3 {}'])
    await server.command('RPUSH', name, line)
  t.same((await shown()).history, history)
  await server.command('DEL', name)
  await server.command('SET', name, 'of another type')
  t.match(await shown(), { state: 'unknown', history: [] })
  t.equal((await api('/v1/report')).status, 200)
})

t.test('a store that is down gives 503; an unreadable record gives 500 and can be deleted', async (t) => {
  const server = await RedisServer.start()
  t.teardown(() => server[Symbol.asyncDispose]())
  const { api, unknown } = await world(t, server.url)
  const key = newKey()
  const id = await unknown(key)
  const { version } = recordOf(await api(`/v1/records/${id}`))
  const [name = ''] = (await server.command('KEYS', `*:r:${id}`)) as string[]
  await server.command('SETRANGE', name, 2, '\x09')
  const broken = await server.command('GET', name)
  const headers = { 'if-match': `"${version}"` }
  const subject = { key, caller: { authorization: 'Bearer alice' }, method: 'POST', path: '/break/a' }
  const body = { outcome: 'retryable' }
  const every = async () => [
    await api(`/v1/records/${id}`),
    await api('/v1/records/lookup', { method: 'POST', body: subject }),
    await api(`/v1/records/${id}/resolve`, { method: 'POST', headers, body }),
    await api('/v1/outcomes', { method: 'POST', body: { ...subject, ...body } }),
  ]
  for (const reply of await every()) t.same([reply.status, reply.code], [500, 'record_unreadable'])
  t.equal(await server.command('GET', name), broken)
  const page = await api('/v1/records')
  t.match(page.json, { records: [], unreadable: [id], next: null })
  t.equal((await api(`/v1/records/${id}`, { method: 'DELETE', headers })).status, 204)
  t.equal(await server.command('GET', name), null)
  await server.command('RPUSH', name, 'no text')
  const strange = await api(`/v1/records/${id}`, { method: 'DELETE', headers })
  t.same([strange.status, strange.code], [500, 'record_unreadable'], 'not even its version can be read')
  await server.kill()
  for (const reply of [...(await every()), await api('/v1/records'), await api('/v1/report')]) {
    t.same([reply.status, reply.code], [503, 'store_unavailable'])
    t.equal(reply.headers.get('retry-after'), '1')
  }
})

void t.test('these tests exercise every status that OpenAPI describes for each operation', async (t) => {
  const { api } = await world(t, 'memory:')
  t.equal((await api('/v1/openapi.json')).status, 200)
  t.match((await api('/v1/openapi.json')).json, { openapi: '3.1.0', info: { version: /^\d/ } })
  t.ok(exercised.all.length > 60, `${exercised.all.length} of them`)
  t.same(exercised.missing, [])
})
