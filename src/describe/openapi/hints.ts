import type { Operation } from './operations.ts'
import { isObject, member, textOf } from './read.ts'

/** Words that name what only reads, or only computes. */
const READS =
  /(?:^|[^a-z])(?:search|query|find|lookup|list|filter|preview|validate|estimate|calculate|simulate|count|check|batchget)(?:$|[^a-z])/
const SECRETS =
  /(?:^|[^a-z])(?:token|tokens|login|password|secret|secrets|session|sessions|otp|credentials)(?:$|[^a-z])/

/** What the name of an operation, its path and its answers suggest, for a person to decide. */
export function hintsOf({ id, template, value }: Operation): string[] {
  const words = `${id ?? ''} ${template.split('/').slice(-2).join(' ')}`
    .replace(/([a-z0-9])([A-Z])/g, '$1 $2')
    .toLowerCase()
  const hints: string[] = []
  if (/graphql/.test(words))
    hints.push(
      'DECIDE: GraphQL. Queries and mutations come to the same path; only those that carry a key are protected.',
    )
  else if (READS.test(words))
    hints.push(
      'DECIDE: looks like a question that changes nothing. Then: key: ignored, and it streams through.',
    )
  if (SECRETS.test(words))
    hints.push(
      'DECIDE: the answer may carry a secret, which is stored. keep: outcome stores nothing of the body.',
    )
  if (streams(value))
    hints.push(
      'Answers with a stream: the first client gets all of it, retries get 409 idempotency_response_unavailable.',
    )
  const status = acceptedLater(value)
  if (status !== null)
    hints.push(`Answers ${status}: the work goes on afterwards. A replay says again that it was taken.`)
  if (member(value, 'deprecated') === true) hints.push('Deprecated in the description.')
  if (textOf(member(value, 'operationId')) === null) hints.push('Has no operationId: named by its path.')
  return hints
}

function streams(operation: unknown): boolean {
  const responses = member(operation, 'responses')
  return (
    isObject(responses) &&
    Object.values(responses).some((response) => {
      const content = member(response, 'content')
      return isObject(content) && Object.keys(content).some((type) => /^text\/event-stream\b/i.test(type))
    })
  )
}

function acceptedLater(operation: unknown): string | null {
  const responses = member(operation, 'responses')
  return isObject(responses) && Object.hasOwn(responses, '202') ? '202' : null
}
