import type { IncomingMessage, ServerResponse } from 'node:http'
import type { Config } from '../config/config.ts'
import { type Target, WELL_KNOWN } from '../core/route.ts'
import { policyDocument } from '../describe/published.ts'

/** Clients read it once; who changes it is in no hurry that they know. */
const KEPT = 'public, max-age=300'

/** One configuration, one document. */
const made = new WeakMap<Config, Buffer>()

/** Whether the request asks for the published policy, and there is one (`wellKnown`). */
export function asksForPolicy({ wellKnown }: Config, method: string, target: Target): boolean {
  return wellKnown && (method === 'GET' || method === 'HEAD') && target.path === WELL_KNOWN
}

/** Answers `GET /.well-known/idempotency`. */
export function sendPolicy(config: Config, request: IncomingMessage, response: ServerResponse): void {
  request.resume()
  let body = made.get(config)
  if (body === undefined) {
    body = Buffer.from(`${JSON.stringify(policyDocument(config))}\n`)
    made.set(config, body)
  }
  response.writeHead(200, [
    'Content-Type',
    'application/json',
    'Cache-Control',
    KEPT,
    'Content-Length',
    String(body.length),
  ])
  response.end(request.method === 'HEAD' ? undefined : body)
}
