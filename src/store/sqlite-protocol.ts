import type { Rate } from '../core/policy.ts'
import type { Millis, RecordId, Spans } from '../core/record.ts'
import type { Place } from './cursor.ts'
import type { Condition, Note, Renewal } from './register.ts'

export const BUSY = 5
const READONLY = 8
const FULL = 13

/** Between `sqlite.ts` and its worker. A reply's `result` is what the operation of the port answers. */
export type StoreOperation =
  | { readonly op: 'put'; readonly id: RecordId; readonly bytes: Uint8Array; readonly spans: Spans }
  | {
      readonly op: 'swap'
      readonly id: RecordId
      readonly condition: Condition
      readonly bytes: Uint8Array
      readonly spans: Spans
      readonly nextFence: boolean
    }
  | { readonly op: 'get'; readonly id: RecordId }
  | { readonly op: 'renew'; readonly items: readonly Renewal[] }
  | { readonly op: 'due'; readonly limit: number }
  | { readonly op: 'remove'; readonly id: RecordId; readonly version: number }
  | { readonly op: 'list'; readonly beginning: string; readonly after: string; readonly limit: number }
  | { readonly op: 'unresolved'; readonly after: Place; readonly limit: number }
  | { readonly op: 'note'; readonly id: RecordId; readonly notes: readonly Note[] }
  | { readonly op: 'notes'; readonly id: RecordId }
  | { readonly op: 'throttle'; readonly bucket: string; readonly rate: Rate; readonly units: 1 | -1 }
  | { readonly op: 'ping' }

export interface Request {
  readonly seq: number
  readonly operation: StoreOperation
}

export type Failure = { readonly message: string; readonly full: boolean; readonly maybeApplied: boolean }
export type Reply = { readonly seq: number } & ({ readonly result: unknown } | { readonly failure: Failure })

/** What the worker posts: first whether it could open the file, then replies of one transaction each, and how many rows it pruned. */
export type Message =
  | { readonly opened: true }
  | { readonly failed: string }
  | { readonly replies: readonly Reply[] }
  | { readonly pruned: number }

export interface WorkerOptions {
  readonly file: string
  /** Whose rows: those of other services in the file are never seen. */
  readonly service: string
  readonly busyMs: Millis
  /** One number: milliseconds added to the clock. */
  readonly skew: SharedArrayBuffer
  /** Bound of the file in pages; 0: none. */
  readonly maxPages: number
}

/** What an operation of a transaction answers where that failed. */
export function failureOf(error: unknown, committing: boolean): Failure {
  const code = codeOf(error)
  const full = code === FULL || code === READONLY
  return {
    message: `SQLite: ${(error as Error).message}`,
    full,
    // A COMMIT that fails for another reason than room or a lock may have reached the disk.
    maybeApplied: committing && !full && code !== BUSY,
  }
}

/** SQLite's primary result code. */
export function codeOf(error: unknown): number {
  return ((error as { errcode?: number }).errcode ?? 0) & 0xff
}
