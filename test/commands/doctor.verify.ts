import t from 'tap'
import type { CheckResult } from '../../src/commands/upstream-checks.ts'
import { command } from '../support/commands.ts'
import { RedisCluster } from '../support/redis-cluster.ts'
import { SERVICE } from '../support/service.ts'

void t.test('doctor shows how many shards each master of a cluster has', async (t) => {
  await using cluster = await RedisCluster.start()
  const { out } = await command(['doctor', '--json', '--store', cluster.url, '--service', SERVICE])
  const checked = JSON.parse(out) as CheckResult[]
  // A slow round trip only shows how busy the test machine is.
  t.strictSame(
    checked.filter(({ check, found }) => found === 'finding' && check !== 'round trip'),
    [],
  )
  t.match(
    checked.find(({ check }) => check === 'topology')?.detail,
    /^3 masters share 256 shards of records: (127\.0\.0\.1:\d+ has \d+,? ?){3}; the largest share is 1\./,
  )
})
