import { closeSync, existsSync, openSync } from 'node:fs'
import path from 'node:path'
import { Worker } from 'node:worker_threads'
import type { Millis, RecordId, Spans } from '../core/record.ts'
import { endsAttempt } from './codec.ts'
import { type Place, pageOf, placeOf } from './cursor.ts'
import { readNote } from './history.ts'
import {
  type Condition,
  type GetReply,
  type Listing,
  type Page,
  type PutReply,
  type RateLimits,
  type RecordHistory,
  type Renewal,
  type Store,
  StoreFull,
  type StoreTraits,
  StoreUnavailable,
  type SwapReply,
} from './register.ts'
import type { Message, Reply, StoreOperation, WorkerOptions } from './sqlite-protocol.ts'
import { Watchers } from './watchers.ts'

const RESPAWN_FROM: Millis = 100
const RESPAWN_TO: Millis = 5000
/** Longer than any batch takes to commit; then the worker is ended by force. */
const CLOSE_TIMEOUT: Millis = 5000

export interface SqliteStoreOptions {
  /** Relative to the working directory. */
  readonly path: string
  /** Whose records: those of other services in the file are never seen. */
  readonly service: string
  readonly timeoutMs: Millis
  readonly onEvent: (kind: 'connected' | 'disconnected' | 'error', detail: string) => void
  /** Expired records were removed, by this process: each that has the file open removes some. */
  readonly onPruned?: ((records: number) => void) | undefined
  /** Bound of the file in pages of 4 KiB; without it the disk is the bound. */
  readonly maxPages?: number
}

interface Pending {
  readonly resolve: (result: unknown) => void
  readonly reject: (error: Error) => void
  readonly timer: NodeJS.Timeout
}

export class SqliteStore implements Store {
  readonly name = 'sqlite'
  readonly history: RecordHistory = {
    append: (id, notes) => this.#ask({ op: 'note', id, notes }),
    read: async (id) => (await this.#ask<string[]>({ op: 'notes', id })).map(readNote),
  }
  readonly limits: RateLimits = {
    take: (bucket, rate, units) => this.#ask({ op: 'throttle', bucket, rate, units }),
  }
  readonly #options: SqliteStoreOptions
  readonly #file: string
  readonly #skew = new SharedArrayBuffer(Float64Array.BYTES_PER_ELEMENT)
  readonly #watchers = new Watchers()
  readonly #pending = new Map<number, Pending>()
  #worker: Worker | null = null
  #seq = 0
  #respawn: NodeJS.Timeout | undefined
  #closing = false

  private constructor(options: SqliteStoreOptions) {
    this.#options = options
    this.#file = path.resolve(options.path)
  }

  /** @throws {StoreUnavailable} that says why the file cannot be used. */
  static async open(options: SqliteStoreOptions): Promise<SqliteStore> {
    const register = new SqliteStore(options)
    const folder = path.dirname(register.#file)
    if (!existsSync(folder))
      throw new StoreUnavailable(
        `cannot open the store ${options.path}: the folder ${folder} does not exist`,
        false,
      )
    // Stored answers are nobody else's to read. SQLite gives its other files the same mode.
    try {
      closeSync(openSync(options.path, 'a', 0o600))
    } catch {
      // The worker's own attempt says what is wrong.
    }
    await register.#start()
    return register
  }

  /** Milliseconds that this register's clock is ahead of the machine's. For tests, which travel in time. */
  set skew(ms: Millis) {
    new Float64Array(this.#skew)[0] = ms
  }

  async put(id: RecordId, bytes: Buffer, spans: Spans): Promise<PutReply> {
    const reply = await this.#ask<PutReply>({ op: 'put', id, bytes: unpooled(bytes), spans })
    if (reply.done && endsAttempt(bytes)) this.#watchers.tell(id)
    return buffered(reply)
  }

  async swap(
    id: RecordId,
    condition: Condition,
    bytes: Buffer,
    spans: Spans,
    nextFence: boolean,
  ): Promise<SwapReply> {
    const own =
      'token' in condition ? { token: unpooled(condition.token), states: condition.states } : condition
    const operation = { op: 'swap', id, condition: own, bytes: unpooled(bytes), spans, nextFence } as const
    const reply = await this.#ask<SwapReply>(operation)
    if (reply.done && endsAttempt(bytes)) this.#watchers.tell(id)
    return buffered(reply)
  }

  async get(id: RecordId): Promise<GetReply> {
    return buffered(await this.#ask<GetReply>({ op: 'get', id }))
  }

  renew(items: readonly Renewal[]): Promise<boolean[]> {
    return this.#ask({ op: 'renew', items: items.map((item) => ({ ...item, token: unpooled(item.token) })) })
  }

  due(limit: number): Promise<RecordId[]> {
    return this.#ask({ op: 'due', limit })
  }

  async remove(id: RecordId, version: number): Promise<boolean> {
    const removed = await this.#ask<boolean>({ op: 'remove', id, version })
    if (removed) this.#watchers.tell(id)
    return removed
  }

  async list(which: Listing, cursor: string | null, limit: number): Promise<Page> {
    if (which === 'unresolved') {
      const found = await this.#ask<Place[]>({ op: 'unresolved', after: placeOf(cursor), limit })
      return pageOf(found, limit)
    }
    if (cursor !== null && !/^[\w-]{1,64}$/.test(cursor)) throw new RangeError('not a cursor of this store')
    const beginning = which === 'all' ? '' : which.beginning
    const ids = await this.#ask<RecordId[]>({ op: 'list', beginning, after: cursor ?? '', limit })
    return { ids, next: ids[limit - 1] ?? null }
  }

  /** Told of what goes through this register; not of what other processes write to the file. */
  async watch(id: RecordId, changed: () => void): Promise<() => void> {
    return this.#watchers.add(id, changed)
  }

  ping(): Promise<Millis> {
    return this.#ask({ op: 'ping' })
  }

  async traits(): Promise<StoreTraits> {
    return { durable: true, evicts: false, findings: [] }
  }

  async close(): Promise<void> {
    this.#closing = true
    clearTimeout(this.#respawn)
    const worker = this.#worker
    if (worker === null) return
    const exited = new Promise((done) => worker.once('exit', done))
    worker.postMessage('close')
    const force = setTimeout(() => void worker.terminate(), CLOSE_TIMEOUT)
    await exited
    clearTimeout(force)
  }

  #ask<T>(operation: StoreOperation): Promise<T> {
    return new Promise((resolve, reject) => {
      const worker = this.#worker
      if (worker === null || this.#closing)
        return reject(new StoreUnavailable(`the store ${this.#options.path} is not open`, false))
      const seq = ++this.#seq
      const timer = setTimeout(() => {
        this.#pending.delete(seq)
        reject(new StoreUnavailable(`SQLite did not answer in ${this.#options.timeoutMs} ms`, true))
      }, this.#options.timeoutMs)
      this.#pending.set(seq, { resolve: resolve as (result: unknown) => void, reject, timer })
      worker.postMessage({ seq, operation })
    })
  }

  /** Resolves when the worker has opened the file. */
  #start(): Promise<void> {
    const options: WorkerOptions = {
      file: this.#file,
      // Shorter than the timeout, so that a file locked by another process is an honest "not applied".
      service: this.#options.service,
      busyMs: Math.floor(this.#options.timeoutMs / 2),
      skew: this.#skew,
      maxPages: this.#options.maxPages ?? 0,
    }
    // Emitted JavaScript beside emitted JavaScript, TypeScript beside TypeScript.
    const extension = import.meta.url.slice(-2)
    const worker = new Worker(new URL(`./sqlite-worker.${extension}`, import.meta.url), {
      workerData: options,
      // node:sqlite warns on the earlier releases of Node 24.
      execArgv: ['--disable-warning=ExperimentalWarning'],
    })
    return new Promise((resolve, reject) => {
      let why = 'its thread ended'
      worker.on('message', (message: Message) => {
        if ('replies' in message) return message.replies.forEach((reply) => this.#settle(reply))
        if ('pruned' in message) return this.#options.onPruned?.(message.pruned)
        if ('failed' in message) {
          why = message.failed
          return
        }
        this.#worker = worker
        if (this.#closing) worker.postMessage('close')
        resolve()
      })
      worker.on('error', (error) => {
        why = (error as Error).message
      })
      worker.on('exit', () => {
        reject(new StoreUnavailable(`cannot open the store ${this.#options.path}: ${why}`, false))
        if (this.#worker === worker) this.#lost(why)
      })
    })
  }

  #lost(why: string): void {
    this.#worker = null
    for (const [seq, { reject, timer }] of this.#pending) {
      clearTimeout(timer)
      this.#pending.delete(seq)
      reject(new StoreUnavailable(`the thread of SQLite ended: ${why}`, true))
    }
    if (this.#closing) return
    this.#options.onEvent('disconnected', why)
    this.#restart(RESPAWN_FROM)
  }

  #restart(wait: Millis): void {
    this.#respawn = setTimeout(() => {
      this.#start().then(
        () => this.#options.onEvent('connected', this.#options.path),
        (error: Error) => {
          this.#options.onEvent('error', error.message)
          if (!this.#closing) this.#restart(Math.min(wait * 2, RESPAWN_TO))
        },
      )
    }, wait)
  }

  #settle(reply: Reply): void {
    const pending = this.#pending.get(reply.seq)
    if (pending === undefined) return
    this.#pending.delete(reply.seq)
    clearTimeout(pending.timer)
    if ('result' in reply) return pending.resolve(reply.result)
    const { message, full, maybeApplied } = reply.failure
    pending.reject(full ? new StoreFull(message) : new StoreUnavailable(message, maybeApplied))
  }
}

/** A message carries the whole memory under a view: a small buffer of Node's pool would take all of the pool along. */
function unpooled(bytes: Buffer): Buffer {
  return Buffer.from(new Uint8Array(bytes).buffer)
}

/** Messages turn buffers into plain arrays of bytes. */
function buffered<T extends { now: Millis; bytes?: Uint8Array | null } | { done: true; now: Millis }>(
  reply: T,
): T {
  if (!('bytes' in reply) || !reply.bytes) return reply
  const { buffer, byteOffset, byteLength } = reply.bytes
  return { ...reply, bytes: Buffer.from(buffer, byteOffset, byteLength) }
}
