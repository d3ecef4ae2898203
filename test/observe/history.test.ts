import { pino } from 'pino'
import t from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import type { RecordId } from '../../src/core/record.ts'
import { History } from '../../src/observe/history.ts'
import { Metrics } from '../../src/observe/metrics.ts'
import { shadowObserver } from '../../src/observe/observer.ts'
import { newProgress, summarize } from '../../src/protect/guard.ts'
import { type Execution, type RequestSummary, type ShadowSummary } from '../../src/protect/request.ts'
import type { Note } from '../../src/store/register.ts'

const id = 'a'.repeat(43) as RecordId

function setup(note?: (id: RecordId, notes: readonly Note[]) => Promise<boolean>) {
  const written: [RecordId, readonly Note[]][] = []
  const lost: number[] = []
  const history = new History({
    note: note ?? (async (id, notes) => written.push([id, notes]) > 0),
    replica: 'host:1',
    onDropped: (count) => void lost.push(count),
  })
  t.teardown(() => history.close())
  return { history, written, lost }
}

function run(fence: number, before: Execution['before']): Execution {
  return { id, attempt: { fence, attempts: 1 }, before } as unknown as Execution
}

function trace(over: Partial<RequestSummary>): ShadowSummary {
  return Object.assign(
    summarize(
      { route: { name: 'r' } as RoutePolicy, method: 'POST', traceId: null, progress: newProgress() },
      { outcome: null },
      null,
    ),
    { id, status: 201, after: 'completed', retryAge: null, regenerated: false },
    over,
  )
}

const EXECUTED = { outcome: 'executed', before: 'absent', fence: 7, upstreamMs: 12.6 } as const

void t.test('a usual first execution writes no line of its own', async (t) => {
  const { history, written } = setup()
  history.began(run(7, 'absent'))
  history.completed('stored', id)
  history.answered(trace(EXECUTED))
  await history.flush()
  t.same(written, [])
  history.answered(trace({ outcome: 'replayed' }))
  await history.flush()
  t.match(written, [[id, [{ tag: 'replayed:host:1', count: 1 }]]])
})

void t.test('a retry that executed is one line', async (t) => {
  const { history, written } = setup()
  history.began(run(7, 'failed_retryable'))
  history.completed('stored', id)
  history.answered(trace({ ...EXECUTED, before: 'failed_retryable' }))
  await history.flush()
  const [[, notes] = [id, []]] = written
  t.match(notes, [{ tag: 'executed:7', count: 1 }])
  t.same(JSON.parse(notes[0]?.text ?? ''), {
    replica: 'host:1',
    fence: 7,
    status: 201,
    upstreamMs: 13,
    before: 'failed_retryable',
    after: 'completed',
  })
  t.ok((notes[0]?.firstAgo ?? 0) >= (notes[0]?.lastAgo ?? 0))
})

void t.test('a first execution is written if anything else happens while it runs', async (t) => {
  const { history, written } = setup()
  const tags = () => written.splice(0).flatMap(([, notes]) => notes.map(({ tag }) => tag))
  // A flush: a started request must survive a crash.
  history.began(run(7, 'absent'))
  await history.flush()
  history.completed('stored', id)
  history.answered(trace(EXECUTED))
  await history.flush()
  t.same(tags(), ['claimed:7', 'settled:stored', 'executed:7'])

  history.began(run(7, 'absent'))
  history.answered(trace({ outcome: 'in_progress', status: 409, after: 'in_progress' }))
  history.completed('stored', id)
  history.answered(trace(EXECUTED))
  await history.flush()
  t.same(tags(), ['claimed:7', 'in_progress:host:1', 'settled:stored', 'executed:7'])

  // Shadow mode, which answers nobody; a client answered early; a store that lost the record.
  history.began(run(7, 'absent'))
  history.completed('stored', id)
  history.add(id, 'shadowed', 'first', {})
  history.began(run(8, 'absent'))
  history.answered(trace({ ...EXECUTED, fence: 8, outcome: 'upstream_slow' }))
  history.completed('stored', id)
  history.began(run(9, 'absent'))
  history.completed('recovered', id)
  history.answered(trace({ ...EXECUTED, fence: 9 }))
  await history.flush()
  t.same(
    tags().join(' '),
    'claimed:7 settled:stored shadowed:first claimed:8 upstream_slow:8 settled:stored claimed:9 settled:recovered executed:9',
  )

  // Claimed again at once: the record had gone.
  history.began(run(7, 'absent'))
  history.completed('stored', id)
  history.began(run(8, 'absent'))
  history.completed('stored', id)
  history.completed('stored', id)
  history.answered(trace({ ...EXECUTED, fence: 8 }))
  await history.flush()
  t.same(tags(), ['claimed:7', 'settled:stored', 'claimed:8', 'settled:stored', 'executed:8'])
})

void t.test('an execution that began since the last flush gets time to end the usual way', async (t) => {
  const { history, written } = setup()
  history.began(run(7, 'absent'))
  await history.flush(60_000)
  t.same(written, [])
  await history.close()
  t.match(written, [[id, [{ tag: 'claimed:7' }]]])
})

void t.test('an unusual execution keeps every line', async (t) => {
  const { history, written } = setup()
  history.began(run(7, null))
  history.completed('deferred', id)
  history.answered(trace(EXECUTED))
  history.completed('stale', id)
  await history.flush()
  history.began(run(8, 'failed_retryable'))
  history.answered(trace({ ...EXECUTED, fence: 9 }))
  await history.flush()
  t.match(
    written.flatMap(([, notes]) => notes.map(({ tag }) => tag)),
    ['claimed:7', 'settled:deferred', 'executed:7', 'settled:stale', 'claimed:8', 'executed:9'],
  )
})

void t.test('replays in a row are one line, and a request without a record is none', async (t) => {
  const { history, written } = setup()
  for (let n = 0; n < 1000; n++) history.answered(trace({ outcome: 'replayed' }))
  history.answered(trace({ outcome: 'key_missing', id: null }))
  history.answered(trace({ outcome: null, status: null, after: null }))
  await history.flush()
  const [[, notes] = [id, []]] = written
  t.match(
    notes.map(({ tag, count }) => [tag, count]),
    [
      ['replayed:host:1', 1000],
      ['aborted:host:1', 1],
    ],
  )
})

void t.test('O06 in shadow mode equal verdicts in a row are one line, and no record is none', async (t) => {
  const { history, written } = setup()
  const tell = shadowObserver(new Metrics(), pino({ level: 'silent' }), history)
  for (const verdict of ['first', 'replay_differs', 'replay_differs', 'misuse'] as const)
    tell(trace({}), verdict)
  tell(trace({ id: null }), 'key_missing')
  await history.flush()
  t.equal(written.length, 1)
  const notes = written[0]?.[1] ?? []
  t.same(
    notes.map(({ tag, count }) => [tag, count]),
    [
      ['shadowed:first', 1],
      ['shadowed:replay_differs', 2],
      ['shadowed:misuse', 1],
    ],
  )
  t.same(JSON.parse(notes[1]?.text ?? ''), { replica: 'host:1', verdict: 'replay_differs' })
})

void t.test('K22 a long text from outside is cut and stays on one line', async (t) => {
  const { history, written } = setup()
  history.add(id, 'resolved', 1, { reason: 'x\n'.repeat(500), by: null })
  await history.flush()
  const text = written[0]?.[1][0]?.text ?? ''
  t.ok(text.length < 600 && !text.includes('\n'))
})

void t.test('lines per record and records are limited, and what is dropped is reported', async (t) => {
  const { history, written, lost } = setup()
  for (let n = 0; n < 100; n++) history.add(id, 'claimed', n, {})
  for (let n = 0; n < 3000; n++) history.add(String(n) as RecordId, 'claimed', 1, {})
  await history.flush()
  t.equal(written.length, 2000)
  t.equal(written[0]?.[1].length, 20)
  t.same(lost, [80 + 1001])
  for (let n = 0; n < 30; n++) history.add(id, 'claimed', n, {})
  await history.flush()
  t.equal(lost.length, 1)
  await history.close()
  t.same(lost[1], 10)
  history.add(id, 'claimed', 1, {})
  await history.close()
  t.equal(written.length, 2001)
})

void t.test('a store that fails loses lines but makes nothing fail', async (t) => {
  let asked = 0
  const { history, lost } = setup(async () => {
    asked++
    throw new Error('down')
  })
  for (let n = 0; n < 1000; n++) history.answered(trace({ ...EXECUTED, id: String(n) as RecordId }))
  await history.flush()
  t.same(lost, [1000])
  t.equal(asked, 50, 'a store that takes nothing is not asked for every record')
})

void t.test('lines are flushed automatically after a while, one flush at a time', async (t) => {
  const { promise, resolve } = Promise.withResolvers<void>()
  let at = 0
  const first = Promise.withResolvers<void>()
  const { history } = setup(async () => {
    at++
    first.resolve()
    await promise
    return true
  })
  const alive = setInterval(() => {}, 1000)
  history.answered(trace(EXECUTED))
  await first.promise
  history.answered(trace(EXECUTED))
  const flushing = history.flush()
  t.equal(at, 1)
  resolve()
  await flushing
  await history.close()
  t.equal(at, 2)
  clearInterval(alive)
})

void t.test('close writes what is under way, even during a flush by the timer', async (t) => {
  const { promise: stored, resolve } = Promise.withResolvers<boolean>()
  const written: Note[][] = []
  const { history, lost } = setup((_, notes) => {
    written.push([...notes])
    return stored
  })
  history.answered(trace({ outcome: 'replayed' }))
  const flushed = history.flush(60_000)
  history.began(run(7, 'absent'))
  const closed = history.close()
  resolve(true)
  await Promise.all([flushed, closed])
  t.match(written, [[{ tag: 'replayed:host:1' }], [{ tag: 'claimed:7' }]])
  t.same(lost, [])
})
