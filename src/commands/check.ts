import type { Config } from '../config/config.ts'
import { changeLine, changesBetween, orphanedBy } from '../config/diff.ts'
import { FILE } from '../config/properties.ts'
import { jsonSchema, type ReloadRule } from '../config/rows.ts'
import { isSharedStore } from '../config/urls.ts'
import { differencesBetween, identificationOf, keysUnder } from '../core/identification.ts'
import { policyDocument } from '../describe/published.ts'
import {
  type Args,
  type Command,
  FINDING,
  FINE,
  type Io,
  SERVE_OPTIONS,
  SERVE_USAGE,
  usage,
} from './command.ts'
import { servingFlags, validConfig } from './configuration.ts'

export const check: Command = {
  name: 'check',
  usage: [`check [FILE] [--against OLD] ${SERVE_USAGE}`],
  about: [
    'checks a configuration (default: the file of --config) as if it were served with these flags;',
    'exit 1 with all errors, or with --against all changes for which a proxy that runs with OLD needs a restart',
  ],
  takes: 'one file',
  options: {
    against: { value: 'OLD', help: 'the configuration in force: lists what a reload refuses' },
    ...SERVE_OPTIONS,
  },
  run: (args, io) =>
    withConfig('check', args, io, (file, config) => {
      for (const warning of config.warnings) io.err(`warning: ${warning}\n`)
      const against = args.text('against')
      if (against === undefined) {
        io.out(`${file}: fine\n`)
        return FINE
      }
      return compare(io, file, validConfig(against, servingFlags(args), io.env), config)
    }),
}

export const policy: Command = {
  name: 'policy',
  usage: [`policy [FILE] ${SERVE_USAGE}`],
  about: [
    'prints what clients need to know about a configuration as JSON, by route: which operations take a key, how long it is valid,',
    'and how retries are answered. GET /.well-known/idempotency serves the same with wellKnown: true; it holds no secrets.',
    'exit 1 with all errors if the configuration is invalid',
  ],
  takes: 'one file',
  options: SERVE_OPTIONS,
  run: (args, io) =>
    withConfig('policy', args, io, (_, config) => {
      io.out(`${JSON.stringify(policyDocument(config), null, 2)}\n`)
      return FINE
    }),
}

export const schema: Command = {
  name: 'schema',
  usage: ['schema'],
  about: ["prints the configuration's JSON Schema"],
  options: {},
  run: (_, io) => {
    io.out(jsonSchema(FILE))
    return FINE
  },
}

export const migrate: Command = {
  name: 'migrate',
  usage: ['migrate --print'],
  about: [
    'prints the SQL that creates the schema `idempotency` of the PostgreSQL store, in one transaction; if the schema exists, it changes',
    'nothing. A proxy whose role may create it does so at startup',
  ],
  options: { print: { value: null, help: 'to standard output; nothing is changed' } },
  run: async (args, io) => {
    if (!args.has('print')) throw usage('migrate: found nothing; allowed: --print')
    const { layoutScript } = await import('../store/postgres/layout.ts')
    io.out(layoutScript())
    return FINE
  },
}

function withConfig(name: string, args: Args, io: Io, run: (file: string, config: Config) => number): number {
  const [file = args.text('config')] = args.positionals
  if (file === undefined) throw usage(`${name} needs a file`)
  return run(file, validConfig(file, servingFlags(args), io.env))
}

const ADVICE: Readonly<Record<Exclude<ReloadRule, 'live'>, string>> = {
  restart: 'needs a restart',
  identifies: 'changes which record a request finds: restart, after ttl has passed',
}

function compare(io: Io, file: string, before: Config, after: Config): number {
  const changes = changesBetween(before, after)
  for (const orphaned of orphanedBy(before, after)) io.err(`warning: ${orphaned}\n`)
  const refused = (['identifies', 'restart'] as const).flatMap((rule) =>
    changes
      .filter(({ effect }) => effect === rule)
      .map((change) => `${changeLine(change)}: ${ADVICE[rule]}\n`),
  )
  for (const line of refused) io.out(line)
  const [own, others] = [identificationOf(after), identificationOf(before)]
  if (!own.digest.equals(others.digest) && isSharedStore(after.store.url)) {
    const differences = differencesBetween(own.parts, others.parts)
    io.out(
      `${differences.join(', ')}: replicas with this file do not claim until all with the old one have ended: replace them all at once (Recreate), or start with --accept-rescope, and ${keysUnder(differences)} may execute twice\n`,
    )
  }
  if (refused.length > 0) return FINDING
  io.out(`${file}: fine; a reload applies all of it\n`)
  for (const change of changes) io.out(`  ${changeLine(change)}\n`)
  return FINE
}
