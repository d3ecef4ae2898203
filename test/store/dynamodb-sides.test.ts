import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { openDynamoDbStore } from '../../src/store/dynamodb.ts'
import type { Clock } from '../../src/store/dynamodb-client.ts'
import { type Store, StoreUnavailable } from '../../src/store/register.ts'
import { type Asked, failure, refusal, ScriptedDynamoDb, type Wire } from '../support/scripted-dynamodb.ts'

/*
 * What the store asks of DynamoDB beside records, and what it makes of each answer: opening, listings, histories, limits, traits.
 */

const EARLIEST = 1_000_000
const LATEST = 1_000_250
const CLOCK: Clock = { saw: () => {}, earliest: () => EARLIEST, latest: () => LATEST }
const unclear = (): number => {
  throw new StoreUnavailable('the time is unknown', false)
}
const UNCLEAR: Clock = { saw: () => {}, earliest: unclear, latest: unclear }
/** Past all instants. */
const BODIES = 2 ** 48

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
/** No event says when a connection that the other side has closed is gone. */
async function connectionsInTheEnd(): Promise<number> {
  for (let n = 0; n < 200 && (await server.connections()) > 0; n++)
    await new Promise((next) => setTimeout(next, 10))
  return server.connections()
}
const keyOf = (at: number) => String(at).padStart(16, '0')
const idOf = (beginning: string) => beginning.padEnd(43, 'x') as RecordId
const id = idOf('BC')
const KEY = { pk: { S: 'pay/BC' }, sk: { S: id } }

void t.test('a store asks for its table in its region, and closes its connections', async (t) => {
  server.describesTable()
  const store = await openDynamoDbStore(settings)
  t.equal(store.name, 'dynamodb')
  t.strictSame(server.taken(), [['DescribeTable', {}]])
  t.match(server.authorization, '/eu-west-3/dynamodb/')
  t.ok((await server.connections()) > 0)
  await store.close()
  t.equal(await connectionsInTheEnd(), 0)
})

void t.test(
  'a store does not open on a table that is missing or has another layout, and leaves no connection',
  async (t) => {
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
      t.equal(await connectionsInTheEnd(), 0)
    }
  },
)

void t.test(
  'a store that cannot describe its table opens, says so, and needs no clock until then',
  async (t) => {
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
  },
)

void t.test('without a clock of its own, a store has the time of the replies', async (t) => {
  server.describesTable()
  const { clock: _, ...rest } = settings
  const store = await openDynamoDbStore(rest)
  t.teardown(() => store.close())
  const date = Date.UTC(2020, 10, 22, 10)
  const now = await store.ping()
  t.ok(now > date - 10_000 && now < date + 10_000, `${now}`)
})

void t.test('a ping reads, and returns the middle of what the time may be', async (t) => {
  const store = await opened(t)
  server.answer({})
  t.equal(await store.ping(), 1_000_125)
  t.strictSame(server.taken(), [
    ['GetItem', { Key: { pk: { S: 'pay/' }, sk: { S: 'ping' } }, ConsistentRead: true }],
  ])
  server.answer(failure(500, 'InternalServerError'))
  await t.rejects(store.ping(), { name: 'StoreUnavailable' })
})

const partOf = (asked: Asked): string => {
  const values = asked[1]['ExpressionAttributeValues'] as { ':u': { S: string } }
  return values[':u'].S
}
const query = (part: string, first: string, last: string, limit: number): Asked => [
  'Query',
  {
    IndexName: 'unresolved',
    KeyConditionExpression: 'u = :u AND w BETWEEN :first AND :last',
    FilterExpression: 'x > :now',
    ExpressionAttributeValues: {
      ':u': { S: part },
      ':first': { S: first },
      ':last': { S: last },
      ':now': { N: '1000000' },
    },
    Limit: limit,
  },
]
const PARTS = Array.from({ length: 16 }, (_, n) => `pay/${n}`)
const inParts = (asked: readonly Asked[]) =>
  asked.toSorted((a, b) => PARTS.indexOf(partOf(a)) - PARTS.indexOf(partOf(b)))
const item = (due: number, name: string) => ({ w: { S: `${keyOf(due)} ${idOf(name)}` } })

void t.test('what is due is asked of each part of the index, and is in order', async (t) => {
  const store = await opened(t)
  const found: Readonly<Record<string, Wire[]>> = {
    'pay/0': [item(5, 'e'), item(7, 'g')],
    'pay/9': [item(1, 'a'), item(6, 'f')],
    'pay/15': [item(3, 'c')],
  }
  server.answer((asked) => ({ Items: found[partOf(asked)] ?? [] }))
  t.strictSame(await store.due(4), ['a', 'c', 'e', 'f'].map(idOf))
  t.strictSame(
    inParts(server.taken()),
    PARTS.map((part) => query(part, keyOf(0), keyOf(EARLIEST + 1), 4)),
  )
  t.strictSame(await store.due(4, 'unresolved'), ['a', 'c', 'e', 'f'].map(idOf))
  t.strictSame(await store.due(9), ['a', 'c', 'e', 'f', 'g'].map(idOf))
})

void t.test('of responses that have ended, a fraction is asked of each part', async (t) => {
  const store = await opened(t)
  server.answer({})
  t.strictSame(await store.due(1000), [])
  t.strictSame(
    inParts(server.taken()),
    PARTS.map((part) => query(part, keyOf(0), keyOf(EARLIEST + 1), 1000)),
    'of unresolved records, as many as there may be',
  )
  t.strictSame(await store.due(1000, 'bodies'), [])
  const asked = inParts(server.taken())
  const limit = Number(asked[0]?.[1]['Limit'])
  t.ok(limit > 62 && limit < 1000, `${limit} of each`)
  t.strictSame(
    asked,
    PARTS.map((part) => query(part, keyOf(BODIES), keyOf(BODIES + EARLIEST + 1), limit)),
  )
})

void t.test(
  'a part of the index is read page by page until there are enough, or there is no more',
  async (t) => {
    const store = await opened(t)
    const more = { pk: { S: 'pay/xx' }, sk: { S: 'x' }, u: { S: 'pay/3' }, w: { S: 'x' } }
    const pages = async (limit: number, ...answers: readonly Wire[]) => {
      const left = [...answers]
      server.answer((asked) =>
        partOf(asked) === 'pay/3' ? (left.shift() ?? { Items: [item(99, 'z')] }) : {},
      )
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
  },
)

void t.test('unresolved records are listed from their place on', async (t) => {
  const store = await opened(t)
  server.answer((asked) => (partOf(asked) === 'pay/2' ? { Items: [item(5, 'e'), item(6, 'f')] } : {}))
  t.strictSame(await store.list('unresolved', null, 2), {
    ids: ['e', 'f'].map(idOf),
    next: `6 ${idOf('f')}`,
  })
  t.strictSame(
    inParts(server.taken()),
    PARTS.map((part) => query(part, `${keyOf(0)}  `, keyOf(BODIES), 2)),
  )
  t.match(await store.list('unresolved', `6 ${id}`, 3), { next: null })
  t.strictSame(inParts(server.taken())[0], query('pay/0', `${keyOf(6)} ${id} `, keyOf(BODIES), 3))
})

void t.test('all records are scanned, and those with the same beginning queried', async (t) => {
  const store = await opened(t)
  const answer = { Items: [{ sk: { S: idOf('BCa') } }, { sk: { S: idOf('BCb') } }], LastEvaluatedKey: KEY }
  const next = Buffer.from(`pay/BC ${id}`).toString('base64url')
  const common = { ConsistentRead: true, ProjectionExpression: 'sk', Limit: 7 }
  const scan = {
    FilterExpression: 'begins_with(pk, :pk) AND x > :now',
    ExpressionAttributeValues: { ':now': { N: '1000000' }, ':pk': { S: 'pay/' } },
    ...common,
  }
  const beginning = {
    KeyConditionExpression: 'pk = :pk AND begins_with(sk, :sk)',
    FilterExpression: 'x > :now',
    ExpressionAttributeValues: { ':now': { N: '1000000' }, ':pk': { S: 'pay/BC' }, ':sk': { S: 'BCDE' } },
    ...common,
  }
  for (const [which, operation, input] of [
    ['all', 'Scan', scan],
    [{ beginning: 'BCDE' }, 'Query', beginning],
  ] as const) {
    server.answer([answer, {}])
    t.strictSame(await store.list(which, null, 7), { ids: ['BCa', 'BCb'].map(idOf), next })
    t.strictSame(await store.list(which, next, 7), { ids: [], next: null })
    t.strictSame(
      sorted(server.taken()),
      sorted([
        [operation, input],
        [operation, { ...input, ExclusiveStartKey: KEY }],
      ]),
    )
  }
})

/** Whatever the order of their members. */
function sorted(asked: readonly Asked[]): unknown {
  return asked.map(([operation, input]) => [
    operation,
    Object.entries(input).toSorted(([a], [b]) => (a < b ? -1 : 1)),
  ])
}

const RECORD = { ...KEY, c: { N: '50' }, x: { N: `${EARLIEST + 1}` } }
const NOTE = { tag: 'a', count: 2, firstAgo: 300, lastAgo: 100, text: 'some text' }
const LINE = 'a 2 999700 999900 some text'

void t.test('notes are appended to those of the same record', async (t) => {
  const store = await opened(t)
  const append = () => store.history.append(id, [NOTE])
  const written = (lines: string, condition: string, more: Wire): Asked => [
    'UpdateItem',
    {
      Key: KEY,
      ReturnValuesOnConditionCheckFailure: 'ALL_OLD',
      UpdateExpression: 'SET h = :h',
      ConditionExpression: condition,
      ExpressionAttributeValues: { ':was': { N: '50' }, ...more, ':h': { S: lines } },
      ReturnValues: 'ALL_OLD',
    },
  ]
  const read: Asked = ['GetItem', { Key: KEY, ConsistentRead: true }]
  server.answer([{ Item: RECORD }, {}])
  t.equal(await append(), true)
  const first = written(LINE, 'c = :was AND attribute_not_exists(h)', {})
  t.strictSame(server.taken(), [read, first])
  const h = { S: 'b 1 7 7 before' }
  server.answer([{ Item: { ...RECORD, h } }, {}])
  t.equal(await append(), true)
  const second = written(`${h.S}\n${LINE}`, 'c = :was AND h = :before', { ':before': h })
  t.strictSame(server.taken(), [read, second])
  server.answer([{ Item: RECORD }, refusal({ ...RECORD, h }), {}])
  t.equal(await append(), true)
  t.strictSame(server.taken(), [read, first, second], 'after another writer')
  for (const answer of [{}, { Item: { ...RECORD, x: { N: `${EARLIEST}` } } }]) {
    server.answer([answer])
    t.equal(await append(), false)
    t.strictSame(server.taken(), [read])
    server.answer([answer])
    t.strictSame(await store.history.read(id), [])
  }
  server.answer([{ Item: { ...RECORD, h: { S: `${h.S}\n${LINE}` } } }])
  t.strictSame(await store.history.read(id), [
    { tag: 'b', count: 1, first: 7, last: 7, text: 'before' },
    { tag: 'a', count: 2, first: 999_700, last: 999_900, text: 'some text' },
  ])
  t.strictSame(server.taken(), [read])
})

void t.test('a bucket is written only if it is as it was read', async (t) => {
  const store = await opened(t)
  const Key = { pk: { S: 'pay/rate' }, sk: { S: 'bucket' } }
  const read: Asked = ['GetItem', { Key, ConsistentRead: true }]
  const fast = { ReturnValuesOnConditionCheckFailure: 'ALL_OLD' }
  const take = (units: 1 | -1) => store.limits.take('rate', { count: 2, per: 1000 }, units)
  const bucket = (debt: number) => ({ a: { N: '1000000' }, t: { N: `${debt}` }, r: { N: '2' } })
  const unchanged = (debt: number) => {
    const { a, t, r } = bucket(debt)
    return {
      ConditionExpression: 'a = :a AND t = :t AND r = :r',
      ExpressionAttributeValues: { ':a': a, ':t': t, ':r': r },
    }
  }
  const put = (debt: number, e: number, condition: Wire): Asked => [
    'PutItem',
    { ...fast, Item: { ...Key, ...bucket(debt), e: { N: `${e}` } }, ...condition },
  ]
  server.answer([{}, {}])
  t.equal(await take(1), 0)
  const first = put(1000, 4601, { ConditionExpression: 'attribute_not_exists(a)' })
  t.strictSame(server.taken(), [read, first], 'the first')
  server.answer([{ Item: bucket(1000) }, {}])
  t.equal(await take(1), 0)
  t.strictSame(server.taken(), [read, put(2000, 4601, unchanged(1000))], 'the second')
  server.answer([{ Item: bucket(2000) }])
  t.equal(await take(1), 500)
  t.strictSame(server.taken(), [read], 'none is left')
  server.answer([{ Item: bucket(1001) }])
  t.equal(await take(1), 1)
  t.strictSame(server.taken(), [read], 'half a millisecond is one')
  server.answer([{ Item: bucket(2000) }, {}])
  t.equal(await take(-1), 0)
  t.strictSame(server.taken(), [read, put(1000, 4601, unchanged(2000))], 'one is given back')
  server.answer([{ Item: bucket(1000) }, {}])
  t.equal(await take(-1), 0)
  t.strictSame(server.taken(), [read, ['DeleteItem', { Key, ...fast, ...unchanged(1000) }]], 'all are')
  server.answer([{}])
  t.equal(await take(-1), 0)
  t.strictSame(server.taken(), [read], 'none was taken')
  server.answer([{}, refusal(bucket(1000)), {}])
  t.equal(await take(1), 0)
  t.strictSame(server.taken(), [read, first, put(2000, 4601, unchanged(1000))], 'after another replica')
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

void t.test('traits are of the table and of its time to live', async (t) => {
  const store = await opened(t)
  const table = (ttl: Wire) => {
    server.answer(([operation]) => (operation === 'DescribeTable' ? { Table: { Replicas: [{}] } } : ttl))
    return store.traits()
  }
  const on = { TimeToLiveDescription: { TimeToLiveStatus: 'ENABLED', AttributeName: 'e' } }
  const unfit = await table(on)
  t.equal(unfit.evicts, true)
  t.equal(unfit.findings.length, 1)
  t.strictSame(server.taken(), [
    ['DescribeTable', {}],
    ['DescribeTimeToLive', {}],
  ])
  t.match((await table({})).findings[1], /^Time to live is off/)
})
