import { parseDuration } from '../config/units.ts'
import { type IdempotencyRecord, type Millis, type RecordId, readAt } from '../core/record.ts'
import { isPrevented } from '../protect/outcomes.ts'
import { CorruptRecord, type KeptNote } from '../store/register.ts'
import { type AdminAnswer, ok, problem } from './answers.ts'
import type { AdminPorts, AdminRequest, CounterSample } from './ports.ts'
import { notesOf } from './records.ts'
import {
  COUNTED,
  type CountedRow,
  PERIOD,
  type PeriodRow,
  type Report,
  UNKNOWN,
  type UnknownRow,
} from './report-schema.ts'
import { MAX_SAMPLE, Sample } from './sample.ts'
import { scanRecords } from './scan.ts'
import { isDuplicate, tallyOf } from './shadow-tally.ts'
import { time } from './view.ts'

const HOUR: Millis = 3_600_000
const DAY: Millis = 24 * HOUR

const REPLAYED = new Set(['replayed', 'waited'])

/** GET /v1/report */
export async function report(ports: AdminPorts, { query }: AdminRequest): Promise<AdminAnswer> {
  for (const name of new Set(query.keys())) {
    if (name !== 'since' && name !== 'sample')
      return problem('invalid_request', `?${name}: unknown; known are since and sample`)
    if (query.getAll(name).length > 1) return problem('invalid_request', `?${name}: once at most`)
  }
  const since = parseDuration(query.get('since') ?? '24h')
  if (!since.ok || since.value === 0)
    return problem('invalid_request', '?since: a duration of more than 0, such as 90m, 24h or 7d')
  const size = query.get('sample')
  if (size !== null && (!/^\d{1,4}$/.test(size) || Number(size) < 1 || Number(size) > MAX_SAMPLE))
    return problem('invalid_request', `?sample: a whole number, 1 to ${MAX_SAMPLE}`)
  if (size !== null && ports.recheck === undefined)
    return problem('invalid_request', '?sample: only a running proxy asks the upstream')
  const sample =
    size === null || ports.recheck === undefined ? null : new Sample(Number(size), ports.recheck, Math.random)
  return ok(await reportOf(ports, since.value, sample))
}

async function reportOf(ports: AdminPorts, span: Millis, sample: Sample | null): Promise<Report> {
  const now = await ports.store.ping()
  const from = now - span
  const period = new Map<string, PeriodRow>()
  const unknown = new Map<string, UnknownRow>()
  const unreadable = new Set<RecordId>()
  const look = (id: RecordId): Promise<IdempotencyRecord | null> => read(ports, id, unreadable)

  const waiting = await scanRecords(ports.store, 'unresolved', async (id) => {
    const record = await look(id)
    if (record !== null) countUnknown(rowOf(unknown, record.route, UNKNOWN), record, now)
  })
  const all = await scanRecords(ports.store, 'all', async (id) => {
    const record = await look(id)
    if (record === null || record.createdAt < from) return
    const notes = await notesOf(ports, id)
    countRecord(rowOf(period, record.route, PERIOD), record, notes)
    if (record.state === 'completed') sample?.show(id, record, now - record.createdAt)
  })
  return {
    since: time(from),
    now: time(now),
    looked: all.looked,
    complete: all.complete && waiting.complete,
    unreadable: unreadable.size,
    period: sorted(period),
    unknown: sorted(unknown).filter((row) => UNKNOWN.some((name) => row[name] > 0)),
    counted: ports.counters === undefined ? null : countedOf(await ports.counters()),
    asked: sample && (await sample.ask(ports.records)),
  }
}

/** As it reads now; null: it has gone, or cannot be read. */
async function read(
  { records }: AdminPorts,
  id: RecordId,
  unreadable: Set<RecordId>,
): Promise<IdempotencyRecord | null> {
  try {
    const { record, now } = await records.get(id)
    return record && readAt(record, now)
  } catch (error) {
    if (!(error instanceof CorruptRecord)) throw error
    unreadable.add(id)
    return null
  }
}

function rowOf<N extends string>(
  rows: Map<string, { route: string } & Record<N, number>>,
  route: string,
  names: readonly N[],
): Record<N, number> {
  let row = rows.get(route)
  if (row === undefined) {
    row = { route, ...zeros(names) }
    rows.set(route, row)
  }
  return row
}

function zeros<N extends string>(names: readonly N[]): Record<N, number> {
  return Object.fromEntries(names.map((name) => [name, 0])) as Record<N, number>
}

function sorted<Row extends { readonly route: string }>(rows: ReadonlyMap<string, Row>): Row[] {
  return [...rows.values()].toSorted((a, b) => (a.route < b.route ? -1 : 1))
}

function countUnknown(row: Omit<UnknownRow, 'route'>, record: IdempotencyRecord, now: Millis): void {
  if (record.state !== 'unknown') return
  const age = now - record.createdAt
  if (age < HOUR) row.under1h++
  else if (age < DAY) row.under1d++
  else if (age < 7 * DAY) row.under7d++
  else row.older++
  if (record.reconciliation?.deadLettered === true) row.deadLettered++
}

function countRecord(
  row: Omit<PeriodRow, 'route'>,
  record: IdempotencyRecord,
  notes: readonly KeptNote[],
): void {
  row.records++
  row.attempts += record.attempts
  switch (record.state) {
    case 'expired':
      row.expired++
      row.executed++
      break
    case 'completed':
      row.executed++
      break
    case 'failed_retryable':
      row.notExecuted++
      break
    case 'in_progress':
      row.running++
      break
    case 'unknown':
      row.unknown++
  }
  let lapses = 0
  for (const { tag, count } of notes) {
    const [event = '', of = ''] = tag.split(':', 2)
    if (REPLAYED.has(event)) row.replayed += count
    if (isPrevented(event)) row.prevented += count
    if (event === 'shadowed' && isDuplicate(of)) row.attempts += count
    if (event === 'misuse') row.misuse += count
    if (event === 'settled' && of === 'recovered') row.recovered += count
    if (event === 'settled' && of === 'stale') row.stale += count
    if (event === 'reconciled' && (of === 'completed' || of === 'retryable')) row.reconciled += count
    if (event === 'resolved') row.resolved += count
    if (event === 'lease_expired') lapses += count
  }
  // Nobody has written this one down yet.
  if (lapses === 0 && record.state === 'unknown' && record.leaseExpired) lapses = 1
  row.lapsed += lapses
}

/** Figures of a process, each with the counters that it is the sum of. */
const SUMS: Readonly<Record<(typeof COUNTED)[number], readonly (readonly [string, string?])[]>> = {
  executed: [['idempotency_requests_total', 'executed']],
  replayed: [
    ['idempotency_requests_total', 'replayed'],
    ['idempotency_requests_total', 'waited'],
  ],
  prevented: [['idempotency_duplicates_prevented_total']],
  misuse: [['idempotency_requests_total', 'misuse']],
  unknown: [['idempotency_completions_total', 'unknown']],
  lapsed: [['idempotency_lease_expired_total']],
  recovered: [['idempotency_completions_total', 'recovered']],
  stale: [['idempotency_completions_total', 'stale']],
  deadLettered: [['idempotency_reconcile_total', 'dead_lettered']],
  expiring: [['idempotency_unresolved_expiring_total']],
}

function countedOf({
  since,
  samples,
}: {
  readonly since: Millis
  readonly samples: readonly CounterSample[]
}): Report['counted'] {
  const rows = new Map<string, CountedRow>()
  for (const { name, labels, value } of samples) {
    const { route } = labels
    if (route === undefined) continue
    const of = labels['outcome'] ?? labels['result']
    for (const figure of COUNTED)
      if (SUMS[figure].some(([metric, wanted]) => metric === name && wanted === of))
        rowOf(rows, route, COUNTED)[figure] += value
  }
  return { since: time(since), routes: sorted(rows), shadow: tallyOf(samples).rows() }
}
