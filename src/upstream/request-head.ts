import type { IncomingHttpHeaders } from 'node:http'
import type { Readable } from 'node:stream'
import type { Dispatcher } from 'undici'
import errors from 'undici/lib/core/errors.js'
import { isFieldName, isFieldValue } from '../core/headers.ts'

/* The parts of undici's interface that stand for bytes: options become a request's head, an answer's lines its headers. */

/** Lines about message length or the connection: this client sets those itself. */
const FRAMING = /^(?:connection|content-length|expect|host|keep-alive|transfer-encoding|upgrade)$/i

export function isStream(body: Uint8Array | Readable): body is Readable {
  return !(body instanceof Uint8Array)
}

const NO_BODY = Buffer.alloc(0)

export function bodyOf({ body }: Dispatcher.DispatchOptions): Uint8Array | Readable {
  if (body === null || body === undefined) return NO_BODY
  if (body instanceof Uint8Array) return body
  if (typeof body === 'string') return Buffer.from(body)
  if ('pipe' in body) return body
  throw new errors.InvalidArgumentError('a body must be text, bytes or a stream')
}

/** Flat, however undici's users may write them. */
function flatOf(headers: Dispatcher.DispatchOptions['headers']): readonly string[] {
  if (headers === null || headers === undefined) return []
  if (Array.isArray(headers) && typeof headers[0] !== 'object') return headers
  const pairs = Symbol.iterator in headers ? headers : Object.entries(headers)
  const flat: string[] = []
  for (const [name, value] of pairs as Iterable<[string, string | string[] | undefined]>)
    if (value !== undefined) for (const one of [value].flat()) flat.push(name, one)
  return flat
}

/**
 * The request's head (RFC 9112 §3 and §5).
 *
 * @throws if a part could be read as something else: nothing is sent then.
 */
export function requestHead(
  { method, path, headers, upgrade }: Dispatcher.DispatchOptions,
  body: Uint8Array | Readable,
  defaultHost: string,
): string {
  if (!isFieldName(method) || method === 'CONNECT' || upgrade) throw invalid('request method')
  if (!/^\/[\x21-\xff]*$/.test(path)) throw invalid('request path')
  let host: string | null = null
  let length: string | null = null
  let lines = ''
  const flat = flatOf(headers)
  for (let i = 0; i < flat.length; i += 2) {
    const name = flat[i] as string
    const value = flat[i + 1] as string
    if (!isFieldName(name) || !isFieldValue(value)) throw invalid(`${name} header`)
    if (!FRAMING.test(name)) lines += `${name}: ${value}\r\n`
    else if (host === null && name.toLowerCase() === 'host') host = value
    else if (length === null && /^\d+$/.test(value) && name.toLowerCase() === 'content-length') length = value
    else throw invalid(`${name} header`)
  }
  let framing = ''
  if (isStream(body)) framing = length === null ? CHUNKED : `content-length: ${length}\r\n`
  else {
    if (length !== null && Number(length) !== body.length) throw invalid('content-length header')
    // RFC 9110 §8.6: a length of 0 where the method leads one to expect content.
    if (body.length > 0 || expectsContent(method)) framing = `content-length: ${body.length}\r\n`
  }
  // Some servers answer HEAD with content, which would be taken for the next answer.
  const connection = method === 'HEAD' ? 'close' : 'keep-alive'
  return `${method} ${path} HTTP/1.1\r\nhost: ${host ?? defaultHost}\r\nconnection: ${connection}\r\n${lines}${framing}\r\n`
}

const CHUNKED = 'transfer-encoding: chunked\r\n'

/** Of a head for a stream: its last line. */
export function lengthIn(head: string): number {
  return head.endsWith(`${CHUNKED}\r\n`)
    ? Number.POSITIVE_INFINITY
    : Number(/: (\d+)\r\n\r\n$/.exec(head)?.[1])
}

function invalid(what: string): Error {
  return new errors.InvalidArgumentError(`invalid ${what}`)
}

/** Methods whose content every server reads. After other methods, a server may take it for the next request. */
export function expectsContent(method: string): boolean {
  switch (method) {
    case 'POST':
    case 'PUT':
    case 'PATCH':
    case 'QUERY':
    case 'PROPFIND':
    case 'PROPPATCH':
      return true
    default:
      return false
  }
}

/** As undici has them: names in lower case, repeated lines as an array. */
export function headersOf(lines: readonly string[]): IncomingHttpHeaders {
  const headers: Record<string, string | string[]> = Object.create(null)
  for (let i = 0; i < lines.length; i += 2) {
    const name = (lines[i] as string).toLowerCase()
    const value = lines[i + 1] as string
    const before = headers[name]
    headers[name] = before === undefined ? value : [before, value].flat()
  }
  return headers
}
