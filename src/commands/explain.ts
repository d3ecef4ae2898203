import type { FullView, HistoryView } from '../admin/schemas.ts'
import { REQUEST_OUTCOMES } from '../protect/outcomes.ts'
import { counted, times } from './terminal.ts'

/** A record for people: whether it was executed and how often, and what to do now. Sentences. */
export interface Explanation {
  readonly told: readonly string[]
  readonly next: readonly string[]
}

/** What of a route's settings in force changes what a record means. */
export interface RouteFacts {
  readonly mode: string
  readonly onLeaseExpired: string
}

/**
 * What happened to a record, from what it says and from its history. `route`: null where its settings are not known.
 * `where`: flags for the commands that are told, with a space before each. Never more certain than these are: the history is written beside the requests and may lack entries.
 */
export function explainRecord(record: FullView, route: RouteFacts | null, where = ''): Explanation {
  const told = [
    ...verdict(record, route),
    ...late(record),
    ...duplicates(record),
    ...inShadow(record),
    ...caveats(record, route),
  ]
  return { told, next: nextSteps(record, route, where) }
}

/** Completed, and answered so. */
function answered({ response }: FullView): string {
  if (response === null) return 'Done.'
  const kept = response.size === null ? 'its body was not kept' : `${response.size} bytes are kept`
  return `The answer was ${response.status}; ${kept}.`
}

/** In these modes a retry is executed, whatever its record says. */
function isOpen(facts: RouteFacts | null): boolean {
  return facts?.mode === 'shadow' || facts?.mode === 'off'
}

/** How often it was sent upstream; of what shadow mode forwarded only what the history has is known. */
function sent({ attempts, shadowed }: FullView, facts: RouteFacts | null): string {
  const known = times(attempts + (shadowed?.duplicates ?? 0))
  return shadowed !== null || isOpen(facts) ? `at least ${known}` : known
}

function verdict(record: FullView, facts: RouteFacts | null): string[] {
  const { state, attempts, expiresAt, leaseUntil, lastError, shadowed } = record
  const decided = lastOf(record, 'resolved')
  const found = lastOf(record, 'reconciled')
  switch (state) {
    case 'completed':
    case 'expired': {
      const how =
        decided?.detail['outcome'] === 'completed'
          ? `It was done, as ${who(decided)} decided; it was sent upstream ${sent(record, facts)}.`
          : found?.detail['result'] === 'completed'
            ? `It was done, as the upstream said when it was asked; it was sent upstream ${sent(record, facts)}.`
            : shadowed !== null || isOpen(facts)
              ? `It was executed at least once, and sent upstream ${sent(record, facts)}.`
              : attempts === 1
                ? 'It was executed once.'
                : `It was sent upstream ${times(attempts)}; the last of them was executed.`
      const rest =
        state === 'completed'
          ? [answered(record), ...(isOpen(facts) ? [] : [`Retries get it until ${expiresAt}.`])]
          : []
      return [how, ...earlier(record), ...rest]
    }
    case 'in_progress':
      return [
        `It is being executed now: attempt ${attempts}, whose owner has until ${leaseUntil} to say that it is still at it.`,
        ...earlier(record),
      ]
    case 'failed_retryable':
      return [
        decided?.detail['outcome'] === 'retryable'
          ? `It counts as not executed, as ${who(decided)} decided.`
          : `It counts as not executed${lastError === null ? '' : `: ${lastError}`}.`,
        ...(attempts > 1 ? [`It was attempted ${times(attempts)}.`] : []),
        ...earlier(record),
      ]
    case 'unknown':
      return [
        `Nobody knows whether it was executed${lastError === null ? '' : `: ${lastError}`}.`,
        shadowed !== null || isOpen(facts)
          ? `It was sent upstream ${sent(record, facts)}; each time it may have been done.`
          : `It was sent upstream ${times(attempts)}, so it was done ${attempts === 1 ? 'once or not at all' : `at most ${times(attempts)}`}.`,
        ...(leaseUntil === null ? [] : [`Its owner fell silent; the lease ended ${leaseUntil}.`]),
        ...earlier(record),
        ...asked(record),
      ]
  }
}

/** What was taken for granted when a later attempt was made. */
function earlier({ attempts, history }: FullView): string[] {
  if (attempts === 1) return []
  const over = history.filter(({ detail }) => typeof detail['attempts'] === 'number' || 'before' in detail)
  const blind = over.some(({ event, detail }) => event !== 'resolved' && detail['before'] === 'unknown')
  if (blind)
    return [
      'An attempt was made while the outcome of the one before was unknown (onLeaseExpired: retry): it may have been executed more than once.',
    ]
  return ['Each attempt before was taken for not executed: the history says why.']
}

/** An attempt that was given up for not executed, or decided about, and then was heard of. */
function late({ attempts, history }: FullView): string[] {
  if (!history.some(({ event, detail }) => event === 'settled' && detail['result'] === 'stale')) return []
  return [
    attempts === 1
      ? 'Its own outcome came after that, and was refused: the history says what its client was answered.'
      : 'The outcome of an earlier attempt came too late, and was refused: it may have been executed more than once. The history says what its client was answered.',
  ]
}

function asked({ reconciliation }: FullView): string[] {
  if (reconciliation === null || (reconciliation.asked === 0 && reconciliation.answer === null)) return []
  const { asked: count, answer } = reconciliation
  return [`The upstream was asked ${times(count)}${answer === null ? '' : `; the last answer: ${answer}`}.`]
}

function duplicates({ history }: FullView): string[] {
  const parts = Object.entries(REQUEST_OUTCOMES)
    .flatMap(([event, { retry, group }]) =>
      retry === undefined ? [] : [{ retry, served: group === 'served', count: countOf(history, event) }],
    )
    .filter(({ count }) => count > 0)
    .toSorted((a, b) => Number(b.served) - Number(a.served))
  const all = parts.reduce((sum, { count }) => sum + count, 0)
  const misuse = countOf(history, 'misuse')
  const each = parts.map(({ retry, count }) => `${count} ${retry}`).join(', ')
  return [
    ...(all === 0
      ? []
      : [`${counted(all, 'retry was', 'retries were')} answered without executing: ${each}.`]),
    ...(misuse === 0
      ? []
      : [
          `${counted(misuse, 'request')} with this key and another content ${misuse === 1 ? 'was' : 'were'} refused.`,
        ]),
  ]
}

function inShadow({ shadowed }: FullView): string[] {
  if (shadowed === null) return []
  const { duplicates: more, misuse } = shadowed
  return [
    more === 0
      ? 'It was forwarded in shadow mode, where duplicates are executed, too: the history has none.'
      : `${counted(more, 'duplicate was', 'duplicates were')} forwarded in shadow mode, and may have been executed, too; there may be more.`,
    ...(misuse === 0
      ? []
      : [
          `${counted(misuse, 'request')} with this key and another content ${misuse === 1 ? 'was' : 'were'} forwarded in shadow mode.`,
        ]),
  ]
}

function caveats({ route, history }: FullView, facts: RouteFacts | null): string[] {
  return [
    ...(isOpen(facts)
      ? [
          `The route ${route} is in mode ${facts?.mode}: retries are executed again, and the attempts do not count them.`,
        ]
      : []),
    ...(countOf(history, 'bypassed') === 0
      ? []
      : ['A request passed while the store was down (onStoreUnavailable: bypass): it was executed besides.']),
  ]
}

function nextSteps(record: FullView, route: RouteFacts | null, where: string): string[] {
  const { id, state, expiresAt, leaseUntil, reconciliation, shadowed } = record
  const executes = `The route is in mode ${route?.mode}, so a retry with the same key is executed, whatever was done.`
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
        `Wait. If nothing is heard by ${leaseUntil}, it reads unknown.`,
        ...(isOpen(route) ? [executes] : []),
      ]
    case 'failed_retryable':
      return ['Nothing. The client may retry with the same key; that is executed.']
    case 'unknown':
      return [
        reconciliation === null || reconciliation.deadLettered
          ? 'A person has to decide.'
          : `It is looked at again ${reconciliation.nextLookAt}; or decide yourself.`,
        'Find out at the upstream whether it was done. Then one of:',
        `  idempotency-proxy resolve ${id} --completed FILE --reason TEXT${where}   # done; FILE says what retries are answered`,
        `  idempotency-proxy resolve ${id} --retryable --reason TEXT${where}        # not done; a retry executes it`,
        isOpen(route)
          ? executes
          : retryExecutes(record, route)
            ? 'The route says onLeaseExpired: retry, so the next retry executes it whatever was done.'
            : 'Until then retries are refused, and a new key is not safe.',
        `Undecided, the record is dropped ${expiresAt}.`,
      ]
  }
}

/** A lapsed lease on a route that hands such records out. */
function retryExecutes({ leaseUntil, history }: FullView, route: RouteFacts | null): boolean {
  const lapsed = leaseUntil !== null || history.some(({ event }) => event === 'lease_expired')
  return lapsed && route?.onLeaseExpired === 'retry'
}

function who({ detail }: HistoryView): string {
  const by = typeof detail['by'] === 'string' ? detail['by'] : 'somebody'
  return detail['what'] === 'outcome' ? `${by} reported and the proxy` : by
}

function lastOf({ history }: FullView, event: string): HistoryView | undefined {
  return history.findLast((entry) => entry.event === event)
}

function countOf(history: readonly HistoryView[], event: string): number {
  return history.reduce((sum, entry) => sum + (entry.event === event ? entry.count : 0), 0)
}
