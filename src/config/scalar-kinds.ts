import {
  formatDuration,
  formatSize,
  type Parsed,
  parseDuration,
  parsed,
  parseSize,
  refused,
} from './units.ts'

/** A kind of scalar: how the JSON Schema tells it to an editor, in words, and how its text is read. */
export interface Scalar<T> {
  readonly schema: {
    readonly type: string | readonly string[]
    readonly pattern?: string
    readonly minimum?: number
    readonly maximum?: number
  }
  /** What is allowed, where not even the type is right. */
  readonly allowed: string
  readonly parse: (text: string) => Parsed<T>
  /** The shortest text or value that {@link parse} reads as this one. Without it: the value itself. */
  print?(this: void, value: T): unknown
}

export function byPattern<T>(
  pattern: string,
  allowed: string,
  convert: (text: string) => T,
  print: (value: T) => unknown = (value) => value,
): Scalar<T> {
  const regExp = new RegExp(pattern)
  return {
    print,
    schema: { type: 'string', pattern },
    allowed,
    parse: (text) => (regExp.test(text) ? parsed(convert(text)) : refused(text, allowed)),
  }
}

export function byParser<T>(
  allowed: string,
  parse: (text: string) => Parsed<T>,
  pattern = '.',
  print: (value: T) => unknown = (value) => value,
): Scalar<T> {
  return { schema: { type: 'string', pattern }, allowed, parse, print }
}

interface Unit {
  readonly kind: string
  readonly pattern: string
  readonly parse: (text: string) => Parsed<number>
  readonly format: (value: number) => string
}

export const DURATION: Unit = {
  kind: 'a duration',
  pattern: '(ms|s|m|h|d)',
  parse: parseDuration,
  format: formatDuration,
}
export const SIZE: Unit = { kind: 'a size', pattern: '(B|KiB|MiB|GiB)', parse: parseSize, format: formatSize }

export function bounded(unit: Unit, min: number, max: number): Scalar<number> {
  const from = min > 0 ? unit.format(min) : '0'
  const units = unit.pattern.slice(1, -1).replaceAll('|', ', ')
  const allowed = `${unit.kind} of ${from} to ${unit.format(max)}, as a whole number with ${units}`
  return {
    print: unit.format,
    schema:
      min > 0
        ? { type: 'string', pattern: `^0*[1-9][0-9]*${unit.pattern}$` }
        : // A plain 0 is a number in YAML.
          { type: ['string', 'integer'], pattern: `^(0|[0-9]+${unit.pattern})$`, minimum: 0, maximum: 0 },
    allowed,
    parse: (text) => {
      const value = unit.parse(text)
      return value.ok && value.value >= min && value.value <= max ? value : refused(text, allowed)
    },
  }
}

/** `scalar`, or a word that stands for a value of its own. */
export function orWord<T, W>(scalar: Scalar<T>, word: string, value: W): Scalar<T | W> {
  return {
    schema: { ...scalar.schema, pattern: `^${word}$|${scalar.schema.pattern}` },
    allowed: `${word}, or ${scalar.allowed}`,
    print: (found) => (found === value ? word : scalar.print?.(found as T)),
    parse: (text) => {
      if (text === word) return parsed(value)
      const result = scalar.parse(text)
      return result.ok
        ? result
        : { ok: false, message: result.message.replace('; allowed: ', `; allowed: ${word}, or `) }
    },
  }
}

export function whole(min: number, max: number): Scalar<number> {
  const allowed = `a whole number, ${min} to ${max}`
  return {
    schema: { type: 'integer', minimum: min, maximum: max },
    allowed,
    parse: (text) =>
      /^\d{1,15}$/.test(text) && Number(text) >= min && Number(text) <= max
        ? parsed(Number(text))
        : refused(text, allowed),
  }
}
