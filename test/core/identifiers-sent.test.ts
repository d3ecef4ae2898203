import t from 'tap'
import { asksBy, whyUntold } from '../../src/core/reconcile/answer.ts'
import { identifiersSent, identifiersSentByBoth, upstreamTag } from '../../src/core/reconcile/identifiers.ts'
import type { Fingerprint, Operation, RecordId } from '../../src/core/record.ts'
import { route } from '../protect/harness.ts'

const ID = 'a'.repeat(43) as RecordId
const POLICY = route().key

const OPERATION: Operation = {
  route: 'pay',
  method: 'POST',
  path: '/pay',
  fingerprint: Buffer.alloc(32) as Fingerprint,
  rawDigest: Buffer.alloc(32),
  recipe: 'v1',
  key: 'k1',
}

const TO = upstreamTag('http://127.0.0.1:3000')

const told = (lines: readonly string[], more: Partial<typeof POLICY> = {}, inBody = false, keepsKey = true) =>
  identifiersSent(lines, { ...POLICY, ...more }, ID, 'k1', inBody, keepsKey, TO)

void t.test('V07 the lines sent show which identifiers the upstream was told', async (t) => {
  t.same(told(['Idempotency-Key', 'k1']), { key: 'k1', told: ['key'], toldTo: TO })
  t.same(
    told(['IDEMPOTENCY-KEY', ' k1\t']),
    { key: 'k1', told: ['key'], toldTo: TO },
    'white space around a value does not count',
  )
  t.same(told(['Idempotency-Key', '"k1";a=1']), { key: 'k1', keySent: '"k1";a=1', told: ['key'], toldTo: TO })
  t.same(told(['Idempotency-Record', ID]), { key: 'k1', told: ['record'], toldTo: TO })
  t.same(told(['Idempotency-Record', ID], {}, false, false), { key: null, told: ['record'], toldTo: TO })
  t.same(told(['Idempotency-Key', 'k1', 'Idempotency-Record', ID]), {
    key: 'k1',
    told: ['key', 'record'],
    toldTo: TO,
  })
  t.same(
    told(['Idempotency-Key', '"k1"'], {}, false, false),
    { key: null },
    'a key that no status query asks by is not kept',
  )
})

void t.test('V07 a missing line, or one with another value, tells the upstream nothing', async (t) => {
  for (const lines of [
    [],
    ['X-Key', 'k1'],
    ['Idempotency-Key', 'k2'],
    ['Idempotency-Key', '"k1'],
    ['Idempotency-Record', 'b'.repeat(43)],
  ])
    t.same(told(lines), { key: 'k1' }, lines.join(': '))
})

void t.test('V07 a key sent under another name or in the body counts as told', async (t) => {
  const forward = { header: 'X-Request-Id' }
  t.same(told(['X-Request-ID', 'k1'], { forward }), { key: 'k1', told: ['key'], toldTo: TO })
  t.same(
    told(['X-Request-ID', 'k1'], { forward, syntax: 'strict' }),
    { key: 'k1', told: ['key'], toldTo: TO },
    'sent without quotes, even where clients must quote it',
  )
  t.same(told(['Host', 'api.test'], { forward: { header: 'Host' } }), { key: 'k1' })
  t.same(told([], { forward: 'none' }, true), { key: 'k1', told: ['key'], toldTo: TO })
  t.same(told([], { from: [{ kind: 'json', pointer: '/id' }] }), { key: 'k1' })
  t.same(
    told(['Order', 'k1'], { from: [{ kind: 'form', name: 'order' }] }),
    { key: 'k1' },
    'a header named like a field of the body is not the key',
  )
})

void t.test('V07 a key sent in two spellings besides its bare one cannot be asked by', async (t) => {
  const from = [
    { kind: 'header', name: 'idempotency-key' },
    { kind: 'header', name: 'x-key' },
  ] as const
  const lines = ['Idempotency-Key', '"k1"', 'X-Key', '"k1";a=1']
  t.same(told(lines, { from }), { key: 'k1' })
  t.same(told(lines.with(3, '"k1"'), { from }), { key: 'k1', keySent: '"k1"', told: ['key'], toldTo: TO })
})

void t.test(
  'V07 of two attempts that may both have executed, only identifiers that both told count',
  async (t) => {
    const both = (earlier: Partial<Operation>, later: Partial<Operation>) => {
      const { key, keySent, told } = identifiersSentByBoth(
        { ...OPERATION, ...earlier },
        { ...OPERATION, ...later },
      )
      return { key, keySent, told }
    }
    const all = { told: ['key', 'record'] } as const
    t.same(both(all, all), { key: 'k1', keySent: undefined, ...all })
    t.same(both({ told: ['record'] }, all).told, ['record'])
    t.same(both(all, { told: ['key'] }).told, ['key'])
    t.same(both({}, all).told, undefined, 'the earlier attempt told nothing')
    t.same(both(all, {}).told, undefined, 'the later attempt told nothing')
    t.same(both({ ...all, keySent: '"k1"' }, all), { key: 'k1', keySent: '"k1"', ...all }, 'either spelling')
    t.same(both(all, { ...all, keySent: '"k1"' }), { key: 'k1', keySent: '"k1"', ...all }, 'either spelling')
    t.same(both({ ...all, keySent: '"k1"' }, { ...all, keySent: '"k1"' }).told, all.told)
    t.same(both({ ...all, keySent: '"k1"' }, { ...all, keySent: '"k1";a=1' }).told, ['record'])
    t.same(both({ ...all, toldTo: 'a' }, { ...all, toldTo: 'b' }).told, undefined, 'sent to two upstreams')
    t.equal(
      identifiersSentByBoth({ ...OPERATION, ...all, toldTo: 'a' }, { ...OPERATION, ...all, toldTo: 'a' })
        .toldTo,
      'a',
    )
    t.match(identifiersSentByBoth(OPERATION, OPERATION), { route: 'pay', recipe: 'v1' })
  },
)

void t.test('V08 of two attempts that may both have executed, the longer lease counts', async (t) => {
  const lease = (earlier: Partial<Operation>, later: Partial<Operation>) =>
    identifiersSentByBoth({ ...OPERATION, ...earlier }, { ...OPERATION, ...later }).lease
  t.equal(lease({ lease: 1000 }, { lease: 3000 }), 3000)
  t.equal(lease({ lease: 3000 }, { lease: 1000 }), 3000)
  t.equal(lease({}, { lease: 1000 }), 1000)
  t.equal(lease({}, {}), undefined)
})

void t.test(
  'V07 "not found" is believed only if the upstream was told every identifier it is asked by',
  async (t) => {
    const asking = (path: string, headers: readonly string[] = []) => ({
      request: { method: 'GET', path, headers },
    })
    t.same(asksBy(asking('/a?k={key}', ['X-Record', '{record}'])), ['key', 'record'])
    t.same(asksBy(asking('/a')), [])
    const why = (path: string, headers: readonly string[], ...names: readonly ('key' | 'record')[]) =>
      whyUntold(asking(path, headers), { told: names, toldTo: TO }, TO)
    t.equal(why('/a?k={key}', [], 'key'), null)
    t.equal(why('/a/{record}', [], 'key', 'record'), null)
    t.match(why('/a/{record}', [], 'key'), /was not told \{record\} by/)
    t.match(why('/a?k={key}', ['X-Record', '{record}'], 'key'), /was not told \{record\} by/)
    t.match(why('/a?k={key}', ['X-Record', '{record}']), /was not told \{key\} and \{record\} by/)
    t.match(why('/a', [], 'key', 'record'), /names no record/)
    t.match(whyUntold(asking('/a?k={key}'), {}, TO), /was not told \{key\}/, 'an older record')
    for (const toldTo of [{}, { toldTo: upstreamTag('http://127.0.0.1:3001') }])
      t.match(
        whyUntold(asking('/a?k={key}'), { told: ['key'], ...toldTo }, TO),
        /sent to another `upstream.url`/,
      )
    t.match(TO, /^[A-Za-z0-9_-]{8}$/)
  },
)
