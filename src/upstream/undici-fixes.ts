import { subscribe } from 'node:diagnostics_channel'
import type { Socket } from 'node:net'

/**
 * The socket in a form that undici reads correctly: without interim answers, and with its end reported only once everything has been read.
 * For what undici still carries: streamed bodies.
 */
export function withFixes<S extends Socket>(socket: S): S {
  return withoutInterim(untilTaken(socket))
}

/*
 * undici ends the connection when a server sends an unsolicited `100 Continue`, at which point the request has executed: every answer of
 * such an upstream would be unknown (contract §8). This filter removes interim answers before undici's parser sees them; `101` stays, for
 * undici to refuse.
 *
 * undici also reads the reason phrase as UTF-8, which loses the bytes of any other encoding: the filter rewrites each as the UTF-8 of its
 * latin1 character. It looks only at the beginning of an answer, which it knows from undici's own report of a request being written.
 */

const INTERIM = Buffer.from('HTTP/1.1 1')
const SWITCHING = 'HTTP/1.1 101'
/** Line ends that the parser accepts: it refuses heads with others. */
const WHOLE = /^HTTP\/1\.[01] 1\d\d(?: [^\r\n]*)?\r\n(?:[^\r\n]+\r\n)*\r\n$/
/** An interim head, or a status line, beyond this is not one. */
const MAX_HEAD = 16 * 1024
const LF = 0x0a

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
  #held: Buffer | null = null

  expectHead(): void {
    this.#awaiting = true
    this.#held = null
  }

  /** The part of the chunk for the parser; null: nothing yet. */
  pass(chunk: Buffer): Buffer | null {
    if (!this.#awaiting) return chunk
    let bytes = this.#held === null ? chunk : Buffer.concat([this.#held, chunk])
    this.#held = null
    while (bytes.length > 0) {
      const verdict = beginsInterim(bytes)
      const end = endOf(bytes, verdict)
      if (end < 0 && bytes.length <= MAX_HEAD && (verdict !== 'no' || isHttp(bytes))) {
        this.#held = bytes
        return null
      }
      if (verdict !== 'yes' || end < 0 || !WHOLE.test(bytes.toString('latin1', 0, end))) {
        this.#awaiting = false
        return verdict === 'no' && end > 0 ? readable(bytes, end) : bytes
      }
      bytes = bytes.subarray(end)
    }
    return null
  }
}

/** Where the interim head, or else the status line, ends; -1: not yet seen. */
function endOf(bytes: Buffer, verdict: 'yes' | 'no' | 'perhaps'): number {
  if (verdict === 'perhaps') return -1
  if (verdict === 'no') return bytes.indexOf(LF) + 1 || -1
  const blank = bytes.indexOf('\r\n\r\n')
  return blank < 0 ? -1 : blank + 4
}

/** The part seen so far. */
function isHttp(bytes: Buffer): boolean {
  return 'HTTP/1.'.startsWith(bytes.toString('latin1', 0, 7))
}

function beginsInterim(bytes: Buffer): 'yes' | 'no' | 'perhaps' {
  const seen = Math.min(bytes.length, INTERIM.length)
  for (let i = 0; i < seen; i++) {
    // The minor version may be 0.
    if (bytes[i] !== INTERIM[i] && !(i === 7 && bytes[i] === 0x30)) return 'no'
  }
  if (bytes.length < SWITCHING.length) return 'perhaps'
  return bytes.toString('latin1', INTERIM.length, SWITCHING.length) === '01' ? 'no' : 'yes'
}

/** The bytes with a status line whose reason undici reads unchanged. */
function readable(bytes: Buffer, lineEnd: number): Buffer {
  for (let i = 0; i < lineEnd; i++)
    if ((bytes[i] as number) > 0x7f)
      return Buffer.concat([Buffer.from(bytes.toString('latin1', 0, lineEnd)), bytes.subarray(lineEnd)])
  return bytes
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
  // undici takes a reset with this code for the end of an answer without a length, even of a paused one.
  socket.destroy = (error?: NodeJS.ErrnoException) =>
    destroy(error?.code === 'ECONNRESET' ? new Error(error.message, { cause: error }) : error)
  return socket
}
