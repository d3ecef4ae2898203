import { randomBytes } from 'node:crypto'
import type { Millis, RecordId } from '../../core/record.ts'
import { reconnectDelay } from '../reconnect.ts'
import { type Subscription, Subscriptions } from '../subscriptions.ts'
import { type Lanes, type LanesOptions, lockWait } from './lanes.ts'
import { ignore, PostgresLink } from './link.ts'

const WATCH = 'SELECT $1::bigint, idempotency.watch($2, $3, $4, $5, $6)'
const UNWATCH = 'SELECT $1::bigint, idempotency.unwatch($2, $3, $4)'
const TELL = 'SELECT $1::bigint, idempotency.tell($2, $3)'
const HELLO = 'hello'

/**
 * Watches records by LISTEN on a separate connection, opened for the first watcher and then kept. Rows list who waits for which record, so
 * that a write notifies only those; this process notifies its own watchers directly. It first sends a message to itself: a pooler that
 * shares connections (PgBouncer in transaction mode) does not deliver it, and then no rows are written.
 */
export class Listener extends Subscriptions {
  readonly #options: LanesOptions & { readonly service: string }
  readonly #lanes: Lanes
  readonly #skew: () => Millis
  readonly #channel = `idempotency_${randomBytes(8).toString('hex')}`
  /** Rows not yet written. */
  readonly #leaving = new Map<RecordId, Promise<unknown>>()
  #link: PostgresLink | null = null
  #isHeard = false
  #isConnecting = false
  #attempts = 0
  #retry: NodeJS.Timeout | undefined
  #isDeaf = false
  #isClosed = false

  constructor(options: LanesOptions & { readonly service: string }, lanes: Lanes, skew: () => Millis) {
    super(options.timeoutMs)
    this.#options = options
    this.#lanes = lanes
    this.#skew = skew
  }

  /** This process ended an attempt of the record. `waiting`: the channels of the replicas that wait, separated by spaces. */
  tell(id: RecordId, waiting: string): void {
    this.changed(id)
    const others = waiting.split(' ').filter((channel) => channel !== '' && channel !== this.#channel)
    if (others.length > 0) this.#send(others, id).catch(ignore)
  }

  /** The server may have been replaced, and may have forgotten who is waiting. */
  resubscribe(): void {
    this.#link?.destroy()
  }

  async close(): Promise<void> {
    this.#isClosed = true
    clearTimeout(this.#retry)
    this.missAll()
    await this.#link?.end()
  }

  #send(channels: readonly string[], message: string): Promise<unknown> {
    return this.#lanes.run(TELL, [channels, `${this.#options.service} ${message}`], 'local')
  }

  protected override begin(subscription: Subscription): void {
    if (this.#isClosed || this.#isDeaf) this.miss(subscription)
    else if (this.#isHeard) void this.#subscribe(subscription)
    else void this.#connect()
  }

  protected override end(id: RecordId): void {
    if (!this.#isHeard) return
    const left = this.#lanes
      .run(UNWATCH, [this.#options.service, id, this.#channel], 'local')
      .catch(ignore)
      .then(() => this.#leaving.delete(id))
    this.#leaving.set(id, left)
  }

  async #subscribe(subscription: Subscription): Promise<void> {
    const { service, timeoutMs } = this.#options
    const { id } = subscription
    try {
      await this.#leaving.get(id)
      const args = [service, id, this.#skew(), lockWait(timeoutMs), this.#channel]
      await this.#lanes.run(WATCH, args, 'local')
    } catch {
      return this.miss(subscription)
    }
    this.acknowledged(subscription)
  }

  async #connect(): Promise<void> {
    if (this.#isConnecting) return
    this.#isConnecting = true
    clearTimeout(this.#retry)
    try {
      const link = await PostgresLink.open(this.#options.address, () => this.#lost())
      this.#link = link
      if (this.#isClosed) return void link.end()
      link.onNotification((message) => this.#hear(message))
      await link.ask(`LISTEN ${this.#channel}`)
      // Long ago sent, or sending failed and ended the connection.
      this.#retry = setTimeout(() => this.#giveUp(link), 2 * this.#options.timeoutMs)
      await this.#send([this.#channel], HELLO)
    } catch {
      // The connections for statements report the same.
      this.#link?.destroy()
    } finally {
      this.#isConnecting = false
    }
  }

  /** The connection is up, but nothing arrives. */
  #giveUp(link: PostgresLink): void {
    this.#isDeaf = true
    void link.end()
    this.#options.onEvent(
      'error',
      'notifications do not arrive: a pooler that shares connections is in between; waiting requests poll the store instead',
    )
  }

  #hear(message: string): void {
    const [service, what] = message.split(' ')
    if (service !== this.#options.service || what === undefined) return
    if (what !== HELLO) return this.changed(what as RecordId)
    clearTimeout(this.#retry)
    this.#isHeard = true
    this.#attempts = 0
    for (const subscription of this.all) void this.#subscribe(subscription)
  }

  #lost(): void {
    this.#link = null
    this.#isHeard = false
    clearTimeout(this.#retry)
    this.missAll()
    if (this.#isClosed || this.#isDeaf) return
    this.#retry = setTimeout(
      () => {
        if (this.all.length > 0) void this.#connect()
      },
      reconnectDelay(++this.#attempts),
    )
  }
}
