import { readFileSync } from 'node:fs'
import { buildConnector, Client, type Dispatcher, Pool } from 'undici'
import type { UpstreamConfig } from '../config/config.ts'
import { withFixes } from './undici-fixes.ts'

export interface Upstream {
  readonly pool: Pool
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
}

/**
 * A pool waits for `drain` after `dispatch` returned false. undici returns it for requests it refuses to send, too (an invalid path
 * or line), which never drain: each would cost the pool a connection for good.
 */
class SteadyClient extends Client {
  override dispatch(options: Dispatcher.DispatchOptions, handler: Dispatcher.DispatchHandler): boolean {
    return super.dispatch(options, handler) || this.stats.size === 0
  }
}

/**
 * Connections to the upstream. One request at a time on each (no pipelining), HTTP/1.1, certificates verified. A plain
 * upstream beside the proxy sees the client's `Host`; a TLS one gets the name that its certificate is for.
 *
 * @throws where a TLS file cannot be read.
 */
export function openUpstream(config: UpstreamConfig): Upstream {
  const socketPath = config.url.startsWith('unix:') ? config.url.slice('unix:'.length) : null
  const origin = new URL(socketPath === null ? config.url : 'http://localhost')
  const tls = {
    ...(config.tls.ca === null ? {} : { ca: readFileSync(config.tls.ca) }),
    ...(config.tls.cert === null ? {} : { cert: readFileSync(config.tls.cert) }),
    ...(config.tls.key === null ? {} : { key: readFileSync(config.tls.key) }),
    ...(config.tls.servername === null ? {} : { servername: config.tls.servername }),
  }
  const connect = buildConnector({
    ...tls,
    ...(socketPath === null ? {} : { socketPath }),
    timeout: config.connectTimeout,
    allowH2: false,
  })
  const pool = new Pool(origin.origin, {
    factory: (url, options) => new SteadyClient(url, options),
    connections: config.connections,
    pipelining: 1,
    allowH2: false,
    bodyTimeout: config.idleTimeout,
    headersTimeout: config.timeout,
    connect: (options, callback) => {
      connect(options, (error, socket) => {
        if (error !== null) callback(error, null)
        else callback(null, withFixes(socket))
      })
    },
  })
  return { pool, origin, socketPath, tls, host: origin.protocol === 'https:' ? origin.host : null }
}
