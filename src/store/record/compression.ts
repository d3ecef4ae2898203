import { promisify } from 'node:util'
import {
  constants,
  gunzip,
  gunzipSync,
  gzip,
  gzipSync,
  zstdCompress,
  zstdCompressSync,
  zstdDecompress,
  zstdDecompressSync,
} from 'node:zlib'
import { CorruptRecord } from '../register.ts'

/** The codings of a payload; the index is its number in the record. */
const CODINGS = ['off', 'gzip', 'zstd'] as const
export type Compression = (typeof CODINGS)[number]

/** Bytes; smaller bodies are not worth the time. */
const MIN_BODY = 512
/** Bytes; larger payloads are not compressed, so nothing larger is ever decoded, even under a later configuration. */
const MAX_PAYLOAD = 16 * 1024 ** 2
/** Bytes; up to this size, compressing takes less time than the thread pool would. */
const AT_ONCE = 16 * 1024
/** Share of its size that a body must shrink to. */
const WORTHWHILE = 0.9
const LENGTH_BYTES = 4
/** Level 1 for both: most of the gain for the least time. gzip includes a checksum anyway. */
const GZIP = { level: 1 }
const ZSTD = { params: { [constants.ZSTD_c_compressionLevel]: 1, [constants.ZSTD_c_checksumFlag]: 1 } }
/** Media types that are already compressed. */
const PACKED =
  /^(?:image\/(?!svg|bmp)|video\/|audio\/|font\/woff|application\/(?:pdf|zip|gzip|x-gzip|zstd|x-7z|x-bzip|x-rar|vnd\.rar|x-xz|java-archive|vnd\.openxmlformats|vnd\.oasis))/i

export function codingOf(compression: Compression): number {
  return CODINGS.indexOf(compression)
}

/** Whether compressing a response may gain anything. `headers`: name–value list. */
export function mayShrink(headers: readonly string[], bodyLength: number): boolean {
  if (bodyLength < MIN_BODY) return false
  for (let i = 0; i < headers.length; i += 2) {
    const name = (headers[i] as string).toLowerCase()
    if (name === 'content-encoding') return false
    if (name === 'content-type' && PACKED.test((headers[i + 1] as string).trim())) return false
  }
  return true
}

/** The encoded payload, preceded by its length; null: not worth it. */
export async function coded(payload: Buffer, coding: number): Promise<Buffer | null> {
  if (payload.length > MAX_PAYLOAD) return null
  const isGzip = coding === codingOf('gzip')
  let code: Buffer
  if (payload.length <= AT_ONCE) code = isGzip ? gzipSync(payload, GZIP) : zstdCompressSync(payload, ZSTD)
  else code = await (isGzip ? gzipLater(payload, GZIP) : zstdLater(payload, ZSTD))
  if (code.length + LENGTH_BYTES > WORTHWHILE * payload.length) return null
  const length = Buffer.allocUnsafe(LENGTH_BYTES)
  length.writeUInt32BE(payload.length)
  return Buffer.concat([length, code])
}

const gzipLater = promisify<Buffer, typeof GZIP, Buffer>(gzip)
const zstdLater = promisify<Buffer, typeof ZSTD, Buffer>(zstdCompress)

/** What Node returns with `info`. */
interface Inflated {
  readonly buffer: Buffer
  readonly engine: { readonly bytesWritten: number }
}

/**
 * Restores the payload given to {@link coded}.
 *
 * @throws {CorruptRecord} if it is not such a payload. Never decodes more than the announced length, nor more than the maximum.
 */
export function decoded(bytes: Buffer, coding: number): Buffer {
  const code = bytes.subarray(LENGTH_BYTES)
  const options = { info: true, maxOutputLength: lengthOf(bytes, coding) }
  try {
    const inflate = coding === codingOf('gzip') ? gunzipSync : zstdDecompressSync
    return whole(inflate(code, options) as unknown as Inflated, code, options.maxOutputLength)
  } catch (error) {
    throw damaged(error)
  }
}

/** Like {@link decoded}, on the thread pool if the payload is long. */
export async function decodedSoon(bytes: Buffer, coding: number): Promise<Buffer> {
  const maxOutputLength = lengthOf(bytes, coding)
  if (maxOutputLength <= AT_ONCE) return decoded(bytes, coding)
  const code = bytes.subarray(LENGTH_BYTES)
  const inflate = coding === codingOf('gzip') ? gunzipLater : unzstdLater
  try {
    const inflated = await inflate(code, { info: true, maxOutputLength })
    return whole(inflated as unknown as Inflated, code, maxOutputLength)
  } catch (error) {
    throw damaged(error)
  }
}

type UnzipOptions = { readonly info: true; readonly maxOutputLength: number }
const gunzipLater = promisify<Buffer, UnzipOptions, Buffer>(gunzip)
const unzstdLater = promisify<Buffer, UnzipOptions, Buffer>(zstdDecompress)

/** Length of the payload, according to the record. */
function lengthOf(bytes: Buffer, coding: number): number {
  if (CODINGS[coding] === undefined)
    throw new CorruptRecord(`the stored response has coding ${coding}; this version reads 0 to 2`)
  const length = bytes.length < LENGTH_BYTES ? 0 : bytes.readUInt32BE()
  if (length === 0 || length > MAX_PAYLOAD)
    throw new CorruptRecord(
      `the stored response is compressed from ${length} bytes; allowed: 1 to ${MAX_PAYLOAD}`,
    )
  return length
}

function whole({ buffer, engine }: Inflated, code: Buffer, length: number): Buffer {
  if (buffer.length === length && engine.bytesWritten === code.length) return buffer
  throw new CorruptRecord('the stored response differs in length from what the record says')
}

function damaged(error: unknown): CorruptRecord {
  if (error instanceof CorruptRecord) return error
  return new CorruptRecord(`the stored response cannot be decompressed: ${(error as Error).message}`)
}
