import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'

/** Where a connection is cut: once `after` bytes of the request (`up`) or the response (`down`) have been passed on. */
export interface Cut {
  readonly way: 'up' | 'down'
  readonly after: number
  /** `reset`: at once, with RST. `end`: orderly, as if the other side had hung up. `hold`: it stays open, silent. */
  readonly how: 'reset' | 'end' | 'hold'
}

export interface Cutter extends AsyncDisposable {
  readonly url: string
  readonly port: number
  /** Connections so far. */
  readonly connections: number
  /** Resolves when the n-th cut (from 1) has been made. */
  cut(n: number): Promise<void>
  /** Ends held connections, orderly. */
  hangUp(): void
  /** What was sent on the first connection, passed on or not. */
  readonly first: { readonly up: Buffer; readonly down: Buffer }
}

/** Closes a connection after what was written to it. */
export function close(socket: Socket, how: Cut['how']): void {
  if (how === 'reset') socket.resetAndDestroy()
  else if (how === 'end') socket.destroySoon()
}

/** A TCP relay that cuts the n-th connection as the n-th cut says, and passes everything on after that. */
export async function cutter(targetPort: number, cuts: readonly Cut[] = []): Promise<Cutter> {
  const first = { up: Buffer.alloc(0), down: Buffer.alloc(0) }
  const sockets = new Set<Socket>()
  const made = cuts.map(() => Promise.withResolvers<void>())
  let connections = 0

  const listener = createServer({ noDelay: true }, (client) => {
    const n = connections++
    const cut = cuts[n]
    const server = connect({ port: targetPort, host: '127.0.0.1', noDelay: true })
    const both = [client, server]
    for (const socket of both) {
      sockets.add(socket)
      socket.on('error', () => {})
      socket.on('close', () => {
        sockets.delete(socket)
        for (const other of both) other.destroySoon()
      })
    }
    let open = true
    const pass = (way: Cut['way'], to: Socket): ((bytes: Buffer) => void) => {
      let passed = 0
      return (bytes) => {
        if (n === 0) first[way] = Buffer.concat([first[way], bytes])
        if (!open) return
        if (cut?.way !== way || passed + bytes.length < cut.after) {
          passed += bytes.length
          to.write(bytes)
          return
        }
        open = false
        const rest = bytes.subarray(0, cut.after - passed)
        const end = (): void => {
          for (const socket of both) close(socket, cut.how)
          made[n]?.resolve()
        }
        if (rest.length === 0) end()
        else to.write(rest, end)
      }
    }
    client.on('data', pass('up', server))
    server.on('data', pass('down', client))
    // Before the first byte.
    if (cut?.way === 'up' && cut.after === 0) {
      open = false
      for (const socket of both) close(socket, cut.how)
      made[n]?.resolve()
    }
  })
  listener.listen(0, '127.0.0.1')
  await once(listener, 'listening')
  const { port } = listener.address() as AddressInfo
  return {
    url: `http://127.0.0.1:${port}`,
    port,
    first,
    cut: (n) => made[n - 1]?.promise ?? Promise.reject(new Error(`no cut ${n}`)),
    hangUp() {
      for (const socket of sockets) socket.destroySoon()
    },
    get connections() {
      return connections
    },
    async [Symbol.asyncDispose]() {
      for (const socket of sockets) socket.destroy()
      await new Promise((resolve) => listener.close(resolve))
    },
  }
}
