import { sourceName } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import { normalisePath, readsKeys, routeCovers, WELL_KNOWN } from '../core/route.ts'
import type { Config } from './config.ts'
import type { Findings } from './errors.ts'
import { checkPem } from './files.ts'
import { formatDuration, formatSize } from './units.ts'
import { type Address, isLoopback, isSharedStore, reaches } from './urls.ts'

const MIN_LEASE = 1000
/** Issued keys have some 170 characters. */
const ISSUED_KEY = 200

type Rule = readonly [
  broken: boolean,
  properties: readonly string[],
  message: string,
  shared?: readonly string[],
]
type Common = Pick<Config, 'upstream' | 'store' | 'limits' | 'issuer'>

/**
 * Values of one policy that do not go together, and the properties that decide about it: of the policy, and of the file. `base`:
 * `defaults` or `routes[n]`.
 */
export function checkPolicy(
  findings: Findings,
  base: string,
  policy: RoutePolicy,
  { upstream, store, limits, issuer }: Common,
): void {
  const { lease, ttl, unresolvedTtl, respondWithin, key, scope, fingerprint, authorizeReplay } = policy
  const { derive } = key
  const { jwt } = scope
  // A lease is renewed every third of it, and a renewal may take as long as the store's timeout.
  const minLease = Math.max(MIN_LEASE, Math.ceil(store.timeout * 1.5))
  const forwarded = typeof key.forward === 'object' ? key.forward.header.toLowerCase() : null
  const compared = [
    ...scope.caller.filter(({ kind }) => kind === 'header').map(({ name }) => name),
    ...fingerprint.headers,
    ...(derive?.headers ?? []),
  ]
  const timeout = formatDuration(upstream.timeout)
  const pointers = fingerprint.ignore.length + fingerprint.only.length
  // biome-ignore format: a table
  const rules: readonly Rule[] = [
    [lease < minLease, ['lease'],
      `found a lease of ${formatDuration(lease)}; allowed: at least ${formatDuration(minLease)} (1s, and 1.5 × \`store.timeout\`), or its renewal comes too late`, ['store.timeout']],
    [ttl < upstream.timeout, ['ttl'],
      `found a ttl of ${formatDuration(ttl)}; allowed: at least \`upstream.timeout\` (${timeout}), or a retry of a slow call executes again`, ['upstream.timeout']],
    [unresolvedTtl < Math.max(ttl, lease), ['unresolvedTtl', 'ttl', 'lease'],
      `found an unresolvedTtl of ${formatDuration(unresolvedTtl)} with a ttl of ${formatDuration(ttl)} and a lease of ${formatDuration(lease)}; allowed: an unresolvedTtl of at least both`],
    [respondWithin !== null && respondWithin >= upstream.timeout, ['respondWithin'],
      `found a respondWithin of ${formatDuration(respondWithin ?? 0)}; allowed: less than \`upstream.timeout\` (${timeout}), or none`, ['upstream.timeout']],
    [key.minLength > key.maxLength, ['key.minLength', 'key.maxLength', 'profile'],
      `found a minLength of ${key.minLength} and a maxLength of ${key.maxLength}; allowed: a minLength of at most maxLength`],
    [forwarded !== null && compared.includes(forwarded), ['key.forward', 'scope.caller', 'fingerprint.headers', 'key.derive'],
      `found forward: ${forwarded}, a header by which this route tells requests apart: the key would take its place; allowed: another name`],
    [derive !== null && [...derive.json, ...derive.form, ...derive.headers].length === 0, ['key.derive'],
      'found nothing to derive a key from; allowed: `json`, `form` or `headers` that are not empty, or `derive: off`'],
    [derive !== null && derive.json.length > 0 && derive.form.length > 0, ['key.derive'],
      'found both `json` and `form` to derive a key from, and no body is both; allowed: one of them'],
    [key.forward === 'none' && key.from.every(({ kind }) => kind !== 'header'), ['key.forward', 'key.from'],
      `found forward none with ${key.from.map(sourceName).join(', ')}, which the upstream gets with the body or the query as sent; allowed: a header source, or another forward`],
    [key.issuedOnly && issuer === null, ['key.issuedOnly'],
      'found issuedOnly without an issuer; allowed: it with `issuer` at the top', ['issuer']],
    [key.issuedOnly && key.maxLength < ISSUED_KEY, ['key.issuedOnly', 'key.maxLength'],
      `found issuedOnly with a maxLength of ${key.maxLength}; allowed: at least ${ISSUED_KEY}, since issued keys are that long`],
    [key.issuedOnly && derive !== null, ['key.issuedOnly', 'key.derive'],
      'found issuedOnly with a key that is derived, which no issuer made; allowed: one of them (`derive: off` turns an inherited one off)'],
    [key.issuedOnly && key.from.some((source) => source.kind === 'header' && source.name === 'ce-id'), ['key.issuedOnly', 'key.from'],
      'found issuedOnly with header:ce-id, which carries the id of an event and no issued key; allowed: another source'],
    [jwt !== null && jwt.jwks === null && jwt.keyFile === null, ['scope.caller', 'scope.jwt'],
      'found the claim of a token that nothing verifies; allowed: it with `scope.jwt.jwks` or `scope.jwt.keyFile`'],
    [jwt !== null && jwt.jwks !== null && jwt.keyFile !== null, ['scope.jwt.keyFile', 'scope.jwt.jwks'],
      'found both `jwks` and `keyFile`; allowed: one of them'],
    [(authorizeReplay?.path as string | null | undefined) === null, ['authorizeReplay'],
      'found authorizeReplay without a path; allowed: `path` where the upstream is asked, or `authorizeReplay: none`'],
    [fingerprint.ignore.length > 0 && fingerprint.only.length > 0, ['fingerprint.only', 'fingerprint.ignore'],
      'found both `ignore` and `only`; allowed: one of them'],
    [pointers > 0 && !['auto', 'json'].includes(fingerprint.body), ['fingerprint.ignore', 'fingerprint.only', 'fingerprint.body'],
      `found JSON pointers with a body compared as ${fingerprint.body}; allowed: them with auto or json`],
    ...(['request', 'response'] as const).map((name) => [policy.limits[name] > limits.buffered, [`limits.${name}`],
      `found a ${name} limit of ${formatSize(policy.limits[name])}; allowed: at most \`limits.buffered\` (${formatSize(limits.buffered)})`, [`limits.${name}`, 'limits.buffered']] as const),
  ]
  for (const [broken, properties, message, shared = []] of rules) {
    const own = properties.map((property) => `${base}.${property}`)
    // What a route only inherits has been reported for `defaults`.
    if (broken && (base === 'defaults' || own.some((path) => findings.isWritten(path))))
      findings.conflict([...own, ...properties.map((property) => `defaults.${property}`), ...shared], message)
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
    if (namesake < i)
      findings.conflict(
        [`${base}.name`, `routes[${namesake}].name`],
        `found ${JSON.stringify(route.name)}, the name of routes[${namesake}]; allowed: a name of its own`,
      )
    const { path, exact, methods } = route.match
    if (!exact && !isNormal(path))
      findings.conflict(
        [`${base}.match.path`],
        `found ${JSON.stringify(path)}, which no normalised path equals; allowed: no dot segments, no // and no needless percent-encoding, or \`exact: true\``,
      )
    const covering = [...routes.slice(0, i).entries()].filter(([, other]) =>
      routeCovers(other.match, route.match),
    )
    if (methods.every((method) => covering.some(([, other]) => other.match.methods.includes(method))))
      findings.conflict(
        [`${base}.match`, ...covering.map(([j]) => `routes[${j}].match`)],
        `found a match that no request reaches behind ${covering.map(([, { name }]) => name).join(', ')}; allowed: the narrower route first`,
      )
  }
}

/** Whether the literal segments are as requests are compared, a trailing slash aside. */
function isNormal(path: string): boolean {
  const literals = path.replace(/\/$/, '').split('/').slice(1)
  return literals.every((segment) => segment !== '' && normalisePath(`/${segment}`) === `/${segment}`)
}

/** What is of use under a condition alone. */
const USES: readonly {
  readonly property: string
  readonly isUsedBy: (policy: RoutePolicy) => boolean
  readonly message: string
}[] = [
  {
    property: 'inFlight.wait',
    isUsedBy: ({ inFlight }) => inFlight.mode === 'wait',
    message: 'found a wait where nothing waits; allowed: it with `inFlight.mode: wait`',
  },
  {
    property: 'scope.jwt',
    isUsedBy: ({ scope }) => scope.jwt !== null,
    message: 'found jwt where no caller comes from a token; allowed: it with a `scope.caller` of jwt:<claim>',
  },
]

/**
 * Nothing is ignored (contract §10): what a route says must be of use to it, and what `defaults` says to one of those that
 * start from there.
 */
export function checkUses(findings: Findings, defaults: RoutePolicy, routes: readonly RoutePolicy[]): void {
  const bases = [
    { base: 'defaults', users: [defaults, ...routes] },
    ...routes.map((route, i) => ({ base: `routes[${i}]`, users: [route] })),
  ]
  for (const { property, isUsedBy, message } of USES)
    for (const { base, users } of bases) {
      const path = `${base}.${property}`
      if (!findings.isWritten(path) || users.some(isUsedBy)) continue
      // Not where what would use it could not be read.
      const section = property.split('.')[0] as string
      findings.conflict([path, ...bases.map((each) => `${each.base}.${section}`)], message)
    }
}

/** Paths that the proxy answers itself go before every route, so that no route may have one of them alone. */
export function checkOwnPaths(
  findings: Findings,
  status: string | null,
  issuer: string | null,
  wellKnown: boolean,
  routes: readonly RoutePolicy[],
): void {
  if (status !== null && status === issuer)
    findings.conflict(
      ['issuer.path', 'status.path'],
      `found ${JSON.stringify(status)} for both \`status.path\` and \`issuer.path\`; allowed: a path of its own for each`,
    )
  if (wellKnown && status === WELL_KNOWN)
    findings.conflict(
      ['status.path', 'wellKnown'],
      `found ${JSON.stringify(WELL_KNOWN)}, which \`wellKnown\` answers; allowed: another path`,
    )
  for (const { path, property, method } of [
    { path: status, property: 'status.path', method: 'GET' },
    { path: issuer, property: 'issuer.path', method: 'POST' },
    { path: wellKnown ? WELL_KNOWN : null, property: 'wellKnown', method: 'GET' },
  ])
    for (const [i, { match }] of routes.entries()) {
      // A pattern may well match more: then the rest is what it is there for.
      const isAlone = !/\/(:|\*$)/.test(match.path) && normalisePath(match.path) === path
      if (isAlone && match.methods.includes(method))
        findings.conflict(
          [`routes[${i}].match`, property],
          `found a match whose ${method} requests no route gets, since \`${property}\` is ${JSON.stringify(path)}; allowed: another path, or other methods`,
        )
    }
}

type Listeners = Pick<Config, 'listen' | 'admin' | 'ops'>

/** The listeners that are open, by property. */
function openListeners({ listen, admin, ops }: Listeners): [path: string, address: Address][] {
  const all = { listen, 'admin.listen': admin.listen, 'ops.listen': ops.listen }
  return Object.entries(all).filter((entry): entry is [string, Address] => entry[1] !== null)
}

export function checkListeners(findings: Findings, listeners: Listeners): void {
  const open = openListeners(listeners)
  for (const [i, [path, address]] of open.entries()) {
    const other = open.slice(0, i).find(([, before]) => collide(before, address))?.[0]
    if (other !== undefined)
      findings.conflict(
        [path, other],
        `found port ${address.port} for both \`${other}\` and \`${path}\`; allowed: an address of its own for each`,
      )
  }
  const { listen, token } = listeners.admin
  if (listen !== null && token === null && !isLoopback(listen.host))
    findings.conflict(
      ['admin.listen', 'admin.tokenFile'],
      `found ${listen.host}, which others can reach, without \`admin.tokenFile\`; allowed: a loopback address, or a token`,
    )
}

function collide(a: Address, b: Address): boolean {
  const wildcard = /^(0\.0\.0\.0|::|0:0:0:0:0:0:0:0)$/
  return (
    a.port !== 0 && a.port === b.port && (a.host === b.host || wildcard.test(a.host) || wildcard.test(b.host))
  )
}

/** Two services without a name would meet each other's records, wherever path, caller and key are equal. */
export function checkService(findings: Findings, storeUrl: string): void {
  if (findings.isWritten('service') || !isSharedStore(storeUrl)) return
  findings.conflict(
    ['store.url'],
    'found a store that other services can share, and no `service` to keep their records apart: a client could get the response of another service; write `service: payments`, or give --service payments',
  )
}

export function checkUpstream(
  findings: Findings,
  { url, tls }: Config['upstream'],
  listeners: Listeners,
): void {
  if (!findings.isWritten('upstream.url'))
    findings.conflict(
      ['upstream.url'],
      'found nothing; required: http://host:port, https://host:port or unix:/path, in the file or as --upstream',
    )
  for (const name of ['ca', 'cert', 'key'] as const)
    if (tls[name] !== null) checkPem(findings, `upstream.tls.${name}`, tls[name])
  if ((tls.cert === null) !== (tls.key === null))
    findings.conflict(
      ['upstream.tls.cert', 'upstream.tls.key'],
      'found a certificate or a key without the other; allowed: both or none',
    )
  if (findings.isWritten('upstream.tls') && !url.startsWith('https:'))
    findings.conflict(
      ['upstream.tls', 'upstream.url'],
      'found tls for an upstream without it; allowed: tls with an https:// url',
    )
  const origin = url.startsWith('unix:') ? null : URL.parse(url)
  if (origin === null) return
  const port = Number(origin.port || (origin.protocol === 'https:' ? 443 : 80))
  const own = openListeners(listeners).find(
    ([, address]) => address.port === port && reaches(origin.hostname, address),
  )?.[0]
  // Every request would come back, without end.
  if (own !== undefined)
    findings.conflict(
      ['upstream.url', own],
      `found ${url}, the address that \`${own}\` says this proxy listens on itself; allowed: the address of the server behind it`,
    )
}
