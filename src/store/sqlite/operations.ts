import { hash } from 'node:crypto'
import type { DatabaseSync, StatementSync } from 'node:sqlite'
import { type Millis, type RecordId, type State, UNRESOLVED } from '../../core/record.ts'
import { readU48 } from '../record/binary.ts'
import {
  BODIES_FROM,
  indexPlace,
  mayRenew,
  meets,
  nextStamps,
  PREFIX,
  placesDue,
  prolongLease,
  readStamps,
  type Stamps,
  stamp,
} from '../record/codec.ts'
import { versionOf } from '../record/prefix.ts'
import { type Condition, type DuePosition, inOrder } from '../register.ts'
import { type Bucket, drawFromBucket, fullAt, noted } from '../side-ports.ts'
import { Journal } from './journal.ts'
import { bufferOf, type ThreadOperations, type WriteResult } from './messages.ts'

/** Part of an id in {@link keysOf}. */
const KEY_CHARACTERS = 5
/** By then a running process of another service has removed its own expired records. */
const OTHERS_AFTER: Millis = 60_000

const SQL = {
  select: 'SELECT bytes FROM records WHERE key = ? AND service = ? AND id = ? AND drop_at > ?',
  insert:
    'INSERT INTO records (unresolved, due, drop_at, bytes, key, service, id) VALUES (?, ?, ?, ?, ?, ?, ?)',
  update:
    'UPDATE records SET unresolved = ?, due = ?, drop_at = ?, bytes = ? WHERE key = ? AND service = ? AND id = ?',
  isThere: 'SELECT 1 FROM records WHERE key = ? LIMIT 1',
  erase: 'DELETE FROM records WHERE key = ? AND service = ? AND id = ?',
  overdue: `SELECT due, id FROM records WHERE service = ? AND unresolved = 1 AND due BETWEEN ? AND ? AND drop_at > ?
     ORDER BY due, id LIMIT ?`,
  // Skips records that are in the journal again, since their history would be removed, too. Includes other services, whose processes may
  // not be running.
  prune: `DELETE FROM records WHERE rowid IN (SELECT rowid FROM records WHERE drop_at <= ?
     AND CASE service WHEN ? THEN NOT in_journal(id) ELSE drop_at <= ? END LIMIT ?)`,
  selectIds: `SELECT due, id FROM records WHERE key BETWEEN ? AND ? AND service = ? AND id > ? AND id >= ? AND id < ? AND drop_at > ?
     ORDER BY key, id LIMIT ?`,
  selectPlaces: `SELECT due, id FROM records WHERE service = ? AND unresolved = 1 AND (due, id) > (?, ?) AND due < ${BODIES_FROM} AND drop_at > ?
     ORDER BY due, id LIMIT ?`,
  selectNotes: 'SELECT lines FROM notes WHERE service = ? AND id = ? AND created_at = ?',
  keepNotes: 'INSERT OR REPLACE INTO notes (service, id, created_at, lines) VALUES (?, ?, ?, ?)',
  eraseNotes: 'DELETE FROM notes WHERE service = ? AND id = ?',
  selectBucket: 'SELECT at, debt, count FROM buckets WHERE service = ? AND id = ?',
  keepBucket:
    'INSERT OR REPLACE INTO buckets (service, id, at, debt, count, full_at) VALUES (?, ?, ?, ?, ?, ?)',
  dropBucket: 'DELETE FROM buckets WHERE service = ? AND id = ?',
  pruneBuckets:
    'DELETE FROM buckets WHERE (service, id) IN (SELECT service, id FROM buckets WHERE full_at <= ? LIMIT ?)',
} as const

/** The operations of one service on its journal and the tables, within the caller's transaction. */
export class Operations implements ThreadOperations {
  readonly journal: Journal
  readonly #service: string
  readonly #now: () => Millis
  readonly #sql: Readonly<Record<keyof typeof SQL, StatementSync>>
  readonly #keyOf: (id: string, rest?: string) => number

  constructor(db: DatabaseSync, service: string, now: () => Millis) {
    this.journal = new Journal(db, service)
    this.#service = service
    this.#now = now
    this.#keyOf = keysOf(service)
    db.function('in_journal', (id) => (this.journal.has(id as string) ? 1 : 0))
    const prepared = Object.entries(SQL).map(([name, sql]) => [name, db.prepare(sql)])
    this.#sql = Object.fromEntries(prepared) as Record<keyof typeof SQL, StatementSync>
    this.#sql.select.setReturnArrays(true)
  }

  readonly put: ThreadOperations['put'] = (id, given, dueIn, dropIn) => {
    const at = this.#now()
    const existing = this.#read(id, at)
    if (existing !== null) return [at, existing]
    // A copy: if the transaction fails and the record is stamped twice, it would keep the first try's instant.
    const bytes = Buffer.from(given)
    const stamps = nextStamps(bytes, null, at, { dueIn, dropIn }, false)
    stamp(bytes, stamps)
    this.#write(id, bytes, stamps)
    return written(at, stamps)
  }

  readonly swap: ThreadOperations['swap'] = (id, given, dueIn, dropIn, nextFence, token, of) => {
    const at = this.#now()
    const bytes = bufferOf(given)
    const existing = this.#read(id, at)
    if (existing === null) return [at, null]
    if (!meets(existing, conditionOf(token, of))) return [at, existing]
    const stamps = nextStamps(bytes, readStamps(existing), at, { dueIn, dropIn }, nextFence)
    stamp(bytes, stamps)
    this.#write(id, bytes, stamps)
    return written(at, stamps)
  }

  readonly get: ThreadOperations['get'] = (id) => {
    const at = this.#now()
    return [at, this.#read(id, at)]
  }

  readonly renew: ThreadOperations['renew'] = (items) => {
    const at = this.#now()
    return items.map(({ id, token, ...spans }) => {
      const existing = this.#read(id, at)
      if (existing === null || !mayRenew(existing, bytesOf(token))) return false
      const bytes = Buffer.from(existing)
      this.#write(id, bytes, prolongLease(bytes, at, spans))
      return true
    })
  }

  readonly due: ThreadOperations['due'] = (limit, of) => {
    const at = this.#now()
    const { from, to } = placesDue(of, at)
    const places = this.#placesOf(
      (most) => this.#sql.overdue.iterate(this.#service, from, to, at, most),
      of === 'bodies' ? ['completed'] : UNRESOLVED,
      indexPlace,
      ({ due }) => due <= to,
      inOrder,
      limit,
    )
    return places.map(({ id }) => id as RecordId)
  }

  readonly remove: ThreadOperations['remove'] = (id, version) => {
    const existing = this.#read(id, this.#now())
    if (existing === null || versionOf(existing) !== version) return false
    this.journal.remove(id)
    this.#erase(id)
    return true
  }

  readonly list: ThreadOperations['list'] = (beginning, after, limit) => {
    // No character of an id sorts after ~.
    const end = `${beginning}~`
    const from = this.#keyOf(after > beginning ? after : beginning)
    const places = this.#placesOf(
      (most) =>
        this.#sql.selectIds.iterate(
          from,
          this.#keyOf(end, '~'),
          this.#service,
          after,
          beginning,
          end,
          this.#now(),
          most,
        ),
      undefined,
      (_, due) => due,
      ({ id }) => id > after && id >= beginning && id < end,
      (a, b) => (a.id < b.id ? -1 : 1),
      limit,
    )
    return places.map(({ id }) => id as RecordId)
  }

  readonly unresolved: ThreadOperations['unresolved'] = (after, limit) =>
    this.#placesOf(
      (most) => this.#sql.selectPlaces.iterate(this.#service, after.due, after.id, this.#now(), most),
      UNRESOLVED,
      indexPlace,
      (place) => inOrder(place, after) > 0,
      inOrder,
      limit,
    )

  readonly note: ThreadOperations['note'] = (id, notes) => {
    const at = this.#now()
    const history = this.#historyOf(id, at)
    if (history === null) return false
    this.#sql.keepNotes.run(this.#service, id, history.createdAt, noted(history.kept, notes, at).join('\n'))
    return true
  }

  readonly notes: ThreadOperations['notes'] = (id) => this.#historyOf(id, this.#now())?.kept ?? []

  readonly throttle: ThreadOperations['throttle'] = (id, rate, units) => {
    const existing = (this.#sql.selectBucket.get(this.#service, id) as Bucket | undefined) ?? null
    const { wait, bucket } = drawFromBucket(existing, this.#now(), rate, units)
    if (bucket === null) this.#sql.dropBucket.run(this.#service, id)
    else if (bucket !== existing)
      this.#sql.keepBucket.run(this.#service, id, bucket.at, bucket.debt, bucket.count, fullAt(bucket))
    return wait
  }

  readonly ping: ThreadOperations['ping'] = () => this.#now()

  /** Copies records from the journal to the table; expired ones are dropped, and counted. */
  settleDown(records: Iterable<readonly [id: string, bytes: Buffer]>): number {
    const at = this.#now()
    let expired = 0
    for (const [id, bytes] of records) {
      const [due, dropAt] = [readU48(bytes, PREFIX.due), readU48(bytes, PREFIX.dropAt)]
      if (dropAt > at) this.#keep(id, bytes, { due, dropAt })
      else {
        this.#erase(id)
        expired++
      }
    }
    return expired
  }

  /** Removes expired rows, at most so many of each table; returns how many. */
  prune(limit: number): { readonly records: number; readonly buckets: number } {
    const at = this.#now()
    const buckets = Number(this.#sql.pruneBuckets.run(at, limit).changes)
    const records = Number(this.#sql.prune.run(at, this.#service, at - OTHERS_AFTER, limit).changes)
    return { records, buckets }
  }

  /** The record, in the same form as from {@link Journal.get}. */
  #read(id: string, at: Millis): Buffer | null {
    const newest = this.journal.get(id)
    if (newest !== undefined) return readU48(newest, PREFIX.dropAt) > at ? newest : null
    const key = this.#keyOf(id)
    if (this.#sql.isThere.get(key) === undefined) return null
    const found = this.#sql.select.get(key, this.#service, id, at) as unknown as
      | [bytes: Uint8Array]
      | undefined
    return found === undefined ? null : bufferOf(found[0])
  }

  #write(id: string, bytes: Buffer, stamps: Stamps): void {
    if (this.journal.set(id, bytes)) return
    this.journal.remove(id)
    this.#keep(id, bytes, stamps)
  }

  /** Writes to the table. A lookup instead of a unique index: an index of short numbers is a quarter of the size. */
  #keep(id: string, bytes: Buffer, { due, dropAt }: Pick<Stamps, 'due' | 'dropAt'>): void {
    const key = this.#keyOf(id)
    const place = indexPlace(bytes, due)
    const row = [place === null ? 0 : 1, place ?? due, dropAt, bytes, key, this.#service, id] as const
    if (this.#sql.isThere.get(key) === undefined || this.#sql.update.run(...row).changes === 0)
      this.#sql.insert.run(...row)
  }

  /** Removes the record from the table, with its history. */
  #erase(id: string): void {
    this.#sql.erase.run(this.#keyOf(id), this.#service, id)
    this.#sql.eraseNotes.run(this.#service, id)
  }

  /**
   * The first places, in order, among those found in the table by `rows` and those in the journal that are in these states and `wanted`.
   * The states alone distinguish unresolved records from completed ones, whose places follow.
   */
  #placesOf(
    rows: (limit: number) => Iterable<unknown>,
    states: readonly State[] | undefined,
    placeOf: (bytes: Buffer, due: Millis) => number | null,
    wanted: (place: DuePosition) => boolean,
    order: (a: DuePosition, b: DuePosition) => number,
    limit: number,
  ): DuePosition[] {
    const at = this.#now()
    const places: DuePosition[] = []
    for (const place of rows(limit + this.journal.size) as Iterable<DuePosition>) {
      if (!this.journal.has(place.id)) places.push(place)
      if (places.length === limit) break
    }
    for (const [id, bytes] of this.journal.records(states)) {
      const due = placeOf(bytes, readU48(bytes, PREFIX.due))
      if (due !== null && wanted({ due, id }) && readU48(bytes, PREFIX.dropAt) > at) places.push({ due, id })
    }
    return places.sort(order).slice(0, limit)
  }

  /** The history of this record, not of an earlier one under the same id. */
  #historyOf(id: string, at: Millis): { createdAt: Millis; kept: string[] } | null {
    const existing = this.#read(id, at)
    // Anything shorter is not a record and has no history.
    if (existing === null || existing.length < PREFIX.end) return null
    const { createdAt } = readStamps(existing)
    const row = this.#sql.selectNotes.get(this.#service, id, createdAt) as { lines: string } | undefined
    return { createdAt, kept: row === undefined ? [] : row.lines.split('\n') }
  }
}

/**
 * Computes the numbers of `records_key`: 12 bits of the service, whose records lie together, and the first five characters of the id, in
 * the order of ids; missing ones are `rest`.
 */
function keysOf(service: string): (id: string, rest?: string) => number {
  const place = Number.parseInt(hash('sha256', service, 'hex').slice(0, 3), 16)
  return (id, rest = '\0') => {
    let key = place
    for (let n = 0; n < KEY_CHARACTERS; n++)
      key = key * 128 + (n < id.length ? id : rest).charCodeAt(n < id.length ? n : 0)
    return key
  }
}

function written(now: Millis, { version, fence, createdAt }: Stamps): WriteResult {
  return [now, version, fence, createdAt]
}

function conditionOf(token: string, of: string | number): Condition {
  return typeof of === 'number'
    ? { version: of }
    : { token: bytesOf(token), states: of.split(' ') as State[] }
}

function bytesOf(token: string): Buffer {
  return Buffer.from(token, 'latin1')
}
