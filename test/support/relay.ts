import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'

export interface Relay extends AsyncDisposable {
  readonly port: number
  /** False: bytes from the server are swallowed, the connections stay open. */
  passReplies: boolean
  /** True: bytes from the server are held until `release`, as on a connection that stalls. */
  holdReplies: boolean
  /** False: bytes to the server are held until it is true again (see `release`). */
  passCommands: boolean
  /** Sends on what was held. */
  release(): void
  /** Cuts every connection; new ones are refused while `accept` is false. */
  cut(): void
  accept: boolean
  /** Called with each piece that goes to the server, before it does. */
  onCommand: (bytes: Buffer) => void
  /** Called with each piece that comes from the server, before it is passed on. */
  onReply: (bytes: Buffer) => void
}

/** A TCP relay to put between a proxy and its store: drops replies, holds commands, cuts connections. */
export async function relay(targetPort: number): Promise<Relay> {
  const pairs = new Set<{ client: Socket; server: Socket; held: Buffer[]; late: Buffer[] }>()
  const self: Relay = {
    port: 0,
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
    const server = connect(targetPort, '127.0.0.1')
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
