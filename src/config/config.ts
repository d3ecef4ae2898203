import type { Namespace } from '../core/identity.ts'
import type { RoutePolicy } from '../core/policy.ts'
import type { Millis } from '../core/record.ts'
import type { Descriptors } from '../core/rpc/descriptors.ts'
import type { FilledFile } from './properties.ts'
import { isSharedStore } from './urls.ts'

export type { Address } from './urls.ts'

/**
 * The effective configuration of a process: resolved, defaulted and checked. Typed by the rows of `properties.ts`, except for
 * values read from files or derived from others.
 */
export interface Config extends Omit<FilledFile, keyof Derived>, Derived {}

interface Derived {
  readonly service: string
  readonly upstream: UpstreamConfig
  readonly store: StoreConfig
  readonly limits: Limits
  /** What the file of `grpc.descriptors` says. */
  readonly grpc: { readonly descriptors: Descriptors | null }
  /** Null: no keys are issued. */
  readonly issuer: IssuerConfig | null
  readonly drain: { readonly delay: Millis; readonly timeout: Millis }
  /** Policy of requests that match no route; named `default`. */
  readonly defaults: RoutePolicy
  readonly routes: readonly RoutePolicy[]
  /** One sentence for each guarantee that the configuration waives, logged at start (contract, promise). */
  readonly warnings: readonly string[]
}

/** The configuration in force. A reload replaces it as a whole; requests in progress keep their own. */
export interface InForce {
  readonly config: Config
}

export type UpstreamConfig = Omit<FilledFile['upstream'], 'url'> & { readonly url: string }

/** `url` of the store that decides. `cache`: null if none. `secret`: key of record ids. */
export type StoreConfig = Omit<FilledFile['store'], 'primary' | 'cache' | 'secretFile' | 'encryption'> & {
  readonly cache?: { readonly url: string }
  readonly secret: Buffer | null
  readonly encryption: { readonly keys: readonly SealingKey[] }
}

/** 32 bytes that seal and open records. */
export interface SealingKey {
  readonly id: string
  readonly key: Buffer
}

/** Bounds of all routes together: bytes, counts, and how long an upload may take. */
export type Limits = Omit<FilledFile['limits'], 'newKeys'>

export type IssuerConfig = Omit<FilledFile['issuer'], 'secretFile'> & { readonly secret: Buffer }

/** How many processes serve traffic. `auto` is as many as there are cores, and one where no other process can open the store. */
export function workersOf({ workers, store: { url, migrate } }: Config, cores: number): number {
  if (workers !== 'auto') return workers
  return [url, migrate?.from ?? url].every(isSharedStore) ? cores : 1
}

export function namespaceOf({ service, store }: Config): Namespace {
  return { service, secret: store.secret }
}
