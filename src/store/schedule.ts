import type { Millis } from '../core/record.ts'
import { grown, NONE } from './slots.ts'

const SMALLEST = 256

/** Slots ordered by due time: a binary heap with removal from the middle. Every change is O(log n). */
export class Schedule {
  /** By slot. */
  #times = new Float64Array(SMALLEST)
  /** By slot: place in the heap + 1; 0: not in the heap. */
  #places = new Int32Array(SMALLEST)
  /** Slots. */
  #heap = new Int32Array(SMALLEST)
  #size = 0

  /** All scheduled slots, unordered. Valid until the next change. */
  get slots(): Int32Array {
    return this.#heap.subarray(0, this.#size)
  }

  /** The slot with the earliest time, if that is not after `now`. */
  due(now: Millis): number {
    const first = this.#heap[0] as number
    return this.#size > 0 && (this.#times[first] as number) <= now ? first : NONE
  }

  timeOf(slot: number): Millis {
    return this.#times[slot] as number
  }

  /** Adds the slot, or moves it. */
  set(slot: number, time: Millis): void {
    while (slot >= this.#times.length) this.#grow()
    const position = (this.#places[slot] as number) - 1
    this.#times[slot] = time
    this.#sift(slot, position < 0 ? this.#size++ : position)
  }

  delete(slot: number): void {
    if (slot >= this.#places.length) return
    const place = (this.#places[slot] as number) - 1
    if (place < 0) return
    this.#places[slot] = 0
    const last = this.#heap[--this.#size] as number
    if (last !== slot) this.#sift(last, place)
  }

  /** Moves the slot up or down from the free `place` to where it belongs. */
  #sift(slot: number, place: number): void {
    const time = this.#times[slot] as number
    let at = place
    while (at > 0) {
      const parent = (at - 1) >> 1
      if (this.#timeAt(parent) <= time) break
      this.#put(this.#heap[parent] as number, at)
      at = parent
    }
    for (;;) {
      const left = 2 * at + 1
      if (left >= this.#size) break
      const least = left + 1 < this.#size && this.#timeAt(left + 1) < this.#timeAt(left) ? left + 1 : left
      if (time <= this.#timeAt(least)) break
      this.#put(this.#heap[least] as number, at)
      at = least
    }
    this.#put(slot, at)
  }

  #timeAt(place: number): Millis {
    return this.#times[this.#heap[place] as number] as number
  }

  #put(slot: number, place: number): void {
    this.#heap[place] = slot
    this.#places[slot] = place + 1
  }

  #grow(): void {
    const size = 2 * this.#times.length
    this.#times = grown(this.#times, size)
    this.#places = grown(this.#places, size)
    this.#heap = grown(this.#heap, size)
  }
}
