import { type ChildProcess, spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { freePort } from './redis.ts'

/** Why tests that need Prometheus are skipped, or false. `npm run verify` installs it where it can. */
export const WITHOUT: string | false = ['prometheus', 'promtool'].every(
  (program) => spawnSync(program, ['--version']).status === 0,
)
  ? false
  : 'prometheus and promtool are not on the PATH (Debian has packages prometheus and promtool)'

/** One series of a result: its values over time, without NaN. */
export interface Series {
  readonly metric: Readonly<Record<string, string>>
  readonly values: readonly number[]
}

interface Answer {
  readonly status: string
  readonly error?: string
  readonly data: {
    readonly result: readonly {
      readonly metric: Record<string, string>
      readonly value?: readonly [number, string]
      readonly values?: readonly (readonly [number, string])[]
    }[]
  }
}

/** A real Prometheus on a free loopback port, with its own folder. */
export class Prometheus implements AsyncDisposable {
  readonly url: string
  readonly #process: ChildProcess
  readonly #directory: string

  private constructor(url: string, process: ChildProcess, directory: string) {
    this.url = url
    this.#process = process
    this.#directory = directory
  }

  /** Resolves when it answers queries. `configuration`: YAML. */
  static async start(configuration: string): Promise<Prometheus> {
    const directory = mkdtempSync(join(tmpdir(), 'prometheus-'))
    const file = join(directory, 'prometheus.yml')
    writeFileSync(file, configuration)
    const address = `127.0.0.1:${await freePort()}`
    const child = spawn(
      'prometheus',
      [
        `--config.file=${file}`,
        `--storage.tsdb.path=${join(directory, 'data')}`,
        `--web.listen-address=${address}`,
      ],
      { stdio: ['ignore', 'ignore', 'pipe'] },
    )
    const lines: string[] = []
    for await (const line of createInterface({ input: child.stderr })) {
      lines.push(line)
      if (!line.includes('Server is ready to receive web requests')) continue
      child.stderr.resume()
      return new Prometheus(`http://${address}`, child, directory)
    }
    throw new Error(`prometheus ended with ${child.exitCode}:\n${lines.join('\n')}`)
  }

  /** Evaluates a query at one time (Unix seconds). */
  query(expr: string, time: number): Promise<Series[]> {
    return this.#ask('query', { query: expr, time: String(time) })
  }

  /** Evaluates a query from `start` to `end` (Unix seconds), once per second. */
  range(expr: string, start: number, end: number): Promise<Series[]> {
    return this.#ask('query_range', { query: expr, start: String(start), end: String(end), step: '1' })
  }

  /** GETs a path of its API; returns `data`. */
  async get(path: string): Promise<unknown> {
    const response = await fetch(`${this.url}/api/v1/${path}`)
    return ((await response.json()) as { data: unknown }).data
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const exited = once(this.#process, 'exit')
    this.#process.kill('SIGKILL')
    await exited
    rmSync(this.#directory, { recursive: true, force: true })
  }

  async #ask(path: string, parameters: Readonly<Record<string, string>>): Promise<Series[]> {
    const response = await fetch(`${this.url}/api/v1/${path}?${new URLSearchParams(parameters).toString()}`)
    const { status, error, data } = (await response.json()) as Answer
    if (status !== 'success') throw new Error(`${parameters['query']}: ${error}`)
    return data.result.map(({ metric, value, values = value === undefined ? [] : [value] }) => ({
      metric,
      values: values.map(([, text]) => Number(text)).filter((number) => !Number.isNaN(number)),
    }))
  }
}
