import { existsSync, mkdirSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { syncBuiltinESMExports } from 'node:module'
import { join } from 'node:path'
import { setImmediate as nextTurn } from 'node:timers/promises'
import workerThreads from 'node:worker_threads'
import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import type { Packed } from '../../src/store/sqlite/messages.ts'
import { openSqliteStore, type SqliteOptions, type SqliteStore } from '../../src/store/sqlite/store.ts'
import { bytesOf, newId, newToken, SPANS, until } from './fixtures.ts'
import { fileInProcess, type InProcess, NOW } from './sqlite-in-process.ts'

/* How the store speaks with its thread: when it sends, what it makes of answers, and what happens when the thread ends. */

const TIMEOUT = 7777

interface Timer {
  readonly ms: number
  readonly run: () => void
  isCleared: boolean
}

/** The timers of the store, which the test runs. */
function timersOf(t: Test): Timer[] {
  const timers: Timer[] = []
  const { setTimeout, clearTimeout } = globalThis
  globalThis.setTimeout = Object.assign((run: () => void, ms: number) => {
    if (!new Error('who asks').stack?.includes('/store/sqlite/store.ts')) return setTimeout(run, ms)
    const timer = { ms, run, isCleared: false }
    timers.push(timer)
    return timer as unknown as NodeJS.Timeout
  }, setTimeout)
  globalThis.clearTimeout = (timer) => {
    const own = timers.find((each) => each === (timer as unknown))
    if (own === undefined) clearTimeout(timer)
    else own.isCleared = true
  }
  t.teardown(() => Object.assign(globalThis, { setTimeout, clearTimeout }))
  return timers
}

async function opened(t: Test, over: Partial<SqliteOptions> = {}) {
  const found = fileInProcess(t)
  const timers = timersOf(t)
  const events: string[] = []
  const onEvent = (kind: string, detail: string): void => void events.push(`${kind}: ${detail}`)
  const store = await found.open({ timeoutMs: TIMEOUT, onEvent, ...over })
  return { ...store, file: found.file, started: found.started, db: found.db, timers, events }
}

function put(register: SqliteStore, id: RecordId = newId()) {
  return Promise.resolve(register.put(id, bytesOf('in_progress', newToken()), SPANS))
}

/** Numbers of requests in the messages to the thread. */
function sizes({ posted }: InProcess): unknown[] {
  return posted.map((message) => (message === 'close' ? message : (message as Packed).messages.length))
}

/** Messages to the thread are kept until they are let go. */
function held(thread: InProcess) {
  const kept: Parameters<InProcess['postMessage']>[] = []
  const post = thread.postMessage.bind(thread)
  thread.postMessage = (...args) => void kept.push(args)
  const letGo = (): void => {
    thread.postMessage = post
    for (const args of kept.splice(0)) post(...args)
  }
  return { kept, letGo }
}

void t.test('a file that cannot be used fails the start, and no thread is started again', async (t) => {
  const { file, started, timers, events } = await opened(t)
  t.equal(statSync(file).mode & 0o777, 0o600, 'it is its owner’s only')
  const [text, folder, below] = [`${file}-text`, `${file}-folder`, join(file, '..', 'no', 'records.db')]
  writeFileSync(text, 'this is not a database, however long the text may be'.repeat(100))
  mkdirSync(folder)
  const onEvent = (kind: string): void => void events.push(kind)
  for (const [path, why] of [
    [text, 'file is not a database'],
    [folder, 'unable to open database file'],
    [below, `the folder ${join(below, '..')} does not exist`],
  ] as const)
    await t.rejects(openSqliteStore({ path, service: 'pay', timeoutMs: TIMEOUT, onEvent }), {
      name: 'StoreUnavailable',
      maybeApplied: false,
      message: `cannot open the store ${path}: ${why}`,
    })
  t.notOk(existsSync(join(below, '..')), 'nor is it made')
  t.equal(started.length, 3)
  t.same(timers, [])
  t.same(events, [])
})

void t.test('it says what it is', async (t) => {
  const { register } = await opened(t)
  t.equal(register.name, 'sqlite')
  t.strictSame(await register.traits(), {
    durable: true,
    evicts: false,
    forgets: null,
    hasIdentity: false,
    findings: [],
    refusals: [],
  })
  t.equal(await register.ping(), NOW)
  register.skew = 5
  t.equal(await register.ping(), NOW + 5)
})

void t.test('every byte of a token counts', async (t) => {
  const { register } = await opened(t)
  const id = newId()
  const token = Buffer.from(Array.from({ length: 16 }, (_, n) => 255 - 9 * n))
  await register.put(id, bytesOf('in_progress', token), SPANS)
  const similar = Buffer.from(token)
  similar[0] = 254
  t.same(await register.renew([{ id, token: similar, dueIn: 1, dropIn: 1 }]), [false])
  t.same(await register.renew([{ id, token, dueIn: 1, dropIn: 1 }]), [true])
  const outcome = bytesOf('completed', token)
  t.ok((await register.swap(id, { token, states: ['in_progress'] }, outcome, SPANS, false)).done)
})

/** The time that the store sees. */
function stopwatch(t: Test): { time: number } {
  const { now } = performance
  const watch = { time: 1000 }
  performance.now = () => watch.time
  t.teardown(() => {
    performance.now = now
  })
  return watch
}

void t.test('operations of turns that follow one another go together, for two milliseconds', async (t) => {
  const { register, thread } = await opened(t)
  const watch = stopwatch(t)
  const replies: Promise<unknown>[] = []
  const inTurns = async (turns: number): Promise<void> => {
    for (let turn = 0; turn < turns; turn++) {
      replies.push(put(register))
      await nextTurn()
    }
  }
  await inTurns(10)
  t.same(sizes(thread), [])
  await Promise.all(replies)
  t.same(sizes(thread), [10])
  await inTurns(5)
  watch.time += 100
  await inTurns(5)
  t.equal(thread.posted.length, 2)
  await Promise.all(replies)
  t.equal(thread.posted.length, 3, 'those asked while a message was in flight are in the next')
  const [, second, third] = sizes(thread) as number[]
  t.equal((second as number) + (third as number), 10)
})

void t.test('operations that wait go on as soon as the thread has answered', async (t) => {
  const { register, thread, timers } = await opened(t)
  const { letGo } = held(thread)
  const replies = [put(register)]
  await nextTurn()
  await nextTurn()
  await nextTurn()
  for (let n = 0; n < 3; n++) {
    replies.push(put(register), put(register))
    await nextTurn()
    await nextTurn()
  }
  t.same(sizes(thread), [])
  letGo()
  const results = await Promise.all(replies)
  t.ok(results.every((reply) => reply.done))
  t.same(sizes(thread), [1, 6])
  t.equal(timers.length, 4)
  t.ok(timers.every(({ isCleared }) => isCleared))
})

void t.test('an operation that times out before it is sent is not sent', async (t) => {
  const { register, thread, timers } = await opened(t)
  const { letGo } = held(thread)
  const [sent, before, late, after] = [newId(), newId(), newId(), newId()]
  const turn = async (id: RecordId) => {
    const reply = put(register, id)
    reply.catch(() => {})
    for (let n = 0; n < 3; n++) await nextTurn()
    return { reply }
  }
  const first = await turn(sent)
  const [second, third, fourth] = [await turn(before), await turn(late), await turn(after)]
  t.equal(timers.length, 4)
  timers[2]?.run()
  timers[0]?.run()
  const message = `SQLite did not answer in ${TIMEOUT} ms`
  await t.rejects(first.reply, { name: 'StoreUnavailable', maybeApplied: true, message })
  await t.rejects(third.reply, { name: 'StoreUnavailable', maybeApplied: false, message })
  letGo()
  t.ok((await second.reply).done)
  t.ok((await fourth.reply).done)
  t.same((await register.list('all', null, 9)).ids, [sent, before, after].sort())
})

void t.test('a write to a file that another process keeps locked is not applied', async (t) => {
  const { register, db } = await opened(t)
  const id = newId()
  db.exec('BEGIN IMMEDIATE')
  const locked = { name: 'StoreUnavailable', maybeApplied: false, message: /locked/ }
  await t.rejects(put(register, id), locked)
  t.equal((await register.get(id)).bytes, null)
  db.exec('COMMIT')
  t.ok((await put(register, id)).done)
})

void t.test('when the thread ends, what it was sent may have been applied, and nothing else', async (t) => {
  const { register, thread, started, timers, events, file } = await opened(t)
  held(thread)
  const sent = put(register)
  for (let n = 0; n < 3; n++) await nextTurn()
  const waiting = put(register)
  await nextTurn()
  const asked = put(register)
  thread.emit('error', new Error('a bug'))
  thread.emit('exit', 1)
  const message = 'the thread of SQLite ended: a bug'
  await t.rejects(sent, { name: 'StoreUnavailable', maybeApplied: true, message })
  for (const each of [waiting, asked])
    await t.rejects(each, { name: 'StoreUnavailable', maybeApplied: false, message })
  const closed = { name: 'StoreUnavailable', maybeApplied: false, message: `the store ${file} is not open` }
  await t.rejects(put(register), closed)
  t.same(
    timers.map(({ ms, isCleared }) => [ms, isCleared]),
    [
      [TIMEOUT, true],
      [TIMEOUT, true],
      [TIMEOUT, true],
      [100, false],
    ],
  )
  t.same(events, ['disconnected: a bug'])
  for (let n = 0; n < 3; n++) await nextTurn()
  timers[3]?.run()
  await t.rejects(put(register), closed, 'it has not opened the file yet')
  await until(() => events.length === 2)
  t.same(events[1], `connected: ${file}`)
  t.equal(started.length, 2)
  t.ok((await put(register)).done)
  thread.emit('exit', 1)
  t.equal(events.length, 2, 'the first thread is of no interest any more')
  started[1]?.emit('exit', 1)
  t.same(events[2], 'disconnected: its thread ended')
  await register.close()
})

void t.test('a thread that cannot be started is tried again, less and less often', async (t) => {
  const { register, thread, timers, events, file, started } = await opened(t)
  const { Worker } = workerThreads
  const replaced = (by: typeof Worker): void => {
    workerThreads.Worker = by
    syncBuiltinESMExports()
  }
  replaced(function () {
    throw new Error('no more threads')
  } as unknown as typeof Worker)
  const another = openSqliteStore({ path: file, service: 'pay', timeoutMs: TIMEOUT, onEvent: () => {} })
  const message = `cannot open the store ${file}: no more threads`
  await t.rejects(another, { name: 'StoreUnavailable', maybeApplied: false, message })
  thread.emit('exit', 1)
  for (let n = 0; n < 8; n++) {
    timers[n]?.run()
    await nextTurn()
  }
  t.same(
    timers.map(({ ms }) => ms),
    [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000],
  )
  t.same(events, ['disconnected: its thread ended', ...Array(8).fill(`error: ${message}`)])
  replaced(Worker)
  timers[8]?.run()
  await until(() => events.length === 10)
  t.ok((await put(register)).done)
  started[1]?.emit('exit', 1)
  t.equal(timers.at(-1)?.ms, 100, 'the next time begins anew')
  await register.close()
  t.equal(timers.at(-1)?.isCleared, true)
  t.equal(started.length, 2)
})

for (const canOpen of [true, false])
  void t.test(
    `a store closed while its thread starts again has none afterwards (${canOpen ? 'which opens' : 'which cannot open'} the file)`,
    async (t) => {
      const { register, thread, timers, started, events, file } = await opened(t)
      await thread.terminate()
      await until(() => events.length === 1)
      if (!canOpen) {
        // The new one cannot open it.
        for (const end of ['', '-wal', '-shm']) rmSync(`${file}${end}`, { force: true })
        mkdirSync(file)
      }
      timers[0]?.run()
      const second = started[1] as InProcess
      let isGone = false
      second.on('exit', () => (isGone = true))
      await register.close()
      t.equal(timers[0]?.isCleared, true)
      await until(() => isGone)
      t.same(sizes(second), canOpen ? ['close'] : [])
      await nextTurn()
      t.equal(timers.length, 1, 'and starts no other')
      await t.rejects(register.ping(), { name: 'StoreUnavailable', maybeApplied: false })
    },
  )

void t.test('close sends what was asked before it, and resolves once the file is closed', async (t) => {
  const { register, thread, timers, events, file } = await opened(t)
  const replies = [put(register)]
  await nextTurn()
  replies.push(put(register))
  const closing = register.close()
  const late = { name: 'StoreUnavailable', maybeApplied: false, message: `the store ${file} is not open` }
  await t.rejects(put(register), late)
  await closing
  t.notOk(existsSync(`${file}-wal`))
  t.ok((await Promise.all(replies)).every((reply) => reply.done))
  t.same(sizes(thread), [2, 'close'])
  t.ok(timers.every(({ isCleared }) => isCleared))
  t.same(events, [])
  await register.close()
  t.same(sizes(thread), [2, 'close'])
})

void t.test('a thread that does not end by itself is ended after five seconds', async (t) => {
  const { register, thread, timers, events } = await opened(t)
  held(thread)
  const closing = register.close()
  await nextTurn()
  t.equal(timers.at(-1)?.ms, 5000)
  timers.at(-1)?.run()
  await closing
  t.same(events, [])
})
