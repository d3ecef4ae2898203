import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { REVISION } from '../../src/store/postgres/layout.ts'
import type { SqlArg } from '../../src/store/postgres/link.ts'
import {
  openPostgresStore,
  type PostgresOptions,
  type PostgresStore,
} from '../../src/store/postgres/store.ts'
import { PREFIX } from '../../src/store/record/codec.ts'
import { PartlyUnavailable } from '../../src/store/register.ts'
import { KEPT_FOR } from '../../src/store/safety.ts'
import { type FakeLinks, fakeLinks, type Sent } from '../support/fake-links.ts'
import { bytesOf, newId, newToken, SPANS } from './fixtures.ts'

// What the store asks PostgreSQL, and makes of each answer, at a time that the test passes.

type Columns = (string | null)[]
/** What one function of the schema gives, but its number; null: no answer, or that of the test. */
type Reply = Columns | null | ((args: Sent['args'], sent: Sent) => Columns | null)

interface Opened {
  readonly fake: FakeLinks
  readonly store: PostgresStore
  readonly replies: Record<string, Reply>
  /** Calls of the schema's functions: name and arguments without the number. */
  readonly calls: (readonly [name: string, ...args: SqlArg[]])[]
  readonly of: (name: string) => Opened['calls']
}

/** Questions of a new connection: the schema is there, the role has its rights, and this is the server. */
const PREPARED: readonly (readonly [RegExp, Columns])[] = [
  [/pg_is_in_recovery/, ['f', '15', '9', '1']],
  [/FROM idempotency\.layout/, ['1', String(REVISION)]],
  [/has_table_privilege/, [null, null]],
  [/pg_control_system/, ['1', '000000010000000000000001']],
]
const [NOW, SINCE] = ['1700000000000', '1600000000000']
const ABSENT: null[] = Array(11).fill(null)
const WRITTEN = [NOW, 't', '7', '8', '9']
/** 2^48 - 1 is the last number that a record can hold. */
const NO_NUMBERS = [null, '-1', '281474976710656', '1000000000000000']
/** As a reply lost on the way: what was asked may have been done. */
const NONSENSE = { name: 'StoreUnavailable', maybeApplied: true, message: /invalid reply from PostgreSQL/ }
const CORRUPT = { name: 'CorruptRecord' }

async function open(t: Test, options: Partial<PostgresOptions> = {}): Promise<Opened> {
  const fake = fakeLinks(t)
  const calls: Opened['calls'] = []
  const replies: Opened['replies'] = { prune: ['0'], admit: ['0', SINCE] }
  fake.onSent = (sent) => {
    const { text, args } = sent
    const known = PREPARED.find(([question]) => question.test(text))?.[1]
    const name = /idempotency\.(\w+)\(/.exec(text)?.[1]
    if (known !== undefined) sent.rows(known)
    // Every statement that is asked for still runs.
    else if (name === undefined) sent.answer(Array.from({ length: 20 }, (_, n) => n + 1).join(' '))
    else {
      // Decides nothing, unless the test says so: then each goes alone.
      if (/^(?:claims|outcomes)$/.test(name) && replies[name] === undefined) return sent.answer()
      calls.push([name, ...args.slice(1)])
      const reply = replies[name]
      const columns = typeof reply === 'function' ? reply(args.slice(1), sent) : reply
      if (columns != null) sent.answer(...columns)
    }
  }
  const url = 'postgres://u@db/d'
  const store = await openPostgresStore({
    url,
    service: 'pay',
    timeoutMs: 5000,
    onEvent: () => {},
    ...options,
  })
  t.teardown(() => store.close())
  return { fake, store, replies, calls, of: (name) => calls.filter(([one]) => one === name) }
}

/** The columns of a stored record, from its version on. */
function columnsOf(bytes: Buffer): string[] {
  const hex = (from: number, to: number) => `\\x${bytes.toString('hex', from, to)}`
  const head = PREFIX.end + 4 + bytes.readUInt32BE(PREFIX.end)
  const stamps = ['7', '8', '9', '10', '11', '12']
  const codes = [String(bytes[PREFIX.schema]), String(bytes[PREFIX.state])]
  return [
    ...stamps,
    ...codes,
    hex(PREFIX.token, PREFIX.createdAt),
    hex(PREFIX.end, head),
    hex(head, bytes.length),
  ]
}

/** As `put` and `swap` answer; `stored`: a record that was found. */
function refused(stored: string[], waiting: string | null = null): Columns {
  return [NOW, 'f', null, null, null, waiting, ...stored, null, null]
}
const claim = (token = newToken()) => bytesOf('in_progress', token)
const outcome = (token = newToken()) => bytesOf('completed', token)
const failureOf = (asked: Promise<unknown>): Promise<unknown> => asked.catch((error: unknown) => error)

void t.test('a reply that makes no sense grants no claim', async (t) => {
  const { store, replies } = await open(t)
  const written = (at: number, value: string | null) =>
    WRITTEN.map((column, n) => (n === at ? value : column))
  const nonsense: Columns[] = [
    ...[0, 2, 3, 4].flatMap((at) => NO_NUMBERS.map((value) => written(at, value))),
    ...[2, 3].map((at) => written(at, '0')),
    written(1, null),
    ...[
      ['-1', null],
      ['9', null],
    ].map((held) => [NOW, 'f', null, null, null, null, ...ABSENT, ...held]),
  ]
  const refusal = [NOW, 'f', null, null, null, null, ...ABSENT, null, null]
  for (const reply of [...nonsense, refusal]) {
    for (const name of ['put', 'swap']) replies[name] = reply
    await t.rejects(store.put(newId(), claim(), SPANS), NONSENSE, String(reply))
    const swap = store.swap(newId(), { version: 7 }, claim(), SPANS, true)
    if (reply === refusal) t.match(await swap, { done: false, bytes: null })
    else await t.rejects(swap, NONSENSE, String(reply))
  }
})

void t.test('times, waits, places and histories that make no sense are not believed', async (t) => {
  const { store, replies } = await open(t)
  for (const value of NO_NUMBERS) {
    replies['get'] = [value, ...ABSENT]
    for (const name of ['ping', 'throttle']) replies[name] = [value]
    await t.rejects(store.get(newId()), NONSENSE, String(value))
    await t.rejects(store.ping(), NONSENSE, String(value))
    await t.rejects(store.limits.take('bucket', { count: 1, per: 1000 }, 1), NONSENSE, String(value))
  }
  for (const listed of [null, '7', '7 a,', 'x a', '7 a 7 b', '12345678901234567 a']) {
    replies['places'] = [listed]
    await t.rejects(store.list('unresolved', null, 2), NONSENSE, String(listed))
  }
  replies['places'] = ['7 a,8 b']
  t.match(await store.list('unresolved', null, 2), { ids: ['a', 'b'] })
  await t.rejects(store.list('all', ' ', 1), RangeError, 'a cursor of another store')
  for (const lines of ['{}', '7', '[7]', '["a 1 1 1 b", null]', '{"a 1 1 1 b"]']) {
    replies['notes_of'] = [lines]
    await t.rejects(store.history.read(newId()), CORRUPT, lines)
  }
  for (const [lines, notes] of [
    ['["a 1 1 1 b"]', [{ tag: 'a', text: 'b' }]],
    [null, []],
  ] as const) {
    replies['notes_of'] = [lines]
    t.match(await store.history.read(newId()), notes)
  }
})

void t.test('a row that is no record is corrupt, not absent or another', async (t) => {
  const { store, replies } = await open(t)
  const columns = columnsOf(outcome())
  const changed = (n: number, to: (old: string) => string | null) =>
    columns.map((column, m) => (m === n ? to(column) : column))
  for (const stored of [
    [],
    columns.slice(0, 5),
    [...columns.slice(0, 8).map(() => null), ...columns.slice(8, 9), null, null],
    ...[0, 1, 2, 3, 4, 5].flatMap((n) => NO_NUMBERS.map((value) => changed(n, () => value))),
    ...[6, 7].flatMap((n) => ['256', '-1'].map((value) => changed(n, () => value))),
    changed(8, () => null),
    changed(8, () => '\\x00'),
    changed(8, (token) => token.replace('\\x', '00')),
    changed(9, (head) => head.replace('\\x', '00')),
    // Half a byte of the head would be completed by the payload.
    changed(9, (head) => head.slice(0, -1)).map((column, n) =>
      n === 10 ? `\\x0${column?.slice(2)}` : column,
    ),
    changed(10, (payload) => `${payload}0`),
    changed(10, (payload) => `${payload}zz`),
  ]) {
    replies['get'] = [NOW, ...stored]
    replies['put'] = refused(stored as string[])
    await t.rejects(store.get(newId()), CORRUPT, String(stored))
    if (stored.length > 0) await t.rejects(store.put(newId(), claim(), SPANS), CORRUPT, String(stored))
  }
  replies['get'] = [NOW, ...changed(6, () => '255')]
  t.equal((await store.get(newId())).bytes?.[PREFIX.schema], 255, 'of another release')
  replies['get'] = [NOW, ...columns.map(() => null)]
  t.equal((await store.get(newId())).bytes, null)
})

void t.test('while writes hang, a claim is answered by nothing but another’s record', async (t) => {
  const { fake, store, replies } = await open(t, { timeoutMs: 100 })
  replies['swap'] = null
  const swap = () => failureOf(store.swap(newId(), { version: 1 }, claim(), SPANS, false))
  for (let n = 0; n < 2; n++) {
    const all = Array.from({ length: 8 }, swap)
    await fake.pass(100)
    await Promise.all(all)
  }
  t.ok((await swap()) instanceof PartlyUnavailable)
  const mine = newToken()
  const answers: [stored: Columns, isThere: boolean][] = [
    [ABSENT, false],
    [columnsOf(claim(mine)), false],
    [columnsOf(claim()), true],
  ]
  for (const [stored, isThere] of answers) {
    replies['get'] = [NOW, ...stored]
    const reply = await failureOf(store.put(newId(), claim(mine), SPANS))
    if (isThere) t.match(reply, { done: false, now: Number(NOW), bytes: Buffer })
    else t.ok(reply instanceof PartlyUnavailable)
  }
})

void t.test('any other failure of a claim is no reason to read', async (t) => {
  const { store, replies, of } = await open(t)
  replies['put'] = (_, sent) => {
    sent.fail('22012')
    return null
  }
  await t.rejects(store.put(newId(), claim(), SPANS), { name: 'StoreUnavailable', maybeApplied: false })
  t.same(of('get'), [])
})

void t.test('who waits is told of an end, where the server says who does', async (t) => {
  const { store, replies, of } = await open(t)
  const id = newId()
  for (const waiting of ['a b', null]) {
    replies['put'] = [...WRITTEN, waiting]
    replies['remove'] = ['t', waiting]
    await store.put(id, outcome(), SPANS)
    await store.remove(id, 7)
  }
  const told = ['tell', ['a', 'b'], `pay ${id}`]
  t.same(of('tell'), [told, told])
})

void t.test('with a grace, the server is looked at, and each claim says what was found', async (t) => {
  const held: Millis[] = []
  const epochs: Millis[] = []
  const { fake, store, replies, of } = await open(t, {
    grace: 3_600_000,
    onHeld: (left) => void held.push(left),
    onNewEpoch: ({ left }) => void epochs.push(left),
    skew: () => 6,
  })
  for (const name of ['put', 'swap']) replies[name] = WRITTEN
  await fake.settled()
  t.same([held, epochs], [[0], [0]])
  t.same(of('admit'), [['admit', 'pay', 6, 1250, 3_600_000, 0]])
  await store.put(newId(), claim(), SPANS)
  await store.swap(newId(), { version: 1 }, claim(), SPANS, true)
  for (const name of ['put', 'swap']) t.same(of(name)[0]?.slice(-2), [3_600_000, Number(SINCE)])

  replies['admit'] = ['50', '1650000000000']
  for (const link of fake.links) link.cut()
  await fake.pass(50)
  for (const found of [held, epochs]) t.same(found, [0, 50], 'again after each connection')
})

void t.test('callbacks of a grace are optional, and looks go on', async (t) => {
  const { fake, of } = await open(t, { grace: 200 })
  await fake.pass(150)
  t.equal(of('admit').length, 4)
})

void t.test('writes are safe once the server has been the same for long, and not before', async (t) => {
  const safe: Millis[] = []
  const { fake, store, of } = await open(t, { grace: 4000, onSafe: (before) => void safe.push(before) })
  await fake.pass(KEPT_FOR - 1)
  t.ok(safe.length > 2 && safe.every((before) => before === Number.NEGATIVE_INFINITY))
  await fake.pass(1000)
  t.ok(Number.isFinite(safe.at(-1)))
  t.ok((safe.at(-1) as Millis) <= performance.now() - KEPT_FOR)
  await store.close()
  const { length } = of('admit')
  await fake.pass(20_000)
  t.equal(of('admit').length, length, 'nobody looks after the end')
})

void t.test('without a grace, there is no look', async (t) => {
  const { store, replies, of } = await open(t)
  replies['swap'] = WRITTEN
  await store.swap(newId(), { version: 1 }, claim(), SPANS, false)
  t.same(of('swap')[0]?.slice(-2), [0, 0])
  t.same(of('admit'), [])
})

void t.test('expired records are removed every second, at once if there are more', async (t) => {
  const pruned: number[] = []
  const { fake, store, replies, of } = await open(t, { onPruned: (records) => void pruned.push(records) })
  const begun = performance.now()
  const rounds = ['500', '500', '499', null, '0', '1']
  const at: number[] = []
  replies['prune'] = (_, sent) => {
    at.push(performance.now() - begun)
    const removed = rounds.shift()
    if (removed === null) sent.fail('55P03')
    return removed === null ? null : [removed ?? '0']
  }
  await fake.pass(5500)
  t.same(at, [1000, 1000, 1000, 2000, 3000, 4000, 5000])
  t.same(pruned, [500, 500, 499, 1], 'told if there were any')
  replies['prune'] = null
  await fake.pass(500)
  await store.close()
  await fake.pass(5000)
  t.equal(of('prune').length, 8, 'nor does one that was under way begin another')
  t.ok(fake.links.every(({ isOver }) => isOver))
  t.equal(fake.timers(), 0)
})
