import { readFileSync } from 'node:fs'
import { type Resolving, resolutionFault } from '../admin/changes.ts'
import { counted } from '../admin/explain.ts'
import type { FullView, RecordView } from '../admin/schemas.ts'
import { quote } from '../config/units.ts'
import { ID_BEGINNING, RECORD_ID, type State } from '../core/record.ts'
import { type Args, type Command, type CommandOptions, FINE, finding, type Io, usage } from './command.ts'
import { recordAt } from './inspect.ts'
import { type RecordSource, SourceRefusal } from './record-source.ts'
import { openSource, SOURCE_OPTIONS } from './target-options.ts'
import { json, osUser, plain } from './terminal.ts'

/** Options of commands that decide about a record. */
const DECIDING_OPTIONS = {
  reason: { value: 'TEXT', help: 'reason for the audit log; required' },
  by: { value: 'NAME', help: 'who decides, for the audit log (default: the user of this process)' },
  version: {
    value: 'N',
    help: 'only if the record is at this version (default: the current one)',
  },
  yes: { value: null, help: 'does not ask for confirmation; required without a terminal' },
} satisfies CommandOptions

export const resolve: Command = {
  name: 'resolve',
  usage: [
    'resolve ID --completed FILE --reason TEXT (--admin URL --token-file FILE | --config FILE)',
    'resolve ID --retryable --reason TEXT (--admin URL --token-file FILE | --config FILE)',
  ],
  about: [
    'resolves a record whose outcome is unknown; recorded in the audit log, with who and why.',
    'FILE: JSON {"status": 201, "headers": [["Content-Type", "application/json"]], "body": "{}"}, or "bodyBase64".',
    'exit 1 if its outcome is not unknown, or was changed meanwhile',
  ],
  takes: 'one record id',
  options: {
    completed: { value: 'FILE', help: 'it was done; FILE holds the response that retries receive' },
    retryable: { value: null, help: 'it was not done; a retry with the same key is executed' },
    ...DECIDING_OPTIONS,
    json: { value: null, help: 'for programs: the resulting record' },
    ...SOURCE_OPTIONS,
  },
  run: runResolve,
}

async function runResolve(args: Args, io: Io): Promise<number> {
  const { id, version, decider } = await decidingOf(args, io, 'resolve')
  const resolving = resolvingOf(args, decider)
  await using source = await openSource(args, io, true)
  const record = (await source.ask({ method: 'GET', path: `/v1/records/${id}` })) as FullView
  if (record.state !== 'unknown')
    throw finding(`${source.name}: not_unknown: the record is ${record.state}; there is nothing to decide`)
  await confirm(args, io, linesOf(record, resolving))
  const written = (await source.ask({
    method: 'POST',
    path: `/v1/records/${id}/resolve`,
    version: version ?? record.version,
    body: resolving,
  })) as RecordView
  io.out(args.has('json') ? json(written) : `${id} is ${written.state} now. ${meaning(resolving)}\n`)
  return FINE
}

function meaning({ response }: Resolving): string {
  return response === undefined
    ? 'A retry with its key is executed.'
    : `Retries with its key are answered ${response.status}; nothing is executed.`
}

const FILE = '{"status", "headers", "body" | "bodyBase64"}'

/** The decision, checked as the API would check it before anything is sent. */
function resolvingOf(args: Args, decider: Deciding['decider']): Resolving {
  const file = args.text('completed')
  if ((file !== undefined) === args.has('retryable'))
    throw usage(`found ${file === undefined ? 'neither' : 'both'}; allowed: --completed FILE or --retryable`)
  let resolving: unknown = { outcome: 'retryable', ...decider }
  if (file !== undefined) {
    let response: unknown
    try {
      response = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(readFileSync(file)))
    } catch (error) {
      const why =
        error instanceof SyntaxError || error instanceof TypeError
          ? 'no JSON in UTF-8'
          : (error as Error).message
      throw usage(`--completed: ${quote(file)}: found ${why}; allowed: ${FILE}`)
    }
    resolving = { outcome: 'completed', response, ...decider }
  }
  const detail = resolutionFault(resolving)
  if (detail === null) return resolving as Resolving
  throw usage(file === undefined ? detail : `--completed: ${quote(file)}: ${detail}; allowed: ${FILE}`)
}

function linesOf(record: FullView, resolving: Resolving): string[] {
  const { method, path, route, createdAt, attempts, shadowed, lastError } = record
  const shadow =
    shadowed === null || shadowed.duplicates === 0
      ? ''
      : ` and at least ${shadowed.duplicates} more in shadow mode`
  const sent = `sent upstream in ${counted(attempts, 'attempt')}${shadow}`
  const claim =
    resolving.response === undefined
      ? 'This records the request as NOT executed. If it was, a retry executes it a second time.'
      : `This records the request as EXECUTED; retries are answered ${resolving.response.status}. If it was not, it never will be under this key.`
  return [
    `${plain(method)} ${plain(path)}, route ${plain(route)}, of ${createdAt}, ${sent}`,
    `unknown${lastError === null ? '' : `: ${plain(lastError)}`}`,
    claim,
  ]
}

export const deleteCommand: Command = {
  name: 'delete',
  usage: ['delete ID --reason TEXT (--admin URL --token-file FILE | --config FILE)'],
  about: [
    'deletes a record, even an unreadable one: a retry with its key is executed, whatever happened before.',
    'Recorded in the audit log, with who and why.',
    'exit 1 if its request is still running, or it was changed meanwhile',
  ],
  takes: 'one record id',
  options: { ...DECIDING_OPTIONS, ...SOURCE_OPTIONS },
  run: runDelete,
}

async function runDelete(args: Args, io: Io): Promise<number> {
  const { id, version, decider } = await decidingOf(args, io, 'delete')
  await using source = await openSource(args, io, true)
  const found = await foundAt(source, `/v1/records/${id}`)
  const lines = [...found.lines, found.state === null ? UNTOLD : MEANING[found.state]]
  await confirm(args, io, lines)
  await source.ask({
    method: 'DELETE',
    path: `/v1/records/${id}`,
    version: version ?? found.version,
    body: decider,
  })
  io.out(`${id} is deleted. A retry with its key is executed.\n`)
  return FINE
}

interface RecordToDelete {
  readonly version: number
  /** Null: it cannot be read. */
  readonly state: State | null
  readonly lines: readonly string[]
}

async function foundAt(source: RecordSource, path: string): Promise<RecordToDelete> {
  try {
    const { version, state, method, route, createdAt, ...record } = (await source.ask({
      method: 'GET',
      path,
    })) as FullView
    const request = `${plain(method)} ${plain(record.path)}, route ${plain(route)}, of ${createdAt}`
    return { version, state, lines: [request, state] }
  } catch (error) {
    if (!(error instanceof SourceRefusal) || error.version === null) throw error
    return { version: error.version, state: null, lines: [`unreadable: ${plain(error.detail)}`] }
  }
}

/** What deleting the record means in each state. */
const MEANING: Readonly<Record<State, string>> = {
  in_progress: 'Its request is running.',
  completed: 'It WAS executed. A retry executes it a second time.',
  failed_retryable: 'It was not executed: a retry is executed anyway.',
  unknown: 'It is unknown whether it was executed. If it was, a retry executes it a second time.',
  expired: 'It WAS executed, and its answer has expired. A retry executes it a second time.',
}
const UNTOLD =
  'It does not show whether it was executed or is still running. If so, a retry executes it a second time.'

interface Deciding {
  readonly id: string
  /** Null: the version that was read. */
  readonly version: number | null
  readonly decider: { readonly reason: string; readonly by: string }
}

/** @throws {Exit} on wrong usage; the beginning of an id is answered with the whole id. */
async function decidingOf(args: Args, io: Io, command: string): Promise<Deciding> {
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

/** Shows what is known about the record and what the decision means. @throws {Exit} unless the user agrees. */
async function confirm(args: Args, io: Io, lines: readonly string[]): Promise<void> {
  if (args.has('yes')) return
  io.err(lines.map((line) => `${line}\n`).join(''))
  const isAgreed = (await io.ask?.('Type yes to confirm: '))?.trim() === 'yes'
  if (!isAgreed) throw finding('not confirmed: nothing was changed')
}
