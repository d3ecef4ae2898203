import {
  createCipheriv,
  createDecipheriv,
  createSecretKey,
  type KeyObject,
  randomFillSync,
} from 'node:crypto'
import type { SealingKey, StoreConfig } from '../../config/config.ts'
import { Hmac } from '../../core/identity.ts'
import type { RecordId } from '../../core/record.ts'
import { NOBODY } from '../../core/settle.ts'
import { SealedRecord } from '../register.ts'
import { readU48, writeU48 } from './binary.ts'
import { FLAG_LEASE_EXPIRED, HEAD_AT, PREFIX, SEALED, sealingKeyOf, stateCode } from './codec.ts'

const CIPHER = 'aes-256-gcm'
const TAG_BYTES = 16
const ID_BYTES = 32
/** The purpose of a subkey: no two uses share a subkey. */
const FOR_RECORD = 'idempotency-proxy/seal/1\0'
const FOR_NOTE = 'idempotency-proxy/note/1\0'
/** Prefix of a history's sealed text; plain texts begin with `{`. */
const SEALED_NOTE = /^sealed:([A-Za-z0-9]+):([\w-]+)$/

const IN_PROGRESS = stateCode('in_progress')
const UNKNOWN = stateCode('unknown')

interface DerivedKeys {
  readonly name: string
  readonly forRecord: Subkeys
  readonly forNote: Subkeys
}

/** Null: nothing is sealed. */
export function sealerOf({ encryption: { keys } }: Pick<StoreConfig, 'encryption'>): Sealer | null {
  return keys.length === 0 ? null : new Sealer(keys)
}

/** Seals records and their histories with the first key, and opens them with any. See docs/adr/0084. */
export class Sealer {
  readonly #first: DerivedKeys
  readonly #keys = new Map<string, DerivedKeys>()

  /** `keys`: at least one, each with a distinct name. */
  constructor(keys: readonly SealingKey[]) {
    for (const { id, key } of keys)
      this.#keys.set(id, {
        name: id,
        forRecord: new Subkeys(key, FOR_RECORD),
        forNote: new Subkeys(key, FOR_NOTE),
      })
    this.#first = this.#keys.values().next().value as DerivedKeys
  }

  /**
   * The record as it is stored. Its prefix stays in plaintext: stores stamp it. `bytes` stays as it is; if it is sealed, with an unavailable key,
   * it is only copied from one store to another, and returned.
   */
  seal(id: RecordId, bytes: Buffer, nonce: Buffer = newNonce()): Buffer {
    if (sealingKeyOf(bytes) !== null) return bytes
    const { name, forRecord } = this.#first
    const headLength = SEALED.keyId + name.length
    const sealed = Buffer.allocUnsafe(bytes.length - PREFIX.end + HEAD_AT + headLength + TAG_BYTES)
    sealed.set(bytes.subarray(0, PREFIX.end))
    sealed.writeUInt32BE(headLength, PREFIX.end)
    sealed[HEAD_AT] = bytes[HEAD_AT] as number
    sealed[HEAD_AT + SEALED.version] = 1
    sealed[HEAD_AT + SEALED.state] = bytes[PREFIX.state] as number
    writeU48(sealed, readU48(bytes, PREFIX.fence), HEAD_AT + SEALED.fence)
    sealed.set(nonce, HEAD_AT + SEALED.nonce)
    const end = HEAD_AT + headLength
    sealed.write(name, HEAD_AT + SEALED.keyId)
    const cipher = createCipheriv(CIPHER, forRecord.of(id), nonce)
    cipher.setAAD(boundTo(id, sealed, end))
    sealed.set(cipher.update(bytes.subarray(PREFIX.end)), end)
    cipher.final()
    sealed.set(cipher.getAuthTag(), sealed.length - TAG_BYTES)
    return sealed
  }

  /**
   * Returns what {@link seal} was given, with the stamps that the store has put on it. A record that is not sealed, or sealed with an
   * unavailable key, is returned as it is: the codec refuses it.
   *
   * @throws {SealedRecord} if it was altered.
   */
  open(id: RecordId, sealed: Buffer): Buffer {
    const name = sealingKeyOf(sealed)
    if (name === null) return sealed
    const key = this.#keys.get(name)
    // The decoder refuses it.
    if (key === undefined) return sealed
    const end = HEAD_AT + SEALED.keyId + name.length
    const tagAt = sealed.length - TAG_BYTES
    if (tagAt < end || !isAsSealed(sealed)) throw altered(name)
    const nonce = sealed.subarray(HEAD_AT + SEALED.nonce, HEAD_AT + SEALED.keyId)
    const cipher = createDecipheriv(CIPHER, key.forRecord.of(id), nonce, { authTagLength: TAG_BYTES })
    cipher.setAAD(boundTo(id, sealed, end))
    cipher.setAuthTag(sealed.subarray(tagAt))
    const rest = cipher.update(sealed.subarray(end, tagAt))
    try {
      cipher.final()
    } catch {
      throw altered(name)
    }
    const bytes = Buffer.allocUnsafe(PREFIX.end + rest.length)
    bytes.set(sealed.subarray(0, PREFIX.end))
    bytes.set(rest, PREFIX.end)
    const state = sealed[HEAD_AT + SEALED.state]
    const flags = Number(bytes[HEAD_AT])
    bytes[HEAD_AT] = Number(sealed[HEAD_AT])
    if (bytes[PREFIX.state] === state ? bytes[HEAD_AT] === flags : isRevived(bytes, state, flags))
      return bytes
    throw altered(name)
  }

  /** Seals the text of an entry in a record's history, identified by `tag`. */
  sealNote(id: RecordId, tag: string, text: string): string {
    const { name, forNote } = this.#first
    const nonce = newNonce()
    const cipher = createCipheriv(CIPHER, forNote.of(id), nonce)
    cipher.setAAD(Buffer.from(`${id} ${name} ${tag}`))
    const sealed = Buffer.concat([
      nonce,
      cipher.update(Buffer.from(text)),
      cipher.final(),
      cipher.getAuthTag(),
    ])
    return `sealed:${name}:${sealed.toString('base64url')}`
  }

  /** An entry that cannot be opened is returned unchanged: no decision depends on a history, and viewers skip anything but JSON. */
  openNote(id: RecordId, tag: string, text: string): string {
    const [, name = '', encoded = ''] = SEALED_NOTE.exec(text) ?? []
    const key = this.#keys.get(name)
    const sealed = Buffer.from(encoded, 'base64url')
    const tagAt = sealed.length - TAG_BYTES
    if (key === undefined || tagAt < NONCE_BYTES) return text
    const cipher = createDecipheriv(CIPHER, key.forNote.of(id), sealed.subarray(0, NONCE_BYTES), {
      authTagLength: TAG_BYTES,
    })
    cipher.setAAD(Buffer.from(`${id} ${name} ${tag}`))
    cipher.setAuthTag(sealed.subarray(tagAt))
    try {
      return Buffer.concat([cipher.update(sealed.subarray(NONCE_BYTES, tagAt)), cipher.final()]).toString()
    } catch {
      return text
    }
  }
}

function altered(name: string): SealedRecord {
  return new SealedRecord(
    'altered',
    `the stored record does not open with the key ${name}: it was altered since it was sealed, or the file holds another key`,
  )
}

/**
 * The store stamps the fence after sealing. It is at least the attempt's, and higher only if the attempt's claim was not answered, or was
 * lost and rewritten; a decision by others keeps it.
 */
function isAsSealed(sealed: Buffer): boolean {
  const given = readU48(sealed, HEAD_AT + SEALED.fence)
  const fence = readU48(sealed, PREFIX.fence)
  return given === fence || (given < fence && NOBODY.compare(sealed, PREFIX.token, PREFIX.createdAt) !== 0)
}

/** A renewal has put it back in progress: it was unknown only because its owner was silent. */
function isRevived(bytes: Buffer, state: number | undefined, flags: number): boolean {
  const isInProgress = bytes[PREFIX.state] === IN_PROGRESS && bytes[HEAD_AT] === 0
  return isInProgress && state === UNKNOWN && (flags & FLAG_LEASE_EXPIRED) !== 0
}

/** Shared buffer: its contents are used immediately. */
const BOUND = Buffer.alloc(256)

/** A sealed record is bound to this id, owner, state, fence and key. */
function boundTo(id: RecordId, sealed: Buffer, headEnd: number): Buffer {
  let at = BOUND.write(id, 'base64url')
  at += sealed.copy(BOUND, at, 0, PREFIX.state)
  at += sealed.copy(BOUND, at, PREFIX.token, PREFIX.createdAt)
  at += sealed.copy(BOUND, at, HEAD_AT + SEALED.version, headEnd)
  return BOUND.subarray(0, at)
}

/**
 * One key per record: HMAC-SHA-256 of the purpose and the record's id. Each seals a handful of messages, so random nonces never collide,
 * however many replicas there are and however long the key lives. A cipher with a key object costs a third of one with bytes
 * (docs/internals/performance.md).
 */
class Subkeys {
  readonly #hmac: Hmac
  readonly #message: Buffer

  constructor(key: Buffer, use: string) {
    this.#hmac = new Hmac(key)
    this.#message = Buffer.alloc(use.length + ID_BYTES)
    this.#message.write(use)
  }

  of(id: RecordId): KeyObject {
    this.#message.write(id, this.#message.length - ID_BYTES, 'base64url')
    return createSecretKey(this.#hmac.of(this.#message))
  }
}

const NONCE_BYTES = SEALED.keyId - SEALED.nonce
/** Drawn in bulk, as tokens are. */
const NONCES = Buffer.alloc(256 * NONCE_BYTES)
let nextNonce = NONCES.length

/** Valid until the next draw: it is used immediately. */
function newNonce(): Buffer {
  if (nextNonce === NONCES.length) {
    randomFillSync(NONCES)
    nextNonce = 0
  }
  nextNonce += NONCE_BYTES
  return NONCES.subarray(nextNonce - NONCE_BYTES, nextNonce)
}
