import {
  type CompletedResponse,
  type Fingerprint,
  IDENTIFIERS,
  type IdempotencyRecord,
  type Millis,
  NOT_KEPT,
  newReconciliation,
  type Reconciliation,
  type RecordDraft,
  type Spans,
  STATES,
  type State,
} from '../core/record.ts'
import { BinaryReader, BinaryWriter, U48 } from './binary.ts'
import { type Condition, CorruptRecord, type Stamp } from './register.ts'

/*
 * The record format, schema 1. Fixed for good: a change would orphan live records (docs/record-format.md).
 *
 *   0  2  magic "IP"          16 16  owner's token           44 6  due (lease, next look or retention ends)
 *   2  1  schema              32  6  createdAt                50 6  dropAt
 *   3  1  state (1..5)        38  6  updatedAt                56 4  length of the head that follows
 *   4  6  version
 *  10  6  fence               all numbers big-endian
 *
 * The head (see `encodeDraft`), then the payload: the response's head and body, which `coding` may say is compressed and
 * `sealing` may say is encrypted. Stores read and stamp only the first 56 bytes; a renewal also the flags, the head's first byte.
 */
export const PREFIX = {
  schema: 2,
  state: 3,
  version: 4,
  fence: 10,
  token: 16,
  createdAt: 32,
  updatedAt: 38,
  due: 44,
  dropAt: 50,
  end: 56,
} as const
export const SCHEMA = 1
const HEAD_AT = 60
const FLAG_LEASE_EXPIRED = 1
const FLAG_DEAD_LETTERED = 2
/** The count stops here: a client may retry for ever. */
const MAX_ATTEMPTS = 0xffff
const RESPONSE_NONE = 0
const RESPONSE_KEPT = 1
const RESPONSE_NOT_KEPT = 2

export function stateCode(state: State): number {
  return STATES.indexOf(state) + 1
}

/** The store fills in the stamps. */
export function encodeDraft(draft: RecordDraft): Buffer {
  const response = draft.state === 'completed' ? draft.result : null
  const w = new BinaryWriter(512 + (response?.kept ? response.response.body.length : 0))
  w.ascii('IP')
  w.u8(SCHEMA)
  w.u8(stateCode(draft.state))
  w.u48(0)
  w.u48(draft.fence)
  w.bytes(draft.token)
  w.u48(draft.createdAt)
  w.zeros(3 * U48)
  const lengthAt = w.at
  w.u32(0)
  w.u8(flagsOf(draft))
  w.u16(Math.min(draft.attempts, MAX_ATTEMPTS))
  w.bytes(draft.fingerprint)
  w.bytes(draft.rawDigest)
  w.text(draft.recipe)
  w.text(draft.route)
  w.text(draft.method)
  w.text(draft.path)
  w.text(draft.lastError ?? '')
  w.u16(draft.state === 'unknown' ? (draft.status ?? 0) : 0)
  const extensions = extensionsOf(draft)
  w.u8(extensions.length)
  for (const [name, value] of extensions) {
    w.text(name)
    w.text(value)
  }
  encodeResultHead(w, response)
  w.u32At(lengthAt, w.at - HEAD_AT)
  if (response?.kept) {
    w.lines(response.response.headers)
    w.lines(response.response.trailers)
    w.u32(response.response.body.length)
    w.bytes(response.response.body)
  }
  return w.done()
}

function flagsOf(draft: RecordDraft): number {
  if (draft.state !== 'unknown') return 0
  const { leaseExpired, reconciliation } = draft
  return (leaseExpired ? FLAG_LEASE_EXPIRED : 0) | (reconciliation?.deadLettered ? FLAG_DEAD_LETTERED : 0)
}

/** Whatever the first release did not know, by name: a release skips names that it does not know. Only what there is is written. */
function extensionsOf(draft: RecordDraft): [name: string, value: string][] {
  const named: [string, string][] = []
  if (draft.key !== null) named.push(['key', draft.key])
  if (draft.keySent !== undefined) named.push(['key-sent', draft.keySent])
  if (draft.told !== undefined) named.push(['told', draft.told.join(' ')])
  if (draft.toldTo !== undefined) named.push(['told-to', draft.toldTo])
  if (draft.span !== undefined) named.push(['span', draft.span])
  const reconciliation = draft.state === 'unknown' ? draft.reconciliation : null
  if (reconciliation === null) return named
  named.push(['since', String(reconciliation.since)])
  if (reconciliation.asked > 0) named.push(['asked', String(reconciliation.asked)])
  if (reconciliation.notFound > 0) named.push(['not-found', String(reconciliation.notFound)])
  if (reconciliation.reported) named.push(['reported', ''])
  if (reconciliation.answer !== null) named.push(['answer', reconciliation.answer])
  return named
}

function reconciliationOf(named: ReadonlyMap<string, string>, deadLettered: boolean): Reconciliation | null {
  const since = named.get('since')
  if (since === undefined) return null
  return {
    ...newReconciliation(Number(since)),
    asked: Number(named.get('asked') ?? 0),
    notFound: Number(named.get('not-found') ?? 0),
    deadLettered,
    reported: named.has('reported'),
    answer: named.get('answer') ?? null,
  }
}

function encodeResultHead(w: BinaryWriter, result: CompletedResponse | null): void {
  if (result === null) {
    w.u8(RESPONSE_NONE)
  } else if (result.kept) {
    w.u8(RESPONSE_KEPT)
    w.u8(0) // coding of the payload: 0 none (1 gzip, 2 zstd: reserved)
    w.u8(0) // sealing of the payload: 0 none (1 AES-256-GCM: reserved)
    w.u16(result.response.status)
    w.latin1(result.response.reason)
  } else {
    w.u8(RESPONSE_NOT_KEPT)
    w.u8(NOT_KEPT.indexOf(result.why) + 1)
    w.u16(result.status)
    w.u8(result.location === null ? 0 : 1)
    w.latin1(result.location ?? '')
  }
}

/** @throws {CorruptRecord} for anything that this version did not write. */
export function decodeRecord(bytes: Buffer): IdempotencyRecord {
  if (bytes.length < HEAD_AT || bytes[0] !== 0x49 || bytes[1] !== 0x50)
    throw new CorruptRecord(`the stored record does not begin with "IP" (${bytes.length} bytes)`)
  if (bytes[PREFIX.schema] !== SCHEMA)
    throw new CorruptRecord(
      `the stored record has schema version ${bytes[PREFIX.schema]}; this version reads ${SCHEMA}`,
    )
  const state = STATES[bytes.readUInt8(PREFIX.state) - 1]
  if (state === undefined) throw new CorruptRecord(`the stored record has state ${bytes[PREFIX.state]}`)
  const due = u48(bytes, PREFIX.due)
  const head = HEAD_AT + bytes.readUInt32BE(PREFIX.end)
  const r = new BinaryReader(bytes.subarray(0, head), HEAD_AT)
  if (head > bytes.length) throw new CorruptRecord(`the stored record is cut off at ${bytes.length} bytes`)
  const flags = r.u8()
  const fixed = {
    version: u48(bytes, PREFIX.version),
    fence: u48(bytes, PREFIX.fence),
    token: bytes.subarray(PREFIX.token, PREFIX.createdAt),
    createdAt: u48(bytes, PREFIX.createdAt),
    updatedAt: u48(bytes, PREFIX.updatedAt),
    dropAt: u48(bytes, PREFIX.dropAt),
    attempts: r.u16(),
    fingerprint: r.take(32) as Fingerprint,
    rawDigest: r.take(32),
    recipe: r.text(),
    route: r.text(),
    method: r.text(),
    path: r.text(),
    lastError: r.text() || null,
  }
  const status = r.u16() || null
  const named = new Map<string, string>()
  for (let extensions = r.u8(); extensions > 0; extensions--) named.set(r.text(), r.text())
  const keySent = named.get('key-sent')
  const told = IDENTIFIERS.filter((name) => named.get('told')?.split(' ').includes(name))
  const toldTo = named.get('told-to')
  const span = named.get('span')
  const common = {
    ...fixed,
    key: named.get('key') ?? null,
    ...(keySent === undefined ? {} : { keySent }),
    ...(told.length === 0 ? {} : { told }),
    ...(toldTo === undefined ? {} : { toldTo }),
    ...(span === undefined ? {} : { span }),
  }
  const payload = new BinaryReader(bytes, head)
  const result = decodeResult(r, payload)
  r.end()
  payload.end()
  switch (state) {
    case 'in_progress':
      return { ...common, state, leaseUntil: due }
    case 'unknown':
      return {
        ...common,
        state,
        nextLookAt: due,
        leaseExpired: (flags & FLAG_LEASE_EXPIRED) !== 0,
        status,
        reconciliation: reconciliationOf(named, (flags & FLAG_DEAD_LETTERED) !== 0),
      }
    case 'failed_retryable':
    case 'expired':
      return { ...common, state }
    case 'completed':
      if (result === null) throw new CorruptRecord('the stored record is completed and has no result')
      return { ...common, state, expiresAt: due, result }
  }
}

function decodeResult(r: BinaryReader, payload: BinaryReader): CompletedResponse | null {
  const kind = r.u8()
  if (kind === RESPONSE_NONE) return null
  if (kind === RESPONSE_NOT_KEPT) {
    const why = NOT_KEPT[r.u8() - 1]
    if (why === undefined)
      throw new CorruptRecord('the stored record does not say why its response was not kept')
    const status = r.u16()
    const hasLocation = r.u8() === 1
    const location = r.latin1()
    return { kept: false, why, status, location: hasLocation ? location : null }
  }
  if (kind !== RESPONSE_KEPT) throw new CorruptRecord(`the stored record has a response of kind ${kind}`)
  const coding = r.u8()
  const sealing = r.u8()
  if (coding !== 0 || sealing !== 0)
    throw new CorruptRecord(
      `the stored response has coding ${coding} and sealing ${sealing}; this version reads 0 and 0`,
    )
  const status = r.u16()
  const reason = r.latin1()
  const headers = payload.lines()
  const trailers = payload.lines()
  return { kept: true, response: { status, reason, headers, trailers, body: payload.take(payload.u32()) } }
}

export interface Stamps {
  readonly version: number
  readonly fence: number
  readonly createdAt: Millis
  readonly updatedAt: Millis
  readonly due: Millis
  readonly dropAt: Millis
}

/** In place. */
export function stamp(bytes: Buffer, s: Stamps): void {
  bytes.writeUIntBE(s.version, PREFIX.version, U48)
  bytes.writeUIntBE(s.fence, PREFIX.fence, U48)
  bytes.writeUIntBE(s.createdAt, PREFIX.createdAt, U48)
  bytes.writeUIntBE(s.updatedAt, PREFIX.updatedAt, U48)
  bytes.writeUIntBE(s.due, PREFIX.due, U48)
  bytes.writeUIntBE(s.dropAt, PREFIX.dropAt, U48)
}

export function readStamps(bytes: Buffer): Stamps {
  return {
    version: u48(bytes, PREFIX.version),
    fence: u48(bytes, PREFIX.fence),
    createdAt: u48(bytes, PREFIX.createdAt),
    updatedAt: u48(bytes, PREFIX.updatedAt),
    due: u48(bytes, PREFIX.due),
    dropAt: u48(bytes, PREFIX.dropAt),
  }
}

/** In a state that the index of unresolved records holds. */
export function isUnresolved(bytes: Buffer): boolean {
  const code = bytes[PREFIX.state]
  return code === stateCode('in_progress') || code === stateCode('unknown')
}

/** In a state that watchers are told of (see `Watching`). */
export function endsAttempt(bytes: Buffer): boolean {
  return bytes[PREFIX.state] !== stateCode('in_progress')
}

/** A record of another schema meets no condition. */
export function meets(bytes: Buffer, condition: Condition): boolean {
  if (bytes.length < PREFIX.end || bytes[0] !== 0x49 || bytes[1] !== 0x50 || bytes[PREFIX.schema] !== SCHEMA)
    return false
  if ('version' in condition) return u48(bytes, PREFIX.version) === condition.version
  const state = STATES[bytes.readUInt8(PREFIX.state) - 1]
  return (
    state !== undefined &&
    condition.states.includes(state) &&
    bytes.compare(condition.token, 0, 16, PREFIX.token, PREFIX.createdAt) === 0
  )
}

/** The attempt is in progress, or unknown only because its owner was silent, which the renewal ends. */
export function mayRenew(bytes: Buffer, token: Buffer): boolean {
  if (meets(bytes, { token, states: ['in_progress'] })) return true
  return meets(bytes, { token, states: ['unknown'] }) && (Number(bytes[HEAD_AT]) & FLAG_LEASE_EXPIRED) !== 0
}

/** Up to this size a record carries no body to speak of. A full store still accepts it in a swap: no executed outcome is lost. */
export const SMALL_RECORD = 4096

/** A stamped copy of `bytes`, as `Register.put` (`previous` null) and `Register.swap` define it. For stores that stamp in JavaScript. */
export function stampCopy(
  bytes: Buffer,
  previous: Buffer | null,
  now: Millis,
  spans: Spans,
  nextFence: boolean,
): { bytes: Buffer; stamp: Stamp; due: Millis; dropAt: Millis } {
  const copy = Buffer.from(bytes)
  const own = readStamps(copy)
  const old = previous === null ? null : readStamps(previous)
  const s = {
    version: old === null ? now : old.version + 1,
    fence: old === null ? own.fence || now : Math.max(own.fence, old.fence + (nextFence ? 1 : 0)),
    createdAt: old === null ? own.createdAt || now : old.createdAt,
    updatedAt: now,
    due: now + spans.dueIn,
    dropAt: now + spans.dropIn,
  }
  stamp(copy, s)
  const { version, fence, createdAt, due, dropAt } = s
  return { bytes: copy, stamp: { version, fence, createdAt }, due, dropAt }
}

/** A copy of the owner's record, in progress, with its lease extended, and its retention if that would end sooner. */
export function prolongLease(
  bytes: Buffer,
  now: Millis,
  { dueIn, dropIn }: Spans,
): { bytes: Buffer; due: Millis; dropAt: Millis } {
  const copy = Buffer.from(bytes)
  const old = readStamps(copy)
  const due = now + dueIn
  const dropAt = Math.max(old.dropAt, now + dropIn)
  stamp(copy, { ...old, version: old.version + 1, due, dropAt })
  // Nobody reads what else the head of a record in progress says.
  copy[PREFIX.state] = stateCode('in_progress')
  copy[HEAD_AT] = 0
  return { bytes: copy, due, dropAt }
}

function u48(bytes: Buffer, at: number): number {
  return bytes.readUIntBE(at, U48)
}
