import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { join } from 'node:path'
import { text } from 'node:stream/consumers'
import { fileURLToPath } from 'node:url'

/** How a client of examples/clients ended. */
export interface Told {
  /** 0: charged; 1: refused; 2: unknown (docs/clients.md). */
  readonly code: number | null
  readonly out: string
  readonly err: string
}

export interface LanguageClient {
  readonly language: string
  readonly file: string
  /** Why it cannot run on this machine. */
  readonly skip: string | false
  /** Compiles it into the folder, where the language needs that. */
  prepare(folder: string): void
  charge(url: string, key: string, settings?: ChargeSettings): Promise<Told>
}

export interface ChargeSettings {
  readonly amount?: number
  readonly tries?: number
}

interface Recipe {
  readonly file: string
  /** Succeeds where the language is installed. */
  readonly probe: readonly string[]
  readonly compile?: (file: string, folder: string) => readonly string[]
  readonly run: (file: string, folder: string) => readonly string[]
}

const RECIPES: Readonly<Record<string, Recipe>> = {
  typescript: {
    file: 'typescript/charge.ts',
    probe: [process.execPath, '--version'],
    run: (file) => [process.execPath, file],
  },
  python: { file: 'python/charge.py', probe: ['python3', '--version'], run: (file) => ['python3', file] },
  go: {
    file: 'go/charge.go',
    probe: ['go', 'version'],
    compile: (file, folder) => ['go', 'build', '-o', join(folder, 'charge'), file],
    run: (_, folder) => [join(folder, 'charge')],
  },
  java: {
    file: 'java/Charge.java',
    probe: ['javac', '-version'],
    compile: (file, folder) => ['javac', '-d', folder, file],
    run: (_, folder) => ['java', '-XX:TieredStopAtLevel=1', '-Xshare:auto', '-cp', folder, 'Charge'],
  },
  ruby: { file: 'ruby/charge.rb', probe: ['ruby', '--version'], run: (file) => ['ruby', file] },
}

export const LANGUAGES: readonly LanguageClient[] = Object.entries(RECIPES).map(([language, recipe]) => {
  const file = fileURLToPath(new URL(`../../examples/clients/${recipe.file}`, import.meta.url))
  let place = ''
  return {
    language,
    file,
    skip: answers(recipe.probe)
      ? false
      : `${recipe.probe[0]} is not installed; examples/clients/${recipe.file} needs it`,
    prepare(folder) {
      place = folder
      if (recipe.compile === undefined) return
      const [command = '', ...args] = recipe.compile(file, folder)
      const { status, stderr } = spawnSync(command, args, {
        env: plain({ GOCACHE: folder }),
        encoding: 'utf8',
      })
      if (status !== 0) throw new Error(`${file}: ${stderr}`)
    },
    async charge(url, key, { amount = 4200, tries = 6 } = {}) {
      const [command = '', ...args] = recipe.run(file, place)
      const child = spawn(command, [...args, String(amount), key], {
        env: plain({ URL: `${url}/v1/charges`, PAUSE: '0.1', TRIES: String(tries) }),
        stdio: ['ignore', 'pipe', 'pipe'],
      })
      const ended = once(child, 'close')
      const [out, err] = await Promise.all([text(child.stdout), text(child.stderr)])
      const [code] = (await ended) as [number | null]
      return { code, out, err }
    },
  }
})

function answers([command = '', ...args]: readonly string[]): boolean {
  return spawnSync(command, args, { env: plain() }).status === 0
}

/** Like a user's shell: without tap's loader and coverage. */
function plain(more: Readonly<Record<string, string>> = {}): NodeJS.ProcessEnv {
  const { NODE_OPTIONS: _, NODE_V8_COVERAGE: __, ...env } = process.env
  return { ...env, ...more }
}
