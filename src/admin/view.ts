import {
  type CompletedResponse,
  type IdempotencyRecord,
  type Millis,
  type RecordId,
  readAt,
} from '../core/record.ts'
import type { KeptNote } from '../store/register.ts'
import { describeEvent, explainRecord, type RouteFacts } from './explain.ts'
import type { FullView, HistoryView, RecordView } from './schemas.ts'
import { isDuplicate } from './shadow-tally.ts'

const MASK = '***'
/** Header lines whose values are credentials. */
const CREDENTIAL =
  /^(?:set-cookie2?|(?:proxy-)?authorization|.*(?:token|secret|password|api-?key|session).*)$/i

/** A record as contract §12 shows it at `now`: neither its body nor a credential. Null: it is no longer there. */
export function recordView(id: RecordId, stored: IdempotencyRecord, now: Millis): RecordView | null {
  const record = readAt(stored, now)
  if (record === null) return null
  return {
    id,
    route: record.route,
    state: record.state,
    fence: record.fence,
    version: record.version,
    createdAt: time(record.createdAt),
    updatedAt: time(record.updatedAt),
    leaseUntil: stored.state === 'in_progress' ? time(stored.leaseUntil) : null,
    expiresAt: time(record.state === 'completed' ? record.expiresAt : record.dropAt),
    attempts: record.attempts,
    method: record.method,
    path: record.path,
    fingerprint: record.fingerprint.toString('base64url'),
    response: record.state === 'completed' ? responseView(record.result) : null,
    lastError: record.lastError,
  }
}

export function responseView(result: CompletedResponse): RecordView['response'] {
  if (!result.kept) {
    const headers = result.location === null ? [] : [['Location', result.location]]
    return { status: result.status, headers, size: null }
  }
  const { status, headers, body } = result.response
  return { status, headers: pairs(headers), size: body.length }
}

function pairs(lines: readonly string[]): string[][] {
  const all: string[][] = []
  for (let n = 0; n + 1 < lines.length; n += 2) {
    const name = lines[n] as string
    all.push([name, CREDENTIAL.test(name) ? MASK : (lines[n + 1] as string)])
  }
  return all
}

export function fullView(
  id: RecordId,
  stored: IdempotencyRecord,
  now: Millis,
  notes: readonly KeptNote[],
  facts: RouteFacts | null,
): FullView | null {
  const view = recordView(id, stored, now)
  if (view === null) return null
  const history = notes.flatMap(historyView)
  const reconciliation = reconciliationView(stored, now)
  const full = { ...view, reconciliation, shadowed: shadowedView(history), history }
  return { ...full, explanation: explainRecord(full, facts) }
}

function shadowedView(history: readonly HistoryView[]): FullView['shadowed'] {
  const lines = history.filter(({ event }) => event === 'shadowed')
  if (lines.length === 0) return null
  const count = (is: (verdict: unknown) => boolean): number =>
    lines.reduce((sum, { detail, count }) => sum + (is(detail['verdict']) ? count : 0), 0)
  return { duplicates: count(isDuplicate), misuse: count((verdict) => verdict === 'misuse') }
}

function reconciliationView(stored: IdempotencyRecord, now: Millis): FullView['reconciliation'] {
  const record = readAt(stored, now)
  if (record?.state !== 'unknown' || record.reconciliation === null) return null
  const { since, asked, deadLettered, answer } = record.reconciliation
  return { since: time(since), nextLookAt: time(record.nextLookAt), asked, deadLettered, answer }
}

/** A line that cannot be read is left out: what decides about a record does not hang on its history. */
function historyView({ tag, count, first, last, text }: KeptNote): HistoryView[] {
  const [event = ''] = tag.split(':', 1)
  try {
    const detail = JSON.parse(text) as HistoryView['detail']
    const said = describeEvent(event, detail)
    return [{ event, ...said, first: time(first), last: time(last), count, detail }]
  } catch (error) {
    if (error instanceof SyntaxError || error instanceof RangeError) return []
    throw error
  }
}

/** What `If-Match` must carry. */
export function etag({ version }: Pick<RecordView, 'version'>): string {
  return `"${version}"`
}

export function time(at: Millis): string {
  return new Date(at).toISOString()
}
