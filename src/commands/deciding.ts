import { quote } from '../config/units.ts'
import { ID_BEGINNING, RECORD_ID } from '../core/record.ts'
import { type Args, type CommandOptions, type Io, usage } from './command.ts'
import { recordAt } from './inspect.ts'
import { openSource } from './target-options.ts'
import { osUser } from './terminal.ts'

/** Options of commands that decide about a record. */
export const DECIDING_OPTIONS = {
  reason: { value: 'TEXT', help: 'reason for the audit log; required' },
  by: { value: 'NAME', help: 'who decides, for the audit log (default: the user of this process)' },
  version: {
    value: 'N',
    help: 'only if the record is at this version (default: the current one)',
  },
  yes: { value: null, help: 'does not ask for confirmation; required without a terminal' },
} satisfies CommandOptions

export interface Deciding {
  readonly id: string
  /** Null: the version that was read. */
  readonly version: number | null
  readonly decider: { readonly reason: string; readonly by: string }
}

/** @throws {Exit} on wrong usage; the beginning of an id is answered with the whole id. */
export async function decidingOf(args: Args, io: Io, command: string): Promise<Deciding> {
  const [id = ''] = args.positionals
  if (ID_BEGINNING.test(id) && !RECORD_ID.test(id)) {
    await using source = await openSource(args, io, true)
    const found = await recordAt(source, id)
    throw usage(`${command}: give the whole id: ${found.path.slice('/v1/records/'.length)}`)
  }
  if (!RECORD_ID.test(id))
    throw usage(
      `${command} needs a whole record id of 43 characters${id === '' ? '' : ', which this is not'}; inspect finds it, from its beginning or from the key`,
    )
  const version = args.text('version')
  if (version !== undefined && !/^\d{1,15}$/.test(version))
    throw usage(`--version: found ${quote(version)}; allowed: a whole number`)
  const reason = args.text('reason') ?? ''
  if (reason.trim() === '') throw usage('--reason is required; it goes into the audit log')
  if (io.ask === null && !args.has('yes')) throw usage('there is no terminal for the confirmation: add --yes')
  return {
    id,
    version: version === undefined ? null : Number(version),
    decider: { reason, by: args.text('by') ?? osUser() },
  }
}

/** Shows what is known about the record and what the decision means. */
export async function confirmed(args: Args, io: Io, lines: readonly string[]): Promise<boolean> {
  if (args.has('yes')) return true
  io.err(lines.map((line) => `${line}\n`).join(''))
  return (await io.ask?.('Type yes to confirm: '))?.trim() === 'yes'
}
