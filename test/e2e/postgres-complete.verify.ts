import type { ServerResponse } from 'node:http'
import type pg from 'pg'
import t, { type Test } from 'tap'
import { gate, newKey, type Reply, send, until } from '../support/e2e.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import type { TestProxy } from '../support/proxy.ts'
import { essenceOf, replicas } from '../support/replicas.ts'
import { upstreamStub, valueOf } from '../support/upstream.ts'

t.setTimeout(600_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

/** One attempt, whose own open transaction has charged and called `idempotency.complete`. */
interface Attempt {
  readonly client: pg.Client
  readonly response: ServerResponse
}

const RECORDED = { status: 201, body: '{"charge":"recorded"}', header: 'from the record' }

async function tests(): Promise<void> {
  const server = await PostgresServer.start('fsync=off')
  t.teardown(() => server[Symbol.asyncDispose]())
  await server.sql('CREATE TABLE charges (key text NOT NULL)')
  const charged = async (key: string) =>
    Number((await server.sql(`SELECT count(*) FROM charges WHERE key = '${key}'`))[0]?.[0])

  /** What an attempt does after that. */
  let next = async (_attempt: Attempt): Promise<void> => {}
  const upstream = await upstreamStub(async (seen, response) => {
    const client = await server.client()
    try {
      await client.query('BEGIN')
      await client.query('INSERT INTO charges VALUES ($1)', [valueOf(seen, 'idempotency-key')])
      const headers = [
        ['Content-Type', 'application/json'],
        ['X-From', RECORDED.header],
      ]
      await client.query('SELECT idempotency.complete($1, $2, $3, $4, $5)', [
        valueOf(seen, 'idempotency-record'),
        valueOf(seen, 'idempotency-fence'),
        RECORDED.status,
        JSON.stringify(headers),
        Buffer.from(RECORDED.body),
      ])
      await next({ client, response })
    } finally {
      await client.end()
    }
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  const pay = 'key: { presence: required, forwardFence: true }, lease: 5m'
  const proxies = await replicas(
    t,
    2,
    `
service: pay
upstream: { url: "${upstream.url}", timeout: 60s }
store: { url: "postgres://owner@127.0.0.1:${server.port}/records", timeout: 4s }
routes:
  - { name: wait, match: { path: /wait }, ${pay}, inFlight: { mode: wait, wait: 60s } }
  - { name: outcome, match: { path: /outcome }, ${pay}, keep: outcome }
  - { name: pay, match: { path: /pay }, ${pay} }
`,
  )
  const [here, there] = proxies as [TestProxy, TestProxy]

  const commit =
    (end: (response: ServerResponse) => void) =>
    async ({ client, response }: Attempt): Promise<void> => {
      await client.query('COMMIT')
      end(response)
    }
  const isRecorded = (t: Test, reply: Reply, replayed: boolean): void => {
    t.match(reply, { status: RECORDED.status, body: RECORDED.body, replayed })
    t.equal(reply.headers.get('x-from'), RECORDED.header)
  }
  /** One charge, and the same response from every replica. */
  const stands = async (t: Test, key: string, first: Reply): Promise<void> => {
    for (const proxy of proxies) {
      const again = await send(proxy, key)
      isRecorded(t, again, true)
      t.same(essenceOf(again), essenceOf(first), 'byte for byte')
    }
    t.equal(await charged(key), 1, 'charges')
  }
  const executions = (key: string) =>
    upstream.seen.filter((seen) => valueOf(seen, 'idempotency-key') === key).length

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
  }
  for (const [name, end] of Object.entries(ends))
    void t.test(`an upstream commits, then ${name}: everybody gets the recorded response`, async (t) => {
      next = commit(end)
      const key = newKey()
      const first = await send(here, key)
      isRecorded(t, first, false)
      await stands(t, key, first)
      t.equal(executions(key), 1)
    })

  void t.test('W07 after a commit, waiting duplicates get the recorded response', async (t) => {
    const { opened, open } = gate()
    next = async ({ client, response }) => {
      await opened
      await client.query('COMMIT')
      response.writeHead(500).end()
    }
    const key = newKey()
    const before = upstream.seen.length
    const asked = Array.from({ length: 10 }, (_, n) =>
      send(proxies[n % 2] as TestProxy, key, { path: '/wait' }),
    )
    await upstream.arrived(before + 1)
    await until(async () => {
      const held = await Promise.all(proxies.map((proxy) => proxy.metric('idempotency_waiters')))
      return (held[0] ?? 0) + (held[1] ?? 0) === 9
    })
    open()
    const replies = await Promise.all(asked)
    t.equal(new Set(replies.map((reply) => JSON.stringify(essenceOf(reply)))).size, 1)
    t.match(replies[0], { status: RECORDED.status, body: RECORDED.body })
    t.same([await charged(key), executions(key)], [1, 1])
  })

  void t.test('W07 an upstream rolls back, then answers 409: that stays, nothing is charged', async (t) => {
    next = async ({ client, response }) => {
      await client.query('ROLLBACK')
      response.writeHead(409).end('no')
    }
    const key = newKey()
    for (const proxy of proxies) t.match(await send(proxy, key), { status: 409, body: 'no' })
    t.same([await charged(key), executions(key)], [0, 1])
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
        next = async (attempt) => {
          await die(attempt)
          attempt.response.destroy()
        }
        const key = newKey()
        t.match(await send(here, key), { status: 502, code: 'upstream_failed' })
        for (const proxy of proxies)
          t.match(await send(proxy, key), { status: 409, code: 'idempotency_outcome_unknown' })
        t.same([await charged(key), executions(key)], [0, 1])
      },
    )

  for (const end of ['COMMIT', 'ROLLBACK'])
    void t.test(`an upstream answers before its ${end}`, async (t) => {
      const { opened, open } = gate()
      next = async ({ client, response }) => {
        response.writeHead(200).end('too soon')
        await opened
        await client.query(end)
      }
      const key = newKey()
      t.match(await send(here, key), { status: 200, body: 'too soon' })
      const again = { status: 200, body: 'too soon', replayed: true }
      t.match(await send(here, key), again, 'the outcome is held here')
      t.match(await send(there, key), { status: 409, code: 'idempotency_key_in_progress' })
      t.equal(await here.metric('idempotency_store_up{store="postgres"}'), 1, 'a locked record is no outage')
      open()
      await until(async () => (await send(there, key)).status !== 409)
      if (end === 'COMMIT') {
        await until(async () => (await send(here, key)).body === RECORDED.body)
        await stands(t, key, await send(there, key))
      } else {
        t.match(await send(there, key), again)
        t.equal(await charged(key), 0)
      }
      t.equal(executions(key), 1)
    })

  void t.test('keep: outcome passes the response on and stores none of it', async (t) => {
    const key = newKey()
    const path = '/outcome'
    next = commit((response) => void response.writeHead(201).end('secret'))
    t.match(await send(here, key, { path }), { status: 201, body: 'secret' })
    const unavailable = { status: 409, code: 'idempotency_response_unavailable' }
    t.match(await send(here, key, { path }), unavailable)
    next = commit((response) => void response.destroy())
    t.match(await send(here, newKey(), { path }), unavailable)
    const rows = await server.sql(
      "SELECT FROM idempotency.records WHERE position(convert_to('charge\"', 'UTF8') IN payload) > 0 AND id IN (SELECT id FROM idempotency.records ORDER BY created_at DESC LIMIT 2)",
    )
    t.same(rows, [])
  })
}
