import { randomBytes } from 'node:crypto'
import { readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { Redis } from 'ioredis'
import t, { type Test } from 'tap'
import { type Bank, bank } from '../support/bank.ts'
import { send, tempDir, until } from '../support/e2e.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { memoryOf } from '../support/process-memory.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { RedisServer } from '../support/redis.ts'

t.setTimeout(600_000)

/** Parts of what a client sends and receives; none may be readable anywhere. */
const SECRETS = ['secret-key-51c0', 'secret-path-a7e4', 'secret-answer-90d2', 'secret-request-77d3']
const [KEY, PATH, ANSWER, BODY] = SECRETS as [string, string, string, string]
const ADMIN = 'an-admin-token'

interface Place {
  readonly url: string
  /** Every byte that the store has written, latin1. */
  readonly bytes: () => Promise<string>
  /** The processes of the store; none: it is part of the proxy, whose memory has everything in the clear. */
  readonly pids: () => readonly number[]
}

function filesBelow(dir: string): string {
  return readdirSync(dir, { recursive: true, encoding: 'utf8' })
    .map((name) => join(dir, name))
    .filter((path) => statSync(path).isFile())
    .map((path) => readFileSync(path, 'latin1'))
    .join('\n')
}

async function redisPlace(t: Test): Promise<Place> {
  const server = await RedisServer.start()
  t.teardown(() => server[Symbol.asyncDispose]())
  return {
    url: server.url,
    pids: () => [server.pid as number],
    async bytes() {
      // The commands received, a snapshot and every value.
      await server.command('SAVE')
      const [, dir] = (await server.command('CONFIG', 'GET', 'dir')) as [string, string]
      const client = new Redis(server.port, '127.0.0.1')
      try {
        const keys = await client.keys('*')
        const dumped = await Promise.all(keys.map(async (key) => client.dumpBuffer(key)))
        return `${keys.join()}${Buffer.concat(dumped.map((one) => one ?? Buffer.alloc(0))).toString('latin1')}${filesBelow(dir)}`
      } finally {
        client.disconnect()
      }
    },
  }
}

async function sqlitePlace(t: Test): Promise<Place> {
  const dir = tempDir(t)
  return { url: `sqlite:${dir}/store.db`, bytes: async () => filesBelow(dir), pids: () => [] }
}

async function postgresPlace(t: Test): Promise<Place> {
  const server = await PostgresServer.start('log_statement=all', 'log_parameter_max_length=-1')
  t.teardown(() => server[Symbol.asyncDispose]())
  return {
    url: server.url,
    pids: () => server.pids,
    async bytes() {
      await server.sql('CHECKPOINT')
      return filesBelow(server.data)
    },
  }
}

const PLACES: Readonly<Record<string, (t: Test) => Promise<Place>>> = {
  redis: redisPlace,
  sqlite: sqlitePlace,
  ...(NO_POSTGRES ? {} : { postgres: postgresPlace }),
}

/** Key files for proxies. */
function keyFiles(t: Test): Readonly<Record<'one' | 'two', string>> {
  const dir = tempDir(t)
  const [one, two] = ['one', 'two'].map((id) => {
    const file = join(dir, id)
    writeFileSync(file, `${randomBytes(32).toString('hex')}\n`)
    return `{ id: ${id}, file: "${file}" }`
  }) as [string, string]
  return { one, two }
}

async function started(
  t: Test,
  upstream: Bank,
  storeUrl: string,
  keys: readonly string[],
  more = '',
): Promise<TestProxy> {
  const token = join(tempDir(t), 'token')
  writeFileSync(token, ADMIN)
  const encryption = keys.length === 0 ? '' : `, encryption: { keys: [${keys.join(', ')}] }`
  const proxy = await proxyInProcess(`upstream: { url: "${upstream.url}", timeout: 5s }
service: pay
admin: { listen: "127.0.0.1:0", tokenFile: "${token}" }
store: { url: "${storeUrl}"${encryption}${more} }
routes:
  - name: pay
    match: { path: "/pay/${PATH}" }
    record: { label: /card }
    lease: 1s
    reconcile:
      request: { path: "/payments?key={key}" }
      identity: { /key: "{key}" }
      completed: { status: 200 }
      every: 100ms
      after: 1ms
`)
  t.teardown(() => proxy[Symbol.asyncDispose]())
  return proxy
}

/** In which it might be written. */
function formsOf(secret: string): readonly string[] {
  const bytes = Buffer.from(secret)
  return [secret, bytes.toString('hex'), bytes.toString('base64')]
}

const ASK = { path: `/pay/${PATH}`, body: `{"card":"${BODY}"}` }

interface Listed {
  readonly records: readonly { readonly path: string; readonly lastError: string | null }[]
}

async function records(proxy: TestProxy): Promise<Listed> {
  const headers = { authorization: `Bearer ${ADMIN}` }
  return (await (await fetch(`${proxy.adminUrl}/v1/records`, { headers })).json()) as Listed
}

for (const [kind, make] of Object.entries(PLACES)) {
  void t.test(`S09 ${kind}: no key, path, body or error is readable; retries are replayed`, async (t) => {
    const place = await make(t)
    const upstream = await bank(t)
    const { one } = keyFiles(t)
    const spool = tempDir(t)
    const proxy = await started(t, upstream, place.url, [one], `, compression: zstd, spool: "${spool}"`)
    // Answered.
    upstream.fault = (key, response) =>
      void response
        .writeHead(201, `Made ${ANSWER}`, { 'X-Told': ANSWER })
        .end(`${ANSWER} ${key} ${'again '.repeat(200)}`)
    const first = await send(proxy, `${KEY}-1`, ASK)
    const retry = await send(proxy, `${KEY}-1`, ASK)
    t.match(retry, { status: 201, replayed: true, body: first.body })
    t.equal(
      (await send(proxy, `${KEY}-1`, { ...ASK, body: `{"card":"${BODY}2"}` })).code,
      'idempotency_key_reused',
    )
    // Unknown, then reconciled.
    upstream.fault = (_key, response) => void response.socket?.destroy()
    t.equal((await send(proxy, `${KEY}-2`, ASK)).code, 'upstream_failed')
    await until(async () => (await send(proxy, `${KEY}-2`, ASK)).replayed)
    // Unknown for now.
    upstream.fate = () => 'processing'
    t.equal((await send(proxy, `${KEY}-3`, ASK)).code, 'upstream_failed')
    t.strictSame(
      upstream.executed,
      [1, 2, 3].map((n) => `${KEY}-${n}`),
    )

    // The admin API shows them in the clear.
    const { records: listed } = await records(proxy)
    const errors = [...new Set(listed.flatMap(({ lastError }) => lastError ?? []))]
    t.equal(errors.length, 1)
    t.ok(listed.every(({ path }) => path === ASK.path))
    // While the store still has its connections.
    const memory = place.pids().map(memoryOf)
    await proxy.drain()
    const written = [...memory, await place.bytes()].join('\n')
    t.ok(written.length > 1000)
    for (const secret of [...SECRETS, ...errors])
      for (const form of formsOf(secret)) t.notOk(written.includes(form), secret)
    t.notOk(filesBelow(spool).includes('secret'))
  })

  void t.test(`S09 ${kind}: without encryption all of it is readable: the test can fail`, async (t) => {
    const place = await make(t)
    const upstream = await bank(t)
    const proxy = await started(t, upstream, place.url, [])
    upstream.fault = (_key, response) => void response.writeHead(201).end(ANSWER)
    t.match(await send(proxy, KEY, ASK), { status: 201, body: ANSWER })
    const memory = place.pids().map(memoryOf)
    await proxy.drain()
    const places = [await place.bytes(), ...(memory.length === 0 ? [] : [memory.join('\n')])]
    for (const bytes of places)
      for (const secret of [KEY, PATH, ANSWER])
        t.ok(
          formsOf(secret).some((form) => bytes.includes(form)),
          secret,
        )
  })
}
