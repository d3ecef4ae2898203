import fc from 'fast-check'
import t from 'tap'
import {
  type CompletedResponse,
  type Fingerprint,
  NOT_KEPT,
  newReconciliation,
  type RecordDraft,
  STATES,
} from '../../src/core/record.ts'
import {
  decodeRecord,
  encodeDraft,
  HEAD_AT,
  isUnresolved,
  keptIn,
  nextStamps,
  PREFIX,
  prolongLease,
  readStamps,
  stamp,
  stateCode,
  storedSpans,
} from '../../src/store/record/codec.ts'
import { bytesOf, draft, newToken, response } from './fixtures.ts'

/** Plain objects, as the code makes them. */
const record = <T>(model: { [K in keyof T]: fc.Arbitrary<T[K]> }) =>
  fc.record(model, { noNullPrototype: true })

const u48 = fc.integer({ min: 0, max: 2 ** 48 - 1 })
const u16 = fc.integer({ min: 0, max: 0xffff })
const text = fc.string({ unit: 'grapheme', maxLength: 40, size: 'max' })
const octets = (length: number) =>
  fc.uint8Array({ minLength: length, maxLength: length }).map((a) => Buffer.from(a))
const latin1 = fc.uint8Array({ maxLength: 40, size: 'max' }).map((a) => Buffer.from(a).toString('latin1'))
const body = fc.uint8Array({ maxLength: 2000, size: 'max' }).map((a) => Buffer.from(a))
const lines = fc.array(latin1, { maxLength: 12, size: 'max' })

const result = fc.oneof(
  record({
    kept: fc.constant(true as const),
    response: record({ status: u16, reason: latin1, headers: lines, trailers: lines, body }),
  }),
  record({
    kept: fc.constant(true as const),
    response: record({ status: u16, reason: latin1, headers: lines, trailers: lines, body }),
    afterBody: fc.integer({ min: 1, max: 2 ** 48 }),
  }),
  record({
    kept: fc.constant(false as const),
    why: fc.constantFrom(...NOT_KEPT),
    status: u16,
    location: fc.option(latin1),
  }),
)
const reconciliation = record({
  since: u48,
  asked: u16,
  notFound: u16,
  deadLettered: fc.boolean(),
  reported: fc.boolean(),
  answer: fc.option(text),
})
const variant = fc.oneof(
  fc.constantFrom({ state: 'in_progress' }, { state: 'failed_retryable' }, { state: 'expired' }),
  record({ state: fc.constant('completed'), result }),
  record({
    state: fc.constant('unknown'),
    leaseExpired: fc.boolean(),
    status: fc.option(fc.integer({ min: 1, max: 999 })),
    reconciliation: fc.option(reconciliation),
  }),
)
const common = record({
  route: text,
  method: text,
  path: text,
  recipe: text,
  fingerprint: octets(32) as fc.Arbitrary<Fingerprint>,
  rawDigest: octets(32),
  key: fc.option(text),
  token: octets(16),
  fence: u48,
  createdAt: u48,
  attempts: u16,
  lastError: fc.option(fc.string({ minLength: 1, maxLength: 40, size: 'max' })),
})
const told = fc.constantFrom(
  {},
  { received: ['key'] as const },
  { received: ['record'] as const },
  { received: ['key', 'record'] as const },
  { received: ['key'] as const, receivedBy: 'abcdefgh' },
)
const sent = fc
  .tuple(fc.oneof(fc.constant({}), record({ keySent: text }), record({ label: text, parts: text })), told)
  .map(([a, b]) => ({ ...a, ...b }))
const traced = fc.oneof(record({}), record({ span: text }))
const drafts: fc.Arbitrary<RecordDraft> = fc
  .tuple(common, sent, traced, variant)
  .map(([a, b, c, d]) => ({ ...a, ...b, ...c, ...d }))

function afterBodyOf(written: RecordDraft): number {
  return written.state === 'completed' && written.result.kept ? (written.result.afterBody ?? 0) : 0
}

void t.test('a record keeps the terms of a completion until it is completed or expired', async (t) => {
  const completion = '1 2 3 4'
  for (const state of STATES) {
    const read = decodeRecord(bytesOf(state, newToken(), { completion }))
    t.equal(read.completion, state === 'completed' || state === 'expired' ? undefined : completion, state)
  }
})

void t.test('V08 a record keeps the lease of its claim while it is in progress or unknown', async (t) => {
  for (const state of STATES) {
    const read = decodeRecord(bytesOf(state, newToken(), { lease: 30_000 }))
    t.equal(read.lease, state === 'in_progress' || state === 'unknown' ? 30_000 : undefined, state)
  }
})

void t.test('a record decodes to what was written and stamped', async (t) => {
  const stamps = record({
    version: u48,
    fence: u48,
    createdAt: u48,
    updatedAt: u48,
    due: u48,
    dropAt: u48,
  })
  fc.assert(
    fc.property(drafts, stamps, (written, s) => {
      const bytes = encodeDraft(written)
      stamp(bytes, s)
      t.strictSame(readStamps(bytes), s)
      const { due, ...times } = s
      const dated = {
        in_progress: { leaseUntil: due },
        completed: { expiresAt: due + afterBodyOf(written) },
        unknown: { nextLookAt: due },
        failed_retryable: {},
        expired: {},
      }[written.state]
      t.strictSame(decodeRecord(bytes), { ...written, ...times, ...dated })
    }),
  )
})

void t.test('the prefix has the big-endian layout of docs/record-format.md', async (t) => {
  const token = Buffer.from('000102030405060708090a0b0c0d0e0f', 'hex')
  const bytes = bytesOf('unknown', token)
  stamp(bytes, { version: 1, fence: 2, createdAt: 3, updatedAt: 4, due: 5, dropAt: 2 ** 48 - 1 })
  t.equal(
    bytes.subarray(0, PREFIX.end).toString('hex'),
    [
      '4950',
      '01',
      '04',
      '000000000001',
      '000000000002',
      token.toString('hex'),
      '000000000003',
      '000000000004',
      '000000000005',
      'ffffffffffff',
    ].join(''),
  )
})

type Over = Partial<RecordDraft> & { result?: CompletedResponse }

void t.test('heads and payloads have the layout of docs/record-format.md', async (t) => {
  const operation = { recipe: 'v1', route: 'r', method: 'M', path: '/ü' }
  const texts = [hexOf('v1'), hexOf('r'), hexOf('M'), '000000032fc3bc', '00000000'].join('')
  const everything = {
    label: 'o',
    key: 'k',
    keySent: '"k"',
    received: ['key', 'record'],
    receivedBy: 'abcdefgh',
    lease: 30_000,
    span: '00-1',
    completion: '1 2',
  } as const
  const named = `08${[
    'label',
    'o',
    'key',
    'k',
    'key-sent',
    '"k"',
    'told',
    'key record',
    'told-to',
    'abcdefgh',
  ]
    .concat(['lease', '30000', 'span', '00-1', 'completion', '1 2'])
    .map(hexOf)
    .join('')}`
  const checked = { ...newReconciliation(4000), deadLettered: true, reported: true, answer: '404' }
  const asked = { ...newReconciliation(4000), asked: 1, notFound: 1 }
  const notKept = (why: (typeof NOT_KEPT)[number], location: string | null): Over => ({
    result: { kept: false, why, status: 201, location },
  })
  const kept = { ...response(Buffer.from('{}')), afterBody: 1 } as CompletedResponse
  const payload = [
    '00000004',
    ...['Set-Cookie', 'a=1', 'set-cookie'].map(hexOf),
    '00000006623d22e98022',
    `00000002${hexOf('X-Sum')}${hexOf('1')}`,
    hexOf('{}'),
  ]
  const cases: [state: (typeof STATES)[number], Over, flags: string, rest: string][] = [
    ['in_progress', everything, '00', `0000${named}00`],
    ['failed_retryable', {}, '00', '00000000'],
    ['expired', {}, '00', '00000000'],
    ['unknown', { leaseExpired: true, status: 502 }, '01', '01f60000'],
    [
      'unknown',
      { reconciliation: checked },
      '02',
      `000003${['since', '4000', 'reported', '', 'answer', '404'].map(hexOf).join('')}00`,
    ],
    [
      'unknown',
      { reconciliation: asked },
      '00',
      `000003${['since', '4000', 'asked', '1', 'not-found', '1'].map(hexOf).join('')}00`,
    ],
    [
      'completed',
      { result: kept },
      '04',
      `000001${hexOf('after-body')}${hexOf('1')}01000000c9${hexOf('Created')}${payload.join('')}`,
    ],
    ['completed', notKept('too_large', null), '00', '000000020100c90000000000'],
    ['completed', notKept('streamed', ''), '00', '000000020200c90100000000'],
    ['completed', notKept('outcome_only', '/1'), '00', `000000020300c901${hexOf('/1')}`],
    ['completed', notKept('no_room', null), '00', '000000020400c90000000000'],
    [
      'completed',
      notKept('past_ttl', null),
      '00',
      `000001${hexOf('after-body')}${hexOf('')}020300c90000000000`,
    ],
  ]
  for (const [state, over, flags, rest] of cases) {
    const bytes = bytesOf(state, newToken(), { ...operation, ...over })
    t.equal(
      bytes.toString('hex', HEAD_AT),
      `${flags}0001${'ab'.repeat(32)}${'cd'.repeat(32)}${texts}${rest}`,
      `${state} ${JSON.stringify(over)}`,
    )
    t.match(decodeRecord(bytes), over)
    const payloadAt = HEAD_AT + bytes.readUInt32BE(PREFIX.end)
    t.same(keptIn(bytes), over.result?.kept ? { codingAt: payloadAt - 15, payloadAt } : null)
  }
})

void t.test('for a response that expires before its record, due is its end', async (t) => {
  const token = newToken()
  const result = { ...response(), afterBody: 82_800_000 } as CompletedResponse
  const there = draft('completed', token, { result })
  t.same(storedSpans(there, { dueIn: 86_400_000, dropIn: 90_000_000 }), {
    dueIn: 3_600_000,
    dropIn: 90_000_000,
  })
  const spans = { dueIn: 5, dropIn: 9 }
  for (const other of [draft('completed', token), draft('unknown', token)])
    t.equal(storedSpans(other, spans), spans)
})

void t.test('a record that does not say how long it outlives its response is corrupt', async (t) => {
  const result = { ...response(), afterBody: 1000 } as CompletedResponse
  const bytes = bytesOf('completed', newToken(), { result })
  const at = bytes.indexOf('after-body') + 'after-body'.length + 4
  for (const wrong of ['1e99', '-100', '0000', '1.50', 'many', '\0\0\0\0']) {
    bytes.write(wrong, at, 'latin1')
    t.throws(() => decodeRecord(bytes), { name: 'CorruptRecord', message: /outlives/ }, wrong)
  }
})

void t.test('a malformed number among the extensions is reported by name', async (t) => {
  const operation = {
    lease: 3000,
    reconciliation: { ...newReconciliation(4000), asked: 5000, notFound: 6000 },
  }
  for (const [name, digits] of [
    ['lease', '3000'],
    ['since', '4000'],
    ['asked', '5000'],
    ['not-found', '6000'],
  ] as const)
    for (const wrong of ['1e99', '-100', '1.50', 'many', '    ', '\0\0\0\0']) {
      const bytes = bytesOf('unknown', newToken(), operation)
      t.doesNotThrow(() => decodeRecord(bytes))
      const at = bytes.indexOf(digits, bytes.indexOf(name) + name.length)
      bytes.write(wrong, at, 'latin1')
      const message = `the stored record has ${name} ${JSON.stringify(wrong)}; allowed: digits`
      t.throws(() => decodeRecord(bytes), { name: 'CorruptRecord', message })
    }
})

/** A text with its length, in hex. */
function hexOf(text: string): string {
  return `${text.length.toString(16).padStart(8, '0')}${Buffer.from(text).toString('hex')}`
}

void t.test('a truncated or extended record is corrupt', async (t) => {
  for (const state of ['in_progress', 'completed', 'failed_retryable', 'unknown', 'expired'] as const) {
    const bytes = bytesOf(state, newToken())
    t.equal(decodeRecord(bytes).state, state)
    for (let end = 0; end < bytes.length; end++) {
      const message = end < HEAD_AT ? /does not begin with "IP"/ : new RegExp(`is cut off at ${end} bytes`)
      t.throws(
        () => decodeRecord(bytes.subarray(0, end)),
        { name: 'CorruptRecord', message },
        `${state} cut at ${end}`,
      )
    }
    t.throws(() => decodeRecord(Buffer.concat([bytes, Buffer.alloc(1)])), { name: 'CorruptRecord' })
  }
})

void t.test('anything that only a later release may write is refused and named', async (t) => {
  const completed = bytesOf('completed', newToken(), {
    result: { kept: false, why: 'streamed', status: 200, location: null },
  })
  const kept = bytesOf('completed', newToken())
  const headEnd = (bytes: Buffer) => PREFIX.end + 4 + bytes.readUInt32BE(PREFIX.end)
  // From the end of the head backwards: see `encodeResultHead`.
  const changed = (bytes: Buffer, at: number, value: number) => {
    const copy = Buffer.from(bytes)
    copy[at] = value
    return copy
  }
  const cases: [RegExp, Buffer][] = [
    [/does not begin with "IP"/, changed(kept, 0, 0x69)],
    [/does not begin with "IP"/, changed(kept, 1, 0x70)],
    [/schema version 2; this version reads 1/, changed(kept, PREFIX.schema, 2)],
    [/state 6/, changed(kept, PREFIX.state, 6)],
    [/state 0/, changed(kept, PREFIX.state, 0)],
    [/completed and has no result/, changed(bytesOf('unknown', newToken()), PREFIX.state, 2)],
    [/does not say why/, changed(completed, headEnd(completed) - 8, 9)],
    [/response of kind 7/, changed(completed, headEnd(completed) - 9, 7)],
    [/coding 3; this version reads 0 to 2/, changed(kept, headEnd(kept) - 15, 3)],
    [/sealing 1; this version reads 0/, changed(kept, headEnd(kept) - 14, 1)],
  ]
  for (const [message, bytes] of cases)
    t.throws(() => decodeRecord(bytes), { name: 'CorruptRecord', message })
})

void t.test('head extensions of a later release are skipped; other unknown bytes are corrupt', async (t) => {
  const bytes = bytesOf('in_progress', newToken())
  // Their count is the second to last byte of a head without a response.
  const extension = Buffer.concat([
    Buffer.from([0, 0, 0, 1]),
    Buffer.from('a'),
    Buffer.from([0, 0, 0, 2]),
    Buffer.from('bc'),
  ])
  const extended = Buffer.concat([bytes.subarray(0, -2), Buffer.from([1]), extension, Buffer.from([0])])
  extended.writeUInt32BE(bytes.readUInt32BE(PREFIX.end) + extension.length, PREFIX.end)
  t.strictSame(decodeRecord(extended), decodeRecord(bytes))
  const longer = Buffer.concat([bytes, Buffer.from([0])])
  longer.writeUInt32BE(bytes.readUInt32BE(PREFIX.end) + 1, PREFIX.end)
  t.throws(() => decodeRecord(longer), {
    name: 'CorruptRecord',
    message: /bytes that this version cannot read/,
  })
})

void t.test('strings of any length survive encoding, whatever is around them', async (t) => {
  const lengths = [0, 1, 12, 40, 41, 199, 200, 201, 1023, 1024, 1025, 5000]
  for (const first of lengths)
    for (const second of lengths) {
      const [path, recipe] = ['p'.repeat(first), `${'r'.repeat(second)}ü`]
      const headers = ['a'.repeat(first), '\xe9'.repeat(second), 'c', 'd'.repeat(first)]
      const { result } = { result: response(Buffer.alloc(first, 7)) }
      if (!result.kept) return
      const kept = { ...result, response: { ...result.response, headers } }
      const bytes = encodeDraft(draft('completed', newToken(), { path, recipe, result: kept }))
      t.match(decodeRecord(bytes), { path, recipe, result: kept })
    }
})

void t.test('an attempt count beyond its field is capped at the maximum', async (t) => {
  t.equal(decodeRecord(bytesOf('in_progress', newToken(), { attempts: 70_000 })).attempts, 0xffff)
})

void t.test('state codes are fixed', async (t) => {
  const codes = (['in_progress', 'completed', 'failed_retryable', 'unknown', 'expired'] as const).map(
    stateCode,
  )
  t.same(codes, [1, 2, 3, 4, 5])
  t.ok(isUnresolved(bytesOf('in_progress', newToken())))
  t.ok(isUnresolved(bytesOf('unknown', newToken())))
  t.notOk(isUnresolved(bytesOf('completed', newToken())))
})

void t.test('a time that does not fit a stamp is refused', async (t) => {
  const bytes = bytesOf('in_progress', newToken())
  stamp(bytes, nextStamps(bytes, null, 1000, { dueIn: -1000, dropIn: 2 ** 48 - 1001 }, false))
  t.match(readStamps(bytes), { due: 0, dropAt: 2 ** 48 - 1 })
  const before = Buffer.from(bytes)
  for (const span of [Number.POSITIVE_INFINITY, Number.NaN, 0.5, 2 ** 48 - 1000, -1001])
    for (const spans of [
      { dueIn: span, dropIn: 5 },
      { dueIn: 5, dropIn: span },
    ]) {
      t.throws(() => nextStamps(bytes, null, 1000, spans, false), { name: 'RangeError' })
      t.throws(() => prolongLease(bytes, 1000, spans), { name: 'RangeError' })
    }
  t.same(bytes, before)
})
