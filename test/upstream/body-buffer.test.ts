import t from 'tap'
import { BodyBuffer, free, unfreed } from '../../src/runtime/limits.ts'

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
