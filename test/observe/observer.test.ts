import { pino } from 'pino'
import t, { type Test } from 'tap'
import { History } from '../../src/observe/history.ts'
import { Metrics } from '../../src/observe/metrics.ts'
import { observer } from '../../src/observe/observer.ts'
import { openTracing } from '../../src/observe/tracing.ts'
import { newProgress, summarize } from '../../src/protect/guard.ts'
import { type RequestSummary } from '../../src/protect/request.ts'
import { load, UPSTREAM } from '../config/support.ts'
import { newId } from '../store/fixtures.ts'

const LOGGER = pino({ level: 'silent' })

function history(): History {
  return new History({ note: async () => true, replica: 'here', onDropped: () => {} })
}

/** The levels of the lines that these requests log. */
function levelsOf(...traces: readonly Partial<RequestSummary>[]): string[] {
  const levels: string[] = []
  const logger = pino(
    { formatters: { level: (level) => ({ level }) } },
    { write: (line: string) => void levels.push(JSON.parse(line).level) },
  )
  const heard = observer(new Metrics(false), logger, history(), { routes: new Set(), completed() {} })
  for (const { route = 'pay', ...trace } of traces)
    heard.answered({
      ...summarize(
        { route: { name: route } as never, method: 'POST', traceId: null, progress: newProgress() },
        { outcome: null },
        null,
      ),
      ...trace,
    })
  return levels
}

void t.test('a request whose outcome becomes unknown logs a warning, one that finds it so not', async (t) => {
  t.strictSame(
    levelsOf(
      { outcome: 'upstream_timeout', before: 'absent', after: 'unknown' },
      { outcome: 'upstream_timeout', before: null, after: 'unknown' },
      { outcome: 'unknown', before: 'unknown', after: 'unknown' },
      { outcome: 'executed', before: 'absent', after: 'completed' },
    ),
    ['warn', 'warn', 'info', 'info'],
  )
})

void t.test('a scope that does not fit its clients is warned of once per route', async (t) => {
  const misfit = { outcome: 'caller_missing', cause: 'no Authorization but cookie, …' } as const
  t.strictSame(
    levelsOf(misfit, misfit, { ...misfit, route: 'other' }, { outcome: 'caller_missing', route: 'third' }),
    ['warn', 'info', 'warn', 'info'],
  )
  t.strictSame(
    levelsOf({ outcome: 'store_unavailable', cause: 'down' }),
    ['info'],
    'a cause of another outcome',
  )
})

void t.test('stored outcomes of routes with a status query are remembered for it, no others', async (t) => {
  const remembered: unknown[] = []
  const { completed } = observer(new Metrics(false), LOGGER, history(), {
    routes: new Set(['asked']),
    completed: (...args) => void remembered.push(args),
  })
  const [stored, released, other] = [newId(), newId(), newId()]
  completed('asked', 'stored', stored)
  completed('asked', 'released', released)
  completed('not asked', 'stored', other)
  t.strictSame(remembered, [['asked', stored]])
})

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
