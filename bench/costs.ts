import { type ChildProcess, spawn } from 'node:child_process'
import { once as emitted } from 'node:events'
import { createInterface } from 'node:readline'
import type { Readable, Writable } from 'node:stream'
import { text } from 'node:stream/consumers'
import { Redis } from 'ioredis'
import { freePort } from '../test/support/redis.ts'
import { type CandidateName, startCandidate, type World } from './candidates.ts'
import { once, type Plan, warmUpOf } from './measure.ts'
import { type Scenario, scenarioOf } from './scenarios.ts'

const COSTED = ['proxy-redis', 'proxy-sqlite', 'unprotected', 'nginx-lua', 'node-idempotency'] as const
const PERF = process.env['PERF'] ?? 'perf'
const ALL = 'raw_syscalls:sys_enter'
/** Also counted separately; every architecture has them. */
const BY_NAME = ['read', 'recvfrom', 'write', 'writev', 'sendto', 'epoll_pwait', 'futex', 'pwrite64', 'fsync']

/** Calls per request, by name. */
type Calls = ReadonlyMap<string, number>

/** Costs of one request other than time. */
export interface Cost {
  readonly scenario: Scenario
  readonly candidate: CandidateName
  /** Allocated on V8's heap by the main thread; null: no V8. */
  readonly bytes: number | null
  /** Of all threads and processes; a string says why they are unknown. */
  readonly systemCalls: Calls | string
  /** By Redis's count: a script is one, and so is each command inside it. */
  readonly redisCommands: Calls
}

/** One candidate after the other, each in its own warm process. */
export async function costs(world: World, wanted: readonly CandidateName[], plan: Plan): Promise<Cost[]> {
  const found: Cost[] = []
  const redis = new Redis(world.redisPort)
  for (const candidate of COSTED.filter((name) => wanted.includes(name))) {
    const port = await freePort()
    const preload = new URL(`servers/allocation.ts?${port}`, import.meta.url)
    const child = await startCandidate(world, candidate, ['--import', preload.href])
    if (typeof child === 'string') continue
    await using _ = child
    for (const scenario of [scenarioOf('first'), scenarioOf('replay')]) {
      if (!scenario.candidates.includes(candidate)) continue
      await once(scenario, candidate, child, world.upstreamPort, warmUpOf(plan, scenario))
      let bytes: number | null = null
      let systemCalls: Calls | string = ''
      let redisCommands: Calls = new Map()
      const own = { ...plan, milliseconds: 3 * plan.milliseconds }
      await once(scenario, candidate, child, world.upstreamPort, own, async (run) => {
        const counter = await SystemCalls.of(child.pids)
        await redis.config('RESETSTAT')
        if (candidate !== 'nginx-lua') await allocated(port)
        const result = await run()
        const { requests } = result
        systemCalls = typeof counter === 'string' ? counter : perRequest(await counter.end(), requests)
        if (candidate !== 'nginx-lua') bytes = (await allocated(port)) / requests
        redisCommands = perRequest(commandStats(await redis.info('commandstats')), requests)
        return result
      })
      found.push({ scenario, candidate, bytes, systemCalls, redisCommands })
    }
  }
  redis.disconnect()
  return found
}

async function allocated(port: number): Promise<number> {
  return Number(await (await fetch(`http://127.0.0.1:${port}`)).text())
}

function commandStats(info: string): [string, number][] {
  const rows = [...info.matchAll(/^cmdstat_([^:]+):calls=(\d+)/gm)]
  return rows
    .map(([, name = '', calls]): [string, number] => [name, Number(calls)])
    .filter(([name]) => name !== 'config|resetstat')
}

function perRequest(calls: readonly [string, number][], requests: number): Calls {
  return new Map(calls.map(([name, count]) => [name, count / requests]))
}

/** perf counts in the kernel. strace would slow down every call, and a slow process does more per turn of its event loop. */
class SystemCalls {
  readonly #perf: ChildProcess
  readonly #acknowledged: AsyncIterator<string>

  private constructor(perf: ChildProcess) {
    this.#perf = perf
    perf.stdio[3]?.on('error', () => {})
    this.#acknowledged = createInterface({ input: perf.stdio[4] as Readable })[Symbol.asyncIterator]()
  }

  static async of(pids: readonly number[]): Promise<SystemCalls | string> {
    const events = [ALL, ...BY_NAME.map((name) => `syscalls:sys_enter_${name}`)]
    const how = ['-p', pids.join(','), '-e', events.join(','), '-D', '-1', '--control', 'fd:3,4', '-x', ',']
    const perf = spawn(PERF, ['stat', ...how], { stdio: ['ignore', 'ignore', 'pipe', 'pipe', 'pipe'] })
    const counter = new SystemCalls(perf)
    const failed = new Promise<string>((resolve) => {
      perf.once('error', () => resolve('perf (Debian: linux-perf) is missing'))
      perf.once('exit', () => resolve('perf may not count here'))
    })
    return await Promise.race([failed, counter.#tell('enable').then(() => counter)])
  }

  async end(): Promise<[string, number][]> {
    await this.#tell('disable')
    const output = text(this.#perf.stderr as Readable)
    this.#perf.kill('SIGINT')
    await emitted(this.#perf, 'exit')
    const rows = (await output).matchAll(/^(\d+),,(?:raw_)?syscalls:sys_enter(?:_(\w+))?,/gm)
    const counts = [...rows].map(([, count, name]): [string, number] => [name ?? '', Number(count)])
    const named = counts.filter(([name]) => name !== '')
    const all = counts.find(([name]) => name === '')?.[1] ?? 0
    return [...named, ['others', named.reduce((left, [, count]) => left - count, all)]]
  }

  async #tell(command: 'enable' | 'disable'): Promise<void> {
    const control = this.#perf.stdio[3] as Writable
    control.write(`${command}\n`)
    await this.#acknowledged.next()
  }
}
