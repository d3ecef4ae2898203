import t from 'tap'
import { BinaryReader, BinaryWriter } from '../../src/store/record/binary.ts'
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
