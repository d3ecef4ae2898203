import type { Millis } from '../../core/record.ts'
import { type Admitted, Epochs, type EpochsOptions } from '../epochs.ts'
import { type SqlRow, sqlNumber } from './link.ts'

interface PostgresEpochsOptions extends Omit<EpochsOptions, 'servers' | 'shardOf'> {
  /** Asks the server how long new claims are still held back, and since when it has its present identity. */
  readonly look: (seen: Millis) => Promise<SqlRow>
  readonly onSilence: () => void
}

/** One server has all records: its only shard is 0. Checks run one at a time, since one may still be asking the previous server. */
export function postgresEpochs({ look, onSilence, ...options }: PostgresEpochsOptions): Epochs {
  let last: Promise<unknown> = Promise.resolve()
  let looks = 0
  const ask = async ([seen = 0]: readonly Millis[]): Promise<Admitted[]> => {
    const [left, since] = await look(seen)
    return [{ shard: 0, since: sqlNumber(since), left: sqlNumber(left) }]
  }
  const server = {
    of: options,
    shards: [0],
    look: (_: unknown, seen: readonly Millis[]) => {
      looks++
      const turn = last.then(() => ask(seen)).finally(() => looks--)
      last = turn.catch(() => {})
      return turn
    },
    onSilence,
  }
  return new Epochs({ ...options, servers: () => [server], shardOf: () => 0, isBusy: () => looks > 0 })
}
