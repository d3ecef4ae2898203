import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { type Subscription, Subscriptions } from '../../src/store/subscriptions.ts'
import { frozenClock } from '../support/frozen-clock.ts'

const A = 'a' as RecordId
const B = 'b' as RecordId

/** Subscriptions, and what their server is asked. */
function made(timeoutMs = 60_000, acknowledges = true) {
  const asked: string[] = []
  const begun: Subscription[] = []
  class Made extends Subscriptions {
    protected override begin(subscription: Subscription): void {
      asked.push(`begin ${subscription.id}`)
      begun.push(subscription)
      if (acknowledges) this.acknowledged(subscription)
    }

    protected override end(id: RecordId): void {
      asked.push(`end ${id}`)
    }
  }
  const all = new Made(timeoutMs)
  return { all, asked, begun }
}

/** Lets watchers be told. */
const told = (): Promise<void> => new Promise((next) => setImmediate(next))

void t.test('watchers of one record share a subscription, which ends with the last one', async (t) => {
  const { all, asked } = made()
  let changes = 0
  const changed = (): void => void changes++
  const [one, two] = [await all.watch(A, changed), await all.watch(A, changed)]
  const other = await all.watch(B, changed)
  t.same(asked, ['begin a', 'begin b'])
  t.same(
    all.all.map(({ id }) => id),
    [A, B],
  )
  all.changed(A)
  await told()
  t.equal(changes, 2)
  one()
  one()
  t.same(asked, ['begin a', 'begin b'])
  all.changed(A)
  await told()
  t.equal(changes, 3, 'only the one that is left')
  two()
  two()
  t.same(asked, ['begin a', 'begin b', 'end a'])
  other()
  await all.watch(A, changed)
  t.same(asked.slice(3), ['end b', 'begin a'], 'a later watcher begins anew')
})

void t.test('a watcher waits until the server has answered, and no longer than its timeout', async (t) => {
  const clock = frozenClock(t)
  for (const how of ['acknowledged', 'miss', 'missAll', 'timeout'] as const) {
    const { all, begun } = made(60_000, false)
    let isWatching = false
    const watching = [all.watch(A, () => {}), all.watch(A, () => {})].map((one) =>
      one.then(() => void (isWatching = true)),
    )
    await clock.pass(59_999)
    t.notOk(isWatching, how)
    t.equal(begun.length, 1, 'both wait for one answer')
    const [subscription] = begun as [Subscription]
    if (how === 'missAll') all.missAll()
    else if (how !== 'timeout') all[how](subscription)
    // An answer in time ends the timeout.
    await clock.pass(60_000)
    await Promise.all(watching)
    t.equal(subscription.missed, how !== 'acknowledged', how)
  }
})

void t.test('a watcher that may have missed a write is told once the server is back', async (t) => {
  const { all, begun } = made()
  let changes = 0
  await all.watch(A, () => void changes++)
  const [subscription] = begun as [Subscription]
  all.acknowledged(subscription)
  await told()
  t.equal(changes, 0, 'nothing was missed')
  all.missAll()
  await told()
  t.equal(changes, 0, 'not yet')
  all.acknowledged(subscription)
  await told()
  t.equal(changes, 1)
  all.acknowledged(subscription)
  await told()
  t.equal(changes, 1, 'once')
})
