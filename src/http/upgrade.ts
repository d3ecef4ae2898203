import { request as httpRequest, type IncomingMessage } from 'node:http'
import { request as httpsRequest } from 'node:https'
import { type Duplex, pipeline } from 'node:stream'
import { filterLines } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import type { Upstream } from '../upstream/pool.ts'

/** Only this is tunnelled: an `Upgrade` on any other request is a hop-by-hop line, and must not carry it past the guard. */
export function isWebSocket(request: IncomingMessage): boolean {
  return request.method === 'GET' && request.headers.upgrade?.toLowerCase() === 'websocket'
}

/**
 * Passes a WebSocket handshake and then the bytes of both sides, as they are: subprotocols, extensions, close codes and a
 * refused handshake reach the client unchanged (docs/adr/0004).
 */
export function tunnel(
  upstream: Upstream,
  connectTimeout: Millis,
  target: string,
  lines: readonly string[],
  request: IncomingMessage,
  client: Duplex,
  head: Buffer,
): void {
  client.on('error', () => client.destroy())
  const secure = upstream.origin.protocol === 'https:'
  const sent = (secure ? httpsRequest : httpRequest)({
    method: 'GET',
    path: target,
    headers: [...lines, 'Connection', 'Upgrade', 'Upgrade', request.headers.upgrade as string],
    agent: false,
    ...(upstream.socketPath === null
      ? { host: upstream.origin.hostname, port: upstream.origin.port || (secure ? 443 : 80) }
      : { socketPath: upstream.socketPath }),
    ...upstream.tls,
  })
  const timer = setTimeout(() => sent.destroy(new Error('connect timeout')), connectTimeout)
  sent.once('socket', (socket) =>
    socket.once(secure ? 'secureConnect' : 'connect', () => clearTimeout(timer)),
  )
  sent.once('upgrade', (answer, server, first) => {
    client.write(headOf(answer, answer.rawHeaders))
    if (first.length > 0) server.unshift(first)
    if (head.length > 0) client.unshift(head)
    server.on('error', () => client.destroy())
    pipeline(client, server, () => server.destroy())
    pipeline(server, client, () => client.destroy())
  })
  // Refused: the upstream's own answer, ended by the connection.
  sent.once('response', (answer) => {
    const framing = (name: string): boolean =>
      !['connection', 'transfer-encoding', 'keep-alive'].includes(name)
    client.write(headOf(answer, [...filterLines(answer.rawHeaders, framing), 'Connection', 'close']))
    pipeline(answer, client, () => client.destroy())
  })
  sent.once('error', () => {
    clearTimeout(timer)
    if (client.writable && !client.destroyed)
      client.end('HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\nContent-Length: 0\r\n\r\n')
  })
  client.once('close', () => sent.destroy())
  sent.end()
}

function headOf(answer: IncomingMessage, lines: readonly string[]): string {
  let head = `HTTP/1.1 ${answer.statusCode} ${answer.statusMessage}\r\n`
  for (let i = 0; i + 1 < lines.length; i += 2) head += `${lines[i]}: ${lines[i + 1]}\r\n`
  return `${head}\r\n`
}
