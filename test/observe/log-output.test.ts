import { spawnSync } from 'node:child_process'
import { openSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
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
  const { status, said } = run(
    `logger.info('one'); logger.info('two'); throw new Error('a bug')`,
    'pipe',
    'auto',
  )
  t.equal(status, 1)
  t.strictSame(
    said
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line).msg),
    ['one', 'two'],
  )
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
