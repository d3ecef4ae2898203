import { Cluster, type OnServers, type Servers } from './cluster.ts'
import { RedisConnection } from './connection.ts'
import { type RedisOptions, SHARDS } from './keys.ts'
import { Sentinels } from './sentinel.ts'
import { redisUrl } from './url.ts'

/** The servers that `store.url` leads to. */
export function serversOf(options: RedisOptions, onServers: OnServers): Servers {
  const { onEvent } = options
  const url = redisUrl(options.url, onEvent)
  if (url.kind === 'cluster') return new Cluster(url, options, onServers)
  const sentinels = url.kind === 'sentinel' ? new Sentinels(url, options) : null
  const target = url.kind === 'sentinel' ? (sentinels as Sentinels) : { place: url.server, login: url.server }
  const server: RedisConnection = new RedisConnection(target, options, {
    onEvent,
    onReady: () => onServers(server),
  })
  const all = [{ name: '', server, shards: SHARDS }]
  return {
    run: (script, args, read, until) => server.run(script, args, read, until),
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
      if (sentinels?.misconfigured) throw sentinels.misconfigured
      sentinels?.watch(server)
    },
    close: async () => void (await Promise.all([server.close(), sentinels?.close()])),
  }
}
