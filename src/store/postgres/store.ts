import type { Millis, RecordId, State } from '../../core/record.ts'
import { settled } from '../../runtime/scheduling.ts'
import type { Epochs } from '../epochs.ts'
import { BODIES_FROM, isClaim, PREFIX, SCHEMA, stateCode } from '../record/codec.ts'
import {
  type Condition,
  type GetReply,
  InGrace,
  idOfCursor,
  type NewEpoch,
  PartlyUnavailable,
  type PutKind,
  type PutReply,
  pageOf,
  parseCursor,
  type Store,
  type SwapReply,
} from '../register.ts'
import { Safety } from '../safety.ts'
import { readNote } from '../side-ports.ts'
import { arraysOf, bytesOf, COLUMNS, linesOf, partsOf, placesOf, tokenOf, wordsOf } from './columns.ts'
import { postgresEpochs } from './epochs.ts'
import { Lanes, type LanesOptions, lockWait } from './lanes.ts'
import { prepare } from './layout.ts'
import { nonsense, type SqlArg, type SqlRow, sqlNumber } from './link.ts'
import { Listener } from './listener.ts'
import type { Batch } from './queue.ts'
import { postgresTraits, TRAITS } from './traits.ts'
import { postgresAddress } from './url.ts'

/** Every replica tries; one per interval does the work. */
const PRUNE_EVERY: Millis = 1000
/** 8 MB of pages: scanned within milliseconds. */
const PRUNE_PAGES = 1000
/** Bounds how long one removal takes. */
const PRUNE_ROWS = 500

export interface PostgresOptions extends Omit<LanesOptions, 'address'> {
  /** `postgres://user:password@host:port/database?sslmode=…` */
  readonly url: string
  /** `store.grace`; 0: off. */
  readonly grace?: Millis
  readonly onNewEpoch?: ((epoch: NewEpoch) => void) | undefined
  readonly onSafe?: ((before: Millis) => void) | undefined
  readonly onHeld?: ((left: Millis) => void) | undefined
  /** Hides the records of other services in the database. */
  readonly service: string
  /** Called when this process has removed expired records. */
  readonly onPruned?: ((records: number) => void) | undefined
  /** Added to the server's time, for tests that shift the clock; otherwise 0. */
  readonly skew?: () => Millis
}

/** Never answers synchronously. */
export interface PostgresStore extends Store {
  put(...args: Parameters<Store['put']>): Promise<PutReply>
  swap(...args: Parameters<Store['swap']>): Promise<SwapReply>
}

const STORED = COLUMNS.map((column) => `(stored).${column}`).join(', ')
const DECIDED = `at, done, version, fence, created_at, waiting, ${STORED}`
const WRITTEN = `${DECIDED}, remaining, since`
const GET = call('get', 4, `at, ${STORED}`)
const PUT = call('put', 16, WRITTEN)
const SWAP = call('swap', 18, WRITTEN)
const CLAIMS = call('claims', 15, `id, ${DECIDED}`)
const OUTCOMES = call('outcomes', 13, `id, ${DECIDED}`)
const RENEW = call('renew', 7, 'renewed')
const REVIVE = call('revive', 7, 'done')
const REMOVE = call('remove', 5, 'done, waiting')
const PLACES = call('places', 7, 'listed')
const LIST = call('list', 6, 'ids')
const PING = call('ping', 2, 'at')
const NOTE = call('note', 9, 'done')
const NOTES = call('notes_of', 4, 'lines')
const THROTTLE = call('throttle', 7, 'wait')
const ADMIT = call('admit', 5, 'remaining, since')
const PRUNE = call('prune', 5, 'pruned')
/**
 * Resolves after the first attempt to connect, whatever its outcome: the process also starts without PostgreSQL.
 * @throws {StoreUnavailable} if only an operator can fix the cause: a schema of a later release, a missing certificate.
 */
export async function openPostgresStore(options: PostgresOptions): Promise<PostgresStore> {
  const store = new Postgres(options)
  await store.open()
  return store
}

class Postgres implements PostgresStore {
  readonly name = 'postgres'
  readonly #options: PostgresOptions & Required<Pick<PostgresOptions, 'skew' | 'grace'>>
  readonly #wait: Millis
  readonly #lanes: Lanes
  readonly #listener: Listener
  readonly #epochs: Epochs | null
  readonly #claims: Batch
  readonly #outcomes: Batch
  #pruning: NodeJS.Timeout | undefined
  #isClosed = false

  constructor(options: PostgresOptions) {
    const { service, skew = () => 0, grace = 0 } = options
    const wait = lockWait(options.timeoutMs)
    this.#options = { ...options, skew, grace }
    this.#wait = wait
    const connecting = { ...options, address: postgresAddress(options.url, options.onEvent) }
    this.#lanes = new Lanes(connecting, prepare, () => {
      this.#listener.resubscribe()
      void this.#epochs?.look()
    })
    this.#listener = new Listener(connecting, this.#lanes, skew)
    this.#epochs =
      grace === 0
        ? null
        : postgresEpochs({
            grace,
            look: (seen) => this.#lanes.run(ADMIT, [service, skew(), wait, grace, seen], 'local'),
            onSilence: () => this.#lanes.recheck(),
            onNewEpoch: options.onNewEpoch,
            safety: new Safety(1, options.onSafe ?? (() => {})),
            onHeld: options.onHeld,
          })
    this.#claims = {
      text: CLAIMS,
      argsOf: (items) => [
        ...this.#now(),
        grace,
        this.#seen,
        ...arraysOf(items, 'rule', 'fence', 'createdAt'),
      ],
    }
    this.#outcomes = {
      text: OUTCOMES,
      argsOf: (items) => [...this.#now(), ...arraysOf(items, 'rule', 'state', 'fence')],
    }
  }

  async open(): Promise<void> {
    await this.#lanes.open()
    this.#pruning = setTimeout(() => void this.#prune(), PRUNE_EVERY).unref()
  }

  readonly put: PostgresStore['put'] = async (id, bytes, spans, entry = 'claim') => {
    const isAttempt = isClaim(bytes)
    const args = (): SqlArg[] => {
      const { schema, state, fence, token, createdAt, head, payload } = partsOf(bytes)
      const record = [schema, state, fence, token, createdAt, head, payload, spans.dueIn, spans.dropIn]
      return [...this.#of(id), ...record, ENTRIES[entry], this.#options.grace, this.#seen]
    }
    let row: SqlRow
    try {
      row = await (isAttempt && bytes[PREFIX.schema] === SCHEMA && entry !== 'again'
        ? this.#lanes.runTogether(
            this.#claims,
            { id, bytes, spans, rule: ENTRIES[entry] },
            PUT,
            args,
            'plain',
          )
        : this.#lanes.run(PUT, args()))
    } catch (error) {
      // No writes at present: answer from the existing record, unless it is this claim's own, whose reply was lost: the standby may not
      // have it.
      const { now, bytes: found } = error instanceof PartlyUnavailable ? await this.get(id) : NOTHING
      if (found === null || tokenOf(found).equals(tokenOf(bytes))) throw error
      return { done: false, now, bytes: found }
    }
    const reply = writeReply(row)
    if (reply.done) {
      if (!isAttempt) this.#listener.tell(id, row[WAITING] ?? '')
      return reply
    }
    if (reply.bytes === null) throw nonsense('neither written nor refused')
    return { ...reply, bytes: reply.bytes }
  }

  readonly swap: PostgresStore['swap'] = async (id, condition, bytes, spans, nextFence) => {
    const isAttempt = isClaim(bytes)
    const args = (): SqlArg[] => {
      const { schema, state, fence, token, head, payload } = partsOf(bytes)
      const { dueIn, dropIn } = spans
      const record = [schema, state, fence, token, head, payload, dueIn, dropIn, nextFence ? 1 : 0]
      return [...this.#of(id), ...expected(condition), ...record, this.#options.grace, this.#seen]
    }
    const isEnd = !isAttempt && bytes[PREFIX.schema] === SCHEMA && !nextFence
    let row: SqlRow
    if (isEnd && 'token' in condition && condition.token.equals(tokenOf(bytes))) {
      const item = { id, bytes, spans, rule: bitsOf(condition.states) }
      row = await this.#lanes.runTogether(this.#outcomes, item, SWAP, args, 'urgent')
    } else row = await this.#lanes.run(SWAP, args(), 'urgent')
    const reply = writeReply(row)
    // Null: this call ended no attempt. A swap ends none if the upstream has already completed the record.
    const waiting = row[WAITING]
    if (waiting != null && !(reply.done && isAttempt)) this.#listener.tell(id, waiting)
    return reply
  }

  readonly get: Store['get'] = async (id) => {
    const [now, ...stored] = await this.#lanes.run(GET, this.#of(id), 'local')
    return { now: sqlNumber(now), bytes: bytesOf(stored) }
  }

  readonly renew: Store['renew'] = async (items) => {
    if (items.length === 0) return []
    const columns = (['id', 'token', 'dueIn', 'dropIn'] as const).map((name) => items.map((one) => one[name]))
    const [renewed] = await this.#lanes.run(RENEW, [...this.#now(), ...columns], 'urgent')
    const done = new Set(wordsOf(renewed))
    // A locked record must not keep the others from being renewed.
    return settled(
      items.map(async ({ id, token, dueIn, dropIn }) => {
        if (done.has(id)) return true
        const [revived] = await this.#lanes.run(REVIVE, [...this.#of(id), token, dueIn, dropIn], 'urgent')
        return revived === 't'
      }),
      false,
    )
  }

  readonly due: Store['due'] = async (limit, of) => {
    const [what, after] = of === 'bodies' ? ['bodies', BODIES_FROM] : ['due', 0]
    const [found] = await this.#lanes.run(PLACES, [...this.#now(), what, after, '', limit])
    return placesOf(found).map(({ id }) => id as RecordId)
  }

  readonly remove: Store['remove'] = async (id, version) => {
    const [done, waiting] = await this.#lanes.run(REMOVE, [...this.#of(id), version], 'urgent')
    if (done === 't') this.#listener.tell(id, waiting ?? '')
    return done === 't'
  }

  readonly list: Store['list'] = async (which, cursor, limit) => {
    if (which === 'unresolved') {
      const { due, id } = parseCursor(cursor)
      const [found] = await this.#lanes.run(PLACES, [...this.#now(), 'list', due, id, limit], 'local')
      return pageOf(placesOf(found), limit)
    }
    const beginning = which === 'all' ? '' : which.beginning
    const args = [...this.#now(), beginning, idOfCursor(cursor), limit]
    const [found] = await this.#lanes.run(LIST, args, 'local')
    const ids = wordsOf(found) as RecordId[]
    return { ids, next: ids[limit - 1] ?? null }
  }

  readonly ping: Store['ping'] = async () => {
    const [now] = await this.#lanes.run(PING, [this.#options.skew(), this.#wait], 'local')
    return sqlNumber(now)
  }

  readonly history: Store['history'] = {
    append: async (id, notes) => {
      const columns = [
        notes.map(({ tag }) => tag),
        notes.map(({ count }) => count),
        notes.map(({ firstAgo }) => Math.round(firstAgo)),
        notes.map(({ lastAgo }) => Math.round(lastAgo)),
        notes.map(({ text }) => text),
      ]
      const [done] = await this.#lanes.run(NOTE, [...this.#of(id), ...columns], 'local')
      return done === 't'
    },
    read: async (id) => {
      const [lines] = await this.#lanes.run(NOTES, this.#of(id), 'local')
      return linesOf(lines).map(readNote)
    },
  }

  readonly limits: Store['limits'] = {
    take: async (bucket, { count, per }, units) => {
      const args = [...this.#of(bucket), count, per, units]
      const [free] = await this.#lanes.run(THROTTLE, args, 'local')
      return sqlNumber(free)
    },
  }

  readonly watch: Store['watch'] = (id, changed) => this.#listener.watch(id, changed)

  readonly traits: Store['traits'] = async () => postgresTraits(await this.#lanes.run(TRAITS, [], 'local'))

  readonly close: Store['close'] = async () => {
    this.#isClosed = true
    clearTimeout(this.#pruning)
    this.#epochs?.close()
    await Promise.all([this.#lanes.close(), this.#listener.close()])
  }

  /** The first arguments of most functions. */
  #now(): SqlArg[] {
    return [this.#options.service, this.#options.skew(), this.#wait]
  }

  /** The first arguments of functions for one record. */
  #of(id: string): SqlArg[] {
    return [this.#options.service, id, this.#options.skew(), this.#wait]
  }

  get #seen(): Millis {
    return this.#epochs?.seen[0] ?? 0
  }

  async #prune(): Promise<void> {
    let pruned = 0
    try {
      const args = [this.#options.skew(), this.#wait, PRUNE_EVERY, PRUNE_PAGES, PRUNE_ROWS]
      const [removed] = await this.#lanes.run(PRUNE, args, 'local')
      pruned = Number(removed)
      if (pruned > 0) this.#options.onPruned?.(pruned)
    } catch {
      // Retried next time; operations report the error.
    }
    const wait = pruned >= PRUNE_ROWS ? 0 : PRUNE_EVERY
    if (!this.#isClosed) this.#pruning = setTimeout(() => void this.#prune(), wait).unref()
  }
}

/** The statement's number is the first argument and the first column: a reply cannot be mistaken for another statement's. */
function call(name: string, args: number, columns: string): string {
  const places = Array.from({ length: args }, (_, n) => `$${n + 2}`).join(', ')
  return `SELECT $1::bigint, ${columns} FROM idempotency.${name}(${places})`
}

/** Where the found record's columns are in {@link DECIDED}. */
const [FOUND, FOUND_END] = [6, 6 + COLUMNS.length]
const WAITING = 5

const ENTRIES: Readonly<Record<PutKind, number>> = { claim: 0, fresh: 1, again: 2 }

/** @throws {InGrace}, or {@link StoreUnavailable} if it is not such a reply: what was claimed by it would have no fence. */
function writeReply(row: SqlRow) {
  const [at, done, version, fence, createdAt] = row
  const now = sqlNumber(at)
  if (done === 'f') {
    const [remaining, since] = row.slice(FOUND_END)
    const left = sqlNumber(remaining ?? '0')
    if (left > 0) throw new InGrace(now, sqlNumber(since), left)
    return { done: false, now, bytes: bytesOf(row.slice(FOUND, FOUND_END)) } as const
  }
  const stamp = { version: sqlNumber(version), fence: sqlNumber(fence), createdAt: sqlNumber(createdAt) }
  if (done !== 't' || stamp.version === 0 || stamp.fence === 0) throw nonsense('neither written nor refused')
  return { done: true, now, stamp } as const
}

const NOTHING: GetReply = { now: 0, bytes: null }

function bitsOf(states: readonly State[]): number {
  return states.reduce((bits, state) => bits | (1 << stateCode(state)), 0)
}

function expected(condition: Condition): readonly SqlArg[] {
  return 'version' in condition
    ? [condition.version, null, null]
    : [null, condition.token, condition.states.map(stateCode)]
}
