import type { Millis, RecordId } from '../core/record.ts'
import type { CompletionResult } from '../protect/outcomes.ts'
import type { Execution, RequestSummary } from '../protect/request.ts'
import type { Note } from '../store/register.ts'

/** Long enough that a usual request is one line, short enough that the claims of slow requests survive a crash. */
const FLUSH_EVERY: Millis = 250
/** Records with entries not yet written: about 300 bytes each. */
const MAX_RECORDS = 2000
/** Entries of one record between two flushes; further ones are more of the same. */
const MAX_ENTRIES = 20
/** Writes to the store at a time. */
const BATCH = 50
/** How often lost entries are reported: a store that is down for long takes none of them. */
const REPORT_EVERY: Millis = 60_000
/** Characters kept of a text from outside, such as a reason. */
const MAX_TEXT = 200

interface Entry {
  readonly event: string
  /** Consecutive entries with the same event and the same `of` are one. */
  readonly of: string | number
  readonly first: Millis
  last: Millis
  count: number
  detail: Readonly<Record<string, unknown>>
}

export interface HistoryOptions {
  readonly note: (id: RecordId, notes: readonly Note[]) => Promise<boolean>
  /** Name of this process, without blanks. */
  readonly replica: string
  /** Entries were lost: the store did not take them, or there were too many at once. */
  readonly onDropped: (count: number) => void
}

/** What happened to records, stored beside them for people. Off the path of requests: written in batches, lost if the store fails. */
export class History {
  readonly #options: HistoryOptions
  #waiting = new Map<RecordId, Entry[]>()
  #timer: NodeJS.Timeout | null = null
  #flushing: Promise<void> | null = null
  #dropped = 0
  #reportedAt = Number.NEGATIVE_INFINITY
  #closed = false

  constructor(options: HistoryOptions) {
    this.#options = options
  }

  began({ id, attempt, before }: Execution): void {
    const { fence, attempts } = attempt
    this.add(id, 'claimed', fence, { fence, attempts, before })
  }

  completed(result: CompletionResult, id: RecordId): void {
    this.add(id, 'settled', result, { result })
  }

  answered({ id, outcome, before, after, fence, status, upstreamMs, cause }: RequestSummary): void {
    if (id === null) return
    const detail =
      fence === null
        ? { status, state: after }
        : { fence, status, upstreamMs: Math.round(upstreamMs), before, after, cause }
    this.add(id, outcome ?? 'aborted', fence ?? this.#options.replica, detail)
  }

  /** `detail`: nothing secret, no content of requests. */
  add(id: RecordId, event: string, of: string | number, detail: Entry['detail']): void {
    const now = performance.now()
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
      newest.last = now
      newest.detail = detail
    } else if (entries.length < MAX_ENTRIES) {
      entries.push({ event, of, first: now, last: now, count: 1, detail })
      if (event === 'executed') joinExecuted(entries)
    } else this.#dropped++
  }

  /** Resolves when the waiting entries are written or lost. */
  flush(): Promise<void> {
    this.#flushing ??= this.#flush().finally(() => {
      this.#flushing = null
      this.#schedule()
    })
    return this.#flushing
  }

  async close(): Promise<void> {
    await this.flush()
    this.#closed = true
    if (this.#timer !== null) clearTimeout(this.#timer)
    await this.flush()
  }

  #schedule(): void {
    if (this.#timer !== null || this.#waiting.size === 0 || this.#flushing !== null) return
    this.#timer = setTimeout(() => {
      this.#timer = null
      void this.flush()
    }, FLUSH_EVERY).unref()
  }

  async #flush(): Promise<void> {
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
      // The store takes nothing: nobody waits for it, least of all a shutdown.
      this.#dropped += all.length - at - batch.length
      break
    }
    if (this.#dropped === 0 || (performance.now() - this.#reportedAt < REPORT_EVERY && !this.#closed)) return
    this.#reportedAt = performance.now()
    this.#options.onDropped(this.#dropped)
    this.#dropped = 0
  }

  #notes(entries: readonly Entry[], now: Millis): Note[] {
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

/** A request that was claimed, stored and answered since the last flush is one entry. */
function joinExecuted(entries: Entry[]): void {
  const [claimed, settled, executed] = entries
  if (executed === undefined || entries.length > 3) return
  if (claimed?.event !== 'claimed' || executed.of !== claimed.of) return
  if (settled?.event !== 'settled' || settled.detail['result'] !== 'stored') return
  entries.splice(0, 3, { ...executed, first: claimed.first })
}

/** Without what is unknown, and with long texts cut. */
function short(detail: Entry['detail']): Record<string, unknown> {
  const cut = (value: unknown): unknown =>
    typeof value === 'string' && value.length > MAX_TEXT ? `${value.slice(0, MAX_TEXT - 1)}…` : value
  return Object.fromEntries(
    Object.entries(detail).flatMap(([name, value]) => (value == null ? [] : [[name, cut(value)]])),
  )
}
