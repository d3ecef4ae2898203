/** Starts, stops and kills the processes that an example is made of. */
import { type ChildProcess, spawn } from 'node:child_process'
import { randomInt } from 'node:crypto'
import { once } from 'node:events'
import { readFileSync } from 'node:fs'
import { createServer } from 'node:net'
import { createInterface } from 'node:readline'
import { setTimeout as sleep } from 'node:timers/promises'

export interface Command {
  readonly run: readonly string[]
  readonly env: Readonly<Record<string, string>>
  /** What it prints when it is ready. */
  readonly ready?: RegExp
}

/** None outlives this process. */
const running = new Set<ChildProcess>()
const killAll = (): void => {
  for (const child of running) signal(child, 'SIGKILL')
}
process.once('exit', killAll)
for (const name of ['SIGINT', 'SIGTERM'] as const)
  process.on(name, () => {
    killAll()
    // Whoever else listens cleans up, and ends the process.
    if (process.listenerCount(name) === 1) process.exit(1)
  })

/** To the processes that it has started, too. */
function signal({ pid }: ChildProcess, name: NodeJS.Signals): void {
  if (pid !== undefined) process.kill(-pid, name)
}

/** A process that can be killed and started again, at the same address. */
export class Part implements AsyncDisposable {
  readonly name: string
  readonly #command: Command
  #child: ChildProcess | null = null
  readonly #said: string[] = []

  constructor(name: string, command: Command) {
    this.name = name
    this.#command = command
  }

  /**
   * Resolves when it is ready. `env`: for this time only.
   *
   * @throws in one sentence if it ends before.
   */
  async start(env: Readonly<Record<string, string>> = {}): Promise<void> {
    const { NODE_V8_COVERAGE: _, NODE_OPTIONS: __, ...inherited } = process.env
    const [command = '', ...args] = this.#command.run
    const child = spawn(command, args, {
      env: { ...inherited, ...this.#command.env, ...env },
      stdio: ['ignore', 'pipe', 'pipe'],
      detached: true,
    })
    this.#child = child
    running.add(child)
    const ready = new Promise<void>((resolve) => {
      for (const stream of [child.stdout, child.stderr])
        createInterface({ input: stream }).on('line', (line) => {
          this.#said.push(line)
          if ((this.#command.ready ?? /\blistening\b/).test(line)) resolve()
        })
    })
    const ended = new Promise<never>((_, reject) => {
      child.once('error', (error) => reject(new Error(`${this.name} cannot be started: ${error.message}`)))
      child.once('close', (code, signal) =>
        reject(
          new Error(`${this.name} ended (${code ?? signal}): ${this.#said.at(-1) ?? 'it said nothing'}`),
        ),
      )
    })
    child.once('exit', () => running.delete(child))
    // It may be killed later.
    ended.catch(() => {})
    await Promise.race([ready, ended])
  }

  /** How often it has said this, before it was killed too. */
  count(line: string): number {
    return this.#said.filter((said) => said === line).length
  }

  /** Whether it has said something that begins so. */
  says(beginning: string): boolean {
    return this.#said.some((said) => said.startsWith(beginning))
  }

  get isRunning(): boolean {
    return this.#child !== null && running.has(this.#child)
  }

  /** Whether it has stopped itself by SIGSTOP. */
  get isStopped(): boolean {
    return this.isRunning && /^State:\s+T/m.test(readFileSync(`/proc/${this.#child?.pid}/status`, 'utf8'))
  }

  resume(): void {
    if (this.isRunning) signal(this.#child as ChildProcess, 'SIGCONT')
  }

  async kill(): Promise<void> {
    if (!this.isRunning) return
    const child = this.#child as ChildProcess
    const exited = once(child, 'exit')
    signal(child, 'SIGKILL')
    await exited
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.kill()
  }
}

/** The proxy of this checkout. */
export const PROXY = [
  process.execPath,
  new URL('../src/cli.ts', import.meta.url).pathname,
  '--config',
] as const

const given = new Set<number>()

/** A port below those that the kernel gives to clients, so that a part finds its own free when it is started again. */
export async function freePort(): Promise<number> {
  for (;;) {
    const port = randomInt(22_000, 32_000)
    if (given.has(port)) continue
    given.add(port)
    const server = createServer().listen(port, '127.0.0.1')
    const isFree = await once(server, 'listening').then(
      () => true,
      () => false,
    )
    if (!isFree) continue
    server.close()
    await once(server, 'close')
    return port
  }
}

/** Asks until it is so. */
export async function until(condition: () => boolean | Promise<boolean>): Promise<void> {
  for (let pause = 5; !(await condition()); pause = Math.min(pause * 2, 100)) await sleep(pause)
}
