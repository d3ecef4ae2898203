import { promisify } from 'node:util'
import { brotliDecompress, gunzip, inflate, inflateRaw, zstdDecompress } from 'node:zlib'
import type { ReadableBody } from '../core/fingerprint.ts'
import { filterLines, linesOf, type RawHeaders } from '../core/headers.ts'

type Decode = (body: Buffer, options: { readonly maxOutputLength: number }) => Promise<Buffer>

const inflated: Decode = promisify(inflate)
const inflatedRaw: Decode = promisify(inflateRaw)

/** By content coding (RFC 9110 §8.4.1). Many clients send `deflate` without the zlib wrapper that it should have. */
const DECODERS: ReadonlyMap<string, Decode> = new Map<string, Decode>([
  ['gzip', promisify(gunzip)],
  ['x-gzip', promisify(gunzip)],
  ['deflate', (body, options) => inflated(body, options).catch(() => inflatedRaw(body, options))],
  ['br', promisify(brotliDecompress)],
  ['zstd', promisify(zstdDecompress)],
])

/** More than any client applies; each costs a decoder. */
const MAX_CODINGS = 3

/** The body to read and compare: decoded, or as sent if that is impossible. `limit`: bytes of the decoded body. */
export async function readableBody(headers: RawHeaders, body: Buffer, limit: number): Promise<ReadableBody> {
  const decoded = await decodedBody(headers, body, limit)
  if (decoded === null) return { headers, body }
  return { headers: filterLines(headers, (name) => name !== 'content-encoding'), body: decoded }
}

/**
 * The body without its content codings; null if one is unknown, the body is broken, or it decodes to more than `limit` bytes. The decoders
 * run on other threads.
 */
async function decodedBody(headers: RawHeaders, body: Buffer, limit: number): Promise<Buffer | null> {
  const codings = linesOf(headers, 'content-encoding')
    .flatMap((line) => line.split(','))
    .map((coding) => coding.trim().toLowerCase())
    .filter((coding) => coding !== '' && coding !== 'identity')
  if (codings.length > MAX_CODINGS) return null
  let decoded = body
  for (const coding of codings.toReversed()) {
    const decode = DECODERS.get(coding)
    if (decode === undefined) return null
    try {
      decoded = await decode(decoded, { maxOutputLength: limit })
    } catch {
      return null
    }
  }
  return decoded
}
