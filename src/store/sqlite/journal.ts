import type { DatabaseSync, StatementSync } from 'node:sqlite'
import type { State } from '../../core/record.ts'
import { PREFIX, SMALL_RECORD, stateCode } from '../record/codec.ts'

/*
 * Holds a service's newest small records until they are moved to `records` together. All writes of one transaction are one row of
 * `journal`: consecutive entries of an id's length (1 byte), the id, the record's length (4 bytes, big-endian; 0: removed) and the record.
 * The sum of the rows is also kept in memory. Reasons: docs/adr/0077.
 *
 * Every process that has the file open reads the others' rows. Rows never change, and a process that removes all rows leaves a later
 * one behind, so row numbers are never reused: a process whose last row is gone knows that another process has moved the records.
 */

export const CREATE_JOURNAL = `
  CREATE TABLE journal (
    row INTEGER PRIMARY KEY,
    service TEXT NOT NULL,
    entries BLOB NOT NULL
  ) STRICT;
`
/** Bytes for the lengths of an id and a record. */
const LENGTHS = 5
const NOTHING = Buffer.alloc(0)

/** The journal of one process; in step with the file from {@link Journal.refresh} until the transaction ends. */
export class Journal {
  readonly #service: string
  readonly #dataVersion: StatementSync
  readonly #isThere: StatementSync
  readonly #later: StatementSync
  readonly #lastOfAll: StatementSync
  readonly #insert: StatementSync
  readonly #clear: StatementSync
  /** The newest entry of each id that has a record. */
  readonly #newest = new Map<string, Buffer>()
  /** Entries of this transaction that are not in the file yet. */
  #pending: Buffer[] = []
  #entries = 0
  #length = 0
  /** What this transaction has replaced. */
  #undo: [id: string, before: Buffer | undefined][] = []
  #isWritten = false
  /** The latest row that is in memory. */
  #row = 0
  /** Changes when another connection commits. */
  #version: number | null = null

  constructor(db: DatabaseSync, service: string) {
    this.#service = service
    this.#dataVersion = db.prepare('PRAGMA data_version')
    this.#isThere = db.prepare('SELECT 1 FROM journal WHERE row = ?')
    this.#later = db.prepare('SELECT row, entries FROM journal WHERE row > ? AND service = ? ORDER BY row')
    this.#lastOfAll = db.prepare('SELECT max(row) AS row FROM journal')
    this.#insert = db.prepare('INSERT INTO journal (row, service, entries) VALUES (?, ?, ?)')
    this.#clear = db.prepare('DELETE FROM journal WHERE service = ?')
  }

  /** To be called first in every transaction. */
  refresh(): void {
    this.#undo = []
    this.#isWritten = false
    const { data_version: version } = this.#dataVersion.get() as { data_version: number }
    if (version === this.#version) return
    if (this.#isThere.get(this.#row) === undefined) this.#forget()
    for (const { row, entries } of this.#later.all(this.#row, this.#service)) {
      this.#load(entries as Uint8Array)
      this.#row = row as number
    }
    this.#version = version
  }

  /** Entries written since it was last emptied. */
  get entries(): number {
    return this.#entries
  }

  /** Bytes of all entries. */
  get length(): number {
    return this.#length
  }

  /** Number of records. */
  get size(): number {
    return this.#newest.size
  }

  has(id: string): boolean {
    return this.#newest.has(id)
  }

  /** Must not be modified. */
  get(id: string): Buffer | undefined {
    const entry = this.#newest.get(id)
    return entry && recordIn(entry)
  }

  /** Its records, or those in these states. The state is read in place: few records match. */
  *records(states?: readonly State[]): Generator<[id: string, bytes: Buffer]> {
    const codes = states?.map(stateCode)
    for (const [id, entry] of this.#newest)
      if (codes === undefined || codes.includes(entry[LENGTHS + id.length + PREFIX.state] as number))
        yield [id, recordIn(entry)]
  }

  /** False: the record is too large. */
  set(id: string, bytes: Buffer): boolean {
    if (bytes.length > SMALL_RECORD) return false
    this.#change(id, bytes)
    return true
  }

  remove(id: string): void {
    if (this.has(id)) this.#change(id, NOTHING)
  }

  #change(id: string, bytes: Buffer): void {
    const entry = Buffer.allocUnsafe(LENGTHS + id.length + bytes.length)
    entry[0] = id.length
    entry.write(id, 1, 'latin1')
    entry.writeUInt32BE(bytes.length, 1 + id.length)
    bytes.copy(entry, LENGTHS + id.length)
    this.#undo.push([id, this.#newest.get(id)])
    this.#pending.push(entry)
    this.#entries++
    this.#length += entry.length
    this.#point(id, bytes.length === 0 ? undefined : entry)
  }

  #point(id: string, entry: Buffer | undefined): void {
    if (entry === undefined) this.#newest.delete(id)
    else this.#newest.set(id, entry)
  }

  /** To be called before COMMIT. */
  write(): void {
    if (this.#pending.length > 0) this.#append(null, this.#pending)
  }

  /** The newest entries in the order of ids, in which `records` is fastest. */
  sorted(): Entry[] {
    return Array.from([...this.#newest.keys()].sort(), (id) => [id, this.#newest.get(id) as Buffer])
  }

  /** The records of those entries that are still the newest of their id. */
  stillIn(entries: readonly Entry[]): [id: string, bytes: Buffer][] {
    const still = entries.filter(([id, entry]) => this.#newest.get(id) === entry)
    return still.map(([id, entry]) => [id, recordIn(entry)])
  }

  /** Empties the journal and returns its records in the order of ids. */
  take(): [id: string, bytes: Buffer][] {
    const records = this.stillIn(this.sorted())
    this.#restart([])
    return records
  }

  /** Drops the records of {@link stillIn}, and keeps the others. */
  drop(entries: readonly Entry[]): void {
    const others = new Map(this.#newest)
    for (const [id] of this.stillIn(entries)) others.delete(id)
    this.#restart([...others])
  }

  #restart(entries: readonly Entry[]): void {
    const { row } = this.#lastOfAll.get() as { row: number | null }
    this.#forget()
    // First: in a full file only this frees room.
    this.#clear.run(this.#service)
    for (const [id, entry] of entries) this.#newest.set(id, entry)
    const kept = [...this.#newest.values()]
    this.#entries = kept.length
    this.#length = kept.reduce((sum, { length }) => sum + length, 0)
    this.#append(Number(row) + 1, kept)
  }

  /** To be called after ROLLBACK. A failed COMMIT may have been applied: in that case the file is read again. */
  rollback(): void {
    if (this.#isWritten) return this.#forget()
    // Only once: the next transaction may fail before it gets to `refresh`.
    for (const [id, before] of this.#undo.splice(0).reverse()) this.#point(id, before)
    for (const { length } of this.#pending) this.#length -= length
    this.#entries -= this.#pending.length
    this.#pending = []
  }

  /** The next transaction reads everything again. */
  #forget(): void {
    this.#newest.clear()
    this.#undo = []
    this.#pending = []
    this.#entries = 0
    this.#length = 0
    this.#row = 0
    this.#version = null
  }

  /** Null: the row after the last one. */
  #append(row: number | null, entries: readonly Buffer[]): void {
    const { lastInsertRowid } = this.#insert.run(row, this.#service, Buffer.concat(entries))
    this.#row = Number(lastInsertRowid)
    this.#pending = []
    this.#isWritten = true
  }

  #load(entries: Uint8Array): void {
    const bytes = Buffer.from(entries.buffer, entries.byteOffset, entries.byteLength)
    this.#length += bytes.length
    for (let at = 0; at < bytes.length; this.#entries++) {
      const afterId = at + 1 + bytes.readUInt8(at)
      const end = afterId + 4 + bytes.readUInt32BE(afterId)
      const id = bytes.toString('latin1', at + 1, afterId)
      this.#point(id, end === afterId + 4 ? undefined : bytes.subarray(at, end))
      at = end
    }
  }
}

export type Entry = readonly [id: string, entry: Buffer]

function recordIn(entry: Buffer): Buffer {
  return entry.subarray(LENGTHS + entry.readUInt8(0))
}
