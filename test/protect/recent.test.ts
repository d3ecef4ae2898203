import { hash, randomBytes } from 'node:crypto'
import t from 'tap'
import { KeyChurn, Latency, RecentGrants } from '../../src/protect/recent.ts'
import type { Execution } from '../../src/protect/request.ts'
import { MINUTE } from './harness.ts'

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
    const saw = (id: string) => churn.saw(run(id, 'r', bytes('x')), 'a')
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
      churn.saw(run(String(n++), route, fingerprint), caller)
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
    const saw = (id: string, content: Buffer) => churn.saw(run(id, 'r', content), 'a')
    saw('first', bytes('x'))
    for (let n = 0; n < 5000; n++) saw('a', randomBytes(32))
    t.equal(saw('second', bytes('x')), true)
    for (let n = 0; n < 10_000; n++) saw('a', randomBytes(32))
    t.equal(saw('third', bytes('x')), false)
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
