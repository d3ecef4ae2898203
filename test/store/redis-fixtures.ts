import type { Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import { RedisKeys, type RedisOptions } from '../../src/store/redis/keys.ts'
import { openRedisStore } from '../../src/store/redis/store.ts'
import { type NewEpoch, type Store } from '../../src/store/register.ts'
import type { RedisServer } from '../support/redis.ts'
import { registerContract } from './contract.ts'
import { bytesOf, claim, newId, newToken, SPANS } from './fixtures.ts'

/** Longer than anything that is waited for. */
export const PATIENT: Millis = 30_000
export const APPLIED = { name: 'StoreUnavailable', maybeApplied: true }
export const NOT_APPLIED = { name: 'StoreUnavailable', maybeApplied: false }
export const KEYS = new RedisKeys('pay')
export const NOTE = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }

/** The key of a record's history. */
export const historyOf = (id: RecordId): string => KEYS.record(id).replace(':r:', ':h:')

/** A store of the service `pay`, and what it tells. */
export async function open(t: Test, url: string, options: Partial<RedisOptions> = {}) {
  const events: string[] = []
  const epochs: NewEpoch[] = []
  const held: Millis[] = []
  const waited: boolean[] = []
  let skew = 0
  const store = await openRedisStore({
    url,
    service: 'pay',
    timeoutMs: PATIENT,
    skew: () => skew,
    onEvent: (kind, detail) => void events.push(`${kind}: ${detail}`),
    onNewEpoch: (epoch) => void epochs.push(epoch),
    onHeld: (left) => void held.push(left),
    onWaited: (satisfied) => void waited.push(satisfied),
    ...options,
  })
  t.teardown(() => store.close())
  /** Moves the server's clock, as this store sees it. */
  const advance = (ms: Millis): void => void (skew += ms)
  return { store, events, epochs, held, waited, advance }
}

export const claiming = (token = newToken()): Buffer => bytesOf('in_progress', token)

/** For `until`. */
export const answers = (store: Store) => () =>
  store.ping().then(
    () => true,
    () => false,
  )

/** For `until`. */
export const takesClaims = (store: Store) => () =>
  claim(store).then(
    ({ done }) => done,
    () => false,
  )

/** A new id in this shard. */
export function idIn(shard: number): RecordId {
  const bytes = Buffer.from(newId(), 'base64url')
  bytes[0] = shard
  return bytes.toString('base64url') as RecordId
}

/** An end of an attempt, as another replica writes it. */
export async function end(store: Store, id: RecordId): Promise<void> {
  const { bytes } = await store.get(id)
  const write = bytesOf('unknown', newToken())
  const reply =
    bytes === null
      ? await store.put(id, write, SPANS)
      : await store.swap(id, { version: bytes.readUIntBE(4, 6) }, write, SPANS, false)
  if (!reply.done) throw new Error('not written')
}

/** A watcher that counts its notifications. */
export async function watch(store: Store, id: RecordId = newId()) {
  const watcher = { told: 0, stop: () => {} }
  watcher.stop = await store.watch(id, () => void watcher.told++)
  return watcher
}

/** From now on the server has replaced another one: its data says so. */
export async function replacedBy(server: RedisServer): Promise<void> {
  const old = `${'0'.repeat(40)} 1 2`
  await server.command('MSET', ...KEYS.epochs.flatMap((key) => [key, old]))
}

/** Another id of the same shard: without looks each shard has a grace of its own. */
export function sibling(id: RecordId): RecordId {
  return idIn(KEYS.shardOf(id))
}

/** The contract of stores, on servers that `flush` empties. */
export function redisContract(
  t: Test,
  name: string,
  url: string,
  flush: () => Promise<unknown>,
  options: Partial<RedisOptions> = {},
): void {
  let skew = 0
  const open = (service: string) =>
    openRedisStore({ url, service, timeoutMs: PATIENT, onEvent: () => {}, skew: () => skew, ...options })
  registerContract(t, name, async () => {
    const [register, peer, other] = await Promise.all(
      ['pay', 'pay', 'pay.eu'].map(open) as [Promise<Store>, Promise<Store>, Promise<Store>],
    )
    await flush()
    return {
      register,
      peer,
      other,
      tellsPeers: true,
      advance: (ms) => void (skew += ms),
      [Symbol.asyncDispose]: async () =>
        void (await Promise.all([register.close(), peer.close(), other.close()])),
    }
  })
}
