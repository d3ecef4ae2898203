import type { FastifyInstance } from 'fastify'
import type { Config } from '../config/config.ts'
import { RESPONSE_HEADER } from '../core/headers.ts'
import { refusal } from '../core/refusal.ts'
import { isProtected, parseTarget, WELL_KNOWN } from '../core/route.ts'
import { policyDocument } from '../describe/published.ts'
import { queryStatus } from '../protect/existing.ts'
import { issueKey, type KeyIssuer } from '../protect/identify.ts'
import type { WalkPorts } from '../protect/ports.ts'
import type { ProtectedRequest } from '../protect/request.ts'
import { type Hijacking, type Incoming, takeAnyBody } from './incoming.ts'
import { type ProtectOptions, ReceivedRequest } from './protected.ts'
import type { TrafficResponse } from './request.ts'
import { pathPattern, type Routing } from './routing.ts'
import { marked, type ResponseWriter } from './write.ts'

export interface EndpointsPlugin {
  readonly config: Config
  readonly routing: Routing
  readonly issuer: KeyIssuer | null
  readonly protecting: ProtectOptions
  readonly handle: Hijacking
}

/** The proxy's own endpoints. */
export function endpoints(
  app: FastifyInstance,
  { config, routing, issuer, protecting, handle }: EndpointsPlugin,
  done: () => void,
): void {
  const { ports, writer } = protecting
  takeAnyBody(app)
  if (config.issuer !== null && issuer !== null)
    app.post(
      pathPattern(config.issuer.path),
      handle(({ response }) => answerIssue(ports, writer, issuer, response)),
    )
  if (config.status.path !== null)
    app.get(
      pathPattern(config.status.path),
      handle((incoming) => status(routing, protecting, incoming)),
    )
  if (config.wellKnown) {
    const policy = `${JSON.stringify(policyDocument(config))}\n`
    // Clients read it once and need not see changes soon.
    const handler = handle(({ response }) => {
      response.req.resume()
      send(response, 200, policy, 'public, max-age=300', [])
    })
    app.route({ method: ['GET', 'HEAD'], url: WELL_KNOWN, handler })
  }
  done()
}

async function status(routing: Routing, protecting: ProtectOptions, incoming: Incoming): Promise<void> {
  const { ports, writer } = protecting
  const { response } = incoming
  const query = new URLSearchParams(incoming.target.query)
  const method = query.get('method') ?? 'POST'
  const target = parseTarget(query.get('path') ?? '')
  const route = target === null ? null : routing.router.match(method, target)
  if (target === null || route === null || !isProtected(route)) {
    const detail = `no protected route matches ${method} ${target?.path ?? 'without a path'}; ask with ?method=…&path=/…`
    writer.problem(response, refusal('route_not_found', detail))
    return
  }
  const asked = new ReceivedRequest(protecting, route, { ...incoming, target }, method)
  await answerStatus(ports, writer, asked, response)
}

/** `GET <status.path>`: the state of a record, for a client that asks instead of retrying (contract §6). */
async function answerStatus(
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
      json(response, 200, { state, since, retryAfter, recordId: id }, wait)
      return
    }
    case 'absent':
      // Not a refusal: the key was never used, so the client may use it.
      json(response, 404, { state: 'absent', since: null, retryAfter: null, recordId: found.id }, [
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
async function answerIssue(
  ports: Pick<WalkPorts, 'store'>,
  writer: ResponseWriter,
  issuer: KeyIssuer,
  response: TrafficResponse,
): Promise<void> {
  response.req.resume()
  const issued = await issueKey(ports, issuer)
  if (issued.kind === 'problem') return writer.write(response, issued)
  const { key, expiresAt } = issued
  json(response, 201, { idempotencyKey: key, expiresAt: new Date(expiresAt).toISOString() }, [])
}

function json(response: TrafficResponse, status: number, content: object, lines: readonly string[]): void {
  send(response, status, JSON.stringify(content), 'no-store', lines)
}

/** Node sends no body in answer to HEAD. */
function send(
  response: TrafficResponse,
  status: number,
  text: string,
  cacheControl: string,
  lines: readonly string[],
): void {
  const body = Buffer.from(text)
  const length = String(body.length)
  const own = ['Content-Type', 'application/json', 'Cache-Control', cacheControl, 'Content-Length', length]
  response.writeHead(status, marked(response, [...own, ...lines]))
  response.end(body)
}
