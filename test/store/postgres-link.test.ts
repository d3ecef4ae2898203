import { once } from 'node:events'
import { type AddressInfo, createServer, type Server, Socket } from 'node:net'
import t, { type Test } from 'tap'
import { layoutScript, prepare } from '../../src/store/postgres-layout.ts'
import { PostgresLink, type SqlRow, sqlState } from '../../src/store/postgres-link.ts'
import { type PostgresAddress, postgresAddress } from '../../src/store/postgres-url.ts'
import { fakePostgres } from '../support/fake-postgres.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { relay } from '../support/relay.ts'
import { until } from './fixtures.ts'

t.setTimeout(100_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else tests(await PostgresServer.start('fsync=off'))

interface Opened {
  readonly link: PostgresLink
  /** Why it ended. */
  readonly ends: string[]
}

function tests(server: PostgresServer): void {
  t.teardown(() => server[Symbol.asyncDispose]())
  const address = postgresAddress(server.url)

  const open = async (t: Test, to: PostgresAddress = address, comment = ''): Promise<Opened> => {
    const ends: string[] = []
    const link = await PostgresLink.open(to, (why) => void ends.push(why), { comment, timeoutMs: 2000 })
    t.teardown(() => link.destroy())
    return { link, ends }
  }
  const as = (user: string): PostgresAddress => ({ ...address, user })
  const inDatabase = async (t: Test, database: string): Promise<PostgresAddress> => {
    await server.sql(`CREATE DATABASE ${database}`)
    t.teardown(() => server.sql(`DROP DATABASE ${database} WITH (FORCE)`))
    return { ...address, database }
  }
  const failureOf = (asked: Promise<unknown>): Promise<Error> =>
    asked.then(
      (done) => new Error(`none but ${String(done)}`),
      (error: Error) => error,
    )

  void t.test('the password is that of the address, even an empty one', async (t) => {
    await using fake = await fakePostgres()
    process.env['PGPASSWORD'] = 'wrong'
    t.teardown(() => delete process.env['PGPASSWORD'])
    for (const password of ['p', '']) await open(t, { ...fake.address, password })
    t.same(fake.passwords, ['p', ''])
  })

  void t.test('a link is what the address says, whatever the environment', async (t) => {
    const variables = {
      PGOPTIONS: '-c statement_timeout=7s',
      PGREPLICATION: 'database',
      PGCLIENT_ENCODING: 'latin1',
      PGSSLMODE: 'verify-full',
      PGSSLNEGOTIATION: 'nonsense',
    }
    Object.assign(process.env, variables)
    const reset = () => Object.keys(variables).forEach((name) => delete process.env[name])
    t.teardown(reset)
    const kept = t.capture(Socket.prototype, 'setKeepAlive', Socket.prototype.setKeepAlive)
    const { link } = await open(t)
    reset()
    const rows = await link.ask(
      `SELECT current_user, current_database(), current_setting('application_name'),
         current_setting('client_encoding'), current_setting('statement_timeout'), backend_type
       FROM pg_stat_activity WHERE pid = pg_backend_pid()`,
    )
    t.same(rows, [['owner', 'records', 'idempotency-proxy', 'UTF8', '0', 'client backend']])
    t.match(kept().at(0)?.args, [true, Number], 'a host that vanished is noticed')
  })

  void t.test('columns are text, whatever their type, and null is NULL', async (t) => {
    const { link } = await open(t)
    t.same(await link.ask("SELECT $1::bigint, true, NULL, $2::bytea, 'ü€'", [7, Buffer.from('a')]), [
      ['7', 't', null, '\\x61', 'ü€'],
    ])
  })

  void t.test('the server sees whose statement it is, and reports the errors of each', async (t) => {
    const { link } = await open(t, address, '/* whose */ ')
    t.same(await link.ask('SELECT left(current_query(), 11)'), [['/* whose */']])
    t.equal(sqlState(await failureOf(link.ask('SELECT 1 / 0'))), '22012')
    t.same(await link.ask('SELECT 1'), [['1']], 'the next one is not affected')
    const found: (readonly SqlRow[])[] = []
    link.query('SELECT 1 / 0', [], (error, rows) => void found.push(error === null ? [['none']] : rows))
    await until(() => found.length > 0)
    t.same(found, [[]])

    await link.execute('CREATE TABLE scripts AS SELECT left(current_query(), 11); SELECT pg_sleep(0.05)')
    t.same(await server.sql('SELECT * FROM scripts'), [['/* whose */']], 'done when it resolves')
    t.equal(sqlState(await failureOf(link.execute('SELECT 1; SELECT 1 / 0'))), '22012')
  })

  void t.test('a commit that no standby has is an error, of that statement alone', async (t) => {
    const { link } = await open(t)
    await link.execute('CREATE TABLE copied (n int)')
    await server.requireStandby()
    t.teardown(async () => {
      await server.sql('ALTER SYSTEM RESET synchronous_standby_names')
      await server.sql('SELECT pg_reload_conf()')
    })
    const written = failureOf(link.ask('INSERT INTO copied VALUES (1)'))
    const waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    await until(async () => (await server.sql(`SELECT ${waiting}`)).length > 0)
    await server.sql(`SELECT pg_cancel_backend(pid) ${waiting}`)
    t.match(await written, { message: /canceling wait for synchronous replication/ })
    t.same(await link.ask('SELECT n FROM copied'), [['1']])
    t.same(await link.ask("DO $$ BEGIN RAISE WARNING 'of another kind'; END $$"), [])
  })

  void t.test('notifications are heard as they are', async (t) => {
    const { link } = await open(t)
    const heard: string[] = []
    link.onNotification((message) => void heard.push(message))
    await link.ask('LISTEN channel')
    await server.sql("NOTIFY channel, 'pay hello'")
    await until(() => heard.length > 0)
    t.same(heard, ['pay hello'])
  })

  void t.test('an end is told with its reason, after the statement has failed', async (t) => {
    const { link, ends } = await open(t)
    t.equal(link.isOver, false)
    const endsThen = failureOf(link.ask('SELECT pg_sleep(60)')).then(() => ends.length)
    const sleeping = "FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    await until(async () => (await server.sql(`SELECT pg_terminate_backend(pid) ${sleeping}`)).length > 0)
    t.equal(await endsThen, 0)
    await until(() => ends.length > 0)
    t.match(ends, [/terminated/])
    t.equal(link.isOver, true)
    await t.rejects(link.ask('SELECT 1'), Error)

    const ended = await open(t)
    await ended.link.end()
    t.same(ended.ends, ['the connection ended'])
  })

  void t.test('an error that belongs to no statement ends the connection', async (t) => {
    await using wire = await relay(server.port)
    const { link, ends } = await open(t, { ...address, port: wire.port })
    await link.ask('SELECT 1')
    wire.inject(errorMessage('57P01', 'going down'))
    await until(() => ends.length > 0)
    t.match(ends, [/terminated/])
  })

  void t.test('end() waits neither for a statement nor for a server that hangs', async (t) => {
    const { link, ends } = await open(t)
    const asked = failureOf(link.ask('SELECT pg_sleep(60)'))
    await link.end()
    t.match(await asked, { message: 'Connection terminated' })
    t.equal(ends.length, 1)

    const hanging = await open(t)
    server.pause()
    try {
      await hanging.link.end()
    } finally {
      server.resume()
    }
    t.equal(hanging.ends.length, 1)
  })

  void t.test('a connection that fails is closed', async (t) => {
    t.match(await failureOf(open(t, as('absent'))), { message: /role "absent" does not exist/ })
    // It refuses, and does not close the connection itself.
    for (const tls of [null, { rejectUnauthorized: false }]) {
      const requests: Buffer[] = []
      let closed = 0
      const { port } = await serving(t, (socket) => {
        socket.on('close', () => void closed++)
        socket.once('data', (bytes: Buffer) => {
          requests.push(bytes)
          socket.write(errorMessage('28000', 'no'), 'latin1')
        })
      })
      await t.rejects(open(t, { ...address, port, tls }))
      await until(() => closed > 0)
      // The first message is the wish for TLS (80877103), or the version of the protocol.
      t.equal(requests[0]?.readUInt32BE(4), tls === null ? 3 << 16 : 80_877_103)
    }
  })

  void t.test('prepare creates the schema once, and identifies the server', async (t) => {
    const { link } = await open(t, await inDatabase(t, 'prepared'))
    const identity = await prepare(link)
    t.match(identity, { system: /^\d+$/, timeline: 1 })
    await link.ask("CREATE FUNCTION idempotency.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'")
    t.same(await prepare(link), identity)
    const [[acl] = []] = await link.ask("SELECT proacl FROM pg_proc WHERE proname = 'mine'")
    t.equal(acl, null, 'nothing was changed again')
    for (const again of [false, true]) {
      if (again) await link.execute(layoutScript())
      t.same(await link.ask('SELECT version, revision FROM idempotency.layout'), [['1', '7']])
    }
  })

  void t.test('what a later release has made, or another role owns, is left as it is', async (t) => {
    const there = await inDatabase(t, 'later')
    const { link } = await open(t, there)
    await prepare(link)
    for (const later of ['revision = 8', 'version = 2, revision = 1']) {
      await link.ask(`UPDATE idempotency.layout SET ${later}`)
      t.match(await failureOf(link.execute(layoutScript())), { message: /a later release/ })
      await link.execute('ROLLBACK')
    }
    await link.execute('DROP SCHEMA idempotency CASCADE; CREATE SCHEMA idempotency; CREATE ROLE guest LOGIN')
    await link.execute('GRANT ALL ON SCHEMA idempotency TO guest')
    const guest = await open(t, { ...there, user: 'guest' })
    t.match(await failureOf(guest.link.execute(layoutScript())), {
      message: 'the schema belongs to owner, and guest is no member of that role',
    })
    await link.execute('DROP SCHEMA idempotency; GRANT CREATE ON DATABASE later TO guest')
    await guest.link.execute('ROLLBACK')
    await prepare(guest.link)
    t.same(await link.ask("SELECT nspowner::regrole FROM pg_namespace WHERE nspname = 'idempotency'"), [
      ['guest'],
    ])
  })

  void t.test('the view of the first release is replaced, and one that is missing is made', async (t) => {
    const { link } = await open(t, await inDatabase(t, 'views'))
    await prepare(link)
    const view = async () =>
      String((await link.ask("SELECT pg_get_viewdef('idempotency.stored'::regclass)"))[0]?.[0])
    const own = await view()
    const other = own.replace('r.payload', 'r.head AS payload')
    t.not(other, own)
    for (const [revision, isReplaced] of [
      [1, true],
      [2, false],
    ] as const) {
      await link.execute(`CREATE OR REPLACE VIEW idempotency.stored AS ${other}`)
      await link.execute(`UPDATE idempotency.layout SET revision = ${revision}`)
      await link.execute(layoutScript())
      t.equal((await view()) === own, isReplaced)
    }
    await link.execute('DROP VIEW idempotency.stored CASCADE')
    await link.execute(layoutScript())
    t.equal(await view(), own)
  })

  void t.test('prepare names each right that is missing', async (t) => {
    const there = await inDatabase(t, 'rights')
    const { link } = await open(t, there)
    await prepare(link)
    await link.ask('CREATE ROLE limited LOGIN')
    const grants = [...layoutScript().matchAll(/^--  ( GRANT [^;]*<role>;)/gms)].map(([, grant = '']) =>
      grant.replaceAll('\n--', ' ').replace('<role>', 'limited'),
    )
    await link.execute(grants.join(''))
    const limited = await open(t, { ...there, user: 'limited' })
    await prepare(limited.link)
    const tables = ['records', 'unresolved', 'notes', 'buckets', 'waits', 'pruning', 'epochs', 'graces']
    const needed = [
      'SELECT on stored',
      ...tables.flatMap((table) =>
        ['SELECT', 'INSERT', 'UPDATE', 'DELETE'].map((right) => `${right} on ${table}`),
      ),
    ]
    for (const one of needed) {
      const on = one.replace(' on ', ' ON idempotency.')
      await link.execute(`REVOKE ${on} FROM limited`)
      t.match(await failureOf(prepare(limited.link)), { message: new RegExp(`: ${one};`) })
      await link.execute(`GRANT ${on} TO limited`)
    }
    await link.execute('REVOKE EXECUTE ON FUNCTION idempotency.ping FROM limited')
    t.match(await failureOf(prepare(limited.link)), { message: /: EXECUTE on 1 functions;/ })
  })

  void t.test('there is a connection in time, or none', async (t) => {
    const { port } = await serving(t, () => {})
    const begun = performance.now()
    const opened = PostgresLink.open({ ...address, port }, () => {}, { comment: '', timeoutMs: 100 })
    t.match(await failureOf(opened), { message: /timeout/ })
    t.ok(performance.now() - begun < 1500)
  })

  void t.test('an answer that cannot be read ends the connection', async (t) => {
    const ends: string[] = []
    const { port } = await serving(t, (socket) =>
      // AuthenticationOk, then a message that is shorter than it says.
      socket.once('data', () => socket.write('R\0\0\0\x08\0\0\0\0D\0\0\0\x05\x01', 'latin1')),
    )
    t.match(await failureOf(open(t, { ...address, port })), { message: /out of range/ })

    await using wire = await relay(server.port)
    const link = await PostgresLink.open({ ...address, port: wire.port }, (why) => void ends.push(why))
    t.same(await link.ask('SELECT current_query()'), [['SELECT current_query()']], 'without a comment')
    wire.inject('D\0\0\0\x05\x01')
    await until(() => ends.length > 0)
    t.equal(link.isOver, true)
  })
}

async function serving(t: Test, serve: (socket: Socket) => void): Promise<AddressInfo> {
  const listener: Server = createServer((socket) => serve(socket.on('error', () => {})))
  listener.listen(0, '127.0.0.1')
  await once(listener, 'listening')
  t.teardown(() => listener.close())
  return listener.address() as AddressInfo
}
/** As PostgreSQL sends it. */
function errorMessage(code: string, message: string): string {
  const fields = `SFATAL\0C${code}\0M${message}\0\0`
  return `E\0\0\0${String.fromCharCode(fields.length + 4)}${fields}`
}
