import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync } from 'node:fs'
import { text } from 'node:stream/consumers'
import t from 'tap'
import { tempDir } from '../support/e2e.ts'
import { freePort } from '../support/redis.ts'

t.setTimeout(120_000)

const GUIDE = 'docs/guides/five-minutes.md'

const missing = ['bash', 'curl'].find((tool) => spawnSync(tool, ['--version']).status !== 0)
const skip = missing !== undefined && `${missing} is not installed; ${GUIDE} needs it`

void t.test('the commands of the five-minutes guide print what it shows', { skip }, async (t) => {
  const blocks = [...readFileSync(GUIDE, 'utf8').matchAll(/```(sh|text)\n(.*?)```/gs)]
  const [api, proxy, admin] = [await freePort(), await freePort(), await freePort()]
  const here = (told: string): string =>
    told
      .replaceAll('127.0.0.1:3000', `127.0.0.1:${api}`)
      .replaceAll('--port 3000', `--port ${api}`)
      .replaceAll('127.0.0.1:8080', `127.0.0.1:${proxy}`)
      .replaceAll('127.0.0.1:9464', `127.0.0.1:${admin}`)
      .replaceAll('/tmp/five-minutes', `${place}/five-minutes`)
  const place = tempDir(t)
  const commands = blocks
    .filter(([, kind]) => kind === 'sh')
    // Dependencies are installed already, and background commands have a terminal of their own.
    .map(([, , body = '']) => body.replace('npm ci\n', '').replaceAll(/ &$/gm, ' >&2 &'))
  const { NODE_OPTIONS: _, NODE_V8_COVERAGE: __, ...env } = process.env
  const shell = spawn('bash', ['-euc', here(commands.join('\n'))], {
    detached: true,
    stdio: ['ignore', 'pipe', 'ignore'],
    env: {
      ...env,
      PROXY_LISTEN: `127.0.0.1:${proxy}`,
      PROXY_ADMIN_LISTEN: `127.0.0.1:${admin}`,
      PROXY_UPSTREAM: `http://127.0.0.1:${api}`,
    },
  })
  // With everything that it has started and the guide has not stopped.
  let stopped = false
  t.teardown(() => stopped || process.kill(-(shell.pid as number), 'SIGKILL'))
  const ended = once(shell, 'exit')
  const out = (await text(shell.stdout)).replaceAll('\r', '')
  t.strictSame(await ended, [0, null])

  let at = 0
  for (const [, kind, body = ''] of blocks) {
    if (kind !== 'text') continue
    for (const line of body.trimEnd().split('\n')) {
      // What differs each time is not compared: ids, seconds, and what the ellipsis stands for.
      const pattern = line
        .split('…')
        .map((piece) => piece.replaceAll(/[.*+?^${}()|[\]\\]/g, '\\$&'))
        .join('.*')
        .replace(/pay_\w+/, 'pay_.*')
        .replace(/(Retry-After: )\d+/, '$1\\d+')
      const found = new RegExp(`^${pattern}$`, 'm').exec(out.slice(at))
      t.ok(found, line)
      if (found !== null) at += found.index + found[0].length
    }
  }
  t.throws(() => process.kill(-(shell.pid as number), 0), { code: 'ESRCH' }, 'they leave no process behind')
  stopped = true
})
