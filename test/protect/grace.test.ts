import { setImmediate as turn } from 'node:timers/promises'
import t from 'tap'
import { InGrace } from '../../src/store/register.ts'
import {
  Gate,
  LEASE,
  NOT_SENT,
  type Replica,
  replica,
  route,
  Store,
  type StoreCall,
  seen,
} from './harness.ts'

/** A store in its grace: it grants no claims until told to. */
class Held extends Store {
  isHeld = true
  left = 20
  readonly #since = this.now
  override fault = ({ op }: StoreCall) =>
    this.isHeld && (op === 'put' || op === 'swap') ? new InGrace(this.now, this.#since, this.left) : null
}

/** What each put that reaches the store says of its key: `fresh` is granted at once. */
function entriesOf({ inner }: Store): unknown[] {
  const { put } = inner
  const entries: unknown[] = []
  inner.put = (id, bytes, spans, entry) => {
    entries.push(entry)
    return put(id, bytes, spans, entry)
  }
  return entries
}

/** A key that was generated before `now`, but after a failover of 30 s ago. */
function bornAfterFailover({ now }: Store): string {
  const hex = (now - 1).toString(16).padStart(12, '0')
  return `${hex.slice(0, 8)}-${hex.slice(8)}-7abc-8def-0123456789ab`
}

async function until(holds: () => boolean): Promise<void> {
  while (!holds()) await turn()
}

void t.test('W01 W03 a request with a new key waits out the grace and then executes', async (t) => {
  const store = new Held()
  const entries = entriesOf(store)
  const a = replica(t, { store })
  const answer = a.get()
  await until(() => a.ports.waiters.size === 1)
  t.equal(a.n, 0)
  // Each time it asks, the grace may have been extended.
  await until(() => store.calls >= 3)
  store.isHeld = false
  t.match(await answer, { status: 201, replayed: false })
  t.equal(a.n, 1)
  t.equal(a.ports.waiters.size, 0)
  t.same(a.said('completed'), ['stored'])
  t.same(entries, ['claim'])
})

void t.test('W03 in the grace, requests beyond limits.waiters or on a draining proxy get 503', async (t) => {
  const store = new Held()
  store.left = 60_000
  const a = replica(t, { store, maxWaiters: 1 })
  const first = a.get({ key: 'first-0123456789abcdef' })
  await until(() => a.ports.waiters.size === 1)
  t.match(await a.get(), {
    status: 503,
    code: 'idempotency_store_unavailable',
    detail: /^the store may just have lost claims/,
  })
  t.equal(a.trace.outcome, 'store_unavailable')
  t.match(a.trace.cause, /may have lost claims/)
  a.ports.waiters.drain()
  t.match(await first, { status: 503 }, 'a draining proxy does not wait')
  t.match(await a.get({ key: 'third-0123456789abcdef' }), { status: 503 })
  t.equal(a.n, 0)
})

void t.test('W03 a client that leaves in the grace frees its place and executes nothing', async (t) => {
  const store = new Held()
  store.left = 60_000
  const a = replica(t, { store })
  let gone = false
  const { promise: leaving, resolve: leave } = Promise.withResolvers<void>()
  const answer = a.get({ gone: () => gone, leaving })
  await until(() => a.ports.waiters.size === 1)
  gone = true
  leave()
  t.equal((await answer).status, null)
  t.equal(a.ports.waiters.size, 0)
  const { calls } = store
  t.equal((await a.get({ gone: () => true })).status, null, 'a client that has already left takes no place')
  t.equal(store.calls, calls + 1, 'and does not ask again')
  t.equal(a.n, 0)
})

void t.test('W01 a bypass route waits in the grace instead of executing', async (t) => {
  const store = new Held()
  store.left = 60_000
  const a = replica(t, { store, maxWaiters: 1 })
  const policy = route({ onStoreUnavailable: 'bypass' })
  const first = a.get({ route: policy })
  await until(() => a.ports.waiters.size === 1)
  t.match(await a.get({ route: policy, key: 'other-0123456789abcdef' }), { status: 503 })
  t.equal(a.n, 0)
  a.ports.waiters.drain()
  t.match(await first, { status: 503 })
})

void t.test('W03 a key generated after the failover claims at once', async (t) => {
  const store = new Held()
  store.now += 60_000
  const entries = entriesOf(store)
  let asked = 0
  store.fault = ({ op }) =>
    op === 'put' && ++asked === 1 ? new InGrace(store.now, store.now - 30_000, 60_000) : null
  const a = replica(t, { store })
  t.match(await a.get({ key: bornAfterFailover(store) }), { status: 201 })
  t.same(entries, ['fresh'])
  t.equal(a.n, 1)
})

void t.test('W03 what was first sent after the failover claims at once, but no derived key', async (t) => {
  const store = new Held()
  store.left = 60_000
  const a = replica(t, { store, maxWaiters: 1 })
  const sent = (at: number) => ['Repeatability-First-Sent', new Date(at).toUTCString()]
  store.now += 60_000
  store.fault = ({ op, n }) =>
    op === 'put' && n % 4 === 2 ? new InGrace(store.now, store.now - 30_000, 60_000) : null
  t.match(await a.get({ headers: sent(store.now - 2000) }), { status: 201 })
  store.fault = ({ op }) => (op === 'put' ? new InGrace(store.now, store.now - 30_000, 60_000) : null)
  const { key } = route()
  const derive = { json: ['/amount'], form: [], headers: [], bucket: null }
  const policy = route({ key: { ...key, derive } })
  const derived = a.get({ key: null, route: policy, headers: sent(store.now - 2000) })
  await until(() => a.ports.waiters.size === 1)
  a.ports.waiters.drain()
  await derived
  t.equal(a.n, 1)
})

void t.test('W02 a takeover waits too, since the state that allows it may be out of date', async (t) => {
  for (const isBornSince of [false, true]) {
    const store = new Held()
    store.isHeld = false
    const key = isBornSince ? bornAfterFailover(store) : 'key-0123456789abcdef'
    const a = replica(t, { store })
    a.script.push(NOT_SENT)
    await a.get({ key })
    let held = true
    store.fault = ({ op }) => (op === 'swap' && held ? new InGrace(store.now, store.now - 30_000, 20) : null)
    let isOver = false
    const answer = a.get({ key }).finally(() => (isOver = true))
    await until(() => a.ports.waiters.size === 1 || isOver)
    t.equal(a.n, 1)
    held = false
    t.match(await answer, { status: 201 })
    t.equal(a.n, 2)
  }
})

void t.test('W01 a claim that the failover dropped is tried again under its token', async (t) => {
  const store = new Held()
  const a = replica(t, { store })
  const tokens = new Set<string>()
  a.onToken = (token) => void tokens.add(token.toString('hex'))
  store.fails('put', 'dropped')
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded()))
  const answer = a.get()
  await until(() => a.ports.waiters.size === 1)
  const waitsAt = performance.now()
  store.isHeld = false
  await gate.reached
  t.ok(
    (a.ports.running.get(a.id)?.askedAt ?? waitsAt) < waitsAt,
    'its lease may have begun with the first try',
  )
  gate.open()
  t.match(await answer, { status: 201 })
  t.equal(tokens.size, 1)
  t.same([...new Set(store.wrote)], [...tokens])
})

void t.test('W01 the lease begins with the claim that succeeds, not before the grace', async (t) => {
  const store = new Held()
  const a = replica(t, { store })
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded()))
  const startedAt = performance.now()
  const answer = a.send({ route: route({ lease: LEASE }) })
  await until(() => a.ports.waiters.size === 1)
  await until(() => store.calls >= 3)
  const askedBefore = performance.now()
  store.isHeld = false
  await gate.reached
  const { askedAt } = a.ports.running.get(a.id) as { readonly askedAt: number }
  t.ok(askedAt > startedAt + 20 && askedAt >= askedBefore - 20 * 2)
  gate.open()
  seen(await answer)
})

void t.test('W01 a request that the grace never lets through is refused in the end', async (t) => {
  const store = new Held()
  store.left = 1
  const a: Replica = replica(t, { store })
  t.match(await a.get(), { status: 503 })
  t.equal(a.ports.waiters.size, 0)
})
