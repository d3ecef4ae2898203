import type { RecordId } from '../core/record.ts'

/*
 * The layout of keys, fixed for good: a change would orphan live records.
 *
 *   idempotency:{xx}:r:<id>   the record, a string that expires at dropAt
 *   idempotency:{xx}:u        the unresolved records of the shard: a sorted set of ids by their due instant
 *   idempotency:{xx}:c:<id>   no key but a sharded channel: an empty message after each write that ends an attempt
 *   idempotency:{xx}:h:<id>   the record's history: a list of lines that expires with it
 *   idempotency:{xx}:n:<id>   a bucket of a rate limit, a string "at debt count" that expires when the bucket is full
 *
 * xx is the first byte of the id in hex. What belongs to an id shares that hash tag, so all of it lives in one slot.
 */
export const SHARDS: readonly string[] = Array.from({ length: 256 }, (_, n) =>
  n.toString(16).padStart(2, '0'),
)

export function recordKey(id: RecordId): string {
  return `idempotency:{${shardOf(id)}}:r:${id}`
}

export function historyKey(id: RecordId): string {
  return `idempotency:{${shardOf(id)}}:h:${id}`
}

export function channelOf(id: RecordId): string {
  return `idempotency:{${shardOf(id)}}:c:${id}`
}

export function bucketKey(bucket: string): string {
  return `idempotency:{${shardOf(bucket)}}:n:${bucket}`
}

export function indexKey(id: RecordId): string {
  return indexKeyOf(shardOf(id))
}

export function indexKeyOf(shard: string): string {
  return `idempotency:{${shard}}:u`
}

/** The first byte of the id: the six bits of its first digit in base64url, and two of the second. */
function shardOf(id: string): string {
  return SHARDS[(DIGITS.indexOf(id.charAt(0)) << 2) | (DIGITS.indexOf(id.charAt(1)) >> 4)] as string
}

const DIGITS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_'

/** What finds every record, and the id in its name. */
export const RECORDS = {
  glob: 'idempotency:*:r:*',
  idOf: (key: string): RecordId | null => {
    const id = /^idempotency:\{[0-9a-f]{2}\}:r:([\w-]{43})$/.exec(key)?.[1]
    return id === undefined ? null : (id as RecordId)
  },
}
