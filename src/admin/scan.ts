import type { RecordId } from '../core/record.ts'
import type { Listing, Register } from '../store/register.ts'

/** Bounds how long it takes, and what it costs the store. */
const MAX_LOOKED = 50_000
const PAGE = 500
/** Records held at once: each may carry a body of several MiB. */
const AT_ONCE = 8

/** Shows every record once, a few at a time. Not `complete`: there are more than it shows. */
export async function scanRecords(
  store: Pick<Register, 'list'>,
  which: Listing,
  show: (id: RecordId) => Promise<void>,
): Promise<{ readonly looked: number; readonly complete: boolean }> {
  const seen = new Set<RecordId>()
  let cursor: string | null = null
  for (;;) {
    const page = await store.list(which, cursor, PAGE)
    const fresh = [...new Set(page.ids)].filter((id) => !seen.has(id))
    for (const id of fresh) seen.add(id)
    for (let at = 0; at < fresh.length; at += AT_ONCE)
      await Promise.all(fresh.slice(at, at + AT_ONCE).map(show))
    cursor = page.next
    if (cursor === null || seen.size >= MAX_LOOKED) return { looked: seen.size, complete: cursor === null }
  }
}
