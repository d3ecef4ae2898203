import type { UpstreamConfig } from '../../src/config/config.ts'
import { Findings } from '../../src/config/errors.ts'
import { readUpstreamTls } from '../../src/config/files.ts'
import { Habits } from '../../src/upstream/habits.ts'
import { openUpstream, type Upstream } from '../../src/upstream/pool.ts'
import type { Carrier, Exchanging, Outgoing, Patience, Transport } from '../../src/upstream/transport.ts'

/** The configuration of an upstream that is waited for patiently, by default on one connection. */
export function upstreamConfig(url: string, more: Partial<UpstreamConfig> = {}): UpstreamConfig {
  return {
    url,
    connectTimeout: 10_000,
    timeout: 10_000,
    idleTimeout: 10_000,
    keepAlive: 1000,
    connections: 1,
    tls: { ca: null, cert: null, key: null, servername: null },
    ...more,
  }
}

export function opened(url: string, more: Partial<UpstreamConfig> = {}): Promise<Upstream> {
  const config = upstreamConfig(url, more)
  const material = readUpstreamTls(new Findings('c.yaml'), config.tls) ?? {}
  return openUpstream(config, { material, habits: new Habits(config.keepAlive), mostHead: () => 65_536 })
}

/** Resolves when the condition holds, asked again in each turn of the event loop. */
export async function until(holds: () => boolean): Promise<void> {
  while (!holds()) await new Promise((resolve) => setImmediate(resolve))
}

export const GET: Outgoing = { method: 'GET', target: '/', headers: ['Host', 'a'], body: null }

/** One exchange, and what it received. */
export class Asked implements Exchanging {
  readonly request: Outgoing
  readonly patience: Patience
  carrier: Carrier | null = null
  text = ''
  readonly end: Promise<string>
  readonly #ended: (how: string) => void

  constructor(transport: Transport, request: Partial<Outgoing> = {}, patience: Partial<Patience> = {}) {
    this.request = { ...GET, ...request }
    this.patience = { head: 5000, idle: 5000, ...patience }
    const { promise, resolve } = Promise.withResolvers<string>()
    this.end = promise
    this.#ended = resolve
    transport.send(this)
  }

  onBegin(carrier: Carrier): boolean {
    this.carrier = carrier
    return true
  }

  onHead(status: number): void {
    this.text += `${status} `
  }

  onData(chunk: Buffer): void {
    this.text += chunk.toString('latin1')
  }

  onEnd(): void {
    this.#ended(this.text)
  }

  onError(error: Error): void {
    this.#ended(`${this.carrier === null ? 'not sent' : 'broken'}: ${error.message}`)
  }
}
