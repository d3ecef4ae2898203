import { type BigIntStats, type FSWatcher, statSync, watch } from 'node:fs'
import { stat } from 'node:fs/promises'
import { dirname, resolve } from 'node:path'
import type { Millis } from '../core/record.ts'

/** A file that is written in place is read once it has stood still for so long: half of one may be valid, too. */
const STILL: Millis = 200
/** Where nothing tells of changes: a network's file system, a link to a file in another folder, no watches left. */
const POLL: Millis = 2_000

export interface WatchOptions {
  readonly still?: Millis
  readonly poll?: Millis
  /** The folder cannot be watched; it is looked at now and then all the same. Said once for each time. */
  readonly onLost: (error: Error) => void
}

/**
 * Says when a file has been replaced or written, once it has stood still. The folder is watched, not the file: a watch of the
 * file ends with the first `..data` swap of a ConfigMap, and with an editor that renames. Beside that the file itself is looked
 * at now and then. Does not keep the process.
 */
export class FileWatch implements Disposable {
  readonly #file: string
  readonly #folder: string
  readonly #changed: () => void
  readonly #options: WatchOptions
  readonly #still: Millis
  readonly #timer: NodeJS.Timeout
  #watcher: FSWatcher | null = null
  /** Of the folder that is watched: another one may take its name. */
  #watched: string | null = null
  #lost = false
  /** Of the file as it was last told of. */
  #known: string | null
  #looking = false
  #again = false
  #closed = false

  constructor(file: string, changed: () => void, options: WatchOptions) {
    this.#file = resolve(file)
    this.#folder = dirname(this.#file)
    this.#changed = changed
    this.#options = options
    this.#still = options.still ?? STILL
    // At once: whoever reads the file after this is told of whatever comes after that.
    this.#known = identityNow(this.#file)
    void this.#look()
    this.#timer = setInterval(() => void this.#look(), options.poll ?? POLL).unref()
  }

  [Symbol.dispose](): void {
    this.#closed = true
    clearInterval(this.#timer)
    this.#watcher?.close()
  }

  /** One look at a time: another one asked for meanwhile follows it. */
  async #look(): Promise<void> {
    if (this.#looking) {
      this.#again = true
      return
    }
    this.#looking = true
    do {
      this.#again = false
      await this.#rewatch()
      await this.#compare()
    } while (this.#again && !this.#closed)
    this.#looking = false
  }

  async #compare(): Promise<void> {
    let found = await identityOf(this.#file)
    while (found !== this.#known && !this.#closed) {
      await new Promise((proceed) => setTimeout(proceed, this.#still).unref())
      const later = await identityOf(this.#file)
      if (later === found && !this.#closed) {
        this.#known = found
        this.#changed()
      }
      found = later
    }
  }

  /** Before the file is looked at, so that no change falls between the two. */
  async #rewatch(): Promise<void> {
    const folder = await folderAt(this.#folder)
    if (this.#closed || (folder === this.#watched && this.#watcher !== null)) return
    this.#watcher?.close()
    this.#watcher = null
    const lost = (error: Error): void => {
      this.#watcher?.close()
      this.#watcher = null
      // Said once: each look tries again.
      if (!this.#lost) this.#options.onLost(error)
      this.#lost = true
    }
    try {
      this.#watcher = watch(this.#folder, { persistent: false }, () => void this.#look())
      this.#watcher.on('error', lost)
      this.#watched = folder
      this.#lost = false
    } catch (error) {
      lost(error as Error)
    }
  }
}

/** What differs between two states of a file. Links are followed. */
function identity({ dev, ino, size, mtimeNs, ctimeNs }: BigIntStats): string {
  return [dev, ino, size, mtimeNs, ctimeNs].join()
}

/** Null: there is none. */
function identityNow(path: string): string | null {
  try {
    return identity(statSync(path, { bigint: true }))
  } catch {
    return null
  }
}

/** The same, without holding up requests. */
async function identityOf(path: string): Promise<string | null> {
  const found = await stat(path, { bigint: true }).catch(() => null)
  return found && identity(found)
}

/** Whatever is in it. */
async function folderAt(path: string): Promise<string | null> {
  const found = await stat(path, { bigint: true }).catch(() => null)
  return found && [found.dev, found.ino].join()
}
