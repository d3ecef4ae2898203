import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { words } from '../core/fixtures.ts'
import { command } from '../support/commands.ts'
import { newKey, send, tempDir } from '../support/e2e.ts'
import { proxyInProcess } from '../support/proxy.ts'
import { upstreamStub } from '../support/upstream.ts'
import { EXAMPLE } from './support.ts'

void t.test('the draft of the example passes check unchanged, and a real proxy serves with it', async (t) => {
  await using upstream = await upstreamStub((seen, response) => {
    response.writeHead(201, { 'Content-Type': 'application/json' }).end(JSON.stringify({ at: seen.target }))
  })
  const dir = tempDir(t)
  const file = join(dir, 'routes.yaml')
  const drafted = await command(['routes', 'from', EXAMPLE, '--upstream', upstream.url])
  t.match(drafted, { code: 0, err: '' })
  writeFileSync(file, drafted.out)
  t.match(await command(['check', file]), { code: 0, out: /routes\.yaml: fine\n/ })

  const whole = join(dir, 'proxy.yaml')
  const served = `store: { url: "memory:" }\nwellKnown: true\n${drafted.out}`
  writeFileSync(whole, served)
  await using proxy = await proxyInProcess(served)

  const key = newKey()
  const paid = await send(proxy, key, { path: '/v1/payments' })
  t.match(await send(proxy, key, { path: '/v1/payments' }), { status: 201, body: paid.body, replayed: true })
  t.match(await send(proxy, null, { path: '/v1/payments' }), { code: 'idempotency_key_missing' })
  t.match(await send(proxy, 'k'.repeat(65), { method: 'PATCH', path: '/v1/payments/7' }), {
    status: 400,
    code: 'idempotency_key_invalid',
  })
  // A new signature is not another caller.
  for (const [signature, replayed] of [
    ['a', false],
    ['b', true],
  ] as const) {
    const headers = { 'x-signature': signature }
    t.match(await send(proxy, key, { path: '/v1/webhooks/orders', headers }), { status: 201, replayed })
  }
  t.equal(upstream.seen.length, 2, 'each executed once')

  const policy = (await (await fetch(`${proxy.url}/.well-known/idempotency`)).json()) as object
  const printed = await command(['policy', whole])
  t.strictSame(JSON.parse(printed.out), policy, 'policy prints what is served')
})

void t.test('docs/adoption.md shows what the commands print', async (t) => {
  const text = readFileSync(new URL('../../docs/adoption.md', import.meta.url), 'utf8')
  const { out: draft } = await command(['routes', 'from', EXAMPLE])
  const shownDraft = /```yaml\n(# Routes for .*?)```/s.exec(text)?.[1] as string
  for (const part of shownDraft.split(/ {2}…\n/)) t.ok(draft.includes(part), part)

  const dir = tempDir(t)
  const proxy = join(dir, 'proxy.yaml')
  const shown = /```yaml\n(# proxy\.yaml\n.*?)```/s.exec(text)?.[1] as string
  writeFileSync(proxy, shown)
  const { out: overlay, err, code } = await command(['routes', 'overlay', EXAMPLE, '--config', proxy])
  t.strictSame([code, err], [0, ''])
  const shownOverlay = /```yaml\n( {2}- target: .*?)```/s.exec(text)?.[1] as string
  for (const part of shownOverlay.split(/ {8}…\n/)) t.ok(overlay.includes(part), part)

  const { out: policy } = await command(['policy', proxy])
  const shownPolicy = /```json\n(.*?)```/s.exec(text)?.[1] as string
  for (const part of shownPolicy.split(/ {8}…\n/)) t.ok(policy.includes(part), part)
})

void t.test('docs/adoption.md names every member of a policy', async (t) => {
  const text = readFileSync(new URL('../../docs/adoption.md', import.meta.url), 'utf8')
  const dir = tempDir(t)
  const file = join(dir, 'all.yaml')
  writeFileSync(join(dir, 'secret'), 'x'.repeat(64))
  writeFileSync(
    file,
    `upstream: { url: http://127.0.0.1:3000 }
issuer: { path: /keys, secretFile: ${join(dir, 'secret')} }
status: { path: /status }
routes:
  - { name: off, match: { path: /a/b }, mode: off }
  - { name: all, match: { path: "/a/:b" }, statusHeader: true, tombstone: 1d, ttlFailed: 1h, inFlight: wait, key: { pattern: a, derive: { json: [/a] } } }
  - { name: issued, match: { path: /c }, key: { issuedOnly: true, from: ["json:/id"] } }
`,
  )
  const { code, out } = await command(['policy', file])
  t.equal(code, 0)
  const names = new Set([...out.matchAll(/"(\w+)":/g)].map(([, name]) => name as string))
  t.ok(names.size >= 30, `${names.size} members`)
  const plain = words`methods in name value header status code type retry specification`
  for (const name of names) if (!plain.includes(name)) t.ok(text.includes(name), name)
})

void t.test('policy reports usage errors and errors in the configuration', async (t) => {
  const bad = join(tempDir(t), 'bad.yaml')
  writeFileSync(bad, 'stor: {}\n')
  t.match(await command(['policy', bad]), { code: 1, out: '', err: /bad\.yaml:1:1: stor/ })
  t.match(await command(['policy']), { code: 2, err: /policy needs a file/ })
  t.match(await command(['policy', 'a', 'b']), { code: 2, err: /policy takes one file, found 2/ })
  const none = join(tempDir(t), 'none.yaml')
  writeFileSync(none, 'wellKnown: false\n')
  t.match(await command(['policy', '--config', none, '--upstream', 'http://127.0.0.1:1']), { code: 0 })
})
