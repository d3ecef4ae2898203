import { UpstreamClient } from './client.ts'
import type { DispatchedRequest } from './dispatched.ts'
import { Http2Connection, MAX_STREAMS } from './http2-connection.ts'

/**
 * An undici dispatcher for HTTP/2 to one upstream, over TLS (ALPN), TCP or a unix socket (prior knowledge). As {@link Http1Client}, it never sends a
 * request twice, which undici's own does after a `GOAWAY` (docs/adr/0129); `onRequestStart` is called right before the first byte, and the error
 * {@link NotProcessed} proves that nothing was done after it, either. Requests share a connection; the first with room takes them.
 */
export class Http2Client extends UpstreamClient<Http2Connection> {
  /** Requests that a new connection will carry, by what the upstream allowed last. */
  #perConnection = MAX_STREAMS

  protected override closeIdle(): void {
    for (const connection of this.open.slice()) if (connection.isIdle) connection.destroy(null)
  }

  /** Applies from now on; connections beyond it end with what they carry. */
  resize(connections: number): void {
    this.connections = connections
    for (const surplus of this.#current().slice(connections)) surplus.end()
    this.flushSoon()
  }

  /** `options.tls` has changed: connections made with the former certificates end with what they carry. */
  renew(): void {
    this.generation++
    this.session = undefined
    for (const connection of this.open.slice()) connection.end()
    this.flushSoon()
  }

  ready(): void {
    if (this.queue.length > 0) this.flushSoon()
  }

  idle(): boolean {
    return this.closedBy !== null && this.queue.length === 0
  }

  /** What waits has not been sent. It fails at once, as it does over HTTP/1.1. */
  failed(error: Error): void {
    for (const request of this.queue.splice(0)) request.fail(error)
  }

  #current(): Http2Connection[] {
    return this.open.filter((connection) => connection.isCurrent)
  }

  protected override flush(): void {
    while (this.queue.length > 0) {
      const connection = this.open.find((one) => one.hasRoom)
      if (connection === undefined) return this.#connect()
      connection.begin(this.queue.shift() as DispatchedRequest)
    }
  }

  /** Opens as many connections as what waits needs. */
  #connect(): void {
    const current = this.#current()
    let connecting = 0
    for (const one of current) {
      if (one.isConnecting) connecting++
      else this.#perConnection = one.most
    }
    // The upstream takes nothing for now: another connection would find the same.
    if (this.#perConnection === 0 && current.length > 0) return
    const needed = Math.ceil(this.queue.length / Math.max(1, this.#perConnection)) - connecting
    const allowed = this.connections - current.length
    for (let n = Math.min(needed, allowed); n > 0; n--) this.open.push(new Http2Connection(this))
  }
}
