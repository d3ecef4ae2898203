import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import type { Note } from '../../src/store/register.ts'
import { type Bucket, drawFromBucket, fullAt, noted, readNote, Watchers } from '../../src/store/side-ports.ts'

const A = 'a' as RecordId
const B = 'b' as RecordId

const note = (tag: string, over: Partial<Note> = {}): Note => ({
  tag,
  count: 1,
  firstAgo: 0,
  lastAgo: 0,
  text: '',
  ...over,
})

void t.test('a note says what happened, how often, and when first and last', async (t) => {
  const lines = noted([], [note('x', { count: 2, firstAgo: 30.4, lastAgo: 9.6, text: 'a  text ' })], 1000)
  t.same(lines.map(readNote), [{ tag: 'x', count: 2, first: 970, last: 990, text: 'a  text ' }])
  t.same(noted([], [note('x')], 1000).map(readNote), [
    { tag: 'x', count: 1, first: 1000, last: 1000, text: '' },
  ])
})

void t.test('a note like the one before it is added to that; another follows it', async (t) => {
  const first = noted([], [note('x', { count: 2, text: 'old' })], 1000)
  const more = [note('x', { count: 3, lastAgo: 5, text: 'new' }), note('y'), note('x')]
  const lines = noted(first, more, 2000)
  t.same(lines.map(readNote), [
    { tag: 'x', count: 5, first: 1000, last: 1995, text: 'new' },
    { tag: 'y', count: 1, first: 2000, last: 2000, text: '' },
    { tag: 'x', count: 1, first: 2000, last: 2000, text: '' },
  ])
  t.equal(first.length, 1, 'what was there is left as it is')
})

void t.test('of many notes the first 10 and the last 40 stay', async (t) => {
  const tags = Array.from({ length: 61 }, (_, n) => `n${n}`)
  const whole = tags.slice(0, 50)
  const told = (lines: readonly string[]): string[] => lines.map((line) => readNote(line).tag)
  const lines = noted(
    [],
    whole.map((tag) => note(tag)),
    1000,
  )
  t.same(told(lines), whole)
  t.same(
    told(
      noted(
        lines,
        tags.slice(50).map((tag) => note(tag)),
        1000,
      ),
    ),
    [...tags.slice(0, 10), ...tags.slice(21)],
  )
})

void t.test('a watcher is told of its record’s changes until it ends, whatever others do', async (t) => {
  const watchers = new Watchers()
  const calls: string[] = []
  const told = (): Promise<void> => new Promise((next) => setImmediate(next))
  const [one, two] = ['one', 'two'].map((name) => watchers.add(A, () => void calls.push(name))) as [
    () => void,
    () => void,
  ]
  const other = watchers.add(B, () => void calls.push('other'))
  watchers.tell('c' as RecordId)
  watchers.tell(A)
  t.same(calls, [], 'not before the writer has gone on')
  await told()
  t.same(calls.splice(0), ['one', 'two'])
  watchers.tell(A)
  one()
  await told()
  t.same(calls.splice(0), ['two'], 'one that ends before it is told hears nothing')
  t.ok(watchers.has(A))
  two()
  t.notOk(watchers.has(A))
  const again = watchers.add(A, () => void calls.push('again'))
  for (const ended of [one, two]) ended()
  t.ok(watchers.has(A), 'ending twice ends no later one')
  watchers.tell(A)
  await told()
  t.same(calls.splice(0), ['again'])
  again()
  other()
  watchers.tell(A)
  await told()
  t.same(calls, [])
})

const RATE = { count: 3, per: 1000 }

/** Draws so often at the same time. */
function drawn(times: number, now: number, bucket: Bucket | null = null): Bucket | null {
  for (let n = 0; n < times; n++) {
    const drawn = drawFromBucket(bucket, now, RATE, 1)
    if (drawn.wait > 0) throw new Error('it is empty')
    ;({ bucket } = drawn)
  }
  return bucket
}

void t.test('a bucket gives its count at once, then one after each share of its time', async (t) => {
  const empty = drawn(3, 5000)
  t.same(empty, { at: 5000, debt: 3000, count: 3 })
  t.same(drawFromBucket(empty, 5000, RATE, 1), { wait: 334, bucket: empty }, 'refused')
  t.same(drawFromBucket(empty, 5333, RATE, 1), { wait: 1, bucket: empty })
  t.match(drawFromBucket(empty, 5334, RATE, 1), { wait: 0, bucket: { at: 5334, debt: 2998 } })
  t.same(drawFromBucket(empty, 9000, RATE, 1), { wait: 0, bucket: { at: 9000, debt: 1000, count: 3 } })
})

void t.test('what is given back can be drawn again, and a full bucket is not kept', async (t) => {
  t.match(drawFromBucket(drawn(3, 0), 0, RATE, -1), { wait: 0, bucket: { debt: 2000 } })
  t.same(drawFromBucket(drawn(1, 0), 0, RATE, -1), { wait: 0, bucket: null })
  t.same(drawFromBucket(drawn(1, 0), 100, RATE, -1), { wait: 0, bucket: null }, 'no more than it holds')
  t.same(drawFromBucket(null, 0, RATE, -1), { wait: 0, bucket: null })
  const owing = { at: 0, debt: 1001, count: 3 }
  t.same(drawFromBucket(owing, 0, RATE, -1), { wait: 0, bucket: { ...owing, debt: 1 } })
})

void t.test('a bucket is full again once its debt is refilled', async (t) => {
  t.equal(fullAt({ at: 5000, debt: 3000, count: 3 }), 6000)
  t.equal(fullAt({ at: 5000, debt: 2998, count: 3 }), 6000, 'rounded up')
  t.equal(fullAt({ at: 5000, debt: 1, count: 3 }), 5001)
})

void t.test('after a change of the rate the time owed stays, as far as it fits', async (t) => {
  const bucket = drawn(2, 0) as Bucket
  const debtAt = (count: number, per: number): number =>
    (drawFromBucket(bucket, 0, { count, per }, -1).bucket?.debt ?? 0) + per
  t.equal(debtAt(6, 1000), 4000)
  t.equal(debtAt(30, 100), 3000, 'no more than all of it')
  t.equal(drawFromBucket({ ...bucket, debt: 1999 }, 0, { count: 2, per: 1000 }, -1).bucket?.debt, 333)
})

void t.test('a clock that went back does not stop a bucket from filling', async (t) => {
  const empty = drawn(3, 5000)
  t.same(drawFromBucket(empty, 4000, RATE, 1), { wait: 0, bucket: { at: 4000, debt: 1000, count: 3 } })
})
