import { readFileSync } from 'node:fs'
import { decide } from '../../src/core/decide.ts'
import type { RecordId } from '../../src/core/record.ts'
import { orThrow, RecentWrites, Records } from '../../src/store/records.ts'
import type { Register } from '../../src/store/register.ts'
import { draft, newId, newToken } from '../store/fixtures.ts'
import { Bystanders, CLAIMED, LEASE, type StoreHarness, TTL, UNRESOLVED } from './bystanders.ts'
import { told } from './explore.ts'
import { begin, type Outcome, type Rules, type Step, type World } from './protocol.ts'

/** As one replica does, which remembers its outcomes. */
function recording({ register }: StoreHarness): Records {
  // Some stores stamp the bytes that they are given, which are remembered as they were sent.
  const copying: Pick<Register, 'get' | 'put' | 'swap'> = {
    get: (id) => register.get(id),
    put: (id, bytes, spans, entry) => register.put(id, Buffer.from(bytes), spans, entry),
    swap: (id, on, bytes, spans, nextFence) => register.swap(id, on, Buffer.from(bytes), spans, nextFence),
  }
  return new Records(copying as Register, () => {}, new RecentWrites(() => 0))
}

interface Owner {
  readonly token: Buffer
  /** Its process. */
  readonly records: Records
  /** Of its claim, once it was granted; what its outcomes are written under. */
  fence: number
  createdAt: number
}

/** Does on a store what a path through the model says, with the code of the guard. Throws where the two differ. */
export async function replay(harness: StoreHarness, path: readonly Step[], rules: Rules): Promise<void> {
  const real = new Real(harness, rules)
  let before: World = begin(rules)
  for (const [n, step] of path.entries()) {
    const way = (): string =>
      path
        .slice(0, n + 1)
        .map(told)
        .join(' | ')
    await real.take(step, before).catch((error: unknown) => {
      throw new Error(`${way()}: ${(error as Error).message}`, { cause: error })
    })
    const differs = await real.differs(step.to)
    if (differs !== null) throw new Error(`${way()}: ${differs}`)
    before = step.to
  }
}

class Real {
  readonly #harness: StoreHarness
  readonly #onLeaseExpired: 'retry' | 'unknown'
  readonly #id: RecordId = newId()
  readonly #others: Bystanders
  readonly #owners: Owner[] = []

  constructor(harness: StoreHarness, { retryLapsed }: Pick<Rules, 'retryLapsed'>) {
    this.#harness = harness
    this.#others = new Bystanders(harness, this.#id)
    this.#onLeaseExpired = retryLapsed ? 'retry' : 'unknown'
  }

  async take({ name, attempt, to }: Step, before: World): Promise<void> {
    // Fences and versions begin at the store's time: no two writes of one record share a millisecond.
    this.#harness.advance(5)
    const owner = attempt === null ? null : (this.#owners[attempt] as Owner)
    const was = attempt === null ? undefined : before.attempts[attempt]
    switch (name) {
      case 'a client asks':
        this.#owners.push({ token: newToken(), records: recording(this.#harness), fence: 0, createdAt: 0 })
        return
      case 'its claim arrives':
      case 'its claim arrives, the reply is lost':
      case 'it asks for its claim again': {
        const decides = name === 'it asks for its claim again' || was?.at === 'asking'
        const granted = await this.#claim(owner as Owner, decides)
        if (name === 'its claim arrives, the reply is lost') untold(owner as Owner)
        const isOwner =
          to.record !== null &&
          to.record.by === attempt &&
          (to.record.state === 'in_progress' || to.record.lapsed)
        const expected = isOwner && (before.record?.by !== attempt || name === 'it asks for its claim again')
        if (granted !== expected) throw new Error(`the claim was ${granted ? 'granted' : 'refused'}`)
        return
      }
      case 'it renews': {
        const renewal = { id: this.#id, token: (owner as Owner).token, dueIn: LEASE, dropIn: UNRESOLVED }
        const [renewed] = await this.#harness.register.renew([renewal])
        if (!renewed) throw new Error('the renewal was refused')
        return
      }
      case 'its outcome arrives':
      case 'its outcome arrives, the reply is lost': {
        const outcome = was?.outcome as Outcome
        const accepted = await this.#settle(owner as Owner, outcome)
        const isWritten = to.record?.by === attempt && to.record?.state === outcome
        if (accepted !== isWritten && before.record !== to.record)
          throw new Error(`the outcome was ${accepted ? 'accepted' : 'refused'}`)
        return
      }
      case 'the lease lapses':
      case 'the sweeper writes down that it fell silent':
      case 'the upstream is asked, and has done it':
      case 'the upstream is asked, and knows nothing':
      case 'an operator says: completed':
      case 'an operator says: retryable':
      case 'its retention ends':
      case 'the store loses the record':
      case 'a replica of the store hears of the record':
      case 'the store fails over':
        return this.#others.take(name, to)
      case 'it writes its claim again': {
        const { token, records, fence, createdAt } = owner as Owner
        orThrow(await records.reclaim(this.#id, draft('in_progress', token, { fence, createdAt }), CLAIMED))
        return
      }
      case 'it writes its outcome again':
        for (const { again } of (owner as Owner).records.recent()) orThrow(await again())
        return
      case 'it waits no longer for the reply':
        untold(owner as Owner)
        return
      // Nothing that the store sees.
      case 'it hears that it has claimed':
      case 'the grace ends':
      case 'it withdraws':
      case 'its lease grows old':
      case 'it sends':
      case 'it cannot send':
      case 'the upstream executes it':
      case 'it never arrives':
      case 'it is answered':
      case 'the answer says that nothing was done':
      case 'the answer says nothing':
      case 'the exchange breaks off':
      case 'its process dies':
        return
    }
  }

  differs(world: World): Promise<string | null> {
    return this.#others.differs(world, (attempt) => (this.#owners[attempt] as Owner).token)
  }

  /** As `claimRecord` and `contest` do it. */
  async #claim(owner: Owner, decides: boolean): Promise<boolean> {
    const claim = draft('in_progress', owner.token)
    const { records } = owner
    const reply = orThrow(await records.claim(this.#id, claim, CLAIMED))
    // A second copy of a claim that was granted changes nothing.
    if (!decides) return reply.kind === 'claimed' && !reply.recognised
    if (reply.kind === 'claimed') return this.#granted(owner, reply.stamp)
    const asked = {
      recipe: claim.recipe,
      rawDigest: claim.rawDigest,
      fingerprint: claim.fingerprint,
      rawDigestUnder: () => claim.rawDigest,
    }
    const decision = decide(reply.record, asked, { onLeaseExpired: this.#onLeaseExpired }, reply.now)
    if (decision.kind !== 'take_over') return false
    const taken = orThrow(await records.takeOver(this.#id, decision.from, claim, CLAIMED))
    if (taken.kind !== 'claimed') throw new Error('it could not be taken over')
    return this.#granted(owner, taken.stamp)
  }

  #granted(owner: Owner, { fence, createdAt }: { readonly fence: number; readonly createdAt: number }): true {
    owner.fence = fence
    owner.createdAt = createdAt
    return true
  }

  async #settle({ token, records, fence, createdAt }: Owner, outcome: Outcome): Promise<boolean> {
    const spans =
      outcome === 'unknown'
        ? { dueIn: UNRESOLVED, dropIn: UNRESOLVED }
        : outcome === 'completed'
          ? { dueIn: TTL, dropIn: TTL }
          : CLAIMED
    const reply = orThrow(await records.settle(this.#id, draft(outcome, token, { fence, createdAt }), spans))
    return reply.kind !== 'refused'
  }
}

/** It does not know what it was granted. */
function untold(owner: Owner): void {
  owner.fence = 0
  owner.createdAt = 0
}

/** Whether the function that a step names is in its file. */
export function namesCode(where: readonly [file: string, what: string] | null): boolean {
  if (where === null) return true
  const [file, what] = where
  return readFileSync(new URL(`../../${file}`, import.meta.url), 'utf8').includes(what)
}
