import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { PREFIX } from '../../src/store/codec.ts'
import { openPostgresStore, type PostgresOptions, type PostgresStore } from '../../src/store/postgres.ts'
import { REVISION } from '../../src/store/postgres-layout.ts'
import { InGrace, PartlyUnavailable } from '../../src/store/register.ts'
import { KEPT_FOR } from '../../src/store/safety.ts'
import { type Asked, type FakePostgres, fakePostgres } from '../support/fake-postgres.ts'
import { bytesOf, newId, newToken, SPANS, until } from './fixtures.ts'

t.setTimeout(60_000)

/** What one function of the schema gives, but its number; null: no answer, or that of the test. */
type Reply = (string | null)[] | null | ((args: Asked['args'], asked: Asked) => (string | null)[] | null)

interface Opened {
  readonly server: FakePostgres
  readonly store: PostgresStore
  readonly replies: Record<string, Reply>
  /** Calls of the schema's functions: name and arguments without the number. */
  readonly calls: (readonly [name: string, ...args: (string | null)[]])[]
  readonly of: (name: string) => Opened['calls']
}

/** Questions of a new connection: the schema is there, the role has its rights, and this is the server. */
const PREPARED: readonly (readonly [RegExp, (string | null)[]])[] = [
  [/pg_is_in_recovery/, ['f', '15', '9', '1']],
  [/FROM idempotency\.layout/, ['1', String(REVISION)]],
  [/has_table_privilege/, [null, null]],
  [/pg_control_system/, ['1', '000000010000000000000001']],
]
const [NOW, SINCE] = ['1700000000000', '1600000000000']
const WRITTEN = [NOW, 't', '7', '8', '9']

async function open(t: Test, options: Partial<PostgresOptions> = {}): Promise<Opened> {
  const server = await fakePostgres()
  t.teardown(() => server[Symbol.asyncDispose]())
  const calls: Opened['calls'] = []
  const unanswered: number[] = []
  const replies: Opened['replies'] = { prune: ['0'], admit: ['0', SINCE] }
  server.onAsked = (asked) => {
    const { text, args } = asked
    const known = PREPARED.find(([question]) => question.test(text))?.[1]
    const name = /idempotency\.(\w+)\(/.exec(text)?.[1]
    if (known !== undefined) asked.answer(known)
    else if (name === undefined) asked.answer([args[0] ?? null, unanswered.join(' ')])
    else {
      const [number = null, ...rest] = args
      calls.push([name, ...rest])
      const reply = replies[name]
      if (reply === null) unanswered.push(asked.connection)
      const columns = typeof reply === 'function' ? reply(rest, asked) : reply
      if (columns !== null) asked.answer([number, ...(columns ?? [])])
    }
  }
  const url = `postgres://u@127.0.0.1:${server.port}/d`
  const store = await openPostgresStore({
    url,
    service: 'pay',
    timeoutMs: 5000,
    onEvent: () => {},
    ...options,
  })
  t.teardown(() => store.close())
  return { server, store, replies, calls, of: (name) => calls.filter(([one]) => one === name) }
}

/** The columns of a stored record, from its version on. */
function columnsOf(bytes: Buffer): string[] {
  const hex = (from: number, to: number) => `\\x${bytes.toString('hex', from, to)}`
  const head = PREFIX.end + 4 + bytes.readUInt32BE(PREFIX.end)
  return [
    '7',
    '8',
    '9',
    '10',
    '11',
    '12',
    String(bytes[PREFIX.schema]),
    String(bytes[PREFIX.state]),
    hex(PREFIX.token, PREFIX.createdAt),
    hex(PREFIX.end, head),
    hex(head, bytes.length),
  ]
}

/** As `put` and `swap` answer; `stored`: a record that was found. */
const refused = (stored: string[], waiting: string | null = null) => [
  NOW,
  'f',
  null,
  null,
  null,
  waiting,
  null,
  null,
  ...stored,
]
const claim = (token = newToken()) => bytesOf('in_progress', token)
const outcome = (token = newToken()) => bytesOf('completed', token)

void t.test(
  'a claim says all that the record has, what is written, and what is known of the grace',
  async (t) => {
    const { store, replies, calls } = await open(t)
    t.equal(store.name, 'postgres')
    replies['put'] = WRITTEN
    const [id, token] = [newId(), newToken()]
    const bytes = bytesOf('completed', token, { fence: 3, createdAt: 4 })
    const head = PREFIX.end + 4 + bytes.readUInt32BE(PREFIX.end)
    for (const [entry, number] of [
      [undefined, '0'],
      ['claim', '0'],
      ['fresh', '1'],
      ['again', '2'],
    ] as const) {
      calls.length = 0
      t.strictSame(await store.put(id, bytes, SPANS, entry), {
        done: true,
        now: Number(NOW),
        stamp: { version: 7, fence: 8, createdAt: 9 },
      })
      const parts = [token, bytes.subarray(PREFIX.end, head), bytes.subarray(head)].map((part) =>
        part.toString('latin1'),
      )
      const spans = [String(SPANS.dueIn), String(SPANS.dropIn)]
      const record = ['1', '2', '3', parts[0], '4', parts[1], parts[2], ...spans]
      t.strictSame(calls, [['put', 'pay', id, '0', '1250', ...record, number, '0', '0']])
    }
  },
)

void t.test('what is too short for a head has none', async (t) => {
  const { store, replies, calls } = await open(t)
  replies['put'] = WRITTEN
  for (const length of [0, 3, 4]) {
    calls.length = 0
    const rest = Buffer.alloc(length)
    await store.put(newId(), Buffer.concat([claim().subarray(0, PREFIX.end), rest]), SPANS)
    t.same(calls[0]?.slice(10, 12), [rest.toString('latin1'), ''])
  }
})

void t.test('a refused claim gets the record that is there', async (t) => {
  const { store, replies } = await open(t)
  const there = outcome()
  replies['put'] = refused(columnsOf(there))
  const reply = await store.put(newId(), claim(), SPANS)
  t.same(Object.keys(reply).sort(), ['bytes', 'done', 'now'])
  t.match(reply, { done: false, now: Number(NOW) })
  t.ok('bytes' in reply && reply.bytes?.subarray(PREFIX.end).equals(there.subarray(PREFIX.end)))
})

void t.test('a claim that is held says since when, and for how long', async (t) => {
  const { store, replies } = await open(t)
  for (const left of ['1', '5']) {
    replies['put'] = [NOW, 'f', null, null, null, null, left, SINCE]
    const held = await store.put(newId(), claim(), SPANS).catch((error: unknown) => error)
    t.ok(held instanceof InGrace)
    t.match(held, { now: Number(NOW), since: Number(SINCE), left: Number(left) })
  }
})

void t.test(
  'while writes hang, a claim is answered by the record of another, and by nothing else',
  async (t) => {
    const { store, replies } = await open(t, { timeoutMs: 60 })
    replies['swap'] = null
    const hang = async (): Promise<boolean> => {
      const swap = () => store.swap(newId(), { version: 1 }, claim(), SPANS, false)
      const [error] = await Promise.all(Array.from({ length: 4 }, () => swap().catch((one: unknown) => one)))
      return error instanceof PartlyUnavailable
    }
    await until(hang)
    const mine = newToken()
    const answers: [stored: (string | null)[], isThere: boolean][] = [
      [Array(11).fill(null), false],
      [columnsOf(claim(mine)), false],
      [columnsOf(claim()), true],
    ]
    for (const [stored, isThere] of answers) {
      replies['get'] = [NOW, ...stored]
      const reply = await store.put(newId(), claim(mine), SPANS).catch((error: unknown) => error)
      if (!isThere) t.ok(reply instanceof PartlyUnavailable)
      else {
        t.match(reply, { done: false, now: Number(NOW), bytes: Buffer })
      }
    }
  },
)

void t.test('any other failure of a claim is no reason to read', async (t) => {
  const { store, replies, of } = await open(t)
  replies['put'] = (_, asked) => {
    asked.fail('22012')
    return null
  }
  await t.rejects(store.put(newId(), claim(), SPANS), { name: 'StoreUnavailable', maybeApplied: false })
  t.same(of('get'), [])
})

void t.test('those who wait are told of the end of an attempt, and of nothing else', async (t) => {
  const { store, replies, calls, of } = await open(t)
  replies['tell'] = []
  const version = { version: 7 }
  const there = columnsOf(claim())
  const swapOf = (bytes: Buffer) => (id: ReturnType<typeof newId>) =>
    store.swap(id, version, bytes, SPANS, false)
  const putOf = (bytes: Buffer) => (id: ReturnType<typeof newId>) => store.put(id, bytes, SPANS)
  const written = (waiting: string | null) => [...WRITTEN, waiting]
  for (const [what, act, reply, isTold] of [
    ['an outcome', putOf(outcome()), written('a b'), true],
    ['an outcome for which nobody waits', putOf(outcome()), written(''), false],
    ['an outcome that does not say who waits', putOf(outcome()), written(null), false],
    ['a claim', putOf(claim()), written('a b'), false],
    ['an outcome by condition', swapOf(outcome()), written('a b'), true],
    ['a takeover', swapOf(claim()), written('a b'), false],
    ['an outcome that ended nothing', swapOf(outcome()), written(null), false],
    ['a refusal that ended an attempt', swapOf(claim()), refused(there, 'a b'), true],
    ['a removal', (id: ReturnType<typeof newId>) => store.remove(id, 7), ['t', 'a b'], true],
    ['a removal for nobody', (id: ReturnType<typeof newId>) => store.remove(id, 7), ['t', null], false],
    ['no removal', (id: ReturnType<typeof newId>) => store.remove(id, 7), ['f', 'a b'], false],
  ] as const) {
    calls.length = 0
    for (const name of ['put', 'swap', 'remove']) replies[name] = [...reply]
    const id = newId()
    await act(id)
    replies['ping'] = [NOW]
    await store.ping()
    t.strictSame(of('tell'), isTold ? [['tell', '{"a","b"}', `pay ${id}`]] : [], what)
  }
})

void t.test('of leases renewed together, one that is locked does not keep the others', async (t) => {
  const { store, replies, calls } = await open(t)
  t.same(await store.renew([]), [])
  t.same(calls, [])
  const [renewed, revived, gone, locked] = [newId(), newId(), newId(), newId()]
  replies['renew'] = [renewed]
  replies['revive'] = ([, id], asked) => {
    if (id === locked) asked.fail('55P03')
    return id === locked ? null : [id === revived ? 't' : 'f']
  }
  const items = [renewed, revived, gone, locked].map((id) => ({ id, token: newToken(), dueIn: 1, dropIn: 2 }))
  t.same(await store.renew(items), [true, true, false, false])
})

void t.test('with a grace, the server is looked at, and each claim says what was found', async (t) => {
  const held: Millis[] = []
  const epochs: Millis[] = []
  const { server, store, replies, of } = await open(t, {
    grace: 3_600_000,
    onHeld: (left) => void held.push(left),
    onNewEpoch: ({ left }) => void epochs.push(left),
    skew: () => 6,
  })
  for (const name of ['put', 'swap']) replies[name] = WRITTEN
  await until(() => held.length === 1)
  t.same([held, epochs], [[0], [0]])
  t.same(of('admit'), [['admit', 'pay', '6', '1250', '3600000', '0']])
  await store.put(newId(), claim(), SPANS)
  await store.swap(newId(), { version: 1 }, claim(), SPANS, true)
  for (const name of ['put', 'swap']) t.same(of(name)[0]?.slice(-2), ['3600000', SINCE])

  replies['admit'] = ['50', '1650000000000']
  for (const socket of server.open.values()) socket.destroy()
  await until(() => held.length === 2)
  t.same(
    [held, epochs],
    [
      [0, 50],
      [0, 50],
    ],
    'again after each connection',
  )
})

void t.test('callbacks of a grace are optional, and looks go on', async (t) => {
  const { of } = await open(t, { grace: 200 })
  await until(() => of('admit').length > 3)
})

void t.test('writes are safe once the server has been the same for long, and not before', async (t) => {
  let skew = 0
  const { now } = performance
  t.capture(performance, 'now', () => now.call(performance) + skew)
  const safe: Millis[] = []
  const held: Millis[] = []
  const { store } = await open(t, {
    grace: 200,
    onSafe: (before) => void safe.push(before),
    onHeld: (left) => void held.push(left),
  })
  await until(() => safe.length > 2)
  t.ok(safe.every((before) => before === Number.NEGATIVE_INFINITY))
  skew = KEPT_FOR
  await until(() => Number.isFinite(safe.at(-1)))
  t.ok((safe.at(-1) as Millis) <= performance.now() - KEPT_FOR)
  await store.close()
  const { length } = held
  await new Promise((next) => setTimeout(next, 200))
  t.equal(held.length, length, 'nobody looks after the end')
})

void t.test('without a grace, there is no look', async (t) => {
  const { store, replies, of } = await open(t)
  replies['swap'] = WRITTEN
  await store.swap(newId(), { version: 1 }, claim(), SPANS, false)
  t.same(of('swap')[0]?.slice(-2), ['0', '0'])
  t.same(of('admit'), [])
})

void t.test(
  'expired records are removed every second, at once if there are more, until the end',
  async (t) => {
    const pruned: number[] = []
    const { store, replies, of } = await open(t, { onPruned: (records) => void pruned.push(records) })
    const rounds: ((asked: Asked) => string[] | null)[] = [
      () => ['500'],
      () => ['500'],
      () => ['499'],
      (asked) => {
        asked.fail('55P03')
        return null
      },
      () => ['0'],
      () => ['1'],
    ]
    const at: number[] = []
    replies['prune'] = (_, asked) => {
      at.push(performance.now())
      return (rounds.shift() ?? (() => ['0']))(asked)
    }
    await until(() => at.length === 6)
    await until(() => pruned.length === 4)
    t.same(pruned, [500, 500, 499, 1], 'told if there were any')
    const gaps = at.slice(1).map((one, n) => one - (at[n] as number))
    t.same(
      gaps.map((gap) => gap > 700),
      [false, false, true, true, true],
    )
    await store.close()
    await new Promise((next) => setTimeout(next, 1300))
    t.equal(of('prune').length, 6)
  },
)

void t.test('a close() during a removal is its last', async (t) => {
  const { store, replies, of } = await open(t)
  replies['prune'] = null
  await until(() => of('prune').length === 1)
  await store.close()
  await new Promise((next) => setTimeout(next, 1300))
  t.equal(of('prune').length, 1)
})

void t.test('a close leaves no connection', async (t) => {
  const { server, store } = await open(t)
  t.equal(server.open.size, 1)
  await store.close()
  t.equal(server.open.size, 0)
})

void t.test('a row that is no record is corrupt, not absent', async (t) => {
  const { store, replies } = await open(t)
  const columns = columnsOf(outcome())
  const corrupt = { name: 'CorruptRecord' }
  const changed = (n: number, to: (old: string) => string | null) =>
    columns.map((column, m) => (m === n ? to(column) : column))
  for (const stored of [
    [],
    columns.slice(0, 5),
    changed(8, () => null),
    changed(8, (token) => token.replace('\\x', '00')),
    changed(9, (head) => head.replace('\\x', '00')),
    changed(10, (payload) => `${payload}0`),
    changed(10, (payload) => `${payload}zz`),
    changed(6, () => '256'),
    changed(7, () => '256'),
  ]) {
    replies['get'] = [NOW, ...stored]
    await t.rejects(store.get(newId()), corrupt, String(stored.length))
  }
  replies['get'] = [NOW, ...changed(6, () => '255')]
  t.equal((await store.get(newId())).bytes?.[PREFIX.schema], 255, 'of another release')
  replies['get'] = [NOW, ...columns.map(() => null)]
  t.equal((await store.get(newId())).bytes, null)
})
