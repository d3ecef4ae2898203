import type { RoutePolicy } from '../core/policy.ts'

/**
 * What a change of a property takes: `live`, the next request has it; `restart`; or `identifies`, a restart too, since a retry
 * would not find the record of its first request any more, or find another's.
 */
export type ReloadRule = 'live' | 'restart' | 'identifies'

/** Of properties of which not every change matters: which one does. */
export interface Sometimes {
  readonly effect: 'identifies'
  readonly when: (before: RoutePolicy, after: RoutePolicy) => boolean
}

/**
 * Every property outside of `defaults` and `routes`, as the file names it (contract §10). A name stands for all below it; what
 * is in neither table takes a restart.
 */
export const FILE_RELOAD_RULES: Readonly<Record<string, ReloadRule>> = {
  // Open sockets.
  listen: 'restart',
  'admin.listen': 'restart',
  'admin.tokenFile': 'restart',
  'admin.hosts': 'restart',
  'ops.listen': 'restart',
  // Every record id is made with them.
  service: 'identifies',
  'store.secretFile': 'identifies',
  // Connections, and bounds that calls under way were begun with.
  upstream: 'restart',
  'store.url': 'restart',
  'store.timeout': 'restart',
  'store.spool': 'restart',
  'store.acceptRisk': 'restart',
  // Open files, and what is said once at the start.
  'audit.file': 'restart',
  'log.format': 'restart',
  'metrics.defaults': 'restart',
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
  // Of a path that nothing is claimed at; made of the configuration in force.
  wellKnown: 'live',
  'log.level': 'live',
  limits: 'live',
}

/** Of these, the ones that decide about records too where a route counts on them. */
export const FILE_IDENTIFIES: Readonly<Record<string, (policy: RoutePolicy) => boolean>> = {
  // Whose `X-Forwarded-Host` is the host in the id.
  trustProxy: ({ scope }) => scope.host,
  // Retries with keys that were issued before are refused, and come again with new ones.
  'issuer.secretFile': ({ key }) => key.issuedOnly,
}

/** Every property of a route and of `defaults`. */
export const POLICY_RELOAD_RULES: Readonly<Record<string, ReloadRule | Sometimes>> = {
  // In the id under `scope.path: route` alone; else it labels metrics, and finds the route of an unknown record again.
  name: changed(({ scope, name }) => (scope.path === 'route' ? name : null)),
  match: 'identifies',
  'match.methods': changed(({ match }) => match.methods.toSorted().join()),
  // Shadow leaves the records that `enforce` honours; `off` leaves none, and finds none.
  mode: changed(({ mode }) => mode === 'off'),
  // A set of defaults: what they change is looked at by itself.
  profile: 'live',
  'key.presence': changed(({ key }) => key.presence === 'ignored'),
  'key.from': 'identifies',
  // What is narrower refuses keys that were used before, and sends their clients for new ones, which execute again.
  'key.syntax': { effect: 'identifies', when: (_, { key }) => key.syntax === 'strict' },
  'key.minLength': { effect: 'identifies', when: (before, { key }) => key.minLength > before.key.minLength },
  'key.maxLength': { effect: 'identifies', when: (before, { key }) => key.maxLength < before.key.maxLength },
  'key.pattern': { effect: 'identifies', when: (_, { key }) => key.pattern !== null },
  'key.issuedOnly': { effect: 'identifies', when: (_, { key }) => key.issuedOnly },
  // Towards the upstream.
  'key.forward': 'live',
  'key.forwardFence': 'live',
  // Of what a key is made.
  'key.derive': 'identifies',
  'scope.caller': 'identifies',
  'scope.path': 'identifies',
  'scope.host': 'identifies',
  // Whose claims are believed decides whom a claim names.
  'scope.jwt': 'identifies',
  // A retry that is refused for want of a caller comes again with one, under another id.
  'scope.anonymous': changed(({ scope }) => (scope.caller.length === 0 ? null : scope.anonymous)),
  // Whether `scope.caller` is written out.
  'scope.callerIsDefault': 'live',
  // Records of another recipe are compared by the request as it was sent (contract §5): a retry that says the same in other
  // bytes, as every multipart one does, is taken for another request and sent for a new key.
  fingerprint: 'identifies',
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
  // Of a path that nothing is claimed at; made of the configuration in force.
  wellKnown: 'live',
  limits: 'live',
}

function changed(counts: (policy: RoutePolicy) => unknown): Sometimes {
  return { effect: 'identifies', when: (before, after) => counts(before) !== counts(after) }
}

/** The rule of a property, or of the nearest one above it. */
export function ruleOf<R>(table: Readonly<Record<string, R>>, path: string): R | undefined {
  if (Object.hasOwn(table, path)) return table[path]
  const dot = path.lastIndexOf('.')
  return dot < 0 ? undefined : ruleOf(table, path.slice(0, dot))
}
