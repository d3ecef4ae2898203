import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { setImmediate as immediately } from 'node:timers/promises'
import { Redis } from 'ioredis'
import type { Millis, RecordId, Spans, State } from '../core/record.ts'
import { stateCode } from './codec.ts'
import { readNote } from './history.ts'
import { Channels } from './redis-channels.ts'
import { type Arg, command } from './redis-command.ts'
import { disconnect, settingsOf } from './redis-connection.ts'
import { RedisKeys } from './redis-keys.ts'
import { listRecords, listUnresolved, scored } from './redis-listing.ts'
import { storeError, TIMED_OUT, traitsOf } from './redis-replies.ts'
import {
  type Condition,
  type GetReply,
  type KeptNote,
  type Listing,
  type Note,
  type Page,
  type PutReply,
  type RateLimits,
  type RecordHistory,
  type Renewal,
  type Store,
  type StoreTraits,
  StoreUnavailable,
  type SwapReply,
} from './register.ts'
import { SMALL_RECORD } from './stamps.ts'

/** Commands in a row that time out on a wholly silent connection before it counts as dead (no reset came, as with a lost host). */
const SILENT_COMMANDS = 5

interface Script {
  readonly source: string
  readonly sha: string
}

function script(name: string, header = ''): Script {
  const source = header + readFileSync(new URL(`./lua/${name}.lua`, import.meta.url), 'utf8')
  return { source, sha: createHash('sha1').update(source).digest('hex') }
}

const PUT = script('put')
const SWAP = script('swap')
/** The same for records without a body: the outcome of what is executed is written to a full store, too. */
const SWAP_SMALL = script('swap', '#!lua flags=allow-oom\n')
const GET = script('get')
const RENEW = script('renew')
const REMOVE = script('remove')
const DUE = script('due')
const THROTTLE = script('throttle')
const NOTE = script('note')
const NOTES = script('notes')

export interface RedisStoreOptions {
  /** `redis://` or `rediss://`, with user, password and database. */
  readonly url: string
  /** Whose records: those of other services on the same server are never seen. */
  readonly service: string
  readonly timeoutMs: Millis
  readonly onEvent: (kind: 'connected' | 'disconnected' | 'error', detail: string) => void
  /** Added to the server's time. Tests travel with it; 0 otherwise. */
  readonly skew?: () => Millis
}

type Written = [1, number, number, number, number]

/** Notes that leave together. */
interface Noting {
  readonly keys: string[]
  readonly args: Arg[]
  /** 1 or 0 for each record. */
  readonly done: Promise<readonly number[]>
}

export class RedisStore implements Store {
  readonly name = 'redis'
  readonly history: RecordHistory = {
    append: (id, notes) => this.#append(id, notes),
    read: (id) => this.#read(id),
  }
  readonly limits: RateLimits = {
    take: (bucket, { count, per }, units) =>
      this.#run(THROTTLE, [this.#keys.bucket(bucket)], [count, per, units, this.#skew()]),
  }
  readonly #client: Redis
  readonly #keys: RedisKeys
  readonly #channels: Channels
  readonly #onEvent: RedisStoreOptions['onEvent']
  readonly #skew: () => Millis
  /** Why the last connection failed, until there is one. */
  #trouble: string | null = null
  /** Redis refused the database of the URL: the connection is good for nothing, though ioredis calls it ready. */
  #wrongDatabase = false
  #silentCommands = 0
  #noting: Noting | null = null

  private constructor(options: RedisStoreOptions) {
    this.#onEvent = options.onEvent
    this.#skew = options.skew ?? (() => 0)
    this.#keys = new RedisKeys(options.service)
    this.#client = this.#connect(options)
    this.#channels = new Channels({
      // Channels belong to no database.
      open: () => new Redis({ ...settingsOf(options.url, options.timeoutMs), db: 0, autoResubscribe: false }),
      channelOf: (id) => this.#keys.channel(id),
      timeoutMs: options.timeoutMs,
      onRefused: (reason) => this.#onEvent('error', `channels are refused, nobody is woken: ${reason}`),
    })
  }

  /** Resolves after the first attempt to connect, whatever its outcome: the process starts without Redis, too. */
  static async open(options: RedisStoreOptions): Promise<RedisStore> {
    const register = new RedisStore(options)
    await register.#client.connect().catch(() => {})
    return register
  }

  async put(id: RecordId, bytes: Buffer, spans: Spans): Promise<PutReply> {
    const reply = await this.#run(PUT, this.#keys.recordAndIndex(id), [
      id,
      bytes,
      spans.dueIn,
      spans.dropIn,
      this.#skew(),
    ])
    return reply[0] === 1 ? done(reply as Written) : { done: false, now: reply[1], bytes: reply[2] as Buffer }
  }

  async swap(
    id: RecordId,
    condition: Condition,
    bytes: Buffer,
    spans: Spans,
    nextFence: boolean,
  ): Promise<SwapReply> {
    const expected =
      'version' in condition ? [condition.version, '', ''] : ['', condition.token, codesOf(condition.states)]
    const reply = await this.#run(
      bytes.length <= SMALL_RECORD ? SWAP_SMALL : SWAP,
      this.#keys.recordAndIndex(id),
      [id, bytes, spans.dueIn, spans.dropIn, this.#skew(), nextFence ? 1 : 0, ...expected],
    )
    return reply[0] === 1
      ? done(reply as Written)
      : { done: false, now: reply[1], bytes: reply[2] as Buffer | null }
  }

  async get(id: RecordId): Promise<GetReply> {
    const [now, bytes] = await this.#run<[number, Buffer | null]>(
      GET,
      [this.#keys.record(id)],
      [this.#skew()],
    )
    return { now, bytes }
  }

  async renew(items: readonly Renewal[]): Promise<boolean[]> {
    const replies = await Promise.all(
      items.map(({ id, token, dueIn, dropIn }) =>
        this.#run<number>(RENEW, this.#keys.recordAndIndex(id), [id, token, dueIn, dropIn, this.#skew()]),
      ),
    )
    return replies.map((reply) => reply === 1)
  }

  async due(limit: number): Promise<RecordId[]> {
    const now = await this.ping()
    const range = (index: string) =>
      this.#ask('zrangebyscore', [index, '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit])
    const found = (await Promise.all(this.#keys.indexes.map(range))).flatMap((reply) =>
      scored(reply as Buffer[]),
    )
    const first = found.toSorted((a, b) => a.due - b.due).slice(0, limit)
    const there = await Promise.all(
      first.map(({ id }) => this.#run<number>(DUE, this.#keys.recordAndIndex(id), [id, this.#skew()])),
    )
    return first.filter((_, n) => there[n] === 1).map(({ id }) => id)
  }

  async remove(id: RecordId, version: number): Promise<boolean> {
    const keys = [this.#keys.record(id), this.#keys.index(id), this.#keys.history(id)]
    return (await this.#run<number>(REMOVE, keys, [id, version, this.#skew()])) === 1
  }

  list(which: Listing, cursor: string | null, limit: number): Promise<Page> {
    const ask = (command: string, args: (string | number)[]): Promise<unknown> => this.#ask(command, args)
    if (which === 'unresolved') return listUnresolved(ask, this.#keys, cursor, limit)
    const glob = which === 'all' ? this.#keys.glob : this.#keys.globOf(which.beginning)
    return listRecords(ask, this.#keys, cursor, limit, glob)
  }

  /** Those of one turn of the event loop are one command: there is one for every executed request. */
  async #append(id: RecordId, notes: readonly Note[]): Promise<boolean> {
    const batch = (this.#noting ??= this.#noteTogether())
    const nth = batch.keys.push(this.#keys.record(id), this.#keys.history(id)) / 2 - 1
    batch.args.push(notes.length)
    for (const { tag, count, firstAgo, lastAgo, text } of notes)
      batch.args.push(Buffer.from(tag), count, Math.round(firstAgo), Math.round(lastAgo), Buffer.from(text))
    return (await batch.done)[nth] === 1
  }

  #noteTogether(): Noting {
    const keys: string[] = []
    const args: Arg[] = [this.#skew()]
    const done = immediately().then(() => {
      this.#noting = null
      return this.#run<number[]>(NOTE, keys, args)
    })
    return { keys, args, done }
  }

  async #read(id: RecordId): Promise<KeptNote[]> {
    const lines = await this.#run<Buffer[]>(
      NOTES,
      [this.#keys.record(id), this.#keys.history(id)],
      [this.#skew()],
    )
    return lines.map((line) => readNote(String(line)))
  }

  watch(id: RecordId, changed: () => void): Promise<() => void> {
    return this.#channels.watch(id, changed)
  }

  async ping(): Promise<Millis> {
    const [seconds, micros] = (await this.#ask('time', [])) as [Buffer, Buffer]
    return Number(seconds) * 1000 + Math.floor(Number(micros) / 1000) + this.#skew()
  }

  async traits(): Promise<StoreTraits> {
    try {
      return traitsOf(String(await this.#ask('info', [])))
    } catch (error) {
      if (String(error).includes('NOPERM')) return traitsOf(null)
      throw error
    }
  }

  async close(): Promise<void> {
    await Promise.all([disconnect(this.#client), this.#channels.close()])
  }

  async #run<T = [number, number, ...unknown[]]>(what: Script, keys: string[], args: Arg[]): Promise<T> {
    const rest = [keys.length, ...keys, ...args]
    try {
      return (await this.#send('evalsha', [what.sha, ...rest])) as T
    } catch (error) {
      if (!(error as Error).message.startsWith('NOSCRIPT')) throw storeError(error)
    }
    return (await this.#ask('eval', [what.source, ...rest])) as T
  }

  async #ask(name: string, args: Arg[]): Promise<unknown> {
    try {
      return await this.#send(name, args)
    } catch (error) {
      throw storeError(error)
    }
  }

  #send(name: string, args: Arg[]): Promise<unknown> {
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
    const heard = stream.bytesRead
    const sent = command(name, args)
    void this.#client.sendCommand(sent)
    const reply: Promise<unknown> = sent.promise
    void reply.then(
      () => {
        this.#silentCommands = 0
      },
      (error: unknown) => {
        const timedOut = (error as Error).message === TIMED_OUT
        const silent = timedOut && stream.bytesRead === heard
        this.#silentCommands = silent ? this.#silentCommands + 1 : 0
        // Replies are matched by their order: where others came and this one did not, none that follows can be trusted.
        if (this.#silentCommands >= SILENT_COMMANDS || (timedOut && !silent)) stream.destroy()
      },
    )
    return reply
  }

  #connect({ url, timeoutMs }: RedisStoreOptions): Redis {
    const settings = settingsOf(url, timeoutMs)
    const name = `${settings.host}:${settings.port}`
    const client = new Redis(settings)
    client.on('ready', () => {
      if (this.#wrongDatabase) return
      this.#trouble = null
      this.#silentCommands = 0
      this.#channels.renew()
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

/** The bytes of a list of states. The walk has one list, which it passes with every outcome. */
function codesOf(states: readonly State[]): Buffer {
  let codes = stateCodes.get(states)
  if (codes === undefined) {
    codes = Buffer.from(states.map(stateCode))
    stateCodes.set(states, codes)
  }
  return codes
}

const stateCodes = new WeakMap<readonly State[], Buffer>()

function done([, now, version, fence, createdAt]: Written): {
  done: true
  now: Millis
  stamp: { version: number; fence: number; createdAt: Millis }
} {
  return { done: true, now, stamp: { version, fence, createdAt } }
}
