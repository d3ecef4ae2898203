import { setTimeout as wait } from 'node:timers/promises'
import { Redis } from 'ioredis'
import { shortId } from '../../src/core/identity.ts'
import type { RecordId } from '../../src/core/record.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import type { RedisServer } from '../../test/support/redis.ts'
import type { Sample } from './verdict.ts'

/** Redis's own figures; none of the records is touched. */
const COUNT = `
local entries, orphans = 0, 0
for n = 0, 255 do
  local shard = string.format('idempotency:soak:{%02x}:', n)
  local ids = redis.call('ZRANGE', shard .. 'u', 0, -1)
  entries = entries + #ids
  for _, id in ipairs(ids) do orphans = orphans + 1 - redis.call('EXISTS', shard .. 'r:' .. id) end
end
return {entries, orphans}`

/** The driver adds `expected`. */
export async function storeFigures(redis: RedisServer): Promise<Omit<Sample['store'], 'expected'>> {
  // Reading expired keys removes them; otherwise Redis leaves some for a while.
  const keys = await recordKeys(redis)
  const [indexed = 0, orphans = 0] = (await redis.command('EVAL', COUNT, 0)) as number[]
  const field = async (section: string, name: string): Promise<number> =>
    Number(new RegExp(`^${name}:(\\d+)`, 'm').exec(String(await redis.command('INFO', section)))?.[1])
  const channels = (await redis.command('PUBSUB', 'SHARDCHANNELS')) as unknown[]
  return {
    indexed,
    orphans,
    records: keys.size,
    memory: await field('memory', 'used_memory'),
    channels: channels.length,
    // Without this one.
    clients: (await field('clients', 'connected_clients')) - 1,
  }
}

export interface LeftOver {
  readonly id: RecordId
  readonly route: string
  readonly state: string
  readonly why: string | null
}

/** All existing records. */
export async function leftOvers(redis: RedisServer): Promise<LeftOver[]> {
  const keys = await recordKeys(redis)
  const client = new Redis(redis.port, '127.0.0.1')
  try {
    const found: LeftOver[] = []
    for (const key of keys) {
      const bytes = await client.getBuffer(key)
      if (bytes === null) continue
      const { state, route, method, lastError } = decodeRecord(bytes)
      // No record of a request.
      if (method === 'MARK') continue
      found.push({ id: key.slice(key.lastIndexOf(':') + 1) as RecordId, route, state, why: lastError })
    }
    return found
  } finally {
    client.disconnect()
  }
}

async function recordKeys(redis: RedisServer): Promise<Set<string>> {
  const found = new Set<string>()
  let cursor = '0'
  do {
    const [next, keys] = (await redis.command('SCAN', cursor, 'COUNT', 10_000)) as [string, string[]]
    cursor = next
    for (const key of keys) if (key.includes(':r:')) found.add(key)
  } while (cursor !== '0')
  return found
}

/** Explanations of remaining records: the driver's view of the upstream, and outcomes given up in the proxy's log. */
export interface Explanations {
  readonly unresolved: ReadonlySet<string>
  /** Beginnings of ids whose outcome the proxy reported as lost, since the store was away for longer than it is kept. */
  readonly lost: ReadonlySet<string>
  /** Requests in shadow mode whose client left before the answer. */
  readonly cutInShadow: number
}

/** Unexplained records, and missing unresolved ones. */
export function unexplained(
  left: readonly LeftOver[],
  { unresolved, lost, cutInShadow }: Explanations,
): string[] {
  const told = ({ id, route, state, why }: LeftOver): string => `${route} ${shortId(id)}: ${state} (${why})`
  const uncertain = ({ state }: LeftOver): boolean => state === 'unknown' || state === 'in_progress'
  const open = left.filter((one) => {
    if (uncertain(one) && lost.has(shortId(one.id))) return false
    return one.route === 'shadow' || one.state !== 'unknown' || !unresolved.has(one.id)
  })
  const watched = open.filter((one) => one.route === 'shadow' && one.state === 'unknown')
  const there = new Set<string>(left.map(({ id }) => id))
  return [
    ...open.filter((one) => !watched.includes(one)).map(told),
    ...(watched.length > cutInShadow ? [`shadow: ${watched.length} unknown, ${cutInShadow} cut`] : []),
    ...[...unresolved].filter((id) => !there.has(id)).map((id) => `${id.slice(0, 12)}: unresolved, and gone`),
  ]
}

/** Takes the store away, like a failure. */
export const DISTURBANCES: readonly ((redis: RedisServer) => Promise<void>)[] = [
  async (redis) => {
    await redis.kill()
    await wait(200)
    await redis.start()
  },
  async (redis) => {
    redis.pause()
    await wait(300)
    redis.resume()
  },
  (redis) => redis.restart(),
  async (redis) => {
    redis.pause()
    await wait(1500)
    redis.resume()
  },
  /** Longer than retention: outcomes are given up, and their records stay unresolved. */
  async (redis) => {
    await redis.kill()
    await wait(4000)
    await redis.start()
  },
]
