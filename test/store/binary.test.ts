import t from 'tap'
import { BinaryReader, BinaryWriter } from '../../src/store/codec.ts'

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
