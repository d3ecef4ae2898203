import { REQUEST_OUTCOMES, type RequestOutcome } from '../protect/outcomes.ts'

type Line = Readonly<Record<string, unknown>>

const COLORS = { dim: 2, red: 31, green: 32, yellow: 33 } as const
type Paint = (color: keyof typeof COLORS, text: string) => string

/**
 * A JSON line of the log for people (contract §14), times in UTC as in the JSON:
 * `10:05:44.053  POST create-payment  executed  201  23 ms (upstream 14, store 5)  rbCgBzeqe9zG  absent → completed`.
 */
export function prettyLine(json: string, colors: boolean): string {
  const line = JSON.parse(json) as Line
  const paint: Paint = (color, text) => (colors ? `\u001b[${COLORS[color]}m${text}\u001b[0m` : text)
  const { level, time, msg, ...rest } = line
  const parts = [paint('dim', String(time).slice(11, 23))]
  if (level !== 'info')
    parts.push(
      paint(level === 'warn' ? 'yellow' : level === 'debug' ? 'dim' : 'red', String(level).toUpperCase()),
    )
  parts.push(
    ...(msg === 'request' || msg === 'shadow' ? requestParts(rest, msg, paint) : otherParts(rest, msg)),
  )
  return `${parts.join('  ')}\n${stackOf(line)}`
}

function requestParts(line: Line, msg: string, paint: Paint): string[] {
  const { method, route, outcome, verdict, status, ms, upstreamMs, storeMs, record, before, after, ...rest } =
    line
  const spent = [
    ...(typeof upstreamMs === 'number' ? [`upstream ${rounded(upstreamMs)}`] : []),
    ...(typeof storeMs === 'number' ? [`store ${rounded(storeMs)}`] : []),
  ]
  const result = text(msg === 'shadow' ? `shadow: ${text(verdict)}` : outcome)
  return [
    `${text(method)} ${text(route)}`,
    msg === 'shadow' ? result : paint(isServed(result) ? 'green' : 'yellow', result),
    ...(status == null ? [] : [text(status)]),
    `${rounded(Number(ms))} ms${spent.length === 0 ? '' : ` (${spent.join(', ')})`}`,
    ...(record == null ? [] : [text(record)]),
    ...(after == null || before === after ? [] : [`${text(before ?? 'none')} → ${text(after)}`]),
    ...members(rest),
  ]
}

function isServed(outcome: string): boolean {
  return REQUEST_OUTCOMES[outcome as RequestOutcome]?.group === 'served'
}

function otherParts({ err, ...line }: Line, msg: unknown): string[] {
  const error = err as { readonly message?: unknown } | undefined
  return [
    ...(msg === undefined ? [] : [text(msg)]),
    ...members(line),
    ...(error === undefined ? [] : [text(error.message)]),
  ]
}

/** Without nulls and empty lists. */
function members(line: Line): string[] {
  return Object.entries(line).flatMap(([name, value]) =>
    value == null || (Array.isArray(value) && value.length === 0) ? [] : [`${text(name)} ${text(value)}`],
  )
}

function text(value: unknown): string {
  if (Array.isArray(value)) return value.map(text).join('; ')
  if (value === undefined) return ''
  return escapeControls(typeof value === 'string' ? value : JSON.stringify(value))
}

function stackOf({ err }: Line): string {
  const stack = (err as { readonly stack?: unknown } | undefined)?.stack
  if (typeof stack !== 'string') return ''
  return stack
    .split('\n')
    .slice(1)
    .map((line) => `    ${escapeControls(line.trim())}\n`)
    .join('')
}

function rounded(milliseconds: number): number {
  return milliseconds < 10 ? Math.round(milliseconds * 10) / 10 : Math.round(milliseconds)
}

/** Control characters and bidirectional overrides, which terminals would obey. */
const CONTROLS = /[\p{Cc}\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/gu

/** The text with control characters written as `\uXXXX`, so that it is safe to print. */
export function escapeControls(text: string): string {
  return text.replace(CONTROLS, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, '0')}`)
}
