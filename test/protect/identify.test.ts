import { gzipSync } from 'node:zlib'
import t from 'tap'
import { callerName, type Identified, identify, readHead } from '../../src/protect/identify.ts'
import { type ProtectedRequest } from '../../src/protect/request.ts'
import { asking, RECONCILE, KEY as SENT } from '../reconcile/harness.ts'
import {
  BROKEN,
  HOUR,
  idle,
  LEASE,
  MINUTE,
  NOT_SENT,
  never,
  pair,
  type Replica,
  replica,
  route,
  SECOND,
  type Seen,
  type Sent,
  Store,
  UPSTREAM,
} from './harness.ts'

const { key: KEY, scope: SCOPE } = route()
const REJECT = { ...SCOPE, anonymous: 'reject' } as const
const IN_BODY = [{ kind: 'json', pointer: '/id' }] as const
const BY_HEADER = { json: [], form: [], headers: ['x-order'], path: false, bucket: null }

void t.test('§3 what the head alone decides is refused before the body is read', async (t) => {
  const optional = { ...KEY, from: IN_BODY, presence: 'optional' } as const
  const both = { ...optional, from: [...KEY.from, ...IN_BODY] }
  for (const [name, over, code] of [
    ['a missing key', { key: null }, 'idempotency_key_missing'],
    ['an invalid key', { key: '' }, 'idempotency_key_invalid'],
    ['no caller', { anonymous: true, route: route({ scope: REJECT }) }, 'idempotency_caller_missing'],
    [
      'no caller, and a key that must be in the body',
      { key: null, anonymous: true, route: route({ scope: REJECT, key: { ...KEY, from: IN_BODY } }) },
      'idempotency_caller_missing',
    ],
    [
      'no caller, and one of several keys',
      { anonymous: true, route: route({ scope: REJECT, key: both }) },
      'idempotency_caller_missing',
    ],
    ['a key that may be in the body', { key: null, route: route({ key: optional }) }, null],
    [
      'neither it nor a caller',
      { key: null, anonymous: true, route: route({ scope: REJECT, key: both }) },
      null,
    ],
    ['a derived key', { key: null, route: route({ key: { ...KEY, derive: BY_HEADER } }) }, null],
  ] as const) {
    const a = replica(t)
    const answers: Seen[] = []
    void a.get({ ...(over as Sent), upload: never }).then((one) => answers.push(one))
    await idle()
    t.same(
      answers.map((one) => one.code),
      code === null ? [] : [code],
      name,
    )
    t.equal(a.store.calls, 0)
  }
})

void t.test('§4 a key is derived from headers alone', async (t) => {
  const a = replica(t)
  const policy = route({ key: { ...KEY, derive: BY_HEADER } })
  const sent = (order: string) => ({ key: null, route: policy, headers: ['X-Order', order] })
  const first = await a.get(sent('1'))
  t.match(first, { status: 201, proxyHeaders: ['Idempotency-Key-Derived', 'true'] })
  t.match(await a.get(sent('1')), { bytes: first.bytes, replayed: true })
  t.match(await a.get(sent('2')), { status: 201, replayed: false })
  const bucketed = route({ key: { ...KEY, derive: { ...BY_HEADER, bucket: HOUR } } })
  const pings: string[] = []
  a.store.fault = ({ op }) => {
    if (op === 'ping') pings.push(op)
    return null
  }
  t.equal((await a.get({ ...sent('1'), key: 'own', route: bucketed })).status, 201)
  t.equal((await a.get(sent('3'))).status, 201)
  t.equal(pings.length, 0, 'no time counts')
  t.equal((await a.get({ ...sent('1'), route: bucketed })).status, 201)
  t.equal(pings.length, 1)
  t.match(await a.get({ key: null, route: policy }), {
    code: 'idempotency_key_missing',
    detail: /^send the header idempotency-key, or the fields that a key is derived from$/,
  })
})

void t.test('§1 the record of a derived key never gets another name', async (t) => {
  for (const [bucket, id] of [
    [null, '-BOjbmVSNRR0TGT2IWZ9G6yz_amsH-EivzIVY9nKrTY'],
    [HOUR, '3hpAVBV9S5UVu0_C5RgzFVaa-t1HjxXv5kMjUe5-xg4'],
  ] as const) {
    const a = replica(t)
    await a.get({
      key: null,
      route: route({ key: { ...KEY, derive: { ...BY_HEADER, bucket } } }),
      headers: ['X-Order', '1'],
    })
    t.equal(a.id, id)
  }
})

void t.test('what a body decodes to is held as long as the body is, or nothing is claimed', async (t) => {
  const a = replica(t)
  const encoded = (length: number) => {
    const body = gzipSync('x'.repeat(length))
    const reading = { kind: 'body', body, release: () => {} } as const
    return { headers: ['Content-Encoding', 'gzip'], reading }
  }
  const length = a.budget.most / 2 + 1
  const first = await a.working(encoded(length))
  t.equal(a.budget.held, length)
  const other = { ...encoded(length), key: 'other-0123456789abcdef' }
  t.match(await a.get(other), { code: 'overloaded', instance: null })
  t.match(await first.end(), { status: 201 })
  t.equal(a.budget.held, 0)
  t.match(await a.get(other), { status: 201 })
  t.match([a.n, a.budget.held], [2, 0])
})

/** What is known of a request once its body is there. */
async function identified(a: Replica, over: Sent, more: Partial<ProtectedRequest> = {}): Promise<Identified> {
  const request = { ...a.call(over), ...more }
  const head = await readHead(a.ports, request)
  if (head.kind !== 'head') throw new Error('no head')
  const found = await identify(a.ports, request, head, Buffer.from(over.body ?? '{"amount":1}'))
  if (found.kind !== 'identified') throw new Error('not identified')
  t.equal(request.progress.id, found.id, 'the log names the record')
  return found
}

void t.test('§9 a key is as old as the proxy or its client says, and a derived one of any age', async (t) => {
  const store = new Store()
  const sentAt = Math.floor(store.now / SECOND) * SECOND - MINUTE
  const sent = ['Repeatability-First-Sent', new Date(sentAt).toUTCString()]
  const issuedAt = sentAt - MINUTE
  const withTime = `k.${Buffer.from(JSON.stringify({ iat: issuedAt / SECOND })).toString('base64url')}.s`
  const issued = route({ key: { ...KEY, issuedOnly: true } })
  const derived = { key: null, route: route({ key: { ...KEY, derive: BY_HEADER } }) }
  const order = ['X-Order', '1']
  for (const [name, over, bornAt] of [
    ['nothing is said', {}, null],
    ['the client says it', { headers: sent }, sentAt],
    ['issued', { key: withTime, route: issued }, issuedAt],
    ['issued, and the client says something else', { key: withTime, route: issued, headers: sent }, issuedAt],
    ['issued without a time', { key: 'k', route: issued, headers: sent }, sentAt],
    ['it looks like one that was issued', { key: withTime, headers: sent }, sentAt],
    ['derived', { ...derived, headers: order }, 0],
    ['derived, and the client says something', { ...derived, headers: [...order, ...sent] }, 0],
  ] as const) {
    const a = replica(t, { store, issued: name.startsWith('issued') ? 'valid' : 'forged' })
    t.match(await identified(a, over), { bornAt, mayClaim: true }, name)
  }
})

void t.test('V07 a record keeps what the upstream will know the request by', async (t) => {
  const key = { ...KEY, forwardFence: false }
  const ids = { received: ['key', 'record'], receivedBy: UPSTREAM }
  const record = { received: ['record'], receivedBy: UPSTREAM }
  const byRecord = {
    request: { ...RECONCILE.request, path: '/payments/{record}' },
    identity: [{ pointer: '/record', value: '{record}' }],
  }
  const events = [{ kind: 'header', name: 'ce-id' }] as const
  const ofEvent = {
    key: null,
    headers: ['ce-id', 'e1', 'ce-source', '/s', 'ce-specversion', '1.0', 'ce-type', 't'],
  }
  for (const [name, policy, over, expected] of [
    ['asked by its key', asking(), {}, { key: SENT, ...ids }],
    ['asked by its key, without a fence', asking({}, { key }), {}, { key: SENT, ...ids }],
    ['asked by its key, for one host', asking({}, { scope: { ...SCOPE, host: true } }), {}, { key: null }],
    ['asked by its record', asking(byRecord), {}, { key: null, ...record }],
    ['asked by its record, without a fence', asking(byRecord, { key }), {}, { key: null }],
    ['never asked', route(), {}, { key: null, ...record }],
    ['never asked, without a fence', route({ key }), {}, { key: null }],
    ['an event', asking({}, { key: { ...KEY, from: events } }), ofEvent, { key: null, ...record }],
    ['shadow', asking({}, { mode: 'shadow' }), {}, { key: SENT, received: ['key'], receivedBy: UPSTREAM }],
    [
      'a key in the body',
      asking({}, { key: { ...KEY, from: IN_BODY } }),
      { key: null, body: '{"id":"in the body"}' },
      { key: 'in the body', ...ids },
    ],
  ] as const) {
    const { operation } = await identified(replica(t), { ...over, route: policy })
    const { key, received, receivedBy, lease } = operation()
    const isKept = 'received' in expected
    t.strictSame(
      { key, ...(isKept || received !== undefined ? { received, receivedBy } : {}) },
      expected,
      name,
    )
    t.equal(lease, isKept ? LEASE : undefined, name)
  }
  // On the way, such as by `Connection`.
  const removed = { upstreamHeaders: () => ['X', 'x'] }
  const both = asking({}, { key: { ...KEY, from: [...KEY.from, ...IN_BODY] } })
  for (const [over, told] of [
    [{ route: asking() }, undefined],
    [{ route: both }, undefined],
    [{ route: both, body: `{"id":"${SENT}"}` }, ['key']],
  ] as const) {
    const { operation } = await identified(replica(t), over, removed)
    t.strictSame(operation().received, told, 'a key whose line is removed is told in the body, or not at all')
  }
})

void t.test('§9 a record has the terms for an upstream that is told its fence, and no other', async (t) => {
  for (const forwardFence of [true, false]) {
    const { operation } = await identified(replica(t), { route: route({ key: { ...KEY, forwardFence } }) })
    t.equal(operation().completion !== undefined, forwardFence)
  }
})

void t.test('callers have different names, and whoever nothing is known of has none', async (t) => {
  const named = (...parts: (string | null)[]) => callerName({ kind: 'caller', parts })
  t.equal(callerName({ kind: 'unidentified', detail: '', cause: null, status: 401 }), null)
  t.equal(named(null), null)
  t.equal(named(null, null), null)
  t.equal(named('a'), 'a')
  const names = [named('a', null), named(null, 'a'), named('a', 'b'), named('ab'), named('a', 'b', null)]
  t.equal(new Set(names).size, names.length)
  t.notOk(names.includes(null))
})

void t.test('V07 after a silent attempt a record notes only what both attempts told', async (t) => {
  for (const silent of [true, false]) {
    const { a, b, store } = pair(t)
    if (!silent) a.script.push(NOT_SENT)
    const first = silent ? await a.working() : null
    if (!silent) await a.get()
    t.match(await store.read(a.id), { received: ['record'] }, 'its route does not ask by the key')
    store.now += LEASE
    await b.get({ route: asking({}, { onLeaseExpired: 'retry' }) })
    t.equal(b.n, 1)
    const told = silent ? ['record'] : ['key', 'record']
    t.same((await store.read(a.id))?.received, told)
    await first?.end()
  }
})

void t.test('§6 a refusal says whether a retry will find the record', async (t) => {
  const derived = (bucket: number | null) =>
    route({ key: { ...KEY, derive: { json: ['/amount'], form: [], headers: [], path: false, bucket } } })
  for (const [name, policy, key, running] of [
    ['a key', route(), SENT, true],
    ['a derived key', derived(null), null, true],
    ['a key derived for a time span', derived(1000), null, false],
    ['a key the client sent', derived(1000), SENT, true],
    ['bypass', route({ onStoreUnavailable: 'bypass' }), SENT, false],
  ] as const) {
    const a = replica(t)
    const sent = { route: policy, key }
    const first = await a.working(sent, () => BROKEN)
    t.match(await a.get(sent), { code: 'idempotency_key_in_progress', remembered: running }, name)
    t.match(await first.end(), { code: 'upstream_failed', remembered: running || name === 'bypass' }, name)
    if (name !== 'bypass') continue
    a.store.fault = () => 'down'
    a.script.push(BROKEN)
    const unclaimed = { code: 'upstream_failed', scope: 'none', remembered: false }
    t.match(await a.get({ ...sent, key: 'key-another-0123456789' }), unclaimed, 'without a claim')
  }
})
