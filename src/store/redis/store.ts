import type { Millis, RecordId, Spans } from '../../core/record.ts'
import { settled } from '../../runtime/scheduling.ts'
import { BODIES_FROM, isClaim, placesDue, SMALL_RECORD, stateCode, U48 } from '../record/codec.ts'
import {
  type Condition,
  type DueKind,
  type DuePosition,
  inOrder,
  type KeptNote,
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
import type { MasterShards, Servers, View } from './cluster.ts'
import { type RedisConnection, repliesMismatch } from './connection.ts'
import { redisEpochs } from './epochs.ts'
import { RedisKeys, type RedisOptions } from './keys.ts'
import type { RespReply } from './resp.ts'
import { serversOf } from './servers.ts'
import { redisTraits, together } from './traits.ts'

/**
 * Resolves after the first attempt to connect, whatever its outcome: the process also starts without Redis.
 * @throws {StoreUnavailable} if only a person can help.
 */
export async function openRedisStore(options: RedisOptions): Promise<Store> {
  const { skew = () => 0, grace = 0, wait = null, onSafe = () => {} } = options
  const keys = new RedisKeys(options.service)
  const servers: Servers = serversOf(options, keys.shards, (ready) => {
    if (ready === undefined) channels.moved()
    else channels.renew(ready)
    batches.forget()
    void epochs?.look()
  })
  const channels = new Channels(options, keys, servers)
  const redis = servers.commands
  const batches = new Batches(options, servers)
  const epochs =
    grace === 0 ? null : redisEpochs(options, keys, servers, new Safety(keys.epochs.length, onSafe))
  const barriers = wait === null ? null : new Barriers(wait, options, keys, servers)
  const close = async (): Promise<void> =>
    void (await Promise.all([barriers?.close(), channels.close(), servers.close()]))

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

  const run = <T>(id: RecordId, head: Buffer, read: ReadResult<T>, more: Partial<Operation<T>> = {}) =>
    batches.run({ shard: keys.shardOf(id), key: keys.record(id), head, read, ...more })

  /** Writes a record; a claim waits for the replicas, if required. */
  const write = <Found extends Buffer | null>(
    id: RecordId,
    head: Buffer,
    bytes: Buffer,
    mayClaim: boolean,
    thoughFull: boolean,
  ): Promise<WriteReply<Found>> => {
    const more = { others: [keys.index(id), keys.epoch(id)], body: bytes, thoughFull }
    const send = (read: ReadResult<WriteReply<Found>>) => run(id, head, read, more)
    if (barriers === null || !mayClaim || !isClaim(bytes)) return send(writeReply)
    return barriers.claim(keys.shardOf(id), bytes, send)
  }
  /** The spans of a record that is to be written, and what is known of its server. */
  const spansOf = (id: RecordId, { dueIn, dropIn }: Spans) =>
    [dueIn, dropIn, epochs?.seen[keys.shardOf(id)] ?? 0] as const

  await servers.open()
  await barriers?.open().catch(async (error: unknown) => {
    await close()
    throw error
  })
  return {
    name: 'redis',

    put(id, bytes, spans, entry = 'claim'): Promise<PutReply> {
      const isLost = entry === 'again' && epochs?.isInGrace === true
      const thoughFull = isLost && bytes.length <= SMALL_RECORD
      const head = headOf('p', ENTRIES[entry], ...spansOf(id, spans))
      return write(id, head, bytes, entry !== 'again', thoughFull)
    },

    swap(id, condition, bytes, spans, nextFence): Promise<SwapReply> {
      const head = headOf('s', nextFence ? ONE : ZERO, ...spansOf(id, spans), ...partsOf(condition))
      return write(id, head, bytes, nextFence, bytes.length <= SMALL_RECORD)
    },

    get: (id) => run(id, GET, (reply, at, now) => ({ now, bytes: reply[at + 1] as Buffer | null })),

    renew: (items) =>
      settled(
        items.map(({ id, token, dueIn, dropIn }) =>
          run(id, headOf('r', dueIn, dropIn, token), isDone, { others: [keys.index(id)], thoughFull: true }),
        ),
        false,
      ),

    async due(limit, of = 'unresolved') {
      const parts = await servers.parts()
      const found = parts.map((part) => dueAt(part, limit, of))
      const all = (await settled(found, [])).flat()
      const first = all.toSorted((a, b) => a.due - b.due).slice(0, limit)
      const exists = await settled(
        first.map(({ id }) => run(id, DUE, isDone, { others: [keys.index(id)] })),
        false,
      )
      return first.filter((_, n) => exists[n]).map(({ id }) => id)
    },

    remove: (id, version) =>
      run(id, headOf('d', version), isDone, { others: [keys.index(id), keys.history(id)] }),

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
      const [view, n, at] = scanPlaceOf(cursor, before)
      const server = before.servers[n] as RedisConnection
      // The port's guarantee is SCAN's own: what exists throughout comes at least once.
      const [next, found] = await server.ask('scan', [at, 'MATCH', glob, 'COUNT', limit], scanned)
      const ids = found.map((key) => keys.idOf(key)).filter((id) => id !== null)
      return {
        // The reply to another SCAN must not lead an operator to another record.
        ids: ids.filter((id) => id.startsWith(beginning)),
        next: cursorOf([view, n, next], await look()),
      }
    },

    ping: async () => (await servers.askAnyone('time', timeOf)) + skew(),

    history: {
      append(id, notes) {
        const lines = notes.map(
          ({ tag, count, firstAgo, lastAgo, text }) =>
            `${tag} ${count} ${Math.round(firstAgo)} ${Math.round(lastAgo)} ${text}\n`,
        )
        return run(id, NOTE, isDone, { others: [keys.history(id)], body: Buffer.from(lines.join('')) })
      },
      read: (id) => run(id, NOTES, linesOf, { others: [keys.history(id)] }),
    },

    limits: {
      take(bucket, { count, per }, units) {
        const [shard, key] = [keys.shardOf(bucket), keys.bucket(bucket)]
        const head = headOf('t', count, per, Buffer.of(units))
        return batches.run({ shard, key, head, read: (reply, at) => reply[at + 1] as Millis })
      },
    },

    watch: (id, changed) => channels.watch(id, changed),

    async traits() {
      const parts = await servers.parts()
      const all = parts.map(async (part) => {
        const info = await part.server.ask('info', [], textOf).catch(nullIfDenied)
        const { refusals, ...traits } = redisTraits(info, servers.isCluster, wait)
        return {
          name: part.name,
          ...traits,
          refusals: [...refusals, ...((await barriers?.check(part)) ?? [])],
        }
      })
      // A server that is down promises nothing: its keys are refused.
      const up = (await settled<Awaited<(typeof all)[0]> | null>(all, null)).filter((one) => one !== null)
      const topology = servers.topology()
      return { ...together(up, parts.length - up.length), ...(topology === null ? {} : { topology }) }
    },

    async close() {
      epochs?.close()
      batches.flush()
      await close()
    },
  }
}

/* The heads of operations, and their results: see lua/. */

const [GET, DUE, NOTE, NOTES] = [headOf('g'), headOf('u'), headOf('n'), headOf('h')]
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

function linesOf(reply: readonly RespReply[], at: number): KeptNote[] {
  const count = reply[at + 1] as number
  return (reply.slice(at + 2, at + 2 + count) as Buffer[]).map((line) => readNote(String(line)))
}

function nullIfDenied(error: Error): null {
  if (error.message.includes('NOPERM')) return null
  throw error
}

/**
 * How far a scan of all servers has come: the {@link View} in which it began, the server, its own cursor. Once slots have moved, it starts
 * over: entries may come twice; none is missed.
 */
type ScanPlace = readonly [view: string, server: number, cursor: string]

/** @throws {RangeError} if {@link cursorOf} did not make the cursor. */
function scanPlaceOf(text: string | null, { id, servers }: View): ScanPlace {
  const [, view = '', server = 0, cursor] =
    /^(?:([0-9a-f]{8})\.(\d{1,4})\.)?(\d{1,20})$/.exec(text ?? '0') ?? []
  if (cursor !== undefined && view !== id) return [id, 0, '0']
  if (cursor === undefined || Number(server) >= servers.length)
    throw new RangeError('not a cursor of this store')
  return [view, Number(server), cursor]
}

/** Null: everything has been seen. */
function cursorOf([view, server, cursor]: ScanPlace, now: View): string | null {
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
