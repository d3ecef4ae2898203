import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import { Pool } from 'undici'
import { command } from '../support/commands.ts'
import { newKey, tempDir, until } from '../support/e2e.ts'
import { Pod, Service } from '../support/pod.ts'
import { RedisServer } from '../support/redis.ts'

t.setTimeout(600_000)

/** As in the chart: the app pauses, and the proxy stops before it. */
const PAUSE = 5000
const DELAY = '3s'
/** How long load balancers take to learn that a pod is ending. */
const PROPAGATION = 400
const CLIENTS = 8
const ENOUGH = 40

const redis = await RedisServer.start()
t.teardown(() => redis[Symbol.asyncDispose]())

/** The final response that a client got for one key. */
interface Asked {
  readonly key: string
  readonly status: number
  readonly code: string | null
  readonly body: string
  readonly replayed: boolean
}

/** Clients with persistent connections: each pays with a new key, sometimes slowly, then retries, then sends a GET. */
class Load implements AsyncDisposable {
  readonly asked: Asked[] = []
  /** Statuses and codes of responses that were not final, and `broken` where there was none. */
  readonly failures: string[] = []
  readonly #pool: Pool
  readonly #running: Promise<void>[]
  #on = true

  constructor(url: string) {
    this.#pool = new Pool(url, { connections: CLIENTS, pipelining: 1 })
    this.#running = Array.from({ length: CLIENTS }, (_, n) => this.#run(n))
  }

  /** Resolves after this many more final responses. */
  async go(count = ENOUGH): Promise<void> {
    const before = this.asked.length
    await until(() => this.asked.length >= before + count)
  }

  async stop(): Promise<void> {
    this.#on = false
    await Promise.all(this.#running)
  }

  /** Also runs when a test fails. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#on = false
    await this.#pool.destroy()
    await Promise.all(this.#running)
  }

  async #run(n: number): Promise<void> {
    for (let turn = n; this.#on; turn++) {
      const key = newKey()
      const slow = turn % 4 === 0
      await this.#pay(key, slow)
      await this.#pay(key, slow)
      const looked = await this.#pool.request({ method: 'GET', path: '/healthz' }).then(
        async ({ statusCode, body }) => (await body.dump(), statusCode),
        () => 0,
      )
      if (looked !== 200) this.failures.push(`GET ${looked}`)
    }
  }

  /** Like a careful client: retries with the same key until the response is final. */
  async #pay(key: string, slow: boolean): Promise<void> {
    for (;;) {
      try {
        const response = await this.#pool.request({
          method: 'POST',
          path: '/v1/payments',
          headers: {
            'content-type': 'application/json',
            'idempotency-key': key,
            ...(slow ? { 'x-demo-delay': '250ms' } : {}),
          },
          body: '{"amount":4200,"currency":"eur"}',
        })
        const body = await response.body.text()
        const code =
          response.statusCode === 201 ? null : ((JSON.parse(body) as { code: string }).code ?? null)
        if (response.statusCode === 201 || code === 'idempotency_outcome_unknown') {
          const replayed = response.headers['idempotent-replayed'] === 'true'
          this.asked.push({ key, status: response.statusCode, code, body, replayed })
          return
        }
        this.failures.push(code ?? String(response.statusCode))
      } catch {
        if (!this.#on) return
        this.failures.push('broken')
      }
      await wait(100)
    }
  }
}

interface Rollout {
  readonly old: Pod
  readonly service: Service
  readonly load: Load
  readonly admin: string[]
}

interface Result {
  readonly asked: readonly Asked[]
  readonly failures: readonly string[]
  /** By key, on both pods together. */
  readonly charges: ReadonlyMap<string, number>
  readonly served: readonly number[]
}

/** A pod under load; a new one becomes ready and joins it; then the old one ends as `end` says. */
async function rollout(t: Test, end: (rollout: Rollout) => Promise<void>): Promise<Result> {
  await redis.command('FLUSHALL')
  const dir = tempDir(t)
  const token = join(dir, 'token')
  writeFileSync(token, 'a-token-of-the-cluster')
  const yaml = `
store: { url: "${redis.url}", timeout: 2s }
admin: { listen: "127.0.0.1:0", tokenFile: "${token}" }
drain: { delay: ${DELAY}, timeout: 15s }
defaults: { lease: 4s, scope: { caller: none } }`
  await using service = await Service.open()
  await using old = await Pod.start(dir, 'old', yaml)
  service.add(old)
  await using load = new Load(service.url)
  await load.go()
  await using fresh = await Pod.start(dir, 'fresh', yaml)
  service.add(fresh)
  await load.go()
  await end({ old, service, load, admin: ['--admin', old.proxy.adminUrl, '--token-file', token] })
  await load.go()
  await load.stop()
  const [before, after] = [old.charges(), fresh.charges()]
  const charges = new Map(before)
  for (const [key, n] of after) charges.set(key, (charges.get(key) ?? 0) + n)
  return { asked: load.asked, failures: load.failures, charges, served: [before.size, after.size] }
}

/** One charge per charged key, one wherever a client was told of it, and one response for every request. */
function nothingDoubled(t: Test, { asked, charges, served }: Result): void {
  t.same(
    [...charges].filter(([, n]) => n !== 1),
    [],
    'no key is charged twice',
  )
  const bodies = new Map<string, string>()
  const differing = asked
    .filter(({ status }) => status === 201)
    .filter(({ key, body }) => (bodies.get(key) ?? (bodies.set(key, body), body)) !== body)
  t.same(differing, [], 'all responses for a key are the first one')
  t.same(
    [...bodies.keys()].filter((key) => charges.get(key) !== 1),
    [],
    'every charge that a client was told of exists',
  )
  t.ok(
    served.every((count) => count > 0),
    'both pods have served',
  )
}

/** Running requests may have been executed: they are not sent to the app again. */
function onlyUnknown(t: Test, { asked }: Result): void {
  const unknown = asked.filter(({ status }) => status !== 201)
  t.ok(
    unknown.every(({ code }) => code === 'idempotency_outcome_unknown'),
    `${unknown.length} of ${asked.length} responses were "unknown"`,
  )
}

function allFine(t: Test, result: Result): void {
  t.same(result.failures, [], `${result.asked.length} requests, none failed`)
  nothingDoubled(t, result)
  t.equal(
    result.asked.filter(({ replayed }) => replayed).length,
    result.charges.size,
    'each was replayed once',
  )
}

void t.test(
  'app and proxy get SIGTERM at the same time, and the app pauses first: nothing fails',
  async (t) => {
    const result = await rollout(t, async ({ old, service }) => {
      // Mode plain by the kubelet; mode native by the preStop hook.
      old.proxy.kill('SIGTERM')
      await wait(PROPAGATION)
      service.remove(old)
      await wait(PAUSE - PROPAGATION)
      await old.stopApp()
      t.equal(await old.proxy.exited, 0)
    })
    allFine(t, result)
  },
)

void t.test(
  '`drain` as the preStop hook of a native sidecar, SIGTERM after the app has ended: nothing fails',
  async (t) => {
    const result = await rollout(t, async ({ old, service, admin }) => {
      t.match(await command(['drain', '--by', 'preStop', ...admin]), { code: 0 })
      await wait(PROPAGATION)
      service.remove(old)
      await wait(PAUSE - PROPAGATION)
      await old.stopApp()
      old.proxy.kill('SIGTERM')
      t.equal(await old.proxy.exited, 0)
    })
    allFine(t, result)
  },
)

void t.test('an app that stops without a pause: requests fail, and none is executed twice', async (t) => {
  const result = await rollout(t, async ({ old, service, load }) => {
    service.remove(old)
    await old.stopApp('SIGKILL')
    // Persistent connections of clients still lead to the old pod.
    await until(() => load.failures.includes('upstream_unreachable'))
    old.proxy.kill('SIGTERM')
    t.equal(await old.proxy.exited, 0)
  })
  nothingDoubled(t, result)
  onlyUnknown(t, result)
})

void t.test('SIGKILL of app and proxy: no request is executed twice', async (t) => {
  const result = await rollout(t, async ({ old, service, load }) => {
    old.kill()
    await old.proxy.exited
    service.remove(old)
    await until(() => load.failures.includes('broken'))
  })
  nothingDoubled(t, result)
  onlyUnknown(t, result)
})
