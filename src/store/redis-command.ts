import type { Command } from 'ioredis'
import type { Millis } from '../core/record.ts'
import { TIMED_OUT } from './redis-replies.ts'

/** Strings are ASCII: names, ids, numbers. Any other text is to be given as bytes. */
export type Arg = string | number | Buffer

/**
 * A command for ioredis' `sendCommand`: it sends and queues it, matches the reply and ends it with its connection, as it
 * does with a command of its own. Only what a command is made of is leaner: encoded once into one buffer, one promise, one
 * timer (docs/internals/performance.md). Errors carry no arguments, which are keys and records.
 */
class LeanCommand {
  readonly name: string
  readonly args: readonly Arg[] = []
  readonly promise: Promise<unknown>
  readonly inTransaction = false
  /** Nobody listens to ioredis' diagnostics channels, which get arguments. */
  readonly isTraced = true
  isResolved = false
  readonly #bytes: Buffer
  #settle: { resolve: (reply: unknown) => void; reject: (error: unknown) => void } | null
  #timer: NodeJS.Timeout | null = null

  constructor(name: string, args: readonly Arg[]) {
    this.name = name
    this.#bytes = encode(name, args)
    const { promise, resolve, reject } = Promise.withResolvers<unknown>()
    this.promise = promise
    this.#settle = { resolve, reject }
  }

  /** ioredis says which protocol the connection speaks: it is RESP2 for all of ours. */
  setReplyContext(): void {}

  toWritable(): Buffer {
    return this.#bytes
  }

  /** ioredis goes on waiting for the reply, which the order of replies needs. */
  setTimeout(after: Millis): void {
    this.#timer ??= setTimeout(() => this.reject(new Error(TIMED_OUT)), after)
  }

  resolve(reply: unknown): void {
    const settle = this.#end()
    this.isResolved = true
    settle?.resolve(reply)
  }

  reject(error: unknown): void {
    this.#end()?.reject(error)
  }

  #end() {
    if (this.#timer !== null) clearTimeout(this.#timer)
    const settle = this.#settle
    this.#settle = null
    return settle
  }
}

/** Replies are buffers, numbers, null and lists of them: nothing is transformed. */
export function command(name: string, args: readonly Arg[]): Command {
  // What `sendCommand` and the reply's way use of a command is all there.
  return new LeanCommand(name, args) as unknown as Command
}

/** As RESP: an array of bulk strings. */
export function encode(name: string, args: readonly Arg[]): Buffer {
  let size = 0
  const parts: (string | Buffer)[] = []
  let text = `*${args.length + 1}\r\n$${name.length}\r\n${name}\r\n`
  for (const arg of args) {
    if (typeof arg === 'object') {
      text += `$${arg.length}\r\n`
      size += text.length + arg.length
      parts.push(text, arg)
      text = '\r\n'
    } else {
      const value = String(arg)
      text += `$${value.length}\r\n${value}\r\n`
    }
  }
  const bytes = Buffer.allocUnsafe(size + text.length)
  let at = 0
  // One byte per character: were one not ASCII, the lengths said before would hold all the same.
  for (const part of parts)
    at += typeof part === 'string' ? bytes.write(part, at, 'latin1') : part.copy(bytes, at)
  bytes.write(text, at, 'latin1')
  return bytes
}
