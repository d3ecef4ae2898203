import type { Millis, RecordId, Spans } from '../../core/record.ts'
import { settled } from '../../runtime/scheduling.ts'
import type { Epochs } from '../epochs.ts'
import { isClaim, SMALL_RECORD, stateCode, U48 } from '../record/codec.ts'
import {
  type Condition,
  type DuePosition,
  inOrder,
  type PutKind,
  type PutReply,
  pageOf,
  parseCursor,
  responsesOfEach,
  type Store,
  type SwapReply,
  type WriteReply,
} from '../register.ts'
import { Safety } from '../safety.ts'
import { readNote } from '../side-ports.ts'
import { Barriers } from './barrier.ts'
import { Batches, type Operation, type ReadResult, writeReply, YES } from './batch.ts'
import { Channels } from './channels.ts'
import { ifDenied, type RedisConnection } from './connection.ts'
import { redisEpochs } from './epochs.ts'
import { RedisKeys, type RedisOptions, SHARDS } from './keys.ts'
import { list, type RespReply, text, tuple } from './resp.ts'
import { Servers, type View } from './servers.ts'
import { redisTraits, together } from './traits.ts'

/**
 * Resolves after the first attempt to connect, whatever its outcome: the process also starts without Redis.
 * @throws {StoreUnavailable} if only an operator can fix the cause.
 */
export async function openRedisStore(options: RedisOptions): Promise<Store> {
  const store = new RedisStore(options)
  await store.open().catch(async (error: unknown) => {
    await store.close()
    throw error
  })
  return store
}

type Place = DuePosition & { readonly id: RecordId }

class RedisStore implements Store {
  readonly name = 'redis'
  readonly #options: RedisOptions
  readonly #keys: RedisKeys
  readonly #servers: Servers
  readonly #channels: Channels
  readonly #batches: Batches
  readonly #epochs: Epochs | null
  readonly #barriers: Barriers | null

  constructor(options: RedisOptions) {
    const { grace, wait, onSafe = () => {} } = options
    const keys = new RedisKeys(options.service)
    const servers = new Servers(options, (ready) => {
      if (ready === undefined) this.#channels.moved()
      else this.#channels.renew(ready)
      this.#batches.forget()
      void this.#epochs?.look()
    })
    this.#options = options
    this.#keys = keys
    this.#servers = servers
    this.#channels = new Channels(options, keys, servers)
    this.#batches = new Batches(options, servers)
    this.#epochs = grace ? redisEpochs(options, keys, servers, new Safety(SHARDS.length, onSafe)) : null
    this.#barriers = wait ? new Barriers(wait, options, keys, servers) : null
  }

  async open(): Promise<void> {
    await this.#servers.open()
    await this.#barriers?.open()
  }

  readonly put: Store['put'] = (id, bytes, spans, entry = 'claim'): Promise<PutReply> => {
    const isLost = entry === 'again' && this.#epochs?.isInGrace === true
    const head = headOf('p', ENTRIES[entry], ...this.#spansOf(id, spans))
    return this.#write(id, head, bytes, entry !== 'again', isLost && bytes.length <= SMALL_RECORD)
  }

  readonly swap: Store['swap'] = (id, condition, bytes, spans, nextFence): Promise<SwapReply> => {
    const head = headOf('s', nextFence ? ONE : ZERO, ...this.#spansOf(id, spans), ...partsOf(condition))
    return this.#write(id, head, bytes, nextFence, bytes.length <= SMALL_RECORD)
  }

  readonly get: Store['get'] = (id) =>
    this.#run(id, GET, (reply, at, now) => ({ now, bytes: reply[at + 1] as Buffer | null }))

  readonly renew: Store['renew'] = (items) => {
    const renewed = items.map(({ id, token, dueIn, dropIn }) =>
      this.#run(id, headOf('r', dueIn, dropIn, token), isDone, { thoughFull: true }),
    )
    return settled(renewed, false)
  }

  readonly due: Store['due'] = async (limit, of = 'unresolved') => {
    const most = of === 'bodies' ? responsesOfEach(limit, SHARDS.length) : limit
    const head = headOf('i', of === 'bodies' ? ONE : ZERO, most)
    const found = SHARDS.map((shard) => this.#places(shard, head))
    const all = (await settled(found, [])).flat()
    const first = all.toSorted((a, b) => a.due - b.due).slice(0, limit)
    const exist = first.map(({ id }) => this.#run(id, DUE, isDone))
    const exists = await settled(exist, false)
    return first.filter((_, n) => exists[n]).map(({ id }) => id)
  }

  readonly remove: Store['remove'] = (id, version) => this.#run(id, headOf('d', version), isDone)

  readonly list: Store['list'] = async (which, cursor, limit) => {
    if (which === 'unresolved') {
      // The first entries after the cursor from every shard's index, and of these the first.
      const from = parseCursor(cursor)
      const found = SHARDS.map((shard) => this.#placesAfter(shard, from, limit))
      return pageOf((await Promise.all(found)).flat().sort(inOrder).slice(0, limit), limit)
    }
    const [keys, beginning] = [this.#keys, which === 'all' ? '' : which.beginning]
    const look = () => this.#servers.view(which === 'all' ? null : keys.shardOf(beginning))
    const before = await look()
    const [view, n, at] = scanPlaceOf(cursor, before)
    const glob = which === 'all' ? keys.glob : keys.globOf(beginning)
    // The port's guarantee is SCAN's own: what exists throughout comes at least once.
    const args = [at, 'MATCH', glob, 'COUNT', limit]
    const [next, found] = await (before.servers[n] as RedisConnection).ask('scan', args, SCANNED)
    const ids = found.map((key) => keys.idOf(key)).filter((id) => id !== null)
    // The reply to another SCAN must not lead an operator to another record.
    return {
      ids: ids.filter((id) => id.startsWith(beginning)),
      next: cursorOf([view, n, next], await look()),
    }
  }

  readonly ping = async (): Promise<Millis> => {
    const [seconds, micros] = await this.#servers.askAnyone('time', TIME)
    return Number(seconds) * 1000 + Math.floor(Number(micros) / 1000) + (this.#options.skew?.() ?? 0)
  }

  readonly history: Store['history'] = {
    append: (id, notes) => {
      const lines = notes.map(
        ({ tag, count, firstAgo, lastAgo, text }) =>
          `${tag} ${count} ${Math.round(firstAgo)} ${Math.round(lastAgo)} ${text}\n`,
      )
      return this.#run(id, NOTE, isDone, { body: Buffer.from(lines.join('')) })
    },
    read: (id) => this.#run(id, NOTES, (reply, at) => linesOf(reply, at).map(readNote)),
  }

  readonly limits: Store['limits'] = {
    take: (bucket, { count, per }, units) => {
      const [shard, key] = [this.#keys.shardOf(bucket), this.#keys.bucket(bucket)]
      const head = headOf('t', count, per, Buffer.of(units))
      return this.#batches.run({ shard, key, head, read: (reply, at) => reply[at + 1] as Millis })
    },
  }

  readonly watch: Store['watch'] = (id, changed) => this.#channels.watch(id, changed)

  readonly traits: Store['traits'] = async () => {
    const parts = await this.#servers.parts()
    const all = parts.map(async (part) => {
      const info = await part.server.ask('info', [], text()).catch(ifDenied(null))
      const traits = redisTraits(info, this.#servers.isCluster, this.#options.wait ?? null)
      const refusals = [...traits.refusals, ...((await this.#barriers?.check(part)) ?? [])]
      return { name: part.server.leadsTo, ...traits, refusals }
    })
    // A server that is down promises nothing: its keys are refused.
    const up = (await settled<Awaited<(typeof all)[0]> | null>(all, null)).filter((one) => one !== null)
    const topology = this.#servers.topology()
    return { ...together(up, parts.length - up.length), ...(topology === null ? {} : { topology }) }
  }

  readonly close: Store['close'] = async () => {
    this.#epochs?.close()
    this.#batches.flush()
    await Promise.all([this.#barriers?.close(), this.#channels.close(), this.#servers.close()])
  }

  #run<T>(id: RecordId, head: Buffer, read: ReadResult<T>, more: Partial<Operation<T>> = {}): Promise<T> {
    const { shardOf, record } = this.#keys
    return this.#batches.run({ shard: shardOf(id), key: record(id), head, read, ...more })
  }

  /** Writes a record; a claim waits for the replicas, if required. */
  #write<Found extends Buffer | null>(
    id: RecordId,
    head: Buffer,
    bytes: Buffer,
    mayClaim: boolean,
    thoughFull: boolean,
  ): Promise<WriteReply<Found>> {
    const send = (read: ReadResult<WriteReply<Found>>) =>
      this.#run(id, head, read, { body: bytes, thoughFull })
    if (this.#barriers === null || !mayClaim || !isClaim(bytes)) return send(writeReply)
    return this.#barriers.claim(this.#keys.shardOf(id), bytes, send)
  }

  /** The spans of a record to be written, and the server's known <since>. */
  #spansOf(id: RecordId, { dueIn, dropIn }: Spans): readonly [Millis, Millis, Millis] {
    return [dueIn, dropIn, this.#epochs?.seen[this.#keys.shardOf(id)] ?? 0]
  }

  #places(shard: number, head: Buffer): Promise<Place[]> {
    return this.#batches.run({ shard, key: this.#keys.indexes[shard] as string, head, read: placesOf })
  }

  async #placesAfter(shard: number, from: DuePosition, limit: number): Promise<Place[]> {
    const places: Place[] = []
    // More than once only if more than `limit` entries share the cursor's instant.
    for (let offset = 0; ; offset += limit) {
      const chunk = await this.#places(shard, headOf('l', from.due, offset, limit))
      places.push(...chunk.filter((place) => inOrder(place, from) > 0))
      if (places.length >= limit || chunk.length < limit) return places
    }
  }
}

/* Heads and results of operations: see lua/. */

const [GET, DUE, NOTE, NOTES] = [headOf('g'), headOf('u'), headOf('n'), headOf('h')]
const [TIME, SCANNED] = [tuple(text(/^\d+$/), text(/^\d+$/)), tuple(text(), list(text()))]
const [ZERO, ONE, TWO] = [Buffer.of(0), Buffer.of(1), Buffer.of(2)]
const ENTRIES: Readonly<Record<PutKind, Buffer>> = { claim: ZERO, fresh: ONE, again: TWO }

/** Numbers take six bytes. */
function headOf(letter: string, ...parts: readonly (number | Buffer)[]): Buffer {
  let length = 1
  for (const part of parts) length += typeof part === 'number' ? U48 : part.length
  const head = Buffer.allocUnsafe(length)
  let at = head.write(letter)
  for (const part of parts)
    if (typeof part !== 'number') at += part.copy(head, at)
    else at = part < 0 ? head.writeIntBE(part, at, U48) : head.writeUIntBE(part, at, U48)
  return head
}

function partsOf(condition: Condition): readonly (number | Buffer)[] {
  if ('version' in condition) return [condition.version]
  return [condition.token, Buffer.from(condition.states.map(stateCode))]
}

function isDone(reply: readonly RespReply[], at: number): boolean {
  return reply[at] === YES
}

function linesOf(reply: readonly RespReply[], at: number): string[] {
  const end = at + 2 + (reply[at + 1] as number)
  return reply.slice(at + 2, end).map(String)
}

function placesOf(reply: readonly RespReply[], at: number): Place[] {
  const parts = linesOf(reply, at)
  return parts.flatMap((id, n) => (n % 2 ? [] : [{ id: id as RecordId, due: Number(parts[n + 1]) }]))
}

/**
 * How far a scan of all servers has come: the {@link View} in which it began, the server, its own cursor. Once slots have moved, it starts
 * over: entries may come twice; none is missed.
 */
type ScanPlace = readonly [view: string, server: number, cursor: string]

/** @throws {RangeError} if {@link cursorOf} did not make the cursor. */
function scanPlaceOf(text: string | null, { id, servers }: View): ScanPlace {
  if (text === null) return [id, 0, '0']
  const [, view, server, cursor] = /^(|[0-9a-f]{8})\.(\d{1,4})\.(\d{1,20})$/.exec(text) ?? []
  if (cursor === undefined || (view === id && Number(server) >= servers.length))
    throw new RangeError('not a cursor of this store')
  return view === id ? [id, Number(server), cursor] : [id, 0, '0']
}

/** Null: everything has been seen. */
function cursorOf([view, server, cursor]: ScanPlace, now: View): string | null {
  if (view !== now.id) return `${now.id}.0.0`
  const next = cursor === '0' ? server + 1 : server
  return next === now.servers.length ? null : `${view}.${next}.${cursor}`
}
