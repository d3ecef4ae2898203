import { StoreUnavailable } from '../register.ts'
import { type OnUnusable, tlsFiles } from '../tls-files.ts'
import type { HostPort, Login, RedisAddress } from './connection.ts'

/** A valid `store.url`, parsed (`config/urls.ts`). */
export type RedisUrl = { readonly kind: 'server'; readonly server: RedisAddress } | SentinelUrl | ClusterUrl

export interface SentinelUrl {
  readonly kind: 'sentinel'
  readonly sentinels: readonly RedisAddress[]
  /** Its name in the Sentinels' configuration. */
  readonly master: string
  /** How to greet the master, wherever it is. */
  readonly server: Login
}

export interface ClusterUrl {
  readonly kind: 'cluster'
  /** Some of its nodes. */
  readonly hosts: readonly HostPort[]
  readonly server: Login
}

/** The URL does not match the servers that it leads to: only an operator can fix that. */
export class Misconfigured extends StoreUnavailable {
  constructor(message: string) {
    super(message, false)
  }
}

const PARTS =
  /^redis(s?)(?:\+(sentinel|cluster))?:\/\/(?:([^:@/?]*)(?::([^/?]*))?@)?([^@/?]+)(?:\/([^/?]*))?(?:\/(\d*))?(?:\?(.*))?$/
const SENTINEL_PORT = 26_379
const PORT = 6379

/** @throws {StoreUnavailable} if a certificate cannot be read. */
export function redisUrl(url: string, onUnusable: OnUnusable): RedisUrl {
  const [, s, kind, user = '', secret = '', hosts = '', path = '', db, query] = PARTS.exec(url) as string[]
  const username = decodeURIComponent(user)
  const password = decodeURIComponent(secret)
  const options = new URLSearchParams(query)
  const tls =
    s === '' ? {} : { tls: tlsFiles(options, { ca: 'cacert', cert: 'cert', key: 'key' }, onUnusable) }
  const all = (port: number) => hosts.split(',').map((host) => placeOf(host, port))
  const server = { username, password, db: Number(kind === undefined ? path : (db ?? 0)), ...tls }
  if (kind === undefined) return { kind: 'server', server: { ...placeOf(hosts, PORT), ...server } }
  if (kind === 'cluster') return { kind, hosts: all(PORT), server }
  // A password without a user is often also the Sentinels'; a user is unknown to them.
  const own = {
    username: options.get('sentinelUsername') ?? '',
    password: options.get('sentinelPassword') ?? (username === '' ? password : ''),
  }
  const sentinels = all(SENTINEL_PORT).map((place) => ({ ...place, ...own, db: 0, ...tls }))
  return { kind: 'sentinel', sentinels, master: path, server }
}

function placeOf(text: string, defaultPort: number): HostPort {
  const colonAndPort = /:\d+$/.exec(text)?.[0] ?? ''
  const host = text.slice(0, text.length - colonAndPort.length)
  return { host: host.replace(/^\[|\]$/g, ''), port: Number(colonAndPort.slice(1)) || defaultPort }
}
