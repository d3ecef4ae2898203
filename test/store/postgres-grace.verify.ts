import t from 'tap'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { relay } from '../support/relay.ts'
import { newId, until } from './fixtures.ts'
import { claimed, openedWithGrace, urlAt } from './postgres-fixtures.ts'

// What begins a grace on real servers.
t.setTimeout(300_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else tests(await PostgresServer.start())

function tests(server: PostgresServer): void {
  t.teardown(() => server[Symbol.asyncDispose]())

  void t.test('W01 whatever may lose claims begins a grace, and every proxy notices', async (t) => {
    await using clients = await relay(server.port)
    const at = { grace: 1000, timeoutMs: 500 }
    const url = urlAt(clients)
    const [a, b] = [await openedWithGrace(t, url, at), await openedWithGrace(t, url, at)]
    const changes = {
      'a restart': () => server.restart(),
      'a crash': async () => {
        await server.kill()
        await server.start()
      },
      'a crash that the server survives': async () => {
        const backend = await server.client()
        const { rows } = await backend.query('SELECT pg_backend_pid() AS pid')
        process.kill(rows[0].pid, 'SIGKILL')
      },
      'no records': () => server.sql('TRUNCATE idempotency.records'),
      'no schema': () => server.sql('DROP SCHEMA idempotency CASCADE'),
      'a promotion': async () => {
        const standby = await server.standby()
        t.teardown(() => standby[Symbol.asyncDispose]())
        await server.kill()
        await standby.promote()
        clients.target = standby.port
        clients.cut()
      },
    }
    for (const [what, change] of Object.entries(changes)) {
      t.equal((await claimed(a.store)).at(-1), 'granted')
      const known = [a.epochs.length, b.epochs.length]
      await change()
      await until(() => a.epochs.length > (known[0] ?? 0) && b.epochs.length > (known[1] ?? 0))
      t.ok(
        [a, b].some(({ epochs }) => (epochs.at(-1)?.left ?? 0) > 0),
        what,
      )
    }
    await server.start()
  })

  void t.test('W01 an earlier copy, restored on the same timeline, begins a grace', async (t) => {
    const timeline = async () =>
      String(await server.sql('SELECT pg_walfile_name(pg_current_wal_lsn())')).slice(0, 8)
    const at = { grace: 2000, service: 'copied' }
    const { store, epochs } = await openedWithGrace(t, server.url, at)
    t.same(await claimed(store), ['granted'])
    const restore = await server.copy()
    const id = newId()
    t.same(await claimed(store, () => id), ['granted'])
    const before = await timeline()
    await restore()
    const newcomer = await openedWithGrace(t, server.url, at)
    t.equal(await timeline(), before)
    t.equal((await claimed(newcomer.store, () => id))[0], 'InGrace', 'the claim was lost')
    await until(() => epochs.length > 1)
  })

  void t.test('if the server falls silent, another connection is tried', async (t) => {
    await using clients = await relay(server.port)
    const { store } = await openedWithGrace(t, urlAt(clients), { grace: 1000, timeoutMs: 200 })
    let connections = 0
    clients.onCommand = (bytes) => void (connections += bytes.includes('application_name') ? 1 : 0)
    clients.passReplies = false
    await until(() => connections > 1)
    clients.passReplies = true
    clients.cut()
    t.equal((await claimed(store)).at(-1), 'granted')
  })
}
