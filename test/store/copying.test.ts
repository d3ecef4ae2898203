import t, { type Test } from 'tap'
import type { RecordDraft, RecordId, Spans } from '../../src/core/record.ts'
import { memoryStore } from '../../src/store/memory.ts'
import { areTheSame, CopyDiffers, copyRecord, findRunning } from '../../src/store/moving/copying.ts'
import { decodeRecord, encodeDraft, readStamps } from '../../src/store/record/codec.ts'
import { CorruptRecord, type Store, StoreFull, StoreUnavailable } from '../../src/store/register.ts'
import { openSqliteStore } from '../../src/store/sqlite/store.ts'
import { bytesOf, HOUR, MINUTE, newId, newToken, SPANS, tempDir } from './fixtures.ts'

/** Their clocks are an hour apart. */
function memories(): { readonly from: Store; readonly to: Store } {
  const store = (skew: number): Store =>
    memoryStore({ clock: () => Date.now() + skew, maxBytes: 1024 * 1024 })
  return { from: store(0), to: store(-HOUR) }
}

const ALL = { completedOnly: false, writes: true }
const NOTE = { tag: 'replayed:a', count: 3, firstAgo: HOUR, lastAgo: MINUTE, text: '{"status":201}' }

async function bytesIn(store: Store, id: RecordId): Promise<Buffer> {
  const { bytes } = await store.get(id)
  if (bytes === null) throw new Error('there is no record')
  return bytes
}

/** Writes it as a proxy does: claimed, then settled. */
async function made(
  store: Store,
  state: RecordDraft['state'],
  more: { readonly id?: RecordId; readonly spans?: Spans; readonly over?: Partial<RecordDraft> } = {},
): Promise<{ readonly id: RecordId; readonly token: Buffer; readonly bytes: Buffer }> {
  const { id = newId(), spans = SPANS, over = {} } = more
  const token = newToken()
  await store.put(id, bytesOf('in_progress', token), SPANS)
  if (state !== 'in_progress' || spans !== SPANS) {
    const states = ['in_progress'] as const
    await store.swap(id, { token, states }, bytesOf(state, token, over), spans, false)
  }
  return { id, token, bytes: await bytesIn(store, id) }
}

/** What a copy keeps of a record. */
function essence(bytes: Buffer, now: number): unknown {
  const { version: _version, updatedAt: _updatedAt, dropAt, ...record } = decodeRecord(bytes)
  const { due } = readStamps(bytes)
  return { ...record, leaseUntil: 0, nextLookAt: 0, expiresAt: 0, dropIn: dropAt - now, dueIn: due - now }
}

/** A record in any state is copied unchanged from each to each other one. */
async function copiesUnchanged(t: Test, kinds: Readonly<Record<string, Store>>): Promise<void> {
  for (const [source, from] of Object.entries(kinds))
    for (const [target, to] of Object.entries(kinds).filter(([name]) => name !== source)) {
      const large = Buffer.alloc(300_000, 0xfe)
      const records = [
        await made(from, 'completed'),
        await made(from, 'completed', {
          over: {
            result: {
              kept: true,
              response: { status: 200, reason: '', headers: [], body: large, trailers: [] },
            },
          } as Partial<RecordDraft>,
        }),
        await made(from, 'failed_retryable', { over: { lastError: 'refused', attempts: 7 } }),
        await made(from, 'unknown', { spans: { dueIn: -MINUTE, dropIn: HOUR } }),
        await made(from, 'in_progress', { spans: { dueIn: -MINUTE, dropIn: HOUR } }),
        await made(from, 'completed', { spans: { dueIn: -MINUTE, dropIn: HOUR } }),
        await made(from, 'expired'),
      ]
      for (const { id, bytes } of records) {
        await from.history.append(id, [NOTE, { ...NOTE, tag: 'misuse:a' }])
        const { updatedAt } = readStamps(bytes)
        t.strictSame(await copyRecord(from, to, id, ALL), { became: 'copied', updatedAt })
        const [ours, there] = [await from.get(id), await to.get(id)]
        const state = decodeRecord(bytes).state
        // The remaining times may differ by as long as the copy took, not by more.
        const [a, b] = [essence(bytes, ours.now), essence(there.bytes as Buffer, there.now)] as [
          Record<string, number>,
          Record<string, number>,
        ]
        for (const left of ['dropIn', 'dueIn']) {
          t.ok(
            Math.abs((a[left] as number) - (b[left] as number)) < MINUTE,
            `${source} ${target} ${state} ${left}`,
          )
          a[left] = b[left] = 0
        }
        t.strictSame(b, a, `${source} → ${target}: ${state}`)
        const notes = await to.history.read(id)
        t.match(notes, [{ tag: 'replayed:a', count: 3, text: NOTE.text }, { tag: 'misuse:a' }])
        const [first] = notes
        t.ok(Math.abs(there.now - (first?.first ?? 0) - HOUR) < MINUTE, 'a note keeps its age')

        const version = readStamps(there.bytes as Buffer).version
        t.match(await copyRecord(from, to, id, ALL), { became: 'there' }, 'a second copy changes nothing')
        t.equal(readStamps(await bytesIn(to, id)).version, version)
        t.equal((await to.history.read(id)).length, 2)
      }
      const page = async (store: Store) => new Set((await store.list('unresolved', null, 10)).ids)
      t.strictSame(await page(to), await page(from), 'the sweeper of the target finds them')
    }
}

void t.test('§9 a record in any state is copied unchanged into another store', async (t) => {
  using dir = tempDir()
  const settings = { service: 'test', timeoutMs: 10_000, onEvent: () => {} }
  const file = await openSqliteStore({ ...settings, path: `${dir.path}/records.db` })
  const { from, to } = memories()
  await copiesUnchanged(t, { sqlite: file, memory: from })
  t.equal(await areTheSame(file, to), false)
  t.equal(await areTheSame(file, file), true)
  await file.close()
})

void t.test('a claim in the target after a copy continues the fence of the source', async (t) => {
  const { from, to } = memories()
  const { id, bytes } = await made(from, 'failed_retryable')
  await copyRecord(from, to, id, ALL)
  const there = decodeRecord(await bytesIn(to, id))
  const claim = await to.swap(id, { version: there.version }, bytesOf('in_progress', newToken()), SPANS, true)
  t.match(claim, { done: true, stamp: { fence: readStamps(bytes).fence + 1 } }, 'it has the next fence')
})

void t.test('a dry run says what a copy would do, and writes nothing', async (t) => {
  const { from, to } = memories()
  const dry = { ...ALL, writes: false }
  const { id, token } = await made(from, 'failed_retryable')
  await from.history.append(id, [NOTE])
  t.match(await copyRecord(from, to, id, dry), { became: 'copied' })
  t.equal((await to.get(id)).bytes, null)
  await copyRecord(from, to, id, ALL)
  t.match(await copyRecord(from, to, id, dry), { became: 'there' })
  const { version } = decodeRecord(await bytesIn(from, id))
  await from.swap(id, { version }, bytesOf('completed', token), SPANS, true)
  t.match(await copyRecord(from, to, id, dry), { became: 'replaced' })
  t.equal(decodeRecord(await bytesIn(to, id)).state, 'failed_retryable')
})

void t.test('a later state in the source replaces the copy; a later one in the target stays', async (t) => {
  for (const [state, later] of [
    ['failed_retryable', 'completed'],
    ['unknown', 'completed'],
    ['failed_retryable', 'unknown'],
  ] as const) {
    const { from, to } = memories()
    const { id } = await made(from, state)
    await from.history.append(id, [NOTE])
    await copyRecord(from, to, id, ALL)
    const { version } = decodeRecord(await bytesIn(from, id))
    const token = newToken()
    await from.swap(id, { version }, bytesOf('in_progress', token), SPANS, true)
    const states = ['in_progress'] as const
    await from.swap(id, { token, states }, bytesOf(later, token), SPANS, false)
    t.match(await copyRecord(from, to, id, ALL), { became: 'replaced' }, `${state} → ${later}`)
    const [ours, there] = [decodeRecord(await bytesIn(from, id)), decodeRecord(await bytesIn(to, id))]
    t.match(there, { state: later, token, fence: ours.fence, createdAt: ours.createdAt })
    t.equal((await to.history.read(id)).length, 1)
    t.match(await copyRecord(from, to, id, ALL), { became: 'there' })

    const resolved = encodeDraft({
      ...ours,
      state: 'completed',
      result: { kept: false, why: 'outcome_only', status: 200, location: null },
    })
    await to.swap(id, { version: there.version }, resolved, SPANS, false)
    const kept = await bytesIn(to, id)
    const became = (await copyRecord(from, to, id, ALL)).became
    t.equal(became, 'newer')
    t.strictSame(await bytesIn(to, id), kept)
  }
})

void t.test('two different answers under one id are reported, and the one in the target stays', async (t) => {
  const { from, to } = memories()
  const { id } = await made(from, 'completed')
  await made(to, 'completed', { id })
  const kept = await bytesIn(to, id)
  t.match(await copyRecord(from, to, id, ALL), { became: 'different' })
  t.strictSame(await bytesIn(to, id), kept)
})

void t.test('a running record is not copied; completedOnly leaves every open one', async (t) => {
  const { from, to } = memories()
  t.equal(await findRunning(from), null)
  const running = await made(from, 'in_progress')
  t.match(await copyRecord(from, to, running.id, ALL), { became: 'running' })
  const found = await findRunning(from)
  t.equal(found?.id, running.id)
  t.ok((found?.leaseLeft ?? 0) > HOUR - MINUTE)
  const completedOnly = { ...ALL, completedOnly: true }
  for (const [state, became] of [
    ['completed', 'copied'],
    ['expired', 'copied'],
    ['unknown', 'left'],
    ['failed_retryable', 'left'],
    ['in_progress', 'left'],
  ] as const) {
    const { id } = await made(from, state)
    t.match(await copyRecord(from, to, id, completedOnly), { became }, state)
  }
})

void t.test('findRunning ignores expired leases, however many unresolved records there are', async (t) => {
  const { from } = memories()
  for (let n = 0; n < 501; n++) await made(from, 'unknown')
  const lapsed = { dueIn: -MINUTE, dropIn: HOUR }
  await made(from, 'in_progress', { spans: lapsed })
  t.equal(await findRunning(from), null)
  const gone = { ...from, get: async () => ({ now: 0, bytes: null }) }
  t.equal(await findRunning(gone), null, 'nor a record that was removed meanwhile')
})

void t.test('a missing or unreadable record is not copied, and none is overwritten', async (t) => {
  const { from, to } = memories()
  t.strictSame(await copyRecord(from, to, newId(), ALL), { became: 'expired', updatedAt: 0 })
  const { id } = await made(from, 'completed')
  for (const [at, byte] of [
    [0, 0],
    [2, 9],
    [3, 77],
  ] as const) {
    const bytes = Buffer.from(await bytesIn(from, id))
    bytes[at] = byte
    const other = { ...from, get: async () => ({ now: Date.now(), bytes }) }
    t.strictSame(await copyRecord(other, to, id, ALL), { became: 'unreadable', updatedAt: 0 })
    t.equal((await to.get(id)).bytes, null)
    const foreign = { ...to, put: async () => ({ done: false as const, now: 0, bytes }) }
    t.match(await copyRecord(from, foreign, id, ALL), { became: 'different' })
  }
  const short = { ...from, get: async () => ({ now: Date.now(), bytes: Buffer.from('IP\x01\x02') }) }
  t.match(await copyRecord(short, to, id, ALL), { became: 'unreadable' })
  const corrupt = () => Promise.reject(new CorruptRecord('cut off'))
  t.match(await copyRecord({ ...from, get: corrupt }, to, id, ALL), { became: 'unreadable' })
  t.match(await copyRecord(from, { ...to, put: corrupt }, id, ALL), { became: 'different' })
  const down = () => Promise.reject(new StoreUnavailable('gone', true))
  await t.rejects(copyRecord({ ...from, get: down }, to, id, ALL), StoreUnavailable)
  await t.rejects(copyRecord(from, { ...to, put: down }, id, ALL), StoreUnavailable)
})

void t.test('a target that stored something else is an error; one that has moved on is not', async (t) => {
  const { from, to } = memories()
  for (const spoil of [
    (bytes: Buffer) => bytes.writeUInt8(bytes.readUInt8(bytes.length - 1) ^ 1, bytes.length - 1),
    (bytes: Buffer) => bytes.writeUInt8(bytes.readUInt8(20) ^ 1, 20),
    (bytes: Buffer) => bytes.writeUInt8(bytes.readUInt8(0) ^ 1, 0),
    (bytes: Buffer) => bytes.writeUInt8(bytes.readUInt8(3) ^ 1, 3),
    (bytes: Buffer) => bytes.writeUIntBE(readStamps(bytes).due + 1, 44, 6),
    (bytes: Buffer) => bytes.writeUIntBE(readStamps(bytes).dropAt - 1, 50, 6),
  ]) {
    const { id } = await made(from, 'completed')
    const get: Store['get'] = async () => {
      const reply = await to.get(id)
      const bytes = Buffer.from(reply.bytes as Buffer)
      spoil(bytes)
      return { ...reply, bytes }
    }
    await t.rejects(copyRecord(from, { ...to, get }, id, ALL), CopyDiffers)
  }
  const { id, token } = await made(from, 'failed_retryable')
  const put: Store['put'] = async (...args) => {
    const reply = await to.put(...args)
    const { version } = decodeRecord(await bytesIn(to, id))
    await to.swap(id, { version }, bytesOf('in_progress', newToken()), SPANS, true)
    return reply
  }
  t.match(await copyRecord(from, { ...to, put }, id, ALL), { became: 'copied' })
  t.notOk(decodeRecord(await bytesIn(to, id)).token.equals(token))
  const other = await made(from, 'failed_retryable')
  const forgets = { ...to, get: async () => ({ now: 0, bytes: null }) }
  t.match(
    await copyRecord(from, forgets, other.id, ALL),
    { became: 'copied' },
    'nor one whose record is already gone',
  )
})

void t.test('a change in the target during a replacement makes the copy decide again', async (t) => {
  for (const state of ['failed_retryable', 'unknown'] as const) {
    const { from, to } = memories()
    const { id } = await made(from, state)
    await copyRecord(from, to, id, ALL)
    const token = newToken()
    const before = decodeRecord(await bytesIn(from, id))
    await from.swap(id, { version: before.version }, bytesOf('completed', token), SPANS, true)
    // The sweeper, or an operator, gets there first, once.
    let left = 1
    const first = async (): Promise<void> => {
      if (left-- <= 0) return
      const there = decodeRecord(await bytesIn(to, id))
      await to.swap(id, { version: there.version }, await bytesIn(to, id), SPANS, false)
    }
    const racing: Store = {
      ...to,
      remove: async (...args) => first().then(() => to.remove(...args)),
      swap: async (...args) => first().then(() => to.swap(...args)),
    }
    t.match(await copyRecord(from, racing, id, ALL), { became: 'replaced' }, state)
    t.equal(left, -1, 'tried again')
    t.ok(decodeRecord(await bytesIn(to, id)).token.equals(token))
  }
  const { from, to } = memories()
  const { id } = await made(from, 'completed')
  await made(to, 'failed_retryable', { id })
  const claimer = newToken()
  const remove: Store['remove'] = async (...args) => {
    const removed = await to.remove(...args)
    await to.put(id, bytesOf('in_progress', claimer), SPANS)
    return removed
  }
  t.match(await copyRecord(from, { ...to, remove }, id, ALL), { became: 'different' })
  t.ok(decodeRecord(await bytesIn(to, id)).token.equals(claimer), 'a retry that came first keeps its claim')
})

void t.test('one store under two names is recognised as the same', async (t) => {
  const { from, to } = memories()
  t.equal(await areTheSame(from, to), false)
  t.equal(await areTheSame(from, from), true)
  const take = (error: Error) => ({ take: () => Promise.reject(error) })
  const full = { ...from, limits: take(new StoreFull('full')) }
  t.equal(await areTheSame(full, to), false, 'records can be moved out of a full store')
  const down = { ...from, limits: take(new StoreUnavailable('down', false)) }
  await t.rejects(areTheSame(down, to), StoreUnavailable)
})

/** Their clocks stand still. */
function standing(): { readonly from: Store; readonly to: Store } {
  const store = () => memoryStore({ clock: () => 1_795_000_000_000, maxBytes: 10 * 1024 * 1024 })
  return { from: store(), to: store() }
}

void t.test('a lease that ends at this very moment is over', async (t) => {
  const { from, to } = standing()
  const over = await made(from, 'in_progress', { spans: { dueIn: 0, dropIn: HOUR } })
  t.equal(await findRunning(from), null)
  t.match(await copyRecord(from, to, over.id, ALL), { became: 'copied' })
  const last = await made(from, 'in_progress', { spans: { dueIn: 1, dropIn: HOUR } })
  t.same(await findRunning(from), { id: last.id, leaseLeft: 1 })
  t.match(await copyRecord(from, to, last.id, ALL), { became: 'running' })
})

void t.test('a running record is found behind many others, and beside one that cannot be read', async (t) => {
  const { from } = standing()
  const [first] = await Promise.all(Array.from({ length: 501 }, () => made(from, 'unknown')))
  const running = await made(from, 'in_progress', { spans: { dueIn: 2 * HOUR, dropIn: 3 * HOUR } })
  t.match(await findRunning(from), { id: running.id, leaseLeft: 2 * HOUR })
  const get: Store['get'] = async (id) =>
    id === first?.id ? { now: 0, bytes: Buffer.from('no record') } : from.get(id)
  t.match(await findRunning({ ...from, get }), { id: running.id })
})

void t.test('a history', async (t) => {
  const slow = (store: Store): Store => ({
    ...store,
    history: {
      ...store.history,
      append: async (...args) => {
        await new Promise((later) => setImmediate(later))
        return store.history.append(...args)
      },
    },
  })
  await t.test('that an interrupted copy left behind is copied by the next one', async (t) => {
    const { from, to } = standing()
    const { id } = await made(from, 'completed')
    await copyRecord(from, to, id, ALL)
    await from.history.append(id, [NOTE])
    t.match(await copyRecord(from, slow(to), id, { ...ALL, writes: false }), { became: 'there' })
    t.same(await to.history.read(id), [], 'not by a dry run')
    t.match(await copyRecord(from, slow(to), id, ALL), { became: 'there' })
    t.match(await to.history.read(id), await from.history.read(id))
  })
  await t.test('is not added to another record, or to what people did there', async (t) => {
    const { from, to } = standing()
    const { id } = await made(from, 'completed')
    await from.history.append(id, [NOTE, { ...NOTE, tag: 'b' }])
    await made(to, 'completed', { id })
    t.match(await copyRecord(from, to, id, ALL), { became: 'different' })
    t.same(await to.history.read(id), [])
    const other = await made(from, 'completed')
    await copyRecord(from, to, other.id, ALL)
    await to.history.append(other.id, [NOTE])
    await from.history.append(other.id, [NOTE, { ...NOTE, tag: 'b' }])
    await copyRecord(from, to, other.id, ALL)
    t.equal((await to.history.read(other.id)).length, 1)
  })
})

void t.test('a record that holds a key is never gone while it is replaced', async (t) => {
  for (const state of ['unknown', 'failed_retryable'] as const) {
    const { from, to } = standing()
    const { id } = await made(from, state)
    await copyRecord(from, to, id, ALL)
    const { version } = decodeRecord(await bytesIn(from, id))
    await from.swap(id, { version }, bytesOf('completed', newToken()), SPANS, true)
    const calls: unknown[] = []
    const spied: Store = {
      ...to,
      put: async (...args) => (calls.push(['put', args[3]]), to.put(...args)),
      swap: async (...args) => (calls.push(['swap', args[4]]), to.swap(...args)),
      remove: async (...args) => (calls.push(['remove']), to.remove(...args)),
    }
    t.match(await copyRecord(from, spied, id, ALL), { became: 'replaced' })
    t.same(
      calls,
      state === 'unknown'
        ? [
            ['put', 'again'],
            ['swap', false],
          ]
        : [['put', 'again'], ['remove'], ['put', 'again']],
      'and a grace stops no copy',
    )
    t.equal(decodeRecord(await bytesIn(to, id)).state, 'completed')
  }
  const { from, to } = standing()
  const { id } = await made(from, 'unknown')
  await copyRecord(from, to, id, ALL)
  const { version } = decodeRecord(await bytesIn(from, id))
  await from.swap(id, { version }, bytesOf('completed', newToken()), SPANS, true)
  const swap: Store['swap'] = async () => {
    await to.remove(id, decodeRecord(await bytesIn(to, id)).version)
    return { done: false, now: 0, bytes: null }
  }
  t.match(await copyRecord(from, { ...to, swap }, id, ALL), { became: 'replaced' })
  t.equal(decodeRecord(await bytesIn(to, id)).state, 'completed', 'even one that has just expired')
})

void t.test('asking whether two stores are the same leaves no trace', async (t) => {
  const { from, to } = standing()
  const spied = (store: Store, turns: number) => {
    const units: number[] = []
    const take: Store['limits']['take'] = async (bucket, rate, unit) => {
      for (let n = 0; n < turns; n++) await new Promise((later) => setImmediate(later))
      units.push(unit)
      return store.limits.take(bucket, rate, unit)
    }
    return { units, store: { ...store, limits: { take } } }
  }
  const [one, other] = [spied(from, 5), spied(to, 1)]
  t.equal(await areTheSame(one.store, other.store), false)
  t.same(
    [one.units, other.units],
    [
      [1, -1],
      [1, -1],
    ],
  )
  const same = [spied(from, 1), spied(from, 5)] as const
  t.equal(await areTheSame(same[0].store, same[1].store), true)
  t.same(
    same.map(({ units }) => units),
    [[1], [1, -1]],
  )
})
