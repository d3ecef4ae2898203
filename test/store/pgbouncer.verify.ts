import t from 'tap'
import { openPostgresStore } from '../../src/store/postgres/store.ts'
import { NO_PGBOUNCER, PgBouncer } from '../support/pgbouncer.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { registerContract } from './contract.ts'
import { newId, until } from './fixtures.ts'

t.setTimeout(300_000)

const NONE = NO_POSTGRES || NO_PGBOUNCER
if (NONE) t.plan(0, NONE)
else await tests()

async function tests(): Promise<void> {
  const server = await PostgresServer.start('fsync=off')
  t.teardown(() => server[Symbol.asyncDispose]())
  // Fewer connections than one proxy has.
  const pooler = await PgBouncer.start(server, 3)
  t.teardown(() => pooler[Symbol.asyncDispose]())
  let skew = 0
  const open = (service = 'pay', timeoutMs = 5000, onEvent = (_kind: string, _detail: string) => {}) =>
    openPostgresStore({ url: pooler.url, service, timeoutMs, onEvent, skew: () => skew })

  registerContract(t, 'postgres through PgBouncer in transaction mode', async () => {
    const [register, peer, other] = await Promise.all([open(), open(), open('pay.eu')])
    await server.sql(
      'TRUNCATE idempotency.records, idempotency.unresolved, idempotency.notes, idempotency.buckets, idempotency.waits',
    )
    return {
      register,
      peer,
      other,
      tellsPeers: false,
      advance: (ms) => void (skew += ms),
      [Symbol.asyncDispose]: async () =>
        void (await Promise.all([register.close(), peer.close(), other.close()])),
    }
  })

  void t.test('LISTEN does not work through PgBouncer, which is reported once', async (t) => {
    const events: string[] = []
    const store = await open('pay', 300, (kind, detail) => void events.push(`${kind} ${detail}`))
    t.teardown(() => store.close())
    for (let n = 0; n < 2; n++) {
      await store.watch(newId(), () => {})
      await until(() => events.length > 1)
    }
    t.match(events, [/^connected/, /^error notifications do not arrive/])
    t.same(await server.sql('SELECT FROM idempotency.waits'), [])
  })
}
