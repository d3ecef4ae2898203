import type { Namespace } from '../core/identity.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'

/** The effective configuration of a process: resolved, defaulted and checked. What `load.ts` makes. */
export interface Config {
  readonly listen: Address
  readonly admin: {
    readonly listen: Address | null
    readonly token: string | null
    /** What `Host` may name: lower case, without a port, IPv6 in brackets. */
    readonly hosts: readonly string[]
  }
  /** Where changes by operators are written down; null: in the log. */
  readonly audit: { readonly file: string | null }
  readonly ops: { readonly listen: Address | null }
  readonly readiness: { readonly store: boolean }
  /** The name of what the proxy protects: part of every record id, and of every name in the store. */
  readonly service: string
  readonly upstream: UpstreamConfig
  readonly store: StoreConfig
  readonly limits: Limits
  readonly problems: { readonly baseUrl: string }
  readonly issuer: IssuerConfig | null
  /** Where clients ask for a record's state (contract §6); null: nowhere. */
  readonly status: { readonly path: string | null }
  /** Serves `/.well-known/idempotency` to clients. */
  readonly wellKnown: boolean
  readonly drain: { readonly delay: Millis; readonly timeout: Millis }
  /** `defaults`: Node's own are served, too. */
  readonly metrics: { readonly defaults: boolean }
  readonly log: { readonly level: LogLevel; readonly format: 'json' | 'pretty' | 'auto' }
  /** CIDRs whose `X-Forwarded-*` are believed. */
  readonly trustProxy: readonly string[]
  readonly unmatched: 'protect' | 'pass' | 'reject'
  /** Policy of what no route matches; its name is `default`. */
  readonly defaults: RoutePolicy
  readonly routes: readonly RoutePolicy[]
  /** What gives up the promise by name, one sentence each: logged at start (contract, promise). */
  readonly warnings: readonly string[]
  /** How the file writes its numbers (`90s`, not 90000), by the property's last name and the value: `ttl 90000`, and by the value alone: ` 90000`. */
  readonly spelled: ReadonlyMap<string, string>
}

/** The configuration in force. A reload puts another one in its place, whole; who has begun with one goes on with it. */
export interface InForce {
  readonly config: Config
}

/** Makes signed keys that expire (contract §4). */
export interface IssuerConfig {
  readonly path: string
  readonly secret: Buffer
  readonly ttl: Millis
}

export type LogLevel = 'fatal' | 'error' | 'warn' | 'info' | 'debug' | 'trace' | 'silent'

/** `port` 0: any free one. `host` without brackets. */
export interface Address {
  readonly host: string
  readonly port: number
}

export interface UpstreamConfig {
  /** `http:`, `https:` with an optional path prefix left out; or `unix:/path`. */
  readonly url: string
  readonly connectTimeout: Millis
  readonly timeout: Millis
  readonly idleTimeout: Millis
  readonly connections: number
  /** PEM file paths. */
  readonly tls: {
    readonly ca: string | null
    readonly cert: string | null
    readonly key: string | null
    readonly servername: string | null
  }
}

export interface StoreConfig {
  /** `memory:`, `sqlite:<path>`, `redis://…` or `rediss://…`. */
  readonly url: string
  readonly timeout: Millis
  /** The secret's bytes, where `store.secretFile` names one: record ids are keyed with it. */
  readonly secret: Buffer | null
  /** The directory of the spool; null: outcomes that the store does not take are held in memory alone. */
  readonly spool: string | null
  readonly acceptRisk: boolean
}

/** Bounds of protected requests: bytes, counts, and how long an upload may take. */
export interface Limits {
  readonly request: number
  readonly response: number
  readonly buffered: number
  readonly inFlight: number
  /** Duplicates held at once. */
  readonly waiters: number
  readonly upload: Millis
}

export function namespaceOf({ service, store }: Config): Namespace {
  return { service, secret: store.secret }
}
