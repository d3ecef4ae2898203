import type { IncomingHttpHeaders } from 'node:http'
import type { Readable } from 'node:stream'
import type { Dispatcher } from 'undici'
import errors from 'undici/lib/core/errors.js'
import { isFieldName, isFieldValue } from '../core/headers.ts'

/* Conversions for undici's interface: options to the bytes of a request's head, an answer's lines to headers. */

/** Lines about message length or the connection: this client sets those itself. */
const FRAMING = /^(?:connection|content-length|expect|host|keep-alive|transfer-encoding|upgrade)$/i

const NO_BODY = Buffer.alloc(0)

function bodyOf({ body }: Dispatcher.DispatchOptions): Uint8Array | Readable {
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

interface RequestParts {
  /** Null: the request names none. */
  readonly host: string | null
  readonly body: Uint8Array | Readable
  /** Length of the body; infinite: not known before its end. */
  readonly length: number
}

/**
 * Checks a request, and reads the lines that are not about its framing to `line`.
 *
 * @throws if a part could be read as something else: nothing is sent then.
 */
export function partsOf(
  options: Dispatcher.DispatchOptions,
  line: (name: string, value: string) => void,
): RequestParts {
  const { method, path, headers, upgrade } = options
  const body = bodyOf(options)
  if (!isFieldName(method) || method === 'CONNECT' || upgrade) throw invalid('request method')
  if (!/^\/[\x21-\xff]*$/.test(path) && !(path === '*' && method === 'OPTIONS')) throw invalid('request path')
  let host: string | null = null
  let announced: number | null = null
  const flat = flatOf(headers)
  for (let i = 0; i < flat.length; i += 2) {
    const name = flat[i] as string
    const value = flat[i + 1] as string
    if (!isFieldName(name) || !isFieldValue(value)) throw invalid(`${name} header`)
    if (!FRAMING.test(name)) line(name, value)
    else if (host === null && name.toLowerCase() === 'host') host = value
    else if (announced === null && /^\d{1,15}$/.test(value) && name.toLowerCase() === 'content-length')
      announced = Number(value)
    else throw invalid(`${name} header`)
  }
  const length = body instanceof Uint8Array ? body.length : (announced ?? Number.POSITIVE_INFINITY)
  if (announced !== null && announced !== length) throw invalid('content-length header')
  return { host, body, length }
}

/**
 * The request's head in HTTP/1.1 (RFC 9112 §3 and §5), its body, and the body's length (infinite: chunked).
 *
 * @throws as {@link partsOf}.
 */
export function messageOf(
  options: Dispatcher.DispatchOptions,
  defaultHost: string,
): { readonly head: string; readonly body: Uint8Array | Readable; readonly length: number } {
  const { method, path } = options
  let lines = ''
  const { host, body, length } = partsOf(options, (name, value) => {
    lines += `${name}: ${value}\r\n`
  })
  if (length === Number.POSITIVE_INFINITY) lines += 'transfer-encoding: chunked\r\n'
  // RFC 9110 §8.6: a length of 0 if the method usually has content.
  else if (length > 0 || expectsContent(method)) lines += `content-length: ${length}\r\n`
  // Some servers answer HEAD with content, which would be read as the next answer.
  const connection = method === 'HEAD' ? 'close' : 'keep-alive'
  const head = `${method} ${path} HTTP/1.1\r\nhost: ${host ?? defaultHost}\r\nconnection: ${connection}\r\n${lines}\r\n`
  return { head, body, length }
}

export function invalid(what: string): Error {
  return new errors.InvalidArgumentError(`invalid ${what}`)
}

/** Methods whose content every server reads. With others, a server may read it as the next request. */
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

/** Headers in undici's form: names in lower case, repeated lines as an array. */
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
