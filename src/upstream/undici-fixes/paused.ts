import type { Socket } from 'node:net'

/*
 * undici's parser must not hear how its connection ends while it is paused, which it is whenever a client reads more slowly
 * than the upstream writes: where the answer says `Connection: close`, an assertion of it ends the process; elsewhere it
 * takes an answer for broken off that is there as a whole. Node tells of the end as soon as nothing is left to read, and what
 * the parser was given when it paused has been read by then.
 */

/** Stands for the rest of what was read, where there is none. */
const NOTHING = Buffer.alloc(1)

/** Tells of the end of what is read of `socket` when it has been taken, and of a reset always as of an error. */
export function untilTaken<S extends Socket>(socket: S): S {
  let placeholder = false
  const read = socket.read.bind(socket)
  const unshift = socket.unshift.bind(socket)
  const destroy = socket.destroy.bind(socket)
  // By this undici gives back what it has not parsed, when it pauses.
  socket.unshift = (rest: Buffer) => {
    placeholder = rest.length === 0
    unshift(placeholder ? NOTHING : rest)
  }
  socket.read = (size?: number): Buffer | null => {
    const chunk = read(size) as Buffer | null
    if (!placeholder || chunk === null) return chunk
    placeholder = false
    return chunk.length > 1 ? chunk.subarray(1) : (read(size) as Buffer | null)
  }
  // A reset that undici knows by this code it takes for the end of an answer without a length, and for a paused one, too.
  socket.destroy = (error?: NodeJS.ErrnoException) =>
    destroy(error?.code === 'ECONNRESET' ? new Error(error.message, { cause: error }) : error)
  return socket
}
