import t, { type Test } from 'tap'
import type { Completed, IdempotencyRecord, RecordId } from '../../src/core/record.ts'
import { resolvedDraft } from '../../src/core/settle.ts'
import { Reclaimer } from '../../src/protect/reclaimer.ts'
import { Settler } from '../../src/protect/settler.ts'
import { RecentWrites } from '../../src/store/recent.ts'
import { Records } from '../../src/store/records.ts'
import { draft, bytesOf as encoded, newId, newToken, response, SPANS, until } from '../store/fixtures.ts'
import { BROKEN, Gate, hurried, idle, NOT_SENT, Replica, replica, route } from './harness.ts'

/** A replica that remembers its outcomes, and the reclaimer that writes them again. */
function reclaiming(t: Test, { isSafe = (): boolean => false, repliesWithin = 1 } = {}) {
  const a = new Replica()
  const { store } = a
  const recent = new RecentWrites(() => store.now)
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
  return {
    a,
    store,
    recent,
    reclaimer,
    splits,
    written,
    bugs,
    /** What a failover has left of the record: nothing, or those bytes. */
    fallsBack: (to: Buffer | null = null, id = a.id) => store.restore(id, to),
    rewrites: (concerns = () => true) => reclaimer.begin({ left: 1, concerns }),
    bytes: async (id = a.id) => (await store.inner.get(id)).bytes,
    record: async (id = a.id) => (await store.read(id)) as IdempotencyRecord,
    /** Stores a record of nobody. */
    async puts(state: 'unknown' | 'completed' | 'in_progress') {
      const id = newId()
      const reply = await store.inner.put(id, encoded(state, newToken(), { fence: 7, createdAt: 7 }), SPANS)
      return { id, version: reply.done ? reply.stamp.version : Number.NaN }
    },
  }
}

const decided = (over: Partial<Completed> = {}) => ({
  draft: draft('completed', newToken(), over),
  spans: SPANS,
})

void t.test('W01 a lost claim is written again, and its outcome is stored under it', async (t) => {
  const it = reclaiming(t)
  const run = await it.a.working()
  const { fence, createdAt, token } = await it.record()
  await it.fallsBack()
  await it.rewrites()
  t.match(await it.record(), { state: 'in_progress', fence, createdAt, token })
  t.same(it.written, [1])
  await run.end()
  t.equal((await it.record()).state, 'completed')
  t.same(it.a.said('completed'), ['stored'])
})

void t.test('nothing is written that was not lost, or that the failover does not concern', async (t) => {
  const it = reclaiming(t)
  const run = await it.a.working()
  await it.a.get({ key: 'other-0123456789abcdef' })
  await it.rewrites()
  t.same(it.written, [])
  const id = newId()
  it.reclaimer.decided({ id, version: 1, written: decided() })
  const ids = [...it.store.ids, id]
  for (const one of ids) await it.fallsBack(null, one)
  await it.rewrites(() => false)
  for (const one of ids) t.equal(await it.bytes(one), null)
  await run.end()
})

void t.test('W01 an outcome that was lost, or rolled back to its claim, is written again', async (t) => {
  const it = reclaiming(t)
  const run = await it.a.working()
  const claimed = await it.bytes()
  const { bytes } = await run.end()
  for (const older of [null, claimed]) {
    await it.fallsBack(older)
    const remembered = it.recent.all().length
    await it.rewrites()
    t.equal(it.recent.all().length, remembered + 1, 'it may be lost again')
    t.match(await it.a.get(), { status: 201, bytes, replayed: true })
  }
  t.same(it.written, [1, 1])
  t.equal(it.a.n, 1)
})

void t.test('W01 an outcome is remembered whatever its first write met', async (t) => {
  for (const met of ['no reply', 'a resolution', 'no record'] as const) {
    const it = reclaiming(t)
    const run = await it.a.working()
    if (met === 'no reply') it.store.next.push({ op: 'swap', fault: 'lost' })
    if (met === 'no record') await it.fallsBack()
    if (met === 'a resolution') {
      const there = await it.record()
      const resolved = resolvedDraft(there, { kind: 'completed', result: response() })
      await it.a.records.replace(it.a.id, there.version, resolved, SPANS)
    }
    await run.end()
    if (met === 'no record') t.same(it.a.said('completed'), ['recovered'])
    while (!(await it.a.ports.settler.flush()));
    await it.fallsBack()
    await it.rewrites()
    t.match(await it.a.get(), { status: 201, replayed: true }, met)
    t.equal(it.a.n, 1)
  }
})

void t.test('W02 an unknown outcome overwrites an earlier claim, but only in the grace', async (t) => {
  const it = reclaiming(t)
  it.a.script.push(NOT_SENT)
  await it.a.get()
  const { fence, createdAt } = await it.record()
  const run = await it.a.working({}, () => BROKEN)
  // The promoted server knows only that the first attempt is running.
  await it.fallsBack()
  await it.store.inner.put(it.a.id, encoded('in_progress', newToken(), { fence, createdAt }), SPANS)
  await run.end()
  t.match(await it.record(), { state: 'in_progress', fence }, 'the claim may be a newer one')
  await it.rewrites()
  t.match(await it.record(), { state: 'unknown', fence: fence + 1 })
})

void t.test('W01 a lost outcome with a large answer is written again without its body', async (t) => {
  const it = reclaiming(t)
  it.a.script.push(() => it.a.responded(201, Buffer.alloc(100_000, 'x')))
  await it.a.get()
  await it.fallsBack()
  await it.rewrites()
  t.match(await it.a.get(), { status: 409, code: 'idempotency_response_unavailable' })
  t.equal(it.a.n, 1)
})

void t.test('W02 a rolled-back takeover is written again', async (t) => {
  const it = reclaiming(t)
  it.a.script.push(NOT_SENT)
  await it.a.get()
  const freed = await it.bytes()
  const run = await it.a.working()
  const { fence } = await it.record()
  await it.fallsBack(freed)
  it.store.fails('swap', 'down')
  await it.rewrites()
  t.match(await it.record(), { state: 'in_progress', fence, attempts: 2 })
  t.match(await run.end(), { status: 201 })
})

void t.test('W04 a second execution of a key is reported with both fences and states', async (t) => {
  for (const [mine, theirs] of [
    ['in_progress', 'in_progress'],
    ['in_progress', 'completed'],
    ['completed', 'completed'],
  ] as const) {
    const it = reclaiming(t)
    const run = await it.a.working()
    if (mine === 'completed') await run.end()
    const { fence } = await it.record()
    await it.fallsBack()
    it.store.now += 5000
    const b = replica(t, { store: it.store })
    const other = await b.working()
    if (theirs === 'completed') await other.end()
    const { fence: foundFence } = await it.record()
    const before = await it.bytes()
    await it.rewrites()
    const split = { route: 'payments', fence, foundFence, state: mine, found: theirs }
    if (theirs === 'in_progress') t.equal(it.splits.length, 1, 'reported once')
    t.match(it.splits[0], split)
    if (theirs === 'completed') t.same(await it.bytes(), before, 'what was executed again stays')
    else t.match(await it.record(), { state: 'unknown', fence: foundFence }, 'of two owners nobody decides')
    await Promise.all([run.end(), other.end()])
    if (theirs === 'completed') continue
    t.equal((await it.record()).state, 'unknown')
    t.same([it.a.said('completed'), b.said('completed')], [['stale'], ['stale']])
  }
})

void t.test('an attempt that ends meanwhile is not reported as a split', async (t) => {
  const it = reclaiming(t)
  const run = await it.a.working()
  await it.fallsBack()
  const other = await replica(t, { store: it.store }).working()
  const execution = it.a.ports.running.get(it.a.id)
  if (execution === undefined) throw new Error('nothing runs')
  it.store.gate = async ({ op, by }) => {
    if (op !== 'put' || by !== it.a) return
    it.store.gate = null
    execution.ended = { kind: 'not_executed', reason: 'x' }
  }
  const rewriting = it.rewrites()
  // Waits for an outcome that is not written yet.
  await until(() => it.store.gate === null)
  await idle()
  t.same(it.splits, [])
  t.equal((await it.record()).state, 'in_progress')
  execution.ended = null
  await Promise.all([run.end(), other.end(), rewriting])
})

void t.test('an attempt that ends while its claim is written keeps its outcome', async (t) => {
  await t.test('in the last pass', async (t) => {
    const it = reclaiming(t)
    const run = await it.a.working()
    let puts = 0
    it.store.gate = async ({ op }) => {
      if (op !== 'put' || ++puts < 2) return
      it.store.gate = null
      await run.end()
    }
    await it.rewrites()
    t.equal(puts, 2, 'once in each pass')
    t.same(it.written, [])
    t.equal((await it.record()).state, 'completed')
  })
  await t.test('as soon as its lost claim is back, which counts as written', async (t) => {
    const it = reclaiming(t)
    const run = await it.a.working()
    await it.fallsBack()
    const { put } = it.store.inner
    it.store.inner.put = async (...args) => {
      it.store.inner.put = put
      const reply = await put(...args)
      await run.end()
      return reply
    }
    await it.rewrites()
    t.same(it.written, [1])
    t.equal((await it.record()).state, 'completed')
  })
  await t.test('before the store takes the claim', async (t) => {
    const it = reclaiming(t)
    const run = await it.a.working()
    await it.fallsBack()
    it.store.gate = async ({ op }) => {
      if (op !== 'put') return
      it.store.gate = null
      await run.end()
      await it.fallsBack()
      it.store.fails('put', 'down')
    }
    await it.rewrites()
    t.equal((await it.record()).state, 'completed')
    t.same(it.a.records.recent(), [], 'records without RecentWrites remember nothing')
  })
})

void t.test('a store that fails is asked again until it has the deferred outcome', async (t) => {
  const it = reclaiming(t)
  const run = await it.a.working()
  it.store.fault = ({ op }) => (op === 'swap' ? 'down' : null)
  await run.end()
  it.store.fault = () => null
  await it.fallsBack()
  for (const op of ['swap', 'put', 'swap'] as const) it.store.next.push({ op, fault: 'down' })
  await it.rewrites()
  t.equal(it.a.ports.settler.size, 0)
  t.equal((await it.record()).state, 'completed')
})

void t.test('one concurrent change does not keep a record from its owner, endless ones do', async (t) => {
  const it = reclaiming(t)
  it.a.script.push(NOT_SENT)
  await it.a.get()
  const freed = (await it.bytes()) as Buffer
  const run = await it.a.working()
  for (const [changes, state] of [
    [1, 'in_progress'],
    [Number.POSITIVE_INFINITY, 'failed_retryable'],
  ] as const) {
    await it.fallsBack(freed)
    let left: number = changes
    it.store.gate = async ({ op }) => {
      if (op !== 'swap' || left-- <= 0) return
      const { version } = await it.record()
      await it.store.inner.swap(it.a.id, { version }, freed, SPANS, false)
    }
    await it.rewrites()
    t.equal((await it.record()).state, state)
  }
  it.store.gate = null
  await run.end()
})

void t.test('decisions are applied again, once, unless their retention is over', async (t) => {
  const it = reclaiming(t)
  const [resolved, removed] = [await it.puts('unknown'), await it.puts('completed')]
  const [lost, over] = [newId(), newId()]
  const decision = decided({ fence: 7, createdAt: 7 })
  it.reclaimer.decided({ ...resolved, written: decision })
  it.reclaimer.decided({ ...removed, written: null })
  it.reclaimer.decided({ id: lost, version: 1, written: decision })
  it.reclaimer.decided({ id: over, version: 1, written: { ...decision, spans: { dueIn: 0, dropIn: 0 } } })
  for (const op of ['get', 'remove', 'swap'] as const) it.store.next.push({ op, fault: 'down' })
  await it.rewrites()
  t.equal((await it.record(resolved.id)).state, 'completed')
  t.equal(await it.bytes(removed.id), null)
  t.equal((await it.record(lost)).state, 'completed')
  t.equal(await it.bytes(over), null)
  t.same(it.written, [3])
  await it.rewrites()
  t.same(it.written, [3], 'once')
  t.same(it.bugs, [])
})

void t.test('W01 a decision is kept as long as it would have been, and no longer', async (t) => {
  const it = reclaiming(t)
  let clock = 1000
  t.intercept(performance, 'now', { value: () => clock })
  const id = newId()
  it.reclaimer.decided({ id, version: 1, written: decided() })
  clock += SPANS.dueIn / 2 - 0.5
  await it.rewrites()
  t.match(await it.record(id), {
    expiresAt: it.store.now + SPANS.dueIn / 2,
    dropAt: it.store.now + SPANS.dropIn - SPANS.dueIn / 2,
  })
})

void t.test('a decision that the store can no longer lose is not applied again', async (t) => {
  let isSafe = false
  const it = reclaiming(t, { isSafe: () => isSafe })
  const id = newId()
  it.reclaimer.decided({ id, version: 1, written: decided() })
  isSafe = true
  await it.rewrites()
  t.equal(await it.bytes(id), null, 'somebody may have deleted it since')
})

void t.test('W01 what the lost server acknowledged in the first pass is written by the second', async (t) => {
  for (const isClosed of [false, true]) {
    const it = reclaiming(t, { repliesWithin: 100 })
    // Only the test ends the pause between the passes.
    const between = Promise.withResolvers<() => void>()
    t.intercept(globalThis, 'setTimeout', { value: (call: () => void) => between.resolve(call) })
    await it.a.get({ key: 'first-0123456789abcdef' })
    await it.fallsBack()
    const ended = it.rewrites()
    const goOn = await between.promise
    await it.a.get()
    const second = [...it.store.ids][1] as RecordId
    await it.fallsBack(null, second)
    if (isClosed) it.reclaimer.close()
    goOn()
    await ended
    t.equal((await it.bytes(second)) === null, isClosed)
    t.same(it.written, [isClosed ? 1 : 2])
  }
})

void t.test('R02 a request that runs without a claim is not claimed again', async (t) => {
  const it = reclaiming(t)
  it.store.fault = () => 'down'
  const run = await it.a.working({ route: route({ onStoreUnavailable: 'bypass' }) })
  it.store.fault = () => null
  await it.rewrites()
  t.equal(await it.bytes(), null)
  t.same(it.written, [])
  t.match(await run.end(), { status: 201 })
})

void t.test('W01 a decision on an unknown outcome stands if the store goes back before both', async (t) => {
  const it = reclaiming(t)
  const run = await it.a.working({}, () => BROKEN)
  const claimed = await it.bytes()
  await run.end()
  const { version, fence, createdAt } = await it.record()
  it.reclaimer.decided({ id: it.a.id, version, written: decided({ fence, createdAt }) })
  await it.fallsBack(claimed)
  await it.rewrites()
  t.equal((await it.record()).state, 'completed')
})

void t.test('W01 a store that refuses gets everything once it takes it again', async (t) => {
  const it = reclaiming(t)
  const run = await it.a.working()
  await it.a.get({ key: 'other-0123456789abcdef' })
  const lost = [...it.store.ids]
  for (const one of lost) await it.fallsBack(null, one)
  const pauses = hurried(t)
  const { now } = performance
  const passed = () => pauses.reduce((sum, pause) => sum + pause, 0)
  t.intercept(performance, 'now', { value: () => now.call(performance) + passed() })
  it.store.fault = ({ op, id }) => (op === 'put' && id === lost[0] && passed() < 40_000 ? 'down' : null)
  await it.rewrites()
  t.same(await Promise.all(lost.map(async (one) => (await it.record(one)).state)), [
    'in_progress',
    'completed',
  ])
  t.same(it.written, [2])
  const [first = 0, ...more] = pauses.slice(0, -1)
  t.equal(first, 100, 'at once while a grace may last')
  t.equal(more.at(-1), 2000, 'rarely, if the store is full')
  t.ok(more.every((pause, n) => pause >= (n === 0 ? first : (more[n - 1] ?? 0))))
  await run.end()
})

void t.test('a reclaimer that is closed, before it begins or since, no longer insists', async (t) => {
  for (const when of ['before', 'since'] as const) {
    const it = reclaiming(t)
    const run = await it.a.working()
    await it.fallsBack()
    it.store.fault = ({ op }) => (op === 'put' ? 'down' : null)
    if (when === 'before') it.reclaimer.close()
    const rewriting = it.rewrites()
    it.reclaimer.close()
    await rewriting
    t.equal(await it.bytes(), null)
    t.same(it.written, [])
    it.store.fault = () => null
    await run.end()
  }
})

void t.test('an outcome whose retention is over does not overwrite a later execution', async (t) => {
  const it = reclaiming(t)
  const brief = { route: route({ ttl: 5000 }) }
  await it.a.get(brief)
  it.store.now += 5001
  const second = await replica(t, { store: it.store }).working(brief)
  await it.rewrites()
  t.same(it.splits, [])
  t.equal((await it.record()).state, 'in_progress')
  t.match(await second.end(), { status: 201, replayed: false })
  t.equal((await it.record()).state, 'completed')
})

void t.test('a record that an operator removed stays removed, whatever came before', async (t) => {
  const it = reclaiming(t)
  await it.a.get()
  const { version } = await it.record()
  it.reclaimer.decided({ id: it.a.id, version: 1, written: decided() })
  await it.fallsBack()
  it.reclaimer.decided({ id: it.a.id, version, written: null })
  await it.rewrites()
  t.equal(await it.bytes(), null)
  t.match(await it.a.get(), { status: 201, replayed: false })
  await it.fallsBack()
  await it.rewrites()
  t.match(await it.a.get(), { replayed: true }, 'what was executed since is written again')
})

void t.test('a decision is not applied to another state, even at its version', async (t) => {
  const it = reclaiming(t)
  const decisions = [{ draft: draft('failed_retryable', newToken()), spans: SPANS }, null]
  for (const state of ['completed', 'in_progress'] as const)
    for (const written of decisions) {
      const { id, version } = await it.puts(state)
      it.reclaimer.decided({ id, version, written })
      await it.rewrites()
      if (state === 'in_progress' || written !== null) t.match(await it.record(id), { state, version })
    }
  t.same(it.written, [1], 'only the removal of the completed record')
  const there = await Promise.all(
    decisions.map(async (written) => ({ ...(await it.puts('unknown')), written })),
  )
  for (const one of there) it.reclaimer.decided(one)
  // Somebody else removes them just then.
  it.store.gate = async ({ op }) => {
    if (op === 'swap' || op === 'remove') for (const id of it.store.ids) await it.fallsBack(null, id)
  }
  await it.rewrites()
  t.equal(await it.bytes(there[1]?.id), null)
  t.same(it.bugs, [])
})

void t.test('W01 an outcome whose write is unanswered is written before the reclaimer ends', async (t) => {
  for (const begins of ['before the passes', 'in the last pass'] as const) {
    const it = reclaiming(t)
    const run = await it.a.working()
    // Its first write fails, and so does the first one that the reclaimer asks for.
    it.store.fails('swap', 'down', 'down')
    const unanswered = new Gate()
    let puts = 0
    it.store.gate = async ({ op }) => {
      if (op === 'swap') await unanswered.pass()
      if (op !== 'put' || ++puts !== 2) return
      run.open()
      await unanswered.reached
    }
    if (begins === 'before the passes') {
      run.open()
      await unanswered.reached
    }
    const { settler } = it.a.ports
    const flush = settler.flush.bind(settler)
    let passes = 0
    settler.flush = (...of) => {
      if (of.length === 0) passes++
      return flush(...of)
    }
    let isOver = false
    const ended = it.rewrites().then(() => (isOver = true))
    await Promise.all([unanswered.reached, until(() => passes === 2)])
    await idle()
    t.equal(isOver, false, begins)
    unanswered.open()
    await ended
    t.equal(it.a.ports.settler.size, 0)
    t.equal((await it.record()).state, 'completed')
    await run.answer
  }
})

void t.test('a record whose write hangs does not hold up the last one', async (t) => {
  const it = reclaiming(t)
  for (let n = 0; n < 300; n++) await it.a.get({ key: `key-0123456789abcdef-${n}` })
  const [last, ...others] = [...it.store.ids]
  for (const id of it.store.ids) await it.fallsBack(null, id)
  const hanging = new Gate()
  const first = others.at(-1)
  it.store.gate = async ({ op, id }) => (op === 'put' && id === first ? hanging.pass() : undefined)
  const ended = it.rewrites()
  await until(async () => (await it.bytes(last)) !== null)
  t.equal(await it.bytes(first), null)
  hanging.open()
  await ended
  t.ok(await it.bytes(first))
})

void t.test('a bug in one write is reported, and both records are still written', async (t) => {
  const it = reclaiming(t)
  for (const key of ['a-0123456789abcdef', 'b-0123456789abcdef']) await it.a.get({ key })
  const ids = [...it.store.ids]
  for (const id of ids) await it.fallsBack(null, id)
  it.store.fails('put', new TypeError('a bug'))
  await it.rewrites()
  for (const id of ids) t.equal((await it.record(id)).state, 'completed')
  t.match(it.bugs, [{ message: 'a bug' }])
})
