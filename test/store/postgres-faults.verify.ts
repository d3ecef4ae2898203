import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import { type Certificate, certificate } from '../support/certificates.ts'
import { type Database, NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { relay } from '../support/relay.ts'
import { bytesOf, HOUR, newId, newToken, SPANS, settling, until } from './fixtures.ts'
import {
  APPLIED,
  answers,
  claim,
  connections,
  FAST,
  NOT_APPLIED,
  opened,
  urlAt,
  works,
} from './postgres-fixtures.ts'

// A server that is down, hangs, is replaced or refuses; connections that are cut; locks of others.
t.setTimeout(300_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else tests(await PostgresServer.start())

async function sourceOf(database: Database, name: string): Promise<string> {
  const [[source] = []] = await database.sql(`SELECT prosrc FROM pg_proc WHERE proname = '${name}'
    AND pronamespace = 'idempotency'::regnamespace`)
  return String(source)
}

/** Until somebody waits for a lock. */
const untilBlocked = (database: Database) =>
  until(async () => (await database.sql('SELECT FROM pg_locks WHERE NOT granted')).length > 0)

function tests(server: PostgresServer): void {
  t.teardown(() => server[Symbol.asyncDispose]())

  void t.test('operations on a hanging PostgreSQL time out, and it is used when it answers', async (t) => {
    const { register, events } = await opened(t, server.url, { timeoutMs: FAST })
    await until(works(register))
    const ids = Array.from({ length: 12 }, newId)
    server.pause()
    // Such claims are not sent together.
    const late = await Promise.allSettled(ids.map((id) => register.put(id, claim(), SPANS, 'again')))
    const reasons = late.map((one) => (one as PromiseRejectedResult).reason)
    t.match(reasons[0], { ...APPLIED, message: /timed out/ })
    t.match(reasons.at(-1), { ...NOT_APPLIED, message: /no connection free/ }, 'it was never sent')
    await until(() => events.some((event) => event.startsWith('error')))
    await t.rejects(register.ping(), { ...NOT_APPLIED, message: /not connected/ }, 'refused at once')
    server.resume()
    await until(answers(register))
    for (const [n, id] of ids.entries()) {
      const isThere = async () => (await register.get(id).catch(() => null))?.bytes != null
      if (reasons[n].maybeApplied) await until(isThere)
      else t.notOk(await isThere())
    }
    t.equal(events.at(-1), `connected: 127.0.0.1:${server.port}`)
  })

  void t.test('a claim waits for an uncommitted one, but no longer than the timeout', async (t) => {
    const { register } = await opened(t, server.url, { timeoutMs: 4000 })
    const { register: patient } = await opened(t, server.url)
    const free = newId()
    const other = await server.client()
    await other.query(`BEGIN; INSERT INTO idempotency.records
      SELECT 1, 1, 1, 1, 1, 9999999999999, 1, 1, '${free}', 'pay', decode('${'00'.repeat(16)}', 'hex'), '\\x00', '\\x00'`)
    await t.rejects(register.put(free, claim(), SPANS), { ...NOT_APPLIED, message: /lock timeout/ })
    const late = patient.put(free, claim(), SPANS)
    await other.query('COMMIT')
    t.match(await late, { done: false }, 'it finds the other claim')
    await other.end()
  })

  void t.test('of claims in one statement, one that is locked or no record fails alone', async (t) => {
    const { register } = await opened(t, server.url, { timeoutMs: 4000 })
    const [locked, corrupt, ...ids] = Array.from({ length: 40 }, newId) as [RecordId, RecordId, ...RecordId[]]
    const bad = (id: string) => `INSERT INTO idempotency.records
      SELECT 1, 1, 1, 1, 1, 9000000000000000, 1, 1, '${id}', 'pay', '\\x00', '\\x', '\\x'`
    await server.sql(bad(corrupt))
    const other = await server.client()
    await other.query(`BEGIN; ${bad(locked)}`)
    const ends = await Promise.allSettled(
      [...ids, locked, corrupt].map((id) => register.put(id, claim(), SPANS)),
    )
    await other.end()
    const failures = ends.flatMap((one) => (one.status === 'rejected' ? [one.reason.name] : []))
    t.same(failures, ['RecordLocked', 'CorruptRecord'])
    t.equal(ends.filter((one) => one.status === 'fulfilled' && one.value.done).length, ids.length)
    t.match(await register.put(locked, claim(), SPANS), { done: true }, 'it was not applied')
  })

  void t.test('claims by many stores, in any order, are granted once', async (t) => {
    const stores = await Promise.all([1, 2, 3].map(async () => (await opened(t, server.url)).register))
    for (let round = 0; round < 10; round++) {
      const ids = Array.from({ length: 100 }, newId)
      const orders = [ids, ids.toReversed(), ids.toSorted()]
      const replies = await Promise.all(
        stores.flatMap((store, n) =>
          (orders[n] ?? []).map(async (id) => ({ id, done: (await store.put(id, claim(), SPANS)).done })),
        ),
      )
      const granted = replies.filter(({ done }) => done).map(({ id }) => id)
      t.same(granted.toSorted(), ids.toSorted())
    }
  })

  for (const isolation of ['repeatable read', 'serializable'])
    void t.test(`${isolation}: conflicts are retried, and one of many wins`, async (t) => {
      const { name, url } = await server.database()
      await server.sql(`ALTER DATABASE ${name} SET default_transaction_isolation = '${isolation}'`)
      const { register } = await opened(t, url)
      const { register: peer } = await opened(t, url)
      t.match((await register.traits()).findings, [
        new RegExp(`default_transaction_isolation is ${isolation}`),
      ])
      for (let n = 0; n < 10; n++) {
        const id = newId()
        const race = await Promise.allSettled(
          Array.from({ length: 12 }, (_, n) => (n % 2 ? register : peer).put(id, claim(), SPANS)),
        )
        const replies = race.flatMap((one) => (one.status === 'fulfilled' ? [one.value] : []))
        for (const one of race) if (one.status === 'rejected') t.match(one.reason, NOT_APPLIED)
        t.equal(replies.filter(({ done }) => done).length, 1)
        const { bytes } = await register.get(id)
        const { token, version } = decodeRecord(bytes as Buffer)
        const [swaps, [renewed]] = await Promise.all([
          Promise.allSettled(
            Array.from({ length: 8 }, (_, n) =>
              (n % 2 ? register : peer).swap(id, { version }, claim(), SPANS, true),
            ),
          ),
          peer.renew([{ id, token, dueIn: HOUR, dropIn: HOUR }]).catch(() => [false]),
        ])
        const won = swaps.filter((one) => one.status === 'fulfilled' && one.value.done).length
        t.ok(won + (renewed ? 1 : 0) <= 1, 'at most one of the writes succeeds')
      }
    })

  void t.test('an operation succeeds after a deadlock, whichever was the victim', async (t) => {
    const own = await server.database()
    await server.sql(`ALTER DATABASE ${own.name} SET deadlock_timeout = '10ms'`)
    const { register } = await opened(t, own.url)
    const [id, token] = [newId(), newToken()]
    await register.put(id, claim(token), SPANS)
    const other = await own.client()
    t.teardown(() => other.end())
    // In the opposite order: the lease, then the record.
    await other.query('BEGIN; SELECT FROM idempotency.unresolved FOR UPDATE')
    const mine = { token, states: ['in_progress'] } as const
    const swap = register.swap(id, mine, bytesOf('completed', token), SPANS, false)
    await untilBlocked(own)
    const victim = await other.query('SELECT FROM idempotency.records FOR UPDATE').then(
      () => null,
      (error: { code: string }) => error.code,
    )
    await other.query(victim === null ? 'COMMIT' : 'ROLLBACK')
    t.ok((await swap).done)
  })

  void t.test('a standby is used only once promoted, and has the acknowledged record', async (t) => {
    await using primary = await PostgresServer.start()
    const { register: first } = await opened(t, primary.url)
    const id = newId()
    const token = newToken()
    t.ok((await first.put(id, claim(token), SPANS)).done)
    await using standby = await primary.standby()
    const { register, events } = await opened(t, standby.url)
    for (const operation of [
      () => register.put(newId(), claim(), SPANS),
      () => register.get(id),
      () => register.ping(),
    ] as (() => Promise<unknown>)[])
      await t.rejects(operation(), { ...NOT_APPLIED, message: /standby/ })
    t.match(events, [/^error: the server is a standby/])
    await until(async () => {
      const [[behind] = []] = await primary.sql(
        'SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_lsn()',
      )
      return behind === '1'
    })
    await primary.kill()
    await standby.promote()
    await until(answers(register))
    t.match(await register.put(id, claim(), SPANS), { done: false })
    const own = { token, states: ['in_progress'] } as const
    t.ok((await register.swap(id, own, bytesOf('completed', token), SPANS, false)).done)
  })

  void t.test('of two primaries the later one is used, and never both', async (t) => {
    await using old = await PostgresServer.start()
    await using wire = await relay(old.port)
    const { register, events } = await opened(t, urlAt(wire))
    await Promise.all(Array.from({ length: 20 }, () => register.ping()))
    await using successor = await old.standby()
    await using stranger = await PostgresServer.unrelated()
    await successor.promote()
    // The old one is still running, and does not know.
    wire.target = successor.port
    await until(() => events.some((event) => event.includes('has failed over (timeline 2)')))
    await until(async () => (await connections(old)) === 0)
    const id = newId()
    t.ok((await register.put(id, claim(), SPANS)).done)
    const there = (server: PostgresServer) => server.sql(`SELECT FROM idempotency.records WHERE id = '${id}'`)
    t.same([(await there(old)).length, (await there(successor)).length], [0, 1])

    wire.target = old.port
    wire.cut()
    await until(() => events.at(-1)?.includes('is an old primary: its timeline is 1') ?? false)
    await t.rejects(register.put(newId(), claim(), SPANS), { ...NOT_APPLIED, message: /old primary/ })

    wire.target = stranger.port
    await until(answers(register))
    t.equal((await register.get(id)).bytes, null)
    wire.target = successor.port
    await until(() => events.at(-1)?.includes('points to a different server') ?? false)
    t.equal((await register.get(id)).bytes, null, 'the one in use stays in use')
    t.ok((await register.put(newId(), claim(), SPANS)).done)
    await until(async () => (await connections(successor)) === 0)
  })

  void t.test('when the server becomes a standby, the store refuses and connects again', async (t) => {
    const own = await server.database()
    const { register, events } = await opened(t, own.url)
    const id = newId()
    await register.put(id, claim(), SPANS)
    // Makes functions and new connections see a standby.
    await own.sql(
      'CREATE SCHEMA hot; CREATE FUNCTION hot.pg_is_in_recovery() RETURNS boolean LANGUAGE sql AS $$ SELECT true $$',
    )
    await own.sql(`ALTER DATABASE ${own.name} SET search_path = hot, pg_catalog`)
    await own.sql(`CREATE OR REPLACE FUNCTION idempotency.start(_wait integer) RETURNS void LANGUAGE plpgsql
        SET search_path = hot, pg_catalog AS $body$ ${await sourceOf(own, 'start')} $body$`)
    await t.rejects(register.get(id), { ...NOT_APPLIED, message: /standby \(IP001\)/ })
    await until(() => events.some((event) => event.includes('is a standby')))
    await t.rejects(register.put(newId(), claim(), SPANS), { ...NOT_APPLIED, message: /standby/ })
    await t.rejects(register.get(id), { ...NOT_APPLIED, message: /standby/ })
    await own.sql('DROP SCHEMA hot CASCADE; ALTER FUNCTION idempotency.start SET search_path = pg_catalog')
    await until(answers(register))
    t.ok((await register.get(id)).bytes)
  })

  void t.test('a read-only database refuses claims, and existing records can be read', async (t) => {
    const own = await server.database()
    const { register } = await opened(t, own.url)
    const id = newId()
    await register.put(id, claim(), SPANS)
    await server.sql(`ALTER DATABASE ${own.name} SET default_transaction_read_only = on`)
    const { register: reader, events } = await opened(t, own.url)
    const full = { name: 'StoreFull', maybeApplied: false, message: /read-only transaction/ }
    const [fresh, known] = await Promise.allSettled([newId(), id].map((id) => reader.put(id, claim(), SPANS)))
    t.match(fresh, { status: 'rejected', reason: full })
    t.match(known, { status: 'fulfilled', value: { done: false } })
    t.ok((await reader.get(id)).bytes)
    t.same(events, [`connected: 127.0.0.1:${server.port}`], 'its connections are kept')
  })

  void t.test('a claim that waits for a silent standby may be applied; nobody else gets it', async (t) => {
    const { register } = await opened(t, server.url, { timeoutMs: 4000 })
    await register.ping()
    await server.requireStandby()
    const id = newId()
    const token = newToken()
    await t.rejects(register.put(id, claim(token), SPANS), APPLIED)
    await t.rejects(register.put(id, claim(), SPANS), NOT_APPLIED, 'another claim waits for it')
    t.equal((await register.get(id)).bytes, null, 'nobody sees it yet')
    await server.requireNoStandby()
    await until(async () => (await register.get(id)).bytes !== null)
    const reply = await register.put(id, claim(), SPANS)
    t.ok(!reply.done && decodeRecord(reply.bytes).token.equals(token))
  })

  void t.test('a recognised claim waits for the standby, too; a cancelled wait fails', async (t) => {
    const { register } = await opened(t, server.url, { timeoutMs: 4000 })
    const { register: patient } = await opened(t, server.url)
    const [id, taken] = [newId(), newId()]
    await register.put(taken, claim(), SPANS)
    const { version } = decodeRecord((await register.get(taken)).bytes as Buffer)
    await server.sql("ALTER DATABASE records SET client_min_messages = 'error'")
    await server.requireStandby()
    const mine = claim()
    const put = () => register.put(id, mine, SPANS)
    const takeOver = () => register.swap(taken, { version }, mine, SPANS, true)
    for (const lost of [put, takeOver]) await t.rejects(lost(), APPLIED)
    // After the restart everybody sees records that no standby has.
    await server.kill()
    await server.start()
    await until(answers(register))
    t.match(await register.put(id, claim(), SPANS), { done: false }, 'a claim of another owner does not wait')
    for (const recognised of [put, takeOver]) await t.rejects(recognised(), APPLIED)

    await until(answers(patient))
    const cancelled = t.rejects(patient.put(newId(), claim(), SPANS), {
      ...APPLIED,
      message: /canceling wait for synchronous replication/,
    })
    const waiting = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    const isOver = settling(cancelled)
    await until(async () => {
      await server.sql(waiting)
      return isOver()
    })
    await server.requireNoStandby()
    await until(async () => (await server.sql('SHOW synchronous_standby_names'))[0]?.[0] === '')
    // The cancelled waits cost their connections.
    await until(answers(register))
    t.match(await put(), { done: false })
    t.match(await takeOver(), { done: false })
    await server.sql('ALTER DATABASE records RESET client_min_messages')
  })

  void t.test('a database may set another bytea_output; bytes not in hex are a corrupt record', async (t) => {
    const own = await server.database()
    const { register } = await opened(t, own.url)
    const id = newId()
    await register.put(id, claim(), SPANS)
    await server.sql(`ALTER DATABASE ${own.name} SET bytea_output = 'escape'`)
    const { register: later } = await opened(t, own.url)
    t.same((await later.get(id)).bytes, (await register.get(id)).bytes)
    t.match(await later.put(id, claim(), SPANS), { done: false })
    t.match(await later.swap(id, { version: 1 }, claim(), SPANS, true), { done: false })
    await own.sql(
      "CREATE OR REPLACE FUNCTION idempotency.start(_wait integer) RETURNS void LANGUAGE sql AS ''",
    )
    await t.rejects(later.get(id), { name: 'CorruptRecord' })
  })

  void t.test('a read of a locked table waits no longer than the lock timeout', async (t) => {
    const { register } = await opened(t, server.url, { timeoutMs: 4000 })
    const other = await server.client()
    await other.query('BEGIN; LOCK TABLE idempotency.records')
    for (const read of [
      () => register.get(newId()),
      () => register.due(1),
      () => register.list('all', null, 1),
      () => register.list('unresolved', null, 1),
    ] as (() => Promise<unknown>)[])
      await t.rejects(read(), { ...NOT_APPLIED, message: /lock timeout/ })
    await other.end()
  })

  void t.test('a wrong password or database is an outage, reported without the password', async (t) => {
    const own = await server.database()
    await server.sql("CREATE ROLE app LOGIN PASSWORD 'p@ss:word/ü'")
    await server.sql(`GRANT CREATE ON DATABASE ${own.name} TO app`)
    await server.allow('host all app 127.0.0.1/32 scram-sha-256')
    const as = (password: string, database = own.name) =>
      opened(t, `postgres://app:${encodeURIComponent(password)}@127.0.0.1:${server.port}/${database}`)
    t.ok((await (await as('p@ss:word/ü')).register.put(newId(), claim(), SPANS)).done)
    const wrong = await as('wrong')
    await t.rejects(wrong.register.ping(), { ...NOT_APPLIED, message: /password authentication failed/ })
    const none = await as('')
    await t.rejects(none.register.ping(), NOT_APPLIED)
    const absent = await as('p@ss:word/ü', 'absent')
    await t.rejects(absent.register.ping(), { ...NOT_APPLIED, message: /"absent" does not exist/ })
    t.notMatch(JSON.stringify([wrong.events, none.events, absent.events]), /p@ss|secret/)
  })

  void t.test('TLS: the certificate is verified as sslmode requires', async (t) => {
    using right = certificate('IP:127.0.0.1')
    using other = certificate('DNS:elsewhere')
    const serve = async ({ key, cert }: Certificate) => {
      server.useTls(key, cert)
      await server.restart()
    }
    const via = async (options: string) => opened(t, `${server.url}?${options}`)
    const ca = ({ certFile }: Certificate) => `sslrootcert=${encodeURIComponent(certFile)}`
    const plain = await via('sslmode=require')
    await t.rejects(plain.register.ping(), { ...NOT_APPLIED, message: /does not support SSL/ })
    await plain.register.close()
    await serve(right)
    for (const works of [
      'sslmode=disable',
      'sslmode=require',
      `sslmode=verify-full&${ca(right)}`,
      `sslmode=verify-ca&${ca(right)}`,
    ]) {
      const { register } = await via(works)
      t.ok((await register.put(newId(), claim(), SPANS)).done, works)
      const [[encrypted] = []] = await server.sql('SELECT bool_or(ssl) FROM pg_stat_ssl')
      t.equal(encrypted, works === 'sslmode=disable' ? 'f' : 't')
      await register.close()
    }
    for (const fails of ['sslmode=verify-full', `sslmode=verify-full&${ca(other)}`])
      await t.rejects(
        (await via(fails)).register.ping(),
        { ...NOT_APPLIED, message: /self-signed certificate/ },
        fails,
      )
    await serve(other)
    await t.rejects((await via(`sslmode=verify-full&${ca(other)}`)).register.ping(), {
      ...NOT_APPLIED,
      message: /altnames/,
    })
    t.ok(await (await via(`sslmode=verify-ca&${ca(other)}`)).register.ping())
    await t.rejects(via('sslmode=verify-ca&sslrootcert=/nowhere.pem'), {
      message: /store\.url: sslrootcert cannot be read: ENOENT/,
    })
  })
}
