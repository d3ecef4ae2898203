import { hash, randomBytes } from 'node:crypto'
import t from 'tap'
import { type RoutePolicy } from '../../src/core/policy.ts'
import {
  CLAIM_RESULTS,
  COMPLETION_RESULTS,
  isPrevented,
  namesOf,
  possibleOutcomes,
  RECONCILE_RESULTS,
  REQUEST_OUTCOMES,
  type RequestOutcome,
  SHADOW_VERDICTS,
} from '../../src/protect/outcomes.ts'
import { CallerChanges, hashOf, KeyChurn, Latency, RecentGrants } from '../../src/protect/recent.ts'
import { type Execution } from '../../src/protect/request.ts'
import { HOUR, MINUTE, route, SECOND } from './harness.ts'

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
  for (const [table, labels] of [
    [CLAIM_RESULTS, 'created replay in_progress key_misuse failed_retry unknown error'],
    [COMPLETION_RESULTS, 'stored released unknown too_large stale recovered deferred'],
    [RECONCILE_RESULTS, 'scheduled completed retryable pending failed dead_lettered'],
  ] as const)
    t.same(namesOf<string>(table), labels.split(' '))
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
  const { key, scope, limits } = route()
  const keyed = (presence: 'optional' | 'required') => ({ key: { ...key, presence } })
  const duplicates = (mode: 'reject' | 'wait') => ({ inFlight: { mode, wait: SECOND, status: 409 } as const })
  const caller = [{ kind: 'header', name: 'x-user' }] as const
  const newKeys = { count: 1, per: HOUR }
  type Settings = Partial<RoutePolicy>
  // biome-ignore format: a table
  const rows: readonly (readonly [RequestOutcome, without: Settings, having: Settings])[] = [
    ['waited', duplicates('reject'), duplicates('wait')],
    ['key_missing', keyed('optional'), keyed('required')],
    ['passed', keyed('required'), keyed('optional')],
    ['expired', { tombstone: 0 }, { tombstone: 1 }],
    ['bypassed', { onStoreUnavailable: 'reject' }, { onStoreUnavailable: 'bypass' }],
    ['upstream_slow', { respondWithin: null }, { respondWithin: SECOND }],
    ['caller_missing', { scope: { ...scope, caller: [] } }, { scope: { ...scope, caller } }],
    ['rate_limited', { limits: { ...limits, newKeys: null } }, { limits: { ...limits, newKeys } }],
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

void t.test('§6 the latency of a route is what most of its latest answers took', async (t) => {
  const latency = new Latency()
  t.equal(latency.remaining('a', 0), Number.POSITIVE_INFINITY)
  latency.saw('a', 2000)
  t.equal(latency.remaining('a', 0), 2000, 'one call of 2 s')
  t.equal(latency.remaining('a', 1900), 100)
  t.equal(latency.remaining('a', 2000), 2000, 'slower than usual: perhaps as long again')
  t.equal(latency.remaining('a', 7000), 7000)
  t.equal(latency.remaining('b', 0), Number.POSITIVE_INFINITY, 'nothing is known of other routes')
  for (let n = 0; n < 2; n++) latency.saw('a', 100)
  t.equal(latency.remaining('a', 0), 2000)
  latency.saw('a', 100)
  t.equal(latency.remaining('a', 0), 100, 'a cold start is forgotten soon')
  latency.saw('a', 60_000)
  latency.saw('a', 100)
  t.equal(latency.remaining('a', 0), 2000)
  for (let n = 0; n < 100; n++) latency.saw('a', n % 10 === 0 ? 60_000 : 50)
  t.equal(latency.remaining('a', 0), 50, 'outliers count as one answer each')
  for (let n = 0; n < 16; n++) latency.saw('a', 5000)
  t.equal(latency.remaining('a', 0), 5000, 'old answers are forgotten')
  const route = { name: 'a', lease: 30_000 }
  t.equal(latency.retryIn(route, 3000, 0), 3000, 'what remains of the lease')
  t.equal(latency.retryIn(route, 90_000, 40_000), 30_000, 'a clock set back makes no lease longer')
  t.equal(latency.retryIn(route, 20_000, 0), 5000, 'what the answers take')
})

/** An execution of one operation under that record. */
function run(id: string, route: string, fingerprint: Buffer): Execution {
  return { id, operation: { route, fingerprint } } as unknown as Execution
}

const bytes = (text: string): Buffer => hash('sha256', text, 'buffer')

void t.test('§13 the same operation under a new key', async (t) => {
  await t.test('counts within a minute of its last execution', async (t) => {
    let now = 0
    const churn = new KeyChurn(() => now)
    const saw = (id: string) => churn.saw(run(id, 'r', bytes('x')), hashOf('a'))
    t.equal(saw('first'), false)
    t.equal(saw('first'), false, 'an execution after a proof that nothing was done')
    now += MINUTE - 1
    t.equal(saw('second'), true)
    now += MINUTE
    t.equal(saw('third'), false)
    now += 1
    t.equal(saw('second'), true)
  })
  await t.test('does not count for another caller, route or content', async (t) => {
    const churn = new KeyChurn(() => 0)
    let n = 0
    const saw = (caller: string | null, route: string, fingerprint: Buffer) =>
      churn.saw(run(String(n++), route, fingerprint), hashOf(caller ?? ''))
    const [same] = [bytes('x')]
    // 53 bits of the first eight bytes are compared.
    const others = [0, 1, 2, 4, 5, 6, 7].map((at) => {
      const other = Buffer.from(same)
      other[at] = (same[at] ?? 0) ^ (at === 2 ? 0x1f : 0xff)
      return other
    })
    const operations = [
      ...Array.from({ length: 300 }, (_, i) => [`Bearer ${i}`, 'r', same] as const),
      ...Array.from({ length: 300 }, (_, i) => ['a', `route-${i}`, same] as const),
      ...others.map((other) => ['a', 'r', other] as const),
      ...[null, 'x', 'a'].map((caller) => [caller, 'r', same] as const),
    ]
    for (const [caller, route, fingerprint] of operations)
      t.equal(
        saw(caller, route, fingerprint),
        false,
        `${caller} ${route} ${fingerprint.toString('hex', 0, 8)}`,
      )
    for (const [caller, route, fingerprint] of operations)
      if (!saw(caller, route, fingerprint)) t.fail(`${caller} ${route} is not recognised`)
  })
  await t.test('is forgotten after 10,000 others, and not after 5,000', async (t) => {
    const churn = new KeyChurn(() => 0)
    const saw = (id: string, content: Buffer) => churn.saw(run(id, 'r', content), hashOf('a'))
    saw('first', bytes('x'))
    for (let n = 0; n < 5000; n++) saw('a', randomBytes(32))
    t.equal(saw('second', bytes('x')), true)
    for (let n = 0; n < 10_000; n++) saw('a', randomBytes(32))
    t.equal(saw('third', bytes('x')), false)
  })
})

void t.test('§15.3 the same key and operation from another caller', async (t) => {
  await t.test('counts within ten minutes of its last execution', async (t) => {
    let now = 5 * MINUTE
    const changes = new CallerChanges(() => now)
    const saw = (caller: string) => changes.saw(run('id', 'r', bytes('x')), 'k', hashOf(caller))
    t.equal(saw('a'), false)
    t.equal(saw('a'), false)
    now += 10 * MINUTE - 1000
    t.equal(saw('b'), true)
    now += 10 * MINUTE
    t.equal(saw('c'), false)
    t.equal(saw('b'), true)
  })
  await t.test('does not count for another key, route or content, however many there are', async (t) => {
    const changes = new CallerChanges(() => HOUR)
    changes.saw(run('id', 'r', bytes('x')), 'k', 1)
    let counted = 0
    const saw = (route: string, fingerprint: Buffer, key: string, caller: number) => {
      if (changes.saw(run('id', route, fingerprint), key, caller)) counted++
    }
    saw('s', bytes('x'), 'k', 2)
    saw('r', bytes('y'), 'k', 2)
    saw('r', bytes('x'), 'K', 2)
    // Three times as many as there are slots.
    for (let n = 0; n < 200_000; n++) saw('r', bytes('x'), `key-${n}`, n)
    for (let n = 0; n < 200_000; n++) saw('r', randomBytes(32), 'k', n)
    t.equal(counted, 0)
    changes.saw(run('id', 'r', bytes('x')), 'k', 1)
    t.equal(changes.saw(run('id', 'r', bytes('x')), 'k', 2), true)
  })
})

void t.test('§6 a caller whom the upstream has allowed to see a replay', async (t) => {
  await t.test('need not be asked about for as long as the route says', async (t) => {
    let now = 0
    const grants = new RecentGrants(() => now)
    t.equal(grants.has('a'), false)
    grants.add('briefly', 1)
    t.equal(grants.has('briefly'), true)
    grants.add('never', 0)
    t.equal(grants.has('never'), false)
    grants.add('a', MINUTE)
    now += MINUTE - 1
    t.equal(grants.has('a'), true)
    t.equal(grants.has('b'), false)
    now += 1
    t.equal(grants.has('a'), false)
  })
  await t.test('is forgotten after 10,000 others', async (t) => {
    const grants = new RecentGrants(() => 0)
    grants.add('first', MINUTE)
    for (let n = 0; n <= 10_000; n++) grants.add(`not remembered ${n}`, 0)
    grants.add('again', MINUTE)
    for (let n = 2; n < 10_000; n++) grants.add(String(n), MINUTE)
    t.equal(grants.has('first'), true)
    grants.add('again', MINUTE)
    grants.add('one more', MINUTE)
    t.equal(grants.has('first'), false, 'the oldest')
    for (let n = 2; n < 10_000; n += 100) t.equal(grants.has(String(n)), true)
    grants.add('and one more', MINUTE)
    t.equal(grants.has('2'), false)
    t.equal(grants.has('again'), true, 'granted again since')
  })
})
