import { execFileSync } from 'node:child_process'
import { once } from 'node:events'
import { mkdirSync, readdirSync, writeFileSync } from 'node:fs'
import { connect as connectHttp2 } from 'node:http2'
import { Agent, request } from 'node:https'
import { connect } from 'node:net'
import { join } from 'node:path'
import type { TLSSocket } from 'node:tls'
import t, { type Test } from 'tap'
import { adminYaml, ask } from '../support/admin.ts'
import { certificate } from '../support/certificates.ts'
import { configFile, newKey, send, tempDir, until } from '../support/e2e.ts'
import { Mount } from '../support/mount.ts'
import { proxyProcess } from '../support/proxy.ts'
import { countingUpstream, emptyServer, heldUpstream } from '../support/replicas.ts'
import { fleet, gone, kill, NO_PROC, workersOf } from '../support/workers.ts'

t.setTimeout(900_000)

async function yamlOf(upstream: { readonly url: string }, more = '', store = ''): Promise<string> {
  const redis = await emptyServer('redis')
  return `workers: 2\nupstream: { url: "${upstream.url}" }\nstore: { url: "${redis.url}"${store} }\n${more}`
}

/** Sends as many requests at once, each on a connection of its own, and so to both workers. */
function atOnce(proxy: { readonly url: string }, count: number) {
  return Promise.all(
    Array.from({ length: count }, () => send(proxy, newKey(), { headers: { connection: 'close' } })),
  )
}

const LIVE = 'status: { path: /state }\n'
const routeOf = (header: string) =>
  `${LIVE}routes:\n  - { name: pay, match: { methods: [POST], path: /pay }, ${header} }\n`

void t.test(
  'a reload changes all workers or none, and one that is replaced follows',
  { skip: NO_PROC },
  async (t) => {
    const upstream = await countingUpstream(t)
    const yaml = (more: string) => yamlOf(upstream, routeOf(more))
    const proxy = await fleet(t, await yaml('statusHeader: false'))
    const told = async (): Promise<(string | null)[]> =>
      (await atOnce(proxy, 8)).map(({ headers }) => headers.get('idempotency-status'))
    const reloaded = (value: number) =>
      until(async () => (await proxy.metric('idempotency_config_last_reload_successful')) === value)

    await proxy.reload(await yaml('statusHeader: true'))
    await proxy.logged(({ msg }) => msg === 'the configuration was reloaded')
    t.strictSame(await told(), Array(8).fill('executed'))

    await proxy.reload(await yaml('statusHeader: nonsense'))
    await reloaded(0)
    t.strictSame(await told(), Array(8).fill('executed'), 'a broken file changes no worker')

    const [victim = 0] = workersOf(proxy)
    kill(victim, 'SIGKILL')
    await until(
      async () => !workersOf(proxy).includes(victim) && (await proxy.metric('idempotency_workers')) === 2,
    )
    t.strictSame(
      await told(),
      Array(8).fill('executed'),
      'a new worker has what is in force, not what the file says',
    )

    await proxy.reload(await yaml('statusHeader: false'))
    await reloaded(1)
    t.strictSame(await told(), Array(8).fill(null))
  },
)

void t.test(
  'a worker that does not answer keeps a configuration out of all',
  { skip: NO_PROC },
  async (t) => {
    const upstream = await countingUpstream(t)
    const proxy = await fleet(t, await yamlOf(upstream, routeOf('statusHeader: false')))
    const [stopped = 0] = workersOf(proxy)
    kill(stopped, 'SIGSTOP')
    let answered = 0
    const asked = Array.from({ length: 6 }, async () => {
      const [reply] = await atOnce(proxy, 1)
      answered++
      return reply?.status
    })
    await until(() => answered === 5)
    t.pass('it is given one connection, and the others go on')
    await proxy.reload(await yamlOf(upstream, routeOf('statusHeader: true')))
    await proxy.logged(({ msg }) => String(msg).startsWith('a worker cannot use the configuration'))
    const [other] = await atOnce(proxy, 1)
    t.equal(other?.headers.get('idempotency-status'), null, 'the other one has not changed')
    kill(stopped, 'SIGCONT')
    t.strictSame(await Promise.all(asked), Array(6).fill(201))
    proxy.kill('SIGHUP')
    await until(async () => (await proxy.metric('idempotency_config_last_reload_successful')) === 1)
    const all = await atOnce(proxy, 6)
    t.strictSame(
      all.map(({ headers }) => headers.get('idempotency-status')),
      Array(6).fill('executed'),
    )
  },
)

void t.test('a connection on its way to a worker that is killed is closed', { skip: NO_PROC }, async (t) => {
  const upstream = await countingUpstream(t)
  const proxy = await fleet(t, await yamlOf(upstream))
  const [stopped = 0] = workersOf(proxy)
  kill(stopped, 'SIGSTOP')
  let answered = 0
  const asked = Array.from({ length: 6 }, async () => {
    const end = await oneRequest(proxy.port)
    if (end === 'answered') answered++
    return end
  })
  await until(() => answered === 5)
  kill(stopped, 'SIGKILL')
  t.strictSame((await Promise.all(asked)).filter((end) => end !== 'answered').length, 1)
})

void t.test(
  'a worker without file descriptors is given connections again once it has some',
  { skip: NO_PROC },
  async (t) => {
    const upstream = await countingUpstream(t)
    const proxy = await fleet(t, await yamlOf(upstream))
    const workers = workersOf(proxy)
    const limit = (files: string): void => {
      for (const pid of workers) execFileSync('prlimit', ['--pid', String(pid), `--nofile=${files}:`])
    }
    limit('3')
    const ends = await Promise.all([1, 2, 3, 4].map(() => oneRequest(proxy.port)))
    t.notOk(ends.includes('answered'))
    limit('1000')
    t.equal(await oneRequest(proxy.port), 'answered')
    t.strictSame(workersOf(proxy), workers)
  },
)

void t.test(
  'workers whose first process is killed finish what they have, and end',
  { skip: NO_PROC },
  async (t) => {
    const upstream = await heldUpstream(t)
    const proxy = await fleet(t, await yamlOf(upstream))
    const workers = workersOf(proxy)
    const running = [send(proxy, newKey()), send(proxy, newKey())]
    await upstream.arrived(2)
    proxy.kill('SIGKILL')
    await proxy.exited
    upstream.finish(1)
    upstream.finish(2)
    t.strictSame(
      (await Promise.all(running)).map(({ status }) => status),
      [201, 201],
    )
    await gone(workers)
    await t.rejects(send(proxy, newKey()), 'nobody listens')
  },
)

void t.test('no connection is lost while a fleet stops', { skip: NO_PROC }, async (t) => {
  const upstream = await countingUpstream(t)
  const proxy = await fleet(t, await yamlOf(upstream, 'drain: { delay: 300ms }\n'))
  const lost: string[] = []
  const client = async (): Promise<void> => {
    for (;;) {
      const end = await oneRequest(proxy.port)
      if (end === 'refused') return
      if (end !== 'answered') lost.push(end)
    }
  }
  const clients = Array.from({ length: 8 }, client)
  await upstream.arrived(50)
  proxy.kill('SIGTERM')
  t.equal(await proxy.exited, 0)
  await Promise.all(clients)
  t.strictSame(lost, [])
})

/** One request on a new connection: `answered`, `refused` before it was accepted, or what broke it. */
function oneRequest(port: number): Promise<string> {
  return new Promise((resolve) => {
    let got = ''
    let isOpen = false
    const socket = connect(port, '127.0.0.1')
    socket.on('connect', () => {
      isOpen = true
      socket.write(
        `POST /pay HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: b\r\nIdempotency-Key: ${newKey()}\r\nContent-Length: 2\r\n\r\n{}`,
      )
    })
    socket.on('data', (bytes) => (got += bytes.toString('latin1')))
    socket.on('error', (error: NodeJS.ErrnoException) => resolve(isOpen ? String(error.code) : 'refused'))
    socket.on('close', () =>
      resolve(got.startsWith('HTTP/1.1 201') ? 'answered' : `closed after ${got.slice(0, 40)}`),
    )
  })
}

void t.test('a proxy whose workers cannot start does not start', { skip: NO_PROC }, async (t) => {
  const upstream = await countingUpstream(t)
  const spool = join(tempDir(t), 'spool')
  mkdirSync(spool)
  for (const name of ['worker-1', 'worker-2']) writeFileSync(join(spool, name), 'not a folder')
  const file = configFile(tempDir(t), await yamlOf(upstream, '', `, spool: "${spool}"`))
  await t.rejects(proxyProcess(file), {
    message: /the proxy ended with 1: .*cannot start: store\.spool: .*worker-1/s,
  })
})

void t.test(
  'a worker that is killed again and again is replaced again and again',
  { skip: NO_PROC },
  async (t) => {
    const upstream = await countingUpstream(t)
    const proxy = await fleet(t, await yamlOf(upstream))
    for (let n = 1; n <= 4; n++) {
      const [victim = 0] = workersOf(proxy)
      kill(victim, 'SIGKILL')
      await until(async () => (await proxy.metric('idempotency_workers_ended_total')) === n)
      t.equal((await send(proxy, newKey())).status, 201, 'the other one serves')
      await until(async () => (await proxy.metric('idempotency_workers')) === 2)
    }
  },
)

void t.test(
  'outcomes in the spool of a killed worker are written by others, with fewer workers or none',
  { skip: NO_PROC },
  async (t) => {
    for (const after of ['workers: 2', 'workers: 1']) {
      const upstream = await heldUpstream(t)
      const redis = await emptyServer('redis')
      const spool = join(tempDir(t), 'spool')
      const yaml = (workers: string) =>
        `${workers}\nupstream: { url: "${upstream.url}" }\nstore: { url: "${redis.url}", spool: "${spool}" }\n${adminYaml(t)}`
      const proxy = await fleet(t, yaml('workers: 3'))
      const keys = [newKey(), newKey(), newKey()]
      const running = keys.map((key) => send(proxy, key))
      await upstream.arrived(3)
      redis.pause()
      for (const n of [1, 2, 3]) upstream.finish(n)
      t.strictSame(
        (await Promise.all(running)).map(({ status }) => status),
        [201, 201, 201],
      )
      const workers = workersOf(proxy)
      proxy.kill('SIGKILL')
      for (const pid of workers) kill(pid, 'SIGKILL')
      await gone(workers)
      redis.resume()
      t.ok(readdirSync(spool).includes('worker-3'), 'each worker has a folder')
      const next = await fleet(t, yaml(after))
      for (const key of keys) await until(async () => (await send(next, key)).replayed)
      t.equal(upstream.seen.length, 3)
      await until(async () => (await next.metric('idempotency_spooled')) === 0)
    }
  },
)

void t.test(
  'an operator’s decision waits for a worker that may hold the outcome',
  { skip: NO_PROC },
  async (t) => {
    const upstream = await heldUpstream(t)
    const proxy = await fleet(t, await yamlOf(upstream, `defaults: { lease: 1s }\n${adminYaml(t)}`))
    const running = send(proxy, newKey()).catch(() => null)
    await upstream.arrived(1)
    for (const pid of workersOf(proxy)) kill(pid, 'SIGSTOP')
    const found = async () => (await ask(proxy, '/v1/records?state=unknown')).json['records'] as RecordIn[]
    await until(async () => (await found()).length === 1)
    const [record] = (await found()) as [RecordIn]
    const decide = () =>
      ask(proxy, `/v1/records/${record.id}/resolve`, {
        method: 'POST',
        headers: { 'if-match': `"${record.version}"` },
        body: { outcome: 'retryable', by: 'me', reason: 'test' },
      })
    t.match(await decide(), { status: 409, code: 'still_running' })
    for (const pid of workersOf(proxy)) kill(pid, 'SIGCONT')
    upstream.finish(1)
    await running
    t.match(await decide(), { status: 412 }, 'the outcome has come')
  },
)

void t.test(
  'a worker that is replaced after a reload may still execute, and is killed if it does not end',
  { skip: NO_PROC },
  async (t) => {
    const upstream = await heldUpstream(t)
    const yaml = await yamlOf(upstream, `defaults: { lease: 1s }\ndrain: { timeout: 20s }\n${adminYaml(t)}`)
    const proxy = await fleet(t, yaml)
    const running = [1, 2].map(() => send(proxy, newKey()).catch(() => null))
    await upstream.arrived(2)
    const [one = 0, other = 0] = workersOf(proxy)
    kill(other, 'SIGSTOP')
    await proxy.reload(yaml.replace('lease: 1s', 'lease: 2s'))
    // Answers once the stopped worker has not: until then it keeps the reload from being used.
    await proxy.metric('idempotency_workers')
    kill(one, 'SIGSTOP')
    kill(other, 'SIGCONT')
    await proxy.logged(({ msg }) => String(msg).startsWith('a worker cannot use the configuration in force'))
    const decide = async ({ id, version }: RecordIn) =>
      ask(proxy, `/v1/records/${id}/resolve`, {
        method: 'POST',
        headers: { 'if-match': `"${version}"` },
        body: { outcome: 'retryable', by: 'me', reason: 'test' },
      })
    let codes: (string | null)[] = []
    await until(async () => {
      const { records } = (await ask(proxy, '/v1/records?state=unknown')).json as { records: RecordIn[] }
      codes = (await Promise.all(records.map(decide))).map(({ code }) => code)
      return codes.length > 0 && !codes.includes('version_mismatch')
    })
    t.strictSame(
      codes.filter((code) => code !== 'still_running' && code !== 'outcome_held'),
      [],
    )
    await until(() => workersOf(proxy).length === 2 && !workersOf(proxy).includes(one))
    upstream.finish(1)
    upstream.finish(2)
    await Promise.all(running)
    await until(async () => (await proxy.metric('idempotency_workers')) === 2)
  },
)

interface RecordIn {
  readonly id: string
  readonly version: number
}

void t.test(
  'a drain that an operator announces reaches all workers, also those that come later',
  { skip: NO_PROC },
  async (t) => {
    const upstream = await countingUpstream(t)
    const proxy = await fleet(t, await yamlOf(upstream, adminYaml(t)))
    const closing = async (): Promise<(string | null)[]> =>
      (await Promise.all([1, 2, 3, 4].map(() => send(proxy, newKey())))).map(({ headers }) =>
        headers.get('connection'),
      )
    await ask(proxy, '/v1/drain', { method: 'POST', body: {} })
    await until(async () => (await closing()).every((one) => one === 'close'))
    t.equal((await fetch(`${proxy.adminUrl}/readyz`)).status, 503)
    const [victim = 0] = workersOf(proxy)
    kill(victim, 'SIGKILL')
    await until(
      async () => !workersOf(proxy).includes(victim) && (await proxy.metric('idempotency_workers')) === 2,
    )
    t.strictSame(await closing(), Array(4).fill('close'))
    await ask(proxy, '/v1/undrain', { method: 'POST', body: {} })
    await until(async () => (await closing()).every((one) => one === 'keep-alive'))
    t.equal((await fetch(`${proxy.adminUrl}/readyz`)).status, 200)
  },
)

void t.test('HTTP/2 with prior knowledge is served by workers', { skip: NO_PROC }, async (t: Test) => {
  const upstream = await countingUpstream(t)
  const proxy = await fleet(t, `listen: { address: "127.0.0.1:0", http2: true }\n${await yamlOf(upstream)}`)
  const statuses = await Promise.all(
    [1, 2, 3, 4].map(async () => {
      const session = connectHttp2(proxy.url)
      const stream = session.request({
        ':method': 'POST',
        ':path': '/pay',
        authorization: 'a',
        'idempotency-key': newKey(),
      })
      stream.end('{}')
      const status = await new Promise((resolve) =>
        stream.on('response', (headers) => resolve(headers[':status'])),
      )
      stream.resume()
      session.close()
      await once(session, 'close')
      return status
    }),
  )
  t.strictSame(statuses, [201, 201, 201, 201])
})

void t.test('workers serve TLS, and each follows its certificates', { skip: NO_PROC }, async (t) => {
  using one = certificate('IP:127.0.0.1')
  using other = certificate('IP:127.0.0.1')
  const textOf = (own: typeof one) => ({ cert: String(own.cert), key: String(own.key) })
  const mount = new Mount(t, textOf(one))
  const upstream = await countingUpstream(t)
  const tls = `listen: { address: "127.0.0.1:0", tls: { cert: ${mount.file('cert')}, key: ${mount.file('key')} } }`
  const proxy = await fleet(t, `${tls}\n${await yamlOf(upstream)}`)
  /** Of both workers, which get new connections in turn. */
  const shown = () => Promise.all([1, 2, 3, 4].map(() => handshake(proxy.port, [one.cert, other.cert])))
  const [before] = await shown()
  t.strictSame(await shown(), Array(4).fill(before))
  mount.swap(textOf(other))
  await until(async () => !(await shown()).includes(before as string))
})

/** The serial number of the certificate that answers a request on a new connection. */
async function handshake(port: number, ca: readonly Buffer[]): Promise<string> {
  const agent = new Agent({ ca: [...ca], maxCachedSessions: 0 })
  const headers = { 'idempotency-key': newKey(), authorization: 'Bearer a' }
  const asked = request(`https://127.0.0.1:${port}/pay`, { agent, method: 'POST', headers }).end('{}')
  const [response] = await once(asked, 'response')
  const { serialNumber } = (response.socket as TLSSocket).getPeerCertificate()
  await once(response.resume(), 'end')
  agent.destroy()
  if (response.statusCode !== 201) throw new Error(`answered ${response.statusCode}`)
  return serialNumber
}
