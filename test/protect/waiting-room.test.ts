import { setImmediate as turn } from 'node:timers/promises'
import t, { type Test } from 'tap'
import type { IdempotencyRecord, RecordId } from '../../src/core/record.ts'
import { heldRecord, type OutcomeDraft } from '../../src/core/settle.ts'
import { WaitingRoom } from '../../src/protect/waiting-room.ts'
import type { ReadReply } from '../../src/store/records.ts'
import { StoreUnavailable } from '../../src/store/register.ts'
import { draft, newToken } from '../store/fixtures.ts'
import { hurried, idle, MINUTE, SECOND } from './harness.ts'

const ID = 'id' as RecordId
const ABSENT = { kind: 'read', now: 1, record: null } as const
const RECORD: IdempotencyRecord = heldRecord(draft('completed', newToken()) as OutcomeDraft)

/** Longer than any news takes. */
const SOON = 2 * SECOND

/** Whether `check` holds within two seconds. Needs no timer. */
async function soon(check: () => boolean): Promise<boolean> {
  for (const end = performance.now() + SOON; !check() && performance.now() < end; ) await turn()
  return check()
}

/** Tells how many timers have begun since that would keep the process alive. */
function timersOf(t: Test): () => number {
  const live = new Set<NodeJS.Timeout>()
  const { setTimeout: begin, clearTimeout: end } = globalThis
  const value = (call: (...args: []) => void, time: number, ...args: []): NodeJS.Timeout => {
    const timer = begin(() => {
      live.delete(timer)
      call(...args)
    }, time)
    live.add(timer)
    return timer
  }
  t.intercept(globalThis, 'setTimeout', { value })
  t.intercept(globalThis, 'clearTimeout', {
    value: (timer: NodeJS.Timeout) => {
      live.delete(timer)
      end(timer)
    },
  })
  return () => [...live].filter((timer) => timer.hasRef()).length
}

/** A waiting room on a store under the test's control. */
function waiting(t: Test, most = 10) {
  const it = {
    /** Every look at the store; answered by the test. */
    looks: [] as PromiseWithResolvers<ReadReply>[],
    watched: [] as RecordId[],
    stopped: 0,
    changed: (): void => {},
    began: Promise.withResolvers<void>(),
  }
  const waiters = new WaitingRoom(
    {
      get: () => {
        const look = Promise.withResolvers<ReadReply>()
        it.looks.push(look)
        return look.promise
      },
    },
    {
      watch: async (id, changed) => {
        it.watched.push(id)
        it.changed = changed
        await it.began.promise
        return () => it.stopped++
      },
    },
    most,
  )
  t.teardown(() => waiters.close())
  const enter = (local = false, id = ID) => {
    const seat = waiters.enter(id, local)
    if (seat === null) throw new Error('no seat')
    // The timer of a room with seats would go on during the next test.
    t.teardown(() => seat.leave())
    return seat
  }
  return { it, waiters, enter }
}

void t.test('a record is watched once, looked at one at a time, until the last seat is left', async (t) => {
  const { it, waiters, enter } = waiting(t)
  const [one, two] = [enter(), enter()]
  t.same(it.watched, [ID])
  t.equal(it.looks.length, 0, 'not before the watch has begun')
  it.began.resolve()
  await idle()
  t.equal(it.looks.length, 1, 'once, in case a message was missed')
  it.changed()
  it.changed()
  await idle()
  t.equal(it.looks.length, 1)
  it.looks[0]?.resolve(ABSENT)
  t.same(await one.next(SOON), { kind: 'absent' })
  t.same(await two.next(SOON), { kind: 'absent' }, 'everybody is told')
  t.equal(it.looks.length, 2, 'what came meanwhile')
  it.looks[1]?.resolve({ kind: 'read', now: 7, record: RECORD })
  t.same(await two.next(SOON), { kind: 'record', record: RECORD, now: 7 })
  await idle()
  t.equal(it.looks.length, 2)
  it.changed()
  t.equal(it.looks.length, 3)
  it.changed()
  one.leave()
  t.same([it.stopped, waiters.awaited.has(ID)], [0, true])
  two.leave()
  t.same([it.stopped, waiters.awaited.has(ID), waiters.size], [1, false, 0])
  it.looks[2]?.resolve(ABSENT)
  await idle()
  t.equal(it.looks.length, 3, 'nobody waits for another look')
  waiters.tell(ID, null)
  waiters.tell(ID, RECORD)
  t.equal(it.looks.length, 3)
  enter()
  t.equal(it.watched.length, 2, 'whoever comes later watches again')
})

void t.test('a run of this replica is not watched, until somebody waits for another’s', async (t) => {
  const { it, waiters, enter } = waiting(t)
  const seat = enter(true)
  const other = enter(true, 'other' as RecordId)
  t.same(it.watched, [])
  waiters.tell(ID, RECORD)
  t.same(await seat.next(SOON), { kind: 'record', record: RECORD, now: 0 })
  t.equal(await other.next(1), null, 'it waits for another record')
  waiters.tell(ID, null)
  t.equal(it.looks.length, 1)
  enter(false)
  t.same(it.watched, [ID])
})

void t.test('the store is looked at every second at least, without a message too', async (t) => {
  const { setTimeout: real } = globalThis
  const pauses = hurried(t)
  const { it, enter } = waiting(t)
  const seat = enter(true)
  for (let n = 0; n < 8; n++) {
    t.ok(await soon(() => it.looks.length > n))
    it.looks[n]?.resolve(ABSENT)
  }
  await idle()
  const first = pauses[0] ?? 0
  t.ok(first <= 200, 'the first time soon')
  t.ok(pauses.every((pause, n) => pause === Math.min(first * 2 ** n, SECOND)))
  t.equal(pauses.at(-1), SECOND)
  seat.leave()
  await idle()
  const { length } = it.looks
  await new Promise((next) => real(next, 10))
  t.equal(it.looks.length, length, 'not once nobody waits')
})

void t.test('a look that fails tells nobody; one that throws: the record cannot be read', async (t) => {
  const { it, enter } = waiting(t)
  const seat = enter()
  it.began.resolve()
  t.ok(await soon(() => it.looks.length === 1))
  const error = new StoreUnavailable('down', false)
  it.looks[0]?.resolve({ kind: 'unavailable', full: false, error })
  await idle()
  t.equal(it.looks.length, 1)
  t.equal(await seat.next(1), null)
  for (const throws of [true, false]) {
    it.changed()
    const look = it.looks.at(-1)
    if (throws) look?.reject(new Error('a bug'))
    else look?.resolve({ kind: 'corrupt', error: error as never })
    t.same(await seat.next(SOON), { kind: 'corrupt' })
  }
})

void t.test('a seat has news once, and ends with its time or when it is dismissed', async (t) => {
  const timers = timersOf(t)
  const { waiters, enter } = waiting(t)
  const seat = enter(true)
  waiters.tell(ID, RECORD)
  t.match(await seat.next(0), { kind: 'record' }, 'what came before it asked')
  t.equal(await seat.next(0), null, 'once')
  t.equal(await seat.next(-1), null)
  const news = seat.next(SOON)
  await new Promise((next) => setTimeout(next, 5))
  waiters.tell(ID, RECORD)
  t.match(await news, { kind: 'record' })
  t.equal(timers(), 0, 'no timer is left')
  const dismissed = seat.next(MINUTE)
  seat.dismiss()
  t.equal(await dismissed, null)
  waiters.tell(ID, RECORD)
  t.equal(await seat.next(MINUTE), null, 'dismissed for good, whatever is told')
  t.equal(timers(), 0)
})

void t.test('limits.waiters counts seats of all records, and who waits for the store', async (t) => {
  const { it, waiters, enter } = waiting(t, 1)
  const seat = enter()
  t.equal(waiters.enter('other' as RecordId, true), null)
  t.equal(await waiters.outlast(0, () => () => {}), false)
  waiters.resize(2)
  const other = enter()
  waiters.resize(1)
  t.equal(waiters.size, 2, 'seats already taken stay')
  other.leave()
  t.equal(waiters.enter(ID, false), null)
  seat.leave()
  it.began.resolve()
  t.ok(await soon(() => it.stopped === 1), 'a watch that begins after the last one left ends')
  t.equal(it.looks.length, 0)
  const waits = waiters.outlast(1, () => () => {})
  t.equal(waiters.enter(ID, true), null)
  t.equal(await waits, true)
  t.ok(waiters.enter(ID, true))
})

void t.test('a request outlasts the grace, unless its client leaves or the proxy stops', async (t) => {
  const timers = timersOf(t)
  for (const end of ['time', 'left', 'drained', 'draining'] as const) {
    const { waiters } = waiting(t)
    if (end === 'draining') waiters.drain()
    let leave = (): void => {}
    let stopped = 0
    const lasted = waiters.outlast(end === 'time' ? 5 : MINUTE, (left) => {
      leave = left
      return () => stopped++
    })
    t.equal(waiters.size, end === 'draining' ? 0 : 1)
    if (end === 'left') leave()
    if (end === 'drained') waiters.drain()
    t.equal(await lasted, end === 'time', end)
    t.equal(waiters.size, 0)
    t.equal(stopped, end === 'draining' ? 0 : 1)
    t.equal(timers(), 0, 'no timer is left')
  }
})

void t.test('§11 a drain ends the waits for other replicas, and closing ends all', async (t) => {
  const { waiters, enter } = waiting(t)
  const [own, foreign] = [enter(true), enter(false, 'other' as RecordId)]
  waiters.drain()
  t.equal(await foreign.next(MINUTE), null)
  t.equal(waiters.enter('third' as RecordId, false), null)
  t.ok(waiters.enter('third' as RecordId, true), 'runs of this replica are still waited for')
  waiters.tell(ID, RECORD)
  t.match(await own.next(SOON), { kind: 'record' })
  const last = own.next(MINUTE)
  waiters.close()
  t.equal(await last, null)
  const closed = waiting(t)
  closed.waiters.close()
  t.equal(closed.waiters.enter(ID, false), null)
})

void t.test('§6 one request takes over after each attempt that did nothing, or passes it on', async (t) => {
  const { it, enter } = waiting(t)
  const { room } = enter(true)
  t.same([room.takesOver(0), room.takesOver(0)], [true, false], 'an attempt without a fence')
  t.equal(it.looks.length, 0)
  room.passOn()
  t.equal(it.looks.length, 1, 'so that somebody is told')
  t.same([room.takesOver(0), room.takesOver(0)], [true, false])
  t.same([room.takesOver(7), room.takesOver(7), room.takesOver(5)], [true, false, false])
  room.passOn()
  t.same([room.takesOver(7), room.takesOver(7)], [true, false])
})
