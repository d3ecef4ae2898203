import { randomBytes } from 'node:crypto'
import { type ComparedRecord, judgeCopy } from '../../core/copies.ts'
import { type Millis, type RecordId, STATES, type State } from '../../core/record.ts'
import { PREFIX, readStamps, SCHEMA } from '../record/codec.ts'
import {
  CorruptRecord,
  type PutReply,
  type Register,
  type Stamp,
  type Store,
  StoreFull,
} from '../register.ts'

/*
 * Copies records from one store to another as bytes. Nothing is decoded, so sealed records stay sealed. Fence, token and createdAt are
 * kept, and so is the time left until `due` and `dropAt`; the target stamps version, updatedAt and all instants.
 */

/** Results of a copy, in words. */
export const COPIED = {
  copied: 'copied',
  replaced: 'replaced an earlier state',
  there: 'already there',
  newer: 'newer there, left unchanged',
  expired: 'expired meanwhile',
  left: 'skipped, not completed',
  running: 'in progress, not copied',
  different: 'different there, left unchanged',
  unreadable: 'unreadable, not copied',
} as const satisfies Record<string, string>
export type Copied = keyof typeof COPIED

export interface CopyMode {
  /** Excludes other changes in the source during the copy. */
  readonly completedOnly: boolean
  /** False: reports what a copy would do, and writes nothing. */
  readonly writes: boolean
}

export interface CopyReply {
  readonly became: Copied
  /** Time of the source's record, by its clock; 0 if there is none. */
  readonly updatedAt: Millis
}

/** The record read back differs from the one written. */
export class CopyDiffers extends Error {
  override readonly name = 'CopyDiffers'
}

/**
 * Copies one record with its history, unless `to` has one that {@link judgeCopy} keeps, and reads it back.
 *
 * @throws {CopyDiffers}, or the stores' errors.
 */
export async function copyRecord(from: Store, to: Store, id: RecordId, mode: CopyMode): Promise<CopyReply> {
  const { now, bytes } = await read(from, id)
  if (bytes === null) return { became: 'expired', updatedAt: 0 }
  const ours = keptOf(bytes)
  if (ours === null) return { became: 'unreadable', updatedAt: 0 }
  const { due, dropAt, updatedAt } = readStamps(bytes)
  if (mode.completedOnly && ours.state !== 'completed' && ours.state !== 'expired')
    return { became: 'left', updatedAt }
  if (ours.state === 'in_progress' && due > now) return { became: 'running', updatedAt }
  const spans = { dueIn: due - now, dropIn: dropAt - now }
  const became = await intoStore(to, id, { bytes, ours, spans }, mode.writes)
  const isTheSame = became === 'copied' || became === 'replaced' || became === 'there'
  if (mode.writes && isTheSame) await copyHistory(from, to, id, now)
  return { became, updatedAt }
}

/** A request is in progress: a proxy is using the store, or was killed less than a lease ago. */
export async function findRunning(
  store: Register,
): Promise<{ readonly id: RecordId; readonly leaseLeft: Millis } | null> {
  for (let cursor: string | null = null; ; ) {
    const page = await store.list('unresolved', cursor, PAGE)
    const found = await Promise.all(page.ids.map(async (id) => ({ id, ...(await read(store, id)) })))
    for (const { id, now, bytes } of found) {
      if (bytes === null || keptOf(bytes)?.state !== 'in_progress') continue
      const leaseLeft = readStamps(bytes).due - now
      if (leaseLeft > 0) return { id, leaseLeft }
    }
    if (page.next === null) return null
    cursor = page.next
  }
}

/**
 * Whether two URLs lead to the same store: then a rate limit used up through one is used up through the other. Changes nothing in the end.
 */
export async function areTheSame(from: Store, to: Store): Promise<boolean> {
  const bucket = randomBytes(32).toString('base64url')
  const once = { count: 1, per: 60_000 }
  await to.limits.take(bucket, once, 1)
  let wait: Millis
  try {
    wait = await from.limits.take(bucket, once, 1)
    if (wait === 0) await from.limits.take(bucket, once, -1)
  } catch (error) {
    // A full store may be the reason for the move.
    if (!(error instanceof StoreFull)) throw error
    wait = 0
  }
  await to.limits.take(bucket, once, -1)
  return wait > 0
}

export const PAGE = 500

interface Ours {
  readonly bytes: Buffer
  readonly ours: ComparedRecord
  readonly spans: { readonly dueIn: Millis; readonly dropIn: Millis }
}

async function intoStore(to: Store, id: RecordId, record: Ours, writes: boolean): Promise<Copied> {
  try {
    return writes ? await write(to, id, record) : wouldBecome(await to.get(id), record)
  } catch (error) {
    if (error instanceof CorruptRecord) return 'different'
    throw error
  }
}

async function write(to: Store, id: RecordId, record: Ours): Promise<Copied> {
  let became: Copied = 'copied'
  let reply = await to.put(id, given(record), record.spans, 'again')
  while (!reply.done) {
    became = wouldBecome(reply, record)
    if (became !== 'replaced') return became
    reply = await replace(to, id, record, reply.bytes)
  }
  await verify(to, id, record, reply.stamp)
  return became
}

async function replace(to: Store, id: RecordId, record: Ours, there: Buffer): Promise<PutReply> {
  const { spans } = record
  const { version } = readStamps(there)
  // A retry may execute this record anyway, so its brief absence does no harm. Its history, also older, is removed with it.
  if (keptOf(there)?.state === 'failed_retryable') await to.remove(id, version)
  else {
    const swap = await to.swap(id, { version }, given(record), spans, false)
    if (swap.done) return swap
  }
  return to.put(id, given(record), spans, 'again')
}

/** A store takes ownership of bytes. */
function given({ bytes }: Ours): Buffer {
  return Buffer.from(bytes)
}

function wouldBecome({ bytes: there }: { readonly bytes: Buffer | null }, { bytes, ours }: Ours): Copied {
  if (there === null) return 'copied'
  const theirs = keptOf(there)
  if (theirs === null) return 'different'
  if (alike(bytes, there)) return 'there'
  const verdict = judgeCopy(ours, theirs)
  return verdict === 'replace' ? 'replaced' : verdict
}

/** @throws {CopyDiffers} */
async function verify(to: Store, id: RecordId, { bytes, spans }: Ours, { version }: Stamp): Promise<void> {
  const { bytes: there } = await to.get(id)
  // It has expired, or was changed in the target.
  if (there === null || readStamps(there).version !== version) return
  const { updatedAt, due, dropAt } = readStamps(there)
  const inTime = due === updatedAt + spans.dueIn && dropAt === updatedAt + spans.dropIn
  if (!inTime || !alike(bytes, there)) throw new CopyDiffers(`the record ${id} does not read back as written`)
}

/** Equal except for what a store stamps: version, updatedAt, due and dropAt. */
function alike(a: Buffer, b: Buffer): boolean {
  const same = (from: number, to?: number): boolean => a.subarray(from, to).equals(b.subarray(from, to))
  return same(0, PREFIX.version) && same(PREFIX.fence, PREFIX.updatedAt) && same(PREFIX.end)
}

/** Copies the source's history, unless the target has one. */
export async function copyHistory(from: Store, to: Store, id: RecordId, now: Millis): Promise<void> {
  const notes = await from.history.read(id)
  if (notes.length === 0 || (await to.history.read(id)).length > 0) return
  const ago = notes.map(({ first, last, ...note }) => ({
    ...note,
    firstAgo: now - first,
    lastAgo: now - last,
  }))
  await to.history.append(id, ago)
}

const NO_RECORD = Buffer.alloc(0)

/** A record that the store cannot decode counts as unreadable. */
async function read(
  store: Register,
  id: RecordId,
): Promise<{ readonly now: Millis; readonly bytes: Buffer | null }> {
  try {
    return await store.get(id)
  } catch (error) {
    if (!(error instanceof CorruptRecord)) throw error
    return { now: 0, bytes: NO_RECORD }
  }
}

/** Null: no record that this version reads. */
export function keptOf(bytes: Buffer): ComparedRecord | null {
  const isOurs = bytes.length > PREFIX.end && bytes.toString('latin1', 0, 2) === 'IP'
  if (!isOurs || bytes[PREFIX.schema] !== SCHEMA) return null
  const state: State | undefined = STATES[bytes.readUInt8(PREFIX.state) - 1]
  if (state === undefined) return null
  const { fence, createdAt } = readStamps(bytes)
  return { state, fence, createdAt, token: bytes.subarray(PREFIX.token, PREFIX.createdAt) }
}
