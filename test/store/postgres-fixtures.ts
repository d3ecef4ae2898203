import type { Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { openPostgresStore, type PostgresOptions, type PostgresStore } from '../../src/store/postgres.ts'
import type { Database } from '../support/postgres.ts'
import { bytesOf, newId, newToken, SPANS } from './fixtures.ts'

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

const isMet = (asked: Promise<boolean>): Promise<boolean> => asked.catch(() => false)
export const answers = (register: PostgresStore) => () => isMet(register.ping().then(() => true))
export const works = (register: PostgresStore) => () =>
  isMet(register.put(newId(), claim(), SPANS).then(({ done }) => done))

/** How many connections of ours the server has, by its own count. */
export async function connections(database: Database, which = ''): Promise<number> {
  const own = "FROM pg_stat_activity WHERE application_name = 'idempotency-proxy'"
  return (await database.sql(`SELECT ${own} ${which}`)).length
}
