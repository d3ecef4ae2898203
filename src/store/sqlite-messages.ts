import { type Millis, type RecordId, STATES, type State } from '../core/record.ts'
import { HEAD_ROOM, SMALL_RECORD } from './codec.ts'
import type { DueKind, DuePosition, Note, RateLimits, Register, Renewal } from './register.ts'

/*
 * Messages between the event loop and SQLite's thread. Objects make a message expensive, so puts and swaps, which every request needs, and
 * their results are numbers in one transferred ArrayBuffer, followed by the bytes. Everything else is cloned.
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
  /** `of`: the states in which the token's record is replaced; or, whatever the token, the version that is. */
  swap(
    id: RecordId,
    bytes: Buffer,
    dueIn: Millis,
    dropIn: Millis,
    nextFence: boolean,
    token: string,
    of: readonly State[] | number,
  ): WriteResult | ReadResult<Buffer | null>
  get(id: RecordId): ReadResult<Uint8Array | null>
  renew(items: readonly (Omit<Renewal, 'token'> & { readonly token: string })[]): boolean[]
  list(beginning: string, after: string, limit: number): RecordId[]
  unresolved(after: DuePosition, limit: number): DuePosition[]
  note(id: RecordId, notes: readonly Note[]): boolean
  notes(id: RecordId): string[]
  throttle: Sync<RateLimits>['take']
}

type RequestOf<K extends keyof ThreadOperations> = readonly [op: K, ...args: Parameters<ThreadOperations[K]>]
type Write = RequestOf<'put'> | RequestOf<'swap'>
export type Request = { [K in keyof ThreadOperations]: RequestOf<K> }[keyof ThreadOperations]

/** Message to the thread for one turn of the event loop. */
export interface RequestBatch {
  readonly count: number
  /** Ids and tokens, one after the other. */
  readonly text: string
  readonly memory: ArrayBuffer
  /** The memory of large records, one after the other. */
  readonly large: readonly ArrayBuffer[]
  readonly others: readonly Request[]
}
/** Results of the oldest requests, in order. */
export interface ResultBatch {
  readonly count: number
  readonly memory: ArrayBuffer
  readonly others: readonly unknown[]
}

const WORD = Float64Array.BYTES_PER_ELEMENT
/** Fields of a request: kind, lengths of id, token and bytes (below 0: large), dueIn, dropIn, condition, nextFence. */
const REQUEST_WORDS = 8
const OTHER = 0
const PUT = 1
const SWAP_VERSION = 2
/** The condition is a set of states, a bit for each. */
const SWAP_STATES = 3
/** Fields of a result: now, version, fence and createdAt of the written record; or now, {@link FOUND} and the number of bytes. */
const RESULT_WORDS = 4
/** In place of a version, which is at least 1. */
const FOUND = 0
/** In place of now: the result is among the others. */
const ELSEWHERE = -1

/** The arguments of `postMessage`. Copies small records; transfers the memory of large ones, which must hold nothing else in use. */
export function packRequests(requests: readonly Request[]): [message: RequestBatch, transfer: ArrayBuffer[]] {
  const count = requests.length
  let at = count * REQUEST_WORDS * WORD
  let size = at
  for (const request of requests) if (isWrite(request) && !isAlone(request[2])) size += request[2].length
  const memory = new ArrayBuffer(size)
  const words = new Float64Array(memory, 0, count * REQUEST_WORDS)
  const bytes = new Uint8Array(memory)
  const others: Request[] = []
  const large: ArrayBuffer[] = []
  let text = ''
  let word = 0
  for (const request of requests) {
    if (!isWrite(request)) {
      others.push(request)
      words[word] = OTHER
    } else {
      const [, id, given, dueIn, dropIn] = request
      text += id
      words[word] = PUT
      words[word + 1] = id.length
      words[word + 4] = dueIn
      words[word + 5] = dropIn
      if (isAlone(given)) {
        words[word + 3] = -given.length
        large.push(given.buffer as ArrayBuffer)
      } else {
        words[word + 3] = given.length
        bytes.set(given, at)
        at += given.length
      }
      if (request[0] === 'swap') {
        const [, , , , , nextFence, token, of] = request
        text += token
        words[word] = typeof of === 'number' ? SWAP_VERSION : SWAP_STATES
        words[word + 2] = token.length
        words[word + 6] = typeof of === 'number' ? of : bitsOf(of)
        words[word + 7] = nextFence ? 1 : 0
      }
    }
    word += REQUEST_WORDS
  }
  return [{ count, text, memory, large, others }, [memory, ...large]]
}

/** The bytes lie in the message's memory. */
export function unpackRequests({ count, text, memory, large, others }: RequestBatch): Request[] {
  const words = new Float64Array(memory, 0, count * REQUEST_WORDS)
  const wordAt = (place: number): number => words[place] as number
  const requests: Request[] = []
  let at = words.byteLength
  let character = 0
  let alone = 0
  let other = 0
  for (let word = 0; word < words.length; word += REQUEST_WORDS) {
    const kind = wordAt(word)
    if (kind === OTHER) {
      requests.push(others[other++] as Request)
      continue
    }
    const afterId = character + wordAt(word + 1)
    const id = text.slice(character, afterId) as RecordId
    character = afterId + wordAt(word + 2)
    const length = wordAt(word + 3)
    const bytes =
      length < 0 ? Buffer.from(large[alone++] as ArrayBuffer, 0, -length) : Buffer.from(memory, at, length)
    if (length > 0) at += length
    const [dueIn, dropIn, condition] = [wordAt(word + 4), wordAt(word + 5), wordAt(word + 6)]
    if (kind === PUT) requests.push(['put', id, bytes, dueIn, dropIn])
    else {
      const of = kind === SWAP_VERSION ? condition : statesOf(condition)
      const nextFence = wordAt(word + 7) === 1
      requests.push(['swap', id, bytes, dueIn, dropIn, nextFence, text.slice(afterId, character), of])
    }
  }
  return requests
}

/** The arguments of `postMessage`. Copies small records; transfers the memory of large ones, which must hold nothing else. */
export function packResults(results: readonly unknown[]): [message: ResultBatch, transfer: ArrayBuffer[]] {
  const count = results.length
  let at = count * RESULT_WORDS * WORD
  let size = at
  for (const result of results) if (isFound(result) && isSmall(result)) size += result[1].length
  const memory = new ArrayBuffer(size)
  const words = new Float64Array(memory, 0, count * RESULT_WORDS)
  const bytes = new Uint8Array(memory)
  const transfer = [memory]
  const others: unknown[] = []
  let word = 0
  for (const result of results) {
    if (isWritten(result)) for (let n = 0; n < RESULT_WORDS; n++) words[word + n] = result[n] as number
    else if (isFound(result) && isSmall(result)) {
      const [now, found] = result
      words[word] = now
      words[word + 1] = FOUND
      words[word + 2] = found.length
      bytes.set(found, at)
      at += found.length
    } else {
      words[word] = ELSEWHERE
      others.push(result)
      if (isFound(result)) transfer.push(result[1].buffer as ArrayBuffer)
    }
    word += RESULT_WORDS
  }
  return [{ count, memory, others }, transfer]
}

/** Small records lie in the message's memory. */
export function unpackResults({ count, memory, others }: ResultBatch): unknown[] {
  const words = new Float64Array(memory, 0, count * RESULT_WORDS)
  const results: unknown[] = []
  let at = words.byteLength
  let other = 0
  for (let word = 0; word < words.length; word += RESULT_WORDS) {
    const [now, version, third] = [words[word], words[word + 1], words[word + 2] as number]
    if (now === ELSEWHERE) results.push(others[other++])
    else if (version === FOUND) {
      results.push([now, Buffer.from(memory, at, third)])
      at += third
    } else results.push([now, version, third, words[word + 3]])
  }
  return results
}

function isAlone({ buffer, byteOffset, length }: Buffer): boolean {
  return length > SMALL_RECORD && byteOffset === 0 && buffer.byteLength <= length + HEAD_ROOM
}

function isWrite(request: Request): request is Write {
  return request[0] === 'put' || request[0] === 'swap'
}

function isWritten(result: unknown): result is WriteResult {
  return Array.isArray(result) && result.length === RESULT_WORDS && typeof result[0] === 'number'
}

function isFound(result: unknown): result is ReadResult<Uint8Array> {
  return Array.isArray(result) && result.length === 2 && result[1] instanceof Uint8Array
}

function isSmall([, found]: ReadResult<Uint8Array>): boolean {
  return found.length <= SMALL_RECORD
}

function bitsOf(states: readonly State[]): number {
  return states.reduce((bits, state) => bits | (1 << STATES.indexOf(state)), 0)
}

/** By their bits. */
const SETS: readonly (readonly State[])[] = Array.from({ length: 1 << STATES.length }, (_, bits) =>
  STATES.filter((_state, n) => bits & (1 << n)),
)

function statesOf(bits: number): readonly State[] {
  return SETS[bits] as readonly State[]
}
