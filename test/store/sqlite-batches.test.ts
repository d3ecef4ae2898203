import { existsSync } from 'node:fs'
import { DatabaseSync } from 'node:sqlite'
import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { pack, type Request } from '../../src/store/sqlite/messages.ts'
import type { Message, WorkerOptions } from '../../src/store/sqlite/store.ts'
import { bytesOf, HOUR, newId, newToken, SPANS, until } from './fixtures.ts'
import { fileInProcess, InProcess, NOW } from './sqlite-in-process.ts'

/* How the thread's operations share transactions, and what fails with what. The tests speak with it in messages. */

const BATCH = 256
const URL_ = new URL('../../src/store/sqlite/worker.ts', import.meta.url)

/** The thread without its owner. */
async function bare(t: Test, over: Partial<WorkerOptions> = {}) {
  const { file, rows, db } = fileOf(t)
  const workerData = { file, service: 'pay', busyMs: 0, maxPages: 0, skew: new Float64Array(1), ...over }
  const thread = new InProcess(URL_, { workerData })
  const answers: unknown[][] = []
  const others: Message[] = []
  let isGone = false
  thread.on('message', (message: Message) => {
    if ('memory' in message) answers.push([...message.messages])
    else others.push(message)
  })
  thread.on('exit', () => (isGone = true))
  t.teardown(() => thread.terminate())
  const gone = () => until(() => isGone)
  await until(() => isGone || others.length > 0)
  return {
    file,
    rows,
    db,
    thread,
    answers,
    others,
    gone,
    workerData,
    send: (...requests: Request[]) => thread.postMessage(...pack(requests)),
    async ask(...requests: Request[]): Promise<unknown[]> {
      const before = answers.length
      thread.postMessage(...pack(requests))
      await until(() => answers.length > before)
      return answers.at(-1) as unknown[]
    },
  }
}

function fileOf(t: Test) {
  const { file, rows, db } = fileInProcess(t)
  return { file, rows, db }
}

function put(id: RecordId = newId(), dropIn = SPANS.dropIn): Request {
  return ['put', id, bytesOf('in_progress', newToken()), HOUR, dropIn]
}

const WRITTEN = [NOW, NOW, NOW, NOW]
const transactions = (rows: (sql: string) => unknown[]) => rows('SELECT row FROM journal').length

void t.test('up to 256 operations are one transaction, in however many messages', async (t) => {
  const { rows, ask, send, answers } = await bare(t)
  const puts = (count: number) => Array.from({ length: count }, () => put())
  t.equal((await ask(...puts(BATCH))).length, BATCH)
  t.equal(transactions(rows), 1)
  t.equal((await ask(...puts(BATCH + 1))).length, BATCH + 1)
  t.equal(transactions(rows), 3)
  for (const count of [1, BATCH - 2, 2, 3]) send(...puts(count))
  await until(() => answers.length === 4)
  t.same(
    answers.slice(2).map((each) => each.length),
    [BATCH + 1, 3],
    'no more messages are taken once there are enough for a batch',
  )
  for (const result of answers.flat()) t.same(result, WRITTEN)
  t.equal(transactions(rows), 6)
})

void t.test('reads are answered while another process locks the file; no write is applied', async (t) => {
  const { db, ask, rows } = await bare(t)
  const id = newId()
  await ask(put(id), ['note', id, [{ tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }]])
  db.exec('BEGIN IMMEDIATE')
  const locked = { message: 'SQLite: database is locked', full: false, maybeApplied: false }
  t.equal(((await ask(['get', id]))[0] as unknown[])[0], NOW)
  t.same(await ask(['due', 10, 'unresolved']), [[]])
  t.same(await ask(['list', '', '', 10]), [[id]])
  t.same(await ask(['unresolved', { due: 0, id: '' }, 10]), [[{ due: NOW + HOUR, id }]])
  t.same(await ask(['notes', id]), [[`a 1 ${NOW} ${NOW} {}`]])
  t.same(await ask(['ping']), [NOW])
  for (const write of [
    put(),
    ['swap', id, bytesOf('completed', newToken()), 1, 2, false, '', NOW],
    ['renew', []],
    ['remove', id, NOW],
    ['note', id, []],
    ['throttle', 'x', { count: 1, per: 5 }, 1],
  ] as Request[])
    t.same(await ask(write), [locked], write[0])
  db.exec('ROLLBACK')
  t.equal(transactions(rows), 1)
  t.same(await ask(put()), [WRITTEN])
})

/** What SQLite does with a statement, as long as the test lasts. */
function instead(t: Test, sql: string, run: (real: () => unknown) => unknown): void {
  const { prepare } = DatabaseSync.prototype
  DatabaseSync.prototype.prepare = function (this: DatabaseSync, ...args) {
    const statement = prepare.apply(this, args)
    if (args[0] === sql) {
      const real = statement.run.bind(statement)
      statement.run = () => run(real) as ReturnType<typeof real>
    }
    return statement
  }
  t.teardown(() => {
    DatabaseSync.prototype.prepare = prepare
  })
}

function sqliteError(message: string, errcode: number): Error {
  return Object.assign(new Error(message), { errcode })
}

void t.test('what was read stays as it was, whatever another process does before it is sent', async (t) => {
  let between = () => {}
  instead(t, 'COMMIT', (real) => {
    const result = real()
    between()
    return result
  })
  const { ask, db } = await bare(t)
  const [id, other] = [newId(), newId()]
  const bytes = bytesOf('in_progress', newToken())
  await ask(['put', id, Buffer.from(bytes), HOUR, SPANS.dropIn])
  const length = Buffer.alloc(4)
  length.writeUInt32BE(1000)
  const entry = Buffer.concat([Buffer.of(other.length), Buffer.from(other), length, Buffer.alloc(1000, 'x')])
  const replace = db.prepare('UPDATE journal SET row = 100, entries = ?')
  between = () => void replace.run(entry)
  // The second transaction reads the journal again.
  const [found] = await ask(['get', id], ...Array.from({ length: BATCH }, (): Request => ['ping']))
  const [, read] = found as [number, Uint8Array]
  t.ok(bytes.subarray(56).equals(read.subarray(56)))
})

void t.test('an operation that fails fails no other in its transaction', async (t) => {
  const { ask, rows } = await bare(t)
  const [good, bad] = [newId(), newId()]
  const failure = { message: `SQLite: Infinity is not an instant`, full: false, maybeApplied: false }
  t.same(await ask(put(bad, Infinity)), [failure])
  t.same(await ask(put(good), put(bad, Infinity), ['remove', good, NOW]), [WRITTEN, failure, true])
  t.equal(transactions(rows), 2, 'each of the others had one of its own')
  t.same(await ask(put(good), put(bad, Infinity)), [WRITTEN, failure])
  t.same(await ask(['get', bad]), [[NOW, null]])
})

/** Makes as many COMMITs fail as `left` says, for one reason or another; `late`: after they have had their effect. */
function failingCommits(t: Test, { late = false, code = 1034, message = 'disk I/O error' } = {}) {
  const failing = { left: 0 }
  instead(t, 'COMMIT', (real) => {
    const result = late ? real() : null
    if (failing.left-- > 0) throw sqliteError(message, code)
    return late ? result : real()
  })
  return failing
}
const IO_ERROR = { message: 'SQLite: disk I/O error', full: false, maybeApplied: true }

void t.test('a COMMIT that fails before it has any effect leaves nothing behind', async (t) => {
  const failing = failingCommits(t)
  const { ask, rows } = await bare(t)
  const [one, two] = [newId(), newId()]
  failing.left = 1
  t.same(await ask(put(one), put(two)), [IO_ERROR, IO_ERROR], 'none is tried again')
  for (const id of [one, two]) t.same(await ask(['get', id]), [[NOW, null]])
  t.equal(transactions(rows), 0)
  t.same(await ask(put(one)), [WRITTEN])
})

void t.test('a COMMIT that fails and yet has its effect is seen afterwards', async (t) => {
  const failing = failingCommits(t, { late: true })
  const { ask } = await bare(t)
  const id = newId()
  failing.left = 1
  t.same(await ask(put(id)), [IO_ERROR])
  t.same(await ask(['list', '', '', 10]), [[id]])
  t.same(await ask(['remove', id, NOW]), [true])
})

void t.test('a COMMIT for which there is no room is no reason to give up the others', async (t) => {
  const failing = failingCommits(t, { code: 13, message: 'database or disk is full' })
  const { ask } = await bare(t)
  failing.left = 1
  t.same(await ask(put(), put()), [WRITTEN, WRITTEN])
  failing.left = 3
  const full = { message: 'SQLite: database or disk is full', full: true, maybeApplied: false }
  t.same(await ask(put(), put()), [full, full])
})

void t.test('an error in a sweep or a move is no end of the thread', async (t) => {
  const failing = failingCommits(t)
  const { ask, rows, thread, others, workerData } = await bare(t)
  const [lasting, short] = [newId(), newId()]
  await ask(put(lasting), put(short, HOUR))
  workerData.skew[0] = HOUR
  for (let n = 0; n < 2; n++) thread.sweep()
  failing.left = 1
  thread.slice()
  t.equal(thread.immediate, null)
  t.same(rows('SELECT id FROM records'), [])
  failing.left = 1
  thread.sweep()
  t.equal(thread.timer?.ms, 1000)
  while (thread.immediate !== null) thread.slice()
  t.same(rows('SELECT id FROM records'), [{ id: lasting }])
  t.same(await ask(['list', '', '', 10]), [[lasting]])
  t.same(others, [{ opened: true }, { pruned: 1 }])
})

void t.test('a sweep that fails is not repeated at once, however much it would have removed', async (t) => {
  const failing = failingCommits(t)
  const { ask, rows, thread, workerData } = await bare(t)
  const takes = Array.from({ length: 500 }, (_, n) => ['throttle', String(n), { count: 1, per: HOUR }, 1])
  await ask(...(takes as unknown as Request[]))
  workerData.skew[0] = HOUR
  failing.left = 1
  thread.sweep()
  t.equal(thread.timer?.ms, 1000)
  t.equal(rows('SELECT id FROM buckets').length, 500)
  thread.sweep()
  t.equal(thread.timer?.ms, 0)
  t.equal(rows('SELECT id FROM buckets').length, 0)
})

void t.test('close comes after what was asked before it, and ends the thread', async (t) => {
  const { file, ask, send, rows, db, answers, thread, gone } = await bare(t)
  await ask(put())
  for (let n = 0; n < 2; n++) thread.sweep()
  t.ok(thread.timer !== null && thread.immediate !== null)
  const before = answers.length
  send(put(), put())
  send(put())
  thread.postMessage('close')
  await gone()
  t.same(answers.slice(before), [[WRITTEN, WRITTEN, WRITTEN]])
  t.equal(rows('SELECT id FROM records').length, 4)
  t.same(rows('SELECT sum(length(entries)) AS n FROM journal'), [{ n: 0 }])
  t.equal(thread.timer, null)
  t.equal(thread.immediate, null)
  db.close()
  t.notOk(existsSync(`${file}-wal`), 'nobody has it open')
  db.open()
})
