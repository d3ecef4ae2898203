import { DatabaseSync } from 'node:sqlite'
import { parentPort, receiveMessageOnPort, workerData } from 'node:worker_threads'
import type { Millis, RecordId } from '../core/record.ts'
import { isUnresolved, mayRenew, meets, prolongLease, readStamps, stampCopy } from './codec.ts'
import { type Bucket, drawFromBucket, fullAt } from './gcra.ts'
import { noted } from './history.ts'
import type { Place } from './register.ts'
import {
  BUSY,
  codeOf,
  failureOf,
  type Message,
  type Operations,
  type Reply,
  type Request,
  type WorkerOptions,
} from './sqlite.ts'

/* Runs SQLite off the event loop. Operations that arrive together are one transaction with one fsync, and are answered after it. */

/** `PRAGMA user_version` of the file. */
const SCHEMA = 2
/** Bounds how long a batch holds the lock that other processes wait for. */
const BATCH = 256
const PRUNE_EVERY: Millis = 1000
/** Bounds how long pruning delays operations. */
const PRUNE_ROWS = 500
/** Opening competes with other processes for locks that SQLite does not wait for (switching to WAL). */
const OPEN_TRIES = 50
const OPEN_PAUSE: Millis = 20

const port = parentPort as NonNullable<typeof parentPort>
const options = workerData as WorkerOptions

/** A rowid table: rows with large blobs are slow inside the b-tree of a WITHOUT ROWID one. */
const CREATE = `
  CREATE TABLE records (
    service TEXT NOT NULL,
    id TEXT NOT NULL,
    unresolved INTEGER NOT NULL,
    due INTEGER NOT NULL,
    drop_at INTEGER NOT NULL,
    bytes BLOB NOT NULL,
    PRIMARY KEY (service, id)
  ) STRICT;
  CREATE INDEX records_unresolved ON records (service, due) WHERE unresolved = 1;
  CREATE INDEX records_drop_at ON records (drop_at);
  PRAGMA user_version = ${SCHEMA};
`
/** Added later under the same schema version: an earlier release does without it and can still use the file. */
const CREATE_BUCKETS = `
  CREATE TABLE IF NOT EXISTS buckets (
    service TEXT NOT NULL,
    id TEXT NOT NULL,
    at INTEGER NOT NULL,
    debt INTEGER NOT NULL,
    count INTEGER NOT NULL,
    full_at INTEGER NOT NULL,
    PRIMARY KEY (service, id)
  ) STRICT, WITHOUT ROWID;
  CREATE INDEX IF NOT EXISTS buckets_full_at ON buckets (full_at);
`
/** Likewise. `created_at` says which record under that id; the trigger lives in the file, so earlier releases clean up, too. */
const CREATE_NOTES = `
  CREATE TABLE IF NOT EXISTS notes (
    service TEXT NOT NULL,
    id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    lines TEXT NOT NULL,
    PRIMARY KEY (service, id)
  ) STRICT, WITHOUT ROWID;
  CREATE TRIGGER IF NOT EXISTS notes_go_with_the_record AFTER DELETE ON records
    BEGIN DELETE FROM notes WHERE service = OLD.service AND id = OLD.id; END;
`
/** Operations that need no write lock. */
const READS: readonly (keyof Operations)[] = ['get', 'due', 'list', 'unresolved', 'notes', 'ping']

function open(): DatabaseSync {
  const db = new DatabaseSync(options.file, { timeout: options.busyMs })
  try {
    refuseForeign(db)
    db.exec('PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; BEGIN IMMEDIATE')
    const { user_version: version } = db.prepare('PRAGMA user_version').get() as { user_version: number }
    if (version > SCHEMA)
      throw new Error(`it has schema version ${version}, of a later release; this one reads ${SCHEMA}`)
    if (version > 0 && version < SCHEMA)
      throw new Error(
        'its records were made before records belonged to a service, and none would be found: move the file away',
      )
    if (version === 0) db.exec(CREATE)
    db.exec(CREATE_BUCKETS)
    db.exec(CREATE_NOTES)
    db.exec('COMMIT')
    if (options.maxPages > 0) db.exec(`PRAGMA max_page_count = ${options.maxPages}`)
    return db
  } catch (error) {
    db.close()
    throw error
  }
}

/** A mistyped path must not turn somebody else's database into a store; even a command that only reads would. */
function refuseForeign(db: DatabaseSync): void {
  const { version, objects, records } = db
    .prepare(
      `SELECT (SELECT user_version FROM pragma_user_version) AS version, count(*) AS objects,
       count(*) FILTER (WHERE type = 'table' AND name = 'records') AS records FROM sqlite_schema`,
    )
    .get() as { version: number; objects: number; records: number }
  const foreign = version === 0 ? objects > 0 : version <= SCHEMA && records === 0
  if (foreign) throw new Error('it is the database of another program')
}

function openPatiently(): DatabaseSync {
  let left = OPEN_TRIES
  while (left > 0) {
    try {
      return open()
    } catch (error) {
      if (codeOf(error) !== BUSY) throw error
    }
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, OPEN_PAUSE)
    left--
  }
  return open()
}

function now(): Millis {
  return Date.now() + (options.skew[0] as number)
}

function serve(db: DatabaseSync): void {
  const { service } = options
  const select = db.prepare('SELECT bytes FROM records WHERE service = ? AND id = ? AND drop_at > ?')
  const upsert = db.prepare(
    `INSERT INTO records (service, id, unresolved, due, drop_at, bytes) VALUES (?, ?, ?, ?, ?, ?)
     ON CONFLICT (service, id) DO UPDATE SET
       unresolved = excluded.unresolved, due = excluded.due, drop_at = excluded.drop_at, bytes = excluded.bytes`,
  )
  const erase = db.prepare('DELETE FROM records WHERE service = ? AND id = ?')
  const overdue = db.prepare(
    `SELECT id FROM records WHERE service = ? AND unresolved = 1 AND due <= ? AND drop_at > ?
     ORDER BY due LIMIT ?`,
  )
  // Expired records of other services go, too: their processes need not be running.
  const prune = db.prepare(
    'DELETE FROM records WHERE rowid IN (SELECT rowid FROM records WHERE drop_at <= ? LIMIT ?)',
  )
  const selectIds = db.prepare(
    `SELECT id FROM records WHERE service = ? AND id > ? AND id >= ? AND id < ? AND drop_at > ?
     ORDER BY id LIMIT ?`,
  )
  const selectPlaces = db.prepare(
    `SELECT due, id FROM records WHERE service = ? AND unresolved = 1 AND (due, id) > (?, ?) AND drop_at > ?
     ORDER BY due, id LIMIT ?`,
  )
  const selectNotes = db.prepare('SELECT lines FROM notes WHERE service = ? AND id = ? AND created_at = ?')
  const keepNotes = db.prepare(
    'INSERT OR REPLACE INTO notes (service, id, created_at, lines) VALUES (?, ?, ?, ?)',
  )
  const selectBucket = db.prepare('SELECT at, debt, count FROM buckets WHERE service = ? AND id = ?')
  const keepBucket = db.prepare(
    'INSERT OR REPLACE INTO buckets (service, id, at, debt, count, full_at) VALUES (?, ?, ?, ?, ?, ?)',
  )
  const dropBucket = db.prepare('DELETE FROM buckets WHERE service = ? AND id = ?')
  const pruneBuckets = db.prepare(
    `DELETE FROM buckets WHERE (service, id) IN
     (SELECT service, id FROM buckets WHERE full_at <= ? LIMIT ?)`,
  )

  function read(id: string, at: Millis): Buffer | null {
    const row = select.get(service, id, at) as { bytes: Uint8Array } | undefined
    return row === undefined ? null : view(row.bytes)
  }

  function write(id: string, written: ReturnType<typeof prolongLease>): void {
    upsert.run(service, id, isUnresolved(written.bytes) ? 1 : 0, written.due, written.dropAt, written.bytes)
  }

  /** Of this record, not of an earlier one under the same id. */
  function historyOf(id: string, at: Millis): { createdAt: Millis; kept: string[] } | null {
    const there = read(id, at)
    if (there === null) return null
    const { createdAt } = readStamps(there)
    const row = selectNotes.get(service, id, createdAt) as { lines: string } | undefined
    return { createdAt, kept: row === undefined ? [] : row.lines.split('\n') }
  }

  const operations: Operations = {
    put(id, bytes, spans) {
      const at = now()
      const there = read(id, at)
      if (there !== null) return { done: false, now: at, bytes: there }
      const written = stampCopy(view(bytes), null, at, spans, false)
      write(id, written)
      return { done: true, now: at, stamp: written.stamp }
    },
    swap(id, condition, bytes, spans, nextFence) {
      const at = now()
      const there = read(id, at)
      const holds = 'token' in condition ? { ...condition, token: view(condition.token) } : condition
      if (there === null || !meets(there, holds)) return { done: false, now: at, bytes: there }
      const written = stampCopy(view(bytes), there, at, spans, nextFence)
      write(id, written)
      return { done: true, now: at, stamp: written.stamp }
    },
    get(id) {
      const at = now()
      return { now: at, bytes: read(id, at) }
    },
    renew(items) {
      const at = now()
      return items.map(({ id, token, ...spans }) => {
        const there = read(id, at)
        if (there === null || !mayRenew(there, view(token))) return false
        write(id, prolongLease(there, at, spans))
        return true
      })
    },
    due(limit) {
      const at = now()
      return overdue.all(service, at, at, limit).map((row) => row['id'] as RecordId)
    },
    remove(id, version) {
      const there = read(id, now())
      if (there === null || !meets(there, { version })) return false
      erase.run(service, id)
      return true
    },
    list(beginning, after, limit) {
      // No character of an id sorts after ~.
      const rows = selectIds.all(service, after, beginning, `${beginning}~`, now(), limit)
      return rows.map((row) => row['id'] as RecordId)
    },
    unresolved: (after, limit) =>
      selectPlaces.all(service, after.due, after.id, now(), limit) as unknown as Place[],
    note(id, notes) {
      const at = now()
      const history = historyOf(id, at)
      if (history === null) return false
      keepNotes.run(service, id, history.createdAt, noted(history.kept, notes, at).join('\n'))
      return true
    },
    notes: (id) => historyOf(id, now())?.kept ?? [],
    throttle(id, rate, units) {
      const there = (selectBucket.get(service, id) as Bucket | undefined) ?? null
      const { wait, bucket } = drawFromBucket(there, now(), rate, units)
      if (bucket === null) dropBucket.run(service, id)
      else if (bucket !== there)
        keepBucket.run(service, id, bucket.at, bucket.debt, bucket.count, fullAt(bucket))
      return wait
    },
    ping: now,
  }

  function perform({ op, args }: Request): unknown {
    return (operations[op] as (...args: readonly unknown[]) => unknown)(...args)
  }

  /** Runs a batch in one transaction. If an operation fails, each is tried alone, so that it fails no other. */
  function transact(batch: readonly Request[]): Reply[] {
    const writes = batch.some(({ op }) => !READS.includes(op))
    let began = false
    let committing = false
    try {
      db.exec(writes ? 'BEGIN IMMEDIATE' : 'BEGIN')
      began = true
      const replies = batch.map((request) => ({ seq: request.seq, result: perform(request) }))
      committing = true
      db.exec('COMMIT')
      return replies
    } catch (error) {
      if (db.isTransaction) db.exec('ROLLBACK')
      const failure = failureOf(error, committing)
      if (began && batch.length > 1 && !failure.maybeApplied) return batch.flatMap((one) => transact([one]))
      return batch.map(({ seq }) => ({ seq, failure }))
    }
  }

  function sweep(): void {
    let most = 0
    try {
      const pruned = Number(prune.run(now(), PRUNE_ROWS).changes)
      if (pruned > 0) post({ pruned })
      most = Math.max(pruned, Number(pruneBuckets.run(now(), PRUNE_ROWS).changes))
    } catch {
      // Tried again next time; operations report what is wrong.
    }
    timer = setTimeout(sweep, most === PRUNE_ROWS ? 0 : PRUNE_EVERY).unref()
  }

  let timer = setTimeout(sweep, PRUNE_EVERY).unref()
  port.on('message', (first: Request | 'close') => {
    const batch: Request[] = []
    let next: { message: Request | 'close' } | undefined = { message: first }
    for (; next !== undefined && next.message !== 'close'; next = receiveMessageOnPort(port)) {
      batch.push(next.message)
      if (batch.length === BATCH) break
    }
    if (batch.length > 0) post({ replies: transact(batch) })
    if (next?.message !== 'close') return
    clearTimeout(timer)
    db.close()
    port.close()
  })
}

function view(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength)
}

function post(message: Message): void {
  port.postMessage(message)
}

let opened: DatabaseSync | undefined
try {
  opened = openPatiently()
} catch (error) {
  post({ failed: (error as Error).message })
  port.close()
}
if (opened !== undefined) {
  serve(opened)
  post({ opened: true })
}
