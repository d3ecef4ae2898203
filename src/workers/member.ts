import { type ChildProcess, fork } from 'node:child_process'
import type { Socket } from 'node:net'
import { fileURLToPath } from 'node:url'
import type { Millis } from '../core/record.ts'
import type { Begin, FromWorker, Question, Questions, ToWorker } from './messages.ts'

/** Time for an answer. A worker that is suspended, or busy for longer, counts as not answering. */
const ANSWERS_WITHIN: Millis = 5000

interface Asked {
  readonly give: (value: unknown) => void
  readonly fail: (error: Error) => void
}

/** Thrown for a question to a worker that has ended. */
export class WorkerEnded extends Error {}

/** A worker, as the first process sees it. */
export class Member {
  readonly number: number
  /** The text of the configuration that is in force there. */
  text: string
  /** Resolves once it serves, or cannot: why not. */
  readonly begun: Promise<string | null>
  /** Resolves when the process is gone, with its exit code or signal. */
  readonly ended: Promise<string>
  readonly #child: ChildProcess
  readonly #asked = new Map<number, Asked>()
  #count = 0
  #isEnded = false
  /** The connection on its way to the worker. */
  #given: { readonly connection: Socket; readonly took: () => void } | null = null

  constructor(begin: Begin) {
    this.number = begin.place.number
    this.text = begin.source.text
    const extension = import.meta.url.slice(-2)
    const file = fileURLToPath(new URL(`../workers/worker.${extension}`, import.meta.url))
    this.#child = fork(file, [], {
      serialization: 'advanced',
      stdio: ['ignore', 'inherit', 'inherit', 'ipc'],
    })
    this.ended = endOf(this.#child).then((how) => {
      this.#isEnded = true
      for (const { fail } of this.#asked.values()) fail(new WorkerEnded())
      this.#given?.connection.destroy()
      this.#given = null
      return how
    })
    const { promise, resolve } = Promise.withResolvers<string | null>()
    this.begun = promise
    void this.ended.then((how) => resolve(`it ended with ${how}`))
    this.#child.on('message', (message: FromWorker) => this.#hear(message, resolve))
    // From Node's channel: the connection did not arrive, because the worker has no file descriptors left.
    this.#child.on('internalMessage', ({ cmd }: { cmd?: unknown }) => {
      if (cmd === 'NODE_HANDLE_NACK') this.#handedOver()
    })
    this.#send({ kind: 'begin', begin })
  }

  /**
   * @throws {WorkerEnded} if it has ended, or ends before it answers.
   * @throws {Error} if it does not answer in time, or the question failed there.
   */
  async ask<Q extends Question>(
    name: Q,
    takes: Questions[Q]['takes'],
    within: Millis = ANSWERS_WITHIN,
  ): Promise<Questions[Q]['gives']> {
    if (this.#isEnded) throw new WorkerEnded()
    const id = ++this.#count
    const { promise, resolve, reject } = Promise.withResolvers<unknown>()
    this.#asked.set(id, { give: resolve, fail: reject })
    const timer = setTimeout(() => reject(new Error(`worker ${this.number} does not answer`)), within)
    this.#send({ kind: 'question', id, name, takes })
    try {
      return (await promise) as Questions[Q]['gives']
    } finally {
      clearTimeout(timer)
      this.#asked.delete(id)
    }
  }

  /**
   * Hands over a connection that nobody has read from: one at a time. `took`: it has arrived, or was closed because the worker has no
   * room; `failed`: the process can take none.
   */
  give(connection: Socket, took: () => void, failed: () => void): void {
    this.#given = { connection, took }
    // Kept open here until it has arrived: otherwise Node would never close one that is on its way when the worker ends.
    this.#child.send({ kind: 'connection' } satisfies ToWorker, connection, { keepOpen: true }, (error) => {
      if (error === null || this.#given?.connection !== connection) return
      this.#given = null
      failed()
    })
  }

  #handedOver(): void {
    const given = this.#given
    this.#given = null
    given?.connection.destroy()
    given?.took()
  }

  say(message: Extract<ToWorker, { kind: 'state' | 'end' }>): void {
    this.#send(message)
  }

  kill(): void {
    this.#child.kill('SIGKILL')
  }

  #send(message: ToWorker): void {
    this.#child.send(message, ignore)
  }

  #hear(message: FromWorker, begun: (why: string | null) => void): void {
    if (message.kind === 'serves') begun(null)
    else if (message.kind === 'cannot start') begun(message.why)
    else if (message.kind === 'took') this.#handedOver()
    else if (message.kind === 'answer') this.#asked.get(message.id)?.give(message.gives)
    else this.#asked.get(message.id)?.fail(new Error(message.why))
  }
}

/** Resolves with its exit code or signal. */
function endOf(child: ChildProcess): Promise<string> {
  return new Promise((resolve) => {
    child.once('exit', (code, signal) => resolve(signal ?? `exit code ${code}`))
    child.on('error', (error) => {
      // Other errors concern its channel, and `exit` follows.
      if (child.pid === undefined) resolve(error.message)
    })
  })
}

/** For a message to a process that has ended, which is noticed elsewhere. */
function ignore(): void {}
