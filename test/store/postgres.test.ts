import t from 'tap'
import { openPostgresStore } from '../../src/store/postgres/store.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { registerContract } from './contract.ts'
import { exactContract } from './exact.ts'
import { bytesOf, HOUR, newId, newToken, SPANS, until } from './fixtures.ts'
import { claim, opened, works } from './postgres-fixtures.ts'

t.setTimeout(300_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else await tests()

async function tests(): Promise<void> {
  const server = await PostgresServer.start('fsync=off')
  t.teardown(() => server[Symbol.asyncDispose]())
  let skew = 0
  const moving = { skew: () => skew, timeoutMs: 30_000 }
  const advance = (ms: number) => void (skew += ms)
  const empty = () =>
    server.sql(
      ['records', 'unresolved', 'notes', 'buckets', 'waits']
        .map((table) => `DELETE FROM idempotency.${table}`)
        .join('; '),
    )

  void t.test('what every store promises', async (t) => {
    const open = (service: string) =>
      openPostgresStore({ url: server.url, service, onEvent: () => {}, ...moving })
    const stores = await Promise.all([open('pay'), open('pay'), open('pay.eu')])
    t.teardown(() => Promise.all(stores.map((store) => store.close())))
    const [register, peer, other] = stores
    registerContract(t, 'postgres', async () => {
      await empty()
      return { register, peer, other, tellsPeers: true, advance, [Symbol.asyncDispose]: async () => {} }
    })
  })

  void t.test('its time is that of the server, and all instants are exact', async (t) => {
    const { url, sql } = await server.database()
    const { register } = await opened(t, url, moving)
    await until(works(register))
    t.ok(Math.abs((await register.ping()) - Date.now() - skew) < HOUR)
    await sql(`CREATE OR REPLACE FUNCTION idempotency.now(_skew bigint) RETURNS bigint
      LANGUAGE sql AS 'SELECT 1795000000000 + _skew'`)
    exactContract(t, 'postgres', async () => {
      await sql('TRUNCATE idempotency.records, idempotency.unresolved, idempotency.buckets')
      return { register, advance, async [Symbol.asyncDispose]() {} }
    })
  })

  void t.test('expired records, buckets and waits are removed, once for all replicas', async (t) => {
    let pruned = 0
    const onPruned = (records: number) => void (pruned += records)
    const [register, peer] = await Promise.all(
      [1, 2].map(async () => (await opened(t, server.url, { ...moving, onPruned })).register),
    )
    if (register === undefined || peer === undefined) return
    await empty()
    const [kept, renewed] = [newId(), newId()]
    const token = newToken()
    // More than one round removes.
    await server.sql(`INSERT INTO idempotency.records
      SELECT 1, 1, 1, 1, 1, 1, 1, 2, 'old' || n, 'gone', '\\x00', '\\x00', '\\x00' FROM generate_series(1, 700) n`)
    await register.put(kept, bytesOf('completed', newToken()), { dueIn: 0, dropIn: 48 * HOUR })
    await register.put(renewed, claim(token), { dueIn: 1, dropIn: HOUR })
    await peer.renew([{ id: renewed, token, dueIn: HOUR, dropIn: 48 * HOUR }])
    await register.limits.take(newId(), { count: 1, per: HOUR }, 1)
    await server.sql("INSERT INTO idempotency.waits VALUES (0, 'x', 'pay', 'of_the_dead')")
    advance(2 * HOUR)
    const left = async () =>
      server.sql(`SELECT (SELECT count(*) FROM idempotency.records), (SELECT count(*) FROM idempotency.buckets),
                  (SELECT count(*) FROM idempotency.waits)`)
    await until(async () => String(await left()) === '2,0,0')
    await until(() => pruned >= 700)
    t.equal(pruned, 700)
    for (const id of [kept, renewed]) t.ok((await register.get(id)).bytes)
  })

  void t.test('of 50 claims of an expired record, one succeeds', async (t) => {
    const { register } = await opened(t, server.url, moving)
    const { register: peer } = await opened(t, server.url, moving)
    const id = newId()
    await register.put(id, claim(), { dueIn: 0, dropIn: HOUR })
    advance(HOUR)
    const replies = await Promise.all(
      Array.from({ length: 50 }, (_, n) => (n % 2 ? register : peer).put(id, claim(), SPANS)),
    )
    t.equal(replies.filter(({ done }) => done).length, 1)
  })

  void t.test('only records that somebody waits for are notified', async (t) => {
    const { register } = await opened(t, server.url)
    const listening = await server.client()
    t.teardown(() => listening.end())
    const [id, other] = [newId(), newId()]
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

  void t.test('traits report durability and replication of the server', async (t) => {
    const { name, url } = await server.database()
    await server.sql(`ALTER DATABASE ${name} SET synchronous_commit = off`)
    const { register } = await opened(t, url)
    t.match(await register.traits(), {
      durable: false,
      evicts: false,
      forgets: null,
      findings: [/synchronous_commit is off/, /fsync/],
      replication: 'commits wait for no standby; connected: 0',
      room: /^\d+ MiB at the last VACUUM; \d+ rows, and \d+ dead ones$/,
    })
  })
}
