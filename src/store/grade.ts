import { randomBytes } from 'node:crypto'
import type { Millis, RecordDraft, RecordId } from '../core/record.ts'
import { NO_REQUEST, nullIfUnavailable, orThrow, Records } from './records.ts'
import type { Store, StoreTraits } from './register.ts'

/**
 * Values of `idempotency_store_grade` (contract §13). `unfit`: it may drop records early, or let two owners claim a key. `volatile`: the
 * loss of one server or process is enough to lose claims. `unknown`: the store does not say. `strict`: two have to be lost together.
 */
export const GRADES = ['unfit', 'volatile', 'unknown', 'strict'] as const
export type Grade = (typeof GRADES)[number]

export interface Grading {
  readonly grade: Grade
  /** For people, one sentence each: all risks that may be accepted, including those that lower the grade. */
  readonly reasons: readonly string[]
}

/** `grace`: 0 means off. `proof`: the result of {@link disproof}; null: it could not run. */
export function gradingOf(traits: StoreTraits, grace: Millis, proof: string | null): Grading {
  const { evicts, durable, findings, hasIdentity } = traits
  const forgets = hasIdentity && grace > 0 ? null : traits.forgets
  const why = grace > 0 ? NO_GRACE : GRACE_OFF
  const isWrong = proof !== null && proof !== PROVEN
  const reasons = [...(isWrong ? [proof] : []), ...(forgets === null ? [] : [forgets, why]), ...findings]
  if (isWrong || evicts === true) return { grade: 'unfit', reasons }
  if (durable === false || forgets !== null) return { grade: 'volatile', reasons }
  return { grade: evicts === false && durable === true ? 'strict' : 'unknown', reasons }
}

/** The weakest promises of several stores or servers that all have to keep them. */
export function weakest(all: readonly StoreTraits[]): Omit<StoreTraits, 'findings' | 'refusals'> {
  const least = (of: 'durable' | 'evicts', worst: boolean) =>
    all.some((one) => one[of] === worst) ? worst : all.some((one) => one[of] === null) ? null : !worst
  return {
    durable: least('durable', false),
    evicts: least('evicts', true),
    forgets: all.find(({ forgets }) => forgets !== null)?.forgets ?? null,
    hasIdentity: all.every(({ hasIdentity }) => hasIdentity),
  }
}

/** What several stores or servers say; equal sentences once, with the names of those who say it unless all do. */
export function said<Of extends { readonly name: string }>(
  all: readonly Of[],
  what: (one: Of) => readonly string[] | string | undefined,
): string[] {
  const sentences = all.flatMap((one) => [what(one) ?? []].flat().map((sentence) => ({ sentence, one })))
  return [...Map.groupBy(sentences, ({ sentence }) => sentence)].map(([sentence, by]) =>
    by.length === all.length ? sentence : `${by.map(({ one }) => one.name).join(', ')}: ${sentence}`,
  )
}

const GRACE_OFF = 'store.grace is off: keys whose claims are lost in a failover may be executed again.'
const NO_GRACE =
  'The store does not identify its process, so there is no grace after a failover (store.grace): keys whose claims are lost may be executed again.'
export const PROVEN = 'It accepted one claim of a key and refused the next.'
/** By then the test record expires, even if this process dies. */
const PROOF_LIFE: Millis = 5000

/**
 * Proves that the store grants one claim per key (contract §9): claims a test key, claims it again, expects a refusal, and removes it.
 * @returns {@link PROVEN}, or what the store did wrong
 * @throws {StoreUnavailable} as every operation does: nothing is proven.
 */
export async function disproof(store: Store): Promise<string> {
  const records = new Records(store)
  const id = randomBytes(32).toString('base64url') as RecordId
  const first = claimOf(randomBytes(16))
  // The sweeper never finds it due.
  const spans = { dueIn: 2 * PROOF_LIFE, dropIn: PROOF_LIFE }
  // Nobody can have claimed this key before, so no grace applies.
  const claimed = orThrow(await records.claim(id, first, spans, 'fresh'))
  if (claimed.kind !== 'claimed') return 'The store reports a brand-new key as taken.'
  const again = orThrow(await records.claim(id, claimOf(randomBytes(16)), spans, 'fresh'))
  if (again.kind !== 'exists' || !again.record.token.equals(first.token))
    return 'The store lets two owners claim one key: requests are executed twice.'
  // Otherwise it expires.
  await store.remove(id, claimed.stamp.version)
  return PROVEN
}

/** For {@link gradingOf}: the store accepts no claims now. */
export const unproven = nullIfUnavailable

function claimOf(token: Buffer): RecordDraft {
  return { ...NO_REQUEST, state: 'in_progress', token }
}
