import t from 'tap'
import type { RecordId } from '../../src/core/record.ts'
import { SMALL_RECORD } from '../../src/store/record/codec.ts'
import type { PutKind, Store } from '../../src/store/register.ts'
import { array, bulk, int, type Says, scripted, words } from '../support/fake-redis.ts'
import { newId, newToken, SPANS } from './fixtures.ts'
import { APPLIED, claiming, historyOf, KEYS, NOT_APPLIED, open } from './redis-fixtures.ts'

/* What the store makes of the answers to its commands, from a server that says what the test wants. */

async function storeOn(t: Parameters<typeof open>[0], says: Says, options: Parameters<typeof open>[2] = {}) {
  const server = await scripted(t, says)
  return { server, ...(await open(t, server.url, options)) }
}

void t.test('time is the server’s, plus what a test travels', async (t) => {
  const time = words('1795000000', '123999')
  const { store, advance } = await storeOn(t, { time })
  advance(5)
  t.equal(await store.ping(), 1_795_000_000_128)
  const plain = await storeOn(t, { time }, { skew: undefined as never })
  t.equal(await plain.store.ping(), 1_795_000_000_123)
  t.equal(plain.store.name, 'redis')
})

void t.test('what is due is the earliest of all indexes that still exists', async (t) => {
  const ids = Array.from({ length: 3 }, () => newId()) as [RecordId, RecordId, RecordId]
  const { store, server } = await storeOn(t, { due: [int(1)] })
  t.strictSame(await store.due(10), [])
  t.equal(server.asked.filter((name) => name === 'places').length, 256)
  // As every index answers alike, each comes 256 times.
  server.says['places'] = [ids[0], '30', ids[1], '10', ids[2], '20'].map(bulk)
  t.strictSame(await store.due(300), [
    ...Array.from({ length: 256 }, () => ids[1]),
    ...Array.from({ length: 44 }, () => ids[2]),
  ])
  server.says['due'] = [int(0)]
  t.strictSame(await store.due(300), [])
  server.commands.splice(0)
  await store.due(1000, 'bodies')
  const [, , , head = ''] = server.commands[0] as string[]
  t.ok(Buffer.from(head.slice(2)).readUIntBE(0, 6) < 1000, 'of expired responses, a share from each index')
})

void t.test('what one of several commands fails with is not what the others say', async (t) => {
  const [id, other] = [newId(), newId()]
  const items = [id, other].map((id) => ({ id, token: newToken(), ...SPANS }))
  const refusing = (args: readonly string[]) => (args[3]?.endsWith(other) ? '-ERR no\r\n' : [int(1)])
  const { store, server } = await storeOn(t, {
    renew: refusing,
    due: refusing,
    places: ([, , , index]) => (index === KEYS.indexes[0] ? [id, '1', other, '2'].map(bulk) : []),
  })
  t.strictSame(await store.renew(items), [true, false], 'a lease that nobody renewed')
  t.strictSame(await store.due(10), [id])
  server.says['renew'] = server.says['due'] = '-ERR no\r\n'
  await t.rejects(store.renew(items), { message: /ERR no/ })
  await t.rejects(store.due(10), { message: /ERR no/ })
})

void t.test('a list of all has the records that a scan finds, and says where it goes on', async (t) => {
  const [id, other] = [newId(), newId()]
  const strange = KEYS.record(id).replace('pay', 'pay.eu')
  const scan = array(bulk('17'), words(KEYS.record(id), historyOf(id), strange, KEYS.record(other)))
  const { store, server } = await storeOn(t, { scan })
  t.strictSame(await store.list('all', null, 10), { ids: [id, other], next: '.0.17' })
  t.strictSame((await store.list({ beginning: id.slice(0, 8) }, '.0.17', 10)).ids, [id])
  t.equal(server.commands.at(-1)?.[1], '17')
  server.says['scan'] = array(bulk('0'), '*0\r\n')
  t.strictSame(await store.list('all', '.0.5', 10), { ids: [], next: null })
  await store.list('all', '12345678.0.5', 10)
  t.equal(server.commands.at(-1)?.[1], '0', 'a cursor of other servers begins again')
  await store.list('all', `.0.${'9'.repeat(20)}`, 10)
  for (const wrong of [
    '',
    'x',
    '1x',
    'x1',
    `.0.${'9'.repeat(21)}`,
    '.1.5',
    '1234567.0.5',
    '12345678.12345.5',
    '5',
    '5.5',
  ])
    await t.rejects(store.list('all', wrong, 10), RangeError, wrong)
})

void t.test('a full store takes only small outcomes and, in a grace, what was lost', async (t) => {
  const held = ([, , count]: readonly string[]) =>
    Array.from({ length: 2 * Number(count) }, (_, n) => int(n % 2 ? 9 : 40_000))
  const full = '-OOM command not allowed\r\n'
  const says = { swap: full, put: full, renew: full, 'renew though full': [int(1)], throttle: full }
  const { store, server, held: seen } = await storeOn(t, { ...says, admit: held }, { grace: 500_000 })
  const sized = (length: number) => Buffer.concat([claiming(), Buffer.alloc(length)]).subarray(0, length)
  while (seen.at(-1) !== 40_000) await new Promise(setImmediate)
  const refused = { name: 'StoreFull', maybeApplied: false }
  const asking = (length: number, on: Store, entries: readonly PutKind[] = ['claim', 'fresh', 'again']) =>
    Promise.allSettled([
      on.swap(newId(), { version: 1 }, sized(length), SPANS, false),
      ...entries.map((entry) => on.put(newId(), sized(length), SPANS, entry)),
      on.renew([{ id: newId(), token: newToken(), ...SPANS }]),
      on.limits.take(newId(), { count: 1, per: 1 }, 1),
    ])
  server.asked.splice(0)
  t.match(await asking(SMALL_RECORD, store), [
    { value: { done: true } },
    { reason: refused },
    { reason: refused },
    { value: { done: true } },
    { value: [true] },
    { reason: refused },
  ])
  const all = ['swap', 'put', 'put', 'put', 'renew', 'throttle']
  t.strictSame(server.asked, [...all, 'swap though full', 'put though full', 'renew though full'])
  server.asked.splice(0)
  t.match(await asking(SMALL_RECORD + 1, store), [
    ...Array.from({ length: 4 }, () => ({ reason: refused })),
    { value: [true] },
    { reason: refused },
  ])
  t.strictSame(server.asked, [...all, 'renew though full'])
  const calm = await storeOn(t, says)
  t.match((await asking(SMALL_RECORD, calm.store, ['again']))[1], { reason: refused })
})

void t.test('traits are those of the server, which may deny them', async (t) => {
  const { store, server } = await storeOn(t, { info: bulk('role:master\r\nredis_version:6.2.0\r\n') })
  const { refusals, topology } = await store.traits()
  t.match(refusals, [/6.2.0 is too old/])
  t.equal(topology, undefined)
  server.says['info'] = '-NOPERM no\r\n'
  t.match(await store.traits(), { durable: null, findings: [/may not run INFO/], refusals: [] })
  server.says['info'] = '-LOADING data\r\n'
  await t.rejects(store.traits(), { ...NOT_APPLIED, message: /LOADING/ })
})

void t.test('a reply of another form belongs to another command', async (t) => {
  const texts = (...more: string[]) => words('1', '2', ...more)
  const cases: [command: string, (store: Store) => Promise<unknown>, string[]][] = [
    [
      'time',
      (store) => store.ping(),
      [
        int(1),
        '+1 2\r\n',
        bulk('1'),
        words('1'),
        texts('3'),
        words('x', '2'),
        words('1', 'x'),
        array(int(1), bulk('2')),
        array(bulk('1'), int(2)),
        words('1 2', ''),
      ],
    ],
    [
      'scan',
      (store) => store.list('all', null, 1),
      [
        int(1),
        '$-1\r\n',
        words('0'),
        array(bulk('0'), int(1)),
        array(int(0), '*0\r\n'),
        array(bulk('0'), '*0\r\n', '*0\r\n'),
        array(bulk('0'), array(int(1))),
      ],
    ],
    ['info', (store) => store.traits(), [int(1), '*0\r\n']],
  ]
  for (const [command, ask, replies] of cases)
    for (const reply of replies) {
      const { store } = await storeOn(t, { [command]: reply })
      await t.rejects(ask(store), { ...APPLIED, message: /replies do not match/ }, JSON.stringify(reply))
    }
})
