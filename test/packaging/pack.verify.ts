import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:http'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import tap from 'tap'
import { OLD_NODE } from '../support/old-node.ts'

const root = join(import.meta.dirname, '../..')
const place = mkdtempSync(join(tmpdir(), 'idempotency-pack-'))
const user = join(place, 'user')
const { name, version } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'))

tap.setTimeout(300_000)
tap.teardown(() => rmSync(place, { recursive: true, force: true }))

/** Like a user's shell: nothing of the npm that runs the tests, and no coverage. */
function shell(): NodeJS.ProcessEnv {
  const env = Object.entries(process.env).filter(
    ([key]) =>
      !/^(npm_(package|lifecycle|command|node|config_local_prefix)|INIT_CWD|NODE_OPTIONS|NODE_V8|TAP)/.test(
        key,
      ),
  )
  return { ...Object.fromEntries(env), NO_COLOR: '1' }
}

/** tap puts its loader into every child's options; a user's shell has none. */
const PLAIN = ['-u', 'NODE_OPTIONS']

function run(cwd: string, command: string, args: readonly string[], env = shell()) {
  return spawnSync('env', [...PLAIN, command, ...args], { cwd, env, encoding: 'utf8', timeout: 240_000 })
}

void tap.test('npm pack makes a tarball of what a user needs and nothing else', (t) => {
  const packed = run(root, 'npm', ['pack', '--json', '--loglevel=error', '--pack-destination', place])
  t.equal(packed.status, 0, packed.stderr)
  const listed = JSON.parse(packed.stdout)
  const [tarball] = Array.isArray(listed) ? listed : Object.values(listed)
  const files: string[] = tarball.files.map(({ path }: { path: string }) => path)
  for (const wanted of `
    package.json dist/cli.js dist/THIRD-PARTY.txt dist/store/sqlite/worker.js dist/admin/page/index.html
    dist/admin/page/page.js
  `
    .trim()
    .split(/\s+/))
    t.ok(files.includes(wanted), wanted)
  t.ok(
    files.some((file) => /^dist\/store\/redis\/lua\/.+\.lua$/.test(file)),
    'the Lua scripts',
  )
  t.same(
    files.filter((file) => /\.test\.|^(src|test|examples|scripts|helm|bench)\/|\.db$|^\.env/.test(file)),
    [],
  )
  t.same(
    files.filter((file) => file.endsWith('.ts') && !file.endsWith('.d.ts')),
    [],
  )
  const bin = tarball.files.find(({ path }: { path: string }) => path === 'dist/cli.js')
  t.ok(bin.size > 0)
  t.match(readFileSync(join(root, 'dist/cli.js'), 'utf8'), /^#!\/usr\/bin\/env node\n/)
  t.end()
})

void tap.test('the tarball installs without dev dependencies', (t) => {
  mkdirSync(user)
  writeFileSync(join(user, 'package.json'), '{ "private": true }\n')
  const args = ['install', '--omit=dev', '--no-audit', '--no-fund', '--prefer-offline', '--loglevel=error']
  const installed = run(user, 'npm', [...args, join(place, `${name}-${version}.tgz`)])
  t.equal(installed.status, 0, installed.stderr)
  for (const dev of ['typescript', 'tap', 'oxlint', 'node', '@biomejs/biome'])
    t.notOk(existsSync(join(user, 'node_modules', dev)), `${dev} is not installed`)
  t.end()
})

void tap.test('npx idempotency-proxy answers --help and --version', (t) => {
  const help = run(user, 'npx', ['idempotency-proxy', '--help'])
  t.equal(help.status, 0, help.stderr)
  t.match(help.stdout, '--upstream')
  const told = run(user, 'npx', ['idempotency-proxy', '--version'])
  t.equal(told.stdout.trim(), version)
  t.end()
})

void tap.test('the installed program serves an execution, its replay, and ends on SIGTERM', async (t) => {
  let executions = 0
  const upstream = createServer((_req, res) => {
    executions += 1
    res.writeHead(201, { 'Content-Type': 'text/plain' }).end(`execution ${executions}`)
  })
  await new Promise<void>((resolve) => upstream.listen(0, '127.0.0.1', resolve))
  t.teardown(() => upstream.close())
  const address = upstream.address()
  if (address === null || typeof address === 'string') throw new Error('no port')
  writeFileSync(
    join(user, 'proxy.yaml'),
    `listen: 127.0.0.1:0\nadmin: { listen: none }\nupstream: { url: "http://127.0.0.1:${address.port}" }\n`,
  )

  // The bin itself, not npx: npx would get the signal.
  const bin = join(user, 'node_modules/.bin/idempotency-proxy')
  const proxy = spawn(bin, ['--config', 'proxy.yaml'], {
    cwd: user,
    env: shell(),
    stdio: ['ignore', 'pipe', 'inherit'],
  })
  t.teardown(() => proxy.kill('SIGKILL'))
  const url = await new Promise<string>((resolve, reject) => {
    proxy.once('exit', (code) => reject(new Error(`exit ${code}`)))
    createInterface({ input: proxy.stdout }).on('line', (line) => {
      const entry = JSON.parse(line)
      if (entry.msg === 'listening') resolve(entry.url)
    })
  })
  const pay = () => fetch(`${url}/pay`, { method: 'POST', headers: { 'Idempotency-Key': 'k1' }, body: 'x' })
  const [first, second] = [await pay(), await pay()]
  t.same(
    [first.status, await first.text(), first.headers.get('idempotent-replayed')],
    [201, 'execution 1', null],
  )
  t.same(
    [second.status, await second.text(), second.headers.get('idempotent-replayed')],
    [201, 'execution 1', 'true'],
  )
  t.ok(existsSync(join(user, 'idempotency.db')), 'the embedded store is in the working directory')
  proxy.kill('SIGTERM')
  t.same(await once(proxy, 'exit'), [0, null])
})

void tap.test(
  'an older Node gets one sentence, not a stack',
  { skip: OLD_NODE === null && 'none on the PATH' },
  (t) => {
    const { status, stderr } = run(user, String(OLD_NODE), [
      'node_modules/idempotency-proxy/dist/cli.js',
      '--help',
    ])
    t.equal(status, 2)
    t.match(stderr, /^idempotency-proxy needs Node 24\.13 or later; this is v\d+\.\d+\.\d+\.\n$/)
    t.end()
  },
)
