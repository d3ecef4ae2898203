#!/usr/bin/env node
import { parseArgs } from 'node:util'
import { readConfigFile } from './config/files.ts'
import { type ConfigError, formatConfigError, loadConfig } from './config/load.ts'
import { publishedSchema } from './config/schema.ts'
import { start } from './main.ts'
import { openLog } from './observe/log.ts'
import { VERSION } from './version.ts'

/** Exit codes (contract §11). */
const FINE = 0
const FINDING = 1
const USAGE = 2

const HELP = `idempotency-proxy ${VERSION}: makes any HTTP API safe to retry

  idempotency-proxy [serve] [--config FILE] [--upstream URL] [--listen ADDR] [--store URL]
      serves; flags go over the file, with only --upstream it runs on the embedded store
  idempotency-proxy check [FILE]
      checks a configuration (default: the file of --config); exit 1 and all errors where there are any
  idempotency-proxy schema
      prints the configuration's JSON Schema

  --config FILE     YAML configuration
  --upstream URL    the API behind it: http://, https:// or unix:/path
  --listen ADDR     host:port for traffic; port 0 takes any free one (default 127.0.0.1:8080)
  --store URL       memory:, sqlite:<path>, redis:// or rediss:// (default sqlite:./idempotency.db)
  --help, --version

Exit codes: 0 fine, 1 a finding, 2 usage.
`

const COMMANDS: Readonly<Record<string, (args: string[]) => Promise<number> | number>> = {
  serve,
  check,
  schema,
}

const OPTIONS = {
  config: { type: 'string' },
  upstream: { type: 'string' },
  listen: { type: 'string' },
  store: { type: 'string' },
  help: { type: 'boolean', short: 'h' },
  version: { type: 'boolean' },
} as const

type Flags = { [name in 'config' | 'upstream' | 'listen' | 'store']?: string | undefined }

async function serve(args: string[]): Promise<number> {
  const parsed = parse(args)
  if (parsed === null) return USAGE
  if (parsed.values.help === true) return say(HELP)
  if (parsed.values.version === true) return say(`${VERSION}\n`)
  if (parsed.positionals.length > 0) return usage(`unexpected argument "${parsed.positionals[0]}"`)
  if (parsed.values.config === undefined && parsed.values.upstream === undefined)
    return usage('nothing to serve: give --config FILE or --upstream URL')
  const loaded = load(parsed.values.config ?? null, parsed.values)
  if (!loaded.ok) return tell(loaded.errors)
  const log = openLog(loaded.config.log)
  const { promise: asked, resolve: ask } = Promise.withResolvers<void>()
  const stop = (signal: NodeJS.Signals): void => {
    log.info({ signal }, 'stopping')
    ask()
  }
  // Before the start, so that a signal during it ends in a drain, too.
  process.on('SIGTERM', stop)
  process.on('SIGINT', stop)
  // Its default would end the process in mid-request; it is what people send to reload.
  process.on('SIGHUP', () =>
    log.warn('SIGHUP does nothing: this version reads its configuration at start only'),
  )
  let proxy: Awaited<ReturnType<typeof start>>
  try {
    proxy = await start(loaded.config, log)
  } catch (error) {
    log.fatal(`cannot start: ${(error as Error).message}`)
    return FINDING
  }
  await asked
  try {
    await proxy.drain()
  } catch (error) {
    log.fatal({ err: error }, 'the drain failed')
    return FINDING
  }
  return FINE
}

function check(args: string[]): number {
  const parsed = parse(args)
  if (parsed === null) return USAGE
  if (parsed.values.help === true) return say(HELP)
  const [file = parsed.values.config, ...more] = parsed.positionals
  if (more.length > 0) return usage(`check takes one file, found ${parsed.positionals.length}`)
  if (file === undefined) return usage('check needs a file')
  const loaded = load(file, parsed.values)
  if (!loaded.ok) return tell(loaded.errors)
  for (const warning of loaded.config.warnings) process.stderr.write(`warning: ${warning}\n`)
  return say(`${file}: fine\n`)
}

function schema(args: string[]): number {
  const parsed = parse(args)
  if (parsed === null) return USAGE
  if (parsed.values.help === true) return say(HELP)
  if (parsed.positionals.length > 0) return usage(`unexpected argument "${parsed.positionals[0]}"`)
  return say(publishedSchema())
}

function load(file: string | null, flags: Flags): ReturnType<typeof loadConfig> {
  const { upstream, listen, store } = flags
  const rest = { env: process.env, flags: { upstream, listen, store } }
  if (file === null) return loadConfig({ text: '', ...rest })
  const read = readConfigFile(file)
  return read.ok ? loadConfig({ file, text: read.text, ...rest }) : { ok: false, errors: [read.error] }
}

function parse(
  args: string[],
): ReturnType<typeof parseArgs<{ options: typeof OPTIONS; allowPositionals: true }>> | null {
  try {
    return parseArgs({ args, options: OPTIONS, allowPositionals: true })
  } catch (error) {
    usage((error as Error).message)
    return null
  }
}

function tell(errors: readonly ConfigError[]): number {
  for (const error of errors) process.stderr.write(`${formatConfigError(error)}\n`)
  return FINDING
}

function usage(message: string): number {
  process.stderr.write(`idempotency-proxy: ${message}\nTry --help.\n`)
  return USAGE
}

function say(text: string): number {
  process.stdout.write(text)
  return FINE
}

const [major = 0, minor = 0] = process.versions.node.split('.').map(Number)
if (major < 24 || (major === 24 && minor < 13)) {
  process.stderr.write(`idempotency-proxy needs Node 24.13 or newer; this is ${process.version}.\n`)
  process.exit(USAGE)
}

const [first = '', ...rest] = process.argv.slice(2)
const command = COMMANDS[first]
if (command !== undefined) process.exitCode = await command(rest)
else if (first !== '' && !first.startsWith('-'))
  process.exitCode = usage(`unknown command "${first}"; known are ${Object.keys(COMMANDS).join(', ')}`)
else process.exitCode = await serve(process.argv.slice(2))
if (process.exitCode !== undefined) process.exit()
