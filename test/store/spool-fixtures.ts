import { mkdtempSync, readdirSync, rmSync } from 'node:fs'
import { type FileHandle, open } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import type { Test } from 'tap'
import { type KeepResult, parseSegmentName, Spool, type SpoolEntry } from '../../src/store/spool/log.ts'

export const MiB = 1024 ** 2

export function folder(t: Test): string {
  const path = mkdtempSync(join(tmpdir(), 'spool-'))
  t.teardown(() => rmSync(path, { recursive: true, force: true }))
  return path
}

export interface Opened {
  readonly directory: string
  readonly spool: Spool
  /** What was found, as text. */
  readonly found: string[]
  readonly entries: readonly SpoolEntry[]
  readonly said: string[]
  append(text: string | Buffer): SpoolEntry
}

export async function opened(directory: string, maxBytes = MiB): Promise<Opened> {
  const said: string[] = []
  const { spool, found } = await Spool.open({
    directory,
    maxBytes,
    say: (message) => void said.push(message),
  })
  return {
    directory,
    spool,
    found: found.map(({ payload }) => payload.toString()),
    entries: found.map(({ entry }) => entry),
    said,
    append: (text) => spool.append(Buffer.from(text)),
  }
}

/** Opens, looks and closes. */
export async function lookInto(directory: string): Promise<Pick<Opened, 'found' | 'said'>> {
  const { spool, found, said } = await opened(directory)
  await spool.close()
  return { found, said }
}

export async function keptAll(entries: readonly SpoolEntry[]): Promise<KeepResult[]> {
  return await Promise.all(entries.map(({ done }) => done))
}

/** Its segments, oldest first. */
export function segments(directory: string): string[] {
  return readdirSync(directory)
    .filter((name) => parseSegmentName(name) !== null)
    .sort()
}

export function aside(directory: string): string[] {
  return readdirSync(directory).filter((name) => name.endsWith('.damaged'))
}

/** A folder with one segment that holds these, left by a process that has ended. */
export async function left(t: Test, texts: readonly string[]): Promise<{ directory: string; file: string }> {
  const { directory, spool, append } = await opened(folder(t))
  await keptAll(texts.map(append))
  await spool.close()
  return { directory, file: join(directory, segments(directory)[0] as string) }
}

export const CUT = 'a part of the spool cannot be read; it is skipped and set aside'

type Method = 'appendFile' | 'datasync' | 'truncate' | 'sync'

/** Until the test ends, `how` makes the calls of that method on any file handle. */
export async function around(
  t: Test,
  method: Method,
  how: (call: () => Promise<void>, handle: FileHandle) => Promise<void>,
): Promise<void> {
  const any = await open(fileURLToPath(import.meta.url))
  await any.close()
  const prototype = Object.getPrototypeOf(any) as FileHandle
  const original = prototype[method] as (...args: unknown[]) => Promise<void>
  t.intercept(prototype, method, {
    value: function (this: FileHandle, ...args: unknown[]) {
      return how(() => original.apply(this, args), this)
    },
  })
}

/** How the handles on which the method is called from now on close; each has that for itself. */
export async function closing(
  t: Test,
  method: Method,
  how: (close: () => Promise<void>) => Promise<void>,
): Promise<void> {
  await around(t, method, (call, handle) => {
    const { close } = handle
    handle.close = () => how(() => close.call(handle))
    return call()
  })
}

/** Makes the next call of that method on any file handle fail. */
export async function fails(t: Test, method: Method, message: string): Promise<void> {
  let failed = false
  await around(t, method, async (call) => {
    if (failed) return call()
    failed = true
    throw new Error(message)
  })
}

/** Drops the entry, whose tombstone cannot be written: resolves when the spool has said so. */
export async function dropsInVain(
  t: Test,
  { spool, said }: Pick<Opened, 'spool' | 'said'>,
  entry: SpoolEntry,
  message = 'EIO',
): Promise<void> {
  await fails(t, 'appendFile', message)
  spool.drop(entry)
  while (said.length === 0) await new Promise((next) => setImmediate(next))
}
