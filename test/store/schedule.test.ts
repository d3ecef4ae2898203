import fc from 'fast-check'
import t from 'tap'
import { Schedule } from '../../src/store/schedule.ts'
import { NONE } from '../../src/store/slots.ts'

void t.test('the earliest slot comes first, whatever was moved or removed before', async (t) => {
  const slot = fc.oneof(fc.nat(20), fc.nat(2000))
  const change = fc.record({ slot, time: fc.option(fc.nat(100), { freq: 2 }) })
  fc.assert(
    fc.property(fc.array(change, { maxLength: 200, size: 'max' }), (changes) => {
      const model = new Map<number, number>()
      const schedule = new Schedule()
      for (const { slot, time } of changes)
        if (time === null) {
          model.delete(slot)
          schedule.delete(slot)
        } else {
          model.set(slot, time)
          schedule.set(slot, time)
        }
      const sorted = (slots: Iterable<number>) => JSON.stringify([...slots].sort((a, b) => a - b))
      if (sorted(schedule.slots) !== sorted(model.keys())) return false
      for (const time of [...model.values()].sort((a, b) => a - b)) {
        if (schedule.due(time - 1) !== NONE) return false
        const slot = schedule.due(time)
        if (model.get(slot) !== time || schedule.timeOf(slot) !== time) return false
        model.delete(slot)
        schedule.delete(slot)
      }
      return schedule.due(Number.POSITIVE_INFINITY) === NONE
    }),
    { numRuns: 1000 },
  )
  t.pass()
})

void t.test('removing a slot that is not there changes nothing, however many there are', async (t) => {
  const schedule = new Schedule()
  schedule.set(0, 1)
  for (let slot = 1; slot < 3000; slot++) schedule.delete(slot)
  t.same([...schedule.slots], [0])
  for (let slot = 1; slot < 600; slot++) {
    schedule.set(slot, 1)
    schedule.delete(slot + 1)
    if (schedule.slots.length !== slot + 1) t.fail(`${slot} is lost`)
  }
})
