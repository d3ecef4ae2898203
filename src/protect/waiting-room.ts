import type { IdempotencyRecord, Millis, RecordId } from '../core/record.ts'
import type { Records } from '../store/records.ts'
import type { Watching } from '../store/register.ts'

/** Pauses between reads of the store, doubled each time: for lost messages, and stores that send none. */
const POLL_FIRST: Millis = 100
const MAX_POLL: Millis = 1000

export type RecordNews =
  /** The current record. `now` is the store's time; 0 if this replica itself has just written the record. */
  | { readonly kind: 'record'; readonly record: IdempotencyRecord; readonly now: Millis }
  | { readonly kind: 'absent' }
  /** It cannot be decoded. */
  | { readonly kind: 'corrupt' }

/**
 * Holds duplicates until the first request has finished (contract §6), in one room per record; also holds requests that wait for a store in
 * its grace period.
 */
export class WaitingRoom {
  readonly #records: Pick<Records, 'get'>
  readonly #store: Watching
  #most: number
  readonly #rooms = new Map<RecordId, Room>()
  /** The records that somebody waits for. */
  readonly awaited: Pick<ReadonlyMap<RecordId, unknown>, 'has'> = this.#rooms
  /** Functions that dismiss the requests that wait for the store rather than for a record. */
  readonly #dismissals = new Set<() => void>()
  #size = 0
  #draining = false

  constructor(records: Pick<Records, 'get'>, store: Watching, most: number) {
    this.#records = records
    this.#store = store
    this.#most = most
  }

  get size(): number {
    return this.#size
  }

  /** Sets a new limit; requests already waiting stay. */
  resize(most: number): void {
    this.#most = most
  }

  /** Returns a seat; null if `most` are taken. `local`: the attempt runs on this replica, which notifies the room directly. */
  enter(id: RecordId, local: boolean): Seat | null {
    if (this.#size >= this.#most || (this.#draining && !local)) return null
    this.#size++
    let room = this.#rooms.get(id)
    if (room === undefined) {
      room = new Room(id, this.#records, this.#store)
      this.#rooms.set(id, room)
    }
    if (!local) room.listen()
    const seat = new Seat(room, () => {
      this.#size--
      room.seats.delete(seat)
      if (room.seats.size > 0) return
      room.close()
      this.#rooms.delete(id)
    })
    room.seats.add(seat)
    return seat
  }

  /**
   * Waits that long for the store. False: no place is free, or the wait ended early because the client left (`onGone` registers the
   * callback for that) or the proxy stops.
   */
  async outlast(time: Millis, onGone: (left: () => void) => () => void): Promise<boolean> {
    if (this.#size >= this.#most || this.#draining) return false
    this.#size++
    const { promise, resolve } = Promise.withResolvers<boolean>()
    const dismiss = (): void => resolve(false)
    const timer = setTimeout(resolve, time, true)
    const stop = onGone(dismiss)
    this.#dismissals.add(dismiss)
    const lasted = await promise
    clearTimeout(timer)
    stop()
    this.#dismissals.delete(dismiss)
    this.#size--
    return lasted
  }

  /** An attempt on this replica has ended; `record` is its result; null: look it up. */
  tell(id: RecordId, record: IdempotencyRecord | null): void {
    const room = this.#rooms.get(id)
    if (record === null) room?.look()
    else room?.tell({ kind: 'record', record, now: 0 })
  }

  /** The proxy stops: keeps the requests that wait for attempts on this replica and dismisses the others. */
  drain(): void {
    this.#draining = true
    for (const dismiss of this.#dismissals) dismiss()
    for (const room of this.#rooms.values()) if (room.listening) room.dismiss()
  }

  /** Nobody waits any longer. */
  close(): void {
    this.#draining = true
    for (const room of this.#rooms.values()) room.dismiss()
  }
}

/** The requests that wait for one record. */
class Room {
  readonly seats = new Set<Seat>()
  /** Whether the room watches for other replicas' writes. */
  listening = false
  readonly #id: RecordId
  readonly #records: Pick<Records, 'get'>
  readonly #store: Watching
  #offered = -1
  #pause: Millis = POLL_FIRST
  #timer: NodeJS.Timeout
  #looking = false
  #lookAgain = false
  #closed = false
  #unwatch: (() => void) | null = null

  constructor(id: RecordId, records: Pick<Records, 'get'>, store: Watching) {
    this.#id = id
    this.#records = records
    this.#store = store
    this.#timer = this.#later()
  }

  tell(news: RecordNews): void {
    for (const seat of this.seats) seat.tell(news)
  }

  dismiss(): void {
    for (const seat of this.seats) seat.dismiss()
  }

  /** The attempt runs elsewhere: watches for other replicas' writes, and reads the record once in case it missed one. */
  listen(): void {
    if (this.listening) return
    this.listening = true
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

  /** Whether the caller may take over after attempt `fence` did nothing: only the first caller on this replica. */
  takesOver(fence: number): boolean {
    if (fence <= this.#offered) return false
    this.#offered = fence
    return true
  }

  /** The takeover failed: the next one may try. */
  passOn(): void {
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
      this.#pause = Math.min(this.#pause * 2, MAX_POLL)
      this.#timer = this.#later()
      this.look()
    }, this.#pause).unref()
  }

  async #look(): Promise<void> {
    this.#looking = true
    const reply = await this.#records.get(this.#id).catch(() => ({ kind: 'corrupt' }) as const)
    // If the store is unavailable, the next read may succeed.
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

/** One waiting duplicate. */
export class Seat {
  readonly room: Room
  readonly leave: () => void
  #news: RecordNews | null = null
  #dismissed = false
  #wake: (() => void) | null = null

  constructor(room: Room, leave: () => void) {
    this.room = room
    this.leave = leave
  }

  /** Returns news about the record; null after `time`, or once {@link dismiss} was called. */
  async next(time: Millis): Promise<RecordNews | null> {
    if (this.#news === null && !this.#dismissed) {
      let timer: NodeJS.Timeout | undefined
      await new Promise<void>((resolve) => {
        this.#wake = resolve
        timer = setTimeout(resolve, Math.max(0, time))
      })
      clearTimeout(timer)
    }
    const news = this.#dismissed ? null : this.#news
    this.#news = null
    return news
  }

  tell(news: RecordNews): void {
    this.#news = news
    this.#wake?.()
  }

  /** Ends the wait: the client left, or the proxy stops. */
  dismiss(): void {
    this.#dismissed = true
    this.#wake?.()
  }
}
