import type { Millis } from '../core/record.ts'

/** The value of a text, or what was found and what is allowed. */
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

/** `pattern`: as much as an editor can check. */
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

interface Unit {
  readonly kind: string
  readonly example: string
  readonly factors: Readonly<Record<string, number>>
}

const DURATION: Unit = {
  kind: 'a duration',
  example: 'ms, s, m, h or d, such as 250ms, 30s, 24h',
  factors: { ms: 1, s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000 },
}
const SIZE: Unit = {
  kind: 'a size',
  example: 'B, KiB, MiB or GiB, such as 64KiB, 1MiB',
  factors: { B: 1, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 },
}

/** `250ms`, `30s`, `5m`, `24h`, `7d`; a plain `0` needs no unit. */
export function parseDuration(text: string): Parsed<Millis> {
  return parseIn(DURATION, text)
}

/** `512B`, `64KiB`, `1MiB`, `2GiB`; a plain `0` needs no unit. */
export function parseSize(text: string): Parsed<number> {
  return parseIn(SIZE, text)
}

function parseIn({ kind, example, factors }: Unit, text: string): Parsed<number> {
  if (text === '0') return parsed(0)
  const [, digits = '', unit = ''] = /^(\d+)([A-Za-z]+)$/.exec(text) ?? []
  const factor = Object.hasOwn(factors, unit) ? factors[unit] : undefined
  const value = Number(digits) * (factor ?? 0)
  return digits === '' || factor === undefined || !Number.isSafeInteger(value)
    ? refused(text, `${kind}: a whole number with ${example}`)
    : parsed(value)
}

export function formatDuration(value: Millis): string {
  return formatIn(DURATION, value)
}

export function formatSize(value: number): string {
  return formatIn(SIZE, value)
}

/** In the largest unit that divides it. */
function formatIn({ factors }: Unit, value: number): string {
  const fitting = Object.entries(factors).filter(([, by]) => by === 1 || (value >= by && value % by === 0))
  return fitting.map(([unit, by]) => `${value / by}${unit}`).at(-1) ?? ''
}

export function duration(min: Millis, max: Millis): Scalar<Millis> {
  return bounded(DURATION, min, max)
}

export function size(min: number, max: number): Scalar<number> {
  return bounded(SIZE, min, max)
}

function bounded(unit: Unit, min: number, max: number): Scalar<number> {
  const names = Object.keys(unit.factors)
  const suffix = `(${names.join('|')})`
  const from = min > 0 ? formatIn(unit, min) : '0'
  const allowed = `${unit.kind} of ${from} to ${formatIn(unit, max)}, as a whole number with ${names.join(', ')}`
  return {
    schema:
      min > 0
        ? { type: 'string', pattern: `^0*[1-9][0-9]*${suffix}$` }
        : // A plain 0 is a number in YAML.
          { type: ['string', 'integer'], pattern: `^(0|[0-9]+${suffix})$`, minimum: 0, maximum: 0 },
    allowed,
    parse: (text) => {
      const read = parseIn(unit, text)
      return read.ok && read.value >= min && read.value <= max ? read : refused(text, allowed)
    },
    print: (value) => formatIn(unit, value),
  }
}
