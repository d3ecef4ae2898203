import { readFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import t, { type Test } from 'tap'
import {
  type CooperativeUpstream,
  startCooperativeUpstream,
} from '../../examples/cooperative-upstream/server.ts'
import { gate, newKey, type Reply, send, tempDir, until } from '../support/e2e.ts'
import { type ChildProxy, proxyInProcess, proxyProcess } from '../support/proxy.ts'
import { upstreamStub } from '../support/upstream.ts'

t.setTimeout(120_000)

const EXAMPLE = fileURLToPath(new URL('../../examples/cooperative-upstream/proxy.yaml', import.meta.url))

/** Starts the example's proxy, each time on the same store. */
function starter(t: Test, upstream: CooperativeUpstream): () => Promise<ChildProxy> {
  const dir = tempDir(t)
  return () =>
    proxyProcess(EXAMPLE, [], {
      PROXY_LISTEN: '127.0.0.1:0',
      PROXY_ADMIN_LISTEN: '127.0.0.1:0',
      PROXY_UPSTREAM: upstream.url,
      PROXY_STORE: `sqlite:${dir}/store.db`,
      LEASE: '1s',
    })
}

const CHARGES = { path: '/v1/charges', body: '{"amount":4200}' }

function charge(proxy: { readonly url: string }, key: string, headers = {}): Promise<Reply> {
  return send(proxy, key, { ...CHARGES, headers })
}

/** Retries until the lease is over and the retry is executed. */
async function answered(proxy: ChildProxy, key: string): Promise<Reply> {
  let last: Reply | null = null
  await until(async () => (last = await charge(proxy, key)).status !== 409)
  return last as unknown as Reply
}

/** An attempt as the proxy would send it. */
async function attempt(
  upstream: CooperativeUpstream,
  record: string,
  fence: number,
  demo = '',
): Promise<number> {
  const response = await fetch(`${upstream.url}/v1/charges`, {
    method: 'POST',
    headers: { 'idempotency-record': record, 'idempotency-fence': String(fence), 'x-demo': demo },
    body: CHARGES.body,
  })
  await response.text()
  return response.status
}

void t.test('an attempt is refused once a newer one of its record was seen', async (t) => {
  await using upstream = await startCooperativeUpstream()
  t.equal(await attempt(upstream, 'r-1', 7), 201)
  t.equal(await attempt(upstream, 'r-1', 6), 409)
  t.equal(await attempt(upstream, 'r-1', 7), 409, 'and so is the same one again')
  t.equal(await attempt(upstream, 'r-2', 6), 201)
  t.equal(await attempt(upstream, 'r-1', 8), 201)
  t.same(
    upstream.log.map(({ result }) => result),
    ['charged', 'stale', 'stale', 'charged', 'found'],
  )
  t.equal(upstream.charges(), 2)
})

void t.test('L09 a paused attempt that resumes after a newer one does nothing', async (t) => {
  await using upstream = await startCooperativeUpstream()
  const start = starter(t, upstream)
  await using doomed = await start()
  const key = newKey()
  const { opened, open } = gate()
  const paused = upstream.pauseNext('before the commit', opened)
  const lost = charge(doomed, key).catch((error: unknown) => error)
  await paused
  doomed.kill('SIGKILL')
  t.ok((await lost) instanceof Error)

  await using proxy = await start()
  const made = await answered(proxy, key)
  t.equal(made.status, 201)
  const newer = await upstream.logged(({ result }) => result === 'charged')
  open()
  const older = await upstream.logged(({ fence }) => fence !== newer.fence)
  t.equal(older.result, 'stale')
  t.equal(older.record, newer.record)
  t.ok(older.fence < newer.fence, `${older.fence} < ${newer.fence}`)
  t.equal(upstream.charges(), 1)
  const replay = await charge(proxy, key)
  t.same([replay.status, replay.body, replay.replayed], [201, made.body, true])
})

void t.test('after a newer attempt said not-applied, an older one does nothing', async (t) => {
  await using upstream = await startCooperativeUpstream()
  const { opened, open } = gate()
  const paused = upstream.pauseNext('before the commit', opened)
  const older = attempt(upstream, 'r-1', 1)
  await paused
  t.equal(await attempt(upstream, 'r-1', 2, 'locked'), 409)
  open()
  t.equal(await older, 409)
  t.equal(upstream.charges(), 0)
  t.equal(await attempt(upstream, 'r-1', 3), 201)
  t.equal(
    await attempt(upstream, 'r-1', 4, 'locked'),
    201,
    'a charge that was made is not called not-applied',
  )
  t.same(
    upstream.log.map(({ result }) => result),
    ['refused', 'stale', 'charged', 'found'],
  )
  t.equal(upstream.charges(), 1)
})

void t.test('the next attempt finds one that finished unnoticed', async (t) => {
  await using upstream = await startCooperativeUpstream()
  const start = starter(t, upstream)
  await using doomed = await start()
  const key = newKey()
  const { opened, open } = gate()
  const paused = upstream.pauseNext('after the commit', opened)
  const lost = charge(doomed, key).catch((error: unknown) => error)
  await paused
  doomed.kill('SIGKILL')
  t.ok((await lost) instanceof Error)
  open()

  await using proxy = await start()
  const made = await answered(proxy, key)
  t.equal(made.status, 201)
  t.same(
    upstream.log.map(({ result }) => result),
    ['charged', 'found'],
  )
  t.equal(upstream.charges(), 1)
})

void t.test('Idempotency-Outcome overrides the status, and is not passed on', async (t) => {
  await using upstream = await startCooperativeUpstream()
  await using proxy = await starter(t, upstream)()
  const results = (): string[] => upstream.log.map(({ result }) => result)

  for (const [demo, status] of [
    ['maintenance', 503],
    ['locked', 409],
  ] as const) {
    const key = newKey()
    const before = results().length
    const first = await charge(proxy, key, { 'x-demo': demo })
    t.same([first.status, first.headers.get('idempotency-outcome'), first.code], [status, null, null])
    const second = await charge(proxy, key)
    t.same([second.status, second.replayed], [201, false], `${demo}: the key was free`)
    t.same(results().slice(before), ['refused', 'charged'])
  }

  const key = newKey()
  const first = await charge(proxy, key, { 'x-demo': 'receipt-fails' })
  t.same([first.status, first.headers.get('idempotency-outcome')], [500, null])
  const second = await charge(proxy, key)
  t.same([second.status, second.replayed, second.body], [500, true, first.body], 'stored')
  t.equal(second.headers.get('idempotency-outcome'), null)
  t.equal(upstream.charges(), 3)
})

void t.test('docs/cooperative-upstreams.md says what each status becomes, with the header too', async (t) => {
  const table = file('docs/cooperative-upstreams.md')
    .split('\n')
    .filter((line) => /^\| \d{3} /.test(line))
    .map((line) => line.slice(2, -2).split(' | '))
  t.equal(table.length, 4)
  for (const [status = '', ...cells] of table)
    for (const [n, outcome] of [null, 'not-applied', 'applied'].entries()) {
      await using stub = await upstreamStub((_seen, response) => {
        if (outcome !== null) response.setHeader('Idempotency-Outcome', outcome)
        response.writeHead(Number(status)).end('told')
      })
      await using proxy = await proxyInProcess(
        `upstream: { url: "${stub.url}" }
store: { url: "memory:" }
defaults: { profile: strict, scope: { caller: "header:authorization" } }`,
      )
      const key = newKey()
      t.equal((await charge(proxy, key)).status, Number(status))
      const retry = await charge(proxy, key)
      const became =
        retry.code === 'idempotency_outcome_unknown' ? 'unknown' : retry.replayed ? 'store' : 'release'
      t.equal(became, cells[n]?.replaceAll('`', ''), `${status} ${outcome}`)
      t.equal(stub.seen.length, became === 'release' ? 2 : 1)
    }
})

void t.test('M08 the upstream gets the record id of the log; a client cannot choose it', async (t) => {
  await using upstream = await startCooperativeUpstream()
  await using proxy = await starter(t, upstream)()
  const key = newKey()
  const forged = { 'idempotency-record': 'mine', 'idempotency-fence': '9007199254740991' }
  t.equal((await charge(proxy, key, forged)).status, 201)
  const line = await upstream.logged(() => true)
  t.match(line.record, /^[\w-]{43}$/)
  t.ok(line.fence > 0 && line.fence < Number.MAX_SAFE_INTEGER)

  const misuse = await send(proxy, key, { ...CHARGES, body: '{"amount":1}' })
  t.equal((JSON.parse(misuse.body) as { instance: string }).instance, line.record)
  const logged = await proxy.logged(({ outcome }) => outcome === 'executed')
  t.equal(logged.record, line.record.slice(0, 12))
  t.equal(logged.fence, line.fence)
  t.notOk(JSON.stringify(upstream.log).includes(key), 'the log needs no key')
})

void t.test('a request that did not come through the proxy is refused', async (t) => {
  await using upstream = await startCooperativeUpstream()
  const response = await fetch(`${upstream.url}/v1/charges`, { method: 'POST', body: CHARGES.body })
  t.equal(response.status, 400)
  t.equal(upstream.charges(), 0)
})

void t.test('docs/cooperative-upstreams.md shows what the example does', async (t) => {
  const source = file('examples/cooperative-upstream/server.ts')
  const plain = (text: string) => text.replace(/\s+/g, ' ').trim()
  const [yaml = '', ...sql] = [
    ...file('docs/cooperative-upstreams.md').matchAll(/^```(?:yaml|sql)\n([\s\S]*?)^```$/gm),
  ].map(([, code]) => code as string)
  t.equal(yaml, file('examples/cooperative-upstream/proxy.yaml'))
  t.equal(sql.length, 2)
  for (const block of sql)
    for (const statement of block.split(';').map(plain).filter(Boolean))
      t.ok(plain(source).includes(statement.replace(/^-- .*? -- /, '')), statement)
})

function file(path: string): string {
  return readFileSync(new URL(`../../${path}`, import.meta.url), 'utf8')
}
