/**
 * Starts the workflow: four services, the orchestrator, and a proxy before each of them. Run as a program, it stays up until Ctrl-C; the
 * front proxy listens on http://127.0.0.1:8080. See README.md.
 */
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { parseArgs } from 'node:util'
import { freePort, Part, PROXY } from '../parts.ts'

export const STEPS = ['reserve', 'charge', 'confirm', 'notify'] as const
export type Step = (typeof STEPS)[number]

const HERE = import.meta.dirname
export const LANGUAGES = {
  typescript: [process.execPath, join(HERE, 'orchestrator.ts')],
  python: ['python3', join(HERE, 'orchestrator.py')],
} as const
export type Language = keyof typeof LANGUAGES

export interface Row {
  readonly id: number
  readonly action: string
  /** Of a step: the booking. Of a compensation: the id of what it undid. */
  readonly about: string
  readonly status: number
}

export class World implements AsyncDisposable {
  /** Of the front proxy. */
  readonly url: string
  readonly orchestrator: string
  readonly parts: readonly Part[]
  readonly #urls: Readonly<Record<Step, string>>
  readonly #folder: string

  private constructor(
    url: string,
    orchestrator: string,
    parts: readonly Part[],
    urls: Record<Step, string>,
    folder: string,
  ) {
    this.url = url
    this.orchestrator = orchestrator
    this.parts = parts
    this.#urls = urls
    this.#folder = folder
  }

  /** `waits`: how soon a silent proxy is given up, and a service asked what it did. */
  static async start(language: Language, port: number, waits: Waits = {}): Promise<World> {
    const folder = mkdtempSync(join(tmpdir(), 'workflow-'))
    const parts: Part[] = []
    const add = (name: string, run: readonly string[], env: Record<string, string>): void =>
      void parts.push(new Part(name, { run, env }))
    const proxy = async (config: string, name: string, before: string, listen?: number): Promise<string> => {
      const own = listen ?? (await freePort())
      add(`proxy of ${name}`, [...PROXY, join(HERE, config)], {
        PROXY_LISTEN: `127.0.0.1:${own}`,
        PROXY_ADMIN_LISTEN: 'none',
        PROXY_UPSTREAM: before,
        PROXY_STORE: `sqlite:${join(folder, name)}-records.db`,
        STEP: name,
        ...waits,
      })
      return `http://127.0.0.1:${own}`
    }
    const urls = {} as Record<Step, string>
    const addresses: Record<string, string> = {}
    for (const step of STEPS) {
      const own = await freePort()
      add(step, [process.execPath, join(HERE, 'service.ts')], {
        STEP: step,
        PORT: String(own),
        DB: join(folder, `${step}.db`),
      })
      urls[step] = `http://127.0.0.1:${own}`
      addresses[`${step.toUpperCase()}_URL`] = await proxy('step.yaml', step, urls[step])
    }
    const own = await freePort()
    add('orchestrator', LANGUAGES[language], { PORT: String(own), ...addresses })
    const orchestrator = `http://127.0.0.1:${own}`
    const front = await proxy('front.yaml', 'orchestrator', orchestrator, port)
    const world = new World(front, orchestrator, parts, urls, folder)
    try {
      await Promise.all(parts.map((part) => part.start()))
    } catch (error) {
      await world[Symbol.asyncDispose]()
      throw error
    }
    return world
  }

  part(name: string): Part {
    return this.parts.find((one) => one.name === name) as Part
  }

  /** All that the services have done. */
  async work(): Promise<Row[]> {
    const rows = STEPS.map(async (step) => (await (await fetch(`${this.#urls[step]}/work`)).json()) as Row[])
    return (await Promise.all(rows)).flat()
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await Promise.all(this.parts.map((part) => part.kill()))
    rmSync(this.#folder, { recursive: true, force: true })
  }
}

type Waits = Readonly<Record<string, string>>

if (import.meta.main) {
  const { values: flags } = parseArgs({
    options: {
      language: { type: 'string', default: 'typescript' },
      port: { type: 'string', default: '8080' },
    },
  })
  try {
    const world = await World.start(flags.language as Language, Number(flags.port))
    process.stdout.write(`POST ${world.url}/bookings with an Idempotency-Key\n`)
    for (const signal of ['SIGINT', 'SIGTERM'] as const)
      process.once(signal, () => void world[Symbol.asyncDispose]())
  } catch (error) {
    process.stderr.write(`${(error as Error).message}\n`)
    process.exitCode = 1
  }
}
