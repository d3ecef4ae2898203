import { type ChildProcess, spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import t, { type Test } from 'tap'
import { newKey, type Reply, send, until } from '../support/e2e.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { type ChildProxy, proxyProcess } from '../support/proxy.ts'
import { freePort } from '../support/redis.ts'

t.setTimeout(300_000)

const EXAMPLE = 'examples/shared-database'
/** Debian's packages are for its own Python. */
const PYTHON = ['python3', '/usr/bin/python3'].find(
  (python) => spawnSync(python, ['-c', 'import psycopg2'], { stdio: 'ignore' }).status === 0,
)
const LANGUAGES: Record<string, { readonly run: readonly string[]; readonly skip: string | false }> = {
  typescript: { run: [process.execPath, `${EXAMPLE}/server.ts`], skip: false },
  python: {
    run: [PYTHON ?? '', `${EXAMPLE}/server.py`],
    skip: PYTHON === undefined && 'there is no psycopg2 here: install the package python3-psycopg2',
  },
}

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

interface Api {
  readonly child: ChildProcess
  readonly url: string
  readonly said: string[]
}

async function tests(): Promise<void> {
  const server = await PostgresServer.start('fsync=off')
  t.teardown(() => server[Symbol.asyncDispose]())
  const database = (user: string) => `postgres://${user}@127.0.0.1:${server.port}/charges`
  const charges = async (key: string) =>
    Number(
      (await server.sql(`SELECT count(*) FROM charges WHERE amount = ${amountOf(key)}`, 'charges'))[0]?.[0],
    )

  const startProxy = async (t: Test, upstream: string): Promise<ChildProxy> => {
    const proxy = await proxyProcess(`${EXAMPLE}/proxy.yaml`, [], {
      PROXY_LISTEN: '127.0.0.1:0',
      PROXY_ADMIN_LISTEN: '127.0.0.1:0',
      PROXY_UPSTREAM: upstream,
      PROXY_STORE: database('proxy'),
      LEASE: '1s',
      RECONCILE_AFTER: '1ms',
      RECONCILE_EVERY: '100ms',
    })
    t.teardown(() => proxy[Symbol.asyncDispose]())
    return proxy
  }
  const startApi = async (t: Test, language: string, port: number): Promise<Api> => {
    const [command = '', ...args] = LANGUAGES[language]?.run ?? []
    const env = {
      ...process.env,
      NODE_V8_COVERAGE: '',
      PORT: String(port),
      DATABASE_URL: database('charges_api'),
    }
    const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'inherit'], env })
    t.teardown(() => child.kill('SIGKILL'))
    const said: string[] = []
    createInterface({ input: child.stdout }).on('line', (line) => void said.push(line))
    await until(() => said.length > 0)
    return { child, url: String(said[0]).replace(/^.* on /, ''), said }
  }
  const charge = (proxy: ChildProxy, key: string, demo?: string): Promise<Reply> =>
    send(proxy, key, {
      path: '/v1/charges',
      body: JSON.stringify({ amount: amountOf(key) }),
      headers: demo === undefined ? {} : { 'x-demo': demo },
    })
  /** Like a client that is told to retry. */
  const settled = async (proxy: ChildProxy, key: string): Promise<Reply> => {
    let last: Reply | null = null
    await until(async () => {
      last = await charge(proxy, key).catch(() => null)
      return last !== null && last.code === null && last.status !== 503
    })
    return last as unknown as Reply
  }
  const one = async (t: Test, proxy: ChildProxy, key: string, reply: Reply, says: string): Promise<void> => {
    t.match(reply, { status: 201, body: new RegExp(`"id": ?"ch_[^"]+", ?"amount": ?${amountOf(key)}`) }, says)
    const again = await charge(proxy, key)
    t.same([again.status, again.body, again.replayed], [201, reply.body, true])
    t.equal(await charges(key), 1, `${says}: charges`)
  }

  await server.sql('CREATE ROLE proxy LOGIN')
  await server.sql('CREATE DATABASE charges OWNER proxy')
  const first = await startProxy(t, 'http://127.0.0.1:1')
  await server.sql(readFileSync(`${EXAMPLE}/schema.sql`, 'utf8'), 'charges')
  await first.drain()

  for (const [language, { skip }] of Object.entries(LANGUAGES)) {
    void t.test(`W07 ${language}: the API is killed at every step: one charge`, { skip }, async (t) => {
      const port = await freePort()
      let api = await startApi(t, language, port)
      const proxy = await startProxy(t, api.url)
      const known = newKey()
      await one(t, proxy, known, await charge(proxy, known), 'nobody is killed')
      for (const step of ['received', 'charged', 'ended', 'committed']) {
        const key = newKey()
        const ended = once(api.child, 'exit')
        const reply = await charge(proxy, key, `SIGKILL at ${step}`)
        t.same((await ended)[1], 'SIGKILL', step)
        if (step === 'committed') await one(t, proxy, key, reply, `killed at ${step}`)
        else t.match(reply, { status: 502, code: 'upstream_failed' }, step)
        api = await startApi(t, language, port)
        await one(t, proxy, key, await settled(proxy, key), `killed at ${step}`)
      }
    })

    void t.test(`W07 ${language}: the proxy is killed at every step: one charge`, { skip }, async (t) => {
      const api = await startApi(t, language, await freePort())
      for (const step of ['received', 'charged', 'ended', 'committed']) {
        const doomed = await startProxy(t, api.url)
        // Another API on the same database, behind the proxy that takes over.
        const other = await startApi(t, 'typescript', await freePort())
        const proxy = await startProxy(t, other.url)
        const key = newKey()
        api.said.length = 0
        const lost = charge(doomed, key, `SIGSTOP at ${step}`).catch(() => null)
        await until(() => isStopped(api.child))
        doomed.kill('SIGKILL')
        t.equal(await lost, null)
        // Before the attempt has ended its record a retry overtakes it; after that, a retry waits for the commit.
        const isFree = step === 'received' || step === 'charged'
        if (isFree) await one(t, proxy, key, await settled(proxy, key), `killed at ${step}`)
        api.child.kill('SIGCONT')
        await one(t, proxy, key, await settled(proxy, key), `killed at ${step}, and the API resumes`)
        if (isFree) await until(() => api.said.some((line) => line.includes('may no longer end the record')))
        t.equal(await charges(key), 1, `${step}: the overtaken attempt has charged nothing`)
        other.child.kill()
        await proxy.drain()
      }
    })
  }
}

/** A different amount for each key, by which its charges are found. */
function amountOf(key: string): number {
  return Number.parseInt(key.slice(0, 7), 16)
}

function isStopped({ pid }: ChildProcess): boolean {
  return /^State:\s+T/m.test(readFileSync(`/proc/${pid}/status`, 'utf8'))
}
