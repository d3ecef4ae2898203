import type { RecordId } from '../core/record.ts'

/** Serialises work on the same record within this process. */
export class KeyedMutex {
  readonly #last = new Map<RecordId, Promise<unknown>>()

  async run<T>(id: RecordId, work: () => Promise<T>): Promise<T> {
    const before = this.#last.get(id)
    const mine = before === undefined ? work() : before.then(work, work)
    this.#last.set(id, mine)
    try {
      return await mine
    } finally {
      if (this.#last.get(id) === mine) this.#last.delete(id)
    }
  }
}
