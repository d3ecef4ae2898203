import { readFileSync } from 'node:fs'
import { counted } from '../admin/explain.ts'
import type { Lookup } from '../admin/lookup.ts'
import type { FullView, HistoryView, RecordView } from '../admin/schemas.ts'
import { quote } from '../config/units.ts'
import { TOKEN } from '../core/headers.ts'
import { ID_BEGINNING, RECORD_ID } from '../core/record.ts'
import { type Args, type Command, Exit, FINE, finding, type Io, usage } from './command.ts'
import { listRecords, type RecordSource, SourceRefusal, type SourceRequest } from './record-source.ts'
import { openSource, SOURCE_OPTIONS } from './target-options.ts'
import { json, plain, span, table } from './terminal.ts'

const BY_KEY = ['caller', 'method', 'path', 'host', 'route']

export const inspect: Command = {
  name: 'inspect',
  usage: [
    'inspect ID (--admin URL --token-file FILE | --config FILE | --store URL)',
    'inspect KEY --caller LINE --method M --path P (--admin URL --token-file FILE | --config FILE | --store URL)',
  ],
  about: [
    'explains one record: whether and how often it was executed, and what to do next; exit 1 if there is none.',
    'ID: the "instance" of a problem response, or from list; 8 or more of its first characters suffice, such as the 12 in a log line.',
    'KEY: as the client sent it; needs --method, --path and --caller, or --route.',
  ],
  options: {
    caller: {
      value: 'LINE',
      help: 'who sent it: a header line "Name: value" of the route\'s scope.caller, token claims as JSON {"sub": "u1"}, or @FILE with such lines',
      repeated: true,
    },
    method: { value: 'M', help: 'method of the request' },
    path: { value: 'P', help: 'path of the request' },
    host: { value: 'H', help: 'host of the request, with scope.host: true' },
    route: { value: 'NAME', help: 'a route with one method and one path, instead of naming them' },
    json: { value: null, help: 'for programs: the record as the admin API gives it' },
    ...SOURCE_OPTIONS,
  },
  takes: 'one id or key',
  takesPrefixes: true,
  run: runInspect,
}

async function runInspect(args: Args, io: Io): Promise<number> {
  const call = callOf(args)
  await using source = await openSource(args, io)
  const found = 'beginning' in call ? await recordAt(source, call.beginning) : call
  const record = (await source.ask(found).catch((error: unknown) => {
    if (!(error instanceof SourceRefusal) || error.problem !== 'record_not_found' || found.method === 'GET')
      throw error
    throw new Exit(error.code, error.message + hint(args))
  })) as FullView
  if (args.has('json')) io.out(json(record))
  else io.out(page(record, sameWhere(args)))
  return FINE
}

/** No configuration was given, so the routes are not known. */
function isBuilt(args: Args): boolean {
  return args.has('store') && !args.has('config')
}

/** One wrong value leads to a different record. */
function hint(args: Args): string {
  const lines = [
    'A missing record proves nothing: the key, the caller, the method and the path must be those of the request, byte for byte.',
  ]
  if (!args.has('caller'))
    lines.push(
      "No caller was given: add --caller 'Authorization: …', or whatever the route's scope.caller names.",
    )
  if (isBuilt(args))
    lines.push('--store alone assumes a proxy without a configuration file; otherwise give --config.')
  return `${lines.join('\n')}\n`
}

/** Most keys are UUIDs; no id begins like one. */
const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-/i

/** The request to send. No message repeats the key. */
function callOf(args: Args): SourceRequest | { readonly beginning: string } {
  const [subject] = args.positionals
  if (subject === undefined) throw usage('inspect needs the id of a record, or a key')
  if (!BY_KEY.some((name) => args.has(name))) {
    if (RECORD_ID.test(subject)) return { method: 'GET', path: `/v1/records/${subject}` }
    if (ID_BEGINNING.test(subject) && !UUID.test(subject)) return { beginning: subject }
    throw usage(
      "found neither a record id nor the first 8 or more characters of one (A-Z a-z 0-9 - _); a key needs --method, --path and --caller 'Authorization: …', or --route",
    )
  }
  const named = args.given(['method', 'path', 'host', 'route'])
  const body: Lookup = { key: subject, caller: callerOf(args.all('caller')), ...named }
  return { method: 'POST', path: '/v1/records/lookup', body }
}

type LookupCaller = NonNullable<Lookup['caller']>
const LINE = new RegExp(`^(${TOKEN}):[\\t ]*(.*?)[\\t ]*$`)

/** Headers and claims by name. Their values are credentials and appear in no message. */
function callerOf(given: readonly string[]): LookupCaller {
  const caller: Record<string, LookupCaller[string]> = {}
  const lines: string[] = []
  for (const one of given) {
    if (!one.startsWith('@')) lines.push(one)
    else
      try {
        lines.push(
          ...readFileSync(one.slice(1), 'utf8')
            .split(/\r?\n/)
            .filter((line) => line !== ''),
        )
      } catch (error) {
        throw usage(
          `--caller: found a file that cannot be read at ${quote(one.slice(1))} (${(error as NodeJS.ErrnoException).code})`,
        )
      }
  }
  for (const line of lines) {
    if (line.startsWith('{')) {
      const claims = claimsOf(line)
      if (claims === null)
        throw usage('--caller: found no JSON object of strings, numbers and booleans, such as {"sub": "u1"}')
      Object.assign(caller, claims)
      continue
    }
    const [, name, value] = LINE.exec(line) ?? []
    if (name === undefined || value === undefined)
      throw usage('--caller: found neither "Name: value", nor a JSON object, nor @FILE')
    const before = caller[name.toLowerCase()]
    caller[name.toLowerCase()] = before === undefined ? value : [...[before].flat().map(String), value]
  }
  return caller
}

function claimsOf(text: string): Record<string, string | number | boolean> | null {
  try {
    const claims: Record<string, unknown> = JSON.parse(text)
    const simple = Object.values(claims).every((one) => ['string', 'number', 'boolean'].includes(typeof one))
    return simple ? (claims as Record<string, string | number | boolean>) : null
  } catch {
    return null
  }
}

/** This command's source flags, quoted for a shell, for the suggested `resolve`; it needs the routes, not only a store. */
function sameWhere(args: Args): string {
  const given = Object.entries(args.given(Object.keys(SOURCE_OPTIONS)) as Record<string, string>)
  const flags = given.map(([name, value]) => ` --${name} ${shellWord(name, value)}`)
  return [...(isBuilt(args) ? [' --config FILE'] : []), ...flags].join('')
}

function shellWord(name: string, value: string): string {
  // The URL of a store may hold a password.
  if (name === 'store' && /[@?]/.test(value)) return 'URL'
  return /^[\w./:@%+=,-]+$/.test(value) ? value : `'${value.replaceAll("'", `'\\''`)}'`
}

function page(record: FullView, where: string): string {
  const { id, state, response, history, explanation } = record
  const duplicates = record.shadowed?.duplicates ?? 0
  const more = duplicates === 0 ? '' : `, and at least ${counted(duplicates, 'duplicate')} in shadow mode`
  const known = [
    ['record', id],
    ['request', `${record.method} ${record.path}`],
    ['route', record.route],
    ...(record.label == null ? [] : [['label', record.label]]),
    ['state', state],
    ['attempts', `${record.attempts} (the latest is fence ${record.fence})${more}`],
    ['answer', response === null ? 'none' : String(response.status)],
    ['created', record.createdAt],
    ['updated', record.updatedAt],
    ['version', String(record.version)],
  ]
  const commands =
    state === 'unknown'
      ? [
          `  idempotency-proxy resolve ${id} --completed FILE --reason TEXT${where}   # done; FILE holds the response that retries receive`,
          `  idempotency-proxy resolve ${id} --retryable --reason TEXT${where}        # not done; a retry executes it`,
        ]
      : []
  const sections = [
    table(known),
    lines(explanation.verdict),
    history.length === 0
      ? 'No history.\n'
      : table([['WHEN', 'EVENT', 'COUNT', 'WHAT HAPPENED', 'DETAIL'], ...history.map(entry)]),
    `What to do:\n${lines([...explanation.next, ...commands])}`,
  ]
  return sections.join('\n')
}

function lines(texts: readonly string[]): string {
  return texts.map((text) => `${plain(text)}\n`).join('')
}

function entry({ event, text, first, last, count, detail }: HistoryView): string[] {
  const when = count > 1 && last !== first ? `${first} to ${last}` : first
  const details = Object.entries(detail).map(
    ([name, value]) => `${name}=${typeof value === 'string' ? value : JSON.stringify(value)}`,
  )
  return [when, event, String(count), text, details.join(' ')]
}

/** Candidates shown for the beginning of an id. */
const SHOWN = 20

/** The request for the one record whose id has this beginning. @throws {Exit} */
export async function recordAt(source: RecordSource, beginning: string): Promise<SourceRequest> {
  const page = await listRecords(source, { id: beginning }, SHOWN)
  const candidates = new Map<string, RecordView | null>([
    ...page.unreadable.map((id) => [id, null] as const),
    ...page.records.map((record) => [record.id, record] as const),
  ])
  const [id, ...others] = candidates.keys()
  if (id === undefined)
    throw finding(
      // Not repeated: it may be a key, given by mistake.
      `${source.name}: record_not_found: no record id begins with that. A key needs --method, --path and --caller, or --route.`,
    )
  if (others.length === 0) return { method: 'GET', path: `/v1/records/${id}` }
  const more = page.next === null ? '' : 'or more '
  const rows = [...candidates].map(([one, record]) => candidate(one, record, Date.parse(page.now)))
  throw finding(
    `${source.name}: ${candidates.size} ${more}record ids begin with ${plain(beginning)}; give more of the one you mean:\n${table(rows).trimEnd()}`,
  )
}

function candidate(id: string, record: RecordView | null, now: number): string[] {
  if (record === null) return [id, 'unreadable']
  const { state, route, method, path, createdAt } = record
  return [id, state, route, `${method} ${path}`, `${span(now - Date.parse(createdAt))} old`]
}
