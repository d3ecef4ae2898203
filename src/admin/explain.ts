import type { RoutePolicy } from '../core/policy.ts'
import { COMPLETION_RESULTS, OTHER_EVENTS, RECONCILE_RESULTS, REQUEST_OUTCOMES } from '../protect/outcomes.ts'
import type { FullView, HistoryView } from './schemas.ts'

export type Unexplained = Omit<FullView, 'explanation' | 'history'> & {
  readonly history: readonly Omit<HistoryView, 'text' | 'mood'>[]
}
type HistoryEvent = Unexplained['history'][number]

/** The current settings of a route that change the meaning of a record. */
export type RouteFacts = Pick<RoutePolicy, 'mode' | 'onLeaseExpired'> & { readonly reconciles: boolean }

export function factsOf(route: RoutePolicy | null): RouteFacts | null {
  return route === null
    ? null
    : { mode: route.mode, onLeaseExpired: route.onLeaseExpired, reconciles: route.reconcile !== null }
}

/**
 * Explains a record for the operators' page and `inspect`: whether it was executed and how often, and what to do next. Claims no more than
 * the record proves: the history is written asynchronously and may lack entries.
 */
export function explainRecord(record: Unexplained, route: RouteFacts | null): FullView['explanation'] {
  const sentences: Sentence[] = [
    ...verdict(record, route),
    late(record),
    ...duplicates(record),
    ...inShadow(record),
    ...caveats(record, route),
  ]
  return {
    verdict: sentences.filter((sentence) => sentence !== false),
    next: nextSteps(record, route).filter((sentence) => sentence !== false),
  }
}

/** False: does not apply. */
type Sentence = string | false

/** In these modes a retry is executed whatever its record says. */
function isOpen(route: RouteFacts | null): boolean {
  return route?.mode === 'shadow' || route?.mode === 'off'
}

function verdict(record: Unexplained, route: RouteFacts | null): Sentence[] {
  const { state, attempts, leaseUntil, lastError } = record
  const why = lastError === null ? '' : `: ${lastError}`
  const mayBeMore = record.shadowed !== null || isOpen(route)
  switch (state) {
    case 'completed':
    case 'expired':
      return [executed(record, mayBeMore), earlier(record), ...answer(record, route)]
    case 'in_progress':
      return [
        `It is being executed now (attempt ${attempts}). Its owner must renew the lease by ${leaseUntil}.`,
        earlier(record),
      ]
    case 'failed_retryable': {
      const decided = lastOf(record, 'resolved')
      return [
        decided?.detail['outcome'] === 'retryable'
          ? `It counts as not executed, as ${decider(decided)}.`
          : `It counts as not executed${why}.`,
        attempts > 1 && `It was attempted ${times(attempts)}.`,
        earlier(record),
      ]
    }
    case 'unknown':
      return [
        `It is unknown whether it was executed${why}.`,
        mayBeMore
          ? `It was sent upstream ${sent(record, true)} and may have been done each time.`
          : `It was sent upstream ${times(attempts)}, so it was done ${attempts === 1 ? 'once or not at all' : `at most ${times(attempts)}`}.`,
        leaseUntil !== null && `Its owner stopped renewing the lease, which expired at ${leaseUntil}.`,
        earlier(record),
        asked(record),
      ]
  }
}

function executed(record: Unexplained, mayBeMore: boolean): string {
  const decided = lastOf(record, 'resolved')
  const often = sent(record, mayBeMore)
  if (decided?.detail['outcome'] === 'completed')
    return `It was done, as ${decider(decided)}; it was sent upstream ${often}.`
  if (lastOf(record, 'reconciled')?.detail['result'] === 'completed')
    return `It was done, according to the upstream; it was sent upstream ${often}.`
  if (mayBeMore) return `It was executed at least once, and sent upstream ${often}.`
  return record.attempts === 1
    ? 'It was executed once.'
    : `It was sent upstream ${often}; the last attempt was executed.`
}

/** How often it was sent upstream. For requests that shadow mode forwarded, only the history knows. */
function sent({ attempts, shadowed }: Unexplained, mayBeMore: boolean): string {
  const known = times(attempts + (shadowed?.duplicates ?? 0))
  return mayBeMore ? `at least ${known}` : known
}

function answer({ state, response, expiresAt }: Unexplained, route: RouteFacts | null): Sentence[] {
  if (state !== 'completed' || response === null) return []
  const { status, size, notKept, bodyUntil } = response
  const gone = notKept === 'past_ttl' ? 'its body was dropped after ttl.body' : 'its body was not stored'
  const kept = size === null ? gone : `${counted(size, 'byte is', 'bytes are')} stored`
  return [
    `The response was ${status}; ${kept}.`,
    isOpen(route)
      ? `The response is stored until ${expiresAt}; only mode enforce replays it.`
      : size === null
        ? `Until ${expiresAt}, retries get 409 with the original status.`
        : bodyUntil === null
          ? `Retries get it until ${expiresAt}.`
          : `Retries get it until ${bodyUntil}, then 409 with the original status until ${expiresAt}.`,
  ]
}

/** Why a later attempt was made. */
function earlier({ attempts, history }: Unexplained): Sentence {
  if (attempts === 1) return false
  const blind = history.some(({ event, detail }) => event !== 'resolved' && detail['before'] === 'unknown')
  return blind
    ? 'An attempt was made while the outcome of the previous one was unknown (onLeaseExpired: retry), so it may have been executed more than once.'
    : 'Every earlier attempt counted as not executed; the history says why.'
}

/** An attempt that reported its outcome after it had been recorded as not executed, or after a decision. */
function late({ attempts, history }: Unexplained): Sentence {
  if (!history.some(({ event, detail }) => event === 'settled' && detail['result'] === 'stale')) return false
  return attempts === 1
    ? 'Its own outcome arrived after that and was refused; the history shows what its client received.'
    : 'The outcome of an earlier attempt arrived too late and was refused, so it may have been executed more than once. The history shows what its client received.'
}

function asked({ reconciliation }: Unexplained): Sentence {
  if (reconciliation === null || (reconciliation.asked === 0 && reconciliation.answer === null)) return false
  const { asked: count, answer } = reconciliation
  return `The upstream was asked ${times(count)}${answer === null ? '' : `; the last answer: ${answer}`}.`
}

function duplicates({ history }: Unexplained): Sentence[] {
  const parts = Object.entries(REQUEST_OUTCOMES)
    .map(([event, { retry, group }]) => ({ retry, group, count: countOf(history, event) }))
    .filter(({ retry, count }) => retry !== undefined && count > 0)
    .toSorted((a, b) => Number(b.group === 'served') - Number(a.group === 'served'))
  const all = parts.reduce((sum, { count }) => sum + count, 0)
  const each = parts.map(({ retry, count }) => `${count} ${retry}`).join(', ')
  return [
    all > 0 && `${counted(all, 'retry was', 'retries were')} answered without executing: ${each}.`,
    misused(countOf(history, 'misuse'), 'refused'),
  ]
}

function inShadow({ shadowed }: Unexplained): Sentence[] {
  if (shadowed === null) return []
  const { duplicates: more, misuse } = shadowed
  return [
    more === 0
      ? 'It was forwarded in shadow mode, which also executes duplicates; the history shows none.'
      : `${counted(more, 'duplicate was', 'duplicates were')} forwarded in shadow mode and may also have been executed; there may be more.`,
    misused(misuse, 'forwarded in shadow mode'),
  ]
}

function misused(count: number, what: string): Sentence {
  const were = count === 1 ? 'was' : 'were'
  return count > 0 && `${counted(count, 'request')} with this key but different content ${were} ${what}.`
}

function caveats({ route: name, history }: Unexplained, route: RouteFacts | null): Sentence[] {
  return [
    isOpen(route) &&
      `The route ${name} is in mode ${route?.mode}: retries are executed again and not counted as attempts.`,
    countOf(history, 'bypassed') > 0 &&
      'A request was also executed while the store was down (onStoreUnavailable: bypass).',
  ]
}

function nextSteps(record: Unexplained, route: RouteFacts | null): Sentence[] {
  const { state, expiresAt, leaseUntil, shadowed } = record
  const executes = `The route is in mode ${route?.mode}, so a retry with the same key is executed anyway.`
  switch (state) {
    case 'completed':
    case 'expired':
      if (isOpen(route)) return [`Do not retry. ${executes}`]
      return [
        shadowed !== null && route === null
          ? 'Nothing, if the route is in mode enforce: a retry with the same key is not executed. In any other mode it is.'
          : 'Nothing. A retry with the same key is not executed.',
      ]
    case 'in_progress':
      return [
        `Wait. If its owner has not renewed the lease by ${leaseUntil}, the outcome is unknown.`,
        isOpen(route) && executes,
      ]
    case 'failed_retryable':
      return ['Nothing. The client may retry with the same key; the retry is executed.']
    case 'unknown':
      return [
        whoDecides(record, route),
        'Find out from the upstream whether it was done, then resolve the record.',
        isOpen(route)
          ? executes
          : retryExecutes(record, route)
            ? 'The route has onLeaseExpired: retry, so the next retry executes it anyway.'
            : 'Until then retries are refused, and a new key is not safe.',
        `If nobody decides, the record is dropped at ${expiresAt}.`,
      ]
  }
}

function whoDecides({ reconciliation }: Unexplained, route: RouteFacts | null): string {
  if (route?.reconciles === false) return 'An operator has to decide: this route has no reconcile.'
  if (reconciliation === null && route !== null)
    return 'The proxy will ask the upstream soon, or you can decide now.'
  if (reconciliation === null || reconciliation.deadLettered) return 'An operator has to decide.'
  return `The proxy asks the upstream again at ${reconciliation.nextLookAt}, or you can decide now.`
}

/** An expired lease on a route that lets a retry take over such records. */
function retryExecutes({ leaseUntil, history }: Unexplained, route: RouteFacts | null): boolean {
  const lapsed = leaseUntil !== null || history.some(({ event }) => event === 'lease_expired')
  return lapsed && route?.onLeaseExpired === 'retry'
}

type EventTexts = Readonly<Record<string, { readonly says: string; readonly mood?: 'good' | 'bad' }>>
const EVENTS: EventTexts = { ...REQUEST_OUTCOMES, ...OTHER_EVENTS }
const RESULTS: Readonly<Record<string, EventTexts>> = {
  settled: COMPLETION_RESULTS,
  reconciled: RECONCILE_RESULTS,
}

export function describeEvent(
  event: string,
  detail: HistoryView['detail'],
): Pick<HistoryView, 'text' | 'mood'> {
  if (event === 'resolved') {
    const who = detail['what'] === 'outcome' ? 'An outside report' : (wordOf(detail, 'by') ?? 'An operator')
    const not = detail['outcome'] === 'completed' ? '' : ' not'
    return { text: `${who} decided: it was${not} done`, mood: 'neutral' }
  }
  if (event === 'shadowed') {
    const verdict = wordOf(detail, 'verdict') ?? ''
    const mood = verdict === 'first' || verdict === 'retry' ? 'neutral' : 'bad'
    return { text: `Forwarded in shadow mode: ${verdict.replaceAll('_', ' ')}`, mood }
  }
  const result = wordOf(detail, 'result') ?? ''
  const row = RESULTS[event] === undefined ? EVENTS[event] : RESULTS[event][result]
  const status = event === 'executed' ? wordOf(detail, 'status') : null
  const text = `${row?.says ?? `${event} ${result}`.trim().replaceAll('_', ' ')}${status === null ? '' : ` ${status}`}`
  return { text, mood: row?.mood ?? 'neutral' }
}

function wordOf(detail: HistoryView['detail'], name: string): string | null {
  const value = detail[name]
  return typeof value === 'string' || typeof value === 'number' ? String(value) : null
}

function decider({ detail }: HistoryEvent): string {
  const by = wordOf(detail, 'by') ?? 'someone'
  return `${detail['what'] === 'outcome' ? 'reported' : 'decided'} by ${by}`
}

function lastOf({ history }: Unexplained, event: string): HistoryEvent | undefined {
  return history.findLast((entry) => entry.event === event)
}

function countOf(history: Unexplained['history'], event: string): number {
  return history.reduce((sum, entry) => sum + (entry.event === event ? entry.count : 0), 0)
}

export function times(count: number): string {
  return count === 1 ? 'once' : count === 2 ? 'twice' : `${count} times`
}

export function counted(count: number, one: string, many = `${one}s`): string {
  return `${count} ${count === 1 ? one : many}`
}
