import { randomBytes } from 'node:crypto'
import type { Millis } from '../../core/record.ts'
import { reconnectDelay } from '../reconnect.ts'
import { PartlyUnavailable, StoreUnavailable } from '../register.ts'
import { changeOf, type Identity } from './layout.ts'
import {
  CONNECT_TIMEOUT,
  ignore,
  isOfOne,
  isWorthAnother,
  PostgresLink,
  postgresFailure,
  reasonOf,
  type SqlArg,
  type SqlRow,
  STANDBY,
  sqlState,
} from './link.ts'
import { type Batch, type BatchItem, type Call, type Kind, Queue, type Statement, settle } from './queue.ts'
import type { PostgresAddress } from './url.ts'

/** Connections for statements. */
const LANES = 8
/** How many of them are reserved for outcomes and leases: claims waiting for each other must not occupy all. */
const RESERVED = 2
/** Maximum connections; more than {@link LANES} only while answers are late, since other clients need the server's connections, too. */
const MAX_LANES = 16
/** How many of them are reserved for statements that need not wait for a standby: hanging commits must not occupy all. */
const LOCAL = 2
/** How often to ask the server which statements it is executing, while answers are late. */
const LOOK_EVERY: Millis = 1000
/**
 * Upper bound of the timeout for connecting, which doubles with each attempt: a server that hangs works through all attempts once it is
 * back.
 */
const MAX_CONNECT_TIMEOUT: Millis = 16_000
/** How often a connection is reopened: the name may point to another server. */
const RECHECK: Millis = 10_000
/** A different server is accepted once the one in use has been silent for this many timeouts. */
const PATIENCE = 10
/** For checking and creating the schema: replicas that start together wait for each other. */
const PREPARE_TIMEOUT: Millis = 5000
/** Attempts at a statement that conflicts with another transaction. */
const TRIES = 4

export interface LanesOptions {
  readonly address: PostgresAddress
  readonly timeoutMs: Millis
  /** A proxy that connects later than the grace after a failover has lost its claims; 0 or absent: no grace. */
  readonly grace?: Millis
  readonly onEvent: (kind: 'connected' | 'disconnected' | 'error', detail: string) => void
}

interface Lane {
  readonly link: PostgresLink
  readonly number: string
  statement: Statement | null
  /** When its answer became late. */
  lateAt: Millis | null
}

/** The statements of this process that the server is executing, by the numbers of their connections. */
const LOOK = `SELECT $1::bigint, string_agg(split_part(query, ' ', 4), ' ') FROM pg_stat_activity
  WHERE state = 'active' AND starts_with(query, $2)`
const HANGING =
  'PostgreSQL does not finish the statements that it was sent, as when a synchronous standby is missing'

/**
 * Lock timeout, short enough to report a locked record as "not applied": a statement queuing for a row waits twice, for its turn and then
 * for the transaction. 0 would mean no limit.
 */
export function lockWait(timeoutMs: Millis): Millis {
  return Math.max(1, Math.floor(timeoutMs / 4))
}

/**
 * Runs statements on connections opened as needed. Each is its own transaction, sent once, on a connection with none in flight. A
 * statement not sent in time, or without a connection, was not applied; one sent and not answered may have been.
 * Statements are never cancelled: cancelling a commit that waits for a standby makes it succeed without the standby. A statement does not
 * end with its connection either. So a connection whose answer is late stays open unless the server says that it is not executing the
 * statement, and a lost connection counts until the server says so.
 */
export class Lanes {
  readonly #options: LanesOptions
  readonly #prepare: (link: PostgresLink) => Promise<Identity | null>
  readonly #onUp: () => void
  readonly #lanes = new Set<Lane>()
  /** Numbers of lost connections whose statements may still run. */
  readonly #abandoned = new Set<string>()
  readonly #queue = new Queue(() => this.#dispatch())
  /** Prefix of every statement; the number of the connection follows. */
  readonly #comment = `/* idempotency-proxy ${randomBytes(6).toString('hex')} `
  #connections = 0
  #isConnecting = false
  #retry: NodeJS.Timeout | undefined
  #attempts = 0
  readonly #connectTimeoutMost: Millis
  #connectTimeout: Millis
  #isUp = false
  /** Why there is no connection. */
  #trouble = 'connecting'
  /** Commits hang: only statements whose commit cannot are sent. */
  #isHanging = false
  #numbers = 0
  /** Identity of the server in use. */
  #identity: Identity | null = null
  #recheck: NodeJS.Timeout | undefined
  #look: NodeJS.Timeout | undefined
  #isClosed = false

  constructor(
    options: LanesOptions,
    prepare: (link: PostgresLink) => Promise<Identity | null>,
    onUp: () => void,
  ) {
    this.#options = options
    this.#connectTimeoutMost = options.grace ? options.grace / 2 : MAX_CONNECT_TIMEOUT
    this.#connectTimeout = Math.min(CONNECT_TIMEOUT, this.#connectTimeoutMost)
    this.#prepare = prepare
    this.#onUp = onUp
  }

  /** Resolves after the first attempt: the process also starts without PostgreSQL. Rejects if only an operator can fix the cause. */
  async open(): Promise<void> {
    this.#recheck = setInterval(() => void this.#replaceOldest(), RECHECK).unref()
    try {
      await this.#connect()
    } catch (error) {
      await this.close()
      throw error
    }
  }

  /**
   * `text` gets a number before `args` and returns it in the first column of its only row; the other columns are returned.
   * @throws {PartlyUnavailable} only `local` statements are possible now.
   */
  run(text: string, args: readonly SqlArg[], kind: Kind = 'plain'): Promise<SqlRow> {
    return this.#call(text, () => args, kind, null)
  }

  /**
   * Like {@link run}, but batched into one statement with other calls of this turn of the event loop, or those made while another batch is
   * in flight. If the batch fails or leaves this call undecided, `text` is sent alone.
   */
  runTogether(
    batch: Batch,
    item: BatchItem,
    text: string,
    args: () => readonly SqlArg[],
    kind: Kind,
  ): Promise<SqlRow> {
    return this.#call(text, args, kind, { batch, item })
  }

  #call(
    text: string,
    args: () => readonly SqlArg[],
    kind: Kind,
    together: Call['together'],
  ): Promise<SqlRow> {
    if (!this.#isUp) return Promise.reject(this.#notConnected())
    if (this.#isHanging && kind !== 'local') return Promise.reject(new PartlyUnavailable(HANGING, false))
    return new Promise((resolve, reject) => {
      const { timeoutMs } = this.#options
      const call: Call = {
        text,
        args,
        together,
        kind,
        order: ++this.#numbers,
        collectedAt: performance.now(),
        // Only after pending input was read: a busy event loop does not mean a silent PostgreSQL.
        timer: setTimeout(() => setImmediate(() => this.#expire(call)), timeoutMs),
        resolve,
        reject,
        isSettled: false,
        isSent: false,
      }
      this.#queue.add(call)
    })
  }

  /** Reopens a connection to see which server the name points to now. */
  recheck(): void {
    if (!this.#isConnecting && this.#retry === undefined && !this.#isClosed)
      void this.#connect().catch(ignore)
  }

  async close(): Promise<void> {
    this.#isClosed = true
    this.#isUp = false
    clearTimeout(this.#retry)
    clearInterval(this.#recheck)
    clearTimeout(this.#look)
    this.#refuseWaiting()
    await Promise.all([...this.#lanes].map(({ link }) => link.end()))
  }

  #notConnected(): StoreUnavailable {
    return new StoreUnavailable(
      `PostgreSQL is not connected: ${this.#isClosed ? 'closed' : this.#trouble}`,
      false,
    )
  }

  #refuseWaiting(): void {
    for (const call of this.#queue.empty()) settle(call).reject(this.#notConnected())
  }

  #dispatch(): void {
    for (;;) {
      const call = this.#next()
      if (call === undefined) return
      const free = [...this.#lanes].find((lane) => lane.statement === null)
      if (free === undefined) return this.#grow()
      this.#send(free, this.#queue.take(call, String(++this.#numbers)))
    }
  }

  #next(): Call | undefined {
    if (this.#queue.isEmpty) return
    const queue = this.#queue
    let mayHang = this.#late()
    let ordinary = 0
    const batches: (Batch | null)[] = []
    for (const { statement, lateAt } of this.#lanes)
      if (statement !== null && lateAt === null) {
        batches.push(statement.batch)
        if (statement.kind !== 'local') mayHang++
        if (statement.kind !== 'urgent') ordinary++
      }
    const isRoom = mayHang < MAX_LANES - LOCAL
    const outcome = isRoom ? queue.first('urgent', batches) : undefined
    if (outcome !== undefined) return outcome
    if (ordinary >= LANES - RESERVED) return
    const first = queue.first('local', batches)
    const other = isRoom ? queue.first('plain', batches) : undefined
    return first === undefined || (other !== undefined && other.order < first.order) ? other : first
  }

  #send(lane: Lane, statement: Statement): void {
    lane.statement = statement
    for (const call of statement.calls) call.isSent = true
    statement.tries++
    lane.link.query(statement.text, statement.args, (error, rows) =>
      this.#settle(lane, statement, error, rows),
    )
  }

  #settle(lane: Lane, statement: Statement, error: Error | null, rows: readonly SqlRow[]): void {
    const isLate = lane.lateAt !== null
    if (error !== null && !isLate && isWorthAnother(error) && statement.tries < TRIES)
      return this.#send(lane, statement)
    lane.statement = null
    lane.lateAt = null
    const calls = statement.calls.filter(({ isSettled }) => !isSettled)
    const [[number, ...columns] = []] = rows
    if (error !== null) {
      const refused = postgresFailure(error)
      if (statement.batch !== null && isOfOne(error)) this.#queue.again(calls)
      else for (const call of calls) settle(call).reject(refused)
      // Nothing more is sent on a connection whose last statement has an uncertain outcome.
      if (refused.maybeApplied) {
        if (this.#lanes.has(lane)) this.#abandon(lane.number)
        this.#drop(lane, error.message)
      } else if (sqlState(error) === STANDBY)
        // The name may point to its primary by now.
        for (const one of this.#lanes) if (one.statement === null) this.#drop(one, error.message)
    } else if (number !== statement.args[0]) {
      const nonsense = 'no answer from PostgreSQL: replies do not match their statements'
      for (const call of calls) settle(call).reject(new StoreUnavailable(nonsense, true))
      this.#drop(lane, 'replies do not match their statements')
    } else if (statement.batch === null) for (const call of calls) settle(call).resolve(columns)
    else {
      const found = new Map(rows.map(([, id, ...columns]) => [id, columns]))
      const rowOf = (call: Call) => found.get(call.together?.item.id ?? '')
      this.#queue.again(calls.filter((call) => rowOf(call) === undefined))
      for (const call of calls) {
        const row = rowOf(call)
        if (row !== undefined) settle(call).resolve(row)
      }
    }
    this.#judge()
    if (this.#inService() > LANES) this.#drop(lane, 'not needed')
    if (this.#lanes.has(lane) && !this.#isClosed) this.#up()
  }

  #expire(call: Call): void {
    if (call.isSettled) return
    settle(call)
    if (!call.isSent) {
      this.#queue.remove(call)
      return call.reject(new StoreUnavailable('PostgreSQL has no connection free: timed out', false))
    }
    call.reject(new StoreUnavailable('no answer from PostgreSQL: timed out', true))
    for (const lane of this.#lanes)
      if (lane.statement?.calls.includes(call)) lane.lateAt ??= performance.now()
    this.#judge()
    this.#lookLater()
    this.#dispatch()
  }

  #inService(): number {
    return [...this.#lanes].filter(({ lateAt }) => lateAt === null).length
  }

  /** Statements that were not answered in time. */
  #late(): number {
    return this.#abandoned.size + this.#lanes.size - this.#inService()
  }

  #abandon(number: string): void {
    this.#abandoned.add(number)
    this.#judge()
    this.#lookLater()
  }

  #judge(): void {
    const isHanging = this.#late() >= MAX_LANES - LOCAL
    if (isHanging && !this.#isHanging)
      this.#options.onEvent('error', `${HANGING}: until it does, records are read but not written`)
    this.#isHanging = isHanging
  }

  #lookLater(): void {
    if (this.#isClosed) return
    const again = (): void => {
      this.#look = undefined
      if (this.#late() > 0) this.#lookLater()
    }
    this.#look ??= setTimeout(
      () => void this.#lookBy((args) => this.run(LOOK, args, 'local')).then(again, again),
      LOOK_EVERY,
    ).unref()
  }

  /** Drops connections whose answers were lost on the way, and forgets abandoned statements that have ended. */
  async #lookBy(ask: (args: readonly string[]) => Promise<SqlRow>): Promise<void> {
    const abandoned = [...this.#abandoned]
    const late = [...this.#lanes].filter(({ lateAt }) => lateAt !== null)
    const statements = late.map(({ statement }) => statement)
    const [found] = await ask([this.#comment])
    // Null: the list lacks even this statement, so track_activities is off. Lost connections must not count forever.
    const running = found?.split(' ')
    for (const number of abandoned) if (!running?.includes(number)) this.#abandoned.delete(number)
    for (const [n, lane] of late.entries())
      if (running?.includes(lane.number) === false && lane.statement === statements[n]) {
        this.#lost(lane, 'an answer was lost')
        lane.link.destroy()
      }
    this.#judge()
    this.#dispatch()
  }

  #grow(): void {
    if (this.#isConnecting || this.#retry !== undefined || this.#isClosed) return
    const inService = this.#inService()
    // One more if no connection answers: a new one may show that the others never will.
    if (inService === 0 || (inService < LANES && this.#lanes.size + this.#abandoned.size < MAX_LANES))
      void this.#connect().catch(ignore)
  }

  async #connect(): Promise<void> {
    this.#isConnecting = true
    const begun = performance.now()
    const number = String(++this.#connections)
    let lane: Lane | null = null
    let link: PostgresLink | null = null
    try {
      link = await PostgresLink.open(this.#options.address, (why) => lane !== null && this.#lost(lane, why), {
        comment: `${this.#comment}${number} */ `,
        timeoutMs: this.#connectTimeout,
      })
      await this.#examine(link, number)
      if (this.#isClosed || link.isOver) throw new Error('the connection ended')
      if (this.#lanes.size + this.#abandoned.size >= MAX_LANES) throw new Error(HANGING)
      lane = { link, number, statement: null, lateAt: null }
      this.#lanes.add(lane)
      this.#attempts = 0
      this.#up()
    } catch (error) {
      void link?.end()
      this.#failed(error as Error)
      if (error instanceof StoreUnavailable) throw error
    } finally {
      const isSilent = link === null && performance.now() - begun >= this.#connectTimeout
      this.#connectTimeout = Math.min(
        isSilent ? this.#connectTimeout * 2 : CONNECT_TIMEOUT,
        this.#connectTimeoutMost,
      )
      this.#isConnecting = false
    }
    this.#dispatch()
  }

  async #examine(link: PostgresLink, number: string): Promise<void> {
    const timer = setTimeout(() => {
      this.#abandon(number)
      link.destroy()
    }, PREPARE_TIMEOUT)
    const examined = async (): Promise<void> => {
      const identity = await this.#prepare(link)
      if (identity !== null) this.#recognise(identity)
      if (this.#late() > 0)
        await this.#lookBy(async (args) =>
          (await link.ask(LOOK, ['0', ...args])).flatMap(([, ...row]) => row),
        )
    }
    await examined().finally(() => clearTimeout(timer))
  }

  async #replaceOldest(): Promise<void> {
    /* c8 ignore next: only if the timer fires while a connection is being made */
    if (!this.#isUp || this.#isConnecting || this.#retry !== undefined) return
    const [oldest] = this.#lanes
    const { size } = this.#lanes
    await this.#connect().catch(ignore)
    /* c8 ignore next: whether it is idle just then */
    if (oldest?.statement === null && this.#lanes.size > size) this.#drop(oldest, 'not needed')
  }

  #recognise(identity: Identity): void {
    const silentSince = performance.now() - PATIENCE * this.#options.timeoutMs
    const isInUse = [...this.#lanes].some(({ lateAt }) => lateAt === null || lateAt > silentSince)
    const change = changeOf(this.#identity, identity, isInUse)
    this.#identity = identity
    if (change === null) return
    this.#abandoned.clear()
    if (this.#lanes.size === 0) return
    this.#options.onEvent('error', change)
    for (const lane of this.#lanes) {
      this.#lanes.delete(lane)
      lane.link.destroy()
    }
    this.#onUp()
  }

  #up(): void {
    if (!this.#isUp) {
      this.#isUp = true
      this.#options.onEvent('connected', this.#name)
      this.#onUp()
    }
    this.#dispatch()
  }

  #failed(error: Error): void {
    const message = reasonOf(error)
    // All attempts to reconnect fail alike: one report is enough.
    if (message !== this.#trouble && !this.#isClosed) this.#options.onEvent('error', message)
    this.#trouble = message
    this.#later()
    if (this.#inService() > 0) return
    this.#isUp = false
    this.#refuseWaiting()
  }

  #later(): void {
    if (this.#isClosed) return
    this.#retry = setTimeout(
      () => {
        this.#retry = undefined
        if (this.#inService() === 0) this.#grow()
        this.#dispatch()
      },
      reconnectDelay(++this.#attempts),
    )
  }

  #lost(lane: Lane, why: string): void {
    if (!this.#lanes.delete(lane)) return
    if (this.#lanes.size > 0 || this.#isClosed) return this.#dispatch()
    if (this.#isUp) this.#options.onEvent('disconnected', this.#name)
    this.#isUp = false
    this.#trouble = why
    this.#refuseWaiting()
    if (!this.#isConnecting && this.#retry === undefined) this.#later()
  }

  #drop(lane: Lane, why: string): void {
    this.#lost(lane, why)
    void lane.link.end()
  }

  get #name(): string {
    return `${this.#options.address.host}:${this.#options.address.port}`
  }
}
