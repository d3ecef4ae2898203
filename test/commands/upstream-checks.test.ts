import { once } from 'node:events'
import { writeFileSync } from 'node:fs'
import { createServer as createHttp2 } from 'node:http2'
import { createServer } from 'node:https'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import t, { type Test } from 'tap'
import type { CheckResult } from '../../src/commands/upstream-checks.ts'
import { certificate } from '../support/certificates.ts'
import { command } from '../support/commands.ts'
import { newKey, send, tempDir } from '../support/e2e.ts'
import { proxyBefore } from '../support/exchange.ts'
import { frameUpstream } from '../support/frames.ts'
import { freePort } from '../support/redis.ts'
import { tcpStub, upstreamStub } from '../support/upstream.ts'

/** What `doctor` says about the upstream and its status queries. */
async function asked(t: Test, upstream: string, routes = ''): Promise<string[]> {
  const file = join(tempDir(t), 'proxy.yaml')
  writeFileSync(file, `upstream: { ${upstream} }\nstore: { url: "memory:" }\n${routes}\n`)
  const { out } = await command(['doctor', '--json', '--config', file])
  return (JSON.parse(out) as CheckResult[])
    .filter(({ check }) => check === 'upstream' || check === 'status query')
    .map(({ check, found, detail }) => `${found} ${check}: ${detail}`)
}

void t.test('§15.22 doctor asks the upstream, and says what it found', async (t) => {
  const port = await freePort()
  t.match(await asked(t, `url: "http://127.0.0.1:${port}"`), [
    `finding upstream: http://127.0.0.1:${port} cannot be reached: connect ECONNREFUSED`,
  ])
  const seen: string[] = []
  let status = 204
  await using upstream = await upstreamStub(({ method, target }, response) => {
    seen.push(`${method} ${target}`)
    response.writeHead(status).end()
  })
  t.match(await asked(t, `url: "${upstream.url}"`), [
    new RegExp(`^fine upstream: ${upstream.url} answers OPTIONS \\* with 204 in [\\d.]+ ms$`),
  ])
  t.strictSame(seen, ['OPTIONS *'])
  status = 503
  t.match(await asked(t, `url: "${upstream.url}"`), [/^finding upstream: .* answers OPTIONS \* with 503/])
  await using silent = await tcpStub((socket) => void socket.on('data', () => socket.destroy()))
  t.match(await asked(t, `url: "${silent.url}"`), [
    /^finding upstream: .* accepts a connection but does not answer OPTIONS \*: the upstream closed the connection$/,
  ])
  t.match(await asked(t, `url: "${upstream.url.replace('http:', 'https:')}"`), [
    /^finding upstream: https:.* cannot be reached: it does not speak TLS, or .* \([^/]*\)$/,
  ])
  await using strange = await tcpStub((socket) => void socket.on('data', () => socket.end('\x15\x03\x01')))
  t.match(await asked(t, `url: "${strange.url}"`), [/the response is not HTTP\/1\.1; it may want https:/])
})

void t.test('§15.22 doctor asks over HTTP/2 if the proxy does', async (t) => {
  const upstream = createHttp2()
  upstream.on('stream', (stream, headers) => {
    const isAsked = headers[':path'] === '*' && headers[':method'] === 'OPTIONS'
    stream.respond({ ':status': isAsked ? 204 : 400 }, { endStream: true })
  })
  upstream.listen(0, '127.0.0.1')
  await once(upstream, 'listening')
  t.teardown(() => upstream.close())
  const url = `http://127.0.0.1:${(upstream.address() as AddressInfo).port}`
  t.match(await asked(t, `url: "${url}", http2: true`), [
    /^fine upstream: .* answers OPTIONS \* with 204 over HTTP\/2 in [\d.]+ ms$/,
  ])
  await using older = await upstreamStub((_seen, response) => void response.end())
  t.match(await asked(t, `url: "${older.url}", http2: true`), [
    /^finding upstream: .* cannot be reached: the upstream does not speak HTTP\/2/,
  ])
  await using ending = await frameUpstream(t, { request: (socket) => void socket.end() })
  t.match(await asked(t, `url: "${ending.url}", http2: true`), [
    /^finding upstream: .* accepts a connection but does not answer OPTIONS \*/,
  ])
})

void t.test('§15.22 doctor sees TLS as the proxy does', async (t) => {
  using own = certificate('IP:127.0.0.1')
  using other = certificate('IP:127.0.0.1')
  const server = createServer(own, (_request, response) => void response.end()).listen(0, '127.0.0.1')
  t.teardown(() => server.close().closeAllConnections())
  await once(server, 'listening')
  const url = `https://127.0.0.1:${(server.address() as AddressInfo).port}`
  t.match(await asked(t, `url: "${url}", tls: { ca: ${own.certFile} }`), [
    /^fine upstream: .* with 200 in [\d.]+ ms \(TLSv1\.3, certificate of test, valid until .* GMT\)$/,
  ])
  t.match(await asked(t, `url: "${url}", tls: { ca: ${other.certFile} }`), [
    /^finding upstream: https:.* cannot be reached: .*certificate/,
  ])
  using named = certificate('DNS:localhost')
  server.addContext('localhost', named)
  t.match(await asked(t, `url: "${url.replace('127.0.0.1', 'localhost')}", tls: { ca: ${named.certFile} }`), [
    / with 200 in [\d.]+ ms \(TLSv1\.3, certificate of test, /,
  ])
  const mixed = `tls: { cert: ${own.certFile}, key: ${other.keyFile} }`
  t.match(await asked(t, `url: "${url}", ${mixed}`), [/^finding upstream: .*cannot be used: .*key/])
})

void t.test('§15.22 doctor sends the status queries, about a request that never existed', async (t) => {
  await using upstream = await upstreamStub(({ target }, response) => {
    const status = target.startsWith('/none') ? 404 : 200
    response.writeHead(status, { 'content-type': 'application/json' }).end('{}')
  })
  const route = (name: string, path: string, more = '') =>
    `  - { name: ${name}, match: { path: /${name} }, reconcile: { request: { path: "${path}?key={key}" }, identity: none, completed: { status: 200 }${more} } }`
  const found = await asked(
    t,
    `url: "${upstream.url}"`,
    [
      'routes:',
      route('good', '/none', ', notFound: { status: 404 }'),
      route('credulous', '/all', ', notFound: { status: 404 }'),
      route('odd', '/none', ', notFound: { status: 410 }'),
      route('plain', '/none'),
    ].join('\n'),
  )
  t.match(found.slice(1), [
    'fine status query: route good: GET /none does not find a request that never existed',
    'finding status query: route credulous: GET /all finds a request that never existed',
    'finding status query: route odd: GET /none about a request that never existed: status 404',
    'note status query: route plain: GET /none about a request that never existed: status 404',
  ])
  t.equal(found.length, 5)
})

void t.test('§15.22 an execution that reached nobody is logged at warn, protected or not', async (t) => {
  await using proxy = await proxyBefore({ url: `http://127.0.0.1:${await freePort()}` })
  await send(proxy, newKey(), { path: '/p' })
  const line = await proxy.logged(
    ({ msg, outcome }) => msg === 'request' && outcome === 'upstream_unreachable',
  )
  t.match(line, { level: 'warn', cause: /ECONNREFUSED/ })
  await send(proxy, null, { path: '/other', method: 'GET', body: null })
  const passed = await proxy.logged(({ msg }) => msg === 'an unprotected request got no answer')
  t.match(passed, { level: 40, cause: /ECONNREFUSED/ })
})
