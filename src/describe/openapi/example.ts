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
  /** Path with the query. */
  readonly path: string
  readonly mediaType: string | null
  readonly body: string | null
}

/** Levels of a schema that are filled; it may contain itself. */
const MAX_DEPTH = 12
const JSON_TYPE = /^application\/(?:.*\+)?json\b/i
const FORMATS: Readonly<Record<string, string>> = {
  'date-time': '2026-01-01T00:00:00Z',
  date: '2026-01-01',
  uuid: '{uuid}',
  email: 'probe@example.com',
  uri: 'https://example.com/',
}

/** A string: why none can be made. */
export function exampleOf(description: Description, operation: DescribedOperation): ExampleRequest | string {
  const { template, path, value } = operation
  if (path.wider !== null) return `its path ${template} cannot be filled: ${path.wider}`
  const item = follow(description, member(objectAt(description.root, 'paths'), template))
  const parameters = [value, item]
    .flatMap((holder) => arrayOrEmpty(member(holder, 'parameters')))
    .map((one) => follow(description, one))
  const found = (place: string, name: string): unknown =>
    parameters.find((one) => member(one, 'in') === place && member(one, 'name') === name)
  const names = [...template.matchAll(/\{([^{}]*)\}/g)].map(([, name]) => name as string)
  const filled = names.map((name) => {
    const parameter = found('path', name)
    return (
      stated(description, parameter) ?? stated(description, follow(description, member(parameter, 'schema')))
    )
  })
  const open = names.filter((_, n) => typeof filled[n] !== 'string' && typeof filled[n] !== 'number')
  if (open.length > 0) return `no example for ${open.join(', ')} in its path ${template}`
  let n = 0
  const concrete = path.path.replaceAll(/(?<=\/):[^/]+/g, () => encoded(filled[n++]))
  const query = parameters
    .filter((one) => member(one, 'in') === 'query' && member(one, 'required') === true)
    .map((one) => {
      const of = stated(description, one) ?? valueOf(description, member(one, 'schema'))
      return `${encoded(member(one, 'name'))}=${encoded(of)}`
    })
  const content = Object.entries(objectAt(follow(description, member(value, 'requestBody')), 'content'))
  const [mediaType = null, media] = content.find(([type]) => JSON_TYPE.test(type)) ?? content[0] ?? []
  const body = stated(description, media) ?? valueOf(description, member(media, 'schema'))
  const text = JSON_TYPE.test(mediaType ?? '') ? JSON.stringify(body) : stringOrNull(body)
  const parts = query.length === 0 ? [concrete] : [concrete, query.join('&')]
  return { path: parts.join('?'), mediaType, body: text ?? null }
}

function encoded(value: unknown): string {
  const text = typeof value === 'string' ? value : (JSON.stringify(value) ?? '')
  return encodeURIComponent(text.toWellFormed())
}

function follow(description: Description, value: unknown): unknown {
  const referred = description.follow(value, [])
  return referred.kind === 'found' ? referred.value : undefined
}

/** The example or default that a parameter, a media type or a schema states. */
function stated(description: Description, holder: unknown): unknown {
  const [first] = Object.values(objectAt(holder, 'examples'))
  return (
    member(holder, 'example') ??
    member(follow(description, first), 'value') ??
    arrayOrEmpty(member(holder, 'examples'))[0] ??
    member(holder, 'const') ??
    member(holder, 'default') ??
    arrayOrEmpty(member(holder, 'enum'))[0]
  )
}

/** Undefined: the schema says too little. `isTop`: if no member is required, optional ones are filled. */
function valueOf(description: Description, written: unknown, depth = 0, isTop = true): unknown {
  const schema = follow(description, written)
  if (!isObject(schema) || depth > MAX_DEPTH) return undefined
  const whole = stated(description, schema)
  if (whole !== undefined) return whole
  const part = (one: unknown): unknown => valueOf(description, one, depth + 1, isTop)
  const inside = (one: unknown): unknown => valueOf(description, one, depth + 1, false)
  const [first] = ['oneOf', 'anyOf'].flatMap((name) => arrayOrEmpty(member(schema, name)))
  if (first !== undefined) return part(first)
  const parts = arrayOrEmpty(member(schema, 'allOf')).map(part)
  const type = [member(schema, 'type')].flat().find((one) => one !== 'null')
  if (parts.length > 0 || type === 'object' || Object.hasOwn(schema, 'properties')) {
    const required = new Set(arrayOrEmpty(member(schema, 'required')))
    const members = Object.entries(objectAt(schema, 'properties'))
      .filter(([name]) => required.has(name) || (isTop && required.size === 0))
      .filter(([, one]) => member(one, 'readOnly') !== true)
      .map(([name, one]) => [name, inside(one)])
    return Object.assign({}, ...parts, Object.fromEntries(members)) as Json
  }
  if (type === 'array') return [inside(member(schema, 'items'))].filter((one) => one !== undefined)
  if (type === 'boolean') return true
  if (type === 'integer' || type === 'number') {
    const above = member(schema, 'exclusiveMinimum')
    return member(schema, 'minimum') ?? (typeof above === 'number' ? above + 1 : 1)
  }
  if (type !== 'string') return undefined
  const least = member(schema, 'minLength')
  const format = FORMATS[stringOrNull(member(schema, 'format')) ?? '']
  return format ?? 'probe'.padEnd(typeof least === 'number' ? Math.min(least, 1000) : 0, 'x')
}
