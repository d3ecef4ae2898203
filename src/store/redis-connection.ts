import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { connect } from 'node:net'
import { setImmediate as immediately } from 'node:timers/promises'
import { AbstractConnector, Redis, type RedisOptions } from 'ioredis'
import type { Millis } from '../core/record.ts'
import { within } from '../runtime/scheduling.ts'
import { reconnectDelay } from './reconnect.ts'
import {
  connectionError,
  type HostPort,
  hostPortText,
  type Login,
  type Reader,
  RedisLink,
  repliesMismatch,
  type Script,
  wordsOf,
} from './redis-link.ts'
import { StoreUnavailable } from './register.ts'
import { commandHead, type RespArg, type RespReply } from './resp.ts'

export const CONNECTION_NAME = 'idempotency-proxy'
const CONNECT_TIMEOUT: Millis = 2000
/** How long to wait for a server that does not close its side. */
export const DISCONNECT_TIMEOUT: Millis = 250

export type OnEvent = (kind: 'connected' | 'disconnected' | 'error', detail: string) => void

interface Target {
  readonly login: Login
  /** Rejects replicas, which may miss records. */
  readonly isMaster?: boolean
}

/** Asked before each attempt. */
export interface SoughtTarget extends Target {
  readonly place?: undefined
  find(): Promise<HostPort>
}

/** Where a connection leads. */
export type RedisTarget = (Target & { readonly place: HostPort }) | SoughtTarget

export interface ConnectionSettings {
  readonly timeoutMs: Millis
  /**
   * `store.grace`; 0 or absent: none. Each link reads the identity of the process it reaches, for scripts that `admit`. A proxy that connects
   * later than the grace after a failover has lost its claims, so an attempt takes at most half of it.
   */
  readonly grace?: Millis
  /** Of `store.redis`. */
  readonly client?: ClientOptions
}

export interface ClientOptions
  extends Pick<
    RedisOptions,
    | 'connectionName'
    | 'connectTimeout'
    | 'disableClientInfo'
    | 'family'
    | 'keepAlive'
    | 'noDelay'
    | 'protocol'
  > {
  /** Where announced addresses are reached. */
  readonly natMap?: Readonly<Record<string, HostPort>> | null
}

export interface ConnectionEvents {
  readonly onEvent?: OnEvent
  /** Ready for commands. */
  readonly onReady?: () => void
  /** An attempt has failed, or the connection has ended. */
  readonly onLost?: () => void
}

/** A script that grants claims, or checks whether the server may. */
export function script(text: string): Script {
  return {
    source: text,
    admits: true,
    head: commandHead('evalsha', createHash('sha1').update(text).digest('hex')),
  }
}

/** Of a script, or a part of one. */
export function source(name: string): string {
  return readFileSync(new URL(`../store/lua/${name}.lua`, import.meta.url), 'utf8')
}

/**
 * Keeps an ioredis client connected. All that ioredis does by itself is off: it queues nothing, resends nothing, subscribes to nothing
 * again, and each of its connections is greeted here before it takes commands (ADR 124).
 */
export class RedisConnection {
  readonly target: RedisTarget
  readonly #settings: ConnectionSettings
  readonly #events: ConnectionEvents
  /** Of all connections, one after the other. For subscriptions; commands go through {@link run} and {@link ask}. */
  readonly redis: Redis
  /** Of the latest attempt; '' before the first. */
  place: HostPort
  /** The link once greeted. */
  #link: RedisLink | null = null
  /** Why the last link failed; until the next one is ready. */
  #trouble: string | null = null
  #attempts = 0
  #attempted = Promise.withResolvers<void>()
  #isTrying = false
  #isClosed = false
  /** Of the attempt, or until the next one. */
  #timer: NodeJS.Timeout | undefined

  constructor(target: RedisTarget, settings: ConnectionSettings, events: ConnectionEvents = {}) {
    this.target = target
    this.place = target.place ?? { host: '', port: 0 }
    this.#settings = settings
    this.#events = events
    const { username, password, db, tls } = target.login
    const { natMap: _, ...options }: ClientOptions = { ...settings.client }
    this.redis = new Redis({
      connectionName: CONNECTION_NAME,
      protocol: 2,
      ...options,
      username,
      password,
      db,
      ...(tls === undefined ? {} : { tls: {} }),
      Connector: this.#connector(),
      lazyConnect: true,
      connectTimeout: 0,
      retryStrategy: null,
      enableReadyCheck: false,
      enableOfflineQueue: false,
      autoResendUnfulfilledCommands: false,
      autoResubscribe: false,
    })
    this.redis.on('error', (error: Error) => {
      this.#fail(connectionError(error).message)
      this.reconnect()
    })
    this.redis.on('end', () => this.#lose())
  }

  /** Resolves after the first attempt, whatever its outcome: the process also starts without Redis. */
  open(): Promise<void> {
    this.#connect()
    return this.attempted
  }

  async close(): Promise<void> {
    this.#isClosed = true
    clearTimeout(this.#timer)
    if (!this.#isTrying && this.#link === null) return
    const ended = new Promise((end) => this.redis.once('end', end))
    if (this.#link !== null) this.#link.end()
    else {
      this.redis.disconnect()
      this.reconnect()
    }
    await ended
  }

  /** The server may have been replaced. Commands in flight may have been applied. */
  reconnect(): void {
    if (this.#link !== null) this.#link.destroy()
    // Before the first attempt there is none.
    else (this.redis.stream as Redis['stream'] | undefined)?.destroy()
  }

  get isReady(): boolean {
    return this.#link?.isOpen === true
  }

  /** It is about to be ready, or lost. */
  get isTrying(): boolean {
    return this.#isTrying
  }

  /** Settled unless {@link isTrying}. */
  get attempted(): Promise<void> {
    return this.#attempted.promise
  }

  get leadsTo(): string {
    return hostPortText(this.place)
  }

  run<T>(what: Script, args: RespArg[], read: Reader<T>): Promise<T> {
    return this.#link?.isOpen ? this.#link.run(what, args, read) : this.#refuse()
  }

  ask<T>(name: string, args: readonly RespArg[], read: Reader<T>): Promise<T> {
    return this.#link?.isOpen ? this.#link.ask(name, args, read) : this.#refuse()
  }

  #refuse(): Promise<never> {
    const why = this.#isClosed ? 'closed' : (this.#trouble ?? 'connecting')
    return Promise.reject(new StoreUnavailable(`Redis is not connected: ${why}`, false))
  }

  /** It ends by `#succeed` or, on ioredis's event, by `#lose`. */
  #connect(): void {
    /* c8 ignore next: only where it is closed in the turn in which its timer fires */
    if (this.#isClosed) return
    this.#isTrying = true
    this.#attempted = Promise.withResolvers()
    this.redis
      .connect()
      .then(() => this.#greet())
      .catch((error: Error) => {
        // A connection that has ended has said why.
        if (!this.redis.stream?.destroyed) this.#fail(error.message)
        this.reconnect()
      })
  }

  /** ioredis's interface for whoever knows better where to connect: per attempt the address, and the files of TLS. */
  #connector() {
    const open = async (): Promise<Redis['stream']> => {
      this.place = this.target.place ?? (await this.target.find())
      const tls = this.target.login.tls?.()
      const { client = {}, grace, timeoutMs } = this.#settings
      const { connectTimeout = CONNECT_TIMEOUT, family = 0, natMap } = client
      const options = { ...(natMap?.[this.leadsTo] ?? this.place), family, ...tls }
      const socket =
        tls === undefined ? connect(options) : process.getBuiltinModule('node:tls').connect(options)
      this.#endIn(socket, 'connect ETIMEDOUT', grace ? Math.min(grace / 2, connectTimeout) : connectTimeout)
      socket.once(tls === undefined ? 'connect' : 'secureConnect', () =>
        this.#endIn(socket, 'no answer from Redis: Command timed out', timeoutMs),
      )
      return socket
    }
    return class extends AbstractConnector {
      constructor() {
        super(DISCONNECT_TIMEOUT)
      }

      async connect(): Promise<Redis['stream']> {
        this.connecting = true
        const stream = await open()
        /* c8 ignore next: only where it is closed while it looks for the address */
        if (!this.connecting) stream.destroy()
        stream.once('error', (error) => {
          this.firstError = error
        })
        this.stream = stream
        return stream
      }
    }
  }

  #endIn(socket: Redis['stream'], why: string, limit: Millis): void {
    clearTimeout(this.#timer)
    // Only after pending input was read: a busy event loop does not mean a silent server.
    this.#timer = setTimeout(
      () => setImmediate(() => this.#isTrying && socket.destroy(new Error(why))),
      limit,
    )
  }

  /** Rejects if the connection is useless: no master, or the server is still loading its data. */
  async #greet(): Promise<void> {
    const link = new RedisLink(this.redis, { ...this.place, ...this.target.login }, this.#settings.timeoutMs)
    const steps = [link.ask('ping', [], exactly('PONG')).catch(unless(/NOPERM/))]
    if (this.target.isMaster) steps.push(link.ask('role', [], ofMaster(this.leadsTo)))
    if (this.#settings.grace)
      steps.push(
        link.ask('info', ['server'], runIdOf).then(
          (id) => {
            link.identity = id
          },
          unless(/NOPERM/),
        ),
      )
    await Promise.all(steps)
    if (!link.isOpen || !this.redis.stream.writable) throw new Error('Connection is closed.')
    clearTimeout(this.#timer)
    this.#isTrying = false
    this.#link = link
    this.#trouble = null
    this.#attempts = 0
    this.#events.onReady?.()
    this.#events.onEvent?.('connected', this.leadsTo)
    this.#attempted.resolve()
  }

  #lose(): void {
    clearTimeout(this.#timer)
    if (this.#link === null) {
      if (this.#trouble === null) this.#fail('Connection is closed.')
    } else {
      this.#link.isOpen = false
      if (this.#trouble === null) this.#events.onEvent?.('disconnected', this.leadsTo)
    }
    this.#isTrying = false
    this.#link = null
    this.#events.onLost?.()
    if (!this.#isClosed) this.#timer = setTimeout(() => this.#connect(), reconnectDelay(++this.#attempts))
    this.#attempted.resolve()
  }

  #fail(message: string): void {
    // All attempts to reconnect fail alike: one report is enough.
    if (message !== this.#trouble && !this.#isClosed) this.#events.onEvent?.('error', message)
    this.#trouble = message
  }
}

/** No server answered; their errors. */
export class Unanswered extends Error {
  readonly errors: readonly Error[]

  constructor(servers: readonly RedisConnection[], errors: readonly Error[]) {
    super(errors.map(({ message }, n) => `${servers[n]?.leadsTo}: ${message}`).join('; '))
    this.errors = errors
  }
}

/**
 * Asks several servers at once. Resolves with all answers that arrive within `others` of the first.
 * @throws {Unanswered} if there was none.
 */
export async function askAll<T>(
  servers: readonly RedisConnection[],
  others: Millis,
  ask: (server: RedisConnection) => Promise<T>,
): Promise<T[]> {
  const answers: T[] = []
  const attempts = servers.map(async (server) => {
    await server.attempted
    answers.push(await ask(server))
  })
  await Promise.any(attempts).catch((error: AggregateError) => {
    throw new Unanswered(servers, error.errors as Error[])
  })
  await within(others, Promise.allSettled(attempts))
  // Only after pending input was read: a busy event loop does not mean a silent server.
  await immediately()
  return [...answers]
}

/** Expects this reply. */
export function exactly(expected: string) {
  return (reply: RespReply): void => {
    if (!Buffer.isBuffer(reply) || String(reply) !== expected) throw repliesMismatch()
  }
}

/** Identifies the process: new after each start. '': the server does not report it. */
export function runIdOf(reply: RespReply): string {
  if (!/^\w+:/m.test(String(reply))) throw repliesMismatch()
  return /^run_id:([0-9a-f]+)\r?$/m.exec(String(reply))?.[1] ?? ''
}

function ofMaster(name: string) {
  return (reply: RespReply): void => {
    const [role] = wordsOf(reply)
    if (role !== 'master') throw new Error(`${name} is a replica, not a master (its ROLE is ${role})`)
  }
}

function unless(harmless: RegExp) {
  return (error: Error): void => {
    if (!harmless.test(error.message)) throw error
  }
}
