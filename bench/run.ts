/**
 * `npm run bench`: measures the proxy and its alternatives in one run. See docs/internals/performance.md.
 *
 *   --quick          one short round each: checks that everything works, measures nothing
 *   --only ID,…      these scenarios (get post first replay in-flight first-large replay-large) or parts
 *                    (tail start records stops costs workers)
 *   --candidates …   these candidates
 *   --stores         only first executions and replays of this proxy on Redis, PostgreSQL and the stores of stores.ts;
 *                    --write updates their own section
 *   --rounds N --seconds S
 *   --dist FOLDER    folder of the built JavaScript (default .bench/dist); --no-build uses it as it is
 *   --write          writes the result into docs/internals/performance.md
 */
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { build, ROOT } from '../scripts/build.ts'
import { NO_POSTGRES, PostgresServer } from '../test/support/postgres.ts'
import { freePort } from '../test/support/redis.ts'
import { CANDIDATES, type CandidateName, PARTS, startCandidate, TITLES, type World } from './candidates.ts'
import { Child } from './child.ts'
import { costs } from './costs.ts'
import { pinCores } from './machine.ts'
import { type Cell, measure, type Plan } from './measure.ts'
import { liveRecords } from './records.ts'
import { report, write } from './report.ts'
import { SCENARIOS } from './scenarios.ts'
import { startUp } from './start.ts'
import { longestStops } from './stops.ts'
import { STORE_CANDIDATES, startStores } from './stores.ts'
import { type Tail, tails } from './tail.ts'
import { severalWorkers } from './workers.ts'

const { values: flags } = parseArgs({
  options: {
    quick: { type: 'boolean', default: false },
    only: { type: 'string' },
    candidates: { type: 'string' },
    stores: { type: 'boolean', default: false },
    rounds: { type: 'string' },
    seconds: { type: 'string' },
    dist: { type: 'string', default: join(ROOT, '.bench/dist') },
    'no-build': { type: 'boolean', default: false },
    write: { type: 'boolean', default: false },
  },
})
const plan: Plan = {
  rounds: Number(flags.rounds ?? (flags.quick ? 1 : 5)),
  milliseconds: Number(flags.seconds ?? (flags.quick ? 0.1 : 0.7)) * 1000,
  warmUp: flags.quick ? 100 : 30_000,
  connections: flags.quick ? 8 : 64,
}
const only = flags.only?.split(',') ?? (flags.stores ? ['first', 'replay'] : null)
const wants = (id: string): boolean => only === null || only.includes(id)
const say = (text: string): void => void process.stderr.write(`${text}\n`)

const dist = resolve(flags.dist)
if (!flags['no-build']) await build(dist)
const cores = pinCores()
say(cores.remark)
const folder = mkdtempSync(join(tmpdir(), 'bench-'))
process.once('exit', () => rmSync(folder, { recursive: true, force: true }))

await using upstream = await serve('upstream', [
  process.execPath,
  fileURLToPath(new URL('servers/upstream.ts', import.meta.url)),
])
await using redis = await serve('redis', [process.env['REDIS_SERVER'] ?? 'redis-server'])
const OF_STORES: readonly CandidateName[] = ['proxy-redis', 'proxy-postgres', ...STORE_CANDIDATES]
const named = flags.candidates?.split(',')
const wanted = [...CANDIDATES, ...STORE_CANDIDATES, ...PARTS].filter(
  (name) =>
    named?.includes(name) ??
    (flags.stores ? OF_STORES : (CANDIDATES as readonly CandidateName[])).includes(name),
)
await using postgres = wanted.includes('proxy-postgres') && !NO_POSTGRES ? await PostgresServer.start() : null
await using owner = new AsyncDisposableStack()
const stores = await startStores(owner, wanted)
const world: World = {
  folder,
  dist,
  cores,
  upstreamPort: upstream.port,
  redisPort: redis.port,
  postgres,
  stores,
}

const cells: Cell[] = []
const skipped: string[] = []
let tail: Tail[] | null = null
{
  await using candidates = new AsyncDisposableStack()
  const running = new Map<CandidateName, Child>()
  for (const name of wanted) {
    const child = await startCandidate(world, name)
    if (typeof child === 'string') {
      skipped.push(`${TITLES[name]} is left out: ${child}.`)
      say(skipped.at(-1) ?? '')
    } else running.set(name, candidates.use(child))
  }
  for (const scenario of SCENARIOS.filter(({ id }) => wants(id))) {
    say(scenario.title)
    cells.push(...(await measure(scenario, running, upstream.port, plan)))
  }
  if (wants('tail')) tail = await tails(running, upstream.port, plan)
}
const start = wants('start') ? await startUp(world, flags.quick) : null
const records = wants('records') ? await liveRecords(world, flags.quick, plan) : null
const stops = wants('stops') ? await longestStops(world, flags.quick) : null

const workers = wants('workers') ? await severalWorkers(world, flags.quick, plan) : null
const cost = wants('costs') ? await costs(world, wanted, plan) : null

const text = report({ cells, tail, cost, start, records, stops, workers, skipped, cores, plan })
process.stdout.write(`${text}\n`)
if (flags.write) write(text, flags.stores ? 'bench stores' : 'bench')

async function serve(what: 'upstream' | 'redis', command: string[]): Promise<Child> {
  const port = await freePort()
  const args =
    what === 'upstream'
      ? [String(port)]
      : ['--port', String(port), '--bind', '127.0.0.1', '--save', '', '--appendonly', 'no', '--dir', folder]
  return Child.spawn(port, [...command, ...args], folder)
}
