import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { Leases } from '../../src/protect/settler.ts'
import type { Renewal } from '../../src/store/register.ts'
import { Gate, HOUR, idle, SECOND, until } from './harness.ts'

/** Longer than the renewer waits between two looks at what is due. */
async function looks(times: number): Promise<void> {
  for (let n = 0; n < times; n++) await new Promise((next) => setTimeout(next, 110))
}

/** Leases that a store renews, whatever it is asked; closed at the end. */
function renewing(t: Test) {
  const asked: (readonly Renewal[])[] = []
  const leases = new Leases(
    async (items) => {
      asked.push(items)
      return items.map(() => true)
    },
    () => t.fail(),
  )
  t.teardown(() => leases.close())
  return { leases, asked }
}

void t.test('all leases that are due are renewed in one call', async (t) => {
  const { leases, asked } = renewing(t)
  const token = Buffer.alloc(16, 1)
  const ids = ['a', 'b', 'c'] as RecordId[]
  for (const id of ids) leases.hold(id, token, 3, 9, performance.now())
  leases.hold('rare' as RecordId, token, 3_600_000, 9, performance.now())
  leases.hold('gone' as RecordId, token, 3, 9, performance.now())
  leases.release('gone' as RecordId, token)
  leases.release('a' as RecordId, Buffer.alloc(16, 2))
  t.equal(leases.size, 4, 'only the owner can release')
  await until(() => asked.length >= 2)
  t.same(
    asked[0]?.toSorted((a, b) => (a.id < b.id ? -1 : 1)),
    ids.map((id) => ({ id, token, dueIn: 3, dropIn: 9 })),
  )
  leases.close()
  t.equal(leases.size, 0)
})

void t.test('a failed renewal is reported once and retried, one call at a time', async (t) => {
  const gate = new Gate()
  let calls = 0
  const errors: unknown[] = []
  const leases = new Leases(
    async () => {
      calls++
      if (calls === 1) throw new Error('down')
      if (calls === 2) {
        leases.release(B, token)
        throw new Error('down again')
      }
      await gate.pass()
      return []
    },
    (error) => void errors.push((error as Error).message),
  )
  t.teardown(() => leases.close())
  const token = Buffer.alloc(16, 1)
  const [A, B] = ['a', 'b'] as [RecordId, RecordId]
  leases.hold(A, token, 300, 900, performance.now())
  leases.hold(B, token, 300, 900, performance.now())
  await until(() => calls === 3)
  t.same(errors, ['down'], 'once, until one succeeds')
  await looks(3)
  t.equal(calls, 3, 'none while one is under way')
  gate.open()
  await until(() => calls > 3)
  leases.release(A, token)
  await idle()
  leases.close()
})

void t.test('a lease is renewed once a third of it has passed, and again after another third', async (t) => {
  const { leases, asked } = renewing(t)
  for (const [id, passed] of [
    ['new', 0],
    ['early', 0.3],
    ['due', 0.36],
    ['late', 0.6],
  ] as const)
    leases.hold(id as RecordId, Buffer.alloc(16, 1), HOUR, HOUR, performance.now() - passed * HOUR)
  await looks(3)
  t.same(
    asked.map((items) => items.map(({ id }) => id)),
    [['due', 'late']],
  )
})

void t.test('a lease is renewed as long as it is held', async (t) => {
  const { leases, asked } = renewing(t)
  leases.hold('a' as RecordId, Buffer.alloc(16, 1), 300, 900, performance.now())
  await looks(8)
  t.ok(asked.length >= 3, `${asked.length} renewals`)
})

void t.test('nothing is renewed once an owner has released its last lease, or after the end', async (t) => {
  const { leases, asked } = renewing(t)
  const [id, token] = ['a' as RecordId, Buffer.alloc(16, 1)]
  leases.close()
  leases.hold(id, token, HOUR, HOUR, performance.now() - HOUR)
  leases.release('unknown' as RecordId, token)
  leases.release(id, token)
  await looks(2)
  t.same(asked, [])
  leases.hold(id, token, HOUR, HOUR, performance.now() - HOUR)
  leases.close()
  await looks(2)
  t.same(asked, [])
})

void t.test('a failure is reported again after a renewal has succeeded', async (t) => {
  const errors: unknown[] = []
  let calls = 0
  const leases = new Leases(
    async (items) => {
      if (++calls !== 2) throw new Error(`down ${calls}`)
      return items.map(() => true)
    },
    (error) => void errors.push((error as Error).message),
  )
  t.teardown(() => leases.close())
  leases.hold('a' as RecordId, Buffer.alloc(16, 1), 3, 9, performance.now())
  await looks(5)
  t.same(errors.slice(0, 2), ['down 1', 'down 3'])
})

void t.test('an attempt may begin in the first two thirds of its lease, if it has not lost it', async (t) => {
  let still: boolean[] | Error = [false]
  let calls = 0
  const leases = new Leases(
    async () => {
      calls++
      if (still instanceof Error) throw still
      return still
    },
    () => {},
  )
  t.teardown(() => leases.close())
  const [id, token] = ['a' as RecordId, Buffer.alloc(16, 1)]
  const begin = (lease: number, ago: number) => leases.hold(id, token, lease, 9, performance.now() - ago)
  t.equal(begin(HOUR, 0)(), true)
  t.equal(begin(HOUR, (2 / 3) * HOUR - SECOND)(), true)
  t.equal(begin(HOUR, (2 / 3) * HOUR)(), false, 'the claim is too old: this process may have been paused')

  const renewed = async (ago: number, reply: boolean[] | Error) => {
    const from = calls
    still = reply
    const isSure = begin(HOUR, ago)
    await until(() => calls > from)
    await idle()
    return isSure()
  }
  t.equal(await renewed(HOUR / 2, [true]), true, 'the store says it is still the owner')
  t.equal(await renewed(HOUR / 2, new Error('down')), true, 'nothing new is known')
  t.equal(await renewed(HOUR / 2, [false]), false, 'the store says it is not any more')
  t.equal(await renewed(HOUR / 2, []), false)
  t.equal(
    await renewed(HOUR, [true]),
    false,
    'others may have been told that it fell silent, which a store rolled back since does not know',
  )
})

void t.test('a renewed attempt may begin in the first two thirds of its new lease', async (t) => {
  const { leases } = renewing(t)
  const isSure = leases.hold('a' as RecordId, Buffer.alloc(16, 1), HOUR, HOUR, performance.now() - HOUR / 2)
  await looks(2)
  const { now } = performance
  t.teardown(() => {
    performance.now = now
  })
  for (const [passed, expected] of [
    [0.6, true],
    [0.7, false],
  ] as const) {
    performance.now = () => now.call(performance) + passed * HOUR
    t.equal(isSure(), expected, `${passed} of the lease later`)
  }
})

void t.test('a renewal that failed is tried again at once, however long the lease', async (t) => {
  let calls = 0
  const leases = new Leases(
    async (items) => {
      if (++calls === 1) throw new Error('down')
      return items.map(() => true)
    },
    () => {},
  )
  t.teardown(() => leases.close())
  leases.hold('a' as RecordId, Buffer.alloc(16, 1), HOUR, HOUR, performance.now() - HOUR / 2)
  await looks(4)
  t.equal(calls, 2)
})
