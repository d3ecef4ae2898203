import type { Exposition } from '../observe/metrics.ts'

/** State for the open paths (contract §12). */
export interface Health {
  readonly draining: () => boolean
  readonly started: () => boolean
  /** Whether a process serves traffic. */
  readonly isServed: () => boolean
  /** Resolves once the event loop of each such process has turned. */
  readonly turned: () => Promise<void>
  /** Pings the store, within its timeout. */
  readonly store: () => Promise<{ up: boolean; detail: string | null }>
  readonly readinessNeedsStore: boolean
  /** Why this replica does not claim beside others; null: it may. */
  readonly conflict: () => string | null
  readonly exposition: () => Promise<Exposition>
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
