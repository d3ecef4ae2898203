import type { Address } from '../../config/urls.ts'
import { StoreUnavailable } from '../register.ts'
import { type OnUnusable, tlsFiles } from '../tls-files.ts'

/** How to greet a server. */
export interface Login {
  readonly username: string
  readonly password: string
  readonly db: number
  /** Called for each connection. Absent: no TLS. */
  readonly tls?: () => object
}

/** A valid `store.url`, parsed (`config/urls.ts`). */
export interface RedisUrl {
  readonly kind: 'server' | 'sentinel' | 'cluster'
  /** The server, the Sentinels, or some nodes of the cluster. */
  readonly hosts: readonly Address[]
  /** How to greet servers. */
  readonly login: Login
  /** The master's name in the Sentinels' configuration, and how to greet them. */
  readonly sentinel: { readonly master: string; readonly login: Login }
}

/** The URL does not match the servers that it leads to: only an operator can fix that. */
export class Misconfigured extends StoreUnavailable {
  constructor(message: string) {
    super(`store.url: ${message}`, false)
  }
}

const PARTS =
  /^redis(s?)(?:\+(sentinel|cluster))?:\/\/(?:([^:@/?]*)(?::([^/?]*))?@)?([^@/?]+)(?:\/([^/?]*))?(?:\/(\d*))?(?:\?(.*))?$/
const PORTS = { server: 6379, sentinel: 26_379, cluster: 6379 }

/** @throws {StoreUnavailable} if a certificate cannot be read. */
export function redisUrl(url: string, onUnusable: OnUnusable): RedisUrl {
  const [, s, of, user = '', secret = '', hosts = '', path = '', db, query] = PARTS.exec(url) as string[]
  const kind = (of ?? 'server') as RedisUrl['kind']
  const username = decodeURIComponent(user)
  const password = decodeURIComponent(secret)
  const options = new URLSearchParams(query)
  const tls =
    s === '' ? {} : { tls: tlsFiles(options, { ca: 'cacert', cert: 'cert', key: 'key' }, onUnusable) }
  // A password without a user is often also the Sentinels'; a user is unknown to them.
  const own = {
    username: options.get('sentinelUsername') ?? '',
    password: options.get('sentinelPassword') ?? (username === '' ? password : ''),
  }
  return {
    kind,
    hosts: hosts.split(',').map((host) => placeOf(host, PORTS[kind])),
    login: { username, password, db: Number(kind === 'server' ? path : (db ?? 0)), ...tls },
    sentinel: { master: path, login: { ...own, db: 0, ...tls } },
  }
}

function placeOf(text: string, defaultPort: number): Address {
  const [, host = '', port] = /^\[?(.*?)\]?(?::(\d+))?$/.exec(text) as string[]
  return { host, port: Number(port) || defaultPort }
}
