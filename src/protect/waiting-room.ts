import type { IdempotencyRecord, Millis, RecordId } from '../core/record.ts'
import type { Records } from '../store/records.ts'
import type { Watching } from '../store/register.ts'

/** Looks at the store in case a message was lost, or the store sends none. */
const LOOKS: PollIntervals = { first: 100, most: 1000 }

/** How long until the first look; each next one is twice as far, up to `most`. */
export interface PollIntervals {
  readonly first: Millis
  readonly most: Millis
}

export type RecordNews =
  /** A record as it is now. `now` is the store's time; 0 where this replica itself wrote the record a moment ago. */
  | { readonly kind: 'record'; readonly record: IdempotencyRecord; readonly now: Millis }
  | { readonly kind: 'absent' }
  /** It cannot be decoded. */
  | { readonly kind: 'corrupt' }

/** Duplicates that are held until the first request has finished (contract §6): one room for each record. */
export class WaitingRoom {
  readonly #records: Pick<Records, 'get'>
  readonly #store: Watching
  #most: number
  readonly #looks: PollIntervals
  readonly #rooms = new Map<RecordId, Room>()
  #size = 0
  #draining = false

  constructor(records: Pick<Records, 'get'>, store: Watching, most: number, looks: PollIntervals = LOOKS) {
    this.#records = records
    this.#store = store
    this.#most = most
    this.#looks = looks
  }

  get size(): number {
    return this.#size
  }

  /** Another bound from now on; who sits stays. */
  resize(most: number): void {
    this.#most = most
  }

  /** A seat; null where `most` are taken. `local`: the attempt runs on this replica, which tells by itself. */
  enter(id: RecordId, local: boolean): Seat | null {
    if (this.#size >= this.#most || (this.#draining && !local)) return null
    this.#size++
    let room = this.#rooms.get(id)
    if (room === undefined) {
      room = new Room(id, this.#records, this.#store, this.#looks)
      this.#rooms.set(id, room)
    }
    if (!local) room.listen()
    const seat = new Seat(room, () => {
      this.#size--
      if (!room.left(seat)) return
      room.close()
      this.#rooms.delete(id)
    })
    room.entered(seat)
    return seat
  }

  /** An attempt of this replica has ended; `record` is what it left behind, null where that has to be looked up. */
  tell(id: RecordId, record: IdempotencyRecord | null): void {
    const room = this.#rooms.get(id)
    if (room === undefined) return
    if (record === null) room.look()
    else room.tell({ kind: 'record', record, now: 0 })
  }

  /** The proxy stops: those that wait for what runs here may stay, for other replicas nobody waits any longer. */
  drain(): void {
    this.#draining = true
    for (const room of this.#rooms.values()) if (room.listens) room.dismiss()
  }

  /** Nobody waits any longer. */
  close(): void {
    this.#draining = true
    for (const room of this.#rooms.values()) room.dismiss()
  }
}

class Room {
  readonly #id: RecordId
  readonly #records: Pick<Records, 'get'>
  readonly #store: Watching
  readonly #seats = new Set<Seat>()
  #offered = -1
  readonly #looks: PollIntervals
  #pause: Millis
  #timer: NodeJS.Timeout
  #looking = false
  #lookAgain = false
  #listening = false
  #closed = false
  #unwatch: (() => void) | null = null

  constructor(id: RecordId, records: Pick<Records, 'get'>, store: Watching, looks: PollIntervals) {
    this.#id = id
    this.#records = records
    this.#store = store
    this.#looks = looks
    this.#pause = looks.first
    this.#timer = this.#later()
  }

  entered(seat: Seat): void {
    this.#seats.add(seat)
  }

  get listens(): boolean {
    return this.#listening
  }

  /** True: it was the last one. */
  left(seat: Seat): boolean {
    this.#seats.delete(seat)
    return this.#seats.size === 0
  }

  tell(news: RecordNews): void {
    for (const seat of this.#seats) seat.tell(news)
  }

  dismiss(): void {
    for (const seat of this.#seats) seat.dismiss()
  }

  /** Hears of what other replicas write; looks once it does, for what it missed until then. */
  listen(): void {
    if (this.#listening) return
    this.#listening = true
    void this.#store
      .watch(this.#id, () => this.look())
      .then((unwatch) => {
        if (this.#closed) return unwatch()
        this.#unwatch = unwatch
        this.look()
      })
  }

  look(): void {
    if (this.#looking) this.#lookAgain = true
    else void this.#look()
  }

  /** True for the first who asks about that attempt: one of them takes over. */
  offer(fence: number): boolean {
    if (fence <= this.#offered) return false
    this.#offered = fence
    return true
  }

  /** Whoever had it did not get through: the next one may try. */
  offerAgain(): void {
    this.#offered = -1
    this.look()
  }

  close(): void {
    this.#closed = true
    clearTimeout(this.#timer)
    this.#unwatch?.()
  }

  #later(): NodeJS.Timeout {
    return setTimeout(() => {
      this.#pause = Math.min(this.#pause * 2, this.#looks.most)
      this.#timer = this.#later()
      this.look()
    }, this.#pause).unref()
  }

  async #look(): Promise<void> {
    this.#looking = true
    const reply = await this.#records.get(this.#id).catch(() => ({ kind: 'corrupt' }) as const)
    // Unavailable: the next look may succeed.
    if (reply.kind === 'corrupt') this.tell({ kind: 'corrupt' })
    else if (reply.kind === 'read') {
      const { record, now } = reply
      this.tell(record === null ? { kind: 'absent' } : { kind: 'record', record, now })
    }
    this.#looking = false
    const again = this.#lookAgain && !this.#closed
    this.#lookAgain = false
    if (again) void this.#look()
  }
}

/** One duplicate that is held. */
export class Seat {
  readonly #room: Room
  readonly #leave: () => void
  #news: RecordNews | null = null
  #dismissed = false
  #wake: (() => void) | null = null

  constructor(room: Room, leave: () => void) {
    this.#room = room
    this.#leave = leave
  }

  /** What is new of the record; null after `time`, or once {@link dismiss} was called. */
  async next(time: Millis): Promise<RecordNews | null> {
    if (this.#news === null && !this.#dismissed) {
      let timer: NodeJS.Timeout | undefined
      await new Promise<void>((resolve) => {
        this.#wake = resolve
        timer = setTimeout(resolve, Math.max(0, time))
      })
      clearTimeout(timer)
      this.#wake = null
    }
    const news = this.#dismissed ? null : this.#news
    this.#news = null
    return news
  }

  tell(news: RecordNews): void {
    this.#news = news
    this.#wake?.()
  }

  /** It has waited long enough: its client left, or the proxy stops. */
  dismiss(): void {
    this.#dismissed = true
    this.#wake?.()
  }

  /** Whether this one takes over where the attempt `fence` did nothing: one of those that wait on this replica. */
  takesOver(fence: number): boolean {
    return this.#room.offer(fence)
  }

  /** The attempt that is waited for runs elsewhere now. */
  listen(): void {
    this.#room.listen()
  }

  /** It could not. */
  passesOn(): void {
    this.#room.offerAgain()
  }

  leave(): void {
    this.#leave()
  }
}
