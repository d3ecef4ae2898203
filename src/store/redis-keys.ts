import { RECORD_ID, type RecordId } from '../core/record.ts'

/*
 * The layout of keys, fixed for good: a change would orphan live records.
 *
 *   idempotency:<service>:{xx}:r:<id>   the record, a string that expires at dropAt
 *   idempotency:<service>:{xx}:u        the unresolved records of the shard: a sorted set of ids by their due instant
 *   idempotency:<service>:{xx}:c:<id>   no key but a sharded channel: an empty message after each write that ends an attempt
 *   idempotency:<service>:{xx}:h:<id>   the record's history: a list of lines that expires with it
 *   idempotency:<service>:{xx}:n:<id>   a bucket of a rate limit, a string "at debt count" that expires when the bucket is full
 *
 * <service> has letters, digits, `_`, `.` and `-`: it cannot end early, nor be a pattern. xx is the first byte of the id in hex.
 * What belongs to an id shares that hash tag, so all of it lives in one slot.
 */
const SHARDS = 256
/** SHA-256 in base64url. */
const ID_LENGTH = 43

export class RedisKeys {
  /** Every shard's index of unresolved records. */
  readonly indexes: readonly string[]
  /** What finds every record. */
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

  /** What most scripts take. */
  recordAndIndex(id: RecordId): string[] {
    return [this.record(id), this.index(id)]
  }

  /** What finds the records whose id begins so. Base64url has nothing that a glob takes for more than itself. */
  globOf(beginning: string): string {
    return `${this.#shardOf(beginning)}r:${beginning}*`
  }

  /** The id in the name of a record; null: of something else. */
  idOf(key: string): RecordId | null {
    const id = key.slice(-ID_LENGTH)
    return RECORD_ID.test(id) && this.record(id as RecordId) === key ? (id as RecordId) : null
  }

  /** The first byte of the id: the six bits of its first digit in base64url, and two of the second. */
  #shardOf(id: string): string {
    return this.#shards[(DIGITS.indexOf(id.charAt(0)) << 2) | (DIGITS.indexOf(id.charAt(1)) >> 4)] as string
  }
}

const DIGITS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_'
