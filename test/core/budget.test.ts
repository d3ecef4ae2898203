import fc from 'fast-check'
import t from 'tap'
import { Budget, shared } from '../../src/runtime/limits.ts'

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

t.test(
  'a full budget asks other holders to give room back until there is enough or none is left',
  async (t) => {
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
  },
)

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
