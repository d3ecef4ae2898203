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

/** Rows of a table for people. */
export function rowsOf({ cases }: Report): string[][] {
  const counted = cases.some(({ executions }) => executions !== null)
  const rows = cases.map((one) => [
    one.id,
    one.verdict === 'failed' ? 'FAILED' : one.verdict,
    shown(one.statuses),
    ...(counted ? [one.executions === null ? '' : String(one.executions)] : []),
    saysOf(one),
  ])
  return [['CASE', 'VERDICT', 'STATUSES', ...(counted ? ['EXECUTED'] : []), 'FOUND'], ...rows]
}

export function summaryOf({ url, profile, requests, cases }: Report): string {
  const count = (verdict: string): string =>
    `${cases.filter((one) => one.verdict === verdict).length} ${verdict}`
  const counts = ['passed', 'noted', 'failed', 'skipped'].map(count).join(', ')
  const isCounted = cases.some(({ executions }) => executions !== null)
  const proof = isCounted ? '' : '; executions are inferred from responses; --count-url counts them'
  return `${url} by ${profile}: ${counts}; ${requests} requests${proof}`
}

/** JUnit XML, for CI. */
export function junitOf({ url, profile, cases }: Report): string {
  const tests = cases.map((one) => {
    const head = `  <testcase classname="probe.${profile}" name="${escaped(one.id)}: ${escaped(one.asks)}"`
    const tag = { failed: 'failure', skipped: 'skipped', noted: 'system-out', passed: null }[one.verdict]
    if (tag === null) return `${head}/>`
    const text = escaped(
      tag === 'skipped' ? saysOf(one) : `${saysOf(one)} (${shown(one.statuses)}${timesOf(one)})`,
    )
    const inside = tag === 'system-out' ? `<${tag}>${text}</${tag}>` : `<${tag} message="${text}"/>`
    return `${head}>${inside}</testcase>`
  })
  const count = (verdict: string): number => cases.filter((one) => one.verdict === verdict).length
  return [
    '<?xml version="1.0" encoding="UTF-8"?>',
    `<testsuite name="idempotency-proxy probe ${escaped(url)}" tests="${cases.length}" failures="${count('failed')}" skipped="${count('skipped')}">`,
    ...tests,
    '</testsuite>',
    '',
  ].join('\n')
}

function saysOf({ verdict, outcomes, note }: CaseReport): string {
  const found = [...new Set(outcomes)].join(', ')
  if (verdict === 'passed') return found
  return verdict === 'skipped' ? note : `${found}; wanted ${note}`
}

function timesOf({ executions }: CaseReport): string {
  return executions === null ? '' : `; executed ${executions}×`
}

/** Merges equal neighbours, with their number. */
function shown(statuses: readonly number[]): string {
  const runs: { status: number; times: number }[] = []
  for (const status of statuses) {
    const last = runs.at(-1)
    if (last?.status === status) last.times++
    else runs.push({ status, times: 1 })
  }
  return runs
    .map(({ status, times }) => `${status === 0 ? 'none' : status}${times > 1 ? `×${times}` : ''}`)
    .join(' ')
}

function escaped(text: string): string {
  return text
    .replaceAll('&', '&amp;')
    .replaceAll('<', '&lt;')
    .replaceAll('>', '&gt;')
    .replaceAll('"', '&quot;')
}
