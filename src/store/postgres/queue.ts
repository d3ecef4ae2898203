import type { Millis, RecordId, Spans } from '../../core/record.ts'
import type { SqlArg, SqlRow } from './link.ts'

/** Operations of a batch, at most. */
const ITEMS = 64
/** Bytes of a batch's records, except for the first. */
const BYTES = 1024 * 1024
/** How long a batch is collected while another is in flight: about the time of a commit. */
const GATHER: Millis = 2

/** `urgent`: outcomes and leases, which go first. `local`: reads, and whatever commits without waiting for a standby. */
export type Kind = 'urgent' | 'plain' | 'local'

/** One of the operations that a {@link Batch} is for. */
export interface BatchItem {
  readonly id: RecordId
  readonly bytes: Buffer
  readonly spans: Spans
  /** Calls of a batch share it: the kind of a claim, or a bit mask of the states that an outcome may replace. */
  readonly rule: number
}

/** A statement for many operations on different records. It answers with a row of its own, then one for each record that it decided on. */
export interface Batch {
  readonly text: string
  readonly argsOf: (items: readonly BatchItem[]) => readonly SqlArg[]
}

export interface Call {
  /** The statement for this operation alone. */
  readonly text: string
  readonly args: () => readonly SqlArg[]
  /** Null: sent alone. */
  together: { readonly batch: Batch; readonly item: BatchItem } | null
  readonly kind: Kind
  /** Order of arrival. */
  readonly order: number
  readonly collectedAt: Millis
  readonly timer: NodeJS.Timeout
  readonly resolve: (row: SqlRow) => void
  readonly reject: (error: Error) => void
  isSettled: boolean
  /** Sent, so perhaps applied. */
  isSent: boolean
}

export interface Statement {
  readonly text: string
  /** The first is the statement's number. */
  readonly args: readonly SqlArg[]
  readonly kind: Kind
  /** More than one only in a batch. */
  readonly calls: readonly Call[]
  readonly batch: Batch | null
  tries: number
}

/** Marks the call as answered: later answers are ignored. */
export function settle(call: Call): Call {
  clearTimeout(call.timer)
  call.isSettled = true
  return call
}

/** Calls that wait for a connection. */
export class Queue {
  readonly #onReady: () => void
  readonly #waiting: Record<Kind, Call[]> = { urgent: [], plain: [], local: [] }
  #turn: NodeJS.Immediate | undefined
  #gathering: NodeJS.Timeout | undefined

  /** `onReady`: a call has become ready to be sent. */
  constructor(onReady: () => void) {
    this.#onReady = onReady
  }

  get isEmpty(): boolean {
    return Object.values(this.#waiting).every(({ length }) => length === 0)
  }

  add(call: Call): void {
    this.#waiting[call.kind].push(call)
    if (call.together === null) return this.#onReady()
    this.#turn ??= setImmediate(() => {
      this.#turn = undefined
      this.#onReady()
    })
  }

  /** These were not applied: each is sent again, alone and before others. */
  again(calls: readonly Call[]): void {
    for (const call of calls.toReversed()) {
      Object.assign(call, { together: null, isSent: false })
      this.#waiting[call.kind].unshift(call)
    }
  }

  remove(call: Call): void {
    this.#waiting[call.kind] = this.#waiting[call.kind].filter((one) => one !== call)
  }

  /** Removes and returns everything. */
  empty(): Call[] {
    clearTimeout(this.#gathering)
    clearImmediate(this.#turn)
    this.#turn = this.#gathering = undefined
    return Object.values(this.#waiting).flatMap((waiting) => waiting.splice(0))
  }

  /** The first call that may be sent: while a batch is in flight, calls are collected for the next. */
  first(kind: Kind, batches: readonly (Batch | null)[]): Call | undefined {
    const waiting = this.#waiting[kind]
    const [first] = waiting
    if (first?.together == null || waiting.length >= ITEMS) return first
    const left = first.collectedAt + GATHER - performance.now()
    if (!batches.includes(first.together.batch) || left <= 0) return first
    this.#gathering ??= setTimeout(() => {
      this.#gathering = undefined
      this.#onReady()
    }, left)
    return
  }

  /** Removes `first` and the calls that share its batch. */
  take(first: Call, number: string): Statement {
    const { kind } = first
    const batch = first.together?.batch ?? null
    if (batch === null) {
      this.#waiting[kind].shift()
      return { text: first.text, args: [number, ...first.args()], kind, calls: [first], batch, tries: 0 }
    }
    const taken = new Map<RecordId, Call>()
    const items: BatchItem[] = []
    let bytes = 0
    this.#waiting[kind] = this.#waiting[kind].filter((call) => {
      const { together } = call
      if (together?.batch !== batch || taken.size >= ITEMS) return true
      // Many calls for one key, from a client that does not wait, must not each wait for a batch of their own.
      if (taken.has(together.item.id)) call.together = null
      if (call.together === null || (taken.size > 0 && bytes + together.item.bytes.length > BYTES))
        return true
      bytes += together.item.bytes.length
      taken.set(together.item.id, call)
      items.push(together.item)
      return false
    })
    const calls = [...taken.values()]
    return { text: batch.text, args: [number, ...batch.argsOf(items)], kind, calls, batch, tries: 0 }
  }
}
