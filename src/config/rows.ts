import type { Profile, RoutePolicy } from '../core/policy.ts'
import { SCALARS, type ScalarName, type ScalarValue } from './scalars.ts'
import type { Scalar } from './units.ts'

/**
 * How a change of a property takes effect: `live`, with the next request; `restart`; or `identifies`, which needs a restart and
 * care: a retry would miss the record of its first request, or find another's.
 */
export type ReloadRule = 'live' | 'restart' | 'identifies'

export type Reload =
  | ReloadRule
  /** For a route's property; other changes are live. */
  | {
      readonly effect: 'identifies'
      readonly when: (before: RoutePolicy, after: RoutePolicy) => boolean
    }
  /** For a property outside routes whose presence may not change without a restart; other changes are live. */
  | { readonly effect: 'restart'; readonly when: (before: unknown, after: unknown) => boolean }
  /** For a property outside routes that is part of some routes' record ids. */
  | { readonly effect: 'restart'; readonly identifiesFor: (policy: RoutePolicy) => boolean }

type PropertyValue = string | number | boolean | readonly string[]

/** No default: the value is `null`, or derived from another one. */
export const unset = null
/** Required if its parent is written. */
export const required = Symbol('required')

interface ByProfile {
  readonly byDefault: PropertyValue
  readonly profiles: Readonly<Partial<Record<Profile, string | number>>>
}

/** As a file writes them. Other profiles have the value of `standard`. */
export function byProfile(standard: string | number, profiles: ByProfile['profiles']): ByProfile {
  return { byDefault: standard, profiles }
}

/**
 * One property: the forms that its value may have (scalar, list, mapping; several if there is a short form), its default, and so
 * on. `Written`: the type of the value as read; `Filled`: with its default.
 */
export interface PropertyRow<Written = unknown, Filled = unknown> {
  /** One of {@link SCALARS}, or a choice of values. */
  readonly scalar?: ScalarName | readonly (string | number)[]
  readonly list?: { readonly items: PropertyRow; readonly min: number; readonly unique: boolean }
  /** A mapping of these properties. */
  readonly group?: Rows
  /** A mapping whose names the file chooses. */
  readonly map?: { readonly names: string; readonly what: string; readonly values: PropertyRow }
  readonly byDefault?: PropertyValue | typeof unset | typeof required
  /** Profiles with another default. */
  readonly profiles?: ByProfile['profiles']
  readonly help?: string
  readonly reload?: Reload
  /** A group compared as one value when a configuration changes. */
  readonly whole?: boolean
  /** Names that a user may expect in the group, and why they are missing. */
  readonly refused?: Readonly<Record<string, string>>
  /** Types only. */
  readonly written?: Written
  readonly filled?: Filled
}

export type Rows = Readonly<Record<string, PropertyRow>>

export type WrittenIn<R extends Rows> = {
  readonly [K in keyof R]?: R[K] extends PropertyRow<infer W> ? W : never
}
export type FilledIn<R extends Rows> = {
  readonly [K in keyof R]: R[K] extends PropertyRow<unknown, infer F> ? F : never
}

type ValueForm = ScalarName | readonly (string | number)[] | PropertyRow
type ValueOf<F extends ValueForm> = F extends ScalarName
  ? ScalarValue<F>
  : F extends readonly (infer W)[]
    ? W
    : F extends PropertyRow<infer W>
      ? W
      : never

/** `form`: the name of a scalar, a choice of values, or the result of {@link list} or {@link map}. */
export function row<
  const F extends ValueForm,
  const D extends PropertyValue | ByProfile | typeof unset | typeof required,
>(
  form: F,
  byDefault: D,
  reload: Reload,
  help: string,
): PropertyRow<ValueOf<F>, D extends null ? ValueOf<F> | null : ValueOf<F>> {
  const what =
    typeof form === 'string' || Array.isArray(form) ? { scalar: form as ScalarName } : (form as PropertyRow)
  const isByProfile = typeof byDefault === 'object' && byDefault !== null && 'profiles' in byDefault
  const defaults = (isByProfile ? byDefault : { byDefault }) as Pick<PropertyRow, 'byDefault' | 'profiles'>
  return { ...what, ...defaults, reload, help } as PropertyRow<ValueOf<F>, ValueOf<F>>
}

export function list<N extends ScalarName>(of: N, min = 0): PropertyRow<readonly ScalarValue<N>[]> {
  return { list: { items: { scalar: of }, min, unique: true } }
}

/** `one`: the scalar that reads a single item as a list. */
export function oneOrList<N extends ScalarName>(one: N, of: ScalarName): PropertyRow<ScalarValue<N>> {
  return { ...list(of, 1), scalar: one } as PropertyRow<ScalarValue<N>>
}

/** `names`: a pattern; `what`: the same in words. */
export function map<const F extends ValueForm>(
  names: string,
  what: string,
  values: F,
): PropertyRow<Readonly<Record<string, ValueOf<F>>>> {
  return { map: { names, what, values: { scalar: values as ScalarName } } }
}

/** Or a list of mappings. */
export function orListOf<W, R extends Rows>(
  rows: R,
  what: PropertyRow<W>,
): PropertyRow<W | readonly WrittenIn<R>[]> {
  return { ...what, list: { items: { group: rows }, min: 1, unique: false } }
}

/** Also accepts a word, which reads as null. */
export function orWord<W>(word: 'off' | 'none', what: PropertyRow<W>): PropertyRow<W | null> {
  return { ...what, scalar: word }
}

interface GroupOptions {
  readonly help?: string
  /** May be written as the value of its first property: `key: required`. */
  readonly short?: true
  readonly whole?: true
  readonly byDefault?: typeof required
  readonly refused?: Readonly<Record<string, string>>
}

export function group<R extends Rows>(
  rows: R,
  { short, ...options }: GroupOptions = {},
): PropertyRow<WrittenIn<R>, FilledIn<R>> {
  const first = Object.values(rows)[0] as PropertyRow
  return { group: rows, ...(short && first.scalar !== undefined ? { scalar: first.scalar } : {}), ...options }
}

/** A group that `word` turns off, so that a route can undo what `defaults` sets. Off by default. */
export function orOff<R extends Rows>(
  word: 'off' | 'none',
  rows: R,
  help: string,
): PropertyRow<WrittenIn<R> | null, FilledIn<R> | null> {
  return { ...group(rows, { help, whole: true }), scalar: word, byDefault: word }
}

export function groupOrList<R extends Rows>(
  rows: R,
  help: string,
): PropertyRow<WrittenIn<R> | readonly WrittenIn<R>[]> {
  return { group: rows, list: { items: { group: rows }, min: 1, unique: false }, help }
}

export function listOfGroups<R extends Rows>(
  rows: R,
  help: string,
  min = 0,
): PropertyRow<readonly WrittenIn<R>[]> {
  return { list: { items: group(rows), min, unique: false }, help }
}

/** The kind of scalar; null: a choice of values. */
export function scalarOf({ scalar }: PropertyRow): Scalar<unknown> | null {
  return typeof scalar === 'string' ? SCALARS[scalar] : null
}

/** The row of a member of a mapping, or, by the name `[]`, of a list. */
export function memberOf(row: PropertyRow | undefined, name: string): PropertyRow | undefined {
  if (name === '[]') return row?.list?.items
  if (row?.group !== undefined && Object.hasOwn(row.group, name)) return row.group[name]
  return row?.map?.values
}

/** The value of a property that is not written, as the reader would return it. */
export function defaultOf(row: PropertyRow, profile: Profile = 'standard'): unknown {
  const { byDefault, group: rows, list: of, scalar } = row
  if (byDefault === undefined && rows !== undefined) return defaultsOf(rows, profile)
  const written = row.profiles?.[profile] ?? byDefault
  if (written == null || written === required) return null
  if (Array.isArray(written)) return written.map((byItem) => defaultOf({ ...of?.items, byDefault: byItem }))
  const read = scalarOf(row)?.parse(String(written))
  if (read?.ok ?? (scalar as readonly unknown[]).includes(written)) return read?.ok ? read.value : written
  throw new Error(`${String(written)} is not a value of its row`)
}

export function defaultsOf(rows: Rows, profile?: Profile): Record<string, unknown> {
  return Object.fromEntries(Object.entries(rows).map(([name, row]) => [name, defaultOf(row, profile)]))
}

export function isMapping(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && Object.getPrototypeOf(value) === Object.prototype
}

/**
 * `above` over `below`: mappings are merged, anything else is replaced. With its `row`, a mapping over one that was turned off
 * starts from the defaults of its members.
 */
export function overlay(below: unknown, above: unknown, row?: PropertyRow): unknown {
  const known = row?.group
  if (!isMapping(above) || !(isMapping(below) || known !== undefined)) return above
  const base = isMapping(below) ? below : defaultsOf(known ?? {})
  const over = Object.entries(above).map(([name, value]) => [
    name,
    overlay(Object.hasOwn(base, name) ? base[name] : undefined, value, known?.[name]),
  ])
  return { ...base, ...Object.fromEntries(over) }
}

const ENVIRONMENT = { $ref: '#/definitions/environment' }

/** The text of `schema/idempotency-proxy.schema.json` and of `idempotency-proxy schema`. */
export function jsonSchema(file: PropertyRow): string {
  const definitions = Object.entries(SCALARS).map(([name, { schema, allowed }]) => [
    name,
    { anyOf: [schema, ENVIRONMENT], description: allowed },
  ])
  const document = {
    $schema: 'http://json-schema.org/draft-07/schema#',
    title: 'Configuration of idempotency-proxy',
    ...schemaOf(file),
    definitions: {
      ...Object.fromEntries(definitions),
      environment: {
        type: 'string',
        pattern: '\\$\\{',
        description: '`${NAME}` or `${NAME:-default}` from the environment',
      },
    },
  }
  return `${JSON.stringify(document, null, 2)}\n`
}

function schemaOf(row: PropertyRow): object {
  const { scalar, list: of, group: rows, map: made, byDefault, help } = row
  const forms: object[] = []
  if (scalar !== undefined)
    forms.push(
      typeof scalar === 'string'
        ? { $ref: `#/definitions/${scalar}` }
        : { anyOf: [{ enum: scalar }, ENVIRONMENT] },
    )
  if (rows !== undefined) {
    const properties = Object.entries(rows).map(([name, member]) => [name, schemaOf(member)])
    const needed = requiredIn(rows)
    forms.push({
      type: 'object',
      properties: Object.fromEntries(properties),
      ...(needed.length > 0 ? { required: needed } : {}),
      additionalProperties: false,
    })
  }
  if (made !== undefined)
    forms.push({
      type: 'object',
      patternProperties: { [made.names]: schemaOf(made.values) },
      additionalProperties: false,
      $comment: made.what,
    })
  if (of !== undefined)
    forms.push({
      type: 'array',
      items: schemaOf(of.items),
      ...(of.unique ? { uniqueItems: true } : {}),
      ...(of.min > 0 ? { minItems: of.min } : {}),
    })
  return {
    ...(forms.length === 1 ? forms[0] : { anyOf: forms }),
    ...(help === undefined ? {} : { description: propertyHelp(row) }),
    ...(byDefault == null || byDefault === required ? {} : { default: byDefault }),
  }
}

/** What a property is for, with the defaults of profiles. */
export function propertyHelp({ help = '', profiles = {} }: PropertyRow): string {
  const others = Object.entries(profiles).map(([profile, value]) => ` Profile \`${profile}\`: ${value}.`)
  return `${help}${others.join('')}`
}

/** Names that must be written. */
export function requiredIn(rows: Rows): string[] {
  return Object.keys(rows).filter((name) => (rows[name] as PropertyRow).byDefault === required)
}
