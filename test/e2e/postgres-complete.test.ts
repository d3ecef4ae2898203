import type { ServerResponse } from 'node:http'
import pg from 'pg'
import t, { type Test } from 'tap'
import { gate, newKey, type Reply, send, until } from '../support/e2e.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import type { TestProxy } from '../support/proxy.ts'
import { essenceOf, processes, replicas } from '../support/replicas.ts'
import { type Seen, type UpstreamStub, upstreamStub, valueOf } from '../support/upstream.ts'

t.setTimeout(600_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

/** One attempt, whose own open transaction has charged and called `idempotency.complete`. */
interface Attempt {
  readonly key: string
  readonly client: pg.Client
  readonly response: ServerResponse
}

interface Bank extends UpstreamStub {
  /** What an attempt does after that. */
  next: (attempt: Attempt) => Promise<void>
}

const RECORDED = { status: 201, body: '{"charge":"recorded"}', header: 'from the record' }

async function tests(): Promise<void> {
  const server = await PostgresServer.start()
  t.teardown(() => server[Symbol.asyncDispose]())
  const charged = async (key: string) =>
    Number((await server.sql(`SELECT count(*) FROM charges WHERE key = '${key}'`))[0]?.[0])
  await server.sql('CREATE TABLE charges (key text NOT NULL)')

  const bank = async (t: Test): Promise<Bank> => {
    const self: Pick<Bank, 'next'> = { next: async () => {} }
    const stub = await upstreamStub(async (seen, response) => {
      const client = await server.client()
      const key = valueOf(seen, 'idempotency-key')
      try {
        await client.query('BEGIN')
        await client.query('INSERT INTO charges VALUES ($1)', [key])
        await client.query('SELECT idempotency.complete($1, $2, $3, $4, $5)', [
          valueOf(seen, 'idempotency-record'),
          valueOf(seen, 'idempotency-fence'),
          RECORDED.status,
          JSON.stringify([
            ['Content-Type', 'application/json'],
            ['X-From', RECORDED.header],
          ]),
          Buffer.from(RECORDED.body),
        ])
        await self.next({ key, client, response })
      } finally {
        await client.end()
      }
    })
    t.teardown(() => stub[Symbol.asyncDispose]())
    return Object.assign(self, stub)
  }

  const yamlOf = (upstream: string, more = '') => `
service: pay
upstream: { url: "${upstream}", timeout: 5s }
store: { url: "postgres://owner@127.0.0.1:${server.port}/records", timeout: 2s }
routes:
  - { name: pay, match: { path: /pay }, key: { presence: required, forwardFence: true }, lease: 30s${more} }
`
  const isRecorded = (t: Test, reply: Reply, replayed: boolean): void => {
    t.match(reply, { status: RECORDED.status, body: RECORDED.body, replayed })
    t.equal(reply.headers.get('x-from'), RECORDED.header)
  }
  /** One charge, and the same response from every replica. */
  const stands = async (t: Test, proxies: readonly TestProxy[], key: string, first: Reply): Promise<void> => {
    for (const proxy of proxies) {
      const again = await send(proxy, key)
      isRecorded(t, again, true)
      t.same(essenceOf(again), essenceOf(first), 'byte for byte')
    }
    t.equal(await charged(key), 1, 'charges')
  }

  const ends: Record<string, (response: ServerResponse) => void> = {
    'answers something else': (response) => void response.writeHead(200, { 'X-From': 'live' }).end('live'),
    'answers 500': (response) => void response.writeHead(500).end(),
    'answers 502': (response) => void response.writeHead(502).end(),
    'answers 503 with Retry-After': (response) => void response.writeHead(503, { 'Retry-After': '1' }).end(),
    'says that nothing was done': (response) =>
      void response.writeHead(409, { 'Idempotency-Outcome': 'not-applied' }).end(),
    'drops the connection': (response) => void response.destroy(),
    'cuts its response short': (response) => {
      response.writeHead(201, { 'Content-Length': '9' }).write('half')
      setImmediate(() => response.destroy())
    },
    'never answers': () => {},
  }
  for (const [name, end] of Object.entries(ends))
    void t.test(`an upstream commits, then ${name}: everybody gets the recorded response`, async (t) => {
      const upstream = await bank(t)
      const timeout = name === 'never answers' ? '1s' : '30s'
      const yaml = yamlOf(upstream.url).replace('timeout: 5s', `timeout: ${timeout}`)
      const proxies = await replicas(t, 2, yaml)
      upstream.next = async ({ client, response }) => {
        await client.query('COMMIT')
        end(response)
      }
      const key = newKey()
      const first = await send(proxies[0] as TestProxy, key)
      isRecorded(t, first, false)
      await stands(t, proxies, key, first)
      t.equal(upstream.seen.length, 1)
    })

  void t.test('W07 after a commit, waiting duplicates get the recorded response', async (t) => {
    const upstream = await bank(t)
    const proxies = await replicas(t, 2, yamlOf(upstream.url, ', inFlight: { mode: wait, wait: 30s }'))
    const { opened, open } = gate()
    upstream.next = async ({ client, response }) => {
      await opened
      await client.query('COMMIT')
      response.writeHead(500).end()
    }
    const key = newKey()
    const asked = Array.from({ length: 10 }, (_, n) => send(proxies[n % 2] as TestProxy, key))
    await upstream.arrived(1)
    await until(async () => {
      const held = await Promise.all(proxies.map((proxy) => proxy.metric('idempotency_waiters')))
      return (held[0] ?? 0) + (held[1] ?? 0) === 9
    })
    open()
    const replies = await Promise.all(asked)
    t.equal(new Set(replies.map((reply) => JSON.stringify(essenceOf(reply)))).size, 1)
    await stands(t, proxies, key, replies[0] as Reply)
    t.equal(upstream.seen.length, 1)
  })

  void t.test(
    'W07 when the proxy is killed after a commit, a retry elsewhere gets the recorded response',
    async (t) => {
      const upstream = await bank(t)
      const [doomed, other] = await processes(t, 2, yamlOf(upstream.url))
      if (doomed === undefined || other === undefined) throw new Error('no proxies')
      const { opened, open } = gate()
      upstream.next = async ({ client }) => {
        await client.query('COMMIT')
        open()
      }
      const key = newKey()
      const lost = send(doomed, key).catch(() => null)
      await opened
      doomed.kill('SIGKILL')
      t.equal(await lost, null)
      const first = await send(other, key)
      isRecorded(t, first, true)
      await stands(t, [other], key, first)
      t.equal(upstream.seen.length, 1)
    },
  )

  void t.test('W07 an upstream rolls back, then answers 409: that stays, nothing is charged', async (t) => {
    const upstream = await bank(t)
    const proxies = await replicas(t, 2, yamlOf(upstream.url))
    upstream.next = async ({ client, response }) => {
      await client.query('ROLLBACK')
      response.writeHead(409).end('no')
    }
    const key = newKey()
    for (const proxy of proxies) t.match(await send(proxy, key), { status: 409, body: 'no' })
    t.same([await charged(key), upstream.seen.length], [0, 1])
  })

  const deaths: Record<string, (attempt: Attempt) => Promise<void>> = {
    'loses its database connection': async ({ client }) => {
      const { rows } = await client.query('SELECT pg_backend_pid() AS pid')
      await server.sql(`SELECT pg_terminate_backend(${rows[0].pid})`)
    },
    'rolls back': async ({ client }) => void (await client.query('ROLLBACK')),
  }
  for (const [name, die] of Object.entries(deaths))
    void t.test(
      `an upstream ${name} and drops the request: unknown, nothing charged, nothing executed again`,
      async (t) => {
        const upstream = await bank(t)
        const proxies = await replicas(t, 2, yamlOf(upstream.url))
        upstream.next = async (attempt) => {
          await die(attempt)
          attempt.response.destroy()
        }
        const key = newKey()
        t.match(await send(proxies[0] as TestProxy, key), { status: 502, code: 'upstream_failed' })
        for (const proxy of proxies)
          t.match(await send(proxy, key), { status: 409, code: 'idempotency_outcome_unknown' })
        t.same([await charged(key), upstream.seen.length], [0, 1])
      },
    )

  void t.test(
    'an upstream answers before it commits: after the commit, retries get the recorded response',
    async (t) => {
      const upstream = await bank(t)
      const proxies = await replicas(t, 2, yamlOf(upstream.url))
      const { opened, open } = gate()
      upstream.next = async ({ client, response }) => {
        response.writeHead(200).end('too soon')
        await opened
        await client.query('COMMIT')
      }
      const key = newKey()
      const [here, there] = proxies as [TestProxy, TestProxy]
      t.match(await send(here, key), { status: 200, body: 'too soon' })
      t.match(
        await send(here, key),
        { status: 200, body: 'too soon', replayed: true },
        'the outcome is held here',
      )
      t.match(await send(there, key), { status: 409, code: 'idempotency_key_in_progress' })
      t.equal(await here.metric('idempotency_store_up{store="postgres"}'), 1, 'a locked record is no outage')
      open()
      await until(async () => (await send(there, key)).status === RECORDED.status)
      await until(async () => (await send(here, key)).body === RECORDED.body)
      await stands(t, proxies, key, await send(there, key))
      t.equal(upstream.seen.length, 1)
    },
  )

  void t.test('an upstream answers before it rolls back: retries still get that response', async (t) => {
    const upstream = await bank(t)
    const proxies = await replicas(t, 2, yamlOf(upstream.url))
    const { opened, open } = gate()
    upstream.next = async ({ client, response }) => {
      response.writeHead(200).end('too soon')
      await opened
      await client.query('ROLLBACK')
    }
    const key = newKey()
    const [here, there] = proxies as [TestProxy, TestProxy]
    t.match(await send(here, key), { status: 200, body: 'too soon' })
    open()
    await until(async () => (await send(there, key)).status === 200)
    t.match(await send(there, key), { body: 'too soon', replayed: true })
    t.same([await charged(key), upstream.seen.length], [0, 1])
  })

  void t.test('W07 a stale attempt raises, and its charge is rolled back', async (t) => {
    const upstream = await bank(t)
    const [proxy] = (await replicas(t, 1, yamlOf(upstream.url))) as [TestProxy]
    const key = newKey()
    const codes: string[] = []
    // The attempt gives up, the client retries, and only then the attempt goes on.
    upstream.next = async ({ client, response }) => {
      await client.query('ROLLBACK')
      response.writeHead(503, { 'Retry-After': '1' }).end()
    }
    t.match(await send(proxy, key), { status: 503 })
    const [first] = upstream.seen
    upstream.next = async ({ client, response }) => {
      await client.query('COMMIT')
      response.writeHead(201).end()
    }
    const second = await send(proxy, key)
    isRecorded(t, second, false)
    const late = await server.client()
    await late.query('BEGIN')
    await late.query('INSERT INTO charges VALUES ($1)', [key])
    const args = [valueOf(first as Seen, 'idempotency-record'), valueOf(first as Seen, 'idempotency-fence')]
    await late.query('SELECT idempotency.complete($1, $2, 201)', args).catch(({ code }) => codes.push(code))
    t.equal((await late.query('COMMIT')).command, 'ROLLBACK')
    await late.end()
    t.same(codes, ['IP002'])
    await stands(t, [proxy], key, second)
  })

  void t.test('keep: outcome passes the response on and stores none of it', async (t) => {
    const upstream = await bank(t)
    const [proxy] = (await replicas(t, 1, yamlOf(upstream.url, ', keep: outcome'))) as [TestProxy]
    upstream.next = async ({ client, response }) => {
      await client.query('COMMIT')
      response.writeHead(201).end('secret')
    }
    const key = newKey()
    t.match(await send(proxy, key), { status: 201, body: 'secret' })
    t.match(await send(proxy, key), { status: 409, code: 'idempotency_response_unavailable' })
    upstream.next = async ({ client, response }) => {
      await client.query('COMMIT')
      response.destroy()
    }
    t.match(await send(proxy, newKey()), { status: 409, code: 'idempotency_response_unavailable' })
    const rows = await server.sql(
      "SELECT FROM idempotency.records WHERE position(convert_to('charge\"', 'UTF8') IN payload) > 0 AND id IN (SELECT id FROM idempotency.records ORDER BY created_at DESC LIMIT 2)",
    )
    t.same(rows, [])
  })
}
