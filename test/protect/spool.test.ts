import { cpSync, mkdtempSync, readdirSync, rmSync } from 'node:fs'
import { type FileHandle, open } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import t, { type Test } from 'tap'
import type { RoutePolicy } from '../../src/core/policy.ts'
import { spoolRoom } from '../../src/protect/settler.ts'
import { Outbox } from '../../src/store/outbox.ts'
import type { Forwarded } from '../../src/upstream/port.ts'
import {
  BROKEN,
  type Fault,
  HOUR,
  idle,
  LEASE,
  NOT_SENT,
  Replica,
  refused,
  replica,
  route,
  type Seen,
  Store,
  Stream,
  seen,
  TTL,
  until,
} from './harness.ts'

t.setTimeout(120_000)

/** If set, called before and after each disk operation. */
let onDisk: ((when: 'before' | 'after') => Promise<void> | undefined) | null = null

const handle = await open(fileURLToPath(import.meta.url))
const disk = Object.getPrototypeOf(handle) as FileHandle
await handle.close()
for (const method of ['appendFile', 'datasync', 'sync'] as const) {
  const original = disk[method] as (...args: unknown[]) => Promise<void>
  disk[method] = async function (this: FileHandle, ...args: unknown[]) {
    await onDisk?.('before')
    await original.apply(this, args)
    await onDisk?.('after')
  } as never
}

const MiB = 1024 ** 2
const BYPASS = route({ onStoreUnavailable: 'bypass' })

function folder(t: Test): string {
  const path = mkdtempSync(join(tmpdir(), 'spool-'))
  t.teardown(() => rmSync(path, { recursive: true, force: true }))
  return path
}

interface Spooling {
  readonly directory: string
  readonly outbox: Outbox
  readonly replica: Replica
  readonly said: string[]
  /** How many outcomes the process before left for this one. */
  readonly left: number
}

/** Starts a process whose spool is in that directory. */
async function spooling(
  t: Test,
  store: Store,
  directory: string,
  maxBytes = spoolRoom(MiB),
): Promise<Spooling> {
  const said: string[] = []
  const { outbox, left } = await Outbox.open({
    service: 'test',
    sealer: null,
    directory,
    maxBytes,
    say: (message) => void said.push(message),
  })
  const made = replica(t, { store, outbox })
  t.teardown(async () => {
    await made.ports.settler.close()
    await outbox.close()
  })
  made.ports.settler.restore(left, (bytes) => made.bytes.take(bytes))
  return { directory, outbox, replica: made, said, left: left.length }
}

/** Copies what a process killed now would leave on disk. */
function remains(t: Test, directory: string): string {
  const copy = folder(t)
  cpSync(directory, copy, { recursive: true, filter: (path) => !path.endsWith('spool.lock') })
  return copy
}

/** Claims, executes, and finds the store down when the outcome is there. */
async function deferred(r: Replica, reply: () => Forwarded, fault: Fault = 'down'): Promise<Seen> {
  r.script.push(() => {
    r.store.fault = () => fault
    return reply()
  })
  return await r.get()
}

void t.test('R04 after a kill with the store down, the next process answers from the spool', async (t) => {
  for (const fault of ['down', 'dropped', 'lost', 'late', 'full'] as const) {
    const store = new Store()
    const a = await spooling(t, store, folder(t))
    const first = await deferred(a.replica, () => a.replica.responded(), fault)
    t.equal(first.status, 201)
    const b = await spooling(t, store, remains(t, a.directory))
    a.replica.close()
    store.fault = () => 'down'
    t.match(await b.replica.get(), { bytes: first.bytes, replayed: true }, fault)
    await refused(t, b.replica, { body: 'other' }, 'idempotency_key_reused')
    t.equal(b.replica.ports.settler.size, 1)
    t.equal(b.replica.bytes.held, '{"id":"p1"}'.length, 'counted like any held body')

    store.fault = () => null
    await store.arrive()
    t.ok(await b.replica.ports.settler.flush())
    t.equal((await store.read(a.replica.id))?.state, 'completed')
    t.equal(b.replica.bytes.held, 0)
    await b.outbox.close()
    t.same(readdirSync(b.directory), ['spool.lock'], 'nothing is left over')
    t.match(
      await replica(t, { store }).get(),
      { bytes: first.bytes, replayed: true },
      'any replica replays it',
    )
    t.equal(a.replica.n + b.replica.n, 1)
  }
})

void t.test('R05 a spooled outcome is written with the token, fence and age of its claim', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t))
  await deferred(a.replica, () => a.replica.responded())
  store.now += 3 * LEASE
  const before = await store.read(a.replica.id)
  t.equal(before?.state, 'unknown', 'the lease has lapsed')
  const b = await spooling(t, store, remains(t, a.directory))
  a.replica.close()
  store.fault = () => null
  t.ok(await b.replica.ports.settler.flush())
  const { fence, token, createdAt, attempts } = before ?? {}
  t.match(await store.read(a.replica.id), { state: 'completed', fence, token, createdAt, attempts })
  t.same(b.replica.said('completed'), ['stored'])
})

void t.test('R04 an outcome whose record the store lost is written again from the spool', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t))
  const first = await deferred(a.replica, () => a.replica.responded())
  a.replica.close()
  const empty = new Store()
  const b = await spooling(t, empty, remains(t, a.directory))
  t.ok(await b.replica.ports.settler.flush())
  t.same(b.replica.said('completed'), ['recovered'])
  t.match(await b.replica.get(), { bytes: first.bytes, replayed: true })
  t.equal(b.replica.n, 0)
})

void t.test('a spooled outcome is stale if a newer attempt exists', async (t) => {
  const store = new Store()
  const retrying = route({ onLeaseExpired: 'retry' })
  const a = await spooling(t, store, folder(t))
  a.replica.downAtEnd(() => a.replica.responded(201, 'first'))
  await a.replica.get({ route: retrying })
  a.replica.close()
  store.fault = () => null
  store.now += 2 * LEASE
  const other = replica(t, { store })
  other.script.push(() => other.responded(201, 'second'))
  const second = await other.get({ route: retrying })
  t.notOk(second.replayed)
  const b = await spooling(t, store, remains(t, a.directory))
  t.ok(await b.replica.ports.settler.flush())
  t.same(b.replica.said('completed'), ['stale'])
  t.match(await b.replica.get({ route: retrying }), { bytes: second.bytes, replayed: true })
  await b.outbox.close()
  t.same(readdirSync(b.directory), ['spool.lock'])
})

void t.test(
  '§7 the next process frees the key of what was not executed once the store is back',
  async (t) => {
    const store = new Store()
    const a = await spooling(t, store, folder(t))
    t.equal((await deferred(a.replica, () => NOT_SENT)).code, 'upstream_unreachable')
    const b = await spooling(t, store, remains(t, a.directory))
    a.replica.close()
    await refused(t, b.replica, {}, 'idempotency_store_unavailable')
    store.fault = () => null
    const retry = await b.replica.get()
    t.match(retry, { status: 201, replayed: false })
    t.equal(b.replica.n, 1)
  },
)

void t.test('§7 an uncertain outcome is unknown to the next process too', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t))
  t.equal((await deferred(a.replica, () => BROKEN)).code, 'upstream_failed')
  const b = await spooling(t, store, remains(t, a.directory))
  a.replica.close()
  await refused(t, b.replica, {}, 'idempotency_outcome_unknown')
  store.fault = () => null
  t.ok(await b.replica.ports.settler.flush())
  t.match(await store.read(a.replica.id), { state: 'unknown', leaseExpired: false, lastError: 'reset' })
  t.equal(b.replica.n, 0)
})

void t.test('§3 a spooled withdrawal frees the key in the next process', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t))
  store.fails('put', 'lost', 'dropped')
  store.fault = ({ op }) => (op === 'put' ? null : 'down')
  t.equal((await a.replica.get()).code, 'idempotency_store_unavailable')
  await until(() => readdirSync(a.directory).length > 1)
  await a.replica.ports.settler.close()
  t.equal(
    a.replica.troubles().at(-1),
    'an outcome could not be stored; it is kept on disk for the next start',
  )
  await a.outbox.close()
  store.fault = () => null
  t.equal((await store.read(a.replica.id))?.state, 'in_progress')
  const b = await spooling(t, store, a.directory)
  t.equal(b.left, 1)
  t.equal(b.replica.ports.settler.held(a.replica.id), null, 'it says nothing about the record')
  t.match(await b.replica.get(), { status: 201, replayed: false })
  t.equal(a.replica.n + b.replica.n, 1)
})

void t.test('§3 the next process withdraws a late takeover, which is refused when it arrives', async (t) => {
  const store = new Store()
  const first = replica(t, { store })
  first.script.push(NOT_SENT)
  await first.get()
  const a = await spooling(t, store, folder(t))
  store.fails('swap', 'late')
  store.fault = ({ n }) => (n > store.calls - 1 && store.next.length === 0 ? 'down' : null)
  t.equal((await a.replica.get()).code, 'idempotency_store_unavailable')
  await a.replica.ports.settler.close()
  await a.outbox.close()
  store.fault = () => null
  const before = await store.read(a.replica.id)
  const b = await spooling(t, store, a.directory)
  t.ok(await b.replica.ports.settler.flush())
  await store.arrive()
  const after = await store.read(a.replica.id)
  t.equal(after?.state, 'failed_retryable', 'the claim that arrives now is refused')
  t.equal(after?.token.toString('hex'), before?.token.toString('hex'))
  t.not(after?.version, before?.version)
})

void t.test('R02 bypass: the next process settles what was executed without a claim', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t))
  store.fault = () => 'down'
  const first = await a.replica.get({ route: BYPASS })
  t.equal(first.status, 201)
  const b = await spooling(t, store, remains(t, a.directory))
  a.replica.close()
  t.match(await b.replica.get({ route: BYPASS }), { bytes: first.bytes, replayed: true })
  store.fault = () => null
  t.ok(await b.replica.ports.settler.flush())
  t.match(await replica(t, { store }).get(), { bytes: first.bytes, replayed: true })
  t.equal(a.replica.n + b.replica.n, 1)
})

void t.test('the next process settles a bypass over a lapsed claim as onLeaseExpired says', async (t) => {
  for (const onLeaseExpired of ['unknown', 'retry'] as const) {
    const policy = route({ onStoreUnavailable: 'bypass', onLeaseExpired })
    const store = new Store()
    // A claim whose owner fell silent.
    const silent = new Replica({ store, forward: () => new Promise(() => {}) })
    void silent.send({ route: policy })
    await idle()
    silent.close()
    store.now += 2 * LEASE
    const a = await spooling(t, store, folder(t))
    store.fault = () => 'down'
    const first = await a.replica.get({ route: policy })
    t.equal(first.status, 201)
    a.replica.close()
    const b = await spooling(t, store, remains(t, a.directory))
    store.fault = () => null
    t.ok(await b.replica.ports.settler.flush())
    t.same(b.replica.said('completed'), [onLeaseExpired === 'retry' ? 'stored' : 'stale'])
    const retry = await b.replica.get({ route: policy })
    if (onLeaseExpired === 'retry') t.match(retry, { bytes: first.bytes, replayed: true })
    else t.equal(retry.code, 'idempotency_outcome_unknown')
    t.equal(b.replica.n, 0)
  }
})

void t.test('several outcomes of one record are restored in order', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t))
  store.fault = () => 'down'
  a.replica.script.push(NOT_SENT)
  t.equal((await a.replica.get({ route: BYPASS })).code, 'upstream_unreachable')
  const first = await a.replica.get({ route: BYPASS })
  t.equal(first.status, 201)
  a.replica.close()
  const b = await spooling(t, store, remains(t, a.directory))
  t.equal(b.left, 2)
  t.match(await b.replica.get({ route: BYPASS }), { bytes: first.bytes, replayed: true })
  store.fault = () => null
  t.ok(await b.replica.ports.settler.flush())
  t.match(await b.replica.get(), { bytes: first.bytes, replayed: true })
})

void t.test('the spool holds only what the store has not taken', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t))
  t.equal((await a.replica.get()).status, 201)
  t.same(readdirSync(a.directory), ['spool.lock'])
  a.replica.downAtEnd()
  await a.replica.get({ key: 'another' })
  t.equal(readdirSync(a.directory).length, 2)
  store.fault = () => null
  await until(() => a.replica.ports.settler.size === 0)
  await until(() => readdirSync(a.directory).length === 1)
})

void t.test('a spooled outcome older than its record can be is dropped with a message', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t))
  const short = route({ unresolvedTtl: 1 })
  a.replica.downAtEnd()
  await a.replica.get({ route: short })
  a.replica.close()
  const directory = remains(t, a.directory)
  const { now } = Date
  t.intercept(Date, 'now', { value: () => now() + HOUR })
  const b = await spooling(t, store, directory)
  t.equal(b.left, 0)
  t.same(b.said, ['outcomes in the spool are older than their records can be; they are dropped'])
  await b.outbox.close()
  t.same(readdirSync(directory), ['spool.lock'])
})

void t.test('a clock set back does not keep a spooled outcome longer', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t))
  await deferred(a.replica, () => a.replica.responded())
  a.replica.close()
  const directory = remains(t, a.directory)
  const { now } = Date
  t.intercept(Date, 'now', { value: () => now() - 30 * TTL })
  const { outbox, left } = await Outbox.open({
    service: 'test',
    sealer: null,
    directory,
    maxBytes: MiB,
    say: () => t.fail(),
  })
  t.equal(left[0]?.unsettled.usefulFor, 30 * TTL)
  await outbox.close()
})

void t.test('with a full spool an outcome is held in memory, reported, lost with the process', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t), 100)
  const first = await deferred(a.replica, () => a.replica.responded())
  t.equal(first.status, 201)
  t.ok(a.replica.troubles().includes('an outcome could not be spooled; it is held in memory only'))
  t.match(await a.replica.get(), { bytes: first.bytes, replayed: true })
  await a.replica.ports.settler.close()
  t.equal(a.replica.troubles().at(-1), 'an outcome could not be stored and is lost')
})

void t.test('a spool has room for everything that memory may hold', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t), spoolRoom(MiB))
  store.fault = () => 'down'
  for (let i = 0; i < 16; i++) {
    a.replica.script.push(() => a.replica.responded(201, 'x'.repeat(MiB / 16)))
    await a.replica.get({ route: BYPASS, key: `k${i}` })
  }
  t.notOk(a.replica.troubles().includes('an outcome could not be spooled; it is held in memory only'))
  const b = await spooling(t, store, remains(t, a.directory))
  t.equal(b.left, 16)
  t.equal(b.replica.bytes.held, MiB)
})

void t.test('a hanging disk holds up the answer for 500 ms only', async (t) => {
  const store = new Store()
  const a = await spooling(t, store, folder(t))
  const hang = Promise.withResolvers<void>()
  onDisk = () => hang.promise
  t.teardown(() => {
    onDisk = null
  })
  const first = await deferred(a.replica, () => a.replica.responded())
  t.equal(first.status, 201)
  t.match(a.replica.events.at(-1), [
    'trouble',
    'an outcome could not be spooled; it is held in memory only',
    { error: 'the disk did not take it within 500 ms' },
  ])
  hang.resolve()
  store.fault = () => null
  t.ok(await a.replica.ports.settler.flush())
})

void t.test('a retry gets no outcome before it is on disk', async (t) => {
  // Found by the simulation (seed 7055262): the process died between the retry's answer and the disk.
  const store = new Store()
  const a = await spooling(t, store, folder(t))
  const hang = Promise.withResolvers<void>()
  const reached = Promise.withResolvers<void>()
  onDisk = () => {
    reached.resolve()
    return hang.promise
  }
  t.teardown(() => {
    onDisk = null
  })
  const told: Seen[] = []
  const first = deferred(a.replica, () => a.replica.responded())
  await reached.promise
  const retry = a.replica.get().then((answer) => void told.push(answer))
  await idle()
  t.same(told, [])
  hang.resolve()
  const { bytes } = await first
  await retry
  t.match(told, [{ bytes, replayed: true }])
  store.fault = () => null
  t.ok(await a.replica.ports.settler.flush())
})

interface Story {
  readonly name: string
  readonly policy: RoutePolicy
  readonly reply: (r: Replica, executed: () => void) => Forwarded
  /** Faults of the store's calls, in order; then it is down. */
  readonly faults: readonly (Fault | null)[]
}

const whole: Story['reply'] = (r, executed) => {
  executed()
  return r.responded(201, 'once')
}
const STORIES: readonly Story[] = [
  { name: 'a complete answer', policy: route(), reply: whole, faults: [null] },
  {
    name: 'a completion whose reply is lost',
    policy: route(),
    reply: whole,
    faults: [null, 'lost'],
  },
  { name: 'a completion that arrives late', policy: route(), reply: whole, faults: [null, 'late'] },
  { name: 'no bytes were sent', policy: route(), reply: () => NOT_SENT, faults: [null] },
  {
    name: 'bytes were sent, no answer came',
    policy: route(),
    reply: (_, executed) => {
      executed()
      return BROKEN
    },
    faults: [null],
  },
  {
    name: 'a stream',
    policy: route(),
    reply: (_, executed) => {
      executed()
      const stream = new Stream()
      stream.end('complete')
      return stream.reply()
    },
    faults: [null],
  },
  { name: 'a lost claim', policy: route(), reply: whole, faults: ['dropped', 'lost'] },
  { name: 'bypass', policy: BYPASS, reply: whole, faults: [] },
  { name: 'bypass after a lost claim', policy: BYPASS, reply: whole, faults: ['late', 'dropped'] },
]

for (const story of STORIES)
  void t.test(
    `R04 R05 X06 an answer sent with the store down survives death at any call (${story.name})`,
    async (t) => {
      let survived = false
      for (let k = 1; !survived; k++)
        for (const death of ['before', 'after'] as const) survived = await life(t, story, k, death)
    },
  )

/** Runs a process with a spool that dies at its k-th port or disk call, then its successors on what it left. */
async function life(t: Test, story: Story, k: number, death: 'before' | 'after'): Promise<boolean> {
  const store = new Store()
  const directory = folder(t)
  const { outbox } = await Outbox.open({
    service: 'test',
    sealer: null,
    directory,
    maxBytes: MiB,
    say: () => {},
  })
  let n = 0
  const executed = (): void => void n++
  let calls = 0
  let storeCalls = 0
  let dead = false
  const hang = Promise.withResolvers<void>()
  const step = (when: 'before' | 'after'): Promise<void> | undefined => {
    if (when === 'before') calls++
    if (!dead && calls === k && when === death) dead = true
    return dead ? hang.promise : undefined
  }
  onDisk = step
  store.fault = () => {
    storeCalls++
    if (dead) return 'dead'
    if (++calls === k) {
      dead = true
      return death === 'before' ? 'dead' : 'dead_applied'
    }
    const planned = story.faults[storeCalls - 1]
    return planned === undefined ? 'down' : planned
  }
  const mortal: Replica = new Replica({
    store,
    outbox,
    forward: async () => {
      if (dead) return new Promise(() => {})
      if (++calls !== k) return story.reply(mortal, executed)
      dead = true
      if (death === 'after') story.reply(mortal, executed)
      return new Promise(() => {})
    },
  })
  let first: Seen | null = null
  let copied: string | null = null
  const title = `${story.name}, ${death} call ${k}`
  const answered = mortal.send({ route: story.policy }).then((answer) => {
    if (dead) return
    first = seen(answer)
    // A complete answer has left: from now on death costs nothing.
    copied = remains(t, directory)
  })
  await Promise.race([answered, until(() => dead)])
  await idle()
  const survived = !dead
  dead = true
  copied ??= remains(t, directory)
  onDisk = null
  mortal.close()

  const answers: Seen[] = first === null ? [] : [first]
  const whole = (first as Seen | null)?.bytes ?? null
  const late = { executed: n }
  for (const [fault, later] of [
    ['down', 0],
    [null, 0],
    [null, 2 * LEASE],
  ] as const) {
    store.fault = () => fault
    store.now += later
    const next = await spooling(t, store, copied)
    next.replica.script.push((): Forwarded => {
      executed()
      return next.replica.responded(201, `again ${n}`)
    })
    const answer = await next.replica.get({ route: story.policy })
    answers.push(answer)
    if (whole !== null)
      t.match(answer, { bytes: whole, replayed: true }, `${title}: replayed, the store ${fault}`)
    if (fault === null) t.ok(await next.replica.ports.settler.flush(), `${title}: everything is written`)
    copied = remains(t, next.directory)
    next.replica.close()
    await next.outbox.close()
  }
  await store.arrive()
  hang.resolve()
  await outbox.close()
  // `bypass` explicitly gives up the promise: nobody knows of what died before it was on disk.
  const most = story.policy === BYPASS && whole === null ? late.executed + 1 : 1
  t.ok(n <= most, `${title}: N = ${n}`)
  const kept = new Set(answers.filter((one) => one.replayed).map((one) => one.bytes))
  t.ok(kept.size <= 1, `${title}: all replays are the same`)
  return survived
}
