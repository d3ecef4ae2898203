import type { Millis } from '../../core/record.ts'
import { Epochs, type EpochsOptions } from '../epochs.ts'
import { type SqlRow, sqlNumber } from './link.ts'

interface PostgresEpochsOptions extends Omit<EpochsOptions, 'servers' | 'shardOf'> {
  /** Asks the server how long new claims are still held back, and since when it has its present identity. */
  readonly look: (seen: Millis) => Promise<SqlRow>
  readonly onSilence: () => void
}

/** One server has all records: its only shard is 0. */
export function postgresEpochs({ look, onSilence, ...options }: PostgresEpochsOptions): Epochs {
  const server = {
    of: options,
    shards: [0],
    look: async (_: unknown, [seen = 0]: readonly Millis[]) => {
      const [left, since] = await look(seen)
      return [{ shard: 0, since: sqlNumber(since), left: sqlNumber(left) }]
    },
    onSilence,
  }
  return new Epochs({ ...options, servers: () => [server], shardOf: () => 0 })
}
