import { randomBytes } from 'node:crypto'
import type pg from 'pg'
import t, { type Test } from 'tap'
import { layoutScript } from '../../src/store/postgres/layout.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { newId } from './fixtures.ts'

// What the contracts of stores (postgres.test.ts) do not show: locks, leases of finished records, and what is removed.
t.setTimeout(100_000)

type Columns = Record<string, string | null>

/** Some columns of a row. Not `t.match`: for that, '10' is in '100'. */
function has(t: Test, row: Columns | null | undefined, expected: Record<string, string | number>): void {
  const found = Object.keys(expected).map((name) => [name, row?.[name] ?? null])
  const texts = Object.entries(expected).map(([name, value]) => [name, `${value}`])
  t.strictSame(Object.fromEntries(found), Object.fromEntries(texts))
}

interface Written {
  readonly service?: string
  readonly state?: number
  readonly fence?: number
  readonly token?: string
  readonly createdAt?: number
  readonly head?: Buffer
  readonly dueIn?: number
  readonly dropIn?: number
  readonly grace?: number
  readonly seen?: number
}

const [IN_PROGRESS, COMPLETED, RETRYABLE] = [1, 2, 3]
const T = 1_000_000
/** Three bytes long, without flags. */
const HEAD = Buffer.from([0, 0, 0, 4, 0, 0, 0, 0])

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

/** The functions of the schema, on a server of its own whose clock for them stands still at the instant that each call gives. */
async function tests(): Promise<void> {
  const server = await PostgresServer.start('fsync=off')
  t.teardown(() => server[Symbol.asyncDispose]())
  const client: pg.Client = await server.client()
  t.teardown(() => client.end())
  await client.query(layoutScript())
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
  const token = tokenOf('mine')
  let isTogether = false
  /** Claims alone, and as the store sends them: with others first. */
  const both = (name: string, act: (t: Test) => Promise<void>): void => {
    for (const one of [false, true])
      void t.test(`${name}, ${one ? 'together' : 'alone'}`, (t) => {
        isTogether = one
        return act(t).finally(() => (isTogether = false))
      })
  }

  const put = async (id: string, at: number, over: Written = {}): Promise<Columns> => {
    const { service = 'pay', state = IN_PROGRESS, fence = 0, token = 'mine', createdAt = 0 } = over
    const { head = HEAD, dueIn = 10, dropIn = 100, grace = 0, seen = 0 } = over
    if (isTogether && state === IN_PROGRESS) {
      const bytes = Buffer.concat([
        Buffer.alloc(16),
        tokenOf(token),
        Buffer.alloc(24),
        head,
        Buffer.from('p'),
      ])
      const columns = [0, fence, createdAt, dueIn, dropIn, 0, bytes.length - 1, bytes.length].map((n) => [n])
      const args = [service, at, 1000, grace, seen, [id], ...columns, bytes]
      const places = args.map((_, n) => `$${n + 1}`).join(', ')
      const decided = await rows(`SELECT f.* FROM idempotency.claims(${places}) f WHERE id = $6[1]`, args)
      if (decided[0] !== undefined) return decided[0]
    }
    const record = [1, state, fence, tokenOf(token), createdAt, head, Buffer.from('p'), dueIn, dropIn]
    return call('put', service, id, at, 1000, ...record, 0, grace, seen)
  }
  /** By version. */
  const swap = (
    id: string,
    at: number,
    version: number,
    state: number,
    ...rest: [number?, number?, number?]
  ) => {
    const [more = 0, grace = 0, seen = 0] = rest
    const record = [1, state, 0, token, HEAD, Buffer.from('q'), 10, 100]
    return call('swap', 'pay', id, at, 1000, version, null, null, ...record, more, grace, seen)
  }
  const found = async (columns: string, table: string, id: string, service: string) =>
    (
      await rows(`SELECT ${columns}, state FROM idempotency.${table} WHERE id = $1 AND service = $2`, [
        id,
        service,
      ])
    )[0]
  const stored = (id: string, service = 'pay') =>
    found('version, fence, created_at, updated_at, due, drop_at', 'stored', id, service)
  const lease = (id: string, service = 'pay') => found('due, drop_at', 'unresolved', id, service)
  /** Each row in one text. */
  const listed = async (text: string) => (await rows(text)).map((row) => Object.values(row).join(' '))
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

  both('a recognised claim is a write, for which a standby is waited; a refusal is not', async (t) => {
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
  })

  void t.test('leases of finished records that are due keep no others from the list', async (t) => {
    for (const id of ['a', 'b']) await put(id, T, { dueIn: 5 })
    await put('c', T, { dueIn: 6 })
    await put('d', T, { dueIn: 10 })
    await put('a', T, { dueIn: 5, service: 'other' })
    await rows("UPDATE idempotency.records SET state = 2 WHERE id IN ('a', 'b', 'd')")
    has(t, await call('places', 'pay', T + 4, 1000, 'due', 0, '', 2), { listed: '' })
    t.ok(await lease('a'))
    has(t, await call('places', 'pay', T + 6, 1000, 'due', 0, '', 2), { listed: `${T + 6} c` })
    t.ok(await lease('a', 'other'))
    t.same([await lease('a'), await lease('b')], [undefined, undefined])
    t.ok(await lease('d'))
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
    await call('admit', 'pay', T, 1000, 1000, 0)
    const acts: Record<string, () => Promise<unknown>> = {
      put: () => put(id, T, { state: RETRYABLE }),
      admit: () => call('admit', 'pay', T, 1000, 1000, T),
      note: () => call('note', 'pay', id, T, 1000, ['a'], [1], [0], [0], ['x']),
      throttle: () => call('throttle', 'pay', 'bucket', T, 1000, 2, 1000, 1),
      watch: () => call('watch', 'pay', id, T, 1000, 'a'),
      unwatch: () => call('unwatch', 'pay', id, 'a'),
      tell: () => call('tell', ['a'], 'x'),
      prune: () => call('prune', T, 1000, 50, 1000, 100),
      'another server': () => rows("UPDATE idempotency.epochs SET started = 'epoch'"),
      'a claim that is held': () => put(newId(), T + 1, { grace: 1000, seen: T }),
      'a takeover that is held': () => swap(id, T + 1, T, IN_PROGRESS, 1, 1000, T),
    }
    for (const [what, act] of Object.entries(acts)) {
      await act()
      t.same(await settings(), before, what)
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
    await put('a', T, { dropIn: 90, service: 'other', state: COMPLETED })
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
    t.equal(await prune(T + 10), 1)
    t.same(await left('records'), ['a', 'b', 'c'], 'another service has a record of this id')
    t.same(await left('unresolved'), ['b', 'c'])
    t.same(await left('notes'), [])
    t.equal(await prune(T + 59), 0, 'b is due, but it is too early')
    t.equal(await prune(T + 60), 1)
    t.same(await left('records'), ['a', 'c'], 'the lease of c was renewed')
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

  void t.test('a call waits for who has the lease, and reads what that one has written', async (t) => {
    const id = newId()
    const other = await server.client()
    t.teardown(() => other.end())
    await put(id, T)
    for (const [n, act] of [
      () => swap(id, T + 2, T, COMPLETED),
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

  void t.test('a call that found no row to lock neither waits for nor changes a later one', async (t) => {
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
      t.equal(await lease('b'), undefined)
      await other.query('ROLLBACK')
    }
  })
}
