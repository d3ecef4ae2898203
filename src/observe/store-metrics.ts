import { around, OPERATIONS } from '../store/around.ts'
import { type Store, StoreUnavailable } from '../store/register.ts'
import type { Metrics } from './metrics.ts'

/** Counts and times the operations of a store. */
export function withMetrics(store: Store, metrics: Metrics): Store {
  const { name } = store
  const labels = Object.fromEntries(OPERATIONS.map((operation) => [operation, { store: name, operation }]))
  metrics.count('idempotency_store_errors_total', { store: name }, 0)
  // Set once per change: the store is used twice per protected request. The breaker may have set it to 1 meanwhile.
  let up = false
  const setUp = (answered: boolean): void => {
    if (answered && up) return
    up = answered
    metrics.set('idempotency_store_up', { store: name }, answered ? 1 : 0)
  }
  return around(store, (operation, run) => {
    // Off the path of requests, which do without it if it fails.
    if (operation === 'note') return run()
    const startedAt = performance.now()
    const reply = run()
    const observe = (): void =>
      metrics.observe(
        'idempotency_store_operation_seconds',
        labels[operation] as { store: string; operation: string },
        (performance.now() - startedAt) / 1000,
      )
    void reply.then(
      () => {
        setUp(true)
        observe()
      },
      (error: unknown) => {
        metrics.count('idempotency_store_errors_total', { store: name })
        if (error instanceof StoreUnavailable) setUp(false)
        observe()
      },
    )
    return reply
  })
}
