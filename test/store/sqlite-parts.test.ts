import { existsSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import fc from 'fast-check'
import t, { type Test } from 'tap'
import { type FileOptions, openPatiently } from '../../src/store/sqlite/file.ts'
import { CREATE_JOURNAL, type Entry, Journal } from '../../src/store/sqlite/journal.ts'
import { tempDir } from './fixtures.ts'

/* The parts of the SQLite store: its file and its journal. */

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

const NAMES =
  'buckets buckets_full_at journal notes notes_go_with_the_record records records_drop_at records_key records_unresolved'.split(
    ' ',
  )

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

void t.test('what is not a store of this release is refused at once, and left as it is', async (t) => {
  for (const [sql, message] of [
    ['PRAGMA user_version = 4', 'it has schema version 4, of a later release; this one reads 3'],
    [
      'CREATE TABLE a (b); PRAGMA user_version = 7',
      'it has schema version 7, of a later release; this one reads 3',
    ],
    [
      'CREATE TABLE records (service TEXT, id TEXT, PRIMARY KEY (service, id)); PRAGMA user_version = 2',
      'it is the database of another program',
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

void t.test('a file that stays locked fails after fifty times an operation’s wait', async (t) => {
  const { open, plain } = fileOf(t)
  const other = plain()
  other.exec('BEGIN EXCLUSIVE')
  // 50 × (20 + 5) = 1250: passed by the fourth look after the first one.
  const looks = await looksAt(400, () => t.rejects(open({ busyMs: 5 }), { message: /locked/ }))
  t.equal(looks, 5)
})

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
