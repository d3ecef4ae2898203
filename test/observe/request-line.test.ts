import { randomInt } from 'node:crypto'
import { pino } from 'pino'
import t from 'tap'
import { shortId } from '../../src/core/identity.ts'
import { type RecordId, STATES } from '../../src/core/record.ts'
import { History } from '../../src/observe/history.ts'
import { writeLine } from '../../src/observe/log.ts'
import { Metrics } from '../../src/observe/metrics.ts'
import { observer, shadowObserver } from '../../src/observe/observer.ts'
import { namesOf, REQUEST_OUTCOMES, SHADOW_VERDICTS } from '../../src/protect/outcomes.ts'
import type { ShadowSummary } from '../../src/protect/request.ts'

const lines: string[] = []
const logger = pino(
  {
    base: null,
    timestamp: pino.stdTimeFunctions.isoTime,
    formatters: { level: (level) => ({ level }) },
  },
  { write: (line: string) => void lines.push(line) },
)

/** Both clocks stand still. */
let [now, sinceStart] = [0, 0]
const [date, clock] = [Date.now, performance.now.bind(performance)]
t.before(() => {
  Date.now = () => now
  performance.now = () => sinceStart
})
t.teardown(() => Object.assign(Date, { now: date }) && Object.assign(performance, { now: clock }))

function one<T>(of: readonly T[]): T {
  return of[randomInt(of.length)] as T
}

const TEXTS = [
  '',
  'POST',
  'create-payment',
  'a "quoted" back\\slash',
  'tab\tline\nbreak\r\u0000\u001f\u007f',
  'ü€😀',
  '\u2028\u2029</script>',
  `long ${'x'.repeat(120)}"\\`,
]
const DURATIONS = [0, -0, 0.001, 0.005, 0.015, 1, 1.1, 1.25, 12.999, 99.995, 1234.5, 3_600_000.123]
const STATE = [null, ...STATES]

function anyDuration(): number {
  return randomInt(2) === 0 ? one(DURATIONS) : Math.random() * 10 ** randomInt(12)
}

/** Any summary, even one that never occurs. */
function anySummary(): ShadowSummary {
  return {
    startedAt: sinceStart - anyDuration(),
    id: one([null, 'a'.repeat(43) as RecordId]),
    storeMs: anyDuration(),
    upstreamMs: anyDuration(),
    outcome: one([null, ...namesOf(REQUEST_OUTCOMES)]),
    before: one(['absent', ...STATE]),
    after: one(STATE),
    fence: one([null, 0, 7, 999_999, 1_000_000, 1_000_001, 1_795_341_385_760, randomInt(2 ** 47)]),
    cause: one([null, ...TEXTS]),
    replayOf: null,
    route: one(TEXTS),
    method: one(TEXTS),
    traceId: one([null, ...TEXTS]),
    status: one([null, 200, 504]),
    retryAge: one([null, 0, 12.5, 86_400_000]),
    regenerated: one([true, false]),
  }
}

const round = (milliseconds: number): number => Math.round(milliseconds * 100) / 100

/** The same line as pino writes it for an object. */
function expected(level: 'info' | 'warn', summary: ShadowSummary, decision: object, figures: object): string {
  const { method, route, id, before, after, cause, traceId } = summary
  const found = {
    method,
    route,
    record: id && shortId(id),
    ...decision,
    before,
    after,
    ...figures,
    ...(cause === null ? {} : { cause }),
    ...(traceId === null ? {} : { traceId }),
  }
  logger[level](found, 'verdict' in decision ? 'shadow' : 'request')
  return lines.pop() as string
}

void t.test('request and shadow lines are byte for byte what pino would write', async (t) => {
  const history = new History({ note: async () => true, replica: 'here', onDropped: () => {} })
  t.teardown(() => history.close())
  const answered = observer(new Metrics(false), logger, history, { routes: new Set(), completed() {} })
  const shadowed = shadowObserver(new Metrics(false), logger, history)
  const moments = [0, 9, 10, 99, 100, 999].map((past) => 1_795_341_385_000 + past)
  const differing: [string | undefined, string][] = []
  for (let n = 0; n < 5_000; n++) {
    now = one([...moments, date()])
    sinceStart = one([0.1, 1, 12_345.678])
    const summary = anySummary()
    const { fence, status, upstreamMs, storeMs, outcome, retryAge } = summary
    const ms = round(sinceStart - summary.startedAt)
    answered.answered(summary)
    const line = lines.shift()
    // A cause is warned of once; observer.test.ts tests the level.
    const level = line?.startsWith('{"level":"warn"') ? 'warn' : 'info'
    const figures = { fence, status, ms, upstreamMs: round(upstreamMs), storeMs: round(storeMs) }
    const wanted = expected(level, summary, { outcome: outcome ?? 'aborted' }, figures)
    if (line !== wanted) differing.push([line, wanted])

    const verdict = one(namesOf(SHADOW_VERDICTS))
    shadowed(summary, verdict)
    const shadow = lines.shift()
    const more = {
      ms,
      ...(retryAge === null ? {} : { retryAgeMs: Math.round(retryAge) }),
      ...(summary.regenerated ? { newKey: true } : {}),
    }
    const wantedOfShadow = expected('info', summary, { verdict }, more)
    if (shadow !== wantedOfShadow) differing.push([shadow, wantedOfShadow])
  }
  t.strictSame(differing.slice(0, 3), [])
})

void t.test('a line below the log level is not written', async (t) => {
  logger.level = 'warn'
  writeLine(logger, 'info', '', 'request')
  t.strictSame(lines, [])
  writeLine(logger, 'warn', ',"a":1', 'request')
  t.match(lines, [/"a":1,"msg":"request"\}\n$/])
})
