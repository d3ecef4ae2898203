import type { Duplex } from 'node:stream'
import { type Refusal, refusal } from '../core/refusal.ts'
import { answersOn } from './connections.ts'
import { malformed } from './head.ts'
import { endRefused } from './upgrade.ts'
import type { ResponseWriter } from './write.ts'

/**
 * Answers what Node's parser refuses, and heads that do not arrive in time, as every other refusal is answered, and ends the
 * connection: nobody knows where the next request would begin. Behind a request that still waits for its answer nothing is
 * said, since the client would take it for that answer.
 */
export function clientErrorHandler(
  writer: ResponseWriter,
): (error: NodeJS.ErrnoException, socket: Duplex) => void {
  return (error, socket) => {
    const refused = refusalOf(error)
    if (refused === null || socket.destroyed) {
      socket.destroy()
      return
    }
    // The parser says it again of whatever still comes.
    if (socket.writableEnded) return
    const answers = answersOn(socket)
    const [first] = answers
    if (first === undefined) {
      endRefused(socket, writer.problemMessage(refused))
      return
    }
    if (answers.length === 1 && !first.req.complete && !first.headersSent) {
      socket.end(writer.problemMessage(refused))
      socket.destroy()
      return
    }
    // Those before it are answered; what ends the connection is the last of them.
    const last = answers.at(-1)
    if (last !== undefined) last.shouldKeepAlive = false
    if (answers.some(({ req }) => !req.complete)) socket.destroy()
  }
}

/** Null: the connection itself broke. */
function refusalOf({ code = '' }: NodeJS.ErrnoException): Refusal | null {
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
