import type { Register } from '../store/register.ts'
import { StoreUnavailable } from '../store/register.ts'
import type { Metrics } from './metrics.ts'

const OPERATIONS = ['put', 'swap', 'get', 'renew', 'due', 'remove', 'throttle', 'ping', 'traits'] as const

/** Counts and times the operations of a store; changes nothing of them. */
export function timed(register: Register, metrics: Metrics): Register {
  const store = register.name
  const wrapped: Record<string, unknown> = {
    name: store,
    // Says nothing about the store: it waits for it no longer than it must, and throws nothing.
    watch: register.watch.bind(register),
    close: () => register.close(),
  }
  for (const operation of OPERATIONS) {
    const labels = { store, operation }
    const run = register[operation].bind(register) as (...args: unknown[]) => Promise<unknown>
    wrapped[operation] = async (...args: unknown[]) => {
      const startedAt = performance.now()
      try {
        const reply = await run(...args)
        metrics.set('idempotency_store_up', { store }, 1)
        return reply
      } catch (error) {
        metrics.count('idempotency_store_errors_total', { store })
        if (error instanceof StoreUnavailable) metrics.set('idempotency_store_up', { store }, 0)
        throw error
      } finally {
        metrics.observe('idempotency_store_operation_seconds', labels, (performance.now() - startedAt) / 1000)
      }
    }
  }
  return wrapped as unknown as Register
}
