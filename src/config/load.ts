import { isMap, isScalar, LineCounter, parseDocument } from 'yaml'
import type { RouteMatch } from '../core/policy.ts'
import { checkListeners, checkPolicy, checkRoutes, checkStrictCaller } from './check.ts'
import { checkOwnPaths, checkUses } from './check-uses.ts'
import type { Config, IssuerConfig } from './config.ts'
import type { Environment } from './env.ts'
import { type ConfigError, Findings, formatConfigError } from './errors.ts'
import { checkPem, readKeyText, readSecret, readToken } from './files.ts'
import { checkUpstreamAddress } from './own-address.ts'
import { readNode, readText, shapeOf } from './read.ts'
import { checkReconcile } from './reconcile.ts'
import { explicit, fillFile, resolvePolicy } from './resolve.ts'
import { type FileConfig, fileSchema } from './schema.ts'
import { METHODS, type PolicyConfig } from './schema-policy.ts'
import { isSharedStore } from './urls.ts'
import { type Effective, warningsOf } from './warnings.ts'

/** Bytes. Record ids are only kept from being guessed; */
const MIN_SECRET = 16
/** a signature has the strength of its key up to the length of the hash (RFC 2104 §3). */
const MIN_SIGNING_SECRET = 32

export interface Input {
  /** Its name, for the errors. */
  readonly file?: string
  /** Its text; empty where flags say everything. */
  readonly text: string
  readonly env: Environment
  /** They go over the file. */
  readonly flags: {
    readonly upstream?: string | undefined
    readonly listen?: string | undefined
    readonly store?: string | undefined
    readonly service?: string | undefined
  }
}

export type Loaded =
  | { readonly ok: true; readonly config: Config }
  | { readonly ok: false; readonly errors: readonly ConfigError[] }

export { type ConfigError, formatConfigError }

/** Reads, resolves and checks a configuration. Errors are all told at once, in the order of the file. */
export function loadConfig(input: Input): Loaded {
  const findings = new Findings(input.file ?? '')
  const spelled = new Map<string, string>()
  const file = readYaml(input, findings, spelled)
  if (file === null) return { ok: false, errors: findings.sorted() }
  const config = { ...resolve(withFlags(file, input.flags, findings), findings), spelled }
  const errors = findings.sorted()
  return errors.length === 0 ? { ok: true, config } : { ok: false, errors }
}

/** `null`: no YAML, so that nothing else can be said about it. */
function readYaml(
  { file = '', text, env }: Input,
  findings: Findings,
  spelled: Map<string, string>,
): FileConfig | null {
  const lines = new LineCounter()
  const document = parseDocument(text, {
    lineCounter: lines,
    merge: true,
    uniqueKeys: false,
    prettyErrors: false,
    version: '1.2',
  })
  const broken = [...document.errors, ...document.warnings]
  for (const { code, message, pos } of broken) {
    const { line, col } = lines.linePos(pos[0])
    const what =
      code === 'MULTIPLE_DOCS'
        ? 'found a second document; allowed: one'
        : `found invalid YAML: ${message}; allowed: YAML 1.2`
    // The commonest slip of all: a brace begins a mapping there.
    const hint = text[pos[0] - 1] === '$' ? ', and quotes around ${NAME} within { } and [ ]' : ''
    findings.add('', `${what}${hint}`, { file, line, column: col })
  }
  if (broken.length > 0) return null
  const { contents } = document
  if (contents === null || (isScalar(contents) && contents.value === null)) return {}
  const read = readNode({ file, document, lines, env, findings, spelled }, shapeOf(fileSchema), contents, '')
  return isMap(contents) ? (read as FileConfig) : null
}

function withFlags(file: FileConfig, flags: Input['flags'], findings: Findings): FileConfig {
  const read = (
    flag: keyof Input['flags'],
    path: string,
    scalar: 'upstreamUrl' | 'address' | 'storeUrl' | 'serviceName',
  ): unknown => {
    const text = flags[flag]
    if (text === undefined) return undefined
    findings.note(path, { file: `--${flag}`, line: 0, column: 0 })
    return readText(findings, scalar, text, path)
  }
  const upstream = read('upstream', 'upstream.url', 'upstreamUrl') as string | undefined
  const listen = read('listen', 'listen', 'address') as FileConfig['listen']
  const store = read('store', 'store.url', 'storeUrl') as string | undefined
  const service = read('service', 'service', 'serviceName') as string | undefined
  return {
    ...file,
    ...(service === undefined ? {} : { service }),
    ...(upstream === undefined ? {} : { upstream: { ...file.upstream, url: upstream } }),
    ...(listen === undefined ? {} : { listen }),
    ...(store === undefined ? {} : { store: { ...file.store, url: store } }),
  }
}

function resolve(file: FileConfig, findings: Findings): Omit<Config, 'spelled'> {
  const { listen, admin, ops, upstream, store, status, drain, unmatched, ...rest } = fillFile(file)
  // A bound of routes: what the top says is what they start from.
  const { newKeys: _, ...limits } = rest.limits
  const common = {
    upstream: upstreamOf({ ...upstream, url: file.upstream?.url ?? '' }, file.upstream?.tls ?? {}, findings),
    store: {
      url: store.url,
      timeout: store.timeout,
      secret: named(file.store?.secretFile, (name) =>
        readSecret(findings, 'store.secretFile', name, MIN_SECRET),
      ),
      spool: store.spool,
      acceptRisk: store.acceptRisk,
    },
    limits,
    issuer: file.issuer === undefined ? null : issuerOf(rest.issuer, file.issuer.secretFile, findings),
  }
  checkService(findings, store.url)
  const token = named(file.admin?.tokenFile, (name) => readToken(findings, 'admin.tokenFile', name))
  const listeners = { listen, admin: { listen: admin.listen, token, hosts: admin.hosts }, ops }
  checkListeners(findings, listeners)
  checkUpstreamAddress(findings, { ...listeners, upstream: common.upstream })

  const effective = (
    base: string,
    name: string,
    match: RouteMatch,
    layers: readonly PolicyConfig[],
  ): Effective => {
    const policy = resolvePolicy({ name, match }, layers, file.limits, upstream.timeout)
    const written = explicit(layers)
    checkPolicy(findings, base, policy, common)
    const decides = base !== 'defaults' || unmatched === 'protect'
    checkReconcile(findings, base, written.reconcile, policy, { timeout: upstream.timeout, decides })
    if (decides) checkStrictCaller(findings, base, policy)
    return { policy, written }
  }
  const shared = withKeyText('defaults', file.defaults ?? {}, findings)
  const anywhere = { methods: METHODS, path: '/*', exact: false }
  const defaults = effective('defaults', 'default', anywhere, [shared])
  const routes = (file.routes ?? []).map(({ name = '', match, ...own }, i) => {
    const base = `routes[${i}]`
    const layers = [shared, withKeyText(base, own, findings)]
    return effective(base, name, { methods: METHODS, path: '', exact: false, ...match }, layers)
  })
  const policies = routes.map(({ policy }) => policy)
  checkRoutes(findings, policies)
  checkUses(findings, defaults.policy, policies)
  checkOwnPaths(findings, status.path, file.issuer?.path ?? null, rest.wellKnown, policies)

  return {
    ...listeners,
    ...common,
    service: file.service ?? 'default',
    audit: rest.audit,
    readiness: rest.readiness,
    problems: rest.problems,
    status,
    wellKnown: rest.wellKnown,
    drain: { delay: drain.delay, timeout: file.drain?.timeout ?? upstream.timeout + 5000 },
    metrics: rest.metrics,
    log: rest.log,
    trustProxy: rest.trustProxy,
    unmatched,
    defaults: defaults.policy,
    routes: policies,
    warnings: warningsOf(
      unmatched === 'protect' ? [...routes, defaults] : routes,
      store.url,
      upstream.timeout,
    ),
  }
}

/** Two services without a name would meet each other's records, wherever path, caller and key are equal. */
function checkService(findings: Findings, storeUrl: string): void {
  if (findings.isWritten('service') || !isSharedStore(storeUrl)) return
  findings.conflict(
    ['store.url'],
    'found a store that other services can share, and no `service` to keep their records apart: a client could get the response of another service; write `service: payments`, or give --service payments',
  )
}

/** What `file` names is signed with; without it nothing is, and the findings say why. */
function issuerOf(
  { path, ttl }: Omit<IssuerConfig, 'secret'>,
  file: string | undefined,
  findings: Findings,
): IssuerConfig | null {
  const secret = named(file, (name) => readSecret(findings, 'issuer.secretFile', name, MIN_SIGNING_SECRET))
  return secret === null ? null : { path, secret, ttl }
}

/** The layer with the text of its `scope.jwt.keyFile` in place of the name. */
function withKeyText(base: string, layer: PolicyConfig, findings: Findings): PolicyConfig {
  const file = layer.scope?.jwt?.keyFile ?? null
  if (file === null) return layer
  const keyFile = readKeyText(findings, `${base}.scope.jwt.keyFile`, file)
  return { ...layer, scope: { ...layer.scope, jwt: { ...layer.scope?.jwt, keyFile } } }
}

function upstreamOf(
  { url, connectTimeout, timeout, idleTimeout, connections }: Omit<Config['upstream'], 'tls'>,
  { ca = null, cert = null, key = null, servername = null }: Partial<Config['upstream']['tls']>,
  findings: Findings,
): Config['upstream'] {
  if (!findings.isWritten('upstream.url')) {
    findings.conflict(
      ['upstream.url'],
      'found nothing; required: http://host:port, https://host:port or unix:/path, in the file or as --upstream',
    )
  }
  for (const [name, pem] of Object.entries({ ca, cert, key }))
    if (pem !== null) checkPem(findings, `upstream.tls.${name}`, pem)
  if ((cert === null) !== (key === null)) {
    findings.conflict(
      ['upstream.tls.cert', 'upstream.tls.key'],
      'found a certificate or a key without the other; allowed: both or none',
    )
  }
  if (findings.isWritten('upstream.tls') && !url.startsWith('https:')) {
    findings.conflict(
      ['upstream.tls', 'upstream.url'],
      'found tls for an upstream without it; allowed: tls with an https:// url',
    )
  }
  return { url, connectTimeout, timeout, idleTimeout, connections, tls: { ca, cert, key, servername } }
}

function named<T>(file: string | undefined, read: (file: string) => T | null): T | null {
  return file === undefined ? null : read(file)
}
