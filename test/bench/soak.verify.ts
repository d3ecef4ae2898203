import { fileURLToPath } from 'node:url'
import t from 'tap'
import { Ledger } from '../../bench/soak/ledger.ts'
import { soak } from '../../bench/soak/soak.ts'
import { type LeftOver, unexplained } from '../../bench/soak/store.ts'
import { growth, type Sample } from '../../bench/soak/verdict.ts'
import type { RecordId } from '../../src/core/record.ts'

const MIB = 1024 * 1024
const PER_SAMPLE = 20_000

/** A sample at rest that looks like the one before, with ordinary noise, except for what a test changes. */
function sample(
  n: number,
  make: Partial<Omit<Sample, 'store'>> & { store?: Partial<Sample['store']> },
): Sample {
  const noise = (n * 7919) % 100_000
  return {
    requests: n * PER_SAMPLE,
    executed: n * PER_SAMPLE,
    minutes: n,
    resident: 200 * MIB + 20 * noise,
    descriptors: 26 + (n % 2),
    heapUsed: 28 * MIB + noise,
    external: 14 * MIB,
    arrayBuffers: 3 * MIB,
    resources: { TCPServerWrap: 2, TCPSocketWrap: 1 + (n % 2) },
    objects: { Timeout: 20 + (n % 8) },
    gauges: { idempotency_in_flight: 0, idempotency_buffered_bytes: 0 },
    ...make,
    store: {
      records: n * 10,
      expected: n * 10,
      indexed: n * 10 + (make.store?.orphans ?? 0),
      orphans: 0,
      memory: 1.3 * MIB + n * 10_000,
      channels: 0,
      clients: 2,
      ...make.store,
    },
  }
}

function series(make: (n: number) => Parameters<typeof sample>[1]): Sample[] {
  return Array.from({ length: 12 }, (_, n) => sample(n + 1, make(n + 1)))
}

const found = (make: (n: number) => Parameters<typeof sample>[1]): string[] =>
  growth(series(make), 2).map(({ what }) => what)

void t.test('noise is not growth', async (t) => {
  t.same(
    found(() => ({})),
    [],
  )
})

void t.test('a warm-up is not growth', async (t) => {
  t.same(
    found((n) => ({ heapUsed: n < 3 ? 10 * MIB : 28 * MIB })),
    [],
  )
})

void t.test('a single sample decides nothing', async (t) => {
  t.same(
    found((n) => ({ heapUsed: n === 12 ? 90 * MIB : 28 * MIB, descriptors: n === 11 ? 400 : 26 })),
    [],
  )
})

void t.test('a leak is judged as growth', async (t) => {
  // 100 bytes for every tenth request.
  t.same(
    found((n) => ({ heapUsed: 28 * MIB + n * PER_SAMPLE * 10 })),
    ['heap and external memory grew'],
  )
  t.same(
    found((n) => ({ external: 14 * MIB + n * PER_SAMPLE * 10 })),
    ['heap and external memory grew'],
  )
  t.same(
    found((n) => ({ resident: 200 * MIB + n * 30 * MIB })),
    ['resident memory grew'],
  )
  // One more in each sample.
  t.same(
    found((n) => ({ descriptors: 26 + n })),
    ['file descriptors grew'],
  )
  t.same(
    found((n) => ({ resources: { Timeout: n } })),
    ['active Timeout grew'],
  )
  t.same(
    found((n) => ({ store: { memory: MIB + n * MIB } })),
    ['memory of Redis grew'],
  )
  t.same(
    found((n) => ({ store: { orphans: n * 10 } })),
    ['index entries of Redis without a record grew'],
  )
  t.same(
    found((n) => ({ store: { channels: n } })),
    ['channels of Redis grew'],
  )
  t.same(
    found((n) => ({ store: { clients: n } })),
    ['connections of Redis grew'],
  )
})

void t.test('a gauge that is not 0 at rest is found, even if only once', async (t) => {
  const busy = (n: number) => ({ gauges: { idempotency_waiters: n === 4 ? 1 : 0 } })
  t.same(found(busy), ['idempotency_waiters is not 0 at rest'])
})

void t.test('a record that outlives its retention is found', async (t) => {
  const [what] = found((n) => ({ store: { indexed: n === 5 ? 49 : n * 10 } }))
  t.equal(what, 'records other than unresolved ones are kept beyond their retention')
})

void t.test('a leftover record that nothing the upstream saw explains is found', async (t) => {
  const record = (id: string, state: string, route = 'payments'): LeftOver => ({
    id: id as RecordId,
    route,
    state,
    why: null,
  })
  const unresolved = new Set(['uncertain-record'])
  const explained = { unresolved, lost: new Set(['lost-outcome']), cutInShadow: 1 }
  const there = record('uncertain-record', 'unknown')
  const find = (...more: LeftOver[]): number => unexplained([there, ...more], explained).length
  t.equal(find(record('lost-outcome-of-an-outage', 'in_progress'), record('seen', 'unknown', 'shadow')), 0)
  t.equal(find(record('another', 'unknown')), 1)
  t.equal(find(record('lost-outcome-of-an-outage', 'completed')), 1, 'retention has passed')
  t.equal(find(record('one', 'unknown', 'shadow'), record('two', 'unknown', 'shadow')), 1)
  t.equal(unexplained([], explained).length, 1, 'an unresolved record must not vanish')
})

void t.test('an operation executed twice is found, unless released, cut off or lenient', async (t) => {
  const ledger = new Ledger()
  const run = (operation: string, status: number | null, path = '/v1/payments', whole = true): void => {
    const attempt = ledger.arrived(operation, path, `record-of-${operation}`)
    attempt.whole = whole
    ledger.ended(attempt, status, false)
  }
  run('released', 429)
  run('released', 201)
  run('cut off', null, '/v1/payments', false)
  run('cut off', 201)
  run('by name', 201, '/v1/lenient')
  run('by name', 201, '/v1/lenient')
  t.same(ledger.twice(), [])
  run('uncertain', null)
  t.same([...ledger.unresolved()], ['record-of-uncertain'])
  run('uncertain', 201)
  t.equal(ledger.twice().length, 1)
  t.same([...ledger.unresolved()], [])
})

void t.test('a short soak runs with nothing executed twice or left unexplained', async (t) => {
  const command = [process.execPath, fileURLToPath(new URL('../../src/cli.ts', import.meta.url))]
  const result = await soak({
    requests: 400,
    samples: 1,
    lanes: 16,
    minutes: 0,
    command,
    snapshot: () => null,
    say: () => {},
  })
  t.same(
    result.findings.filter(({ what }) => !what.startsWith('index entries')),
    [],
  )
  t.ok(result.promised > 50, `${result.promised} operations`)
  t.ok(result.replays > 20, `${result.replays} replays`)
})
