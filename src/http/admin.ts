import type { IncomingMessage, Server, ServerResponse } from 'node:http'
import { type AdminAnswer, problem } from '../admin/answers.ts'
import type { AdminApi } from '../admin/api.ts'
import { readPage } from '../admin/page.ts'
import type { Millis } from '../core/record.ts'
import type { Metrics } from '../observe/metrics.ts'
import { Budget } from '../runtime/limits.ts'
import { type Gate, refusedAt } from './admin-gate.ts'
import { sendPage } from './admin-page.ts'
import { hasBody, readBody } from './bodies.ts'
import { TrafficServer } from './connections.ts'

/** What the open paths tell (contract §12). */
export interface Health {
  readonly draining: () => boolean
  readonly started: () => boolean
  /** Asks the store, bounded by its timeout. */
  readonly store: () => Promise<{ up: boolean; detail: string | null }>
  readonly readinessNeedsStore: boolean
  readonly metrics: Metrics
}

/** Whether the store answers, and if not, why. */
export async function healthOf(store: { ping(): Promise<unknown> }): ReturnType<Health['store']> {
  try {
    await store.ping()
    return { up: true, detail: null }
  } catch (error) {
    return { up: false, detail: (error as Error).message }
  }
}

type Handler = (health: Health, response: ServerResponse) => Promise<void> | void

const OPEN: Readonly<Record<string, Handler>> = {
  // That this is answered at all shows that the event loop turns.
  '/livez': (_health, response) => json(response, 200, { status: 'ok' }),
  '/startupz': (health, response) =>
    json(response, health.started() ? 200 : 503, { status: health.started() ? 'ok' : 'starting' }),
  '/readyz': async (health, response) => {
    const store = await health.store()
    const draining = health.draining()
    const ready = health.started() && !draining && (store.up || !health.readinessNeedsStore)
    json(response, ready ? 200 : 503, {
      status: ready ? 'ok' : draining ? 'draining' : 'not ready',
      draining,
      store,
    })
  },
  '/metrics': async (health, response) => {
    const body = await health.metrics.registry.metrics()
    response.writeHead(200, {
      'content-type': health.metrics.registry.contentType,
      'cache-control': 'no-store',
    })
    response.end(body)
  },
}

/** The operations listener: the open paths alone, for the kubelet and Prometheus. */
export function opsServer(health: Health, onBug: (error: unknown) => void): Server {
  return new TrafficServer(
    {},
    (request, response) => {
      if (!open(health, request, response))
        json(response, 404, { error: 'not found', paths: Object.keys(OPEN) })
    },
    onBug,
  )
}

/** What stands behind the token. */
export interface AdminAccess extends Gate {
  readonly api: AdminApi
}

/** The admin listener: the open paths, the operators' page, and the API behind the bearer token; without a token only the first. */
export function adminServer(
  health: Health,
  door: AdminAccess | null,
  onBug: (error: unknown) => void,
): Server {
  const page = readPage()
  return new TrafficServer(
    {},
    (request, response) => {
      if (open(health, request, response)) return
      if (door !== null && sendPage(page, request, response)) return
      if (door === null) return answer(response, problem('not_found', 'admin.tokenFile is not set'))
      void enter(door, request).then(
        (given) => (given === null ? response.destroy() : answer(response, given)),
        () => response.destroy(),
      )
    },
    onBug,
  )
}

/** A response that nobody waits for is only a few KiB; what people send is no larger than an answer that is kept. */
const MAX_BODY = 8 * 1024 ** 2
const UPLOAD: Millis = 30_000

/** Null: the client has gone, or is too slow. */
async function enter(door: AdminAccess, request: IncomingMessage): Promise<AdminAnswer | null> {
  const refused = refusedAt(door, request)
  if (refused !== null) return refused
  const url = request.url as string
  const [path = '', query = ''] = url.split(/\?(.*)/s, 2)
  const found = door.api.find(request.method as string, path)
  if (found.kind === 'refused') return found.answer
  const { endpoint, id } = found
  let body: unknown
  if (hasBody(request)) {
    if (endpoint.body === undefined) return problem('invalid_request', 'a body is not read here')
    if (!/^application\/json\s*(?:;|$)/i.test(request.headers['content-type'] ?? ''))
      return problem('unsupported_media_type', 'send Content-Type: application/json')
    const reading = await readBody(request, MAX_BODY, UPLOAD, new Budget(MAX_BODY), null, '')
    if (reading.kind === 'too_large' || reading.kind === 'no_room')
      return problem('body_too_large', `at most ${MAX_BODY} bytes`, { headers: { connection: 'close' } })
    if (reading.kind !== 'body') return null
    try {
      body = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(reading.body))
    } catch {
      return problem('invalid_request', 'the body is no JSON in UTF-8')
    }
  }
  return door.api.run(endpoint, {
    id,
    query: new URLSearchParams(query),
    ifMatch: request.headers['if-match'] ?? null,
    body,
    address: request.socket.remoteAddress ?? 'unknown',
  })
}

function answer(response: ServerResponse, { status, headers, body }: AdminAnswer): void {
  const text = body === null ? '' : `${JSON.stringify(body)}\n`
  response.writeHead(status, {
    ...(body === null ? {} : { 'content-type': 'application/json' }),
    'cache-control': 'no-store',
    'x-content-type-options': 'nosniff',
    ...headers,
  })
  response.end(text)
}

function open(health: Health, request: IncomingMessage, response: ServerResponse): boolean {
  const handler = OPEN[(request.url as string).split('?', 1)[0] as string]
  if (handler === undefined) return false
  if (request.method !== 'GET' && request.method !== 'HEAD') {
    response.setHeader('allow', 'GET, HEAD')
    json(response, 405, { error: `${request.method} is not allowed here` })
    return true
  }
  Promise.resolve(handler(health, response)).catch((error: unknown) =>
    json(response, 500, { error: String(error) }),
  )
  return true
}

function json(response: ServerResponse, status: number, body: unknown): void {
  if (response.headersSent) return
  response.writeHead(status, { 'content-type': 'application/json', 'cache-control': 'no-store' })
  response.end(`${JSON.stringify(body)}\n`)
}
