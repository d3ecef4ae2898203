import { type Millis, RECORD_ID, type RecordId, type Spans, type State } from '../core/record.ts'
import { settled } from '../runtime/scheduling.ts'
import { BODIES_FROM, isClaim, placesDue, SMALL_RECORD, stateCode, U48 } from './codec.ts'
import { Barriers, type Wait } from './redis-barrier.ts'
import { Batches, FOUND, HELD, type ReadResult, YES } from './redis-batch.ts'
import type { MasterShards, View } from './redis-cluster.ts'
import { type RedisConnection } from './redis-connection.ts'
import { Epochs } from './redis-epochs.ts'
import { repliesMismatch } from './redis-link.ts'
import { type ServersOptions, serversOf } from './redis-servers.ts'
import { redisTraits, together } from './redis-traits.ts'
import { Misconfigured } from './redis-url.ts'
import {
  type Condition,
  type DueKind,
  type DuePosition,
  type GetReply,
  InGrace,
  inOrder,
  type KeptNote,
  type NewEpoch,
  type PutKind,
  type PutReply,
  pageOf,
  parseCursor,
  responsesOfEach,
  type Store,
  type WriteReply,
} from './register.ts'
import type { RespReply } from './resp.ts'
import { Safety } from './safety.ts'
import { readNote } from './side-ports.ts'

export interface RedisOptions extends ServersOptions {
  /** Hides the records of other services on the same server. */
  readonly service: string
  /** Added to the server's time, for tests that travel in time; otherwise 0. */
  readonly skew?: () => Millis
  readonly onNewEpoch?: ((epoch: NewEpoch) => void) | undefined
  readonly onSafe?: ((before: Millis) => void) | undefined
  readonly onHeld?: ((left: Millis) => void) | undefined
  /** The replicas that claims wait for; null: none. */
  readonly wait?: Wait | null
  readonly onWaited?: ((satisfied: boolean) => void) | undefined
}

const ENTRIES: Readonly<Record<PutKind, number>> = { claim: 0, fresh: 1, again: 2 }
/** Of an operation that has none. */
const NO_BODY: Buffer = Buffer.alloc(0)

/**
 * Resolves after the first attempt to connect, whatever its outcome: the process also starts without Redis.
 * @throws {StoreUnavailable} if only a person can help.
 */
export async function openRedisStore(options: RedisOptions): Promise<Store> {
  const { skew = () => 0, grace = 0 } = options
  const keys = new RedisKeys(options.service)
  const servers = serversOf(options, {
    onServers: () => {
      batches.forget()
      void epochs?.look()
    },
    shards: keys.shards,
    shardOf: (id) => keys.shardOf(id),
    channelOf: (id) => keys.channel(id),
  })
  const redis = servers.commands
  const { timeoutMs } = options
  const batches = new Batches({ commands: redis, isCluster: servers.isCluster, grace, skew, timeoutMs })
  const epochs =
    grace === 0
      ? null
      : new Epochs({
          grace,
          skew,
          servers,
          keys: keys.epochs,
          shardOf: (id) => keys.shardOf(id),
          onNew: options.onNewEpoch ?? (() => {}),
          safety: new Safety(keys.epochs.length, options.onSafe ?? (() => {})),
          onHeld: options.onHeld ?? (() => {}),
        })
  const seen = (id: RecordId): Millis => epochs?.seen[keys.shardOf(id)] ?? 0
  const { wait = null, client = {}, onWaited } = options
  const barriers =
    wait === null
      ? null
      : new Barriers({
          wait,
          timeoutMs,
          client,
          markerOf: (shard) => keys.marker(shard),
          replicasOf: (master) => servers.replicasOf(master),
          onWaited,
        })
  const ping = async (): Promise<Millis> => {
    return (await servers.askAnyone('time', timeOf)) + skew()
  }
  /** What is due by the server's own clock. */
  const dueAt = async ({ server, shards }: MasterShards, limit: number, of: DueKind) => {
    const now = (await server.ask('time', [], timeOf)) + skew()
    const { from, to } = placesDue(of, now)
    const most = of === 'bodies' ? responsesOfEach(limit, shards.length) : limit
    const range = (shard: number) => {
      const args = [keys.indexes[shard] as string, from, to, 'WITHSCORES', 'LIMIT', 0, most]
      return redis.ask('zrangebyscore', args, scored)
    }
    return (await Promise.all(shards.map(range))).flat()
  }

  /** Runs an operation on a record. `names`: the other keys of it. */
  const run = <T>(
    id: RecordId,
    head: Buffer,
    read: ReadResult<T>,
    others: readonly ('index' | 'epoch' | 'history')[] = [],
    body = NO_BODY,
    thoughFull = false,
  ): Promise<T> =>
    batches.run({
      shard: keys.shardOf(id),
      key: keys.record(id),
      others: () => others.map((other) => keys[other](id)),
      head,
      body,
      thoughFull,
      read,
    })

  /** A claim waits for the replicas, if required. */
  const claiming = <Found extends Buffer | null>(
    id: RecordId,
    bytes: Buffer,
    write: (read: ReadResult<WriteReply<Found>>) => Promise<WriteReply<Found>>,
  ) =>
    barriers === null || !isClaim(bytes)
      ? write(writeReply<Found>)
      : barriers.claim(keys.shardOf(id), bytes, write, writeReply<Found>)

  await servers.open()
  if (barriers !== null)
    try {
      await barriers.open(await servers.parts())
    } catch (error) {
      // Otherwise nobody answers yet.
      if (error instanceof Misconfigured) {
        await servers.close()
        throw error
      }
    }
  return {
    name: 'redis',

    put(id, bytes, spans, entry = 'claim') {
      const head = writing(PUT, ENTRIES[entry], spans, seen(id), null)
      const isLost = entry === 'again' && epochs?.isInGrace === true
      const thoughFull = isLost && bytes.length <= SMALL_RECORD
      const write = (read: ReadResult<PutReply>) => run(id, head, read, WRITTEN_KEYS, bytes, thoughFull)
      return entry === 'again' ? write(writeReply) : claiming(id, bytes, write)
    },

    swap(id, condition, bytes, spans, nextFence) {
      const head = writing(SWAP, nextFence ? 1 : 0, spans, seen(id), condition)
      const thoughFull = bytes.length <= SMALL_RECORD
      const write = (read: ReadResult<WriteReply<Buffer | null>>) =>
        run(id, head, read, WRITTEN_KEYS, bytes, thoughFull)
      return nextFence ? claiming(id, bytes, write) : write(writeReply)
    },

    get: (id) => run(id, GET, getReply),

    renew: (items) =>
      settled(
        items.map(({ id, token, dueIn, dropIn }) => {
          const head = Buffer.allocUnsafe(13 + token.length)
          head[0] = RENEW
          head.writeIntBE(dueIn, 1, U48)
          head.writeIntBE(dropIn, 7, U48)
          token.copy(head, 13)
          return run(id, head, isDone, ['index'], NO_BODY, true)
        }),
        false,
      ),

    async due(limit, of = 'unresolved') {
      const parts = await servers.parts()
      const found = (
        await settled(
          parts.map((part) => dueAt(part, limit, of)),
          [],
        )
      ).flat()
      const first = found.toSorted((a, b) => a.due - b.due).slice(0, limit)
      const exists = await settled(
        first.map(({ id }) => run(id, DUE, isDone, ['index'])),
        false,
      )
      return first.filter((_, n) => exists[n]).map(({ id }) => id)
    },

    remove(id, version) {
      const head = Buffer.allocUnsafe(1 + U48)
      head[0] = REMOVE
      head.writeUIntBE(version, 1, U48)
      return run(id, head, isDone, ['index', 'history'])
    },

    async list(which, cursor, limit) {
      if (which === 'unresolved') {
        // The first entries after the cursor from every shard's index, and of these the first.
        const from = parseCursor(cursor)
        const found = await Promise.all(keys.indexes.map((index) => placesAfter(redis, index, from, limit)))
        return pageOf(found.flat().sort(inOrder).slice(0, limit), limit)
      }
      const beginning = which === 'all' ? '' : which.beginning
      const glob = which === 'all' ? keys.glob : keys.globOf(beginning)
      const look = () => servers.view(which === 'all' ? null : keys.shardOf(beginning))
      const before = await look()
      const place = scanPlaceOf(cursor, before)
      // The port's guarantee is SCAN's own: what exists throughout comes at least once.
      const args = [place.cursor, 'MATCH', glob, 'COUNT', limit]
      const [next, found] = await (before.servers[place.server] as RedisConnection).ask('scan', args, scanned)
      const ids = found.map((key) => keys.idOf(key)).filter((id) => id !== null)
      return {
        // The reply to another SCAN must not lead an operator to another record.
        ids: ids.filter((id) => id.startsWith(beginning)),
        next: cursorOf({ ...place, cursor: next }, await look()),
      }
    },

    ping,

    history: {
      append(id, notes) {
        const lines = notes.map(
          ({ tag, count, firstAgo, lastAgo, text }) =>
            `${tag} ${count} ${Math.round(firstAgo)} ${Math.round(lastAgo)} ${text}\n`,
        )
        return run(id, NOTE, isDone, ['history'], Buffer.from(lines.join('')))
      },
      read: (id) => run(id, NOTES, linesOf, ['history']),
    },

    limits: {
      take(bucket, { count, per }, units) {
        const head = Buffer.allocUnsafe(14)
        head[0] = THROTTLE
        head.writeUIntBE(count, 1, U48)
        head.writeUIntBE(per, 7, U48)
        head.writeInt8(units, 13)
        const [key, shard] = [keys.bucket(bucket), keys.shardOf(bucket)]
        const others = () => []
        return batches.run({ shard, key, others, head, body: NO_BODY, thoughFull: false, read: waitOf })
      },
    },

    watch: (id, changed) => servers.watch(id, changed),

    async traits() {
      const parts = await servers.parts()
      const replies = await Promise.allSettled(
        parts.map(({ server }) => server.ask('info', [], textOf).catch(nullIfDenied)),
      )
      // A server that is down promises nothing: its keys are refused.
      const up = replies.flatMap((one, n) =>
        one.status === 'fulfilled' ? [{ part: parts[n] as MasterShards, info: one.value }] : [],
      )
      const [first] = replies
      if (up.length === 0 && first?.status === 'rejected') throw first.reason
      const topology = servers.topology()
      const unable = await Promise.all(up.map(async ({ part }) => barriers?.check(part)))
      return {
        ...together(
          up.map(({ part, info }, n) => {
            const { refusals, ...traits } = redisTraits(info, servers.isCluster, wait)
            const why = unable[n] ?? null
            return { name: part.name, ...traits, refusals: why === null ? refusals : [...refusals, why] }
          }),
          replies.length - up.length,
        ),
        ...(topology === null ? {} : { topology }),
      }
    },

    async close() {
      epochs?.close()
      batches.flush()
      await Promise.all([barriers?.close(), servers.close()])
    },
  }
}

/* The heads of operations, and their results: see lua/. */

const GET = Buffer.from('g')
const DUE = Buffer.from('u')
const NOTE = Buffer.from('n')
const NOTES = Buffer.from('h')
const PUT = code('p')
const SWAP = code('s')
const RENEW = code('r')
const REMOVE = code('d')
const THROTTLE = code('t')
/** Before the condition of a swap. */
const WRITING = 20
const WRITTEN_KEYS = ['index', 'epoch'] as const

function code(letter: string): number {
  return letter.charCodeAt(0)
}

function writing(
  operation: number,
  how: number,
  { dueIn, dropIn }: Spans,
  seen: Millis,
  condition: Condition | null,
): Buffer {
  const head = Buffer.allocUnsafe(WRITING + (condition === null ? 0 : lengthOf(condition)))
  head[0] = operation
  head[1] = how
  head.writeIntBE(dueIn, 2, U48)
  head.writeIntBE(dropIn, 8, U48)
  head.writeUIntBE(seen, 14, U48)
  if (condition === null) return head
  if ('version' in condition) head.writeUIntBE(condition.version, WRITING, U48)
  else {
    condition.token.copy(head, WRITING)
    codesOf(condition.states).copy(head, WRITING + condition.token.length)
  }
  return head
}

function lengthOf(condition: Condition): number {
  return 'version' in condition ? U48 : condition.token.length + condition.states.length
}

function isDone(reply: readonly RespReply[], at: number): boolean {
  return reply[at] === YES
}

function getReply(reply: readonly RespReply[], at: number, now: Millis): GetReply {
  return { now, bytes: reply[at + 1] as Buffer | null }
}

function waitOf(reply: readonly RespReply[], at: number): Millis {
  return reply[at + 1] as Millis
}

function linesOf(reply: readonly RespReply[], at: number): KeptNote[] {
  const count = reply[at + 1] as number
  return (reply.slice(at + 2, at + 2 + count) as Buffer[]).map((line) => readNote(String(line)))
}

/** @throws {InGrace} */
function writeReply<Found>(reply: readonly RespReply[], at: number, now: Millis): WriteReply<Found> {
  const [kind, first, second, third] = [reply[at], reply[at + 1], reply[at + 2], reply[at + 3]]
  if (kind === FOUND) return { done: false, now, bytes: first as Found }
  if (kind === HELD) throw new InGrace(now, first as Millis, second as Millis)
  return {
    done: true,
    now,
    stamp: { version: first as number, fence: second as number, createdAt: third as Millis },
  }
}

/** The guard passes the same list with every outcome. */
function codesOf(states: readonly State[]): Buffer {
  let codes = stateCodes.get(states)
  if (codes === undefined) {
    codes = Buffer.from(states.map(stateCode))
    stateCodes.set(states, codes)
  }
  return codes
}

const stateCodes = new WeakMap<readonly State[], Buffer>()

function nullIfDenied(error: Error): null {
  if (error.message.includes('NOPERM')) return null
  throw error
}

/** How far a scan of all servers has come. */
interface ScanPlace {
  /** The {@link View} in which it began: once slots have moved, it starts over. Entries may come twice; none is missed. */
  readonly view: string
  readonly server: number
  readonly cursor: string
}

/** @throws {RangeError} if {@link cursorOf} did not make the cursor. */
function scanPlaceOf(text: string | null, { id, servers }: View): ScanPlace {
  const [, view = '', server = 0, cursor] =
    /^(?:([0-9a-f]{8})\.(\d{1,4})\.)?(\d{1,20})$/.exec(text ?? '0') ?? []
  if (cursor === undefined) throw new RangeError('not a cursor of this store')
  if (view !== id) return { view: id, server: 0, cursor: '0' }
  if (Number(server) >= servers.length) throw new RangeError('not a cursor of this store')
  return { view, server: Number(server), cursor }
}

/** Null: everything has been seen. */
function cursorOf({ view, server, cursor }: ScanPlace, now: View): string | null {
  if (view !== now.id) return `${now.id}.0.0`
  const next = cursor === '0' ? server + 1 : server
  if (next === now.servers.length) return null
  return view === '' ? cursor : `${view}.${next}.${cursor}`
}

async function placesAfter(
  redis: Pick<RedisConnection, 'ask'>,
  index: string,
  from: DuePosition,
  limit: number,
): Promise<DuePosition[]> {
  const places: DuePosition[] = []
  // More than once only if more than `limit` entries share the cursor's instant.
  for (let offset = 0; ; offset += limit) {
    const range = [index, from.due, `(${BODIES_FROM}`, 'WITHSCORES', 'LIMIT', offset, limit]
    const chunk = await redis.ask('zrangebyscore', range, scored)
    places.push(...chunk.filter((place) => inOrder(place, from) > 0))
    if (places.length >= limit || chunk.length < limit) return places
  }
}

/*
 * Check the form of replies to plain commands: another form belongs to another command. Mixing up two replies of one form does no harm:
 * a script checks index entries, any time is current, and keys are parsed.
 */

function textOf(reply: RespReply): string {
  if (!Buffer.isBuffer(reply)) throw repliesMismatch()
  return String(reply)
}

function textsOf(reply: RespReply): string[] {
  if (!Array.isArray(reply)) throw repliesMismatch()
  return reply.map(textOf)
}

function timeOf(reply: RespReply): Millis {
  const [seconds = '', micros = '', ...more] = textsOf(reply)
  if (more.length > 0 || !/^\d+ \d+$/.test(`${seconds} ${micros}`)) throw repliesMismatch()
  return Number(seconds) * 1000 + Math.floor(Number(micros) / 1000)
}

/** Reads a reply WITHSCORES. */
function scored(reply: RespReply): (DuePosition & { readonly id: RecordId })[] {
  const texts = textsOf(reply)
  if (texts.length % 2 !== 0) throw repliesMismatch()
  const pairs = []
  for (let n = 0; n < texts.length; n += 2)
    pairs.push({ id: texts[n] as RecordId, due: Number(texts[n + 1]) })
  return pairs
}

function scanned(reply: RespReply): [next: string, keys: string[]] {
  if (!Array.isArray(reply) || reply.length !== 2) throw repliesMismatch()
  return [textOf(reply[0] as RespReply), textsOf(reply[1] as RespReply)]
}

/*
 * The layout of keys, fixed for good: a change would orphan live records.
 *
 *   idempotency:<service>:{xx}:r:<id>   the record, a string that expires at dropAt
 *   idempotency:<service>:{xx}:u        the unresolved records of the shard: a sorted set of ids by their due instant
 *   idempotency:<service>:{xx}:c:<id>   no key but a sharded channel: an empty message after each write that ends an attempt
 *   idempotency:<service>:{xx}:h:<id>   the record's history: a list of lines that expires with it
 *   idempotency:<service>:{xx}:e        the server process first seen for the shard, and when: a string "run_id since till" (ADR 91)
 *   idempotency:<service>:{xx}:w        a marker that replicas are waited for with (`store.wait`): 1, for a minute
 *   idempotency:<service>:{xx}:n:<id>   a bucket of a rate limit, a string "at debt count" that expires when the bucket is full
 *
 * <service> has letters, digits, `_`, `.` and `-`: it can neither end early nor be a pattern. xx is the first byte of the id in hex.
 * What belongs to an id shares that hash tag, so all of it lives in one slot.
 */
const SHARDS = 256
/** SHA-256 in base64url. */
const ID_LENGTH = 43

export class RedisKeys {
  /** All of them. */
  readonly shards: readonly number[] = Array.from({ length: SHARDS }, (_, n) => n)
  /** Every shard's index of unresolved records. */
  readonly indexes: readonly string[]
  /** By shard: the key that the server's identity is compared with. */
  readonly epochs: readonly string[]
  /** Matches every record. */
  readonly glob: string
  readonly #tagged: readonly string[]

  constructor(service: string) {
    const own = `idempotency:${service}:`
    this.#tagged = this.shards.map((n) => `${own}{${n.toString(16).padStart(2, '0')}}:`)
    this.indexes = this.#tagged.map((beginning) => `${beginning}u`)
    this.epochs = this.#tagged.map((beginning) => `${beginning}e`)
    this.glob = `${own}*:r:*`
  }

  record(id: RecordId): string {
    return `${this.#tag(id)}r:${id}`
  }

  history(id: RecordId): string {
    return `${this.#tag(id)}h:${id}`
  }

  channel(id: RecordId): string {
    return `${this.#tag(id)}c:${id}`
  }

  marker(shard: number): string {
    return `${this.#tagged[shard]}w`
  }

  bucket(bucket: string): string {
    return `${this.#tag(bucket)}n:${bucket}`
  }

  index(id: RecordId): string {
    return this.indexes[this.shardOf(id)] as string
  }

  epoch(id: RecordId): string {
    return this.epochs[this.shardOf(id)] as string
  }

  recordAndIndex(id: RecordId): string[] {
    return [this.record(id), this.index(id)]
  }

  /** Matches the records whose id starts like this. Base64url has no characters that are special in a glob. */
  globOf(beginning: string): string {
    return `${this.#tag(beginning)}r:${beginning}*`
  }

  /** Null: not the key of a record. */
  idOf(key: string): RecordId | null {
    const id = key.slice(-ID_LENGTH)
    return RECORD_ID.test(id) && this.record(id as RecordId) === key ? (id as RecordId) : null
  }

  /** By the first byte of the id: six bits of its first base64url digit and two of the second. */
  shardOf(id: string): number {
    return (digitAt(id, 0) << 2) | (digitAt(id, 1) >> 4)
  }

  #tag(id: string): string {
    return this.#tagged[this.shardOf(id)] as string
  }
}

/** By character code. */
const DIGITS = new Uint8Array(128)
for (const [n, code] of Buffer.from(
  'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_',
).entries())
  DIGITS[code] = n

function digitAt(id: string, at: number): number {
  return DIGITS[id.charCodeAt(at)] as number
}
