import t from 'tap'
import { BodyBuffer } from '../../src/runtime/body-buffer.ts'

void t.test('P02 bytes come out in order, whatever their pieces', (t) => {
  const bytes = Buffer.from(Array.from({ length: 70_000 }, (_, i) => (i * 7) % 251))
  for (const sizes of [[70_000], [1], [1, 2000, 3], [1024], [1025], [1000, 5000, 1, 1], [16_384]]) {
    const collector = new BodyBuffer()
    for (let at = 0, i = 0; at < bytes.length; i++) {
      const size = sizes[i % sizes.length] as number
      collector.push(bytes.subarray(at, at + size))
      at += size
    }
    t.ok(collector.take().equals(bytes), sizes.join())
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
