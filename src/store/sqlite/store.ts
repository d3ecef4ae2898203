import { closeSync, existsSync, openSync } from 'node:fs'
import path from 'node:path'
import { setFlagsFromString } from 'node:v8'
import { Worker } from 'node:worker_threads'
import type { Millis, RecordId } from '../../core/record.ts'
import { unfreed } from '../../runtime/limits.ts'
import { fileOf } from '../files.ts'
import { endsAttempt } from '../record/codec.ts'
import {
  idOfCursor,
  type PutReply,
  pageOf,
  parseCursor,
  SOUND,
  type Store,
  StoreFull,
  StoreUnavailable,
  type SwapReply,
} from '../register.ts'
import { readNote, Watchers } from '../side-ports.ts'
import { BUSY, type FileOptions, resultCode } from './file.ts'
import { bufferOf, type Packed, pack, type Request, type ThreadOperations } from './messages.ts'

const RESPAWN_FROM: Millis = 100
const RESPAWN_TO: Millis = 5000
/** Limits how long operations wait for others to join their transaction: the commit time of a fast disk. */
const GATHER_FOR: Millis = 2
/** Longer than any batch takes to commit; after that the worker is terminated. */
const CLOSE_TIMEOUT: Millis = 5000

export interface SqliteOptions {
  /** Path, relative to the working directory. */
  readonly path: string
  /** Hides the records of other services in the file. */
  readonly service: string
  readonly timeoutMs: Millis
  readonly onEvent: (kind: 'connected' | 'disconnected' | 'error', detail: string) => void
  /** Called when this process has removed expired records; every process that has the file open does so. */
  readonly onPruned?: ((records: number) => void) | undefined
  /** Maximum size of the file in pages of 4 KiB; without it, the disk is the limit. */
  readonly maxPages?: number
}

export interface SqliteStore extends Store {
  /** Milliseconds by which its clock is ahead of the machine's, for tests that shift the clock. */
  skew: Millis
}

/** @throws {StoreUnavailable} if the file cannot be used. */
export async function openSqliteStore(options: SqliteOptions): Promise<SqliteStore> {
  const folder = path.dirname(path.resolve(options.path))
  if (!existsSync(folder))
    throw new StoreUnavailable(
      `cannot open the store ${options.path}: the folder ${folder} does not exist`,
      false,
    )
  // Others must not read stored answers. SQLite gives its other files the same mode.
  try {
    closeSync(openSync(options.path, 'a', 0o600))
  } catch {
    // Opening it will report the error.
  }
  const thread = new Thread(options)
  await thread.open()
  return storeOn(thread)
}

function storeOn(thread: Thread): SqliteStore {
  const watchers = new Watchers()
  const reading =
    <Reply extends PutReply | SwapReply>(id: RecordId, ends: boolean) =>
    (result: unknown): Reply => {
      const reply = result as ReturnType<ThreadOperations['swap']>
      if (reply.length === 2)
        return { done: false, now: reply[0], bytes: reply[1] && bufferOf(reply[1]) } as Reply
      if (ends) watchers.tell(id)
      const [now, version, fence, createdAt] = reply
      return { done: true, now, stamp: { version, fence, createdAt } } as Reply
    }
  return {
    name: 'sqlite',

    put(id, bytes, { dueIn, dropIn }) {
      // Immediately, since the bytes are gone once sent.
      const read = reading<PutReply>(id, endsAttempt(bytes))
      return thread.ask(['put', id, unfreed(bytes), dueIn, dropIn], read)
    },

    swap(id, condition, bytes, { dueIn, dropIn }, nextFence) {
      const read = reading<SwapReply>(id, endsAttempt(bytes))
      const [token, of] =
        'token' in condition ? [textOf(condition.token), condition.states.join(' ')] : ['', condition.version]
      return thread.ask(['swap', id, unfreed(bytes), dueIn, dropIn, nextFence, token, of], read)
    },

    async get(id) {
      const [now, bytes] = await thread.run('get', id)
      return { now, bytes: bytes && bufferOf(bytes) }
    },

    renew: (items) =>
      thread.run(
        'renew',
        items.map((item) => ({ ...item, token: textOf(item.token) })),
      ),

    due: (limit, of = 'unresolved') => thread.run('due', limit, of),

    async remove(id, version) {
      const removed = await thread.run('remove', id, version)
      if (removed) watchers.tell(id)
      return removed
    },

    async list(which, cursor, limit) {
      if (which === 'unresolved')
        return pageOf(await thread.run('unresolved', parseCursor(cursor), limit), limit)
      const ids = await thread.run('list', which === 'all' ? '' : which.beginning, idOfCursor(cursor), limit)
      return { ids, next: ids[limit - 1] ?? null }
    },

    ping: () => thread.run('ping'),

    history: {
      append: (id, notes) => thread.run('note', id, notes),
      read: async (id) => (await thread.run('notes', id)).map(readNote),
    },
    limits: { take: (bucket, rate, units) => thread.run('throttle', bucket, rate, units) },
    /** Sees writes of this process only, not what others write to the file. */
    watch: async (id, changed) => watchers.add(id, changed),
    traits: async () => SOUND,
    close: () => thread.close(),
    set skew(ms: Millis) {
      thread.skew[0] = ms
    },
  }
}

/** A character per byte: cheaper in a message than a view. */
function textOf(token: Buffer): string {
  return token.toString('latin1')
}

/** Stands in for the result. */
export interface Failure {
  readonly message: string
  readonly full: boolean
  readonly maybeApplied: boolean
}

/** The worker posts whether it could open the file, then the results of the oldest requests, in order, and how many rows it pruned. */
export type Message =
  | { readonly opened: true }
  | { readonly failed: string }
  | Packed
  | { readonly pruned: number }

export interface WorkerOptions extends FileOptions {
  readonly service: string
  /** One number: milliseconds added to the clock. */
  readonly skew: Float64Array
}

interface ThreadCall {
  /** Null once sent, so that its bytes are not kept until the answer. */
  request: Request | null
  readonly answer: (result: unknown) => void
  readonly reject: (error: Error) => void
}
/** The requests of one turn of the event loop. */
interface Turn {
  readonly calls: readonly ThreadCall[]
  readonly timer: NodeJS.Timeout
  isSent: boolean
}

/** The worker that runs SQLite off the event loop; restarted if it dies. It gets one message at a time. */
class Thread {
  readonly skew = new Float64Array(new SharedArrayBuffer(Float64Array.BYTES_PER_ELEMENT))
  readonly #options: SqliteOptions
  /** Requests of this turn. */
  #asked: ThreadCall[] = []
  /** Earlier turns, held until the worker is idle. */
  #waiting: Turn[] = []
  /** Unanswered requests, oldest first; the worker answers in order, and its messages arrive before its exit. */
  #sent: Turn[] = []
  #worker: Worker | null = null
  #respawn: NodeJS.Timeout | undefined
  #isGathering = false
  #closing = false

  constructor(options: SqliteOptions) {
    this.#options = options
  }

  run<K extends keyof ThreadOperations>(
    op: K,
    ...args: Parameters<ThreadOperations[K]>
  ): Promise<ReturnType<ThreadOperations[K]>> {
    return this.ask(
      [op, ...args] as unknown as Request,
      (result) => result as ReturnType<ThreadOperations[K]>,
    )
  }

  /** `read` converts the result into the reply; it must not throw. */
  ask<Reply>(request: Request, read: (result: unknown) => Reply): Promise<Reply> {
    return new Promise((resolve, reject) => {
      if (this.#worker === null || this.#closing)
        return reject(new StoreUnavailable(`the store ${this.#options.path} is not open`, false))
      const call: ThreadCall = { request, answer: (result) => resolve(read(result)), reject }
      if (this.#asked.push(call) === 1) setImmediate(() => this.#send())
    })
  }

  #send(): void {
    const calls = this.#asked
    if (calls.length === 0) return
    this.#asked = []
    const { timeoutMs } = this.#options
    const timer = setTimeout(() => {
      if (!turn.isSent) this.#waiting.splice(this.#waiting.indexOf(turn), 1)
      const late = new StoreUnavailable(`SQLite did not answer in ${timeoutMs} ms`, turn.isSent)
      for (const { reject } of calls) reject(late)
    }, timeoutMs)
    const turn: Turn = { calls, timer, isSent: false }
    this.#waiting.push(turn)
    this.#gather()
  }

  /**
   * Sends waiting requests once the worker is idle and a turn of the event loop has added none: a transaction costs about the same for one
   * operation as for sixty (docs/adr/0112).
   */
  #gather(): void {
    if (this.#isGathering || this.#sent.length > 0 || this.#waiting.length === 0) return
    this.#isGathering = true
    const until = performance.now() + GATHER_FOR
    const look = (): void => {
      if (this.#asked.length > 0 && performance.now() < until) return void setImmediate(look)
      this.#isGathering = false
      this.#post()
    }
    setImmediate(look)
  }

  #post(): void {
    const turns = this.#waiting.splice(0)
    if (turns.length === 0) return
    const calls = turns.flatMap((turn) => turn.calls)
    this.#worker?.postMessage(...pack(calls.map(({ request }) => request as Request)))
    for (const call of calls) call.request = null
    for (const turn of turns) turn.isSent = true
    this.#sent.push(...turns)
  }

  async close(): Promise<void> {
    this.#closing = true
    clearTimeout(this.#respawn)
    const worker = this.#worker
    if (worker === null) return
    this.#send()
    this.#post()
    const exited = new Promise((done) => worker.once('exit', done))
    worker.postMessage('close')
    const force = setTimeout(() => void worker.terminate(), CLOSE_TIMEOUT)
    await exited
    clearTimeout(force)
  }

  #workerOptions(): WorkerOptions {
    const { path: name, service, timeoutMs, maxPages = 0 } = this.#options
    return {
      file: path.resolve(name),
      service,
      // Shorter than the timeout, so that a locked file is reported as "not applied".
      busyMs: Math.floor(timeoutMs / 2),
      skew: this.skew,
      maxPages,
    }
  }

  /**
   * Starts the worker, and resolves when it has opened the file.
   *
   * @throws {StoreUnavailable} if it cannot.
   */
  async open(): Promise<void> {
    const failed = (reason: string) =>
      new StoreUnavailable(`cannot open the store ${this.#options.path}: ${reason}`, false)
    // TypeScript in development, JavaScript in the package.
    const extension = import.meta.url.slice(-2)
    // The image sets this flag for the main thread; inherited, it would override the limit below.
    setFlagsFromString('--max-semi-space-size=0')
    let worker: Worker
    try {
      worker = new Worker(fileOf(`sqlite/worker.${extension}`), {
        workerData: this.#workerOptions(),
        // Its objects are short-lived; the bytes sent to it should be, too.
        resourceLimits: { maxYoungGenerationSizeMb: 3 },
        // node:sqlite warns in earlier releases of Node 24.
        execArgv: ['--disable-warning=ExperimentalWarning'],
      })
    } catch (error) {
      // The system has no more threads.
      throw failed((error as Error).message)
    }
    const { promise: opened, resolve, reject } = Promise.withResolvers<void>()
    let why = 'its thread ended'
    worker.on('message', (message: Message) => {
      if ('memory' in message) return this.#settle(message.messages)
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
      reject(failed(why))
      if (this.#worker === worker) this.#lost(why)
    })
    return opened
  }

  #lost(why: string): void {
    this.#send()
    this.#worker = null
    for (const turns of [this.#waiting, this.#sent]) {
      const lost = new StoreUnavailable(`the thread of SQLite ended: ${why}`, turns === this.#sent)
      for (const { calls, timer } of turns.splice(0)) {
        clearTimeout(timer)
        for (const { reject } of calls) reject(lost)
      }
    }
    if (this.#closing) return
    this.#options.onEvent('disconnected', why)
    this.#restart(RESPAWN_FROM)
  }

  #restart(wait: Millis): void {
    this.#respawn = setTimeout(() => {
      this.open().then(
        () => this.#options.onEvent('connected', this.#options.path),
        (error: Error) => {
          this.#options.onEvent('error', error.message)
          if (!this.#closing) this.#restart(Math.min(wait * 2, RESPAWN_TO))
        },
      )
    }, wait)
  }

  #settle(results: readonly unknown[]): void {
    for (let n = 0; n < results.length; ) {
      const { calls, timer } = this.#sent.shift() as Turn
      clearTimeout(timer)
      for (const { answer, reject } of calls) {
        const result = results[n++]
        if (!isFailure(result)) answer(result)
        else if (result.full) reject(new StoreFull(result.message))
        else reject(new StoreUnavailable(result.message, result.maybeApplied))
      }
    }
    this.#gather()
  }
}

function isFailure(result: unknown): result is Failure {
  return typeof result === 'object' && result !== null && 'maybeApplied' in result
}

const READONLY = 8
const FULL = 13

/** The reply to the operations of a failed transaction. */
export function failureOf(error: unknown, committing: boolean): Failure {
  const code = resultCode(error)
  const full = code === FULL || code === READONLY
  return {
    message: `SQLite: ${(error as Error).message}`,
    full,
    // A COMMIT that fails for a reason other than room or a lock may have reached the disk.
    maybeApplied: committing && !full && code !== BUSY,
  }
}
