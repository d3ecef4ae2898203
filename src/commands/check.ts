import { type Args, type Command, FINE, type Io, usage } from './command.ts'
import { configOf, SERVING, servingFlags, tellErrors } from './configuration.ts'

export const check: Command = {
  name: 'check',
  usage: ['check [FILE] [--config FILE] [--upstream URL] [--listen ADDR] [--store URL]'],
  about: [
    'checks a configuration (default: the file of --config) as if it were served with these flags;',
    'exit 1 and all errors where there are any',
  ],
  options: SERVING,
  run: (args: Args, io: Io): number => {
    const [file = args.text('config'), ...more] = args.positionals
    if (more.length > 0) return usage(io, `check takes one file, found ${args.positionals.length}`)
    if (file === undefined) return usage(io, 'check needs a file')
    const loaded = configOf(file, servingFlags(args), io.env)
    if (!loaded.ok) return tellErrors(io, loaded.errors)
    for (const warning of loaded.config.warnings) io.err(`warning: ${warning}\n`)
    io.out(`${file}: fine\n`)
    return FINE
  },
}
