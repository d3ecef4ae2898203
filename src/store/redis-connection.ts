import type { Redis, RedisOptions } from 'ioredis'
import type { Millis } from '../core/record.ts'

const CONNECT_TIMEOUT: Millis = 2000
/** Short enough that traffic is served again soon after Redis is, long enough not to hammer a dead host. */
const RECONNECT_FROM: Millis = 50
const RECONNECT_TO: Millis = 2000
/** How long a server that does not say goodbye is waited for. */
const DISCONNECT_TIMEOUT: Millis = 250

/** What every connection is opened with. */
export function settingsOf(url: string, timeoutMs: Millis) {
  return {
    ...addressOf(url),
    // Every reply has one shape in it, on every server.
    protocol: 2 as const,
    connectionName: 'idempotency-proxy',
    disableClientInfo: true,
    lazyConnect: true,
    connectTimeout: CONNECT_TIMEOUT,
    disconnectTimeout: DISCONNECT_TIMEOUT,
    commandTimeout: timeoutMs,
    enableOfflineQueue: false,
    autoResendUnfulfilledCommands: false,
    maxRetriesPerRequest: 0,
    retryStrategy: (attempt: number) => Math.min(RECONNECT_FROM * 2 ** (attempt - 1), RECONNECT_TO),
    // After a failover the old primary may still hold this connection; the name may lead to the new one.
    reconnectOnError: (error: Error) => error.message.startsWith('READONLY'),
  } satisfies RedisOptions
}

/** What a URL says about the connection. */
export function addressOf(url: string) {
  const { protocol, hostname, port, username, password, pathname } = new URL(url)
  return {
    host: hostname.replace(/^\[|\]$/g, ''),
    port: Number(port || 6379),
    username: decodeURIComponent(username),
    password: decodeURIComponent(password),
    db: Number(pathname.slice(1)),
    ...(protocol === 'rediss:' ? { tls: {} } : {}),
  }
}

/** Resolves when the connection is gone. */
export async function disconnect(client: Redis): Promise<void> {
  const connected = client.status === 'ready'
  const ended = new Promise<void>((done) => client.once('end', done))
  client.disconnect()
  if (connected) await ended
}
