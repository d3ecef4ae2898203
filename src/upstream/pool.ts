import { isIP } from 'node:net'
import type { UpstreamConfig } from '../config/config.ts'
import type { TlsMaterial } from '../runtime/pem.ts'
import { Once } from '../runtime/scheduling.ts'
import { Habits } from './habits.ts'
import { Http1Client, Places } from './http1.ts'
import type { Transport } from './transport.ts'
import type { UndiciClient } from './undici.ts'

export interface Upstream {
  /** For complete requests. */
  readonly client: Transport
  /** For streamed bodies; loaded with the first one. Both clients share the places for connections. */
  streams(): Promise<UndiciClient>
  /** `limits.responseHead` in force. */
  readonly mostHead: () => number
  /** For the `Host` line: null keeps the client's. */
  readonly host: string | null
  readonly origin: URL
  /** For connections of `node:http`. */
  readonly address: { readonly host: string; readonly port: number } | { readonly socketPath: string }
  /** For new connections. */
  readonly tls: TlsMaterial & { readonly servername?: string }
  /** Changes the most connections that it may have. */
  resize(connections: number): void
  /** Uses other certificates from now on: no further request begins on a connection made with the ones before. */
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
}

/**
 * Connections to the upstream. One request at a time on each (no pipelining), HTTP/1.1, certificates verified. A plain
 * upstream beside the proxy sees the client's `Host`; a TLS one gets the name that its certificate is for.
 */
export async function openUpstream(
  config: UpstreamConfig,
  { material, habits, mostHead }: UpstreamShared,
): Promise<Upstream> {
  const { connectTimeout, connections } = config
  const socketPath = config.url.startsWith('unix:') ? config.url.slice('unix:'.length) : null
  const origin = new URL(socketPath === null ? config.url : 'http://localhost')
  const host = origin.hostname.replace(/^\[(.*)\]$/, '$1')
  const named = (files: TlsMaterial): Upstream['tls'] => ({
    ...files,
    ...(config.tls.servername === null ? {} : { servername: config.tls.servername }),
  })
  let tls = named(material)
  const connectOptions = () => ({
    ...tls,
    ...(socketPath === null ? {} : { socketPath }),
    timeout: connectTimeout,
  })
  const isTls = origin.protocol === 'https:'
  const port = Number(origin.port || (isTls ? 443 : 80))
  const places = new Places(connections)
  const streams = new Once(async () => {
    const { UndiciClient } = await import('./undici.ts')
    return new UndiciClient({
      origin: origin.origin,
      connect: connectOptions(),
      servername: tls.servername,
      places,
      mostHead,
    })
  })
  const client = new Http1Client({
    to: socketPath === null ? { host, port } : { path: socketPath },
    // RFC 6066 §3: no addresses.
    tls: () => (isTls ? { ...(isIP(host) === 0 ? { servername: host } : {}), ...tls } : null),
    host: origin.host,
    connectTimeout,
    places,
    habits,
    mostHead,
  })
  return {
    client,
    streams: () => streams.get(),
    mostHead,
    origin,
    address: socketPath === null ? { host, port } : { socketPath },
    get tls() {
      return tls
    },
    host: isTls ? origin.host : null,
    resize: (most) => places.resize(most),
    renew: (next) => {
      tls = named(next)
      client.renew()
      void streams.made?.then((opened) => opened.renew(connectOptions()))
    },
    close: async () =>
      void (await Promise.all([client.close(), streams.made?.then((opened) => opened.close())])),
  }
}
