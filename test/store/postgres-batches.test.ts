import t, { type Test } from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { lockWait } from '../../src/store/postgres/lanes.ts'
import type { Batch } from '../../src/store/postgres/queue.ts'
import { fakeLanes, isLook, TIMEOUT, textsOf } from '../support/fake-lanes.ts'
import type { Sent } from '../support/fake-links.ts'
import { SPANS } from './fixtures.ts'

// Which operations share a statement, and what its answer or its failure means for each of them.

const CLAIMS: Batch = { text: 'claims', argsOf: (items) => [items.map(({ id }) => id)] }
const MIB = 1024 * 1024

async function open(t: Test) {
  const opened = await fakeLanes(t)
  const { lanes, ends } = opened
  const act = (id: string, size = 1): void => {
    const item = { id: id as RecordId, bytes: Buffer.alloc(size), spans: SPANS, rule: 0 }
    void lanes
      .runTogether(CLAIMS, item, `${id} alone`, () => [id], 'plain')
      .then(
        (row) => ends.push(`${id}: ${row.join()}`),
        ({ name, maybeApplied }) => ends.push(`${id}: ${name} ${maybeApplied}`),
      )
  }
  const claim = (...ids: string[]): void => {
    for (const id of ids) act(id)
  }
  const all: Sent[] = []
  opened.fake.onSent = (one) => void (isLook(one) || all.push(one))
  const sent = () => all.filter(({ text }) => text !== 'grow')
  /** What each statement was for. */
  const told = () => sent().map(({ text, args }) => `${text} ${args.slice(1).flat().join('+')}`)
  /** The n-th statement decides these. */
  const decide = async (n: number, ...ids: string[]): Promise<void> => {
    const one = sent()[n]
    const number = String(one?.args[0])
    one?.rows([number, null], ...ids.map((id) => [number, id, 'done', id]))
    await opened.fake.settled()
  }
  return { ...opened, act, claim, sent, told, decide }
}

void t.test('operations of one turn leave in one statement, and each has a result of its own', async (t) => {
  const { claim, told, decide, fake, ends } = await open(t)
  claim('a', 'b')
  t.same(told(), [], 'not before the turn has ended')
  claim('c')
  await fake.settled()
  t.same(told(), ['claims a+b+c'])
  await decide(0, 'c', 'a', 'b')
  t.same(ends.sort(), ['a: done,a', 'b: done,b', 'c: done,c'])
})

void t.test('what a statement has not decided goes by itself, at once', async (t) => {
  const { claim, told, decide, sent, ends, links, fake } = await open(t)
  claim('a', 'b', 'c')
  await fake.settled()
  await decide(0, 'b')
  t.same(textsOf(links[0]), ['claims', 'a alone'])
  t.same(told(), ['claims a+b+c', 'a alone a', 'c alone c'])
  sent()[1]?.answer('x')
  sent()[2]?.fail('55P03')
  await fake.settled()
  t.same(ends, ['b: done,b', 'a: x', 'c: RecordLocked false'])
})

void t.test('one record is in a statement once; there are sixty-four at most, and a mebibyte', async (t) => {
  const { claim, act, told, sent, decide, fake } = await open(t)
  claim('a', 'b', 'a', 'c')
  await fake.settled()
  t.same(told(), ['claims a+b+c', 'a alone a'])
  await decide(0, 'a', 'b', 'c')
  sent()[1]?.answer('x')
  claim(...Array.from({ length: 65 }, (_, n) => `n${n}`))
  await fake.settled()
  t.same(told()[2]?.split('+').length, 64)
  t.equal(told()[3], undefined)
  await decide(2, ...Array.from({ length: 64 }, (_, n) => `n${n}`))
  t.equal(told()[3], 'claims n64')
  await decide(3, 'n64')
  act('huge', 3 * MIB)
  act('half', MIB / 2)
  act('more', MIB / 2)
  act('over', 1)
  await fake.settled()
  for (const n of [4, 5, 6]) await decide(n, ...(told()[n] ?? '').replace('claims ', '').split('+'))
  t.same(told().slice(4), ['claims huge', 'claims half+more', 'claims over'])
})

void t.test('while one is under way, the next is collected for two ms, or until it is full', async (t) => {
  const { claim, told, decide, pass, fake, grow } = await open(t)
  await grow(3)
  claim('a')
  await fake.settled()
  claim('b')
  await fake.settled()
  await pass(1)
  claim('c')
  await fake.settled()
  t.same(told(), ['claims a'])
  await pass(1)
  t.same(told(), ['claims a', 'claims b+c'])
  claim('e')
  await decide(0, 'a')
  t.equal(told().length, 2, 'another one is')
  const ids = Array.from({ length: 63 }, (_, n) => `n${n}`)
  claim(...ids)
  await fake.settled()
  t.ok(told().includes(`claims e+${ids.join('+')}`))
})

void t.test('one that fails is not the failure of the others', async (t) => {
  for (const [code, failures] of [
    ['55P03', 1],
    ['22003', 1],
    ['25006', 1],
    ['53100', 1],
    ['23502', 1],
    ['40001', 4],
    ['40P01', 4],
  ] as const)
    await t.test(code, async (t) => {
      const { claim, told, sent, fake, ends, links } = await open(t)
      claim('a', 'b')
      await fake.settled()
      for (let n = 0; n < failures; n++) {
        t.same(textsOf(links[0]), Array(n + 1).fill('claims'))
        sent()[n]?.fail(code)
        await fake.settled()
      }
      t.same(told().slice(failures), ['a alone a', 'b alone b'])
      sent()[failures]?.answer('x')
      sent()[failures + 1]?.fail('22003')
      await fake.settled()
      t.same(ends, ['a: x', 'b: StoreUnavailable false'])
    })
})

void t.test('where the answer is lost or another statement’s, each may have been applied', async (t) => {
  for (const how of ['cut', 'number', 'nothing']) {
    const { claim, sent, links, fake, ends } = await open(t)
    claim('a', 'b')
    await fake.settled()
    if (how === 'cut') links[0]?.cut()
    else
      sent()[0]?.rows(
        ...(how === 'number'
          ? [
              ['0', null],
              ['0', 'a', 'x'],
            ]
          : []),
      )
    await fake.settled()
    t.same(ends, ['a: StoreUnavailable true', 'b: StoreUnavailable true'], how)
    t.equal(links[0]?.isOver, true)
  }
})

void t.test('each waits for its own time, and a late answer is for those that still wait', async (t) => {
  const { claim, decide, pass, ends, run, fake, told, sent } = await open(t)
  fake.accepts = false
  void run('first')
  await fake.settled()
  claim('a')
  await pass(TIMEOUT / 2)
  claim('b', 'c')
  await pass(0)
  await decide(0)
  t.same(told(), ['first a', 'claims a+b+c'])
  await pass(TIMEOUT / 2)
  t.same(ends, ['first: ', 'a: StoreUnavailable true'])
  await decide(1, 'a', 'b')
  t.same(ends.slice(2), ['b: done,b'])
  t.equal(told()[2], 'c alone c')
  await pass(TIMEOUT / 2)
  t.same(ends.slice(3), ['c: StoreUnavailable true'])
  sent()[2]?.answer('x')
  await fake.settled()
  t.equal(ends.length, 4)
})

void t.test('what has not been decided and finds no connection was not applied', async (t) => {
  const { claim, decide, pass, ends, fake } = await open(t)
  fake.accepts = false
  claim('a', 'b')
  await pass(lockWait(TIMEOUT))
  await decide(0)
  await pass(TIMEOUT)
  t.same(ends, ['a: StoreUnavailable true', 'b: StoreUnavailable false'])
})

void t.test('closing refuses what is being collected', async (t) => {
  const { claim, lanes, told, ends, fake } = await open(t)
  claim('a')
  await fake.settled()
  claim('b')
  await lanes.close()
  await fake.settled()
  t.same(told(), ['claims a'])
  t.same(ends.sort(), ['a: StoreUnavailable true', 'b: StoreUnavailable false'])
  t.equal(fake.timers(), 0)
})
