import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync } from 'node:fs'
import { text } from 'node:stream/consumers'
import { fileURLToPath } from 'node:url'
import t from 'tap'
import { command, operated } from '../support/commands.ts'
import { newKey, send } from '../support/e2e.ts'

const CLI = fileURLToPath(new URL('../../src/cli.ts', import.meta.url))

void t.test(
  'drain makes readiness fail, requests are still served, and the audit log says who did it',
  async (t) => {
    const { proxy, where, audit } = await operated(t, 'memory:')
    const ready = async () => (await fetch(`${proxy.adminUrl}/readyz`)).status
    t.equal(await ready(), 200)
    const { code, out, err } = await command(['drain', '--reason', 'rollout', '--by', 'hook', ...where.admin])
    t.strictSame([code, err], [0, ''])
    t.match(out, /^the proxy at http:.* is draining: it fails its readiness and keeps serving\n$/)
    t.equal(await ready(), 503)
    t.equal((await send(proxy, newKey())).status, 201)
    t.strictSame(await command(['drain', '--json', ...where.admin]), {
      code: 0,
      out: '{"draining":true}\n',
      err: '',
    })
    t.match(JSON.parse(readFileSync(audit, 'utf8').split('\n')[0] ?? ''), {
      what: 'drain',
      who: { by: 'hook' },
      reason: 'rollout',
    })
    t.match(await command(['drain', '--admin', 'http://127.0.0.1:1', ...where.admin.slice(2)]), {
      code: 1,
      err: /unreachable/,
    })
  },
)

void t.test('the program separates output from errors, and ends quietly when its pipe closes', async (t) => {
  const { where } = await operated(t, 'memory:')
  const run = async (words: readonly string[]) => {
    const child = spawn(process.execPath, [CLI, ...words], {
      env: { ...process.env, NODE_V8_COVERAGE: '' },
      stdio: ['ignore', 'pipe', 'pipe'],
    })
    const ended = once(child, 'close')
    const [out, err] = await Promise.all([text(child.stdout), text(child.stderr)])
    return { code: (await ended)[0] as number, out, err }
  }
  const [listed, unread, refused, later] = await Promise.all([
    run(['list', ...where.admin]),
    run(['list', '--admin', where.admin[1] as string]),
    run(['resolve', 'A'.repeat(43), '--retryable', '--reason', 'x', ...where.admin]),
    run(['copy']),
  ])
  t.strictSame(listed, { code: 0, out: 'no records\n', err: '' })
  t.match(unread, { code: 2, out: '', err: /--token-file/ })
  t.match(refused, { code: 2, out: '', err: /no terminal to confirm at/ })
  t.match(later, { code: 2, out: '', err: /copy needs --from STORE and --to STORE/ })

  const piped = spawn('sh', ['-c', `"$0" "$1" schema | head -c 10`, process.execPath, CLI], {
    env: { ...process.env, NODE_V8_COVERAGE: '' },
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  const [out, err] = await Promise.all([text(piped.stdout), text(piped.stderr)])
  t.strictSame([out.length, err], [10, ''])
})
