import type { WorkerPlace } from '../compose/store.ts'
import type { ConfigInput } from '../config/load.ts'
import type { RecordId } from '../core/record.ts'
import type { CollectedMetrics } from '../observe/metrics.ts'

/*
 * What the first process and its workers say to each other (docs/adr/0130). The first process sends `begin`, then connections, questions and
 * states; a worker answers.
 */

/** What a worker starts with. */
export interface Begin {
  readonly place: WorkerPlace
  /** The configuration in force: as text, since the file may have changed. */
  readonly source: Pick<ConfigInput, 'file' | 'text' | 'flags'>
  readonly acceptsRescope: boolean
}

/** The questions, each with its argument (`takes`) and its answer (`gives`). */
export interface Questions {
  /** Answered once the event loop turns. */
  turn: { readonly takes: null; readonly gives: null }
  metrics: { readonly takes: null; readonly gives: CollectedMetrics }
  isRunning: { readonly takes: RecordId; readonly gives: boolean }
  /** Writes the outcome of the record that this worker holds, if any. False: the store refuses it. */
  tell: { readonly takes: RecordId; readonly gives: boolean }
  /** Reads this text of the configuration and prepares to use it. The answer says why that is impossible; null: it is prepared. */
  prepare: { readonly takes: string; readonly gives: string | null }
  /** Puts the prepared configuration in force. */
  use: { readonly takes: null; readonly gives: null }
  /** Discards the prepared configuration. */
  drop: { readonly takes: null; readonly gives: null }
}
export type Question = keyof Questions

export type ToWorker =
  | { readonly kind: 'begin'; readonly begin: Begin }
  /** Sent together with a connection. */
  | { readonly kind: 'connection' }
  | { readonly kind: 'question'; readonly id: number; readonly name: Question; readonly takes: unknown }
  /** The state of the whole proxy: whether readiness fails, and whether it will stop. */
  | { readonly kind: 'state'; readonly draining: boolean; readonly stopping: boolean }
  /** No more connections will come: the worker finishes its requests, then ends. */
  | { readonly kind: 'end' }

export type FromWorker =
  | { readonly kind: 'serves' }
  | { readonly kind: 'cannot start'; readonly why: string }
  /** It has the connection and can take another. */
  | { readonly kind: 'took' }
  | { readonly kind: 'answer'; readonly id: number; readonly gives: unknown }
  | { readonly kind: 'failure'; readonly id: number; readonly why: string }
