import type { FullView } from '../admin/schemas.ts'
import type { State } from '../core/record.ts'
import { type Args, type Command, FINE, finding, type Io } from './command.ts'
import { confirmed, DECIDING_OPTIONS, decidingOf } from './deciding.ts'
import { type RecordSource, SourceRefusal } from './record-source.ts'
import { openSource, SOURCE_OPTIONS } from './target-options.ts'
import { plain } from './terminal.ts'

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
  if (!(await confirmed(args, io, lines))) throw finding('not confirmed: nothing was changed')
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
