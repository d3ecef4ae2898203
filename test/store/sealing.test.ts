import { createCipheriv, createHmac, randomBytes } from 'node:crypto'
import { readFileSync } from 'node:fs'
import t from 'tap'
import { newReconciliation, type RecordId } from '../../src/core/record.ts'
import { NOBODY } from '../../src/core/settle.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import {
  decodeRecord,
  encodeDraft,
  HEAD_AT,
  PREFIX,
  readStamps,
  stamp,
  stateCode,
} from '../../src/store/record/codec.ts'
import { packed } from '../../src/store/record/packed.ts'
import { Sealer } from '../../src/store/record/sealing.ts'
import { Records } from '../../src/store/records.ts'
import { CorruptRecord, type SealError } from '../../src/store/register.ts'
import { bytesOf, draft, newId, newToken, response, SPANS } from './fixtures.ts'

const [ONE, TWO, THREE] = [0x11, 0x22, 0x33].map((byte, n) => ({
  id: `k${n + 1}`,
  key: Buffer.alloc(32, byte),
})) as [Key, Key, Key]
type Key = { readonly id: string; readonly key: Buffer }

const ALTERED = { message: /it was altered since it was sealed/ }
const STATES = ['in_progress', 'completed', 'failed_retryable', 'unknown', 'expired'] as const
const FENCE = 1_795_000_000_000
const SECRETS = { path: '/secret-path', lastError: 'secret-error', key: 'secret-key' }

/** A record as it comes back from a store, stamped. */
function stored(sealed: Buffer, fence = FENCE): Buffer {
  const bytes = Buffer.from(sealed)
  stamp(bytes, { version: 1, fence, createdAt: 2, updatedAt: 3, due: 4, dropAt: 5 })
  return bytes
}

/** The record as a request reads it. */
function read(sealer: Sealer, id: RecordId, bytes: Buffer) {
  return decodeRecord(sealer.open(id, bytes))
}

void t.test('a record opens as it was sealed, with the stamps of the store', async (t) => {
  const sealer = new Sealer([ONE])
  for (const state of STATES) {
    const id = newId()
    const plain = bytesOf(state, newToken(), { fence: FENCE, ...SECRETS })
    const sealed = sealer.seal(id, plain)
    t.notMatch(sealed.toString('latin1'), /secret|create-payment|Created|Set-Cookie/)
    t.notOk(sealed.includes(Buffer.alloc(16, 0xab)), 'nor the fingerprint')
    t.strictSame(sealer.open(id, stored(sealed)), stored(plain))
    t.not(sealer.seal(id, plain).equals(sealed), 'another nonce each time')
  }
})

void t.test('bytes that are not sealed are returned unchanged', async (t) => {
  const sealer = new Sealer([ONE])
  // Its second byte is that of a sealed head, and what follows could be a name.
  const tried = bytesOf('completed', newToken(), { attempts: 300, rawDigest: Buffer.alloc(32, 'a') })
  t.match(decodeRecord(tried), { attempts: 300 })
  for (const bytes of [
    bytesOf('completed', newToken()),
    tried,
    Buffer.alloc(0),
    Buffer.alloc(100),
    Buffer.from('IP'),
  ])
    t.equal(sealer.open(newId(), bytes), bytes)
})

void t.test('W08 what this release cannot have sealed is not called sealed', async (t) => {
  const sealer = new Sealer([ONE])
  const sealed = sealer.seal(newId(), bytesOf('completed', newToken()))
  for (const [what, at, value, message] of [
    ['the magic', 0, 0x69, /begin with "IP"/],
    ['the schema', PREFIX.schema, 2, /schema version 2/],
    ['the version of the sealing', HEAD_AT + 1, 2, /cut off/],
    ['a character of the name', HEAD_AT + 21, 0x2d, /cut off/],
  ] as const) {
    const bytes = Buffer.from(sealed)
    bytes[at] = value
    t.equal(sealer.open(newId(), bytes), bytes, what)
    t.throws(() => decodeRecord(bytes), { name: 'CorruptRecord', message }, what)
  }
})

void t.test('W08 in a rotation, replicas one step apart open what each other seals', async (t) => {
  const steps = [[ONE], [ONE, TWO], [TWO, ONE], [TWO]].map((keys) => new Sealer(keys))
  const id = newId()
  const plain = stored(bytesOf('completed', newToken()))
  for (const [n, one] of steps.entries())
    for (const other of steps.slice(n, n + 2)) {
      t.strictSame(other.open(id, one.seal(id, plain)), plain)
      t.strictSame(one.open(id, other.seal(id, plain)), plain)
    }
})

void t.test('a record under an unknown key is refused, counted and not overwritten', async (t) => {
  const register = memoryStore({ clock: () => FENCE, maxBytes: MEMORY_BYTES })
  const id = newId()
  const [mine, theirs] = [draft('in_progress', newToken()), draft('in_progress', newToken())]
  await new Records(packed(register, new Sealer([ONE]))).claim(id, mine, SPANS)
  const before = (await register.get(id)).bytes
  for (const store of [register, packed(register, new Sealer([TWO, THREE]))]) {
    const counted: SealError[] = []
    const records = new Records(store, (reason) => counted.push(reason))
    t.match(await records.claim(id, theirs, SPANS), { kind: 'corrupt', error: { message: /key k1;/ } })
    t.match(await records.get(id), { kind: 'corrupt' })
    t.match(await records.settle(id, draft('completed', theirs.token), SPANS), { kind: 'corrupt' })
    t.strictSame(counted, ['unknown_key', 'unknown_key', 'unknown_key'])
    t.strictSame((await register.get(id)).bytes, before)
  }
  const other = new Sealer([{ ...TWO, id: 'k1' }])
  const counted: SealError[] = []
  const records = new Records(packed(register, other), (reason) => counted.push(reason))
  t.match(await records.get(id), { kind: 'corrupt', error: { message: /or the file holds another key/ } })
  t.match(await records.claim(id, theirs, SPANS), { kind: 'corrupt' })
  t.strictSame(counted, ['altered', 'altered'])
  t.match(
    await new Records(packed(register, new Sealer([TWO, ONE]))).settle(
      id,
      draft('completed', mine.token),
      SPANS,
    ),
    { kind: 'written' },
  )
})

void t.test('an answer under an unknown key is refused for that reason, compressed or not', async (t) => {
  const register = memoryStore({ clock: () => FENCE, maxBytes: MEMORY_BYTES })
  const id = newId()
  const result = response(Buffer.alloc(1000, 'an answer'))
  await packed(register, new Sealer([ONE]), 'zstd').put(
    id,
    bytesOf('completed', newToken(), { result }),
    SPANS,
  )
  for (const store of [register, packed(register, new Sealer([TWO]), 'zstd'), packed(register, null, 'gzip')])
    t.match(await new Records(store).get(id), { kind: 'corrupt', error: { reason: 'unknown_key' } })
})

void t.test('W08 a record with a flipped bit is refused, or reads the same', async (t) => {
  const sealer = new Sealer([ONE])
  /** The stamps of the store: they say when a record is due and expires, and whoever can write them can also remove the record. */
  const isStamp = (at: number) =>
    (at >= PREFIX.version && at < PREFIX.fence) || (at >= PREFIX.createdAt && at < PREFIX.end)
  for (const state of STATES)
    for (const fence of [0, FENCE]) {
      const id = newId()
      const leaseExpired = state === 'unknown'
      const written = draft(state, newToken(), { fence, ...SECRETS, leaseExpired })
      const sealed = stored(sealer.seal(id, encodeDraft(written)))
      const opened = sealer.open(id, sealed)
      for (let at = 0; at < sealed.length; at++) {
        // Each bit of the prefix and the head; of what is encrypted, one of each byte.
        const bits = at < PREFIX.end + 30 ? [0, 1, 2, 3, 4, 5, 6, 7] : [at % 8]
        for (const bit of bits) {
          const flipped = Buffer.from(sealed)
          flipped.writeUInt8(flipped.readUInt8(at) ^ (1 << bit), at)
          let found: Buffer
          try {
            found = sealer.open(id, flipped)
            decodeRecord(found)
          } catch (error) {
            if (!(error instanceof CorruptRecord)) throw error
            continue
          }
          const isFence = at >= PREFIX.fence && at < PREFIX.token
          // A claim is written before the store knows its fence, and an outcome may be stamped with a later one.
          const isLater = isFence && (fence === 0 || readStamps(flipped).fence > fence)
          if (!isStamp(at) && !isLater) t.fail(`${state}: bit ${bit} of byte ${at}`)
          if (!stored(found).equals(opened)) t.fail(`${state}: byte ${at} says something else`)
        }
      }
    }
})

void t.test('W08 parts of one record in another are refused', async (t) => {
  const sealer = new Sealer([ONE])
  const id = newId()
  const token = newToken()
  const older = stored(sealer.seal(id, bytesOf('completed', token, { fence: FENCE })))
  const answer = { fence: FENCE + 1, result: response(Buffer.from('the newer')) }
  const newer = stored(sealer.seal(id, bytesOf('completed', newToken(), answer)), FENCE + 1)
  const other = stored(sealer.seal(newId(), bytesOf('completed', token, { fence: FENCE })))
  const claim = stored(sealer.seal(id, bytesOf('in_progress', token, { fence: FENCE })))
  const graft = (prefix: Buffer, rest: Buffer) =>
    Buffer.concat([prefix.subarray(0, PREFIX.end), rest.subarray(PREFIX.end)])
  const payloadAt = PREFIX.end + 4 + 21 + ONE.id.length
  const cases: [what: string, Buffer][] = [
    ['another record', other],
    [
      'the payload of another record',
      Buffer.concat([older.subarray(0, payloadAt), other.subarray(payloadAt)]),
    ],
    ['head and payload of another record', graft(older, other)],
    ['an older answer under the newer fence', graft(newer, older)],
    ['a newer answer under the older fence', graft(older, newer)],
    ['an answer under a claim', graft(claim, older)],
    ['a claim under an answer', graft(older, claim)],
  ]
  for (const [what, bytes] of cases) t.throws(() => read(sealer, id, bytes), ALTERED, what)
})

void t.test('W08 state and flags are the sealed ones, or those of a renewal', async (t) => {
  const sealer = new Sealer([ONE])
  const id = newId()
  const codes = STATES.map((state) => [stateCode(state), state] as const)
  const checked = { ...newReconciliation(1), deadLettered: true }
  for (const [sealedAs, over, mayBeRenewed] of [
    ['in_progress', {}, false],
    ['completed', {}, false],
    ['failed_retryable', {}, false],
    ['unknown', { leaseExpired: true }, true],
    ['unknown', { leaseExpired: true, reconciliation: checked }, true],
    ['unknown', { leaseExpired: false }, false],
    ['unknown', { leaseExpired: false, reconciliation: checked }, false],
    ['expired', {}, false],
  ] as const) {
    const sealed = stored(sealer.seal(id, bytesOf(sealedAs, newToken(), { fence: FENCE, ...over })))
    for (const [code, state] of codes)
      for (let flags = 0; flags < 8; flags++) {
        const bytes = Buffer.from(sealed)
        bytes[PREFIX.state] = code
        bytes[HEAD_AT] = flags
        const what = `${sealedAs} ${sealed[HEAD_AT]} as ${state} ${flags}`
        const isRenewed = mayBeRenewed && state === 'in_progress' && flags === 0
        if (isRenewed) t.match(read(sealer, id, bytes), { state: 'in_progress', leaseUntil: 4 }, what)
        else if (bytes.equals(sealed)) t.equal(read(sealer, id, bytes).state, sealedAs, what)
        else t.throws(() => read(sealer, id, bytes), ALTERED, what)
      }
  }
})

void t.test('two decisions of an operator, which have no token, are told apart by their fence', async (t) => {
  const sealer = new Sealer([ONE])
  const id = newId()
  const decided = (fence: number) => stored(sealer.seal(id, bytesOf('completed', NOBODY, { fence })), fence)
  const [older, newer] = [decided(FENCE), decided(FENCE + 1)]
  t.equal(read(sealer, id, newer).state, 'completed')
  const graft = Buffer.concat([newer.subarray(0, PREFIX.end), older.subarray(PREFIX.end)])
  t.throws(() => read(sealer, id, graft), ALTERED)
})

void t.test('an attempt whose record came back under a later fence can settle', async (t) => {
  const sealer = new Sealer([ONE])
  const id = newId()
  const token = newToken()
  const store = packed(memoryStore({ clock: () => FENCE + 9, maxBytes: MEMORY_BYTES }), sealer)
  const records = new Records(store)
  // The store lost the claim, and another one came in between.
  const other = await records.claim(id, draft('in_progress', newToken()), SPANS)
  if (other.kind !== 'claimed') throw new Error('not claimed')
  const own = { fence: FENCE, attempts: 1 }
  await records.replace(id, other.stamp.version, draft('in_progress', token, own), SPANS)
  t.match(await records.settle(id, draft('completed', token, own), SPANS), { kind: 'written' })
  t.match(await records.get(id), { record: { state: 'completed', fence: FENCE + 9 } })
})

void t.test('a truncated or extended record is refused', async (t) => {
  const sealer = new Sealer([ONE])
  const id = newId()
  const sealed = stored(sealer.seal(id, bytesOf('completed', newToken())))
  for (let end = 0; end < sealed.length; end++)
    t.throws(() => read(sealer, id, sealed.subarray(0, end)), { name: 'CorruptRecord' }, `cut at ${end}`)
  t.throws(() => read(sealer, id, Buffer.concat([sealed, Buffer.alloc(1)])), { name: 'CorruptRecord' })
})

void t.test('nonces stay unique beyond one batch of them', async (t) => {
  const sealer = new Sealer([ONE])
  const id = newId()
  const plain = bytesOf('in_progress', newToken())
  const sealed = Array.from({ length: 600 }, () => sealer.seal(id, plain))
  const nonces = new Set(sealed.map((bytes) => bytes.toString('hex', 69, 81)))
  t.equal(nonces.size, 600)
})

void t.test('a note is sealed for its record and tag; one that does not open is unchanged', async (t) => {
  const [sealer, rotated] = [new Sealer([ONE]), new Sealer([TWO, ONE])]
  const id = newId()
  const text = '{"cause":"a secret ü"}'
  const sealed = sealer.sealNote(id, 'executed:1', text)
  t.match(sealed, /^sealed:k1:[\w-]+$/)
  t.equal(rotated.openNote(id, 'executed:1', sealed), text)
  t.equal(sealer.openNote(id, 'a', sealer.sealNote(id, 'a', '')), '', 'an empty one')
  for (const [by, record, tag, shown] of [
    [sealer, newId(), 'executed:1', sealed],
    [sealer, id, 'executed:2', sealed],
    [new Sealer([TWO]), id, 'executed:1', sealed],
    [new Sealer([{ ...TWO, id: 'k1' }]), id, 'executed:1', sealed],
    [sealer, id, 'executed:1', 'sealed:k1:AAAA'],
    [sealer, id, 'executed:1', text],
  ] as const)
    t.equal(by.openNote(record, tag, shown), shown)
})

void t.test('a note is sealed as docs/record-format.md says', async (t) => {
  const sealer = new Sealer([ONE])
  const id = newId()
  const subkey = createHmac('sha256', ONE.key)
    .update('idempotency-proxy/note/1\0')
    .update(Buffer.from(id, 'base64url'))
    .digest()
  const nonce = randomBytes(12)
  const cipher = createCipheriv('aes-256-gcm', subkey, nonce)
  cipher.setAAD(Buffer.from(`${id} k1 executed:1`))
  const parts = [nonce, cipher.update(Buffer.from('{"cause":"ü"}')), cipher.final(), cipher.getAuthTag()]
  const sealed = `sealed:k1:${Buffer.concat(parts).toString('base64url')}`
  t.equal(sealer.openNote(id, 'executed:1', sealed), '{"cause":"ü"}')
})

void t.test('a history is stored sealed, and read as it was written', async (t) => {
  const register = memoryStore({ clock: () => FENCE, maxBytes: MEMORY_BYTES })
  const id = newId()
  const store = packed(register, new Sealer([ONE]))
  await store.put(id, bytesOf('in_progress', newToken()), SPANS)
  const note = { tag: 'a', count: 2, firstAgo: 9, lastAgo: 4, text: '{"cause":"a secret"}' }
  t.ok(await store.history.append(id, [note]))
  const kept = { tag: 'a', count: 2, first: FENCE - 9, last: FENCE - 4 }
  t.match(await register.history.read(id), [{ ...kept, text: /^sealed:k1:/ }])
  t.strictSame(await store.history.read(id), [{ ...kept, text: note.text }])
  t.strictSame(await packed(register, null).history.read(id), await register.history.read(id))
})

void t.test('sealing reproduces the test vector in docs/record-format.md', async (t) => {
  const page = readFileSync(new URL('../../docs/record-format.md', import.meta.url), 'utf8')
  const [, text = ''] = /```json\n(\{\n {2}"key"[^`]*)```/.exec(page) ?? []
  const vector = JSON.parse(text) as Record<
    'key' | 'keyId' | 'recordId' | 'nonce' | 'plain' | 'sealed',
    string
  >
  const hex = (name: 'key' | 'nonce' | 'plain' | 'sealed') => Buffer.from(vector[name], 'hex')
  const sealer = new Sealer([{ id: vector.keyId, key: hex('key') }])
  const id = vector.recordId as RecordId
  t.equal(sealer.seal(id, hex('plain'), hex('nonce')).toString('hex'), vector.sealed)
  t.equal(sealer.open(id, hex('sealed')).toString('hex'), vector.plain)
  t.match(decodeRecord(hex('plain')), { state: 'completed', method: 'POST', path: '/v1/payments' })
})
