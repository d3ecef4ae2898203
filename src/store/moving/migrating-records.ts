import { randomFillSync } from 'node:crypto'
import { type ComparedRecord, isAhead, isAheadOfMirror } from '../../core/copies.ts'
import type { Millis, Spans } from '../../core/record.ts'
import { writeU48 } from '../record/binary.ts'
import { isClaim, mayRenew, meets, PREFIX, prolongLease, readStamps, stateCode } from '../record/codec.ts'
import type { GetReply } from '../register.ts'

/* Records of two stores that are used as one: how they compare, and how they are written to the other store. */

/** A record to be written, without the stamps that a store assigns. */
export interface Given {
  readonly bytes: Buffer
  readonly spans: Spans
}

/** Like {@link isAhead}, but for the same attempt the lead wins. */
export function follows(ours: ComparedRecord, theirs: ComparedRecord): boolean {
  return isAhead(ours, theirs) || (ours.token.equals(theirs.token) && !isDone(theirs))
}

export function followsInMirror(ours: ComparedRecord, theirs: ComparedRecord): boolean {
  return isAheadOfMirror(ours, theirs) || follows(ours, theirs)
}

export function isDone({ state }: ComparedRecord): boolean {
  return state === 'completed' || state === 'expired'
}

/** Whether it is a claim of the same attempt. */
export function isSame(found: Buffer, { buffer, byteOffset }: Buffer): boolean {
  const token = Buffer.from(buffer, byteOffset + PREFIX.token, PREFIX.createdAt - PREFIX.token)
  return meets(found, { token, states: ['in_progress'] })
}

/** The record for the other store, with the time that is left. */
export function given(bytes: Buffer, now: Millis): Given {
  const { due, dropAt } = readStamps(bytes)
  return { bytes, spans: { dueIn: due - now, dropIn: dropAt - now } }
}

/** A copy whose fence is at least `fence`: a store would raise a lower one, but sealed bytes are bound to their fence. */
export function atLeast(bytes: Buffer, fence: number): Buffer {
  const copy = Buffer.from(bytes)
  writeU48(copy, Math.max(readStamps(bytes).fence, fence), PREFIX.fence)
  return copy
}

/** The claim as withdrawn, under a token of its own: under the attempt's, it would win over a new claim of that attempt. */
export function freed(bytes: Buffer): Buffer {
  const copy = Buffer.from(bytes)
  copy[PREFIX.state] = stateCode('failed_retryable')
  randomFillSync(copy, PREFIX.token, PREFIX.createdAt - PREFIX.token)
  return copy
}

/**
 * The lead's record whose lease has ended, with the lease that the other store has of the same attempt: the owner is not silent. Only for
 * reading: if leases were copied back and forth, a dead owner's would never end. Null: there is none.
 */
export function renewedBy(theirs: GetReply, own: GetReply): Buffer | null {
  if (theirs.bytes === null || own.bytes === null || !isClaim(theirs.bytes)) return null
  const { dueIn } = given(theirs.bytes, theirs.now).spans
  const token = theirs.bytes.subarray(PREFIX.token, PREFIX.createdAt)
  const isOver = !isClaim(own.bytes) || readStamps(own.bytes).due <= own.now
  if (dueIn <= 0 || !isOver || !mayRenew(own.bytes, token)) return null
  const renewed = Buffer.from(own.bytes)
  prolongLease(renewed, own.now, { dueIn, dropIn: 0 })
  // Nothing is written.
  writeU48(renewed, readStamps(own.bytes).version, PREFIX.version)
  return renewed
}
