import { setTimeout as wait } from 'node:timers/promises'
import { freePort } from '../test/support/redis.ts'
import { startCandidate, type World } from './candidates.ts'
import { Child } from './child.ts'
import { Client, load } from './load.ts'
import { median } from './machine.ts'
import { type Round, SCENARIOS } from './scenarios.ts'

const STORES = ['proxy-sqlite', 'proxy-redis'] as const
export type StartCandidate = (typeof STORES)[number]

export interface StartUp {
  readonly candidate: StartCandidate
  /** Milliseconds from the start of the process to the end of the first answer from the upstream. */
  readonly firstAnswer: number
  /** The same ÷ that of `node` with a bare HTTP server. */
  readonly toBare: number
  /** Megabytes, two seconds after the first answer. */
  readonly atRest: number
  /** Peak resident memory, after first executions of 300 bytes on 64 connections without a pause. */
  readonly saturated: number
  /** The same after 64 KiB both ways on 256 connections. */
  readonly saturatedLarge: number
}

const STARTS = 11

/** Starts the proxy on each store, and `node` for comparison, in turns; then fills the proxies up. */
export async function startUp(world: World, quick: boolean): Promise<StartUp[]> {
  const starts = STORES.map((candidate) => ({
    candidate,
    times: [] as number[],
    spawn: () => startCandidate(world, candidate),
  }))
  const bare: Starts = { times: [], spawn: () => startBare(world) }
  // The first of each is left out: it fills the caches.
  for (let n = 0; n < (quick ? 1 : STARTS); n++)
    for (const one of [bare, ...starts]) {
      await using child = await start(one, n > 0 || quick)
      void child
    }
  const found: StartUp[] = []
  for (const one of starts) {
    const { candidate, times } = one
    await using child = await start(one, false)
    await wait(quick ? 100 : 2000)
    const atRest = child.residentMb('VmRSS')
    await saturate(world, candidate, child, 'first', 64, quick)
    const saturated = child.residentMb('VmHWM')
    await saturate(world, candidate, child, 'first-large', 256, quick)
    const saturatedLarge = child.residentMb('VmHWM')
    const firstAnswer = median(times)
    const toBare = firstAnswer / median(bare.times)
    found.push({ candidate, firstAnswer, toBare, atRest, saturated, saturatedLarge })
  }
  return found
}

interface Starts {
  readonly times: number[]
  readonly spawn: () => Promise<Child | string>
}

const BARE =
  "require('node:http').createServer((request, response) => response.end()).listen(process.argv[1])"

async function startBare({ cores, folder }: World): Promise<Child> {
  const port = await freePort()
  return await Child.spawn(port, [...cores.candidate, process.execPath, '-e', BARE, String(port)], folder)
}

async function start({ times, spawn }: Starts, counts: boolean): Promise<Child> {
  const startedAt = performance.now()
  const child = await spawn()
  if (typeof child === 'string') throw new Error(child)
  const client = await Client.open(child.port)
  const status = await client.exchange(Buffer.from('GET / HTTP/1.1\r\nHost: bench\r\n\r\n'))
  if (status !== 200) throw new Error(`the first answer has status ${status}`)
  if (counts) times.push(performance.now() - startedAt)
  client.close()
  return child
}

async function saturate(
  world: World,
  candidate: StartCandidate,
  child: Child,
  id: 'first' | 'first-large',
  connections: number,
  quick: boolean,
): Promise<void> {
  const scenario = SCENARIOS.find((one) => one.id === id)
  if (scenario === undefined) throw new Error(`no scenario ${id}`)
  const name = `saturate-${id}-${candidate}`
  const round: Round = { candidate, port: child.port, upstreamPort: world.upstreamPort, name }
  await load({
    port: child.port,
    connections: quick ? 8 : connections,
    milliseconds: quick ? 100 : 5000,
    request: (n) => scenario.request(round, n),
    status: scenario.status,
    cpu: child.cpu,
  })
}
