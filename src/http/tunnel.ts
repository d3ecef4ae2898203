import { randomInt } from 'node:crypto'
import type { ClientRequest, IncomingMessage } from 'node:http'
import { Socket } from 'node:net'
import { type Duplex, pipeline } from 'node:stream'
import type { UpstreamConfig } from '../config/config.ts'
import { filterLines, hopByHop, isNeverUpstreams } from '../core/headers.ts'
import type { Millis } from '../core/record.ts'
import { refusal } from '../core/refusal.ts'
import { Shares, shareOf } from '../runtime/limits.ts'
import type { Upstream } from '../upstream/pool.ts'
import { resetConnection } from './connections.ts'
import { linger, pairs, type ResponseWriter } from './write.ts'

/** Only these are tunnelled: on other requests `Upgrade` is a hop-by-hop line, and must not bypass the guard. */
export function isWebSocket(request: IncomingMessage): boolean {
  return request.method === 'GET' && request.headers.upgrade?.toLowerCase() === 'websocket'
}

/** Ends a raw connection with `message`, giving the client time to read it. */
export function endRefused(client: Duplex, message: string | Buffer): void {
  client.write(message)
  // Unread bytes would turn the end of the connection into a reset.
  client.resume()
  linger(client)
}

/** TCP keep-alive, so that a tunnel does not outlive a silent peer. */
const PROBE_AFTER: Millis = 60_000

/** An upgrade request and its connection. */
export interface Handshake {
  readonly request: IncomingMessage
  readonly target: string
  readonly lines: readonly string[]
  readonly socket: Duplex
  /** Bytes that followed it. */
  readonly head: Buffer
}

type TunnelLimits = Pick<UpstreamConfig, 'connections' | 'connectTimeout' | 'timeout'>

/**
 * Tunnels WebSockets. Each holds an upstream connection for an unlimited time, so there are at most `connections`, and no `holder` (a
 * client address) may have all of them.
 */
export function tunnels(
  upstream: Upstream,
  writer: ResponseWriter,
  limitsNow: () => TunnelLimits,
): (holder: string, handshake: Handshake) => void {
  const shares = new Shares(randomInt(2 ** 32))
  let open = 0
  return (holder, handshake) => {
    const { socket } = handshake
    const limits = limitsNow()
    const { connections } = limits
    const slot = shares.slotOf(holder)
    if (open >= connections || shares.held(slot) >= shareOf(connections)) {
      const detail = `all ${connections} WebSockets (upstream.connections), or this client's share of them, are in use`
      endRefused(socket, writer.problemMessage(refusal('overloaded', detail, { retryAfter: 1 })))
      return
    }
    open++
    shares.add(slot, 1)
    socket.once('close', () => {
      open--
      shares.add(slot, -1)
    })
    tunnel(upstream, writer, limits, handshake)
  }
}

/**
 * Forwards a handshake and then the bytes of both sides unchanged: subprotocols, extensions, close codes and a refused handshake reach the
 * client (docs/adr/0038).
 */
function tunnel(
  upstream: Upstream,
  writer: ResponseWriter,
  { connectTimeout, timeout }: TunnelLimits,
  { request, target, lines, socket: client, head }: Handshake,
): void {
  const isSecure = upstream.origin.protocol === 'https:'
  const sent = handshakeTo(upstream, { request, target, lines })
  let refused = refusal('upstream_unreachable', `no connection to the upstream within ${connectTimeout} ms`)
  let answered = false
  let timer = setTimeout(() => sent.destroy(new Error(refused.detail)), connectTimeout)
  sent.once('socket', (socket) =>
    socket.once(isSecure ? 'secureConnect' : 'connect', () => {
      clearTimeout(timer)
      const detail = `the upstream did not answer the handshake within ${timeout} ms`
      refused = refusal('upstream_failed', 'the upstream broke off the handshake')
      timer = setTimeout(() => {
        refused = refusal('upstream_timeout', detail)
        sent.destroy(new Error(detail))
      }, timeout)
    }),
  )
  /** False: the client has left. */
  const begin = (answer: Duplex | IncomingMessage): boolean => {
    clearTimeout(timer)
    answered = true
    if (client.destroyed) answer.on('error', () => {}).destroy()
    return !client.destroyed
  }
  sent.once('upgrade', (answer, server, first) => {
    if (!begin(server)) return
    for (const side of [client, server]) {
      // Two pipelines, each with its own listeners.
      side.setMaxListeners(0)
      if (side instanceof Socket) side.setKeepAlive(true, PROBE_AFTER)
    }
    client.write(headOf(answer, answer.rawHeaders), 'latin1')
    if (first.length > 0) server.unshift(first)
    if (head.length > 0) client.unshift(head)
    server.on('error', () => client.destroy())
    pipeline(client, server, () => server.destroy())
    pipeline(server, client, () => client.destroy())
  })
  // Refused: the upstream's own answer, ended by the connection.
  sent.once('response', (answer) => {
    if (!begin(answer)) return
    const hop = hopByHop(answer.rawHeaders)
    const kept = filterLines(answer.rawHeaders, (name) => !hop.has(name) && name !== 'trailer')
    client.write(headOf(answer, [...kept, 'Connection', 'close']), 'latin1')
    // A clean end would make a truncated body look complete.
    answer.once('error', () => (client instanceof Socket ? resetConnection(client) : client.destroy()))
    pipeline(answer, client, () => client.destroy())
  })
  sent.once('error', ({ message, code = '' }: NodeJS.ErrnoException) => {
    clearTimeout(timer)
    // Node's parser refused it.
    if (code.startsWith('HPE_'))
      refused = refusal(
        'upstream_failed',
        `the answer to the handshake cannot be relayed: ${message} (${code})`,
      )
    if (!answered && client.writable) endRefused(client, writer.problemMessage(refused))
  })
  client.once('close', () => {
    clearTimeout(timer)
    sent.destroy()
  })
  // Nothing else reads before the upstream answers, so the client's departure would go unnoticed.
  client.once('end', () => {
    if (!answered) client.destroy()
  })
  client.read(0)
  sent.end()
}

function handshakeTo(
  upstream: Upstream,
  { request, target, lines }: Pick<Handshake, 'request' | 'target' | 'lines'>,
): ClientRequest {
  const { origin, address, tls } = upstream
  // Loaded on demand: `node:https` and `node:tls` add 10 ms to the start.
  const { request: open } = process.getBuiltinModule(
    origin.protocol === 'https:' ? 'node:https' : 'node:http',
  )
  return open({
    method: 'GET',
    path: target,
    headers: [
      // A `Trailer` line announces trailers of a body; a handshake has none, and Node's client would throw.
      ...filterLines(lines, (name) => name !== 'trailer'),
      'Connection',
      'Upgrade',
      'Upgrade',
      request.headers.upgrade as string,
    ],
    agent: false,
    maxHeaderSize: upstream.mostHead(),
    ...address,
    ...tls,
  })
}

function headOf({ statusCode, statusMessage }: IncomingMessage, lines: readonly string[]): string {
  const sent = pairs(filterLines(lines, (name) => !isNeverUpstreams(name)))
  return `HTTP/1.1 ${statusCode} ${statusMessage}\r\n${sent.map(([name, value]) => `${name}: ${value}\r\n`).join('')}\r\n`
}
