import type { Verification } from '../core/reconcile/verify.ts'
import type { Completed, Millis, RecordId } from '../core/record.ts'
import { CorruptRecord } from '../store/register.ts'
import type { AdminPorts, Recheck } from './ports.ts'
import type { AskedRow, Report } from './report-schema.ts'

export const MAX_SAMPLE = 1000
/** Questions under way at once: the upstream has other work. */
const AT_ONCE = 4
/** Behind it no question begins any more. */
const BEGIN_WITHIN: Millis = 20_000

const FIGURE = {
  agrees: 'agreed',
  differs: 'differing',
  disagrees: 'disagreed',
  undecided: 'undecided',
  not_asked: 'notAsked',
} as const satisfies Record<Verification['kind'], keyof AskedRow>

/** A sample of the completed records that are shown to it, each as likely as any other, asked about anew. */
export class Sample {
  readonly #size: number
  readonly #recheck: Recheck
  readonly #random: () => number
  readonly #rows = new Map<string, AskedRow>()
  readonly #ids: RecordId[] = []
  #shown = 0

  /** `random`: 0 to below 1. */
  constructor(size: number, recheck: Recheck, random: () => number) {
    this.#size = size
    this.#recheck = recheck
    this.#random = random
  }

  /** `age`: since the record was created. */
  show(id: RecordId, { route }: Completed, age: Millis): void {
    const from = this.#recheck.from(route)
    if (from === null || age < from) return
    this.#rowOf(route).eligible++
    this.#shown++
    if (this.#ids.length < this.#size) this.#ids.push(id)
    else {
      const at = Math.floor(this.#random() * this.#shown)
      if (at < this.#size) this.#ids[at] = id
    }
  }

  /** @throws {StoreUnavailable} */
  async ask(records: AdminPorts['records']): Promise<NonNullable<Report['asked']>> {
    const found: NonNullable<Report['asked']>['found'] = []
    const until = performance.now() + BEGIN_WITHIN
    const left = [...this.#ids]
    const work = async (): Promise<void> => {
      for (let id = left.pop(); id !== undefined; id = left.pop()) {
        const record = await completed(records, id)
        if (record === null) continue
        const rechecked: Verification =
          performance.now() < until
            ? await this.#recheck.ask(id, record)
            : { kind: 'not_asked', why: 'the report has taken long enough' }
        const row = this.#rowOf(record.route)
        row.sampled++
        row[FIGURE[rechecked.kind]]++
        if (rechecked.kind === 'disagrees' || rechecked.kind === 'differs')
          found.push({ id, route: record.route, verdict: rechecked.kind, why: rechecked.why })
      }
    }
    await Promise.all(Array.from({ length: AT_ONCE }, work))
    return {
      routes: [...this.#rows.values()].toSorted((a, b) => (a.route < b.route ? -1 : 1)),
      // What is worse first.
      found: found.toSorted((a, b) => rank(a) - rank(b) || (a.id < b.id ? -1 : 1)),
    }
  }

  #rowOf(route: string): AskedRow {
    let row = this.#rows.get(route)
    if (row === undefined) {
      row = {
        route,
        eligible: 0,
        sampled: 0,
        agreed: 0,
        differing: 0,
        disagreed: 0,
        undecided: 0,
        notAsked: 0,
      }
      this.#rows.set(route, row)
    }
    return row
  }
}

function rank({ verdict }: { readonly verdict: 'disagrees' | 'differs' }): number {
  return verdict === 'disagrees' ? 0 : 1
}

/** As it is now; null: somebody has deleted it, or it has expired. */
async function completed(records: AdminPorts['records'], id: RecordId): Promise<Completed | null> {
  try {
    const { record, now } = await records.get(id)
    return record?.state === 'completed' && now < record.expiresAt ? record : null
  } catch (error) {
    if (error instanceof CorruptRecord) return null
    throw error
  }
}
