import t from 'tap'
import { openPostgresStore, type PostgresStore } from '../../src/store/postgres/store.ts'
import { NO_PGBOUNCER, PgBouncer } from '../support/pgbouncer.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { registerContract } from './contract.ts'
import { newId, SPANS, until } from './fixtures.ts'
import { answers, claim, connections } from './postgres-fixtures.ts'

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

  void t.test('of 99 claims of one key by three proxies over three connections, one succeeds', async (t) => {
    const stores = await Promise.all([open(), open(), open()])
    t.teardown(() => Promise.all(stores.map((store) => store.close())))
    for (let round = 0; round < 5; round++) {
      const id = newId()
      const replies = await Promise.all(
        Array.from({ length: 99 }, (_, n) => (stores[n % 3] as PostgresStore).put(id, claim(), SPANS)),
      )
      t.equal(replies.filter(({ done }) => done).length, 1)
    }
    const used = await connections(server)
    t.ok(used <= 3, `${used}`)
  })

  void t.test('a key is claimed at most once, even if server connections end in the middle', async (t) => {
    const [one, two] = await Promise.all([open(), open()])
    t.teardown(() => Promise.all([one.close(), two.close()]))
    for (let round = 0; round < 10; round++) {
      const id = newId()
      const claims = [one, two, one, two].map((store) => store.put(id, claim(), SPANS))
      const settled = Promise.allSettled(claims)
      await server.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'idempotency-proxy'",
      )
      const done = (await settled).filter((reply) => reply.status === 'fulfilled' && reply.value.done)
      t.ok(done.length <= 1, `${done.length}`)
      for (const store of [one, two]) await until(answers(store))
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
