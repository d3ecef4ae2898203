import crypto, { randomBytes } from 'node:crypto'
import { syncBuiltinESMExports } from 'node:module'
import fc from 'fast-check'
import t from 'tap'
import { BinaryReader, BinaryWriter } from '../../src/store/codec.ts'
import {
  CorruptRecord,
  Declined,
  InGrace,
  idOfCursor,
  inOrder,
  OutOfPhase,
  PartlyUnavailable,
  pageOf,
  parseCursor,
  RecordLocked,
  responsesOfEach,
  SEAL_ERRORS,
  SealedRecord,
  StoreFull,
  StoreUnavailable,
  Unreplicated,
} from '../../src/store/register.ts'
import { Schedule } from '../../src/store/schedule.ts'
import { Slab } from '../../src/store/slab.ts'
import { NONE, Slots } from '../../src/store/slots.ts'
import { newId } from './fixtures.ts'

/* What the memory store keeps its records in: slots, a schedule and a slab. */

void t.test('a name keeps one slot from when it is added until it is removed, as in a Map', async (t) => {
  // Short and alike, so that one is the beginning of another.
  const name = fc.string({ unit: fc.constantFrom('a', 'b'), minLength: 1, maxLength: 5 })
  const change = fc.record({ name, comes: fc.boolean() })
  fc.assert(
    fc.property(fc.array(change, { maxLength: 200, size: 'max' }), (changes) => {
      const model = new Map<string, number>()
      const slots = new Slots()
      for (const { name, comes } of changes) {
        const slot = slots.find(name)
        if (slot !== (model.get(name) ?? NONE)) return false
        if (comes && slot === NONE) {
          const given = slots.add(name)
          if ([...model.values()].includes(given)) return false
          model.set(name, given)
        } else if (!comes && slot !== NONE) {
          slots.remove(slot)
          model.delete(name)
        }
      }
      const there = new Map([...slots.from(0)].map((slot) => [slots.nameOf(slot), slot]))
      return (
        there.size === model.size &&
        [...model].every(([name, slot]) => slots.find(name) === slot && there.get(name) === slot)
      )
    }),
    { numRuns: 300 },
  )
  t.pass()
})

void t.test('it holds thousands of names, and any of them can be removed', async (t) => {
  const slots = new Slots()
  const names = Array.from({ length: 5000 }, newId)
  const given = names.map((name) => slots.add(name))
  t.equal(new Set(given).size, names.length)
  for (const [n, slot] of given.entries()) if (n % 3 === 0) slots.remove(slot)
  for (const [n, name] of names.entries()) {
    const expected = n % 3 === 0 ? NONE : given[n]
    if (slots.find(name) !== expected) t.fail(`${name} has another slot`)
  }
  t.same(
    [...slots.from(4000)].map((slot) => slots.nameOf(slot)),
    names.filter((_, n) => n >= 4000 && n % 3 !== 0),
  )
  t.ok((given[0] as number) < names.length && slots.add(newId()) < names.length, 'slots are reused')
})

void t.test('names of one character are told apart', async (t) => {
  const slots = new Slots()
  const names = Array.from({ length: 90 }, (_, n) => String.fromCharCode(33 + n))
  const given = names.map((name) => slots.add(name))
  t.same(
    names.map((name) => slots.find(name)),
    given,
  )
})

void t.test('exactly the slots in use are listed, also when there is no free one', async (t) => {
  const slots = new Slots()
  for (let n = 1; n <= 1024; n++) {
    slots.add(newId())
    if ([...slots.from(0)].length !== n) t.fail(`not ${n}`)
    if (slots.find(newId()) !== NONE) t.fail('found one that was never added')
  }
  t.pass()
})

void t.test('no client can know which names collide', async (t) => {
  const { randomInt } = crypto
  t.teardown(() => {
    crypto.randomInt = randomInt
    syncBuiltinESMExports()
  })
  const limits: number[] = []
  crypto.randomInt = (limit: number) => (limits.push(limit), 0)
  syncBuiltinESMExports()
  void new Slots()
  t.equal(limits.length, 1)
  t.ok((limits[0] as number) >= 2 ** 31)
})

void t.test('a name longer than a record id is refused', async (t) => {
  t.throws(() => new Slots().find('x'.repeat(44)), RangeError)
})

void t.test('the earliest slot comes first, whatever was moved or removed before', async (t) => {
  const slot = fc.oneof(fc.nat(20), fc.nat(2000))
  const change = fc.record({ slot, time: fc.option(fc.nat(100), { freq: 2 }) })
  fc.assert(
    fc.property(fc.array(change, { maxLength: 200, size: 'max' }), (changes) => {
      const model = new Map<number, number>()
      const schedule = new Schedule()
      for (const { slot, time } of changes)
        if (time === null) {
          model.delete(slot)
          schedule.delete(slot)
        } else {
          model.set(slot, time)
          schedule.set(slot, time)
        }
      const sorted = (slots: Iterable<number>) => JSON.stringify([...slots].sort((a, b) => a - b))
      if (sorted(schedule.slots) !== sorted(model.keys())) return false
      for (const time of [...model.values()].sort((a, b) => a - b)) {
        if (schedule.due(time - 1) !== NONE) return false
        const slot = schedule.due(time)
        if (model.get(slot) !== time || schedule.timeOf(slot) !== time) return false
        model.delete(slot)
        schedule.delete(slot)
      }
      return schedule.due(Number.POSITIVE_INFINITY) === NONE
    }),
    { numRuns: 200 },
  )
  t.pass()
})

void t.test('removing a slot that is not there changes nothing, however many there are', async (t) => {
  const schedule = new Schedule()
  schedule.set(0, 1)
  for (let slot = 1; slot < 3000; slot++) schedule.delete(slot)
  t.same([...schedule.slots], [0])
  for (let slot = 1; slot < 600; slot++) {
    schedule.set(slot, 1)
    schedule.delete(slot + 1)
    if (schedule.slots.length !== slot + 1) t.fail(`${slot} is lost`)
  }
})

const anyLength = fc.oneof(fc.nat(3000), fc.constantFrom(0, 255, 256, 257, 512, 70_000))

void t.test('kept bytes stay unchanged, whatever is written, shortened and freed beside them', async (t) => {
  const change = fc.oneof(
    fc.record({ length: anyLength }),
    fc.record({ rewrite: fc.nat(), length: anyLength }),
    fc.record({ free: fc.nat() }),
  )
  fc.assert(
    fc.property(fc.array(change, { maxLength: 60, size: 'max' }), (changes) => {
      const slab = new Slab()
      const kept: { chain: number; bytes: Buffer }[] = []
      for (const change of changes)
        if ('free' in change) {
          const [gone] = kept.splice(change.free % (kept.length + 1), 1)
          if (gone !== undefined) slab.free(gone.chain)
        } else {
          const bytes = randomBytes(change.length)
          const old = 'rewrite' in change ? kept[change.rewrite % (kept.length + 1)] : undefined
          const chain = slab.write(bytes, old?.chain)
          if (old === undefined) kept.push({ chain, bytes })
          else if (chain === old.chain) old.bytes = bytes
          else return false
        }
      return kept.every(({ chain, bytes }) => slab.read(chain).equals(bytes))
    }),
    { numRuns: 100 },
  )
  t.pass()
})

void t.test('freed space is reused, and bytes may need more than one chunk', async (t) => {
  const slab = new Slab()
  const large = randomBytes(3 * 1024 * 1024)
  const first = slab.write(large)
  t.ok(slab.read(first).equals(large))
  slab.free(first)
  const chains = Array.from({ length: 12_000 }, (_, n) => slab.write(Buffer.from(`record ${n}`)))
  t.equal(new Set(chains).size, chains.length)
  t.ok(Math.max(...chains) < 3 * 4096, 'within the freed space')
  t.equal(slab.read(chains[7] as number).toString(), 'record 7')
})

void t.test('no block is lost, and none is taken in vain', async (t) => {
  const block = Buffer.alloc(256, 1)
  const chunk = (slab: Slab): number[] => Array.from({ length: 4096 }, () => slab.write(block))
  const whole = new Slab()
  t.equal(Math.max(...chunk(whole)), 4095, 'a block each')
  t.equal(whole.write(block), 4096, 'the next one is in another chunk')

  const rewritten = new Slab()
  const long = Buffer.alloc(2000 * 256, 2)
  const chain = rewritten.write(long)
  for (let n = 0; n < 10; n++) for (const bytes of [long, block, long]) rewritten.write(bytes, chain)
  const other = rewritten.write(long)
  rewritten.free(chain)
  rewritten.free(other)
  t.same(new Set(chunk(rewritten)).size, 4096)
  t.equal(rewritten.write(block), 4096)
})

void t.test('head gives the beginning in place, and read gives a copy', async (t) => {
  const slab = new Slab()
  const chain = slab.write(Buffer.alloc(300, 1))
  slab.head(chain).fill(2)
  slab.read(chain).fill(3)
  t.same(slab.read(chain), Buffer.concat([Buffer.alloc(256, 2), Buffer.alloc(44, 1)]))
  t.equal(slab.head(slab.write(Buffer.from('short'))).toString(), 'short')
})

/* Numbers and texts in a record. */

/** Around the lengths at which another way is faster, and the characters at which a text is no longer ASCII. */
const TEXTS = [
  ['', 'a', '\x7f', '\x80', 'ü', '\u07ff', '€', '😀', 'a'.repeat(16), 'a'.repeat(17), 'a'.repeat(200)],
  ['ü'.repeat(16), '€'.repeat(16), '€'.repeat(17), '😀'.repeat(8), `${'a'.repeat(15)}€`, 'a'.repeat(201)],
].flat()
const LINES = ['', 'a', '\x80\xff', '\xe9'.repeat(16), '\xe9'.repeat(17)]
const BYTES = Buffer.from([0, 1, 0xfe, 0xff])

function framed(text: string, encoding: 'utf8' | 'latin1'): Buffer {
  const bytes = Buffer.from(text, encoding)
  const length = Buffer.alloc(4)
  length.writeUInt32BE(bytes.length)
  return Buffer.concat([length, bytes])
}

const EXPECTED = Buffer.concat([
  Buffer.from('0102030405060708090a0b0c0d000000', 'hex'),
  ...TEXTS.map((text) => framed(text, 'utf8')),
  BYTES,
  Buffer.from('00000005', 'hex'),
  ...LINES.map((line) => framed(line, 'latin1')),
  Buffer.from('ff', 'hex'),
])

/** One of everything, from a writer that begins with room for `size` bytes. */
function written(size: number): Buffer {
  const w = new BinaryWriter(size)
  w.u8(1)
  w.u16(0x0203)
  w.u32(0x04050607)
  w.u48(0x08090a0b0c0d)
  w.zeros(3)
  for (const text of TEXTS) w.text(text)
  w.bytes(BYTES)
  w.lines(LINES)
  w.u8(0xff)
  return w.done()
}

void t.test('a writer writes the same bytes wherever its room ends', async (t) => {
  for (let size = 0; size <= EXPECTED.length; size++)
    if (!written(size).equals(EXPECTED)) t.fail(`with room for ${size} bytes`)
  t.equal(written(10_000).toString('hex'), EXPECTED.toString('hex'))
})

void t.test('a number replaces what stands at its place', async (t) => {
  const w = new BinaryWriter(0)
  w.zeros(6)
  w.u32At(1, 0xfffefdfc)
  t.equal(w.done().toString('hex'), '00fffefdfc00')
})

void t.test('a reader reads what was written, from any place', async (t) => {
  for (const before of [0, 1, 1000, 1024]) {
    const r = new BinaryReader(Buffer.concat([Buffer.alloc(before, 0xee), EXPECTED]), before)
    t.same([r.u8(), r.u16(), r.u32(), r.u48()], [1, 0x0203, 0x04050607, 0x08090a0b0c0d])
    t.same(r.take(3), Buffer.alloc(3))
    t.same(
      TEXTS.map(() => r.text()),
      TEXTS,
    )
    t.same(r.take(BYTES.length), BYTES)
    t.same(r.lines(), LINES)
    t.equal(r.at, before + EXPECTED.length - 1)
    t.throws(() => r.end(), { name: 'CorruptRecord' })
    t.same(r.rest(), Buffer.from([0xff]))
    t.doesNotThrow(() => r.end())
    t.throws(() => r.u8(), { name: 'CorruptRecord', message: /cut off/ })
  }
})

void t.test('a text that is skipped is passed, and must be there', async (t) => {
  const bytes = Buffer.concat([framed('€', 'utf8'), Buffer.from([7])])
  const r = new BinaryReader(bytes, 0)
  r.skip()
  t.equal(r.u8(), 7)
  t.throws(() => new BinaryReader(bytes.subarray(0, 6), 0).skip(), { name: 'CorruptRecord' })
})

/* What all stores share: places, cursors and errors. */

void t.test('places are ordered by time, then by id', async (t) => {
  const ordered = [
    { due: 1, id: 'b' },
    { due: 2, id: 'A' },
    { due: 2, id: '_' },
    { due: 2, id: 'a' },
    { due: 10, id: 'A' },
  ]
  for (const [n, one] of ordered.entries())
    for (const [m, other] of ordered.entries()) t.equal(Math.sign(inOrder(one, other)), Math.sign(n - m))
})

void t.test('the cursor of a page is the place where the next one begins', async (t) => {
  const found = [
    { due: 5, id: 'a-_Z09' },
    { due: 2 ** 48 - 1, id: 'b'.repeat(64) },
  ]
  t.same(pageOf(found, 3), { ids: ['a-_Z09', 'b'.repeat(64)], next: null }, 'the last page')
  for (const [n, place] of found.entries()) {
    const { ids, next } = pageOf(found.slice(0, n + 1), n + 1)
    t.equal(ids.length, n + 1)
    t.same(parseCursor(next), place)
  }
  t.same(pageOf([], 1), { ids: [], next: null })
  t.same(parseCursor(null), { due: 0, id: '' }, 'the first page begins before all places')
})

void t.test('a cursor that no page returned is refused', async (t) => {
  for (const cursor of [
    '',
    '5',
    '5 ',
    ' a',
    '5 a ',
    'x5 a',
    '5 a b',
    '5  a',
    '-5 a',
    '5 ä',
    `5 ${'a'.repeat(65)}`,
  ])
    t.throws(() => parseCursor(cursor), { name: 'RangeError' }, cursor)
  t.throws(() => parseCursor(`${'1'.repeat(17)} a`), { name: 'RangeError' })
  t.equal(parseCursor(`${'1'.repeat(16)} a`).due, 1_111_111_111_111_111)
  for (const cursor of ['', 'a b', 'ä', ' a', 'a\n', 'a'.repeat(65)])
    t.throws(() => idOfCursor(cursor), { name: 'RangeError' }, cursor)
  for (const cursor of ['a', '-_Z09', 'a'.repeat(64)]) t.equal(idOfCursor(cursor), cursor)
  t.equal(idOfCursor(null), '')
})

void t.test('each part of an index is asked for twice its share of responses, and some more', async (t) => {
  for (const [limit, parts, of] of [
    [1, 256, 1],
    [8, 256, 8],
    [100, 256, 9],
    [100, 10, 28],
    [101, 10, 29],
    [1000, 256, 16],
    [100, 1, 100],
  ] as const)
    t.equal(responsesOfEach(limit, parts), of, `${limit} in ${parts}`)
})

void t.test('each error says what it is, and whether the operation may have been applied', async (t) => {
  const cause = new Error('why')
  for (const [error, name, maybeApplied] of [
    [new StoreUnavailable('x', true), 'StoreUnavailable', true],
    [new StoreUnavailable('x', false), 'StoreUnavailable', false],
    [new PartlyUnavailable('x', false), 'StoreUnavailable', false],
    [new Unreplicated('x'), 'Unreplicated', true],
    [new StoreFull('x'), 'StoreFull', false],
    [new RecordLocked('x'), 'RecordLocked', false],
    [new InGrace(1, 2, 3), 'InGrace', false],
    [new OutOfPhase('x', false), 'OutOfPhase', false],
  ] as const) {
    t.ok(error instanceof StoreUnavailable)
    t.equal(error instanceof Declined, name === 'RecordLocked' || name === 'InGrace')
    t.match(error, { name, maybeApplied })
  }
  t.equal(new StoreUnavailable('x', true, { cause }).cause, cause)
  t.equal(new StoreFull('x', { cause }).cause, cause)
  t.match(new InGrace(1, 2, 3), { now: 1, since: 2, left: 3, message: /another 3 ms/ })
  t.match(new SealedRecord('altered', 'x'), { name: 'CorruptRecord', reason: 'altered' })
  t.ok(new SealedRecord('altered', 'x') instanceof CorruptRecord)
  t.same(SEAL_ERRORS, ['unknown_key', 'altered'], 'the labels of a metric')
})
