import { type Static, type TSchema, Type } from 'typebox'
import type { ScalarName, ScalarValue } from './scalars.ts'

/** Any scalar may come from the environment instead. */
export const ENVIRONMENT = { $ref: '#/definitions/environment' }
export const closed = { additionalProperties: false }

/** Optional, as nearly every property is. The static type is that of the value as read: a duration is a number. */
export function scalar<N extends ScalarName>(
  name: N,
  description: string,
  byDefault?: string | number | boolean,
) {
  return Type.Optional(
    Type.Unsafe<ScalarValue<N>>({
      $ref: `#/definitions/${name}`,
      description,
      ...(byDefault === undefined ? {} : { default: byDefault }),
    }),
  )
}

export function choice<const T extends string | number>(
  values: readonly T[],
  description: string,
  byDefault?: NoInfer<T>,
) {
  return Type.Optional(
    Type.Unsafe<T>({
      anyOf: [{ enum: values }, ENVIRONMENT],
      description,
      ...(byDefault === undefined ? {} : { default: byDefault }),
    }),
  )
}

export function list<N extends ScalarName>(
  name: N,
  description: string,
  byDefault: readonly string[],
  minItems = 0,
) {
  return Type.Optional(
    Type.Unsafe<readonly ScalarValue<N>[]>({
      type: 'array',
      items: { $ref: `#/definitions/${name}` },
      uniqueItems: true,
      ...(minItems > 0 ? { minItems } : {}),
      description,
      default: byDefault,
    }),
  )
}

/** A mapping that may be written short, as the value of its first property. */
export function orShort<T extends TSchema>(mapping: T, description: string) {
  const [first] = Object.values((mapping as unknown as { properties: Record<string, object> }).properties)
  return Type.Optional(Type.Unsafe<Static<T>>({ anyOf: [first, mapping], description }))
}

/** A mapping that a word turns off, so that a route can do without what `defaults` sets. Off by default. */
export function orOff<T extends TSchema>(word: 'off' | 'none', mapping: T, description: string) {
  return Type.Optional(
    Type.Unsafe<Static<T> | null>({
      anyOf: [{ $ref: `#/definitions/${word}` }, mapping],
      description,
      default: word,
    }),
  )
}
