import { closeSync, existsSync, openSync } from 'node:fs'
import path from 'node:path'
import { Worker } from 'node:worker_threads'
import type { Millis, RecordId } from '../core/record.ts'
import { endsAttempt } from './codec.ts'
import { readNote } from './history.ts'
import {
  type Note,
  type Place,
  pageOf,
  placeOf,
  type RateLimits,
  type Register,
  type Store,
  StoreFull,
  StoreUnavailable,
} from './register.ts'
import { Watchers } from './watchers.ts'

const RESPAWN_FROM: Millis = 100
const RESPAWN_TO: Millis = 5000
/** Longer than any batch takes to commit; then the worker is terminated. */
const CLOSE_TIMEOUT: Millis = 5000

export interface SqliteOptions {
  /** Relative to the working directory. */
  readonly path: string
  /** Records of other services in the file are never seen. */
  readonly service: string
  readonly timeoutMs: Millis
  readonly onEvent: (kind: 'connected' | 'disconnected' | 'error', detail: string) => void
  /** This process removed expired records; so does every other that has the file open. */
  readonly onPruned?: ((records: number) => void) | undefined
  /** Bound of the file in pages of 4 KiB; without it the disk is the bound. */
  readonly maxPages?: number
}

export interface SqliteStore extends Store {
  /** How far its clock is ahead of the machine's: for tests, which travel in time. */
  skew: Millis
}

/** @throws {StoreUnavailable} that says why the file cannot be used. */
export async function openSqliteStore(options: SqliteOptions): Promise<SqliteStore> {
  const folder = path.dirname(path.resolve(options.path))
  if (!existsSync(folder))
    throw new StoreUnavailable(
      `cannot open the store ${options.path}: the folder ${folder} does not exist`,
      false,
    )
  // Stored answers are nobody else's to read. SQLite gives its other files the same mode.
  try {
    closeSync(openSync(options.path, 'a', 0o600))
  } catch {
    // The worker will say what is wrong.
  }
  const thread = new Thread(options)
  await thread.start()
  const watchers = new Watchers()
  return {
    name: 'sqlite',

    async put(id, bytes, spans) {
      const reply = await thread.run('put', id, unpooled(bytes), spans)
      if (reply.done && endsAttempt(bytes)) watchers.tell(id)
      return buffered(reply)
    },

    async swap(id, condition, bytes, spans, nextFence) {
      const own =
        'token' in condition ? { token: unpooled(condition.token), states: condition.states } : condition
      const reply = await thread.run('swap', id, own, unpooled(bytes), spans, nextFence)
      if (reply.done && endsAttempt(bytes)) watchers.tell(id)
      return buffered(reply)
    },

    get: async (id) => buffered(await thread.run('get', id)),

    renew: (items) =>
      thread.run(
        'renew',
        items.map((item) => ({ ...item, token: unpooled(item.token) })),
      ),

    due: (limit) => thread.run('due', limit),

    async remove(id, version) {
      const removed = await thread.run('remove', id, version)
      if (removed) watchers.tell(id)
      return removed
    },

    async list(which, cursor, limit) {
      if (which === 'unresolved') return pageOf(await thread.run('unresolved', placeOf(cursor), limit), limit)
      if (cursor !== null && !/^[\w-]{1,64}$/.test(cursor)) throw new RangeError('not a cursor of this store')
      const ids = await thread.run('list', which === 'all' ? '' : which.beginning, cursor ?? '', limit)
      return { ids, next: ids[limit - 1] ?? null }
    },

    ping: () => thread.run('ping'),

    history: {
      append: (id, notes) => thread.run('note', id, notes),
      read: async (id) => (await thread.run('notes', id)).map(readNote),
    },
    limits: { take: (bucket, rate, units) => thread.run('throttle', bucket, rate, units) },
    /** Hears of what goes through this process; not of what others write to the file. */
    watch: async (id, changed) => watchers.add(id, changed),
    traits: async () => ({ durable: true, evicts: false, findings: [] }),
    close: () => thread.close(),
    set skew(ms: Millis) {
      thread.skew[0] = ms
    },
  }
}

/** A message carries the whole memory under a view: a small buffer of Node's pool would bring all of the pool along. */
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

type Sync<T> = {
  [K in keyof T]: T[K] extends (...args: infer A) => Promise<infer R> ? (...args: A) => R : never
}

/** What the worker runs. Each Buffer reaches the other thread as a Uint8Array. */
export interface Operations
  extends Sync<Pick<Register, 'put' | 'swap' | 'get' | 'renew' | 'due' | 'remove' | 'ping'>> {
  list(beginning: string, after: string, limit: number): RecordId[]
  unresolved(after: Place, limit: number): Place[]
  note(id: RecordId, notes: readonly Note[]): boolean
  notes(id: RecordId): string[]
  throttle: Sync<RateLimits>['take']
}

export interface Request {
  readonly seq: number
  readonly op: keyof Operations
  readonly args: readonly unknown[]
}

export type Failure = { readonly message: string; readonly full: boolean; readonly maybeApplied: boolean }
export type Reply = { readonly seq: number } & ({ readonly result: unknown } | { readonly failure: Failure })

/** What the worker posts: whether it could open the file, then the replies of one transaction at a time, and how many rows it pruned. */
export type Message =
  | { readonly opened: true }
  | { readonly failed: string }
  | { readonly replies: readonly Reply[] }
  | { readonly pruned: number }

export interface WorkerOptions {
  readonly file: string
  readonly service: string
  readonly busyMs: Millis
  /** One number: milliseconds added to the clock. */
  readonly skew: Float64Array
  /** 0: unbounded. */
  readonly maxPages: number
}

interface Pending {
  readonly resolve: (result: unknown) => void
  readonly reject: (error: Error) => void
  readonly timer: NodeJS.Timeout
}

/** The worker that runs SQLite off the event loop; started anew if it dies. */
class Thread {
  readonly skew = new Float64Array(new SharedArrayBuffer(Float64Array.BYTES_PER_ELEMENT))
  readonly #options: SqliteOptions
  readonly #pending = new Map<number, Pending>()
  #worker: Worker | null = null
  #seq = 0
  #respawn: NodeJS.Timeout | undefined
  #closing = false

  constructor(options: SqliteOptions) {
    this.#options = options
  }

  run<K extends keyof Operations>(
    op: K,
    ...args: Parameters<Operations[K]>
  ): Promise<ReturnType<Operations[K]>> {
    return new Promise((resolve, reject) => {
      const { path, timeoutMs } = this.#options
      const worker = this.#worker
      if (worker === null || this.#closing)
        return reject(new StoreUnavailable(`the store ${path} is not open`, false))
      const seq = ++this.#seq
      const timer = setTimeout(() => {
        this.#pending.delete(seq)
        reject(new StoreUnavailable(`SQLite did not answer in ${timeoutMs} ms`, true))
      }, timeoutMs)
      this.#pending.set(seq, { resolve: resolve as (result: unknown) => void, reject, timer })
      worker.postMessage({ seq, op, args } satisfies Request)
    })
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

  /** Resolves when the worker has opened the file. */
  start(): Promise<void> {
    const { path: name, service, timeoutMs, maxPages = 0, onPruned } = this.#options
    const options: WorkerOptions = {
      file: path.resolve(name),
      service,
      // Shorter than the timeout, so that a file locked by another process is an honest "not applied".
      busyMs: Math.floor(timeoutMs / 2),
      skew: this.skew,
      maxPages,
    }
    // TypeScript in development, JavaScript in the package.
    const extension = import.meta.url.slice(-2)
    const worker = new Worker(new URL(`./sqlite-worker.${extension}`, import.meta.url), {
      workerData: options,
      // node:sqlite warns in earlier releases of Node 24.
      execArgv: ['--disable-warning=ExperimentalWarning'],
    })
    return new Promise((resolve, reject) => {
      let why = 'its thread ended'
      worker.on('message', (message: Message) => {
        if ('replies' in message) return message.replies.forEach((reply) => this.#settle(reply))
        if ('pruned' in message) return onPruned?.(message.pruned)
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
        reject(new StoreUnavailable(`cannot open the store ${name}: ${why}`, false))
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
      this.start().then(
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

export const BUSY = 5
const READONLY = 8
const FULL = 13

/** What the operations of a failed transaction answer. */
export function failureOf(error: unknown, committing: boolean): Failure {
  const code = codeOf(error)
  const full = code === FULL || code === READONLY
  return {
    message: `SQLite: ${(error as Error).message}`,
    full,
    // A COMMIT that fails for any other reason than room or a lock may have reached the disk.
    maybeApplied: committing && !full && code !== BUSY,
  }
}

/** SQLite's primary result code. */
export function codeOf(error: unknown): number {
  return ((error as { errcode?: number }).errcode ?? 0) & 0xff
}
