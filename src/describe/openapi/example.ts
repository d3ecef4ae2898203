import type { DescribedOperation } from './operations.ts'
import {
  arrayOrEmpty,
  type Description,
  isObject,
  type Json,
  member,
  objectAt,
  stringOrNull,
} from './read.ts'

/** A request that calls an operation, made of the description's examples, defaults and schemas. */
export interface ExampleRequest {
  /** With the query. */
  readonly path: string
  readonly mediaType: string | null
  readonly body: string | null
}

export type ReadExample =
  | { readonly ok: true; readonly example: ExampleRequest }
  | { readonly ok: false; readonly message: string }

/** Levels of a schema that are filled; it may contain itself. */
const DEPTH_MOST = 12

export function exampleOf(description: Description, operation: DescribedOperation): ReadExample {
  const { template, path, value } = operation
  if (path.wider !== null)
    return { ok: false, message: `its path ${template} cannot be filled: ${path.wider}` }
  const item = follow(description, member(objectAt(description.root, 'paths'), template))
  const parameters = [value, item]
    .flatMap((holder) => arrayOrEmpty(member(holder, 'parameters')))
    .map((one) => follow(description, one))
  const valueAt = (place: string, name: string): unknown => {
    const found = parameters.find((one) => member(one, 'in') === place && member(one, 'name') === name)
    return given(description, found) ?? valueOf(description, member(found, 'schema'))
  }
  const names = [...template.matchAll(/\{([^{}]*)\}/g)].map(([, name]) => name as string)
  const filled = names.map((name) => valueAt('path', name))
  const open = names.filter((_, n) => typeof filled[n] !== 'string' && typeof filled[n] !== 'number')
  if (open.length > 0)
    return { ok: false, message: `no example for ${open.join(', ')} in its path ${template}` }
  let n = 0
  const concrete = path.path.replaceAll(/(?<=\/):[^/]+/g, () => encodeURIComponent(String(filled[n++])))
  const query = parameters
    .filter((one) => member(one, 'in') === 'query' && member(one, 'required') === true)
    .map((one) => String(member(one, 'name')))
    .map((name) => `${encodeURIComponent(name)}=${encodeURIComponent(String(valueAt('query', name)))}`)
  const content = Object.entries(objectAt(follow(description, member(value, 'requestBody')), 'content'))
  const [mediaType, media] = content.find(([type]) => /^application\/(?:.*\+)?json\b/i.test(type)) ??
    content[0] ?? [null, null]
  const body = given(description, media) ?? valueOf(description, member(media, 'schema'))
  const text =
    typeof body === 'string' && mediaType !== null && !/json/i.test(mediaType) ? body : JSON.stringify(body)
  return {
    ok: true,
    example: {
      path: [concrete, ...(query.length === 0 ? [] : [query.join('&')])].join('?'),
      mediaType,
      body: text ?? null,
    },
  }
}

function follow(description: Description, value: unknown): unknown {
  const referred = description.follow(value, [])
  return referred.kind === 'found' ? referred.value : undefined
}

/** The example that a parameter, a media type or a schema gives. */
function given(description: Description, holder: unknown): unknown {
  const [first] = Object.values(objectAt(holder, 'examples'))
  return (
    member(holder, 'example') ??
    member(follow(description, first), 'value') ??
    arrayOrEmpty(member(holder, 'examples'))[0]
  )
}

/** Undefined: the schema says too little. */
function valueOf(description: Description, written: unknown, depth = 0): unknown {
  const schema = follow(description, written)
  if (!isObject(schema) || depth > DEPTH_MOST) return undefined
  const whole =
    given(description, schema) ??
    member(schema, 'const') ??
    member(schema, 'default') ??
    arrayOrEmpty(member(schema, 'enum'))[0]
  if (whole !== undefined) return whole
  const inside = (one: unknown): unknown => valueOf(description, one, depth + 1)
  const [first] = ['oneOf', 'anyOf'].flatMap((name) => arrayOrEmpty(member(schema, name)))
  if (first !== undefined) return inside(first)
  const parts = arrayOrEmpty(member(schema, 'allOf')).map(inside)
  const type = [member(schema, 'type')].flat().find((one) => one !== 'null')
  if (parts.length > 0 || type === 'object' || Object.hasOwn(schema, 'properties'))
    return Object.assign({}, ...parts, membersOf(schema, inside)) as Json
  if (type === 'array') return [inside(member(schema, 'items'))].filter((one) => one !== undefined)
  if (type === 'boolean') return true
  if (type === 'integer' || type === 'number') {
    const above = member(schema, 'exclusiveMinimum')
    return member(schema, 'minimum') ?? (typeof above === 'number' ? above + 1 : 1)
  }
  return type === 'string' ? textOf(schema) : undefined
}

/** The required members; all, where none is required. */
function membersOf(schema: Json, inside: (one: unknown) => unknown): Json {
  const required = new Set(arrayOrEmpty(member(schema, 'required')))
  return Object.fromEntries(
    Object.entries(objectAt(schema, 'properties'))
      .filter(
        ([name, one]) => (required.size === 0 || required.has(name)) && member(one, 'readOnly') !== true,
      )
      .map(([name, one]) => [name, inside(one)]),
  )
}

const FORMATS: Readonly<Record<string, string>> = {
  'date-time': '2026-01-01T00:00:00Z',
  date: '2026-01-01',
  uuid: '{uuid}',
  email: 'probe@example.com',
  uri: 'https://example.com/',
}

function textOf(schema: Json): string {
  const least = member(schema, 'minLength')
  const format = FORMATS[stringOrNull(member(schema, 'format')) ?? '']
  return format ?? 'probe'.padEnd(typeof least === 'number' ? Math.min(least, 1000) : 0, 'x')
}
