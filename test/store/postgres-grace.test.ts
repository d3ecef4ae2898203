import t, { type Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import type { PostgresStore } from '../../src/store/postgres.ts'
import { InGrace } from '../../src/store/register.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { relay } from '../support/relay.ts'
import { bytesOf, HOUR, newId, newToken, SPANS, until } from './fixtures.ts'
import { claim, openedWithGrace, urlAt } from './postgres-fixtures.ts'

/** Longer than any test: time passes where the test says so. */
const GRACE: Millis = 10 * HOUR
t.setTimeout(300_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else tests(await PostgresServer.start('fsync=off'))

type Opened = Awaited<ReturnType<typeof openedWithGrace>>

const claimOn = (store: PostgresStore, id: RecordId = newId(), entry?: 'claim' | 'fresh' | 'again') =>
  store.put(id, claim(), SPANS, entry)

async function held(store: PostgresStore, id?: RecordId): Promise<InGrace> {
  const error = await claimOn(store, id).catch((reason: unknown) => reason)
  if (!(error instanceof InGrace)) throw new Error(`not held but ${String(error)}`)
  return error
}

function tests(server: PostgresServer): void {
  t.teardown(() => server[Symbol.asyncDispose]())
  let services = 0

  const open = (t: Test, { url = server.url, grace = GRACE, service = `s${++services}` } = {}) =>
    openedWithGrace(t, url, { grace, service })

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
    t.match(await claimOn(store, id, 'again'), { done: true }, 'an earlier claim is written again')
    t.match(await claimOn(store, id), { done: false }, 'and answers retries')
    t.match(await store.get(id), { bytes: Buffer })
    t.match(await claimOn(store, newId(), 'fresh'), { done: true }, 'a key created since is claimed')
    advance(GRACE / 2)
    t.equal((await held(store)).since, first.since)
    advance(GRACE / 2)
    t.match(await claimOn(store), { done: true })
  })

  void t.test('W01 of many claims the first begins the one grace, and none is granted', async (t) => {
    const peers = [await open(t, { service: 'many' }), await open(t, { service: 'many' })]
    await promoted('many')
    const claims = await Promise.allSettled(
      Array.from({ length: 50 }, (_, n) => claimOn((peers[n % 2] as Opened).store)),
    )
    t.ok(claims.every((one) => one.status === 'rejected' && one.reason instanceof InGrace))
    const sinces = claims.map((one) => one.status === 'rejected' && one.reason.since)
    t.equal(new Set(sinces).size, 1)
  })

  void t.test('W04 a proxy that comes after the grace begins another one', async (t) => {
    await using name = await relay(server.port)
    const late = await open(t, { service: 'late', url: urlAt(name) })
    name.accept = false
    name.cut()
    await promoted('late')
    const { store, advance } = await open(t, { service: 'late' })
    const first = await held(store)
    advance(GRACE)
    t.match(await claimOn(store), { done: true })
    late.advance(GRACE)
    name.accept = true
    await until(() => late.epochs.length === 2)
    const second = await held(store)
    t.ok(second.left > 0 && second.since === first.since, 'for what the late one writes again')
    advance(GRACE)
    t.match(await claimOn(store), { done: true })
  })

  void t.test('W02 a grace holds takeovers, too, but not outcomes', async (t) => {
    const { store, advance } = await openPromoted(t)
    const [id, token] = [newId(), newToken()]
    await store.put(id, claim(token), SPANS, 'again')
    const own = { token, states: ['in_progress'] } as const
    const outcome = await store.swap(id, own, bytesOf('failed_retryable', token), SPANS, false)
    const over = { version: outcome.done ? outcome.stamp.version : 0 }
    const takeOver = () => store.swap(id, over, claim(), SPANS, true)
    await t.rejects(takeOver(), { name: 'InGrace', maybeApplied: false })
    t.match(await store.swap(id, { version: 1 }, claim(token), SPANS, true), { done: false })
    advance(GRACE)
    t.match(await takeOver(), { done: true })
  })

  void t.test('W01 claims written again extend the grace, up to twice its length', async (t) => {
    const { store, advance } = await openPromoted(t, { grace: HOUR })
    const { since } = await held(store)
    const left = async (at: Millis): Promise<Millis> => {
      advance(since + at - (await store.ping()))
      await claimOn(store, newId(), 'again')
      return claimOn(store).then(
        () => 0,
        (error: InGrace) => error.left,
      )
    }
    t.ok((await left(HOUR / 2)) <= HOUR / 2, 'nothing is extended while there is enough time')
    for (let at = HOUR - 150; at < 2 * HOUR - 5000; at += 150)
      if (at < HOUR + 1000 || (await store.ping()) > since + 2 * HOUR) t.ok((await left(at)) > 0, `at ${at}`)
      else break
    advance(since + 2 * HOUR - (await store.ping()))
    t.match(await claimOn(store), { done: true })
  })

  void t.test('a new store has no grace, even if many proxies start at once', async (t) => {
    const { url } = await server.database()
    const all = await Promise.all(Array.from({ length: 4 }, () => open(t, { url })))
    const claims = await Promise.all(
      Array.from({ length: 40 }, (_, n) => claimOn((all[n % 4] as Opened).store)),
    )
    t.ok(claims.every(({ done }) => done))
    for (const { epochs } of all)
      t.same(
        epochs.map(({ left }) => left),
        [0],
      )
  })

  void t.test('W01 a store that lost its data is not new to a proxy that has claimed on it', async (t) => {
    const service = 'lost'
    const { store } = await open(t, { service })
    t.match(await claimOn(store), { done: true })
    const lose = () => server.sql(`DELETE FROM idempotency.epochs WHERE service = '${service}'`)
    await lose()
    await held(store)
    await lose()
    const newcomer = await open(t, { service })
    t.match(await claimOn(newcomer.store), { done: true }, 'the newcomer knows of no earlier claim')
    await held(store)
    await held(newcomer.store)
  })

  void t.test('W01 a clock set back begins a new grace', async (t) => {
    const { store, advance } = await open(t)
    t.match(await claimOn(store), { done: true })
    advance(-HOUR)
    await held(store)
  })
}
