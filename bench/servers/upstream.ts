/**
 * The API behind every candidate: minimal HTTP, so that it is never the bottleneck. Answers POST with 201 and everything else
 * with 200: 64 KiB of JSON for paths with "large" in them, 300 bytes for others. `/v1/hold` is answered only on
 * `/control/release`; `/control/count` reports the number of requests so far. Over HTTP/2, all are calls of gRPC.
 */
import { createServer as createHttp2Server } from 'node:http2'
import { createServer, type Socket } from 'node:net'
import { beginsHttp2 } from '../../src/http/http2.ts'
import { framed } from '../../test/support/grpc.ts'
import { LARGE, SMALL } from '../bodies.ts'

const PATIENCE = 60_000

const held = new Set<Socket>()
let count = 0

function answer(status: string, body: string): Buffer {
  const lines = [
    `HTTP/1.1 ${status}`,
    'Content-Type: application/json',
    'Date: Sat, 21 Nov 2026 12:00:00 GMT',
    'X-Request-Id: 5d1c0f2e-6a7b-4c1d-9e3f-2b8a4d6c7e10',
    `Content-Length: ${Buffer.byteLength(body)}`,
  ]
  return Buffer.from(`${lines.join('\r\n')}\r\n\r\n${body}`)
}

const ANSWERS = {
  created: { small: answer('201 Created', SMALL), large: answer('201 Created', LARGE) },
  found: { small: answer('200 OK', SMALL), large: answer('200 OK', LARGE) },
}

function respond(socket: Socket, line: string): void {
  const [method, path = ''] = line.split(' ', 2)
  if (path === '/control/count') return void socket.write(answer('200 OK', String(count)))
  if (path === '/control/release') {
    for (const waiting of held) waiting.write(ANSWERS.created.small)
    held.clear()
    return void socket.write(answer('200 OK', 'released'))
  }
  if (path === '/control/held') return void socket.write(answer('200 OK', String(held.size)))
  count++
  if (path.startsWith('/v1/hold')) return void held.add(socket)
  const kind = method === 'POST' ? 'created' : 'found'
  socket.write(ANSWERS[kind][path.includes('large') ? 'large' : 'small'])
}

const MESSAGE = framed(SMALL)
const grpc = createHttp2Server().on('stream', (stream) => {
  stream.on('error', () => {})
  stream.resume().on('end', () => {
    count++
    stream.respond({ 'content-type': 'application/grpc' }, { waitForTrailers: true })
    stream.on('wantTrailers', () => stream.sendTrailers({ 'grpc-status': '0' })).end(MESSAGE)
  })
})

function serveHttp1(socket: Socket): void {
  let head = ''
  let line = ''
  /** Missing bytes of the body; -1: the head is incomplete. */
  let missing = -1
  socket.on('error', () => {})
  socket.on('close', () => held.delete(socket))
  socket.on('data', (chunk) => {
    let body = chunk.length
    if (missing < 0) {
      head += chunk.toString('latin1')
      const end = head.indexOf('\r\n\r\n')
      if (end < 0) return
      body = head.length - end - 4
      line = head.slice(0, head.indexOf('\r\n'))
      const chunked = /\ntransfer-encoding: *chunked/i.test(head.slice(0, end))
      missing = chunked ? 0 : Number(/\ncontent-length: *(\d+)/i.exec(head.slice(0, end))?.[1] ?? 0)
      if (chunked && !head.endsWith('0\r\n\r\n')) {
        missing = -1
        return
      }
      if (chunked) body = 0
    }
    missing -= body
    if (missing > 0) return
    head = ''
    missing = -1
    respond(socket, line)
  })
}

createServer({ noDelay: true }, (socket) => {
  void beginsHttp2(socket, PATIENCE).then((isHttp2) =>
    isHttp2 ? grpc.emit('connection', socket) : serveHttp1(socket),
  )
}).listen(Number(process.argv[2]), '127.0.0.1')
