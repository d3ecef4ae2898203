import { once } from 'node:events'
import { type AddressInfo, createServer, type Socket } from 'node:net'
import type { Test } from 'tap'
import { Replies } from '../../src/store/resp.ts'

export type Answer = (command: string[], socket: Socket) => string | Buffer | null

/** A server that answers what the test says, or not at all (null). */
export async function fake(t: Test, answer: Answer) {
  const sockets: Socket[] = []
  const server = createServer((socket) => {
    sockets.push(socket)
    socket.on('error', () => {})
    const commands = new Replies((command) => {
      const reply = answer((command as Buffer[]).map(String), socket)
      if (reply !== null) socket.write(reply)
    })
    socket.on('data', (bytes) => commands.push(bytes))
  }).listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.teardown(() => {
    server.close()
    for (const socket of sockets) socket.destroy()
  })
  const { port } = server.address() as AddressInfo
  return { port, url: `redis://127.0.0.1:${port}`, sockets }
}

/** Greets as Redis does, and leaves the rest to `answer`. */
export const greeting =
  (answer: Answer): Answer =>
  (command, socket) =>
    command[0] === 'ping' ? '+PONG\r\n' : command[0] === 'client' ? '+OK\r\n' : answer(command, socket)
