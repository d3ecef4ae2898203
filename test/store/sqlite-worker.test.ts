import t, { type Test } from 'tap'
import type { RecordId, Spans, State } from '../../src/core/record.ts'
import type { MaybePromise } from '../../src/runtime/scheduling.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import type { Store } from '../../src/store/register.ts'
import type { SqliteStore } from '../../src/store/sqlite/store.ts'
import { registerContract } from './contract.ts'
import { exactContract } from './exact.ts'
import { bytesOf, HOUR, newId, newToken, response, SPANS } from './fixtures.ts'
import { fileInProcess, inProcess, NOW } from './sqlite-in-process.ts'

/* Where a record is, in the journal or in the table, makes no difference to any operation. The clock stands still at NOW. */

/** After each write the store moves it to the table, so that all is read and written there. */
function inTable({ register, move }: Awaited<ReturnType<typeof inProcess>>): Store {
  let moving: Promise<unknown> = Promise.resolve()
  const moved = async <Reply>(write: MaybePromise<Reply>): Promise<Reply> => {
    const reply = await write
    await (moving = moving.then(move))
    return reply
  }
  return {
    ...register,
    put: (...args) => moved(register.put(...args)),
    swap: (...args) => moved(register.swap(...args)),
    renew: (...args) => moved(register.renew(...args)),
    remove: (...args) => moved(register.remove(...args)),
  }
}

void t.test('what every store promises, of records that are in the table', async (t) => {
  registerContract(t, 'sqlite', async () => {
    const file = fileInProcess(t)
    const [own, theirs] = [await file.open(), await file.open({ service: 'pay.eu' })]
    const register = inTable({ ...file, ...own })
    let skew = 0
    return {
      register,
      peer: register,
      other: inTable({ ...file, ...theirs }),
      tellsPeers: true,
      advance: (ms) => void (own.register.skew = theirs.register.skew = skew += ms),
      [Symbol.asyncDispose]: async () =>
        void (await Promise.all([own.register.close(), theirs.register.close()])),
    }
  })
})

t.setTimeout(200_000)

for (const where of ['journal', 'table'])
  exactContract(t, `sqlite, ${where}`, async () => {
    const file = fileInProcess(t)
    const { register, move } = await file.open()
    let skew = 0
    return {
      register,
      advance: (ms) => void (register.skew = skew += ms),
      settle: where === 'table' ? move : async () => {},
      [Symbol.asyncDispose]: () => register.close(),
    }
  })

const NOTE = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }
const id = (text: string): RecordId => text as RecordId

async function put(register: SqliteStore, at: RecordId, state: State, spans: Spans = SPANS): Promise<Buffer> {
  const token = newToken()
  const reply = await register.put(at, bytesOf(state, token), spans)
  if (!reply.done) throw new Error('it exists')
  return token
}

void t.test('the newest version of a record is the one that counts', async (t) => {
  const { rows, register, move } = await inProcess(t)
  const ids = ['a', 'b', 'c', 'd'].map(id) as [RecordId, RecordId, RecordId, RecordId]
  const spans = { dueIn: 10, dropIn: HOUR }
  for (const each of ids) await put(register, each, 'in_progress', spans)
  await move()
  const later = { dueIn: 20, dropIn: HOUR }
  await register.swap(ids[0], { version: NOW }, bytesOf('unknown', newToken()), later, false)
  await register.swap(ids[1], { version: NOW }, bytesOf('completed', newToken()), later, false)
  t.equal(await register.remove(ids[2], NOW), true)
  register.skew = 10
  t.same(await register.due(1), ['d'])
  t.same(await register.due(2), ['d'])
  t.same((await register.list('all', null, 2)).ids, ['a', 'b'])
  t.same((await register.list('all', null, 10)).ids, ['a', 'b', 'd'])
  t.same((await register.list('unresolved', null, 10)).ids, ['d', 'a'])
  register.skew = 20
  t.same(await register.due(10), ['d', 'a'])
  await move()
  t.same(await register.due(10), ['d', 'a'])
  t.equal(rows('SELECT id FROM records').length, 3, 'one row each')
})

void t.test('a large record is in the table at once, whatever was in the journal', async (t) => {
  const { rows, register } = await inProcess(t)
  const record = newId()
  const large = () => bytesOf('unknown', newToken(), { lastError: 'x'.repeat(5000) })
  await put(register, record, 'in_progress')
  t.same(rows('SELECT 1 FROM records'), [])
  for (const version of [NOW, NOW + 1]) {
    t.ok((await register.swap(record, { version }, large(), { dueIn: 5, dropIn: HOUR }, false)).done)
    t.same(rows('SELECT id, service, unresolved, due, drop_at FROM records'), [
      { id: record, service: 'pay', unresolved: 1, due: NOW + 5, drop_at: NOW + HOUR },
    ])
    t.equal(decodeRecord((await register.get(record)).bytes as Buffer).version, version + 1)
    t.same((await register.list('all', null, 10)).ids, [record])
  }
  const kept = bytesOf('completed', newToken(), { result: response(Buffer.alloc(5000)) })
  await register.swap(record, { version: NOW + 2 }, kept, { dueIn: 7, dropIn: HOUR }, false)
  t.same(rows('SELECT unresolved, due FROM records'), [{ unresolved: 0, due: NOW + 7 }])
})

void t.test('every process can read a record that outgrows the journal and shrinks again', async (t) => {
  const { open } = fileInProcess(t)
  const [{ register }, { register: peer }] = [await open(), await open()]
  const id = newId()
  const token = newToken()
  const large = bytesOf('unknown', token, { lastError: 'x'.repeat(5000) })
  const small = bytesOf('unknown', token)
  const put = await register.put(id, bytesOf('in_progress', token), SPANS)
  let version = put.done ? put.stamp.version : 0
  const replace = async (by: SqliteStore, bytes: Buffer) => {
    const swap = await by.swap(id, { version }, bytes, SPANS, false)
    if (swap.done) version = swap.stamp.version
    return swap.done
  }
  for (const [by, bytes] of [
    [peer, large],
    [register, small],
    [register, large],
    [register, large],
    [peer, small],
  ] as const) {
    t.ok(await replace(by, bytes))
    for (const each of [register, peer]) {
      const found = (await each.get(id)).bytes as Buffer
      t.equal(found.length, bytes.length)
      t.equal(decodeRecord(found).version, version)
      t.same((await each.list('all', null, 10)).ids, [id])
    }
  }
  t.equal(await register.remove(id, version), true)
  for (const each of [peer, register]) t.equal((await each.get(id)).bytes, null)
  t.ok((await peer.put(id, small, SPANS)).done)
})

void t.test('bytes that are no record are kept, and have no history', async (t) => {
  const { open, db } = await begun(t)
  const { register } = await open()
  const insert = db.prepare(
    `INSERT INTO records (key, service, id, unresolved, due, drop_at, bytes)
     SELECT key, service, id, unresolved, due, drop_at + 1000000000, ? FROM records`,
  )
  insert.run(Buffer.alloc(55, 1))
  db.exec('DELETE FROM records WHERE length(bytes) <> 55')
  const { bytes } = await register.get(id('short'))
  t.same(bytes, Buffer.alloc(55, 1))
  t.equal(await register.history.append(id('short'), [NOTE]), false)
  t.same(await register.history.read(id('short')), [])
  db.prepare('UPDATE records SET bytes = ?').run(Buffer.alloc(56, 1))
  t.equal(await register.history.append(id('short'), [NOTE]), true, 'these may be a later release’s')
})

/** A file with one record in its table. */
async function begun(t: Test) {
  const found = fileInProcess(t)
  const { register } = await found.open()
  await put(register, id('short'), 'completed')
  await register.close()
  return found
}

void t.test('the number by which a record is found never changes', async (t) => {
  const { rows, register, move } = await inProcess(t)
  for (const each of ['aB-_9xyz', 'abc', 'abcde']) await put(register, id(each), 'completed')
  await move()
  t.same(rows('SELECT id, key FROM records ORDER BY id'), [
    { id: 'aB-_9xyz', key: 81012080734137 },
    { id: 'abc', key: 81012148715520 },
    { id: 'abcde', key: 81012148728421 },
  ])
})

void t.test('records whose ids begin alike are told apart', async (t) => {
  const { register, move } = await inProcess(t)
  await put(register, id('abcde-1'), 'in_progress')
  await move()
  t.equal((await register.get(id('abcde-2'))).bytes, null)
  t.same(await register.renew([{ id: id('abcde-2'), token: newToken(), ...SPANS }]), [false])
  await put(register, id('abcde-2'), 'completed')
  await move()
  for (const [each, state] of [
    ['abcde-1', 'in_progress'],
    ['abcde-2', 'completed'],
  ] as const)
    t.equal(decodeRecord((await register.get(id(each))).bytes as Buffer).state, state)
})
