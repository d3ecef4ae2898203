import { setImmediate as immediately } from 'node:timers/promises'
import { type Millis, RECORD_ID, type RecordId, type State } from '../core/record.ts'
import { SMALL_RECORD, stateCode } from './codec.ts'
import { readNote } from './history.ts'
import { type Arg, Channels, Connection, type ConnectionOptions, script } from './redis-client.ts'
import {
  inOrder,
  type Place,
  pageOf,
  placeOf,
  type Store,
  type StoreTraits,
  type WriteReply,
} from './register.ts'

const PUT = script('put')
const SWAP = script('swap')
/** The same for records without a body: the outcome of what was executed is written to a full store, too. */
const SWAP_SMALL = script('swap', '#!lua flags=allow-oom\n')
const GET = script('get')
const RENEW = script('renew')
const REMOVE = script('remove')
const DUE = script('due')
const THROTTLE = script('throttle')
const NOTE = script('note')
const NOTES = script('notes')

export interface RedisOptions extends ConnectionOptions {
  /** Records of other services on the same server are never seen. */
  readonly service: string
  /** Added to the server's time. Tests travel with it; 0 otherwise. */
  readonly skew?: () => Millis
}

type Written = [1, now: Millis, version: number, fence: number, createdAt: Millis]

/** Notes that leave together. */
interface Noting {
  readonly keys: string[]
  readonly args: Arg[]
  /** 1 or 0 for each record. */
  readonly done: Promise<readonly number[]>
}

/** Resolves after the first attempt to connect, whatever its outcome: the process starts without Redis, too. */
export async function openRedisStore(options: RedisOptions): Promise<Store> {
  const skew = options.skew ?? (() => 0)
  const keys = new RedisKeys(options.service)
  const channels = new Channels(options, (id) => keys.channel(id))
  const redis = new Connection(options, () => channels.resubscribe())
  let noting: Noting | null = null

  /** One command for all notes of a turn of the event loop: every executed request has one. */
  const noteTogether = (): Noting => {
    const noteKeys: string[] = []
    const args: Arg[] = [skew()]
    const done = immediately().then(() => {
      noting = null
      return redis.run<number[]>(NOTE, noteKeys, args)
    })
    return { keys: noteKeys, args, done }
  }
  const ping = async (): Promise<Millis> => {
    const [seconds, micros] = await redis.ask<[Buffer, Buffer]>('time', [])
    return Number(seconds) * 1000 + Math.floor(Number(micros) / 1000) + skew()
  }

  await redis.open()
  return {
    name: 'redis',

    put(id, bytes, { dueIn, dropIn }) {
      const args = [id, bytes, dueIn, dropIn, skew()]
      return redis.run<Written | [0, Millis, Buffer]>(PUT, keys.recordAndIndex(id), args).then(writeReply)
    },

    swap(id, condition, bytes, { dueIn, dropIn }, nextFence) {
      const expected =
        'version' in condition
          ? [condition.version, '', '']
          : ['', condition.token, codesOf(condition.states)]
      return redis
        .run<Written | [0, Millis, Buffer | null]>(
          bytes.length <= SMALL_RECORD ? SWAP_SMALL : SWAP,
          keys.recordAndIndex(id),
          [id, bytes, dueIn, dropIn, skew(), nextFence ? 1 : 0, ...expected],
        )
        .then(writeReply)
    },

    async get(id) {
      const [now, bytes] = await redis.run<[Millis, Buffer | null]>(GET, [keys.record(id)], [skew()])
      return { now, bytes }
    },

    async renew(items) {
      const replies = await Promise.all(
        items.map(({ id, token, dueIn, dropIn }) =>
          redis.run<number>(RENEW, keys.recordAndIndex(id), [id, token, dueIn, dropIn, skew()]),
        ),
      )
      return replies.map((reply) => reply === 1)
    },

    async due(limit) {
      const now = await ping()
      const range = (index: string) =>
        redis.ask<Buffer[]>('zrangebyscore', [index, '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit])
      const found = (await Promise.all(keys.indexes.map(range))).flatMap(scored)
      const first = found.toSorted((a, b) => a.due - b.due).slice(0, limit)
      const there = await Promise.all(
        first.map(({ id }) => redis.run<number>(DUE, keys.recordAndIndex(id), [id, skew()])),
      )
      return first.filter((_, n) => there[n] === 1).map(({ id }) => id)
    },

    async remove(id, version) {
      const all = [...keys.recordAndIndex(id), keys.history(id)]
      return (await redis.run<number>(REMOVE, all, [id, version, skew()])) === 1
    },

    async list(which, cursor, limit) {
      if (which === 'unresolved') {
        // The first of every shard's index after the cursor, and of these the first.
        const from = placeOf(cursor)
        const found = await Promise.all(keys.indexes.map((index) => placesAfter(redis, index, from, limit)))
        return pageOf(found.flat().sort(inOrder).slice(0, limit), limit)
      }
      if (cursor !== null && !/^\d{1,20}$/.test(cursor)) throw new RangeError('not a cursor of this store')
      // SCAN's own guarantee is the port's: what exists throughout comes at least once.
      const glob = which === 'all' ? keys.glob : keys.globOf(which.beginning)
      const scan = [cursor ?? 0, 'MATCH', glob, 'COUNT', limit]
      const [next, found] = await redis.ask<[Buffer, Buffer[]]>('scan', scan)
      const ids = found.map((key) => keys.idOf(String(key))).filter((id) => id !== null)
      return { ids, next: String(next) === '0' ? null : String(next) }
    },

    ping,

    history: {
      async append(id, notes) {
        const batch = (noting ??= noteTogether())
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
      async read(id) {
        const lines = await redis.run<Buffer[]>(NOTES, [keys.record(id), keys.history(id)], [skew()])
        return lines.map((line) => readNote(String(line)))
      },
    },

    limits: {
      take: (bucket, { count, per }, units) =>
        redis.run(THROTTLE, [keys.bucket(bucket)], [count, per, units, skew()]),
    },

    watch: (id, changed) => channels.watch(id, changed),

    async traits() {
      try {
        return traitsOf(String(await redis.ask('info', [])))
      } catch (error) {
        if (String(error).includes('NOPERM')) return traitsOf(null)
        throw error
      }
    },

    async close() {
      await Promise.all([redis.close(), channels.close()])
    },
  }
}

function writeReply<Found>(reply: Written | [0, Millis, Found]): WriteReply<Found> {
  if (reply[0] === 0) return { done: false, now: reply[1], bytes: reply[2] }
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

async function placesAfter(redis: Connection, index: string, from: Place, limit: number): Promise<Place[]> {
  const places: Place[] = []
  // More than once only if more than `limit` share the cursor's instant.
  for (let offset = 0; ; offset += limit) {
    const range = [index, from.due, '+inf', 'WITHSCORES', 'LIMIT', offset, limit]
    const chunk = scored(await redis.ask<Buffer[]>('zrangebyscore', range))
    places.push(...chunk.filter((place) => inOrder(place, from) > 0))
    if (places.length >= limit || chunk.length < limit) return places
  }
}

/** Pairs of a reply WITHSCORES. */
function scored(reply: Buffer[]): (Place & { readonly id: RecordId })[] {
  const pairs = []
  for (let n = 0; n + 1 < reply.length; n += 2)
    pairs.push({ id: String(reply[n]) as RecordId, due: Number(reply[n + 1]) })
  return pairs
}

/** If the server does not say whether it evicts. */
const UNTOLD = 'routes with profile strict answer 503'
const ACCEPT = 'store.acceptRisk: true accepts the risk'

/** `info`: the reply of `INFO`; null if it was denied. */
export function traitsOf(info: string | null): StoreTraits {
  if (info === null)
    return {
      durable: null,
      evicts: null,
      findings: [
        `The Redis user may not run INFO, so the proxy cannot tell whether the server evicts or loses records, and ${UNTOLD}: ACL SETUSER <user> +info grants it, ${ACCEPT}.`,
      ],
    }
  const fields = new Map<string, string | undefined>()
  for (const line of info.split('\r\n')) {
    const [field = '', value] = line.split(':', 2)
    fields.set(field, value)
  }
  const findings: string[] = []
  const version = fields.get('redis_version') ?? '?'
  if (Number.parseInt(version, 10) < 7)
    findings.push(`Redis ${version} is too old: the scripts need version 7 or later, or Valkey.`)
  if (fields.get('role') === 'slave')
    findings.push('The server is a read-only replica: no key can be claimed on it.')
  if (fields.get('cluster_enabled') === '1')
    findings.push('The server is a node of a cluster: keys of other nodes are refused with MOVED.')
  const aof = fields.get('aof_enabled')
  const durable = aof === '1' ? true : aof === '0' ? false : null
  if (durable === null) findings.push('INFO does not say whether appendonly is on.')
  if (durable === false)
    findings.push('appendonly is off: a crash of Redis loses the records written since its last snapshot.')
  const policy = fields.get('maxmemory_policy') || null
  const evicts = policy === null ? null : policy !== 'noeviction'
  if (evicts === null) findings.push(`INFO does not say what maxmemory-policy is, and ${UNTOLD}: ${ACCEPT}.`)
  if (evicts)
    findings.push(`maxmemory-policy is ${policy}, not noeviction: records may vanish before their time.`)
  return { durable, evicts, findings }
}

/*
 * The layout of keys, fixed for good: a change would orphan live records.
 *
 *   idempotency:<service>:{xx}:r:<id>   the record, a string that expires at dropAt
 *   idempotency:<service>:{xx}:u        the unresolved records of the shard: a sorted set of ids by their due instant
 *   idempotency:<service>:{xx}:c:<id>   no key but a sharded channel: an empty message after each write that ends an attempt
 *   idempotency:<service>:{xx}:h:<id>   the record's history: a list of lines that expires with it
 *   idempotency:<service>:{xx}:n:<id>   a bucket of a rate limit, a string "at debt count" that expires when the bucket is full
 *
 * <service> has letters, digits, `_`, `.` and `-`: it can neither end early nor be a pattern. xx is the first byte of the id in hex.
 * What belongs to an id shares that hash tag, so all of it lives in one slot.
 */
const SHARDS = 256
/** SHA-256 in base64url. */
const ID_LENGTH = 43

export class RedisKeys {
  /** Every shard's index of unresolved records. */
  readonly indexes: readonly string[]
  /** Matches every record. */
  readonly glob: string
  readonly #shards: readonly string[]

  constructor(service: string) {
    const own = `idempotency:${service}:`
    this.#shards = Array.from({ length: SHARDS }, (_, n) => `${own}{${n.toString(16).padStart(2, '0')}}:`)
    this.indexes = this.#shards.map((shard) => `${shard}u`)
    this.glob = `${own}*:r:*`
  }

  record(id: RecordId): string {
    return `${this.#shardOf(id)}r:${id}`
  }

  history(id: RecordId): string {
    return `${this.#shardOf(id)}h:${id}`
  }

  channel(id: RecordId): string {
    return `${this.#shardOf(id)}c:${id}`
  }

  bucket(bucket: string): string {
    return `${this.#shardOf(bucket)}n:${bucket}`
  }

  index(id: RecordId): string {
    return `${this.#shardOf(id)}u`
  }

  recordAndIndex(id: RecordId): string[] {
    return [this.record(id), this.index(id)]
  }

  /** Matches the records whose id starts so. Base64url has no character that is special in a glob. */
  globOf(beginning: string): string {
    return `${this.#shardOf(beginning)}r:${beginning}*`
  }

  /** Null: not the key of a record. */
  idOf(key: string): RecordId | null {
    const id = key.slice(-ID_LENGTH)
    return RECORD_ID.test(id) && this.record(id as RecordId) === key ? (id as RecordId) : null
  }

  /** By the first byte of the id: six bits of its first base64url digit and two of the second. */
  #shardOf(id: string): string {
    return this.#shards[(DIGITS.indexOf(id.charAt(0)) << 2) | (DIGITS.indexOf(id.charAt(1)) >> 4)] as string
  }
}

const DIGITS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_'
