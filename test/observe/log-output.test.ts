import { spawnSync } from 'node:child_process'
import { openSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { prettyLine } from '../../src/observe/pretty.ts'
import { tempDir } from '../support/e2e.ts'

const LOG = new URL('../../src/observe/log.ts', import.meta.url).href

/** Runs `program` with a logger in its own process, with standard output at `stdout`. */
function run(program: string, stdout: number | 'pipe', format: 'auto' | 'json' | 'pretty' = 'json') {
  const source = `
    import { openLog } from ${JSON.stringify(LOG)}
    const { logger, output } = openLog({ level: 'info', format: '${format}' })
    ${program}`
  const { status, stdout: said } = spawnSync(process.execPath, ['--input-type=module', '-e', source], {
    stdio: ['ignore', stdout, 'ignore'],
    env: { ...process.env, NODE_V8_COVERAGE: '' },
    encoding: 'utf8',
  })
  return { status, said }
}

void t.test('§14 lines before an uncaught exception are written, without a terminal as JSON', async (t) => {
  const program = `logger.info('one'); logger.info('two'); throw new Error('a bug')`
  const { status, said } = run(program, 'pipe', 'auto')
  t.equal(status, 1)
  const lines = said.trim().split('\n')
  t.match(
    lines.map((line) => JSON.parse(line)),
    [{ msg: 'one' }, { msg: 'two' }],
  )
  t.equal(lines.length, 2)
})

void t.test('lines are written to a file in order, long ones with non-ASCII text complete', async (t) => {
  const file = join(tempDir(t), 'log')
  const long = 'ä€😀'.repeat(40_000)
  const program =
    "for (let n = 0; n < 500; n++) logger.info({ n }, n === 250 ? 'ä€😀'.repeat(40_000) : 'line')"
  t.equal(run(program, openSync(file, 'a')).status, 0)
  const lines = readFileSync(file, 'utf8')
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as { n: number; msg: string })
  t.strictSame(
    lines.map(({ n }) => n),
    Array.from({ length: 500 }, (_, n) => n),
  )
  t.equal(lines[250]?.msg, long)
})

void t.test('V11 on a full disk lines are dropped and counted, and nothing throws', async (t) => {
  const program = `
    const line = 'x'.repeat(1000)
    const wrote = output.writeNow(() => logger.info('audited'))
    for (let n = 0; n < 3000; n++) logger.info(line)
    setTimeout(() => process.exit(!wrote && output.dropped > 1000 ? 7 : 8), 200)`
  t.equal(run(program, openSync('/dev/full', 'w')).status, 7)
})

void t.test('§14 pretty lines are written where log.format says so', async (t) => {
  const { status, said } = run(
    `logger.info({ route: 'pay' }, 'request'); logger.info({ n: 1 }, 'started'); logger.fatal('over')`,
    'pipe',
    'pretty',
  )
  t.equal(status, 0)
  t.match(said, / pay .*\n.* started  n 1\n.*FATAL.*over\n$/, 'even one that lacks members')
})

const REQUEST = {
  level: 'info',
  time: '2026-11-21T10:05:44.053Z',
  method: 'POST',
  route: 'create-payment',
  record: 'rbCgBzeqe9zG',
  outcome: 'executed',
  before: 'absent',
  after: 'completed',
  fence: 1795255544034,
  status: 201,
  ms: 22.92,
  upstreamMs: 14.28,
  storeMs: 4.95,
  msg: 'request',
}
const said = (line: object, colors = false): string => prettyLine(`${JSON.stringify(line)}\n`, colors)

void t.test('§14 a request is one pretty line', async (t) => {
  const says = (line: object, rest: string) =>
    t.equal(said(line), `10:05:44.053  POST create-payment  ${rest}\n`)
  const after = 'rbCgBzeqe9zG  absent → completed'
  says(REQUEST, `executed  201  23 ms (upstream 14, store 5)  ${after}  fence 1795255544034`)
  const same = { before: 'completed', fence: null, ms: 1.97, upstreamMs: 0, storeMs: 1.23 }
  says(
    { ...REQUEST, ...same, outcome: 'replayed', traceId: '4bf9' },
    'replayed  201  2 ms (upstream 0, store 1.2)  rbCgBzeqe9zG  traceId 4bf9',
  )
  const refused = { record: null, before: null, after: null, status: 400, outcome: 'key_invalid' }
  says(
    { ...REQUEST, ...refused, fence: null, upstreamMs: 0, storeMs: 0, cause: 'no quotes' },
    'key_invalid  400  23 ms (upstream 0, store 0)  cause no quotes',
  )
  const { outcome: _o, status: _s, upstreamMs: _u, storeMs: _m, ...rest } = REQUEST
  says({ ...rest, fence: null, msg: 'shadow', verdict: 'first' }, `shadow: first  23 ms  ${after}`)
})

void t.test('other lines show their level if above info, their message and their members', async (t) => {
  const err = { type: 'Error', message: 'no\u001b[2J', stack: 'Error: no\n    at one (a.ts:1)\n    at two' }
  const url = 'http://127.0.0.1:8080'
  const stack = 'no\\u001b[2J\n    at one (a.ts:1)\n    at two'
  for (const [line, shown] of [
    [{ url, ops: null, store: 'redis', msg: 'listening' }, `listening  url ${url}  store redis`],
    [
      { level: 'warn', changes: ['a: 1s → 2s', 'b: 3 → 4'], msg: 'reloaded' },
      'WARN  reloaded  changes a: 1s → 2s; b: 3 → 4',
    ],
    [{ audit: { who: 'ada' }, msg: 'audit' }, 'audit  audit {"who":"ada"}'],
    [{ level: 'error', err, msg: 'internal error' }, `ERROR  internal error  ${stack}`],
    // An empty list is left out.
    [{ level: 'error', restart: ['a: 1 → 2'], identifies: [], msg: 'no' }, 'ERROR  no  restart a: 1 → 2'],
    [{ level: 'fatal', '\u202e': '\u0007\n' }, 'FATAL  \\u202e \\u0007\\u000a'],
  ] as const)
    t.equal(said({ level: 'info', time: REQUEST.time, ...line }), `10:05:44.053  ${shown}\n`)
})

void t.test('colours mark outcomes and levels', async (t) => {
  t.match(said(REQUEST, true), '\u001b[32mexecuted\u001b[0m')
  t.match(said({ ...REQUEST, outcome: 'misuse' }, true), '\u001b[33mmisuse\u001b[0m')
  for (const [level, color] of [
    ['warn', 33],
    ['debug', 2],
    ['error', 31],
  ] as const)
    t.match(said({ ...REQUEST, level, msg: 'm' }, true), `\u001b[${color}m${level.toUpperCase()}\u001b[0m`)
})
