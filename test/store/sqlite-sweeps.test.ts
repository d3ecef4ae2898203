import t from 'tap'
import type { RecordId, Spans } from '../../src/core/record.ts'
import type { SqliteStore } from '../../src/store/sqlite/store.ts'
import { bytesOf, HOUR, MINUTE, newToken, SPANS } from './fixtures.ts'
import { fileInProcess, inProcess, NOW } from './sqlite-in-process.ts'

/* What the thread does between operations: removes what has expired, and moves records from the journal to the table. */

const PRUNE_ROWS = 500
const SLICE = 500
const NOTE = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }

/** In order of ids, and so in that of the table. */
function idsOf(count: number, from = 0): RecordId[] {
  return Array.from({ length: count }, (_, n) => String(from + n).padStart(5, '0') as RecordId)
}

async function putAll(register: SqliteStore, ids: readonly RecordId[], spans: Spans = SPANS): Promise<void> {
  const bytes = bytesOf('completed', newToken())
  const replies = await Promise.all(ids.map(async (id) => register.put(id, bytes, spans)))
  if (!replies.every((reply) => reply.done)) throw new Error('one exists')
}

void t.test('expired records are removed five hundred at a time, and counted', async (t) => {
  const { rows, register, thread, pruned, move } = await inProcess(t)
  const left = () => rows('SELECT id FROM records').length
  t.equal(thread.timer?.ms, 1000)
  await putAll(register, idsOf(2 * PRUNE_ROWS + 1), { dueIn: 1, dropIn: HOUR })
  await putAll(register, idsOf(1, 9000), { dueIn: 1, dropIn: HOUR + 1 })
  await move()
  t.equal(left(), 2 * PRUNE_ROWS + 2)
  register.skew = HOUR - 1
  thread.sweep()
  t.equal(left(), 2 * PRUNE_ROWS + 2)
  t.equal(thread.timer?.ms, 1000)
  register.skew = HOUR
  for (const [more, ms] of [
    [PRUNE_ROWS + 2, 0],
    [2, 0],
    [1, 1000],
    [1, 1000],
  ]) {
    thread.sweep()
    t.equal(left(), more)
    t.equal(thread.timer?.ms, ms, 'it goes on at once while there may be more')
  }
  await register.ping()
  t.same(pruned, [PRUNE_ROWS, PRUNE_ROWS, 1])
})

void t.test('buckets that are full again are removed likewise, and not counted', async (t) => {
  const { rows, register, thread, pruned } = await inProcess(t)
  const left = () => rows('SELECT id FROM buckets').length
  const rate = { count: 1, per: HOUR }
  const names = idsOf(PRUNE_ROWS + 1)
  await Promise.all(names.map((name) => register.limits.take(name, rate, 1)))
  register.skew = HOUR - 1
  thread.sweep()
  t.equal(left(), PRUNE_ROWS + 1)
  t.equal(thread.timer?.ms, 1000)
  register.skew = HOUR
  thread.sweep()
  t.equal(left(), 1)
  t.equal(thread.timer?.ms, 0)
  thread.sweep()
  t.equal(left(), 0)
  t.equal(thread.timer?.ms, 1000)
  await register.ping()
  t.same(pruned, [])
})

void t.test('records of another service are removed a minute after they have expired', async (t) => {
  const { open, rows } = fileInProcess(t)
  const other = await open({ service: 'pay.eu' })
  await putAll(other.register, idsOf(2), { dueIn: 1, dropIn: HOUR })
  await other.register.close()
  const { register, thread, pruned } = await open()
  register.skew = HOUR + MINUTE - 1
  thread.sweep()
  t.equal(rows('SELECT id FROM records').length, 2)
  register.skew = HOUR + MINUTE
  thread.sweep()
  t.equal(rows('SELECT id FROM records').length, 0)
  await register.ping()
  t.same(pruned, [2])
})

void t.test('an expired record whose newer version is in the journal keeps its history', async (t) => {
  const { rows, register, thread, move } = await inProcess(t)
  const [id, gone] = idsOf(2) as [RecordId, RecordId]
  await putAll(register, [id, gone], { dueIn: 1, dropIn: HOUR })
  await move()
  await register.swap(id, { version: NOW }, bytesOf('completed', newToken()), SPANS, false)
  for (const each of [id, gone]) await register.history.append(each, [NOTE])
  register.skew = HOUR
  thread.sweep()
  t.same(rows('SELECT id FROM records'), [{ id }])
  t.same(rows('SELECT id FROM notes'), [{ id }])
})

void t.test('a sweep of a locked file changes nothing, and the next one does its work', async (t) => {
  const { open, rows, db } = await existing()
  const { register, thread, pruned } = await open()
  register.skew = HOUR
  db.exec('BEGIN IMMEDIATE')
  thread.sweep()
  t.equal(thread.timer?.ms, 1000)
  t.equal(rows('SELECT id FROM records').length, PRUNE_ROWS)
  db.exec('COMMIT')
  thread.sweep()
  t.equal(thread.timer?.ms, 0)
  t.equal(rows('SELECT id FROM records').length, 0)
  await register.ping()
  t.same(pruned, [PRUNE_ROWS])

  async function existing() {
    const found = fileInProcess(t)
    const first = await found.open()
    await putAll(first.register, idsOf(PRUNE_ROWS), { dueIn: 1, dropIn: HOUR })
    await first.register.close()
    return found
  }
})

void t.test('a move keeps what changes meanwhile, and goes faster while much is written', async (t) => {
  const { rows, register, thread } = await inProcess(t)
  const ids = idsOf(4 * SLICE)
  await putAll(register, ids)
  for (let n = 0; n < 2; n++) thread.sweep()
  thread.slice()
  const inTable = () => rows('SELECT id FROM records').length
  t.equal(inTable(), SLICE)
  const [changed, removed, later] = [ids[3], ids[4], ids[4 * SLICE - 1]] as [RecordId, RecordId, RecordId]
  await register.swap(changed, { version: NOW }, bytesOf('unknown', newToken()), SPANS, false)
  t.ok(await register.remove(removed, NOW))
  t.equal(inTable(), SLICE - 1)
  thread.slice()
  t.equal(inTable(), 2 * SLICE - 1)
  await putAll(register, idsOf(399, 5000))
  t.ok(await register.remove(later, NOW))
  thread.slice()
  t.equal(inTable(), 2 * SLICE - 1 + 800, 'twice what was written')
  thread.slice()
  t.equal(inTable(), 4 * SLICE - 2)
  t.not(thread.immediate, null)
  thread.slice()
  t.equal(thread.immediate, null)
  t.equal(inTable(), 4 * SLICE - 2)
  const left = ids.filter((id) => id !== removed && id !== later)
  t.same((await register.list('all', null, 3000)).ids, [...left, ...idsOf(399, 5000)])
  t.same((await register.list('unresolved', null, 10)).ids, [changed])
  for (let n = 0; n < 2; n++) thread.sweep()
  while (thread.immediate !== null) thread.slice()
  t.equal(inTable(), 4 * SLICE - 2 + 399)
})

void t.test('a record that has expired in the journal is dropped by a move, and counted', async (t) => {
  const { rows, register, pruned, move } = await inProcess(t)
  const [old, gone, kept] = idsOf(3) as [RecordId, RecordId, RecordId]
  await putAll(register, [old])
  await move()
  const spans = { dueIn: 1, dropIn: HOUR }
  await register.swap(old, { version: NOW }, bytesOf('completed', newToken()), spans, false)
  await putAll(register, [gone], spans)
  await putAll(register, [kept], { dueIn: 1, dropIn: HOUR + 1 })
  for (const each of [old, gone, kept]) await register.history.append(each, [NOTE])
  register.skew = HOUR
  await move()
  t.same(rows('SELECT id FROM records'), [{ id: kept }])
  t.same(rows('SELECT id FROM notes'), [{ id: kept }])
  t.same(pruned, [2])
})

void t.test('a move that finds the file locked is done whole by the next sweep', async (t) => {
  const { rows, db, register, thread } = await inProcess(t)
  const ids = idsOf(3 * SLICE)
  await putAll(register, ids)
  for (let n = 0; n < 2; n++) thread.sweep()
  thread.slice()
  db.exec('BEGIN IMMEDIATE')
  thread.slice()
  t.equal(thread.immediate, null)
  db.exec('COMMIT')
  t.equal(rows('SELECT id FROM records').length, SLICE)
  thread.sweep()
  t.equal(thread.immediate, null)
  t.equal(rows('SELECT id FROM records').length, 3 * SLICE)
  t.same(rows('SELECT sum(length(entries)) AS n FROM journal'), [{ n: 0 }])
  await putAll(register, idsOf(1, 9000))
  for (let n = 0; n < 2; n++) thread.sweep()
  t.not(thread.immediate, null, 'the next move is in slices again')
})

void t.test('what other processes have written is moved, too', async (t) => {
  const { open, rows, thread } = await inProcess(t)
  const peer = await open()
  await putAll(peer.register, idsOf(1))
  thread.sweep()
  t.equal(thread.immediate, null, 'they may just have been written')
  thread.sweep()
  while (thread.immediate !== null) thread.slice()
  t.equal(rows('SELECT id FROM records').length, 1)
  t.equal((await peer.register.list('all', null, 10)).ids.length, 1)
})

void t.test('a journal of eight MiB is moved without waiting', async (t) => {
  const { db, register, thread } = await inProcess(t)
  const [LENGTHS, ID] = [5, 5] as const
  const put = async (ids: RecordId[], length: number) => {
    const bytes = Buffer.alloc(length - LENGTHS - ID, 1)
    await Promise.all(ids.map(async (id) => register.put(id, bytes, SPANS)))
  }
  await put(idsOf(2047), 4096)
  await put(idsOf(1, 9000), 4096 - 100)
  t.equal(thread.immediate, null)
  await put(idsOf(1, 9001), 100)
  t.not(thread.immediate, null)
  db.exec('BEGIN IMMEDIATE')
  thread.slice()
  t.equal(thread.immediate, null)
  db.exec('COMMIT')
  await put(idsOf(1, 9002), 100)
  t.equal(thread.immediate, null, 'not before the next sweep')
  thread.sweep()
  await put(idsOf(1, 9003), 100)
  t.not(thread.immediate, null)
})
