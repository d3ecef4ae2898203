import { type Redis, ReplyError } from 'ioredis'
import type { Millis } from '../core/record.ts'
import { CorruptRecord, StoreFull, StoreUnavailable } from './register.ts'
import { type CommandHead, commandHead, encoded, type RespArg, type RespReply } from './resp.ts'

/** Commands in a row that time out on a silent connection before it counts as dead: a lost host sends no reset. */
const SILENT_COMMANDS = 5

export interface HostPort {
  readonly host: string
  readonly port: number
}

/** How to greet a server. */
export interface Login {
  readonly username: string
  readonly password: string
  readonly db: number
  /** Asked for each connection. Absent: plain. */
  readonly tls?: () => object
}

export type RedisAddress = HostPort & Login

export function hostPortText({ host, port }: HostPort): string {
  return `${host.includes(':') ? `[${host}]` : host}:${port}`
}

/** Converts a reply into a result; throws a {@link ProtocolError} if it cannot belong to its command. `link`: the link it arrived on. */
export type Reader<T> = (reply: never, link: RedisLink) => T

export interface Script {
  readonly source: string
  /** It grants claims, so it is sent the identity of the process it reaches. */
  readonly admits: boolean
  /** The start of its `EVALSHA` command. */
  readonly head: CommandHead
}

/** A reply that cannot belong to its command: no later one can be trusted. */
export class ProtocolError extends Error {
  override readonly name = 'ProtocolError'
}

/** The commands of one turn of the event loop, which leave in one write. ioredis writes into it as into a pipeline of its own. */
class Turn {
  readonly isPipeline = true
  readonly destination: { readonly redis: Redis }
  readonly calls: Call[] = []
  /** Until it is written, only this process has seen its commands. */
  isWritten = false
  /** Number of replies when it was written. */
  replies = 0
  timer: NodeJS.Timeout | undefined
  #text = ''
  #pieces: (string | Buffer)[] = []
  unsettled = 0

  constructor(redis: Redis) {
    this.destination = { redis }
  }

  add(call: Call): void {
    this.calls.push(call)
    this.unsettled++
  }

  settled(): void {
    if (--this.unsettled === 0) clearTimeout(this.timer)
  }

  readonly write = (piece: string | Buffer): void => {
    if (typeof piece === 'string') this.#text += piece
    else {
      this.#pieces.push(this.#text, piece)
      this.#text = ''
    }
  }

  send(stream: Redis['stream']): void {
    stream.cork()
    for (const piece of this.#pieces) stream.write(piece, 'latin1')
    stream.write(this.#text, 'latin1')
    stream.uncork()
    this.#pieces = []
    this.#text = ''
    this.isWritten = true
  }
}

/** What a call asks for, and who waits for it. */
interface Order {
  readonly head: CommandHead
  readonly args: readonly RespArg[]
  readonly read: Reader<unknown>
  readonly resolve: (value: unknown) => void
  readonly reject: (error: unknown) => void
  /** Needed to send it as `EVAL` if Redis does not know the script. */
  readonly script: Script | null
  /** For a script: the number that its reply ends with. Null: a plain command. */
  readonly number: number | null
}

/** What ioredis's queue needs of a `Command`, whose own timers, transformers and second promise would cost as much again (ADR 124). */
class Call {
  readonly isTraced = true
  readonly name: string
  readonly args: readonly RespArg[]
  readonly #order: Order
  readonly #link: RedisLink
  readonly #turn: Turn
  isSettled = false

  constructor(order: Order, link: RedisLink, turn: Turn) {
    this.name = order.head.name
    this.args = order.args
    this.#order = order
    this.#link = link
    this.#turn = turn
  }

  setReplyContext(): void {}

  toWritable(): string {
    return encoded(this.#order.head, this.args, this.#turn.write)
  }

  /** Also runs for a call that has timed out: a reply that does not match it may belong to one that has not. */
  resolve(reply: RespReply): void {
    const { number, read } = this.#order
    this.#link.answered()
    this.#settle()
    try {
      if (this.#link.isBroken) throw repliesMismatch()
      this.#order.resolve(read(ownReply(number, reply) as never, this.#link))
    } catch (error) {
      if (!(error instanceof ProtocolError)) return this.#order.reject(error)
      this.#order.reject(unanswered(error.message, true))
      this.#link.break(error)
    }
  }

  /** By Redis, or by ioredis when the connection has ended. */
  reject(error: Error): void {
    if (!(error instanceof ReplyError)) return this.fail(closed(this.#turn.isWritten))
    if (this.#link.isBroken) return this.resolve(error)
    this.#link.answered()
    if (this.isSettled) return
    const message = refusalOf(error)
    const { script } = this.#order
    if (script !== null && message.startsWith('NOSCRIPT') && this.#link.isOpen) {
      this.#settle()
      return this.#link.send({ ...this.#order, head: commandHead('eval', script.source), script: null })
    }
    // After a failover this may be the old primary; reconnecting by name may reach the new one.
    if (message.startsWith('READONLY')) this.#link.end()
    this.fail(redisFailure(message))
  }

  fail(error: Error): void {
    this.#settle()
    this.#order.reject(error)
  }

  #settle(): void {
    if (this.isSettled) return
    this.isSettled = true
    this.#turn.settled()
  }
}

/**
 * One connection of an ioredis client, from its greeting to its end: nothing is sent again on another. Replies of scripts carry their
 * command's number: if a reply is lost, no claim takes the next one as its own. One write and one timer for all commands of a turn.
 */
export class RedisLink {
  readonly #redis: Redis
  readonly #stream: Redis['stream']
  readonly #timeout: Millis
  /** The commands of this turn, if any. */
  #turn: Turn | null = null
  #replies = 0
  #silentCommands = 0
  #scripts = 0
  readonly address: RedisAddress
  /** Takes commands. */
  isOpen = true
  /** A reply was lost or spurious. */
  isBroken = false
  /** The process at its other end; '': unknown, or not needed. */
  identity = ''

  constructor(redis: Redis, address: RedisAddress, timeoutMs: Millis) {
    this.#redis = redis
    this.#stream = redis.stream
    this.address = address
    this.#timeout = timeoutMs
  }

  /**
   * Sends a plain command, whose reply does not identify it.
   *
   * @param read converts the reply; throws a {@link ProtocolError} if it cannot belong to this command.
   */
  ask<T>(name: string, args: readonly RespArg[], read: Reader<T>): Promise<T> {
    return this.#promise(commandHead(name), args, read, null, null)
  }

  /**
   * Runs a script.
   *
   * @param args the number of keys, the keys, the arguments. Appended for the script: the {@link identity} if it `admits`, and a number
   * with which its reply ends; `read` converts the rest of the reply.
   */
  run<T>(script: Script, args: RespArg[], read: Reader<T>): Promise<T> {
    const number = ++this.#scripts
    if (script.admits) args.push(this.identity)
    args.push(number)
    return this.#promise(script.head, args, read, script, number)
  }

  /** Closes the connection after the commands already sent. */
  end(): void {
    this.isOpen = false
    this.#flush()
    this.#redis.disconnect()
  }

  /** Nothing more is sent or read. */
  destroy(error?: Error): void {
    this.isOpen = false
    this.#stream.destroy(error)
  }

  /** Replies are no longer believed. */
  break(error: Error): void {
    this.isBroken = true
    this.destroy(error)
  }

  answered(): void {
    this.#replies++
    this.#silentCommands = 0
  }

  send(order: Order): void {
    if (this.#turn === null) {
      this.#turn = new Turn(this.#redis)
      setImmediate(() => this.#flush())
    }
    const call = new Call(order, this, this.#turn)
    this.#turn.add(call)
    this.#redis.sendCommand(call as never, this.#turn)
  }

  #promise<T>(
    head: CommandHead,
    args: readonly RespArg[],
    read: Reader<T>,
    script: Script | null,
    number: number | null,
  ): Promise<T> {
    return new Promise((resolve, reject) => {
      if (!this.isOpen) return reject(closed(false))
      this.send({ head, args, read, resolve: resolve as (value: unknown) => void, reject, script, number })
    })
  }

  #flush(): void {
    const turn = this.#turn
    this.#turn = null
    // If no longer writable, its end is about to be reported, and nothing of this turn was sent.
    if (turn === null || !this.#stream.writable) return
    turn.replies = this.#replies
    turn.send(this.#stream)
    // Only after pending input was read: a busy event loop does not mean a silent Redis.
    if (turn.unsettled > 0)
      turn.timer = setTimeout(() => setImmediate(() => this.#expire(turn)), this.#timeout)
  }

  #expire({ calls, replies }: Turn): void {
    const isSilent = replies === this.#replies
    for (const call of calls) {
      if (!this.isOpen) return
      if (call.isSettled) continue
      call.fail(unanswered('Command timed out', true))
      // If other replies arrived but not this one, no later reply can be trusted.
      if (!isSilent || ++this.#silentCommands >= SILENT_COMMANDS) this.destroy()
    }
  }
}

function unanswered(why: string, maybeApplied: boolean): StoreUnavailable {
  return new StoreUnavailable(`no answer from Redis: ${why}`, maybeApplied)
}

function closed(maybeApplied: boolean): StoreUnavailable {
  return unanswered('Connection is closed.', maybeApplied)
}

/** @throws {ProtocolError} if it answers another command. */
function ownReply(number: number | null, reply: RespReply): RespReply {
  if (number !== null && !(Array.isArray(reply) && reply.pop() === number)) throw repliesMismatch()
  return reply
}

/** An earlier reply was lost or spurious. */
export function repliesMismatch(): ProtocolError {
  return new ProtocolError('replies do not match their commands')
}

/** The strings of an array, '' for other elements; empty if the reply is not an array. */
export function wordsOf(reply: RespReply): string[] {
  return Array.isArray(reply) ? reply.map((part) => (Buffer.isBuffer(part) ? part.toString() : '')) : []
}

/** Redis refused the command and applied nothing. */
export class Refused extends StoreUnavailable {
  readonly reply: string

  constructor(reply: string) {
    super(`Redis refuses: ${reply}`, false)
    this.reply = reply
  }
}

/** Redis quotes the arguments of unknown commands, among them the password of AUTH. */
function refusalOf({ message }: Error): string {
  return message.replace(/, with args beginning with.*/s, '')
}

/** Whatever ioredis reports, as one of ours. */
export function connectionError(error: Error & { readonly code?: string }): Error {
  if (error instanceof ReplyError) return redisFailure(refusalOf(error))
  // The error of a connection to several addresses has a code and no message.
  return error.message === '' ? new Error(error.code) : error
}

function redisFailure(message: string): StoreUnavailable | CorruptRecord {
  if (message.startsWith('WRONGTYPE'))
    return new CorruptRecord('the key of the record holds a value of another type')
  if (message.startsWith('OOM')) return new StoreFull(`Redis is full: ${message}`)
  return new Refused(message)
}
