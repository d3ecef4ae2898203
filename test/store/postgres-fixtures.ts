import type { Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import {
  openPostgresStore,
  type PostgresOptions,
  type PostgresStore,
} from '../../src/store/postgres/store.ts'
import type { NewEpoch } from '../../src/store/register.ts'
import type { Database } from '../support/postgres.ts'
import { bytesOf, HOUR, newId, newToken, SPANS, until } from './fixtures.ts'

/** A timeout that no slow machine reaches; locks are waited for a quarter of it. */
export const PATIENT: Millis = 10_000
/** For tests that wait for it. */
export const FAST: Millis = 400

export const APPLIED = { name: 'StoreUnavailable', maybeApplied: true }
export const NOT_APPLIED = { name: /^StoreUnavailable|RecordLocked$/, maybeApplied: false }

export const claim = (token = newToken()) => bytesOf('in_progress', token)
/** The database `records` through a relay, or another port. */
export const urlAt = ({ port }: { readonly port: number }) => `postgres://owner@127.0.0.1:${port}/records`

/** A store that is closed with the test, and what it reports. */
export async function opened(t: Test, url: string, more: Partial<PostgresOptions> = {}) {
  const events: string[] = []
  const onEvent = (kind: string, detail: string) => void events.push(`${kind}: ${detail}`)
  const register = await openPostgresStore({ url, service: 'pay', timeoutMs: PATIENT, onEvent, ...more })
  t.teardown(() => register.close())
  return { register, events }
}

const isShared = (asked: Promise<boolean>): Promise<boolean> => asked.catch(() => false)
export const answers = (register: PostgresStore) => () => isShared(register.ping().then(() => true))
export const works = (register: PostgresStore) => () =>
  isShared(register.put(newId(), claim(), SPANS).then(({ done }) => done))

/** How many connections of ours the server has, by its own count. */
export async function connections(database: Database, which = ''): Promise<number> {
  const own = "FROM pg_stat_activity WHERE application_name = 'idempotency-proxy'"
  return (await database.sql(`SELECT ${own} ${which}`)).length
}

/** A store with a grace, which has looked at its server. */
export async function openedWithGrace(t: Test, url: string, more: Partial<PostgresOptions> = {}) {
  let skew = 0
  const epochs: NewEpoch[] = []
  const { register: store } = await opened(t, url, {
    grace: 10 * HOUR,
    skew: () => skew,
    onNewEpoch: (epoch) => void epochs.push(epoch),
    ...more,
  })
  await until(() => epochs.length > 0)
  /** Moves the server's clock, as this store sees it. */
  const advance = (time: Millis) => void (skew += time)
  return { store, epochs, advance }
}

/** Claims until one is granted. Returns the results of the attempts, without immediate repeats. */
export async function claimed(
  store: PostgresStore,
  idOf: () => RecordId = newId,
): Promise<readonly string[]> {
  const found: string[] = []
  await until(async () => {
    const kind = await store.put(idOf(), claim(), SPANS).then(
      () => 'granted',
      (error: Error) => error.name,
    )
    if (found.at(-1) !== kind) found.push(kind)
    return kind === 'granted'
  })
  return found
}
