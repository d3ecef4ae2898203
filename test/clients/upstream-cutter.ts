import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
import { type Cut, close } from './cutter.ts'

export interface UpstreamCutter extends AsyncDisposable {
  readonly url: string
  /** The cut for the first request with this key; a request without one passes. */
  readonly plan: Map<string, Cut>
  /** The last exchange that passed in full. */
  readonly last: { up: Buffer; down: Buffer }
}

/**
 * A TCP relay between the proxy and its upstream. The proxy keeps its connections, so the cut is chosen by the key in the
 * request: each is read in full, then as much of it is passed on as the cut allows.
 */
export async function upstreamCutter(targetPort: number): Promise<UpstreamCutter> {
  const plan = new Map<string, Cut>()
  const last = { up: Buffer.alloc(0), down: Buffer.alloc(0) }
  const sockets = new Set<Socket>()

  const listener = createServer({ noDelay: true }, (proxy) => {
    const server = connect({ port: targetPort, host: '127.0.0.1', noDelay: true })
    const both = [proxy, server]
    for (const socket of both) {
      sockets.add(socket)
      socket.on('error', () => {})
      socket.on('close', () => {
        sockets.delete(socket)
        for (const other of both) other.destroySoon()
      })
    }
    let request = Buffer.alloc(0)
    let answer = Buffer.alloc(0)
    let cut: Cut | undefined
    const passUntilCut = (to: Socket, bytes: Buffer, passed: number, { after, how }: Cut): void => {
      const end = (): void => {
        for (const socket of both) close(socket, how)
      }
      if (passed + bytes.length < after) to.write(bytes)
      else if (after === passed) end()
      else to.write(bytes.subarray(0, after - passed), end)
    }
    proxy.on('data', (bytes: Buffer) => {
      request = Buffer.concat([request, bytes])
      const end = wholeLength(request)
      if (end === null) return
      const key = /\r\nidempotency-key: *(\S+)\r\n/i.exec(request.toString('latin1'))?.[1] ?? ''
      cut = plan.get(key)
      plan.delete(key)
      last.up = request
      request = Buffer.alloc(0)
      answer = Buffer.alloc(0)
      if (cut?.way === 'up') passUntilCut(server, last.up, 0, cut)
      else server.write(last.up)
    })
    server.on('data', (bytes: Buffer) => {
      if (cut?.way === 'up') return
      const passed = answer.length
      answer = Buffer.concat([answer, bytes])
      if (cut !== undefined) passUntilCut(proxy, bytes, passed, cut)
      else proxy.write(bytes)
      if (wholeLength(answer) !== null) last.down = answer
    })
  })
  listener.listen(0, '127.0.0.1')
  await once(listener, 'listening')
  return {
    url: `http://127.0.0.1:${(listener.address() as AddressInfo).port}`,
    plan,
    last,
    async [Symbol.asyncDispose]() {
      for (const socket of sockets) socket.destroy()
      await new Promise((resolve) => listener.close(resolve))
    },
  }
}

/** The length of a message with a `Content-Length`, null while it is incomplete. */
function wholeLength(bytes: Buffer): number | null {
  const head = bytes.indexOf('\r\n\r\n')
  if (head < 0) return null
  const length = Number(/\r\ncontent-length: *(\d+)/i.exec(bytes.toString('latin1', 0, head))?.[1] ?? 0)
  return bytes.length < head + 4 + length ? null : head + 4 + length
}
