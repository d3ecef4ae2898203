import type { Millis, RecordId } from '../core/record.ts'
import type { Page } from './register.ts'

/** Where a record stands in the order of the unresolved ones: by its instant, then by its id. */
export interface Place {
  readonly due: Millis
  readonly id: string
}

/** @throws {RangeError} for a cursor that {@link pageOf} did not make. */
export function placeOf(cursor: string | null): Place {
  if (cursor === null) return { due: 0, id: '' }
  const [, due, id] = /^(\d{1,16}) ([\w-]{1,64})$/.exec(cursor) ?? []
  if (due === undefined || id === undefined) throw new RangeError('not a cursor of this store')
  return { due: Number(due), id }
}

export function inOrder(a: Place, b: Place): number {
  return a.due - b.due || Number(a.id > b.id) - Number(a.id < b.id)
}

/** The page that `found`, in order and all that there is up to `limit`, makes. */
export function pageOf(found: readonly Place[], limit: number): Page {
  const last = found[limit - 1]
  return {
    ids: found.map(({ id }) => id as RecordId),
    next: last === undefined ? null : `${last.due} ${last.id}`,
  }
}
