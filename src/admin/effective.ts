import type { Change } from '../config/changes.ts'
import type { Config } from '../config/config.ts'

const MASK = '***'
/** Members whose values are secrets, or may hold some. */
const SECRET = /^(?:token(?:File)?|secret(?:File)?|keyFile|password|keys)$/

/** The configuration in force, in milliseconds and bytes, without its secrets (contract §12 `/v1/config`). */
export function effective(config: Config): Record<string, unknown> {
  return shown(config, []) as Record<string, unknown>
}

/** What a reload changes or would change, in one line: path, old value, new value, in milliseconds and bytes. */
export function changeLine({ path, was, now, about }: Change): string {
  const names = path.split('.')
  const [before, after] = [valueText(was, names), valueText(now, names)]
  const same = before === after ? ' (another value)' : ''
  return `${path}: ${before} → ${after}${same}${about === null ? '' : ` (${about})`}`
}

function valueText(value: unknown, path: readonly string[]): string {
  if (value === undefined) return 'none'
  const text = JSON.stringify(shown(value, path), asWritten)
  return text.startsWith('"') ? (JSON.parse(text) as string) : text
}

/** Sources and addresses as the file has them. */
function asWritten(_name: string, value: unknown): unknown {
  if (typeof value !== 'object' || value === null) return value
  const { kind, name, pointer = name, host, port } = value as Readonly<Record<string, unknown>>
  if (typeof kind === 'string' && typeof pointer === 'string') return `${kind}:${pointer}`
  return typeof host === 'string' && typeof port === 'number' ? `${host}:${port}` : value
}

function shown(value: unknown, path: readonly string[]): unknown {
  const name = path.at(-1) ?? ''
  if (value === null || value === undefined || typeof value === 'boolean' || typeof value === 'number')
    return value ?? null
  // Read from a file: what is in it is nobody's to see.
  if (value instanceof Uint8Array || SECRET.test(name)) return MASK
  if (typeof value === 'string')
    return /^(?:[a-z][a-z0-9+.-]*:\/)?\//i.test(value) ? withoutSecrets(value) : value
  if (value instanceof RegExp) return value.source
  if (value instanceof Set) return [...value]
  if (value instanceof Map)
    return Object.fromEntries(
      [...value].map(([key, one]) => [String(key), shown(one, [...path, String(key)])]),
    )
  // Header lines that the proxy sends of its own carry its own credentials.
  if (Array.isArray(value) && path.includes('reconcile') && name === 'headers')
    return value.map((one, n) => (n % 2 === 0 ? one : MASK))
  if (Array.isArray(value)) return value.map((one) => shown(one, path))
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, shown(one, [...path, key])]))
}

/** User and password of a URL go, and what its query says, which may be a token; `{key}` is only a place. */
function withoutSecrets(url: string): string {
  const [base = '', query] = url.split(/\?(.*)/s, 2)
  const shownBase = base.replace(/^([^/]*\/\/)[^/]*@/, `$1${MASK}@`)
  if (query === undefined) return shownBase
  const pairs = query.split('&').map((pair) => pair.replace(/=(?!\{\w+\}$).*$/s, `=${MASK}`))
  return `${shownBase}?${pairs.map((pair) => (pair.includes('=') ? pair : MASK)).join('&')}`
}
