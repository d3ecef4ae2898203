import type { CaseReport, Report } from './run.ts'

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
  const proof = isCounted ? '' : '; executions are guessed from responses: --count-url proves them'
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
