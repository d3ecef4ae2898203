/**
 * `npm run capacity`: servers, cores and connections for a workload (docs/scale.md). Every figure beside the options comes from
 * measured.ts.
 *
 *   --store NAME       redis (default), postgres, sqlite
 *   --first N          new keys per second (1000), --replays N repeated requests per second (100)
 *   --response SIZE    of a response (300B), --ttl TIME (24h), --body-ttl TIME (none), --keep response | outcome
 *   --server SIZE      memory or disk of a server (64GiB), --replicas N (1), --load N how busy a core may be (0.5), --wait
 *   --day              instead, a day of a Redis cluster at --first and --replays, for each of --masters N,…: a hot shard, a failover
 *                      each hour, a region lost
 *   --measure          instead, measures on servers of its own what measured.ts says, and two points of the model
 */
import { parseArgs } from 'node:util'
import { SCALARS } from '../../src/config/scalars.ts'
import type { Parsed } from '../../src/config/units.ts'
import { simulateDay } from './day.ts'
import { measure } from './measure.ts'
import { COSTS, SHARDS, type StoreName } from './measured.ts'
import { planOf } from './plan.ts'

const { values } = parseArgs({
  options: {
    store: { type: 'string', default: 'redis' },
    first: { type: 'string', default: '1000' },
    replays: { type: 'string', default: '100' },
    response: { type: 'string', default: '300B' },
    ttl: { type: 'string', default: '24h' },
    'body-ttl': { type: 'string' },
    keep: { type: 'string', default: 'response' },
    server: { type: 'string', default: '64GiB' },
    replicas: { type: 'string', default: '1' },
    load: { type: 'string', default: '0.5' },
    wait: { type: 'boolean', default: false },
    day: { type: 'boolean', default: false },
    masters: { type: 'string', default: '64,128,256' },
    measure: { type: 'boolean', default: false },
  },
})

function refuse(flag: string, message: string): never {
  process.stderr.write(`--${flag}: ${message}\n`)
  process.exit(2)
}

function read<T>(
  flag: 'response' | 'ttl' | 'body-ttl' | 'server',
  scalar: { parse(text: string): Parsed<T> },
): T {
  const parsed = scalar.parse(values[flag] ?? '')
  return parsed.ok ? parsed.value : refuse(flag, parsed.message)
}

function number(
  flag: 'first' | 'replays' | 'replicas' | 'load' | 'masters',
  allowed: string,
  test: (n: number) => boolean,
  text = values[flag],
): number {
  const value = Number(text)
  return text !== '' && test(value)
    ? value
    : refuse(flag, `found ${JSON.stringify(text)}; allowed: ${allowed}`)
}

function choice<T extends string>(flag: 'store' | 'keep', allowed: readonly T[]): T {
  const found = allowed.find((one) => one === values[flag])
  return found ?? refuse(flag, `found ${JSON.stringify(values[flag])}; allowed: ${allowed.join(', ')}`)
}

const count = (n: number): string => n.toLocaleString('en', { maximumFractionDigits: n < 10 ? 2 : 0 })
const say = (...rows: readonly (readonly [what: string, value: string])[]): void => {
  for (const [what, value] of rows) process.stdout.write(`${what.padEnd(30)}${value}\n`)
}

/** Of the columns of a day. */
const WIDTHS = [7, 9, 8, 8, 8, 9, 26, 26, 16]

const first = number('first', 'a rate per second of 0 to 100,000,000', (n) => n >= 0 && n <= 1e8)
const replays = number('replays', 'a rate per second of 0 to 100,000,000', (n) => n >= 0 && n <= 1e8)
if (values.measure) await measure(say)
else if (values.day) day()
else plan()

function plan(): void {
  const store = choice('store', Object.keys(COSTS) as StoreName[])
  const replicas = number(
    'replicas',
    'a whole number of 0 to 5',
    (n) => Number.isInteger(n) && n >= 0 && n <= 5,
  )
  const load = number('load', 'a share above 0, up to 0.9', (n) => n > 0 && n <= 0.9)
  const bodyTtl = values['body-ttl'] === undefined ? null : read('body-ttl', SCALARS.retention)
  const [response, ttl] = [read('response', SCALARS.bufferSize), read('ttl', SCALARS.retention)]
  const work = {
    store,
    first,
    replays,
    response,
    ttl,
    bodyTtl,
    keep: choice('keep', ['response', 'outcome']),
  }
  const found = planOf(work, { size: read('server', SCALARS.bufferSize), load, waits: values.wait })
  const servers = found.masters * (1 + replicas)
  const copies = `${replicas} ${replicas === 1 ? 'replica' : 'replicas'}`
  say(
    ['records', count(found.records)],
    ['bytes of one copy', `${count(found.bytes / 2 ** 30)} GiB`],
    [
      'servers',
      found.masters === 1 ? `1 and ${copies}` : `${servers}: ${found.masters} masters, ${copies} each`,
    ],
    [
      'cores that the servers use',
      `${count(found.cores)}, the busiest ${Math.round(found.busiest * 100)} % of one`,
    ],
    ['proxies, a core each', `${found.proxies} at ${Math.round(load * 100)} %`],
    ['connections per server', `${found.connectionsPerMaster}`],
    ...found.limits.map((limit) => ['not possible', limit] as const),
  )
}

function day(): void {
  const each = values.masters.split(',')
  const row = (cells: readonly string[]): void =>
    void process.stdout.write(`${cells.map((cell, n) => cell.padStart(WIDTHS[n] as number)).join('')}\n`)
  row(['masters', 'busiest', 'p50 ms', 'p99', 'p99.9', 'refused', 'a failover', 'a region', 'given up'])
  for (const text of each) {
    const masters = number(
      'masters',
      `whole numbers of 3 to ${SHARDS}`,
      (n) => Number.isInteger(n) && n >= 3 && n <= SHARDS,
      text,
    )
    const { load, waits, refused, region, secondsOfFailovers, givenUp } = simulateDay({
      masters,
      first,
      replays,
    })
    const ms = [waits.p50, waits.p99, waits.p999].map((wait) => wait.toFixed(2))
    row([
      `${masters}`,
      `${Math.round(load.busiest * 100)} %`,
      ...ms,
      `${(refused.share * 100).toFixed(2)} %`,
      `${count(refused.perFailover)} in ${Math.round(secondsOfFailovers / 24)} s`,
      `${count(region.refused)} in ${region.seconds} s`,
      count(givenUp),
    ])
  }
}
