import t from 'tap'
import type { Action, OutcomeRule } from '../../src/core/policy.ts'
import type { RefusalCode } from '../../src/core/refusal.ts'
import type { RequestOutcome } from '../../src/protect/outcomes.ts'
import type { Forwarded, UpstreamRequest } from '../../src/upstream/port.ts'
import {
  BROKEN,
  Gate,
  HOUR,
  LEASE,
  MINUTE,
  NOT_SENT,
  pair,
  Replica,
  refused,
  replica,
  route,
  SECOND,
  Store,
  Stream,
  seen,
  TTL,
  until,
} from './harness.ts'

const outcomes = (exact: Record<number, Action>): OutcomeRule[] =>
  Object.entries(exact).map(([status, outcome]) => ({ status: Number(status), when: [], outcome }))

void t.test('the trace of a replay names the span that executed, if its record has one', async (t) => {
  const a = replica(t)
  const span = `00-${'a'.repeat(32)}-${'b'.repeat(16)}-01`
  a.script.push(a.responded(503, '', {}))
  await a.get({ route: route({ outcomes: outcomes({ 503: 'release' }) }), span: span.replaceAll('a', 'c') })
  await a.get({ span })
  t.equal(a.trace.replayOf, null)
  t.match(await a.store.read(a.id), { state: 'completed', span }, 'of the attempt that completed it')
  t.ok((await a.get({ span: span.replaceAll('b', 'd') })).replayed)
  t.equal(a.trace.replayOf, span)
  await a.get({ key: 'other-0123456789abcdef' })
  t.ok((await a.get({ key: 'other-0123456789abcdef', span })).replayed)
  t.equal(a.trace.replayOf, null)
})

void t.test('the first request executes, and its retry gets the same answer byte for byte', async (t) => {
  const a = replica(t)
  a.script.push(a.responded(201, Buffer.from([0, 255, 128]), {}))
  const first = await a.get()
  t.match(first, { status: 201, replayed: false })
  t.same(first.proxyHeaders, [])
  t.match(a.trace, { outcome: 'executed', before: 'absent', after: 'completed', status: 201 })
  const before = await a.store.dump()
  a.store.now += MINUTE
  const second = await a.get()
  t.equal(second.bytes, first.bytes)
  t.ok(second.replayed)
  t.same(second.proxyHeaders, ['Idempotent-Replayed', 'true'])
  t.match(a.trace, { outcome: 'replayed', before: 'completed', after: 'completed', status: 201 })
  t.same(await a.store.dump(), before, 'T03 a replay does not extend retention')
  t.equal(a.n, 1)
  t.same(a.said('claimed'), ['created', 'replay'])
  t.same(a.said('completed'), ['stored'])
  t.same(a.said('began'), [a.traces[0]?.fence], 'only the first')
  t.same(
    a.events.filter(([name]) => name === 'retryAge'),
    [['retryAge', 'payments', MINUTE]],
  )
  t.equal(a.said('prevented').length, 1)
  t.equal(a.bytes.held, 0)
  const { target, method, headers, responseLimit } = a.asked[0] as (typeof a.asked)[0]
  t.same([target, method, responseLimit], ['/v1/payments', 'POST', 5 * 1024 * 1024])
  t.match(headers, [
    'Idempotency-Key',
    'key-0123456789abcdef',
    'X-Fence',
    String(a.traces[0]?.fence),
    'Idempotency-Record',
    a.id,
  ])
  t.equal(a.traces[0]?.fence, a.store.now - MINUTE, 'begins at the store’s time')
})

void t.test('§13 the log says how long the store and the upstream took', async (t) => {
  const a = replica(t)
  // The clock moves only while the store or the upstream works.
  let clock = 1000
  t.intercept(performance, 'now', { value: () => clock })
  const slow = async (): Promise<Forwarded> => {
    clock += 40
    return a.responded()
  }
  a.store.gate = async () => void (clock += 20)
  a.script.push(slow)
  await a.get()
  t.match(a.trace, { storeMs: 40, upstreamMs: 40, startedAt: 1000 }, 'the claim and the outcome')
  const uses = a.events.filter(([name]) => name === 'leaseUse')
  t.same(uses, [['leaseUse', 'payments', 40 / LEASE]])
  await a.get()
  t.match(a.trace, { storeMs: 20, upstreamMs: 0 }, 'a replay')
  a.script.push(slow)
  await a.get({ key: null, route: route({ key: { ...route().key, presence: 'optional' } }) })
  t.match(a.trace, { outcome: 'passed', storeMs: 0, upstreamMs: 40 })
  await a.get({ key: '' })
  t.match(a.trace, { outcome: 'key_invalid', storeMs: 0, upstreamMs: 0 })
})

void t.test('§7 each outcome of the upstream is answered, stored and counted by the table', async (t) => {
  const again = { failed_retryable: 'executes', completed: 'replays', unknown: 'is refused' }
  const counts = { failed_retryable: 'released', completed: 'stored', unknown: 'unknown' }
  const retryAfter = {
    status: 503,
    reason: '',
    headers: ['retry-AFTER', '1'],
    body: Buffer.alloc(0),
    trailers: [],
  }
  const REFUSED = { ...BROKEN, reason: 'its head was odd', isRefused: true }
  const rows: readonly (readonly [
    seen: string,
    reply: (r: Replica) => Forwarded,
    answer: RequestOutcome | number,
    state: keyof typeof again,
    table?: Record<number, Action>,
  ])[] = [
    ['U01 no bytes were sent', () => NOT_SENT, 'upstream_unreachable', 'failed_retryable'],
    ['U02 U03 bytes were sent, then the connection closed', () => BROKEN, 'upstream_failed', 'unknown'],
    [
      'U04 no response head came in time',
      () => ({ ...BROKEN, timedOut: true }),
      'upstream_timeout',
      'unknown',
    ],
    [
      'U05 the body was cut off after the status',
      () => ({ ...BROKEN, status: 201 }),
      'upstream_failed',
      'unknown',
    ],
    ['§15.14 the answer was refused', () => REFUSED, 'upstream_failed', 'unknown'],
    ['a complete answer to store', (r) => r.responded(402), 402, 'completed'],
    ['a complete answer to release', (r) => r.responded(429), 429, 'failed_retryable'],
    [
      'U10 an answer that the route maps to unknown',
      (r) => r.responded(500),
      500,
      'unknown',
      { 500: 'unknown' },
    ],
    ['503 with Retry-After', (r) => r.responded(503, '', { response: retryAfter }), 503, 'failed_retryable'],
    ['Idempotency-Outcome: not-applied', (r) => declared(r, 201, 'not-applied'), 201, 'failed_retryable'],
    ['Idempotency-Outcome: applied', (r) => declared(r, 502, 'applied'), 502, 'completed'],
    ['Idempotency-Outcome with an unknown word', (r) => declared(r, 502, 'perhaps'), 502, 'unknown'],
  ]
  for (const [name, reply, answer, state, table = {}] of rows)
    await t.test(`${name}: ${state}, a retry ${again[state]}`, async (t) => {
      const a = replica(t)
      const policy = { route: route({ outcomes: outcomes(table) }) }
      a.script.push(reply(a))
      const first = await a.get(policy)
      if (typeof answer === 'number') t.match(first, { status: answer, code: null })
      else t.match(first, { code: answer, status: answer === 'upstream_timeout' ? 504 : 502 })
      const outcome = typeof answer === 'number' ? 'executed' : answer
      t.match(a.trace, { outcome, before: 'absent', after: state })
      const record = await a.store.read(a.id)
      t.equal(record?.state, state)
      t.same(a.said('completed'), [counts[state]])
      if (name.startsWith('U05')) t.match(record, { status: 201, leaseExpired: false, lastError: 'reset' })
      if (state === 'failed_retryable') {
        t.equal(record?.attempts, 1)
        t.match(await a.get(policy), { status: 201, replayed: false })
        t.equal(a.trace.before, 'failed_retryable')
        t.same(a.said('claimed'), ['created', 'failed_retry'])
        const [one = 0, two] = a.asked.map(({ headers }) => Number(headers[3]))
        t.equal(two, one + 1, 'the fence grows with every claim of the record')
        t.match(await a.store.read(a.id), { state: 'completed', attempts: 2 })
      } else if (state === 'completed') t.match(await a.get(policy), { bytes: first.bytes, replayed: true })
      else {
        for (const later of [0, LEASE, TTL]) {
          a.store.now += later
          await refused(t, a, policy, 'idempotency_outcome_unknown')
        }
        t.same(a.said('claimed'), ['created', 'unknown', 'unknown', 'unknown'], 'O01 every retry is refused')
      }
      t.equal(a.n, state === 'failed_retryable' ? 2 : 1)
      t.same([a.bytes.held, a.ports.inFlight.count, a.ports.running.size, a.ports.leases.size], [0, 0, 0, 0])
    })
})

function declared(r: Replica, status: number, declaredOutcome: string): Forwarded {
  return r.responded(status, 'x', { declaredOutcome })
}

void t.test('§7 a live answer is in_progress until it ends, then without body or unknown', async (t) => {
  for (const why of ['streamed', 'too_large', 'no_room'] as const)
    await t.test(`P19 P21 ${why}`, async (t) => {
      const a = replica(t)
      const stream = new Stream(201)
      a.script.push(stream.reply(why))
      const first = await a.get({ route: route({ statusHeader: true }) })
      t.equal(first.live, stream)
      t.same(first.proxyHeaders, ['Idempotency-Status', 'executed'])
      t.match(a.trace, { outcome: 'executed', after: 'in_progress', status: 201 })
      t.equal(a.ports.inFlight.count, 1, 'work that goes on counts')
      t.equal(a.ports.leases.size, 1, 'and keeps its lease')
      await refused(t, a, {}, 'idempotency_key_in_progress')
      stream.end('complete')
      await until(() => a.ports.inFlight.count === 0)
      const gone = await refused(t, a, {}, 'idempotency_response_unavailable')
      t.match(gone, { status: 409, original: { status: 201, location: '/v1/payments/1' }, instance: a.id })
      t.match(a.trace, { outcome: 'response_unavailable', before: 'completed', after: 'completed' })
      t.same(a.said('completed'), ['too_large'])
      t.equal(a.ports.leases.size, 0)
      t.equal(a.bytes.held, 0)
    })
  await t.test('U05 a broken one is unknown, with its status noted', async (t) => {
    const a = replica(t)
    const stream = new Stream(200)
    a.script.push(stream.reply())
    await a.get()
    stream.end('broken')
    await until(() => a.ports.inFlight.count === 0)
    const lastError = 'the response broke off: a reset'
    t.match(await a.store.read(a.id), { state: 'unknown', status: 200, lastError })
    t.match(a.troubles(), [/broke off while it was streamed/])
    await refused(t, a, {}, 'idempotency_outcome_unknown')
  })
  await t.test('its status or Idempotency-Outcome may free the key', async (t) => {
    for (const [status, said] of [
      [429, null],
      [200, 'not-applied'],
    ] as const) {
      const a = replica(t)
      const stream = new Stream(status)
      a.script.push(stream.reply('streamed', said))
      await a.get()
      stream.end('complete')
      await until(() => a.ports.inFlight.count === 0)
      t.equal((await a.store.read(a.id))?.state, 'failed_retryable')
    }
  })
})

void t.test('§6 refusals before the claim never reach the store', async (t) => {
  const a = replica(t, { maxInFlight: 1 })
  const { scope } = route()
  const strict = route({ scope: { ...scope, anonymous: 'reject' } })
  const other = route({ scope: { ...scope, caller: [{ kind: 'header', name: 'x-user' }] } })
  for (const [over, outcome, status] of [
    [{ key: null }, 'key_missing', 400],
    [{ key: '' }, 'key_invalid', 400],
    [{ headers: ['idempotency-key', 'other'] }, 'key_invalid', 400],
    [{ anonymous: true, route: strict }, 'caller_missing', 401],
    [{ key: 'k', headers: ['Cookie', 'a=b'], route: other }, 'caller_missing', 400],
    [{ reading: { kind: 'too_large' } }, 'request_too_large', 413],
    [{ reading: { kind: 'timeout' } }, 'request_timeout', 408],
    [{ reading: { kind: 'no_room' } }, 'overloaded', 503],
  ] as const) {
    const code = /key|caller/.test(outcome) ? `idempotency_${outcome}` : outcome
    const answer = await refused(t, a, over, code as RefusalCode)
    t.match(answer, { status, instance: null, retryAfter: status === 503 ? 1 : null })
    t.equal(a.trace.outcome, outcome)
    if (outcome === 'caller_missing') t.match(a.trace.cause, /caller/, 'the log warns, once per route')
  }
  t.match(await a.get({ reading: { kind: 'aborted' } }), { status: null, code: null }, 'P26 nobody to answer')
  t.equal(a.trace.outcome, null)
  t.equal(a.store.calls, 0)
  t.same(a.events, [])

  const first = await a.working()
  let read = false
  const full = {
    key: 'another',
    get upload() {
      read = true
      return Promise.resolve()
    },
  }
  await refused(t, a, full, 'overloaded', { status: 503, retryAfter: 1 })
  t.equal(a.trace.outcome, 'overloaded')
  t.notOk(read, 'no body is read that has no place')
  await first.end()
  t.equal((await a.get({ key: 'another' })).status, 201, 'there is room again')
  t.equal(a.bytes.held, 0)
})

void t.test('§10 a request takes its place once its body is complete, if one is left', async (t) => {
  const a = replica(t, { maxInFlight: 1 })
  const upload = new Gate()
  const late = a.send({ key: 'late', upload: upload.pass() })
  const first = await a.working()
  t.equal(a.ports.inFlight.count, 2)
  upload.open()
  t.match(seen(await late), { status: 503, code: 'overloaded', retryAfter: 1 })
  t.equal((await first.end()).status, 201)
  const shared = { ...route().scope, anonymous: 'share' as const }
  t.equal((await a.get({ key: 'nobody', anonymous: true, route: route({ scope: shared }) })).status, 201)
  t.strictSame([a.ports.inFlight.count, a.bytes.held, a.n], [0, 0, 2])
})

void t.test('§6 refusals by the record leave its bytes unchanged', async (t) => {
  const A = { body: '{"amount":1}' }
  const B = { body: '{"amount":2}' }
  await t.test('F01 another payload is misuse; the first one still replays', async (t) => {
    const a = replica(t)
    const first = await a.get(A)
    await refused(t, a, B, 'idempotency_key_reused', { status: 422, retryAfter: null, instance: a.id })
    t.match(a.trace, { outcome: 'misuse', before: 'completed', after: 'completed' })
    t.equal((await a.get(A)).bytes, first.bytes)
    t.equal(a.n, 1)
    t.same(a.said('claimed'), ['created', 'key_misuse', 'replay'])
    const policy = route({ profile: 'stripe' })
    await refused(t, a, { ...B, route: policy }, 'idempotency_key_reused', { status: 400 })
  })
  await t.test('F02 I01 in flight, misuse gets 422, a retry 409; the first is unaffected', async (t) => {
    const a = replica(t)
    const first = await a.working(A)
    await refused(t, a, B, 'idempotency_key_reused', { status: 422 })
    await refused(t, a, A, 'idempotency_key_in_progress', { status: 409, retryAfter: LEASE / SECOND })
    t.match(a.trace, { outcome: 'in_progress', before: 'in_progress', after: 'in_progress' })
    t.same(a.said('claimed'), ['created', 'key_misuse', 'in_progress'])
    const locked = { ...A, route: route({ inFlight: { mode: 'reject', wait: 0, status: 423 } }) }
    await refused(t, a, locked, 'idempotency_key_in_progress', { status: 423 }, 'I07')
    t.match(await first.end(), { status: 201 })
    t.equal((await a.get(A)).replayed, true)
    t.equal(a.n, 1)
    t.same(a.said('prevented').length, 3)
  })
  for (const [read, size] of [
    ['in steps', 200_000],
    ['in steps, as the digest of its bytes', 600_000],
  ] as const)
    await t.test(`F01 F02 I01 a long body, fingerprinted ${read}, is like any other`, async (t) => {
      const fill = 'x,'
        .repeat(size / 4)
        .split(',')
        .map((x) => JSON.stringify(x))
        .join()
      const policy = route({ fingerprint: { ...route().fingerprint, body: 'json' } })
      const sent = { route: policy, headers: ['Content-Type', 'application/json'] }
      const long = { ...sent, body: `{"amount":1,"fill":[${fill}]}` }
      const respelled = { ...sent, body: `{"fill":[${fill}],"amount":1.0}` }
      const other = { ...sent, body: `{"amount":2,"fill":[${fill}]}` }
      const { a, b } = pair(t)
      const first = await a.working(long)
      for (const one of [a, b]) {
        for (const same of [long, respelled]) await refused(t, one, same, 'idempotency_key_in_progress')
        await refused(t, one, other, 'idempotency_key_reused')
      }
      const { bytes } = await first.end()
      for (const one of [a, b]) {
        for (const same of [long, respelled]) t.match(await one.get(same), { replayed: true, bytes })
        await refused(t, one, other, 'idempotency_key_reused')
      }
      t.equal(a.n + b.n, 1)
      a.store.fails('get', 'down')
      await refused(t, a, { ...long, key: 'other' }, 'idempotency_store_unavailable')
      t.equal(a.n + b.n, 1)
      // One lost reply does not make the store unavailable.
      a.store.fails('get', 'dropped', 'down', 'down')
      const bypass = { ...policy, onStoreUnavailable: 'bypass' as const }
      t.match(await a.get({ ...long, route: bypass }), { replayed: true, bytes })
      t.equal(a.n + b.n, 1)
      a.store.fails('get', 'dropped')
      t.match(await a.get({ ...long, key: 'another' }), { status: 201, replayed: false })
      t.equal(a.n + b.n, 2)
      a.store.fails('get', 'dropped', 'dropped')
      await refused(t, a, { ...long, key: 'third' }, 'idempotency_store_unavailable')
      a.store.fails('get', 'dropped', 'down', 'down', 'down', 'down')
      await refused(t, a, { ...long, key: 'third' }, 'idempotency_store_unavailable')
      t.equal(a.n + b.n, 2)
    })
  await t.test('F01 a body of 32 KiB is claimed without looking up its record first', async (t) => {
    const a = replica(t)
    const text = (spaces: string) => `{"b":"${'x'.repeat(32 * 1024 - 15)}",${spaces}"a":1}`
    const large = { headers: ['Content-Type', 'application/json'], body: text('') }
    t.equal(text(' ').length, 32 * 1024)
    a.store.fails('get', 'down')
    t.match(await a.get(large), { status: 201, replayed: false })
    for (const same of [large, { ...large, body: text(' ') }]) t.match(await a.get(same), { replayed: true })
    t.equal(a.store.next.length, 1, 'no get was sent')
    t.equal(a.n, 1)
  })
  await t.test('F02 misuse beats unknown, failed_retryable and the tombstone', async (t) => {
    for (const reply of ['unknown', 'not_sent', 'expired'] as const) {
      const a = replica(t)
      const policy = route({ tombstone: HOUR })
      if (reply === 'unknown') a.script.push(BROKEN)
      if (reply === 'not_sent') a.script.push(NOT_SENT)
      await a.get({ ...A, route: policy })
      if (reply === 'expired') a.store.now += TTL
      await refused(t, a, { ...B, route: policy }, 'idempotency_key_reused')
    }
  })
  await t.test('T01 T02 retention counts from completion; then the key is free or expired', async (t) => {
    const a = replica(t)
    const sent = await a.working()
    a.store.now += 20 * SECOND
    await sent.end()
    a.store.now += TTL - 1
    t.equal((await a.get()).replayed, true)
    a.store.now += 1
    t.match(await a.get(), { status: 201, replayed: false })
    t.equal(a.n, 2)
    t.equal(a.trace.before, 'absent')

    const b = replica(t)
    const policy = route({ tombstone: HOUR, ttl: MINUTE, ttlFailed: SECOND })
    await b.get({ route: policy })
    b.store.now += MINUTE
    await refused(t, b, { route: policy }, 'idempotency_key_expired', { status: 409, retryAfter: null })
    t.match(b.trace, { outcome: 'expired', before: 'expired', after: 'expired' })
    t.same(b.said('claimed'), ['created', 'replay'])
    t.equal(b.said('prevented').length, 1)
    b.store.now += HOUR
    t.equal((await b.get({ route: policy })).replayed, false)
    b.script.push(b.responded(404))
    await b.get({ key: 'failed', route: policy })
    b.store.now += SECOND
    await refused(t, b, { key: 'failed', route: policy }, 'idempotency_key_expired')
  })
  await t.test('S08 keep: outcome stores neither the body nor the headers of the answer', async (t) => {
    const a = replica(t)
    const policy = route({ keep: 'outcome' })
    const body = 'the secret of the answer'
    a.script.push(a.responded(201, body))
    t.match(await a.get({ route: policy }), { status: 201, bytes: new RegExp(body) })
    const [bytes = ''] = Object.values(await a.store.dump())
    t.notOk(bytes.includes(body))
    t.notOk(bytes.includes('Set-Cookie'))
    await refused(t, a, { route: policy }, 'idempotency_response_unavailable', {
      original: { status: 201, location: null },
      detail: /^the request was executed and answered 201; its response was not kept \(outcome_only\)$/,
    })
    t.equal(a.n, 1)
    t.same(a.said('completed'), ['stored'])
    t.equal(a.bytes.held, 0)
  })
  await t.test('after ttl.body the record answers without its response, and nothing executes', async (t) => {
    const a = replica(t)
    const policy = route({ ttlBody: MINUTE, ttlFailed: SECOND })
    const made = a.responded(201, 'the secret of the answer') as Extract<Forwarded, { proof: 'responded' }>
    const headers = ['Location', '/v1/payments/1']
    a.script.push({ ...made, response: { ...made.response, headers } })
    await a.get({ route: policy })
    a.store.now += MINUTE - 1
    t.match(await a.get({ route: policy }), { status: 201, replayed: true })
    a.store.now += 1
    await refused(t, a, { route: policy }, 'idempotency_response_unavailable', {
      status: 409,
      original: { status: 201, location: '/v1/payments/1' },
      detail: /^the request was executed and answered 201; its response is no longer kept$/,
    })
    t.match(a.trace, { outcome: 'response_unavailable', before: 'completed', after: 'completed' })
    const longer = { route: route({ ttlBody: HOUR }) }
    await refused(t, a, longer, 'idempotency_response_unavailable')
    await refused(t, a, { body: '{"amount":2}', route: policy }, 'idempotency_key_reused')
    a.store.now += TTL - MINUTE - 1
    await refused(t, a, { route: policy }, 'idempotency_response_unavailable')
    t.equal(a.n, 1)
    a.store.now += 1
    t.match(await a.get({ route: policy }), { replayed: false })
    t.equal(a.n, 2)

    a.script.push(a.responded(404))
    await a.get({ key: 'failed', route: policy })
    a.store.now += SECOND - 1
    t.match(
      await a.get({ key: 'failed', route: policy }),
      { status: 404, replayed: true },
      'shorter than ttl.body',
    )
  })
  await t.test('a record that cannot be read gets 503, and is not executed or overwritten', async (t) => {
    const a = replica(t)
    await a.get()
    for (const at of [0, 2, 3, 200]) {
      const { bytes } = await a.store.inner.get(a.id)
      const broken = Buffer.from(bytes as Buffer)
      broken[at] = 99
      const put = replica(t)
      await put.store.inner.put(a.id, broken.subarray(0, at === 200 ? 130 : undefined), {
        dueIn: TTL,
        dropIn: TTL,
      })
      put.store.ids.add(a.id)
      for (const onStoreUnavailable of ['reject', 'bypass'] as const) {
        const policy = route({ onStoreUnavailable })
        const answer = await refused(t, put, { route: policy }, 'idempotency_store_unavailable')
        t.match(answer, { status: 503, retryAfter: 1, detail: /^the stored record cannot be read/ })
      }
      t.equal(put.n, 0)
      const trouble = 'a stored record cannot be read; it is refused and left as it is'
      t.same(put.troubles(), [trouble, trouble])
    }
  })
  await t.test('R07 profile strict is refused on a store that may evict', async (t) => {
    const strict = { route: route({ profile: 'strict' }) }
    const details = {
      unfit: /may evict.*store\.acceptRisk/,
      'not known yet': /does not answer, or has not been checked/,
    }
    for (const fitness of ['unfit', 'not known yet'] as const) {
      const a = replica(t, { fitness })
      const refusal = await refused(t, a, strict, 'idempotency_store_unavailable')
      t.match(refusal, { status: 503, retryAfter: 1, detail: details[fitness] })
      t.equal(a.store.calls, 0)
      t.equal((await a.get()).status, 201, 'profile standard goes on')
    }
    const b = replica(t)
    t.equal((await b.get(strict)).status, 201)
  })
})

void t.test('K04 a key in a long body finds the record of that key, and of no other', async (t) => {
  const fill = '"x",'.repeat(100_000)
  for (const body of ['auto', 'none'] as const) {
    const policy = route({
      key: { ...route().key, from: [{ kind: 'json', pointer: '/id' }] },
      fingerprint: { ...route().fingerprint, body },
    })
    const sent = { route: policy, headers: ['Content-Type', 'application/json'] }
    const asked = (id: string) => ({ ...sent, body: `{"fill":[${fill}1],"id":${id}}` })
    const a = replica(t)
    const { bytes } = await a.get(asked('"k1"'))
    t.match(await a.get(asked('"k1"')), { replayed: true, bytes })
    t.equal((await a.get(asked('"k2"'))).replayed, false)
    for (const [id, code] of [
      ['null', 'idempotency_key_invalid'],
      ['"k1","id":"k2"', 'idempotency_key_invalid'],
      ['"k1"]', 'idempotency_key_missing'],
    ] as const)
      await refused(t, a, asked(id), code)
    t.equal(a.n, 2)
  }
})

void t.test('S07 excluded headers reach only the first client', async (t) => {
  const a = replica(t)
  const policy = route({ excludeHeaders: new Set(['set-cookie']) })
  t.match(await a.get({ route: policy }), { bytes: /Set-Cookie/ })
  t.notMatch((await a.get({ route: policy })).bytes, /set-cookie/i)
  t.notMatch(Object.values(await a.store.dump())[0], /set-cookie/i, 'not in the store either')
  const b = replica(t)
  await b.get()
  t.match((await b.get()).bytes, /Set-Cookie.*set-cookie/)
  t.notMatch((await b.get({ route: policy })).bytes, /set-cookie/i, 'even if stored before')
})

void t.test('P16 T02 L12 statusHeader: an answer and its replay have one Idempotency-Expires', async (t) => {
  const a = replica(t)
  const policy = route({ statusHeader: true })
  const first = await a.get({ route: policy })
  const expires = new Date(a.store.now + TTL).toISOString()
  t.same(first.proxyHeaders, ['Idempotency-Status', 'executed', 'Idempotency-Expires', expires])
  a.store.now += HOUR
  t.same((await a.get({ route: policy })).proxyHeaders, [
    'Idempotent-Replayed',
    'true',
    'Idempotency-Status',
    'replayed',
    'Idempotency-Expires',
    expires,
  ])
  a.script.push(a.responded(429))
  const released = await a.get({ key: 'released', route: policy })
  t.same(released.proxyHeaders, ['Idempotency-Status', 'executed'], 'what is not kept does not expire')
})

void t.test('T04 I01 Retry-After is the rest of the lease, or less by the latency, at least 1', async (t) => {
  const a = replica(t)
  const first = await a.working()
  const retryAfter = async () => (await refused(t, a, {}, 'idempotency_key_in_progress')).retryAfter
  t.equal(await retryAfter(), 30)
  a.store.now += 100
  t.equal(await retryAfter(), 29, 'rounded down')
  a.ports.latency.saw('payments', 4000)
  t.equal(await retryAfter(), 3, 'from the first answer on')
  a.ports.latency.saw('payments', 9000)
  t.equal(await retryAfter(), 8, 'what most answers take')
  a.store.now += 10 * SECOND
  t.equal(await retryAfter(), 10, 'longer than usual: perhaps as long again')
  a.store.now += 9 * SECOND
  t.equal(await retryAfter(), 10, 'no longer than the lease')
  a.store.now += 10 * SECOND + 500
  t.equal(await retryAfter(), 1)
  a.store.now += 400
  await refused(t, a, {}, 'idempotency_outcome_unknown', { retryAfter: 1 }, 'lapsed: unknown, at once')
  t.match(a.trace, { outcome: 'unknown', before: 'unknown' })
  t.same(a.said('leaseExpired'), [], 'counted when it is written down, not at each retry')
  await first.end()
  t.equal((await a.get()).replayed, true, 'the owner’s own late outcome is accepted over unknown')
  t.same(a.said('completed'), ['stored'])

  const fresh = replica(t)
  await fresh.get()
  t.ok(fresh.ports.latency.remaining('payments', 0) < LEASE, 'answers set the latency')

  const b = replica(t)
  b.script.push(BROKEN)
  await b.get()
  await refused(
    t,
    b,
    {},
    'idempotency_outcome_unknown',
    {
      retryAfter: 30,
      checking: false,
      detail:
        /^it is not known whether the first request was executed, and an operator must find out\. Keep retrying with the same key: a new key is not safe/,
    },
    'until the next look',
  )
  const request = { method: 'GET', path: '/v1/payments?key={key}', headers: [] }
  const asking = { completed: [], notFound: null, pending: null, after: 0, every: MINUTE, attempts: 1 }
  const reconcile = { request, identity: [], ...asking }
  await refused(t, b, { route: route({ reconcile }) }, 'idempotency_outcome_unknown', {
    checking: true,
    detail: /^it is not known yet whether the first request was executed; retry with the same key: a new key/,
  })
  t.same(
    b.events.filter(([name]) => name === 'leaseExpired'),
    [],
    'unknown, but no lease lapsed',
  )
})

void t.test('L01 of 50 simultaneous requests one executes, the others are refused or replay', async (t) => {
  const a = replica(t)
  const gate = new Gate()
  a.script.push(gate.before(() => a.responded()))
  const all = Array.from({ length: 50 }, () => a.get())
  await gate.reached
  const others = await Promise.all(all.map((one) => Promise.race([one, Promise.resolve(null)])))
  gate.open()
  const answers = await Promise.all(all)
  t.equal(a.n, 1)
  t.equal(answers.filter((one) => one.status === 201 && !one.replayed).length, 1)
  t.equal(answers.filter((one) => one.code === 'idempotency_key_in_progress' || one.replayed).length, 49)
  t.equal(others.length, 50)
  t.equal(a.bytes.held, 0)
  t.equal(a.ports.inFlight.count, 0)
})

void t.test('L02 of 50 simultaneous requests on three replicas of one store, one executes', async (t) => {
  const store = new Store()
  const all = Array.from({ length: 3 }, () => replica(t, { store }))
  const answers = await Promise.all(Array.from({ length: 50 }, (_, i) => (all[i % 3] as Replica).get()))
  t.equal(
    all.reduce((sum, one) => sum + one.n, 0),
    1,
  )
  const whole = new Set(answers.filter((one) => one.bytes !== null).map((one) => one.bytes))
  t.equal(whole.size, 1)
  for (const one of answers) t.ok(one.bytes !== null || one.code === 'idempotency_key_in_progress')
})

void t.test('L03 the loser replays if the winner finishes before the loser’s takeover arrives', async (t) => {
  const { a, b, store } = pair(t)
  a.script.push(NOT_SENT)
  await a.get()
  // The loser found failed_retryable; the winner takes over and finishes before the loser's own takeover arrives.
  const gate = new Gate()
  store.gate = async ({ op }) => {
    if (op !== 'swap') return
    store.gate = null
    await gate.pass()
  }
  const loser = b.get()
  await gate.reached
  const winner = await a.get()
  gate.open()
  t.match(await loser, { bytes: winner.bytes, replayed: true })
  t.equal(a.n + b.n, 2)
  t.equal(b.n, 0)
})

void t.test('L08 after a lapsed lease retries get unknown; with retry, one executes', async (t) => {
  for (const onLeaseExpired of ['unknown', 'retry'] as const) {
    const store = new Store()
    const dead = new Replica({ store })
    dead.script.push(() => new Promise(() => {}))
    void dead.send()
    await until(() => dead.n === 1)
    dead.ports.leases.close()
    const policy = route({ onLeaseExpired })
    const a = replica(t, { store })
    await refused(t, a, { route: policy }, 'idempotency_key_in_progress')
    store.now += LEASE
    if (onLeaseExpired === 'unknown') {
      for (let i = 0; i < 20; i++) await refused(t, a, { route: policy }, 'idempotency_outcome_unknown')
      t.equal(a.n, 0)
      continue
    }
    const b = replica(t, { store })
    const retries = await Promise.all(
      Array.from({ length: 20 }, (_, i) => (i % 2 ? a : b).get({ route: policy })),
    )
    t.equal(a.n + b.n, 1)
    t.equal(retries.filter((one) => one.status === 201 && !one.replayed).length, 1)
    t.same([...a.said('claimed'), ...b.said('claimed')].filter((word) => word === 'failed_retry').length, 1)
    t.match(await store.read(a.id), { state: 'completed', attempts: 2 })
  }
})

void t.test('with onResponseLost: retry, one retry executes after a lost response', async (t) => {
  const { a, b, store } = pair(t)
  const policy = route({ onResponseLost: 'retry' })
  a.script.push(() => BROKEN)
  t.match(await a.get({ route: policy }), { status: 502, code: 'upstream_failed' })
  t.match(await store.read(a.id), { state: 'failed_retryable', lastError: 'reset; onResponseLost: retry' })
  await refused(t, b, { route: policy, body: '{"other":1}' }, 'idempotency_key_reused')
  const retries = await Promise.all([a, b, a, b].map((one) => one.get({ route: policy })))
  t.equal(retries.filter((one) => one.status === 201 && !one.replayed).length, 1)
  t.equal(a.n + b.n, 2)
  t.match(await store.read(a.id), { state: 'completed', attempts: 2 })
})

void t.test('L09 L10 an outcome is stale after a newer attempt, and only its client gets it', async (t) => {
  const late: readonly ((r: Replica) => Forwarded)[] = [
    (r) => r.responded(201, 'late'),
    () => ({ proof: 'not_sent', reason: 'late' }),
    () => ({ proof: 'unknown', reason: 'late', timedOut: false, status: null }),
  ]
  for (const reply of late)
    for (const newer of ['running', 'done'] as const) {
      const { a, b, store } = pair(t)
      const policy = route({ onLeaseExpired: 'retry' })
      const paused = await a.working({ route: policy }, () => reply(a))
      store.now += LEASE
      const second = new Gate()
      if (newer === 'running') b.script.push(second.before(() => b.responded()))
      const taking = b.send({ route: policy })
      if (newer === 'running') await second.reached
      else seen(await taking)
      const before = await store.dump()
      const own = await paused.end()
      t.ok(own.status === 201 || own.status === 502, 'its own client gets its answer')
      t.same(await store.dump(), before, 'the record is unchanged')
      t.same(a.said('completed'), ['stale'])
      t.same(a.troubles(), ['an outcome came too late and was refused'])
      second.open()
      const done = seen(await taking)
      t.match(await b.get({ route: policy }), {
        replayed: true,
        bytes: newer === 'running' ? done.bytes : /p1/,
      })
      t.equal(a.bytes.held + b.bytes.held, 0)
    }
})

void t.test('§6 problems of a stripe route are marked as Stripe errors', async (t) => {
  const a = replica(t)
  const told = async (profile: 'stripe' | 'standard') => {
    const answer = await a.send({ key: null, route: route({ profile }) })
    return answer.kind === 'problem' && answer.refusal.stripeError
  }
  t.equal(await told('stripe'), true)
  t.equal(await told('standard'), false)
})

void t.test('P18 the memory of a long body is freed once neither proxy nor socket needs it', async (t) => {
  const a = replica(t)
  const sent = (): { body: Buffer; kind: 'body'; release: () => void } => ({
    kind: 'body',
    body: Buffer.alloc(64 * 1024, 'a'),
    release: () => {},
  })
  const [lost, taken, passed, replayed] = [sent(), sent(), sent(), sent()]
  await a.get({ reading: lost })
  t.equal(lost.body.length, 64 * 1024, 'the socket may hold it')
  const take = (request: UpstreamRequest): Forwarded => {
    t.ok(request.body.includes('aaaa'))
    request.onTaken?.()
    return a.responded()
  }
  a.script.push(take, take)
  await a.get({ reading: taken, key: 'other-0123456789abcdef' })
  t.equal(taken.body.length, 0)
  await a.get({
    reading: passed,
    key: null,
    route: route({ key: { ...route().key, presence: 'optional' } }),
  })
  t.equal(passed.body.length, 0)
  t.ok((await a.get({ reading: replayed })).replayed)
  t.equal(replayed.body.length, 0)
})

void t.test('P18 a body that the upstream has taken is freed before its outcome is written', async (t) => {
  const a = replica(t)
  const body = Buffer.alloc(64 * 1024, 'a')
  a.script.push((request) => {
    request.onTaken?.()
    return a.responded()
  })
  let left: number | null = null
  a.store.gate = async ({ op }) => {
    if (op === 'swap') left = body.length
  }
  await a.get({ reading: { kind: 'body', body, release: () => {} } })
  t.equal(left, 0)
})

void t.test('P18 under respondWithin a body is freed only once its call has ended', async (t) => {
  const a = replica(t)
  const { promise, resolve } = Promise.withResolvers<Forwarded>()
  const body = Buffer.alloc(64 * 1024, 'a')
  a.script.push((request) => {
    request.onTaken?.()
    return promise
  })
  await a.get({ reading: { kind: 'body', body, release: () => {} }, route: route({ respondWithin: 1 }) })
  t.equal(body.length, 64 * 1024)
  resolve(a.responded())
  await until(() => body.length === 0)
})

/** An upstream answer that is large enough to free. */
function long(a: Replica): { body: Buffer; reply: Forwarded } {
  const body = Buffer.alloc(8192, 'b')
  const reply = a.responded() as Extract<Forwarded, { proof: 'responded' }>
  return { body, reply: { ...reply, response: { ...reply.response, body } } }
}

void t.test('P18 the memory of an answer is freed once it is stored and sent', async (t) => {
  const a = replica(t)
  const { body, reply } = long(a)
  a.script.push(reply)
  const answer = await a.send()
  t.equal(body.length, 8192, 'the client does not have it yet')
  const first = seen(answer)
  t.equal(body.length, 0)
  t.match(await a.get(), { replayed: true, bytes: first.bytes })
})

void t.test('P18 I02 an answer that a waiting duplicate gets is not freed', async (t) => {
  const a = replica(t)
  const { body, reply } = long(a)
  const gate = new Gate()
  a.script.push(gate.before(() => reply))
  const policy = { route: route({ inFlight: { mode: 'wait', wait: MINUTE, status: 409 } }) }
  // It asks before the run begins, and hears of it only from the store.
  const asked = new Gate()
  a.store.gate = async ({ op, n }) => {
    if (op === 'put' && n === 1) await asked.pass()
  }
  const waiting = a.send(policy)
  await asked.reached
  const answer = a.send(policy)
  await gate.reached
  asked.open()
  await until(() => a.ports.waiters.size === 1)
  gate.open()
  const first = seen(await answer)
  t.equal(body.length, 8192)
  t.match(seen(await waiting), { replayed: true, bytes: first.bytes })
  t.equal(a.n, 1)
})

void t.test('P18 §7 an answer that the store did not take is not freed', async (t) => {
  const a = replica(t)
  const { body, reply } = long(a)
  a.script.push(reply)
  a.store.fails('swap', 'down')
  const first = await a.get()
  t.match(await a.get(), { replayed: true, bytes: first.bytes })
  await a.ports.settler.flush()
  t.equal(body.length, 8192)
  t.match(await a.get(), { replayed: true, bytes: first.bytes })
})

void t.test('P18 §2 an answer is not freed while a retry claims the record that was lost', async (t) => {
  const a = replica(t)
  const { body, reply } = long(a)
  const answer = await a.working({}, () => reply)
  const { bytes } = await a.store.inner.get(a.id)
  await a.store.restore(a.id, null)
  const asked = new Gate()
  let puts = 0
  a.store.gate = async ({ op }) => {
    if (op === 'put' && ++puts === 1) await asked.pass()
  }
  const retry = a.send()
  await asked.reached
  await a.store.restore(a.id, bytes)
  const first = await answer.end()
  t.equal(body.length, 8192)
  // The record is gone once more: the claim succeeds over a run that has ended.
  await a.store.restore(a.id, null)
  asked.open()
  t.match(seen(await retry), { replayed: true, bytes: first.bytes })
  t.equal(a.n, 1)
})
