import { createHash, randomBytes } from 'node:crypto'

/*
 * A segment of the spool, version 1 (docs/record-format.md): frames one after the other, nothing before them. All numbers are
 * big-endian.
 *
 *   0  8  the segment's marker      9  6  number        19 16  SHA-256 of bytes 0–18 and the payload, cut off
 *   8  1  kind                     15  4  length        35     payload
 *
 * The marker is random and also part of the file's name. So nobody who has a say in a payload can make one that looks like a
 * frame, and behind damage the next whole frame is found by it.
 */
const NUMBER_AT = 9
const U48 = 6
const LENGTH_AT = 15
const DIGEST_AT = 19
const DIGEST_BYTES = 16
const PAYLOAD_AT = DIGEST_AT + DIGEST_BYTES
const MARKER_BYTES = 8

const KIND_ENTRY = 1
/** Its payload: the marker of the segment of the entry that it takes back, whose number it has. */
const KIND_TOMBSTONE = 2

/** Segments are ordered by number. The marker keeps files of several spools apart that were put into one directory. */
const NAME = /^spool-v1-(\d{8,})-([0-9a-f]{16})$/
const DAMAGED = '.damaged'

export interface SegmentName {
  readonly name: string
  readonly number: number
  readonly marker: Buffer
}

/** Bytes that a payload takes in a file. */
export function frameBytes(payload: number): number {
  return PAYLOAD_AT + payload
}

export function newSegmentName(number: number): SegmentName {
  const marker = randomBytes(MARKER_BYTES)
  return { name: `spool-v1-${String(number).padStart(8, '0')}-${marker.toString('hex')}`, number, marker }
}

/** null: no file of a spool that this version reads. */
export function parseSegmentName(name: string): SegmentName | null {
  const [, number = '', marker = ''] = NAME.exec(name) ?? []
  return number === '' ? null : { name, number: Number(number), marker: Buffer.from(marker, 'hex') }
}

/** What a segment is called once nothing but what could not be read is of use in it. */
export function damagedName(name: string): string {
  return `${name}${DAMAGED}`
}

export function isDamagedName(name: string): boolean {
  return name.endsWith(DAMAGED) && parseSegmentName(name.slice(0, -DAMAGED.length)) !== null
}

export function entryFrame(marker: Buffer, number: number, payload: Buffer): Buffer {
  return frame(marker, KIND_ENTRY, number, payload)
}

/** Takes back the entry `number` of the segment `of`. */
export function tombstoneFrame(marker: Buffer, number: number, of: Buffer): Buffer {
  return frame(marker, KIND_TOMBSTONE, number, of)
}

function frame(marker: Buffer, kind: number, number: number, payload: Buffer): Buffer {
  const bytes = Buffer.allocUnsafe(frameBytes(payload.length))
  marker.copy(bytes)
  bytes.writeUInt8(kind, MARKER_BYTES)
  bytes.writeUIntBE(number, NUMBER_AT, U48)
  bytes.writeUInt32BE(payload.length, LENGTH_AT)
  payload.copy(bytes, PAYLOAD_AT)
  digestOf(bytes).copy(bytes, DIGEST_AT)
  return bytes
}

function digestOf(bytes: Buffer): Buffer {
  const hash = createHash('sha256').update(bytes.subarray(0, DIGEST_AT)).update(bytes.subarray(PAYLOAD_AT))
  return hash.digest().subarray(0, DIGEST_BYTES)
}

export type Piece =
  | { readonly kind: 'entry'; readonly number: number; readonly payload: Buffer }
  | { readonly kind: 'tombstone'; readonly number: number; readonly of: Buffer }
  /** No frame: a write that was cut off, or damage. `blank`: zeros alone, as a crash of the system leaves them. */
  | { readonly kind: 'unreadable'; readonly at: number; readonly bytes: number; readonly blank: boolean }

/** Everything that is in a segment's bytes, in order. Payloads are views of `bytes`. */
export function readSegment(bytes: Buffer, marker: Buffer): Piece[] {
  const pieces: Piece[] = []
  for (let at = 0; at < bytes.length; ) {
    const read = readFrame(bytes, at, marker)
    if (read !== null) {
      pieces.push(read.piece)
      at = read.end
      continue
    }
    let next = at
    do next = bytes.indexOf(marker, next + 1)
    while (next >= 0 && readFrame(bytes, next, marker) === null)
    const end = next < 0 ? bytes.length : next
    const blank = bytes.subarray(at, end).every((byte) => byte === 0)
    pieces.push({ kind: 'unreadable', at, bytes: end - at, blank })
    at = end
  }
  return pieces
}

function readFrame(bytes: Buffer, at: number, marker: Buffer): { piece: Piece; end: number } | null {
  if (bytes.length - at < PAYLOAD_AT || bytes.compare(marker, 0, MARKER_BYTES, at, at + MARKER_BYTES) !== 0)
    return null
  const end = at + frameBytes(bytes.readUInt32BE(at + LENGTH_AT))
  if (end > bytes.length) return null
  const whole = bytes.subarray(at, end)
  if (!digestOf(whole).equals(whole.subarray(DIGEST_AT, PAYLOAD_AT))) return null
  const number = whole.readUIntBE(NUMBER_AT, U48)
  const payload = whole.subarray(PAYLOAD_AT)
  const kind = whole.readUInt8(MARKER_BYTES)
  if (kind === KIND_ENTRY) return { piece: { kind: 'entry', number, payload }, end }
  if (kind === KIND_TOMBSTONE) return { piece: { kind: 'tombstone', number, of: payload }, end }
  return null
}
