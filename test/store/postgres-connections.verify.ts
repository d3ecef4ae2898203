import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import type { PostgresStore } from '../../src/store/postgres/store.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import { PartlyUnavailable, StoreUnavailable } from '../../src/store/register.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { bytesOf, HOUR, newId, newToken, SPANS, until } from './fixtures.ts'
import { claim, FAST, opened, works } from './postgres-fixtures.ts'

/** docs/postgres.md: 8, 8 more while answers are late, one for a moment, and one for LISTEN. */
const MAX_CONNECTIONS = 17
t.setTimeout(300_000)

const HANGS = { name: 'StoreUnavailable', maybeApplied: false, message: /does not finish the statements/ }

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else tests()

const open = (t: Test, url: string) => opened(t, url, { timeoutMs: FAST })

/** A primary with a synchronous standby that is connected. */
async function replicated(t: Test) {
  const primary = await PostgresServer.start()
  t.teardown(() => primary[Symbol.asyncDispose]())
  const standby = await primary.standby()
  t.teardown(() => standby[Symbol.asyncDispose]())
  await primary.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
  await primary.sql('SELECT pg_reload_conf()')
  await until(async () => {
    const rows = await primary.sql("SELECT FROM pg_stat_replication WHERE sync_state = 'sync'")
    return rows.length === 1
  })
  return { primary, standby }
}

/** The most connections of ours that the server has had at once, polled on a connection that stays open. */
async function counting(t: Test, server: PostgresServer) {
  const client = await server.client()
  const counts = { isOn: true, most: 0, now: 0 }
  const look = async (): Promise<void> => {
    while (counts.isOn) {
      const { rows } = await client.query(
        "SELECT count(*)::int AS n FROM pg_stat_activity WHERE application_name = 'idempotency-proxy'",
      )
      counts.now = rows[0].n
      counts.most = Math.max(counts.most, counts.now)
    }
  }
  const looking = look().catch(() => {})
  t.teardown(async () => {
    counts.isOn = false
    await looking
    await client.end()
  })
  return counts
}

/** Claims, renews and settles new keys all the time, more at once than there are connections. */
function load(register: PostgresStore) {
  const [granted, doubtful]: [RecordId[], RecordId[]] = [[], []]
  const self = { isOn: true, granted, doubtful, refused: 0 }
  const worker = async (): Promise<void> => {
    while (self.isOn) {
      const id = newId()
      const token = newToken()
      try {
        const reply = await register.put(id, claim(token), SPANS)
        if (!reply.done) continue
        granted.push(id)
        await register.renew([{ id, token, dueIn: HOUR, dropIn: HOUR }])
        const own = { token, states: ['in_progress'] } as const
        await register.swap(id, own, bytesOf('completed', token), SPANS, false)
      } catch (error) {
        if (!(error instanceof StoreUnavailable)) throw error
        if (error.maybeApplied && !granted.includes(id)) doubtful.push(id)
        if (!error.maybeApplied) self.refused++
        // Claims that are refused at once must not take up the processor.
        await new Promise((next) => setTimeout(next, 5))
      }
    }
  }
  const workers = Array.from({ length: 24 }, worker)
  const stop = async (): Promise<void> => {
    self.isOn = false
    await Promise.all(workers)
  }
  return Object.assign(self, { stop })
}

/** A record with its outcome, as soon as there is a connection in time. */
async function completed(register: PostgresStore) {
  await until(works(register))
  const [id, token] = [newId(), newToken()]
  await register.put(id, claim(token), SPANS)
  const own = { token, states: ['in_progress'] } as const
  await register.swap(id, own, bytesOf('completed', token), SPANS, false)
  return id
}

function tests(): void {
  void t.test('without its standby reads are answered, connections bounded, and claims resume', async (t) => {
    const { primary, standby } = await replicated(t)
    const { register, events } = await open(t, primary.url)
    const there = await completed(register)
    const counts = await counting(t, primary)
    const traffic = load(register)
    await until(() => traffic.granted.length > 100)
    standby.pause()
    await until(() => events.some((event) => event.includes('does not finish')))
    const { refused } = traffic
    await until(() => traffic.refused > refused + 500)

    const reply = await register.put(there, claim(), SPANS)
    t.ok(!reply.done && decodeRecord(reply.bytes).state === 'completed', 'a retry gets its answer')
    t.ok((await register.get(there)).bytes)
    t.ok(await register.ping())
    t.equal(await register.limits.take(newId(), { count: 1, per: HOUR }, 1), 0)
    const note = { tag: 'replayed', count: 1, firstAgo: 0, lastAgo: 0, text: '' }
    t.equal(await register.history.append(there, [note]), true)
    t.same((await register.list({ beginning: there }, null, 10)).ids, [there])
    await t.rejects(register.put(newId(), claim(), SPANS), HANGS)
    const refusal = await register.put(newId(), claim(), SPANS).catch((error) => error)
    t.ok(refusal instanceof PartlyUnavailable, 'the breaker does not count it')
    await t.rejects(register.remove(there, 1), HANGS)

    standby.resume()
    const before = traffic.granted.length
    await until(() => traffic.granted.length > before + 100)
    await traffic.stop()
    t.ok(counts.most <= MAX_CONNECTIONS, `${counts.most} connections`)
    await until(() => counts.now <= 8)
    t.equal(events.filter((event) => /read but not written/.test(event)).length, 1, 'reported once')
    for (const id of traffic.granted) {
      const again = await register.put(id, claim(), SPANS)
      if (again.done) t.fail(`${id} was granted twice`)
    }
    t.ok(traffic.doubtful.length > 0)
  })

  void t.test('traits report a standby that commits do not wait for', async (t) => {
    const { primary } = await replicated(t)
    const { register } = await open(t, primary.url)
    t.match(await register.traits(), {
      forgets: null,
      replication: 'commits wait for * (synchronous_commit on); connected: 1',
    })
    await primary.requireNoStandby()
    await until(async () => (await register.traits()).forgets !== null)
    t.match(await register.traits(), {
      forgets: /^The standby is asynchronous .* promoting it loses the latest claims/,
      replication: 'commits wait for no standby; connected: 1',
    })
  })
}
