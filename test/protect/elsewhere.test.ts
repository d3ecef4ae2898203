import t from 'tap'
import type { Rate } from '../../src/core/policy.ts'
import { queryStatus, type StatusReply } from '../../src/protect/existing.ts'
import { guard } from '../../src/protect/guard.ts'
import { issueKey } from '../../src/protect/identify.ts'
import { CorruptRecord } from '../../src/store/register.ts'
import {
  BROKEN,
  Gate,
  HOUR,
  LEASE,
  MINUTE,
  NOT_SENT,
  pair,
  type Replica,
  refused,
  replica,
  route,
  SECOND,
  Store,
  Stream,
  seen,
  TTL,
} from './harness.ts'

const { key: KEY, scope: SCOPE, limits: LIMITS } = route()

void t.test('§4 a key in the body', async (t) => {
  const json = { kind: 'json', pointer: '/id' } as const
  const required = route({ key: { ...KEY, from: [json] } })
  const optional = route({ key: { ...KEY, from: [json], presence: 'optional' }, statusHeader: true })
  await t.test('protects like any other', async (t) => {
    const a = replica(t)
    const sent = { key: null, route: required, body: '{"id":"evt_1"}' }
    const first = await a.get(sent)
    t.equal((await a.get(sent)).bytes, first.bytes)
    t.match(await a.get({ ...sent, body: '{"id":"evt_1","more":1}' }), { code: 'idempotency_key_reused' })
    t.match(await a.get({ ...sent, body: '{"id":"evt_2"}' }), { status: 201, replayed: false })
    t.equal(a.n, 2)
    t.same(a.asked[0]?.headers.slice(0, 2), ['Idempotency-Key', 'evt_1'])
  })
  await t.test('a required key that is missing or no string is refused, and the body released', async (t) => {
    const a = replica(t)
    await refused(t, a, { key: null, route: required, body: '{}' }, 'idempotency_key_missing', {
      status: 400,
    })
    await refused(t, a, { key: null, route: required, body: '{"id":{}}' }, 'idempotency_key_invalid')
    t.equal(a.bytes.held, 0)
  })
  await t.test('the refusal of a batch of events says to send them one by one', async (t) => {
    const a = replica(t)
    const from = [{ kind: 'header', name: 'ce-id' } as const, json]
    const batch = {
      key: null,
      route: route({ key: { ...KEY, from } }),
      headers: ['content-type', 'application/cloudevents-batch+json'],
      body: '[]',
    }
    await refused(t, a, batch, 'idempotency_key_missing', {
      detail: /^a batch of events has no key; send its events one by one$/,
    })
    t.equal(a.trace.outcome, 'key_missing')
    await refused(t, a, { ...batch, route: route() }, 'idempotency_key_missing', {
      detail: /^send the header idempotency-key$/,
    })
    await refused(t, a, { ...batch, headers: [] }, 'idempotency_key_missing', {
      detail: /^send one of: ce-id, json:/,
    })
  })
  await t.test('the refusal of a reused key names only what the route compares', async (t) => {
    for (const [more, differs] of [
      [{}, 'its body, query or media type differs,'],
      [{ body: 'none' }, 'its query or media type differs,'],
      [{ body: 'none', query: 'ignore' }, 'its media type differs,'],
    ] as const) {
      const a = replica(t)
      const policy = route({ fingerprint: { ...route().fingerprint, ...more } })
      // Made under other settings, so that only what is compared now can be named.
      const former = route({ fingerprint: { ...policy.fingerprint, headers: ['x-former'] } })
      await a.get({ route: former, headers: ['content-type', 'text/plain'] })
      const other = { route: policy, headers: ['content-type', 'text/html'] }
      await refused(t, a, other, 'idempotency_key_reused', { detail: differs })
    }
  })
  await t.test('a request without an optional key is forwarded unprotected, without the store', async (t) => {
    const a = replica(t)
    const sent = { key: null, route: optional, body: '{"amount":1}' }
    for (const n of [1, 2]) {
      t.match(await a.get(sent), {
        status: 201,
        replayed: false,
        proxyHeaders: ['Idempotency-Status', 'ignored'],
      })
      t.equal(a.n, n)
      t.match(a.trace, { outcome: 'passed', id: null })
    }
    t.same(a.asked[0]?.headers, ['Authorization', 'Bearer a'])
    t.equal(a.store.calls, 0)
    a.script.push(NOT_SENT)
    t.match(await a.get(sent), { status: 502, code: 'upstream_unreachable', instance: null })
    a.script.push(BROKEN)
    t.match(await a.get(sent), { status: 502, code: 'upstream_failed', instance: null, retry: 'no' })
    a.script.push({ proof: 'unknown', reason: 'slow', timedOut: true, status: null })
    t.match(await a.get(sent), { status: 504, code: 'upstream_timeout', retry: 'no' })
    const stream = new Stream()
    a.script.push(stream.reply())
    const untold = await a.get({ ...sent, route: route({ ...optional, statusHeader: false }) })
    t.equal(untold.live, stream)
    t.same(untold.proxyHeaders, [])
    t.equal(a.store.calls, 0)
    t.equal(a.bytes.held, 0)

    const b = replica(t, { maxInFlight: 1 })
    const running = await b.working(sent)
    t.equal(b.bytes.held, sent.body.length, 'its body is held')
    await refused(t, b, sent, 'overloaded')
    t.match(await running.end(), { status: 201 })
    t.equal(b.bytes.held, 0)
  })
})

void t.test('§4 derive makes a key where the client sent none', async (t) => {
  const derive = { json: ['/order'], form: [], headers: [], path: false, bucket: HOUR }
  const policy = route({ key: { ...KEY, derive } })
  const sent = { key: null, route: policy, body: '{"order":1,"note":"a"}' }
  await t.test('marks its answers as derived, but not those to a key the client sent', async (t) => {
    const a = replica(t)
    const first = await a.working(sent)
    t.match(await a.get(sent), {
      code: 'idempotency_key_in_progress',
      proxyHeaders: ['Idempotency-Key-Derived', 'true'],
    })
    t.same((await first.end()).proxyHeaders.slice(-2), ['Idempotency-Key-Derived', 'true'])
    t.same((await a.get(sent)).proxyHeaders.slice(-2), ['Idempotency-Key-Derived', 'true'])
    t.equal(a.n, 1)
    t.match(await a.get({ ...sent, body: '{"order":1,"note":"b"}' }), { code: 'idempotency_key_reused' })
    for (const body of [sent.body, '{}'])
      t.same((await a.get({ ...sent, key: 'own', body })).proxyHeaders, [], 'not for a key the client sent')
    const derived = a.asked[0]?.headers[1] as string
    t.match(await a.get({ ...sent, key: derived, body: '{}' }), { status: 201 }, 'another record')
    t.match((await a.get({ ...sent, gone: () => true, body: '{"order":3}' })).status, null)
  })
  await t.test('its bucket follows the store’s clock', async (t) => {
    const a = replica(t)
    a.store.now = 10 * HOUR
    await a.get(sent)
    a.store.now += HOUR - 1
    t.equal((await a.get(sent)).replayed, true)
    a.store.now += 1
    t.equal((await a.get(sent)).replayed, false)
  })
  await t.test('with nothing to derive from, the key is missing, or the request unprotected', async (t) => {
    const a = replica(t)
    await refused(t, a, { ...sent, body: '{}' }, 'idempotency_key_missing')
    const optional = route({ key: { ...KEY, derive, presence: 'optional' } })
    const passed = await a.get({ ...sent, route: optional, body: '{}' })
    t.equal(passed.status, 201)
    t.same(passed.proxyHeaders, [])
    t.equal(a.trace.outcome, 'passed')
  })
  await t.test('while the store is down the request is refused, or executed under bypass', async (t) => {
    const a = replica(t)
    a.store.fault = () => 'down'
    t.match(await a.get(sent), { code: 'idempotency_store_unavailable', instance: null })
    t.equal(a.n, 0)
    t.match(await a.get({ ...sent, route: route({ ...policy, onStoreUnavailable: 'bypass' }) }), {
      status: 201,
    })
    const b = replica(t)
    b.store.fault = () => new Error('a bug')
    await t.rejects(b.get(sent), { message: 'a bug' })
    t.equal(b.bytes.held, 0)
  })
})

void t.test('§4 Repeatability-First-Sent', async (t) => {
  const at = (time: number) => ['Repeatability-First-Sent', new Date(time).toUTCString()]
  await t.test('T05 a date longer ago than ttl by the store’s clock gets 412, executed or not', async (t) => {
    const a = replica(t)
    a.store.now = Math.floor(a.store.now / SECOND) * SECOND
    const headers = at(a.store.now)
    t.match(await a.get({ headers }), { status: 201 })
    a.store.now += TTL
    t.match(await a.get({ headers, key: 'another' }), { status: 201 }, 'exactly ttl ago')
    a.store.now += 1
    await refused(t, a, { headers }, 'idempotency_key_expired', {
      status: 412,
      detail: `the request was first sent at ${new Date(a.store.now - TTL - 1).toISOString()}, longer ago than this route keeps responses (86400 s); nothing was executed now, and it is not known whether it was executed then`,
    })
    t.equal(a.trace.outcome, 'expired')
    const unseen = await refused(t, a, { headers, key: 'never seen' }, 'idempotency_key_expired')
    t.equal(unseen.status, 412)
    t.same(unseen.proxyHeaders, [])
    const derive = { json: ['/amount'], form: [], headers: [], path: false, bucket: null }
    const derived = { key: null, headers, route: route({ key: { ...KEY, derive } }) }
    await refused(t, a, derived, 'idempotency_key_expired', {
      proxyHeaders: ['Idempotency-Key-Derived', 'true'],
    })
    t.equal(a.n, 2)
  })
  await t.test('a value that is not a date is refused', async (t) => {
    const a = replica(t)
    const headers = ['Repeatability-First-Sent', 'yesterday']
    await refused(t, a, { headers }, 'idempotency_key_invalid')
    t.equal(a.n, 0)
    const optional = route({
      key: { ...KEY, from: [{ kind: 'json', pointer: '/id' }], presence: 'optional' },
    })
    t.match(
      await a.get({ headers, key: null, route: optional }),
      { status: 201 },
      'without a key there is nothing to repeat',
    )
  })
})

void t.test('§4 issuedOnly', async (t) => {
  const policy = route({ key: { ...KEY, issuedOnly: true } })
  await t.test('a forged key gets 400; an expired one claims nothing new but finds its record', async (t) => {
    const store = new Store()
    const good = replica(t, { store, issued: 'valid' })
    const late = replica(t, { store, issued: 'expired' })
    const forged = replica(t, { store, issued: 'forged' })
    await refused(t, forged, { route: policy }, 'idempotency_key_invalid', { status: 400 })
    await refused(t, late, { route: policy }, 'idempotency_key_expired', { status: 412 })
    t.equal(late.trace.outcome, 'expired')
    const first = await good.get({ route: policy })
    t.equal((await late.get({ route: policy })).bytes, first.bytes)
    t.match(await late.get({ route: policy, body: '{}' }), { code: 'idempotency_key_reused' })
    good.script.push(NOT_SENT)
    await good.get({ route: policy, key: 'freed' })
    await refused(t, late, { route: policy, key: 'freed' }, 'idempotency_key_expired', { status: 412 })
    t.equal(late.n + forged.n, 0)
  })
  await t.test('an expired key is refused while the store is down, even under bypass', async (t) => {
    const late = replica(t, { issued: 'expired' })
    late.store.fault = () => 'down'
    const bypass = route({ ...policy, onStoreUnavailable: 'bypass' })
    t.match(await late.get({ route: bypass }), { code: 'idempotency_store_unavailable' })
    t.equal(late.n, 0)
  })
})

void t.test('§10 limits.newKeys', async (t) => {
  const newKeys: Rate = { count: 2, per: MINUTE }
  const policy = route({ limits: { ...LIMITS, newKeys } })
  const sent = { route: policy }
  await t.test('limits new keys per caller and route before any claim, not replays', async (t) => {
    const { a, b, store } = pair(t)
    t.match(await a.get({ ...sent, key: '1' }), { status: 201 })
    t.match(await b.get({ ...sent, key: '2' }), { status: 201 })
    const detail = 'too many new keys: at most 2 in 60 s; nothing was executed'
    await refused(t, a, { ...sent, key: '3' }, 'rate_limited', { status: 429, retryAfter: 30, detail })
    t.equal(a.trace.outcome, 'rate_limited')
    for (const key of ['1', '2']) t.equal((await a.get({ ...sent, key })).replayed, true)
    t.match(await a.get({ ...sent, key: '3', anonymous: true }), { status: 201 }, 'another caller')
    const other = route({ ...policy, name: 'refunds' })
    t.match(await a.get({ route: other, key: '4' }), { status: 201 }, 'another route')
    store.now += 28.5 * SECOND
    await refused(t, a, { ...sent, key: '3' }, 'rate_limited', { retryAfter: 2 }, 'rounded up')
    store.now += 1.5 * SECOND
    t.match(await b.get({ ...sent, key: '3' }), { status: 201 })
    t.equal(a.n + b.n, 5)
  })
  await t.test('a retry of a request that was not executed does not count', async (t) => {
    const a = replica(t)
    for (const key of ['1', '2']) {
      a.script.push(NOT_SENT)
      await a.get({ ...sent, key })
    }
    for (const key of ['1', '2']) t.match(await a.get({ ...sent, key }), { status: 201 })
    await refused(t, a, { ...sent, key: '3' }, 'rate_limited')
  })
  await t.test('L01 duplicates of one new key spend one unit on two replicas', async (t) => {
    const { a, b } = pair(t)
    const gate = new Gate()
    for (const one of [a, b]) one.script.push(gate.before(() => one.responded()))
    const all = Array.from({ length: 20 }, (_, n) => (n % 2 === 0 ? a : b).get({ ...sent, key: '1' }))
    await gate.reached
    gate.open()
    const answers = await Promise.all(all)
    t.equal(answers.filter(({ status, replayed }) => status === 201 && !replayed).length, 1)
    t.notOk(answers.some(({ code }) => code === 'rate_limited'))
    t.match(await a.get({ ...sent, key: '2' }), { status: 201 })
    await refused(t, a, { ...sent, key: '3' }, 'rate_limited')
  })
  await t.test('a key over the rate replays if another replica has just claimed, not freed it', async (t) => {
    for (const isFreed of [false, true]) {
      const { a, b, store } = pair(t)
      await b.get({ ...sent, key: '1' })
      store.gate = async ({ op, by }) => {
        if (op !== 'throttle' || by !== a) return
        store.gate = null
        if (isFreed) b.script.push(NOT_SENT)
        await b.get({ ...sent, key: '2' })
      }
      const answer = await a.get({ ...sent, key: '2' })
      t.match(answer, isFreed ? { code: 'rate_limited' } : { status: 201, replayed: true })
      t.equal(a.n, 0)
      if (isFreed) t.match(await a.get({ ...sent, key: '2' }), { status: 201, replayed: false })
    }
  })
  await t.test('a request that could not claim a new key spends nothing', async (t) => {
    const { a, b, store } = pair(t)
    for (const fault of ['down', 'full'] as const) {
      store.next.push({ op: 'put', fault })
      t.match(await a.get({ ...sent, key: '1' }), { code: 'idempotency_store_unavailable' })
    }
    let puts = 0
    store.gate = async ({ op, by }) => {
      if (op !== 'put' || by !== a || ++puts > 1) return
      b.script.push(NOT_SENT)
      await b.get({ key: '1' })
    }
    t.match(await a.get({ ...sent, key: '1' }), { status: 201 }, 'not new any more when it is claimed')
    for (const key of ['2', '3']) t.match(await a.get({ ...sent, key }), { status: 201 })
    await refused(t, a, { ...sent, key: '4' }, 'rate_limited')
  })
  await t.test('a request is refused if the store fails at lookup, count or return', async (t) => {
    for (const op of ['get', 'throttle'] as const) {
      const a = replica(t)
      a.store.next.push({ op, fault: 'down' })
      t.match(await a.get(sent), { code: 'idempotency_store_unavailable' })
      t.equal(a.n, 0)
    }
    const a = replica(t)
    a.store.fails('get', new CorruptRecord('x'))
    t.match(await a.get(sent), { code: 'idempotency_store_unavailable' })
    a.store.fails('get', new Error('a bug'))
    await t.rejects(a.get(sent), { message: 'a bug' })
    a.store.fails('throttle', null, 'down')
    a.store.fails('put', 'down')
    t.match(await a.get(sent), { code: 'idempotency_store_unavailable' })
  })
})

void t.test('§6 authorizeReplay', async (t) => {
  const policy = route({ authorizeReplay: { path: '/me?full=1', cache: 0 } })
  const sent = { route: policy, headers: ['Cookie', 'sid=1', 'X-Other', 'x'] }
  /** A replica with a completed record, whose upstream then answers the probe with that status. */
  const probed = async (
    status: number,
    over = {},
  ): Promise<[Replica, Awaited<ReturnType<Replica['get']>>]> => {
    const a = replica(t)
    await a.get(sent)
    a.script.push(a.responded(status, 'the probe’s own'))
    return [a, await a.get({ ...sent, ...over })]
  }
  await t.test('S05 asks with the caller’s credentials and nothing else from the request', async (t) => {
    t.match((await probed(299))[1], { replayed: true })
    const [a, answer] = await probed(204)
    t.match(answer, { status: 201, replayed: true })
    t.match(a.asked[1], { method: 'GET', target: '/me?full=1' })
    t.same(a.asked[1]?.headers, ['Authorization', 'Bearer a', 'Cookie', 'sid=1'])
    t.equal(a.asked[1]?.body.length, 0)
    t.equal(a.bytes.held, 0)
  })
  await t.test('S05 a caller the upstream refuses learns nothing, not even the state', async (t) => {
    const cases = [
      [401, 401, 'replay_forbidden', null],
      [403, 403, 'replay_forbidden', null],
      [404, 403, 'replay_forbidden', null],
      [300, 403, 'replay_forbidden', null],
      [302, 403, 'replay_forbidden', null],
      [499, 403, 'replay_forbidden', null],
      [500, 503, 'replay_unauthorized_yet', 1],
      [503, 503, 'replay_unauthorized_yet', 1],
    ] as const
    for (const [said, status, code, retryAfter] of cases) {
      const [a, answer] = await probed(said)
      t.match(answer, { status, code, retryAfter, instance: null, bytes: null })
      t.equal(a.trace.outcome, 'replay_forbidden')
      const [, misuse] = await probed(said, { body: '{"amount":2}' })
      t.match(misuse, { status, code, instance: null }, 'misuse would reveal the state too')
    }
  })
  await t.test('S05 sends the credentials even if Connection names them', async (t) => {
    const a = replica(t)
    const trick = { ...sent, headers: [...sent.headers, 'Connection', 'close, authorization'] }
    a.forwarded = (lines) => lines.filter((_, n) => lines[n - (n % 2)]?.toLowerCase() !== 'authorization')
    await a.get(trick)
    a.script.push(a.responded(401))
    t.match(await a.get(trick), { status: 401, bytes: null })
    t.match(a.asked[1]?.headers, ['Authorization', 'Bearer a'])
  })
  await t.test('S05 sends every header that may name the caller, and how the request arrived', async (t) => {
    const caller = [{ kind: 'cookie', name: 'sid' } as const, { kind: 'header', name: 'x-api-key' } as const]
    const asked = { ...sent, route: route({ ...policy, scope: { ...SCOPE, caller } }) }
    const arrived = ['CDN-Loop', 'p', 'Host', 'h', 'Via', '1.1 p', 'X-Forwarded-For', '1.2.3.4']
    arrived.push('X-Forwarded-Host', 'h', 'X-Forwarded-Proto', 'https')
    const a = replica(t)
    a.forwarded = () => ['X-Other', 'x', ...arrived, 'Content-Length', '12']
    const headers = ['X-Api-Key', 'k', 'Cookie', 'sid=1', 'Sid', 'x']
    await a.get({ ...asked, headers })
    let clock = 1000
    t.intercept(performance, 'now', { value: () => clock })
    a.script.push(async () => {
      clock += 5
      return a.responded(204)
    })
    t.match(await a.get({ ...asked, headers }), { replayed: true })
    const credentials = ['Authorization', 'Bearer a', 'X-Api-Key', 'k', 'Cookie', 'sid=1']
    t.same(a.asked[1]?.headers, [...credentials, ...arrived])
    t.equal(a.trace.upstreamMs, 5, 'the log says how long the upstream took')
  })
  await t.test('a probe without an answer gets 503', async (t) => {
    for (const reply of [
      NOT_SENT,
      { proof: 'unknown', reason: 'x', timedOut: true, status: null },
    ] as const) {
      const a = replica(t)
      await a.get(sent)
      a.script.push(reply)
      t.match(await a.get(sent), { status: 503, code: 'replay_unauthorized_yet' })
    }
  })
  await t.test('a streamed answer to the probe is drained', async (t) => {
    const a = replica(t)
    await a.get(sent)
    const stream = new Stream()
    a.script.push(stream.reply())
    t.match(await a.get(sent), { replayed: true })
    t.equal(stream.drained, 1)
  })
  await t.test('cache remembers a 2xx per credential for its duration', async (t) => {
    const cached = { ...sent, route: route({ authorizeReplay: { path: '/me', cache: MINUTE } }) }
    const a = replica(t)
    await a.get(cached)
    await a.get(cached)
    t.equal(a.n, 2)
    await a.get(cached)
    t.equal(a.n, 2)
    await a.get({ ...cached, headers: ['Cookie', 'sid=2'] })
    t.equal(a.n, 3, 'another credential')
    const anew = { ...cached, route: route({ authorizeReplay: { path: '/me', cache: 0 } }) }
    await a.get(anew)
    await a.get(anew)
    t.equal(a.n, 5, 'a policy with another duration, such as a reloaded one, ignores what was remembered')
    a.store.now += MINUTE
    a.script.push(a.responded(401))
    t.match(await a.get(cached), { status: 401 })
    a.script.push(a.responded(500))
    await a.get(cached)
    t.equal(a.n, 7, 'a refusal is not remembered')
  })
  await t.test('a waiting duplicate is authorized on arrival and again before its answer', async (t) => {
    const waits = route({ ...policy, inFlight: { mode: 'wait', wait: MINUTE, status: 409 } })
    const a = replica(t)
    const first = await a.working({ route: waits })
    a.script.push(a.responded(401))
    t.match(await a.get({ route: waits }), { status: 401 })
    a.script.push(a.responded(200), a.responded(401))
    const held = a.get({ route: waits })
    while (a.ports.waiters.size === 0) await new Promise(setImmediate)
    await first.end()
    t.match(await held, { status: 401, code: 'replay_forbidden', bytes: null })
    const brief = route({ ...policy, inFlight: { mode: 'wait', wait: 1, status: 409 } })
    const b = replica(t)
    const running = await b.working({ route: brief })
    t.match(await b.get({ route: brief }), { code: 'idempotency_key_in_progress' })
    t.equal(b.n, 2, 'its wait ended without an outcome to authorize')
    await running.end()
  })
})

void t.test('§5 callers by verified token', async (t) => {
  const jwt = { jwks: null, keyFile: 'x', issuer: null, audience: [] }
  const policy = route({
    scope: { ...SCOPE, caller: [{ kind: 'jwt', name: 'sub' }], callerIsDefault: false, jwt },
  })
  const by = (sub: unknown) => ({ kind: 'claims', claims: { sub } }) as const
  await t.test('S04 the same sub is the same caller, a different sub is not', async (t) => {
    const store = new Store()
    const [old, rotated, other] = [by('1'), by('1'), by('2')].map((verified) =>
      replica(t, { store, verified }),
    )
    const first = await old?.get({ route: policy })
    t.equal(first?.status, 201)
    t.equal((await rotated?.get({ route: policy }))?.bytes, first?.bytes)
    t.equal((await other?.get({ route: policy }))?.replayed, false)
  })
  await t.test('S04 a forged token is refused, even where anonymous callers share', async (t) => {
    const forged = replica(t, { verified: { kind: 'refused', detail: 'the signature does not verify' } })
    await refused(t, forged, { route: policy }, 'idempotency_caller_missing', {
      status: 401,
      retry: 'no',
      retryAfter: null,
    })
    const none = replica(t, { verified: { kind: 'absent' } })
    t.match(await none.get({ route: policy, anonymous: true }), { status: 201 }, 'no token at all: anonymous')
    const basic = await refused(t, none, { route: policy }, 'idempotency_caller_missing')
    t.match(basic, { status: 401 }, 'a caller with another scheme is not anonymous')
  })
  await t.test('an unavailable key set gets 503, to retry with the same key', async (t) => {
    const blind = replica(t, { verified: { kind: 'unavailable', detail: 'the key set does not answer' } })
    const answer = await refused(t, blind, { route: policy }, 'idempotency_caller_missing')
    t.match(answer, { status: 503, retryAfter: 1, retry: 'same-key' })
    t.equal(blind.n, 0)
  })
  await t.test('§3.1 the caller is not checked where there is no key and none is required', async (t) => {
    const from = [
      { kind: 'header', name: 'idempotency-key' } as const,
      { kind: 'json', pointer: '/id' } as const,
    ]
    const optional = route({ ...policy, key: { ...KEY, from, presence: 'optional' } })
    const blind = replica(t, { verified: { kind: 'unavailable', detail: 'x' } })
    const keyless = { key: null, route: optional, body: '{}' }
    t.match(await blind.get(keyless), { status: 201 })
    t.equal(blind.trace.outcome, 'passed')
    t.match(await blind.get({ ...keyless, body: '{"id":"1"}' }), { status: 503 })
    t.match(await blind.get({ ...keyless, key: 'k' }), { status: 503 })
    const derive = { json: ['/id'], form: [], headers: [], path: false, bucket: MINUTE }
    const derived = {
      ...keyless,
      route: route({ ...optional, key: { ...KEY, derive, presence: 'optional' } }),
    }
    t.match(await blind.get(derived), { status: 201 })
    t.match(await blind.get({ ...derived, body: '{"id":"1"}' }), { status: 503 })
    t.equal(blind.store.calls, 0)
    const strange = await queryStatus(blind.ports, blind.call(keyless))
    t.match(strange, { kind: 'problem', refusal: { code: 'idempotency_caller_missing' } })
  })
  await t.test('an empty Authorization counts as none', async (t) => {
    const none = replica(t, { verified: { kind: 'absent' } })
    const call = none.call({ route: policy })
    const headers = ['Idempotency-Key', 'k', 'Authorization', ' ']
    t.match(seen(await guard(none.ports, { ...call, headers })), { status: 201 })
  })
})

void t.test('§4 keys are issued by the store’s clock, and refused with 503 while it is down', async (t) => {
  const issuer = { issue: async (now: number) => ({ key: 'k', expiresAt: now + HOUR }) }
  const a = replica(t)
  t.same(await issueKey(a.ports, issuer), { kind: 'issued', key: 'k', expiresAt: a.store.now + HOUR })
  a.store.fault = () => 'down'
  t.match(await issueKey(a.ports, issuer), {
    kind: 'problem',
    refusal: { code: 'idempotency_store_unavailable', status: 503, retryAfter: 1 },
  })
  a.store.fault = () => new Error('a bug')
  await t.rejects(issueKey(a.ports, issuer), { message: 'a bug' })
})

void t.test('§13 the same operation under a new key', async (t) => {
  await t.test('is counted within a minute, for the same caller only', async (t) => {
    const a = replica(t)
    const regenerated = () => a.events.filter(([event]) => event === 'regenerated').length
    await a.get({ key: '1' })
    await a.get({ key: '1' })
    t.equal(regenerated(), 0, 'a replay')
    await a.get({ key: '2' })
    t.equal(regenerated(), 1)
    await a.get({ key: '3', body: '{"amount":2}' })
    await a.get({ key: '4', anonymous: true })
    t.equal(regenerated(), 1)
    a.store.now += MINUTE
    a.script.push(NOT_SENT)
    await a.get({ key: '5' })
    t.equal(regenerated(), 1)
    await a.get({ key: '6' })
    await a.get({ key: '5' })
    t.equal(regenerated(), 2, 'a retry of what was not executed has no new key')
  })
})

void t.test('§6 status.path', async (t) => {
  const ask = async (a: Replica, over: Parameters<Replica['call']>[0] = {}) =>
    queryStatus(a.ports, a.call(over))
  await t.test('reports the state and changes nothing', async (t) => {
    const a = replica(t)
    t.match(await ask(a), { kind: 'absent' })
    const first = await a.working()
    const before = await a.store.dump()
    const since = a.store.now
    t.match(await ask(a), {
      kind: 'found',
      id: a.id,
      state: 'in_progress',
      since,
      retryAfter: LEASE / SECOND,
    })
    a.store.now += LEASE / 3
    t.match(await ask(a), { retryAfter: ((2 / 3) * LEASE) / SECOND }, 'what remains of the lease')
    a.store.now += (2 / 3) * LEASE
    t.match(await ask(a), { state: 'unknown', since: since + LEASE, retryAfter: 1 })
    t.same(await a.store.dump(), before)
    await first.end()
    const { state, retryAfter, ...more } = (await ask(a)) as Extract<StatusReply, { kind: 'found' }>
    t.same([state, more.since], ['completed', a.store.now])
    t.equal(retryAfter, null)
    a.store.now += TTL
    t.match(await ask(a), { kind: 'absent' })
    t.equal(a.traces.length, 1, 'status queries are not counted as requests')
  })
  await t.test('reports absent after ttl, even with a tombstone', async (t) => {
    const a = replica(t)
    const policy = route({ tombstone: HOUR })
    await a.get({ route: policy })
    a.store.now += TTL
    t.match(await ask(a, { route: policy }), { kind: 'absent' })
  })
  await t.test('reports failed_retryable and unknown', async (t) => {
    const a = replica(t)
    a.script.push(NOT_SENT)
    await a.get()
    t.match(await ask(a), { state: 'failed_retryable', retryAfter: 1 })
    a.script.push(BROKEN)
    await a.get()
    t.match(await ask(a), { state: 'unknown', since: a.store.now, retryAfter: LEASE / SECOND })
  })
  await t.test('reports what only this replica knows', async (t) => {
    const a = replica(t)
    const bypass = { route: route({ onStoreUnavailable: 'bypass' }) }
    a.store.fault = () => 'down'
    const first = await a.working(bypass)
    t.match(await ask(a, bypass), { kind: 'found', state: 'in_progress', since: null })
    await first.end()
    t.match(await ask(a, bypass), { kind: 'found', state: 'completed', since: null, retryAfter: null })
    a.store.fault = () => null
    await a.ports.settler.flush()
  })
  await t.test('is refused without a valid key, without permission and while the store fails', async (t) => {
    const a = replica(t)
    const code = async (over: Parameters<Replica['call']>[0]) => {
      const answer = await ask(a, over)
      return answer.kind === 'problem' ? answer.refusal.code : answer.kind
    }
    t.equal(await code({ key: null }), 'idempotency_key_missing')
    t.equal(await code({ key: '' }), 'idempotency_key_invalid')
    const fromBody = route({ key: { ...KEY, from: [{ kind: 'json', pointer: '/id' }] } })
    t.equal(await code({ key: null, route: fromBody }), 'idempotency_key_missing')
    const authorized = route({ authorizeReplay: { path: '/me', cache: 0 } })
    a.script.push(a.responded(403))
    t.equal(await code({ route: authorized }), 'replay_forbidden')
    a.store.fault = () => 'down'
    t.equal(await code({}), 'idempotency_store_unavailable')
    t.match(await ask(a), { refusal: { detail: 'the store does not answer' } })
    a.store.fault = () => new CorruptRecord('x')
    t.equal(await code({}), 'idempotency_store_unavailable')
    t.match(await ask(a), { refusal: { detail: /cannot be read/ } })
    a.store.fault = () => new Error('a bug')
    await t.rejects(ask(a), { message: 'a bug' })
  })
  await t.test('needs an in-flight place, and asks nothing for a client that has left', async (t) => {
    const a = replica(t, { maxInFlight: 0 })
    t.match(await ask(a), { kind: 'problem', refusal: { code: 'overloaded', retryAfter: 1 } })
    t.equal(a.ports.inFlight.count, 0)
    const one = replica(t, { maxInFlight: 1 })
    for (const fault of [null, new Error('a bug'), null]) {
      const there = new Gate()
      one.store.gate = () => there.pass()
      one.store.fault = () => fault
      const asked = ask(one).catch((error: Error) => error.message)
      await there.reached
      t.equal(one.ports.inFlight.count, 1)
      t.match(await ask(one), { refusal: { code: 'overloaded' } }, 'while another one is asked')
      there.open()
      t.match(await asked, fault === null ? { kind: 'absent' } : 'a bug')
      t.equal(one.ports.inFlight.count, 0)
    }
    const b = replica(t)
    t.same(await ask(b, { gone: () => true }), { kind: 'none', facts: { outcome: null } })
    t.equal(b.store.calls, 0)
  })
  await t.test('is the Location of a 202 in-progress answer', async (t) => {
    const policy = route({ inFlight: { mode: 'reject', wait: 0, status: 202 } })
    const a = replica(t)
    const first = await a.working({ route: policy })
    t.match(await a.get({ route: policy }), { status: 202, proxyHeaders: ['Location', '/status'] })
    await first.end()
  })
})
