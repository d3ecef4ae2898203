import { EventEmitter } from 'node:events'
import type { OutgoingHttpHeaders } from 'node:http'
import { isFieldValue } from '../core/headers.ts'

const { STATUS_CODES } = process.getBuiltinModule('node:http')

/** The parts of Node's `ServerResponse` about heads that this proxy and `reply.send()` use. */
export abstract class HeadWriter extends EventEmitter {
  statusCode = 200
  headersSent = false
  #set: OutgoingHttpHeaders | null = null

  /** `lines`: flat, names and values unchecked. */
  protected abstract begin(status: number, reason: string, lines: readonly string[]): void

  writeHead(
    status: number,
    reason: string | readonly string[] | OutgoingHttpHeaders,
    lines: readonly string[] = [],
  ): this {
    if (typeof reason !== 'string')
      return this.writeHead(
        status,
        STATUS_CODES[status] ?? 'unknown',
        isLines(reason) ? reason : flat(reason),
      )
    if (this.headersSent) throw new Error('the answer has a head')
    if (!Number.isInteger(status) || status < 200 || status > 999 || !isFieldValue(reason))
      throw new Error('invalid status line')
    this.begin(status, reason, lines)
    this.statusCode = status
    this.headersSent = true
    return this
  }

  /** Writes the head from the status and headers set one by one, unless one has been written. */
  protected beginSet(): void {
    if (!this.headersSent) this.writeHead(this.statusCode, this.getHeaders())
  }

  /* Fastify sets headers one by one when it sends a stream; all other heads are written whole. */

  setHeader(name: string, value: OutgoingHttpHeaders[string]): this {
    this.#set = { ...this.#set, [name.toLowerCase()]: value }
    return this
  }

  getHeader(name: string): OutgoingHttpHeaders[string] {
    return this.#set?.[name.toLowerCase()]
  }

  hasHeader(name: string): boolean {
    return this.getHeader(name) !== undefined
  }

  getHeaders(): OutgoingHttpHeaders {
    return this.#set ?? {}
  }
}

function isLines(headers: readonly string[] | OutgoingHttpHeaders): headers is readonly string[] {
  return Array.isArray(headers)
}

function flat(headers: OutgoingHttpHeaders): string[] {
  return Object.entries(headers).flatMap(([name, value]) =>
    [value ?? []].flat().flatMap((one) => [name, String(one)]),
  )
}
