import type { KeyPattern } from '../core/key-pattern.ts'
import {
  type Action,
  type AuthorizeReplayPolicy,
  type DerivePolicy,
  type OutcomeTable,
  profileDefaults,
  type RouteMatch,
  type RoutePolicy,
} from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import { defaultsOf, shapeOf } from './read.ts'
import { reconcilePolicy } from './reconcile.ts'
import { type FileConfig, fileSchema } from './schema.ts'
import { authorizeReplay, derive, type PolicyConfig, policySchema } from './schema-policy.ts'

type Leaf = string | number | boolean | null | KeyPattern | readonly unknown[] | { readonly header: string }
type Written<N extends keyof PolicyConfig> = NonNullable<PolicyConfig[N]>

/** Every property there: what has a default has been given it. */
export type Filled<T> = T extends Leaf
  ? T
  : { [K in keyof T]-?: Filled<NonNullable<T[K]> | Extract<T[K], null>> }

const BUILT_IN = defaultsOf(shapeOf(policySchema)) as PolicyConfig
/** Of mappings that are off by default. */
const DERIVE = defaultsOf(shapeOf(derive)) as DerivePolicy
const AUTHORIZE_REPLAY = defaultsOf(shapeOf(authorizeReplay)) as Pick<AuthorizeReplayPolicy, 'cache'>
const FILE_DEFAULTS = defaultsOf(shapeOf(fileSchema)) as FileConfig

/** The file with the defaults of everything that has one, routes and `defaults` aside. */
export function fillFile(file: FileConfig): Filled<Omit<FileConfig, 'defaults' | 'routes'>> {
  return merge(FILE_DEFAULTS, file) as Filled<FileConfig>
}

/**
 * A value comes from the route, else from `defaults`, else from the profile that is in force (the route's own, else that
 * of `defaults`), else it is the built-in one. So what `defaults` says outright also beats the profile of a route: a
 * profile is a set of defaults, not of commands. `layers`: `defaults` first, then the route; `timeout`: of the upstream.
 */
export function resolvePolicy(
  identity: { readonly name: string; readonly match: RouteMatch },
  layers: readonly PolicyConfig[],
  limits: PolicyConfig['limits'],
  timeout: Millis,
): RoutePolicy {
  const written = explicit(layers)
  const profile = written.profile ?? 'standard'
  const values = [BUILT_IN, profileLayer(profile), limits === undefined ? {} : { limits }, written].reduce(
    merge,
  )
  const { key, scope, fingerprint, inFlight, misuse, ...rest } = values as Filled<PolicyConfig>
  return {
    ...identity,
    mode: rest.mode,
    profile,
    key: { ...key, derive: key.derive === null ? null : { ...DERIVE, ...key.derive } },
    scope: {
      ...scope,
      jwt: scope.caller.some(({ kind }) => kind === 'jwt') ? scope.jwt : null,
      callerIsDefault: written.scope?.caller === undefined,
    },
    fingerprint,
    inFlight,
    misuseStatus: misuse.status,
    lease: rest.lease,
    ttl: rest.ttl,
    ttlFailed: written.ttlFailed ?? rest.ttl,
    tombstone: rest.tombstone,
    unresolvedTtl: rest.unresolvedTtl,
    respondWithin: rest.respondWithin,
    outcomes: layers.map((layer) => outcomeTable(layer.outcomes ?? {})).reduce(overrideOutcomes),
    onLeaseExpired: rest.onLeaseExpired,
    onStoreUnavailable: rest.onStoreUnavailable,
    keep: rest.keep,
    excludeHeaders: new Set(rest.replay.excludeHeaders),
    statusHeader: rest.statusHeader,
    reconcile: reconcilePolicy(written.reconcile ?? null, timeout),
    authorizeReplay: rest.authorizeReplay === null ? null : { ...AUTHORIZE_REPLAY, ...rest.authorizeReplay },
    limits: { request: rest.limits.request, response: rest.limits.response, newKeys: rest.limits.newKeys },
  }
}

/** What `defaults` and the route say outright. */
export function explicit(layers: readonly PolicyConfig[]): PolicyConfig {
  return layers.map(selfContained).reduce(merge)
}

/** What a layer says in one of two ways replaces what the one below says in the other. */
function selfContained(layer: PolicyConfig): PolicyConfig {
  const { fingerprint, scope } = layer
  return {
    ...layer,
    ...(fingerprint === undefined ? {} : { fingerprint: pointedOnce(fingerprint) }),
    ...(scope?.jwt === undefined ? {} : { scope: { ...scope, jwt: keyedOnce(scope.jwt) } }),
  }
}

/** `ignore` and `only` replace each other, and a body that is not read as JSON has no use for either. */
function pointedOnce(fingerprint: Written<'fingerprint'>): Written<'fingerprint'> {
  const { body, ignore, only } = fingerprint
  const opaque = body !== undefined && body !== 'auto' && body !== 'json'
  const cleared = {
    ...(opaque || (only?.length ?? 0) > 0 ? { ignore: [] } : {}),
    ...(opaque || (ignore?.length ?? 0) > 0 ? { only: [] } : {}),
  }
  return { ...cleared, ...fingerprint }
}

/** Keys of another issuer: that of a URL in place of a file's, and the other way round. */
function keyedOnce(jwt: NonNullable<Written<'scope'>['jwt']>): NonNullable<Written<'scope'>['jwt']> {
  const { jwks = null, keyFile = null } = jwt
  return { ...(jwks === null ? {} : { keyFile: null }), ...(keyFile === null ? {} : { jwks: null }), ...jwt }
}

function profileLayer(profile: RoutePolicy['profile']): PolicyConfig {
  const { minLength, anonymous, misuseStatus, tombstone, onLeaseExpired, onStoreUnavailable } =
    profileDefaults(profile)
  return {
    key: { minLength },
    scope: { anonymous },
    misuse: { status: misuseStatus },
    tombstone,
    onLeaseExpired,
    onStoreUnavailable,
  }
}

function outcomeTable(entries: Readonly<Record<string, Action>>): OutcomeTable {
  const table = { exact: new Map<number, Action>(), class: new Map<number, Action>() }
  for (const [status, action] of Object.entries(entries)) {
    if (status.endsWith('xx')) table.class.set(Number(status[0]), action)
    else table.exact.set(Number(status), action)
  }
  return table
}

/** A route's own entries go first, so its class also beats an exact status of `defaults`. */
function overrideOutcomes(base: OutcomeTable, own: OutcomeTable): OutcomeTable {
  const kept = [...base.exact].filter(([status]) => !own.class.has(Math.floor(status / 100)))
  return { exact: new Map([...kept, ...own.exact]), class: new Map([...base.class, ...own.class]) }
}

/** Mappings are merged, anything else is replaced. */
function merge<T extends object>(base: T, over: T): T {
  const entries = Object.entries(over).map(([name, value]: [string, unknown]) => {
    const below: unknown = Object.hasOwn(base, name) ? base[name as keyof T] : undefined
    return [name, isMapping(below) && isMapping(value) ? merge(below, value) : value]
  })
  return { ...base, ...(Object.fromEntries(entries) as Partial<T>) }
}

function isMapping(value: unknown): value is object {
  return typeof value === 'object' && value !== null && Object.getPrototypeOf(value) === Object.prototype
}
