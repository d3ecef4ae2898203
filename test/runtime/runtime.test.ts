import fc from 'fast-check'
import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import {
  BodyBuffer,
  Budget,
  free,
  InFlight,
  Shares,
  shared,
  shareOf,
  unfreed,
} from '../../src/runtime/limits.ts'
import { RecordMap } from '../../src/runtime/record-map.ts'
import { Once } from '../../src/runtime/scheduling.ts'

t.test('a budget grants room up to its limit, inclusive', async (t) => {
  const budget = new Budget(10)
  t.ok(budget.take(6))
  t.ok(budget.take(4))
  t.equal(budget.held, 10)
  t.notOk(budget.take(1))
  t.ok(budget.take(0))
  t.equal(budget.held, 10, 'a refusal takes nothing')
  budget.give(4)
  t.equal(budget.held, 6)
  t.notOk(budget.take(5))
  t.ok(budget.take(4))
})

t.test('a resized budget applies the new limit and leaves what is held', async (t) => {
  const budget = new Budget(10)
  t.ok(budget.take(8))
  budget.resize(5)
  t.equal(budget.held, 8)
  t.notOk(budget.take(1))
  budget.give(4)
  t.ok(budget.take(1))
  t.notOk(budget.take(1))
  budget.resize(20)
  t.ok(budget.take(15))
})

t.test('a full budget asks others to give room back until there is enough or none', async (t) => {
  const others = [3, 4, 2]
  const budget: Budget = new Budget(10, () => {
    const size = others.shift()
    if (size !== undefined) budget.give(size)
    return size !== undefined
  })
  t.equal(budget.most, 10)
  t.ok(budget.take(9))
  t.ok(budget.take(5))
  t.strictSame([budget.held, others], [7, [2]])
  t.notOk(budget.take(9))
  t.equal(budget.held, 5)
})

t.test('a budget never holds more than its limit and is empty once everything is given back', async () => {
  fc.assert(
    fc.property(fc.nat(1000), fc.array(fc.nat(400)), (most, sizes) => {
      const budget = new Budget(most)
      const taken = sizes.filter((size) => budget.take(size) && budget.held <= most)
      const held = taken.reduce((sum, size) => sum + size, 0)
      const right = budget.held === held
      for (const size of taken) budget.give(size)
      return right && budget.held === 0
    }),
  )
})

t.test('held room is given back once, however often it is released', async (t) => {
  const budget = new Budget(10)
  const release = budget.hold(7)
  t.equal(budget.hold(4), null)
  t.equal(budget.held, 7)
  release?.()
  release?.()
  t.equal(budget.held, 0)
})

t.test('a shared release runs when the last holder lets go, and each holder counts once', async (t) => {
  let released = 0
  const share = shared(() => released++)
  const [one, other] = [share(), share()]
  one()
  one()
  t.equal(released, 0)
  other()
  other()
  t.equal(released, 1)
})

t.test('a share leaves a sixteenth to others; a limit below 64 is not divided', async (t) => {
  t.strictSame([1, 2, 10, 63, 64, 65, 2000].map(shareOf), [1, 2, 10, 63, 60, 60, 1875])
})

t.test('each holder is counted separately', async (t) => {
  const shares = new Shares(12345)
  const [one, other] = [shares.slotOf('one'), shares.slotOf('other')]
  t.not(one, other)
  t.equal(shares.slotOf('one'), one)
  shares.add(one, 5)
  shares.add(one, -2)
  t.strictSame([shares.held(one), shares.held(other)], [3, 0])
})

t.test('names spread over the slots, and another salt spreads them differently', async (t) => {
  const slots = (salt: number): number[] => {
    const shares = new Shares(salt)
    return Array.from({ length: 1000 }, (_, n) => shares.slotOf(`10.0.${n >> 8}.${n & 255}`))
  }
  const [one, other] = [slots(1), slots(987_654_321)]
  t.ok(new Set(one).size > 800, `${new Set(one).size} slots`)
  t.ok(one.filter((slot, n) => slot === other[n]).length < 50)
})

t.test('X02 neither one address nor one caller can take every place', async (t) => {
  const most = 64
  const places = new InFlight(most, 7)
  const share = Array.from({ length: 60 }, (_, n) => places.enter('10.0.0.1', `caller ${n}`))
  t.notOk(share.includes(null))
  t.equal(places.enter('10.0.0.1', 'another'), null, 'its address has used its share')
  const rest = Array.from({ length: 4 }, () => places.enter('10.0.0.2', null))
  t.notOk(rest.includes(null))
  t.ok(places.isFull())
  t.equal(places.enter('10.0.0.3', null), null, 'no place is left')
  for (const leave of [...share, ...rest]) leave?.()
  t.equal(places.count, 0)

  const same = Array.from({ length: 61 }, (_, n) => places.enter(`10.0.1.${n}`, 'one caller'))
  t.strictSame(
    same.map((leave) => leave !== null),
    [...Array.from({ length: 60 }, () => true), false],
  )
  t.not(places.enter('10.0.1.9', 'another caller'), null)

  const roomy = new InFlight(most, 7)
  const halved = Array.from({ length: 10_000 }, (_, n) => `10.1.${n >> 8}.${n & 255}`).filter((address) => {
    const leaves = Array.from({ length: 60 }, () => roomy.enter(address, 'one caller'))
    for (const leave of leaves) leave?.()
    return leaves.includes(null)
  })
  t.strictSame(halved, [], 'no address counts in the slot of its caller')

  const few = new InFlight(2, 7)
  t.not(few.enter('a', 'c'), null)
  t.not(few.enter('a', 'c'), null)
  t.equal(few.enter('b', null), null)
})

void t.test('P02 bytes come out in order, however they were cut into pieces', (t) => {
  const bytes = Buffer.from(Array.from({ length: 70_000 }, (_, i) => (i * 7) % 251))
  for (const announced of [0, 1, 70_000, 70_001])
    for (const sizes of [[70_000], [1], [1, 2000, 3], [1024], [1025], [1000, 5000, 1, 1], [16_384]]) {
      const collector = new BodyBuffer()
      collector.announced = announced
      for (let at = 0, i = 0; at < bytes.length; i++) {
        const size = sizes[i % sizes.length] as number
        const piece = Buffer.from(bytes.subarray(at, at + size))
        collector.push(piece)
        // The piece still belongs to its sender.
        piece.fill(0)
        at += size
      }
      t.ok(collector.take().equals(bytes), `${sizes.join()} of ${announced}`)
      t.equal(collector.take().length, 0, 'nothing is held afterwards')
    }
  t.end()
})

void t.test('P18 a body of one-byte chunks costs about its bytes', (t) => {
  const collector = new BodyBuffer()
  const before = process.memoryUsage().external
  for (let i = 0; i < 1_000_000; i++) collector.push(Buffer.from([i & 0xff]))
  t.ok(process.memoryUsage().external - before < 20_000_000, 'external memory')
  t.equal(collector.take().length, 1_000_000)
  t.end()
})

void t.test('P18 a client that announces much and sends little takes little memory', (t) => {
  const collectors = Array.from({ length: 100 }, () => new BodyBuffer())
  const before = process.memoryUsage().arrayBuffers
  for (const collector of collectors) {
    collector.announced = 1024 * 1024
    for (let sent = 0; sent < 3; sent++) collector.push(Buffer.from('.'))
  }
  const taken = process.memoryUsage().arrayBuffers - before
  t.ok(taken < 100 * 40_000, `${taken} bytes`)
  t.end()
})

void t.test('P18 a body that came in pieces leaves no copies behind', (t) => {
  const piece = Buffer.alloc(64 * 1024)
  const collector = new BodyBuffer()
  const before = process.memoryUsage().arrayBuffers
  for (let n = 0; n < 16; n++) collector.push(piece)
  const body = collector.take()
  const taken = process.memoryUsage().arrayBuffers - before
  t.ok(taken < 1.1 * body.length, `${taken} bytes`)
  t.end()
})

void t.test('P18 memory is freed as a whole or not at all', (t) => {
  const memory = Buffer.allocUnsafeSlow(8192)
  free(memory.subarray(0, 8000))
  free(memory.subarray(4000), 500)
  t.equal(memory.length, 8192, 'the rest may belong to others')
  const few = Buffer.from('few')
  free(few)
  t.equal(String(few), 'few', 'it shares its memory')
  free(memory.subarray(0, 8000), 500)
  t.equal(memory.length, 0, 'whoever still reads it sees nothing')
  t.throws(() => unfreed(memory), /freed/, 'it is not taken for an empty body')
  t.equal(unfreed(few), few)
  t.equal(unfreed(Buffer.alloc(0)).length, 0)
  t.end()
})

void t.test('Once makes its value once, on first use', async (t) => {
  let times = 0
  const once = new Once(async () => ++times)
  t.same(await Promise.all([once.get(), once.get()]), [1, 1])
  t.equal(await once.get(), 1)
})

void t.test('after a failure the next caller tries again', async (t) => {
  let times = 0
  const once = new Once(async () => {
    if (++times === 1) throw new Error('no file descriptor')
    return times
  })
  const first = once.get()
  await t.rejects(Promise.all([first, once.get()]), { message: 'no file descriptor' })
  t.equal(await once.get(), 2)
})

void t.test('RecordMap holds what a Map would, whatever is set and deleted', async (t) => {
  // The tail of an id chooses its slot: few tails, so that many ids share one.
  const id = fc
    .tuple(fc.constantFrom('a', 'b', 'c'), fc.constantFrom('xxxx', 'yyyy'))
    .map(([head, tail]) => `${head}${tail}` as RecordId)
  const change = fc.oneof(
    fc.record({ kind: fc.constant('set' as const), id, value: fc.nat() }),
    fc.record({ kind: fc.constant('delete' as const), id }),
    fc.record({ kind: fc.constant('clear' as const) }),
  )
  fc.assert(
    fc.property(fc.array(change, { maxLength: 40, size: 'max' }), (changes) => {
      const model = new Map<RecordId, number>()
      const held = new RecordMap<number>()
      for (const change of changes) {
        if (change.kind === 'set') {
          model.set(change.id, change.value)
          held.set(change.id, change.value)
        } else if (change.kind === 'delete') {
          model.delete(change.id)
          held.delete(change.id)
        } else {
          model.clear()
          held.clear()
        }
        if (held.size !== model.size) return false
      }
      const sorted = (all: Iterable<[RecordId, number]>) =>
        JSON.stringify([...all].sort(([a], [b]) => (a < b ? -1 : 1)))
      const alike = [...model].every(([id, value]) => held.get(id) === value && held.has(id))
      return alike && sorted(held) === sorted(model) && held.get('other' as RecordId) === undefined
    }),
    { numRuns: 300 },
  )
  t.pass()
})

void t.test('entries may be deleted during iteration', async (t) => {
  const held = new RecordMap<number>()
  const ids = Array.from({ length: 30 }, (_, n) => `id-${n}-${n % 3}xxx` as RecordId)
  for (const [n, id] of ids.entries()) held.set(id, n)
  const seen: number[] = []
  for (const [id, value] of held) {
    seen.push(value)
    held.delete(id)
  }
  t.same(
    seen.toSorted((a, b) => a - b),
    ids.map((_, n) => n),
  )
  t.equal(held.size, 0)
})
