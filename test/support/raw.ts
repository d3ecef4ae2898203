import { once } from 'node:events'
import { connect, type Socket } from 'node:net'

/** A response as received. */
export interface RawAnswer {
  readonly statusLine: string
  readonly status: number
  /** Flat name–value list, as sent. */
  readonly headers: readonly string[]
  readonly body: Buffer
  readonly trailers: readonly string[]
  /** All bytes of the response, including the head. */
  readonly bytes: Buffer
}

/** Sends bytes on a new connection and reads one response. Rejects if the connection ends before it is complete. */
export async function rawRequest(port: number, bytes: string | Buffer): Promise<RawAnswer> {
  const socket = connect(port, '127.0.0.1')
  try {
    socket.write(bytes)
    return await readAnswer(socket)
  } finally {
    socket.destroy()
  }
}

/** The bytes of a POST with a key. */
export function post(path: string, key: string | null, body: string, more: readonly string[] = []): string {
  const lines = [`POST ${path} HTTP/1.1`, 'Host: api.test', 'Content-Type: application/json', ...more]
  if (key !== null) lines.push(`Idempotency-Key: ${key}`)
  lines.push(`Content-Length: ${Buffer.byteLength(body)}`, '', body)
  return lines.join('\r\n')
}

/** The bytes of a GET without a key. */
export function get(path: string, ...lines: readonly string[]): string {
  return [`GET ${path} HTTP/1.1`, 'Host: a', ...lines, '', ''].join('\r\n')
}

/** A connection on which these bytes are under way. */
export function dial(port: number, bytes: string | Buffer): Socket {
  const socket = connect(port, '127.0.0.1')
  socket.write(bytes)
  return socket
}

/** Reads the next final response of a connection, skipping interim ones. */
export function readAnswer(socket: Socket): Promise<RawAnswer> {
  return new Promise((resolve, reject) => {
    let buffer = Buffer.alloc(0)
    const done = (answer: RawAnswer, used: number): void => {
      socket.off('data', onData).off('end', onEnd).off('error', onError)
      socket.pause()
      if (used < buffer.length) socket.unshift(buffer.subarray(used))
      resolve(answer)
    }
    const attempt = (ended: boolean): void => {
      for (;;) {
        const parsed = parse(buffer, ended)
        if (parsed === null) return
        if (parsed.answer.status >= 200) return done(parsed.answer, parsed.used)
        buffer = buffer.subarray(parsed.used)
      }
    }
    const onData = (chunk: Buffer): void => {
      buffer = Buffer.concat([buffer, chunk])
      attempt(false)
    }
    const onEnd = (): void => {
      attempt(true)
      reject(
        new Error(
          `the connection ended after ${buffer.length} bytes: ${buffer.toString('latin1').slice(0, 200)}`,
        ),
      )
    }
    const onError = (error: Error): void => reject(error)
    socket.on('data', onData).on('end', onEnd).on('error', onError)
    socket.resume()
  })
}

function parse(buffer: Buffer, ended: boolean): { answer: RawAnswer; used: number } | null {
  const headEnd = buffer.indexOf('\r\n\r\n')
  if (headEnd < 0) return null
  const [statusLine = '', ...headLines] = buffer.toString('latin1', 0, headEnd).split('\r\n')
  const status = Number(statusLine.split(' ')[1])
  const headers = headLines.flatMap(pair)
  const get = (name: string): string | undefined =>
    headers.find((_, i) => i % 2 === 1 && (headers[i - 1] as string).toLowerCase() === name)
  const start = headEnd + 4
  const answer = (body: Buffer, trailers: readonly string[], used: number) => ({
    answer: { statusLine, status, headers, body, trailers, bytes: buffer.subarray(0, used) },
    used,
  })
  if (status < 200 || status === 204 || status === 304) return answer(Buffer.alloc(0), [], start)
  if (get('transfer-encoding')?.toLowerCase() === 'chunked') {
    const chunks: Buffer[] = []
    let at = start
    for (;;) {
      const lineEnd = buffer.indexOf('\r\n', at)
      if (lineEnd < 0) return null
      const size = Number.parseInt(buffer.toString('latin1', at, lineEnd), 16)
      if (size === 0) {
        const emptyTrailers = buffer.toString('latin1', lineEnd, lineEnd + 4) === '\r\n\r\n'
        const end = emptyTrailers ? lineEnd : buffer.indexOf('\r\n\r\n', lineEnd)
        if (end < 0) return null
        const text = emptyTrailers ? '' : buffer.toString('latin1', lineEnd + 2, end)
        return answer(Buffer.concat(chunks), text === '' ? [] : text.split('\r\n').flatMap(pair), end + 4)
      }
      at = lineEnd + 2
      if (buffer.length < at + size + 2) return null
      chunks.push(buffer.subarray(at, at + size))
      at += size + 2
    }
  }
  const length = get('content-length')
  if (length === undefined) return ended ? answer(buffer.subarray(start), [], buffer.length) : null
  if (buffer.length < start + Number(length)) return null
  return answer(buffer.subarray(start, start + Number(length)), [], start + Number(length))
}

function pair(line: string): [string, string] {
  const colon = line.indexOf(':')
  return [line.slice(0, colon), line.slice(colon + 1).trim()]
}

/** Everything received until the connection ends, as latin1. */
export async function everything(port: number, ...bytes: (string | Buffer)[]): Promise<string> {
  const client = connect(port, '127.0.0.1')
  let got = ''
  client.on('data', (chunk: Buffer) => {
    got += chunk.toString('latin1')
  })
  client.on('error', () => {})
  for (const piece of bytes) client.write(typeof piece === 'string' ? Buffer.from(piece, 'latin1') : piece)
  await once(client, 'close')
  return got
}
