import { MAX_U48, readU48 } from '../record/binary.ts'
import { PREFIX, stamp } from '../record/codec.ts'
import { CorruptRecord, type DuePosition } from '../register.ts'
import { isNumber, nonsense, type SqlArg, type SqlRow } from './link.ts'
import type { BatchItem } from './queue.ts'

/* Records and lists as arguments and columns of SQL. */

/** The columns from which {@link bytesOf} assembles a record. */
export const COLUMNS =
  'version fence created_at updated_at due drop_at schema state token head payload'.split(' ')

export function tokenOf(bytes: Buffer): Buffer {
  return bytes.subarray(PREFIX.token, PREFIX.createdAt)
}

function headEnd(bytes: Buffer): number {
  return bytes.length < PREFIX.end + 4 ? bytes.length : PREFIX.end + 4 + bytes.readUInt32BE(PREFIX.end)
}

/** The columns of a record that the caller sets; the store stamps the rest. */
export function partsOf(bytes: Buffer) {
  const end = headEnd(bytes)
  return {
    schema: bytes.readUInt8(PREFIX.schema),
    state: bytes.readUInt8(PREFIX.state),
    fence: readU48(bytes, PREFIX.fence),
    token: tokenOf(bytes),
    createdAt: readU48(bytes, PREFIX.createdAt),
    head: bytes.subarray(PREFIX.end, end),
    payload: bytes.subarray(end),
  }
}

const NUMBERS = {
  rule: ({ rule }) => rule,
  state: ({ bytes }) => bytes.readUInt8(PREFIX.state),
  fence: ({ bytes }) => readU48(bytes, PREFIX.fence),
  createdAt: ({ bytes }) => readU48(bytes, PREFIX.createdAt),
} satisfies Record<string, (item: BatchItem) => number>

/**
 * Records as the batch functions take them: arrays of ids, `numbers` and spans; three arrays of offsets (start, payload, end of each
 * record) into the concatenated bytes, which come last.
 */
export function arraysOf(items: readonly BatchItem[], ...numbers: (keyof typeof NUMBERS)[]): SqlArg[] {
  const arrayOf = (of: (item: BatchItem) => string | number): string => `{${items.map(of).join()}}`
  let end = 0
  const begin = ({ bytes }: BatchItem): number => (end += bytes.length) - bytes.length
  const starts = items.map(begin)
  return [
    arrayOf(({ id }) => id),
    ...numbers.map((name) => arrayOf(NUMBERS[name])),
    arrayOf(({ spans }) => spans.dueIn),
    arrayOf(({ spans }) => spans.dropIn),
    `{${starts.join()}}`,
    `{${items.map(({ bytes }, n) => (starts[n] as number) + headEnd(bytes)).join()}}`,
    `{${items.map(({ bytes }, n) => (starts[n] as number) + bytes.length).join()}}`,
    Buffer.concat(items.map(({ bytes }) => bytes)),
  ]
}

/** `\\x` and 16 bytes. */
const TOKEN_LENGTH = 34

/** The record assembled from these columns. */
export function bytesOf(stored: SqlRow): Buffer | null {
  const [version, fence, createdAt, updatedAt, due, dropAt, schema, state, token, head, payload] = stored
  if (stored.length === COLUMNS.length && stored.every((column) => column === null)) return null
  if (token?.length !== TOKEN_LENGTH)
    throw new CorruptRecord('the token of the stored record has another length')
  // Parses `\x6162…`. An odd digit would be completed by the next text.
  const isHex = [token, `${head}`, `${payload}`].every((one) => one.startsWith('\\x') && one.length % 2 === 0)
  const rest = `${token.slice(2)}${`${head}`.slice(2)}${`${payload}`.slice(2)}`
  const numbers = [version, fence, createdAt, updatedAt, due, dropAt]
  if (!numbers.every((one) => isNumber(one, MAX_U48)) || ![schema, state].every((one) => isNumber(one, 0xff)))
    throw new CorruptRecord('the stored record has a number out of range')
  const bytes = Buffer.allocUnsafe(PREFIX.end - 16 + rest.length / 2)
  bytes.write('IP', 'latin1')
  bytes[PREFIX.schema] = Number(schema)
  bytes[PREFIX.state] = Number(state)
  const tokenWritten = bytes.write(rest.slice(0, 32), PREFIX.token, 'hex')
  const written = tokenWritten + bytes.write(rest.slice(32), PREFIX.end, 'hex')
  if (!isHex || written * 2 !== rest.length)
    throw new CorruptRecord('PostgreSQL did not write the bytes of the stored record in hex')
  stamp(bytes, {
    version: Number(version),
    fence: Number(fence),
    createdAt: Number(createdAt),
    updatedAt: Number(updatedAt),
    due: Number(due),
    dropAt: Number(dropAt),
  })
  return bytes
}

export function wordsOf(text: string | null | undefined): string[] {
  return text ? text.split(' ') : []
}

/** Parses `due id,due id`. */
export function placesOf(text: string | null | undefined): DuePosition[] {
  if (text === '') return []
  if (text == null || !/^\d{1,16} [\w-]{1,64}(?:,\d{1,16} [\w-]{1,64})*$/.test(text))
    throw nonsense('not a list of places')
  return text.split(',').map((place) => {
    const [due, id = ''] = place.split(' ')
    return { due: Number(due), id }
  })
}

/** Parses a list of texts. */
export function linesOf(json: string | null | undefined): string[] {
  let lines: unknown
  try {
    lines = JSON.parse(json ?? '[]')
  } catch {
    // Refused below.
  }
  if (Array.isArray(lines) && lines.every((line) => typeof line === 'string')) return lines
  throw new CorruptRecord('the history of the stored record is not a list of texts')
}
