import { connect, type Socket } from 'node:net'
import type { Millis } from '../core/record.ts'
import { CorruptRecord, StoreFull, StoreUnavailable } from './register.ts'
import {
  CommandBuffer,
  type CommandHead,
  commandHead,
  ProtocolError,
  Replies,
  ReplyError,
  type RespArg,
  type RespReply,
} from './resp.ts'

export const CONNECT_TIMEOUT: Millis = 2000
/** How long to wait for a server that does not close its side. */
export const DISCONNECT_TIMEOUT: Millis = 250
const KEEP_ALIVE: Millis = 30_000
/** Commands in a row that time out on a silent connection before it counts as dead: a lost host sends no reset. */
const SILENT_COMMANDS = 5
const READ_BYTES = 64 * 1024

export interface RedisAddress {
  readonly host: string
  readonly port: number
  readonly username: string
  readonly password: string
  readonly db: number
  /** Asked for each connection. Absent: plain. */
  readonly tls?: () => object
}

export type HostPort = Pick<RedisAddress, 'host' | 'port'>

export function hostPortText({ host, port }: HostPort): string {
  return `${host.includes(':') ? `[${host}]` : host}:${port}`
}

export interface LinkEvents {
  readonly onConnected: () => void
  readonly onError: (message: string) => void
  readonly onClosed: () => void
  /** On a subscribing link, messages arrive between replies. True: it was a message. `awaited` reads the next expected reply, if any. */
  readonly onMessage?: ((message: RespReply, awaited: Read | undefined) => boolean) | undefined
}

/** Converts a reply into a result; throws a {@link ProtocolError} if it cannot belong to its command. `link`: the link it arrived on. */
export type Reader<T> = (reply: never, link: RedisLink) => T
export type Read = Reader<unknown>

export interface Script {
  readonly source: string
  /** It grants claims, so it is sent the identity of the process it reaches. */
  readonly admits: boolean
  /** The start of its `EVALSHA` command. */
  readonly head: CommandHead
}

/** The commands of one turn of the event loop, which leave in one write. */
interface CommandBatch {
  /** Until it is written, only this process has seen its commands. */
  written: boolean
  expiresAt: Millis
  /** Number of reads when it was written. */
  reads: number
}

/** A command whose reply has not come. */
interface Pending {
  readonly batch: CommandBatch
  readonly resolve: (value: unknown) => void
  readonly reject: (error: unknown) => void
  readonly read: Read
  /** Needed to send it as `EVAL` if Redis does not know the script. */
  readonly script: Script | null
  readonly args: readonly RespArg[]
  /** For a script: the number that its reply ends with. Null: a plain command. */
  readonly number: number | null
}

/**
 * One connection to Redis. Replies are matched to commands by order, and replies of scripts also carry their command's number: if a reply
 * is lost, no claim takes the next one as its own. This is the hot path, hence one promise per command, and one write, one clock reading
 * and one timer for all commands of a turn (ADR 70).
 */
export class RedisLink {
  readonly #socket: Socket
  readonly #timeout: Millis
  readonly #events: LinkEvents
  readonly #ended: Promise<void>
  readonly #outgoing = new CommandBuffer()
  readonly #replies: Replies
  /** Commands in the order of their replies: a ring, so that old objects do not keep short-lived ones alive (ADR 17). */
  #ring: (Pending | null)[] = Array.from({ length: 64 }, () => null)
  #first = 0
  #count = 0
  /** How many of the first have timed out. Their replies are still awaited, or the rest would be mismatched. */
  #expired = 0
  /** The batch of this turn, if any. */
  #batch: CommandBatch | null = null
  #reads = 0
  #silentCommands = 0
  #scripts = 0
  #timer: NodeJS.Timeout | undefined
  readonly address: RedisAddress
  /** Takes commands. */
  isOpen = false
  /** The process at its other end; '': unknown, or not needed. */
  identity = ''

  constructor(address: RedisAddress, timeoutMs: Millis, events: LinkEvents, connectWithin = CONNECT_TIMEOUT) {
    const { host, port, tls } = address
    this.address = address
    this.#timeout = timeoutMs
    this.#events = events
    const { onMessage } = events
    this.#replies = new Replies(
      onMessage === undefined
        ? (reply) => this.#settle(reply)
        : (reply) => {
            if (!onMessage(reply, this.#ring[this.#first]?.read)) this.#settle(reply)
          },
    )
    const onread = {
      buffer: Buffer.allocUnsafeSlow(READ_BYTES),
      callback: (length: number, bytes: Uint8Array) => this.#read(bytes as Buffer, length),
    }
    const options = { host, port, onread, ...tls?.() }
    const socket =
      tls === undefined ? connect(options) : process.getBuiltinModule('node:tls').connect(options)
    this.#socket = socket
    this.#startTimer(() => socket.destroy(new Error('connect ETIMEDOUT')), connectWithin)
    socket.once(tls === undefined ? 'connect' : 'secureConnect', () => {
      this.#clearTimer()
      socket.setNoDelay(true)
      socket.setKeepAlive(true, KEEP_ALIVE)
      this.isOpen = true
      events.onConnected()
    })
    // The error of a connection to several addresses has a code and no message.
    socket.on('error', (error: NodeJS.ErrnoException) => events.onError(error.message || String(error.code)))
    this.#ended = new Promise((ended) => {
      socket.once('close', () => {
        this.#close()
        ended()
      })
    })
  }

  /**
   * Sends a plain command, whose reply does not identify it.
   *
   * @param read converts the reply; throws a {@link ProtocolError} if it cannot belong to this command.
   */
  ask<T>(name: string, args: readonly RespArg[], read: Reader<T>): Promise<T> {
    return this.#send(commandHead(name), args, read, null, null) as Promise<T>
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
    return this.#send(script.head, args, read, script, number) as Promise<T>
  }

  /** Closes the connection after the commands already sent; resolves when it is closed. */
  end(): Promise<void> {
    if (!this.isOpen) this.#socket.destroy()
    else {
      this.isOpen = false
      this.#flush()
      this.#socket.end()
      this.#startTimer(() => this.#socket.destroy(), DISCONNECT_TIMEOUT)
    }
    return this.#ended
  }

  /** Nothing more is sent or read. */
  destroy(error?: Error): void {
    this.isOpen = false
    this.#socket.destroy(error)
  }

  #send(
    head: CommandHead,
    args: readonly RespArg[],
    read: Read,
    script: Script | null,
    number: number | null,
  ): Promise<unknown> {
    return new Promise((resolve, reject) => {
      // Its end may have been reported already, so that nothing would settle this.
      if (!this.isOpen) return reject(closed(false))
      this.#outgoing.add(head, args)
      this.#push({ batch: this.#ofThisTurn(), resolve, reject, read, script, args, number })
    })
  }

  #ofThisTurn(): CommandBatch {
    if (this.#batch !== null) return this.#batch
    setImmediate(() => this.#flush())
    this.#batch = { written: false, expiresAt: performance.now() + this.#timeout, reads: 0 }
    return this.#batch
  }

  #push(pending: Pending): void {
    if (this.#count === this.#ring.length) this.#widen()
    this.#ring[(this.#first + this.#count++) & (this.#ring.length - 1)] = pending
  }

  #widen(): void {
    const inOrder = [...this.#ring.slice(this.#first), ...this.#ring.slice(0, this.#first)]
    this.#ring = [...inOrder, ...inOrder.map(() => null)]
    this.#first = 0
  }

  #flush(): void {
    const socket = this.#socket
    const batch = this.#batch
    this.#batch = null
    // If no longer writable, its end is about to be reported, and nothing of this batch was sent.
    if (batch === null || !socket.writable) return
    batch.written = true
    batch.reads = this.#reads
    const parts = this.#outgoing.take()
    if (parts.length > 1) socket.cork()
    for (const part of parts) socket.write(part)
    if (parts.length > 1) socket.uncork()
    if (socket.writableLength === 0) this.#outgoing.reuse()
    if (this.#timer === undefined) this.#expireIn(this.#timeout)
  }

  #expireIn(time: Millis): void {
    // Only after pending input was read: a busy event loop does not mean a silent Redis.
    this.#startTimer(() => setImmediate(() => this.#expire()), Math.ceil(time))
  }

  #expire(): void {
    if (!this.isOpen) return
    this.#clearTimer()
    const now = performance.now()
    while (this.#expired < this.#count) {
      const { batch, reject } = this.#at(this.#expired)
      if (batch.expiresAt > now) return this.#expireIn(batch.expiresAt - now)
      this.#expired++
      reject(new StoreUnavailable('no answer from Redis: Command timed out', true))
      const isSilent = batch.reads === this.#reads
      this.#silentCommands++
      // If other replies arrived but not this one, no later reply can be trusted.
      if (!isSilent || this.#silentCommands >= SILENT_COMMANDS) return this.destroy()
    }
  }

  #read(bytes: Buffer, length: number): boolean {
    this.#reads++
    this.#silentCommands = 0
    try {
      this.#replies.push(bytes.subarray(0, length))
    } catch (error) {
      this.destroy(error as Error)
    }
    return true
  }

  #settle(reply: RespReply): void {
    if (this.#count === 0) throw new ProtocolError('an unexpected reply')
    const pending = this.#shift()
    const isExpired = this.#expired > 0
    if (isExpired) this.#expired--
    if (reply instanceof ReplyError) {
      if (!isExpired) this.#refuse(pending, reply.message)
      return
    }
    // Expired commands, too: a mismatched reply may belong to a command that has not expired.
    try {
      pending.resolve(pending.read(ownReply(pending.number, reply) as never, this))
    } catch (error) {
      if (!(error instanceof ProtocolError)) return pending.reject(error)
      pending.reject(new StoreUnavailable(`no answer from Redis: ${error.message}`, true))
      throw error
    }
  }

  #refuse(pending: Pending, message: string): void {
    const { script, args } = pending
    if (script !== null && message.startsWith('NOSCRIPT') && this.isOpen) {
      this.#outgoing.add(commandHead('eval', script.source), args)
      this.#push({ ...pending, batch: this.#ofThisTurn(), script: null })
      return
    }
    // After a failover this may be the old primary; reconnecting by name may reach the new one.
    if (message.startsWith('READONLY')) void this.end()
    pending.reject(redisFailure(message))
  }

  #close(): void {
    this.isOpen = false
    this.#clearTimer()
    for (let n = this.#expired; n < this.#count; n++) {
      const { batch, reject } = this.#at(n)
      reject(closed(batch.written))
    }
    this.#count = 0
    this.#events.onClosed()
  }

  #at(n: number): Pending {
    return this.#ring[(this.#first + n) & (this.#ring.length - 1)] as Pending
  }

  #shift(): Pending {
    const pending = this.#at(0)
    this.#ring[this.#first] = null
    this.#first = (this.#first + 1) & (this.#ring.length - 1)
    this.#count--
    return pending
  }

  #startTimer(done: () => void, after: Millis): void {
    this.#clearTimer()
    this.#timer = setTimeout(done, after)
  }

  #clearTimer(): void {
    clearTimeout(this.#timer)
    this.#timer = undefined
  }
}

function closed(maybeApplied: boolean): StoreUnavailable {
  return new StoreUnavailable('no answer from Redis: Connection is closed.', maybeApplied)
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

/** The bulk strings of an array, '' for other elements; empty if the reply is not an array. */
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

export function redisFailure(message: string): StoreUnavailable | CorruptRecord {
  if (message.startsWith('WRONGTYPE'))
    return new CorruptRecord('the key of the record holds a value of another type')
  if (message.startsWith('OOM')) return new StoreFull(`Redis is full: ${message}`)
  return new Refused(message)
}
