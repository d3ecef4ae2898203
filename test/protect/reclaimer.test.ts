import { setTimeout as wait } from 'node:timers/promises'
import t, { type Test } from 'tap'
import type { Completed, IdempotencyRecord, RecordId } from '../../src/core/record.ts'
import { resolvedDraft } from '../../src/core/settle.ts'
import { Reclaimer } from '../../src/protect/reclaimer.ts'
import { Settler } from '../../src/protect/settler.ts'
import { RecentWrites, Records } from '../../src/store/records.ts'
import { draft, bytesOf as encoded, newId, newToken, response, SPANS, until } from '../store/fixtures.ts'
import { Gate, hurried, Replica, route, type Store } from './harness.ts'

const EVERYTHING = { left: 1, concerns: () => true }

interface Reclaiming {
  readonly a: Replica
  readonly store: Store
  readonly recent: RecentWrites
  readonly reclaimer: Reclaimer
  readonly splits: unknown[]
  readonly written: number[]
  readonly bugs: unknown[]
}

/** A replica that remembers its outcomes, and the reclaimer that writes them again. */
function reclaiming(t: Test, { isSafe = (): boolean => false, repliesWithin = 1 } = {}): Reclaiming {
  const a = new Replica()
  const recent = new RecentWrites(() => a.store.now)
  const records = new Records(a.wire, () => {}, recent)
  const settler = new Settler(records, a.ports.observer, null)
  Object.assign(a.ports, { records, settler })
  const splits: unknown[] = []
  const written: number[] = []
  const bugs: unknown[] = []
  const reclaimer = new Reclaimer({
    records,
    store: a.wire,
    settler,
    running: a.ports.running,
    repliesWithin,
    isSafe,
    onSplit: (route, detail) => void splits.push({ ...detail, route }),
    onWritten: (n) => void written.push(n),
    onBug: (error) => void bugs.push(error),
  })
  t.teardown(() => {
    reclaimer.close()
    a.close()
  })
  return { a, store: a.store, recent, reclaimer, splits, written, bugs }
}

/** Sends a request that the upstream holds. */
async function under(a: Replica, key = 'key-0123456789abcdef') {
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded()))
  const answer = a.get({ key })
  await gate.reached
  return { gate, answer }
}

const bytesOf = async ({ store }: Reclaiming, id = [...store.ids][0] as RecordId) =>
  (await store.inner.get(id)).bytes

void t.test('W01 a lost claim is written again, and its outcome is stored under it', async (t) => {
  const it = reclaiming(t)
  const { gate, answer } = await under(it.a)
  const before = await it.store.read(it.a.id)
  await it.store.restore(it.a.id, null)
  await it.reclaimer.begin(EVERYTHING)
  const after = await it.store.read(it.a.id)
  t.match(after, { state: 'in_progress', fence: before?.fence, createdAt: before?.createdAt })
  t.ok(after?.token.equals(before?.token as Buffer))
  t.same(it.written, [1])
  gate.open()
  await answer
  t.match(await it.store.read(it.a.id), { state: 'completed' })
  t.same(it.a.said('completed'), ['stored'])
})

void t.test(
  'the reclaimer writes nothing that was not lost or that the failover does not concern',
  async (t) => {
    const it = reclaiming(t)
    const { gate, answer } = await under(it.a)
    await it.a.get({ key: 'other-0123456789abcdef' })
    await it.reclaimer.begin(EVERYTHING)
    t.same(it.written, [])
    const decided = newId()
    const written = { draft: draft('completed', newToken()), spans: SPANS }
    it.reclaimer.decided({ id: decided, version: 1, written })
    const ids = [...it.store.ids, decided]
    for (const id of ids) await it.store.restore(id, null)
    await it.reclaimer.begin({ left: 1, concerns: () => false })
    for (const id of ids) t.equal(await bytesOf(it, id), null)
    gate.open()
    await answer
  },
)

void t.test('W01 an outcome that was lost, or rolled back to its claim, is written again', async (t) => {
  const it = reclaiming(t)
  const { gate, answer } = await under(it.a)
  const claimed = await bytesOf(it)
  gate.open()
  const { bytes } = await answer
  for (const older of [null, claimed]) {
    await it.store.restore(it.a.id, older)
    await it.reclaimer.begin(EVERYTHING)
    t.match(await it.a.get(), { status: 201, bytes, replayed: true })
  }
  t.same(it.written, [1, 1])
  t.equal(it.a.n, 1)
})

void t.test(
  'W01 an outcome is remembered even if its reply was lost or somebody else resolved the record',
  async (t) => {
    for (const lost of ['its reply', 'its turn'] as const) {
      const it = reclaiming(t)
      const { gate, answer } = await under(it.a)
      if (lost === 'its reply') it.store.next.push({ op: 'swap', fault: 'lost' })
      else {
        const there = (await it.store.read(it.a.id)) as IdempotencyRecord
        const resolved = resolvedDraft(there, { kind: 'completed', result: response() })
        await it.a.records.replace(it.a.id, there.version, resolved, SPANS)
      }
      gate.open()
      await answer
      while (!(await it.a.ports.settler.flush()));
      await it.store.restore(it.a.id, null)
      await it.reclaimer.begin(EVERYTHING)
      t.match(await it.a.get(), { status: 201, replayed: true }, lost)
      t.equal(it.a.n, 1)
    }
  },
)

void t.test('W02 an unknown outcome overwrites an earlier claim, but only in the grace', async (t) => {
  const it = reclaiming(t)
  it.a.script.push({ proof: 'not_sent', reason: 'refused' })
  await it.a.get()
  const { id } = it.a
  const { fence, createdAt } = (await it.store.read(id)) as IdempotencyRecord
  const gate = new Gate()
  it.a.script.push(gate.before(() => ({ proof: 'unknown', reason: 'reset', timedOut: false, status: null })))
  const answer = it.a.get()
  await gate.reached
  // The promoted server knows only that the first attempt is running.
  await it.store.restore(id, null)
  await it.store.inner.put(id, encoded('in_progress', newToken(), { fence, createdAt }), SPANS)
  gate.open()
  await answer
  t.match(await it.store.read(id), { state: 'in_progress', fence }, 'the claim may be a newer one')
  await it.reclaimer.begin(EVERYTHING)
  t.match(await it.store.read(id), { state: 'unknown', fence: fence + 1 })
})

void t.test('W01 a lost outcome with a large answer is written again without its body', async (t) => {
  const it = reclaiming(t)
  it.a.script.push(() => it.a.responded(201, Buffer.alloc(100_000, 'x')))
  await it.a.get()
  await it.store.restore(it.a.id, null)
  await it.reclaimer.begin(EVERYTHING)
  t.match(await it.a.get(), { status: 409, code: 'idempotency_response_unavailable' })
  t.equal(it.a.n, 1)
})

void t.test('W01 an outcome that found no record is remembered too', async (t) => {
  const it = reclaiming(t)
  const { gate, answer } = await under(it.a)
  await it.store.restore(it.a.id, null)
  gate.open()
  await answer
  t.same(it.a.said('completed'), ['recovered'])
  await it.store.restore(it.a.id, null)
  await it.reclaimer.begin(EVERYTHING)
  t.match(await it.a.get(), { replayed: true })
})

void t.test('W02 a rolled-back takeover is written again', async (t) => {
  const it = reclaiming(t)
  it.a.script.push({ proof: 'not_sent', reason: 'refused' })
  await it.a.get()
  const freed = await bytesOf(it)
  const { gate, answer } = await under(it.a)
  const taken = await it.store.read(it.a.id)
  await it.store.restore(it.a.id, freed)
  it.store.next.push({ op: 'swap', fault: 'down' })
  await it.reclaimer.begin(EVERYTHING)
  t.match(await it.store.read(it.a.id), { state: 'in_progress', fence: taken?.fence, attempts: 2 })
  gate.open()
  t.match(await answer, { status: 201 })
})

void t.test(
  'W04 a second owner is reported as a split with both fences, and the record becomes unknown',
  async (t) => {
    const it = reclaiming(t)
    const { gate, answer } = await under(it.a)
    const mine = await it.store.read(it.a.id)
    await it.store.restore(it.a.id, null)
    it.store.now += 5000
    const b = new Replica({ store: it.store })
    t.teardown(() => b.close())
    const other = await under(b)
    const theirs = await it.store.read(it.a.id)
    await it.reclaimer.begin(EVERYTHING)
    t.match(it.splits[0], {
      route: 'payments',
      fence: mine?.fence,
      foundFence: theirs?.fence,
      state: 'in_progress',
      found: 'in_progress',
    })
    t.equal(it.splits.length, 1, 'reported once')
    t.match(await it.store.read(it.a.id), { state: 'unknown', fence: theirs?.fence })
    gate.open()
    other.gate.open()
    await Promise.all([answer, other.answer])
    t.match(await it.store.read(it.a.id), { state: 'unknown' }, 'neither outcome decides')
    t.same(it.a.said('completed'), ['stale'])
    t.same(b.said('completed'), ['stale'])
  },
)

void t.test('W04 an outcome whose key was executed again is reported', async (t) => {
  const it = reclaiming(t)
  await it.a.get()
  const mine = await it.store.read(it.a.id)
  await it.store.restore(it.a.id, null)
  it.store.now += 5000
  const b = new Replica({ store: it.store })
  t.teardown(() => b.close())
  await b.get()
  const theirs = await bytesOf(it)
  await it.reclaimer.begin(EVERYTHING)
  t.match(it.splits[0], { fence: mine?.fence, state: 'completed', found: 'completed' })
  t.same(await bytesOf(it), theirs)
})

void t.test('W04 a split with a completed record is reported, and leaves it unchanged', async (t) => {
  const it = reclaiming(t)
  const { gate, answer } = await under(it.a)
  await it.store.restore(it.a.id, null)
  it.store.now += 5000
  const b = new Replica({ store: it.store })
  t.teardown(() => b.close())
  await b.get()
  const theirs = await bytesOf(it)
  await it.reclaimer.begin(EVERYTHING)
  t.match(it.splits[0], { found: 'completed' })
  t.same(await bytesOf(it), theirs)
  gate.open()
  await answer
})

void t.test('an attempt that ends meanwhile is not reported as a split', async (t) => {
  const it = reclaiming(t)
  const { gate, answer } = await under(it.a)
  await it.store.restore(it.a.id, null)
  const b = new Replica({ store: it.store })
  t.teardown(() => b.close())
  const other = await under(b)
  it.store.gate = async ({ op, by }) => {
    if (op !== 'put' || by !== it.a) return
    it.store.gate = null
    const execution = it.a.ports.running.get(it.a.id)
    if (execution !== undefined) execution.ended = { kind: 'not_executed', reason: 'x' }
  }
  const rewriting = it.reclaimer.begin(EVERYTHING)
  // Waits for an outcome that is not written yet.
  await until(() => it.store.gate === null)
  await wait(300)
  t.same(it.splits, [])
  t.match(await it.store.read(it.a.id), { state: 'in_progress' })
  const execution = it.a.ports.running.get(it.a.id)
  if (execution !== undefined) execution.ended = null
  gate.open()
  other.gate.open()
  await Promise.all([answer, other.answer, rewriting])
})

void t.test(
  'an attempt that ends while its claim is written for the last time keeps its outcome',
  async (t) => {
    const it = reclaiming(t)
    const { gate, answer } = await under(it.a)
    let puts = 0
    it.store.gate = async ({ op }) => {
      if (op !== 'put' || ++puts < 2) return
      it.store.gate = null
      gate.open()
      await answer
    }
    await it.reclaimer.begin(EVERYTHING)
    t.equal(puts, 2, 'once in each pass')
    t.same(it.written, [])
    t.match(await it.store.read(it.a.id), { state: 'completed' })
  },
)

void t.test('a claim that was lost counts, even if its attempt ends just then', async (t) => {
  const it = reclaiming(t)
  const { gate, answer } = await under(it.a)
  await it.store.restore(it.a.id, null)
  const { put } = it.store.inner
  it.store.inner.put = async (...args) => {
    it.store.inner.put = put
    const reply = await put(...args)
    gate.open()
    await answer
    return reply
  }
  await it.reclaimer.begin(EVERYTHING)
  t.same(it.written, [1])
  t.match(await it.store.read(it.a.id), { state: 'completed' })
})

void t.test('an attempt that ends before the store takes its claim gets its outcome written', async (t) => {
  const it = reclaiming(t)
  const { gate, answer } = await under(it.a)
  await it.store.restore(it.a.id, null)
  it.store.gate = async ({ op }) => {
    if (op !== 'put') return
    it.store.gate = null
    gate.open()
    await answer
    await it.store.restore(it.a.id, null)
    it.store.next.push({ op: 'put', fault: 'down' })
  }
  await it.reclaimer.begin(EVERYTHING)
  t.match(await it.store.read(it.a.id), { state: 'completed' })
  t.same(it.a.records.recent(), [], 'records without RecentWrites remember nothing')
})

void t.test('a store that fails is asked again until it has the deferred outcome', async (t) => {
  const it = reclaiming(t)
  const { gate, answer } = await under(it.a)
  it.store.fault = ({ op }) => (op === 'swap' ? 'down' : null)
  gate.open()
  await answer
  it.store.fault = () => null
  await it.store.restore(it.a.id, null)
  it.store.next.push(
    { op: 'swap', fault: 'down' },
    { op: 'put', fault: 'down' },
    { op: 'swap', fault: 'down' },
  )
  await it.reclaimer.begin(EVERYTHING)
  t.equal(it.a.ports.settler.size, 0)
  t.match(await it.store.read(it.a.id), { state: 'completed' })
})

void t.test(
  'a concurrent change does not keep the record from its owner, but endless changes do',
  async (t) => {
    const it = reclaiming(t)
    it.a.script.push({ proof: 'not_sent', reason: 'refused' })
    await it.a.get()
    const freed = await bytesOf(it)
    const { gate, answer } = await under(it.a)
    const { id } = it.a
    await it.store.restore(id, freed)
    let moved = 0
    it.store.gate = async ({ op }) => {
      if (op !== 'swap' || moved++ > 0) return
      const there = await it.store.read(id)
      const version = { version: there?.version ?? 0 }
      await it.store.inner.swap(id, version, freed as Buffer, SPANS, false)
    }
    await it.reclaimer.begin(EVERYTHING)
    t.match(await it.store.read(id), { state: 'in_progress' })
    await it.store.restore(id, freed)
    it.store.gate = async ({ op }) => {
      if (op !== 'swap') return
      const there = await it.store.read(id)
      await it.store.inner.swap(id, { version: there?.version ?? 0 }, freed as Buffer, SPANS, false)
    }
    await it.reclaimer.begin(EVERYTHING)
    it.store.gate = null
    t.match(await it.store.read(id), { state: 'failed_retryable' }, 'gives up eventually')
    gate.open()
    await answer
  },
)

void t.test('decisions are applied again, once, unless their retention is over', async (t) => {
  const it = reclaiming(t)
  const put = async (state: 'unknown' | 'completed') => {
    const id = newId()
    const bytes = encoded(state, newToken(), { fence: 7, createdAt: 7 })
    const reply = await it.store.inner.put(id, bytes, SPANS)
    if (!reply.done) throw new Error('it was there')
    return { id, version: reply.stamp.version }
  }
  const [resolved, removed, lost] = [await put('unknown'), await put('completed'), await put('unknown')]
  const decision = { draft: draft('completed', newToken(), { fence: 7, createdAt: 7 }), spans: SPANS }
  it.reclaimer.decided({ id: resolved.id, version: resolved.version, written: decision })
  it.reclaimer.decided({ id: removed.id, version: removed.version, written: null })
  it.reclaimer.decided({ id: lost.id, version: lost.version, written: decision })
  const ended = { ...decision, spans: { dueIn: 0, dropIn: 0 } }
  const over = newId()
  it.reclaimer.decided({ id: over, version: 1, written: ended })
  await it.store.restore(lost.id, null)
  // Versions start from the store's clock.
  it.store.now++
  const faults = ['get', 'remove', 'swap'] as const
  it.store.next.push(...faults.map((op) => ({ op, fault: 'down' as const })))
  await it.reclaimer.begin(EVERYTHING)
  t.match(await it.store.read(resolved.id), { state: 'completed' })
  t.equal(await it.store.read(removed.id), null)
  t.match(await it.store.read(lost.id), { state: 'completed' })
  t.equal(await it.store.read(over), null, 'its retention is over')
  t.same(it.written, [3])
  await it.reclaimer.begin(EVERYTHING)
  t.same(it.written, [3], 'once')
  t.same(it.bugs, [])
})

void t.test('W01 a decision is kept as long as it would have been, and no longer', async (t) => {
  const it = reclaiming(t)
  const { now } = performance
  let clock = 1000
  performance.now = () => clock
  t.teardown(() => {
    performance.now = now
  })
  const id = newId()
  it.reclaimer.decided({ id, version: 1, written: { draft: draft('completed', newToken()), spans: SPANS } })
  clock += SPANS.dueIn / 2 - 0.5
  await it.reclaimer.begin(EVERYTHING)
  const record = (await it.store.read(id)) as Completed
  t.equal(record.expiresAt, it.store.now + SPANS.dueIn / 2)
  t.equal(record.dropAt, it.store.now + SPANS.dropIn - SPANS.dueIn / 2)
})

void t.test('a decision that the store can no longer lose is not applied again', async (t) => {
  let isSafe = false
  const it = reclaiming(t, { isSafe: () => isSafe })
  const id = newId()
  const written = { draft: draft('completed', newToken()), spans: SPANS }
  it.reclaimer.decided({ id, version: 1, written })
  isSafe = true
  await it.reclaimer.begin(EVERYTHING)
  t.equal(await it.store.read(id), null, 'somebody may have deleted it since')
})

void t.test(
  'W01 what the lost server acknowledged during the first pass is written by the second',
  async (t) => {
    for (const isClosed of [false, true]) {
      const it = reclaiming(t, { repliesWithin: 100 })
      await it.a.get({ key: 'first-0123456789abcdef' })
      const [first] = it.store.ids
      await it.store.restore(first as RecordId, null)
      const ended = it.reclaimer.begin(EVERYTHING)
      await until(async () => (await bytesOf(it, first)) !== null)
      await it.a.get()
      const [, second] = it.store.ids
      await it.store.restore(second as RecordId, null)
      if (isClosed) it.reclaimer.close()
      await ended
      t.equal((await bytesOf(it, second)) === null, isClosed)
      t.same(it.written, [isClosed ? 1 : 2])
    }
  },
)

void t.test('R02 a request that runs without a claim is not claimed again', async (t) => {
  const it = reclaiming(t)
  const gate = new Gate()
  it.a.script.push(gate.before(() => it.a.responded()))
  it.store.fault = () => 'down'
  const answer = it.a.get({ route: route({ onStoreUnavailable: 'bypass' }) })
  await gate.reached
  it.store.fault = () => null
  await it.reclaimer.begin(EVERYTHING)
  t.equal(await bytesOf(it), null)
  t.same(it.written, [])
  gate.open()
  t.match(await answer, { status: 201 })
})

void t.test(
  'W01 a decision on an uncertain outcome stands if the store goes back to before both',
  async (t) => {
    const it = reclaiming(t)
    const gate = new Gate()
    it.a.script.push(
      gate.before(() => ({ proof: 'unknown', reason: 'reset', timedOut: false, status: null })),
    )
    const answer = it.a.get()
    await gate.reached
    const claimed = await bytesOf(it)
    gate.open()
    await answer
    const { version, fence, createdAt } = (await it.store.read(it.a.id)) as IdempotencyRecord
    const written = { draft: draft('completed', newToken(), { fence, createdAt }), spans: SPANS }
    it.reclaimer.decided({ id: it.a.id, version, written })
    await it.store.restore(it.a.id, claimed)
    await it.reclaimer.begin(EVERYTHING)
    t.match(await it.store.read(it.a.id), { state: 'completed' })
  },
)

void t.test('an outcome is not written again once its record was removed', async (t) => {
  const it = reclaiming(t)
  await it.a.get()
  const { id } = it.a
  const { version } = (await it.store.read(id)) as IdempotencyRecord
  it.reclaimer.decided({ id, version, written: null })
  await it.store.restore(id, null)
  await it.reclaimer.begin(EVERYTHING)
  t.equal(await bytesOf(it, id), null)
})

void t.test('W01 a store that refuses gets everything once it takes it again', async (t) => {
  const it = reclaiming(t)
  const { gate, answer } = await under(it.a)
  await it.a.get({ key: 'other-0123456789abcdef' })
  const lost = [...it.store.ids]
  for (const one of lost) await it.store.restore(one, null)
  const [refused] = lost
  const pauses = hurried(t)
  const { now } = performance
  const passed = () => pauses.reduce((sum, pause) => sum + pause, 0)
  performance.now = () => now.call(performance) + passed()
  t.teardown(() => {
    performance.now = now
  })
  it.store.fault = ({ op, id }) => (op === 'put' && id === refused && passed() < 40_000 ? 'down' : null)
  await it.reclaimer.begin(EVERYTHING)
  const states = await Promise.all(lost.map(async (one) => (await it.store.read(one))?.state))
  t.same(states, ['in_progress', 'completed'])
  t.same(it.written, [2])
  const [first = 0, ...more] = pauses.slice(0, -1)
  t.equal(first, 100, 'at once while a grace may last')
  t.equal(more.at(-1), 2000, 'rarely, if the store is full')
  t.ok(more.every((pause, n) => pause >= (n === 0 ? first : (more[n - 1] ?? 0))))
  let waited = first
  for (const pause of more) {
    t.ok(pause <= Math.max(100, waited / 10 + 100))
    waited += pause
  }
  gate.open()
  await answer
})

void t.test('a reclaimer that is closed no longer insists', async (t) => {
  const it = reclaiming(t)
  const { gate, answer } = await under(it.a)
  await it.store.restore(it.a.id, null)
  it.store.fault = ({ op }) => (op === 'put' ? 'down' : null)
  const rewriting = it.reclaimer.begin(EVERYTHING)
  it.reclaimer.close()
  await rewriting
  t.equal(await it.store.read(it.a.id), null)
  gate.open()
  await answer
})

void t.test('W01 an outcome that was written again may be lost again', async (t) => {
  const it = reclaiming(t)
  await it.a.get()
  const { id } = it.a
  await it.store.restore(id, null)
  const before = it.recent.all().length
  await it.reclaimer.begin(EVERYTHING)
  t.equal(it.recent.all().length, before + 1, 'it is remembered from now on')
})

void t.test('an outcome whose retention is over does not overwrite a later execution', async (t) => {
  const it = reclaiming(t)
  const brief = route({ ttl: 5000 })
  await it.a.get({ route: brief })
  it.store.now += 5001
  const b = new Replica({ store: it.store })
  t.teardown(() => b.close())
  const gate = new Gate()
  b.script.push(gate.before(() => b.responded()))
  const second = b.get({ route: brief })
  await gate.reached
  await it.reclaimer.begin(EVERYTHING)
  t.same(it.splits, [])
  t.match(await it.store.read(it.a.id), { state: 'in_progress' })
  gate.open()
  t.match(await second, { status: 201, replayed: false })
  t.match(await it.store.read(it.a.id), { state: 'completed' })
})

void t.test(
  'a record that an operator removed stays removed, whatever was written or decided before',
  async (t) => {
    const it = reclaiming(t)
    await it.a.get()
    const { id } = it.a
    const before = await it.store.read(id)
    const resolution = { draft: draft('completed', newToken()), spans: SPANS }
    it.reclaimer.decided({ id, version: 1, written: resolution })
    await it.store.restore(id, null)
    it.reclaimer.decided({ id, version: before?.version ?? 0, written: null })
    await it.reclaimer.begin(EVERYTHING)
    t.equal(await bytesOf(it, id), null)
    t.match(await it.a.get(), { status: 201, replayed: false })
    await it.store.restore(id, null)
    await it.reclaimer.begin(EVERYTHING)
    t.match(await it.a.get(), { replayed: true }, 'what was executed since is written again')
  },
)

void t.test('a decision is not applied to a state it was not made about, even at its version', async (t) => {
  const it = reclaiming(t)
  for (const state of ['completed', 'in_progress'] as const)
    for (const written of [{ draft: draft('failed_retryable', newToken()), spans: SPANS }, null]) {
      const id = newId()
      const reply = await it.store.inner.put(
        id,
        encoded(state, newToken(), { fence: 7, createdAt: 7 }),
        SPANS,
      )
      const version = reply.done ? reply.stamp.version : 0
      it.reclaimer.decided({ id, version, written })
      await it.reclaimer.begin(EVERYTHING)
      if (state === 'in_progress' || written !== null) t.match(await it.store.read(id), { state, version })
    }
  t.same(it.written, [1], 'only the removal of the completed record')
  let removed: RecordId | undefined
  for (const written of [{ draft: draft('failed_retryable', newToken()), spans: SPANS }, null]) {
    const id = newId()
    removed = id
    const reply = await it.store.inner.put(id, encoded('unknown', newToken(), { fence: 7 }), SPANS)
    it.reclaimer.decided({ id, version: reply.done ? reply.stamp.version : 0, written })
  }
  // Somebody else removes them just then.
  it.store.gate = async ({ op }) => {
    if (op !== 'swap' && op !== 'remove') return
    for (const id of it.store.ids) await it.store.restore(id, null)
  }
  await it.reclaimer.begin(EVERYTHING)
  t.equal(await bytesOf(it, removed), null)
  t.same(it.bugs, [])
})

void t.test('an outcome whose first write got no reply is remembered too', async (t) => {
  const it = reclaiming(t)
  it.store.next.push({ op: 'swap', fault: 'lost' })
  await it.a.get()
  t.ok(await it.a.ports.settler.flush())
  await it.store.restore(it.a.id, null)
  await it.reclaimer.begin(EVERYTHING)
  t.match(await it.a.get(), { replayed: true })
})

void t.test(
  'W01 an outcome whose write is still unanswered is written before the reclaimer ends',
  async (t) => {
    const it = reclaiming(t)
    const { gate, answer } = await under(it.a)
    const unanswered = new Gate()
    it.store.next.push({ op: 'swap', fault: 'down' })
    it.store.gate = async ({ op }) => {
      if (op === 'swap') await unanswered.pass()
    }
    gate.open()
    await unanswered.reached
    await it.store.restore(it.a.id, null)
    const ended = it.reclaimer.begin(EVERYTHING)
    // Both passes have begun: without this outcome they would end at once.
    await Promise.race([ended, wait(50)])
    it.store.gate = async () => {}
    unanswered.open()
    await ended
    t.match(await it.store.read(it.a.id), { state: 'completed' })
    await answer
  },
)

void t.test(
  'W01 an attempt that ends while its claim is written for the last time is waited for',
  async (t) => {
    const it = reclaiming(t)
    const { gate, answer } = await under(it.a)
    // Its first write fails, and so does the first one that the reclaimer asks for.
    it.store.next.push({ op: 'swap', fault: 'down' }, { op: 'swap', fault: 'down' })
    const unanswered = new Gate()
    let puts = 0
    it.store.gate = async ({ op }) => {
      if (op === 'swap') await unanswered.pass()
      if (op !== 'put' || ++puts !== 2) return
      gate.open()
      await unanswered.reached
    }
    let isOver = false
    const ended = it.reclaimer.begin(EVERYTHING).then(() => {
      isOver = true
    })
    await unanswered.reached
    await wait(50)
    t.equal(isOver, false)
    unanswered.open()
    await ended
    t.equal(it.a.ports.settler.size, 0)
    t.match(await it.store.read(it.a.id), { state: 'completed' })
    await answer
  },
)

void t.test('a record whose write hangs does not hold up the last one', async (t) => {
  const it = reclaiming(t)
  const keys = Array.from({ length: 300 }, (_, n) => `key-0123456789abcdef-${n}`)
  for (const key of keys) await it.a.get({ key })
  const [last, ...others] = [...it.store.ids]
  for (const id of it.store.ids) await it.store.restore(id, null)
  const hanging = new Gate()
  const first = others.at(-1)
  it.store.gate = async ({ op, id }) => {
    if (op === 'put' && id === first) await hanging.pass()
  }
  const ended = it.reclaimer.begin(EVERYTHING)
  await until(async () => (await bytesOf(it, last)) !== null)
  t.equal(await bytesOf(it, first), null)
  hanging.open()
  await ended
  t.ok(await bytesOf(it, first))
})

void t.test('a bug in one write is reported, and both records are still written', async (t) => {
  const it = reclaiming(t)
  for (const key of ['a-0123456789abcdef', 'b-0123456789abcdef']) await it.a.get({ key })
  const ids = [...it.store.ids]
  for (const id of ids) await it.store.restore(id, null)
  it.store.next.push({ op: 'put', fault: new TypeError('a bug') })
  await it.reclaimer.begin(EVERYTHING)
  for (const id of ids) t.match(await it.store.read(id), { state: 'completed' })
  t.match(it.bugs, [{ message: 'a bug' }])
})

void t.test('a closed reclaimer stops without writing', async (t) => {
  const it = reclaiming(t)
  const { gate, answer } = await under(it.a)
  it.store.fault = ({ op }) => (op === 'put' ? 'down' : null)
  it.reclaimer.close()
  await it.reclaimer.begin(EVERYTHING)
  t.same(it.written, [])
  it.store.fault = () => null
  gate.open()
  await answer
})
