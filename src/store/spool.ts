import { type FileHandle, mkdir, open, rename, unlink } from 'node:fs/promises'
import { join } from 'node:path'
import { damagedName, entryFrame, frameBytes, newSegmentName, tombstoneFrame } from './spool-file.ts'
import { lock } from './spool-lock.ts'
import {
  type Entry,
  type Found,
  type Item,
  type Kept,
  newSegment,
  readSpool,
  type Say,
  type Segment,
} from './spool-read.ts'

/** Segments of a full spool: few files, and little stays on disk that is no longer needed. */
const SEGMENTS = 16
/** It holds responses. */
const DIRECTORY_MODE = 0o700
const FILE_MODE = 0o600

export interface SpoolOptions {
  readonly directory: string
  /** Bytes of all segments together. */
  readonly maxBytes: number
  readonly say: Say
}

interface Append {
  readonly item: Item
  readonly payload: Buffer
  readonly settle: (end: Kept) => void
}

interface Open {
  readonly handle: FileHandle
  readonly segment: Segment
}

/** An entry to take back, and where it is. */
interface Drop {
  readonly number: number
  readonly of: Segment
}

/**
 * Payloads on disk until they are dropped: append-only segments in a directory that one process uses at a time. What comes
 * while the disk is busy is written and synced together. A segment goes when nothing in it is needed any more; a directory
 * without segments means that nothing is left over.
 */
export class Spool {
  readonly #directory: string
  readonly #maxBytes: number
  readonly #say: Say
  readonly #unlock: () => void
  /** From the oldest to the newest. */
  #segments: Segment[] = []
  /** The newest one, while it takes more. */
  #open: Open | null = null
  #number = 0
  /** Of segments, and of what waits to be written. */
  #bytes = 0
  #appends: Append[] = []
  #drops: Item[] = []
  /** Tombstones that the disk did not take: they go with the next write, or at the end. */
  #owed: readonly Drop[] = []
  #writing: Promise<void> | null = null
  #closing: Promise<void> | null = null

  private constructor({ directory, maxBytes, say }: SpoolOptions, unlock: () => void) {
    this.#directory = directory
    this.#maxBytes = maxBytes
    this.#say = say
    this.#unlock = unlock
  }

  /**
   * Opens the directory, which is made where it is missing, and gives what earlier processes left in it.
   * @throws where it cannot be made, read or written, or another process uses it.
   */
  static async open(options: SpoolOptions): Promise<{ spool: Spool; found: readonly Found[] }> {
    const { directory, say } = options
    let unlock: (() => void) | null = null
    try {
      await mkdir(directory, { recursive: true, mode: DIRECTORY_MODE })
      unlock = lock(directory)
      if (unlock === null) throw new Error('another process uses it, and each needs one of its own')
      const spool = new Spool(options, unlock)
      const { segments, number, found } = await readSpool(directory, say)
      spool.#segments = segments
      spool.#number = number
      spool.#bytes = segments.reduce((sum, { bytes }) => sum + bytes, 0)
      await spool.#collect()
      return { spool, found }
    } catch (error) {
      unlock?.()
      const { message } = error as Error
      throw new Error(`the directory ${directory} cannot be used: ${message}`, { cause: error })
    }
  }

  /** Bytes that it takes at most now. */
  get room(): number {
    return Math.max(0, this.#maxBytes - this.#bytes)
  }

  append(payload: Buffer): Entry {
    const bytes = frameBytes(payload.length)
    if (this.#closing !== null) return refused('the spool is closed')
    if (bytes > this.room) return refused(`the spool is full: it may take ${this.#maxBytes} bytes`)
    this.#bytes += bytes
    const { promise, resolve } = Promise.withResolvers<Kept>()
    const item: Item = { number: ++this.#number, done: promise, segment: null, dropped: false }
    this.#appends.push({ item, payload, settle: resolve })
    this.#writing ??= this.#work()
    return item
  }

  /** The entry is not needed any more. One that is found again all the same, after a crash, must do no harm. */
  drop(entry: Entry): void {
    const item = entry as Item
    if (this.#closing !== null || item.dropped) return
    item.dropped = true
    this.#drops.push(item)
    this.#writing ??= this.#work()
  }

  /** Resolves when all that was asked for is done. */
  close(): Promise<void> {
    this.#closing ??= this.#end()
    return this.#closing
  }

  async #end(): Promise<void> {
    await this.#writing
    if (this.#owed.length > 0) {
      await this.#write([], [])
      await this.#collect()
    }
    await this.#seal()
    this.#unlock()
  }

  async #work(): Promise<void> {
    while (this.#appends.length + this.#drops.length > 0) {
      const appends = this.#appends
      const drops = this.#drops
      this.#appends = []
      this.#drops = []
      // What was dropped before it was written never gets there.
      for (const { payload, settle } of appends.filter(({ item }) => item.dropped)) {
        this.#bytes -= frameBytes(payload.length)
        settle('kept')
      }
      await this.#write(
        appends.filter(({ item }) => !item.dropped),
        drops.flatMap(({ number, segment }) => (segment === null ? [] : [{ number, of: segment }])),
      )
      await this.#collect()
    }
    this.#writing = null
  }

  async #write(appends: readonly Append[], dropped: readonly Drop[]): Promise<void> {
    const drops = [...this.#owed.filter(({ of }) => this.#segments.includes(of)), ...dropped]
    this.#owed = []
    if (appends.length + drops.length === 0) return
    const appended = appends.reduce((sum, { payload }) => sum + frameBytes(payload.length), 0)
    let bytes = appended
    let open: Open | null = null
    let end: Kept = 'kept'
    try {
      open = await this.#newest()
      const { handle, segment } = open
      const { marker, name } = segment
      const frames = Buffer.concat([
        ...appends.map(({ item, payload }) => entryFrame(marker, item.number, payload)),
        ...drops.map(({ number, of }) => tombstoneFrame(marker, number, of.marker)),
      ])
      bytes = frames.length
      await handle.appendFile(frames)
      await handle.datasync()
      if ((await handle.stat()).nlink === 0) throw new Error(`somebody removed ${name}`)
    } catch (error) {
      end = error as Error
      this.#owed = drops
      this.#say('the spool cannot be written', { error: String(error) })
      if (open !== null && (await this.#takeBack(open))) open = null
    }
    const segment = open?.segment ?? null
    if (segment === null) {
      this.#bytes -= appended
    } else {
      segment.bytes += bytes
      this.#bytes += bytes - appended
    }
    for (const { item, settle } of appends) {
      item.segment = segment
      segment?.live.add(item.number)
      settle(end)
    }
    for (const { number, of } of drops) {
      of.live.delete(number)
      segment?.buries.add(of)
    }
  }

  /** The segment that takes what comes next. Its name is on disk before anything in it counts as kept. */
  async #newest(): Promise<Open> {
    if (this.#open !== null && this.#open.segment.bytes < this.#maxBytes / SEGMENTS) return this.#open
    await this.#seal()
    const name = newSegmentName((this.#segments.at(-1)?.number ?? 0) + 1)
    const handle = await open(join(this.#directory, name.name), 'ax', FILE_MODE)
    try {
      await this.#syncDirectory()
    } catch (error) {
      await handle.close()
      throw error
    }
    const segment = newSegment(name)
    this.#segments.push(segment)
    this.#open = { handle, segment }
    return this.#open
  }

  /** After a write that failed: the segment takes no more. True: nothing of that write is left in it. */
  async #takeBack({ handle, segment }: Open): Promise<boolean> {
    const taken = await handle.truncate(segment.bytes).then(
      () => true,
      () => false,
    )
    await this.#seal()
    return taken
  }

  async #seal(): Promise<void> {
    const open = this.#open
    this.#open = null
    // What counts as kept has been synced.
    await open?.handle.close().catch(() => {})
  }

  /** Removes the segments that are of no use any more, the oldest first: a tombstone outlives what it takes back. */
  async #collect(): Promise<void> {
    for (const segment of this.#segments) {
      if (segment.live.size > 0) continue
      if ([...segment.buries].some((of) => of !== segment && this.#segments.includes(of))) continue
      if (segment === this.#open?.segment) await this.#seal()
      this.#segments = this.#segments.filter((one) => one !== segment)
      this.#bytes -= segment.bytes
      const file = join(this.#directory, segment.name)
      try {
        if (segment.damaged) await rename(file, join(this.#directory, damagedName(segment.name)))
        else await unlink(file)
        await this.#syncDirectory()
      } catch (error) {
        this.#say('a file of the spool cannot be removed', { file: segment.name, error: String(error) })
      }
    }
  }

  async #syncDirectory(): Promise<void> {
    const handle = await open(this.#directory, 'r')
    try {
      await handle.sync()
    } finally {
      await handle.close()
    }
  }
}

/** An entry that is in no segment. */
function refused(why: string): Item {
  return { number: 0, done: Promise.resolve(new Error(why)), segment: null, dropped: true }
}
