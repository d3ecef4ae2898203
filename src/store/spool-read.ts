import { readdir, readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { isDamagedName, parseSegmentName, readSegment, type SegmentName } from './spool-file.ts'
import { isLockName } from './spool-lock.ts'

/** Tells what an operator should know; must not throw. */
export type Say = (message: string, detail: Readonly<Record<string, unknown>>) => void

/** `kept`: on disk, whatever happens to this process and this machine, or not needed any more. Else why it is not. */
export type Kept = 'kept' | Error

/** A payload that is in the spool, or on its way there. */
export interface Entry {
  readonly done: Promise<Kept>
}

/** What an earlier process left. */
export interface Found {
  readonly entry: Entry
  readonly payload: Buffer
}

export interface Segment extends SegmentName {
  bytes: number
  /** Numbers of entries that nobody has dropped. */
  readonly live: Set<number>
  /** Segments whose entries the tombstones in it take back: it outlives them. */
  readonly buries: Set<Segment>
  /** Something in it could not be read: in the end it is kept aside, not removed. */
  damaged: boolean
}

export interface Item extends Entry {
  readonly number: number
  /** null: nowhere, or not yet. */
  segment: Segment | null
  dropped: boolean
}

/** What earlier processes left in the directory, oldest first. `number`: the highest that an entry has. */
export async function readSpool(
  directory: string,
  say: Say,
): Promise<{ segments: Segment[]; number: number; found: Found[] }> {
  const segments: Segment[] = []
  const entries = new Map<
    string,
    { readonly item: Item; readonly segment: Segment; readonly payload: Buffer }
  >()
  const graves: { readonly place: string; readonly by: Segment }[] = []
  let highest = 0
  for (const name of await segmentsIn(directory, say)) {
    const bytes = await readFile(join(directory, name.name))
    const segment = { ...newSegment(name), bytes: bytes.length }
    segments.push(segment)
    for (const piece of readSegment(bytes, name.marker)) {
      if (piece.kind === 'unreadable') {
        segment.damaged ||= !piece.blank
        const where = { file: name.name, at: piece.at, bytes: piece.bytes }
        say('a part of the spool cannot be read; it is skipped, and kept aside', where)
        continue
      }
      const { number } = piece
      highest = Math.max(highest, number)
      if (piece.kind === 'entry') {
        const item: Item = { number, done: Promise.resolve('kept'), segment, dropped: false }
        entries.set(placeOf(name.marker, number), { item, segment, payload: piece.payload })
      } else graves.push({ place: placeOf(piece.of, number), by: segment })
    }
  }
  for (const { place, by } of graves) {
    const buried = entries.get(place)
    if (buried === undefined) continue
    buried.item.dropped = true
    by.buries.add(buried.segment)
  }
  const left = [...entries.values()].filter(({ item }) => !item.dropped)
  for (const { item, segment } of left) segment.live.add(item.number)
  return { segments, number: highest, found: left.map(({ item, payload }) => ({ entry: item, payload })) }
}

export function newSegment(name: SegmentName): Segment {
  return { ...name, bytes: 0, live: new Set(), buries: new Set(), damaged: false }
}

async function segmentsIn(directory: string, say: Say): Promise<SegmentName[]> {
  const names: SegmentName[] = []
  const others: string[] = []
  let aside = 0
  for (const name of await readdir(directory)) {
    const segment = parseSegmentName(name)
    if (segment !== null) names.push(segment)
    else if (isDamagedName(name)) aside++
    else if (!isLockName(name)) others.push(name)
  }
  if (others.length > 0)
    say('the spool has files that are not its own; they are left alone', { files: others })
  if (aside > 0)
    say('damaged files of the spool are kept aside; look at them, and remove them', { files: aside })
  return names.sort((a, b) => a.number - b.number)
}

function placeOf(marker: Buffer, number: number): string {
  return `${marker.toString('hex')} ${number}`
}
