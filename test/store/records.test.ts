import t from 'tap'
import { type IdempotencyRecord, type RecordDraft, type RecordId, readAt } from '../../src/core/record.ts'
import { outcomeDraftOf } from '../../src/core/settle.ts'
import { decodeRecord } from '../../src/store/codec.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { RecentWrites } from '../../src/store/recent.ts'
import { orThrow, Records } from '../../src/store/records.ts'
import { type PutReply, type Store, StoreUnavailable } from '../../src/store/register.ts'
import { bytesOf, draft, newId, newToken, response, SPANS } from './fixtures.ts'

function setup() {
  const clock = { now: 1_795_000_000_000 }
  const register = memoryStore({ clock: () => clock.now, maxBytes: MEMORY_BYTES })
  return { clock, register, records: new Records(register) }
}

void t.test('outcomes are remembered without their bodies once room is tight', async (t) => {
  const { register } = setup()
  const recent = new RecentWrites(() => 0)
  const records = new Records(register, () => {}, recent)
  const remembered = async (state: 'completed' | 'failed_retryable') => {
    const token = newToken()
    const id = newId()
    await records.claim(id, draft('in_progress', token), SPANS)
    orThrow(await records.settle(id, draft(state, token), SPANS))
    return decodeRecord((recent.all().at(-1) as { bytes: Buffer }).bytes)
  }
  t.match(await remembered('completed'), { result: { kept: true } })
  while (!recent.isTight) recent.add(newId(), Buffer.alloc(65_536), SPANS)
  t.match(await remembered('completed'), { result: { kept: false, why: 'no_room' } })
  t.match(await remembered('failed_retryable'), { state: 'failed_retryable' })
})

void t.test('claim: a new record is claimed, an existing one returned', async (t) => {
  const { clock, records } = setup()
  const id = newId()
  const claimed = await records.claim(id, draft('in_progress', newToken()), SPANS)
  const stamp = { version: clock.now, fence: clock.now, createdAt: clock.now }
  t.strictSame(claimed, { kind: 'claimed', now: clock.now, stamp, recognised: false })
  const met = await records.claim(id, draft('in_progress', newToken()), SPANS)
  t.match(met, { kind: 'exists', record: { state: 'in_progress', ...stamp } })
})

void t.test(
  'L05 claim: our own claim whose reply was lost is recognised while it is in progress',
  async (t) => {
    const { clock, records } = setup()
    const id = newId()
    const own = draft('in_progress', newToken())
    const first = await records.claim(id, own, SPANS)
    clock.now += 5
    t.match(await records.claim(id, own, SPANS), { ...first, now: clock.now, recognised: true })
    const claimed = orThrow(await records.get(id)).record
    const silent = outcomeDraftOf(
      readAt(claimed as IdempotencyRecord, clock.now + SPANS.dueIn) as IdempotencyRecord,
    )
    await records.replace(id, (claimed as IdempotencyRecord).version, silent as RecordDraft, SPANS)
    t.match(
      await records.claim(id, own, SPANS),
      { kind: 'claimed', recognised: true },
      'even after its owner was recorded as silent',
    )
    await records.settle(id, draft('unknown', own.token), SPANS)
    await records.settle(id, draft('completed', own.token), SPANS)
    t.match(await records.claim(id, own, SPANS), { kind: 'exists', record: { state: 'completed' } })
  },
)

void t.test('takeOver: one of several wins, under the next fence', async (t) => {
  const { records, register } = setup()
  const id = newId()
  await records.claim(id, draft('in_progress', newToken()), SPANS)
  const { record } = orThrow(await records.get(id))
  if (record === null) throw new Error('no record')
  const [one, two] = [draft('in_progress', newToken()), draft('in_progress', newToken())]
  const won = await records.takeOver(id, record, one, SPANS)
  t.match(won, {
    kind: 'claimed',
    stamp: { version: record.version + 1, fence: record.fence + 1 },
    recognised: false,
  })
  t.match(await records.takeOver(id, record, two, SPANS), {
    kind: 'lost',
    record: { fence: record.fence + 1 },
  })
  t.match(
    await records.takeOver(id, record, one, SPANS),
    { ...won, recognised: true },
    'its own takeover, after a lost reply',
  )
  await register.remove(id, record.version + 1)
  t.match(await records.takeOver(id, record, two, SPANS), { kind: 'lost', record: null })
})

void t.test('settle: only the owner’s outcome is written, and none after completion', async (t) => {
  const { records } = setup()
  const id = newId()
  const token = newToken()
  await records.claim(id, draft('in_progress', token), SPANS)
  t.match(await records.settle(id, draft('completed', newToken()), SPANS), {
    kind: 'refused',
    record: { state: 'in_progress' },
  })
  t.match(await records.settle(id, draft('unknown', token), SPANS), { kind: 'written' })
  t.match(await records.settle(id, draft('completed', token), SPANS), { kind: 'written' })
  t.match(await records.settle(id, draft('completed', token), SPANS), {
    kind: 'refused',
    record: { state: 'completed' },
  })
})

void t.test('settle: a lost record is written again under its fence, unless replaced', async (t) => {
  const { clock, records } = setup()
  const id = newId()
  const token = newToken()
  const outcome = draft('completed', token, { fence: clock.now - 9, createdAt: clock.now - 9 })
  const stamp = { version: clock.now, fence: clock.now - 9, createdAt: clock.now - 9 }
  t.match(await records.settle(id, outcome, SPANS), { kind: 'recovered', stamp })
  t.match(await records.settle(id, draft('completed', newToken()), SPANS), { kind: 'refused' })
})

void t.test('settle: between its two steps, its own claim may appear, but no other one', async (t) => {
  const { register } = setup()
  const token = newToken()
  // A store in which `bytes` appear just before the first put.
  const racing = (bytes: Buffer | null, id: RecordId) => {
    let raced = false
    return new Records(
      Object.assign(Object.create(register), {
        swap: register.swap.bind(register),
        async put(...[to, own, spans]: Parameters<Store['put']>): Promise<PutReply> {
          if (!raced && bytes !== null) await register.put(id, bytes, spans)
          raced = true
          return register.put(to, own, spans)
        },
      }),
    )
  }
  const outcome = draft('completed', token)
  const [late, foreign] = [newId(), newId()]
  t.match(
    await racing(bytesOf('in_progress', token), late).settle(late, outcome, SPANS),
    { kind: 'written' },
    'its own claim, applied late',
  )
  t.match(await racing(bytesOf('in_progress', newToken()), foreign).settle(foreign, outcome, SPANS), {
    kind: 'refused',
    record: { state: 'in_progress' },
  })
})

void t.test('settle: gives up if its own claim comes and goes', async (t) => {
  const token = newToken()
  const bytes = bytesOf('in_progress', token)
  const fickle = {
    swap: async () => ({ done: false, now: 1, bytes: null }),
    put: async () => ({ done: false, now: 1, bytes }),
  }
  const records = new Records(Object.assign(Object.create(setup().register), fickle))
  t.match(await records.settle(newId(), draft('completed', token), SPANS), { kind: 'refused' })
})

void t.test('replace: writes only at the version that was seen', async (t) => {
  const { records } = setup()
  const id = newId()
  await records.claim(id, draft('in_progress', newToken()), SPANS)
  const { record } = orThrow(await records.get(id))
  if (record === null) throw new Error('no record')
  const decision = draft('completed', Buffer.alloc(16), { result: response() })
  t.match(await records.replace(id, record.version, decision, SPANS), {
    kind: 'written',
    stamp: { fence: record.fence },
  })
  t.match(await records.replace(id, record.version, decision, SPANS), {
    kind: 'refused',
    record: { state: 'completed' },
  })
  t.equal(await records.replace(newId(), record.version, decision, SPANS), null)
})

void t.test('a record that cannot be decoded is reported and left untouched', async (t) => {
  const { register, records } = setup()
  const id = newId()
  const token = newToken()
  const bytes = bytesOf('in_progress', token)
  bytes[2] = 9
  await register.put(id, bytes, SPANS)
  const before = (await register.get(id)).bytes
  const corrupt = { kind: 'corrupt', error: { name: 'CorruptRecord' } }
  const reply = await records.get(id)
  t.match(reply, corrupt)
  t.throws(() => orThrow(reply), { name: 'CorruptRecord' })
  t.match(await records.claim(id, draft('in_progress', token), SPANS), corrupt)
  t.match(await records.settle(id, draft('completed', token), SPANS), corrupt)
  t.same((await register.get(id)).bytes, before)
})

void t.test('everything but the records themselves goes straight to the store', async (t) => {
  const { clock, records, register } = setup()
  const id = newId()
  const token = newToken()
  t.equal(register.name, 'memory')
  t.equal(await register.ping(), clock.now)
  t.same(orThrow(await records.get(id)).record, null)
  await records.claim(id, draft('in_progress', token), SPANS)
  t.same(await register.renew([{ id, token, dueIn: 0, dropIn: 0 }]), [true])
  t.same(await register.due(5), [id])
  const rate = { count: 1, per: 10 }
  t.same([await register.limits.take(id, rate, 1), await register.limits.take(id, rate, 1)], [0, 10])
  const removed = new Promise<void>((told) => void register.watch(id, told))
  t.equal(await register.remove(id, clock.now + 1), true)
  await removed
  t.match(await register.traits(), { durable: false, evicts: false })
  await register.close()
})

void t.test(
  'P18 the bytes of a settled record are freed once the store has answered, not before',
  async (t) => {
    const { register } = setup()
    const given: Buffer[] = []
    let answers = true
    const records = new Records({
      ...register,
      swap(id, condition, bytes, spans, nextFence) {
        given.push(bytes)
        if (answers) return register.swap(id, condition, bytes, spans, nextFence)
        return Promise.reject(new StoreUnavailable('no answer', true))
      },
    })
    const id = newId()
    const own = newToken()
    const result = response(Buffer.alloc(64 * 1024, 'a'))
    await records.claim(id, draft('in_progress', own), SPANS)
    answers = false
    t.match(await records.settle(id, draft('completed', own, { result }), SPANS), { kind: 'unavailable' })
    t.ok(given[0]?.includes('aaaa'), 'they may be on their way')
    answers = true
    t.match(await records.settle(id, draft('completed', own, { result }), SPANS), { kind: 'written' })
    t.equal(given[1]?.length, 0)
    const { record } = orThrow(await records.get(id))
    t.match(record, { state: 'completed', result }, 'the store has its own copy')
  },
)
