import { stringify } from 'yaml'
import type { Config } from '../../config/config.ts'
import { classify, concerns } from '../../core/classify.ts'
import { RESPONSE_HEADER } from '../../core/headers.ts'
import type { RoutePolicy } from '../../core/policy.ts'
import type { Millis } from '../../core/record.ts'
import { REFUSALS, type RefusalCode } from '../../core/refusal.ts'
import { parseTarget, policiesOf, Router } from '../../core/route.ts'
import { answersOf, ecmaScript, publishedPolicy, spelled } from '../published.ts'
import type { DescribedOperation, DescribedOperations, Remark } from './operations.ts'
import { type Description, type Json, member, objectAt, type Pointer } from './read.ts'

interface OverlayAction {
  readonly target: string
  readonly description?: string
  readonly update: object
}

export interface Overlay {
  /** YAML of an Overlay 1.0.0; null: it would change nothing. */
  readonly document: string | null
  readonly remarks: readonly Remark[]
}

/**
 * Documents the proxy's additions to protected operations: the key's parameter, the replay headers and its own responses. Keeps existing
 * parts of the description.
 */
export function overlayOf(
  description: Description,
  operations: DescribedOperations,
  config: Config,
): Overlay {
  const router = new Router(policiesOf(config))
  const remarks: Remark[] = [...operations.remarks]
  const actions: OverlayAction[] = []
  const names = componentNames(description.root)
  const seen = new Set<string>()
  for (const operation of operations.found) {
    const route = routeOf(router, config, operation)
    const target = jsonPath(operation.pointer)
    if (route === null || seen.has(target)) continue
    seen.add(target)
    const say: AddRemark = (message) =>
      remarks.push({
        line: description.lineOf(operation.pointer),
        message: `${operation.method} ${operation.template}: ${message}`,
      })
    const parameters = newParameters(operation, route, actions, say)
    const responses = newResponses(operation, route, names, say)
    const update = {
      ...(parameters.length > 0 ? { parameters } : {}),
      ...(Object.keys(responses).length > 0 ? { responses } : {}),
    }
    if (Object.keys(update).length > 0) actions.push({ target, description: `Route ${route.name}.`, update })
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

type AddRemark = (message: string) => void

/** Stands for a parameter; no literal segment of a route is equal to it. */
const ANY = 'any-value-of-this-parameter'

function routeOf(router: Router, config: Config, { method, path }: DescribedOperation): RoutePolicy | null {
  const target = parseTarget(path.path.replace(/:[A-Za-z0-9_]+/g, ANY))
  return publishedPolicy(target && router.match(method, target), config.defaults)
}

/** The parameters that the operation lacks. Existing ones are completed: two of one name would be invalid. */
function newParameters(
  { keys, queries }: DescribedOperation,
  route: RoutePolicy,
  actions: OverlayAction[],
  say: AddRemark,
): object[] {
  const { from, presence, derive } = route.key
  // If several may carry the key, none is required by itself.
  const required = presence === 'required' && from.length === 1 && derive === null
  return from.flatMap((source) => {
    if (source.kind === 'query')
      return queries.has(source.name) ? [] : [parameterOf(source.name, 'query', required, route)]
    // Forms and JSON have their own schema.
    if (source.kind !== 'header') return []
    const known = keys.find((key) => key.name.toLowerCase() === source.name)
    if (known === undefined) return [parameterOf(spelled(source.name), 'header', required, route)]
    if (known.required === required) return []
    if (known.own === null)
      say(
        `the description ${known.required ? 'requires' : 'does not require'} ${known.name}, the route ${required ? 'does' : 'does not'}: fix the parameter that it refers to`,
      )
    else
      actions.push({
        target: `${jsonPath(known.own.slice(0, -1))}[${known.own.at(-1)}]`,
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
    description: `Makes it safe to retry: a request with the same key is not executed again, but answered with the first response for ${inWords(ttl)}. A new operation needs a new key.`,
    schema: {
      type: 'string',
      // Lengths and pattern are of the bare key; strict syntax puts quotes around it.
      ...(key.syntax === 'strict' && place === 'header'
        ? { pattern: '^".*"$' }
        : {
            minLength: key.minLength,
            maxLength: key.maxLength,
            ...ecmaScript(key.pattern),
          }),
    },
  }
}

const PROBLEM = 'application/problem+json'

function newResponses(
  { value }: DescribedOperation,
  route: RoutePolicy,
  names: ComponentNames,
  say: AddRemark,
): Record<string, object> {
  const known = objectAt(value, 'responses')
  const own = Map.groupBy(answersOf(route), ({ status }) => String(status))
  const updates: Record<string, object> = {}
  for (const [status, response] of Object.entries(known)) {
    if (!isReplayable(route, status)) continue
    if (isReference(response)) {
      if (!own.has(status)) say(`its ${status} is a reference, whose headers are left unchanged`)
    } else {
      const headers = missing(replayHeaders(route, names), objectAt(response, 'headers'))
      if (Object.keys(headers).length > 0) updates[status] = { headers }
    }
  }
  for (const [status, answers] of own) {
    const response = member(known, status)
    const codes = answers.map(({ code }) => code)
    if (isReference(response))
      say(`its ${status} is a reference, to which ${codes.join(', ')} cannot be added`)
    else if (Object.hasOwn(objectAt(response, 'content'), PROBLEM))
      say(`its ${status} describes problems already; the proxy adds ${codes.join(', ')}`)
    else
      updates[status] = {
        ...updates[status],
        ...(response === undefined
          ? {
              description: answers.map(({ title, code }) => `${title} (${code}).`).join(' '),
              ...(codes.some((code) => LATER.has(code)) ? RETRY_AFTER : {}),
            }
          : {}),
        content: { [PROBLEM]: { schema: reference('schemas', names.problem) } },
      }
  }
  return updates
}

function isReference(value: unknown): boolean {
  return member(value, '$ref') !== undefined
}

/** Whether some response of that status, or of that range, is kept and so replayed. */
function isReplayable(route: RoutePolicy, status: string): boolean {
  if (!/^[2-5][0-9]{2}$/.test(status)) return /^(?:[2-5]XX|default)$/.test(status)
  const own = route.outcomes.filter((rule) => concerns(rule, Number(status)))
  return (
    own.some(({ outcome }) => outcome === 'store') ||
    [false, true].some((retryAfter) => classify(route, Number(status), retryAfter) === 'store')
  )
}

/** Problems that come with `Retry-After`. */
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
      description: 'Whole seconds to wait before a retry.',
      schema: { type: 'integer', minimum: 1 },
    },
  },
}

/** Those of `headers` that are not in `known`, ignoring case. */
function missing(headers: Json, known: Json): Json {
  const names = new Set(Object.keys(known).map((name) => name.toLowerCase()))
  return Object.fromEntries(Object.entries(headers).filter(([name]) => !names.has(name.toLowerCase())))
}

function replayHeaders({ statusHeader, key }: RoutePolicy, { headers }: ComponentNames): Json {
  const { replayed, derived, status, expires } = RESPONSE_HEADER
  const sent = [
    replayed,
    ...(key.derive === null ? [] : [derived]),
    ...(statusHeader ? [status, expires] : []),
  ]
  return Object.fromEntries(sent.map((header) => [header, reference('headers', headers.get(header) ?? '')]))
}

const UNITS: readonly (readonly [string, Millis])[] = [
  ['days', 86_400_000],
  ['hours', 3_600_000],
  ['minutes', 60_000],
]

/** `7 days`, `24 hours`. */
function inWords(time: Millis): string {
  const [unit, length] = UNITS.find(([, each]) => time % each === 0 && time >= 2 * each) ?? ['seconds', 1000]
  return `${time / length} ${unit}`
}

/** Headers of replays: name of the component, purpose and schema. */
// biome-ignore format: a table
const HEADERS: ReadonlyMap<string, readonly [name: string, description: string, schema: object]> = new Map([
  [RESPONSE_HEADER.replayed, ['IdempotentReplayed',
    'This is the response to the first request with the key; nothing was executed for this one.', { enum: ['true'] }]],
  [RESPONSE_HEADER.derived, ['IdempotencyKeyDerived',
    'The proxy made the key, since the request had none.', { enum: ['true'] }]],
  [RESPONSE_HEADER.status, ['IdempotencyStatus',
    'How the request was handled.', { enum: ['executed', 'replayed', 'bypassed', 'ignored'] }]],
  [RESPONSE_HEADER.expires, ['IdempotencyExpires',
    'How long retries with the key get this response.', { format: 'date-time' }]],
])

/** Names of the overlay's components, distinct from all in the description. */
interface ComponentNames {
  readonly problem: string
  readonly headers: ReadonlyMap<string, string>
}

function componentNames(root: Json): ComponentNames {
  const free = (section: string, name: string): string => {
    const taken = member(member(root, 'components'), section)
    let own = name
    for (let n = 2; member(taken, own) !== undefined; n++) own = `${name}${n}`
    return own
  }
  const headers = [...HEADERS].map(([header, [name]]) => [header, free('headers', name)] as const)
  return { problem: free('schemas', 'IdempotencyProblem'), headers: new Map(headers) }
}

function reference(section: 'schemas' | 'headers', name: string): object {
  return { $ref: `#/components/${section}/${name}` }
}

/** Only uses what OpenAPI 3.0 and 3.1 share. `baseUrl`: prefix of the type of a problem. */
function componentsOf(names: ComponentNames, baseUrl: string): object {
  const text = { type: 'string' }
  const headers = [...HEADERS].map(([header, [, description, schema]]) => [
    names.headers.get(header),
    { description, schema: { ...text, ...schema } },
  ])
  return {
    headers: Object.fromEntries(headers),
    schemas: {
      [names.problem]: {
        type: 'object',
        description: 'A response of the proxy in front of the API (RFC 9457).',
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
              'How it is safe to send the request again: with the same key, only with a new key, or not at all.',
          },
          originalStatus: {
            type: 'integer',
            description: 'Status of the first response, which was not kept.',
          },
          location: { ...text, description: 'Location of the first response, which was not kept.' },
        },
      },
    },
  }
}

/** A JSONPath (RFC 9535) of one place. */
function jsonPath(pointer: Pointer): string {
  const quoted = (name: string): string =>
    name
      .replace(/[\\']/g, '\\$&')
      .replace(/\p{Cc}/gu, (control) => `\\u${control.charCodeAt(0).toString(16).padStart(4, '0')}`)
  return `$${pointer.map((name) => `['${quoted(name)}']`).join('')}`
}
