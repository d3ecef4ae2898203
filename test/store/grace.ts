import type { Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import { InGrace, type NewEpoch, type Store } from '../../src/store/register.ts'
import { bytesOf, claim, HOUR, newId, newToken, SPANS, until } from './fixtures.ts'

/** Longer than any test: time passes where a test says so. */
export const GRACE: Millis = 10 * HOUR

export interface GraceStore {
  readonly store: Store
  readonly epochs: readonly NewEpoch[]
  /** Moves the server's clock, as this store sees it. */
  advance(ms: Millis): void
}

/** A service on a server of its own, or alone on a shared one. */
export interface GraceService {
  open(t: Test): Promise<GraceStore>
  /** The data says from now on that the server has replaced another one. */
  promoted(): Promise<unknown>
  /** The server loses all of the service. */
  lose(): Promise<unknown>
  /** All connections break: whoever connects again looks who the server is. */
  breakAll(): Promise<unknown>
  /** Another id that has the same grace, even where nobody has looked. */
  sibling(id: RecordId): RecordId
}

/** How a claim is held. */
export async function heldBy(store: Store, id?: RecordId): Promise<InGrace> {
  const error = await claim(store, id).then(
    () => null,
    (error: unknown) => error,
  )
  if (!(error instanceof InGrace)) throw new Error(`not held but ${String(error)}`)
  return error
}

/** What each store with failovers promises of the grace after one. `make`: an empty service. */
export function graceContract(t: Test, name: string, make: () => Promise<GraceService>): void {
  const test = (title: string, body: (t: Test, service: GraceService) => Promise<void>) =>
    void t.test(`${name}: ${title}`, async (t) => body(t, await make()))
  const openPromoted = async (t: Test, service: GraceService): Promise<GraceStore> => {
    await service.promoted()
    return service.open(t)
  }

  test('W01 a server that replaced another grants no claim until the grace is over', async (t, service) => {
    const { store, advance, epochs } = await openPromoted(t, service)
    const first = await heldBy(store)
    t.ok(first.left > 0 && first.left <= GRACE)
    const end = first.now + first.left
    t.ok(end >= first.since + GRACE && end <= first.since + GRACE + 50)
    t.equal(first.maybeApplied, false)
    await until(() => epochs.length > 0)
    t.match(epochs[0], { left: Number })
    t.ok((epochs[0]?.left ?? 0) > 0 && epochs[0]?.concerns(newId()))
    const id = newId()
    t.match(await claim(store, id, 'again'), { done: true }, 'an earlier claim is written again')
    t.match(await claim(store, id), { done: false }, 'and answers retries')
    t.match(await store.get(id), { bytes: Buffer })
    t.match(await claim(store, newId(), 'fresh'), { done: true }, 'a key created since is claimed')
    advance(GRACE / 2)
    t.equal((await heldBy(store)).since, first.since)
    advance(GRACE / 2)
    t.match(await claim(store), { done: true })
  })

  test('W01 of many claims the first begins the one grace, and none is granted', async (t, service) => {
    const peers = [await service.open(t), await service.open(t)] as const
    await service.promoted()
    const id = newId()
    const all = await Promise.all(
      Array.from({ length: 50 }, (_, n) => heldBy(peers[n % 2 ? 0 : 1].store, service.sibling(id))),
    )
    t.equal(new Set(all.map(({ since }) => since)).size, 1)
  })

  test('W02 a grace holds takeovers, too, but not outcomes', async (t, service) => {
    const { store, advance } = await openPromoted(t, service)
    const [id, token] = [newId(), newToken()]
    await store.put(id, bytesOf('in_progress', token), SPANS, 'again')
    const own = { token, states: ['in_progress'] } as const
    const outcome = await store.swap(id, own, bytesOf('failed_retryable', token), SPANS, false)
    t.ok(outcome.done)
    const over = { version: outcome.done ? outcome.stamp.version : 0 }
    const takeOver = async (condition = over) =>
      store.swap(id, condition, bytesOf('in_progress', newToken()), SPANS, true)
    await t.rejects(takeOver(), { name: 'InGrace', maybeApplied: false })
    t.match(await takeOver({ version: 1 }), { done: false })
    advance(GRACE)
    t.match(await takeOver(), { done: true })
  })

  test('W04 a proxy that comes after the grace begins another one', async (t, service) => {
    const late = await service.open(t)
    await until(() => late.epochs.length === 1)
    await service.promoted()
    const { store, advance } = await service.open(t)
    const first = await heldBy(store)
    advance(GRACE)
    t.match(await claim(store), { done: true })
    late.advance(GRACE)
    // It looks when it connects, and every few hours.
    await service.breakAll()
    await until(() => late.epochs.length === 2)
    await until(() =>
      store.ping().then(
        () => true,
        () => false,
      ),
    )
    const second = await heldBy(store)
    t.ok(second.left > 0 && second.since === first.since, 'for what the late one writes again')
    advance(GRACE)
    t.match(await claim(store), { done: true })
  })

  test('W01 a claim written again extends a grace that is about to end', async (t, service) => {
    const { store, advance } = await openPromoted(t, service)
    const id = newId()
    const { since } = await heldBy(store, id)
    const at = async (time: Millis) => advance(since + time - (await store.ping()))
    const endAt = async (time: Millis): Promise<Millis> => {
      await at(time)
      const { now, left } = await heldBy(store, service.sibling(id))
      return now + left - since
    }
    const again = () => claim(store, service.sibling(id), 'again')
    const before = await endAt(GRACE / 2)
    await again()
    // Now and the time left are each rounded to a millisecond; an extension is half a grace.
    t.ok((await endAt(GRACE / 2)) - before <= 1, 'nothing is extended while there is enough time')
    // Once more where the machine was too slow for this moment.
    do await at(GRACE - 150)
    while ((await again()).now >= since + GRACE)
    t.ok((await endAt(GRACE - 150)) > before)
    await at(2 * GRACE)
    t.match(await claim(store, service.sibling(id)), { done: true }, 'up to twice its length')
  })

  test('a new store has no grace, even if many proxies start at once', async (t, service) => {
    const all = await Promise.all(Array.from({ length: 4 }, () => service.open(t)))
    const claims = Array.from({ length: 40 }, (_, n) => claim((all[n % 4] as GraceStore).store))
    t.ok((await Promise.all(claims)).every(({ done }) => done))
    await until(() => all.every(({ epochs }) => epochs.length > 0))
    for (const { epochs } of all) t.ok(epochs.every(({ left }) => left === 0))
  })

  test('W01 a store that lost its data is not new to who has claimed on it', async (t, service) => {
    const { store, epochs } = await service.open(t)
    const id = newId()
    t.match(await claim(store, id), { done: true })
    await until(() => epochs.length > 0)
    await service.lose()
    await heldBy(store, service.sibling(id))
    await service.lose()
    const newcomer = await service.open(t)
    t.match(await claim(newcomer.store, service.sibling(id)), { done: true }, 'it knows of no earlier claim')
    await heldBy(store, service.sibling(id))
    await heldBy(newcomer.store, service.sibling(id))
  })

  test('W01 a clock set back begins a new grace', async (t, service) => {
    const { store, advance, epochs } = await service.open(t)
    const id = newId()
    t.match(await claim(store, id), { done: true })
    await until(() => epochs.length > 0)
    advance(-HOUR)
    await heldBy(store, service.sibling(id))
  })
}
