import { randomInt } from 'node:crypto'
import { monitorEventLoopDelay } from 'node:perf_hooks'
import { setTimeout as wait } from 'node:timers/promises'
import { newKey, send } from './e2e.ts'
import type { Losing } from './losses.ts'
import { proxyInProcess, type TestProxy } from './proxy.ts'
import { upstreamStub, valueOf } from './upstream.ts'

const CLIENTS = 6
const PROFILES = ['standard', 'strict'] as const
/** How long clients ask for a key after its first answer: proxies rewrite an outcome for 15 s, and may hold a request for a grace. */
const ASKED_FOR = 10_000

export interface Figures {
  /** By kind. */
  readonly failovers: Record<string, number>
  requests: number
  /** Answers other than the upstream's and 409, by code. */
  readonly errors: Record<string, number>
  keys: number
  /** For each key that was executed more than once: when, and what was done to the store, in milliseconds. */
  readonly twice: string[]
  /** Requests that were told that nobody knows their outcome. */
  unknown: number
  /** Requests that were not answered within {@link ASKED_FOR}. */
  late: number
  splits: number
  /** Milliseconds: the longest time for which this process, proxies and all, did not get to run. */
  stalled: number
}

export function sumOf(counts: Readonly<Record<string, number>>): number {
  return Object.values(counts).reduce((sum, count) => sum + count, 0)
}

function count(counts: Record<string, number>, name: string): void {
  counts[name] = (counts[name] ?? 0) + 1
}

/** Two proxies and a store that loses its last writes again and again, in each of its ways in turn, while clients go on. */
async function atOneStore(
  start: () => Promise<Losing>,
  grace: string,
  figures: Figures,
  isOver: () => boolean,
): Promise<void> {
  const executions = new Map<string, number[]>()
  const done: string[] = []
  const begun = performance.now()
  const now = (): number => Math.round(performance.now() - begun)
  await using upstream = await upstreamStub(async (seen, response) => {
    const key = valueOf(seen, 'idempotency-key')
    const times = [...(executions.get(key) ?? []), now()]
    executions.set(key, times)
    if (times.length === 1) figures.keys++
    if (times.length === 2)
      figures.twice.push(`executed at ${times.join(' and ')}; ${done.slice(-6).join(', ')}`)
    await wait(randomInt(300))
    response.writeHead(201, { 'Content-Type': 'text/plain' }).end(key)
  })
  await using store = await start()
  const routes = PROFILES.map(
    (name) =>
      `{ name: ${name}, match: { path: /${name} }, profile: ${name}, scope: { caller: "header:authorization" } }`,
  )
  const yaml = `
service: pay
upstream: { url: "${upstream.url}" }
store: { url: "${store.url}", grace: ${grace}, timeout: 400ms }
routes: [${routes.join(', ')}]
`
  await using a = await proxyInProcess(yaml)
  await using b = await proxyInProcess(yaml)
  const proxies = [a, b] as const
  const load = { isOver: false, isBroken: false }
  let keys = 0
  const pay = async (): Promise<void> => {
    const key = newKey()
    const path = `/${PROFILES[keys++ % 2]}`
    let until = Infinity
    /** Asks until there is an answer, as a client does whose connection broke off. */
    const ask = async (): Promise<void> => {
      while (performance.now() < until && !load.isBroken) {
        figures.requests++
        const reply = await send(proxies[randomInt(2)] as TestProxy, key, { path }).catch(() => null)
        if (reply?.status === 201) {
          until = Math.min(until, performance.now() + ASKED_FOR)
          return
        }
        if (reply?.status !== 409) count(figures.errors, reply?.code ?? 'no answer')
        else if (reply.code !== 'idempotency_key_in_progress') {
          figures.unknown++
          return
        }
        await wait(20 + randomInt(60))
      }
      figures.late++
    }
    // Twice at once, and once more afterwards: the outcome may be lost, too.
    await Promise.all([ask(), ask()])
    await ask()
  }
  const clients = Array.from({ length: CLIENTS }, async () => {
    while (!load.isOver) await pay()
  })
  try {
    while (!isOver()) {
      const { failovers } = figures
      const [[name, lose]] = Object.entries(store.losses).toSorted(
        ([one], [other]) => (failovers[one] ?? 0) - (failovers[other] ?? 0),
      ) as [[string, () => Promise<void>]]
      count(failovers, name)
      await wait(randomInt(300))
      done.push(`${now()} ${name} begins`)
      await lose()
      done.push(`${now()} ${name} is healed`)
      // Then the grace is over, and there is something to lose again.
      await Promise.all(PROFILES.map(pay))
    }
  } catch (error) {
    load.isBroken = true
    throw error
  } finally {
    load.isOver = true
    await Promise.all(clients)
  }
  for (const proxy of proxies)
    for (const name of PROFILES) {
      const split = () => proxy.metric(`idempotency_split_total{route="${name}"}`)
      // The connection of the last look, long ago, may just be closing.
      figures.splits += await split().catch(split)
    }
}

/** Fails over that many stores at once until there are enough failovers. */
export async function failovers(
  start: () => Promise<Losing>,
  stores: number,
  grace: string,
  isOver: (figures: Figures) => boolean,
): Promise<Figures> {
  const figures: Figures = {
    failovers: {},
    requests: 0,
    errors: {},
    keys: 0,
    twice: [],
    unknown: 0,
    late: 0,
    splits: 0,
    stalled: 0,
  }
  const delays = monitorEventLoopDelay()
  delays.enable()
  let isBroken = false
  await Promise.all(
    Array.from({ length: stores }, () =>
      atOneStore(start, grace, figures, () => isBroken || isOver(figures)).catch((error) => {
        // Ends the others, too: the test fails now, not at its time limit.
        isBroken = true
        throw error
      }),
    ),
  )
  figures.stalled = Math.round(delays.max / 1e6)
  return figures
}
