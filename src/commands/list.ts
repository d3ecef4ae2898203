import type { PageView, RecordView } from '../admin/schemas.ts'
import { RECORD_ID, STATES } from '../core/record.ts'
import { type Args, type Command, FINDING, FINE, type Io, usage } from './command.ts'
import { listRecords } from './record-source.ts'
import { openSource, SOURCE_OPTIONS } from './target-options.ts'
import { json, plain, span, table } from './terminal.ts'

export const list: Command = {
  name: 'list',
  usage: [
    'list [--state S,S] [--route NAME] [--label VALUE] [--age 1h] (--admin URL --token-file FILE | --config FILE | --store URL)',
  ],
  about: [
    'lists records: with only in_progress and unknown, the longest due first; otherwise in no order.',
    'exit 1 if some cannot be read',
  ],
  options: {
    state: { value: 'S,S', help: `only these states: ${STATES.join(', ')}` },
    route: { value: 'NAME', help: 'only this route' },
    label: { value: 'VALUE', help: 'only requests with this label (record.label of the route)' },
    age: { value: 'DURATION', help: 'created at least this long ago, such as 90s, 1h, 7d' },
    'dead-lettered': { value: null, help: 'only records that stay unknown until an operator decides' },
    limit: { value: 'N', help: 'at most about this many (default 100)' },
    cursor: { value: 'CURSOR', help: 'continues a listing with the same filter' },
    json: { value: null, help: 'for programs: {"records", "unreadable", "next", "now"}' },
    ...SOURCE_OPTIONS,
  },
  run: runList,
}

async function runList(args: Args, io: Io): Promise<number> {
  const limit = args.text('limit') ?? '100'
  if (!/^[1-9]\d{0,6}$/.test(limit))
    throw usage(`--limit: found ${JSON.stringify(limit)}; allowed: a whole number from 1 to 9999999`)
  await using source = await openSource(args, io)
  const page = await listRecords(source, queryOf(args), Number(limit))
  if (args.has('json')) io.out(json(page))
  else print(io, page, args.text('service'))
  return page.unreadable.length === 0 ? FINE : FINDING
}

function queryOf(args: Args): Record<string, string> {
  const query = args.given(['state', 'route', 'label', 'age', 'cursor'])
  return args.has('dead-lettered') ? { ...query, deadLettered: 'true' } : query
}

const HEAD = ['RECORD', 'STATE', 'ROUTE', 'REQUEST', 'AGE', 'ATTEMPTS', 'ANSWER', 'WHY']

function print(io: Io, { records, unreadable, next, now }: PageView, service?: string): void {
  // A misspelled one has none.
  if (records.length === 0) io.out(`no records${service === undefined ? '' : ` of service ${service}`}\n`)
  else {
    // Most routes have none.
    const isLabelled = records.some(({ label }) => label != null)
    const labelled = (cells: string[], label: string): string[] =>
      isLabelled ? cells.toSpliced(4, 0, label) : cells
    const rows = records.map((record) => labelled(row(record, Date.parse(now)), record.label ?? '-'))
    io.out(table([labelled(HEAD, 'LABEL'), ...rows]))
  }
  for (const id of unreadable)
    io.err(`unreadable: ${RECORD_ID.test(id) ? id : plain(id)}: this version cannot read it\n`)
  if (next !== null) io.err(`there are more: --cursor ${plain(next)}\n`)
}

function row(
  { id, state, route, method, path, createdAt, attempts, response, lastError }: RecordView,
  now: number,
): string[] {
  const answer = response === null ? '-' : String(response.status)
  const age = span(now - Date.parse(createdAt))
  return [id, state, route, `${method} ${path}`, age, String(attempts), answer, lastError ?? '']
}
