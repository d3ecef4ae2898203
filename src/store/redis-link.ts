import { Command, type Redis, ReplyError } from 'ioredis'
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

/** Its bytes are ready, and stay out of what ioredis tells of a command: errors, traces. */
class ReadyCommand extends Command {
  readonly #bytes: Buffer

  constructor(head: CommandHead, args: readonly RespArg[]) {
    super(head.name, [], { replyEncoding: null })
    this.#bytes = encoded(head, args)
  }

  override toWritable(): Buffer {
    return this.#bytes
  }
}

/** A command whose reply somebody waits for. */
interface Call {
  readonly head: CommandHead
  readonly args: readonly RespArg[]
  readonly read: Reader<unknown>
  readonly resolve: (value: never) => void
  readonly reject: (error: unknown) => void
  /** Needed to send it as `EVAL` if Redis does not know the script. */
  readonly script: Script | null
  /** For a script: the number that its reply ends with. Null: a plain command. */
  readonly number: number | null
}

/** The commands of one turn of the event loop, which leave in one write. To ioredis it is a pipeline. */
class Turn {
  readonly isPipeline = true
  readonly destination: { readonly redis: Redis }
  readonly calls = new Set<Call>()
  readonly bytes: (string | Buffer)[] = []
  /** Until it is written, only this process has seen its commands. */
  isWritten = false
  /** Number of replies when it was written. */
  replies = 0
  timer: NodeJS.Timeout | undefined

  constructor(redis: Redis) {
    this.destination = { redis }
  }

  write(bytes: string | Buffer): void {
    this.bytes.push(bytes)
  }

  /** Whether somebody still waits. */
  settle(call: Call): boolean {
    const isWaiting = this.calls.delete(call)
    if (this.calls.size === 0) clearTimeout(this.timer)
    return isWaiting
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
  #turn: Turn | null = null
  #replies = 0
  #silentCommands = 0
  #scripts = 0
  /** A reply was lost or spurious. */
  #isBroken = false
  readonly address: RedisAddress
  /** Takes commands. */
  isOpen = true
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
    return this.#call({ head: commandHead(name), args, read, script: null, number: null })
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
    return this.#call({ head: script.head, args, read, script, number })
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

  #call<T>(call: Omit<Call, 'resolve' | 'reject'>): Promise<T> {
    return new Promise((resolve, reject) => {
      if (this.isOpen) this.#send({ ...call, resolve, reject })
      else reject(closed(false))
    })
  }

  #send(call: Call): void {
    if (this.#turn === null) {
      this.#turn = new Turn(this.#redis)
      // Operations of the store come together already (redis-batch.ts).
      process.nextTick(() => this.#flush())
    }
    const turn = this.#turn
    turn.calls.add(call)
    const command = new ReadyCommand(call.head, call.args)
    command.promise.then(
      (reply) => this.#take(call, turn, reply),
      (error) => this.#refuse(call, turn, error),
    )
    this.#redis.sendCommand(command, turn)
  }

  /** Also reads for a call that has timed out: a reply that does not match it may belong to one that has not. */
  #take(call: Call, turn: Turn, reply: RespReply): void {
    this.#replies++
    this.#silentCommands = 0
    turn.settle(call)
    try {
      if (this.#isBroken) throw repliesMismatch()
      call.resolve(call.read(ownReply(call.number, reply) as never, this) as never)
    } catch (error) {
      if (!(error instanceof ProtocolError)) return call.reject(error)
      call.reject(unanswered(error.message, true))
      this.#isBroken = true
      this.destroy(error)
    }
  }

  /** By Redis, or by ioredis when the connection has ended. */
  #refuse(call: Call, turn: Turn, error: Error): void {
    const isAnswer = error instanceof ReplyError
    /* c8 ignore next: only where a refusal follows the spurious reply in the same read */
    if (isAnswer && this.#isBroken) return this.#take(call, turn, error)
    if (!turn.settle(call)) return
    if (!isAnswer) return call.reject(closed(turn.isWritten))
    this.#replies++
    this.#silentCommands = 0
    const failure = redisFailure(error.message)
    if (call.script !== null && isRefusal(failure, 'NOSCRIPT') && this.isOpen)
      return this.#send({ ...call, head: commandHead('eval', call.script.source), script: null })
    // After a failover this may be the old primary; reconnecting by name may reach the new one.
    if (isRefusal(failure, 'READONLY')) this.end()
    call.reject(failure)
  }

  #flush(): void {
    const [turn, stream] = [this.#turn, this.#stream]
    this.#turn = null
    // If no longer writable, its end is about to be reported, and nothing of this turn was sent.
    if (turn === null || !stream.writable) return
    turn.isWritten = true
    turn.replies = this.#replies
    stream.cork()
    for (const bytes of turn.bytes.splice(0)) stream.write(bytes)
    stream.uncork()
    // Only after pending input was read: a busy event loop does not mean a silent Redis.
    if (turn.calls.size > 0)
      turn.timer = setTimeout(() => setImmediate(() => this.#expire(turn)), this.#timeout)
  }

  #expire(turn: Turn): void {
    const isSilent = turn.replies === this.#replies
    for (const call of turn.calls) {
      if (!this.isOpen) return
      turn.settle(call)
      call.reject(unanswered('Command timed out', true))
      // If other replies arrived but not this one, no later reply can be trusted.
      if (!isSilent || ++this.#silentCommands >= SILENT_COMMANDS) this.destroy()
    }
  }
}

export function unanswered(why: string, maybeApplied: boolean): StoreUnavailable {
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

export function isRefusal(error: unknown, ...codes: readonly string[]): error is Refused {
  return error instanceof Refused && codes.some((code) => error.reply.startsWith(code))
}

/** Whatever ioredis reports, as one of ours. */
export function connectionError(error: Error & { readonly code?: string }): Error {
  if (error instanceof ReplyError) return redisFailure(error.message)
  // The error of a connection to several addresses has a code and no message.
  return error.message === '' ? new Error(error.code) : error
}

export function redisFailure(text: string): StoreUnavailable | CorruptRecord {
  // Redis quotes the arguments of unknown commands, among them the password of AUTH.
  const message = text.replace(/, with args beginning with.*/s, '')
  if (message.startsWith('WRONGTYPE'))
    return new CorruptRecord('the key of the record holds a value of another type')
  if (message.startsWith('OOM')) return new StoreFull(`Redis is full: ${message}`)
  return new Refused(message)
}
