import type { IncomingMessage } from 'node:http'
import { linesOf } from '../core/headers.ts'
import { type Refusal, refusal } from '../core/refusal.ts'

/**
 * What makes a head unfit for any route, although Node's parser takes it; null: nothing. Whatever two servers may read in two
 * ways is refused here.
 */
export function refuseHead(request: IncomingMessage): Refusal | null {
  const { httpVersion, rawHeaders } = request
  if (httpVersion !== '1.1' && httpVersion !== '1.0')
    return malformed(505, `HTTP/${httpVersion} is not spoken here; send HTTP/1.1`)
  const hosts = linesOf(rawHeaders, 'host').length
  // Two of them are two opinions on whom the request is for (RFC 9112 §3.2).
  if (hosts > 1) return malformed(400, `${hosts} Host lines; one is allowed`)
  if (hosts === 0 && httpVersion === '1.1') return malformed(400, 'the Host line is missing')
  const codings = linesOf(rawHeaders, 'transfer-encoding').flatMap((line) => line.toLowerCase().split(','))
  if (codings.length === 0) return null
  if (httpVersion === '1.0') return malformed(400, 'HTTP/1.0 has no Transfer-Encoding')
  // Without it at the end nothing says where the body ends (RFC 9112 §6.3).
  if (codings.at(-1)?.trim() !== 'chunked') return malformed(400, 'Transfer-Encoding does not end in chunked')
  return codings.length === 1 ? null : malformed(501, 'a transfer coding other than chunked')
}

export function malformed(status: 400 | 417 | 501 | 505, detail: string): Refusal {
  return refusal('request_malformed', detail, { status })
}
