import type { Server, ServerResponse } from 'node:http'
import type { Socket } from 'node:net'

export interface Traffic {
  /** Requests that wait for the end of their answer, passed ones too; WebSockets, which have no end, do not count. */
  readonly unanswered: number
  /** The answers under way say that their connections close; those that begin later say so by themselves. */
  end(): void
  cut(): void
}

/** Knows what the server itself does not tell: silent connections, tunnels, and which answers are still leaving. */
export function watchConnections(server: Server): Traffic {
  const sockets = new Set<Socket>()
  const tunnels = new WeakSet<object>()
  const unanswered = new Map<ServerResponse, Socket>()
  server.on('connection', (socket: Socket) => {
    sockets.add(socket)
    socket.once('close', () => sockets.delete(socket))
  })
  server.on('upgrade', (_request, socket) => tunnels.add(socket))
  server.prependListener('request', (request, response) => {
    unanswered.set(response, request.socket)
    response.once('close', () => unanswered.delete(response))
  })
  // Node's own, which `close` calls too, takes a connection for idle whose answer is handed over and has not left yet.
  server.closeIdleConnections = () => {
    const busy = new Set(unanswered.values())
    for (const socket of sockets) if (!busy.has(socket) && !tunnels.has(socket)) socket.destroy()
  }
  return {
    get unanswered() {
      return unanswered.size
    },
    end() {
      for (const response of unanswered.keys()) response.shouldKeepAlive = false
    },
    cut() {
      for (const socket of sockets) socket.destroy()
    },
  }
}
