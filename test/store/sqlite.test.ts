import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { chmodSync, mkdirSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import { setImmediate as nextTurn } from 'node:timers/promises'
import type { Worker } from 'node:worker_threads'
import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { decodeRecord } from '../../src/store/codec.ts'
import type { SqliteStore } from '../../src/store/sqlite.ts'
import { registerContract } from './contract.ts'
import { bytesOf, HOUR, newId, newToken, response, SPANS, tempDir, until } from './fixtures.ts'
import { open, opened, ready } from './sqlite-fixtures.ts'

t.setTimeout(280_000)

const MODULE = new URL('../../src/store/sqlite.ts', import.meta.url).href

const workers: Worker[] = []
process.on('worker', (worker) => void workers.push(worker))

/** Makes a record of almost 4 KiB: 2,000 of them fill the journal. */
const LONG = { lastError: 'x'.repeat(3600) }

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

void t.test('an acknowledged record survives kill -9 of the process', async (t) => {
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

void t.test('acknowledged records survive kill -9 while records move to the table', async (t) => {
  using dir = tempDir()
  const file = join(dir.path, 'records.db')
  const child = program(
    `const bytes = Buffer.from('${bytesOf('in_progress', newToken(), LONG).toString('base64')}', 'base64')
     const outcome = Buffer.from('${bytesOf('completed', newToken(), { fence: 7 }).toString('base64')}', 'base64')
     for (let n = 0; ; n++) {
       const id = String(n).padStart(43, 'x')
       const put = register.put(id, bytes, { dueIn: 1000, dropIn: 1e9 }).then(async ({ stamp }) => {
         await register.swap(id, { version: stamp.version }, outcome, { dueIn: 1000, dropIn: 1e9 }, false)
         process.stdout.write(id + '\\n')
       })
       if (n % 50 === 0) await put
     }`,
    file,
  )
  let said = ''
  child.process.stdout.on('data', (chunk: Buffer) => (said += chunk.toString()))
  await until(() => said.length > 44 * 5000)
  child.process.kill('SIGKILL')
  await child.exited
  const register = await open(file)
  const ids = said.split('\n').slice(0, -1) as RecordId[]
  const lost: RecordId[] = []
  for (const id of ids) {
    const { bytes } = await register.get(id)
    if (bytes === null || decodeRecord(bytes).state !== 'completed') lost.push(id)
  }
  t.same(lost, [])
  await register.close()
})

void t.test('of two processes on one file, exactly one gets each claim', async (t) => {
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

void t.test('a file that cannot be opened gives a clear error', async (t) => {
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

void t.test('a full file refuses new claims, still reads, and recovers when records expire', async (t) => {
  const { register } = await opened(t, { maxPages: 64 })
  const token = newToken()
  const ids: RecordId[] = []
  const put = async (id: RecordId) => {
    await register.put(id, bytesOf('in_progress', token), SPANS)
    ids.push(id)
  }
  const failures = (await Promise.allSettled(Array.from({ length: 2000 }, () => put(newId())))).filter(
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
    'one failure does not fail the others',
  )
  register.skew = 2 * SPANS.dropIn
  await until(() =>
    put(newId()).then(
      () => true,
      () => false,
    ),
  )
})

void t.test('when a full file has no room for a slice, its records move to the table at once', async (t) => {
  const { file, register } = await opened(t, { maxPages: 64 })
  const settled: RecordId[] = []
  const token = newToken()
  const settle = async (): Promise<void> => {
    const id = newId()
    await register.put(id, bytesOf('in_progress', token), SPANS)
    const condition = { token, states: ['in_progress'] } as const
    assert.ok((await register.swap(id, condition, bytesOf('completed', token), SPANS, false)).done)
    settled.push(id)
  }
  await t.rejects(
    async () => {
      for (;;) await settle()
    },
    { name: 'StoreFull' },
  )
  const reader = new DatabaseSync(file, { readOnly: true })
  t.teardown(() => reader.close())
  const left = reader.prepare('SELECT sum(length(entries)) AS bytes FROM journal')
  await until(() => left.get()?.['bytes'] === 0)
  for (const id of settled) t.equal(decodeRecord((await register.get(id)).bytes as Buffer).state, 'completed')
  await settle()
})

void t.test('P18 large buffers are transferred to the thread, and small ones copied', async (t) => {
  const { register } = await opened(t)
  const own = newToken()
  const large = bytesOf('completed', own, { result: response(Buffer.alloc(64 * 1024, 'a')) })
  const small = bytesOf('in_progress', own)
  const stored = Buffer.from(large)
  const id = newId()
  await register.put(id, small, SPANS)
  t.ok(small.length > 0)
  await register.swap(id, { token: own, states: ['in_progress'] }, large, SPANS, false)
  t.equal(large.length, 0)
  t.ok((await register.get(id)).bytes?.subarray(56).equals(stored.subarray(56)))
  await t.rejects(
    async () => register.put(newId(), large, SPANS),
    /freed/,
    'a transferred buffer is refused, not written as empty',
  )
})

void t.test('expired rows are pruned and counted', async (t) => {
  let pruned = 0
  const onPruned = (records: number): void => void (pruned += records)
  const { file, register } = await opened(t, { timeoutMs: 600, onPruned })
  const bytes = bytesOf('completed', newToken())
  await Promise.all(
    Array.from({ length: 1200 }, async () => register.put(newId(), bytes, { dueIn: 1, dropIn: HOUR })),
  )
  await register.put(newId(), bytes, { dueIn: 1, dropIn: 10 * HOUR })
  register.skew = 2 * HOUR
  const reader = new DatabaseSync(file, { readOnly: true })
  const count = reader.prepare('SELECT count(*) AS n FROM records')
  await until(() => count.get()?.['n'] === 1)
  // A move that is interrupted counts expired records again when it is repeated.
  const left = reader.prepare('SELECT sum(length(entries)) AS n FROM journal')
  await until(() => !left.get()?.['n'])

  await register.put(newId(), bytes, { dueIn: 1, dropIn: HOUR })
  const other = new DatabaseSync(file, { timeout: 10_000 })
  other.exec('BEGIN IMMEDIATE')
  register.skew = 4 * HOUR
  // Longer than the pause between two sweeps and SQLite's own wait for the lock: one sweep fails.
  await new Promise((pruning) => setTimeout(pruning, 2500))
  other.exec('COMMIT')
  other.close()
  await until(() => count.get()?.['n'] === 1)
  reader.close()
  await until(() => pruned >= 1201)
  t.equal(pruned, 1201, 'and their number is reported')
})

void t.test('buckets that are full again are pruned; taken units survive a restart', async (t) => {
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
  t.equal(count.get()?.['n'], 701, 'a bucket whose last unit is given back is gone')
  register.skew = HOUR + HOUR / 2
  await until(() => count.get()?.['n'] === 1)
  reader.close()
  const peer = await open(file)
  peer.skew = HOUR / 2
  t.not(await peer.limits.take(kept, rate, 1), 0)
  await peer.close()
})

void t.test('an operation that is not answered within the timeout may have been applied', async (t) => {
  const { register } = await opened(t, { timeoutMs: 400 })
  await ready(register)
  const worker = workers.at(-1) as Worker
  const post = worker.postMessage.bind(worker)
  const late: Parameters<Worker['postMessage']>[] = []
  worker.postMessage = (...args: Parameters<Worker['postMessage']>) => void late.push(args)
  const id = newId()
  await t.rejects(async () => register.put(id, bytesOf('in_progress', newToken()), SPANS), {
    name: 'StoreUnavailable',
    maybeApplied: true,
  })
  worker.postMessage = post
  for (const message of late) post(...message)
  t.ok((await register.get(id)).bytes, 'as this one was')
})

void t.test('only one message is in flight, and operations asked meanwhile share the next one', async (t) => {
  const { register } = await opened(t)
  await ready(register)
  const worker = workers.at(-1) as Worker
  const events: string[] = []
  const post = worker.postMessage.bind(worker)
  worker.postMessage = (...args: Parameters<Worker['postMessage']>) => {
    events.push('sent')
    post(...args)
  }
  worker.on('message', (message: object) => 'memory' in message && events.push('answered'))
  const replies: Promise<unknown>[] = []
  for (let turn = 0; turn < 50; turn++) {
    replies.push(Promise.resolve(register.put(newId(), bytesOf('in_progress', newToken()), SPANS)))
    await nextTurn()
  }
  await Promise.all(replies)
  t.same(
    events,
    events.map((_, n) => (n % 2 === 0 ? 'sent' : 'answered')),
  )
  t.ok(events.length < 50, `${events.length / 2} messages for 50 turns of the event loop`)
})

void t.test('an operation that times out before it is sent was not applied', async (t) => {
  const { register } = await opened(t, { timeoutMs: 100 })
  const worker = workers.at(-1) as Worker
  const { promise: sent, resolve } = Promise.withResolvers<void>()
  const post = worker.postMessage
  // The message is lost, and so never answered.
  worker.postMessage = () => resolve()
  const put = async (): Promise<unknown> => register.put(newId(), bytesOf('in_progress', newToken()), SPANS)
  const first = t.rejects(put(), { name: 'StoreUnavailable', maybeApplied: true })
  await sent
  await t.rejects(put(), { name: 'StoreUnavailable', maybeApplied: false })
  await first
  worker.postMessage = post
})

void t.test('when the worker dies, pending operations fail and it is restarted', async (t) => {
  const events: string[] = []
  const { file, register } = await opened(t, { onEvent: (kind) => events.push(kind) })
  const id = newId()
  await register.put(id, bytesOf('in_progress', newToken()), SPANS)
  const worker = workers.at(-1) as Worker
  const { promise: sent, resolve } = Promise.withResolvers<void>()
  // The message is lost with the thread.
  worker.postMessage = () => resolve()
  const pending = register.put(newId(), bytesOf('completed', newToken()), SPANS)
  await sent
  void worker.terminate()
  await t.rejects(async () => pending, { name: 'StoreUnavailable', maybeApplied: true })
  await t.rejects(register.get(id), { name: 'StoreUnavailable', maybeApplied: false })
  await until(() => events.includes('connected'))
  t.ok((await register.get(id)).bytes)
  t.same(events, ['disconnected', 'connected'])

  workers.at(-1)?.emit('error', new Error('a bug'))
  t.ok((await register.get(id)).bytes, 'an error alone does not end the worker; the end of its thread does')

  rmSync(file)
  rmSync(`${file}-wal`, { force: true })
  mkdirSync(file)
  void workers.at(-1)?.terminate()
  await until(() => events.filter((kind) => kind === 'error').length === 2)
  await t.rejects(register.ping(), { name: 'StoreUnavailable', maybeApplied: false })
})

void t.test('close while the worker is being restarted ends the new one, too', async (t) => {
  const { register } = await opened(t)
  await register.ping()
  const started = once(process, 'worker')
  void workers.at(-1)?.terminate()
  const [worker] = (await started) as [Worker]
  const exited = once(worker, 'exit')
  await register.close()
  await exited
  await t.rejects(register.ping(), { name: 'StoreUnavailable', maybeApplied: false })
})

void t.test('close waits for pending operations, and later ones are refused', async (t) => {
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

void t.test('only its owner can access the file and its WAL', async (t) => {
  const { file, register } = await opened(t)
  await register.put(newId(), bytesOf('in_progress', newToken()), SPANS)
  for (const part of [file, `${file}-wal`]) t.equal(statSync(part).mode & 0o077, 0, part)
})

/** Resolves when the journal has been moved to the table. */
async function moved(t: Test, file: string): Promise<void> {
  const db = new DatabaseSync(file, { readOnly: true })
  t.teardown(() => db.close())
  const left = db.prepare('SELECT sum(length(entries)) AS bytes FROM journal')
  await until(() => Number(left.get()?.['bytes']) < 1_000_000)
}

void t.test('changes made while records move to the table are kept', async (t) => {
  const { file, register } = await opened(t)
  const peer = await open(file)
  t.teardown(() => peer.close())
  const token = newToken()
  const [claim, outcome] = [bytesOf('in_progress', token, LONG), bytesOf('completed', token)]
  const large = bytesOf('unknown', token, { lastError: 'x'.repeat(5000) })
  const ids = Array.from({ length: 5000 }, newId)
  const kept = ids.filter((_id, n) => n % 20 !== 2)
  const write = async (id: RecordId, n: number): Promise<void> => {
    const put = await register.put(id, claim, SPANS)
    let version = put.done ? put.stamp.version : 0
    const swap = async (by: SqliteStore, bytes: Buffer) =>
      assert.ok((await by.swap(id, { version: version++ }, bytes, SPANS, false)).done)
    if (n % 20 === 1) await swap(register, large)
    if (n % 2 === 0) await swap(n % 3 === 0 ? peer : register, outcome)
    if (n % 20 === 2) assert.ok(await register.remove(id, version))
  }
  for (let n = 0; n < ids.length; n += 250)
    await Promise.all(ids.slice(n, n + 250).map((id, i) => write(id, n + i)))
  const check = async (by: SqliteStore): Promise<void> => {
    for (const [n, id] of ids.entries()) {
      const { bytes } = await by.get(id)
      const expected =
        n % 20 === 2 ? null : n % 20 === 1 ? 'unknown' : n % 2 === 0 ? 'completed' : 'in_progress'
      if ((bytes && decodeRecord(bytes).state) !== expected) t.fail(`record ${n} is not ${expected}`)
    }
    t.same((await by.list('all', null, 6000)).ids, kept.toSorted())
  }
  await check(register)
  await check(peer)
  await register.close()
  await peer.close()
  const other = await open(file)
  await check(other)
  await other.close()
  const db = new DatabaseSync(file, { readOnly: true })
  t.same(
    { ...db.prepare('SELECT count(*) AS n, count(DISTINCT id) AS ids FROM records').get() },
    { n: kept.length, ids: kept.length },
  )
  db.close()
})

void t.test('after a move from the journal to the table, every process sees every record', async (t) => {
  const { file, register } = await opened(t)
  const peer = await open(file)
  t.teardown(() => peer.close())
  const token = newToken()
  const claim = bytesOf('in_progress', token, LONG)
  const note = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }
  const settle = async (by: SqliteStore, id: RecordId) => {
    const swap = await by.swap(
      id,
      { token, states: ['in_progress'] },
      bytesOf('completed', token),
      SPANS,
      false,
    )
    t.equal(swap.done, true)
  }
  const state = async (by: SqliteStore, id: RecordId) => {
    const { bytes } = await by.get(id)
    return bytes && decodeRecord(bytes).state
  }
  const ids = Array.from({ length: 2600 }, newId).toSorted()
  const [noted, settled, late, gone] = ids.slice(0, 4) as [RecordId, RecordId, RecordId, RecordId]
  await peer.put(noted, claim, SPANS)
  await peer.history.append(noted, [note])
  await register.put(settled, claim, SPANS)
  await settle(peer, settled)
  for (const some of [ids.slice(2, 1000), ids.slice(1000, 2500), ids.slice(2500)])
    await Promise.all(some.map(async (id) => await register.put(id, claim, SPANS)))
  await settle(peer, late)
  await moved(t, file)
  const there = await register.get(gone)
  t.equal(await peer.remove(gone, decodeRecord(there.bytes as Buffer).version), true)

  const other = await open(file)
  t.teardown(() => other.close())
  for (const each of [register, peer, other]) {
    t.equal(await state(each, noted), 'in_progress')
    t.equal((await each.history.read(noted)).length, 1)
    t.equal(await state(each, settled), 'completed')
    t.equal(await state(each, late), 'completed')
    t.equal(await state(each, gone), null)
    t.equal((await each.put(late, claim, SPANS)).done, false)
    t.same(
      (await each.list('all', null, 3000)).ids,
      ids.filter((id) => id !== gone),
    )
    t.equal((await each.list('unresolved', null, 3000)).ids.length, 2597)
    each.skew = SPANS.dueIn + 1
    t.equal((await each.due(3000)).length, 2597)
    t.equal((await each.due(1000)).length, 1000)
    each.skew = 0
  }
})

void t.test('every process can read a record that outgrows the journal and shrinks again', async (t) => {
  const { file, register } = await opened(t)
  const peer = await open(file)
  t.teardown(() => peer.close())
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

void t.test('a flood does not make the journal grow without bound', async (t) => {
  const { file, register } = await opened(t)
  const bytes = bytesOf('in_progress', newToken())
  for (let n = 0; n < 60; n++)
    await Promise.all(Array.from({ length: 2000 }, async () => register.put(newId(), bytes, SPANS)))
  const db = new DatabaseSync(file, { readOnly: true })
  t.teardown(() => db.close())
  const { left } = db.prepare('SELECT sum(length(entries)) AS left FROM journal').get() as { left: number }
  t.ok(left < 40_000 * bytes.length, `${Math.round(left / bytes.length)} records are in the journal`)
})
