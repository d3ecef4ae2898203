import { randomBytes } from 'node:crypto'
import fc from 'fast-check'
import type { Test } from 'tap'
import { type CompletedResponse, newReconciliation, type RecordId } from '../../src/core/record.ts'
import { decodeRecord, encodeDraft, PREFIX, readStamps } from '../../src/store/codec.ts'
import { packed } from '../../src/store/packed.ts'
import { versionOf } from '../../src/store/prefix.ts'
import type { Store } from '../../src/store/register.ts'
import { Sealer } from '../../src/store/sealing.ts'
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

/** Two replicas in the middle of a key rotation: each seals with its own key and can open what the other sealed. */
const KEYS = ['one', 'two'].map((id) => ({ id, key: randomBytes(32) }))
const [SEALER, ROTATED] = [new Sealer(KEYS), new Sealer(KEYS.toReversed())]

/** What every adapter promises, tested on plain records and on compressed and sealed ones. `make` returns an empty store. */
export function registerContract(t: Test, name: string, make: () => Promise<Harness>): void {
  registerEach(t, name, make, false)
  registerEach(
    t,
    `${name}, packed`,
    async () => {
      const { register, peer, other, ...rest } = await make()
      return {
        ...rest,
        register: packed(register, SEALER, 'zstd'),
        peer: packed(peer, ROTATED, 'gzip'),
        other: other && packed(other, SEALER, 'zstd'),
      }
    },
    true,
  )
}

function registerEach(t: Test, name: string, make: () => Promise<Harness>, isPacked: boolean): void {
  const test = (title: string, body: (t: Test, harness: Harness) => Promise<void>) =>
    t.test(`${name}: ${title}`, async (t) => {
      await using harness = await make()
      await body(t, harness)
    })

  void test('put writes a new record and stamps it', async (t, { register }) => {
    const id = newId()
    const token = newToken()
    const put = await register.put(id, bytesOf('in_progress', token), SPANS)
    t.ok(put.done)
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

  void test('put keeps a given fence and creation time (a lost record is rewritten)', async (t, {
    register,
  }) => {
    const given = { fence: 1_700_000_000_007, createdAt: 1_700_000_000_001 }
    const put = await register.put(newId(), bytesOf('completed', newToken(), given), SPANS)
    t.match(put, { done: true, stamp: { version: put.now, ...given } })
  })

  void test('V01 two services share nothing, even under the same id', async (t, harness) => {
    const { register, other } = harness
    if (other === null) return
    const id = newId()
    const [mine, theirs] = [newToken(), newToken()]
    let told = 0
    const stop = await register.watch(id, () => void told++)
    const claimed = await register.put(id, bytesOf('in_progress', mine), SPANS)
    t.ok(claimed.done)
    t.ok(await register.history.append(id, [{ tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: 'mine' }]))
    const before = (await register.get(id)).bytes as Buffer
    const version = readStamps(before).version

    t.equal((await other.get(id)).bytes, null)
    t.match(await other.swap(id, { version }, bytesOf('unknown', theirs), SPANS, false), { bytes: null })
    t.match(
      await other.swap(id, { token: mine, states: ['in_progress'] }, bytesOf('unknown', mine), SPANS, false),
      { done: false, bytes: null },
    )
    t.same(await other.renew([{ id, token: mine, ...SPANS }]), [false])
    t.equal(await other.remove(id, version), false)
    t.equal(
      await other.history.append(id, [{ tag: 'b', count: 1, firstAgo: 0, lastAgo: 0, text: 'theirs' }]),
      false,
    )
    t.same(await other.history.read(id), [])
    for (const which of ['all', 'unresolved'] as const) t.same((await other.list(which, null, 10)).ids, [])
    harness.advance(SPANS.dueIn + MINUTE)
    t.same(await other.due(10), [], 'the other service does not sweep it')
    t.same(await register.due(10), [id])
    t.same((await register.get(id)).bytes, before)

    t.ok(
      (await other.put(id, bytesOf('completed', theirs), SPANS)).done,
      'the same id is free for the other service',
    )
    t.ok(await other.remove(id, readStamps((await other.get(id)).bytes as Buffer).version))
    t.same((await register.get(id)).bytes, before)
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

  void test('put returns an existing record and changes nothing', async (t, { register, advance }) => {
    const id = newId()
    await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    const before = (await register.get(id)).bytes as Buffer
    advance(MINUTE)
    const second = await register.put(id, bytesOf('completed', newToken()), SPANS)
    t.notOk(second.done)
    t.ok(!second.done && second.bytes.equals(before))
    t.ok((await register.get(id)).bytes?.equals(before))
  })

  void test('50 parallel puts of one id: exactly one succeeds', async (t, { register, peer }) => {
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

  void test('20 parallel swaps on one version: exactly one succeeds', async (t, { register, peer }) => {
    const id = newId()
    const put = await register.put(id, bytesOf('failed_retryable', newToken()), SPANS)
    const condition = { version: put.now }
    const swaps = await Promise.all(
      Array.from({ length: 20 }, async (_, n) =>
        (n % 2 ? register : peer).swap(id, condition, bytesOf('in_progress', newToken()), SPANS, true),
      ),
    )
    t.equal(swaps.filter((reply) => reply.done).length, 1)
  })

  void test('T01 a record exists until dropAt, then is absent for every operation', async (t, {
    register,
    advance,
  }) => {
    const id = newId()
    const token = newToken()
    const put = await register.put(id, bytesOf('in_progress', token), { dueIn: MINUTE, dropIn: HOUR })
    const version = put.now
    advance(HOUR - MINUTE)
    t.ok((await register.get(id)).bytes)
    t.same(await register.due(10), [id])
    advance(MINUTE)
    t.equal((await register.get(id)).bytes, null)
    t.match(await register.swap(id, { version }, bytesOf('completed', token), SPANS, false), {
      done: false,
      bytes: null,
    })
    const own = { token, states: ['in_progress'] } as const
    t.match(await register.swap(id, own, bytesOf('completed', token), SPANS, false), {
      done: false,
      bytes: null,
    })
    t.same(await register.renew([{ id, token, dueIn: HOUR, dropIn: 0 }]), [false])
    t.equal(await register.remove(id, version), false)
    t.same(await register.due(10), [])
    const again = await register.put(id, bytesOf('completed', newToken()), SPANS)
    t.ok(again.done, 'the id is free again')
    t.ok(again.now >= put.now + HOUR)
    t.equal(readStamps((await register.get(id)).bytes as Buffer).version, again.now)
    advance(2 * HOUR)
    t.same(await register.due(10), [], 'the first record left nothing in the index')
  })

  void test('swap by version increments the version, and the fence only on request; createdAt stays', async (t, {
    register,
    advance,
  }) => {
    const id = newId()
    const put = await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    advance(MINUTE)
    const token = newToken()
    const spans = { dueIn: 5 * MINUTE, dropIn: 7 * HOUR }
    const given = { fence: 5, createdAt: 6 }
    const kept = await register.swap(id, { version: put.now }, bytesOf('unknown', token, given), spans, false)
    const stamp = { version: put.now + 1, fence: put.now, createdAt: put.now }
    t.match(kept, { done: true, stamp })
    t.ok(kept.now >= put.now + MINUTE)
    t.same(readStamps((await register.get(id)).bytes as Buffer), {
      ...stamp,
      updatedAt: kept.now,
      due: kept.now + spans.dueIn,
      dropAt: kept.now + spans.dropIn,
    })
    const next = await register.swap(id, { version: put.now + 1 }, bytesOf('in_progress', token), spans, true)
    t.match(next, { done: true, stamp: { version: put.now + 2, fence: put.now + 1, createdAt: put.now } })
  })

  void test('§2 a swap never lowers the fence', async (t, { register }) => {
    const id = newId()
    const { now } = await register.put(id, bytesOf('failed_retryable', newToken()), SPANS)
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
      t.equal(readStamps((await register.get(id)).bytes as Buffer).fence, stands)
    }
  })

  void test('swap on another version returns the existing record and changes nothing', async (t, {
    register,
  }) => {
    const id = newId()
    const put = await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    const before = (await register.get(id)).bytes as Buffer
    for (const version of [put.now - 1, put.now + 1, 0]) {
      const reply = await register.swap(id, { version }, bytesOf('completed', newToken()), SPANS, false)
      t.ok(!reply.done && reply.bytes?.equals(before))
    }
    t.match(await register.swap(newId(), { version: 1 }, before, SPANS, false), { done: false, bytes: null })
  })

  void test('L10 swap by token and state works only for the owner, and only in those states', async (t, {
    register,
  }) => {
    const id = newId()
    const token = newToken()
    await register.put(id, bytesOf('in_progress', token), SPANS)
    const swap = (by: Buffer, ...states: ('in_progress' | 'unknown' | 'completed')[]) =>
      register.swap(id, { token: by, states }, bytesOf('completed', token), SPANS, false)
    t.notOk((await swap(newToken(), 'in_progress')).done, 'a stranger')
    t.notOk((await swap(token, 'unknown', 'completed')).done, 'the owner, in another state')
    t.notOk((await swap(token)).done, 'no state at all')
    t.ok((await swap(token, 'unknown', 'in_progress')).done)
    t.notOk((await swap(token, 'unknown', 'in_progress')).done, 'it is completed now')
  })

  void test('renew extends the owner’s lease and nobody else’s', async (t, { register, advance }) => {
    const [mine, theirs, finished, absent] = [newId(), newId(), newId(), newId()]
    const token = newToken()
    const spans = { dueIn: MINUTE, dropIn: 5 * HOUR }
    const put = await register.put(mine, bytesOf('in_progress', token), spans)
    await register.put(theirs, bytesOf('in_progress', newToken()), { ...SPANS, dueIn: 9 * HOUR })
    await register.put(finished, bytesOf('completed', token), SPANS)
    advance(MINUTE)
    t.same(await register.due(10), [mine])
    const ids = [mine, theirs, finished, absent]
    const before = (await register.get(finished)).bytes as Buffer
    t.same(await register.renew(ids.map((id) => ({ id, token, dueIn: HOUR, dropIn: 0 }))), [
      true,
      false,
      false,
      false,
    ])
    t.same(await register.renew([]), [])
    t.ok((await register.get(finished)).bytes?.equals(before))
    const { now, bytes } = await register.get(mine)
    const stamps = readStamps(bytes as Buffer)
    t.match(stamps, {
      version: put.now + 1,
      fence: put.now,
      createdAt: put.now,
      dropAt: put.now + spans.dropIn,
    })
    t.ok(stamps.due > put.now + HOUR && stamps.due <= now + HOUR)
    t.same(await register.due(10), [], 'the index has the new due time')
    advance(HOUR)
    t.same(await register.due(10), [mine])
    advance(4 * HOUR)
    t.equal((await register.get(mine)).bytes, null, 'renewing does not extend the retention')
  })

  void test('renew keeps a record alive as long as its owner keeps renewing', async (t, {
    register,
    advance,
  }) => {
    const id = newId()
    const token = newToken()
    await register.put(id, bytesOf('in_progress', token), { dueIn: MINUTE, dropIn: 2 * MINUTE })
    for (let minutes = 0; minutes < 5; minutes++) {
      advance(MINUTE)
      t.same(await register.renew([{ id, token, dueIn: MINUTE, dropIn: 2 * MINUTE }]), [true])
    }
    const { now, bytes } = await register.get(id)
    const { due, dropAt } = readStamps(bytes as Buffer)
    t.equal(dropAt - due, MINUTE)
    t.ok(due > now && due <= now + MINUTE)
    advance(2 * MINUTE)
    t.equal((await register.get(id)).bytes, null)
  })

  void test('V08 a renewal revives a record that is unknown only because its owner fell silent', async (t, {
    register,
    advance,
  }) => {
    const asked = { ...newReconciliation(1), asked: 20, notFound: 1, answer: 'not found' }
    for (const deadLettered of [false, true]) {
      const id = newId()
      const token = newToken()
      const silent = { leaseExpired: true, reconciliation: { ...asked, deadLettered }, key: 'k', attempts: 3 }
      const { now: version } = await register.put(id, bytesOf('unknown', token, silent), SPANS)
      t.same(await register.renew([{ id, token: newToken(), dueIn: HOUR, dropIn: HOUR }]), [false])
      advance(2 * HOUR)
      t.same(await register.due(10), [id])
      t.same(await register.renew([{ id, token, dueIn: HOUR, dropIn: 48 * HOUR }]), [true])
      const { now, bytes } = await register.get(id)
      const record = decodeRecord(bytes as Buffer)
      t.match(record, { state: 'in_progress', version: version + 1, fence: version, attempts: 3, key: 'k' })
      t.ok(record.state === 'in_progress' && record.leaseUntil > now && record.leaseUntil <= now + HOUR)
      t.ok(record.dropAt > now + 47 * HOUR)
      t.same(await register.due(10), [], 'the index has the new due time')
      t.same(await register.renew([{ id, token, dueIn: HOUR, dropIn: HOUR }]), [true])
      t.match(
        await register.swap(
          id,
          { token, states: ['in_progress'] },
          bytesOf('completed', token),
          SPANS,
          false,
        ),
        { done: true },
      )
    }
  })

  void test('V08 a renewal revives nothing else', async (t, { register, peer }) => {
    const token = newToken()
    const uncertain = { leaseExpired: false, status: 502 }
    const others = [
      bytesOf('unknown', token, uncertain),
      bytesOf('completed', token),
      bytesOf('failed_retryable', token),
      bytesOf('expired', token),
      bytesOf('unknown', newToken(), { leaseExpired: true }),
      ...(isPacked ? [] : [bytesOf('unknown', token, { leaseExpired: true }).subarray(0, PREFIX.end)]),
    ]
    for (const bytes of others) {
      const id = newId()
      await register.put(id, Buffer.concat([bytes]), SPANS)
      const { bytes: before } = await register.get(id)
      t.same(await peer.renew([{ id, token, dueIn: HOUR, dropIn: HOUR }]), [false])
      t.ok((await register.get(id)).bytes?.equals(before as Buffer))
    }
  })

  void test('V08 when a renewal races with a reconciler’s write, exactly one of them succeeds', async (t, {
    register,
    peer,
  }) => {
    for (let n = 0; n < 10; n++) {
      const id = newId()
      const token = newToken()
      const put = await register.put(id, bytesOf('unknown', token, { leaseExpired: true }), SPANS)
      const [[renewed], resolved] = await Promise.all([
        register.renew([{ id, token, dueIn: HOUR, dropIn: HOUR }]),
        peer.swap(id, { version: put.now }, bytesOf('failed_retryable', token), SPANS, false),
      ])
      t.not(renewed, resolved.done)
    }
  })

  void test('due lists unresolved records whose time has come, oldest first, up to the limit', async (t, {
    register,
    advance,
  }) => {
    const ids: RecordId[] = []
    for (let n = 0; n < 6; n++) {
      const id = newId()
      ids.push(id)
      const state = n % 2 ? 'unknown' : 'in_progress'
      await register.put(id, bytesOf(state, newToken()), { dueIn: (6 - n) * HOUR, dropIn: 24 * HOUR })
    }
    for (const state of ['completed', 'failed_retryable', 'expired'] as const)
      await register.put(newId(), bytesOf(state, newToken()), { dueIn: 1, dropIn: 24 * HOUR })
    t.same(await register.due(10), [])
    advance(4 * HOUR)
    t.same(await register.due(10), ids.slice(2).reverse())
    t.same(await register.due(2), ids.slice(4).reverse())
    t.same(await register.due(10), ids.slice(2).reverse(), 'asking removes nothing')
  })

  void test('due drops a record that is resolved or removed, and lists it again once it is unresolved again', async (t, {
    register,
    advance,
  }) => {
    const [swapped, removed] = [newId(), newId()]
    const token = newToken()
    const spans = { dueIn: MINUTE, dropIn: 24 * HOUR }
    const put = await register.put(swapped, bytesOf('unknown', token), spans)
    const other = await register.put(removed, bytesOf('in_progress', token), spans)
    advance(MINUTE)
    t.same((await register.due(10)).length, 2)
    await register.swap(swapped, { version: put.now }, bytesOf('failed_retryable', token), spans, false)
    t.ok(await register.remove(removed, other.now))
    t.same(await register.due(10), [])
    await register.swap(swapped, { version: put.now + 1 }, bytesOf('in_progress', token), spans, true)
    t.same(await register.due(10), [])
    advance(MINUTE)
    t.same(await register.due(10), [swapped])
  })

  void test('due for bodies lists expired responses whose records live on', async (t, {
    register,
    peer,
    other,
    advance,
  }) => {
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
        t.match(await peer.swap(id, claim, bytesOf('completed', token, ends), spans(n), false), {
          done: true,
        })
      }
    }
    await register.put(newId(), bytesOf('completed', token), spans(1))
    const unknown = newId()
    await register.put(unknown, bytesOf('unknown', token), spans(2))
    t.same(await register.due(10, 'bodies'), [])
    advance(3 * HOUR)
    t.same((await peer.due(10, 'bodies')).toSorted(), ids.slice(0, 3).toSorted())
    t.same(await other?.due(10, 'bodies'), other === null ? undefined : [])
    t.equal((await register.due(1, 'bodies')).length, 1)
    t.same(await register.due(10), [unknown], 'unresolved records are listed separately')
    t.same((await register.list('unresolved', null, 10)).ids, [unknown])
    t.same(await register.renew([{ id: ids[0] as RecordId, token, ...SPANS }]), [false])

    const versionOf = async (id: RecordId) => readStamps((await register.get(id)).bytes as Buffer).version
    const [taken, removed, kept] = ids as [RecordId, RecordId, RecordId]
    const gone = { result: { kept: false, why: 'past_ttl', status: 201, location: null } } as const
    const condition = { version: await versionOf(taken) }
    t.match(await register.swap(taken, condition, bytesOf('completed', token, gone), spans(20), false), {
      done: true,
    })
    t.ok(await peer.remove(removed, await versionOf(removed)))
    t.same(await register.due(10, 'bodies'), [kept])
    advance(21 * HOUR)
    t.same(await register.due(10, 'bodies'), [], 'expired records are left out')
    t.same(await register.due(10), [])
  })

  void test('remove deletes only the given version; a recreated record has a greater version and fence', async (t, {
    register,
    advance,
  }) => {
    const id = newId()
    const token = newToken()
    const put = await register.put(id, bytesOf('in_progress', token), SPANS)
    t.equal(await register.remove(id, put.now + 1), false)
    t.equal(await register.remove(newId(), put.now), false)
    t.ok((await register.get(id)).bytes)
    t.equal(await register.remove(id, put.now), true)
    t.equal((await register.get(id)).bytes, null)
    t.equal(await register.remove(id, put.now), false)
    advance(1)
    const again = await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    t.ok(again.done && again.stamp.version > put.now && again.stamp.fence > put.now)
    const late = await register.swap(id, { version: put.now }, bytesOf('completed', token), SPANS, false)
    t.notOk(late.done, 'a write meant for the first record does not hit the second')
  })

  void test('bytes come back exactly as written', async (t, { register }) => {
    const id = newId()
    const token = newToken()
    const body = Buffer.concat([ALL_BYTES, randomBytes(5 * 1024 * 1024)])
    const result = response(body)
    await register.put(id, bytesOf('in_progress', token), SPANS)
    const own = { token, states: ['in_progress'] } as const
    t.ok(
      (await register.swap(id, own, encodeDraft(draft('completed', token, { result })), SPANS, false)).done,
    )
    const record = decodeRecord((await register.get(id)).bytes as Buffer)
    t.ok(record.state === 'completed' && record.result.kept)
    if (record.state !== 'completed' || !record.result.kept) return
    t.ok(record.result.response.body.equals(body))
    t.same(record.result.response.headers, result.kept && result.response.headers)
  })

  void test('a record of an unknown schema can be read and removed, but not swapped, renewed or overwritten', async (t, {
    register,
    advance,
  }) => {
    const id = newId()
    const token = newToken()
    const bytes = bytesOf('in_progress', token)
    bytes[PREFIX.schema] = 9
    const put = await register.put(id, bytes, { dueIn: MINUTE, dropIn: HOUR })
    const before = (await register.get(id)).bytes as Buffer
    t.equal(before[PREFIX.schema], 9)
    advance(2 * MINUTE)
    const mine = bytesOf('completed', token)
    const own = { token, states: ['in_progress'] } as const
    for (const condition of [{ version: put.now }, own]) {
      const reply = await register.swap(id, condition, mine, SPANS, false)
      t.ok(!reply.done && reply.bytes?.equals(before))
    }
    t.same(await register.renew([{ id, token, dueIn: HOUR, dropIn: 0 }]), [false])
    const again = await register.put(id, mine, SPANS)
    t.ok(!again.done && again.bytes.equals(before))
    t.throws(() => decodeRecord(before), { name: 'CorruptRecord' })
    t.equal(versionOf(before), put.now)
    t.equal(await register.remove(id, put.now + 1), false)
    t.ok(before.equals((await register.get(id)).bytes as Buffer))
    t.equal(await register.remove(id, put.now), true)
    t.equal((await register.get(id)).bytes, null)
    t.same((await register.list('unresolved', null, 10)).ids, [])
    t.ok((await register.put(id, bytesOf('in_progress', newToken()), SPANS)).done)
  })

  void test('changing a buffer that was passed to or returned by the store does not change the record', async (t, {
    register,
  }) => {
    const id = newId()
    const token = newToken()
    const bytes = bytesOf('in_progress', token)
    const copy = Buffer.from(bytes)
    await register.put(id, bytes, SPANS)
    t.ok(bytes.equals(copy), 'the given buffer is not stamped in place')
    bytes.fill(0)
    const first = (await register.get(id)).bytes as Buffer
    const kept = Buffer.from(first)
    first.fill(0)
    const met = await register.put(id, copy, SPANS)
    if (!met.done) met.bytes.fill(0)
    const lost = await register.swap(id, { version: 1 }, copy, SPANS, false)
    if (!lost.done) lost.bytes?.fill(0)
    t.ok((await register.get(id)).bytes?.equals(kept))
    const seen = (await register.get(id)).bytes as Buffer
    await register.renew([{ id, token, dueIn: 1, dropIn: 0 }])
    t.ok(seen.equals(kept), 'a later write does not change an earlier reply')
  })

  void test('watch notifies of each end of an attempt, and of nothing else', async (t, harness) => {
    const { register } = harness
    for (const writer of harness.tellsPeers ? [register, harness.peer] : [register]) {
      const id = newId()
      const token = newToken()
      let told = 0
      const stop = await register.watch(id, () => void told++)
      const silent = async (what: unknown, before: number) => {
        await what
        t.equal(told, before)
      }
      const own = { token, states: ['in_progress', 'unknown', 'failed_retryable'] } as const
      const put = await writer.put(id, bytesOf('in_progress', token), SPANS)
      await silent(writer.put(id, bytesOf('completed', token), SPANS), 0)
      await silent(writer.renew([{ id, token, dueIn: HOUR, dropIn: 0 }]), 0)
      const stranger = { token: newToken(), states: own.states }
      await silent(writer.swap(id, stranger, bytesOf('completed', token), SPANS, false), 0)
      await silent(writer.remove(id, put.now - 1), 0)
      await writer.put(newId(), bytesOf('completed', token), SPANS)
      let count = 0
      for (const state of ['failed_retryable', 'unknown', 'completed'] as const) {
        await silent(writer.swap(id, own, bytesOf('in_progress', token), SPANS, true), count)
        t.ok((await writer.swap(id, own, bytesOf(state, token), SPANS, false)).done)
        // Messages of one record stay in order: had another write notified, this would be one more.
        await until(() => told > count)
        t.equal(told, ++count, state)
      }
      const version = readStamps((await register.get(id)).bytes as Buffer).version
      t.ok(await writer.remove(id, version))
      await until(() => told > count)
      t.equal(told, ++count, 'removed')
      t.ok((await writer.put(id, bytesOf('completed', token), SPANS)).done)
      await until(() => told > count)
      t.equal(told, ++count, 'written again after its removal')
      stop()
    }
  })

  void test('watch allows any number of watchers per record, each until it is stopped', async (t, {
    register,
  }) => {
    const id = newId()
    const told = Array.from({ length: 50 }, () => 0)
    const stops = await Promise.all(
      told.map((_, n) => register.watch(id, () => void (told[n] = (told[n] as number) + 1))),
    )
    const end = async (state: 'unknown' | 'completed') => {
      await register.put(id, bytesOf(state, newToken()), SPANS)
      const { bytes } = await register.get(id)
      await register.remove(id, readStamps(bytes as Buffer).version)
    }
    await end('unknown')
    await until(() => told.every((count) => count === 2))
    for (const stop of stops.slice(1)) stop()
    stops[1]?.()
    await end('completed')
    await until(() => told[0] === 4)
    t.ok(told.slice(1).every((count) => count === 2))
    stops[0]?.()
    let again = 0
    const stop = await register.watch(id, () => void again++)
    await end('unknown')
    await until(() => again === 2)
    t.equal(told[0], 4)
    stop()
    stop()
  })

  void test('watch does not call a watcher that another one has stopped in the same turn', async (t, {
    register,
  }) => {
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

  void test('list returns every record that exists throughout, whatever is added or removed meanwhile', async (t, {
    register,
    peer,
  }) => {
    const states = ['in_progress', 'completed', 'failed_retryable', 'unknown', 'expired'] as const
    const ids: RecordId[] = []
    for (let n = 0; n < 300; n++) {
      const id = newId()
      ids.push(id)
      await register.put(id, bytesOf(states[n % 5] as 'unknown', newToken()), SPANS)
    }
    await register.limits.take(newId(), { count: 1, per: HOUR }, 1)
    const removed = ids.splice(0, 50)
    const seen = new Set<RecordId>()
    let cursor: string | null = null
    let pages = 0
    do {
      const page = await register.list('all', cursor, 20)
      for (const id of page.ids) seen.add(id)
      cursor = page.next
      const gone = removed.pop()
      const { bytes } = gone === undefined ? { bytes: null } : await peer.get(gone)
      if (gone !== undefined && bytes !== null) await peer.remove(gone, readStamps(bytes).version)
      await peer.put(newId(), bytesOf('completed', newToken()), SPANS)
      pages++
    } while (cursor !== null)
    for (const id of ids) if (!seen.has(id)) t.fail(`${id} was missed`)
    t.ok(pages > 5, `${pages} pages`)
    await t.rejects(register.list('all', 'no cursor', 10), RangeError)
  })

  void test('list by the beginning of an id returns those records and no others', async (t, {
    register,
    peer,
  }) => {
    // The others are neighbours in any byte order, and the very last id.
    const wanted = ['ab-_ab-_', 'ab-_ab-_zzz', 'ab-_ab-_---'].map(
      (start) => start.padEnd(43, '_') as RecordId,
    )
    const others = ['ab-_ab-', 'ab-_ab-Z', 'ab-_ab-a', 'ab-_AB-_', 'bb-_ab-_', 'zzzzzzzz'].map(
      (start) => start.padEnd(43, 'z') as RecordId,
    )
    for (const id of [...others, ...wanted]) await register.put(id, bytesOf('completed', newToken()), SPANS)
    const found = async (beginning: string, limit = 10): Promise<string[]> => {
      const ids = new Set<string>()
      let cursor: string | null = null
      do {
        const page = await peer.list({ beginning }, cursor, limit)
        for (const id of page.ids) ids.add(id)
        cursor = page.next
      } while (cursor !== null)
      return [...ids].toSorted()
    }
    t.strictSame(await found('ab-_ab-_'), wanted.toSorted())
    t.strictSame(await found('ab-_ab-_', 1), wanted.toSorted(), 'a page at a time')
    t.strictSame(await found('ab-_ab-_zz'), [wanted[1]])
    t.strictSame(await found(wanted[2] as string), [wanted[2]], 'a whole id')
    t.strictSame(await found('zzzzzzzz'), [others[5]])
    t.strictSame(await found('ab-_ab-_0'), [])
    await t.rejects(register.list({ beginning: 'ab-_ab-_' }, 'no cursor', 10), RangeError)
  })

  void test('list of an empty store is empty, and an expired record that it may still list cannot be read', async (t, {
    register,
    advance,
  }) => {
    for (const which of ['all', 'unresolved'] as const)
      for (let cursor: string | null = null, page = 0; page === 0 || cursor !== null; page++) {
        const { ids, next } = await register.list(which, cursor, 10)
        t.same(ids, [])
        t.ok(page < 10, 'the list ends')
        cursor = next
      }
    await register.put(newId(), bytesOf('unknown', newToken()), SPANS)
    advance(SPANS.dropIn)
    for (const which of ['all', 'unresolved'] as const)
      for (const id of (await register.list(which, null, 10)).ids)
        t.equal((await register.get(id)).bytes, null)
  })

  void test('list of unresolved records returns the earliest due first, page after page', async (t, {
    register,
  }) => {
    const ids: RecordId[] = []
    for (let n = 0; n < 45; n++) {
      const id = newId()
      ids.push(id)
      const state = n % 2 ? 'unknown' : 'in_progress'
      await register.put(id, bytesOf(state, newToken()), { dueIn: (45 - n) * MINUTE, dropIn: 24 * HOUR })
      await register.put(newId(), bytesOf('completed', newToken()), SPANS)
    }
    const seen: RecordId[] = []
    let cursor: string | null = null
    do {
      const page = await register.list('unresolved', cursor, 10)
      t.ok(page.ids.length <= 10)
      seen.push(...page.ids)
      cursor = page.next
    } while (cursor !== null)
    t.same(seen, ids.reverse())
    for (const wrong of ['', 'x', '1', '1 ', '-1 a', '1 {a}', `${'9'.repeat(17)} a`])
      await t.rejects(register.list('unresolved', wrong, 10), RangeError)
  })

  void test('list of unresolved records has each of those due at the same instant once', async (t, {
    register,
  }) => {
    const ids = Array.from({ length: 40 }, newId)
    await Promise.all(ids.map(async (id) => register.put(id, bytesOf('unknown', newToken()), SPANS)))
    const seen: RecordId[] = []
    for (let cursor: string | null = null; ; ) {
      const page = await register.list('unresolved', cursor, 3)
      seen.push(...page.ids)
      if (page.next === null) break
      cursor = page.next
    }
    t.same(seen.toSorted(), ids.toSorted())
  })

  void test('notes are kept oldest first, and consecutive ones with the same tag are merged', async (t, {
    register,
    peer,
  }) => {
    const id = newId()
    const note = (tag: string, text: string, ago = 0, count = 1) => ({
      tag,
      count,
      firstAgo: ago,
      lastAgo: ago / 2,
      text,
    })
    t.equal(await register.history.append(id, [note('a', '{}')]), false, 'there is no such record')
    t.same(await register.history.read(id), [])
    const put = await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    t.same(await register.history.read(id), [])
    t.equal(await register.history.append(id, [note('claimed:1', '{"ü":"a b"}', 100.4)]), true)
    t.equal(
      await peer.history.append(id, [note('replayed:x', 'first'), note('replayed:x', 'second', 0, 3)]),
      true,
    )
    t.equal(await register.history.append(id, [note('replayed:x', 'third')]), true)
    t.equal(
      await register.history.append(id, [note('misuse:x', 'a 1 2 3 b'), note('replayed:x', 'last')]),
      true,
    )
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
    for (const { first, last } of notes) t.ok(first <= last && first >= put.now - 100)
    const before = (await register.get(id)).bytes as Buffer
    await register.history.append(id, [note('b', '')])
    t.ok((await register.get(id)).bytes?.equals(before), 'the record is unchanged')
    t.match((await register.history.read(id)).at(-1), { tag: 'b', text: '' })
  })

  void test('notes of several records that are told together keep to their records', async (t, {
    register,
  }) => {
    const ids = Array.from({ length: 4 }, () => newId())
    const absent = ids[1] as RecordId
    for (const id of ids) if (id !== absent) await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    const counts = [2, 1, 3, 1]
    const notesOf = (n: number) =>
      Array.from({ length: counts[n] as number }, (_, m) => ({
        tag: `t${n}.${m}`,
        count: 1,
        firstAgo: 0,
        lastAgo: 0,
        text: `${n}.${m}`,
      }))
    const done = await Promise.all(ids.map((id, n) => register.history.append(id, notesOf(n))))
    t.same(done, [true, false, true, true])
    const texts = await Promise.all(
      ids.map(async (id) => (await register.history.read(id)).map(({ text }) => text)),
    )
    t.same(texts, [['0.0', '0.1'], [], ['2.0', '2.1', '2.2'], ['3.0']])
  })

  void test('notes are capped: the first ten and the newest forty stay', async (t, { register }) => {
    const id = newId()
    await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    for (let n = 0; n < 120; n += 3)
      await register.history.append(
        id,
        [n, n + 1, n + 2].map((m) => ({ tag: `t${m}`, count: 1, firstAgo: 0, lastAgo: 0, text: String(m) })),
      )
    const texts = (await register.history.read(id)).map(({ text }) => Number(text))
    const numbers = Array.from({ length: 120 }, (_, n) => n)
    t.same(texts, [...numbers.slice(0, 10), ...numbers.slice(80)])
  })

  void test('notes disappear with their record, removed or expired, and a recreated record has none', async (t, {
    register,
    advance,
  }) => {
    const id = newId()
    const note = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }
    const put = await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    await register.history.append(id, [note])
    t.ok(await register.remove(id, put.now))
    t.same(await register.history.read(id), [])
    await register.put(id, bytesOf('in_progress', newToken()), SPANS)
    t.same(await register.history.read(id), [])
    await register.history.append(id, [note])
    advance(SPANS.dropIn)
    t.same(await register.history.read(id), [])
    t.equal(await register.history.append(id, [note]), false)
  })

  void test('throttle allows a burst of the whole count, then one unit per interval', async (t, {
    register,
    advance,
  }) => {
    const rate = { count: 7, per: HOUR }
    const bucket = newId()
    const take = () => register.limits.take(bucket, rate, 1)
    for (let n = 0; n < rate.count; n++) t.equal(await take(), 0)
    const waits = [await take(), await take(), await take()]
    const interval = Math.ceil(HOUR / 7)
    for (const wait of waits) t.ok(wait > 0 && wait <= interval, 'a refused take costs nothing')
    t.equal(await register.limits.take(newId(), rate, 1), 0, 'another bucket is independent')
    advance(waits[0] as number)
    t.equal(await take(), 0)
    const wait = await take()
    t.ok(wait > interval - MINUTE && wait <= interval)
    advance(HOUR)
    for (let n = 0; n < rate.count; n++) t.equal(await take(), 0)
    t.not(await take(), 0)
  })

  void test('throttle: giving back adds one unit, and never overfills the bucket', async (t, {
    register,
  }) => {
    const rate = { count: 3, per: 3 * HOUR }
    const bucket = newId()
    const take = () => register.limits.take(bucket, rate, 1)
    const giveBack = async () => t.equal(await register.limits.take(bucket, rate, -1), 0)
    await giveBack()
    for (let n = 0; n < 3; n++) t.equal(await take(), 0)
    t.not(await take(), 0)
    await giveBack()
    t.equal(await take(), 0)
    t.not(await take(), 0)
    for (let n = 0; n < 5; n++) await giveBack()
    for (let n = 0; n < 3; n++) t.equal(await take(), 0)
    t.not(await take(), 0)
  })

  void test('throttle: of 50 parallel takes by two replicas, exactly as many succeed as there are units', async (t, {
    register,
    peer,
  }) => {
    const bucket = newId()
    const rate = { count: 20, per: 24 * HOUR }
    const waits = await Promise.all(
      Array.from({ length: 50 }, (_, n) => (n % 2 ? register : peer).limits.take(bucket, rate, 1)),
    )
    t.equal(waits.filter((wait) => wait === 0).length, 20)
  })

  void test('throttle: when the rate changes, taken units count as the time they need to come back', async (t, {
    register,
    advance,
  }) => {
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

  void test('throttle: setting the clock back does not stop a bucket from filling', async (t, {
    register,
    advance,
  }) => {
    const bucket = newId()
    const rate = { count: 2, per: 2 * HOUR }
    for (let n = 0; n < 2; n++) t.equal(await register.limits.take(bucket, rate, 1), 0)
    advance(-5 * HOUR)
    for (let n = 0; n < 2; n++) t.equal(await register.limits.take(bucket, rate, 1), 0)
    const wait = await register.limits.take(bucket, rate, 1)
    t.ok(wait > 0 && wait <= HOUR)
  })

  void test('throttle agrees with a simple model, whatever is asked', async (t, { register, advance }) => {
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
      { numRuns: 60 },
    )
  })

  void test("ping returns the store's time", async (t, { register, advance }) => {
    const first = await register.ping()
    advance(HOUR)
    t.ok((await register.ping()) >= first + HOUR)
    t.ok((await register.get(newId())).now >= first + HOUR)
  })

  void test('traits say that the store does not evict', async (t, { register }) => {
    t.match(await register.traits(), { evicts: false })
  })
}
