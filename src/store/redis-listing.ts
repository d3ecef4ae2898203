import type { RecordId } from '../core/record.ts'
import { inOrder, type Place, pageOf, placeOf } from './cursor.ts'
import type { RedisKeys } from './redis-keys.ts'
import type { Page } from './register.ts'

type Ask = (command: string, args: (string | number)[]) => Promise<unknown>

/** SCAN's own guarantee is the port's: what is there all the while comes at least once. */
export async function listRecords(
  ask: Ask,
  keys: RedisKeys,
  cursor: string | null,
  limit: number,
  glob: string,
): Promise<Page> {
  if (cursor !== null && !/^\d{1,20}$/.test(cursor)) throw new RangeError('not a cursor of this store')
  const [next, found] = (await ask('scan', [cursor ?? 0, 'MATCH', glob, 'COUNT', limit])) as [
    Buffer,
    Buffer[],
  ]
  const ids = found.map((key) => keys.idOf(String(key))).filter((id) => id !== null)
  return { ids, next: String(next) === '0' ? null : String(next) }
}

/** The first of every shard's index after the cursor, and of these the first. */
export async function listUnresolved(
  ask: Ask,
  keys: RedisKeys,
  cursor: string | null,
  limit: number,
): Promise<Page> {
  const from = placeOf(cursor)
  const found = await Promise.all(keys.indexes.map((index) => placesAfter(ask, index, from, limit)))
  return pageOf(found.flat().sort(inOrder).slice(0, limit), limit)
}

async function placesAfter(ask: Ask, index: string, from: Place, limit: number): Promise<Place[]> {
  const places: Place[] = []
  // More than once only where more than `limit` share the cursor's instant.
  for (let offset = 0; ; offset += limit) {
    const range = [index, from.due, '+inf', 'WITHSCORES', 'LIMIT', offset, limit]
    const chunk = scored((await ask('zrangebyscore', range)) as Buffer[])
    places.push(...chunk.filter((place) => inOrder(place, from) > 0))
    if (places.length >= limit || chunk.length < limit) return places
  }
}

/** Pairs of a reply WITHSCORES. */
export function scored(reply: Buffer[]): (Place & { readonly id: RecordId })[] {
  const pairs = []
  for (let n = 0; n + 1 < reply.length; n += 2)
    pairs.push({ id: String(reply[n]) as RecordId, due: Number(reply[n + 1]) })
  return pairs
}
