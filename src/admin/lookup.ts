import { type Static, Type } from 'typebox'
import { type Config, namespaceOf } from '../config/config.ts'
import { firstOf, isFieldName, isFieldValue, linesOf, type RawHeaders } from '../core/headers.ts'
import {
  type Claims,
  type ClientCertificate,
  type FromCaller,
  type KeyQualifier,
  normaliseHost,
  readCaller,
  recordId,
} from '../core/identity.ts'
import { readKey } from '../core/key.ts'
import type { CallerSource, RoutePolicy } from '../core/policy.ts'
import type { RecordId } from '../core/record.ts'
import { comparedPath, parseTarget, policiesOf, policyNamed, Router, readsKeys } from '../core/route.ts'
import { invalid } from './problems.ts'
import { named } from './schemas.ts'

export const subjectMembers = {
  key: Type.String({ minLength: 1, maxLength: 8192, description: 'As the client sends it, quoted or not.' }),
  caller: Type.Optional(
    Type.Record(
      Type.String(),
      Type.Union([Type.String(), Type.Number(), Type.Boolean(), Type.Array(Type.String())]),
      { description: 'The headers that identify the caller, and ce-source; for jwt:<claim> the claim.' },
    ),
  ),
  method: Type.Optional(Type.String({ description: 'Optional if `route` has one method.' })),
  path: Type.Optional(Type.String({ description: 'Optional if the path of `route` has no parameters.' })),
  host: Type.Optional(Type.String({ description: 'Host of the request, if the route has `scope.host`.' })),
  route: Type.Optional(Type.String()),
}

export const lookup = named('Lookup', subjectMembers)
export type Lookup = Static<typeof lookup>

/** Finds the records of a request by its key, caller and target (contract §12 `lookup`). */
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

  /** The policy of a record's route; that of `defaults` if the route is gone. */
  policy(name: string): RoutePolicy {
    return policyNamed(this.#config, name) ?? this.#config.defaults
  }

  /**
   * Ids of the possible records, likeliest first: several if the route reads keys from several sources, where the same key means different
   * records.
   * @throws {AdminProblem}
   */
  find(lookup: Lookup): readonly RecordId[] {
    const { route, method, path } = this.#match(lookup)
    const { claims, ...from } = callerOf(route, lookup.caller ?? {})
    const lines = from.headers
    const caller = readCaller(from, route.scope, claims)
    if (caller.kind === 'missing') throw invalid(`/caller: ${caller.detail}`)
    const keys = keysOf(route, lookup.key, lines)
    const host = route.scope.host ? normaliseHost(lookup.host ?? null) : null
    if (route.scope.host && host === null) throw invalid('/host: required, since the route has scope.host')
    const namespace = namespaceOf(this.#config)
    const ids = keys.map(({ key, qualifier }) =>
      recordId(namespace, route, caller.parts, method, path, key, qualifier, host),
    )
    return [...new Set(ids)]
  }

  #names(): string {
    return policiesOf(this.#config)
      .map(({ name }) => name)
      .join(', ')
  }

  #match(lookup: Lookup): { readonly route: RoutePolicy; readonly method: string; readonly path: string } {
    const named = this.#config.routes.find(({ name }) => name === lookup.route)
    if (lookup.route !== undefined && lookup.route !== 'default' && named === undefined)
      throw invalid(`/route: there is no route ${JSON.stringify(lookup.route)}; there are: ${this.#names()}`)
    const methods = named?.match.methods ?? []
    const method = lookup.method ?? (methods.length === 1 ? methods[0] : undefined)
    const literal = named === undefined || /\/:|\/\*$/.test(named.match.path) ? undefined : named.match.path
    const target = parseTarget(lookup.path ?? literal ?? '')
    if (method === undefined) throw invalid('/method: required')
    if (target === null || (lookup.path ?? literal) === undefined) throw invalid('/path: required')
    const route = this.#router.match(method, target)
    if (route === null || !readsKeys(route))
      throw invalid(`/path: no protected route matches ${method} ${target.path}; routes: ${this.#names()}`)
    if (lookup.route !== undefined && lookup.route !== route.name)
      throw invalid(`/route: ${method} ${target.path} is the route ${route.name}`)
    return { route, method, path: comparedPath(route.match, target) }
  }
}

/** The caller's parts: claims if the route reads a claim of that name, else header values. */
function callerOf(
  { scope }: RoutePolicy,
  caller: NonNullable<Lookup['caller']>,
): FromCaller & { readonly claims: Claims | null } {
  const headers: string[] = []
  const claims: Record<string, unknown> = {}
  const certificate: Record<string, string> = {}
  const reads = (kind: CallerSource['kind'], name: string): boolean =>
    scope.caller.some((source) => source.kind === kind && source.name === name)
  for (const [name, value] of Object.entries(caller)) {
    if (scope.jwt !== null && reads('jwt', name)) {
      claims[name] = value
      continue
    }
    if (reads('tls', name)) {
      certificate[name] = String(value)
      continue
    }
    for (const one of [value].flat()) {
      if (!isFieldName(name) || !isFieldValue(String(one)))
        throw invalid(
          '/caller: neither a header line nor a claim or an attribute of a certificate that the route reads',
        )
      headers.push(name, String(one))
    }
  }
  return {
    headers,
    certificate: certificate as ClientCertificate,
    claims: Object.keys(claims).length === 0 ? null : claims,
  }
}

interface CandidateKey {
  readonly key: string
  readonly qualifier: KeyQualifier
}

/** The key as it would be written in each source that the route reads. */
function keysOf({ key: policy }: RoutePolicy, key: string, caller: RawHeaders): readonly CandidateKey[] {
  // Every syntax accepts an RFC 9651 String, which can hold any key.
  const line = key.startsWith('"') ? key : `"${key.replace(/[\\"]/g, '\\$&')}"`
  const keys: CandidateKey[] = []
  let detail = '/key: the route reads no key'
  for (const source of policy.from) {
    if (source.kind !== 'header') {
      keys.push({ key, qualifier: [] })
      // The source of a structured event (CloudEvents).
      if (source.kind === 'json' && source.pointer === '/id')
        keys.push({ key, qualifier: ['ce-source', firstOf(caller, 'ce-source')] })
      continue
    }
    const reading = readKey({ headers: [source.name, line, ...caller], query: '' }, policy, null)
    if (reading.kind === 'key') keys.push(reading)
    else if (reading.kind === 'invalid') detail = `/key: ${reading.detail}`
  }
  if (policy.derive !== null) keys.push({ key, qualifier: ['derived'] })
  // With a source it is a CloudEvent: records of other requests with that id do not count.
  const events =
    linesOf(caller, 'ce-source').length > 0
      ? keys.filter(({ qualifier }) => qualifier[0] === 'ce-source')
      : []
  if (events.length > 0) return events
  if (keys.length === 0) throw invalid(detail)
  return keys
}
