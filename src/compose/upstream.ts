import { upstreamTag } from '../core/reconcile/identifiers.ts'
import type { Millis } from '../core/record.ts'
import { policyNamed } from '../core/route.ts'
import { loopMarkOf, marking } from '../http/headers.ts'
import { Stalled } from '../http/stalled.ts'
import { STATUS_QUERY_TIMEOUT } from '../reconcile/ports.ts'
import { Budget } from '../runtime/limits.ts'
import { forwarder } from '../upstream/forward.ts'
import { Habits } from '../upstream/habits.ts'
import { openUpstream, type Upstream } from '../upstream/pool.ts'
import type { Base } from './base.ts'
import { followCertificates } from './secrets.ts'
import type { OpenStore } from './store.ts'

export type OpenUpstream = Awaited<ReturnType<typeof openUpstreams>>

/** Connections to the upstream, and the bytes that may be buffered for it. */
export async function openUpstreams(base: Base, { records, store }: Pick<OpenStore, 'records' | 'store'>) {
  const { config, log, state, closing } = base
  const upstreams: Upstream[] = []
  const certificates = followCertificates(config, log, (next) => {
    for (const one of upstreams) one.renew(next)
  })
  if (certificates !== null) closing.use(certificates)
  const shared = {
    http: config.http,
    material: certificates?.current ?? {},
    habits: new Habits(config.upstream.keepAlive),
    mostHead: () => state.config.limits.responseHead,
  }
  const upstream = await openUpstream(config.upstream, shared)
  // A separate pool: slow uploads and unprotected streams must not make protected requests wait.
  const passing = await openUpstream(config.upstream, shared)
  upstreams.push(upstream, passing)
  closing.defer(async () => void (await Promise.allSettled(upstreams.map((one) => one.close()))))
  const stalled = new Stalled()
  const budget = new Budget(config.limits.buffered, stalled.makeRoom)
  // Separate, so that shadow mode takes no room from protected routes.
  const shadowBudget = new Budget(config.limits.buffered)
  const { idleTimeout } = config.upstream
  const forwarding = { timeout: () => state.config.upstream.timeout, idleTimeout, budget }
  const loop = loopMarkOf(config)
  const queryTimeout = (): Millis => Math.min(STATUS_QUERY_TIMEOUT, forwarding.timeout())
  /** Sends status queries to the upstream. */
  const queries = {
    forward: marking(forwarder(upstream.dispatcher, { ...forwarding, timeout: queryTimeout }), loop),
    policyOf: (route: string) => policyNamed(state.config, route),
    upstream: upstreamTag(config.upstream.url),
    records,
    store,
  }
  const forward = forwarder(upstream.dispatcher, forwarding)
  return { upstreams, passing, stalled, budget, shadowBudget, forward, loop, queries, queryTimeout }
}
