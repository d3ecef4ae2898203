import type { Millis, RecordId } from '../../core/record.ts'
import { HEAD_ROOM, SMALL_RECORD } from '../record/codec.ts'
import type { DueKind, DuePosition, Note, RateLimits, Register, Renewal } from '../register.ts'

/*
 * Messages between the event loop and SQLite's thread. Objects make a message expensive, so requests and results are lists, and the bytes
 * among their parts lie in one transferred ArrayBuffer.
 */

type Sync<T> = {
  [K in keyof T]: T[K] extends (...args: infer A) => Promise<infer R> ? (...args: A) => R : never
}

export type WriteResult = readonly [now: Millis, version: number, fence: number, createdAt: Millis]
export type ReadResult<Bytes extends Uint8Array | null> = readonly [now: Millis, bytes: Bytes]

/** Operations for the thread. Tokens are text: a character for each byte. */
export interface ThreadOperations extends Sync<Pick<Register, 'remove' | 'ping'>> {
  due(limit: number, of: DueKind): RecordId[]
  put(id: RecordId, bytes: Uint8Array, dueIn: Millis, dropIn: Millis): WriteResult | ReadResult<Uint8Array>
  /** `of`: the states in which the token's record is replaced, separated by spaces; or the version, whatever the token. */
  swap(
    id: RecordId,
    bytes: Uint8Array,
    dueIn: Millis,
    dropIn: Millis,
    nextFence: boolean,
    token: string,
    of: string | number,
  ): WriteResult | ReadResult<Uint8Array | null>
  get(id: RecordId): ReadResult<Uint8Array | null>
  renew(items: readonly (Omit<Renewal, 'token'> & { readonly token: string })[]): boolean[]
  list(beginning: string, after: string, limit: number): RecordId[]
  unresolved(after: DuePosition, limit: number): DuePosition[]
  note(id: RecordId, notes: readonly Note[]): boolean
  notes(id: RecordId): string[]
  throttle: Sync<RateLimits>['take']
}

export type Request = {
  [K in keyof ThreadOperations]: readonly [op: K, ...args: Parameters<ThreadOperations[K]>]
}[keyof ThreadOperations]

/** Requests or results, in order. */
export interface Packed {
  readonly messages: readonly unknown[]
  /** Holds the bytes among their parts. */
  readonly memory: readonly ArrayBuffer[]
}

/** The arguments of `postMessage`. Copies bytes, or transfers their memory if they are large and it holds little else. */
export function pack(messages: readonly unknown[]): [message: Packed, transfer: readonly ArrayBuffer[]] {
  const memory: ArrayBuffer[] = []
  const small: [message: unknown[], n: number, bytes: Uint8Array][] = []
  let size = 0
  for (const message of messages)
    for (let n = 0; Array.isArray(message) && n < message.length; n++) {
      const part: unknown = message[n]
      if (!(part instanceof Uint8Array)) continue
      if (isAlone(part)) memory.push(part.buffer as ArrayBuffer)
      else {
        small.push([message, n, part])
        size += part.length
      }
    }
  const copies = new ArrayBuffer(size)
  const view = new Uint8Array(copies)
  let end = 0
  for (const [message, n, bytes] of small) {
    view.set(bytes, end)
    message[n] = new Uint8Array(copies, end, bytes.length)
    end += bytes.length
  }
  memory.push(copies)
  return [{ messages, memory }, memory]
}

function isAlone({ buffer, byteOffset, length }: Uint8Array): boolean {
  return length > SMALL_RECORD && byteOffset === 0 && buffer.byteLength <= length + HEAD_ROOM
}

/** Structured cloning makes plain arrays of bytes of all buffers. */
export function bufferOf({ buffer, byteOffset, byteLength }: Uint8Array): Buffer {
  return Buffer.from(buffer, byteOffset, byteLength)
}
