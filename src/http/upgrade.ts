import type { IncomingMessage } from 'node:http'
import { request as httpsRequest } from 'node:https'
import { Socket } from 'node:net'
import { type Duplex, pipeline } from 'node:stream'
import { filterLines, hopByHop } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import { refusal } from '../core/refusal.ts'
import type { Upstream } from '../upstream/pool.ts'
import type { Writer } from './write.ts'

const { request: httpRequest, Server } = process.getBuiltinModule('node:http')

/** Only this is tunnelled: an `Upgrade` on any other request is a hop-by-hop line, and must not carry it past the guard. */
export function isWebSocket(request: IncomingMessage): boolean {
  return request.method === 'GET' && request.headers.upgrade?.toLowerCase() === 'websocket'
}

/** A server whose tunnels end with its other connections: Node forgets a connection that was upgraded. */
export class TunnelServer extends Server {
  readonly #tunnels = new Set<Duplex>()

  keep(client: Duplex): void {
    this.#tunnels.add(client)
    client.once('close', () => this.#tunnels.delete(client))
  }

  override closeAllConnections(): void {
    super.closeAllConnections()
    for (const client of this.#tunnels) client.destroy()
  }
}

export interface TunnelOptions {
  readonly upstream: Upstream
  readonly writer: Writer
  readonly connectTimeout: Millis
  /** Until the upstream has answered the handshake. */
  readonly timeout: Millis
}

/**
 * Passes a WebSocket handshake and then the bytes of both sides, as they are: subprotocols, extensions, close codes and a
 * refused handshake reach the client unchanged (docs/adr/0004).
 */
export function tunnel(
  { upstream, writer, connectTimeout, timeout }: TunnelOptions,
  target: string,
  lines: readonly string[],
  request: IncomingMessage,
  client: Duplex,
  head: Buffer,
): void {
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
  let refused = refusal('upstream_unreachable', `no connection to the upstream within ${connectTimeout} ms`)
  let answered = false
  let timer = setTimeout(() => sent.destroy(new Error(refused.detail)), connectTimeout)
  sent.once('socket', (socket) =>
    socket.once(secure ? 'secureConnect' : 'connect', () => {
      clearTimeout(timer)
      const detail = `the upstream did not answer the handshake within ${timeout} ms`
      refused = refusal('upstream_failed', 'the upstream broke off the handshake')
      timer = setTimeout(() => {
        refused = refusal('upstream_timeout', detail)
        sent.destroy(new Error(detail))
      }, timeout)
    }),
  )
  sent.once('upgrade', (answer, server, first) => {
    clearTimeout(timer)
    answered = true
    if (client.destroyed) {
      server.on('error', () => {}).destroy()
      return
    }
    // Two pipelines, each with listeners of its own.
    client.setMaxListeners(0)
    server.setMaxListeners(0)
    client.write(headOf(answer, ownLinesOut(answer.rawHeaders)), 'latin1')
    if (first.length > 0) server.unshift(first)
    if (head.length > 0) client.unshift(head)
    server.on('error', () => client.destroy())
    pipeline(client, server, () => server.destroy())
    pipeline(server, client, () => client.destroy())
  })
  // Refused: the upstream's own answer, ended by the connection.
  sent.once('response', (answer) => {
    clearTimeout(timer)
    answered = true
    if (client.destroyed) {
      answer.on('error', () => {}).destroy()
      return
    }
    const hop = hopByHop(answer.rawHeaders)
    const kept = filterLines(ownLinesOut(answer.rawHeaders), (name) => !hop.has(name) && name !== 'trailer')
    client.write(headOf(answer, [...kept, 'Connection', 'close']), 'latin1')
    // Where only the end of the connection ends the body, a clean end would say that it is whole.
    answer.once('error', () => (client instanceof Socket ? client.resetAndDestroy() : client.destroy()))
    pipeline(answer, client, () => client.destroy())
  })
  sent.once('error', () => {
    clearTimeout(timer)
    if (!answered && client.writable) client.end(writer.problemMessage(refused))
  })
  client.once('close', () => {
    clearTimeout(timer)
    sent.destroy()
  })
  // Nobody reads before the upstream has answered: without this, a client that leaves would not be noticed.
  client.once('end', () => {
    if (!answered) client.destroy()
  })
  client.read(0)
  sent.end()
}

function ownLinesOut(lines: readonly string[]): string[] {
  return filterLines(lines, (name) => name !== 'idempotent-replayed')
}

function headOf(answer: IncomingMessage, lines: readonly string[]): string {
  let head = `HTTP/1.1 ${answer.statusCode} ${answer.statusMessage}\r\n`
  for (let i = 0; i + 1 < lines.length; i += 2) head += `${lines[i]}: ${lines[i + 1]}\r\n`
  return `${head}\r\n`
}
