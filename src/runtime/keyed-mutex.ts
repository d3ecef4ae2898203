import type { RecordId } from '../core/record.ts'

/** Lets those who do something about the same record do it one after the other, on this replica. */
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
