import { hash } from 'node:crypto'
import t from 'tap'
import type { Identification } from '../../src/core/identification.ts'
import { Agreement } from '../../src/store/agreement.ts'
import { inPhase } from '../../src/store/around.ts'
import { IDENTIFICATION_MARK, MARKED_FOR, SURE_FOR } from '../../src/store/marks.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import { CorruptRecord, InGrace, OutOfPhase, type PutKind, type Store } from '../../src/store/register.ts'
import { answeringLater, bytesOf, down, failing, hurried, newId, newToken, SPANS, until } from './fixtures.ts'

/** The first agree with each other, not with the second. */
const [ONE, OTHER] = [{ scope: 'a' }, { scope: 'b' }].map(
  ({ scope }): Identification => ({
    digest: hash('sha256', scope, 'buffer'),
    parts: { 'routes[pay]': ['match', 'key', scope], 'routes[refund]': ['match', 'key', 'scope'] },
  }),
) as [Identification, Identification]
const DIFFERENCE = /\(routes\[pay\]\.scope\) is alive, or was 15 s ago: .* record of keys of pay /

/** A store whose clock is that of the replicas. */
function world() {
  const clock = { now: 1_795_000_000_000 }
  const store = answeringLater(() => clock.now)
  const said: (string | null)[] = []
  let elsewhere = 0
  const agreement = (
    own: Identification,
    over: Partial<{ stores: Store[]; accepts: boolean; upstream: string }> = {},
  ) =>
    new Agreement(over.stores ?? [store], {
      own,
      upstream: over.upstream ?? 'here',
      accepts: over.accepts ?? false,
      say: (why) => void said.push(why),
      onOtherUpstream: () => void elsewhere++,
      clock: () => clock.now,
    })
  const isSure = ({ sureUntil }: Agreement): boolean => clock.now < sureUntil
  return { clock, store, said, agreement, isSure, elsewhere: () => elsewhere }
}

const claim = async (store: Store) => store.put(newId(), bytesOf('in_progress', newToken()), SPANS)

void t.test('Y20 who identifies records differently claims only once nobody holds the mark', async (t) => {
  const { clock, said, agreement, isSure } = world()
  const [one, same, other] = [agreement(ONE), agreement(ONE), agreement(OTHER)]
  t.notOk(isSure(one))
  for (const each of [one, same, other]) await each.renew()
  t.same([one, same, other].map(isSure), [true, true, false])
  t.equal(one.conflict, null)
  t.match(other.conflict, DIFFERENCE)
  t.same(said, [other.conflict], 'nothing is said without a reason')
  await other.renew()
  t.equal(said.length, 1, 'nor twice')
  clock.now += MARKED_FOR - 1
  await same.renew()
  clock.now += MARKED_FOR - 1
  await other.renew()
  t.notOk(isSure(other), 'one of them is alive')
  clock.now += 1
  await other.renew()
  t.ok(isSure(other))
  t.same([other.conflict, said.at(-1)], [null, null])
  await one.renew()
  t.match([isSure(one), one.conflict], [false, DIFFERENCE])
})

void t.test('Y20 a replica that was paused looks before it claims', async (t) => {
  const { clock, store, agreement } = world()
  const one = agreement(ONE)
  await one.renew()
  const guarded = inPhase(store, one)
  t.match(await claim(guarded), { done: true })
  clock.now += SURE_FOR - 1
  t.match(
    await claim(guarded),
    { done: true },
    'a claim that is sent by then arrives while the mark is there',
  )
  clock.now += 1
  t.match(await claim(guarded), { done: true }, 'it has looked: the mark was still there')
  clock.now += MARKED_FOR
  await agreement(OTHER).renew()
  await t.rejects(claim(guarded), { name: 'OutOfPhase', maybeApplied: false, message: DIFFERENCE })
  // Paused after its claim was sent.
  clock.now += MARKED_FOR
  const late = inPhase(
    {
      ...store,
      put: async (...args) => {
        const reply = await store.put(...args)
        clock.now += MARKED_FOR
        await agreement(OTHER).renew()
        return reply
      },
    },
    one,
  )
  await one.renew()
  await t.rejects(claim(late), { name: 'OutOfPhase', maybeApplied: true, message: DIFFERENCE })
})

void t.test('Y20 in a grace, only who was sure of the mark writes it again', async (t) => {
  const { clock, store, agreement, isSure } = world()
  const entries: (PutKind | undefined)[] = []
  const graceful = failing(store, (entry) => {
    if (entry === undefined) return null
    entries.push(entry)
    return entry === 'claim' && entries.length > 1 ? new InGrace(clock.now, clock.now, 1000) : null
  })
  const [one, other] = [agreement(ONE, { stores: [graceful] }), agreement(OTHER, { stores: [graceful] })]
  await one.renew()
  const lose = async () => {
    const { bytes } = await store.get(IDENTIFICATION_MARK)
    await store.remove(IDENTIFICATION_MARK, decodeRecord(bytes as Buffer).version)
  }
  await lose()
  await t.rejects(other.renew(), { name: 'InGrace' })
  await one.rewrite()
  await other.renew()
  t.same([isSure(one), isSure(other)], [true, false])
  await lose()
  clock.now += SURE_FOR
  await one.rewrite()
  t.notOk(isSure(one), 'another may have it')
  t.same(entries, ['claim', 'claim', 'again', 'claim'])
})

void t.test('Y20 a mark is written again after the failover, though it is just being written', async (t) => {
  const { store, agreement } = world()
  let writes = 0
  const gate = Promise.withResolvers<void>()
  const slow: Store = {
    ...store,
    put: async (...args) => {
      writes++
      await gate.promise
      return store.put(...args)
    },
    swap: async (...args) => {
      writes++
      return store.swap(...args)
    },
  }
  const one = agreement(ONE, { stores: [slow] })
  const entering = one.enter()
  await until(() => writes === 1)
  t.equal(one.renew(), one.renew(), 'once for all')
  const again = one.rewrite()
  gate.resolve()
  await Promise.all([entering, again])
  t.equal(writes, 2)
  await one.stop()
})

void t.test('Y20 whoever accepts it claims at once, and says so in one line', async (t) => {
  const { clock, said, agreement, isSure } = world()
  await agreement(ONE).renew()
  const other = agreement(OTHER, { accepts: true })
  for (let n = 0; n < 2; n++) await other.renew()
  t.ok(isSure(other))
  t.equal(other.conflict, null)
  t.match(said, [/\(routes\[pay\]\.scope\) .*: keys of pay may execute twice/])
  await agreement(ONE).renew()
  clock.now += MARKED_FOR
  await other.renew()
  t.same(said.slice(1), [null])
  const one = agreement(ONE)
  await one.renew()
  t.match(one.conflict, DIFFERENCE)
})

void t.test('replicas of one service that forward to different upstreams are told once', async (t) => {
  const { clock, agreement, isSure, elsewhere } = world()
  const [one, same, other] = ['a', 'a', 'b'].map((upstream) => agreement(ONE, { upstream })) as [
    Agreement,
    Agreement,
    Agreement,
  ]
  for (const each of [one, same, one]) await each.renew()
  t.equal(elsewhere(), 0)
  await other.renew()
  t.ok(isSure(other), 'it may be another address of the same API')
  t.equal(elsewhere(), 1)
  for (const each of [one, other, same, one]) await each.renew()
  t.equal(elsewhere(), 3, 'each of them, once')
  await other.stop()
  await one.stop()
  const next = agreement(ONE, { upstream: 'a' })
  await next.renew()
  t.equal(elsewhere(), 3, 'who has ended does not count')
  clock.now += MARKED_FOR
  await agreement(ONE, { upstream: 'b' }).renew()
  t.equal(elsewhere(), 3, 'nor who is gone')
})

void t.test('replicas of an earlier version do not say where they forward to', async (t) => {
  const { clock, store, agreement, isSure, elsewhere } = world()
  const path = JSON.stringify({ parts: ONE.parts, alive: { earlier: clock.now } })
  const token = ONE.digest.subarray(0, 16)
  await store.put(IDENTIFICATION_MARK, bytesOf('failed_retryable', token, { path }), SPANS)
  const one = agreement(ONE)
  await one.renew()
  t.ok(isSure(one))
  t.equal(elsewhere(), 0)
})

void t.test('Y20 a mark that cannot be read is that of another', async (t) => {
  const { store, agreement, isSure } = world()
  const mark = bytesOf('failed_retryable', newToken(), { path: 'of a later version' })
  await store.put(IDENTIFICATION_MARK, mark, SPANS)
  const one = agreement(ONE)
  await one.renew()
  t.notOk(isSure(one))
  t.match(
    one.conflict,
    /\(what it is cannot be read: it was written by another version\).*record of all keys/,
  )
  const sealed = agreement(ONE, {
    stores: [{ ...store, get: async () => Promise.reject(new CorruptRecord('sealed')) }],
  })
  await sealed.renew()
  t.match(sealed.conflict, /cannot be read: sealed/)
})

void t.test('Y20 the last of those that agree takes the mark away as it ends', async (t) => {
  const { clock, store, agreement, isSure } = world()
  const [one, same, killed, other] = [agreement(ONE), agreement(ONE), agreement(ONE), agreement(OTHER)]
  await killed.renew()
  clock.now += MARKED_FOR - 1
  for (const each of [one, same]) await each.renew()
  await one.stop()
  t.notOk(isSure(one))
  await t.rejects(one.ensure(), { name: 'OutOfPhase', maybeApplied: false })
  await t.rejects(claim(inPhase(store, one)), { name: 'OutOfPhase' })
  await other.renew()
  t.notOk(isSure(other), 'one is alive')
  await other.stop()
  await same.renew()
  t.ok(isSure(same), 'others leave what is not theirs')
  clock.now += 1
  const renewing = same.renew()
  await same.stop()
  await renewing
  t.equal(
    (await store.get(IDENTIFICATION_MARK)).bytes,
    null,
    'what was killed may rely on its mark no longer',
  )
  const next = agreement(OTHER)
  await next.renew()
  t.ok(isSure(next), 'at once')
  await same.stop()
  t.not((await store.get(IDENTIFICATION_MARK)).bytes, null)
  await agreement(OTHER, { stores: [failing(store, down)] }).stop()
})

void t.test('Y20 a mark that others change meanwhile is tried again, but not for ever', async (t) => {
  const { clock, store, agreement } = world()
  const one = agreement(ONE)
  await one.renew()
  let rivals = 1
  const contended: Store = {
    ...store,
    swap: async (...args) => {
      if (rivals-- > 0) await agreement(ONE).renew()
      return store.swap(...args)
    },
    remove: async (...args) => {
      if (rivals-- > 0) await agreement(ONE).renew()
      return store.remove(...args)
    },
  }
  const same = agreement(ONE, { stores: [contended] })
  await same.renew()
  rivals = 20
  await t.rejects(same.renew(), { name: 'RecordLocked' })
  rivals = 1
  await same.stop()
  t.not((await store.get(IDENTIFICATION_MARK)).bytes, null, 'there are others')
  clock.now += MARKED_FOR
  const last = agreement(ONE, { stores: [contended] })
  await last.renew()
  rivals = 20
  await last.stop()
  t.not((await store.get(IDENTIFICATION_MARK)).bytes, null, 'it expires')
})

void t.test('Y20 while two stores decide, the marks of both are held', async (t) => {
  const { store, agreement, isSure } = world()
  const { store: old } = world()
  const before = agreement(ONE, { stores: [old] })
  const between = agreement(ONE, { stores: [old, store] })
  for (const one of [before, between]) await one.renew()
  t.ok(isSure(between))
  for (const stores of [[old], [old, store], [store]]) {
    const other = agreement(OTHER, { stores })
    await other.renew()
    t.notOk(isSure(other))
  }
})

void t.test('Y20 while the store is down it claims nothing, and tries often', async (t) => {
  const pauses = hurried(t)
  const hasPaused = (time: number) => pauses.some(({ delay }) => delay === time)
  const { store, said, agreement, isSure } = world()
  let isDown = true
  const one = agreement(ONE, { stores: [failing(store, () => (isDown ? down() : null))] })
  await one.enter()
  t.notOk(isSure(one))
  t.equal(one.conflict, null, 'the store may take no fleet out of service')
  await t.rejects(one.ensure(), { name: 'StoreUnavailable' })
  await t.rejects(claim(inPhase(store, one)), { name: 'StoreUnavailable' })
  t.notOk((await one.ensure().catch((error: unknown) => error)) instanceof OutOfPhase)
  await one.rewrite()
  isDown = false
  await until(() => isSure(one))
  await until(() => hasPaused(3000))
  t.equal(pauses[0]?.delay, 500)
  isDown = true
  pauses.length = 0
  await until(() => hasPaused(500))
  t.ok(isSure(one), 'also while it is sure: the failover may have lost the mark')
  isDown = false
  await until(() => pauses.at(-1)?.delay === 3000)
  const other = agreement(OTHER)
  await other.enter()
  pauses.length = 0
  await until(() => hasPaused(500))
  await Promise.all([one.stop(), other.stop()])
  t.match(said, [DIFFERENCE])
})

void t.test('Y20 a bug of the store is not taken for an outage', async (t) => {
  const { store, agreement } = world()
  const bug = () => new TypeError('a bug')
  for (const act of ['enter', 'renew', 'ensure', 'rewrite'] as const)
    await t.rejects(agreement(ONE, { stores: [failing(store, bug)] })[act](), { name: 'TypeError' })
})

void t.test('an agreement works with its default clock', async (t) => {
  const { store } = world()
  const one = new Agreement([store], {
    own: ONE,
    upstream: 'here',
    accepts: false,
    say: () => {},
    onOtherUpstream: () => {},
  })
  await one.renew()
  t.ok(performance.now() < one.sureUntil)
})

void t.test('several guards are sure while all are, and those that are not look again', async (t) => {
  const looked: string[] = []
  let now = 0
  const guard = (name: string, sureUntil: number) => ({
    sureUntil,
    clock: () => now,
    ensure: async () => void looked.push(name),
  })
  const guarded = inPhase(world().store, guard('one', 5), guard('other', 3))
  const looksAt = async (time: number): Promise<string[]> => {
    now = time
    t.match(await claim(guarded), { done: true })
    return looked.splice(0)
  }
  t.same(await looksAt(2), [])
  t.same(await looksAt(3), ['other', 'other'], 'before the claim, and after its reply')
  t.same(await looksAt(5), ['one', 'other', 'one', 'other'])
})
