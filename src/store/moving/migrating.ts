import { type ComparedRecord, isAhead, type Phase } from '../../core/copies.ts'
import type { Millis, RecordId, Spans } from '../../core/record.ts'
import { said, weakest } from '../grade.ts'
import { withoutMarks } from '../marks.ts'
import { writeU48 } from '../record/binary.ts'
import { isClaim, isUnresolved, meets, PREFIX, readStamps, stateCode } from '../record/codec.ts'
import { versionOf } from '../record/prefix.ts'
import {
  type Condition,
  CorruptRecord,
  type GetReply,
  type PutKind,
  type PutReply,
  RecordLocked,
  type Stamp,
  type Store,
  StoreUnavailable,
  type SwapReply,
  unlessBug,
} from '../register.ts'
import { copyHistory, keptOf } from './copying.ts'
import {
  atLeast,
  follows,
  followsInMirror,
  freed,
  type Given,
  given,
  isDone,
  isSame,
  renewedBy,
} from './migrating-records.ts'

interface Terms {
  readonly lead: 'from' | 'to'
  /** Also reads the other store unless the lead has the record as completed. */
  readonly asks: boolean
  /**
   * `must`: a claim needs the other store's acceptance, and an outcome is rewritten until both have it. `never`: written only to release a
   * key that would otherwise stay held.
   */
  readonly writes: 'try' | 'must' | 'never'
}

const TERMS: Readonly<Record<Phase, Terms>> = {
  mirror: { lead: 'from', asks: false, writes: 'try' },
  both: { lead: 'from', asks: true, writes: 'must' },
  new: { lead: 'to', asks: true, writes: 'never' },
}

/** Attempts at a write while others keep changing the record. */
const ROUNDS = 8

/** The lead's record, at least as recent as the other's; undefined: the other was not asked. */
interface Latest extends GetReply {
  readonly theirs: Buffer | null | undefined
  /** Its owner renews the lease in the other store alone, as in phase `new`. */
  readonly isRenewed?: boolean
}

/**
 * Two stores as one, while a fleet moves from one to the other (docs/adr/0101). Versions, instants and `now` are the lead's; fence, token
 * and `createdAt` are the same in both.
 */
export function migrating(from: Store, to: Store, phase: Phase): Store {
  return new Pair(from, to, phase)
}

class Pair implements Store {
  readonly name: string
  /** The rates start over when the lead changes. */
  readonly limits: Store['limits']
  /** `createdAt` and the start of `unknown` are instants of the clock of the store that the writing replica took as the lead. */
  readonly pingOther?: () => Promise<Millis>
  readonly #from: Store
  readonly #to: Store
  readonly #phase: Phase
  readonly #terms: Terms
  readonly #lead: Store
  readonly #other: Store

  constructor(from: Store, to: Store, phase: Phase) {
    const terms = TERMS[phase]
    const [lead, other] = terms.lead === 'from' ? [from, to] : [to, from]
    this.name = to.name
    this.limits = lead.limits
    if (terms.asks) this.pingOther = () => other.ping()
    this.#from = from
    this.#to = to
    this.#phase = phase
    this.#terms = terms
    this.#lead = lead
    this.#other = other
  }

  /** In a grace of either store nothing is `fresh`: a store does not notice the other's failover. */
  readonly put = async (id: RecordId, bytes: Buffer, spans: Spans, asked?: PutKind): Promise<PutReply> => {
    const { asks, writes } = this.#terms
    const entry = asked === 'again' ? asked : 'claim'
    if (asks && writes === 'never') {
      const { bytes: existing, now } = await this.#latest(id)
      if (existing !== null) return { done: false, now, bytes: existing }
    }
    const reply = await this.#lead.put(id, Buffer.from(bytes), spans, entry)
    if (reply.done) {
      const { version } = reply.stamp
      // Not removed: a delayed earlier try of the same claim must find a record.
      const undo = async (found: Given | null): Promise<void> => {
        const isFree = found !== null && keptOf(found.bytes)?.state === 'failed_retryable'
        const free = isFree ? found : { bytes: freed(bytes), spans: { ...spans, dueIn: spans.dropIn } }
        const copy = atLeast(free.bytes, reply.stamp.fence + (isFree ? 0 : 1))
        await this.#lead.swap(id, { version }, copy, free.spans, false)
      }
      // A rewritten claim is being executed: it is not withdrawn.
      const isNew = isClaim(bytes) && entry === 'claim'
      return this.#written(id, reply, { bytes, spans }, isNew ? { seen: null, undo } : null)
    }
    if (await this.#isOwnClaim(id, reply.bytes, { bytes, spans }, entry)) return reply
    const { bytes: existing, now } = await this.#following(id, reply)
    return existing === null ? this.put(id, bytes, spans, entry) : { done: false, now, bytes: existing }
  }

  readonly swap: Store['swap'] = (id, condition, bytes, spans, nextFence) =>
    'version' in condition
      ? this.#swapVersion(id, condition, bytes, spans, nextFence)
      : this.#swapToken(id, condition, bytes, spans, nextFence)

  readonly get: Store['get'] = async (id) => {
    if (!this.#terms.asks) return this.#lead.get(id)
    const { now, bytes } = await this.#latest(id)
    return { now, bytes }
  }

  readonly renew: Store['renew'] = async (items) => {
    switch (this.#terms.writes) {
      case 'never':
        return this.#lead.renew(items)
      case 'try': {
        const mirrored = this.#other.renew(items).catch(unlessBug)
        const renewed = await this.#lead.renew(items)
        await mirrored
        return renewed
      }
      case 'must': {
        const [own, theirs] = await Promise.all([this.#lead.renew(items), this.#other.renew(items)])
        return own.map((renewed, n) => renewed && theirs[n] === true)
      }
    }
  }

  /** Records due only in the other store are due as well: both stores get the same state. The other's responses end with the move. */
  readonly due: Store['due'] = async (limit, of) => {
    if (this.#terms.writes !== 'must' || of === 'bodies') return this.#lead.due(limit, of)
    const [own, theirs] = await Promise.all([this.#lead.due(limit), this.#other.due(limit)])
    const known = new Set(own)
    const more = theirs.filter((id) => !known.has(id))
    const isDue = await Promise.all(more.map((id) => this.#level(id)))
    return [...own, ...more.filter((_, n) => isDue[n] === true)]
  }

  readonly remove: Store['remove'] = async (id, version) => {
    if (!this.#terms.asks) {
      const isGone = await this.#lead.remove(id, version)
      if (isGone) await this.#removeTheirs(id, true).catch(unlessBug)
      return isGone
    }
    const { bytes, theirs, isRenewed } = await this.#latest(id)
    if (bytes === null || versionOf(bytes) !== version || isRenewed) return false
    // Whichever one remains keeps the key from being executed. Claims made since by replicas in another phase are not removed.
    if (theirs === undefined) await this.#removeTheirs(id, keptOf(bytes) !== null)
    else if (theirs !== null && !(await this.#other.remove(id, versionOf(theirs)))) throw busy(id)
    return this.#lead.remove(id, version)
  }

  readonly list: Store['list'] = async (which, cursor, limit) => {
    if (!this.#terms.asks) return withoutMarks(await this.#lead.list(which, cursor, limit))
    const [, side, at = ''] = /^([lo])(.*)$/s.exec(cursor ?? 'l') ?? []
    if (side === undefined) throw new RangeError('not a cursor of this store')
    const place = at === '' ? null : at
    if (side === 'l') {
      const page = withoutMarks(await this.#lead.list(which, place, limit))
      return { ...page, next: page.next === null ? 'o' : `l${page.next}` }
    }
    const { ids, next } = withoutMarks(await this.#other.list(which, place, limit))
    const known = await Promise.all(ids.map(async (id) => (await this.#lead.get(id)).bytes !== null))
    return { ids: ids.filter((_, n) => known[n] !== true), next: next === null ? null : `o${next}` }
  }

  readonly ping: Store['ping'] = async () => {
    if (this.#terms.writes !== 'must') return this.#lead.ping()
    const [now] = await Promise.all([this.#lead.ping(), this.#other.ping()])
    return now
  }

  readonly history: Store['history'] = {
    append: async (id, notes) => {
      const noted = await this.#lead.history.append(id, notes)
      if (this.#terms.writes !== 'never') await this.#other.history.append(id, notes).catch(unlessBug)
      return noted
    },
    read: async (id) => {
      const notes = await this.#lead.history.read(id)
      return notes.length > 0 || !this.#terms.asks ? notes : this.#other.history.read(id)
    },
  }

  /** Polling finds changes written only to the other store. */
  readonly watch: Store['watch'] = (id, changed) => this.#lead.watch(id, changed)

  readonly traits: Store['traits'] = async () => {
    const [old, young] = await Promise.all([this.#from.traits(), this.#to.traits()])
    const both = [
      { name: 'moved from', ...old },
      { name: 'moved to', ...young },
    ]
    return {
      ...weakest(this.#terms.asks ? both : [old]),
      findings: said(both, ({ findings }) => findings),
      refusals: said(both, ({ refusals }) => refusals),
      topology: `migration from ${this.#from.name} to ${this.#to.name}, phase ${this.#phase}`,
    }
  }

  readonly close: Store['close'] = async () =>
    void (await Promise.all([this.#from.close(), this.#to.close()]))

  async #swapToken(
    id: RecordId,
    condition: Condition & { readonly token: Buffer },
    bytes: Buffer,
    spans: Spans,
    nextFence: boolean,
    isSecond = false,
  ): Promise<SwapReply> {
    const reply = await this.#lead.swap(id, condition, Buffer.from(bytes), spans, nextFence)
    if (reply.done) return this.#written(id, reply, { bytes, spans }, null)
    const existing = reply.bytes === null ? null : keptOf(reply.bytes)
    if (existing?.token.equals(condition.token) && reply.bytes !== null) {
      // An earlier try whose reply was lost, or the upstream itself: update the other store now.
      await this.#tell(id, given(reply.bytes, reply.now))
      return reply
    }
    if (!this.#terms.asks || isSecond) return reply
    const { bytes: latest, now } = await this.#latest(id)
    if (latest === null || !meets(latest, condition)) return { done: false, now, bytes: latest }
    return this.#swapToken(id, condition, bytes, spans, nextFence, true)
  }

  async #swapVersion(
    id: RecordId,
    condition: Condition & { readonly version: number },
    bytes: Buffer,
    spans: Spans,
    nextFence: boolean,
  ): Promise<SwapReply> {
    const { asks } = this.#terms
    if (!asks) {
      const reply = await this.#lead.swap(id, condition, Buffer.from(bytes), spans, nextFence)
      return reply.done ? this.#written(id, reply, { bytes, spans }, null) : reply
    }
    const { bytes: before, now, theirs, isRenewed } = await this.#latest(id)
    if (before === null || !meets(before, condition) || (nextFence && isRenewed))
      return { done: false, now, bytes: before }
    const fence = theirs == null ? 0 : readStamps(theirs).fence + (nextFence ? 1 : 0)
    const reply = await this.#lead.swap(id, condition, atLeast(bytes, fence), spans, nextFence)
    if (!reply.done) return reply
    if (!nextFence || !isClaim(bytes) || theirs === undefined)
      return this.#written(id, reply, { bytes, spans }, null)
    const undo = async (): Promise<void> => {
      const { version, fence: raised } = reply.stamp
      await this.#lead.swap(id, { version }, atLeast(before, raised), given(before, now).spans, false)
    }
    return this.#written(id, reply, { bytes, spans }, { seen: theirs, undo })
  }

  /** The lead has the claim. `claim`: what the other had when it was read, and how to withdraw the lead's. */
  async #written<Reply extends { readonly done: true; readonly now: Millis; readonly stamp: Stamp }>(
    id: RecordId,
    reply: Reply,
    { bytes, spans }: Given,
    claim: { readonly seen: Buffer | null; readonly undo: (found: Given | null) => Promise<void> } | null,
  ): Promise<Reply | { readonly done: false; readonly now: Millis; readonly bytes: Buffer }> {
    const stamped = Buffer.from(bytes)
    writeU48(stamped, reply.stamp.fence, PREFIX.fence)
    writeU48(stamped, reply.stamp.createdAt, PREFIX.createdAt)
    if (claim === null || this.#terms.writes !== 'must') {
      await this.#tell(id, { bytes: stamped, spans })
      return reply
    }
    const { seen, undo } = claim
    let found: Given | null
    try {
      found = await this.#claimTheirs(id, { bytes: stamped, spans }, seen, 'claim')
    } catch (error) {
      // It may exist after all: a later claim finds it under its token.
      if (!(error instanceof StoreUnavailable) || error.maybeApplied) throw error
      await undo(null).catch(lost)
      throw error
    }
    if (found === null) return reply
    await undo(found).catch(lost)
    const { bytes: existing, now } = await this.#latest(id)
    if (existing === null || isSame(existing, bytes)) throw new StoreUnavailable(HALF, true)
    return { done: false, now, bytes: existing }
  }

  /** Claims in the other store if its record is still as seen. Null: done; else its current record. */
  async #claimTheirs(
    id: RecordId,
    { bytes, spans }: Given,
    seen: Buffer | null,
    entry: PutKind,
  ): Promise<Given | null> {
    let reply: SwapReply
    if (seen !== null && readStamps(seen).createdAt === readStamps(bytes).createdAt) {
      const { version } = readStamps(seen)
      // A takeover, which the other's grace also refuses: a failover may have gone back to this record.
      reply = await this.#other.swap(id, { version }, Buffer.from(bytes), spans, entry !== 'again')
    } else {
      // A swap would keep the lifetime of the record it replaces.
      if (seen !== null) await this.#other.remove(id, readStamps(seen).version)
      reply = await this.#other.put(id, Buffer.from(bytes), spans, entry)
    }
    if (reply.done) return null
    if (reply.bytes === null) throw busy(id)
    return isSame(reply.bytes, bytes) ? null : given(reply.bytes, reply.now)
  }

  /**
   * Whether the lead's record is this same claim, repeated. If the other store lacks it, it is claimed there, too.
   * @throws {StoreUnavailable} if the other store does not accept it: it must be withdrawn under its token.
   */
  async #isOwnClaim(id: RecordId, found: Buffer, { bytes, spans }: Given, entry: PutKind): Promise<boolean> {
    if (this.#terms.writes !== 'must' || !isClaim(bytes) || !isSame(found, bytes)) return false
    const { bytes: seen } = await this.#other.get(id)
    if (seen !== null && isSame(seen, bytes)) return true
    const before = seen === null ? null : keptOf(seen)
    const mayClaim = seen === null || (before !== null && isAhead(keptOf(found) as ComparedRecord, before))
    /* c8 ignore next: only generated interleavings give both answers (test/protect/interleavings.verify.ts) */
    if (mayClaim && (await this.#claimTheirs(id, { bytes: found, spans }, seen, entry)) === null) return true
    throw new StoreUnavailable(HALF, true)
  }

  /** Writes the lead's decision to the other store. */
  async #tell(id: RecordId, record: Given): Promise<void> {
    switch (this.#terms.writes) {
      case 'never': {
        // The other store's record would keep holding a key that is free.
        if (record.bytes[PREFIX.state] !== stateCode('failed_retryable')) return
        const { bytes: theirs } = await this.#other.get(id)
        return theirs === null ? undefined : this.#advance(this.#other, id, record, follows)
      }
      case 'try':
        return this.#advance(this.#other, id, record, followsInMirror).catch(unlessBug)
      case 'must':
        return this.#advance(this.#other, id, record, follows)
    }
  }

  /** The lead's record, once it is at least as recent as the other's. */
  async #latest(id: RecordId): Promise<Latest> {
    for (let round = 0; round < ROUNDS; round++) {
      const other = this.#other.get(id)
      // The lead's answer may suffice.
      other.catch(() => {})
      const own = await this.#lead.get(id)
      const lead = own.bytes === null ? null : keptOf(own.bytes)
      if (own.bytes !== null && (lead === null || isDone(lead))) return { ...own, theirs: undefined }
      const { bytes: theirs, now } = await other
      if (theirs === null) return { ...own, theirs }
      const ahead = keptOf(theirs)
      if (ahead === null) throw unreadable(this.#other)
      if (lead !== null && !isAhead(ahead, lead)) {
        const renewed = renewedBy({ bytes: theirs, now }, own)
        return { now: own.now, bytes: renewed ?? own.bytes, theirs, isRenewed: renewed !== null }
      }
      await this.#advance(this.#lead, id, given(theirs, now), isAhead)
      await copyHistory(this.#other, this.#lead, id, now)
    }
    throw busy(id)
  }

  /** The record with which the lead refused a write, or the other store's more recent one. */
  async #following(id: RecordId, found: { readonly now: Millis; readonly bytes: Buffer }): Promise<GetReply> {
    const existing = keptOf(found.bytes)
    return this.#terms.asks && existing !== null && !isDone(existing) ? this.get(id) : found
  }

  /** Brings both stores to the same state; returns whether the record is due then. */
  async #level(id: RecordId): Promise<boolean> {
    try {
      const { bytes, now } = await this.#latest(id)
      if (bytes === null) return false
      await this.#tell(id, given(bytes, now))
      return isUnresolved(bytes) && readStamps(bytes).due <= now
    } catch (error) {
      // The sweeper reports it.
      if (error instanceof CorruptRecord) return true
      throw error
    }
  }

  /** Writes the record where there is none, or over one that it `succeeds`. */
  async #advance(
    store: Store,
    id: RecordId,
    { bytes, spans }: Given,
    succeeds: (ours: ComparedRecord, theirs: ComparedRecord) => boolean,
  ): Promise<void> {
    const ours = keptOf(bytes) as ComparedRecord
    for (let round = 0; round < ROUNDS; round++) {
      const reply = await store.put(id, Buffer.from(bytes), spans, 'again')
      if (reply.done) return
      const theirs = keptOf(reply.bytes)
      if (theirs === null) throw unreadable(store)
      if (!succeeds(ours, theirs)) return
      const { version } = readStamps(reply.bytes)
      if (theirs.createdAt === ours.createdAt) {
        const copy = atLeast(bytes, theirs.fence)
        if ((await store.swap(id, { version }, copy, spans, false)).done) return
      } else await store.remove(id, version)
    }
    throw busy(id)
  }

  /** `isRead`: the lead's can be read. Only then is the other's the same; else it stays, unless it cannot be read, either. */
  async #removeTheirs(id: RecordId, isRead: boolean): Promise<void> {
    const { bytes } = await this.#other.get(id)
    if (bytes === null) return
    const canBeRead = keptOf(bytes) !== null
    // An operator must decide about it in that store.
    if (isRead && !canBeRead) throw unreadable(this.#other)
    if (isRead !== canBeRead) return
    if (!(await this.#other.remove(id, versionOf(bytes)))) throw busy(id)
  }
}

const HALF = 'only one of the two stores has the claim'

function busy(id: RecordId): RecordLocked {
  return new RecordLocked(`others keep changing the record ${id}`)
}

function unreadable({ name }: Store): CorruptRecord {
  return new CorruptRecord(`the store ${name} has a record that this version cannot read`)
}

/** Whether it was withdrawn is unknown. */
function lost(error: unknown): never {
  if (!(error instanceof StoreUnavailable)) throw error
  throw new StoreUnavailable(error.message, true, { cause: error })
}
