import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setTimeout as wait } from 'node:timers/promises'
import { mulberry32 } from '../../test/support/random.ts'
import { freePort, RedisServer } from '../../test/support/redis.ts'
import { Clients, type Scenario, type Work } from './clients.ts'
import { FADING, TOMBSTONE, TTL, writeConfig } from './config.ts'
import { Ledger } from './ledger.ts'
import { SoakedProxy } from './proxy.ts'
import { MIX } from './scenarios.ts'
import { DISTURBANCES, leftOvers, storeFigures, unexplained } from './store.ts'
import { SoakUpstream } from './upstream.ts'
import type { Finding, Sample } from './verdict.ts'

export interface Plan {
  readonly requests: number
  /** Quiet points, including the one at the end. */
  readonly samples: number
  /** Scenarios at a time. */
  readonly lanes: number
  /** Spreads the requests evenly over this time; 0: as fast as the machine takes them. */
  readonly minutes: number
  /** The proxy's command, without `--config` and its file. */
  readonly command: readonly string[]
  /** File for a heap snapshot at the n-th sample; null: none. */
  readonly snapshot: (n: number) => string | null
  readonly say: (sample: Sample) => void
}

export interface Soaked {
  readonly samples: readonly Sample[]
  /** Findings about the traffic; verdict.ts judges growth. */
  readonly findings: readonly Finding[]
  readonly answers: ReadonlyMap<string, number>
  readonly replays: number
  /** Operations that the upstream executed and that the proxy promises to execute once. */
  readonly promised: number
  readonly unresolved: number
  /** Remaining records of requests in shadow mode whose client did not wait. */
  readonly watched: number
  /** Remaining records whose outcome the proxy gave up. */
  readonly lost: number
  readonly seconds: number
}

/** After this, all retained records and idle connections are gone. */
const QUIET = Math.max(TTL + TOMBSTONE, FADING) + 500
/** A gauge that is not 0 by then never will be. */
const QUIET_WITHIN = 20_000
const GAUGES = ['in_flight', 'waiters', 'buffered_bytes', 'spooled'].map((name) => `idempotency_${name}`)
/** Requests while the upstream refuses connections. */
const REFUSED = 20
const SEED = 12
const MILLIS_PER_MINUTE = 60_000

/** Drives the traffic, samples quiet points, and judges the answers and the remaining records. */
export async function soak(plan: Plan): Promise<Soaked> {
  const startedAt = performance.now()
  const folder = mkdtempSync(join(tmpdir(), 'soak-'))
  await using stack = new AsyncDisposableStack()
  stack.defer(() => rmSync(folder, { recursive: true, force: true }))
  const redis = stack.use(await RedisServer.start())
  // Where this process is interrupted.
  process.once('exit', () => void redis.kill())
  const ledger = new Ledger()
  const upstream = stack.use(new SoakUpstream(ledger))
  await upstream.open()
  const [port, adminPort] = [await freePort(), await freePort()]
  const addresses = { port, adminPort, upstreamPort: upstream.port, redisPort: redis.port }
  const file = writeConfig(folder, addresses)
  const proxy = stack.use(
    await SoakedProxy.start([...plan.command, '--config', file], { folder, port, adminPort }),
  )
  const clients = new Clients(port, 2 * plan.lanes, ledger)
  stack.defer(() => clients.close())

  let operations = 0
  const work: Work = {
    clients,
    random: mulberry32(SEED),
    next: () => `operation-${String(++operations).padStart(10, '0')}`,
  }
  const dueAt = (request: number): number =>
    startedAt + (request / plan.requests) * plan.minutes * MILLIS_PER_MINUTE
  const samples: Sample[] = []
  for (let n = 1; n <= plan.samples; n++) {
    const until = Math.round((plan.requests * n) / plan.samples)
    await Promise.all([drive(work, plan.lanes, until, dueAt), disturb(n, redis, clients, until)])
    await refuse(work, upstream)
    await clients.rest()
    const sample = await look(proxy, redis, ledger, clients, startedAt, plan.snapshot(n))
    samples.push(sample)
    plan.say(sample)
  }

  const left = await leftOvers(redis)
  const troubles = await proxy.troubles()
  const lost = new Set(
    troubles.filter(({ msg }) => String(msg).includes('is lost')).map(({ record }) => String(record)),
  )
  const unresolved = ledger.unresolved()
  const cutInShadow = clients.cutInShadow
  const open = unexplained(left, { unresolved, lost, cutInShadow })
  const ended = await proxy.stop()
  const bugs = troubles.filter(({ msg }) => String(msg).startsWith('internal error'))
  return {
    samples,
    findings: [
      ...open.map((detail) => ({ what: 'a record that nothing explains', detail })),
      ...ledger.twice().map((detail) => ({ what: 'executed twice', detail })),
      ...[...clients.wrong].map(([detail, count]) => ({ what: `a wrong answer, ${count} times`, detail })),
      ...bugs.map((line) => ({ what: 'a bug in the log', detail: JSON.stringify(line) })),
      ...(ended === 0 ? [] : [{ what: 'the proxy did not end well', detail: String(ended) }]),
    ],
    answers: clients.answers,
    replays: clients.replays,
    promised: ledger.promised,
    unresolved: unresolved.size,
    watched: left.filter(({ route }) => route === 'shadow').length,
    lost: left.filter(({ id }) => lost.has(id.slice(0, 12))).length,
    seconds: (performance.now() - startedAt) / 1000,
  }
}

/** Keeps all lanes busy, or waiting for their next request to be due, until that many requests have been sent. */
async function drive(
  work: Work,
  lanes: number,
  until: number,
  dueAt: (request: number) => number,
): Promise<void> {
  const lane = async (): Promise<void> => {
    while (work.clients.requests < until) {
      if (performance.now() < dueAt(work.clients.requests)) await wait(10)
      else await pick(work.random())(work)
    }
  }
  await Promise.all(Array.from({ length: lanes }, lane))
}

const SHARES = MIX.reduce((sum, [share]) => sum + share, 0)

function pick(at: number): Scenario {
  let left = at * SHARES
  for (const [share, scenario] of MIX) {
    left -= share
    if (left < 0) return scenario
  }
  return MIX[0]?.[1] as Scenario
}

/** Takes the store away halfway through the n-th segment. */
async function disturb(n: number, redis: RedisServer, clients: Clients, until: number): Promise<void> {
  const from = clients.requests
  while (clients.requests < (from + until) / 2) await wait(20)
  await DISTURBANCES[n % DISTURBANCES.length]?.(redis)
}

/** The upstream does not listen for a while: nothing is executed, and the same keys execute later. */
async function refuse({ clients, next }: Work, upstream: SoakUpstream): Promise<void> {
  // What departed clients left running comes to its end.
  await wait(500)
  await upstream.refuse()
  await wait(100)
  const asks = Array.from({ length: REFUSED }, () => {
    const operation = next()
    return { path: '/v1/payments', operation, key: operation, body: '{}' }
  })
  await Promise.all(asks.map((ask) => clients.ask(ask, 'upstream_unreachable')))
  await upstream.open()
  await Promise.all(asks.map((ask) => clients.ask(ask, 201)))
}

async function look(
  proxy: SoakedProxy,
  redis: RedisServer,
  ledger: Ledger,
  clients: Clients,
  startedAt: number,
  snapshot: string | null,
): Promise<Sample> {
  const deadline = performance.now() + QUIET_WITHIN
  // The latest records still have their whole retention left.
  while (Object.values(await gaugesOf(proxy)).some((value) => value !== 0) && performance.now() < deadline)
    await wait(200)
  await wait(QUIET)
  return {
    requests: clients.requests,
    executed: ledger.attempts,
    minutes: (performance.now() - startedAt) / MILLIS_PER_MINUTE,
    gauges: await gaugesOf(proxy),
    ...(await proxy.inside(snapshot)),
    resident: proxy.resident(),
    descriptors: proxy.descriptors(),
    store: { ...(await storeFigures(redis)), expected: ledger.unresolved().size },
  }
}

async function gaugesOf(proxy: SoakedProxy): Promise<Record<string, number>> {
  const metrics = await proxy.metrics()
  return Object.fromEntries(GAUGES.map((name) => [name, metrics.get(name) ?? Number.NaN]))
}
