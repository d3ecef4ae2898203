import type { ConnectionOptions } from 'node:tls'
import { type OnUnusable, tlsFiles } from '../tls-files.ts'

export interface PostgresAddress {
  readonly host: string
  readonly port: number
  readonly user: string
  readonly password: string
  readonly database: string
  /** Called for each connection. Null: no TLS. */
  readonly tls: (() => ConnectionOptions) | null
}

/**
 * A valid `store.url` (`config/urls.ts`), read as libpq reads it.
 * @throws {StoreUnavailable} if a certificate cannot be read.
 */
export function postgresAddress(url: string, onUnusable: OnUnusable): PostgresAddress {
  const { hostname, port, username, password, pathname, searchParams } = new URL(url)
  return {
    host: hostname.replace(/^\[|\]$/g, ''),
    port: Number(port || 5432),
    user: decodeURIComponent(username),
    password: decodeURIComponent(password),
    database: decodeURIComponent(pathname.slice(1)),
    tls: tlsOf(searchParams, onUnusable),
  }
}

function tlsOf(options: URLSearchParams, onUnusable: OnUnusable): PostgresAddress['tls'] {
  const mode = options.get('sslmode') ?? 'disable'
  if (mode === 'disable') return null
  const files = tlsFiles(options, { ca: 'sslrootcert', cert: 'sslcert', key: 'sslkey' }, onUnusable)
  return () => ({
    rejectUnauthorized: mode.startsWith('verify-'),
    // verify-ca accepts any certificate of that authority.
    ...(mode === 'verify-ca' ? { checkServerIdentity: () => undefined } : {}),
    ...files(),
  })
}
