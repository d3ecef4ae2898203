import type { RecordId } from '../core/record.ts'
import type { Soon } from '../runtime/scheduling.ts'
import { Channels } from './redis-channels.ts'
import { Cluster, type MasterShards, replicasIn, type View } from './redis-cluster.ts'
import {
  type ConnectionSettings,
  type OnEvent,
  RedisConnection,
  type RedisTarget,
} from './redis-connection.ts'
import { Sentinels } from './redis-sentinel.ts'
import { redisUrl } from './redis-url.ts'

export interface ServersOptions extends ConnectionSettings {
  /** Validated by `config/urls.ts`. */
  readonly url: string
  readonly onEvent: OnEvent
}

interface Layout {
  /** A server is ready, or shards may have moved. */
  readonly onServers: () => void
  readonly shards: readonly number[]
  readonly shardOf: (id: RecordId) => number
  readonly channelOf: (id: RecordId) => string
}

/** The servers that `store.url` leads to. */
export interface Servers {
  /** The first key of a script, or first argument of a plain command, selects the server. */
  readonly commands: Pick<RedisConnection, 'run' | 'ask'>
  /** All keys of a command must be in one shard. */
  readonly isCluster: boolean
  /** Each with its shards. */
  parts(): Soon<readonly MasterShards[]>
  /** The same as last read. */
  known(): readonly MasterShards[]
  /** The servers that have the shard, or all (null). */
  view(shard: number | null): Soon<View>
  askAnyone<T>(name: string, read: (reply: never) => T): Promise<T>
  /** Number of a master's replicas that may be promoted, including those that are down; 0 if nothing promotes them. */
  replicasOf(master: RedisConnection): Promise<number>
  watch(id: RecordId, changed: () => void): Promise<() => void>
  /** For people; null: a single server. */
  topology(): string | null
  /**
   * Resolves after the first attempt to connect, whatever its outcome.
   * @throws {StoreUnavailable} if only a person can help.
   */
  open(): Promise<void>
  close(): Promise<void>
}

export function serversOf(options: ServersOptions, layout: Layout): Servers {
  const { timeoutMs, grace = 0, client = {}, onEvent } = options
  const settings: ConnectionSettings = { timeoutMs, grace, client }
  const url = redisUrl(options.url, onEvent)
  if (url.kind === 'cluster') {
    const cluster = new Cluster(url, settings, {
      onEvent,
      onReady: layout.onServers,
      onMap: () => {
        channels.moved()
        layout.onServers()
      },
    })
    const channels = new Channels({
      settings,
      onEvent,
      channelOf: layout.channelOf,
      targetOf: (id) => cluster.targetOf(layout.shardOf(id)),
      isMoved: (error, id) => cluster.isMoved(error, layout.shardOf(id)),
    })
    return {
      commands: cluster,
      isCluster: true,
      parts: () => cluster.parts(),
      known: () => cluster.known(),
      view: (shard) => cluster.view(shard),
      askAnyone: (name, read) => cluster.askAnyone(name, [], read),
      replicasOf: (master) => master.ask('cluster', ['nodes'], replicasIn),
      watch: (id, changed) => channels.watch(id, changed),
      topology: () => cluster.topology(),
      open: () => cluster.open(),
      close: async () => void (await Promise.all([cluster.close(), channels.close()])),
    }
  }
  const sentinels = url.kind === 'sentinel' ? new Sentinels(url, settings) : null
  const target: RedisTarget =
    url.kind === 'server' ? { place: url.server, login: url.server } : (sentinels as Sentinels)
  const channels = new Channels({
    settings,
    onEvent,
    channelOf: layout.channelOf,
    targetOf: () => target,
    isMoved: () => false,
  })
  const server = new RedisConnection(target, settings, {
    onEvent,
    onLost: () => channels.suspect(),
    onReady: () => {
      channels.resubscribe()
      layout.onServers()
    },
  })
  const all: readonly MasterShards[] = [{ name: '', server, shards: layout.shards }]
  return {
    commands: server,
    isCluster: false,
    parts: () => all,
    known: () => all,
    view: () => ({ id: '', servers: [server] }),
    askAnyone: (name, read) => server.ask(name, [], read),
    replicasOf: async () => sentinels?.replicas() ?? 0,
    watch: (id, changed) => channels.watch(id, changed),
    topology: () => sentinels?.topology() ?? null,
    async open() {
      await server.open()
      if (sentinels?.misconfigured) {
        await Promise.all([server.close(), sentinels.close()])
        throw sentinels.misconfigured
      }
      sentinels?.watch(server)
    },
    close: async () => void (await Promise.all([server.close(), channels.close(), sentinels?.close()])),
  }
}
