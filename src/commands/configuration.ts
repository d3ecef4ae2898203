import type { Config } from '../config/config.ts'
import { readConfigFile } from '../config/files.ts'
import { type ConfigError, formatConfigError, type Loaded, loadConfig } from '../config/load.ts'
import { type Args, Exit, FINDING, type Io, type Options } from './command.ts'

/** The flags of `serve`; `check` and `policy` read a file as if it were served with them. */
export const SERVE_OPTIONS: Options = {
  config: { value: 'FILE', help: 'YAML configuration' },
  upstream: { value: 'URL', help: 'the API behind it: http://, https:// or unix:/path' },
  listen: {
    value: 'ADDR',
    help: 'host:port for traffic; port 0 takes any free one (default 127.0.0.1:8080)',
  },
  store: {
    value: 'URL',
    help: 'memory:, sqlite:<path>, redis:// or rediss:// (default sqlite:./idempotency.db)',
  },
  service: {
    value: 'NAME',
    help: 'what it protects, such as payments; services on one store share no records',
  },
}

/** The configuration of `file` (null: of flags alone); flags override it. */
export function configOf(
  file: string | null,
  flags: Parameters<typeof loadConfig>[0]['flags'],
  env: Io['env'],
): Loaded {
  if (file === null) return loadConfig({ text: '', env, flags })
  const read = readConfigFile(file)
  return read.ok ? loadConfig({ file, text: read.text, env, flags }) : { ok: false, errors: [read.error] }
}

export function servingFlags(args: Args): Parameters<typeof configOf>[1] {
  return args.given(['upstream', 'listen', 'store', 'service'])
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
