import t from 'tap'
import { REFUSALS, type RefusalCode } from '../../src/core/refusal.ts'
import { answersOf, isKeyHeader, spelled } from '../../src/describe/published.ts'
import { load, routeFile } from '../config/support.ts'
import { gate, newKey, type Reply, send } from '../support/e2e.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(200_000)

const told = (...lines: string[]): string[] => {
  const [route] = load(routeFile(...lines)).routes
  return answersOf(route as NonNullable<typeof route>).map(({ status, code }) => `${status} ${code}`)
}

void t.test('a plain route lists exactly the refusals that it may give', async (t) => {
  t.strictSame(told('key: optional', 'scope: { caller: none }'), [
    '400 idempotency_key_invalid',
    '408 request_timeout',
    '409 idempotency_key_in_progress',
    '409 idempotency_outcome_unknown',
    '409 idempotency_response_unavailable',
    '413 request_too_large',
    '422 idempotency_key_reused',
    '502 upstream_unreachable',
    '502 upstream_failed',
    '503 idempotency_store_unavailable',
    '503 overloaded',
    '504 upstream_timeout',
  ])
})

void t.test('settings add or change refusals', async (t) => {
  const plain = new Set(told('scope: { caller: none }'))
  for (const [lines, changes] of [
    [['key: required', 'scope: { caller: none }'], ['400 idempotency_key_missing']],
    [[], ['400 idempotency_caller_missing']],
    [['scope: { caller: "header:x" , anonymous: reject }'], ['401 idempotency_caller_missing']],
    [
      ['scope: { caller: "jwt:sub", jwt: { jwks: "https://id.example.com/k" } }'],
      ['401 idempotency_caller_missing', '503 idempotency_caller_missing'],
    ],
    [['scope: { caller: none }', 'misuse: { status: 409 }'], ['409 idempotency_key_reused']],
    [['scope: { caller: none }', 'inFlight: { status: 202 }'], ['202 idempotency_key_in_progress']],
    [['scope: { caller: none }', 'tombstone: 1d'], ['409 idempotency_key_expired']],
    [['scope: { caller: none }', 'limits: { newKeys: 5/m }'], ['429 rate_limited']],
    [['scope: { caller: none }', 'respondWithin: 5s'], ['504 upstream_slow']],
    [
      ['scope: { caller: none }', 'key: { from: ["header:repeatability-request-id"] }'],
      ['412 idempotency_key_expired'],
    ],
    [
      ['scope: { caller: none }', 'authorizeReplay: { path: /me }'],
      ['401 replay_forbidden', '403 replay_forbidden', '503 replay_unauthorized_yet'],
    ],
  ] as const)
    t.strictSame(
      told(...lines).filter((one) => !plain.has(one)),
      changes,
      lines.join('; '),
    )
})

void t.test('between them routes list every refusal except the three that no route gives', async (t) => {
  const all = new Set(
    [
      ['key: required', 'tombstone: 1d', 'limits: { newKeys: 5/m }', 'respondWithin: 5s'],
      ['authorizeReplay: { path: /me }'],
    ].flatMap((lines) => told(...lines).map((one) => one.split(' ')[1] as RefusalCode)),
  )
  t.strictSame(
    Object.keys(REFUSALS).filter((code) => !all.has(code as RefusalCode)),
    ['route_not_found', 'loop_detected', 'request_malformed'],
  )
})

void t.test('every refusal of a real proxy is one that its policy lists', async (t) => {
  const held = gate()
  await using upstream = await upstreamStub(async (seen, response) => {
    if (seen.target === '/me') return void response.writeHead(401).end()
    if (seen.headers.includes('break')) return void response.destroy()
    if (seen.headers.includes('hold')) await held.opened
    response.writeHead(201).end('x'.repeat(seen.headers.includes('large') ? 2000 : 1))
  })
  t.teardown(held.open)
  const routes = [
    'a: { key: required, misuse: { status: 400 }, inFlight: { status: 423 }, limits: { request: 100B, response: 1KiB } }',
    'b: { scope: { caller: "header:authorization", anonymous: reject }, respondWithin: 50ms }',
    'c: { authorizeReplay: { path: /me } }',
    'd: { limits: { newKeys: 1/m } }',
  ].map((line) => {
    const [name = '', rest = ''] = line.split(/: (.*)/s)
    return `  - { name: ${name}, match: { path: /${name} }, ${rest.slice(1, -1)} }`
  })
  const yaml = `upstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\nwellKnown: true\nroutes:\n${routes.join('\n')}\n`
  await using proxy = await proxyInProcess(yaml)
  const policy = (await (await fetch(`${proxy.url}/.well-known/idempotency`)).json()) as {
    readonly routes: readonly {
      readonly path: string
      readonly problems: readonly Record<string, unknown>[]
    }[]
  }
  const seen = new Set<string>()
  const answered = (path: string, { status, code, body }: Reply): void => {
    if (code === null) return void t.fail(`${path}: ${status} is not the proxy's own answer`)
    seen.add(code)
    const { type, retry } = JSON.parse(body) as Record<string, unknown>
    const problems = policy.routes.find((route) => route.path === path)?.problems ?? []
    t.ok(
      problems.some(
        (one) =>
          one['code'] === code && one['status'] === status && one['type'] === type && one['retry'] === retry,
      ),
      `${path}: ${status} ${code} ${String(retry)}`,
    )
  }
  const doing = (what: string) => ({ headers: { 'x-do': what } })
  const [done, cut, large, busy, own, many] = Array.from({ length: 6 }, newKey)

  answered('/a', await send(proxy, null, { path: '/a' }))
  answered('/a', await send(proxy, 'a, b', { path: '/a' }))
  answered('/a', await send(proxy, newKey(), { path: '/a', headers: { authorization: '', cookie: 'a=b' } }))
  answered('/a', await send(proxy, newKey(), { path: '/a', body: 'x'.repeat(200) }))
  await send(proxy, done as string, { path: '/a' })
  answered('/a', await send(proxy, done as string, { path: '/a', body: '2' }))
  answered('/a', await send(proxy, cut as string, { path: '/a', ...doing('break') }))
  answered('/a', await send(proxy, cut as string, { path: '/a' }))
  await send(proxy, large as string, { path: '/a', ...doing('large') })
  answered('/a', await send(proxy, large as string, { path: '/a' }))
  const running = send(proxy, busy as string, { path: '/a', ...doing('hold') })
  await upstream.arrived(4)
  answered('/a', await send(proxy, busy as string, { path: '/a' }))
  answered('/b', await send(proxy, newKey(), { path: '/b', headers: { authorization: '' } }))
  answered('/b', await send(proxy, newKey(), { path: '/b', ...doing('hold') }))
  await send(proxy, own as string, { path: '/c' })
  answered('/c', await send(proxy, own as string, { path: '/c' }))
  await send(proxy, many as string, { path: '/d' })
  answered('/d', await send(proxy, newKey(), { path: '/d' }))
  held.open()
  await running
  t.equal(seen.size, 12, [...seen].join(', '))
})

void t.test('key headers are recognised in any case, and spelled as people do', async (t) => {
  for (const name of ['Idempotency-Key', 'x-IDEMPOTENCY-key', 'paypal-request-id', 'X-Acme-Idempotency-Key'])
    t.ok(isKeyHeader(name), name)
  for (const name of ['X-Request-Id', 'Idempotent-Replayed', 'Idempotency-Status', 'Authorization', 'Key'])
    t.notOk(isKeyHeader(name), name)
  t.strictSame(['idempotency-key', 'paypal-request-id', 'x-acme-key'].map(spelled), [
    'Idempotency-Key',
    'PayPal-Request-Id',
    'X-Acme-Key',
  ])
})
