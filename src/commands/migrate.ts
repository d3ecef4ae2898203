import { layoutScript } from '../store/postgres/layout.ts'
import { type Command, FINE, usage } from './command.ts'

export const migrate: Command = {
  name: 'migrate',
  usage: ['migrate --print'],
  about: [
    'prints the SQL that creates the schema `idempotency` of the PostgreSQL store, in one transaction; if the schema exists, it changes',
    'nothing. A proxy whose role may create it does so at startup',
  ],
  options: { print: { value: null, help: 'to standard output; nothing is changed' } },
  run: (args, io) => {
    if (!args.has('print')) throw usage('migrate: found nothing; allowed: --print')
    io.out(layoutScript())
    return FINE
  },
}
