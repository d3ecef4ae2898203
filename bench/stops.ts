import { freePort } from '../test/support/redis.ts'
import { MIB_REQUESTS } from './bodies.ts'
import { startProxy, type World } from './candidates.ts'
import { Client } from './load.ts'
import { median } from './machine.ts'
import { postOf } from './scenarios.ts'

export interface Stop {
  /** The kind of request. */
  readonly shape: string
  /** The longest stop of the event loop for one request, in milliseconds. */
  readonly milliseconds: number
}

/** One request of 1 MiB at a time (the default of `limits.request`). */
export async function longestStops(world: World, quick: boolean): Promise<Stop[]> {
  const port = await freePort()
  const url = new URL(`servers/stops.ts?${port}`, import.meta.url)
  await using child = await startProxy(world, `redis://127.0.0.1:${world.redisPort}`, ['--import', url.href])
  const client = await Client.open(child.port)
  const found: Stop[] = []
  for (const [shape, { path, type, keyed, body }] of Object.entries(MIB_REQUESTS)) {
    const stops: number[] = []
    for (let n = 0; n < (quick ? 2 : 15); n++) {
      await stopped(port)
      const key = `stop-${found.length}-${n}`
      const status = await client.exchange(postOf(path, Buffer.from(body(key)), keyed ? null : key, type))
      if (status !== 201) throw new Error(`${shape}: answered ${status}: ${client.last}`)
      stops.push(await stopped(port))
    }
    // The first ones are slower: V8 has not compiled the code yet.
    found.push({ shape, milliseconds: median(stops.slice(quick ? 1 : 5)) })
  }
  client.close()
  return found
}

async function stopped(port: number): Promise<number> {
  return Number(await (await fetch(`http://127.0.0.1:${port}`)).text())
}
