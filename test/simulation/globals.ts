import crypto from 'node:crypto'
import { syncBuiltinESMExports } from 'node:module'
import timers from 'node:timers/promises'
import { type Event, Random, type Scheduler } from './scheduler.ts'

/** The simulation under way: while there is one, clocks and timers are its own. */
let running: Scheduler | null = null
/** What the product draws by itself: apart from the draws of the seed, which decide what happens. */
let drawn = new Random(0)

/** Whoever runs has its own monotonic clock; nobody reads this one for what is stored. */
const WALL = 1_795_000_000_000

export function inSimulation<T>(scheduler: Scheduler, run: () => T): T {
  running = scheduler
  drawn = new Random(0)
  try {
    return run()
  } finally {
    running = null
  }
}

class Timer {
  event: Event
  constructor(event: Event) {
    this.event = event
  }
  ref(): this {
    return this
  }
  unref(): this {
    return this
  }
}

const real = { setTimeout, setInterval, clearTimeout, clearInterval, now: performance.now, date: Date.now }

function later(scheduler: Scheduler, act: () => void, delay: number, isRepeated: boolean): Timer {
  const { current } = scheduler
  const pause = Math.max(1, delay) / current.rate
  const due = (): void => {
    if (isRepeated) timer.event = scheduler.after(pause, current, 'timer', due, true)
    act()
  }
  const timer = new Timer(scheduler.after(pause, current, 'timer', due, true))
  return timer
}

function cancel(timer: unknown, otherwise: (timer: never) => void): void {
  if (timer instanceof Timer) timer.event.isCancelled = true
  else otherwise(timer as never)
}

type Timing = (act: (...args: unknown[]) => void, delay?: number, ...args: unknown[]) => unknown

const replaced = (otherwise: Timing, isRepeated: boolean): Timing =>
  Object.assign(
    (act: (...args: unknown[]) => void, delay = 0, ...args: unknown[]) =>
      running === null
        ? otherwise(act, delay, ...args)
        : later(running, () => act(...args), delay, isRepeated),
    // Symbols by which `node:util` makes a promise of it.
    otherwise,
  )

Object.assign(globalThis, {
  setTimeout: replaced(real.setTimeout as Timing, false),
  setInterval: replaced(real.setInterval as Timing, true),
  clearTimeout: (timer: unknown) => cancel(timer, real.clearTimeout),
  clearInterval: (timer: unknown) => cancel(timer, real.clearInterval),
})
const { setTimeout: waitReally } = timers
timers.setTimeout = <T>(delay = 0, value?: T, options?: object): Promise<T> => {
  const scheduler = running
  if (scheduler === null) return waitReally(delay, value, options)
  return new Promise((resolve) => later(scheduler, () => resolve(value as T), delay, false))
}
const { randomFillSync, randomBytes } = crypto
crypto.randomFillSync = ((bytes: Buffer, offset = 0, size = bytes.length - offset) => {
  if (running === null) return randomFillSync(bytes, offset, size)
  drawn.bytes(size).copy(bytes, offset)
  return bytes
}) as typeof crypto.randomFillSync
crypto.randomBytes = ((size: number) =>
  running === null ? randomBytes(size) : drawn.bytes(size)) as typeof crypto.randomBytes
// What was imported by name, too.
syncBuiltinESMExports()
performance.now = () => (running === null ? real.now.call(performance) : running.ownClock())
Date.now = () => (running === null ? real.date() : WALL + Math.floor(running.ownClock()))
