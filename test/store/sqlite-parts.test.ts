import { existsSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import { MessageChannel, receiveMessageOnPort } from 'node:worker_threads'
import fc from 'fast-check'
import t, { type Test } from 'tap'
import { type RecordId, STATES } from '../../src/core/record.ts'
import { HEAD_ROOM, SMALL_RECORD } from '../../src/store/record/codec.ts'
import { type FileOptions, openPatiently, resultCode } from '../../src/store/sqlite/file.ts'
import { CREATE_JOURNAL, type Entry, Journal } from '../../src/store/sqlite/journal.ts'
import { pack, type Request, unpack } from '../../src/store/sqlite/messages.ts'
import { newId, tempDir } from './fixtures.ts'

/* The parts of the SQLite store: its file, its journal, and the messages between it and its thread. */

/** A file of its own, gone when the test ends, after what was opened on it. */
function fileOf(t: Test) {
  const dir = tempDir()
  const file = join(dir.path, 'records.db')
  const opened: DatabaseSync[] = []
  t.teardown(() => {
    for (const db of opened) if (db.isOpen) db.close()
    dir[Symbol.dispose]()
  })
  return {
    file,
    open: async (over: Partial<FileOptions> = {}) => {
      const db = await openPatiently({ file, busyMs: 10, maxPages: 0, ...over })
      opened.push(db)
      return db
    },
    plain: () => {
      const db = new DatabaseSync(file)
      opened.push(db)
      return db
    },
  }
}

function namesIn(db: DatabaseSync): string[] {
  const rows = db.prepare('SELECT name FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name').all()
  return rows.map(({ name }) => name as string)
}

const NAMES = [
  'buckets',
  'buckets_full_at',
  'journal',
  'notes',
  'notes_go_with_the_record',
  'records',
  'records_drop_at',
  'records_key',
  'records_unresolved',
]

function pragma(db: DatabaseSync, name: string): unknown {
  return Object.values(db.prepare(`PRAGMA ${name}`).get() ?? {})[0]
}

void t.test('a new file becomes a store that keeps what is committed, and can be opened again', async (t) => {
  const { open } = fileOf(t)
  const db = await open()
  t.same(namesIn(db), NAMES)
  t.equal(pragma(db, 'user_version'), 3)
  t.equal(pragma(db, 'journal_mode'), 'wal')
  t.equal(pragma(db, 'synchronous'), 2, 'FULL')
  t.equal(db.isTransaction, false)
  const again = await open()
  t.same(namesIn(again), NAMES)
  t.equal(pragma(again, 'user_version'), 3)
})

void t.test('a file of the first release gains what was added under the same version', async (t) => {
  const { open, plain } = fileOf(t)
  const first = await open()
  first.exec('DROP TABLE buckets; DROP TRIGGER notes_go_with_the_record; DROP TABLE notes')
  first.close()
  await open()
  const db = plain()
  t.same(namesIn(db), NAMES)
  t.equal(pragma(db, 'user_version'), 3)
})

void t.test('what is not a store of this release is refused at once, and left as it is', async (t) => {
  for (const [sql, message] of [
    ['PRAGMA user_version = 4', 'it has schema version 4, of a later release; this one reads 3'],
    [
      'CREATE TABLE a (b); PRAGMA user_version = 7',
      'it has schema version 7, of a later release; this one reads 3',
    ],
    [
      'CREATE TABLE records (service TEXT, id TEXT, PRIMARY KEY (service, id)); PRAGMA user_version = 2',
      'it has schema version 2, from before the first release; this one reads 3: move the file away',
    ],
  ] as const) {
    const { file, open, plain } = fileOf(t)
    const before = plain()
    before.exec(sql)
    const [names, version] = [namesIn(before), pragma(before, 'user_version')]
    before.close()
    await t.rejects(open(), new Error(message))
    t.notOk(existsSync(`${file}-wal`), 'it is closed')
    const after = plain()
    after.exec('BEGIN IMMEDIATE; ROLLBACK')
    t.same([namesIn(after), pragma(after, 'user_version')], [names, version])
  }
})

void t.test('the database of another program is refused, and not a byte of it changes', async (t) => {
  for (const version of [0, 1, 2, 3])
    for (const name of ['orders', 'record']) {
      const { file, open, plain } = fileOf(t)
      const other = plain()
      other.exec(
        `CREATE TABLE ${name} (id); CREATE INDEX records ON ${name} (id); PRAGMA user_version = ${version}`,
      )
      other.close()
      const before = readFileSync(file)
      await t.rejects(open(), new Error('it is the database of another program'))
      t.same(readFileSync(file), before)
    }
})

void t.test('a file that is locked is opened when the lock is released', async (t) => {
  const { open, plain } = fileOf(t)
  const other = plain()
  other.exec('BEGIN EXCLUSIVE')
  setTimeout(() => other.exec('COMMIT'), 60)
  t.same(namesIn(await open({ busyMs: 0 })), NAMES)
})

/** Runs `body` while each look at the clock finds it `step` later; returns the number of looks. */
async function looksAt(step: number, body: () => Promise<unknown>): Promise<number> {
  const { now } = performance
  let looks = 0
  performance.now = () => step * ++looks
  try {
    await body()
  } finally {
    performance.now = now
  }
  return looks
}

void t.test(
  'a file that stays locked fails after fifty times an operation’s wait for the lock',
  async (t) => {
    const { open, plain } = fileOf(t)
    const other = plain()
    other.exec('BEGIN EXCLUSIVE')
    // 50 × (20 + 5) = 1250: passed by the fourth look after the first one.
    const looks = await looksAt(400, () => t.rejects(open({ busyMs: 5 }), { message: /locked/ }))
    t.equal(looks, 5)
  },
)

void t.test('any other failure is no reason to wait', async (t) => {
  const { open, plain } = fileOf(t)
  plain().exec('CREATE TABLE orders (id)')
  t.equal(await looksAt(1, () => t.rejects(open(), /another program/)), 1)
})

void t.test('the file grows up to the given number of pages', async (t) => {
  const { open } = fileOf(t)
  t.equal(pragma(await open({ maxPages: 40 }), 'max_page_count'), 40)
  const unbounded = pragma(await open(), 'max_page_count') as number
  t.ok(unbounded > 1e9)
})

void t.test('the primary result code is the last byte of SQLite’s', (t) => {
  const [BUSY_RECOVERY, IOERR_FSYNC, LOCKED] = [261, 1034, 6] as const
  const of = (errcode: number) => resultCode(Object.assign(new Error('because'), { errcode }))
  t.same([of(BUSY_RECOVERY), of(IOERR_FSYNC), of(LOCKED)], [5, 10, 6])
  t.equal(resultCode(new Error('of another kind')), 0)
  t.end()
})

/* The journal. */

/** The journals of two processes on one file. */
function two(t: Test) {
  const dir = tempDir()
  const all = [1, 2].map(() => {
    const db = new DatabaseSync(join(dir.path, 'j.db'))
    db.exec('PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF')
    db.exec(CREATE_JOURNAL.replace('TABLE', 'TABLE IF NOT EXISTS'))
    return { db, journal: new Journal(db, 'pay') }
  })
  t.teardown(() => {
    for (const { db } of all) db.close()
    dir[Symbol.dispose]()
  })
  return all as [One, One]
}
interface One {
  readonly db: DatabaseSync
  readonly journal: Journal
}

function contentsOf(journal: Journal) {
  return Object.fromEntries([...journal.records()].map(([id, bytes]) => [id, bytes.toString()]))
}

function transaction({ db, journal }: One, body: (journal: Journal) => void, end = 'COMMIT'): void {
  db.exec('BEGIN IMMEDIATE')
  journal.refresh()
  body(journal)
  if (end === 'COMMIT') journal.write()
  db.exec(end)
  if (end === 'ROLLBACK') journal.rollback()
}

void t.test('after a COMMIT with an unknown outcome the file decides', async (t) => {
  const [one, peer] = two(t)
  transaction(one, (journal) => void journal.set('a', Buffer.from('before')))
  one.db.exec('BEGIN IMMEDIATE')
  one.journal.refresh()
  one.journal.set('a', Buffer.from('after'))
  one.journal.write()
  one.db.exec('COMMIT')
  one.journal.rollback()
  transaction(one, (journal) => t.same(contentsOf(journal), { a: 'after' }))

  one.db.exec('BEGIN IMMEDIATE')
  one.journal.refresh()
  one.journal.take()
  one.db.exec('ROLLBACK')
  one.journal.rollback()
  for (const each of [one, peer]) transaction(each, (journal) => t.same(contentsOf(journal), { a: 'after' }))
})

const step = fc.record({
  who: fc.constantFrom(0, 1),
  what: fc.array(
    fc.record({ id: fc.constantFrom('a', 'bb', 'ccc'), length: fc.nat({ max: 4096 }), remove: fc.boolean() }),
    { maxLength: 20, size: 'max' },
  ),
  take: fc.boolean(),
  drop: fc.boolean(),
  end: fc.constantFrom('COMMIT', 'COMMIT', 'ROLLBACK'),
})

void t.test('both processes see exactly what was committed, whatever happened before', async (t) => {
  for (const steps of fc.sample(fc.array(step, { minLength: 4, maxLength: 12, size: 'max' }), 20)) {
    const all = two(t)
    let model = new Map<string, string>()
    for (const { who, what, take, drop, end } of steps) {
      const after = new Map(model)
      let copied: Entry[] = []
      if (drop)
        transaction(all[who], (journal) => void (copied = journal.sorted().filter(([id]) => id === 'a')))
      transaction(
        all[who],
        (journal) => {
          for (const { id, length, remove } of what)
            if (remove) {
              journal.remove(id)
              after.delete(id)
            } else {
              const text = String(length).padEnd(length || 1, '.')
              journal.set(id, Buffer.from(text))
              after.set(id, text)
            }
          if (!take && !drop) return
          journal.write()
          if (!take) {
            if (journal.stillIn(copied).length > 0) after.delete('a')
            return journal.drop(copied)
          }
          const taken = journal.take().map(([id, bytes]) => [id, bytes.toString()])
          t.same(Object.fromEntries(taken), Object.fromEntries(after))
          after.clear()
        },
        end,
      )
      if (end === 'COMMIT') model = after
      for (const each of all)
        transaction(each, (journal) => t.same(contentsOf(journal), Object.fromEntries(model)))
    }
  }
})

void t.test('a full file can be emptied', async (t) => {
  const [one] = two(t)
  const { db } = one
  transaction(one, (journal) => {
    for (let n = 0; n < 100; n++) journal.set(`id ${n}`, Buffer.alloc(3000, 'x'))
  })
  const { page_count: pages } = db.prepare('PRAGMA page_count').get() as { page_count: number }
  db.exec(`PRAGMA max_page_count = ${pages}`)
  const put = () => transaction(one, (journal) => void journal.set('more', Buffer.alloc(4000)))
  t.throws(put, { message: /full/ })
  one.journal.rollback()
  transaction(one, (journal) => t.equal(journal.take().length, 100))
  put()
  transaction(one, (journal) => t.equal(journal.size, 1))
})

void t.test('a transaction that cannot begin changes nothing, even after one that failed', async (t) => {
  const [one] = two(t)
  const { db, journal } = one
  transaction(one, () => void journal.set('a', Buffer.from('kept')))
  db.exec('BEGIN IMMEDIATE')
  journal.refresh()
  journal.set('b', Buffer.from('never committed'))
  journal.set('b', Buffer.from('nor this'))
  db.exec('ROLLBACK')
  journal.rollback()
  // BEGIN IMMEDIATE of the second try: SQLITE_BUSY.
  journal.rollback()
  t.same(contentsOf(journal), { a: 'kept' })
  t.equal(journal.entries, 1)
  transaction(one, () => t.same(contentsOf(journal), { a: 'kept' }))
})

const idOf = (n: number): string =>
  String(n * 7919)
    .padStart(8, '0')
    .slice(-8)

void t.test('any number of records can be in it, and is taken out in the order of ids', async (t) => {
  for (const count of [1, 256, 600]) {
    const [one] = two(t)
    const ids = Array.from({ length: count }, (_, n) => idOf(n))
    transaction(one, (journal) => {
      for (const id of ids) t.ok(journal.set(id, Buffer.from(id)))
      t.same(Object.keys(contentsOf(journal)).toSorted(), ids.toSorted())
      const taken = journal.take()
      t.ok(taken.every(([id, bytes]) => id === String(bytes)))
      t.same(
        taken.map(([id]) => id),
        ids.toSorted(),
      )
    })
  }
})

void t.test('the file has each entry once, and nothing of a transaction that only reads', async (t) => {
  const [one] = two(t)
  const inFile = () => ({
    ...one.db.prepare('SELECT count(*) AS rows, sum(length(entries)) AS bytes FROM journal').get(),
  })
  transaction(one, (journal) => void journal.set('a', Buffer.from('first')))
  transaction(one, (journal) => void journal.set('b', Buffer.from('second')))
  t.same(inFile(), { rows: 2, bytes: one.journal.length })
  transaction(one, (journal) => void journal.get('a'))
  t.same(inFile(), { rows: 2, bytes: one.journal.length })
})

void t.test('an entry is the newest until its id changes, also back to the same record', async (t) => {
  const [one] = two(t)
  const { journal } = one
  const put = (text: string) => void journal.set('a', Buffer.from(text))
  transaction(one, () => put('first'))
  const entries = journal.sorted()
  transaction(one, () => put('second'), 'ROLLBACK')
  t.same(journal.stillIn(entries), [['a', Buffer.from('first')]])
  for (const change of [() => put('first'), () => journal.remove('a'), () => put('first')]) {
    transaction(one, change)
    t.same(journal.stillIn(entries), [])
  }
})

/* Messages. */

/** What arrives at the other end. */
function sent<Message>([message, transfer]: [Message, ArrayBuffer[]]): Message {
  const { port1, port2 } = new MessageChannel()
  port1.postMessage(message, transfer)
  const received = receiveMessageOnPort(port2)?.message as Message
  port1.close()
  return received
}

const id = fc.stringMatching(/^[\w-]{2,43}$/) as fc.Arbitrary<RecordId>
/** On both sides of the size from which a record is sent in memory of its own. */
const bytes = fc.oneof(
  fc.uint8Array({ maxLength: 40, size: 'max' }).map((array) => Buffer.from(array)),
  fc.integer({ min: 4090, max: 6000 }).map((length) => Buffer.alloc(length, String(length))),
)
const span = fc.oneof(fc.nat(), fc.constantFrom(Number.POSITIVE_INFINITY, Number.NaN, -1))
const token = fc
  .uint8Array({ minLength: 16, maxLength: 16 })
  .map((array) => Buffer.from(array).toString('latin1'))
const of = fc.oneof(fc.maxSafeNat(), fc.subarray([...STATES]))
const request = fc.oneof(
  fc.tuple(fc.constant('put' as const), id, bytes, span, span),
  fc.tuple(fc.constant('swap' as const), id, bytes, span, span, fc.boolean(), token, of),
  fc.tuple(fc.constant('get' as const), id),
  fc.tuple(fc.constant('list' as const), fc.string(), fc.string(), fc.nat()),
  fc.constant(['ping'] as const),
) as fc.Arbitrary<Request>

void t.test('requests arrive as they were sent, in order', async (t) => {
  for (const requests of fc.sample(fc.array(request, { maxLength: 40, size: 'max' }), 60)) {
    // The memory of large records is transferred, and lost here.
    const expected = requests.map((each) =>
      each.map((arg) => (Buffer.isBuffer(arg) ? Buffer.from(arg) : arg)),
    )
    t.strictSame(unpack(sent(pack(requests))), expected)
  }
})

/** A large record has memory of its own. */
const alone = fc.oneof(bytes, fc.nat({ max: 20_000 }).map(Buffer.alloc)).map((given) => new Uint8Array(given))
const now = fc.nat({ max: 2 ** 43 })
const result = fc.oneof(
  fc.tuple(now, fc.integer({ min: 1 }), fc.maxSafeNat(), now),
  fc.tuple(now, alone),
  fc.tuple(now, fc.constant(null)),
  fc.array(fc.boolean(), { maxLength: 5 }),
  fc.array(id, { maxLength: 5 }),
  fc.record(
    { message: fc.string(), full: fc.boolean(), maybeApplied: fc.boolean() },
    { noNullPrototype: true },
  ),
  now,
)

/** Bytes as text. */
function plain(results: readonly unknown[]): unknown[] {
  return results.map((each) =>
    Array.isArray(each) && each[1] instanceof Uint8Array
      ? [each[0], Buffer.from(each[1]).toString('hex')]
      : each,
  )
}

void t.test('results arrive as they were sent, in order', async (t) => {
  for (const results of fc.sample(fc.array(result, { maxLength: 40, size: 'max' }), 60)) {
    const expected = plain(results)
    t.strictSame(plain(unpack(sent(pack(results)))), expected)
  }
})

void t.test('a large record that has memory of its own takes that along; any other is copied', async (t) => {
  const filled = (length: number): Buffer => Buffer.from(new ArrayBuffer(length)).fill('x')
  const spare = SMALL_RECORD + 1 + HEAD_ROOM
  for (const [bytes, isAlone] of [
    [filled(SMALL_RECORD), false],
    [filled(SMALL_RECORD + 1), true],
    [filled(spare).subarray(0, SMALL_RECORD + 1), true],
    [filled(spare + 1).subarray(0, SMALL_RECORD + 1), false],
    [filled(spare).subarray(1), false],
  ] as const) {
    const { buffer, length } = bytes
    const [message, transfer] = pack([['put', newId(), bytes, 1, 2], ['ping']])
    t.same(message.large.length, isAlone ? 1 : 0)
    t.ok(message.large.every((memory) => memory === buffer))
    t.ok(transfer.length === 1 + message.large.length && transfer[0] === message.memory)
    const [put] = unpack(sent([message, transfer])) as [Request]
    t.same(put.slice(2), [Buffer.alloc(length, 'x'), 1, 2])
    t.equal(bytes.length, isAlone ? 0 : length)
    t.equal(message.memory.byteLength, 0, 'so is the memory of the message')
  }
})
