import { setImmediate as nextTurn } from 'node:timers/promises'
import type { Millis } from '../core/record.ts'
import type { Steps } from '../core/steps.ts'

/** A value, or a promise of one: a store in this process answers without a turn of the microtask queue. */
export type MaybePromise<T> = T | Promise<T>

/** Applies `next` to the value, synchronously if it is not a promise. */
export function after<T, U>(value: MaybePromise<T>, next: (value: T) => MaybePromise<U>): MaybePromise<U> {
  return value instanceof Promise ? value.then(next) : next(value)
}

/** Resolves as `work` does, or to null after `limit`; the work continues. */
export function within<T>(limit: Millis, work: Promise<T>): Promise<T | null> {
  let timer: NodeJS.Timeout | undefined
  const late = new Promise<null>((resolve) => {
    timer = setTimeout(resolve, limit, null)
  })
  return Promise.race([work, late]).finally(() => clearTimeout(timer))
}

/** Makes a value once, on first use. After a failure the next caller tries again. */
export class Once<T> {
  readonly #make: () => Promise<T>
  #made: Promise<T> | null = null

  constructor(make: () => Promise<T>) {
    this.#make = make
  }

  get(): Promise<T> {
    this.#made ??= this.#make().catch((error: unknown) => {
      this.#made = null
      throw error
    })
    return this.#made
  }
}

let last: Promise<unknown> = Promise.resolve()

/**
 * Runs long work one step per turn of the event loop, one task after another: even a long queue blocks the loop no longer than a single
 * step.
 */
export function inSteps<T>(steps: Steps<T>): Promise<T> {
  const before = last
  const work = (async (): Promise<T> => {
    await before
    for (;;) {
      const step = steps.next()
      if (step.done === true) return step.value
      await nextTurn()
    }
  })()
  last = work.catch(() => {})
  return work
}

/**
 * Runs one step for all items of a turn of the event loop, at the end of that turn: the step's code is then in the CPU caches for all but
 * the first (docs/adr/0017).
 */
export class Batch<Item> {
  readonly #step: (item: Item) => void
  #items: Item[] = []

  /** `step` must not throw. */
  constructor(step: (item: Item) => void) {
    this.#step = step
  }

  add(item: Item): void {
    if (this.#items.length === 0) setImmediate(this.#run)
    this.#items.push(item)
  }

  readonly #run = (): void => {
    const items = this.#items
    this.#items = []
    for (const item of items) this.#step(item)
  }
}

/** The results, with `otherwise` for a failure unless all have failed: one failure must not hide the other answers. */
export async function settled<T>(promises: readonly Promise<T>[], otherwise: T): Promise<T[]> {
  const results = await Promise.allSettled(promises)
  const failed = results.filter((result) => result.status === 'rejected')
  if (failed.length > 0 && failed.length === results.length) throw failed[0]?.reason
  return results.map((result) => (result.status === 'fulfilled' ? result.value : otherwise))
}

/** Serialises work under the same name, such as a record's id, within this process. */
export class KeyedMutex {
  readonly #last = new Map<string, Promise<unknown>>()

  async run<T>(name: string, work: () => Promise<T>): Promise<T> {
    const before = this.#last.get(name)
    const mine = before === undefined ? work() : before.then(work, work)
    this.#last.set(name, mine)
    try {
      return await mine
    } finally {
      if (this.#last.get(name) === mine) this.#last.delete(name)
    }
  }
}
