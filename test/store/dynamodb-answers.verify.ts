import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import type { Clock } from '../../src/store/dynamodb/client.ts'
import { partsOf } from '../../src/store/dynamodb/layout.ts'
import { openDynamoDbStore } from '../../src/store/dynamodb/store.ts'
import { type Store, StoreUnavailable } from '../../src/store/register.ts'
import {
  type Asked,
  failure,
  refusal,
  ScriptedDynamoDb,
  type Wire,
  wire,
} from '../support/scripted-dynamodb.ts'
import { bytesOf, newToken, until } from './fixtures.ts'

/* What the store asks of DynamoDB, and makes of each answer, where the emulator cannot show it. */

const EARLIEST = 1_000_000
const LATEST = 1_000_250
const CLOCK: Clock = { saw: () => {}, earliest: () => EARLIEST, latest: () => LATEST }
const unclear = (): number => {
  throw new StoreUnavailable('the time is unknown', false)
}
const UNCLEAR: Clock = { saw: () => {}, earliest: unclear, latest: unclear }
const SPANS = { dueIn: 5000, dropIn: 20_000 }
const STAMPS = { m: { N: '1000250' }, d: { N: '1005250' }, x: { N: '1020250' }, e: { N: '4621' } }

const id = `BC${'x'.repeat(41)}` as RecordId
const KEY = { pk: { S: 'pay/BC' }, sk: { S: id } }

const server = await ScriptedDynamoDb.start()
t.teardown(() => server[Symbol.asyncDispose]())

const told: string[] = []
const settings = {
  url: server.url,
  service: 'pay',
  timeoutMs: 10_000,
  onEvent: (kind: string, detail: string) => void told.push(`${kind}: ${detail}`),
  clock: CLOCK,
}
async function opened(t: Test): Promise<Store> {
  server.describesTable()
  const store = await openDynamoDbStore(settings)
  t.teardown(() => store.close())
  server.taken()
  return store
}

/** The attributes of a record that do not depend on when it is written, its payload among them. */
function attributesOf(bytes: Buffer): Wire {
  const { fields, payload } = partsOf(bytes)
  return wire({ ...fields, ...(payload.length === 0 ? {} : { p: { B: payload } }) })
}

/** As it is stored: by default it exists until a millisecond after now. */
function itemOf(bytes: Buffer, over: Wire = {}): Wire {
  return {
    ...KEY,
    ...attributesOf(bytes),
    v: { N: '70' },
    f: { N: '60' },
    c: { N: '50' },
    ...STAMPS,
    x: { N: String(EARLIEST + 1) },
    ...over,
  }
}

const TOKEN = newToken()
const CLAIM = bytesOf('in_progress', TOKEN)

void t.test('who loses a hundred races against other writers gives up', async (t) => {
  const store = await opened(t)
  const given = bytesOf('completed', TOKEN, { fence: 90 })
  server.answer(refusal(itemOf(CLAIM)))
  await t.rejects(async () => store.swap(id, { version: 70 }, given, SPANS, false), {
    name: 'StoreUnavailable',
    maybeApplied: false,
    message: 'DynamoDB: 100 other writes of the same item came first',
  })
  t.equal(server.taken().length, 100)
})

void t.test('a store asks for its table in its region, and closes its connections', async (t) => {
  server.describesTable()
  const store = await openDynamoDbStore(settings)
  t.equal(store.name, 'dynamodb')
  t.strictSame(server.taken(), [['DescribeTable', {}]])
  t.match(server.authorization, '/eu-west-3/dynamodb/')
  t.ok((await server.connections()) > 0)
  await store.close()
  await until(async () => (await server.connections()) === 0)
})

void t.test('a store does not open on a table that is missing or has another layout', async (t) => {
  for (const [answer, why] of [
    [failure(400, 'ResourceNotFoundException'), 'there is no table mine'],
    [{ Table: {} }, 'it needs another key or index: table mine'],
  ] as const) {
    server.answer(answer)
    await t.rejects(openDynamoDbStore(settings), {
      name: 'StoreUnavailable',
      maybeApplied: false,
      message: `cannot use the DynamoDB store: ${why}; docs/dynamodb.md has the command that creates it`,
    })
    await until(async () => (await server.connections()) === 0)
  }
})

void t.test('a store that cannot describe its table opens, says so, and needs no clock', async (t) => {
  told.length = 0
  server.answer(failure(400, 'AccessDeniedException'))
  const store = await openDynamoDbStore({ ...settings, clock: UNCLEAR })
  t.teardown(() => store.close())
  t.strictSame(told, [
    'connected: table mine',
    'error: DynamoDB, DescribeTable: AccessDeniedException: because',
  ])
  server.describesTable()
  await t.rejects(openDynamoDbStore({ ...settings, clock: UNCLEAR }), { message: 'the time is unknown' })
})

void t.test('without a clock of its own, a store has the time of the replies', async (t) => {
  server.describesTable()
  const { clock: _, ...rest } = settings
  const store = await openDynamoDbStore(rest)
  t.teardown(() => store.close())
  const date = Date.UTC(2020, 10, 22, 10)
  const now = await store.ping()
  t.ok(now > date - 10_000 && now < date + 10_000, `${now}`)
})

const partOf = (asked: Asked): string => {
  const values = asked[1]['ExpressionAttributeValues'] as { ':u': { S: string } }
  return values[':u'].S
}
const idOf = (beginning: string) => beginning.padEnd(43, 'x') as RecordId
const item = (due: number, name: string) => ({ w: { S: `${String(due).padStart(16, '0')} ${idOf(name)}` } })

void t.test('a part of the index is read page by page until there are enough, or no more', async (t) => {
  const store = await opened(t)
  const more = { pk: { S: 'pay/xx' }, sk: { S: 'x' }, u: { S: 'pay/3' }, w: { S: 'x' } }
  const pages = async (limit: number, ...answers: readonly Wire[]) => {
    const left = [...answers]
    server.answer((asked) => (partOf(asked) === 'pay/3' ? (left.shift() ?? { Items: [item(99, 'z')] }) : {}))
    const ids = await store.due(limit)
    const asked = server.taken().filter((one) => partOf(one) === 'pay/3')
    return { ids, starts: asked.map(([, input]) => input['ExclusiveStartKey']) }
  }
  const later = { ...more, w: { S: 'y' } }
  t.strictSame(
    await pages(
      3,
      { Items: [item(1, 'a')], LastEvaluatedKey: more },
      { LastEvaluatedKey: later },
      { Items: [item(2, 'b')] },
    ),
    { ids: ['a', 'b'].map(idOf), starts: [undefined, more, later] },
    'to its end',
  )
  const two = { Items: [item(1, 'a'), item(2, 'b')], LastEvaluatedKey: more }
  t.strictSame(await pages(2, two), { ids: ['a', 'b'].map(idOf), starts: [undefined] }, 'enough')
  t.strictSame(await pages(3, two), { ids: ['a', 'b', 'z'].map(idOf), starts: [undefined, more] })
})

void t.test('takes from one bucket do not meet, and those from others do not wait', async (t) => {
  const store = await opened(t)
  const { promise, resolve } = Promise.withResolvers<void>()
  server.answer(async ([operation, input]) => {
    if (operation === 'GetItem' && JSON.stringify(input).includes('/one')) await promise
    return {}
  })
  const take = (name: string) => store.limits.take(name, { count: 2, per: 1000 }, 1)
  const both = [take('one'), take('one')]
  await take('two')
  t.equal(server.taken().length, 3, 'the second from the first bucket has not asked')
  resolve()
  t.strictSame(await Promise.all(both), [0, 0])
})
