import { appendFileSync, statSync } from 'node:fs'
import { request as httpRequest } from 'node:http'
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
import { rawRequest } from '../support/raw.ts'
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
  const proxy = await proxyInProcess(
    [
      adminYaml(t),
      `audit: { file: ${audit} }`,
      `upstream: { url: "${upstream.url}" }`,
      `store: { url: "${store}" }`,
      'routes:',
      '  - { name: pay, match: { path: /pay } }',
      '  - { name: break, match: { path: "/break/*" }, keep: response }',
      '  - { name: gated, match: { path: /gated } }',
      more,
    ].join('\n'),
  )
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
    t.match(shown.json, {
      id: first,
      route: 'break',
      state: 'unknown',
      method: 'POST',
      path: '/break/a',
      attempts: 1,
    })
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
    for (const quoted of [`"${done}"`, done])
      t.equal(
        recordOf(await look({ key: quoted, caller, method: 'POST', path: '//pay/?x=1' })).id,
        recordOf(paid).id,
      )
    t.equal(recordOf(await look({ key: done, caller, method: 'POST', route: 'pay' })).id, recordOf(paid).id)
    t.equal(
      (await look({ key: done, caller: { authorization: 'Bearer bob' }, method: 'POST', path: '/pay' }))
        .status,
      404,
    )
    t.equal((await look({ key: done, method: 'POST', path: '/pay' })).status, 404)
    const id = recordOf(paid).id
    await until(async () => fullOf(await api(`/v1/records/${id}`)).history.length >= 3)
    const { history } = fullOf(await api(`/v1/records/${id}`))
    t.match(history, [
      {
        event: 'executed',
        count: 1,
        detail: { status: 201, before: 'absent', after: 'completed' },
      },
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
    t.same(
      {
        ...after,
        history: undefined,
        reconciliation: undefined,
        shadowed: undefined,
        explanation: undefined,
      },
      {
        ...resolved.json,
        history: undefined,
        reconciliation: undefined,
        shadowed: undefined,
        explanation: undefined,
      },
    )
    t.equal(resolved.headers.get('etag'), `"${after.version}"`)
    t.match(after, {
      state: 'completed',
      response: { status: 200, size: 16 },
      lastError: null,
      leaseUntil: null,
    })
    const retried = await send(proxy, a, { path: '/break/a' })
    t.ok(retried.replayed)
    t.same([retried.status, retried.body], [200, '{"id":"by hand"}'])
    t.ok(retried.headers.get('date'))
    t.equal((await resolve(first, at(after), completed)).code, 'not_unknown', 'completed is final')
    await until(async () =>
      fullOf(await api(`/v1/records/${first}`)).history.some(({ event }) => event === 'resolved'),
    )

    // An outcome reported by key and caller.
    const outcome = (body: object) => api('/v1/outcomes', { method: 'POST', body })
    const subject = { route: 'break', key: b, caller, method: 'POST', path: '/break/b' }
    t.equal(
      (await outcome({ ...subject, key: c, route: 'gated', path: '/gated', outcome: 'retryable' })).code,
      'not_unknown',
    )
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
  for (const query of [
    'state=lost',
    'state=',
    'age=1',
    'limit=0',
    'limit=1001',
    'limit=x',
    'deadLettered=1',
    'cursor=x',
    `cursor=${Buffer.from('all no').toString('base64url')}`,
    `cursor=${Buffer.from('unresolved 1 a').toString('base64url')}`,
    'order=age',
    'state=unknown&state=unknown',
  ])
    t.equal((await api(`/v1/records?${query}`)).code, 'invalid_request', query)
  t.equal((await api('/v1/report?since=yesterday')).code, 'invalid_request')
  const version = recordOf(await api(`/v1/records/${id}`)).version
  const headers = { 'if-match': `"${version}"` }
  const bodies: unknown[] = [
    '',
    '{',
    '[]',
    '"x"',
    { outcome: 'done' },
    { outcome: 'completed' },
    { outcome: 'retryable', response: COMPLETED },
    { outcome: 'retryable', surprise: 1 },
    { outcome: 'retryable', reason: '' },
    { outcome: 'completed', response: { ...COMPLETED, status: 199 } },
    { outcome: 'completed', response: { ...COMPLETED, bodyBase64: 'AA==' } },
    { outcome: 'completed', response: { status: 200, bodyBase64: '%' } },
    { outcome: 'completed', response: { status: 200, bodyBase64: 'c2Vjc' } },
    { outcome: 'completed', response: { status: 200, bodyBase64: 'c2Vjcm' } },
    { outcome: 'completed', response: { status: 200, bodyBase64: 'c2V=' } },
    { outcome: 'completed', response: { status: 204, body: 'x' } },
    { outcome: 'completed', response: { status: 200, headers: [['a b', 'c']] } },
    { outcome: 'completed', response: { status: 200, headers: [['a', 'b\r\nc: d']] } },
    { outcome: 'completed', response: { status: 200, headers: [['a', 'ü\u0100']] } },
    { outcome: 'completed', response: { status: 200, headers: [['a']] } },
  ]
  const path = `/v1/records/${id}/resolve`
  for (const body of bodies)
    t.equal(
      (await api(path, { method: 'POST', headers: { ...headers, 'content-type': 'application/json' }, body }))
        .code,
      'invalid_request',
      JSON.stringify(body),
    )
  const lookups = [
    {},
    { key: '', method: 'POST', path: '/pay' },
    { key: 'ü', method: 'POST', path: '/pay' },
    { key: 'a', path: '/pay' },
    { key: 'a', method: 'POST' },
    { key: 'a', method: 'POST', path: 'pay' },
    { key: 'a', method: 'GET', path: '/pay' },
    { key: 'a', method: 'POST', path: '/pay', route: 'gone' },
    { key: 'a', method: 'POST', path: '/pay', route: 'gated' },
    { key: 'a', method: 'POST', path: '/pay', caller: { 'x y': 'a' } },
    { key: 'a', method: 'POST', path: '/pay', caller: { 'x-api-key': 'a' } },
  ]
  for (const body of lookups)
    t.equal(
      (await api('/v1/records/lookup', { method: 'POST', body })).code,
      'invalid_request',
      JSON.stringify(body),
    )
  t.equal(
    (await api('/v1/outcomes', { method: 'POST', body: { key: 'a', outcome: 'retryable' } })).code,
    'invalid_request',
  )
  t.equal((await api('/v1/outcomes', { method: 'POST', body: {} })).code, 'invalid_request')
  const outcome = { key: 'a', method: 'POST', path: '/pay', outcome: 'completed' }
  t.equal((await api('/v1/outcomes', { method: 'POST', body: outcome })).code, 'invalid_request')
  t.equal(
    (await api(`/v1/records/${id}`, { method: 'DELETE', headers, body: { because: 1 } })).code,
    'invalid_request',
  )
  for (const path of ['/v1/drain', '/v1/undrain'])
    t.equal((await api(path, { method: 'POST', body: { because: 1 } })).code, 'invalid_request')
  t.equal(recordOf(await api(`/v1/records/${id}`)).version, version)
  t.equal((await fetch(`${proxy.adminUrl}/readyz`)).status, 200)
  t.same(linesOf(audit), [])

  // Bodies of the wrong media type, or too large.
  const typed = { 'content-type': 'text/plain' }
  for (const { method, path: template, hasBody } of exercised.operations) {
    const at = template.replace('{id}', id)
    if (!hasBody) {
      if (method !== 'GET') t.fail(`${method} ${template} takes no body`)
      continue
    }
    t.equal(
      (await api(at, { method, body: '{}', headers: { ...headers, ...typed } })).code,
      'unsupported_media_type',
    )
    const raw = await rawRequest(
      Number(new URL(proxy.adminUrl).port),
      `${method} ${at} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ${TOKEN}\r\nContent-Type: application/json\r\nContent-Length: 8388609\r\n\r\n`,
    )
    t.equal(raw.status, 413)
    const text = raw.body.toString()
    const reply = {
      status: 413,
      headers: new Headers({ 'content-type': 'application/problem+json' }),
      text,
      json: JSON.parse(text),
      code: null,
    }
    exercised.hold(t, method, at, reply)
  }
  const none = await ask(proxy, '/v1/records/lookup', { method: 'POST' })
  t.equal(none.code, 'invalid_request', 'a required body is missing')
})

void t.test('S10 the API refuses a missing or wrong token, a wrong Host, Origin or method', async (t) => {
  const { api, proxy, unknown, audit } = await world(t, 'memory:')
  const id = await unknown()
  const { host, port } = new URL(proxy.adminUrl)
  const own = async (method: string, path: string, headers: Record<string, string>): Promise<AdminReply> => {
    const { promise, resolve, reject } = Promise.withResolvers<AdminReply>()
    const asked = httpRequest(
      { host: '127.0.0.1', port, method, path, headers: { authorization: `Bearer ${TOKEN}`, ...headers } },
      (response) => {
        const chunks: Buffer[] = []
        response.on('data', (chunk: Buffer) => chunks.push(chunk))
        response.on('end', () => {
          const text = Buffer.concat(chunks).toString()
          const json = text === '' ? {} : JSON.parse(text)
          const reply = { status: response.statusCode as number, text, json, code: json.code ?? null }
          resolve({ ...reply, headers: new Headers(response.headers as Record<string, string>) })
        })
      },
    )
    asked.on('error', reject)
    asked.end()
    const reply = await promise
    exercised.hold(t, method, path, reply)
    return reply
  }
  t.equal(exercised.operations.length, 11)
  for (const { method, path: template } of exercised.operations) {
    const path = template.replace('{id}', id)
    for (const token of [null, '', 'wrong', `${TOKEN}x`, TOKEN.slice(1)]) {
      const reply = await api(path, { method, token })
      t.same([reply.status, reply.code], [401, 'unauthorized'])
      t.equal(reply.headers.get('www-authenticate'), 'Bearer')
    }
    for (const wrong of [
      'evil.example',
      'evil.example:80',
      `localhost.evil.example:${port}`,
      '10.0.0.1',
      'a b',
      'user@localhost',
    ])
      t.same(
        await own(method, path, { host: wrong }).then(({ status, code }) => [status, code]),
        [421, 'host_not_allowed'],
        wrong,
      )
    for (const origin of [
      'http://evil.example',
      'null',
      'http://127.0.0.1',
      `http://localhost:${port}`,
      `http://${host}/`,
      'file://',
    ])
      t.same(
        await own(method, path, { host, origin }).then(({ status, code }) => [status, code]),
        [403, 'origin_not_allowed'],
        origin,
      )
  }
  for (const name of [`localhost:${port}`, 'LOCALHOST', '127.0.0.1', '[::1]:1', host])
    t.equal((await own('GET', '/v1/records', { host: name })).status, 200, name)
  for (const origin of [`http://${host}`, `https://${host}`])
    t.equal((await own('GET', '/v1/records', { host, origin })).status, 200)
  t.equal((await own('HEAD', '/v1/records', { host })).text, '')
  for (const [method, path, allow] of [
    ['POST', '/v1/records', 'GET, HEAD'],
    ['PUT', `/v1/records/${id}`, 'GET, HEAD, DELETE'],
    ['GET', `/v1/records/${id}/resolve`, 'POST'],
    ['GET', '/v1/records/lookup', 'POST'],
    ['GET', '/v1/drain', 'POST'],
    ['OPTIONS', '/v1/outcomes', 'POST'],
  ] as const) {
    const reply = await own(method, path, { host })
    t.same([reply.status, reply.code, reply.headers.get('allow')], [405, 'method_not_allowed', allow])
  }
  for (const path of [
    '/v1',
    '/v1/',
    '/v1/records/',
    '/v1/records/x',
    `/v1/records/${id}/`,
    `/v1//records`,
    `/V1/records`,
    `/v1/records/${id}%20`,
    '/v1/reports',
  ])
    t.equal((await own('GET', path, { host })).code, 'not_found', path)
  t.same(linesOf(audit), [])
  t.equal(
    (await fetch(`${proxy.url}/v1/records`, { headers: { authorization: `Bearer ${TOKEN}` } })).headers.get(
      'x-made',
    ),
    '1',
    'on the traffic port this path belongs to the upstream',
  )
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
  const port = Number(new URL(named.adminUrl).port)
  const at = async (host: string) =>
    (
      await rawRequest(
        port,
        `GET /v1/records HTTP/1.1\r\nHost: ${host}\r\nAuthorization: Bearer ${TOKEN}\r\n\r\n`,
      )
    ).status
  t.equal(await at('admin.internal:9464'), 200)
  t.equal(await at('localhost'), 421)
  t.equal(await at('127.0.0.1'), 200, 'the address that the connection came to')
  t.equal(
    (
      await rawRequest(
        port,
        `GET /v1/records HTTP/1.1\r\nHost: admin.internal\r\nHost: admin.internal\r\nAuthorization: Bearer ${TOKEN}\r\n\r\n`,
      )
    ).status,
    421,
    'two Host lines are refused',
  )
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

void t.test(
  'a store that is down gives 503; an unreadable record gives 500 and can be deleted',
  async (t) => {
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
  },
)

void t.test('these tests exercise every status that OpenAPI describes for each operation', async (t) => {
  const { api } = await world(t, 'memory:')
  t.equal((await api('/v1/openapi.json')).status, 200)
  t.match((await api('/v1/openapi.json')).json, { openapi: '3.1.0', info: { version: /^\d/ } })
  t.ok(exercised.all.length > 60, `${exercised.all.length} of them`)
  t.same(exercised.missing, [])
})
