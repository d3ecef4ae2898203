import type { ConnectionOptions } from 'node:tls'
import type { Millis } from '../core/record.ts'
import type { Habits } from './habits.ts'

/** Options with undici's names mean what they do there. */
export interface ClientOptions {
  /** Where to connect: host and port, or the path of a socket. */
  readonly to: { readonly host: string; readonly port: number } | { readonly path: string }
  /** Called for each connection. Null: no TLS; otherwise certificates are verified. */
  readonly tls: () => ConnectionOptions | null
  /** The `Host` of requests without one. */
  readonly host: string
  readonly connectTimeout: Millis
  readonly connections: number
  readonly habits: Habits
  /** Maximum bytes of a response's head; called for each head. */
  readonly maxHeaderSize: () => number
}
