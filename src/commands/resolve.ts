import { readFileSync } from 'node:fs'
import { type Resolving, resolutionFault } from '../admin/changes.ts'
import { counted } from '../admin/explain.ts'
import type { FullView, RecordView } from '../admin/schemas.ts'
import { quote } from '../config/units.ts'
import { type Args, type Command, FINE, finding, type Io, usage } from './command.ts'
import { confirmed, DECIDING_OPTIONS, type Deciding, decidingOf } from './deciding.ts'
import { openSource, SOURCE_OPTIONS } from './target-options.ts'
import { json, plain } from './terminal.ts'

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
  if (!(await confirmed(args, io, linesOf(record, resolving))))
    throw finding('not confirmed: nothing was changed')
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
