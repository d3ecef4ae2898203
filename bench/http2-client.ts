import { once } from 'node:events'
import {
  type ClientHttp2Session,
  connect,
  type IncomingHttpHeaders,
  type OutgoingHttpHeaders,
} from 'node:http2'
import { framed } from '../test/support/grpc.ts'
import type { Exchanges } from './load.ts'

/** Streams per connection. */
const STREAMS = 8

/** Sends requests given in HTTP/1.1 over HTTP/2 (RFC 9113) with prior knowledge, or as unary calls of gRPC. */
export class Http2Client implements Exchanges {
  readonly #session: ClientHttp2Session
  readonly #isGrpc: boolean
  last = ''

  private constructor(session: ClientHttp2Session, isGrpc: boolean) {
    this.#session = session
    this.#isGrpc = isGrpc
  }

  static async openAll(port: number, count: number, isGrpc: boolean): Promise<Http2Client[]> {
    const sessions = Array.from({ length: Math.ceil(count / STREAMS) }, () =>
      connect(`http://127.0.0.1:${port}`),
    )
    await Promise.all(sessions.map((session) => once(session, 'connect')))
    return Array.from(
      { length: count },
      (_, n) => new Http2Client(sessions[n % sessions.length] as ClientHttp2Session, isGrpc),
    )
  }

  exchange(request: Buffer): Promise<number> {
    const { headers, body } = converted(request, this.#isGrpc)
    return new Promise((resolve, reject) => {
      const stream = this.#session.request(headers)
      let status = 0
      stream.on('response', (answer) => {
        this.last = JSON.stringify(answer)
        status = answer[':status'] as number
      })
      stream.on('trailers', (trailers: IncomingHttpHeaders) => {
        this.last += JSON.stringify(trailers)
        if (this.#isGrpc && trailers['grpc-status'] === '0') status = 201
      })
      stream.on('error', reject).on('end', () => resolve(status))
      stream.resume().end(body)
    })
  }

  close(): void {
    this.#session.destroy()
  }
}

function converted(request: Buffer, isGrpc: boolean): { headers: OutgoingHttpHeaders; body: Buffer } {
  const end = request.indexOf('\r\n\r\n')
  const [line = '', ...lines] = request.toString('latin1', 0, end).split('\r\n')
  const [method, path] = line.split(' ')
  const headers: OutgoingHttpHeaders = { ':method': method, ':path': path }
  for (const one of lines) {
    const colon = one.indexOf(': ')
    const name = one.slice(0, colon).toLowerCase()
    if (name === 'host') headers[':authority'] = one.slice(colon + 2)
    else headers[name] = one.slice(colon + 2)
  }
  const body = request.subarray(end + 4)
  if (!isGrpc) return { headers, body }
  delete headers['content-length']
  return {
    headers: {
      ...headers,
      ':path': '/bench.Payments/Create',
      'content-type': 'application/grpc',
      te: 'trailers',
    },
    body: framed(body),
  }
}
