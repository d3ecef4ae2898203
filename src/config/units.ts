import { isIP } from 'node:net'
import type { Millis } from '../core/record.ts'
import type { Address } from './config.ts'

/** The value of a text, or a sentence that says what was found and what is allowed. */
export type Parsed<T> =
  | { readonly ok: true; readonly value: T }
  | { readonly ok: false; readonly message: string }

export function parsed<T>(value: T): Parsed<T> {
  return { ok: true, value }
}

export function refused(text: string, allowed: string): { readonly ok: false; readonly message: string } {
  return { ok: false, message: `found ${/^\d+$/.test(text) ? text : quote(text)}; allowed: ${allowed}` }
}

/** A text as an error shows it: short, on one line, without the credentials of a URL, however they are written. */
export function quote(text: string): string {
  const masked = text.replace(/\/\/.*@/s, '//***@')
  return JSON.stringify(masked.length > 80 ? `${masked.slice(0, 77)}...` : masked)
}

const DURATION_UNITS = { ms: 1, s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000 }
const SIZE_UNITS = { B: 1, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 }

/** `250ms`, `30s`, `5m`, `24h`, `7d`; a plain `0` needs no unit. */
export function parseDuration(text: string): Parsed<Millis> {
  return withUnit(
    text,
    DURATION_UNITS,
    'a duration: a whole number with ms, s, m, h or d, such as 250ms, 30s, 24h',
  )
}

/** `512B`, `64KiB`, `1MiB`, `2GiB`; a plain `0` needs no unit. */
export function parseSize(text: string): Parsed<number> {
  return withUnit(text, SIZE_UNITS, 'a size: a whole number with B, KiB, MiB or GiB, such as 64KiB, 1MiB')
}

function withUnit(text: string, units: Readonly<Record<string, number>>, allowed: string): Parsed<number> {
  if (text === '0') return parsed(0)
  const [, digits = '', unit = ''] = /^(\d+)([A-Za-z]+)$/.exec(text) ?? []
  const factor = Object.hasOwn(units, unit) ? units[unit] : undefined
  const value = Number(digits) * (factor ?? 0)
  if (digits === '' || factor === undefined || !Number.isSafeInteger(value)) return refused(text, allowed)
  return parsed(value)
}

export function formatDuration(value: Millis): string {
  return inLargestUnit(value, DURATION_UNITS, 'ms')
}

export function formatSize(value: number): string {
  return inLargestUnit(value, SIZE_UNITS, 'B')
}

function inLargestUnit(value: number, units: Readonly<Record<string, number>>, smallest: string): string {
  const [unit, factor] = Object.entries(units).findLast(([, by]) => value >= by && value % by === 0) ?? [
    smallest,
    1,
  ]
  return `${value / factor}${unit}`
}

const HOST_NAME = /^(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*$/
export const ADDRESS =
  'host:port with a port of 0 to 65535 (0: any free one), IPv6 in brackets, such as 127.0.0.1:8080, [::1]:8080'

export function parseAddress(text: string): Parsed<Address> {
  const [, bracketed, plain, digits = ''] = /^(?:\[([^\]]*)\]|([^:[\]]*)):(\d{1,5})$/.exec(text) ?? []
  const port = Number(digits)
  const host = bracketed ?? plain ?? ''
  const valid = bracketed === undefined ? isHost(host) : isIP(host) === 6
  return valid && digits !== '' && port <= 65_535 ? parsed({ host, port }) : refused(text, ADDRESS)
}

export function formatAddress({ host, port }: Address): string {
  return `${host.includes(':') ? `[${host}]` : host}:${port}`
}

/** A name or an IPv4 address. What is made of digits and dots alone is no name: a mistyped address. */
export function isHost(host: string): boolean {
  return isIP(host) === 4 || (host.length <= 253 && HOST_NAME.test(host) && !/^[\d.]+$/.test(host))
}

export function isLoopback(host: string): boolean {
  return host === 'localhost' || host === '::1' || (isIP(host) === 4 && host.startsWith('127.'))
}
