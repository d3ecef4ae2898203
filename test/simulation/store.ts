import type { Rate } from '../../src/core/policy.ts'
import {
  type IdempotencyRecord,
  type Millis,
  type RecordId,
  readAt,
  type Spans,
} from '../../src/core/record.ts'
import type { MaybePromise } from '../../src/runtime/scheduling.ts'
import type { StoreOperation } from '../../src/store/around.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { decodeRecord, isClaim, readStamps } from '../../src/store/record/codec.ts'
import {
  type Condition,
  type DueKind,
  InGrace,
  type Listing,
  type Note,
  type PutKind,
  type Renewal,
  type Stamp,
  type Store,
  StoreFull,
  StoreUnavailable,
  Unreplicated,
} from '../../src/store/register.ts'
import type { Judge } from './judge.ts'
import { GRACE, STORE_TIMEOUT, type Weather } from './scenario.ts'
import { type Owner, type Scheduler, WORLD } from './scheduler.ts'

/** The store's clock when the simulation begins. */
const START: Millis = 1_795_000_000_000
const NO_VERSION = -1
const EMPTY = Buffer.alloc(0)

/** The real memory store, shared by all replicas, each of which has a wire of its own to it. */
export class SimulatedStore {
  /** A step of its clock, or how far it is from that of another store. */
  skew: Millis = 0
  isDown = false
  /** It answers reads alone. */
  isReadOnly = false
  weather: Weather
  /** A process calls. `risk`: how many times as likely as usual it is that something happens to it. */
  onCall: (by: Owner, risk: number) => void = () => {}
  readonly #scheduler: Scheduler
  readonly #judge: Judge
  readonly #inner = memoryStore({ clock: () => this.now, maxBytes: MEMORY_BYTES })
  readonly #ids = new Set<RecordId>()
  /** Writes that have been sent, perhaps by a process that has died since, and not applied yet. */
  writesUnderWay = 0
  /** Since when it is who it is, and until when it hands nothing out (store/redis/lua/epoch.lua); null: nobody has looked at it yet. */
  #epoch: { readonly since: Millis; till: Millis } | null = { since: START, till: START }
  /** The grace is over: before anything is handed out. */
  onGraceOver: () => void = () => {}
  #isGraceOver = true

  /** For timelines. */
  readonly name: string

  constructor(scheduler: Scheduler, judge: Judge, weather: Weather, name = 'store') {
    this.#scheduler = scheduler
    this.#judge = judge
    this.weather = weather
    this.name = name
  }

  get now(): Millis {
    return Math.floor(START + this.#scheduler.now + this.skew)
  }

  /** How a message takes its time: most are fast, some outlast every timeout. */
  latency(): Millis {
    const { random } = this.#scheduler
    if (random.chance(this.weather.slow)) return random.between(50, random.chance(0.3) ? 5_000 : 700)
    return random.chance(0.8) ? random.between(0.1, 2) : random.between(1, 40)
  }

  /** The record as it is stored. A swap that no version meets returns it without a promise. */
  peek(id: RecordId): Buffer | null {
    const reply = this.#inner.swap(id, { version: NO_VERSION }, EMPTY, { dueIn: 0, dropIn: 0 }, false)
    if (reply instanceof Promise || reply.done) throw new Error('the memory store answers at once')
    return reply.bytes
  }

  read(id: RecordId): IdempotencyRecord | null {
    const bytes = this.peek(id)
    return bytes === null ? null : readAt(decodeRecord(bytes), this.now)
  }

  snapshot(): Map<RecordId, Buffer | null> {
    return new Map([...this.#ids].map((id) => [id, this.peek(id)]))
  }

  /** Back to what it was then: as of a replica that lagged, or a backup. Returns what has changed by that. */
  restore(before: ReadonlyMap<RecordId, Buffer | null>): RecordId[] {
    const changed: RecordId[] = []
    for (const id of this.#ids) {
      const [old, now] = [before.get(id) ?? null, this.peek(id)]
      if (old === null ? now === null : now !== null && old.equals(now)) continue
      changed.push(id)
      if (now !== null) void this.#inner.remove(id, readStamps(now).version)
      if (old === null) continue
      const { due, dropAt } = readStamps(old)
      void this.#inner.put(id, Buffer.from(old), {
        dueIn: Math.max(0, due - this.now),
        dropIn: dropAt - this.now,
      })
    }
    return changed
  }

  /** Another server goes on with what it has, which was all there was then. Returns what has changed by that. */
  failOver(before: ReadonlyMap<RecordId, Buffer | null>): RecordId[] {
    this.#epoch = null
    this.#isGraceOver = false
    return this.restore(before)
  }

  /** As `grace_left` in store/redis/lua/epoch.lua. */
  #held(isReclaim: boolean): { readonly left: Millis; readonly since: Millis } {
    const { now } = this
    this.#epoch ??= { since: now, till: now + GRACE }
    const { since, till } = this.#epoch
    if (isReclaim && till > now) this.#epoch.till = Math.max(till, Math.min(now + 200, since + 2 * GRACE))
    const left = Math.max(0, this.#epoch.till - now)
    if (left === 0 && !this.#isGraceOver) {
      this.#isGraceOver = true
      this.onGraceOver()
    }
    return { left, since }
  }

  /** It has failed over, and hands nothing out yet. */
  get isInGrace(): boolean {
    return !this.#isGraceOver
  }

  /** Since when it is who it is. */
  get since(): Millis | null {
    return this.#epoch?.since ?? null
  }

  /** As who it is, and how long it hands nothing out yet: what a replica looks for. */
  look(by: Owner): Promise<{ readonly left: Millis; readonly since: Millis }> {
    return this.#call(by, 'ping', null, () => {
      this.#refuseIfReadOnly()
      return this.#held(false)
    })
  }

  #refuseIfReadOnly(): void {
    if (this.isReadOnly) throw new StoreUnavailable('the server takes no writes', false)
  }

  #refuseInGrace(isReclaim: boolean): void {
    const { left, since } = this.#held(isReclaim)
    if (left > 0 && !isReclaim) throw new InGrace(this.now, since, left)
  }

  /** The same store as one process sees it. */
  wire(by: Owner): Store {
    const call = <T>(op: StoreOperation, id: RecordId | null, apply: () => MaybePromise<T>): Promise<T> =>
      this.#call(by, op, id, apply)
    const change = <T>(op: StoreOperation, id: RecordId | null, apply: () => MaybePromise<T>): Promise<T> =>
      call(op, id, () => {
        this.#refuseIfReadOnly()
        return apply()
      })
    const writing = <T extends { readonly done: boolean }>(
      id: RecordId,
      write: () => MaybePromise<T>,
    ): MaybePromise<T> => {
      this.#ids.add(id)
      const before = this.peek(id)
      const reply = write()
      if (!(reply instanceof Promise) && reply.done)
        this.#judge.wrote(id, before, this.peek(id) as Buffer, this.now, by, this.name)
      return reply
    }
    const inner = this.#inner
    return {
      name: 'memory',
      put: (id: RecordId, bytes: Buffer, spans: Spans, entry: PutKind = 'claim') => {
        const sent = Buffer.from(bytes)
        const waits = entry !== 'again' && isClaim(sent)
        const put = () => {
          if (entry === 'again' || this.peek(id) === null) this.#refuseInGrace(entry !== 'claim')
          return writing(id, () => inner.put(id, sent, spans))
        }
        return waits ? this.#replicated(by, id, change('put', id, put)) : change('put', id, put)
      },
      swap: (id: RecordId, on: Condition, bytes: Buffer, spans: Spans, nextFence: boolean) => {
        const sent = Buffer.from(bytes)
        const swap = () => {
          if (nextFence) this.#refuseInGrace(false)
          return writing(id, () => inner.swap(id, on, sent, spans, nextFence))
        }
        const waits = nextFence && isClaim(sent)
        return waits ? this.#replicated(by, id, change('swap', id, swap)) : change('swap', id, swap)
      },
      get: (id: RecordId) => call('get', id, () => inner.get(id)),
      renew: (items: readonly Renewal[]) => change('renew', items[0]?.id ?? null, () => inner.renew(items)),
      due: (limit: number, of?: DueKind) => call('due', null, () => inner.due(limit, of)),
      remove: (id: RecordId, version: number) => change('remove', id, () => inner.remove(id, version)),
      list: (which: Listing, cursor: string | null, limit: number) =>
        call('list', null, () => inner.list(which, cursor, limit)),
      history: {
        append: (id: RecordId, notes: readonly Note[]) =>
          change('note', id, () => inner.history.append(id, notes)),
        read: (id: RecordId) => call('notes', id, () => inner.history.read(id)),
      },
      limits: {
        take: (bucket: string, rate: Rate, units: 1 | -1) =>
          change('throttle', null, () => inner.limits.take(bucket, rate, units)),
      },
      watch: (id: RecordId, changed: () => void) => this.#watch(by, id, changed),
      ping: () => call('ping', null, () => inner.ping()),
      traits: () => inner.traits(),
      close: () => inner.close(),
    }
  }

  /** `store.wait`: a claim that is written waits for replicas, which may not answer. */
  async #replicated<T extends { readonly done: boolean }>(
    by: Owner,
    id: RecordId,
    claim: Promise<T>,
  ): Promise<T> {
    const reply = await claim
    const { unreplicated } = this.weather
    if (!reply.done || unreplicated === 0 || !this.#scheduler.random.chance(unreplicated)) return reply
    const { fence } = (reply as unknown as { readonly stamp: Stamp }).stamp
    this.#judge.unreplicated(id, fence)
    this.#scheduler.tell(by.name, 'its claim has reached no replica', this.#judge.nameOf(id))
    throw new Unreplicated('no replica has it')
  }

  #call<T>(by: Owner, op: StoreOperation, id: RecordId | null, apply: () => MaybePromise<T>): Promise<T> {
    const { random } = this.#scheduler
    const { lost, refused, full } = this.weather
    const about = this.#judge.nameOf(id)
    this.onCall(by, 1)
    const tell = (what: string): void => this.#scheduler.tell(by.name, `${op}: ${what}`, about)
    return new Promise((resolve, reject) => {
      const later = (delay: Millis, owner: Owner, what: string, act: () => void) =>
        this.#scheduler.after(delay, owner, what, act)
      // Nobody waits longer for a reply.
      const soon = (): Millis => Math.min(this.latency(), STORE_TIMEOUT)
      if (this.isDown || random.chance(refused)) {
        later(soon(), by, 'store refuses', () => {
          tell('refused, nothing was applied')
          reject(new StoreUnavailable('the store is down', false))
        })
        return
      }
      const isWrite = op === 'put' || op === 'swap'
      if (isWrite && random.chance(full)) {
        later(soon(), by, 'store is full', () => {
          tell('the store is full')
          reject(new StoreFull('the store is full'))
        })
        return
      }
      const timeout = this.#scheduler.after(
        STORE_TIMEOUT / by.rate,
        by,
        'store times out',
        () => {
          tell('no reply in time')
          reject(new StoreUnavailable('the store did not answer in time', true))
        },
        true,
      )
      if (random.chance(lost)) return
      const isReplyLost = random.chance(lost)
      const back = this.latency()
      if (isWrite) this.writesUnderWay++
      later(this.latency(), WORLD, 'store applies', () => {
        if (isWrite) this.writesUnderWay--
        let reply: MaybePromise<T>
        try {
          reply = apply()
        } catch (error) {
          // What it refuses, it refuses at once.
          reply = Promise.reject(error)
          reply.catch(() => {})
        }
        if (isReplyLost) return tell('applied, the reply is lost')
        const arrive = (settled: () => void): void =>
          void later(back, by, 'store replies', () => {
            // After the timeout nobody listens.
            if (timeout.isCancelled) return
            timeout.isCancelled = true
            settled()
          })
        if (reply instanceof Promise)
          void reply.then(
            (value) => arrive(() => resolve(value)),
            (error: unknown) => arrive(() => reject(error)),
          )
        else arrive(() => resolve(reply))
      })
    })
  }

  /** Messages come late, in any order, or not at all. */
  #watch(by: Owner, id: RecordId, changed: () => void): Promise<() => void> {
    const { random } = this.#scheduler
    return new Promise((resolve) => {
      this.#scheduler.after(this.latency(), by, 'watches', () => {
        let isOver = false
        let unwatch = (): void => {}
        void this.#inner
          .watch(id, () => {
            if (!random.chance(this.weather.lost))
              this.#scheduler.after(this.latency(), by, 'is told', () => isOver || changed())
          })
          .then((stop) => {
            unwatch = stop
          })
        resolve(() => {
          isOver = true
          unwatch()
        })
      })
    })
  }
}
