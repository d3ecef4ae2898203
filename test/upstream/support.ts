import t, { type Test } from 'tap'
import type { Dispatcher } from 'undici'
import type { UpstreamConfig } from '../../src/config/config.ts'
import { Findings } from '../../src/config/errors.ts'
import { readUpstreamTls } from '../../src/config/files.ts'
import { Habits } from '../../src/upstream/habits.ts'
import { openUpstream, type Upstream } from '../../src/upstream/pool.ts'

type Options = Parameters<Upstream['dispatcher']['dispatch']>[0]

/** The dispatchers that an upstream may be opened with. */
export const DISPATCHERS = ['plain', 'node'] as const
export type Http = (typeof DISPATCHERS)[number]

/** The one of the test that runs. */
let running: Http = 'plain'

/** A test of what both promise. */
export function onBoth(name: string, body: (t: Test) => Promise<void>): void {
  for (const http of DISPATCHERS)
    void t.test(`${http}: ${name}`, async (t) => {
      running = http
      t.teardown(() => {
        running = 'plain'
      })
      await body(t)
    })
}

/** The configuration of an upstream that is waited for patiently, by default on one connection. */
export function upstreamConfig(url: string, more: Partial<UpstreamConfig> = {}): UpstreamConfig {
  return {
    url,
    http2: false,
    connectTimeout: 10_000,
    timeout: 10_000,
    idleTimeout: 10_000,
    keepAlive: 1000,
    connections: 1,
    tls: { ca: null, cert: null, key: null, servername: null },
    ...more,
  }
}

export function opened(
  url: string,
  more: Partial<UpstreamConfig> = {},
  http: Http = running,
): Promise<Upstream> {
  const config = upstreamConfig(url, more)
  const material = readUpstreamTls(new Findings('c.yaml'), config.tls) ?? {}
  return openUpstream(config, {
    material,
    habits: new Habits(config.keepAlive),
    mostHead: () => 65_536,
    http,
  })
}

/** Resolves when the condition holds, asked again in each turn of the event loop. */
export async function until(holds: () => boolean): Promise<void> {
  while (!holds()) await new Promise((resolve) => setImmediate(resolve))
}

export const GET: Options = { method: 'GET', path: '/', headers: ['Host', 'a'] }

/** One exchange, and what it received. */
export class Asked implements Dispatcher.DispatchHandler {
  controller: Dispatcher.DispatchController | null = null
  text = ''
  readonly end: Promise<string>
  readonly #ended: (how: string) => void

  constructor(dispatcher: Upstream['dispatcher'], options: Partial<Options> = {}) {
    const { promise, resolve } = Promise.withResolvers<string>()
    this.end = promise
    this.#ended = resolve
    dispatcher.dispatch({ ...GET, headersTimeout: 5000, bodyTimeout: 5000, ...options }, this)
  }

  onRequestStart(controller: Dispatcher.DispatchController): void {
    this.controller = controller
  }

  onResponseStart(_controller: unknown, status: number): void {
    this.text += `${status} `
  }

  onResponseData(_controller: unknown, chunk: Buffer): void {
    this.text += chunk.toString('latin1')
  }

  onResponseEnd(): void {
    this.#ended(this.text)
  }

  onResponseError(_controller: unknown, error: Error): void {
    this.#ended(`${this.controller === null ? 'not sent' : 'broken'}: ${error.message}`)
  }
}
