import { linesOf, type RawHeaders } from './headers.ts'

interface Range {
  readonly type: string
  /** 0 to 1. */
  readonly quality: number
}

/**
 * Whether the client names text/html and likes it better than JSON (RFC 9110 §12.5.1). Browsers that open a page do; what
 * takes anything does not.
 */
export function prefersHtml(headers: RawHeaders): boolean {
  const lines = linesOf(headers, 'accept')
  if (!lines.some((line) => /text\/html/i.test(line))) return false
  const ranges = lines.flatMap((line) => line.split(',')).flatMap(rangeOf)
  const html = best(ranges, 'text/html') ?? 0
  const json = ['application/problem+json', 'application/json'].map(
    (type) => best(ranges, type) ?? best(ranges, 'application/*') ?? best(ranges, '*/*') ?? 0,
  )
  return html > Math.max(...json)
}

/** Null: the type is not named. */
function best(ranges: readonly Range[], type: string): number | null {
  const named = ranges.filter((range) => range.type === type)
  return named.length === 0 ? null : Math.max(...named.map(({ quality }) => quality))
}

/** None where the quality is no number of RFC 9110 §12.4.2. */
function rangeOf(text: string): Range[] {
  const [type = '', ...parameters] = text.split(';').map((part) => part.trim().toLowerCase())
  const weight = parameters.find((parameter) => parameter.startsWith('q='))
  if (weight === undefined) return [{ type, quality: 1 }]
  return /^q=(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)$/.test(weight)
    ? [{ type, quality: Number(weight.slice(2)) }]
    : []
}
