import { isFieldName } from '../../core/headers.ts'
import { normalisePath } from '../../core/route.ts'
import { isKeyHeader } from '../published.ts'
import { type Description, isObject, type Json, listOf, member, type Pointer, textOf } from './read.ts'

/** A header parameter that carries a key. */
export interface KeyHeader {
  /** As the description spells it. */
  readonly name: string
  readonly required: boolean
  readonly minLength: number | null
  readonly maxLength: number | null
  /** Where the operation itself has it, with no reference between; null: it is inherited or referred to. */
  readonly own: Pointer | null
}

export interface Operation {
  /** In capital letters. */
  readonly method: string
  /** As the description has it. */
  readonly template: string
  readonly path: RoutePath
  readonly id: string | null
  /** Its place, behind references. */
  readonly pointer: Pointer
  readonly value: Json
  readonly keys: readonly KeyHeader[]
  /** Names of its query parameters. */
  readonly queries: ReadonlySet<string>
  /** Media types of its request body, without parameters, in lower case. */
  readonly accepts: readonly string[]
  /** The server, where the description names one. */
  readonly server: string | null
}

/** Something in a description that was left out, or could be taken in more than one way. */
export interface Remark {
  /** 0: not known. */
  readonly line: number
  readonly message: string
}

export interface Operations {
  /** Those that routes are made of: POST and PATCH, and of PUT and DELETE those that declare a key. */
  readonly found: readonly Operation[]
  /** How many operations the description has, of all methods. */
  readonly all: number
  readonly remarks: readonly Remark[]
}

/** More than any API has; a route is compared with each of the others. */
const MOST = 3000
/** Parameters of one operation that are looked at. */
const PARAMETERS_MOST = 200
const METHODS = ['get', 'put', 'post', 'delete', 'options', 'head', 'patch', 'trace', 'query']
/** What changes things and is not idempotent by itself (RFC 9110 §9.2.2); */
const CHANGING = new Set(['post', 'patch'])
/** and what changes them, but needs no key. */
const REPEATABLE = new Set(['put', 'delete'])

/** Finds the operations of a description. References within it are followed, others are not. */
export function operationsOf(description: Description): Operations {
  const found: Operation[] = []
  const remarks: Remark[] = []
  let all = 0
  const remark = (pointer: Pointer, message: string): void =>
    void remarks.push({ line: description.lineOf(pointer), message })
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
      if (!CHANGING.has(name) && !(REPEATABLE.has(name) && keys.length > 0)) continue
      if (found.length === MOST) {
        remark(pointer, `more than ${MOST} operations that change something; the rest is left out`)
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
        id: textOf(member(operation, 'operationId')),
        pointer,
        value: operation,
        keys,
        queries,
        accepts: acceptedBy(description, operation, pointer, remark),
        server: textOf(member(server, 'url')),
      })
    }
  }
  return { found, all, remarks }
}

type Say = (pointer: Pointer, message: string) => void

/** Null: it leads nowhere, which is remarked. */
function followed(
  description: Description,
  written: unknown,
  place: Pointer,
  remark: Say,
): { readonly value: unknown; readonly pointer: Pointer } | null {
  const referred = description.follow(written, place)
  switch (referred.kind) {
    case 'found':
      return referred
    case 'external':
      remark(
        place,
        `$ref ${referred.ref} leads out of the file and is not followed; bundle the description first`,
      )
      return null
    case 'missing':
      remark(place, `$ref ${referred.ref} leads to nothing in this file`)
      return null
    case 'ring':
      remark(place, `$ref ${referred.ref} leads back to itself`)
      return null
  }
}

/** The operation's own go before those of its path (OpenAPI 3.1 §4.8.9.1). */
function parametersOf(
  description: Description,
  operation: Json,
  pointer: Pointer,
  item: { readonly value: unknown; readonly pointer: Pointer },
  remark: Say,
): Pick<Operation, 'keys' | 'queries'> {
  const found = new Map<string, KeyHeader>()
  const queries = new Set<string>()
  for (const [holder, at, isOwn] of [
    [operation, pointer, true],
    [item.value, item.pointer, false],
  ] as const) {
    for (const [n, written] of listOf(member(holder, 'parameters')).slice(0, PARAMETERS_MOST).entries()) {
      const place = [...at, 'parameters', String(n)]
      const parameter = followed(description, written, place, remark)?.value
      const name = textOf(member(parameter, 'name'))
      if (name === null) continue
      if (member(parameter, 'in') === 'query') queries.add(name)
      if (member(parameter, 'in') !== 'header' || !isKeyHeader(name)) continue
      if (found.has(name.toLowerCase())) continue
      const schema = followed(description, member(parameter, 'schema'), place, remark)?.value
      found.set(name.toLowerCase(), {
        name,
        required: member(parameter, 'required') === true,
        minLength: lengthOf(member(schema, 'minLength')),
        maxLength: lengthOf(member(schema, 'maxLength')),
        own: isOwn && member(written, '$ref') === undefined ? place : null,
      })
    }
  }
  return { keys: [...found.values()], queries }
}

function lengthOf(value: unknown): number | null {
  return Number.isSafeInteger(value) && (value as number) >= 1 ? (value as number) : null
}

function acceptedBy(description: Description, operation: Json, pointer: Pointer, remark: Say): string[] {
  const body = followed(description, member(operation, 'requestBody'), [...pointer, 'requestBody'], remark)
  const content = member(body?.value, 'content')
  return isObject(content)
    ? Object.keys(content).map((type) => (type.split(';', 1)[0] as string).trim().toLowerCase())
    : []
}

/** The first server of the nearest that names any. */
function serverOf(holders: readonly unknown[]): unknown {
  for (const holder of holders) {
    const [first] = listOf(member(holder, 'servers'))
    if (first !== undefined) return first
  }
  return undefined
}

/** A path of a description as a route has it. */
export interface RoutePath {
  /** `/v1/payments/:id`. */
  readonly path: string
  /** Why it matches more than the description says; null: it does not. */
  readonly wider: string | null
}

/** The path that the URL of a server puts before all others, without a slash at its end. */
export function basePathOf(server: unknown): { readonly path: string; readonly remark: string | null } {
  const url = textOf(member(server, 'url'))
  if (url === null) return { path: '', remark: null }
  const variables = member(server, 'variables')
  const open: string[] = []
  const filled = url.replace(/\{([^{}]*)\}/g, (_, name: string) => {
    const value = member(member(variables, name), 'default')
    if (typeof value !== 'string' && typeof value !== 'number') {
      open.push(name)
      return ''
    }
    return String(value)
  })
  // Relative ones count from where the description lies, which is nobody's to know here.
  const parsed = URL.parse(filled, 'http://description.invalid/')
  if (parsed === null || open.length > 0)
    return {
      path: '',
      remark: `server ${url}: ${open.length > 0 ? `no default for ${open.join(', ')}` : 'no URL'}; its path is left out of the routes`,
    }
  return { path: parsed.pathname.replace(/\/+$/, ''), remark: null }
}

/** Segments of it that are parameters become `:name`; all others are literal, in their normal form. */
export function routePathOf(written: string): RoutePath {
  const wider: string[] = []
  // A query in a path is not OpenAPI, but it is met.
  const [path = ''] = written.split(/[?#]/, 1)
  if (path !== written) wider.push('what follows ? or # counts for nothing')
  const segments = path.split('/').flatMap((segment) => {
    if (/^\{[^{}]*\}$/.test(segment)) return [`:${identifier(segment)}`]
    if (/[{}*]/.test(segment) || segment.startsWith(':')) {
      wider.push(`any segment stands for ${segment}`)
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

/** Segments of a route's path; null: any. */
export type Shape = readonly (string | null)[]

export function shapeOf(path: string): Shape {
  return path.split('/').map((segment) => (segment.startsWith(':') ? null : segment))
}

/** Whether every path that `narrow` matches is matched by `wide`, too. */
export function covers(wide: Shape, narrow: Shape): boolean {
  return (
    wide.length === narrow.length && wide.every((segment, n) => segment === null || segment === narrow[n])
  )
}

/** What tells callers apart, by the security of an operation. */
export interface CallerHint {
  /** For `scope.caller`, in the order of the description; empty: nothing that a route can look at. */
  readonly sources: readonly string[]
  /** Schemes by name, with what each is. */
  readonly schemes: readonly string[]
  /** Schemes that no header or cookie carries. */
  readonly unseen: readonly string[]
  /** Requests without credentials are let in, too. */
  readonly anonymous: boolean
}

/** What is made anew for each request: a retry would come as another caller, and be executed. */
const FLEETING = /signature|hmac|digest|nonce|timestamp/i

/** `security` of an operation goes before that of the description; an empty one takes it away. */
export function callersOf(description: Description, operation: unknown): CallerHint | null {
  const security = member(operation, 'security') ?? member(description.root, 'security')
  if (!Array.isArray(security)) return null
  const requirements = security.filter(isObject)
  const names = [...new Set(requirements.flatMap((one) => Object.keys(one)))]
  const sources = new Set<string>()
  const schemes: string[] = []
  const unseen: string[] = []
  for (const name of names) {
    const { source, what } = schemeOf(description, name)
    schemes.push(`${name} (${what})`)
    if (source === null) unseen.push(`${name} (${what})`)
    else sources.add(source)
  }
  const anonymous = requirements.length === 0 || requirements.some((one) => Object.keys(one).length === 0)
  return { sources: [...sources], schemes, unseen, anonymous }
}

function schemeOf(
  description: Description,
  name: string,
): { readonly source: string | null; readonly what: string } {
  const place = ['components', 'securitySchemes', name]
  const written = member(member(member(description.root, 'components'), 'securitySchemes'), name)
  const referred = description.follow(written, place)
  const scheme = referred.kind === 'found' ? referred.value : undefined
  const type = textOf(member(scheme, 'type'))
  switch (type) {
    case 'http':
      return { source: 'header:authorization', what: `http ${textOf(member(scheme, 'scheme')) ?? ''}`.trim() }
    case 'oauth2':
    case 'openIdConnect':
      return { source: 'header:authorization', what: type }
    case 'apiKey': {
      const place = textOf(member(scheme, 'in')) ?? 'nowhere'
      const field = textOf(member(scheme, 'name')) ?? ''
      const what = `${place} ${field}`
      if (FLEETING.test(field)) return { source: null, what: `${what}, made anew for each request` }
      if (!isFieldName(field) || (place !== 'header' && place !== 'cookie')) return { source: null, what }
      return { source: `${place}:${place === 'header' ? field.toLowerCase() : field}`, what }
    }
    case null:
      return { source: null, what: 'not described' }
    default:
      return { source: null, what: type }
  }
}
