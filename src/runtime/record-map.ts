import type { RecordId } from '../core/record.ts'

/** One entry per slot at the default `limits.inFlight`. */
const SLOTS = 2048
/** Copying it is faster than building another one. */
const EMPTY: readonly null[] = Array.from({ length: SLOTS }, () => null)

interface MapEntry<V> {
  readonly id: RecordId
  value: V
  next: MapEntry<V> | null
}

/**
 * Values by record id, for entries that live as long as a request. A `Map` reallocates its table from time to time, and objects referenced
 * by a dead table in the old generation survive until the next full collection: a third of all requests, with everything they reference
 * (docs/adr/0017). This table is never reallocated.
 */
export class RecordMap<V> {
  readonly #slots: (MapEntry<V> | null)[] = [...EMPTY]
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
    this.#slots[slot] = { id, value, next: this.#slots[slot] as MapEntry<V> | null }
    this.#size++
  }

  delete(id: RecordId): void {
    const slot = slotOf(id)
    let before: MapEntry<V> | null = null
    for (let entry = this.#slots[slot] as MapEntry<V> | null; entry !== null; entry = entry.next) {
      if (entry.id === id) {
        if (before === null) this.#slots[slot] = entry.next
        else before.next = entry.next
        // A removed entry must not keep others alive.
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

  /** Entries may be deleted during iteration. */
  *[Symbol.iterator](): Generator<[RecordId, V]> {
    if (this.#size === 0) return
    for (const slot of this.#slots)
      for (let entry = slot; entry !== null; ) {
        const { id, value, next }: MapEntry<V> = entry
        yield [id, value]
        entry = next
      }
  }

  #find(id: RecordId): MapEntry<V> | null {
    let entry = this.#slots[slotOf(id)] as MapEntry<V> | null
    while (entry !== null && entry.id !== id) entry = entry.next
    return entry
  }
}

/** Ids are digests in base64url: their last whole characters are uniformly distributed. */
function slotOf(id: RecordId): number {
  const { length } = id
  const mixed = (id.charCodeAt(length - 2) * 31 + id.charCodeAt(length - 3)) * 31 + id.charCodeAt(length - 4)
  return mixed & (SLOTS - 1)
}
