import { type Args, type Command, FINE, type Io, usage } from './command.ts'
import { ADMIN_OPTIONS, adminSource } from './target-options.ts'
import { json, osUser } from './terminal.ts'

export const drain: Command = {
  name: 'drain',
  usage: ['drain --admin URL --token-file FILE'],
  about: [
    'makes a running proxy fail its readiness while it keeps serving: for hooks before SIGTERM.',
    'Recorded in its audit log.',
  ],
  options: {
    reason: { value: 'TEXT', help: 'reason for the audit log' },
    by: { value: 'NAME', help: 'who, for the audit log (default: the user of this process)' },
    json: { value: null, help: 'for programs: {"draining": true}' },
    ...ADMIN_OPTIONS,
  },
  run: runDrain,
}

async function runDrain(args: Args, io: Io): Promise<number> {
  if (!args.has('admin')) throw usage('drain needs the running proxy: --admin URL --token-file FILE')
  await using source = adminSource(args)
  const body = { by: osUser(), ...args.given(['by', 'reason']) }
  const reply = await source.ask({ method: 'POST', path: '/v1/drain', body })
  const text = `${source.name} is draining: it fails its readiness and keeps serving\n`
  io.out(args.has('json') ? json(reply) : text)
  return FINE
}
