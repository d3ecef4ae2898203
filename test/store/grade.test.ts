import t from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { disproof, type Grade, gradingOf, PROVEN, weakest } from '../../src/store/grade.ts'
import { memoryStore } from '../../src/store/memory.ts'
import { PREFIX } from '../../src/store/record/codec.ts'
import { type Store, type StoreTraits, StoreUnavailable } from '../../src/store/register.ts'

const SOUND: StoreTraits = {
  durable: true,
  evicts: false,
  forgets: null,
  hasIdentity: true,
  findings: [],
  refusals: [],
}
const memory = (): Store => memoryStore({ clock: () => 1000, maxBytes: 2 ** 20 })

void t.test('a store is graded by its traits, its grace and its proof', async (t) => {
  const sound = { ...SOUND, hasIdentity: false }
  const forgets = 'A failover loses the last claims.'
  const cases: [Partial<StoreTraits>, Millis, string | null, Grade][] = [
    [{}, 0, PROVEN, 'strict'],
    [{}, 0, null, 'strict'],
    [{}, 2000, 'It hands out a key that is taken.', 'unfit'],
    [{ evicts: true }, 2000, PROVEN, 'unfit'],
    [{ evicts: null }, 2000, PROVEN, 'unknown'],
    [{ durable: null }, 2000, PROVEN, 'unknown'],
    [{ durable: false, evicts: null }, 2000, PROVEN, 'volatile'],
    [{ forgets, hasIdentity: true }, 2000, PROVEN, 'strict'],
    [{ forgets, hasIdentity: true }, 0, PROVEN, 'volatile'],
    [{ forgets, hasIdentity: true }, 1, PROVEN, 'strict'],
    [{ forgets }, 2000, PROVEN, 'volatile'],
  ]
  for (const [traits, grace, proof, grade] of cases)
    t.equal(
      gradingOf({ ...sound, ...traits }, grace, proof).grade,
      grade,
      JSON.stringify([traits, grace, proof]),
    )
  t.match(gradingOf({ ...sound, forgets, findings: ['more'] }, 2000, 'wrong').reasons, [
    'wrong',
    forgets,
    /does not identify its process, so there is no grace/,
    'more',
  ])
  t.match(gradingOf({ ...sound, forgets, hasIdentity: true }, 0, PROVEN).reasons, [
    forgets,
    /store.grace is off/,
  ])
})

void t.test('stores that all have to keep a promise keep it as well as the weakest', async (t) => {
  const both = (one: Partial<StoreTraits>, other: Partial<StoreTraits>) =>
    weakest([
      { ...SOUND, ...one },
      { ...SOUND, ...other },
    ])
  t.strictSame(both({}, {}), { durable: true, evicts: false, forgets: null, hasIdentity: true })
  for (const weak of [
    { durable: false },
    { durable: null },
    { evicts: true },
    { evicts: null },
    { forgets: 'why' },
    { hasIdentity: false },
  ])
    for (const pair of [both(weak, {}), both({}, weak)])
      t.strictSame(pair, { ...both({}, {}), ...weak }, JSON.stringify(weak))
  t.match(both({ durable: null, evicts: true }, { durable: false, evicts: null }), {
    durable: false,
    evicts: true,
  })
  t.equal(both({ forgets: 'one' }, { forgets: 'other' }).forgets, 'one')
})

void t.test('V09 a store that grants a taken key is found out', async (t) => {
  const sound = memory()
  const puts: Parameters<Store['put']>[] = []
  // It answers later, as a server does.
  const asked: Store = {
    ...sound,
    put: async (...args) => {
      puts.push(args)
      return sound.put(...args)
    },
    remove: async (...args) => {
      await new Promise((later) => setImmediate(later))
      return sound.remove(...args)
    },
  }
  t.equal(await disproof(asked), PROVEN)
  t.same((await sound.list('all', null, 10)).ids, [], 'nothing is left')
  t.equal(puts.length, 2)
  for (const [id, , { dueIn, dropIn }, entry] of puts) {
    t.equal(id, puts[0]?.[0])
    t.equal(id.length, 43)
    t.ok(dropIn <= 5000 && dueIn >= dropIn, 'if this process dies, it is gone before it is due')
    t.equal(entry, 'fresh', 'in a grace, too')
  }
  const split: Store = {
    ...sound,
    put: async (id, bytes, spans, entry) => {
      const reply = await sound.put(id, bytes, spans, entry)
      // Somebody else has the key, who knows how.
      if (!reply.done) reply.bytes.fill(7, PREFIX.token, PREFIX.createdAt)
      return reply
    },
  }
  t.match(await disproof(split), /lets two owners claim one key/)
  const forgetful: Store = {
    ...memory(),
    put: (id, bytes, spans, entry) => memory().put(id, bytes, spans, entry),
  }
  t.match(await disproof(forgetful), /lets two owners claim one key/)
  const other = memory()
  const mixedUp: Store = {
    ...other,
    put: (_id, bytes, spans, entry) => other.put('A'.repeat(43) as never, bytes, spans, entry),
  }
  t.equal(await disproof(mixedUp), PROVEN)
  t.match(await disproof(mixedUp), /reports a brand-new key as taken/)
  const refusing: Store = { ...memory(), put: () => Promise.reject(new StoreUnavailable('full', false)) }
  await t.rejects(disproof(refusing), StoreUnavailable)
})
