import { randomBytes } from 'node:crypto'
import type { ReconcilePolicy, RoutePolicy } from '../core/policy.ts'
import { parametersIn } from '../core/reconcile/answer.ts'
import {
  isKnownUpstream,
  type Proof,
  proofOf,
  type Verification,
  verifyStored,
} from '../core/reconcile/verify.ts'
import type { Completed, Millis, RecordId } from '../core/record.ts'
import { pathParameters } from '../core/route.ts'
import { orThrow, type Records } from '../store/records.ts'
import { type Page, type Register, StoreUnavailable } from '../store/register.ts'
import { type AskResult, askOnce, reconcileOf } from './ask.ts'
import type { ReconcilePorts } from './ports.ts'

/** Completed records remembered per route: one that the upstream still knows is enough. */
const REMEMBERED = 4
/** Minimum time between remembered completions, so that under load not all are newer than the upstream's search index. */
const APART: Millis = 15_000
/** Pages of the store to search if this replica remembers none. Records of a page are read concurrently. */
const PAGES = 128
const PAGE = 32
/** Number of records read to choose the youngest ones: upstreams forget old ones first. */
const ENOUGH = 16
/** Pause after a search that found nothing. */
const SEARCH_AGAIN: Millis = 10_000
/** How long a proof holds. */
const PROOF_HOLDS: Millis = 60_000
/** Pause before the canary is sent again if it did not reach the upstream; doubled up to the second value. */
const FIRST_PAUSE: Millis = 1_000
const MAX_PAUSE: Millis = 60_000

export interface ControlPorts extends Pick<ReconcilePorts, 'forward' | 'policyOf' | 'upstream'> {
  readonly records: Pick<Records, 'get'>
  readonly store: Pick<Register, 'list'>
  /** Monotonic. */
  readonly clock: () => Millis
  readonly pause: (time: Millis) => Promise<unknown>
  readonly say: ReconcileLog
}

export type ReconcileLog = (
  level: 'info' | 'warn' | 'error',
  message: string,
  detail: Readonly<Record<string, unknown>>,
) => void

type Known = readonly [RecordId, Completed]

/** The status query of a route in one configuration, with its test results. */
interface ControlQuery {
  route: RoutePolicy
  readonly policy: ReconcilePolicy
  canarySent: boolean
  provenAt: Millis
  /** When the store was last searched without success. */
  searchedAt: Millis
  reported: Proof['kind'] | null
  proving: Promise<Proof> | null
}

/** Log messages about a status query. */
// biome-ignore format: a table
const FINDINGS = {
  canaryFound: ['error',
    'the status query of `reconcile` finds a request that never existed: its answers prove nothing'],
  canaryOpen: ['warn',
    'the status query of `reconcile` about a request that never existed is not answered by `notFound`: it frees no key'],
  refuted: ['error',
    'the status query of `reconcile` does not find requests that were completed: its "not found" does not count'],
  proven: ['info', 'the status query of `reconcile` finds a request that was completed'],
} as const

/**
 * Tests status queries whose answers are known (docs/adr/0042): they must find requests that the upstream answered with a success, and must
 * not find one that never existed, the canary.
 */
export class Control {
  /** Routes with a status query, by name: only their completions are remembered. */
  readonly routes = new Set<string>()
  readonly #ports: ControlPorts
  /** Completed records by route. */
  readonly #remembered = new Map<string, { readonly ids: RecordId[]; at: Millis; next: number }>()
  readonly #queries = new Map<string, ControlQuery>()
  #stopped = false

  constructor(ports: ControlPorts) {
    this.#ports = ports
  }

  stop(): void {
    this.#stopped = true
  }

  /** This replica completed a request of the route, which is one of {@link routes}. */
  completed(route: string, id: RecordId): void {
    const now = this.#ports.clock()
    const found = this.#remembered.get(route)
    if (found === undefined) this.#remembered.set(route, { ids: [id], at: now, next: 1 })
    else if (now - found.at >= APART) {
      found.ids[found.next] = id
      found.next = (found.next + 1) % REMEMBERED
      found.at = now
    }
  }

  /** Whether "not found" of the route's status query may free a key now. Concurrent callers share one answer. */
  prove(route: RoutePolicy, policy: ReconcilePolicy): Promise<Proof> {
    const query = this.#query(route, policy)
    query.proving ??= this.#prove(query).finally(() => {
      query.proving = null
    })
    return query.proving
  }

  #query(route: RoutePolicy, policy: ReconcilePolicy): ControlQuery {
    const name = nameOf(route, policy)
    const known = this.#queries.get(name)
    if (known !== undefined) {
      known.route = route
      return known
    }
    const never = Number.NEGATIVE_INFINITY
    const query: ControlQuery = {
      route,
      policy,
      canarySent: false,
      provenAt: never,
      searchedAt: never,
      reported: null,
      proving: null,
    }
    this.#queries.set(name, query)
    return query
  }

  async #prove(query: ControlQuery): Promise<Proof> {
    if (this.#ports.clock() - query.provenAt < PROOF_HOLDS) return { kind: 'proven' }
    const known = await this.#known(query)
    const asked = known.map((one) => askBoth(this.#ports, query, one, one[1].keySent))
    const proof = proofOf(await Promise.all(asked))
    if (proof.kind === 'proven') query.provenAt = this.#ports.clock()
    // Logs only new results.
    if (query.reported !== proof.kind && (proof.kind === 'proven' || proof.kind === 'refuted'))
      this.#say(query, proof.kind)
    query.reported = proof.kind
    return proof
  }

  /** Sends the canary of every new status query. Resolves when all have been answered. */
  async check(routes: readonly RoutePolicy[]): Promise<void> {
    const queries = routes.flatMap((route) => {
      const policy = reconcileOf(route)
      return policy === null ? [] : [this.#query(route, policy)]
    })
    for (const [name, query] of this.#queries) if (!queries.includes(query)) this.#queries.delete(name)
    this.routes.clear()
    for (const { route } of queries) this.routes.add(route.name)
    await Promise.all(queries.map((query) => this.#check(query)))
  }

  async #check(query: ControlQuery): Promise<void> {
    const { route, policy } = query
    if (policy.notFound === null || query.canarySent) return
    query.canarySent = true
    // False once a later configuration has another status query.
    const isCurrent = (): boolean => !this.#stopped && this.#queries.get(nameOf(route, policy)) === query
    for (let wait = FIRST_PAUSE; isCurrent(); wait = Math.min(wait * 2, MAX_PAUSE)) {
      const result = await this.#askCanary(query)
      if (result.kind === 'not_sent') {
        await this.#ports.pause(wait)
        continue
      }
      if (result.kind === 'completed') this.#say(query, 'canaryFound')
      else if (result.kind !== 'not_found') this.#say(query, 'canaryOpen', { answer: result.why })
      return await this.prove(route, policy).then(
        () => {},
        (error: unknown) => {
          // It is tried again before "not found" counts.
          if (!(error instanceof StoreUnavailable)) throw error
        },
      )
    }
  }

  #askCanary({ route, policy }: ControlQuery): Promise<AskResult> {
    const canary = `canary-${randomBytes(27).toString('base64url')}`
    const parameters = new Map(parametersIn(policy).map((name) => [name, canary]))
    return askOnce(this.#ports, { id: canary as RecordId, key: canary, parameters, route, policy })
  }

  #say({ route, policy: { request } }: ControlQuery, finding: keyof typeof FINDINGS, more = {}): void {
    const [level, message] = FINDINGS[finding]
    const query = `${request.method} ${request.path.split('?')[0]}`
    this.#ports.say(level, message, { route: route.name, query, ...more })
  }

  /** Records that the status query should find. */
  async #known(query: ControlQuery): Promise<Known[]> {
    const found = await this.#knownAmong(this.#remembered.get(query.route.name)?.ids ?? [], query)
    return found.length > 0 ? found : await this.#search(query)
  }

  async #knownAmong(ids: readonly RecordId[], { route, policy }: ControlQuery): Promise<Known[]> {
    const found = await Promise.all(
      ids.map(async (id): Promise<Known[]> => {
        const reply = await this.#ports.records.get(id)
        if (reply.kind === 'corrupt') return []
        const { record, now } = orThrow(reply)
        return isKnownUpstream(record, route.name, policy, now, this.#ports.upstream) ? [[id, record]] : []
      }),
    )
    return found.flat()
  }

  /** The youngest in the store: completed by another replica, or before this process began. */
  async #search(query: ControlQuery): Promise<Known[]> {
    if (this.#ports.clock() - query.searchedAt < SEARCH_AGAIN) return []
    const all: Known[] = []
    let cursor: string | null = null
    for (let pages = 0; pages < PAGES && all.length < ENOUGH; pages++) {
      const page: Page = await this.#ports.store.list('all', cursor, PAGE)
      all.push(...(await this.#knownAmong(page.ids, query)))
      cursor = page.next
      if (cursor === null) break
    }
    const found = all.sort(([, a], [, b]) => b.createdAt - a.createdAt).slice(0, REMEMBERED)
    const at = this.#ports.clock()
    if (found.length === 0) query.searchedAt = at
    else
      this.#remembered.set(query.route.name, {
        ids: found.map(([id]) => id),
        at,
        next: found.length % REMEMBERED,
      })
    return found
  }
}

function nameOf(route: RoutePolicy, policy: ReconcilePolicy): string {
  return `${route.name} ${JSON.stringify(policy)}`
}

/** Asks by the key, and if that is not found, by the key `again`. */
async function askBoth(
  ports: Pick<ReconcilePorts, 'forward'>,
  { route, policy }: Pick<ControlQuery, 'route' | 'policy'>,
  [id, record]: Known,
  again: string | null | undefined,
): Promise<AskResult> {
  const parameters = pathParameters(route.match, record.path)
  const by = (key: string | null) => askOnce(ports, { id, key, parameters, route, policy })
  const first = await by(record.key)
  return first.kind === 'not_found' && again !== undefined ? await by(again) : first
}

/** Asks the upstream again about completed records, as the reconciler asks about unknown ones. Changes nothing. */
export class Recheck {
  readonly #ports: Pick<ReconcilePorts, 'forward' | 'policyOf'>

  constructor(ports: Pick<ReconcilePorts, 'forward' | 'policyOf'>) {
    this.#ports = ports
  }

  /** Minimum age of a record of the route: before that, "not found" proves nothing. Null: its records cannot be asked about. */
  from(route: string): Millis | null {
    return reconcileOf(this.#ports.policyOf(route))?.after ?? null
  }

  /** Asks a second time, by the key as sent, if the first answer is "not found": resolving a record takes two. */
  async ask(id: RecordId, record: Completed): Promise<Verification> {
    const route = this.#ports.policyOf(record.route)
    const policy = reconcileOf(route)
    if (route === null || policy === null) return { kind: 'not_asked', why: 'its route has no `reconcile`' }
    const last = await askBoth(this.#ports, { route, policy }, [id, record], record.keySent ?? record.key)
    return last.kind === 'not_sent' || last.kind === 'unaskable'
      ? { kind: 'not_asked', why: last.why }
      : verifyStored(record.result, last)
  }
}
