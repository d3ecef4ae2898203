import { connect, Socket } from 'node:net'
import { setImmediate as immediately } from 'node:timers/promises'
import { AbstractConnector, Command, Redis, ReplyError } from 'ioredis'
import type { StoreConfig } from '../../config/config.ts'
import { type Address, formatAddress } from '../../config/urls.ts'
import type { Millis } from '../../core/record.ts'
import { within } from '../../runtime/scheduling.ts'
import type { StoreHooks } from '../around.ts'
import { reconnectDelay } from '../reconnect.ts'
import { CorruptRecord, StoreFull, StoreUnavailable } from '../register.ts'
import {
  encoded,
  list,
  Mismatch,
  type Read,
  type RespArgs,
  type RespReply,
  type Script,
  text,
} from './resp.ts'
import { type Login, Misconfigured } from './url.ts'

const CONNECT_TIMEOUT: Millis = 2000
/** How long to wait for a server that does not close its side. */
const DISCONNECT_TIMEOUT: Millis = 250
/** Commands in a row that time out, with none answered in time, before a connection counts as dead: a lost host sends no reset. */
const SILENT_COMMANDS = 5

/** Where a connection leads. */
interface RedisTarget {
  readonly place: Address
  readonly login: Login
  /** Named as a master, which may be wrong: replicas may lack records. */
  readonly isNamed?: boolean
}

/** One of the connections that a {@link RedisConnection} has had, from its greeting to its end. */
export interface Link {
  readonly target: RedisTarget
  /** Id of the server process, new after each start; '' if unknown or not needed. */
  readonly identity: string
  isOpen: boolean
}

/** Converts what a script replies. `link`: where it arrived. */
export type ReadScript<T> = (reply: never, link: Link) => T

export interface ConnectionSettings {
  readonly timeoutMs: Millis
  /** `store.grace`; 0 or absent: none. A proxy that connects later than that after a failover has lost its claims. */
  readonly grace?: Millis
  /** `store.wait`; null or absent: none. Like the grace, it needs to know the process that a connection reaches. */
  readonly wait?: StoreConfig['wait']
  /** `store.redis`: options of ioredis, and where announced addresses are reached. */
  readonly client?: Partial<StoreConfig['redis']>
}

interface ConnectionEvents {
  readonly onEvent?: StoreHooks['onEvent']
  /** Ready for commands. */
  readonly onReady?: () => void
  /** An attempt has failed, or the connection has ended. */
  readonly onLost?: () => void
}

/** A command already serialized, so that its bytes never appear in ioredis's errors and traces. */
class ReadyCommand extends Command {
  readonly #bytes: Buffer
  /** False: not yet sent. */
  isWritten = false

  constructor(name: string, args: RespArgs) {
    super(name, [], { replyEncoding: null })
    this.#bytes = encoded(name, args)
  }

  override toWritable(): Buffer {
    this.isWritten = true
    return this.#bytes
  }

  /** It has its own deadline. */
  override setTimeout(): void {}
}

/**
 * An ioredis client, which connects again by itself. It queues nothing and resends nothing, and each of its connections is greeted here
 * before it takes commands (ADR 124). A script's reply ends with its command's number, so after a lost reply no claim takes another's.
 */
export class RedisConnection {
  readonly target: RedisTarget
  readonly #settings: ConnectionSettings
  readonly #events: ConnectionEvents
  /** Used for subscriptions; commands go through {@link run} and {@link ask}. */
  readonly redis: Redis
  /** Host and port. */
  readonly leadsTo: string
  /** Null: not ready for commands. */
  #link: Link | null = null
  /** Why the last link failed; until the next one is ready. */
  #trouble: string | null = null
  #attempts = 0
  /** An attempt is in progress. */
  isTrying = false
  #attempt = Promise.withResolvers<void>()
  #isClosed = false
  #scripts = 0
  #silentCommands = 0

  constructor(target: RedisTarget, settings: ConnectionSettings, events: ConnectionEvents = {}) {
    this.target = target
    this.leadsTo = formatAddress(target.place)
    this.#settings = settings
    this.#events = events
    const { username, password, db, tls } = target.login
    const { grace, client: { natMap: _, connectTimeout = CONNECT_TIMEOUT, ...options } = {} } = settings
    this.redis = new Redis({
      connectionName: 'idempotency-proxy',
      protocol: 2,
      ...options,
      username,
      password,
      db,
      ...(tls === undefined ? {} : { tls: {} }),
      Connector: this.#connector(),
      retryStrategy: () => reconnectDelay(++this.#attempts),
      // Commands in flight fail when their connection ends.
      maxRetriesPerRequest: 0,
      lazyConnect: true,
      connectTimeout: grace ? Math.min(grace / 2, connectTimeout) : connectTimeout,
      // For ioredis's own commands.
      commandTimeout: settings.timeoutMs,
      enableReadyCheck: false,
      enableOfflineQueue: false,
      autoResendUnfulfilledCommands: false,
      autoResubscribe: false,
    })
      .on('ready', () => void this.#greet())
      .on('error', (error: Error) => this.#fail(error))
      .on('close', () => this.#lose())
  }

  /** Resolves after the first attempt, whatever its outcome: the process also starts without Redis. */
  async open(): Promise<void> {
    if (this.#isClosed) return
    this.redis.connect().catch(() => {})
    await this.attempted
  }

  async close(): Promise<void> {
    this.#isClosed = true
    const { status } = this.redis
    this.redis.disconnect()
    // Between two attempts ioredis emits no `end`.
    if (status === 'end' || status === 'reconnecting') return
    if (this.#link === null) this.reconnect()
    this.#shut()
    await new Promise((ended) => this.redis.once('end', ended))
  }

  /** The server may have been replaced. Commands in flight may have been applied. */
  reconnect(why?: Error): void {
    this.#shut()
    // Before the first attempt there is no stream.
    ;(this.redis.stream as Redis['stream'] | undefined)?.destroy(why)
  }

  /** Rejects if it is not connected. */
  connected(): Promise<Link> {
    return this.#link === null ? this.#refuse() : Promise.resolve(this.#link)
  }

  get isReady(): boolean {
    return this.#link !== null
  }

  /** Resolves once an attempt has ended, at once unless it {@link isTrying}. */
  get attempted(): Promise<void> {
    return this.#attempt.promise
  }

  /**
   * Runs a script, which gets two more arguments: the id of the server process ('': no grace) and a number with which its reply ends;
   * `read` converts the rest. `until`: when the caller gives up. `isKnown`: the server has the script; otherwise it is sent in full.
   */
  run<T>(script: Script, args: RespArgs, read: ReadScript<T>, until: Millis, isKnown: boolean): Promise<T> {
    const link = this.#link
    if (link === null) return this.#refuse()
    const number = ++this.#scripts
    const identity = this.#settings.grace ? link.identity : ''
    const own = (reply: RespReply): T => {
      if (!Array.isArray(reply) || reply.pop() !== number) throw new Mismatch()
      return read(reply as never, link)
    }
    const [name, what] = isKnown ? ['evalsha', script.sha] : ['eval', script.source]
    return this.#send(name, [what, ...args, identity, number], own, until)
  }

  /** Sends a plain command, whose reply does not identify it. */
  ask<T>(name: string, args: RespArgs, read: Read<T>, until = this.#deadline()): Promise<T> {
    return this.#link === null ? this.#refuse() : this.#send(name, args, read, until)
  }

  #deadline(): Millis {
    return performance.now() + this.#settings.timeoutMs
  }

  #refuse(): Promise<never> {
    const why = this.#isClosed ? 'closed' : (this.#trouble ?? 'connecting')
    return Promise.reject(new StoreUnavailable(`Redis is not connected: ${why}`, false))
  }

  #send<T>(name: string, args: RespArgs, read: Read<T>, until: Millis): Promise<T> {
    const { stream } = this.redis
    const command = new ReadyCommand(name, args)
    // One write for all commands of a turn.
    if (stream.writableCorked === 0) {
      stream.cork()
      process.nextTick(() => stream.uncork())
    }
    return new Promise((resolve, reject) => {
      // Only after pending input was read: a busy event loop does not mean a silent Redis.
      let expiry: NodeJS.Immediate | undefined
      let isLate = false
      const expire = (): void => {
        isLate = true
        reject(unanswered('Command timed out', true))
        if (++this.#silentCommands >= SILENT_COMMANDS) this.reconnect()
      }
      const timer = setTimeout(() => (expiry = setImmediate(expire)), until - performance.now())
      // Also reads for a caller that has given up: a reply that does not match may belong to one that has not.
      const take = (reply: RespReply): void => {
        clearTimeout(timer)
        clearImmediate(expiry)
        const isAnswer = !(reply instanceof Error) || reply instanceof ReplyError
        if (!isAnswer) return reject(unanswered('Connection is closed.', command.isWritten))
        // After a lost reply, each command gets the next one's, late.
        if (!isLate) this.#silentCommands = 0
        try {
          // An earlier reply was lost or spurious.
          if (stream.destroyed) throw new Mismatch()
          if (reply instanceof Error) throw redisFailure(reply.message)
          resolve(read(reply))
        } catch (error) {
          // After a failover this may be the old primary; reconnecting by name may reach the new one.
          if (isRefusal(error, 'READONLY')) {
            this.#shut()
            this.redis.disconnect(true)
          }
          if (!(error instanceof Mismatch)) return reject(error)
          reject(unanswered(error.message, true))
          this.reconnect(error)
        }
      }
      command.promise.then(take, take)
      this.redis.sendCommand(command)
    })
  }

  /** ioredis's connector interface: the address and the TLS files of each attempt. */
  #connector() {
    const dial = () => this.#dial()
    return class extends AbstractConnector {
      constructor() {
        super(DISCONNECT_TIMEOUT)
      }

      async connect(): Promise<Redis['stream']> {
        this.connecting = true
        try {
          const stream = dial()
          this.stream = stream
          // An address without a route fails before ioredis listens, which would end the process.
          stream.once('error', (error) => (this.firstError = error))
        } catch (error) {
          // ioredis tries again only after the end of a stream.
          this.firstError = error as Error
          this.stream = new Socket().destroy()
        }
        return this.stream
      }
    }
  }

  #dial(): Redis['stream'] {
    this.isTrying = true
    this.#attempt = Promise.withResolvers()
    const { place, login } = this.target
    const { family = 0, natMap } = this.#settings.client ?? {}
    const options = { ...(natMap?.[this.leadsTo] ?? place), family, ...login.tls?.() }
    return login.tls === undefined ? connect(options) : process.getBuiltinModule('node:tls').connect(options)
  }

  /** A connection is useless if it leads to no master, or the server is still loading its data. */
  async #greet(): Promise<void> {
    const { stream } = this.redis
    const { target } = this
    const until = this.#deadline()
    const { grace, wait } = this.#settings
    try {
      const [, info, [role]] = await Promise.all([
        this.#send('ping', [], text(/^PONG$/), until).catch(ifDenied('')),
        grace || wait ? this.#send('info', ['server'], text(/^\w+:/m), until).catch(ifDenied('')) : '',
        target.isNamed ? this.#send('role', [], list(String), until) : ['master'],
      ])
      const identity = /^run_id:([0-9a-f]+)\r?$/m.exec(info)?.[1] ?? ''
      if (role !== 'master')
        throw new Error(`${this.leadsTo} is a replica, not a master (its ROLE is ${role})`)
      this.isTrying = false
      this.#link = { target, identity, isOpen: true }
      this.#trouble = null
      this.#attempts = 0
      this.#events.onReady?.()
      this.#events.onEvent?.('connected', this.leadsTo)
      this.#attempt.resolve()
    } catch (error) {
      // A connection that has ended has already reported why.
      if (!stream.destroyed) this.#fail(error as Error)
    }
  }

  #lose(): void {
    if (this.#trouble === null && this.isTrying) this.#fail(new Error('Connection is closed.'))
    else if (this.#trouble === null) this.#events.onEvent?.('disconnected', this.leadsTo)
    this.isTrying = false
    this.#shut()
    this.#events.onLost?.()
    this.#attempt.resolve()
  }

  #shut(): void {
    if (this.#link !== null) this.#link.isOpen = false
    this.#link = null
  }

  #fail(error: Error): void {
    const { message } = connectionError(error)
    // All attempts to reconnect fail alike: one report is enough.
    if (message !== this.#trouble && !this.#isClosed) this.#events.onEvent?.('error', message)
    this.#trouble = message
    this.reconnect()
  }
}

/**
 * Asks several servers at once. Resolves with all answers that arrive within `others` of the first.
 * @throws {StoreUnavailable} if there was none; {@link Misconfigured} if all refuse alike, by what `mistakes` says is allowed instead.
 */
export async function askAll<T>(
  servers: readonly RedisConnection[],
  otherwise: string,
  others: Millis,
  ask: (server: RedisConnection) => Promise<T>,
  mistakes: readonly (readonly [RegExp, allowed: string])[] = [],
): Promise<T[]> {
  const answers: T[] = []
  const attempts = servers.map(async (server) => {
    await server.attempted
    answers.push(await ask(server))
  })
  await Promise.any(attempts).catch(({ errors }: AggregateError) => {
    const messages = (errors as Error[]).map((error) => error.message)
    const message = `${otherwise}: ${messages.map((one, n) => `${servers[n]?.leadsTo}: ${one}`).join('; ')}`
    const mistake = mistakes.find(([pattern]) => messages.every((one) => pattern.test(one)))
    throw mistake
      ? new Misconfigured(`${message}; allowed: ${mistake[1]}`)
      : new StoreUnavailable(message, false)
  })
  await within(others, Promise.allSettled(attempts))
  // Only after pending input was read: a busy event loop does not mean a silent server.
  await immediately()
  return [...answers]
}

/** If the user may not run the command, the answer is `otherwise`. */
export function ifDenied<T>(otherwise: T) {
  return (error: unknown): T => {
    if (!isRefusal(error, 'NOPERM')) throw error
    return otherwise
  }
}

export function unanswered(why: string, maybeApplied: boolean): StoreUnavailable {
  return new StoreUnavailable(`no answer from Redis: ${why}`, maybeApplied)
}

/** Redis refused the command and applied nothing. */
export class Refused extends StoreUnavailable {
  readonly reply: string

  constructor(reply: string) {
    super(`Redis refuses: ${reply}`, false)
    this.reply = reply
  }
}

export function isRefusal(error: unknown, code: string): error is Refused {
  return error instanceof Refused && error.reply.startsWith(code)
}

/** Converts an error of ioredis to one of ours. */
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
