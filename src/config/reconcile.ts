import { isOwnOnResponses } from '../core/headers.ts'
import type {
  AnswerPattern,
  CompletedPattern,
  Expected,
  KeyPolicy,
  ReconcilePolicy,
  RoutePolicy,
} from '../core/policy.ts'
import { asksBy, asksByKey } from '../core/reconcile/answer.ts'
import type { Millis } from '../core/record.ts'
import { asksByKeyAlone, unknownSegments, unnamedSegments } from './ambiguity.ts'
import type { Findings } from './errors.ts'
import { defaultsOf, shapeOf } from './read.ts'
import { type ReconcileConfig, reconcile } from './schema-reconcile.ts'
import { formatDuration } from './units.ts'

const DEFAULTS = defaultsOf(shapeOf(reconcile)) as Pick<ReconcilePolicy, 'every' | 'attempts'> & {
  readonly request: { readonly method: string }
}

/** Headers that each response gets anew, or that only this proxy sends: stored, they would be sent beside the right ones. */
function isMadeAnew(name: string): boolean {
  return OF_THE_CONNECTION.test(name) || isOwnOnResponses(name.toLowerCase())
}
const OF_THE_CONNECTION =
  /^(?:connection|content-length|keep-alive|proxy-.*|te|trailer|transfer-encoding|upgrade)$/i

/** What lacks is found by {@link checkReconcile}. */
export function reconcilePolicy(written: ReconcileConfig | null, timeout: Millis): ReconcilePolicy | null {
  if (written === null) return null
  const { request, identity, completed, notFound, pending, after } = written
  return {
    request: {
      method: request?.method ?? DEFAULTS.request.method,
      path: request?.path ?? '',
      headers: Object.entries(request?.headers ?? {}).flat(),
    },
    identity: expected(identity ?? {}),
    completed: completedForms(completed).map(
      ({ json, response, ...pattern }): CompletedPattern => ({
        ...patternOf(pattern),
        json: json ?? '',
        response: {
          status: response?.status ?? null,
          headers: Object.entries(response?.headers ?? {}).flat(),
        },
      }),
    ),
    notFound: notFound == null ? null : patternOf(notFound),
    pending: pending == null ? null : patternOf(pending),
    after: after ?? timeout,
    every: written.every ?? DEFAULTS.every,
    attempts: written.attempts ?? DEFAULTS.attempts,
  }
}

type Form = Exclude<NonNullable<ReconcileConfig['completed']>, readonly unknown[]>

function completedForms(completed: ReconcileConfig['completed']): readonly Form[] {
  return completed === undefined ? [] : [completed].flat()
}

function patternOf({ status, when }: Pick<Form, 'status' | 'when'>): AnswerPattern {
  return { status: status ?? 0, when: expected(when ?? {}) }
}

function expected(entries: Readonly<Record<string, string>>): Expected[] {
  return Object.entries(entries).map(([pointer, value]) => ({ pointer, value }))
}

/** Lines that the connection makes: undici refuses a request that has them. */
const FRAMING = /^(?:connection|content-length|expect|keep-alive|te|trailer|transfer-encoding|upgrade)$/i

/**
 * `written`: what the route and `defaults` say together; `timeout`: of the upstream; `decides`: false for `defaults` that nothing
 * falls back to.
 */
export function checkReconcile(
  findings: Findings,
  base: string,
  written: ReconcileConfig | null | undefined,
  route: RoutePolicy,
  { timeout, decides }: { readonly timeout: Millis; readonly decides: boolean },
): void {
  const { reconcile: policy, key } = route
  if (written == null || policy === null) return
  /** Told where it is written: on the route, else in `defaults`. */
  const refuse = (property: string, message: string, also: readonly string[] = []): void => {
    const inner = `reconcile.${property}`
    const own = [`${base}.reconcile`, ...also]
    if (base !== 'defaults' && !own.some((path) => findings.isWritten(path))) return
    findings.conflict(
      [`${base}.${inner}`, ...also, `defaults.${inner}`, own[0] as string, 'defaults.reconcile'],
      message,
    )
  }
  const forms = completedForms(written.completed)
  if (written.request?.path === undefined)
    refuse('request', 'found no path to ask at; allowed: `request.path`, or `reconcile: none`')
  if (written.identity === undefined)
    refuse(
      'identity',
      'found no identity; allowed: JSON pointers whose values show that an answer is about this record, or `none`, which believes any answer',
    )
  else if (written.identity !== null && Object.keys(written.identity).length === 0)
    refuse('identity', 'found an empty identity; allowed: at least one JSON pointer, or `none`')
  else if (
    written.identity !== null &&
    !policy.identity.some(({ value }) => /\{(?:key|record)\}/.test(value))
  )
    refuse(
      'identity',
      'found an identity that every record has; allowed: {key} or {record} in one of its values, or `none`',
    )
  if (forms.length === 0 || forms.some(({ status }) => status === undefined))
    refuse('completed', 'found no status of a completed answer; allowed: `completed.status`')
  for (const name of ['notFound', 'pending'] as const) {
    if (written[name] != null && written[name].status === undefined)
      refuse(name, `found no status; allowed: \`${name}.status\`, or \`${name}: none\``)
  }
  for (const [i, name] of policy.request.headers.entries())
    if (i % 2 === 0 && FRAMING.test(name))
      refuse('request.headers', `found ${name}, which the connection makes; allowed: other headers`)
  for (const [n, { response }] of policy.completed.entries())
    for (const [i, name] of response.headers.entries())
      if (i % 2 === 0 && isMadeAnew(name))
        refuse(
          `completed${Array.isArray(written.completed) ? `[${n}]` : ''}.response.headers`,
          `found ${name}, which each answer gets anew; allowed: other headers`,
        )
  const { notFound, completed, pending } = policy
  if (
    notFound !== null &&
    notFound.when.length === 0 &&
    completed.some(({ status }) => status === notFound.status)
  )
    refuse(
      'notFound',
      `found status ${notFound.status} for both \`completed\` and \`notFound\`; allowed: another status, or a \`when\` that tells them apart`,
    )
  if (
    pending !== null &&
    pending.when.length === 0 &&
    [...completed, ...(notFound === null ? [] : [notFound])].some(({ status }) => status === pending.status)
  )
    refuse(
      'pending',
      `found status ${pending.status} for \`pending\` and another answer; allowed: another status, or a \`when\` that tells them apart`,
    )
  if (notFound !== null && policy.attempts < 2)
    refuse('attempts', 'found 1 attempt with `notFound`, which counts twice in a row; allowed: at least 2')
  const meaning = notFound === null || written.notFound?.status === undefined ? null : whyNoProof(notFound)
  if (meaning !== null) refuse('notFound', meaning)
  if (notFound !== null && policy.after < timeout && route.profile === 'strict')
    refuse(
      'after',
      `found an after of ${formatDuration(policy.after)} with profile strict; allowed: at least \`upstream.timeout\` (${formatDuration(timeout)}), since "not found" before shows nothing, or no \`after\``,
      [`${base}.profile`],
    )
  const unknown = unknownSegments({ match: route.match, reconcile: policy })
  if (base !== 'defaults' && unknown.length > 0)
    refuse(
      'request',
      `found {:${unknown[0]}}, which no segment of \`match.path\` is called; allowed: the names of its segments`,
      [`${base}.match`],
    )
  const unnamed = unnamedSegments({ ...route, reconcile: policy })
  if (decides && policy.identity.length > 0 && asksByKeyAlone(policy) && unnamed.length > 0)
    refuse(
      'request',
      `found a question by {key} alone for the paths of ${unnamed[0]}, so that one may be answered for another; allowed: {record}${unnamed.includes('*') ? '' : `, ${unnamed.map((part) => `{${part}}`).join(' and ')} in \`request.path\` or \`identity\``}, or \`scope.path: route\``,
      [`${base}.match`],
    )
  const untold = notFound === null ? null : whyUntold(policy, key)
  if (untold !== null) refuse('notFound', untold, [`${base}.key`])
  if (decides && route.scope.host)
    refuse(
      'request',
      "found reconcile on a route with `scope.host: true`: the question names no host, so that another host's operation may be found, or none; allowed: `scope.host: false`, or `reconcile: none`",
      [`${base}.scope.host`],
    )
  const fromEvents = key.from.some((from) => from.kind === 'header' && from.name === 'ce-id')
  if (fromEvents && asksByKey(policy))
    refuse(
      'request',
      'found {key} with header:ce-id, whose keys are told apart by ce-source, too; allowed: {record}',
      [`${base}.key.from`],
    )
}

/** Answers that say who may ask, or when: an operation that was done is hidden behind them as well as one that was not. */
const HIDING: ReadonlySet<number> = new Set([401, 402, 403, 407, 408, 421, 423, 425, 428, 429, 451])

/** Why such an answer does not say that there is nothing; null: it does, as the upstream uses it. */
function whyNoProof({ status, when }: AnswerPattern): string | null {
  if (status >= 500 || (status >= 300 && status < 400) || HIDING.has(status))
    return `found status ${status}, which does not say that nothing was done; allowed: 404, 410, 204, or another 2xx or 4xx with a \`when\` that says so`
  return when.length > 0 || status === 404 || status === 410 || status === 204
    ? null
    : `found status ${status} without a \`when\`; allowed: 404, 410, 204, or a \`when\` that tells what in the answer says that nothing was done`
}

/**
 * Why the upstream cannot know all that it is asked by, so that its "not found" shows nothing; null: it can. Whether it was told is
 * looked at again for each record (core/identifiers-sent.ts).
 */
function whyUntold(
  policy: ReconcilePolicy,
  { from, forward, forwardFence, derive }: KeyPolicy,
): string | null {
  const by = asksBy(policy)
  if (by.length === 0)
    return 'found a question that is the same for every record, so that "not found" shows nothing; allowed: {record} or {key} in `request`, or no `notFound`'
  if (by.includes('record') && !forwardFence)
    return 'found {record}, which the upstream is not told, so that it finds nothing; allowed: `key.forwardFence: true`, or no `notFound`'
  if (!by.includes('key')) return null
  if (forward === 'none' && from.some(({ kind }) => kind === 'header'))
    return 'found {key} with `key.forward: none`: the upstream is not told the key of a header, so that it finds nothing; allowed: another `key.forward`, or no `notFound`'
  if (derive !== null && typeof forward === 'string')
    return 'found {key} with `key.derive`: the upstream is not told a derived key, so that it finds nothing; allowed: `key.forward` with the name of a header, or no `notFound`'
  return null
}
