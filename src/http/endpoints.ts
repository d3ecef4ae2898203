import type { IncomingMessage, ServerResponse } from 'node:http'
import { RESPONSE_HEADER } from '../core/headers.ts'
import { issueKey, type KeyIssuer } from '../protect/issue-key.ts'
import type { Ports } from '../protect/ports.ts'
import type { ProtectedRequest } from '../protect/request.ts'
import { queryStatus } from '../protect/status-query.ts'
import type { ResponseWriter } from './write.ts'

/** Answers a client that asks for the state of a record instead of retrying (contract §6, `status.path`). */
export async function handleStatus(
  ports: Ports,
  writer: ResponseWriter,
  call: ProtectedRequest,
  request: IncomingMessage,
  response: ServerResponse,
): Promise<void> {
  const inquiry = await queryStatus(ports, call)
  switch (inquiry.kind) {
    case 'found': {
      const { id, state, since, retryAfter } = inquiry
      const said = {
        state,
        since: since === null ? null : new Date(since).toISOString(),
        retryAfter,
        recordId: id,
      }
      json(response, 200, said, retryAfter === null ? [] : ['Retry-After', String(retryAfter)])
      return
    }
    case 'absent':
      // A refusal in all but its form: the key was never used, so it may be.
      json(response, 404, { state: 'absent', since: null, retryAfter: null, recordId: inquiry.id }, [
        RESPONSE_HEADER.retry,
        'same-key',
      ])
      return
    case 'response':
    case 'live':
    case 'problem':
    case 'none':
      writer.write(request, response, inquiry)
  }
}

/** Answers `POST <issuer.path>`: a signed key that expires. */
export async function handleIssue(
  ports: Pick<Ports, 'store'>,
  writer: ResponseWriter,
  issuer: KeyIssuer,
  request: IncomingMessage,
  response: ServerResponse,
): Promise<void> {
  request.resume()
  const answer = await issueKey(ports, issuer)
  if (answer.kind === 'problem') return writer.write(request, response, answer)
  const { key, expiresAt } = answer
  json(response, 201, { idempotencyKey: key, expiresAt: new Date(expiresAt).toISOString() }, [])
}

function json(response: ServerResponse, status: number, content: object, lines: readonly string[]): void {
  const body = Buffer.from(JSON.stringify(content))
  response.writeHead(status, [
    'Content-Type',
    'application/json',
    'Cache-Control',
    'no-store',
    'Content-Length',
    String(body.length),
    ...lines,
  ])
  response.end(body)
}
