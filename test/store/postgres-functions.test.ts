import t from 'tap'
import { NO_POSTGRES } from '../support/postgres.ts'
import {
  BODY_ENDS,
  COMPLETED,
  EXPIRED,
  HEAD,
  has,
  head,
  IN_PROGRESS,
  RETRYABLE,
  sqlFunctions,
  T,
  UNKNOWN,
} from '../support/sql-functions.ts'
import { newId } from './fixtures.ts'

// The functions to the millisecond.
t.setTimeout(100_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

async function tests(): Promise<void> {
  const {
    server,
    client,
    rows,
    call,
    put,
    swap,
    isClockRight,
    isThere,
    stored,
    lease,
    numbers,
    waits,
    held,
    promoted,
  } = await sqlFunctions(t)

  void t.test('its time is in milliseconds since 1970', async (t) => {
    t.ok(isClockRight)
  })

  void t.test('a claim is stamped with its time, and has a lease', async (t) => {
    const id = newId()
    has(t, await put(id, T), {
      ...numbers({ at: T, version: T, fence: T, created_at: T }),
      done: 't',
      waiting: '',
    })
    const stamps = { version: T, fence: T, created_at: T, updated_at: T, due: T + 10, drop_at: T + 100 }
    const rest = { schema: 1, state: 1, token: 'mine', head: HEAD.toString('hex'), payload: 'p' }
    t.strictSame({ ...(await stored(id)) }, numbers({ ...stamps, ...rest }))
    t.strictSame(
      { ...(await lease(id)) },
      numbers({ due: T + 10, drop_at: T + 100, renewals: 0, state: 1, token: 'mine' }),
    )
    const given = newId()
    has(t, await put(given, T, { fence: 5, createdAt: 6 }), numbers({ version: T, fence: 5, created_at: 6 }))
    has(t, await stored(given), numbers({ version: T, fence: 5, created_at: 6 }))
    const completed = newId()
    await put(completed, T, { state: COMPLETED })
    has(t, await stored(completed), numbers({ version: T, due: T + 10, drop_at: T + 100 }))
  })

  void t.test('a claim that had to wait is stamped with the time after that', async (t) => {
    const ticking = async (step: number) => {
      await client.query(
        `CREATE OR REPLACE FUNCTION idempotency.now(_skew bigint) RETURNS bigint LANGUAGE sql AS 'SELECT _skew + ${step} * (nextval(''public.ticks'') - 1)'`,
      )
      await client.query("SELECT setval('ticks', 1, false)")
    }
    await client.query('CREATE SEQUENCE ticks')
    t.teardown(() =>
      client.query(
        "CREATE OR REPLACE FUNCTION idempotency.now(_skew bigint) RETURNS bigint LANGUAGE sql AS 'SELECT _skew'",
      ),
    )
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
        has(t, await put(id, T, { ...given, state: RETRYABLE }), numbers({ ...stamps, at }))
        has(t, await stored(id), numbers({ ...stamps, updated_at: at, due: at + 10, drop_at: at + 100 }))
        const open = newId()
        await put(open, T, { service: 'other' })
        const before = await stored(open, 'other')
        await ticking(step)
        await put(open, T, given)
        t.strictSame(await stored(open, 'other'), before)
        has(t, await lease(open), numbers({ due: at + 10, drop_at: at + 100 }))
      }
  })

  void t.test('a record exists until it drops, and not a millisecond longer', async (t) => {
    const id = newId()
    await put(id, T)
    const last = T + 99
    const version = { version: T }
    t.ok(await isThere(id, last))
    t.notOk(await isThere(id, last + 1))
    t.notOk(await isThere(id, last, 'other'))
    has(t, await put(id, last, { token: 'other' }), { done: 'f', at: String(last), stored: /mine|6d696e65/ })
    has(t, await put(id, last), { done: 'f' }, 'its own claim is recognised')
    has(t, await swap(id, last + 1, version), { done: 'f', stored: null })
    has(t, await call('remove', 'pay', id, last + 1, 1000, T), { done: 'f' })
    const token = [Buffer.from('mine')]
    has(t, await call('renew', 'pay', last + 1, 1000, [id], token, [10], [10]), { renewed: '' })
    has(t, await call('revive', 'pay', id, last + 1, 1000, token[0], 10, 10), { done: 'f' })
    const list = (at: number) => call('list', 'pay', at, 1000, '', '', 10)
    t.strictSame([(await list(last))['ids'], (await list(last + 1))['ids']], [id, ''])
    has(t, await swap(id, last, version), { done: 't' })
    const again = newId()
    await put(again, T)
    has(t, await put(again, last + 1, { token: 'next' }), { done: 't', version: String(last + 1) })
    has(t, await stored(again), { token: 'next' })
  })

  void t.test(
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

  void t.test('a swap stamps what it writes, and the fence never falls', async (t) => {
    const id = newId()
    await put(id, T, { createdAt: 5 })
    await waits(id, 'pay', 'a', 'b')
    await waits(id, 'other', 'c')
    await waits(newId(), 'pay', 'd')
    const written = await swap(
      id,
      T + 7,
      { version: T },
      { state: COMPLETED, token: 'next', dueIn: 20, dropIn: 30 },
    )
    has(t, written, {
      ...numbers({ at: T + 7, version: T + 1, fence: T, created_at: 5 }),
      done: 't',
      waiting: 'a b',
      stored: null,
    })
    const stamps = {
      version: T + 1,
      fence: T,
      created_at: 5,
      updated_at: T + 7,
      due: T + 27,
      drop_at: T + 37,
    }
    t.strictSame(
      { ...(await stored(id)) },
      numbers({ ...stamps, schema: 1, state: 2, token: 'next', head: HEAD.toString('hex'), payload: 'q' }),
    )
    t.equal(await lease(id), null)
    has(t, await swap(id, T + 8, { version: T + 1 }, { more: 1 }), { fence: String(T + 1), waiting: '' })
    has(t, await lease(id), numbers({ due: T + 18, drop_at: T + 108, renewals: 0 }))
    has(t, await swap(id, T + 9, { version: T + 2 }, { fence: T + 5, more: 1 }), { fence: String(T + 5) })
  })

  void t.test('a swap whose condition does not hold changes nothing', async (t) => {
    const id = newId()
    await put(id, T)
    await waits(id, 'pay', 'a')
    const before = await stored(id)
    for (const condition of [
      { version: T + 1 },
      { version: T - 1 },
      { token: 'other', states: [IN_PROGRESS] },
      { token: 'mine', states: [UNKNOWN, COMPLETED] },
      { token: 'mine', states: [] },
      {},
    ])
      has(t, await swap(id, T + 1, condition), { done: 'f', waiting: null, stored: /6d696e65/ })
    has(t, await swap(id, T + 1, { version: T }, { service: 'other' }), {
      done: 'f',
      stored: null,
    })
    t.strictSame(await stored(id), before)
    has(t, await swap(id, T + 1, { token: 'mine', states: [UNKNOWN, IN_PROGRESS] }), { done: 't' })
    // Of a later release.
    const later = newId()
    await put(later, T, { schema: 2 })
    has(t, await swap(later, T + 1, { version: T }), { done: 'f' })
    has(t, await swap(later, T + 1, { token: 'mine', states: [IN_PROGRESS] }), { done: 'f' })
  })

  void t.test('of a record that its upstream has finished, the owner takes out the lease', async (t) => {
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
      await call('renew', 'pay', T + 1, 1000, [id], [Buffer.from('mine')], [10], [10])
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
      has(t, await stored(id), { version: String(T + 1) }, 'which goes on counting')
      t.ok(await lease(other))
      t.ok(await lease(id, 'other'))
    }
  })

  void t.test('a renewal prolongs the lease of its owner, and of nobody else', async (t) => {
    const [mine, stranger, unknown, later, ended, twin] = Array.from({ length: 6 }, newId) as string[] as [
      string,
      string,
      string,
      string,
      string,
      string,
    ]
    await put(mine, T)
    await put(stranger, T, { token: 'other' })
    await put(unknown, T, { state: UNKNOWN })
    await put(later, T, { schema: 2 })
    await put(ended, T, { dropIn: 9 })
    await put(twin, T, { service: 'other' })
    await put(mine, T, { service: 'other' })
    const ids = [mine, stranger, unknown, later, ended, twin]
    const renew = (at: number, dueIn: number, dropIn: number) =>
      call(
        'renew',
        'pay',
        at,
        1000,
        ids,
        ids.map(() => Buffer.from('mine')),
        ids.map(() => dueIn),
        ids.map(() => dropIn),
      )
    has(t, await renew(T + 9, 50, 1), { renewed: mine })
    has(t, await stored(mine), numbers({ version: T + 1, due: T + 59, drop_at: T + 100, updated_at: T }))
    has(t, await renew(T + 99, 50, 60), { renewed: mine })
    has(t, await stored(mine), numbers({ version: T + 2, due: T + 149, drop_at: T + 159 }))
    has(t, await lease(mine, 'other'), numbers({ due: T + 10, renewals: 0 }))
    for (const id of [stranger, unknown, later]) has(t, await stored(id), numbers({ version: T }))
    await rows('UPDATE idempotency.records SET state = 2 WHERE id = $1', [mine])
    has(t, await renew(T + 100, 50, 60), { renewed: '' }, 'its upstream has finished it')
  })

  void t.test('a silent owner revives its record', async (t) => {
    const revive = (id: string, at = T + 5, token = 'mine', service = 'pay') =>
      call('revive', service, id, at, 1000, Buffer.from(token), 50, 60)
    for (const [over, isRevived] of [
      [{ state: UNKNOWN, head: head(1, 2) }, true],
      [{ state: UNKNOWN, head: head(1) }, true],
      [{ state: UNKNOWN, head: head(3) }, true],
      [{ state: UNKNOWN, head: head(2) }, false],
      [{ state: UNKNOWN, head: Buffer.alloc(4, 1) }, false],
      [{ state: IN_PROGRESS, head: head(2) }, true],
      [{ state: IN_PROGRESS, head: Buffer.alloc(4, 1) }, true],
      [{ state: COMPLETED, head: head(1) }, false],
      [{ state: RETRYABLE, head: head(1) }, false],
      [{ state: EXPIRED, head: head(1) }, false],
      [{ state: UNKNOWN, head: head(1), schema: 2 }, false],
      [{ state: UNKNOWN, head: head(1), token: 'other' }, false],
      [{ state: UNKNOWN, head: head(1), service: 'other' }, false],
    ] as const) {
      const id = newId()
      await put(id, T, over)
      const before = await stored(id, 'service' in over ? over.service : 'pay')
      has(t, await revive(id), { done: isRevived ? 't' : 'f' }, JSON.stringify(over))
      const after = await stored(id, 'service' in over ? over.service : 'pay')
      if (!isRevived) t.strictSame(after, before)
      else {
        has(t, after, numbers({ version: T + 1, state: 1, due: T + 55, drop_at: T + 100, updated_at: T }))
        const flags = over.head.length > 4 ? '00' : ''
        t.equal(
          after['head'],
          over.head.toString('hex').slice(0, 8) + flags + over.head.toString('hex').slice(10),
        )
        has(
          t,
          await lease(id),
          numbers({ due: T + 55, drop_at: T + 100, renewals: 0, state: 1, token: 'mine' }),
        )
        await revive(id, T + 50)
        has(t, await stored(id), numbers({ version: T + 2, drop_at: T + 110 }))
      }
    }
  })

  void t.test('a removal takes the version that it means, with all that belongs to it', async (t) => {
    const id = newId()
    const other = newId()
    for (const [one, service] of [
      [id, 'pay'],
      [id, 'other'],
      [other, 'pay'],
    ] as const) {
      await put(one, T, { service })
      await call('note', service, one, T, 1000, ['a'], [1], [0], [0], ['x'])
    }
    await waits(id, 'pay', 'a')
    for (const [version, service] of [
      [T + 1, 'pay'],
      [T - 1, 'pay'],
      [T, 'third'],
    ] as const)
      has(t, await call('remove', service, id, T + 1, 1000, version), { done: 'f', waiting: null })
    has(t, await call('remove', 'pay', id, T + 1, 1000, T), { done: 't', waiting: 'a' })
    for (const table of ['records', 'unresolved', 'notes'])
      t.strictSame(
        (await rows(`SELECT id, service FROM idempotency.${table} ORDER BY service`)).map((row) => ({
          ...row,
        })),
        [
          { id, service: 'other' },
          { id: other, service: 'pay' },
        ],
      )
  })

  void t.test('what is due is listed from its instant on, oldest first', async (t) => {
    const due = async (at: number, limit = 10) => (await call('due', 'pay', at, 1000, limit))['ids']
    const [a, b, c] = ['a', 'b', 'c']
    await put(c, T, { dueIn: 10 })
    await put(b, T, { dueIn: 5, state: UNKNOWN })
    await put(a, T, { dueIn: 10 })
    await put('other', T, { dueIn: 5, service: 'other' })
    await put('later', T, { dueIn: 5, schema: 2 })
    for (const state of [COMPLETED, RETRYABLE, EXPIRED])
      await put(`s${state}`, T, { dueIn: 5, state, head: BODY_ENDS })
    t.equal(await due(T + 4), '')
    t.equal(await due(T + 5), b)
    t.equal(await due(T + 9), b)
    t.equal(await due(T + 10), 'b a c')
    t.equal(await due(T + 99, 2), 'b a')
    t.equal(await due(T + 100), '')
    await rows("UPDATE idempotency.unresolved SET token = 'x' WHERE id = 'a'")
    t.equal(await due(T + 10), 'b c', 'a lease of an earlier record means nothing')
    await rows("UPDATE idempotency.records SET state = 2 WHERE id = 'b'")
    await call('renew', 'pay', T + 6, 1000, [c], [Buffer.from('mine')], [4], [0])
    t.equal(await due(T + 10), c, 'nor does one whose record is completed')
    t.equal(await lease(b), null, 'which is taken out')
    t.ok(await lease('other', 'other'))
  })

  void t.test(
    'leases of completed records are taken out before they keep others from the list',
    async (t) => {
      for (const id of ['a', 'b']) await put(id, T, { dueIn: 1 })
      await put('c', T, { dueIn: 2 })
      await put('a', T, { dueIn: 1, service: 'other' })
      await rows("UPDATE idempotency.records SET state = 2 WHERE id IN ('a', 'b')")
      has(t, await call('due', 'pay', T + 2, 1000, 2), { ids: 'c' })
      t.ok(await lease('a', 'other'))
      t.equal(await lease('b'), null)
    },
  )

  void t.test('responses that have ended are listed, while their records live', async (t) => {
    const bodies = async (at: number, limit = 10) => (await call('bodies', 'pay', at, 1000, limit))['ids']
    await put('c', T, { state: COMPLETED, head: BODY_ENDS })
    await put('a', T, { state: COMPLETED, head: head(6, 1) })
    await put('b', T, { state: COMPLETED, head: BODY_ENDS, dueIn: 5 })
    for (const [id, over] of Object.entries({
      never: { head: head(3) },
      short: { head: Buffer.alloc(4, 4) },
      later: { head: BODY_ENDS, schema: 2 },
      theirs: { head: BODY_ENDS, service: 'other' },
      early: { head: BODY_ENDS, state: RETRYABLE },
      open: { head: BODY_ENDS, state: UNKNOWN },
    }))
      await put(id, T, { state: COMPLETED, dueIn: 5, ...over })
    t.equal(await bodies(T + 4), '')
    t.equal(await bodies(T + 5), 'b')
    t.equal(await bodies(T + 10), 'b a c')
    t.equal(await bodies(T + 99, 2), 'b a')
    t.equal(await bodies(T + 100), '')
    has(t, await lease('a'), numbers({ due: 2 ** 48 + T + 10 }))
    for (const id of ['never', 'short', 'early']) t.equal(await lease(id), null)
    has(t, await call('due', 'pay', T + 10, 1000, 10), { ids: 'open' })
    await rows("UPDATE idempotency.unresolved SET token = 'x' WHERE id = 'a'")
    t.equal(await bodies(T + 10), 'b c')
  })

  void t.test('unresolved records are listed by place, and all records by id', async (t) => {
    const places = async (due: number, id: string, limit = 10, at = T) =>
      (await call('places', 'pay', at, 1000, due, id, limit))['listed']
    await put('b', T, { dueIn: 5 })
    await put('a', T, { dueIn: 5, state: UNKNOWN })
    await put('c', T, { dueIn: 4 })
    await put('d', T, { dueIn: 4, state: COMPLETED, head: BODY_ENDS })
    await put('e', T, { dueIn: 4, service: 'other' })
    const [c, a, b] = [`${T + 4} c`, `${T + 5} a`, `${T + 5} b`]
    t.equal(await places(0, ''), `${c},${a},${b}`)
    t.equal(await places(0, '', 2), `${c},${a}`)
    t.equal(await places(T + 4, 'c'), `${a},${b}`)
    t.equal(await places(T + 5, 'a'), b)
    t.equal(await places(0, '', 10, T + 99), `${c},${a},${b}`)
    t.equal(await places(0, '', 10, T + 100), '')
    await rows("UPDATE idempotency.unresolved SET token = 'x' WHERE id = 'b'")
    await rows("UPDATE idempotency.records SET state = 2 WHERE id = 'c'")
    t.equal(await places(0, ''), a)

    const list = async (beginning: string, after: string, limit = 10) =>
      (await call('list', 'pay', T, 1000, beginning, after, limit))['ids']
    for (const id of ['aa', 'az', 'b0']) await put(id, T)
    t.equal(await list('', ''), 'a aa az b b0 c d')
    t.equal(await list('', '', 2), 'a aa')
    t.equal(await list('', 'aa'), 'az b b0 c d')
    t.equal(await list('a', ''), 'a aa az')
    t.equal(await list('a', 'a'), 'aa az')
    t.equal(await list('aa', ''), 'aa')
  })

  void t.test('notes say when and how often, and belong to one record', async (t) => {
    const id = newId()
    const note = (at: number, ...notes: [tag: string, count: number, firstAgo: number, lastAgo: number][]) =>
      call(
        'note',
        'pay',
        id,
        at,
        1000,
        ...[0, 1, 2, 3].map((n) => notes.map((one) => one[n])),
        notes.map(([tag]) => `of ${tag}`),
      )
    const notes = async (at: number, service = 'pay') =>
      JSON.parse((await call('notes_of', service, id, at, 1000))['lines'] ?? 'null')
    // Of the same age.
    await put('another', T, { dropIn: 10_000 })
    await call('note', 'pay', 'another', T, 1000, ['z'], [1], [0], [0], ['of another'])
    has(t, await note(T, ['a', 1, 0, 0]), { done: 'f' }, 'there is no record')
    await put(id, T)
    has(t, await note(T, ['a', 2, 7, 3], ['b', 1, 0, 0]), { done: 't' })
    has(t, await note(T + 5, ['b', 3, 4, 1]), { done: 't' })
    const lines = [`a 2 ${T - 7} ${T - 3} of a`, `b 4 ${T} ${T + 4} of b`]
    t.same(await notes(T + 99), lines)
    t.equal(await notes(T + 100), null)
    t.equal(await notes(T, 'other'), null)
    has(t, await note(T + 100, ['a', 1, 0, 0]), { done: 'f' })
    await put(id, T, { service: 'other' })
    await put(id, T + 100, { token: 'next' })
    t.equal(await notes(T + 101), null, 'nor of the record that was there before')
    await note(T + 101, ['c', 1, 0, 0])
    t.same(await notes(T + 101), [`c 1 ${T + 101} ${T + 101} of c`])
    await rows("UPDATE idempotency.records SET schema = 2 WHERE service = 'pay'")
    has(t, await note(T + 101, ['d', 1, 0, 0]), { done: 'f' })
    t.equal(await notes(T + 101), null)
    await rows("UPDATE idempotency.records SET schema = 1 WHERE service = 'pay'")
    for (let n = 0; n < 60; n++) await note(T + 101, [`n${n}`, 1, 0, 0])
    const tags = (await notes(T + 101)).map((line: string) => line.split(' ')[0])
    const all = ['c', ...Array.from({ length: 60 }, (_, n) => `n${n}`)]
    t.same(tags, [...all.slice(0, 10), ...all.slice(-40)])
  })

  void t.test('a rate allows its count, and says exactly when the next unit is there', async (t) => {
    const take = async (at: number, units = 1, count = 2, per = 1000) =>
      Number((await call('throttle', 'pay', 'bucket', at, 1000, count, per, units))['wait'])
    const bucket = async () => (await rows('SELECT at, debt, count, full_at FROM idempotency.buckets'))[0]
    t.same([await take(T), await take(T), await take(T)], [0, 0, 500])
    has(t, await bucket(), numbers({ at: T, debt: 2000, count: 2, full_at: T + 1000 }))
    t.same([await take(T + 499), await take(T + 500), await take(T + 500)], [1, 0, 500])
    t.equal(await take(T + 600, -1), 0)
    has(t, await bucket(), numbers({ at: T + 600, debt: 800, full_at: T + 1000 }))
    t.equal(await take(T + 600, -1), 0)
    t.equal(await bucket(), undefined, 'a full one is not kept')
    t.equal(await take(T + 600), 0)
    // Twice the rate: what is missing takes half the time, rounded up.
    t.same([await take(T + 600, 1, 3, 1000), await take(T + 600, 1, 3, 1000)], [0, 167])
    has(t, await bucket(), numbers({ debt: 2500, count: 3, full_at: T + 600 + 834 }))
    t.equal(await take(T + 100, 1, 3, 1000), 0, 'a clock that went back fills it as well')
    const other = await call('throttle', 'other', 'bucket', T, 1000, 1, 1000, 1)
    has(t, other, { wait: '0' }, 'another service has its own')
  })

  void t.test('what somebody else is at work on is waited for, or passed over', async (t) => {
    const id = newId()
    const token = [Buffer.from('mine')]
    const other = await server.client()
    t.teardown(() => other.end())
    const calls = {
      swap: () =>
        call('swap', 'pay', id, T, 50, T, null, null, 1, 1, 0, token[0], HEAD, HEAD, 10, 100, 0, 0, 0),
      remove: () => call('remove', 'pay', id, T, 50, T),
      revive: () => call('revive', 'pay', id, T, 50, token[0], 10, 10),
      'a claim after its end': () =>
        call('put', 'pay', id, T + 100, 50, 1, 1, 0, Buffer.from('next'), 0, HEAD, HEAD, 10, 100, 0, 0, 0),
    }
    const reading = {
      watch: () => call('watch', 'pay', id, T, 50, 'a'),
      note: () => call('note', 'pay', id, T, 50, ['a'], [1], [0], [0], ['x']),
    }
    const passing = {
      renew: async () => (await call('renew', 'pay', T, 50, [id], token, [10], [10]))['renewed'] === id,
      prune: async () => {
        await rows('UPDATE idempotency.pruning SET page = 0, done_at = 0')
        return (await call('prune', T + 100, 50, 50, 1000, 100))['pruned'] === '1'
      },
    }
    for (const table of ['records', 'unresolved'] as const)
      for (const service of ['pay', 'other']) {
        const lock = () =>
          other.query(
            `BEGIN; SELECT FROM idempotency.${table} WHERE id = '${id}' AND service = '${service}' FOR UPDATE`,
          )
        for (const [what, act] of Object.entries({ ...calls, ...reading })) {
          for (const one of ['pay', 'other']) await put(id, T, { service: one })
          await lock()
          const end = await act().then(
            () => 'done',
            ({ code }) => code,
          )
          const waits = service === 'pay' && (what in calls || table === 'records')
          t.equal(end, waits ? '55P03' : 'done', `${what}, ${table} of ${service}`)
          await other.query('ROLLBACK')
          await client.query('DELETE FROM idempotency.records; DELETE FROM idempotency.unresolved')
        }
        for (const [what, act] of Object.entries(passing)) {
          await put(id, T)
          await put(id, T, { service: 'other', dropIn: 10_000 })
          await lock()
          const isRenewed = what === 'renew' && table === 'records'
          t.equal(await act(), isRenewed || service === 'other', `${what}, ${table} of ${service}`)
          await other.query('ROLLBACK')
          await client.query('DELETE FROM idempotency.records; DELETE FROM idempotency.unresolved')
        }
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

  void t.test('who waits is a row per channel', async (t) => {
    const id = newId()
    for (const channel of ['a', 'b']) await call('watch', 'pay', id, T, 1000, channel)
    await call('watch', 'other', id, T, 1000, 'a')
    await call('watch', 'pay', id, T + 5, 1000, 'a')
    const all = async () =>
      (await rows('SELECT since, service, channel FROM idempotency.waits ORDER BY service, channel')).map(
        (row) => Object.values(row).join(' '),
      )
    t.same(await all(), [`${T} other a`, `${T + 5} pay a`, `${T} pay b`])
    await call('unwatch', 'pay', id, 'a')
    t.same(await all(), [`${T} other a`, `${T} pay b`])
    await call('unwatch', 'pay', newId(), 'b')
    t.same(await all(), [`${T} other a`, `${T} pay b`])
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
}
