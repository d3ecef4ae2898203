import { isDeepStrictEqual } from 'node:util'
import { linesOf, RESPONSE_HEADER } from '../core/headers.ts'
import { type Answer, type Change, PATIENCE, type Prober, Stopped, type Template } from './prober.ts'
import { jsonOrText, reordered } from './variants.ts'

export const PROFILES = ['ietf', 'stripe', 'ours'] as const
export type Profile = (typeof PROFILES)[number]

/**
 * What a case shows:
 *
 * - `executed`: the work was done for this request, too
 * - `replayed`: the first response, and no work. `other-status`, `other-body`, `other-NAME` (a header), `unmarked` (no
 *   `Idempotent-Replayed: true`): no work, and what differs
 * - a status, and the `code` of a problem as this proxy sends it, if there is one: a refusal. 409: also if the operation is in progress
 *   forever
 * - `repeated`: the same error again. `retried`: another response after an error
 * - `none`: no complete response
 */
export type Outcome = string

export interface Case {
  readonly id: string
  /** What the case sends. */
  readonly asks: string
  /** Maximum number of requests that it sends, except to the counter. */
  readonly requests: number
  /** The outcomes that each profile requires, and with `~` others that are safe. Refusals by status, `4xx`, or code. */
  readonly wants: Readonly<Record<Profile, string>>
  /** Why the case cannot run; absent or null: it can. */
  readonly lacks?: (template: Template) => string | null
  readonly run: (prober: Prober, profile: Profile) => Promise<readonly Outcome[]>
}

/** This proxy does not store streamed responses, and then says so. */
const REPLAYED = 'replayed ~idempotency_response_unavailable'

/** More than the 255 characters that Stripe and this proxy allow. */
const LONG = 300

// biome-ignore format: a table
export const CASES: readonly Case[] = [
  { id: 'same-key', asks: 'the same key and payload twice', requests: 1 + PATIENCE,
    wants: { ietf: `${REPLAYED} ~unmarked`, stripe: REPLAYED, ours: REPLAYED },
    run: sameKey },
  { id: 'other-payload', asks: 'the same key, another payload', requests: 2,
    wants: { ietf: '422 ~4xx', stripe: '400 ~4xx', ours: 'idempotency_key_reused' },
    lacks: ({ otherBody }) => (otherBody === null ? 'needs --other-body' : null),
    run: (prober) => changed(prober, { body: prober.template.otherBody }) },
  { id: 'two-at-once', asks: 'the same request twice at once', requests: 2 + PATIENCE,
    wants: { ietf: `${REPLAYED} 409`, stripe: `${REPLAYED} 409`, ours: `${REPLAYED} idempotency_key_in_progress` },
    run: (prober) => atOnce(prober, 2) },
  { id: 'ten-at-once', asks: 'the same request ten times at once', requests: 10 + PATIENCE,
    wants: { ietf: `${REPLAYED} 409`, stripe: `${REPLAYED} 409`, ours: `${REPLAYED} idempotency_key_in_progress` },
    run: (prober) => atOnce(prober, 10) },
  { id: 'client-leaves', asks: 'a client that leaves before the response, and comes back', requests: 2 + PATIENCE,
    wants: { ietf: REPLAYED, stripe: REPLAYED, ours: REPLAYED },
    run: leaves },
  { id: 'no-key', asks: 'no key, twice', requests: 2,
    wants: { ietf: 'executed 400', stripe: 'executed', ours: 'executed idempotency_key_missing' },
    run: (prober) => apart(prober, null, null) },
  { id: 'empty-key', asks: 'an empty key, twice', requests: 2,
    wants: { ietf: '400 ~executed', stripe: '400 executed', ours: 'idempotency_key_invalid' },
    run: (prober) => apart(prober, '', '') },
  { id: 'long-key', asks: `two keys of ${LONG} characters that differ in the last one`, requests: 2,
    wants: { ietf: 'executed 400 ~4xx', stripe: '400 ~executed', ours: 'idempotency_key_invalid ~executed' },
    run: (prober) => longKeys(prober) },
  { id: 'quoted-key', asks: 'a quoted key twice', requests: 1 + PATIENCE,
    wants: { ietf: REPLAYED, stripe: `${REPLAYED} ~400`, ours: REPLAYED },
    run: (prober) => again(prober, {}, quoted) },
  { id: 'bare-key', asks: 'a quoted key, then the same one bare', requests: 1 + PATIENCE,
    wants: { ietf: `${REPLAYED} 400 ~executed`, stripe: `${REPLAYED} executed ~400`, ours: `${REPLAYED} idempotency_key_invalid` },
    run: (prober) => again(prober, {}, quoted, bare) },
  { id: 'other-caller', asks: 'the same request from another caller', requests: 2,
    wants: { ietf: 'executed ~4xx', stripe: 'executed', ours: 'executed' },
    lacks: ({ otherCaller }) => (otherCaller === null ? 'needs --other-caller' : null),
    run: (prober) => changed(prober, { header: prober.template.otherCaller }) },
  { id: 'other-path', asks: 'the same key and payload on another path', requests: 2,
    wants: { ietf: 'executed 422 ~4xx', stripe: '400 ~executed ~4xx', ours: 'executed' },
    lacks: ({ otherUrl }) => (otherUrl === null ? 'needs --other-path' : null),
    run: (prober) => changed(prober, { url: prober.template.otherUrl }) },
  { id: 'json-order', asks: 'the same JSON, its members in another order', requests: 1 + PATIENCE,
    wants: { ietf: `${REPLAYED} ~4xx`, stripe: `${REPLAYED} ~400`, ours: REPLAYED },
    lacks: ({ body }) => (reordered(body) === null ? 'needs JSON whose members can change places' : null),
    run: (prober) => again(prober, { body: reordered(prober.template.body) }) },
  { id: 'after-error', asks: 'a payload that is refused, twice; then the right one under the same key', requests: 3,
    wants: { ietf: 'repeated executed 422 ~400', stripe: 'repeated executed 400 ~422', ours: 'repeated executed idempotency_key_reused' },
    lacks: ({ errorBody }) => (errorBody === null ? 'needs --error-body' : null),
    run: afterError },
  { id: 'after-5xx', asks: 'a payload on which the API fails, twice', requests: 2,
    wants: { ietf: 'repeated ~retried ~409', stripe: 'repeated ~retried', ours: 'repeated idempotency_outcome_unknown ~retried' },
    lacks: ({ failureBody }) => (failureBody === null ? 'needs --failure-body' : null),
    run: afterFailure },
]

export const BASELINE_REQUESTS = 2

/** Two requests with different keys: checks that the template works, and that executions can be distinguished. */
export async function baseline(prober: Prober): Promise<void> {
  prober.beginCase()
  const { href } = prober.template.url
  const isCounted = (await prober.work()) !== null
  for (let n = 0; n < BASELINE_REQUESTS; n++) {
    const { status, headers, body } = await prober.send(prober.newKey())
    if (status === 0) throw new Stopped(`${href} cannot be reached: ${body.toString()}`)
    if (status === 307 || status === 308)
      throw new Stopped(
        `${href} redirects to ${linesOf(headers, 'location')[0] ?? 'nowhere'}: probe that URL`,
      )
    if (!succeeded(status))
      throw new Stopped(
        `${href} answers ${status} to a request with a new key; allowed: 2xx, 301, 302 or 303`,
      )
  }
  const work = await prober.work()
  if (work !== null && work !== 2)
    throw new Stopped(
      `the counter rose by ${work} for two requests with new keys; allowed: 2, and nobody else's requests meanwhile`,
    )
  const [first, second] = prober.answers as [Answer, Answer]
  if (!isCounted && isSameWork(first, second))
    throw new Stopped(
      'two requests with new keys got the same response, so responses do not show executions: give --count-url or --count-json',
    )
}

async function sameKey(prober: Prober, profile: Profile): Promise<readonly Outcome[]> {
  const key = prober.newKey()
  const first = await prober.send(key)
  await prober.work()
  if (!succeeded(first.status)) return [refusalOf(first)]
  const replay = await prober.sendPatiently(key)
  const outcome = outcomeOf(first, replay, await prober.work())
  if (outcome !== 'replayed') return [outcome]
  const isMarked = linesOf(replay.headers, RESPONSE_HEADER.replayed.toLowerCase()).join() === 'true'
  return [outcome, ...differences(first, replay, profile), ...(isMarked ? [] : ['unmarked'])]
}

type Notation = (key: string) => string
const bare: Notation = (key) => key.replaceAll('"', '')
const quoted: Notation = (key) => `"${bare(key)}"`
const asIs: Notation = (key) => key

/** A request, then the same one in another form, or with the same key in another notation. */
function again(
  prober: Prober,
  change: Change,
  one: Notation = asIs,
  other: Notation = one,
): Promise<readonly Outcome[]> {
  const key = prober.newKey()
  return followed(prober, one(key), () => prober.sendPatiently(other(key), change))
}

/** A request, then another one under the same key. */
function changed(prober: Prober, change: Change): Promise<readonly Outcome[]> {
  const key = prober.newKey()
  return followed(prober, key, () => prober.send(key, change), change.body === undefined)
}

/** `isElsewhere`: the counter may not count the second request. */
async function followed(
  prober: Prober,
  key: string,
  send: () => Promise<Answer>,
  isElsewhere = false,
): Promise<readonly Outcome[]> {
  const first = await prober.send(key)
  await prober.work()
  if (!succeeded(first.status)) return [refusalOf(first)]
  const further = await send()
  const work = await prober.work()
  return [outcomeOf(first, further, isElsewhere && work === 0 ? null : work)]
}

/** Two independent requests. */
async function apart(prober: Prober, one: string | null, other: string | null): Promise<readonly Outcome[]> {
  const first = await prober.send(one)
  await prober.work()
  const second = await prober.send(other)
  const work = await prober.work()
  return [
    succeeded(first.status) ? 'executed' : refusalOf(first),
    succeeded(first.status)
      ? outcomeOf(first, second, work)
      : succeeded(second.status)
        ? 'executed'
        : refusalOf(second),
  ]
}

function longKeys(prober: Prober): Promise<readonly Outcome[]> {
  const key = prober.newKey()
  const long = bare(key).padStart(LONG - 1, 'k')
  const notation = key.startsWith('"') ? quoted : asIs
  return apart(prober, notation(`${long}1`), notation(`${long}2`))
}

async function atOnce(prober: Prober, n: number): Promise<readonly Outcome[]> {
  const key = prober.newKey()
  const answers = await Promise.all(Array.from({ length: n }, () => prober.send(key)))
  const last = await prober.sendPatiently(key)
  return together(prober, [...answers, last])
}

async function leaves(prober: Prober): Promise<readonly Outcome[]> {
  const key = prober.newKey()
  await prober.sendAndLeave(key)
  const back = await prober.sendPatiently(key)
  return together(prober, [back, await prober.send(key)])
}

/** Answers to the same request, of which one executed it. */
async function together(prober: Prober, answers: readonly Answer[]): Promise<readonly Outcome[]> {
  const work = await prober.work()
  const first = answers.find(({ status }) => succeeded(status))
  const last = answers.at(-1) as Answer
  if (work !== null && work > 1) return ['executed']
  if (first === undefined) return [refusalOf(last)]
  const others = answers.filter((answer) => answer !== first)
  return [...new Set(others.map((answer) => outcomeOf(first, answer, work === null ? null : 0)))]
}

async function afterError(prober: Prober): Promise<readonly Outcome[]> {
  const { errorBody, body } = prober.template
  const key = prober.newKey()
  const first = await prober.send(key, { body: errorBody })
  if (first.status === 0) return [refusalOf(first)]
  if (first.status < 400 || first.status > 499)
    throw new Stopped(`the API answers ${first.status} to --error-body; allowed: a payload that it refuses`)
  const second = await prober.send(key, { body: errorBody })
  await prober.work()
  const right = await prober.send(key, { body })
  const outcome = outcomeOf(first, right, await prober.work())
  return [second.status === first.status ? 'repeated' : refusalOf(second), outcome]
}

async function afterFailure(prober: Prober): Promise<readonly Outcome[]> {
  const change = { body: prober.template.failureBody }
  const key = prober.newKey()
  const first = await prober.send(key, change)
  // Breaking off is also a failure.
  if (first.status !== 0 && first.status < 500)
    throw new Stopped(
      `the API answers ${first.status} to --failure-body; allowed: a payload on which it fails`,
    )
  const second = await prober.send(key, change)
  const work = await prober.work()
  if (work !== null && work > 1) return ['executed']
  if (second.status === first.status) return ['repeated']
  return [succeeded(second.status) ? 'retried' : refusalOf(second)]
}

/** What a second answer shows, compared with the first. `work`: executions counted for it; null: no counter. */
function outcomeOf(first: Answer, further: Answer, work: number | null): Outcome {
  if (work === null ? succeeded(further.status) && !isSameWork(first, further) : work > 0) return 'executed'
  if (further.status === first.status && further.body.equals(first.body)) return 'replayed'
  if (!succeeded(further.status)) return refusalOf(further)
  return further.status === first.status ? 'other-body' : 'other-status'
}

/** Whether a response says that the work is done. */
function succeeded(status: number): boolean {
  return status >= 200 && status < 304
}

/** Whether both answers report one execution, perhaps in different bytes. */
function isSameWork(one: Answer, other: Answer): boolean {
  const place = ({ headers }: Answer): string => linesOf(headers, 'location').join()
  return place(one) === place(other) && isDeepStrictEqual(jsonOrText(one.body), jsonOrText(other.body))
}

function refusalOf({ status, body }: Answer): Outcome {
  if (status === 0) return 'none'
  const code = (jsonOrText(body) as { readonly code?: unknown } | null)?.code
  return typeof code === 'string' && /^idempotency_[a-z_]{1,40}$/.test(code)
    ? `${status} ${code}`
    : String(status)
}

/** Header lines that say what a response is. Others belong to the exchange. */
const CONTENT = new Set(['content-type', 'content-encoding', 'content-language', 'etag', 'link', 'location'])
/** This proxy replays all header lines but these (contract §8). */
const OWN = /^(?:connection|keep-alive|transfer-encoding|content-length|idempotent-replayed|idempotency-.*)$/

function differences(first: Answer, replay: Answer, profile: Profile): Outcome[] {
  const lines = ({ headers }: Answer): Map<string, string[]> => {
    const found = new Map<string, string[]>()
    for (let n = 0; n < headers.length; n += 2) {
      const name = (headers[n] as string).toLowerCase()
      if (profile === 'ours' ? OWN.test(name) : !CONTENT.has(name)) continue
      found.set(name, [...(found.get(name) ?? []), headers[n + 1] as string])
    }
    return found
  }
  const [before, after] = [lines(first), lines(replay)]
  const names = new Set([...before.keys(), ...after.keys()])
  return [...names]
    .filter((name) => !isDeepStrictEqual(before.get(name), after.get(name)))
    .map((name) => `other-${name}`)
}
