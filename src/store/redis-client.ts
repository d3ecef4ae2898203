import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { type Command, Redis, type RedisOptions } from 'ioredis'
import type { Millis, RecordId } from '../core/record.ts'
import { CorruptRecord, StoreFull, StoreUnavailable } from './register.ts'
import { Watchers } from './watchers.ts'

const CONNECT_TIMEOUT: Millis = 2000
/** Short enough to serve traffic again soon after Redis is back, long enough not to hammer a dead host. */
const RECONNECT_FROM: Millis = 50
const RECONNECT_TO: Millis = 2000
/** How long to wait for a server that does not say goodbye. */
const DISCONNECT_TIMEOUT: Millis = 250
/** Commands in a row that time out on a silent connection before it counts as dead: a lost host sends no reset. */
const SILENT_COMMANDS = 5
/** What ioredis rejects with if nothing was written to a socket. */
const NOT_WRITTEN = "Stream isn't writeable and enableOfflineQueue options is false"
const TIMED_OUT = 'Command timed out'

export interface ConnectionOptions {
  /** `redis://` or `rediss://`, with user, password and database. */
  readonly url: string
  readonly timeoutMs: Millis
  readonly onEvent: (kind: 'connected' | 'disconnected' | 'error', detail: string) => void
}

function settingsOf({ url, timeoutMs }: ConnectionOptions) {
  return {
    ...addressOf(url),
    // In RESP2 every reply has the same shape on every server.
    protocol: 2 as const,
    connectionName: 'idempotency-proxy',
    disableClientInfo: true,
    lazyConnect: true,
    connectTimeout: CONNECT_TIMEOUT,
    disconnectTimeout: DISCONNECT_TIMEOUT,
    commandTimeout: timeoutMs,
    enableOfflineQueue: false,
    autoResendUnfulfilledCommands: false,
    maxRetriesPerRequest: 0,
    retryStrategy: (attempt: number) => Math.min(RECONNECT_FROM * 2 ** (attempt - 1), RECONNECT_TO),
    // After a failover the old primary may still hold this connection; the name may lead to the new one.
    reconnectOnError: (error: Error) => error.message.startsWith('READONLY'),
  } satisfies RedisOptions
}

export function addressOf(url: string) {
  const { protocol, hostname, port, username, password, pathname } = new URL(url)
  return {
    host: hostname.replace(/^\[|\]$/g, ''),
    port: Number(port || 6379),
    username: decodeURIComponent(username),
    password: decodeURIComponent(password),
    db: Number(pathname.slice(1)),
    ...(protocol === 'rediss:' ? { tls: {} } : {}),
  }
}

/** Resolves when the connection is gone. */
async function disconnect(client: Redis): Promise<void> {
  const connected = client.status === 'ready'
  const ended = new Promise<void>((done) => client.once('end', done))
  client.disconnect()
  if (connected) await ended
}

export interface Script {
  readonly source: string
  readonly sha: string
}

export function script(name: string, header = ''): Script {
  const source = header + readFileSync(new URL(`./lua/${name}.lua`, import.meta.url), 'utf8')
  return { source, sha: createHash('sha1').update(source).digest('hex') }
}

/** One connection for commands and scripts, which reconnects by itself. */
export class Connection {
  readonly #client: Redis
  readonly #onEvent: ConnectionOptions['onEvent']
  readonly #onReady: () => void
  /** Why the last connection failed, until there is one. */
  #trouble: string | null = null
  /** Redis refused the database of the URL: the connection is useless, though ioredis calls it ready. */
  #wrongDatabase = false
  #silentCommands = 0

  constructor(options: ConnectionOptions, onReady: () => void) {
    this.#onEvent = options.onEvent
    this.#onReady = onReady
    this.#client = this.#connect(settingsOf(options))
  }

  /** Resolves after the first attempt, whatever its outcome: the process starts without Redis, too. */
  async open(): Promise<void> {
    await this.#client.connect().catch(() => {})
  }

  close(): Promise<void> {
    return disconnect(this.#client)
  }

  run<T>(what: Script, keys: readonly string[], args: readonly Arg[]): Promise<T> {
    const rest = [keys.length, ...keys, ...args]
    return this.#send('evalsha', [what.sha, ...rest]).catch((error: Error) => {
      if (!error.message.startsWith('NOSCRIPT')) throw storeError(error)
      return this.ask('eval', [what.source, ...rest])
    }) as Promise<T>
  }

  ask<T>(name: string, args: readonly Arg[]): Promise<T> {
    return this.#send(name, args).catch((error: unknown) => {
      throw storeError(error)
    }) as Promise<T>
  }

  #send(name: string, args: readonly Arg[]): Promise<unknown> {
    if (this.#client.status !== 'ready' || this.#wrongDatabase)
      return Promise.reject(
        new StoreUnavailable(`Redis is not connected: ${this.#trouble ?? this.#client.status}`, false),
      )
    const { stream } = this.#client
    // Commands of one turn of the event loop leave in one write.
    if (stream.writableCorked === 0) {
      stream.cork()
      setImmediate(() => stream.uncork())
    }
    const received = stream.bytesRead
    const command = new LeanCommand(name, args)
    // ioredis uses nothing else of a Command.
    void this.#client.sendCommand(command as unknown as Command)
    void command.promise.then(
      () => {
        this.#silentCommands = 0
      },
      (error: unknown) => {
        const timedOut = (error as Error).message === TIMED_OUT
        const silent = timedOut && stream.bytesRead === received
        this.#silentCommands = silent ? this.#silentCommands + 1 : 0
        // Replies are matched by order: if others came and this one did not, none that follows can be trusted.
        if (this.#silentCommands >= SILENT_COMMANDS || (timedOut && !silent)) stream.destroy()
      },
    )
    return command.promise
  }

  #connect(settings: ReturnType<typeof settingsOf>): Redis {
    const name = `${settings.host}:${settings.port}`
    const client = new Redis(settings)
    client.on('ready', () => {
      if (this.#wrongDatabase) return
      this.#trouble = null
      this.#silentCommands = 0
      this.#onReady()
      this.#onEvent('connected', name)
    })
    client.on('close', () => {
      this.#wrongDatabase = false
      if (this.#trouble === null) this.#onEvent('disconnected', name)
    })
    client.on('error', (error: Error & { command?: { name: string } }) => {
      this.#wrongDatabase ||= error.command?.name === 'select'
      // Every attempt to reconnect fails alike: once is enough.
      if (error.message !== this.#trouble) this.#onEvent('error', error.message)
      this.#trouble = error.message
    })
    return client
  }
}

/** Takes only the message: ioredis' errors carry the command's arguments, which must not reach a log. */
export function storeError(error: unknown): Error {
  if (error instanceof StoreUnavailable) return error
  const { name, message } = error as Error
  if (name !== 'ReplyError')
    return new StoreUnavailable(`no answer from Redis: ${message}`, message !== NOT_WRITTEN)
  if (message.startsWith('WRONGTYPE'))
    return new CorruptRecord('the key of the record holds a value of another type')
  if (message.startsWith('OOM')) return new StoreFull(`Redis is full: ${message}`)
  return new StoreUnavailable(`Redis refuses: ${message}`, false)
}

/** Strings must be ASCII: names, ids, numbers. Any other text goes as bytes. */
export type Arg = string | number | Buffer

/**
 * For ioredis' `sendCommand`, which queues it and matches its reply as it does with a command of its own. This one is leaner:
 * encoded once into one buffer, one promise, one timer (docs/internals/performance.md). Replies are not transformed.
 */
class LeanCommand {
  readonly name: string
  readonly args: readonly Arg[] = []
  readonly promise: Promise<unknown>
  readonly inTransaction = false
  /** Skips ioredis' diagnostics channels, which publish arguments. */
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

  /** Told which protocol the connection speaks: RESP2, always. */
  setReplyContext(): void {}

  toWritable(): Buffer {
    return this.#bytes
  }

  /** ioredis keeps waiting for the reply, so that those behind it stay matched. */
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

/** As RESP: an array of bulk strings. */
function encode(name: string, args: readonly Arg[]): Buffer {
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
  // latin1: one byte per character keeps the lengths true whatever comes.
  for (const part of parts)
    at += typeof part === 'string' ? bytes.write(part, at, 'latin1') : part.copy(bytes, at)
  bytes.write(text, at, 'latin1')
  return bytes
}

/** Shared by the watchers of one id. */
interface Subscription {
  readonly id: RecordId
  /** Resolves once Redis has acknowledged it, or will not, or not soon. */
  readonly settled: Promise<void>
  readonly settle: () => void
  /** A write may have gone unnoticed. */
  missed: boolean
}

/**
 * Watching by pub/sub, over a connection of its own that is opened for the first watcher and stays. Channels are sharded
 * (Redis 7): in a cluster a message goes to the slot of its record instead of to every node.
 */
export class Channels {
  readonly #options: ConnectionOptions
  readonly #channelOf: (id: RecordId) => string
  readonly #watchers = new Watchers()
  readonly #subscriptions = new Map<RecordId, Subscription>()
  readonly #byChannel = new Map<string, RecordId>()
  #client: Redis | null = null
  #refused = false
  #closed = false

  constructor(options: ConnectionOptions, channelOf: (id: RecordId) => string) {
    this.#options = options
    this.#channelOf = channelOf
  }

  /** Never rejects, and takes no longer than the store's timeout: without Redis, the watcher is told when it is back. */
  async watch(id: RecordId, changed: () => void): Promise<() => void> {
    const stop = this.#watchers.add(id, changed)
    await (this.#subscriptions.get(id) ?? this.#begin(id)).settled
    return () => {
      stop()
      if (!this.#watchers.has(id)) this.#end(id)
    }
  }

  /** It may be another server now: subscribe anew. */
  resubscribe(): void {
    if (this.#client?.status === 'ready') this.#client.disconnect(true)
  }

  async close(): Promise<void> {
    this.#closed = true
    if (this.#client !== null) await disconnect(this.#client)
  }

  #begin(id: RecordId): Subscription {
    const client = this.#closed ? null : (this.#client ??= this.#connect())
    const { promise, resolve } = Promise.withResolvers<void>()
    const subscription: Subscription = {
      id,
      settled: promise,
      missed: false,
      settle: () => {
        clearTimeout(timer)
        resolve()
      },
    }
    const timer = setTimeout(() => this.#miss(subscription), this.#options.timeoutMs)
    this.#subscriptions.set(id, subscription)
    this.#byChannel.set(this.#channelOf(id), id)
    if (client?.status === 'ready') void this.#subscribe(client, [subscription])
    // Otherwise 'ready' or 'close' is about to come.
    else if (client?.status !== 'connecting' && client?.status !== 'connect') this.#miss(subscription)
    return subscription
  }

  #end(id: RecordId): void {
    const channel = this.#channelOf(id)
    if (!this.#subscriptions.delete(id)) return
    this.#byChannel.delete(channel)
    if (this.#client?.status === 'ready') this.#client.sunsubscribe(channel).catch(() => {})
  }

  async #subscribe(client: Redis, subscriptions: readonly Subscription[]): Promise<void> {
    try {
      await client.ssubscribe(...subscriptions.map(({ id }) => this.#channelOf(id)))
      this.#refused = false
      for (const subscription of subscriptions) {
        if (subscription.missed) this.#watchers.tell(subscription.id)
        subscription.missed = false
        subscription.settle()
      }
    } catch (error) {
      for (const subscription of subscriptions) this.#miss(subscription)
      const { name, message } = error as Error
      // No answer: on a new connection everything is subscribed again.
      if (message === TIMED_OUT) client.stream.destroy()
      if (name !== 'ReplyError' || this.#refused) return
      this.#refused = true
      this.#options.onEvent('error', `channels are refused, nobody is woken: ${message}`)
    }
  }

  #miss(subscription: Subscription): void {
    subscription.missed = true
    subscription.settle()
  }

  #connect(): Redis {
    // Channels belong to no database.
    const client = new Redis({ ...settingsOf(this.#options), db: 0, autoResubscribe: false })
    client.on('ready', () => {
      const all = [...this.#subscriptions.values()]
      if (all.length > 0) void this.#subscribe(client, all)
    })
    client.on('close', () => {
      for (const subscription of this.#subscriptions.values()) this.#miss(subscription)
    })
    // The connection for commands reports them.
    client.on('error', () => {})
    client.on('smessage', (channel: string) => {
      const id = this.#byChannel.get(channel)
      if (id !== undefined) this.#watchers.tell(id)
    })
    client.connect().catch(() => {})
    return client
  }
}
