import { readFileSync } from 'node:fs'
import t, { type Test } from 'tap'
import { Client, ConditionFailed, NoTable, ServerClock } from '../../src/store/dynamodb/client.ts'
import { expiry, tableDefinition, text, wrongWith } from '../../src/store/dynamodb/layout.ts'
import { PartlyUnavailable } from '../../src/store/register.ts'
import { failNextImport } from '../support/imports.ts'

void t.test('a table has the keys and the index of its definition, or says what is wrong', (t) => {
  const page = readFileSync(new URL('../../docs/dynamodb.md', import.meta.url), 'utf8')
  const [, json = ''] = /```json\n(.*?)```/s.exec(page) ?? []
  t.same(JSON.parse(json), tableDefinition('idempotency'), 'docs/dynamodb.md shows it')
  const table = tableDefinition('mine')
  t.equal(wrongWith(table), null)
  const { KeySchema, GlobalSecondaryIndexes = [] } = table as Record<string, object[]>
  t.equal(
    wrongWith({
      KeySchema,
      GlobalSecondaryIndexes: [{ IndexName: 'else' }, ...GlobalSecondaryIndexes],
    } as never),
    null,
  )
  t.equal(wrongWith(null), 'there is no table')
  for (const other of [
    {},
    { KeySchema },
    { GlobalSecondaryIndexes },
    { KeySchema, GlobalSecondaryIndexes: [{ IndexName: 'unresolved' }] },
    { KeySchema, GlobalSecondaryIndexes: [{ ...GlobalSecondaryIndexes[0], IndexName: 'else' }] },
    { KeySchema: KeySchema?.toReversed(), GlobalSecondaryIndexes },
  ])
    t.equal(wrongWith(other as never), 'wrong key or index: table')
  t.end()
})

void t.test('DynamoDB removes an item an hour after it has dropped, in whole seconds', (t) => {
  t.strictSame([1_000_000, 1_000_001].map(expiry), [{ N: '4600' }, { N: '4601' }])
  t.end()
})

void t.test('the clock of the store is known between two bounds, to five seconds', (t) => {
  let local = 0
  const clock = new ServerClock(() => local)
  // Each reply bounds the offset: from its date less its receipt, to a second after its date less its sending.
  t.throws(() => clock.earliest(), /is unknown/)
  clock.saw(100_000, 500, 4000)
  t.same([clock.earliest(), clock.latest()], [96_000, 100_500])
  clock.saw(Number.NaN, 0, 0)
  local = 0.5
  t.same([clock.earliest(), clock.latest()], [96_000, 100_501])
  const exact = new ServerClock(() => 0)
  exact.saw(100_000, 0, 4000)
  t.same([exact.earliest(), exact.latest()], [96_000, 101_000])
  const other = new ServerClock(() => 0)
  other.saw(100_000, 0, 4001)
  t.throws(() => other.earliest(), { name: 'StoreUnavailable', maybeApplied: false, message: /by 5001 ms/ })
  t.throws(() => other.latest(), { name: 'StoreUnavailable', maybeApplied: false })
  other.saw(100_000, 0, 0)
  // Exactly what both say.
  other.saw(101_000, 0, 0)
  t.same([other.earliest(), other.latest()], [101_000, 101_000])
  other.saw(102_001, 0, 0)
  t.same([other.earliest(), other.latest()], [102_001, 103_001], 'it was set')
  t.end()
})

void t.test('what was seen long ago is forgotten', (t) => {
  const clock = new ServerClock(() => 0)
  clock.saw(100_000, 0, 0)
  for (let n = 1; n < 199; n++) clock.saw(100_000, 0, 1000)
  t.equal(clock.earliest(), 100_000)
  clock.saw(100_000, 0, 1000)
  t.equal(clock.earliest(), 99_000, 'after the second hundred')
  t.end()
})

interface Request {
  readonly headers: Readonly<Record<string, string>>
  readonly body: string
}
type Handle = (request: Request, options: { abortSignal: AbortSignal }) => Promise<object>

const CREDENTIALS = { accessKeyId: 'a', secretAccessKey: 'b' }

/** A client whose requests go to `handle` and no further. */
async function talking(t: Test, handle: Handle, timeoutMs = 10_000, credentials: object = CREDENTIALS) {
  const [events, seen, closed] = [[] as string[], [] as number[][], [] as string[]]
  const clock = { saw: (...times: number[]) => void seen.push(times), earliest: () => 0, latest: () => 0 }
  const requestHandler = {
    handle: async (...args: Parameters<Handle>) => ({ response: await handle(...args) }),
    destroy: () => void closed.push('closed'),
  }
  const client = await Client.load({
    table: 'mine',
    where: { region: 'eu-central-1', credentials, requestHandler } as never,
    timeoutMs,
    clock,
    onEvent: (kind, detail) => void events.push(`${kind}: ${detail}`),
  })
  t.teardown(() => client.close())
  return { client, events, seen, closed }
}
const DATE = 'Sun, 22 Nov 2020 10:00:00 GMT'
const answering = (statusCode: number, body: object | string, headers = { date: DATE }) => ({
  statusCode,
  headers: { 'content-type': 'application/x-amz-json-1.0', ...headers },
  body: Buffer.from(typeof body === 'string' ? body : JSON.stringify(body)),
})
const failing = (status: number, type: string, more: object = {}) =>
  answering(status, { __type: `com.amazonaws.dynamodb.v20120810#${type}`, message: 'because', ...more })
const failureOf = (asked: Promise<unknown>) =>
  asked.then(
    (done) => new Error(`none but ${JSON.stringify(done)}`),
    (error: Error) => error,
  )

void t.test('an operation is sent to the table as it is, and its reply tells the time', async (t) => {
  const asked: Request[] = []
  const { client, seen, events, closed } = await talking(t, async (request) => {
    asked.push(request)
    return answering(200, { Item: { n: { N: '7' } } })
  })
  const before = performance.now()
  t.strictSame((await client.run('GetItem', { Key: { pk: text('a') } })).Item, { n: { N: '7' } })
  t.equal(asked[0]?.headers['x-amz-target'], 'DynamoDB_20120810.GetItem')
  t.strictSame(JSON.parse(asked[0]?.body ?? ''), { TableName: 'mine', Key: { pk: { S: 'a' } } })
  const [[date, sent = 0, received = 0] = []] = seen
  t.equal(date, Date.UTC(2020, 10, 22, 10))
  t.ok(before <= sent && sent <= received && received <= performance.now())
  await client.run('GetItem', { Key: { pk: text('a') } })
  t.same(events, ['connected: table mine'])
  client.close()
  t.ok(closed.length > 0)
})

void t.test('without the SDK nothing is applied, and the error says what to install', async (t) => {
  failNextImport('@aws-sdk/client-dynamodb')
  const options = { table: 'mine', where: {}, timeoutMs: 1, clock: new ServerClock(), onEvent: () => {} }
  await t.rejects(Client.load(options), {
    name: 'StoreUnavailable',
    maybeApplied: false,
    message: /@aws-sdk\/client-dynamodb is not installed beside the proxy; npm install/,
    cause: Error,
  })
})

void t.test('the time that credentials take is not that of the request', async (t) => {
  let resolved = 0
  const credentials = async () => {
    await new Promise((next) => setTimeout(next, 5))
    resolved = performance.now()
    return { accessKeyId: 'a', secretAccessKey: 'b' }
  }
  const { client, seen } = await talking(t, async () => answering(200, {}), 10_000, credentials)
  await client.run('GetItem', {})
  const [[, sent = 0] = []] = seen
  t.ok(resolved > 0 && sent >= resolved, `${resolved}, then ${sent}`)
})

void t.test('each failure says whether the operation may have been applied', async (t) => {
  let next: () => object = () => ({})
  let sent = 0
  const { client } = await talking(t, async () => {
    sent++
    return next()
  })
  const failure = async (one: () => object): Promise<Error> => {
    next = one
    sent = 0
    const error = await failureOf(client.run('PutItem', { Item: {} }))
    t.equal(sent, 1, 'nothing is retried')
    return error
  }
  const applied = (maybeApplied: boolean) => ({ name: 'StoreUnavailable', maybeApplied })
  for (const type of [
    'ProvisionedThroughputExceededException',
    'RequestLimitExceeded',
    'ThrottlingException',
    'TransactionConflictException',
    'ReplicatedWriteConflictException',
  ]) {
    const error = await failure(() => failing(400, type))
    t.match(error, { ...applied(false), message: new RegExp(`^DynamoDB, PutItem: ${type}: `) })
    t.ok(error instanceof PartlyUnavailable, type)
  }
  const absent = await failure(() => failing(400, 'ResourceNotFoundException'))
  t.match(absent, applied(false))
  t.ok(absent instanceof NoTable)
  for (const [status, isApplied] of [
    [399, true],
    [400, false],
    [499, false],
    [500, true],
    [503, true],
  ] as const) {
    const error = await failure(() => failing(status, 'SomeException'))
    t.match(error, applied(isApplied), String(status))
    t.notOk(error instanceof PartlyUnavailable || error instanceof NoTable)
  }
  t.match(await failure(() => answering(200, '{"Attri')), applied(true), 'an answer that is cut off')
  const throwing = (over: object) => () => {
    throw Object.assign(new Error('because'), over)
  }
  for (const code of ['ECONNREFUSED', 'ENOTFOUND', 'EAI_AGAIN', 'EHOSTUNREACH', 'ENETUNREACH'])
    t.match(await failure(throwing({ code })), applied(false), code)
  t.match(await failure(throwing({ name: 'CredentialsProviderError' })), applied(false))
  for (const over of [{ code: 'ECONNRESET' }, { code: 'x' }, {}])
    t.match(await failure(throwing(over)), applied(true))
})

void t.test('a condition that does not hold is no failure of the store', async (t) => {
  let more: object = { Item: { n: { N: '7' } } }
  const { client, events, seen } = await talking(t, async () =>
    failing(400, 'ConditionalCheckFailedException', more),
  )
  const refused = (await failureOf(client.run('PutItem', { Item: {} }))) as ConditionFailed
  t.ok(refused instanceof ConditionFailed)
  t.strictSame(refused.item, { n: { N: '7' } })
  t.equal(seen[0]?.[0], Date.UTC(2020, 10, 22, 10), 'and tells the time')
  more = {}
  t.equal(((await failureOf(client.run('PutItem', { Item: {} }))) as ConditionFailed).item, null)
  t.same(events, ['connected: table mine'])
})

void t.test('an outage and its end are told once', async (t) => {
  let next: object | null = failing(500, 'InternalServerError')
  const { client, events } = await talking(t, async () => {
    if (next === null) throw new Error('cut')
    return next
  })
  const run = () => failureOf(client.run('PutItem', { Item: {} }))
  await run()
  t.same(events, [])
  for (const [one, told] of [
    [answering(200, {}), 'connected: table mine'],
    [failing(500, 'InternalServerError'), 'disconnected: because'],
    [failing(400, 'ThrottlingException'), 'connected: table mine'],
    [failing(499, 'SomeException'), null],
    [answering(200, '{'), null],
    [null, 'disconnected: cut'],
    [answering(200, {}), 'connected: table mine'],
  ] as const) {
    next = one
    const { length } = events
    for (let n = 0; n < 2; n++) await run()
    t.same(events.slice(length), told === null ? [] : [told])
  }
})
