import { randomBytes } from 'node:crypto'
import type { Millis, RecordId } from '../core/record.ts'
import { KeyedMutex, settled } from '../runtime/scheduling.ts'
import { MAX_U48 } from './binary.ts'
import {
  BODIES_FROM,
  endsAttempt,
  indexPlace,
  mayRenew,
  meets,
  nextStamps,
  placesDue,
  prolongLease,
  readStamps,
} from './codec.ts'
import {
  type AttributeValue,
  Client,
  type ClientOptions,
  type Clock,
  ConditionFailed,
  type Item,
  NoTable,
  type OperationInput,
  type OperationOutput,
  ServerClock,
  tableTraits,
} from './dynamodb-client.ts'
import {
  binary,
  bucketItem,
  bucketOf,
  bytesIn,
  counting,
  cursorOf,
  expected,
  expectedValues,
  expiry,
  historyLines,
  INDEX,
  INDEX_PARTS,
  instantKey,
  isThere,
  keyOf,
  number,
  numberAttribute,
  numbered,
  OPTIONAL,
  partOf,
  partsOf,
  placeIn,
  placeKey,
  REMOVED,
  recordPrefix,
  stamped,
  stampOf,
  text,
  textIn,
  update,
  valued,
  wrongWith,
} from './dynamodb-layout.ts'
import {
  CorruptRecord,
  type DuePosition,
  inOrder,
  type PutReply,
  pageOf,
  parseCursor,
  type Renewal,
  responsesOfEach,
  type Store,
  StoreUnavailable,
  type SwapReply,
} from './register.ts'
import { drawFromBucket, noted, readNote, Watchers } from './side-ports.ts'

/** A refused claim is charged by the size of the existing record. */
const INLINE = 700
/** An item holds at most 400 KB. */
const CHUNK = 390 * 1024
/** Whatever an item says: no record has more. */
const MOST_CHUNKS = 10_000
/** Attempts at a write while other writers of the item win. */
const TRIES = 100

export interface DynamoDbOptions extends Pick<ClientOptions, 'timeoutMs' | 'onEvent'> {
  /** `dynamodb://table?region=…&endpoint=…` */
  readonly url: string
  /** Hides the records of other services in the table. */
  readonly service: string
  /** Lets tests shift the store's clock. */
  readonly clock?: Clock
}

/** The parts of a valid `store.url` (`config/urls.ts`). */
function addressOf(url: string) {
  const [table = '', query = ''] = url.slice('dynamodb://'.length).split('?')
  return { table, where: Object.fromEntries(new URLSearchParams(query)) }
}

/**
 * Resolves after the first attempt to describe the table, whatever its outcome: the process also starts without DynamoDB.
 * @throws {StoreUnavailable} if only a person can fix the cause: no SDK, no such table, or an uncertain clock.
 */
export async function openDynamoDbStore(options: DynamoDbOptions): Promise<Store> {
  const { service, onEvent } = options
  const clock = options.clock ?? new ServerClock()
  const address = addressOf(options.url)
  const client = await Client.load({ ...address, timeoutMs: options.timeoutMs, clock, onEvent })
  try {
    const table = await client.describe().catch((error: StoreUnavailable) => {
      if (error instanceof NoTable) return null
      onEvent('error', error.message)
      return undefined
    })
    const why = table === undefined ? null : wrongWith(table)
    if (why !== null)
      throw new StoreUnavailable(
        `cannot use the DynamoDB store: ${why} ${address.table}; docs/dynamodb.md has the command that creates it`,
        false,
      )
    if (table !== undefined) clock.latest()
  } catch (error) {
    client.close()
    throw error
  }
  const watchers = new Watchers()
  /** By bucket: writes of one process do not conflict. */
  const locks = new KeyedMutex()
  const prefix = `${service}/`

  const read = async (key: Item): Promise<Item | null> =>
    (await client.run('GetItem', { Key: key, ConsistentRead: true })).Item ?? null

  /** The write's answer, or the item that prevented it; null: there is none. */
  const write = async (
    operation: 'PutItem' | 'UpdateItem' | 'DeleteItem',
    key: Item,
    input: OperationInput,
  ): Promise<{ readonly answer: OperationOutput } | { readonly found: Item | null }> => {
    try {
      const wanted = operation === 'PutItem' ? {} : { Key: key }
      const fast = { ReturnValuesOnConditionCheckFailure: 'ALL_OLD' }
      return { answer: await client.run(operation, { ...wanted, ...fast, ...input }) }
    } catch (error) {
      if (!(error instanceof ConditionFailed)) throw error
      return { found: error.item ?? (await read(key)) }
    }
  }

  /** Repeats the change on the current item until no other writer intervenes. `change` returns null if the item no longer needs it. */
  const again = async <Done>(
    first: Item | null,
    change: (found: Item | null) => Promise<{ readonly done: Done } | { readonly found: Item | null }>,
  ): Promise<Done> => {
    let found = first
    for (let tries = 0; tries < TRIES; tries++) {
      const reply = await change(found)
      if ('done' in reply) return reply.done
      found = reply.found
    }
    throw new StoreUnavailable(`DynamoDB: ${TRIES} other writes of the same item came first`, false)
  }

  const recordKey = (id: RecordId): Item => ({ pk: text(prefix + id.slice(0, 2)), sk: text(id) })
  const bucketKey = (name: string): Item => ({ pk: text(prefix + name), sk: text('bucket') })
  const chunkKey = (id: RecordId, name: string, n: number): Item => ({
    pk: text(`${prefix}${id}/${name}/${n}`),
    sk: text('chunk'),
  })
  const chunkKeys = (id: RecordId, item: Item): Item[] =>
    item['q'] === undefined
      ? []
      : Array.from({ length: numberAttribute(item, 'k', MOST_CHUNKS) }, (_, n) =>
          chunkKey(id, textIn(item, 'q'), n),
        )

  /**
   * Attributes of a payload. Long payloads are first written as chunks, under a new name, so that no other record can point to them.
   */
  const keep = async (id: RecordId, payload: Buffer, dropIn: Millis): Promise<Item> => {
    if (payload.length === 0) return {}
    if (payload.length <= INLINE) return { p: binary(payload) }
    const name = randomBytes(9).toString('base64url')
    const count = Math.ceil(payload.length / CHUNK)
    const e = expiry(clock.latest() + dropIn)
    try {
      await Promise.all(
        Array.from({ length: count }, (_, n) => {
          const p = binary(payload.subarray(n * CHUNK, (n + 1) * CHUNK))
          return client.run('PutItem', { Item: { ...chunkKey(id, name, n), p, e } })
        }),
      )
    } catch (error) {
      // Nothing of the record itself has been written.
      throw new StoreUnavailable((error as Error).message, false, { cause: error })
    }
    return { q: text(name), k: number(count) }
  }

  /** Null: some of its chunks are gone. */
  const payloadOf = async (id: RecordId, item: Item): Promise<Uint8Array[] | null> => {
    const chunks = await Promise.all(chunkKeys(id, item).map(read))
    const found = chunks.filter((chunk) => chunk !== null)
    if (found.length < chunks.length) return null
    return [item, ...found].map((one) => bytesIn(one, 'p'))
  }

  /** Deletes the chunks of a replaced item. Any left over expire, and those of one that does not say which they are. */
  const forget = async (id: RecordId, item: Item = {}): Promise<void> => {
    let keys: Item[] = []
    try {
      keys = chunkKeys(id, item)
    } catch {
      return
    }
    await Promise.allSettled(keys.map((Key) => client.run('DeleteItem', { Key })))
  }

  /** The payload of `item`, or of the item that has replaced it. */
  const recordOf = async (id: RecordId, item: Item | null): Promise<Buffer | null> =>
    again(item, async (found) => {
      if (!isThere(found, clock.earliest())) return { done: null }
      const payload = await payloadOf(id, found)
      if (payload !== null) return { done: Buffer.concat([recordPrefix(found), ...payload]) }
      const next = await read(recordKey(id))
      if (next !== null && textIn(next, 'q') === textIn(found, 'q'))
        throw new CorruptRecord('DynamoDB has lost a part of the stored response')
      return { found: next }
    })

  const indexOf = (id: RecordId, bytes: Buffer, due: Millis): Item => {
    const place = indexPlace(bytes, due)
    return place === null ? {} : { u: text(prefix + partOf(id)), w: text(placeKey({ due: place, id })) }
  }

  const renewed = async ({ id, token, dueIn, dropIn }: Renewal): Promise<boolean> =>
    again(await read(recordKey(id)), async (found) => {
      if (!isThere(found, clock.earliest())) return { done: false }
      const bytes = recordPrefix(found)
      const values = { ':was': number(readStamps(bytes).version) }
      if (!mayRenew(bytes, token)) return { done: false }
      const stamps = prolongLease(bytes, clock.latest(), { dueIn, dropIn })
      const { fields } = partsOf(bytes)
      const set = { ...fields, ...stamped(stamps), ...numbered(stamps), ...indexOf(id, bytes, stamps.due) }
      const written = await write('UpdateItem', recordKey(id), update(set, [], [], 'v = :was', values))
      return 'answer' in written ? { done: true } : written
    })

  /** From one partition of the index, in order: keys from `first` to `last`. */
  const placesIn = async (u: string, first: string, last: string, limit: number): Promise<DuePosition[]> => {
    const found: DuePosition[] = []
    let from: Item | undefined
    do {
      const { Items = [], LastEvaluatedKey }: OperationOutput = await client.run('Query', {
        IndexName: INDEX,
        KeyConditionExpression: 'u = :u AND w BETWEEN :first AND :last',
        // DynamoDB takes days to remove them.
        FilterExpression: 'x > :now',
        ...valued({
          ':u': text(u),
          ':first': text(first),
          ':last': text(last),
          ':now': number(clock.earliest()),
        }),
        ...(from === undefined ? {} : { ExclusiveStartKey: from }),
        Limit: limit,
      })
      for (const item of Items) found.push(placeIn(textIn(item, 'w')))
      from = LastEvaluatedKey
    } while (from !== undefined && found.length < limit)
    return found
  }
  const indexed = async (
    first: string,
    last: string,
    limit: number,
    ofEach = limit,
  ): Promise<DuePosition[]> => {
    const parts = Array.from({ length: INDEX_PARTS }, (_, n) =>
      placesIn(`${prefix}${n}`, first, last, ofEach),
    )
    return (await Promise.all(parts)).flat().toSorted(inOrder).slice(0, limit)
  }

  return {
    name: 'dynamodb',

    async put(id, bytes, spans) {
      const { fields, payload } = partsOf(bytes)
      const kept = await keep(id, payload, spans.dropIn)
      const reply = await again<PutReply>(null, async (dead) => {
        // Remains of an expired or removed record may exist: regardless of the clocks, this record comes after it.
        const most = MAX_U48 - spans.dropIn - 1
        const least =
          dead === null ? 0 : Math.max(numberAttribute(dead, 'v', most), numberAttribute(dead, 'f', most)) + 1
        const now = Math.max(clock.latest(), least)
        const stamps = nextStamps(bytes, null, now, spans, false)
        const Item = {
          ...recordKey(id),
          ...fields,
          ...kept,
          ...stamped(stamps),
          ...numbered(stamps),
          ...indexOf(id, bytes, stamps.due),
          c: number(stamps.createdAt),
        }
        const written = await write('PutItem', recordKey(id), {
          Item,
          ConditionExpression: 'attribute_not_exists(v) OR (x <= :now AND v < :v AND f < :least)',
          ...valued({
            ':now': number(clock.earliest()),
            ':v': number(now),
            // A given fence belongs to an attempt that was made.
            ':least': number(stamps.fence === now ? now : Number.MAX_SAFE_INTEGER),
          }),
        })
        if ('answer' in written) return { done: { done: true, now, stamp: stampOf(stamps) } }
        const existing = await recordOf(id, written.found)
        if (existing !== null) return { done: { done: false, now: clock.earliest(), bytes: existing } }
        return { found: written.found }
      })
      if (reply.done && endsAttempt(bytes)) watchers.tell(id)
      return reply
    },

    async swap(id, condition, bytes, spans, nextFence) {
      const { fields, payload } = partsOf(bytes)
      const kept = await keep(id, payload, spans.dropIn)
      const reply = await again<SwapReply>(null, async (found) => {
        const now = clock.latest()
        const time = { ':now': number(clock.earliest()) }
        // Found: it meets the condition, but its fence is below the given one.
        const old = found === null ? null : readStamps(recordPrefix(found))
        const next = nextStamps(bytes, old, now, spans, nextFence)
        const set = { ...fields, ...kept, ...stamped(next), ...indexOf(id, bytes, next.due) }
        const written = await write(
          'UpdateItem',
          recordKey(id),
          old === null
            ? update(
                set,
                ['v = v + :one', 'f = f + :step'],
                OPTIONAL,
                `${expected(condition)} AND n = :schema AND x > :now AND f >= :least`,
                { ...time, ...expectedValues(condition), ...counting(bytes, nextFence) },
              )
            : update({ ...set, ...numbered(next) }, [], OPTIONAL, 'v = :was AND x > :now', {
                ...time,
                ':was': number(old.version),
              }),
        )
        if ('answer' in written) {
          const { Attributes } = written.answer
          if (Attributes === undefined)
            throw new StoreUnavailable('DynamoDB does not say what it has replaced', true)
          const before = readStamps(recordPrefix(Attributes))
          const stamp = stampOf(nextStamps(bytes, before, now, spans, nextFence))
          await forget(id, Attributes)
          return { done: { done: true, now, stamp } }
        }
        const record = await recordOf(id, written.found)
        if (record !== null && meets(record, condition)) return { found: written.found }
        return { done: { done: false, now: clock.earliest(), bytes: record } }
      })
      if (reply.done && endsAttempt(bytes)) watchers.tell(id)
      return reply
    },

    async get(id) {
      const bytes = await recordOf(id, await read(recordKey(id)))
      return { now: clock.earliest(), bytes }
    },

    async stored(id) {
      const item = await read(recordKey(id))
      const now = clock.earliest()
      return { now, bytes: isThere(item, now) ? recordPrefix(item) : null }
    },

    // A busy item must not keep the others from being renewed.
    renew: (items) => settled(items.map(renewed), false),

    async due(limit, of = 'unresolved') {
      const { from, to } = placesDue(of, clock.earliest())
      const ofEach = of === 'bodies' ? responsesOfEach(limit, INDEX_PARTS) : limit
      const places = await indexed(instantKey(from), instantKey(to + 1), limit, ofEach)
      return places.map(({ id }) => id as RecordId)
    },

    async remove(id, version) {
      const left = { x: number(0), e: expiry(clock.latest()) }
      const values = { ':was': number(version), ':now': number(clock.earliest()) }
      const written = await write(
        'UpdateItem',
        recordKey(id),
        update(left, [], REMOVED, 'v = :was AND x > :now', values),
      )
      if (!('answer' in written)) return false
      watchers.tell(id)
      await forget(id, written.answer.Attributes)
      return true
    },

    async list(which, cursor, limit) {
      if (which === 'unresolved') {
        // A blank: after this place, and before any other.
        const after = `${placeKey(parseCursor(cursor))} `
        return pageOf(await indexed(after, instantKey(BODIES_FROM), limit), limit)
      }
      const values = { ':now': number(clock.earliest()) }
      const input =
        which === 'all'
          ? {
              FilterExpression: 'begins_with(pk, :pk) AND x > :now',
              ...valued({ ...values, ':pk': text(prefix) }),
            }
          : {
              KeyConditionExpression: 'pk = :pk AND begins_with(sk, :sk)',
              FilterExpression: 'x > :now',
              ...valued({
                ...values,
                ':pk': text(prefix + which.beginning.slice(0, 2)),
                ':sk': text(which.beginning),
              }),
            }
      const { Items = [], LastEvaluatedKey } = await client.run(which === 'all' ? 'Scan' : 'Query', {
        ...input,
        ...(cursor === null ? {} : { ExclusiveStartKey: keyOf(cursor) }),
        ConsistentRead: true,
        ProjectionExpression: 'sk',
        Limit: limit,
      })
      return {
        ids: Items.map((item) => textIn(item, 'sk') as RecordId),
        next: LastEvaluatedKey === undefined ? null : cursorOf(LastEvaluatedKey),
      }
    },

    async ping() {
      await read({ pk: text(prefix), sk: text('ping') })
      return Math.round((clock.earliest() + clock.latest()) / 2)
    },

    history: {
      async append(id, notes) {
        return again(await read(recordKey(id)), async (found) => {
          if (!isThere(found, clock.earliest())) return { done: false }
          const { h, c } = found
          const lines = noted(historyLines(found), notes, clock.earliest()).join('\n')
          const values = { ':was': c as AttributeValue, ...(h === undefined ? {} : { ':before': h }) }
          const before = h === undefined ? 'attribute_not_exists(h)' : 'h = :before'
          const written = await write(
            'UpdateItem',
            recordKey(id),
            update({ h: text(lines) }, [], [], `c = :was AND ${before}`, values),
          )
          return 'answer' in written ? { done: true } : written
        })
      },
      async read(id) {
        const found = await read(recordKey(id))
        return isThere(found, clock.earliest()) ? historyLines(found).map(readNote) : []
      },
    },

    limits: {
      take: (name, rate, units) =>
        locks.run(name, async () => {
          const Key = bucketKey(name)
          return again(await read(Key), async (found) => {
            const existing = found === null ? null : bucketOf(found)
            const { wait, bucket } = drawFromBucket(existing, clock.earliest(), rate, units)
            if (wait > 0 || (bucket === null && found === null)) return { done: wait }
            const condition =
              found === null
                ? { ConditionExpression: 'attribute_not_exists(a)' }
                : {
                    ConditionExpression: 'a = :a AND t = :t AND r = :r',
                    ...valued({ ':a': found['a'], ':t': found['t'], ':r': found['r'] } as Item),
                  }
            const written =
              bucket === null
                ? await write('DeleteItem', Key, condition)
                : await write('PutItem', Key, { Item: { ...Key, ...bucketItem(bucket) }, ...condition })
            return 'answer' in written ? { done: wait } : written
          })
        }),
    },

    watch: async (id, changed) => watchers.add(id, changed),

    async traits() {
      const table = await client.describe()
      const ttl = await client.run('DescribeTimeToLive', {})
      return tableTraits(table, ttl.TimeToLiveDescription ?? {})
    },

    async close() {
      client.close()
    },
  }
}
