import type { Expected, OutcomeTable, RoutePolicy } from '../core/policy.ts'
import type { Config } from './config.ts'
import { alternatives, type Shape, scalarOf, shapeOf, spellingKey } from './read.ts'
import { fileSchema } from './schema.ts'

/** A configuration with the names and the nesting of a file. Values are as the configuration holds them. */
export function fileForm({ warnings: _w, spelled: _s, ...config }: Config): Record<string, unknown> {
  const { admin, store, issuer, defaults, routes, ...rest } = config
  const { token, ...ownAdmin } = admin
  const { secret, ...ownStore } = store
  return {
    ...rest,
    admin: { ...ownAdmin, tokenFile: token },
    store: { ...ownStore, secretFile: secret },
    issuer: issuer && { path: issuer.path, secretFile: issuer.secret, ttl: issuer.ttl },
    defaults: policyForm(defaults),
    routes: routes.map(policyForm),
  }
}

function policyForm({ misuseStatus, excludeHeaders, scope, ...rest }: RoutePolicy): object {
  const { callerIsDefault: _, ...ownScope } = scope
  return { ...rest, scope: ownScope, misuse: { status: misuseStatus }, replay: { excludeHeaders } }
}

const ROOT = shapeOf(fileSchema)
/** The defaults of the schema: `24h` is more usual than `1d`. */
const USUAL = [...JSON.stringify(fileSchema).matchAll(/"default":"(\d+[A-Za-z]+)"/g)].map(([, text]) => text)

/** What the schema says of a property, such as `routes[pay].ttl`; undefined: nothing. */
export function shapeAt(path: string): Shape | undefined {
  const names = path.replaceAll(/\[[^\]]*\]/g, '.[]').split('.')
  return names.reduce<Shape | undefined>((shape, name) => within(shape, name), ROOT)
}

/** Of a member of a mapping, or, whatever its name, of a list. */
export function within(shape: Shape | undefined, name: string): Shape | undefined {
  if (shape === undefined) return undefined
  const { mapping, list } = alternatives(shape)
  if (mapping?.properties !== undefined && Object.hasOwn(mapping.properties, name))
    return mapping.properties[name]
  return Object.values(mapping?.patternProperties ?? {})[0] ?? list?.items
}

/**
 * A value as a file says it: a duration as the file spells it, else as the schema's default does, else in its largest unit.
 * Undefined: no scalar of the schema, so its members are looked at one by one.
 */
export function printed(
  value: unknown,
  shape: Shape | undefined,
  name: string,
  spelled: Config['spelled'],
): unknown {
  const scalar = shape && alternatives(shape).scalar
  if (shape === undefined || scalar?.$ref === undefined) return undefined
  if (typeof value === 'object' && value !== null && alternatives(shape).mapping !== undefined)
    return undefined
  const { parse, print } = scalarOf(scalar.$ref)
  if (typeof value === 'number') {
    const texts = [
      spelled.get(spellingKey(name, value)),
      String(shape.default),
      // Of 0, which may also be `off`, it says nothing.
      ...(value === 0 ? [] : [spelled.get(spellingKey('', value)), ...USUAL]),
    ]
    const isSpelling = (text = ''): boolean => {
      const read = parse(text)
      return read.ok && read.value === value
    }
    if (print !== undefined) return texts.find(isSpelling) ?? print(value)
  }
  return print?.(value)
}

/** What the configuration keeps in another form than the file: the table of outcomes, and what answers must say. */
export function unfolded(value: unknown, shape: Shape | undefined): unknown {
  if (isOutcomes(value))
    return Object.fromEntries([
      ...value.exact,
      ...[...value.class].map(([digit, action]) => [`${digit}xx`, action]),
    ])
  if (!Array.isArray(value) || shape === undefined) return value
  const { mapping, list, scalar } = alternatives(shape)
  if (list !== undefined || mapping === undefined || !value.every(isExpected)) return value
  // Nothing is expected: `identity: none`.
  if (value.length === 0 && scalar?.$ref !== undefined) return scalarOf(scalar.$ref).print?.(null)
  return Object.fromEntries(value.map((one) => [one.pointer, one.value]))
}

function isOutcomes(value: unknown): value is OutcomeTable {
  return typeof value === 'object' && value !== null && 'exact' in value && value.exact instanceof Map
}

function isExpected(value: unknown): value is Expected {
  return typeof value === 'object' && value !== null && 'pointer' in value && 'value' in value
}
