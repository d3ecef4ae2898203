import t, { type Test } from 'tap'
import { openTracing } from '../../src/observe/tracing.ts'
import { load, UPSTREAM } from '../config/support.ts'

const REGISTERED = Symbol.for('opentelemetry.js.api.1')

function registered(t: Test, value: object): void {
  Object.assign(globalThis, { [REGISTERED]: value })
  t.teardown(() => void delete (globalThis as Record<symbol, unknown>)[REGISTERED])
}

async function opened(): Promise<{ tracing: unknown; unusable: string[] }> {
  const unusable: string[] = []
  const tracing = await openTracing(load(UPSTREAM), '0.0.0', (found) => unusable.push(found))
  return { tracing, unusable }
}

void t.test('without an SDK there is no tracing', async (t) => {
  t.strictSame(await opened(), { tracing: null, unusable: [] })
  registered(t, { version: '1.10.0', metrics: {} })
  t.strictSame(await opened(), { tracing: null, unusable: [] }, 'nor with one that has only metrics')
})

void t.test('an SDK with an older API is reported and not used', async (t) => {
  registered(t, { version: '1.0.4', trace: {} })
  t.strictSame(await opened(), { tracing: null, unusable: ['1.0.4'] })
})
