import assert from 'node:assert/strict'
import { AsyncLocalStorage } from 'node:async_hooks'
import { randomUUID } from 'node:crypto'
import { EventEmitter } from 'node:events'
import { syncBuiltinESMExports } from 'node:module'
import { join } from 'node:path'
import { DatabaseSync, type SQLOutputValue } from 'node:sqlite'
import workerThreads, { MessageChannel, type MessagePort, type Transferable } from 'node:worker_threads'
import type { Test } from 'tap'
import { openSqliteStore, type SqliteOptions } from '../../src/store/sqlite/store.ts'
import { tempDir } from './fixtures.ts'

/*
 * SQLite's thread without a thread: an instance of its module for each store, on the test's own event loop. So a test starts one in
 * milliseconds, counts its messages, and says when it sweeps. Messages still go through a channel, which copies and transfers them.
 */

interface Timer {
  readonly run: () => void
  readonly ms: number
}

/** The instance whose code runs. */
const running = new AsyncLocalStorage<InProcess>()
let loading: Promise<unknown> = Promise.resolve()

export class InProcess extends EventEmitter {
  /** What was posted to it; null: `close`. */
  readonly posted: unknown[] = []
  /** The arguments of `new Worker`. */
  readonly url: URL
  readonly options: workerThreads.WorkerOptions
  /** The next sweep, if it is to happen. */
  timer: Timer | null = null
  /** The next slice of a running move. */
  immediate: (() => void) | null = null
  readonly #mine: MessagePort
  readonly #its: MessagePort

  constructor(url: URL, options: workerThreads.WorkerOptions) {
    super()
    this.url = url
    this.options = options
    const { port1, port2 } = running.run(this, () => new MessageChannel())
    this.#mine = port1
    this.#its = port2
    port1.on('message', (message) => this.emit('message', message))
    port1.on('close', () => this.emit('exit', 0))
    loading = loading.then(() => running.run(this, () => this.#load()))
  }

  async #load(): Promise<void> {
    const before = { parentPort: workerThreads.parentPort, workerData: workerThreads.workerData as unknown }
    // Nobody could release a lock while SQLite waits for it.
    const workerData = { ...this.options.workerData, busyMs: 0 }
    Object.assign(workerThreads, { parentPort: this.#its, workerData })
    syncBuiltinESMExports()
    await import(`../../src/store/sqlite/worker.ts?instance=${randomUUID()}`)
    Object.assign(workerThreads, before)
    syncBuiltinESMExports()
  }

  postMessage(message: unknown, transfer: readonly Transferable[] = []): void {
    this.posted.push(message)
    this.#mine.postMessage(message, transfer)
  }

  /** As a thread that dies: nothing more of it runs. */
  terminate(): Promise<number> {
    this.#its.removeAllListeners()
    this.#its.close()
    this.timer = this.immediate = null
    return Promise.resolve(1)
  }

  sweep(): void {
    const { timer } = this
    assert.ok(timer, 'no sweep is planned')
    this.timer = null
    running.run(this, timer.run)
  }

  /** One slice of the running move. */
  slice(): void {
    const { immediate } = this
    assert.ok(immediate, 'no move is running')
    this.immediate = null
    running.run(this, immediate)
  }
}

/** Until the test ends, threads are in this process. Returns those that were started, oldest first. */
export function threadsInProcess(t: Test): readonly InProcess[] {
  const started: InProcess[] = []
  const { Worker } = workerThreads
  const { setTimeout, setImmediate, clearTimeout, clearImmediate } = globalThis
  class Started extends InProcess {
    constructor(url: URL, options: workerThreads.WorkerOptions) {
      super(url, options)
      started.push(this)
    }
  }
  Object.assign(workerThreads, { Worker: Started })
  syncBuiltinESMExports()
  Object.assign(globalThis, {
    setTimeout: (run: (...args: unknown[]) => void, ms: number, ...rest: unknown[]) => {
      const instance = run.name === 'sweep' ? running.getStore() : undefined
      if (instance === undefined) return setTimeout(run, ms, ...rest)
      instance.timer = { run, ms }
      return {
        instance,
        unref() {
          return this
        },
      }
    },
    setImmediate: (run: (...args: unknown[]) => void, ...rest: unknown[]) => {
      const instance = run.name === 'go' ? running.getStore() : undefined
      if (instance === undefined) return setImmediate(run, ...rest)
      instance.immediate = run
      return { instance }
    },
    clearTimeout: (timer: NodeJS.Timeout & { instance?: InProcess }) => {
      if (timer?.instance === undefined) clearTimeout(timer)
      else timer.instance.timer = null
    },
    clearImmediate: (immediate: NodeJS.Immediate & { instance?: InProcess }) => {
      if (immediate?.instance === undefined) clearImmediate(immediate)
      else immediate.instance.immediate = null
    },
  })
  t.teardown(async () => {
    await loading
    for (const each of started) {
      // Its store is not told, and so starts no other.
      each.removeAllListeners()
      await each.terminate()
    }
    Object.assign(globalThis, { setTimeout, setImmediate, clearTimeout, clearImmediate })
    Object.assign(workerThreads, { Worker })
    syncBuiltinESMExports()
  })
  return started
}

/** Where the clock stands still. */
export const NOW = 1_800_000_000_000

/** Stores on one file, of one process each, whose clock stands at NOW. */
export function fileInProcess(t: Test) {
  const started = threadsInProcess(t)
  const dir = tempDir()
  const file = join(dir.path, 'records.db')
  let reader: DatabaseSync | null = null
  const connection = (): DatabaseSync => (reader ??= new DatabaseSync(file, { timeout: 0 }))
  const { now } = Date
  Date.now = () => NOW
  t.teardown(() => {
    Date.now = now
    reader?.close()
    dir[Symbol.dispose]()
  })
  return {
    file,
    started,
    /** Another connection. */
    get db(): DatabaseSync {
      return connection()
    },
    rows: (sql: string): Record<string, SQLOutputValue>[] =>
      connection()
        .prepare(sql)
        .all()
        .map((row) => ({ ...row })),
    async open(over: Partial<SqliteOptions> = {}) {
      const pruned: number[] = []
      const register = await openSqliteStore({
        path: file,
        service: 'pay',
        timeoutMs: 20_000,
        onEvent: () => {},
        onPruned: (records) => void pruned.push(records),
        ...over,
      })
      const thread = started.at(-1) as InProcess
      /** From the journal to the table. */
      const move = async (): Promise<void> => {
        thread.sweep()
        thread.sweep()
        while (thread.immediate !== null) thread.slice()
        await register.ping()
      }
      return { register, thread, pruned, move }
    },
  }
}

/** A file with one store on it. */
export async function inProcess(t: Test, over: Partial<SqliteOptions> = {}) {
  const found = fileInProcess(t)
  return Object.assign(found, await found.open(over))
}
