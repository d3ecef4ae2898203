import crypto from 'node:crypto'
import { syncBuiltinESMExports } from 'node:module'
import fc from 'fast-check'
import t from 'tap'
import { NONE, Slots } from '../../src/store/slots.ts'
import { newId } from './fixtures.ts'

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
    { numRuns: 1000 },
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

void t.test('names that come and go leave nothing behind', async (t) => {
  const slots = new Slots()
  for (let n = 0; n < 10_000; n++) slots.remove(slots.add(newId()))
  t.equal(slots.find(newId()), NONE)
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

void t.test('a few hundred names can be removed and added again in any order', async (t) => {
  for (let round = 0; round < 50; round++) {
    const slots = new Slots()
    const names = Array.from({ length: 250 }, newId)
    const given = new Map(names.map((name) => [name, slots.add(name)]))
    for (const gone of names.filter((_, n) => n % 3 === 0)) {
      slots.remove(given.get(gone) as number)
      given.delete(gone)
    }
    for (const name of names)
      if (slots.find(name) !== (given.get(name) ?? NONE)) t.fail(`${name} has another slot`)
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
