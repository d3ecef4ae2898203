import { DatabaseSync } from 'node:sqlite'
import { setTimeout as wait } from 'node:timers/promises'
import type { Millis, RecordId } from '../../core/record.ts'
import { CREATE_JOURNAL } from './journal.ts'

/** `PRAGMA user_version` of the file. */
const SCHEMA = 3
/** Opening competes with other processes for locks that SQLite does not wait for (switching to WAL). */
const OPEN_TRIES = 50
const OPEN_PAUSE: Millis = 20
export const BUSY = 5

/** A rowid table: rows with large blobs are slow inside the b-tree of a WITHOUT ROWID one. */
const CREATE = `
  CREATE TABLE records (
    key INTEGER NOT NULL,
    service TEXT NOT NULL,
    id TEXT NOT NULL,
    unresolved INTEGER NOT NULL,
    due INTEGER NOT NULL,
    drop_at INTEGER NOT NULL,
    bytes BLOB NOT NULL
  ) STRICT;
  CREATE INDEX records_key ON records (key);
  CREATE INDEX records_unresolved ON records (service, due) WHERE unresolved = 1;
  CREATE INDEX records_drop_at ON records (drop_at);
  ${CREATE_JOURNAL}
  CREATE TABLE buckets (
    service TEXT NOT NULL,
    id TEXT NOT NULL,
    at INTEGER NOT NULL,
    debt INTEGER NOT NULL,
    count INTEGER NOT NULL,
    full_at INTEGER NOT NULL,
    PRIMARY KEY (service, id)
  ) STRICT, WITHOUT ROWID;
  CREATE INDEX buckets_full_at ON buckets (full_at);
  -- created_at identifies the record under that id.
  CREATE TABLE notes (
    service TEXT NOT NULL,
    id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    lines TEXT NOT NULL,
    PRIMARY KEY (service, id)
  ) STRICT, WITHOUT ROWID;
  CREATE TRIGGER notes_go_with_the_record AFTER DELETE ON records
    BEGIN DELETE FROM notes WHERE service = OLD.service AND id = OLD.id; END;
  PRAGMA user_version = ${SCHEMA};
`

export interface FileOptions {
  readonly file: string
  /** How long SQLite waits for another process's lock. */
  readonly busyMs: Millis
  /** 0: unbounded. */
  readonly maxPages: number
}

/**
 * Like {@link openFile}, but waits much longer than an operation for processes that keep the file locked.
 * @throws if it cannot be used: locked, not a database, or another program's.
 */
export async function openPatiently(options: FileOptions): Promise<DatabaseSync> {
  const until = performance.now() + OPEN_TRIES * (OPEN_PAUSE + options.busyMs)
  for (;;) {
    try {
      return openFile(options)
    } catch (error) {
      if (resultCode(error) !== BUSY || performance.now() > until) throw error
    }
    await wait(OPEN_PAUSE)
  }
}

/** Opens the file, and makes it a store if it is new. The file of an unreadable release, or of another program, is left unchanged. */
function openFile({ file, busyMs, maxPages }: FileOptions): DatabaseSync {
  const db = new DatabaseSync(file, { timeout: busyMs })
  try {
    refuseForeign(db)
    db.exec('PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; BEGIN IMMEDIATE')
    const { user_version: version } = db.prepare('PRAGMA user_version').get() as { user_version: number }
    if (version > SCHEMA)
      throw new Error(`it has schema version ${version}, of a later release; this one reads ${SCHEMA}`)
    if (version === 0) db.exec(CREATE)
    db.exec('COMMIT')
    if (maxPages > 0) db.exec(`PRAGMA max_page_count = ${maxPages}`)
    return db
  } catch (error) {
    db.close()
    throw error
  }
}

/** A mistyped path must not turn another program's database into a store; even a command that only reads would. */
function refuseForeign(db: DatabaseSync): void {
  const { version, objects, records } = db
    .prepare(
      `SELECT (SELECT user_version FROM pragma_user_version) AS version, count(*) AS objects,
       count(*) FILTER (WHERE type = 'table' AND name = 'records') AS records FROM sqlite_schema`,
    )
    .get() as { version: number; objects: number; records: number }
  const isForeign = version < SCHEMA ? version !== 0 || objects > 0 : version === SCHEMA && records === 0
  if (isForeign) throw new Error('it is the database of another program')
}

/** Rows of `records` that {@link servicesIn} looks at: a file of millions takes seconds to read. */
const LOOKED_AT = 100_000

/** Which services have records there, other than `mark`, for people; none if the file cannot be read. */
export function servicesIn(file: string, mark: RecordId): string[] {
  try {
    using db = new DatabaseSync(file, { readOnly: true })
    const rows = db
      .prepare(
        `SELECT service FROM (SELECT service, id FROM records LIMIT ?) WHERE id <> ? UNION SELECT service FROM journal WHERE entries <> x''`,
      )
      .all(LOOKED_AT, mark) as { service: string }[]
    return rows.map(({ service }) => service)
  } catch {
    // Opening it as a store says why.
    return []
  }
}

/** SQLite's primary result code. */
export function resultCode(error: unknown): number {
  return ((error as { errcode?: number }).errcode ?? 0) & 0xff
}
