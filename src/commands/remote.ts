import { PROBLEMS, type ProblemCode } from '../admin/answers.ts'
import type { Millis } from '../core/record.ts'
import type { Call, Refused, Reply, Source } from './asking.ts'

/** A listing looks at up to 5,000 records; a report at more. */
const TIMEOUT: Millis = 60_000

/** A running proxy, by its admin listener. `origin`: without a slash at the end. */
export function remote(origin: string, token: string): Source {
  return {
    name: `the proxy at ${origin}`,
    ask: (call) => ask(origin, token, call),
    [Symbol.asyncDispose]: async () => {},
  }
}

async function ask(
  origin: string,
  token: string,
  { method, path, query, body, version }: Call,
): Promise<Reply> {
  const search = query === undefined ? '' : `?${new URLSearchParams(query).toString()}`
  let response: Response
  let text: string
  try {
    response = await fetch(`${origin}${path}${search}`, {
      method,
      // The token is for this address and no other.
      redirect: 'error',
      signal: AbortSignal.timeout(TIMEOUT),
      headers: {
        authorization: `Bearer ${token}`,
        ...(body === undefined ? {} : { 'content-type': 'application/json' }),
        ...(version === undefined ? {} : { 'if-match': `"${version}"` }),
      },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    })
    text = await response.text()
  } catch (error) {
    return refused('unreachable', whyNot(error as Error))
  }
  let parsed: unknown
  try {
    parsed = text === '' ? null : JSON.parse(text)
  } catch {
    return refused('unexpected', `status ${response.status} and no JSON; is it an admin listener?`)
  }
  if (response.ok) return { ok: true, body: parsed }
  const { code, detail } = (parsed ?? {}) as { readonly code?: string; readonly detail?: string }
  if (code !== undefined && Object.hasOwn(PROBLEMS, code)) return refused(code as ProblemCode, detail ?? '')
  return refused('unexpected', `status ${response.status}; is it an admin listener of this version?`)
}

function refused(code: Refused['code'], detail: string): Refused {
  return { ok: false, code, detail }
}

/** `fetch failed` says nothing; what lies under it does. */
function whyNot(error: Error): string {
  const { cause } = error
  if (!(cause instanceof Error)) return error.message
  const [first = cause] = cause instanceof AggregateError ? (cause.errors as Error[]) : []
  return first.message
}
