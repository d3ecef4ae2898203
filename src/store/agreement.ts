import { randomBytes } from 'node:crypto'
import {
  differencesBetween,
  type Identification,
  type IdentificationParts,
  keysUnder,
} from '../core/identification.ts'
import type { IdempotencyRecord, Millis } from '../core/record.ts'
import {
  IDENTIFICATION_MARK,
  MARK_SPANS,
  MARKED_FOR,
  MarkGuard,
  type MarkGuardOptions,
  markDraft,
} from './marks.ts'
import { decodeRecord, encodeDraft } from './record/codec.ts'
import { CorruptRecord, RecordLocked, type Store, unlessBug } from './register.ts'

/*
 * Replicas of one service agree on what identifies a record (docs/adr/0117). A service has one mark, which all replicas with the same
 * digest renew and no other can take until it expires: a compare-and-set decides between replicas that start at once. It names the replicas
 * that are alive, so that the last one to shut down can remove it.
 */

const TOKEN_BYTES = 16
/** Attempts at a mark while others keep changing it. */
const ROUNDS = 10

const NOBODY = { alive: {}, upstreams: {} }

type Marking = Pick<Store, 'get' | 'swap' | 'put' | 'remove'>

/** What a mark says. */
interface MarkContent {
  readonly parts: IdentificationParts
  /** When each replica last renewed it, by the store's clock. */
  readonly alive: Readonly<Record<string, Millis>>
  /** Where each forwards to: tags of `upstream.url`. Earlier versions wrote none. */
  readonly upstreams?: Readonly<Record<string, string>>
}

/** The replicas that a mark names as alive. */
type Alive = Required<Omit<MarkContent, 'parts'>>

interface AgreementOptions extends MarkGuardOptions {
  readonly own: Identification
  /** Tag of its own `upstream.url`. */
  readonly upstream: string
  /** Claims even though others identify records differently (`--accept-rescope`), and only logs it. */
  readonly accepts: boolean
  /** Called once: a replica that agrees is alive, and forwards to another upstream. */
  readonly onOtherUpstream: () => void
}

/** Holds the mark together with all replicas that agree. Claims nothing until it is sure that it does. */
export class Agreement extends MarkGuard {
  protected readonly unsure = 'cannot tell whether replicas that identify records differently are alive'
  readonly #stores: readonly Marking[]
  readonly #token: Buffer
  readonly #replica = randomBytes(6).toString('base64url')
  readonly #options: AgreementOptions
  #hasSeenOther = false

  /** `stores`: those that decide who claims; during a migration perhaps both, the old one first. */
  constructor(stores: readonly Marking[], options: AgreementOptions) {
    super(options)
    this.#stores = stores
    this.#options = options
    this.#token = options.own.digest.subarray(0, TOKEN_BYTES)
  }

  /** The store may have lost the mark: a replica that is sure of it rewrites it before the grace ends. */
  async rewrite(): Promise<void> {
    // A check in progress may write the mark first.
    await this.checking?.catch(unlessBug)
    await this.renew().catch(unlessBug)
  }

  /** Claims nothing from now on. Removes the mark unless other replicas that agree are alive. */
  override async stop(): Promise<void> {
    await super.stop()
    this.sureUntil = Number.NEGATIVE_INFINITY
    // A mark that cannot be removed now expires.
    await Promise.allSettled(this.#stores.map((store) => this.#leave(store)))
  }

  async #leave(store: Marking): Promise<void> {
    for (let round = 0; round < ROUNDS; round++) {
      const { now, bytes } = await store.get(IDENTIFICATION_MARK)
      const mark = bytes === null ? null : decodeRecord(bytes)
      if (mark?.token.equals(this.#token) !== true) return
      const others = this.#othersIn(mark, now)
      const { version } = mark
      const isGone =
        Object.keys(others.alive).length === 0
          ? await store.remove(IDENTIFICATION_MARK, version)
          : (await store.swap(IDENTIFICATION_MARK, { version }, this.#draft(others), MARK_SPANS, false)).done
      if (isGone) return
    }
  }

  protected async check(): Promise<void> {
    const began = this.clock()
    // After a failover that lost the mark, only replicas that were sure of it may rewrite it before the grace ends.
    const entry = began < this.sureUntil ? 'again' : 'claim'
    let differs: string | null = null
    for (const store of this.#stores) {
      differs = await this.#differing(store, entry)
      if (differs !== null) break
    }
    if (differs === null || this.#options.accepts) this.sure(began, differs)
    else this.refuse(differs)
  }

  /** Takes or renews the mark; returns the existing one if it belongs to others. In a grace `entry` decides, as for any put. */
  async #otherMark(store: Marking, entry: 'claim' | 'again'): Promise<IdempotencyRecord | null> {
    let { now, bytes } = await store.get(IDENTIFICATION_MARK)
    for (let round = 0; round < ROUNDS; round++) {
      const mark = bytes === null ? null : decodeRecord(bytes)
      if (mark !== null && !mark.token.equals(this.#token)) return mark
      const others = mark === null ? NOBODY : this.#othersIn(mark, now)
      this.#lookForOther(others)
      const draft = this.#draft({
        alive: { ...others.alive, [this.#replica]: now },
        upstreams: { ...others.upstreams, [this.#replica]: this.#options.upstream },
      })
      const written =
        mark === null
          ? await store.put(IDENTIFICATION_MARK, draft, MARK_SPANS, entry)
          : await store.swap(IDENTIFICATION_MARK, { version: mark.version }, draft, MARK_SPANS, false)
      if (written.done) return null
      ;({ now, bytes } = written)
    }
    throw new RecordLocked('the mark of what identifies records keeps changing')
  }

  #lookForOther({ upstreams }: Alive): void {
    const { upstream, onOtherUpstream } = this.#options
    if (this.#hasSeenOther || Object.values(upstreams).every((other) => other === upstream)) return
    this.#hasSeenOther = true
    onOtherUpstream()
  }

  #draft(replicas: Alive): Buffer {
    const content: MarkContent = { parts: this.#options.own.parts, ...replicas }
    return encodeDraft(
      markDraft({
        token: this.#token,
        route: 'identification',
        path: JSON.stringify(content),
        about: 'what identifies records, replicas that agree on it are alive',
      }),
    )
  }

  /** The other replicas that have renewed the mark within {@link MARKED_FOR}. */
  #othersIn(mark: IdempotencyRecord, now: Millis): Alive {
    const { alive, upstreams = {} } = contentOf(mark)
    const isAlive = ([replica]: [string, unknown]): boolean =>
      replica !== this.#replica && now - (alive[replica] as Millis) < MARKED_FOR
    return {
      alive: Object.fromEntries(Object.entries(alive).filter(isAlive)),
      upstreams: Object.fromEntries(Object.entries(upstreams).filter(isAlive)),
    }
  }

  /** Null: the mark in this store is ours. */
  async #differing(store: Marking, entry: 'claim' | 'again'): Promise<string | null> {
    const { own, accepts } = this.#options
    let differences: readonly string[]
    try {
      const other = await this.#otherMark(store, entry)
      if (other === null) return null
      differences = differencesBetween(own.parts, contentOf(other).parts)
    } catch (error) {
      if (!(error instanceof CorruptRecord)) throw error
      differences = [`what it is cannot be read: ${error.message}`]
    }
    const found = `a replica that identifies records differently (${differences.join(', ')}) is alive, or was ${MARKED_FOR / 1000} s ago`
    const keys = keysUnder(differences)
    return accepts
      ? `${found}: ${keys} may execute twice, once at such a replica and once here (--accept-rescope)`
      : `${found}: a retry would not find the record of ${keys} that it has executed; nothing is claimed until all such replicas have ended, or with --accept-rescope (docs/reload.md); if they protect another API, give each a \`service\` of its own`
  }
}

/** @throws {CorruptRecord} */
function contentOf({ path }: IdempotencyRecord): MarkContent {
  try {
    return JSON.parse(path) as MarkContent
  } catch {
    throw new CorruptRecord('it was written by another version')
  }
}
