import { openPostgresStore } from '../../src/store/postgres.ts'
import { Epoch } from '../../src/store/postgres-epoch.ts'
import { PostgresLink, type SqlArg, type SqlRow } from '../../src/store/postgres-link.ts'
import type { NewEpoch } from '../../src/store/register.ts'
import { Safety } from '../../src/store/safety.ts'
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

/** What the server answers to the next statement of the store. */
let row: SqlRow = []

/** Of what the store asks for itself. */
function ownAnswer(text: string): SqlRow | null {
  if (text.includes('server_version_num')) return ['f', '17', '9', '1']
  if (text.includes('FROM idempotency.layout')) return ['1', '99']
  if (text.includes('has_table_privilege')) return [null, null]
  if (text.includes('pg_control_system')) return ['7000', '000000010000000000000001']
  return null
}

const link: Pick<PostgresLink, 'isOver' | 'query' | 'ask' | 'end'> = {
  isOver: false,
  query(text: string, args: readonly SqlArg[], done) {
    const answer = text.includes('idempotency.prune') ? ['0'] : row
    queueMicrotask(() => done(null, [[String(args[0]), ...answer]]))
  },
  async ask(text) {
    const answer = ownAnswer(text)
    return answer === null ? [] : [answer]
  },
  async end() {},
}
// Nothing else of this process speaks to PostgreSQL.
PostgresLink.open = async () => link as PostgresLink

const store = await openPostgresStore({
  url: 'postgres://u@db/d',
  service: 'pay',
  timeoutMs: 60_000,
  onEvent: () => {},
})

/** What PostgreSQL writes for a number that a record can hold. */
function numberOf(text: string | null | undefined, bits = 48): number | null {
  if (text == null || !/^[0-9]{1,15}$/.test(text)) return null
  return BigInt(text) >> BigInt(bits) === 0n ? Number(text) : null
}

function bytesIn(text: string | null | undefined): Buffer | null {
  return text != null && /^\\x(?:[0-9A-Fa-f]{2})*$/.test(text) ? Buffer.from(text.slice(2), 'hex') : null
}

/** The record of these columns, put together by docs/record-format.md; null: all are NULL. */
function recordOf(columns: SqlRow): Buffer | null | typeof NONE {
  if (columns.length === 11 && columns.every((column) => column === null)) return null
  const numbers = columns.slice(0, 6).map((column) => numberOf(column))
  const [schema, state] = columns.slice(6, 8).map((column) => numberOf(column, 8))
  const [token, head, payload] = columns.slice(8, 11).map(bytesIn)
  if (numbers.some((one) => one === null) || columns.length < 11) return NONE
  if (schema == null || state == null || token?.length !== 16 || head == null || payload == null) return NONE
  return recordBytes({ schema, state, numbers: numbers as number[], token, rest: [head, payload] })
}

/** Of `put` and `swap`. */
function written(columns: SqlRow): Expected {
  const [at, done, version, fence, createdAt, , remaining, since] = columns
  const now = numberOf(at)
  if (now === null) return NONE
  if (done === 't') {
    const stamp = { version: numberOf(version), fence: numberOf(fence), createdAt: numberOf(createdAt) }
    // Both are times, or one more than what was there: never 0.
    const isPossible = Object.values(stamp).every((one) => one !== null) && stamp.version && stamp.fence
    return isPossible ? { done: true, now, stamp } : NONE
  }
  if (done !== 'f' || (remaining != null && numberOf(remaining) !== 0) || since === undefined) return NONE
  const bytes = recordOf(columns.slice(8))
  return bytes === NONE ? NONE : { done: false, now, bytes }
}

/** Of a claim: what is there, or that it was made. */
function claimed(columns: SqlRow): Expected {
  const reply = written(columns)
  return reply === NONE || (reply as { bytes?: unknown }).bytes === null ? NONE : reply
}

interface Operation {
  readonly ask: () => unknown
  readonly expected: (columns: SqlRow) => Expected
}

async function admitted(): Promise<unknown> {
  const told: unknown[] = []
  const epoch = new Epoch({
    grace: 600_000,
    look: async () => row,
    onSilence: () => {},
    safety: new Safety(1, () => {}),
    onNew: ({ left }: NewEpoch) => void told.push(left),
    onHeld: (left) => void told.push(left),
  })
  await epoch.look()
  epoch.close()
  return [...told, epoch.seen]
}

const OPERATIONS: Readonly<Record<string, Operation>> = {
  claim: {
    ask: () => store.put(ID, claim(), SPANS),
    expected: claimed,
  },
  again: {
    ask: () => store.put(ID, outcome(), SPANS, 'again'),
    expected: claimed,
  },
  settle: { ask: () => store.swap(ID, OWN, outcome(), SPANS, false), expected: written },
  over: { ask: () => store.swap(ID, { version: 7 }, claim(), SPANS, true), expected: written },
  get: {
    ask: () => store.get(ID),
    expected: ([at, ...columns]) => {
      const [now, bytes] = [numberOf(at), recordOf(columns)]
      return now === null || bytes === NONE ? NONE : { now, bytes }
    },
  },
  ping: { ask: () => store.ping(), expected: ([at]) => numberOf(at) ?? NONE },
  take: {
    ask: () => store.limits.take('bucket', { count: 1, per: 1000 }, 1),
    expected: ([wait]) => numberOf(wait) ?? NONE,
  },
  remove: { ask: () => store.remove(ID, 7), expected: ([done]) => done === 't' },
  renew: {
    ask: () => store.renew([{ id: ID, token: TOKEN, ...SPANS }]),
    expected: ([renewed]) => [renewed === 't' || renewed?.split(' ').includes(ID) === true],
  },
  due: { ask: () => store.due(5), expected: () => ANY },
  list: { ask: () => store.list('all', null, 5), expected: () => ANY },
  places: {
    async ask() {
      const page = await store.list('unresolved', null, 2)
      // Whoever is told of more comes back with it.
      if (page.next !== null) await store.list('unresolved', page.next, 2)
      return page.ids
    },
    expected([listed]) {
      const places = (listed ?? 'x').split(',').map((place) => /^[0-9]{1,16} ([\w-]{1,64})$/.exec(place)?.[1])
      if (listed === '') return []
      return places.includes(undefined) ? NONE : places
    },
  },
  notes: { ask: () => store.history.read(ID), expected: () => ANY },
  append: {
    ask: () => store.history.append(ID, [NOTE]),
    expected: ([done]) => done === 't',
  },
  admit: {
    ask: admitted,
    expected([remaining, since]) {
      const [left, seen] = [numberOf(remaining), numberOf(since)]
      if (left === null || seen === null) return [0, 0]
      return seen === 0 ? [left, 0] : [left, left, seen]
    },
  },
}

function seed(name: string, ...columns: readonly (string | number | Buffer | null)[]): string {
  const texts = columns.map((one) =>
    one === null ? '\\N' : Buffer.isBuffer(one) ? `\\x${one.toString('hex')}` : String(one),
  )
  return [name, ...texts].join('\n')
}
/** As the view `stored` has them. */
const RECORD = [NOW, NOW, NOW, NOW, NOW + 9, NOW + 99, 1, 1, TOKEN, claim().subarray(56), Buffer.from('p')]
const ABSENT = RECORD.map(() => null)
const GRANTED = [NOW, 't', NOW, NOW, NOW, '', 0, null, ...ABSENT]
const FOUND = [NOW, 'f', null, null, null, null, null, null, ...RECORD]

/**
 * The first line is what the store asks, the others are the columns of the only row, NULL as `\N`: what another program, a damaged table or
 * a later release might answer. It is a reply that the functions give, read as the format says, or the store is at fault: a row that makes
 * no sense is no absent record, and grants nothing.
 */
export const sqlReply: Target = {
  name: 'sql-reply',
  files: ['store/postgres.ts', 'store/postgres-epoch', 'store/side-ports'],
  seeds: [
    seed('claim', ...GRANTED),
    seed('claim', ...FOUND),
    seed('claim', NOW, 'f', null, null, null, null, 400, NOW - 100, ...ABSENT),
    seed('again', ...GRANTED),
    seed('settle', ...GRANTED),
    seed('settle', ...FOUND),
    seed('settle', NOW, 'f', null, null, null, null, null, null, ...ABSENT),
    seed('over', ...GRANTED),
    seed('get', NOW, ...RECORD),
    seed('get', NOW, ...ABSENT),
    seed('ping', NOW),
    seed('take', 0),
    seed('remove', 't', 'idempotency_a idempotency_b'),
    seed('renew', ID),
    seed('due', `${ID} ${ID}`),
    seed('list', `${ID} ${ID}`),
    seed('places', `${NOW} ${ID},${NOW + 1} ${ID}`),
    seed('notes', `["settled 1 ${NOW} ${NOW} {}"]`),
    seed('append', 't'),
    seed('admit', 0, NOW),
  ],
  // biome-ignore format: a list
  words: [
    '\n', '\n\\N', '\\N\n', '\\x', '00', '-1', '0', '1', 'NaN', 'Infinity', '1e3', '0x10', '256',
    '281474976710656', '9223372036854775807', '\nt', '\nf', 'true', ' ', ',', '[]', '"', '{}', 'null',
    `\\x${TOKEN.toString('hex')}`, ...Object.keys(OPERATIONS).map((name) => `${name}\n`),
  ],
  async check(input) {
    const [name = '', ...columns] = input.toString('latin1').split('\n')
    const operation = Object.hasOwn(OPERATIONS, name) ? OPERATIONS[name] : undefined
    if (operation === undefined) return
    row = columns.map((column) => (column === '\\N' ? null : column))
    await replies(name, operation.ask, operation.expected(row))
  },
}
