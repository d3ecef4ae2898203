import { gzipSync } from 'node:zlib'
import t, { type Test } from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import type { ShadowVerdict } from '../../src/protect/outcomes.ts'
import type { ShadowSummary } from '../../src/protect/request.ts'
import { Shadow } from '../../src/shadow/shadow.ts'
import { CorruptRecord, InGrace, OutOfPhase } from '../../src/store/register.ts'
import type { Forwarded, TappedExchange } from '../../src/upstream/port.ts'
import {
  BROKEN,
  HOUR,
  LEASE,
  type Options,
  type Replica,
  replica,
  route,
  type Sent,
  Store,
  Stream,
  TTL,
  until,
} from '../protect/harness.ts'

/** The exchange of a forwarded request, under the test's control. */
class Exchange implements TappedExchange {
  readonly #end = Promise.withResolvers<Forwarded>()
  readonly ended: Promise<Forwarded> = this.#end.promise
  over = false
  ignored = 0
  end(result: Forwarded): this {
    this.over = true
    this.#end.resolve(result)
    return this
  }
  break(error: Error): this {
    this.over = true
    this.#end.reject(error)
    return this
  }
  ignore(): void {
    this.ignored++
    if (!this.over) this.end({ proof: 'unknown', reason: 'ignored', timedOut: false, status: null })
  }
}

const SHADOW = route({ mode: 'shadow' })
const NOT_SENT: Forwarded = { proof: 'not_sent', reason: 'connection refused' }

interface Shadowed {
  readonly replica: Replica
  readonly shadow: Shadow
  readonly told: [ShadowVerdict, ShadowSummary][]
  verdicts(): ShadowVerdict[]
  /** Resolves when a followed request has its claim. */
  claimed(): Promise<void>
  /** Follows a request; resolves when the following ends. */
  follow(exchange: Exchange, over?: Sent): Promise<void>
  /** The same, answered at once; resolves to the verdict. */
  pass(result: Forwarded | undefined, over?: Sent): Promise<ShadowVerdict | undefined>
}

function shadowed(t: Test, options: Options = {}): Shadowed {
  const one = replica(t, options)
  const told: [ShadowVerdict, ShadowSummary][] = []
  const shadow = new Shadow(
    Object.assign(one.ports, { pause: () => new Promise((done) => setImmediate(done)) }),
    (trace, verdict) => void told.push([verdict, { ...trace }]),
  )
  const follow = async (exchange: Exchange, over: Sent = {}): Promise<void> => {
    const call = one.call({ route: SHADOW, ...over })
    if (shadow.enter(call)) await shadow.observe(call, exchange)
  }
  t.teardown(() => {
    shadow.close()
    if (shadow.size !== 0 || one.bytes.held !== 0)
      throw new Error(`${shadow.size} places and ${one.bytes.held} bytes were not given back`)
  })
  return {
    replica: one,
    // The first identifies the record.
    claimed: () =>
      until(async () => one.store.ids.size > 0 && (await one.store.read(one.id))?.state === 'in_progress'),
    shadow,
    told,
    verdicts: () => told.map(([verdict]) => verdict),
    follow,
    async pass(result, over) {
      await follow(new Exchange().end(result ?? one.responded()), over)
      return told.at(-1)?.[0]
    },
  }
}

void t.test('O06 the first answer completes its record; the next is replay_same or _differs', async (t) => {
  const a = shadowed(t)
  t.equal(await a.pass(undefined), 'first')
  const record = await a.replica.store.read(a.replica.id)
  t.match(record, { state: 'completed', attempts: 1, result: { kept: true, response: { status: 201 } } })
  t.match(a.told[0]?.[1], { before: 'absent', after: 'completed', id: a.replica.id })
  t.equal(await a.pass(undefined), 'replay_same')
  t.equal(await a.pass(a.replica.responded(201, '{"id":"p2"}')), 'replay_differs')
  t.equal(await a.pass(a.replica.responded(200)), 'replay_differs')
  t.equal(await a.pass(BROKEN), 'not_compared')
  t.same(await a.replica.store.read(a.replica.id), record, 'the record stays as the first made it')
  const replayed = await a.replica.get()
  t.match(replayed, { status: 201, replayed: true }, 'enforce replays it')
  t.equal(a.replica.n, 0, 'and executes nothing')
})

void t.test('headers that always differ or that a replay leaves out are not compared', async (t) => {
  const policy = route({ mode: 'shadow', excludeHeaders: new Set(['x-secret']) })
  const answer = (a: Shadowed, headers: string[]): Forwarded => {
    const made = a.replica.responded()
    if (made.proof !== 'responded') throw new Error('unreachable')
    return { ...made, response: { ...made.response, headers } }
  }
  const a = shadowed(t)
  const first = ['Date', 'yesterday', 'X-Request-Id', '1', 'X-Secret', 's', 'A', '1', 'B', '2', 'A', '3']
  t.equal(await a.pass(answer(a, first), { route: policy }), 'first')
  const same = ['b', ' 2', 'a', '1', 'A', '3', 'date', 'today', 'x-request-id', '2', 'X-Secret', 't']
  t.equal(await a.pass(answer(a, same), { route: policy }), 'replay_same')
  const swapped = ['A', '3', 'A', '1', 'B', '2']
  t.equal(await a.pass(answer(a, swapped), { route: policy }), 'replay_differs')
})

void t.test('a response that is not kept is recorded as enforce would, and not compared', async (t) => {
  const a = shadowed(t)
  const over = { route: route({ mode: 'shadow', keep: 'outcome' }) }
  t.equal(await a.pass(undefined, over), 'first')
  t.match(await a.replica.store.read(a.replica.id), { result: { kept: false, why: 'outcome_only' } })
  t.equal(await a.pass(undefined, over), 'response_unavailable')

  const b = shadowed(t)
  const stream = new Stream()
  const exchange = new Exchange().end(stream.reply())
  const following = b.follow(exchange)
  await until(() => stream.drained === 1)
  t.match(await b.replica.store.read(b.replica.id), { state: 'in_progress' })
  stream.end('complete')
  await following
  t.same(b.verdicts(), ['first'])
  t.match(await b.replica.store.read(b.replica.id), { state: 'completed', result: { why: 'streamed' } })

  const c = shadowed(t)
  const broken = new Stream()
  const other = c.follow(new Exchange().end(broken.reply()))
  broken.end('broken')
  await other
  t.same(c.verdicts(), ['upstream_failed'])
  t.match(await c.replica.store.read(c.replica.id), { state: 'unknown' })
})

void t.test('what was not sent or refused by status frees the key; what broke stays unknown', async (t) => {
  const a = shadowed(t)
  t.equal(await a.pass(NOT_SENT), 'upstream_unreachable')
  t.match(await a.replica.store.read(a.replica.id), { state: 'failed_retryable' })
  t.equal(await a.pass(a.replica.responded(429)), 'retry')
  t.match(await a.replica.store.read(a.replica.id), { state: 'failed_retryable', attempts: 2 })
  t.equal(await a.pass(BROKEN), 'upstream_failed')
  t.match(await a.replica.store.read(a.replica.id), { state: 'unknown', attempts: 3 })
  t.match(await a.replica.get(), { code: 'idempotency_outcome_unknown' })
})

void t.test('another payload is misuse, and leaves the record alone', async (t) => {
  const a = shadowed(t)
  await a.pass(undefined)
  const before = await a.replica.store.dump()
  const exchange = new Exchange()
  await a.follow(exchange, { body: '{"amount":2}' })
  t.same(a.verdicts(), ['first', 'misuse'])
  t.equal(exchange.ignored, 1, 'the upstream’s answer is not collected')
  t.same(await a.replica.store.dump(), before)
})

void t.test('a request that meets a tombstone is expired', async (t) => {
  const a = shadowed(t)
  const over = { route: route({ mode: 'shadow', tombstone: HOUR }) }
  await a.pass(undefined, over)
  a.replica.store.now += TTL
  t.equal(await a.pass(undefined, over), 'expired')
  t.match(a.told[1]?.[1], { before: 'expired' })
})

void t.test('a retry over an unknown record completes it, or changes nothing', async (t) => {
  for (const [result, state] of [
    [null, 'completed'],
    [NOT_SENT, 'unknown'],
    [BROKEN, 'unknown'],
  ] as const) {
    const a = shadowed(t)
    await a.pass(BROKEN)
    const before = await a.replica.store.read(a.replica.id)
    t.equal(await a.pass(result ?? undefined), 'unknown')
    const after = await a.replica.store.read(a.replica.id)
    t.match(after, { state })
    if (state === 'unknown') t.same(after, before, 'nothing was learnt: nothing is written')
    else t.match(after, { attempts: 2, createdAt: before?.createdAt })
    const code = state === 'unknown' ? 'idempotency_outcome_unknown' : null
    t.match(await a.replica.get(), { code })
    t.equal(a.replica.n, 0, 'enforce never executes it again')
  }
})

void t.test('after a change of recipe an unchanged request still completes its record', async (t) => {
  const a = shadowed(t)
  await a.pass(BROKEN)
  const raw = route({ mode: 'shadow', fingerprint: { ...SHADOW.fingerprint, body: 'raw' } })
  t.equal(await a.pass(undefined, { route: raw }), 'unknown')
  t.match(await a.replica.store.read(a.replica.id), { state: 'completed', attempts: 2 })
})

void t.test('a duplicate over a lapsed lease completes the record; the late owner is refused', async (t) => {
  const a = shadowed(t)
  const slow = new Exchange()
  const following = a.follow(slow)
  await a.claimed()
  const b = shadowed(t, { store: a.replica.store })
  a.replica.store.now += LEASE
  t.equal(await b.pass(undefined), 'unknown')
  const record = await a.replica.store.read(a.replica.id)
  t.match(record, { state: 'completed', attempts: 2 })
  slow.end(NOT_SENT)
  await following
  t.same(await a.replica.store.read(a.replica.id), record)
})

void t.test('a retry on a lenient route claims over a lapsed lease', async (t) => {
  const over = { route: route({ mode: 'shadow', profile: 'lenient' }) }
  const a = shadowed(t)
  const silent = new Exchange()
  const following = a.follow(silent, over)
  await a.claimed()
  const b = shadowed(t, { store: a.replica.store })
  a.replica.store.now += LEASE
  t.equal(await b.pass(undefined, over), 'retry')
  t.match(await a.replica.store.read(a.replica.id), { state: 'completed', attempts: 2 })
  t.same(b.replica.said('leaseExpired'), [])
  silent.end(BROKEN)
  await following
  t.same(a.replica.said('completed'), ['stale'])
})

/** What an owner and the duplicate beside it did, and what enforce must find afterwards. */
const BESIDE: readonly (readonly [
  owner: Forwarded | null,
  second: Forwarded | null,
  state: string,
  attempts: number,
])[] = [
  [null, null, 'completed', 1],
  [null, BROKEN, 'completed', 1],
  [NOT_SENT, null, 'completed', 2],
  [NOT_SENT, BROKEN, 'unknown', 2],
  [NOT_SENT, NOT_SENT, 'failed_retryable', 1],
  [BROKEN, null, 'completed', 2],
  [BROKEN, NOT_SENT, 'unknown', 1],
]

void t.test('with a duplicate beside a request, the key is freed only if neither executed', async (t) => {
  for (const order of ['owner ends first', 'duplicate ends first'] as const)
    for (const where of ['one replica', 'two replicas'] as const)
      for (const [owner, second, state, attempts] of BESIDE) {
        const title = `${order}, ${where}: ${owner?.proof ?? 'done'}, ${second?.proof ?? 'done'}`
        const a = shadowed(t)
        const b = where === 'one replica' ? a : shadowed(t, { store: a.replica.store })
        const [one, two] = [new Exchange(), new Exchange()]
        const following = [a.follow(one)]
        await a.claimed()
        following.push(b.follow(two))
        await until(() => b.verdicts().includes('in_progress'))
        const ends = [
          () => one.end(owner ?? a.replica.responded(201, 'owner')),
          () => two.end(second ?? b.replica.responded(201, 'second')),
        ]
        if (order === 'duplicate ends first') ends.reverse()
        for (const end of ends) {
          end()
          for (let i = 0; i < 10; i++) await new Promise((next) => setImmediate(next))
        }
        await Promise.all(following)
        t.match(await a.replica.store.read(a.replica.id), { state, attempts }, title)
        t.equal(b.verdicts().filter((verdict) => verdict === 'in_progress').length, 1)
      }
})

void t.test('what ran beside the first request counts, even if a header counts since a reload', async (t) => {
  const a = shadowed(t)
  const { fingerprint } = SHADOW
  const reloaded = route({ mode: 'shadow', fingerprint: { ...fingerprint, headers: ['x-tenant'] } })
  const headers = ['X-Tenant', '1']
  const [one, two] = [new Exchange(), new Exchange()]
  const following = [a.follow(one, { headers })]
  await a.claimed()
  following.push(a.follow(two, { headers, route: reloaded }))
  await until(() => a.verdicts().includes('in_progress'))
  one.end(NOT_SENT)
  two.end(a.replica.responded(201, 'second'))
  await Promise.all(following)
  t.match(await a.replica.store.read(a.replica.id), { state: 'completed' })
})

void t.test('a duplicate on a route that lets duplicates wait is waited', async (t) => {
  const a = shadowed(t)
  const over = { route: route({ mode: 'shadow', inFlight: { mode: 'wait', wait: 10_000, status: 409 } }) }
  const [one, two] = [new Exchange(), new Exchange()]
  const following = [a.follow(one, over), a.follow(two, over)]
  await until(() => a.verdicts().length === 1)
  t.same(a.verdicts(), ['waited'])
  two.end(a.replica.responded())
  one.end(a.replica.responded())
  await Promise.all(following)
  t.same(a.verdicts(), ['waited', 'first'])
})

void t.test('a retry of an answered request is a replay even if the store has not caught up', async (t) => {
  const a = shadowed(t)
  const gate = Promise.withResolvers<void>()
  a.replica.store.gate = () => gate.promise
  const following = [a.pass(undefined), a.pass(undefined), a.pass(undefined, { body: 'other' })]
  for (let i = 0; i < 10; i++) await new Promise((next) => setImmediate(next))
  t.same(a.verdicts(), [], 'nothing is decided yet')
  gate.resolve()
  await Promise.all(following)
  t.same(a.verdicts().sort(), ['first', 'misuse', 'replay_same'])
})

void t.test('V07 a record made in shadow mode says that the upstream was told nothing', async (t) => {
  const a = shadowed(t)
  t.equal(await a.pass(BROKEN), 'upstream_failed')
  const record = await a.replica.store.read(a.replica.id)
  t.equal(record?.state, 'unknown')
  t.equal(record?.received, undefined, 'otherwise its "not found" would free what may have been executed')
})

void t.test('what enforce would refuse before its claim gets that verdict, and no record', async (t) => {
  const strict = route({ mode: 'shadow', profile: 'strict' })
  const issued = { ...SHADOW, key: { ...SHADOW.key, issuedOnly: true } }
  const closed = { ...SHADOW, scope: { ...SHADOW.scope, anonymous: 'reject' as const } }
  const optional = {
    ...SHADOW,
    key: { ...SHADOW.key, from: [{ kind: 'json', pointer: '/id' }], presence: 'optional' },
  }
  // It decodes to more than there is room for.
  const long = { kind: 'body', body: gzipSync(Buffer.alloc(1024 ** 2 + 1)), release() {} } as const
  const roomy = { ...SHADOW, limits: { ...SHADOW.limits, request: 2 * 1024 ** 2 } }
  const cases: readonly (readonly [ShadowVerdict, Sent, Options?])[] = [
    ['key_missing', { key: null }],
    ['key_invalid', { key: 'a,b' }],
    ['caller_missing', { anonymous: true, route: closed }],
    ['request_too_large', { reading: { kind: 'too_large' } }],
    ['overloaded', { reading: { kind: 'no_room' } }],
    ['overloaded', { headers: ['Content-Encoding', 'gzip'], reading: long, route: roomy }],
    ['store_unavailable', { route: strict }, { fitness: 'unfit' }],
    ['key_invalid', { route: issued }, { issued: 'forged' }],
    ['expired', { route: issued }, { issued: 'expired' }],
    ['passed', { key: null, route: optional as RoutePolicy }],
    // Breaks the rule that what shadow sees has been sent.
    ['error', { gone: () => true }],
  ]
  for (const [verdict, over, options] of cases) {
    const a = shadowed(t, options)
    const exchange = new Exchange()
    await a.follow(exchange, over)
    t.same(a.verdicts(), [verdict])
    t.equal(exchange.ignored, 1)
    if (verdict !== 'error') t.same(await a.replica.store.dump(), {}, verdict)
  }
  const a = shadowed(t)
  const limited = { route: { ...SHADOW, limits: { ...SHADOW.limits, newKeys: { count: 1, per: HOUR } } } }
  t.equal(await a.pass(undefined, { ...limited, key: 'one-0123456789abcdef' }), 'first')
  t.equal(await a.pass(undefined, { ...limited, key: 'two-0123456789abcdef' }), 'rate_limited')
})

void t.test('an incomplete body is request_aborted or upstream_unreachable, and no record', async (t) => {
  for (const kind of ['aborted', 'timeout'] as const) {
    const a = shadowed(t)
    const over = { reading: { kind } }
    t.equal(await a.pass(BROKEN, over), 'request_aborted')
    t.equal(await a.pass(undefined, over), 'request_aborted')
    t.equal(await a.pass(NOT_SENT, over), 'upstream_unreachable')
    t.same(await a.replica.store.dump(), {})
  }
})

void t.test('the answer to a request that is not followed is released or drained', async (t) => {
  const a = shadowed(t)
  await a.pass(a.replica.responded(), { key: null })
  const stream = new Stream()
  await a.pass(stream.reply(), { key: null })
  await until(() => stream.drained === 1)
  t.same(a.verdicts(), ['key_missing', 'key_missing'])
})

void t.test('shadow follows at most limits.inFlight requests at once', async (t) => {
  const a = shadowed(t, { maxInFlight: 1 })
  const exchange = new Exchange()
  const following = a.follow(exchange)
  t.equal(a.shadow.size, 1)
  await a.follow(new Exchange(), { key: 'other-0123456789abcdef' })
  t.same(a.verdicts(), ['overloaded'])
  exchange.end(a.replica.responded())
  await following
  t.same(a.verdicts(), ['overloaded', 'first'])
})

void t.test('shadow follows more requests once limits.inFlight is raised', async (t) => {
  const a = shadowed(t, { maxInFlight: 1 })
  const exchange = new Exchange()
  const following = a.follow(exchange)
  a.replica.ports.inFlight.resize(2)
  const other = new Exchange()
  const also = a.follow(other, { key: 'other-0123456789abcdef' })
  t.equal(a.shadow.size, 2)
  for (const one of [exchange, other]) one.end(a.replica.responded())
  await Promise.all([following, also])
  t.same(a.verdicts(), ['first', 'first'])
})

void t.test('O06 a store that is down is a verdict; the outcome is written when it is back', async (t) => {
  const grace = new InGrace(0, 0, 60_000)
  const phase = new OutOfPhase('the phase of the others is not known', false)
  for (const fault of ['down', 'dropped', 'lost', 'late', 'unreplicated', grace, phase] as const) {
    const a = shadowed(t)
    a.replica.store.fault = () => fault
    t.equal(await a.pass(undefined), 'store_unavailable')
    t.equal(a.replica.ports.settler.size, 1)
    a.replica.store.fault = () => null
    await a.replica.store.arrive()
    t.ok(await a.replica.ports.settler.flush())
    t.match(await a.replica.store.read(a.replica.id), { state: 'completed' }, String(fault))
    t.match(await a.replica.get(), { replayed: true })
    t.equal(a.replica.n, 0)
  }
})

void t.test('an outcome that the store does not take is held, and answers enforce meanwhile', async (t) => {
  const a = shadowed(t)
  a.replica.store.fails('swap', 'down')
  t.equal(await a.pass(undefined), 'first')
  t.match(await a.replica.get(), { replayed: true })
  t.equal(a.replica.n, 0)
  t.ok(await a.replica.ports.settler.flush())
})

void t.test('shadow holds at most 1000 outcomes in the settler', async (t) => {
  const a = shadowed(t)
  a.replica.store.fault = () => 'down'
  for (let i = 0; i < 1000; i++) await a.pass(undefined, { key: `key-${i}-0123456789abcdef` })
  t.equal(a.replica.ports.settler.size, 1000)
  t.equal(await a.pass(undefined, { key: 'one-more-0123456789' }), 'store_unavailable')
  t.equal(a.replica.ports.settler.size, 1000)
  a.replica.close()
})

void t.test('a record that cannot be read is store_unavailable, and reported', async (t) => {
  const a = shadowed(t)
  a.replica.store.fails('put', new CorruptRecord('unknown version'))
  t.equal(await a.pass(undefined), 'store_unavailable')
  t.match(a.replica.troubles(), [/cannot be read/])
})

/** Leaves the record unknown. */
async function besideUnknown(a: Shadowed): Promise<void> {
  await a.pass(BROKEN)
  t.match(await a.replica.store.read(a.replica.id), { state: 'unknown' })
}

void t.test('a duplicate with a long body does not block the event loop', async (t) => {
  const a = shadowed(t)
  const over: Sent = {
    route: route({ mode: 'shadow', fingerprint: { ...SHADOW.fingerprint, body: 'json' } }),
    headers: ['Content-Type', 'application/json'],
    body: `[${'{"b":[1.0,"x"],"a":null},'.repeat(20_000)}1]`,
  }
  await a.pass(BROKEN, over)
  const exchange = new Exchange()
  const following = a.follow(exchange, over)
  await until(() => a.verdicts().length === 2)
  t.same(a.verdicts(), ['upstream_failed', 'unknown'])

  let turns = 0
  let isOver = false
  const count = (): void => {
    turns++
    if (!isOver) setImmediate(count)
  }
  setImmediate(count)
  exchange.end(a.replica.responded())
  await following
  isOver = true
  t.ok(turns > 10, `${turns} turns of the event loop`)
  t.match(await a.replica.store.read(a.replica.id), { state: 'completed', attempts: 2 })
})

void t.test('a duplicate’s outcome that the store does not take is retried', async (t) => {
  for (const fault of ['down', 'lost', 'dropped', 'full'] as const)
    for (const at of [0, 1]) {
      const a = shadowed(t)
      await besideUnknown(a)
      // Of the two steps that write it: first in the owner's place, then as a takeover.
      if (at === 1) a.replica.store.next.push({ op: 'swap', fault: null })
      a.replica.store.next.push({ op: 'swap', fault })
      t.equal(await a.pass(undefined), 'unknown')
      t.match(
        await a.replica.store.read(a.replica.id),
        { state: 'completed', attempts: 2 },
        `${fault} at ${at}`,
      )
      const kept = (await a.replica.get()).replayed
      t.equal(kept, fault !== 'full', 'without room the body is not kept')
      t.same(a.replica.troubles(), [])
    }
})

void t.test('a duplicate’s outcome that the store keeps refusing is given up, reported once', async (t) => {
  const a = shadowed(t)
  await besideUnknown(a)
  const before = await a.replica.store.dump()
  a.replica.store.fault = ({ op }) => (op === 'swap' ? 'down' : null)
  for (let i = 0; i < 2; i++) t.equal(await a.pass(undefined), 'unknown')
  t.same(a.replica.troubles(), ['the outcomes of forwarded duplicates could not be recorded'])
  t.same(await a.replica.store.dump(), before)
  t.equal(await a.pass(BROKEN), 'unknown')
  a.replica.store.fault = ({ op }) => (op === 'swap' ? new CorruptRecord('unknown version') : null)
  t.equal(await a.pass(undefined), 'unknown', 'what cannot be read is left as it is')
  a.replica.store.fault = ({ op }) => (op === 'swap' ? new Error('a bug') : null)
  t.equal(await a.pass(undefined), 'unknown')
  t.match(a.replica.troubles()[1], /internal error/)
})

void t.test('at most half of the places wait for a store that hangs', async (t) => {
  const a = shadowed(t, { maxInFlight: 2 })
  await besideUnknown(a)
  const hung = Promise.withResolvers<void>()
  a.replica.store.gate = async ({ op }) => (op === 'swap' ? hung.promise : undefined)
  const following = a.pass(undefined)
  await until(() => a.verdicts().length === 2)
  for (let i = 0; i < 10; i++) await new Promise((next) => setImmediate(next))
  t.equal(await a.pass(undefined), 'unknown')
  t.same(a.replica.troubles(), ['the outcomes of forwarded duplicates could not be recorded'])
  hung.resolve()
  await following
  t.match(await a.replica.store.read(a.replica.id), { state: 'completed' })
})

void t.test('a duplicate’s outcome is written if the record is gone, not over another payload', async (t) => {
  const a = shadowed(t)
  await besideUnknown(a)
  const exchange = new Exchange()
  let following = a.follow(exchange)
  await until(() => a.verdicts().length === 2)
  a.replica.store.now += 31 * TTL
  exchange.end(a.replica.responded())
  await following
  t.match(await a.replica.store.read(a.replica.id), { state: 'completed', attempts: 1 })

  const b = shadowed(t)
  await besideUnknown(b)
  const late = new Exchange()
  following = b.follow(late)
  await until(() => b.verdicts().length === 2)
  b.replica.store.now += 31 * TTL
  t.equal(await b.pass(undefined, { body: 'other' }), 'first')
  const record = await b.replica.store.read(b.replica.id)
  late.end(b.replica.responded())
  await following
  t.same(await b.replica.store.read(b.replica.id), record)
})

void t.test('of two duplicates that complete a record at the same time, the first one stays', async (t) => {
  const a = shadowed(t)
  await besideUnknown(a)
  const b = shadowed(t, { store: a.replica.store })
  let swaps = 0
  a.replica.store.gate = async ({ op, by }) => {
    if (op === 'swap' && by === a.replica && ++swaps === 2) await b.pass(b.replica.responded(200, 'other'))
  }
  t.equal(await a.pass(undefined), 'unknown')
  t.match(await a.replica.store.read(a.replica.id), { attempts: 2, result: { response: { status: 200 } } })
})

void t.test('a first answer that this replica holds wins over a duplicate’s', async (t) => {
  const a = shadowed(t)
  const [one, two] = [new Exchange(), new Exchange()]
  const following = [a.follow(one), a.follow(two)]
  await until(() => a.verdicts().includes('in_progress'))
  a.replica.store.fails('swap', 'down')
  one.end(a.replica.responded(201, 'first'))
  two.end(a.replica.responded(201, 'second'))
  await Promise.all(following)
  t.ok(await a.replica.ports.settler.flush())
  t.match(await a.replica.store.read(a.replica.id), { state: 'completed', attempts: 1 })
})

void t.test('close ends what waits for another replica', async (t) => {
  const store = new Store()
  const a = shadowed(t, { store })
  const b = shadowed(t, { store })
  const one = new Exchange()
  const following = a.follow(one)
  await a.claimed()
  const waiting = b.pass(undefined)
  await until(() => b.verdicts().length === 1)
  t.equal(b.shadow.size, 1)
  b.shadow.close()
  await waiting
  t.equal(b.shadow.size, 0)
  one.end(a.replica.responded())
  await following
})

void t.test('a bug is one verdict and one log line, and leaves no claim behind', async (t) => {
  const a = shadowed(t)
  const error = new Error('a bug')
  await a.follow(new Exchange().break(error))
  t.same(a.verdicts(), ['error'])
  t.match(a.replica.troubles(), [/internal error in shadow mode/])
  t.match(await a.replica.store.read(a.replica.id), { state: 'unknown' })
  t.equal(a.replica.ports.running.size, 0)
  t.equal(a.replica.ports.leases.size, 0)

  const pattern = Object.assign(/x/, {
    test: () => {
      throw error
    },
  })
  t.equal(await a.pass(undefined, { route: { ...SHADOW, key: { ...SHADOW.key, pattern } } }), 'error')
  t.equal(a.told[1]?.[1].id, null)

  const b = shadowed(t)
  b.replica.store.fails('put', error)
  t.equal(await b.pass(undefined), 'error')
  t.equal(await b.pass(undefined), 'first', 'the next request has its turn')
})

void t.test('shadow holds the lease while the upstream works, and enforce sees its claim', async (t) => {
  const a = shadowed(t)
  const exchange = new Exchange()
  const following = a.follow(exchange)
  await until(() => a.replica.ports.leases.size === 1)
  t.match(await a.replica.get(), { code: 'idempotency_key_in_progress' })
  t.equal(a.replica.ports.running.size, 1, 'the drain waits for it')
  exchange.end(a.replica.responded())
  await following
  t.equal(a.replica.ports.leases.size, 0)
  t.equal(a.replica.ports.running.size, 0)
  t.same(a.replica.said('completed'), ['stored'])
  t.same(a.replica.said('claimed'), ['in_progress'], 'shadow’s own claims are counted as verdicts only')
})
