import { counted } from '../admin/explain.ts'
import { ASKED, COUNTED, PERIOD, type Report, UNKNOWN } from '../admin/report.ts'
import { SHADOW_FIGURES, type ShadowTallyRow } from '../admin/shadow-tally.ts'
import { parseDuration, quote } from '../config/units.ts'
import { type Args, type Command, FINDING, FINE, finding, type Io, usage } from './command.ts'
import { readLogs, type ShadowReport } from './shadow-log.ts'
import { openSource, SOURCE_OPTIONS } from './target-options.ts'
import { json, plain, table } from './terminal.ts'

/** `value` is for programs, `text` for people. */
type Format = (value: unknown, text: ReportText) => string
const FORMATS: Readonly<Record<string, Format>> = {
  text: (_, text) => asText(text),
  json,
  csv: (_, text) => asCsv(text),
  markdown: (_, text) => asMarkdown(text),
}

export const report: Command = {
  name: 'report',
  usage: [
    'report [--since 24h] [--format F] (--admin URL --token-file FILE [--sample N] | --config FILE | --store URL)',
    'report --log FILE [--since 24h] [--format F]',
  ],
  about: [
    'counts, by route, what was executed, replayed and prevented, and what is unknown.',
    'Figures of the period come from the records created in it and their histories, as far as they are still kept.',
    'A running proxy adds its own counters since it started, and what shadow mode has seen.',
    'With --sample it asks the upstream again; exit 1 if that disagrees.',
    'With --log: what enforce would have done in the period, by the log lines of shadow mode (docs/shadow.md);',
    'exit 1 if there are none.',
  ],
  options: {
    since: { value: 'DURATION', help: 'length of the period up to now, such as 90m, 24h, 7d (default 24h)' },
    sample: {
      value: 'N',
      help: 'ask the upstream again about N completed records, 1 to 1000, on routes with `reconcile`',
    },
    log: {
      value: 'FILE',
      help: 'log of a proxy in JSON lines, or - for standard input; one per replica',
      repeated: true,
    },
    format: { value: 'F', help: `${Object.keys(FORMATS).join(', ')} (default text)` },
    json: { value: null, help: 'the same as --format json' },
    ...SOURCE_OPTIONS,
  },
  run: runReport,
}

async function runReport(args: Args, io: Io): Promise<number> {
  if (args.has('json') && args.has('format')) throw usage('found --json and --format; allowed: one of them')
  const name = args.has('json') ? 'json' : (args.text('format') ?? 'text')
  const format = Object.hasOwn(FORMATS, name) ? FORMATS[name] : undefined
  if (format === undefined)
    throw usage(`--format: found ${quote(name)}; allowed: ${Object.keys(FORMATS).join(', ')}`)
  const files = args.all('log')
  if (args.has('sample') && !args.has('admin'))
    throw usage('found --sample without --admin URL: only a running proxy asks the upstream')
  if (files.length > 0) return reportOfLogs(files, args, io, format)
  await using source = await openSource(args, io)
  const query = args.given(['since', 'sample'])
  const found = (await source.ask({ method: 'GET', path: '/v1/report', query })) as Report
  io.out(format(found, reportText(found)))
  return found.asked?.routes.some(({ disagreed }) => disagreed > 0) === true ? FINDING : FINE
}

async function reportOfLogs(files: readonly string[], args: Args, io: Io, format: Format): Promise<number> {
  const other = Object.keys(SOURCE_OPTIONS).find((name) => args.has(name))
  if (other !== undefined) throw usage(`found --log and --${other}; allowed: one of them`)
  const text = args.text('since') ?? '24h'
  const since = parseDuration(text)
  if (!since.ok || since.value === 0)
    throw usage(`--since: found ${quote(text)}; allowed: more than 0, such as 90m, 24h or 7d`)
  let report: ShadowReport
  try {
    report = await readLogs(files, since.value, Date.now())
  } catch (error) {
    throw finding(plain((error as Error).message))
  }
  io.out(format(report, shadowText(report)))
  if (report.lines > 0) return FINE
  throw finding(
    'found no line of shadow mode in that time: is it the log of a proxy with routes in mode shadow, in JSON lines, at log.level info?',
  )
}

type ReportRow = { readonly route: string } & Readonly<Record<string, string | number>>

/** A table of the report, in every format. */
interface Section {
  readonly name: 'period' | 'unknown' | 'counted' | 'shadow' | 'verdicts' | 'asked'
  readonly title: string
  readonly figures: readonly string[]
  readonly rows: readonly ReportRow[]
}

/** A report for people, with notes on how to read it. */
export interface ReportText {
  readonly sections: readonly Section[]
  /** The sampled records that do not agree with the upstream: verdict, route, record, why. */
  readonly disagreements: readonly (readonly [string, string, string, string])[]
  readonly remarks: readonly string[]
}

export function reportText(report: Report): ReportText {
  const found = report.asked?.found ?? []
  return {
    sections: sections(report),
    disagreements: found.map(({ id, route, verdict, why }) => [verdict, route, id, why]),
    remarks: remarks(report),
  }
}

function shadowText({ since, now, first, last, lines, unreadable, shadow }: ShadowReport): ReportText {
  return {
    sections: shadowSections(shadow, `from ${since} to ${now}`),
    disagreements: [],
    remarks: [
      `${counted(lines, 'line')} of shadow mode in that time${first === null ? '' : `; the log has lines from ${first} to ${last}`}.`,
      ...(first === null ? ['No line has a time: is it a proxy log in JSON lines (log.format: json)?'] : []),
      ...(first !== null && first > since
        ? [`It begins at ${first}: nothing is known about the time before.`]
        : []),
      ...(unreadable === 0 ? [] : [`${counted(unreadable, 'line')} of shadow mode cannot be read.`]),
      'Only logged requests count: use the logs of all replicas, at log.level info or below. A request logged in two files counts twice.',
    ],
  }
}

/** What shadow mode counted, and the verdicts that occurred. `of`: source and period. */
function shadowSections(rows: readonly ShadowTallyRow[], of: string): Section[] {
  const given = Object.keys(rows[0]?.verdicts ?? {}).filter((name) =>
    rows.some(({ verdicts }) => (verdicts[name] ?? 0) > 0),
  )
  return [
    {
      name: 'shadow',
      title: `What enforce would have done, ${of}`,
      figures: SHADOW_FIGURES,
      rows: rows.map(({ verdicts, ...row }) => ({ ...row, ...verdicts })),
    },
    {
      name: 'verdicts',
      title: 'The same by verdict (docs/shadow.md)',
      figures: given,
      rows: rows.map(({ route, verdicts }) => ({ ...verdicts, route })),
    },
  ]
}

function sections({ since, now, period, unknown, counted, asked }: Report): Section[] {
  const title = `Records created from ${since} to ${now}, as far as they are still kept`
  const found: Section[] = [
    { name: 'period', title, figures: PERIOD, rows: period },
    { name: 'unknown', title: 'Unknown now, whenever created, by age', figures: UNKNOWN, rows: unknown },
  ]
  if (counted !== null) {
    const scope = `ounted by this one proxy since it started, ${counted.since}`
    found.push({ name: 'counted', title: `C${scope}`, figures: COUNTED, rows: counted.routes })
    if (counted.shadow.length > 0) found.push(...shadowSections(counted.shadow, `c${scope}`))
  }
  if (asked !== null) {
    const title = 'Completed records of the period, checked against the upstream'
    found.push({ name: 'asked', title, figures: ASKED, rows: asked.routes })
  }
  return found
}

const NOT_AGREED = 'Records that disagree with the upstream; nothing was changed'
const NOT_AGREED_HEAD = ['verdict', 'route', 'record', 'why']

function remarks({ looked, complete, unreadable, counted }: Report): string[] {
  return [
    complete
      ? `All ${looked} records of the store were read.`
      : `Only ${looked} records were read, and there are more: the figures are too low.`,
    ...(unreadable === 0 ? [] : [`${unreadable} records cannot be read by this version: see list.`]),
    'Retries, misuse, lapsed leases and late outcomes come from the histories of the records, which are capped and may lack entries.',
    ...(counted === null ? ['No running proxy was asked, so its counters are missing.'] : []),
  ]
}

function cells({ figures, rows }: Section): string[][] {
  const all = rows.length > 1 ? [...rows, total(figures, rows)] : rows
  return all.map((row) => [row.route, ...figures.map((name) => String(row[name]))])
}

function total(figures: readonly string[], rows: readonly ReportRow[]): ReportRow {
  const sum = (name: string): number => rows.reduce((all, row) => all + Number(row[name]), 0)
  return { ...Object.fromEntries(figures.map((name) => [name, sum(name)])), route: '(all)' }
}

export function asText({ sections, disagreements, remarks }: ReportText): string {
  const parts = sections.map((section) => {
    const head = ['ROUTE', ...section.figures.map((name) => name.toUpperCase())]
    return `${section.title}\n${section.rows.length === 0 ? 'none\n' : table([head, ...cells(section)])}`
  })
  const found = [NOT_AGREED_HEAD.map((name) => name.toUpperCase()), ...disagreements]
  return [
    ...parts,
    ...(disagreements.length === 0 ? [] : [`${NOT_AGREED}\n${table(found)}`]),
    remarks.map((line) => `${line}\n`).join(''),
  ].join('\n')
}

export function asMarkdown({ sections, disagreements, remarks }: ReportText): string {
  const line = (row: readonly string[]): string =>
    `| ${row.map((cell) => plain(cell).replaceAll('|', '\\|')).join(' | ')} |\n`
  const parts = sections.map((section) => {
    const head = ['route', ...section.figures]
    const rows = [head, head.map((_, n) => (n === 0 ? '---' : '--:')), ...cells(section)]
    return `## ${section.title}\n\n${section.rows.length === 0 ? 'None.\n' : rows.map(line).join('')}`
  })
  const found = [NOT_AGREED_HEAD, NOT_AGREED_HEAD.map(() => '---'), ...disagreements]
  return [
    ...parts,
    ...(disagreements.length === 0 ? [] : [`## ${NOT_AGREED}\n\n${found.map(line).join('')}`]),
    remarks.map((text) => `- ${text}\n`).join(''),
  ].join('\n')
}

/** One line per figure, so that tables with different columns fit in one file (RFC 4180). */
export function asCsv({ sections, disagreements }: ReportText): string {
  const lines = sections.flatMap(({ name, figures, rows }) =>
    rows.flatMap((row) => figures.map((figure) => [name, row.route, figure, String(row[figure])])),
  )
  return [['table', 'route', 'figure', 'value'], ...lines, ...disagreements]
    .map((line) => `${line.map(quoted).join(',')}\r\n`)
    .join('')
}

function quoted(cell: string): string {
  // A spreadsheet would evaluate it as a formula.
  const text = /^[=+\-@]/.test(cell) ? `'${cell}` : cell
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text
}
