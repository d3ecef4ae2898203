import { once } from 'node:events'
import { writeFileSync } from 'node:fs'
import { createServer } from 'node:https'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import type { TLSSocket } from 'node:tls'
import t from 'tap'
import { ask } from '../support/admin.ts'
import { certificate } from '../support/certificates.ts'
import { configFile, newKey, send, tempDir, until } from '../support/e2e.ts'
import { Mount } from '../support/mount.ts'
import { proxyInProcess, proxyProcess } from '../support/proxy.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(120_000)

const ROTATED = 'secret files were read again and are in force'
const UNUSABLE = 'secret files have changed and cannot be used; their previous content stays in force'
const RELOADED = 'the configuration was reloaded'

void t.test('Y17 the certificates of a mutual TLS upstream rotate under load', async (t) => {
  using one = certificate('IP:127.0.0.1')
  using other = certificate('IP:127.0.0.1')
  const both = String(one.cert) + String(other.cert)
  /** How often each client certificate brought a request, by its serial number. */
  const seen = new Map<string, number>()
  const server = createServer({ ...one, ca: both, requestCert: true }, (request, response) => {
    const { serialNumber } = (request.socket as TLSSocket).getPeerCertificate()
    seen.set(serialNumber, (seen.get(serialNumber) ?? 0) + 1)
    request.resume().on('end', () => setTimeout(() => response.writeHead(201).end('done'), 5))
  }).listen(0, '127.0.0.1')
  t.teardown(() => server.close().closeAllConnections())
  await once(server, 'listening')
  const text = (own: typeof one, ca: string) => ({ ca, cert: String(own.cert), key: String(own.key) })
  const mount = new Mount(t, text(one, String(one.cert)))
  await using proxy = await proxyInProcess(`service: pay
upstream: { url: "https://127.0.0.1:${(server.address() as AddressInfo).port}", connections: 3, tls: { ca: ${mount.file('ca')}, cert: ${mount.file('cert')}, key: ${mount.file('key')} } }
store: { url: "memory:" }
admin: { listen: "127.0.0.1:0" }`)
  const rotated = async (n: number): Promise<void> => {
    await until(() => proxy.log.filter(({ msg }) => msg === ROTATED).length === n)
    const before = answered
    await until(() => answered > before + 30)
  }
  const load = { isOver: false }
  let answered = 0
  const failed: unknown[] = []
  const client = async (n: number): Promise<void> => {
    while (!load.isOver) {
      const way = n % 2 === 0 ? { method: 'GET', body: null, path: '/other' } : {}
      const reply = await send(proxy, n % 2 === 0 ? null : newKey(), way)
      if (reply.status !== 201) failed.push([reply.status, reply.body])
      answered++
    }
  }
  const clients = [1, 2, 3, 4, 5, 6].map(client)
  await until(() => answered > 30)
  mount.swap(text(one, both))
  await rotated(1)
  server.setSecureContext({ ...other, ca: both, requestCert: true } as never)
  mount.swap(text(other, both))
  await rotated(2)
  const [first = '', second = ''] = [...seen.keys()]
  const before = seen.get(first)
  mount.swap(text(other, String(other.cert)))
  await rotated(3)
  t.equal(seen.get(first), before, 'no connection made with the old certificate is used again')
  t.ok((seen.get(second) ?? 0) > 30)
  mount.swap({ ...text(other, String(other.cert)), key: String(other.key).slice(0, 100) })
  t.match(await proxy.logged(({ msg }) => msg === UNUSABLE), {
    level: 40,
    path: 'upstream.tls',
    problem: /key/,
  })
  const last = answered
  await until(() => answered > last + 30)
  load.isOver = true
  await Promise.all(clients)
  t.strictSame(failed, [])
})

void t.test('Y17 admin tokens rotate, with an overlap, whatever else waits for a restart', async (t) => {
  await using upstream = await upstreamStub((_seen, response) => void response.writeHead(201).end('ok'))
  const mount = new Mount(t, { token: 'old\n' })
  const yaml = (rest: string): string =>
    `service: pay\nupstream: { url: "${upstream.url}" }\nstore: { url: "memory:" }\nadmin: { listen: "127.0.0.1:0", tokenFile: ${mount.file('token')} }\n${rest}\n`
  const file = configFile(tempDir(t), yaml(''))
  await using proxy = await proxyProcess(file)
  const statuses = async () =>
    (await Promise.all(['old', 'new', 'newer'].map((token) => ask(proxy, '/v1/config', { token })))).map(
      ({ status }) => status,
    )
  const accepts = (...wanted: number[]) =>
    until(async () => JSON.stringify(await statuses()) === JSON.stringify(wanted))
  t.strictSame(await statuses(), [200, 401, 401])
  // A change that needs a restart is in the file all the while.
  await proxy.reload(yaml('status: { path: /status }'))
  await proxy.logged(({ restart }) => /status\.path/.test(String(restart)))
  mount.swap({ token: 'new\nold\n' })
  await accepts(200, 200, 401)
  mount.swap({ token: 'new\n' })
  await accepts(401, 200, 401)
  t.notMatch(JSON.stringify(proxy.log), /"(?:old|new)/, 'tokens are not logged')
  mount.swap({ token: '' })
  t.match(await proxy.logged(({ msg }) => msg === UNUSABLE), { level: 'warn', path: 'admin.tokenFile' })
  t.strictSame(await statuses(), [401, 200, 401])
  // Nor does an unusable token keep a new configuration out.
  await proxy.reload(yaml('limits: { inFlight: 7 }'))
  await proxy.logged(({ msg, changes }) => msg === RELOADED && /inFlight/.test(String(changes)))
  mount.swap({ token: 'newer' })
  await accepts(401, 401, 200)
  // Another file in its place.
  const other = join(tempDir(t), 'token')
  const moved = yaml('').replace(/tokenFile: [^ ]+/, `tokenFile: ${other}`)
  await proxy.reload(moved)
  await proxy.logged(
    ({ path, problem }) => path === 'admin.tokenFile' && /no such file/.test(String(problem)),
  )
  t.strictSame(await statuses(), [401, 401, 200])
  writeFileSync(other, 'old')
  await accepts(200, 401, 401)
  writeFileSync(other, 'new')
  await accepts(401, 200, 401)
})

void t.test('a proxy does not start without its secret files', async (t) => {
  const cert = join(tempDir(t), 'cert.pem')
  writeFileSync(cert, '-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n')
  await t.rejects(
    proxyInProcess(
      `upstream: { url: "https://127.0.0.1:1", tls: { ca: ${cert} } }\nstore: { url: "memory:" }`,
    ),
    /upstream\.tls: found files that cannot be used/,
  )
})
