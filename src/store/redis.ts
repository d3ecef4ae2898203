import { setImmediate as immediately } from 'node:timers/promises'
import { type Millis, RECORD_ID, type RecordId, type Spans, type State } from '../core/record.ts'
import { settled } from '../runtime/scheduling.ts'
import { BODIES_FROM, isClaim, placesDue, SMALL_RECORD, stateCode } from './codec.ts'
import { Barriers, type Wait } from './redis-barrier.ts'
import type { MasterShards, View } from './redis-cluster.ts'
import { admittingScript, type RedisConnection, script } from './redis-connection.ts'
import { Epochs } from './redis-epochs.ts'
import { type Reader, repliesMismatch } from './redis-link.ts'
import { type ServersOptions, serversOf } from './redis-servers.ts'
import { redisTraits, together } from './redis-traits.ts'
import { Misconfigured } from './redis-url.ts'
import {
  type DueKind,
  type DuePosition,
  type GetReply,
  InGrace,
  inOrder,
  type NewEpoch,
  type PutKind,
  type PutReply,
  pageOf,
  parseCursor,
  responsesOfEach,
  type Store,
  type WriteReply,
} from './register.ts'
import type { RespArg, RespReply } from './resp.ts'
import { Safety } from './safety.ts'
import { readNote } from './side-ports.ts'

const PUT = admittingScript('put')
const SWAP = admittingScript('swap')
/** Even a full store must take the outcome of an execution, and in a grace what it has lost. For records without a body. */
const FULL_TOO = '#!lua flags=allow-oom\n'
const PUT_AGAIN = admittingScript('put', FULL_TOO)
const SWAP_SMALL = admittingScript('swap', FULL_TOO)
const GET = script('get')
const RENEW = script('renew')
const REMOVE = script('remove')
const DUE = script('due')
const THROTTLE = script('throttle')
const NOTE = script('note')
const NOTES = script('notes')

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

type Written = [1, now: Millis, version: number, fence: number, createdAt: Millis]
type Held = [2, now: Millis, since: Millis, left: Millis]

const ENTRIES: Readonly<Record<PutKind, number>> = { claim: 0, fresh: 1, again: 2 }

/** History entries sent together. */
interface Noting {
  readonly keys: string[]
  readonly args: RespArg[]
  /** 1 or 0 for each record. */
  readonly done: Promise<readonly number[]>
}

/**
 * Resolves after the first attempt to connect, whatever its outcome: the process also starts without Redis.
 * @throws {StoreUnavailable} if only a person can help.
 */
export async function openRedisStore(options: RedisOptions): Promise<Store> {
  const { skew = () => 0, grace = 0 } = options
  const keys = new RedisKeys(options.service)
  const servers = serversOf(options, {
    onServers: () => void epochs?.look(),
    shards: keys.shards,
    shardOf: (id) => keys.shardOf(id),
    channelOf: (id) => keys.channel(id),
  })
  const redis = servers.commands
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
  const { wait = null, timeoutMs, client = {}, onWaited } = options
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
  /** By shard in a cluster, otherwise all in one. */
  const noting: (Noting | undefined)[] = []

  /** One command for all history entries of a turn of the event loop: every executed request has one. */
  const noteTogether = (group: number): Noting => {
    const noteKeys: string[] = []
    const args: RespArg[] = [skew()]
    const done = immediately().then(() => {
      noting[group] = undefined
      return redis.run(NOTE, [noteKeys.length, ...noteKeys, ...args], (done: number[]) => done)
    })
    return { keys: noteKeys, args, done }
  }
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

  /** The first arguments of every script that writes a record. */
  const writing = (id: RecordId, bytes: Buffer, { dueIn, dropIn }: Spans): RespArg[] => [
    3,
    keys.record(id),
    keys.index(id),
    keys.epoch(id),
    id,
    bytes,
    dueIn,
    dropIn,
    skew(),
  ]

  /** A claim waits for the replicas, if required. */
  const claiming = <Found extends Buffer | null>(
    id: RecordId,
    bytes: Buffer,
    write: (read: Reader<WriteReply<Found>>) => Promise<WriteReply<Found>>,
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
      const args = writing(id, bytes, spans)
      args.push(ENTRIES[entry], grace, seen(id))
      const isLost = entry === 'again' && epochs?.isInGrace === true
      const what = isLost && bytes.length <= SMALL_RECORD ? PUT_AGAIN : PUT
      const write = (read: Reader<PutReply>) => redis.run(what, args, read)
      return entry === 'again' ? write(writeReply) : claiming(id, bytes, write)
    },

    swap(id, condition, bytes, spans, nextFence) {
      const args = writing(id, bytes, spans)
      args.push(nextFence ? 1 : 0)
      if ('version' in condition) args.push(condition.version, '', '')
      else args.push('', condition.token, codesOf(condition.states))
      args.push(grace, seen(id))
      const what = bytes.length <= SMALL_RECORD ? SWAP_SMALL : SWAP
      const write = (read: Reader<WriteReply<Buffer | null>>) => redis.run(what, args, read)
      return nextFence ? claiming(id, bytes, write) : write(writeReply)
    },

    get: (id) => redis.run(GET, [1, keys.record(id), skew()], getReply),

    renew: (items) =>
      settled(
        items.map(({ id, token, dueIn, dropIn }) =>
          redis.run(RENEW, [2, ...keys.recordAndIndex(id), id, token, dueIn, dropIn, skew()], isDone),
        ),
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
        first.map(({ id }) => redis.run(DUE, [2, ...keys.recordAndIndex(id), id, skew()], isDone)),
        false,
      )
      return first.filter((_, n) => exists[n]).map(({ id }) => id)
    },

    remove: (id, version) =>
      redis.run(REMOVE, [3, ...keys.recordAndIndex(id), keys.history(id), id, version, skew()], isDone),

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
      async append(id, notes) {
        const group = servers.isCluster ? keys.shardOf(id) : 0
        const batch = (noting[group] ??= noteTogether(group))
        const nth = batch.keys.push(keys.record(id), keys.history(id)) / 2 - 1
        batch.args.push(notes.length)
        for (const { tag, count, firstAgo, lastAgo, text } of notes)
          batch.args.push(
            Buffer.from(tag),
            count,
            Math.round(firstAgo),
            Math.round(lastAgo),
            Buffer.from(text),
          )
        return (await batch.done)[nth] === 1
      },
      read: (id) =>
        redis.run(NOTES, [2, keys.record(id), keys.history(id), skew()], (lines: Buffer[]) =>
          lines.map((line) => readNote(String(line))),
        ),
    },

    limits: {
      take: (bucket, { count, per }, units) =>
        redis.run(THROTTLE, [1, keys.bucket(bucket), count, per, units, skew()], ([wait]: [Millis]) => wait),
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
      await Promise.all([barriers?.close(), servers.close()])
    },
  }
}

function isDone([done]: [number]): boolean {
  return done === 1
}

function getReply([now, bytes]: [Millis, Buffer | null]): GetReply {
  return { now, bytes }
}

/** @throws {InGrace} */
function writeReply<Found>(reply: Written | [0, Millis, Found] | Held): WriteReply<Found> {
  if (reply[0] === 0) return { done: false, now: reply[1], bytes: reply[2] }
  if (reply[0] === 2) throw new InGrace(reply[1], reply[2], reply[3])
  const [, now, version, fence, createdAt] = reply
  return { done: true, now, stamp: { version, fence, createdAt } }
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
