import type { RecordId } from '../core/record.ts'

interface Watcher {
  readonly changed: () => void
}

/** Who in this process waits for the end of which attempt. */
export class Watchers {
  readonly #byId = new Map<RecordId, Set<Watcher>>()

  /** Returns what ends it. */
  add(id: RecordId, changed: () => void): () => void {
    const watcher = { changed }
    const watching = this.#byId.get(id) ?? new Set()
    this.#byId.set(id, watching.add(watcher))
    return () => {
      if (watching.delete(watcher) && watching.size === 0) this.#byId.delete(id)
    }
  }

  has(id: RecordId): boolean {
    return this.#byId.has(id)
  }

  /** One microtask each: a watcher that throws fails no write and no other watcher. */
  tell(id: RecordId): void {
    const watching = this.#byId.get(id)
    for (const watcher of watching ?? [])
      queueMicrotask(() => {
        if (watching?.has(watcher)) watcher.changed()
      })
  }
}
