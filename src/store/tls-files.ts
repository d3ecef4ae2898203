import { readFileSync } from 'node:fs'
import type { ConnectionOptions } from 'node:tls'
import { StoreUnavailable } from './register.ts'

/** The options of a `store.url` that name PEM files: trusted authorities, and this process's own certificate and key. */
export interface TlsOptionNames {
  readonly ca: string
  readonly cert: string
  readonly key: string
}

/** @throws {StoreUnavailable} if a file cannot be read. */
export function tlsFiles(options: URLSearchParams, names: TlsOptionNames): ConnectionOptions {
  const found: ConnectionOptions = {}
  for (const member of ['ca', 'cert', 'key'] as const) {
    const option = names[member]
    const path = options.get(option)
    if (path === null) continue
    try {
      found[member] = readFileSync(path)
    } catch (error) {
      throw new StoreUnavailable(`store.url: ${option} cannot be read: ${(error as Error).message}`, false)
    }
  }
  return found
}
