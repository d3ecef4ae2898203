import type { Millis } from '../core/record.ts'
import type { Store } from '../store/register.ts'
import type { Logger } from './log.ts'
import type { Metrics } from './metrics.ts'

/** How often a store's settings are looked at again: an operator may mend them, or break them. */
const LOOK_EVERY: Millis = 30_000
const LOOK_RETRY: Millis = 250

export interface StoreGrade {
  /** True also where the store does not say, or has not been asked yet: nothing strict is promised on a guess. */
  mayEvict(): boolean
  /** The store has come back: what it promised before counts no more. */
  lookAgain(): void
  stop(): void
}

/** Looks at what the store promises, warns of what it does not, and grades it (contract §9). */
export async function watchStoreGrade(
  store: Pick<Store, 'name' | 'traits'>,
  metrics: Metrics,
  log: Logger,
): Promise<StoreGrade> {
  let timer: NodeJS.Timeout | undefined
  let said = ''
  let mayEvict = true
  let looks = 0
  const look = async (): Promise<void> => {
    const nth = ++looks
    let next = LOOK_EVERY
    try {
      const { durable, evicts, findings } = await store.traits()
      // Asked before the store came back: it may have been another server that answered.
      if (nth !== looks) return
      mayEvict = evicts !== false
      const grade = evicts === true ? 0 : durable === false ? 1 : durable === true && evicts === false ? 3 : 2
      metrics.set('idempotency_store_grade', { store: store.name }, grade)
      if (findings.join() !== said) for (const finding of findings) log.warn({ store: store.name }, finding)
      said = findings.join()
    } catch (error) {
      if (nth !== looks) return
      if (said !== 'down')
        log.error({ store: store.name, error: (error as Error).message }, 'the store cannot be asked')
      said = 'down'
      next = LOOK_RETRY
    }
    clearTimeout(timer)
    timer = setTimeout(() => void look(), next).unref()
  }
  await look()
  return {
    mayEvict: () => mayEvict,
    lookAgain() {
      mayEvict = true
      void look()
    },
    stop: () => clearTimeout(timer),
  }
}
