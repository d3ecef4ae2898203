import { parseDuration } from '../config/units.ts'
import { ID_BEGINNING, type Millis, type RecordId, STATES, type State } from '../core/record.ts'
import { CorruptRecord, type KeptNote, type Listing } from '../store/register.ts'
import { type AdminAnswer, ok, problem } from './answers.ts'
import { factsOf } from './explain.ts'
import { read } from './input.ts'
import type { AdminPorts, AdminRequest } from './ports.ts'
import type { Lookup, RecordView } from './schemas.ts'
import { etag, fullView, recordView, time } from './view.ts'

const PAGE = 100
const MAX_PAGE = 1000
/** Records looked at for one page, where few of them fit the filter: bounds how long an answer takes. */
const MAX_LOOKED = 5000
/** Likewise in a store with much else in it: pages asked for, and ids of one of them, where the last one gave nothing. */
const MAX_ASKED = 500
const MAX_STEP = 256
/** By its beginning a store may have to pass over all others, of which it gives none. */
const SEARCH_STEP = 1000
/** Records held at once: each may carry a body of several MiB. */
const AT_ONCE = 8

interface Filter {
  /** How the id begins. */
  readonly id: string | null
  readonly states: ReadonlySet<State> | null
  readonly route: string | null
  readonly age: Millis
  readonly deadLettered: boolean | null
  readonly limit: number
  readonly cursor: string | null
}

/** GET /v1/records */
export async function list(ports: AdminPorts, { query }: AdminRequest): Promise<AdminAnswer> {
  const filter = filterOf(query)
  if (typeof filter === 'string') return problem('invalid_request', filter)
  const unresolved: readonly State[] = ['in_progress', 'unknown']
  const { states, deadLettered } = filter
  const indexed =
    deadLettered === true || (states !== null && [...states].every((one) => unresolved.includes(one)))
  const which: Listing = filter.id !== null ? { beginning: filter.id } : indexed ? 'unresolved' : 'all'
  let cursor: string | null
  try {
    cursor = filter.cursor === null ? null : placeIn(which, filter.cursor)
  } catch {
    return problem('invalid_request', '?cursor: not the `next` of a page with this filter')
  }
  let now = await ports.store.ping()
  const records: RecordView[] = []
  const unreadable: RecordId[] = []
  const seen = new Set<RecordId>()
  let step = filter.id === null ? filter.limit : SEARCH_STEP
  for (let asked = 1; ; asked++) {
    let page: Awaited<ReturnType<AdminPorts['store']['list']>>
    try {
      page = await ports.store.list(which, cursor, step)
    } catch (error) {
      if (error instanceof RangeError)
        return problem('invalid_request', '?cursor: not the `next` of a page with this filter')
      throw error
    }
    const before = records.length
    const fresh = page.ids.filter((id) => !seen.has(id))
    for (const id of fresh) seen.add(id)
    for (let at = 0; at < fresh.length; at += AT_ONCE) {
      const found = await Promise.all(fresh.slice(at, at + AT_ONCE).map((id) => look(ports, id, filter)))
      for (const [n, one] of found.entries()) {
        if (one === 'unreadable') unreadable.push(fresh[at + n] as RecordId)
        else if (one !== null) {
          records.push(one.view)
          now = one.now
        }
      }
    }
    cursor = page.next
    if (cursor === null || records.length >= filter.limit) break
    if (seen.size >= MAX_LOOKED || asked >= MAX_ASKED) break
    if (filter.id !== null) continue
    step = records.length > before ? filter.limit - records.length : Math.min(2 * step, MAX_STEP)
  }
  const next = cursor === null ? null : Buffer.from(`${nameOf(which)} ${cursor}`).toString('base64url')
  return ok({ records, unreadable, next, now: time(now) })
}

function placeIn(which: Listing, cursor: string): string {
  const text = Buffer.from(cursor, 'base64url').toString()
  const name = nameOf(which)
  if (!text.startsWith(`${name} `)) throw new RangeError('another listing')
  return text.slice(name.length + 1)
}

function nameOf(which: Listing): string {
  return typeof which === 'string' ? which : which.beginning
}

async function look(
  ports: AdminPorts,
  id: RecordId,
  { states, route, age, deadLettered }: Filter,
): Promise<{ view: RecordView; now: Millis } | 'unreadable' | null> {
  try {
    const { record, now } = await ports.records.get(id)
    if (record === null) return null
    const view = recordView(id, record, now)
    if (view === null || (route !== null && view.route !== route)) return null
    if ((states !== null && !states.has(view.state)) || now - record.createdAt < age) return null
    const dead = record.state === 'unknown' && record.reconciliation?.deadLettered === true
    return deadLettered === null || dead === deadLettered ? { view, now } : null
  } catch (error) {
    if (error instanceof CorruptRecord) return 'unreadable'
    throw error
  }
}

function filterOf(query: URLSearchParams): Filter | string {
  const known = ['id', 'state', 'route', 'age', 'deadLettered', 'limit', 'cursor']
  for (const name of new Set(query.keys())) {
    if (!known.includes(name)) return `?${name}: unknown; known are ${known.join(', ')}`
    if (query.getAll(name).length > 1) return `?${name}: once at most`
  }
  const states = query.get('state')?.split(',') ?? null
  const isState = (word: string): word is State => (STATES as readonly string[]).includes(word)
  if (states !== null && !states.every(isState)) return `?state: a list of ${STATES.join(', ')}`
  const id = query.get('id')
  if (id !== null && !ID_BEGINNING.test(id))
    return '?id: the beginning of a record id, 8 to 43 characters of A-Z a-z 0-9 - _'
  const age = parseDuration(query.get('age') ?? '0')
  if (!age.ok) return '?age: a duration, such as 90s, 1h or 7d'
  const limit = query.get('limit') ?? String(PAGE)
  if (!/^\d{1,4}$/.test(limit) || Number(limit) < 1 || Number(limit) > MAX_PAGE)
    return `?limit: a whole number, 1 to ${MAX_PAGE}`
  const dead = query.get('deadLettered')
  if (dead !== null && dead !== 'true' && dead !== 'false') return '?deadLettered: true or false'
  return {
    id,
    states: states === null ? null : new Set(states.filter(isState)),
    route: query.get('route'),
    age: age.value,
    deadLettered: dead === null ? null : dead === 'true',
    limit: Number(limit),
    cursor: query.get('cursor'),
  }
}

/** GET /v1/records/{id} */
export async function show(ports: AdminPorts, { id }: AdminRequest): Promise<AdminAnswer> {
  return (await tell(ports, id as RecordId)) ?? notFound(id as RecordId)
}

/** POST /v1/records/lookup */
export async function lookUp(ports: AdminPorts, { body }: AdminRequest): Promise<AdminAnswer> {
  const lookup = read<Lookup>('Lookup', body)
  if (!lookup.ok) return problem('invalid_request', lookup.detail)
  const ids = ports.subjects.find(lookup.value)
  if (!ids.ok) return problem('invalid_request', ids.detail)
  for (const id of ids.value) {
    const found = await tell(ports, id)
    if (found !== null) return found
  }
  return notFound(ids.value[0] as RecordId)
}

async function tell(ports: AdminPorts, id: RecordId): Promise<AdminAnswer | null> {
  const [{ record, now }, notes] = await Promise.all([ports.records.get(id), notesOf(ports, id)])
  if (record === null) return null
  const { config, isConfigured = true } = ports
  const facts = isConfigured ? factsOf([...config.routes, config.defaults], record.route) : null
  const view = fullView(id, record, now, notes, facts)
  return view && ok(view, { etag: etag(view) })
}

/** Its history, as far as there is one. */
export async function notesOf({ store }: Pick<AdminPorts, 'store'>, id: RecordId): Promise<KeptNote[]> {
  try {
    return await store.history.read(id)
  } catch (error) {
    if (error instanceof CorruptRecord) return []
    throw error
  }
}

export function notFound(id: RecordId): AdminAnswer {
  return problem('record_not_found', 'no request has made it, or it has expired', { instance: id })
}
