import { said, weakest } from '../grade.ts'
import type { StoreTraits } from '../register.ts'
import { replicationText } from './barrier.ts'
import type { Wait } from './keys.ts'

/** The consequence if eviction is unknown. */
const STRICT_REFUSED = 'routes with profile strict answer 503'
const ACCEPT = 'store.acceptRisk: true accepts the risk'
const MIB = 1024 ** 2
/** Share of `maxmemory` above which somebody has to act before new keys are refused. */
const NEARLY_FULL = 0.9

type Named = StoreTraits & { readonly name: string }

/** The weakest promises of several servers. `down`: how many others do not answer. */
export function together(all: readonly Named[], down: number): StoreTraits {
  const unreached = `${down} of ${all.length + down} masters of the cluster do not answer.`
  const [replication, room] = [said(all, (one) => one.replication), said(all, (one) => one.room)]
  return {
    ...weakest(all),
    findings: said(all, (one) => one.findings),
    refusals: [...said(all, (one) => one.refusals), ...(down === 0 ? [] : [unreached])],
    ...(replication.length === 0 ? {} : { replication: replication.join('; ') }),
    ...(room.length === 0 ? {} : { room: room.join('; ') }),
  }
}

/** `info`: the reply to `INFO`; null if it was denied. */
export function redisTraits(info: string | null, isCluster: boolean, wait: Wait | null): StoreTraits {
  if (info === null)
    return {
      durable: null,
      evicts: null,
      forgets: forgetting(wait, 0),
      hasIdentity: false,
      findings: [
        `The Redis user may not run INFO, so the proxy cannot tell whether the server evicts or loses records, and ${STRICT_REFUSED}: ACL SETUSER <user> +info grants it, ${ACCEPT}.`,
      ],
      refusals: [],
    }
  const fields = new Map(info.split('\r\n').map((line) => line.split(':') as [string, string]))
  const version = fields.get('redis_version') ?? '?'
  const aof = fields.get('aof_enabled')
  const durable = aof === '1' ? true : aof === '0' ? false : null
  const policy = fields.get('maxmemory_policy') || null
  const evicts = policy === null ? null : policy !== 'noeviction'
  const replicas = Number(fields.get('connected_slaves') ?? 0)
  const used = Number(fields.get('used_memory'))
  const most = Number(fields.get('maxmemory'))
  const refusals = given(
    Number.parseInt(version, 10) < 7 &&
      `Redis ${version} is too old: the scripts need version 7 or later, or Valkey.`,
    fields.get('redis_mode') === 'sentinel' &&
      'The server is a Sentinel, which holds no records: redis+sentinel:// follows the master that it names.',
    fields.get('role') === 'slave' && 'The server is a read-only replica: no key can be claimed on it.',
    fields.get('cluster_enabled') === '1' &&
      !isCluster &&
      'The server is a node of a cluster: keys of other nodes are refused with MOVED; redis+cluster:// follows them.',
  )
  const findings = given(
    durable === null && 'INFO does not say whether appendonly is on.',
    durable === false &&
      'appendonly is off: a crash of Redis loses the records written since its last snapshot.',
    evicts === null && `INFO does not say what maxmemory-policy is, and ${STRICT_REFUSED}: ${ACCEPT}.`,
    evicts === true &&
      `maxmemory-policy is ${policy}, not noeviction: records may be evicted before they expire.`,
    most > 0 &&
      used > NEARLY_FULL * most &&
      `The server uses ${Math.floor((100 * used) / most)} % of maxmemory: once it is full, new keys are answered 503.`,
  )
  return {
    durable,
    evicts,
    forgets: forgetting(wait, replicas),
    hasIdentity: fields.has('run_id'),
    findings,
    refusals,
    replication: `${wait === null ? 'claims wait for no replica (store.wait)' : replicationText(wait)}; ${replicasText(replicas, fields.get('min_slaves_good_slaves'))}`,
    ...(used > 0 ? { room: roomText(used, most) } : {}),
  }
}

function given(...sentences: readonly (string | false)[]): string[] {
  return sentences.filter((one) => one !== false)
}

function forgetting(wait: Wait | null, connected: number): string | null {
  if (wait === null)
    return 'Claims wait for no replica (store.wait): a failover, or a crash of the host, loses the last ones.'
  if (wait.replicas === 'all') return null
  // The master's disk does not help the replica that replaces it.
  const count = wait.replicas === 'none' ? 0 : wait.replicas
  if (connected <= count) return null
  return `Claims wait for ${count} of ${connected} replicas (store.wait): a failover to another one loses the last ones.`
}

function replicasText(count: number, good: string | undefined): string {
  if (count === 0) return 'no replica is connected'
  const connected = `${count} replica${count === 1 ? ' is' : 's are'} connected`
  return good === undefined
    ? `${connected}, and min-replicas-to-write is 0: a master that is cut off keeps accepting claims`
    : connected
}

function roomText(used: number, most: number): string {
  const megabytes = `${(used / MIB).toFixed(0)} MiB`
  return most > 0
    ? `${megabytes} of ${(most / MIB).toFixed(0)} MiB are used`
    : `${megabytes} are used; maxmemory is not set, so the machine runs out of memory first`
}
