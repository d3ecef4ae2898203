import t, { type Test } from 'tap'
import type { Phase } from '../../src/core/copies.ts'
import type { RecordId, State } from '../../src/core/record.ts'
import { inPhase } from '../../src/store/around.ts'
import { markOf } from '../../src/store/marks.ts'
import { memoryStore } from '../../src/store/memory.ts'
import { enteredBy, isMarked, PhaseConflict, PhaseWatch, Presence } from '../../src/store/moving/phases.ts'
import { decodeRecord, readStamps } from '../../src/store/record/codec.ts'
import { InGrace, OutOfPhase, type Store, StoreUnavailable } from '../../src/store/register.ts'
import {
  answeringLater,
  bytesOf,
  down,
  failing,
  hurried,
  newId,
  newToken,
  SPANS,
  settling,
  until,
} from './fixtures.ts'

const MARKED_FOR = 15_000
const SURE_FOR = 10_000

/** Two stores whose clock is that of the replicas. */
function world() {
  const clock = { now: 1_795_000_000_000 }
  const now = () => clock.now
  const sides = { from: answeringLater(now), to: answeringLater(now) }
  const said: (string | null)[] = []
  const presence = (
    phase: Phase,
    over: Partial<typeof sides> = {},
    pause = async (time: number): Promise<unknown> => void (clock.now += time),
  ) =>
    new Presence(
      { ...sides, ...over },
      { phase, replica: `a:${phase}`, say: (why) => void said.push(why), clock: () => clock.now, pause },
    )
  const lookout = (on: Pick<Store, 'get'>) =>
    new PhaseWatch(on, { say: (why) => void said.push(why), clock: () => clock.now })
  return { clock, sides, said, presence, lookout }
}

/** What a replica in that phase writes. */
async function markIn(phase: Phase): Promise<Buffer> {
  const { sides, presence } = world()
  await presence(phase).renew()
  return (await sides.from.get(markOf(phase))).bytes as Buffer
}

async function recordIn(store: Store, phase: Phase) {
  return decodeRecord((await store.get(markOf(phase))).bytes as Buffer)
}

async function entered(t: Test, replica: Pick<Presence, 'enter' | 'stop'>): Promise<void> {
  await replica.enter()
  t.teardown(() => replica.stop())
}

for (const [one, other] of [
  ['mirror', 'new'],
  ['new', 'mirror'],
] as const)
  void t.test(
    `W09 a replica in phase ${other} refuses to start while one in phase ${one} is alive`,
    async (t) => {
      const { clock, sides, said, presence } = world()
      const first = presence(one)
      await entered(t, first)
      t.equal(first.refusal, null)
      const second = presence(other)
      await t.rejects(second.enter(), { name: 'PhaseConflict', message: new RegExp(`phase ${one} is alive`) })
      t.type(new PhaseConflict(''), Error)
      t.match(second.refusal, /move all replicas through phase both/)
      t.equal(await isMarked(sides.from, other), false, 'the refused replica leaves no mark')
      const between = presence('both')
      await entered(t, between)
      t.equal(between.refusal, null, 'replicas in adjacent phases run side by side')
      await between.ensure()
      await t.rejects(second.ensure(), { name: 'OutOfPhase', maybeApplied: false })
      t.same(said.slice(-1), [null])

      clock.now += MARKED_FOR
      await second.renew()
      if (other === 'new') {
        t.match(second.refusal, /cannot tell/, 'it waits until all may have seen it')
        clock.now += SURE_FOR
        await second.renew()
      }
      t.equal(second.refusal, null, 'the mark has expired')
      // The first was paused.
      t.match(first.refusal, /cannot tell whether a replica two phases from .* is alive/)
      await first.renew()
      t.match(first.refusal, new RegExp(`phase ${other} is alive`))
      t.equal(await isMarked(sides.from, one), false)
    },
  )

void t.test('W09 of two replicas that start at the same moment, at least one refuses', async (t) => {
  const { sides, presence } = world()
  const [one, other] = [presence('mirror'), presence('new')]
  await Promise.allSettled([one.enter(), other.enter()])
  await Promise.all([one.stop(), other.stop()])
  t.ok([one, other].some(({ refusal }) => refusal !== null))
  t.ok((await isMarked(sides.from, 'mirror')) || (await isMarked(sides.from, 'new')))
})

void t.test('a store cannot be moved to itself under another name', async (t) => {
  const { sides, presence } = world()
  await t.rejects(presence('both', { to: sides.from }).enter(), {
    name: 'PhaseConflict',
    message: /the same store/,
  })
})

void t.test('a replica waits while a store is down; a mirror does not need the new one', async (t) => {
  const pauses = hurried(t)
  const { sides, said, presence } = world()
  let isDown = true
  const to = failing(sides.to, () => isDown && down())
  const mirror = presence('mirror', { to })
  await mirror.renew()
  t.equal(mirror.refusal, null)
  const both = presence('both', { to })
  await both.enter()
  t.match(both.refusal, /^cannot tell/)
  t.match(said.at(-1), /down/)
  await until(() => said.some((why) => why?.includes('cannot be announced') === true))
  isDown = false
  await until(() => both.refusal === null)
  t.same(pauses[0], { delay: 500, ref: false }, 'it tries often')
  await both.stop()
  const from = { ...sides.from, limits: { take: async () => Promise.reject(new TypeError('a bug')) } }
  await t.rejects(presence('both', { from }).enter(), { name: 'TypeError' })
})

void t.test('a mark says who entered the phase, and expires if it is not renewed', async (t) => {
  const { clock, sides, presence } = world()
  t.equal(await enteredBy(sides.from, 'both'), null)
  const append: Store['history']['append'] = async (...args) => {
    await new Promise((later) => setImmediate(later))
    return sides.from.history.append(...args)
  }
  const both = presence('both', { from: { ...sides.from, history: { ...sides.from.history, append } } })
  await both.renew()
  const { now } = clock
  const entered = [{ tag: 'a:both', text: 'entered', count: 1, first: now, last: now }]
  t.match(await enteredBy(sides.from, 'both'), entered)
  clock.now += SURE_FOR
  t.match(both.refusal, /^cannot tell/)
  clock.now -= 1
  t.equal(both.refusal, null)
  await both.renew()
  t.match(await enteredBy(sides.from, 'both'), entered)
  clock.now += MARKED_FOR - 1
  t.ok(await isMarked(sides.to, 'both'))
  t.match(both.refusal, /^cannot tell/)
  clock.now += 1
  t.equal(await isMarked(sides.to, 'both'), false)
})

void t.test('marks are the same in every release', async (t) => {
  const { sides, presence } = world()
  for (const [phase, id] of [
    ['mirror', 'taNn0PtwAaerlQ5JIC7wOpdB9rcJQHLKA-twvLUG2mM'],
    ['both', 'fRHNxidp4jWFM2QdRcnaBet1NGE54uEv_xmtOBFqvuw'],
    ['new', 'SEgnJCdYutSIN3HL9zx87Mky0fdCO9lqxAck1y4boig'],
  ] as const) {
    await world().presence(phase, sides).renew()
    for (const side of ['from', 'to'] as const) {
      const { bytes } = await sides[side].get(id as RecordId)
      t.match(decodeRecord(bytes as Buffer), {
        state: 'failed_retryable',
        token: Buffer.from('markmarkmarkmark'),
        path: `/${phase}/${side}`,
      })
      await sides[side].remove(id as RecordId, readStamps(bytes as Buffer).version)
    }
  }
  // Whoever finds one among the records of requests is told what it is.
  await presence('both').renew()
  const { fence } = await recordIn(sides.from, 'both')
  await presence('both').renew()
  t.match(await recordIn(sides.from, 'both'), {
    fence,
    attempts: 1,
    route: 'migration',
    method: 'MARK',
    recipe: '',
    lastError: 'no request: a mark of the migration between two stores, replicas in phase both are alive',
  })
})

void t.test('a store in its grace takes marks: they are no claims', async (t) => {
  const { clock, sides, presence } = world()
  const held = async (): Promise<never> => {
    throw new InGrace(clock.now, clock.now, 1000)
  }
  const inGrace = (store: Store): Store => ({
    ...store,
    put: (id, bytes, spans, entry) => (entry === 'again' ? store.put(id, bytes, spans, entry) : held()),
    swap: (...args) => (args[4] ? held() : store.swap(...args)),
  })
  const both = presence('both', { from: inGrace(sides.from), to: inGrace(sides.to) })
  for (let n = 0; n < 2; n++) await both.renew()
  t.equal(both.refusal, null)
})

void t.test('W09 a replica that was unsure looks before it renews its mark', async (t) => {
  const { clock, sides, presence } = world()
  const mirror = presence('mirror')
  await mirror.renew()
  clock.now += SURE_FOR
  await sides.from.put(markOf('new'), await markIn('new'), SPANS)
  await mirror.renew()
  t.match(mirror.refusal, /phase new is alive/)
  clock.now += MARKED_FOR - SURE_FOR
  t.equal(await isMarked(sides.from, 'mirror'), false)
})

void t.test('W09 a replica that was sure stops at once when it sees one two phases away', async (t) => {
  const { sides, said, presence } = world()
  const mirror = presence('mirror')
  for (let n = 0; n < 2; n++) await mirror.renew()
  t.same(said, [null])
  await sides.from.put(markOf('new'), await markIn('new'), SPANS)
  for (let n = 0; n < 2; n++) await mirror.renew()
  t.match(mirror.refusal, /a replica in phase new is alive, or was 15 s ago/)
  t.same(said, [null, mirror.refusal], 'and says so once')
})

void t.test('W09 a replica sees one that has come while it set its own mark', async (t) => {
  const { sides, presence } = world()
  const mark = await markIn('new')
  const put: Store['put'] = async (...args) => {
    await sides.from.put(markOf('new'), mark, SPANS)
    return sides.from.put(...args)
  }
  const mirror = presence('mirror', { from: { ...sides.from, put } })
  await mirror.renew()
  t.match(mirror.refusal, /phase new is alive/)
})

void t.test('W10 a second replica of phase new waits like the first, until that has entered', async (t) => {
  const { clock, presence } = world()
  const [first, second] = [presence('new'), presence('new')]
  await first.renew()
  clock.now += SURE_FOR - 1
  await second.renew()
  t.match(second.refusal, /cannot tell/)
  clock.now += 1
  await first.renew()
  await second.renew()
  for (const each of [first, second]) t.equal(each.refusal, null)
})

void t.test('a replica in phase new goes on even if its mark does not say that it has entered', async (t) => {
  const { clock, sides, presence } = world()
  const append = async (): Promise<never> => {
    throw new StoreUnavailable('full', false)
  }
  const first = presence('new', { from: { ...sides.from, history: { ...sides.from.history, append } } })
  await entered(t, first)
  for (let n = 0; n < 5; n++) {
    t.equal(first.refusal, null)
    clock.now += SURE_FOR - 1
    await first.renew()
  }
})

void t.test('a replica that stops waits for the renewal that it has begun', async (t) => {
  const { sides, presence } = world()
  const { promise: answered, resolve: answer } = Promise.withResolvers<void>()
  let asked = 0
  const put: Store['put'] = async (...args) => {
    if (asked++ === 0) throw down()
    await answered
    return sides.to.put(...args)
  }
  const both = presence('both', { to: { ...sides.to, put } })
  await both.enter()
  await until(() => asked > 1)
  const stopped = both.stop()
  const isStopped = settling(stopped)
  await new Promise((next) => setImmediate(next))
  t.equal(isStopped(), false)
  answer()
  await stopped
  t.equal(both.refusal, null)
})

void t.test('W10 phase new waits again if its mark expired while it waited', async (t) => {
  const { clock, sides, presence, lookout } = world()
  const first = presence('new')
  await first.renew()
  // It was paused, and a replica without store.migrate looked meanwhile.
  clock.now += MARKED_FOR
  const plain = lookout(sides.from)
  await plain.ensure()
  await first.renew()
  t.equal(plain.refusal, null)
  t.match(first.refusal, /cannot tell/)
  clock.now += SURE_FOR
  t.match(plain.refusal, /cannot tell/)
  await first.renew()
  t.equal(first.refusal, null)
})

void t.test('a replica that waits for phase new to begin', async (t) => {
  await t.test('does not start if one of phase mirror comes', async (t) => {
    const { clock, sides, presence } = world()
    const mark = await markIn('mirror')
    let pauses = 0
    const waiting = presence('new', {}, async (time) => {
      clock.now += time
      if (pauses++ < 20) await sides.from.put(markOf('mirror'), Buffer.from(mark), SPANS)
      else await sides.from.remove(markOf('mirror'), clock.now)
    })
    await t.rejects(waiting.enter(), { name: 'PhaseConflict', message: /phase mirror is alive/ })
    t.equal(pauses, 1)
  })
  await t.test('goes on waiting while a store is down', async (t) => {
    const { clock, sides, said, presence } = world()
    let isDown = false
    const from = failing(sides.from, () => isDown && down())
    const waiting = presence('new', { from }, async (time) => {
      clock.now += time
      isDown = true
    })
    await entered(t, waiting)
    t.match(waiting.refusal, /cannot tell/)
    t.equal(said.at(-1), 'its phase cannot be announced: down')
  })
  await t.test('pauses between its looks', async (t) => {
    const pauses = hurried(t)
    const clock = { now: 0 }
    const store = (): Store => memoryStore({ clock: () => clock.now, maxBytes: 1024 * 1024 })
    const sides = { from: store(), to: store() }
    const said: (string | null)[] = []
    const waiting = new Presence(sides, {
      phase: 'new',
      replica: 'a',
      say: (why) => {
        said.push(why)
        if (why !== null) clock.now += SURE_FOR
      },
      clock: () => clock.now,
    })
    await waiting.enter()
    t.equal(waiting.refusal, null)
    t.match(said, [/phase new begins/, null])
    t.same(pauses[0], { delay: 500, ref: undefined })
    await waiting.stop()
  })
})

void t.test('a presence works with its default clock', async (t) => {
  const { sides } = world()
  const presence = new Presence(sides, { phase: 'both', replica: 'a', say: () => {} })
  await presence.renew()
  t.equal(presence.refusal, null)
})

void t.test('a mark that somebody has changed is an error', async (t) => {
  const { sides, presence } = world()
  await sides.from.put(markOf('both'), bytesOf('completed', newToken()), SPANS)
  await t.rejects(presence('both').renew(), { name: 'RecordLocked', message: /phase both was changed/ })
})

void t.test('a mark that keeps changing is an error', async (t) => {
  const { sides, presence } = world()
  const from: Store = {
    ...sides.from,
    put: async (_id, bytes) => ({ done: false, now: 0, bytes }),
  }
  await t.rejects(presence('both', { from }).renew(), /keeps changing/)
})

void t.test('a replica out of its phase claims and renews nothing, but writes outcomes', async (t) => {
  const { sides } = world()
  const presence = {
    refusal: null as string | null,
    clock: () => 0,
    get sureUntil(): number {
      return presence.refusal === null ? 1 : 0
    },
    ensure: async (): Promise<void> => {
      if (presence.refusal !== null) throw new OutOfPhase(presence.refusal, false)
    },
  }
  const get: Store['get'] = async (id) => {
    t.not(presence.refusal, null, 'a claim asks nothing else')
    return sides.from.get(id)
  }
  const store = inPhase({ ...sides.from, get }, presence)
  const [done, running, token] = [newId(), newId(), newToken()]
  const claim = async (id = newId(), entry?: 'again') =>
    store.put(id, bytesOf('in_progress', newToken()), SPANS, entry)
  const settle = async (states: State[], state: 'failed_retryable' | 'completed') =>
    store.swap(done, { token, states }, bytesOf(state, token), SPANS, false)
  const write = async (by: Store, id: RecordId, version: number, state: State, nextFence: boolean) =>
    by.swap(id, { version }, bytesOf(state, token), SPANS, nextFence)
  await store.put(done, bytesOf('in_progress', token), SPANS)
  t.match(await settle(['in_progress'], 'failed_retryable'), { done: true })
  const { version } = readStamps((await sides.from.get(done)).bytes as Buffer)
  presence.refusal = 'why'
  t.ok((await store.get(done)).bytes)
  const refused = { name: 'OutOfPhase', message: 'why', maybeApplied: false }
  await t.rejects(claim(), refused)
  await t.rejects(claim(done), refused)
  await t.rejects(write(store, done, version, 'in_progress', true), refused)
  await t.rejects(store.renew([]), refused)
  t.match(await claim(newId(), 'again'), { done: true }, 'a claim that a failover lost runs already')
  const { now } = await sides.from.put(running, bytesOf('in_progress', token), SPANS)
  t.match(await write(store, running, now, 'in_progress', false), { done: true }, 'nor is this a claim')
  t.match(await write(store, running, now + 1, 'unknown', true), { done: true }, 'or this')
  t.match(await settle(['failed_retryable'], 'completed'), { done: true }, 'outcomes are still written')
  t.match(await claim(done), { done: false })
  const lost = store.put(newId(), bytesOf('completed', newToken()), SPANS)
  t.match(await lost, { done: true }, 'those of lost records, too')

  const late = newId()
  /** It is out of its phase once the store has been asked. */
  const leaving = inPhase(
    {
      ...sides.from,
      put: async (...args) => ((presence.refusal = 'since'), sides.from.put(...args)),
      swap: async (...args) => ((presence.refusal = 'since'), sides.from.swap(...args)),
    },
    presence,
  )
  presence.refusal = null
  const claimed = Promise.resolve(leaving.put(late, bytesOf('in_progress', newToken()), SPANS))
  await t.rejects(claimed, { name: 'OutOfPhase', maybeApplied: true }, 'one answered too late may be there')
  presence.refusal = null
  t.match(await write(leaving, late, 1, 'in_progress', true), { done: false })
})

void t.test('W10 replicas on the old store alone stop before one in phase new claims', async (t) => {
  const { clock, sides, said, presence, lookout } = world()
  const plain = lookout(sides.from)
  t.match(plain.refusal, /cannot tell/, 'it has not looked yet')
  await entered(t, plain)
  t.equal(plain.refusal, null)
  const looked = clock.now
  const first = presence('new')
  await first.renew()
  t.match(first.refusal, /cannot tell/)
  t.match(said.at(-1), /phase new begins: waiting 10 s/)
  clock.now = looked + SURE_FOR - 1
  await first.renew()
  t.equal(plain.refusal, null, 'paused, it still relies on what it saw')
  t.match(first.refusal, /cannot tell/)
  clock.now = looked + SURE_FOR
  t.match(plain.refusal, /cannot tell/)
  await first.renew()
  t.equal(first.refusal, null)
  await t.rejects(plain.ensure(), {
    name: 'OutOfPhase',
    message: /alive, or was 15 s ago: it moves the records of this store to another/,
    maybeApplied: false,
  })
  t.match(plain.refusal, /a replica without store.migrate must not run beside it/)
  t.match(said.at(-1), /moves the records/)
  await t.rejects(lookout(sides.from).enter(), { name: 'PhaseConflict', message: /phase new .* is alive/ })

  const second = presence('new')
  const before = clock.now
  await entered(t, second)
  t.equal(clock.now, before, 'the first has waited for all of them')
  t.equal(second.refusal, null)
  await lookout(sides.to).enter()

  clock.now += MARKED_FOR
  const earlier = said.length
  for (let n = 0; n < 2; n++) await plain.ensure()
  t.equal(plain.refusal, null, 'no replica is in phase new any more')
  t.same(said.slice(earlier), [null], 'which it says once')
  const entering = presence('new')
  await entered(t, entering)
  t.ok(clock.now >= before + MARKED_FOR + SURE_FOR, 'so the next one waits again')
  t.equal(entering.refusal, null)
})

void t.test('W09 W10 a mark that a failover loses counts until its replicas have renewed it', async (t) => {
  const { clock, sides, presence, lookout } = world()
  const renewing = presence('new')
  await entered(t, renewing)
  for (const held of [presence('mirror'), lookout(sides.from)]) {
    const look = () => (held instanceof Presence ? held.renew() : held.ensure().catch(() => {}))
    await look()
    t.match(held.refusal, /phase new .*is alive/)
    const { bytes } = await sides.from.get(markOf('new'))
    const lost = decodeRecord(bytes as Buffer)
    t.ok(await sides.from.remove(markOf('new'), lost.version))
    await look()
    t.match(held.refusal, /phase new .*is alive/, 'which renews its mark soon')
    clock.now += 3000
    await renewing.renew()
    t.ok(await isMarked(sides.from, 'new'))
    await look()
    t.match(held.refusal, /phase new .*is alive/)
  }
})

void t.test('W10 a replica without store.migrate does not use a new store that lacks records', async (t) => {
  for (const phase of ['mirror', 'both'] as const) {
    const { sides, presence, lookout } = world()
    const replica = presence(phase)
    await entered(t, replica)
    await t.rejects(lookout(sides.to).enter(), { message: /this store does not have all records yet/ })
    const old = lookout(sides.from)
    await old.enter()
    t.equal(old.refusal, null, 'the old one decides')
    await old.stop()
  }
})

void t.test('W10 a replica whose store was down cannot tell, and asks once for all its claims', async (t) => {
  const { clock, sides, lookout } = world()
  let isDown = true
  let asked = 0
  const store = failing(sides.from, () => isDown && down())
  const plain = lookout({ get: (id) => (asked++, store.get(id)) })
  await entered(t, plain)
  const guarded = inPhase(store, plain)
  const claim = async () => guarded.put(newId(), bytesOf('in_progress', newToken()), SPANS)
  await t.rejects(claim(), { name: 'StoreUnavailable' }, 'a route that bypasses may go on')
  isDown = false
  asked = 0
  await Promise.all([plain.ensure(), plain.ensure()])
  t.equal(asked, 3)
  t.match(await claim(), { done: true })
  t.equal(asked, 3)
  clock.now += SURE_FOR
  t.match(await claim(), { done: true })
  t.equal(asked, 6)
  const broken = lookout({ get: async () => Promise.reject(new TypeError('a bug')) })
  await t.rejects(broken.enter(), { name: 'TypeError' })
  const damaged = lookout({ get: async () => ({ now: 0, bytes: Buffer.from('no record') }) })
  await entered(t, damaged)
  t.match(damaged.refusal, /cannot tell/)
  await t.rejects(damaged.ensure(), { name: 'CorruptRecord' })
})

void t.test('W10 a late reply counts only if phase new has not begun meanwhile', async (t) => {
  const { clock, sides, presence, lookout } = world()
  const plain = lookout(sides.from)
  await entered(t, plain)
  let meanwhile = async (): Promise<void> => {}
  const slow: Store = {
    ...sides.from,
    put: async (...args) => {
      const reply = await sides.from.put(...args)
      clock.now += SURE_FOR
      await meanwhile()
      return reply
    },
  }
  const claim = async () => inPhase(slow, plain).put(newId(), bytesOf('in_progress', newToken()), SPANS)
  t.match(await claim(), { done: true })
  meanwhile = async () => presence('new').renew()
  await t.rejects(claim(), { name: 'OutOfPhase', maybeApplied: true })
})

void t.test('W10 a lookout keeps looking, with its default clock', async (t) => {
  const pauses = hurried(t)
  const { sides } = world()
  const { promise: answered, resolve: answer } = Promise.withResolvers<void>()
  let asked = 0
  const get: Store['get'] = async (id) => {
    if (asked++ >= 3) await answered
    return sides.from.get(id)
  }
  const looking = new PhaseWatch({ get }, { say: () => {} })
  await looking.enter()
  t.equal(looking.refusal, null)
  await until(() => asked > 3)
  t.same(pauses, [{ delay: 3000, ref: false }], 'which keeps no process alive')
  const stopped = looking.stop()
  const isStopped = settling(stopped)
  await new Promise((next) => setImmediate(next))
  t.equal(isStopped(), false, 'it waits for the look that it has begun')
  answer()
  await stopped
  t.equal(asked, 6, 'and begins no other')
})
