import { filterLines } from '../core/headers.ts'
import { digest, frame } from '../core/identity.ts'
import type { Millis } from '../core/record.ts'
import type { Forward } from '../upstream/port.ts'
import { refuse } from './answers.ts'
import type { Answer, ProtectedRequest, Trace } from './request.ts'

/** Bodies of the probe's answers are not looked at. */
const RESPONSE_LIMIT = 64 * 1024
/** About 100 bytes each. */
const MOST_GRANTS = 10_000

/** Which callers the upstream has lately let see a replay (`authorizeReplay.cache`). */
export class ReplayGrants {
  readonly #until = new Map<string, Millis>()
  readonly #clock: () => Millis

  constructor(clock: () => Millis) {
    this.#clock = clock
  }

  has(caller: string): boolean {
    const until = this.#until.get(caller)
    if (until === undefined) return false
    if (this.#clock() < until) return true
    this.#until.delete(caller)
    return false
  }

  add(caller: string, time: Millis): void {
    if (time === 0) return
    this.#until.delete(caller)
    this.#until.set(caller, this.#clock() + time)
    if (this.#until.size <= MOST_GRANTS) return
    const [oldest] = this.#until.keys()
    this.#until.delete(oldest as string)
  }
}

/**
 * Asks the upstream, with the caller's own credentials, whether this caller may be told of the record (contract §6). Null:
 * yes. Comes before every answer that a record gives, so that a revoked credential reads nothing, not even a state.
 */
export async function authorizeReplay(
  ports: { readonly forward: Forward; readonly grants: ReplayGrants },
  request: ProtectedRequest,
  trace: Trace,
): Promise<Answer | null> {
  const { authorizeReplay: policy } = request.route
  if (policy === null) return null
  const credentials = new Set([
    'authorization',
    'cookie',
    ...request.route.scope.caller.filter(({ kind }) => kind === 'header').map(({ name }) => name),
  ])
  // By every credential that is shown: another token of the same caller may be the revoked one.
  const shown = filterLines(request.headers, (name) => credentials.has(name))
  // A grant is worth nothing to a policy that remembers for another time, such as one that a reload put in force.
  // Another host is another tenant of the upstream, which asks for itself.
  const caller = digest(frame([policy.path, String(policy.cache), request.host, ...shown]), null)
  if (ports.grants.has(caller)) return null
  const startedAt = performance.now()
  // Not those that would be forwarded: `Connection` could name a credential away, and the probe would be anonymous.
  const lines = [...shown, ...filterLines(request.upstreamHeaders(null), (name) => ADDRESSING.has(name))]
  const status = await probe(ports.forward, policy.path, lines)
  trace.upstreamMs += performance.now() - startedAt
  if (status === null || status >= 500)
    return refuse(
      trace,
      'replay_forbidden',
      'replay_unauthorized_yet',
      'the upstream did not say whether this caller may see the stored answer; nothing was executed',
      { retryAfter: 1 },
    )
  if (status >= 300)
    return refuse(
      trace,
      'replay_forbidden',
      'replay_forbidden',
      `the upstream answered ${status} when it was asked whether this caller may see the stored answer`,
      { status: status === 401 ? 401 : 403 },
    )
  ports.grants.add(caller, policy.cache)
  return null
}

/** Whom the request is for, and by which way it came. */
const ADDRESSING: ReadonlySet<string> = new Set([
  'cdn-loop',
  'host',
  'via',
  'x-forwarded-for',
  'x-forwarded-host',
  'x-forwarded-proto',
])

/** The status of the upstream's answer; null: there was none. */
async function probe(forward: Forward, path: string, lines: readonly string[]): Promise<number | null> {
  const result = await forward({
    method: 'GET',
    target: path,
    headers: lines,
    body: Buffer.alloc(0),
    responseLimit: RESPONSE_LIMIT,
  })
  switch (result.proof) {
    case 'responded':
      result.release()
      return result.response.status
    case 'live':
      result.live.drain()
      return result.live.status
    case 'not_sent':
    case 'unknown':
      return null
  }
}
