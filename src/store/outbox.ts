import type { PendingOutcome } from '../core/outcome.ts'
import { decodeEntry, encodeEntry } from './outbox-entry.ts'
import { Spool, type SpoolOptions } from './spool.ts'
import { frameBytes } from './spool-file.ts'
import type { Entry, Found } from './spool-read.ts'

export interface OutboxOptions extends SpoolOptions {
  /** Whose outcomes these are: no other's are written to its keys in the store. */
  readonly service: string
}

/** An outcome that is in the spool, or on its way there. */
export interface Kept extends Entry {
  /** It is written, or given up. */
  drop(): void
}

export interface Left {
  readonly unsettled: PendingOutcome
  readonly kept: Kept
}

/** Outcomes instead of bytes: what the guard speaks with a spool. */
export class Outbox {
  readonly #spool: Spool
  readonly #service: string

  private constructor(spool: Spool, service: string) {
    this.#spool = spool
    this.#service = service
  }

  /**
   * Opens the spool, and gives the outcomes that an earlier process of the service left in it. Those that no record would show
   * any more are dropped; what another service left, or what this version cannot read, stays where it is.
   * @throws as {@link Spool.open}.
   */
  static async open(options: OutboxOptions): Promise<{ outbox: Outbox; left: readonly Left[] }> {
    const { service, say } = options
    const { spool, found } = await Spool.open(options)
    const outbox = new Outbox(spool, service)
    const left: Left[] = []
    const foreign = new Foreign()
    let lapsed = 0
    for (const { entry, payload } of found) {
      const decoded = decodeEntry(payload, service)
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
          foreign.add(decoded.service, payload)
          break
        case 'unreadable':
          say('an entry of the spool cannot be read by this version; it is left there', {
            error: String(decoded.error),
          })
      }
    }
    if (lapsed > 0)
      say('outcomes in the spool are older than any record of theirs; they are dropped', {
        outcomes: lapsed,
      })
    if (foreign.bytes > 0)
      say(
        'the spool holds outcomes that are not of this service; they stay on disk and are never written here: start a proxy of their service on this directory until it has written them, and give each service a directory of its own',
        {
          service,
          services: foreign.services,
          withoutService: foreign.withoutService,
          bytes: foreign.bytes,
          room: spool.room,
        },
      )
    return { outbox, left }
  }

  /** At once in line for the disk, behind what came before. */
  keep(unsettled: PendingOutcome): Kept {
    return this.#kept(this.#spool.append(encodeEntry(unsettled, this.#service)))
  }

  close(): Promise<void> {
    return this.#spool.close()
  }

  #kept(entry: Entry): Kept {
    return { done: entry.done, drop: () => this.#spool.drop(entry) }
  }
}

/** Entries that are not of this service. */
class Foreign {
  readonly #services = new Map<string, number>()
  withoutService = 0
  /** What they take of the spool's room. */
  bytes = 0

  add(service: string | null, payload: Found['payload']): void {
    if (service === null) this.withoutService++
    else this.#services.set(service, (this.#services.get(service) ?? 0) + 1)
    this.bytes += frameBytes(payload.length)
  }

  /** How many of which service. */
  get services(): Readonly<Record<string, number>> {
    return Object.fromEntries(this.#services)
  }
}
