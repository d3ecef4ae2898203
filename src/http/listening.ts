import { once } from 'node:events'
import type { Server } from 'node:http'
import type { AddressInfo } from 'node:net'
import type { Address } from '../config/config.ts'

/**
 * Where it listens, as a URL.
 * @throws with the name of the `property` that cannot be listened on.
 */
export async function listen(server: Server, property: string, { host, port }: Address): Promise<string> {
  server.listen({ host, port })
  try {
    await once(server, 'listening')
  } catch (error) {
    throw new Error(`${property}: ${(error as Error).message}`, { cause: error })
  }
  const { address, port: chosen, family } = server.address() as AddressInfo
  return `http://${family === 'IPv6' ? `[${address}]` : address}:${chosen}`
}

/** No new connections; resolves when those that are there have ended. */
export function closeServer(server: Server): Promise<void> {
  return new Promise((resolve) => {
    if (!server.listening) return resolve()
    server.close(() => resolve())
    server.closeIdleConnections()
  })
}
