import type { IncomingMessage, ServerResponse } from 'node:http'
import type { PageFile } from '../admin/page.ts'

/** Sends the file of the operators' page that is asked for; false: it is none of them. */
export function sendPage(
  files: ReadonlyMap<string, PageFile>,
  request: IncomingMessage,
  response: ServerResponse,
): boolean {
  const file = files.get((request.url as string).split('?', 1)[0] as string)
  if (file === undefined) return false
  const { etag } = file.headers
  const held = (request.headers['if-none-match'] ?? '')
    .split(',')
    .map((one) => one.trim().replace(/^W\//, ''))
  if (request.method !== 'GET' && request.method !== 'HEAD') {
    response.writeHead(405, { allow: 'GET, HEAD', 'content-length': '0' }).end()
  } else if (etag !== undefined && held.includes(etag)) {
    const { 'content-length': _length, 'content-type': _type, ...rest } = file.headers
    response.writeHead(304, rest).end()
  } else response.writeHead(200, file.headers).end(request.method === 'HEAD' ? undefined : file.body)
  return true
}
