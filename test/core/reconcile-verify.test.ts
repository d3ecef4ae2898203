import t from 'tap'
import type { AnswerMeaning } from '../../src/core/reconcile/answer.ts'
import { type Verification, verifyStored } from '../../src/core/reconcile/verify.ts'
import type { CompletedResponse } from '../../src/core/record.ts'

function json(status: number, text: string, ...headers: string[]): CompletedResponse {
  const lines = ['Content-Type', 'application/json', ...headers]
  return {
    kept: true,
    response: { status, reason: '', headers: lines, body: Buffer.from(text), trailers: [] },
  }
}

const NOT_KEPT: CompletedResponse = { kept: false, why: 'outcome_only', status: 201, location: null }
const done = (result: CompletedResponse): AnswerMeaning => ({ kind: 'completed', result })

const TABLE: readonly (readonly [string, CompletedResponse, AnswerMeaning, Verification['kind'], RegExp?])[] =
  [
    ['unknown to the upstream', json(201, '1'), { kind: 'not_found' }, 'disagrees', /does not know/],
    [
      'another request’s',
      json(201, '1'),
      { kind: 'mismatch', why: '/key is not' },
      'disagrees',
      /^\/key is not$/,
    ],
    ['still pending', json(201, '1'), { kind: 'pending', why: 'still' }, 'undecided', /^still$/],
    ['no usable answer', json(201, '1'), { kind: 'unusable', why: 'no answer' }, 'undecided', /^no answer$/],
    [
      'refused where a success is stored',
      json(201, '1'),
      done(json(402, '1')),
      'disagrees',
      /^status 402 where 201 is stored$/,
    ],
    [
      'done where a refusal is stored',
      json(402, '1'),
      done(json(200, '1')),
      'disagrees',
      /^status 200 where 402 is stored$/,
    ],
    ['done where a failure is stored', json(500, '1'), done(json(200, '1')), 'disagrees'],
    ['another success with the same value', json(201, '{"a":1}'), done(json(200, '{"a":1}')), 'agrees'],
    ['another refusal with the same value', json(402, '{"a":1}'), done(json(409, '{"a":1}')), 'agrees'],
    [
      'the same value in another spelling',
      json(201, '{"a":1,"b":[2.0]}'),
      done(json(200, '{ "b": [2],\n"a": 1 }')),
      'agrees',
    ],
    ['another value', json(201, '{"a":1}'), done(json(200, '{"a":2}')), 'differs', /a different value/],
    ['another last digit', json(200, '9007199254740993'), done(json(200, '9007199254740992')), 'differs'],
    [
      'equal bytes without a canonical form',
      json(200, '9007199254740993'),
      done(json(200, '9007199254740993')),
      'agrees',
    ],
    [
      'another value without a canonical form',
      json(200, '9007199254740993'),
      done(json(200, '9007199254740995')),
      'differs',
    ],
    ['the stored body is not JSON', json(201, 'paid'), done(json(200, '{"a":2}')), 'agrees'],
    [
      'the stored body is encoded',
      json(201, '{"a":1}', 'Content-Encoding', 'gzip'),
      done(json(200, '{"a":2}')),
      'agrees',
    ],
    ['stored without a body', NOT_KEPT, done(json(200, '{"a":2}')), 'agrees'],
    ['found without a body', json(201, '{"a":2}'), done(NOT_KEPT), 'agrees'],
    ['refused where a success is stored without a body', NOT_KEPT, done(json(402, '{"a":2}')), 'disagrees'],
  ]

for (const [name, stored, verdict, kind, why] of TABLE)
  t.test(`O05 the verdict on a stored answer is ${kind}: ${name}`, async (t) => {
    const found = verifyStored(stored, verdict)
    t.equal(found.kind, kind)
    if (why !== undefined) t.match('why' in found ? found.why : '', why)
  })
