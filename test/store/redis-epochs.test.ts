import t, { type Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import type { RedisConnection } from '../../src/store/redis/connection.ts'
import { Refused } from '../../src/store/redis/connection.ts'
import { redisEpochs } from '../../src/store/redis/epochs.ts'
import type { MasterShards, Servers } from '../../src/store/redis/servers.ts'
import { StoreUnavailable } from '../../src/store/register.ts'
import type { Safety } from '../../src/store/safety.ts'
import { frozenClock } from '../support/frozen-clock.ts'

/** Longer than any test. */
const LONG: Millis = 1_000_000
const SKEW = 7

interface Server {
  since: number
  left: Millis
  isReady: boolean
  reconnects: number
  /** Another answer than its own; null: none. */
  answer: (() => Promise<never>) | null
  reconnect(): void
}

function newServer(since: number, left = 0): Server {
  return { since, left, isReady: true, reconnects: 0, answer: null, reconnect: () => undefined }
}

/** Epochs of four shards; servers by shard, `asked`: the shards of each command. */
function epochsOf(
  t: Test,
  byShard: Server[],
  { isCluster = false, grace = LONG, spare }: { isCluster?: boolean; grace?: Millis; spare?: Server } = {},
) {
  const asked: number[][] = []
  const seen: number[][] = []
  const told: { left: Millis; shards: number[] }[] = []
  const held: Millis[] = []
  const checks: { shards: readonly number[]; asked: Millis; same: number[] }[] = []
  const checked: Safety['checked'] = (shards, asked, isSame) =>
    void checks.push({ shards, asked, same: shards.filter(isSame) })
  const run = async (
    _: unknown,
    args: (string | number)[],
    read: (pairs: number[]) => unknown,
    until: Millis,
  ) => {
    t.ok(until - performance.now() <= grace / 2, 'as long as a silent server is waited for')
    const count = Number(args[0])
    const shards = args.slice(1, count + 1).map((key) => Number(String(key).slice(1)))
    t.strictSame(args.slice(count + 1, count + 3), [grace, SKEW])
    asked.push(shards)
    seen.push(args.slice(count + 3).map(Number))
    const server = byShard[shards[0] as number] as Server
    if (server.answer !== null) return server.answer()
    return read(
      shards.flatMap((shard) => [(byShard[shard] as Server).left, (byShard[shard] as Server).since]),
    )
  }
  const known = (): MasterShards[] =>
    [...new Set(spare === undefined ? byShard : [...byShard, spare])].map((server) => ({
      server: server as unknown as RedisConnection,
      shards: [0, 1, 2, 3].filter((shard) => byShard[shard] === server),
    }))
  const epochs = redisEpochs(
    {
      grace,
      skew: () => SKEW,
      onNewEpoch: ({ left, concerns }) =>
        told.push({ left, shards: [0, 1, 2, 3].filter((n) => concerns(String(n) as RecordId)) }),
      onHeld: (left) => void held.push(left),
    },
    { epochs: ['k0', 'k1', 'k2', 'k3'], shardOf: (id) => Number(id) },
    { run: run as Servers['run'], isCluster, known },
    { checked } as Safety,
  )
  t.teardown(() => epochs.close())
  return { epochs, asked, seen, told, held, checks }
}

const refusing = (reply: string) => () => Promise.reject(new Refused(reply))

void t.test('the first look asks for every shard, and the next ones for one', async (t) => {
  const clock = frozenClock(t)
  const server = newServer(50, 30)
  const { epochs, asked, seen, told, held } = epochsOf(t, [server, server, server, server])
  t.equal(epochs.seen[0], undefined)
  t.equal(epochs.isInGrace, false)
  await epochs.look()
  t.strictSame(asked, [[0, 1, 2, 3]])
  t.strictSame(seen, [[0, 0, 0, 0]])
  t.strictSame(told, [{ left: 30, shards: [0, 1, 2, 3] }])
  t.strictSame(held, [30])
  t.strictSame(
    [0, 1, 2, 3].map((n) => epochs.seen[n]),
    [50, 50, 50, 50],
  )
  await clock.pass(29)
  t.equal(epochs.isInGrace, true)
  await clock.pass(1)
  t.equal(epochs.isInGrace, false)
  server.left = 0
  await epochs.look()
  t.strictSame(asked.slice(1), [[0]])
  t.strictSame(seen.slice(1), [[50]])
  t.equal(told.length, 1)
  t.strictSame(held, [30, 0])
  t.equal(epochs.isInGrace, false)
})

void t.test('another process is asked for every shard at once, and told of', async (t) => {
  const server = newServer(50)
  const { epochs, asked, seen, told } = epochsOf(t, [server, server, server, server])
  await epochs.look()
  Object.assign(server, { since: 60, left: 40 })
  await epochs.look()
  t.strictSame(asked.slice(1), [[0], [0, 1, 2, 3]])
  t.strictSame(seen.slice(1), [[50], [50, 50, 50, 50]])
  t.strictSame(told.slice(1), [{ left: 40, shards: [0, 1, 2, 3] }])
  t.equal(epochs.seen[3], 60)
})

void t.test('in a cluster each shard is asked by itself, and the longest grace counts', async (t) => {
  const [a, b] = [newServer(50, 10), newServer(60, 20)]
  const { epochs, asked, told, held } = epochsOf(t, [a, a, b, b], { isCluster: true })
  await epochs.look()
  t.strictSame(asked, [[0], [1], [2], [3]])
  t.strictSame(told, [
    { left: 10, shards: [0, 1] },
    { left: 20, shards: [2, 3] },
  ])
  t.strictSame(held, [20])
  b.since = 70
  await epochs.look()
  t.strictSame(asked.slice(4), [[0], [2], [2], [3]])
  t.strictSame(told.slice(2), [{ left: 20, shards: [2, 3] }])
})

void t.test('shards that have moved to another server are asked for there', async (t) => {
  const [a, b] = [newServer(50), newServer(60)]
  const byShard = [a, a, b, b]
  const { epochs, asked, told } = epochsOf(t, byShard, { isCluster: true })
  await epochs.look()
  byShard[1] = b
  await epochs.look()
  t.strictSame(asked.slice(4), [[0], [1], [1], [2], [3]])
  t.strictSame(told.slice(2), [{ left: 0, shards: [1] }], 'the others are where they were')
  await epochs.look()
  t.strictSame(asked.slice(9), [[0], [1]])
})

void t.test(
  'if one of several shards that have moved is not as it was, all of the server are asked for',
  async (t) => {
    const [a, b, c] = [newServer(50), newServer(60), newServer(60)]
    const byShard = [a, b, c, c]
    const { epochs, asked, told } = epochsOf(t, byShard)
    await epochs.look()
    byShard[0] = c
    byShard[1] = c
    await epochs.look()
    t.strictSame(asked.slice(3), [
      [0, 1],
      [0, 1, 2, 3],
    ])
    t.strictSame(told.slice(3), [{ left: 0, shards: [0] }])
  },
)

void t.test('a master without shards is asked nothing', async (t) => {
  const server = newServer(50)
  const { epochs, asked, held } = epochsOf(t, [server, server, server, server], {
    isCluster: true,
    spare: newServer(9, 9),
  })
  await epochs.look()
  await epochs.look()
  t.strictSame(asked, [[0], [1], [2], [3], [0]])
  t.strictSame(held, [0, 0])
})

void t.test('a server that is not ready is not asked', async (t) => {
  const [a, b] = [newServer(50), newServer(60, 5)]
  a.isReady = false
  const { epochs, asked, held } = epochsOf(t, [a, a, b, b])
  await epochs.look()
  t.strictSame(asked, [[2, 3]])
  t.strictSame(held, [5])
})

void t.test(
  'a look that hangs delays no other: shards that come meanwhile are asked for at once',
  async (t) => {
    const [a, b] = [newServer(50), newServer(60)]
    const byShard = [a, b, b, b]
    const { epochs, asked } = epochsOf(t, byShard, { isCluster: true })
    const hanging = Promise.withResolvers<never>()
    a.answer = () => hanging.promise
    const first = epochs.look()
    a.answer = null
    byShard.fill(a)
    await epochs.look()
    t.strictSame(asked.slice(4), [[0], [1], [2], [3]])
    t.equal(epochs.seen[3], 50)
    hanging.reject(new StoreUnavailable('silent', true))
    await first
  },
)

void t.test('a refusal and silence begin no epoch', async (t) => {
  const server = newServer(50, 30)
  const { epochs, asked, told, held } = epochsOf(t, [server, server, server, server])
  for (const answer of [refusing('NOPERM'), () => Promise.reject(new StoreUnavailable('silent', true))]) {
    server.answer = answer
    await epochs.look()
  }
  t.equal(asked.length, 2)
  t.strictSame(told, [])
  t.strictSame(held, [0, 0])
  t.equal(epochs.seen[0], undefined)
  t.equal(epochs.isInGrace, false)
})

void t.test('it looks four times per grace, until it is closed', async (t) => {
  const clock = frozenClock(t)
  const server = newServer(50)
  const { epochs, held } = epochsOf(t, [server, server, server, server], { grace: 200 })
  await clock.pass(199)
  t.equal(held.length, 3)
  await clock.pass(1)
  t.equal(held.length, 4)
  epochs.close()
  await clock.pass(1000)
  t.equal(held.length, 4)
})

for (const isCluster of [false, true])
  void t.test(
    `a server${isCluster ? ' of a cluster' : ''} that is silent for half a grace is connected to again`,
    async (t) => {
      const server = newServer(50)
      server.reconnect = () => {
        server.reconnects++
        server.isReady = false
      }
      const { epochs } = epochsOf(t, [server, server, server, server], { isCluster })
      const silence = () => Promise.reject(new StoreUnavailable('silent', true))
      const lookAgain = async (answer: Server['answer']) => {
        server.isReady = true
        server.answer = answer
        await epochs.look()
        return server.reconnects
      }
      t.equal(await lookAgain(silence), 1, 'once, however many shards were asked for')
      t.equal(await lookAgain(silence), 2)
      // A refusal is an answer, as is the end of a connection.
      const ended = () => {
        server.isReady = false
        return silence()
      }
      for (const answer of [refusing('NOPERM'), null, ended]) t.equal(await lookAgain(answer), 2)
    },
  )

void t.test('each look says which shards are as they were when it was sent', async (t) => {
  const [a, b] = [newServer(50), newServer(60)]
  const { epochs, checks } = epochsOf(t, [a, a, b, b])
  const began = performance.now()
  await epochs.look()
  await epochs.look()
  b.since = 70
  await epochs.look()
  t.strictSame(
    checks.map(({ shards, same }) => [shards, same]),
    [
      [[0, 1], []],
      [[2, 3], []],
      [
        [0, 1],
        [0, 1],
      ],
      [
        [2, 3],
        [2, 3],
      ],
      [
        [0, 1],
        [0, 1],
      ],
      [[2, 3], []],
    ],
  )
  const times = checks.map(({ asked }) => asked)
  t.ok(times.every((asked) => asked >= began && asked <= performance.now()))
})
