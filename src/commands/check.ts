import type { Config } from '../config/config.ts'
import { type Change, changeLine, changesBetween, orphanedBy } from '../config/diff.ts'
import type { ReloadRule } from '../config/rows.ts'
import { type Args, type Command, FINDING, FINE, type Io, usage } from './command.ts'
import { configOf, printErrors, SERVE_OPTIONS, servingFlags } from './configuration.ts'

export const check: Command = {
  name: 'check',
  usage: [
    'check [FILE] [--against OLD] [--config FILE] [--upstream URL] [--listen ADDR] [--store URL] [--service NAME]',
  ],
  about: [
    'checks a configuration (default: the file of --config) as if it were served with these flags;',
    'exit 1 and all errors where there are any, or what a proxy that runs with OLD would need a restart for',
  ],
  options: {
    against: { value: 'OLD', help: 'the configuration that is in force: lists what a reload refuses' },
    ...SERVE_OPTIONS,
  },
  run: (args: Args, io: Io): number => {
    const [file = args.text('config'), ...more] = args.positionals
    if (more.length > 0) return usage(io, `check takes one file, found ${args.positionals.length}`)
    if (file === undefined) return usage(io, 'check needs a file')
    const loaded = configOf(file, servingFlags(args), io.env)
    if (!loaded.ok) return printErrors(io, loaded.errors)
    for (const warning of loaded.config.warnings) io.err(`warning: ${warning}\n`)
    const against = args.text('against')
    if (against === undefined) {
      io.out(`${file}: fine\n`)
      return FINE
    }
    const old = configOf(against, servingFlags(args), io.env)
    return old.ok ? compare(io, file, old.config, loaded.config) : printErrors(io, old.errors)
  },
}

const ADVICE: Readonly<Record<Exclude<ReloadRule, 'live'>, string>> = {
  restart: 'needs a restart',
  identifies: 'changes which record a request finds: restart, after waiting out ttl',
}

function compare(io: Io, file: string, before: Config, after: Config): number {
  const changes = changesBetween(before, after)
  const lines = (effect: Exclude<ReloadRule, 'live'>): string[] =>
    changes.filter(by(effect)).map((change) => `${changeLine(change)}: ${ADVICE[effect]}\n`)
  for (const orphaned of orphanedBy(before, after)) io.err(`warning: ${orphaned}\n`)
  const refused = [...lines('identifies'), ...lines('restart')]
  for (const line of refused) io.out(line)
  if (refused.length > 0) return FINDING
  io.out(`${file}: fine; a reload applies all of it\n`)
  for (const change of changes) io.out(`  ${changeLine(change)}\n`)
  return FINE
}

function by(effect: ReloadRule): (change: Change) => boolean {
  return (change) => change.effect === effect
}
