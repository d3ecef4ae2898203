import { ASKED, COUNTED, PERIOD, type Report, UNKNOWN } from '../admin/report-schema.ts'
import { SHADOW_FIGURES, type ShadowRow } from '../admin/shadow-schema.ts'
import { plain, table } from './terminal.ts'

type Row = { readonly route: string } & Readonly<Record<string, string | number>>

/** One of the report's tables; all formats are made of these. */
interface Section {
  readonly name: 'period' | 'unknown' | 'counted' | 'shadow' | 'verdicts' | 'asked'
  readonly title: string
  readonly figures: readonly string[]
  readonly rows: readonly Row[]
}

/** What is told, and what must be known to read it right. */
export interface Told {
  readonly sections: readonly Section[]
  /** The sampled records that do not agree with the upstream: verdict, route, record, why. */
  readonly disagreements: readonly (readonly [string, string, string, string])[]
  readonly remarks: readonly string[]
}

export function toldOf(report: Report): Told {
  const found = report.asked?.found ?? []
  return {
    sections: sections(report),
    disagreements: found.map(({ id, route, verdict, why }) => [verdict, route, id, why]),
    remarks: remarks(report),
  }
}

/** What shadow mode told: the figures, and the verdicts that were given at all. `of`: whence, and of which time. */
export function shadowSections(rows: readonly ShadowRow[], of: string): Section[] {
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
  return [
    {
      name: 'period',
      title: `Records created from ${since} to ${now}, as far as they are still kept`,
      figures: PERIOD,
      rows: period,
    },
    { name: 'unknown', title: 'Unknown now, whenever created, by age', figures: UNKNOWN, rows: unknown },
    ...(counted === null
      ? []
      : [
          {
            name: 'counted' as const,
            title: `Counted by this one proxy since it started, ${counted.since}`,
            figures: COUNTED,
            rows: counted.routes,
          },
          ...(counted.shadow.length === 0
            ? []
            : shadowSections(counted.shadow, `counted by this one proxy since it started, ${counted.since}`)),
        ]),
    ...(asked === null
      ? []
      : [
          {
            name: 'asked' as const,
            title: 'Completed records of the period, asked about anew at the upstream',
            figures: ASKED,
            rows: asked.routes,
          },
        ]),
  ]
}

const NOT_AGREED = 'Records that do not agree with the upstream; nothing was changed'
const NOT_AGREED_HEAD = ['verdict', 'route', 'record', 'why']

function remarks({ looked, complete, unreadable, counted }: Report): string[] {
  return [
    complete
      ? `All ${looked} records of the store were looked at.`
      : `Only ${looked} records were looked at, and there are more: the figures are too low.`,
    ...(unreadable === 0 ? [] : [`${unreadable} records cannot be read by this version: see list.`]),
    'Retries, misuse, lapses and late outcomes come from the histories beside the records, which are capped and may lack entries.',
    ...(counted === null ? ['No running proxy was asked, so nothing is told of its counters.'] : []),
  ]
}

function cells({ figures, rows }: Section): string[][] {
  const all = rows.length > 1 ? [...rows, total(figures, rows)] : rows
  return all.map((row) => [row.route, ...figures.map((name) => String(row[name]))])
}

function total(figures: readonly string[], rows: readonly Row[]): Row {
  const sum = (name: string): number => rows.reduce((all, row) => all + Number(row[name]), 0)
  return { ...Object.fromEntries(figures.map((name) => [name, sum(name)])), route: '(all)' }
}

export function asText({ sections, disagreements, remarks }: Told): string {
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

export function asMarkdown({ sections, disagreements, remarks }: Told): string {
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

/** One line for each figure, so that tables of different columns go into one (RFC 4180). */
export function asCsv({ sections, disagreements }: Told): string {
  const lines = sections.flatMap(({ name, figures, rows }) =>
    rows.flatMap((row) => figures.map((figure) => [name, row.route, figure, String(row[figure])])),
  )
  return [['table', 'route', 'figure', 'value'], ...lines, ...disagreements]
    .map((line) => `${line.map(quoted).join(',')}\r\n`)
    .join('')
}

function quoted(cell: string): string {
  // A spreadsheet would compute what begins so.
  const text = /^[=+\-@]/.test(cell) ? `'${cell}` : cell
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text
}
