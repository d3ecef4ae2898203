import { isIP } from 'node:net'
import type { UpstreamConfig } from '../config/config.ts'
import type { TlsMaterial } from '../runtime/pem.ts'
import type { ClientOptions } from './client-options.ts'
import type { UpstreamDispatcher } from './forward.ts'
import type { Habits } from './habits.ts'
import { Http1Client } from './http1.ts'

export interface Upstream {
  readonly dispatcher: UpstreamDispatcher
  /** `limits.responseHead` in force. */
  readonly mostHead: () => number
  /** For the `Host` line: null keeps the client's. */
  readonly host: string | null
  readonly origin: URL
  readonly isHttp2: boolean
  /** For connections of `node:http` and `node:tls`. */
  readonly address: { readonly host: string; readonly port: number } | { readonly socketPath: string }
  /** For new connections. */
  readonly tls: TlsMaterial & { readonly servername?: string }
  /** Changes the maximum number of connections. */
  resize(connections: number): void
  /** Uses other certificates from now on: no further request begins on a connection made with the previous ones. */
  renew(material: TlsMaterial): void
  close(): Promise<void>
}

/** What the pools of one upstream share. */
export interface UpstreamShared {
  /** The files of `upstream.tls`. */
  readonly material: TlsMaterial
  readonly habits: Habits
  /** `limits.responseHead` in force. */
  readonly mostHead: () => number
  /** `node`: undici's own pool, slower and with fewer promises (docs/adr/0128). No difference over HTTP/2. */
  readonly http?: 'plain' | 'node'
}

/**
 * Connections to the upstream, certificates verified: over HTTP/1.1 with one request at a time on each (no pipelining), over HTTP/2 with many. A plain
 * upstream beside the proxy sees the client's `Host`; a TLS one gets the name that its certificate is for.
 */
export async function openUpstream(
  config: UpstreamConfig,
  { material, habits, mostHead, http = 'plain' }: UpstreamShared,
): Promise<Upstream> {
  const { connectTimeout, connections } = config
  const socketPath = config.url.startsWith('unix:') ? config.url.slice('unix:'.length) : null
  const origin = new URL(socketPath === null ? config.url : 'http://localhost')
  const host = origin.hostname.replace(/^\[(.*)\]$/, '$1')
  // RFC 6066 §3: no addresses.
  const servername = config.tls.servername ?? (isIP(host) === 0 ? host : null)
  const named = (files: TlsMaterial): Upstream['tls'] =>
    servername === null ? files : { ...files, servername }
  let tls = named(material)
  const isTls = origin.protocol === 'https:'
  const port = Number(origin.port || (isTls ? 443 : 80))
  const options: ClientOptions = {
    to: socketPath === null ? { host, port } : { path: socketPath },
    tls: () => (isTls ? tls : null),
    host: origin.host,
    connectTimeout,
    connections,
    habits,
    maxHeaderSize: mostHead,
  }
  const dispatcher = config.http2
    ? new (await import('./http2.ts')).Http2Client(options)
    : http === 'plain'
      ? new Http1Client(options)
      : new (await import('./undici.ts')).UndiciClient(options)
  return {
    dispatcher,
    mostHead,
    origin,
    isHttp2: config.http2,
    address: socketPath === null ? { host, port } : { socketPath },
    get tls() {
      return tls
    },
    host: isTls ? origin.host : null,
    resize: (most) => dispatcher.resize(most),
    renew: (next) => {
      tls = named(next)
      dispatcher.renew()
    },
    close: () => dispatcher.destroy(),
  }
}
