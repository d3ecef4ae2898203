import { hash } from 'node:crypto'
import { setTimeout as wait } from 'node:timers/promises'
import { PHASES, type Phase } from '../core/copies.ts'
import type { Fingerprint, Millis, RecordDraft, RecordId } from '../core/record.ts'
import type { Soon } from '../runtime/scheduling.ts'
import { encodeDraft, isClaim, PREFIX, stateCode } from './codec.ts'
import { areTheSame } from './copying.ts'
import { type KeptNote, OutOfPhase, RecordLocked, type Store, StoreUnavailable } from './register.ts'

/*
 * Which phases of a migration have living replicas: each has a mark in both stores, a record that expires unless renewed (docs/adr/0101).
 */

/** How long a mark outlives its last renewal. */
const MARKED_FOR: Millis = 15_000
/** How long a replica relies on its own mark: any claim sent by then has arrived while the mark was there. */
const SURE_FOR: Millis = 10_000
const RENEW_EVERY: Millis = 3_000
const RETRY_EVERY: Millis = 500

/** Different stores would decide: each would execute what the other has claimed. */
const APART: Readonly<Record<Phase, Phase | null>> = { mirror: 'new', both: null, new: 'mirror' }

/** A replica two phases away is alive. */
export class PhaseConflict extends Error {
  override readonly name = 'PhaseConflict'
}

/** One mark for all replicas of a phase, so that one command renews it, however many there are. */
export function markOf(phase: Phase): RecordId {
  return hash('sha256', `idempotency-proxy/migration/1\0${phase}`, 'base64url') as RecordId
}

const MARKS: ReadonlySet<RecordId> = new Set(PHASES.map(markOf))

/** No record of a request. */
export function isMark(id: RecordId): boolean {
  return MARKS.has(id)
}

const TOKEN = Buffer.alloc(16, 'mark')
const STATE = 'failed_retryable'

function markDraft(phase: Phase): RecordDraft {
  const none = Buffer.alloc(32)
  return {
    state: STATE,
    fence: 0,
    token: TOKEN,
    attempts: 1,
    createdAt: 0,
    route: 'migration',
    method: 'MARK',
    path: `/${phase}`,
    fingerprint: none as Fingerprint,
    rawDigest: none,
    recipe: '',
    key: null,
    lastError: `no request: a mark of the migration between two stores, replicas in phase ${phase} are alive`,
  }
}

export async function isMarked(store: Pick<Store, 'get'>, phase: Phase): Promise<boolean> {
  return (await store.get(markOf(phase))).bytes !== null
}

/** Who created the phase's mark; null: no living replica is in it. */
export async function enteredBy(store: Store, phase: Phase): Promise<readonly KeptNote[] | null> {
  return (await isMarked(store, phase)) ? store.history.read(markOf(phase)) : null
}

async function renewMark(store: Store, phase: Phase): Promise<void> {
  const id = markOf(phase)
  const spans = { dueIn: MARKED_FOR, dropIn: MARKED_FOR }
  for (let round = 0; round < 3; round++) {
    const bytes = (): Buffer => encodeDraft(markDraft(phase))
    const renewed = await store.swap(id, { token: TOKEN, states: [STATE] }, bytes(), spans, false)
    if (renewed.done || (await store.put(id, bytes(), spans, 'again')).done) return
  }
  throw new RecordLocked(`the mark of phase ${phase} keeps changing`)
}

interface Sides {
  readonly from: Store
  readonly to: Store
}

interface PhaseOptions {
  readonly phase: Phase
  /** Who this is, for people. */
  readonly replica: string
  /** For the log: why it may not claim; null: it may again. */
  readonly say: (why: string | null) => void
  /** Monotonic. */
  readonly clock?: () => Millis
}

/**
 * Announces that this replica is alive in its phase, and makes sure that nobody two phases away is. While it is not sure, it claims
 * nothing; outcomes are written as usual.
 */
export class Presence {
  readonly #sides: Sides
  readonly #options: PhaseOptions
  readonly #clock: () => Millis
  readonly #stopping = new AbortController()
  #running: Promise<void> = Promise.resolve()
  #sureUntil = Number.NEGATIVE_INFINITY
  #conflict: string | null = null
  #said: string | null | undefined = undefined

  constructor(sides: Sides, options: PhaseOptions) {
    this.#sides = sides
    this.#options = options
    this.#clock = options.clock ?? (() => performance.now())
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
      if (this.#conflict !== null) throw new PhaseConflict(this.#conflict)
    } catch (error) {
      if (!(error instanceof StoreUnavailable)) throw error
      this.#tell(error.message)
    }
    this.#running = this.#keepOn()
  }

  /** Why nothing may be claimed now; null: it may. */
  get refusal(): string | null {
    if (this.#clock() < this.#sureUntil) return null
    return this.#conflict ?? `cannot tell whether a replica two phases from ${this.#options.phase} is alive`
  }

  /** Looks, announces, then looks again: of two replicas that start at once, at least one sees the other. */
  async renew(): Promise<void> {
    const { phase, replica } = this.#options
    const { from, to } = this.#sides
    const began = this.#clock()
    const isNew = this.#clock() >= this.#sureUntil
    // A replica that was unsure for a while must not stop those that were not.
    if (isNew && (await this.#findConflict())) return
    await renewMark(from, phase)
    const theirs = renewMark(to, phase)
    // In phase `mirror`, the new store may be missing.
    await (phase === 'mirror' ? theirs.catch(() => {}) : theirs)
    if (await this.#findConflict()) return
    this.#sureUntil = began + SURE_FOR
    this.#tell(null)
    if (isNew) {
      const note = { tag: replica, count: 1, firstAgo: 0, lastAgo: 0, text: 'entered' }
      await from.history.append(markOf(phase), [note]).catch(() => {})
    }
  }

  async stop(): Promise<void> {
    this.#stopping.abort()
    await this.#running
  }

  async #findConflict(): Promise<boolean> {
    const { phase } = this.#options
    const apart = APART[phase]
    // All of these phases use the old store.
    if (apart === null || !(await isMarked(this.#sides.from, apart))) {
      this.#conflict = null
      return false
    }
    this.#sureUntil = Number.NEGATIVE_INFINITY
    this.#conflict = `a replica in phase ${apart} is alive, or was ${MARKED_FOR / 1000} s ago: phase ${phase} must not run beside it, since each would execute what the other has claimed; move all replicas through phase both`
    this.#tell(this.#conflict)
    return true
  }

  async #keepOn(): Promise<void> {
    const { signal } = this.#stopping
    while (!signal.aborted) {
      const pause = this.refusal === null ? RENEW_EVERY : RETRY_EVERY
      await wait(pause, undefined, { signal, ref: false }).catch(() => {})
      if (signal.aborted) return
      try {
        await this.renew()
      } catch (error) {
        if (this.refusal !== null) this.#tell(`its phase cannot be announced: ${(error as Error).message}`)
      }
    }
  }

  #tell(why: string | null): void {
    if (why === this.#said) return
    this.#said = why
    this.#options.say(why)
  }
}

/** Wraps `store`: nothing is claimed and no lease renewed while `presence` forbids it. */
export function inPhase(store: Store, presence: Pick<Presence, 'refusal'>): Store {
  const guarded = async <Reply>(
    write: () => Soon<Reply>,
    isMade: (reply: Reply) => boolean,
  ): Promise<Reply> => {
    const before = presence.refusal
    if (before !== null) throw new OutOfPhase(before, false)
    const reply = await write()
    // The reply may have come late, after this process was paused.
    const after = isMade(reply) ? presence.refusal : null
    if (after !== null) throw new OutOfPhase(after, true)
    return reply
  }
  return {
    ...store,
    put: async (id, bytes, spans, entry) => {
      if (!isClaim(bytes)) return store.put(id, bytes, spans, entry)
      if (presence.refusal !== null) {
        // Completed records are answered as usual.
        const { now, bytes: there } = await store.get(id)
        if (there !== null && there[PREFIX.state] === stateCode('completed'))
          return { done: false, now, bytes: there }
      }
      return guarded(
        () => store.put(id, bytes, spans, entry),
        () => true,
      )
    },
    swap: (id, condition, bytes, spans, nextFence) => {
      const write = () => store.swap(id, condition, bytes, spans, nextFence)
      return nextFence && isClaim(bytes) ? guarded(write, ({ done }) => done) : write()
    },
    renew: (items) =>
      guarded(
        () => store.renew(items),
        () => true,
      ),
  }
}
