import { type Static, Type } from 'typebox'
import type { Millis } from '../core/record.ts'
import { namesOf, SHADOW_VERDICTS, type ShadowVerdict } from '../protect/outcomes.ts'
import { count, described, object } from './schemas.ts'

const figures = {
  requests: count('Requests that shadow mode judged.'),
  executed: count('Of these: enforce would have executed them, too.'),
  prevented: count('Duplicates that were executed, but would not have been under enforce.'),
  differed: count('Of these: the second response was different.'),
  refused: count('Requests that enforce would have refused: fix their clients first.'),
  unjudged: count('Requests that could not be judged.'),
  newKeys: count('Operations repeated under a new key within a minute: no key protects such clients.'),
  retriedIn1m: count('Retries that found a completed record less than a minute old.'),
  retriedIn1h: count('The same, less than an hour old.'),
  retriedIn1d: count('The same, less than a day old.'),
  retriedLater: count('The same, older.'),
}

export const shadowRow = object({
  route: Type.String({ description: 'Name of the route.' }),
  ...figures,
  verdicts: described(
    'Of all requests.',
    Object.fromEntries(Object.entries(SHADOW_VERDICTS).map(([verdict, { says }]) => [verdict, count(says)])),
  ),
})

export type ShadowTallyRow = Static<typeof shadowRow>

/** Figures by name, in table order. */
export const SHADOW_FIGURES = Object.keys(figures) as (keyof typeof figures)[]

const AGES: readonly (readonly [Millis, 'retriedIn1m' | 'retriedIn1h' | 'retriedIn1d'])[] = [
  [60_000, 'retriedIn1m'],
  [3_600_000, 'retriedIn1h'],
  [86_400_000, 'retriedIn1d'],
]

/** Whether `enforce` would not have executed it again. */
export function isDuplicate(verdict: unknown): boolean {
  return typeof verdict === 'string' && isVerdict(verdict) && SHADOW_VERDICTS[verdict].effect === 'prevented'
}

/** Rows of figures by route, starting at zero. */
export class RouteTable<Figures extends object> {
  readonly #rows = new Map<string, { route: string } & Figures>()
  readonly #zeros: () => Figures

  constructor(zeros: () => Figures) {
    this.#zeros = zeros
  }

  row(route: string): Figures {
    let row = this.#rows.get(route)
    if (row === undefined) {
      row = { route, ...this.#zeros() }
      this.#rows.set(route, row)
    }
    return row
  }

  rows(): ({ route: string } & Figures)[] {
    return [...this.#rows.values()].toSorted((a, b) => (a.route < b.route ? -1 : 1))
  }
}

export function zeros<N extends string>(names: readonly N[]): Record<N, number> {
  return Object.fromEntries(names.map((name) => [name, 0])) as Record<N, number>
}

/** Counts what shadow mode found, from counters or from a log. */
export class ShadowTally {
  readonly #table = new RouteTable(() => ({
    ...zeros(SHADOW_FIGURES),
    verdicts: zeros(namesOf(SHADOW_VERDICTS)),
  }))

  verdict(route: string, verdict: string, count = 1): void {
    if (!isVerdict(verdict)) return
    const row = this.#table.row(route)
    row.requests += count
    row[SHADOW_VERDICTS[verdict].effect] += count
    if (verdict === 'replay_differs') row.differed += count
    row.verdicts[verdict] = (row.verdicts[verdict] ?? 0) + count
  }

  newKey(route: string, count = 1): void {
    this.#table.row(route).newKeys += count
  }

  /** `age`: an upper bound. */
  retry(route: string, age: Millis, count = 1): void {
    const [, figure] = AGES.find(([bound]) => age <= bound) ?? [0, 'retriedLater' as const]
    this.#table.row(route)[figure] += count
  }

  /** Routes with a verdict of shadow mode. */
  rows(): ShadowTallyRow[] {
    return this.#table.rows().filter(({ requests }) => requests > 0)
  }
}

export function isVerdict(text: string): text is ShadowVerdict {
  return Object.hasOwn(SHADOW_VERDICTS, text)
}

export interface CounterSample {
  readonly name: string
  readonly labels: Readonly<Record<string, string>>
  readonly value: number
}

/** The tally from the counters and the retry ages of a process. */
export function tallyOf(samples: readonly CounterSample[]): ShadowTally {
  const tally = new ShadowTally()
  const below = new Map<string, number>()
  for (const { name, labels, value } of samples) {
    const { route = '' } = labels
    if (name === 'idempotency_shadow_total') tally.verdict(route, labels['verdict'] ?? '', value)
    if (name === 'idempotency_regenerated_keys_total') tally.newKey(route, value)
    if (name === 'idempotency_retry_age_seconds_bucket') {
      // Buckets are cumulative and in order.
      const bound = labels['le'] === '+Inf' ? Number.POSITIVE_INFINITY : Number(labels['le']) * 1000
      tally.retry(route, bound, value - (below.get(route) ?? 0))
      below.set(route, value)
    }
  }
  return tally
}
