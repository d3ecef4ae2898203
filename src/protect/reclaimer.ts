import { shortId } from '../core/identity.ts'
import { type Millis, type RecordDraft, type RecordId, readAt, type Spans } from '../core/record.ts'
import { claimDraft, claimSpans } from '../core/settle.ts'
import type { RecordMap } from '../runtime/record-map.ts'
import type { ReclaimReply, Records, SettleReply } from '../store/records.ts'
import { type NewEpoch, type Store, StoreUnavailable } from '../store/register.ts'
import type { Execution } from './request.ts'
import type { Settler } from './settler.ts'

/** Concurrent requests to the store: enough to keep it busy, few enough for others to get through. */
const TOGETHER = 256
/**
 * Bounds of the pause before a retry, a tenth of the time taken so far: short while a grace may last, then longer to spare a full store.
 */
const RETRY: Millis = 100
const MAX_RETRY: Millis = 2000
const MAX_DECISIONS = 1000

export interface ReclaimerPorts {
  readonly records: Records
  readonly store: Pick<Store, 'remove'>
  readonly settler: Pick<Settler, 'flush'>
  readonly running: RecordMap<Execution>
  /** After this no reply from the previous server can arrive; writes it acknowledged may be lost, too. */
  readonly repliesWithin: Millis
  /** Whether the store can no longer lose a write of that time: such decisions are forgotten. */
  readonly isSafe: (at: Millis) => boolean
  /** Called when a record was claimed twice. */
  readonly onSplit: (route: string, detail: Readonly<Record<string, unknown>>) => void
  /** Called with the number of records that were lost, or older than this process knew. */
  readonly onWritten: (records: number) => void
  readonly onBug: (error: unknown) => void
}

/** A decision about the record at that version; `written` is null if it was removed. */
export interface DecisionMade {
  readonly id: RecordId
  readonly version: number
  readonly written: { readonly draft: RecordDraft; readonly spans: Spans } | null
}

type Job = () => Promise<Result>

/**
 * After a failover, rewrites this process's claims, outcomes and decisions that the store may have lost, during the grace period, while
 * nobody else claims (contract §9). Keeps the fence, and never overwrites anything newer.
 */
export class Reclaimer {
  readonly #ports: ReclaimerPorts
  #decisions: (DecisionMade & { readonly at: Millis })[] = []
  #isClosed = false

  constructor(ports: ReclaimerPorts) {
    this.#ports = ports
  }

  readonly decided = (decision: DecisionMade): void => {
    const at = performance.now()
    // The last decision on a record stands.
    const others = this.#decisions.filter((one) => one.id !== decision.id)
    this.#decisions = [...others.slice(1 - MAX_DECISIONS), { ...decision, at }]
    if (decision.written === null) this.#ports.records.forget(decision.id)
  }

  /** Resolves when the store has accepted everything. */
  async begin({ concerns }: NewEpoch): Promise<void> {
    const first = await this.#pass(concerns, false)
    // Whatever the previous server acknowledged during the first pass.
    await pause(this.#ports.repliesWithin)
    const written = this.#isClosed ? first : first + (await this.#pass(concerns, true))
    if (written > 0) this.#ports.onWritten(written)
  }

  close(): void {
    this.#isClosed = true
  }

  async #pass(concerns: NewEpoch['concerns'], isLast: boolean): Promise<number> {
    // Shared: each worker takes the next job.
    const jobs = this.#jobs(concerns, isLast).values()
    let written = 0
    const work = async (): Promise<void> => {
      for (const job of jobs) if ((await this.#insist(job)).kind === 'written') written++
    }
    await Promise.all(Array.from({ length: TOGETHER }, work))
    return written
  }

  /** Claims first: the rest can wait. */
  #jobs(concerns: NewEpoch['concerns'], isLast: boolean): Job[] {
    const { running, settler, records, isSafe } = this.#ports
    const claims = [...running]
      .map(([, execution]) => execution)
      .filter(({ id, unclaimed }) => unclaimed === null && concerns(id))
    const ended = isLast ? claims.filter((execution) => !isHeld(execution)) : []
    const writes = records.recent().filter(({ id }) => concerns(id))
    const decisions = this.#decisions.filter(({ id, at }) => !isSafe(at) && concerns(id))
    return [
      ...claims.filter(isHeld).map((execution) => () => this.#claim(execution, isLast)),
      async () => ((await settler.flush()) ? KEPT : AGAIN),
      // The newest are the likeliest to be lost.
      ...writes.reverse().map(
        ({ id, again }) =>
          async () =>
            this.#split(id, await again()),
      ),
      ...decisions.map((decision) => () => this.#decide(decision)),
      ...ended.map((execution) => () => this.#outcome(execution)),
    ]
  }

  async #claim(execution: Execution, isLast: boolean): Promise<Result> {
    const { id, operation, attempt, createdAt, route } = execution
    const ended = (): Promise<Result> | typeof KEPT => (isLast ? this.#outcome(execution) : KEPT)
    // If it has ended meanwhile, others may have claimed after it.
    if (!isHeld(execution)) return ended()
    const draft: RecordDraft = { ...claimDraft(operation, attempt), createdAt }
    const reply = await this.#ports.records.reclaim(id, draft, claimSpans(route), () => isHeld(execution))
    return reply.kind === 'kept' && !isHeld(execution) ? ended() : this.#split(id, reply)
  }

  /** Waits for the outcome to be stored: the settler holds it only once its first write has failed. */
  async #outcome(execution: Execution): Promise<Result> {
    const { running, settler } = this.#ports
    const { id } = execution
    const isUnanswered = running.get(id) === execution
    return !isUnanswered && (await settler.flush(id)) ? KEPT : AGAIN
  }

  #split(id: RecordId, reply: ReclaimReply): ReclaimReply {
    if (reply.kind !== 'split') return reply
    const { found, own } = reply
    this.#ports.onSplit(own.route, {
      route: own.route,
      record: shortId(id),
      fence: own.fence,
      state: own.state,
      foundFence: found.fence,
      found: found.state,
    })
    return reply
  }

  async #decide({ id, version, written, at }: DecisionMade & { readonly at: Millis }): Promise<Result> {
    const { records, store } = this.#ports
    const reply = await records.get(id)
    if (reply.kind !== 'read') return reply
    const { record, now } = reply
    const age = Math.ceil(performance.now() - at)
    if (record === null) {
      if (written === null || written.spans.dropIn <= age) return KEPT
      return records.reclaim(id, written.draft, aged(written.spans, age))
    }
    // If the store has reverted, others may have written another state with the same version.
    const state = readAt(record, now)?.state
    if (record.version !== version || state === 'in_progress') return KEPT
    if (written === null) return (await store.remove(id, version)) ? WRITTEN : KEPT
    if (state !== 'unknown') return KEPT
    return (await records.replace(id, version, written.draft, aged(written.spans, age))) ?? KEPT
  }

  /** Retries until the store answers, however long it refuses: nobody else knows what is lost. */
  async #insist(job: Job): Promise<Result> {
    const begun = performance.now()
    let reply = await this.#try(job)
    while (reply.kind === 'unavailable' && !this.#isClosed) {
      await pause(Math.max(RETRY, Math.min((performance.now() - begun) / 10, MAX_RETRY)))
      reply = await this.#try(job)
    }
    return reply
  }

  /** A bug with one record must not keep the others from being written. */
  async #try(job: Job): Promise<Result> {
    try {
      return await job()
    } catch (error) {
      if (error instanceof StoreUnavailable) return AGAIN
      this.#ports.onBug(error)
      return KEPT
    }
  }
}

const KEPT = { kind: 'kept' } as const
const WRITTEN = { kind: 'written' } as const
const AGAIN = { kind: 'unavailable' } as const

type Result = ReclaimReply | SettleReply | typeof KEPT | typeof WRITTEN | typeof AGAIN

/** Whether it has no outcome, so that only its claim protects it. */
function isHeld({ ended }: Execution): boolean {
  return ended === null
}

function aged({ dueIn, dropIn }: Spans, age: Millis): Spans {
  return { dueIn: dueIn - age, dropIn: dropIn - age }
}

function pause(time: Millis): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, time))
}
