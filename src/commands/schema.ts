import { FILE } from '../config/properties.ts'
import { jsonSchema } from '../config/rows.ts'
import { type Command, FINE, usage } from './command.ts'

export const schema: Command = {
  name: 'schema',
  usage: ['schema'],
  about: ["prints the configuration's JSON Schema"],
  options: {},
  run: (args, io) => {
    if (args.positionals.length > 0) return usage(io, `unexpected argument "${args.positionals[0]}"`)
    io.out(jsonSchema(FILE))
    return FINE
  },
}
