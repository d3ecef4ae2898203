import { createHash, timingSafeEqual } from 'node:crypto'
import type { IncomingMessage } from 'node:http'
import { type AdminAnswer, problem } from '../admin/answers.ts'
import { linesOf } from '../core/headers.ts'
import { unmapped } from './headers.ts'

export interface Gate {
  readonly token: string
  /** What `Host` may name, without a port, lower case. */
  readonly hosts: readonly string[]
}

/** Who may speak to the admin API: whoever has the token, to this host, from no other origin (contract §12). Null: come in. */
export function refusedAt(gate: Gate, request: IncomingMessage): AdminAnswer | null {
  if (!bears(request, gate.token))
    return problem('unauthorized', 'send it as Authorization: Bearer <token>', {
      headers: { 'www-authenticate': 'Bearer' },
    })
  const host = hostOf(request)
  if (host === null || !(gate.hosts.includes(host.name) || host.name === addressOf(request)))
    return problem('host_not_allowed', 'the Host of the request is not in admin.hosts')
  const origins = linesOf(request.rawHeaders, 'origin')
  // A browser that came by a TLS proxy says https.
  const own = [`http://${host.line}`, `https://${host.line}`]
  return origins.every((origin) => own.includes(origin.toLowerCase()))
    ? null
    : problem('origin_not_allowed', 'a page of another origin sent the request')
}

/** Compared by digest, so that neither length nor content of the token shows in the time it takes. */
function bears(request: IncomingMessage, token: string): boolean {
  const given = /^Bearer (.+)$/i.exec(request.headers.authorization ?? '')?.[1] ?? ''
  const digest = (text: string): Buffer => createHash('sha256').update(text).digest()
  return timingSafeEqual(digest(given), digest(token))
}

/** Two lines, or none, name no host. */
function hostOf(request: IncomingMessage): { line: string; name: string } | null {
  const [line, ...more] = linesOf(request.rawHeaders, 'host').map((one) => one.toLowerCase())
  const name = /^(\[[0-9a-f:.]+\]|[^:[\]@/?#]+)(?::\d{1,5})?$/.exec(line ?? '')?.[1]
  return line === undefined || name === undefined || more.length > 0 ? null : { line, name }
}

/** Where the connection came to, as a `Host` has it: no name that others could point here. */
function addressOf({ socket }: IncomingMessage): string {
  const address = unmapped(socket.localAddress ?? '')
  return address.includes(':') ? `[${address}]` : address
}
