import { readFileSync } from 'node:fs'
import t from 'tap'
import { PROFILES } from '../../src/probe/cases.ts'
import type { Report, Verdict } from '../../src/probe/run.ts'
import { unprotected } from '../support/probe-targets.ts'
import { direct, GUIDE, proxied, sixReports, withReports } from './reports.ts'

function withVerdict({ cases }: Report, wanted: Verdict): Record<string, string> {
  const found = cases.filter(({ verdict }) => verdict === wanted)
  return Object.fromEntries(found.map(({ id, outcomes }) => [id, [...new Set(outcomes)].join(', ')]))
}

/** By Stripe's rules, a key belongs to one path; by ours, each path has its own. */
const NOTED: Readonly<Record<string, Readonly<Record<string, string>>>> = {
  stripe: { 'other-path': 'executed' },
}

for (const profile of PROFILES)
  t.test(
    `${profile}: this proxy before an API that knows no keys passes, and the API alone executes twice`,
    async (t) => {
      const report = await proxied('/orders', profile)
      t.strictSame(withVerdict(report, 'failed'), {})
      t.strictSame(withVerdict(report, 'noted'), NOTED[profile] ?? {})
      t.strictSame(withVerdict(report, 'skipped'), {})
      const alone = await direct(unprotected, '/orders', profile)
      t.match(withVerdict(alone, 'failed'), {
        'same-key': 'executed',
        'two-at-once': 'executed',
        'client-leaves': 'executed',
        'after-5xx': 'executed',
      })
      t.equal(alone.cases.find(({ id }) => id === 'ten-at-once')?.executions, 11)
    },
  )

t.test('an API that redirects is probed where it is; its answer is replayed by this proxy', async (t) => {
  t.strictSame(withVerdict(await proxied('/moved', 'ours'), 'failed'), {})
  t.match(withVerdict(await direct(unprotected, '/moved', 'ours'), 'failed'), { 'same-key': 'executed' })
})

t.test('what streams is not kept by this proxy: safe, and noted', async (t) => {
  const report = await proxied('/events', 'ours')
  t.strictSame(withVerdict(report, 'failed'), {})
  t.match(withVerdict(report, 'noted'), { 'same-key': '409 idempotency_response_unavailable' })
})

/** What these packages are known to do. */
const KNOWN: Readonly<Record<string, Readonly<Record<string, string>>>> = {
  // Keeps no header but Content-Type, and frees the key after a failure, whatever was done.
  'express-idempotency': { 'same-key': 'replayed, other-location, unmarked', 'after-5xx': 'executed' },
  // Its key is that of method and path alone.
  '@node-idempotency/core': { 'other-caller': 'replayed' },
  // Its key is what the JMESPath finds, and nothing else is compared unless a second one says so.
  Powertools: {
    'other-payload': 'replayed',
    'empty-key': 'executed, replayed',
    'other-caller': 'replayed',
    'other-path': 'replayed',
    'after-error': 'repeated, replayed',
  },
}

t.test('the known faults of three packages are found; the guide shows six reports', async (t) => {
  const reports = await sixReports()
  for (const [name, faults] of Object.entries(KNOWN))
    t.strictSame(withVerdict(reports[name] as Report, 'failed'), faults, name)
  const guide = readFileSync(GUIDE, 'utf8')
  t.equal(guide, withReports(guide, reports), 'run: node test/probe/reports.ts')
})
