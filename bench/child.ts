import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { join } from 'node:path'
import { cpuMicros, listening, processTree, residentMb } from './machine.ts'

/** Time to end before the process is killed. */
const END_WITHIN = 3000

/** The image's setting; all Node processes here share the cache of compiled code, filled by the first start. */
const ENVIRONMENT = { NODE_ENV: 'production', MALLOC_ARENA_MAX: '1', NODE_OPTIONS: '', NODE_V8_COVERAGE: '' }

const living = new Set<ChildProcess>()
process.once('exit', () => {
  for (const child of living) child.kill('SIGKILL')
})
for (const signal of ['SIGINT', 'SIGTERM'] as const) process.once(signal, () => process.exit(1))

/** A server in a process of its own, which ends with this one at the latest. */
export class Child implements AsyncDisposable {
  readonly port: number
  readonly #process: ChildProcess

  private constructor(port: number, child: ChildProcess) {
    this.port = port
    this.#process = child
  }

  /** Resolves when it listens; its standard output goes to /dev/null. */
  static async spawn(port: number, command: readonly string[], cwd: string): Promise<Child> {
    const [program = '', ...args] = command
    const child = spawn(program, args, {
      cwd,
      stdio: ['ignore', 'ignore', 'pipe'],
      env: { ...process.env, ...ENVIRONMENT, NODE_COMPILE_CACHE: join(cwd, 'compile-cache') },
    })
    living.add(child)
    let errors = ''
    let gone: string | null = null
    child.stderr.on('data', (chunk: Buffer) => {
      errors += chunk.toString()
    })
    child.once('error', (error) => {
      gone = `${program}: ${error.message}`
    })
    child.once('exit', (code, signal) => {
      living.delete(child)
      gone = `${command.join(' ')} ended with ${code ?? signal}: ${errors}`
    })
    await listening(port, () => gone)
    return new Child(port, child)
  }

  /** The process and its children, as they are now: nginx listens before it starts its worker. */
  get pids(): readonly number[] {
    return processTree(this.#process.pid as number)
  }

  /** CPU time of the process and its children so far, in microseconds. */
  readonly cpu = (): number => cpuMicros(this.pids)

  residentMb(which: 'VmRSS' | 'VmHWM'): number {
    return residentMb(this.pids, which)
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (!living.has(this.#process)) return
    const exited = once(this.#process, 'exit')
    this.#process.kill('SIGTERM')
    const timer = setTimeout(() => this.#process.kill('SIGKILL'), END_WITHIN)
    await exited
    clearTimeout(timer)
  }
}
