import t from 'tap'
import { PHASES, type Phase } from '../../src/core/copies.ts'
import type { RecordId } from '../../src/core/record.ts'
import { NOBODY } from '../../src/core/settle.ts'
import { decodeRecord, PREFIX, readStamps } from '../../src/store/codec.ts'
import { migrating } from '../../src/store/migrating.ts'
import { packed } from '../../src/store/packed.ts'
import { markOf } from '../../src/store/phases.ts'
import { InGrace, type Page, type Store, StoreUnavailable } from '../../src/store/register.ts'
import { Sealer } from '../../src/store/sealing.ts'
import { bytesOf, HOUR, newId, newToken, SPANS } from './fixtures.ts'
import { answeringLater } from './migrating-fixtures.ts'

const NOW = 1_795_000_000_000

/** The new store's clock is an hour behind. */
function pairOf(over: { readonly from?: Partial<Store>; readonly to?: Partial<Store> } = {}) {
  const clock = { now: NOW }
  const [from, to] = [answeringLater(() => clock.now), answeringLater(() => clock.now - HOUR)]
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
  t.match(await both(told(false, true), told(true, false), 'mirror'), { durable: false, forgets: 'lost' })
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

const NOTE = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '' }

void t.test('what people did is noted where the phase writes, and read from one store', async (t) => {
  for (const [phase, lead, other, both] of [
    ['mirror', 'from', 'to', true],
    ['both', 'from', 'to', true],
    ['new', 'to', 'from', false],
  ] as const) {
    const pair = pairOf()
    const { id } = await claimed(pair.from)
    await pair.to.put(id, bytesOf('unknown', newToken()), SPANS)
    let isNoted = false
    const append: Store['history']['append'] = async (...args) => {
      await new Promise((later) => setImmediate(later))
      isNoted = true
      return pair[other].history.append(...args)
    }
    const slow = { ...pair[other], history: { ...pair[other].history, append } }
    const store = migrating(lead === 'from' ? pair.from : slow, lead === 'from' ? slow : pair.to, phase)
    t.equal(await store.history.append(id, [NOTE]), true, phase)
    t.equal(isNoted, both)
    t.equal((await pair[lead].history.read(id)).length, 1)
    t.equal((await pair[other].history.read(id)).length, both ? 1 : 0)
    await pair[other].history.append(id, [{ ...NOTE, tag: 'b' }])
    t.match(await store.history.read(id), [{ tag: 'a' }], 'that of the lead')
    t.equal((await store.history.read(id)).length, 1)
    t.equal(await store.history.append(newId(), [NOTE]), false, 'there is no such record')
  }
  const { to, on } = pairOf()
  const { id } = await claimed(to)
  await to.history.append(id, [NOTE])
  t.same(await on('mirror').history.read(id), [], 'a mirror does not ask')
  t.match(await on('both').history.read(id), [{ tag: 'a' }])
})

void t.test('the time of the other store is asked for where its instants count', async (t) => {
  const { on } = pairOf()
  t.notOk('pingOther' in on('mirror'))
  t.equal(await on('both').pingOther?.(), NOW - HOUR)
  t.equal(await on('new').pingOther?.(), NOW)
  const { on: without } = pairOf({ to: { ping: down } })
  t.equal(await without('mirror').ping(), NOW, 'a mirror does not need the new store')
  t.equal(
    await pairOf({ from: { ping: down } })
      .on('new')
      .ping(),
    NOW - HOUR,
    'nor phase new the old one',
  )
})

void t.test('closing closes both stores, and waits for them', async (t) => {
  const closed: string[] = []
  const close = (name: string) => async () => {
    await new Promise((later) => setImmediate(later))
    closed.push(name)
  }
  await pairOf({ from: { close: close('from') }, to: { close: close('to') } })
    .on('both')
    .close()
  t.same(closed.toSorted(), ['from', 'to'])
})

void t.test('both: a lease is renewed if both stores have renewed it', async (t) => {
  const { from, to, on } = pairOf()
  const all = [await claimed(on('both')), await claimed(from), await claimed(to)]
  const items = all.map((claim) => ({ ...claim, dueIn: HOUR, dropIn: HOUR }))
  t.same(await on('both').renew(items), [true, false, false])
  t.same(await on('mirror').renew(items), [true, true, false], 'in a mirror the old store decides')
  t.same(await on('new').renew(items), [true, false, true], 'and in phase new the new one')
  await t.rejects(
    pairOf({ to: { renew: down } })
      .on('both')
      .renew(items),
    { name: 'StoreUnavailable' },
  )
  let isRenewed = false
  const renew: Store['renew'] = async (some) => {
    await new Promise((later) => setImmediate(later))
    isRenewed = true
    return to.renew(some)
  }
  await migrating(from, { ...to, renew }, 'mirror').renew(items)
  t.ok(isRenewed, 'which waits for the new store, too')
})

void t.test('responses that end are those of the leading store', async (t) => {
  const asked: unknown[] = []
  const due =
    (name: string): Store['due'] =>
    async (_limit, of) => (asked.push([name, of]), [])
  const { on } = pairOf({ from: { due: due('from') }, to: { due: due('to') } })
  for (const phase of PHASES) await on(phase).due(10, 'bodies')
  t.same(asked, [
    ['from', 'bodies'],
    ['from', 'bodies'],
    ['to', 'bodies'],
  ])
  asked.length = 0
  for (const phase of ['mirror', 'new'] as const) await on(phase).due(10)
  t.same(asked, [
    ['from', undefined],
    ['to', undefined],
  ])
})

void t.test('both: a record that is due in both stores is listed once, and only if it is due', async (t) => {
  const { clock, from, to, on } = pairOf()
  const both = await claimed(on('both'))
  const longer = await claimed(to)
  await from.put(longer.id, bytesOf('unknown', longer.token), { dueIn: 5 * HOUR, dropIn: 9 * HOUR })
  clock.now += SPANS.dueIn
  t.same(await on('both').due(10), [both.id])
  t.equal((await recordIn(to, longer.id))?.state, 'unknown', 'the other store has the later state now')
})

void t.test('both: a claim that the new store refuses is given back', async (t) => {
  await t.test(
    'as free, under nobody’s token, so that an earlier try that comes late finds it',
    async (t) => {
      const { from, on } = pairOf({ to: { put: down } })
      const [id, token] = [newId(), newToken()]
      await Promise.resolve(on('both').put(id, bytesOf('in_progress', token), SPANS)).catch(() => {})
      const { bytes } = await from.get(id)
      const left = decodeRecord(bytes as Buffer)
      t.equal(left.state, 'failed_retryable')
      t.notOk(left.token.equals(token))
      const { due, dropAt, fence } = readStamps(bytes as Buffer)
      t.equal(due, dropAt, 'it is never due')
      t.equal(fence, NOW + 1, 'and the next attempt’s fence is higher than that of the claim')
    },
  )
  await t.test('as the free record that the new store has', async (t) => {
    for (const fence of [7, NOW + 5]) {
      const { from, to, on } = pairOf()
      const [id, token] = [newId(), newToken()]
      await to.put(id, bytesOf('failed_retryable', token, { fence, createdAt: NOW - 5 }), SPANS)
      const put = await on('both').put(id, bytesOf('in_progress', newToken()), SPANS)
      t.match(put.done ? null : decodeRecord(put.bytes), { state: 'failed_retryable', token })
      t.match(await recordIn(from, id), { state: 'failed_retryable', token, fence: Math.max(fence, NOW) })
    }
  })
  await t.test('as free, if the new store has it for another attempt, which holds the key', async (t) => {
    const { from, to, on } = pairOf()
    const { id, token } = await claimed(to)
    const put = await on('both').put(id, bytesOf('in_progress', newToken()), SPANS)
    t.match(put.done ? null : decodeRecord(put.bytes), { state: 'in_progress', token })
    t.match(await recordIn(from, id), { state: 'in_progress', token })
  })
  await t.test('and what both stores accept is not an outcome that only one has', async (t) => {
    const { from, on } = pairOf({ to: { put: down } })
    const [id, token] = [newId(), newToken()]
    await t.rejects(async () => on('both').put(id, bytesOf('completed', token), SPANS), {
      name: 'StoreUnavailable',
    })
    t.match(await recordIn(from, id), { state: 'completed', token }, 'but it stays where it is')
  })
  await t.test('unless the new store may have it', async (t) => {
    const inDoubt = async (): Promise<never> => {
      throw new StoreUnavailable('lost', true)
    }
    const { from, on } = pairOf({ to: { put: inDoubt } })
    const [id, token] = [newId(), newToken()]
    await t.rejects(async () => on('both').put(id, bytesOf('in_progress', token), SPANS), {
      name: 'StoreUnavailable',
      maybeApplied: true,
    })
    t.match(await recordIn(from, id), { state: 'in_progress', token })
  })
})

void t.test('both: an outcome that is repeated reaches the store that lacks it', async (t) => {
  const { from, to, on } = pairOf()
  const claim = await claimed(on('both'))
  await settled(from, claim, 'completed')
  t.equal((await recordIn(to, claim.id))?.state, 'in_progress')
  const again = await settled(on('both'), claim, 'completed')
  t.equal(again.done, false)
  t.match(again.done || again.bytes === null ? null : decodeRecord(again.bytes), { state: 'completed' })
  t.equal((await recordIn(to, claim.id))?.state, 'completed')
})

void t.test('both: a claim that is repeated is the same claim', async (t) => {
  const { from, to, on } = pairOf()
  const [id, token] = [newId(), newToken()]
  const claim = () => bytesOf('in_progress', token)
  const put = async (store = on('both')) => store.put(id, claim(), SPANS)
  t.ok((await put()).done)
  const again = await put()
  t.match(again.done ? null : decodeRecord(again.bytes), { state: 'in_progress', token })
  await to.remove(id, (await recordIn(to, id))?.version ?? 0)
  await put()
  t.match(await recordIn(to, id), { token, fence: (await recordIn(from, id))?.fence }, 'made in both stores')
  await to.remove(id, (await recordIn(to, id))?.version ?? 0)
  const other = newToken()
  await to.put(id, bytesOf('in_progress', other), SPANS)
  await t.rejects(put(), { name: 'StoreUnavailable', maybeApplied: true }, 'another attempt has the other')
  t.match(await recordIn(to, id), { token: other })
})

void t.test('new: a takeover gets a higher fence than either store had, and an outcome none', async (t) => {
  const { from, to, on } = pairOf()
  const claim = await claimed(on('both'))
  await settled(on('both'), claim, 'failed_retryable')
  const { version } = (await recordIn(from, claim.id)) as { version: number }
  const [own, record] = [newToken(), await recordIn(from, claim.id)]
  const raised = bytesOf('failed_retryable', claim.token, { fence: NOW + 50 })
  t.ok((await from.swap(claim.id, { version }, raised, SPANS, false)).done)
  const there = (await recordIn(to, claim.id)) as { version: number; fence: number }
  t.equal(there.fence, record?.fence)
  const taken = await on('new').swap(
    claim.id,
    { version: there.version },
    bytesOf('in_progress', own),
    SPANS,
    true,
  )
  t.match(taken, { done: true, stamp: { fence: NOW + 51 } })
  const { version: now } = (await recordIn(to, claim.id)) as { version: number }
  const decided = bytesOf('unknown', own)
  t.match(await on('new').swap(claim.id, { version: now }, decided, SPANS, false), {
    done: true,
    stamp: { fence: NOW + 51 },
  })
})

void t.test('removing a record removes it from both stores', async (t) => {
  for (const phase of PHASES) {
    const { from, to, on } = pairOf()
    const claim = await claimed(on('both'))
    await settled(on('both'), claim, 'completed')
    const { version } = (await recordIn(on(phase), claim.id)) as { version: number }
    t.equal(await on(phase).remove(claim.id, version + 7), false, phase)
    for (const side of [from, to]) t.ok(await recordIn(side, claim.id))
    t.equal(await on(phase).remove(claim.id, version), true, phase)
    for (const side of [from, to]) t.equal(await recordIn(side, claim.id), null, phase)
    t.equal(await on(phase).remove(claim.id, version), false, phase)
    const open = await claimed(on('both'))
    const { version: held } = (await recordIn(on(phase), open.id)) as { version: number }
    t.equal(await on(phase).remove(open.id, held), true, phase)
    for (const side of [from, to]) t.equal(await recordIn(side, open.id), null, phase)
  }
})

void t.test(
  'lists of a mirror are those of the old store, and others continue in the other one',
  async (t) => {
    const { from, to, on } = pairOf()
    const [one, two, three] = [await claimed(from), await claimed(to), await claimed(to)]
    t.same(await on('mirror').list('all', null, 10), { ids: [one.id], next: null })
    for (const [phase, first, rest] of [
      ['both', [one.id], [two.id, three.id]],
      ['new', [two.id, three.id], [one.id]],
    ] as const) {
      const lead = await on(phase).list('all', null, 10)
      t.same(lead, { ids: first, next: 'o' }, phase)
      t.same(await on(phase).list('all', lead.next, 10), { ids: rest, next: null }, phase)
      const part = await on(phase).list('all', 'o', 1)
      if (rest.length > 1) t.same((await on(phase).list('all', part.next, 10)).ids, rest.slice(1))
    }
  },
)

/** A few turns of the event loop later. */
function late<Args extends unknown[], Reply>(call: (...args: Args) => Reply) {
  return async (...args: Args): Promise<Awaited<Reply>> => {
    for (let n = 0; n < 5; n++) await new Promise((next) => setImmediate(next))
    return await call(...args)
  }
}

void t.test('a store that answers late is waited for', async (t) => {
  const { clock, from, to } = pairOf()
  const slow = {
    ...to,
    put: late(to.put),
    swap: late(to.swap),
    remove: late(to.remove),
  }
  const claim = await claimed(migrating(from, to, 'both'))
  await settled(from, claim, 'completed')
  await settled(migrating(from, slow, 'both'), claim, 'completed')
  t.equal((await recordIn(to, claim.id))?.state, 'completed', 'with a repeated outcome')

  const due = await claimed(migrating(from, to, 'both'))
  await settled(from, due, 'completed')
  clock.now += SPANS.dueIn
  await migrating(from, slow, 'both').due(10)
  t.equal((await recordIn(to, due.id))?.state, 'completed', 'by the sweeper')

  const mirrored = await claimed(migrating(from, to, 'mirror'))
  const { version } = (await recordIn(from, mirrored.id)) as { version: number }
  t.ok(await migrating(from, slow, 'mirror').remove(mirrored.id, version))
  t.equal(await recordIn(to, mirrored.id), null, 'by a removal')

  const copied = await claimed(from)
  await from.history.append(copied.id, [NOTE])
  const history = { ...to.history, append: late(to.history.append) }
  await migrating(from, { ...to, history }, 'new').get(copied.id)
  t.equal((await to.history.read(copied.id)).length, 1, 'with a history')

  const refused = await claimed(to)
  const put = await migrating({ ...from, swap: late(from.swap) }, to, 'both').put(
    refused.id,
    bytesOf('in_progress', newToken()),
    SPANS,
  )
  t.match(put.done ? null : decodeRecord(put.bytes), { token: refused.token }, 'with a claim given back')
})

void t.test('a failure of the leading store is its caller’s, however late the other one is', async (t) => {
  const { to } = pairOf()
  const slow = { ...to, renew: late(to.renew), history: { ...to.history, append: late(to.history.append) } }
  const { from } = pairOf({})
  const failing = { ...from, renew: down, history: { ...from.history, append: down } }
  const { id, token } = await claimed(from)
  const mirror = migrating(failing, slow, 'mirror')
  await t.rejects(mirror.renew([{ id, token, ...SPANS }]), { name: 'StoreUnavailable' })
  await t.rejects(mirror.history.append(id, [NOTE]), { name: 'StoreUnavailable' })
})

void t.test('an answer in the leading store is given while the other one is down', async (t) => {
  const { from, to } = pairOf()
  const claim = await claimed(from)
  await settled(from, claim, 'completed')
  const alone = migrating(from, { ...to, get: down }, 'both')
  t.equal((await recordIn(alone, claim.id))?.state, 'completed')
  const put = await alone.put(claim.id, bytesOf('in_progress', newToken()), SPANS)
  t.match(put.done ? null : decodeRecord(put.bytes), { state: 'completed' })
  await new Promise((next) => setImmediate(next))
})

void t.test('a mirror does not need the new store for a claim that is repeated', async (t) => {
  const { on } = pairOf({ to: { get: down, put: down } })
  const [id, token] = [newId(), newToken()]
  const put = async () => on('mirror').put(id, bytesOf('in_progress', token), SPANS)
  t.ok((await put()).done)
  t.match(await put(), { done: false })
})

void t.test('both: the new store', async (t) => {
  await t.test('is asked for a claim as for any other, and told outcomes even in its grace', async (t) => {
    const entries: unknown[] = []
    const { from, to } = pairOf()
    const put: Store['put'] = async (...args) => (entries.push(args[3]), to.put(...args))
    const claim = await claimed(migrating(from, { ...to, put }, 'both'))
    t.same(entries, ['claim'])
    await to.remove(claim.id, (await recordIn(to, claim.id))?.version ?? 0)
    t.ok((await settled(migrating(from, { ...to, put }, 'both'), claim, 'completed')).done)
    t.same(entries, ['claim', 'again'])
  })
  await t.test('is not told an outcome in place of an answer that it has', async (t) => {
    const { from, to, on } = pairOf()
    const claim = await claimed(on('both'))
    await settled(to, claim, 'completed')
    t.ok((await settled(on('both'), claim, 'unknown')).done)
    t.equal((await recordIn(to, claim.id))?.state, 'completed')
    t.equal((await recordIn(on('both'), claim.id))?.state, 'completed')
    t.equal((await recordIn(from, claim.id))?.state, 'completed')
  })
  await t.test('never lacks the record while it is told an outcome', async (t) => {
    const { from, to, on } = pairOf()
    const claim = await claimed(on('both'))
    const remove: Store['remove'] = async () => {
      t.fail('removed')
      return false
    }
    t.ok((await settled(migrating(from, { ...to, remove }, 'both'), claim, 'completed')).done)
    t.equal((await recordIn(to, claim.id))?.state, 'completed')
  })
  await t.test('has an outcome before it counts as written', async (t) => {
    const { from, to, on } = pairOf()
    const claim = await claimed(on('both'))
    const swap: Store['swap'] = async () => ({ done: false, now: NOW, bytes: (await to.get(claim.id)).bytes })
    await t.rejects(settled(migrating(from, { ...to, swap }, 'both'), claim, 'completed'), {
      name: 'RecordLocked',
    })
  })
  await t.test('gets the record of a takeover, not one with the lifetime of an earlier one', async (t) => {
    const { from, to, on } = pairOf()
    const id = newId()
    const free = (createdAt: number) => bytesOf('failed_retryable', newToken(), { createdAt, fence: 5 })
    await from.put(id, free(NOW - 10), SPANS)
    await to.put(id, free(NOW - 999), SPANS)
    const { version } = (await recordIn(from, id)) as { version: number }
    const token = newToken()
    const slow = { ...to, remove: late(to.remove) }
    const both = migrating(from, slow, 'both')
    t.ok((await both.swap(id, { version }, bytesOf('in_progress', token), SPANS, true)).done)
    for (const side of [from, to])
      t.match(await recordIn(side, id), { state: 'in_progress', token, createdAt: NOW - 10 })
    t.match(await on('both').get(id), { now: NOW })
  })
  await t.test('gets a claim that a failover of it took back, even in its grace', async (t) => {
    const { from, to, on } = pairOf()
    const [id, token] = [newId(), newToken()]
    const claim = () => bytesOf('in_progress', token, { createdAt: NOW - 10, fence: 9 })
    await from.put(id, claim(), SPANS)
    await to.put(id, bytesOf('failed_retryable', newToken(), { createdAt: NOW - 10, fence: 5 }), SPANS)
    const swap: Store['swap'] = async (...args) => {
      if (args[4]) throw new InGrace(NOW, NOW, 1)
      return to.swap(...args)
    }
    const put = await migrating(from, { ...to, swap }, 'both').put(id, claim(), SPANS, 'again')
    t.match(put, { done: false })
    for (const side of [from, to]) t.match(await recordIn(side, id), { state: 'in_progress', token })
    await to.remove(id, (await recordIn(to, id))?.version ?? 0)
    const strange = bytesOf('failed_retryable', newToken())
    strange[PREFIX.schema] = 9
    await to.put(id, strange, SPANS)
    await t.rejects(async () => on('both').put(id, claim(), SPANS, 'again'), {
      name: 'StoreUnavailable',
      maybeApplied: true,
    })
  })
  await t.test('may have a claim after a bug, so the old one keeps it', async (t) => {
    const { from, on } = pairOf({ to: { put: bug } })
    const [id, token] = [newId(), newToken()]
    await t.rejects(async () => on('both').put(id, bytesOf('in_progress', token), SPANS), {
      name: 'TypeError',
    })
    t.match(await recordIn(from, id), { state: 'in_progress', token })
  })
})

void t.test('new: the old store is told that a key is free, and nothing else', async (t) => {
  for (const state of ['completed', 'unknown', 'failed_retryable'] as const) {
    const { from, on } = pairOf()
    const claim = await claimed(on('both'))
    t.ok((await settled(on('new'), claim, state)).done)
    const told = state === 'failed_retryable' ? state : 'in_progress'
    t.equal((await recordIn(from, claim.id))?.state, told, state)
  }
})

void t.test('a record that never comes to rest fails as locked', async (t) => {
  const { to, from, on } = pairOf({ from: { get: async () => ({ now: NOW, bytes: null }) } })
  const { id, token } = await claimed(to)
  await t.rejects(async () => on('both').get(id), { name: 'RecordLocked' })
  t.match(await recordIn(from, id), { token })
})

void t.test('both: a removal removes the other store’s record first', async (t) => {
  const { from, to } = pairOf()
  const claim = await claimed(migrating(from, to, 'both'))
  const { version } = (await recordIn(from, claim.id)) as { version: number }
  const refusing = { ...to, remove: async () => false }
  await t.rejects(migrating(from, refusing, 'both').remove(claim.id, version), { name: 'RecordLocked' })
  t.ok(await recordIn(from, claim.id))

  const strange = bytesOf('completed', newToken())
  strange[PREFIX.schema] = 9
  const done = await claimed(from)
  await settled(from, done, 'completed')
  await to.put(done.id, Buffer.from(strange), SPANS)
  const answered = (await recordIn(from, done.id)) as { version: number }
  await t.rejects(migrating(from, to, 'both').remove(done.id, answered.version), { name: 'CorruptRecord' })
  t.ok(await recordIn(from, done.id), 'a person decides about one that cannot be read')

  const unreadable = newId()
  for (const side of [from, to]) await side.put(unreadable, Buffer.from(strange), SPANS)
  t.ok(await migrating(from, to, 'both').remove(unreadable, NOW))
  for (const side of [from, to]) t.equal((await side.get(unreadable)).bytes, null, 'unless it is so in both')

  const only = await claimed(from)
  const own = (await recordIn(from, only.id)) as { version: number }
  t.ok(await migrating(from, to, 'mirror').remove(only.id, own.version), 'or in one')
})

void t.test('a mirror writes takeovers to the new store, too', async (t) => {
  const { from, to, on } = pairOf()
  const claim = await claimed(on('mirror'))
  await settled(on('mirror'), claim, 'failed_retryable')
  const { version } = (await recordIn(from, claim.id)) as { version: number }
  const token = newToken()
  const takeOver = async (at: number) =>
    on('mirror').swap(claim.id, { version: at }, bytesOf('in_progress', token), SPANS, true)
  t.match(await takeOver(version + 7), { done: false })
  t.equal((await recordIn(to, claim.id))?.state, 'failed_retryable')
  t.match(await takeOver(version), { done: true })
  const { fence } = (await recordIn(from, claim.id)) as { fence: number }
  for (const side of [from, to])
    t.match(await recordIn(side, claim.id), { state: 'in_progress', token, fence })
})

void t.test('both: a claim is given back if the new store’s record cannot be read', async (t) => {
  const { from, to, on } = pairOf()
  const id = newId()
  const strange = bytesOf('in_progress', newToken())
  strange[PREFIX.schema] = 9
  await to.put(id, strange, SPANS)
  await t.rejects(async () => on('both').put(id, bytesOf('in_progress', newToken()), SPANS), {
    name: 'CorruptRecord',
  })
  t.equal((await recordIn(from, id))?.state, 'failed_retryable')
})

void t.test('both: a claim that neither was taken back nor is in both stores is in doubt', async (t) => {
  const { from, to } = pairOf()
  const { id, token } = await claimed(to)
  const swap: Store['swap'] = async () => ({ done: false, now: NOW, bytes: null })
  await t.rejects(
    async () => migrating({ ...from, swap }, to, 'both').put(id, bytesOf('in_progress', newToken()), SPANS),
    { name: 'StoreUnavailable', maybeApplied: true },
    'its attempt must not take it for its own',
  )
  t.match(await recordIn(to, id), { token })
})

void t.test('both: a write that depends on the version', async (t) => {
  const free = async (store: Store) => {
    const claim = await claimed(store)
    await settled(store, claim, 'failed_retryable')
    return claim.id
  }
  const versionIn = async (store: Store, id: RecordId) => (await recordIn(store, id))?.version ?? 0
  await t.test('reaches the new store even if that lacks the record', async (t) => {
    const { from, to, on } = pairOf()
    const id = await free(from)
    const token = newToken()
    const version = await versionIn(from, id)
    t.ok((await on('both').swap(id, { version }, bytesOf('in_progress', token), SPANS, true)).done)
    const taken = await recordIn(from, id)
    t.match(await recordIn(to, id), { state: 'in_progress', token, fence: taken?.fence })
  })
  await t.test('raises no fence unless it is a takeover', async (t) => {
    const { from, to, on } = pairOf()
    const id = await free(on('both'))
    const { fence, version } = (await recordIn(from, id)) as { fence: number; version: number }
    t.ok((await on('both').swap(id, { version }, bytesOf('unknown', newToken()), SPANS, false)).done)
    for (const side of [from, to]) t.match(await recordIn(side, id), { state: 'unknown', fence })
  })
  await t.test('stays in the old store if the new one is down, unless it is a takeover', async (t) => {
    for (const [state, nextFence, stays] of [
      ['completed', false, true],
      ['unknown', true, true],
      ['in_progress', false, true],
      ['in_progress', true, false],
    ] as const) {
      const { from, to, on } = pairOf()
      const id = await free(on('both'))
      const version = await versionIn(from, id)
      const failing = migrating({ ...from, swap: late(from.swap) }, { ...to, put: down, swap: down }, 'both')
      await t.rejects(
        async () => failing.swap(id, { version }, bytesOf(state, newToken()), SPANS, nextFence),
        { name: 'StoreUnavailable' },
      )
      t.equal((await recordIn(from, id))?.state, stays ? state : 'failed_retryable', state)
    }
  })
  await t.test('changes nothing if the old store refuses it', async (t) => {
    const { from, to, on } = pairOf()
    const id = await free(on('both'))
    const version = await versionIn(from, id)
    const swap: Store['swap'] = async () => ({ done: false, now: NOW, bytes: null })
    const refusing = migrating({ ...from, swap }, to, 'both')
    t.match(await refusing.swap(id, { version }, bytesOf('in_progress', newToken()), SPANS, true), {
      done: false,
    })
    t.equal((await recordIn(to, id))?.state, 'failed_retryable')
  })
  await t.test('of what is left of an answer is told to the new store', async (t) => {
    const { from, to, on } = pairOf()
    const id = newId()
    await from.put(id, bytesOf('expired', newToken()), SPANS)
    const token = newToken()
    const version = await versionIn(from, id)
    t.ok((await on('both').swap(id, { version }, bytesOf('in_progress', token), SPANS, true)).done)
    t.match(await recordIn(to, id), { state: 'in_progress', token })
  })
})

void t.test(
  'both: an outcome replaces a record of an earlier life, however slow its removal is',
  async (t) => {
    const { from, to } = pairOf()
    const claim = await claimed(from)
    await to.put(claim.id, bytesOf('failed_retryable', newToken(), { createdAt: NOW - 999 }), SPANS)
    const both = migrating(from, { ...to, remove: late(to.remove) }, 'both')
    t.ok((await settled(both, claim, 'completed')).done)
    t.match(await recordIn(to, claim.id), { state: 'completed', token: claim.token })
  },
)

void t.test('a mirror reads the old store alone', async (t) => {
  const { from, on } = pairOf({ to: { get: down } })
  const { id, token } = await claimed(from)
  t.match(await recordIn(on('mirror'), id), { token })
})

void t.test('an outcome that the leading store refuses', async (t) => {
  await t.test('is refused by a mirror, whatever the new store has', async (t) => {
    const { from, to, on } = pairOf()
    const claim = await claimed(to)
    t.match(await settled(on('mirror'), claim, 'completed'), { done: false, bytes: null })
    t.equal(await recordIn(from, claim.id), null)
    t.equal((await recordIn(to, claim.id))?.state, 'in_progress')
  })
  await t.test('is tried again once, not for ever', async (t) => {
    const { from, to, on } = pairOf()
    const claim = await claimed(on('both'))
    let tries = 0
    const swap: Store['swap'] = async () => {
      if (tries++ > 50) throw new Error('for ever')
      return { done: false, now: NOW, bytes: null }
    }
    t.match(await settled(migrating({ ...from, swap }, to, 'both'), claim, 'completed'), { done: false })
    t.equal(tries, 2)
  })
})
