import t from 'tap'
import type { Phase } from '../../src/core/copies.ts'
import { inPhase } from '../../src/store/around.ts'
import { memoryStore } from '../../src/store/memory.ts'
import { enteredBy, isMarked, Lookout, PhaseConflict, Presence } from '../../src/store/phases.ts'
import { OutOfPhase, type Store, StoreUnavailable } from '../../src/store/register.ts'
import { bytesOf, newId, newToken, SPANS, until } from './fixtures.ts'

const MARKED_FOR = 15_000
const SURE_FOR = 10_000

/** Two stores whose clock is that of the replicas. */
function world() {
  const clock = { now: 1_795_000_000_000 }
  const store = (): Store => memoryStore({ clock: () => clock.now, maxBytes: 1024 * 1024 })
  const sides = { from: store(), to: store() }
  const said: (string | null)[] = []
  const presence = (phase: Phase, over: Partial<typeof sides> = {}) =>
    new Presence(
      { ...sides, ...over },
      {
        phase,
        replica: `a:${phase}`,
        say: (why) => void said.push(why),
        clock: () => clock.now,
        pause: async (time) => void (clock.now += time),
      },
    )
  const lookout = (on: Pick<Store, 'get'>) =>
    new Lookout(on, { say: (why) => void said.push(why), clock: () => clock.now })
  return { clock, sides, said, presence, lookout }
}

function failing(store: Store, fails: () => boolean): Store {
  const down = async (): Promise<never> => {
    throw new StoreUnavailable('down', false)
  }
  return {
    ...store,
    put: (...args) => (fails() ? down() : store.put(...args)),
    swap: (...args) => (fails() ? down() : store.swap(...args)),
    get: (id) => (fails() ? down() : store.get(id)),
  }
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
      await first.enter()
      t.teardown(() => first.stop())
      t.equal(first.refusal, null)
      const second = presence(other)
      await t.rejects(second.enter(), { name: 'PhaseConflict', message: new RegExp(`phase ${one} is alive`) })
      t.type(new PhaseConflict(''), Error)
      t.match(second.refusal, /move all replicas through phase both/)
      t.equal(await isMarked(sides.from, other), false, 'the refused replica leaves no mark')
      const between = presence('both')
      await between.enter()
      t.teardown(() => between.stop())
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

void t.test('a replica that finds the mark of a conflicting phase refuses', async (t) => {
  const { presence } = world()
  const [one, other] = [presence('mirror'), presence('new')]
  await one.renew()
  t.equal(one.refusal, null)
  // As if the store had lost the other mark for a moment.
  const { sides } = world()
  const lost = presence('new', { from: sides.from })
  await lost.renew()
  const seeing = presence('mirror', { from: sides.from })
  await seeing.renew()
  t.match(seeing.refusal, /phase new is alive/)
  await other.stop()
})

void t.test('a store cannot be moved to itself under another name', async (t) => {
  const { sides, presence } = world()
  await t.rejects(presence('both', { to: sides.from }).enter(), {
    name: 'PhaseConflict',
    message: /the same store/,
  })
})

void t.test('a replica waits while a store is down; a mirror does not need the new one', async (t) => {
  const { sides, said, presence } = world()
  let down = true
  const to = failing(sides.to, () => down)
  const mirror = presence('mirror', { to })
  await mirror.renew()
  t.equal(mirror.refusal, null)
  const both = presence('both', { to })
  await both.enter()
  t.match(both.refusal, /^cannot tell/)
  t.match(said.at(-1), /down/)
  await until(async () => said.some((why) => why?.includes('cannot be announced') === true))
  down = false
  await until(async () => both.refusal === null)
  await both.stop()
  const from = { ...sides.from, limits: { take: async () => Promise.reject(new TypeError('a bug')) } }
  await t.rejects(presence('both', { from }).enter(), { name: 'TypeError' })
})

void t.test('a mark says who entered the phase, and expires if it is not renewed', async (t) => {
  const { clock, sides, presence } = world()
  t.equal(await enteredBy(sides.from, 'both'), null)
  const both = presence('both')
  await both.renew()
  t.match(await enteredBy(sides.from, 'both'), [{ tag: 'a:both', text: 'entered' }])
  clock.now += SURE_FOR - 1
  t.equal(both.refusal, null)
  await both.renew()
  clock.now += MARKED_FOR - 1
  t.ok(await isMarked(sides.to, 'both'))
  t.match(both.refusal, /^cannot tell/)
  clock.now += 1
  t.equal(await isMarked(sides.to, 'both'), false)
})

void t.test('a presence works with its default clock', async (t) => {
  const { sides } = world()
  const presence = new Presence(sides, { phase: 'both', replica: 'a', say: () => {} })
  await presence.renew()
  t.equal(presence.refusal, null)
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
  const store = inPhase(sides.from, presence)
  const [done, token] = [newId(), newToken()]
  await store.put(done, bytesOf('in_progress', token), SPANS)
  const swapped = await store.swap(
    done,
    { token, states: ['in_progress'] },
    bytesOf('failed_retryable', token),
    SPANS,
    false,
  )
  t.ok(swapped.done)
  const version = (await sides.from.get(done)).bytes?.readUIntBE(4, 6) as number
  presence.refusal = 'why'
  const refused = { name: 'OutOfPhase', message: 'why', maybeApplied: false }
  await t.rejects(async () => store.put(newId(), bytesOf('in_progress', newToken()), SPANS), refused)
  await t.rejects(async () => store.put(done, bytesOf('in_progress', newToken()), SPANS), refused)
  await t.rejects(
    async () => store.swap(done, { version }, bytesOf('in_progress', newToken()), SPANS, true),
    refused,
  )
  await t.rejects(store.renew([]), refused)
  t.match(
    await store.put(newId(), bytesOf('in_progress', newToken()), SPANS, 'again'),
    { done: true },
    'a claim that a failover lost runs already',
  )
  const settled = await store.swap(
    done,
    { token, states: ['failed_retryable'] },
    bytesOf('completed', token),
    SPANS,
    false,
  )
  t.ok(settled.done, 'outcomes are still written')
  t.match(await store.put(done, bytesOf('in_progress', newToken()), SPANS), { done: false })
  t.match(
    await store.put(newId(), bytesOf('completed', newToken()), SPANS),
    { done: true },
    'those of lost records, too',
  )

  presence.refusal = null
  const late = newId()
  const slow = inPhase(
    { ...sides.from, put: async (...args) => ((presence.refusal = 'since'), sides.from.put(...args)) },
    presence,
  )
  const error = await Promise.resolve(slow.put(late, bytesOf('in_progress', newToken()), SPANS)).catch(
    (e: unknown) => e,
  )
  t.ok(error instanceof OutOfPhase && error.maybeApplied, 'a claim that was answered too late may be there')
  presence.refusal = null
  const met = inPhase(
    { ...sides.from, swap: async (...args) => ((presence.refusal = 'since'), sides.from.swap(...args)) },
    presence,
  )
  t.match(await met.swap(late, { version: 1 }, bytesOf('in_progress', newToken()), SPANS, true), {
    done: false,
  })
})

void t.test('W10 replicas on the old store alone stop before one in phase new claims', async (t) => {
  const { clock, sides, said, presence, lookout } = world()
  const plain = lookout(sides.from)
  t.match(plain.refusal, /cannot tell/, 'it has not looked yet')
  await plain.enter()
  t.teardown(() => plain.stop())
  t.equal(plain.refusal, null)
  const looked = clock.now
  const first = presence('new')
  await first.renew()
  t.match(first.refusal, /cannot tell/)
  t.match(said.at(-1), /phase new begins: for 10 s it waits/)
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
    message: /moves the records of this store to another/,
  })
  t.match(plain.refusal, /a replica without store.migrate must not run beside it/)
  t.match(said.at(-1), /moves the records/)
  await t.rejects(lookout(sides.from).enter(), { name: 'PhaseConflict', message: /phase new .* is alive/ })

  const second = presence('new')
  const before = clock.now
  await second.enter()
  t.teardown(() => second.stop())
  t.equal(clock.now, before, 'the first has waited for all of them')
  t.equal(second.refusal, null)
  await lookout(sides.to).enter()

  clock.now += MARKED_FOR
  await plain.ensure()
  t.equal(plain.refusal, null, 'no replica is in phase new any more')
  t.equal(said.at(-1), null)
  const entering = presence('new')
  await entering.enter()
  t.teardown(() => entering.stop())
  t.ok(clock.now >= before + MARKED_FOR + SURE_FOR, 'so the next one waits again')
  t.equal(entering.refusal, null)
})

void t.test('W10 a replica without store.migrate does not use a new store that lacks records', async (t) => {
  for (const phase of ['mirror', 'both'] as const) {
    const { sides, presence, lookout } = world()
    const replica = presence(phase)
    await replica.enter()
    t.teardown(() => replica.stop())
    await t.rejects(lookout(sides.to).enter(), { message: /this store does not have all records yet/ })
    const old = lookout(sides.from)
    await old.enter()
    t.equal(old.refusal, null, 'the old one decides')
    await old.stop()
  }
})

void t.test('W10 a replica whose store was down cannot tell, and asks once for all its claims', async (t) => {
  const { clock, sides, lookout } = world()
  let down = true
  let asked = 0
  const store = failing(sides.from, () => down)
  const plain = lookout({ get: (id) => (asked++, store.get(id)) })
  await plain.enter()
  t.teardown(() => plain.stop())
  const guarded = inPhase(store, plain)
  const claim = async () => guarded.put(newId(), bytesOf('in_progress', newToken()), SPANS)
  await t.rejects(claim(), { name: 'StoreUnavailable' }, 'a route that bypasses may go on')
  down = false
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
  await damaged.enter()
  t.teardown(() => damaged.stop())
  t.match(damaged.refusal, /cannot tell/)
  await t.rejects(damaged.ensure(), { name: 'CorruptRecord' })
})

void t.test('W10 a late reply counts only if phase new has not begun meanwhile', async (t) => {
  const { clock, sides, presence, lookout } = world()
  const plain = lookout(sides.from)
  await plain.enter()
  t.teardown(() => plain.stop())
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
  const { sides } = world()
  const plain = new Lookout(sides.from, { say: () => {} })
  await plain.enter()
  t.equal(plain.refusal, null)
  let asked = 0
  const looking = new Lookout({ get: async (id) => (asked++, sides.from.get(id)) }, { say: () => {} })
  await looking.enter()
  await until(async () => asked > 3)
  await Promise.all([plain.stop(), looking.stop()])
})
