import type { Millis } from '../core/record.ts'
import { namesOf, SHADOW_VERDICTS, type ShadowVerdict } from '../protect/outcomes.ts'
import { SHADOW_FIGURES, type ShadowRow } from './shadow-schema.ts'

const AGES: readonly (readonly [Millis, 'retriedIn1m' | 'retriedIn1h' | 'retriedIn1d'])[] = [
  [60_000, 'retriedIn1m'],
  [3_600_000, 'retriedIn1h'],
  [86_400_000, 'retriedIn1d'],
]

/** It had been executed, or was being, and `enforce` would not have executed it again. */
export function isDuplicate(verdict: unknown): boolean {
  return typeof verdict === 'string' && isVerdict(verdict) && SHADOW_VERDICTS[verdict].effect === 'prevented'
}

type Row = { -readonly [K in keyof ShadowRow]: ShadowRow[K] }

/** Counts what shadow mode told, from wherever it is known. */
export class ShadowTally {
  readonly #rows = new Map<string, Row>()

  verdict(route: string, verdict: string, count = 1): void {
    if (!isVerdict(verdict)) return
    const row = this.#row(route)
    row.requests += count
    row[SHADOW_VERDICTS[verdict].effect] += count
    if (verdict === 'replay_differs') row.differed += count
    row.verdicts[verdict] = (row.verdicts[verdict] ?? 0) + count
  }

  newKey(route: string, count = 1): void {
    this.#row(route).newKeys += count
  }

  /** `age`: at most that. */
  retry(route: string, age: Millis, count = 1): void {
    const [, figure] = AGES.find(([bound]) => age <= bound) ?? [0, 'retriedLater' as const]
    this.#row(route)[figure] += count
  }

  /** Routes of which shadow mode has told a verdict. */
  rows(): ShadowRow[] {
    return [...this.#rows.values()]
      .filter(({ requests }) => requests > 0)
      .toSorted((a, b) => (a.route < b.route ? -1 : 1))
  }

  #row(route: string): Row {
    let row = this.#rows.get(route)
    if (row === undefined) {
      row = {
        route,
        ...(Object.fromEntries(SHADOW_FIGURES.map((name) => [name, 0])) as Omit<Row, 'route' | 'verdicts'>),
        verdicts: Object.fromEntries(namesOf(SHADOW_VERDICTS).map((verdict) => [verdict, 0])),
      }
      this.#rows.set(route, row)
    }
    return row
  }
}

export function isVerdict(text: string): text is ShadowVerdict {
  return Object.hasOwn(SHADOW_VERDICTS, text)
}

/** The same from the counters and the retry ages of a process. */
export function tallyOf(
  samples: readonly {
    readonly name: string
    readonly labels: Readonly<Record<string, string>>
    readonly value: number
  }[],
): ShadowTally {
  const tally = new ShadowTally()
  const below = new Map<string, number>()
  for (const { name, labels, value } of samples) {
    const { route = '' } = labels
    if (name === 'idempotency_shadow_total') tally.verdict(route, labels['verdict'] ?? '', value)
    if (name === 'idempotency_regenerated_keys_total') tally.newKey(route, value)
    if (name === 'idempotency_retry_age_seconds_bucket') {
      // Each bucket counts those below it as well; they come in their order.
      const bound = labels['le'] === '+Inf' ? Number.POSITIVE_INFINITY : Number(labels['le']) * 1000
      tally.retry(route, bound, value - (below.get(route) ?? 0))
      below.set(route, value)
    }
  }
  return tally
}
