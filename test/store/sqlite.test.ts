import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { chmodSync, mkdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import type { Worker } from 'node:worker_threads'
import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { decodeRecord } from '../../src/store/codec.ts'
import { failureOf, openSqliteStore, type SqliteOptions, type SqliteStore } from '../../src/store/sqlite.ts'
import { registerContract } from './contract.ts'
import { bytesOf, HOUR, newId, newToken, response, SPANS, tempDir, until } from './fixtures.ts'

const MODULE = new URL('../../src/store/sqlite.ts', import.meta.url).href

function open(path: string, over: Partial<SqliteOptions> = {}): Promise<SqliteStore> {
  return openSqliteStore({ path, service: 'pay', timeoutMs: 10_000, onEvent: () => {}, ...over })
}

const workers: Worker[] = []
process.on('worker', (worker) => void workers.push(worker))

/** A register on a file of its own, both gone when the test ends. */
async function opened(t: Test, over: Partial<SqliteOptions> = {}) {
  const dir = tempDir()
  const file = join(dir.path, 'records.db')
  const register = await open(file, over)
  t.teardown(async () => {
    await register.close()
    dir[Symbol.dispose]()
  })
  return { file, register }
}

registerContract(t, 'sqlite', async () => {
  const dir = tempDir()
  const path = join(dir.path, 'records.db')
  const [register, peer, other] = await Promise.all([
    open(path),
    open(path),
    open(path, { service: 'pay.eu' }),
  ])
  let skew = 0
  return {
    register,
    peer,
    other,
    tellsPeers: false,
    advance(ms) {
      skew += ms
      register.skew = skew
      peer.skew = skew
      other.skew = skew
    },
    async [Symbol.asyncDispose]() {
      await Promise.all([register.close(), peer.close(), other.close()])
      dir[Symbol.dispose]()
    },
  }
})

void t.test('a record that was answered survives kill -9 of the process', async (t) => {
  using dir = tempDir()
  const file = join(dir.path, 'records.db')
  const id = newId()
  const bytes = bytesOf('in_progress', newToken())
  const child = program(
    `await register.put(${JSON.stringify(id)}, Buffer.from('${bytes.toString('base64')}', 'base64'), { dueIn: 1000, dropIn: 1e9 })
     process.stdout.write('answered')
     setInterval(() => {}, 1000)`,
    file,
  )
  t.equal(String(await child.said), 'answered')
  child.process.kill('SIGKILL')
  await child.exited
  const register = await open(file)
  t.equal(decodeRecord((await register.get(id)).bytes as Buffer).state, 'in_progress')
  await register.close()
})

void t.test('two processes on one file: exactly one claims', async (t) => {
  using dir = tempDir()
  const file = join(dir.path, 'records.db')
  const ids = Array.from({ length: 20 }, newId)
  const claims = (token: Buffer) => `
    const bytes = Buffer.from('${bytesOf('in_progress', token).toString('base64')}', 'base64')
    const ids = ${JSON.stringify(ids)}
    const replies = await Promise.all(ids.map((id) => register.put(id, bytes, { dueIn: 1000, dropIn: 1e9 })))
    process.stdout.write(JSON.stringify(replies.map((reply) => reply.done)))
    await register.close()`
  const children = [program(claims(newToken()), file), program(claims(newToken()), file)]
  const [one, two] = (await Promise.all(children.map((child) => child.said))).map((said) =>
    JSON.parse(String(said)),
  )
  for (const n of ids.keys()) t.not(one[n], two[n])
  for (const child of children) t.equal(await child.exited, 0, 'close() lets the process end')
})

function program(body: string, file: string, uid?: number) {
  const source = `
    import { openSqliteStore } from '${MODULE}'
    const register = await openSqliteStore({ path: ${JSON.stringify(file)}, service: 'pay', timeoutMs: 10_000, onEvent() {} })
    ${body}`
  const process_ = spawn(process.execPath, ['--input-type=module', '-e', source], {
    stdio: ['ignore', 'pipe', 'pipe'],
    ...(uid === undefined ? {} : { uid, gid: uid }),
  })
  let stderr = ''
  process_.stderr.on('data', (chunk) => (stderr += chunk))
  return {
    process: process_,
    said: once(process_.stdout, 'data').then(([chunk]) => chunk as Buffer),
    exited: once(process_, 'exit').then(([code]) => code as number | null),
    stderr: () => stderr,
  }
}

void t.test('a file of a later release is refused, and left as it is', async (t) => {
  using dir = tempDir()
  const file = join(dir.path, 'records.db')
  const db = new DatabaseSync(file)
  db.exec('PRAGMA user_version = 7')
  db.close()
  await t.rejects(open(file), {
    name: 'StoreUnavailable',
    message: /records\.db.*schema version 7, of a later release/,
  })
  const after = new DatabaseSync(file)
  t.same({ ...after.prepare('SELECT count(*) AS n FROM sqlite_master').get() }, { n: 0 })
  after.close()
})

void t.test('a file from before records belonged to a service is refused, and left as it is', async (t) => {
  using dir = tempDir()
  const file = join(dir.path, 'records.db')
  const db = new DatabaseSync(file)
  db.exec('CREATE TABLE records (id TEXT PRIMARY KEY); PRAGMA user_version = 1')
  db.close()
  await t.rejects(open(file), {
    name: 'StoreUnavailable',
    message: /records\.db.*before records belonged to a service.*move the file away/,
  })
  const after = new DatabaseSync(file)
  t.same({ ...after.prepare('SELECT count(*) AS n FROM sqlite_master').get() }, { n: 2 })
  after.close()
})

void t.test('the database of another program is refused, and left as it is', async (t) => {
  for (const version of [0, 1, 2]) {
    using dir = tempDir()
    const file = join(dir.path, 'other.db')
    const db = new DatabaseSync(file)
    db.exec(`CREATE TABLE orders (id); PRAGMA user_version = ${version}`)
    db.close()
    const before = readFileSync(file)
    await t.rejects(open(file), { name: 'StoreUnavailable', message: /other\.db.*of another program/ })
    t.same(readFileSync(file), before)
  }
})

void t.test('what cannot be opened is told clearly', async (t) => {
  using dir = tempDir()
  await t.rejects(open(join(dir.path, 'no', 'records.db')), {
    name: 'StoreUnavailable',
    message: /folder .*no does not exist/,
  })
  mkdirSync(join(dir.path, 'folder'))
  await t.rejects(open(join(dir.path, 'folder')), {
    name: 'StoreUnavailable',
    message: /cannot open the store .*folder/,
  })
  writeFileSync(join(dir.path, 'text'), 'this is not a database, however long the text may be'.repeat(100))
  await t.rejects(open(join(dir.path, 'text')), { name: 'StoreUnavailable', message: /not a database/ })
})

void t.test(
  'a read-only file or folder is refused at open',
  { skip: process.getuid?.() !== 0 },
  async (t) => {
    using dir = tempDir()
    const file = join(dir.path, 'records.db')
    await (await open(file)).close()
    chmodSync(dir.path, 0o755)
    chmodSync(file, 0o444)
    const NOBODY = 65534
    for (const path of [file, join(dir.path, 'new.db')]) {
      const child = program(`process.stdout.write('opened')`, path, NOBODY)
      child.said.catch(() => {})
      t.not(await child.exited, 0)
      t.match(child.stderr(), /StoreUnavailable.*cannot open the store/)
    }
  },
)

void t.test('a full disk refuses new claims, answers what it has and takes up again', async (t) => {
  const { register } = await opened(t, { maxPages: 64 })
  const token = newToken()
  const ids: RecordId[] = []
  const put = async (id: RecordId) => {
    await register.put(id, bytesOf('in_progress', token), SPANS)
    ids.push(id)
  }
  const failures = (await Promise.allSettled(Array.from({ length: 1000 }, () => put(newId())))).filter(
    (result) => result.status === 'rejected',
  )
  t.ok(ids.length > 100 && failures.length > 100)
  for (const { reason } of failures) t.match(reason, { name: 'StoreFull', maybeApplied: false })
  const [first, second] = ids as [RecordId, RecordId]
  const mixed = await Promise.allSettled([
    register.get(first),
    register.put(newId(), bytesOf('completed', token, { result: response(Buffer.alloc(100_000)) }), SPANS),
    register.put(second, bytesOf('in_progress', newToken()), SPANS),
  ])
  t.same(
    mixed.map((one) => one.status),
    ['fulfilled', 'rejected', 'fulfilled'],
    'one failure fails no other',
  )
  register.skew = 2 * SPANS.dropIn
  await until(() =>
    put(newId()).then(
      () => true,
      () => false,
    ),
  )
})

void t.test('an operation that cannot be done fails no other of its transaction', async (t) => {
  const { register } = await opened(t)
  const bytes = bytesOf('in_progress', newToken())
  const [good, bad] = [newId(), newId()]
  const replies = await Promise.allSettled([
    register.put(good, bytes, SPANS),
    register.put(bad, bytes, { dueIn: 1, dropIn: Number.POSITIVE_INFINITY }),
    register.put(good, bytes, SPANS),
  ])
  t.match(replies, [
    { status: 'fulfilled', value: { done: true } },
    { status: 'rejected', reason: { name: 'StoreUnavailable', maybeApplied: false } },
    { status: 'fulfilled', value: { done: false } },
  ])
  t.equal((await register.get(bad)).bytes, null)
})

void t.test('a COMMIT that fails says honestly what may have been applied', async (t) => {
  const error = (errcode: number) => Object.assign(new Error('because'), { errcode })
  const [BUSY, READONLY, FULL, IOERR_FSYNC] = [5, 8, 13, 1034] as const
  t.strictSame(failureOf(error(FULL), true), { message: 'SQLite: because', full: true, maybeApplied: false })
  t.match(failureOf(error(READONLY), false), { full: true, maybeApplied: false })
  t.match(failureOf(error(BUSY), true), { full: false, maybeApplied: false })
  t.match(failureOf(error(IOERR_FSYNC), true), { full: false, maybeApplied: true })
  t.match(failureOf(error(IOERR_FSYNC), false), { full: false, maybeApplied: false })
})

void t.test('a file that is locked at start is waited for, not for ever', async (t) => {
  using dir = tempDir()
  const file = join(dir.path, 'records.db')
  const other = new DatabaseSync(file)
  other.exec('BEGIN EXCLUSIVE')
  await t.rejects(open(file, { timeoutMs: 2 }), { name: 'StoreUnavailable', message: /locked/ })
  const waiting = open(file, { timeoutMs: 200 })
  setTimeout(() => other.exec('COMMIT'), 150)
  const register = await waiting
  t.ok(await register.ping())
  await register.close()
  other.close()
})

void t.test('expired rows are pruned', async (t) => {
  let pruned = 0
  const onPruned = (records: number): void => void (pruned += records)
  const { file, register } = await opened(t, { timeoutMs: 600, onPruned })
  const bytes = bytesOf('completed', newToken())
  await Promise.all(
    Array.from({ length: 1200 }, () => register.put(newId(), bytes, { dueIn: 1, dropIn: HOUR })),
  )
  await register.put(newId(), bytes, { dueIn: 1, dropIn: 10 * HOUR })
  register.skew = 2 * HOUR
  const reader = new DatabaseSync(file, { readOnly: true })
  const count = reader.prepare('SELECT count(*) AS n FROM records')
  await until(() => count.get()?.['n'] === 1)

  await register.put(newId(), bytes, { dueIn: 1, dropIn: HOUR })
  const other = new DatabaseSync(file)
  other.exec('BEGIN IMMEDIATE')
  register.skew = 4 * HOUR
  // Longer than the pause between two sweeps and SQLite's own wait for the lock: one sweep fails.
  await new Promise((pruning) => setTimeout(pruning, 2500))
  other.exec('COMMIT')
  other.close()
  await until(() => count.get()?.['n'] === 1)
  reader.close()
  await until(() => pruned >= 1201)
  t.equal(pruned, 1201, 'and it tells how many')
})

void t.test('a file of the first release is taken over, and that release can go on with it', async (t) => {
  using dir = tempDir()
  const file = join(dir.path, 'records.db')
  const id = newId()
  const first = await open(file)
  await first.put(id, bytesOf('completed', newToken()), SPANS)
  await first.close()
  const db = new DatabaseSync(file)
  db.exec('DROP TABLE buckets')
  db.close()
  const register = await open(file)
  t.ok((await register.get(id)).bytes)
  t.equal(await register.limits.take(newId(), { count: 1, per: HOUR }, 1), 0)
  await register.close()
  const after = new DatabaseSync(file, { readOnly: true })
  t.same({ ...after.prepare('PRAGMA user_version').get() }, { user_version: 2 })
  after.close()
})

void t.test('buckets that are full again are pruned; what is taken outlives a restart', async (t) => {
  const { file, register } = await opened(t)
  const rate = { count: 2, per: 2 * HOUR }
  await Promise.all(Array.from({ length: 700 }, () => register.limits.take(newId(), rate, 1)))
  const kept = newId()
  for (let n = 0; n < 2; n++) t.equal(await register.limits.take(kept, rate, 1), 0)
  const given = newId()
  await register.limits.take(given, rate, 1)
  await register.limits.take(given, rate, -1)
  const reader = new DatabaseSync(file, { readOnly: true })
  const count = reader.prepare('SELECT count(*) AS n FROM buckets')
  t.equal(count.get()?.['n'], 701, 'one whose last unit is given back is gone')
  register.skew = HOUR + HOUR / 2
  await until(() => count.get()?.['n'] === 1)
  reader.close()
  const peer = await open(file)
  peer.skew = HOUR / 2
  t.not(await peer.limits.take(kept, rate, 1), 0)
  await peer.close()
})

void t.test('a file that another process keeps locked: an answer in time, nothing applied', async (t) => {
  const { file, register } = await opened(t, { timeoutMs: 400 })
  const other = new DatabaseSync(file)
  other.exec('BEGIN IMMEDIATE')
  const id = newId()
  await t.rejects(register.put(id, bytesOf('in_progress', newToken()), SPANS), {
    name: 'StoreUnavailable',
    maybeApplied: false,
    message: /locked/,
  })
  t.equal((await register.get(id)).bytes, null, 'reading goes on')
  other.exec('COMMIT')
  other.close()
  t.ok((await register.put(id, bytesOf('in_progress', newToken()), SPANS)).done)
})

void t.test('no answer within the timeout: it may have been applied', async (t) => {
  const { register } = await opened(t, { timeoutMs: 0 })
  const bytes = bytesOf('completed', newToken(), { result: response(Buffer.alloc(8 * 1024 * 1024)) })
  await t.rejects(register.put(newId(), bytes, SPANS), { name: 'StoreUnavailable', maybeApplied: true })
})

void t.test('a worker that dies: pending operations fail, it is started again', async (t) => {
  const events: string[] = []
  const { file, register } = await opened(t, { onEvent: (kind) => events.push(kind) })
  const id = newId()
  await register.put(id, bytesOf('in_progress', newToken()), SPANS)
  const pending = register.put(
    newId(),
    bytesOf('completed', newToken(), { result: response(Buffer.alloc(4e6)) }),
    SPANS,
  )
  void workers.at(-1)?.terminate()
  await t.rejects(pending, { name: 'StoreUnavailable', maybeApplied: true })
  await t.rejects(register.get(id), { name: 'StoreUnavailable', maybeApplied: false })
  await until(() => events.includes('connected'))
  t.ok((await register.get(id)).bytes)
  t.same(events, ['disconnected', 'connected'])

  workers.at(-1)?.emit('error', new Error('a bug'))
  t.ok((await register.get(id)).bytes, 'an error alone does not end it; the end of the thread does')

  rmSync(file)
  rmSync(`${file}-wal`, { force: true })
  mkdirSync(file)
  void workers.at(-1)?.terminate()
  await until(() => events.filter((kind) => kind === 'error').length === 2)
  await t.rejects(register.ping(), { name: 'StoreUnavailable', maybeApplied: false })
})

void t.test('close while the worker is started again ends that one, too', async (t) => {
  const { register } = await opened(t)
  const started = once(process, 'worker')
  void workers.at(-1)?.terminate()
  const [worker] = (await started) as [Worker]
  const exited = once(worker, 'exit')
  await register.close()
  await exited
  await t.rejects(register.ping(), { name: 'StoreUnavailable', maybeApplied: false })
})

void t.test('close waits for what was asked; afterwards nothing is', async (t) => {
  using dir = tempDir()
  const file = join(dir.path, 'records.db')
  const register = await open(file)
  const id = newId()
  const last = register.put(id, bytesOf('completed', newToken()), SPANS)
  await register.close()
  t.ok((await last).done)
  await t.rejects(register.get(id), { name: 'StoreUnavailable', maybeApplied: false })
  await register.close()
  const again = await open(file)
  t.ok((await again.get(id)).bytes)
  await again.close()
})

void t.test('the file of stored answers is its owner’s alone', async (t) => {
  const { file, register } = await opened(t)
  await register.put(newId(), bytesOf('in_progress', newToken()), SPANS)
  for (const part of [file, `${file}-wal`]) t.equal(statSync(part).mode & 0o077, 0, part)
})

void t.test('a record made anew where an expired one still lies has no history of it', async (t) => {
  const { register } = await opened(t)
  const id = newId()
  const note = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }
  await register.put(id, bytesOf('in_progress', newToken()), SPANS)
  await register.history.append(id, [note])
  register.skew = SPANS.dropIn
  await register.put(id, bytesOf('in_progress', newToken()), SPANS)
  t.same(await register.history.read(id), [])
  await register.history.append(id, [note, note])
  t.match(await register.history.read(id), [{ count: 2 }])
})

void t.test('what is pruned takes its history along', async (t) => {
  const { file, register } = await opened(t)
  const id = newId()
  await register.put(id, bytesOf('completed', newToken()), SPANS)
  await register.history.append(id, [{ tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }])
  const reader = new DatabaseSync(file, { readOnly: true })
  t.teardown(() => reader.close())
  const count = reader.prepare('SELECT count(*) AS n FROM notes')
  t.same({ ...count.get() }, { n: 1 })
  register.skew = SPANS.dropIn
  await until(() => count.get()?.['n'] === 0)
})
