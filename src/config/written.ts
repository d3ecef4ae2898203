import type { Expected, OutcomeRule, RoutePolicy } from '../core/policy.ts'
import type { Config } from './config.ts'
import { FILE } from './properties.ts'
import { memberOf, type PropertyRow, scalarOf } from './rows.ts'

const MASK = '***'
/** Members whose values are secrets, or may hold some. */
const SECRET = /^(?:token(?:File)?|secret(?:File)?|keyFile|password)$/

/** The configuration in force as a file, without secrets (contract §12 `/v1/config`). */
export function effective(config: Config): Record<string, unknown> {
  return shown(fileForm(config), [], FILE) as Record<string, unknown>
}

/** One value on one line. */
export function valueText(value: unknown, path: string): string {
  const written = shown(value ?? null, path.split('.'), rowAt(path))
  if (written === null) return 'none'
  return typeof written === 'string' && written !== '' ? written : JSON.stringify(written)
}

/** The configuration with the names and nesting of a file. */
export function fileForm({ warnings: _w, ...config }: Config): Record<string, unknown> {
  const { store, issuer, grpc, defaults, routes, ...rest } = config
  const { secret, encryption, url, cache, ...ownStore } = store
  const keys = encryption.keys.map(({ id, key }) => ({ id, file: key }))
  const sealing = keys.length === 0 ? null : { keys }
  const tiers = cache === undefined ? { url } : { url: 'tiered:', primary: { url }, cache }
  return {
    ...rest,
    store: { ...tiers, ...ownStore, secretFile: secret, encryption: sealing },
    grpc: { descriptors: grpc.descriptors?.bytes ?? null },
    issuer: issuer && { path: issuer.path, secretFile: issuer.secret, ttl: issuer.ttl },
    defaults: policyForm(defaults),
    routes: routes.map(policyForm),
  }
}

export function policyForm(policy: RoutePolicy): object {
  const { misuseStatus, excludeHeaders, scope, ttlBody, match, ...rest } = policy
  const { methods, path, exact, grpc = null, ...folding } = match
  const { callerIsDefault: _, ...ownScope } = scope
  return {
    ...rest,
    match: grpc === null ? { methods, path, exact, ...folding } : { grpc, ...folding },
    scope: ownScope,
    ttl: ttlBody === null ? rest.ttl : { record: rest.ttl, body: ttlBody },
    misuse: { status: misuseStatus },
    replay: { excludeHeaders },
  }
}

/** The row of a property, such as `routes[pay].ttl`; undefined: there is none. */
export function rowAt(path: string): PropertyRow | undefined {
  const names = path.replaceAll(/\[[^\]]*\]/g, '.[]').split('.')
  return names.reduce<PropertyRow | undefined>(memberOf, FILE)
}

function shown(value: unknown, path: readonly string[], row: PropertyRow | undefined): unknown {
  const name = path.at(-1) ?? ''
  const isSecret = value instanceof Uint8Array || SECRET.test(name)
  // Contents of files are secrets.
  if (isSecret && value !== null && typeof value !== 'boolean' && typeof value !== 'number') return MASK
  const text = printed(value, row)
  if (text !== undefined) return isUrl(text) ? withoutSecrets(text) : text
  const members = unfolded(value, row)
  if (typeof members !== 'object' || members === null)
    return isUrl(members) ? withoutSecrets(members) : (members ?? null)
  const inner = (key: string, one: unknown): unknown => shown(one, [...path, key], memberOf(row, key))
  if (members instanceof Set || Array.isArray(members)) {
    const items = [...(members as Iterable<unknown>)]
    // Status queries carry the proxy's own credentials.
    if (path.includes('reconcile') && name === 'headers')
      return Object.fromEntries(items.flatMap((one, n) => (n % 2 === 0 ? [[String(one), MASK]] : [])))
    return items.map((one) => inner('[]', one))
  }
  return Object.fromEntries(Object.entries(members).map(([key, one]) => [key, inner(key, one)]))
}

/** A value as a file would write it; undefined: not a scalar. */
function printed(value: unknown, row: PropertyRow | undefined): unknown {
  const scalar = row && scalarOf(row)
  if (row === undefined || scalar == null) return undefined
  const isMembers = typeof value === 'object' && value !== null
  // Besides a word, a list, a mapping or a group is possible.
  if (isMembers && (row.group !== undefined || row.map !== undefined || row.scalar === 'none'))
    return undefined
  return scalar.print?.(value)
}

/** Values that the configuration holds in another form than the file: outcomes, and what responses must contain. */
function unfolded(value: unknown, row: PropertyRow | undefined): unknown {
  if (!Array.isArray(value) || row?.map === undefined) return value
  if (row.list !== undefined) return outcomesForm(value as OutcomeRule[])
  if (!value.every(isExpected)) return value
  // An empty list: `identity: none`.
  if (value.length === 0 && row.scalar !== undefined) return row.scalar
  return Object.fromEntries(value.map((one) => [one.pointer, one.value]))
}

/** A mapping, unless some rules have conditions. */
function outcomesForm(rules: readonly OutcomeRule[]): object {
  if (rules.every(({ when }) => when.length === 0))
    return Object.fromEntries(rules.map((rule) => [statusText(rule), rule.outcome]))
  return rules.map(({ when, ...rule }) => ({
    status: statusText(rule),
    ...(when.length === 0 ? {} : { when }),
    outcome: rule.outcome,
  }))
}

/** As a file names it: `503`, `5xx`. */
export function statusText({ status }: Pick<OutcomeRule, 'status'>): string {
  return typeof status === 'number' && status < 10 ? `${status}xx` : `${status}`
}

function isExpected(value: unknown): value is Expected {
  return typeof value === 'object' && value !== null && 'pointer' in value && 'value' in value
}

function isUrl(value: unknown): value is string {
  return typeof value === 'string' && /^(?:[a-z][a-z0-9+.-]*:\/)?\//i.test(value)
}

/** Masks user, password and query values, which may be tokens; not `{key}`, a placeholder. */
function withoutSecrets(url: string): string {
  const [base = '', query] = url.split(/\?(.*)/s, 2)
  const shownBase = base.replace(/^([^/]*\/\/)[^/]*@/, `$1${MASK}@`)
  if (query === undefined) return shownBase
  const pairs = query.split('&').map((pair) => pair.replace(/=(?!\{:?\w+\}$).*$/s, `=${MASK}`))
  return `${shownBase}?${pairs.map((pair) => (pair.includes('=') ? pair : MASK)).join('&')}`
}
