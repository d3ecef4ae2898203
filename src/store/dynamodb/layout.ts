import type { Millis } from '../../core/record.ts'
import { MAX_U48 } from '../record/binary.ts'
import { HEAD_AT, PREFIX, SCHEMA, type Stamps, stamp, stateCode } from '../record/codec.ts'
import { type Condition, CorruptRecord, type DuePosition, type Stamp } from '../register.ts'
import { type Bucket, fullAt } from '../side-ports.ts'
import type { AttributeValue, Item, OperationInput, TableDescription } from './client.ts'

/*
 * An item of the table is one of these (docs/dynamodb.md):
 *
 *   record  pk service/first two characters of the id   sk id      v version  f fence  c createdAt  m updatedAt  d due  x dropAt
 *           n schema  s state  o owner's token  b head  p payload, or q and k: name and number of the chunks that hold it
 *           h history, a line per note  u, w: key of the index, only while it is unresolved
 *   chunk   pk service/id/name/number                   sk chunk   p bytes
 *   bucket  pk service/name                             sk bucket  a at  t debt  r count
 *
 * and has e, when DynamoDB may remove it. A record whose x has come does not exist; remains of a removed one have x 0.
 * Names of one letter: each write is charged by the size of the item, names included, in steps of 1 KB.
 */
export const INDEX = 'unresolved'
/** Number of index partitions, so that no single one takes all writes. */
export const INDEX_PARTS = 16
/** By then nobody reads the item, however wrong a clock is. */
const KEPT_LONGER: Millis = 3_600_000

/** The table's definition, as `CreateTable` takes it. */
export function tableDefinition(table: string): OperationInput {
  const key = (hash: string, range: string) => [
    { AttributeName: hash, KeyType: 'HASH' },
    { AttributeName: range, KeyType: 'RANGE' },
  ]
  return {
    TableName: table,
    BillingMode: 'PAY_PER_REQUEST',
    AttributeDefinitions: ['pk', 'sk', 'u', 'w'].map((name) => ({ AttributeName: name, AttributeType: 'S' })),
    KeySchema: key('pk', 'sk'),
    GlobalSecondaryIndexes: [
      {
        IndexName: INDEX,
        KeySchema: key('u', 'w'),
        Projection: { ProjectionType: 'INCLUDE', NonKeyAttributes: ['x'] },
      },
    ],
  }
}

/** Null: the table has the keys and the index of {@link tableDefinition}. */
export function wrongWith(table: TableDescription | null): string | null {
  if (table === null) return 'there is no table'
  const index = table.GlobalSecondaryIndexes?.find(({ IndexName }) => IndexName === INDEX)
  const keys = [table.KeySchema, index?.KeySchema].map((schema) =>
    (schema ?? []).map(({ AttributeName }) => AttributeName).join(),
  )
  return keys.join(' ') === 'pk,sk u,w' ? null : 'wrong key or index: table'
}

/** Attributes that a record may lack. */
export const OPTIONAL = ['b', 'p', 'q', 'k', 'u', 'w']
/** Everything except the key and the numbers that a later record must exceed. */
export const REMOVED = [...OPTIONAL, 'c', 'm', 'd', 'n', 's', 'o', 'h']

export const text = (S: string): AttributeValue => ({ S })
export const number = (value: number): AttributeValue => ({ N: String(value) })
export const binary = (B: Buffer): AttributeValue => ({ B })
export const valued = (values: Item): OperationInput => ({ ExpressionAttributeValues: values })

/** An `UpdateItem` that sets these attributes, computes others, and removes those of `optional` that are not set. */
export function update(
  set: Item,
  computed: readonly string[],
  optional: readonly string[],
  condition: string,
  values: Item,
): OperationInput {
  const names = Object.keys(set)
  const gone = optional.filter((name) => !names.includes(name))
  const setting = [...computed, ...names.map((name) => `${name} = :${name}`)].join(', ')
  return {
    UpdateExpression: gone.length === 0 ? `SET ${setting}` : `SET ${setting} REMOVE ${gone.join(', ')}`,
    ConditionExpression: condition,
    ...valued({
      ...values,
      ...Object.fromEntries(names.map((name) => [`:${name}`, set[name] as AttributeValue])),
    }),
    ReturnValues: 'ALL_OLD',
  }
}

export function expected(condition: Condition): string {
  if ('version' in condition) return 'v = :was'
  // `:none`, because an empty list is invalid.
  return `o = :owner AND s IN (${[':none', ...condition.states.map((_, n) => `:s${n}`)].join(', ')})`
}

export function expectedValues(condition: Condition): Item {
  if ('version' in condition) return { ':was': number(condition.version) }
  const states = condition.states.map((state, n) => [`:s${n}`, number(stateCode(state))])
  return { ':owner': binary(condition.token), ':none': number(0), ...Object.fromEntries(states) }
}

/** The fence never falls below the given one. */
export function counting(bytes: Buffer, nextFence: boolean): Item {
  const step = nextFence ? 1 : 0
  return {
    ':one': number(1),
    ':step': number(step),
    ':least': number(bytes.readUIntBE(PREFIX.fence, 6) - step),
    ':schema': number(SCHEMA),
  }
}

/** The part of a record that becomes attributes; the rest is stamped. */
export function partsOf(bytes: Buffer): { readonly fields: Item; readonly payload: Buffer } {
  const headEnd = bytes.length < HEAD_AT ? bytes.length : HEAD_AT + bytes.readUInt32BE(PREFIX.end)
  const head = bytes.subarray(PREFIX.end, headEnd)
  return {
    fields: {
      n: number(bytes.readUInt8(PREFIX.schema)),
      s: number(bytes.readUInt8(PREFIX.state)),
      o: binary(bytes.subarray(PREFIX.token, PREFIX.createdAt)),
      ...(head.length === 0 ? {} : { b: binary(head) }),
    },
    payload: bytes.subarray(headEnd),
  }
}

export function stamped({ updatedAt, due, dropAt }: Stamps): Item {
  return { m: number(updatedAt), d: number(due), x: number(dropAt), e: expiry(dropAt) }
}

export function numbered({ version, fence }: Stamps): Item {
  return { v: number(version), f: number(fence) }
}

export function stampOf({ version, fence, createdAt }: Stamps): Stamp {
  return { version, fence, createdAt }
}

/** In seconds, as TTL takes it. */
export function expiry(dropAt: Millis): AttributeValue {
  return number(Math.ceil((dropAt + KEPT_LONGER) / 1000))
}

/** The record without its payload. */
export function recordPrefix(item: Item): Buffer {
  const token = bytesIn(item, 'o')
  if (token.length !== PREFIX.createdAt - PREFIX.token)
    throw new CorruptRecord('the token of the stored record has another length')
  const prefix = Buffer.alloc(PREFIX.end)
  prefix.write('IP', 'latin1')
  prefix[PREFIX.schema] = numberAttribute(item, 'n', 0xff)
  prefix[PREFIX.state] = numberAttribute(item, 's', 0xff)
  prefix.set(token, PREFIX.token)
  stamp(prefix, {
    version: numberAttribute(item, 'v'),
    fence: numberAttribute(item, 'f'),
    createdAt: numberAttribute(item, 'c'),
    updatedAt: numberAttribute(item, 'm'),
    due: numberAttribute(item, 'd'),
    dropAt: numberAttribute(item, 'x'),
  })
  return Buffer.concat([prefix, bytesIn(item, 'b')])
}

export function isThere(item: Item | null, now: Millis): item is Item {
  return item !== null && numberAttribute(item, 'x') > now
}

/** The form in which DynamoDB writes numbers. `Number()` accepts more, and reads '' as 0. */
const NUMBER = /^\d+(?:\.\d+)?(?:E\+?\d+)?$/i

/** @throws {CorruptRecord} */
export function numberAttribute(item: Item, name: string, most = MAX_U48): number {
  const value = item[name]
  const read = value !== undefined && 'N' in value && NUMBER.test(value.N) ? Number(value.N) : Number.NaN
  if (!Number.isInteger(read) || read > most) throw isAnother(name, 'number')
  return read
}

/** Empty if absent. @throws {CorruptRecord} */
export function textIn(item: Item, name: string): string {
  const value = item[name]
  if (value === undefined) return ''
  if (!('S' in value)) throw isAnother(name, 'text')
  return value.S
}

/** Like {@link textIn}. */
export function bytesIn(item: Item, name: string): Uint8Array {
  const value = item[name]
  if (value === undefined) return Buffer.alloc(0)
  if (!('B' in value)) throw isAnother(name, 'bytes')
  return value.B
}

function isAnother(name: string, what: string): CorruptRecord {
  return new CorruptRecord(`the attribute ${name} of the item is not a ${what} as written`)
}

export function historyLines(item: Item): string[] {
  return item['h'] === undefined ? [] : textIn(item, 'h').split('\n')
}

export function bucketOf(item: Item): Bucket {
  const [at, debt, count] = ['a', 't', 'r'].map((name) =>
    numberAttribute(item, name, Number.MAX_SAFE_INTEGER),
  )
  if (!count) throw isAnother('r', 'number')
  return { at: at as Millis, debt: debt as number, count }
}

export function bucketItem(bucket: Bucket): Item {
  const { at, debt, count } = bucket
  return { a: number(at), t: number(debt), r: number(count), e: expiry(fullAt(bucket)) }
}

export function partOf(id: string): number {
  return id.charCodeAt(0) % INDEX_PARTS
}

/** Sorts as the number does. */
export function instantKey(at: Millis): string {
  return String(at).padStart(16, '0')
}

export function placeKey({ due, id }: DuePosition): string {
  return `${instantKey(due)} ${id}`
}

/** @throws {CorruptRecord} */
export function placeIn(key: string): DuePosition {
  const [, due, id] = /^(\d{16}) ([\w-]{1,64})$/.exec(key) ?? []
  if (due === undefined || id === undefined) throw isAnother('w', 'place')
  return { due: Number(due), id }
}

/** @throws {CorruptRecord} for a key that {@link keyOf} could not read. */
export function cursorOf(key: Item): string {
  const parts = [textIn(key, 'pk'), textIn(key, 'sk')]
  if (parts[1] === '' || parts.some((part) => part.includes(' '))) throw isAnother('sk', 'key')
  return Buffer.from(parts.join(' ')).toString('base64url')
}

/** @throws {RangeError} if {@link cursorOf} did not make the cursor. */
export function keyOf(cursor: string): Item {
  const [pk = '', sk = '', ...more] = Buffer.from(cursor, 'base64url').toString().split(' ')
  const key = { pk: text(pk), sk: text(sk) }
  if (sk === '' || more.length > 0 || cursorOf(key) !== cursor)
    throw new RangeError('not a cursor of this store')
  return key
}
