import { hash } from 'node:crypto'
import { setTimeout as wait } from 'node:timers/promises'
import { PHASES, type Phase } from '../../core/copies.ts'
import type { Millis, RecordDraft, RecordId, Spans } from '../../core/record.ts'
import type { PhaseGuard } from '../around.ts'
import { decodeRecord, encodeDraft } from '../record/codec.ts'
import { NO_REQUEST } from '../records.ts'
import {
  CorruptRecord,
  type KeptNote,
  OutOfPhase,
  type Page,
  RecordLocked,
  type Store,
  StoreUnavailable,
} from '../register.ts'
import { areTheSame } from './copying.ts'

/*
 * Tracks which phases of a migration have living replicas. Each phase has a mark in both stores: a record that expires unless renewed
 * (docs/adr/0101).
 */

/** How long a mark outlives its last renewal, and counts after it was seen: a failover may lose the mark while its replicas live. */
export const MARKED_FOR: Millis = 15_000
export const MARK_SPANS: Spans = { dueIn: MARKED_FOR, dropIn: MARKED_FOR }
/** How long a replica relies on its own mark: a claim sent by then arrives while the mark exists. */
export const SURE_FOR: Millis = 10_000
export const RENEW_EVERY: Millis = 3_000
export const RETRY_EVERY: Millis = 500

/** The store that a migration moves records from, or to. */
type Side = 'from' | 'to'

/** The stores that decide who claims in a phase: neighbouring ones share one. */
export const DECIDING: Readonly<Record<Phase, readonly Side[]>> = {
  mirror: ['from'],
  both: ['from', 'to'],
  new: ['to'],
}

/** Different stores would decide, and each would execute what the other has claimed. */
const APART: Readonly<Record<Phase, Phase | null>> = { mirror: 'new', both: null, new: 'mirror' }

/** A replica two phases away is alive. */
export class PhaseConflict extends Error {
  override readonly name = 'PhaseConflict'
}

/** One mark for all replicas of a phase, so that one command renews it, however many there are. */
export function markOf(phase: Phase): RecordId {
  return markId(`migration/1\0${phase}`)
}

function markId(name: string): RecordId {
  return hash('sha256', `idempotency-proxy/${name}`, 'base64url') as RecordId
}

/** The mark of what identifies records in a service ({@link file://./agreement.ts}). */
export const IDENTIFICATION_MARK = markId('identification/1')

/** The mark of what a service forwards to ({@link file://../other-upstream.ts}). */
export const UPSTREAM_MARK = markId('upstream/1')

const MARKS: ReadonlySet<RecordId> = new Set([...PHASES.map(markOf), IDENTIFICATION_MARK, UPSTREAM_MARK])

/** Marks are no records of requests. */
export function withoutMarks({ ids, next }: Page): Page {
  return { ids: ids.filter((id) => !MARKS.has(id)), next }
}

const TOKEN = Buffer.alloc(16, 'mark')
const STATE = 'failed_retryable'

interface Mark {
  /** 16 bytes, shared by all who may renew it. */
  readonly token: Buffer
  readonly route: string
  /** Its content, for machines. */
  readonly path: string
  /** Its meaning, for people. */
  readonly about: string
}

export function markDraft({ token, route, path, about }: Mark): RecordDraft {
  const lastError = `no request: a mark of ${about}`
  return { ...NO_REQUEST, state: STATE, token, route, method: 'MARK', path, lastError }
}

export async function isMarked(store: Pick<Store, 'get'>, phase: Phase): Promise<boolean> {
  return (await store.get(markOf(phase))).bytes !== null
}

/** The token of the replica that created the phase's mark; null: no replica is alive in it. */
export async function enteredBy(store: Store, phase: Phase): Promise<readonly KeptNote[] | null> {
  return (await isMarked(store, phase)) ? store.history.read(markOf(phase)) : null
}

/** Which of the two stores of a migration this is, if a replica in that phase is alive. Null: none is. */
async function markedAs(store: Pick<Store, 'get'>, phase: Phase): Promise<Side | null> {
  const { bytes } = await store.get(markOf(phase))
  return bytes === null ? null : decodeRecord(bytes).path.endsWith('/from') ? 'from' : 'to'
}

/** Renews the mark of a phase. True: there was none. */
async function markPhase(store: Store, phase: Phase, side: Side): Promise<boolean> {
  const id = markOf(phase)
  const about = `the migration between two stores, replicas in phase ${phase} are alive`
  const bytes = (): Buffer =>
    encodeDraft(markDraft({ token: TOKEN, route: 'migration', path: `/${phase}/${side}`, about }))
  for (let round = 0; round < 3; round++) {
    const renewed = await store.swap(id, { token: TOKEN, states: [STATE] }, bytes(), MARK_SPANS, false)
    if (renewed.done) return false
    if (renewed.bytes !== null) throw new RecordLocked(`the mark of phase ${phase} was changed`)
    if ((await store.put(id, bytes(), MARK_SPANS, 'again')).done) return true
  }
  throw new RecordLocked(`the mark of ${about} keeps changing`)
}

interface Sides {
  readonly from: Store
  readonly to: Store
}

interface PhaseOptions {
  readonly phase: Phase
  /** Name of this replica, for people. */
  readonly replica: string
  /** Logs why it may not claim; null: it may again. */
  readonly say: (why: string | null) => void
  /** Monotonic. */
  readonly clock?: () => Millis
  /** Sleeps by that clock. */
  readonly pause?: (time: Millis) => Promise<unknown>
}

/**
 * Announces that this replica is alive in its phase, and makes sure that no replica two phases away is. Until it is sure, it claims
 * nothing; it writes outcomes as usual.
 */
export class Presence implements PhaseGuard {
  readonly clock: () => Millis
  sureUntil = Number.NEGATIVE_INFINITY
  readonly #sides: Sides
  readonly #options: PhaseOptions
  readonly #pause: (time: Millis) => Promise<unknown>
  readonly #stopping = new AbortController()
  #running: Promise<void> = Promise.resolve()
  #conflict: string | null = null
  #apartUntil = Number.NEGATIVE_INFINITY
  #reported: string | null | undefined = undefined
  /** By then, every replica without `store.migrate` that still claims has seen the mark. */
  #seenFrom: Millis | null = null

  constructor(sides: Sides, options: PhaseOptions) {
    this.#sides = sides
    this.#options = options
    this.clock = options.clock ?? performance.now.bind(performance)
    this.#pause = options.pause ?? wait
  }

  /**
   * Enters the phase, or keeps trying while a store does not answer.
   *
   * @throws {PhaseConflict} if it must not.
   */
  async enter(): Promise<void> {
    const { from, to } = this.#sides
    try {
      if (await areTheSame(from, to))
        throw new PhaseConflict('store.url and store.migrate.from are the same store')
      await this.renew()
      while (this.#conflict === null && this.#seenFrom !== null) {
        await this.#pause(RETRY_EVERY)
        await this.renew()
      }
      if (this.#conflict !== null) throw new PhaseConflict(this.#conflict)
    } catch (error) {
      if (!(error instanceof StoreUnavailable)) throw error
      this.#report(error.message)
    }
    const pause = () => (this.refusal === null ? RENEW_EVERY : RETRY_EVERY)
    this.#running = untilAborted(this.#stopping.signal, pause, () =>
      this.renew().catch((error: Error) => {
        if (this.refusal !== null) this.#report(`its phase cannot be announced: ${error.message}`)
      }),
    )
  }

  /** Why nothing may be claimed now; null: it may. */
  get refusal(): string | null {
    if (this.clock() < this.sureUntil) return null
    return this.#conflict ?? `cannot tell whether a replica two phases from ${this.#options.phase} is alive`
  }

  /** Checks, announces, then checks again: of two replicas that start at once, at least one sees the other. */
  async renew(): Promise<void> {
    const { phase, replica } = this.#options
    const { from, to } = this.#sides
    const began = this.clock()
    const isNew = this.clock() >= this.sureUntil
    // A replica that was unsure for a while must not stop the others.
    if (isNew && (await this.#findConflict())) return
    const isFirst = await markPhase(from, phase, 'from')
    const theirs = markPhase(to, phase, 'to')
    // In phase `mirror`, the new store may be missing.
    await (phase === 'mirror' ? theirs.catch(() => {}) : theirs)
    if (await this.#findConflict()) return
    if (isNew && !(await this.#isSeen(isFirst))) return
    this.sureUntil = began + SURE_FOR
    this.#report(null)
    if (isNew) {
      const note = { tag: replica, count: 1, firstAgo: 0, lastAgo: 0, text: 'entered' }
      await from.history.append(markOf(phase), [note]).catch(() => {})
    }
  }

  async ensure(): Promise<void> {
    const { refusal } = this
    if (refusal !== null) throw new OutOfPhase(refusal, false)
  }

  async stop(): Promise<void> {
    this.#stopping.abort()
    await this.#running
  }

  /** Before phase `new` begins, replicas that claim only in the old store must have stopped. */
  async #isSeen(isFirst: boolean): Promise<boolean> {
    const { phase } = this.#options
    if (phase !== 'new') return true
    if (isFirst || this.#seenFrom === null) this.#seenFrom = this.clock() + SURE_FOR
    // The replica that created the mark has waited, and the mark has existed since.
    const isEntered = !isFirst && (await this.#sides.from.history.read(markOf(phase))).length > 0
    if (isEntered || this.clock() >= this.#seenFrom) {
      this.#seenFrom = null
      return true
    }
    this.#report(`phase new begins: waiting ${SURE_FOR / 1000} s until replicas without store.migrate notice`)
    return false
  }

  async #findConflict(): Promise<boolean> {
    const { phase } = this.#options
    const apart = APART[phase]
    // All of these phases use the old store.
    if (apart === null || !(await isMarked(this.#sides.from, apart))) {
      if (this.clock() < this.#apartUntil) return true
      this.#conflict = null
      return false
    }
    this.#apartUntil = this.clock() + MARKED_FOR
    this.sureUntil = Number.NEGATIVE_INFINITY
    this.#conflict = `a replica in phase ${apart} is alive, or was ${MARKED_FOR / 1000} s ago: phase ${phase} must not run beside it, since each would execute what the other has claimed; move all replicas through phase both`
    this.#report(this.#conflict)
    return true
  }

  #report(why: string | null): void {
    if (why === this.#reported) return
    this.#reported = why
    this.#options.say(why)
  }
}

/** By side of a migration: the phases in which another store decides, or has records that this one lacks. */
const NOT_ALONE: Readonly<Record<Side, readonly Phase[]>> = { from: ['new'], to: ['mirror', 'both'] }

/**
 * For a replica without `store.migrate`: checks that its store decides alone. It announces nothing; a replica that enters phase `new` waits
 * until all replicas that have not checked since have stopped claiming.
 */
export class PhaseWatch implements PhaseGuard {
  readonly clock: () => Millis
  sureUntil = Number.NEGATIVE_INFINITY
  readonly #store: Pick<Store, 'get'>
  readonly #say: (why: string | null) => void
  readonly #stopping = new AbortController()
  #running: Promise<void> = Promise.resolve()
  #looking: Promise<void> | null = null
  #conflict: string | null = null
  #apartUntil = Number.NEGATIVE_INFINITY

  constructor(
    store: Pick<Store, 'get'>,
    { say, clock = performance.now.bind(performance) }: Pick<PhaseOptions, 'say' | 'clock'>,
  ) {
    this.#store = store
    this.#say = say
    this.clock = clock
  }

  /**
   * Checks, and keeps checking, even while the store does not answer.
   *
   * @throws {PhaseConflict} if it must not start.
   */
  async enter(): Promise<void> {
    await this.#look().catch(unlessBug)
    if (this.#conflict !== null) throw new PhaseConflict(this.#conflict)
    const pause = () => RENEW_EVERY
    this.#running = untilAborted(this.#stopping.signal, pause, () => this.#look().catch(unlessBug))
  }

  /** Why nothing may be claimed now; null: it may. */
  get refusal(): string | null {
    if (this.clock() < this.sureUntil) return null
    return this.#conflict ?? 'cannot tell whether a migration has gone past this replica'
  }

  async ensure(): Promise<void> {
    await this.#look()
    if (this.#conflict !== null) throw new OutOfPhase(this.#conflict, false)
  }

  async stop(): Promise<void> {
    this.#stopping.abort()
    await this.#running
  }

  /** One check for all concurrent callers. */
  #look(): Promise<void> {
    this.#looking ??= this.#lookOnce().finally(() => {
      this.#looking = null
    })
    return this.#looking
  }

  async #lookOnce(): Promise<void> {
    const began = this.clock()
    const sides = await Promise.all(PHASES.map(async (phase) => markedAs(this.#store, phase)))
    const apart = PHASES.find((phase, n) => NOT_ALONE[sides[n] ?? 'to'].includes(phase) && sides[n] !== null)
    if (apart !== undefined) this.#apartUntil = this.clock() + MARKED_FOR
    else if (this.clock() < this.#apartUntil) return
    this.sureUntil = apart === undefined ? began + SURE_FOR : Number.NEGATIVE_INFINITY
    const before = this.#conflict
    this.#conflict = apart === undefined ? null : conflictOf(apart)
    if (this.#conflict !== before) this.#say(this.#conflict)
  }
}

/** Repeats the work, pausing in between. The pauses do not keep the process alive. */
export async function untilAborted(
  signal: AbortSignal,
  pause: () => Millis,
  work: () => Promise<void>,
): Promise<void> {
  while (!signal.aborted) {
    await wait(pause(), undefined, { signal, ref: false }).catch(() => {})
    if (!signal.aborted) await work()
  }
}

/** The next check retries. */
function unlessBug(error: unknown): void {
  if (!(error instanceof StoreUnavailable || error instanceof CorruptRecord)) throw error
}

function conflictOf(phase: Phase): string {
  const why =
    phase === 'new'
      ? 'it moves the records of this store to another, which decides alone'
      : 'this store does not have all records yet'
  return `a replica in phase ${phase} of a migration (store.migrate) is alive, or was ${MARKED_FOR / 1000} s ago: ${why}; a replica without store.migrate must not run beside it`
}
