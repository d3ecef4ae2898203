import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { readStamps } from '../../src/store/codec.ts'
import { openPostgresStore, type PostgresOptions } from '../../src/store/postgres.ts'
import type { NewEpoch } from '../../src/store/register.ts'
import { NO_POSTGRES, PostgresServer } from '../support/postgres.ts'
import { type Relay, relay } from '../support/relay.ts'
import { bytesOf, newId, newToken, SPANS, until } from './fixtures.ts'

/** As a reply lost on the way: what was asked may have been done. */
const NONSENSE = { name: 'StoreUnavailable', maybeApplied: true, message: /no answer .* that makes sense/ }
const CORRUPT = { name: 'CorruptRecord' }
t.setTimeout(100_000)

if (NO_POSTGRES) t.plan(0, NO_POSTGRES)
else tests()

const claim = () => bytesOf('in_progress', newToken())
const outcome = () => bytesOf('completed', newToken())

async function open(t: Test, server: PostgresServer, more: Partial<PostgresOptions> = {}) {
  const store = await openPostgresStore({
    url: server.url,
    service: 'pay',
    timeoutMs: 10_000,
    onEvent: () => {},
    ...more,
  })
  t.teardown(() => store.close())
  return store
}

/** From now on this function of the schema assigns this, whatever it is asked. */
async function answers(server: PostgresServer, name: string, assignments: string): Promise<void> {
  await server.sql(`DO $do$ BEGIN EXECUTE (
    SELECT format('CREATE OR REPLACE FUNCTION idempotency.%I(%s) LANGUAGE plpgsql AS %L', p.proname,
      pg_get_function_arguments(p.oid), $body$BEGIN number := _number; ${assignments}; END$body$)
    FROM pg_proc p WHERE p.proname = '${name}' AND p.pronamespace = 'idempotency'::regnamespace
  ); END $do$`)
}

const WRITTEN = 'at := 7; done := true; version := 7; fence := 7; created_at := 7'
/** 2^48 - 1 is the last number that a record can hold. */
const NO_NUMBERS = ['NULL', '-1', '281474976710656', '1000000000000000']

function tests(): void {
  void t.test('a reply that makes no sense grants no claim', async (t) => {
    await using server = await PostgresServer.start()
    const store = await open(t, server)
    const nonsense = [
      ...['at', 'version', 'fence', 'created_at'].flatMap((column) =>
        NO_NUMBERS.map((value) => `${WRITTEN}; ${column} := ${value}`),
      ),
      `${WRITTEN}; version := 0`,
      `${WRITTEN}; fence := 0`,
      `${WRITTEN}; done := NULL`,
      'at := 7; done := false; remaining := -1',
      'at := 7; done := false; remaining := 9',
    ]
    for (const reply of nonsense) {
      for (const name of ['put', 'swap']) await answers(server, name, reply)
      await t.rejects(store.put(newId(), claim(), SPANS), NONSENSE, reply)
      await t.rejects(store.swap(newId(), { version: 7 }, claim(), SPANS, true), NONSENSE, reply)
    }
    for (const name of ['put', 'swap']) await answers(server, name, 'at := 7; done := false')
    await t.rejects(store.put(newId(), claim(), SPANS), NONSENSE, 'neither written nor there')
    t.match(await store.swap(newId(), { version: 7 }, claim(), SPANS, true), { done: false, bytes: null })
  })

  void t.test('a write that does not say who waits has been made', async (t) => {
    await using server = await PostgresServer.start()
    const store = await open(t, server)
    for (const name of ['put', 'swap']) await answers(server, name, WRITTEN)
    await answers(server, 'remove', 'done := true')
    t.match(await store.put(newId(), outcome(), SPANS), { done: true, stamp: { version: 7 } })
    t.match(await store.swap(newId(), { version: 7 }, outcome(), SPANS, false), { done: true })
    t.equal(await store.remove(newId(), 7), true)
  })

  void t.test('times, waits and places that make no sense are not believed', async (t) => {
    await using server = await PostgresServer.start()
    const store = await open(t, server)
    for (const value of NO_NUMBERS) {
      for (const name of ['get', 'ping']) await answers(server, name, `at := ${value}`)
      await answers(server, 'throttle', `wait := ${value}`)
      await t.rejects(store.get(newId()), NONSENSE, value)
      await t.rejects(store.ping(), NONSENSE, value)
      await t.rejects(store.limits.take('bucket', { count: 1, per: 1000 }, 1), NONSENSE, value)
    }
    for (const listed of ['NULL', "'7'", "'7 a,'", "'x a'", "'7 a 7 b'", "'12345678901234567 a'"]) {
      await answers(server, 'places', `listed := ${listed}`)
      await t.rejects(store.list('unresolved', null, 2), NONSENSE, listed)
    }
    await answers(server, 'places', "listed := '7 a,8 b'")
    t.match(await store.list('unresolved', null, 2), { ids: ['a', 'b'] })
  })

  void t.test('a damaged record is corrupt, not absent or another', async (t) => {
    await using server = await PostgresServer.start()
    await using wire = await relay(server.port)
    const store = await open(t, server, { url: `postgres://owner@127.0.0.1:${wire.port}/records` })
    const id = newId()
    await store.put(id, outcome(), SPANS)
    const { version } = readStamps((await store.get(id)).bytes as Buffer)
    for (const [column, value] of [
      ['fence', '-1'],
      ['created_at', '281474976710656'],
      ['updated_at', '1000000000000000'],
      ['schema', '256'],
      ['state', '-1'],
      ['token', "'\\x00'"],
    ] as const) {
      await server.sql(`BEGIN; CREATE TABLE before AS SELECT ${column} FROM idempotency.records;
        UPDATE idempotency.records SET ${column} = ${value}; COMMIT`)
      await t.rejects(store.get(id), CORRUPT, column)
      await t.rejects(store.put(id, claim(), SPANS), CORRUPT, column)
      await server.sql(`BEGIN; UPDATE idempotency.records SET ${column} = (SELECT ${column} FROM before);
        DROP TABLE before; COMMIT`)
    }
    wire.onReply = moveHalfAByte
    await t.rejects(store.get(id), { ...CORRUPT, message: /in hex/ })
    wire.onReply = () => {}
    t.equal(readStamps((await store.get(id)).bytes as Buffer).version, version)
    await answers(server, 'get', "at := 7; stored.token := decode(repeat('00', 16), 'hex')")
    await t.rejects(store.get(id), CORRUPT, 'the rest is NULL')
  })

  void t.test('a damaged history is no other one', async (t) => {
    await using server = await PostgresServer.start()
    await using wire = await relay(server.port)
    const store = await open(t, server, { url: `postgres://owner@127.0.0.1:${wire.port}/records` })
    for (const lines of ['{}', '7', '[7]', '["a 1 1 1 b", null]']) {
      await answers(server, 'notes_of', `lines := '${lines}'`)
      await t.rejects(store.history.read(newId()), CORRUPT, lines)
    }
    await answers(server, 'notes_of', `lines := '["a 1 1 1 b"]'`)
    t.match(await store.history.read(newId()), [{ tag: 'a', text: 'b' }])
    wire.onReply = (bytes) => {
      const list = bytes.indexOf('["')
      if (list >= 0) bytes.write('{', list)
    }
    await t.rejects(store.history.read(newId()), CORRUPT, 'no JSON')
    await answers(server, 'notes_of', 'lines := NULL')
    t.same(await store.history.read(newId()), [])
  })

  void t.test('a look at the server that makes no sense begins no grace', async (t) => {
    await using server = await PostgresServer.start()
    const epochs: NewEpoch[] = []
    const held: Millis[] = []
    await open(t, server, {
      grace: 400,
      onNewEpoch: (epoch) => void epochs.push(epoch),
      onHeld: (left) => void held.push(left),
    })
    await until(() => epochs.length > 0)
    for (const reply of ['remaining := 9', 'remaining := -1; since := 7', 'since := -1; remaining := 0']) {
      await answers(server, 'admit', reply)
      const from = held.length
      await until(() => held.length > from + 2)
      t.equal(held.at(-1), 0, reply)
    }
    t.equal(epochs.length, 1)
  })
}

/** From the head of a record to its payload, in a row that ends with the two. */
const moveHalfAByte: Relay['onReply'] = (bytes) => {
  const token = bytes.indexOf('\\x')
  if (token < 0) return
  const head = token + 34 + 4
  const length = bytes.readInt32BE(head - 4)
  const last = head + length - 1
  const half = bytes.subarray(last, last + 1).toString()
  bytes.writeInt32BE(length - 1, head - 4)
  bytes.writeInt32BE(bytes.readInt32BE(last + 1) + 1, last)
  bytes.write(`\\x${half}`, last + 4)
}
