/** What records and their histories say, in sentences. Times are of the store's clock. */

import { EVENTS, RECONCILED, SETTLED } from './outcomes.js'

/** @typedef {import('../schemas.ts').RecordView} RecordView */
/** @typedef {import('../schemas.ts').FullView} FullView */
/** @typedef {import('../schemas.ts').HistoryView} HistoryView */
/**
 * What the page reads of a route's configuration.
 * @typedef {object} Route
 * @property {string} name
 * @property {string} mode
 * @property {{ methods: string[], path: string } | null} match
 * @property {{ caller: string[] | 'none' }} scope
 * @property {{ from: string[] }} key
 * @property {object | 'none'} reconcile
 * @property {string} onLeaseExpired
 * @property {string} keep
 */

/** Whether unknown records of the route are asked about. @param {Route | null | undefined} route */
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

const CLOCK = new Intl.DateTimeFormat(undefined, {
  hour: '2-digit',
  minute: '2-digit',
  second: '2-digit',
  hourCycle: 'h23',
})
const DAY = new Intl.DateTimeFormat(undefined, { year: 'numeric', month: 'short', day: 'numeric' })

/** With the day, where it is not today. @param {string} time */
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

/** @param {number} count @param {string} one @param {string} [many] */
export function counted(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`
}

/** @param {number} count */
export function times(count) {
  return ['not', 'once', 'twice'][count] ?? `${count} times`
}

/**
 * What the state means, and what happens next.
 * @param {FullView} record
 * @param {Route | null} route
 * @returns {{ said: string, next: string }}
 */
export function meaning(record, route) {
  const open = isOpen(route) ? `The route is in mode ${route?.mode}: retries are executed. ` : ''
  switch (record.state) {
    case 'in_progress':
      return {
        said: 'The request is still running.',
        next: `${open || 'Duplicates wait, or are told to come again. '}Its owner has to be heard of ${until(record.leaseUntil ?? record.updatedAt)}, and renews that while the upstream works; if it falls silent, the outcome is unknown.`,
      }
    case 'unknown':
      return { said: 'Nobody knows whether the upstream did it.', next: unknownNext(record, route) }
    case 'completed': {
      const { status = 0, size: kept = null } = record.response ?? {}
      if (open !== '')
        return {
          said: `It was done: the upstream answered ${status}.`,
          next: `${open}The answer is kept until ${moment(record.expiresAt)}, and given in mode enforce.`,
        }
      return kept === null
        ? {
            said: `It was done: the upstream answered ${status}.`,
            next: `The answer itself was not kept. Retries are told that it was done, until ${moment(record.expiresAt)}; they are not executed.`,
          }
        : {
            said: `It was done: retries are answered ${status}.`,
            next: `They get the stored answer (${size(kept)}) until ${moment(record.expiresAt)}, and are not executed.`,
          }
    }
    case 'failed_retryable':
      return {
        said: 'It was not done: the next retry executes.',
        next: `The key still belongs to this request${open === '' ? ': with another payload it is refused' : ''}, until ${moment(record.expiresAt)}.`,
      }
    case 'expired':
      return {
        said: 'It was done, longer ago than answers are kept.',
        next: `${open || 'Retries are told that the key has expired, and are not executed. '}The record is kept until ${moment(record.expiresAt)}.`,
      }
  }
}

/** @param {FullView} record @param {Route | null} route */
function unknownNext({ leaseUntil, reconciliation, expiresAt }, route) {
  const silent = leaseUntil === null ? '' : `Whoever sent it has not been heard of for ${ago(leaseUntil)}. `
  if (isOpen(route))
    return `${silent}The route is in mode ${route?.mode}: retries are executed, whatever was done. Find out at the upstream.`
  const dropped = ` Left alone, the record is dropped on ${moment(expiresAt)}, and then nobody will know.`
  if (route?.onLeaseExpired === 'retry' && leaseUntil !== null)
    return `${silent}This route says onLeaseExpired: retry, so the next retry executes.`
  if (reconciliation?.deadLettered === true)
    return `${silent}The upstream was asked ${times(reconciliation.asked)} and did not settle it: a person has to decide. Until then retries are refused and nothing is executed.${dropped}`
  if (asksUpstream(route))
    return `${silent}The proxy asks the upstream by itself: ${times(reconciliation?.asked ?? 0)} so far, next ${reconciliation === null ? 'soon' : until(reconciliation.nextLookAt)}. Until then retries are refused and nothing is executed.`
  return `${silent}Retries are refused and nothing is executed until somebody decides: this route has no reconcile, so find out at the upstream.${dropped}`
}

/** In these modes a retry is executed, whatever its record says. @param {Route | null} route */
function isOpen(route) {
  return route?.mode === 'shadow' || route?.mode === 'off'
}

/** The answer to “was it done twice?”. @param {FullView} record @param {Route | null} route */
export function attempts({ attempts: count, shadowed }, route) {
  if (shadowed !== null && shadowed.duplicates > 0)
    return `Sent upstream at least ${times(count + shadowed.duplicates)}: ${counted(count, 'attempt')}, and ${counted(shadowed.duplicates, 'duplicate')} that shadow mode forwarded. Each may have been executed.`
  if (shadowed !== null || isOpen(route))
    return `${counted(count, 'attempt')}, or more: ${shadowed === null ? `in mode ${route?.mode}` : 'in shadow mode'} duplicates are executed, too, and the history has none.`
  return count === 1
    ? 'One attempt: the upstream was asked to do it once at most.'
    : `${count} attempts: each later one began because the one before was known, decided or allowed by the route to count as not done. The history says which.`
}

/**
 * An entry of a record's history. `mood`: good, bad, or nothing in particular.
 * @param {HistoryView} entry
 * @returns {{ said: string, details: string[], mood: string }}
 */
export function told({ event, detail }) {
  const text = (/** @type {string} */ name) =>
    typeof detail[name] === 'string' || typeof detail[name] === 'number' ? `${detail[name]}` : null
  const result = text('result') ?? text('verdict') ?? ''
  const said =
    event === 'settled'
      ? (SETTLED[result]?.says ?? `Settled: ${result}`)
      : event === 'reconciled'
        ? (RECONCILED[result]?.says ?? `Reconciled: ${result}`)
        : event === 'shadowed'
          ? `Forwarded in shadow mode: ${result.replaceAll('_', ' ')}`
          : event === 'resolved'
            ? decided(text('outcome'), text('what'), text('by'))
            : event === 'executed' && text('status') !== null
              ? `Executed: the upstream answered ${text('status')}`
              : (EVENTS[event]?.says ?? event.replaceAll('_', ' '))
  const details = [
    ['', text('reason') === null ? null : `“${text('reason')}”`],
    ['', text('cause')],
    ['took', text('upstreamMs') === null || text('upstreamMs') === '0' ? null : `${text('upstreamMs')} ms`],
    ['answered', event === 'executed' ? null : text('status')],
    ['attempt', text('attempts')],
    ['replica', text('replica')],
  ].flatMap(([name, value]) =>
    value === null || value === undefined ? [] : [name === '' ? value : `${name} ${value}`],
  )
  return { said, details, mood: moodOf(event, result) }
}

/** @param {string | null} outcome @param {string | null} what @param {string | null} by */
function decided(outcome, what, by) {
  const who = what === 'outcome' ? 'A report from outside' : (by ?? 'An operator')
  return outcome === 'completed' ? `${who} decided: it was done` : `${who} decided: it was not done`
}

/** @param {string} event @param {string} result */
function moodOf(event, result) {
  if (event === 'resolved') return 'person'
  if (event === 'shadowed') return result === 'first' || result === 'retry' ? '' : 'bad'
  const rows = event === 'settled' ? SETTLED : event === 'reconciled' ? RECONCILED : EVENTS
  return rows[event === 'settled' || event === 'reconciled' ? result : event]?.mood ?? ''
}
