import { randomBytes } from 'node:crypto'
import t from 'tap'
import { NO_POSTGRES } from '../support/postgres.ts'
import {
  COMPLETED,
  HEAD,
  has,
  IN_PROGRESS,
  RETRYABLE,
  sqlFunctions,
  T,
  UNKNOWN,
} from '../support/sql-functions.ts'
import { newId } from './fixtures.ts'

// What one call leaves alone of what belongs to others, and for whom it waits.
t.setTimeout(100_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

async function tests(): Promise<void> {
  const { server, client, rows, call, put, swap, stored, lease, numbers, waits, held, promoted } =
    await sqlFunctions(t)
  const token = Buffer.from('mine')
  const codeOf = (asked: Promise<unknown>): Promise<string> =>
    asked.then(
      () => 'done',
      ({ code }: { code: string }) => code,
    )

  void t.test(
    'renewals are added to the version of the record that was finished, and to no other',
    async (t) => {
      const [id, other] = [newId(), newId()]
      await put(id, T)
      await put(id, T, { service: 'other' })
      await put(other, T)
      await put(other, T, { service: 'other', token: 'other' })
      await call('renew', 'pay', T + 1, 1000, [id], [token], [10], [10])
      await call('renew', 'pay', T + 1, 1000, [id], [token], [10], [10])
      await rows("UPDATE idempotency.records SET state = 2 WHERE id = $1 AND service = 'pay'", [id])
      has(t, await swap(id, T + 2, { token: 'mine', states: [IN_PROGRESS] }), { done: 'f', waiting: '' })
      t.same(await rows('SELECT id, service, version FROM idempotency.records WHERE version <> $1', [T]), [
        { id, service: 'pay', version: String(T + 2) },
      ])
      has(t, await stored(id), { version: String(T + 2), state: String(COMPLETED) })
    },
  )

  void t.test('renewals of a lease that is not that of the record do not count', async (t) => {
    const id = newId()
    await put(id, T)
    await call('renew', 'pay', T + 1, 1000, [id], [token], [10], [10])
    await rows("UPDATE idempotency.records SET state = 2, token = 'next'")
    await rows('SELECT idempotency.fold($1, $2)', ['pay', id])
    has(t, await stored(id), { version: String(T) })
    t.same(await rows('SELECT FROM idempotency.unresolved'), [])
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
    await held(T, 3)
    await held(T, 3, 0, 'other')
    await promoted()
    await promoted('other')
    await held(T, 3, 0, 'other')
    t.same(await held(T, 3), [1000, T])
    t.same(await held(T + 800, 2), [200, T])
    for (const entry of [0, 1, 3]) t.same(await held(T + 801, entry), [199, T])
    t.same(await held(T + 801, 2), [200, T])
    t.same(await held(T + 801, 3), [200, T])
    t.same(await held(T + 801, 3, 0, 'other'), [199, T])
    for (let at = T + 900; at <= T + 1800; at += 100) t.same(await held(at, 2), [200, T])
    t.same(await held(T + 1900, 2), [100, T])
    t.same(await held(T + 2000, 2), [0, T], 'what is over is not extended')
    t.same(await held(T + 2000, 3), [0, T])
  })

  void t.test('who comes late, or knows that claims are lost, begins a grace', async (t) => {
    await held(T, 3)
    // Another proxy has taken the server for a new one after it lost what this one had claimed.
    t.same(await held(T + 5, 0, T - 7), [1000, T])
    t.same(await held(T + 6, 0, T - 7), [999, T], 'the same grace')
    t.same(await held(T + 1004, 3, T - 7), [1, T])
    t.same(await held(T + 1005, 0, T - 7), [0, T], 'a claim begins no further one')
    t.same(await held(T + 1005, 3, T - 7), [1000, T], 'the look of a proxy that was away does')
    await client.query('DELETE FROM idempotency.epochs')
    t.same(await held(T + 9000, 0, T), [1000, T + 9000], 'a store that lost everything')
  })

  void t.test('a grace holds new claims and takeovers, and nothing else', async (t) => {
    await held(T, 3)
    const [old, fresh, again] = [newId(), newId(), newId()]
    await put(old, T, { grace: 1000, state: RETRYABLE, dropIn: 5000 })
    await promoted()
    const all = { grace: 1000, seen: T, dropIn: 5000 }
    has(t, await put(newId(), T + 1, all), {
      done: 'f',
      remaining: '1000',
      since: String(T + 1),
      at: String(T + 1),
    })
    has(t, await put(fresh, T + 1, { ...all, entry: 1 }), { done: 't' })
    has(t, await put(again, T + 1, { ...all, entry: 2 }), { done: 't' })
    const takeOver = (at: number) => swap(old, at, { version: T }, { ...all, more: 1 })
    has(t, await takeOver(T + 1000), {
      done: 'f',
      remaining: '1',
      since: String(T + 1),
      at: String(T + 1000),
    })
    has(t, await swap(again, T + 2, { version: T + 1 }, { ...all, state: COMPLETED }), { done: 't' })
    has(t, await put(old, T + 2, all), { done: 'f', remaining: null, stored: /6d696e65/ })
    has(t, await put(newId(), T + 1000, all), { done: 'f', remaining: '1' })
    has(t, await put(newId(), T + 1001, all), { done: 't' })
    has(t, await takeOver(T + 1001), { done: 't' })
    has(t, await call('admit', 'pay', T + 1001, 1000, 1000, T + 1), { remaining: '0', since: String(T + 1) })
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
    await call('renew', 'pay', T, 1000, ['c'], [Buffer.from('mine')], [10], [90])
    await call('note', 'pay', 'a', T, 1000, ['x'], [1], [0], [0], ['x'])
    const left = async (table: string) =>
      (await rows(`SELECT id FROM idempotency.${table} ORDER BY id, service`)).map(({ id }) => id)
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
    has(t, row, numbers({ page: 0, done_at: T + 1 }))
    t.same(
      (await rows('SELECT id FROM idempotency.buckets')).map(({ id }) => id),
      [String(T + 2)],
    )
    t.same(
      (await rows('SELECT channel FROM idempotency.waits')).map(({ channel }) => channel),
      [String(T + 2 - hour)],
    )
  })

  void t.test('removal goes round the table by pages', async (t) => {
    // Bytes that cannot be compressed.
    for (let n = 0; n < 6; n++)
      await put(`r${n}`, T, { head: Buffer.concat([HEAD, randomBytes(1800)]), dropIn: 1 })
    const [{ pages = '0' } = {}] = await rows(
      "SELECT pg_relation_size('idempotency.records') / 8192 AS pages",
    )
    const places: string[] = []
    let pruned = 0
    for (let n = 0; n <= Number(pages) + 1; n++) {
      pruned += Number((await call('prune', T + 100 * (n + 1), 1000, 50, 1, 100))['pruned'])
      places.push(String((await rows('SELECT page FROM idempotency.pruning'))[0]?.['page']))
    }
    t.equal(pruned, 6)
    const round = [...Array.from({ length: Number(pages) - 1 }, (_, n) => String(n + 1)), '0']
    t.same(places.slice(0, round.length), round)
  })

  void t.test('a claim written again makes no grace shorter, nor longer than twice its length', async (t) => {
    await held(T, 3)
    await promoted()
    t.same(await held(T, 3), [1000, T])
    for (let at = T + 990; at <= T + 1790; at += 100) t.same(await held(at, 2), [200, T])
    t.same(await held(T + 1900, 2), [100, T])

    // A proxy that comes late begins another one of the same server.
    await held(T, 3, 0, 'other')
    await promoted('other')
    t.same(await held(T, 3, 0, 'other'), [1000, T])
    t.same(await held(T + 1500, 3, T - 7, 'other'), [1000, T])
    for (const entry of [2, 0]) t.same(await held(T + 2400, entry, 0, 'other'), [100, T])
  })

  void t.test('a proxy that was away begins a grace by its look, not by a claim', async (t) => {
    await held(T, 3)
    await promoted()
    await held(T, 3)
    const admitted = (at: number, seen: number) => call('admit', 'pay', at, 1000, 1000, seen)
    has(t, await admitted(T + 1000, T - 7), { remaining: '1000', since: String(T) })
    has(t, await admitted(T + 1500, T - 7), { remaining: '500', since: String(T) })
  })

  void t.test('a call waits for who has the lease, and reads what that one has written', async (t) => {
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
        text: "SELECT idempotency.renew(1, 'pay', $1, 1000, $2, $3, $4, $5)",
        values: [T + 1, [id], [token], [10], [100]],
      })
      const acting = act()
      await untilWaiting(other)
      await other.query('COMMIT')
      has(t, await acting, { done: 'f' })
      has(t, await stored(id), { version: String(T + 1 + n), state: String(IN_PROGRESS) })
    }
  })

  void t.test('nobody waits for who is at work on another record', async (t) => {
    const [id, another] = [newId(), newId()]
    const other = await server.client()
    t.teardown(() => other.end())
    const acts = {
      swap: () => call('swap', 'pay', id, T, 50, T, null, null, 1, 1, 0, token, HEAD, HEAD, 10, 100, 0, 0, 0),
      revive: () => call('revive', 'pay', id, T, 50, token, 10, 10),
      remove: () => call('remove', 'pay', id, T, 50, T),
      'a claim after its end': () =>
        call('put', 'pay', id, T + 100, 50, 1, 1, 0, token, 0, HEAD, HEAD, 10, 100, 0, 0, 0),
      watch: () => call('watch', 'pay', id, T, 50, 'a'),
      note: () => call('note', 'pay', id, T, 50, ['a'], [1], [0], [0], ['x']),
    }
    for (const [what, act] of Object.entries(acts)) {
      for (const one of [id, another]) await put(one, T)
      await other.query(
        `BEGIN; SELECT FROM idempotency.records WHERE id = '${another}' FOR UPDATE;
         SELECT FROM idempotency.unresolved WHERE id = '${another}' FOR UPDATE`,
      )
      t.equal(await codeOf(act()), 'done', what)
      await other.query('ROLLBACK')
      await client.query('DELETE FROM idempotency.records; DELETE FROM idempotency.unresolved')
    }
  })

  void t.test('those who wait are told of every end, and of no claim', async (t) => {
    for (const state of [IN_PROGRESS, COMPLETED, RETRYABLE, UNKNOWN]) {
      const id = newId()
      await waits(id, 'pay', 'a')
      const waiting = state === IN_PROGRESS ? '' : 'a'
      has(t, await put(id, T, { state }), { done: 't', waiting })
      has(t, await swap(id, T, { version: T }, { state }), { done: 't', waiting })
    }
  })

  void t.test(
    'one lease of a finished record is taken out, too, at the instant at which it is due',
    async (t) => {
      await put('a', T, { dueIn: 5 })
      await put('b', T, { dueIn: 10 })
      await rows("UPDATE idempotency.records SET state = 2 WHERE id = 'a'")
      const due = async (at: number) => (await call('due', 'pay', at, 1000, 10))['ids']
      t.equal(await due(T + 4), '')
      t.ok(await lease('a'))
      t.equal(await due(T + 5), '')
      t.equal(await lease('a'), null)
      t.ok(await lease('b'))
    },
  )

  void t.test('a note that is repeated keeps its first time and has its last', async (t) => {
    await put('a', T)
    for (const at of [T, T + 5, T + 9]) await call('note', 'pay', 'a', at, 1000, ['x'], [1], [1], [0], ['y'])
    const [row] = await rows('SELECT lines[1] AS line FROM idempotency.notes')
    t.equal(row?.['line'], `x 3 ${T - 1} ${T + 9} y`)
  })

  void t.test('a rate of which nothing is used up has no row', async (t) => {
    const throttle = async (at: number, units: number, bucket = 'a', service = 'pay') =>
      (await call('throttle', service, bucket, at, 1000, 1, 1000, units))['wait']
    const left = async () =>
      (await rows('SELECT service, id FROM idempotency.buckets ORDER BY 1, 2')).map(
        ({ service, id }) => `${service} ${id}`,
      )
    t.equal(await throttle(T, 0), '0')
    t.same(await left(), [])
    for (const bucket of ['a', 'b']) t.equal(await throttle(T, 1, bucket), '0')
    t.equal(await throttle(T, 1, 'a', 'other'), '0')
    const times = async () =>
      (await rows('SELECT at, full_at FROM idempotency.buckets ORDER BY service, id')).map(
        ({ at, full_at }) => [Number(at) - T, Number(full_at) - T],
      )
    t.same(await times(), [
      [0, 1000],
      [0, 1000],
      [0, 1000],
    ])
    t.equal(await throttle(T + 999, 0), '0')
    t.same(await times(), [
      [0, 1000],
      [999, 1000],
      [0, 1000],
    ])
    t.equal((await left()).length, 3)
    t.equal(await throttle(T + 1000, 0), '0')
    t.same(await left(), ['other a', 'pay b'])
    t.equal(await throttle(T + 5000, 1, 'b'), '0', 'all of it is there again')
  })

  void t.test('a note is written to one record alone', async (t) => {
    for (const id of ['a', 'b']) await put(id, T)
    await put('a', T, { service: 'other' })
    const note = (id: string, text: string, service = 'pay') =>
      call('note', service, id, T, 1000, ['x'], [1], [0], [0], [text])
    await note('a', 'first', 'other')
    await note('b', 'second')
    await note('a', 'third')
    const found = await rows('SELECT service, id, lines[1] AS line FROM idempotency.notes ORDER BY 1, 2')
    t.same(
      found.map(({ service, id, line }) => `${service} ${id} ${line?.split(' ').at(-1)}`),
      ['other a first', 'pay a third', 'pay b second'],
    )
  })

  void t.test('a removal looks at as many pages as it may, and at no other', async (t) => {
    await client.query('TRUNCATE idempotency.records')
    // Three of them fill a page.
    for (let n = 0; n < 9; n++)
      await put(`r${n}`, T, { head: Buffer.concat([HEAD, randomBytes(1800)]), dropIn: n === 1 ? 900 : 1 })
    for (const [at, left] of [
      [T + 100, ['r1', 'r3', 'r4', 'r5', 'r6', 'r7', 'r8']],
      [T + 200, ['r1', 'r6', 'r7', 'r8']],
    ] as const) {
      await call('prune', at, 1000, 50, 1, 100)
      t.same(
        (await rows('SELECT id FROM idempotency.records ORDER BY id')).map(({ id }) => id),
        left,
      )
    }
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
      has(t, await call('due', 'pay', T + 5, 50, 10), { ids: 'c' })
      t.ok(await lease('a'))
      t.equal(await lease('b'), null)
      await other.query('ROLLBACK')
    }
  })

  /** Until somebody waits for a lock of this connection. */
  async function untilWaiting(holder: typeof client): Promise<void> {
    for (;;) {
      const { rows: found } = await holder.query(
        'SELECT FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid))',
      )
      if (found.length > 0) return
    }
  }
}
