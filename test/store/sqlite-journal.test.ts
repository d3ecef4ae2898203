import assert from 'node:assert/strict'
import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import fc from 'fast-check'
import t, { type Test } from 'tap'
import { STATES, type State, UNRESOLVED } from '../../src/core/record.ts'
import { PREFIX, stateCode } from '../../src/store/codec.ts'
import { CREATE_JOURNAL, Journal } from '../../src/store/sqlite-journal.ts'
import { tempDir } from './fixtures.ts'

/** Three connections to one file, the third for another service. */
function two(t: Test) {
  const dir = tempDir()
  const all = ['pay', 'pay', 'other'].map((service) => {
    const db = new DatabaseSync(join(dir.path, 'j.db'))
    db.exec('PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF')
    if (service === 'pay') db.exec(CREATE_JOURNAL.replace('TABLE', 'TABLE IF NOT EXISTS'))
    return { db, journal: new Journal(db, service, 1024) }
  })
  t.teardown(() => {
    for (const { db } of all) db.close()
    dir[Symbol.dispose]()
  })
  return all as [One, One, One]
}
interface One {
  readonly db: DatabaseSync
  readonly journal: Journal
}

function contentsOf(journal: Journal) {
  return Object.fromEntries(
    [...journal.records()].map(([slot, bytes]) => [journal.idIn(slot), bytes.toString()]),
  )
}

void t.test('records() can be limited to some states', async (t) => {
  const [{ db, journal }] = two(t)
  const record = (state: State): Buffer => {
    const bytes = Buffer.alloc(PREFIX.end)
    bytes[PREFIX.state] = stateCode(state)
    return bytes
  }
  transaction({ db, journal }, () => {
    for (const state of STATES) journal.set(state, record(state))
  })
  const idsIn = (...states: State[]) => [...journal.records(states)].map(([slot]) => journal.idIn(slot))
  t.same(idsIn('completed'), ['completed'])
  t.same(idsIn(...UNRESOLVED).sort(), ['in_progress', 'unknown'])
  t.equal([...journal.records()].length, STATES.length)
})

/** The places of the wanted records, as a move notes them. */
function copy(journal: Journal, wanted: (id: string) => boolean): Float64Array {
  const places = new Float64Array(10)
  for (const slot of journal.slots()) {
    const { id, place } = journal.at(slot) ?? assert.fail()
    if (wanted(id)) places[slot] = place
  }
  return places
}

function transaction({ db, journal }: One, body: (journal: Journal) => void, end = 'COMMIT'): void {
  db.exec('BEGIN IMMEDIATE')
  journal.refresh()
  body(journal)
  if (end === 'COMMIT') journal.write()
  db.exec(end)
  if (end === 'ROLLBACK') journal.rollback()
}

void t.test('one process reads what the other writes; a service reads only its own records', async (t) => {
  const [one, peer, other] = two(t)
  transaction(one, (journal) => {
    t.ok(journal.set('a', Buffer.from('first')))
    t.ok(journal.set('a', Buffer.from('second')))
    t.ok(journal.set('b', Buffer.from('kept')))
    t.notOk(journal.set('c', Buffer.alloc(4097)), 'too large')
  })
  transaction(other, (journal) => void journal.set('a', Buffer.from('theirs')))
  transaction(peer, (journal) => {
    t.same(contentsOf(journal), { a: 'second', b: 'kept' })
    t.equal(journal.entries, 3)
    t.equal(journal.size, 2)
    journal.remove('a')
    journal.remove('never there')
  })
  transaction(one, (journal) => {
    t.same(contentsOf(journal), { b: 'kept' })
    t.equal(journal.get('a'), undefined)
    t.ok(journal.has('b'))
    t.same(
      journal.take().map(([id]) => id),
      ['b'],
    )
  })
  transaction(peer, (journal) => {
    t.same(contentsOf(journal), {})
    t.equal(journal.entries, 0)
  })
  transaction(other, (journal) => t.same(contentsOf(journal), { a: 'theirs' }))
})

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

void t.test('drop keeps records that changed after they were copied', async (t) => {
  const [one, peer] = two(t)
  transaction(one, (journal) => {
    for (const id of ['b', 'a', 'gone']) journal.set(id, Buffer.from('first'))
    t.same(
      journal.slots().map((slot) => journal.at(slot)?.id),
      ['a', 'b', 'gone'],
    )
    t.ok(journal.length > 15)
  })
  let copied: Float64Array = new Float64Array()
  transaction(one, (journal) => {
    copied = copy(journal, () => true)
    t.equal(journal.at(3), null, 'the slot was never used')
  })
  transaction(peer, (journal) => {
    journal.set('b', Buffer.from('later'))
    journal.remove('gone')
    journal.set('c', Buffer.from('new'))
  })
  transaction(one, (journal) => journal.drop(copied), 'ROLLBACK')
  for (const each of [one, peer])
    transaction(each, (journal) => t.same(contentsOf(journal), { a: 'first', b: 'later', c: 'new' }))
  // Everything was read again, so what was copied is no longer known.
  transaction(one, (journal) => journal.drop(copied))
  transaction(one, (journal) => {
    t.same(contentsOf(journal), { a: 'first', b: 'later', c: 'new' })
    copied = copy(journal, (id) => id === 'a')
  })
  transaction(one, (journal) => journal.drop(copied))
  for (const each of [one, peer])
    transaction(each, (journal) => {
      t.same(contentsOf(journal), { b: 'later', c: 'new' })
      t.equal(journal.entries, 2)
    })
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
  for (const steps of fc.sample(fc.array(step, { minLength: 4, maxLength: 12, size: 'max' }), 40)) {
    const all = two(t)
    let model = new Map<string, string>()
    for (const { who, what, take, drop, end } of steps) {
      const after = new Map(model)
      let copied: Float64Array = new Float64Array()
      if (drop) transaction(all[who], (journal) => void (copied = copy(journal, (id) => id === 'a')))
      const isAsCopied = (journal: Journal): boolean =>
        copy(journal, (id) => id === 'a').some((place, slot) => place !== 0 && place === copied[slot])
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
            if (isAsCopied(journal)) after.delete('a')
            return journal.drop(copied)
          }
          const taken = journal.take().map(([id, bytes]) => [id, bytes.toString()])
          t.same(Object.fromEntries(taken), Object.fromEntries(after))
          after.clear()
        },
        end,
      )
      if (end === 'COMMIT') model = after
      for (const each of all.slice(0, 2))
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
  for (const count of [255, 256, 257, 600]) {
    const [one] = two(t)
    const ids = Array.from({ length: count }, (_, n) => idOf(n))
    transaction(one, (journal) => {
      for (const id of ids) t.ok(journal.set(id, Buffer.from(id)))
      t.equal(journal.slots().length, count)
      t.same(Object.keys(contentsOf(journal)).toSorted(), ids.toSorted())
      for (const slot of [count, 700, 5000]) t.equal(journal.at(slot), null, 'no other slot is used')
      const taken = journal.take()
      t.ok(taken.every(([id, bytes]) => id === String(bytes)))
      t.same(
        taken.map(([id]) => id),
        ids.toSorted(),
      )
    })
  }
})

void t.test('it has what was set last, up to the size of a small record', async (t) => {
  const [one] = two(t)
  transaction(one, (journal) => {
    t.equal(journal.get('a'), undefined)
    t.ok(journal.set('a', Buffer.from('first')))
    t.equal(String(journal.get('a')), 'first')
    t.ok(journal.set('a', Buffer.alloc(4096, 'x')))
    t.equal(journal.get('a')?.length, 4096)
    const [slot] = journal.slots()
    const { entries, length } = journal
    journal.remove('never there')
    t.same([journal.entries, journal.length], [entries, length])
    journal.remove('a')
    t.equal(journal.at(slot as number), null)
    t.equal(journal.get('a'), undefined)
  })
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

void t.test('the first entries of a file can be written again after a COMMIT that failed', async (t) => {
  const [one, peer] = two(t)
  one.db.exec('BEGIN IMMEDIATE')
  one.journal.refresh()
  one.journal.set('a', Buffer.from('never committed'))
  one.journal.write()
  one.db.exec('ROLLBACK')
  one.journal.rollback()
  transaction(one, (journal) => void journal.set('b', Buffer.from('kept')))
  for (const each of [one, peer]) transaction(each, (journal) => t.same(contentsOf(journal), { b: 'kept' }))
})

void t.test('no two entries ever have the same place', async (t) => {
  const [one] = two(t)
  const places: number[] = []
  for (let round = 1; round < 6; round++)
    transaction(one, (journal) => {
      for (let n = 0; n < 3 * round; n++) journal.set(idOf(n), Buffer.alloc(10, 'x'))
      for (const slot of journal.slots()) places.push(journal.at(slot)?.place ?? 0)
      journal.write()
      journal.take()
    })
  t.equal(new Set([0, ...places]).size, 1 + places.length)
})
