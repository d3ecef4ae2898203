import { execFile } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import t from 'tap'
import { NO_POSTGRES } from '../support/postgres.ts'

const ROOT = fileURLToPath(new URL('../..', import.meta.url))

/** Shows that it works, not how fast it is; in its own folder, since other tests may be packing `dist`. */
async function bench(...args: string[]): Promise<string> {
  const fixed = ['bench/run.ts', '--quick', '--dist', '.tap/bench-dist']
  // tap puts a loader into child processes, with which the compiler does not start.
  const plain = ['-u', 'NODE_OPTIONS', '-u', 'NODE_V8_COVERAGE', process.execPath]
  const { stdout } = await promisify(execFile)('env', [...plain, ...fixed, ...args], { cwd: ROOT })
  return stdout
}

function rowsOf(text: string): string[][] {
  return text
    .split('\n')
    .filter((line) => line.startsWith('| '))
    .map((line) => line.split('|').map((one) => one.trim()))
}

/** In the table with that column, what the candidate's row has there. */
function cell(text: string, column: string, candidate: string): string | undefined {
  const rows = rowsOf(text)
  const head = rows.findIndex((row) => row.includes(column))
  const at = rows[head]?.indexOf(column) ?? -1
  return rows.slice(head).find((row) => row[1] === candidate)?.[at]
}

t.test('npm run bench prints a table per kind of body, a row per candidate, and the ratios', async (t) => {
  const text = await bench(
    '--only',
    'post,first,replay,in-flight',
    '--candidates',
    'proxy-redis,proxy-sqlite,proxy-tls,proxy-http2,proxy-grpc,unprotected',
  )
  const rows = rowsOf(text)
  t.ok(Number(cell(text, 'pass-through POST, 300 bytes: CPU µs', '**this proxy**, Redis')) > 0)
  for (const scenario of ['first execution', 'replay', 'duplicate in flight'])
    for (const store of ['Redis', 'SQLite (default)'])
      t.ok(Number(cell(text, `${scenario}: CPU µs`, `**this proxy**, ${store}`)) > 0, `${scenario}, ${store}`)
  for (const how of ['clients over TLS', 'clients over HTTP/2', 'gRPC'])
    t.ok(Number(cell(text, 'first execution: CPU µs', `**this proxy**, Redis, ${how}`)) > 0, how)
  const goal = rows.find(([, name]) => name === 'first execution, SQLite (default) ÷ Redis')
  t.match(goal, ['', String, '1.3', '1', /^\d+(\.\d\d)?$/, /met/])
})

t.test('PostgreSQL has its rows, or a sentence if it is missing', async (t) => {
  const text = await bench('--no-build', '--only', 'first,replay', '--candidates', 'proxy-postgres')
  if (NO_POSTGRES) t.match(text, `**this proxy**, PostgreSQL is left out: ${NO_POSTGRES}.`)
  else
    for (const scenario of ['first execution', 'replay'])
      t.ok(Number(cell(text, `${scenario}: CPU µs`, '**this proxy**, PostgreSQL')) > 0, scenario)
})

t.test('--stores has a row for each store and scenario, and nothing else', async (t) => {
  const text = await bench('--no-build', '--stores')
  const titles = [
    'Redis',
    'Redis under three Sentinels',
    'Redis Cluster of three masters',
    'Redis with `store.wait: { replicas: 1 }`',
    'DynamoDB (the emulator dynalite)',
  ]
  if (!NO_POSTGRES) titles.push('PostgreSQL', 'PostgreSQL behind Redis (`tiered:`)')
  for (const title of titles)
    for (const scenario of ['first execution', 'replay'])
      t.ok(Number(cell(text, `${scenario}: CPU µs`, `**this proxy**, ${title}`)) > 0, `${scenario}, ${title}`)
  t.notMatch(text, /SQLite|pass-through|resident at rest, MB/)
})

t.test('--only tail has a row for first executions and one for replays', async (t) => {
  const text = await bench('--no-build', '--only', 'tail', '--candidates', 'proxy-redis')
  for (const scenario of ['first execution', 'replay'])
    t.match(
      text,
      new RegExp(
        `^\\| ${scenario} \\| \\*\\*this proxy\\*\\*, Redis \\| [\\d,]+ (\\| \\d+\\.\\d\\d ){3}\\|`,
        'm',
      ),
    )
})

t.test('--only costs shows what a request allocates and calls, and that perf is missing', async (t) => {
  process.env['PERF'] = '/nonexistent/perf'
  const text = await bench('--no-build', '--only', 'costs', '--candidates', 'proxy-redis,proxy-sqlite')
  t.match(text, /^\| first execution \| .*Redis \| [\d,]+ \|  \| [\d.]+ \|$/m)
  t.match(text, /^\| replay \| .*SQLite \(default\) \| [\d,]+ \|  \|  \|$/m)
  t.match(text, 'System calls are left out: perf (Debian: linux-perf) is missing.')
})

t.test('a missing candidate is left out with a sentence', async (t) => {
  process.env['NGINX'] = '/nonexistent/nginx'
  const text = await bench('--no-build', '--only', 'get', '--candidates', 'nginx,nginx-lua,http-proxy')
  t.match(text, 'nginx is left out: nginx is not there: install nginx (or set NGINX to the binary).')
  t.match(text, /nginx \+ Lua \+ Redis is left out: .* libnginx-mod-http-lua lua-nginx-redis lua-cjson\./)
  t.ok(Number(cell(text, 'pass-through GET: CPU µs', 'plain @fastify/http-proxy')) > 0)
})

t.test('--only workers compares several processes with one', async (t) => {
  const text = await bench('--no-build', '--only', 'workers', '--candidates', 'proxy-redis')
  for (const row of ['one process', '2 workers'])
    t.match(text, new RegExp(`^\\| ${row} \\| [\\d.]+ \\| [\\d.]+ \\| [\\d,]+ \\| \\d+ \\| \\d+ \\|$`, 'm'))
  t.match(text, /^\| first execution, Redis, CPU: two workers ÷ one process \| 1.1 \|/m)
})

t.test('the longest stop of the event loop by one request is a row of the goals', async (t) => {
  const text = await bench('--no-build', '--only', 'stops', '--candidates', 'proxy-redis')
  t.match(
    text,
    /^\| longest stop of the event loop by one request of `limits.request` bytes, ms \| 10 \| 3 \| \d+(\.\d\d)? \| /m,
  )
})
