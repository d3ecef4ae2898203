import { userInfo } from 'node:os'
import { escapeControls } from '../observe/pretty.ts'

/** Untrusted text, made safe for one line of a terminal. */
export function plain(text: string): string {
  return escapeControls(text)
}

/** JSON on one line, safe for terminals. */
export function json(value: unknown): string {
  return `${escapeControls(JSON.stringify(value))}\n`
}

export function table(rows: readonly (readonly string[])[]): string {
  const clean = rows.map((row) => row.map(plain))
  const width = (column: number): number => Math.max(...clean.map((row) => (row[column] ?? '').length))
  const widths = (rows[0] ?? []).map((_, column) => width(column))
  const line = (row: readonly string[]): string =>
    row.map((cell, column) => cell.padEnd(widths[column] as number)).join('  ')
  return clean.map((row) => `${line(row).trimEnd()}\n`).join('')
}

const UNITS: readonly (readonly [string, number])[] = [
  ['d', 86_400_000],
  ['h', 3_600_000],
  ['m', 60_000],
  ['s', 1000],
]

/** A span in its largest unit: `3d`, `5h`. */
export function span(ms: number): string {
  const [unit, factor] = UNITS.find(([, by]) => Math.abs(ms) >= by) ?? ['s', 1000]
  return `${Math.round(ms / factor)}${unit}`
}

/** The user of this process, the default of `--by`. In a container it may have no name. */
export function osUser(): string {
  try {
    return userInfo().username
  } catch {
    return `uid ${process.getuid?.() ?? 'unknown'}`
  }
}
