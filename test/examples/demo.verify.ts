import { type ChildProcess, spawn, spawnSync } from 'node:child_process'
import { on, once } from 'node:events'
import { join } from 'node:path'
import { text } from 'node:stream/consumers'
import { setTimeout as sleep } from 'node:timers/promises'
import { stripVTControlCharacters } from 'node:util'
import tap, { type Test } from 'tap'

const root = join(import.meta.dirname, '../..')
const demo = join(root, 'scripts/demo.ts')

tap.setTimeout(120_000)

void tap.test('the demo plays its story, all its statements are true, and it exits 0', (t) => {
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
    /^\d+ checks passed, in [\d.]+ s\.$/m,
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
  'without --once the demo stays up, prints working curl lines, and ends on Ctrl-C',
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
    return t.rejects(fetch(url), 'the proxy is gone, too')
  },
)

/** `npm run demo` once its servers are up, their URLs, and a promise that the demo itself has ended. */
async function npmRunsDemo(t: Test): Promise<{ npm: ChildProcess; urls: string[]; ended: Promise<unknown> }> {
  // Its own process group, so that whatever is left over can be killed together.
  const npm = spawn('npm', ['run', '--silent', 'demo', '--', '--port', '0'], {
    cwd: root,
    env: plain(),
    stdio: ['ignore', 'pipe', 'inherit'],
    detached: true,
  })
  t.teardown(() => {
    try {
      process.kill(-Number(npm.pid), 'SIGKILL')
    } catch {
      // Nothing is left.
    }
  })
  let said = ''
  const ended = once(npm.stdout, 'end')
  for await (const chunk of on(npm.stdout, 'data', { close: ['end'] })) {
    said += String(chunk)
    if (said.includes('Ctrl-C ends both')) break
  }
  const urls = [...said.matchAll(/^ {2}(?:payments API|proxy), .+ (http:\/\/\S+)$/gm)].map(([, url]) =>
    String(url),
  )
  if (urls.length !== 2) throw new Error(`no two servers\n${said}`)
  return { npm, urls, ended }
}

const answers = (url: string): Promise<boolean> =>
  fetch(url).then(
    () => true,
    () => false,
  )

for (const signal of ['SIGTERM', 'SIGHUP', 'SIGKILL'] as const)
  void tap.test(`when npm gets ${signal}, the demo and both servers end`, async (t) => {
    const { npm, urls, ended } = await npmRunsDemo(t)
    for (const url of urls) t.ok(await answers(url), url)
    npm.kill(signal)
    // Standard output ends when npm, the shell and the demo have all closed it.
    await ended
    for (const url of urls) t.notOk(await answers(url), `${url} is gone, too`)
  })

void tap.test('a killed demo takes both servers with it', async (t) => {
  const { npm, urls, ended } = await npmRunsDemo(t)
  const [demoPid] = descendants(Number(npm.pid)).filter(
    ({ args }) => /scripts\/demo\.ts/.test(args) && !args.startsWith('sh'),
  )
  process.kill(Number(demoPid?.pid), 'SIGKILL')
  await ended
  for (const url of urls) while (await answers(url)) await sleep(20)
})

/** All descendants of a process, as `ps` lists them. */
function descendants(pid: number): { pid: number; args: string }[] {
  const all = spawnSync('ps', ['-eo', 'pid=,ppid=,args='], { encoding: 'utf8' })
    .stdout.trim()
    .split('\n')
    .map((line) => /^ *(\d+) +(\d+) (.*)$/.exec(line) ?? [])
    .map(([, own, parent, args]) => ({ pid: Number(own), parent: Number(parent), args: String(args) }))
  const below = (parent: number): { pid: number; args: string }[] =>
    all.filter((one) => one.parent === parent).flatMap((one) => [one, ...below(one.pid)])
  return below(pid)
}

/** Without what a test runner or a terminal adds: the demo must behave as in a user's script. */
function plain(): NodeJS.ProcessEnv {
  const { FORCE_COLOR: _force, NODE_OPTIONS: _options, NODE_V8_COVERAGE: _coverage, ...env } = process.env
  return env
}
