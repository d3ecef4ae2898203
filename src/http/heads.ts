import type { Duplex } from 'node:stream'
import { malformed, type Refusal, refusal } from '../core/refusal.ts'
import { answersOn } from './connections.ts'
import { isLoop, type LoopMark } from './headers.ts'
import { isMultiplexed, type TrafficRequest } from './request.ts'
import { endRefused } from './tunnel.ts'
import type { ResponseWriter } from './write.ts'

/** Why a request is refused by its head alone; null: it is not. */
export function refusedByHead(
  request: TrafficRequest,
  loop: LoopMark,
  onLoop: (method: string) => void,
): Refusal | null {
  const refused = refuseHead(request)
  if (refused !== null) return refused
  if (isLoop(request.rawHeaders, loop)) {
    onLoop(request.method as string)
    return refusal('loop_detected', 'its `CDN-Loop` line names this proxy: the upstream leads back here')
  }
  return request.arrival === undefined
    ? malformed(400, 'the request target is neither a path nor an http(s) URL')
    : null
}

/** Refuses heads that Node's parser accepts but that another server may read differently; null: fine. */
export function refuseHead(request: TrafficRequest): Refusal | null {
  const { httpVersion, framing, refusal: found } = request
  if (found !== undefined) return found
  // Node's parser also takes a request line that ends in HTTP/2.0.
  if (httpVersion !== '1.1' && httpVersion !== '1.0' && !isMultiplexed(request))
    return malformed(505, `HTTP/${httpVersion} is not supported; send HTTP/1.1`)
  const { hosts, codings } = framing
  // Two `Host` lines name two recipients (RFC 9112 §3.2).
  if (hosts > 1) return malformed(400, `${hosts} Host lines; one is allowed`)
  if (hosts === 0 && httpVersion !== '1.0') return malformed(400, 'the Host line is missing')
  if (codings.length === 0) return null
  if (httpVersion === '1.0') return malformed(400, 'HTTP/1.0 has no Transfer-Encoding')
  // Otherwise nothing marks the end of the body (RFC 9112 §6.3).
  if (codings.at(-1)?.trim() !== 'chunked') return malformed(400, 'Transfer-Encoding does not end in chunked')
  return codings.length === 1 ? null : malformed(501, 'a transfer coding other than chunked')
}

/** The refusal for a parser error or timeout. Null: the connection itself broke. */
function refusalOfParser({ code = '' }: NodeJS.ErrnoException): Refusal | null {
  switch (code) {
    case 'ERR_HTTP_REQUEST_TIMEOUT':
      return refusal('request_timeout', 'the head of the request did not arrive in time')
    case 'HPE_HEADER_OVERFLOW':
      return refusal('request_too_large', 'the request line and the header lines are over 16 KiB', {
        status: 431,
      })
    case 'HPE_CHUNK_EXTENSIONS_OVERFLOW':
      return refusal('request_too_large', 'the chunk extensions are over 16 KiB')
    default:
      return code.startsWith('HPE_') ? malformed(400, `the bytes are not HTTP/1.1 (${code})`) : null
  }
}

/**
 * Answers parser errors and late heads with a problem document and ends the connection, since nobody knows where the next request would
 * begin. Behind an unanswered request, only a request whose head was read is refused, in its turn: the client would take anything else for that
 * request's answer.
 */
export function refuseUnread(writer: ResponseWriter, error: NodeJS.ErrnoException, socket: Duplex): void {
  const refused = refusalOfParser(error)
  if (refused === null || socket.destroyed) return void socket.destroy()
  // The parser repeats the error for every further chunk.
  if (socket.writableEnded) return
  const answers = answersOn(socket)
  const last = answers.at(-1)
  if (last === undefined) endRefused(socket, writer.problemMessage(refused))
  // Earlier requests are answered; the last of them ends the connection.
  else if (last.req.isHere) last.shouldKeepAlive = false
  // The body that cannot be read belongs to the last request. If that waits for its turn, it is refused then.
  else if (answers.length > 1) last.req.refusal = refused
  else {
    if (!last.headersSent) socket.end(writer.problemMessage(refused))
    socket.destroy()
  }
}
