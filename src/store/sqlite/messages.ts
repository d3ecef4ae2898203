import type { Millis, RecordId } from '../../core/record.ts'
import { HEAD_ROOM, SMALL_RECORD } from '../record/codec.ts'
import type { DueKind, DuePosition, Note, RateLimits, Register, Renewal } from '../register.ts'

/*
 * Messages between the event loop and SQLite's thread. Objects make a message expensive, so the parts of all requests, or results, are in
 * one list, and the bytes among them in one transferred ArrayBuffer.
 */

type Sync<T> = {
  [K in keyof T]: T[K] extends (...args: infer A) => Promise<infer R> ? (...args: A) => R : never
}

export type WriteResult = readonly [now: Millis, version: number, fence: number, createdAt: Millis]
export type ReadResult<Bytes extends Uint8Array | null> = readonly [now: Millis, bytes: Bytes]

/** Operations for the thread. Tokens are text: a character for each byte. */
export interface ThreadOperations extends Sync<Pick<Register, 'remove' | 'ping'>> {
  due(limit: number, of: DueKind): RecordId[]
  put(id: RecordId, bytes: Buffer, dueIn: Millis, dropIn: Millis): WriteResult | ReadResult<Buffer>
  /** `of`: the states in which the token's record is replaced, separated by spaces; or the version, whatever the token. */
  swap(
    id: RecordId,
    bytes: Buffer,
    dueIn: Millis,
    dropIn: Millis,
    nextFence: boolean,
    token: string,
    of: string | number,
  ): WriteResult | ReadResult<Buffer | null>
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
  /** Their number of parts and their parts; or {@link WHOLE} and a value that is not a list. */
  readonly flat: readonly unknown[]
  /** Positions of byte arrays among the parts, and their lengths (below 0: in separate memory). */
  readonly bytes: readonly number[]
  readonly memory: ArrayBuffer
  readonly large: readonly ArrayBuffer[]
}

const WHOLE = -1

/** The arguments of `postMessage`. Copies bytes, or transfers their memory if they are large and it holds little else. */
export function pack(messages: readonly unknown[]): [message: Packed, transfer: ArrayBuffer[]] {
  const flat: unknown[] = []
  const bytes: number[] = []
  const copied: Uint8Array[] = []
  const large: ArrayBuffer[] = []
  let size = 0
  for (const message of messages) {
    if (!Array.isArray(message)) {
      flat.push(WHOLE, message)
      continue
    }
    flat.push(message.length)
    for (const part of message) {
      if (!(part instanceof Uint8Array)) {
        flat.push(part)
        continue
      }
      const isLarge = isAlone(part)
      bytes.push(flat.length, isLarge ? -part.length : part.length)
      flat.push(0)
      if (isLarge) large.push(part.buffer as ArrayBuffer)
      else {
        copied.push(part)
        size += part.length
      }
    }
  }
  const memory = new ArrayBuffer(size)
  const view = new Uint8Array(memory)
  let at = 0
  for (const one of copied) {
    view.set(one, at)
    at += one.length
  }
  return [{ flat, bytes, memory, large }, [memory, ...large]]
}

/** The bytes lie in the message's memory. */
export function unpack(message: Packed): unknown[] {
  const { bytes, memory, large } = message
  const flat = message.flat as unknown[]
  let at = 0
  let alone = 0
  for (let n = 0; n < bytes.length; n += 2) {
    const length = bytes[n + 1] as number
    flat[bytes[n] as number] =
      length < 0 ? Buffer.from(large[alone++] as ArrayBuffer, 0, -length) : Buffer.from(memory, at, length)
    if (length > 0) at += length
  }
  const messages: unknown[] = []
  for (let n = 0; n < flat.length; ) {
    const count = flat[n++] as number
    if (count === WHOLE) messages.push(flat[n++])
    else messages.push(flat.slice(n, (n += count)))
  }
  return messages
}

function isAlone({ buffer, byteOffset, length }: Uint8Array): boolean {
  return length > SMALL_RECORD && byteOffset === 0 && buffer.byteLength <= length + HEAD_ROOM
}
