import { type CandidateName, protocolOf } from './candidates.ts'
import type { Child } from './child.ts'
import { type LoadResult, load } from './load.ts'
import { median } from './machine.ts'
import { control, type Round, type Scenario } from './scenarios.ts'

export interface Cell extends LoadResult {
  readonly scenario: Scenario
  readonly candidate: CandidateName
  /** Resident megabytes at the end of the last round. */
  readonly residentMb: number
}

export interface Plan {
  readonly rounds: number
  readonly milliseconds: number
  /** Limit of the warm-up round, which also ends after {@link WARM} requests. */
  readonly warmUp: number
  readonly most?: number
  readonly connections: number
  /** Requests per second, paced; absent: as many as the connections take. */
  readonly perSecond?: number
}

/** Measures one scenario: after a warm-up round, the candidates take turns; each figure is the median. */
export async function measure(
  scenario: Scenario,
  running: ReadonlyMap<CandidateName, Child>,
  upstreamPort: number,
  plan: Plan,
): Promise<Cell[]> {
  const present = scenario.candidates.filter((name) => running.has(name))
  const results = new Map<CandidateName, LoadResult[]>(present.map((name) => [name, []]))
  for (let n = 0; n <= plan.rounds; n++) {
    // Each begins once, so that no candidate always follows the same one.
    const turn = n % present.length
    for (const candidate of [...present.slice(turn), ...present.slice(0, turn)]) {
      const child = running.get(candidate) as Child
      const own = n === 0 ? warmUpOf(plan, scenario) : plan
      const result = await once(scenario, candidate, child, upstreamPort, own)
      if (n > 0) results.get(candidate)?.push(result)
    }
  }
  return present.map((candidate) => {
    const all = results.get(candidate) ?? []
    const of = (figure: keyof LoadResult): number => median(all.map((result) => result[figure]))
    return {
      scenario,
      candidate,
      requests: all.reduce((sum, { requests }) => sum + requests, 0),
      cpuPerRequest: of('cpuPerRequest'),
      perSecond: of('perSecond'),
      p50: of('p50'),
      p99: of('p99'),
      lateP99: of('lateP99'),
      residentMb: (running.get(candidate) as Child).residentMb('VmRSS'),
    }
  })
}

/** By then V8 has compiled the whole path. */
const WARM = 40_000

export function warmUpOf(plan: Plan, scenario: Scenario): Plan {
  return { ...plan, milliseconds: Math.min(scenario.warmUp ?? plan.warmUp, plan.warmUp), most: WARM }
}

let rounds = 0
const started = Date.now().toString(36)

/** One round; `around` runs only the load, not its preparation. */
export async function once(
  scenario: Scenario,
  candidate: CandidateName,
  child: Child,
  upstreamPort: number,
  plan: Plan,
  around: (run: () => Promise<LoadResult>) => Promise<LoadResult> = (run) => run(),
): Promise<LoadResult> {
  const name = `b3a1f2-${started}-${String(rounds++).padStart(6, '0')}`
  const round: Round = { candidate, port: child.port, upstreamPort, name }
  const undo = await scenario.prepare?.(round)
  const countBefore = await control(upstreamPort, 'count')
  const run = (): Promise<LoadResult> =>
    load({
      port: child.port,
      protocol: protocolOf(candidate),
      connections: plan.connections,
      milliseconds: plan.milliseconds,
      ...(plan.most === undefined ? {} : { most: plan.most }),
      ...(plan.perSecond === undefined ? {} : { perSecond: plan.perSecond }),
      request: (n) => scenario.request(round, n),
      status: scenario.status,
      cpu: child.cpu,
    })
  const result = await around(run).catch((error: unknown) => {
    throw new Error(`${scenario.title}, ${candidate}: ${(error as Error).message}`, { cause: error })
  })
  const executed = (await control(upstreamPort, 'count')) - countBefore
  if (executed !== scenario.executes * result.requests)
    throw new Error(`${scenario.title}, ${candidate}: ${executed} of ${result.requests} were executed`)
  await undo?.()
  return result
}
