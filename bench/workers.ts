import { startProxy, type World } from './candidates.ts'
import type { Child } from './child.ts'
import { cpuMicros, median, residentMb } from './machine.ts'
import { once, type Plan, warmUpOf } from './measure.ts'
import { scenarioOf } from './scenarios.ts'

/** First executions on Redis by one process, and by a proxy with workers. */
export interface Workers {
  /** 1: without `workers`. */
  readonly workers: number
  readonly cpuPerRequest: number
  /** The part of it on the busiest process. Its inverse is the rate that the processes allow, each on a core of its own. */
  readonly busiest: number
  readonly perSecond: number
  /** Resident megabytes of the process that grew most, and of all. */
  readonly largestMb: number
  readonly allMb: number
}

const COUNTS = [1, 2]

export async function severalWorkers(world: World, quick: boolean, plan: Plan): Promise<Workers[]> {
  await using stack = new AsyncDisposableStack()
  const running = new Map<number, Child>()
  const store = `redis://127.0.0.1:${world.redisPort}`
  for (const workers of COUNTS)
    running.set(workers, stack.use(await startProxy(world, store, [], { workers })))
  const rounds = new Map(COUNTS.map((workers) => [workers, [] as Round[]]))
  const scenario = scenarioOf('first')
  for (let n = 0; n <= plan.rounds; n++)
    for (const workers of n % 2 === 0 ? COUNTS : COUNTS.toReversed()) {
      const each = n === 0 ? warmUpOf(plan, scenario) : plan
      // As many connections for each: what arrives together is served together, at less cost.
      const own = { ...each, connections: each.connections * workers }
      const round = await oneRound(world, running.get(workers) as Child, own)
      if (n > 0 || quick) rounds.get(workers)?.push(round)
    }
  return COUNTS.map((workers) => {
    const of = (figure: keyof Round): number => median((rounds.get(workers) ?? []).map((one) => one[figure]))
    const memory = (running.get(workers) as Child).pids.map((pid) => residentMb([pid], 'VmRSS'))
    return {
      workers,
      cpuPerRequest: of('cpuPerRequest'),
      busiest: of('busiest'),
      perSecond: of('perSecond'),
      largestMb: Math.max(...memory),
      allMb: memory.reduce((sum, one) => sum + one, 0),
    }
  })
}

type Round = Pick<Workers, 'cpuPerRequest' | 'busiest' | 'perSecond'>

async function oneRound(world: World, child: Child, plan: Plan): Promise<Round> {
  const { pids } = child
  const spent = () => pids.map((pid) => cpuMicros([pid]))
  let busiest = 0
  const result = await once(
    scenarioOf('first'),
    'proxy-redis',
    child,
    world.upstreamPort,
    plan,
    async (run) => {
      const before = spent()
      const found = await run()
      busiest = Math.max(...spent().map((micros, n) => micros - (before[n] ?? 0))) / found.requests
      return found
    },
  )
  return { cpuPerRequest: result.cpuPerRequest, busiest, perSecond: result.perSecond }
}
