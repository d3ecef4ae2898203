import { randomBytes } from 'node:crypto'
import type { ReconcilePolicy, RoutePolicy } from '../core/policy.ts'
import { buildQuestion, parametersIn } from '../core/reconcile/answer.ts'
import type { QuestionResult } from '../core/reconcile/schedule.ts'
import {
  isKnownUpstream,
  type Proof,
  proofOf,
  type Verification,
  verifyStored,
} from '../core/reconcile/verify.ts'
import type { Completed, IdempotencyRecord, Millis, RecordId } from '../core/record.ts'
import { pathParameters } from '../core/route.ts'
import type { Records } from '../store/records.ts'
import { CorruptRecord, type Page, type Register, StoreUnavailable } from '../store/register.ts'
import { askUpstream, reconcileOf } from './ask.ts'
import type { ReconcilePorts } from './ports.ts'

/** Completed records remembered for each route: one that the upstream still knows is enough. */
const REMEMBERED = 4
/** Apart from each other, so that under load not all of them are younger than the index that the upstream searches. */
const APART: Millis = 15_000
/** How far the store is searched for completed records, where this replica remembers none. A page's records are read at once. */
const PAGES = 128
const PAGE = 32
/** So many are enough to choose the youngest from: upstreams forget the others first. */
const ENOUGH = 16
/** Before the store is searched again, where nothing was found. */
const SEARCH_AGAIN: Millis = 10_000
/** How long a question that was proven stays so. */
const GOOD_FOR: Millis = 60_000
/** Before the canary is asked again, where it did not reach the upstream. */
const FIRST_PAUSE: Millis = 1_000
const MOST_BETWEEN: Millis = 60_000

export interface ControlPorts extends Pick<ReconcilePorts, 'forward' | 'policyOf' | 'upstream'> {
  readonly records: Pick<Records, 'get'>
  readonly store: Pick<Register, 'list'>
  /** Milliseconds that no correction of the time moves. */
  readonly clock: () => Millis
  readonly pause: (time: Millis) => Promise<unknown>
  readonly say: Say
}

export type Say = (
  level: 'info' | 'warn' | 'error',
  message: string,
  detail: Readonly<Record<string, unknown>>,
) => void

type Known = readonly [RecordId, Completed]

interface Remembered {
  readonly ids: RecordId[]
  at: Millis
  next: number
}

/**
 * Asks what the answer to is known, so that an answer can be judged (docs/adr/0040): about requests that the upstream answered
 * with a success, which it must find, and about one that never was, which it must not.
 */
export class Control {
  readonly #ports: ControlPorts
  readonly #remembered = new Map<string, Remembered>()
  /** By route: the question that was proven, and when. */
  readonly #proven = new Map<string, { readonly question: string; readonly at: Millis }>()
  /** By route: the question that the canary was asked with. */
  readonly #checked = new Map<string, string>()
  /** By route: when the store was searched for its records in vain. */
  readonly #searched = new Map<string, { readonly question: string; readonly at: Millis }>()
  readonly #told = new Map<string, string>()
  readonly #proving = new Map<string, Promise<Proof>>()
  #stopped = false

  constructor(ports: ControlPorts) {
    this.#ports = ports
  }

  stop(): void {
    this.#stopped = true
  }

  /** A request of the route was completed on this replica. */
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

  /** Whether "not found" of the route's question may free a key now. Many records that are asked about at once share one answer. */
  prove(route: RoutePolicy, policy: ReconcilePolicy): Promise<Proof> {
    const question = JSON.stringify(policy)
    const asked = `${route.name} ${question}`
    const proving = this.#proving.get(asked) ?? this.#prove(route, policy, question)
    this.#proving.set(asked, proving)
    return proving.finally(() => this.#proving.delete(asked))
  }

  async #prove(route: RoutePolicy, policy: ReconcilePolicy, question: string): Promise<Proof> {
    const proven = this.#proven.get(route.name)
    if (proven?.question === question && this.#ports.clock() - proven.at < GOOD_FOR) return { kind: 'proven' }
    const known = await this.#known(route, policy, question)
    const proof = proofOf(
      await Promise.all(known.map(([id, record]) => this.#ask(route, policy, id, record))),
    )
    if (proof.kind === 'proven') this.#proven.set(route.name, { question, at: this.#ports.clock() })
    this.#tell(route, policy, question, proof)
    return proof
  }

  /** Asks the canary of every question that was not asked before. Ends when all of them were answered. */
  async check(routes: readonly RoutePolicy[]): Promise<void> {
    await Promise.all(routes.map((route) => this.#check(route)))
  }

  async #check(route: RoutePolicy): Promise<void> {
    const policy = reconcileOf(route)
    if (policy === null || policy.notFound === null) return
    const question = JSON.stringify(policy)
    if (this.#checked.get(route.name) === question) return
    this.#checked.set(route.name, question)
    for (let wait = FIRST_PAUSE; !this.#stopped; wait = Math.min(wait * 2, MOST_BETWEEN)) {
      // A later configuration has another question.
      if (this.#checked.get(route.name) !== question) return
      const heard = await this.#askCanary(route, policy)
      if (heard.kind !== 'not_sent') {
        this.#judge(route, policy, heard)
        await this.#tryOnce(route, policy)
        return
      }
      await this.#ports.pause(wait)
    }
  }

  async #tryOnce(route: RoutePolicy, policy: ReconcilePolicy): Promise<void> {
    try {
      await this.prove(route, policy)
    } catch (error) {
      // It is tried again before "not found" is believed.
      if (!(error instanceof StoreUnavailable)) throw error
    }
  }

  async #askCanary(route: RoutePolicy, policy: ReconcilePolicy): Promise<QuestionResult> {
    const canary = `canary-${randomBytes(27).toString('base64url')}`
    const id = canary as RecordId
    const parameters = new Map(parametersIn(policy).map((name) => [name, canary]))
    const question = buildQuestion(policy, id, canary, parameters)
    if (typeof question === 'string') return { kind: 'unusable', why: question }
    const { heard, release } = await askUpstream(
      this.#ports,
      { id, key: canary, parameters, route, policy },
      question,
    )
    release()
    return heard
  }

  #judge(route: RoutePolicy, policy: ReconcilePolicy, heard: QuestionResult): void {
    const detail = { route: route.name, question: shown(policy) }
    if (heard.kind === 'completed')
      this.#ports.say(
        'error',
        'the question of `reconcile` finds a request that never was: what it finds proves nothing',
        detail,
      )
    else if (heard.kind !== 'not_found')
      this.#ports.say(
        'warn',
        'the question of `reconcile` about a request that never was is not answered by `notFound`: no key is freed by it',
        { ...detail, answer: heard.why },
      )
  }

  /** Said once for each question and proof. */
  #tell(route: RoutePolicy, policy: ReconcilePolicy, question: string, { kind }: Proof): void {
    const news = `${kind} ${question}`
    if (this.#told.get(route.name) === news) return
    this.#told.set(route.name, news)
    const detail = { route: route.name, question: shown(policy) }
    if (kind === 'refuted')
      this.#ports.say(
        'error',
        'the question of `reconcile` does not find requests that were completed: its "not found" is not believed',
        detail,
      )
    else if (kind === 'proven')
      this.#ports.say('info', 'the question of `reconcile` finds a request that was completed', detail)
  }

  /** Records of the route that its question should find. */
  async #known(route: RoutePolicy, policy: ReconcilePolicy, question: string): Promise<Known[]> {
    const found = await this.#those(this.#remembered.get(route.name)?.ids ?? [], route, policy)
    return found.length > 0 ? found : await this.#search(route, policy, question)
  }

  async #those(ids: readonly RecordId[], route: RoutePolicy, policy: ReconcilePolicy): Promise<Known[]> {
    const found: Known[] = []
    for (const { id, record, now } of await Promise.all(ids.map((id) => this.#read(id))))
      if (isKnownUpstream(record, route.name, policy, now, this.#ports.upstream)) found.push([id, record])
    return found
  }

  /** Before a restart, or on another replica, requests of the route may have been completed: the youngest that the store shows. */
  async #search(route: RoutePolicy, policy: ReconcilePolicy, question: string): Promise<Known[]> {
    const last = this.#searched.get(route.name)
    if (last?.question === question && this.#ports.clock() - last.at < SEARCH_AGAIN) return []
    const all: Known[] = []
    let cursor: string | null = null
    for (let pages = 0; pages < PAGES && all.length < ENOUGH; pages++) {
      const page: Page = await this.#ports.store.list('all', cursor, PAGE)
      all.push(...(await this.#those(page.ids, route, policy)))
      cursor = page.next
      if (cursor === null) break
    }
    const found = all.sort(([, a], [, b]) => b.createdAt - a.createdAt).slice(0, REMEMBERED)
    const now = this.#ports.clock()
    const [first, ...others] = found.map(([id]) => id)
    if (first === undefined) this.#searched.set(route.name, { question, at: now })
    else
      this.#remembered.set(route.name, { ids: [first, ...others], at: now, next: found.length % REMEMBERED })
    return found
  }

  /** By the key, and as it was sent where it is not found by that. */
  async #ask(
    route: RoutePolicy,
    policy: ReconcilePolicy,
    id: RecordId,
    record: Completed,
  ): Promise<QuestionResult> {
    const parameters = pathParameters(route.match, record.path)
    const once = async (key: string | null): Promise<QuestionResult> => {
      const question = buildQuestion(policy, id, key, parameters)
      if (typeof question === 'string') return { kind: 'pending', why: question }
      const { heard, release } = await askUpstream(
        this.#ports,
        { id, key, parameters, route, policy },
        question,
      )
      release()
      return heard
    }
    const first = await once(record.key)
    return first.kind === 'not_found' && record.keySent !== undefined ? await once(record.keySent) : first
  }

  async #read(id: RecordId): Promise<{ id: RecordId; record: IdempotencyRecord | null; now: Millis }> {
    try {
      return { id, ...(await this.#ports.records.get(id)) }
    } catch (error) {
      if (error instanceof CorruptRecord) return { id, record: null, now: 0 }
      throw error
    }
  }
}

function shown({ request }: ReconcilePolicy): string {
  return `${request.method} ${request.path.split('?')[0]}`
}

/** Asks the upstream anew about completed records, as the reconciler asks about unknown ones. Changes nothing. */
export class Recheck {
  readonly #ports: Pick<ReconcilePorts, 'forward' | 'policyOf'>

  constructor(ports: Pick<ReconcilePorts, 'forward' | 'policyOf'>) {
    this.#ports = ports
  }

  /** How old a record of the route must be: before, "not found" says nothing. Null: its records cannot be asked about. */
  from(route: string): Millis | null {
    return reconcileOf(this.#ports.policyOf(route))?.after ?? null
  }

  /**
   * One question, and a second one where the first was answered "not found", as it takes two to resolve a record: by the key as
   * it was sent, where that is another spelling.
   */
  async ask(id: RecordId, record: Completed): Promise<Verification> {
    const route = this.#ports.policyOf(record.route)
    const policy = reconcileOf(route)
    if (route === null || policy === null) return { kind: 'not_asked', why: 'its route has no `reconcile`' }
    const once = async (key: string | null): Promise<Verification | 'not_found'> => {
      const parameters = pathParameters(route.match, record.path)
      const question = buildQuestion(policy, id, key, parameters)
      if (typeof question === 'string') return { kind: 'not_asked', why: question }
      const { heard, release } = await askUpstream(
        this.#ports,
        { id, key, parameters, route, policy },
        question,
      )
      try {
        if (heard.kind === 'not_sent') return { kind: 'not_asked', why: heard.why }
        return heard.kind === 'not_found' ? 'not_found' : verifyStored(record.result, heard)
      } finally {
        release()
      }
    }
    const first = await once(record.key)
    const last = first === 'not_found' ? await once(record.keySent ?? record.key) : first
    return last === 'not_found' ? verifyStored(record.result, { kind: 'not_found' }) : last
  }
}
