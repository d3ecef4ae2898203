import fc from 'fast-check'
import t from 'tap'
import { EVEN, StoreClock } from '../../src/core/store-clock.ts'

const DAY = 86_400_000
const STORE = 1_795_000_000_000

/** A clock read every second by a process whose own clock began at 0. `steps`: how far it jumps, by second. */
function readings(seconds: number, steps: Readonly<Record<number, number>> = {}) {
  const clock = new StoreClock()
  let stepped = 0
  const at: number[] = []
  for (let second = 0; second <= seconds; second++) {
    stepped += steps[second] ?? 0
    at.push(STORE + second * 1000 + stepped)
    clock.saw(at[second] as number, second * 1000 - 2, second * 1000)
  }
  return { clock, at: (second: number) => at[second] as number, now: seconds * 1000 }
}

void t.test('on a clock that runs evenly, as much time has passed as it shows', (t) => {
  const { clock, at, now } = readings(100)
  t.equal(clock.since(at(40), now), 60_000)
  t.equal(clock.since(at(40) + 500, now), 59_500)
  t.equal(clock.since(at(100), now), 0)
  t.equal(clock.since(at(100) + 5000, now), -5000, 'still to come')
  t.equal(clock.since(STORE - DAY, now), 100_000, 'no more than was seen')
  t.end()
})

void t.test('before the first reading, no time has certainly passed', (t) => {
  t.equal(new StoreClock().since(STORE, 1_000_000), 0)
  t.end()
})

void t.test('V08 L12 a step forward adds no time', (t) => {
  for (const step of [90_000, DAY]) {
    const { clock, at, now } = readings(100, { 60: step })
    t.equal(clock.since(at(50), now), 50_000)
    t.equal(clock.since(at(59) + 900, now), 40_100, 'said before the step')
    t.equal(clock.since(at(59) + step / 2, now), 40_000, 'never said, or between two readings')
    t.equal(clock.since(at(60), now), 40_000)
    t.equal(clock.since(at(90), now), 10_000)
  }
  t.end()
})

void t.test('V08 L12 after a step back, the later of two moments with the same reading counts', (t) => {
  const { clock, at, now } = readings(100, { 60: -30_000 })
  t.equal(clock.since(at(20), now), 80_000, 'said once')
  t.equal(clock.since(at(40), now), 30_000, 'said at second 40, and at 70')
  t.equal(clock.since(at(70), now), 30_000)
  t.equal(clock.since(at(59), now), 11_000)
  const { clock: far, at: then } = readings(100, { 60: -DAY })
  t.equal(far.since(then(40), now), 60_000 - DAY, 'it will be said again tomorrow')
  t.end()
})

void t.test('slow readings and slow corrections are not taken for steps', (t) => {
  const clock = new StoreClock()
  clock.saw(STORE, -800, 0)
  clock.saw(STORE + 1000 + 700, 990, 1000)
  t.equal(clock.since(STORE + 700, 10_000), 10_000, 'the fastest reading counts')
  clock.saw(STORE + 50_000, 1000, 1000 + EVEN + 1)
  t.equal(clock.since(STORE + 1700, 10_000), 9000, 'a reading that took too long says nothing')
  t.end()
})

void t.test('a clock that runs too fast adds no time either', (t) => {
  const clock = new StoreClock()
  for (let second = 0; second <= 100; second++) clock.saw(STORE + second * 1500, second * 1000, second * 1000)
  t.ok(clock.since(STORE, 100_000) <= 100_000)
  t.ok(clock.since(STORE + 75_000, 100_000) <= 50_000 + EVEN)
  t.end()
})

void t.test('V08 no more time counts as passed than has passed, whatever the clock did', (t) => {
  const step = fc.record({
    after: fc.integer({ min: 1, max: 30 }),
    by: fc.integer({ min: -200_000, max: 200_000 }),
  })
  fc.assert(
    fc.property(fc.array(step, { maxLength: 30, size: 'max' }), fc.nat(), (steps, pick) => {
      const clock = new StoreClock()
      const said: { readonly own: number; readonly store: number }[] = []
      let own = 0
      let offset = STORE
      for (const { after, by } of [...steps, { after: 5, by: 0 }]) {
        for (let n = 0; n < after; n++) {
          own += 1000
          clock.saw(own + offset, own, own)
          said.push({ own, store: own + offset })
        }
        offset += by
      }
      const { own: then, store } = said[pick % said.length] as (typeof said)[0]
      return clock.since(store, own) <= own - then + EVEN
    }),
    { numRuns: 300, seed: 20_261_122 },
  )
  t.end()
})

void t.test('V08 an instant between two readings around a step counts as the later one', (t) => {
  const clock = new StoreClock()
  for (let own = 0; own <= 300_000; own += 1000) clock.saw(STORE + own, own, own)
  for (let own = 301_000; own <= 305_000; own += 1000) clock.saw(STORE + own - 90_000, own, own)
  for (let own = 306_000; own <= 308_000; own += 1000) clock.saw(STORE + own, own, own)
  t.equal(clock.since(STORE + 300_500 - 90_000, 308_000), 7000, 'said at 300.5 s, not at 210.5 s')
  t.end()
})

void t.test('V08 a clock that steps between readings and drifts adds no time', (t) => {
  const tick = fc.record({
    pause: fc.integer({ min: 200, max: 1700 }),
    step: fc.option(fc.integer({ min: -200_000, max: 200_000 }), { freq: 12 }),
    small: fc.option(fc.integer({ min: -2000, max: 2000 }), { freq: 12 }),
    way: fc.integer({ min: 0, max: 50 }),
    stamped: fc.boolean(),
  })
  const drift = fc.integer({ min: -100, max: 100 })
  fc.assert(
    fc.property(
      fc.array(tick, { minLength: 20, maxLength: 200, size: 'max' }),
      drift,
      (ticks, perMillion) => {
        const clock = new StoreClock()
        let own = 0
        let offset = STORE
        const said = (): number => Math.floor(offset + own * (1 + perMillion / 1_000_000))
        const stamps: { readonly own: number; readonly store: number }[] = []
        for (const { pause, step, small, way, stamped } of ticks) {
          own += pause
          // Between two readings.
          offset += (step === null ? 0 : -step) + (small ?? 0)
          if (stamped) stamps.push({ own, store: said() })
          const before = own
          own += way
          const now = said()
          own += way
          clock.saw(now, before, own)
          // Allowing for the duration of a reading and for rounding.
          for (const one of stamps) if (clock.since(one.store, own) > own - one.own + 110) return false
        }
        return true
      },
    ),
    { numRuns: 300, seed: 20_261_122 },
  )
  t.end()
})

void t.test('a reading that took longer than a second says nothing, one of a second counts', (t) => {
  for (const [took, passed] of [
    [EVEN, 8000],
    [EVEN + 1, -39_500],
  ] as const) {
    const clock = new StoreClock()
    clock.saw(STORE, -1000, 0)
    clock.saw(STORE + 500, 0, 0)
    clock.saw(STORE + 50_000, 2000 - took, 2000)
    t.equal(clock.since(STORE + 50_000, 10_000), passed, `${took} ms`)
  }
  t.end()
})
