import { type Args, type Command, FINDING, FINE, type Io, usage } from './command.ts'
import { ADMIN_OPTIONS, adminSource } from './target-options.ts'
import { json, osUser } from './terminal.ts'

const OPTIONS = {
  reason: { value: 'TEXT', help: 'reason for the audit log' },
  by: { value: 'NAME', help: 'who, for the audit log (default: the user of this process)' },
}

export const drain: Command = {
  name: 'drain',
  usage: ['drain --admin URL --token-file FILE'],
  about: [
    'makes a running proxy fail its readiness while it keeps serving: for hooks before SIGTERM.',
    'Recorded in its audit log. `undrain` undoes it.',
  ],
  options: { ...OPTIONS, json: { value: null, help: 'for programs: {"draining": true}' }, ...ADMIN_OPTIONS },
  run: (args, io) => announce('drain', args, io),
}

export const undrain: Command = {
  name: 'undrain',
  usage: ['undrain --admin URL --token-file FILE'],
  about: [
    'undoes `drain`: the proxy is ready again. Recorded in its audit log;',
    'exit 1 if the proxy is shutting down, which cannot be undone',
  ],
  options: {
    ...OPTIONS,
    json: { value: null, help: 'for programs: {"draining": false}' },
    ...ADMIN_OPTIONS,
  },
  run: (args, io) => announce('undrain', args, io),
}

async function announce(what: 'drain' | 'undrain', args: Args, io: Io): Promise<number> {
  if (!args.has('admin')) throw usage(`${what} needs the running proxy: --admin URL --token-file FILE`)
  await using source = adminSource(args)
  const body = { by: osUser(), ...args.given(['by', 'reason']) }
  const reply = await source.ask({ method: 'POST', path: `/v1/${what}`, body })
  const { draining } = reply as { readonly draining: boolean }
  const text = draining
    ? `${source.name} is draining: it fails its readiness and keeps serving\n`
    : `${source.name} is ready again\n`
  io.out(args.has('json') ? json(reply) : text)
  return draining === (what === 'drain') ? FINE : FINDING
}
