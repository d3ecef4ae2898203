import type { Config } from '../../src/config/config.ts'
import { type ConfigInput, formatConfigError, loadConfig } from '../../src/config/load.ts'

/** Fixtures name files relative to the repository, wherever a test is started. */
process.chdir(new URL('../..', import.meta.url).pathname)

export const FILES = 'test/config/files'
export const UPSTREAM = 'upstream: { url: http://127.0.0.1:3000 }\n'

export function load(text: string, input: Partial<ConfigInput> = {}): Config {
  const loaded = loadConfig({ file: 'c.yaml', text, env: {}, flags: {}, ...input })
  if (!loaded.ok) throw new Error(loaded.errors.map(formatConfigError).join('\n'))
  return loaded.config
}

export function errorsOf(text: string, input: Partial<ConfigInput> = {}): string[] {
  const loaded = loadConfig({ file: 'c.yaml', text, env: {}, flags: {}, ...input })
  return loaded.ok ? [] : loaded.errors.map(formatConfigError)
}

/** A file with one route, `lines` of it at its level. */
export function routeFile(...lines: readonly string[]): string {
  return `${UPSTREAM}routes:\n  - name: a\n    match: { path: /a }\n${lines.map((line) => `    ${line}\n`).join('')}`
}
