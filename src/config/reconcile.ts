import { isOwnOnResponses } from '../core/headers.ts'
import type {
  AnswerPattern,
  CompletedPattern,
  Expected,
  KeyPolicy,
  ReconcilePolicy,
  RoutePolicy,
} from '../core/policy.ts'
import { asksBy, asksByKey, parametersIn } from '../core/reconcile/answer.ts'
import type { Millis } from '../core/record.ts'
import type { Findings } from './errors.ts'
import { RECONCILE, type ReconcileConfig } from './properties.ts'
import { defaultsOf, type FilledIn, overlay } from './rows.ts'
import { formatDuration } from './units.ts'

/** {@link checkReconcile} finds what is missing. */
export function reconcilePolicy(written: ReconcileConfig | null, timeout: Millis): ReconcilePolicy | null {
  if (written === null) return null
  const filled = overlay(defaultsOf(RECONCILE), written) as Filled
  const { request, identity, notFound, pending, after, every, attempts } = filled
  return {
    request: { ...request, path: request.path ?? '', headers: Object.entries(request.headers ?? {}).flat() },
    identity: expected(identity),
    completed: completedForms(written).map(
      ({ json, response, ...pattern }): CompletedPattern => ({
        ...patternOf(pattern),
        json: json ?? '',
        response: {
          status: response?.status ?? null,
          headers: Object.entries(response?.headers ?? {}).flat(),
        },
      }),
    ),
    notFound: notFound && patternOf(notFound),
    pending: pending && patternOf(pending),
    after: after ?? timeout,
    every,
    attempts,
  }
}

type Filled = FilledIn<typeof RECONCILE>
type CompletedForm = Exclude<NonNullable<ReconcileConfig['completed']>, readonly unknown[]>

function completedForms({ completed }: ReconcileConfig): readonly CompletedForm[] {
  return completed === undefined ? [] : [completed].flat()
}

function patternOf({
  status,
  when,
}: Pick<CompletedForm | NonNullable<Filled['notFound']>, 'status' | 'when'>): AnswerPattern {
  return { status: status ?? 0, when: expected(when) }
}

/** Reads `when` and `identity` as a file writes them. */
export function expected(entries: Readonly<Record<string, string>> | null | undefined): Expected[] {
  return Object.entries(entries ?? {}).map(([pointer, value]) => ({ pointer, value }))
}

/** Headers of the connection: the upstream's client refuses a request that has them. */
const FRAMING = /^(?:connection|content-length|expect|keep-alive|te|trailer|transfer-encoding|upgrade)$/i
type ReconcileRule = readonly [property: string, broken: boolean, message: string, also?: string]

/** Headers set on each response, or only by this proxy: a stored one would be a duplicate. */
function isMadeAnew(name: string): boolean {
  return (
    /^(?:connection|content-length|keep-alive|proxy-.*|te|trailer|transfer-encoding|upgrade)$/i.test(name) ||
    isOwnOnResponses(name.toLowerCase())
  )
}

/** `written`: by the route and `defaults` together; `timeout`: of the upstream; `decides`: false for `defaults` that no request uses. */
export function checkReconcile(
  findings: Findings,
  base: string,
  written: ReconcileConfig | null | undefined,
  route: RoutePolicy,
  { timeout, decides }: { readonly timeout: Millis; readonly decides: boolean },
): void {
  const { reconcile: policy, key } = route
  if (written == null || policy === null) return
  const { identity, completed, notFound, pending, after } = policy
  const forms = completedForms(written)
  const isIdentifying = identity.some(({ value }) => /\{(?:key|record)\}/.test(value))
  const segments = route.match.path.split('/')
  const parameters = parametersIn(policy)
  const [unknown] = parameters.filter((name) => !segments.includes(`:${name}`))
  const folds = route.match.case === 'insensitive' && !route.match.exact
  const unnamed = unnamedSegments(route, policy)
  const named = unnamed.includes('*')
    ? ''
    : `, ${unnamed.map((part) => `{${part}}`).join(' and ')} in \`request.path\` or \`identity\``
  const noProof = notFound === null || written.notFound?.status === undefined ? null : whyNoProof(notFound)
  const untold = notFound === null ? null : whyUnproven(policy, key)
  // biome-ignore format: a table
  const rules: readonly ReconcileRule[] = [
    ['request', written.request?.path === undefined,
      'found no path for the status query; allowed: `request.path`, or `reconcile: none`'],
    ['identity', written.identity === undefined,
      'found no identity; allowed: JSON pointers whose values show that an answer is about this record, or `none`, which believes any answer'],
    ['identity', written.identity != null && identity.length === 0,
      'found an empty identity; allowed: at least one JSON pointer, or `none`'],
    ['identity', written.identity != null && identity.length > 0 && !isIdentifying,
      'found an identity that is the same for every record; allowed: {key} or {record} in one of its values, or `none`'],
    ['completed', forms.length === 0 || forms.some(({ status }) => status === undefined),
      'found no status of a completed answer; allowed: `completed.status`'],
    ...(['notFound', 'pending'] as const).map((name) => [name, written[name] != null && written[name].status === undefined,
      `found no status; allowed: \`${name}.status\`, or \`${name}: none\``] as const),
    ...namesIn(policy.request.headers).map((name) => ['request.headers', FRAMING.test(name),
      `found ${name}, which the connection sets; allowed: other headers`] as const),
    ...completed.flatMap(({ response }, n) => namesIn(response.headers).map((name) => [
      `completed${Array.isArray(written.completed) ? `[${n}]` : ''}.response.headers`, isMadeAnew(name),
      `found ${name}, which is set on each response; allowed: other headers`] as const)),
    ['notFound', isShadowing(notFound, completed),
      `found status ${notFound?.status} for both \`completed\` and \`notFound\`; allowed: another status, or a \`when\` that distinguishes them`],
    ['pending', isShadowing(pending, notFound === null ? completed : [...completed, notFound]),
      `found status ${pending?.status} for \`pending\` and another answer; allowed: another status, or a \`when\` that distinguishes them`],
    ['attempts', notFound !== null && policy.attempts < 2,
      'found 1 attempt with `notFound`, which counts twice in a row; allowed: at least 2'],
    ['notFound', noProof !== null, noProof ?? ''],
    ['after', notFound !== null && after < timeout && route.profile === 'strict',
      `found an after of ${formatDuration(after)} with profile strict; allowed: at least \`upstream.timeout\` (${formatDuration(timeout)}), since an earlier "not found" proves nothing, or no \`after\``, 'profile'],
    ['request', base !== 'defaults' && unknown !== undefined,
      `found {:${unknown}}, which names no segment of \`match.path\`; allowed: the names of its segments`, 'match'],
    ['request', base !== 'defaults' && unknown === undefined && folds && parameters.length > 0,
      `found {:${parameters[0]}} with \`match.case: insensitive\`: records have paths in lower case, so the upstream may not find what it has done; allowed: {record}, or \`match.case: sensitive\``, 'match'],
    ['request', decides && identity.length > 0 && asksByKeyAlone(policy) && unnamed.length > 0,
      `found a status query by {key} alone for the paths of ${unnamed[0]}, so one may be answered for another; allowed: {record}${named}, or \`scope.path: route\``, 'match'],
    ['notFound', untold !== null, untold ?? '', 'key'],
    ['request', decides && route.scope.host,
      "found reconcile on a route with `scope.host: true`: the status query has no host, so it may find another host's operation, or none; allowed: `scope.host: false`, or `reconcile: none`", 'scope.host'],
    ['request', asksByKey(policy) && key.from.some((from) => from.kind === 'header' && from.name === 'ce-id'),
      'found {key} with header:ce-id, whose keys are unique only together with ce-source; allowed: {record}', 'key.from'],
  ]
  for (const [property, broken, message, also] of rules) {
    const others = also === undefined ? [] : [`${base}.${also}`]
    const own = [`${base}.reconcile`, ...others]
    // Inherited values have been reported for `defaults`.
    if (!broken || (base !== 'defaults' && !own.some((path) => findings.isWritten(path)))) continue
    const parts = [`${base}.reconcile.${property}`, ...others, `defaults.reconcile.${property}`]
    findings.conflict([...parts, `${base}.reconcile`, 'defaults.reconcile'], message)
  }
}

function namesIn(flat: readonly string[]): string[] {
  return flat.filter((_, i) => i % 2 === 0)
}

/** Whether a pattern without a `when` has the status of a later one. */
function isShadowing(one: AnswerPattern | null, others: readonly AnswerPattern[]): boolean {
  return one?.when.length === 0 && others.some(({ status }) => status === one.status)
}

/** Responses about authorization or load: they say nothing about the operation. */
const HIDING: ReadonlySet<number> = new Set([401, 402, 403, 407, 408, 421, 423, 425, 428, 429, 451])
/** Statuses that say "not found" by themselves. */
const NOTHING: ReadonlySet<number> = new Set([204, 404, 410])

/** Why such a response does not prove that nothing was done; null: it does. */
function whyNoProof({ status, when }: AnswerPattern): string | null {
  if (status >= 500 || (status >= 300 && status < 400) || HIDING.has(status))
    return `found status ${status}, which does not say that nothing was done; allowed: 404, 410, 204, or another 2xx or 4xx with a \`when\` that says so`
  return when.length > 0 || NOTHING.has(status)
    ? null
    : `found status ${status} without a \`when\`; allowed: 404, 410, 204, or a \`when\` for the part of the answer that says that nothing was done`
}

/**
 * Why the upstream cannot know the identifiers of the status query, so that its "not found" proves nothing; null: it can. Whether it
 * received them is checked for each record (core/reconcile/identifiers.ts).
 */
function whyUnproven(
  policy: ReconcilePolicy,
  { from, forward, forwardFence, derive }: KeyPolicy,
): string | null {
  const by = asksBy(policy)
  if (by.length === 0)
    return 'found a status query that is the same for every record, so "not found" proves nothing; allowed: {record} or {key} in `request`, or no `notFound`'
  if (by.includes('record') && !forwardFence)
    return 'found {record}, which is not sent to the upstream, so it finds nothing; allowed: `key.forwardFence: true`, or no `notFound`'
  if (!by.includes('key')) return null
  if (forward === 'none' && from.some(({ kind }) => kind === 'header'))
    return 'found {key} with `key.forward: none`: a key from a header is not sent to the upstream, so it finds nothing; allowed: another `key.forward`, or no `notFound`'
  if (derive !== null && typeof forward === 'string')
    return 'found {key} with `key.derive`: a derived key is not sent to the upstream, so it finds nothing; allowed: `key.forward` with the name of a header, or no `notFound`'
  return null
}

/** Whether a status query may find another record's operation: the scope can give equal keys different records. */
export function asksByKeyAlone({ request, identity }: ReconcilePolicy): boolean {
  return ![request.path, ...identity.map(({ value }) => value)].some((text) => text.includes('{record}'))
}

/** Variable segments of the route's path that distinguish records, but that neither the query's path nor `identity` names. */
function unnamedSegments({ match, scope }: RoutePolicy, reconcile: ReconcilePolicy): string[] {
  if (scope.path !== 'exact') return []
  const named = parametersIn(reconcile)
  return match.path
    .split('/')
    .filter((part) => part === '*' || (part.startsWith(':') && !named.includes(part.slice(1))))
}

/** Equal for routes that send the same status query for equal keys; null: the query names a single record. */
export function queryByKey(policy: ReconcilePolicy): string | null {
  const { method, path } = policy.request
  return asksBy(policy).includes('key') && asksByKeyAlone(policy) ? `${method} ${path}` : null
}
