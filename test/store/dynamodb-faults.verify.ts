import { randomBytes } from 'node:crypto'
import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { type Clock, ServerClock } from '../../src/store/dynamodb/client.ts'
import { type DynamoDbOptions, openDynamoDbStore } from '../../src/store/dynamodb/store.ts'
import { decodeRecord, encodeDraft, readStamps } from '../../src/store/record/codec.ts'
import { Records } from '../../src/store/records.ts'
import { type Store, StoreUnavailable } from '../../src/store/register.ts'
import { type Asked, DynamoDbServer, type Fault } from '../support/dynamodb.ts'
import { freePort } from '../support/redis.ts'
import { bytesOf, draft, HOUR, MINUTE, newId, newToken, response, SPANS, until } from './fixtures.ts'

/* An emulator of DynamoDB with faults, and with answers of the test's own. */

t.setTimeout(300_000)

const server = await DynamoDbServer.start()
t.teardown(() => server[Symbol.asyncDispose]())
const shifted = (by: number, doubt = 0): Clock => ({
  saw: () => {},
  earliest: () => Date.now() + by - doubt,
  latest: () => Date.now() + by + doubt,
})
const settings: DynamoDbOptions = {
  url: server.url,
  service: 'pay',
  timeoutMs: 10_000,
  onEvent: () => {},
  clock: shifted(0),
}
async function opened(t: Test, over: Partial<DynamoDbOptions> = {}): Promise<Store> {
  server.fault = () => null
  server.tellsItem = true
  server.asked.length = 0
  const store = await openDynamoDbStore({ ...settings, ...over })
  t.teardown(() => store.close())
  return store
}
const on =
  (operation: string, fault: Fault) =>
  (asked: Asked): Fault | null =>
    asked.operation === operation ? fault : null
/** Only the first time. */
const once = (operation: string, fault: Fault | (() => Promise<void>)) => {
  let isOver = false
  return async (asked: Asked): Promise<Fault | null> => {
    if (isOver || asked.operation !== operation) return null
    isOver = true
    if (typeof fault !== 'function') return fault
    await fault()
    return null
  }
}
const BODY = randomBytes(900 * 1024)
const completed = (token: Buffer, body = BODY) =>
  encodeDraft(draft('completed', token, { result: response(body) }))
const claimed = async (store: Store, id: RecordId, token: Buffer) =>
  store.put(id, bytesOf('in_progress', token), SPANS)
const own = (token: Buffer) => ({ token, states: ['in_progress'] }) as const
const items = async (): Promise<{ pk: { S: string }; sk: { S: string }; e?: { N: string } }[]> => {
  const found: { pk: { S: string }; sk: { S: string } }[] = []
  let from: object = {}
  do {
    const { Items, LastEvaluatedKey } = await server.run('Scan', { TableName: 'records', ...from })
    found.push(...(Items as typeof found))
    from = LastEvaluatedKey === undefined ? {} : { ExclusiveStartKey: LastEvaluatedKey }
  } while ('ExclusiveStartKey' in from)
  return found
}
const chunks = async (): Promise<string[]> =>
  (await items()).filter(({ sk }) => sk.S === 'chunk').map(({ pk }) => pk.S)

void t.test('it starts without DynamoDB, and reports it', async (t) => {
  const told: string[] = []
  const onEvent = (kind: string) => void told.push(kind)
  const url = `dynamodb://records?region=eu-central-1&endpoint=http://127.0.0.1:${await freePort()}`
  const store = await opened(t, { url, onEvent, clock: new ServerClock() })
  t.same(told, ['error'])
  await t.rejects(store.get(newId()), { name: 'StoreUnavailable', maybeApplied: false })
  await t.rejects(claimed(store, newId(), newToken()), { message: /time of the DynamoDB store is unknown/ })
})

void t.test('a connection that is cut, or never answers, may have applied the operation', async (t) => {
  const [store, hasty] = [await opened(t), await opened(t, { timeoutMs: 200 })]
  for (const [asked, fault] of [
    [store, { cut: 'before' }],
    [store, { cut: 'after' }],
    [hasty, { silent: true }],
  ] as const) {
    server.fault = on('PutItem', fault)
    server.asked.length = 0
    const put = claimed(asked, newId(), newToken())
    await t.rejects(put, { name: 'StoreUnavailable', maybeApplied: true }, JSON.stringify(fault))
    t.ok(server.asked.length <= 1, 'nothing is sent again')
  }
  server.fault = () => null
  t.ok((await claimed(store, newId(), newToken())).done)
})

void t.test('a claim whose reply was lost is recognised, if need be by reading it', async (t) => {
  const store = await opened(t)
  const id = newId()
  const claim = draft('in_progress', newToken())
  server.fault = once('PutItem', { cut: 'after' })
  t.match(await new Records(store).claim(id, claim, SPANS), { kind: 'unavailable' })
  for (const tellsItem of [true, false]) {
    server.tellsItem = tellsItem
    server.asked.length = 0
    t.match(await new Records(store).claim(id, claim, SPANS), { kind: 'claimed', recognised: true })
    const operations = server.asked.map(({ operation }) => operation)
    t.same(
      operations,
      tellsItem ? ['PutItem'] : ['PutItem', 'GetItem'],
      'one round trip if the refusal has the item',
    )
    const other = bytesOf('completed', newToken())
    t.match(await store.swap(id, own(newToken()), other, SPANS, false), { done: false })
    t.match(await store.swap(newId(), { version: 1 }, other, SPANS, false), { done: false, bytes: null })
  }
  server.asked.length = 0
  t.ok((await store.swap(id, own(claim.token), bytesOf('completed', claim.token), SPANS, false)).done)
  t.same(
    server.asked.map(({ operation }) => operation),
    ['UpdateItem'],
    'a completion takes one',
  )
})

void t.test('the parts of a long answer are written before their record, and removed with it', async (t) => {
  const store = await opened(t)
  await server.empty()
  const id = newId()
  const token = newToken()
  await claimed(store, id, token)
  const before = (await store.get(id)).bytes as Buffer
  const swap = async (by = token) => store.swap(id, own(by), completed(by), SPANS, false)

  server.fault = once('PutItem', { status: 500, error: 'InternalServerError' })
  await t.rejects(swap(), { name: 'StoreUnavailable', maybeApplied: false })
  server.fault = on('UpdateItem', { cut: 'before' })
  await t.rejects(swap(), { name: 'StoreUnavailable', maybeApplied: true })
  server.fault = () => null
  t.match(await swap(newToken()), { done: false })
  t.ok((await store.get(id)).bytes?.equals(before), 'a crash in between, and a loser, change nothing')
  const orphans = await chunks()
  t.ok(orphans.length >= 6)

  t.ok((await swap()).done)
  t.notOk((await swap()).done)
  const record = decodeRecord((await store.get(id)).bytes as Buffer)
  t.ok(record.state === 'completed' && record.result.kept && record.result.response.body.equals(BODY))
  const { version } = readStamps((await store.get(id)).bytes as Buffer)
  const kept = await chunks()
  t.equal(kept.length, orphans.length + 6)
  const short = () =>
    bytesOf('completed', token, { result: { kept: false, why: 'past_ttl', status: 200, location: null } })
  t.ok((await store.swap(id, { version }, short(), SPANS, false)).done)
  t.equal((await chunks()).length, kept.length - 3, 'its own parts are removed when it is replaced')
  t.ok((await store.swap(id, { version: version + 1 }, completed(token), SPANS, false)).done)
  t.equal((await chunks()).length, kept.length)
  t.ok(await store.remove(id, version + 2))
  t.equal((await chunks()).length, kept.length - 3, 'and when it is removed')
  for (const item of await items()) t.ok(Number(item.e?.N) * 1000 > Date.now(), 'the orphans expire')
})

void t.test('a record with a missing part is corrupt, unless it has changed meanwhile', async (t) => {
  const store = await opened(t)
  const [id, token] = [newId(), newToken()]
  await store.put(id, completed(token), SPANS)
  const { version } = readStamps((await store.get(id)).bytes as Buffer)
  const lose = async () => {
    for (const pk of await chunks())
      if (pk.includes(id))
        await server.run('DeleteItem', { TableName: 'records', Key: { pk: { S: pk }, sk: { S: 'chunk' } } })
  }
  const isRecord = ({ input }: Asked) => !JSON.stringify(input.Key).includes(`${id}/`)
  let replaced = 0
  server.fault = async (asked) => {
    if (asked.operation !== 'GetItem' || isRecord(asked) || replaced++ > 0) return null
    await lose()
    await store.swap(id, { version }, completed(token, Buffer.alloc(1000, 7)), SPANS, false)
    return null
  }
  const found = decodeRecord((await store.get(id)).bytes as Buffer)
  t.ok(
    found.state === 'completed' &&
      found.result.kept &&
      found.result.response.body.equals(Buffer.alloc(1000, 7)),
  )
  replaced = 0
  server.fault = async (asked) => {
    if (asked.operation !== 'GetItem' || isRecord(asked) || replaced++ > 0) return null
    await lose()
    await store.remove(id, version + 1)
    return null
  }
  t.equal((await store.get(id)).bytes, null)
  server.fault = () => null
  await store.put(id, completed(token), SPANS)
  await lose()
  await t.rejects(store.get(id), { name: 'CorruptRecord', message: /lost a part/ })
  const records = new Records(store)
  t.match(await records.claim(id, draft('in_progress', newToken()), SPANS), { kind: 'corrupt' })
  const left = await records.prefix(id)
  t.match(left, { kind: 'prefix', prefix: { state: 'completed', leaseUntil: null } })
  t.ok(left.kind === 'prefix' && (await store.remove(id, left.prefix?.version ?? 0)))
  t.match(await records.prefix(id), { prefix: null })
})

void t.test('a key can be claimed if its record is removed between the refusal and the read', async (t) => {
  const store = await opened(t)
  const id = newId()
  const { now: version } = await claimed(store, id, newToken())
  server.tellsItem = false
  server.fault = once('GetItem', async () => void (await store.remove(id, version)))
  t.ok((await claimed(store, id, newToken())).done)
})

void t.test('a record exceeds a removed one in version and fence, whatever the clocks say', async (t) => {
  const ahead = await opened(t, { clock: shifted(MINUTE) })
  const store = await opened(t)
  const id = newId()
  const { now } = await claimed(ahead, id, newToken())
  t.ok(await ahead.remove(id, now))
  const next = await claimed(store, id, newToken())
  t.match(next, { done: true, stamp: { version: now + 1, fence: now + 1 } })
  t.equal(decodeRecord((await store.get(id)).bytes as Buffer).state, 'in_progress')
  t.ok(await store.remove(id, now + 1))
  const remains = (await items()).find(({ sk }) => sk.S === id)
  const left = Number(remains?.e?.N) * 1000 - Date.now()
  t.ok(left > 59 * MINUTE && left < 62 * MINUTE, 'what remains of it expires in an hour')
})

void t.test('a record survives the clock of this machine being set back', async (t) => {
  const store = await opened(t, { clock: new ServerClock() })
  const [id, token] = [newId(), newToken()]
  await claimed(store, id, token)
  const { now } = Date
  t.teardown(() => void (Date.now = now))
  Date.now = () => now() - HOUR
  const spans = { dueIn: MINUTE, dropIn: MINUTE }
  t.ok((await store.swap(id, own(token), completed(token, Buffer.from('x')), spans, false)).done)
  t.ok((await store.get(id)).bytes, 'its key is not free')
  Date.now = now
  t.ok((await store.get(id)).bytes)
})

void t.test('uncertainty about the time shortens neither lease nor retention', async (t) => {
  const doubt = 2000
  // The true time is anywhere between their bounds.
  const [early, late] = [
    await opened(t, { clock: shifted(-doubt, doubt) }),
    await opened(t, { clock: shifted(doubt, doubt) }),
  ]
  const [id, token] = [newId(), newToken()]
  const spans = { dueIn: MINUTE, dropIn: HOUR }
  for (const write of [
    () => early.put(id, bytesOf('in_progress', token), spans),
    () => early.renew([{ id, token, ...spans }]),
    () => early.swap(id, own(token), bytesOf('in_progress', token), spans, false),
  ]) {
    const before = Date.now()
    await write()
    const { now, bytes } = await late.get(id)
    const { due, dropAt } = readStamps(bytes as Buffer)
    t.ok(due >= before + MINUTE && dropAt >= before + HOUR, 'stamped with the latest possible time')
    t.ok(now <= Date.now(), 'read at the earliest possible time')
  }
})

void t.test('a given fence is reached in two steps, despite a writer in between', async (t) => {
  const store = await opened(t)
  const id = newId()
  const token = newToken()
  const { now } = await claimed(store, id, token)
  let updates = 0
  server.fault = async ({ operation }) => {
    if (operation !== 'UpdateItem' || ++updates !== 2) return null
    await server.run('UpdateItem', {
      TableName: 'records',
      Key: { pk: { S: `pay/${id.slice(0, 2)}` }, sk: { S: id } },
      UpdateExpression: 'SET v = v + :one',
      ExpressionAttributeValues: { ':one': { N: '1' } },
    })
    return null
  }
  const bytes = bytesOf('completed', token, { fence: now + 9 })
  t.match(await store.swap(id, own(token), bytes, SPANS, false), {
    done: true,
    stamp: { version: now + 2, fence: now + 9, createdAt: now },
  })
})

void t.test('concurrent notes are all kept, and a throttled renewal does not fail the others', async (t) => {
  const store = await opened(t)
  const peer = await opened(t)
  const [id, busy] = [newId(), newId()]
  const token = newToken()
  for (const one of [id, busy]) await claimed(store, one, token)
  await Promise.all(
    Array.from({ length: 10 }, (_, n) =>
      (n % 2 ? store : peer).history.append(id, [
        { tag: `t${n}`, count: 1, firstAgo: 0, lastAgo: 0, text: '' },
      ]),
    ),
  )
  t.equal((await store.history.read(id)).length, 10)
  server.fault = ({ operation, input }) =>
    operation === 'UpdateItem' && JSON.stringify(input.Key).includes(busy)
      ? { status: 400, error: 'ThrottlingException' }
      : null
  const renewal = { token, dueIn: HOUR, dropIn: HOUR }
  t.same(
    await store.renew([
      { id, ...renewal },
      { id: busy, ...renewal },
    ]),
    [true, false],
  )
  await t.rejects(store.renew([{ id: busy, ...renewal }]), { name: 'StoreUnavailable' })
  server.fault = once('UpdateItem', async () => void (await peer.renew([{ id, ...renewal }])))
  t.same(await store.renew([{ id, ...renewal }]), [true], 'a renewal after another')
})

/** Changes an item behind the store's back. */
const damage = (id: RecordId, change: string): Promise<unknown> => {
  const all = { ':x': { B: 'eA==' }, ':minus': { N: '-1' }, ':q': { S: 'x' }, ':many': { N: '10001' } }
  const used = Object.entries(all).filter(([name]) => change.includes(name))
  return server.run('UpdateItem', {
    TableName: 'records',
    Key: { pk: { S: `pay/${id.slice(0, 2)}` }, sk: { S: id } },
    UpdateExpression: change,
    ...(used.length === 0 ? {} : { ExpressionAttributeValues: Object.fromEntries(used) }),
  })
}

void t.test('an item that the proxy did not write is a corrupt record, not an absent one', async (t) => {
  const store = await opened(t)
  for (const change of [
    'SET o = :x',
    'SET o = :q',
    'REMOVE x',
    'SET v = :minus',
    'SET n = :many',
    'SET s = :many',
    'REMOVE c',
    'SET b = :q',
    'SET p = :q',
    'SET q = :q, k = :minus',
    'SET q = :q, k = :many',
    'SET q = :minus, k = v',
  ]) {
    const id = newId()
    await store.put(id, bytesOf('completed', newToken()), SPANS)
    await damage(id, change)
    await t.rejects(store.get(id), { name: 'CorruptRecord' }, change)
    await t.rejects(claimed(store, id, newToken()), { name: 'CorruptRecord' }, change)
  }
  const id = newId()
  await store.put(id, bytesOf('completed', newToken()), SPANS)
  await damage(id, 'SET h = :minus')
  await t.rejects(store.history.read(id), { name: 'CorruptRecord' })
})

void t.test('numbers are read as DynamoDB writes them', async (t) => {
  const store = await opened(t)
  const id = newId()
  await claimed(store, id, newToken())
  const { Item } = (await server.run('GetItem', {
    TableName: 'records',
    Key: { pk: { S: `pay/${id.slice(0, 2)}` }, sk: { S: id } },
  })) as { Item: object }
  const read = (N: string) => {
    server.fault = on('GetItem', { answer: { Item: { ...Item, f: { N } } } })
    return store.get(id)
  }
  for (const number of ['', ' 7', '0x7', '+7', '7.5', 'Infinity', '281474976710656', '1E+15'])
    await t.rejects(read(number), { name: 'CorruptRecord' }, number)
  for (const number of ['7', '7.0', '0.7E1', '7E+0', '007']) {
    const { bytes } = await read(number)
    t.equal(readStamps(bytes as Buffer).fence, 7, number)
  }
})

void t.test('a record that does not say which its parts are can be replaced and removed', async (t) => {
  const store = await opened(t)
  for (const change of ['SET q = :q, k = :minus', 'SET q = :minus, k = :many']) {
    const [id, token] = [newId(), newToken()]
    const { now } = await claimed(store, id, token)
    await damage(id, change)
    const replaced = await store.swap(id, own(token), bytesOf('completed', token), SPANS, false)
    t.match(replaced, { done: true }, change)
    await damage(id, change)
    t.ok(await store.remove(id, now + 1), change)
  }
})

void t.test('a write that does not say what it has replaced may have been made', async (t) => {
  const store = await opened(t)
  const [id, token] = [newId(), newToken()]
  await claimed(store, id, token)
  server.fault = on('UpdateItem', { answer: {} })
  const swap = async () => store.swap(id, own(token), bytesOf('completed', token), SPANS, false)
  await t.rejects(swap(), {
    name: 'StoreUnavailable',
    maybeApplied: true,
    message: /does not say/,
  })
  t.ok(await store.remove(id, 7), 'a removal has nothing to tell')
})

void t.test('a damaged bucket, place or key is corrupt, and no other one', async (t) => {
  const store = await opened(t)
  const take = () => store.limits.take('bucket', { count: 2, per: 1000 }, 1)
  t.equal(await take(), 0)
  const bucket = { a: { N: '7' }, t: { N: '7' }, r: { N: '7' } }
  for (const change of [
    { r: { N: '0' } },
    { r: { S: '2' } },
    { t: { N: '-1' } },
    { a: { N: '9007199254740992' } },
  ]) {
    server.fault = on('GetItem', { answer: { Item: { ...bucket, ...change } } })
    await t.rejects(take(), { name: 'CorruptRecord' }, JSON.stringify(change))
  }
  for (const w of ['', '7 a', `${'7'.padStart(16, '0')} `, `${'x'.padStart(16, '0')} a`]) {
    server.fault = on('Query', { answer: { Items: [{ w: { S: w } }] } })
    await t.rejects(store.due(5), { name: 'CorruptRecord' }, w)
    await t.rejects(store.list('unresolved', null, 5), { name: 'CorruptRecord' }, w)
  }
  for (const key of [
    {},
    { pk: { S: 'a' } },
    { pk: { S: 'a b' }, sk: { S: 'c' } },
    { pk: { S: 'a' }, sk: { S: 'b c' } },
    { pk: { S: 'a' }, sk: { N: '7' } },
  ]) {
    server.fault = on('Scan', { answer: { Items: [], LastEvaluatedKey: key } })
    await t.rejects(store.list('all', null, 5), { name: 'CorruptRecord' }, JSON.stringify(key))
  }
})

void t.test('expired records do not hide a due one', async (t) => {
  const store = await opened(t)
  await server.empty()
  const id = newId()
  // In the same part of the index, and before the due one.
  for (let n = 0; n < 5; n++)
    await store.put(`${id.slice(0, -1)}${n}` as RecordId, bytesOf('unknown', newToken()), {
      dueIn: 1,
      dropIn: 2,
    })
  await store.put(id, bytesOf('unknown', newToken()), { dueIn: 10, dropIn: HOUR })
  const later = await opened(t, { clock: shifted(MINUTE) })
  t.same(await later.due(2), [id])
  t.same(await later.list('unresolved', null, 2), { ids: [id], next: null })
})

void t.test('traits report what the table does not promise', async (t) => {
  const store = await opened(t)
  t.match(await store.traits(), { durable: true, evicts: false, findings: [/^Time to live is off/] })
  const on = { TimeToLiveStatus: 'ENABLED', AttributeName: 'e' }
  for (const [table, ttl, findings] of [
    [{}, on, []],
    [{ Replicas: [] }, on, []],
    [{ Replicas: [{ RegionName: 'eu-west-1' }] }, on, [/two regions can claim the same key/]],
    [{ Replicas: [{}], MultiRegionConsistency: 'EVENTUAL' }, on, [/two regions can claim the same key/]],
    [{ Replicas: [{}], MultiRegionConsistency: 'STRONG' }, on, []],
    [{}, { ...on, AttributeName: 'ttl' }, [/Time to live/]],
    [{}, { ...on, TimeToLiveStatus: 'DISABLING' }, [/Time to live/]],
    [{}, undefined, [/Time to live/]],
  ] as const) {
    server.fault = ({ operation }) => ({
      answer: operation === 'DescribeTable' ? { Table: table } : { TimeToLiveDescription: ttl },
    })
    const traits = await store.traits()
    t.match(traits, { findings })
    t.equal(
      traits.evicts,
      findings.some((why) => String(why).includes('regions')),
    )
    t.equal(traits.findings.length, findings.length)
  }
})

void t.test('who loses a hundred races against other writers gives up', async (t) => {
  const store = await opened(t)
  const [id, token] = [newId(), newToken()]
  const { now: version } = await claimed(store, id, token)
  server.fault = on('UpdateItem', { status: 400, error: 'ConditionalCheckFailedException' })
  server.asked.length = 0
  const given = bytesOf('completed', token, { fence: version + 90 })
  await t.rejects(async () => store.swap(id, { version }, given, SPANS, false), {
    name: 'StoreUnavailable',
    maybeApplied: false,
    message: 'DynamoDB: 100 other writes of the same item came first',
  })
  t.equal(server.asked.filter(({ operation }) => operation === 'UpdateItem').length, 100)
})

const isLeft = async (): Promise<boolean> => (await server.connections()) === 0
const unclear = (): number => {
  throw new StoreUnavailable('the time is unknown', false)
}

void t.test('a store asks for its table in its region, and closes its connections', async (t) => {
  const store = await opened(t)
  t.equal(store.name, 'dynamodb')
  t.match(server.asked, [{ operation: 'DescribeTable', authorization: /\/eu-central-1\/dynamodb\// }])
  t.equal(server.asked.length, 1)
  t.notOk(await isLeft())
  await store.close()
  await until(isLeft)
})

void t.test('a store does not open on a table that is missing or has another layout', async (t) => {
  for (const [fault, why] of [
    [{ status: 400, error: 'ResourceNotFoundException' }, 'there is no table records'],
    [{ answer: { Table: {} } }, 'wrong key or index: table records'],
    [{ answer: {} }, 'wrong key or index: table records'],
  ] as const) {
    server.fault = on('DescribeTable', fault)
    await t.rejects(openDynamoDbStore(settings), {
      name: 'StoreUnavailable',
      maybeApplied: false,
      message: `cannot use the DynamoDB store: ${why}; docs/dynamodb.md has the command that creates it`,
    })
    await until(isLeft)
  }
})

void t.test('a store that cannot describe its table opens, says so, and needs no clock', async (t) => {
  const told: string[] = []
  const onEvent = (kind: string, detail: string) => void told.push(`${kind}: ${detail}`)
  const clock = { saw: () => {}, earliest: unclear, latest: unclear }
  server.fault = on('DescribeTable', { status: 400, error: 'AccessDeniedException' })
  const store = await openDynamoDbStore({ ...settings, onEvent, clock })
  t.teardown(() => store.close())
  t.strictSame(told, [
    'connected: table records',
    'error: DynamoDB, DescribeTable: AccessDeniedException: no',
  ])
  server.fault = () => null
  await t.rejects(openDynamoDbStore({ ...settings, clock }), { message: 'the time is unknown' })
})

void t.test('without a clock of its own, a store has the time of the replies', async (t) => {
  const { clock: _, ...rest } = settings
  server.fault = () => ({ date: 'Sun, 22 Nov 2020 10:00:00 GMT' })
  const store = await openDynamoDbStore(rest)
  t.teardown(() => store.close())
  const date = Date.UTC(2020, 10, 22, 10)
  const now = await store.ping()
  t.ok(now > date - 10_000 && now < date + 10_000, `${now}`)
})

void t.test('a part of the index is read page by page until there are enough, or no more', async (t) => {
  const store = await opened(t)
  const ids = [1, 2, 99].map((n) => String(n).padEnd(43, 'x'))
  const [a, b, z] = ids.map((id, n) => ({ w: { S: `${String(n).padStart(16, '0')} ${id}` } }))
  const more = { pk: { S: 'pay/xx' }, sk: { S: 'x' }, u: { S: 'pay/3' }, w: { S: 'x' } }
  const later = { ...more, w: { S: 'y' } }
  const isThird = ({ input }: Asked) => JSON.stringify(input).includes('"pay/3"')
  const pages = async (limit: number, ...answers: readonly object[]) => {
    const left = [...answers]
    server.asked.length = 0
    server.fault = (asked) => ({ answer: isThird(asked) ? (left.shift() ?? { Items: [z] }) : {} })
    const due = await store.due(limit)
    const asked = server.asked.filter(isThird).map(({ input }) => input as { ExclusiveStartKey?: object })
    return { due, starts: asked.map(({ ExclusiveStartKey }) => ExclusiveStartKey) }
  }
  const [first, second] = [{ Items: [a], LastEvaluatedKey: more }, { LastEvaluatedKey: later }]
  const whole = { due: ids.slice(0, 2), starts: [undefined, more, later] }
  t.strictSame(await pages(3, first, second, { Items: [b] }), whole, 'to its end')
  const two = { Items: [a, b], LastEvaluatedKey: more }
  t.strictSame(await pages(2, two), { due: ids.slice(0, 2), starts: [undefined] }, 'enough')
  t.strictSame(await pages(3, two), { due: ids, starts: [undefined, more] })
})

void t.test('takes from one bucket do not meet, and those from others do not wait', async (t) => {
  const store = await opened(t)
  const { promise, resolve } = Promise.withResolvers<void>()
  server.asked.length = 0
  server.fault = async ({ operation, input }) => {
    if (operation === 'GetItem' && JSON.stringify(input).includes('/one')) await promise
    return null
  }
  const take = (name: string) => store.limits.take(name, { count: 2, per: 1000 }, 1)
  const both = [take('one'), take('one')]
  await take('two')
  t.equal(server.asked.length, 3, 'the second from the first bucket has not asked')
  resolve()
  t.strictSame(await Promise.all(both), [0, 0])
})
