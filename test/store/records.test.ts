import t from 'tap'
import {
  type IdempotencyRecord,
  newReconciliation,
  type RecordDraft,
  type RecordId,
  readAt,
} from '../../src/core/record.ts'
import { NOBODY, outcomeDraftOf } from '../../src/core/settle.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { LARGEST_RECENT, RecentWrites } from '../../src/store/recent.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import { nullIfUnavailable, orThrow, Records, type StoreTrouble, tokens } from '../../src/store/records.ts'
import {
  CorruptRecord,
  type PutReply,
  type Store,
  StoreFull,
  StoreUnavailable,
} from '../../src/store/register.ts'
import { bytesOf, draft, failing, newId, newToken, response, SPANS } from './fixtures.ts'

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

void t.test('L05 claim: our own, whose reply was lost, is recognised while in progress', async (t) => {
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
})

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
          if (!raced && bytes !== null) await register.put(id, bytes, { dueIn: 7, dropIn: 9_000 })
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
  for (const [state, over] of [
    ['unknown', { leaseExpired: true }],
    ['unknown', { leaseExpired: false }],
    ['failed_retryable', {}],
  ] as const) {
    const id = newId()
    const reply = await racing(bytesOf(state, token, over), id).settle(id, outcome, SPANS)
    t.match(reply, { kind: 'written' }, `an earlier outcome of its own, applied late: ${state}`)
    const { now, bytes } = await register.get(id)
    t.match(decodeRecord(bytes as Buffer), { state: 'completed', expiresAt: now + SPANS.dueIn })
  }
  const uncertain = newId()
  t.match(
    await racing(bytesOf('in_progress', token), uncertain).settle(uncertain, draft('unknown', token), SPANS),
    { kind: 'written' },
    'an uncertain outcome, over its own claim',
  )
  const read = await register.get(uncertain)
  t.match(decodeRecord(read.bytes as Buffer), { state: 'unknown', nextLookAt: read.now + SPANS.dueIn })
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

void t.test('P18 the bytes of a settled record are freed once the store has answered', async (t) => {
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
})

void t.test('tokens are 16 random bytes, different with every call, and never change', async (t) => {
  const [one, other] = [tokens(), tokens()]
  const drawn = Array.from({ length: 600 }, () => [one(), other()]).flat()
  const hex = drawn.map((token) => token.toString('hex'))
  t.equal(new Set(hex).size, 1200)
  t.ok(drawn.every((token) => token.length === 16))
  t.notOk(
    drawn.some((token) => token.equals(NOBODY)),
    'and none is the one of nobody',
  )
  one()
  t.same(
    drawn.map((token) => token.toString('hex')),
    hex,
  )
})

void t.test('what a store cannot do is a value, and what it should never do is thrown', async (t) => {
  const { register } = setup()
  const id = newId()
  const own = draft('in_progress', newToken())
  const record = decodeRecord(bytesOf('in_progress', newToken()))
  const each = (error: unknown): (() => Promise<unknown>)[] => {
    const records = new Records(failing(register, () => error))
    return [
      async () => records.claim(id, own, SPANS),
      async () => records.takeOver(id, record, own, SPANS),
      async () => records.settle(id, own, SPANS),
      async () => records.replace(id, 1, own, SPANS),
      () => records.reclaim(id, own, SPANS),
      () => records.get(id),
      () => records.prefix(id),
    ]
  }
  for (const [error, full] of [
    [new StoreUnavailable('down', true), false],
    [new StoreFull('full'), true],
  ] as const)
    for (const ask of each(error)) {
      const reply = await ask()
      t.strictSame(reply, { kind: 'unavailable', full, error })
      t.throws(() => orThrow(reply as StoreTrouble), error)
      t.equal(nullIfUnavailable(error), null)
    }
  const bug = new Error('a bug')
  for (const ask of each(bug)) await t.rejects(ask(), bug)
  t.throws(() => nullIfUnavailable(bug), bug)
  const corrupt = new CorruptRecord('what is this')
  for (const ask of each(corrupt)) t.strictSame(await ask(), { kind: 'corrupt', error: corrupt })
  t.throws(() => orThrow({ kind: 'corrupt', error: corrupt }), corrupt)
  t.equal(orThrow(null), null)
  const written = { kind: 'written' } as const
  t.equal(orThrow(written), written)
})

void t.test('each write says what kind it is, and only a takeover raises the fence', async (t) => {
  const { register } = setup()
  const asked: unknown[] = []
  const records = new Records({
    ...register,
    put(id, bytes, spans, entry) {
      asked.push(entry)
      return register.put(id, bytes, spans, entry)
    },
    swap(id, condition, bytes, spans, nextFence) {
      asked.push(nextFence)
      return register.swap(id, condition, bytes, spans, nextFence)
    },
  })
  const [one, other, third] = [newId(), newId(), newId()]
  const token = newToken()
  await records.claim(one, draft('in_progress', token), SPANS)
  await records.claim(other, draft('in_progress', token), SPANS, 'fresh')
  const { record } = orThrow(await records.get(one))
  await records.takeOver(one, record as IdempotencyRecord, draft('in_progress', token), SPANS)
  await records.settle(one, draft('completed', token), SPANS)
  await records.settle(third, draft('completed', token), SPANS)
  await records.reclaim(newId(), draft('completed', token), SPANS)
  t.same(asked, ['claim', 'fresh', true, false, false, 'again', 'again'])
})

void t.test('an outcome is remembered unless a later attempt is known', async (t) => {
  const { clock, register } = setup()
  const recent = new RecentWrites(() => 0)
  const records = new Records(register, () => {}, recent)
  /** Settles under `token` where another attempt's `found` is, and says whether that was remembered. */
  const settled = async (
    found: [state: 'in_progress' | 'completed' | 'failed_retryable', over: Partial<RecordDraft>] | null,
    over: Partial<RecordDraft>,
    state: 'completed' | 'unknown' = 'completed',
  ): Promise<[kind: string, isRemembered: boolean]> => {
    const id = newId()
    const token = newToken()
    if (found !== null) await register.put(id, bytesOf(found[0], newToken(), found[1]), SPANS)
    const reply = await records.settle(id, draft(state, token, over), SPANS)
    return [reply.kind, recent.all().some((write) => write.id === id)]
  }
  const now = clock.now
  const at = (fence: number, createdAt = now - 5) => ({ fence, createdAt })
  t.same(await settled(null, at(now)), ['recovered', true], 'there was none')
  t.same(await settled(['in_progress', at(now - 1)], at(now)), ['recovered', true], 'of an earlier attempt')
  t.same(
    await settled(['completed', at(now - 1)], at(now)),
    ['refused', true],
    'an earlier attempt’s outcome',
  )
  t.same(await settled(['completed', at(now)], at(now)), ['refused', true], 'a decision about this attempt')
  t.same(await settled(['completed', at(now + 1)], at(now)), ['refused', false], 'a later attempt')
  t.same(await settled(['completed', at(now - 1, now - 4)], at(now)), ['refused', false], 'another record')

  const id = newId()
  const token = newToken()
  const remembered = () => recent.all().filter((write) => write.id === id).length
  await records.claim(id, draft('in_progress', token), SPANS)
  t.match(await records.settle(id, draft('unknown', token), SPANS), { kind: 'written' })
  t.equal(remembered(), 1)
  t.match(await records.settle(id, draft('completed', token), SPANS), { kind: 'written' })
  t.equal(remembered(), 2)
  t.match(await records.settle(id, draft('completed', token), SPANS), { kind: 'refused' })
  t.equal(remembered(), 3, 'its own outcome, written before')
  const down = new Records(
    failing(register, () => new StoreUnavailable('down', true)),
    () => {},
    recent,
  )
  t.match(await down.settle(id, draft('completed', token), SPANS), { kind: 'unavailable' })
  t.equal(remembered(), 3)
  records.forget(id)
  t.equal(remembered(), 0)
  new Records(register).forget(id)
  t.same(new Records(register).recent(), [])
})

void t.test('a large outcome is remembered without its body', async (t) => {
  const { register } = setup()
  const recent = new RecentWrites(() => 0)
  const records = new Records(register, () => {}, recent)
  const head = bytesOf('completed', newToken(), { result: response(Buffer.alloc(0)) }).length
  for (const [length, kept] of [
    [LARGEST_RECENT - head, true],
    [LARGEST_RECENT - head + 1, false],
  ] as const) {
    const [id, token] = [newId(), newToken()]
    const result = response(Buffer.alloc(length, 7))
    await records.claim(id, draft('in_progress', token), SPANS)
    await records.settle(id, draft('completed', token, { result, route: 'create-payment' }), SPANS)
    const { bytes } = recent.all().at(-1) as { bytes: Buffer }
    const expected = kept ? result : { kept: false, why: 'no_room', status: 201, location: null }
    t.match(decodeRecord(bytes), { state: 'completed', token, route: 'create-payment', result: expected })
  }
})

void t.test('a remembered outcome is written again where it is missing, while it is kept', async (t) => {
  const { clock, register } = setup()
  const recent = new RecentWrites(() => clock.now)
  const records = new Records(register, () => {}, recent)
  const [id, token] = [newId(), newToken()]
  const claimed = await records.claim(id, draft('in_progress', token), SPANS)
  if (claimed.kind !== 'claimed') throw new Error('not claimed')
  const own = { fence: claimed.stamp.fence, createdAt: claimed.stamp.createdAt }
  orThrow(await records.settle(id, draft('completed', token, own), SPANS))
  const again = async () => Promise.all(records.recent().map((write) => write.again()))
  t.same(await again(), [{ kind: 'kept' }], 'nothing was lost')
  t.equal(recent.all().length, 1)
  const lose = async () => {
    const { record } = orThrow(await records.get(id))
    t.ok(await register.remove(id, (record as IdempotencyRecord).version))
  }
  await lose()
  clock.now += 1000
  t.same(await again(), [{ kind: 'written' }])
  t.match(await records.get(id), {
    record: { state: 'completed', ...own, expiresAt: clock.now + SPANS.dueIn - 1000 },
  })
  t.equal(recent.all().length, 2, 'the next failover may lose it again')
  await lose()
  clock.now += SPANS.dropIn
  t.same(await again(), [{ kind: 'kept' }, { kind: 'kept' }])
  t.match(await records.get(id), { record: null })
})

void t.test('W01 reclaim gives back what was lost, and splits what two owners have', async (t) => {
  const { clock, register, records } = setup()
  const now = clock.now
  const put = async (state: 'in_progress' | 'completed' | 'unknown', over: Partial<RecordDraft>) => {
    const id = newId()
    await register.put(id, bytesOf(state, newToken(), over), SPANS)
    return id
  }
  const own = draft('completed', newToken(), { fence: now - 3, createdAt: now - 9 })
  const lost = newId()
  t.same(await records.reclaim(lost, own, SPANS), { kind: 'written' })
  t.match(await records.get(lost), { record: { state: 'completed', fence: now - 3, createdAt: now - 9 } })
  t.same(await records.reclaim(lost, own, SPANS), { kind: 'kept' })

  const earlier = await put('in_progress', { fence: now - 4, createdAt: now - 9 })
  t.same(await records.reclaim(earlier, own, SPANS, () => false), { kind: 'kept' }, 'it is no longer its own')
  t.match(await records.get(earlier), { record: { state: 'in_progress' } })
  t.same(await records.reclaim(earlier, own, SPANS), { kind: 'written' })
  t.match(await records.get(earlier), { record: { state: 'completed', fence: now - 3 } })

  const claimed = await put('in_progress', { fence: now + 5, createdAt: now - 1 })
  t.match(await records.reclaim(claimed, own, SPANS), { kind: 'split', own, found: { fence: now + 5 } })
  clock.now += 10
  t.match(await records.get(claimed), {
    record: { state: 'unknown', fence: now + 5, token: NOBODY, dropAt: now + SPANS.dropIn },
  })
  t.same(await records.reclaim(claimed, own, SPANS), { kind: 'kept' }, 'the split is known')

  const final = await put('completed', { fence: now + 5, createdAt: now - 1 })
  t.match(await records.reclaim(final, own, SPANS), { kind: 'split', found: { state: 'completed' } })
  t.match(await records.get(final), { record: { state: 'completed', fence: now + 5 } }, 'it is final')
})

void t.test('W01 reclaim tries five times while others change the record', async (t) => {
  const { clock, register } = setup()
  const own = draft('completed', newToken(), { fence: clock.now, createdAt: 1 })
  const earlier = { fence: clock.now - 1, createdAt: 1 }
  for (const [changes, kind] of [
    [0, 'written'],
    [4, 'written'],
    [5, 'kept'],
  ] as const)
    for (const found of ['changed', 'gone'] as const) {
      const id = newId()
      let [left, tries] = [changes as number, 0]
      await register.put(id, bytesOf('in_progress', newToken(), earlier), SPANS)
      const records = new Records({
        ...register,
        async swap(...[to, condition, bytes, spans, nextFence]: Parameters<Store['swap']>) {
          tries++
          if (left-- <= 0) return register.swap(to, condition, bytes, spans, nextFence)
          const { bytes: there } = await register.get(to)
          return { done: false, now: clock.now, bytes: found === 'gone' ? null : there }
        },
      })
      t.same(await records.reclaim(id, own, SPANS), { kind })
      t.equal(tries, Math.min(changes + 1, 5))
    }
})

void t.test('settle: what it replaces may change or vanish meanwhile, and it looks again', async (t) => {
  const { clock, register } = setup()
  const [fence, createdAt] = [clock.now, clock.now - 9]
  for (const [found, state] of [
    ['earlier', 'completed'],
    ['its own', 'unknown'],
  ] as const)
    for (const meanwhile of ['nothing', 'changed', 'gone'] as const) {
      const [id, token] = [newId(), newToken()]
      const there =
        found === 'earlier'
          ? bytesOf('in_progress', newToken(), { fence: fence - 1, createdAt })
          : bytesOf('unknown', token, { fence, createdAt })
      await register.put(id, there, SPANS)
      let replacements = 0
      const records = new Records({
        ...register,
        async swap(...[to, condition, bytes, spans, nextFence]: Parameters<Store['swap']>) {
          if (!('version' in condition) || replacements++ > 0 || meanwhile === 'nothing')
            return register.swap(to, condition, bytes, spans, nextFence)
          const { bytes: now } = await register.get(to)
          if (meanwhile === 'gone') await register.remove(to, condition.version)
          return { done: false, now: clock.now, bytes: meanwhile === 'gone' ? null : now }
        },
      })
      const reply = await records.settle(id, draft(state, token, { fence, createdAt }), SPANS)
      const kind = found === 'earlier' || meanwhile === 'gone' ? 'recovered' : 'written'
      t.match(reply, { kind, stamp: { fence, createdAt } }, `${found}, ${meanwhile}`)
      t.match(await records.get(id), { record: { state, token, fence, createdAt } })
      t.equal(replacements, meanwhile === 'changed' ? 2 : 1)
    }
})

void t.test('W01 reclaim says what went wrong while it replaced a record', async (t) => {
  const { clock, register } = setup()
  const own = draft('completed', newToken(), { fence: clock.now, createdAt: 1 })
  const id = newId()
  await register.put(id, bytesOf('in_progress', newToken(), { fence: clock.now - 1, createdAt: 1 }), SPANS)
  for (const [error, kind] of [
    [new StoreUnavailable('down', true), 'unavailable'],
    [new CorruptRecord('what is this'), 'corrupt'],
  ] as const) {
    const records = new Records({ ...failing(register, () => error), put: register.put })
    t.match(await records.reclaim(id, own, SPANS), { kind, error })
  }
})

void t.test('an uncertain outcome keeps what has been found out about its record', async (t) => {
  const { clock, register, records } = setup()
  const [id, token] = [newId(), newToken()]
  const reconciliation = { ...newReconciliation(clock.now), asked: 3, answer: '404' }
  const spans = { dueIn: 7000, dropIn: 9000 }
  await register.put(id, bytesOf('unknown', token, { leaseExpired: true, reconciliation }), spans)
  const due = clock.now + 7000
  clock.now += 100
  const uncertain = draft('unknown', token, { lastError: 'reset', status: 502 })
  t.match(await records.settle(id, uncertain, SPANS), { kind: 'written' })
  t.match(await records.get(id), {
    record: { lastError: 'reset', status: 502, leaseExpired: false, reconciliation, nextLookAt: due },
  })
  t.match(await records.settle(id, draft('unknown', newToken()), SPANS), { kind: 'refused' })
})
