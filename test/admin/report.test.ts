import t from 'tap'
import { Value } from 'typebox/value'
import { RecordLookup } from '../../src/admin/lookup.ts'
import { type RecheckPort, type Report, reportSchema } from '../../src/admin/report.ts'
import type { CounterSample } from '../../src/admin/shadow-tally.ts'
import type { Verification } from '../../src/core/reconcile/verify.ts'
import { newReconciliation, type RecordId } from '../../src/core/record.ts'
import { Audit } from '../../src/observe/audit.ts'
import { Metrics } from '../../src/observe/metrics.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { Records } from '../../src/store/records.ts'
import { load, UPSTREAM } from '../config/support.ts'
import { bytesOf, HOUR, newId, newToken } from '../store/fixtures.ts'
import { type AdminAnswer, injecting } from '../support/admin.ts'

const DAY = 24 * HOUR
const LONG = { dueIn: 20 * DAY, dropIn: 60 * DAY }

async function world(samples?: () => Promise<readonly CounterSample[]>, recheck?: RecheckPort) {
  const at = { now: 1_795_000_000_000 }
  const register = memoryStore({ clock: () => at.now, maxBytes: MEMORY_BYTES })
  const config = load(UPSTREAM)
  const inject = await injecting(
    {
      version: '0',
      config,
      records: new Records(register),
      store: register,
      subjects: new RecordLookup(config),
      waiters: { tell: () => {} },
      own: { isRunning: () => false, tell: async () => true },
      audit: await Audit.open(null, 'test', () => {}),
      history: { add: () => {} },
      announceDrain: (draining) => draining,
      ...(samples === undefined
        ? {}
        : { counters: async () => ({ since: at.now, samples: await samples() }) }),
      ...(recheck === undefined ? {} : { recheck }),
    },
    (error) => {
      throw error
    },
  )
  const put = async (
    state: Parameters<typeof bytesOf>[0],
    route: string,
    over: object = {},
    spans = LONG,
  ): Promise<RecordId> => {
    const id = newId()
    await register.put(id, bytesOf(state, newToken(), { route, ...over }), spans)
    return id
  }
  const note = (id: RecordId, tag: string, count = 1) =>
    register.history.append(id, [{ tag, count, firstAgo: 0, lastAgo: 0, text: '{}' }])
  const ask = (query: Record<string, string>): Promise<AdminAnswer> =>
    inject('GET', `/v1/report?${new URLSearchParams(query).toString()}`)
  const report = async (since: string, sample?: number): Promise<Report> => {
    const answer = await ask({ since, ...(sample === undefined ? {} : { sample: String(sample) }) })
    t.strictSame([...Value.Errors(reportSchema, answer.body)], [], 'matches its schema')
    return answer.body as Report
  }
  return { at, register, put, note, ask, report }
}

void t.test('O05 the report counts unknown records by route and age, whenever created', async (t) => {
  const { at, put, report } = await world()
  const reconciliation = { ...newReconciliation(at.now), deadLettered: true }
  await put('unknown', 'a', { reconciliation })
  await put('unknown', 'b')
  // Reads unknown when its lease has lapsed.
  await put('in_progress', 'b', {}, { dueIn: HOUR, dropIn: 60 * DAY })
  await put('in_progress', 'c')
  at.now += 6 * DAY
  await put('unknown', 'a')
  at.now += 1.5 * DAY
  await put('unknown', 'a')
  at.now += HOUR
  await put('unknown', 'a')
  const { unknown, period } = await report('1h')
  t.strictSame(unknown, [
    { route: 'a', under1h: 1, under1d: 1, under7d: 1, older: 1, deadLettered: 1 },
    { route: 'b', under1h: 0, under1d: 0, under7d: 0, older: 2, deadLettered: 0 },
  ])
  t.match(period, [{ route: 'a', records: 2, unknown: 2 }], 'created exactly an hour ago counts')
})

/** The figures of a route without records. */
// biome-ignore format: a list
const NONE = {
  records: 0, executed: 0, expired: 0, notExecuted: 0, running: 0, unknown: 0, attempts: 0, replayed: 0, prevented: 0,
  misuse: 0, lapsed: 0, recovered: 0, stale: 0, reconciled: 0, resolved: 0,
}

void t.test('O05 the report counts the period’s records by state and by their histories', async (t) => {
  const { at, put, note, report, register } = await world()
  await put('completed', 'old')
  at.now += DAY
  const done = await put('completed', 'a', { attempts: 2 })
  for (const [tag, count] of [
    ['replayed:r', 3],
    ['waited:r', 2],
    ['in_progress:r', 1],
    ['response_unavailable:r', 1],
    ['unknown:r', 1],
    ['expired:r', 1],
    ['misuse:r', 4],
    ['executed:7', 1],
    ['settled:stale', 2],
    ['settled:recovered', 1],
    ['settled:stored', 1],
    ['reconciled:completed', 1],
    ['reconciled:pending', 5],
    ['resolved:9', 1],
    ['lease_expired:', 1],
  ] as const)
    t.ok(await note(done, tag, count))
  await put('completed', 'a', {}, { dueIn: 1000, dropIn: DAY })
  await put('failed_retryable', 'a')
  await put('in_progress', 'a')
  await put('in_progress', 'b', {}, { dueIn: 1000, dropIn: DAY })
  await register.put(
    'broken' as RecordId,
    Buffer.concat([bytesOf('completed', newToken()), Buffer.from('x')]),
    LONG,
  )
  at.now += 1000
  const { period, looked, unreadable, complete, counted } = await report('1h')
  t.strictSame([looked, unreadable, complete, counted], [7, 1, true, null])
  const figures = (over: object) => ({ ...NONE, ...over })
  const a = { route: 'a', records: 4, executed: 2, expired: 1, notExecuted: 1, running: 1, attempts: 5 }
  const seen = {
    replayed: 5,
    prevented: 9,
    misuse: 4,
    lapsed: 1,
    recovered: 1,
    stale: 2,
    reconciled: 1,
    resolved: 1,
  }
  t.strictSame(period, [
    figures({ ...a, ...seen }),
    figures({ route: 'b', records: 1, unknown: 1, attempts: 1, lapsed: 1 }),
  ])
  t.equal((await report('2d')).period.length, 3)
})

void t.test('the report has the process’s counters by route', async (t) => {
  const metrics = new Metrics()
  const { report } = await world(() => metrics.samples())
  const count = (name: Parameters<Metrics['count']>[0], labels: Record<string, string>) =>
    metrics.count(name, { route: 'a', ...labels })
  for (const outcome of ['executed', 'replayed', 'waited', 'waited', 'misuse', 'in_progress'])
    count('idempotency_requests_total', { outcome })
  for (const result of ['unknown', 'recovered', 'stale', 'stored'])
    count('idempotency_completions_total', { result })
  count('idempotency_duplicates_prevented_total', {})
  count('idempotency_lease_expired_total', {})
  count('idempotency_unresolved_expiring_total', {})
  for (const result of ['dead_lettered', 'completed']) count('idempotency_reconcile_total', { result })
  metrics.count('idempotency_requests_total', { route: 'b', outcome: 'executed' })
  metrics.count('idempotency_store_errors_total', { store: 'redis' })
  const { counted } = await report('24h')
  t.equal(counted?.since, new Date(1_795_000_000_000).toISOString())
  const { replayed, prevented, misuse, unknown, lapsed, recovered, stale } = NONE
  const zeros = {
    replayed,
    prevented,
    misuse,
    unknown,
    lapsed,
    recovered,
    stale,
    deadLettered: 0,
    expiring: 0,
  }
  const ones = Object.fromEntries(Object.keys(zeros).map((name) => [name, 1]))
  t.strictSame(counted?.routes, [
    { route: 'a', ...ones, executed: 1, replayed: 3 },
    { route: 'b', ...zeros, executed: 1 },
  ])
})

void t.test('a report on a store with more records than it looks at is marked incomplete', async (t) => {
  const { put, report, register } = await world()
  const { get } = register
  const id = await put('failed_retryable', 'a')
  let listed = 0
  // One record under endless ids.
  Object.assign(register, {
    get: () => get(id),
    list: async () => {
      const ids = Array.from({ length: 500 }, () => String(listed++).padStart(43, 'A'))
      return { ids, next: String(listed) }
    },
  })
  t.match(await report('24h'), { complete: false, looked: 50_000, period: [{ records: 50_000 }] })
})

/** Asks nobody: answers `says` and keeps what it was asked about. */
function rechecking(says: (id: RecordId) => Verification = () => ({ kind: 'agrees' })) {
  const asked: RecordId[] = []
  const recheck: RecheckPort = {
    from: (route) => (route === 'mute' ? null : HOUR),
    ask: async (id) => {
      asked.push(id)
      await new Promise((next) => setImmediate(next))
      return says(id)
    },
  }
  return { asked, recheck }
}

void t.test('O05 the sample has completed records that are old enough, of routes to be asked', async (t) => {
  const { asked, recheck } = rechecking()
  const { at, put, report } = await world(undefined, recheck)
  await put('completed', 'a')
  at.now += DAY
  const wanted = await Promise.all([put('completed', 'a'), put('completed', 'b')])
  await put('completed', 'mute')
  await put('failed_retryable', 'a')
  await put('unknown', 'a')
  await put('in_progress', 'a')
  await put('completed', 'a', {}, { dueIn: HOUR, dropIn: DAY })
  at.now += HOUR
  await put('completed', 'a')
  const found = await report('2h', 1000)
  t.same(asked.toSorted(), wanted.toSorted(), 'neither the tombstone nor what is younger than `after`')
  const none = { differing: 0, disagreed: 0, undecided: 0, notAsked: 0 }
  t.same(found.asked, {
    routes: [
      { route: 'a', eligible: 1, sampled: 1, agreed: 1, ...none },
      { route: 'b', eligible: 1, sampled: 1, agreed: 1, ...none },
    ],
    found: [],
  })
  t.equal((await report('2h')).asked, null)
})

void t.test('O05 the sample has the size asked for, and every record is equally likely', async (t) => {
  const { asked, recheck } = rechecking()
  const { at, put, report } = await world(undefined, recheck)
  const ids: RecordId[] = []
  for (let n = 0; n < 40; n++) ids.push(await put('completed', 'a'))
  at.now += HOUR
  for (let n = 1; n <= 200; n++) {
    const { asked: figures } = await report('2h', 10)
    t.match(figures?.routes, [{ eligible: 40, sampled: 10, agreed: 10 }])
    t.equal(asked.length, 10 * n)
    t.equal(new Set(asked.slice(-10)).size, 10, 'each once')
  }
  // 2,000 draws among 40: 50 each, and a standard deviation of about 6.
  for (const id of ids) {
    const times = asked.filter((one) => one === id).length
    t.ok(times > 15 && times < 85, `${times} times`)
  }
})

void t.test('O05 a slow sample stops asking; records that vanish or get damaged are not in it', async (t) => {
  const { now } = performance
  let late = 0
  performance.now = () => now.call(performance) + late
  t.teardown(() => {
    performance.now = now
  })
  const slow = rechecking(() => {
    late += 15_000
    return { kind: 'agrees' }
  })
  const { at, put, report } = await world(undefined, slow.recheck)
  for (let n = 0; n < 12; n++) await put('completed', 'a')
  at.now += HOUR
  const { asked } = await report('2h', 12)
  const [row] = asked?.routes ?? []
  t.equal(row?.sampled, 12)
  t.equal((row?.agreed ?? 0) + (row?.notAsked ?? 0), 12)
  t.ok(slow.asked.length < 12, `${slow.asked.length} queries were started`)

  const ids: RecordId[] = []
  const going = rechecking(() => ({ kind: 'undecided', why: 'x' }))
  const other = await world(undefined, {
    ...going.recheck,
    ask: async (id, record) => {
      const found = await going.recheck.ask(id, record)
      for (const [n, left] of ids.filter((one) => !going.asked.includes(one)).entries()) {
        const { bytes } = await other.register.get(left)
        const version = bytes?.readUIntBE(4, 6) ?? 0
        const damaged = Buffer.concat([bytesOf('completed', newToken()), Buffer.from('x')])
        if (n % 2 === 0) await other.register.remove(left, version)
        else await other.register.swap(left, { version }, damaged, LONG, false)
      }
      return found
    },
  })
  for (let n = 0; n < 12; n++) ids.push(await other.put('completed', 'a'))
  other.at.now += HOUR
  const left = (await other.report('2h', 12)).asked?.routes[0]
  t.match(left, { eligible: 12, undecided: going.asked.length, sampled: going.asked.length })
  t.ok(going.asked.length < 12)
})

void t.test('O05 a sample without a running proxy is refused', async (t) => {
  const { ask } = await world()
  const { status, body } = await ask({ sample: '5' })
  t.equal(status, 400)
  t.match(body, { code: 'invalid_request', detail: /only a running proxy asks the upstream/ })
})
