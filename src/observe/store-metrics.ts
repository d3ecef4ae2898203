import type { Register } from '../store/register.ts'
import { StoreUnavailable } from '../store/register.ts'
import type { Metrics } from './metrics.ts'

const OPERATIONS = [
  'put',
  'swap',
  'get',
  'renew',
  'due',
  'remove',
  'list',
  'notes',
  'throttle',
  'ping',
  'traits',
] as const

/** Counts and times the operations of a store; changes nothing of them. */
export function withMetrics(register: Register, metrics: Metrics): Register {
  const store = register.name
  const wrapped: Record<string, unknown> = {
    name: store,
    // Says nothing about the store: it waits for it no longer than it must, and throws nothing.
    watch: register.watch.bind(register),
    // Off the path of requests, and done without where it fails.
    note: register.note.bind(register),
    close: () => register.close(),
  }
  metrics.count('idempotency_store_errors_total', { store }, 0)
  // Set once per change: the store is asked twice per protected request. The breaker may have set it to 1 meanwhile.
  let up = false
  const say = (answered: boolean): void => {
    if (answered && up) return
    up = answered
    metrics.set('idempotency_store_up', { store }, answered ? 1 : 0)
  }
  for (const operation of OPERATIONS) {
    const labels = { store, operation }
    const run = register[operation].bind(register) as (...args: unknown[]) => Promise<unknown>
    wrapped[operation] = (...args: unknown[]) => {
      const startedAt = performance.now()
      const reply = run(...args)
      const took = (): void =>
        metrics.observe('idempotency_store_operation_seconds', labels, (performance.now() - startedAt) / 1000)
      // Beside the operation, not between it and its caller: each promise in between costs a turn of the microtasks.
      void reply.then(
        () => {
          say(true)
          took()
        },
        (error: unknown) => {
          metrics.count('idempotency_store_errors_total', { store })
          if (error instanceof StoreUnavailable) say(false)
          took()
        },
      )
      return reply
    }
  }
  return wrapped as unknown as Register
}
