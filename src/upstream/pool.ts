import { readFileSync } from 'node:fs'
import { isIP } from 'node:net'
import type { UpstreamConfig } from '../config/config.ts'
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
  readonly socketPath: string | null
  readonly tls: {
    readonly ca?: Buffer
    readonly cert?: Buffer
    readonly key?: Buffer
    readonly servername?: string
  }
  /** Changes the most connections that it may have. */
  resize(connections: number): void
  close(): Promise<void>
}

/** What the pools of one upstream share. */
export interface UpstreamShared {
  readonly habits: Habits
  /** `limits.responseHead` in force. */
  readonly mostHead: () => number
}

/**
 * Connections to the upstream. One request at a time on each (no pipelining), HTTP/1.1, certificates verified. A plain
 * upstream beside the proxy sees the client's `Host`; a TLS one gets the name that its certificate is for.
 *
 * @throws where a TLS file cannot be read.
 */
export async function openUpstream(
  config: UpstreamConfig,
  { habits, mostHead }: UpstreamShared,
): Promise<Upstream> {
  const { connectTimeout, connections } = config
  const socketPath = config.url.startsWith('unix:') ? config.url.slice('unix:'.length) : null
  const origin = new URL(socketPath === null ? config.url : 'http://localhost')
  const tls = {
    ...(config.tls.ca === null ? {} : { ca: readFileSync(config.tls.ca) }),
    ...(config.tls.cert === null ? {} : { cert: readFileSync(config.tls.cert) }),
    ...(config.tls.key === null ? {} : { key: readFileSync(config.tls.key) }),
    ...(config.tls.servername === null ? {} : { servername: config.tls.servername }),
  }
  const isTls = origin.protocol === 'https:'
  const places = new Places(connections)
  const streams = new Once(async () => {
    const { UndiciClient } = await import('./undici.ts')
    return new UndiciClient({
      origin: origin.origin,
      connect: { ...tls, ...(socketPath === null ? {} : { socketPath }), timeout: connectTimeout },
      servername: tls.servername,
      places,
      mostHead,
    })
  })
  const host = origin.hostname.replace(/^\[(.*)\]$/, '$1')
  const client = new Http1Client({
    to:
      socketPath === null ? { host, port: Number(origin.port || (isTls ? 443 : 80)) } : { path: socketPath },
    // RFC 6066 §3: no addresses.
    tls: isTls ? { ...(isIP(host) === 0 ? { servername: host } : {}), ...tls } : null,
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
    socketPath,
    tls,
    host: isTls ? origin.host : null,
    resize: (most) => places.resize(most),
    close: async () =>
      void (await Promise.all([client.close(), streams.made?.then((opened) => opened.close())])),
  }
}
