import { Cluster, type ServerEvents, type Servers } from './redis-cluster.ts'
import { type ConnectionSettings, RedisConnection } from './redis-connection.ts'
import type { RedisOptions } from './redis-keys.ts'
import { Sentinels } from './redis-sentinel.ts'
import { redisUrl } from './redis-url.ts'

/** The servers that `store.url` leads to. */
export function serversOf(
  { url: text, timeoutMs, grace = 0, client = {} }: RedisOptions,
  shards: readonly number[],
  events: ServerEvents,
): Servers {
  const settings: ConnectionSettings = { timeoutMs, grace, client }
  const url = redisUrl(text, events.onEvent)
  if (url.kind === 'cluster') return new Cluster(url, settings, events)
  const sentinels = url.kind === 'sentinel' ? new Sentinels(url, settings) : null
  const target = url.kind === 'sentinel' ? (sentinels as Sentinels) : { place: url.server, login: url.server }
  const server: RedisConnection = new RedisConnection(target, settings, {
    onEvent: events.onEvent,
    onReady: () => events.onServers(target),
  })
  const all = [{ name: '', server, shards }]
  const close = async (): Promise<void> => void (await Promise.all([server.close(), sentinels?.close()]))
  return {
    commands: server,
    isCluster: false,
    parts: async () => all,
    known: () => all,
    view: async () => ({ id: '', servers: [server] }),
    askAnyone: (name, read) => server.ask(name, [], read),
    replicasOf: async () => sentinels?.replicas() ?? 0,
    targetOf: () => target,
    isMoved: () => false,
    topology: () => sentinels?.topology() ?? null,
    async open() {
      await server.open()
      if (!sentinels?.misconfigured) return sentinels?.watch(server)
      await close()
      throw sentinels.misconfigured
    },
    close,
  }
}
