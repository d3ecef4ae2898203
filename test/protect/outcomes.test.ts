import t from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import {
  CLAIM_RESULTS,
  COMPLETION_RESULTS,
  isPrevented,
  namesOf,
  OTHER_EVENTS,
  possibleOutcomes,
  RECONCILE_RESULTS,
  REQUEST_OUTCOMES,
  type RequestOutcome,
  SHADOW_VERDICTS,
} from '../../src/protect/outcomes.ts'
import { HOUR, route, SECOND } from './harness.ts'

const words = (text: string): string => text.replaceAll(/\s+/g, ' ')

/** The names of a table's rows by what `of` says of each. */
function by<Name extends string, Row>(
  table: Readonly<Record<Name, Row>>,
  of: (row: Row) => string | undefined,
): Record<string, string> {
  const groups = Map.groupBy(namesOf(table), (name) => of(table[name]) ?? 'none')
  return Object.fromEntries([...groups].map(([group, names]) => [group, names.join(' ')]))
}

void t.test('§13 an outcome says who has to fix something', async (t) => {
  const claims = 'created replay in_progress key_misuse failed_retry unknown error'
  t.same(namesOf(CLAIM_RESULTS), claims.split(' '))
  t.same(
    by(REQUEST_OUTCOMES, ({ group }) => group),
    {
      served: 'executed replayed waited bypassed passed',
      duplicate: 'in_progress unknown expired',
      client: 'misuse key_missing key_invalid caller_missing',
      error:
        words(`response_unavailable store_unavailable upstream_unreachable upstream_failed upstream_timeout upstream_slow
        request_too_large request_timeout rate_limited replay_forbidden overloaded`),
    },
  )
})

void t.test('an event of a history is shown as good, as bad or as neither', async (t) => {
  const moodOf = ({ mood }: { mood?: string }): string | undefined => mood
  t.same(by(REQUEST_OUTCOMES, moodOf), {
    good: 'executed replayed waited',
    bad: words(`misuse unknown store_unavailable upstream_unreachable upstream_failed upstream_timeout upstream_slow
      replay_forbidden overloaded`),
    none: words(`in_progress key_missing key_invalid response_unavailable expired bypassed caller_missing request_too_large
      request_timeout rate_limited passed`),
  })
  t.same(by(COMPLETION_RESULTS, moodOf), {
    good: 'stored released recovered',
    bad: 'unknown stale deferred',
    none: 'too_large',
  })
  t.same(by(RECONCILE_RESULTS, moodOf), {
    good: 'completed retryable',
    bad: 'failed dead_lettered',
    none: 'scheduled pending',
  })
  t.same(by(OTHER_EVENTS, moodOf), { bad: 'lease_expired', none: 'claimed aborted' })
})

void t.test('a retry that was answered without executing is a prevented duplicate', async (t) => {
  t.same(namesOf(REQUEST_OUTCOMES).filter(isPrevented), [
    'replayed',
    'in_progress',
    'waited',
    'unknown',
    'response_unavailable',
    'expired',
  ])
  for (const event of ['claimed', 'no such event', '']) t.notOk(isPrevented(event), event)
})

void t.test('a verdict of shadow mode says what would have happened', async (t) => {
  t.same(
    by(SHADOW_VERDICTS, ({ effect }) => effect),
    {
      executed: 'first retry passed upstream_unreachable upstream_failed',
      prevented:
        words(`replay_same replay_differs not_compared response_unavailable in_progress waited unknown
        expired`),
      refused: 'misuse key_missing key_invalid caller_missing request_too_large rate_limited',
      unjudged: 'request_aborted overloaded store_unavailable error',
    },
  )
})

void t.test('an outcome that a route’s settings exclude is not among its possible ones', async (t) => {
  const rows: readonly (readonly [
    RequestOutcome,
    without: Partial<RoutePolicy>,
    having: Partial<RoutePolicy>,
  ])[] = [
    [
      'waited',
      { inFlight: { mode: 'reject', wait: SECOND, status: 409 } },
      { inFlight: { mode: 'wait', wait: SECOND, status: 409 } },
    ],
    [
      'key_missing',
      { key: { ...route().key, presence: 'optional' } },
      { key: { ...route().key, presence: 'required' } },
    ],
    [
      'passed',
      { key: { ...route().key, presence: 'required' } },
      { key: { ...route().key, presence: 'optional' } },
    ],
    ['expired', { tombstone: 0 }, { tombstone: 1 }],
    ['bypassed', { onStoreUnavailable: 'reject' }, { onStoreUnavailable: 'bypass' }],
    ['upstream_slow', { respondWithin: null }, { respondWithin: SECOND }],
    [
      'caller_missing',
      { scope: { ...route().scope, caller: [] } },
      { scope: { ...route().scope, caller: [{ kind: 'header', name: 'x-user' }] } },
    ],
    [
      'rate_limited',
      { limits: { ...route().limits, newKeys: null } },
      { limits: { ...route().limits, newKeys: { count: 1, per: HOUR } } },
    ],
    ['replay_forbidden', { authorizeReplay: null }, { authorizeReplay: { path: '/allowed', cache: 0 } }],
  ]
  for (const [outcome, without, having] of rows) {
    t.notOk(possibleOutcomes(route(without)).includes(outcome), `${outcome} is impossible`)
    t.ok(possibleOutcomes(route(having)).includes(outcome), `${outcome} is possible`)
  }
  const always = namesOf(REQUEST_OUTCOMES).filter((outcome) => !rows.some(([name]) => name === outcome))
  t.same(
    always.filter((outcome) => !possibleOutcomes(route()).includes(outcome)),
    [],
  )
  for (const mode of ['off', 'shadow'] as const) t.same(possibleOutcomes(route({ mode })), ['passed'], mode)
})
