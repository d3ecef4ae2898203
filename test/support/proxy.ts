import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { writeFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { Writable } from 'node:stream'
import { fileURLToPath } from 'node:url'
import { pino } from 'pino'
import { formatConfigError, type Loaded, loadConfig } from '../../src/config/load.ts'
import { start } from '../../src/main.ts'
import { plainPort } from './front.ts'
import { headed } from './service.ts'

export interface TestProxy extends AsyncDisposable {
  readonly url: string
  readonly port: number
  readonly adminUrl: string
  /** Log lines so far, parsed. */
  readonly log: Record<string, unknown>[]
  /** Resolves with the first log line (past or future) that the test accepts. */
  logged(accept: (line: Record<string, unknown>) => boolean): Promise<Record<string, unknown>>
  drain(): Promise<void>
  /** Reads another configuration, as SIGHUP makes a process do. */
  reload(yaml: string): Promise<void>
  /** A sample of /metrics; 0 if there is none. */
  metric(sample: string): Promise<number>
}

/** Starts a proxy from YAML text. Sets `listen` and, if missing, `admin.listen` and `service`. */
export async function proxyInProcess(yaml: string): Promise<TestProxy> {
  const read = (yaml: string): Loaded =>
    loadConfig({ file: 'test.yaml', text: headed(yaml), env: process.env, flags: {} })
  const loaded = read(yaml)
  if (!loaded.ok) throw new Error(loaded.errors.map(formatConfigError).join('\n'))
  const lines = new Lines()
  const sink = new Writable({
    write(chunk: Buffer, _encoding, done) {
      for (const line of chunk.toString().split('\n')) if (line !== '') lines.push(line)
      done()
    },
  })
  const proxy = await start(loaded.config, pino({ level: 'debug', base: null }, sink))
  const own = Number(new URL(proxy.url).port)
  const front = await plainPort(own)
  const { port } = front
  const drain = (): Promise<void> => {
    front.close()
    return proxy.drain()
  }
  return {
    url: port === own ? proxy.url : `http://127.0.0.1:${port}`,
    port,
    adminUrl: proxy.adminUrl as string,
    log: lines.all,
    logged: (accept) => lines.logged(accept),
    drain,
    reload: (next) => proxy.reload(read(next)),
    metric: (sample) => metricOf(proxy.adminUrl as string, sample),
    [Symbol.asyncDispose]: drain,
  }
}

export interface ChildProxy extends TestProxy {
  readonly child: ChildProcess
  /** Resolves with the exit code, or the signal's name. */
  readonly exited: Promise<number | NodeJS.Signals>
  kill(signal: NodeJS.Signals): void
}

/** The real command line as a process of its own, so that it can be killed, stopped and drained. */
export async function proxyProcess(
  configFile: string,
  more: readonly string[] = [],
  env: Readonly<Record<string, string>> = {},
): Promise<ChildProxy> {
  const cli = fileURLToPath(new URL('../../src/cli.ts', import.meta.url))
  const child = spawn(process.execPath, [cli, '--config', configFile, ...more], {
    stdio: ['ignore', 'pipe', 'pipe'],
    env: { ...process.env, NODE_V8_COVERAGE: '', ...env },
  })
  const lines = new Lines()
  let stderr = ''
  child.stderr.on('data', (chunk: Buffer) => {
    stderr += chunk.toString()
  })
  createInterface({ input: child.stdout }).on('line', (line) => lines.push(line))
  const exited = once(child, 'exit').then(([code, signal]) => (code ?? signal) as number | NodeJS.Signals)
  const listening = await Promise.race([
    lines.logged((line) => line.msg === 'listening'),
    exited.then((code) => {
      throw new Error(`the proxy ended with ${code}: ${stderr}${JSON.stringify(lines.all)}`)
    }),
  ])
  const url = listening.url as string
  const adminUrl = listening.admin as string
  return {
    url,
    port: Number(new URL(url).port),
    adminUrl,
    child,
    exited,
    log: lines.all,
    logged: (accept) => lines.logged(accept),
    metric: (sample) => metricOf(adminUrl, sample),
    kill: (signal) => void child.kill(signal),
    async reload(yaml) {
      writeFileSync(configFile, headed(yaml))
      child.kill('SIGHUP')
    },
    async drain() {
      child.kill('SIGTERM')
      await exited
    },
    async [Symbol.asyncDispose]() {
      child.kill('SIGKILL')
      await exited
    },
  }
}

async function metricOf(adminUrl: string, sample: string): Promise<number> {
  const text = await (await fetch(`${adminUrl}/metrics`)).text()
  const line = text.split('\n').find((one) => one.startsWith(`${sample} `))
  return line === undefined ? 0 : Number(line.slice(sample.length + 1))
}

class Lines {
  readonly all: Record<string, unknown>[] = []
  #waiting: {
    accept: (line: Record<string, unknown>) => boolean
    resolve: (line: Record<string, unknown>) => void
  }[] = []
  push(text: string): void {
    let line: Record<string, unknown>
    try {
      line = JSON.parse(text) as Record<string, unknown>
    } catch {
      line = { msg: text }
    }
    this.all.push(line)
    this.#waiting = this.#waiting.filter(({ accept, resolve }) => {
      if (!accept(line)) return true
      resolve(line)
      return false
    })
  }
  logged(accept: (line: Record<string, unknown>) => boolean): Promise<Record<string, unknown>> {
    const found = this.all.find(accept)
    if (found !== undefined) return Promise.resolve(found)
    return new Promise((resolve) => this.#waiting.push({ accept, resolve }))
  }
}
