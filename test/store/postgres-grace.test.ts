import t, { type Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import { openPostgresStore, type PostgresStore } from '../../src/store/postgres.ts'
import { InGrace, type NewEpoch } from '../../src/store/register.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { relay } from '../support/relay.ts'
import { bytesOf, HOUR, newId, newToken, SPANS, until } from './fixtures.ts'

/** Longer than any test: time passes where `skew` says so. */
const GRACE: Millis = 10 * HOUR
t.setTimeout(300_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else tests(await PostgresServer.start())

interface Opened {
  readonly store: PostgresStore
  readonly epochs: NewEpoch[]
  readonly held: Millis[]
  /** Moves the server's clock, as this store sees it. */
  advance(ms: Millis): void
}

function tests(server: PostgresServer): void {
  t.teardown(() => server[Symbol.asyncDispose]())
  let services = 0

  async function open(
    t: Test,
    { url = server.url, grace = GRACE, timeoutMs = 5000, service = `s${++services}` } = {},
  ): Promise<Opened> {
    let skew = 0
    const epochs: NewEpoch[] = []
    const held: Millis[] = []
    const store = await openPostgresStore({
      url,
      service,
      timeoutMs,
      grace,
      skew: () => skew,
      onEvent: () => {},
      onNewEpoch: (epoch) => void epochs.push(epoch),
      onHeld: (left) => void held.push(left),
    })
    t.teardown(() => store.close())
    await until(() => epochs.length > 0)
    return { store, epochs, held, advance: (ms) => void (skew += ms) }
  }

  /** Makes the data say that the server has replaced another one. */
  async function promoted(service: string): Promise<void> {
    await server.sql(`INSERT INTO idempotency.epochs VALUES ('${service}', 'epoch', 1)
      ON CONFLICT (service) DO UPDATE SET started = 'epoch'`)
  }

  async function openPromoted(t: Test, options: { grace?: Millis } = {}): Promise<Opened> {
    const service = `s${++services}`
    await open(t)
    await promoted(service)
    return open(t, { service, ...options })
  }

  void t.test('W01 a server that replaced another grants no claim until the grace is over', async (t) => {
    const { store, advance, epochs } = await openPromoted(t)
    t.match(epochs, [{ left: GRACE }])
    t.ok(epochs[0]?.concerns(newId()))
    const first = await held(store)
    t.ok(first.left > 0 && first.left <= GRACE)
    t.ok(first.now + first.left <= first.since + GRACE + 50)
    t.equal(first.maybeApplied, false)
    const id = newId()
    t.match(await claim(store, id, 'again'), { done: true }, 'an earlier claim is written again')
    t.match(await claim(store, id), { done: false }, 'and answers retries')
    t.match(await store.get(id), { bytes: Buffer })
    t.match(await claim(store, newId(), 'fresh'), { done: true }, 'a key created since is claimed')
    advance(GRACE / 2)
    t.equal((await held(store)).since, first.since)
    advance(GRACE / 2)
    t.match(await claim(store), { done: true })
  })

  void t.test('W01 of many claims the first begins the one grace, and none is granted', async (t) => {
    const peers = [await open(t, { service: 'many' }), await open(t, { service: 'many' })]
    await promoted('many')
    const claims = await Promise.allSettled(
      Array.from({ length: 50 }, (_, n) => claim((peers[n % 2] as Opened).store)),
    )
    t.ok(claims.every((one) => one.status === 'rejected' && one.reason instanceof InGrace))
    const sinces = claims.map((one) => one.status === 'rejected' && one.reason.since)
    t.equal(new Set(sinces).size, 1)
  })

  void t.test('W04 a proxy that comes after the grace begins another one', async (t) => {
    await using name = await relay(server.port)
    const url = server.url.replace(String(server.port), String(name.port))
    const late = await open(t, { service: 'late', url })
    name.accept = false
    name.cut()
    await promoted('late')
    const { store, advance } = await open(t, { service: 'late' })
    const first = await held(store)
    advance(GRACE)
    t.match(await claim(store), { done: true })
    late.advance(GRACE)
    name.accept = true
    await until(() => late.epochs.length === 2)
    const second = await held(store)
    t.ok(second.left > 0 && second.since === first.since, 'for what the late one writes again')
    advance(GRACE)
    t.match(await claim(store), { done: true })
  })

  void t.test('W02 a grace holds takeovers, too, but not outcomes', async (t) => {
    const { store, advance } = await openPromoted(t)
    const [id, token] = [newId(), newToken()]
    await store.put(id, bytesOf('in_progress', token), SPANS, 'again')
    const own = { token, states: ['in_progress'] } as const
    const outcome = await store.swap(id, own, bytesOf('failed_retryable', token), SPANS, false)
    const over = { version: outcome.done ? outcome.stamp.version : 0 }
    const takeOver = () => store.swap(id, over, bytesOf('in_progress', newToken()), SPANS, true)
    await t.rejects(takeOver(), { name: 'InGrace', maybeApplied: false })
    t.match(await store.swap(id, { version: 1 }, bytesOf('in_progress', token), SPANS, true), { done: false })
    advance(GRACE)
    t.match(await takeOver(), { done: true })
  })

  void t.test('W01 claims written again extend the grace, up to twice its length', async (t) => {
    const { store, advance } = await openPromoted(t, { grace: HOUR })
    const { since } = await held(store)
    const left = async (at: Millis): Promise<Millis> => {
      advance(since + at - (await store.ping()))
      await claim(store, newId(), 'again')
      return claim(store).then(
        () => 0,
        (error: InGrace) => error.left,
      )
    }
    t.ok((await left(HOUR / 2)) <= HOUR / 2, 'nothing is extended while there is enough time')
    for (let at = HOUR - 150; at < 2 * HOUR - 5000; at += 150)
      if (at < HOUR + 1000 || (await store.ping()) > since + 2 * HOUR) t.ok((await left(at)) > 0, `at ${at}`)
      else break
    advance(since + 2 * HOUR - (await store.ping()))
    t.match(await claim(store), { done: true })
  })

  void t.test('a new store has no grace, even if many proxies start at once', async (t) => {
    const own = await PostgresServer.start()
    t.teardown(() => own[Symbol.asyncDispose]())
    const all = await Promise.all(Array.from({ length: 4 }, () => open(t, { url: own.url, service: 'pay' })))
    const claims = await Promise.all(
      Array.from({ length: 40 }, (_, n) => claim((all[n % 4] as Opened).store)),
    )
    t.ok(claims.every(({ done }) => done))
    t.same(
      all.map(({ epochs }) => epochs.map(({ left }) => left)),
      [[0], [0], [0], [0]],
    )
  })

  void t.test('W01 whatever may lose claims begins a grace, and every proxy notices', async (t) => {
    const own = await PostgresServer.start()
    t.teardown(() => own[Symbol.asyncDispose]())
    await using clients = await relay(own.port)
    const url = own.url.replace(String(own.port), String(clients.port))
    const at = { url, service: 'pay', grace: 1000, timeoutMs: 500 }
    const [a, b] = [await open(t, at), await open(t, at)]
    const changes = {
      'a restart': () => own.restart(),
      'a crash': async () => {
        await own.kill()
        await own.start()
      },
      'a crash that the server survives': async () => {
        const backend = await own.client()
        const { rows } = await backend.query('SELECT pg_backend_pid() AS pid')
        process.kill(rows[0].pid, 'SIGKILL')
      },
      'no records': () => own.sql('TRUNCATE idempotency.records'),
      'no schema': () => own.sql('DROP SCHEMA idempotency CASCADE'),
      'a promotion': async () => {
        const standby = await own.standby()
        t.teardown(() => standby[Symbol.asyncDispose]())
        await own.kill()
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
  })

  void t.test('W01 an earlier copy, restored on the same timeline, begins a grace', async (t) => {
    const own = await PostgresServer.start()
    t.teardown(() => own[Symbol.asyncDispose]())
    const at = { url: own.url, service: 'pay', grace: 2000, timeoutMs: 1000 }
    const { store, epochs } = await open(t, at)
    t.match(await claim(store), { done: true })
    const restore = await own.copy()
    const id = newId()
    t.match(await claim(store, id), { done: true })
    const before = await own.sql('SELECT pg_walfile_name(pg_current_wal_lsn())')
    await restore()
    const newcomer = await open(t, at)
    t.same(
      String(await own.sql('SELECT pg_walfile_name(pg_current_wal_lsn())')).slice(0, 8),
      String(before).slice(0, 8),
    )
    t.equal((await claimed(newcomer.store, () => id))[0], 'InGrace', 'the claim was lost')
    await until(() => epochs.length > 1)
  })

  void t.test('W01 a store that lost its data is not new to a proxy that has claimed on it', async (t) => {
    const service = 'lost'
    const { store } = await open(t, { service })
    t.match(await claim(store), { done: true })
    const lose = () => server.sql(`DELETE FROM idempotency.epochs WHERE service = '${service}'`)
    await lose()
    await held(store)
    await lose()
    const newcomer = await open(t, { service })
    t.match(await claim(newcomer.store), { done: true }, 'the newcomer knows of no earlier claim')
    await held(store)
    await held(newcomer.store)
  })

  void t.test('W01 a clock set back begins a new grace', async (t) => {
    const { store, advance } = await open(t)
    t.match(await claim(store), { done: true })
    advance(-HOUR)
    await held(store)
  })

  void t.test('if the server falls silent, another connection is tried', async (t) => {
    await using clients = await relay(server.port)
    const url = server.url.replace(String(server.port), String(clients.port))
    const { store } = await open(t, { url, grace: 1000, timeoutMs: 200 })
    let connections = 0
    clients.onCommand = (bytes) => void (connections += bytes.includes('application_name') ? 1 : 0)
    clients.passReplies = false
    await until(() => connections > 1)
    clients.passReplies = true
    clients.cut()
    await until(async () => (await claimed(store)).at(-1) === 'granted')
  })

  void t.test('grace callbacks are optional, and a store that is down is looked at again', async (t) => {
    const options = { service: 'pay', timeoutMs: 300, grace: 100, onEvent: () => {} }
    const store = await openPostgresStore({ ...options, url: server.url })
    t.teardown(() => store.close())
    t.equal((await claimed(store)).at(-1), 'granted')
    const looks: Millis[] = []
    const down = await openPostgresStore({
      ...options,
      url: 'postgres://owner@127.0.0.1:1/records',
      onHeld: (left) => void looks.push(left),
    })
    t.teardown(() => down.close())
    await until(() => looks.length > 2)
    await t.rejects(claim(down), { name: 'StoreUnavailable' })
  })
}

const claim = (store: PostgresStore, id: RecordId = newId(), entry?: 'claim' | 'fresh' | 'again') =>
  store.put(id, bytesOf('in_progress', newToken()), SPANS, entry)

async function held(store: PostgresStore, id?: RecordId): Promise<InGrace> {
  const error = await claim(store, id).then(
    () => null,
    (error: unknown) => error,
  )
  if (!(error instanceof InGrace)) throw new Error(`not held but ${String(error)}`)
  return error
}

/** Claims until one is granted. Returns the results of the attempts, without immediate repeats. */
async function claimed(store: PostgresStore, idOf: () => RecordId = newId): Promise<readonly string[]> {
  const found: string[] = []
  await until(async () => {
    const kind = await claim(store, idOf()).then(
      () => 'granted',
      (error: Error) => error.name,
    )
    if (found.at(-1) !== kind) found.push(kind)
    return kind === 'granted'
  })
  return found
}
