import type { Millis, RecordId } from '../../core/record.ts'
import { outcomeDraftOf, type PendingOutcome } from '../../core/settle.ts'
import { BinaryReader, BinaryWriter } from '../record/binary.ts'
import { decodeRecord, encodeDraft } from '../record/codec.ts'
import type { Sealer } from '../record/sealing.ts'
import { CorruptRecord } from '../register.ts'
import { frameBytes, Spool, type SpoolEntry, type SpoolOptions } from './log.ts'

export interface OutboxOptions extends SpoolOptions {
  /** Only this service's outcomes are written to its keys in the store. */
  readonly service: string
  /** Null: outcomes are stored on disk unencrypted. */
  readonly sealer: Sealer | null
}

/** An outcome in the spool, or on its way there. */
export interface KeptOutcome extends SpoolEntry {
  /** The store has it, or it was given up. */
  drop(): void
}

export interface LeftOutcome {
  readonly unsettled: PendingOutcome
  readonly kept: KeptOutcome
}

/** The guard's view of the spool: outcomes instead of bytes. */
export class Outbox {
  readonly #spool: Spool
  readonly #service: string
  readonly #sealer: Sealer | null

  private constructor(spool: Spool, { service, sealer }: OutboxOptions) {
    this.#spool = spool
    this.#service = service
    this.#sealer = sealer
  }

  /**
   * Opens the spool and returns the outcomes that an earlier process of the service left. Those that have outlived their record are
   * dropped; entries of other services, or unreadable to this version, stay.
   *
   * @throws like {@link Spool.open}.
   */
  static async open(options: OutboxOptions): Promise<{ outbox: Outbox; left: readonly LeftOutcome[] }> {
    const { service, sealer, say } = options
    const { spool, found } = await Spool.open(options)
    const outbox = new Outbox(spool, options)
    const left: LeftOutcome[] = []
    const services = new Map<string, number>()
    let foreign = 0
    let lapsed = 0
    for (const { entry, payload } of found) {
      const decoded = decodeEntry(payload, service, sealer)
      switch (decoded.kind) {
        case 'own':
          if (decoded.unsettled.usefulFor > 0)
            left.push({ unsettled: decoded.unsettled, kept: outbox.#kept(entry) })
          else {
            lapsed++
            spool.drop(entry)
          }
          break
        case 'foreign':
          services.set(decoded.service, (services.get(decoded.service) ?? 0) + 1)
          foreign += frameBytes(payload.length)
          break
        case 'unreadable':
          say('this version cannot read an entry of the spool; it is left in place', {
            error: String(decoded.error),
          })
      }
    }
    if (lapsed > 0)
      say('outcomes in the spool have outlived their records; they are dropped', {
        outcomes: lapsed,
      })
    if (foreign > 0)
      say(
        'the spool holds outcomes that do not belong to this service; they stay on disk: run a proxy of their service on this directory until it has written them, and give each service its own directory',
        { service, services: Object.fromEntries(services), bytes: foreign, room: spool.room },
      )
    return { outbox, left }
  }

  keep(unsettled: PendingOutcome): KeptOutcome {
    return this.#kept(this.#spool.append(encodeEntry(unsettled, this.#service, this.#sealer)))
  }

  close(): Promise<void> {
    return this.#spool.close()
  }

  #kept(entry: SpoolEntry): KeptOutcome {
    return { done: entry.done, drop: () => this.#spool.drop(entry) }
  }
}

/*
 * An entry of the spool, version 2 (docs/record-format.md): version (1), length of the service's name (1), the name, flags (1), record id
 * (32), version that a lost claim expected (6), spans (6, 6), how long it is useful (6), when it was written (6), then the record as for
 * the store, including sealing. The name comes first, so that any version can recognise another service's entry.
 */
const VERSION = 2
const FLAG = { claimed: 1, withdrawn: 2, over: 4, retry: 8 } as const
const ID_BYTES = 32
/** Without the name of the service. */
const HEAD_BYTES = 3 + ID_BYTES + 5 * 6

export function encodeEntry(unsettled: PendingOutcome, service: string, sealer: Sealer | null): Buffer {
  const { id, draft, spans, claimed, withdrawn, over, onLeaseExpired, usefulFor } = unsettled
  const plain = encodeDraft(draft)
  const record = sealer === null ? plain : sealer.seal(id, plain)
  const w = new BinaryWriter(HEAD_BYTES + service.length + record.length)
  w.u8(VERSION)
  w.u8(service.length)
  w.bytes(Buffer.from(service))
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
  | { readonly kind: 'foreign'; readonly service: string }
  | { readonly kind: 'unreadable'; readonly error: CorruptRecord }

export function decodeEntry(payload: Buffer, service: string, sealer: Sealer | null): Decoded {
  try {
    const r = new BinaryReader(payload, 0)
    const version = r.u8()
    if (version !== VERSION) throw new CorruptRecord(`the entry has version ${version}, not ${VERSION}`)
    const owner = r.take(r.u8()).toString('latin1')
    if (owner !== service) return { kind: 'foreign', service: owner }
    const flags = r.u8()
    const id = r.take(ID_BYTES).toString('base64url') as RecordId
    const over = r.u48()
    const spans = { dueIn: r.u48(), dropIn: r.u48() }
    const usefulFor = remaining(r.u48(), r.u48())
    const record = payload.subarray(HEAD_BYTES + owner.length)
    const draft = outcomeDraftOf(decodeRecord(sealer === null ? record : sealer.open(id, record)))
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

/** By the wall clock, as the process with the monotonic one is gone. A clock that was set back does not extend it. */
function remaining(usefulFor: Millis, madeAt: Millis): Millis {
  return Math.min(usefulFor, madeAt + usefulFor - Date.now())
}
