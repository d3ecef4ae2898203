import { normalisePath } from '../../core/target.ts'
import { member, textOf } from './read.ts'

/** A path of a description as a route has it. */
export interface RoutePath {
  /** `/v1/payments/:id`. */
  readonly path: string
  /** Why it matches more than the description says; null: it does not. */
  readonly wider: string | null
}

/** The path that the URL of a server puts before all others, without a slash at its end. */
export function basePathOf(server: unknown): { readonly path: string; readonly remark: string | null } {
  const url = textOf(member(server, 'url'))
  if (url === null) return { path: '', remark: null }
  const variables = member(server, 'variables')
  const open: string[] = []
  const filled = url.replace(/\{([^{}]*)\}/g, (_, name: string) => {
    const value = member(member(variables, name), 'default')
    if (typeof value !== 'string' && typeof value !== 'number') {
      open.push(name)
      return ''
    }
    return String(value)
  })
  // Relative ones count from where the description lies, which is nobody's to know here.
  const parsed = URL.parse(filled, 'http://description.invalid/')
  if (parsed === null || open.length > 0)
    return {
      path: '',
      remark: `server ${url}: ${open.length > 0 ? `no default for ${open.join(', ')}` : 'no URL'}; its path is left out of the routes`,
    }
  return { path: parsed.pathname.replace(/\/+$/, ''), remark: null }
}

/** Segments of it that are parameters become `:name`; all others are literal, in their normal form. */
export function routePathOf(written: string): RoutePath {
  const wider: string[] = []
  // A query in a path is not OpenAPI, but it is met.
  const [path = ''] = written.split(/[?#]/, 1)
  if (path !== written) wider.push('what follows ? or # counts for nothing')
  const segments = path.split('/').flatMap((segment) => {
    if (/^\{[^{}]*\}$/.test(segment)) return [`:${identifier(segment)}`]
    if (/[{}*]/.test(segment) || segment.startsWith(':')) {
      wider.push(`any segment stands for ${segment}`)
      return [`:${identifier(segment)}`]
    }
    const encoded = segment.toWellFormed().replace(/[^\x21-\x7e]+|\\/g, encodeURIComponent)
    const normal = normalisePath(`/${encoded}`).slice(1)
    return normal === '' ? [] : [normal]
  })
  return { path: `/${segments.join('/')}`, wider: wider.length === 0 ? null : wider.join('; ') }
}

function identifier(text: string): string {
  const name = text.replace(/[^A-Za-z0-9]+/g, '_').replace(/^_+|_+$/g, '')
  return /^[A-Za-z]/.test(name) ? name : `p_${name}`
}

/** Segments of a route's path; null: any. */
export type Shape = readonly (string | null)[]

export function shapeOf(path: string): Shape {
  return path.split('/').map((segment) => (segment.startsWith(':') ? null : segment))
}

/** Whether every path that `narrow` matches is matched by `wide`, too. */
export function covers(wide: Shape, narrow: Shape): boolean {
  return (
    wide.length === narrow.length && wide.every((segment, n) => segment === null || segment === narrow[n])
  )
}
