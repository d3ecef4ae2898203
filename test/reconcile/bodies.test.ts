import t, { type Test } from 'tap'
import type { Completed, RecordId } from '../../src/core/record.ts'
import { NOBODY } from '../../src/core/settle.ts'
import { BodyRemover } from '../../src/reconcile/bodies.ts'
import { decodeRecord, encodeDraft, readStamps } from '../../src/store/record/codec.ts'
import { Records } from '../../src/store/records.ts'
import { CorruptRecord, type Store as StorePort } from '../../src/store/register.ts'
import { Gate, HOUR, MINUTE, refused, replica, route, Store, seen, TTL } from '../protect/harness.ts'
import { draft, newId, newToken, response } from '../store/fixtures.ts'
import { stored } from './harness.ts'

const POLICY = route({ ttlBody: MINUTE, tombstone: HOUR })
const SECRET = 'the secret of the answer'

function remover(t: Test, store: Store, read: (wire: StorePort) => StorePort = (wire) => wire) {
  const told: unknown[] = []
  const wire = store.wire({})
  const bodies = new BodyRemover({
    records: new Records(read(wire)),
    store: wire,
    observer: {
      leaseExpired() {},
      reconciled() {},
      expiring() {},
      trouble: (message, detail) => void told.push([message, detail]),
    },
    random: () => 0.5,
  })
  t.teardown(() => bodies.stop())
  return { bodies, told }
}

/** A request that was executed and answered so long ago that ttl.body is over. */
async function answered(t: Test, store = new Store()) {
  const one = replica(t, { store })
  one.script.push(one.responded(201, SECRET))
  await one.get({ route: POLICY })
  const before = (await stored(store)) as Completed
  store.now += MINUTE
  return {
    one,
    store,
    before,
    again: (code: Parameters<typeof refused>[3]) => refused(t, one, { route: POLICY }, code),
  }
}

const holds = async (store: Store): Promise<boolean> =>
  Object.values(await store.dump()).some((bytes) => bytes.includes(SECRET))

void t.test('a response is removed once ttl.body is over, and the rest of the record stays', async (t) => {
  const { store, before, again } = await answered(t)
  const { bodies } = remover(t, store)
  store.now -= 1
  t.equal(await bodies.look(), false)
  t.ok(await holds(store), 'not before')
  store.now += 1
  await again('idempotency_response_unavailable')
  t.ok(await holds(store), 'a retry changes nothing')
  t.equal(await bodies.look(), true, 'there may be more')
  t.notOk(await holds(store))
  const { result, version, updatedAt, ...rest } = (await stored(store)) as Completed
  const { result: _r, version: was, updatedAt: _u, ...same } = before
  t.strictSame(rest, same, 'expiresAt, dropAt, token, fence, digests')
  t.same([version, updatedAt], [was + 1, store.now])
  t.strictSame(result, { kept: false, why: 'past_ttl', status: 201, location: null })
  t.equal(await bodies.look(), false)
  await again('idempotency_response_unavailable')
  store.now = before.updatedAt + TTL - 1
  await again('idempotency_response_unavailable')
  store.now += 1
  await again('idempotency_key_expired')
})

void t.test('a record that an operator decided or removed meanwhile stays as it is', async (t) => {
  const { store } = await answered(t)
  const id = [...store.ids][0] as RecordId
  for (const replaced of [false, true]) {
    const { bodies } = remover(t, store)
    const gate = new Gate()
    const [first] = [await store.inner.get(id)]
    store.gate = async ({ op }) => (op === 'swap' ? gate.pass() : undefined)
    const looking = bodies.look()
    await gate.reached
    store.gate = null
    const there = decodeRecord(first.bytes as Buffer)
    if (replaced) {
      const other = { ...there, token: NOBODY, result: response(Buffer.from('decided')) } as Completed
      const spans = { dueIn: HOUR, dropIn: HOUR }
      await store.inner.swap(id, { version: there.version }, encodeDraft(other), spans, false)
    } else await store.inner.remove(id, there.version)
    gate.open()
    t.equal(await looking, false)
    const { bytes } = await store.inner.get(id)
    if (!replaced) {
      t.equal(bytes, null, 'a removed record does not come back')
      await store.restore(id, first.bytes)
    } else t.match(decodeRecord(bytes as Buffer), { token: NOBODY, result: { kept: true } })
  }
})

void t.test('the remover skips a record removed before it reads it', async (t) => {
  const { store, before } = await answered(t)
  const id = [...store.ids][0] as RecordId
  const { bodies } = remover(t, store)
  store.gate = async ({ op }) => {
    if (op === 'get') await store.inner.remove(id, before.version)
  }
  t.equal(await bodies.look(), false)
  t.equal((await store.inner.get(id)).bytes, null)
})

void t.test('two replicas remove a response once', async (t) => {
  const { store, before } = await answered(t)
  const both = [remover(t, store), remover(t, store)].map(({ bodies }) => bodies)
  const looked = await Promise.all(both.map((one) => one.look()))
  t.equal(looked.filter(Boolean).length, 1)
  t.equal((await stored(store)).version, before.version + 1)
})

void t.test('a retry during the removal is refused and not executed', async (t) => {
  const { one, store } = await answered(t)
  store.now -= 1
  const { bodies } = remover(t, store)
  const gate = new Gate()
  store.gate = async ({ op }) => (op === 'put' ? gate.pass() : undefined)
  const retry = one.send({ route: POLICY })
  await gate.reached
  store.gate = null
  store.now += 1
  await bodies.look()
  gate.open()
  t.match(seen(await retry), { status: 409, code: 'idempotency_response_unavailable' })
  t.equal(one.n, 1)
})

void t.test('a clock set back does not bring back a removed response', async (t) => {
  const { one, store, again } = await answered(t)
  store.now -= MINUTE / 2
  t.match(await one.get({ route: POLICY }), { status: 201, replayed: true }, 'as with its ttl')
  const { bodies } = remover(t, store)
  t.equal(await bodies.look(), false)
  store.now += MINUTE / 2
  await bodies.look()
  store.now -= MINUTE
  await again('idempotency_response_unavailable')
  t.equal(one.n, 1)
})

void t.test('a removal that failed, or whose reply was lost, is complete after the next look', async (t) => {
  for (const fault of ['lost', 'dropped', 'down', 'full'] as const) {
    const { store, before } = await answered(t)
    const { bodies } = remover(t, store)
    store.next.push({ op: 'swap', fault })
    await t.rejects(bodies.look(), { name: /^Store/ }, fault)
    await bodies.look()
    t.notOk(await holds(store))
    t.equal((await stored(store)).version, before.version + 1)
  }
})

void t.test('unreadable records do not keep the remover from those behind them', async (t) => {
  const store = new Store()
  const { bodies, told } = remover(t, store)
  const ends = { ...response(Buffer.from(SECRET)), afterBody: HOUR }
  const spans = { dueIn: 0, dropIn: 2 * HOUR }
  const unreadable = new Set<RecordId>()
  for (let n = 0; n < 300; n++) {
    const id = newId()
    unreadable.add(id)
    await store.inner.put(id, encodeDraft(draft('completed', newToken(), { result: ends })), spans)
  }
  const last = newId()
  await store.inner.put(last, encodeDraft(draft('completed', newToken(), { result: ends })), {
    ...spans,
    dueIn: 1,
  })
  store.now += 1
  const { bodies: one, told: trouble } = remover(t, store, (wire) => ({
    ...wire,
    get: async (id) => {
      if (unreadable.has(id)) throw new CorruptRecord('sealed')
      return wire.get(id)
    },
  }))
  t.equal(await one.look(), false)
  t.equal(await one.look(), true, 'beyond those of the first look')
  const { bytes } = await store.inner.get(last)
  t.match(decodeRecord(bytes as Buffer), { result: { kept: false } })
  t.same(trouble, [], 'unreadable records are reported elsewhere')
  t.equal(await bodies.look(), true)
  t.equal(await bodies.look(), true)
  t.notOk(await holds(store))
  t.same(told, [])
})

void t.test('a response that a failover brought back is removed again', async (t) => {
  const { store, again } = await answered(t)
  const id = [...store.ids][0] as RecordId
  const before = Buffer.from((await store.inner.get(id)).bytes as Buffer)
  const { bodies } = remover(t, store)
  await bodies.look()
  await store.restore(id, before)
  t.ok(readStamps((await store.inner.get(id)).bytes as Buffer).due <= store.now)
  await again('idempotency_response_unavailable')
  await bodies.look()
  t.notOk(await holds(store))
})

void t.test('the remover looks on its own, soon again if there is more, also after a failure', async (t) => {
  const clock = t.capture(globalThis, 'setTimeout', ((run: () => void, pause: number) => {
    waiting.push({ run, pause })
    return { unref: () => ({}) }
  }) as never)
  const waiting: { run: () => void; pause: number }[] = []
  const store = new Store()
  const { bodies, told } = remover(t, store)
  const ends = { ...response(Buffer.from(SECRET)), afterBody: HOUR }
  await store.inner.put(newId(), encodeDraft(draft('completed', newToken(), { result: ends })), {
    dueIn: 0,
    dropIn: HOUR,
  })
  const next = async (): Promise<number | undefined> => {
    waiting.shift()?.run()
    for (let n = 0; n < 50; n++) await Promise.resolve()
    return waiting[0]?.pause
  }
  bodies.start()
  t.equal(waiting[0]?.pause, 10_000)
  t.equal(await next(), 50)
  t.equal(await next(), 10_000)
  store.fails('due', 'down')
  t.equal(await next(), 10_000)
  t.same(told, [])
  store.fails('due', new TypeError('a bug'))
  t.equal(await next(), 10_000)
  t.match(told, [['internal error while removing responses from records', { error: 'TypeError: a bug' }]])
  waiting.shift()?.run()
  await bodies.stop()
  t.same(waiting, [], 'no more looks')
  clock.restore()
})
