import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'
import t, { type Test } from 'tap'
import type { Millis, RecordId } from '../../src/core/record.ts'
import type { Soon } from '../../src/runtime/scheduling.ts'
import type { Page, Store } from '../../src/store/register.ts'
import { RedisServer } from '../support/redis.ts'
import { repliesTo } from '../support/replies.ts'
import { bytesOf, newId, newToken, SPANS, until } from './fixtures.ts'
import { APPLIED, answers, open as openStore } from './redis-fixtures.ts'

/** Until a reply that was lost is given up. */
const FAST: Millis = 2000
const SWAPPED = 'sent after the next'
/**
 * Which replies of a turn are tampered with: plain commands come before the batches, of which the first ones hold all kinds of operations.
 * Replies of two SCANs look alike: swapping them may go unnoticed.
 */
const REPLIES = [0, 1, 2, 3, 4, 5, -2, -1]
const SCAN = 2

/** What happens to the reply `at`, and to the next one. */
type Fault = (at: Buffer, next: () => Promise<Buffer>) => Promise<readonly Buffer[]>
const FAULTS: Readonly<Record<string, Fault>> = {
  lost: async () => [],
  'sent twice': async (at) => [at, at],
  [SWAPPED]: async (at, next) => [await next(), at],
}

/** A middlebox that passes whole replies, and makes a mistake with one of them. */
async function middlebox(t: Test, server: RedisServer) {
  const self = { url: '', passed: 0, at: Number.POSITIVE_INFINITY, fault: FAULTS['lost'] as Fault }
  const sockets: Socket[] = []
  const listener = createServer((client) => {
    const redis = connect(server.port, '127.0.0.1')
    let reply: number[] = []
    const whole: Buffer[] = []
    let came = Promise.withResolvers<void>()
    const read = repliesTo(() => {
      whole.push(Buffer.from(reply))
      reply = []
      came.resolve()
      came = Promise.withResolvers<void>()
    })
    const next = async (): Promise<Buffer> => {
      while (whole.length === 0) await came.promise
      self.passed++
      return whole.shift() as Buffer
    }
    const pass = async (): Promise<void> => {
      for (;;) {
        const one = await next()
        const all = self.passed - 1 === self.at ? await self.fault(one, next) : [one]
        for (const bytes of all) client.write(bytes)
      }
    }
    void pass()
    client.pipe(redis)
    redis.on('data', (bytes: Buffer) => {
      for (const byte of bytes) {
        reply.push(byte)
        read(Buffer.of(byte))
      }
    })
    for (const socket of [client, redis]) {
      sockets.push(socket)
      socket
        .on('error', () => {})
        .on('close', () => {
          client.destroy()
          redis.destroy()
        })
    }
  }).listen(0, '127.0.0.1')
  await once(listener, 'listening')
  self.url = `redis://127.0.0.1:${(listener.address() as AddressInfo).port}`
  t.teardown(() => {
    for (const socket of sockets) socket.destroy()
    listener.close()
  })
  return self
}

const open = async (t: Test, url: string) => (await openStore(t, url, { timeoutMs: FAST })).store

interface Known {
  readonly id: RecordId
  readonly bytes: Buffer
  readonly version: number
}

/** Every operation once, in one turn. The records are there already; `direct` has put them. */
async function turn(direct: Store, store: Store) {
  const put = async (): Promise<Known & { readonly token: Buffer }> => {
    const [id, token] = [newId(), newToken()]
    await direct.put(id, bytesOf('in_progress', token), SPANS)
    const bytes = (await direct.get(id)).bytes as Buffer
    return { id, token, bytes, version: bytes.readUIntBE(4, 6) }
  }
  const [taken, read, finished, renewed, removed, swapped] = [
    await put(),
    await put(),
    await put(),
    await put(),
    await put(),
    await put(),
  ] as const
  const free = [newId(), newId()] as const
  const own = { token: finished.token, states: ['in_progress'] } as const
  const claim = () => bytesOf('in_progress', newToken())
  const rate = { count: 1, per: 60_000 }
  const bucket = newId()
  await direct.limits.take(bucket, rate, 1)
  const written = async (id: RecordId, reply: object): Promise<boolean> => {
    const version = (await direct.get(id)).bytes?.readUIntBE(4, 6)
    return 'stamp' in reply && (reply.stamp as { version: number }).version === version
  }
  const found = (known: Known) => (reply: object) =>
    'bytes' in reply && Buffer.isBuffer(reply.bytes) && reply.bytes.equals(known.bytes)
  const only = (ids: readonly RecordId[], known: Known) => ids.every((id) => id === known.id)
  // What is asked, and whether a reply is its own.
  const asked: [Soon<unknown>, (reply: never) => boolean | Promise<boolean>][] = [
    [store.put(free[0], claim(), SPANS), (reply) => written(free[0], reply)],
    [store.put(taken.id, claim(), SPANS), found(taken)],
    [store.get(read.id), found(read)],
    [
      store.swap(finished.id, own, bytesOf('completed', finished.token), SPANS, false),
      (reply) => written(finished.id, reply),
    ],
    [store.swap(read.id, { version: 1 }, claim(), SPANS, true), found(read)],
    [store.ping(), (now: Millis) => Math.abs(now - Date.now()) < 60_000],
    [
      store.renew([
        { id: renewed.id, token: renewed.token, dueIn: 9, dropIn: 9 },
        { id: read.id, token: newToken(), dueIn: 9, dropIn: 9 },
      ]),
      (done: boolean[]) => done.join() === 'true,false',
    ],
    [store.limits.take(newId(), rate, 1), (wait: Millis) => wait === 0],
    [store.limits.take(bucket, rate, 1), (wait: Millis) => wait > 0],
    [store.traits(), ({ durable, evicts }: { durable: boolean; evicts: boolean }) => durable && !evicts],
    [store.put(taken.id, claim(), SPANS), found(taken)],
    [store.history.read(read.id), (notes: unknown[]) => notes.length === 0],
    [
      store.history.append(read.id, [{ tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }]),
      (done: boolean) => done,
    ],
    [store.list({ beginning: read.id }, null, 1000), ({ ids }: Page) => only(ids, read)],
    [store.list({ beginning: taken.id }, null, 1000), ({ ids }: Page) => only(ids, taken)],
    [store.remove(removed.id, removed.version), (done: boolean) => done],
    [store.remove(read.id, 1), (done: boolean) => !done],
    [store.put(taken.id, claim(), SPANS), found(taken)],
    [store.put(free[1], claim(), SPANS), (reply) => written(free[1], reply)],
    [
      store.swap(swapped.id, { version: swapped.version }, claim(), SPANS, true),
      (reply) => written(swapped.id, reply),
    ],
    [store.due(10), (ids: unknown[]) => ids.length <= 10],
    [store.list('unresolved', null, 100), ({ ids }: { ids: unknown[] }) => ids.length <= 100],
  ]
  return asked
}

for (const [name, fault] of Object.entries(FAULTS))
  void t.test(`when a reply is ${name}, each operation gets its own reply or none`, async (t) => {
    await using server = await RedisServer.start()
    const box = await middlebox(t, server)
    const direct = await open(t, server.url)
    const store = await open(t, box.url)
    box.fault = fault
    /** How many operations got no reply. */
    const round = async (at: number): Promise<number> => {
      await until(answers(store))
      const asked = await turn(direct, store)
      // Nothing has left yet.
      box.passed = 0
      box.at = at
      const replies = await Promise.allSettled(asked.map(([reply]) => reply))
      box.at = Number.POSITIVE_INFINITY
      for (const [n, reply] of replies.entries())
        if (reply.status === 'rejected')
          t.match(reply.reason, { name: 'StoreUnavailable' }, `reply ${at}: operation ${n}`)
        else t.ok(await asked[n]?.[1](reply.value as never), `reply ${at}: operation ${n}`)
      return replies.filter(({ status }) => status === 'rejected').length
    }
    t.equal(await round(Number.POSITIVE_INFINITY), 0, 'the scripts are loaded, and nothing fails')
    const all = box.passed
    for (const at of REPLIES)
      t.ok(
        (await round(at < 0 ? all + at : at)) > 0 || (at === SCAN && name === SWAPPED),
        `reply ${at} was noticed`,
      )
  })

void t.test('after a lost reply, later operations do not take each other’s replies', async (t) => {
  await using server = await RedisServer.start()
  const box = await middlebox(t, server)
  const direct = await open(t, server.url)
  const store = await open(t, box.url)
  const taken = newId()
  await direct.put(taken, bytesOf('in_progress', newToken()), SPANS)
  await store.put(newId(), bytesOf('in_progress', newToken()), SPANS)
  const firsts: (() => Soon<unknown>)[] = [
    () => store.put(newId(), bytesOf('in_progress', newToken()), SPANS),
    () => store.ping(),
  ]
  for (const first of firsts) {
    box.at = box.passed
    await t.rejects(async () => first(), { ...APPLIED, message: /timed out/ })
    // Neither may take a reply that is not its own.
    const [reply, own] = await Promise.allSettled([
      store.put(taken, bytesOf('in_progress', newToken()), SPANS),
      store.put(newId(), bytesOf('in_progress', newToken()), SPANS),
    ])
    t.match([reply, own], [{ reason: APPLIED }, { reason: APPLIED }])
    await until(answers(store))
    t.match(await store.put(taken, bytesOf('in_progress', newToken()), SPANS), { done: false })
  }
})
