import { setFlagsFromString } from 'node:v8'
import type { Loaded } from '../config/load.ts'
import { FileWatch } from '../config/watch.ts'
import { start } from '../main.ts'
import { type Logger, openLog } from '../observe/log.ts'
import { VERSION } from '../version.ts'
import { type Args, type Command, FINDING, FINE, type Io, usage } from './command.ts'
import { configOf, printErrors, SERVE_OPTIONS, servingFlags } from './configuration.ts'
import { npmHint } from './npm-flags.ts'

export const serve: Command = {
  name: 'serve',
  usage: ['[serve] [--config FILE] [--upstream URL] [--listen ADDR] [--store URL] [--service NAME]'],
  about: ['serves; flags go over the file, with only --upstream it runs on the embedded store'],
  options: { ...SERVE_OPTIONS, version: { value: null, help: 'prints the release' } },
  run: runServe,
}

/**
 * V8 makes objects in the old generation where many of a place's objects outlived a young collection, and the first moments of a
 * burst look so: in one start of three it then kept every request until the next full collection, for good (docs/adr/0017).
 */
const NO_PRETENURING = '--no-allocation-site-pretenuring'

async function runServe(args: Args, io: Io): Promise<number> {
  if (args.has('version')) {
    io.out(`${VERSION}\n`)
    return FINE
  }
  if (args.positionals.length > 0)
    return usage(io, `unexpected argument "${args.positionals[0]}"${npmHint(io.env)}`)
  if (!args.has('config') && !args.has('upstream'))
    return usage(io, `nothing to serve: give --config FILE or --upstream URL${npmHint(io.env)}`)
  setFlagsFromString(NO_PRETENURING)
  const file = args.text('config') ?? null
  const read = (): Loaded => configOf(file, servingFlags(args), io.env)
  let log: Logger | null = null
  // Until it has started, a reload is remembered.
  let asksReload = false
  let reload = (): void => void (asksReload = true)
  const onLost = (error: Error): void =>
    log?.warn(
      { error: String(error) },
      'the folder of the configuration cannot be watched; the file is looked at',
    )
  // Before the file is read, so that no change is missed.
  using _watch = file === null ? null : new FileWatch(file, () => reload(), { onLost })
  const loaded = read()
  if (!loaded.ok) return printErrors(io, loaded.errors)
  const { logger, output } = openLog(loaded.config.log)
  log = logger
  const { promise: asked, resolve: ask } = Promise.withResolvers<void>()
  const stop = (signal: NodeJS.Signals): void => {
    log.info({ signal }, 'stopping')
    ask()
  }
  // Before the start, so that a signal during it ends in a drain, too.
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
