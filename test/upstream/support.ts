import type { UpstreamConfig } from '../../src/config/config.ts'
import { openUpstream, type Upstream } from '../../src/upstream/pool.ts'

/** The configuration of an upstream that is waited for patiently, by default on one connection. */
export function upstreamConfig(url: string, more: Partial<UpstreamConfig> = {}): UpstreamConfig {
  return {
    url,
    connectTimeout: 10_000,
    timeout: 10_000,
    idleTimeout: 10_000,
    connections: 1,
    tls: { ca: null, cert: null, key: null, servername: null },
    ...more,
  }
}

export function opened(url: string, more: Partial<UpstreamConfig> = {}): Promise<Upstream> {
  return openUpstream(upstreamConfig(url, more))
}

/** Resolves when the condition holds, asked again in each turn of the event loop. */
export async function until(holds: () => boolean): Promise<void> {
  while (!holds()) await new Promise((resolve) => setImmediate(resolve))
}
