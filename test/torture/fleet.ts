import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import {
  closeSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setTimeout as wait } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { ask, TOKEN } from '../support/admin.ts'
import { freePort } from '../support/redis.ts'
import { type Relay, relay } from '../support/relay.ts'
import { gone, kill, workersOf } from '../support/workers.ts'
import type { Random } from './random.ts'
import type { TormentedStore } from './stores.ts'

export const LEASE = 1000

const CLOCK = new URL('clock.ts', import.meta.url).href
const CLI = fileURLToPath(new URL('../../src/cli.ts', import.meta.url))

/** What a process holds at rest. */
export interface Held {
  /** Resident memory, in MiB. */
  readonly memory: number
  /** Of that the JavaScript heap in use, garbage included, and in all; buffers outside of it. In MiB. */
  readonly heap: number
  readonly heapSize: number
  readonly external: number
  /** Open files, sockets included. */
  readonly descriptors: number
}

export interface ReplicaOptions {
  readonly workers: number
  readonly env: Readonly<Record<string, string>>
}

/** A replica as a process, or one with workers, with its own relays in front of the upstream and the store. */
export class Replica implements AsyncDisposable {
  readonly port: number
  readonly upstream: Relay
  readonly store: Relay | null
  readonly #adminUrl: string
  readonly #dir: string
  readonly #text: string
  readonly #env: Readonly<Record<string, string>>
  #process: ChildProcess | null = null
  /** One restart at a time. */
  #restarting: Promise<void> | null = null

  private constructor(
    ports: { readonly own: number; readonly admin: number },
    upstream: Relay,
    store: Relay | null,
    dir: string,
    text: string,
    env: Readonly<Record<string, string>>,
  ) {
    this.port = ports.own
    this.#adminUrl = `http://127.0.0.1:${ports.admin}`
    this.upstream = upstream
    this.store = store
    this.#dir = dir
    this.#text = text
    this.#env = {
      ...env,
      CLOCK: join(dir, 'clock'),
      NODE_OPTIONS: `--import=${CLOCK} ${env['NODE_OPTIONS'] ?? ''}`,
    }
    this.setClock(0)
  }

  /** `folder`: for its configuration and log; `disk`: for its spool. */
  static async start(
    folder: string,
    disk: string,
    store: TormentedStore,
    upstreamPort: number,
    { workers, env }: ReplicaOptions,
  ): Promise<Replica> {
    const ports = { own: await freePort(), admin: await freePort() }
    const upstream = await relay(upstreamPort)
    const before = store.port === null ? null : await relay(store.port)
    const dir = mkdtempSync(join(folder, 'replica-'))
    const spool = join(disk, `spool-${ports.own}`)
    mkdirSync(spool)
    writeFileSync(join(dir, 'token'), TOKEN)
    const url = store.url(before?.port ?? null)
    const text = `workers: ${workers}\n${configuration(ports, upstream.port, store, url, dir, spool)}`
    const replica = new Replica(ports, upstream, before, dir, text, env)
    await replica.#start()
    return replica
  }

  /** Sends the signal, and starts a new process after the pause. */
  async restart(signal: 'SIGKILL' | 'SIGTERM', pause: number): Promise<void> {
    this.#restarting ??= this.#restart(signal, pause).finally(() => {
      this.#restarting = null
    })
    await this.#restarting
  }

  signal(signal: NodeJS.Signals): void {
    this.#process?.kill(signal)
  }

  /** To the process and its workers. */
  signalAll(signal: NodeJS.Signals): void {
    this.signal(signal)
    for (const pid of this.#workers) kill(pid, signal)
  }

  /** One of its workers, or none if they are just being replaced. */
  signalWorker(random: Random, signal: NodeJS.Signals): void {
    const workers = this.#workers
    if (workers.length > 0) kill(random.pick(workers), signal)
  }

  get #workers(): number[] {
    return this.#process === null ? [] : workersOf({ child: this.#process })
  }

  /** A changed file takes effect, a broken one changes nothing. SIGHUP would end a process that is starting: it waits until it serves. */
  async reload(how: 'as it was' | 'changed' | 'broken'): Promise<void> {
    await this.#restarting
    const text = this.#text.replaceAll('wait: 2s', 'wait: 1s')
    this.#configure(how === 'as it was' ? this.#text : how === 'changed' ? text : `${text}routes: 1`)
    this.signal('SIGHUP')
  }

  /** From now on the replica's wall clock is ahead by this many milliseconds. */
  setClock(ahead: number): void {
    const file = join(this.#dir, 'clock')
    writeFileSync(`${file}.new`, String(ahead))
    renameSync(`${file}.new`, file)
  }

  /** Resolves when the store has every outcome, or after half a minute. */
  async holdsNothing(): Promise<void> {
    for (let n = 0; n < 300; n++) {
      if ((await this.metric('idempotency_spooled').catch(() => 1)) === 0) return
      await wait(100)
    }
  }

  /** A sample of /metrics; 0 if there is none. */
  async metric(sample: string): Promise<number> {
    const text = await (await fetch(`${this.#adminUrl}/metrics`)).text()
    const line = text.split('\n').find((one) => one.startsWith(`${sample} `))
    return line === undefined ? 0 : Number(line.slice(sample.length + 1))
  }

  /** What an operator reports to the proxy about an operation. Where that fails, it is reported again. */
  async tell(report: Readonly<Record<string, unknown>>): Promise<void> {
    await ask({ adminUrl: this.#adminUrl }, '/v1/outcomes', { method: 'POST', body: report }).catch(() => {})
  }

  async held(): Promise<Held> {
    const pids = [this.#process?.pid, ...this.#workers]
    const kilobytes = pids.map(
      (pid) => /VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1],
    )
    const mebibytes = async (sample: string) => Math.round((await this.metric(sample)) / 2 ** 20)
    return {
      memory: Math.round(kilobytes.reduce((sum, one) => sum + Number(one), 0) / 1024),
      heap: await mebibytes('nodejs_heap_size_used_bytes'),
      heapSize: await mebibytes('nodejs_heap_size_total_bytes'),
      external: await mebibytes('nodejs_external_memory_bytes'),
      descriptors: pids.reduce<number>((sum, pid) => sum + readdirSync(`/proc/${pid}/fd`).length, 0),
    }
  }

  heal(): void {
    for (const one of [this.upstream, this.store]) {
      if (one === null) continue
      Object.assign(one, { accept: true, passReplies: true })
      one.release()
    }
    this.signalAll('SIGCONT')
  }

  async ready(): Promise<void> {
    await this.#restarting
    await this.#answers()
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const workers = this.#workers
    await this.#end('SIGKILL')
    for (const pid of workers) kill(pid, 'SIGKILL')
    await gone(workers)
    await this.upstream[Symbol.asyncDispose]()
    await this.store?.[Symbol.asyncDispose]()
  }

  async #restart(signal: 'SIGKILL' | 'SIGTERM', pause: number): Promise<void> {
    await this.#end(signal)
    await wait(pause)
    await this.#start()
  }

  async #end(signal: 'SIGKILL' | 'SIGTERM'): Promise<void> {
    const child = this.#process
    if (child === null || child.exitCode !== null || child.signalCode !== null) return
    const exited = once(child, 'exit')
    const workers = this.#workers
    child.kill(signal)
    // A stopped process handles SIGTERM, or the end of the first process, only after it continues.
    for (const pid of [child.pid as number, ...workers]) kill(pid, 'SIGCONT')
    await exited
  }

  #configure(text: string): void {
    writeFileSync(join(this.#dir, 'proxy.yaml'), text)
  }

  async #start(): Promise<void> {
    this.#configure(this.#text)
    const log = openSync(join(this.#dir, 'log'), 'a')
    this.#process = spawn(process.execPath, [CLI, '--config', join(this.#dir, 'proxy.yaml')], {
      stdio: ['ignore', log, log],
      env: { ...process.env, NODE_V8_COVERAGE: '', ...this.#env },
    })
    closeSync(log)
    await this.#answers()
  }

  /** Resolves when the process serves. */
  async #answers(): Promise<void> {
    for (;;) {
      const { exitCode, signalCode } = this.#process as ChildProcess
      if (exitCode !== null || signalCode !== null)
        throw new Error(
          `the proxy ended with ${exitCode ?? signalCode}: ${readFileSync(join(this.#dir, 'log'), 'utf8').slice(-4000)}`,
        )
      const ok = await fetch(`${this.#adminUrl}/readyz`).then(
        (reply) => reply.ok,
        () => false,
      )
      if (ok) return
      await wait(50)
    }
  }
}

/** Two replicas or more on one store. */
export class Fleet implements AsyncDisposable {
  readonly replicas: readonly Replica[]
  readonly #folder: string

  private constructor(replicas: readonly Replica[], folder: string) {
    this.replicas = replicas
    this.#folder = folder
  }

  static async start(
    count: number,
    disk: string,
    store: TormentedStore,
    upstreamPort: number,
    options: ReplicaOptions,
  ): Promise<Fleet> {
    const folder = mkdtempSync(join(tmpdir(), 'torture-'))
    const replicas: Replica[] = []
    for (let n = 0; n < count; n++)
      replicas.push(await Replica.start(folder, disk, store, upstreamPort, options))
    return new Fleet(replicas, folder)
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const replica of this.replicas) await replica[Symbol.asyncDispose]()
    rmSync(this.#folder, { recursive: true, force: true })
  }
}

/** `keep` has no status query: what is unknown stays so. */
function configuration(
  ports: { readonly own: number; readonly admin: number },
  upstreamPort: number,
  { grace }: TormentedStore,
  storeUrl: string,
  dir: string,
  spool: string,
): string {
  const route = (name: string, more: string) =>
    `  - { name: ${name}, match: { methods: [POST], path: /${name} }, lease: ${LEASE}ms, key: { forwardFence: true }${more} }`
  const reconcile = `, reconcile: {
      request: { path: "/charges?record={record}" },
      identity: { /record: "{record}" },
      completed: [
        { status: 200, when: { /status: "201" }, json: /answer, response: { status: 201 } },
        { status: 200, when: { /status: "500" }, json: /answer, response: { status: 500 } } ],
      notFound: { status: 404 }, every: 500ms, after: 4s, attempts: 100 }`
  return `listen: 127.0.0.1:${ports.own}
admin: { listen: "127.0.0.1:${ports.admin}", tokenFile: ${JSON.stringify(join(dir, 'token'))} }
log: { level: warn, format: json }
service: torture
upstream: { url: "http://127.0.0.1:${upstreamPort}", timeout: 3s, connectTimeout: 1s }
store: { url: "${storeUrl}", spool: ${JSON.stringify(spool)}${grace === undefined ? '' : `, grace: ${grace}`} }
# Longer than a round on a busy machine, and short enough for a million records to go.
defaults: { ttl: 1h }
routes:
${route('pay', reconcile)}
${route('wait', `, inFlight: { mode: wait, wait: 2s }${reconcile}`)}
${route('keep', '')}
`
}
