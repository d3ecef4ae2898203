import type { Server, Socket } from 'node:net'
import { setImmediate as immediately } from 'node:timers/promises'

const { connect } = process.getBuiltinModule('node:net')

/** After as many turns of the event loop, a busy listener closes anyway. */
const MAX_TURNS = 100
/** Where to reach a listener on all addresses. */
const LOOPBACK: Readonly<Record<string, string>> = { '0.0.0.0': '127.0.0.1', '::': '::1' }

/** What no public method of sockets and servers offers; each returns an error code, 0 for success. */
interface Handle {
  listen(backlog: number): number
  getpeername(out: object): number
}

/**
 * Closes a listener without losing a connection. The kernel resets those that it has completed and this process has not accepted, so it closes
 * while a connection of its own fills the queue: the kernel ignores clients that connect then, and refuses them when they try again.
 */
export async function closeListener(listener: Server, close: () => unknown): Promise<void> {
  for (let turn = 0; turn < MAX_TURNS && !(await isPlugged(listener)); turn++) await immediately()
  close()
}

/** Shortens the queue to one place, and takes it. False: a client has it. */
async function isPlugged(listener: Server): Promise<boolean> {
  const at = listener.address()
  if (at === null || typeof at === 'string') return true
  handleOf(listener)?.listen(0)
  const host = LOOPBACK[at.address] ?? at.address
  const plug = connect({ port: at.port, host }).on('error', () => {})
  // It connects in this tick, before the event loop accepts it; within a machine that is done at once.
  await new Promise<void>((resolve) => process.nextTick(resolve))
  if (handleOf(plug)?.getpeername({}) === 0) return true
  plug.destroy()
  return false
}

function handleOf(owner: Server | Socket): Handle | null {
  return (owner as unknown as { readonly _handle: Handle | null })._handle
}
