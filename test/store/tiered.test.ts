import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { encodeDraft, PREFIX, readStamps } from '../../src/store/record/codec.ts'
import { type Store, StoreUnavailable } from '../../src/store/register.ts'
import { tiered } from '../../src/store/tiered.ts'
import { registerContract } from './contract.ts'
import { bytesOf, draft, HOUR, MINUTE, newId, newToken, response, SPANS, settling } from './fixtures.ts'

const LIFE = 10 * MINUTE
const secret = Buffer.alloc(0)
let skew = 0
const clock = () => Date.now() + skew
const monotonic = () => performance.now() + skew
const memory = () => memoryStore({ clock, maxBytes: MEMORY_BYTES })

registerContract(t, 'tiered', async () => {
  const [primary, cache] = [memory(), memory()]
  const options = { life: LIFE, secret, monotonic }
  const register = tiered(primary, cache, options)
  const peer = tiered(primary, cache, options)
  return {
    register,
    peer,
    other: null,
    tellsPeers: true,
    advance: (ms) => void (skew += ms),
    [Symbol.asyncDispose]: async () => void (await Promise.all([register.close(), peer.close()])),
  }
})

interface Tiers {
  readonly register: Store
  readonly peer: Store
  readonly cache: Store
  /** Operations, in order; `later` resolves when work in the background is done. */
  readonly asked: string[]
  readonly later: () => Promise<void>
}

/** Two replicas; `ask` may replace the cache's answers. */
function tiersOf(ask: (operation: string, run: () => unknown) => unknown = (_, run) => run()): Tiers {
  const asked: string[] = []
  const counted = (name: string, store: Store, through: typeof ask): Store => {
    const calls = ['put', 'swap', 'get', 'remove'] as const
    const one = (call: (typeof calls)[number]) => {
      const run = store[call] as (...args: unknown[]) => unknown
      return (...args: unknown[]) => {
        asked.push(`${name} ${call}`)
        return through(call, () => run(...args))
      }
    }
    return { ...store, ...Object.fromEntries(calls.map((call) => [call, one(call)])) }
  }
  const [primary, cache] = [memory(), memory()]
  const make = () =>
    tiered(
      counted('primary', primary, (_, run) => run()),
      counted('cache', cache, ask),
      { life: LIFE, secret, monotonic },
    )
  return {
    register: make(),
    peer: make(),
    cache,
    asked,
    later: async () => {
      for (let n = 0; n < 20; n++) await new Promise((next) => setImmediate(next))
    },
  }
}

const claim = async (store: Store, id: RecordId, token = newToken()) =>
  store.put(id, bytesOf('in_progress', token), SPANS)
const BODY = Buffer.from('the first answer')
async function executed({ register, asked, later }: Tiers, id = newId(), body = BODY): Promise<RecordId> {
  const token = newToken()
  await claim(register, id, token)
  const bytes = encodeDraft(draft('completed', token, { result: response(body) }))
  await register.swap(id, { token, states: ['in_progress'] }, bytes, SPANS, false)
  await later()
  asked.length = 0
  return id
}
async function replayed(t: Test, store: Store, id: RecordId, body = BODY): Promise<void> {
  const reply = await claim(store, id)
  t.notOk(reply.done)
  if (!reply.done) t.ok(reply.bytes.includes(body), 'the answer that was given')
}

void t.test('a first execution does not wait for the cache; a retry asks only the cache', async (t) => {
  const tiers = tiersOf()
  const { register, asked, later } = tiers
  const [id, token] = [newId(), newToken()]
  await claim(register, id, token)
  t.same(asked, ['primary put'])
  await claim(register, id)
  t.same(asked, ['primary put', 'primary put'], 'nor does a retry while it is in progress')
  const swapped = register.swap(
    id,
    { token, states: ['in_progress'] },
    bytesOf('completed', token),
    SPANS,
    false,
  )
  t.match(await swapped, { done: true })
  await later()
  t.same(asked.slice(2), ['primary swap', 'cache put'])
  asked.length = 0
  const there = (await register.get(id)).bytes as Buffer
  const reply = await claim(register, id)
  t.ok(!reply.done && reply.bytes.equals(there), 'with the stamps of the primary')
  t.same(asked, ['primary get', 'cache get'])
})

void t.test('without a clock of its own it uses that of the process', async (t) => {
  const register = tiered(memory(), memory(), { life: LIFE, secret })
  const [id, token] = [newId(), newToken()]
  t.ok((await register.put(id, bytesOf('completed', token), SPANS)).done)
  await new Promise((next) => setImmediate(next))
  const { done, now } = await claim(register, id)
  t.notOk(done)
  t.ok(Math.abs(now - clock()) < MINUTE, 'the time of the primary')
})

void t.test('W10 another replica asks the primary first, and the cache from then on', async (t) => {
  const tiers = tiersOf()
  const id = await executed(tiers)
  await replayed(t, tiers.peer, id)
  await tiers.later()
  t.same(tiers.asked, ['primary put', 'cache put'])
  await replayed(t, tiers.peer, id)
  t.same(tiers.asked.slice(2), ['cache get'])
})

void t.test('W10 if the cache is flushed, dead or lying, the primary decides', async (t) => {
  let fault: ((reply: { bytes: Buffer | null }) => unknown) | null = null
  const tiers = tiersOf(async (operation, run) => {
    const reply = (await run()) as { bytes: Buffer | null }
    return fault === null || operation !== 'get' ? reply : fault(reply)
  })
  const id = await executed(tiers)
  const otherId = await executed(tiers, newId(), Buffer.from('the answer of somebody else'))
  const other = (await tiers.cache.get(otherId)).bytes as Buffer
  const changed = (at: number) => (reply: { bytes: Buffer | null }) => {
    const bytes = Buffer.from(reply.bytes as Buffer)
    bytes[at < 0 ? bytes.length + at : at] = Number(bytes[at < 0 ? bytes.length + at : at]) ^ 1
    return { ...reply, bytes }
  }
  for (const lie of [
    () => ({ now: 0, bytes: null }),
    () => Promise.reject(new StoreUnavailable('no', false)),
    () => Promise.reject(new Error('nonsense')),
    () => ({ now: 0, bytes: other }),
    () => ({ now: 0, bytes: Buffer.alloc(0) }),
    () => ({ now: 0, bytes: bytesOf('completed', newToken()) }),
    changed(-1),
    changed(60),
    changed(70),
    changed(100),
  ]) {
    fault = lie
    tiers.asked.length = 0
    await replayed(t, tiers.register, id)
    await tiers.later()
    t.ok(tiers.asked.includes('primary put'), 'the primary was asked')
    const absent = newId()
    t.ok((await claim(tiers.register, absent)).done, 'and an absent key can be claimed')
  }
})

void t.test('W10 a removed record is absent for all, at the latest when its entry expires', async (t) => {
  let isAway = false
  const tiers = tiersOf((_, run) => (isAway ? Promise.reject(new StoreUnavailable('away', true)) : run()))
  const versionOf = async (id: RecordId) => readStamps((await tiers.register.get(id)).bytes as Buffer).version
  const id = await executed(tiers)
  await replayed(t, tiers.peer, id)
  await tiers.later()
  t.ok(await tiers.register.remove(id, await versionOf(id)))
  t.ok((await claim(tiers.peer, id)).done, 'by another replica, too')
  t.notOk(await tiers.register.remove(id, 1))

  const kept = await executed(tiers)
  isAway = true
  t.ok(await tiers.register.remove(kept, await versionOf(kept)))
  isAway = false
  t.ok((await claim(tiers.register, kept)).done, 'the replica that removed it knows')
  const other = await executed(tiers)
  await replayed(t, tiers.peer, other)
  await tiers.later()
  isAway = true
  await tiers.register.remove(other, await versionOf(other))
  isAway = false
  await replayed(t, tiers.peer, other)
  skew += LIFE
  t.ok((await claim(tiers.peer, other)).done)
})

void t.test('W10 an entry counts only for its lifetime, whatever the clock of the cache says', async (t) => {
  const tiers = tiersOf()
  const id = await executed(tiers)
  const entry = await tiers.cache.get(id)
  const stale: Store = { ...tiers.cache, get: async () => entry }
  const primary = memory()
  const register = tiered(primary, stale, { life: LIFE, secret, monotonic })
  const token = newToken()
  await register.put(id, bytesOf('completed', token), SPANS)
  await replayed(t, register, id)
  skew += LIFE
  const reply = await claim(register, id)
  t.ok(!reply.done && !reply.bytes.includes(BODY), 'the answer of the primary')
  const forged = tiered(primary, stale, { life: LIFE, secret: Buffer.alloc(16, 1), monotonic })
  await forged.put(id, bytesOf('in_progress', token), SPANS)
  const other = await claim(forged, id)
  t.ok(!other.done && !other.bytes.includes(BODY), 'nor does an entry under another secret count')
})

void t.test('W10 an entry counts no longer than its record, even after replays', async (t) => {
  const tiers = tiersOf()
  const brief = newId()
  await tiers.register.put(brief, bytesOf('completed', newToken()), { dueIn: MINUTE, dropIn: MINUTE })
  await tiers.later()
  t.notOk((await claim(tiers.register, brief)).done)
  skew += MINUTE
  const { bytes } = await tiers.cache.get(brief)
  t.equal(bytes, null, 'the cache drops it, too')
  t.ok((await claim(tiers.register, brief)).done)

  for (const asks of [false, true]) {
    const id = await executed(tiers)
    const entry = await tiers.cache.get(id)
    const primary = memory()
    await primary.put(id, bytesOf('completed', newToken()), SPANS)
    const stale: Store = { ...tiers.cache, get: async () => entry }
    const late = tiered(primary, stale, { life: LIFE, secret, monotonic })
    await claim(late, id)
    await replayed(t, late, id)
    if (asks) await late.get(id)
    skew += LIFE
    const reply = await claim(late, id)
    t.ok(!reply.done && !reply.bytes.includes(BODY), 'the answer of the primary')
  }
})

void t.test('W10 a replica that sees a record not completed any more does not ask the cache', async (t) => {
  let isAway = false
  const tiers = tiersOf((_, run) => (isAway ? Promise.reject(new StoreUnavailable('away', true)) : run()))
  const id = await executed(tiers)
  await replayed(t, tiers.peer, id)
  await tiers.later()
  const { version } = readStamps((await tiers.register.get(id)).bytes as Buffer)
  isAway = true
  const unknown = bytesOf('unknown', newToken())
  t.ok((await tiers.register.swap(id, { version }, unknown, SPANS, false)).done)
  await tiers.later()
  isAway = false
  await replayed(t, tiers.peer, id)
  t.notOk((await tiers.peer.swap(id, { version }, unknown, SPANS, false)).done)
  tiers.asked.length = 0
  const reply = await claim(tiers.peer, id)
  t.ok(!reply.done && !reply.bytes.includes(BODY))
  t.equal(tiers.asked[0], 'primary put')
})

void t.test('W10 an entry that the cache lost is written again', async (t) => {
  const tiers = tiersOf()
  const id = await executed(tiers)
  const { bytes } = await tiers.cache.get(id)
  t.ok(await tiers.cache.remove(id, readStamps(bytes as Buffer).version))
  await replayed(t, tiers.register, id)
  await tiers.later()
  await replayed(t, tiers.register, id)
  t.same(tiers.asked, ['cache get', 'primary put', 'cache put', 'cache get'])
})

void t.test('W10 an entry is dropped once its record is removed, and not before', async (t) => {
  const cache = memory()
  const primary = memory()
  const { promise, resolve } = Promise.withResolvers<void>()
  const slow: Store = { ...primary, remove: (...args) => promise.then(() => primary.remove(...args)) }
  const register = tiered(slow, cache, { life: LIFE, secret, monotonic })
  const id = newId()
  await register.put(id, bytesOf('completed', newToken()), SPANS)
  const { version } = readStamps((await register.get(id)).bytes as Buffer)
  const removing = register.remove(id, version)
  for (let n = 0; n < 20; n++) await new Promise((next) => setImmediate(next))
  t.ok((await cache.get(id)).bytes)
  resolve()
  t.equal(await removing, true)
  t.equal((await cache.get(id)).bytes, null)
})

void t.test('it closes both stores, and has closed once they have', async (t) => {
  const closed: string[] = []
  const slow = (name: string): Store => ({
    ...memory(),
    close: async () => {
      await new Promise((next) => setImmediate(next))
      closed.push(name)
    },
  })
  await tiered(slow('primary'), slow('cache'), { life: LIFE, secret, monotonic }).close()
  t.same(closed, ['primary', 'cache'])
})

void t.test('a record of another version is not cached', async (t) => {
  const tiers = tiersOf()
  const bytes = bytesOf('completed', newToken())
  bytes[PREFIX.schema] = 99
  await tiers.register.put(newId(), bytes, SPANS)
  await tiers.later()
  t.same(tiers.asked, ['primary put'])
})

void t.test('a write of the cache that fails is nobody’s trouble, and close waits for it', async (t) => {
  let fail = (): void => {}
  const failed = new Promise<void>(
    (_, reject) => void (fail = () => reject(new StoreUnavailable('away', true))),
  )
  failed.catch(() => {})
  const tiers = tiersOf((operation, run) => (operation === 'swap' ? failed : run()))
  const id = await executed(tiers)
  const { version } = readStamps((await tiers.register.get(id)).bytes as Buffer)
  t.ok((await tiers.register.swap(id, { version }, bytesOf('completed', newToken()), SPANS, false)).done)
  await tiers.later()
  t.equal(tiers.asked.at(-1), 'cache swap')
  const closing = tiers.register.close()
  const isClosed = settling(closing)
  await tiers.later()
  t.notOk(isClosed())
  fail()
  await closing
})

void t.test('a later entry replaces an earlier one, never the reverse', async (t) => {
  const tiers = tiersOf()
  const id = await executed(tiers)
  const old = await tiers.register.get(id)
  await tiers.peer.put(id, bytesOf('in_progress', newToken()), SPANS)
  await tiers.later()
  const { version } = readStamps(old.bytes as Buffer)
  const next = encodeDraft(draft('completed', newToken(), { result: response(Buffer.from('resolved')) }))
  t.ok((await tiers.register.swap(id, { version }, next, SPANS, false)).done)
  await tiers.later()
  await replayed(t, tiers.peer, id, Buffer.from('resolved'))
  t.equal(tiers.asked.at(-1), 'cache get')
  const late = tiered(
    { ...memory(), put: () => ({ done: false, now: clock(), bytes: Buffer.from(old.bytes as Buffer) }) },
    tiers.cache,
    { life: LIFE, secret, monotonic },
  )
  await claim(late, id)
  await tiers.later()
  await replayed(t, tiers.peer, id, Buffer.from('resolved'))
})

void t.test('an entry that is no longer completed is dropped; outcomes go to the primary', async (t) => {
  const tiers = tiersOf()
  const id = await executed(tiers)
  const { version } = readStamps((await tiers.register.get(id)).bytes as Buffer)
  const token = newToken()
  const unknown = bytesOf('unknown', token)
  t.ok((await tiers.register.swap(id, { version }, unknown, SPANS, false)).done)
  await tiers.later()
  t.equal((await tiers.cache.get(id)).bytes, null)
  const again = await executed(tiers)
  t.match(await tiers.register.put(again, bytesOf('completed', token), SPANS), { done: false })
  t.match(await tiers.register.put(again, bytesOf('in_progress', token), SPANS, 'again'), { done: false })
  t.same(tiers.asked, ['primary put', 'primary put'])
  t.match(await tiers.register.swap(again, { version: 1 }, bytesOf('completed', token), SPANS, false), {
    done: false,
  })
  t.match(await tiers.register.swap(newId(), { version: 1 }, unknown, SPANS, false), { bytes: null })
})

void t.test('a hanging cache holds up at most 64 writes, and close ends once they are done', async (t) => {
  let open = (): void => {}
  const opened = new Promise<void>((resolve) => void (open = resolve))
  const tiers = tiersOf((operation, run) => (operation === 'put' ? opened.then(run) : run()))
  for (let n = 0; n < 100; n++) await tiers.register.put(newId(), bytesOf('completed', newToken()), SPANS)
  t.equal(tiers.asked.filter((one) => one === 'cache put').length, 64)
  const closed = tiers.register.close()
  open()
  await closed
})

void t.test('it remembers the last 10,000 records that it saw completed', async (t) => {
  const tiers = tiersOf()
  const [first, ...others] = Array.from({ length: 10_001 }, newId) as [RecordId, ...RecordId[]]
  const bytes = bytesOf('completed', newToken(), { result: response(Buffer.alloc(0)) })
  for (const id of [first, ...others]) await tiers.register.put(id, bytes, { dueIn: HOUR, dropIn: HOUR })
  await tiers.later()
  tiers.asked.length = 0
  await claim(tiers.register, others[5000] as RecordId)
  t.equal(tiers.asked[0], 'cache get')
  tiers.asked.length = 0
  await claim(tiers.register, first)
  t.equal(tiers.asked[0], 'primary put')

  const old = others[5001] as RecordId
  t.ok((await tiers.cache.get(old)).bytes)
  const { version } = readStamps((await tiers.register.get(old)).bytes as Buffer)
  await tiers.register.swap(old, { version }, bytesOf('unknown', newToken()), SPANS, false)
  await tiers.later()
  t.equal((await tiers.cache.get(old)).bytes, null, 'what was remembered a while ago is dropped, too')
})

void t.test('its traits are those of its primary, and its topology names both stores', async (t) => {
  const primary = memoryStore({ clock: Date.now, maxBytes: 2 ** 20 })
  const cache = memoryStore({ clock: Date.now, maxBytes: 2 ** 20 })
  const told = async (topology?: string) =>
    tiered(
      {
        ...primary,
        traits: async () => ({
          ...(await primary.traits()),
          durable: true,
          ...(topology ? { topology } : {}),
        }),
      },
      cache,
      { life: 1000, secret: Buffer.alloc(0) },
    ).traits()
  t.equal((await told()).durable, true)
  t.equal((await told()).topology, 'memory decides, memory answers replays')
  t.equal((await told('3 masters')).topology, 'memory decides, memory answers replays; 3 masters')
})
