import { createReadStream } from 'node:fs'
import { createInterface } from 'node:readline'
import { isVerdict, ShadowTally, type ShadowTallyRow } from '../admin/shadow-tally.ts'
import type { Millis } from '../core/record.ts'

/** What `enforce` would have done in a period, according to the logs of shadow mode. */
export interface ShadowReport {
  readonly since: string
  readonly now: string
  /** What the log covers: times of its first and last line; null: no line has a time. */
  readonly first: string | null
  readonly last: string | null
  /** Lines of shadow mode in the period. */
  readonly lines: number
  /** Unreadable lines of shadow mode: truncated, or from another version. */
  readonly unreadable: number
  readonly shadow: readonly ShadowTallyRow[]
}

/**
 * Reads logs of proxies: JSON lines, also after a prefix, as from `kubectl logs --timestamps` and the container runtime, or within the JSON
 * of Docker's log files.
 * @throws if a file cannot be read.
 */
export async function readLogs(files: readonly string[], span: Millis, now: Millis): Promise<ShadowReport> {
  const tally = new ShadowTally()
  const from = now - span
  let first = Number.POSITIVE_INFINITY
  let last = Number.NEGATIVE_INFINITY
  let lines = 0
  let unreadable = 0
  for (const file of files) {
    const input = file === '-' ? process.stdin : createReadStream(file)
    for await (const text of createInterface({ input, crlfDelay: Number.POSITIVE_INFINITY })) {
      const time = timeOf(text)
      if (time !== null) {
        first = Math.min(first, time)
        last = Math.max(last, time)
      }
      // Cheap check first: most lines are not from shadow mode.
      if (!/\\?"msg\\?":\s*\\?"shadow\\?"/.test(text)) continue
      const line = lineOf(text)
      if (line === null) unreadable++
      else if (line.time >= from && line.time <= now) {
        lines++
        tally.verdict(line.route, line.verdict)
        if (line.newKey) tally.newKey(line.route)
        if (line.retryAgeMs !== null) tally.retry(line.route, line.retryAgeMs)
      }
    }
  }
  return {
    since: iso(from),
    now: iso(now),
    first: Number.isFinite(first) ? iso(first) : null,
    last: Number.isFinite(last) ? iso(last) : null,
    lines,
    unreadable,
    shadow: tally.rows(),
  }
}

function timeOf(text: string): Millis | null {
  const found = /\\?"time\\?":\s*\\?"([0-9T:.Z+-]{20,35})\\?"/.exec(text)?.[1]
  const time = found === undefined ? Number.NaN : Date.parse(found)
  return Number.isNaN(time) ? null : time
}

/** Null: not a complete line of shadow mode. */
function lineOf(text: string) {
  let value = parsed(text.slice(text.indexOf('{')))
  if (value !== null && typeof value['log'] === 'string') value = parsed(value['log'])
  if (value === null || value['msg'] !== 'shadow') return null
  const { route, verdict, retryAgeMs, newKey, time } = value
  const at = typeof time === 'string' ? Date.parse(time) : Number.NaN
  if (typeof route !== 'string' || typeof verdict !== 'string' || Number.isNaN(at)) return null
  if (!isVerdict(verdict)) return null
  return {
    time: at,
    route,
    verdict,
    retryAgeMs: typeof retryAgeMs === 'number' ? retryAgeMs : null,
    newKey: newKey === true,
  }
}

function parsed(text: string): Readonly<Record<string, unknown>> | null {
  try {
    const value: unknown = JSON.parse(text)
    return typeof value === 'object' && value !== null ? (value as Readonly<Record<string, unknown>>) : null
  } catch {
    return null
  }
}

function iso(time: Millis): string {
  return new Date(time).toISOString()
}
