import type { Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'

interface Timer {
  readonly act: () => void
  readonly every: Millis | null
  at: Millis
}

export interface FrozenClock {
  /** Fires the timers of that time, each at its instant. */
  pass(time: Millis): Promise<void>
  /** Whatever can happen without time, or sockets. */
  settled(): Promise<void>
  /** Resolves when `check` holds: sockets go on working. */
  until(check: () => boolean | Promise<boolean>): Promise<void>
  /** Lets time pass until `check` holds. */
  passUntil(check: () => boolean): Promise<void>
  /** That have not fired. */
  timers(): number
}

/** Until the end of the test, time stands still but for {@link FrozenClock.pass}. */
export function frozenClock(t: Test): FrozenClock {
  const real = { setTimeout, setInterval, clearTimeout, clearInterval }
  const { now: realNow } = performance
  const immediately = setImmediate
  const timers = new Set<Timer>()
  let now = 1_000_000
  const plan =
    (every: boolean) =>
    (run: (...args: unknown[]) => void, delay: Millis, ...args: unknown[]) => {
      const act = () => run(...args)
      const timer = {
        act,
        at: now + delay,
        every: every ? delay : null,
        unref: () => timer,
        ref: () => timer,
      }
      timers.add(timer)
      return timer
    }
  const forget = (otherwise: (timer: never) => void) => (timer: unknown) =>
    timers.has(timer as Timer) ? void timers.delete(timer as Timer) : otherwise(timer as never)
  Object.assign(globalThis, {
    setTimeout: plan(false),
    setInterval: plan(true),
    clearTimeout: forget(real.clearTimeout),
    clearInterval: forget(real.clearInterval),
  })
  performance.now = () => now
  t.teardown(() => {
    Object.assign(globalThis, real)
    performance.now = realNow
  })
  const clock: FrozenClock = {
    async pass(time) {
      await clock.settled()
      const end = now + time
      for (;;) {
        const next = Math.min(...[...timers].map(({ at }) => at))
        if (next > end) break
        now = next
        // As in a real loop, before whatever is for immediately after.
        for (const timer of [...timers].filter(({ at }) => at === next)) {
          if (!timers.has(timer)) continue
          if (timer.every === null) timers.delete(timer)
          else timer.at += timer.every
          timer.act()
        }
        await clock.settled()
      }
      now = end
    },
    async settled() {
      for (let n = 0; n < 3; n++) await new Promise((next) => immediately(next))
    },
    async until(check) {
      // A turn is enough for sockets within this process.
      for (let turns = 0; !(await check()); turns++)
        await new Promise<unknown>((next) => (turns < 100 ? immediately(next) : real.setTimeout(next, 1)))
    },
    async passUntil(check) {
      while (!check()) {
        await clock.pass(10)
        await clock.settled()
        await new Promise((next) => real.setTimeout(next, 1))
      }
    },
    timers: () => timers.size,
  }
  return clock
}
