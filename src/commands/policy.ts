import { policyDocument } from '../describe/published.ts'
import { type Command, FINE, usage } from './command.ts'
import { configOf, printErrors, SERVE_OPTIONS, servingFlags } from './configuration.ts'

export const policy: Command = {
  name: 'policy',
  usage: ['policy [FILE] [--config FILE] [--upstream URL] [--listen ADDR] [--store URL] [--service NAME]'],
  about: [
    'prints what clients have to know of a configuration, by route, as JSON: which operations take a key, how long it counts,',
    'what is answered instead. It is what GET /.well-known/idempotency serves with wellKnown: true, and holds no secrets;',
    'exit 1 and all errors where the configuration has any',
  ],
  options: SERVE_OPTIONS,
  run: (args, io) => {
    const [file = args.text('config'), ...more] = args.positionals
    if (more.length > 0) return usage(io, `policy takes one file, found ${args.positionals.length}`)
    if (file === undefined) return usage(io, 'policy needs a file')
    const loaded = configOf(file, servingFlags(args), io.env)
    if (!loaded.ok) return printErrors(io, loaded.errors)
    io.out(`${JSON.stringify(policyDocument(loaded.config), null, 2)}\n`)
    return FINE
  },
}
