import type { Config } from '../config/config.ts'
import type { Change } from '../config/config-diff.ts'
import { fileForm, printed, shapeAt, unfolded, within } from '../config/written.ts'

const MASK = '***'
/** Members whose values are secrets, or may hold some. */
const SECRET = /^(?:token(?:File)?|secret(?:File)?|keyFile|password|keys)$/

/** The configuration in force, as a file would say it, without its secrets (contract §12 `/v1/config`). */
export function effective(config: Config): Record<string, unknown> {
  const { spelled } = config
  return Object.fromEntries(
    Object.entries(fileForm(config)).map(([name, value]) => [
      name,
      shown(value, [name], shapeAt(name), spelled),
    ]),
  )
}

/** What a reload changes or would change, in one line: path, old value, new value, as a file says them. */
export function changeLine({ path, was, now, about, spelled }: Change): string {
  const [before, after] = [valueText(was, path, spelled.was), valueText(now, path, spelled.now)]
  const same = before === after ? ' (another value)' : ''
  return `${path}: ${before} → ${after}${same}${about === null ? '' : ` (${about})`}`
}

function valueText(value: unknown, path: string, spelled: Config['spelled']): string {
  const written = shown(value ?? null, path.split('.'), shapeAt(path), spelled)
  if (written === null) return 'none'
  return typeof written === 'string' && written !== '' ? written : JSON.stringify(written)
}

function shown(
  value: unknown,
  path: readonly string[],
  shape: ReturnType<typeof shapeAt>,
  spelled: Config['spelled'],
): unknown {
  const name = path.at(-1) ?? ''
  const isSecret = value instanceof Uint8Array || SECRET.test(name)
  // Read from a file: what is in it is nobody's to see.
  if (isSecret && value !== null && typeof value !== 'boolean' && typeof value !== 'number') return MASK
  const text = printed(value, shape, name, spelled)
  if (text !== undefined) return isUrl(text) ? withoutSecrets(text) : text
  const members = unfolded(value, shape)
  if (typeof members !== 'object' || members === null)
    return isUrl(members) ? withoutSecrets(members) : (members ?? null)
  const inner = (key: string, one: unknown): unknown =>
    shown(one, [...path, key], within(shape, key), spelled)
  if (members instanceof Set || Array.isArray(members)) {
    const items = [...(members as Iterable<unknown>)]
    // Header lines that the proxy sends of its own carry its own credentials.
    if (path.includes('reconcile') && name === 'headers') return headersOf(items)
    return items.map((one) => inner('[]', one))
  }
  return Object.fromEntries(Object.entries(members).map(([key, one]) => [key, inner(key, one)]))
}

function isUrl(value: unknown): value is string {
  return typeof value === 'string' && /^(?:[a-z][a-z0-9+.-]*:\/)?\//i.test(value)
}

/** Of a flat list. */
function headersOf(lines: readonly unknown[]): Record<string, string> {
  return Object.fromEntries(lines.flatMap((name, n) => (n % 2 === 0 ? [[String(name), MASK]] : [])))
}

/** User and password of a URL go, and what its query says, which may be a token; `{key}` is only a place. */
function withoutSecrets(url: string): string {
  const [base = '', query] = url.split(/\?(.*)/s, 2)
  const shownBase = base.replace(/^([^/]*\/\/)[^/]*@/, `$1${MASK}@`)
  if (query === undefined) return shownBase
  const pairs = query.split('&').map((pair) => pair.replace(/=(?!\{:?\w+\}$).*$/s, `=${MASK}`))
  return `${shownBase}?${pairs.map((pair) => (pair.includes('=') ? pair : MASK)).join('&')}`
}
