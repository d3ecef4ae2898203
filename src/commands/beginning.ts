import type { PageView, RecordView } from '../admin/schemas.ts'
import { FINDING, finding, type Io } from './command.ts'
import { printRefusal, type RecordSource, type SourceRequest } from './record-source.ts'
import { plain, span, table } from './terminal.ts'

/** Redis has no order of ids, so a search looks at every key: 500,000 of them a page. */
const MAX_PAGES = 100
/** More than one is too many to choose from; so many are shown. */
const SHOWN = 20

/** The call for the one record whose id begins so; else the exit code, once the reason has been told. */
export async function recordAt(
  source: RecordSource,
  beginning: string,
  io: Io,
): Promise<SourceRequest | number> {
  const candidates = new Map<string, RecordView | null>()
  let cursor: string | null = null
  let now = 0
  for (let pages = 1; ; pages++) {
    const query = { id: beginning, limit: String(SHOWN), ...(cursor === null ? {} : { cursor }) }
    const reply = await source.ask({ method: 'GET', path: '/v1/records', query })
    if (!reply.ok) return printRefusal(io, source, reply)
    const page = reply.body as PageView
    for (const record of page.records) candidates.set(record.id, record)
    for (const id of page.unreadable) candidates.set(id, null)
    now = Date.parse(page.now)
    cursor = page.next
    if (cursor === null || candidates.size >= SHOWN) break
    if (pages === MAX_PAGES)
      return finding(io, `${source.name} holds too many keys to search: give the whole id`)
  }
  const [id, ...others] = candidates.keys()
  if (id === undefined)
    return finding(
      io,
      // It may be a key, given by mistake: not repeated.
      `${source.name}: record_not_found: no record id begins with that. A key needs --method, --path and --caller, or --route.`,
    )
  if (others.length === 0) return { method: 'GET', path: `/v1/records/${id}` }
  const more = cursor === null ? '' : 'or more '
  io.err(
    `idempotency-proxy: ${source.name}: ${candidates.size} ${more}record ids begin with ${plain(beginning)}; give more of the one that is meant:\n`,
  )
  io.err(table([...candidates].map(([one, record]) => row(one, record, now))))
  return FINDING
}

function row(id: string, record: RecordView | null, now: number): string[] {
  if (record === null) return [id, 'unreadable']
  const { state, route, method, path, createdAt } = record
  return [id, state, route, `${method} ${path}`, `${span(now - Date.parse(createdAt))} old`]
}
