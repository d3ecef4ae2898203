import { PROBLEMS, type ProblemCode } from '../admin/answers.ts'
import { quote } from '../config/units.ts'
import type { Millis } from '../core/record.ts'
import type { RecordSource, SourceRefusal, SourceReply, SourceRequest } from './record-source.ts'

/** A listing looks at up to 5,000 records; a report at more. */
const TIMEOUT: Millis = 60_000

/** A running proxy, by its admin listener. `origin`: without a slash at the end; `tokenFile`: where the token is from. */
export function openRemote(origin: string, token: string, tokenFile: string): RecordSource {
  return {
    name: `the proxy at ${origin}`,
    ask: async (call) => {
      const reply = await ask(origin, token, call)
      return reply.ok || reply.code !== 'unauthorized'
        ? reply
        : refused(
            reply.code,
            `the token in ${quote(tokenFile)} is not this proxy's admin token (admin.tokenFile)`,
          )
    },
    [Symbol.asyncDispose]: async () => {},
  }
}

async function ask(
  origin: string,
  token: string,
  { method, path, query, body, version }: SourceRequest,
): Promise<SourceReply> {
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

function refused(code: SourceRefusal['code'], detail: string): SourceRefusal {
  return { ok: false, code, detail }
}

/** `fetch failed` says nothing; what lies under it does. */
function whyNot(error: Error): string {
  const { cause } = error
  if (!(cause instanceof Error)) return error.message
  const [first = cause] = cause instanceof AggregateError ? (cause.errors as Error[]) : []
  return first.message
}
