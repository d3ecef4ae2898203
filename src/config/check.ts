import { sourceName } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import {
  normalisePath,
  readsKeys,
  routeCovers,
  routesOverlap,
  routeTakes,
  WELL_KNOWN,
} from '../core/route.ts'
import type { Descriptors, RpcMethod } from '../core/rpc/descriptors.ts'
import type { Config } from './config.ts'
import type { Findings } from './errors.ts'
import { formatDuration, formatSize } from './units.ts'
import { type Address, isLoopback, isSharedStore, reaches } from './urls.ts'
import { callerName, type Effective, UNMATCHED } from './warnings.ts'

const MIN_LEASE = 1000
/** Issued keys have about 190 characters. */
const ISSUED_KEY = 200

type Rule = readonly [
  broken: boolean,
  properties: readonly string[],
  message: string,
  shared?: readonly string[],
]
type SharedConfig = Pick<Config, 'upstream' | 'store' | 'limits' | 'issuer' | 'grpc'>

/**
 * Conflicting values of a policy, with the properties of the policy and of the file that are involved. `base`: `defaults` or `routes[n]`.
 */
export function checkPolicy(
  findings: Findings,
  base: string,
  policy: RoutePolicy,
  { upstream, store, limits, issuer, grpc: { descriptors } }: SharedConfig,
): void {
  const { lease, ttl, ttlBody, unresolvedTtl, respondWithin, key, scope, fingerprint, authorizeReplay } =
    policy
  const { derive } = key
  const { jwt } = scope
  // A lease is renewed after each third, and a renewal may take as long as the store's timeout.
  const minLease = Math.max(MIN_LEASE, Math.ceil(store.timeout * 1.5))
  const forwarded = typeof key.forward === 'object' ? key.forward.header.toLowerCase() : null
  const compared = [
    ...scope.caller.filter(({ kind }) => kind === 'header').map(({ name }) => name),
    ...(fingerprint.headers ?? []),
    ...(derive?.headers ?? []),
  ]
  const { label } = policy.record
  const secret = [...scope.caller, ...key.from].flatMap((source) =>
    source.kind === 'header' ? [source.name] : [],
  )
  const timeout = formatDuration(upstream.timeout)
  const pointers = fingerprint.ignore.length + fingerprint.only.length
  const call = policy.match.grpc ?? null
  const methods = call === null ? [] : methodsOf(descriptors, call)
  const readsFields =
    key.from.some(({ kind }) => kind === 'json') || (derive?.json.length ?? 0) > 0 || label?.kind === 'json'
  // biome-ignore format: a table
  const rules: readonly Rule[] = [
    [lease < minLease, ['lease'],
      `found a lease of ${formatDuration(lease)}; allowed: at least ${formatDuration(minLease)} (1s, and 1.5 × \`store.timeout\`), or its renewal comes too late`, ['store.timeout']],
    [ttl < upstream.timeout, ['ttl'],
      `found a ttl of ${formatDuration(ttl)}; allowed: at least \`upstream.timeout\` (${timeout}), or a retry of a slow call executes again`, ['upstream.timeout']],
    [ttlBody !== null && ttlBody > ttl, ['ttl.body', 'ttl'],
      `found a body of ${formatDuration(ttlBody ?? 0)} with a record of ${formatDuration(ttl)}; allowed: a body of at most the record`],
    [unresolvedTtl < Math.max(ttl, lease), ['unresolvedTtl', 'ttl', 'lease'],
      `found an unresolvedTtl of ${formatDuration(unresolvedTtl)} with a ttl of ${formatDuration(ttl)} and a lease of ${formatDuration(lease)}; allowed: an unresolvedTtl of at least both`],
    [respondWithin !== null && respondWithin >= upstream.timeout, ['respondWithin'],
      `found a respondWithin of ${formatDuration(respondWithin ?? 0)}; allowed: less than \`upstream.timeout\` (${timeout}), or none`, ['upstream.timeout']],
    [key.minLength > key.maxLength, ['key.minLength', 'key.maxLength', 'profile'],
      `found a minLength of ${key.minLength} and a maxLength of ${key.maxLength}; allowed: a minLength of at most maxLength`],
    [forwarded !== null && compared.includes(forwarded), ['key.forward', 'scope.caller', 'fingerprint.headers', 'key.derive'],
      `found forward: ${forwarded}, a header that distinguishes requests of this route: the key would replace it; allowed: another name`],
    [derive !== null && [...derive.json, ...derive.form, ...derive.headers].length === 0, ['key.derive'],
      'found nothing to derive a key from; allowed: `json`, `form` or `headers` that are not empty, or `derive: off`'],
    [derive !== null && derive.json.length > 0 && derive.form.length > 0, ['key.derive'],
      'found both `json` and `form` to derive a key from, and no body is both; allowed: one of them'],
    [key.forward === 'none' && key.from.every(({ kind }) => kind !== 'header'), ['key.forward', 'key.from'],
      `found forward none with ${key.from.map(sourceName).join(', ')}, which the upstream gets with the body or the query as sent; allowed: a header source, or another forward`],
    [key.issuedOnly && issuer === null, ['key.issuedOnly'],
      'found issuedOnly without an issuer; allowed: a top-level `issuer`, or no issuedOnly', ['issuer']],
    [key.issuedOnly && key.maxLength < ISSUED_KEY, ['key.issuedOnly', 'key.maxLength'],
      `found issuedOnly with a maxLength of ${key.maxLength}; allowed: at least ${ISSUED_KEY}, since issued keys are that long`],
    [key.issuedOnly && derive !== null, ['key.issuedOnly', 'key.derive'],
      'found issuedOnly with a derived key, which no issuer made; allowed: one of them (`derive: off` turns an inherited one off)'],
    [key.issuedOnly && key.from.some((source) => source.kind === 'header' && source.name === 'ce-id'), ['key.issuedOnly', 'key.from'],
      'found issuedOnly with header:ce-id, which carries the id of an event, not an issued key; allowed: another source'],
    [jwt !== null && jwt.jwks === null && jwt.keyFile === null, ['scope.caller', 'scope.jwt'],
      'found a claim of a token that is not verified; allowed: a claim with `scope.jwt.jwks` or `scope.jwt.keyFile`'],
    [jwt !== null && jwt.jwks !== null && jwt.keyFile !== null, ['scope.jwt.keyFile', 'scope.jwt.jwks'],
      'found both `jwks` and `keyFile`; allowed: one of them'],
    [(authorizeReplay?.path as string | null | undefined) === null, ['authorizeReplay'],
      'found authorizeReplay without a path; allowed: `path` where the upstream is asked, or `authorizeReplay: none`'],
    [fingerprint.ignore.length > 0 && fingerprint.only.length > 0, ['fingerprint.only', 'fingerprint.ignore'],
      'found both `ignore` and `only`; allowed: one of them'],
    [pointers > 0 && !['auto', 'json'].includes(fingerprint.body), ['fingerprint.ignore', 'fingerprint.only', 'fingerprint.body'],
      `found JSON pointers with a body compared as ${fingerprint.body}; allowed: JSON pointers with auto or json`],
    [label?.kind === 'path' && base !== 'defaults' && !policy.match.path.split('/').includes(`:${label.name}`), ['record.label'],
      `found a label of the path's :${label?.kind === 'path' ? label.name : ''}, which ${policy.match.path} does not have; allowed: a \`:name\` of the path`],
    [label?.kind === 'header' && secret.includes(label.name), ['record.label', 'key.from', 'scope.caller'],
      'found a label that is the key or the caller of this route; allowed: a source that holds neither, since labels are shown and logged'],
    [label?.kind === 'json' && key.from.some((source) => source.kind === 'json' && source.pointer === label.pointer), ['record.label', 'key.from'],
      'found a label that is the key of this route; allowed: another source, since labels are shown and logged'],
    [call !== null && readsFields && descriptors === null, ['key.from', 'key.derive', 'record.label', 'match.grpc'],
      'found JSON pointers into messages that nobody here can read; allowed: with `grpc.descriptors`', ['grpc.descriptors']],
    [call !== null && pointers > 0, ['fingerprint.ignore', 'fingerprint.only'],
      'found JSON pointers on a gRPC route, whose messages are compared by their bytes; allowed: neither ignore nor only'],
    [call !== null && descriptors !== null && methods.length === 0, ['match.grpc'],
      `found ${call}, which the descriptor set does not know; allowed: one of ${[...(descriptors?.methods.keys() ?? [])].slice(0, 5).join(', ')} …`, ['grpc.descriptors']],
    [methods.length > 0 && key.presence === 'required' && methods.every(({ streams }) => streams !== 'none'), ['key.presence', 'key', 'match.grpc'],
      `found a required key for ${call}, which streams, and so is refused; allowed: \`key: ignored\``, ['grpc.descriptors']],
    ...(['request', 'response'] as const).map((name) => [policy.limits[name] > limits.buffered, [`limits.${name}`],
      `found a ${name} limit of ${formatSize(policy.limits[name])}; allowed: at most \`limits.buffered\` (${formatSize(limits.buffered)})`, [`limits.${name}`, 'limits.buffered']] as const),
  ]
  for (const [broken, properties, message, shared = []] of rules) {
    const own = properties.map((property) => `${base}.${property}`)
    // Inherited values are reported once, for `defaults`.
    if (broken && (base === 'defaults' || own.some((path) => findings.isWritten(path))))
      findings.conflict([...own, ...properties.map((property) => `defaults.${property}`), ...shared], message)
  }
}

/** The methods that a route names. */
function methodsOf(descriptors: Descriptors | null, call: string): RpcMethod[] {
  const all = [...(descriptors?.methods.values() ?? [])]
  return all.filter(({ name }) => (call.endsWith('/*') ? name.startsWith(call.slice(0, -1)) : name === call))
}

export function checkStrictCaller(findings: Findings, base: string, policy: RoutePolicy): void {
  // Shadow mode too: it decides as `enforce` will.
  if (policy.profile !== 'strict' || !policy.scope.callerIsDefault || !readsKeys(policy)) return
  const paths = [`${base}.profile`, 'defaults.profile', `${base}.scope.caller`]
  findings.conflict(paths, 'profile strict needs scope.caller: set it in the route or in `defaults`')
}

/**
 * On an address that other machines can reach, policies that read keys must say who the callers are (contract §15): otherwise one could get
 * another's response. `decisive`: the policies that decide, with the explicit values of each.
 */
export function checkCallers(findings: Findings, listen: Address, decisive: readonly Effective[]): void {
  if (isLoopback(listen.host)) return
  const open = decisive.filter(({ policy, written: { scope = {} } }) => {
    const isAnonymousSaid = scope.anonymous !== undefined || policy.profile === 'strict'
    return readsKeys(policy) && (scope.caller === undefined || (scope.caller.length > 0 && !isAnonymousSaid))
  })
  if (open.length === 0) return
  const names = open.map(({ policy: { name } }) =>
    name === UNMATCHED ? 'requests that match no route' : name,
  )
  const places = ['listen', 'defaults.scope', 'routes']
  const found = `found ${listen.host}, which other machines can reach, while`
  const where = `is not set for ${names.join(', ')}`
  // The longer sentence would suggest another caller to those who have named one.
  const named = open.map(({ written }) => written.scope?.caller)
  if (!named.includes(undefined)) {
    const callers = new Set(named.flatMap((sources = []) => sources.map(callerName)))
    findings.conflict(
      places,
      `${found} \`scope.anonymous\` ${where}: callers without ${[...callers].join(' or ')} could get each other's responses; required beside \`scope.caller\`: \`anonymous: reject\`, or \`anonymous: share\` if these may share keys`,
    )
    return
  }
  findings.conflict(
    places,
    `${found} \`scope.caller\` or \`scope.anonymous\` ${where}: one caller could get another's response; required, in \`defaults\` or on each route of the file (--config): \`scope: { caller: "header:authorization", anonymous: reject }\`, or \`scope: { caller: none }\` if all callers may share keys`,
  )
}

/** Client certificates must be verified, by this listener or by a proxy in front of it. */
export function checkCertificates(
  findings: Findings,
  { listen: { tls }, trustProxy }: Pick<Config, 'listen' | 'trustProxy'>,
  policies: readonly RoutePolicy[],
): void {
  if ((tls !== null && tls.clientCa !== null) || trustProxy.length > 0) return
  for (const [n, { name, scope }] of policies.entries()) {
    const source = scope.caller.find(({ kind }) => kind === 'tls')
    if (source === undefined) continue
    const own = name === UNMATCHED ? [] : [`routes[${n}].scope.caller`]
    findings.conflict(
      [...own, 'defaults.scope.caller'],
      `found tls:${source.name}, while client certificates are not verified; allowed: with \`listen.tls.clientCa\`, or behind a proxy in \`trustProxy\` that sends X-Forwarded-Client-Cert`,
    )
  }
}

/**
 * Requests of a route that an earlier route answers (contract §15), one sentence per pair. An error if the later route is strict about
 * keys, or no request reaches it; else a warning, which is returned. A warning, too, if a stricter route loses only some of its paths: no
 * order of the two would be right.
 */
export function checkShadowed(findings: Findings, routes: readonly RoutePolicy[]): string[] {
  const warnings: string[] = []
  for (const [i, { name, match, key, profile }] of routes.entries()) {
    const before = routes.slice(0, i).map((other, j) => ({
      other,
      path: `routes[${j}].match`,
      line: findings.lineOf(`routes[${j}].match`),
      methods: match.methods.filter((method) => other.match.methods.includes(method)),
    }))
    const taken = before.filter(({ other, methods }) => methods.length > 0 && routeTakes(other.match, match))
    const isLost = match.methods.every((method) =>
      taken.some(({ other, methods }) => methods.includes(method) && routeCovers(other.match, match)),
    )
    for (const { other, line, methods } of before)
      if (methods.length > 0 && losesSome(other, routes[i] as RoutePolicy))
        warnings.push(
          `Route \`${name}\`: some ${methods.join(' and ')} requests of ${name} are answered by ${other.name}${line}, which is less strict. To decide, add a route before both for the paths that both match.`,
        )
    if (taken.length === 0) continue
    const says = taken
      .map(({ other, line, methods }) => {
        const verb = methods.length === 1 ? 'is' : 'are'
        return `${methods.join(' and ')} of ${name} ${verb} answered by ${other.name}${line}`
      })
      .join(', ')
    const reach = isLost ? 'that no request reaches' : 'that not all of its requests reach'
    if (isLost || key.presence === 'required' || profile === 'strict')
      findings.conflict(
        [`routes[${i}].match`, ...taken.map(({ path }) => path)],
        `found a match ${reach}: ${says}; allowed: the narrower route first`,
      )
    else warnings.push(`Route \`${name}\`: ${says}. Put the narrower route first.`)
  }
  return warnings
}

/** Whether the later route is stricter, and each of the two matches paths that the other does not. */
function losesSome(before: RoutePolicy, later: RoutePolicy): boolean {
  const isStricter =
    readsKeys(later) &&
    ((later.key.presence === 'required' && before.key.presence !== 'required') ||
      (later.profile === 'strict' && before.profile !== 'strict'))
  const [one, other] = [before.match, later.match]
  return (
    isStricter &&
    one.exact === other.exact &&
    routesOverlap(one, other) &&
    !routeTakes(one, other) &&
    !routeTakes(other, one)
  )
}

export function checkRoutes(findings: Findings, routes: readonly RoutePolicy[]): void {
  for (const [i, { name, match }] of routes.entries()) {
    const base = `routes[${i}]`
    const namesake = routes.findIndex((route) => route.name === name)
    // biome-ignore format: a table
    report(findings, [
      [namesake < i, [`${base}.name`, `routes[${namesake}].name`],
        `found ${JSON.stringify(name)}, the name of routes[${namesake}]; allowed: a name of its own`],
      [match.path === '', [`${base}.match.path`, `${base}.match`],
        'found nothing; required: `path`, or `grpc`'],
      [match.grpc != null && ['methods', 'path', 'exact'].some((name) => findings.isWritten(`${base}.match.${name}`)), [`${base}.match.grpc`],
        'found grpc beside methods, path or exact; allowed: grpc alone, which is a POST to one path'],
      [!match.exact && match.path !== '' && !isNormal(match.path), [`${base}.match.path`],
        `found ${JSON.stringify(match.path)}, which no normalised path equals; allowed: no dot segments, no // and no needless percent-encoding, or \`exact: true\``],
    ])
  }
}

/** Whether the literal segments are in normal form, apart from a trailing slash. */
function isNormal(path: string): boolean {
  const literals = path.replace(/\/$/, '').split('/').slice(1)
  return literals.every((segment) => segment !== '' && normalisePath(`/${segment}`) === `/${segment}`)
}

/** Properties without effect unless another one is set. */
// biome-ignore format: a table
const USES: readonly [property: string, isUsedBy: (policy: RoutePolicy) => boolean, message: string][] = [
  ['inFlight.wait', ({ inFlight }) => inFlight.mode === 'wait',
    'found a wait that has no effect; allowed: a wait with `inFlight.mode: wait`'],
  ['ttl.body', ({ keep }) => keep === 'response',
    'found a time for bodies, but no body is kept; allowed: ttl.body with `keep: response`'],
  ['scope.jwt', ({ scope }) => scope.jwt !== null,
    'found jwt, but no caller comes from a token; allowed: jwt with a `scope.caller` of jwt:<claim>'],
]

/**
 * No property is silently ignored (contract §10): one of a route must have an effect there, and one of `defaults` on some
 * policy that inherits it.
 */
export function checkUses(findings: Findings, defaults: RoutePolicy, routes: readonly RoutePolicy[]): void {
  const users: [base: string, policies: RoutePolicy[]][] = [
    ['defaults', [defaults, ...routes]],
    ...routes.map((route, i): [string, RoutePolicy[]] => [`routes[${i}]`, [route]]),
  ]
  for (const [property, isUsedBy, message] of USES)
    for (const [base, policies] of users) {
      const path = `${base}.${property}`
      if (!findings.isWritten(path) || policies.some(isUsedBy)) continue
      // Silent if the property that would use it is invalid.
      const section = property.split('.')[0] as string
      findings.conflict([path, ...users.map(([each]) => `${each}.${section}`)], message)
    }
}

/** The proxy's own paths take precedence, so a route for just one of them would never match. */
export function checkOwnPaths(
  findings: Findings,
  status: string | null,
  issuer: string | null,
  wellKnown: boolean,
  routes: readonly RoutePolicy[],
): void {
  const own = [
    { path: status, property: 'status.path', method: 'GET' },
    { path: issuer, property: 'issuer.path', method: 'POST' },
    { path: wellKnown ? WELL_KNOWN : null, property: 'wellKnown', method: 'GET' },
  ]
  // A wider pattern is fine: the route gets the other requests.
  const isAlone = (pattern: string, path: string) =>
    !/\/(:|\*$)/.test(pattern) && normalisePath(pattern) === path
  // biome-ignore format: a table
  report(findings, [
    [status !== null && status === issuer, ['issuer.path', 'status.path'],
      `found ${JSON.stringify(status)} for both \`status.path\` and \`issuer.path\`; allowed: a path of its own for each`],
    [wellKnown && status === WELL_KNOWN, ['status.path', 'wellKnown'],
      `found ${JSON.stringify(WELL_KNOWN)}, which \`wellKnown\` answers; allowed: another path`],
    ...own.flatMap(({ path, property, method }) => routes.map(({ match }, i): Broken => [
      path !== null && match.methods.includes(method) && isAlone(match.path, path), [`routes[${i}].match`, property],
      `found a match whose ${method} requests never reach the route, since \`${property}\` is ${JSON.stringify(path)}; allowed: another path, or other methods`])),
  ])
}

type Listening = Pick<Config, 'listen' | 'workers' | 'admin' | 'ops' | 'upstream' | 'cors'> & {
  readonly store: Pick<Config['store'], 'url' | 'wait' | 'migrate'>
  readonly isTiered: boolean
}

/** Properties outside `defaults` and `routes`. */
export function checkFile(findings: Findings, file: Listening): void {
  const { listen, workers, admin, ops, upstream, store, cors, isTiered } = file
  const isAnyOrigin = cors?.origins?.includes('*') === true
  const tiers = ['store.primary.url', 'store.cache.url'].filter((path) => findings.isWritten(path))
  const from = store.migrate?.from ?? null
  const { url, tls } = upstream
  const { wait } = store
  const others = store.url.startsWith('postgres')
    ? 'PostgreSQL, which waits for its standbys itself (synchronous_standby_names, docs/postgres.md)'
    : 'a store that has no replicas to wait for'
  const isAlone = wait?.replicas === 'none'
  const all = { listen, 'admin.listen': admin.listen, 'ops.listen': ops.listen }
  const open = Object.entries(all).flatMap(([path, { address: at }]): [string, Address][] =>
    at === null ? [] : [[path, at]],
  )
  const pairs = open.flatMap(([path, at], i) =>
    open.slice(0, i).map(([other, to]) => ({ path, at, other, to })),
  )
  const origin = url.startsWith('unix:') ? null : URL.parse(url)
  const port = Number(origin?.port || (origin?.protocol === 'https:' ? 443 : 80))
  const own = open.find(([, at]) => origin !== null && at.port === port && reaches(origin.hostname, at))?.[0]
  const operators = admin.listen.address
  const alone = [store.url, from].find((one) => one !== null && !isSharedStore(one))?.replace(/:.*/, ':')
  const isExposed = operators !== null && admin.tokenFile === null && !isLoopback(operators.host)
  // biome-ignore format: a table
  report(findings, [
    [!findings.isWritten('upstream.url'), ['upstream.url'],
      'found nothing; required: http://host:port, https://host:port or unix:/path, in the file or as --upstream'],
    [(tls.cert === null) !== (tls.key === null), ['upstream.tls.cert', 'upstream.tls.key'],
      'found a certificate or a key without the other; allowed: both or none'],
    [findings.isWritten('upstream.tls') && !url.startsWith('https:'), ['upstream.tls', 'upstream.url'],
      'found tls for an upstream without it; allowed: tls with an https:// url'],
    // Services would share records wherever path, caller and key are equal.
    [from === 'memory:' || (from !== null && store.url === 'memory:'), ['store.migrate.from', 'store.url'],
      'found memory:, which ends with its process; allowed: stores that survive a restart'],
    [from !== null && from === store.url, ['store.migrate.from', 'store.url'],
      'found the same store twice; allowed: `url`, where the records go, and `migrate.from`, where they are'],
    [!findings.isWritten('service') && [store.url, ...(from === null ? [] : [from])].some(isSharedStore), ['store.url'],
      'found a store that other services can share, and no `service` to keep their records apart: a client could get the response of another service; write `service: NAME`, or give --service NAME, a name that no other API on this store has'],
    [workers !== 'auto' && workers > 1 && alone !== undefined, ['workers', 'store.url', 'store.migrate.from'],
      `found ${workers} workers with ${alone}, which one process alone can open; allowed: workers: 1 or auto, or a store that processes share, such as redis://`],
    [wait !== null && !/^rediss?[:+]/.test(store.url), ['store.wait', 'store.url'],
      `found wait with ${others}; allowed: wait with Redis, or wait: off`],
    [isAlone && wait.disk !== 'local', ['store.wait.replicas', 'store.wait.disk'],
      `found replicas: none with disk: ${wait?.disk}; allowed: disk: local, or replicas`],
    [isTiered && tiers.length < 2, ['store.url', ...tiers],
      'found tiered: without both tiers; required: store.primary.url, which decides, and store.cache.url'],
    [from === 'tiered:' || (isTiered && from !== null), ['store.migrate', 'store.url'],
      'found tiered: in a migration; allowed: two stores without a cache'],
    [!isTiered && tiers.length > 0, ['store.url', ...tiers],
      'found a tier without tiered:; allowed: store.primary and store.cache with store.url: "tiered:"'],
    ...pairs.map(({ path, at, other, to }): Broken => [collide(at, to), [path, other],
      `found port ${at.port} for both \`${other}\` and \`${path}\`; allowed: an address of its own for each`]),
    [isExposed, ['admin.listen', 'admin.tokenFile'],
      `found ${operators?.host}, which other machines can reach, without \`admin.tokenFile\`; allowed: a loopback address, or a token`],
    [isAnyOrigin && cors.origins.length > 1, ['cors.origins'],
      'found * with other origins; allowed: one or the other'],
    // Any page could act for whoever is signed in.
    [isAnyOrigin && cors.credentials, ['cors.credentials', 'cors.origins'],
      'found credentials for any origin; allowed: credentials with a list of origins'],
    // Every request would loop back.
    [own !== undefined, ['upstream.url', own ?? ''],
      `found ${url}, an address on which this proxy itself listens (\`${own}\`); allowed: the address of the server behind it`],
  ])
}

type Broken = readonly [broken: boolean, paths: readonly string[], message: string]

function report(findings: Findings, rules: readonly Broken[]): void {
  for (const [broken, paths, message] of rules) if (broken) findings.conflict(paths, message)
}

function collide(a: Address, b: Address): boolean {
  const wildcard = /^(0\.0\.0\.0|::|0:0:0:0:0:0:0:0)$/
  return (
    a.port !== 0 && a.port === b.port && (a.host === b.host || wildcard.test(a.host) || wildcard.test(b.host))
  )
}
