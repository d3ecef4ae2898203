import { baseline, type Case, type Outcome, type Profile } from './cases.ts'
import { type Prober, Stopped } from './prober.ts'

/** `noted`: safe, but not what the profile requires. */
export type Verdict = 'passed' | 'noted' | 'failed' | 'skipped'

export interface CaseReport {
  readonly id: string
  readonly asks: string
  readonly verdict: Verdict
  readonly outcomes: readonly Outcome[]
  /** What the profile requires if the case failed or was noted; what is missing if it was skipped. */
  readonly note: string
  /** 0: no complete response. */
  readonly statuses: readonly number[]
  /** Number of executions; null: no counter. */
  readonly executions: number | null
}

export interface Report {
  readonly url: string
  readonly profile: Profile
  readonly requests: number
  readonly cases: readonly CaseReport[]
}

/** Runs the cases one after the other. `begins` is called before each. */
export async function runCases(
  prober: Prober,
  cases: readonly Case[],
  profile: Profile,
  begins: (id: string) => void,
): Promise<Report> {
  const { template } = prober
  await baseline(prober)
  const reports: CaseReport[] = []
  for (const one of cases) {
    const { id, asks, wants } = one
    const lack = one.lacks?.(template) ?? null
    prober.beginCase()
    begins(id)
    const outcomes = lack === null ? await one.run(prober, profile) : []
    const statuses = prober.answers.map(({ status }) => status)
    const gone = prober.answers.find(({ status, body }) => status === 0 && body.includes('ECONNREFUSED'))
    if (gone !== undefined)
      throw new Stopped(
        `${template.url.href} no longer answers since the case ${id}: ${gone.body.toString()}`,
      )
    const verdict = lack === null ? verdictOf(outcomes, wants[profile].split(' ')) : 'skipped'
    const note = lack ?? (verdict === 'passed' ? '' : askedFor(wants[profile]))
    const executions = lack === null ? prober.done : null
    reports.push({ id, asks, verdict, outcomes, note, statuses, executions })
  }
  return { url: template.url.href, profile, requests: prober.requests, cases: reports }
}

function verdictOf(outcomes: readonly Outcome[], wants: readonly string[]): Verdict {
  const ranks = outcomes.map((outcome) => {
    const words = [...outcome.split(' '), outcome.replace(/^4\d\d.*/, '4xx')]
    if (words.some((word) => wants.includes(word))) return 0
    return words.some((word) => wants.includes(`~${word}`)) ? 1 : 2
  })
  return (['passed', 'noted', 'failed'] as const)[Math.max(0, ...ranks)] as Verdict
}

function askedFor(wants: string): string {
  return wants
    .split(' ')
    .filter((one) => !one.startsWith('~'))
    .join(' or ')
}
