import type { Millis, RecordId } from '../core/record.ts'
import type { CompletionResult } from '../protect/outcomes.ts'
import type { Execution, RequestSummary } from '../protect/request.ts'
import { RecordMap } from '../runtime/record-map.ts'
import type { Note } from '../store/register.ts'

/** Long enough that a normal request makes one entry, short enough that the claims of slow requests survive a crash. */
const FLUSH_EVERY: Millis = 250
/** Records with entries not yet written: about 300 bytes each. */
const MAX_RECORDS = 2000
/** Entries of one record between two flushes; more would repeat themselves. */
const MAX_ENTRIES = 20
/** Concurrent writes to the store. */
const BATCH = 50
/** How often lost entries are reported: while the store is down, all are lost. */
const REPORT_EVERY: Millis = 60_000
/** Characters kept of a text from outside, such as a reason. */
const MAX_TEXT = 200

interface HistoryEntry {
  readonly event: string
  /** Consecutive entries with the same event and the same `of` are one. */
  readonly of: string | number
  readonly first: Millis
  last: Millis
  count: number
  detail: Readonly<Record<string, unknown>>
}

/** An execution that has been normal so far: claimed, and perhaps stored. */
interface Begun {
  readonly execution: Execution
  readonly at: Millis
  storedAt: Millis | null
}

export interface HistoryOptions {
  readonly note: (id: RecordId, notes: readonly Note[]) => Promise<boolean>
  /** Name of this process, without spaces. */
  readonly replica: string
  /** Entries were lost: the store did not accept them, or there were too many at once. */
  readonly onDropped: (count: number) => void
}

/**
 * The history of records, stored beside them for people. Off the request path: written in batches, lost if the store fails. A first
 * execution that was claimed, stored and answered between two flushes needs no entry: its record suffices (docs/adr/0073).
 */
export class History {
  readonly #options: HistoryOptions
  #waiting = new Map<RecordId, HistoryEntry[]>()
  readonly #begun = new RecordMap<Begun>()
  #timer: NodeJS.Timeout | null = null
  #flushing: Promise<void> | null = null
  #dropped = 0
  #reportedAt = Number.NEGATIVE_INFINITY
  #closed = false

  constructor(options: HistoryOptions) {
    this.#options = options
  }

  began(execution: Execution): void {
    this.#tellBegun(execution.id)
    this.#begun.set(execution.id, { execution, at: performance.now(), storedAt: null })
    this.#schedule()
  }

  completed(result: CompletionResult, id: RecordId, cause: string | null = null): void {
    const begun = this.#begun.get(id)
    if (begun !== undefined && begun.storedAt === null && result === 'stored')
      begun.storedAt = performance.now()
    else this.add(id, 'settled', result, cause === null ? { result } : { result, cause })
  }

  answered(summary: RequestSummary): void {
    const { id, outcome, before, after, fence, status, upstreamMs, cause } = summary
    if (id === null) return
    if (fence === null)
      return this.add(id, outcome ?? 'aborted', this.#options.replica, { status, state: after })
    let began: Millis | undefined
    const begun = outcome === 'executed' ? this.#begun.get(id) : undefined
    if (begun !== undefined && begun.storedAt !== null && begun.execution.attempt.fence === fence) {
      this.#begun.delete(id)
      if (before === 'absent') return
      began = begun.at
    }
    const detail = { fence, status, upstreamMs: Math.round(upstreamMs), before, after, cause }
    this.add(id, outcome ?? 'aborted', fence, detail, began)
  }

  /** `detail`: no secrets, and nothing from requests. */
  add(
    id: RecordId,
    event: string,
    of: string | number,
    detail: HistoryEntry['detail'],
    first = performance.now(),
    last = performance.now(),
  ): void {
    this.#tellBegun(id)
    let entries = this.#waiting.get(id)
    if (entries === undefined) {
      if (this.#waiting.size >= MAX_RECORDS || this.#closed) {
        this.#dropped++
        return
      }
      entries = []
      this.#waiting.set(id, entries)
      this.#schedule()
    }
    const newest = entries.at(-1)
    if (newest !== undefined && newest.event === event && newest.of === of) {
      newest.count++
      newest.last = last
      newest.detail = detail
    } else if (entries.length < MAX_ENTRIES) {
      entries.push({ event, of, first, last, count: 1, detail })
    } else this.#dropped++
  }

  /** The record's execution is unusual, or still running: notes what it has done so far. */
  #tellBegun(id: RecordId): void {
    const begun = this.#begun.get(id)
    if (begun === undefined) return
    this.#begun.delete(id)
    const { at, storedAt, execution } = begun
    const { fence, attempts } = execution.attempt
    this.add(id, 'claimed', fence, { fence, attempts, before: execution.before }, at, at)
    if (storedAt !== null) this.add(id, 'settled', 'stored', { result: 'stored' }, storedAt, storedAt)
  }

  /** Writes waiting entries, with executions that began at least `age` ago; resolves when they are written or lost. */
  flush(age: Millis = 0): Promise<void> {
    this.#flushing ??= this.#flush(age).finally(() => {
      this.#flushing = null
      this.#schedule()
    })
    return this.#flushing
  }

  async close(): Promise<void> {
    // A flush by the timer leaves out executions that have just begun.
    await this.#flushing
    await this.flush()
    this.#closed = true
    if (this.#timer !== null) clearTimeout(this.#timer)
    await this.flush()
  }

  #schedule(): void {
    if (this.#timer !== null || this.#flushing !== null) return
    if (this.#waiting.size + this.#begun.size === 0) return
    this.#timer = setTimeout(() => {
      this.#timer = null
      // Executions that began since the last flush are about to end normally.
      void this.flush(FLUSH_EVERY)
    }, FLUSH_EVERY).unref()
  }

  async #flush(age: Millis): Promise<void> {
    const until = performance.now() - age
    for (const [id, { at }] of this.#begun) if (at <= until) this.#tellBegun(id)
    const all = [...this.#waiting]
    this.#waiting = new Map()
    for (let at = 0; at < all.length; at += BATCH) {
      const now = performance.now()
      const batch = all.slice(at, at + BATCH)
      const written = await Promise.allSettled(
        batch.map(async ([id, entries]) => this.#options.note(id, this.#notes(entries, now))),
      )
      const failed = written.filter(({ status }) => status === 'rejected').length
      this.#dropped += failed
      if (failed < batch.length) continue
      // The store accepts nothing: do not wait for it, especially at shutdown.
      this.#dropped += all.length - at - batch.length
      break
    }
    if (this.#dropped === 0 || (performance.now() - this.#reportedAt < REPORT_EVERY && !this.#closed)) return
    this.#reportedAt = performance.now()
    this.#options.onDropped(this.#dropped)
    this.#dropped = 0
  }

  #notes(entries: readonly HistoryEntry[], now: Millis): Note[] {
    const { replica } = this.#options
    return entries.map(({ event, of, count, first, last, detail }) => ({
      tag: `${event}:${of}`,
      count,
      firstAgo: now - first,
      lastAgo: now - last,
      text: JSON.stringify(short({ replica, ...detail })),
    }))
  }
}

/** Drops unknown values and cuts long texts. */
function short(detail: HistoryEntry['detail']): Record<string, unknown> {
  const cut = (value: unknown): unknown =>
    typeof value === 'string' && value.length > MAX_TEXT ? `${value.slice(0, MAX_TEXT - 1)}…` : value
  return Object.fromEntries(
    Object.entries(detail).flatMap(([name, value]) => (value == null ? [] : [[name, cut(value)]])),
  )
}
