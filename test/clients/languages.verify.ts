import t, { type Test } from 'tap'
import { type ChargesApi, startChargesApi } from '../../examples/charges-api/server.ts'
import { tempDir } from '../support/e2e.ts'
import { proxyInProcess, type TestProxy } from '../support/proxy.ts'
import { type Cut, cutter } from './cutter.ts'
import { LANGUAGES, type LanguageClient, type Told } from './languages.ts'
import { inBatches, orderKey } from './real.ts'

t.setTimeout(240_000)

/** Its folders outlive the test that fills them. */
const root = t

/** A short lease makes `Retry-After` short. */
function proxyOn(store: string, upstream: string): Promise<TestProxy> {
  return proxyInProcess(
    `upstream: { url: "${upstream}" }
store: { url: "${store}" }
defaults: { lease: 2s }
routes: [{ name: charges, match: { methods: [POST], path: /v1/charges }, key: required }]`,
  )
}

function each(title: string, run: (t: Test, client: LanguageClient) => Promise<void>): void {
  void t.test(title, async (t) => {
    t.jobs = 2
    for (const client of LANGUAGES) void t.test(client.language, { skip: client.skip }, (t) => run(t, client))
  })
}

/** What went wrong: there must be one charge, and the client must report it. */
function wrong(api: ChargesApi, key: string, { code, out, err }: Told): string | null {
  const made = api.under(key)
  if (made.length !== 1) return `${made.length} charges`
  if (code !== 0) return `exit ${code}: ${err}`
  return JSON.stringify(JSON.parse(out)) === JSON.stringify(made[0]) ? null : `told ${out}`
}

void t.test('the clients in compiled languages compile', async (t) => {
  for (const client of LANGUAGES)
    void t.test(client.language, { skip: client.skip }, async () => client.prepare(tempDir(root)))
})

each('X01 P26 a client cut off in its request or its response gets one charge', async (t, client) => {
  await using api = await startChargesApi()
  await using proxy = await proxyOn(`sqlite:${tempDir(t)}/store.db`, api.url)
  await using untouched = await cutter(proxy.port)
  const whole = orderKey()
  t.equal(wrong(api, whole, await client.charge(untouched.url, whole)), null)
  const { up, down } = untouched.first
  const head = down.indexOf('\r\n\r\n') + 4
  const length = down.indexOf('Content-Length')
  const places: Omit<Cut, 'how'>[] = [
    { way: 'up', after: 0 },
    { way: 'up', after: up.length >> 1 },
    { way: 'up', after: up.length },
    ...[0, 9, 25, length, length + 8, length + 17, head - 2, head, head + 1, down.length - 1].map(
      (after) => ({ way: 'down', after }) as const,
    ),
  ]
  // An orderly end at each; a reset is easier to notice.
  const cuts = places.flatMap((place, i): Cut[] => [
    { ...place, how: 'end' },
    ...(i % 3 === 1 ? [{ ...place, how: 'reset' } as const] : []),
  ])
  const found: string[] = []
  await inBatches(cuts, 4, async (cut) => {
    const key = orderKey()
    await using wire = await cutter(proxy.port, [cut])
    const told = wrong(api, key, await client.charge(wire.url, key))
    if (told !== null) found.push(`${cut.way} ${cut.after} ${cut.how}: ${told}`)
    if (wire.connections < 2) found.push(`${cut.way} ${cut.after} ${cut.how}: no retry`)
  })
  t.strictSame(found, [], `${cuts.length} cuts`)
  t.equal(api.made.length, cuts.length + 1)
})

each('U03 U05 when the API cuts the connection, clients report unknown: one charge', async (t, client) => {
  await using api = await startChargesApi()
  await using proxy = await proxyOn('memory:', api.url)
  for (const die of ['after the charge', 'in the answer'] as const) {
    api.trouble({ die })
    const key = orderKey()
    const { code, out, err } = await client.charge(proxy.url, key, { tries: 3 })
    t.equal(code, 2, `${die}: ${err}`)
    t.equal(out, '')
    t.match(err, '"code":"idempotency_outcome_unknown"')
    t.equal(api.under(key).length, 1)
  }
})

each('U02 when the API cuts it before the charge, clients report unknown: no charge', async (t, client) => {
  await using api = await startChargesApi()
  await using proxy = await proxyOn('memory:', api.url)
  api.trouble({ die: 'before the charge' })
  const key = orderKey()
  t.equal((await client.charge(proxy.url, key, { tries: 2 })).code, 2)
  t.equal(api.under(key).length, 0)
})

each('I01 a client obeys Retry-After while the charge is being made', async (t, client) => {
  await using api = await startChargesApi()
  await using proxy = await proxyOn('memory:', api.url)
  await using untouched = await cutter(proxy.port)
  await client.charge(untouched.url, orderKey())
  const key = orderKey()
  api.trouble({ delay: 1500 })
  await using wire = await cutter(proxy.port, [{ way: 'up', after: untouched.first.up.length, how: 'end' }])
  t.equal(wrong(api, key, await client.charge(wire.url, key)), null)
  // The first one and the replay; its own pauses (0.1 s, 0.2 s, …) would have made it ask more often.
  t.ok(wire.connections <= 4, `${wire.connections} connections`)
  t.ok((await proxy.metric('idempotency_requests_total{route="charges",outcome="in_progress"}')) >= 1)
})

each('a client does not retry a refused request', async (t, client) => {
  await using api = await startChargesApi()
  await using proxy = await proxyOn('memory:', api.url)
  await using wire = await cutter(proxy.port)
  const key = orderKey()
  t.match(await client.charge(wire.url, key, { amount: 0 }), {
    code: 1,
    out: '',
    err: /Invalid positive integer/,
  })
  t.equal(wire.connections, 1)
  t.match(await client.charge(wire.url, key, { amount: 7 }), { code: 1, err: /idempotency_key_reused/ })
  t.equal(wire.connections, 2)
  t.equal(api.made.length, 0)
})
