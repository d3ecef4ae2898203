import type { Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { Cluster } from '../../src/store/redis-cluster.ts'
import type { RedisAddress } from '../../src/store/redis-link.ts'
import type { RespReply } from '../../src/store/resp.ts'
import { fake } from './fake-redis.ts'

/* The nodes of a cluster, which answer what the test says. */

const PATIENT: Millis = 10_000
const SERVER = { username: '', password: '', db: 0 }
/** The last slot. */
export const LAST = 16_383
export const same = (reply: RespReply): RespReply => reply

export const bulk = (text: string): string => `$${text.length}\r\n${text}\r\n`
type Shape = readonly [first: number, last: number, ...ports: number[]]
/** What `CLUSTER SLOTS` answers. */
export const slots = (...ranges: Shape[]): string =>
  `*${ranges.length}\r\n${ranges
    .map(
      ([first, last, ...ports]) =>
        `*${2 + ports.length}\r\n:${first}\r\n:${last}\r\n${ports.map((port) => `*2\r\n${bulk('127.0.0.1')}:${port}\r\n`).join('')}`,
    )
    .join('')}`
/** A key of this shard. The slots of the first four: 13254, 9191, 4996 and 933. */
export const key = (shard: number): string => `own:{${shard.toString(16).padStart(2, '0')}}:x`

export type Answer = (command: string[]) => string | null

export async function nodeOf(t: Test, answer: Answer = () => '+OK\r\n') {
  const node = {
    /** Null: it answers no greeting. */
    ping: '+PONG\r\n' as string | null,
    map: '' as string | null,
    answer,
    /** Commands, without those of a greeting. */
    asked: [] as string[],
    /** How often it was asked for the map. */
    maps: 0,
  }
  const server = await fake(t, (command) => {
    const [name, ...args] = command
    if (name === 'ping') return node.ping
    if (name === 'client') return node.ping === null ? null : '+OK\r\n'
    if (name === 'cluster' && args.join(' ') === 'slots') {
      node.maps++
      return node.map
    }
    node.asked.push(command.join(' '))
    return node.answer(command)
  })
  const { port, sockets } = server
  return Object.assign(node, { port, sockets, name: `127.0.0.1:${port}` })
}

export type Node = Awaited<ReturnType<typeof nodeOf>>

/** Two masters, the first of which has the lower half of the slots: the shards 2 and 3. */
export async function halves(t: Test): Promise<[Node, Node]> {
  const [a, b] = [await nodeOf(t), await nodeOf(t)]
  a.map = slots([0, 8191, a.port], [8192, LAST, b.port])
  b.map = a.map
  return [a, b]
}

interface Options {
  readonly timeoutMs?: Millis
  readonly server?: Partial<Pick<RedisAddress, 'username' | 'password'>>
  readonly grace?: Millis
}

/** A cluster that was told of these nodes, and is not yet opened. */
export function clusterOf(
  t: Test,
  nodes: readonly { readonly port: number }[],
  { timeoutMs = PATIENT, server = {}, grace = 0 }: Options = {},
) {
  const events: string[] = []
  const counts = { ready: 0, maps: 0 }
  const hosts = nodes.map(({ port }) => ({ host: '127.0.0.1', port }))
  const cluster = new Cluster({ kind: 'cluster', hosts, server: { ...SERVER, ...server } }, timeoutMs, {
    onEvent: (kind, detail) => void events.push(`${kind}: ${detail}`),
    onReady: () => void counts.ready++,
    grace,
    onMap: () => void counts.maps++,
  })
  t.teardown(() => cluster.close())
  return { cluster, events, counts }
}

export async function openCluster(
  t: Test,
  nodes: readonly { readonly port: number }[],
  options: Options = {},
) {
  const opened = clusterOf(t, nodes, options)
  await opened.cluster.open()
  return opened
}

export const ask = (cluster: Cluster, shard: number): Promise<RespReply> =>
  cluster.ask<RespReply>('get', [key(shard)], same)
