import { type Static, type TProperties, Type } from 'typebox'
import { parseDuration } from '../config/units.ts'
import type { Verification } from '../core/reconcile/verify.ts'
import { type Completed, type IdempotencyRecord, type Millis, type RecordId, readAt } from '../core/record.ts'
import { isPrevented } from '../protect/outcomes.ts'
import { orThrow, type Records } from '../store/records.ts'
import type { KeptNote, Store } from '../store/register.ts'
import type { AdminRoutes } from './app.ts'
import { invalid } from './problems.ts'
import { notesOf, scanRecords, time } from './records.ts'
import { count, described, named, nullable, object, timestamp } from './schemas.ts'
import { type CounterSample, isDuplicate, RouteTable, shadowRow, tallyOf, zeros } from './shadow-tally.ts'

const route = Type.String({ description: 'Name of the route.' })
const byRoute = <P extends TProperties>(figures: P, description?: string) =>
  Type.Array(object({ route, ...figures }), description === undefined ? {} : { description })

const figures = {
  records: count('Keys that were used for the first time.'),
  executed: count('Of these: executed.'),
  expired: count('Of the executed: no longer kept; only a tombstone is left.'),
  notExecuted: count('Of these: not executed; a retry executes.'),
  running: count('Of these: still running.'),
  unknown: count('Of these: the outcome is unknown.'),
  attempts: count(
    'How often they were sent upstream, including the duplicates in shadow mode that the histories list.',
  ),
  replayed: count('Retries that got the stored response.'),
  prevented: count('Retries that were not executed, these included.'),
  misuse: count('Requests refused because their key was first used for a different request.'),
  lapsed: count('Leases that expired.'),
  recovered: count('Outcomes written again because the record was gone.'),
  stale: count('Late outcomes that were refused.'),
  reconciled: count('Unknown outcomes that a status query settled.'),
  resolved: count('Unknown outcomes that an operator or a report resolved.'),
}

const unknown = {
  under1h: count('Created less than an hour ago.'),
  under1d: count('Created less than a day ago.'),
  under7d: count('Created less than seven days ago.'),
  older: count('Older.'),
  deadLettered: count('Of these: dead-lettered; an operator has to decide.'),
}

const counted = {
  executed: count('Requests that were executed.'),
  replayed: figures.replayed,
  prevented: figures.prevented,
  misuse: figures.misuse,
  unknown: count('Outcomes that were recorded as unknown.'),
  lapsed: figures.lapsed,
  recovered: figures.recovered,
  stale: figures.stale,
  deadLettered: count('Unknown records that an operator has to decide about.'),
  expiring: count('Unknown records that are about to be dropped unresolved.'),
}

const asked = {
  eligible: count('Completed records of the period that the upstream can be asked about.'),
  sampled: count('Of these: chosen at random for the check.'),
  agreed: count('Of the sampled: the upstream agrees with the record.'),
  differing: count('Of the sampled: executed, but with a different response than the stored one.'),
  disagreed: count('Of the sampled: not executed, the opposite outcome, or another operation’s.'),
  undecided: count('Of the sampled: the answer was inconclusive.'),
  notAsked: count('Of the sampled: could not be asked.'),
}

/** What happened, by route. Four tables with four different scopes: never add figures across them. */
export const reportSchema = named('Report', {
  since: timestamp('Start of the period.'),
  now: timestamp('The store’s time.'),
  looked: count('Records read.'),
  complete: Type.Boolean({
    description: 'False: there are more records than one report reads, so the figures are too low.',
  }),
  unreadable: count('Records that this version cannot read.'),
  period: byRoute(figures, 'From the records created in the period that still exist, and their histories.'),
  unknown: byRoute(unknown, 'Records whose outcome is unknown now, regardless of the period, by age.'),
  counted: nullable(
    described('Counters of this process since it started; null: no proxy was asked.', {
      since: timestamp('When the process started.'),
      routes: byRoute(counted),
      shadow: Type.Array(shadowRow, {
        description: 'For routes in shadow mode: what enforce would have done.',
      }),
    }),
  ),
  asked: nullable(
    described(
      'Result of checking a sample of completed records with the upstream; null: no `sample` was requested.',
      {
        routes: byRoute(asked),
        found: Type.Array(
          object({
            id: Type.String({ description: 'Record id.' }),
            route,
            verdict: Type.Unsafe<'disagrees' | 'differs'>({ type: 'string', enum: ['disagrees', 'differs'] }),
            why: Type.String({ description: 'Statuses and JSON pointers; no content of a body.' }),
          }),
          { description: 'Sampled records that do not agree, worst first.' },
        ),
      },
    ),
  ),
})

export type Report = Static<typeof reportSchema>

/** Figures by name, in table order. */
export const PERIOD = Object.keys(figures) as (keyof typeof figures)[]
export const UNKNOWN = Object.keys(unknown) as (keyof typeof unknown)[]
export const ASKED = Object.keys(asked) as (keyof typeof asked)[]
export const COUNTED = Object.keys(counted) as (keyof typeof counted)[]

export interface RecheckPort {
  /** Minimum age of a record of the route for a status query; null: none can be sent. */
  readonly from: (route: string) => Millis | null
  readonly ask: (id: RecordId, record: Completed) => Promise<Verification>
}

/** What this process has counted since it started. */
interface Counters {
  readonly since: Millis
  readonly samples: readonly CounterSample[]
}

export interface ReportPorts {
  readonly records: Pick<Records, 'get'>
  readonly store: Pick<Store, 'list' | 'ping' | 'history'>
  /** Absent: the report covers the store alone. */
  readonly counters?: () => Promise<Counters>
  /** Absent: no upstream is known here, so none is asked. */
  readonly recheck?: RecheckPort
}

const MAX_SAMPLE = 1000

const query = object({
  since: Type.Optional(
    Type.String({ description: 'Length of the period up to now, such as 7d. Default: 24h.' }),
  ),
  sample: Type.Optional(
    Type.Integer({
      minimum: 1,
      maximum: MAX_SAMPLE,
      description:
        'How many random completed records of the period to check with the upstream; only on routes with `reconcile`.',
    }),
  ),
})

export const reportRoutes: AdminRoutes<ReportPorts> = async (app, { ports }) => {
  app.get(
    '/v1/report',
    {
      schema: {
        summary:
          'What was executed, replayed and prevented, and what is unknown. Reads all records, one by one.',
        querystring: query,
        response: { 200: reportSchema },
      },
      config: { refuses: ['invalid_request', 'store_unavailable'] },
    },
    async ({ query: { since = '24h', sample } }) => {
      const span = parseDuration(since)
      if (!span.ok || span.value === 0)
        throw invalid('?since: a duration of more than 0, such as 90m, 24h or 7d')
      if (sample === undefined) return reportOf(ports, span.value, null)
      if (ports.recheck === undefined) throw invalid('?sample: only a running proxy asks the upstream')
      return reportOf(ports, span.value, new RecheckSample(sample, ports.recheck))
    },
  )
}

const HOUR: Millis = 3_600_000
const DAY: Millis = 24 * HOUR
const REPLAYED = new Set(['replayed', 'waited'])

async function reportOf(ports: ReportPorts, span: Millis, sample: RecheckSample | null): Promise<Report> {
  const now = await ports.store.ping()
  const from = now - span
  const period = new RouteTable(() => zeros(PERIOD))
  const unknown = new RouteTable(() => zeros(UNKNOWN))
  const unreadable = new Set<RecordId>()
  const look = (id: RecordId) => read(ports.records, id, () => unreadable.add(id))

  const waiting = await scanRecords(ports.store, 'unresolved', async (id) => {
    const record = await look(id)
    if (record !== null) countUnknown(unknown.row(record.route), record, now)
  })
  const all = await scanRecords(ports.store, 'all', async (id) => {
    const record = await look(id)
    if (record === null || record.createdAt < from) return
    const notes = await notesOf(ports.store, id)
    countRecord(period.row(record.route), record, notes)
    if (record.state === 'completed') sample?.show(id, record, now - record.createdAt)
  })
  return {
    since: time(from),
    now: time(now),
    looked: all.looked,
    complete: all.complete && waiting.complete,
    unreadable: unreadable.size,
    period: period.rows(),
    unknown: unknown.rows().filter((row) => UNKNOWN.some((name) => row[name] > 0)),
    counted: ports.counters === undefined ? null : countedOf(await ports.counters()),
    asked: sample && (await sample.ask(ports.records)),
  }
}

/** Null: it is gone, or cannot be read. */
async function read(
  records: ReportPorts['records'],
  id: RecordId,
  onCorrupt = (): void => {},
): Promise<IdempotencyRecord | null> {
  const reply = await records.get(id)
  if (reply.kind === 'corrupt') {
    onCorrupt()
    return null
  }
  const { record, now } = orThrow(reply)
  return record && readAt(record, now)
}

function countUnknown(
  row: Record<(typeof UNKNOWN)[number], number>,
  record: IdempotencyRecord,
  now: Millis,
): void {
  if (record.state !== 'unknown') return
  const age = now - record.createdAt
  if (age < HOUR) row.under1h++
  else if (age < DAY) row.under1d++
  else if (age < 7 * DAY) row.under7d++
  else row.older++
  if (record.reconciliation?.deadLettered === true) row.deadLettered++
}

function countRecord(
  row: Record<(typeof PERIOD)[number], number>,
  record: IdempotencyRecord,
  notes: readonly KeptNote[],
): void {
  row.records++
  row.attempts += record.attempts
  if (record.state === 'completed' || record.state === 'expired') row.executed++
  if (record.state === 'expired') row.expired++
  if (record.state === 'failed_retryable') row.notExecuted++
  if (record.state === 'in_progress') row.running++
  if (record.state === 'unknown') row.unknown++
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
  // Its lease has expired, but no sweep has recorded that yet.
  if (lapses === 0 && record.state === 'unknown' && record.leaseExpired) lapses = 1
  row.lapsed += lapses
}

/** Figures of a process, each with the counters it sums up. */
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

function countedOf({ since, samples }: Counters): Report['counted'] {
  const table = new RouteTable(() => zeros(COUNTED))
  for (const { name, labels, value } of samples) {
    const { route } = labels
    if (route === undefined) continue
    const of = labels['outcome'] ?? labels['result']
    for (const figure of COUNTED)
      if (SUMS[figure].some(([metric, wanted]) => metric === name && wanted === of))
        table.row(route)[figure] += value
  }
  return { since: time(since), routes: table.rows(), shadow: tallyOf(samples).rows() }
}

/** Concurrent status queries: the upstream has other work. */
const AT_ONCE = 4
/** No status query begins later than that. */
const BEGIN_WITHIN: Millis = 20_000

const FIGURE = {
  agrees: 'agreed',
  differs: 'differing',
  disagrees: 'disagreed',
  undecided: 'undecided',
  not_asked: 'notAsked',
} as const satisfies Record<Verification['kind'], (typeof ASKED)[number]>

/** Rechecks a uniform random sample of the completed records passed to it. */
class RecheckSample {
  readonly #size: number
  readonly #recheck: RecheckPort
  readonly #table = new RouteTable(() => zeros(ASKED))
  readonly #ids: RecordId[] = []
  #shown = 0

  constructor(size: number, recheck: RecheckPort) {
    this.#size = size
    this.#recheck = recheck
  }

  /** `age`: since the record was created. */
  show(id: RecordId, { route }: Completed, age: Millis): void {
    const from = this.#recheck.from(route)
    if (from === null || age < from) return
    this.#table.row(route).eligible++
    this.#shown++
    if (this.#ids.length < this.#size) this.#ids.push(id)
    else {
      const at = Math.floor(Math.random() * this.#shown)
      if (at < this.#size) this.#ids[at] = id
    }
  }

  /** @throws {StoreUnavailable} */
  async ask(records: ReportPorts['records']): Promise<NonNullable<Report['asked']>> {
    const found: NonNullable<Report['asked']>['found'] = []
    const until = performance.now() + BEGIN_WITHIN
    const left = [...this.#ids]
    const work = async (): Promise<void> => {
      for (let id = left.pop(); id !== undefined; id = left.pop()) {
        const record = await read(records, id)
        // Deleted or expired meanwhile.
        if (record?.state !== 'completed') continue
        const rechecked: Verification =
          performance.now() < until
            ? await this.#recheck.ask(id, record)
            : { kind: 'not_asked', why: 'the report ran out of time' }
        const row = this.#table.row(record.route)
        row.sampled++
        row[FIGURE[rechecked.kind]]++
        if (rechecked.kind === 'disagrees' || rechecked.kind === 'differs')
          found.push({ id, route: record.route, verdict: rechecked.kind, why: rechecked.why })
      }
    }
    await Promise.all(Array.from({ length: AT_ONCE }, work))
    return {
      routes: this.#table.rows(),
      // Worst first.
      found: found.toSorted((a, b) => b.verdict.localeCompare(a.verdict) || (a.id < b.id ? -1 : 1)),
    }
  }
}
