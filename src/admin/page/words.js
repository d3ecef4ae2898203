/** States, times and counts as text. Times follow the store's clock. */

/** @typedef {import('../schemas.ts').RecordView} RecordView */
/** @typedef {import('../schemas.ts').HistoryView} HistoryView */
/** @typedef {{ methods: string[], path: string } | null} Match */
/**
 * The part of a route's configuration that the page reads.
 * @typedef {{ name: string, match: Match, scope: { caller: string[] | 'none' }, key: { from: string[] }, reconcile: object | 'none', keep: string }} Route
 */

/** Whether the proxy queries the upstream about unknown records. @param {Route | null | undefined} route */
export function asksUpstream(route) {
  return route != null && route.reconcile !== 'none'
}

/** @type {Readonly<Record<RecordView['state'], string>>} */
export const STATES = {
  in_progress: 'running',
  completed: 'done',
  failed_retryable: 'not done',
  unknown: 'unknown',
  expired: 'expired',
}

let ahead = 0

/** Sets the page's clock to the store's. @param {string} time */
export function setClock(time) {
  ahead = Date.parse(time) - Date.now()
}

export function now() {
  return Date.now() + ahead
}

/** @param {number} milliseconds */
export function span(milliseconds) {
  const seconds = Math.max(0, Math.round(milliseconds / 1000))
  if (seconds < 60) return `${seconds} s`
  const minutes = Math.floor(seconds / 60)
  if (minutes < 60) return `${minutes} min`
  const hours = Math.floor(minutes / 60)
  if (hours < 48) return minutes % 60 === 0 || hours > 9 ? `${hours} h` : `${hours} h ${minutes % 60} min`
  return `${Math.floor(hours / 24)} d`
}

/** @param {string} time */
export function ago(time) {
  return span(now() - Date.parse(time))
}

/** @param {string} time */
export function until(time) {
  const left = Date.parse(time) - now()
  return left <= 0 ? 'now' : `in ${span(left)}`
}

/** @type {Intl.DateTimeFormatOptions} */
const TIME = { hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23' }
export const CLOCK = new Intl.DateTimeFormat(undefined, TIME)
const DAY = new Intl.DateTimeFormat(undefined, { year: 'numeric', month: 'short', day: 'numeric' })

/** Adds the date unless it is today. @param {string} time */
export function moment(time) {
  const date = new Date(time)
  const today = new Date(now()).toDateString() === date.toDateString()
  return today ? CLOCK.format(date) : `${DAY.format(date)}, ${CLOCK.format(date)}`
}

/** @param {number} bytes */
export function size(bytes) {
  if (bytes < 1024) return bytes === 1 ? '1 byte' : `${bytes} bytes`
  return bytes < 1024 ** 2 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / 1024 ** 2).toFixed(1)} MiB`
}

/** @param {number} count */
export function times(count) {
  return ['never', 'once', 'twice'][count] ?? `${count} times`
}

/** Shows the times in the API's sentences in the reader's zone. @param {string} text */
export function localised(text) {
  return text.replace(/\d{4}-\d\d-\d\dT[\d:.]+Z/g, moment)
}

/** Details of a history entry that its sentence omits. @param {HistoryView['detail']} detail @param {string} event */
export function detailsOf(detail, event) {
  const of = (/** @type {string} */ name, before = '', after = '') => {
    const value = detail[name]
    const isPresent =
      (typeof value === 'string' && value !== '') || (typeof value === 'number' && value !== 0)
    return isPresent ? [`${before}${value}${after}`] : []
  }
  return [
    ...of('reason', '“', '”'),
    ...of('cause'),
    ...of('upstreamMs', 'took ', ' ms'),
    ...(event === 'executed' ? [] : of('status', 'answered ')),
    ...of('attempts', 'attempt '),
    ...of('replica', 'replica '),
  ]
}
