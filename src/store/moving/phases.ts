import { setTimeout as wait } from 'node:timers/promises'
import { PHASES, type Phase } from '../../core/copies.ts'
import type { Millis } from '../../core/record.ts'
import {
  MARK_SPANS,
  MARK_STATE,
  MARKED_FOR,
  MarkGuard,
  type MarkGuardOptions,
  markDraft,
  markOf,
  RETRY_EVERY,
  SURE_FOR,
} from '../marks.ts'
import { decodeRecord, encodeDraft } from '../record/codec.ts'
import { type KeptNote, OutOfPhase, RecordLocked, type Store } from '../register.ts'
import { areTheSame } from './copying.ts'

/*
 * Tracks which phases of a migration have living replicas. Each phase has a mark in both stores (docs/adr/0101).
 */

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

const TOKEN = Buffer.alloc(16, 'mark')

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
    const renewed = await store.swap(id, { token: TOKEN, states: [MARK_STATE] }, bytes(), MARK_SPANS, false)
    if (renewed.done) return false
    if (renewed.bytes !== null) throw new RecordLocked(`the mark of phase ${phase} was changed`)
    if ((await store.put(id, bytes(), MARK_SPANS, 'again')).done) return true
  }
  throw new RecordLocked(`the mark of ${about} keeps changing`)
}

/** Notices replicas beside which this one must not claim. */
abstract class ApartGuard extends MarkGuard {
  #apartUntil = Number.NEGATIVE_INFINITY

  /** `why`: such a replica is alive; null: none is seen, which counts once one that was seen could have renewed its mark. */
  protected isApart(why: string | null): boolean {
    if (why !== null) {
      this.#apartUntil = this.clock() + MARKED_FOR
      this.refuse(why)
    } else if (this.clock() >= this.#apartUntil) {
      this.conflict = null
      return false
    }
    return true
  }

  protected override async begin(): Promise<void> {
    await super.begin()
    if (this.conflict !== null) throw new PhaseConflict(this.conflict)
  }
}

interface Sides {
  readonly from: Store
  readonly to: Store
}

interface PresenceOptions extends MarkGuardOptions {
  readonly phase: Phase
  /** Name of this replica, for people. */
  readonly replica: string
  /** Sleeps by the clock. */
  readonly pause?: (time: Millis) => Promise<unknown>
}

/** Announces that this replica is alive in its phase, and makes sure that no replica two phases away is. */
export class Presence extends ApartGuard {
  /** It also says when it has entered. */
  protected override said: string | null | undefined = undefined
  protected readonly unsure: string
  readonly #sides: Sides
  readonly #options: PresenceOptions
  /** By then, every replica without `store.migrate` that still claims has seen the mark. */
  #seenFrom: Millis | null = null

  constructor(sides: Sides, options: PresenceOptions) {
    super(options)
    this.#sides = sides
    this.#options = options
    this.unsure = `cannot tell whether a replica two phases from ${options.phase} is alive`
  }

  protected override async begin(): Promise<void> {
    const { pause = wait } = this.#options
    if (await areTheSame(this.#sides.from, this.#sides.to))
      throw new PhaseConflict('store.url and store.migrate.from are the same store')
    await super.begin()
    while (this.#seenFrom !== null) {
      await pause(RETRY_EVERY)
      await super.begin()
    }
  }

  /** Claims do not check: each check writes to both stores. */
  override async ensure(): Promise<void> {
    const { refusal } = this
    if (refusal !== null) throw new OutOfPhase(refusal, false)
  }

  protected override failed({ message }: Error): void {
    if (this.refusal !== null) this.report(`its phase cannot be announced: ${message}`)
  }

  /** Checks, announces, then checks again: of two replicas that start at once, at least one sees the other. */
  protected async check(): Promise<void> {
    const { phase, replica } = this.#options
    const { from, to } = this.#sides
    const began = this.clock()
    const isNew = began >= this.sureUntil
    // A replica that was unsure for a while must not stop the others.
    if (isNew && (await this.#findConflict())) return
    const isFirst = await markPhase(from, phase, 'from')
    const theirs = markPhase(to, phase, 'to')
    // In phase `mirror`, the new store may be missing.
    await (phase === 'mirror' ? theirs.catch(() => {}) : theirs)
    if (await this.#findConflict()) return
    if (isNew && !(await this.#isSeen(isFirst))) return
    this.sure(began)
    if (!isNew) return
    const note = { tag: replica, count: 1, firstAgo: 0, lastAgo: 0, text: 'entered' }
    await from.history.append(markOf(phase), [note]).catch(() => {})
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
    this.report(`phase new begins: waiting ${SURE_FOR / 1000} s until replicas without store.migrate notice`)
    return false
  }

  async #findConflict(): Promise<boolean> {
    const { phase } = this.#options
    const apart = APART[phase]
    // All of these phases use the old store.
    const isAlive = apart !== null && (await isMarked(this.#sides.from, apart))
    return this.isApart(
      isAlive
        ? `a replica in phase ${apart} is alive, or was ${MARKED_FOR / 1000} s ago: phase ${phase} must not run beside it, since each would execute what the other has claimed; move all replicas through phase both`
        : null,
    )
  }
}

/** By side of a migration: the phases in which another store decides, or has records that this one lacks. */
const NOT_ALONE: Readonly<Record<Side, readonly Phase[]>> = { from: ['new'], to: ['mirror', 'both'] }

/**
 * For a replica without `store.migrate`: checks that its store decides alone. It announces nothing; a replica that enters phase `new` waits
 * until all replicas that have not checked since have stopped claiming.
 */
export class PhaseWatch extends ApartGuard {
  protected readonly unsure = 'cannot tell whether a migration has gone past this replica'
  readonly #store: Pick<Store, 'get'>

  constructor(store: Pick<Store, 'get'>, options: MarkGuardOptions) {
    super(options)
    this.#store = store
  }

  protected async check(): Promise<void> {
    const began = this.clock()
    const sides = await Promise.all(PHASES.map(async (phase) => markedAs(this.#store, phase)))
    const apart = PHASES.find((phase, n) => NOT_ALONE[sides[n] ?? 'to'].includes(phase) && sides[n] !== null)
    if (!this.isApart(apart === undefined ? null : conflictOf(apart))) this.sure(began)
  }
}

function conflictOf(phase: Phase): string {
  const why =
    phase === 'new'
      ? 'it moves the records of this store to another, which decides alone'
      : 'this store does not have all records yet'
  return `a replica in phase ${phase} of a migration (store.migrate) is alive, or was ${MARKED_FOR / 1000} s ago: ${why}; a replica without store.migrate must not run beside it`
}
