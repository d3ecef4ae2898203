import t from 'tap'
import { readLabel } from '../../src/core/label.ts'
import type { LabelSource } from '../../src/core/policy.ts'
import { atOnce } from '../../src/core/steps.ts'
import { matching } from './fixtures.ts'

const JSON_TYPE = ['Content-Type', 'application/json']

interface Sent {
  readonly path?: string
  readonly folded?: boolean
  readonly exact?: boolean
  readonly target?: string
  readonly headers?: readonly string[]
  readonly body?: string
}

function labelOf(
  source: LabelSource,
  { path = '/o', exact = false, folded = false, target = '/o', headers, body }: Sent,
) {
  const lines = headers ?? JSON_TYPE
  const folding = folded ? ({ case: 'insensitive', parameters: 'strip' } as const) : {}
  const match = { ...matching(['POST'], path, exact), ...folding }
  const request = { route: { match }, target, headers: lines }
  return atOnce(readLabel(source, request, { headers: lines, body: Buffer.from(body ?? '') }))
}

void t.test('§15.21 a JSON pointer takes strings, numbers, true and false', async (t) => {
  const at = (body: string, pointer = '/order_id') => labelOf({ kind: 'json', pointer }, { body })
  for (const [body, label] of [
    ['{"order_id":"ord_1"}', 'ord_1'],
    ['{"order_id":"\\u00fc \\"q\\""}', 'ü "q"'],
    ['{"order_id":12345678901234567890}', '12345678901234567890'],
    ['{"order_id":-1.50}', '-1.50'],
    ['{"order_id":true}', 'true'],
    ['{"order_id":""}', undefined],
    ['{"order_id":null}', undefined],
    ['{"order_id":{"a":1}}', undefined],
    ['{"order_id":[1]}', undefined],
    ['{"other":1}', undefined],
    ['{"order_id":1,"order_id":2}', undefined],
    ['no JSON', undefined],
    [`{"order_id":"${'x'.repeat(300)}"}`, 'x'.repeat(200)],
    [`{"order_id":"${'x'.repeat(199)}😀"}`, `${'x'.repeat(199)}\ufffd`],
  ] as const)
    t.equal(at(body), label, body)
  t.equal(at('{"data":[{"id":7}]}', '/data/0/id'), '7')
})

void t.test('§15.21 a header, and a part of the path as the client spelled it', async (t) => {
  const header = (headers: readonly string[]) => labelOf({ kind: 'header', name: 'x-order' }, { headers })
  t.equal(header(['X-Order', ' o1 ']), 'o1')
  t.equal(header(['x-order', 'a', 'X-ORDER', 'b']), 'a, b')
  t.equal(header(['X-Other', 'a']), undefined)
  const path = (target: string, exact = false, pattern = '/orders/:id/pay') =>
    labelOf({ kind: 'path', name: 'id' }, { path: pattern, exact, target })
  t.equal(path('/orders/A1/pay?id=2'), 'A1')
  t.equal(path('/orders//A1/./pay/'), 'A1')
  t.equal(path('/orders/a%2Fb%20c/pay'), 'a/b c')
  t.equal(path('/orders/100%25%FF/pay'), '100%25%FF', 'not UTF-8')
  t.equal(path('/orders/A1/pay', true), 'A1')
  t.equal(path('/o', false, '/o'), undefined, 'the pattern has no such part')
  t.equal(path('*'), undefined)
  const folded = (target: string) =>
    labelOf({ kind: 'path', name: 'id' }, { path: '/orders/:id/pay', folded: true, target })
  t.equal(folded('/ORDERS/Ab%20C;v=1/pay;x'), 'Ab C', 'without what does not count')
  t.equal(folded('/orders/;v=1/A1/pay'), 'A1')
})
