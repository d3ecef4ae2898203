import { readFileSync } from 'node:fs'
import { isDeepStrictEqual } from 'node:util'
import { type TlsMaterial, tlsProblem } from '../runtime/pem.ts'
import { StoreUnavailable } from './register.ts'

/** The options of a `store.url` that name PEM files: trusted authorities, and this process's own certificate and key. */
export interface TlsOptionNames {
  readonly ca: string
  readonly cert: string
  readonly key: string
}

/** Called with what is wrong when a new connection reads the files; it uses their previous content. */
export type OnUnusable = (kind: 'error', detail: string) => void

/**
 * Reads the files for each new connection, so that it has their latest content (contract §15).
 *
 * @throws {StoreUnavailable} if one cannot be read now.
 */
export function tlsFiles(
  options: URLSearchParams,
  names: TlsOptionNames,
  onUnusable: OnUnusable,
): () => TlsMaterial {
  const read = (): TlsMaterial => {
    const found: Partial<Record<keyof TlsMaterial, Buffer>> = {}
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
  let last = read()
  return () => {
    try {
      const found = read()
      const problem = isDeepStrictEqual(found, last) ? null : tlsProblem(found)
      if (problem === null) last = found
      else onUnusable('error', `store.url: ${problem}; the previous files are used`)
    } catch (error) {
      onUnusable('error', `${(error as Error).message}; the previous files are used`)
    }
    return last
  }
}
