import { layoutScript } from '../store/postgres-layout.ts'
import { type Command, FINE, usage } from './command.ts'

export const migrate: Command = {
  name: 'migrate',
  usage: ['migrate --print'],
  about: [
    'prints the SQL that makes the schema `idempotency` of the PostgreSQL store, in one transaction; where it is there already, it changes',
    'nothing. A proxy whose role may make it does so itself at its start',
  ],
  options: { print: { value: null, help: 'to standard output; nothing is changed' } },
  run: (args, io) => {
    if (!args.has('print')) throw usage('migrate: found nothing; allowed: --print')
    io.out(layoutScript())
    return FINE
  },
}
