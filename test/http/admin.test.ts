import { once } from 'node:events'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import type { Server } from 'node:http'
import { type AddressInfo } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { adminServer, opsServer } from '../../src/http/admin.ts'
import type { Health } from '../../src/http/health.ts'
import { Metrics } from '../../src/observe/metrics.ts'
import { proxyBefore } from '../support/exchange.ts'
import { everything } from '../support/raw.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(300_000)

const noBug = (error: unknown): never => {
  throw error
}

const OPEN = ['/livez', '/startupz', '/readyz', '/metrics']

class Fake implements Health {
  isDraining = false
  isStarted = true
  isUp = true
  why: string | null = null
  readinessNeedsStore = false
  readonly #metrics = new Metrics()
  readonly exposition = () => this.#metrics.exposition()
  readonly isServed = () => true
  readonly turned = () => Promise.resolve()
  readonly draining = () => this.isDraining
  readonly started = () => this.isStarted
  readonly conflict = () => this.why
  readonly store = () => Promise.resolve({ up: this.isUp, detail: this.isUp ? null : 'refused' })
}

async function listening(server: Server): Promise<{ url: string; port: number } & AsyncDisposable> {
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  return {
    url: `http://127.0.0.1:${port}`,
    port,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections()
      await new Promise((resolve) => server.close(resolve))
    },
  }
}

void t.test('O10 livez, startupz and readyz differ as §12 says', async (t) => {
  const health = new Fake()
  await using admin = await listening(adminServer(health, null, noBug))
  const states = async (): Promise<number[]> =>
    Promise.all(
      ['/livez', '/startupz', '/readyz'].map(async (path) => (await fetch(admin.url + path)).status),
    )
  t.same(await states(), [200, 200, 200])
  health.isStarted = false
  t.same(await states(), [200, 503, 503])
  health.isStarted = true
  health.isUp = false
  t.same(await states(), [200, 200, 200], 'one shared store must not take a whole fleet out of service')
  const body = (await (await fetch(`${admin.url}/readyz`)).json()) as object
  t.match(
    body,
    { store: { up: false, detail: 'refused' }, draining: false },
    'the state of the store is always in the body',
  )
  health.readinessNeedsStore = true
  t.same(await states(), [200, 200, 503])
  health.isUp = true
  t.same(await states(), [200, 200, 200])
  health.why = 'others identify records differently'
  t.same(await states(), [200, 200, 503], 'a replica that waits for others takes no traffic')
  t.match(await (await fetch(`${admin.url}/readyz`)).json(), { status: 'not ready', conflict: health.why })
  health.why = null
  health.isDraining = true
  t.same(await states(), [200, 200, 503])
  t.match(await (await fetch(`${admin.url}/readyz`)).json(), { draining: true })
})

void t.test('O10 the open paths accept only GET and HEAD', async (t) => {
  await using ops = await listening(opsServer(new Fake(), noBug))
  for (const path of OPEN) {
    for (const method of ['POST', 'PUT', 'DELETE', 'OPTIONS', 'PATCH']) {
      const answer = await fetch(`${ops.url}${path}`, { method })
      t.equal(answer.status, 405)
      t.equal(answer.headers.get('allow'), 'GET, HEAD')
    }
    const got = await everything(ops.port, `HEAD ${path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n`)
    t.match(got, /^HTTP\/1.1 200 OK\r\n/)
    t.ok(got.endsWith('\r\n\r\n'), 'no body')
  }
})

void t.test('O10 a path that fails is answered 500, and the listener keeps working', async (t) => {
  const health = new Fake()
  Object.assign(health, { store: () => Promise.reject(new Error('a bug')) })
  await using ops = await listening(opsServer(health, noBug))
  t.equal((await fetch(`${ops.url}/readyz`)).status, 500)
  t.equal((await fetch(`${ops.url}/livez`)).status, 200)
})

t.test('S10 none of these paths exists on the traffic port, where the upstream answers them', async (t) => {
  await using upstream = await upstreamStub((seen, response) => void response.writeHead(418).end(seen.target))
  const dir = mkdtempSync(join(tmpdir(), 'admin-'))
  writeFileSync(join(dir, 'token'), 'right\n')
  await using proxy = await proxyBefore(upstream, { more: 'ops: { listen: "127.0.0.1:0" }' })
  for (const path of [...OPEN, '/v1/records', '/v1/config', '/v1/drain']) {
    const answer = await fetch(proxy.url + path)
    t.equal(answer.status, 418)
    t.equal(await answer.text(), path)
  }
  t.equal(upstream.seen.length, OPEN.length + 3)
  const listening = await proxy.logged((line) => line['msg'] === 'listening')
  t.match(listening, { service: 'default' })
  t.match(await (await fetch(`${String(listening['ops'])}/metrics`)).text(), /^idempotency_/m)
  t.equal((await fetch(`${String(listening['ops'])}/v1/records`)).status, 404)
  rmSync(dir, { recursive: true })
})
