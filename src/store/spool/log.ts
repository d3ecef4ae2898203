import { createHash, randomBytes } from 'node:crypto'
import { type FileHandle, mkdir, open, readdir, readFile, rename, unlink } from 'node:fs/promises'
import { dirname, join, resolve } from 'node:path'
import { lockFile } from '../../runtime/file-lock.ts'
import { isWorkerFolder } from './folders.ts'

/** Segment size: few files when the spool is full, little space held by entries no longer needed. */
const SEGMENTS = 16
/** Private: it holds responses. */
const DIRECTORY_MODE = 0o700
const FILE_MODE = 0o600
const LOCK = 'spool.lock'

/** Reports to the operator; must not throw. */
export type SpoolLog = (message: string, detail: Readonly<Record<string, unknown>>) => void

/** `kept`: on disk, safe from a crash of process or machine, or no longer needed. Otherwise the reason why not. */
export type KeepResult = 'kept' | Error

/** A payload in the spool, or on its way there. */
export interface SpoolEntry {
  readonly done: Promise<KeepResult>
}

export class SpoolInUse extends Error {}

/** Left by an earlier process. */
export interface RecoveredEntry {
  readonly entry: SpoolEntry
  readonly payload: Buffer
}

export interface SpoolOptions {
  readonly directory: string
  /** Total bytes of all segments. */
  readonly maxBytes: number
  readonly say: SpoolLog
}

interface Segment extends SegmentName {
  bytes: number
  /** Numbers of the entries not yet dropped. */
  readonly live: Set<number>
  /** Segments whose entries its tombstones revoke: it must outlive them. */
  readonly buries: Set<Segment>
  /** Part of it could not be read: it is set aside in the end instead of deleted. */
  damaged: boolean
}

interface TrackedEntry extends SpoolEntry {
  readonly number: number
  /** Null: not written, or not yet. */
  segment: Segment | null
  dropped: boolean
}

interface Append {
  readonly item: TrackedEntry
  readonly payload: Buffer
  readonly settle: (end: KeepResult) => void
}

interface Open {
  readonly segment: Segment
  readonly handle: FileHandle
}

/** An entry to revoke, and the segment that holds it. */
interface Drop {
  readonly number: number
  readonly of: Segment
}

/**
 * Keeps payloads on disk until they are dropped: append-only segments in a directory used by one process at a time. Payloads that arrive
 * while the disk is busy are written and synced together. A segment is deleted once nothing in it is needed. Why a log: docs/adr/0014.
 */
export class Spool {
  readonly #directory: string
  readonly #maxBytes: number
  readonly #say: SpoolLog
  readonly #unlock: () => void
  /** Oldest first. */
  #segments: Segment[] = []
  /** The newest segment, while it accepts more. */
  #open: Open | null = null
  #number = 0
  /** Bytes of segments and of waiting writes. */
  #bytes = 0
  #appends: Append[] = []
  #drops: TrackedEntry[] = []
  /** Tombstones that could not be written: the next write, or closing, retries them. */
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
   * Opens the directory, creating it if necessary, and returns what earlier processes left in it.
   * @throws if it cannot be created, read or written, or another process uses it ({@link SpoolInUse} is the cause).
   */
  static async open(options: SpoolOptions): Promise<{ spool: Spool; found: readonly RecoveredEntry[] }> {
    const { directory, say } = options
    let unlock: (() => void) | null = null
    try {
      await makeDirectory(resolve(directory))
      unlock = lockFile(join(directory, LOCK))
      if (unlock === null) throw new SpoolInUse('another process is using it; each needs its own')
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

  /** Bytes left. */
  get room(): number {
    return Math.max(0, this.#maxBytes - this.#bytes)
  }

  append(payload: Buffer): SpoolEntry {
    const bytes = frameBytes(payload.length)
    if (this.#closing !== null) return refused('the spool is closed')
    if (bytes > this.room) return refused(`the spool is full: its limit is ${this.#maxBytes} bytes`)
    this.#bytes += bytes
    const { promise, resolve } = Promise.withResolvers<KeepResult>()
    const item: TrackedEntry = { number: ++this.#number, done: promise, segment: null, dropped: false }
    this.#appends.push({ item, payload, settle: resolve })
    this.#writing ??= this.#work()
    return item
  }

  /** Drops an entry that is no longer needed. If a crash brings it back, it must do no harm. */
  drop(entry: SpoolEntry): void {
    const item = entry as TrackedEntry
    if (this.#closing !== null || item.dropped) return
    item.dropped = true
    this.#drops.push(item)
    this.#writing ??= this.#work()
  }

  /** Resolves when everything requested is done. */
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
      // An entry dropped before it was written is never written.
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
    let end: KeepResult = 'kept'
    try {
      open = await this.#newest()
      const { handle, segment } = open
      const { marker, name } = segment
      const frames = Buffer.concat([
        ...appends.map(({ item, payload }) => entryFrame(marker, item.number, payload)),
        ...drops.map(({ number, of }) => frame(marker, KIND_TOMBSTONE, number, of.marker)),
      ])
      bytes = frames.length
      await handle.appendFile(frames)
      await handle.datasync()
      if ((await handle.stat()).nlink === 0) throw new Error(`${name} was removed from outside`)
    } catch (error) {
      end = error as Error
      this.#owed = drops
      this.#say('the spool cannot be written', { error: String(error) })
      if (open !== null && (await this.#takeBack(open))) open = null
    }
    const segment = open?.segment ?? null
    this.#bytes -= appended
    if (segment !== null) {
      segment.bytes += bytes
      this.#bytes += bytes
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

  /** The segment for the next entries. Its name is synced to disk before any of its entries counts as kept. */
  async #newest(): Promise<Open> {
    if (this.#open !== null && this.#open.segment.bytes < this.#maxBytes / SEGMENTS) return this.#open
    await this.#seal()
    const name = newSegmentName((this.#segments.at(-1)?.number ?? 0) + 1)
    const handle = await open(join(this.#directory, name.name), 'ax', FILE_MODE)
    try {
      await syncDirectory(this.#directory)
    } catch (error) {
      await handle.close()
      throw error
    }
    const segment = newSegment(name)
    this.#segments.push(segment)
    this.#open = { segment, handle }
    return this.#open
  }

  /** After a failed write: closes the segment. True: nothing of that write is left in it. */
  async #takeBack({ segment, handle }: Open): Promise<boolean> {
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
    // Everything that counts as kept has been synced.
    await open?.handle.close().catch(() => {})
  }

  /** Deletes segments that are no longer needed, oldest first: a tombstone must outlive the entry it revokes. */
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
        await syncDirectory(this.#directory)
      } catch (error) {
        this.#say('a file of the spool cannot be removed', { file: segment.name, error: String(error) })
      }
    }
  }
}

/** Creates missing parents, too. After a system crash, a new directory may be gone unless its parent was synced. */
async function makeDirectory(directory: string): Promise<void> {
  const first = await mkdir(directory, { recursive: true, mode: DIRECTORY_MODE })
  if (first === undefined) return
  for (let made = directory; made !== dirname(first); made = dirname(made)) await syncDirectory(dirname(made))
}

async function syncDirectory(directory: string): Promise<void> {
  const handle = await open(directory, 'r')
  try {
    await handle.sync()
  } finally {
    await handle.close()
  }
}

/** An entry in no segment. */
function refused(why: string): TrackedEntry {
  return { number: 0, done: Promise.resolve(new Error(why)), segment: null, dropped: true }
}

/** What earlier processes left, oldest first. `number`: the highest of any entry. */
export async function readSpool(
  directory: string,
  say: SpoolLog,
): Promise<{ segments: Segment[]; number: number; found: RecoveredEntry[] }> {
  const segments: Segment[] = []
  const entries = new Map<string, RecoveredEntry & { readonly entry: TrackedEntry }>()
  let highest = 0
  for (const name of await segmentsIn(directory, say)) {
    const bytes = await readFile(join(directory, name.name))
    const segment = { ...newSegment(name), bytes: bytes.length }
    segments.push(segment)
    for (const piece of readSegment(bytes, name.marker)) {
      if (piece.kind === 'unreadable') {
        segment.damaged ||= !piece.blank
        const where = { file: name.name, at: piece.at, bytes: piece.bytes }
        say('a part of the spool cannot be read; it is skipped and set aside', where)
        continue
      }
      const { number, payload } = piece
      highest = Math.max(highest, number)
      if (piece.kind === 'entry') {
        const entry = { number, done: Promise.resolve('kept' as const), segment, dropped: false }
        entries.set(placeOf(name.marker, number), { entry, payload })
        segment.live.add(number)
        continue
      }
      // Written after the entry that it revokes.
      const place = placeOf(payload, number)
      const of = entries.get(place)?.entry.segment ?? null
      if (of === null) continue
      entries.delete(place)
      of.live.delete(number)
      segment.buries.add(of)
    }
  }
  return { segments, number: highest, found: [...entries.values()] }
}

function newSegment(name: SegmentName): Segment {
  return { ...name, bytes: 0, live: new Set(), buries: new Set(), damaged: false }
}

async function segmentsIn(directory: string, say: SpoolLog): Promise<SegmentName[]> {
  const names: SegmentName[] = []
  const others: string[] = []
  let aside = 0
  for (const name of await readdir(directory)) {
    const segment = parseSegmentName(name)
    if (segment !== null) names.push(segment)
    else if (isDamagedName(name)) aside++
    else if (name !== LOCK && !isWorkerFolder(name)) others.push(name)
  }
  if (others.length > 0) say('the spool directory has other files; they are ignored', { files: others })
  if (aside > 0) say('damaged files of the spool were set aside; inspect and remove them', { files: aside })
  return names.sort((a, b) => a.number - b.number)
}

function placeOf(marker: Buffer, number: number): string {
  return `${marker.toString('hex')} ${number}`
}

/*
 * A segment, version 1 (docs/record-format.md): only a sequence of frames. All numbers are big-endian.
 *
 *   0  8  the segment's marker      9  6  number        19 16  SHA-256 of bytes 0–18 and the payload, cut off
 *   8  1  kind                     15  4  length        35     payload
 *
 * The marker is random and also part of the file's name: a crafted payload cannot forge a frame, and after damage reading
 * resumes at the next whole frame.
 */
const NUMBER_AT = 9
const U48 = 6
const LENGTH_AT = 15
const DIGEST_AT = 19
const DIGEST_BYTES = 16
const PAYLOAD_AT = DIGEST_AT + DIGEST_BYTES
const MARKER_BYTES = 8

const KIND_ENTRY = 1
/** Revokes the entry with the same number; its payload is the marker of that entry's segment. */
const KIND_TOMBSTONE = 2

/** Segments are ordered by number. The marker distinguishes files of different spools in one directory. */
const NAME = /^spool-v1-(\d{8,})-([0-9a-f]{16})$/
const DAMAGED = '.damaged'

interface SegmentName {
  readonly name: string
  readonly number: number
  readonly marker: Buffer
}

/** Bytes that a payload occupies in a file. */
export function frameBytes(payload: number): number {
  return PAYLOAD_AT + payload
}

export function newSegmentName(number: number): SegmentName {
  const marker = randomBytes(MARKER_BYTES)
  return { name: `spool-v1-${String(number).padStart(8, '0')}-${marker.toString('hex')}`, number, marker }
}

/** Null: not a spool file that this version reads. */
export function parseSegmentName(name: string): SegmentName | null {
  const [, number = '', marker = ''] = NAME.exec(name) ?? []
  return number === '' ? null : { name, number: Number(number), marker: Buffer.from(marker, 'hex') }
}

/** Name of a segment that is kept only for its unreadable part. */
export function damagedName(name: string): string {
  return `${name}${DAMAGED}`
}

export function isDamagedName(name: string): boolean {
  return name.endsWith(DAMAGED) && parseSegmentName(name.slice(0, -DAMAGED.length)) !== null
}

export function entryFrame(marker: Buffer, number: number, payload: Buffer): Buffer {
  return frame(marker, KIND_ENTRY, number, payload)
}

function frame(marker: Buffer, kind: number, number: number, payload: Buffer): Buffer {
  const bytes = Buffer.allocUnsafe(frameBytes(payload.length))
  marker.copy(bytes)
  bytes.writeUInt8(kind, MARKER_BYTES)
  bytes.writeUIntBE(number, NUMBER_AT, U48)
  bytes.writeUInt32BE(payload.length, LENGTH_AT)
  payload.copy(bytes, PAYLOAD_AT)
  digestOf(bytes).copy(bytes, DIGEST_AT)
  return bytes
}

function digestOf(bytes: Buffer): Buffer {
  const hash = createHash('sha256').update(bytes.subarray(0, DIGEST_AT)).update(bytes.subarray(PAYLOAD_AT))
  return hash.digest().subarray(0, DIGEST_BYTES)
}

export type Piece =
  | { readonly kind: 'entry' | 'tombstone'; readonly number: number; readonly payload: Buffer }
  /** An incomplete write, or damage. `blank`: only zeros, as a system crash leaves them. */
  | { readonly kind: 'unreadable'; readonly at: number; readonly bytes: number; readonly blank: boolean }

/** The contents of a segment, in order. Payloads are views of `bytes`. */
export function readSegment(bytes: Buffer, marker: Buffer): Piece[] {
  const pieces: Piece[] = []
  for (let at = 0; at < bytes.length; ) {
    const read = readFrame(bytes, at, marker)
    if (read !== null) {
      pieces.push(read.piece)
      at = read.end
      continue
    }
    let next = at
    do next = bytes.indexOf(marker, next + 1)
    while (next >= 0 && readFrame(bytes, next, marker) === null)
    const end = next < 0 ? bytes.length : next
    const blank = bytes.subarray(at, end).every((byte) => byte === 0)
    pieces.push({ kind: 'unreadable', at, bytes: end - at, blank })
    at = end
  }
  return pieces
}

function readFrame(bytes: Buffer, at: number, marker: Buffer): { piece: Piece; end: number } | null {
  if (bytes.length - at < PAYLOAD_AT || bytes.compare(marker, 0, MARKER_BYTES, at, at + MARKER_BYTES) !== 0)
    return null
  const end = at + frameBytes(bytes.readUInt32BE(at + LENGTH_AT))
  if (end > bytes.length) return null
  const whole = bytes.subarray(at, end)
  if (!digestOf(whole).equals(whole.subarray(DIGEST_AT, PAYLOAD_AT))) return null
  const number = whole.readUIntBE(NUMBER_AT, U48)
  const payload = whole.subarray(PAYLOAD_AT)
  const kind = whole.readUInt8(MARKER_BYTES)
  if (kind !== KIND_ENTRY && kind !== KIND_TOMBSTONE) return null
  return { piece: { kind: kind === KIND_ENTRY ? 'entry' : 'tombstone', number, payload }, end }
}
