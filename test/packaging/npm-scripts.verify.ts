import { spawnSync } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { OLD_NODE } from '../support/old-node.ts'

const ROOT = join(import.meta.dirname, '../..')
const { scripts, engines } = JSON.parse(readFileSync(join(ROOT, 'package.json'), 'utf8')) as {
  scripts: Record<string, string>
  engines: { node: string }
}
/** Scripts that Node reads as TypeScript, by the arguments of `node`. */
const TYPESCRIPT = Object.entries(scripts).flatMap(([name, command]) =>
  /^node .*\.ts( \w+)?$/.test(command) ? [{ name, words: command.split(' ').slice(1) }] : [],
)

void t.test('an older Node gets one sentence from every npm script, not a stack', async (t) => {
  t.ok(TYPESCRIPT.length >= 8, `${TYPESCRIPT.length} scripts`)
  for (const { name, words } of TYPESCRIPT) {
    t.same(words.slice(0, 2), ['--import', './scripts/npm-script.js'], name)
    if (OLD_NODE === null) continue
    const { status, stdout, stderr } = spawnSync('env', ['-u', 'NODE_OPTIONS', OLD_NODE, ...words], {
      cwd: ROOT,
      encoding: 'utf8',
      env: { ...process.env, NODE_V8_COVERAGE: '' },
    })
    t.same([status, stdout], [2, ''], name)
    t.match(stderr, /^idempotency-proxy needs Node 24\.13 or later; this is v\d+\.\d+\.\d+\. .+\n$/, name)
    t.equal(stderr.split('\n').length, 2, 'one line')
  }
})

void t.test('the program, the package and the scripts name the same Node', async (t) => {
  const said = /needs Node (\d+\.\d+) or later/.exec(readFileSync(join(ROOT, 'src/cli.ts'), 'utf8'))?.[1]
  t.equal(engines.node, `>=${said}`)
})
