import t from 'tap'
import { PHASES, type Phase } from '../../src/core/copies.ts'
import type { RecordId } from '../../src/core/record.ts'
import { NOBODY } from '../../src/core/settle.ts'
import { decodeRecord, PREFIX } from '../../src/store/codec.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { migrating } from '../../src/store/migrating.ts'
import { packed } from '../../src/store/packed.ts'
import { markOf } from '../../src/store/phases.ts'
import { InGrace, type Page, type Store, StoreUnavailable } from '../../src/store/register.ts'
import { Sealer } from '../../src/store/sealing.ts'
import { registerContract } from './contract.ts'
import { bytesOf, HOUR, newId, newToken, SPANS } from './fixtures.ts'

for (const phase of PHASES)
  registerContract(t, `two stores in phase ${phase}`, async () => {
    let now = 1_795_000_000_000
    const store = () => memoryStore({ clock: () => now, maxBytes: MEMORY_BYTES })
    const [from, to] = [store(), store()]
    return {
      register: migrating(from, to, phase),
      peer: migrating(from, to, phase),
      other: null,
      tellsPeers: true,
      advance: (ms) => void (now += ms),
      [Symbol.asyncDispose]: () => from.close(),
    }
  })

const NOW = 1_795_000_000_000

/** The new store's clock is an hour behind. */
function pairOf(over: { readonly from?: Partial<Store>; readonly to?: Partial<Store> } = {}) {
  const clock = { now: NOW }
  const store = (skew: number) => memoryStore({ clock: () => clock.now - skew, maxBytes: 1024 * 1024 })
  const [from, to] = [store(0), store(HOUR)]
  const on = (phase: Phase): Store => migrating({ ...from, ...over.from }, { ...to, ...over.to }, phase)
  return { clock, from, to, on }
}

async function recordIn(store: Store, id: RecordId) {
  const { bytes } = await store.get(id)
  return bytes === null ? null : decodeRecord(bytes)
}

async function claimed(store: Store, id = newId(), token = newToken()) {
  t.ok((await store.put(id, bytesOf('in_progress', token), SPANS)).done)
  return { id, token }
}

async function settled(
  store: Store,
  { id, token }: Awaited<ReturnType<typeof claimed>>,
  state: 'completed' | 'failed_retryable' | 'unknown',
) {
  return store.swap(
    id,
    { token, states: ['in_progress', 'unknown', 'failed_retryable'] },
    bytesOf(state, token),
    SPANS,
    false,
  )
}

const down = async (): Promise<never> => {
  throw new StoreUnavailable('down', false)
}
const bug = async (): Promise<never> => {
  throw new TypeError('a bug')
}

void t.test('both: fence, token, createdAt and answer are the same in both stores', async (t) => {
  const { from, to, on } = pairOf()
  const claim = await claimed(on('both'))
  t.ok((await settled(on('both'), claim, 'completed')).done)
  const [one, other] = [await recordIn(from, claim.id), await recordIn(to, claim.id)]
  t.equal(one?.state, 'completed')
  for (const name of ['fence', 'token', 'createdAt', 'result'] as const)
    t.same((other as never)[name], (one as never)[name], name)
})

void t.test('a record of the old store answers in every phase, and phase new copies it', async (t) => {
  const { clock, from, to, on } = pairOf()
  const [done, free, unknown] = [await claimed(from), await claimed(from), await claimed(from)]
  await settled(from, done, 'completed')
  await settled(from, free, 'failed_retryable')
  await settled(from, unknown, 'unknown')
  await from.history.append(done.id, [{ tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: 'x' }])
  t.match(await on('new').history.read(done.id), [{ tag: 'a' }], 'its history, too')
  for (const phase of PHASES)
    for (const { id } of [done, free, unknown]) {
      const put = await on(phase).put(id, bytesOf('in_progress', newToken()), SPANS)
      t.notOk(put.done, phase)
    }
  t.equal((await recordIn(to, done.id))?.state, 'completed')
  t.match(await to.history.read(done.id), [{ tag: 'a' }])
  t.equal((await recordIn(to, free.id))?.state, 'failed_retryable')
  clock.now += SPANS.dueIn
  t.same(await on('new').due(10), [unknown.id], 'the new store lists it as due')
})

void t.test(
  'a key that a mirror claimed only in the old store is not executed by a later phase',
  async (t) => {
    const { to, on, from } = pairOf({ to: { put: down } })
    const { id } = await claimed(on('mirror'))
    t.equal(await recordIn(to, id), null)
    for (const phase of ['both', 'new'] as const) {
      const put = await migrating(from, to, phase).put(id, bytesOf('in_progress', newToken()), SPANS)
      t.match(put.done ? null : decodeRecord(put.bytes), { state: 'in_progress' }, phase)
    }
  },
)

void t.test('a key completed while the new store was down is not executed again', async (t) => {
  const { from, to, on } = pairOf()
  const first = await claimed(on('mirror'))
  await settled(on('mirror'), first, 'failed_retryable')
  const { version } = (await recordIn(from, first.id)) as { version: number }
  // From here on the new store is down.
  const second = { id: first.id, token: newToken() }
  t.ok((await from.swap(first.id, { version }, bytesOf('in_progress', second.token), SPANS, true)).done)
  await settled(from, second, 'completed')
  t.equal((await recordIn(to, first.id))?.state, 'failed_retryable')
  const put = await on('new').put(first.id, bytesOf('in_progress', newToken()), SPANS)
  t.match(put.done ? null : decodeRecord(put.bytes), { state: 'completed' })
})

void t.test('both: with the new store down, a claim is withdrawn from the old one', async (t) => {
  const { from, on } = pairOf({ to: { put: down } })
  const id = newId()
  await t.rejects(async () => on('both').put(id, bytesOf('in_progress', newToken()), SPANS), {
    name: 'StoreUnavailable',
    maybeApplied: false,
  })
  t.equal((await recordIn(from, id))?.state, 'failed_retryable', 'the claim is withdrawn')
  const undone = pairOf({ to: { put: down }, from: { swap: down } })
  await t.rejects(
    async () => undone.on('both').put(id, bytesOf('in_progress', newToken()), SPANS),
    { name: 'StoreUnavailable', maybeApplied: true },
    'unless that is in doubt',
  )
  const broken = pairOf({ to: { put: down }, from: { swap: bug } })
  await t.rejects(async () => broken.on('both').put(id, bytesOf('in_progress', newToken()), SPANS), {
    name: 'TypeError',
  })
  const lost = pairOf({ to: { put: bug } })
  await t.rejects(async () => lost.on('both').put(id, bytesOf('in_progress', newToken()), SPANS), {
    name: 'TypeError',
  })
})

void t.test('both: a takeover that loses against phase new is undone', async (t) => {
  const { from, to, on } = pairOf()
  const first = await claimed(on('both'))
  await settled(on('both'), first, 'failed_retryable')
  const { version } = (await recordIn(from, first.id)) as { version: number }
  const faster: Partial<Store> = {
    async swap(id, condition, ...rest) {
      const { version: there } = (await recordIn(to, id)) as { version: number }
      await to.swap(id, { version: there }, bytesOf('in_progress', newToken()), SPANS, true)
      return to.swap(id, condition, ...rest)
    },
  }
  const mine = newToken()
  const swap = await migrating(from, { ...to, ...faster }, 'both').swap(
    first.id,
    { version },
    bytesOf('in_progress', mine),
    SPANS,
    true,
  )
  t.equal(swap.done, false)
  const shown = swap.done || swap.bytes === null ? null : decodeRecord(swap.bytes)
  t.equal(shown?.state, 'in_progress')
  t.notOk(shown?.token.equals(mine))
  t.notOk((await recordIn(from, first.id))?.token.equals(mine))
  // The new store lost the record.
  const gone: Partial<Store> = { swap: async () => ({ done: false, now: NOW, bytes: null }) }
  const again = await claimed(on('both'))
  await settled(on('both'), again, 'failed_retryable')
  const found = (await recordIn(from, again.id)) as { version: number }
  await t.rejects(
    async () =>
      migrating(from, { ...to, ...gone }, 'both').swap(
        again.id,
        found,
        bytesOf('in_progress', mine),
        SPANS,
        true,
      ),
    { name: 'RecordLocked' },
  )
})

void t.test('both: a due record that only the new store has, or has stale, is synchronised', async (t) => {
  const { clock, from, to, on } = pairOf()
  const [only, stale, gone] = [await claimed(to), await claimed(on('both')), await claimed(to)]
  await settled(from, stale, 'completed')
  clock.now += SPANS.dueIn
  t.same((await to.due(10)).toSorted(), [only.id, stale.id, gone.id].toSorted())
  const vanishing: Partial<Store> = {
    get: async (id) => (id === gone.id ? { now: clock.now, bytes: null } : to.get(id)),
  }
  const both = migrating(from, { ...to, ...vanishing }, 'both')
  t.same(await both.due(10), [only.id])
  t.equal((await recordIn(from, only.id))?.state, 'in_progress')
  t.equal((await recordIn(to, stale.id))?.state, 'completed')
  const failing = { due: async () => [newId()], get: down }
  await t.rejects(migrating(from, { ...to, ...failing }, 'both').due(1), { name: 'StoreUnavailable' })
})

void t.test('an unreadable record in the new store is reported, and a mirror goes on', async (t) => {
  const { from, to, on } = pairOf()
  const id = newId()
  const strange = bytesOf('in_progress', newToken())
  strange[2] = 9
  await to.put(id, strange, SPANS)
  await t.rejects(async () => on('both').get(id), { name: 'CorruptRecord' })
  await from.put(id, bytesOf('unknown', newToken()), SPANS)
  const due = { due: async () => [id] }
  t.same(
    await migrating({ ...from, due: async () => [] }, { ...to, ...due }, 'both').due(1),
    [id],
    'the sweeper reports it',
  )
  const claim = { id, token: newToken() }
  const { version } = (await recordIn(from, id)) as { version: number }
  const mirrored = await on('mirror').swap(id, { version }, bytesOf('unknown', claim.token), SPANS, false)
  t.ok(mirrored.done, 'a mirror goes on without it')
})

void t.test('removing a record that one store cannot read leaves the one in the other store', async (t) => {
  const { from, to, on } = pairOf()
  const strange = async (store: Store, id: RecordId) => {
    const bytes = bytesOf('completed', newToken())
    bytes[PREFIX.schema] = 9
    const put = await store.put(id, bytes, SPANS)
    return put.now
  }
  const done = await claimed(to)
  await settled(to, done, 'completed')
  t.ok(await on('both').remove(done.id, await strange(from, done.id)))
  t.equal((await from.get(done.id)).bytes, null)
  const answer = (await on('both').get(done.id)).bytes
  t.equal(answer && decodeRecord(answer).state, 'completed')
  const mirrored = await claimed(from)
  await strange(to, mirrored.id)
  const { version } = (await recordIn(from, mirrored.id)) as { version: number }
  t.ok(await on('mirror').remove(mirrored.id, version))
  t.ok((await to.get(mirrored.id)).bytes)
  await t.rejects(async () => on('both').remove(mirrored.id, version), { name: 'CorruptRecord' })
})

void t.test('a record that others keep writing fails as locked', async (t) => {
  const { from, to } = pairOf()
  const claim = await claimed(from)
  await to.put(claim.id, bytesOf('failed_retryable', newToken()), SPANS)
  const refusing: Partial<Store> = { remove: async () => false }
  await t.rejects(migrating(from, { ...to, ...refusing }, 'new').get(claim.id), { name: 'RecordLocked' })
  const other = await claimed(from)
  await settled(from, other, 'completed')
  const version = (await recordIn(from, other.id))?.version as number
  await to.put(other.id, bytesOf('completed', newToken()), SPANS)
  await t.rejects(migrating(from, { ...to, ...refusing }, 'both').remove(other.id, version), {
    name: 'RecordLocked',
  })
})

void t.test('a mirror goes on while the new store is down, but does not hide a bug', async (t) => {
  const all = { put: down, swap: down, renew: down, get: down, remove: down }
  const { on, from } = pairOf({ to: { ...all, history: { append: down, read: down } } })
  const mirror = on('mirror')
  const claim = await claimed(mirror)
  t.same(await mirror.renew([{ ...claim, dueIn: 1000, dropIn: 1000 }]), [true])
  t.ok((await settled(mirror, claim, 'completed')).done)
  t.ok(await mirror.history.append(claim.id, [{ tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '' }]))
  t.match(await mirror.history.read(claim.id), [{ tag: 'a' }])
  t.ok(await mirror.remove(claim.id, (await recordIn(from, claim.id))?.version as number))
  const broken = pairOf({ to: { put: bug } }).on('mirror')
  await t.rejects(async () => broken.put(newId(), bytesOf('in_progress', newToken()), SPANS), {
    name: 'TypeError',
  })
})

void t.test('a decision of phase new that frees a key is not undone by the old store', async (t) => {
  const { from, on } = pairOf()
  const claim = await claimed(from)
  await settled(from, claim, 'unknown')
  const { bytes } = await on('new').get(claim.id)
  const { version } = decodeRecord(bytes as Buffer)
  const swap = await on('new').swap(
    claim.id,
    { version },
    bytesOf('failed_retryable', claim.token),
    SPANS,
    false,
  )
  t.ok(swap.done)
  t.equal((await recordIn(on('new'), claim.id))?.state, 'failed_retryable')
  const only = await claimed(on('new'))
  t.ok((await settled(on('new'), only, 'failed_retryable')).done)
  t.equal(await recordIn(from, only.id), null)
})

void t.test('lists show each record once, and no marks of the migration', async (t) => {
  const { from, to, on } = pairOf()
  const [one, two] = [await claimed(from), await claimed(to)]
  const three = await claimed(on('both'))
  await to.put(markOf('both'), bytesOf('failed_retryable', newToken()), SPANS)
  await from.put(markOf('both'), bytesOf('failed_retryable', newToken()), SPANS)
  const ids: string[] = []
  for (let cursor: string | null = null; ; ) {
    const page: Page = await on('both').list('all', cursor, 1)
    ids.push(...page.ids)
    if (page.next === null) break
    cursor = page.next
  }
  t.same(ids.toSorted(), [one.id, two.id, three.id].toSorted())
  t.same((await on('mirror').list('all', null, 10)).ids.toSorted(), [one.id, three.id].toSorted())
  await t.rejects(on('both').list('all', 'x', 1), RangeError)
})

void t.test('traits are those of the weaker store, and in phase mirror those of the old one', async (t) => {
  const told = (durable: boolean | null, evicts: boolean | null): Partial<Store> => ({
    traits: async () => ({
      durable,
      evicts,
      forgets: evicts ? 'lost' : null,
      hasIdentity: true,
      findings: ['why'],
      refusals: ['no'],
    }),
  })
  const both = async (from: Partial<Store>, to: Partial<Store>, phase: Phase) =>
    pairOf({ from, to }).on(phase).traits()
  t.match(await both(told(true, false), told(false, true), 'mirror'), {
    durable: true,
    evicts: false,
    findings: ['moved from: why', 'moved to: why'],
    refusals: ['moved from: no', 'moved to: no'],
    topology: 'migration from memory to memory, phase mirror',
  })
  t.match(await both(told(true, false), told(false, true), 'both'), {
    durable: false,
    evicts: true,
    forgets: 'lost',
    hasIdentity: true,
  })
  t.match(await both(told(null, null), told(true, false), 'new'), {
    durable: null,
    evicts: null,
    forgets: null,
  })
  t.match(await both(told(true, false), told(true, false), 'new'), { durable: true, evicts: false })
})

void t.test('ping returns the time of the leading store; in phase both, both must answer', async (t) => {
  const { on } = pairOf()
  t.equal(await on('mirror').ping(), NOW)
  t.equal(await on('new').ping(), NOW - HOUR)
  await t.rejects(
    pairOf({ to: { ping: down } })
      .on('both')
      .ping(),
    { name: 'StoreUnavailable' },
  )
})

void t.test('both: a record that vanishes meanwhile is never claimed in one store alone', async (t) => {
  const { clock, from, to, on } = pairOf()
  // Found, and gone a moment later.
  const first = await claimed(from)
  let asked = 0
  const going: Partial<Store> = {
    get: async (id) => (asked++ === 0 ? { now: clock.now, bytes: null } : from.get(id)),
    put: async (id, bytes, spans) => {
      if (asked > 0) return from.put(id, bytes, spans)
      const reply = await from.put(id, bytes, spans)
      await from.remove(id, (await recordIn(from, id))?.version as number)
      return reply
    },
  }
  const taken = await migrating({ ...from, ...going }, to, 'both').put(
    first.id,
    bytesOf('in_progress', newToken()),
    SPANS,
  )
  t.ok(taken.done, 'it is claimed again')
  t.equal((await recordIn(to, first.id))?.state, 'in_progress')

  // The old store forgets the claim that the new one refuses, and the new one forgets its record.
  const second = await claimed(to)
  const forgetting: Partial<Store> = {
    swap: async () => ({ done: false, now: clock.now, bytes: null }),
    get: async () => ({ now: clock.now, bytes: null }),
  }
  const refused = migrating({ ...from, ...forgetting }, { ...to, get: forgetting.get as never }, 'both')
  await t.rejects(async () => refused.put(second.id, bytesOf('in_progress', newToken()), SPANS), {
    name: 'StoreUnavailable',
    maybeApplied: true,
  })

  // An outcome whose attempt neither store knows.
  const swap = await on('both').swap(
    newId(),
    { token: newToken(), states: ['in_progress'] },
    bytesOf('completed', newToken()),
    SPANS,
    false,
  )
  t.match(swap, { done: false, bytes: null })
  const others = { token: newToken(), states: ['in_progress'] } as const
  const stale = await on('both').swap(first.id, others, bytesOf('completed', others.token), SPANS, false)
  t.ok(!stale.done && stale.bytes !== null)

  // The first try arrived late.
  const twice: Partial<Store> = {
    put: async (id, bytes, spans) => {
      await to.put(id, Buffer.from(bytes), spans)
      return to.put(id, bytes, spans)
    },
  }
  const late = await migrating(from, { ...to, ...twice }, 'both').put(
    newId(),
    bytesOf('in_progress', newToken()),
    SPANS,
  )
  t.ok(late.done)
})

void t.test('new: an attempt that only the old store knows can be settled', async (t) => {
  const { from, on } = pairOf()
  const claim = await claimed(from)
  t.ok((await settled(on('new'), claim, 'completed')).done)
  t.equal((await recordIn(on('new'), claim.id))?.state, 'completed')
})

void t.test('both: a claim rewritten after a failover stays, even if the other store refuses', async (t) => {
  const bytes = (token: Buffer) => bytesOf('in_progress', token, { fence: 7, createdAt: NOW })
  const claimAnew = async (store: Store, id: RecordId) =>
    (await store.put(id, bytesOf('in_progress', newToken()), SPANS)).done
  for (const [lost, when] of [
    [['from'], 'the other store is down'],
    [['from', 'to'], 'the other store is in its own grace'],
  ] as const) {
    const { from, to, on } = pairOf()
    const { id, token } = await claimed(on('both'))
    const stores = { from, to }
    for (const side of lost) {
      const there = await recordIn(stores[side], id)
      await stores[side].remove(id, there?.version ?? 0)
    }
    const inGrace: Store['put'] = (at, bytes, spans, entry) =>
      entry === 'again' ? to.put(at, bytes, spans, entry) : Promise.reject(new InGrace(NOW, NOW, 1))
    const hampered = migrating(
      from,
      { ...to, ...(lost.length === 1 ? { put: down, get: down } : { put: inGrace }) },
      'both',
    )
    await Promise.resolve(hampered.put(id, bytes(token), SPANS, 'again')).catch(() => {})
    t.match(await recordIn(from, id), { state: 'in_progress', token }, when)
    t.notOk(await claimAnew(on('both'), id), 'nobody else gets it')
    t.match(await on('both').put(id, bytes(token), SPANS, 'again'), { done: false })
    for (const side of [from, to]) t.match(await recordIn(side, id), { state: 'in_progress', token })
  }
})

void t.test('both: a claim that only one store has is written to the other, even in its grace', async (t) => {
  const { from, to, on } = pairOf()
  const { id, token } = await claimed(on('both'))
  await to.remove(id, (await recordIn(to, id))?.version ?? 0)
  const put: Store['put'] = (at, bytes, spans, entry) =>
    entry === 'again' ? to.put(at, bytes, spans, entry) : Promise.reject(new InGrace(NOW, NOW, 1))
  const own = bytesOf('in_progress', token, { fence: 7, createdAt: NOW })
  t.match(await migrating(from, { ...to, put }, 'both').put(id, own, SPANS, 'again'), { done: false })
  t.match(await recordIn(to, id), { state: 'in_progress', token })
})

void t.test('both: a grace of the new store holds takeovers back, too', async (t) => {
  const { from, to, on } = pairOf()
  const { id, token } = await claimed(on('both'))
  await settled(on('both'), { id, token }, 'failed_retryable')
  // A replica in `new` has taken it over in the new store, which then failed over to before that.
  const swap: Store['swap'] = (at, condition, bytes, spans, nextFence) =>
    nextFence ? Promise.reject(new InGrace(NOW, NOW, 1)) : to.swap(at, condition, bytes, spans, nextFence)
  const inGrace = migrating(from, { ...to, swap }, 'both')
  const takeOver = async (store: Store, own = newToken()) => {
    const { version } = (await recordIn(from, id)) as { version: number }
    return store.swap(id, { version }, bytesOf('in_progress', own), SPANS, true)
  }
  await t.rejects(takeOver(inGrace), { name: 'InGrace', maybeApplied: false })
  for (const side of [from, to]) t.match(await recordIn(side, id), { state: 'failed_retryable', token })
  t.ok((await takeOver(on('both'))).done, 'afterwards it is granted')
  const [one, other] = [await recordIn(from, id), await recordIn(to, id)]
  t.match(other, { state: 'in_progress', token: one?.token, fence: one?.fence })
})

void t.test('both: deleting a record leaves a claim that phase new has just made of it', async (t) => {
  for (const isMirrored of [true, false]) {
    const { from, to, on } = pairOf()
    const first = await claimed(isMirrored ? on('both') : from)
    await settled(isMirrored ? on('both') : from, first, 'failed_retryable')
    const { id } = first
    const own = newToken()
    let reads = 0
    const get: Store['get'] = async (at) => {
      const read = await to.get(at)
      if (reads++ > 0) return read
      const found = await on('new').put(id, bytesOf('in_progress', own), SPANS)
      const { version } = decodeRecord((found as { bytes: Buffer }).bytes)
      t.ok((await on('new').swap(id, { version }, bytesOf('in_progress', own), SPANS, true)).done)
      return read
    }
    const { version } = (await recordIn(from, id)) as { version: number }
    const removing = migrating(from, { ...to, get }, 'both').remove(id, version)
    await removing.catch((error: Error) => t.equal(error.name, 'RecordLocked'))
    t.match(await recordIn(to, id), { state: 'in_progress', token: own })
    for (const phase of ['both', 'new'] as const)
      t.notOk((await on(phase).put(id, bytesOf('in_progress', newToken()), SPANS)).done, phase)
  }
})

void t.test('both: a sealed record can be read after a takeover of it was undone', async (t) => {
  const sealed = (store: Store) => packed(store, new Sealer([{ id: 'k1', key: Buffer.alloc(32, 1) }]))
  for (const token of [newToken(), NOBODY]) {
    const { from, to } = pairOf()
    const id = newId()
    const both = migrating(sealed(from), sealed(to), 'both')
    t.ok((await both.put(id, bytesOf('failed_retryable', token, { fence: 7 }), SPANS)).done)
    const { version } = (await recordIn(both, id)) as { version: number }
    const inGrace: Partial<Store> = { swap: () => Promise.reject(new InGrace(NOW, NOW, 1)) }
    const held = migrating(sealed(from), sealed({ ...to, ...inGrace }), 'both')
    await t.rejects(async () => held.swap(id, { version }, bytesOf('in_progress', newToken()), SPANS, true))
    t.match(await recordIn(both, id), { state: 'failed_retryable', token })
  }
})

void t.test('a record sealed with a key that a replica lacks is copied as it is', async (t) => {
  const [one, two] = [1, 2].map((n) => ({ id: `k${n}`, key: Buffer.alloc(32, n) })) as [Key, Key]
  type Key = ConstructorParameters<typeof Sealer>[0][number]
  const { from, to } = pairOf()
  const id = newId()
  t.ok((await packed(from, new Sealer([two])).put(id, bytesOf('unknown', newToken()), SPANS)).done)
  const before = new Sealer([one])
  const without = migrating(packed(from, before), packed(to, before), 'new')
  await t.rejects(recordIn(without, id), { name: 'CorruptRecord', reason: 'unknown_key' })
  const all = new Sealer([two, one])
  t.match(await recordIn(migrating(packed(from, all), packed(to, all), 'new'), id), { state: 'unknown' })
})

void t.test('both: a lease that phase new has just renewed is not taken over', async (t) => {
  const { clock, from, to, on } = pairOf()
  const { id, token } = await claimed(on('new'))
  t.notOk((await on('both').put(id, bytesOf('in_progress', newToken()), SPANS)).done)
  clock.now += SPANS.dueIn
  const lapsed = await recordIn(on('both'), id)
  t.match(lapsed, { state: 'in_progress', leaseUntil: clock.now })
  const { dueIn, dropIn } = SPANS
  t.same(await on('new').renew([{ id, token, dueIn, dropIn }]), [true])
  const { version } = lapsed as { version: number }
  const taken = await on('both').swap(id, { version }, bytesOf('in_progress', newToken()), SPANS, true)
  t.match(taken, { done: false })
  t.notOk(await on('both').remove(id, version), 'nor deleted')
  t.match(await recordIn(on('both'), id), { token, version, leaseUntil: clock.now + dueIn })
  for (const side of [from, to]) t.match(await recordIn(side, id), { state: 'in_progress', token })
  // What a replica in `both` wrote down before that.
  await from.swap(id, { version }, bytesOf('unknown', token, { leaseExpired: true }), SPANS, false)
  t.match(await recordIn(on('both'), id), { state: 'in_progress', token })
  t.ok((await settled(on('new'), { id, token }, 'completed')).done)
  t.match(await recordIn(on('both'), id), { state: 'completed' })
})
