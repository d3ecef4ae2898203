import { readFileSync, writeFileSync } from 'node:fs'
import { cpus } from 'node:os'
import { type CandidateName, TITLES } from './candidates.ts'
import type { Cost } from './costs.ts'
import type { Cores } from './machine.ts'
import type { Cell, Plan } from './measure.ts'
import type { LiveRecords } from './records.ts'
import type { StartUp } from './start.ts'
import type { Stop } from './stops.ts'
import type { Tail } from './tail.ts'
import type { Workers } from './workers.ts'

export interface Results {
  readonly cells: readonly Cell[]
  readonly tail: readonly Tail[] | null
  readonly cost: readonly Cost[] | null
  readonly start: readonly StartUp[] | null
  readonly records: readonly LiveRecords[] | null
  readonly stops: readonly Stop[] | null
  readonly workers: readonly Workers[] | null
  /** Why candidates are missing. */
  readonly skipped: readonly string[]
  readonly cores: Cores
  readonly plan: Plan
}

const DOCUMENT = new URL('../docs/internals/performance.md', import.meta.url)

interface Goal {
  readonly title: string
  readonly must: number
  readonly aim?: number
  /** null: not measured in this run. */
  readonly measured: (results: Results) => number | null
}

const GOALS: readonly Goal[] = [
  {
    title: 'first execution, Redis ÷ nginx + Lua + Redis',
    must: 1,
    aim: 0.85,
    measured: ratio('first', 'proxy-redis', 'nginx-lua'),
  },
  {
    title: 'first execution, Redis ÷ @node-idempotency behind Fastify',
    must: 0.6,
    aim: 0.5,
    measured: ratio('first', 'proxy-redis', 'node-idempotency'),
  },
  {
    title: 'replay, Redis ÷ nginx + Lua + Redis',
    must: 1.25,
    aim: 1,
    measured: ratio('replay', 'proxy-redis', 'nginx-lua'),
  },
  {
    title: 'first execution, SQLite (default) ÷ Redis',
    must: 1.3,
    aim: 1,
    measured: ratio('first', 'proxy-sqlite', 'proxy-redis'),
  },
  {
    title: 'first execution, memory ÷ Redis',
    must: 0.9,
    measured: ratio('first', 'proxy-memory', 'proxy-redis'),
  },
  {
    title: 'first execution, PostgreSQL ÷ Redis',
    must: 2.5,
    aim: 1.5,
    measured: ratio('first', 'proxy-postgres', 'proxy-redis'),
  },
  {
    title: 'first execution, Redis: over TLS ÷ plain',
    must: 1.3,
    measured: ratio('first', 'proxy-tls', 'proxy-redis'),
  },
  {
    title: 'first execution, Redis: HTTP/2 ÷ HTTP/1.1',
    must: 1.6,
    measured: ratio('first', 'proxy-http2', 'proxy-redis'),
  },
  {
    title: 'first execution, Redis: gRPC ÷ HTTP/1.1',
    must: 2,
    measured: ratio('first', 'proxy-grpc', 'proxy-redis'),
  },
  {
    title: 'first execution, 64 KiB, Redis ÷ nginx + Lua + Redis',
    must: 0.65,
    measured: ratio('first-large', 'proxy-redis', 'nginx-lua'),
  },
  {
    title: 'first execution, 64 KiB, Redis ÷ its own unprotected POST',
    must: 3,
    aim: 1.8,
    measured: ratio('first-large', 'proxy-redis', 'unprotected'),
  },
  {
    title: 'replay, 64 KiB, Redis ÷ nginx + Lua + Redis',
    must: 2,
    aim: 1.3,
    measured: ratio('replay-large', 'proxy-redis', 'nginx-lua'),
  },
  {
    title: 'pass-through GET ÷ plain @fastify/http-proxy',
    must: 0.8,
    aim: 0.5,
    measured: ratio('get', 'proxy-redis', 'http-proxy'),
  },
  {
    title: 'pass-through POST ÷ plain @fastify/http-proxy',
    must: 0.8,
    aim: 0.5,
    measured: ratio('post', 'proxy-redis', 'http-proxy'),
  },
  {
    title: 'start to first answer ÷ that of `node` with a bare HTTP server, the slower of Redis and SQLite',
    must: 4,
    aim: 2.5,
    measured: ({ start }) => start && Math.max(...start.map(({ toBare }) => toBare)),
  },
  {
    title: 'resident at rest, MB, the larger of Redis and SQLite',
    must: 95,
    aim: 80,
    measured: ({ start }) => start && Math.max(...start.map(({ atRest }) => atRest)),
  },
  {
    title: 'resident under saturation, MB, the larger of Redis and SQLite',
    must: 180,
    aim: 128,
    measured: ({ start }) =>
      start && Math.max(...start.map(({ saturated, saturatedLarge }) => Math.max(saturated, saturatedLarge))),
  },
  {
    title: 'longest stop of the event loop by one request of `limits.request` bytes, ms',
    must: 10,
    aim: 3,
    measured: ({ stops }) => stops && Math.max(...stops.map(({ milliseconds }) => milliseconds)),
  },
  {
    title: 'first execution, p99 at 70 % of saturation, Redis ÷ nginx + Lua + Redis',
    must: 3,
    aim: 1.5,
    measured: ({ tail }) => tailRatio(tail ?? [], 'first'),
  },
  {
    title: 'replay, p99 at 70 % of saturation, Redis ÷ nginx + Lua + Redis',
    must: 3,
    aim: 1.5,
    measured: ({ tail }) => tailRatio(tail ?? [], 'replay'),
  },
  {
    title: 'first execution, Redis, CPU: two workers ÷ one process',
    must: 1.1,
    measured: ({ workers }) => ofWorkers(workers, (one, two) => two.cpuPerRequest / one.cpuPerRequest),
  },
  {
    title: 'first execution, Redis, CPU of the busiest process: two workers ÷ one process',
    must: 0.625,
    aim: 0.55,
    measured: ({ workers }) => ofWorkers(workers, (one, two) => two.busiest / one.busiest),
  },
]

/** The result as Markdown. */
export function report(results: Results): string {
  const { cells, tail, cost, start, records, stops, workers, skipped, cores, plan } = results
  const parts = [
    `Node ${process.versions.node}, ${cpus()[0]?.model.trim()}; ${cores.remark}. ` +
      `${plan.connections} connections, medians of ${plan.rounds} rounds of ${plan.milliseconds / 1000} s.`,
    ...skipped,
  ]
  parts.push(...cellTables(cells))
  if (tail !== null && tail.length > 0) parts.push(tailTable(tail))
  if (cost !== null && cost.length > 0) {
    parts.push(costTable(cost))
    const why = cost.map(({ systemCalls }) => systemCalls).find((calls) => typeof calls === 'string')
    if (why !== undefined) parts.push(`System calls are left out: ${why}.`)
  }
  if (start !== null) parts.push(startTable(start))
  if (records !== null) parts.push(recordsTable(records))
  if (stops !== null) parts.push(stopsText(stops))
  if (workers !== null) parts.push(workersTable(workers))
  const goals = goalRows(results)
  if (goals.length > 0) parts.push(table(['goal', 'must', 'aim', 'measured', ''], goals))
  return parts.join('\n\n')
}

/** Puts the result between the markers of docs/internals/performance.md. */
export function write(text: string, section: 'bench' | 'bench stores', file: URL | string = DOCUMENT): void {
  const [first, last] = [`<!-- ${section}: begin -->`, `<!-- ${section}: end -->`]
  const before = readFileSync(file, 'utf8')
  const begin = before.indexOf(first)
  const end = before.indexOf(last)
  if (begin < 0 || end < begin) throw new Error(`docs/internals/performance.md has no ${first} … ${last}`)
  writeFileSync(file, `${before.slice(0, begin + first.length)}\n\n${text}\n\n${before.slice(end)}`)
}

/** A table for each kind of body, with a row for each candidate. */
function cellTables(cells: readonly Cell[]): string[] {
  const bodies = Map.groupBy(cells, ({ scenario }) => scenario.title.split(', JSON of ')[1] ?? '')
  return [...bodies].map(([body, those]) => {
    const scenarios = [...new Set(those.map(({ scenario }) => scenario))]
    const candidates = [...new Set(those.map(({ candidate }) => candidate))]
    const rows = candidates.map((candidate) => [
      TITLES[candidate],
      ...scenarios.flatMap((scenario) => {
        const cell = those.find((one) => one.scenario === scenario && one.candidate === candidate)
        if (cell === undefined) return ['', '']
        return [cell.cpuPerRequest.toFixed(1), Math.round(cell.perSecond).toLocaleString('en')]
      }),
    ])
    const head = scenarios.flatMap(({ title }) => [`${withoutSize(title)}: CPU µs`, 'requests/s'])
    return table([body === '' ? 'candidate' : `JSON of ${body}`, ...head], rows)
  })
}

/** A scenario's title without the size of its body, which all rows share. */
function withoutSize(title: string): string {
  return title.split(', JSON')[0] as string
}

function ratioOf(cells: readonly Cell[], cell: Cell, base: CandidateName): number | null {
  const other = cells.find((one) => one.scenario === cell.scenario && one.candidate === base)
  return other === undefined || other === cell ? null : cell.cpuPerRequest / other.cpuPerRequest
}

function tailTable(tail: readonly Tail[]): string {
  return table(
    ['scenario', 'candidate', 'requests/s at most', 'p50 ms at 70 %', 'p99 ms at 70 %', 'sent late, p99 ms'],
    tail.map(({ scenario, candidate, saturation, p50, p99, lateP99 }) => [
      withoutSize(scenario.title),
      TITLES[candidate],
      Math.round(saturation).toLocaleString('en'),
      ...[p50, p99, lateP99].map((value) => value.toFixed(2)),
    ]),
  )
}

function tailRatio(tail: readonly Tail[], scenario: string): number | null {
  const p99 = (candidate: CandidateName): number | undefined =>
    tail.find((one) => one.scenario.id === scenario && one.candidate === candidate)?.p99
  const [own, base] = [p99('proxy-redis'), p99('nginx-lua')]
  return own === undefined || base === undefined ? null : own / base
}

function costTable(cost: readonly Cost[]): string {
  return table(
    ['scenario', 'candidate', 'bytes allocated', 'system calls', 'Redis commands'],
    cost.map(({ scenario, candidate, bytes, systemCalls, redisCommands }) => [
      withoutSize(scenario.title),
      TITLES[candidate],
      bytes === null ? '' : Math.round(bytes).toLocaleString('en'),
      typeof systemCalls === 'string' ? '' : callsText(systemCalls),
      callsText(redisCommands),
    ]),
  )
}

function callsText(calls: ReadonlyMap<string, number>): string {
  if (calls.size === 0) return ''
  return [...calls.values()].reduce((total, count) => total + count, 0).toFixed(1)
}

function startTable(start: readonly StartUp[]): string {
  const head = [
    'candidate',
    'start to first answer ms',
    '÷ bare `node`',
    'MB at rest',
    'most MB, 300 bytes on 64 connections',
    'most MB, 64 KiB on 256 connections',
  ]
  return table(
    head,
    start.map(({ candidate, firstAnswer, toBare, atRest, saturated, saturatedLarge }) => [
      TITLES[candidate],
      firstAnswer.toFixed(0),
      toBare.toFixed(2),
      ...[atRest, saturated, saturatedLarge].map((value) => value.toFixed(0)),
    ]),
  )
}

function recordsTable(records: readonly LiveRecords[]): string {
  return table(
    ['store', 'live records', 'first execution CPU µs', 'replay CPU µs'],
    records.map((one) => [
      one.store,
      one.records.toLocaleString('en'),
      one.first.cpuPerRequest.toFixed(1),
      one.replay.cpuPerRequest.toFixed(1),
    ]),
  )
}

function workersTable(workers: readonly Workers[]): string {
  return table(
    [
      'first execution on Redis',
      'CPU µs',
      'of that the busiest process',
      'requests/s',
      'MB of the largest process',
      'MB of all',
    ],
    workers.map(({ workers, cpuPerRequest, busiest, perSecond, largestMb, allMb }) => [
      workers === 1 ? 'one process' : `${workers} workers`,
      ...[cpuPerRequest, busiest].map((value) => value.toFixed(1)),
      Math.round(perSecond).toLocaleString('en'),
      ...[largestMb, allMb].map((value) => value.toFixed(0)),
    ]),
  )
}

function ofWorkers(
  workers: readonly Workers[] | null,
  ratio: (one: Workers, two: Workers) => number,
): number | null {
  const [one, two] = workers ?? []
  return one === undefined || two === undefined ? null : ratio(one, two)
}

/** The three that stop it for longest. */
function stopsText(stops: readonly Stop[]): string {
  const worst = stops.toSorted((a, b) => b.milliseconds - a.milliseconds).slice(0, 3)
  const said = worst.map(({ shape, milliseconds }) => `${milliseconds.toFixed(1)} (${shape})`)
  return `Longest stops of the event loop, ms, by ${stops.length} kinds of requests of 1 MiB: ${said.join(', ')}.`
}

function goalRows(results: Results): string[][] {
  return GOALS.flatMap(({ title, must, aim, measured }) => {
    const value = measured(results)
    if (value === null) return []
    const text = value >= 10 ? value.toFixed(0) : value.toFixed(2)
    const verdict = value > must ? '**not met**' : aim !== undefined && value <= aim ? 'aim met' : 'met'
    return [[title, String(must), String(aim ?? ''), text, verdict]]
  })
}

/** CPU per request of one candidate in a scenario ÷ that of another. */
function ratio(scenario: string, candidate: CandidateName, base: CandidateName): Goal['measured'] {
  return ({ cells }) => {
    const cell = cells.find((one) => one.scenario.id === scenario && one.candidate === candidate)
    return cell === undefined ? null : ratioOf(cells, cell, base)
  }
}

/** A first cell is not repeated in the rows below it. */
function table(head: readonly string[], rows: readonly (readonly string[])[]): string {
  const shown = rows.map(([first = '', ...rest], n) => [first === rows[n - 1]?.[0] ? '' : first, ...rest])
  const line = (cells: readonly string[]): string => `| ${cells.join(' | ')} |`
  const rule = `|${head.map((_, n) => (n === 0 ? '---' : '---:')).join('|')}|`
  return [line(head), rule, ...shown.map(line)].join('\n')
}
