import { hash, randomBytes } from 'node:crypto'
import fc from 'fast-check'
import type { Test } from 'tap'
import type { Identification } from '../../src/core/identification.ts'
import {
  type CompletedResponse,
  newReconciliation,
  type RecordId,
  type Spans,
  type State,
} from '../../src/core/record.ts'
import { Agreement } from '../../src/store/agreement.ts'
import { MARKED_FOR } from '../../src/store/marks.ts'
import { decodeRecord, encodeDraft, PREFIX, readStamps } from '../../src/store/record/codec.ts'
import { packed } from '../../src/store/record/packed.ts'
import { versionOf } from '../../src/store/record/prefix.ts'
import { Sealer } from '../../src/store/record/sealing.ts'
import type { Condition, DueKind, Listing, Store, SwapReply } from '../../src/store/register.ts'
import {
  ALL_BYTES,
  bytesOf,
  draft,
  HOUR,
  MINUTE,
  newId,
  newToken,
  response,
  SPANS,
  until,
} from './fixtures.ts'

export interface Harness extends AsyncDisposable {
  readonly register: Store
  /** Another process on the same store, if the adapter allows more than one. */
  readonly peer: Store
  /** Another service on the same store; null where nobody shares one. */
  readonly other: Store | null
  /** Whether a watcher is notified of the peer's writes. */
  readonly tellsPeers: boolean
  /** Moves the store's clock, for both. */
  advance(ms: number): void
}

type Make = () => Promise<Harness>

/** Two replicas in the middle of a key rotation: each seals with its own key and can open what the other sealed. */
const KEYS = ['one', 'two'].map((id) => ({ id, key: randomBytes(32) }))
const [SEALER, ROTATED] = [new Sealer(KEYS), new Sealer(KEYS.toReversed())]

/** What every adapter promises. What depends on the bytes of a record holds of compressed and sealed ones, too. `make`: an empty store. */
export function registerContract(t: Test, name: string, make: Make): void {
  registerEach(t, name, make, { isPacked: false, ofBytesOnly: false })
  registerEach(t, `${name}, packed`, packing(make), { isPacked: true, ofBytesOnly: true })
}

/** All of it, with compressed and sealed records. */
export function packedContract(t: Test, name: string, make: Make): void {
  registerEach(t, `${name}, packed`, packing(make), { isPacked: true, ofBytesOnly: false })
}

function packing(make: Make): Make {
  return async () => {
    const { register, peer, other, ...rest } = await make()
    return {
      ...rest,
      register: packed(register, SEALER, 'zstd'),
      peer: packed(peer, ROTATED, 'gzip'),
      other: other && packed(other, SEALER, 'zstd'),
    }
  }
}

async function there(store: Store, id: RecordId): Promise<Buffer> {
  return (await store.get(id)).bytes as Buffer
}

async function stampsOf(store: Store, id: RecordId): Promise<ReturnType<typeof readStamps>> {
  return readStamps(await there(store, id))
}

async function removed(store: Store, id: RecordId): Promise<boolean> {
  return store.remove(id, (await stampsOf(store, id)).version)
}

/** Writes a new record. */
async function made(
  store: Store,
  state: State,
  spans: Spans = SPANS,
  over: Parameters<typeof bytesOf>[2] = {},
) {
  const [id, token] = [newId(), newToken()]
  const { now } = await store.put(id, bytesOf(state, token, over), spans)
  return { id, token, now }
}

/** What an owner may do: from these states to that one. */
async function swapped(
  store: Store,
  id: RecordId,
  condition: Condition,
  state: State,
  nextFence = false,
): Promise<SwapReply> {
  const token = 'token' in condition ? condition.token : newToken()
  return store.swap(id, condition, bytesOf(state, token), SPANS, nextFence)
}

async function renewed(
  store: Store,
  id: RecordId,
  token: Buffer,
  dueIn = HOUR,
  dropIn = HOUR,
): Promise<boolean> {
  return (await store.renew([{ id, token, dueIn, dropIn }]))[0] as boolean
}

/** All pages of a list, until `isOver`. */
async function listed(
  store: Store,
  which: Listing,
  limit: number,
  between = async () => {},
): Promise<(readonly RecordId[])[]> {
  const pages: (readonly RecordId[])[] = []
  for (let cursor: string | null = null; pages.length === 0 || cursor !== null; ) {
    const page = await store.list(which, cursor, limit)
    pages.push(page.ids)
    cursor = page.next
    await between()
  }
  return pages
}

const note = (tag: string, text = '', ago = 0, count = 1) => ({
  tag,
  count,
  firstAgo: ago,
  lastAgo: ago / 2,
  text,
})

async function textsOf(store: Store, id: RecordId): Promise<string[]> {
  return (await store.history.read(id)).map(({ text }) => text)
}

const REFUSED = { done: false, bytes: null }
const LISTS = ['all', 'unresolved'] as const

function registerEach(
  t: Test,
  name: string,
  make: Make,
  { isPacked, ofBytesOnly }: { readonly isPacked: boolean; readonly ofBytesOnly: boolean },
): void {
  const testBytes = (title: string, body: (t: Test, harness: Harness) => Promise<void>) =>
    void t.test(`${name}: ${title}`, async (t) => {
      await using harness = await make()
      await body(t, harness)
    })
  const test: typeof testBytes = ofBytesOnly ? () => {} : testBytes

  testBytes('put writes a new record and stamps it', async (t, { register }) => {
    const [id, token] = [newId(), newToken()]
    const put = await register.put(id, bytesOf('in_progress', token), SPANS)
    const { now, bytes } = await register.get(id)
    t.ok(now >= put.now)
    const dueAndDrop = { due: put.now + SPANS.dueIn, dropAt: put.now + SPANS.dropIn }
    const stamp = { version: put.now, fence: put.now, createdAt: put.now }
    t.match(put, { done: true, stamp })
    t.same(readStamps(bytes as Buffer), { ...stamp, updatedAt: put.now, ...dueAndDrop })
    const { token: stored, ...record } = decodeRecord(bytes as Buffer)
    t.ok(stored.equals(token))
    t.match(record, { state: 'in_progress', leaseUntil: dueAndDrop.due, path: '/v1/payments/ü' })
  })

  test('put keeps a given fence and creation time (a lost record is rewritten)', async (t, { register }) => {
    const given = { fence: 1_700_000_000_007, createdAt: 1_700_000_000_001 }
    const put = await register.put(newId(), bytesOf('completed', newToken(), given), SPANS)
    t.match(put, { done: true, stamp: { version: put.now, ...given } })
  })

  test('V01 two services share nothing, even under the same id', async (t, harness) => {
    const { register, other } = harness
    if (other === null) return
    const { id, token: mine } = await made(register, 'in_progress')
    const theirs = newToken()
    let told = 0
    const stop = await register.watch(id, () => void told++)
    t.ok(await register.history.append(id, [note('a', 'mine')]))
    const before = await there(register, id)
    const { version } = readStamps(before)

    t.equal((await other.get(id)).bytes, null)
    t.match(await swapped(other, id, { version }, 'unknown'), REFUSED)
    t.match(await swapped(other, id, { token: mine, states: ['in_progress'] }, 'unknown'), REFUSED)
    t.equal(await renewed(other, id, mine), false)
    t.equal(await other.remove(id, version), false)
    t.equal(await other.history.append(id, [note('b', 'theirs')]), false)
    t.same(await other.history.read(id), [])
    for (const which of LISTS) t.same((await other.list(which, null, 10)).ids, [])
    harness.advance(SPANS.dueIn + MINUTE)
    t.same(await other.due(10), [], 'the other service does not sweep it')
    t.same(await register.due(10), [id])
    t.same(await there(register, id), before)

    const put = await other.put(id, bytesOf('completed', theirs), SPANS)
    t.ok(put.done, 'the same id is free for the other service')
    t.ok(await removed(other, id))
    t.same(await there(register, id), before)
    t.equal((await register.history.read(id)).length, 1)
    t.equal(told, 0, 'watchers are not notified of another service’s writes')
    stop()

    const once = { count: 1, per: HOUR }
    t.equal(await register.limits.take(id, once, 1), 0)
    t.equal(await other.limits.take(id, once, 1), 0, 'each service has its own rate')
    t.ok((await register.limits.take(id, once, 1)) > 0)
    t.equal(await other.limits.take(id, once, -1), 0)
    t.ok((await register.limits.take(id, once, 1)) > 0)
  })

  test('put returns an existing record and changes nothing', async (t, { register, advance }) => {
    const { id } = await made(register, 'in_progress')
    const before = await there(register, id)
    advance(MINUTE)
    const second = await register.put(id, bytesOf('completed', newToken()), SPANS)
    t.ok(!second.done && second.bytes.equals(before))
    t.ok((await there(register, id)).equals(before))
  })

  test('50 parallel puts of one id: exactly one succeeds', async (t, { register, peer }) => {
    const id = newId()
    const tokens = Array.from({ length: 50 }, newToken)
    const replies = await Promise.all(
      tokens.map(async (token, n) => (n % 2 ? register : peer).put(id, bytesOf('in_progress', token), SPANS)),
    )
    t.equal(replies.filter((reply) => reply.done).length, 1)
    const winner = tokens[replies.findIndex((reply) => reply.done)] as Buffer
    for (const reply of replies)
      t.ok(reply.done || decodeRecord(reply.bytes).token.equals(winner), 'the others see the winner')
  })

  test('20 parallel swaps on one version: exactly one succeeds', async (t, { register, peer }) => {
    const { id, now: version } = await made(register, 'failed_retryable')
    const swaps = await Promise.all(
      Array.from({ length: 20 }, async (_, n) =>
        swapped(n % 2 ? register : peer, id, { version }, 'in_progress', true),
      ),
    )
    t.equal(swaps.filter((reply) => reply.done).length, 1)
  })

  test('T01 a record exists until dropAt, and then for no operation', async (t, { register, advance }) => {
    const { id, token, now: version } = await made(register, 'in_progress', { dueIn: MINUTE, dropIn: HOUR })
    advance(HOUR - MINUTE)
    t.ok(await there(register, id))
    t.same(await register.due(10), [id])
    advance(MINUTE)
    t.equal((await register.get(id)).bytes, null)
    for (const condition of [{ version }, { token, states: ['in_progress'] } as const])
      t.match(await swapped(register, id, condition, 'completed'), REFUSED)
    t.equal(await renewed(register, id, token), false)
    t.equal(await register.remove(id, version), false)
    t.same(await register.due(10), [])
    const again = await register.put(id, bytesOf('completed', newToken()), SPANS)
    t.ok(again.done, 'the id is free again')
    t.ok(again.now >= version + HOUR)
    t.equal((await stampsOf(register, id)).version, again.now)
    advance(2 * HOUR)
    t.same(await register.due(10), [], 'the first record left nothing in the index')
  })

  testBytes(
    'swap by version raises the version, the fence only on request; createdAt stays',
    async (t, h) => {
      const { register, advance } = h
      const { id, now: created } = await made(register, 'in_progress')
      advance(MINUTE)
      const token = newToken()
      const spans = { dueIn: 5 * MINUTE, dropIn: 7 * HOUR }
      const given = { fence: 5, createdAt: 6 }
      const kept = await register.swap(
        id,
        { version: created },
        bytesOf('unknown', token, given),
        spans,
        false,
      )
      const stamp = { version: created + 1, fence: created, createdAt: created }
      t.match(kept, { done: true, stamp })
      t.ok(kept.now >= created + MINUTE)
      const times = { updatedAt: kept.now, due: kept.now + spans.dueIn, dropAt: kept.now + spans.dropIn }
      t.same(await stampsOf(register, id), { ...stamp, ...times })
      const next = await swapped(register, id, { version: created + 1 }, 'in_progress', true)
      t.match(next, { done: true, stamp: { version: created + 2, fence: created + 1, createdAt: created } })
    },
  )

  testBytes('§2 a swap never lowers the fence', async (t, { register }) => {
    const { id, now } = await made(register, 'failed_retryable')
    const written = [
      { fence: now + 7, next: false, stands: now + 7 },
      { fence: now + 2, next: false, stands: now + 7 },
      { fence: now + 8, next: true, stands: now + 8 },
      { fence: 0, next: true, stands: now + 9 },
    ]
    for (const [n, { fence, next, stands }] of written.entries()) {
      const bytes = bytesOf('in_progress', newToken(), { fence })
      const reply = await register.swap(id, { version: now + n }, bytes, SPANS, next)
      t.match(reply, { done: true, stamp: { fence: stands } })
      t.equal((await stampsOf(register, id)).fence, stands)
    }
  })

  test('swap on another version returns the existing record and changes nothing', async (t, { register }) => {
    const { id, now } = await made(register, 'in_progress')
    const before = await there(register, id)
    for (const version of [now - 1, now + 1, 0]) {
      const reply = await swapped(register, id, { version }, 'completed')
      t.ok(!reply.done && reply.bytes?.equals(before))
    }
    t.match(await swapped(register, newId(), { version: 1 }, 'in_progress'), REFUSED)
  })

  testBytes('L10 swap by token and state works for the owner alone, in those states', async (t, h) => {
    const { id, token } = await made(h.register, 'in_progress')
    const swap = async (by: Buffer, ...states: ('in_progress' | 'unknown' | 'completed')[]) =>
      (await swapped(h.register, id, { token: by, states }, 'completed')).done
    t.notOk(await swap(newToken(), 'in_progress'), 'a stranger')
    t.notOk(await swap(token, 'unknown', 'completed'), 'the owner, in another state')
    t.notOk(await swap(token), 'no state at all')
    t.ok(await swap(token, 'unknown', 'in_progress'))
    t.notOk(await swap(token, 'unknown', 'in_progress'), 'it is completed now')
  })

  testBytes('renew extends the owner’s lease and nobody else’s', async (t, { register, advance }) => {
    const spans = { dueIn: MINUTE, dropIn: 5 * HOUR }
    const { id: mine, token, now: created } = await made(register, 'in_progress', spans)
    const { id: theirs } = await made(register, 'in_progress', { ...SPANS, dueIn: 9 * HOUR })
    const [finished, absent] = [newId(), newId()]
    await register.put(finished, bytesOf('completed', token), SPANS)
    advance(MINUTE)
    t.same(await register.due(10), [mine])
    const before = await there(register, finished)
    const items = [mine, theirs, finished, absent].map((id) => ({ id, token, dueIn: HOUR, dropIn: 0 }))
    t.same(await register.renew(items), [true, false, false, false])
    t.same(await register.renew([]), [])
    t.ok((await there(register, finished)).equals(before))
    const { now, bytes } = await register.get(mine)
    const stamps = readStamps(bytes as Buffer)
    t.match(stamps, {
      version: created + 1,
      fence: created,
      createdAt: created,
      dropAt: created + spans.dropIn,
    })
    t.ok(stamps.due > created + HOUR && stamps.due <= now + HOUR)
    t.same(await register.due(10), [], 'the index has the new due time')
    advance(HOUR)
    t.same(await register.due(10), [mine])
    advance(4 * HOUR)
    t.equal((await register.get(mine)).bytes, null, 'renewing does not extend the retention')
  })

  testBytes('V08 a renewal revives a record whose owner only fell silent', async (t, h) => {
    const { register, advance } = h
    const asked = { ...newReconciliation(1), asked: 20, notFound: 1, answer: 'not found' }
    for (const deadLettered of [false, true]) {
      const silent = {
        leaseExpired: true,
        reconciliation: { ...asked, deadLettered },
        key: 'k',
        attempts: 3,
      }
      const { id, token, now: version } = await made(register, 'unknown', SPANS, silent)
      t.notOk(await renewed(register, id, newToken()))
      advance(2 * HOUR)
      t.same(await register.due(10), [id])
      t.ok(await renewed(register, id, token, HOUR, 48 * HOUR))
      const { now, bytes } = await register.get(id)
      const record = decodeRecord(bytes as Buffer)
      t.match(record, { state: 'in_progress', version: version + 1, fence: version, attempts: 3, key: 'k' })
      t.ok(record.state === 'in_progress' && record.leaseUntil > now && record.leaseUntil <= now + HOUR)
      t.ok(record.dropAt > now + 47 * HOUR)
      t.same(await register.due(10), [], 'the index has the new due time')
      t.ok(await renewed(register, id, token))
      t.ok((await swapped(register, id, { token, states: ['in_progress'] }, 'completed')).done)
    }
  })

  testBytes('V08 a renewal revives nothing else', async (t, { register, peer }) => {
    const token = newToken()
    const others = [
      bytesOf('unknown', token, { leaseExpired: false, status: 502 }),
      bytesOf('completed', token),
      bytesOf('failed_retryable', token),
      bytesOf('expired', token),
      bytesOf('unknown', newToken(), { leaseExpired: true }),
      ...(isPacked ? [] : [bytesOf('unknown', token, { leaseExpired: true }).subarray(0, PREFIX.end)]),
    ]
    for (const bytes of others) {
      const id = newId()
      await register.put(id, Buffer.concat([bytes]), SPANS)
      const before = await there(register, id)
      t.notOk(await renewed(peer, id, token))
      t.ok((await there(register, id)).equals(before))
    }
  })

  test('V08 when a renewal races with a reconciler’s write, exactly one of them succeeds', async (t, h) => {
    for (let n = 0; n < 10; n++) {
      const { id, token, now: version } = await made(h.register, 'unknown', SPANS, { leaseExpired: true })
      const [isRenewed, resolved] = await Promise.all([
        renewed(h.register, id, token),
        swapped(h.peer, id, { version }, 'failed_retryable'),
      ])
      t.not(isRenewed, resolved.done)
    }
  })

  test('due lists unresolved records whose time has come, oldest first, up to the limit', async (t, h) => {
    const { register, advance } = h
    const ids: RecordId[] = []
    for (let n = 0; n < 6; n++) {
      const spans = { dueIn: (6 - n) * HOUR, dropIn: 24 * HOUR }
      ids.push((await made(register, n % 2 ? 'unknown' : 'in_progress', spans)).id)
    }
    for (const state of ['completed', 'failed_retryable', 'expired'] as const)
      await made(register, state, { dueIn: 1, dropIn: 24 * HOUR })
    t.same(await register.due(10), [])
    advance(4 * HOUR)
    t.same(await register.due(10), ids.slice(2).reverse())
    t.same(await register.due(2), ids.slice(4).reverse())
    t.same(await register.due(10), ids.slice(2).reverse(), 'asking removes nothing')
  })

  test('due drops a record that is resolved or removed, and lists it once it is unresolved again', async (t, h) => {
    const { register, advance } = h
    const spans = { dueIn: MINUTE, dropIn: 24 * HOUR }
    const { id, token, now: version } = await made(register, 'unknown', spans)
    const other = await made(register, 'in_progress', spans)
    advance(MINUTE)
    t.same((await register.due(10)).length, 2)
    await register.swap(id, { version }, bytesOf('failed_retryable', token), spans, false)
    t.ok(await register.remove(other.id, other.now))
    t.same(await register.due(10), [])
    await register.swap(id, { version: version + 1 }, bytesOf('in_progress', token), spans, true)
    t.same(await register.due(10), [])
    advance(MINUTE)
    t.same(await register.due(10), [id])
  })

  testBytes('due for bodies lists expired responses whose records live on', async (t, harness) => {
    const { register, peer, other, advance } = harness
    const token = newToken()
    const ends = { result: { ...response(), afterBody: HOUR } as CompletedResponse }
    const spans = (n: number) => ({ dueIn: n * HOUR, dropIn: 24 * HOUR })
    const ids: RecordId[] = []
    for (let n = 1; n <= 4; n++) {
      const id = newId()
      ids.push(id)
      const claim = { token, states: ['in_progress'] } as const
      if (n % 2) await register.put(id, bytesOf('completed', token, ends), spans(n))
      else {
        await register.put(id, bytesOf('in_progress', token), SPANS)
        t.ok((await peer.swap(id, claim, bytesOf('completed', token, ends), spans(n), false)).done)
      }
    }
    await made(register, 'completed', spans(1))
    const { id: unknown } = await made(register, 'unknown', spans(2))
    const bodies: [number, DueKind] = [10, 'bodies']
    t.same(await register.due(...bodies), [])
    advance(3 * HOUR)
    t.same((await peer.due(...bodies)).toSorted(), ids.slice(0, 3).toSorted())
    t.same((await other?.due(...bodies)) ?? [], [])
    t.equal((await register.due(1, 'bodies')).length, 1)
    t.same(await register.due(10), [unknown], 'unresolved records are listed separately')
    t.same((await register.list('unresolved', null, 10)).ids, [unknown])
    const [taken, gone, kept] = ids as [RecordId, RecordId, RecordId]
    t.notOk(await renewed(register, taken, token))

    const over = { result: { kept: false, why: 'past_ttl', status: 201, location: null } } as const
    const { version } = await stampsOf(register, taken)
    const bytes = bytesOf('completed', token, over)
    t.ok((await register.swap(taken, { version }, bytes, spans(20), false)).done)
    t.ok(await removed(peer, gone))
    t.same(await register.due(...bodies), [kept])
    advance(21 * HOUR)
    t.same(await register.due(...bodies), [], 'expired records are left out')
    t.same(await register.due(10), [])
  })

  test('remove deletes only the given version; a recreated record has a greater version and fence', async (t, h) => {
    const { register, advance } = h
    const { id, now: version } = await made(register, 'in_progress')
    t.equal(await register.remove(id, version + 1), false)
    t.equal(await register.remove(newId(), version), false)
    t.ok(await there(register, id))
    t.equal(await register.remove(id, version), true)
    t.equal((await register.get(id)).bytes, null)
    t.equal(await register.remove(id, version), false)
    advance(1)
    const again = await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    t.ok(again.done && again.stamp.version > version && again.stamp.fence > version)
    const late = await swapped(register, id, { version }, 'completed')
    t.notOk(late.done, 'a write meant for the first record does not hit the second')
  })

  testBytes('bytes come back exactly as written', async (t, { register }) => {
    const { id, token } = await made(register, 'in_progress')
    const result = response(Buffer.concat([ALL_BYTES, randomBytes(5 * 1024 * 1024)]))
    const own = { token, states: ['in_progress'] } as const
    const bytes = encodeDraft(draft('completed', token, { result }))
    t.ok((await register.swap(id, own, bytes, SPANS, false)).done)
    const record = decodeRecord(await there(register, id))
    t.ok(record.state === 'completed' && record.result.kept)
    if (record.state !== 'completed' || !record.result.kept || !result.kept) return
    t.ok(record.result.response.body.equals(result.response.body))
    t.same(record.result.response.headers, result.response.headers)
  })

  testBytes('a record of an unknown schema can be read and removed, but not overwritten', async (t, h) => {
    const { register, advance } = h
    const [id, token] = [newId(), newToken()]
    const bytes = bytesOf('in_progress', token)
    bytes[PREFIX.schema] = 9
    const { now: version } = await register.put(id, bytes, { dueIn: MINUTE, dropIn: HOUR })
    const before = await there(register, id)
    t.equal(before[PREFIX.schema], 9)
    advance(2 * MINUTE)
    for (const condition of [{ version }, { token, states: ['in_progress'] } as const]) {
      const reply = await swapped(register, id, condition, 'completed')
      t.ok(!reply.done && reply.bytes?.equals(before))
    }
    t.notOk(await renewed(register, id, token))
    const again = await register.put(id, bytesOf('completed', token), SPANS)
    t.ok(!again.done && again.bytes.equals(before))
    t.throws(() => decodeRecord(before), { name: 'CorruptRecord' })
    t.equal(versionOf(before), version)
    t.equal(await register.remove(id, version + 1), false)
    t.ok(before.equals(await there(register, id)))
    t.equal(await register.remove(id, version), true)
    t.equal((await register.get(id)).bytes, null)
    t.same((await register.list('unresolved', null, 10)).ids, [])
    t.ok((await register.put(id, bytesOf('in_progress', newToken()), SPANS)).done)
  })

  testBytes('a buffer passed to or returned by the store is not the record', async (t, h) => {
    const { register } = h
    const [id, token] = [newId(), newToken()]
    const bytes = bytesOf('in_progress', token)
    const copy = Buffer.from(bytes)
    await register.put(id, bytes, SPANS)
    t.ok(bytes.equals(copy), 'the given buffer is not stamped in place')
    bytes.fill(0)
    const first = await there(register, id)
    const kept = Buffer.from(first)
    first.fill(0)
    const met = await register.put(id, copy, SPANS)
    if (!met.done) met.bytes.fill(0)
    const lost = await register.swap(id, { version: 1 }, copy, SPANS, false)
    if (!lost.done) lost.bytes?.fill(0)
    t.ok((await there(register, id)).equals(kept))
    const seen = await there(register, id)
    await renewed(register, id, token)
    t.ok(seen.equals(kept), 'a later write does not change an earlier reply')
  })

  test('watch notifies of each end of an attempt, and of nothing else', async (t, harness) => {
    const { register } = harness
    for (const writer of harness.tellsPeers ? [register, harness.peer] : [register]) {
      const [id, token] = [newId(), newToken()]
      let told = 0
      const stop = await register.watch(id, () => void told++)
      const silent = async (what: unknown, before: number) => {
        await what
        t.equal(told, before)
      }
      let count = 0
      const tells = async (what: Promise<boolean>, why: string) => {
        t.ok(await what)
        // Messages of one record stay in order: had another write notified, this would be one more.
        await until(() => told > count)
        t.equal(told, ++count, why)
      }
      const states = ['in_progress', 'unknown', 'failed_retryable'] as const
      const put = await writer.put(id, bytesOf('in_progress', token), SPANS)
      await silent(writer.put(id, bytesOf('completed', token), SPANS), 0)
      await silent(renewed(writer, id, token), 0)
      await silent(swapped(writer, id, { token: newToken(), states }, 'completed'), 0)
      await silent(writer.remove(id, put.now - 1), 0)
      await made(writer, 'completed')
      for (const state of ['failed_retryable', 'unknown', 'completed'] as const) {
        await silent(swapped(writer, id, { token, states }, 'in_progress', true), count)
        await tells(
          swapped(writer, id, { token, states }, state).then(({ done }) => done),
          state,
        )
      }
      await tells(removed(writer, id), 'removed')
      const again = async () => (await writer.put(id, bytesOf('completed', token), SPANS)).done
      await tells(again(), 'written again after its removal')
      stop()
    }
  })

  test('watch allows any number of watchers, each until it is stopped', async (t, { register }) => {
    const id = newId()
    const told = Array.from({ length: 50 }, () => 0)
    const stops = await Promise.all(
      told.map((_, n) => register.watch(id, () => void (told[n] = (told[n] as number) + 1))),
    )
    const end = async () => {
      await register.put(id, bytesOf('completed', newToken()), SPANS)
      await removed(register, id)
    }
    await end()
    await until(() => told.every((count) => count === 2))
    for (const stop of stops.slice(1)) stop()
    stops[1]?.()
    await end()
    await until(() => told[0] === 4)
    t.ok(told.slice(1).every((count) => count === 2))
    stops[0]?.()
    let again = 0
    const stop = await register.watch(id, () => void again++)
    await end()
    await until(() => again === 2)
    t.equal(told[0], 4)
    stop()
    stop()
  })

  test('watch calls no watcher that another one has stopped in the same turn', async (t, { register }) => {
    const id = newId()
    let told = 0
    const stops: (() => void)[] = []
    const changed = () => {
      told++
      for (const stop of stops) stop()
    }
    stops.push(await register.watch(id, changed), await register.watch(id, changed))
    await register.put(id, bytesOf('completed', newToken()), SPANS)
    await until(() => told > 0)
    await register.ping()
    t.equal(told, 1)
  })

  test('list returns every record that exists throughout, whatever is added or removed meanwhile', async (t, h) => {
    const { register, peer } = h
    const states = ['in_progress', 'completed', 'failed_retryable', 'unknown', 'expired'] as const
    const ids: RecordId[] = []
    for (let n = 0; n < 300; n++) ids.push((await made(register, states[n % 5] as State)).id)
    await register.limits.take(newId(), { count: 1, per: HOUR }, 1)
    const going = ids.splice(0, 50)
    const pages = await listed(register, 'all', 20, async () => {
      const gone = going.pop()
      if (gone !== undefined) await removed(peer, gone)
      await made(peer, 'completed')
    })
    const seen = new Set(pages.flat())
    for (const id of ids) if (!seen.has(id)) t.fail(`${id} was missed`)
    t.ok(pages.length > 5, `${pages.length} pages`)
    await t.rejects(register.list('all', 'no cursor', 10), RangeError)
  })

  test('list by the beginning of an id returns those records alone', async (t, { register, peer }) => {
    // The others are neighbours in any byte order, and the very last id.
    const wanted = ['ab-_ab-_', 'ab-_ab-_zzz', 'ab-_ab-_---'].map(
      (start) => start.padEnd(43, '_') as RecordId,
    )
    const others = ['ab-_ab-', 'ab-_ab-Z', 'ab-_ab-a', 'ab-_AB-_', 'bb-_ab-_', 'zzzzzzzz'].map(
      (start) => start.padEnd(43, 'z') as RecordId,
    )
    for (const id of [...others, ...wanted]) await register.put(id, bytesOf('completed', newToken()), SPANS)
    const found = async (beginning: string, limit = 10): Promise<string[]> =>
      [...new Set((await listed(peer, { beginning }, limit)).flat())].toSorted()
    t.strictSame(await found('ab-_ab-_'), wanted.toSorted())
    t.strictSame(await found('ab-_ab-_', 1), wanted.toSorted(), 'a page at a time')
    t.strictSame(await found('ab-_ab-_zz'), [wanted[1]])
    t.strictSame(await found(wanted[2] as string), [wanted[2]], 'a whole id')
    t.strictSame(await found('zzzzzzzz'), [others[5]])
    t.strictSame(await found('ab-_ab-_0'), [])
    await t.rejects(register.list({ beginning: 'ab-_ab-_' }, 'no cursor', 10), RangeError)
  })

  test('list of an empty store is empty, and an expired record that it may list cannot be read', async (t, h) => {
    const { register, advance } = h
    for (const which of LISTS) {
      const pages = await listed(register, which, 10)
      t.same(pages.flat(), [])
      t.ok(pages.length <= 10, 'the list ends')
    }
    await made(register, 'unknown')
    advance(SPANS.dropIn)
    for (const which of LISTS)
      for (const id of (await register.list(which, null, 10)).ids)
        t.equal((await register.get(id)).bytes, null)
  })

  test('list of unresolved records returns the earliest due first', async (t, { register }) => {
    const ids: RecordId[] = []
    for (let n = 0; n < 45; n++) {
      const spans = { dueIn: (45 - n) * MINUTE, dropIn: 24 * HOUR }
      ids.push((await made(register, n % 2 ? 'unknown' : 'in_progress', spans)).id)
      await made(register, 'completed')
    }
    const pages = await listed(register, 'unresolved', 10)
    t.ok(pages.every((page) => page.length <= 10))
    t.same(pages.flat(), ids.reverse())
    const [late, long] = [`${'9'.repeat(17)} a`, `1 ${'a'.repeat(65)}`]
    for (const wrong of [late, long, ...'|x|1|1 | a|x1 a|-1 a|1 {a}|1  a|1 a |1 a b|1 ä'.split('|')])
      await t.rejects(register.list('unresolved', wrong, 10), RangeError)
  })

  test('list of unresolved records has those due at one instant once', async (t, { register }) => {
    const all = await Promise.all(Array.from({ length: 40 }, async () => made(register, 'unknown')))
    const pages = await listed(register, 'unresolved', 3)
    t.same(pages.flat().toSorted(), all.map(({ id }) => id).toSorted())
  })

  testBytes('notes are kept oldest first, and merged with one of the same tag', async (t, h) => {
    const { register, peer } = h
    t.equal(await register.history.append(newId(), [note('a')]), false, 'there is no such record')
    t.same(await register.history.read(newId()), [])
    const { id, now: created } = await made(register, 'in_progress')
    t.same(await register.history.read(id), [])
    for (const [by, notes] of [
      [register, [note('claimed:1', '{"ü":"a b"}', 100.4)]],
      [peer, [note('replayed:x', 'first'), note('replayed:x', 'second', 0, 3)]],
      [register, [note('replayed:x', 'third')]],
      [register, [note('misuse:x', 'a 1 2 3 b'), note('replayed:x', 'last')]],
    ] as const)
      t.equal(await by.history.append(id, notes), true)
    const notes = await peer.history.read(id)
    t.same(
      notes.map(({ tag, count, text }) => [tag, count, text]),
      [
        ['claimed:1', 1, '{"ü":"a b"}'],
        ['replayed:x', 5, 'third'],
        ['misuse:x', 1, 'a 1 2 3 b'],
        ['replayed:x', 1, 'last'],
      ],
    )
    const [claimed] = notes
    t.equal((claimed?.last ?? 0) - (claimed?.first ?? 0), 50)
    for (const { first, last } of notes) t.ok(first <= last && first >= created - 100)
    const before = await there(register, id)
    await register.history.append(id, [note('b')])
    t.ok((await there(register, id)).equals(before), 'the record is unchanged')
    t.match((await register.history.read(id)).at(-1), { tag: 'b', text: '' })
  })

  test('notes of several records that are told together keep to their records', async (t, { register }) => {
    const ids = Array.from({ length: 4 }, newId)
    for (const [n, id] of ids.entries())
      if (n !== 1) await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    const told = [['0.0', '0.1'], ['1.0'], ['2.0', '2.1', '2.2'], ['3.0']]
    const done = await Promise.all(
      ids.map((id, n) =>
        register.history.append(
          id,
          (told[n] ?? []).map((text) => note(`t${text}`, text)),
        ),
      ),
    )
    t.same(done, [true, false, true, true])
    t.same(await Promise.all(ids.map(async (id) => textsOf(register, id))), told.with(1, []))
  })

  test('notes are capped: the first ten and the newest forty stay', async (t, { register }) => {
    const { id } = await made(register, 'in_progress')
    const texts = Array.from({ length: 120 }, (_, n) => String(n))
    for (let n = 0; n < 120; n += 3)
      await register.history.append(
        id,
        texts.slice(n, n + 3).map((text) => note(`t${text}`, text)),
      )
    t.same(await textsOf(register, id), [...texts.slice(0, 10), ...texts.slice(80)])
  })

  test('notes disappear with their record, removed or expired; a recreated record has none', async (t, h) => {
    const { register, advance } = h
    const { id, now: version } = await made(register, 'in_progress')
    await register.history.append(id, [note('a')])
    t.ok(await register.remove(id, version))
    t.same(await register.history.read(id), [])
    await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    t.same(await register.history.read(id), [])
    await register.history.append(id, [note('a')])
    advance(SPANS.dropIn)
    t.same(await register.history.read(id), [])
    t.equal(await register.history.append(id, [note('a')]), false)
  })

  test('throttle: of 50 takes by two replicas, as many succeed as it has', async (t, { register, peer }) => {
    const bucket = newId()
    const rate = { count: 20, per: 24 * HOUR }
    const waits = await Promise.all(
      Array.from({ length: 50 }, (_, n) => (n % 2 ? register : peer).limits.take(bucket, rate, 1)),
    )
    t.equal(waits.filter((wait) => wait === 0).length, 20)
  })

  test('throttle: when the rate changes, taken units count as time', async (t, { register, advance }) => {
    const bucket = newId()
    for (let n = 0; n < 5; n++) await register.limits.take(bucket, { count: 10, per: 10 * HOUR }, 1)
    const twice = { count: 20, per: 10 * HOUR }
    for (let n = 0; n < 10; n++) t.equal(await register.limits.take(bucket, twice, 1), 0)
    t.not(await register.limits.take(bucket, twice, 1), 0)
    const fast = { count: 2, per: HOUR }
    const wait = await register.limits.take(bucket, fast, 1)
    t.ok(wait > 0 && wait <= HOUR / 2, 'no longer than an empty bucket needs for one unit at the new rate')
    advance(wait)
    t.equal(await register.limits.take(bucket, fast, 1), 0)
  })

  test('throttle: a clock set back does not stop a bucket', async (t, { register, advance }) => {
    const bucket = newId()
    const rate = { count: 2, per: 2 * HOUR }
    for (let n = 0; n < 2; n++) t.equal(await register.limits.take(bucket, rate, 1), 0)
    advance(-5 * HOUR)
    for (let n = 0; n < 2; n++) t.equal(await register.limits.take(bucket, rate, 1), 0)
    const wait = await register.limits.take(bucket, rate, 1)
    t.ok(wait > 0 && wait <= HOUR)
  })

  test('throttle agrees with a simple model, whatever is asked', async (t, { register, advance }) => {
    const minutes = fc.integer({ min: 0, max: 90 })
    const step = fc.oneof(
      fc.record({ advance: minutes.map((n) => n * MINUTE) }),
      fc.record({ units: fc.constantFrom(1, 1, 1, -1) }),
    )
    const rate = fc.record({ count: fc.integer({ min: 1, max: 6 }), every: fc.integer({ min: 1, max: 60 }) })
    const asked = fc.array(step, { maxLength: 20, size: 'max' })
    await fc.assert(
      fc.asyncProperty(rate, asked, async ({ count, every }, steps) => {
        const bucket = newId()
        const interval = every * MINUTE
        // In milliseconds of refilling. The store's own clock adds a few, far less than a minute.
        let filled = count * interval
        for (const one of steps)
          if ('advance' in one) {
            advance(one.advance)
            filled = Math.min(count * interval, filled + one.advance)
          } else {
            const wait = await register.limits.take(bucket, { count, per: count * interval }, one.units)
            const missing = one.units === 1 ? Math.max(0, interval - filled) : 0
            if (missing === 0) filled = Math.min(count * interval, filled - one.units * interval)
            t.ok(
              missing === 0 ? wait === 0 : wait > missing - MINUTE && wait <= missing,
              `${wait} ${missing}`,
            )
          }
      }),
      { numRuns: 30 },
    )
  })

  testBytes(
    'Y20 of replicas that identify differently, one kind holds the mark',
    async (t, { register, peer, advance }) => {
      const kinds = ['one', 'other'].map((name) => ({
        digest: hash('sha256', name, 'buffer'),
        parts: { [`routes[${name}]`]: ['a', 'b', 'c'] },
      }))
      // Their own clocks stand still.
      const agreement = (store: Store, own: Identification) =>
        new Agreement([store], {
          own,
          upstream: 'here',
          accepts: false,
          say: () => {},
          onOtherUpstream: () => {},
          clock: () => 0,
        })
      const all = [register, peer].flatMap((store) => kinds.map((own) => agreement(store, own)))
      const holding = async () => {
        await Promise.all(all.map((one) => one.renew()))
        return all.map(({ conflict }) => conflict === null)
      }
      const [a, b, c, d] = await holding()
      t.ok(a !== b && a === c && b === d)
      advance(MARKED_FOR / 2)
      t.same(await holding(), [a, b, c, d], 'as long as they renew it')
      t.match(
        all.map(({ conflict }) => conflict).join(),
        /routes\[one\], routes\[other\]|routes\[other\], routes\[one\]/,
      )
      advance(MARKED_FOR + MINUTE)
      const [late] = all.filter((_, n) => n === (a ? 1 : 0))
      await late?.renew()
      t.equal(late?.conflict, null, 'nobody has renewed it')
      const [early] = all.filter((_, n) => n === (a ? 0 : 1))
      await early?.renew()
      t.match(early?.conflict, /is alive/)
    },
  )

  test("ping returns the store's time", async (t, { register, advance }) => {
    const first = await register.ping()
    advance(HOUR)
    t.ok((await register.ping()) >= first + HOUR)
    t.ok((await register.get(newId())).now >= first + HOUR)
  })

  test('traits say that the store does not evict', async (t, { register }) => {
    t.match(await register.traits(), { evicts: false })
  })
}
