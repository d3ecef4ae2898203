import { createHash } from 'node:crypto'
import { type FileHandle, open, readFile } from 'node:fs/promises'
import { setTimeout as wait } from 'node:timers/promises'
import type { Millis } from '../core/record.ts'
import { lockFile } from '../runtime/file-lock.ts'

/** `prev` of the first line. */
const NOTHING = '0'.repeat(64)
const OWNER_ONLY = 0o600
/** Longer than any line. */
const TAIL = 64 * 1024
const LOCK_POLL: Millis = 2
/** Longer than any queue of writers; a hung process may hold the lock indefinitely. */
const LOCK_TIMEOUT: Millis = 10_000

/** A decision about a record or the process. It holds no secrets. */
export interface AuditEvent {
  readonly who: { readonly address: string; readonly by: string | null }
  readonly what: 'resolve' | 'delete' | 'outcome' | 'drain' | 'undrain' | 'withdrawn'
  /** Record id; null: the change concerns no record. */
  readonly record: string | null
  readonly before: unknown
  readonly after: unknown
  readonly reason: string | null
}

export interface AuditLine extends AuditEvent {
  readonly time: string
  /** Who wrote it: several services may share a file. Lines of earlier versions have none. */
  readonly service: string
  /** Hash of the previous line; zeros: there is none. */
  readonly prev: string
  readonly hash: string
}

/**
 * Receives each line in addition to the file, if any, so that a truncated file differs from the log.
 *
 * @throws if there is no file and the line cannot be written: the change is not made.
 */
export type AuditSink = (line: AuditLine) => void

/** Every change is a line of JSON with the hash of the previous one, so that removed or edited lines are noticed. */
export class Audit {
  readonly #service: string
  readonly #sink: AuditSink
  readonly #file: AuditFile | null
  /** Hash of the last line; null: that line was edited. */
  #prev: string | null
  #last: Promise<unknown> = Promise.resolve()
  #closing = false

  private constructor(service: string, sink: AuditSink, file: AuditFile | null, prev: string | null) {
    this.#service = service
    this.#sink = sink
    this.#file = file
    this.#prev = prev
  }

  /**
   * Continues the chain of `file`, which several processes may share; without one, the lines go to the sink alone, in one chain
   * per process. If the last line of the file does not belong to a chain, {@link Audit.write} throws, but traffic is served.
   * @throws if the file, or its lock beside it, cannot be opened.
   */
  static async open(file: string | null, service: string, sink: AuditSink): Promise<Audit> {
    if (file === null) return new Audit(service, sink, null, NOTHING)
    const handle = await open(file, 'a+', OWNER_ONLY)
    const lock = `${file}.lock`
    try {
      const { size, line } = await alone(lock, () => lastLine(handle))
      return new Audit(service, sink, { handle, lock, size }, line === null ? NOTHING : hashIn(line))
    } catch (error) {
      await handle.close()
      throw error
    }
  }

  /**
   * Resolves when the line is on disk. One at a time.
   * @throws if it cannot be written: the change must not be made.
   */
  write(change: AuditEvent): Promise<AuditLine> {
    const file = this.#file
    const written = this.#last.then(() =>
      file === null
        ? this.#append(change)
        : alone(
            file.lock,
            () => this.#append(change),
            () => this.#closing && change.what !== 'withdrawn',
          ),
    )
    this.#last = written.catch(() => {})
    return written
  }

  /** A change that has waited too long for another process's lock is not made. Lines that revoke a change are still written. */
  async close(): Promise<void> {
    this.#closing = true
    await this.#last
    await this.#file?.handle.close()
  }

  async #append(change: AuditEvent): Promise<AuditLine> {
    const { who, what, record, before, after, reason } = change
    if (this.#prev === null) throw new Error('the last line of the audit file was edited: move the file away')
    if (this.#file !== null) this.#prev = await catchUp(this.#file, this.#prev)
    // The order of the members is part of the hash.
    const stamp = { time: new Date().toISOString(), service: this.#service }
    const content = { ...stamp, who, what, record, before, after, reason, prev: this.#prev }
    const line: AuditLine = { ...content, hash: hashOf(content) }
    if (this.#file !== null) await store(this.#file, `${JSON.stringify(line)}\n`)
    // A line refused by the sink is not part of the chain.
    this.#sink(line)
    this.#prev = line.hash
    return line
  }
}

interface AuditFile {
  readonly handle: FileHandle
  /** Path of the file that is locked. */
  readonly lock: string
  /** Bytes up to which its chain is known. */
  size: number
}

/** The hash after what other processes have added, if that continues the chain. */
async function catchUp(file: AuditFile, prev: string): Promise<string> {
  const { size, nlink } = await file.handle.stat()
  // Further lines could not be read by anyone.
  if (nlink === 0) throw new Error('the audit file was removed; restart to begin a new one')
  if (size === file.size) return prev
  const added = Buffer.alloc(Math.max(0, size - file.size))
  await file.handle.read(added, 0, added.length, file.size)
  const checked = added.length === 0 ? null : check(added.toString('utf8'), prev)
  // Another program wrote without the lock, or truncated it: a line added now would be attributed to it.
  if (checked === null || !checked.ok)
    throw new Error(
      `the audit file has ${size} bytes instead of ${file.size}, and the chain does not continue there: another program wrote to it`,
    )
  file.size = size
  return checked.head
}

async function store(file: AuditFile, text: string): Promise<void> {
  try {
    await file.handle.appendFile(text)
    await file.handle.datasync()
    file.size += Buffer.byteLength(text)
  } catch (error) {
    // A partial line would break the chain.
    await file.handle.truncate(file.size).catch(() => {})
    throw error
  }
}

/** Runs `work` while no other process reads or writes the end of the file. A process that is killed leaves no lock behind. */
async function alone<T>(lock: string, work: () => Promise<T>, isGivenUp = (): boolean => false): Promise<T> {
  const until = performance.now() + LOCK_TIMEOUT
  let release = lockFile(lock)
  for (; release === null; release = lockFile(lock)) {
    if (isGivenUp()) throw new Error('the process is ending, and another holds the lock of the audit file')
    if (performance.now() > until)
      throw new Error(`another process has held the lock of the audit file for ${LOCK_TIMEOUT} ms`)
    await wait(LOCK_POLL * (0.5 + Math.random()))
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

/** Finds the first line that was edited, or before which lines were removed or added. Only the log shows lines missing at the end. */
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
  if (rest !== '') return { ok: false, line: lines.length + 1, problem: 'the line is incomplete' }
  return { ok: true, lines: lines.length, head }
}

function problemOf(line: string, prev: string): string | null {
  let parsed: Partial<AuditLine>
  try {
    parsed = JSON.parse(line)
  } catch {
    return 'the line is not JSON'
  }
  const { hash, ...content } = parsed
  if (hash !== hashOf(content) || line !== JSON.stringify({ ...content, hash }))
    return 'the line was edited: its hash does not match'
  return content.prev === prev ? null : 'lines before this one were removed, added or moved'
}

function hashOf(content: object): string {
  return createHash('sha256').update(JSON.stringify(content)).digest('hex')
}

/** The hash of a line; null: it does not match. */
function hashIn(line: string): string | null {
  const prev = /"prev":"([0-9a-f]{64})"/.exec(line)?.[1] ?? ''
  return problemOf(line, prev) === null ? (JSON.parse(line) as AuditLine).hash : null
}

const BEGIN = Buffer.from('{"time":"')

/**
 * The last complete line; null: the file is empty; '': it is another kind of file. A line cut off by a crash belongs to a change that was
 * not made, so it is removed.
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
