import type { Millis, RecordId } from '../core/record.ts'
import { draftOf, type Unsettled } from '../core/unsettled.ts'
import { decodeRecord, encodeDraft } from './codec.ts'
import { Reader, Writer } from './octets.ts'
import { CorruptRecord } from './register.ts'
import { Spool, type SpoolOptions } from './spool.ts'
import type { Entry } from './spool-read.ts'

/*
 * An entry of the spool, version 1 (docs/record-format.md): version (1), flags (1), record id (32), version that a lost claim
 * expected (6), spans (6, 6), how long it is of use (6), when it was made (6), then the record as a store would get it.
 */
const VERSION = 1
const FLAG = { claimed: 1, withdrawn: 2, over: 4, retry: 8 } as const
const ID_BYTES = 32
const HEAD_BYTES = 2 + ID_BYTES + 5 * 6

/** An outcome that is in the spool, or on its way there. */
export interface Kept extends Entry {
  /** It is written, or given up. */
  drop(): void
}

export interface Left {
  readonly unsettled: Unsettled
  readonly kept: Kept
}

/** Outcomes instead of bytes: what the guard speaks with a spool. */
export class Outbox {
  readonly #spool: Spool

  private constructor(spool: Spool) {
    this.#spool = spool
  }

  /**
   * Opens the spool, and gives the outcomes that an earlier process left in it. Those that no record would show any more are dropped;
   * what this version cannot read stays where it is.
   * @throws as {@link Spool.open}.
   */
  static async open(options: SpoolOptions): Promise<{ outbox: Outbox; left: readonly Left[] }> {
    const { spool, found } = await Spool.open(options)
    const outbox = new Outbox(spool)
    const left: Left[] = []
    let lapsed = 0
    for (const { entry, payload } of found) {
      const unsettled = decode(payload)
      if (unsettled instanceof CorruptRecord)
        options.say('an entry of the spool cannot be read by this version; it is left there', {
          error: String(unsettled),
        })
      else if (unsettled.usefulFor > 0) left.push({ unsettled, kept: outbox.#kept(entry) })
      else {
        lapsed++
        spool.drop(entry)
      }
    }
    if (lapsed > 0)
      options.say('outcomes in the spool are older than any record of theirs; they are dropped', {
        outcomes: lapsed,
      })
    return { outbox, left }
  }

  /** At once in line for the disk, behind what came before. */
  keep(unsettled: Unsettled): Kept {
    return this.#kept(this.#spool.append(encode(unsettled)))
  }

  close(): Promise<void> {
    return this.#spool.close()
  }

  #kept(entry: Entry): Kept {
    return { done: entry.done, drop: () => this.#spool.drop(entry) }
  }
}

function encode(unsettled: Unsettled): Buffer {
  const { id, draft, spans, claimed, withdrawn, over, onLeaseExpired, usefulFor } = unsettled
  const record = encodeDraft(draft)
  const w = new Writer(HEAD_BYTES + record.length)
  w.u8(VERSION)
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

function decode(payload: Buffer): Unsettled | CorruptRecord {
  try {
    const r = new Reader(payload, 0)
    const version = r.u8()
    if (version !== VERSION) return new CorruptRecord(`the entry has version ${version}, not ${VERSION}`)
    const flags = r.u8()
    const id = r.take(ID_BYTES).toString('base64url') as RecordId
    const over = r.u48()
    const spans = { dueIn: r.u48(), dropIn: r.u48() }
    const usefulFor = r.u48()
    const left = remaining(usefulFor, r.u48())
    const draft = draftOf(decodeRecord(payload.subarray(HEAD_BYTES)))
    if (draft === null) return new CorruptRecord('the entry holds no outcome')
    return {
      id,
      draft,
      spans,
      claimed: (flags & FLAG.claimed) !== 0,
      withdrawn: (flags & FLAG.withdrawn) !== 0,
      over: (flags & FLAG.over) === 0 ? null : over,
      onLeaseExpired: (flags & FLAG.retry) === 0 ? 'unknown' : 'retry',
      usefulFor: left,
    }
  } catch (error) {
    if (error instanceof CorruptRecord) return error
    throw error
  }
}

/** By the wall clock, as the process that knew better is gone. One that was set back does not prolong. */
function remaining(usefulFor: Millis, madeAt: Millis): Millis {
  return Math.min(usefulFor, madeAt + usefulFor - Date.now())
}
