import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { createInterface } from 'node:readline'
import t from 'tap'
import { type Reply, send, until } from '../support/e2e.ts'
import { proxyProcess } from '../support/proxy.ts'

void t.test('the example of docs/reconciliation.md does what its README says', async (t) => {
  const child = spawn(process.execPath, ['examples/reconciliation/server.ts', '--port', '0'], {
    stdio: ['ignore', 'pipe', 'inherit'],
  })
  t.teardown(() => child.kill())
  const [line] = (await once(createInterface({ input: child.stdout }), 'line')) as [string]
  const upstream = line.replace(/^.* on /, '')
  const proxy = await proxyProcess('examples/reconciliation/proxy.yaml', [], {
    PROXY_LISTEN: '127.0.0.1:0',
    PROXY_ADMIN_LISTEN: '127.0.0.1:0',
    PROXY_UPSTREAM: upstream,
  })
  t.teardown(() => proxy[Symbol.asyncDispose]())
  const ask = (key: string, amount: number, demo?: string): Promise<Reply> =>
    send(proxy, key, {
      path: '/v1/charges',
      body: JSON.stringify({ amount }),
      headers: demo === undefined ? {} : { 'x-demo': demo },
    })
  const settled = async (key: string, amount: number): Promise<Reply> => {
    let last = await ask(key, amount)
    await until(async () => {
      if (last.code !== 'idempotency_outcome_unknown') return true
      last = await ask(key, amount)
      return false
    })
    return last
  }
  for (const [key, amount, demo] of [
    ['order-1', 4200, 'drop-answer'],
    ['order-2', 420_000, 'drop-answer'],
    ['order-3', 4200, 'drop-request'],
  ] as const)
    t.equal((await ask(key, amount, demo)).code, 'upstream_failed')
  t.match(await settled('order-1', 4200), {
    status: 201,
    replayed: true,
    body: /"amount":4200,"state":"succeeded"/,
  })
  t.match(await settled('order-2', 420_000), { status: 402, replayed: true, body: /declined/ })
  t.match(await settled('order-3', 4200), { status: 201, replayed: false })
  t.match(await settled('order-3', 4200), { status: 201, replayed: true })
  t.match(await (await fetch(`${upstream}/healthz`)).json(), { charges: 3 })
  t.equal(
    (await fetch(`${upstream}/v1/charges?record=x`)).status,
    401,
    'the status query needs its own credentials',
  )
})
