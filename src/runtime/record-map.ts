import type { RecordId } from '../core/record.ts'

/** One entry in each where as many requests run as `limits.inFlight` allows by default. */
const SLOTS = 2048

interface Entry<V> {
  readonly id: RecordId
  value: V
  next: Entry<V> | null
}

/**
 * Values by record id, for what lives as long as a request. A `Map` makes itself anew every so many changes, and what the
 * old one still held when V8 had moved it to the old generation stays until the next full collection: a third of all
 * requests, with everything that they refer to. This one never moves.
 */
export class RecordMap<V> {
  readonly #slots: (Entry<V> | null)[] = Array.from({ length: SLOTS }, () => null)
  #size = 0

  get size(): number {
    return this.#size
  }

  get(id: RecordId): V | undefined {
    return this.#find(id)?.value
  }

  has(id: RecordId): boolean {
    return this.#find(id) !== null
  }

  set(id: RecordId, value: V): void {
    const found = this.#find(id)
    if (found !== null) {
      found.value = value
      return
    }
    const slot = slotOf(id)
    this.#slots[slot] = { id, value, next: this.#slots[slot] as Entry<V> | null }
    this.#size++
  }

  delete(id: RecordId): void {
    const slot = slotOf(id)
    let before: Entry<V> | null = null
    for (let entry = this.#slots[slot] as Entry<V> | null; entry !== null; entry = entry.next) {
      if (entry.id === id) {
        if (before === null) this.#slots[slot] = entry.next
        else before.next = entry.next
        // What is let go of must hold nothing that lives on.
        entry.next = null
        this.#size--
        return
      }
      before = entry
    }
  }

  clear(): void {
    this.#slots.fill(null)
    this.#size = 0
  }

  /** Entries may be deleted meanwhile. */
  *[Symbol.iterator](): Generator<[RecordId, V]> {
    if (this.#size === 0) return
    for (const slot of this.#slots)
      for (let entry = slot; entry !== null; ) {
        const { id, value, next }: Entry<V> = entry
        yield [id, value]
        entry = next
      }
  }

  #find(id: RecordId): Entry<V> | null {
    let entry = this.#slots[slotOf(id)] as Entry<V> | null
    while (entry !== null && entry.id !== id) entry = entry.next
    return entry
  }
}

/** Ids are digests in base64url: their last whole characters are spread evenly. */
function slotOf(id: RecordId): number {
  const { length } = id
  const mixed = (id.charCodeAt(length - 2) * 31 + id.charCodeAt(length - 3)) * 31 + id.charCodeAt(length - 4)
  return mixed & (SLOTS - 1)
}
