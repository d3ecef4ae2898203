import { decide } from '../../src/core/decide.ts'
import { type Millis, type RecordId, readAt } from '../../src/core/record.ts'
import { memoryStore } from '../../src/store/memory.ts'
import { migrating } from '../../src/store/moving/migrating.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import { orThrow, Records } from '../../src/store/records.ts'
import { type Store, StoreUnavailable } from '../../src/store/register.ts'
import { draft, HOUR, MINUTE, newId, newToken } from '../store/fixtures.ts'
import { told } from './explore.ts'
import type { Held, Phase, Step, World } from './migration.ts'

type Side = 'from' | 'to'

/** Two stores whose clocks are an hour apart. */
export interface StorePair {
  readonly stores: Readonly<Record<Side, Store>>
  readonly advance: (ms: Millis) => void
}

export function memoryPair(): StorePair {
  let now = 1_795_000_000_000
  const maxBytes = Number.MAX_SAFE_INTEGER
  return {
    stores: {
      from: memoryStore({ clock: () => now - APART, maxBytes }),
      to: memoryStore({ clock: () => now, maxBytes }),
    },
    advance: (ms) => void (now += ms),
  }
}

/** What an attempt has sent to a store. */
interface Command {
  readonly side: Side
  readonly isWrite: boolean
  readonly carryOut: () => Promise<void>
  /** Nobody knows whether it was applied. */
  readonly lose: () => void
}

/** How far the clocks of the two stores are apart. */
export const APART = HOUR
const LEASE = MINUTE
const TTL = 24 * HOUR
const CLAIMED = { dueIn: LEASE, dropIn: 365 * TTL }
const OUTCOME = { dueIn: TTL, dropIn: TTL }
/** More commands than any step takes. */
const MAX_STEPS = 60

/** Goes a path through the model with the code of the stores and the guard. Throws where the two differ. */
export async function replayMigration(path: readonly Step[], pair: StorePair): Promise<void> {
  const real = new Real(pair)
  for (const [n, step] of path.entries()) {
    const way = (): string =>
      path
        .slice(0, n + 1)
        .map(told)
        .join(' | ')
    await real.take(step, n === 0 ? null : (path[n - 1] as Step).to).catch((error: unknown) => {
      throw new Error(`${way()}: ${(error as Error).message}`, { cause: error })
    })
    const differs = await real.differs(step.to)
    if (differs !== null) throw new Error(`${way()}: ${differs}`)
  }
}

/** What an attempt is doing, once it is done. */
interface Work {
  result: boolean | null
  error: Error | null
}

/** One attempt: its process, its connections, and what it is doing. */
class Owner {
  readonly token = newToken()
  readonly phase: Phase
  readonly records: Records
  readonly commands: Command[] = []
  fence = 0
  createdAt = 0
  #work: Work = { result: null, error: null }
  readonly #calls = new Set<Promise<unknown>>()

  constructor(phase: Phase, stores: Readonly<Record<Side, Store>>) {
    this.phase = phase
    const from = this.#wire('from', stores.from)
    const store = phase === 'plain' ? from : migrating(from, this.#wire('to', stores.to), phase)
    this.records = new Records(store)
  }

  #wire(side: Side, store: Store): Store {
    const send =
      <Args extends unknown[], Reply>(isWrite: boolean, apply: (...args: Args) => Reply | Promise<Reply>) =>
      (...args: Args): Promise<Reply> =>
        new Promise((resolve, reject) => {
          this.commands.push({
            side,
            isWrite,
            carryOut: async () => resolve(await apply(...args)),
            lose: () => reject(new StoreUnavailable('no reply', true)),
          })
        })
    return {
      ...store,
      put: send(true, (id, bytes, spans, entry) => store.put(id, Buffer.from(bytes), spans, entry)),
      swap: send(true, (id, on, bytes, spans, next) => store.swap(id, on, Buffer.from(bytes), spans, next)),
      get: send(false, (id: RecordId) => store.get(id)),
      remove: send(true, (id: RecordId, version: number) => store.remove(id, version)),
      history: {
        append: (id, notes) => this.#taking(store.history.append(id, notes)),
        read: (id) => this.#taking(store.history.read(id)),
      },
    }
  }

  /** No command of the model, but the next one waits for it. */
  #taking<T>(call: Promise<T>): Promise<T> {
    const done = (): void => void this.#calls.delete(call)
    this.#calls.add(call)
    void call.then(done, done)
    return call
  }

  /** Begins something; the replies to what it did before are lost. */
  begin(work: () => Promise<boolean>): void {
    this.lose()
    const own: Work = { result: null, error: null }
    this.#work = own
    void work().then(
      (result) => {
        own.result = result
      },
      (error: unknown) => {
        own.error = error as Error
      },
    )
  }

  /** Carries its commands out until `isThere`, which is asked about the next one; null: it sends no more. */
  async until(isThere: (next: Command | null) => boolean): Promise<void> {
    for (let n = 0; n < MAX_STEPS; n++) {
      do {
        await Promise.allSettled(this.#calls)
        await new Promise((done) => setImmediate(done))
      } while (this.#calls.size > 0)
      if (this.#work.error !== null) throw this.#work.error
      const next = this.commands[0] ?? null
      if (isThere(next)) return
      if (next === null) throw new Error(`it waits for nothing, with ${this.#work.result}`)
      this.commands.shift()
      await next.carryOut()
    }
    throw new Error('it does not get there')
  }

  /** Until it knows enough to write: one command at least, which the claim of a new key is, too. */
  async looked(): Promise<void> {
    let n = 0
    await this.until((next) => this.#work.result !== null || (n++ > 0 && next?.isWrite === true))
  }

  /** Until what it had to write there is written. */
  async wrote(side: Side): Promise<void> {
    let n = 0
    await this.until((next) => n++ > 0 && !(next?.isWrite === true && next.side === side))
  }

  /** Until it is through. */
  async result(): Promise<boolean> {
    await this.until(() => this.#work.result !== null)
    return this.#work.result as boolean
  }

  lose(): void {
    for (const command of this.commands.splice(0)) command.lose()
  }
}

class Real {
  readonly #id = newId()
  readonly #stores: StorePair['stores']
  readonly #advance: StorePair['advance']
  readonly #owners: Owner[] = []

  constructor({ stores, advance }: StorePair) {
    this.#stores = stores
    this.#advance = advance
  }

  async take({ name, attempt, to }: Step, before: World | null): Promise<void> {
    // No two writes of one record share a millisecond.
    this.#advance(5)
    if (attempt === null) {
      const { phase } = to.attempts.at(-1) as World['attempts'][number]
      const owner = new Owner(phase, this.#stores)
      this.#owners.push(owner)
      owner.begin(() => this.#claim(owner))
      return
    }
    const owner = this.#owners[attempt] as Owner
    const was = (before as World).attempts[attempt] as World['attempts'][number]
    const is = to.attempts[attempt] as World['attempts'][number]
    const lead: Side = owner.phase === 'new' ? 'to' : 'from'
    switch (name) {
      case 'a client asks':
        return
      case 'it looks into both stores':
        return owner.looked()
      case 'it claims in the old store':
      case 'it claims in the new store':
        if (is.at === 'half') return owner.until((next) => next?.isWrite === true && next.side !== lead)
        if (is.at === 'claimed' && owner.phase === 'mirror')
          return owner.until((next) => next !== null && next.side !== lead)
        if (is.at === 'claimed' || is.at === 'over') return this.#expect(owner, is.at === 'claimed')
        // The deciding store has been brought up to the other.
        return owner.wrote(lead)
      case 'the new store has its claim, too':
        if (is.at === 'claimed') return this.#expect(owner, true)
        return owner.until((next) => next?.isWrite === true && next.side === lead)
      case 'it takes its claim back':
        return owner.wrote(lead)
      case 'the new store is told of its claim':
        return this.#expect(owner, true)
      case 'the reply is lost':
        if (was.at === 'telling') return owner.lose()
        owner.begin(() => this.#settle(owner, 'failed_retryable'))
        return
      case 'it sends, and the upstream executes it':
      case 'it cannot send': {
        const { outcome } = is
        owner.begin(() => this.#settle(owner, outcome as Exclude<Held['state'], 'in_progress'>))
        return
      }
      case 'its outcome is written':
        if (is.at === 'over') return void (await owner.result())
        return owner.until((next) => next === null || next.side !== lead)
      case 'the other store is told of its outcome':
        return void (await owner.result())
      case 'its process dies':
        owner.commands.length = 0
        return
    }
  }

  async #expect(owner: Owner, granted: boolean): Promise<void> {
    if ((await owner.result()) !== granted)
      throw new Error(`the claim was ${granted ? 'refused' : 'granted'}`)
  }

  /** As `claimRecord` and `contest` in src/protect/claim.ts do it. */
  async #claim(owner: Owner): Promise<boolean> {
    const { records, token } = owner
    const claim = draft('in_progress', token)
    const asked = {
      recipe: claim.recipe,
      rawDigest: claim.rawDigest,
      fingerprint: claim.fingerprint,
      rawDigestUnder: () => claim.rawDigest,
    }
    // Without a certain reply it is repeated once, and then given up.
    for (let tries = 0; tries < 2; tries++) {
      const reply = await records.claim(this.#id, claim, CLAIMED)
      if (reply.kind === 'corrupt') throw reply.error
      if (reply.kind === 'claimed') return granted(owner, reply.stamp)
      let found = reply.kind === 'exists' ? reply : null
      while (found !== null) {
        const decision = decide(found.record, asked, { onLeaseExpired: 'unknown' }, found.now)
        if (decision.kind !== 'take_over') return false
        const taken = await records.takeOver(this.#id, decision.from, claim, CLAIMED)
        if (taken.kind === 'corrupt') throw taken.error
        if (taken.kind === 'claimed') return granted(owner, taken.stamp)
        if (taken.kind === 'lost' && taken.record === null) tries--
        found =
          taken.kind === 'lost' && taken.record !== null
            ? { ...taken, kind: 'exists', record: taken.record }
            : null
      }
    }
    return false
  }

  async #settle(
    { token, records, fence, createdAt }: Owner,
    outcome: Exclude<Held['state'], 'in_progress'>,
  ): Promise<boolean> {
    const spans = outcome === 'completed' ? OUTCOME : CLAIMED
    const reply = orThrow(await records.settle(this.#id, draft(outcome, token, { fence, createdAt }), spans))
    return reply.kind !== 'refused'
  }

  /** What each store holds, and whose it is. */
  async differs(world: World): Promise<string | null> {
    for (const side of ['from', 'to'] as const) {
      const [found, expected] = [await this.#found(side), saying(world[side])]
      if (found !== expected) return `${side} has ${found}, in the model ${expected}`
    }
    return null
  }

  async #found(side: Side): Promise<string> {
    const { bytes, now } = await this.#stores[side].get(this.#id)
    const found = bytes === null ? null : readAt(decodeRecord(bytes), now)
    if (found === null) return 'nothing'
    const { state, token } = found
    return saying({
      state: state as Held['state'],
      by: this.#owners.findIndex((one) => token.equals(one.token)),
    })
  }
}

function saying(held: Pick<Held, 'state' | 'by'> | null): string {
  return held === null ? 'nothing' : `${held.state} of ${held.by + 1}`
}

function granted(
  owner: Owner,
  { fence, createdAt }: { readonly fence: number; readonly createdAt: number },
): true {
  owner.fence = fence
  owner.createdAt = createdAt
  return true
}
