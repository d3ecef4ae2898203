import { RESPONSE_HEADER } from '../core/headers.ts'
import { queryStatus } from '../protect/existing.ts'
import { issueKey, type KeyIssuer } from '../protect/identify.ts'
import type { WalkPorts } from '../protect/ports.ts'
import type { ProtectedRequest } from '../protect/request.ts'
import type { Cors } from './cors.ts'
import type { TrafficResponse } from './request.ts'
import type { ResponseWriter } from './write.ts'

/** `GET <status.path>`: the state of a record, for a client that asks instead of retrying (contract §6). */
export async function answerStatus(
  ports: WalkPorts,
  writer: ResponseWriter,
  asked: ProtectedRequest,
  response: TrafficResponse,
): Promise<void> {
  const found = await queryStatus(ports, asked)
  switch (found.kind) {
    case 'found': {
      const { id, state, retryAfter } = found
      const since = found.since === null ? null : new Date(found.since).toISOString()
      const wait = retryAfter === null ? [] : ['Retry-After', String(retryAfter)]
      json(writer, response, 200, { state, since, retryAfter, recordId: id }, wait)
      return
    }
    case 'absent':
      // Not a refusal: the key was never used, so the client may use it.
      json(writer, response, 404, { state: 'absent', since: null, retryAfter: null, recordId: found.id }, [
        RESPONSE_HEADER.retry,
        'same-key',
      ])
      return
    case 'response':
    case 'live':
    case 'problem':
    case 'none':
      writer.write(response, found)
  }
}

/** `POST <issuer.path>`: a signed key that expires. */
export async function answerIssue(
  ports: Pick<WalkPorts, 'store'>,
  writer: ResponseWriter,
  issuer: KeyIssuer,
  response: TrafficResponse,
): Promise<void> {
  response.req.resume()
  const issued = await issueKey(ports, issuer)
  if (issued.kind === 'problem') return writer.write(response, issued)
  const { key, expiresAt } = issued
  json(writer, response, 201, { idempotencyKey: key, expiresAt: new Date(expiresAt).toISOString() }, [])
}

/** `GET /.well-known/idempotency`. Clients read it once and need not see changes soon. */
export function answerPolicy(writer: ResponseWriter, policy: string, response: TrafficResponse): void {
  response.req.resume()
  send(writer, response, 200, policy, 'public, max-age=300', [])
}

/** A CORS preflight that nobody else would answer. */
export function answerPreflight(cors: Cors, method: string, response: TrafficResponse): void {
  response.req.resume()
  response.writeHead(204, cors.preflight(method, response.req.rawHeaders))
  response.end()
}

function json(
  writer: ResponseWriter,
  response: TrafficResponse,
  status: number,
  content: object,
  lines: readonly string[],
): void {
  send(writer, response, status, JSON.stringify(content), 'no-store', lines)
}

/** Node sends no body in answer to HEAD. */
function send(
  writer: ResponseWriter,
  response: TrafficResponse,
  status: number,
  text: string,
  cacheControl: string,
  lines: readonly string[],
): void {
  const body = Buffer.from(text)
  const length = String(body.length)
  const own = ['Content-Type', 'application/json', 'Cache-Control', cacheControl, 'Content-Length', length]
  response.writeHead(status, writer.marked(response, [...own, ...lines]))
  response.end(body)
}
