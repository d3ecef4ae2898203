import type { Soaked } from './soak.ts'
import { compare, type Finding, type Sample } from './verdict.ts'

const MIB = 1024 * 1024
/** Lines per kind; the rest is counted. */
const EXAMPLES = 5

type Column = readonly [title: string, of: (sample: Sample) => string]

const mib = (bytes: number): string => (bytes / MIB).toFixed(1)

const COLUMNS: readonly Column[] = [
  ['requests', ({ requests }) => requests.toLocaleString('en')],
  ['executed', ({ executed }) => executed.toLocaleString('en')],
  ['minutes', ({ minutes }) => minutes.toFixed(1)],
  ['RSS MiB', ({ resident }) => mib(resident)],
  ['heap MiB', ({ heapUsed }) => (heapUsed / MIB).toFixed(2)],
  ['external MiB', ({ external }) => (external / MIB).toFixed(2)],
  ['buffers MiB', ({ arrayBuffers }) => (arrayBuffers / MIB).toFixed(2)],
  ['fds', ({ descriptors }) => String(descriptors)],
  [
    'active',
    ({ resources }) =>
      Object.entries(resources)
        .map(([kind, count]) => `${count} ${kind}`)
        .join(', '),
  ],
  [
    'objects',
    ({ objects }) =>
      Object.entries(objects)
        .map(([kind, count]) => `${count} ${kind}`)
        .join(', '),
  ],
  ['gauges', ({ gauges }) => Object.values(gauges).join(' ')],
  ['records', ({ store }) => String(store.records)],
  ['expected', ({ store }) => String(store.expected)],
  ['indexed', ({ store }) => String(store.indexed)],
  ['orphans', ({ store }) => String(store.orphans)],
  ['Redis MiB', ({ store }) => (store.memory / MIB).toFixed(2)],
  ['channels', ({ store }) => String(store.channels)],
  ['clients', ({ store }) => String(store.clients)],
]

const line = (cells: readonly string[]): string => `| ${cells.join(' | ')} |`
const rule = (columns: number): string => `|${' ---: |'.repeat(columns)}`

export function tableHead(): string {
  return `${line(COLUMNS.map(([title]) => title))}\n${rule(COLUMNS.length)}`
}

export function tableRow(sample: Sample): string {
  return line(COLUMNS.map(([, of]) => of(sample)))
}

/** The comparison, and the findings. */
export function verdict(samples: readonly Sample[], warmUp: number, findings: readonly Finding[]): string {
  const rows = compare(samples, warmUp).map(({ what, earlier, later, allowed }) =>
    line([what, ...[earlier, later, later - earlier, allowed].map((value) => value.toFixed(0))]),
  )
  const compared = [
    line(['median of', 'earlier half', 'later half', 'growth', 'noise']),
    rule(5),
    ...rows,
  ].join('\n')
  return findings.length === 0
    ? `${compared}\n\nNothing has grown, nothing was executed twice, nothing is left unexplained.`
    : `${compared}\n\n${listed(findings).join('\n')}`
}

/** The totals, one sentence each. */
export function told({
  samples,
  answers,
  replays,
  promised,
  unresolved,
  watched,
  lost,
  seconds,
}: Soaked): string {
  const requests = samples.at(-1)?.requests ?? 0
  const counted = [...answers].toSorted(([, a], [, b]) => b - a).map(([what, count]) => `${what} ${count}`)
  return [
    `${requests.toLocaleString('en')} requests in ${(seconds / 60).toFixed(1)} minutes: ${(requests / seconds).toFixed(0)}/s on average.`,
    `${promised.toLocaleString('en')} operations executed under the promise, ${replays.toLocaleString('en')} replays.`,
    `Left: ${unresolved} records that the upstream left uncertain, ${watched} of watched requests whose client left, ${lost} whose outcome was given up while the store was away.`,
    `Answers: ${counted.join(', ')}.`,
  ].join('\n')
}

function listed(findings: readonly Finding[]): string[] {
  const kinds = Map.groupBy(findings, ({ what }) => what)
  return [...kinds].flatMap(([what, all]) => [
    `**${what}**`,
    ...all.slice(0, EXAMPLES).map(({ detail }) => `- ${detail}`),
    ...(all.length > EXAMPLES ? [`- and ${all.length - EXAMPLES} more`] : []),
  ])
}
