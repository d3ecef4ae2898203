import t, { type Test } from 'tap'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { newId } from './fixtures.ts'
import { GRACE, graceContract } from './grace.ts'
import { openedWithGrace } from './postgres-fixtures.ts'

t.setTimeout(300_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else tests(await PostgresServer.start('fsync=off'))

function tests(server: PostgresServer): void {
  t.teardown(() => server[Symbol.asyncDispose]())
  graceContract(t, 'postgres', async () => {
    const { url, sql } = await server.database()
    await openedWithGrace(t, url, { service: 'another' })
    return {
      open: (t: Test) => openedWithGrace(t, url, { grace: GRACE }),
      promoted: () =>
        sql(`INSERT INTO idempotency.epochs VALUES ('pay', 'epoch', 1)
          ON CONFLICT (service) DO UPDATE SET started = 'epoch'`),
      lose: () => sql("DELETE FROM idempotency.epochs WHERE service = 'pay'"),
      breakAll: () =>
        sql(
          "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'idempotency-proxy'",
        ),
      sibling: newId,
    }
  })
}
