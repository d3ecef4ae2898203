import { stringify } from 'yaml'
import type { Config } from '../../config/config.ts'
import { RESPONSE_HEADER } from '../../core/headers.ts'
import { classify, type RoutePolicy } from '../../core/policy.ts'
import type { Millis } from '../../core/record.ts'
import { REFUSALS, type RefusalCode } from '../../core/refusal.ts'
import { isProtected, parseTarget, policiesOf, Router } from '../../core/route.ts'
import { answersOf, spelled, withOptionalKey } from '../published.ts'
import type { Operation, Operations, Remark } from './operations.ts'
import { type Description, isObject, type Json, member, type Pointer } from './read.ts'

interface Action {
  readonly target: string
  readonly description?: string
  readonly update: object
}

export interface Overlay {
  /** YAML of an Overlay 1.0.0; null: it would do nothing. */
  readonly document: string | null
  readonly remarks: readonly Remark[]
}

/**
 * Documents what the proxy adds to the operations that a configuration protects: the key's header, the marks of replays,
 * and the answers of its own. What the description already says of them stays.
 */
export function overlayOf(
  description: Description,
  { found, remarks: known }: Operations,
  config: Config,
): Overlay {
  const router = new Router(policiesOf(config))
  const remarks: Remark[] = [...known]
  const actions: Action[] = []
  const names = namesIn(description.root)
  const seen = new Set<string>()
  for (const operation of found) {
    const route = routeOf(router, config, operation)
    const target = jsonPath(operation.pointer)
    if (route === null || seen.has(target)) continue
    seen.add(target)
    const say = (message: string): void =>
      void remarks.push({
        line: description.lineOf(operation.pointer),
        message: `${operation.method} ${operation.template}: ${message}`,
      })
    actions.push(...actionsFor(operation, route, target, names, say))
  }
  if (actions.length === 0) return { document: null, remarks }
  const document = {
    overlay: '1.0.0',
    info: { title: 'Idempotency keys, as idempotency-proxy answers them', version: '1.0.0' },
    actions: [
      { target: '$', update: { components: componentsOf(names, config.problems.baseUrl) } },
      ...actions,
    ],
  }
  return { document: stringify(document, { aliasDuplicateObjects: false, lineWidth: 110 }), remarks }
}

/** Stands for a parameter; long enough that no literal segment of a route is equal. */
const ANY = 'any-value-of-this-parameter'

function routeOf(router: Router, config: Config, { method, path }: Operation): RoutePolicy | null {
  const target = parseTarget(path.path.replace(/:[A-Za-z0-9_]+/g, ANY))
  const route = target && router.match(method, target)
  if (route === null || !isProtected(route)) return null
  return route === config.defaults ? withOptionalKey(route) : route
}

function actionsFor(
  operation: Operation,
  route: RoutePolicy,
  target: string,
  names: Names,
  say: (message: string) => void,
): Action[] {
  const actions: Action[] = []
  const parameters = newParameters(operation, route, actions, say)
  const responses = responsesOf(operation, route, names, say)
  if (parameters.length > 0 || Object.keys(responses).length > 0)
    actions.push({
      target,
      description: `Route ${route.name}.`,
      update: {
        ...(parameters.length > 0 ? { parameters } : {}),
        ...(Object.keys(responses).length > 0 ? { responses } : {}),
      },
    })
  return actions
}

/** A second parameter of one name would make the description invalid: one that is there is completed. */
function newParameters(
  { keys, queries }: Operation,
  route: RoutePolicy,
  actions: Action[],
  say: (message: string) => void,
): object[] {
  // Of several that may carry it none is required by itself.
  const required =
    route.key.presence === 'required' && route.key.from.length === 1 && route.key.derive === null
  return route.key.from.flatMap((source) => {
    if (source.kind === 'query')
      return queries.has(source.name) ? [] : [parameterOf(source.name, 'query', required, route)]
    // A form or a body of JSON has a schema of its own.
    if (source.kind !== 'header') return []
    const { name } = source
    const there = keys.find((key) => key.name.toLowerCase() === name)
    if (there === undefined) return [parameterOf(spelled(name), 'header', required, route)]
    if (there.required === required) return []
    if (there.own === null)
      say(
        `the description ${there.required ? 'requires' : 'does not require'} ${there.name}, the route ${required ? 'does' : 'does not'}: mend the parameter that it refers to`,
      )
    else
      actions.push({
        target: `${jsonPath(there.own.slice(0, -1))}[${there.own.at(-1)}]`,
        update: { required },
      })
    return []
  })
}

function parameterOf(
  name: string,
  place: 'header' | 'query',
  required: boolean,
  { key, ttl }: RoutePolicy,
): object {
  return {
    name,
    in: place,
    required,
    description: `Makes it safe to send the request again: with the same key it is not executed a second time, and is answered with the first answer for ${inWords(ttl)}. A new operation needs a new key.`,
    schema: {
      type: 'string',
      // Of the key as it is compared; strict ones have quotes around it.
      ...(key.syntax === 'strict' && place === 'header'
        ? { pattern: '^".*"$' }
        : {
            minLength: key.minLength,
            maxLength: key.maxLength,
            ...(key.pattern === null ? {} : { pattern: key.pattern.source }),
          }),
    },
  }
}

function responsesOf(
  { value }: Operation,
  route: RoutePolicy,
  names: Names,
  say: (message: string) => void,
): Record<string, object> {
  const written = member(value, 'responses')
  const known: Json = isObject(written) ? written : {}
  const updates: Record<string, object> = {}
  const own = byStatus(route)
  for (const [status, response] of Object.entries(known)) {
    if (!isReplayable(route, status)) continue
    if (member(response, '$ref') !== undefined) {
      if (!own.has(status)) say(`its ${status} is a reference, whose headers are left alone`)
    } else {
      const headers = without(marks(route, names), member(response, 'headers'))
      if (Object.keys(headers).length > 0) updates[status] = { headers }
    }
  }
  for (const [status, codes] of own) {
    const there = member(known, status)
    if (member(there, '$ref') !== undefined) {
      say(`its ${status} is a reference, to which ${codes.join(', ')} cannot be added`)
      continue
    }
    const content = {
      'application/problem+json': { schema: reference('schemas', names.problem) },
    }
    const has = isObject(member(there, 'content'))
      ? Object.hasOwn(member(there, 'content') as Json, 'application/problem+json')
      : false
    if (has) {
      say(`its ${status} has problems of its own; ${codes.join(', ')} come as well`)
      continue
    }
    updates[status] = {
      ...updates[status],
      ...(there === undefined
        ? { description: titles(codes), ...(codes.some((code) => LATER.has(code)) ? RETRY_AFTER : {}) }
        : {}),
      content,
    }
  }
  return updates
}

/** Whether an answer of that status is kept, and so comes again. Of a range or the rest: some may be. */
function isReplayable(route: RoutePolicy, status: string): boolean {
  if (!/^[2-5][0-9]{2}$/.test(status)) return /^(?:[2-5]XX|default)$/.test(status)
  return (
    classify(route, Number(status), false) === 'store' || classify(route, Number(status), true) === 'store'
  )
}

/** Says when to come again. */
const LATER: ReadonlySet<RefusalCode> = new Set([
  'idempotency_key_in_progress',
  'idempotency_outcome_unknown',
  'idempotency_store_unavailable',
  'replay_unauthorized_yet',
  'rate_limited',
  'overloaded',
])
const RETRY_AFTER = {
  headers: {
    'Retry-After': {
      description: 'Whole seconds, where it is worth to come again.',
      schema: { type: 'integer', minimum: 1 },
    },
  },
}

/** Header names are one whatever their case. */
function without(headers: Json, there: unknown): Json {
  const known = new Set(Object.keys(isObject(there) ? there : {}).map((name) => name.toLowerCase()))
  return Object.fromEntries(Object.entries(headers).filter(([name]) => !known.has(name.toLowerCase())))
}

function marks({ statusHeader, key }: RoutePolicy, names: Names): Json {
  return {
    [RESPONSE_HEADER.replayed]: reference('headers', names.replayed),
    ...(key.derive === null ? {} : { [RESPONSE_HEADER.derived]: reference('headers', names.derived) }),
    ...(statusHeader
      ? {
          [RESPONSE_HEADER.status]: reference('headers', names.status),
          [RESPONSE_HEADER.expires]: reference('headers', names.expires),
        }
      : {}),
  }
}

/** The proxy's own answers by status, each code once. */
function byStatus(route: RoutePolicy): Map<string, RefusalCode[]> {
  const found = new Map<string, RefusalCode[]>()
  for (const { status, code } of answersOf(route))
    found.set(String(status), [...(found.get(String(status)) ?? []), code])
  return found
}

function titles(codes: readonly RefusalCode[]): string {
  return codes.map((code) => `${REFUSALS[code].title} (${code}).`).join(' ')
}

const UNITS: readonly (readonly [string, Millis])[] = [
  ['days', 86_400_000],
  ['hours', 3_600_000],
  ['minutes', 60_000],
]

/** `7 days`, `24 hours`. */
function inWords(time: Millis): string {
  const [unit, by] = UNITS.find(([, each]) => time % each === 0 && time >= 2 * each) ?? ['seconds', 1000]
  return `${time / by} ${unit}`
}

/** What the overlay's components are called, so that none of the description's is overwritten. */
export interface Names {
  readonly problem: string
  readonly replayed: string
  readonly derived: string
  readonly status: string
  readonly expires: string
}

export function namesIn(root: Json): Names {
  const free = (section: string, name: string): string => {
    const taken = member(member(root, 'components'), section)
    let own = name
    for (let n = 2; member(taken, own) !== undefined; n++) own = `${name}${n}`
    return own
  }
  return {
    problem: free('schemas', 'IdempotencyProblem'),
    replayed: free('headers', 'IdempotentReplayed'),
    derived: free('headers', 'IdempotencyKeyDerived'),
    status: free('headers', 'IdempotencyStatus'),
    expires: free('headers', 'IdempotencyExpires'),
  }
}

export function reference(section: 'schemas' | 'headers', name: string): object {
  return { $ref: `#/components/${section}/${name}` }
}

/** In words that OpenAPI 3.0 and 3.1 both know. `baseUrl`: what the type of a problem begins with. */
export function componentsOf(names: Names, baseUrl: string): object {
  const text = { type: 'string' }
  return {
    headers: {
      [names.replayed]: {
        description:
          'This is the answer to the first request with the key; nothing was executed for this one.',
        schema: { type: 'string', enum: ['true'] },
      },
      [names.derived]: {
        description: 'The proxy made the key, since the request had none.',
        schema: { type: 'string', enum: ['true'] },
      },
      [names.status]: {
        description: 'What became of the request.',
        schema: { type: 'string', enum: ['executed', 'replayed', 'bypassed', 'ignored'] },
      },
      [names.expires]: {
        description: 'Until when the key is answered with this answer.',
        schema: { type: 'string', format: 'date-time' },
      },
    },
    schemas: {
      [names.problem]: {
        type: 'object',
        description: 'An answer of the proxy in front of the API (RFC 9457).',
        required: ['type', 'title', 'status', 'detail', 'code', 'retry'],
        properties: {
          type: { ...text, description: `${baseUrl} and the code.` },
          title: text,
          status: { type: 'integer' },
          detail: text,
          instance: { ...text, description: 'The id of the record of this key, for support.' },
          code: { type: 'string', enum: Object.keys(REFUSALS) },
          retry: {
            type: 'string',
            enum: ['same-key', 'new-key', 'no'],
            description:
              'What is safe: to send the same request with the same key again, only with a new key, or not at all.',
          },
          originalStatus: { type: 'integer', description: 'Of a first answer that was not kept.' },
          location: { ...text, description: 'Of a first answer that was not kept.' },
        },
      },
    },
  }
}

/** A JSONPath (RFC 9535) of one place. */
export function jsonPath(pointer: Pointer): string {
  return `$${pointer.map((name) => `['${quoted(name)}']`).join('')}`
}

function quoted(name: string): string {
  return name
    .replace(/[\\']/g, '\\$&')
    .replace(/\p{Cc}/gu, (control) => `\\u${control.charCodeAt(0).toString(16).padStart(4, '0')}`)
}
