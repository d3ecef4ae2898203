import { randomBytes } from 'node:crypto'
import type { Millis, RecordId } from '../../core/record.ts'
import { indexPlace } from '../record/codec.ts'
import { CorruptRecord, type DuePosition, inOrder, StoreUnavailable } from '../register.ts'
import {
  type Client,
  type Clock,
  ConditionFailed,
  type Item,
  type OperationInput,
  type OperationOutput,
} from './client.ts'
import {
  binary,
  bytesIn,
  expiry,
  INDEX,
  INDEX_PARTS,
  isThere,
  number,
  numberAttribute,
  partOf,
  placeIn,
  placeKey,
  recordPrefix,
  text,
  textIn,
  update,
  valued,
} from './layout.ts'

/** A refused claim is charged by the size of the existing record. */
const INLINE = 700
/** An item holds at most 400 KB. */
const CHUNK = 390 * 1024
/** Upper bound, whatever an item says. */
const MAX_CHUNKS = 10_000
/** Attempts at a write while other writers of the item win. */
const TRIES = 100

/** The write's answer, or the item that prevented it; null: no item exists. */
type Written = { readonly answer: OperationOutput } | { readonly found: Item | null }

/** The items of one service: records with their payloads, and the index. */
export class Items {
  readonly #client: Client
  readonly #clock: Clock
  readonly #prefix: string

  constructor(client: Client, clock: Clock, prefix: string) {
    this.#client = client
    this.#clock = clock
    this.#prefix = prefix
  }

  recordKey(id: RecordId): Item {
    return { pk: text(this.#prefix + id.slice(0, 2)), sk: text(id) }
  }

  bucketKey(name: string): Item {
    return { pk: text(this.#prefix + name), sk: text('bucket') }
  }

  readonly read = async (key: Item): Promise<Item | null> =>
    (await this.#client.run('GetItem', { Key: key, ConsistentRead: true })).Item ?? null

  find(id: RecordId): Promise<Item | null> {
    return this.read(this.recordKey(id))
  }

  /** See {@link update}. */
  update(id: RecordId, ...args: Parameters<typeof update>): Promise<Written> {
    return this.write('UpdateItem', this.recordKey(id), update(...args))
  }

  async write(
    operation: 'PutItem' | 'UpdateItem' | 'DeleteItem',
    key: Item,
    input: OperationInput,
  ): Promise<Written> {
    try {
      const wanted = operation === 'PutItem' ? {} : { Key: key }
      const fast = { ReturnValuesOnConditionCheckFailure: 'ALL_OLD' }
      return { answer: await this.#client.run(operation, { ...wanted, ...fast, ...input }) }
    } catch (error) {
      if (!(error instanceof ConditionFailed)) throw error
      return { found: error.item ?? (await this.read(key)) }
    }
  }

  /** Repeats the change on the current item until no other writer intervenes. */
  async again<Done>(
    first: Item | null,
    change: (found: Item | null) => Promise<{ readonly done: Done } | { readonly found: Item | null }>,
  ): Promise<Done> {
    let found = first
    for (let tries = 0; tries < TRIES; tries++) {
      const reply = await change(found)
      if ('done' in reply) return reply.done
      found = reply.found
    }
    throw new StoreUnavailable(`DynamoDB: ${TRIES} other writes of the same item came first`, false)
  }

  /** Attributes of a payload. Long ones are first written as chunks, under a new name, so that no other record can point to them. */
  async keep(id: RecordId, payload: Buffer, dropIn: Millis): Promise<Item> {
    if (payload.length === 0) return {}
    if (payload.length <= INLINE) return { p: binary(payload) }
    const name = randomBytes(9).toString('base64url')
    const count = Math.ceil(payload.length / CHUNK)
    const e = expiry(this.#clock.latest() + dropIn)
    try {
      await Promise.all(
        Array.from({ length: count }, (_, n) => {
          const p = binary(payload.subarray(n * CHUNK, (n + 1) * CHUNK))
          return this.#client.run('PutItem', { Item: { ...this.#chunkKey(id, name, n), p, e } })
        }),
      )
    } catch (error) {
      // Nothing of the record itself has been written.
      throw new StoreUnavailable((error as Error).message, false, { cause: error })
    }
    return { q: text(name), k: number(count) }
  }

  /** Deletes the chunks of a replaced item. Chunks left over, or not named by the item, expire. */
  async forget(id: RecordId, item: Item = {}): Promise<void> {
    let keys: Item[] = []
    try {
      keys = this.#chunkKeys(id, item)
    } catch {
      return
    }
    await Promise.allSettled(keys.map((Key) => this.#client.run('DeleteItem', { Key })))
  }

  /** The payload of `item`, or of the item that has replaced it. */
  recordOf(id: RecordId, item: Item | null): Promise<Buffer | null> {
    return this.again(item, async (found) => {
      if (!isThere(found, this.#clock.earliest())) return { done: null }
      const payload = await this.#payloadOf(id, found)
      if (payload !== null) return { done: Buffer.concat([recordPrefix(found), ...payload]) }
      const next = await this.find(id)
      if (next !== null && textIn(next, 'q') === textIn(found, 'q'))
        throw new CorruptRecord('DynamoDB has lost a part of the stored response')
      return { found: next }
    })
  }

  indexOf(id: RecordId, bytes: Buffer, due: Millis): Item {
    const place = indexPlace(bytes, due)
    return place === null ? {} : { u: text(this.#prefix + partOf(id)), w: text(placeKey({ due: place, id })) }
  }

  /** The first index entries from `first` to `last`; `ofEach`: at most so many from each index partition. */
  async indexed(first: string, last: string, limit: number, ofEach = limit): Promise<DuePosition[]> {
    const parts = Array.from({ length: INDEX_PARTS }, (_, n) =>
      this.#placesIn(this.#prefix + n, first, last, ofEach),
    )
    return (await Promise.all(parts)).flat().toSorted(inOrder).slice(0, limit)
  }

  async #placesIn(u: string, first: string, last: string, limit: number): Promise<DuePosition[]> {
    const found: DuePosition[] = []
    let from: Item | undefined
    do {
      const values = { ':u': text(u), ':first': text(first), ':last': text(last) }
      const { Items = [], LastEvaluatedKey }: OperationOutput = await this.#client.run('Query', {
        IndexName: INDEX,
        KeyConditionExpression: 'u = :u AND w BETWEEN :first AND :last',
        // DynamoDB takes days to remove them.
        FilterExpression: 'x > :now',
        ...valued({ ...values, ':now': number(this.#clock.earliest()) }),
        ...(from === undefined ? {} : { ExclusiveStartKey: from }),
        Limit: limit,
      })
      for (const item of Items) found.push(placeIn(textIn(item, 'w')))
      from = LastEvaluatedKey
    } while (from !== undefined && found.length < limit)
    return found
  }

  #chunkKey(id: RecordId, name: string, n: number): Item {
    return { pk: text(`${this.#prefix}${id}/${name}/${n}`), sk: text('chunk') }
  }

  #chunkKeys(id: RecordId, item: Item): Item[] {
    if (item['q'] === undefined) return []
    const length = numberAttribute(item, 'k', MAX_CHUNKS)
    return Array.from({ length }, (_, n) => this.#chunkKey(id, textIn(item, 'q'), n))
  }

  /** Null: some of its chunks are gone. */
  async #payloadOf(id: RecordId, item: Item): Promise<Uint8Array[] | null> {
    const chunks = await Promise.all(this.#chunkKeys(id, item).map(this.read))
    const found = chunks.filter((chunk) => chunk !== null)
    if (found.length < chunks.length) return null
    return [item, ...found].map((one) => bytesIn(one, 'p'))
  }
}
