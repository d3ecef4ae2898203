import t from 'tap'
import { Gate, idle, LEASE, refused, replica, route, Store, Stream, seen, TTL, until } from './harness.ts'

/** A lease that is due at the renewer's first look: the test sets the store's clock, the renewer uses the machine's. */
const SHORT = route({ lease: 1 })

void t.test('L06 a renewed run is in progress up to three times its lease, and executes once', async (t) => {
  const a = replica(t)
  const policy = route({ lease: LEASE })
  const first = await a.working({ route: policy })
  // By the renewer's own clock nothing is due yet, so the test sends what it would send.
  const [[, run] = []] = [...a.ports.running]
  if (run === undefined) throw new Error('nothing runs')
  for (let i = 0; i < 9; i++) {
    a.store.now += LEASE / 3
    t.same(await a.wire.renew([{ id: run.id, token: run.attempt.token, dueIn: LEASE, dropIn: 0 }]), [true])
    await refused(t, a, { route: policy }, 'idempotency_key_in_progress')
  }
  t.equal((await first.end()).status, 201)
  t.equal((await a.get({ route: policy })).replayed, true)
  t.equal(a.n, 1)
})

void t.test('L06 a run holds its lease until its outcome is about to be written', async (t) => {
  const a = replica(t)
  const first = await a.working({ route: SHORT })
  t.equal(a.ports.leases.size, 1)
  // Only this moves the store's clock: the lease lapses, and the timer renews it, since the owner lives.
  a.store.now += 1
  await refused(t, a, { route: SHORT }, 'idempotency_outcome_unknown')
  await until(async () => (await a.store.read(a.id))?.state === 'in_progress')
  let leases = -1
  a.store.gate = async ({ op }) => {
    if (op === 'swap') leases = a.ports.leases.size
  }
  await first.end()
  t.equal(leases, 0)
})

void t.test('L06 after a failed renewal the record is unknown, and the owner’s outcome counts', async (t) => {
  const a = replica(t)
  const first = await a.working({ route: SHORT })
  a.store.fault = ({ op }) => (op === 'renew' ? 'down' : null)
  a.store.now += 1
  await until(() => a.renewalErrors.length > 0)
  await refused(t, a, { route: SHORT }, 'idempotency_outcome_unknown')
  const own = await first.end()
  t.match(await a.get(), { replayed: true, bytes: own.bytes })
  t.equal(a.n, 1)
})

const WITHIN = route({ respondWithin: 1 })

void t.test(
  'U13 respondWithin: 504 upstream_slow, the work goes on and a retry gets the result',
  async (t) => {
    const a = replica(t, { maxInFlight: 1 })
    const gate = new Gate()
    a.script.push(gate.before(() => a.responded()))
    const slow = await a.get({ route: WITHIN })
    t.match(slow, { code: 'upstream_slow', status: 504, instance: a.id })
    t.match(a.trace, { outcome: 'upstream_slow', before: 'absent', after: 'in_progress', status: 504 })
    t.ok((a.trace.fence ?? 0) > 0)
    t.equal(a.ports.inFlight.count, 1, 'work that goes on counts')
    t.equal((await a.get({ key: 'another' })).code, 'overloaded')
    t.equal(a.ports.leases.size, 1)
    t.ok(a.bytes.held > 0, 'the body that may still be sent')
    gate.open()
    await until(() => a.ports.inFlight.count === 0)
    t.equal(a.bytes.held, 0)
    t.match(await a.get({ route: WITHIN }), { status: 201, replayed: true })
    t.equal(a.n, 1)
    t.same(a.said('completed'), ['stored'])
  },
)

void t.test('U13 respondWithin: a retry is in progress until the upstream times out', async (t) => {
  const a = replica(t)
  const gate = new Gate()
  a.script.push(gate.before(() => ({ proof: 'unknown', reason: 'x', timedOut: true, status: null })))
  t.equal((await a.get({ route: WITHIN })).code, 'upstream_slow')
  await refused(t, a, {}, 'idempotency_key_in_progress')
  gate.open()
  await until(() => a.ports.inFlight.count === 0)
  await refused(t, a, {}, 'idempotency_outcome_unknown')
  t.equal(a.n, 1)
})

void t.test('U13 respondWithin: a stream that begins too late is drained to its end', async (t) => {
  const a = replica(t)
  const gate = new Gate()
  const stream = new Stream()
  a.script.push(gate.before(() => stream.reply()))
  t.equal((await a.get({ route: WITHIN })).code, 'upstream_slow')
  gate.open()
  await until(() => stream.drained === 1)
  t.equal(a.ports.inFlight.count, 1)
  stream.end('complete')
  await until(() => a.ports.inFlight.count === 0)
  await refused(t, a, {}, 'idempotency_response_unavailable')
})

void t.test('U13 respondWithin: an answer in time is passed on; a late bug is reported', async (t) => {
  const a = replica(t)
  const patient = route({ respondWithin: 60_000 })
  t.match(await a.get({ route: patient }), { status: 201, replayed: false })
  t.match(a.trace, { outcome: 'executed', after: 'completed' })
  a.script.push(new TypeError('a bug'))
  await t.rejects(a.send({ route: patient, key: 'bug' }), { message: 'a bug' })
  const gate = new Gate()
  a.script.push(
    gate.before(() => {
      throw new TypeError('a late bug')
    }),
  )
  t.equal((await a.get({ route: WITHIN, key: 'late bug' })).code, 'upstream_slow')
  gate.open()
  await until(() => a.ports.inFlight.count === 0)
  t.same(a.troubles(), ['internal error after the client was answered'])
  t.equal(a.bytes.held, 0)
})

void t.test('X01 a client that leaves while the upstream works changes nothing', async (t) => {
  const a = replica(t)
  const gate = new Gate()
  let gone = false
  a.script.push(gate.before(() => a.responded()))
  const first = a.send({ gone: () => gone })
  await gate.reached
  gone = true
  gate.open()
  // The writer finds the connection closed and releases the answer.
  const own = seen(await first)
  t.match(await a.get(), { bytes: own.bytes, replayed: true })
  t.equal(a.n, 1)
  t.equal(a.bytes.held, 0)
})

void t.test('P25 nothing is claimed before the body is complete', async (t) => {
  const a = replica(t)
  const upload = Promise.withResolvers<void>()
  const first = a.send({ upload: upload.promise })
  await idle()
  t.equal(a.store.calls, 0)
  t.equal(a.ports.inFlight.count, 1)
  upload.resolve()
  t.equal(seen(await first).status, 201)
})

void t.test('X03 the outcome is stored before the first byte of the answer leaves', async (t) => {
  const a = replica(t)
  const gate = new Gate()
  let answered = false
  a.store.gate = async ({ op }) => {
    if (op === 'swap') await gate.pass()
  }
  const first = a.send().then((answer) => {
    answered = true
    return answer
  })
  await gate.reached
  await idle()
  t.notOk(answered)
  gate.open()
  seen(await first)
  t.equal((await a.store.read(a.id))?.state, 'completed')
})

void t.test('the room of a kept body is given back once both client and store are done', async (t) => {
  for (const held of [false, true]) {
    const a = replica(t)
    a.script.push(() => {
      if (held) a.store.fault = () => 'down'
      return a.responded(201, 'x'.repeat(1000))
    })
    const answer = await a.send()
    if (answer.kind !== 'response') throw new Error('no response')
    t.equal(a.bytes.held, 1000)
    answer.release()
    answer.release()
    t.equal(a.bytes.held, held ? 1000 : 0)
    t.ok(await a.storeIsBack())
    t.equal(a.bytes.held, 0)
    answer.release()
    t.equal(a.bytes.held, 0)
  }
})

void t.test('an outcome that keeps no body holds no room while the store is down', async (t) => {
  const policies = [
    [429, route()],
    [500, route({ profile: 'strict' })],
    [201, route({ keep: 'outcome' })],
  ] as const
  for (const [status, policy] of policies) {
    const a = replica(t)
    a.downAtEnd(() => a.responded(status))
    t.equal((await a.get({ route: policy })).status, status)
    t.equal(a.ports.settler.size, 1)
    t.equal(a.bytes.held, 0)
  }
})

void t.test(
  'F20 a changed recipe still replays an unchanged request; a secret keys record ids',
  async (t) => {
    const store = new Store()
    const headers = ['Content-Type', 'application/json']
    const a = replica(t, { store })
    const b = replica(t, { store, secret: Buffer.from('secret') })
    await a.get({ headers })
    await b.get({ headers })
    t.equal(store.ids.size, 2)
    const recipe = route({ fingerprint: { ...route().fingerprint, body: 'raw' } })
    t.equal((await a.get({ headers, route: recipe })).replayed, true)
    await refused(t, a, { headers, route: recipe, body: '{ "amount":1}' }, 'idempotency_key_reused')
    t.equal((await a.get({ headers, body: '{ "amount":1}' })).replayed, true)
  },
)

void t.test('Idempotency-Expires follows the store’s clock', async (t) => {
  const store = new Store()
  store.now = 1_000_000
  const a = replica(t, { store })
  const first = await a.get({ route: route({ statusHeader: true }) })
  t.equal(first.proxyHeaders[3], new Date(1_000_000 + TTL).toISOString(), 'L12')
})

void t.test('an attempt that could not begin in time frees its key, and a retry executes', async (t) => {
  const a = replica(t)
  a.script.push(({ mayBegin }) => {
    t.equal(mayBegin?.(), true, 'just claimed')
    // As when a process wakes up after a long pause.
    const { now } = performance
    performance.now = () => now.call(performance) + LEASE
    try {
      return mayBegin?.() === false ? { proof: 'not_sent', reason: 'too late' } : a.responded()
    } finally {
      performance.now = now
    }
  })
  t.match(await a.get(), { status: 502, code: 'upstream_unreachable' })
  t.equal((await a.store.read(a.id))?.state, 'failed_retryable')
  t.equal((await a.get()).status, 201)
})

void t.test('a bypassed request has no lease, so it may begin at any time', async (t) => {
  const a = replica(t)
  a.store.fault = () => 'down'
  a.script.push(({ mayBegin }) => {
    t.equal(mayBegin, undefined)
    return a.responded()
  })
  t.equal((await a.get({ route: route({ onStoreUnavailable: 'bypass' }) })).status, 201)
})
