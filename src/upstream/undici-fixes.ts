import { subscribe } from 'node:diagnostics_channel'
import type { Socket } from 'node:net'

/** The socket in a form that undici reads correctly: without interim answers, and with its end reported only once everything has been read. */
export function withFixes<S extends Socket>(socket: S): S {
  return withoutInterim(untilTaken(socket))
}

/*
 * undici ends the connection when a server sends an unsolicited `100 Continue`, at which point the request has executed: every answer of
 * such an upstream would be unknown (contract §8). This filter removes interim answers before undici's parser sees them; `101` stays, for
 * undici to refuse. It looks only at the beginning of an answer, which it knows from undici's own report of a request being written.
 */

/** Only CRLF, since undici's parser refuses heads with other line ends. */
const INTERIM = /^HTTP\/1\.[01] 1(?!01)\d\d(?: [^\r\n]*)?\r\n(?:[^\r\n]+\r\n)*\r\n/
const INTERIM_BEGUN = /^(?:H|HT|HTT|HTTP|HTTP\/1?|HTTP\/1\.[01]?|HTTP\/1\.[01] (?:1(?!01).*)?)$/s
/** Longer heads are not treated as interim answers. */
const MAX_HEAD = 16 * 1024

const kFilter = Symbol('interim filter')
interface Filtered extends Socket {
  [kFilter]?: InterimFilter
}

subscribe('undici:client:sendHeaders', (message) => {
  const { socket } = message as { socket: Filtered }
  socket[kFilter]?.expectHead()
})

function withoutInterim<S extends Filtered>(socket: S): S {
  const filter = new InterimFilter()
  const read = socket.read.bind(socket)
  socket.read = (size?: number): Buffer | null => {
    for (;;) {
      const chunk = read(size) as Buffer | null
      const passed = chunk === null ? null : filter.pass(chunk)
      if (chunk === null || passed !== null) return passed
    }
  }
  socket[kFilter] = filter
  return socket
}

export class InterimFilter {
  #awaiting = false
  #held: Buffer = Buffer.alloc(0)

  expectHead(): void {
    this.#awaiting = true
    this.#held = Buffer.alloc(0)
  }

  /** The part of the chunk for the parser; null: nothing yet. */
  pass(chunk: Buffer): Buffer | null {
    if (!this.#awaiting) return chunk
    let bytes = Buffer.concat([this.#held, chunk])
    for (;;) {
      const text = bytes.toString('latin1', 0, MAX_HEAD)
      const interim = INTERIM.exec(text)
      if (interim !== null) bytes = bytes.subarray(interim[0].length)
      else {
        this.#held = bytes
        const isBegun = bytes.length < MAX_HEAD && !text.includes('\r\n\r\n')
        if (text === '' || (isBegun && INTERIM_BEGUN.test(text))) return null
        this.#awaiting = false
        return bytes
      }
    }
  }
}

/*
 * undici's parser must not learn of the end of its connection while paused, that is, whenever a client reads more slowly than the upstream
 * writes: if the answer says `Connection: close`, an assertion of undici's ends the process; otherwise a complete answer looks
 * broken off. Node reports the end as soon as nothing is left to read, and by then the parser has read what it was given when it paused.
 */

/** Stands for an empty unread rest. */
const NOTHING = Buffer.alloc(1)

/** Reports the end of `socket` once everything read has been consumed, and a reset always as an error. */
function untilTaken<S extends Socket>(socket: S): S {
  let placeholder = false
  const read = socket.read.bind(socket)
  const unshift = socket.unshift.bind(socket)
  const destroy = socket.destroy.bind(socket)
  // undici uses this to give back unparsed bytes when it pauses.
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
  // undici treats a reset with this code as the end of an answer without a length, even of a paused one.
  socket.destroy = (error?: NodeJS.ErrnoException) =>
    destroy(error?.code === 'ECONNRESET' ? new Error(error.message, { cause: error }) : error)
  return socket
}
