import type { Retention } from '../../src/core/policy.ts'
import { type IdempotencyRecord, type RecordId, readAt } from '../../src/core/record.ts'
import { outcomeDraftOf, outcomeSpans, resolvedDraft } from '../../src/core/settle.ts'
import { readStamps } from '../../src/store/record/codec.ts'
import { orThrow, Records } from '../../src/store/records.ts'
import type { Register } from '../../src/store/register.ts'
import type { Harness } from '../store/contract.ts'
import { HOUR, MINUTE, response } from '../store/fixtures.ts'
import { NOBODY, type Record, readsUnknown, type StepName, type World } from './protocol.ts'

export const LEASE = MINUTE
export const TTL = 24 * HOUR
/** How long what nobody resolves is kept. */
export const UNRESOLVED = 365 * TTL
export const CLAIMED = { dueIn: LEASE, dropIn: UNRESOLVED }
const RETENTION: Retention = {
  lease: LEASE,
  ttl: TTL,
  ttlFailed: TTL,
  ttlBody: null,
  tombstone: 0,
  unresolvedTtl: UNRESOLVED,
  reconcile: { every: LEASE },
}

export type StoreHarness = Pick<Harness, 'advance'> & { readonly register: Register }

/** What no request does itself. */
export type ByOthers = Extract<
  StepName,
  | 'the lease lapses'
  | 'the sweeper writes down that it fell silent'
  | 'the upstream is asked, and has done it'
  | 'the upstream is asked, and knows nothing'
  | 'an operator says: completed'
  | 'an operator says: retryable'
  | 'its retention ends'
  | 'the store loses the record'
  | 'a replica of the store hears of the record'
  | 'the store fails over'
>

/** One record of a real store, and all who change it without being its owner. */
export class Bystanders {
  readonly #harness: StoreHarness
  readonly #records: Records
  readonly #id: RecordId
  #fence = 0
  /** What the server has that would be promoted. */
  #behind: Buffer | null = null

  constructor(harness: StoreHarness, id: RecordId) {
    this.#harness = harness
    this.#records = new Records(harness.register)
    this.#id = id
  }

  async take(name: ByOthers, to: World): Promise<void> {
    const { register } = this.#harness
    switch (name) {
      case 'the lease lapses':
        this.#harness.advance(LEASE)
        return
      case 'the sweeper writes down that it fell silent': {
        const { record, now } = await this.#get()
        const read = readAt(record as IdempotencyRecord, now) as IdempotencyRecord
        const lapsed = outcomeDraftOf(read)
        if (lapsed?.state !== 'unknown' || !lapsed.leaseExpired) throw new Error(`it reads ${read.state}`)
        await this.#records.replace(
          this.#id,
          read.version,
          lapsed,
          outcomeSpans({ kind: 'unknown', reason: '', status: null }, RETENTION),
        )
        return
      }
      case 'the upstream is asked, and has done it':
      case 'an operator says: completed':
        return this.#resolve('completed')
      case 'the upstream is asked, and knows nothing':
      case 'an operator says: retryable':
        return this.#resolve('not_executed')
      case 'its retention ends':
        this.#harness.advance(TTL)
        return
      case 'the store loses the record': {
        const { record } = await this.#get()
        await register.remove(this.#id, (record as IdempotencyRecord).version)
        return
      }
      case 'a replica of the store hears of the record':
        this.#behind = (await register.get(this.#id)).bytes
        return
      case 'the store fails over': {
        const { bytes, now } = await register.get(this.#id)
        if (bytes !== null) await register.remove(this.#id, readStamps(bytes).version)
        if (this.#behind === null) return
        const { due } = readStamps(this.#behind)
        // Leases that have not lapsed in the model may have been renewed meanwhile.
        const dueIn = to.record?.lapsed === false ? LEASE : due - now
        await register.put(this.#id, this.#behind, { ...CLAIMED, dueIn }, 'again')
        this.#fence = 0
        return
      }
    }
  }

  /** How the record reads, and whose it is, where that is not as in the model. */
  async differs({ record: expected }: World, tokenOf: (attempt: number) => Buffer): Promise<string | null> {
    const { record, now } = await this.#get()
    const read = record === null ? null : readAt(record, now)
    const state = read?.state ?? 'absent'
    if (state !== readsAs(expected)) return `it reads ${state}, in the model ${readsAs(expected)}`
    if (read === null || expected === null) {
      this.#fence = 0
      return null
    }
    const token = expected.by === NOBODY ? Buffer.alloc(16) : tokenOf(expected.by)
    if (!token.equals(read.token)) return 'it is another attempt’s than in the model'
    const before = this.#fence
    this.#fence = read.fence
    return read.fence < before ? `its fence went from ${before} to ${read.fence}` : null
  }

  async #get(): Promise<{ readonly record: IdempotencyRecord | null; readonly now: number }> {
    return orThrow(await this.#records.get(this.#id))
  }

  async #resolve(kind: 'completed' | 'not_executed'): Promise<void> {
    const { record, now } = await this.#get()
    const read = readAt(record as IdempotencyRecord, now) as IdempotencyRecord
    const resolution =
      kind === 'completed' ? { kind, result: response() } : { kind, reason: 'nothing was done' }
    const reply = await this.#records.replace(this.#id, read.version, resolvedDraft(read, resolution), {
      dueIn: TTL,
      dropIn: TTL,
    })
    if (reply?.kind !== 'written') throw new Error('the resolution was refused')
  }
}

function readsAs(record: Record | null): string {
  if (record === null) return 'absent'
  return readsUnknown(record) ? 'unknown' : record.state
}
