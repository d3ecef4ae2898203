import t, { type Test } from 'tap'
import { PHASES, type Phase } from '../../src/core/copies.ts'
import type { RecordId, State } from '../../src/core/record.ts'
import { NOBODY } from '../../src/core/settle.ts'
import { markOf } from '../../src/store/marks.ts'
import { migrating } from '../../src/store/moving/migrating.ts'
import { decodeRecord, PREFIX } from '../../src/store/record/codec.ts'
import { packed } from '../../src/store/record/packed.ts'
import { Sealer } from '../../src/store/record/sealing.ts'
import { InGrace, type Store, StoreUnavailable, type SwapReply } from '../../src/store/register.ts'
import { registerContract } from './contract.ts'
import { answeringLater, bytesOf, HOUR, newId, newToken, pairHarness, SPANS } from './fixtures.ts'

/* Two stores as one: what test/model/migration.test.ts leaves out of all orders of claims and outcomes in all phases. */

const NOW = 1_795_000_000_000
const NOTE = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '' }

for (const phase of ['both', 'new'] as const)
  registerContract(t, `two stores in phase ${phase}`, async () => pairHarness(phase))

interface Over {
  readonly from?: Partial<Store>
  readonly to?: Partial<Store>
}

/** The new store's clock is an hour behind. `over`: what a store does instead, as replicas of a phase see it. */
function pairOf() {
  const clock = { now: NOW }
  const [from, to] = [answeringLater(() => clock.now), answeringLater(() => clock.now - HOUR)]
  const on = (phase: Phase, over: Over = {}): Store =>
    migrating({ ...from, ...over.from }, { ...to, ...over.to }, phase)
  return { clock, from, to, sides: [from, to], on }
}

async function recordIn(store: Store, id: RecordId) {
  const { bytes } = await store.get(id)
  return bytes === null ? null : decodeRecord(bytes)
}

async function stateIn(store: Store, id: RecordId): Promise<State | undefined> {
  return (await recordIn(store, id))?.state
}

async function versionIn(store: Store, id: RecordId): Promise<number> {
  return (await recordIn(store, id))?.version ?? 0
}

async function both(
  t: Test,
  sides: readonly Store[],
  id: RecordId,
  expected: object,
  what = '',
): Promise<void> {
  for (const side of sides) t.match(await recordIn(side, id), expected, what)
}

function shown(reply: Awaited<ReturnType<Store['put']>> | SwapReply) {
  return reply.done || reply.bytes === null ? null : decodeRecord(reply.bytes)
}

interface Claim {
  readonly id: RecordId
  readonly token: Buffer
}

async function claim(store: Store, id = newId(), token = newToken()) {
  return store.put(id, bytesOf('in_progress', token), SPANS)
}

/** The same claim, which a failover may have lost. */
async function again(store: Store, { id, token }: Claim) {
  return store.put(id, bytesOf('in_progress', token, { fence: 7, createdAt: NOW }), SPANS, 'again')
}

async function settled(
  store: Store,
  { id, token }: Claim,
  state: 'completed' | 'failed_retryable' | 'unknown',
) {
  const states = ['in_progress', 'unknown', 'failed_retryable'] as const
  return store.swap(id, { token, states }, bytesOf(state, token), SPANS, false)
}

/** A claim that is made there, and has got as far as that. */
async function made(
  store: Store,
  state: Parameters<typeof settled>[2] | 'in_progress' = 'in_progress',
): Promise<Claim> {
  const own = { id: newId(), token: newToken() }
  t.ok((await claim(store, own.id, own.token)).done)
  if (state !== 'in_progress') t.ok((await settled(store, own, state)).done)
  return own
}

async function takenOver(
  store: Store,
  id: RecordId,
  version: number,
  token = newToken(),
  state: State = 'in_progress',
) {
  return store.swap(id, { version }, bytesOf(state, token), SPANS, true)
}

/** One that this release cannot read. Returns its version. */
async function strange(store: Store, id: RecordId): Promise<number> {
  const bytes = bytesOf('completed', newToken())
  bytes[PREFIX.schema] = 9
  return (await store.put(id, bytes, SPANS)).now
}

const down = async (): Promise<never> => {
  throw new StoreUnavailable('down', false)
}
const bug = async (): Promise<never> => {
  throw new TypeError('a bug')
}
const refused = async (): Promise<SwapReply> => ({ done: false, now: NOW, bytes: null })
const DOWN = { name: 'StoreUnavailable', maybeApplied: false }
const IN_DOUBT = { name: 'StoreUnavailable', maybeApplied: true }
const held = () => Promise.reject(new InGrace(NOW, NOW, 1))

/** A store in its grace: it grants nothing, and takes what is written again. */
function inGrace(store: Store): Partial<Store> {
  return {
    put: (id, bytes, spans, entry) => (entry === 'again' ? store.put(id, bytes, spans, entry) : held()),
    swap: (id, on, bytes, spans, nextFence) =>
      nextFence ? held() : store.swap(id, on, bytes, spans, nextFence),
  }
}

/** A few turns of the event loop later. */
function late<Args extends unknown[], Reply>(call: (...args: Args) => Reply) {
  return async (...args: Args): Promise<Awaited<Reply>> => {
    for (let n = 0; n < 5; n++) await new Promise((next) => setImmediate(next))
    return await call(...args)
  }
}

void t.test('a record of the old store answers in every phase, and phase new copies it', async (t) => {
  const { clock, from, to, on } = pairOf()
  const states = ['completed', 'failed_retryable', 'unknown'] as const
  const [done, free, unknown] = (await Promise.all(states.map((state) => made(from, state)))) as [
    Claim,
    Claim,
    Claim,
  ]
  await from.history.append(done.id, [NOTE])
  t.match(await on('new').history.read(done.id), [{ tag: 'a' }], 'its history, too')
  for (const phase of PHASES)
    for (const { id } of [done, free, unknown]) t.notOk((await claim(on(phase), id)).done, phase)
  t.equal(await stateIn(to, done.id), 'completed')
  t.match(await to.history.read(done.id), [{ tag: 'a' }])
  t.equal(await stateIn(to, free.id), 'failed_retryable')
  clock.now += SPANS.dueIn
  t.same(await on('new').due(10), [unknown.id], 'the new store lists it as due')
})

void t.test('a mirror', async (t) => {
  await t.test('goes on while the new store is down, but does not hide a bug', async (t) => {
    const { on, from } = pairOf()
    const all = { put: down, swap: down, renew: down, get: down, remove: down, ping: down }
    const mirror = on('mirror', { to: { ...all, history: { append: down, read: down } } })
    const own = await made(mirror)
    t.notOk((await claim(mirror, own.id, own.token)).done, 'a claim that is repeated')
    t.same(await mirror.renew([{ ...own, dueIn: 1000, dropIn: 1000 }]), [true])
    t.ok((await settled(mirror, own, 'completed')).done)
    t.ok(await mirror.history.append(own.id, [NOTE]))
    t.match(await mirror.history.read(own.id), [{ tag: 'a' }])
    t.match(await recordIn(mirror, own.id), { token: own.token })
    t.equal(await mirror.ping(), NOW)
    t.ok(await mirror.remove(own.id, await versionIn(from, own.id)))
    await t.rejects(claim(on('mirror', { to: { put: bug } })), { name: 'TypeError' })
  })
  await t.test('goes on beside a record that it cannot read in the new store', async (t) => {
    const { from, to, on } = pairOf()
    const { id, token } = await made(from)
    await strange(to, id)
    const version = await versionIn(from, id)
    const unknown = bytesOf('unknown', token)
    t.ok((await on('mirror').swap(id, { version }, unknown, SPANS, false)).done)
    t.ok(await on('mirror').remove(id, version + 1))
    t.ok((await to.get(id)).bytes)
  })
  await t.test('refuses an outcome that the old store refuses, whatever the new one has', async (t) => {
    const { from, to, on } = pairOf()
    const own = await made(to)
    t.match(await settled(on('mirror'), own, 'completed'), { done: false, bytes: null })
    t.equal(await recordIn(from, own.id), null)
    t.equal(await stateIn(to, own.id), 'in_progress')
  })
})

void t.test('both: a claim that the new store does not take', async (t) => {
  const inDoubt = async (): Promise<never> => {
    throw new StoreUnavailable('lost', true)
  }
  for (const [what, over, error, left] of [
    ['is withdrawn while that is down', { to: { put: down } }, DOWN, 'failed_retryable'],
    [
      'unless the withdrawal is in doubt',
      { to: { put: down }, from: { swap: down } },
      IN_DOUBT,
      'in_progress',
    ],
    ['or fails by a bug', { to: { put: down }, from: { swap: bug } }, { name: 'TypeError' }, 'in_progress'],
    ['stays where the new store may have it', { to: { put: inDoubt } }, IN_DOUBT, 'in_progress'],
    ['even after a bug', { to: { put: bug } }, { name: 'TypeError' }, 'in_progress'],
  ] as const)
    await t.test(what, async (t) => {
      const { from, on } = pairOf()
      const [id, token] = [newId(), newToken()]
      await t.rejects(claim(on('both', over), id, token), error)
      t.equal(await stateIn(from, id), left)
    })
  await t.test('is given back as the free record that the new store has', async (t) => {
    for (const fence of [7, NOW + 5]) {
      const { from, to, on } = pairOf()
      const [id, token] = [newId(), newToken()]
      await to.put(id, bytesOf('failed_retryable', token, { fence, createdAt: NOW - 5 }), SPANS)
      t.match(shown(await claim(on('both'), id)), { state: 'failed_retryable', token })
      t.match(await recordIn(from, id), { state: 'failed_retryable', token, fence: Math.max(fence, NOW) })
    }
  })
  await t.test('is given back if the record there cannot be read', async (t) => {
    const { from, to, on } = pairOf()
    const id = newId()
    await strange(to, id)
    await t.rejects(claim(on('both'), id), { name: 'CorruptRecord' })
    t.equal(await stateIn(from, id), 'failed_retryable')
  })
  await t.test('is in doubt if it was neither taken back nor is in both', async (t) => {
    const { to, on } = pairOf()
    const { id, token } = await made(to)
    await t.rejects(claim(on('both', { from: { swap: refused } }), id), IN_DOUBT)
    t.match(await recordIn(to, id), { token }, 'its attempt must not take it for its own')
  })
  await t.test('is in doubt if both forget what they have', async (t) => {
    const { to, on } = pairOf()
    const { id } = await made(to)
    const get = async () => ({ now: NOW, bytes: null })
    await t.rejects(claim(on('both', { from: { swap: refused, get }, to: { get } }), id), IN_DOUBT)
  })
  await t.test('is no outcome, which stays in the one store that has it', async (t) => {
    const { from, on } = pairOf()
    const [id, token] = [newId(), newToken()]
    const put = async () => on('both', { to: { put: down } }).put(id, bytesOf('completed', token), SPANS)
    await t.rejects(put(), { name: 'StoreUnavailable' })
    t.match(await recordIn(from, id), { state: 'completed', token })
  })
})

void t.test('both: a claim that is repeated is the same claim', async (t) => {
  const { from, to, on } = pairOf()
  const { id, token } = await made(on('both'))
  t.match(shown(await claim(on('both'), id, token)), { state: 'in_progress', token })
  t.ok(await to.remove(id, await versionIn(to, id)))
  await claim(on('both'), id, token)
  t.match(await recordIn(to, id), { token, fence: (await recordIn(from, id))?.fence }, 'made in both stores')
  t.ok(await to.remove(id, await versionIn(to, id)))
  const other = newToken()
  await claim(to, id, other)
  await t.rejects(claim(on('both'), id, token), IN_DOUBT, 'another attempt has the other')
  t.match(await recordIn(to, id), { token: other })
  const twice: Store['put'] = async (at, bytes, spans) => {
    await to.put(at, Buffer.from(bytes), spans)
    return to.put(at, bytes, spans)
  }
  t.ok((await claim(on('both', { to: { put: twice } }))).done, 'the first try arrived late')
})

void t.test('both: a record that vanishes meanwhile is never claimed in one store alone', async (t) => {
  const { clock, from, to, on } = pairOf()
  // Found, and gone a moment later.
  const { id } = await made(from)
  let asked = 0
  const going: Partial<Store> = {
    get: async (at) => (asked++ === 0 ? { now: clock.now, bytes: null } : from.get(at)),
    put: async (at, bytes, spans) => {
      const reply = await from.put(at, bytes, spans)
      if (asked === 0) await from.remove(at, await versionIn(from, at))
      return reply
    },
  }
  t.ok((await claim(on('both', { from: going }), id)).done, 'it is claimed again')
  t.equal(await stateIn(to, id), 'in_progress')
})

void t.test('both: a takeover', async (t) => {
  await t.test('gets its record into the new store, not one of an earlier lifetime', async (t) => {
    const { from, to, sides, on } = pairOf()
    const [id, token] = [newId(), newToken()]
    const free = (createdAt: number) => bytesOf('failed_retryable', newToken(), { createdAt, fence: 5 })
    await from.put(id, free(NOW - 10), SPANS)
    await to.put(id, free(NOW - 999), SPANS)
    const slow = on('both', { to: { remove: late(to.remove) } })
    t.ok((await takenOver(slow, id, await versionIn(from, id), token)).done)
    await both(t, sides, id, { state: 'in_progress', token, createdAt: NOW - 10 })
    t.match(await on('both').get(id), { now: NOW })
  })
  await t.test('of a record that the new store loses fails as locked', async (t) => {
    const { from, on } = pairOf()
    const { id } = await made(on('both'), 'failed_retryable')
    const lost = takenOver(on('both', { to: { swap: refused } }), id, await versionIn(from, id))
    await t.rejects(lost, { name: 'RecordLocked' })
  })
  await t.test('is held back by a grace of the new store, too', async (t) => {
    const { from, to, sides, on } = pairOf()
    // A replica in `new` has taken it over in the new store, which then failed over to before that.
    const { id, token } = await made(on('both'), 'failed_retryable')
    const takeOver = async (store: Store) => takenOver(store, id, await versionIn(from, id))
    await t.rejects(takeOver(on('both', { to: inGrace(to) })), { name: 'InGrace', maybeApplied: false })
    await both(t, sides, id, { state: 'failed_retryable', token })
    t.ok((await takeOver(on('both'))).done, 'afterwards it is granted')
    const one = await recordIn(from, id)
    t.match(await recordIn(to, id), { state: 'in_progress', token: one?.token, fence: one?.fence })
  })
  await t.test('of a sealed record can be undone so that it can be read', async (t) => {
    const sealed = (store: Store) => packed(store, new Sealer([{ id: 'k1', key: Buffer.alloc(32, 1) }]))
    for (const token of [newToken(), NOBODY]) {
      const { from, to } = pairOf()
      const id = newId()
      const whole = migrating(sealed(from), sealed(to), 'both')
      t.ok((await whole.put(id, bytesOf('failed_retryable', token, { fence: 7 }), SPANS)).done)
      const holding = migrating(sealed(from), sealed({ ...to, swap: held }), 'both')
      await t.rejects(takenOver(holding, id, await versionIn(whole, id)))
      t.match(await recordIn(whole, id), { state: 'failed_retryable', token })
    }
  })
  await t.test('reaches the new store even if that lacks the record, or it has expired', async (t) => {
    for (const state of ['failed_retryable', 'expired'] as const) {
      const { from, to, on } = pairOf()
      const [id, token] = [newId(), newToken()]
      await from.put(id, bytesOf(state, newToken()), SPANS)
      t.ok((await takenOver(on('both'), id, await versionIn(from, id), token)).done)
      t.match(await recordIn(to, id), {
        state: 'in_progress',
        token,
        fence: (await recordIn(from, id))?.fence,
      })
    }
  })
})

void t.test('both: a write that depends on the version', async (t) => {
  await t.test('raises no fence unless it is a takeover', async (t) => {
    const { from, sides, on } = pairOf()
    const { id } = await made(on('both'), 'failed_retryable')
    const { fence, version } = (await recordIn(from, id)) as { fence: number; version: number }
    t.ok((await on('both').swap(id, { version }, bytesOf('unknown', newToken()), SPANS, false)).done)
    await both(t, sides, id, { state: 'unknown', fence })
  })
  await t.test('stays in the old store if the new one is down, unless it is a takeover', async (t) => {
    for (const [state, nextFence, stays] of [
      ['completed', false, true],
      ['unknown', true, true],
      ['in_progress', false, true],
      ['in_progress', true, false],
    ] as const) {
      const { from, on } = pairOf()
      const { id } = await made(on('both'), 'failed_retryable')
      const version = await versionIn(from, id)
      const failing = on('both', { from: { swap: late(from.swap) }, to: { put: down, swap: down } })
      const swap = async () => failing.swap(id, { version }, bytesOf(state, newToken()), SPANS, nextFence)
      await t.rejects(swap(), { name: 'StoreUnavailable' })
      t.equal(await stateIn(from, id), stays ? state : 'failed_retryable', state)
    }
  })
  await t.test('changes nothing if the old store refuses it, or neither has the record', async (t) => {
    const { from, to, on } = pairOf()
    const { id } = await made(on('both'), 'failed_retryable')
    const refusing = on('both', { from: { swap: refused } })
    t.match(await takenOver(refusing, id, await versionIn(from, id)), { done: false })
    t.equal(await stateIn(to, id), 'failed_retryable')
    t.match(await takenOver(on('both'), newId(), 7), { done: false, bytes: null })
  })
})

void t.test('both: an outcome', async (t) => {
  await t.test('that is written anew is refused with that of the new store', async (t) => {
    const { from, to, on } = pairOf()
    const { id, token } = await made(on('both'))
    const other = newToken()
    t.ok((await takenOver(to, id, await versionIn(to, id), other, 'completed')).done)
    t.equal(await stateIn(from, id), 'in_progress')
    t.match(shown(await on('both').put(id, bytesOf('completed', token), SPANS, 'again')), { token: other })
  })
  await t.test('is told to the new store even in its grace, unlike a claim', async (t) => {
    const { to, on } = pairOf()
    const entries: unknown[] = []
    const put: Store['put'] = async (...args) => (entries.push(args[3]), to.put(...args))
    const noting = on('both', { to: { put } })
    const own = await made(noting)
    t.same(entries, ['claim'])
    await to.remove(own.id, await versionIn(to, own.id))
    t.ok((await settled(noting, own, 'completed')).done)
    t.same(entries, ['claim', 'again'])
  })
  await t.test('that the old store refuses is tried again once, not for ever', async (t) => {
    const { on } = pairOf()
    const own = await made(on('both'))
    let tries = 0
    const swap: Store['swap'] = async () => {
      if (tries++ > 50) throw new Error('for ever')
      return refused()
    }
    t.match(await settled(on('both', { from: { swap } }), own, 'completed'), { done: false })
    t.equal(tries, 2)
  })
})

void t.test('both: after a failover', async (t) => {
  await t.test('a claim that is written again stays, even if the other store refuses', async (t) => {
    for (const [lost, when] of [
      [['from'], 'the other store is down'],
      [['from', 'to'], 'the other store is in its own grace'],
    ] as const) {
      const pair = pairOf()
      const { to, sides, on } = pair
      const own = await made(on('both'))
      for (const side of lost) await pair[side].remove(own.id, await versionIn(pair[side], own.id))
      const hampered = on('both', { to: lost.length === 1 ? { put: down, get: down } : inGrace(to) })
      await again(hampered, own).catch(() => {})
      t.match(await recordIn(pair.from, own.id), { state: 'in_progress', token: own.token }, when)
      t.notOk((await claim(on('both'), own.id)).done, 'nobody else gets it')
      t.match(await again(on('both'), own), { done: false })
      await both(t, sides, own.id, { state: 'in_progress', token: own.token })
    }
  })
  await t.test('a claim that only one store has is written to the other, even in its grace', async (t) => {
    const { to, on } = pairOf()
    const own = await made(on('both'))
    await to.remove(own.id, await versionIn(to, own.id))
    t.match(await again(on('both', { to: inGrace(to) }), own), { done: false })
    t.match(await recordIn(to, own.id), { state: 'in_progress', token: own.token })
  })
  await t.test('the new store gets a claim that its failover took back, even in its grace', async (t) => {
    const { from, to, sides, on } = pairOf()
    const own = { id: newId(), token: newToken() }
    const life = { createdAt: NOW, fence: 5 }
    await from.put(own.id, bytesOf('in_progress', own.token, { ...life, fence: 9 }), SPANS)
    await to.put(own.id, bytesOf('failed_retryable', newToken(), life), SPANS)
    t.match(await again(on('both', { to: inGrace(to) }), own), { done: false })
    await both(t, sides, own.id, { state: 'in_progress', token: own.token })
    await to.remove(own.id, await versionIn(to, own.id))
    await strange(to, own.id)
    await t.rejects(again(on('both'), own), IN_DOUBT)
  })
})

void t.test('both: a lease', async (t) => {
  await t.test('that phase new has just renewed is not taken over', async (t) => {
    const { clock, from, sides, on } = pairOf()
    const own = await made(on('new'))
    const { id, token } = own
    t.notOk((await claim(on('both'), id)).done)
    clock.now += SPANS.dueIn
    t.match(await recordIn(on('both'), id), { state: 'in_progress', leaseUntil: clock.now })
    t.same(await on('new').renew([{ ...own, ...SPANS }]), [true])
    const version = await versionIn(on('both'), id)
    t.match(await takenOver(on('both'), id, version), { done: false })
    t.notOk(await on('both').remove(id, version), 'nor deleted')
    t.match(await recordIn(on('both'), id), { token, version, leaseUntil: clock.now + SPANS.dueIn })
    await both(t, sides, id, { state: 'in_progress', token })
    // What a replica in `both` wrote down before that.
    await from.swap(id, { version }, bytesOf('unknown', token, { leaseExpired: true }), SPANS, false)
    t.match(await recordIn(on('both'), id), { state: 'in_progress', token })
    t.ok((await settled(on('new'), own, 'completed')).done)
    t.match(await recordIn(on('both'), id), { state: 'completed' })
  })
  await t.test('that the new store alone has renewed keeps out no outcome', async (t) => {
    const { clock, to, on } = pairOf()
    const own = await made(on('both'))
    clock.now += SPANS.dueIn
    t.same(await to.renew([{ ...own, ...SPANS }]), [true])
    const version = await versionIn(on('both'), own.id)
    t.match(await takenOver(on('both'), own.id, version), { done: false })
    t.ok((await on('both').swap(own.id, { version }, bytesOf('completed', own.token), SPANS, false)).done)
    t.match(await recordIn(to, own.id), { state: 'completed', token: own.token })
  })
  await t.test('is renewed if both stores renewed it; elsewhere the lead decides', async (t) => {
    const { from, to, on } = pairOf()
    const all = [await made(on('both')), await made(from), await made(to)]
    const items = all.map((own) => ({ ...own, dueIn: HOUR, dropIn: HOUR }))
    t.same(await on('both').renew(items), [true, false, false])
    t.same(await on('mirror').renew(items), [true, true, false])
    t.same(await on('new').renew(items), [true, false, true])
    await t.rejects(on('both', { to: { renew: down } }).renew(items), { name: 'StoreUnavailable' })
    let isRenewed = false
    const renew: Store['renew'] = async (some) => late(to.renew)(some).finally(() => (isRenewed = true))
    await on('mirror', { to: { renew } }).renew(items)
    t.ok(isRenewed, 'a mirror waits for the new store, too')
  })
})

void t.test('new: what it decides', async (t) => {
  await t.test('and frees a key is not undone by the old store', async (t) => {
    const { from, on } = pairOf()
    const { id, token } = await made(from, 'unknown')
    const version = await versionIn(on('new'), id)
    t.ok((await on('new').swap(id, { version }, bytesOf('failed_retryable', token), SPANS, false)).done)
    t.equal(await stateIn(on('new'), id), 'failed_retryable')
    const only = await made(on('new'), 'failed_retryable')
    t.equal(await recordIn(from, only.id), null)
  })
  await t.test('gives a takeover a higher fence than either store had, and an outcome none', async (t) => {
    const { from, to, on } = pairOf()
    const { id, token } = await made(on('both'), 'failed_retryable')
    const before = await recordIn(from, id)
    const version = before?.version ?? 0
    const raised = bytesOf('failed_retryable', token, { fence: NOW + 50 })
    t.ok((await from.swap(id, { version }, raised, SPANS, false)).done)
    t.equal((await recordIn(to, id))?.fence, before?.fence)
    const own = newToken()
    const granted = { done: true, stamp: { fence: NOW + 51 } }
    t.match(await takenOver(on('new'), id, await versionIn(to, id), own), granted)
    const now = { version: await versionIn(to, id) }
    t.match(await on('new').swap(id, now, bytesOf('unknown', own), SPANS, false), granted)
  })
})

void t.test('removing a record', async (t) => {
  await t.test('removes it from both stores', async (t) => {
    for (const phase of PHASES)
      for (const state of ['completed', 'in_progress'] as const) {
        const { sides, on } = pairOf()
        const { id } = await made(on('both'), state)
        const version = await versionIn(on(phase), id)
        t.equal(await on(phase).remove(id, version + 7), false, phase)
        for (const side of sides) t.ok(await recordIn(side, id))
        t.equal(await on(phase).remove(id, version), true, phase)
        for (const side of sides) t.equal(await recordIn(side, id), null, phase)
        t.equal(await on(phase).remove(id, version), false, phase)
      }
    const { from, to, on } = pairOf()
    const { id } = await made(on('both'))
    const slow = on('mirror', { to: { remove: late(to.remove) } })
    t.ok(await slow.remove(id, await versionIn(from, id)))
    t.equal(await recordIn(to, id), null, 'however late')
  })
  await t.test('leaves a claim that phase new has just made of it', async (t) => {
    for (const isMirrored of [true, false]) {
      const { from, to, on } = pairOf()
      const { id } = await made(isMirrored ? on('both') : from, 'failed_retryable')
      const own = newToken()
      let reads = 0
      const get: Store['get'] = async (at) => {
        const read = await to.get(at)
        if (reads++ > 0) return read
        const found = shown(await claim(on('new'), id, own))
        t.ok((await takenOver(on('new'), id, found?.version ?? 0, own)).done)
        return read
      }
      const removing = on('both', { to: { get } }).remove(id, await versionIn(from, id))
      await removing.catch((error: Error) => t.equal(error.name, 'RecordLocked'))
      t.match(await recordIn(to, id), { state: 'in_progress', token: own })
      for (const phase of ['both', 'new'] as const) t.notOk((await claim(on(phase), id)).done, phase)
    }
  })
  await t.test('removes the other store’s first', async (t) => {
    for (const state of ['in_progress', 'completed'] as const) {
      const { from, on } = pairOf()
      const { id } = await made(on('both'), state)
      const refusing = on('both', { to: { remove: async () => false } })
      await t.rejects(refusing.remove(id, await versionIn(from, id)), { name: 'RecordLocked' })
      t.ok(await recordIn(from, id))
    }
  })
  await t.test('that one store cannot read leaves the one in the other store', async (t) => {
    const { from, to, sides, on } = pairOf()
    const done = await made(to, 'completed')
    t.ok(await on('both').remove(done.id, await strange(from, done.id)))
    t.equal((await from.get(done.id)).bytes, null)
    t.equal(await stateIn(on('both'), done.id), 'completed')
    for (const state of ['in_progress', 'completed'] as const) {
      const { id } = await made(from, state)
      await strange(to, id)
      await t.rejects(on('both').remove(id, await versionIn(from, id)), { name: 'CorruptRecord' })
      t.ok(await recordIn(from, id), 'a person decides about one that cannot be read')
    }
    const unreadable = newId()
    for (const side of sides) await strange(side, unreadable)
    t.ok(await on('both').remove(unreadable, NOW))
    for (const side of sides) t.equal((await side.get(unreadable)).bytes, null, 'unless it is so in both')
    const only = await made(from)
    t.ok(await on('mirror').remove(only.id, await versionIn(from, only.id)), 'or in one')
  })
})

void t.test('a record that cannot be read in the new store is reported', async (t) => {
  const { from, to, on } = pairOf()
  const { id } = await made(from, 'unknown')
  await strange(to, id)
  await t.rejects(async () => on('both').get(id), { name: 'CorruptRecord' })
  const due = { from: { due: async () => [] }, to: { due: async () => [id] } }
  t.same(await on('both', due).due(1), [id], 'by the sweeper')
})

void t.test('a record sealed with a key that a replica lacks is copied as it is', async (t) => {
  const [one, two] = [1, 2].map((n) => ({ id: `k${n}`, key: Buffer.alloc(32, n) })) as [Key, Key]
  type Key = ConstructorParameters<typeof Sealer>[0][number]
  const { from, to } = pairOf()
  const id = newId()
  t.ok((await packed(from, new Sealer([two])).put(id, bytesOf('unknown', newToken()), SPANS)).done)
  const reading = (...keys: Key[]) => {
    const sealer = new Sealer(keys)
    return recordIn(migrating(packed(from, sealer), packed(to, sealer), 'new'), id)
  }
  await t.rejects(reading(one), { name: 'CorruptRecord', reason: 'unknown_key' })
  t.match(await reading(two, one), { state: 'unknown' })
})

void t.test('a record that others keep writing, or that never comes to rest, fails as locked', async (t) => {
  const { from, to, on } = pairOf()
  const { id } = await made(from)
  await to.put(id, bytesOf('failed_retryable', newToken()), SPANS)
  const locked = { name: 'RecordLocked' }
  await t.rejects(async () => on('new', { to: { remove: async () => false } }).get(id), locked)
  const other = await made(to)
  const forgetting = on('both', { from: { get: async () => ({ now: NOW, bytes: null }) } })
  await t.rejects(async () => forgetting.get(other.id), locked)
  t.match(await recordIn(from, other.id), { token: other.token })
})

void t.test('an answer in the leading store is given while the other one is down', async (t) => {
  const { from, on } = pairOf()
  const { id } = await made(from, 'completed')
  const alone = on('both', { to: { get: down } })
  t.equal(await stateIn(alone, id), 'completed')
  t.match(shown(await claim(alone, id)), { state: 'completed' })
  await new Promise((next) => setImmediate(next))
})

void t.test('both: what is due', async (t) => {
  await t.test('only in the new store, or stale there, is synchronised', async (t) => {
    const { clock, from, to, on } = pairOf()
    const [only, stale, gone] = [await made(to), await made(on('both')), await made(to)]
    await settled(from, stale, 'completed')
    clock.now += SPANS.dueIn
    t.same((await to.due(10)).toSorted(), [only.id, stale.id, gone.id].toSorted())
    const get: Store['get'] = async (id) => (id === gone.id ? { now: clock.now, bytes: null } : to.get(id))
    const slow = { get, put: late(to.put), swap: late(to.swap) }
    t.same(await on('both', { to: slow }).due(10), [only.id])
    t.equal(await stateIn(from, only.id), 'in_progress')
    t.equal(await stateIn(to, stale.id), 'completed')
    const failing = { due: async () => [newId()], get: down }
    await t.rejects(on('both', { to: failing }).due(1), { name: 'StoreUnavailable' })
  })
  await t.test('in both stores is listed once, and only if it is due', async (t) => {
    const { clock, from, to, on } = pairOf()
    const own = await made(on('both'))
    const longer = await made(to)
    await from.put(longer.id, bytesOf('unknown', longer.token), { dueIn: 5 * HOUR, dropIn: 9 * HOUR })
    clock.now += SPANS.dueIn
    t.same(await on('both').due(10), [own.id])
    t.equal(await stateIn(to, longer.id), 'unknown', 'the other store has the later state now')
  })
  await t.test('of responses is what the leading store says, as all is elsewhere', async (t) => {
    const asked: unknown[] = []
    const due =
      (name: string): Store['due'] =>
      async (_, of) => (asked.push([name, of]), [])
    const { on } = pairOf()
    const over = { from: { due: due('from') }, to: { due: due('to') } }
    for (const phase of PHASES) await on(phase, over).due(10, 'bodies')
    for (const phase of ['mirror', 'new'] as const) await on(phase, over).due(10)
    const sides = ['from', 'from', 'to', 'from', 'to']
    t.same(
      asked,
      sides.map((side, n) => [side, n < 3 ? 'bodies' : undefined]),
    )
  })
})

void t.test('lists begin with the leading store’s, show each record once, and no marks', async (t) => {
  const { from, to, on } = pairOf()
  const [one, two, three] = [await made(from), await made(to), await made(to)]
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
  const shared = await made(on('both'))
  for (const side of [to, from])
    await side.put(markOf('both'), bytesOf('failed_retryable', newToken()), SPANS)
  const ids: string[] = []
  for (let cursor: string | null = null, page = 0; page === 0 || cursor !== null; page++) {
    const found = await on('both').list('all', cursor, 1)
    ids.push(...found.ids)
    cursor = found.next
  }
  t.same(ids.toSorted(), [one.id, two.id, three.id, shared.id].toSorted())
  t.same((await on('mirror').list('all', null, 10)).ids.toSorted(), [one.id, shared.id].toSorted())
  await t.rejects(on('both').list('all', 'x', 1), RangeError)
})

void t.test('what people did is noted where the phase writes, and read from one store', async (t) => {
  for (const [phase, lead, other, isTold] of [
    ['mirror', 'from', 'to', true],
    ['both', 'from', 'to', true],
    ['new', 'to', 'from', false],
  ] as const) {
    const pair = pairOf()
    const { id } = await made(pair.from)
    await pair.to.put(id, bytesOf('unknown', newToken()), SPANS)
    const slow = { history: { ...pair[other].history, append: late(pair[other].history.append) } }
    const store = pair.on(phase, { [other]: slow })
    t.equal(await store.history.append(id, [NOTE]), true, phase)
    t.equal((await pair[lead].history.read(id)).length, 1)
    t.equal((await pair[other].history.read(id)).length, isTold ? 1 : 0, 'and it has waited')
    await pair[other].history.append(id, [{ ...NOTE, tag: 'b' }])
    t.match(await store.history.read(id), [{ tag: 'a' }], 'that of the lead')
    t.equal((await store.history.read(id)).length, 1)
    t.equal(await store.history.append(newId(), [NOTE]), false, 'there is no such record')
  }
  const { from, to, on } = pairOf()
  const { id } = await made(to)
  await to.history.append(id, [NOTE])
  t.same(await on('mirror').history.read(id), [], 'a mirror does not ask')
  t.match(await on('both').history.read(id), [{ tag: 'a' }])
  const copied = await made(from)
  await from.history.append(copied.id, [NOTE])
  await on('new', { to: { history: { ...to.history, append: late(to.history.append) } } }).get(copied.id)
  t.equal((await to.history.read(copied.id)).length, 1, 'it is copied with its record')
})

void t.test('a failure of the leading store is its caller’s, however late the other one is', async (t) => {
  const { from, to, on } = pairOf()
  const own = await made(from)
  const mirror = on('mirror', {
    from: { renew: down, history: { ...from.history, append: down } },
    to: { renew: late(to.renew), history: { ...to.history, append: late(to.history.append) } },
  })
  await t.rejects(mirror.renew([{ ...own, ...SPANS }]), { name: 'StoreUnavailable' })
  await t.rejects(mirror.history.append(own.id, [NOTE]), { name: 'StoreUnavailable' })
})

void t.test('traits are those of the weaker store, and in phase mirror those of the old one', async (t) => {
  const told = ([durable, evicts]: readonly [boolean | null, boolean | null], no: string): Partial<Store> => {
    const texts = { findings: ['why'], refusals: [no] }
    return {
      traits: async () => ({ durable, evicts, forgets: evicts ? 'lost' : null, hasIdentity: true, ...texts }),
    }
  }
  for (const [phase, from, to, expected] of [
    ['mirror', [true, false], [false, true], { durable: true, evicts: false }],
    ['mirror', [false, true], [true, false], { durable: false, forgets: 'lost' }],
    [
      'both',
      [true, false],
      [false, true],
      { durable: false, evicts: true, forgets: 'lost', hasIdentity: true },
    ],
    ['new', [null, null], [true, false], { durable: null, evicts: null, forgets: null }],
    ['new', [true, false], [true, false], { durable: true, evicts: false }],
  ] as const)
    t.match(
      await pairOf()
        .on(phase, { from: told(from, 'no'), to: told(to, 'never') })
        .traits(),
      {
        ...expected,
        findings: ['why'],
        refusals: ['moved from: no', 'moved to: never'],
        topology: `migration from memory to memory, phase ${phase}`,
      },
    )
})

void t.test('the time is that of the leading store; in phase both, both must answer', async (t) => {
  const { on } = pairOf()
  t.equal(await on('mirror').ping(), NOW)
  t.equal(await on('new', { from: { ping: down } }).ping(), NOW - HOUR)
  await t.rejects(on('both', { to: { ping: down } }).ping(), { name: 'StoreUnavailable' })
  t.equal(on('mirror').pingOther, undefined, 'that of the other one is asked for where its instants count')
  t.equal(await on('both').pingOther?.(), NOW - HOUR)
  t.equal(await on('new').pingOther?.(), NOW)
})

void t.test('closing closes both stores, and waits for them', async (t) => {
  const closed: string[] = []
  const close = (name: string) => late(async () => void closed.push(name))
  await pairOf()
    .on('both', { from: { close: close('from') }, to: { close: close('to') } })
    .close()
  t.same(closed.toSorted(), ['from', 'to'])
})
