import { once } from 'node:events'
import {
  createServer as createHttp,
  type IncomingMessage,
  type RequestListener,
  type Server,
  type ServerResponse,
} from 'node:http'
import { type AddressInfo, createServer as createTcp, type Socket } from 'node:net'
import { linesOf, type RawHeaders } from '../../src/core/headers.ts'

/** The value of the only line of this name (lower case). Throws if there is none, or another. */
export function valueOf({ headers }: { readonly headers: RawHeaders }, name: string): string {
  const [value, ...more] = linesOf(headers, name)
  if (value === undefined || more.length > 0) throw new Error(`not one ${name} in ${headers.join(' | ')}`)
  return value
}

/** One request as the upstream received it. */
export interface Seen {
  readonly method: string
  readonly target: string
  readonly headers: readonly string[]
  readonly body: Buffer
}

export interface UpstreamStub extends AsyncDisposable {
  readonly url: string
  readonly port: number
  /** Every request whose body arrived whole. N in the conformance cases is `seen.length`. */
  readonly seen: Seen[]
  /** Resolves when the n-th request (from 1) has been seen. */
  arrived(n: number): Promise<Seen>
  readonly server: Server
}

export type Respond = (seen: Seen, response: ServerResponse, request: IncomingMessage) => void | Promise<void>

/** A real HTTP server that counts executions. */
export async function upstreamStub(respond: Respond, port = 0): Promise<UpstreamStub> {
  const seen: Seen[] = []
  const waiting: { n: number; resolve: (seen: Seen) => void }[] = []
  const listener: RequestListener = (request, response) => {
    const chunks: Buffer[] = []
    request.on('error', () => {})
    request.on('data', (chunk: Buffer) => chunks.push(chunk))
    request.on('end', () => {
      const one: Seen = {
        method: request.method as string,
        target: request.url as string,
        headers: request.rawHeaders,
        body: Buffer.concat(chunks),
      }
      seen.push(one)
      for (const { n, resolve } of waiting) if (seen.length >= n) resolve(seen[n - 1] as Seen)
      void respond(one, response, request)
    })
  }
  const server = createHttp({ keepAliveTimeout: 60_000 }, listener)
  server.listen(port, '127.0.0.1')
  await once(server, 'listening')
  const address = server.address() as AddressInfo
  return {
    url: `http://127.0.0.1:${address.port}`,
    port: address.port,
    seen,
    server,
    arrived: (n) =>
      new Promise((resolve) => {
        const already = seen[n - 1]
        if (already !== undefined) resolve(already)
        else waiting.push({ n, resolve })
      }),
    async [Symbol.asyncDispose]() {
      server.closeAllConnections()
      await new Promise((resolve) => server.close(resolve))
    },
  }
}

export interface TcpStub extends AsyncDisposable {
  readonly url: string
  readonly port: number
  /** Connections so far. */
  readonly sockets: Socket[]
}

/** A raw TCP peer, for faults that no HTTP server produces. */
export async function tcpStub(onSocket: (socket: Socket, n: number) => void): Promise<TcpStub> {
  const sockets: Socket[] = []
  const server = createTcp((socket) => {
    sockets.push(socket)
    socket.on('error', () => {})
    onSocket(socket, sockets.length)
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  return {
    url: `http://127.0.0.1:${port}`,
    port,
    sockets,
    async [Symbol.asyncDispose]() {
      for (const socket of sockets) socket.destroy()
      await new Promise((resolve) => server.close(resolve))
    },
  }
}

/** Resolves once a whole request (head and `Content-Length` body) has been read from the socket. */
export function wholeRequest(socket: Socket): Promise<string> {
  return new Promise((resolve) => {
    let text = ''
    const onData = (chunk: Buffer): void => {
      text += chunk.toString('latin1')
      const end = text.indexOf('\r\n\r\n')
      if (end < 0) return
      const length = Number(/\r\ncontent-length: (\d+)/i.exec(text)?.[1] ?? 0)
      if (text.length < end + 4 + length) return
      socket.off('data', onData)
      resolve(text)
    }
    socket.on('data', onData)
  })
}
