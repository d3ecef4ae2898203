import type { Metrics } from '../observe/metrics.ts'

/** State for the open paths (contract §12). */
export interface Health {
  readonly draining: () => boolean
  readonly started: () => boolean
  /** Pings the store, within its timeout. */
  readonly store: () => Promise<{ up: boolean; detail: string | null }>
  readonly readinessNeedsStore: boolean
  /** Why this replica does not claim beside others; null: it may. */
  readonly conflict: () => string | null
  readonly metrics: Metrics
}

/** Whether the store answers, and if not, why. */
export async function healthOf(store: { ping(): Promise<unknown> }): ReturnType<Health['store']> {
  try {
    await store.ping()
    return { up: true, detail: null }
  } catch (error) {
    return { up: false, detail: (error as Error).message }
  }
}
