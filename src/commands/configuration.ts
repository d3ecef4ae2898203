import type { Config } from '../config/config.ts'
import { readConfigFile } from '../config/files.ts'
import { type ConfigError, formatConfigError, type Loaded, loadConfig } from '../config/load.ts'
import { type Args, Exit, FINDING, type Io, SERVE_OPTIONS } from './command.ts'

/** The configuration of `file` (null: of flags alone); flags override it. */
export function configOf(
  file: string | null,
  flags: Parameters<typeof loadConfig>[0]['flags'],
  env: Io['env'],
  isReload = false,
): Loaded {
  if (file === null) return loadConfig({ text: '', env, flags })
  const read = readConfigFile(file)
  return read.ok
    ? loadConfig({ file, text: read.text, env, flags, isReload })
    : { ok: false, errors: [read.error] }
}

export function servingFlags(args: Args): Parameters<typeof configOf>[1] {
  const { config: _, ...overriding } = SERVE_OPTIONS
  return args.given(Object.keys(overriding) as (keyof typeof overriding)[])
}

/** @throws {Exit} */
export function validConfig(...from: Parameters<typeof configOf>): Config {
  const loaded = configOf(...from)
  if (!loaded.ok) throw invalidConfig(loaded.errors)
  return loaded.config
}

export function invalidConfig(errors: readonly ConfigError[]): Exit {
  return new Exit(FINDING, errors.map((error) => `${formatConfigError(error)}\n`).join(''))
}
