import { type Static, Type } from 'typebox'
import type { Config } from '../config/config.ts'
import { parseDuration } from '../config/units.ts'
import { asLabel } from '../core/label.ts'
import {
  type CompletedResponse,
  ID_BEGINNING,
  type IdempotencyRecord,
  type Millis,
  type RecordId,
  readAt,
  STATES,
  type State,
  UNRESOLVED,
} from '../core/record.ts'
import { policyNamed } from '../core/route.ts'
import { NOBODY, statusOf } from '../core/settle.ts'
import { orThrow, type Records } from '../store/records.ts'
import { CorruptRecord, type KeptNote, type Listing, type Prefix, type Store } from '../store/register.ts'
import type { AdminRoutes } from './app.ts'
import { describeEvent, explainRecord, factsOf } from './explain.ts'
import { lookup, type RecordLookup } from './lookup.ts'
import { AdminProblem, invalid } from './problems.ts'
import {
  type FullView,
  fullRecord,
  type HistoryView,
  object,
  oneRecord,
  type PageView,
  type RecordView,
  recordPage,
} from './schemas.ts'
import { isDuplicate } from './shadow-tally.ts'

const MASK = '***'
const CREDENTIAL =
  /^(?:set-cookie2?|(?:proxy-)?authorization|.*(?:token|secret|password|api-?key|session).*)$/i

/** A record as contract §12 shows it at `now`: no body, no credentials. Null: it is gone. */
export function recordView(id: RecordId, stored: IdempotencyRecord, now: Millis): RecordView | null {
  const record = readAt(stored, now)
  if (record === null) return null
  const { route, state, fence, version, attempts, method, path, lastError } = record
  return {
    id,
    route,
    state,
    fence,
    version,
    createdAt: time(record.createdAt),
    updatedAt: time(record.updatedAt),
    leaseUntil: stored.state === 'in_progress' ? time(stored.leaseUntil) : null,
    expiresAt: time(record.state === 'completed' ? record.expiresAt : record.dropAt),
    attempts,
    method,
    path,
    label: record.label ?? null,
    fingerprint: record.fingerprint.toString('base64url'),
    response: record.state === 'completed' ? responseView(record.result, record.expiresAt) : null,
    lastError,
    reconciliation: reconciliationView(record),
  }
}

export function responseView(result: CompletedResponse, expiresAt: Millis): RecordView['response'] {
  if (!result.kept) {
    const headers = result.location === null ? [] : [['Location', result.location]]
    return { status: result.status, headers, size: null, notKept: result.why, bodyUntil: null }
  }
  const bodyUntil = result.afterBody === undefined ? null : time(expiresAt - result.afterBody)
  const { status, headers: lines, body } = result.response
  const headers: string[][] = []
  for (let n = 0; n + 1 < lines.length; n += 2) {
    const name = lines[n] as string
    headers.push([name, CREDENTIAL.test(name) ? MASK : (lines[n + 1] as string)])
  }
  return { status, headers, size: body.length, notKept: null, bodyUntil }
}

function shadowedView(history: readonly HistoryView[]): FullView['shadowed'] {
  const entries = history.filter(({ event }) => event === 'shadowed')
  if (entries.length === 0) return null
  const count = (is: (verdict: unknown) => boolean): number =>
    entries.reduce((sum, { detail, count }) => sum + (is(detail['verdict']) ? count : 0), 0)
  return { duplicates: count(isDuplicate), misuse: count((verdict) => verdict === 'misuse') }
}

function reconciliationView(record: IdempotencyRecord): RecordView['reconciliation'] {
  if (record.state !== 'unknown' || record.reconciliation === null) return null
  const { since, asked, deadLettered, answer } = record.reconciliation
  return { since: time(since), nextLookAt: time(record.nextLookAt), asked, deadLettered, answer }
}

/** Unreadable entries are skipped: no decision depends on the history. */
function historyView({ tag, count, first, last, text }: KeptNote): HistoryView[] {
  const [event = ''] = tag.split(':', 1)
  try {
    const detail = JSON.parse(text) as HistoryView['detail']
    const described = describeEvent(event, detail)
    return [{ event, ...described, first: time(first), last: time(last), count, detail }]
  } catch (error) {
    if (error instanceof SyntaxError || error instanceof RangeError) return []
    throw error
  }
}

/** Events of a record's first execution and its outcome. */
const EXECUTION: ReadonlySet<string> = new Set(['claimed', 'executed', 'bypassed', 'settled', 'shadowed'])

/** What happened to a record, oldest first. A normal first execution has no entries: they follow from the record (docs/adr/0073). */
function historyOf(record: IdempotencyRecord, notes: readonly KeptNote[]): HistoryView[] {
  const entries = notes.flatMap(historyView)
  if (record.state !== 'completed' || record.attempts > 1 || record.token.equals(NOBODY)) return entries
  if (entries.some(({ event }) => EXECUTION.has(event))) return entries
  const { fence, createdAt: first, state: after, result } = record
  // The last write removed the response.
  const last = !result.kept && result.why === 'past_ttl' ? first : record.updatedAt
  const text = JSON.stringify({ fence, status: statusOf(result), before: 'absent', after })
  return [...historyView({ tag: `executed:${fence}`, count: 1, first, last, text }), ...entries]
}

export function etag({ version }: Pick<RecordView, 'version'>): string {
  return `"${version}"`
}

export function time(at: Millis): string {
  return new Date(at).toISOString()
}

/* One record. */

/** Only ids: `/v1/records/lookup` is another endpoint. */
export const ONE = '/v1/records/:id([A-Za-z0-9_-]{43})'
export const STORE = ['store_unavailable'] as const
export const STORED = [...STORE, 'record_unreadable', 'record_not_found'] as const

export function notFound(id: RecordId): AdminProblem {
  return new AdminProblem('record_not_found', 'no request has created it, or it has expired', {
    instance: id,
  })
}

/**
 * The record and the store's time.
 * @throws {AdminProblem} if it cannot be read, with the version at which it can be deleted.
 */
export async function readRecord(
  records: Pick<Records, 'get' | 'prefix'>,
  id: RecordId,
): Promise<{ readonly record: IdempotencyRecord | null; readonly now: Millis }> {
  const reply = await records.get(id)
  if (reply.kind !== 'corrupt') return orThrow(reply)
  const { prefix, now } = orThrow(await records.prefix(id))
  if (prefix === null) return { record: null, now }
  throw unreadable(id, reply.error, prefix)
}

export function unreadable(id: RecordId, why: CorruptRecord, { version, state }: Prefix): AdminProblem {
  const hint = state === null ? '' : `, whose first bytes say ${state}`
  return new AdminProblem('record_unreadable', `${why.message}${hint}; it is at version ${version}`, {
    instance: id,
    version,
    headers: { etag: etag({ version }) },
  })
}

export async function notesOf(store: Pick<Store, 'history'>, id: RecordId): Promise<KeptNote[]> {
  try {
    return await store.history.read(id)
  } catch (error) {
    if (error instanceof CorruptRecord) return []
    throw error
  }
}

/* Many records. */

/** Records held at once: each may carry a body of several MiB. */
const AT_ONCE = 8

/** Calls `look` for each id, a few at a time; keeps the order. */
async function inTurns<T>(ids: readonly RecordId[], look: (id: RecordId) => Promise<T>): Promise<T[]> {
  const all: T[] = []
  for (let at = 0; at < ids.length; at += AT_ONCE)
    all.push(...(await Promise.all(ids.slice(at, at + AT_ONCE).map(look))))
  return all
}

/** Bounds the time and the store's work of a scan. */
const MAX_SCANNED = 50_000
const SCAN_PAGE = 500

/** Calls `show` once per record; `complete` is false if it stopped before the last. */
export async function scanRecords(
  store: Pick<Store, 'list'>,
  which: Listing,
  show: (id: RecordId) => Promise<void>,
): Promise<{ readonly looked: number; readonly complete: boolean }> {
  const seen = new Set<RecordId>()
  let cursor: string | null = null
  for (;;) {
    const page = await store.list(which, cursor, SCAN_PAGE)
    const fresh = [...new Set(page.ids)].filter((id) => !seen.has(id))
    for (const id of fresh) seen.add(id)
    await inTurns(fresh, show)
    cursor = page.next
    if (cursor === null || seen.size >= MAX_SCANNED) return { looked: seen.size, complete: cursor === null }
  }
}

const MAX_PAGE = 1000
/** Records read for one page when few match the filter: bounds the response time. */
const MAX_LOOKED = 5000
/** The same if few ids match: pages requested, and ids per page after an empty one. */
const MAX_ASKED = 500
const MAX_STEP = 256
/** To find a prefix, a store may have to skip all other ids; until then its pages are empty. */
const SEARCH_STEP = 1000

const filter = object({
  id: Type.Optional(
    Type.String({
      pattern: ID_BEGINNING.source,
      description:
        'The beginning of a record id, 8 to 43 characters of A-Z a-z 0-9 - _, such as the 12 that logs show. A page may be empty and have a next one.',
    }),
  ),
  state: Type.Optional(Type.String({ description: 'Comma-separated states.' })),
  route: Type.Optional(Type.String({ description: 'Name of a route.' })),
  label: Type.Optional(Type.String({ description: '`record.label` of the request.' })),
  age: Type.Optional(Type.String({ description: 'Created at least this long ago, such as 1h.' })),
  deadLettered: Type.Optional(Type.Boolean({ description: 'Unknown, and all status queries are used up.' })),
  limit: Type.Optional(Type.Integer({ minimum: 1, maximum: MAX_PAGE, description: 'Default: 100.' })),
  cursor: Type.Optional(Type.String({ description: '`next` of the previous page.' })),
})

type Filter = ReturnType<typeof filterOf>

function filterOf({ state, route, label, age: text = '0', deadLettered }: Static<typeof filter>) {
  const states = state?.split(',') ?? null
  const isState = (word: string): word is State => (STATES as readonly string[]).includes(word)
  if (states !== null && !states.every(isState)) throw invalid(`?state: a list of ${STATES.join(', ')}`)
  const age = parseDuration(text)
  if (!age.ok) throw invalid('?age: a duration, such as 90s, 1h or 7d')
  return {
    states: states && new Set(states.filter(isState)),
    route,
    label: label && asLabel(label),
    age: age.value,
    deadLettered,
  }
}

function listingOf(id: string | undefined, { states, deadLettered }: Filter): Listing {
  if (id !== undefined) return { beginning: id }
  const isIndexed =
    deadLettered === true || (states !== null && [...states].every((one) => UNRESOLVED.includes(one)))
  return isIndexed ? 'unresolved' : 'all'
}

async function pageOf(
  { records, store }: Pick<RecordPorts, 'records' | 'store'>,
  query: Static<typeof filter>,
): Promise<PageView> {
  const { id, limit = 100 } = query
  const wanted = filterOf(query)
  const which = listingOf(id, wanted)
  const name = typeof which === 'string' ? which : which.beginning
  const foreign = () => invalid('?cursor: not the `next` of a page with this filter')
  let cursor: string | null = null
  if (query.cursor !== undefined) {
    const text = Buffer.from(query.cursor, 'base64url').toString()
    if (!text.startsWith(`${name} `)) throw foreign()
    cursor = text.slice(name.length + 1)
  }
  let now = await store.ping()
  const found: RecordView[] = []
  const unreadable: RecordId[] = []
  const seen = new Set<RecordId>()
  const look = async (id: RecordId): Promise<RecordView | 'unreadable' | null> => {
    const reply = await records.get(id)
    if (reply.kind === 'corrupt') return 'unreadable'
    const { record, now: readAt } = orThrow(reply)
    now = readAt
    return record && matching(id, record, readAt, wanted)
  }
  let step = id === undefined ? limit : SEARCH_STEP
  for (let asked = 1; ; asked++) {
    const page = await store.list(which, cursor, step).catch((error: unknown) => {
      throw error instanceof RangeError ? foreign() : error
    })
    const before = found.length
    const fresh = page.ids.filter((id) => !seen.has(id))
    for (const id of fresh) seen.add(id)
    for (const [n, view] of (await inTurns(fresh, look)).entries()) {
      if (view === 'unreadable') unreadable.push(fresh[n] as RecordId)
      else if (view !== null) found.push(view)
    }
    cursor = page.next
    if (cursor === null || found.length >= limit) break
    if (seen.size >= MAX_LOOKED || asked >= MAX_ASKED) break
    if (id !== undefined) continue
    step = found.length > before ? limit - found.length : Math.min(2 * step, MAX_STEP)
  }
  const next = cursor === null ? null : Buffer.from(`${name} ${cursor}`).toString('base64url')
  return { records: found, unreadable, next, now: time(now) }
}

function matching(id: RecordId, record: IdempotencyRecord, now: Millis, wanted: Filter): RecordView | null {
  const { states, route, label, age, deadLettered } = wanted
  const view = recordView(id, record, now)
  if (view === null || (route !== undefined && view.route !== route)) return null
  if (label !== undefined && view.label !== label) return null
  if ((states !== null && !states.has(view.state)) || now - record.createdAt < age) return null
  const isDead = record.state === 'unknown' && record.reconciliation?.deadLettered === true
  return deadLettered === undefined || isDead === deadLettered ? view : null
}

export interface RecordPorts {
  readonly config: Config
  /** False: `config` is all defaults, so the routes are unknown. */
  readonly isConfigured?: boolean
  readonly records: Pick<Records, 'get' | 'prefix'>
  readonly store: Pick<Store, 'list' | 'ping' | 'history'>
  readonly subjects: RecordLookup
}

export const recordRoutes: AdminRoutes<RecordPorts> = async (app, { ports }) => {
  const full = async (id: RecordId): Promise<FullView | null> => {
    const [{ record, now }, notes] = await Promise.all([
      readRecord(ports.records, id),
      notesOf(ports.store, id),
    ])
    const view = record && recordView(id, record, now)
    if (record === null || view === null) return null
    const { config, isConfigured = true } = ports
    const facts = isConfigured ? factsOf(policyNamed(config, view.route)) : null
    const history = historyOf(record, notes)
    const full = { ...view, shadowed: shadowedView(history), history }
    return { ...full, explanation: explainRecord(full, facts) }
  }

  app.get(
    '/v1/records',
    {
      schema: {
        summary:
          'Records, page by page. With only in_progress and unknown: longest due first; otherwise unordered. A page may hold fewer than `limit` although there is a next one, or slightly more.',
        querystring: filter,
        response: { 200: recordPage },
      },
      config: { refuses: ['invalid_request', ...STORE] },
    },
    async ({ query }) => pageOf(ports, query),
  )

  app.get(
    ONE,
    {
      schema: { summary: 'A record and its history.', params: oneRecord, response: { 200: fullRecord } },
      config: { hasETag: true, refuses: STORED },
    },
    async ({ params: { id } }, reply) => {
      const view = await full(id)
      if (view === null) throw notFound(id)
      return reply.header('etag', etag(view)).send(view)
    },
  )

  app.post(
    '/v1/records/lookup',
    {
      schema: {
        summary: 'The record that a request with this key, of this caller, would find.',
        body: lookup,
        response: { 200: fullRecord },
      },
      config: { hasETag: true, refuses: ['invalid_request', ...STORED] },
    },
    async ({ body }, reply) => {
      const ids = ports.subjects.find(body)
      for (const id of ids) {
        const view = await full(id)
        if (view !== null) return reply.header('etag', etag(view)).send(view)
      }
      throw notFound(ids[0] as RecordId)
    },
  )
}
