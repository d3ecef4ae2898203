import type { RecordId } from '../../core/record.ts'
import { KeyedMutex, settled } from '../../runtime/scheduling.ts'
import { MAX_U48 } from '../record/binary.ts'
import {
  BODIES_FROM,
  endsAttempt,
  mayRenew,
  meets,
  nextStamps,
  placesDue,
  prolongLease,
  readStamps,
} from '../record/codec.ts'
import {
  type PutReply,
  pageOf,
  parseCursor,
  type Renewal,
  responsesOfEach,
  type Store,
  StoreUnavailable,
  type SwapReply,
} from '../register.ts'
import { drawFromBucket, noted, readNote, Watchers } from '../side-ports.ts'
import {
  type AttributeValue,
  Client,
  type ClientOptions,
  type Clock,
  type Item,
  NoTable,
  ServerClock,
  tableTraits,
} from './client.ts'
import { Items } from './items.ts'
import {
  bucketItem,
  bucketOf,
  counting,
  cursorOf,
  expected,
  expectedValues,
  expiry,
  historyLines,
  INDEX_PARTS,
  instantKey,
  isThere,
  keyOf,
  number,
  numberAttribute,
  numbered,
  OPTIONAL,
  partsOf,
  placeKey,
  REMOVED,
  recordPrefix,
  stamped,
  stampOf,
  text,
  textIn,
  valued,
  wrongWith,
} from './layout.ts'

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
 * @throws {StoreUnavailable} if only an operator can fix the cause: no SDK, no such table, or an uncertain clock.
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
  return new DynamoDb(client, clock, `${service}/`)
}

class DynamoDb implements Store {
  readonly name = 'dynamodb'
  readonly #client: Client
  readonly #clock: Clock
  readonly #prefix: string
  readonly #items: Items
  readonly #watchers = new Watchers()
  /** By bucket: writes of one process do not conflict. */
  readonly #locks = new KeyedMutex()

  constructor(client: Client, clock: Clock, prefix: string) {
    this.#client = client
    this.#clock = clock
    this.#prefix = prefix
    this.#items = new Items(client, clock, prefix)
  }

  readonly put: Store['put'] = async (id, bytes, spans) => {
    const [items, clock] = [this.#items, this.#clock]
    const { fields, payload } = partsOf(bytes)
    const kept = await items.keep(id, payload, spans.dropIn)
    const reply = await items.again<PutReply>(null, async (dead) => {
      // Remains of an expired or removed record may exist: regardless of the clocks, this record comes after it.
      const most = MAX_U48 - spans.dropIn - 1
      const least =
        dead === null ? 0 : Math.max(numberAttribute(dead, 'v', most), numberAttribute(dead, 'f', most)) + 1
      const now = Math.max(clock.latest(), least)
      const stamps = nextStamps(bytes, null, now, spans, false)
      const written = await items.write('PutItem', items.recordKey(id), {
        Item: {
          ...items.recordKey(id),
          ...fields,
          ...kept,
          ...stamped(stamps),
          ...numbered(stamps),
          ...items.indexOf(id, bytes, stamps.due),
          c: number(stamps.createdAt),
        },
        ConditionExpression: 'attribute_not_exists(v) OR (x <= :now AND v < :v AND f < :least)',
        ...valued({
          ':now': number(clock.earliest()),
          ':v': number(now),
          // A fence given by the caller belongs to an earlier attempt.
          ':least': number(stamps.fence === now ? now : Number.MAX_SAFE_INTEGER),
        }),
      })
      if ('answer' in written) return { done: { done: true, now, stamp: stampOf(stamps) } }
      const existing = await items.recordOf(id, written.found)
      if (existing !== null) return { done: { done: false, now: clock.earliest(), bytes: existing } }
      return { found: written.found }
    })
    if (reply.done && endsAttempt(bytes)) this.#watchers.tell(id)
    return reply
  }

  readonly swap: Store['swap'] = async (id, condition, bytes, spans, nextFence) => {
    const { fields, payload } = partsOf(bytes)
    const kept = await this.#items.keep(id, payload, spans.dropIn)
    const reply = await this.#items.again<SwapReply>(null, async (found) => {
      const now = this.#clock.latest()
      const time = { ':now': number(this.#clock.earliest()) }
      // Found: it meets the condition, but its fence is below the given one.
      const old = found === null ? null : readStamps(recordPrefix(found))
      const next = nextStamps(bytes, old, now, spans, nextFence)
      const set = { ...fields, ...kept, ...stamped(next), ...this.#items.indexOf(id, bytes, next.due) }
      const written = await (old === null
        ? this.#items.update(
            id,
            set,
            ['v = v + :one', 'f = f + :step'],
            OPTIONAL,
            `${expected(condition)} AND n = :schema AND x > :now AND f >= :least`,
            { ...time, ...expectedValues(condition), ...counting(bytes, nextFence) },
          )
        : this.#items.update(id, { ...set, ...numbered(next) }, [], OPTIONAL, 'v = :was AND x > :now', {
            ...time,
            ':was': number(old.version),
          }))
      if ('answer' in written) {
        const { Attributes } = written.answer
        if (Attributes === undefined)
          throw new StoreUnavailable('DynamoDB does not say what it has replaced', true)
        const before = readStamps(recordPrefix(Attributes))
        const stamp = stampOf(nextStamps(bytes, before, now, spans, nextFence))
        await this.#items.forget(id, Attributes)
        return { done: { done: true, now, stamp } }
      }
      const record = await this.#items.recordOf(id, written.found)
      if (record !== null && meets(record, condition)) return { found: written.found }
      return { done: { done: false, now: this.#clock.earliest(), bytes: record } }
    })
    if (reply.done && endsAttempt(bytes)) this.#watchers.tell(id)
    return reply
  }

  readonly get: Store['get'] = async (id) => {
    const bytes = await this.#items.recordOf(id, await this.#items.find(id))
    return { now: this.#clock.earliest(), bytes }
  }

  readonly stored: Store['get'] = async (id) => {
    const item = await this.#items.find(id)
    const now = this.#clock.earliest()
    return { now, bytes: isThere(item, now) ? recordPrefix(item) : null }
  }

  // A busy item must not keep the others from being renewed.
  readonly renew: Store['renew'] = (items) =>
    settled(
      items.map((one) => this.#renewed(one)),
      false,
    )

  readonly due: Store['due'] = async (limit, of = 'unresolved') => {
    const { from, to } = placesDue(of, this.#clock.earliest())
    const ofEach = of === 'bodies' ? responsesOfEach(limit, INDEX_PARTS) : limit
    const places = await this.#items.indexed(instantKey(from), instantKey(to + 1), limit, ofEach)
    return places.map(({ id }) => id as RecordId)
  }

  readonly remove: Store['remove'] = async (id, version) => {
    const left = { x: number(0), e: expiry(this.#clock.latest()) }
    const values = { ':was': number(version), ':now': number(this.#clock.earliest()) }
    const written = await this.#items.update(id, left, [], REMOVED, 'v = :was AND x > :now', values)
    if (!('answer' in written)) return false
    this.#watchers.tell(id)
    await this.#items.forget(id, written.answer.Attributes)
    return true
  }

  readonly list: Store['list'] = async (which, cursor, limit) => {
    if (which === 'unresolved') {
      // The space sorts after this place and before any other.
      const after = `${placeKey(parseCursor(cursor))} `
      return pageOf(await this.#items.indexed(after, instantKey(BODIES_FROM), limit), limit)
    }
    const values = { ':now': number(this.#clock.earliest()) }
    const input =
      which === 'all'
        ? {
            FilterExpression: 'begins_with(pk, :pk) AND x > :now',
            ...valued({ ...values, ':pk': text(this.#prefix) }),
          }
        : {
            KeyConditionExpression: 'pk = :pk AND begins_with(sk, :sk)',
            FilterExpression: 'x > :now',
            ...valued({
              ...values,
              ':pk': text(this.#prefix + which.beginning.slice(0, 2)),
              ':sk': text(which.beginning),
            }),
          }
    const { Items = [], LastEvaluatedKey } = await this.#client.run(which === 'all' ? 'Scan' : 'Query', {
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
  }

  readonly ping: Store['ping'] = async () => {
    await this.#items.read({ pk: text(this.#prefix), sk: text('ping') })
    return Math.round((this.#clock.earliest() + this.#clock.latest()) / 2)
  }

  readonly history: Store['history'] = {
    append: async (id, notes) => {
      return this.#items.again(await this.#items.find(id), async (found) => {
        if (!isThere(found, this.#clock.earliest())) return { done: false }
        const { h, c } = found
        const lines = noted(historyLines(found), notes, this.#clock.earliest()).join('\n')
        const values = { ':was': c as AttributeValue, ...(h === undefined ? {} : { ':before': h }) }
        const before = h === undefined ? 'attribute_not_exists(h)' : 'h = :before'
        const written = await this.#items.update(
          id,
          { h: text(lines) },
          [],
          [],
          `c = :was AND ${before}`,
          values,
        )
        return 'answer' in written ? { done: true } : written
      })
    },
    read: async (id) => {
      const found = await this.#items.find(id)
      return isThere(found, this.#clock.earliest()) ? historyLines(found).map(readNote) : []
    },
  }

  readonly limits: Store['limits'] = {
    take: (name, rate, units) =>
      this.#locks.run(name, async () => {
        const Key = this.#items.bucketKey(name)
        return this.#items.again(await this.#items.read(Key), async (found) => {
          const existing = found === null ? null : bucketOf(found)
          const { wait, bucket } = drawFromBucket(existing, this.#clock.earliest(), rate, units)
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
              ? await this.#items.write('DeleteItem', Key, condition)
              : await this.#items.write('PutItem', Key, {
                  Item: { ...Key, ...bucketItem(bucket) },
                  ...condition,
                })
          return 'answer' in written ? { done: wait } : written
        })
      }),
  }

  readonly watch: Store['watch'] = async (id, changed) => this.#watchers.add(id, changed)

  readonly traits: Store['traits'] = async () => {
    const table = await this.#client.describe()
    const ttl = await this.#client.run('DescribeTimeToLive', {})
    return tableTraits(table, ttl.TimeToLiveDescription ?? {})
  }

  readonly close: Store['close'] = async () => this.#client.close()

  async #renewed({ id, token, dueIn, dropIn }: Renewal): Promise<boolean> {
    return this.#items.again(await this.#items.find(id), async (found) => {
      if (!isThere(found, this.#clock.earliest())) return { done: false }
      const bytes = recordPrefix(found)
      const values = { ':was': number(readStamps(bytes).version) }
      if (!mayRenew(bytes, token)) return { done: false }
      const stamps = prolongLease(bytes, this.#clock.latest(), { dueIn, dropIn })
      const { fields } = partsOf(bytes)
      const set = {
        ...fields,
        ...stamped(stamps),
        ...numbered(stamps),
        ...this.#items.indexOf(id, bytes, stamps.due),
      }
      const written = await this.#items.update(id, set, [], [], 'v = :was', values)
      return 'answer' in written ? { done: true } : written
    })
  }
}
