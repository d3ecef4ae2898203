import type { DatabaseSync, StatementSync } from 'node:sqlite'
import { parentPort, receiveMessageOnPort, workerData } from 'node:worker_threads'
import type { Millis } from '../../core/record.ts'
import { openPatiently } from './file.ts'
import type { Journal } from './journal.ts'
import { type Packed, pack, type Request, type ThreadOperations } from './messages.ts'
import { Operations } from './operations.ts'
import { failureOf, type Message, type WorkerOptions } from './store.ts'

/* Runs SQLite off the event loop. Operations that arrive together are one transaction with one fsync, and are answered after it. */

/** Limits how long a batch holds the lock that other processes wait for. */
const BATCH = 256
/**
 * After this many records (eight thousand first executions) or bytes, the journal is moved to the table: the more at once, the more share
 * an index page.
 */
const JOURNAL_ENTRIES = 16_000
const JOURNAL_BYTES = 8 * 1024 * 1024
/** Records per transaction of a move, some milliseconds: other operations wait no longer than that, unless they pile up. */
const SLICE = 500
const PRUNE_EVERY: Millis = 1000
/** Limits how long pruning delays operations. */
const PRUNE_ROWS = 500

const port = parentPort as NonNullable<typeof parentPort>
const options = workerData as WorkerOptions

/** Operations that need no write lock. */
const READS: readonly (keyof ThreadOperations)[] = ['get', 'due', 'list', 'unresolved', 'notes', 'ping']

/** Serves one file until the port closes. */
class Service {
  readonly #db: DatabaseSync
  readonly #operations: Operations
  readonly #begin: StatementSync
  readonly #beginImmediate: StatementSync
  readonly #commit: StatementSync
  readonly #journal: Journal
  /** Progress of a running move. */
  #step: NodeJS.Immediate | undefined
  #mayMove = true
  /** The journal's contents at the last sweep. If unchanged now, waiting for more records to share a page is pointless. */
  #swept = 0
  #timer: NodeJS.Timeout | undefined

  constructor(db: DatabaseSync) {
    this.#db = db
    this.#operations = new Operations(db, options.service, () => Date.now() + (options.skew[0] as number))
    this.#journal = this.#operations.journal
    this.#begin = db.prepare('BEGIN')
    this.#beginImmediate = db.prepare('BEGIN IMMEDIATE')
    this.#commit = db.prepare('COMMIT')
  }

  start(): void {
    this.#sweepAfter(PRUNE_EVERY)
    port.on('message', (first: Packed | 'close') => this.#receive(first))
  }

  /** Runs a batch in one transaction. If an operation fails, each is retried alone, so that it fails no other. */
  #transact(batch: readonly Request[]): unknown[] {
    const writes = batch.some(([op]) => !READS.includes(op))
    let began = false
    let committing = false
    try {
      ;(writes ? this.#beginImmediate : this.#begin).run()
      began = true
      this.#journal.refresh()
      const results = batch.map(([op, ...args]) =>
        (this.#operations[op] as (...args: readonly unknown[]) => unknown)(...args),
      )
      this.#journal.write()
      committing = true
      this.#commit.run()
      return results
    } catch (error) {
      if (began) this.#abandon()
      const failure = failureOf(error, committing)
      if (began && batch.length > 1 && !failure.maybeApplied)
        return batch.flatMap((one) => this.#transact([one]))
      return batch.map(() => failure)
    }
  }

  #abandon(): void {
    if (this.#db.isTransaction) this.#db.exec('ROLLBACK')
    this.#journal.rollback()
  }

  /** One transaction that removes something; returns the number of records. Null: it failed, and changed nothing. */
  #removing(some: () => number): number | null {
    let began = false
    let removed: number
    try {
      this.#beginImmediate.run()
      began = true
      this.#journal.refresh()
      removed = some()
      this.#commit.run()
    } catch {
      // Operations report the error.
      if (began) this.#abandon()
      return null
    }
    if (removed > 0) post({ pruned: removed })
    return removed
  }

  /** Moves something from the journal to the table. False: nothing was changed, and nothing more is tried before the next sweep. */
  #moving(some: () => number): boolean {
    this.#mayMove = this.#removing(some) !== null
    return this.#mayMove
  }

  /** All of it at once. */
  #empty(): void {
    if (this.#journal.entries > 0) this.#moving(() => this.#operations.settleDown(this.#journal.take()))
  }

  /**
   * Starts moving the whole journal in slices, with time for other operations in between. The journal keeps everything until the end; then
   * only records changed meanwhile stay in it.
   */
  #move(): void {
    const entries = this.#journal.sorted()
    let next = 0
    let seen = this.#journal.entries
    const slice = (): number => {
      // Twice what has arrived since the last slice, or the journal would grow throughout a burst.
      const most = Math.max(SLICE, 2 * (this.#journal.entries - seen))
      seen = this.#journal.entries
      if (next >= entries.length) this.#journal.drop(entries)
      const some = entries.slice(next, next + most)
      next += most
      return this.#operations.settleDown(this.#journal.stillIn(some))
    }
    const go = (): void => {
      const isLast = next >= entries.length
      this.#step = this.#moving(slice) && !isLast ? setImmediate(go) : undefined
    }
    this.#step = setImmediate(go)
  }

  #sweep(): void {
    let buckets = 0
    // Also reads the journal: after a start or a failure there may be no operation for long.
    const pruned = this.#removing(() => {
      const removed = this.#operations.prune(PRUNE_ROWS)
      buckets = removed.buckets
      return removed.records
    })
    const { entries } = this.#journal
    if (entries > 0 && entries === this.#swept && this.#step === undefined) {
      if (this.#mayMove) this.#move()
      // A full file has no room for a slice.
      else this.#empty()
    }
    this.#mayMove = true
    this.#swept = this.#journal.entries
    const isMore = pruned !== null && Math.max(pruned, buckets) === PRUNE_ROWS
    this.#sweepAfter(isMore ? 0 : PRUNE_EVERY)
  }

  #sweepAfter(time: Millis): void {
    const sweep = (): void => this.#sweep()
    this.#timer = setTimeout(sweep, time).unref()
  }

  #receive(first: Packed | 'close'): void {
    const requests: Request[] = []
    const memory: ArrayBuffer[] = []
    let next: { message: Packed | 'close' } | undefined = { message: first }
    for (; next !== undefined && next.message !== 'close'; next = receiveMessageOnPort(port)) {
      requests.push(...(next.message.messages as Request[]))
      memory.push(...next.message.memory)
      if (requests.length >= BATCH) break
    }
    const results: unknown[] = []
    for (let at = 0; at < requests.length; at += BATCH)
      results.push(...this.#transact(requests.slice(at, at + BATCH)))
    if (results.length > 0) port.postMessage(...pack(results))
    // Otherwise the bytes stay until garbage collection, which counts objects, and there are few.
    for (const each of memory) each.transfer(0)
    const { entries, length } = this.#journal
    const isFull = entries >= JOURNAL_ENTRIES || length >= JOURNAL_BYTES
    if (isFull && this.#mayMove && this.#step === undefined) this.#move()
    if (next?.message !== 'close') return
    clearTimeout(this.#timer)
    clearImmediate(this.#step)
    this.#empty()
    this.#db.close()
    port.close()
  }
}

function post(message: Message): void {
  port.postMessage(message)
}

openPatiently(options).then(
  (db) => {
    new Service(db).start()
    post({ opened: true })
  },
  (error: Error) => {
    post({ failed: error.message })
    port.close()
  },
)
