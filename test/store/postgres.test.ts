import t, { type Test } from 'tap'
import { openStore, storeName } from '../../src/store/open.ts'
import { openPostgresStore, type PostgresStore } from '../../src/store/postgres.ts'
import { layoutScript } from '../../src/store/postgres-layout.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { relay } from '../support/relay.ts'
import { registerContract } from './contract.ts'
import { bytesOf, HOUR, newId, newToken, PLAIN_STORE, response, SPANS, until } from './fixtures.ts'

t.setTimeout(300_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

async function tests(): Promise<void> {
  const server = await PostgresServer.start('fsync=off')
  t.teardown(() => server[Symbol.asyncDispose]())
  let skew = 0
  const open = (service = 'pay', url = server.url) =>
    openPostgresStore({ url, service, timeoutMs: 5000, onEvent: () => {}, skew: () => skew })
  const empty = async () => {
    await server.sql(
      'TRUNCATE idempotency.records, idempotency.unresolved, idempotency.notes, idempotency.buckets, idempotency.waits',
    )
  }

  registerContract(t, 'postgres', async () => {
    const [register, peer, other] = await Promise.all([open(), open(), open('pay.eu')])
    await empty()
    return {
      register,
      peer,
      other,
      tellsPeers: true,
      advance: (ms) => void (skew += ms),
      [Symbol.asyncDispose]: async () =>
        void (await Promise.all([register.close(), peer.close(), other.close()])),
    }
  })

  const claim = () => bytesOf('in_progress', newToken())
  const kept = async (t: Test, opened: Promise<PostgresStore>): Promise<PostgresStore> => {
    const store = await opened
    t.teardown(() => store.close())
    return store
  }

  void t.test('completing a record rewrites no index entry (HOT), and a renewal no record', async (t) => {
    const own = await PostgresServer.start('autovacuum=off')
    t.teardown(() => own[Symbol.asyncDispose]())
    const register = await kept(t, open('pay', own.url))
    const payload = response(Buffer.alloc(600, 0x61))
    const claims = Array.from({ length: 200 }, () => ({ id: newId(), token: newToken() }))
    for (const { id, token } of claims) {
      await register.put(id, bytesOf('in_progress', token), SPANS)
      const condition = { token, states: ['in_progress'] } as const
      t.same(await register.renew([{ id, token, dueIn: HOUR, dropIn: HOUR }]), [true])
      const completed = bytesOf('completed', token, { result: payload })
      t.ok((await register.swap(id, condition, completed, SPANS, false)).done)
    }
    // Sessions report their statistics when they end.
    await register.close()
    const counted = () =>
      own.sql(`SELECT n_tup_ins, n_tup_upd, n_tup_hot_upd, n_tup_del FROM pg_stat_user_tables
               WHERE schemaname = 'idempotency' AND relname = 'records'`)
    await until(async () => Number((await counted())[0]?.[1]) >= 200)
    const [[inserted, updated, hot, deleted] = []] = await counted()
    t.same([inserted, hot, deleted], ['200', updated, '0'])
    // A slow claim is stamped once more; renewals that rewrote records would double the number.
    t.ok(Number(updated) < 400, `${updated}`)
  })

  void t.test('expired records, buckets and waits are removed, once for all replicas', async (t) => {
    const pruned: number[] = []
    const onPruned = (records: number) => void pruned.push(records)
    await empty()
    const make = () =>
      openPostgresStore({
        url: server.url,
        service: 'pay',
        timeoutMs: 5000,
        onEvent: () => {},
        skew: () => skew,
        onPruned,
      })
    const register = await kept(t, make())
    const peer = await kept(t, make())
    const [kept1, renewed] = [newId(), newId()]
    const token = newToken()
    // More than one round removes.
    await server.sql(`INSERT INTO idempotency.records
      SELECT 1, 1, 1, 1, 1, 1, 1, 2, 'old' || n, 'gone', '\\x00', '\\x00', '\\x00' FROM generate_series(1, 700) n`)
    await register.put(kept1, bytesOf('completed', newToken()), { dueIn: 0, dropIn: 48 * HOUR })
    await register.put(renewed, bytesOf('in_progress', token), { dueIn: 1, dropIn: HOUR })
    await peer.renew([{ id: renewed, token, dueIn: HOUR, dropIn: 48 * HOUR }])
    await register.limits.take(newId(), { count: 1, per: HOUR }, 1)
    await server.sql("INSERT INTO idempotency.waits VALUES (0, 'x', 'pay', 'of_the_dead')")
    skew += 2 * HOUR
    const left = async () =>
      server.sql(`SELECT (SELECT count(*) FROM idempotency.records), (SELECT count(*) FROM idempotency.buckets),
                  (SELECT count(*) FROM idempotency.waits)`)
    await until(async () => String(await left()) === '2,0,0')
    t.equal(
      pruned.reduce((sum, one) => sum + one, 0),
      700,
    )
    t.ok((await register.get(renewed)).bytes)
    t.ok((await register.get(kept1)).bytes)
  })

  void t.test('removal skips locked rows', async (t) => {
    await empty()
    const register = await kept(t, open())
    const [held, free] = [newId(), newId()]
    for (const id of [held, free]) await register.put(id, claim(), { dueIn: 0, dropIn: 1 })
    const other = await server.client()
    t.teardown(() => other.end())
    await other.query(`BEGIN; SELECT FROM idempotency.records WHERE id = '${held}' FOR UPDATE`)
    skew += HOUR
    const ids = async () => (await server.sql('SELECT id FROM idempotency.records')).flat()
    await until(async () => (await ids()).length === 1)
    t.same(await ids(), [held])
    await other.query('ROLLBACK')
    await other.query(`BEGIN; SELECT FROM idempotency.unresolved WHERE id = '${held}' FOR UPDATE`)
    const more = newId()
    await register.put(more, claim(), { dueIn: 0, dropIn: 1 })
    skew += HOUR
    await until(async () => (await ids()).length === 1)
    t.same(await ids(), [held], 'a locked lease does not hold up the others')
    await other.query('ROLLBACK')
    await until(async () => (await ids()).length === 0)
  })

  void t.test('of 50 claims of an expired record, one succeeds', async (t) => {
    const [register, peer] = [await kept(t, open()), await kept(t, open())]
    const id = newId()
    await register.put(id, claim(), { dueIn: 0, dropIn: HOUR })
    skew += HOUR
    const replies = await Promise.all(
      Array.from({ length: 50 }, (_, n) => (n % 2 ? register : peer).put(id, claim(), SPANS)),
    )
    t.equal(replies.filter(({ done }) => done).length, 1)
  })

  void t.test('only records that somebody waits for are notified', async (t) => {
    await empty()
    const register = await kept(t, open())
    const listening = await server.client()
    t.teardown(() => listening.end())
    const id = newId()
    const other = newId()
    const heard: string[] = []
    listening.on('notification', ({ payload }) => void heard.push(payload ?? ''))
    await listening.query('LISTEN somebody')
    await server.sql(`INSERT INTO idempotency.waits VALUES (9000000000000000, '${other}', 'pay', 'somebody')`)
    for (const one of [id, other]) await register.put(one, bytesOf('completed', newToken()), SPANS)
    await until(() => heard.length > 0)
    t.same(heard, [`pay ${other}`])
    const stop = await register.watch(id, () => {})
    const waits = () => server.sql(`SELECT count(*) FROM idempotency.waits WHERE id = '${id}'`)
    t.same(await waits(), [['1']])
    stop()
    await until(async () => String(await waits()) === '0')
  })

  void t.test('a waiter is notified when its connection is back, for what it may have missed', async (t) => {
    const [register, peer] = [await kept(t, open()), await kept(t, open())]
    const id = newId()
    let told = 0
    const stop = await register.watch(id, () => void told++)
    await server.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
    await until(() => told === 1)
    await peer.put(id, bytesOf('completed', newToken()), SPANS)
    await until(() => told === 2)
    // Only the other connections: the next ones may lead to another server.
    await server.sql(
      "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'idempotency-proxy' AND query NOT LIKE 'LISTEN%'",
    )
    await until(() => told === 3)
    stop()
    const gone = await register.watch(newId(), () => {})
    await register.close()
    gone()
    t.type(await register.watch(id, () => {}), 'function')
  })

  void t.test(
    'watchers poll if no notifications arrive, as behind PgBouncer in transaction mode; that is reported once',
    async (t) => {
      await empty()
      await using wire = await relay(server.port)
      wire.onCommand = (bytes) => {
        const at = bytes.indexOf('LISTEN idempotency_')
        if (at >= 0) bytes.write('x', at + 'LISTEN '.length)
      }
      const events: string[] = []
      const url = `postgres://owner@127.0.0.1:${wire.port}/records`
      const onEvent = (kind: string, detail: string) => void events.push(`${kind} ${detail}`)
      const register = await kept(t, openPostgresStore({ url, service: 'pay', timeoutMs: 300, onEvent }))
      for (let n = 0; n < 2; n++) {
        let told = 0
        const id = newId()
        const stop = await register.watch(id, () => void told++)
        await register.put(id, bytesOf('completed', newToken()), SPANS)
        await until(() => told === 1)
        stop()
        await until(() => events.length > 1)
      }
      t.match(events, [/^connected/, /^error notifications do not arrive/])
      t.same(await server.sql('SELECT count(*) FROM idempotency.waits'), [['0']])
    },
  )

  void t.test('a refused LISTEN is retried on a new connection', async (t) => {
    await empty()
    await using wire = await relay(server.port)
    let refused = 0
    wire.onCommand = (bytes) => {
      const at = bytes.indexOf('LISTEN idempotency_')
      if (at >= 0 && refused++ === 0) bytes.write('LOSTEN', at)
    }
    const url = `postgres://owner@127.0.0.1:${wire.port}/records`
    const register = await kept(
      t,
      openPostgresStore({ url, service: 'pay', timeoutMs: 10_000, onEvent: () => {} }),
    )
    let told = 0
    const id = newId()
    await register.watch(id, () => void told++)
    await until(() => told === 1)
    t.equal(refused, 2)
    await register.put(id, bytesOf('completed', newToken()), SPANS)
    await until(() => told === 2)
  })

  void t.test('traits report durability and replication of the server', async (t) => {
    const own = await PostgresServer.start('fsync=off', 'synchronous_commit=off')
    t.teardown(() => own[Symbol.asyncDispose]())
    const careless = await kept(t, open('pay', own.url))
    t.match(await careless.traits(), {
      durable: false,
      evicts: false,
      findings: [/synchronous_commit is off/, /fsync/],
    })
    const local = await PostgresServer.start('synchronous_commit=local', 'synchronous_standby_names=nobody')
    t.teardown(() => local[Symbol.asyncDispose]())
    t.match(await (await kept(t, open('pay', local.url))).traits(), {
      durable: true,
      forgets: /synchronous_commit is local: a promotion .*; allowed: on, remote_apply/,
      findings: [],
      replication: 'commits wait for nobody (synchronous_commit local); connected: 0',
    })
    const strict = await PostgresServer.start()
    t.teardown(() => strict[Symbol.asyncDispose]())
    t.match(await (await kept(t, open('pay', strict.url))).traits(), {
      durable: true,
      evicts: false,
      forgets: null,
      findings: [],
      replication: 'commits wait for no standby; connected: 0',
      room: /^\d+ MiB at the last VACUUM; \d+ rows, and \d+ dead ones$/,
    })
  })

  void t.test(
    'replicas that start together create the schema once, never over another program’s or a later release’s',
    async (t) => {
      const own = await PostgresServer.start()
      t.teardown(() => own[Symbol.asyncDispose]())
      const tables = async () =>
        String(
          await own.sql(
            "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'idempotency'",
          ),
        )
      await own.sql('CREATE SCHEMA idempotency; CREATE TABLE idempotency.things (x int)')
      await t.rejects(open('pay', own.url), {
        message:
          /cannot use the PostgreSQL store: the schema idempotency of the database belongs to another program/,
      })
      t.equal(await tables(), '1', 'nothing is written')
      await own.sql('DROP TABLE idempotency.things')
      const replicas = await Promise.all(Array.from({ length: 6 }, () => kept(t, open('pay', own.url))))
      const id = newId()
      await until(async () =>
        (await Promise.allSettled(replicas.map((one) => one.ping()))).every(
          ({ status }) => status === 'fulfilled',
        ),
      )
      const claims = await Promise.all(replicas.map((one) => one.put(id, claim(), SPANS)))
      t.equal(claims.filter(({ done }) => done).length, 1)

      await own.sql('UPDATE idempotency.layout SET revision = 0')
      await own.sql('DROP FUNCTION idempotency.ping')
      t.ok(await (await kept(t, open('pay', own.url))).ping(), 'functions of an earlier release are replaced')
      await own.sql('UPDATE idempotency.layout SET revision = 9')
      t.ok(await (await kept(t, open('pay', own.url))).ping(), 'functions of a later one work')
      await t.rejects(own.sql(layoutScript()), { message: /a later release/ }, 'and are left unchanged')
      await own.sql('UPDATE idempotency.layout SET version = 2')
      await t.rejects(open('pay', own.url), {
        name: 'StoreUnavailable',
        message:
          'cannot use the PostgreSQL store: its schema idempotency has version 2, of a later release; this one reads 1',
      })
    },
  )

  void t.test('an empty schema that another role owns is not used until the owner changes', async (t) => {
    const own = await PostgresServer.start()
    t.teardown(() => own[Symbol.asyncDispose]())
    await own.sql('CREATE ROLE app LOGIN; CREATE SCHEMA idempotency; GRANT ALL ON SCHEMA idempotency TO app')
    const events: string[] = []
    const onEvent = (kind: string, detail: string) => void events.push(`${kind} ${detail}`)
    const url = own.url.replace('owner:secret', 'app')
    const register = await kept(t, openPostgresStore({ url, service: 'pay', timeoutMs: 5000, onEvent }))
    t.match(events, [
      'error the schema idempotency is missing or outdated, and the role of store.url may not change it (the schema belongs to owner, and app is no member of that role)',
    ])
    t.same(await own.sql("SELECT FROM pg_class WHERE relnamespace = 'idempotency'::regnamespace"), [])
    await own.sql('ALTER SCHEMA idempotency OWNER TO app')
    await until(() =>
      register.ping().then(
        () => true,
        () => false,
      ),
    )
  })

  void t.test('a migration with nothing to do does not wait for others or block them', async (t) => {
    const register = await kept(t, open())
    const id = newId()
    const token = newToken()
    await register.put(id, bytesOf('in_progress', token), SPANS)
    const [busy, looking] = [await server.client(), await server.client()]
    t.teardown(() => Promise.all([busy.end(), looking.end()]))
    await looking.query('BEGIN; SELECT FROM idempotency.stored; SELECT FROM idempotency.layout')
    await busy.query(`BEGIN; UPDATE idempotency.records SET due = due WHERE id = '${id}'`)
    await busy.query(
      'UPDATE idempotency.unresolved SET due = due; UPDATE idempotency.notes SET lines = lines',
    )
    await server.sql(layoutScript())
    t.ok((await register.put(newId(), claim(), SPANS)).done)
    const migrating = await server.client()
    t.teardown(() => migrating.end())
    // All of it but its COMMIT.
    await migrating.query(layoutScript().replace(/COMMIT;\s*$/, ''))
    t.ok((await register.put(newId(), claim(), SPANS)).done)
    await busy.query('ROLLBACK')
    const own = { token, states: ['in_progress'] } as const
    t.ok((await register.swap(id, own, bytesOf('completed', token), SPANS, false)).done)
    await migrating.query('ROLLBACK')
  })

  void t.test(
    'a role that may not create the schema gets a clear error, and `migrate --print` with its grants is enough',
    async (t) => {
      const own = await PostgresServer.start()
      t.teardown(() => own[Symbol.asyncDispose]())
      await own.sql('CREATE ROLE app LOGIN')
      const url = own.url.replace('owner:secret', 'app')
      const events: string[] = []
      const onEvent = (kind: string, detail: string) => void events.push(`${kind} ${detail}`)
      const register = await kept(t, openPostgresStore({ url, service: 'pay', timeoutMs: 5000, onEvent }))
      await t.rejects(register.ping(), { message: /migrate --print/ })
      t.match(events, [/^error the schema idempotency is missing or outdated, and the role/])
      await own.sql(layoutScript())
      await until(() => events.some((event) => /may not use the schema/.test(event)))
      const grants = [...layoutScript().matchAll(/^--  ( GRANT [^;]*<role>;)/gms)].map(([, grant = '']) =>
        grant.replaceAll('\n--', ' ').replace('<role>', 'app'),
      )
      t.equal(grants.length, 4)
      // Each missing grant is reported.
      for (const [n, lacks] of [
        /may not use/,
        /EXECUTE on \d+ functions/,
        /may not use/,
        /DELETE on pruning/,
      ].entries()) {
        for (const [m, grant] of grants.entries()) if (m !== n) await own.sql(grant)
        await until(() => lacks.test(events.at(-1) ?? ''))
        await t.rejects(register.ping(), { message: /migrate --print/ })
        await own.sql(
          'REVOKE ALL ON SCHEMA idempotency FROM app; REVOKE ALL ON ALL TABLES IN SCHEMA idempotency FROM app; REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idempotency FROM app',
        )
      }
      for (const grant of grants) await own.sql(grant)
      await until(() =>
        register.ping().then(
          () => true,
          () => false,
        ),
      )
      const id = newId()
      const token = newToken()
      t.ok((await register.put(id, bytesOf('in_progress', token), SPANS)).done)
      t.same(await register.renew([{ id, token, dueIn: 1, dropIn: 1 }]), [true])
      t.equal(await register.limits.take(id, { count: 1, per: 9 }, 1), 0)
      t.ok(await register.history.append(id, [{ tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }]))
      ;(await register.watch(id, () => {}))()
      // Long enough for a removal.
      skew += HOUR
      await until(async () => String(await own.sql('SELECT done_at > 0 FROM idempotency.pruning')) === 't')
    },
  )

  void t.test('store.url opens a PostgreSQL store', async (t) => {
    const url = server.url.replace('postgres:', 'postgresql:')
    const config = { service: 'pay', store: { ...PLAIN_STORE, url } }
    const pruned: number[] = []
    const onPruned = (records: number) => void pruned.push(records)
    const store = await openStore(config, { onEvent: () => {}, onBreaker: () => {}, onPruned })
    t.teardown(() => store.close())
    t.equal(store.name, storeName(url))
    t.ok((await store.put(newId(), claim(), SPANS)).done)
    t.same(pruned, [0])
  })

  void t.test('a row that no release wrote is a corrupt record, and stays', async (t) => {
    const register = await kept(t, open())
    const id = newId()
    await server.sql(`INSERT INTO idempotency.records
      SELECT 1, 1, 1, 1, 1, 9000000000000000, 1, 1, '${id}', 'pay', '\\x00', '\\x', '\\x'`)
    await t.rejects(register.get(id), { name: 'CorruptRecord' })
    await t.rejects(register.put(id, claim(), SPANS), { name: 'CorruptRecord' })
    t.equal((await server.sql(`SELECT id FROM idempotency.records WHERE id = '${id}'`)).length, 1)
  })

  void t.test('cursors of other stores are refused', async (t) => {
    const register = await kept(t, open())
    await t.rejects(register.list('all', ' ', 1), RangeError)
  })
}
