import { setFlagsFromString } from 'node:v8'
import { FileWatch } from '../config/files.ts'
import type { Loaded } from '../config/load.ts'
import { start } from '../main.ts'
import { type Logger, openLog } from '../observe/log.ts'
import { VERSION } from '../version.ts'
import { type Args, type Command, FINDING, FINE, type Io, npmHint, usage } from './command.ts'
import { configOf, invalidConfig, SERVE_OPTIONS, servingFlags } from './configuration.ts'

export const serve: Command = {
  name: 'serve',
  usage: ['[serve] [--config FILE] [--upstream URL] [--listen ADDR] [--store URL] [--service NAME]'],
  about: ['serves; flags override the file; with only --upstream it runs on the embedded store'],
  takes: null,
  options: { ...SERVE_OPTIONS, version: { value: null, help: 'prints the release' } },
  run: runServe,
}

/**
 * V8 allocates straight in the old generation where many objects of a site survived a young collection, as they do when a burst
 * begins: in one start of three it then kept every request until the next full collection, for good (docs/adr/0017).
 */
const NO_PRETENURING = '--no-allocation-site-pretenuring'

async function runServe(args: Args, io: Io): Promise<number> {
  if (args.has('version')) {
    io.out(`${VERSION}\n`)
    return FINE
  }
  if (args.positionals.length > 0)
    throw usage(`unexpected argument "${args.positionals[0]}"${npmHint(io.env)}`)
  if (!args.has('config') && !args.has('upstream'))
    throw usage(`nothing to serve: give --config FILE or --upstream URL${npmHint(io.env)}`)
  setFlagsFromString(NO_PRETENURING)
  const file = args.text('config') ?? null
  const read = (): Loaded => configOf(file, servingFlags(args), io.env)
  let log: Logger | null = null
  // A reload is remembered until the proxy has started.
  let asksReload = false
  let reload = (): void => void (asksReload = true)
  const onLost = (error: Error): void =>
    log?.warn(
      { error: String(error) },
      'cannot watch the folder of the configuration; polling the file instead',
    )
  // Before the file is read, so that no change is missed.
  using _watch = file === null ? null : new FileWatch(file, () => reload(), { onLost })
  const loaded = read()
  if (!loaded.ok) throw invalidConfig(loaded.errors)
  const { logger, output } = openLog(loaded.config.log)
  log = logger
  const { promise: asked, resolve: ask } = Promise.withResolvers<void>()
  const stop = (signal: NodeJS.Signals): void => {
    log.info({ signal }, 'stopping')
    ask()
  }
  // Before the start, so that a signal during it leads to a drain, too.
  process.on('SIGTERM', stop)
  process.on('SIGINT', stop)
  // Its default would end the process in mid-request.
  process.on('SIGHUP', () => reload())
  let proxy: Awaited<ReturnType<typeof start>>
  try {
    proxy = await start(loaded.config, log, output)
  } catch (error) {
    log.fatal(`cannot start: ${(error as Error).message}`)
    return FINDING
  }
  reload = () => {
    if (file === null) return log.warn('SIGHUP does nothing without a configuration file')
    try {
      proxy.reload(read())
    } catch (error) {
      log.error({ err: error }, 'internal error: the configuration was not reloaded')
    }
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
