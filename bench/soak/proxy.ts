import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { closeSync, createReadStream, openSync, readdirSync } from 'node:fs'
import { get } from 'node:http'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { text } from 'node:stream/consumers'
import { listening, residentMb } from '../machine.ts'
import type { Inside } from './inside.ts'

const END_WITHIN = 20_000
/** Log lines of the observer's `trouble`. */
const TROUBLE = '"level":"error"'

const living = new Set<ChildProcess>()
process.once('exit', () => {
  for (const child of living) child.kill('SIGKILL')
})

/** The proxy in an inspectable process of its own. Its log goes to a file, as in service. */
export class SoakedProxy implements AsyncDisposable {
  readonly port: number
  readonly #adminPort: number
  readonly #child: ChildProcess
  readonly #logFile: string

  private constructor(port: number, adminPort: number, child: ChildProcess, logFile: string) {
    this.port = port
    this.#adminPort = adminPort
    this.#child = child
    this.#logFile = logFile
  }

  /** `command`: Node, and its arguments. Resolves when it listens. */
  static async start(
    command: readonly string[],
    { folder, port, adminPort }: { folder: string; port: number; adminPort: number },
  ): Promise<SoakedProxy> {
    const [node = '', ...args] = command
    const logFile = join(folder, 'proxy.log')
    const log = openSync(logFile, 'w')
    const child = spawn(
      node,
      [
        '--expose-gc',
        '--disable-warning=ExperimentalWarning',
        '--import',
        new URL('inside.ts', import.meta.url).href,
        ...args,
      ],
      {
        cwd: folder,
        stdio: ['ignore', log, 'inherit', 'ipc'],
        env: { ...process.env, NODE_ENV: 'production', NODE_OPTIONS: '', NODE_V8_COVERAGE: '' },
      },
    )
    closeSync(log)
    living.add(child)
    let gone: string | null = null
    child.once('exit', (code, signal) => {
      living.delete(child)
      gone = `the proxy ended with ${code ?? signal}`
    })
    await listening(port, () => gone)
    return new SoakedProxy(port, adminPort, child, logFile)
  }

  get alive(): boolean {
    return living.has(this.#child)
  }

  /** `snapshot`: file for a heap snapshot. */
  async inside(snapshot: string | null = null): Promise<Inside> {
    const answered = once(this.#child, 'message') as Promise<[Inside]>
    this.#child.send({ snapshot })
    return (await answered)[0]
  }

  resident(): number {
    return residentMb([this.#child.pid as number], 'VmRSS') * 1e6
  }

  descriptors(): number {
    return readdirSync(`/proc/${this.#child.pid}/fd`).length
  }

  /** Samples of /metrics without labels. On a connection of its own, which is closed again. */
  async metrics(): Promise<ReadonlyMap<string, number>> {
    const [response] = (await once(
      get({ host: '127.0.0.1', port: this.#adminPort, path: '/metrics', agent: false }),
      'response',
    )) as [NodeJS.ReadableStream]
    const lines = (await text(response)).split('\n').filter((line) => /^[a-z_]+ /.test(line))
    return new Map(lines.map((line) => line.split(' ', 2)).map(([name = '', value]) => [name, Number(value)]))
  }

  /** Log lines that report trouble. */
  async troubles(): Promise<Record<string, unknown>[]> {
    const found: Record<string, unknown>[] = []
    for await (const line of createInterface({ input: createReadStream(this.#logFile) }))
      if (line.includes(TROUBLE)) found.push(JSON.parse(line) as Record<string, unknown>)
    return found
  }

  /** Drains it; resolves with its exit code, or the signal that it took. */
  async stop(): Promise<number | NodeJS.Signals | null> {
    if (!this.alive) return this.#child.exitCode ?? this.#child.signalCode
    const exited = once(this.#child, 'exit') as Promise<[number | null, NodeJS.Signals | null]>
    this.#child.kill('SIGTERM')
    const timer = setTimeout(() => this.#child.kill('SIGKILL'), END_WITHIN)
    const [code, signal] = await exited
    clearTimeout(timer)
    return code ?? signal
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop()
  }
}
