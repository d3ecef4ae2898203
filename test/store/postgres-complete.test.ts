import { readFileSync } from 'node:fs'
import { STATUS_CODES } from 'node:http'
import pg from 'pg'
import t, { type Test } from 'tap'
import { HOP_BY_HOP, RESPONSE_HEADER } from '../../src/core/headers.ts'
import type { Completed, CompletedResponse, RecordDraft, RecordId } from '../../src/core/record.ts'
import { NOBODY } from '../../src/core/settle.ts'
import { decodeRecord, encodeDraft, indexPlace, PREFIX } from '../../src/store/record/codec.ts'
import { packed } from '../../src/store/record/packed.ts'
import { Sealer } from '../../src/store/record/sealing.ts'
import { Records } from '../../src/store/records.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { ALL_BYTES, draft, HOUR, MINUTE, newId, newToken, SPANS, settling, until } from './fixtures.ts'
import { opened } from './postgres-fixtures.ts'

t.setTimeout(300_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

/** ttl, ttlFailed, tombstone, `limits.response`. */
const TERMS = { completion: `${HOUR} ${MINUTE} ${MINUTE} 1000` }
const HEADERS = [
  ['Content-Type', 'text/plain'],
  ['Set-Cookie', 'a=1'],
  ['set-cookie', 'b="\xe9"'],
  ['Date', 'Tue, 15 Nov 1994 08:12:31 GMT'],
]

interface Failure {
  readonly code: string
  readonly message: string
  readonly detail?: string
}

interface Claimed {
  readonly id: RecordId
  readonly token: Buffer
  readonly fence: number
}

const failureOf = (asked: Promise<unknown>): Promise<Failure> =>
  asked.then(
    (done) => ({ code: 'none', message: String(done) }),
    (error: Failure) => error,
  )

async function tests(): Promise<void> {
  const server = await PostgresServer.start('fsync=off')
  t.teardown(() => server[Symbol.asyncDispose]())
  const { register } = await opened(t, server.url)
  const records = new Records(register)
  await server.sql('CREATE TABLE charges (id text NOT NULL); CREATE ROLE app LOGIN')
  await server.sql('GRANT ALL ON charges TO app')
  await server.sql('GRANT USAGE ON SCHEMA idempotency TO app')
  await server.sql('GRANT EXECUTE ON FUNCTION idempotency.complete TO app')

  /** The upstream's own connection. */
  const upstream = async (t: Test, user = 'app'): Promise<pg.Client> => {
    const client = new pg.Client({ host: '127.0.0.1', port: server.port, user, database: 'records' })
    client.on('error', () => {})
    await client.connect()
    t.teardown(() => client.end())
    return client
  }
  const claim = async (over: Partial<RecordDraft> = TERMS): Promise<Claimed> => {
    const [id, token] = [newId(), newToken()]
    const reply = await records.claim(id, draft('in_progress', token, over), SPANS)
    if (reply.kind !== 'claimed') throw new Error(reply.kind)
    return { id, token, fence: reply.stamp.fence }
  }
  const complete = async (
    client: pg.Client,
    { id, fence }: Pick<Claimed, 'id' | 'fence'>,
    status: number | null = 201,
    headers: unknown = HEADERS,
    body: Buffer | null = ALL_BYTES,
  ): Promise<boolean> => {
    const args = [id, fence, status, headers === null ? null : JSON.stringify(headers), body]
    const { rows } = await client.query('SELECT idempotency.complete($1, $2, $3, $4, $5) AS done', args)
    return rows[0].done
  }
  const charge = (client: pg.Client, id: string) => client.query('INSERT INTO charges (id) VALUES ($1)', [id])
  const charges = async (id: string) =>
    Number((await server.sql(`SELECT count(*) FROM charges WHERE id = '${id}'`))[0]?.[0])
  const leases = (id: RecordId) =>
    server.sql(`SELECT state, due FROM idempotency.unresolved WHERE id = '${id}'`)
  const stored = async (id: RecordId) => {
    const { bytes } = await register.get(id)
    return bytes === null ? null : decodeRecord(bytes)
  }
  const result = (body = ALL_BYTES): CompletedResponse => ({
    kept: true,
    response: { status: 201, reason: 'Created', headers: HEADERS.flat(), body, trailers: [] },
  })

  void t.test('complete() writes, byte for byte, what the proxy itself would have written', async (t) => {
    const app = await upstream(t)
    const told = { received: ['record'], receivedBy: 'abcdefgh', key: 'käy', span: 'x'.repeat(55) } as const
    for (const more of [{}, told]) {
      const claimed = await claim({ ...TERMS, ...more })
      await register.renew([{ ...claimed, dueIn: HOUR, dropIn: HOUR }])
      const before = await stored(claimed.id)
      t.equal(await complete(app, claimed), true)
      const { bytes, now } = await register.get(claimed.id)
      if (bytes === null) throw new Error('no record')
      const record = decodeRecord(bytes) as Completed
      const { id: _, ...attempt } = claimed
      const { createdAt } = record
      // The one difference: `completion` stays, and says who wrote it.
      const extension = Buffer.from(
        `\0\0\0\x0acompletion\0\0\0${String.fromCharCode(TERMS.completion.length)}${TERMS.completion}`,
      )
      const at = bytes.indexOf(extension)
      const written = Buffer.concat([bytes.subarray(0, at), bytes.subarray(at + extension.length)])
      written.writeUInt32BE(written.readUInt32BE(PREFIX.end) - extension.length, PREFIX.end)
      const over = { ...more, ...attempt, createdAt, result: result() }
      const own = encodeDraft(draft('completed', claimed.token, over))
      const countAt = own.findIndex((byte, n) => n > PREFIX.end && byte !== written[n])
      written.writeUInt8(written.readUInt8(countAt) - 1, countAt)
      t.equal(written.toString('hex', PREFIX.end), own.toString('hex', PREFIX.end))
      t.match(record, { state: 'completed', fence: claimed.fence, lastError: null, token: claimed.token })
      t.ok(record.updatedAt <= now && record.updatedAt >= createdAt)
      t.equal(record.expiresAt - record.updatedAt, HOUR)
      t.equal(record.dropAt - record.updatedAt, HOUR + MINUTE)
      t.ok(record.version > (before?.version ?? Number.NaN), 'renewals count as writes')
    }
  })

  void t.test('with ttl.body, the response expires before its record, and is indexed', async (t) => {
    const app = await upstream(t)
    const ends = { completion: `${TERMS.completion} ${5 * MINUTE}` }
    const told = { received: ['record'], receivedBy: 'abcdefgh', key: 'käy', span: 'x'.repeat(55) } as const
    for (const more of [{}, told]) {
      const claimed = await claim({ ...ends, ...more })
      t.equal(await complete(app, claimed), true)
      const { bytes } = await register.get(claimed.id)
      if (bytes === null) throw new Error('no record')
      const record = decodeRecord(bytes) as Completed
      t.strictSame(record.result, { ...result(), afterBody: HOUR - 5 * MINUTE })
      t.same([record.expiresAt, record.dropAt], [record.updatedAt + HOUR, record.updatedAt + HOUR + MINUTE])
      t.equal(indexPlace(bytes, 7), 2 ** 48 + 7)
      t.match(record, { key: 'key' in more ? more.key : null, completion: ends.completion })
      t.equal(await complete(app, claimed), false, 'a repeat finds its own answer')
      t.match(await failureOf(complete(app, claimed, 201, HEADERS, Buffer.from('other'))), {
        code: 'IP002',
      })
      // The outcome that the owner then tries to write files the response in the index.
      const own = draft('completed', claimed.token, { fence: claimed.fence, result: result() })
      t.match(await records.settle(claimed.id, own, SPANS), {
        kind: 'refused',
        record: { state: 'completed' },
      })
      t.same(await leases(claimed.id), [['2', String(2 ** 48 + record.updatedAt + 5 * MINUTE)]])
      t.match(await records.settle(claimed.id, own, SPANS), { kind: 'refused' })
      t.equal((await leases(claimed.id)).length, 1)
    }
    // Its owner dies after the commit: the next sweep files it.
    const orphan = await claim(ends)
    await complete(app, orphan)
    await server.sql(`UPDATE idempotency.unresolved SET due = 1 WHERE id = '${orphan.id}'`)
    t.notOk((await register.due(1000)).includes(orphan.id))
    t.match(await leases(orphan.id), [['2']])
    // A refusal, kept as long as its record, and a response that is not kept: nothing expires earlier.
    for (const [status, body] of [
      [404, ALL_BYTES],
      [201, Buffer.alloc(1001)],
    ] as const) {
      const claimed = await claim(ends)
      await complete(app, claimed, status, HEADERS, body)
      const { bytes } = await register.get(claimed.id)
      t.equal(indexPlace(bytes as Buffer, 7), null)
      t.notOk('afterBody' in (decodeRecord(bytes as Buffer) as Completed).result)
    }
  })

  void t.test('reason phrases are Node’s, and an answer without a Date gets one', async (t) => {
    const app = await upstream(t)
    for (const status of [200, 404, 418, 503, 511, 599]) {
      const claimed = await claim()
      const body = status === 599 ? null : Buffer.from('x')
      await complete(app, claimed, status, null, body)
      const record = (await stored(claimed.id)) as Completed
      const response = record.result.kept ? record.result.response : null
      t.equal(response?.reason, STATUS_CODES[status] ?? '')
      t.equal(response?.body.toString(), status === 599 ? '' : 'x')
      const date = new Date(Math.floor(record.updatedAt / 1000) * 1000).toUTCString()
      t.same(response?.headers, ['Date', date])
      t.equal(record.expiresAt - record.updatedAt, status === 200 ? HOUR : MINUTE, 'ttl, ttlFailed')
      t.equal(await complete(app, claimed, status, null, body), false, 'a repeat finds the same answer')
    }
    const [[reasons] = []] = await server.sql(
      `SELECT jsonb_object_agg(n, idempotency.reason(n)) FROM generate_series(200, 599) n`,
    )
    for (const [status, reason] of Object.entries(JSON.parse(String(reasons))))
      t.equal(reason, STATUS_CODES[status] ?? '', status)
  })

  void t.test('of a response that is not kept, only status and Location are stored', async (t) => {
    const app = await upstream(t)
    const place = [
      ['Location', '/p/1'],
      ['location', '/p/2'],
    ]
    const terms = (limit: number) => ({ completion: `${HOUR} ${HOUR} 0 ${limit}` })
    for (const [limit, headers, expected] of [
      [255, place, { kept: false, why: 'too_large', status: 201, location: '/p/1' }],
      [255, [], { kept: false, why: 'too_large', status: 201, location: null }],
      [0, place, { kept: false, why: 'outcome_only', status: 201, location: '/p/1' }],
      [256, [], { kept: true }],
    ] as const) {
      const claimed = await claim(terms(limit))
      t.equal(await complete(app, claimed, 201, headers), true)
      t.match(await stored(claimed.id), { result: expected })
      t.equal(await complete(app, claimed, 201, headers), false)
    }
    const empty = await claim(terms(0))
    await complete(app, empty, 200, [], null)
    t.match(await stored(empty.id), { result: { kept: false, why: 'outcome_only' } })
  })

  void t.test('Date and Location are names of headers, wherever they stand', async (t) => {
    const app = await upstream(t)
    const answered = async (headers: string[][], limit = 1000) => {
      const claimed = await claim({ completion: `${HOUR} ${HOUR} 0 ${limit}` })
      await complete(app, claimed, 201, headers, null)
      return ((await stored(claimed.id)) as Completed).result
    }
    const places = [
      ['X-Place', 'location'],
      ['Y', '/no'],
      ['LOCATION', '/yes'],
    ]
    t.match(await answered(places, 0), { kept: false, location: '/yes' })
    t.match(await answered(places.slice(0, 2), 0), { kept: false, location: null })
    for (const [headers, isDated] of [
      [[['X-Date', 'date']], true],
      [
        [
          ['X', 'y'],
          ['DATE', 'Tue, 15 Nov 1994 08:12:31 GMT'],
        ],
        false,
      ],
    ] as const) {
      const result = await answered(headers.map((line) => [...line]))
      const lines = result.kept ? result.response.headers : []
      t.same(lines.slice(0, headers.length * 2), headers.flat())
      t.equal(lines.length, headers.length * 2 + (isDated ? 2 : 0))
    }
  })

  const gone = 'There is no such record, or not any more.'
  const latest = 'The record is in_progress; its latest attempt is '
  const done = 'The record is completed, by another call of this function or by somebody else.'
  type Attempt = Pick<Claimed, 'id' | 'fence'>
  const stale: Record<string, [(one: Claimed) => Promise<Attempt | void>, string]> = {
    'an earlier fence': [async ({ id, fence }) => ({ id, fence: fence - 1 }), latest],
    'a later fence': [async ({ id, fence }) => ({ id, fence: fence + 1 }), latest],
    'a record that does not exist': [async ({ fence }) => ({ id: newId(), fence }), gone],
    deleted: [async ({ id }) => void (await register.remove(id, (await stored(id))?.version ?? 0)), gone],
    expired: [
      async ({ id }) => {
        for (const table of ['records', 'unresolved'])
          await server.sql(`UPDATE idempotency.${table} SET drop_at = 1 WHERE id = '${id}'`)
      },
      gone,
    ],
    'claimed again': [(one) => overtake(one), latest],
    'completed by an operator': [
      async ({ id, fence }) => {
        const { version = 0 } = (await stored(id)) ?? {}
        await records.replace(id, version, draft('completed', NOBODY, { fence }), SPANS)
      },
      done,
    ],
    'completed by its owner, with the same answer': [
      async ({ id, token, fence }) => {
        await records.settle(id, draft('completed', token, { ...TERMS, fence, result: result() }), SPANS)
      },
      done,
    ],
    'completed by the same attempt, with another answer': [
      async (one) => {
        const client = await server.client()
        await complete(client, one, 201, HEADERS, Buffer.from('another'))
        await client.end()
      },
      done,
    ],
    'a tombstone': [
      async ({ id, token, fence }) => {
        const { version = 0 } = (await stored(id)) ?? {}
        await records.replace(id, version, draft('expired', token, { fence }), SPANS)
      },
      'The record is expired; its latest attempt is ',
    ],
  }
  const overtake = async ({ id, token, fence }: Claimed): Promise<void> => {
    await records.settle(id, draft('failed_retryable', token, TERMS), SPANS)
    const { record } = (await records.get(id)) as { record: Completed }
    await records.takeOver(
      id,
      record,
      draft('in_progress', newToken(), { ...TERMS, fence: fence + 1 }),
      SPANS,
    )
  }

  void t.test('W07 a stale attempt raises, and its transaction rolls back', async (t) => {
    const app = await upstream(t)
    for (const [name, [makeStale, detail]] of Object.entries(stale)) {
      const one = await claim()
      const wrong = (await makeStale(one)) ?? one
      const before = await register.get(wrong.id)
      await app.query('BEGIN')
      await charge(app, wrong.id)
      const failure = await failureOf(complete(app, wrong))
      t.match(failure, { code: 'IP002', message: /: roll back$/ }, name)
      t.ok(failure.detail?.startsWith(detail), `${name}: ${failure.detail}`)
      const { command } = await app.query('COMMIT')
      t.equal(command, 'ROLLBACK', 'a COMMIT after the error commits nothing')
      t.equal(await charges(wrong.id), 0)
      t.same((await register.get(wrong.id)).bytes, before.bytes)
    }
  })

  for (const isolation of ['READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE'])
    void t.test(`${isolation}: complete() commits with its transaction, or makes it roll back`, async (t) => {
      const app = await upstream(t)
      const begin = () => app.query(`BEGIN ISOLATION LEVEL ${isolation}`)

      for (const state of ['in_progress', 'failed_retryable', 'unknown'] as const) {
        const one = await claim()
        const failed = { ...TERMS, lastError: 'it broke', status: 502 }
        if (state !== 'in_progress') await records.settle(one.id, draft(state, one.token, failed), SPANS)
        await begin()
        await charge(app, one.id)
        t.equal(await complete(app, one), true, state)
        t.equal((await stored(one.id))?.state, state, 'nobody sees it before the commit')
        await app.query('COMMIT')
        t.equal(await charges(one.id), 1)
        t.match(await stored(one.id), { state: 'completed', lastError: null, result: result() }, state)
        t.equal(await complete(app, one), false, 'again')
        await begin()
        t.equal(await complete(app, one), false)
        await app.query('ROLLBACK')
      }

      const undone = await claim()
      await begin()
      await charge(app, undone.id)
      t.equal(await complete(app, undone), true)
      t.equal(await complete(app, undone), false, 'twice in one transaction')
      await app.query('ROLLBACK')
      t.same([await charges(undone.id), (await stored(undone.id))?.state], [0, 'in_progress'])

      const renewed = await claim()
      const renewal = { ...renewed, dueIn: HOUR, dropIn: HOUR }
      await begin()
      await charge(app, renewed.id)
      t.same(await register.renew([renewal]), [true], 'a renewal after its snapshot')
      t.equal(await complete(app, renewed), true)
      t.same(await register.renew([renewal]), [true], 'a renewal does not wait')
      const { version = 0 } = (await stored(renewed.id)) ?? {}
      await app.query('COMMIT')
      const after = (await stored(renewed.id)) as Completed
      t.equal(after.state, 'completed')
      t.ok(after.version > version, 'the version grows')
      t.same(await register.renew([renewal]), [false])

      const overtaken = await claim()
      await begin()
      await charge(app, overtaken.id)
      await overtake(overtaken)
      const late = await failureOf(complete(app, overtaken))
      t.equal(late.code, isolation === 'READ COMMITTED' ? 'IP002' : '40001')
      await app.query('COMMIT')
      t.equal(await charges(overtaken.id), 0)
    })

  void t.test('an owner that settles after complete() gets the recorded answer, and no lease', async (t) => {
    const app = await upstream(t)
    for (const state of ['completed', 'unknown', 'failed_retryable'] as const)
      for (const renewals of [0, 1]) {
        const one = await claim()
        if (renewals) await register.renew([{ ...one, dueIn: HOUR, dropIn: HOUR }])
        await complete(app, one)
        const before = await stored(one.id)
        for (const again of [false, true]) {
          const settled = await records.settle(one.id, draft(state, one.token, TERMS), SPANS)
          t.match(settled, {
            kind: 'refused',
            record: { state: 'completed', token: one.token, result: result() },
          })
          t.same(await stored(one.id), before, again ? 'again' : 'the record does not change')
        }
        t.same(await leases(one.id), [])
      }
  })

  void t.test('an owner that settles before complete() is committed is told "not applied"', async (t) => {
    const app = await upstream(t)
    const one = await claim()
    await app.query('BEGIN')
    await complete(app, one)
    const outcome = draft('unknown', one.token, TERMS)
    t.match(await records.settle(one.id, outcome, SPANS), {
      kind: 'unavailable',
      error: { name: 'RecordLocked', maybeApplied: false },
    })
    t.match(
      await records.claim(one.id, draft('in_progress', newToken()), SPANS),
      { kind: 'exists' },
      'a retry does not wait',
    )
    await app.query('COMMIT')
    t.match(await records.settle(one.id, outcome, SPANS), { kind: 'refused', record: { state: 'completed' } })
  })

  void t.test('outcomes that are written together with a locked one do not wait for it', async (t) => {
    const app = await upstream(t)
    const locked = await claim()
    await app.query('BEGIN')
    await complete(app, locked)
    const others = await Promise.all(Array.from({ length: 20 }, () => claim()))
    const settle = async ({ id, token }: Claimed) =>
      await records.settle(id, draft('completed', token), SPANS)
    const last = settle(locked)
    const isOver = settling(last)
    for (const reply of await Promise.all(others.map(settle))) t.match(reply, { kind: 'written' })
    t.notOk(isOver())
    await app.query('COMMIT')
    t.match(await last, { kind: 'refused', record: { state: 'completed' } })
  })

  void t.test('of two concurrent transactions of one attempt, one commits', async (t) => {
    const [first, second] = [await upstream(t), await upstream(t)]
    const one = await claim()
    for (const client of [first, second]) {
      await client.query('BEGIN')
      await charge(client, one.id)
    }
    await complete(first, one, 201, HEADERS, Buffer.from('first'))
    const waiting = failureOf(complete(second, one, 201, HEADERS, Buffer.from('second')))
    await until(async () => (await server.sql('SELECT FROM pg_locks WHERE NOT granted')).length > 0)
    await first.query('COMMIT')
    t.match(await waiting, { code: 'IP002' })
    await second.query('COMMIT')
    t.equal(await charges(one.id), 1)
  })

  void t.test('bad input gives a clear error, and nothing of the transaction is applied', async (t) => {
    const app = await upstream(t)
    const one = await claim()
    const refused = [...HOP_BY_HOP, 'content-length', 'trailer', ...Object.values(RESPONSE_HEADER)]
    const cases: [
      Parameters<typeof complete> extends [unknown, unknown, ...infer Rest] ? Rest : never,
      RegExp,
    ][] = [
      [[null], /record_id, fence and status are needed; found .{43} and \d+, .* and NULL/],
      [[199], /status: found 199; allowed: 200 to 599/],
      [[600], /status: found 600/],
      ...[204, 205, 304].map((status): [[number], RegExp] => [
        [status],
        new RegExp(`status ${status} has none`),
      ]),
      [[200, {}], /headers: found a JSON object; allowed: an array of pairs/],
      [[200, 'x'], /headers: found a JSON string/],
      [[200, ['a', 'b']], /headers: found "a"; allowed: pairs of name and value, both strings/],
      [[200, [['a']]], /headers: found \["a"\]/],
      [[200, [['a', 1]]], /headers: found \["a", 1\]/],
      [[200, [['a', 'b', 'c']]], /headers: found/],
      [[200, [[['a'], 'b']]], /headers: found/],
      [[200, [['a b', 'c']]], /headers: "a b" is not a field name/],
      [[200, [['', 'c']]], /headers: "" is not a field name/],
      [[200, [['a\n', 'c']]], /is not a field name/],
      ...['c\r\nx: y', 'c\n', ' c', 'c ', 'c\t', '€', '\x7f', '\x01', '\x1f', '\u0100'].map(
        (value): [[number, unknown], RegExp] => [
          [200, [['a', value]]],
          /headers: the value of a is not one of a header line/,
        ],
      ),
      ...refused.map((name): [[number, unknown], RegExp] => [
        [200, [[name, 'x']]],
        new RegExp(`headers: ${name} belongs to one connection or to the proxy; leave it out`),
      ]),
    ]
    for (const [args, message] of cases) {
      await app.query('BEGIN')
      await charge(app, one.id)
      const failure = await failureOf(complete(app, one, ...args))
      t.match(failure.message, message, JSON.stringify(args))
      t.match(failure.code, /^22/)
      await app.query('COMMIT')
    }
    const args = [`NULL, NULL, 200`, `NULL, 1, 200`, `'a', NULL, 200`, `'a', 1, NULL`]
    for (const [n, some] of args.entries())
      t.match(await failureOf(app.query(`SELECT idempotency.complete(${some})`)), {
        code: '22004',
        message: n === 0 ? /found NULL and NULL/ : /needed/,
      })
    t.equal(await charges(one.id), 0)
    t.equal((await stored(one.id))?.state, 'in_progress')
    t.equal(await complete(app, one, 201, [["!#$%&'*+.^_`|~-", 'a\tb\xff']]), true)
    t.equal(await complete(app, await claim(), 205, HEADERS, null), true)
  })

  void t.test('complete() refuses a record without terms, sealed, or of a later release', async (t) => {
    const app = await upstream(t)
    const quiet = await claim({})
    t.match(await failureOf(complete(app, quiet)), {
      code: '55000',
      message: /key\.forwardFence is off, or an earlier release has claimed it/,
    })
    const sealed = { id: newId(), token: newToken() }
    const sealing = new Records(packed(register, new Sealer([{ id: 'a', key: Buffer.alloc(32) }])))
    const claimed = await sealing.claim(sealed.id, draft('in_progress', sealed.token, TERMS), SPANS)
    if (claimed.kind !== 'claimed') throw new Error(claimed.kind)
    t.match(await failureOf(complete(app, { id: sealed.id, fence: claimed.stamp.fence })), {
      code: '55000',
      message: /the record is sealed/,
    })
    const later = await claim()
    await server.sql(`UPDATE idempotency.records SET schema = 2 WHERE id = '${later.id}'`)
    t.match(await failureOf(complete(app, later)), { code: '55000', message: /a later release/ })
  })

  void t.test('the upstream’s role may call complete(), and nothing else', async (t) => {
    const app = await upstream(t)
    const functions = await server.sql(
      "SELECT oid::regprocedure, pronargs FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace AND proname <> 'complete'",
    )
    t.ok(functions.length > 20)
    const granted = await server.sql(
      "SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace AND has_function_privilege('app', oid, 'EXECUTE')",
    )
    t.same(granted, [['idempotency.complete(text,bigint,integer,jsonb,bytea)']])
    t.match(await failureOf(app.query('SELECT idempotency.ping(0, 1)')), { code: '42501' })
    const relations = await server.sql(
      "SELECT relname FROM pg_class WHERE relnamespace = 'idempotency'::regnamespace AND relkind IN ('r', 'v')",
    )
    for (const [name] of relations)
      t.match(await failureOf(app.query(`SELECT FROM idempotency.${name}`)), { code: '42501' }, String(name))
    await server.sql('CREATE ROLE nobody_told LOGIN; GRANT USAGE ON SCHEMA idempotency TO nobody_told')
    const stranger = await upstream(t, 'nobody_told')
    t.match(await failureOf(complete(stranger, await claim())), { code: '42501' })
  })

  void t.test('settings and schemas of the caller do not affect complete()', async (t) => {
    const app = await upstream(t)
    await server.sql(`CREATE SCHEMA evil AUTHORIZATION app`)
    for (const setting of [
      'search_path = evil, pg_temp, pg_catalog',
      'standard_conforming_strings = off',
      "bytea_output = 'escape'",
      "TimeZone = 'Asia/Kolkata'",
      "DateStyle = 'German, DMY'",
      "IntervalStyle = 'sql_standard'",
      'transform_null_equals = on',
      "lc_time = 'C'",
      "plpgsql.extra_errors = 'all'",
      'quote_all_identifiers = on',
      'extra_float_digits = -15',
    ])
      await app.query(`SET ${setting}`)
    for (const [name, args, type] of [
      ['now', 'bigint', 'bigint'],
      ['int4send', 'integer', 'bytea'],
      ['lower', 'text', 'text'],
    ])
      await app.query(
        `CREATE FUNCTION evil.${name}(${args}) RETURNS ${type} LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''evil''; END'`,
      )
    await app.query('CREATE TEMP TABLE records (id text); CREATE TEMP TABLE stored (id text)')
    const one = await claim()
    t.equal(await complete(app, one), true)
    const record = (await stored(one.id)) as Completed
    t.same(record.result, result())
    const dated = await claim()
    await server.sql(`UPDATE idempotency.records SET updated_at = 1 WHERE id = '${dated.id}'`)
    await complete(app, dated, 200, [], null)
    const { updatedAt, result: answer } = (await stored(dated.id)) as Completed
    t.ok(updatedAt >= dated.fence, 'it is written when it ends')
    t.match(answer, {
      response: { headers: ['Date', new Date(Math.floor(updatedAt / 1000) * 1000).toUTCString()] },
    })
    for (const [status, ttl] of [
      [299, HOUR],
      [300, MINUTE],
    ] as const) {
      const one = await claim({ completion: `${HOUR} ${MINUTE} ${2 * MINUTE} 1000` })
      await complete(app, one, status)
      const record = (await stored(one.id)) as Completed
      t.equal(record.expiresAt - record.updatedAt, ttl, `${status}`)
    }
    const brief = await claim({ completion: `${TERMS.completion} ${HOUR - 1}` })
    await complete(app, brief)
    const { bytes } = await register.get(brief.id)
    t.strictSame(bytes && (decodeRecord(bytes) as Completed).result, { ...result(), afterBody: 1 })
    t.equal(bytes && indexPlace(bytes, 7), 2 ** 48 + 7)
    await until(() => Date.now() >= updatedAt + 1000)
    t.equal(await complete(app, dated, 200, [], null), false, 'a repeat has the Date of the first time')
  })

  void t.test('one attempt is ended, and no other that was written at the same instant', async (t) => {
    const app = await upstream(t)
    const [one, other] = [await claim(), await claim()]
    await server.sql('UPDATE idempotency.records SET version = 5')
    await complete(app, one)
    t.match(await stored(one.id), { state: 'completed' })
    t.match(await stored(other.id), { state: 'in_progress' })
  })

  void t.test('the transaction in docs/postgres.md works', async (t) => {
    const app = await upstream(t)
    const one = await claim()
    const text = readFileSync(new URL('../../docs/postgres.md', import.meta.url), 'utf8')
    const [, sql = ''] = /```sql\n(BEGIN;.*?)```/s.exec(text) ?? []
    await app.query('CREATE TEMP TABLE charges (id text, amount int)')
    await app.query(sql.replace("'HEm0…'", `'${one.id}'`).replace('1795000000000', String(one.fence)))
    t.match(await stored(one.id), {
      state: 'completed',
      result: { response: { status: 201, body: Buffer.from('{"id": "ch_1"}') } },
    })
    t.equal((await app.query('SELECT FROM charges')).rows.length, 1)
  })
}
