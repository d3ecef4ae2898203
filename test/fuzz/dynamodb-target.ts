import { openDynamoDbStore } from '../../src/store/dynamodb.ts'
import {
  Client,
  ConditionFailed,
  type DynamoDbOperation,
  type Item,
  type OperationInput,
  type OperationOutput,
} from '../../src/store/dynamodb-client.ts'
import { tableDefinition } from '../../src/store/dynamodb-layout.ts'
import type { Store } from '../../src/store/register.ts'
import { SPANS } from '../store/fixtures.ts'
import type { Target } from './engine.ts'
import {
  ANY,
  claim,
  type Expected,
  ID,
  NONE,
  NOTE,
  NOW,
  OWN,
  outcome,
  recordBytes,
  replies,
  TOKEN,
} from './replies.ts'

const MOST = 2 ** 48 - 1

/** What the table holds, whatever the key; null: nothing. */
let there: Item | null = null
/** Whether the condition of the next write holds. */
let holds = true

const table: Pick<Client, 'describe' | 'run' | 'close'> = {
  describe: async () => tableDefinition('t'),
  async run(operation: DynamoDbOperation, input: OperationInput): Promise<OperationOutput> {
    switch (operation) {
      case 'GetItem': {
        // Parts of a long response are in the attribute z.
        const { sk } = (input as { Key: Item }).Key as { sk: { S: string } }
        const part = there?.['z']
        if (sk.S === 'chunk') return part === undefined ? {} : { Item: { p: part } }
        return there === null ? {} : { Item: there }
      }
      case 'PutItem':
      case 'UpdateItem': {
        const { ReturnValues, ConditionExpression } = input
        if (!holds && ConditionExpression !== undefined) {
          holds = true
          throw new ConditionFailed(there)
        }
        return there === null || ReturnValues !== 'ALL_OLD' ? {} : { Attributes: there }
      }
      case 'Query':
      case 'Scan': {
        const { pk, sk } = there ?? {}
        const key = pk === undefined || sk === undefined || operation === 'Query' ? {} : { pk, sk }
        return {
          Items: there === null ? [] : [there],
          ...('pk' in key ? { LastEvaluatedKey: key } : {}),
        }
      }
      case 'DeleteItem':
      case 'DescribeTable':
      case 'DescribeTimeToLive':
        return {}
    }
  },
  close() {},
}

async function opened(): Promise<Store> {
  const load = Client.load
  Client.load = async () => table as Client
  const clock = { saw: () => {}, earliest: () => NOW, latest: () => NOW + 1 }
  const store = await openDynamoDbStore({
    url: 'dynamodb://t',
    service: 'pay',
    timeoutMs: 1000,
    onEvent: () => {},
    clock,
  })
  Client.load = load
  return store
}
const store = await opened()

type Kind = 'S' | 'N' | 'B'
type Attributes = ReadonlyMap<string, { readonly kind: string; readonly value: string }>

function numberOf(item: Attributes, name: string, most = MOST): number | null {
  const found = item.get(name)
  if (found?.kind !== 'N' || !/^[0-9]+(?:\.[0-9]+)?(?:E\+?[0-9]+)?$/i.test(found.value)) return null
  const number = Number(found.value)
  return Number.isInteger(number) && number <= most ? number : null
}

/** Empty if there is none; null: something else. */
function bytesIn(item: Attributes, name: string): Buffer | null {
  const found = item.get(name)
  if (found === undefined) return Buffer.alloc(0)
  return found.kind === 'B' ? Buffer.from(found.value, 'hex') : null
}

/** The record put together by docs/record-format.md and docs/dynamodb.md; null: there is none. */
function recordOf(item: Attributes | null, isWhole = true): Buffer | null | typeof NONE {
  if (item === null) return null
  const dropAt = numberOf(item, 'x')
  if (dropAt === null) return NONE
  if (dropAt <= NOW) return null
  const [schema, state] = [numberOf(item, 'n', 255), numberOf(item, 's', 255)]
  const numbers = ['v', 'f', 'c', 'm', 'd'].map((name) => numberOf(item, name))
  const [token, head, payload] = ['o', 'b', 'p'].map((name) => bytesIn(item, name))
  if (schema === null || state === null || numbers.includes(null) || token?.length !== 16) return NONE
  if (head == null || (isWhole && payload == null)) return NONE
  const parts = isWhole ? chunksOf(item) : []
  if (parts === null) return NONE
  return recordBytes({
    schema,
    state,
    numbers: [...(numbers as number[]), dropAt],
    token,
    rest: [head, ...(isWhole ? [payload as Buffer, ...parts] : [])],
  })
}

/** An item holds at most 400 KB, a record no more than fits into memory. */
const MOST_CHUNKS = 10_000

function chunksOf(item: Attributes): Buffer[] | null {
  const name = item.get('q')
  if (name === undefined) return []
  const count = numberOf(item, 'k', MOST_CHUNKS)
  const part = bytesIn(item, 'z')
  if (name.kind !== 'S' || count === null || (count > 0 && (!item.has('z') || part === null))) return null
  return Array.from({ length: count }, () => part as Buffer)
}

interface Asked {
  readonly holds: boolean
  readonly ask: () => unknown
  readonly expected: (item: Attributes | null) => Expected
}

function found(item: Attributes | null, isWhole = true): Expected {
  const bytes = recordOf(item, isWhole)
  return bytes === NONE ? NONE : { now: NOW, bytes }
}

/** It is there, or the remains of one that was are exceeded. */
function claimed(item: Attributes | null): Expected {
  const bytes = recordOf(item)
  if (bytes === NONE || bytes !== null) return bytes === NONE ? NONE : { done: false, now: NOW, bytes }
  const before = item === null ? [0, 0] : [numberOf(item, 'v'), numberOf(item, 'f')]
  if (before.includes(null)) return NONE
  const now = Math.max(NOW + 1, ...before.map((one) => Number(one) + 1))
  // Nothing can be later than that.
  if (now + SPANS.dropIn > MOST) return NONE
  return { done: true, now, stamp: { version: now, fence: now, createdAt: now } }
}

function replaced(item: Attributes | null, step: 0 | 1): Expected {
  const bytes =
    item === null ? null : recordOf(new Map([...item, ['x', { kind: 'N', value: `${NOW + 1}` }]]), false)
  if (bytes === null || bytes === NONE || numberOf(item as Attributes, 'x') === null) return NONE
  const [version, fence, createdAt] = [4, 10, 32].map((at) => bytes.readUIntBE(at, 6)) as [
    number,
    number,
    number,
  ]
  return { done: true, now: NOW + 1, stamp: { version: version + 1, fence: fence + step, createdAt } }
}

/** Unless it is the very record, whose fence was too low for the first try. */
function refused(item: Attributes | null, isIt: (bytes: Buffer) => boolean, step: 0 | 1): Expected {
  const bytes = recordOf(item)
  if (bytes === NONE) return NONE
  if (bytes !== null && bytes[2] === 1 && bytes.length >= 56 && isIt(bytes)) return replaced(item, step)
  return { done: false, now: NOW, bytes }
}
const isOwn = (bytes: Buffer): boolean => bytes[3] === 1 && bytes.subarray(16, 32).equals(TOKEN)
const isSeventh = (bytes: Buffer): boolean => bytes.readUIntBE(4, 6) === 7

const settle = () => store.swap(ID, OWN, outcome(), SPANS, false)
const over = () => store.swap(ID, { version: 7 }, claim(), SPANS, true)

function whether(item: Attributes | null, is: (bytes: Buffer) => boolean): Expected {
  const bytes = recordOf(item, false)
  return bytes === NONE ? NONE : bytes !== null && is(bytes)
}
/** In progress, or unknown since its owner was silent. */
const isRenewable = (bytes: Buffer): boolean =>
  bytes[2] === 1 &&
  bytes.subarray(16, 32).equals(TOKEN) &&
  (bytes[3] === 1 || (bytes[3] === 4 && ((bytes[60] ?? 0) & 1) === 1))

const OPERATIONS: Readonly<Record<string, Asked>> = {
  get: { holds: true, ask: () => store.get(ID), expected: (item) => found(item) },
  stored: { holds: true, ask: () => store.stored?.(ID), expected: (item) => found(item, false) },
  claim: { holds: false, ask: () => store.put(ID, claim(), SPANS), expected: claimed },
  settled: { holds: true, ask: settle, expected: (item) => replaced(item, 0) },
  settle: { holds: false, ask: settle, expected: (item) => refused(item, isOwn, 0) },
  taken: { holds: true, ask: over, expected: (item) => replaced(item, 1) },
  over: { holds: false, ask: over, expected: (item) => refused(item, isSeventh, 1) },
  renew: {
    holds: true,
    async ask() {
      // One that cannot be renewed must not keep the others.
      const answers = await store.renew([{ id: ID, token: TOKEN, ...SPANS }])
      return answers[0]
    },
    expected(item) {
      const expected = whether(item, isRenewable)
      return expected === NONE ? ANY : expected
    },
  },
  // Removed is removed, whatever it was.
  remove: { holds: true, ask: () => store.remove(ID, 7), expected: () => true },
  notes: { holds: true, ask: () => store.history.read(ID), expected: () => ANY },
  append: {
    holds: true,
    ask: () => store.history.append(ID, [NOTE]),
    expected: () => ANY,
  },
  take: {
    holds: true,
    async ask() {
      const wait = await store.limits.take('bucket', { count: 2, per: 1000 }, 1)
      return Number.isInteger(wait) && wait >= 0 && wait <= 1000
    },
    expected(item) {
      if (item === null) return true
      const [at, debt, count] = ['a', 't', 'r'].map((name) => numberOf(item, name, Number.MAX_SAFE_INTEGER))
      return at == null || debt == null || !count ? NONE : true
    },
  },
  due: { holds: true, ask: () => store.due(5), expected: (item) => placesOf(item, 5) },
  unresolved: {
    holds: true,
    async ask() {
      const page = await store.list('unresolved', null, 2)
      if (page.next !== null) await store.list('unresolved', page.next, 2)
      return page.ids
    },
    expected: (item) => placesOf(item, 2),
  },
  list: {
    holds: true,
    async ask() {
      const page = await store.list('all', null, 2)
      if (page.next !== null) await store.list('all', page.next, 2)
    },
    expected: () => ANY,
  },
}

/** The item is in each of the sixteen partitions. */
function placesOf(item: Attributes | null, limit: number): Expected {
  if (item === null) return []
  const place = item.get('w')
  const [, id] = (place?.kind === 'S' && /^[0-9]{16} ([\w-]{1,64})$/.exec(place.value)) || []
  return id === undefined ? NONE : Array.from({ length: limit }, () => id)
}

/** A line each attribute: name, kind, value; bytes in hex. */
function attributesOf(lines: readonly string[]): Attributes | null {
  const read = lines.map((line) => /^(\w{1,2}) (\w{1,4}) ?(.*)$/s.exec(line)).filter((one) => one !== null)
  if (read.length === 0) return null
  return new Map(read.map(([, name = '', kind = '', value = '']) => [name, { kind, value }]))
}

function itemOf(attributes: Attributes | null): Item | null {
  if (attributes === null) return null
  const entries = [...attributes].map(([name, { kind, value }]) => [
    name,
    { [kind]: kind === 'B' ? new Uint8Array(Buffer.from(value, 'hex')) : value },
  ])
  return Object.fromEntries(entries) as Item
}

function seed(name: string, item: Readonly<Record<string, string | number | Buffer>>): string {
  const lines = Object.entries(item).map(([attribute, value]) => {
    const kind: Kind = Buffer.isBuffer(value) ? 'B' : typeof value === 'number' ? 'N' : 'S'
    return `${attribute} ${kind} ${Buffer.isBuffer(value) ? value.toString('hex') : value}`
  })
  return [name, ...lines].join('\n')
}
const NUMBERS = { v: NOW, f: NOW, c: NOW, m: NOW, d: NOW + 9, x: NOW + 99, n: 1, s: 1 }
const RECORD = { ...NUMBERS, o: TOKEN, b: claim().subarray(56) }
const LONG = { ...RECORD, s: 2, q: 'name', k: 2, z: Buffer.from('part') }
const REMAINS = { v: NOW, f: NOW, x: 0 }

/**
 * The first line is what the store is asked, the others are the item that the table holds: what another program, a damaged table or a later
 * release may have put there. It is read as its format says, or the store is at fault: an item that makes no sense is no absent record, and
 * grants nothing.
 */
export const dynamodbItem: Target = {
  name: 'dynamodb-item',
  files: ['store/dynamodb', 'store/side-ports'],
  seeds: [
    ...['get', 'stored', 'claim', 'settled', 'settle', 'taken', 'renew', 'remove'].map((name) =>
      seed(name, RECORD),
    ),
    seed('get', LONG),
    seed('claim', LONG),
    seed('remove', LONG),
    seed('get', REMAINS),
    seed('claim', REMAINS),
    seed('claim', { ...REMAINS, v: MOST }),
    seed('claim', {}),
    seed('settle', REMAINS),
    seed('over', { ...RECORD, v: 7 }),
    seed('renew', { ...RECORD, s: 4, b: Buffer.from([0, 0, 0, 1, 1]) }),
    seed('notes', { ...RECORD, h: `settled 1 ${NOW} ${NOW} {}` }),
    seed('append', { ...RECORD, h: `settled 1 ${NOW} ${NOW} {}` }),
    seed('take', { a: NOW, t: 1500, r: 2 }),
    seed('due', { w: `000${NOW} ${ID}` }),
    seed('unresolved', { w: `000${NOW} ${ID}` }),
    seed('list', { pk: 'pay/AA', sk: ID }),
  ],
  // biome-ignore format: a list
  words: [
    '\n', ' N ', ' S ', ' B ', ' NULL ', ' NS ', '-1', '0', '1', '255', '256', 'NaN', '1e3', '1E+12', '0x10',
    '1.5', '281474976710655', '281474976710656', '9007199254740991', '99999999999999999999', '\nx N 0',
    '\nk N 4294967296', '\nq S a', '\nz B 00', '\np B 00', '00',
    ...Object.keys(OPERATIONS).map((name) => `${name}\n`),
  ],
  async check(input) {
    const [name = '', ...lines] = input.toString('latin1').split('\n')
    const operation = Object.hasOwn(OPERATIONS, name) ? OPERATIONS[name] : undefined
    if (operation === undefined) return
    const attributes = attributesOf(lines)
    there = itemOf(attributes)
    holds = operation.holds
    await replies(name, operation.ask, operation.expected(attributes))
  },
}
