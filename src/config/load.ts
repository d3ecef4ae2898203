import { concerns } from '../core/classify.ts'
import type {
  AuthorizeReplayPolicy,
  Expected,
  KeySource,
  OutcomeRule,
  Profile,
  RouteMatch,
  RoutePolicy,
} from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { RpcCode } from '../core/rpc/codes.ts'
import type { Descriptors } from '../core/rpc/descriptors.ts'
import {
  checkCallers,
  checkCertificates,
  checkFile,
  checkOwnPaths,
  checkPolicy,
  checkRoutes,
  checkShadowed,
  checkStrictCaller,
  checkUses,
} from './check.ts'
import type { Config, IssuerConfig, SealingKey } from './config.ts'
import { type ConfigError, Findings, formatConfigError } from './errors.ts'
import {
  readDescriptorSet,
  readKeyFile,
  readListenerTls,
  readPem,
  readSealingKey,
  readSecret,
  readTokens,
} from './files.ts'
import {
  FILE,
  type FileConfig,
  type FilledFile,
  type FilledPolicy,
  POLICY,
  type PolicyConfig,
  ROUTE,
} from './properties.ts'
import { type Environment, readYaml } from './read.ts'
import { checkReconcile, expected, reconcilePolicy } from './reconcile.ts'
import { defaultsOf, group, overlay, scalarOf } from './rows.ts'
import { type Effective, warningsOf } from './warnings.ts'
import { rowAt } from './written.ts'

/** Bytes. Enough to keep record ids from being guessed. */
const MIN_SECRET = 16
/** Bytes. A signature is as strong as its key, up to the length of the hash (RFC 2104 §3). */
const MIN_SIGNING_SECRET = 32

export interface ConfigInput {
  /** Its name, for the errors. */
  readonly file?: string
  /** Its text; empty if flags say everything. */
  readonly text: string
  readonly env: Environment
  /** A proxy is running with an earlier configuration. */
  readonly isReload?: boolean
  /** They override the file. */
  readonly flags: { readonly [name in keyof typeof FLAGS]?: string | undefined }
}

export type Loaded =
  /** `text`: of the file. */
  | { readonly ok: true; readonly config: Config; readonly text: string }
  | { readonly ok: false; readonly errors: readonly ConfigError[] }

export { type ConfigError, formatConfigError }

/** Reads, resolves and checks a configuration. All errors are reported at once, in the order of the file. */
export function loadConfig({ file: name = '', text, env, isReload = false, flags }: ConfigInput): Loaded {
  const findings = new Findings(name)
  const file = readYaml(text, { file: name, env, findings })
  if (file === null) return { ok: false, errors: findings.sorted() }
  const config = resolve(withFlags(file, flags, findings), isReload, findings)
  const errors = findings.sorted()
  return errors.length === 0 ? { ok: true, config, text } : { ok: false, errors }
}

/** A gRPC method is a path of its own. */
function matchOf(match: WrittenMatch): RouteMatch {
  const { grpc, ...rest } = match
  return grpc == null
    ? { ...rest, path: rest.path ?? '' }
    : { ...rest, methods: ['POST'], path: `/${grpc}`, grpc }
}

type WrittenMatch = Omit<RouteMatch, 'path'> & { readonly path?: string | null }

/** Matches nothing until the route is known. */
const MATCH = matchOf(defaultsOf(ROUTE.match.group ?? {}) as unknown as WrittenMatch)

const FLAGS = {
  upstream: 'upstream.url',
  listen: 'listen.address',
  store: 'store.url',
  service: 'service',
} as const

function withFlags(file: FileConfig, flags: ConfigInput['flags'], findings: Findings): FileConfig {
  let result: unknown = file
  for (const flag of Object.keys(FLAGS) as (keyof typeof FLAGS)[]) {
    const path = FLAGS[flag]
    const names = path.split('.')
    const row = rowAt(path)
    const read = flags[flag] === undefined || row === undefined ? null : scalarOf(row)?.parse(flags[flag])
    if (read == null) continue
    findings.note(path, { file: `--${flag}`, line: 0, column: 0 })
    if (!read.ok) findings.add(path, read.message)
    else
      result = overlay(
        result,
        names.reduceRight<unknown>((inner, name) => ({ [name]: inner }), read.value),
      )
  }
  return result as FileConfig
}

function resolve(file: FileConfig, isReload: boolean, findings: Findings): Config {
  const { defaults: _, ...filled } = overlay(defaultsOf(FILE.group ?? {}), file, FILE) as FilledFile
  const { listen, ops, status, unmatched, wellKnown, cors } = filled
  const { secretFile, encryption: _e, primary, cache, ...ownStore } = filled.store
  // A default for routes.
  const { newKeys: _n, ...limits } = filled.limits
  const secret = secretFile && readSecret(findings, 'store.secretFile', secretFile, MIN_SECRET)
  const common = {
    upstream: { ...filled.upstream, url: filled.upstream.url ?? '' },
    store: {
      ...ownStore,
      url: primary.url ?? ownStore.url,
      ...(cache.url === null ? {} : { cache: { url: cache.url } }),
      secret: secret || null,
      encryption: { keys: sealingKeys(file.store, findings) },
    },
    limits,
    issuer: file.issuer === undefined ? null : issuerOf(filled.issuer, findings),
    grpc: { descriptors: descriptorsOf(filled.grpc.descriptors, findings) },
  }
  const { upstream, store } = common
  const listeners = { listen, workers: filled.workers, admin: filled.admin, ops }
  if (!isReload) checkRotating(findings, filled)
  checkFile(findings, { ...listeners, upstream, store, cors, isTiered: ownStore.url === 'tiered:' })

  const effective = (
    base: string,
    name: string,
    match: RouteMatch,
    layers: readonly PolicyConfig[],
  ): Effective => {
    const policy = resolvePolicy({ name, match }, layers, file.limits, upstream.timeout)
    const written = explicit(layers)
    const decides = base !== 'defaults' || unmatched === 'protect'
    checkPolicy(findings, base, policy, common)
    checkOutcomes(findings, base, layers.at(-1)?.outcomes)
    checkReconcile(findings, base, written.reconcile, policy, { timeout: upstream.timeout, decides })
    if (decides) checkStrictCaller(findings, base, policy)
    return { policy, written }
  }
  const { match: folding, ...policyDefaults } = file.defaults ?? {}
  const shared = withKeyText('defaults', policyDefaults, findings)
  const defaults = effective('defaults', 'default', { ...MATCH, ...folding, path: '/*' }, [shared])
  const routes = (file.routes ?? []).map(({ name = '', match, ...own }, i) => {
    const base = `routes[${i}]`
    const layers = [shared, withKeyText(base, own, findings)]
    return effective(base, name, matchOf({ ...MATCH, ...folding, ...match }), layers)
  })
  const policies = routes.map(({ policy }) => policy)
  checkRoutes(findings, policies)
  const shadowed = checkShadowed(findings, policies)
  checkUses(findings, defaults.policy, policies)
  checkOwnPaths(findings, status.path, file.issuer?.path ?? null, wellKnown, policies)

  const decisive = unmatched === 'protect' ? [...routes, defaults] : routes
  checkCallers(findings, listen.address, decisive)
  checkCertificates(findings, filled, [...policies, defaults.policy])
  return {
    ...filled,
    ...listeners,
    ...common,
    service: filled.service ?? 'default',
    drain: { ...filled.drain, timeout: filled.drain.timeout ?? upstream.timeout + 5000 },
    defaults: defaults.policy,
    routes: policies,
    warnings: [...shadowed, ...warningsOf(decisive, store.url, upstream.timeout)],
  }
}

/** Files that a running proxy follows by itself ({@link Rotating}): one that is being replaced must not keep a configuration out. */
function checkRotating(
  findings: Findings,
  { listen, admin, ops, upstream: { tls } }: Pick<FilledFile, 'listen' | 'admin' | 'ops' | 'upstream'>,
): void {
  const { tokenFile } = admin
  for (const [path, listener] of Object.entries({
    listen,
    'admin.listen': admin.listen,
    'ops.listen': ops.listen,
  }))
    if (listener.tls !== null) readListenerTls(findings, `${path}.tls`, listener.tls)
  if (tokenFile !== null) readTokens(findings, 'admin.tokenFile', tokenFile)
  for (const name of ['ca', 'cert', 'key'] as const)
    if (tls[name] !== null) readPem(findings, `upstream.tls.${name}`, tls[name])
}

function sealingKeys(store: FileConfig['store'], findings: Findings): SealingKey[] {
  const ids = new Set<string>()
  return (store?.encryption?.keys ?? []).flatMap(({ id, file }, n) => {
    const path = `store.encryption.keys[${n}]`
    // The reader has reported missing parts.
    if (id === undefined || file === undefined) return []
    if (ids.has(id)) findings.add(`${path}.id`, `found "${id}" twice; allowed: an id of its own for each key`)
    ids.add(id)
    const key = readSealingKey(findings, `${path}.file`, file)
    return key === null ? [] : [{ id, key }]
  })
}

function descriptorsOf(file: string | null, findings: Findings): Descriptors | null {
  return file === null ? null : readDescriptorSet(findings, 'grpc.descriptors', file)
}

/** Null: the secret is missing or invalid, as the findings say. */
function issuerOf({ secretFile, ...rest }: FilledFile['issuer'], findings: Findings): IssuerConfig | null {
  // The reader has reported that it is missing.
  if ((secretFile as string | null) === null) return null
  const secret = readSecret(findings, 'issuer.secretFile', secretFile, MIN_SIGNING_SECRET)
  return secret === null ? null : { ...rest, secret }
}

/** The layer with the text of its `scope.jwt.keyFile` in place of the name. */
function withKeyText(base: string, layer: PolicyConfig, findings: Findings): PolicyConfig {
  const file = layer.scope?.jwt?.keyFile ?? null
  if (file === null) return layer
  const keyFile = readKeyFile(findings, `${base}.scope.jwt.keyFile`, file)
  return { ...layer, scope: { ...layer.scope, jwt: { ...layer.scope?.jwt, keyFile } } }
}

/** The values of a profile, which routes and `defaults` override, and the default of everything else. */
export function profileDefaults(profile: Profile): FilledPolicy {
  const defaults = PROFILES.get(profile) ?? (defaultsOf(POLICY, profile) as FilledPolicy)
  PROFILES.set(profile, defaults)
  return defaults
}

const PROFILES = new Map<Profile, FilledPolicy>()

/**
 * A value comes from the route, else from `defaults`, else from the profile (the route's, else that of `defaults`), else it is the
 * built-in default. So an explicit value in `defaults` beats a route's profile. `layers`: `defaults` first, then the route;
 * `timeout`: of the upstream.
 */
function resolvePolicy(
  identity: { readonly name: string; readonly match: RouteMatch },
  layers: readonly PolicyConfig[],
  topLimits: FileConfig['limits'],
  timeout: Millis,
): RoutePolicy {
  const written = explicit(layers)
  const profile = written.profile ?? 'standard'
  const base = profileDefaults(profile)
  const isCall = identity.match.grpc != null && written.key?.from === undefined
  const limits = Object.entries({ ...base.limits, ...topLimits }).filter(([name]) => name in base.limits)
  const values = overlay({ ...base, limits: Object.fromEntries(limits) }, written, group(POLICY))
  const { misuse, replay, scope, ...rest } = values as FilledPolicy
  return {
    ...identity,
    ...rest,
    key: isCall ? { ...rest.key, from: METADATA } : rest.key,
    scope: {
      ...scope,
      jwt: scope.caller.some(({ kind }) => kind === 'jwt') ? scope.jwt : null,
      callerIsDefault: written.scope?.caller === undefined,
    },
    misuseStatus: misuse.status,
    ttl: rest.ttl.record,
    ttlFailed: rest.ttlFailed ?? rest.ttl.record,
    ttlBody: rest.ttl.body,
    outcomes: withoutHidden(layers.toReversed().flatMap(({ outcomes }) => outcomeRules(outcomes))),
    excludeHeaders: new Set(replay.excludeHeaders),
    // `checkPolicy` ensures that the path is there.
    authorizeReplay: rest.authorizeReplay as AuthorizeReplayPolicy | null,
    reconcile: reconcilePolicy(written.reconcile ?? null, timeout),
  }
}

/** Where gRPC clients send keys. */
const METADATA: readonly KeySource[] = [
  { kind: 'header', name: 'idempotency-key' },
  { kind: 'header', name: 'x-idempotency-key' },
]

/** The explicit values of `defaults` and the route. */
function explicit(layers: readonly PolicyConfig[]): PolicyConfig {
  return layers.map(selfContained).reduce((below, above) => overlay(below, above) as PolicyConfig)
}

/** If a setting has two forms, the upper layer's form replaces the other. */
function selfContained({ fingerprint, scope, ...layer }: PolicyConfig): PolicyConfig {
  const isSet = (value: readonly unknown[] | string | null | undefined): boolean => (value?.length ?? 0) > 0
  // Pointers are useless for a body that is not read as JSON.
  const opaque = !['auto', 'json'].includes(fingerprint?.body ?? 'auto')
  const pointers = {
    ...(opaque || isSet(fingerprint?.only) ? { ignore: [] } : {}),
    ...(opaque || isSet(fingerprint?.ignore) ? { only: [] } : {}),
  }
  // Keys of another issuer: a URL replaces a file, and vice versa.
  const keys = {
    ...(isSet(scope?.jwt?.jwks) ? { keyFile: null } : {}),
    ...(isSet(scope?.jwt?.keyFile) ? { jwks: null } : {}),
  }
  return {
    ...layer,
    ...(fingerprint && { fingerprint: { ...pointers, ...fingerprint } }),
    ...(scope && { scope: { ...scope, ...(scope.jwt && { jwt: { ...keys, ...scope.jwt } }) } }),
  }
}

/** In a mapping, exact statuses come before classes. */
function outcomeRules(written: PolicyConfig['outcomes'] = {}): OutcomeRule[] {
  const rules: readonly OutcomeConfig[] = isList(written)
    ? written
    : Object.entries(written)
        .map(([status, outcome]) => ({ status, outcome }))
        .toSorted((a, b) => Number(a.status.endsWith('xx')) - Number(b.status.endsWith('xx')))
  return rules.map(({ status = '', when, outcome = 'unknown' }) => ({
    status: /^\d/.test(status) ? Number(status.endsWith('xx') ? status[0] : status) : (status as RpcCode),
    when: expected(when),
    outcome,
  }))
}

type OutcomesConfig = NonNullable<PolicyConfig['outcomes']>
type OutcomeConfig = Extract<OutcomesConfig, readonly unknown[]>[number]

function isList(written: OutcomesConfig): written is readonly OutcomeConfig[] {
  return Array.isArray(written)
}

/** Whether an earlier rule applies wherever this one would. */
function isHidden(rule: OutcomeRule, earlier: readonly OutcomeRule[]): boolean {
  const expects = ({ pointer, value }: Expected): boolean =>
    rule.when.some((own) => own.pointer === pointer && own.value === value)
  return earlier.some((one) => concerns(one, rule.status) && one.when.every(expects))
}

function withoutHidden(rules: readonly OutcomeRule[]): OutcomeRule[] {
  return rules.filter((rule, i) => !isHidden(rule, rules.slice(0, i)))
}

/** No entry of a list is silently ignored (contract §10). */
function checkOutcomes(findings: Findings, base: string, written: PolicyConfig['outcomes']): void {
  const rules = outcomeRules(written)
  for (const [i, rule] of rules.entries())
    if (isHidden(rule, rules.slice(0, i)))
      findings.conflict(
        [`${base}.outcomes[${i}]`],
        'found an entry that never counts, since an earlier one applies; allowed: the narrower one first',
      )
}
