import {
  type Completed,
  type CompletedResponse,
  type Fingerprint,
  IDENTIFIERS,
  type IdempotencyRecord,
  type Millis,
  NOT_KEPT,
  newReconciliation,
  type Operation,
  type Reconciliation,
  type RecordDraft,
  type Spans,
  STATES,
  type State,
} from '../../core/record.ts'
import { unfreed } from '../../runtime/limits.ts'
import { type Condition, CorruptRecord, type DueKind, SealedRecord } from '../register.ts'
import { BinaryReader, BinaryWriter, MAX_U48, readU48, writeU48 } from './binary.ts'
import { decoded } from './compression.ts'

export { U48 } from './binary.ts'

/*
 * The record format, schema 1. Fixed for good: a change would orphan live records (docs/record-format.md).
 *
 *   0  2  magic "IP"          16 16  owner's token           44 6  due (lease, next look or retention ends)
 *   2  1  schema              32  6  createdAt                50 6  dropAt
 *   3  1  state (1..5)        38  6  updatedAt                56 4  length of the head that follows
 *   4  6  version
 *  10  6  fence               all numbers big-endian
 *
 * The head (see `encodeDraft`), then the payload: the response's head and body, which `coding` may say is compressed. A
 * sealed record has another head (`SEALED`). Stores read and stamp only the first 56 bytes; a renewal also the flags, the head's first byte.
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
/** "IP". */
export const MAGIC = 0x4950
export const HEAD_AT = 60
export const FLAG_LEASE_EXPIRED = 1
const FLAG_DEAD_LETTERED = 2
/** A completed record whose response ends before it does, at `due`. */
const FLAG_BODY_ENDS = 4
/** Attempts are counted up to here: a client may retry forever. */
const MAX_ATTEMPTS = 0xffff
const RESPONSE_NONE = 0
const RESPONSE_KEPT = 1
const RESPONSE_NOT_KEPT = 2

/** A sealed record's head after the flags. It ends with the key's id (sealing.ts), so it is shorter than any plain one. */
export const SEALED = { version: 1, state: 2, fence: 3, nonce: 9, keyId: 21 } as const
const SEALING = 1
const KEY_ID = /^[A-Za-z0-9]{1,32}$/

/** The id of the key that seals the record; null: it is not sealed. */
export function sealingKeyOf(bytes: Buffer): string | null {
  if (!isRecord(bytes) || bytes[HEAD_AT + SEALED.version] !== SEALING) return null
  const id = bytes.toString('latin1', HEAD_AT + SEALED.keyId, HEAD_AT + bytes.readUInt32BE(PREFIX.end))
  return KEY_ID.test(id) ? id : null
}

export function stateCode(state: State): number {
  return STATES.indexOf(state) + 1
}

/** Most records need less than this, bodies aside. */
export const HEAD_ROOM = 2048
/** Enough for records without a sizeable body. */
const SMALL_HEAD_ROOM = 512

/** The store fills in the stamps. */
export function encodeDraft(draft: RecordDraft): Buffer {
  const response = draft.state === 'completed' ? draft.result : null
  const body = response?.kept ? response.response.body.length : 0
  const w = new BinaryWriter(body + (body > SMALL_RECORD ? HEAD_ROOM : SMALL_HEAD_ROOM))
  w.u16(MAGIC)
  w.u8(SCHEMA)
  w.u8(stateCode(draft.state))
  w.u48(0)
  w.u48(draft.fence)
  w.bytes(draft.token)
  w.u48(draft.createdAt)
  w.zeros(HEAD_AT - w.at)
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
  w.u32At(PREFIX.end, w.at - HEAD_AT)
  if (response?.kept) {
    w.lines(response.response.headers)
    w.lines(response.response.trailers)
    w.u32(body)
    w.bytes(unfreed(response.response.body))
  }
  return w.done()
}

function flagsOf(draft: RecordDraft): number {
  if (draft.state === 'completed') return afterBodyOf(draft) === 0 ? 0 : FLAG_BODY_ENDS
  if (draft.state !== 'unknown') return 0
  const { leaseExpired, reconciliation } = draft
  return (leaseExpired ? FLAG_LEASE_EXPIRED : 0) | (reconciliation?.deadLettered ? FLAG_DEAD_LETTERED : 0)
}

function afterBodyOf(draft: RecordDraft): Millis {
  return draft.state === 'completed' && draft.result.kept ? (draft.result.afterBody ?? 0) : 0
}

/** The spans for the store to stamp. */
export function storedSpans(draft: RecordDraft, spans: Spans): Spans {
  const afterBody = afterBodyOf(draft)
  return afterBody === 0 ? spans : { ...spans, dueIn: spans.dueIn - afterBody }
}

/** Extensions, the fields newer than the first release, and the members that they hold. */
const EXTENSIONS = [
  ['parts', 'parts'],
  ['label', 'label'],
  ['key', 'key'],
  ['key-sent', 'keySent'],
  ['told', 'received'],
  ['told-to', 'receivedBy'],
  ['lease', 'lease'],
  ['span', 'span'],
  ['completion', 'completion'],
] as const
/**
 * Omitted in these states: nobody waits for the owner any longer, nor may the upstream complete the record. A completed record with
 * `completion` was written by the upstream.
 */
const LEFT_OUT: Readonly<Partial<Record<State, readonly (keyof Operation)[]>>> = {
  failed_retryable: ['lease'],
  completed: ['lease', 'completion'],
  expired: ['lease', 'completion'],
}

/** By name: releases skip names they do not know. Only fields with a value are written. */
function extensionsOf(draft: RecordDraft): [name: string, value: string][] {
  const named: [string, string][] = []
  for (const [name, member] of EXTENSIONS) {
    const value = draft[member]
    if (value == null || LEFT_OUT[draft.state]?.includes(member)) continue
    named.push([name, typeof value === 'object' ? value.join(' ') : String(value)])
  }
  const afterBody = afterBodyOf(draft)
  if (afterBody > 0) named.push(['after-body', String(afterBody)])
  if (draft.state === 'completed' && !draft.result.kept && draft.result.why === 'past_ttl')
    named.push(['after-body', ''])
  const reconciliation = draft.state === 'unknown' ? draft.reconciliation : null
  if (reconciliation === null) return named
  named.push(['since', String(reconciliation.since)])
  if (reconciliation.asked > 0) named.push(['asked', String(reconciliation.asked)])
  if (reconciliation.notFound > 0) named.push(['not-found', String(reconciliation.notFound)])
  if (reconciliation.reported) named.push(['reported', ''])
  if (reconciliation.answer !== null) named.push(['answer', reconciliation.answer])
  return named
}

const NONE: ReadonlyMap<string, string> = new Map()

function namedOf(r: BinaryReader, extensions: number): ReadonlyMap<string, string> {
  const named = new Map<string, string>()
  for (let n = 0; n < extensions; n++) named.set(r.text(), r.text())
  return named
}

function numberIn(named: ReadonlyMap<string, string>, name: string): number | undefined {
  const text = named.get(name)
  if (text === undefined || /^\d{1,15}$/.test(text)) return text === undefined ? text : Number(text)
  throw new CorruptRecord(`the stored record has ${name} ${JSON.stringify(text)}; allowed: digits`)
}

function operationOf(named: ReadonlyMap<string, string>): Partial<Operation> {
  const operation: Partial<Record<keyof Operation, unknown>> = {}
  for (const [name, member] of EXTENSIONS) {
    const text = named.get(name)
    if (text === undefined) continue
    const received = IDENTIFIERS.filter((identifier) => text.split(' ').includes(identifier))
    if (member === 'lease') operation.lease = numberIn(named, name)
    else if (member !== 'received') operation[member] = text
    else if (received.length > 0) operation.received = received
  }
  return operation as Partial<Operation>
}

function reconciliationOf(named: ReadonlyMap<string, string>, deadLettered: boolean): Reconciliation | null {
  const since = numberIn(named, 'since')
  if (since === undefined) return null
  return {
    ...newReconciliation(since),
    asked: numberIn(named, 'asked') ?? 0,
    notFound: numberIn(named, 'not-found') ?? 0,
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
    w.u8(0) // coding of the payload: 0 none, 1 gzip, 2 zstd (packed.ts)
    w.u8(0)
    w.u16(result.response.status)
    w.latin1(result.response.reason)
  } else {
    w.u8(RESPONSE_NOT_KEPT)
    // Releases that know no `ttl.body` read the nearest to it.
    w.u8(NOT_KEPT.indexOf(result.why === 'past_ttl' ? 'outcome_only' : result.why) + 1)
    w.u16(result.status)
    w.u8(result.location === null ? 0 : 1)
    w.latin1(result.location ?? '')
  }
}

/** @throws {CorruptRecord} for anything not written by this version. */
export function decodeRecord(bytes: Buffer): IdempotencyRecord {
  if (bytes.length < HEAD_AT || bytes.readUInt16BE(0) !== MAGIC)
    throw new CorruptRecord(`the stored record does not begin with "IP" (${bytes.length} bytes)`)
  if (bytes[PREFIX.schema] !== SCHEMA)
    throw new CorruptRecord(
      `the stored record has schema version ${bytes[PREFIX.schema]}; this version reads ${SCHEMA}`,
    )
  const state = STATES[bytes.readUInt8(PREFIX.state) - 1]
  if (state === undefined) throw new CorruptRecord(`the stored record has state ${bytes[PREFIX.state]}`)
  const due = readU48(bytes, PREFIX.due)
  const head = HEAD_AT + bytes.readUInt32BE(PREFIX.end)
  refuseSealed(bytes)
  const r = new BinaryReader(bytes.subarray(0, head), HEAD_AT)
  const flags = r.u8()
  const fixed = {
    version: readU48(bytes, PREFIX.version),
    fence: readU48(bytes, PREFIX.fence),
    token: bytes.subarray(PREFIX.token, PREFIX.createdAt),
    createdAt: readU48(bytes, PREFIX.createdAt),
    updatedAt: readU48(bytes, PREFIX.updatedAt),
    dropAt: readU48(bytes, PREFIX.dropAt),
    attempts: r.u16(),
    fingerprint: r.take(32) as Fingerprint,
    rawDigest: r.take(32),
    recipe: r.text(),
    route: r.text(),
    method: r.text(),
    path: r.text(),
    lastError: r.text() || null,
    key: null,
  }
  const status = r.u16() || null
  const extensions = r.u8()
  const named = extensions === 0 ? NONE : namedOf(r, extensions)
  // Most records have no extensions, and copying this many members costs more than reading them.
  const common = extensions === 0 ? fixed : { ...fixed, ...operationOf(named) }
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
      return { ...common, state, ...endsOf(due, result, named.get('after-body')) }
  }
}

/** `afterBody`: how long the record outlives its response, as its extension `after-body` says. */
function endsOf(
  due: Millis,
  result: CompletedResponse,
  afterBody: string | undefined,
): Pick<Completed, 'expiresAt' | 'result'> {
  if (afterBody === undefined) return { expiresAt: due, result }
  if (!result.kept) return { expiresAt: due, result: { ...result, why: 'past_ttl' } }
  const millis = Number(afterBody)
  if (!Number.isSafeInteger(millis) || millis <= 0)
    throw new CorruptRecord('the stored record does not say how long it outlives its response')
  return { expiresAt: due + millis, result: { ...result, afterBody: millis } }
}

/** Bytes before the texts of a head: flags, attempts, two digests. */
const FIXED = 67

/**
 * The positions of a stored response's coding and of its payload. Null: the record has no response, or another schema.
 *
 * @throws {CorruptRecord} if it is cut off.
 */
export function keptIn(bytes: Buffer): { readonly codingAt: number; readonly payloadAt: number } | null {
  if (bytes.length < HEAD_AT || !isRecord(bytes) || bytes[PREFIX.state] !== stateCode('completed'))
    return null
  // Sealed with a key that is not available here.
  if (sealingKeyOf(bytes) !== null) return null
  const payloadAt = HEAD_AT + bytes.readUInt32BE(PREFIX.end)
  const r = new BinaryReader(bytes, HEAD_AT + FIXED)
  for (let texts = 5; texts > 0; texts--) r.skip()
  r.u16()
  for (let texts = 2 * r.u8(); texts > 0; texts--) r.skip()
  return r.u8() === RESPONSE_KEPT ? { codingAt: r.at, payloadAt } : null
}

/** With its key, it would have been opened before. */
function refuseSealed(bytes: Buffer): void {
  const id = sealingKeyOf(bytes)
  if (id === null) return
  const message = `the stored record is sealed with the key ${id}; store.encryption.keys does not have it`
  throw new SealedRecord('unknown_key', message)
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
  if (sealing !== 0)
    throw new CorruptRecord(`the stored response has sealing ${sealing}; this version reads 0`)
  const status = r.u16()
  const reason = r.latin1()
  // If compression is on, it has already been undone (packed.ts).
  const plain = coding === 0 ? payload : new BinaryReader(decoded(payload.rest(), coding), 0)
  const headers = plain.lines()
  const trailers = plain.lines()
  const body = plain.take(plain.u32())
  plain.end()
  return { kept: true, response: { status, reason, headers, trailers, body } }
}

export interface Stamps {
  readonly version: number
  readonly fence: number
  readonly createdAt: Millis
  readonly updatedAt: Millis
  readonly due: Millis
  readonly dropAt: Millis
}

/** Writes the stamps, in place. */
export function stamp(bytes: Buffer, s: Stamps): void {
  writeU48(bytes, s.version, PREFIX.version)
  writeU48(bytes, s.fence, PREFIX.fence)
  writeU48(bytes, s.createdAt, PREFIX.createdAt)
  writeU48(bytes, s.updatedAt, PREFIX.updatedAt)
  writeU48(bytes, s.due, PREFIX.due)
  writeU48(bytes, s.dropAt, PREFIX.dropAt)
}

export function readStamps(bytes: Buffer): Stamps {
  return {
    version: readU48(bytes, PREFIX.version),
    fence: readU48(bytes, PREFIX.fence),
    createdAt: readU48(bytes, PREFIX.createdAt),
    updatedAt: readU48(bytes, PREFIX.updatedAt),
    due: readU48(bytes, PREFIX.due),
    dropAt: readU48(bytes, PREFIX.dropAt),
  }
}

/** Whether the state belongs in the index of unresolved records. */
export function isUnresolved(bytes: Buffer): boolean {
  const code = bytes[PREFIX.state]
  return code === stateCode('in_progress') || code === stateCode('unknown')
}

/** Offset of responses that end before their records: past all instants, so after all unresolved records. */
export const BODIES_FROM = MAX_U48 + 1

/** The record's place in the index: its `due` if unresolved; after these, the end of a response that ends first; null: none. */
export function indexPlace(bytes: Buffer, due: Millis): number | null {
  if (isUnresolved(bytes)) return due
  // Only a completed record has it.
  return (Number(bytes[HEAD_AT]) & FLAG_BODY_ENDS) === 0 ? null : BODIES_FROM + due
}

/** The first and the last possible place of due entries. */
export function placesDue(of: DueKind, now: Millis): { readonly from: number; readonly to: number } {
  const from = of === 'bodies' ? BODIES_FROM : 0
  return { from, to: from + now }
}

export function isClaim(bytes: Buffer): boolean {
  return bytes[PREFIX.state] === stateCode('in_progress')
}

/** Whether watchers are notified of the state (see `Watching`). */
export function endsAttempt(bytes: Buffer): boolean {
  return !isClaim(bytes)
}

function isRecord(bytes: Buffer): boolean {
  return bytes[0] === 0x49 && bytes[1] === 0x50 && bytes[PREFIX.schema] === SCHEMA
}

/** A record with another schema meets no condition. */
export function meets(bytes: Buffer, condition: Condition): boolean {
  if (bytes.length < PREFIX.end || !isRecord(bytes)) return false
  if ('version' in condition) return readU48(bytes, PREFIX.version) === condition.version
  return (
    condition.states.some((state) => bytes[PREFIX.state] === stateCode(state)) &&
    bytes.compare(condition.token, 0, 16, PREFIX.token, PREFIX.createdAt) === 0
  )
}

/** The attempt is in progress, or unknown only because its owner was silent, which the renewal undoes. */
export function mayRenew(bytes: Buffer, token: Buffer): boolean {
  if (meets(bytes, { token, states: ['in_progress'] })) return true
  return meets(bytes, { token, states: ['unknown'] }) && (Number(bytes[HEAD_AT]) & FLAG_LEASE_EXPIRED) !== 0
}

/** Records up to this size have no sizeable body. A full store still accepts them in a swap, so that no outcome is lost. */
export const SMALL_RECORD = 4096

/** Stamps `bytes` as `Register.put` (`old` null) and `Register.swap` define. For stores that stamp in JavaScript. */
export function nextStamps(
  bytes: Buffer,
  old: Stamps | null,
  now: Millis,
  spans: Spans,
  nextFence: boolean,
): Stamps {
  const fence = readU48(bytes, PREFIX.fence)
  return {
    version: old === null ? now : old.version + 1,
    fence: old === null ? fence || now : Math.max(fence, old.fence + (nextFence ? 1 : 0)),
    createdAt: old === null ? readU48(bytes, PREFIX.createdAt) || now : old.createdAt,
    updatedAt: now,
    due: instant(now + spans.dueIn),
    dropAt: instant(now + spans.dropIn),
  }
}

/** @throws {RangeError} for a number that would be stamped as a different one: a record dropped too soon is executed again. */
function instant(at: Millis): Millis {
  if (Number.isSafeInteger(at) && at >= 0 && at <= MAX_U48) return at
  throw new RangeError(`${at} is not an instant`)
}

/** Extends, in place, the lease of the owner's record, which becomes in progress, and its retention if it would end sooner. */
export function prolongLease(bytes: Buffer, now: Millis, { dueIn, dropIn }: Spans): Stamps {
  const old = readStamps(bytes)
  const stamps = {
    ...old,
    version: old.version + 1,
    due: instant(now + dueIn),
    dropAt: Math.max(old.dropAt, instant(now + dropIn)),
  }
  stamp(bytes, stamps)
  // The rest of the head is not read while a record is in progress.
  bytes[PREFIX.state] = stateCode('in_progress')
  bytes[HEAD_AT] = 0
  return stamps
}
