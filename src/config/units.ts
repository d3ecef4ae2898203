/** The value of a text, or an error message. */
export type Parsed<T> =
  | { readonly ok: true; readonly value: T }
  | { readonly ok: false; readonly message: string }

export function parsed<T>(value: T): Parsed<T> {
  return { ok: true, value }
}

export function refused(text: string, allowed: string): { readonly ok: false; readonly message: string } {
  return { ok: false, message: `found ${/^\d+$/.test(text) ? text : quote(text)}; allowed: ${allowed}` }
}

/** A text for an error message: short, on one line, without the credentials of a URL. */
export function quote(text: string): string {
  const masked = text.replace(/\/\/.*@/s, '//***@').replace(/(password=)[^&]*/gi, '$1***')
  return JSON.stringify(masked.length > 80 ? `${masked.slice(0, 77)}...` : masked)
}

/** A kind of scalar: its JSON Schema, a description in words of what is allowed, and how its text is read. */
export interface Scalar<T> {
  readonly schema: {
    readonly type: string | readonly string[]
    readonly pattern?: string
    readonly minimum?: number
    readonly maximum?: number
  }
  readonly allowed: string
  /** `off` or `none`, where the word has a meaning of its own. */
  readonly word?: string
  readonly parse: (text: string) => Parsed<T>
  /** What a refused text most likely means; null: unknown. */
  readonly suggest?: (text: string) => string | null
  /** The shortest text or value that {@link parse} reads as this one. Absent: the value itself. */
  print?(this: void, value: T): unknown
}

/** `pattern`: for editors; may be laxer than the reader. */
export function byParser<T>(
  allowed: string,
  pattern: string,
  parse: (text: string) => Parsed<T>,
  print: (value: T) => unknown = (value) => value,
): Scalar<T> {
  return { schema: { type: 'string', pattern }, allowed, parse, print }
}

/** Adds what a refused text most likely means to the error, if that would not be refused, too. */
export function suggesting<T>(scalar: Scalar<T>, guess: (text: string) => string | null): Scalar<T> {
  const suggest = (text: string): string | null => {
    const near = guess(text)
    return near !== null && scalar.parse(near).ok ? near : null
  }
  return {
    ...scalar,
    suggest,
    parse: (text) => {
      const read = scalar.parse(text)
      if (read.ok) return read
      return {
        ok: false,
        message: read.message.replace('; allowed: ', `${didYouMeanText(suggest(text))}; allowed: `),
      }
    },
  }
}

export function didYouMeanText(near: string | null): string {
  return near === null ? '' : `, did you mean \`${near}\`?`
}

/** `read`: null refuses the text. */
export function byReader<T>(
  allowed: string,
  pattern: string,
  read: (text: string) => T | null,
  print?: (value: T) => unknown,
): Scalar<T> {
  const parse = (text: string): Parsed<T> => {
    const value = read(text)
    return value === null ? refused(text, allowed) : parsed(value)
  }
  return byParser(allowed, pattern, parse, print)
}

/** A text that is kept as it is. */
export function byTest(allowed: string, pattern: string, test: (text: string) => boolean): Scalar<string> {
  return byReader(allowed, pattern, (text) => (test(text) ? text : null))
}

/** A scalar with units, such as `30s` or `64KiB`; a plain `0` needs no unit. `plural`: units in which nobody writes one. */
function measure(
  kind: string,
  example: string,
  factors: Readonly<Record<string, number>>,
  plural: readonly string[] = [],
) {
  const names = Object.keys(factors)
  const suffix = `(${names.join('|')})`

  const parse = (text: string): Parsed<number> => {
    if (text === '0') return parsed(0)
    const [, digits = '', unit = ''] = /^(\d+)([A-Za-z]+)$/.exec(text) ?? []
    const factor = Object.hasOwn(factors, unit) ? factors[unit] : undefined
    const value = Number(digits) * (factor ?? 0)
    return digits === '' || factor === undefined || !Number.isSafeInteger(value)
      ? refused(text, `${kind}: a whole number with ${example}`)
      : parsed(value)
  }

  /** In the largest unit that divides it: `60s`, `2m`, `24h`, `2d`. */
  const format = (value: number): string => {
    const fitting = Object.entries(factors).filter(
      ([unit, by]) => by === 1 || (value % by === 0 && value >= (plural.includes(unit) ? 2 * by : by)),
    )
    return fitting.map(([unit, by]) => `${value / by}${unit}`).at(-1) ?? ''
  }

  const scalar = (min: number, max: number): Scalar<number> => {
    const from = min > 0 ? format(min) : '0'
    const allowed = `${kind} of ${from} to ${format(max)}, as a whole number with ${names.join(', ')}`
    const schema =
      min > 0
        ? { type: 'string', pattern: `^0*[1-9][0-9]*${suffix}$` }
        : // A plain 0 is a number in YAML.
          { type: ['string', 'integer'], pattern: `^(0|[0-9]+${suffix})$`, minimum: 0, maximum: 0 }
    const read = (text: string): Parsed<number> => {
      const found = parse(text)
      return found.ok && found.value >= min && found.value <= max ? found : refused(text, allowed)
    }
    return { schema, allowed, parse: read, print: format }
  }
  return { parse, format, scalar }
}

/** In milliseconds. */
export const {
  parse: parseDuration,
  format: formatDuration,
  scalar: duration,
} = measure(
  'a duration',
  'ms, s, m, h or d, such as 250ms, 30s, 24h',
  { ms: 1, s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000 },
  ['m', 'd'],
)

/** In bytes. */
export const {
  parse: parseSize,
  format: formatSize,
  scalar: size,
} = measure('a size', 'B, KiB, MiB or GiB, such as 64KiB, 1MiB', {
  B: 1,
  KiB: 1024,
  MiB: 1024 ** 2,
  GiB: 1024 ** 3,
})
