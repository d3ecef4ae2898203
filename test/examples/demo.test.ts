import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { join } from 'node:path'
import { text } from 'node:stream/consumers'
import { stripVTControlCharacters } from 'node:util'
import tap from 'tap'

const root = join(import.meta.dirname, '../..')
const demo = join(root, 'scripts/demo.ts')

tap.setTimeout(120_000)

void tap.test('the demo plays its story, every statement of it is true, and it ends with 0', (t) => {
  const run = spawnSync(process.execPath, [demo, '--once'], {
    encoding: 'utf8',
    env: plain(),
    timeout: 60_000,
  })
  if (run.status !== 0) t.comment(run.stdout + run.stderr)
  t.equal(run.status, 0, 'exit code')
  t.equal(run.stderr, '')
  t.notMatch(run.stdout, /NOT TRUE/)
  t.equal(stripVTControlCharacters(run.stdout), run.stdout, 'no colours where it is not a terminal')
  for (const line of [
    /^ {2}payments API, counts every charge it makes +http:\/\/127\.0\.0\.1:\d+$/m,
    /^1 {2}A charge whose answer is lost$/m,
    /^ {2}charge 42\.00, the client hangs up after 0\.3 s +no answer +ok$/m,
    /^ {2}same key, same request, .+ +201 Created +ok$/m,
    /^ {2}Idempotent-Replayed +true +ok$/m,
    /^ {2}two identical requests at once: one is +201 Created +ok$/m,
    /^ {2}and the other +(409 Conflict, Retry-After: \d+|201, replayed) +ok$/m,
    /^ {2}first key, but 99\.00 +422 Unprocessable \w+ +ok$/m,
    /^ {2}code +idempotency_key_reused +ok$/m,
    /^ {2}first key, \d requests, charges +1 +ok$/m,
    /^ {2}second key, 2 requests, charges +1 +ok$/m,
    /^All \d+ statements checked, in [\d.]+ s\.$/m,
  ])
    t.match(run.stdout, line)
  const hashes = [...run.stdout.matchAll(/^ {2}sha256 of .+? +([0-9a-f]{20})… +ok$/gm)].map(
    ([, hash]) => hash,
  )
  t.equal(hashes.length, 3)
  t.equal(new Set(hashes).size, 1, 'three times the same bytes')
  t.end()
})

void tap.test(
  'without --once it stays up, gives curl lines that work, and Ctrl-C ends it with 0',
  async (t) => {
    const child = spawn(process.execPath, [demo, '--port', '0'], {
      env: plain(),
      stdio: ['ignore', 'pipe', 'pipe'],
    })
    t.teardown(() => child.kill('SIGKILL'))
    const stderr = text(child.stderr)
    const said = await new Promise<string>((resolve) => {
      let soFar = ''
      child.stdout.on('data', (chunk: Buffer) => {
        soFar += chunk.toString()
        if (soFar.includes('Ctrl-C ends both')) resolve(soFar)
      })
      child.once('exit', () => resolve(soFar))
    })
    const url = /curl -i (http:\/\/127\.0\.0\.1:\d+\/v1\/payments)/.exec(said)?.[1]
    if (url === undefined) return t.fail(`no curl line\n${said}\n${await stderr}`)
    const request = {
      method: 'POST',
      headers: { 'Content-Type': 'application/json', 'Idempotency-Key': 'my-first-key' },
      body: '{"amount": 4200, "currency": "eur"}',
    }
    const [first, second] = [await fetch(url, request), await fetch(url, request)]
    t.same([first.status, first.headers.get('idempotent-replayed')], [201, null])
    t.same([second.status, second.headers.get('idempotent-replayed')], [201, 'true'])
    t.equal(await second.text(), await first.text())

    child.kill('SIGINT')
    const [code] = await once(child, 'exit')
    t.same([code, await stderr], [0, ''])
    return t.rejects(fetch(url), 'the proxy has gone with it')
  },
)

/** Without what a test runner or a terminal adds: the demo is to behave as for a user's script. */
function plain(): NodeJS.ProcessEnv {
  const { FORCE_COLOR: _force, NODE_OPTIONS: _options, NODE_V8_COVERAGE: _coverage, ...env } = process.env
  return env
}
