import { TOMBSTONE, TTL } from './config.ts'

/** What became of one request at the upstream, to the upstream's knowledge. */
type End = 'open' | 'completed' | 'released' | 'uncertain'

interface Attempt {
  readonly n: number
  readonly record: string | null
  /** The whole request arrived: the work counts as done, unless the answer says otherwise. */
  whole: boolean
  end: End
  endedAt: number
}

interface Operation {
  readonly path: string
  readonly attempts: Attempt[]
}

/** Routes without the promise, by setting or by mode. */
const UNPROMISED = new Set(['/v1/lenient', '/v1/shadow', '/v1/unguarded', '/v1/ignored', '/v1/passed'])
/** Its unresolved records end within the run. */
const FADES = '/v1/fading'
/** Answers of the upstream that mean that nothing was done (profile `standard`). */
const RELEASING = new Set([401, 403, 407, 408, 421, 425, 429])
const UNCERTAIN = new Set([502, 503, 504])

/**
 * The driver's knowledge of every operation that it sent, by its own numbers and independent of the proxy: how often the
 * upstream executed it, and whether its record must be unresolved.
 */
export class Ledger {
  readonly #operations = new Map<string, Operation>()
  /** Record id → the latest attempt of it. */
  readonly #latest = new Map<string, { readonly path: string; readonly attempt: Attempt }>()

  #attempts = 0

  /** A request has reached the upstream. */
  arrived(operation: string, path: string, record: string | null): Attempt {
    const known = this.#operations.get(operation) ?? { path, attempts: [] }
    this.#operations.set(operation, known)
    const n = known.attempts.length + 1
    const attempt: Attempt = { n, record, whole: false, end: 'open', endedAt: 0 }
    known.attempts.push(attempt)
    this.#attempts++
    if (record !== null) this.#latest.set(record, { path, attempt })
    return attempt
  }

  /** Its answer was sent whole (`status`), or never will be (null). */
  ended(attempt: Attempt, status: number | null, retryAfter: boolean): void {
    if (attempt.end !== 'open') return
    attempt.endedAt = performance.now()
    if (status === null) attempt.end = 'uncertain'
    else if (RELEASING.has(status) || (status === 503 && retryAfter)) attempt.end = 'released'
    else attempt.end = UNCERTAIN.has(status) ? 'uncertain' : 'completed'
  }

  /** The number of the execution that a replay of the operation must show. */
  executions(operation: string): readonly number[] {
    return this.#effects(this.#operations.get(operation)).map(({ n }) => n)
  }

  /** Requests that reached the upstream. */
  get attempts(): number {
    return this.#attempts
  }

  /** Operations that the upstream executed and that the proxy promises to execute once. */
  get promised(): number {
    return this.#promised().length
  }

  /** Executed twice, the second time before the first one's retention can have ended. */
  twice(): string[] {
    return this.#promised()
      .filter((operation) => {
        const effects = this.#effects(operation)
        const kept = operation.path === '/v1/strict' ? TTL + TOMBSTONE : TTL
        return effects.some((one, n) => n > 0 && one.endedAt - (effects[n - 1] as Attempt).endedAt < kept)
      })
      .map(({ path, attempts }) => `${path}: ${attempts.map(({ end }) => end).join(', ')}`)
  }

  /** Ids of the records that must be unresolved now: their latest attempt ended with its outcome uncertain. */
  unresolved(): Set<string> {
    const ids = [...this.#latest].filter(
      ([, { path, attempt }]) => attempt.end === 'uncertain' && path !== FADES,
    )
    return new Set(ids.map(([id]) => id))
  }

  #promised(): Operation[] {
    return [...this.#operations.values()].filter(
      (operation) => !UNPROMISED.has(operation.path) && this.#effects(operation).length > 0,
    )
  }

  #effects(operation: Operation | undefined): Attempt[] {
    return (operation?.attempts ?? []).filter(({ whole, end }) => whole && end !== 'released')
  }
}
