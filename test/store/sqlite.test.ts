import assert from 'node:assert/strict'
import { statSync } from 'node:fs'
import { join } from 'node:path'
import { DatabaseSync } from 'node:sqlite'
import type { Worker } from 'node:worker_threads'
import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { decodeRecord } from '../../src/store/record/codec.ts'
import { registerContract } from './contract.ts'
import { bytesOf, HOUR, newId, newToken, response, SPANS, tempDir, until } from './fixtures.ts'
import { open, opened } from './sqlite-fixtures.ts'

/* The store with threads of its own, on a file: the contract, and what needs a real thread. */

t.setTimeout(280_000)

const workers: Worker[] = []
process.on('worker', (worker) => void workers.push(worker))

const dir = tempDir()
const path = join(dir.path, 'records.db')
const stores = await Promise.all([open(path), open(path), open(path, { service: 'pay.eu' })])
t.teardown(async () => {
  await Promise.all(stores.map((store) => store.close()))
  dir[Symbol.dispose]()
})
let skew = 0
function advance(ms: number): void {
  skew += ms
  for (const store of stores) store.skew = skew
}

registerContract(t, 'sqlite', async () => {
  const [register, peer, other] = stores
  // What an earlier test has left expires: to start three threads for each test would take most of its time.
  advance(365 * 24 * HOUR)
  return { register, peer, other, tellsPeers: false, advance, async [Symbol.asyncDispose]() {} }
})

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
  for (let isFull = false; !isFull; ) {
    const failed = (await Promise.allSettled(Array.from({ length: 20 }, settle))).filter(
      (one) => one.status === 'rejected',
    )
    for (const { reason } of failed) t.match(reason, { name: 'StoreFull' })
    isFull = failed.length > 0
  }
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

void t.test('a write waits for its turn while another process writes', async (t) => {
  const { file, register } = await opened(t, { timeoutMs: 60_000 })
  const other = new DatabaseSync(file)
  other.exec('BEGIN IMMEDIATE')
  const put = register.put(newId(), bytesOf('in_progress', newToken()), SPANS)
  setTimeout(() => other.exec('COMMIT'), 100)
  t.ok((await put).done)
  other.close()
})

void t.test('when its thread dies, pending operations fail and it is started again', async (t) => {
  const events: string[] = []
  const { file, register } = await opened(t, { onEvent: (kind) => events.push(kind) })
  const id = newId()
  await register.put(id, bytesOf('in_progress', newToken()), SPANS)
  for (const part of [file, `${file}-wal`])
    t.equal(statSync(part).mode & 0o077, 0, `only its owner can access ${part}`)
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
  t.ok((await register.get(id)).bytes, 'an error alone does not end the thread')
})
