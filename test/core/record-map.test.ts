import fc from 'fast-check'
import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { RecordMap } from '../../src/runtime/record-map.ts'

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
    { numRuns: 2000 },
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
