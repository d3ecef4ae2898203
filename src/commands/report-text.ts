import { COUNTED, PERIOD, type Report, UNKNOWN } from '../admin/report-schema.ts'
import { SHADOW_FIGURES, type ShadowRow } from '../admin/shadow-schema.ts'
import { plain, table } from './plain.ts'

type Row = { readonly route: string } & Readonly<Record<string, string | number>>

/** One of the report's tables; all formats are made of these. */
interface Section {
  readonly name: 'period' | 'unknown' | 'counted' | 'shadow' | 'verdicts'
  readonly title: string
  readonly figures: readonly string[]
  readonly rows: readonly Row[]
}

/** What is told, and what must be known to read it right. */
export interface Told {
  readonly sections: readonly Section[]
  readonly remarks: readonly string[]
}

export function toldOf(report: Report): Told {
  return { sections: sections(report), remarks: remarks(report) }
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

function sections({ since, now, period, unknown, counted }: Report): Section[] {
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
  ]
}

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

export function asText({ sections, remarks }: Told): string {
  const parts = sections.map((section) => {
    const head = ['ROUTE', ...section.figures.map((name) => name.toUpperCase())]
    return `${section.title}\n${section.rows.length === 0 ? 'none\n' : table([head, ...cells(section)])}`
  })
  return [...parts, remarks.map((line) => `${line}\n`).join('')].join('\n')
}

export function asMarkdown({ sections, remarks }: Told): string {
  const line = (row: readonly string[]): string =>
    `| ${row.map((cell) => plain(cell).replaceAll('|', '\\|')).join(' | ')} |\n`
  const parts = sections.map((section) => {
    const head = ['route', ...section.figures]
    const rows = [head, head.map((_, n) => (n === 0 ? '---' : '--:')), ...cells(section)]
    return `## ${section.title}\n\n${section.rows.length === 0 ? 'None.\n' : rows.map(line).join('')}`
  })
  return [...parts, remarks.map((text) => `- ${text}\n`).join('')].join('\n')
}

/** One line for each figure, so that tables of different columns go into one (RFC 4180). */
export function asCsv({ sections }: Told): string {
  const lines = sections.flatMap(({ name, figures, rows }) =>
    rows.flatMap((row) => figures.map((figure) => [name, row.route, figure, String(row[figure])])),
  )
  return [['table', 'route', 'figure', 'value'], ...lines]
    .map((line) => `${line.map(quoted).join(',')}\r\n`)
    .join('')
}

function quoted(cell: string): string {
  // A spreadsheet would compute what begins so.
  const text = /^[=+\-@]/.test(cell) ? `'${cell}` : cell
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text
}
