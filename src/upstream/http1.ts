import type { Millis } from '../core/record.ts'
import { UpstreamClient } from './client.ts'
import type { DispatchedRequest } from './dispatched.ts'
import { UpstreamConnection } from './http1-connection.ts'

/**
 * An undici dispatcher for HTTP/1.1 to one upstream, over TCP, TLS or a unix socket: one request at a time per connection, never pipelined, never sent
 * twice. A connection is reused only if nothing can follow the answer on it (contract §3). Between an answer and the next request the event loop polls
 * for input at least once: bytes or a close after an answer must not be taken for the next answer (undici's GHSA-35p6-xmwp-9g52).
 *
 * `onRequestStart` is called right before the first byte is written, on a connected (and, with TLS, authenticated) socket; a handler that aborts there
 * proves that nothing was sent. `controller.rawHeaders` are strings, as received. Bytes for `onResponseData` are valid only during the call. Interim answers
 * are not reported, upgrades are refused, and a stream that is not read to its end is left to its owner.
 */
export class Http1Client extends UpstreamClient<UpstreamConnection> {
  /** The connection used last comes first, so that unneeded ones expire. */
  readonly #idle: UpstreamConnection[] = []
  /** Connections whose answers have ended in this turn of the event loop. */
  readonly #resting: UpstreamConnection[] = []
  #timer: NodeJS.Timeout | null = null
  #timerAt = Number.POSITIVE_INFINITY

  protected override closeIdle(): void {
    for (const connection of [...this.#idle, ...this.#resting]) connection.destroy(null)
  }

  /** Applies from now on; busy connections beyond it are closed once they are idle. */
  resize(connections: number): void {
    this.connections = connections
    for (let surplus = this.open.length - connections; surplus > 0; surplus--)
      (this.#idle[0] ?? this.#resting[0])?.destroy(null)
    this.flushSoon()
  }

  /** `options.tls` has changed: connections made with the former certificates end with the exchange that they carry. */
  renew(): void {
    this.generation++
    this.session = undefined
    this.closeIdle()
  }

  /** The connection can carry another request. */
  idle(connection: UpstreamConnection): void {
    if (this.open.length > this.connections || (this.closedBy !== null && this.queue.length === 0))
      return connection.destroy(null)
    this.#resting.push(connection)
    this.flushSoon()
  }

  /** An unsolicited byte arrived: connections whose last answer did not end explicitly are no longer trusted. */
  unasked(): void {
    this.options.habits.sendsUnasked = true
    for (const connection of [...this.#idle, ...this.#resting]) connection.distrust()
  }

  /** The connection can carry no more requests. */
  lost(connection: UpstreamConnection): void {
    for (const list of [this.#idle, this.#resting]) {
      const at = list.indexOf(connection)
      if (at >= 0) list.splice(at, 1)
    }
  }

  /** One timer for all connections: most deadlines pass unused. */
  wakeAt(time: Millis, now: Millis): void {
    if (time >= this.#timerAt) return
    if (this.#timer !== null) clearTimeout(this.#timer)
    this.#timerAt = time
    // After a pause of the process, first read what arrived during it.
    this.#timer = setTimeout(() => setImmediate(this.#look), time - now).unref()
  }

  readonly #look = (): void => {
    this.#timer = null
    this.#timerAt = Number.POSITIVE_INFINITY
    const now = performance.now()
    let next = Number.POSITIVE_INFINITY
    for (const connection of this.open) next = Math.min(next, connection.look(now))
    if (next !== Number.POSITIVE_INFINITY) this.wakeAt(next, now)
  }

  protected override flush(): void {
    const now = performance.now()
    while (this.queue.length > 0) {
      const connection = this.#idle.pop()
      // Its timer may be late.
      if (connection?.isOverdue(now)) connection.destroy(null)
      else if (connection !== undefined) connection.begin(this.queue.shift() as DispatchedRequest)
      else if (!this.#connects()) break
    }
    for (let rested = this.#resting.pop(); rested !== undefined; rested = this.#resting.pop())
      this.#idle.push(rested)
    if (this.queue.length > 0 && this.#idle.length > 0) this.flushSoon()
  }

  /** Opens a connection for the next request if one is needed and allowed. */
  #connects(): boolean {
    if (this.queue.length <= this.#resting.length || this.open.length >= this.connections) return false
    this.open.push(new UpstreamConnection(this, this.queue.shift() as DispatchedRequest))
    return true
  }
}
