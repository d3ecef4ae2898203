import t from 'tap'
import { InFlight, Shares, shareOf } from '../../src/runtime/limits.ts'

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

t.test(
  'X02 neither one address nor one caller can take every place; small limits are not divided',
  async (t) => {
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
  },
)
