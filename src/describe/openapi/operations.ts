import { isFieldName } from '../../core/headers.ts'
import { normalisePath } from '../../core/route.ts'
import { isKeyHeader } from '../published.ts'
import {
  arrayOrEmpty,
  type Description,
  isObject,
  type Json,
  member,
  objectAt,
  type Pointer,
  stringOrNull,
} from './read.ts'

/** A header parameter that carries a key. */
export interface KeyHeader {
  /** As the description spells it. */
  readonly name: string
  readonly required: boolean
  readonly minLength: number | null
  readonly maxLength: number | null
  /** Its place in the operation itself; null: inherited, or behind a reference. */
  readonly own: Pointer | null
}

export interface DescribedOperation {
  /** Upper case. */
  readonly method: string
  /** The path as in the description. */
  readonly template: string
  readonly path: RoutePath
  readonly id: string | null
  /** Where it is, behind references. */
  readonly pointer: Pointer
  readonly value: Json
  readonly keys: readonly KeyHeader[]
  /** Names of its query parameters. */
  readonly queries: ReadonlySet<string>
  /** Media types of its request body, without parameters, lower case. */
  readonly accepts: readonly string[]
  /** URL of its first server. */
  readonly server: string | null
}

/** A remark on a part that is ambiguous or omitted. */
export interface Remark {
  /** 0: unknown. */
  readonly line: number
  readonly message: string
}

export interface DescribedOperations {
  /** Operations that become routes: POST and PATCH, and each PUT or DELETE that declares a key. */
  readonly found: readonly DescribedOperation[]
  /** Number of operations of any method. */
  readonly all: number
  readonly remarks: readonly Remark[]
}

/** No API has more, and each route is compared with every other. */
const MAX_OPERATIONS = 3000
const MAX_PARAMETERS = 200
const METHODS = ['get', 'put', 'post', 'delete', 'options', 'head', 'patch', 'trace', 'query']
/** Not idempotent by definition (RFC 9110 §9.2.2). */
const NEEDS_KEY = new Set(['post', 'patch'])
const MAY_TAKE_KEY = new Set(['put', 'delete'])

/** Finds the operations of a description. */
export function operationsOf(description: Description): DescribedOperations {
  const found: DescribedOperation[] = []
  const remarks: Remark[] = []
  let all = 0
  const remark: AddRemarkAt = (pointer, message) =>
    remarks.push({ line: description.lineOf(pointer), message })
  const paths = member(description.root, 'paths')
  if (paths !== undefined && !isObject(paths)) remark(['paths'], 'paths: found no mapping')
  for (const [template, written] of Object.entries(isObject(paths) ? paths : {})) {
    const place = ['paths', template]
    if (!template.startsWith('/')) {
      if (!template.startsWith('x-')) remark(place, `${template}: a path begins with /; left out`)
      continue
    }
    const item = followed(description, written, place, remark)
    if (item === null) continue
    for (const name of METHODS) {
      const operation = member(item.value, name)
      if (operation === undefined) continue
      all++
      const pointer = [...item.pointer, name]
      if (!isObject(operation)) {
        remark(pointer, `${name.toUpperCase()} ${template}: found no mapping; left out`)
        continue
      }
      const { keys, queries } = parametersOf(description, operation, pointer, item, remark)
      if (!NEEDS_KEY.has(name) && !(MAY_TAKE_KEY.has(name) && keys.length > 0)) continue
      if (found.length === MAX_OPERATIONS) {
        remark(pointer, `more than ${MAX_OPERATIONS} operations that change something; the rest is left out`)
        return { found, all, remarks }
      }
      const server = serverOf([operation, item.value, description.root])
      const base = basePathOf(server)
      if (base.remark !== null && !remarks.some(({ message }) => message === base.remark))
        remark(['servers'], base.remark)
      found.push({
        method: name.toUpperCase(),
        template,
        path: routePathOf(`${base.path}${template}`),
        id: stringOrNull(member(operation, 'operationId')),
        pointer,
        value: operation,
        keys,
        queries,
        accepts: acceptedBy(description, operation, pointer, remark),
        server: stringOrNull(member(server, 'url')),
      })
    }
  }
  return { found, all, remarks }
}

type AddRemarkAt = (pointer: Pointer, message: string) => void
interface Located {
  readonly value: unknown
  readonly pointer: Pointer
}

/** Null: the reference points to nothing, as a remark says. */
function followed(
  description: Description,
  written: unknown,
  place: Pointer,
  remark: AddRemarkAt,
): Located | null {
  const referred = description.follow(written, place)
  if (referred.kind === 'found') return referred
  const why = {
    external: 'points outside the file and is not followed; bundle the description first',
    missing: 'points to nothing in this file',
    ring: 'points back to itself',
  }[referred.kind]
  remark(place, `$ref ${referred.ref} ${why}`)
  return null
}

/** An operation's parameters take precedence over those of its path (OpenAPI 3.1 §4.8.9.1). */
function parametersOf(
  description: Description,
  operation: Json,
  pointer: Pointer,
  item: Located,
  remark: AddRemarkAt,
): Pick<DescribedOperation, 'keys' | 'queries'> {
  const keys = new Map<string, KeyHeader>()
  const queries = new Set<string>()
  for (const holder of [{ value: operation, pointer }, item]) {
    for (const [n, written] of arrayOrEmpty(member(holder.value, 'parameters'))
      .slice(0, MAX_PARAMETERS)
      .entries()) {
      const place = [...holder.pointer, 'parameters', String(n)]
      const parameter = followed(description, written, place, remark)?.value
      const name = stringOrNull(member(parameter, 'name'))
      if (name === null) continue
      if (member(parameter, 'in') === 'query') queries.add(name)
      if (member(parameter, 'in') !== 'header' || !isKeyHeader(name) || keys.has(name.toLowerCase())) continue
      const schema = followed(description, member(parameter, 'schema'), place, remark)?.value
      keys.set(name.toLowerCase(), {
        name,
        required: member(parameter, 'required') === true,
        minLength: lengthOf(member(schema, 'minLength')),
        maxLength: lengthOf(member(schema, 'maxLength')),
        own: holder !== item && member(written, '$ref') === undefined ? place : null,
      })
    }
  }
  return { keys: [...keys.values()], queries }
}

function lengthOf(value: unknown): number | null {
  return Number.isSafeInteger(value) && (value as number) >= 1 ? (value as number) : null
}

function acceptedBy(
  description: Description,
  operation: Json,
  pointer: Pointer,
  remark: AddRemarkAt,
): string[] {
  const body = followed(description, member(operation, 'requestBody'), [...pointer, 'requestBody'], remark)
  return Object.keys(objectAt(body?.value, 'content')).map((type) =>
    (type.split(';', 1)[0] as string).trim().toLowerCase(),
  )
}

/** The first server of the innermost level that names one. */
function serverOf(holders: readonly unknown[]): unknown {
  return holders
    .map((holder) => arrayOrEmpty(member(holder, 'servers'))[0])
    .find((first) => first !== undefined)
}

/** A path of a description as a route's pattern. */
export interface RoutePath {
  /** `/v1/payments/:id`. */
  readonly path: string
  /** Why it matches more than the description says; null: it does not. */
  readonly wider: string | null
}

/** The path prefix of a server's URL, without a trailing slash. */
function basePathOf(server: unknown): { readonly path: string; readonly remark: string | null } {
  const url = stringOrNull(member(server, 'url'))
  if (url === null) return { path: '', remark: null }
  const variables = member(server, 'variables')
  const open: string[] = []
  const filled = url.replace(/\{([^{}]*)\}/g, (_, name: string) => {
    const value = member(member(variables, name), 'default')
    if (typeof value === 'string' || typeof value === 'number') return String(value)
    open.push(name)
    return ''
  })
  // A relative URL depends on where the description is published, which is unknown here.
  const parsed = URL.parse(filled, 'http://description.invalid/')
  if (parsed !== null && open.length === 0) return { path: parsed.pathname.replace(/\/+$/, ''), remark: null }
  const why = open.length > 0 ? `no default for ${open.join(', ')}` : 'no URL'
  return { path: '', remark: `server ${url}: ${why}; its path is left out of the routes` }
}

/** Parameters become `:name`; literal segments are normalised. */
function routePathOf(written: string): RoutePath {
  const wider: string[] = []
  // Not OpenAPI, but seen in the wild: a query in a path.
  const [path = ''] = written.split(/[?#]/, 1)
  if (path !== written) wider.push('everything after ? or # is ignored')
  const segments = path.split('/').flatMap((segment) => {
    if (/^\{[^{}]*\}$/.test(segment)) return [`:${identifier(segment)}`]
    if (/[{}*]/.test(segment) || segment.startsWith(':')) {
      wider.push(`${segment} matches any segment`)
      return [`:${identifier(segment)}`]
    }
    const encoded = segment.toWellFormed().replace(/[^\x21-\x7e]+|\\/g, encodeURIComponent)
    const normal = normalisePath(`/${encoded}`).slice(1)
    return normal === '' ? [] : [normal]
  })
  return { path: `/${segments.join('/')}`, wider: wider.length === 0 ? null : wider.join('; ') }
}

function identifier(text: string): string {
  const name = text.replace(/[^A-Za-z0-9]+/g, '_').replace(/^_+|_+$/g, '')
  return /^[A-Za-z]/.test(name) ? name : `p_${name}`
}

/** What identifies callers, by the security of an operation. */
export interface CallerHint {
  /** For `scope.caller`, in the order of the description. */
  readonly sources: readonly string[]
  /** `name (kind)` of each scheme. */
  readonly schemes: readonly string[]
  /** The same for schemes that use no header or cookie. */
  readonly unseen: readonly string[]
  /** Requests without credentials are accepted, too. */
  readonly anonymous: boolean
}

/** New in each request: a retry would look like another caller and execute. */
const PER_REQUEST = /signature|hmac|digest|nonce|timestamp/i

/** `security` of an operation replaces that of the description; null: neither has one. */
export function callersOf(description: Description, operation: unknown): CallerHint | null {
  const security = member(operation, 'security') ?? member(description.root, 'security')
  if (!Array.isArray(security)) return null
  const requirements = security.filter(isObject)
  const names = [...new Set(requirements.flatMap((one) => Object.keys(one)))]
  const all = names.map((name) => {
    const { source, what } = schemeOf(description, name)
    return { source, text: `${name} (${what})` }
  })
  return {
    sources: [...new Set(all.flatMap(({ source }) => source ?? []))],
    schemes: all.map(({ text }) => text),
    unseen: all.filter(({ source }) => source === null).map(({ text }) => text),
    anonymous: requirements.length === 0 || requirements.some((one) => Object.keys(one).length === 0),
  }
}

/** `source`: for `scope.caller`; null: it cannot read it. */
function schemeOf(
  description: Description,
  name: string,
): { readonly source: string | null; readonly what: string } {
  const written = member(member(member(description.root, 'components'), 'securitySchemes'), name)
  const referred = description.follow(written, ['components', 'securitySchemes', name])
  const scheme = referred.kind === 'found' ? referred.value : undefined
  const text = (property: string): string | null => stringOrNull(member(scheme, property))
  const type = text('type')
  if (type === 'oauth2' || type === 'openIdConnect') return { source: 'header:authorization', what: type }
  if (type === 'http') return { source: 'header:authorization', what: `http ${text('scheme') ?? ''}`.trim() }
  if (type !== 'apiKey') return { source: null, what: type ?? 'not described' }
  const place = text('in') ?? 'nowhere'
  const field = text('name') ?? ''
  const what = `${place} ${field}`
  if (PER_REQUEST.test(field)) return { source: null, what: `${what}, new in each request` }
  if (!isFieldName(field) || (place !== 'header' && place !== 'cookie')) return { source: null, what }
  return { source: `${place}:${place === 'header' ? field.toLowerCase() : field}`, what }
}
