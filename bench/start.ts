import { setTimeout as wait } from 'node:timers/promises'
import { startCandidate, type World } from './candidates.ts'
import type { Child } from './child.ts'
import { Client, load } from './load.ts'
import { median } from './machine.ts'
import { type Round, SCENARIOS } from './scenarios.ts'

const STORES = ['proxy-sqlite', 'proxy-redis'] as const
export type StartCandidate = (typeof STORES)[number]

export interface StartUp {
  readonly candidate: StartCandidate
  /** Milliseconds from the start of the process to the end of the first answer, which came from the upstream. */
  readonly firstAnswer: number
  /** Megabytes, two seconds after the first answer. */
  readonly atRest: number
  /** The most that was ever resident, after first executions of 300 bytes on 64 connections without a pause. */
  readonly saturated: number
  /** The same after 64 KiB both ways on 256 connections. */
  readonly saturatedLarge: number
}

/** Starts the proxy anew each time; then fills it up. */
export async function startUp(world: World, quick: boolean): Promise<StartUp[]> {
  const found: StartUp[] = []
  for (const candidate of STORES) {
    const times: number[] = []
    for (let n = 0; n < (quick ? 1 : 7); n++) {
      await using child = await start(world, candidate, times)
      void child
    }
    await using child = await start(world, candidate, times)
    await wait(quick ? 100 : 2000)
    const atRest = child.residentMb('VmRSS')
    await saturate(world, candidate, child, 'first', 64, quick)
    const saturated = child.residentMb('VmHWM')
    await saturate(world, candidate, child, 'first-large', 256, quick)
    const saturatedLarge = child.residentMb('VmHWM')
    found.push({ candidate, firstAnswer: median(times), atRest, saturated, saturatedLarge })
  }
  return found
}

async function start(world: World, candidate: StartCandidate, times: number[]): Promise<Child> {
  const startedAt = performance.now()
  const child = await startCandidate(world, candidate)
  if (typeof child === 'string') throw new Error(child)
  const client = await Client.open(child.port)
  const status = await client.exchange(Buffer.from('GET / HTTP/1.1\r\nHost: bench\r\n\r\n'))
  if (status !== 200) throw new Error(`the first answer has status ${status}`)
  times.push(performance.now() - startedAt)
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
