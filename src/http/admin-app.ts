import { createHash, timingSafeEqual } from 'node:crypto'
import { readdirSync, readFileSync } from 'node:fs'
import type { IncomingMessage } from 'node:http'
import { type AdminAccess, adminApi, withLookup } from '../admin/api.ts'
import { type AdminApp, type AppOptions, adminApp } from '../admin/app.ts'
import { AdminProblem } from '../admin/problems.ts'
import { linesOf } from '../core/headers.ts'
import { unmapped } from './headers.ts'
import type { Health } from './health.ts'

type OwnOptions = Pick<AppOptions, 'onBug' | 'server'>

/** The operations listener: only health and metrics, for the kubelet and Prometheus. */
export async function opsApp(health: Health, options: OwnOptions): Promise<void> {
  const app = adminApp({ ...options, notFound: `there are ${HEALTH_PATHS.join(', ')}` })
  serveHealth(app, health)
  await app.ready()
}

/** The admin listener: health, the operators' page, and the API behind the bearer token; without a token, health and metrics only. */
export async function apiApp(health: Health, access: AdminAccess | null, options: OwnOptions): Promise<void> {
  const app = adminApp(
    access === null
      ? { ...options, notFound: 'admin.tokenFile is not set' }
      : { ...options, authorize: (request) => authorize(access, request) },
  )
  serveHealth(app, health)
  if (access !== null) {
    servePage(app)
    await app.register(adminApi, { ports: withLookup(access.ports) })
  }
  await app.ready()
}

/* Paths open to everybody. */

const HEALTH_PATHS = ['/livez', '/startupz', '/readyz', '/metrics']
const OPEN = { config: { isOpen: true } } as const

function serveHealth(app: AdminApp, health: Health): void {
  // Any answer shows that the event loops run.
  app.get('/livez', OPEN, async () => {
    await health.turned()
    return { status: 'ok' }
  })
  app.get('/startupz', OPEN, async (_request, reply) => {
    const isStarted = health.started()
    return reply.code(isStarted ? 200 : 503).send({ status: isStarted ? 'ok' : 'starting' })
  })
  app.get('/readyz', OPEN, async (_request, reply) => {
    const store = await health.store()
    const draining = health.draining()
    const conflict = health.conflict()
    const isReady =
      health.started() &&
      health.isServed() &&
      !draining &&
      conflict === null &&
      (store.up || !health.readinessNeedsStore)
    const status = isReady ? 'ok' : draining ? 'draining' : 'not ready'
    return reply.code(isReady ? 200 : 503).send({ status, draining, conflict, store })
  })
  app.get('/metrics', OPEN, async (_request, reply) => {
    const { contentType, text } = await health.exposition()
    return reply.header('content-type', contentType).send(text)
  })
}

const PAGE = new URL('../admin/page/', import.meta.url)
const TYPES: Readonly<Record<string, string>> = {
  html: 'text/html; charset=utf-8',
  css: 'text/css; charset=utf-8',
  js: 'text/javascript; charset=utf-8',
}

/** Paths on the admin listener, each a file of the page. */
export const PAGE_FILES: Readonly<Record<string, string>> = Object.fromEntries(
  readdirSync(PAGE)
    .filter((name) => Object.hasOwn(TYPES, name.split('.')[1] ?? ''))
    .map((name) => [name === 'index.html' ? '/' : `/${name}`, name]),
)

/** Only its own files, no inline code, and no framing. */
const POLICY = [
  "default-src 'none'",
  "script-src 'self'",
  "style-src 'self'",
  "connect-src 'self'",
  "img-src 'self' data:",
  "base-uri 'none'",
  "form-action 'none'",
  "frame-ancestors 'none'",
].join('; ')

/**
 * The operators' page (contract §12 `/`). A browser sends no token with its first request, so these files are served to anyone who
 * reaches the listener. They hold no data: the script calls the API with the token that its user enters.
 */
function servePage(app: AdminApp): void {
  for (const [path, name] of Object.entries(PAGE_FILES)) {
    const body = readFileSync(new URL(name, PAGE))
    const etag = `"${createHash('sha256').update(body).digest('base64url').slice(0, 22)}"`
    const type = TYPES[name.split('.')[1] as string] as string
    app.get(path, OPEN, async ({ headers }, reply) => {
      const held = (headers['if-none-match'] ?? '').split(',').map((one) => one.trim().replace(/^W\//, ''))
      reply.headers({
        etag,
        'cache-control': 'no-cache',
        'content-security-policy': POLICY,
        'referrer-policy': 'no-referrer',
      })
      return held.includes(etag) ? reply.code(304).send() : reply.header('content-type', type).send(body)
    })
  }
}

/* Access. */

/**
 * Admits requests with the token, to this host, from no other origin (contract §12).
 *
 * @throws {AdminProblem}
 */
function authorize({ tokens, hosts }: AdminAccess, request: IncomingMessage): void {
  if (!bears(request, tokens()))
    throw new AdminProblem('unauthorized', 'send it as Authorization: Bearer <token>', {
      headers: { 'www-authenticate': 'Bearer' },
    })
  const host = hostOf(request)
  if (host === null || !(hosts.includes(host.name) || host.name === addressOf(request)))
    throw new AdminProblem('host_not_allowed', 'the Host of the request is not in admin.hosts')
  // A browser behind a TLS proxy sends https.
  const own = [`http://${host.line}`, `https://${host.line}`]
  if (!linesOf(request.rawHeaders, 'origin').every((origin) => own.includes(origin.toLowerCase())))
    throw new AdminProblem('origin_not_allowed', 'a page of another origin sent the request')
}

/** Compares digests, and with every token, so that timing reveals neither length nor content. */
function bears(request: IncomingMessage, tokens: readonly string[]): boolean {
  const given = /^Bearer (.+)$/i.exec(request.headers.authorization ?? '')?.[1] ?? ''
  const digest = (text: string): Buffer => createHash('sha256').update(text).digest()
  return tokens.filter((token) => timingSafeEqual(digest(given), digest(token))).length > 0
}

/** Null for no `Host` line or several. */
function hostOf(request: IncomingMessage): { line: string; name: string } | null {
  const [line, ...more] = linesOf(request.rawHeaders, 'host').map((one) => one.toLowerCase())
  const name = /^(\[[0-9a-f:.]+\]|[^:[\]@/?#]+)(?::\d{1,5})?$/.exec(line ?? '')?.[1]
  return line === undefined || name === undefined || more.length > 0 ? null : { line, name }
}

/** The local address of the connection in the form of a `Host`: unlike a name, it cannot be pointed here by others. */
function addressOf({ socket }: IncomingMessage): string {
  const address = unmapped(socket.localAddress ?? '')
  return address.includes(':') ? `[${address}]` : address
}
