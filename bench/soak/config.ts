import { randomBytes } from 'node:crypto'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'

/** `upstream.timeout`, and so the shortest `ttl` allowed: retention turns over hundreds of times. */
export const TTL = 2000
/** The tombstone of `strict`, after its `ttl`. */
export const TOMBSTONE = 1000
/** The retention of `fading`, whose unresolved records end within the run. */
export const FADING = 3000
export const IDLE = 1000
export const REQUEST_LIMIT = 1024 * 1024
export const RESPONSE_LIMIT = 1024 * 1024

export interface Addresses {
  readonly port: number
  readonly adminPort: number
  readonly upstreamPort: number
  readonly redisPort: number
}

const ROUTES: readonly string[] = [
  'name: payments, match: { path: /v1/payments }, key: { presence: required, forwardFence: true }',
  'name: waiting, match: { path: /v1/waiting }, inFlight: { mode: wait, wait: 1s }',
  'name: slow, match: { path: /v1/slow }, respondWithin: 100ms',
  'name: secrets, match: { path: /v1/secrets }, keep: outcome',
  'name: authorized, match: { path: /v1/authorized }, authorizeReplay: { path: /authorize, cache: 500ms }',
  'name: limited, match: { path: /v1/limited }, limits: { newKeys: 3/s }',
  'name: derived, match: { path: /v1/derived }, key: { derive: { json: [/order], headers: [x-shop] }, forwardFence: true }',
  'name: events, match: { path: /v1/events }, key: { presence: required, from: ["json:/id"], forwardFence: true }',
  'name: issued, match: { path: /v1/issued }, key: { presence: required, issuedOnly: true, forwardFence: true }',
  `name: strict, match: { path: /v1/strict }, profile: strict, scope: { caller: "header:authorization" }, tombstone: ${TOMBSTONE}ms`,
  'name: lenient, match: { path: /v1/lenient }, profile: lenient',
  `name: fading, match: { path: /v1/fading }, unresolvedTtl: ${FADING}ms`,
  'name: shadow, match: { path: /v1/shadow }, mode: shadow',
  'name: unguarded, match: { path: /v1/unguarded }, mode: off',
  'name: ignored, match: { path: /v1/ignored }, key: ignored',
]

/** Writes the proxy's configuration: every kind of route, with the shortest times allowed. */
export function writeConfig(folder: string, { port, adminPort, upstreamPort, redisPort }: Addresses): string {
  writeFileSync(join(folder, 'issuer'), randomBytes(32))
  const file = join(folder, 'soak.yaml')
  writeFileSync(
    file,
    `listen: 127.0.0.1:${port}
admin: { listen: "127.0.0.1:${adminPort}" }
upstream:
  { url: "http://127.0.0.1:${upstreamPort}", connectTimeout: 1s, timeout: ${TTL}ms, idleTimeout: ${IDLE}ms }
service: soak
store: { url: "redis://127.0.0.1:${redisPort}", timeout: 500ms }
limits: { request: ${REQUEST_LIMIT}B, response: ${RESPONSE_LIMIT}B, upload: 1s }
issuer: { path: /keys, secretFile: issuer, ttl: 1h }
status: { path: /status }
log: { format: json }
defaults: { ttl: ${TTL}ms, lease: 1s, statusHeader: true, key: { forwardFence: true } }
routes:
${ROUTES.map((route) => `  - { ${route} }`).join('\n')}
`,
  )
  return file
}
