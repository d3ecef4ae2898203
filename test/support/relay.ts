import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'

export interface Relay extends AsyncDisposable {
  readonly port: number
  /** Port of the server: new connections go there. */
  target: number
  /** False: bytes from the server are dropped; connections stay open. */
  passReplies: boolean
  /** True: bytes from the server are held until `release`, as on a connection that stalls. */
  holdReplies: boolean
  /** False: bytes to the server are held until it is true again (see `release`). */
  passCommands: boolean
  /** Sends the bytes that were held. */
  release(): void
  /** Cuts every connection; new ones are refused while `accept` is false. */
  cut(): void
  accept: boolean
  /** Sends bytes as if from the server, on the connection that was opened last. */
  inject(bytes: string): void
  /** Called with each chunk before it goes to the server. */
  onCommand: (bytes: Buffer) => void
  /** Called with each chunk from the server before it is passed on. */
  onReply: (bytes: Buffer) => void
}

/** A TCP relay between a proxy and its store that drops replies, holds commands and cuts connections. */
export async function relay(targetPort: number): Promise<Relay> {
  const pairs = new Set<{ client: Socket; server: Socket; held: Buffer[]; late: Buffer[] }>()
  const self: Relay = {
    port: 0,
    target: targetPort,
    passReplies: true,
    holdReplies: false,
    passCommands: true,
    accept: true,
    onCommand: () => {},
    onReply: () => {},
    release() {
      self.passCommands = true
      self.holdReplies = false
      for (const { client, server, held, late } of pairs) {
        for (const bytes of held.splice(0)) server.write(bytes)
        for (const bytes of late.splice(0)) client.write(bytes)
      }
    },
    inject(bytes) {
      ;[...pairs].at(-1)?.client.write(bytes)
    },
    cut() {
      for (const { client, server } of pairs) {
        client.destroy()
        server.destroy()
      }
    },
    async [Symbol.asyncDispose]() {
      self.cut()
      await new Promise((resolve) => listener.close(resolve))
    },
  }
  const listener = createServer((client) => {
    if (!self.accept) {
      client.destroy()
      return
    }
    const server = connect(self.target, '127.0.0.1')
    const pair = { client, server, held: [] as Buffer[], late: [] as Buffer[] }
    pairs.add(pair)
    client.on('data', (bytes: Buffer) => {
      self.onCommand(bytes)
      if (self.passCommands) server.write(bytes)
      else pair.held.push(bytes)
    })
    server.on('data', (bytes: Buffer) => {
      self.onReply(bytes)
      if (self.holdReplies) pair.late.push(bytes)
      else if (self.passReplies) client.write(bytes)
    })
    const end = (): void => {
      pairs.delete(pair)
      client.destroy()
      server.destroy()
    }
    for (const socket of [client, server]) socket.on('close', end).on('error', end)
  })
  listener.listen(0, '127.0.0.1')
  await once(listener, 'listening')
  return Object.assign(self, { port: (listener.address() as AddressInfo).port })
}
