import { sourceName } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { normalisePath, readsKeys, routeCovers } from '../core/route.ts'
import type { Address, Config } from './config.ts'
import type { Findings } from './errors.ts'
import { formatDuration, formatSize, isLoopback } from './units.ts'

const MIN_LEASE = 1000
/** Issued keys have some 170 characters. */
const ISSUED_KEY = 200

type Common = Pick<Config, 'upstream' | 'store' | 'limits' | 'issuer'>

/** Values of one policy that do not go together. `base`: `defaults` or `routes[n]`. */
export function checkPolicy(
  findings: Findings,
  base: string,
  policy: RoutePolicy,
  { upstream, store, limits, issuer }: Common,
): void {
  /** What a route only inherits was told at `defaults` already. */
  const rule = (
    broken: boolean,
    properties: readonly string[],
    shared: readonly string[],
    message: string,
  ) => {
    const own = properties.map((property) => `${base}.${property}`)
    if (!broken || (base !== 'defaults' && !own.some((path) => findings.isWritten(path)))) return
    findings.conflict([...own, ...properties.map((property) => `defaults.${property}`), ...shared], message)
  }
  const { lease, ttl, unresolvedTtl, respondWithin, key, scope, fingerprint, authorizeReplay } = policy
  const timeout = formatDuration(upstream.timeout)

  // A lease is renewed every third of it, and a renewal may take as long as the store's timeout.
  const served = Math.max(MIN_LEASE, Math.ceil(store.timeout * 1.5))
  rule(
    lease < served,
    ['lease'],
    ['store.timeout'],
    `found a lease of ${formatDuration(lease)}; allowed: at least ${formatDuration(served)} (1s, and 1.5 × \`store.timeout\`), or its renewal comes too late`,
  )
  rule(
    ttl < upstream.timeout,
    ['ttl'],
    ['upstream.timeout'],
    `found a ttl of ${formatDuration(ttl)}; allowed: at least \`upstream.timeout\` (${timeout}), or a retry of a slow call executes again`,
  )
  rule(
    unresolvedTtl < Math.max(ttl, lease),
    ['unresolvedTtl', 'ttl', 'lease'],
    [],
    `found an unresolvedTtl of ${formatDuration(unresolvedTtl)} with a ttl of ${formatDuration(ttl)} and a lease of ${formatDuration(lease)}; allowed: an unresolvedTtl of at least both`,
  )
  rule(
    respondWithin !== null && respondWithin >= upstream.timeout,
    ['respondWithin'],
    ['upstream.timeout'],
    `found a respondWithin of ${formatDuration(respondWithin ?? 0)}; allowed: less than \`upstream.timeout\` (${timeout}), or none`,
  )
  rule(
    key.minLength > key.maxLength,
    ['key.minLength', 'key.maxLength', 'profile'],
    [],
    `found a minLength of ${key.minLength} and a maxLength of ${key.maxLength}; allowed: a minLength of at most maxLength`,
  )
  const told = typeof key.forward === 'object' ? key.forward.header.toLowerCase() : null
  const counted = [
    ...scope.caller.filter(({ kind }) => kind === 'header').map(({ name }) => name),
    ...fingerprint.headers,
    ...(key.derive?.headers ?? []),
  ]
  rule(
    told !== null && counted.includes(told),
    ['key.forward', 'scope.caller', 'fingerprint.headers', 'key.derive'],
    [],
    `found forward: ${told}, a header by which this route tells requests apart: the key would take its place; allowed: another name`,
  )
  rule(
    key.derive !== null && [...key.derive.json, ...key.derive.form, ...key.derive.headers].length === 0,
    ['key.derive'],
    [],
    'found nothing to derive a key from; allowed: `json`, `form` or `headers` that are not empty, or `derive: off`',
  )
  rule(
    key.derive !== null && key.derive.json.length > 0 && key.derive.form.length > 0,
    ['key.derive'],
    [],
    'found both `json` and `form` to derive a key from, and no body is both; allowed: one of them',
  )
  rule(
    key.forward === 'none' && key.from.every(({ kind }) => kind !== 'header'),
    ['key.forward', 'key.from'],
    [],
    `found forward none with ${key.from.map(sourceName).join(', ')}, which the upstream gets with the body or the query as sent; allowed: a header source, or another forward`,
  )
  rule(
    key.issuedOnly && issuer === null,
    ['key.issuedOnly'],
    ['issuer'],
    'found issuedOnly without an issuer; allowed: it with `issuer` at the top',
  )
  rule(
    key.issuedOnly && key.maxLength < ISSUED_KEY,
    ['key.issuedOnly', 'key.maxLength'],
    [],
    `found issuedOnly with a maxLength of ${key.maxLength}; allowed: at least ${ISSUED_KEY}, since issued keys are that long`,
  )
  rule(
    key.issuedOnly && key.derive !== null,
    ['key.issuedOnly', 'key.derive'],
    [],
    'found issuedOnly with a key that is derived, which no issuer made; allowed: one of them (`derive: off` turns an inherited one off)',
  )
  rule(
    key.issuedOnly && key.from.some((source) => source.kind === 'header' && source.name === 'ce-id'),
    ['key.issuedOnly', 'key.from'],
    [],
    'found issuedOnly with header:ce-id, which carries the id of an event and no issued key; allowed: another source',
  )
  rule(
    scope.jwt !== null && scope.jwt.jwks === null && scope.jwt.keyFile === null,
    ['scope.caller', 'scope.jwt'],
    [],
    'found the claim of a token that nothing verifies; allowed: it with `scope.jwt.jwks` or `scope.jwt.keyFile`',
  )
  rule(
    scope.jwt !== null && scope.jwt.jwks !== null && scope.jwt.keyFile !== null,
    ['scope.jwt.keyFile', 'scope.jwt.jwks'],
    [],
    'found both `jwks` and `keyFile`; allowed: one of them',
  )
  rule(
    authorizeReplay !== null && authorizeReplay.path === undefined,
    ['authorizeReplay'],
    [],
    'found authorizeReplay without a path; allowed: `path` where the upstream is asked, or `authorizeReplay: none`',
  )
  const pointed = fingerprint.ignore.length > 0 || fingerprint.only.length > 0
  rule(
    fingerprint.ignore.length > 0 && fingerprint.only.length > 0,
    ['fingerprint.only', 'fingerprint.ignore'],
    [],
    'found both `ignore` and `only`; allowed: one of them',
  )
  rule(
    pointed && fingerprint.body !== 'auto' && fingerprint.body !== 'json',
    ['fingerprint.ignore', 'fingerprint.only', 'fingerprint.body'],
    [],
    `found JSON pointers with a body compared as ${fingerprint.body}; allowed: them with auto or json`,
  )
  for (const name of ['request', 'response'] as const) {
    rule(
      policy.limits[name] > limits.buffered,
      [`limits.${name}`],
      [`limits.${name}`, 'limits.buffered'],
      `found a ${name} limit of ${formatSize(policy.limits[name])}; allowed: at most \`limits.buffered\` (${formatSize(limits.buffered)})`,
    )
  }
}

export function checkStrictCaller(findings: Findings, base: string, policy: RoutePolicy): void {
  // Shadow mode too: it decides as `enforce` will.
  if (policy.profile !== 'strict' || !policy.scope.callerIsDefault || !readsKeys(policy)) return
  findings.conflict(
    [`${base}.profile`, 'defaults.profile', `${base}.scope.caller`],
    'profile strict needs scope.caller: set it in the route or in `defaults`',
  )
}

export function checkRoutes(findings: Findings, routes: readonly RoutePolicy[]): void {
  for (const [i, route] of routes.entries()) {
    const base = `routes[${i}]`
    const namesake = routes.findIndex(({ name }) => name === route.name)
    if (namesake < i) {
      findings.conflict(
        [`${base}.name`, `routes[${namesake}].name`],
        `found ${JSON.stringify(route.name)}, the name of routes[${namesake}]; allowed: a name of its own`,
      )
    }
    const { path, exact, methods } = route.match
    if (!exact && !isNormal(path)) {
      findings.conflict(
        [`${base}.match.path`],
        `found ${JSON.stringify(path)}, which no normalised path equals; allowed: no dot segments, no // and no needless percent-encoding, or \`exact: true\``,
      )
    }
    const covering = [...routes.slice(0, i).entries()].filter(([, other]) =>
      routeCovers(other.match, route.match),
    )
    if (methods.every((method) => covering.some(([, other]) => other.match.methods.includes(method)))) {
      findings.conflict(
        [`${base}.match`, ...covering.map(([j]) => `routes[${j}].match`)],
        `found a match that no request reaches behind ${covering.map(([, { name }]) => name).join(', ')}; allowed: the narrower route first`,
      )
    }
  }
}

/** Whether the literal segments are as requests are compared, a trailing slash aside. */
function isNormal(path: string): boolean {
  const literals = path.replace(/\/$/, '').split('/').slice(1)
  return literals.every((segment) => segment !== '' && normalisePath(`/${segment}`) === `/${segment}`)
}

type Listeners = Pick<Config, 'listen' | 'admin' | 'ops'>

export function checkListeners(findings: Findings, { listen, admin, ops }: Listeners): void {
  const listeners = { listen, 'admin.listen': admin.listen, 'ops.listen': ops.listen }
  const open = Object.entries(listeners).filter((entry): entry is [string, Address] => entry[1] !== null)
  for (const [i, [path, address]] of open.entries()) {
    const other = open.slice(0, i).find(([, before]) => collide(before, address))
    if (other !== undefined) {
      findings.conflict(
        [path, other[0]],
        `found port ${address.port} for both \`${other[0]}\` and \`${path}\`; allowed: an address of its own for each`,
      )
    }
  }
  if (admin.listen !== null && admin.token === null && !isLoopback(admin.listen.host)) {
    findings.conflict(
      ['admin.listen', 'admin.tokenFile'],
      `found ${admin.listen.host}, which others can reach, without \`admin.tokenFile\`; allowed: a loopback address, or a token`,
    )
  }
}

function collide(a: Address, b: Address): boolean {
  const wildcard = /^(0\.0\.0\.0|::|0:0:0:0:0:0:0:0)$/
  return (
    a.port !== 0 && a.port === b.port && (a.host === b.host || wildcard.test(a.host) || wildcard.test(b.host))
  )
}
