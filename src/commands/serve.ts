import { availableParallelism } from 'node:os'
import { type Config, workersOf } from '../config/config.ts'
import { FileWatch } from '../config/files.ts'
import type { Loaded } from '../config/load.ts'
import { type Proxy, start, tuneForTraffic } from '../main.ts'
import { type Logger, type LogOutput, openLog } from '../observe/log.ts'
import { VERSION } from '../version.ts'
import type { Begin } from '../workers/messages.ts'
import {
  type Args,
  type Command,
  FINDING,
  FINE,
  type Io,
  npmHint,
  SERVE_OPTIONS,
  SERVE_USAGE,
  usage,
} from './command.ts'
import { configOf, invalidConfig, servingFlags } from './configuration.ts'

export const serve: Command = {
  name: 'serve',
  usage: [`[serve] ${SERVE_USAGE} [--accept-rescope]`],
  about: ['serves; flags override the file; with only --upstream it runs on the embedded store'],
  takes: null,
  options: {
    ...SERVE_OPTIONS,
    'accept-rescope': {
      value: null,
      help: 'claims beside replicas that identify records differently: their keys may execute twice (docs/reload.md)',
    },
    version: { value: null, help: 'prints the version' },
  },
  run: runServe,
}

async function runServe(args: Args, io: Io): Promise<number> {
  if (args.has('version')) {
    io.out(`${VERSION}\n`)
    return FINE
  }
  if (args.positionals.length > 0)
    throw usage(`unexpected argument "${args.positionals[0]}"${npmHint(io.env)}`)
  if (!args.has('config') && !args.has('upstream'))
    throw usage(`nothing to serve: give --config FILE or --upstream URL${npmHint(io.env)}`)
  const file = args.text('config') ?? null
  const read = (isReload: boolean): Loaded => configOf(file, servingFlags(args), io.env, isReload)
  // A reload requested before the proxy has started.
  let asksReload = false
  let reload = (): void => void (asksReload = true)
  // Before the file is read, so that no change is missed.
  using _watch = file === null ? null : new FileWatch(file, () => reload())
  const loaded = read(false)
  if (!loaded.ok) throw invalidConfig(loaded.errors)
  const { logger: log, output } = openLog(loaded.config.log)
  const { promise: asked, resolve: ask } = Promise.withResolvers<void>()
  const stop = (signal: NodeJS.Signals): void => {
    log.info({ signal }, 'stopping')
    ask()
  }
  // Before the start, so that a signal during it also drains.
  process.on('SIGTERM', stop)
  process.on('SIGINT', stop)
  // By default, SIGHUP ends the process.
  process.on('SIGHUP', () => reload())
  const { config, text } = loaded
  const source = { ...(file === null ? {} : { file }), text, flags: servingFlags(args) }
  let proxy: Proxy
  try {
    proxy = await startAny(config, log, output, { source, acceptsRescope: args.has('accept-rescope') })
  } catch (error) {
    log.fatal(`cannot start: ${(error as Error).message}`)
    return FINDING
  }
  void proxy.settled.then(() => tuneForTraffic(config.store.url))
  reload = () => {
    if (file === null) return log.warn('SIGHUP does nothing without a configuration file')
    const reloading = async (): Promise<void> => proxy.reload(read(true))
    reloading().catch((error: unknown) =>
      log.error({ err: error }, 'internal error: the configuration was not reloaded'),
    )
  }
  if (asksReload) reload()
  await asked
  try {
    await proxy.drain()
  } catch (error) {
    log.fatal({ err: error }, 'the drain failed')
    return FINDING
  }
  return FINE
}

/** In one process, or in several, whose code is then loaded (docs/adr/0074). */
async function startAny(
  config: Config,
  log: Logger,
  output: LogOutput,
  begin: { readonly source: Begin['source']; readonly acceptsRescope: boolean },
): Promise<Proxy> {
  const count = workersOf(config, availableParallelism())
  const { acceptsRescope } = begin
  if (count === 1) return start(config, log, output, { acceptsRescope })
  const { startWithWorkers } = await import('../workers/first.ts')
  return startWithWorkers(config, log, output, { begin, count })
}
