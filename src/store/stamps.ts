import type { Millis, Spans } from '../core/record.ts'
import { readStamps, resume, stamp } from './codec.ts'
import type { Stamp } from './register.ts'

/** A record up to this size is claim-like: it carries no body. Stores that are full still accept it in a swap, so that an executed outcome is never lost. */
export const SMALL_RECORD = 4096

/** A stamped copy of `bytes`, as {@link Register.put} (`previous` null) or {@link Register.swap} says. For stores that stamp in JavaScript. */
export function stampCopy(
  bytes: Buffer,
  previous: Buffer | null,
  now: Millis,
  spans: Spans,
  nextFence: boolean,
): { bytes: Buffer; stamp: Stamp; due: Millis; dropAt: Millis } {
  const copy = Buffer.from(bytes)
  const own = readStamps(copy)
  const old = previous === null ? null : readStamps(previous)
  const s = {
    version: old === null ? now : old.version + 1,
    fence: old === null ? own.fence || now : Math.max(own.fence, old.fence + (nextFence ? 1 : 0)),
    createdAt: old === null ? own.createdAt || now : old.createdAt,
    updatedAt: now,
    due: now + spans.dueIn,
    dropAt: now + spans.dropIn,
  }
  stamp(copy, s)
  const { version, fence, createdAt, due, dropAt } = s
  return { bytes: copy, stamp: { version, fence, createdAt }, due, dropAt }
}

/** A copy of the owner's record, in progress, with its lease prolonged, and its life where that would end sooner. */
export function prolongLease(
  bytes: Buffer,
  now: Millis,
  { dueIn, dropIn }: Spans,
): { bytes: Buffer; due: Millis; dropAt: Millis } {
  const copy = Buffer.from(bytes)
  const old = readStamps(copy)
  const due = now + dueIn
  const dropAt = Math.max(old.dropAt, now + dropIn)
  stamp(copy, { ...old, version: old.version + 1, due, dropAt })
  resume(copy)
  return { bytes: copy, due, dropAt }
}
