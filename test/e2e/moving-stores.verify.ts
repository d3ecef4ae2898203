import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { command } from '../support/commands.ts'
import { gate, newKey, send, tempDir, until } from '../support/e2e.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { proxyProcess } from '../support/proxy.ts'
import { emptyRedis } from '../support/redis.ts'
import { essenceOf } from '../support/replicas.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(600_000)

const redis = await emptyRedis(t)

void t.test(
  '§9 copy from SQLite to Redis to PostgreSQL to SQLite: each proxy continues where the one before stopped',
  { skip: NO_POSTGRES },
  async (t) => {
    const postgres = await PostgresServer.start()
    t.teardown(() => postgres[Symbol.asyncDispose]())
    const { opened, open } = gate()
    t.teardown(open)
    let isBusy = true
    const upstream = await upstreamStub(async ({ target, body }, response) => {
      if (target === '/break') return void response.destroy()
      if (target === '/gated') await opened
      if (target === '/busy' && isBusy) return void response.writeHead(503, { 'Retry-After': '1' }).end()
      response.writeHead(201, { 'Set-Cookie': ['a=1', 'b=2'], 'X-Body': String(body.length) }).end('paid')
    })
    t.teardown(() => upstream[Symbol.asyncDispose]())
    const dir = tempDir(t)
    const stores = [`sqlite:${dir}/first.db`, redis.url, postgres.url, `sqlite:${dir}/last.db`]
    const files = stores.map((url, n) => {
      const file = join(dir, `${n}.yaml`)
      writeFileSync(
        file,
        `service: pay
listen: 127.0.0.1:0
admin: { listen: "127.0.0.1:0" }
upstream: { url: "${upstream.url}" }
store: { url: "${url}", timeout: 2s }
defaults: { lease: 3s }
routes: [{ name: all, match: { path: "/*" } }]
`,
      )
      return file
    })
    const executed = () => upstream.seen.length
    const paid: { key: string; body: string; first: unknown }[] = []
    const [broken, busy, killed] = [newKey(), newKey(), newKey()]

    for (const [n, file] of files.entries()) {
      const proxy = await proxyProcess(file)
      t.teardown(() => proxy.kill('SIGKILL'))
      const before = executed()
      for (const { key, body, first } of paid) {
        const again = await send(proxy, key, { body })
        t.equal(again.replayed, true)
        t.strictSame(essenceOf(again), first, 'the first response')
        t.match(await send(proxy, key, { body: '{"amount":2}' }), {
          status: 422,
          code: 'idempotency_key_reused',
        })
      }
      if (n > 0)
        for (const [key, path] of [
          [broken, '/break'],
          [killed, '/gated'],
        ] as const)
          t.match(await send(proxy, key, { path }), { status: 409, code: 'idempotency_outcome_unknown' })
      t.equal(executed(), before, 'nothing is executed again')

      const [key, body] = [newKey(), JSON.stringify({ amount: 1, note: 'ü'.repeat(n * 2000) })]
      const first = await send(proxy, key, { body })
      t.match(first, { status: 201, replayed: false })
      paid.push({ key, body, first: essenceOf(first) })
      if (n === 0) {
        t.match(await send(proxy, broken, { path: '/break' }), { code: 'upstream_failed' })
        t.equal((await send(proxy, busy, { path: '/busy' })).status, 503)
        const cut = send(proxy, killed, { path: '/gated' }).catch(() => null)
        await upstream.arrived(executed() + 1)
        proxy.kill('SIGKILL')
        await Promise.all([cut, proxy.exited])
        const early = await command(['copy', '--from', file, '--to', files[1] as string])
        // Its lease may have ended by now.
        if (early.code !== 0) t.match(early, { code: 1, err: /a request is in progress/ })
      } else {
        if (n === 1) {
          isBusy = false
          t.match(
            await send(proxy, busy, { path: '/busy' }),
            { status: 201, replayed: false },
            'the key was free',
          )
        } else t.match(await send(proxy, busy, { path: '/busy' }), { status: 201, replayed: true })
        proxy.kill('SIGTERM')
        t.equal(await proxy.exited, 0)
      }
      const next = files[n + 1]
      if (next === undefined) continue
      const copied = async () => command(['copy', '--from', file, '--to', next])
      await until(async () => (await copied()).code === 0)
      t.match(
        await copied(),
        { code: 0, out: /^0 +copied\n\d+ +already there\n$/ },
        'a second copy changes nothing',
      )
    }
    const listed = async (store: number) => {
      const { out, err } = await command(['list', '--json', '--config', files[store] as string])
      t.equal(err, '')
      const { records } = JSON.parse(out) as { records: { id: string; createdAt: string; fence: number }[] }
      return new Map(records.map(({ id, createdAt, fence }) => [id, `${createdAt} ${fence}`]))
    }
    const [origin, last] = [await listed(0), await listed(3)]
    t.equal(origin.size, 4)
    t.equal(last.size, 7)
    const moved = [...origin].filter(([id, stamp]) => last.get(id) === stamp)
    t.equal(moved.length, 3, 'all but the retried one are unchanged, under the same fence')
    const who = ['--caller', 'Authorization: Bearer alice', '--method', 'POST', '--path', '/pay']
    const told = await command(['inspect', `${paid[0]?.key}`, ...who, '--config', files[3] as string])
    t.match(told.out, '3 retries were answered without executing: 3 with the stored response.\n')
  },
)
