import assert from 'node:assert/strict'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import fc from 'fast-check'
import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { MEMORY_BYTES, memoryStore } from '../../src/store/memory.ts'
import { SMALL_RECORD } from '../../src/store/record/codec.ts'
import { StoreFull } from '../../src/store/register.ts'
import { registerContract } from './contract.ts'
import { exactContract } from './exact.ts'
import { bytesOf, memoryHarness, newId, newToken, response, SPANS } from './fixtures.ts'

void t.test('it reports how many expired records it has removed', async (t) => {
  let now = 1000
  const told: number[] = []
  const onPruned = (records: number): void => void told.push(records)
  const register = memoryStore({ clock: () => now, maxBytes: MEMORY_BYTES, onPruned })
  for (const dropIn of [1000, 1000, 2000])
    await register.put(newId(), bytesOf('completed', newToken()), { dueIn: 1, dropIn })
  await register.get(newId())
  t.same(told, [])
  now = 2000
  await register.get(newId())
  await register.get(newId())
  now = 3000
  await register.get(newId())
  t.same(told, [2, 1])
})

void t.test('a large store is swept in slices, within a second or so', async (t) => {
  let now = 1000
  const told: number[] = []
  const onPruned = (records: number): void => void told.push(records)
  const register = memoryStore({ clock: () => now, maxBytes: MEMORY_BYTES, onPruned })
  const bytes = bytesOf('completed', newToken())
  for (let n = 0; n < 3500; n++) await register.put(newId(), Buffer.from(bytes), { dueIn: 1, dropIn: 5000 })
  for (now = 6000; now <= 8000; now += 10) await register.ping()
  t.ok(told.length >= 4 && told.every((records) => records <= 1001), String(told))
  t.equal(
    told.reduce((sum, records) => sum + records, 0),
    3500,
  )
})

void t.test('it says that it forgets everything with the process', async (t) => {
  const register = memoryStore({ clock: () => 0, maxBytes: MEMORY_BYTES })
  t.equal(register.name, 'memory')
  t.strictSame(await register.traits(), {
    durable: false,
    evicts: false,
    forgets: null,
    hasIdentity: false,
    findings: [
      'The memory store forgets every record when the process ends, and no other replica sees them.',
    ],
    refusals: [],
  })
})

void t.test('a full store refuses new records, evicts nothing, and recovers on expiry', async (t) => {
  let now = 1000
  const register = memoryStore({ clock: () => now, maxBytes: 64 * 1024 })
  const token = newToken()
  const ids: RecordId[] = []
  let isFull = false
  while (!isFull && ids.length < 1000) {
    const id = newId()
    const bytes = bytesOf('in_progress', token)
    try {
      await register.put(id, bytes, { dueIn: 10, dropIn: ids.length === 3 ? 500 : 5000 })
    } catch (error) {
      t.match(error, { name: 'StoreFull', maybeApplied: false })
      isFull = true
    }
    if (!isFull) ids.push(id)
  }
  t.ok(isFull && ids.length > 20, `${ids.length} records fit`)
  for (const id of ids) t.ok((await register.get(id)).bytes)
  now = 2000
  t.ok((await register.put(newId(), bytesOf('in_progress', token), SPANS)).done, 'there is room again')
  t.equal((await register.get(ids[3] as RecordId)).bytes, null)
})

void t.test('throttle is exact to the millisecond, at any rate', async (t) => {
  const step = fc.oneof(
    fc.record({ pass: fc.integer({ min: 0, max: 3000 }) }),
    fc.record({ units: fc.constantFrom<(1 | -1)[]>(1, 1, 1, -1) }),
  )
  const anyRate = fc.record({
    count: fc.integer({ min: 1, max: 1000 }),
    per: fc.integer({ min: 1, max: 10_000 }),
  })
  await fc.assert(
    fc.asyncProperty(anyRate, fc.array(step, { maxLength: 100, size: 'max' }), async (rate, steps) => {
      let now = 1_795_000_000_000
      const register = memoryStore({ clock: () => now, maxBytes: MEMORY_BYTES })
      const [count, per] = [BigInt(rate.count), BigInt(rate.per)]
      // Available units, times `per`.
      let filled = count * per
      for (const one of steps) {
        if ('pass' in one) {
          now += one.pass
          const more = filled + BigInt(one.pass) * count
          filled = more > count * per ? count * per : more
          continue
        }
        const wait = await register.limits.take('bucket', rate, one.units)
        if (one.units === 1 && filled < per) {
          assert.equal(wait, Number((per - filled + count - 1n) / count))
          continue
        }
        assert.equal(wait, 0)
        filled = one.units === 1 ? filled - per : filled + per > count * per ? count * per : filled + per
      }
    }),
    { numRuns: 100 },
  )
  t.pass()
})

void t.test('buckets are bounded like records, and removed when they are full again', async (t) => {
  let now = 1000
  const register = memoryStore({ clock: () => now, maxBytes: 64 * 1024 })
  const rate = { count: 10, per: 10_000 }
  const take = () => register.limits.take(newId(), rate, 1)
  for (let n = 0; n < 10_000; n++) {
    assert.equal(await take(), 0)
    now += 20
  }
  let taken = 0
  const fill = async (): Promise<void> => {
    for (let n = 0; n < 1000; n++) {
      await take()
      taken++
    }
  }
  await t.rejects(fill(), { name: 'StoreFull' })
  await t.rejects(async () => register.put(newId(), bytesOf('in_progress', newToken()), SPANS), {
    name: 'StoreFull',
  })
  t.ok(taken > 20 && taken <= 128, `${taken} and those of the last seconds fit`)
  now += 1000
  t.equal(await take(), 0)
  t.ok((await register.put(newId(), bytesOf('in_progress', newToken()), SPANS)).done, 'there is room again')

  const mine = newId()
  await register.limits.take(mine, rate, 1)
  await t.rejects(fill(), { name: 'StoreFull' })
  t.equal(await register.limits.take(mine, rate, 1), 0, 'an existing bucket goes on')
  t.equal(await register.limits.take(mine, rate, -1), 0)
  t.equal(await register.limits.take(mine, rate, -1), 0)
  t.ok(await take().then(() => true), 'and makes room when it is full again')
})

const ROOM = 64 * 1024

/** A store, and the length of the largest record that it would take now. */
function measured() {
  const clock = { now: 1000 }
  const register = memoryStore({ clock: () => clock.now, maxBytes: ROOM })
  const sized = (length: number): Buffer => {
    const empty = bytesOf('completed', newToken(), { result: response(Buffer.alloc(0)) }).length
    return bytesOf('completed', newToken(), { result: response(Buffer.alloc(length - empty)) })
  }
  const largest = async (): Promise<number> => {
    let [fits, not] = [500, ROOM + 1]
    while (not - fits > 1) {
      const middle = Math.floor((fits + not) / 2)
      const id = newId()
      try {
        const { now } = await register.put(id, sized(middle), SPANS)
        await register.remove(id, now)
        fits = middle
      } catch (error) {
        if (!(error instanceof StoreFull)) throw error
        not = middle
      }
    }
    return fits
  }
  return { clock, register, sized, largest }
}

void t.test('everything that a store holds counts, to the byte, until it is gone', async (t) => {
  const { clock, register, sized, largest } = measured()
  const room = await largest()
  const entry = ROOM - room
  const held = async () => room - (await largest())
  const left = async (what: string) => t.equal(await held(), 0, what)
  t.ok(entry > 0 && entry < 1024)
  for (const length of [600, 5000]) {
    const id = newId()
    const { now } = await register.put(id, sized(length), SPANS)
    t.equal(await held(), length + entry)
    t.ok(await register.remove(id, now))
    await left('a removed record')
    await register.put(id, sized(length), { dueIn: 1, dropIn: 10 })
    t.equal(await held(), length + entry)
    clock.now += 1000
    await left('an expired record')
  }
  const [id, token] = [newId(), newToken()]
  const claim = bytesOf('in_progress', token)
  const { now } = await register.put(id, claim, SPANS)
  t.equal(await held(), claim.length + entry)
  t.same(await register.renew([{ id, token, ...SPANS }]), [true])
  t.equal(await held(), claim.length + entry)
  for (const [n, length] of [5000, 20_000, 600].entries()) {
    t.ok((await register.swap(id, { version: now + 1 + n }, sized(length), SPANS, false)).done)
    t.equal(await held(), length + entry, `after a swap to ${length} bytes`)
  }
  const note = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: 'x'.repeat(100) }
  t.ok(await register.history.append(id, [note]))
  const one = (await held()) - 600 - entry
  t.ok(one > 100, 'a note')
  t.ok(await register.history.append(id, [{ ...note, tag: 'b' }]))
  t.equal((await held()) - 600 - entry, 2 * one, 'another one')
  t.match(await register.history.read(id), [
    { tag: 'a', text: note.text },
    { tag: 'b', text: note.text },
  ])
  t.ok(await register.remove(id, now + 4))
  await left('a record and its history')
  await register.put(id, bytesOf('completed', token), { dueIn: 1, dropIn: 10 })
  await register.history.append(id, [note])
  clock.now += 1000
  await left('an expired record and its history')

  const rate = { count: 2, per: 1000 }
  const [mine, other] = [newId(), newId()]
  t.equal(await register.limits.take(mine, rate, 1), 0)
  t.equal(await register.limits.take(mine, rate, 1), 0)
  t.equal(await register.limits.take(other, rate, 1), 0)
  t.equal(await held(), 2 * entry, 'two buckets')
  t.equal(await register.limits.take(other, rate, -1), 0)
  t.equal(await held(), entry, 'one that is full again')
  clock.now += 2000
  t.equal(await register.limits.take(mine, rate, 1), 0)
  t.equal(await held(), entry, 'one that is drawn from again just when its time is over')
  clock.now += 2000
  await left('a bucket whose time is over')
})

void t.test('an outcome without a sizeable body is taken however full the store is', async (t) => {
  const { register, sized, largest } = measured()
  const [id, token] = [newId(), newToken()]
  const own = { token, states: ['in_progress', 'completed'] } as const
  const small = bytesOf('in_progress', token)
  await register.put(id, small, SPANS)
  const note = (text: string) => ({ tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text })
  await register.history.append(id, [note('xx')])
  const [large, length] = [newId(), await largest()]
  const { now } = await register.put(large, sized(length), SPANS)
  const swap = async (bytes: Buffer) => register.swap(id, own, bytes, SPANS, false)
  const outcome = (length: number): Buffer => {
    const empty = bytesOf('completed', token, { result: response(Buffer.alloc(0)) }).length
    return bytesOf('completed', token, { result: response(Buffer.alloc(length - empty)) })
  }
  await t.rejects(swap(outcome(SMALL_RECORD + 1)), { name: 'StoreFull', maybeApplied: false })
  t.ok((await swap(outcome(SMALL_RECORD))).done)
  await t.rejects(swap(outcome(SMALL_RECORD + 1)), { name: 'StoreFull' }, 'one byte more')
  for (const [n, other] of [length, length - 1].entries()) {
    const version = now + n
    t.ok((await register.swap(large, { version }, sized(other), SPANS, false)).done, 'nothing more')
  }
  const more = register.swap(large, { version: now + 2 }, sized(length), SPANS, false)
  await t.rejects(Promise.resolve(more), { name: 'StoreFull' }, 'one byte more')
  t.ok(await register.history.append(id, [note('xx')]), 'nor may a note take more room')
  await t.rejects(register.history.append(id, [note('xxx')]), { name: 'StoreFull' })
  t.ok(await register.history.append(id, [note('x')]))
  t.ok((await swap(outcome(1000))).done, 'a smaller one')
})

void t.test('the memory of what is gone is used again', async (t) => {
  const { clock, register } = measured()
  const large = () => bytesOf('completed', newToken(), { result: response(Buffer.alloc(40_000)) })
  const note = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: 'x'.repeat(5000) }
  const cycle = async (): Promise<void> => {
    const [removed, expired] = [newId(), newId()]
    const { now } = await register.put(removed, large(), SPANS)
    for (const tag of ['a', 'b']) await register.history.append(removed, [{ ...note, tag }])
    await register.remove(removed, now)
    await register.put(expired, large(), { dueIn: 1, dropIn: 1 })
    await register.history.append(expired, [note])
    clock.now += 1000
  }
  setFlagsFromString('--expose-gc')
  const gc = runInNewContext('gc') as () => void
  const held = async (): Promise<number> => {
    for (let n = 0; n < 3; n++) {
      gc()
      await new Promise((next) => setImmediate(next))
    }
    return process.memoryUsage().arrayBuffers
  }
  await cycle()
  const before = await held()
  for (let n = 0; n < 300; n++) await cycle()
  const more = (await held()) - before
  t.ok(more < 1024 * 1024, `${more} bytes more`)
})

registerContract(t, 'memory', async () => memoryHarness())
exactContract(t, 'memory', async () => memoryHarness())
