import t from 'tap'
import { BASELINE_REQUESTS, CASES, PROFILES, type Profile } from '../../src/probe/cases.ts'
import type { Report } from '../../src/probe/run.ts'
import { command } from '../support/commands.ts'
import { type Fault, type Holding, orderApi, PROBE_WORDS } from '../support/probed.ts'

const HOLDING: Readonly<Record<string, Holding>> = {
  'two-at-once': { until: 4 },
  'ten-at-once': { until: 12 },
  'client-leaves': { left: true },
}

for (const profile of PROFILES)
  for (const counts of [true, false])
    t.test(
      `${profile}: an API that does it right passes every case, ${counts ? '' : 'not '}counted`,
      async (t) => {
        await using api = await orderApi(profile)
        const counter = counts ? ['--count-url', `${api.url}/count`] : []
        const said = await command([
          'probe',
          `${api.url}/orders`,
          ...PROBE_WORDS,
          '--profile',
          profile,
          ...counter,
        ])
        t.equal(said.err, '')
        const { cases, requests } = JSON.parse(said.out) as Report
        t.strictSame(
          cases.filter(({ verdict }) => verdict !== 'passed'),
          [],
        )
        t.equal(cases.length, CASES.length)
        t.equal(said.code, 0)
        const most = CASES.reduce((sum, one) => sum + one.requests, BASELINE_REQUESTS)
        t.ok(requests <= most, `${requests} requests`)
        t.equal(api.seen.filter(({ method }) => method === 'POST').length, requests)
      },
    )

// biome-ignore format: a table
const FOUND: readonly (readonly [Fault, caseId: string, outcomes: Record<string, readonly string[]>])[] = [
  ['forgets', 'same-key', { ietf: ['executed'], stripe: ['executed'], ours: ['executed'] }],
  ['loses-status', 'same-key', { ietf: ['other-status'], stripe: ['other-status'], ours: ['other-status'] }],
  ['writes-anew', 'same-key', { ietf: ['other-body'], stripe: ['other-body'], ours: ['other-body'] }],
  ['loses-headers', 'same-key', { ietf: ['replayed', 'other-location'], stripe: ['replayed', 'other-location'], ours: ['replayed', 'other-location'] }],
  ['marks-nothing', 'same-key', { stripe: ['replayed', 'unmarked'], ours: ['replayed', 'unmarked'] }],
  ['ignores-payload', 'other-payload', { ietf: ['replayed'], stripe: ['replayed'], ours: ['replayed'] }],
  ['forgets', 'other-payload', { ietf: ['executed'] }],
  ['races', 'two-at-once', { ietf: ['executed'], stripe: ['executed'], ours: ['executed'] }],
  ['races', 'ten-at-once', { ietf: ['executed'], stripe: ['executed'], ours: ['executed'] }],
  ['forgets-leavers', 'client-leaves', { ietf: ['executed'], stripe: ['executed'], ours: ['executed'] }],
  ['shares-no-key', 'no-key', { ietf: ['executed', 'replayed'], stripe: ['executed', 'replayed'], ours: ['executed', 'replayed'] }],
  ['shares-empty-key', 'empty-key', { ietf: ['executed', 'replayed'], stripe: ['executed', 'replayed'], ours: ['executed', 'replayed'] }],
  ['fails-on-empty-key', 'empty-key', { ietf: ['none', 'none'] }],
  ['truncates', 'long-key', { ietf: ['executed', 'replayed'], stripe: ['executed', 'replayed'], ours: ['executed', 'replayed'] }],
  ['refuses-quotes', 'quoted-key', { ours: ['400 idempotency_key_invalid'] }],
  ['keeps-quotes', 'bare-key', { ours: ['executed'] }],
  ['shares-callers', 'other-caller', { ietf: ['replayed'], stripe: ['replayed'], ours: ['replayed'] }],
  ['shares-paths', 'other-path', { ietf: ['replayed'], stripe: ['replayed'], ours: ['replayed'] }],
  ['compares-bytes', 'json-order', { ours: ['422 idempotency_key_reused'] }],
  ['sticks-on-error', 'after-error', { ietf: ['409', '422'], stripe: ['409', '400'], ours: ['409 idempotency_key_in_progress', '422 idempotency_key_reused'] }],
  ['frees-after-5xx', 'after-5xx', { ietf: ['executed'], stripe: ['executed'], ours: ['executed'] }],
]

for (const [fault, id, profiles] of FOUND)
  t.test(`${id} finds an API that ${fault.replaceAll('-', ' ')}, and nothing without it`, async (t) => {
    for (const [profile, outcomes] of Object.entries(profiles))
      for (const mistake of [fault, null]) {
        await using api = await orderApi(profile as Profile, mistake, HOLDING[id])
        const counter = ['--count-url', `${api.url}/count`]
        const words = [`${api.url}/orders`, ...PROBE_WORDS, '--profile', profile, '--case', id, ...counter]
        const said = await command(['probe', ...words])
        t.equal(said.err, '')
        const [found, ...more] = (JSON.parse(said.out) as Report).cases
        t.equal(more.length, 0)
        const expected = mistake === null ? 'passed' : 'failed'
        t.strictSame(
          [found?.verdict, said.code],
          [expected, mistake === null ? 0 : 1],
          `${profile} ${mistake}`,
        )
        if (mistake !== null) t.strictSame(found?.outcomes, outcomes, profile)
      }
  })

t.test('without a counter, responses tell that the work was done again', async (t) => {
  for (const [fault, id] of [
    ['forgets', 'same-key'],
    ['races', 'two-at-once'],
  ] as const) {
    await using api = await orderApi('ietf', fault, HOLDING[id])
    const said = await command(['probe', `${api.url}/orders`, ...PROBE_WORDS, '--case', id])
    const [found] = (JSON.parse(said.out) as Report).cases
    t.match(found, { verdict: 'failed', outcomes: ['executed'], executions: null }, fault)
  }
})

t.test('every case has a fault that it finds', async (t) => {
  t.strictSame(new Set(FOUND.map(([, id]) => id)), new Set(CASES.map(({ id }) => id)))
})
