import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import type { Phase } from '../../src/core/copies.ts'
import { command } from '../support/commands.ts'
import { newKey, type Reply, send, tempDir, until } from '../support/e2e.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { emptyRedis } from '../support/redis.ts'
import { upstreamStub, valueOf } from '../support/upstream.ts'

t.setTimeout(600_000)

const redis = await emptyRedis(t)

/** Counts executions by key. A fifth of the requests get 503 with Retry-After at first, another fifth are slow. */
async function countingUpstream(t: Test) {
  const executions = new Map<string, number>()
  const refused = new Set<string>()
  const upstream = await upstreamStub(async (seen, response) => {
    const { target, method } = seen
    // Doctor asks without a key.
    if (method === 'OPTIONS') return void response.end()
    const key = valueOf(seen, 'idempotency-key')
    if (target === '/busy' && !refused.has(key)) {
      refused.add(key)
      return void response.writeHead(503, { 'Retry-After': '0' }).end()
    }
    executions.set(key, (executions.get(key) ?? 0) + 1)
    if (target === '/slow') await wait(50)
    response.writeHead(201, { 'X-Execution': newKey() }).end(`paid ${newKey()}`)
  })
  t.teardown(() => upstream[Symbol.asyncDispose]())
  return { url: upstream.url, executions }
}

function essence({ status, body, headers }: Reply): string {
  return JSON.stringify([status, body, headers.get('x-execution')])
}

/** Three replicas, clients that use any of them, and the responses that they got. */
class Fleet {
  readonly answered = new Map<string, { readonly path: string; readonly first: string }>()
  readonly different: string[] = []
  readonly #yaml: (phase: Phase | 'old' | 'done') => string
  readonly #live: TestProxy[] = []
  #ended = false
  #clients: Promise<unknown> = Promise.resolve()

  constructor(yaml: (phase: Phase | 'old' | 'done') => string) {
    this.#yaml = yaml
  }

  start(phase: Phase | 'old' | 'done'): Promise<TestProxy> {
    return proxyInProcess(this.#yaml(phase))
  }

  async begin(): Promise<void> {
    for (let n = 0; n < 3; n++) this.#live.push(await this.start('old'))
    this.#clients = Promise.all(Array.from({ length: 4 }, (_, n) => this.#client(n)))
  }

  /** Replaces one replica after the other, each once its successor serves. */
  async roll(phase: Phase | 'done'): Promise<void> {
    for (let n = 0; n < 3; n++) {
      let next: TestProxy | null = null
      // The mark of an earlier phase may not have expired yet.
      while (next === null) next = await this.start(phase).catch(() => wait(500).then(() => null))
      this.#live.push(next)
      await this.some(6)
      await this.#live.shift()?.drain()
      await this.some(6)
    }
  }

  /** Resolves when this many more keys have been answered. */
  async some(keys: number): Promise<void> {
    const { size } = this.answered
    await until(() => this.answered.size >= size + keys)
  }

  async end(): Promise<void> {
    this.#ended = true
    await this.#clients
  }

  async close(): Promise<void> {
    this.#ended = true
    await this.#clients
    for (const proxy of this.#live.splice(0)) await proxy.drain()
  }

  get any(): TestProxy {
    return this.#live[Math.floor(Math.random() * this.#live.length)] as TestProxy
  }

  /** Sends new keys, each twice at once and until it is answered, and retries old ones. */
  async #client(n: number): Promise<void> {
    for (let round = n; !this.#ended; round++) {
      const key = newKey()
      const path = round % 5 === 0 ? '/busy' : round % 5 === 1 ? '/slow' : '/pay'
      await Promise.all([this.ask(key, path), this.ask(key, path)])
      const known = [...this.answered.keys()]
      const old = known[Math.floor(Math.random() * known.length)]
      if (old !== undefined) await this.ask(old, this.answered.get(old)?.path ?? '')
    }
  }

  /** Like a client: retries on any replica until there is a response. */
  async ask(key: string, path: string): Promise<void> {
    for (;;) {
      const reply = await send(this.any, key, { path }).catch(() => null)
      if (reply?.status === 201) {
        const answer = essence(reply)
        const { first } = this.answered.get(key) ?? { first: answer }
        this.answered.set(key, { path, first })
        if (first !== answer) this.different.push(`${key}: ${first} then ${answer}`)
        return
      }
      await wait(20)
    }
  }
}

for (const [from, to] of [
  ['sqlite', 'redis'],
  ['redis', 'postgres'],
] as const)
  t.test(
    `W09 three replicas under load move from ${from} to ${to} in three phases: no key is executed twice, none is lost`,
    { skip: to === 'postgres' && NO_POSTGRES },
    async (t) => {
      const dir = tempDir(t)
      const postgres = to === 'postgres' ? await PostgresServer.start() : null
      if (postgres !== null) t.teardown(() => postgres[Symbol.asyncDispose]())
      await redis.command('FLUSHALL')
      const urls = { sqlite: `sqlite:${dir}/old.db`, redis: redis.url, postgres: postgres?.url ?? '' }
      const upstream = await countingUpstream(t)
      const [old, young] = [urls[from], urls[to]]
      const yaml = (phase: Phase | 'old' | 'done'): string => {
        const migrate =
          phase === 'old' || phase === 'done' ? '' : `, migrate: { from: "${old}", phase: ${phase} }`
        return `service: pay\nupstream: { url: "${upstream.url}" }\nstore: { url: "${phase === 'old' ? old : young}", timeout: 5s${migrate} }\n`
      }
      const fleet = new Fleet(yaml)
      t.teardown(() => fleet.close())
      await fleet.begin()
      await fleet.some(20)
      await fleet.roll('mirror')
      await t.rejects(fleet.start('new'), { name: 'PhaseConflict', message: /phase mirror is alive/ })
      await fleet.roll('both')
      await fleet.roll('new')
      await t.rejects(fleet.start('mirror'), { name: 'PhaseConflict', message: /phase new is alive/ })
      // Nobody writes to the old store any more, so the copy can be complete.
      const files = (['old', 'done'] as const).map((phase) => {
        const file = join(dir, `${phase}.yaml`)
        writeFileSync(file, yaml(phase))
        return file
      }) as [string, string]
      // Requests that phase new had in flight when phase both saw them stay in the old store until their lease ends.
      await until(async () => {
        const { code, err } = await command(['copy', '--from', files[0], '--to', files[1]])
        if (/different|unreadable/.test(err)) throw new Error(err)
        return code === 0
      })
      await fleet.roll('done')
      await fleet.end()

      for (const [key, { path }] of fleet.answered) await fleet.ask(key, path)
      t.strictSame(fleet.different, [], 'every replay is the first response')
      t.ok(fleet.answered.size >= 160, `${fleet.answered.size} keys`)
      const twice = [...upstream.executions].filter(([, times]) => times !== 1)
      t.strictSame(twice, [], 'each was executed once')
      t.equal(upstream.executions.size, fleet.answered.size, 'and answered')
    },
  )

void t.test('doctor names the phases that have live replicas', async (t) => {
  await redis.command('FLUSHALL')
  const dir = tempDir(t)
  const upstream = await countingUpstream(t)
  const yaml = `service: pay\nupstream: { url: "${upstream.url}" }\nstore: { url: "${redis.url}", migrate: { from: "sqlite:${dir}/old.db", phase: both } }\n`
  const file = join(dir, 'both.yaml')
  writeFileSync(file, yaml)
  const proxy = await proxyInProcess(yaml)
  t.teardown(() => proxy.drain())
  const { out } = await command(['doctor', '--config', file])
  t.match(out, /topology +migration from sqlite to redis, phase both/)
  t.match(
    out,
    new RegExp(`migration +alive in phase both \\(entered by [^ ]*:${process.pid}\\); replicas without`),
  )
})
