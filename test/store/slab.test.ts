import { randomBytes } from 'node:crypto'
import fc from 'fast-check'
import t from 'tap'
import { Slab } from '../../src/store/slab.ts'

const length = fc.oneof(fc.nat(3000), fc.constantFrom(0, 255, 256, 257, 512, 70_000))

void t.test('kept bytes stay unchanged, whatever is written, shortened and freed beside them', async (t) => {
  const change = fc.oneof(
    fc.record({ length }),
    fc.record({ rewrite: fc.nat(), length }),
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
    { numRuns: 300 },
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
