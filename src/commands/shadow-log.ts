import { createReadStream } from 'node:fs'
import { createInterface } from 'node:readline'
import type { ShadowRow } from '../admin/shadow-schema.ts'
import { isVerdict, ShadowTally } from '../admin/shadow-tally.ts'
import type { Millis } from '../core/record.ts'
import { shadowSections, type Told } from './report-text.ts'
import { counted } from './terminal.ts'

/** What enforce would have done in a period, by what shadow mode has logged. */
export interface ShadowReport {
  /** The period that was asked for. */
  readonly since: string
  readonly now: string
  /** The first and the last line of any kind that has a time: what the log can tell of; null: it has none. */
  readonly first: string | null
  readonly last: string | null
  /** Lines of shadow mode in the period. */
  readonly lines: number
  /** Lines of shadow mode that cannot be read: cut off, or of another version. */
  readonly unreadable: number
  readonly shadow: readonly ShadowRow[]
}

interface Line {
  readonly time: Millis
  readonly route: string
  readonly verdict: string
  readonly retryAgeMs: number | null
  readonly newKey: boolean
}

/**
 * Reads logs of proxies: JSON lines, also behind a prefix as `kubectl logs --timestamps` and the container runtime put one, or
 * within the JSON of Docker's log files.
 * @throws where a file cannot be read.
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
      // Most lines of a log are others.
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

export function toldOfShadow({ since, now, first, last, lines, unreadable, shadow }: ShadowReport): Told {
  return {
    sections: shadowSections(shadow, `from ${since} to ${now}`),
    disagreements: [],
    remarks: [
      `${counted(lines, 'line')} of shadow mode in that time${first === null ? '' : `; the log has lines from ${first} to ${last}`}.`,
      ...(first === null
        ? ['No line has a time: is it the log of a proxy, as JSON lines (log.format: json)?']
        : []),
      ...(first !== null && first > since
        ? [`It begins at ${first}: of the time before nothing is known.`]
        : []),
      ...(unreadable === 0 ? [] : [`${counted(unreadable, 'line')} of shadow mode cannot be read.`]),
      'Only what was logged is counted: the logs of all replicas, at log.level info or below. Two lines of one request in two files count twice.',
    ],
  }
}

function timeOf(text: string): Millis | null {
  const found = /\\?"time\\?":\s*\\?"([0-9T:.Z+-]{20,35})\\?"/.exec(text)?.[1]
  const time = found === undefined ? Number.NaN : Date.parse(found)
  return Number.isNaN(time) ? null : time
}

/** Null: it is no whole line of shadow mode. */
function lineOf(text: string): Line | null {
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
