import { once } from 'node:events'
import { copyFileSync, writeFileSync } from 'node:fs'
import { request as httpsRequest } from 'node:https'
import { join } from 'node:path'
import { type ConnectionOptions, connect, type TLSSocket } from 'node:tls'
import t, { type Test } from 'tap'
import { linesOf } from '../../src/core/headers.ts'
import { certificate } from '../support/certificates.ts'
import { newKey, tempDir, until } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { post, rawRequest, readAnswer } from '../support/raw.ts'
import { type UpstreamStub, upstreamStub, valueOf } from '../support/upstream.ts'

async function upstreamOf(t: Test): Promise<UpstreamStub> {
  const upstream = await upstreamStub(({ method, body }, response) => {
    response
      .writeHead(method === 'GET' ? 200 : 201, { 'X-Execution': 'Once' })
      .end(`${method} ${body.length}`)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  return upstream
}

function proxyOf(upstream: UpstreamStub, listen: string, more = ''): Promise<TestProxy> {
  return proxyInProcess(
    `listen: { address: "127.0.0.1:0", tls: ${listen} }\nupstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\n${more}`,
  )
}

async function open(t: Test, port: number, options: ConnectionOptions): Promise<TLSSocket> {
  const socket = connect({ port, host: '127.0.0.1', ...options })
  t.teardown(() => socket.destroy())
  await once(socket, 'secureConnect')
  return socket
}

async function asks(socket: TLSSocket, bytes: string) {
  socket.write(bytes)
  return await readAnswer(socket)
}

void t.test('a client over TLS gets what one without gets, live and replayed', async (t) => {
  using own = certificate('IP:127.0.0.1,DNS:localhost')
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(upstream, `{ cert: ${own.certFile}, key: ${own.keyFile} }`)
  t.match(proxy.url, /^https:/)
  const client = await open(t, proxy.port, { ca: own.cert })
  const key = newKey()
  const first = await asks(client, post('/v1/payments', key, '{"amount":1}'))
  const replay = await asks(client, post('/v1/payments', key, '{"amount":1}'))
  t.equal(first.status, 201)
  t.strictSame(replay.body, first.body)
  t.strictSame(linesOf(replay.headers, 'x-execution'), ['Once'])
  t.strictSame(linesOf(replay.headers, 'idempotent-replayed'), ['true'])
  const large = `"${'x'.repeat(300_000)}"`
  t.equal(String((await asks(client, post('/v1/payments', newKey(), large))).body), `POST ${large.length}`)
  t.equal((await asks(client, 'GET /v1/other HTTP/1.1\r\nHost: a\r\n\r\n')).status, 200)
  t.equal(upstream.seen.length, 3)
  for (const seen of upstream.seen) t.equal(valueOf(seen, 'x-forwarded-proto'), 'https')
})

void t.test('a client that speaks plain text or breaks off its handshake harms nobody', async (t) => {
  using own = certificate('IP:127.0.0.1')
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(upstream, `{ cert: ${own.certFile}, key: ${own.keyFile} }`)
  await t.rejects(fetch(proxy.url.replace('https', 'http')))
  await t.rejects(open(t, proxy.port, { ca: own.cert, maxVersion: 'TLSv1.1', minVersion: 'TLSv1' }))
  const client = await open(t, proxy.port, { ca: own.cert })
  t.equal((await asks(client, post('/v1/payments', newKey(), '{}'))).status, 201)
})

void t.test('the name that a client asks for selects the certificate', async (t) => {
  using first = certificate('DNS:pay.example')
  using second = certificate('DNS:*.shop.example')
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(
    upstream,
    `{ cert: ${first.certFile}, key: ${first.keyFile}, others: [{ cert: ${second.certFile}, key: ${second.keyFile} }] }`,
  )
  const ca = [first.cert, second.cert]
  const shown = async (servername: string): Promise<string | undefined> => {
    const socket = await open(t, proxy.port, { ca, servername, checkServerIdentity: () => undefined })
    return socket.getPeerCertificate().subjectaltname
  }
  t.equal(await shown('pay.example'), 'DNS:pay.example')
  t.equal(await shown('eu.shop.example'), 'DNS:*.shop.example')
  t.equal(await shown('elsewhere.example'), 'DNS:pay.example', 'the first, for names that none has')
})

void t.test('with clientCa, a client needs a certificate of these authorities', async (t) => {
  using own = certificate('IP:127.0.0.1')
  using client = certificate('DNS:client')
  using stranger = certificate('DNS:client')
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(
    upstream,
    `{ cert: ${own.certFile}, key: ${own.keyFile}, clientCa: ${client.certFile} }`,
  )
  const answerTo = async (options: ConnectionOptions): Promise<number> => {
    const socket = await open(t, proxy.port, { ca: own.cert, ...options })
    return (await asks(socket, post('/v1/payments', newKey(), '{}'))).status
  }
  t.equal(await answerTo({ cert: client.cert, key: client.key }), 201)
  await t.rejects(answerTo({}))
  await t.rejects(answerTo({ cert: stranger.cert, key: stranger.key }))
  t.equal(upstream.seen.length, 1)
})

void t.test('a resumed session is worth no more than its certificate', async (t) => {
  using own = certificate('IP:127.0.0.1')
  using client = certificate('URI:spiffe://client')
  using other = certificate('URI:spiffe://other')
  const clientCa = join(tempDir(t), 'ca.pem')
  copyFileSync(client.certFile, clientCa)
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(
    upstream,
    `{ cert: ${own.certFile}, key: ${own.keyFile}, clientCa: ${clientCa} }`,
    'defaults: { scope: { caller: "tls:san-uri" } }',
  )
  const key = newKey()
  const shows = { ca: own.cert, cert: client.cert, key: client.key, maxVersion: 'TLSv1.2' } as const
  const first = await open(t, proxy.port, shows)
  const session = first.getSession() as Buffer
  t.equal((await asks(first, post('/v1/payments', key, '{}'))).status, 201)
  const resumed = await open(t, proxy.port, { ca: own.cert, session, maxVersion: 'TLSv1.2' })
  t.ok(resumed.isSessionReused())
  const replay = await asks(resumed, post('/v1/payments', key, '{}'))
  t.strictSame(linesOf(replay.headers, 'idempotent-replayed'), ['true'], 'the same caller')
  const rotated = proxy.logged(({ msg }) => /were read again/.test(String(msg)))
  copyFileSync(other.certFile, clientCa)
  await rotated
  await t.rejects(open(t, proxy.port, { ...shows, session }).then((socket) => once(socket, 'session')))
})

void t.test('certificates rotate: new connections get the new one, open ones stay', async (t) => {
  using one = certificate('IP:127.0.0.1')
  using other = certificate('IP:127.0.0.1')
  const dir = tempDir(t)
  const [cert, key] = [join(dir, 'cert.pem'), join(dir, 'key.pem')]
  copyFileSync(one.certFile, cert)
  copyFileSync(one.keyFile, key)
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(upstream, `{ cert: ${cert}, key: ${key} }`)
  const before = await open(t, proxy.port, { ca: one.cert })
  const told = proxy.logged(({ msg }) => /cannot be used/.test(String(msg)))
  copyFileSync(other.keyFile, key)
  t.match(await told, {
    level: 40,
    path: 'listen.tls',
    problem: /the key does not belong to the certificate/,
  })
  await open(t, proxy.port, { ca: one.cert })
  const rotated = proxy.logged(({ msg }) => /were read again/.test(String(msg)))
  copyFileSync(other.certFile, cert)
  await rotated
  const after = await open(t, proxy.port, { ca: other.cert })
  for (const socket of [before, after])
    t.equal((await asks(socket, post('/v1/payments', newKey(), '{}'))).status, 201)
  const expires = await proxy.metric('idempotency_tls_certificate_expires_seconds{listener="listen"}')
  t.equal(expires, Date.parse(after.getPeerCertificate().valid_to) / 1000)
})

void t.test('the admin and operations listeners speak TLS too', async (t) => {
  using own = certificate('IP:127.0.0.1')
  const tls = `{ cert: ${own.certFile}, key: ${own.keyFile} }`
  const token = join(tempDir(t), 'token')
  writeFileSync(token, 'secret-token')
  const upstream = await upstreamOf(t)
  await using proxy = await proxyOf(
    upstream,
    tls,
    `admin: { listen: { address: "127.0.0.1:0", tls: ${tls} }, tokenFile: ${token} }\nops: { listen: { address: "127.0.0.1:0", tls: ${tls} } }`,
  )
  const { admin, ops } = proxy.log.find(({ msg }) => msg === 'listening') as { admin: string; ops: string }
  const get = async (url: string): Promise<[number | undefined, string]> => {
    const request = httpsRequest(url, {
      ca: own.cert,
      headers: { authorization: 'Bearer secret-token' },
    }).end()
    const [response] = await once(request, 'response')
    let text = ''
    for await (const chunk of response) text += chunk
    return [response.statusCode, text]
  }
  t.match(await get(`${ops}/livez`), [200, /ok/])
  t.match(await get(`${ops}/metrics`), [
    200,
    /idempotency_tls_certificate_expires_seconds\{listener="ops.listen"\} \d/,
  ])
  t.match(await get(`${admin}/v1/config`), [200, /"tls":/])
})

void t.test('a caller is who its certificate says', async (t) => {
  using own = certificate('IP:127.0.0.1')
  using pay = certificate('URI:spiffe://shop/pay,DNS:pay')
  using web = certificate('URI:spiffe://shop/web,DNS:web')
  const authorities = join(tempDir(t), 'ca.pem')
  writeFileSync(authorities, String(pay.cert) + String(web.cert))
  const upstream = await upstreamOf(t)
  const listen = `{ cert: ${own.certFile}, key: ${own.keyFile}, clientCa: ${authorities} }`
  await using proxy = await proxyOf(
    upstream,
    listen,
    'defaults: { scope: { caller: "tls:san-uri", anonymous: reject } }\n',
  )
  const forged = ['X-Forwarded-Client-Cert: URI=spiffe://shop/pay']
  const replayed = async ({ cert, key }: typeof own, more: readonly string[] = []): Promise<boolean> => {
    const socket = await open(t, proxy.port, { ca: own.cert, cert, key })
    const answer = await asks(socket, post('/v1/payments', 'one-key', '{}', more))
    t.equal(answer.status, 201)
    return linesOf(answer.headers, 'idempotent-replayed').length > 0
  }
  t.notOk(await replayed(pay))
  t.ok(await replayed(pay), 'the same caller')
  t.notOk(await replayed(web, forged), 'another one, whatever it says it is')
  t.strictSame(linesOf(upstream.seen[1]?.headers ?? [], 'x-forwarded-client-cert'), [])
})

void t.test('behind a trusted proxy, a caller is who that proxy says', async (t) => {
  const upstream = await upstreamOf(t)
  await using proxy = await proxyInProcess(
    `trustProxy: [127.0.0.1]\nupstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\ndefaults: { scope: { caller: ["tls:subject"], anonymous: reject } }`,
  )
  const answer = (...more: string[]) => rawRequest(proxy.port, post('/v1/payments', 'one-key', '{}', more))
  t.equal((await answer()).status, 401)
  t.equal((await answer('X-Forwarded-Client-Cert: Hash=ab;Subject="CN=pay"')).status, 201)
  const retry = await answer('X-Forwarded-Client-Cert: Hash=cd;Subject="CN=pay"')
  t.strictSame(linesOf(retry.headers, 'idempotent-replayed'), ['true'])
  t.equal((await answer('X-Forwarded-Client-Cert: Subject="CN=web"')).status, 201)
  t.equal(upstream.seen.length, 2)
})

void t.test('an answer that its client does not read is dropped', async (t) => {
  using own = certificate('IP:127.0.0.1')
  await using upstream = await upstreamStub((_seen, response) => {
    response.writeHead(201).end(Buffer.alloc(4_000_000, 'x'))
  })
  await using proxy = await proxyInProcess(
    `listen: { address: "127.0.0.1:0", tls: { cert: ${own.certFile}, key: ${own.keyFile} } }\nupstream: { url: "${upstream.url}", idleTimeout: 1s }\nstore: { url: "memory:" }`,
  )
  const client = await open(t, proxy.port, { ca: own.cert })
  client.pause()
  client.write(post('/v1/payments', newKey(), '{}'))
  await upstream.arrived(1)
  const held = (): Promise<number> => proxy.metric('idempotency_buffered_bytes')
  await until(async () => (await held()) > 0)
  await until(async () => (await held()) === 0)
  t.pass('its memory is free again')
})
