import { hash } from 'node:crypto'
import type { DatabaseSync } from 'node:sqlite'
import { parentPort, receiveMessageOnPort, workerData } from 'node:worker_threads'
import { type Millis, type RecordId, type State, UNRESOLVED } from '../core/record.ts'
import { readU48 } from './binary.ts'
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
} from './codec.ts'
import { versionOf } from './prefix.ts'
import { type Condition, type DuePosition, inOrder } from './register.ts'
import { type Bucket, drawFromBucket, fullAt, noted } from './side-ports.ts'
import { failureOf, type Message, type WorkerOptions } from './sqlite.ts'
import { openPatiently } from './sqlite-file.ts'
import { Journal } from './sqlite-journal.ts'
import {
  type Packed,
  pack,
  type Request,
  type ThreadOperations,
  unpack,
  type WriteResult,
} from './sqlite-messages.ts'

/* Runs SQLite off the event loop. Operations that arrive together are one transaction with one fsync, and are answered after it. */

/** Limits how long a batch holds the lock that other processes wait for. */
const BATCH = 256
/**
 * After this many records (eight thousand first executions) or bytes, the journal is moved to the table: the more at once, the more of them
 * share a page of its index.
 */
const JOURNAL_ENTRIES = 16_000
const JOURNAL_BYTES = 8 * 1024 * 1024
/** Records per transaction of a move, some milliseconds: other operations wait no longer than that, unless they pile up. */
const SLICE = 500
/** Part of an id in {@link keysOf}. */
const KEY_CHARACTERS = 5
const PRUNE_EVERY: Millis = 1000
/** Limits how long pruning delays operations. */
const PRUNE_ROWS = 500
/** By then a running process of another service would have removed its own expired records. */
const OTHERS_AFTER: Millis = 60_000

const port = parentPort as NonNullable<typeof parentPort>
const options = workerData as WorkerOptions

/** Operations that need no write lock. */
const READS: readonly (keyof ThreadOperations)[] = ['get', 'due', 'list', 'unresolved', 'notes', 'ping']

function now(): Millis {
  return Date.now() + (options.skew[0] as number)
}

function serve(db: DatabaseSync): void {
  const { service } = options
  const journal = new Journal(db, service)
  const keyOf = keysOf(service)
  const begin = db.prepare('BEGIN')
  const beginImmediate = db.prepare('BEGIN IMMEDIATE')
  const commit = db.prepare('COMMIT')
  const select = db.prepare(
    'SELECT bytes FROM records WHERE key = ? AND service = ? AND id = ? AND drop_at > ?',
  )
  select.setReturnArrays(true)
  const insert = db.prepare(
    'INSERT INTO records (unresolved, due, drop_at, bytes, key, service, id) VALUES (?, ?, ?, ?, ?, ?, ?)',
  )
  const update = db.prepare(
    'UPDATE records SET unresolved = ?, due = ?, drop_at = ?, bytes = ? WHERE key = ? AND service = ? AND id = ?',
  )
  const isThere = db.prepare('SELECT 1 FROM records WHERE key = ? LIMIT 1')
  const erase = db.prepare('DELETE FROM records WHERE key = ? AND service = ? AND id = ?')
  const overdue = db.prepare(
    `SELECT due, id FROM records WHERE service = ? AND unresolved = 1 AND due BETWEEN ? AND ? AND drop_at > ?
     ORDER BY due, id LIMIT ?`,
  )
  // Not records that are in the journal again: their history would be removed, too. Expired records of other services are removed as well:
  // their processes need not be running.
  db.function('in_journal', (id) => (journal.has(id as string) ? 1 : 0))
  const prune = db.prepare(
    `DELETE FROM records WHERE rowid IN (SELECT rowid FROM records WHERE drop_at <= ?
     AND CASE service WHEN ? THEN NOT in_journal(id) ELSE drop_at <= ? END LIMIT ?)`,
  )
  const selectIds = db.prepare(
    `SELECT due, id FROM records WHERE key BETWEEN ? AND ? AND service = ? AND id > ? AND id >= ? AND id < ? AND drop_at > ?
     ORDER BY key, id LIMIT ?`,
  )
  const selectPlaces = db.prepare(
    `SELECT due, id FROM records WHERE service = ? AND unresolved = 1 AND (due, id) > (?, ?) AND due < ${BODIES_FROM} AND drop_at > ?
     ORDER BY due, id LIMIT ?`,
  )
  const selectNotes = db.prepare('SELECT lines FROM notes WHERE service = ? AND id = ? AND created_at = ?')
  const keepNotes = db.prepare(
    'INSERT OR REPLACE INTO notes (service, id, created_at, lines) VALUES (?, ?, ?, ?)',
  )
  const eraseNotes = db.prepare('DELETE FROM notes WHERE service = ? AND id = ?')
  const selectBucket = db.prepare('SELECT at, debt, count FROM buckets WHERE service = ? AND id = ?')
  const keepBucket = db.prepare(
    'INSERT OR REPLACE INTO buckets (service, id, at, debt, count, full_at) VALUES (?, ?, ?, ?, ?, ?)',
  )
  const dropBucket = db.prepare('DELETE FROM buckets WHERE service = ? AND id = ?')
  const pruneBuckets = db.prepare(
    `DELETE FROM buckets WHERE (service, id) IN
     (SELECT service, id FROM buckets WHERE full_at <= ? LIMIT ?)`,
  )

  /** As {@link Journal.get} returns it. */
  function read(id: string, at: Millis): Buffer | null {
    const newest = journal.get(id)
    if (newest !== undefined) return readU48(newest, PREFIX.dropAt) > at ? newest : null
    const key = keyOf(id)
    if (isThere.get(key) === undefined) return null
    const found = select.get(key, service, id, at) as unknown as [bytes: Uint8Array] | undefined
    return found === undefined ? null : view(found[0])
  }

  function write(id: string, bytes: Buffer, stamps: Stamps): void {
    if (journal.set(id, bytes)) return
    journal.remove(id)
    keep(id, bytes, stamps)
  }

  /** In the table. A lookup first, rather than a unique index: an index of short numbers is a quarter of the size. */
  function keep(id: string, bytes: Buffer, { due, dropAt }: Pick<Stamps, 'due' | 'dropAt'>): void {
    const key = keyOf(id)
    const place = indexPlace(bytes, due)
    const row = [place === null ? 0 : 1, place ?? due, dropAt, bytes, key, service, id] as const
    if (isThere.get(key) === undefined || update.run(...row).changes === 0) insert.run(...row)
  }

  /**
   * The first places, in order, among those found in the table by `rows` and those in the journal that are in these states and `wanted`. The
   * states alone tell unresolved records from completed ones, whose places follow.
   */
  function placesOf(
    rows: (limit: number) => Iterable<unknown>,
    states: readonly State[] | undefined,
    placeOf: (bytes: Buffer, due: Millis) => number | null,
    wanted: (place: DuePosition) => boolean,
    order: (a: DuePosition, b: DuePosition) => number,
    limit: number,
  ): DuePosition[] {
    const at = now()
    const places: DuePosition[] = []
    for (const place of rows(limit + journal.size) as Iterable<DuePosition>) {
      if (!journal.has(place.id)) places.push(place)
      if (places.length === limit) break
    }
    for (const [id, bytes] of journal.records(states)) {
      const due = placeOf(bytes, readU48(bytes, PREFIX.due))
      if (due !== null && wanted({ due, id }) && readU48(bytes, PREFIX.dropAt) > at) places.push({ due, id })
    }
    return places.sort(order).slice(0, limit)
  }

  /** The history of this record, not of an earlier one under the same id. */
  function historyOf(id: string, at: Millis): { createdAt: Millis; kept: string[] } | null {
    const existing = read(id, at)
    // Anything shorter is not a record and has no history.
    if (existing === null || existing.length < PREFIX.end) return null
    const { createdAt } = readStamps(existing)
    const row = selectNotes.get(service, id, createdAt) as { lines: string } | undefined
    return { createdAt, kept: row === undefined ? [] : row.lines.split('\n') }
  }

  const operations: ThreadOperations = {
    put(id, given, dueIn, dropIn) {
      const at = now()
      const existing = read(id, at)
      if (existing !== null) return [at, separate(existing)]
      // A copy: if the transaction fails and the record is stamped twice, it would keep the first try's instant.
      const bytes = Buffer.from(given)
      const stamps = nextStamps(bytes, null, at, { dueIn, dropIn }, false)
      stamp(bytes, stamps)
      write(id, bytes, stamps)
      return written(at, stamps)
    },
    swap(id, bytes, dueIn, dropIn, nextFence, token, of) {
      const at = now()
      const existing = read(id, at)
      if (existing === null) return [at, null]
      if (!meets(existing, conditionOf(token, of))) return [at, separate(existing)]
      const stamps = nextStamps(bytes, readStamps(existing), at, { dueIn, dropIn }, nextFence)
      stamp(bytes, stamps)
      write(id, bytes, stamps)
      return written(at, stamps)
    },
    get(id) {
      const at = now()
      const existing = read(id, at)
      return [at, existing && separate(existing)]
    },
    renew(items) {
      const at = now()
      return items.map(({ id, token, ...spans }) => {
        const existing = read(id, at)
        if (existing === null || !mayRenew(existing, bytesOf(token))) return false
        const bytes = Buffer.from(existing)
        write(id, bytes, prolongLease(bytes, at, spans))
        return true
      })
    },
    due(limit, of) {
      const at = now()
      const { from, to } = placesDue(of, at)
      const places = placesOf(
        (most) => overdue.iterate(service, from, to, at, most),
        of === 'bodies' ? ['completed'] : UNRESOLVED,
        indexPlace,
        ({ due }) => due <= to,
        inOrder,
        limit,
      )
      return places.map(({ id }) => id as RecordId)
    },
    remove(id, version) {
      const existing = read(id, now())
      if (existing === null || versionOf(existing) !== version) return false
      journal.remove(id)
      erase.run(keyOf(id), service, id)
      eraseNotes.run(service, id)
      return true
    },
    list(beginning, after, limit) {
      // No character of an id sorts after ~.
      const end = `${beginning}~`
      const from = keyOf(after > beginning ? after : beginning)
      const places = placesOf(
        (most) => selectIds.iterate(from, keyOf(end, '~'), service, after, beginning, end, now(), most),
        undefined,
        (_, due) => due,
        ({ id }) => id > after && id >= beginning && id < end,
        (a, b) => (a.id < b.id ? -1 : 1),
        limit,
      )
      return places.map(({ id }) => id as RecordId)
    },
    unresolved: (after, limit) =>
      placesOf(
        (most) => selectPlaces.iterate(service, after.due, after.id, now(), most),
        UNRESOLVED,
        indexPlace,
        (place) => inOrder(place, after) > 0,
        inOrder,
        limit,
      ),
    note(id, notes) {
      const at = now()
      const history = historyOf(id, at)
      if (history === null) return false
      keepNotes.run(service, id, history.createdAt, noted(history.kept, notes, at).join('\n'))
      return true
    },
    notes: (id) => historyOf(id, now())?.kept ?? [],
    throttle(id, rate, units) {
      const existing = (selectBucket.get(service, id) as Bucket | undefined) ?? null
      const { wait, bucket } = drawFromBucket(existing, now(), rate, units)
      if (bucket === null) dropBucket.run(service, id)
      else if (bucket !== existing)
        keepBucket.run(service, id, bucket.at, bucket.debt, bucket.count, fullAt(bucket))
      return wait
    },
    ping: now,
  }

  function perform(request: Request): unknown {
    const [op, ...args] = request
    return (operations[op] as (...args: readonly unknown[]) => unknown)(...args)
  }

  /** Runs a batch in one transaction. If an operation fails, each is retried alone, so that it fails no other. */
  function transact(batch: readonly Request[]): unknown[] {
    const writes = batch.some(([op]) => !READS.includes(op))
    let began = false
    let committing = false
    try {
      ;(writes ? beginImmediate : begin).run()
      began = true
      journal.refresh()
      const results = batch.map(perform)
      journal.write()
      committing = true
      commit.run()
      return results
    } catch (error) {
      if (began) abandon()
      const failure = failureOf(error, committing)
      if (began && batch.length > 1 && !failure.maybeApplied) return batch.flatMap((one) => transact([one]))
      return batch.map(() => failure)
    }
  }

  function abandon(): void {
    if (db.isTransaction) db.exec('ROLLBACK')
    journal.rollback()
  }

  /** Copies records from the journal to the table; expired ones are dropped, and counted. */
  function settleDown(records: Iterable<readonly [id: string, bytes: Buffer]>): number {
    const at = now()
    let expired = 0
    for (const [id, bytes] of records) {
      const [due, dropAt] = [readU48(bytes, PREFIX.due), readU48(bytes, PREFIX.dropAt)]
      if (dropAt > at) keep(id, bytes, { due, dropAt })
      else {
        erase.run(keyOf(id), service, id)
        eraseNotes.run(service, id)
        expired++
      }
    }
    return expired
  }

  /** One transaction that removes something; returns the number of records. Null: it failed, and changed nothing. */
  function removing(some: () => number): number | null {
    let began = false
    let removed: number
    try {
      beginImmediate.run()
      began = true
      journal.refresh()
      removed = some()
      commit.run()
    } catch {
      // Operations report the error.
      if (began) abandon()
      return null
    }
    if (removed > 0) post({ pruned: removed })
    return removed
  }

  /** Moves something from the journal to the table. False: nothing was changed, and nothing more is tried before the next sweep. */
  function moving(some: () => number): boolean {
    mayMove = removing(some) !== null
    return mayMove
  }

  /** All of it at once. */
  function empty(): void {
    if (journal.entries > 0) moving(() => settleDown(journal.take()))
  }

  /**
   * Starts moving the whole journal in slices, with time for other operations in between. The journal keeps everything until the end; then
   * only records changed meanwhile stay in it.
   */
  function move(): void {
    const entries = journal.sorted()
    let next = 0
    let seen = journal.entries
    const slice = (): number => {
      // Twice what has arrived since the last slice, or the journal would grow throughout a burst.
      const most = Math.max(SLICE, 2 * (journal.entries - seen))
      seen = journal.entries
      if (next >= entries.length) journal.drop(entries)
      const some = entries.slice(next, next + most)
      next += most
      return settleDown(journal.stillIn(some))
    }
    const go = (): void => {
      const isLast = next >= entries.length
      step = moving(slice) && !isLast ? setImmediate(go) : undefined
    }
    step = setImmediate(go)
  }

  function sweep(): void {
    let buckets = 0
    // Also reads the journal: after a start or a failure there may be no operation for long.
    const pruned = removing(() => {
      const at = now()
      buckets = Number(pruneBuckets.run(at, PRUNE_ROWS).changes)
      return Number(prune.run(at, service, at - OTHERS_AFTER, PRUNE_ROWS).changes)
    })
    if (journal.entries > 0 && journal.entries === swept && step === undefined) {
      if (mayMove) move()
      // A full file has no room for a slice.
      else empty()
    }
    mayMove = true
    swept = journal.entries
    const isMore = pruned !== null && Math.max(pruned, buckets) === PRUNE_ROWS
    timer = setTimeout(sweep, isMore ? 0 : PRUNE_EVERY).unref()
  }

  /** Progress of a running move. */
  let step: NodeJS.Immediate | undefined
  let mayMove = true
  /** The journal's contents at the last sweep. If unchanged now, waiting for more records to share a page is pointless. */
  let swept = 0
  let timer = setTimeout(sweep, PRUNE_EVERY).unref()
  port.on('message', (first: Packed | 'close') => {
    const requests: Request[] = []
    const memory: ArrayBuffer[] = []
    let next: { message: Packed | 'close' } | undefined = { message: first }
    for (; next !== undefined && next.message !== 'close'; next = receiveMessageOnPort(port)) {
      requests.push(...(unpack(next.message) as Request[]))
      memory.push(next.message.memory, ...next.message.large)
      if (requests.length >= BATCH) break
    }
    const results: unknown[] = []
    for (let at = 0; at < requests.length; at += BATCH)
      results.push(...transact(requests.slice(at, at + BATCH)))
    if (results.length > 0) port.postMessage(...pack(results))
    // Otherwise the bytes stay until garbage collection, which counts objects, and there are few.
    for (const each of memory) each.transfer(0)
    if (
      mayMove &&
      step === undefined &&
      (journal.entries >= JOURNAL_ENTRIES || journal.length >= JOURNAL_BYTES)
    )
      move()
    if (next?.message !== 'close') return
    clearTimeout(timer)
    clearImmediate(step)
    empty()
    db.close()
    port.close()
  })
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

/** Copies bytes for an answer, whose message would otherwise carry the whole buffer. */
function separate(bytes: Buffer): Buffer {
  return bytes.length === bytes.buffer.byteLength ? bytes : view(new Uint8Array(bytes))
}

function view(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength)
}

function post(message: Message): void {
  port.postMessage(message)
}

openPatiently(options).then(
  (db) => {
    serve(db)
    post({ opened: true })
  },
  (error: Error) => {
    post({ failed: error.message })
    port.close()
  },
)
