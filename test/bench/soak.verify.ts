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

const HEAP = 'heap and external memory grew'
/** The titles of what series of samples show, each of which has one thing that is not as usual. */
const SERIES: readonly (readonly [what: string, make: Parameters<typeof series>[0], found: string | null])[] =
  [
    ['noise', () => ({}), null],
    ['a warm-up', (n) => ({ heapUsed: n < 3 ? 10 * MIB : 28 * MIB }), null],
    ['a single sample of the heap', (n) => ({ heapUsed: n === 12 ? 90 * MIB : 28 * MIB }), null],
    ['a single sample of descriptors', (n) => ({ descriptors: n === 11 ? 400 : 26 }), null],
    ['100 bytes for every tenth request', (n) => ({ heapUsed: 28 * MIB + n * PER_SAMPLE * 10 }), HEAP],
    ['the same outside of the heap', (n) => ({ external: 14 * MIB + n * PER_SAMPLE * 10 }), HEAP],
    ['30 MiB in each sample', (n) => ({ resident: 200 * MIB + n * 30 * MIB }), 'resident memory grew'],
    ['one more file in each sample', (n) => ({ descriptors: 26 + n }), 'file descriptors grew'],
    ['one more timer', (n) => ({ resources: { Timeout: n } }), 'active Timeout grew'],
    ['a MiB of the store', (n) => ({ store: { memory: MIB + n * MIB } }), 'memory of Redis grew'],
    ['ten orphans', (n) => ({ store: { orphans: n * 10 } }), 'index entries of Redis without a record grew'],
    ['one more channel', (n) => ({ store: { channels: n } }), 'channels of Redis grew'],
    ['one more connection', (n) => ({ store: { clients: n } }), 'connections of Redis grew'],
    [
      'a gauge that is not 0 at rest, once',
      (n) => ({ gauges: { idempotency_waiters: n === 4 ? 1 : 0 } }),
      'idempotency_waiters is not 0 at rest',
    ],
    [
      'a record that outlives its retention, once',
      (n) => ({ store: { indexed: n === 5 ? 49 : n * 10 } }),
      'records other than unresolved ones are kept beyond their retention',
    ],
  ]

void t.test('a leak is judged as growth; noise, a warm-up and single samples are not', async (t) => {
  for (const [what, make, found] of SERIES) {
    const titles = growth(series(make), 2).map(({ what }) => what)
    t.same(titles, found === null ? [] : [found], what)
  }
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
