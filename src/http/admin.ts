import { createHash, timingSafeEqual } from 'node:crypto'
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http'
import type { Metrics } from '../observe/metrics.ts'

/** What the open paths tell (contract §12). */
export interface Health {
  readonly draining: () => boolean
  readonly started: () => boolean
  /** Asks the store, bounded by its timeout. */
  readonly store: () => Promise<{ up: boolean; detail: string | null }>
  readonly readinessNeedsStore: boolean
  readonly metrics: Metrics
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
export function opsServer(health: Health): Server {
  return createServer((request, response) => {
    if (!open(health, request, response))
      json(response, 404, { error: 'not found', paths: Object.keys(OPEN) })
  })
}

/** The admin listener: the open paths, and everything else behind the bearer token. */
export function adminServer(health: Health, token: string | null): Server {
  return createServer((request, response) => {
    if (open(health, request, response)) return
    if (token !== null && !bears(request, token)) {
      response.setHeader('www-authenticate', 'Bearer')
      json(response, 401, { error: 'a bearer token is needed' })
    } else json(response, 404, { error: 'not found', paths: Object.keys(OPEN) })
  })
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

/** Compared by digest, so that neither length nor content of the token shows in the time it takes. */
function bears(request: IncomingMessage, token: string): boolean {
  const given = /^Bearer (.+)$/i.exec(request.headers.authorization ?? '')?.[1] ?? ''
  const digest = (text: string): Buffer => createHash('sha256').update(text).digest()
  return timingSafeEqual(digest(given), digest(token))
}

function json(response: ServerResponse, status: number, body: unknown): void {
  if (response.headersSent) return
  response.writeHead(status, { 'content-type': 'application/json', 'cache-control': 'no-store' })
  response.end(`${JSON.stringify(body)}\n`)
}
