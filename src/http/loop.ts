import { hash, randomBytes } from 'node:crypto'
import type { Config } from '../config/config.ts'
import { linesOf, type RawHeaders } from '../core/headers.ts'
import { frame } from '../core/identity.ts'
import type { Forward } from '../upstream/port.ts'

/** This proxy's entry in `CDN-Loop` (RFC 8586), by which it knows a request that comes round again (docs/adr/0037). */
export interface LoopMark {
  readonly id: string
  readonly entry: string
}

/**
 * Replicas share a service and a store, and so they share the mark: a loop through a load balancer is found whichever of them
 * gets the request next. Embedded stores have no name that tells two proxies apart, so each process has a mark of its own.
 */
export function loopMarkOf({ service, store }: Pick<Config, 'service' | 'store'>): LoopMark {
  const url = EMBEDDED.test(store.url) ? null : URL.parse(store.url)
  const name = url === null ? randomBytes(32) : frame(['loop/1', service, url.host, url.pathname])
  const id = hash('sha256', name).slice(0, 20)
  return { id, entry: `idempotency-proxy; id=${id}` }
}

const EMBEDDED = /^(?:memory|sqlite):/

/** Whether the mark is among the request's lines, however a proxy on the way wrote them anew. */
export function cameRound(headers: RawHeaders, { id }: LoopMark): boolean {
  return linesOf(headers, 'cdn-loop').some((line) => line.toLowerCase().includes(id))
}

/** Sends requests of the proxy's own with the mark: a question must not go round either. */
export function marking(forward: Forward, { entry }: LoopMark): Forward {
  return (request) => forward({ ...request, headers: [...request.headers, 'CDN-Loop', entry] })
}
