import t, { type Test } from 'tap'
import { layoutScript, prepare } from '../../src/store/postgres/layout.ts'
import { PostgresLink } from '../../src/store/postgres/link.ts'
import { postgresAddress } from '../../src/store/postgres/url.ts'
import { type Database, NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { bytesOf, HOUR, newId, newToken, SPANS, until } from './fixtures.ts'
import { answers, claim, opened } from './postgres-fixtures.ts'

// How the schema is created, updated and left alone, and which rights are needed.
t.setTimeout(100_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else tests(await PostgresServer.start('fsync=off'))

/** What `migrate --print` says to grant. */
const grantsTo = (role: string) =>
  [...layoutScript().matchAll(/^--  ( GRANT [^;]*<role>;)/gms)].map(([, grant = '']) =>
    grant.replaceAll('\n--', ' ').replace('<role>', role),
  )

function tests(server: PostgresServer): void {
  t.teardown(() => server[Symbol.asyncDispose]())

  const linked = async (t: Test, { url }: Database, user = 'owner') => {
    const link = await PostgresLink.open({ ...postgresAddress(url, () => {}), user }, () => {})
    t.teardown(() => link.destroy())
    return link
  }
  const as = (url: string, role: string) => url.replace('owner:secret', role)

  void t.test('replicas that start together create the schema once', async (t) => {
    const own = await server.database()
    const replicas = await Promise.all(
      Array.from({ length: 3 }, async () => (await opened(t, own.url)).register),
    )
    for (const register of replicas) await until(answers(register))
    const id = newId()
    const claims = await Promise.all(replicas.map((one) => one.put(id, claim(), SPANS)))
    t.equal(claims.filter(({ done }) => done).length, 1)

    const link = await linked(t, own)
    const identity = await prepare(link)
    t.match(identity, { system: /^\d+$/, timeline: 1 })
    await link.ask("CREATE FUNCTION idempotency.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'")
    t.same(await prepare(link), identity)
    const [[acl] = []] = await link.ask("SELECT proacl FROM pg_proc WHERE proname = 'mine'")
    t.equal(acl, null, 'nothing was changed again')
    for (const again of [false, true]) {
      if (again) await link.execute(layoutScript())
      t.same(await link.ask('SELECT version, revision FROM idempotency.layout'), [['1', '9']])
    }
  })

  void t.test('what another program, a later release or another role made is left alone', async (t) => {
    const own = await server.database()
    const relations = () =>
      own.sql("SELECT relname FROM pg_class WHERE relnamespace = 'idempotency'::regnamespace")
    await own.sql('CREATE SCHEMA idempotency; CREATE TABLE idempotency.things (x int)')
    await t.rejects(opened(t, own.url), {
      message:
        /cannot use the PostgreSQL store: the schema idempotency of the database belongs to another program/,
    })
    t.same(await relations(), [['things']])

    await own.sql('DROP TABLE idempotency.things; CREATE ROLE guest LOGIN')
    await own.sql('GRANT ALL ON SCHEMA idempotency TO guest')
    const guest = await opened(t, as(own.url, 'guest'))
    t.match(guest.events, [
      'error: the schema idempotency is missing or outdated, and the role of store.url may not change it (the schema belongs to owner, and guest is not a member of that role)',
    ])
    t.same(await relations(), [])
    await own.sql('ALTER SCHEMA idempotency OWNER TO guest')
    await until(answers(guest.register))

    await own.sql('UPDATE idempotency.layout SET revision = 0; DROP FUNCTION idempotency.ping')
    t.ok(await (await opened(t, own.url)).register.ping(), 'functions of an earlier release are replaced')
    for (const later of ['revision = 10', 'version = 2, revision = 1']) {
      if (later.startsWith('version'))
        t.ok(await (await opened(t, own.url)).register.ping(), 'functions of a later one work')
      await own.sql(`UPDATE idempotency.layout SET ${later}`)
      await t.rejects(own.sql(layoutScript()), { message: /a later release/ }, 'and are left unchanged')
    }
    await t.rejects(opened(t, own.url), {
      name: 'StoreUnavailable',
      message:
        'cannot use the PostgreSQL store: its schema idempotency has version 2, of a later release; this one reads 1',
    })
  })

  void t.test('functions and operators in another schema are not used', async (t) => {
    const own = await server.database()
    const { register } = await opened(t, own.url)
    const id = newId()
    await register.put(id, claim(), SPANS)
    for (const [operator, left, right] of [
      ['*', 'numeric', 'integer'],
      ['>', 'bigint', 'smallint'],
      ['=', 'smallint', 'bigint'],
    ] as const)
      await own.sql(`CREATE FUNCTION public.evil(${left}, ${right}) RETURNS boolean LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'evil'; END $$;
        CREATE OPERATOR public.${operator} (LEFTARG = ${left}, RIGHTARG = ${right}, FUNCTION = public.evil)`)
    const { register: later } = await opened(t, own.url)
    t.match(await later.put(id, claim(), SPANS), { done: false })
    t.ok((await later.put(newId(), claim(), SPANS)).done)
    const schema = "pronamespace = 'idempotency'::regnamespace"
    const pinned = "'search_path=pg_catalog, pg_temp' = ANY (proconfig)"
    t.same(await own.sql(`SELECT DISTINCT ${pinned} FROM pg_proc WHERE ${schema}`), [['t']])
  })

  void t.test('a view that is there is left, and one that is missing is made', async (t) => {
    const link = await linked(t, await server.database())
    await prepare(link)
    const view = async () =>
      String((await link.ask("SELECT pg_get_viewdef('idempotency.stored'::regclass)"))[0]?.[0])
    const own = await view()
    const other = own.replace('r.payload', 'r.head AS payload')
    t.not(other, own)
    await link.execute(`CREATE OR REPLACE VIEW idempotency.stored AS ${other}`)
    await link.execute(layoutScript())
    t.not(await view(), own)
    await link.execute('DROP VIEW idempotency.stored CASCADE')
    await link.execute(layoutScript())
    t.equal(await view(), own)
  })

  void t.test('a migration with nothing to do does not wait for others or block them', async (t) => {
    const own = await server.database()
    const { register } = await opened(t, own.url)
    const [id, token] = [newId(), newToken()]
    await register.put(id, claim(token), SPANS)
    const [busy, looking, migrating] = await Promise.all([own.client(), own.client(), own.client()])
    t.teardown(() => Promise.all([busy, looking, migrating].map((client) => client.end())))
    await looking.query('BEGIN; SELECT FROM idempotency.stored; SELECT FROM idempotency.layout')
    await busy.query(`BEGIN; UPDATE idempotency.records SET due = due WHERE id = '${id}'`)
    await busy.query(
      'UPDATE idempotency.unresolved SET due = due; UPDATE idempotency.notes SET lines = lines',
    )
    await own.sql(layoutScript())
    t.ok((await register.put(newId(), claim(), SPANS)).done)
    // All of it but its COMMIT.
    await migrating.query(layoutScript().replace(/COMMIT;\s*$/, ''))
    t.ok((await register.put(newId(), claim(), SPANS)).done)
    await busy.query('ROLLBACK')
    const mine = { token, states: ['in_progress'] } as const
    t.ok((await register.swap(id, mine, bytesOf('completed', token), SPANS, false)).done)
    await migrating.query('ROLLBACK')
  })

  void t.test('a role without the right to create needs what `migrate --print` says, no more', async (t) => {
    const own = await server.database()
    await own.sql('CREATE ROLE app LOGIN')
    let skew = 0
    const { register, events } = await opened(t, as(own.url, 'app'), { skew: () => skew })
    await t.rejects(register.ping(), { message: /migrate --print/ })
    t.match(events, [/^error: the schema idempotency is missing or outdated, and the role/])
    await own.sql(layoutScript())
    await until(() => events.some((event) => /may not use the schema/.test(event)))
    await t.rejects(register.ping(), { message: /migrate --print/ })
    const grants = grantsTo('app')
    t.equal(grants.length, 4)
    for (const grant of grants) await own.sql(grant)
    await until(answers(register))
    const [id, token] = [newId(), newToken()]
    t.ok((await register.put(id, claim(token), SPANS)).done)
    t.same(await register.renew([{ id, token, dueIn: 1, dropIn: 1 }]), [true])
    t.equal(await register.limits.take(id, { count: 1, per: 9 }, 1), 0)
    t.ok(await register.history.append(id, [{ tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }]))
    ;(await register.watch(id, () => {}))()
    // Long enough for a removal.
    skew += HOUR
    await until(async () => String(await own.sql('SELECT done_at > 0 FROM idempotency.pruning')) === 't')

    const limited = await linked(t, own, 'app')
    const owner = await linked(t, own)
    const lack = async (revoke: string, grant: string, message: RegExp): Promise<void> => {
      await owner.execute(`REVOKE ${revoke} FROM app`)
      await t.rejects(prepare(limited), { message }, revoke)
      await owner.execute(`GRANT ${grant} TO app`)
    }
    const tables = ['records', 'unresolved', 'notes', 'buckets', 'waits', 'pruning', 'epochs', 'graces']
    const rights = tables.flatMap((table) =>
      ['SELECT', 'INSERT', 'UPDATE', 'DELETE'].map((right) => `${right} on ${table}`),
    )
    for (const one of ['SELECT on stored', ...rights]) {
      const on = one.replace(' on ', ' ON idempotency.')
      await lack(on, on, new RegExp(`: ${one};`))
    }
    const [ping, schema] = ['EXECUTE ON FUNCTION idempotency.ping', 'USAGE ON SCHEMA idempotency']
    await lack(ping, ping, /: EXECUTE on 1 functions;/)
    await lack(schema, schema, /may not use the schema/)
  })
}
