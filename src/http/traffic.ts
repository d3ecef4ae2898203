import type { Server, ServerResponse } from 'node:http'
import type { Socket } from 'node:net'

export interface Traffic {
  /** Requests that wait for the end of their answer, passed ones too; WebSockets, which have no end, do not count. */
  readonly unanswered: number
  /** The answers under way say that their connections close; those that begin later say so by themselves. */
  end(): void
  cut(): void
}

const kAnswering = Symbol('answers under way')
/** Of one connection, in the order of its requests: usually one. */
interface Connection extends Socket {
  [kAnswering]?: ServerResponse[]
}

/**
 * Knows what the server itself does not tell: silent connections, tunnels, and which answers are still leaving. Kept at each
 * connection: a set of all answers, which grows and shrinks with every request, keeps V8 from letting go of them
 * (docs/performance.md).
 */
export function watchConnections(server: Server): Traffic {
  const sockets = new Set<Connection>()
  const tunnels = new WeakSet<object>()
  let unanswered = 0
  server.on('connection', (socket: Connection) => {
    sockets.add(socket)
    socket[kAnswering] = []
    socket.once('close', () => sockets.delete(socket))
  })
  server.on('upgrade', (_request, socket) => tunnels.add(socket))
  server.prependListener('request', (request, response) => {
    const answering = (request.socket as Connection)[kAnswering] as ServerResponse[]
    answering.push(response)
    unanswered++
    response.once('close', () => {
      answering.splice(answering.indexOf(response), 1)
      unanswered--
    })
  })
  // Node's own, which `close` calls too, takes a connection for idle whose answer is handed over and has not left yet.
  server.closeIdleConnections = () => {
    for (const socket of sockets)
      if (socket[kAnswering]?.length === 0 && !tunnels.has(socket)) socket.destroy()
  }
  return {
    get unanswered() {
      return unanswered
    },
    end() {
      for (const socket of sockets)
        for (const response of socket[kAnswering] ?? []) response.shouldKeepAlive = false
    },
    cut() {
      for (const socket of sockets) socket.destroy()
    },
  }
}
