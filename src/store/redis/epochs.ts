import { type Admitted, CHECKS, Epochs } from '../epochs.ts'
import type { Safety } from '../safety.ts'
import type { RedisKeys, RedisOptions } from './keys.ts'
import { script, source } from './resp.ts'
import type { Servers } from './servers.ts'

export const ADMIT = script(source('epoch') + source('admit'))
/** Number of checks that a server may leave unanswered. */
const SILENT = 2

/** The epochs of the connected servers; in a cluster a query per shard. */
export function redisEpochs(
  { grace = 0, skew, onNewEpoch, onHeld }: Pick<RedisOptions, 'grace' | 'skew' | 'onNewEpoch' | 'onHeld'>,
  { epochs, shardOf }: Pick<RedisKeys, 'epochs' | 'shardOf'>,
  servers: Pick<Servers, 'run' | 'isCluster' | 'known'>,
  safety: Safety,
): Epochs {
  const ask = (shards: readonly number[], seen: readonly number[]): Promise<Admitted[]> => {
    const keys = shards.map((shard) => epochs[shard] as string)
    const args = [shards.length, ...keys, grace, skew?.() ?? 0, ...shards.map((shard) => seen[shard] ?? 0)]
    const read = (pairs: number[]) =>
      shards.map((shard, n) => ({ shard, left: pairs[2 * n] as number, since: pairs[2 * n + 1] as number }))
    return servers.run(ADMIT, args, read, performance.now() + (SILENT * grace) / CHECKS)
  }
  const look = async (shards: readonly number[], seen: readonly number[]): Promise<Admitted[]> =>
    servers.isCluster
      ? (await Promise.all(shards.map((shard) => ask([shard], seen)))).flat()
      : ask(shards, seen)
  const watched = () =>
    servers.known().flatMap(({ server, shards }) => {
      const onSilence = () => server.isReady && server.reconnect()
      return server.isReady && shards.length > 0 ? [{ of: server, shards, look, onSilence }] : []
    })
  return new Epochs({ grace, servers: watched, shardOf, safety, onNewEpoch, onHeld })
}
