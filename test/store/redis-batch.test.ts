import { once } from 'node:events'
import { connect } from 'node:net'
import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { readStamps } from '../../src/store/record/codec.ts'
import { Batches, type Operation } from '../../src/store/redis/batch.ts'
import { Refused } from '../../src/store/redis/connection.ts'
import type { RespArg, RespReply } from '../../src/store/redis/resp.ts'
import type { Store } from '../../src/store/register.ts'
import { DONE, scripted } from '../support/fake-redis.ts'
import { RedisServer } from '../support/redis.ts'
import { relay } from '../support/relay.ts'
import { repliesTo } from '../support/replies.ts'
import { bytesOf, claim, HOUR, newId, newToken, SPANS, until } from './fixtures.ts'
import { APPLIED, claiming, end, idIn, KEYS, NOT_APPLIED, NOTE, open, watch } from './redis-fixtures.ts'

/* All operations of a turn are one call of a script, which may be applied until its callers give up (docs/adr/0125). */

const server = await RedisServer.start()
t.teardown(() => server[Symbol.asyncDispose]())

/** How often a script was called since the last time. */
async function calls(): Promise<number> {
  const stats = String(await server.command('INFO', 'commandstats'))
  await server.command('CONFIG', 'RESETSTAT')
  return Number(/cmdstat_evalsha:calls=(\d+)/.exec(stats)?.[1] ?? 0)
}

void t.test('an operation that fails leaves the others of its turn as they are', async (t) => {
  const { store } = await open(t, server.url)
  const [list, record, fresh, token] = [newId(), newId(), newId(), newToken()]
  await server.command('RPUSH', KEYS.record(list), 'x')
  await server.command('RPUSH', KEYS.bucket(list), 'x')
  await store.put(record, claiming(token), SPANS)
  await calls()
  const own = { token, states: ['in_progress'] } as const
  t.match(
    await Promise.allSettled([
      store.get(list),
      claim(store, list),
      store.limits.take(list, { count: 1, per: HOUR }, 1),
      claim(store, fresh),
      store.swap(list, { version: 1 }, claiming(), SPANS, true),
      store.swap(record, own, bytesOf('completed', token), SPANS, false),
      store.history.append(list, [NOTE]),
      store.history.append(record, [NOTE]),
      store.remove(list, 1),
      store.get(fresh),
    ]),
    [
      { reason: { name: 'CorruptRecord' } },
      { reason: { name: 'CorruptRecord' } },
      { reason: { name: 'CorruptRecord' } },
      { value: { done: true } },
      { reason: { name: 'CorruptRecord' } },
      { value: { done: true } },
      { reason: { name: 'CorruptRecord' } },
      { value: true },
      { reason: { name: 'CorruptRecord' } },
      { value: { bytes: Buffer } },
    ],
  )
  t.equal(await calls(), 1)
  t.equal(await server.command('TYPE', KEYS.record(list)), 'list')
})

void t.test('whoever waits for one of the attempts that end in a turn is told, and no other', async (t) => {
  const user = 'app:pw@'
  await server.command('ACL', 'SETUSER', 'app', 'on', '>pw', '~*', '&*', '+@all', '-pubsub')
  for (const url of [server.url, server.url.replace('//', `//${user}`)]) {
    const { store } = await open(t, url)
    const [waited, other] = [newId(), newId()]
    await Promise.all([waited, other].map((id) => claim(store, id)))
    const watcher = await watch(store, waited)
    await calls()
    await Promise.all([waited, other].map((id) => end(store, id)))
    await until(() => watcher.told > 0)
    watcher.stop()
    const stats = String(await server.command('INFO', 'commandstats'))
    t.equal(Number(/cmdstat_spublish:calls=(\d+)/.exec(stats)?.[1]), url.includes(user) ? 2 : 1)
  }
})

void t.test('a reply that is not as long as its results proves nothing of any operation', async (t) => {
  for (const put of [[...DONE, ':9\r\n'], [':8\r\n', ':1\r\n'], DONE.slice(0, -1)]) {
    const odd = await scripted(t, { put, get: [':1\r\n', '$-1\r\n'] })
    const { store } = await open(t, odd.url)
    for (const one of await Promise.allSettled([claim(store), store.get(newId())]))
      t.match(one, { reason: APPLIED })
  }
})

/** A store behind a relay, which has spoken with its server. */
async function relayed(t: Test, timeoutMs: Millis) {
  const between = await relay(server.port)
  t.teardown(() => between[Symbol.asyncDispose]())
  const { store } = await open(t, `redis://127.0.0.1:${between.port}`, { timeoutMs })
  await store.get(newId())
  return { between, store }
}

void t.test('what arrives after its caller has given up is not applied', async (t) => {
  const { between, store } = await relayed(t, 300)
  const direct = (await open(t, server.url)).store
  const [fresh, record, token] = [newId(), newId(), newToken()]
  await direct.put(record, claiming(token), SPANS)
  const before = (await direct.get(record)).bytes
  between.passCommands = false
  const own = { token, states: ['in_progress'] } as const
  for (const one of await Promise.allSettled([
    claim(store, fresh),
    store.swap(record, own, bytesOf('completed', token), SPANS, false),
    store.renew([{ id: record, token, ...SPANS }]),
    store.remove(record, readStamps(before as Buffer).version),
  ]))
    t.match(one, { reason: { ...APPLIED, message: /timed out/ } })
  const answered = new Promise<string>((resolve) => {
    between.onReply = (bytes) => resolve(String(bytes))
  })
  between.release()
  t.match(await answered, /late/)
  t.equal((await direct.get(fresh)).bytes, null)
  t.strictSame((await direct.get(record)).bytes, before)
})

/** Sends bytes to the server once more, as a library or a middlebox might. */
async function resend(bytes: Buffer): Promise<RespReply> {
  const socket = connect(server.port, '127.0.0.1')
  await once(socket, 'connect')
  const reply = new Promise<RespReply>((resolve) => {
    socket.on(
      'data',
      repliesTo((value) => resolve(value as RespReply)),
    )
  })
  socket.write(bytes)
  const answer = await reply
  socket.destroy()
  return answer
}

void t.test('the bytes of a batch that come twice in time hand out nothing twice', async (t) => {
  const { between, store } = await relayed(t, 30_000)
  const [fresh, failed, running, token] = [newId(), newId(), newId(), newToken()]
  const { now: version } = await store.put(failed, bytesOf('failed_retryable', newToken()), SPANS)
  await store.put(running, claiming(token), SPANS)
  const sent: Buffer[] = []
  between.onCommand = (bytes) => void sent.push(Buffer.from(bytes))
  const own = { token, states: ['in_progress'] } as const
  const replies = await Promise.all([
    claim(store, fresh),
    store.swap(failed, { version }, claiming(), SPANS, true),
    store.swap(running, own, bytesOf('completed', token), SPANS, false),
  ])
  for (const reply of replies) t.match(reply, { done: true })
  const ids = [fresh, failed, running]
  const read = () => Promise.all(ids.map(async (id) => (await store.get(id)).bytes))
  const before = await read()
  const again = (await resend(Buffer.concat(sent))) as RespReply[]
  t.strictSame([again[1], again[3], again[5]], [0, 0, 0], 'each gives back what is there')
  t.strictSame([again[2], again[4], again[6]], before)
  t.strictSame(await read(), before)
})

/** A server that has a clock, and tells what it has applied. */
function clocked() {
  const self = {
    /** The server's clock minus this process's. */
    ahead: 0,
    applied: [] as string[],
    calls: 0,
    /** Calls that it has received and not read. */
    held: null as (() => void)[] | null,
    now: () => Math.floor(performance.now() + 5_000_000 + self.ahead),
    async run(_: unknown, args: RespArg[], read: (reply: never, link: never) => unknown): Promise<unknown> {
      self.calls++
      const count = Number(args[0])
      const keys = args.slice(1, count + 1).map(String)
      const notAfter = (args[count + 1] as Buffer).readUIntBE(12, 6)
      if (self.held !== null) await new Promise<void>((go) => self.held?.push(go))
      const now = self.now()
      if (now >= notAfter) return read([Buffer.from('late'), now] as never, null as never)
      if (new Set(keys.map((key) => key[0])).size > 1) throw new Refused('CROSSSLOT Keys in request')
      self.applied.push(...keys)
      return read([now, ...keys.map(() => 4)] as never, null as never)
    },
  }
  const batches = new Batches({ timeoutMs: 5000 }, { run: self.run as never, isCluster: true })
  const ask = (key: string): Promise<boolean> =>
    batches.run({
      shard: Number(key[0]),
      key,
      head: Buffer.from('g'),
      read: (reply, at) => reply[at] === 4,
    } satisfies Operation<boolean>)
  return { self, batches, ask }
}

void t.test('a clock that never lets it in is refused as what it is: not applied', async (t) => {
  const { self, ask } = clocked()
  const { now } = self
  self.now = () => {
    self.ahead += HOUR
    return now()
  }
  await t.rejects(ask('1a'), { ...NOT_APPLIED, message: /too late by the server’s clock/ })
  t.strictSame([self.calls, self.applied], [3, []])
})

void t.test('a clock that steps back may let a late batch in, until the next reply', async (t) => {
  const { self, ask } = clocked()
  await ask('1a')
  self.held = []
  const late = ask('1b')
  await until(() => self.held?.length === 1)
  self.ahead = -HOUR
  const [go] = self.held
  self.held = null
  go?.()
  t.equal(await late, true)
  // Its last instant is as the clock is now.
  self.held = []
  const next = ask('1c')
  await until(() => self.held?.length === 1)
  self.ahead += 10_000
  self.held.splice(0).forEach((release) => release())
  self.held = null
  t.equal(await next, true, 'sent once more')
  t.equal(self.calls, 5)
})

void t.test('in a cluster, each shard has a batch', async (t) => {
  const { self, ask } = clocked()
  t.strictSame(await Promise.all([ask('1a'), ask('2a'), ask('1b')]), [true, true, true])
  t.strictSame(self.applied, ['1a', '1b', '2a'])
})

void t.test('a claim that a stepped clock lets in late meets what has been written since', async (t) => {
  // As if the clock had stepped back: the bytes are applied once more, long after their caller has given up.
  const { between, store } = await relayed(t, 30_000)
  const [id, token] = [newId(), newToken()]
  const sent: Buffer[] = []
  between.onCommand = (bytes) => void sent.push(Buffer.from(bytes))
  const { now: version } = await store.put(id, claiming(token), SPANS)
  between.onCommand = () => {}
  const other: Store = (await open(t, server.url)).store
  // The caller withdraws it, and another request takes it over.
  await store.swap(id, { token, states: ['in_progress'] }, bytesOf('failed_retryable', token), SPANS, false)
  const taken = await other.swap(id, { version: version + 1 }, claiming(), SPANS, true)
  t.match(taken, { done: true })
  const after = (await other.get(id)).bytes
  t.equal(((await resend(Buffer.concat(sent))) as RespReply[])[1], 0)
  t.strictSame((await other.get(id)).bytes, after)
})

void t.test('what a server refuses to one operation, it does not refuse to others', async (t) => {
  const node = await scripted(t)
  const [a, b] = [newId(), newId()]
  for (const [url, refusal] of [
    [node.cluster, 'TRYAGAIN Multiple keys'],
    [node.url, 'NOREPLICAS Not enough good replicas'],
    [node.url, 'MISCONF Errors writing to the AOF file'],
  ] as const) {
    const { store } = await open(t, url)
    const [there, gone] = [idIn(1), idIn(1)]
    node.says['put'] = ([, , , key]) => (key === KEYS.record(gone) ? `-${refusal}\r\n` : DONE)
    t.match(await Promise.allSettled([claim(store, there), claim(store, gone)]), [
      { value: { done: true } },
      { reason: { maybeApplied: false, message: `Redis refuses: ${refusal}` } },
    ])
  }
  // A real one that may not write still reads.
  const { store } = await open(t, server.url)
  await claim(store, a)
  await server.command('CONFIG', 'SET', 'min-replicas-to-write', '1')
  t.match(await Promise.allSettled([claim(store, b), store.get(a)]), [
    { reason: { ...NOT_APPLIED, message: /NOREPLICAS/ } },
    { value: { bytes: Buffer } },
  ])
  await server.command('CONFIG', 'SET', 'min-replicas-to-write', '0')
})
