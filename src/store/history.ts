import type { Millis } from '../core/record.ts'
import type { KeptNote, Note } from './register.ts'

/** The beginning says who executed, the end what happens now; the middle goes. lua/note.lua has the same numbers. */
export const NOTES_FIRST = 10
export const NOTES_LAST = 40

/** `lines` with `notes` added. lua/note.lua is the same. */
export function noted(lines: readonly string[], notes: readonly Note[], now: Millis): string[] {
  const kept = [...lines]
  for (const { tag, count, firstAgo, lastAgo, text } of notes) {
    const newest = kept.at(-1)
    const before = newest === undefined ? null : readNote(newest)
    const same = before !== null && before.tag === tag
    if (same) kept.pop()
    const first = same ? before.first : now - Math.round(firstAgo)
    kept.push(`${tag} ${count + (same ? before.count : 0)} ${first} ${now - Math.round(lastAgo)} ${text}`)
    if (kept.length > NOTES_FIRST + NOTES_LAST) kept.splice(NOTES_FIRST, 1)
  }
  return kept
}

export function readNote(line: string): KeptNote {
  const [tag = '', count, first, last] = line.split(' ', 4)
  const text = line.slice([tag, count, first, last].join(' ').length + 1)
  return { tag, count: Number(count), first: Number(first), last: Number(last), text }
}
