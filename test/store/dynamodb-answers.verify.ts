import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import type { Clock } from '../../src/store/dynamodb/client.ts'
import { partsOf } from '../../src/store/dynamodb/layout.ts'
import { openDynamoDbStore } from '../../src/store/dynamodb/store.ts'
import { encodeDraft } from '../../src/store/record/codec.ts'
import { type Store, StoreUnavailable } from '../../src/store/register.ts'
import {
  type Asked,
  failure,
  refusal,
  ScriptedDynamoDb,
  type Wire,
  wire,
} from '../support/scripted-dynamodb.ts'
import { bytesOf, draft, newToken, response, until } from './fixtures.ts'

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
const MAX = 2 ** 48 - 1
const KIB = 1024

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

/** A record whose payload has so many bytes. */
function sized(payload: number, token = newToken()): Buffer {
  const bytes = encodeDraft(
    draft('completed', token, { result: response(Buffer.alloc(payload - 71, 'abc')) }),
  )
  if (partsOf(bytes).payload.length !== payload)
    throw new Error('the codec has changed: subtract something else')
  return bytes
}

const TOKEN = newToken()
const CLAIM = bytesOf('in_progress', TOKEN)
const DONE = bytesOf('completed', TOKEN)

void t.test('a claim after remains exceeds their version and their fence', async (t) => {
  const store = await opened(t)
  for (const [v, f, now] of [
    [LATEST - 2, LATEST - 3, LATEST],
    [LATEST, 7, LATEST + 1],
    [7, LATEST, LATEST + 1],
    [LATEST + 4, LATEST + 9, LATEST + 10],
    [LATEST + 9, LATEST + 4, LATEST + 10],
    [MAX - SPANS.dropIn - 1, 7, MAX - SPANS.dropIn],
    [7, MAX - SPANS.dropIn - 1, MAX - SPANS.dropIn],
  ] as const) {
    server.answer([refusal({ ...KEY, v: { N: `${v}` }, f: { N: `${f}` }, x: { N: '0' } }), {}])
    t.strictSame(
      await store.put(id, CLAIM, SPANS),
      { done: true, now, stamp: { version: now, fence: now, createdAt: now } },
      `after ${v} and ${f}`,
    )
    const [, [operation, input] = []] = server.taken()
    t.equal(operation, 'PutItem')
    t.match(input, { Item: { v: { N: `${now}` }, d: { N: `${now + 5000}` } } })
    t.match(input, { ExpressionAttributeValues: { ':v': { N: `${now}` }, ':least': { N: `${now}` } } })
  }
  for (const name of ['v', 'f']) {
    const remains = { ...KEY, v: { N: '7' }, f: { N: '7' }, x: { N: '0' } }
    server.answer([refusal({ ...remains, [name]: { N: `${MAX - SPANS.dropIn}` } }), {}])
    await t.rejects(async () => store.put(id, CLAIM, SPANS), { name: 'CorruptRecord' }, name)
  }
})

void t.test('a payload is in the item up to 700 bytes, and in chunks of 390 KiB above', async (t) => {
  const store = await opened(t)
  server.answer({})
  await store.put(id, sized(700), SPANS)
  const [[, { Item: inline }], ...none] = server.taken() as [Asked]
  t.same(none, [])
  t.ok('p' in (inline as Wire) && !('q' in (inline as Wire)))
  const names = new Set<string>()
  for (const [length, sizes] of [
    [701, [701]],
    [390 * KIB, [390 * KIB]],
    [390 * KIB + 1, [390 * KIB, 1]],
    [780 * KIB + 5, [390 * KIB, 390 * KIB, 5]],
  ] as const) {
    const bytes = sized(length)
    server.answer({})
    await store.put(id, bytes, SPANS)
    const asked = server.taken()
    const [, { Item: record, ...more }] = asked.at(-1) as Asked
    t.ok('ConditionExpression' in more, 'the record comes last')
    const { q, k, p } = record as { q: { S: string }; k: Wire; p?: Wire }
    t.match(q.S, /^[\w-]{12}$/)
    names.add(q.S)
    t.strictSame([k, p], [{ N: String(sizes.length) }, undefined])
    const chunks = new Map(
      asked.slice(0, -1).map(([operation, { Item, ...rest }]) => {
        const { p, e, pk, sk } = Item as { p: { B: string }; e: Wire; pk: { S: string }; sk: Wire }
        t.strictSame([operation, rest, sk, e], ['PutItem', {}, { S: 'chunk' }, STAMPS.e])
        return [pk.S, Buffer.from(p.B, 'base64')]
      }),
    )
    t.equal(chunks.size, sizes.length)
    const parts = sizes.map((_, n) => chunks.get(`pay/${id}/${q.S}/${n}`) ?? Buffer.alloc(0))
    t.strictSame(
      parts.map((part) => part.length),
      sizes,
    )
    t.ok(Buffer.concat(parts).equals(partsOf(bytes).payload))
  }
  t.equal(names.size, 4, 'under a new name each')
})

void t.test('a record is not written before its chunks are, nor without them', async (t) => {
  const store = await opened(t)
  const writes = [
    () => store.put(id, sized(701), SPANS),
    () => store.swap(id, { version: 7 }, sized(701), SPANS, false),
  ]
  for (const write of writes) {
    server.answer([failure(500, 'InternalServerError')])
    await t.rejects(async () => write(), {
      name: 'StoreUnavailable',
      maybeApplied: false,
      message: /InternalServerError: because/,
      cause: { name: 'StoreUnavailable', maybeApplied: true },
    })
    t.equal(server.taken().length, 1)
    const { promise, resolve } = Promise.withResolvers<void>()
    server.answer(async ([operation, input]) => {
      if (operation !== 'GetItem' && !('ConditionExpression' in input)) await promise
      return { Attributes: itemOf(CLAIM) }
    })
    const written = write()
    const asked: Asked[] = []
    await until(() => asked.push(...server.taken()) > 0)
    await store.ping()
    t.strictSame(
      server.taken().map(([operation]) => operation),
      ['GetItem'],
    )
    resolve()
    t.match(await written, { done: true })
  }
})

const CHUNKS = { q: { S: 'old' }, k: { N: '2' } }
void t.test('a swap or removal has ended once the chunks of what it replaced are gone', async (t) => {
  const store = await opened(t)
  for (const write of [
    async () => (await store.swap(id, { version: 70 }, DONE, SPANS, false)).done,
    () => store.remove(id, 70),
  ]) {
    const { promise, resolve } = Promise.withResolvers<void>()
    server.answer(async ([operation]) => {
      if (operation === 'UpdateItem') return { Attributes: itemOf(CLAIM, CHUNKS) }
      if (operation === 'DeleteItem') await promise
      return {}
    })
    let isOver = false
    const written = write().finally(() => void (isOver = true))
    const asked: Asked[] = []
    await until(() => isOver || asked.push(...server.taken()) === 3)
    await store.ping()
    t.notOk(isOver)
    resolve()
    t.equal(await written, true)
    // What cannot be deleted expires.
    server.answer(([operation]) =>
      operation === 'UpdateItem'
        ? { Attributes: itemOf(CLAIM, CHUNKS) }
        : failure(500, 'InternalServerError'),
    )
    t.equal(await write(), true)
    // Nor is it known without a number.
    server.answer({ Attributes: itemOf(CLAIM, { ...CHUNKS, k: { N: '10001' } }) })
    t.equal(await write(), true)
    t.equal(server.taken().length, 1)
  }
})

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
      await until(async () => (await server.connections()) === 0)
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

const partOf = (asked: Asked): string => {
  const values = asked[1]['ExpressionAttributeValues'] as { ':u': { S: string } }
  return values[':u'].S
}
const idOf = (beginning: string) => beginning.padEnd(43, 'x') as RecordId
const item = (due: number, name: string) => ({ w: { S: `${String(due).padStart(16, '0')} ${idOf(name)}` } })

void t.test('what is due is asked of each part of the index, and is in order', async (t) => {
  const store = await opened(t)
  const found: Readonly<Record<string, Wire[]>> = {
    'pay/0': [item(5, 'e'), item(7, 'g')],
    'pay/9': [item(1, 'a'), item(6, 'f')],
    'pay/15': [item(3, 'c')],
  }
  server.answer((asked) => ({ Items: found[partOf(asked)] ?? [] }))
  t.strictSame(await store.due(4), ['a', 'c', 'e', 'f'].map(idOf))
  t.strictSame(await store.due(4, 'unresolved'), ['a', 'c', 'e', 'f'].map(idOf))
  t.strictSame(await store.due(9), ['a', 'c', 'e', 'f', 'g'].map(idOf))
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
