import type { CandidateName } from './candidates.ts'
import type { Child } from './child.ts'
import type { LoadResult } from './load.ts'
import { median } from './machine.ts'
import { measure, once, type Plan } from './measure.ts'
import { SCENARIOS, type Scenario } from './scenarios.ts'

/** Share of a candidate's maximum rate. */
const SHARE = 0.7
const TAIL = ['proxy-redis', 'nginx-lua'] as const

export interface Tail {
  readonly scenario: Scenario
  readonly candidate: CandidateName
  /** Requests per second when every connection is always busy. */
  readonly saturation: number
  /** Milliseconds at {@link SHARE} of it, from the moment at which each request was due. */
  readonly p50: number
  readonly p99: number
  /** The part of it before the request was sent. */
  readonly lateP99: number
}

/** Paces each candidate at a share of its own saturation; the slow answers of one request do not delay the next. */
export async function tails(
  running: ReadonlyMap<CandidateName, Child>,
  upstreamPort: number,
  plan: Plan,
): Promise<Tail[]> {
  const found: Tail[] = []
  for (const scenario of SCENARIOS.filter(({ id }) => id === 'first' || id === 'replay')) {
    const cells = await measure({ ...scenario, candidates: TAIL }, running, upstreamPort, plan)
    const results = cells.map((): LoadResult[] => [])
    for (let n = 0; n < plan.rounds; n++)
      for (const [at, { candidate, perSecond }] of cells.entries()) {
        const own = { ...plan, milliseconds: 2 * plan.milliseconds, perSecond: SHARE * perSecond }
        const child = running.get(candidate) as Child
        results[at]?.push(await once(scenario, candidate, child, upstreamPort, own))
      }
    for (const [at, { candidate, perSecond }] of cells.entries()) {
      const of = (figure: 'p50' | 'p99' | 'lateP99'): number =>
        median((results[at] ?? []).map((result) => result[figure]))
      found.push({
        scenario,
        candidate,
        saturation: perSecond,
        p50: of('p50'),
        p99: of('p99'),
        lateP99: of('lateP99'),
      })
    }
  }
  return found
}
