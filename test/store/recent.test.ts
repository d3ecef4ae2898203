import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { LARGEST_RECENT, RecentWrites } from '../../src/store/recent.ts'
import { Safety } from '../../src/store/safety.ts'
import { newId } from './fixtures.ts'

const SPANS = { dueIn: 60_000, dropIn: 120_000 }
const MiB = 1024 ** 2
/** Longer than replicas that may be promoted lag behind. */
const KEPT_FOR = 15_000

void t.test('writes are returned as copies, oldest first, with the rest of their spans', async (t) => {
  let now = 1000.25
  const recent = new RecentWrites(() => now)
  t.same(recent.all(), [])
  const ids = [newId(), newId()] as const
  const bytes = Buffer.from('first')
  recent.add(ids[0], bytes, SPANS)
  bytes.fill(0)
  now += 500.5
  recent.add(ids[1], Buffer.alloc(0), SPANS)
  now += 1000
  const [first, second] = recent.all()
  t.match(first, { id: ids[0], bytes: Buffer.from('first') })
  t.same(first?.left(), { dueIn: 58_499, dropIn: 118_499 })
  t.match(second, { id: ids[1] })
  t.match(second?.left(), { dueIn: 59_000 })
})

void t.test('a removed record is left out, and an expired one has no spans left', async (t) => {
  let now = 0
  const recent = new RecentWrites(() => now)
  const [ended, removed, other] = [newId(), newId(), newId()]
  recent.add(ended, Buffer.from('a'), { dueIn: 1000, dropIn: 2000 })
  for (const id of [removed, other, removed]) recent.add(id, Buffer.from('b'), SPANS)
  recent.forget(removed)
  recent.forget(newId())
  const all = recent.all()
  t.same(
    all.map(({ id }) => id),
    [ended, other],
  )
  now = 1999
  t.same(all[0]?.left(), { dueIn: -999, dropIn: 1 })
  now = 2000
  t.equal(all[0]?.left(), null)
})

void t.test('a write is remembered until every store has said that it is safe', async (t) => {
  let now = 0
  const recent = new RecentWrites(() => now)
  const left = (): string[] => recent.all().map(({ bytes }) => String(bytes))
  recent.add(newId(), Buffer.from('a'), SPANS)
  now = 10_000
  recent.add(newId(), Buffer.from('b'), SPANS)
  now = 1_000_000
  t.same(left(), ['a', 'b'], 'however long no store says anything')
  const [one, other] = [recent.safeBefore(), recent.safeBefore()]
  one(0)
  t.same(left(), ['a', 'b'])
  one(10_000)
  t.same(left(), ['b'])
  other(0)
  t.same(left(), ['a', 'b'], 'the other store may still lose it')
  one(20_000)
  other(20_000)
  t.same(left(), [])
})

void t.test('a write is safe once its server has stayed the same for fifteen seconds after it', async (t) => {
  const said: number[] = []
  const safety = new Safety(3, (before) => void said.push(before))
  const begun = performance.now()
  const check = (shards: readonly number[], later: number, ...changed: readonly number[]): number => {
    safety.checked(shards, begun + later, (shard) => !changed.includes(shard))
    return Math.round((said.at(-1) as number) - begun)
  }
  const all = [0, 1, 2]
  t.equal(check(all, 0), Number.NEGATIVE_INFINITY, 'seen for the first time')
  t.equal(check([0, 1], KEPT_FOR + 5000), Number.NEGATIVE_INFINITY, 'nobody knows about the third')
  t.equal(check(all, KEPT_FOR + 5000), 5000)
  t.equal(check([0, 1], KEPT_FOR + 9000), 5000, 'while the third is not reached, the clock stands still')
  t.equal(check(all, KEPT_FOR + 9000), 9000)
  t.equal(check(all, KEPT_FOR + 9999, 2), 9000, 'the third is another server now')
  const since = Math.ceil(performance.now() - begun)
  t.equal(check(all, KEPT_FOR - 1), 9000, 'not long enough')
  t.equal(check(all, 2 * KEPT_FOR + since), KEPT_FOR + since)
})

void t.test('room is tight once half of it is taken by writes that may be lost', async (t) => {
  let now = 0
  const recent = new RecentWrites(() => now)
  /** How much it takes. */
  const filled = (): number => {
    let bytes = 0
    for (; !recent.isTight; bytes += LARGEST_RECENT) {
      now += 1
      recent.add(newId(), Buffer.alloc(LARGEST_RECENT), SPANS)
    }
    return bytes
  }
  const first = filled()
  t.ok(first > 6 * MiB && first <= 8 * MiB)
  recent.safeBefore()(now + 1)
  t.equal(recent.isTight, false)
  t.ok(filled() > 6 * MiB, 'by those since')
})

void t.test('room is taken only from writes that are safe, not from those beside them', async (t) => {
  let now = 0
  const recent = new RecentWrites(() => now)
  recent.add(newId(), Buffer.from('early'), SPANS)
  now = 10_000
  recent.add(newId(), Buffer.from('late'), SPANS)
  recent.safeBefore()(5000)
  for (let bytes = 0; bytes < 2 * MiB; bytes += LARGEST_RECENT)
    recent.add(newId(), Buffer.alloc(LARGEST_RECENT), SPANS)
  t.equal(String(recent.all()[0]?.bytes), 'late')
})

void t.test('16 MiB of writes are remembered, to the byte', async (t) => {
  const recent = new RecentWrites(() => 0)
  // A KiB each, with the length, three instants and the id.
  const bytes = Buffer.alloc(1024 - 4 - 3 * 8 - 43)
  for (let n = 0; n < 17 * 1024; n++) recent.add(newId(), bytes, SPANS)
  t.equal(recent.all().length, 16 * 1024)
})

void t.test('at most 16 MiB of writes are remembered: the latest', async (t) => {
  let now = 0
  const recent = new RecentWrites(() => now)
  const ids: RecordId[] = []
  for (let n = 0; n < 600; n++) {
    now += 1
    const id = newId()
    ids.push(id)
    recent.add(id, Buffer.alloc(LARGEST_RECENT, n), SPANS)
  }
  const kept = recent.all()
  t.ok(kept.length * LARGEST_RECENT <= 16 * MiB && kept.length >= 15 * 15)
  t.same(
    kept.map(({ id }) => id),
    ids.slice(-kept.length),
  )
  t.ok(kept.every(({ bytes }, n) => bytes[9] === (600 - kept.length + n) % 256))
  now += 20_000
  recent.safeBefore()(now)
  recent.add(newId(), Buffer.alloc(LARGEST_RECENT), SPANS)
  t.equal(recent.all().length, 1)
})
