import type { DatabaseSync, StatementSync } from 'node:sqlite'
import type { State } from '../core/record.ts'
import { PREFIX, SMALL_RECORD, stateCode } from './codec.ts'

/*
 * Holds a service's newest small records until they are moved to `records` together. All writes of one transaction are one row of
 * `journal`: consecutive entries of an id's length (1 byte), the id, the record's length (4 bytes, big-endian; 0: removed) and the record.
 * The sum of the rows is also kept in memory. Why: docs/adr/0077.
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
const FIRST_SLOTS = 256
/** More than the journal normally holds, so that it need not grow and leave garbage. Unused pages take no memory. */
const FIRST_BYTES = 16 * 1024 * 1024
const NOTHING = Buffer.alloc(0)
/** No place in the log. */
const NONE = -1
/** Part of an id in {@link Journal.slots}, enough to keep neighbours together. */
const SORTED_CHARACTERS = 4
/** More slots than fit into the memory of a log. */
const MOST_SLOTS = 2 ** 25

/** The journal of one process; in step with the file from {@link Journal.refresh} until the transaction ends. */
export class Journal {
  readonly #service: string
  readonly #dataVersion: StatementSync
  readonly #isThere: StatementSync
  readonly #later: StatementSync
  readonly #lastOfAll: StatementSync
  readonly #insert: StatementSync
  readonly #clear: StatementSync
  /** All entries in sequence, in reused memory: separate buffers would live long enough to become old garbage. */
  #log: Buffer
  #end = 0
  /** Where the entries of this transaction begin. */
  #begin = 0
  #entries = 0
  /** Where the entries replaced by this transaction began. */
  #undo: [id: string, before: number][] = []
  #isWritten = false
  /** The slot, a small number, of each id that has a record. Without a record, a slot may pass to another id. */
  readonly #slots = new Map<string, number>()
  readonly #free: number[] = []
  /** By slot: where in {@link #log} the newest entry begins; {@link NONE}: the slot is unused. */
  #heads = new Int32Array(FIRST_SLOTS).fill(NONE)
  /** Number of slots assigned. */
  #count = 0
  /** One more than the total length of all earlier logs. */
  #base = 1
  /** The latest row that is in memory. */
  #row = 0
  /** Changes when another connection commits. */
  #version: number | null = null

  constructor(db: DatabaseSync, service: string, room: number = FIRST_BYTES) {
    this.#service = service
    this.#log = Buffer.allocUnsafeSlow(room)
    this.#dataVersion = db.prepare('PRAGMA data_version')
    this.#isThere = db.prepare('SELECT 1 FROM journal WHERE row = ?')
    this.#later = db.prepare('SELECT row, entries FROM journal WHERE row > ? AND service = ? ORDER BY row')
    this.#lastOfAll = db.prepare('SELECT max(row) AS row FROM journal')
    this.#insert = db.prepare('INSERT INTO journal (row, service, entries) VALUES (?, ?, ?)')
    this.#clear = db.prepare('DELETE FROM journal WHERE service = ?')
  }

  /** Call it first in every transaction. */
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

  /** Bytes written since it was last emptied. */
  get entries(): number {
    return this.#entries
  }

  /** Length of all entries. */
  get length(): number {
    return this.#end
  }

  /** Number of records. */
  get size(): number {
    return this.#slots.size
  }

  has(id: string): boolean {
    return this.#slots.has(id)
  }

  /** Valid until the journal changes; must not be modified. */
  get(id: string): Buffer | undefined {
    const slot = this.#slots.get(id)
    return slot === undefined ? undefined : this.#recordIn(slot)
  }

  /** Its records, or those in these states. A state is read in place: a buffer for each of thousands of records takes milliseconds. */
  *records(states?: readonly State[]): Generator<[slot: number, bytes: Buffer]> {
    const codes = states?.map(stateCode)
    for (let slot = 0; slot < this.#count; slot++) {
      const head = this.#heads[slot] as number
      if (head === NONE) continue
      const state = this.#log[head + LENGTHS + (this.#log[head] as number) + PREFIX.state] as number
      if (codes === undefined || codes.includes(state)) yield [slot, this.#recordIn(slot)]
    }
  }

  /** The id of the record in the slot. */
  idIn(slot: number): string {
    const head = this.#heads[slot] as number
    return this.#log.toString('latin1', head + 1, head + 1 + (this.#log[head] as number))
  }

  #recordIn(slot: number): Buffer {
    const head = this.#heads[slot] as number
    const at = head + LENGTHS + (this.#log[head] as number)
    return this.#log.subarray(at, at + this.#log.readUInt32BE(at - 4))
  }

  /** False: the record is too large. */
  set(id: string, bytes: Buffer): boolean {
    if (bytes.length > SMALL_RECORD) return false
    this.#undo.push([id, this.#place(id, this.#enter(id, bytes))])
    return true
  }

  remove(id: string): void {
    if (!this.has(id)) return
    this.#undo.push([id, this.#place(id, NONE)])
    this.#enter(id, NOTHING)
  }

  /** Sets where the id's newest entry begins; {@link NONE}: its record is gone. Returns the previous position. */
  #place(id: string, head: number): number {
    const existing = this.#slots.get(id)
    if (existing === undefined) {
      if (head !== NONE) this.#give(id, head)
      return NONE
    }
    const before = this.#heads[existing] as number
    this.#heads[existing] = head
    if (head === NONE) {
      this.#slots.delete(id)
      this.#free.push(existing)
    }
    return before
  }

  #give(id: string, head: number): void {
    const slot = this.#free.pop() ?? this.#count++
    if (slot === this.#heads.length) {
      const heads = new Int32Array(2 * slot)
      heads.set(this.#heads)
      this.#heads = heads
    }
    this.#heads[slot] = head
    this.#slots.set(id, slot)
  }

  /** Call it before COMMIT. */
  write(): void {
    if (this.#end === this.#begin) return
    this.#append(null, this.#log.subarray(this.#begin, this.#end))
    this.#begin = this.#end
  }

  /** The ids of all records, in the order in which `records` is fastest. */
  slots(): number[] {
    const sorted = new Float64Array(this.size)
    let n = 0
    for (let slot = 0; slot < this.#count; slot++) {
      const head = this.#heads[slot] as number
      if (head === NONE) continue
      const end = head + Math.min(SORTED_CHARACTERS, this.#log[head] as number)
      let key = 0
      for (let at = head + 1; at <= head + SORTED_CHARACTERS; at++)
        key = key * 128 + (at <= end ? (this.#log[at] as number) : 0)
      sorted[n++] = key * MOST_SLOTS + slot
    }
    return Array.from(sorted.sort(), (each) => each % MOST_SLOTS)
  }

  /** The record in a slot, and a number that only this entry has while this process runs; null: there is none. */
  at(slot: number): { readonly id: string; readonly bytes: Buffer; readonly place: number } | null {
    const head = this.#heads[slot] as number
    if (slot >= this.#count || head === NONE) return null
    return { id: this.idIn(slot), bytes: this.#recordIn(slot), place: this.#base + head }
  }

  /** Empties the journal and returns its records in the order of ids. Valid until the journal changes. */
  take(): [id: string, bytes: Buffer][] {
    const records = this.slots().map((slot): [string, Buffer] => [this.idIn(slot), this.#recordIn(slot)])
    this.#restart([])
    return records
  }

  /** Drops the records that are still at these positions, by slot, and keeps the others. */
  drop(places: Float64Array): void {
    const others: [string, Buffer][] = []
    for (const [slot, bytes] of this.records())
      if (this.#base + (this.#heads[slot] as number) !== places[slot])
        others.push([this.idIn(slot), Buffer.from(bytes)])
    this.#restart(others)
  }

  #restart(records: readonly [id: string, bytes: Buffer][]): void {
    const { row } = this.#lastOfAll.get() as { row: number | null }
    this.#forget()
    // First, since in a full file only this frees room.
    this.#clear.run(this.#service)
    for (const [id, bytes] of records) this.#place(id, this.#enter(id, bytes))
    this.#append(Number(row) + 1, this.#log.subarray(0, this.#end))
    this.#begin = this.#end
  }

  /** Call it after ROLLBACK. A failed COMMIT may have been applied: in that case the file is read again. */
  rollback(): void {
    if (this.#isWritten) return this.#forget()
    this.#entries -= this.#undo.length
    // Only once: the next transaction may fail before it gets to `refresh`.
    for (const [id, before] of this.#undo.splice(0).reverse()) this.#place(id, before)
    this.#end = this.#begin
  }

  /** The next transaction reads everything again. */
  #forget(): void {
    this.#slots.clear()
    this.#free.length = 0
    this.#heads.fill(NONE, 0, this.#count)
    this.#count = 0
    this.#base += this.#end
    this.#undo = []
    this.#end = 0
    this.#begin = 0
    this.#entries = 0
    this.#row = 0
    this.#version = null
  }

  /** Returns where it begins. */
  #enter(id: string, bytes: Buffer): number {
    const head = this.#room(LENGTHS + id.length + bytes.length)
    const at = head + LENGTHS + id.length
    this.#log[head] = id.length
    this.#log.write(id, head + 1, 'latin1')
    this.#log.writeUInt32BE(bytes.length, at - 4)
    bytes.copy(this.#log, at)
    this.#entries++
    return head
  }

  /** Extends the log by that many bytes; returns where they begin. */
  #room(length: number): number {
    const at = this.#end
    this.#end += length
    if (this.#end > this.#log.length) {
      const larger = Buffer.allocUnsafeSlow(2 * this.#end)
      this.#log.copy(larger, 0, 0, at)
      this.#log = larger
    }
    return at
  }

  /** Null: the row after the last one. */
  #append(row: number | null, entries: Buffer): void {
    this.#row = Number(this.#insert.run(row, this.#service, entries).lastInsertRowid)
    this.#isWritten = true
  }

  #load(entries: Uint8Array): void {
    let head = this.#room(entries.length)
    this.#log.set(entries, head)
    while (head < this.#end) {
      const at = head + LENGTHS + (this.#log[head] as number)
      const end = at + this.#log.readUInt32BE(at - 4)
      this.#place(this.#log.toString('latin1', head + 1, at - 4), end === at ? NONE : head)
      head = end
      this.#entries++
    }
    this.#begin = this.#end
  }
}
