import { subscribe } from 'node:diagnostics_channel'
import type { Socket } from 'node:net'

/*
 * undici ends the connection when a server sends `100 Continue` that nobody asked for, and by then the request was
 * executed: every answer of such an upstream would be unknown (contract §8). This filter takes the interim answer out of
 * the bytes before undici's parser sees them. It looks only at the beginning of an answer, which it knows from undici's
 * own report of a request being written.
 */

const HEAD = Buffer.from('HTTP/1.1 100')
/** An interim head beyond this is not one. */
const MAX_HEAD = 16 * 1024

const kFilter = Symbol('interim filter')
interface Filtered extends Socket {
  [kFilter]?: InterimFilter
}

subscribe('undici:client:sendHeaders', (message) => {
  const { socket } = message as { socket: Filtered }
  socket[kFilter]?.expectHead()
})

/** Removes unsolicited `100 Continue` heads from what is read of `socket`. */
export function withoutInterim<S extends Socket>(socket: S): S {
  const filter = new InterimFilter()
  const read = socket.read.bind(socket)
  socket.read = (size?: number): Buffer | null => {
    for (;;) {
      const chunk = read(size) as Buffer | null
      if (chunk === null) return null
      const passed = filter.pass(chunk)
      if (passed !== null) return passed
    }
  }
  ;(socket as Filtered)[kFilter] = filter
  return socket
}

export class InterimFilter {
  #awaiting = false
  #held: Buffer | null = null

  expectHead(): void {
    this.#awaiting = true
    this.#held = null
  }

  /** What of the chunk is for the parser; null: nothing yet. */
  pass(chunk: Buffer): Buffer | null {
    if (!this.#awaiting) return chunk
    let bytes = this.#held === null ? chunk : Buffer.concat([this.#held, chunk])
    this.#held = null
    while (bytes.length > 0) {
      const verdict = beginsInterim(bytes)
      if (verdict === 'no') {
        this.#awaiting = false
        return bytes
      }
      const end = verdict === 'yes' ? bytes.indexOf('\r\n\r\n') : -1
      if (end < 0) {
        if (bytes.length > MAX_HEAD) {
          this.#awaiting = false
          return bytes
        }
        this.#held = bytes
        return null
      }
      bytes = bytes.subarray(end + 4)
    }
    return null
  }
}

function beginsInterim(bytes: Buffer): 'yes' | 'no' | 'perhaps' {
  const seen = Math.min(bytes.length, HEAD.length)
  for (let i = 0; i < seen; i++) {
    // The minor version may be 0.
    if (bytes[i] !== HEAD[i] && !(i === 7 && bytes[i] === 0x30)) return 'no'
  }
  return seen === HEAD.length ? 'yes' : 'perhaps'
}
