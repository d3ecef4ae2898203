import { randomBytes } from 'node:crypto'
import type pg from 'pg'
import t, { type Test } from 'tap'
import { layoutScript } from '../../src/store/postgres/layout.ts'
import { BODIES_FROM } from '../../src/store/record/codec.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { newId } from './fixtures.ts'

// What the contract of stores (postgres.test.ts) is too coarse for: milliseconds, locks, leases of finished records, and what is removed.
t.setTimeout(100_000)

type Columns = Record<string, string | null>

type Expected = Readonly<Record<string, string | number | null | RegExp>>

const textsOf = (expected: Expected) =>
  Object.fromEntries(
    Object.entries(expected).map(([name, value]) => [name, typeof value === 'number' ? `${value}` : value]),
  )

/** Some columns of a row. Not `t.match`: for that, '10' is in '100'. */
function has(t: Test, row: Columns | null | undefined, expected: Expected, message = ''): void {
  const found = Object.entries(expected).map(([name, value]) => {
    const column = row?.[name] ?? null
    return [name, value instanceof RegExp && value.test(column ?? '') ? value : column]
  })
  t.strictSame(Object.fromEntries(found), textsOf(expected), message)
}

const exactly = (t: Test, row: Columns | null, expected: Expected) =>
  void t.strictSame({ ...row }, textsOf(expected))

interface Written {
  readonly service?: string
  readonly schema?: number
  readonly state?: number
  readonly fence?: number
  readonly token?: string
  readonly createdAt?: number
  readonly head?: Buffer
  readonly dueIn?: number
  readonly dropIn?: number
  readonly entry?: number
  readonly grace?: number
  readonly seen?: number
}

const [IN_PROGRESS, COMPLETED, RETRYABLE, UNKNOWN] = [1, 2, 3, 4]
const T = 1_000_000
/** Its fifth byte has the flags. */
const head = (flags: number, more = 0) =>
  Buffer.concat([Buffer.from([0, 0, 0, 1 + more, flags]), Buffer.alloc(more)])
const HEAD = head(0, 3)
const BODY_ENDS = head(4)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

/** The functions of the schema, on a server of its own whose clock for them stands still at the instant that each call gives. */
async function tests(): Promise<void> {
  const server = await PostgresServer.start('fsync=off')
  t.teardown(() => server[Symbol.asyncDispose]())
  const client: pg.Client = await server.client()
  t.teardown(() => client.end())
  await client.query(layoutScript())
  const { rows: clocks } = await client.query(
    'SELECT abs(idempotency.now(5000) - 5000 - extract(epoch FROM clock_timestamp()) * 1000) < 1000 AS is_right',
  )
  const isClockRight = clocks[0]?.is_right === true
  const clock = (body: string) =>
    client.query(`CREATE OR REPLACE FUNCTION idempotency.now(_skew bigint) RETURNS bigint ${body}`)
  const standStill = () => clock("LANGUAGE sql AS 'SELECT _skew'")
  await standStill()
  const types = { getTypeParser: () => (value: string) => value }
  const rows = async (text: string, values: readonly unknown[] = []): Promise<Columns[]> =>
    (await client.query({ text, values: [...values], types })).rows as Columns[]
  const call = async (name: string, ...args: readonly unknown[]): Promise<Columns> => {
    const places = args.map((_, n) => `$${n + 1}`).join(', ')
    const [row = {}] = await rows(`SELECT f.* FROM idempotency.${name}(${places}) f`, args)
    return row
  }
  t.beforeEach(async () => {
    await client.query(
      `TRUNCATE idempotency.unresolved, idempotency.notes, idempotency.buckets, idempotency.waits, idempotency.epochs, idempotency.graces;
       DELETE FROM idempotency.records; UPDATE idempotency.pruning SET page = 0, done_at = 0`,
    )
  })

  const tokenOf = (text: string) => Buffer.from(text.padEnd(16))
  /** What `claims` and `outcomes` have decided: rows by id. */
  const many = async (
    name: string,
    first: readonly unknown[],
    ids: readonly string[],
    columns: readonly (readonly number[])[],
    records: readonly (readonly [token: string, head: Buffer, payload: string])[],
  ): Promise<Map<string, Columns>> => {
    const parts = records.map(([token, head, payload]) => [
      Buffer.concat([Buffer.alloc(16), tokenOf(token), Buffer.alloc(24), head]),
      Buffer.from(payload),
    ])
    const sizes = parts.flat().map(({ length }) => length)
    const places = sizes.map((_, n) => sizes.slice(0, n).reduce((sum, size) => sum + size, 0))
    const even = places.filter((_, n) => n % 2 === 0)
    const bytes = Buffer.concat(parts.flat())
    const args = [...first, ids, ...columns, even, places.filter((_, n) => n % 2 === 1)]
    const all = [...args, [...even.slice(1), bytes.length], bytes]
    const called = all.map((_, n) => `$${n + 1}`).join(', ')
    const [own, ...found] = await rows(`SELECT f.* FROM idempotency.${name}(${called}) f`, all)
    if (own === undefined || own['id'] !== null) throw new Error(`${name} gives no row of its own`)
    return new Map(found.map((row) => [String(row['id']), row]))
  }
  /** As the store does: with others first, and by itself if that has decided nothing. */
  const together = async (
    ...[name, first, ids, columns, records, alone]: [...Parameters<typeof many>, () => Promise<Columns>]
  ): Promise<Columns> => (await many(name, first, ids, columns, records)).get(ids[0] ?? '') ?? (await alone())
  let isTogether = false
  /** By the functions for one, and by those for many. */
  const both = (name: string, act: (t: Test) => Promise<void>): void => {
    for (const one of [false, true])
      void t.test(`${name}, ${one ? 'together' : 'alone'}`, (t) => {
        isTogether = one
        return act(t).finally(() => (isTogether = false))
      })
  }

  const put = (id: string, at: number, over: Written = {}): Promise<Columns> => {
    const { service = 'pay', schema = 1, state = IN_PROGRESS, fence = 0, token = 'mine' } = over
    const { createdAt = 0, head = HEAD, dueIn = 10, dropIn = 100, entry = 0, grace = 0, seen = 0 } = over
    const bytes = [tokenOf(token), createdAt, head, Buffer.from('p')]
    const record = [schema, state, fence, ...bytes, dueIn, dropIn]
    const alone = () => call('put', service, id, at, 1000, ...record, entry, grace, seen)
    if (!isTogether || schema !== 1 || state !== IN_PROGRESS || entry === 2) return alone()
    const one = [[entry], [fence], [createdAt], [dueIn], [dropIn]]
    return together('claims', [service, at, 1000, grace, seen], [id], one, [[token, head, 'p']], alone)
  }
  const swap = (
    id: string,
    at: number,
    condition: { version?: number; token?: string; states?: number[] },
    over: Written & { more?: number } = {},
  ): Promise<Columns> => {
    const { service = 'pay', schema = 1, state = IN_PROGRESS, fence = 0, token = 'mine', more = 0 } = over
    const { head = HEAD, dueIn = 10, dropIn = 100, grace = 0, seen = 0 } = over
    const { version = null, token: own, states = null } = condition
    const expected = [version, own === undefined ? null : tokenOf(own), states]
    const record = [schema, state, fence, tokenOf(token), head, Buffer.from('q'), dueIn, dropIn, more]
    const alone = () => call('swap', service, id, at, 1000, ...expected, ...record, grace, seen)
    const isEnd = schema === 1 && state !== IN_PROGRESS && more === 0 && token === own
    if (!isTogether || !isEnd || states === null) return alone()
    const accepted = states.reduce((bits, one) => bits | (1 << one), 0)
    const one = [[accepted], [state], [fence], [dueIn], [dropIn]]
    return together('outcomes', [service, at, 1000], [id], one, [[token, head, 'q']], alone)
  }
  const get = (id: string, at: number, service = 'pay') => call('get', service, id, at, 1000)
  const isThere = async (id: string, at: number, service = 'pay') =>
    /[^(),]/.test((await get(id, at, service))['stored'] ?? '')
  const found = async (columns: string, table: string, id: string, service: string) =>
    (
      await rows(
        `SELECT ${columns}, state, rtrim(convert_from(token, 'UTF8')) AS token FROM idempotency.${table} WHERE id = $1 AND service = $2`,
        [id, service],
      )
    )[0] ?? null
  const stored = async (id: string, service = 'pay'): Promise<Columns> =>
    (await found(
      `version, fence, created_at, updated_at, due, drop_at, schema, encode(head, 'hex') AS head, convert_from(payload, 'UTF8') AS payload`,
      'stored',
      id,
      service,
    )) ?? {}
  const lease = (id: string, service = 'pay') => found('due, drop_at, renewals', 'unresolved', id, service)
  /** Each row in one text. */
  const listed = async (text: string) => (await rows(text)).map((row) => Object.values(row).join(' '))
  const waits = (id: string, service: string, ...channels: string[]) =>
    rows('INSERT INTO idempotency.waits SELECT 1, $1, $2, c FROM unnest($3::text[]) c', [
      id,
      service,
      channels,
    ])

  const held = (at: number, entry: number, seen = 0, service = 'pay', grace = 1000) =>
    rows('SELECT remaining, since FROM idempotency.held($1, $2, $3, $4, $5)', [
      service,
      at,
      entry,
      grace,
      seen,
    ]).then(([row]) => [row?.['remaining'], row?.['since']].map((one) => (one == null ? null : Number(one))))
  const promoted = (service = 'pay') =>
    rows("UPDATE idempotency.epochs SET started = 'epoch' WHERE service = $1", [service])

  const token = tokenOf('mine')
  const codeOf = (asked: Promise<unknown>): Promise<string> =>
    asked.then(
      () => 'done',
      ({ code }: { code: string }) => code,
    )
  /** Until somebody waits for a lock of this connection. */
  const untilWaiting = async (holder: pg.Client): Promise<void> => {
    for (;;) {
      const { rows: found } = await holder.query(
        'SELECT FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid))',
      )
      if (found.length > 0) return
    }
  }

  /** Of `mine`, in progress, unless said otherwise. */
  const claims = (ids: readonly string[], at: number, { grace = 0, seen = 0, entries = [0] } = {}) => {
    const columns = [ids.map((_, n) => entries[n] ?? 0), ...[0, 0, 10, 100].map((one) => ids.map(() => one))]
    return many(
      'claims',
      ['pay', at, 50, grace, seen],
      ids,
      columns,
      ids.map(() => ['mine', HEAD, 'p'] as const),
    )
  }
  const outcomes = (ids: readonly string[], at: number, states: readonly number[], heads = [HEAD]) => {
    const columns = [
      ids.map(() => 1 << IN_PROGRESS),
      states,
      ...[0, 10, 100].map((one) => ids.map(() => one)),
    ]
    const records = ids.map((id, n) => ['mine', heads[n] ?? HEAD, `of ${id}`] as const)
    return many('outcomes', ['pay', at, 50], ids, columns, records)
  }

  void t.test('of many claims, those are decided that others have, or nobody', async (t) => {
    const [fresh, theirs, mine, over, another] = ['fresh', 'theirs', 'mine', 'over', 'another']
    await put(theirs, T, { token: 'other' })
    await put(mine, T)
    await put(over, T - 100)
    await put(fresh, T, { service: 'other', token: 'other' })
    const found = await claims([theirs, over, another, mine, fresh], T)
    t.same([...found.keys()].sort(), [another, fresh, theirs])
    for (const id of [another, fresh]) {
      has(t, found.get(id), {
        done: 't',
        at: T,
        version: T,
        fence: T,
        created_at: T,
        waiting: '',
        stored: null,
      })
      has(t, await stored(id), { token: 'mine', payload: 'p', due: T + 10, drop_at: T + 100 })
      has(t, await lease(id), { token: 'mine', due: T + 10, drop_at: T + 100 })
    }
    has(t, found.get(theirs), { done: 'f', at: T, version: null, stored: /^\(theirs,.*6f74686572/ })
    t.equal((await claims([theirs], T)).size, 1)
    has(t, await stored(over), { created_at: T - 100 }, 'nothing else was touched')
  })

  void t.test('in a grace, of many claims those of fresh keys are granted', async (t) => {
    await held(T, 3)
    await promoted()
    const found = await claims(['a', 'b', 'c'], T + 1, { grace: 1000, seen: T, entries: [0, 1, 0] })
    t.same([...found.keys()], ['b'])
    t.same(await held(T + 1, 0), [1000, T + 1], 'which they have begun')
    t.equal((await claims(['a', 'c'], T + 1000, { grace: 1000, seen: T })).size, 0)
    t.equal((await claims(['a', 'c'], T + 1001, { grace: 1000, seen: T })).size, 2)
  })

  void t.test('of many outcomes, what is locked or not in progress is left alone', async (t) => {
    const all = ['ends', 'locked', 'theirs', 'over', 'later', 'done', 'absent', 'renewed']
    for (const id of all.slice(0, -2)) await put(id, T, { token: id === 'theirs' ? 'other' : 'mine' })
    await put('renewed', T)
    await put('ends', T, { service: 'other' })
    await rows("UPDATE idempotency.records SET drop_at = $1 WHERE id = 'over'", [T + 1])
    await rows("UPDATE idempotency.records SET schema = 2 WHERE id = 'later'")
    await rows("UPDATE idempotency.records SET state = 2 WHERE id = 'done'")
    for (let n = 0; n < 2; n++)
      await call('renew', 'pay', T, 1000, ['renewed'], [tokenOf('mine')], [10], [100])
    await waits('ends', 'pay', 'a', 'b')
    await waits('ends', 'other', 'c')
    const other = await server.client()
    t.teardown(() => other.end())
    await other.query("BEGIN; SELECT FROM idempotency.records WHERE id = 'locked' FOR UPDATE")
    const found = await outcomes(
      all,
      T + 1,
      all.map(() => COMPLETED),
    )
    await other.query('ROLLBACK')
    t.same([...found.keys()].sort(), ['ends', 'renewed'])
    const stamps = { done: 't', at: T + 1, fence: T, created_at: T, stored: null }
    has(t, found.get('ends'), { ...stamps, version: T + 1, waiting: 'a b' })
    has(t, found.get('renewed'), { ...stamps, version: T + 3, waiting: '' })
    const written = { state: COMPLETED, updated_at: T + 1, due: T + 11, drop_at: T + 101, payload: 'of ends' }
    has(t, await stored('ends'), { ...written, version: T + 1 })
    t.same(await lease('ends'), null)
    has(t, await stored('ends', 'other'), { state: IN_PROGRESS })
    t.ok(await lease('ends', 'other'))
    for (const id of ['locked', 'theirs', 'over', 'later', 'done']) t.ok(await lease(id), id)
    has(t, await stored('locked'), { state: IN_PROGRESS, version: T })
  })

  void t.test('of many outcomes, unknown ones and those whose response ends first are filed', async (t) => {
    const ids = ['ends', 'unknown', 'retryable']
    for (const id of ids) await put(id, T)
    const found = await outcomes(
      ids,
      T + 1,
      [COMPLETED, UNKNOWN, RETRYABLE],
      [BODY_ENDS, BODY_ENDS, BODY_ENDS],
    )
    t.equal(found.size, 3)
    has(t, await lease('ends'), {
      due: BODIES_FROM + T + 11,
      drop_at: T + 101,
      renewals: 0,
      state: COMPLETED,
    })
    has(t, await lease('unknown'), { due: T + 11, drop_at: T + 101, renewals: 0, state: UNKNOWN })
    t.equal(await lease('retryable'), null)
  })

  both('a claim is stamped with its time in milliseconds since 1970, and has a lease', async (t) => {
    t.ok(isClockRight)
    const id = newId()
    has(t, await put(id, T), {
      at: T,
      version: T,
      fence: T,
      created_at: T,
      done: 't',
      waiting: '',
    })
    const stamps = { version: T, fence: T, created_at: T, updated_at: T, due: T + 10, drop_at: T + 100 }
    const rest = { schema: 1, state: 1, token: 'mine', head: HEAD.toString('hex'), payload: 'p' }
    exactly(t, await stored(id), { ...stamps, ...rest })
    exactly(t, await lease(id), { due: T + 10, drop_at: T + 100, renewals: 0, state: 1, token: 'mine' })
    const given = newId()
    has(t, await put(given, T, { fence: 5, createdAt: 6 }), { version: T, fence: 5, created_at: 6 })
    has(t, await stored(given), { version: T, fence: 5, created_at: 6 })
    const completed = newId()
    await put(completed, T, { state: COMPLETED })
    has(t, await stored(completed), { version: T, due: T + 10, drop_at: T + 100 })
  })

  both('a claim that had to wait is stamped with the time after that', async (t) => {
    const ticking = async (step: number) => {
      await clock(`LANGUAGE sql AS 'SELECT _skew + ${step} * (nextval(''public.ticks'') - 1)'`)
      await client.query("SELECT setval('ticks', 1, false)")
    }
    await client.query('CREATE SEQUENCE IF NOT EXISTS ticks')
    t.teardown(standStill)
    for (const [step, at] of [
      [5, T],
      [6, T + 12],
    ] as const)
      for (const given of [{}, { fence: 5, createdAt: 6 }]) {
        const id = newId()
        await ticking(step)
        const fence = given.fence ?? at
        const createdAt = given.createdAt ?? at
        const stamps = { version: at, fence, created_at: createdAt }
        has(t, await put(id, T, { ...given, state: RETRYABLE }), { ...stamps, at })
        has(t, await stored(id), { ...stamps, updated_at: at, due: at + 10, drop_at: at + 100 })
        const open = newId()
        await put(open, T, { service: 'other' })
        const before = await stored(open, 'other')
        await ticking(step)
        await put(open, T, given)
        t.strictSame(await stored(open, 'other'), before)
        has(t, await lease(open), { due: at + 10, drop_at: at + 100 })
      }
  })

  both('a record exists until it drops, and not a millisecond longer', async (t) => {
    const id = newId()
    await put(id, T)
    const last = T + 99
    const version = { version: T }
    t.ok(await isThere(id, last))
    t.notOk(await isThere(id, last + 1))
    t.notOk(await isThere(id, last, 'other'))
    has(t, await put(id, last, { token: 'other' }), { done: 'f', at: last, stored: /mine|6d696e65/ })
    has(t, await put(id, last), { done: 'f' }, 'its own claim is recognised')
    has(t, await swap(id, last + 1, version), { done: 'f', stored: null })
    has(t, await call('remove', 'pay', id, last + 1, 1000, T), { done: 'f' })
    const token = [tokenOf('mine')]
    has(t, await call('renew', 'pay', last + 1, 1000, [id], token, [10], [10]), { renewed: '' })
    has(t, await call('revive', 'pay', id, last + 1, 1000, token[0], 10, 10), { done: 'f' })
    const list = (at: number) => call('list', 'pay', at, 1000, '', '', 10)
    t.strictSame([(await list(last))['ids'], (await list(last + 1))['ids']], [id, ''])
    has(t, await swap(id, last, version), { done: 't' })
    const again = newId()
    await put(again, T)
    has(t, await put(again, last + 1, { token: 'next' }), { done: 't', version: last + 1 })
    has(t, await stored(again), { token: 'next' })
  })

  both(
    'a claim that is recognised is a write, for which a standby is waited; a refusal is not',
    async (t) => {
      const id = newId()
      const [mine, theirs] = ['pay', 'other']
      const writers = async () =>
        (await rows('SELECT xmax FROM idempotency.records ORDER BY service DESC')).map(({ xmax }) => xmax)
      for (const service of [mine, theirs]) await put(id, T, { service, token: `of ${service}` })
      const before = await writers()
      await put(id, T, { token: 'stranger' })
      t.same(await writers(), before)
      await put(id, T, { token: 'of pay' })
      const [pay, other] = await writers()
      t.not(pay, before[0])
      t.equal(other, before[1])
    },
  )

  both('of a record that its upstream has finished, the owner takes out the lease', async (t) => {
    for (const [over, isFolded] of [
      [{}, true],
      [{ token: 'other' }, false],
      [{ schema: 2 }, false],
    ] as const) {
      const id = newId()
      const other = newId()
      for (const one of [id, other]) await put(one, T)
      await put(id, T, { service: 'other' })
      await waits(id, 'pay', 'a')
      await call('renew', 'pay', T + 1, 1000, [id], [tokenOf('mine')], [10], [10])
      await rows('UPDATE idempotency.records SET state = 2, schema = $1 WHERE id = $2 AND service = $3', [
        'schema' in over ? over.schema : 1,
        id,
        'pay',
      ])
      const reply = await swap(id, T + 2, {
        token: 'token' in over ? over.token : 'mine',
        states: [IN_PROGRESS],
      })
      has(t, reply, { done: 'f', waiting: isFolded ? 'a' : null, stored: /6d696e65/ })
      t.equal((await lease(id)) === null, isFolded)
      has(t, await stored(id), { version: T + 1 }, 'which goes on counting')
      t.ok(await lease(other))
      t.ok(await lease(id, 'other'))
    }
  })

  both('renewals are added to the version of the record that was finished, and to no other', async (t) => {
    const [id, other] = [newId(), newId()]
    const renewed = async (times: number): Promise<void> => {
      for (let n = 0; n < times; n++) await call('renew', 'pay', T + 1, 1000, [id], [token], [10], [10])
    }
    for (const one of [id, other])
      for (const service of ['pay', 'other'])
        await put(one, T, { service, token: one === other && service === 'other' ? 'other' : 'mine' })
    await renewed(2)
    await rows("UPDATE idempotency.records SET state = 2 WHERE id = $1 AND service = 'pay'", [id])
    has(t, await swap(id, T + 2, { token: 'mine', states: [IN_PROGRESS] }), { done: 'f', waiting: '' })
    t.same(await rows('SELECT id, service, version FROM idempotency.records WHERE version <> $1', [T]), [
      { id, service: 'pay', version: T + 2 },
    ])
    has(t, await stored(id), { state: COMPLETED })

    await client.query('DELETE FROM idempotency.records; DELETE FROM idempotency.unresolved')
    await put(id, T)
    await renewed(1)
    await rows("UPDATE idempotency.records SET state = 2, token = 'next'")
    await rows('SELECT idempotency.fold($1, $2)', ['pay', id])
    has(t, await stored(id), { version: T }, 'nor those of a lease of an earlier attempt')
    t.same(await rows('SELECT FROM idempotency.unresolved'), [])
  })

  void t.test(
    'leases of finished records are taken out when they are due, before they keep others from the list',
    async (t) => {
      for (const id of ['a', 'b']) await put(id, T, { dueIn: 5 })
      await put('c', T, { dueIn: 6 })
      await put('d', T, { dueIn: 10 })
      await put('a', T, { dueIn: 5, service: 'other' })
      await rows("UPDATE idempotency.records SET state = 2 WHERE id IN ('a', 'b', 'd')")
      has(t, await call('places', 'pay', T + 4, 1000, 'due', 0, '', 2), { listed: '' })
      t.ok(await lease('a'))
      has(t, await call('places', 'pay', T + 6, 1000, 'due', 0, '', 2), { listed: `${T + 6} c` })
      t.ok(await lease('a', 'other'))
      t.same([await lease('a'), await lease('b')], [null, null])
      t.ok(await lease('d'))
    },
  )

  void t.test('a rate allows its count, and says exactly when the next unit is there', async (t) => {
    const take = async (at: number, units = 1, count = 2, per = 1000) =>
      Number((await call('throttle', 'pay', 'bucket', at, 1000, count, per, units))['wait'])
    const bucket = async () => (await rows('SELECT at, debt, count, full_at FROM idempotency.buckets'))[0]
    t.same([await take(T), await take(T), await take(T)], [0, 0, 500])
    has(t, await bucket(), { at: T, debt: 2000, count: 2, full_at: T + 1000 })
    t.same([await take(T + 499), await take(T + 500), await take(T + 500)], [1, 0, 500])
    t.equal(await take(T + 600, -1), 0)
    has(t, await bucket(), { at: T + 600, debt: 800, full_at: T + 1000 })
    t.equal(await take(T + 600, -1), 0)
    t.equal(await bucket(), undefined, 'a full one is not kept')
    t.equal(await take(T + 600), 0)
    // Twice the rate: what is missing takes half the time, rounded up.
    t.same([await take(T + 600, 1, 3, 1000), await take(T + 600, 1, 3, 1000)], [0, 167])
    has(t, await bucket(), { debt: 2500, count: 3, full_at: T + 600 + 834 })
    t.equal(await take(T + 100, 1, 3, 1000), 0, 'a clock that went back fills it as well')
    const other = await call('throttle', 'other', 'bucket', T, 1000, 1, 1000, 1)
    has(t, other, { wait: '0' }, 'another service has its own')
  })

  void t.test('what somebody else is at work on is waited for, or passed over', async (t) => {
    const [id, another] = [newId(), newId()]
    const other = await server.client()
    t.teardown(() => other.end())
    const calls = {
      swap: () => call('swap', 'pay', id, T, 50, T, null, null, 1, 1, 0, token, HEAD, HEAD, 10, 100, 0, 0, 0),
      remove: () => call('remove', 'pay', id, T, 50, T),
      revive: () => call('revive', 'pay', id, T, 50, token, 10, 10),
      'a claim after its end': () =>
        call('put', 'pay', id, T + 100, 50, 1, 1, 0, tokenOf('next'), 0, HEAD, HEAD, 10, 100, 0, 0, 0),
    }
    const reading = {
      watch: () => call('watch', 'pay', id, T, 50, 'a'),
      note: () => call('note', 'pay', id, T, 50, ['a'], [1], [0], [0], ['x']),
    }
    const passing = {
      renew: async () => (await call('renew', 'pay', T, 50, [id], [token], [10], [10]))['renewed'] === id,
      prune: async () => {
        await rows('UPDATE idempotency.pruning SET page = 0, done_at = 0')
        return (await call('prune', T + 100, 50, 50, 1000, 100))['pruned'] === '1'
      },
    }
    for (const table of ['records', 'unresolved'] as const)
      for (const [locked, service] of [
        [id, 'pay'],
        [id, 'other'],
        [another, 'pay'],
      ] as const) {
        const isOther = locked !== id || service !== 'pay'
        const whileLocked = async (dropIn: number, act: () => Promise<void>): Promise<void> => {
          await put(id, T)
          await put(id, T, { service: 'other', dropIn })
          await put(another, T, { dropIn })
          await other.query(
            `BEGIN; SELECT FROM idempotency.${table} WHERE id = '${locked}' AND service = '${service}' FOR UPDATE`,
          )
          await act()
          await other.query('ROLLBACK')
          await client.query('DELETE FROM idempotency.records; DELETE FROM idempotency.unresolved')
        }
        const where = `${table} of ${locked === id ? service : 'another'}`
        for (const [what, act] of Object.entries({ ...calls, ...reading }))
          await whileLocked(100, async () => {
            const waits = !isOther && (what in calls || table === 'records')
            t.equal(await codeOf(act()), waits ? '55P03' : 'done', `${what}, ${where}`)
          })
        for (const [what, act] of Object.entries(passing))
          await whileLocked(10_000, async () => {
            const isRenewed = what === 'renew' && table === 'records'
            t.equal(await act(), isRenewed || isOther, `${what}, ${where}`)
          })
      }
  })

  void t.test('an attempt can be completed until its record drops', async (t) => {
    // The instant of this function is 0. It has no head to read further, and says so.
    for (const [dropIn, code] of [
      [100, 'IP002'],
      [101, '55000'],
    ] as const) {
      const id = newId()
      await put(id, -100, { fence: 7, dropIn })
      const failure = await rows('SELECT idempotency.complete($1, 7, 200)', [id]).then(
        () => null,
        (error: { code: string; detail?: string }) => error,
      )
      t.equal(failure?.code, code)
      t.equal(failure?.detail, dropIn === 100 ? 'There is no such record, or not any more.' : undefined)
    }
  })

  void t.test('a text ends where its length says', async (t) => {
    const end = async (bytes: string, from: number) =>
      (await rows('SELECT idempotency.text_end($1, $2) AS at', [Buffer.from(bytes, 'hex'), from]))[0]?.['at']
    t.equal(await end('00000000', 0), '4')
    t.equal(await end('ff01020304ff', 1), String(1 + 4 + 0x01020304))
    t.equal(await end('ffff0a0b0c0dff', 2), String(2 + 4 + 0x0a0b0c0d))
  })

  void t.test('whoever no longer waits is taken out, and nobody else', async (t) => {
    const id = newId()
    for (const service of ['pay', 'other'])
      for (const channel of ['a', 'b']) await call('watch', service, id, T, 1000, channel)
    await call('watch', 'pay', id, T + 5, 1000, 'b')
    await call('unwatch', 'pay', id, 'a')
    await call('unwatch', 'pay', newId(), 'b')
    const all = await listed(
      'SELECT since, service, channel FROM idempotency.waits ORDER BY service, channel',
    )
    t.same(all, [`${T} other a`, `${T} other b`, `${T + 5} pay b`])
  })

  void t.test('of more than fifty notes the first ten and the newest forty stay', async (t) => {
    const id = newId()
    await put(id, T)
    const tags = Array.from({ length: 60 }, (_, n) => `n${n}`)
    for (const tag of tags) await call('note', 'pay', id, T, 1000, [tag], [1], [7], [3], ['x'])
    const lines = JSON.parse((await call('notes_of', 'pay', id, T, 1000))['lines'] ?? '') as string[]
    t.same(
      lines,
      [...tags.slice(0, 10), ...tags.slice(-40)].map((tag) => `${tag} 1 ${T - 7} ${T - 3} x`),
    )
  })

  void t.test('what a call sets ends with its transaction', async (t) => {
    const settings = async () =>
      rows(
        `SELECT name, setting FROM pg_settings
         WHERE name IN ('lock_timeout', 'bytea_output', 'client_min_messages', 'synchronous_commit') ORDER BY name`,
      )
    // Connections of a pooler are used by others, too.
    await client.query(
      "SET synchronous_commit = 'on'; SET bytea_output = 'escape'; SET client_min_messages = 'error'; SET lock_timeout = '7s'",
    )
    t.teardown(() => client.query('RESET ALL'))
    const before = await settings()
    const id = newId()
    const all = { grace: 1000, seen: T }
    await held(T, 3)
    const acts: Record<string, () => Promise<unknown>> = {
      put: () => put(id, T, { state: RETRYABLE }),
      admit: () => call('admit', 'pay', T, 1000, 1000, T),
      note: () => call('note', 'pay', id, T, 1000, ['a'], [1], [0], [0], ['x']),
      throttle: () => call('throttle', 'pay', 'bucket', T, 1000, 2, 1000, 1),
      watch: () => call('watch', 'pay', id, T, 1000, 'a'),
      unwatch: () => call('unwatch', 'pay', id, 'a'),
      tell: () => call('tell', ['a'], 'x'),
      prune: () => call('prune', T, 1000, 50, 1000, 100),
      promoted,
      'a claim that is held': () => put(newId(), T + 1, all),
      'a takeover that is held': () => swap(id, T + 1, { version: T }, { ...all, more: 1 }),
    }
    for (const [what, act] of Object.entries(acts)) {
      await act()
      t.same(await settings(), before, what)
    }
  })

  void t.test('a new store has no grace, nor has one for which none is set', async (t) => {
    t.same(await held(T, 3, 0, 'pay', 0), [0, null])
    t.same(await rows('SELECT FROM idempotency.epochs'), [])
    t.same(await held(T, 3), [0, T])
    for (const entry of [0, 1, 2, 3]) {
      t.same(await held(T, entry), [0, T])
      t.same(await held(T + 7, entry, T), [0, T])
    }
  })

  void t.test('another server begins a grace, and its end is exact', async (t) => {
    await held(T, 3)
    await held(T, 3, 0, 'other')
    await promoted()
    t.same(await held(T + 5, 0, T), [1000, T + 5])
    for (const entry of [0, 1, 3])
      t.same(
        [await held(T + 5, entry), await held(T + 1004, entry), await held(T + 1005, entry)],
        [
          [1000, T + 5],
          [1, T + 5],
          [0, T + 5],
        ],
      )
    t.same(await held(T + 3000, 0), [0, T + 5])
    t.same(await held(T + 5, 3, T, 'other'), [0, T], 'of this service alone')
    // The records are in another file.
    await client.query('UPDATE idempotency.epochs SET file = 1')
    t.same(await held(T + 3000, 1, T + 5), [1000, T + 3000])
    // A crash empties the table.
    await client.query("DELETE FROM idempotency.graces WHERE service = 'pay'")
    t.same(await held(T + 3001, 3, T + 3000), [1000, T + 3001])
    // A clock that goes back.
    t.same(await held(T + 3001, 3, T + 3001), [1000, T + 3001])
    t.same(await held(T + 3000, 3, T + 3001), [1000, T + 3000])
  })

  void t.test('claims written again extend a grace by a moment, up to twice its length', async (t) => {
    for (const service of ['pay', 'other', 'late']) {
      await held(T, 3, 0, service)
      await promoted(service)
      t.same(await held(T, 3, 0, service), [1000, T])
    }
    t.same(await held(T + 800, 2), [200, T], 'by nothing while there is enough of it')
    for (const entry of [0, 1, 3]) t.same(await held(T + 801, entry), [199, T])
    t.same(await held(T + 801, 2), [200, T])
    t.same(await held(T + 801, 3), [200, T])
    t.same(await held(T + 801, 3, 0, 'other'), [199, T])
    for (let at = T + 900; at <= T + 1800; at += 100) t.same(await held(at, 2), [200, T])
    t.same(await held(T + 1900, 2), [100, T])
    for (const entry of [2, 3]) t.same(await held(T + 2000, entry), [0, T], 'what is over is not extended')

    // A proxy that comes late begins another one of the same server.
    t.same(await held(T + 1500, 3, T - 7, 'late'), [1000, T])
    for (const entry of [2, 0]) t.same(await held(T + 2400, entry, 0, 'late'), [100, T])
  })

  void t.test('who comes late, or knows that claims are lost, begins a grace', async (t) => {
    await held(T, 3)
    // Another proxy has taken the server for a new one after it lost what this one had claimed.
    t.same(await held(T + 5, 0, T - 7), [1000, T])
    t.same(await held(T + 6, 0, T - 7), [999, T], 'the same grace')
    t.same(await held(T + 1004, 3, T - 7), [1, T])
    t.same(await held(T + 1005, 0, T - 7), [0, T], 'a claim begins no further one')
    t.same(await held(T + 1005, 3, T - 7), [1000, T], 'the look of a proxy that was away does')
    const admitted = await call('admit', 'pay', T + 2005, 1000, 1000, T - 7)
    has(t, admitted, { remaining: '1000', since: T })
    has(t, await call('admit', 'pay', T + 2505, 1000, 1000, T - 7), { remaining: '500', since: T })
    await client.query('DELETE FROM idempotency.epochs')
    t.same(await held(T + 9000, 0, T), [1000, T + 9000], 'a store that lost everything')
  })

  both('a grace holds new claims and takeovers, and nothing else', async (t) => {
    await held(T, 3)
    const [old, fresh, again] = [newId(), newId(), newId()]
    await put(old, T, { grace: 1000, state: RETRYABLE, dropIn: 5000 })
    await promoted()
    const all = { grace: 1000, seen: T, dropIn: 5000 }
    has(t, await put(newId(), T + 1, all), {
      done: 'f',
      remaining: '1000',
      since: T + 1,
      at: T + 1,
    })
    has(t, await put(fresh, T + 1, { ...all, entry: 1 }), { done: 't' })
    has(t, await put(again, T + 1, { ...all, entry: 2 }), { done: 't' })
    const takeOver = (at: number) => swap(old, at, { version: T }, { ...all, more: 1 })
    has(t, await takeOver(T + 1000), {
      done: 'f',
      remaining: '1',
      since: T + 1,
      at: T + 1000,
    })
    has(t, await swap(again, T + 2, { version: T + 1 }, { ...all, state: COMPLETED }), { done: 't' })
    has(t, await put(old, T + 2, all), { done: 'f', remaining: null, stored: /6d696e65/ })
    has(t, await put(newId(), T + 1000, all), { done: 'f', remaining: '1' })
    has(t, await put(newId(), T + 1001, all), { done: 't' })
    has(t, await takeOver(T + 1001), { done: 't' })
    has(t, await call('admit', 'pay', T + 1001, 1000, 1000, T + 1), { remaining: '0', since: T + 1 })
  })

  void t.test('one at a time writes down that the server is another', async (t) => {
    const other = await server.client()
    t.teardown(() => other.end())
    for (const service of ['pay', 'other']) await held(T, 3, 0, service)
    for (const service of ['pay', 'other']) {
      await promoted()
      await other.query(`BEGIN; SELECT FROM idempotency.epochs WHERE service = '${service}' FOR UPDATE`)
      const end = await call('admit', 'pay', T + 1, 50, 1000, T).then(
        ({ remaining }) => remaining,
        ({ code }) => code,
      )
      t.equal(end, service === 'pay' ? '55P03' : '1000')
      await other.query('ROLLBACK')
    }
  })

  void t.test('what has expired is removed, page after page, once per interval', async (t) => {
    const prune = async (at: number, limit = 100, pages = 1000) =>
      Number((await call('prune', at, 1000, 50, pages, limit))['pruned'])
    for (const [id, dropIn] of [
      ['a', 10],
      ['b', 11],
      ['c', 10],
    ] as const)
      await put(id, T, { dropIn })
    await put('a', T, { dropIn: 10, service: 'other', state: COMPLETED })
    await call('renew', 'pay', T, 1000, ['c'], [tokenOf('mine')], [10], [90])
    await call('note', 'pay', 'a', T, 1000, ['x'], [1], [0], [0], ['x'])
    const left = async (table: string) =>
      await listed(`SELECT id FROM idempotency.${table} ORDER BY id, service`)
    t.equal(await prune(T + 9), 0)
    t.same(await left('records'), ['a', 'a', 'b', 'c'])
    t.equal(await prune(T + 58), 0, 'too early')
    t.equal(await prune(T + 8), 0, 'a clock that went back does not stop it')
    t.equal(await prune(T + 57), 0)
    await rows('UPDATE idempotency.pruning SET done_at = 0')
    t.equal(await prune(T + 10), 2)
    for (const table of ['records', 'unresolved']) t.same(await left(table), ['b', 'c'])
    t.same(await left('notes'), [])
    t.equal(await prune(T + 59), 0, 'b is due, but it is too early')
    t.equal(await prune(T + 60), 1)
    t.same(await left('records'), ['c'], 'its lease was renewed')
  })

  void t.test('only what has expired is discarded, whatever else has', async (t) => {
    const discard = async (service: string, waits: boolean) => {
      const [row] = await rows('SELECT idempotency.discard($1, $2, $3, $4) AS done', [
        service,
        'a',
        T + 50,
        waits,
      ])
      return row?.['done'] === 't'
    }
    for (const waits of [true, false]) {
      t.equal(await discard('pay', waits), false, 'there is none')
      await put('a', T)
      await put('a', T, { service: 'other', state: COMPLETED, dropIn: 10 })
      await put('b', T, { dropIn: 10 })
      t.equal(await discard('pay', waits), false)
      t.equal(await discard('other', waits), true, 'the lease is of another service')
      await put('a', T, { service: 'other', dropIn: 10 })
      t.equal(await discard('pay', waits), false)
      const left = await rows('SELECT id, service FROM idempotency.records ORDER BY id, service')
      t.same(
        left.map(({ id, service }) => `${service} ${id}`),
        ['other a', 'pay a', 'pay b'],
      )
      await client.query('DELETE FROM idempotency.records; DELETE FROM idempotency.unresolved')
    }
  })

  void t.test('a removal with a limit goes on at once, and also takes buckets and waits', async (t) => {
    const prune = async (at: number, limit: number) =>
      Number((await call('prune', at, 1000, 50, 1000, limit))['pruned'])
    for (const id of ['a', 'b', 'c']) await put(id, T, { dropIn: 1 })
    for (const fullAt of [T + 1, T + 2])
      await rows("INSERT INTO idempotency.buckets VALUES ($1, 1, 1, $1, $2, 'pay')", [fullAt, String(fullAt)])
    const hour = 3_600_000
    for (const since of [T + 1 - hour, T + 2 - hour])
      await rows("INSERT INTO idempotency.waits VALUES ($1, 'a', 'pay', $2)", [since, String(since)])
    t.equal(await prune(T + 1, 2), 2)
    t.equal(await prune(T + 1, 2), 1)
    t.equal(await prune(T + 1, 2), 0)
    const [row] = await rows('SELECT page, done_at FROM idempotency.pruning')
    has(t, row, { page: 0, done_at: T + 1 })
    t.same(await listed('SELECT id FROM idempotency.buckets'), [String(T + 2)])
    t.same(await listed('SELECT channel FROM idempotency.waits'), [String(T + 2 - hour)])
  })

  void t.test('a removal looks at as many pages as it may, and goes round the table', async (t) => {
    await client.query('TRUNCATE idempotency.records')
    // Three of them fill a page: bytes that cannot be compressed.
    for (let n = 0; n < 9; n++)
      await put(`r${n}`, T, { head: Buffer.concat([HEAD, randomBytes(1800)]), dropIn: n === 1 ? 900 : 1 })
    const left = async () => await listed('SELECT id FROM idempotency.records ORDER BY id')
    for (const [n, there] of [
      ['r1', 'r3', 'r4', 'r5', 'r6', 'r7', 'r8'],
      ['r1', 'r6', 'r7', 'r8'],
      ['r1'],
      ['r1'],
    ].entries()) {
      await call('prune', T + 100 * (n + 1), 1000, 50, 1, 100)
      t.same(await left(), there)
      const place = (await rows('SELECT page FROM idempotency.pruning'))[0]?.['page']
      if (n < 3) t.equal(place, String((n + 1) % 3))
    }
    for (const at of [T + 900, T + 1000]) await call('prune', at, 1000, 50, 1000, 100)
    t.same(await left(), [])
  })

  both('a call waits for who has the lease, and reads what that one has written', async (t) => {
    const id = newId()
    const other = await server.client()
    t.teardown(() => other.end())
    await put(id, T)
    for (const [n, act] of [
      () => swap(id, T + 2, { version: T }, { state: COMPLETED }),
      () => call('remove', 'pay', id, T + 2, 1000, T + 1),
    ].entries()) {
      await other.query('BEGIN')
      await other.query({
        text: "SELECT idempotency.renew('pay', $1, 1000, $2, $3, $4, $5)",
        values: [T + 1, [id], [token], [10], [100]],
      })
      const acting = act()
      await untilWaiting(other)
      await other.query('COMMIT')
      has(t, await acting, { done: 'f' })
      has(t, await stored(id), { version: T + 1 + n, state: IN_PROGRESS })
    }
  })

  void t.test(
    'a call that found no row to lock neither changes one that appears later nor waits',
    async (t) => {
      const [asking, gate, changing] = await Promise.all([server.client(), server.client(), server.client()])
      t.teardown(() => Promise.all([asking, gate, changing].map((one) => one.end())))
      // A call at this instant waits here, after its look for a record to lock.
      const at = T + 5
      await clock(
        `LANGUAGE plpgsql AS 'BEGIN IF _skew = ${at} THEN PERFORM pg_advisory_xact_lock_shared(1); END IF; RETURN _skew; END'`,
      )
      t.teardown(standStill)
      for (const call of [
        `swap('pay', $1, ${at}, 60000, NULL, $2, '{1}', 1::smallint, 2::smallint, 0, $2, $2, $2, 10, 100, 0, 0, 0)`,
        `revive('pay', $1, ${at}, 60000, $2, 10, 10)`,
      ])
        for (const change of [
          "UPDATE idempotency.records SET version = version + 1, token = '\\x00' WHERE id = ",
          'DELETE FROM idempotency.records WHERE id = ',
        ]) {
          const id = newId()
          await gate.query('SELECT pg_advisory_lock(1)')
          const asked = asking.query(`SELECT done FROM idempotency.${call}`, [id, token])
          await untilWaiting(gate)
          await put(id, T)
          await changing.query(`BEGIN; ${change} '${id}'`)
          await gate.query('SELECT pg_advisory_unlock(1)')
          t.match((await asked).rows, [{ done: false }], `${call}, then ${change}`)
          await changing.query('COMMIT')
          if (call.startsWith('swap')) t.ok(await lease(id), 'the lease is unchanged')
        }
    },
  )

  both('those who wait for the record are told of every end, and of no claim', async (t) => {
    for (const state of [IN_PROGRESS, COMPLETED, RETRYABLE, UNKNOWN]) {
      const id = newId()
      await waits(id, 'pay', 'a', 'b')
      await waits(id, 'other', 'c')
      await waits(newId(), 'pay', 'd')
      const waiting = state === IN_PROGRESS ? '' : 'a b'
      has(t, await put(id, T, { state }), { done: 't', waiting })
      has(t, await swap(id, T, { version: T }, { state }), { done: 't', waiting })
    }
  })

  both('each write is stamped to the millisecond, and adds one to the version', async (t) => {
    const id = newId()
    await put(id, T)
    await call('renew', 'pay', T + 9, 1000, [id], [token], [50], [1000])
    has(t, await stored(id), { version: T + 1, due: T + 59, drop_at: T + 1009, updated_at: T })
    await swap(id, T + 10, { version: T + 1 }, { state: UNKNOWN, head: head(1), dueIn: 20, dropIn: 30 })
    const stamps = { version: T + 2, fence: T, created_at: T, updated_at: T + 10 }
    has(t, await stored(id), { ...stamps, due: T + 30, drop_at: T + 40 })
    await call('revive', 'pay', id, T + 11, 1000, token, 50, 60)
    has(t, await stored(id), {
      ...stamps,
      version: T + 3,
      due: T + 61,
      drop_at: T + 71,
      head: head(0).toString('hex'),
    })
    has(t, await lease(id), { due: T + 61, drop_at: T + 71, renewals: 0, state: 1, token: 'mine' })
  })

  both('what is due is listed from its millisecond on, until its record drops', async (t) => {
    const [due, bodies, places] = ['due', 'bodies', 'list'].map((what) => async (at: number) => {
      const from = what === 'bodies' ? 2 ** 48 : 0
      return (await call('places', 'pay', at, 1000, what, from, '', 10))['listed']
    }) as [(at: number) => unknown, (at: number) => unknown, (at: number) => unknown]
    await put('a', T)
    await put('b', T, { state: COMPLETED, head: BODY_ENDS })
    for (const [id, over] of Object.entries({ c: {}, d: { state: COMPLETED, head: BODY_ENDS } }))
      await put(id, T, { ...over, schema: 2 })
    for (const [list, from, found] of [
      [due, T + 10, `${T + 10} a`],
      [bodies, T + 10, `${2 ** 48 + T + 10} b`],
      [places, T, `${T + 10} a,${T + 10} c`],
    ] as const) {
      t.equal(await list(from), found)
      t.equal(await list(T + 99), found)
      t.equal(await list(T + 100), '')
    }
    for (const list of [due, bodies]) t.equal(await list(T + 9), '')
    await rows("UPDATE idempotency.unresolved SET token = 'x'")
    for (const list of [due, bodies, places])
      t.equal(await list(T + 10), '', 'a lease of an earlier record means nothing')
  })

  void t.test('a header value is Latin-1 without the control characters of ASCII but the tab', async (t) => {
    const isValue = async (value: string) =>
      (await codeOf(rows('SELECT idempotency.header_lines($1)', [JSON.stringify([['a', value]])]))) === 'done'
    for (const code of [9, 32, 126, 128, 159, 255])
      t.equal(await isValue(`x${String.fromCharCode(code)}x`), true, `${code}`)
    for (const code of [8, 10, 31, 127, 256])
      t.equal(await isValue(`x${String.fromCharCode(code)}x`), false, `${code}`)
    for (const blank of [' ', '\t'])
      t.same([await isValue(`x${blank}`), await isValue(`${blank}x`)], [false, false], 'none around it')
  })

  void t.test('a list of what is due waits for nobody', async (t) => {
    const other = await server.client()
    t.teardown(() => other.end())
    for (const id of ['a', 'b', 'c']) await put(id, T, { dueIn: 5 })
    await rows("UPDATE idempotency.records SET state = 2 WHERE id IN ('a', 'b')")
    for (const table of ['records', 'unresolved']) {
      await other.query(`BEGIN; SELECT FROM idempotency.${table} WHERE id = 'a' FOR UPDATE`)
      has(t, await call('places', 'pay', T + 5, 50, 'due', 0, '', 10), { listed: `${T + 5} c` })
      t.ok(await lease('a'))
      t.equal(await lease('b'), null)
      await other.query('ROLLBACK')
    }
  })
}
