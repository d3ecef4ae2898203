import { type Config, namespaceOf } from '../config/config.ts'
import { firstOf, isFieldName, isFieldValue, linesOf, type RawHeaders } from '../core/headers.ts'
import { type Claims, type KeyQualifier, normaliseHost, readCaller, recordId } from '../core/identity.ts'
import { readKey } from '../core/key.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { RecordId } from '../core/record.ts'
import { parseTarget, policiesOf, Router, readsKeys } from '../core/route.ts'
import type { Input } from './input.ts'
import type { Lookup } from './schemas.ts'

/** Finds the records that a request would find, told by what it carries (contract §12 `lookup`). */
export class RecordLookup {
  readonly #config: Config
  readonly #router: Router

  constructor(config: Config) {
    this.#config = config
    this.#router = new Router(policiesOf(config))
  }

  isOf(config: Config): boolean {
    return this.#config === config
  }

  /** Settings of the route that a record was made under; what no route is called any more is as `defaults` say. */
  policy(name: string): RoutePolicy {
    return this.#config.routes.find((route) => route.name === name) ?? this.#config.defaults
  }

  /**
   * Ids of the records that may be meant, the likeliest first. More than one where a route takes keys from several places:
   * the same key is another record there.
   */
  find(lookup: Lookup): Input<readonly RecordId[]> {
    const matched = this.#match(lookup)
    if (!matched.ok) return matched
    const { route, method, path } = matched.value
    const told = callerOf(route, lookup.caller ?? {})
    if (!told.ok) return told
    const { lines, claims } = told.value
    const caller = readCaller(lines, route.scope, claims)
    if (caller.kind === 'missing') return { ok: false, detail: `/caller: ${caller.detail}` }
    const keys = keysOf(route, lookup.key, lines)
    if (!keys.ok) return keys
    const host = route.scope.host ? normaliseHost(lookup.host ?? null) : null
    if (route.scope.host && host === null)
      return { ok: false, detail: '/host: the route tells hosts apart: the host of the request is needed' }
    const namespace = namespaceOf(this.#config)
    const ids = keys.value.map(({ key, qualifier }) =>
      recordId(namespace, route, caller.parts, method, path, key, qualifier, host),
    )
    return { ok: true, value: [...new Set(ids)] }
  }

  #match(lookup: Lookup): Input<{ route: RoutePolicy; method: string; path: string }> {
    const named = this.#config.routes.find(({ name }) => name === lookup.route)
    if (lookup.route !== undefined && lookup.route !== 'default' && named === undefined)
      return { ok: false, detail: `/route: there is no route ${JSON.stringify(lookup.route)}` }
    const methods = named?.match.methods ?? []
    const method = lookup.method ?? (methods.length === 1 ? methods[0] : undefined)
    const literal = named === undefined || /\/:|\/\*$/.test(named.match.path) ? undefined : named.match.path
    const target = parseTarget(lookup.path ?? literal ?? '')
    if (method === undefined) return { ok: false, detail: '/method: it is needed' }
    if (target === null || (lookup.path ?? literal) === undefined)
      return { ok: false, detail: '/path: the path of the request is needed' }
    const route = this.#router.match(method, target)
    if (route === null || !readsKeys(route))
      return { ok: false, detail: `/path: no protected route matches ${method} ${target.path}` }
    if (lookup.route !== undefined && lookup.route !== route.name)
      return { ok: false, detail: `/route: ${method} ${target.path} is the route ${route.name}` }
    return { ok: true, value: { route, method, path: route.match.exact ? target.rawPath : target.path } }
  }
}

interface Told {
  readonly lines: RawHeaders
  readonly claims: Claims | null
}

/** What the caller's members are: claims where the route reads a claim of that name, else header lines. */
function callerOf({ scope }: RoutePolicy, caller: NonNullable<Lookup['caller']>): Input<Told> {
  const lines: string[] = []
  const claims: Record<string, unknown> = {}
  for (const [name, value] of Object.entries(caller)) {
    if (scope.jwt !== null && scope.caller.some((source) => source.kind === 'jwt' && source.name === name)) {
      claims[name] = value
      continue
    }
    for (const one of [value].flat()) {
      if (!isFieldName(name) || !isFieldValue(String(one)))
        return { ok: false, detail: '/caller: not a header line, nor a claim that the route reads' }
      lines.push(name, String(one))
    }
  }
  return { ok: true, value: { lines, claims: Object.keys(claims).length === 0 ? null : claims } }
}

interface Key {
  readonly key: string
  readonly qualifier: KeyQualifier
}

/** The key from each place where the route takes one. */
function keysOf({ key: policy }: RoutePolicy, key: string, caller: RawHeaders): Input<readonly Key[]> {
  // Any key can be written as a String of RFC 9651, which every syntax takes.
  const line = key.startsWith('"') ? key : `"${key.replace(/[\\"]/g, '\\$&')}"`
  const keys: Key[] = []
  let detail = '/key: the route takes none'
  for (const source of policy.from) {
    if (source.kind !== 'header') {
      keys.push({ key, qualifier: [] })
      // Of a structured event (CloudEvents).
      if (source.kind === 'json' && source.pointer === '/id')
        keys.push({ key, qualifier: ['ce-source', firstOf(caller, 'ce-source')] })
      continue
    }
    const reading = readKey({ headers: [source.name, line, ...caller], query: '' }, policy, null)
    if (reading.kind === 'key') keys.push(reading)
    else if (reading.kind === 'invalid') detail = `/key: ${reading.detail}`
  }
  if (policy.derive !== null) keys.push({ key, qualifier: ['derived'] })
  // Who names an event's source means that event, not what else came under its id.
  const events =
    linesOf(caller, 'ce-source').length > 0
      ? keys.filter(({ qualifier }) => qualifier[0] === 'ce-source')
      : []
  if (events.length > 0) return { ok: true, value: events }
  return keys.length > 0 ? { ok: true, value: keys } : { ok: false, detail }
}
