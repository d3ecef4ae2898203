import { fileURLToPath } from 'node:url'
import t, { type Test } from 'tap'
import { type ChargesApi, startChargesApi } from '../../examples/charges-api/server.ts'
import { tempDir, until } from '../support/e2e.ts'
import { proxyInProcess, proxyProcess, type TestProxy } from '../support/proxy.ts'
import { freePort } from '../support/redis.ts'
import { type Cut, cutter } from './cutter.ts'
import { type Ended, inBatches, orderKey, REAL_CLIENTS, type RealClient } from './real.ts'
import { upstreamCutter } from './upstream-cutter.ts'

t.setTimeout(240_000)

/** How many scenarios of a client run at once: they mostly wait between its tries. */
const widthOf = ({ costly }: RealClient): number => (costly ? 6 : 200)

/** A short lease makes `Retry-After` short: clients that obey it would otherwise wait for half a minute. */
function proxyOn(store: string, upstream: string, lease = '5s'): Promise<TestProxy> {
  return proxyInProcess(
    `upstream: { url: "${upstream}" }
store: { url: "${store}" }
defaults: { lease: ${lease} }
routes: [{ name: charges, match: { methods: [POST], path: /v1/charges }, key: required }]`,
  )
}

/** Cuts at every `step`-th byte of an exchange, from before the first to after the last, by reset and end in turn. */
function cutsOf({ up, down }: { readonly up: Buffer; readonly down: Buffer }, step: number): Cut[] {
  const cuts: Cut[] = []
  for (const [way, { length }] of [
    ['up', up],
    ['down', down],
  ] as const)
    for (let after = 0; ; after = Math.min(after + step, length)) {
      cuts.push({ way, after, how: cuts.length % 2 === 0 ? 'reset' : 'end' })
      if (after === length) break
    }
  return cuts
}

/** How what the client was told differs from what happened; null where it does not. */
function lie(api: ChargesApi, key: string, ended: Ended): string | null {
  const made = api.under(key)
  if (made.length > 1) return `${made.length} charges`
  if (ended.kind === 'charged' && JSON.stringify(ended.charge) !== JSON.stringify(made[0]))
    return `told of ${JSON.stringify(ended.charge)}, made ${JSON.stringify(made)}`
  return null
}

/** What went wrong, in how many cuts. */
interface Report {
  readonly wrong: readonly string[]
  readonly cuts: number
}

const CAN_RUN = REAL_CLIENTS.filter(({ skip }) => skip === false)

/** Starts the scenarios of all clients at once. */
function begin(run: (client: RealClient) => Promise<Report>): Map<RealClient, Promise<Report>> {
  const reports = new Map(CAN_RUN.map((client) => [client, run(client)]))
  for (const report of reports.values()) report.catch(() => {})
  return reports
}

async function tell(t: Test, reports: Map<RealClient, Promise<Report>>): Promise<void> {
  for (const client of REAL_CLIENTS)
    await t.test(client.name, { skip: client.skip }, async (t) => {
      const { wrong, cuts } = (await reports.get(client)) as Report
      t.strictSame(wrong, [], `${cuts} cuts`)
      t.ok(cuts >= 6)
    })
}

/** Cuts between client and proxy: in the end the client has its charge, and it is the only one. */
async function cutTheClient(client: RealClient, store: string, step: number, times = 1): Promise<Report> {
  await using api = await startChargesApi()
  await using proxy = await proxyOn(store, api.url)
  await using untouched = await cutter(proxy.port)
  const whole = await client.charge(untouched.url, orderKey())
  const { up, down } = untouched.first
  if (whole.kind !== 'charged' || whole.replayed === true) throw new Error(JSON.stringify(whole))

  const wrong: string[] = []
  const cuts = cutsOf(untouched.first, step)
  await inBatches(cuts, widthOf(client), async (cut) => {
    const key = orderKey()
    await using wire = await cutter(proxy.port, Array<Cut>(times).fill(cut))
    const ended = await client.charge(wire.url, key)
    const say = (what: string) => wrong.push(`${cut.way} ${cut.after} ${cut.how}: ${what}`)
    const lied = lie(api, key, ended)
    if (lied !== null) say(lied)
    if (ended.kind !== 'charged') return void say(JSON.stringify(ended))
    // Without a complete request nothing was claimed; where the response was on its way, the charge had been made.
    const delivered = cut.way === 'down' && cut.after === down.length
    const undecided = cut.way === 'up' && cut.after === up.length
    const replayed = cut.way === 'down' && !delivered
    if (!undecided && ended.replayed !== null && ended.replayed !== replayed)
      say(`replayed: ${ended.replayed}`)
    if (!delivered && wire.connections < 1 + times) say(`${wire.connections} connections`)
  })
  if (api.made.length !== cuts.length + 1)
    wrong.push(`${api.made.length} charges for ${cuts.length + 1} keys`)
  return { wrong, cuts: cuts.length }
}

/** Cuts between proxy and API: the outcome is unknown, the client is told so, and nothing is charged again. */
async function cutTheUpstream(client: RealClient, step: number): Promise<Report> {
  await using api = await startChargesApi()
  await using wire = await upstreamCutter(api.port)
  await using proxy = await proxyOn('memory:', wire.url, '1s')
  const whole = await client.charge(proxy.url, orderKey())
  if (whole.kind !== 'charged') throw new Error(JSON.stringify(whole))
  const { up, down } = { ...wire.last }
  const wrong: string[] = []
  const cuts = cutsOf({ up, down }, step)
  await inBatches(cuts, widthOf(client), async (cut) => {
    const key = orderKey()
    wire.plan.set(key, cut)
    const ended = await client.charge(proxy.url, key)
    const say = (what: string) => wrong.push(`${cut.way} ${cut.after} ${cut.how}: ${what}`)
    const lied = lie(api, key, ended)
    if (lied !== null) say(lied)
    const made = api.under(key).length
    if (cut.way === 'down' && made !== 1) say(`${made} charges`)
    if (cut.way === 'up' && cut.after < up.length && made !== 0) say(`${made} charges`)
    const delivered = cut.way === 'down' && cut.after === down.length
    if (ended.kind !== (delivered ? 'charged' : 'told')) say(JSON.stringify(ended))
    if (ended.kind === 'told' && ended.code !== 'idempotency_outcome_unknown') say(String(ended.code))
  })
  return { wrong, cuts: cuts.length }
}

function counted(outcome: string): string {
  return `idempotency_requests_total{route="charges",outcome="${outcome}"}`
}

// These take longest, and mostly wait.
const upstreamCuts = begin((client) =>
  cutTheUpstream(client, client.costly ? 79 : client.name === 'stripe' ? 1 : 9),
)

void t.test('X01 P26 clients cut off from the proxy at any byte get one charge each (sqlite)', (t) => {
  const dir = tempDir(t)
  return tell(
    t,
    begin((client) => cutTheClient(client, `sqlite:${dir}/${client.name}.db`, client.costly ? 29 : 1)),
  )
})

void t.test('U03 U05 O01 with the API cut off, clients hear "unknown": no second charge', (t) =>
  tell(t, upstreamCuts),
)

void t.test('X01 P26 clients cut off twice at the same place get one charge each (memory)', (t) =>
  tell(
    t,
    begin((client) => cutTheClient(client, 'memory:', client.costly ? 83 : 29, 2)),
  ),
)

void t.test('I01 clients cut off during the charge wait out the 409 and get one charge', async (t) => {
  await Promise.all(
    CAN_RUN.map(async (client) => {
      await using api = await startChargesApi()
      await using proxy = await proxyOn('memory:', api.url, '2s')
      await using untouched = await cutter(proxy.port)
      await client.charge(untouched.url, orderKey())
      const key = orderKey()
      const { promise, resolve } = Promise.withResolvers<void>()
      api.trouble({ until: promise })
      const { length } = untouched.first.up
      await using wire = await cutter(proxy.port, [{ way: 'up', after: length, how: 'hold' }])
      const asked = client.charge(wire.url, key)
      await api.charged(2)
      wire.hangUp()
      await until(async () => (await proxy.metric(counted('in_progress'))) > 0)
      resolve()
      const ended = await asked
      t.match(ended, { kind: 'charged', charge: api.under(key)[0] }, client.name)
      if (ended.kind === 'charged') t.not(ended.replayed, false, 'the retry got the first response')
      t.equal(api.under(key).length, 1)
    }),
  )
})

void t.test('I02 with the documented configuration the retry waits for the first response', async (t) => {
  await using api = await startChargesApi()
  const example = fileURLToPath(new URL('../../examples/charges-api/proxy.yaml', import.meta.url))
  await using proxy = await proxyProcess(example, [], {
    PROXY_LISTEN: '127.0.0.1:0',
    PROXY_ADMIN_LISTEN: '127.0.0.1:0',
    PROXY_UPSTREAM: api.url,
    PROXY_STORE: `sqlite:${tempDir(t)}/store.db`,
  })
  const { promise, resolve } = Promise.withResolvers<void>()
  const lengths = await Promise.all(
    CAN_RUN.map(async (client) => {
      await using untouched = await cutter(proxy.port)
      await client.charge(untouched.url, orderKey())
      return untouched.first.up.length
    }),
  )
  api.trouble(...CAN_RUN.map(() => ({ until: promise })))
  const asked = await Promise.all(
    CAN_RUN.map(async (client, n) => {
      const key = orderKey()
      const wire = await cutter(proxy.port, [{ way: 'up', after: lengths[n] as number, how: 'hold' }])
      t.teardown(() => wire[Symbol.asyncDispose]())
      return { client, key, wire, ended: client.charge(wire.url, key) }
    }),
  )
  await api.charged(2 * CAN_RUN.length)
  for (const { wire } of asked) wire.hangUp()
  await until(async () => (await proxy.metric('idempotency_waiters')) === CAN_RUN.length)
  resolve()
  for (const { client, key, wire, ended } of asked) {
    t.match(await ended, { kind: 'charged', charge: api.under(key)[0] }, client.name)
    t.same([api.under(key).length, wire.connections], [1, 2], 'one charge, one retry')
  }
})

void t.test('U01 with the API down at first nothing is sent, and the retry makes the charge', async (t) => {
  await Promise.all(
    CAN_RUN.map(async (client) => {
      const port = await freePort()
      await using proxy = await proxyOn('memory:', `http://127.0.0.1:${port}`)
      const key = orderKey()
      const asked = client.charge(proxy.url, key)
      await until(async () => (await proxy.metric(counted('upstream_unreachable'))) > 0)
      await using api = await startChargesApi(port)
      t.match(await asked, { kind: 'charged', charge: api.under(key)[0] }, client.name)
      t.equal(api.under(key).length, 1)
    }),
  )
})
