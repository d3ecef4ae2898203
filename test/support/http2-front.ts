import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http'
import { type ClientHttp2Session, type ClientHttp2Stream, connect, constants } from 'node:http2'
import type { Socket } from 'node:net'
import { resetConnection } from '../../src/http/connections.ts'

/** What HTTP/2 has no lines for (RFC 9113 §8.2.2). */
const OF_HTTP1 = [
  'connection',
  'host',
  'keep-alive',
  'proxy-connection',
  'te',
  'transfer-encoding',
  'upgrade',
]

/** Asks the proxy at this port over HTTP/2: one connection for each of a client, one stream for each request. */
export function http2Front(port: number): Server {
  const sessions = new WeakMap<Socket, ClientHttp2Session>()
  const answer = (request: IncomingMessage, response: ServerResponse): void => {
    const session = sessions.get(request.socket) as ClientHttp2Session
    passAnswer(session, ask(session, request), request, response)
  }
  const server = createServer({ keepAlive: true, maxHeaderSize: 1024 ** 2, noDelay: true }, answer)
  server.maxHeadersCount = 0
  server.on('checkContinue', answer).on('checkExpectation', answer)
  return server.on('connection', (client: Socket) => {
    const session = connect(`http://127.0.0.1:${port}`)
    sessions.set(client, session)
    session.on('error', () => {}).once('close', () => client.destroySoon())
    client.on('error', () => {}).once('close', () => session.close())
  })
}

function ask(session: ClientHttp2Session, request: IncomingMessage): ClientHttp2Stream {
  const { method = '', url = '', headers, rawHeaders } = request
  const lines = [':method', method, ':path', url, ':scheme', 'http', ':authority', headers.host ?? '']
  for (const [name, value] of pairs(rawHeaders))
    if (!OF_HTTP1.includes(name.toLowerCase())) lines.push(name.toLowerCase(), value)
  const hasBody = headers['transfer-encoding'] !== undefined || Number(headers['content-length'] ?? 0) > 0
  const stream = session.request(lines, { endStream: !hasBody, waitForTrailers: hasBody })
  stream.on('wantTrailers', () => stream.sendTrailers(request.trailers))
  return hasBody ? request.pipe(stream) : stream
}

/** What the proxy does to the stream, the client sees on its connection. */
function passAnswer(
  session: ClientHttp2Session,
  stream: ClientHttp2Stream,
  request: IncomingMessage,
  response: ServerResponse,
): void {
  response.sendDate = false
  stream.on('continue', () => response.writeContinue())
  stream.on('response', (_headers, _flags, [, status, ...lines]) => {
    if (session.closed || !request.complete) lines.push('Connection', 'close')
    response.writeHead(Number(status), lines)
    // The head comes before any body.
    response.write(Buffer.alloc(0))
  })
  stream.on('trailers', (_trailers, _flags, lines) => response.addTrailers(pairs(lines)))
  stream.on('data', (chunk: Buffer) => {
    if (response.write(chunk)) return
    stream.pause()
    response.once('drain', () => stream.resume())
  })
  stream.on('error', () => {})
  stream.once('close', () => {
    if (stream.rstCode === constants.NGHTTP2_NO_ERROR && response.headersSent) response.end()
    else resetConnection(request.socket)
  })
  response.once('close', () => {
    if (!response.writableFinished) stream.close(constants.NGHTTP2_CANCEL)
  })
}

function pairs(lines: readonly string[]): [string, string][] {
  return lines.flatMap((name, i) => (i % 2 === 0 ? [[name, lines[i + 1] ?? ''] as [string, string]] : []))
}
