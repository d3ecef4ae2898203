import type { Millis } from '../core/record.ts'

/** Something that expires. The queue sets both fields. */
export interface Expiring {
  expiresAt: Millis
  /** Index in the heap; {@link OUTSIDE}: not in the queue. */
  place: number
}

export const OUTSIDE = -1

/** Items by when they expire: a binary heap with removal from the middle. Every change is O(log n). */
export class ExpiryQueue<Item extends Expiring> {
  readonly #heap: Item[] = []

  /** The first item to expire, if its time has come. */
  due(now: Millis): Item | undefined {
    const first = this.#heap[0]
    return first !== undefined && first.expiresAt <= now ? first : undefined
  }

  /** Adds the item, or moves it. */
  set(item: Item, expiresAt: Millis): void {
    item.expiresAt = expiresAt
    if (item.place === OUTSIDE) item.place = this.#heap.push(item) - 1
    this.#sift(item)
  }

  delete(item: Item): void {
    if (item.place === OUTSIDE) return
    const last = this.#heap.pop() as Item
    if (last !== item) {
      last.place = item.place
      this.#sift(last)
    }
    item.place = OUTSIDE
  }

  /** Moves the item up or down from its place to where it belongs. */
  #sift(item: Item): void {
    const heap = this.#heap
    let { place } = item
    while (place > 0) {
      const parent = heap[(place - 1) >> 1] as Item
      if (parent.expiresAt <= item.expiresAt) break
      this.#put(parent, place)
      place = (place - 1) >> 1
    }
    for (;;) {
      let child = heap[2 * place + 1]
      const right = heap[2 * place + 2]
      if (right !== undefined && right.expiresAt < (child as Item).expiresAt) child = right
      if (child === undefined || child.expiresAt >= item.expiresAt) break
      const below = child.place
      this.#put(child, place)
      place = below
    }
    this.#put(item, place)
  }

  #put(item: Item, place: number): void {
    this.#heap[place] = item
    item.place = place
  }
}
