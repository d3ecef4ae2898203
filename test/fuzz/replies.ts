import type { RecordId } from '../../src/core/record.ts'
import { CorruptRecord, StoreUnavailable } from '../../src/store/register.ts'
import { bytesOf } from '../store/fixtures.ts'
import { same } from './engine.ts'

/* Stores that are asked something and find nonsense: what they may make of it, by docs/record-format.md alone. */

export const ID = 'A'.repeat(43) as RecordId
export const TOKEN = Buffer.alloc(16, 5)
export const NOW = 1_764_000_000_000
export const claim = () => bytesOf('in_progress', TOKEN)
export const outcome = () => bytesOf('completed', TOKEN)
export const OWN = { token: TOKEN, states: ['in_progress'] } as const
export const NOTE = { tag: 'a', count: 1, firstAgo: 1, lastAgo: 0, text: '{}' }

/** Must be refused: by an error that says that the store is at fault, and by no other. */
export const NONE = Symbol('no such reply')
export const ANY = Symbol('whatever it is')
/** A reply, NONE, or ANY. */
export type Expected = unknown

/** @throws unless the reply is as expected. */
export async function replies(what: string, ask: () => unknown, expected: Expected): Promise<void> {
  let reply: unknown
  try {
    reply = await ask()
  } catch (error) {
    if (!(error instanceof StoreUnavailable || error instanceof CorruptRecord)) throw error
    reply = NONE
  }
  if (expected === ANY || (reply === NONE && expected === NONE)) return
  if (reply === NONE) throw new Error(`${what}: refused, expected ${JSON.stringify(expected)}`)
  if (expected === NONE) throw new Error(`${what}: taken for ${JSON.stringify(reply)}`)
  same(what, reply, expected)
}

interface Parts {
  readonly schema: number
  readonly state: number
  /** Version, fence, when it was made and changed, when it is due and dropped. */
  readonly numbers: readonly number[]
  readonly token: Buffer
  /** Its head and its payload. */
  readonly rest: readonly Buffer[]
}

/** The record of these columns. */
export function recordBytes({ schema, state, numbers, token, rest }: Parts): Buffer {
  const [version, fence, ...times] = numbers.map((number) => {
    const bytes = Buffer.alloc(6)
    bytes.writeUIntBE(number, 0, 6)
    return bytes
  }) as [Buffer, Buffer, ...Buffer[]]
  const begins = [Buffer.from('IP'), Buffer.from([schema, state])]
  return Buffer.concat([...begins, version, fence, token, ...times, ...rest])
}
