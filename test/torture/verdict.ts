import { isSamePayload } from './clients.ts'
import type { Answer, History, Operation } from './history.ts'

/** A promise that was broken for one operation. */
export interface Violation {
  readonly operation: Operation
  readonly what: string
}

/** Whether a response is from an execution, and not from the proxy or an upstream that did nothing. */
function isOfExecution({ status, code }: Answer): boolean {
  return code === null && (status === 201 || status === 500)
}

/** Every promise that was broken for one operation. */
export function violations(operation: Operation): Violation[] {
  const found: string[] = []
  const { executions, answers, final } = operation
  if (executions.length > 1) found.push(`executed ${executions.length} times`)
  const [execution] = executions
  for (const answer of answers.filter(isOfExecution)) {
    const its = executions.find(({ status, body }) => status === answer.status && body === answer.body)
    if (execution === undefined) found.push('answered without an execution')
    else if (its === undefined) found.push('answered with what the execution did not answer')
    else if (!isSamePayload(its.payload, answer.payload)) found.push('answered as another payload was')
  }
  for (const answer of answers)
    if (answer.replayed && !isOfExecution(answer)) found.push(`replayed a ${answer.code ?? answer.status}`)
  const live = answers.some((answer) => isOfExecution(answer) && !answer.replayed)
  if (final !== null) {
    if (final.code === 'idempotency_outcome_unknown') {
      if (operation.route !== 'keep') found.push('still unknown although the upstream tells')
      else if (live) found.push('lost a completion: a client had its answer, and now it is unknown')
    } else if (final.code === 'idempotency_response_unavailable') {
      if (execution === undefined) found.push('done, says the proxy, but nothing was executed')
    } else if (final.code !== 'idempotency_key_reused' && !isOfExecution(final))
      found.push(`stuck: ${final.code ?? final.status}`)
  }
  return [...new Set(found)].map((what) => ({ operation, what }))
}

export interface Figures {
  operations: number
  executed: number
  unknown: number
  replays: number
}

/** Adds a round to the figures; returns the promises that it broke. */
export function judge({ operations }: History, figures: Figures): Violation[] {
  const broken: Violation[] = []
  for (const operation of operations.values()) {
    const { executions, final, answers } = operation
    figures.operations++
    if (executions.length > 0) figures.executed++
    if (final?.code === 'idempotency_outcome_unknown') figures.unknown++
    for (const { replayed } of answers) if (replayed) figures.replays++
    broken.push(...violations(operation))
  }
  return broken
}
