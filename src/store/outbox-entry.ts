import { outcomeDraftOf, type PendingOutcome } from '../core/outcome.ts'
import type { Millis, RecordId } from '../core/record.ts'
import { BinaryReader, BinaryWriter } from './binary.ts'
import { decodeRecord, encodeDraft } from './codec.ts'
import { CorruptRecord } from './register.ts'

/*
 * An entry of the spool, version 2 (docs/record-format.md): version (1), length of the service's name (1), the name, flags (1),
 * record id (32), version that a lost claim expected (6), spans (6, 6), how long it is of use (6), when it was made (6), then the
 * record as a store would get it. The name stands first, so that nobody has to know more to leave it to its service.
 */
const VERSION = 2
/** Before services had keys of their own in the store. */
const WITHOUT_SERVICE = 1
const FLAG = { claimed: 1, withdrawn: 2, over: 4, retry: 8 } as const
const ID_BYTES = 32
/** Without the name of the service. */
const HEAD_BYTES = 3 + ID_BYTES + 5 * 6

export function encodeEntry(unsettled: PendingOutcome, service: string): Buffer {
  const { id, draft, spans, claimed, withdrawn, over, onLeaseExpired, usefulFor } = unsettled
  const record = encodeDraft(draft)
  const w = new BinaryWriter(HEAD_BYTES + service.length + record.length)
  w.u8(VERSION)
  w.u8(service.length)
  w.ascii(service)
  w.u8(
    (claimed ? FLAG.claimed : 0) |
      (withdrawn ? FLAG.withdrawn : 0) |
      (over === null ? 0 : FLAG.over) |
      (onLeaseExpired === 'retry' ? FLAG.retry : 0),
  )
  w.bytes(Buffer.from(id, 'base64url'))
  w.u48(over ?? 0)
  w.u48(spans.dueIn)
  w.u48(spans.dropIn)
  w.u48(usefulFor)
  w.u48(Date.now())
  w.bytes(record)
  return w.done()
}

export type Decoded =
  | { readonly kind: 'own'; readonly unsettled: PendingOutcome }
  /** Of another service; null: a version wrote it that did not say whose it is. */
  | { readonly kind: 'foreign'; readonly service: string | null }
  | { readonly kind: 'unreadable'; readonly error: CorruptRecord }

/** An outcome of `service`, or whose it is. */
export function decodeEntry(payload: Buffer, service: string): Decoded {
  try {
    const r = new BinaryReader(payload, 0)
    const version = r.u8()
    if (version === WITHOUT_SERVICE) return { kind: 'foreign', service: null }
    if (version !== VERSION) throw new CorruptRecord(`the entry has version ${version}, not ${VERSION}`)
    const owner = r.take(r.u8()).toString('latin1')
    if (owner !== service) return { kind: 'foreign', service: owner }
    const flags = r.u8()
    const id = r.take(ID_BYTES).toString('base64url') as RecordId
    const over = r.u48()
    const spans = { dueIn: r.u48(), dropIn: r.u48() }
    const usefulFor = remaining(r.u48(), r.u48())
    const draft = outcomeDraftOf(decodeRecord(payload.subarray(HEAD_BYTES + owner.length)))
    if (draft === null) throw new CorruptRecord('the entry holds no outcome')
    const unsettled: PendingOutcome = {
      id,
      draft,
      spans,
      claimed: (flags & FLAG.claimed) !== 0,
      withdrawn: (flags & FLAG.withdrawn) !== 0,
      over: (flags & FLAG.over) === 0 ? null : over,
      onLeaseExpired: (flags & FLAG.retry) === 0 ? 'unknown' : 'retry',
      usefulFor,
    }
    return { kind: 'own', unsettled }
  } catch (error) {
    if (error instanceof CorruptRecord) return { kind: 'unreadable', error }
    throw error
  }
}

/** By the wall clock, as the process that knew better is gone. One that was set back does not prolong. */
function remaining(usefulFor: Millis, madeAt: Millis): Millis {
  return Math.min(usefulFor, madeAt + usefulFor - Date.now())
}
