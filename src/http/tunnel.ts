import { randomInt } from 'node:crypto'
import type { IncomingMessage } from 'node:http'
import { request as httpsRequest } from 'node:https'
import { Socket } from 'node:net'
import { type Duplex, pipeline } from 'node:stream'
import type { UpstreamConfig } from '../config/config.ts'
import { filterLines, hopByHop, isNeverUpstreams } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import { refusal } from '../core/refusal.ts'
import { Shares, shareOf } from '../runtime/limits.ts'
import type { Upstream } from '../upstream/pool.ts'
import { linger, type ResponseWriter } from './write.ts'

const { request: httpRequest } = process.getBuiltinModule('node:http')

/** Only this is tunnelled: an `Upgrade` on any other request is a hop-by-hop line, and must not carry it past the guard. */
export function isWebSocket(request: IncomingMessage): boolean {
  return request.method === 'GET' && request.headers.upgrade?.toLowerCase() === 'websocket'
}

/** Ends a connection that left HTTP's hands with `message`, and gives the client time to read it. */
export function endRefused(client: Duplex, message: string | Buffer): void {
  client.write(message)
  // Bytes that nobody reads would make the end of the connection a reset.
  client.resume()
  linger(client)
}

/** TCP asks a silent peer whether it is still there, so that a tunnel does not outlive one. */
const PROBE_AFTER: Millis = 60_000

type Tunnel = (
  /** Whose share of the places it takes. */
  holder: string,
  target: string,
  lines: readonly string[],
  request: IncomingMessage,
  client: Duplex,
  head: Buffer,
) => void

/**
 * Passes WebSocket handshakes and then the bytes of both sides, as they are: subprotocols, extensions, close codes and a refused
 * handshake reach the client unchanged (docs/adr/0004). A tunnel holds a connection to the upstream for as long as both sides
 * like, so there are `connections` places for them, and no client address may have all.
 */
export function tunnels(
  upstream: Upstream,
  writer: ResponseWriter,
  limits: Pick<UpstreamConfig, 'connections' | 'connectTimeout' | 'timeout'>,
): Tunnel {
  const { connections } = limits
  const shares = new Shares(randomInt(2 ** 32))
  let open = 0
  return (holder, target, lines, request, client, head) => {
    const slot = shares.slotOf(holder)
    if (open >= connections || shares.held(slot) >= shareOf(connections)) {
      const detail = `of ${connections} WebSockets at one time (upstream.connections), none is free for this client`
      endRefused(client, writer.problemMessage(refusal('overloaded', detail, { retryAfter: 1 })))
      return
    }
    open++
    shares.add(slot, 1)
    client.once('close', () => {
      open--
      shares.add(slot, -1)
    })
    tunnel(upstream, writer, limits, target, lines, request, client, head)
  }
}

function tunnel(
  upstream: Upstream,
  writer: ResponseWriter,
  { connectTimeout, timeout }: Pick<UpstreamConfig, 'connectTimeout' | 'timeout'>,
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
    // A `Trailer` line announces trailers of a body; a handshake has none, and Node's client would throw.
    headers: [
      ...filterLines(lines, (name) => name !== 'trailer'),
      'Connection',
      'Upgrade',
      'Upgrade',
      request.headers.upgrade as string,
    ],
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
    for (const side of [client, server]) if (side instanceof Socket) side.setKeepAlive(true, PROBE_AFTER)
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
    if (!answered && client.writable) endRefused(client, writer.problemMessage(refused))
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
  return filterLines(lines, (name) => !isNeverUpstreams(name))
}

function headOf(answer: IncomingMessage, lines: readonly string[]): string {
  let head = `HTTP/1.1 ${answer.statusCode} ${answer.statusMessage}\r\n`
  for (let i = 0; i + 1 < lines.length; i += 2) head += `${lines[i]}: ${lines[i + 1]}\r\n`
  return `${head}\r\n`
}
