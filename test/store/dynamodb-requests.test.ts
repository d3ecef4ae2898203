import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { encodeDraft, readStamps } from '../../src/store/codec.ts'
import { openDynamoDbStore } from '../../src/store/dynamodb.ts'
import type { Clock } from '../../src/store/dynamodb-client.ts'
import { partsOf } from '../../src/store/dynamodb-layout.ts'
import type { Condition, Store } from '../../src/store/register.ts'
import {
  type Answer,
  type Asked,
  failure,
  refusal,
  type Script,
  ScriptedDynamoDb,
  type Wire,
  wire,
} from '../support/scripted-dynamodb.ts'
import { bytesOf, draft, newToken, response, until } from './fixtures.ts'

/*
 * What the store asks of DynamoDB for each operation on a record, and what it makes of each answer.
 */

const EARLIEST = 1_000_000
const LATEST = 1_000_250
const CLOCK: Clock = { saw: () => {}, earliest: () => EARLIEST, latest: () => LATEST }
const SPANS = { dueIn: 5000, dropIn: 20_000 }
const STAMPS = { m: { N: '1000250' }, d: { N: '1005250' }, x: { N: '1020250' }, e: { N: '4621' } }
const MAX = 2 ** 48 - 1
const KIB = 1024

const id = `BC${'x'.repeat(41)}` as RecordId
const KEY = { pk: { S: 'pay/BC' }, sk: { S: id } }
/** `B`, 66, of sixteen parts. */
const PLACE = { u: { S: 'pay/2' }, w: { S: `0000000001005250 ${id}` } }
const READ: Asked = ['GetItem', { Key: KEY, ConsistentRead: true }]

const server = await ScriptedDynamoDb.start()
t.teardown(() => server[Symbol.asyncDispose]())

async function opened(t: Test): Promise<Store> {
  server.describesTable()
  const store = await openDynamoDbStore({
    url: server.url,
    service: 'pay',
    timeoutMs: 10_000,
    onEvent: () => {},
    clock: CLOCK,
  })
  t.teardown(() => store.close())
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

/** Without what the store stamps. */
function unstamped(bytes: Buffer | null): unknown {
  return bytes === null ? null : attributesOf(bytes)
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

/** The nth of the requests, which are forgotten then. */
function taken(n: number): Asked {
  const asked = server.taken()[n]
  if (asked === undefined) throw new Error('there was no such request')
  return asked
}

async function failureOf(asked: unknown): Promise<unknown> {
  try {
    return `none, but ${JSON.stringify(await asked)}`
  } catch (error) {
    return error
  }
}

const TOKEN = newToken()
const CLAIM = bytesOf('in_progress', TOKEN)
const DONE = bytesOf('completed', TOKEN)

void t.test('a record is read from its item, if that has not dropped', async (t) => {
  const store = await opened(t)
  server.answer({ Item: itemOf(DONE) })
  const { now, bytes } = await store.get(id)
  t.equal(now, EARLIEST)
  t.strictSame(unstamped(bytes), attributesOf(DONE))
  t.strictSame(readStamps(bytes as Buffer), {
    version: 70,
    fence: 60,
    createdAt: 50,
    updatedAt: 1_000_250,
    due: 1_005_250,
    dropAt: EARLIEST + 1,
  })
  t.strictSame(server.taken(), [READ])
  for (const answer of [{}, { Item: itemOf(DONE, { x: { N: String(EARLIEST) } }) }]) {
    server.answer(answer)
    t.strictSame(await store.get(id), { now: EARLIEST, bytes: null })
    t.strictSame(await store.stored?.(id), { now: EARLIEST, bytes: null })
    t.strictSame(server.taken(), [READ, READ])
  }
})

/** The item of a record whose payload is in chunks. */
const chunked = (name: string, count: number) => itemOf(CLAIM, { q: { S: name }, k: { N: String(count) } })
const chunkKey = (name: string, n: number) => ({ pk: { S: `pay/${id}/${name}/${n}` }, sk: { S: 'chunk' } })
const isChunk = ([, { Key }]: Asked) => JSON.stringify(Key).includes('"chunk"')

void t.test('the chunks of a record are read in their order', async (t) => {
  const store = await opened(t)
  server.answer(([, { Key }]) => {
    const n = [0, 1, 2].find((n) => JSON.stringify(Key) === JSON.stringify(chunkKey('name', n)))
    return {
      Item: n === undefined ? chunked('name', 3) : { p: { B: Buffer.from(`part ${n};`).toString('base64') } },
    }
  })
  const { bytes } = await store.get(id)
  t.equal(partsOf(bytes as Buffer).payload.toString(), 'part 0;part 1;part 2;')
  const [first, ...rest] = server.taken()
  t.strictSame(first, READ)
  t.strictSame(
    new Set(rest.map(([operation, input]) => JSON.stringify([operation, input]))),
    new Set(
      [0, 1, 2].map((n) => JSON.stringify(['GetItem', { Key: chunkKey('name', n), ConsistentRead: true }])),
    ),
  )
  t.equal(rest.length, 3)
  t.strictSame(unstamped((await store.stored?.(id))?.bytes ?? null), attributesOf(CLAIM))
  t.equal(server.taken().length, 1, 'its head is not in them')
})

void t.test('where a chunk is gone, the record has been replaced, or is corrupt', async (t) => {
  const store = await opened(t)
  const reading = (later: Wire) => {
    let reads = 0
    server.answer((asked) => {
      if (isChunk(asked)) return JSON.stringify(asked).includes('/0"') ? { Item: { p: { B: 'eA==' } } } : {}
      return reads++ === 0 ? { Item: chunked('old', 2) } : later
    })
    return store.get(id)
  }
  t.strictSame(unstamped((await reading({ Item: itemOf(DONE) })).bytes), attributesOf(DONE))
  t.strictSame(
    server.taken().filter((asked) => !isChunk(asked)),
    [READ, READ],
  )
  t.equal((await reading({})).bytes, null)
  const { bytes } = await reading({ Item: chunked('new', 1) })
  t.equal(partsOf(bytes as Buffer).payload.toString(), 'x')
  t.match(await failureOf(reading({ Item: chunked('old', 2) })), {
    name: 'CorruptRecord',
    message: 'DynamoDB has lost a part of the stored response',
  })
})

void t.test('a claim is one conditional write of the whole item', async (t) => {
  const store = await opened(t)
  server.answer({})
  t.strictSame(await store.put(id, CLAIM, SPANS), {
    done: true,
    now: LATEST,
    stamp: { version: LATEST, fence: LATEST, createdAt: LATEST },
  })
  t.strictSame(server.taken(), [
    [
      'PutItem',
      {
        ReturnValuesOnConditionCheckFailure: 'ALL_OLD',
        Item: {
          ...KEY,
          ...attributesOf(CLAIM),
          ...STAMPS,
          v: { N: '1000250' },
          f: { N: '1000250' },
          ...PLACE,
          c: { N: '1000250' },
        },
        ConditionExpression: 'attribute_not_exists(v) OR (x <= :now AND v < :v AND f < :least)',
        ExpressionAttributeValues: {
          ':now': { N: '1000000' },
          ':v': { N: '1000250' },
          ':least': { N: '1000250' },
        },
      },
    ],
  ])
})

void t.test(
  'a record with a given fence may follow remains with any fence, and has no place if it has ended',
  async (t) => {
    const store = await opened(t)
    const given = bytesOf('completed', TOKEN, { fence: 9, createdAt: 7 })
    server.answer({})
    t.match(await store.put(id, given, SPANS), {
      done: true,
      stamp: { version: LATEST, fence: 9, createdAt: 7 },
    })
    const [[operation, input] = []] = server.taken()
    t.equal(operation, 'PutItem')
    t.strictSame(input?.['ExpressionAttributeValues'], {
      ':now': { N: '1000000' },
      ':v': { N: '1000250' },
      ':least': { N: '9007199254740991' },
    })
    t.strictSame(input?.['Item'], {
      ...KEY,
      ...attributesOf(given),
      ...STAMPS,
      v: { N: '1000250' },
      f: { N: '9' },
      c: { N: '7' },
    })
  },
)

void t.test('a claim that is refused returns the record that exists', async (t) => {
  const store = await opened(t)
  server.answer([refusal(itemOf(DONE))])
  const put = await store.put(id, CLAIM, SPANS)
  t.match(put, { done: false, now: EARLIEST })
  t.strictSame(put.done ? null : unstamped(put.bytes), attributesOf(DONE))
  t.equal(server.taken().length, 1)
  // An emulator does not return it.
  server.answer([refusal(null), { Item: itemOf(DONE) }])
  const read = await store.put(id, CLAIM, SPANS)
  t.strictSame(read.done ? null : unstamped(read.bytes), attributesOf(DONE))
  t.strictSame(server.taken()[1], READ)
})

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
    t.match(await failureOf(store.put(id, CLAIM, SPANS)), { name: 'CorruptRecord' }, name)
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
    t.match(await failureOf(write()), {
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
const FORGOTTEN = [0, 1].map((n) => ['DeleteItem', { Key: chunkKey('old', n) }])

void t.test('a swap is one conditional write, which returns what it has replaced', async (t) => {
  const store = await opened(t)
  const given = bytesOf('completed', TOKEN, { fence: 9 })
  const { n, s, o, b, p } = attributesOf(given)
  const set = { ':n': n, ':s': s, ':o': o, ':b': b, ':p': p }
  const stamps = Object.fromEntries(Object.entries(STAMPS).map(([name, value]) => [`:${name}`, value]))
  const swap = (condition: Condition, nextFence: boolean) => {
    server.answer(([operation]) => (operation === 'UpdateItem' ? { Attributes: itemOf(CLAIM, CHUNKS) } : {}))
    return store.swap(id, condition, given, SPANS, nextFence)
  }
  t.strictSame(await swap({ version: 70 }, false), {
    done: true,
    now: LATEST,
    stamp: { version: 71, fence: 60, createdAt: 50 },
  })
  const [update, ...forgotten] = server.taken()
  t.strictSame(update, [
    'UpdateItem',
    {
      Key: KEY,
      ReturnValuesOnConditionCheckFailure: 'ALL_OLD',
      UpdateExpression:
        'SET v = v + :one, f = f + :step, n = :n, s = :s, o = :o, b = :b, p = :p, m = :m, d = :d, x = :x, e = :e REMOVE q, k, u, w',
      ConditionExpression: 'v = :was AND n = :schema AND x > :now AND f >= :least',
      ExpressionAttributeValues: {
        ':now': { N: '1000000' },
        ':was': { N: '70' },
        ':one': { N: '1' },
        ':step': { N: '0' },
        ':least': { N: '9' },
        ':schema': { N: '1' },
        ...set,
        ...stamps,
      },
      ReturnValues: 'ALL_OLD',
    },
  ])
  t.strictSame(
    new Set(forgotten.map((one) => JSON.stringify(one))),
    new Set(FORGOTTEN.map((one) => JSON.stringify(one))),
  )
  t.equal(forgotten.length, 2)

  t.match(await swap({ token: TOKEN, states: ['in_progress'] }, true), {
    done: true,
    stamp: { version: 71, fence: 61, createdAt: 50 },
  })
  const [, input] = taken(0)
  t.equal(
    input['ConditionExpression'],
    'o = :owner AND s IN (:none, :s0) AND n = :schema AND x > :now AND f >= :least',
  )
  t.strictSame(input['ExpressionAttributeValues'], {
    ':now': { N: '1000000' },
    ':owner': { B: TOKEN.toString('base64') },
    ':none': { N: '0' },
    ':s0': { N: '1' },
    ':one': { N: '1' },
    ':step': { N: '1' },
    ':least': { N: '8' },
    ':schema': { N: '1' },
    ...set,
    ...stamps,
  })
})

void t.test('a swap gives an unresolved record a place', async (t) => {
  const store = await opened(t)
  server.answer({ Attributes: itemOf(CLAIM) })
  await store.swap(id, { version: 70 }, bytesOf('unknown', TOKEN), SPANS, false)
  const [, { UpdateExpression, ExpressionAttributeValues }] = taken(0)
  t.match(UpdateExpression, /, u = :u, w = :w REMOVE p, q, k$/)
  t.match(ExpressionAttributeValues, { ':u': PLACE.u, ':w': PLACE.w })
})

void t.test('a swap that is refused returns what exists', async (t) => {
  const store = await opened(t)
  const swap = (...answers: Answer[]) => {
    server.answer(answers)
    return store.swap(id, { version: 71 }, DONE, SPANS, false)
  }
  const refused = await swap(refusal(itemOf(CLAIM)))
  t.match(refused, { done: false, now: EARLIEST })
  t.strictSame(refused.done ? null : unstamped(refused.bytes), attributesOf(CLAIM))
  t.equal(server.taken().length, 1)
  t.strictSame(await swap(refusal(itemOf(CLAIM, { x: { N: `${EARLIEST}` }, v: { N: '71' } }))), {
    done: false,
    now: EARLIEST,
    bytes: null,
  })
  t.strictSame(await swap(refusal(null), {}), { done: false, now: EARLIEST, bytes: null })
  t.strictSame(server.taken()[1], READ)
})

void t.test('a swap whose fence is above that of the record writes it on what it has found', async (t) => {
  const store = await opened(t)
  const given = bytesOf('completed', TOKEN, { fence: 90 })
  server.answer([refusal(itemOf(CLAIM)), { Attributes: itemOf(CLAIM) }])
  t.strictSame(await store.swap(id, { version: 70 }, given, SPANS, true), {
    done: true,
    now: LATEST,
    stamp: { version: 71, fence: 90, createdAt: 50 },
  })
  const [operation, input] = taken(1)
  t.equal(operation, 'UpdateItem')
  t.equal(
    input['UpdateExpression'],
    'SET n = :n, s = :s, o = :o, b = :b, p = :p, m = :m, d = :d, x = :x, e = :e, v = :v, f = :f REMOVE q, k, u, w',
  )
  t.equal(input['ConditionExpression'], 'v = :was AND x > :now')
  t.match(input['ExpressionAttributeValues'], {
    ':now': { N: '1000000' },
    ':was': { N: '70' },
    ':v': { N: '71' },
    ':f': { N: '90' },
  })
})

void t.test('a swap that does not learn what it has replaced may have been made', async (t) => {
  const store = await opened(t)
  server.answer({})
  t.match(await failureOf(store.swap(id, { version: 70 }, DONE, SPANS, false)), {
    name: 'StoreUnavailable',
    maybeApplied: true,
    message: /does not say what it has replaced/,
  })
})

void t.test('a write that fails is not sent again, nor is its record read', async (t) => {
  const store = await opened(t)
  for (const write of [
    () => store.put(id, CLAIM, SPANS),
    () => store.swap(id, { version: 70 }, DONE, SPANS, false),
    () => store.remove(id, 70),
  ]) {
    server.answer(failure(500, 'InternalServerError'))
    t.match(await failureOf(write()), { name: 'StoreUnavailable', maybeApplied: true })
    t.equal(server.taken().length, 1)
  }
})

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

void t.test('a removal leaves the version and the fence, and is one conditional write', async (t) => {
  const store = await opened(t)
  server.answer({ Attributes: itemOf(DONE) })
  t.equal(await store.remove(id, 70), true)
  t.strictSame(server.taken(), [
    [
      'UpdateItem',
      {
        Key: KEY,
        ReturnValuesOnConditionCheckFailure: 'ALL_OLD',
        UpdateExpression: 'SET x = :x, e = :e REMOVE b, p, q, k, u, w, c, m, d, n, s, o, h',
        ConditionExpression: 'v = :was AND x > :now',
        ExpressionAttributeValues: {
          ':was': { N: '70' },
          ':now': { N: '1000000' },
          ':x': { N: '0' },
          ':e': { N: '4601' },
        },
        ReturnValues: 'ALL_OLD',
      },
    ],
  ])
  server.answer({})
  t.equal(await store.remove(id, 70), true)
  server.answer([refusal(itemOf(DONE))])
  t.equal(await store.remove(id, 70), false)
})

void t.test('a renewal reads the record, and writes it if it is still the owner’s', async (t) => {
  const store = await opened(t)
  const renew = () => store.renew([{ id, token: TOKEN, dueIn: 7000, dropIn: 30_000 }])
  const { n, s, o, b } = attributesOf(CLAIM)
  server.answer([{ Item: itemOf(CLAIM) }, {}])
  t.strictSame(await renew(), [true])
  const written = (was: number): Asked => [
    'UpdateItem',
    {
      Key: KEY,
      ReturnValuesOnConditionCheckFailure: 'ALL_OLD',
      UpdateExpression:
        'SET n = :n, s = :s, o = :o, b = :b, m = :m, d = :d, x = :x, e = :e, v = :v, f = :f, u = :u, w = :w',
      ConditionExpression: 'v = :was',
      ExpressionAttributeValues: {
        ':was': { N: `${was}` },
        ':n': n,
        ':s': s,
        ':o': o,
        ':b': b,
        ':m': STAMPS.m,
        ':d': { N: '1007250' },
        ':x': { N: '1030250' },
        ':e': { N: '4631' },
        ':v': { N: `${was + 1}` },
        ':f': { N: '60' },
        ':u': PLACE.u,
        ':w': { S: `0000000001007250 ${id}` },
      },
      ReturnValues: 'ALL_OLD',
    },
  ]
  t.strictSame(server.taken(), [READ, written(70)])
  server.answer([{ Item: itemOf(CLAIM) }, refusal(itemOf(CLAIM, { v: { N: '75' } })), {}])
  t.strictSame(await renew(), [true], 'after another write')
  t.strictSame(server.taken(), [READ, written(70), written(75)])
  for (const answer of [
    {},
    { Item: itemOf(CLAIM, { x: { N: `${EARLIEST}` } }) },
    { Item: itemOf(bytesOf('in_progress', newToken())) },
    { Item: itemOf(DONE) },
  ]) {
    server.answer([answer])
    t.strictSame(await renew(), [false])
    t.strictSame(server.taken(), [READ])
  }
})

void t.test('a renewal that fails does not fail the others', async (t) => {
  const store = await opened(t)
  const other = `BD${'x'.repeat(41)}` as RecordId
  const renewals = [id, other].map((one) => ({ id: one, token: TOKEN, ...SPANS }))
  server.answer(([operation, { Key }]) => {
    if (operation === 'GetItem') return { Item: itemOf(CLAIM) }
    return JSON.stringify(Key).includes(id) ? failure(400, 'ThrottlingException') : {}
  })
  t.strictSame(await store.renew(renewals), [false, true])
})

void t.test(
  'whoever watches a record hears of each write that ends an attempt, and of no other',
  async (t) => {
    const store = await opened(t)
    const heard: string[] = []
    let doing = ''
    await store.watch(id, () => void heard.push(doing))
    const told = async (what: string, script: Script, write: () => unknown) => {
      doing = what
      server.answer(script)
      await write()
      await store.ping().catch(() => {})
    }
    const put = (bytes: Buffer) => () => store.put(id, bytes, SPANS)
    const swap = (bytes: Buffer) => () => store.swap(id, { version: 71 }, bytes, SPANS, false)
    const replaced = { Attributes: itemOf(CLAIM) }
    await told('put a claim', {}, put(CLAIM))
    await told('put an end', {}, put(DONE))
    await told('put refused', [refusal(itemOf(CLAIM))], put(DONE))
    await told('swap for a claim', replaced, swap(CLAIM))
    await told('swap for an end', replaced, swap(DONE))
    await told('swap refused', [refusal(itemOf(CLAIM))], swap(DONE))
    await told('removal', replaced, () => store.remove(id, 70))
    await told('removal refused', [refusal(null), {}], () => store.remove(id, 70))
    t.strictSame(heard, ['put an end', 'swap for an end', 'removal'])
  },
)

void t.test('who loses a hundred races against other writers gives up', async (t) => {
  const store = await opened(t)
  const given = bytesOf('completed', TOKEN, { fence: 90 })
  server.answer(refusal(itemOf(CLAIM)))
  t.match(await failureOf(store.swap(id, { version: 70 }, given, SPANS, false)), {
    name: 'StoreUnavailable',
    maybeApplied: false,
    message: 'DynamoDB: 100 other writes of the same item came first',
  })
  t.equal(server.taken().length, 100)
})
