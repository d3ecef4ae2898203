import { CorruptRecord, StoreFull, type StoreTraits, StoreUnavailable } from './register.ts'

/** What ioredis rejects with where nothing was written to a socket. */
const NOT_WRITTEN = "Stream isn't writeable and enableOfflineQueue options is false"
export const TIMED_OUT = 'Command timed out'

/**
 * The error of the port for one of ioredis. Only messages are taken over: the original carries the command's arguments,
 * which must not reach a log.
 */
export function storeError(error: unknown): Error {
  if (error instanceof StoreUnavailable) return error
  const { name, message } = error as Error
  if (name !== 'ReplyError')
    return new StoreUnavailable(`no answer from Redis: ${message}`, message !== NOT_WRITTEN)
  if (message.startsWith('WRONGTYPE'))
    return new CorruptRecord('the key of the record holds a value of another type')
  if (message.startsWith('OOM')) return new StoreFull(`Redis is full: ${message}`)
  return new StoreUnavailable(`Redis refuses: ${message}`, false)
}

/** What an operator does about a server that does not say whether it evicts. */
const UNTOLD = 'routes with profile strict answer 503'
const ACCEPT = 'store.acceptRisk: true accepts the risk'

/** Reads the reply of `INFO`; null where it was denied. */
export function traitsOf(info: string | null): StoreTraits {
  if (info === null)
    return {
      durable: null,
      evicts: null,
      findings: [
        `The Redis user may not run INFO, so the proxy cannot tell whether the server evicts or loses records, and ${UNTOLD}: ACL SETUSER <user> +info grants it, ${ACCEPT}.`,
      ],
    }
  const fields = new Map<string, string | undefined>()
  for (const line of info.split('\r\n')) {
    const [field = '', value] = line.split(':', 2)
    fields.set(field, value)
  }
  const findings: string[] = []
  const version = fields.get('redis_version') ?? '?'
  if (Number.parseInt(version, 10) < 7)
    findings.push(`Redis ${version} is too old: the scripts need version 7 or later, or Valkey.`)
  if (fields.get('role') === 'slave')
    findings.push('The server is a read-only replica: no key can be claimed on it.')
  if (fields.get('cluster_enabled') === '1')
    findings.push('The server is a node of a cluster: keys of other nodes are refused with MOVED.')
  const aof = fields.get('aof_enabled')
  const durable = aof === '1' ? true : aof === '0' ? false : null
  if (durable === null) findings.push('INFO does not say whether appendonly is on.')
  if (durable === false)
    findings.push('appendonly is off: a crash of Redis loses the records written since its last snapshot.')
  const policy = fields.get('maxmemory_policy') || null
  const evicts = policy === null ? null : policy !== 'noeviction'
  if (evicts === null) findings.push(`INFO does not say what maxmemory-policy is, and ${UNTOLD}: ${ACCEPT}.`)
  if (evicts)
    findings.push(`maxmemory-policy is ${policy}, not noeviction: records may vanish before their time.`)
  return { durable, evicts, findings }
}
