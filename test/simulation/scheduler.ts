import { setFlagsFromString } from 'node:v8'
import { runInThisContext } from 'node:vm'
import { mulberry32 } from '../support/random.ts'

setFlagsFromString('--allow-natives-syntax')
/** Runs every promise reaction that is due, at once: a whole run is one synchronous call, and nothing of Node's own comes between. */
const drainMicrotasks = runInThisContext('() => %PerformMicrotaskCheckpoint()') as () => void

/** The same draws for the same seed. */
export class Random {
  /** 0 to below 1. */
  readonly next: () => number

  constructor(seed: number) {
    this.next = mulberry32(Math.imul(seed ^ 0x9e3779b9, 0x85ebca6b) ^ (seed >>> 13))
  }

  chance(share: number): boolean {
    return this.next() < share
  }

  between(from: number, to: number): number {
    return from + this.next() * (to - from)
  }

  /** Below `end`. */
  whole(end: number): number {
    return Math.floor(this.next() * end)
  }

  pick<T>(items: readonly T[]): T {
    return items[this.whole(items.length)] as T
  }

  bytes(length: number): Buffer {
    const bytes = Buffer.alloc(length)
    for (let n = 0; n < length; n++) bytes[n] = this.whole(256)
    return bytes
  }
}

/** A process, or a part of the world. Its clock runs `rate` times as fast as the simulation's, and reads `began` more. */
export interface Owner {
  readonly name: string
  readonly rate: number
  readonly began: number
  isDead: boolean
  /** It does nothing until then; its clock goes on. */
  stalledUntil: number
}

export const WORLD: Owner = { name: 'world', rate: 1, began: 0, isDead: false, stalledUntil: 0 }

export interface Event {
  at: number
  readonly owner: Owner
  readonly what: string
  readonly isTimer: boolean
  readonly act: () => void
  isCancelled: boolean
}

/** One line of a run: who did what to which record. */
export interface Line {
  readonly at: number
  readonly by: string
  readonly what: string
  /** Null: of no one operation. */
  readonly about: string | null
}

/** Virtual time, and everything that may happen in it, in an order that the seed decides. */
export class Scheduler {
  readonly random: Random
  now = 0
  /** Whose event is under way. */
  current: Owner = WORLD
  events = 0
  /** Of every event and its time: equal for equal seeds. */
  hash = 0x811c9dc5
  /** Null: not kept. */
  readonly lines: Line[] | null
  readonly #heap: Event[] = []

  constructor(seed: number, isTold: boolean) {
    this.random = new Random(seed)
    this.lines = isTold ? [] : null
  }

  /** The monotonic clock of whoever runs now. */
  ownClock(): number {
    const { rate, began } = this.current
    return began + this.now * rate
  }

  /** `delay`: by the clock of the simulation. */
  after(delay: number, owner: Owner, what: string, act: () => void, isTimer = false): Event {
    const event = { at: this.now + Math.max(0, delay), owner, what, isTimer, act, isCancelled: false }
    this.#push(event)
    return event
  }

  tell(by: string, what: string, about: string | null = null): void {
    this.#mix(what)
    this.lines?.push({ at: this.now, by, what, about })
  }

  /** Until nothing is left, it is `over`, or `limit` has come; false: then. */
  run(limit: number, over: () => boolean): boolean {
    for (let event = this.#pop(); event !== null; event = this.#pop()) {
      const { owner } = event
      if (event.isCancelled || owner.isDead) continue
      if (event.at > limit) {
        this.#push(event)
        this.now = limit
        return false
      }
      this.now = event.at
      if (owner.stalledUntil > this.now) {
        // As in Node: after a pause timers come first.
        event.at = owner.stalledUntil + (event.isTimer ? 0 : this.random.next())
        this.#push(event)
        continue
      }
      this.events++
      this.#mix(event.what)
      this.current = owner
      event.act()
      drainMicrotasks()
      this.current = WORLD
      if (over()) return true
    }
    return true
  }

  /** FNV-1a. */
  #mix(what: string): void {
    let hash = this.hash ^ Math.floor(this.now * 1000)
    for (let n = 0; n < what.length; n++) hash = Math.imul(hash ^ what.charCodeAt(n), 0x01000193)
    this.hash = Math.imul(hash, 0x01000193) >>> 0
  }

  #push(event: Event): void {
    const heap = this.#heap
    let at = heap.push(event) - 1
    while (at > 0) {
      const up = (at - 1) >> 1
      const parent = heap[up] as Event
      if (parent.at <= event.at) break
      heap[at] = parent
      at = up
    }
    heap[at] = event
  }

  #pop(): Event | null {
    const heap = this.#heap
    const [first] = heap
    const last = heap.pop()
    if (first === undefined || last === undefined) return null
    if (heap.length === 0) return first
    let at = 0
    for (;;) {
      let child = 2 * at + 1
      if (child >= heap.length) break
      if (child + 1 < heap.length && (heap[child + 1] as Event).at < (heap[child] as Event).at) child++
      if ((heap[child] as Event).at >= last.at) break
      heap[at] = heap[child] as Event
      at = child
    }
    heap[at] = last
    return first
  }
}
