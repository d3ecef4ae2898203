/** What {@link Heap} orders: it keeps the item's place in the item itself, so that removal needs no search. */
export interface Heaped {
  key: number
  /** Index in the heap, -1 outside of it. Owned by the heap. */
  at: number
}

/** A binary min-heap over `key` with removal from the middle: every operation is O(log n). */
export class Heap<T extends Heaped> {
  readonly #items: T[] = []

  /** In no order. */
  get all(): readonly T[] {
    return this.#items
  }

  peek(): T | undefined {
    return this.#items[0]
  }

  add(item: T): void {
    item.at = this.#items.length
    this.#items.push(item)
    this.#up(item)
  }

  remove(item: T): void {
    if (item.at < 0) return
    const last = this.#items.pop() as T
    if (last !== item) {
      last.at = item.at
      this.#items[last.at] = last
      this.#up(last)
      this.#down(last)
    }
    item.at = -1
  }

  #up(item: T): void {
    while (item.at > 0) {
      const parent = this.#items[(item.at - 1) >> 1] as T
      if (parent.key <= item.key) return
      this.#exchange(parent, item)
    }
  }

  #down(item: T): void {
    for (;;) {
      const left = this.#items[2 * item.at + 1]
      const right = this.#items[2 * item.at + 2]
      const least = right !== undefined && right.key < (left as T).key ? right : left
      if (least === undefined || item.key <= least.key) return
      this.#exchange(item, least)
    }
  }

  #exchange(upper: T, lower: T): void {
    const at = upper.at
    upper.at = lower.at
    lower.at = at
    this.#items[upper.at] = upper
    this.#items[lower.at] = lower
  }
}
