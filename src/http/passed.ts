import type { IncomingMessage, ServerResponse } from 'node:http'
import type { Dispatcher } from 'undici'
import { filterLines, firstOf, HOP_BY_HOP, hopByHop } from '../core/headers.ts'
import { reasonPhrase } from '../upstream/forward.ts'
import { breakOff, chunkable, sendHead, type Writer } from './write.ts'

/**
 * Writes the upstream's answer to a request that is not protected: status, reason, lines in their order, case and number,
 * the bytes as they come, trailers. A client that leaves ends the upstream's answer; an upstream that breaks off breaks
 * off the client's.
 */
export function passedAnswer(
  writer: Writer,
  request: IncomingMessage,
  response: ServerResponse,
  answer: Dispatcher.ResponseData,
  marks: readonly string[],
): void {
  const { statusCode: status, body, trailers } = answer
  const raw = answer.headers as unknown as string[]
  const hop = hopByHop(raw)
  const chunked = chunkable(request, status) && firstOf(raw, 'content-length') === null
  const lines = filterLines(raw, (name) => {
    if (name === 'trailer') return chunked
    return !hop.has(name) && name !== 'idempotent-replayed' && (name !== 'content-length' || status !== 204)
  })
  // What is left of an upload that nobody reads stands between this answer and the next request.
  if (!request.complete) lines.push('Connection', 'close')
  response.writeHead(status, reasonPhrase(answer.statusText), [...lines, ...marks])
  writer.watch(response)
  if (request.method === 'HEAD' || status === 204 || status === 304) {
    // undici takes a 304 with a `Content-Length` for a truncated answer; there is no body to miss.
    body.on('error', () => {}).resume()
    response.end()
    return
  }
  // A head whose body came with it leaves with it, in one write; one that waits for its body leaves in this turn, too.
  // The connection's cork: the answer's own changes how Node ends a chunked one.
  const { socket } = response
  socket?.cork()
  sendHead(response)
  setImmediate(() => socket?.uncork())
  response.once('close', () => {
    if (!body.readableEnded) body.on('error', () => {}).destroy()
  })
  body.once('error', () => breakOff(request, response))
  body.once('end', () => {
    if (chunked) response.addTrailers(Object.entries(trailers).filter(passes).flatMap(pairsOf))
    response.end()
  })
  body.pipe(response, { end: false })
}

function passes([name]: [string, unknown]): boolean {
  return (
    !HOP_BY_HOP.has(name) && name !== 'idempotent-replayed' && name !== 'trailer' && name !== 'content-length'
  )
}

function pairsOf([name, value]: [string, string | string[]]): [string, string][] {
  return (Array.isArray(value) ? value : [value]).map((one) => [name, one])
}
