import { once } from 'node:events'
import { type AddressInfo, createServer, type Server, Socket } from 'node:net'
import t, { type Test } from 'tap'
import { PostgresLink, type SqlRow, sqlState } from '../../src/store/postgres/link.ts'
import { type PostgresAddress, postgresAddress } from '../../src/store/postgres/url.ts'
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
  const address = postgresAddress(server.url, () => {})

  const open = async (t: Test, to: PostgresAddress = address, comment = ''): Promise<Opened> => {
    const ends: string[] = []
    const link = await PostgresLink.open(to, (why) => void ends.push(why), { comment, timeoutMs: 30_000 })
    t.teardown(() => link.destroy())
    return { link, ends }
  }
  const failureOf = (asked: Promise<unknown>): Promise<Error> =>
    asked.then(
      (done) => new Error(`none but ${String(done)}`),
      (error: Error) => error,
    )

  void t.test('the password is that of the address, even an empty one', async (t) => {
    const passwords: string[] = []
    const { port } = await serving(t, (socket) => {
      // In clear; then AuthenticationOk and ReadyForQuery.
      socket.once('data', () => {
        socket.write('R\0\0\0\x08\0\0\0\x03')
        socket.once('data', (bytes: Buffer) => {
          passwords.push(bytes.toString('utf8', 5, bytes.length - 1))
          socket.write('R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I')
        })
      })
    })
    process.env['PGPASSWORD'] = 'wrong'
    t.teardown(() => delete process.env['PGPASSWORD'])
    for (const password of ['p', '']) await open(t, { ...address, port, password })
    t.same(passwords, ['p', ''])
  })

  void t.test('a link is what the address says, whatever the environment', async (t) => {
    const variables = {
      PGOPTIONS: '-c statement_timeout=7s -c synchronous_commit=local',
      PGREPLICATION: 'database',
      PGCLIENT_ENCODING: 'latin1',
      PGAPPNAME: 'another',
      PGSSLMODE: 'verify-full',
      PGSSLNEGOTIATION: 'nonsense',
      PGHOST: 'nowhere',
      PGPORT: '1',
      PGUSER: 'nobody',
      PGDATABASE: 'none',
      PGBINARY: '1',
      PGCONNECT_TIMEOUT: '0',
    }
    Object.assign(process.env, variables)
    const reset = () => Object.keys(variables).forEach((name) => delete process.env[name])
    t.teardown(reset)
    const kept = t.capture(Socket.prototype, 'setKeepAlive', Socket.prototype.setKeepAlive)
    const { link } = await open(t)
    reset()
    const rows = await link.ask(
      `SELECT current_user, current_database(), current_setting('application_name'), current_setting('client_encoding'),
         current_setting('statement_timeout'), current_setting('synchronous_commit'), backend_type
       FROM pg_stat_activity WHERE pid = pg_backend_pid()`,
    )
    t.same(rows, [['owner', 'records', 'idempotency-proxy', 'UTF8', '0', 'on', 'client backend']])
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
    t.teardown(() => server.requireNoStandby())
    const written = failureOf(link.ask('INSERT INTO copied VALUES (1)'))
    const waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    await until(async () => (await server.sql(`SELECT ${waiting}`)).length > 0)
    await server.sql(`SELECT pg_cancel_backend(pid) ${waiting}`)
    t.match(await written, { message: /canceling wait for synchronous replication/ })
    t.same(await link.ask('SELECT n FROM copied'), [['1']])
    t.same(await link.ask("DO $$ BEGIN RAISE WARNING 'of another kind'; END $$"), [])
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
    t.match(await failureOf(open(t, { ...address, user: 'absent' })), {
      message: /role "absent" does not exist/,
    })
    // It refuses, and does not close the connection itself.
    for (const tls of [null, () => ({ rejectUnauthorized: false })]) {
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

  void t.test('there is a connection in time, or none', async (t) => {
    const { port } = await serving(t, () => {})
    const opened = PostgresLink.open({ ...address, port }, () => {}, { comment: '', timeoutMs: 100 })
    t.match(await failureOf(opened), { message: /timeout/ })
  })

  void t.test('an answer that cannot be read ends the connection', async (t) => {
    const ends: string[] = []
    for (const [says, failure] of [
      // AuthenticationOk, then a message that is shorter than it says.
      ['R\0\0\0\x08\0\0\0\0D\0\0\0\x05\x01', /out of range/],
      ['R\0\0\0\x08', /terminated/],
      ['HTTP/1.1 400 Bad Request\r\n\r\n', /./],
    ] as const) {
      const { port } = await serving(t, (socket) => socket.once('data', () => socket.end(says, 'latin1')))
      t.match(await failureOf(open(t, { ...address, port })), { message: failure })
    }

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
