import type { Millis } from '../core/record.ts'

/** The value of a text, or a sentence that says what was found and what is allowed. */
export type Parsed<T> =
  | { readonly ok: true; readonly value: T }
  | { readonly ok: false; readonly message: string }

export function parsed<T>(value: T): Parsed<T> {
  return { ok: true, value }
}

export function refused(text: string, allowed: string): { readonly ok: false; readonly message: string } {
  return { ok: false, message: `found ${/^\d+$/.test(text) ? text : quote(text)}; allowed: ${allowed}` }
}

/** A text as an error shows it: short, on one line, without the credentials of a URL, however they are written. */
export function quote(text: string): string {
  const masked = text.replace(/\/\/.*@/s, '//***@')
  return JSON.stringify(masked.length > 80 ? `${masked.slice(0, 77)}...` : masked)
}

/** A kind of scalar: how the JSON Schema describes it, what is allowed in words, and how its text is read. */
export interface Scalar<T> {
  readonly schema: {
    readonly type: string | readonly string[]
    readonly pattern?: string
    readonly minimum?: number
    readonly maximum?: number
  }
  readonly allowed: string
  readonly parse: (text: string) => Parsed<T>
  /** The shortest text or value that {@link parse} reads as this one. Without it: the value itself. */
  print?(this: void, value: T): unknown
}

/** `pattern`: what an editor can check of it. */
export function byParser<T>(
  allowed: string,
  pattern: string,
  parse: (text: string) => Parsed<T>,
  print: (value: T) => unknown = (value) => value,
): Scalar<T> {
  return { schema: { type: 'string', pattern }, allowed, parse, print }
}

/** A text that is kept as it is. */
export function byTest(allowed: string, pattern: string, test: (text: string) => boolean): Scalar<string> {
  return byParser(allowed, pattern, (text) => (test(text) ? parsed(text) : refused(text, allowed)))
}

const DURATION_UNITS = { ms: 1, s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000 }
const SIZE_UNITS = { B: 1, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 }

/** `250ms`, `30s`, `5m`, `24h`, `7d`; a plain `0` needs no unit. */
export function parseDuration(text: string): Parsed<Millis> {
  return withUnit(
    text,
    DURATION_UNITS,
    'a duration: a whole number with ms, s, m, h or d, such as 250ms, 30s, 24h',
  )
}

/** `512B`, `64KiB`, `1MiB`, `2GiB`; a plain `0` needs no unit. */
export function parseSize(text: string): Parsed<number> {
  return withUnit(text, SIZE_UNITS, 'a size: a whole number with B, KiB, MiB or GiB, such as 64KiB, 1MiB')
}

function withUnit(text: string, units: Readonly<Record<string, number>>, allowed: string): Parsed<number> {
  if (text === '0') return parsed(0)
  const [, digits = '', unit = ''] = /^(\d+)([A-Za-z]+)$/.exec(text) ?? []
  const factor = Object.hasOwn(units, unit) ? units[unit] : undefined
  const value = Number(digits) * (factor ?? 0)
  if (digits === '' || factor === undefined || !Number.isSafeInteger(value)) return refused(text, allowed)
  return parsed(value)
}

export function formatDuration(value: Millis): string {
  return inLargestUnit(value, DURATION_UNITS, 'ms')
}

export function formatSize(value: number): string {
  return inLargestUnit(value, SIZE_UNITS, 'B')
}

function inLargestUnit(value: number, units: Readonly<Record<string, number>>, smallest: string): string {
  const largest = Object.entries(units).findLast(([, by]) => value >= by && value % by === 0)
  const [unit, factor] = largest ?? [smallest, 1]
  return `${value / factor}${unit}`
}

export function duration(min: Millis, max: Millis): Scalar<Millis> {
  return quantity('a duration', DURATION_UNITS, parseDuration, formatDuration, min, max)
}

export function size(min: number, max: number): Scalar<number> {
  return quantity('a size', SIZE_UNITS, parseSize, formatSize, min, max)
}

function quantity(
  kind: string,
  units: object,
  parse: (text: string) => Parsed<number>,
  format: (value: number) => string,
  min: number,
  max: number,
): Scalar<number> {
  const names = Object.keys(units)
  const unit = `(${names.join('|')})`
  const allowed = `${kind} of ${min > 0 ? format(min) : '0'} to ${format(max)}, as a whole number with ${names.join(', ')}`
  return {
    schema:
      min > 0
        ? { type: 'string', pattern: `^0*[1-9][0-9]*${unit}$` }
        : // A plain 0 is a number in YAML.
          { type: ['string', 'integer'], pattern: `^(0|[0-9]+${unit})$`, minimum: 0, maximum: 0 },
    allowed,
    parse: (text) => {
      const read = parse(text)
      return read.ok && read.value >= min && read.value <= max ? read : refused(text, allowed)
    },
    print: format,
  }
}
