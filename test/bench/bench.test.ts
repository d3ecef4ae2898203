import { execFile } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import t from 'tap'

const ROOT = fileURLToPath(new URL('../..', import.meta.url))

/** That it works, not how fast anything is: in a folder of its own, as others may be packing what `dist` holds. */
async function bench(...args: string[]): Promise<string> {
  const fixed = ['bench/run.ts', '--quick', '--dist', '.tap/bench-dist']
  // tap puts a loader into the children of its tests, which the compiler's own start does not survive.
  const plain = ['-u', 'NODE_OPTIONS', '-u', 'NODE_V8_COVERAGE', process.execPath]
  const { stdout } = await promisify(execFile)('env', [...plain, ...fixed, ...args], { cwd: ROOT })
  return stdout
}

t.test('npm run bench prints a row per scenario and candidate, and the ratios', async (t) => {
  const text = await bench('--only', 'post,first,replay,in-flight', '--candidates', 'proxy-redis,unprotected')
  const rows = text
    .split('\n')
    .filter((line) => line.startsWith('| '))
    .map((line) => line.split('|').map((cell) => cell.trim()))
  const figures = rows.filter(([, scenario]) =>
    / (?:POST|execution|replay|flight)|^replay/.test(scenario ?? ''),
  )
  const ours = figures.filter(([, , candidate]) => candidate === '**this proxy**, Redis')
  t.strictSame(
    ours.map(([, scenario]) => scenario),
    [
      'pass-through POST, 300 bytes',
      'first execution, JSON of 300 bytes',
      'replay, JSON of 300 bytes',
      'duplicate in flight, JSON of 300 bytes',
    ],
  )
  for (const row of ours) t.ok(Number(row[3]) > 0, `${row[1]}: ${row[3]} microseconds`)
  const goal = rows.find(([, name]) => name?.startsWith('first execution ÷ the same stack'))
  t.match(goal, ['', String, '1.4', /^\d+\.\d\d$/, /met/])
})

t.test('a candidate that is not there is left out with a sentence', async (t) => {
  process.env['NGINX'] = '/nonexistent/nginx'
  const text = await bench('--no-build', '--only', 'get', '--candidates', 'nginx,nginx-lua,http-proxy')
  t.match(text, 'nginx is left out: nginx is not there: install nginx (or set NGINX to the binary).')
  t.match(text, /nginx \+ Lua \+ Redis is left out: .* libnginx-mod-http-lua lua-nginx-redis lua-cjson\./)
  t.match(text, '| pass-through GET | plain @fastify/http-proxy |')
})

t.test('how long one request stops the event loop at most is a row of the goals', async (t) => {
  const text = await bench('--no-build', '--only', 'stops', '--candidates', 'proxy-redis')
  t.match(text, /^\| orders, as clients send them \| \d+\.\d \|$/m)
  t.match(
    text,
    /^\| longest stop of the event loop by one request of `limits.request` bytes, ms \| 10 \| \d+\.\d \| /m,
  )
})
