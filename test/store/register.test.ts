import t from 'tap'
import {
  CorruptRecord,
  Declined,
  InGrace,
  idOfCursor,
  inOrder,
  OutOfPhase,
  PartlyUnavailable,
  pageOf,
  parseCursor,
  RecordLocked,
  responsesOfEach,
  SEAL_ERRORS,
  SealedRecord,
  StoreFull,
  StoreUnavailable,
  Unreplicated,
} from '../../src/store/register.ts'

void t.test('places are ordered by time, then by id', async (t) => {
  const ordered = [
    { due: 1, id: 'b' },
    { due: 2, id: 'A' },
    { due: 2, id: '_' },
    { due: 2, id: 'a' },
    { due: 10, id: 'A' },
  ]
  for (const [n, one] of ordered.entries())
    for (const [m, other] of ordered.entries()) t.equal(Math.sign(inOrder(one, other)), Math.sign(n - m))
})

void t.test('the cursor of a page is the place where the next one begins', async (t) => {
  const found = [
    { due: 5, id: 'a-_Z09' },
    { due: 2 ** 48 - 1, id: 'b'.repeat(64) },
  ]
  t.same(pageOf(found, 3), { ids: ['a-_Z09', 'b'.repeat(64)], next: null }, 'the last page')
  for (const [n, place] of found.entries()) {
    const { ids, next } = pageOf(found.slice(0, n + 1), n + 1)
    t.equal(ids.length, n + 1)
    t.same(parseCursor(next), place)
  }
  t.same(pageOf([], 1), { ids: [], next: null })
  t.same(parseCursor(null), { due: 0, id: '' }, 'the first page begins before all places')
})

void t.test('a cursor that no page returned is refused', async (t) => {
  for (const cursor of [
    '',
    '5',
    '5 ',
    ' a',
    '5 a ',
    'x5 a',
    '5 a b',
    '5  a',
    '-5 a',
    '5 ä',
    `5 ${'a'.repeat(65)}`,
  ])
    t.throws(() => parseCursor(cursor), { name: 'RangeError' }, cursor)
  t.throws(() => parseCursor(`${'1'.repeat(17)} a`), { name: 'RangeError' })
  t.equal(parseCursor(`${'1'.repeat(16)} a`).due, 1_111_111_111_111_111)
  for (const cursor of ['', 'a b', 'ä', ' a', 'a\n', 'a'.repeat(65)])
    t.throws(() => idOfCursor(cursor), { name: 'RangeError' }, cursor)
  for (const cursor of ['a', '-_Z09', 'a'.repeat(64)]) t.equal(idOfCursor(cursor), cursor)
  t.equal(idOfCursor(null), '')
})

void t.test('each part of an index is asked for twice its share of responses, and some more', async (t) => {
  for (const [limit, parts, of] of [
    [1, 256, 1],
    [8, 256, 8],
    [100, 256, 9],
    [100, 10, 28],
    [101, 10, 29],
    [1000, 256, 16],
    [100, 1, 100],
  ] as const)
    t.equal(responsesOfEach(limit, parts), of, `${limit} in ${parts}`)
})

void t.test('each error says what it is, and whether the operation may have been applied', async (t) => {
  const cause = new Error('why')
  for (const [error, name, maybeApplied] of [
    [new StoreUnavailable('x', true), 'StoreUnavailable', true],
    [new StoreUnavailable('x', false), 'StoreUnavailable', false],
    [new PartlyUnavailable('x', false), 'StoreUnavailable', false],
    [new Unreplicated('x'), 'Unreplicated', true],
    [new StoreFull('x'), 'StoreFull', false],
    [new RecordLocked('x'), 'RecordLocked', false],
    [new InGrace(1, 2, 3), 'InGrace', false],
    [new OutOfPhase('x', false), 'OutOfPhase', false],
  ] as const) {
    t.ok(error instanceof StoreUnavailable)
    t.equal(error instanceof Declined, name === 'RecordLocked' || name === 'InGrace')
    t.match(error, { name, maybeApplied })
  }
  t.equal(new StoreUnavailable('x', true, { cause }).cause, cause)
  t.equal(new StoreFull('x', { cause }).cause, cause)
  t.match(new InGrace(1, 2, 3), { now: 1, since: 2, left: 3, message: /another 3 ms/ })
  t.match(new SealedRecord('altered', 'x'), { name: 'CorruptRecord', reason: 'altered' })
  t.ok(new SealedRecord('altered', 'x') instanceof CorruptRecord)
  t.same(SEAL_ERRORS, ['unknown_key', 'altered'], 'the labels of a metric')
})
