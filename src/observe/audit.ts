import { createHash } from 'node:crypto'
import { type FileHandle, open, readFile } from 'node:fs/promises'
import { setTimeout as wait } from 'node:timers/promises'
import { lockFile } from '../runtime/file-lock.ts'

/** Before the first line. */
const NOTHING = '0'.repeat(64)
/** Nobody else's to read. */
const MODE = 0o600
/** Longer than any line. */
const TAIL = 64 * 1024
/** Whoever writes a line has it, for as long as a disk needs for one. */
const LOCK_SUFFIX = '.lock'
const LOCK_LOOK = 2
/** Longer than any queue of writers; a process that stands still may hold it for as long as it does. */
const LOCK_AT_MOST = 10_000

/** What somebody decided about a record, or about the process. Nothing of it is secret. */
export interface Change {
  readonly who: { readonly address: string; readonly by: string | null }
  readonly what: 'resolve' | 'delete' | 'outcome' | 'drain' | 'withdrawn'
  /** Record id; null where the change is about none. */
  readonly record: string | null
  /** What it was and what it becomes. */
  readonly before: unknown
  readonly after: unknown
  readonly reason: string | null
}

export interface AuditLine extends Change {
  readonly time: string
  /** Whose proxy or command wrote it: several services may share a file. Lines of earlier versions have none. */
  readonly service: string
  /** Hash of the line before; zeros: there is none. */
  readonly prev: string
  readonly hash: string
}

/**
 * Where the lines go. The log as well as a file: a file that lost its end differs from the log.
 * @throws where there is no file and the line cannot be written: the change is not made.
 */
export type AuditSink = (line: AuditLine) => void

/**
 * Every change is one line of JSON that carries the hash of the line before, so that a line that was removed or edited
 * shows. SHA-256 over the line without its own hash.
 */
export class Audit {
  readonly #service: string
  readonly #file: LockedFile | null
  readonly #sink: AuditSink
  /** Hash of the last line; null: it has none to go on from. */
  #prev: string | null
  /** Bytes of the file, as far as this process wrote it. */
  #size: number
  #last: Promise<unknown> = Promise.resolve()

  private constructor(
    service: string,
    file: LockedFile | null,
    sink: AuditSink,
    prev: string | null,
    size: number,
  ) {
    this.#service = service
    this.#file = file
    this.#sink = sink
    this.#prev = prev
    this.#size = size
  }

  /**
   * Goes on with the chain of `file`; without one the lines go to the sink alone, one chain for each process. A file whose last
   * line is none of a chain takes no line ({@link Audit.write} throws): the traffic is served all the same. Several processes may
   * write to one file: each line is added under a lock, behind the last one of all.
   * @throws where the file, or its lock beside it, cannot be opened.
   */
  static async open(file: string | null, service: string, sink: AuditSink): Promise<Audit> {
    if (file === null) return new Audit(service, null, sink, NOTHING, 0)
    const handle = await open(file, 'a+', MODE)
    const locked = { handle, lock: `${file}${LOCK_SUFFIX}` }
    try {
      const { size, line } = await alone(locked, () => lastLine(handle))
      return new Audit(service, locked, sink, line === null ? NOTHING : hashIn(line), size)
    } catch (error) {
      await handle.close()
      throw error
    }
  }

  /**
   * Resolves when the line is on the disk; the change may be made then. One after the other.
   * @throws where it cannot be written: the change must not be made.
   */
  write(change: Change): Promise<AuditLine> {
    const file = this.#file
    const written = this.#last.then(() =>
      file === null ? this.#append(change) : alone(file, () => this.#append(change)),
    )
    this.#last = written.catch(() => {})
    return written
  }

  async close(): Promise<void> {
    await this.#last
    await this.#file?.handle.close()
  }

  async #append(change: Change): Promise<AuditLine> {
    const { who, what, record, before, after, reason } = change
    if (this.#prev === null) throw new Error('the last line of the audit file was edited: move the file away')
    if (this.#file !== null) await this.#catchUp(this.#file.handle, this.#prev)
    const time = new Date().toISOString()
    const content = {
      time,
      service: this.#service,
      who,
      what,
      record,
      before,
      after,
      reason,
      prev: this.#prev,
    }
    const line: AuditLine = { ...content, hash: hashOf(content) }
    if (this.#file !== null) await this.#store(this.#file.handle, `${JSON.stringify(line)}\n`)
    // Without a file the sink is where it is written; a line that the sink refuses is no part of the chain.
    this.#sink(line)
    this.#prev = line.hash
    return line
  }

  /** Goes on from what other processes added meanwhile, if it is a chain from here on. */
  async #catchUp(file: FileHandle, prev: string): Promise<void> {
    const { size, nlink } = await file.stat()
    // What is written now nobody could read.
    if (nlink === 0) throw new Error('somebody removed the audit file; what follows needs a restart')
    if (size === this.#size) return
    const added = Buffer.alloc(Math.max(0, size - this.#size))
    await file.read(added, 0, added.length, this.#size)
    const checked = added.length === 0 ? null : check(added.toString('utf8'), prev)
    // Somebody writes to it without the lock, or cut it: what is added now would look like their doing.
    if (checked === null || !checked.ok)
      throw new Error(
        `the audit file has ${size} bytes where ${this.#size} were written, and no chain goes on from there: somebody else wrote to it`,
      )
    this.#prev = checked.head
    this.#size = size
  }

  async #store(file: FileHandle, text: string): Promise<void> {
    try {
      await file.appendFile(text)
      await file.datasync()
      this.#size += Buffer.byteLength(text)
    } catch (error) {
      // What came through of it is no line.
      await file.truncate(this.#size).catch(() => {})
      throw error
    }
  }
}

interface LockedFile {
  readonly handle: FileHandle
  /** Path of the file that the lock is taken on. */
  readonly lock: string
}

/** Does it while no other process reads or writes the end of the file. Nothing is left to clear up after one that is killed. */
async function alone<T>({ lock }: LockedFile, work: () => Promise<T>): Promise<T> {
  const until = performance.now() + LOCK_AT_MOST
  let release = lockFile(lock)
  for (; release === null; release = lockFile(lock)) {
    if (performance.now() > until)
      throw new Error(`another process has held the lock of the audit file for ${LOCK_AT_MOST} ms`)
    await wait(LOCK_LOOK * (0.5 + Math.random()))
  }
  try {
    return await work()
  } finally {
    release()
  }
}

export type Verified =
  | { readonly ok: true; readonly lines: number /** Hash of the last line. */; readonly head: string }
  | { readonly ok: false /** From 1. */; readonly line: number; readonly problem: string }

/** Finds the first line that was edited, or before which lines were removed or added. Lines missing at the end show in the log. */
export async function verifyAudit(file: string): Promise<Verified> {
  return check(await readFile(file, 'utf8'))
}

function check(text: string, from = NOTHING): Verified {
  const lines = text.split('\n')
  const rest = lines.pop()
  let head = from
  for (const [n, line] of lines.entries()) {
    const problem = problemOf(line, head)
    if (problem !== null) return { ok: false, line: n + 1, problem }
    head = (JSON.parse(line) as AuditLine).hash
  }
  if (rest !== '') return { ok: false, line: lines.length + 1, problem: 'the line is not whole' }
  return { ok: true, lines: lines.length, head }
}

function problemOf(line: string, prev: string): string | null {
  let parsed: Partial<AuditLine>
  try {
    parsed = JSON.parse(line)
  } catch {
    return 'the line is no JSON'
  }
  const { hash, ...content } = parsed
  if (hash !== hashOf(content) || line !== JSON.stringify({ ...content, hash }))
    return 'the line was edited: its hash is another'
  return content.prev === prev
    ? null
    : 'the line does not follow the one before: lines were removed, added or moved'
}

function hashOf(content: object): string {
  return createHash('sha256').update(JSON.stringify(content)).digest('hex')
}

/** The hash of a line that has the one it should have; null: it has not. */
function hashIn(line: string): string | null {
  const prev = /"prev":"([0-9a-f]{64})"/.exec(line)?.[1] ?? ''
  return problemOf(line, prev) === null ? (JSON.parse(line) as AuditLine).hash : null
}

/** How each line begins. */
const BEGIN = Buffer.from('{"time":"')

/**
 * The last whole line; null: there is none. What a crash cut off stands for a change that was not made: it goes, unless it is
 * no line of a chain, as where the path is that of another file.
 */
async function lastLine(file: FileHandle): Promise<{ size: number; line: string | null }> {
  const { size } = await file.stat()
  const from = Math.max(0, size - TAIL)
  const { buffer, bytesRead } = await file.read(Buffer.alloc(size - from), 0, size - from, from)
  const tail = buffer.subarray(0, bytesRead)
  const end = tail.lastIndexOf(0x0a) + 1
  const rest = tail.subarray(end, end + BEGIN.length)
  if (!rest.equals(BEGIN.subarray(0, rest.length))) return { size, line: '' }
  if (end < tail.length) await file.truncate(from + end)
  if (end === 0) return { size: from, line: from === 0 ? null : '' }
  const begin = tail.lastIndexOf(0x0a, end - 2) + 1
  return { size: from + end, line: tail.toString('utf8', begin, end - 1) }
}
