import type { StoreConfig } from '../../config/config.ts'
import { type Millis, RECORD_ID, type RecordId } from '../../core/record.ts'
import type { StoreHooks } from '../around.ts'
import type { ConnectionSettings } from './connection.ts'

export type Wait = NonNullable<StoreConfig['wait']>

export interface RedisOptions
  extends ConnectionSettings,
    Pick<StoreHooks, 'onEvent' | 'onNewEpoch' | 'onSafe' | 'onHeld' | 'onWaited'> {
  /** Validated by `config/urls.ts`. */
  readonly url: string
  /** Hides the records of other services on the same server. */
  readonly service: string
  /** Added to the server's time, for tests that shift the clock; otherwise 0. */
  readonly skew?: () => Millis
}

/*
 * The layout of keys, fixed for good: a change would orphan live records.
 *
 *   idempotency:<service>:{xx}:r:<id>   the record, a string that expires at dropAt
 *   idempotency:<service>:{xx}:u        the unresolved records of the shard: a sorted set of ids by their due instant
 *   idempotency:<service>:{xx}:c:<id>   no key but a sharded channel: an empty message after each write that ends an attempt
 *   idempotency:<service>:{xx}:h:<id>   the record's history: a list of lines that expires with it
 *   idempotency:<service>:{xx}:e        the server process first seen for the shard, and when: a string "run_id since till" (ADR 91)
 *   idempotency:<service>:{xx}:w        a marker whose replication is awaited (`store.wait`): 1, for a minute
 *   idempotency:<service>:{xx}:n:<id>   a bucket of a rate limit, a string "at debt count" that expires when the bucket is full
 *
 * <service> has letters, digits, `_`, `.` and `-`: so it cannot contain a separator or a glob pattern. xx is the first byte of the id in
 * hex. What belongs to an id shares that hash tag, so all of it lives in one slot.
 */
export const SHARDS: readonly number[] = Array.from({ length: 256 }, (_, n) => n)
/** SHA-256 in base64url. */
const ID_LENGTH = 43

export class RedisKeys {
  /** Every shard's index of unresolved records. */
  readonly indexes: readonly string[]
  /** By shard: the key that the server's identity is compared with. */
  readonly epochs: readonly string[]
  /** Matches every record. */
  readonly glob: string
  readonly #tagged: readonly string[]

  constructor(service: string) {
    const own = `idempotency:${service}:`
    this.#tagged = SHARDS.map((n) => `${own}{${n.toString(16).padStart(2, '0')}}:`)
    this.indexes = this.#tagged.map((beginning) => `${beginning}u`)
    this.epochs = this.#tagged.map((beginning) => `${beginning}e`)
    this.glob = `${own}*:r:*`
  }

  readonly record = (id: RecordId): string => `${this.#tag(id)}r:${id}`
  readonly channel = (id: RecordId): string => `${this.#tag(id)}c:${id}`
  readonly bucket = (bucket: string): string => `${this.#tag(bucket)}n:${bucket}`
  readonly marker = (shard: number): string => `${this.#tagged[shard]}w`
  /** Matches the records whose id starts like this. Base64url has no characters that are special in a glob. */
  readonly globOf = (beginning: string): string => `${this.#tag(beginning)}r:${beginning}*`
  /** By the first byte of the id: six bits of its first base64url digit and two of the second. */
  readonly shardOf = (id: string): number => (digitAt(id, 0) << 2) | (digitAt(id, 1) >> 4)

  /** Null: not the key of a record. */
  idOf(key: string): RecordId | null {
    const id = key.slice(-ID_LENGTH)
    return RECORD_ID.test(id) && this.record(id as RecordId) === key ? (id as RecordId) : null
  }

  #tag(id: string): string {
    return this.#tagged[this.shardOf(id)] as string
  }
}

const DIGITS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_'

function digitAt(id: string, at: number): number {
  return DIGITS.indexOf(id.charAt(at))
}
