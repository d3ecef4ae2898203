import t, { type Test } from 'tap'
import type { Millis } from '../../src/core/record.ts'
import { Epoch } from '../../src/store/postgres-epoch.ts'
import type { SqlRow } from '../../src/store/postgres-link.ts'
import { type NewEpoch, StoreUnavailable } from '../../src/store/register.ts'
import { KEPT_FOR, Safety } from '../../src/store/safety.ts'
import { newId, until } from './fixtures.ts'

const LONG: Millis = 3_600_000

/** An epoch whose looks the test answers, by default that nothing is held since 7. */
function observed(t: Test, grace = LONG) {
  const self = {
    answer: async (_seen: Millis): Promise<SqlRow> => ['0', '7'],
    looks: [] as Millis[],
    epochs: [] as NewEpoch[],
    held: [] as Millis[],
    silences: 0,
    safe: [] as Millis[],
  }
  const epoch = new Epoch({
    grace,
    look: (seen) => {
      self.looks.push(seen)
      return self.answer(seen)
    },
    onSilence: () => void self.silences++,
    onNew: (one) => void self.epochs.push(one),
    safety: new Safety(1, (before) => void self.safe.push(before)),
    onHeld: (left) => void self.held.push(left),
  })
  t.teardown(() => epoch.close())
  return { ...self, self, epoch }
}

const lefts = (epochs: readonly NewEpoch[]) => epochs.map(({ left }) => left)

void t.test('the first look begins an epoch, and no later one of the same server', async (t) => {
  const { epoch, epochs, held, looks } = observed(t)
  t.equal(epoch.seen, 0)
  for (let n = 0; n < 3; n++) await epoch.look()
  t.same(looks, [0, 7, 7], 'each says what is known')
  t.equal(epoch.seen, 7)
  t.same(lefts(epochs), [0])
  t.ok(epochs[0]?.concerns(newId()))
  t.same(held, [0, 0, 0])
})

void t.test('another server begins another epoch, and says how long claims are held', async (t) => {
  const { self, epoch, epochs, held } = observed(t)
  await epoch.look()
  self.answer = async () => ['500', '9']
  await epoch.look()
  t.same(lefts(epochs), [0, 500])
  t.equal(epoch.seen, 9)
  t.same(held, [0, 500])
})

void t.test('a look that fails holds nothing; silence is reported, a refusal is not', async (t) => {
  const { self, epoch, epochs, held, looks } = observed(t)
  for (const maybeApplied of [false, true]) {
    self.answer = async () => {
      throw new StoreUnavailable('down', maybeApplied)
    }
    await epoch.look()
    t.equal(self.silences, maybeApplied ? 1 : 0)
  }
  for (const row of [['-1', '7'], ['0', 'x'], []]) {
    self.answer = async () => row
    await epoch.look()
  }
  t.same(epochs, [])
  t.same(held, [0, 0, 0, 0, 0])
  t.same(looks, [0, 0, 0, 0, 0])
})

void t.test('looks take turns: one may still be asking the previous server', async (t) => {
  const { self, epoch, looks } = observed(t)
  let release = (): void => {}
  self.answer = () => new Promise((resolve) => (release = () => resolve(['0', '9'])))
  const both = [epoch.look(), epoch.look()]
  await until(() => looks.length === 1)
  self.answer = async () => ['0', '9']
  release()
  await Promise.all(both)
  t.same(looks, [0, 9])
})

void t.test('a server is looked at four times per grace, one look at a time, until the end', async (t) => {
  const { self, epoch, looks } = observed(t, 400)
  const begun = performance.now()
  await until(() => looks.length === 2)
  const took = performance.now() - begun
  t.ok(took > 190 && took < 1500, `${took}`)
  let release = (): void => {}
  self.answer = () => new Promise((resolve) => (release = () => resolve(['0', '7'])))
  await until(() => looks.length === 3)
  await new Promise((next) => setTimeout(next, 250))
  t.equal(looks.length, 3, 'the last one has not been answered')
  release()
  self.answer = async () => ['0', '7']
  await until(() => looks.length === 4)
  epoch.close()
  await new Promise((next) => setTimeout(next, 150))
  t.equal(looks.length, 4)
})

void t.test('writes are safe once the server has been the same for long', async (t) => {
  const { self, epoch, safe } = observed(t)
  let skew = 0
  const { now } = performance
  t.capture(performance, 'now', () => now.call(performance) + skew)
  const look = async (): Promise<Millis> => {
    await epoch.look()
    return safe.at(-1) as Millis
  }
  t.equal(await look(), Number.NEGATIVE_INFINITY)
  skew += KEPT_FOR
  // What was known before the first look may be of another server.
  self.answer = async () => ['0', '9']
  t.equal(await look(), Number.NEGATIVE_INFINITY)
  skew += KEPT_FOR
  const asked = performance.now()
  t.ok(Math.abs((await look()) - (asked - KEPT_FOR)) < 1000)
})
