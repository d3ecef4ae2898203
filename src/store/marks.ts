import { hash } from 'node:crypto'
import { setTimeout as wait } from 'node:timers/promises'
import { PHASES, type Phase } from '../core/copies.ts'
import type { Millis, RecordDraft, RecordId, Spans } from '../core/record.ts'
import type { PhaseGuard } from './around.ts'
import { NO_REQUEST } from './records.ts'
import { OutOfPhase, type Page, unlessBug } from './register.ts'

/*
 * Marks: records that belong to no request, by which replicas tell each other that they are alive. A mark expires unless it is renewed.
 */

/** How long a mark outlives its last renewal, and counts after it was seen: a failover may lose the mark while its replicas live. */
export const MARKED_FOR: Millis = 15_000
export const MARK_SPANS: Spans = { dueIn: MARKED_FOR, dropIn: MARKED_FOR }
/** How long a replica relies on its own mark: a claim sent by then arrives while the mark exists. */
export const SURE_FOR: Millis = 10_000
const RENEW_EVERY: Millis = 3_000
export const RETRY_EVERY: Millis = 500

/** One mark for all replicas in a phase of a migration, so that one command renews it, however many there are. */
export function markOf(phase: Phase): RecordId {
  return markId(`migration/1\0${phase}`)
}

/** The mark of what identifies records in a service ({@link file://./agreement.ts}). */
export const IDENTIFICATION_MARK = markId('identification/1')

/** The mark of what a service forwards to ({@link file://./other-upstream.ts}). */
export const UPSTREAM_MARK = markId('upstream/1')

function markId(name: string): RecordId {
  return hash('sha256', `idempotency-proxy/${name}`, 'base64url') as RecordId
}

const MARKS: ReadonlySet<RecordId> = new Set([...PHASES.map(markOf), IDENTIFICATION_MARK, UPSTREAM_MARK])

/** For lists of the records of requests. */
export function withoutMarks({ ids, next }: Page): Page {
  return { ids: ids.filter((id) => !MARKS.has(id)), next }
}

interface Mark {
  /** 16 bytes, shared by all who may renew it. */
  readonly token: Buffer
  readonly route: string
  /** Its content, for machines. */
  readonly path: string
  /** Its meaning, for people. */
  readonly about: string
}

export const MARK_STATE = 'failed_retryable'

export function markDraft({ token, route, path, about }: Mark): RecordDraft {
  const lastError = `no request: a mark of ${about}`
  return { ...NO_REQUEST, state: MARK_STATE, token, route, method: 'MARK', path, lastError }
}

export interface MarkGuardOptions {
  /** For the log: why nothing is claimed; null: it may be. */
  readonly say: (why: string | null) => void
  /** Monotonic. */
  readonly clock?: () => Millis
}

/** Checks marks, and keeps checking them. Nothing is claimed until it is sure; outcomes are written, and records answered, as usual. */
export abstract class MarkGuard implements PhaseGuard {
  readonly clock: () => Millis
  sureUntil = Number.NEGATIVE_INFINITY
  /** Why nothing is claimed although the store answers; null: nothing prevents it. */
  conflict: string | null = null
  /** What was said last. */
  protected said: string | null | undefined = null
  /** Why nothing is claimed, if it is not a conflict. */
  protected abstract readonly unsure: string
  readonly #say: MarkGuardOptions['say']
  readonly #stopping = new AbortController()
  #running: Promise<void> = Promise.resolve()
  protected checking: Promise<void> | null = null
  /** The last check was possible. */
  #isChecked = false

  constructor({ say, clock = performance.now.bind(performance) }: MarkGuardOptions) {
    this.#say = say
    this.clock = clock
  }

  /** Calls {@link sure} or {@link refuse}, or neither while it cannot tell. */
  protected abstract check(): Promise<void>

  /** The first check; throws if the replica must not start. */
  protected begin(): Promise<void> {
    return this.renew()
  }

  /** A check was not possible. The next one, by the timer or for a claim, tries again. */
  protected failed(_error: Error): void {}

  /**
   * Starts checking, and goes on while the store does not answer.
   * @throws if this replica must not start.
   */
  async enter(): Promise<void> {
    const failed = (error: Error): void => {
      unlessBug(error)
      this.failed(error)
    }
    await this.begin().catch(failed)
    this.#running = this.#keepChecking(failed)
  }

  /** The pauses do not keep the process alive. */
  async #keepChecking(failed: (error: Error) => void): Promise<void> {
    const { signal } = this.#stopping
    while (!signal.aborted) {
      // A failover may have lost the mark, and its grace may be shorter than the usual pause.
      const pause = this.#isChecked && this.refusal === null ? RENEW_EVERY : RETRY_EVERY
      await wait(pause, undefined, { signal, ref: false }).catch(() => {})
      if (!signal.aborted) await this.renew().catch(failed)
    }
  }

  /**
   * One check serves all concurrent callers.
   * @throws {StoreUnavailable}
   */
  renew(): Promise<void> {
    this.checking ??= this.#check().finally(() => {
      this.checking = null
    })
    return this.checking
  }

  async #check(): Promise<void> {
    this.#isChecked = false
    await this.check()
    this.#isChecked = true
  }

  /** Why nothing may be claimed now; null: it may. */
  get refusal(): string | null {
    return this.clock() < this.sureUntil ? null : (this.conflict ?? this.unsure)
  }

  async ensure(): Promise<void> {
    if (this.#stopping.signal.aborted) throw new OutOfPhase('this replica has ended', false)
    await this.renew()
    const { refusal } = this
    if (refusal !== null) throw new OutOfPhase(refusal, false)
  }

  async stop(): Promise<void> {
    this.#stopping.abort()
    await this.#running
    await this.checking?.catch(() => {})
  }

  /** `began`: when the check began. */
  protected sure(began: Millis, note: string | null = null): void {
    this.conflict = null
    this.sureUntil = began + SURE_FOR
    this.report(note)
  }

  protected refuse(why: string): void {
    this.conflict = why
    this.sureUntil = Number.NEGATIVE_INFINITY
    this.report(why)
  }

  protected report(why: string | null): void {
    if (why === this.said) return
    this.said = why
    this.#say(why)
  }
}
