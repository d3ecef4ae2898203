import type { Test } from 'tap'
import type { RecordId, State } from '../../src/core/record.ts'
import { readStamps } from '../../src/store/record/codec.ts'
import type { Store } from '../../src/store/register.ts'
import { bytesOf, HOUR, MINUTE, newId, newToken, response, SPANS } from './fixtures.ts'

/** An empty store whose clock moves only as `advance` says. */
export interface Exact extends AsyncDisposable {
  readonly register: Store
  advance(ms: number): void
  /** Brings what was written to where it stays, if that is another place. */
  readonly settle?: () => Promise<void>
}

const NOTE = { tag: 'a', count: 1, firstAgo: 0, lastAgo: 0, text: '{}' }

/** What every store promises to the millisecond. */
export function exactContract(t: Test, name: string, make: () => Promise<Exact>): void {
  const test = (title: string, body: (t: Test, harness: Exact) => Promise<void>) =>
    void t.test(`${name}: ${title}`, async (t) => {
      await using harness = await make()
      await body(t, harness)
    })

  test('a record exists until the millisecond of its expiry', async (t, { register, advance, settle }) => {
    const now = await register.ping()
    const [id, token] = [newId(), newToken()]
    const spans = { dueIn: MINUTE, dropIn: HOUR }
    const put = await register.put(id, bytesOf('in_progress', token), spans)
    t.same(put, { done: true, now, stamp: { version: now, fence: now, createdAt: now } })
    t.equal(await register.history.append(id, [NOTE]), true)
    await settle?.()
    advance(HOUR - 1)
    const last = now + HOUR - 1
    const found = await register.get(id)
    t.equal(found.now, last)
    t.same(readStamps(found.bytes as Buffer), {
      version: now,
      fence: now,
      createdAt: now,
      updatedAt: now,
      due: now + MINUTE,
      dropAt: now + HOUR,
    })
    t.equal((await register.history.read(id)).length, 1)
    t.same(await register.due(10), [id])
    for (const which of ['all', 'unresolved'] as const)
      t.same((await register.list(which, null, 10)).ids, [id])
    const second = await register.put(id, bytesOf('completed', token), SPANS)
    t.same(second, { done: false, now: last, bytes: found.bytes })

    advance(1)
    const end = now + HOUR
    t.same(await register.get(id), { now: end, bytes: null })
    t.same(await register.history.read(id), [])
    t.equal(await register.history.append(id, [NOTE]), false)
    t.same(await register.due(10), [])
    t.same((await register.list('unresolved', null, 10)).ids, [])
    t.equal(await register.remove(id, now), false)
    t.same(await register.renew([{ id, token, ...SPANS }]), [false])
    const own = { token, states: ['in_progress'] } as const
    t.same(await register.swap(id, own, bytesOf('completed', token), SPANS, false), {
      done: false,
      now: end,
      bytes: null,
    })
    t.same(await register.put(id, bytesOf('completed', token), SPANS), {
      done: true,
      now: end,
      stamp: { version: end, fence: end, createdAt: end },
    })
  })

  test('what is due is listed from its millisecond on', async (t, { register, advance, settle }) => {
    const now = await register.ping()
    const put = async (text: string, dueIn: number, state: State = 'in_progress') =>
      void (await register.put(text.repeat(43) as RecordId, bytesOf(state, newToken()), {
        dueIn,
        dropIn: HOUR,
      }))
    const ends = async (text: string, dueIn: number): Promise<void> => {
      const result = { ...response(Buffer.from('body')), afterBody: HOUR } as ReturnType<typeof response>
      const bytes = bytesOf('completed', newToken(), { result })
      await register.put(text.repeat(43) as RecordId, bytes, { dueIn, dropIn: 2 * HOUR })
    }
    const due = async (of?: 'bodies') => (await register.due(10, of)).map((id) => id.charAt(0))
    await put('c', 10)
    await put('l', 31)
    await put('b', 20, 'unknown')
    await ends('y', 10)
    await ends('z', 31)
    await settle?.()
    await put('a', 21)
    await put('d', 30)
    await ends('x', 30)
    await put('r', 5, 'completed')
    advance(29)
    t.same(await due(), ['c', 'b', 'a'])
    t.same(await due('bodies'), ['y'])
    advance(1)
    t.same(await due(), ['c', 'b', 'a', 'd'])
    t.same((await due('bodies')).toSorted(), ['x', 'y'])
    const page = await register.list('unresolved', null, 2)
    t.match(page, { ids: [/^c/, /^b/], next: `${now + 20} ${'b'.repeat(43)}` })
    t.match(await register.list('unresolved', page.next, 2), { ids: [/^a/, /^d/] })
  })

  test('each write is stamped to the millisecond, and adds one to the version', async (t, harness) => {
    const { register, advance } = harness
    const now = await register.ping()
    const [id, token] = [newId(), newToken()]
    const stamps = async () => readStamps((await register.get(id)).bytes as Buffer)
    const first = { fence: now, createdAt: now }
    await register.put(id, bytesOf('in_progress', token), SPANS)
    advance(9)
    t.same(await register.renew([{ id, token, dueIn: 50, dropIn: 48 * HOUR }]), [true])
    const renewed = { due: now + 59, dropAt: now + 9 + 48 * HOUR, updatedAt: now }
    t.same(await stamps(), { version: now + 1, ...first, ...renewed })
    advance(1)
    const silent = bytesOf('unknown', token, { leaseExpired: true })
    await register.swap(id, { version: now + 1 }, silent, { dueIn: 20, dropIn: 30 }, false)
    const fell = { due: now + 30, dropAt: now + 40, updatedAt: now + 10 }
    t.same(await stamps(), { version: now + 2, ...first, ...fell })
    advance(1)
    t.same(await register.renew([{ id, token, dueIn: 50, dropIn: 60 }]), [true], 'it is in progress again')
    t.same(await stamps(), { version: now + 3, ...first, ...fell, due: now + 61, dropAt: now + 71 })
  })

  test('a rate says exactly when the next unit is there', async (t, { register, advance }) => {
    const bucket = newId()
    const take = (units: 1 | -1 = 1, count = 2) => register.limits.take(bucket, { count, per: 1000 }, units)
    t.same([await take(), await take(), await take()], [0, 0, 500])
    advance(499)
    t.equal(await take(), 1)
    advance(1)
    t.same([await take(), await take()], [0, 500])
    advance(100)
    t.same([await take(-1), await take(-1), await take()], [0, 0, 0])
    // At a higher rate what is missing takes less time, rounded up.
    t.same([await take(1, 3), await take(1, 3)], [0, 167])
    advance(-500)
    t.equal(await take(1, 3), 0, 'a clock that went back fills it as well')
  })
}
