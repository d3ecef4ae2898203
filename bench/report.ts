import { readFileSync, writeFileSync } from 'node:fs'
import { cpus } from 'node:os'
import { type CandidateName, TITLES } from './candidates.ts'
import type { Cores } from './machine.ts'
import type { Cell, Plan } from './measure.ts'
import type { LiveRecords } from './records.ts'
import type { StartUp } from './start.ts'
import type { Stop } from './stops.ts'

export interface Results {
  readonly cells: readonly Cell[]
  readonly start: readonly StartUp[] | null
  readonly records: readonly LiveRecords[] | null
  readonly stops: readonly Stop[] | null
  /** Why candidates are left out. */
  readonly skipped: readonly string[]
  readonly cores: Cores
  readonly plan: Plan
}

const DOCUMENT = new URL('../docs/internals/performance.md', import.meta.url)
const BEGIN = '<!-- bench: begin -->'
const END = '<!-- bench: end -->'

/** What the rows of a scenario are compared with; a column each. */
const BASES = [
  ['÷ nginx + Lua', 'nginx-lua'],
  ['÷ own POST', 'unprotected'],
  ['÷ http-proxy', 'http-proxy'],
] as const satisfies readonly (readonly [string, CandidateName])[]

/** The first version's goals: scenario of the proxy on Redis, compared with, at most. */
const RATIO_GOALS = [
  ['first execution ÷ nginx + Lua + Redis', 'first', 'nginx-lua', 1.1],
  ['replay ÷ nginx + Lua + Redis', 'replay', 'nginx-lua', 1.6],
  ["first execution ÷ the same stack's own unprotected, buffered POST", 'first', 'unprotected', 1.4],
  ['pass-through GET ÷ plain @fastify/http-proxy', 'get', 'http-proxy', 1.05],
  ['pass-through POST ÷ plain @fastify/http-proxy', 'post', 'http-proxy', 1.05],
] as const satisfies readonly (readonly [string, string, CandidateName, number])[]
const MEMORY_GOAL = 200
const START_GOAL = 350
const STOP_GOAL = 10

/** The result as Markdown. */
export function report(results: Results): string {
  const { cells, start, records, stops, skipped, cores, plan } = results
  const parts = [
    `Node ${process.versions.node}, ${cpus()[0]?.model.trim()}; ${cores.said}. ` +
      `${plan.connections} keep-alive connections without a pause, medians of ${plan.rounds} rounds of ` +
      `${plan.milliseconds / 1000} s after a round of up to 25,000 requests that does not count, candidates taking turns. CPU is user and system ` +
      'time of the whole process and its children per request; p50 and p99 are mostly the queue that a load without pause makes.',
    ...skipped,
  ]
  if (cells.length > 0) parts.push(cellTable(cells))
  if (start !== null) parts.push(startTable(start))
  if (records !== null) parts.push(recordsTable(records))
  if (stops !== null) parts.push(stopsTable(stops))
  const goals = goalRows(results)
  if (goals.length > 0) parts.push(table(['goal', 'at most', 'measured', ''], goals))
  return parts.join('\n\n')
}

/** Puts the result between the markers of docs/internals/performance.md. */
export function write(text: string): void {
  const before = readFileSync(DOCUMENT, 'utf8')
  const begin = before.indexOf(BEGIN)
  const end = before.indexOf(END)
  if (begin < 0 || end < begin) throw new Error(`docs/internals/performance.md has no ${BEGIN} … ${END}`)
  writeFileSync(DOCUMENT, `${before.slice(0, begin + BEGIN.length)}\n\n${text}\n\n${before.slice(end)}`)
}

function cellTable(cells: readonly Cell[]): string {
  const head = ['scenario', 'candidate', 'CPU µs', ...BASES.map(([title]) => title)]
  const rows = cells.map((cell) => [
    cell.scenario.title,
    TITLES[cell.candidate],
    cell.cpuPerRequest.toFixed(1),
    ...BASES.map(([, base]) => ratioOf(cells, cell, base)?.toFixed(2) ?? ''),
    Math.round(cell.perSecond).toLocaleString('en'),
    cell.p50.toFixed(1),
    cell.p99.toFixed(1),
    cell.residentMb.toFixed(0),
  ])
  return table([...head, 'requests/s', 'p50 ms', 'p99 ms', 'resident MB'], rows)
}

function ratioOf(cells: readonly Cell[], cell: Cell, base: CandidateName): number | null {
  const other = cells.find((one) => one.scenario === cell.scenario && one.candidate === base)
  return other === undefined || other === cell ? null : cell.cpuPerRequest / other.cpuPerRequest
}

function startTable(start: readonly StartUp[]): string {
  const head = [
    'candidate',
    'start to first answer ms',
    'MB at rest',
    'most MB, 300 bytes on 64 connections',
    'most MB, 64 KiB on 256 connections',
  ]
  return table(
    head,
    start.map(({ candidate, firstAnswer, atRest, saturated, saturatedLarge }) => [
      TITLES[candidate],
      ...[firstAnswer, atRest, saturated, saturatedLarge].map((value) => value.toFixed(0)),
    ]),
  )
}

function recordsTable(records: readonly LiveRecords[]): string {
  const few = (store: string): LiveRecords | undefined => records.find((one) => one.store === store)
  const ratio = (one: LiveRecords, what: 'first' | 'replay'): string =>
    (one[what].cpuPerRequest / (few(one.store)?.[what].cpuPerRequest ?? Number.NaN)).toFixed(2)
  return table(
    ['store', 'live records', 'first execution CPU µs', '÷ few', 'replay CPU µs', '÷ few'],
    records.map((one) => [
      one.store,
      one.records.toLocaleString('en'),
      one.first.cpuPerRequest.toFixed(1),
      ratio(one, 'first'),
      one.replay.cpuPerRequest.toFixed(1),
      ratio(one, 'replay'),
    ]),
  )
}

function stopsTable(stops: readonly Stop[]): string {
  return table(
    ['JSON of 1 MiB compared as values', 'longest stop of the event loop ms'],
    stops.map(({ shape, milliseconds }) => [shape, milliseconds.toFixed(1)]),
  )
}

function goalRows({ cells, start, stops }: Results): string[][] {
  const rows: string[][] = []
  for (const [title, scenario, base, most] of RATIO_GOALS) {
    const cell = cells.find((one) => one.scenario.id === scenario && one.candidate === 'proxy-redis')
    const ratio = cell === undefined ? null : ratioOf(cells, cell, base)
    if (ratio !== null) rows.push([title, String(most), ratio.toFixed(2), verdict(ratio, most)])
  }
  for (const one of start ?? []) {
    const name = TITLES[one.candidate].replaceAll('*', '')
    const memory = Math.max(one.saturated, one.saturatedLarge)
    const { firstAnswer } = one
    rows.push(
      [
        `resident memory under saturation, MB: ${name}`,
        String(MEMORY_GOAL),
        memory.toFixed(0),
        verdict(memory, MEMORY_GOAL),
      ],
      [
        `start to first answer, ms: ${name}`,
        String(START_GOAL),
        firstAnswer.toFixed(0),
        verdict(firstAnswer, START_GOAL),
      ],
    )
  }
  if (stops !== null) {
    const worst = Math.max(...stops.map((stop) => stop.milliseconds))
    rows.push([
      'longest stop of the event loop by one request of `limits.request` bytes, ms',
      String(STOP_GOAL),
      worst.toFixed(1),
      verdict(worst, STOP_GOAL),
    ])
  }
  return rows
}

function verdict(value: number, most: number): string {
  return value <= most ? 'met' : '**not met**'
}

function table(head: readonly string[], rows: readonly (readonly string[])[]): string {
  const line = (cells: readonly string[]): string => `| ${cells.join(' | ')} |`
  const rule = `|${head.map((_, n) => (n === 0 ? '---' : '---:')).join('|')}|`
  return [line(head), rule, ...rows.map(line)].join('\n')
}
