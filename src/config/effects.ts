import type { RoutePolicy } from '../core/policy.ts'

/**
 * What a change of a property takes: `live`, the next request has it; `restart`; or `identifies`, a restart too, since a retry
 * would not find the record of its first request any more, or find another's.
 */
export type Effect = 'live' | 'restart' | 'identifies'

/** Of properties whose value does not count as it is: what must stay. Others may change as they like. */
export interface Counted {
  readonly effect: 'identifies'
  readonly counts: (policy: RoutePolicy) => unknown
}

/**
 * Every property outside of `defaults` and `routes`, as the file names it (contract §10). A name stands for all below it; what
 * is in neither table takes a restart.
 */
export const FILE_EFFECTS: Readonly<Record<string, Effect>> = {
  // Open sockets.
  listen: 'restart',
  'admin.listen': 'restart',
  'admin.tokenFile': 'restart',
  'admin.hosts': 'restart',
  'ops.listen': 'restart',
  // Connections, and bounds that calls under way were begun with.
  upstream: 'restart',
  'store.url': 'restart',
  'store.timeout': 'restart',
  'store.spool': 'restart',
  'store.acceptRisk': 'restart',
  // Every record id is made with it.
  'store.secretFile': 'identifies',
  // Open files, and what is said once at the start.
  'audit.file': 'restart',
  log: 'restart',
  'readiness.store': 'restart',
  drain: 'restart',
  'problems.baseUrl': 'restart',
  // Whom `X-Forwarded-*` is believed: part of the listener.
  trustProxy: 'restart',
  // Paths that the proxy answers before any route, and the key that it signs with.
  issuer: 'restart',
  'status.path': 'restart',
  // Whether what no route matches has records at all.
  unmatched: 'identifies',
  limits: 'live',
}

/** Every property of a route and of `defaults`. */
export const POLICY_EFFECTS: Readonly<Record<string, Effect | Counted>> = {
  // In the id under `scope.path: route` alone; else it labels metrics, and finds the route of an unknown record again.
  name: { effect: 'identifies', counts: ({ scope, name }) => (scope.path === 'route' ? name : null) },
  match: 'identifies',
  'match.methods': { effect: 'identifies', counts: ({ match }) => match.methods.toSorted() },
  // Shadow leaves the records that `enforce` honours; `off` leaves none, and finds none.
  mode: { effect: 'identifies', counts: ({ mode }) => mode === 'off' },
  // A set of defaults: what they change is looked at by itself.
  profile: 'live',
  'key.presence': { effect: 'identifies', counts: ({ key }) => key.presence === 'ignored' },
  'key.from': 'identifies',
  // What these let through is the same key as before; what they do not is refused.
  'key.syntax': 'live',
  'key.minLength': 'live',
  'key.maxLength': 'live',
  'key.pattern': 'live',
  'key.issuedOnly': 'live',
  // Towards the upstream.
  'key.forward': 'live',
  'key.forwardFence': 'live',
  // Of what a key is made.
  'key.derive': 'identifies',
  'scope.caller': 'identifies',
  'scope.path': 'identifies',
  // Whose claims are believed decides whom a claim names.
  'scope.jwt': 'identifies',
  // A retry that is refused for want of a caller comes again with one, under another id.
  'scope.anonymous': {
    effect: 'identifies',
    counts: ({ scope }) => (scope.caller.length === 0 ? null : scope.anonymous),
  },
  // Whether `scope.caller` is written out.
  'scope.callerIsDefault': 'live',
  // Records name their recipe: those of another one are compared by the digest of the request as it was sent (contract §5).
  fingerprint: 'live',
  inFlight: 'live',
  'misuse.status': 'live',
  // Of claims and outcomes that are written from now on.
  lease: 'live',
  ttl: 'live',
  ttlFailed: 'live',
  tombstone: 'live',
  unresolvedTtl: 'live',
  respondWithin: 'live',
  outcomes: 'live',
  onLeaseExpired: 'live',
  onStoreUnavailable: 'live',
  keep: 'live',
  'replay.excludeHeaders': 'live',
  statusHeader: 'live',
  authorizeReplay: 'live',
  // The next look at an unknown record has it.
  reconcile: 'live',
  limits: 'live',
}

/** The rule of a property, or of the nearest one above it. */
export function ruleOf<R>(table: Readonly<Record<string, R>>, path: string): R | undefined {
  if (Object.hasOwn(table, path)) return table[path]
  const dot = path.lastIndexOf('.')
  return dot < 0 ? undefined : ruleOf(table, path.slice(0, dot))
}
